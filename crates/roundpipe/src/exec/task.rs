//! A task: one stage of a call for one microbatch.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use roundpipe_tensor::RngSite;

use super::call::{Call, CallSpec};
use crate::error::Error;
use crate::plan::Stage;

/// One stage of a call for one microbatch, on the worker that runs it.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub call: &'a Arc<Call>,
    pub stage: usize,
    pub microbatch: usize,
}

impl<'a> Task<'a> {
    pub fn spec(&self) -> &'a CallSpec {
        &self.call.spec
    }

    /// The layers of the stage and what it does with them.
    pub fn stage(&self) -> &'a Stage {
        &self.call.spec.stages[self.stage]
    }

    /// Whether this is the call's last microbatch.
    pub fn is_last(&self) -> bool {
        self.microbatch + 1 == self.call.spec.microbatches
    }

    /// The same stage for another microbatch.
    pub fn at(&self, microbatch: usize) -> Self {
        Self {
            microbatch,
            ..*self
        }
    }

    /// The gradient of the model's outputs, where they are the losses.
    pub fn output_gradient(&self) -> Option<f64> {
        let gradients = self.spec().output_gradients.as_ref()?;
        gradients.get(self.microbatch).copied()
    }

    /// Where a layer's random numbers begin.
    pub fn site(&self, layer: usize) -> RngSite {
        let spec = self.spec();
        RngSite {
            seed: spec.model.seed,
            // Calls count here, not optimizer steps: two calls of one step must not draw the same
            // numbers.
            step: spec.number,
            microbatch: self.microbatch as u32,
            // One more than the layers: the loss has a place as well.
            layer: (layer + spec.repeat * (spec.model.layers.len() + 1)) as u32,
            site: 0,
        }
    }

    /// Says in an error where it happened.
    pub fn error(&self, layer: Option<usize>, cause: roundpipe_tensor::Error) -> Error {
        self.call
            .error_at(self.stage, layer, Some(self.microbatch), cause)
    }
}

/// What a launcher is busy with, in words.
pub(crate) struct TaskLabel<'a>(pub Task<'a>, pub Option<usize>);

impl fmt::Display for TaskLabel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(task, layer) = self;
        let model = &task.spec().model;
        write!(f, "{}: stage {}, ", task.spec().name, task.stage)?;
        match layer {
            Some(layer) => write!(f, "layer {layer} ({})", model.layers[*layer].0)?,
            None => write!(f, "loss")?,
        }
        write!(f, ", microbatch {}", task.microbatch)
    }
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "without a message"
    };
    format!("it panicked: {text}")
}
