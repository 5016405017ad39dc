//! The tape: what happened in a forward pass, and how to walk it back.
//!
//! An operation whose result a gradient may have to pass leaves a node: its inputs, its outputs,
//! and a function that turns output gradients into input gradients. Walking back takes the nodes
//! off the end one by one, so that what a node saved is freed as soon as it was used.
//!
//! # Rules
//! 1. Values are numbered; a node only mentions values that need a gradient.
//! 2. The first gradient of a value is moved in; later ones are added, in the order of the walk: rounded
//!    and then added, or by the kernel that computes them, where a layer lets gradients be joined.
//!    The first gives the same bits wherever a model is cut into tapes, the second is faster; a layer
//!    that joins is never cut.
//! 3. Memory with another holder is never added to in place; accumulators of parameters always are.
//! 4. Gradients of parameters are kept in the accumulator type (f32 for bf16), all others in the
//!    value's.
//! 5. A node none of whose outputs has a gradient is dropped without running.
//! 6. Inputs without a value number (constants, frozen parameters) get no gradient computed.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::worker::Worker;

/// A tensor's place on a tape.
#[derive(Debug, Clone)]
pub(crate) struct NodeRef {
    tape: Arc<()>,
    value: u32,
}

/// The function that carries gradients through one operation.
pub(crate) type Backward = Box<dyn FnOnce(&mut Back<'_>) -> Result<()> + Send>;

struct TapeNode {
    op: &'static str,
    inputs: Vec<Option<u32>>,
    outputs: Vec<u32>,
    backward: Backward,
    /// Whether its kernels may add to gradients that are there.
    joins: bool,
}

struct TapeValue {
    dtype: DType,
    shape: Shape,
    leaf: bool,
    /// A parameter's gradient: accumulator type, added to in place.
    accumulator: bool,
    /// Whether the accumulator is out as a [`Sink`].
    lent: bool,
    grad: Option<Tensor>,
}

/// A recording.
pub(crate) struct Tape {
    stamp: Arc<()>,
    values: Vec<TapeValue>,
    nodes: Vec<TapeNode>,
    /// Only notes which values need a gradient; keeps nothing for a walk back.
    dry: bool,
    /// Whether sums of gradients stay while other tasks run.
    sums_stay: bool,
    /// Whether kernels of the nodes recorded now may add to gradients that are there.
    joins: bool,
}

impl Tape {
    pub(crate) fn new() -> Self {
        Self {
            stamp: Arc::new(()),
            values: Vec::new(),
            nodes: Vec::new(),
            dry: false,
            sums_stay: false,
            joins: false,
        }
    }

    pub(crate) fn dry() -> Self {
        Self {
            dry: true,
            ..Self::new()
        }
    }

    pub(crate) fn is_dry(&self) -> bool {
        self.dry
    }

    /// Lets kernels of nodes recorded from now on add to gradients that are there, or not; what was
    /// said before.
    pub(crate) fn join_gradients(&mut self, joins: bool) -> bool {
        std::mem::replace(&mut self.joins, joins)
    }

    /// New sums of gradients go where values stay while other tasks run.
    pub(crate) fn keep_sums(&mut self) {
        self.sums_stay = true;
    }

    /// Number of operations recorded.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Makes `tensor` a value whose gradient is wanted at the end.
    pub(crate) fn input(&mut self, tensor: &Tensor) -> Tensor {
        self.value(tensor.detach(), true, false, None)
    }

    /// Makes `tensor` a parameter; gradients are added to `into` where given.
    pub(crate) fn parameter(&mut self, tensor: Tensor, into: Option<Tensor>) -> Tensor {
        self.value(tensor, true, true, into)
    }

    fn value(
        &mut self,
        mut tensor: Tensor,
        leaf: bool,
        accumulator: bool,
        grad: Option<Tensor>,
    ) -> Tensor {
        let value = u32::try_from(self.values.len()).expect("fewer than 2^32 values on a tape");
        let (dtype, shape) = (tensor.dtype(), *tensor.shape());
        self.values.push(TapeValue {
            dtype,
            shape,
            leaf,
            accumulator,
            lent: false,
            grad,
        });
        // Integers have a number, so that outputs are counted alike, but no gradient comes back for
        // them.
        tensor.node = dtype.is_float().then(|| NodeRef {
            tape: self.stamp.clone(),
            value,
        });
        tensor
    }

    /// The value number of `tensor` on this tape, if it needs a gradient.
    pub(crate) fn number(&self, op: &'static str, tensor: &Tensor) -> Result<Option<u32>> {
        match &tensor.node {
            None => Ok(None),
            Some(node) if Arc::ptr_eq(&node.tape, &self.stamp) => Ok(Some(node.value)),
            Some(_) => Err(Error::Foreign {
                op,
                what: format!(
                    "{} {} was recorded by another tape; use `detach` to take it as a constant",
                    tensor.dtype(),
                    tensor.shape()
                ),
            }),
        }
    }

    /// Adds a node; float outputs become values.
    pub(crate) fn push(
        &mut self,
        op: &'static str,
        inputs: Vec<Option<u32>>,
        outputs: Vec<Tensor>,
        backward: Backward,
    ) -> Vec<Tensor> {
        let first = self.values.len() as u32;
        let count = outputs.len() as u32;
        let outputs = outputs
            .into_iter()
            .map(|t| self.value(t, false, false, None))
            .collect();
        if self.dry {
            return outputs;
        }
        self.nodes.push(TapeNode {
            op,
            inputs,
            outputs: (first..first + count).collect(),
            backward,
            joins: self.joins,
        });
        outputs
    }

    /// Where an operation writes the gradient of `tensor` while it is recorded, because it knows
    /// what will come; its backward hands the sink back. `None` where no gradient is wanted.
    pub(crate) fn sink(
        &mut self,
        worker: &Worker,
        op: &'static str,
        tensor: &Tensor,
    ) -> Result<Option<Sink>> {
        let Some(number) = self.number(op, tensor)? else {
            return Ok(None);
        };
        let value = &mut self.values[number as usize];
        lend(worker, op, value, self.sums_stay).map(Some)
    }

    /// Walks back from the seeds (value, gradient) and returns the gradients of the leaves.
    pub(crate) fn backward(
        mut self,
        worker: &Worker,
        seeds: Vec<(u32, Tensor)>,
    ) -> Result<LeafGrads> {
        for (value, grad) in seeds {
            add(worker, &mut self.values[value as usize], grad)?;
        }
        while let Some(node) = self.nodes.pop() {
            let reached = node
                .outputs
                .iter()
                .any(|v| self.values[*v as usize].grad.is_some());
            if reached {
                let (inputs, outputs) = (&node.inputs, &node.outputs);
                let mut back = Back {
                    worker,
                    values: &mut self.values,
                    op: node.op,
                    inputs,
                    outputs,
                    sums_stay: self.sums_stay,
                    joins: node.joins,
                };
                (node.backward)(&mut back)?;
            }
            // Gradients of outputs that the node did not take are dead now.
            for value in &node.outputs {
                self.values[*value as usize].grad = None;
            }
        }
        let grads = self
            .values
            .into_iter()
            .map(|v| if v.leaf { v.grad } else { None })
            .collect();
        Ok(LeafGrads {
            stamp: self.stamp,
            grads,
        })
    }
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tape({} operations, {} values)",
            self.nodes.len(),
            self.values.len()
        )
    }
}

