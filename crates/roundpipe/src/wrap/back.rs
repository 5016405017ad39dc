//! The way back through a forward over engines: from gradients of the output to those of all
//! parameters, and of the model's inputs.
//!
//! Calls are walked from the last to the first. Each gathers the gradients of its outputs from all
//! that took them, then goes back itself: an engine by its backward, a computation on the host by
//! its tape. Where one engine alone took the outputs of another, unmerged, gradients pass between
//! them microbatch by microbatch, without a host wait.
//!
//! It refuses an output that has no way back, and values that an engine cut in a way of its own.
//!
//! # Invariants
//! - Gradients of several uses are added one by one, in the type of the value, those of the last
//!   call first and in a call in the order of its inputs: the order of a tape over the whole model.
//! - A walk that fails leaves no gradients behind, neither its own nor those since the last step,
//!   to which some of its own were added already.

use std::sync::Arc;

use roundpipe_tensor::{Cx, Gradients, HostTensor};

use super::auto::Shared;
use super::record::{Body, Called, HostCall, download};
use super::run::{Origin, Value};
use crate::engine::{Forward, InputGrads};
use crate::error::{Error, Result};
use crate::tree::Tree;

/// What a forward gave, and the way back.
pub struct AutoForward {
    pub(super) shared: Arc<Shared>,
    /// Its place in the random stream.
    pub(super) number: u64,
    pub(super) calls: Vec<Called>,
    pub(super) output: Tree<HostTensor>,
    pub(super) value: Value,
}

impl std::fmt::Debug for AutoForward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AutoForward({} calls)", self.calls.len())
    }
}

/// Gradients of the outputs of a call, or of some of them.
enum Flow {
    /// Of single tensors, by their numbers in the value.
    Merged(Vec<(usize, HostTensor)>),
    /// Of each microbatch, when they are computed.
    Later(InputGrads),
}

impl Flow {
    /// Those of each tensor of `value`, which they are the gradients of.
    fn merged(self, value: &Value, shared: &Shared) -> Result<Vec<(usize, HostTensor)>> {
        match self {
            Self::Merged(leaves) => Ok(leaves),
            Self::Later(grads) => gather(&grads, &value.to_host()?, shared),
        }
    }
}

/// The gradients of a model's inputs.
pub struct AutoInputGrads {
    shared: Arc<Shared>,
    inputs: Vec<OfInput>,
}

enum OfInput {
    Merged(Tree<Option<HostTensor>>),
    Later(InputGrads, Value),
}

impl std::fmt::Debug for AutoInputGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AutoInputGrads({} inputs)", self.inputs.len())
    }
}

impl AutoInputGrads {
    /// How many inputs there are: 0 unless `input_grads` asked for their gradients.
    pub fn len(&self) -> usize {
        self.inputs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    /// The gradients of one input over the whole batch: by position first, then by name in
    /// alphabetical order. Waits for them. `None` where the output does not depend on a tensor.
    ///
    /// # Errors
    /// [`Error::Config`] when there is no such input; what went wrong in the calls.
    pub fn merged(&self, input: usize) -> Result<Tree<Option<HostTensor>>> {
        match self.inputs.get(input) {
            Some(OfInput::Merged(grads)) => Ok(grads.clone()),
            Some(OfInput::Later(grads, value)) => {
                let value = value.to_host()?;
                of_tensors(gather(grads, &value, &self.shared)?, &value)
            }
            None => {
                let what = format!("there is no input {input} of {}", self.inputs.len());
                Err(Error::config("input_grads", what))
            }
        }
    }

    /// The same by microbatch, as far as they have been computed, where one engine alone took the
    /// input as it is.
    pub fn unmerged(&self, input: usize) -> Option<&InputGrads> {
        match self.inputs.get(input)? {
            OfInput::Later(grads, _) => Some(grads),
            OfInput::Merged(_) => None,
        }
    }
}

impl AutoForward {
    /// The merged output.
    pub fn output(&self) -> &Tree<HostTensor> {
        &self.output
    }

