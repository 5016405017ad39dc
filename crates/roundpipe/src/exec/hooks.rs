//! What a user sees of layers while they run: outputs and gradients shown to hooks, and outputs of
//! hidden layers kept for the caller.
//!
//! A value is copied to host memory behind the layer's kernels. For a hook the launcher waits for
//! the copy and calls it; a hidden output travels on its own, and the caller waits for it.
//!
//! Hooks change nothing: they get copies, and what a layer computes does not depend on them. They
//! cost time, since a worker waits for each.
//!
//! # Invariants
//! - A hook sees each layer and microbatch of a call once: a recompute shows nothing.
//! - A call shows what was registered when it was submitted.
//! - Hidden outputs of a microbatch are there before its output or its losses.

use std::sync::Arc;

use roundpipe_tensor::transfer::HostValue;
use roundpipe_tensor::{HostTensor, Result as TensorResult, Tensor};

use super::launcher::Launcher;
use super::run_layer::Activation;
use super::task::Task;
use crate::error::Result;
use crate::tree::Tree;

/// The output of a layer for one microbatch, as a hook sees it.
#[derive(Debug, Clone)]
pub struct LayerOutput<'a> {
    /// The layer's name.
    pub layer: &'a str,
    /// The call's number among those of the engine.
    pub call: u64,
    /// The microbatch, from 0.
    pub microbatch: usize,
    /// A copy of the output.
    pub output: Tree<HostTensor>,
}

/// The gradients of a layer's output for one microbatch, as a hook sees them.
#[derive(Debug, Clone)]
pub struct LayerGradient<'a> {
    /// The layer's name.
    pub layer: &'a str,
    /// The call's number among those of the engine.
    pub call: u64,
    /// The microbatch, from 0.
    pub microbatch: usize,
    /// A copy of the gradient of each tensor of the output, in the order of
    /// [`Tree::leaves`]; `None` where no gradient flows.
    pub grads: Vec<Option<HostTensor>>,
}

/// A closure of the user.
#[derive(Clone)]
pub(crate) enum Hook {
    Output(Arc<dyn Fn(&LayerOutput<'_>) + Send + Sync>),
    Gradient(Arc<dyn Fn(&LayerGradient<'_>) + Send + Sync>),
}

/// The hooks of a model, each with its number and layer.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    registered: Vec<(u64, usize, Hook)>,
    next: u64,
}

impl Hooks {
    /// Adds a hook and gives its number.
    pub fn add(&mut self, layer: usize, hook: Hook) -> u64 {
        let number = self.next;
        self.next += 1;
        self.registered.push((number, layer, hook));
        number
    }

    pub fn remove(&mut self, number: u64) {
        self.registered.retain(|(other, ..)| *other != number);
    }

    fn of(&self, layer: usize) -> impl Iterator<Item = &Hook> {
        let own = move |entry: &&(u64, usize, Hook)| entry.1 == layer;
        self.registered.iter().filter(own).map(|(.., hook)| hook)
    }
}

impl Launcher {
    /// Shows what a layer gave to its hooks, and keeps it for the caller if asked to.
    pub(super) fn show_output(
        &self,
        task: &Task<'_>,
        layer: usize,
        output: &Tree<Activation>,
    ) -> Result<()> {
        let spec = task.spec();
        let hooks = spec.hooks.of(layer).filter_map(|hook| match hook {
            Hook::Output(hook) => Some(hook),
            Hook::Gradient(_) => None,
        });
        let mut hooks = hooks.peekable();
        let is_hidden = spec.hidden.contains(&layer);
        if !is_hidden && hooks.peek().is_none() {
            return Ok(());
        }
        let sent = output.clone().try_map(|activation| {
            self.send_value(task, layer, "layer output", &activation.tensor)
        })?;
        self.bound_outbox(task, layer)?;
        if is_hidden {
            task.call.put_hidden(layer, task.microbatch, sent.clone());
        }
        if hooks.peek().is_none() {
            return Ok(());
        }
        let landed = sent.try_map(|value| landed(&value));
        let shown = LayerOutput {
            layer: &spec.model.layers[layer].0,
            call: spec.id,
            microbatch: task.microbatch,
            output: landed.map_err(|error| task.error(Some(layer), error))?,
        };
        hooks.for_each(|hook| hook(&shown));
        Ok(())
    }

    /// Shows the gradients of a layer's output to its hooks.
    pub(super) fn show_gradients(
        &self,
        task: &Task<'_>,
        layer: usize,
        grads: &[Option<Tensor>],
    ) -> Result<()> {
        let spec = task.spec();
        let hooks = spec.hooks.of(layer).filter_map(|hook| match hook {
            Hook::Gradient(hook) => Some(hook),
            Hook::Output(_) => None,
        });
        let mut hooks = hooks.peekable();
        if hooks.peek().is_none() {
            return Ok(());
        }
        let mut shown = Vec::with_capacity(grads.len());
        for grad in grads {
            let Some(grad) = grad else {
                shown.push(None);
                continue;
            };
            let sent = self.send_value(task, layer, "layer gradient", grad)?;
            let tensor = landed(&sent).map_err(|error| task.error(Some(layer), error))?;
            shown.push(Some(tensor));
        }
        self.bound_outbox(task, layer)?;
        let shown = LayerGradient {
            layer: &spec.model.layers[layer].0,
            call: spec.id,
            microbatch: task.microbatch,
            grads: shown,
        };
        hooks.for_each(|hook| hook(&shown));
        Ok(())
    }

    /// Lets go of what was sent beyond the outbox's share: plans do not count these copies.
    fn bound_outbox(&self, task: &Task<'_>, layer: usize) -> Result<()> {
        let room = self.port.make_room(self.budget.outbox);
        room.map_err(|error| task.error(Some(layer), error))?;
        Ok(())
    }
}

/// Waits for a copy to land.
fn landed(value: &HostValue) -> TensorResult<HostTensor> {
    HostTensor::new(value.fence()?, value.dtype(), value.shape())
}