/// The gradients of a tape's leaves.
pub(crate) struct LeafGrads {
    stamp: Arc<()>,
    grads: Vec<Option<Tensor>>,
}

impl LeafGrads {
    /// Takes the gradient of a leaf out.
    pub(crate) fn take(&mut self, leaf: &Tensor) -> Option<Tensor> {
        self.take_at(leaf.node.as_ref()?)
    }

    /// Takes the gradient of the leaf at a place of the tape out.
    pub(crate) fn take_at(&mut self, node: &NodeRef) -> Option<Tensor> {
        if Arc::ptr_eq(&node.tape, &self.stamp) {
            self.grads[node.value as usize].take()
        } else {
            None
        }
    }

    /// The gradient of a leaf.
    pub(crate) fn of(&self, leaf: &Tensor) -> Option<&Tensor> {
        let node = leaf
            .node
            .as_ref()
            .filter(|n| Arc::ptr_eq(&n.tape, &self.stamp))?;
        self.grads[node.value as usize].as_ref()
    }
}

/// What a backward function works with: gradients of its outputs in, gradients of its inputs out.
pub struct Back<'a> {
    worker: &'a Worker,
    values: &'a mut [TapeValue],
    op: &'static str,
    inputs: &'a [Option<u32>],
    outputs: &'a [u32],
    sums_stay: bool,
    joins: bool,
}

