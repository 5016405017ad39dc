//! The context in which layers compute.
//!
//! A layer's forward receives a [`Cx`]: it gives parameters as tensors on whichever worker runs the
//! layer ([`Cx::get`]), computes ([`crate::ops`]), and records what a backward pass will need.
//! Without a tape it records nothing and holds nothing.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::param::{Param, ParamId};
use crate::repeat::Watched;
use crate::rng::{RngKey, RngSite};
use crate::shape::Shape;
use crate::tape::{Back, LeafGrads, NodeRef, Sink, Tape};
use crate::tensor::Tensor;
use crate::worker::Worker;

const BACKWARD: &str = "backward";

/// A parameter's place on the tape.
#[derive(Debug)]
struct Owner {
    param: Param,
    place: NodeRef,
}

/// Where a layer computes: a worker, perhaps a tape, and a place in the random stream.
#[derive(Debug)]
pub struct Cx {
    worker: Worker,
    tape: Option<Tape>,
    training: bool,
    site: RngSite,
    /// Parameters in the order they were first used, and where each stands in that order.
    bound: Vec<(Param, Tensor)>,
    places: HashMap<ParamId, usize>,
    /// Every place of a parameter on the tape, with the accumulator bound there; outlives
    /// [`Cx::release`].
    owners: Vec<Owner>,
    updates: Vec<(Param, Tensor)>,
    recompute: Recompute,
    output_gradient: Option<f64>,
    fp8: bool,
}

/// What this pass has to do with a recompute of the same layer.
#[derive(Debug, Default)]
pub enum Recompute {
    /// None will follow.
    #[default]
    Never,
    /// One will follow and be given these values.
    Later(Option<Vec<Tensor>>),
    /// This is one; these values were saved for it.
    Now(Vec<Tensor>),
}

impl Cx {
    /// For training: operations are recorded, dropout drops, batch norm uses the batch.
    pub fn train(worker: &Worker) -> Self {
        Self::new(worker, true, true)
    }

    /// For inference: nothing is recorded, dropout passes, batch norm uses running statistics.
    pub fn infer(worker: &Worker) -> Self {
        Self::new(worker, false, false)
    }

    /// Any combination of recording and training behaviour.
    pub fn new(worker: &Worker, record: bool, training: bool) -> Self {
        Self {
            worker: worker.clone(),
            tape: record.then(Tape::new),
            training,
            site: RngSite::default(),
            bound: Vec::new(),
            places: HashMap::new(),
            owners: Vec::new(),
            updates: Vec::new(),
            recompute: Recompute::Never,
            output_gradient: None,
            fp8: false,
        }
    }

    /// For a forward whose backward will be a recompute: nothing is recorded, but outputs know
    /// whether they need a gradient ([`Tensor::requires_grad`]).
    pub fn ahead(worker: &Worker, training: bool) -> Self {
        Self {
            tape: Some(Tape::dry()),
            ..Self::new(worker, false, training)
        }
    }

    /// The same context before or in a recompute.
    #[must_use]
    pub fn with_recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// The same context for a layer whose outputs are losses, each of which will get this gradient.
    #[must_use]
    pub fn with_output_gradient(mut self, gradient: Option<f64>) -> Self {
        self.output_gradient = gradient;
        self
    }

    /// The gradient that every output of this layer will get, where that is known beforehand: its
    /// outputs are the losses, and a backward follows in the same pass. A layer may then compute
    /// gradients at once, as [`Cx::linear_cross_entropy_at_once`] does.
    pub fn output_gradient(&self) -> Option<f64> {
        self.output_gradient.filter(|_| self.is_recording())
    }

