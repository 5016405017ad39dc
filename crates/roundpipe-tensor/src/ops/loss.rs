//! Losses: cross entropy here, those made of other operations in [`simple`].
//!
//! Cross entropy gives its loss in the accumulator type (f32 for bf16), so that a reported loss is
//! not rounded to three digits. Fused with the projection before it ([`Cx::linear_cross_entropy`])
//! it never holds the logits of all tokens: forward and backward work through chunks of tokens, and
//! between them only one number per token is kept. Where the projection is frozen, the forward has
//! the rows' gradients but for one common factor while it has a chunk's logits, and keeps those:
//! nothing is computed twice. Nor is it where the loss's gradient is known beforehand
//! ([`Cx::linear_cross_entropy_at_once`]).

mod simple;

use super::arith::{raw_binary, raw_compare};
use super::index::check_index;
use super::product::{multiply_into, transposed};
use crate::cx::{Cx, float, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Binary, Compare, Kernel};
use crate::shape::{Layout, Shape};
use crate::tape::{Back, Sink};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// How the losses of single elements become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// They stay as they are.
    None,
    /// Their mean, over those that are not left out.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// What a cross entropy computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// How the losses of tokens become one. The mean is over the tokens that are not ignored; where
    /// all are ignored it is 0 with zero gradients (PyTorch: NaN), so that an empty batch does not
    /// poison a run.
    pub reduction: Reduction,
    /// Tokens with this label give no loss and no gradient.
    pub ignore_index: i64,
    /// Share of the target spread evenly over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// [`Cx::linear_cross_entropy`] only: tokens per chunk; `None` chooses by the number of
    /// classes.
    pub chunk_tokens: Option<usize>,
}

impl Default for CrossEntropy {
    fn default() -> Self {
        Self {
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
            chunk_tokens: None,
        }
    }
}

impl CrossEntropy {
    fn kernel(&self) -> Kernel {
        Kernel::CrossEntropy {
            ignore: self.ignore_index,
            smoothing: self.label_smoothing,
        }
    }

    fn grad_kernel(&self) -> Kernel {
        Kernel::CrossEntropyGrad {
            ignore: self.ignore_index,
            smoothing: self.label_smoothing,
        }
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let what = format!(
                "label_smoothing {} is not between 0 and 1",
                self.label_smoothing
            );
            return Err(Error::invalid(op, what));
        }
        if self.chunk_tokens == Some(0) {
            return Err(Error::invalid(
                op,
                "chunk_tokens is 0; at least one token goes at a time",
            ));
        }
        Ok(())
    }
}

impl Cx {
    /// Cross entropy of `logits` [.., v] against integer `labels` [..]. The loss has the
    /// accumulator type; with [`Reduction::None`] it has the labels' shape.
    ///
    /// # Errors
    /// When shapes or types do not fit, or a label is neither a class nor ignored.
    pub fn cross_entropy(
        &mut self,
        logits: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
    ) -> Result<Tensor> {
        const OP: &str = "cross_entropy";
        float(OP, logits)?;
        options.check(OP)?;
        let target = LossTarget::new(self.worker(), OP, logits, labels, options)?;
        let dense = self.contiguous(logits)?;
        let classes = logits.dims()[logits.rank() - 1];
        let flat = Shape::new(&[target.tokens, classes])?;
        let rows = dense.relaid(Layout::contiguous(flat));
        let (losses, lse) = target.alloc(self.worker(), OP, logits.dtype().accumulator())?;
        let outputs = [Some(&losses), Some(&lse)];
        self.worker().launch(
            &options.kernel(),
            &[Some(&rows), Some(&target.labels)],
            &outputs,
        )?;
        let (y, count) = target.reduce(self.worker(), OP, losses)?;
        let from = *logits.shape();
        self.record_one(OP, &[&dense], y, move |bx| {
            let dloss = target.dloss(bx, OP, count.as_ref())?;
            let dx = bx.worker().alloc(OP, rows.dtype(), flat)?;
            let sources = [Some(&rows), Some(&target.labels), Some(&lse), Some(&dloss)];
            bx.worker()
                .launch(&options.grad_kernel(), &sources, &[Some(&dx)])?;
            bx.give(0, dx.relaid(Layout::contiguous(from)))
        })
    }