/// Where a parameter-like gradient is written: in the accumulator type, added to what is there or
/// not.
pub struct Sink {
    /// Destination, dense, in the accumulator type of the input.
    pub tensor: Tensor,
    /// Whether to add to what is there.
    pub accumulate: bool,
}

impl Back<'_> {
    /// Kernels and memory.
    pub fn worker(&self) -> &Worker {
        self.worker
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Whether anybody wants the gradient of input `i`.
    pub fn needs(&self, i: usize) -> bool {
        self.inputs[i].is_some()
    }

    /// Takes the gradient of output `i`, dense; `None` when nothing depends on that output.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn grad(&mut self, i: usize) -> Result<Option<Tensor>> {
        let grad = self.values[self.outputs[i] as usize].grad.take();
        grad.map(|g| self.worker.contiguous(&g)).transpose()
    }

    /// Takes the gradient of output `i` as it lies, which may be strided or broadcast.
    pub fn grad_strided(&mut self, i: usize) -> Option<Tensor> {
        self.values[self.outputs[i] as usize].grad.take()
    }

    /// Takes the gradient of the only output; a node runs only when there is one.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn dy(&mut self) -> Result<Tensor> {
        let missing = Error::Invalid {
            op: self.op,
            what: "its output has no gradient".into(),
        };
        self.grad(0)?.ok_or(missing)
    }

    /// Contributes to the gradient of input `i`; nothing happens when it is not wanted. The type
    /// may be the input's or its accumulator's.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn give(&mut self, i: usize, grad: Tensor) -> Result<()> {
        let Some(value) = self.inputs[i] else {
            return Ok(());
        };
        let value = &mut self.values[value as usize];
        if *grad.shape() != value.shape {
            return Err(Error::Shape {
                op: self.op,
                left: *grad.shape(),
                right: value.shape,
            });
        }
        add(self.worker, value, grad)
    }

    /// Contributes to the gradient of input `i` by a kernel that can add to what is there: `write` is
    /// given dense memory of the input's type, and whether to add to it or to write over it. What is
    /// added is not rounded before, so this is only done where [`Cx::joining_gradients`] says so;
    /// elsewhere it is [`Back::give`]. Nothing happens when the gradient is not wanted.
    ///
    /// Whether it adds depends on the tape alone: memory with another holder is copied first.
    ///
    /// [`Cx::joining_gradients`]: crate::cx::Cx::joining_gradients
    ///
    /// # Errors
    /// When memory runs out, and what `write` reports.
    pub fn give_into(
        &mut self,
        i: usize,
        write: impl FnOnce(&Worker, &Tensor, bool) -> Result<()>,
    ) -> Result<()> {
        let Some(value) = self.inputs[i] else {
            return Ok(());
        };
        let value = &mut self.values[value as usize];
        if !self.joins || value.accumulator || value.grad.is_none() {
            let grad = self.worker.alloc(self.op, value.dtype, value.shape)?;
            write(self.worker, &grad, false)?;
            return add(self.worker, value, grad);
        }
        let have = value.grad.take().expect("there is one, as seen above");
        let sum = owned(self.worker, have)?;
        write(self.worker, &sum, true)?;
        value.grad = Some(sum);
        Ok(())
    }

    /// Takes out what is there of the gradient of input `i`, dense, for a kernel that adds to it on the
    /// way; [`Back::give`] puts the sum back. `None` where there is nothing, where sums have a sink, and
    /// where gradients are not joined, as in [`Back::give_into`].
    ///
    /// # Errors
    /// When memory runs out.
    pub fn take_sum(&mut self, i: usize) -> Result<Option<Tensor>> {
        let value = self.inputs[i].map(|value| &mut self.values[value as usize]);
        let sum = value
            .filter(|value| self.joins && !value.accumulator)
            .and_then(|value| value.grad.take());
        sum.map(|sum| self.worker.contiguous(&sum)).transpose()
    }

    /// Where to write the gradient of input `i` in the accumulator type: the parameter's own
    /// accumulator if it is one. Hand it back with [`Back::give_back`].
    ///
    /// # Errors
    /// When memory runs out or the gradient is not wanted.
    pub fn sink(&mut self, i: usize) -> Result<Sink> {
        let unwanted = || Error::invalid(self.op, format!("no gradient of input {i} is wanted"));
        let value = &mut self.values[self.inputs[i].ok_or_else(unwanted)? as usize];
        lend(self.worker, self.op, value, self.sums_stay)
    }

    /// Takes a written [`Sink`] of input `i` back.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn give_back(&mut self, i: usize, sink: Sink) -> Result<()> {
        let Some(number) = self.inputs[i] else {
            return Ok(());
        };
        let value = &mut self.values[number as usize];
        if sink.accumulate {
            value.lent = false;
            return Ok(());
        }
        if value.accumulator && value.grad.is_none() {
            value.grad = Some(sink.tensor);
            return Ok(());
        }
        if value.accumulator {
            return add(self.worker, value, sink.tensor);
        }
        let dtype = value.dtype;
        let grad = self.worker.cast(&sink.tensor, dtype)?;
        drop(sink);
        self.give(i, grad)
    }
}

