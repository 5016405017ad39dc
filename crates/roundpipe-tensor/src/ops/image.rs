//! Convolution and pooling of images `[n, c, h, w]`.
//!
//! Everything about the geometry is checked here: a window that is larger than the image with its
//! border, a step of zero, groups that do not divide the channels, a border wider than half a
//! pooling window.

use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{ConvSpec, Kernel, PoolSpec, Reduce};
use crate::shape::{Layout, Shape};
use crate::tape::Back;
use crate::tensor::Tensor;

impl Cx {
    /// 2-d convolution (cross-correlation) of `x: [n, c, h, w]` with `filter: [o, c/groups, kh,
    /// kw]`, plus `bias: [o]`.
    ///
    /// # Errors
    /// When shapes, types or geometry do not fit.
    pub fn conv2d(
        &mut self,
        x: &Tensor,
        filter: &Tensor,
        bias: Option<&Tensor>,
        spec: ConvSpec,
    ) -> Result<Tensor> {
        const OP: &str = "conv2d";
        float(OP, x)?;
        same_dtype(OP, x, filter)?;
        let shape = conv_shape(OP, x.shape(), filter.shape(), &spec)?;
        if let Some(bias) = bias {
            same_dtype(OP, x, bias)?;
            same_shape(OP, bias, Shape::new(&[shape[1]])?)?;
        }
        let (dense, taps) = (
            self.worker().contiguous(x)?.detach(),
            self.worker().contiguous(filter)?.detach(),
        );
        let added = bias.map(|b| self.worker().contiguous(b)).transpose()?;
        let y = self.worker().alloc(OP, x.dtype(), shape)?;
        let kernel = Kernel::Conv2d(spec);
        self.worker().launch(
            &kernel,
            &[Some(&dense), Some(&taps), added.as_ref()],
            &[Some(&y)],
        )?;
        // The gradient of one operand needs the other: keep what a wanted gradient needs.
        let kept_x = self.tracks(&[filter]).then_some(dense);
        let kept_filter = self.tracks(&[x]).then_some(taps);
        let (from, mut inputs) = (*x.shape(), vec![x, filter]);
        inputs.extend(bias);
        let has_bias = bias.is_some();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            if let Some(x) = kept_x {
                filter_gradient(bx, &x, &dy, spec)?;
            }
            if has_bias && bx.needs(2) {
                bias_gradient(bx, &dy)?;
            }
            if let Some(filter) = kept_filter {
                let dx = bx.worker().alloc(OP, dy.dtype(), from)?;
                let kernel = Kernel::Conv2dGradInput(spec);
                bx.worker()
                    .launch(&kernel, &[Some(&dy), Some(&filter)], &[Some(&dx)])?;
                drop((dy, filter));
                bx.give(0, dx)?;
            }
            Ok(())
        })
    }

    /// 1-d convolution of `x: [n, c, l]` with `filter: [o, c/groups, k]`, plus `bias: [o]`:
    /// [`Cx::conv2d`] over images of height 1; stride, padding and dilation are those of the width.
    ///
    /// # Errors
    /// As [`Cx::conv2d`].
    pub fn conv1d(
        &mut self,
        x: &Tensor,
        filter: &Tensor,
        bias: Option<&Tensor>,
        spec: ConvSpec,
    ) -> Result<Tensor> {
        const OP: &str = "conv1d";
        if x.rank() != 3 || filter.rank() != 3 {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *filter.shape(),
            });
        }
        let flat = |[_, across]: [usize; 2], one: usize| [one, across];
        let (stride, padding) = (flat(spec.stride, 1), flat(spec.padding, 0));
        let spec = ConvSpec {
            stride,
            padding,
            dilation: flat(spec.dilation, 1),
            groups: spec.groups,
        };
        let raised = |d: &[usize]| [d[0] as isize, d[1] as isize, 1, d[2] as isize];
        let x = self.reshape(x, &raised(x.dims()))?;
        let filter = self.reshape(filter, &raised(filter.dims()))?;
        let y = self.conv2d(&x, &filter, bias, spec)?;
        let dims = [
            y.dims()[0] as isize,
            y.dims()[1] as isize,
            y.dims()[3] as isize,
        ];
        self.reshape(&y, &dims)
    }

    /// Transposed 2-d convolution of `x: [n, c, h, w]` with `filter: [c, o/groups, kh, kw]`, plus
    /// `bias: [o]`: what [`Cx::conv2d`] with this filter and `spec` does to gradients. A side of h
    /// becomes (h - 1) · stride - 2 · padding + dilation · (kh - 1) + 1 + `output_padding`, which
    /// chooses among the sizes that the convolution would take to h.
    ///
    /// # Errors
    /// When shapes, types or geometry do not fit.
    pub fn conv_transpose2d(
        &mut self,
        x: &Tensor,
        filter: &Tensor,
        bias: Option<&Tensor>,
        spec: ConvSpec,
        output_padding: [usize; 2],
    ) -> Result<Tensor> {
        const OP: &str = "conv_transpose2d";
        float(OP, x)?;
        same_dtype(OP, x, filter)?;
        let shape = transposed_shape(OP, x.shape(), filter.shape(), &spec, output_padding)?;
        if let Some(bias) = bias {
            same_dtype(OP, x, bias)?;
            same_shape(OP, bias, Shape::new(&[shape[1]])?)?;
        }
        let (dense, taps) = (
            self.worker().contiguous(x)?.detach(),
            self.worker().contiguous(filter)?.detach(),
        );
        let y = self.worker().alloc(OP, x.dtype(), shape)?;
        let kernel = Kernel::Conv2dGradInput(spec);
        self.worker()
            .launch(&kernel, &[Some(&dense), Some(&taps)], &[Some(&y)])?;
        // The gradient of one operand needs the other: keep what a wanted gradient needs.
        let kept_x = self.tracks(&[filter]).then_some(dense);
        let kept_filter = self.tracks(&[x]).then_some(taps);
        let from = *x.shape();
        let y = self.record_one(OP, &[x, filter], y, move |bx| {
            let dy = bx.dy()?;
            if let Some(x) = kept_x {
                // Input and output have changed places.
                filter_gradient(bx, &dy, &x, spec)?;
            }
            if let Some(filter) = kept_filter {
                let dx = bx.worker().alloc(OP, dy.dtype(), from)?;
                let kernel = Kernel::Conv2d(spec);
                bx.worker()
                    .launch(&kernel, &[Some(&dy), Some(&filter), None], &[Some(&dx)])?;
                drop((dy, filter));
                bx.give(0, dx)?;
            }
            Ok(())
        })?;
        let Some(bias) = bias else {
            return Ok(y);
        };
        let bias = self.reshape(bias, &[1, -1, 1, 1])?;
        self.add(&y, &bias)
    }

    /// The largest element of every window of `x: [n, c, h, w]`; the border counts as -inf, NaN
    /// wins.
    ///
    /// # Errors
    /// When shape or geometry do not fit.
    pub fn max_pool2d(&mut self, x: &Tensor, spec: PoolSpec) -> Result<Tensor> {
        const OP: &str = "max_pool2d";
        let shape = pool_shape(OP, x, &spec)?;
        if i32::try_from(x.dims()[2] * x.dims()[3]).is_err() {
            let what = format!("planes of {} have more than 2^31 - 1 elements", x.shape());
            return Err(Error::invalid(OP, what));
        }
        let dense = self.worker().contiguous(x)?;
        let y = self.worker().alloc(OP, x.dtype(), shape)?;
        let at = self.worker().alloc(OP, DType::I32, shape)?;
        self.worker().launch(
            &Kernel::MaxPool2d(spec),
            &[Some(&dense)],
            &[Some(&y), Some(&at)],
        )?;
        drop(dense);
        let from = *x.shape();
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().alloc(OP, dy.dtype(), from)?;
            bx.worker().launch(
                &Kernel::MaxPool2dGrad(spec),
                &[Some(&dy), Some(&at)],
                &[Some(&dx)],
            )?;
            drop((dy, at));
            bx.give(0, dx)
        })
    }

    /// The average of every window of `x: [n, c, h, w]`; the border counts as 0.
    ///
    /// # Errors
    /// When shape or geometry do not fit.
    pub fn avg_pool2d(&mut self, x: &Tensor, spec: PoolSpec) -> Result<Tensor> {
        const OP: &str = "avg_pool2d";
        if spec.dilation != [1, 1] {
            return Err(Error::invalid(
                OP,
                format!("dilation {:?}; only max_pool2d has one", spec.dilation),
            ));
        }
        let shape = pool_shape(OP, x, &spec)?;
        self.average(
            OP,
            x,
            shape,
            Kernel::AvgPool2d(spec),
            Kernel::AvgPool2dGrad(spec),
        )
    }

    /// `x: [n, c, h, w]` averaged down to `[n, c, size[0], size[1]]`: windows of about equal size.
    ///
    /// # Errors
    /// When `x` has no such shape, or no elements to average.
    pub fn adaptive_avg_pool2d(&mut self, x: &Tensor, size: [usize; 2]) -> Result<Tensor> {
        const OP: &str = "adaptive_avg_pool2d";
        image(OP, x)?;
        if x.dims()[2] == 0 || x.dims()[3] == 0 {
            return Err(Error::invalid(
                OP,
                format!("planes of {} are empty", x.shape()),
            ));
        }
        let shape = Shape::new(&[x.dims()[0], x.dims()[1], size[0], size[1]])?;
        self.average(
            OP,
            x,
            shape,
            Kernel::AdaptiveAvgPool2d,
            Kernel::AdaptiveAvgPool2dGrad,
        )
    }

    /// The average of every plane of `x: [n, c, h, w]`, as `[n, c, 1, 1]`.
    ///
    /// # Errors
    /// As [`Cx::adaptive_avg_pool2d`].
    pub fn global_avg_pool2d(&mut self, x: &Tensor) -> Result<Tensor> {
        self.adaptive_avg_pool2d(x, [1, 1])
    }

    fn average(
        &mut self,
        op: &'static str,
        x: &Tensor,
        shape: Shape,
        forward: Kernel,
        backward: Kernel,
    ) -> Result<Tensor> {
        let dense = self.worker().contiguous(x)?;
        let y = self.worker().alloc(op, x.dtype(), shape)?;
        self.worker()
            .launch(&forward, &[Some(&dense)], &[Some(&y)])?;
        drop(dense);
        let from = *x.shape();
        self.record_one(op, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().alloc(op, dy.dtype(), from)?;
            bx.worker().launch(&backward, &[Some(&dy)], &[Some(&dx)])?;
            drop(dy);
            bx.give(0, dx)
        })
    }
}