    /// Walks the calls of the forward back from gradients of its output, whatever way values took
    /// between them: branches, sums around an engine, engines that were called twice. Gradients of
    /// parameters are added to those since the last step; those of the model's inputs are returned
    /// if `input_grads` asked for them.
    ///
    /// # Errors
    /// [`Error::Config`], and nothing is computed, when no call of the forward can go back; as
    /// [`Forward::backward`]. A failure on the way drops the gradients since the last step.
    pub fn backward(self, grads: impl Into<Tree<HostTensor>>) -> Result<AutoInputGrads> {
        let Self {
            shared,
            number,
            calls,
            output,
            value,
        } = self;
        if !value.wants_grad() {
            let what = "the output depends on nothing that has a gradient: requires_grad is off, \
                        every parameter is frozen, or it was detached";
            return Err(Error::config("backward", what));
        }
        let grads = grads.into().into_leaves();
        let outputs = output.leaves().len();
        if grads.len() != outputs {
            let what = format!("{} gradients for {outputs} outputs", grads.len());
            return Err(Error::config("backward", what));
        }
        let mut walk = Walk {
            shared: shared.clone(),
            pending: calls.iter().map(|_| Vec::new()).collect(),
            host: Vec::new(),
        };
        let walked = walk
            .send(
                &value,
                Flow::Merged(grads.into_iter().enumerate().collect()),
            )
            .and_then(|()| walk.run(calls));
        walked.map_err(|error| {
            // Before the cause is looked for, which waits for all calls.
            let error = shared.failed(error);
            shared.drop_gradients();
            shared.return_number(number);
            error
        })
    }
}

/// A walk back.
struct Walk {
    shared: Arc<Shared>,
    /// For each call what came for its outputs, in the order in which it is added.
    pending: Vec<Vec<Flow>>,
    /// What went back on the host; it counts when all of the walk has.
    host: Vec<(Cx, Gradients)>,
}

impl Walk {
    fn run(&mut self, calls: Vec<Called>) -> Result<AutoInputGrads> {
        let mut inputs = Vec::new();
        for (index, called) in calls.into_iter().enumerate().rev() {
            let flows = std::mem::take(&mut self.pending[index]);
            match called.body {
                Body::Input if called.output.wants_grad() => {
                    inputs.push(self.of_input(called.output, flows)?);
                }
                Body::Input => {}
                // What nothing depends on has no gradients.
                _ if flows.is_empty() => {}
                Body::Engine(forward) => {
                    let grads = self.back_engine(*forward, &called.output, flows)?;
                    for (arg, input) in called.inputs.iter().enumerate() {
                        if input.wants_grad() {
                            self.send(input, Flow::Later(grads.arg(arg)?))?;
                        }
                    }
                }
                Body::Host(call) => {
                    let grads = self.back_host(*call, &called.output, flows)?;
                    for (input, grads) in called.inputs.iter().zip(grads) {
                        self.send(input, Flow::Merged(grads))?;
                    }
                }
            }
        }
        for (mut cx, gradients) in self.host.drain(..) {
            self.shared.add_grads(&gradients)?;
            cx.commit_buffers()?;
        }
        inputs.reverse();
        Ok(AutoInputGrads {
            shared: self.shared.clone(),
            inputs,
        })
    }

    /// Leaves gradients of a value with the call that it comes from.
    fn send(&mut self, value: &Value, flow: Flow) -> Result<()> {
        match &value.origin {
            Origin::Outside => {}
            Origin::Call(call) => self.pending[*call].push(flow),
            Origin::Leaves(call, leaves) => {
                let grads = flow.merged(value, &self.shared)?.into_iter();
                let grads = grads.map(|(leaf, grad)| (leaves[leaf], grad)).collect();
                self.pending[*call].push(Flow::Merged(grads));
            }
        }
        Ok(())
    }

    fn of_input(&self, value: Value, mut flows: Vec<Flow>) -> Result<OfInput> {
        if let [Flow::Later(_)] = flows[..]
            && let Some(Flow::Later(grads)) = flows.pop()
        {
            return Ok(OfInput::Later(grads, value));
        }
        let grads = self.sum(flows, &value)?;
        Ok(OfInput::Merged(of_tensors(grads, &value.to_host()?)?))
    }