/// Where the gradient of a value is written: its accumulator, or memory that becomes it.
fn lend(worker: &Worker, op: &'static str, value: &mut TapeValue, sums_stay: bool) -> Result<Sink> {
    // One parameter may stand at two inputs: the second gets memory of its own.
    if value.accumulator
        && !value.lent
        && let Some(tensor) = &value.grad
    {
        value.lent = true;
        return Ok(Sink {
            tensor: tensor.clone(),
            accumulate: true,
        });
    }
    let dtype = value.dtype.accumulator();
    let becomes_sum = value.accumulator && value.grad.is_none();
    let tensor = if sums_stay && becomes_sum {
        worker.alloc_long(op, dtype, value.shape)?
    } else {
        worker.alloc(op, dtype, value.shape)?
    };
    Ok(Sink {
        tensor,
        accumulate: false,
    })
}

/// Rules 2 to 4.
fn add(worker: &Worker, value: &mut TapeValue, grad: Tensor) -> Result<()> {
    let dtype = if value.accumulator {
        value.dtype.accumulator()
    } else {
        value.dtype
    };
    let Some(have) = value.grad.take() else {
        // Moved, not cloned, where the type is right: a second handle would force `owned` to copy.
        let grad = if grad.dtype() == dtype {
            grad.off_tape()
        } else {
            worker.cast(&grad, dtype)?
        };
        value.grad = Some(if value.accumulator {
            owned(worker, grad)?
        } else {
            grad
        });
        return Ok(());
    };
    if value.accumulator || (have.is_unique() && have.is_contiguous()) {
        worker.launch(
            &Kernel::Accumulate { alpha: 1.0 },
            &[Some(&grad)],
            &[Some(&have)],
        )?;
        value.grad = Some(have);
    } else {
        let grad = worker.cast(&grad, dtype)?;
        value.grad = Some(worker.sum_of(&have, &grad)?);
    }
    Ok(())
}

/// A dense tensor without another holder, so that it may serve as an accumulator.
fn owned(worker: &Worker, grad: Tensor) -> Result<Tensor> {
    if grad.is_unique() && grad.is_contiguous() {
        return Ok(grad);
    }
    let out = worker.alloc("gradient", grad.dtype(), *grad.shape())?;
    worker.launch(&Kernel::Copy, &[Some(&grad)], &[Some(&out)])?;
    Ok(out)
}