fn filter_gradient(bx: &mut Back<'_>, x: &Tensor, dy: &Tensor, spec: ConvSpec) -> Result<()> {
    let sink = bx.sink(1)?;
    let kernel = Kernel::Conv2dGradFilter {
        spec,
        accumulate: sink.accumulate,
    };
    bx.worker()
        .launch(&kernel, &[Some(x), Some(dy)], &[Some(&sink.tensor)])?;
    bx.give_back(1, sink)
}

/// The sum of dy over images and positions.
fn bias_gradient(bx: &mut Back<'_>, dy: &Tensor) -> Result<()> {
    let sink = bx.sink(2)?;
    let shape = Shape::new(&[1, dy.dims()[1], 1, 1])?;
    let into = sink.tensor.relaid(Layout::contiguous(shape));
    let kernel = Kernel::Reduce {
        op: Reduce::Sum,
        accumulate: sink.accumulate,
    };
    bx.worker().launch(&kernel, &[Some(dy)], &[Some(&into)])?;
    drop(into);
    bx.give_back(2, sink)
}

/// Refuses what is not a batch of float images.
fn image(op: &'static str, x: &Tensor) -> Result<()> {
    float(op, x)?;
    if x.rank() == 4 {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        format!("{} is not a batch of images [n, c, h, w]", x.shape()),
    ))
}

