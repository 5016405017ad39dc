//! A forward by itself, and the backward that may follow: [`RoundPipe::forward`] and [`Forward`].
//!
//! A [`Forward`] that may be differentiated keeps what its backward needs until it is used or
//! dropped. It can go back once, before the next step: after that the weights it ran with are gone.

use std::sync::Arc;

use roundpipe_tensor::{HostTensor, Shape, Tensor};

use super::RoundPipe;
use super::core::Core;
use super::inputs::{Inputs, host_value};
use super::outputs::{InputGrads, InputLeaves, MicrobatchOutputs, merged, read, wait_outputs};
use super::submit::{CallRequest, PendingCall, RandomPlace};
use crate::batch::{MergeOutput, merge, split_grads};
use crate::config::{OutputDevice, RunConfig};
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::stage_value::{Seed, SeedOf};
use crate::plan::PlanKind;
use crate::tree::{Tree, TreePath};

impl<M> RoundPipe<M> {
    /// Runs the model on a batch. Calls may follow at once; `merge_output` off does not even wait
    /// for the outputs.
    ///
    /// # Errors
    /// [`Error::Config`] for inputs and options that cannot work; [`Error::Task`] with the place of
    /// what failed.
    pub fn forward(&self, inputs: impl Into<Inputs>, config: &RunConfig) -> Result<Forward> {
        self.forward_at(inputs.into(), config, None)
    }

    /// The same at a place in the random stream that a forward over several parts has.
    pub(crate) fn forward_at(
        &self,
        inputs: Inputs,
        config: &RunConfig,
        place: Option<RandomPlace>,
    ) -> Result<Forward> {
        let core = &self.core;
        // Only to learn what kind of call this is; `submit` resolves the request for itself.
        let base = &core.parts[self.part].config;
        let resolved = config.over(base).resolve(core.ring.len())?;
        let differentiable = resolved.requires_grad;
        let kind = if differentiable {
            PlanKind::Train
        } else {
            PlanKind::Infer
        };
        // Unmerged outputs are read microbatch by microbatch later, or by another engine.
        let reads = !matches!(resolved.merge_output, MergeOutput::Off);
        let request = CallRequest {
            part: self.part,
            kind,
            inputs,
            labels: Tree::None,
            loss: None,
            outputs_are_losses: false,
            wants_outputs: true,
            reads,
            config: config.clone(),
            place,
        };
        let PendingCall {
            call,
            config,
            input_leaves,
            samples,
        } = core.submit(request)?;
        let mut forward = Forward {
            core: core.clone(),
            call,
            merge: config.merge_output,
            output: None,
            input_leaves,
            samples,
            differentiable,
            on: config.output_device,
        };
        if reads {
            let output = read(core, &forward.call, |call| {
                merge(wait_outputs(call)?, &forward.merge)
            })?;
            forward.output = Some(output);
        }
        Ok(forward)
    }
}

/// What a forward gave, and the way back.
pub struct Forward {
    pub(super) core: Arc<Core>,
    pub(super) call: Arc<Call>,
    merge: MergeOutput,
    output: Option<Tree<HostTensor>>,
    input_leaves: Arc<[InputLeaves]>,
    samples: Option<Arc<[usize]>>,
    pub(super) differentiable: bool,
    on: OutputDevice,
}

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Forward({:?})", self.output)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // The backward that the call was held open for will not come, or has been queued.
        if self.differentiable {
            self.call.let_go();
        }
    }
}

impl Forward {
    /// The merged output.
    ///
    /// # Errors
    /// [`Error::Config`] when `merge_output` is off.
    pub fn output(&self) -> Result<&Tree<HostTensor>> {
        let unmerged =
            || Error::config("merge_output", "it is off; take the outputs by `unmerged`");
        self.output.as_ref().ok_or_else(unmerged)
    }

    /// The output of each microbatch on the worker that `output_device` names, to compute on with a
    /// [`Cx`](crate::Cx) of that worker. They carry no gradient; give theirs to
    /// [`Forward::backward`].
    ///
    /// # Errors
    /// [`Error::Config`] when `output_device` is the host; otherwise what went wrong.
    pub fn tensors(&self) -> Result<Vec<Tree<Tensor>>> {
        let OutputDevice::Worker(worker) = self.on else {
            return Err(Error::config(
                "output_device",
                "it is the host; take the outputs by `output`",
            ));
        };
        let port = self.core.ring.port(worker);
        let mut tensors = Vec::with_capacity(self.call.spec.microbatches);
        for microbatch in 0..self.call.spec.microbatches {
            let value = self.call.wait_output("caller", microbatch);
            let value = value.map_err(|error| self.core.failed(error))?;
            tensors.push(value.try_map(|leaf| match leaf.resident {
                Some(resident) => Ok(resident.tensor.clone()),
                None => Ok::<_, Error>(port.receive("output", &leaf.host)?.land()?),
            })?);
        }
        Ok(tensors)
    }

