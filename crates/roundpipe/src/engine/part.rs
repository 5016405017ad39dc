//! Layers of an engine that are called by themselves.
//!
//! An engine has one part, all its layers, unless `wrap` made it: then every module that the rules
//! chose is a part, and the model's own forward calls them. The parts have one store, one
//! optimizer and one sequence of calls and steps, which is what makes them one model: a parameter
//! that two parts share has one home, a step updates all parts or none, and every part reads the
//! same version.
//!
//! It refuses to update or to save a part by itself.
//!
//! # Invariants
//! - Parts are ranges of layers in the order of the model. Plans count the layers of their part from
//!   0; everything behind [`EnginePart::stages`] counts those of the model.

use std::ops::Range;
use std::sync::Arc;

use super::RoundPipe;
use super::planner::Planner;
use crate::config::{Lag, RunConfig};
use crate::error::{Error, Result};
use crate::exec::model::Model;
use crate::exec::ring::Ring;
use crate::plan::{ExecutePlan, PlanKind, Stage};

/// What a part is made from.
pub(crate) struct PartSpec {
    pub name: String,
    pub layers: Range<usize>,
    pub config: RunConfig,
}

/// Layers that are called by themselves, and the plans of those calls.
pub(crate) struct EnginePart {
    /// What errors call it.
    pub name: Arc<str>,
    pub layers: Range<usize>,
    /// The base of its calls' run configurations.
    pub config: RunConfig,
    pub(super) planner: Planner,
}

impl EnginePart {
    pub(super) fn new(spec: PartSpec, model: &Arc<Model>, ring: &Ring, max_lag: Lag) -> Self {
        let PartSpec {
            name,
            layers,
            config,
        } = spec;
        Self {
            name: name.into(),
            planner: Planner::new(model.clone(), layers.clone(), ring.clone(), max_lag),
            layers,
            config,
        }
    }

    /// The stages of a plan, by layers of the model.
    pub(super) fn stages(&self, plan: &ExecutePlan, kind: PlanKind) -> Vec<Stage> {
        let first = self.layers.start;
        let mut stages = plan.stages(kind);
        for stage in &mut stages {
            stage.layers = first + stage.layers.start..first + stage.layers.end;
        }
        stages
    }
}

impl<M> RoundPipe<M> {
    /// A handle to one part, dereferencing to the module that it was made from.
    pub(crate) fn part<O>(&self, part: usize, original: O) -> RoundPipe<O> {
        RoundPipe {
            original: Arc::new(original),
            core: self.core.clone(),
            part,
            _watchdog: self._watchdog.clone(),
            _handle: self._handle.clone(),
        }
    }

    /// Drops the gradients since the last step, because those of a call among them are not all
    /// there.
    pub(crate) fn drop_gradients(&self) {
        self.core.drop_gradients();
    }

    /// The place in the random stream of a forward over several parts.
    pub(crate) fn next_number(&self) -> u64 {
        self.core.next_number()
    }

    /// Gives it back after a failure outside the engine.
    pub(crate) fn return_number(&self, number: u64) {
        self.core.return_number(number);
    }

    /// The layers of this part.
    pub(super) fn layers(&self) -> Range<usize> {
        self.core.parts[self.part].layers.clone()
    }

    /// Whether a backward of this part has parameters to compute gradients of.
    pub(crate) fn has_trainable(&self) -> bool {
        self.core.has_trainable(self.part)
    }

    /// Refuses for a part what only the whole model can do.
    ///
    /// # Errors
    /// [`Error::Config`] then.
    pub(super) fn check_whole(&self, what: &'static str) -> Result<()> {
        let layers = self.layers();
        if layers.len() == self.core.model.layers.len() {
            return Ok(());
        }
        let why = format!(
            "{} is a part of {}, whose parts have one optimizer; call it on the `AutoWrapped`",
            self.name(),
            self.core.model.name
        );
        Err(Error::config(what, why))
    }
}