    /// [`Cx::cross_entropy`] of the logits `x` [.., h] times `weight` [v, h] transposed, without
    /// ever holding all of them: they are computed chunk by chunk, and again in the backward pass
    /// if `weight` needs a gradient.
    ///
    /// # Errors
    /// As [`Cx::cross_entropy`].
    pub fn linear_cross_entropy(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
    ) -> Result<Tensor> {
        const OP: &str = FusedHead::OP;
        let (fused, dense) = FusedHead::new(self, x, weight, labels, options)?;
        let from = *x.shape();
        if self.tracks(&[&dense]) && !weight.requires_grad() && options.reduction != Reduction::None
        {
            let (losses, grads) = fused.forward_and_grads(self.worker())?;
            let (y, count) = fused.target.reduce(self.worker(), OP, losses)?;
            let dtype = x.dtype();
            return self.record_one(OP, &[&dense], y, move |bx| {
                let factor = factor(bx, OP, count.as_ref())?;
                let dx = raw_binary(bx.worker(), OP, Binary::Mul, &grads, &factor)?;
                drop(grads);
                let dx = bx.worker().cast(&dx, dtype)?;
                bx.give(0, dx.relaid(Layout::contiguous(from)))
            });
        }
        let (losses, lse) = fused.forward(self.worker())?;
        let (y, count) = fused.target.reduce(self.worker(), OP, losses)?;
        self.record_one(OP, &[&dense, weight], y, move |bx| {
            let dloss = fused.target.dloss(bx, OP, count.as_ref())?;
            let dx = fused.backward(bx, &lse, &dloss)?;
            match dx {
                Some(dx) => bx.give(0, dx.relaid(Layout::contiguous(from))),
                None => Ok(()),
            }
        })
    }

