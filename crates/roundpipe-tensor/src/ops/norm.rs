//! Normalisation: RMS norm (alone and with the residual added first), layer, group, instance and
//! batch norm.
//!
//! Statistics are kept in the accumulator type, for the backward pass too; gradients of weights and
//! biases are summed there.

use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, Unary};
use crate::ops::arith::raw_unary;
use crate::param::Param;
use crate::shape::Shape;
use crate::tape::{Back, Sink};
use crate::tensor::Tensor;

/// How a batch norm treats its statistics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNorm {
    /// Share of the new statistics in the running ones.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

impl Default for BatchNorm {
    fn default() -> Self {
        Self {
            momentum: 0.1,
            eps: 1e-5,
        }
    }
}

impl Cx {
    /// x / √(mean(x²) + eps) · weight over the last dimension.
    ///
    /// # Errors
    /// When the weight is not one value of x's type per element of the last dimension.
    pub fn rms_norm(&mut self, x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        const OP: &str = "rms_norm";
        let rows = check_rows(OP, x, [weight, None])?;
        let (x, weight) = (self.contiguous(x)?, self.dense(weight)?);
        let y = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        let rstd = self.worker().alloc(OP, x.dtype().accumulator(), rows)?;
        let src = [Some(&x), weight.as_ref(), None];
        self.worker().launch(
            &Kernel::RmsNorm { eps },
            &src,
            &[Some(&y), Some(&rstd), None],
        )?;
        let saved = SavedNorm::new(&x, weight.as_ref(), vec![rstd]);
        let inputs: Vec<&Tensor> = [&x].into_iter().chain(&weight).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            let at = saved.weight.as_ref().map(|_| 1);
            let before = bx.take_sum(0)?;
            if let Some(dx) = rms_backward(bx, OP, saved, &dy, before, at)? {
                drop(dy);
                bx.give(0, dx)?;
            }
            Ok(())
        })
    }

    /// The sum x + residual and its RMS norm, in one pass over the memory: (sum, normed).
    ///
    /// # Errors
    /// When x and residual differ in shape or type, and as [`Cx::rms_norm`].
    pub fn add_rms_norm(
        &mut self,
        x: &Tensor,
        residual: &Tensor,
        weight: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        const OP: &str = "add_rms_norm";
        let rows = check_rows(OP, x, [weight, None])?;
        same_dtype(OP, x, residual)?;
        same_shape(OP, residual, *x.shape())?;
        let (x, residual) = (self.contiguous(x)?, self.contiguous(residual)?);
        let weight = self.dense(weight)?;
        let y = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        let rstd = self.worker().alloc(OP, x.dtype().accumulator(), rows)?;
        let sum = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        let src = [Some(&x), weight.as_ref(), Some(&residual)];
        self.worker().launch(
            &Kernel::RmsNorm { eps },
            &src,
            &[Some(&y), Some(&rstd), Some(&sum)],
        )?;
        let saved = SavedNorm::new(&sum, weight.as_ref(), vec![rstd]);
        let inputs: Vec<&Tensor> = [&x, &residual].into_iter().chain(&weight).collect();
        let outputs = self.record(OP, &inputs, vec![sum, y], move |bx| {
            let (dsum, dy) = (bx.grad(0)?, bx.grad(1)?);
            let at = saved.weight.as_ref().map(|_| 2);
            let dx = match dy {
                Some(dy) => rms_backward(bx, OP, saved, &dy, dsum, at)?,
                None => dsum,
            };
            if let Some(dx) = dx {
                bx.give(0, dx.clone())?;
                bx.give(1, dx)?;
            }
            Ok(())
        })?;
        let [sum, y] = <[Tensor; 2]>::try_from(outputs).expect("two outputs in, two out");
        Ok((sum, y))
    }

    /// (x - mean) / √(variance + eps) · weight + bias over the last dimension.
    ///
    /// # Errors
    /// When weight or bias is not one value of x's type per element of the last dimension.
    pub fn layer_norm(
        &mut self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        const OP: &str = "layer_norm";
        let stats = check_rows(OP, x, [weight, bias])?;
        let kernels = (Kernel::LayerNorm { eps }, |accumulate| {
            Kernel::LayerNormGrad { accumulate }
        });
        self.centered(OP, x, [weight, bias], stats, kernels)
    }

    /// Layer norm of `[n, c, ..]` over each of `groups` groups of channels, with weight and bias
    /// per channel.
    ///
    /// # Errors
    /// When the groups do not divide the channels, or weight or bias is not one value per channel.
    pub fn group_norm(
        &mut self,
        x: &Tensor,
        groups: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        const OP: &str = "group_norm";
        let channels = check_channels(OP, x, [weight, bias])?;
        if groups == 0 || channels % groups != 0 {
            let what = format!(
                "{groups} groups do not divide the {channels} channels of {}",
                x.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let stats = Shape::new(&[x.dims()[0], groups])?;
        let grad = move |accumulate| Kernel::GroupNormGrad { groups, accumulate };
        self.centered(
            OP,
            x,
            [weight, bias],
            stats,
            (Kernel::GroupNorm { groups, eps }, grad),
        )
    }

    /// Layer norm of `[n, c, ..]` over each channel of each sample.
    ///
    /// # Errors
    /// When weight or bias is not one value per channel.
    pub fn instance_norm(
        &mut self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let channels = check_channels("instance_norm", x, [weight, bias])?;
        self.group_norm(x, channels.max(1), weight, bias, eps)
    }

    /// Norm of every channel of `[n, c, ..]` over samples and places. In training, or without
    /// running statistics, by those of the batch; the running ones (accumulator type, `[c]`) move
    /// towards them by `momentum`, the variance unbiased, once [`Cx::commit_buffers`] is called.
    /// Else by the running ones.
    ///
    /// # Errors
    /// When weight, bias or a running statistic is not one value per channel, or a batch has one
    /// value per channel and so no variance.
    pub fn batch_norm(
        &mut self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        running: Option<(&Param, &Param)>,
        options: BatchNorm,
    ) -> Result<Tensor> {
        const OP: &str = "batch_norm";
        let channels = check_channels(OP, x, [weight, bias])?;
        let acc = x.dtype().accumulator();
        let batch_stats = self.is_training() || running.is_none();
        check_running(x, channels, running, batch_stats)?;
        let (x, weight, bias) = (self.contiguous(x)?, self.dense(weight)?, self.dense(bias)?);
        let given = match running {
            // `bind` takes any strides.
            Some((mean, var)) if !batch_stats => {
                let [mean, var] = [self.get(mean)?, self.get(var)?];
                Some((
                    self.worker().contiguous(&mean)?,
                    self.worker().contiguous(&var)?,
                ))
            }
            _ => None,
        };
        let y = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        let row = || self.worker().alloc(OP, acc, Shape::new(&[channels])?);
        let [mean, rstd, var] = [row()?, row()?, row()?];
        let (given_mean, given_var) = given.as_ref().map(|(m, v)| (m, v)).unzip();
        self.worker().launch(
            &Kernel::BatchNorm { eps: options.eps },
            &[
                Some(&x),
                weight.as_ref(),
                bias.as_ref(),
                given_mean,
                given_var,
            ],
            &[Some(&y), Some(&mean), Some(&rstd), Some(&var)],
        )?;
        if let Some(running) = running.filter(|_| batch_stats && x.numel() > 0) {
            let count = (x.numel() / channels) as f64;
            self.follow(running.0, &mean, options.momentum, 1.0)?;
            self.follow(running.1, &var, options.momentum, count / (count - 1.0))?;
        }
        let saved = SavedNorm::new(&x, weight.as_ref(), vec![mean, rstd]);
        let grad = move |accumulate| Kernel::BatchNormGrad {
            batch_stats,
            accumulate,
        };
        self.record_centered(
            OP,
            [Some(&x), weight.as_ref(), bias.as_ref()],
            y,
            saved,
            grad,
        )
    }

    /// Moves a running statistic towards `value · scale` by `momentum`.
    fn follow(&mut self, buffer: &Param, value: &Tensor, momentum: f64, scale: f64) -> Result<()> {
        let old = self.get(buffer)?.detach();
        let keep = Unary::Affine {
            mul: 1.0 - momentum,
            add: 0.0,
        };
        let new = raw_unary(self.worker(), "batch_norm", keep, &old)?;
        let step = Kernel::Accumulate {
            alpha: momentum * scale,
        };
        self.worker().launch(&step, &[Some(value)], &[Some(&new)])?;
        self.set_buffer(buffer, &new)
    }

    /// The common course of layer and group norm: their kernels differ in how they group elements
    /// only.
    fn centered(
        &mut self,
        op: &'static str,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        stats: Shape,
        (kernel, grad): (Kernel, impl Fn(bool) -> Kernel + Send + 'static),
    ) -> Result<Tensor> {
        let (x, weight, bias) = (self.contiguous(x)?, self.dense(weight)?, self.dense(bias)?);
        let acc = x.dtype().accumulator();
        let y = self.worker().alloc(op, x.dtype(), *x.shape())?;
        let mean = self.worker().alloc(op, acc, stats)?;
        let rstd = self.worker().alloc(op, acc, stats)?;
        let src = [Some(&x), weight.as_ref(), bias.as_ref()];
        self.worker()
            .launch(&kernel, &src, &[Some(&y), Some(&mean), Some(&rstd)])?;
        let saved = SavedNorm::new(&x, weight.as_ref(), vec![mean, rstd]);
        self.record_centered(op, src, y, saved, grad)
    }

    /// Records a norm with mean, weight and bias; `inputs` are x, weight and bias.
    fn record_centered(
        &mut self,
        op: &'static str,
        inputs: [Option<&Tensor>; 3],
        y: Tensor,
        saved: SavedNorm,
        grad: impl Fn(bool) -> Kernel + Send + 'static,
    ) -> Result<Tensor> {
        let weight_at = inputs[1].map(|_| 1);
        let bias_at = inputs[2].map(|_| 1 + usize::from(weight_at.is_some()));
        let inputs: Vec<&Tensor> = inputs.into_iter().flatten().collect();
        self.record_one(op, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            let sinks = [wanted(bx, weight_at)?, wanted(bx, bias_at)?];
            let accumulate = align(bx, &sinks)?;
            let SavedNorm { x, weight, stats } = saved;
            let dx = bx
                .needs(0)
                .then(|| bx.worker().alloc(op, x.dtype(), *x.shape()))
                .transpose()?;
            let src = [
                Some(&x),
                weight.as_ref(),
                Some(&stats[0]),
                Some(&stats[1]),
                Some(&dy),
            ];
            let into = |i: usize| sinks[i].as_ref().map(|s| &s.tensor);
            bx.worker()
                .launch(&grad(accumulate), &src, &[dx.as_ref(), into(0), into(1)])?;
            drop((x, dy));
            for (at, sink) in [weight_at, bias_at].into_iter().zip(sinks) {
                give_back(bx, at, sink)?;
            }
            dx.map_or(Ok(()), |dx| bx.give(0, dx))
        })
    }

    /// A weight, densely laid out.
    fn dense(&mut self, weight: Option<&Tensor>) -> Result<Option<Tensor>> {
        weight.map(|w| self.contiguous(w)).transpose()
    }
}

/// What a backward pass of a norm reads again.
struct SavedNorm {
    x: Tensor,
    weight: Option<Tensor>,
    /// rstd, or mean and rstd.
    stats: Vec<Tensor>,
}

impl SavedNorm {
    fn new(x: &Tensor, weight: Option<&Tensor>, stats: Vec<Tensor>) -> Self {
        Self {
            x: x.detach(),
            weight: weight.map(Tensor::detach),
            stats,
        }
    }
}

/// Gradient of an RMS norm: settles the weight's (input `at`), returns that of what was normalised
/// with `dsum` added, when anybody wants it.
fn rms_backward(
    bx: &mut Back<'_>,
    op: &'static str,
    saved: SavedNorm,
    dy: &Tensor,
    dsum: Option<Tensor>,
    at: Option<usize>,
) -> Result<Option<Tensor>> {
    let SavedNorm { x, weight, stats } = saved;
    let sink = wanted(bx, at)?;
    let needed = (0..bx.inputs()).any(|i| Some(i) != at && bx.needs(i));
    let dx = needed
        .then(|| bx.worker().alloc(op, x.dtype(), *x.shape()))
        .transpose()?;
    let kernel = Kernel::RmsNormGrad {
        accumulate: sink.as_ref().is_some_and(|s| s.accumulate),
    };
    let src = [
        Some(&x),
        weight.as_ref(),
        Some(&stats[0]),
        Some(dy),
        dsum.as_ref(),
    ];
    bx.worker().launch(
        &kernel,
        &src,
        &[dx.as_ref(), sink.as_ref().map(|s| &s.tensor)],
    )?;
    give_back(bx, at, sink)?;
    Ok(dx)
}

/// Where to write the gradient of an input, if there is such an input and its gradient is wanted.
pub(super) fn wanted(bx: &mut Back<'_>, at: Option<usize>) -> Result<Option<Sink>> {
    match at {
        Some(i) if bx.needs(i) => bx.sink(i).map(Some),
        _ => Ok(None),
    }
}

/// Takes back what [`wanted`] gave.
pub(super) fn give_back(bx: &mut Back<'_>, at: Option<usize>, sink: Option<Sink>) -> Result<()> {
    match at.zip(sink) {
        Some((i, sink)) => bx.give_back(i, sink),
        None => Ok(()),
    }
}

/// One answer to whether both sinks are added to: when only one is, the other starts from zero.
fn align(bx: &Back<'_>, sinks: &[Option<Sink>]) -> Result<bool> {
    let accumulate = sinks.iter().flatten().any(|s| s.accumulate);
    for sink in sinks
        .iter()
        .flatten()
        .filter(|s| accumulate && !s.accumulate)
    {
        bx.worker()
            .launch(&Kernel::Fill { value: 0.0 }, &[], &[Some(&sink.tensor)])?;
    }
    Ok(accumulate)
}

/// Checks operands of a norm over the last dimension; gives the shape of its statistics.
fn check_rows(op: &'static str, x: &Tensor, weights: [Option<&Tensor>; 2]) -> Result<Shape> {
    float(op, x)?;
    let Some((&last, rest)) = x.dims().split_last() else {
        return Err(Error::invalid(
            op,
            "a scalar has no dimension to normalise over",
        ));
    };
    check_weights(op, x, last, weights)?;
    Shape::new(&[rest.iter().product()])
}

/// Checks operands of a norm of channels; gives their number.
fn check_channels(op: &'static str, x: &Tensor, weights: [Option<&Tensor>; 2]) -> Result<usize> {
    float(op, x)?;
    if x.rank() < 2 {
        return Err(Error::invalid(
            op,
            format!("{} has no channels: it takes [n, c, ..]", x.shape()),
        ));
    }
    check_weights(op, x, x.dims()[1], weights)?;
    Ok(x.dims()[1])
}

fn check_weights(
    op: &'static str,
    x: &Tensor,
    size: usize,
    weights: [Option<&Tensor>; 2],
) -> Result<()> {
    for weight in weights.into_iter().flatten() {
        same_dtype(op, x, weight)?;
        if weight.dims() != [size] {
            return Err(Error::Shape {
                op,
                left: *x.shape(),
                right: *weight.shape(),
            });
        }
    }
    Ok(())
}

fn check_running(
    x: &Tensor,
    channels: usize,
    running: Option<(&Param, &Param)>,
    batch: bool,
) -> Result<()> {
    const OP: &str = "batch_norm";
    let acc: DType = x.dtype().accumulator();
    for buffer in running.into_iter().flat_map(|(m, v)| [m, v]) {
        if buffer.dtype() != acc || buffer.shape().dims() != [channels] {
            let what = format!(
                "running statistics of {} {} are {acc} [{channels}], not {} {}",
                x.dtype(),
                x.shape(),
                buffer.dtype(),
                buffer.shape()
            );
            return Err(Error::invalid(OP, what));
        }
    }
    if batch && x.numel() > 0 && x.numel() == channels {
        let what = format!(
            "{} has one value per channel, which has no variance",
            x.shape()
        );
        return Err(Error::invalid(OP, what));
    }
    Ok(())
}