/// The shape of a convolution's result.
fn conv_shape(op: &'static str, x: &Shape, f: &Shape, spec: &ConvSpec) -> Result<Shape> {
    if x.rank() != 4 || f.rank() != 4 {
        return Err(Error::Shape {
            op,
            left: *x,
            right: *f,
        });
    }
    let groups = spec.groups;
    if groups == 0 || !x[1].is_multiple_of(groups) || !f[0].is_multiple_of(groups) {
        let what =
            format!("{groups} groups do not divide the channels of input {x} and filter {f}");
        return Err(Error::invalid(op, what));
    }
    if x[1] / groups != f[1] {
        let what = format!(
            "input {x} in {groups} groups has {} channels each, filter {f} wants {}",
            x[1] / groups,
            f[1]
        );
        return Err(Error::invalid(op, what));
    }
    check_taps(op, [f[2], f[3]])?;
    let size = |a: usize| {
        let (stride, padding, dilation) = (spec.stride[a], spec.padding[a], spec.dilation[a]);
        let window = Window {
            kernel: f[2 + a],
            stride,
            padding,
            dilation,
        };
        window.count(op, x, x[2 + a], false)
    };
    Shape::new(&[x[0], f[0], size(0)?, size(1)?])
}

/// The shape of a transposed convolution's result.
fn transposed_shape(
    op: &'static str,
    x: &Shape,
    f: &Shape,
    spec: &ConvSpec,
    output_padding: [usize; 2],
) -> Result<Shape> {
    if x.rank() != 4 || f.rank() != 4 {
        return Err(Error::Shape {
            op,
            left: *x,
            right: *f,
        });
    }
    if x[1] != f[0] {
        let what = format!("input {x} has {} channels, filter {f} wants {}", x[1], f[0]);
        return Err(Error::invalid(op, what));
    }
    check_taps(op, [f[2], f[3]])?;
    let side = |a: usize| {
        let (stride, more) = (spec.stride[a], output_padding[a]);
        if more >= stride {
            let what = format!("output_padding {more} must be less than the stride {stride}");
            return Err(Error::invalid(op, what));
        }
        let span = spec.dilation[a].checked_mul(f[2 + a].saturating_sub(1));
        let grown = x[2 + a].saturating_sub(1).checked_mul(stride);
        let size = grown
            .zip(span)
            .and_then(|(grown, span)| grown.checked_add(span)?.checked_add(more + 1))
            .and_then(|size| size.checked_sub(spec.padding[a].checked_mul(2)?));
        size.ok_or_else(|| {
            let what =
                format!("{x} under filter {f} with {spec:?} has no size that can be written");
            Error::invalid(op, what)
        })
    };
    let channels = f[1].saturating_mul(spec.groups);
    let shape = Shape::new(&[x[0], channels, side(0)?, side(1)?])?;
    // The convolution that this one transposes must lead back, which also checks its geometry.
    if conv_shape(op, &shape, f, spec)? != *x {
        let what = format!("{shape} under filter {f} does not lead back to {x}");
        return Err(Error::invalid(op, what));
    }
    Ok(shape)
}