    /// [`Cx::linear_cross_entropy`] whose loss will get `gradient`, one number, in the backward:
    /// logits are computed once, and from them the gradients too. For a layer that knows
    /// [`Cx::output_gradient`] and what it does to the loss itself. The gradient that arrives is not
    /// looked at.
    ///
    /// # Errors
    /// As [`Cx::cross_entropy`].
    pub fn linear_cross_entropy_at_once(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
        gradient: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = FusedHead::OP;
        if !self.is_recording() || !weight.requires_grad() || options.reduction == Reduction::None {
            return self.linear_cross_entropy(x, weight, labels, options);
        }
        if gradient.numel() != 1 {
            let what = format!(
                "a loss is one number, and so is its gradient, not {}",
                gradient.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let (fused, dense) = FusedHead::new(self, x, weight, labels, options)?;
        let acc = fused.acc();
        let gradient = self.worker().cast(&gradient.detach(), acc)?;
        let mut factor = gradient.relaid(Layout::contiguous(Shape::default()));
        if options.reduction == Reduction::Mean {
            let (_, count) = fused.target.used(self.worker(), OP, acc)?;
            factor = raw_binary(self.worker(), OP, Binary::Div, &factor, &count)?;
        }
        let dx = dense
            .requires_grad()
            .then(|| self.worker().alloc(OP, x.dtype(), *fused.x.shape()))
            .transpose()?;
        let sink = self.sink(OP, weight)?;
        let losses = fused.at_once(self.worker(), &factor, dx.as_ref(), sink.as_ref())?;
        let (y, _) = fused.target.reduce(self.worker(), OP, losses)?;
        let from = *x.shape();
        self.record_one(OP, &[&dense, weight], y, move |bx| {
            if let Some(dx) = dx {
                bx.give(0, dx.relaid(Layout::contiguous(from)))?;
            }
            match sink {
                Some(sink) => bx.give_back(1, sink),
                None => Ok(()),
            }
        })
    }
}

/// What tokens are measured against.
struct LossTarget {
    /// i64 [tokens], dense.
    labels: Tensor,
    tokens: usize,
    /// Shape of the labels as given.
    shape: Shape,
    options: CrossEntropy,
}

impl LossTarget {
    /// Labels for `x` [.., c].
    fn new(
        worker: &Worker,
        op: &'static str,
        x: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
    ) -> Result<Self> {
        check_index(op, labels, None)?;
        if x.rank() == 0 || x.dims()[..x.rank() - 1] != *labels.dims() {
            return Err(Error::Shape {
                op,
                left: *x.shape(),
                right: *labels.shape(),
            });
        }
        let (tokens, shape) = (labels.numel(), *labels.shape());
        let labels = worker.contiguous(&worker.cast(labels, DType::I64)?)?;
        let labels = labels.relaid(Layout::contiguous(Shape::new(&[tokens])?));
        Ok(Self {
            labels,
            tokens,
            shape,
            options,
        })
    }

    /// Room for losses and log-sum-exps.
    fn alloc(&self, worker: &Worker, op: &'static str, acc: DType) -> Result<(Tensor, Tensor)> {
        let shape = Shape::new(&[self.tokens])?;
        Ok((worker.alloc(op, acc, shape)?, worker.alloc(op, acc, shape)?))
    }

    /// 1 for each label that counts, else 0, and how many count, at least 1; on the device.
    fn used(&self, worker: &Worker, op: &'static str, dtype: DType) -> Result<(Tensor, Tensor)> {
        let ignore = worker.full(
            DType::I64,
            Shape::default(),
            self.options.ignore_index as f64,
        )?;
        let used = raw_compare(worker, op, Compare::Ne, &self.labels, &ignore)?;
        let used = worker.cast(&used, dtype)?;
        let count = worker.sum_to(&used, Shape::default())?;
        let one = worker.full(dtype, Shape::default(), 1.0)?;
        Ok((used, raw_binary(worker, op, Binary::Max, &count, &one)?))
    }

    /// The loss, and the divisor if it is a mean.
    fn reduce(
        &self,
        worker: &Worker,
        op: &'static str,
        losses: Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match self.options.reduction {
            Reduction::None => Ok((losses.relaid(Layout::contiguous(self.shape)), None)),
            Reduction::Sum => Ok((worker.sum_to(&losses, Shape::default())?, None)),
            Reduction::Mean => {
                let sum = worker.sum_to(&losses, Shape::default())?;
                let (_, count) = self.used(worker, op, losses.dtype())?;
                Ok((
                    raw_binary(worker, op, Binary::Div, &sum, &count)?,
                    Some(count),
                ))
            }
        }
    }

    /// The gradient of every token's loss, dense.
    fn dloss(&self, bx: &mut Back<'_>, op: &'static str, count: Option<&Tensor>) -> Result<Tensor> {
        let shape = Shape::new(&[self.tokens])?;
        if self.options.reduction == Reduction::None {
            return Ok(bx.dy()?.relaid(Layout::contiguous(shape)));
        }
        let each = factor(bx, op, count)?;
        let spread = each.relaid(Layout::contiguous(Shape::default()).broadcast_to(shape, op)?);
        bx.worker().contiguous(&spread)
    }
}

/// What the gradient of a sum of losses, or of their mean over `count`, is multiplied with.
fn factor(bx: &mut Back<'_>, op: &'static str, count: Option<&Tensor>) -> Result<Tensor> {
    let dy = bx.dy()?;
    match count {
        Some(count) => raw_binary(bx.worker(), op, Binary::Div, &dy, count),
        None => Ok(dy),
    }
}

/// Bytes that the logits of one chunk may take, unless that would leave the matrix products too
/// thin ([`Ops::min_gemm_rows`](crate::device::Ops::min_gemm_rows)).
const CHUNK_BYTES: usize = 32 << 20;
const MOST_TOKENS: usize = 4096;

/// A projection and the cross entropy of its result.
struct FusedHead {
    /// [tokens, h], dense.
    x: Tensor,
    /// [v, h].
    weight: Tensor,
    target: LossTarget,
}

impl FusedHead {
    const OP: &'static str = "linear_cross_entropy";

    /// The head for `x` [.., h], and `x` as it is on the tape, dense.
    fn new(
        cx: &mut Cx,
        x: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
    ) -> Result<(Self, Tensor)> {
        float(Self::OP, x)?;
        same_dtype(Self::OP, x, weight)?;
        options.check(Self::OP)?;
        if weight.rank() != 2 || x.rank() == 0 || x.dims()[x.rank() - 1] != weight.dims()[1] {
            return Err(Error::Shape {
                op: Self::OP,
                left: *x.shape(),
                right: *weight.shape(),
            });
        }
        let target = LossTarget::new(cx.worker(), Self::OP, x, labels, options)?;
        let dense = cx.contiguous(x)?;
        let rows = Shape::new(&[target.tokens, weight.dims()[1]])?;
        let head = Self {
            x: dense.detach().relaid(Layout::contiguous(rows)),
            weight: weight.detach(),
            target,
        };
        Ok((head, dense))
    }

    /// Tokens per chunk: a function of sizes and the kind of device alone.
    fn chunk(&self, worker: &Worker) -> usize {
        let row = self.weight.dims()[0] * self.acc().size();
        let least = worker.device().ops().min_gemm_rows().min(MOST_TOKENS);
        let chosen = (CHUNK_BYTES / row.max(1)).clamp(least, MOST_TOKENS);
        self.target
            .options
            .chunk_tokens
            .unwrap_or(chosen)
            .min(self.target.tokens.max(1))
    }

    fn acc(&self) -> DType {
        self.x.dtype().accumulator()
    }

    /// First token and number of tokens of each chunk.
    fn chunks(&self, worker: &Worker) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (tokens, chunk) = (self.target.tokens, self.chunk(worker));
        (0..tokens)
            .step_by(chunk)
            .map(move |at| (at, chunk.min(tokens - at)))
    }

    fn buffer(&self, worker: &Worker, dtype: DType) -> Result<Tensor> {
        worker.alloc(
            Self::OP,
            dtype,
            Shape::new(&[self.chunk(worker), self.weight.dims()[0]])?,
        )
    }

    /// The logits of a chunk, in the accumulator type, into the buffer.
    fn logits(&self, worker: &Worker, buffer: &Tensor, at: usize, many: usize) -> Result<Tensor> {
        let logits = buffer.narrowed(0, 0, many);
        let x = self.x.narrowed(0, at, many);
        multiply_into(worker, &x, &transposed(&self.weight), &logits, 1.0, 0.0)?;
        Ok(logits)
    }

    /// Loss and log-sum-exp of every token.
    fn forward(&self, worker: &Worker) -> Result<(Tensor, Tensor)> {
        let buffer = self.buffer(worker, self.acc())?;
        let (losses, lse) = self.target.alloc(worker, Self::OP, self.acc())?;
        for (at, many) in self.chunks(worker) {
            self.chunk_losses(worker, &buffer, [&losses, &lse], at, many)?;
        }
        Ok((losses, lse))
    }

    /// Loss and log-sum-exp of a chunk's tokens, into their places; its logits are left in the
    /// buffer.
    fn chunk_losses(
        &self,
        worker: &Worker,
        buffer: &Tensor,
        to: [&Tensor; 2],
        at: usize,
        many: usize,
    ) -> Result<Tensor> {
        let logits = self.logits(worker, buffer, at, many)?;
        let labels = self.target.labels.narrowed(0, at, many);
        let [losses, lse] = to.map(|t| t.narrowed(0, at, many));
        let kernel = self.target.options.kernel();
        worker.launch(
            &kernel,
            &[Some(&logits), Some(&labels)],
            &[Some(&losses), Some(&lse)],
        )?;
        Ok(logits)
    }

    /// Loss of every token, and the gradient of every row by its token's loss, in the accumulator
    /// type.
    fn forward_and_grads(&self, worker: &Worker) -> Result<(Tensor, Tensor)> {
        let buffer = self.buffer(worker, self.acc())?;
        let narrow = self.narrow_buffer(worker)?;
        let (losses, lse) = self.target.alloc(worker, Self::OP, self.acc())?;
        let grads = worker.alloc(Self::OP, self.acc(), *self.x.shape())?;
        let ones = worker.full(self.acc(), Shape::new(&[self.chunk(worker)])?, 1.0)?;
        for (at, many) in self.chunks(worker) {
            let logits = self.chunk_losses(worker, &buffer, [&losses, &lse], at, many)?;
            let [labels, lse] = [&self.target.labels, &lse].map(|t| t.narrowed(0, at, many));
            let ones = ones.narrowed(0, 0, many);
            let dlogits = self.dlogits(worker, narrow.as_ref(), &logits, [&labels, &lse, &ones])?;
            multiply_into(
                worker,
                &dlogits,
                &self.weight,
                &grads.narrowed(0, at, many),
                1.0,
                0.0,
            )?;
        }
        Ok((losses, grads))
    }

    /// Where the accumulator is wider the products take gradients rounded to the type itself.
    fn narrow_buffer(&self, worker: &Worker) -> Result<Option<Tensor>> {
        let dtype = self.x.dtype();
        (self.acc() != dtype)
            .then(|| self.buffer(worker, dtype))
            .transpose()
    }

    /// The gradients of a chunk's logits, in place or in the narrow buffer.
    fn dlogits(
        &self,
        worker: &Worker,
        narrow: Option<&Tensor>,
        logits: &Tensor,
        [labels, lse, dloss]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let dlogits = narrow.map_or_else(|| logits.clone(), |b| b.narrowed(0, 0, logits.dims()[0]));
        let sources = [Some(logits), Some(labels), Some(lse), Some(dloss)];
        worker.launch(
            &self.target.options.grad_kernel(),
            &sources,
            &[Some(&dlogits)],
        )?;
        Ok(dlogits)
    }

    /// Loss of every token; gradients of rows and weight, where wanted, for losses that all get
    /// `factor`. Chunk by chunk as [`FusedHead::backward`], so that the bits are the same.
    fn at_once(
        &self,
        worker: &Worker,
        factor: &Tensor,
        dx: Option<&Tensor>,
        sink: Option<&Sink>,
    ) -> Result<Tensor> {
        let buffer = self.buffer(worker, self.acc())?;
        let narrow = self.narrow_buffer(worker)?;
        let (losses, lse) = self.target.alloc(worker, Self::OP, self.acc())?;
        let shape = Shape::new(&[self.chunk(worker)])?;
        let each =
            factor.relaid(Layout::contiguous(Shape::default()).broadcast_to(shape, Self::OP)?);
        let each = worker.contiguous(&each)?;
        let mut beta = sink.map_or(0.0, |sink| f64::from(u8::from(sink.accumulate)));
        for (at, many) in self.chunks(worker) {
            let logits = self.chunk_losses(worker, &buffer, [&losses, &lse], at, many)?;
            let [labels, lse] = [&self.target.labels, &lse].map(|t| t.narrowed(0, at, many));
            let each = each.narrowed(0, 0, many);
            let dlogits = self.dlogits(worker, narrow.as_ref(), &logits, [&labels, &lse, &each])?;
            self.gradients(worker, &dlogits, [at, many], dx, sink, &mut beta)?;
        }
        self.finish(worker, sink, beta)?;
        Ok(losses)
    }

    /// What a chunk adds to the gradients of rows and weight.
    fn gradients(
        &self,
        worker: &Worker,
        dlogits: &Tensor,
        [at, many]: [usize; 2],
        dx: Option<&Tensor>,
        sink: Option<&Sink>,
        beta: &mut f64,
    ) -> Result<()> {
        if let Some(dx) = dx {
            let dx = dx.narrowed(0, at, many);
            multiply_into(worker, dlogits, &self.weight, &dx, 1.0, 0.0)?;
        }
        if let Some(sink) = sink {
            let x = self.x.narrowed(0, at, many);
            multiply_into(worker, &transposed(dlogits), &x, &sink.tensor, 1.0, *beta)?;
            *beta = 1.0;
        }
        Ok(())
    }

    /// A sink that no chunk has written is zero.
    fn finish(&self, worker: &Worker, sink: Option<&Sink>, beta: f64) -> Result<()> {
        match sink {
            Some(sink) if beta == 0.0 => {
                worker.launch(&Kernel::Fill { value: 0.0 }, &[], &[Some(&sink.tensor)])
            }
            _ => Ok(()),
        }
    }

    /// Gives the weight's gradient and returns that of the rows, where wanted.
    fn backward(&self, bx: &mut Back<'_>, lse: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let worker = bx.worker().clone();
        let dtype = self.x.dtype();
        let dx = bx
            .needs(0)
            .then(|| worker.alloc(Self::OP, dtype, *self.x.shape()))
            .transpose()?;
        let sink = bx.needs(1).then(|| bx.sink(1)).transpose()?;
        let mut beta = sink
            .as_ref()
            .map_or(0.0, |s| f64::from(u8::from(s.accumulate)));
        let buffer = self.buffer(&worker, self.acc())?;
        let narrow = self.narrow_buffer(&worker)?;
        for (at, many) in self.chunks(&worker) {
            let logits = self.logits(&worker, &buffer, at, many)?;
            let [labels, lse, dloss] =
                [&self.target.labels, lse, dloss].map(|t| t.narrowed(0, at, many));
            let dlogits =
                self.dlogits(&worker, narrow.as_ref(), &logits, [&labels, &lse, &dloss])?;
            self.gradients(
                &worker,
                &dlogits,
                [at, many],
                dx.as_ref(),
                sink.as_ref(),
                &mut beta,
            )?;
        }
        self.finish(&worker, sink.as_ref(), beta)?;
        if let Some(sink) = sink {
            drop((buffer, narrow));
            bx.give_back(1, sink)?;
        }
        Ok(dx)
    }
}
