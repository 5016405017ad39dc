//! Forward, loss and backward in one call: [`RoundPipe::forward_backward`], and
//! [`RoundPipe::train`] for all options.
//!
//! A call returns when its losses are known. Its backward may still be under way: a failure there is
//! returned by the engine's next call, and gradients are read after
//! [`synchronize`](RoundPipe::synchronize).
//!
//! # Invariants
//! - Losses are added up in the order of microbatches, in f64, so the workers leave no trace in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use roundpipe_tensor::{Cx, HostTensor, Result as TensorResult, Tensor};

use super::RoundPipe;
use super::hooks::all_hidden;
use super::inputs::Inputs;
use super::outputs::{InputGrads, MicrobatchOutputs, host_tensor, read, wait_outputs};
use super::submit::{CallRequest, PendingCall};
use crate::batch::{MergeOutput, merge};
use crate::config::RunConfig;
use crate::error::Result;
use crate::exec::call::Call;
use crate::exec::model::LossFn;
use crate::plan::PlanKind;
use crate::tree::{Tree, TreePath};

/// What a loss function may return: one loss, or several.
pub trait IntoLosses {
    /// As a list.
    fn into_losses(self) -> Vec<Tensor>;
}

impl IntoLosses for Tensor {
    fn into_losses(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl IntoLosses for Vec<Tensor> {
    fn into_losses(self) -> Vec<Tensor> {
        self
    }
}

/// The losses of a call: for each that the loss function gave, what the microbatches add up to
/// ([`LossReduction`](crate::LossReduction)).
#[derive(Debug, Clone, PartialEq)]
pub struct Losses {
    sums: Vec<f64>,
    microbatches: Vec<Vec<f64>>,
}

impl Losses {
    /// The loss of the batch: all of [`Losses::each`] together.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Each loss over the batch: the sum over its microbatches, or the mean over its samples.
    pub fn each(&self) -> &[f64] {
        &self.sums
    }

    /// What each microbatch adds to [`Losses::each`]: its losses, or its share of the means.
    pub fn microbatches(&self) -> &[Vec<f64>] {
        &self.microbatches
    }
}

impl Losses {
    fn add(&mut self, microbatch: Vec<f64>) {
        // A loss function may return more terms for one microbatch than for another.
        self.sums.resize(self.sums.len().max(microbatch.len()), 0.0);
        for (sum, value) in self.sums.iter_mut().zip(&microbatch) {
            *sum += value;
        }
        self.microbatches.push(microbatch);
    }
}

/// What a forward and backward in one call gives.
#[derive(Debug)]
pub struct TrainOutput {
    /// The losses.
    pub losses: Losses,
    /// The merged outputs, if they were asked for and `merge_output` is not off.
    pub outputs: Option<Tree<HostTensor>>,
    /// The outputs of each microbatch, if they were asked for.
    pub unmerged: Option<MicrobatchOutputs>,
    /// The gradients of the inputs, if `input_grads` asked for them.
    pub input_grads: Option<InputGrads>,
    /// The merged outputs of the layers that [`RunConfig::hidden`] asked for, by name.
    pub hidden: BTreeMap<String, Tree<HostTensor>>,
}

impl<M> RoundPipe<M> {
    /// Forward, loss and backward in one call. `loss` is called for each microbatch; the batch's
    /// loss is the sum over microbatches, or with [`LossReduction::Mean`](crate::LossReduction) in
    /// the run configuration the mean over samples. See [`RoundPipe::train`] for all options.
    ///
    /// # Errors
    /// As [`TrainCall::run`].
    pub fn forward_backward<L: IntoLosses>(
        &self,
        inputs: impl Into<Inputs>,
        labels: impl Into<Tree<HostTensor>>,
        loss: impl Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    ) -> Result<Losses> {
        Ok(self.train(inputs).labels(labels).loss(loss).run()?.losses)
    }

    /// A forward and backward with all options.
    pub fn train(&self, inputs: impl Into<Inputs>) -> TrainCall<'_, M> {
        TrainCall {
            engine: self,
            inputs: inputs.into(),
            labels: Tree::None,
            loss: None,
            outputs: false,
            config: RunConfig::default(),
        }
    }
}

/// A forward and backward to be run, with all options.
pub struct TrainCall<'a, M> {
    engine: &'a RoundPipe<M>,
    inputs: Inputs,
    labels: Tree<HostTensor>,
    /// `None`: the model's outputs are the losses.
    loss: Option<LossFn>,
    outputs: bool,
    config: RunConfig,
}