/// Refuses windows whose taps alone, of which kernels keep a list, would take memory: a filter
/// without channels has any size.
fn check_taps(op: &'static str, window: [usize; 2]) -> Result<()> {
    if window[0].saturating_mul(window[1]) <= 1 << 20 {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        format!("a window of {window:?} is larger than any image needs"),
    ))
}

/// The shape of a pooling's result.
fn pool_shape(op: &'static str, x: &Tensor, spec: &PoolSpec) -> Result<Shape> {
    image(op, x)?;
    if (0..2).any(|a| spec.padding[a] > spec.kernel[a] / 2) {
        let what = format!(
            "padding {:?} is more than half the window {:?}",
            spec.padding, spec.kernel
        );
        return Err(Error::invalid(op, what));
    }
    check_taps(op, spec.kernel)?;
    let size = |a: usize| {
        let (stride, padding, dilation) = (spec.stride[a], spec.padding[a], spec.dilation[a]);
        let window = Window {
            kernel: spec.kernel[a],
            stride,
            padding,
            dilation,
        };
        window.count(op, x.shape(), x.dims()[2 + a], spec.ceil_mode)
    };
    Shape::new(&[x.dims()[0], x.dims()[1], size(0)?, size(1)?])
}

/// A window along one dimension.
struct Window {
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Window {
    /// How many fit along `size` elements of `x`; with `ceil` one more may reach over the end, if
    /// it begins before it.
    fn count(&self, op: &'static str, x: &Shape, size: usize, ceil: bool) -> Result<usize> {
        let Self {
            kernel,
            stride,
            padding,
            dilation,
        } = *self;
        if kernel == 0 || stride == 0 || dilation == 0 {
            let what =
                format!("window {kernel}, stride {stride} and dilation {dilation} must not be 0");
            return Err(Error::invalid(op, what));
        }
        // Sizes beyond this have no meaning and would overflow below.
        const MOST: usize = 1 << 31;
        let huge = [kernel, stride, padding, dilation]
            .iter()
            .any(|n| *n >= MOST);
        let padded = size.saturating_add(2 * padding.min(MOST));
        let span = if huge {
            usize::MAX
        } else {
            dilation * (kernel - 1) + 1
        };
        if span > padded {
            let what = format!(
                "a window of {span} is larger than {padded}, a side of {x} with its padding"
            );
            return Err(Error::invalid(op, what));
        }
        let room = padded - span;
        let count = if ceil {
            room.div_ceil(stride)
        } else {
            room / stride
        } + 1;
        let over = ceil && (count - 1) * stride >= size + padding;
        Ok(count - usize::from(over))
    }
}