    fn back_engine(
        &self,
        forward: Forward,
        output: &Value,
        flows: Vec<Flow>,
    ) -> Result<InputGrads> {
        if let [Flow::Later(grads)] = &flows[..]
            && forward.output().is_err()
        {
            return forward.backward_from(grads);
        }
        let grads = self.sum(flows, output)?;
        forward.backward_some(&of_tensors(grads, &output.to_host()?)?)
    }

    /// The gradients of each input of a computation on the host.
    fn back_host(
        &mut self,
        call: HostCall,
        output: &Value,
        flows: Vec<Flow>,
    ) -> Result<Vec<Vec<(usize, HostTensor)>>> {
        let HostCall {
            mut cx,
            inputs,
            outputs,
        } = call;
        let worker = cx.worker().clone();
        let outputs = outputs.into_leaves();
        let mut seeds = Vec::new();
        for (leaf, grad) in self.sum(flows, output)? {
            let output = &outputs[leaf];
            if output.requires_grad() {
                let buf = grad.buf().slice(grad.byte_range())?;
                let grad = worker.alias(&buf, grad.dtype(), *grad.shape())?;
                seeds.push((output.clone(), grad));
            }
        }
        drop(outputs);
        let mut gradients = cx.backward_if_any(&seeds)?;
        drop(seeds);
        let mut all = Vec::new();
        for input in &inputs {
            let mut of_input = Vec::new();
            for (leaf, tensor) in input.leaves().into_iter().enumerate() {
                let grad = tensor.as_ref().and_then(|tensor| gradients.take(tensor));
                if let Some(grad) = grad {
                    of_input.push((leaf, download(&grad)?));
                }
            }
            all.push(of_input);
        }
        self.shared.check_grads(&gradients)?;
        self.host.push((cx, gradients));
        Ok(all)
    }

    /// Adds gradients of a value, tensor by tensor, in the order in which they came.
    fn sum(&self, flows: Vec<Flow>, value: &Value) -> Result<Vec<(usize, HostTensor)>> {
        let mut sums: Vec<(usize, HostTensor)> = Vec::new();
        for flow in flows {
            for (leaf, grad) in flow.merged(value, &self.shared)? {
                match sums.iter_mut().find(|(known, _)| *known == leaf) {
                    Some((_, sum)) => *sum = self.shared.add(sum, &grad)?,
                    None => sums.push((leaf, grad)),
                }
            }
        }
        sums.sort_by_key(|(leaf, _)| *leaf);
        Ok(sums)
    }
}

/// Gradients by tensor, `None` where there is none.
fn of_tensors(
    grads: Vec<(usize, HostTensor)>,
    value: &Tree<HostTensor>,
) -> Result<Tree<Option<HostTensor>>> {
    let mut leaves: Vec<Option<HostTensor>> = value.leaves().iter().map(|_| None).collect();
    for (leaf, grad) in grads {
        leaves[leaf] = Some(grad);
    }
    Ok(value.with_leaves(leaves)?)
}

/// The gradients of a value from those of the microbatches that it was cut into, or that each took
/// it whole.
fn gather(
    grads: &InputGrads,
    value: &Tree<HostTensor>,
    shared: &Shared,
) -> Result<Vec<(usize, HostTensor)>> {
    let parts = (0..grads.len())
        .map(|m| grads.wait(m))
        .collect::<Result<Vec<_>>>()?;
    let mut merged = Vec::new();
    for (leaf, whole) in value.leaves().into_iter().enumerate() {
        let column: Vec<HostTensor> = parts
            .iter()
            .filter_map(|part| part.get(leaf).cloned().flatten())
            .collect();
        let rows: usize = column.iter().filter_map(|part| part.dims().first()).sum();
        merged.push((
            leaf,
            match column.as_slice() {
                [] => continue,
                [only] if only.dims() == whole.dims() => only.clone(),
                _ if whole.dims().first() == Some(&rows) => HostTensor::cat(&column, 0)?,
                [first, rest @ ..] if column.iter().all(|part| part.dims() == whole.dims()) => {
                    let add = |sum, part| shared.add(&sum, part);
                    rest.iter().try_fold(first.clone(), add)?
                }
                _ => {
                    let what = "a value was not cut along its first dimension, so its gradients \
                                cannot be put together; leave it unmerged, or detach it";
                    return Err(Error::config("backward", what));
                }
            },
        ));
    }
    Ok(merged)
}
