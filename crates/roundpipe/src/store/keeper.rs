//! Which store trains a parameter.
//!
//! Every parameter in a store knows its keeper. A second store that would train it is refused; one
//! that only reads it waits for the keeper's updates first. The keeper does not keep the store alive:
//! parameters of a store that was dropped are free.
//!
//! # Invariants
//! - A parameter is trained by at most one living store.
//! - A retired store makes no update, so another may train its parameters at once.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use roundpipe_tensor::{Keeper, ParamId};

use super::{LayerParams, Store};
use crate::error::{Error, Result};
use crate::version::Gate;

/// A store as its parameters know it.
#[derive(Debug)]
pub(super) struct StoreKeeper {
    pub(super) name: String,
    pub(super) gate: Arc<Gate>,
    pub(super) trained: HashSet<ParamId>,
    /// The version that all layers will have once the updates that were asked for are done.
    pub(super) asked: AtomicU64,
    /// Whether its engine is gone: calls that the user still holds keep the memory, but nothing is
    /// updated any more.
    pub(super) retired: AtomicBool,
}

impl StoreKeeper {
    pub fn new(name: &str, gate: &Arc<Gate>, trained: HashSet<ParamId>) -> Self {
        Self {
            name: name.to_owned(),
            gate: gate.clone(),
            trained,
            asked: AtomicU64::new(0),
            retired: AtomicBool::new(false),
        }
    }
}

impl Keeper for StoreKeeper {
    fn name(&self) -> &str {
        &self.name
    }

    fn trains(&self, param: ParamId) -> bool {
        !self.retired.load(Ordering::SeqCst) && self.trained.contains(&param)
    }

    fn wait_for_updates(&self) {
        self.gate
            .wait_all(|version| version >= self.asked.load(Ordering::SeqCst));
    }
}

impl Store {
    /// Says which version all layers will have once the updates that were asked for are done.
    pub(crate) fn set_asked(&self, version: u64) {
        self.shared.keeper.asked.store(version, Ordering::SeqCst);
    }

    /// What [`Store::set_asked`] said last.
    pub(crate) fn asked(&self) -> u64 {
        self.shared.keeper.asked.load(Ordering::SeqCst)
    }

    /// Another store may train the parameters from now on; this one makes no update any more.
    pub(crate) fn retire(&self) {
        self.shared.keeper.retired.store(true, Ordering::SeqCst);
    }

    /// Waits for the updates of other engines that were asked for and write parameters which this
    /// store only reads.
    pub(crate) fn wait_for_other_keepers(&self) {
        let own: Arc<dyn Keeper> = self.shared.keeper.clone();
        let mut awaited: Vec<Arc<dyn Keeper>> = vec![own];
        for param in self
            .layers
            .iter()
            .flat_map(|layer| &layer.params)
            .filter(|param| !param.trainable)
        {
            let Some(keeper) = param.param.keeper() else {
                continue;
            };
            if !awaited.iter().any(|known| Arc::ptr_eq(known, &keeper)) {
                // Each keeper once: a model has many parameters and seldom more than one other
                // engine.
                keeper.wait_for_updates();
                awaited.push(keeper);
            }
        }
    }
}

/// The trainable parameters of `layers`.
///
/// # Errors
/// [`Error::Config`] when a living store trains one of them: each would move it to slabs of its
/// own, and train a copy.
pub(super) fn claimable(layers: &[LayerParams]) -> Result<HashSet<ParamId>> {
    let mut trained = HashSet::new();
    for (name, param) in layers.iter().flat_map(|(_, params)| params) {
        if !param.is_trainable() {
            continue;
        }
        if let Some(keeper) = param.keeper().filter(|keeper| keeper.trains(param.id())) {
            let what = format!(
                "{name} is trained by {}; drop that first, use it for these calls too, or build this engine with \
                 inference(true)",
                keeper.name()
            );
            return Err(Error::config("model", what));
        }
        trained.insert(param.id());
    }
    Ok(trained)
}