impl<M> TrainCall<'_, M> {
    /// Labels, given to the loss function microbatch by microbatch.
    #[must_use]
    pub fn labels(mut self, labels: impl Into<Tree<HostTensor>>) -> Self {
        self.labels = labels.into();
        self
    }

    /// Turns outputs and labels of a microbatch into one loss or several, which are added up over
    /// microbatches as [`RunConfig::loss_reduction`] says. Without one, the model's output is the
    /// loss.
    #[must_use]
    pub fn loss<L: IntoLosses>(
        mut self,
        loss: impl Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    ) -> Self {
        self.loss = Some(Arc::new(move |cx, outputs, labels| {
            Ok(loss(cx, outputs, labels)?.into_losses())
        }));
        self
    }

    /// Asks for the outputs as well, merged unless `merge_output` is off.
    #[must_use]
    pub fn return_outputs(mut self) -> Self {
        self.outputs = true;
        self
    }

    /// The run configuration of this call, over the model's.
    #[must_use]
    pub fn config(mut self, config: RunConfig) -> Self {
        self.config = config;
        self
    }

    /// Runs it. Returns when the losses are known; the backward may still be under way, and what
    /// goes wrong there is returned by the engine's next call.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for inputs and options that cannot work;
    /// [`Error::Task`](crate::Error::Task) with the place of what failed.
    pub fn run(self) -> Result<TrainOutput> {
        let Self {
            engine,
            inputs,
            labels,
            loss,
            outputs: returns_outputs,
            config,
        } = self;
        let core = &engine.core;
        let request = CallRequest {
            part: engine.part,
            kind: PlanKind::Fused,
            inputs,
            labels,
            outputs_are_losses: loss.is_none(),
            loss: Some(loss.unwrap_or_else(|| Arc::new(|_, outputs, _| Ok(outputs.into_leaves())))),
            wants_outputs: returns_outputs,
            reads: true,
            config,
            place: None,
        };
        // `reads` holds the call open until `read` below has ended its part.
        let PendingCall {
            call,
            config,
            input_leaves,
            samples,
        } = core.submit(request)?;
        let (losses, outputs, hidden) = read(core, &call, |call| {
            let losses = wait_losses(call)?;
            // Behind the losses, and in the same reading: a merge that fails takes back the
            // gradients too.
            let merges = returns_outputs && !matches!(config.merge_output, MergeOutput::Off);
            let merged = merges.then(|| merge(wait_outputs(call)?, &config.merge_output));
            Ok((losses, merged.transpose()?, all_hidden(call)?))
        })?;
        let unmerged = returns_outputs.then(|| MicrobatchOutputs {
            call: call.clone(),
            samples,
            part: TreePath::default(),
        });
        let input_grads = config.input_grads.then(|| InputGrads {
            call,
            inputs: 0..input_leaves.len(),
            input_leaves,
        });
        Ok(TrainOutput {
            losses,
            outputs,
            unmerged,
            input_grads,
            hidden,
        })
    }
}

fn wait_losses(call: &Call) -> Result<Losses> {
    let mut losses = Losses {
        sums: Vec::new(),
        microbatches: Vec::new(),
    };
    for m in 0..call.spec.microbatches {
        let host_values = call.wait_losses("caller", m)?;
        let values = host_values
            .iter()
            .map(|p| Ok(host_tensor(p)?.item()?))
            .collect::<Result<Vec<f64>>>();
        // The copy to the host is the first to see a fault of the loss's kernels, so it names the
        // fused stage.
        let values = values
            .map_err(|error| call.error_at(call.spec.forward_stages, None, Some(m), error))?;
        call.confirm()?;
        losses.add(values);
    }
    Ok(losses)
}
