//! An optimizer for a plain loop: parameters on one side, gradients of one tape on the other.
//!
//! The path of a gradient: [`Gradients`] -> an f32 sum per parameter ([`Optimizer::add`], which adds
//! up calls) -> the pass of a `Store`, which holds the sums, the masters and the moments as it
//! does for an engine ([`Optimizer::step`]). There is one version of the weights and no thread but
//! the caller's, so a step is done when it returns.
//!
//! Refused: a parameter that an engine or another optimizer trains, until that one is dropped.
//!
//! # Invariants
//! - A frozen parameter has no state and is never written.
//! - A step either updates every parameter or, when a slab is in use elsewhere, none.
//! - The same gradients in the same order give the same bits, for any number of threads.

use std::collections::HashMap;

use roundpipe_tensor::optim::{self, Floats, FloatsMut};
use roundpipe_tensor::{Cpu, DType, Gradients, HostBuf, Param, ParamId, Pin};

use crate::error::Result;
use crate::groups::{ParamGroup, ParamRule};
use crate::optim::{Rule, StepReport, Update};
use crate::store::{Store, StoreConfig};

/// The only layer of the store.
const LAYER: usize = 0;

/// Updates parameters in place.
pub struct Optimizer {
    store: Store,
    /// The place of each parameter in the store.
    places: HashMap<ParamId, usize>,
    /// Where a gradient lands that is added to another; grows to the largest.
    landing: Option<HostBuf>,
}

impl Optimizer {
    /// Takes the trainable ones of `params`, each once, and moves them into slabs of its own.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for settings that no step would accept, a type that
    /// cannot be optimised, and a parameter that is trained elsewhere; when the system has no
    /// memory.
    pub fn new(
        params: impl IntoIterator<Item = (String, Param)>,
        rule: impl Into<Rule>,
    ) -> Result<Self> {
        let rule = rule.into();
        rule.check_settings()?;
        let mut places = HashMap::new();
        let mut trained = Vec::new();
        for (name, param) in params {
            if param.is_trainable() && !places.contains_key(&param.id()) {
                places.insert(param.id(), trained.len());
                trained.push((name, param));
            }
        }
        let config = StoreConfig {
            name: "an optimizer".to_owned(),
            pin: Pin::Off,
            rule: Some(rule),
            // Calls are added up in f32, whatever the type of the weights.
            grad_dtype: Some(DType::F32),
            ..StoreConfig::new(Cpu::new(Some(1))?)
        };
        let store = Store::of_params(vec![("optimizer".to_owned(), trained)], config)?;
        store.prepare()?;
        Ok(Self {
            store,
            places,
            landing: None,
        })
    }

    /// Replaces the groups of parameters with settings of their own, from the next step on.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a pattern that matches no parameter and for
    /// settings that the rule does not have or accept; the groups are as before then.
    pub fn set_groups(&mut self, groups: impl IntoIterator<Item = ParamGroup>) -> Result<()> {
        let groups: Vec<_> = groups.into_iter().collect();
        self.store.set_groups(&groups)
    }

    /// Which rule updates each parameter from the next step on. Each prints as a line.
    pub fn param_rules(&self) -> Vec<ParamRule> {
        self.store.param_rules()
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.store.steps()
    }

    /// Bytes of host memory beside the working weights.
    pub fn state_bytes(&self) -> usize {
        let bytes = self.store.host_bytes();
        bytes.total() - bytes.weights
    }

    /// Adds gradients to those since the last step. Gradients of parameters this optimizer does not
    /// have are left out.
    ///
    /// # Errors
    /// When the device failed or a slab is in use elsewhere.
    pub fn add(&mut self, gradients: &Gradients) -> Result<()> {
        for (param, grad) in gradients.params() {
            let Some(&place) = self.places.get(&param.id()) else {
                continue;
            };
            let sum = self.sum(place)?;
            if self.store.layer(LAYER).filled(place) {
                let landing = landing(&mut self.landing, sum.len())?;
                grad.read_into(&mut landing.write(0..landing.len())?)?;
                self.add_values(place, Floats::F32(landing.read_all()?.as_slice()))?;
            } else {
                grad.read_into(&mut sum.write(0..sum.len())?)?;
                self.store.layer(LAYER).set_filled(place, true);
            }
        }
        Ok(())
    }

    /// Adds a gradient in host memory to those of `param` since the last step; it is left out when
    /// this optimizer does not have the parameter. Lets a plain loop round gradients as the engine
    /// does.
    ///
    /// # Errors
    /// When it has not as many elements as the parameter, or a slab is in use elsewhere.
    pub fn add_grad(&mut self, param: &Param, values: Floats<'_>) -> Result<()> {
        match self.places.get(&param.id()) {
            Some(&place) => self.add_values(place, values),
            None => Ok(()),
        }
    }

    /// Updates every parameter that has a gradient and starts the sums anew. A step whose gradients
    /// are not all finite is skipped, unless the update says otherwise.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when there are no gradients or an option makes no
    /// sense; a parameter that a pass still reads is an error that leaves all parameters as they
    /// were.
    pub fn step(&mut self, update: &Update) -> Result<StepReport> {
        let next_version = self.store.layer(LAYER).versions().current() + 1;
        self.store.step(update, next_version, &self.store.abort())
    }

    /// Forgets the gradients added since the last step.
    pub fn zero_grad(&mut self) {
        self.store.clear_gradients();
    }

    /// Where the gradients of a parameter are summed.
    fn sum(&self, place: usize) -> Result<HostBuf> {
        let range = self.store.layer(LAYER).grad_range(place)?;
        Ok(range.expect("only trainable parameters are taken"))
    }

    fn add_values(&self, place: usize, values: Floats<'_>) -> Result<()> {
        let sum = self.sum(place)?;
        let mut sum = sum.write(0..sum.len())?;
        let threads = &self.store.shared.threads;
        let layer = self.store.layer(LAYER);
        if layer.filled(place) {
            optim::accumulate(threads, values, sum.as_mut_slice())?;
        } else {
            optim::cast(threads, values, FloatsMut::F32(sum.as_mut_slice()))?;
            layer.set_filled(place, true);
        }
        Ok(())
    }
}

/// The first `bytes` bytes of `buf`, which is made or grown as needed.
fn landing(buf: &mut Option<HostBuf>, bytes: usize) -> Result<HostBuf> {
    match buf {
        Some(buf) if buf.len() >= bytes => Ok(buf.slice(0..bytes)?),
        _ => Ok(buf
            .insert(HostBuf::zeroed("gradient landing", bytes)?)
            .clone()),
    }
}