    /// Runs `body` with gradients joined: where several operations of it read one value, products and
    /// norms add to that value's gradient before they round it, instead of in passes of their own.
    ///
    /// For layers that always run as one: a model of which these operations stand on two tapes, as
    /// parts that `wrap` makes, adds what was rounded, and differs in the last bits of 16-bit types.
    pub fn joining_gradients<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let before = self.tape.as_mut().map(|tape| tape.join_gradients(true));
        let out = body(self);
        if let (Some(tape), Some(before)) = (&mut self.tape, before) {
            tape.join_gradients(before);
        }
        out
    }

    /// The same context with fp8 asked for or not: linear maps that layers compute by
    /// [`Cx::projection`] then multiply 8-bit floats in training.
    #[must_use]
    pub fn with_fp8(mut self, fp8: bool) -> Self {
        self.fp8 = fp8;
        self
    }

    /// Whether projections run in fp8: where it was asked for, in training. Without training the
    /// weights count as they are saved, so that a validation measures the model that a user gets.
    pub fn uses_fp8(&self) -> bool {
        self.fp8 && self.training
    }

    /// Keeps values for the recompute of this layer, so that it need not compute them again: at
    /// most once per layer and forward. They carry no gradient. When no recompute will follow,
    /// nothing is kept.
    ///
    /// # Errors
    /// [`Error::Invalid`] on the second call.
    pub fn save_for_recompute(&mut self, values: &[&Tensor]) -> Result<()> {
        match &mut self.recompute {
            Recompute::Later(Some(_)) => Err(Error::invalid(
                "save_for_recompute",
                "a layer may call it once per forward; save all at once",
            )),
            Recompute::Later(saved) => {
                *saved = Some(values.iter().map(|t| t.detach()).collect());
                Ok(())
            }
            Recompute::Never | Recompute::Now(_) => Ok(()),
        }
    }

    /// Whether this is the repetition of a forward that was run before.
    pub fn doing_recompute(&self) -> bool {
        matches!(self.recompute, Recompute::Now(_))
    }

    /// What the forward gave to [`Cx::save_for_recompute`]; empty when it saved nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] outside a recompute.
    pub fn recompute_data(&self) -> Result<Vec<Tensor>> {
        match &self.recompute {
            Recompute::Now(saved) => Ok(saved.clone()),
            _ => Err(Error::invalid(
                "recompute_data",
                "this is no recompute; ask doing_recompute first",
            )),
        }
    }

    /// What was saved for a recompute, taken out.
    pub fn take_saved(&mut self) -> Option<Vec<Tensor>> {
        match &mut self.recompute {
            Recompute::Later(saved) => saved.take(),
            _ => None,
        }
    }

    /// The buffers set in this pass and not written yet, taken out.
    pub fn take_buffers(&mut self) -> Vec<(Param, Tensor)> {
        std::mem::take(&mut self.updates)
    }

    /// The same context at another place of the random stream.
    #[must_use]
    pub fn at(mut self, site: RngSite) -> Self {
        self.site = site;
        self
    }

    /// Ends the watch that the worker began with ([`Worker::watched`]): what follows, the walk back
    /// among it, is not watched.
    pub fn end_watch(&mut self) -> Option<Watched> {
        self.worker.end_watch()
    }

    /// The worker that computes.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Whether layers should behave as in training.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// Whether operations are recorded.
    pub fn is_recording(&self) -> bool {
        self.tape.as_ref().is_some_and(|tape| !tape.is_dry())
    }

    /// Whether there is a tape, also one that only follows which values need gradients.
    pub(crate) fn records(&self) -> bool {
        self.tape.is_some()
    }

    /// Number of operations on the tape.
    pub fn recorded(&self) -> usize {
        self.tape.as_ref().map_or(0, Tape::len)
    }

    /// The key of the next random operation: every call gives another one, in a fixed order.
    pub fn next_key(&mut self) -> RngKey {
        let key = self.site.key();
        self.site.site += 1;
        key
    }

    /// Runs `body` without recording.
    pub fn no_grad<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let tape = self.tape.take();
        let out = body(self);
        self.tape = tape;
        out
    }

    /// A tensor holding a copy of host values.
    ///
    /// # Errors
    /// When their number is not the shape's, or memory runs out.
    pub fn tensor<T: Element>(&mut self, values: &[T], dims: &[usize]) -> Result<Tensor> {
        self.worker.upload(values, Shape::new(dims)?)
    }

    /// A bool tensor.
    ///
    /// # Errors
    /// As [`Cx::tensor`].
    pub fn tensor_bool(&mut self, values: &[bool], dims: &[usize]) -> Result<Tensor> {
        self.worker.upload_bool(values, Shape::new(dims)?)
    }

    /// A tensor filled with one value.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn full(&mut self, dtype: DType, dims: &[usize], value: f64) -> Result<Tensor> {
        self.worker.full(dtype, Shape::new(dims)?, value)
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn zeros(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        self.full(dtype, dims, 0.0)
    }

    /// Makes `tensor` an input whose gradient [`Gradients::of`] will give. Without a tape it stays
    /// a constant.
    ///
    /// # Errors
    /// [`Error::DType`] for types that have no gradient.
    pub fn input(&mut self, tensor: &Tensor) -> Result<Tensor> {
        float("input", tensor)?;
        self.worker.check_home("input", tensor)?;
        Ok(match &mut self.tape {
            Some(tape) => tape.input(tensor),
            None => tensor.detach(),
        })
    }

    /// The parameter as a tensor on this worker. The first call brings it here (in place on a cpu,
    /// unless [`Cx::bind`] did before); later calls give the same tensor.
    ///
    /// # Errors
    /// When it is being written, or memory runs out.
    pub fn get(&mut self, param: &Param) -> Result<Tensor> {
        if let Some(place) = self.places.get(&param.id()) {
            let tensor = self.bound[*place].1.clone();
            if tensor.requires_grad() || self.tape.is_none() || !param.is_trainable() {
                return Ok(tensor);
            }
            // It was first used under `no_grad`, and joins the tape now.
            return self.bind(param, tensor, None);
        }
        let host = param.data().read_all()?;
        let tensor = if self.worker.device().aliases_host() {
            Tensor::from_host(
                host,
                self.worker.pool().clone(),
                param.dtype(),
                *param.shape(),
            )?
        } else {
            let block = self
                .worker
                .pool()
                .alloc("parameter", param.bytes() as u64)?;
            let lane = self.worker.device().lane(crate::device::LaneKind::Compute);
            let (_, block) = lane.upload("parameter", host, block)?.land()?;
            Tensor::from_block(block, param.dtype(), *param.shape())
        };
        self.bind(param, tensor, None)
    }

    /// The parameters that were bound or used so far.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.bound.iter().map(|(param, _)| param)
    }

    /// Says where a parameter lies on this worker, and the accumulator its gradients are added to
    /// (dense, in the accumulator type, zeroed or holding earlier microbatches). The accumulator is
    /// given away, so that no other code can read it while it is being written;
    /// [`Gradients::take_param`] gives it back.
    ///
    /// # Errors
    /// When shapes or types disagree, the tensors live on another worker, or the accumulator
    /// has another holder.
    pub fn bind(&mut self, param: &Param, tensor: Tensor, into: Option<Tensor>) -> Result<Tensor> {
        const OP: &str = "bind";
        for t in std::iter::once(&tensor).chain(&into) {
            self.worker.check_home(OP, t)?;
            if t.shape() != param.shape() {
                return Err(Error::Shape {
                    op: OP,
                    left: *t.shape(),
                    right: *param.shape(),
                });
            }
        }
        let dense = into
            .as_ref()
            .is_none_or(|g| g.is_contiguous() && g.dtype() == param.dtype().accumulator());
        if tensor.dtype() != param.dtype() || !dense {
            return Err(Error::invalid(
                OP,
                format!("{tensor:?} cannot stand for a {} parameter", param.dtype()),
            ));
        }
        if let Some(into) = &into {
            check_accumulator(into)?;
        }
        let tensor = match &mut self.tape {
            Some(tape) if param.is_trainable() => tape.parameter(tensor.detach(), into),
            _ => tensor.detach(),
        };
        if let Some(place) = tensor.node.clone() {
            self.owners.push(Owner {
                param: param.clone(),
                place,
            });
        }
        let bound = (param.clone(), tensor.clone());
        match self.places.get(&param.id()) {
            Some(place) => self.bound[*place] = bound,
            None => {
                self.places.insert(param.id(), self.bound.len());
                self.bound.push(bound);
            }
        }
        Ok(tensor)
    }

    /// Sets a buffer (running statistics, counters) once this pass is over: the value is written by
    /// [`Cx::commit_buffers`], so that a repeated forward does not count twice.
    ///
    /// # Errors
    /// When shape or type disagree.
    pub fn set_buffer(&mut self, buffer: &Param, value: &Tensor) -> Result<()> {
        if value.shape() != buffer.shape() || value.dtype() != buffer.dtype() {
            let what = format!(
                "{value:?} into a {} {} buffer",
                buffer.dtype(),
                buffer.shape()
            );
            return Err(Error::invalid("set_buffer", what));
        }
        self.updates.retain(|(b, _)| b.id() != buffer.id());
        self.updates.push((buffer.clone(), value.detach()));
        Ok(())
    }

    /// Lets go of all parameters, so that they can be written. A later [`Cx::get`] reads them anew.
    pub fn release(&mut self) {
        self.bound.clear();
        self.places.clear();
    }

    /// Releases the parameters and writes the buffers set during this pass, in the order they were
    /// set.
    ///
    /// # Errors
    /// When a buffer is still read by another pass.
    pub fn commit_buffers(&mut self) -> Result<()> {
        self.release();
        let mut updates = std::mem::take(&mut self.updates).into_iter();
        while let Some((buffer, value)) = updates.next() {
            let write = |b: &Param| value.read_into(&mut b.data().write(0..b.bytes())?);
            if let Err(error) = write(&buffer) {
                // What is not written yet waits for another try.
                self.updates = std::iter::once((buffer, value)).chain(updates).collect();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Records an operation: `backward` will run when a gradient arrives at one of `outputs`.
    /// Outputs come back with their place on the tape; without a tape, or when no input needs a
    /// gradient, they come back as they are and what `backward` captured is dropped.
    pub(crate) fn record(
        &mut self,
        op: &'static str,
        inputs: &[&Tensor],
        outputs: Vec<Tensor>,
        backward: impl FnOnce(&mut Back<'_>) -> Result<()> + Send + 'static,
    ) -> Result<Vec<Tensor>> {
        let Some(tape) = &mut self.tape else {
            return Ok(outputs);
        };
        let numbers = inputs
            .iter()
            .map(|t| tape.number(op, t))
            .collect::<Result<Vec<_>>>()?;
        if numbers.iter().all(Option::is_none) {
            return Ok(outputs);
        }
        Ok(tape.push(op, numbers, outputs, Box::new(backward)))
    }

    /// [`Cx::record`] for the usual single output.
    pub(crate) fn record_one(
        &mut self,
        op: &'static str,
        inputs: &[&Tensor],
        output: Tensor,
        backward: impl FnOnce(&mut Back<'_>) -> Result<()> + Send + 'static,
    ) -> Result<Tensor> {
        let mut outputs = self.record(op, inputs, vec![output], backward)?;
        Ok(outputs.pop().expect("one output in, one out"))
    }

    /// Where to write the gradient of `tensor` now, on a tape that records.
    pub(crate) fn sink(&mut self, op: &'static str, tensor: &Tensor) -> Result<Option<Sink>> {
        match &mut self.tape {
            Some(tape) if !tape.is_dry() => tape.sink(&self.worker, op, tensor),
            _ => Ok(None),
        }
    }

    /// Whether any of these needs a gradient here, so that a forward knows what to keep.
    pub(crate) fn tracks(&self, inputs: &[&Tensor]) -> bool {
        self.tape.is_some() && inputs.iter().any(|t| t.requires_grad())
    }

    /// Gradients of a scalar with respect to every input and parameter it depends on. The tape is
    /// used up; the context can record anew.
    ///
    /// # Errors
    /// When `loss` has more than one element or does not depend on anything recorded here.
    pub fn backward(&mut self, loss: &Tensor) -> Result<Gradients> {
        if loss.numel() != 1 {
            let what = format!(
                "the loss {} has {} elements; reduce it to one",
                loss.shape(),
                loss.numel()
            );
            return Err(Error::invalid("backward", what));
        }
        let one = self.worker.full(loss.dtype(), *loss.shape(), 1.0)?;
        self.backward_from(&[(loss.clone(), one)])
    }

    /// Gradients given those of some outputs. Outputs that do not need a gradient are skipped.
    ///
    /// # Errors
    /// When there is no tape, nothing needs a gradient, or a gradient's shape is not its output's.
    pub fn backward_from(&mut self, outputs: &[(Tensor, Tensor)]) -> Result<Gradients> {
        let seeds = self.seeds(outputs)?;
        if seeds.is_empty() {
            return Err(Error::invalid(
                BACKWARD,
                "no output depends on an input or a trainable parameter",
            ));
        }
        self.walk_back(seeds)
    }

    /// As [`Cx::backward_from`], where it is no mistake that nothing depends on the outputs:
    /// accumulators come back as they were bound.
    ///
    /// # Errors
    /// When there is no tape or a gradient's shape is not its output's.
    pub fn backward_if_any(&mut self, outputs: &[(Tensor, Tensor)]) -> Result<Gradients> {
        let seeds = self.seeds(outputs)?;
        self.walk_back(seeds)
    }

    /// From now on, new sums of parameters' gradients go where values stay while other tasks run,
    /// if there is room. For sums that later microbatches add to.
    pub fn keep_sums(&mut self) {
        if let Some(tape) = &mut self.tape {
            tape.keep_sums();
        }
    }

    fn seeds(&self, outputs: &[(Tensor, Tensor)]) -> Result<Vec<(u32, Tensor)>> {
        const OP: &str = BACKWARD;
        let tape = self.tape.as_ref().filter(|tape| !tape.is_dry());
        let tape = tape.ok_or_else(|| Error::invalid(OP, "nothing was recorded: use Cx::train"))?;
        let mut seeds = Vec::with_capacity(outputs.len());
        for (output, grad) in outputs {
            if output.shape() != grad.shape() {
                return Err(Error::Shape {
                    op: OP,
                    left: *output.shape(),
                    right: *grad.shape(),
                });
            }
            self.worker.check_home(OP, grad)?;
            seeds.extend(
                tape.number(OP, output)?
                    .map(|number| (number, grad.detach())),
            );
        }
        Ok(seeds)
    }

    fn walk_back(&mut self, seeds: Vec<(u32, Tensor)>) -> Result<Gradients> {
        // The parameters' tensors are let go here: an optimizer may write them while the gradients
        // live.
        self.release();
        let owners = std::mem::take(&mut self.owners);
        let tape = self.tape.replace(Tape::new()).expect("checked above");
        let mut leaves = tape.backward(&self.worker, seeds)?;
        let params = self.collect(owners, &mut leaves)?;
        Ok(Gradients { leaves, params })
    }

    /// The gradients of parameters in the order of their first use; one that stood at several
    /// places of the tape has one gradient.
    fn collect(&self, owners: Vec<Owner>, leaves: &mut LeafGrads) -> Result<Vec<(Param, Tensor)>> {
        let mut params: Vec<(Param, Tensor)> = Vec::with_capacity(owners.len());
        let mut at = HashMap::new();
        for Owner { param, place } in owners {
            let Some(grad) = leaves.take_at(&place) else {
                continue;
            };
            let known = *at.entry(param.id()).or_insert(params.len());
            match params.get(known).map(|(_, have)| have) {
                None => params.push((param, grad)),
                Some(have) => {
                    self.worker.launch(
                        &Kernel::Accumulate { alpha: 1.0 },
                        &[Some(&grad)],
                        &[Some(have)],
                    )?;
                }
            }
        }
        Ok(params)
    }
}

/// What a backward pass gives.
pub struct Gradients {
    leaves: LeafGrads,
    params: Vec<(Param, Tensor)>,
}

impl Gradients {
    /// The gradient of an input; `None` when the result does not depend on it.
    pub fn of(&self, input: &Tensor) -> Option<&Tensor> {
        self.leaves.of(input)
    }

    /// Takes the gradient of an input out.
    pub fn take(&mut self, input: &Tensor) -> Option<Tensor> {
        self.leaves.take(input)
    }

    /// The gradient of a parameter, in its accumulator type.
    pub fn param(&self, param: &Param) -> Option<&Tensor> {
        self.params
            .iter()
            .find(|(p, _)| p.id() == param.id())
            .map(|(_, grad)| grad)
    }

    /// Takes the gradient of a parameter out: where an accumulator was bound, that accumulator.
    pub fn take_param(&mut self, param: &Param) -> Option<Tensor> {
        let place = self.params.iter().position(|(p, _)| p.id() == param.id())?;
        Some(self.params.remove(place).1)
    }

    /// All parameters that received a gradient, in the order of their first use.
    pub fn params(&self) -> impl Iterator<Item = (&Param, &Tensor)> {
        self.params.iter().map(|(p, grad)| (p, grad))
    }
}

impl std::fmt::Debug for Gradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gradients({} parameters)", self.params.len())
    }
}

/// Refuses an accumulator that anybody else could read or write while a backward pass adds to it.
fn check_accumulator(into: &Tensor) -> Result<()> {
    let what = match (into.is_writable(), into.is_unique()) {
        (true, true) => return Ok(()),
        (true, false) => "is held elsewhere; give it away, and take it back from the gradients",
        (false, _) => "lies in a host buffer that is only read",
    };
    Err(Error::invalid(
        "bind",
        format!("the accumulator {into:?} {what}"),
    ))
}

/// Refuses what is not a float.
pub(crate) fn float(op: &'static str, x: &Tensor) -> Result<()> {
    if x.dtype().is_float() {
        return Ok(());
    }
    Err(Error::DType {
        op,
        dtype: x.dtype(),
        shape: *x.shape(),
        expected: "it takes floats",
    })
}

/// Refuses operands of different types.
pub(crate) fn same_dtype(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.dtype() == b.dtype() {
        return Ok(());
    }
    Err(Error::DTypes {
        op,
        left: a.dtype(),
        left_shape: *a.shape(),
        right: b.dtype(),
        right_shape: *b.shape(),
    })
}

/// Refuses a shape that is not the expected one.
pub(crate) fn same_shape(op: &'static str, have: &Tensor, want: Shape) -> Result<()> {
    if *have.shape() == want {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        left: *have.shape(),
        right: want,
    })
}

/// An operation that a user wrote: any forward, and a backward of its own.
pub trait CustomOp: Send + Sync + 'static {
    /// Name for errors and traces.
    fn name(&self) -> &'static str;

    /// The outputs; `cx` does not record here.
    ///
    /// # Errors
    /// Whatever the operation reports.
    fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> Result<Vec<Tensor>>;

    /// The gradients of the inputs (`None` for those without), given the inputs, the outputs and
    /// the outputs' gradients (`None` for outputs nothing depends on); `cx` does not record here.
    ///
    /// # Errors
    /// Whatever the operation reports.
    fn backward(
        &self,
        cx: &mut Cx,
        inputs: &[Tensor],
        outputs: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>>;
}

impl Cx {
    /// Runs a user's operation and records it with its own backward.
    ///
    /// # Errors
    /// What the operation reports; in backward, also a wrong number of gradients or a wrong shape.
    pub fn custom(&mut self, op: Arc<dyn CustomOp>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let name = op.name();
        let plain: Vec<Tensor> = inputs.iter().map(|t| t.detach()).collect();
        let outputs = self.no_grad(|cx| op.forward(cx, &plain))?;
        let outputs: Vec<Tensor> = outputs.iter().map(Tensor::detach).collect();
        if !self.tracks(inputs) {
            return Ok(outputs);
        }
        let kept = outputs.clone();
        let training = self.training;
        self.record(name, inputs, outputs, move |bx| {
            let mut cx = Self::new(bx.worker(), false, training);
            let grads = (0..kept.len())
                .map(|i| bx.grad(i))
                .collect::<Result<Vec<_>>>()?;
            let given = op.backward(&mut cx, &plain, &kept, &grads)?;
            if given.len() != plain.len() {
                let what = format!(
                    "backward gave {} gradients for {} inputs",
                    given.len(),
                    plain.len()
                );
                return Err(Error::invalid(name, what));
            }
            for (i, grad) in given.into_iter().enumerate() {
                if let Some(grad) = grad {
                    bx.give(i, grad.detach())?;
                }
            }
            Ok(())
        })
    }
}