    /// Whether a backward may follow.
    pub(crate) fn is_differentiable(&self) -> bool {
        self.differentiable
    }

    /// The output of each microbatch, whether merged or not.
    pub fn unmerged(&self) -> MicrobatchOutputs {
        MicrobatchOutputs {
            call: self.call.clone(),
            samples: self.samples.clone(),
            part: TreePath::default(),
        }
    }

    /// Runs the backward from gradients of the merged output. Gradients of parameters are added to
    /// those since the last step; those of inputs are returned if `input_grads` asked for them.
    ///
    /// # Errors
    /// [`Error::Config`] without `requires_grad`, or when a step was made since; otherwise what
    /// goes wrong.
    pub fn backward(self, grads: impl Into<Tree<HostTensor>>) -> Result<InputGrads> {
        self.backward_some(&grads.into().map_ref(|t| Some(t.clone())))
    }

    /// As [`Forward::backward`], where some outputs have no gradient.
    pub(crate) fn backward_some(self, grads: &Tree<Option<HostTensor>>) -> Result<InputGrads> {
        let mut leaves = grads.leaves().into_iter().flatten();
        if let Some(grad) = leaves.find(|grad| !grad.dtype().is_float()) {
            let what = format!(
                "a gradient is {} {}; gradients are floats",
                grad.dtype(),
                grad.shape()
            );
            return Err(Error::config("backward", what));
        }
        let shapes = (0..self.call.spec.microbatches).map(|m| {
            let value = self.call.wait_output("caller", m)?;
            Ok(value
                .leaves()
                .iter()
                .map(|leaf| *leaf.host.shape())
                .collect())
        });
        let shapes = shapes.collect::<Result<Vec<Vec<Shape>>>>();
        let shapes = shapes.map_err(|error| self.core.failed(error))?;
        // The gradients are cut where the outputs were put together, so their sizes decide, not the
        // batch's.
        let parts = split_grads(grads, &shapes, &merged(&self.merge))?;
        let seeds = parts.into_iter().map(|leaves| {
            let given = leaves
                .into_iter()
                .map(|leaf| leaf.as_ref().map(host_value).transpose());
            Ok(Seed::Given(given.collect::<Result<_>>()?))
        });
        let seeds = seeds.collect::<Result<Vec<_>>>()?;
        self.run_back(seeds)
    }

    /// Runs the backward from gradients that another engine computes for its inputs, microbatch by
    /// microbatch as they come, without a host wait. Inputs that are outputs of this forward, or
    /// parts of them, are found by themselves; those that are not are left out. If none is, the
    /// gradients are taken by position.
    ///
    /// # Errors
    /// As [`Forward::backward`].
    pub fn backward_from(self, grads: &InputGrads) -> Result<InputGrads> {
        self.backward_from_all([grads])
    }

    /// As [`Forward::backward_from`], where several calls used these outputs: their gradients are
    /// added in the order in which they are given.
    ///
    /// # Errors
    /// As [`Forward::backward`].
    pub fn backward_from_all<'a>(
        self,
        grads: impl IntoIterator<Item = &'a InputGrads>,
    ) -> Result<InputGrads> {
        let grads: Vec<&InputGrads> = grads.into_iter().collect();
        let microbatches = self.call.spec.microbatches;
        // Microbatch m of one engine goes back into microbatch m of the other.
        if let Some(other) = grads.iter().find(|grads| grads.len() != microbatches) {
            let what = format!(
                "gradients of {} microbatches for {microbatches}",
                other.len()
            );
            return Err(Error::config("backward", what));
        }
        let seeds = (0..microbatches).map(|_| {
            let each = grads.iter().map(|grads| SeedOf {
                call: grads.call.clone(),
                choose: grads.choose(&self.call),
            });
            Seed::Of(each.collect())
        });
        let seeds = seeds.collect();
        self.run_back(seeds)
    }

    pub(super) fn run_back(self, seeds: Vec<Seed>) -> Result<InputGrads> {
        if !self.differentiable {
            return Err(Error::config(
                "backward",
                "the forward was run with requires_grad off",
            ));
        }
        self.core.submit_backward(&self.call, seeds)?;
        Ok(InputGrads {
            call: self.call.clone(),
            inputs: 0..self.input_leaves.len(),
            input_leaves: self.input_leaves.clone(),
        })
    }
}
