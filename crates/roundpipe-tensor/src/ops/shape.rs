//! Shape changes: views wherever the strides allow, copies only where they do not.

use crate::cx::{Cx, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::shape::{Layout, MAX_RANK, Shape};
use crate::tensor::Tensor;

impl Cx {
    /// The same elements, densely laid out; no copy when they are already.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn contiguous(&mut self, x: &Tensor) -> Result<Tensor> {
        if x.is_contiguous() {
            return Ok(x.clone());
        }
        let y = self.worker().contiguous(x)?;
        self.record_one("contiguous", &[x], y, |bx| {
            let dy = bx.dy()?;
            bx.give(0, dy)
        })
    }

    /// The values in another type. Gradients flow between float types.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn cast(&mut self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let y = self.worker().cast(x, dtype)?;
        if !(dtype.is_float() && x.dtype().is_float()) {
            return Ok(y);
        }
        let from = x.dtype();
        self.record_one("cast", &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().cast(&dy, from)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// The same elements in the same order under other sizes; one of them may be -1 (what is left).
    ///
    /// # Errors
    /// When the number of elements differs.
    pub fn reshape(&mut self, x: &Tensor, dims: &[isize]) -> Result<Tensor> {
        let shape = resolve(x, dims)?;
        let y = match x.layout().reshaped(shape) {
            Some(layout) => x.relaid(layout),
            None => self.worker().contiguous(x)?.relaid(Layout::contiguous(shape)),
        };
        let from = *x.shape();
        self.record_one("reshape", &[x], y, move |bx| {
            let dy = bx.dy()?;
            bx.give(0, dy.relaid(Layout::contiguous(from)))
        })
    }

    /// Dimensions in another order: dimension i of the result is dimension `order[i]` of `x`.
    ///
    /// # Errors
    /// When `order` is not a permutation.
    pub fn permute(&mut self, x: &Tensor, order: &[usize]) -> Result<Tensor> {
        let mut inverse = [usize::MAX; MAX_RANK];
        for (to, &from) in order.iter().enumerate() {
            if from < x.rank() && inverse[from] == usize::MAX {
                inverse[from] = to;
            }
        }
        if order.len() != x.rank() || inverse[..x.rank()].contains(&usize::MAX) {
            let what = format!("{order:?} is not an order of the dimensions of {}", x.shape());
            return Err(Error::invalid("permute", what));
        }
        let y = x.relaid(x.layout().permuted(order));
        let rank = x.rank();
        self.record_one("permute", &[x], y, move |bx| {
            let dy = bx.grad_strided(0).expect("a node runs only with a gradient");
            bx.give(0, dy.relaid(dy.layout().permuted(&inverse[..rank])))
        })
    }

    /// Two dimensions exchanged; negative ones count from the end.
    ///
    /// # Errors
    /// When a dimension does not exist.
    pub fn transpose(&mut self, x: &Tensor, a: isize, b: isize) -> Result<Tensor> {
        let (a, b) = (x.shape().axis("transpose", a)?, x.shape().axis("transpose", b)?);
        let mut order: Vec<usize> = (0..x.rank()).collect();
        order.swap(a, b);
        self.permute(x, &order)
    }

    /// `len` elements from `start` on along `dim`.
    ///
    /// # Errors
    /// When they are not there.
    pub fn narrow(&mut self, x: &Tensor, dim: isize, start: usize, len: usize) -> Result<Tensor> {
        const OP: &str = "narrow";
        let axis = x.shape().axis(OP, dim)?;
        if start.checked_add(len).is_none_or(|end| end > x.dims()[axis]) {
            let what = format!("{len} elements from {start} on along dimension {axis} of {}", x.shape());
            return Err(Error::invalid(OP, what));
        }
        let y = x.narrowed(axis, start, len);
        let (shape, dtype) = (*x.shape(), x.dtype());
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.grad_strided(0).expect("a node runs only with a gradient");
            let dx = bx.worker().full(dtype, shape, 0.0)?;
            let part = dx.narrowed(axis, start, len);
            bx.worker().launch(&Kernel::Copy, &[Some(&dy)], &[Some(&part)])?;
            drop((dy, part));
            bx.give(0, dx)
        })
    }

    /// Tensors one after the other along `dim`; all other sizes agree.
    ///
    /// # Errors
    /// When there is none, or types or the other sizes differ.
    pub fn cat(&mut self, parts: &[&Tensor], dim: isize) -> Result<Tensor> {
        const OP: &str = "cat";
        let first = parts.first().ok_or_else(|| Error::invalid(OP, "no tensors given"))?;
        let axis = first.shape().axis(OP, dim)?;
        let mut total = 0usize;
        for part in parts {
            same_dtype(OP, first, part)?;
            if part.rank() != first.rank() {
                return Err(Error::Shape { op: OP, left: *first.shape(), right: *part.shape() });
            }
            same_shape(OP, part, first.shape().with(axis, part.dims()[axis]))?;
            total = total.saturating_add(part.dims()[axis]);
        }
        let shape = Shape::new(first.shape().with(axis, total).dims())?;
        let y = self.worker().alloc(OP, first.dtype(), shape)?;
        let sizes: Vec<usize> = parts.iter().map(|p| p.dims()[axis]).collect();
        let mut start = 0;
        for part in parts {
            let place = y.narrowed(axis, start, part.dims()[axis]);
            self.worker().launch(&Kernel::Copy, &[Some(part)], &[Some(&place)])?;
            start += part.dims()[axis];
        }
        self.record_one(OP, parts, y, move |bx| {
            let dy = bx.grad_strided(0).expect("a node runs only with a gradient");
            let mut start = 0;
            for (i, len) in sizes.into_iter().enumerate() {
                bx.give(i, dy.narrowed(axis, start, len))?;
                start += len;
            }
            Ok(())
        })
    }

    /// Sizes of 1 stretched, and leading dimensions added, to `dims`; no copy.
    ///
    /// # Errors
    /// When a size neither matches nor is 1.
    pub fn broadcast_to(&mut self, x: &Tensor, dims: &[usize]) -> Result<Tensor> {
        let y = x.relaid(x.layout().broadcast_to(Shape::new(dims)?, "broadcast_to")?);
        let from = *x.shape();
        self.record_one("broadcast_to", &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().sum_to(&dy, from)?;
            drop(dy);
            bx.give(0, dx)
        })
    }
}

/// The shape that `dims` asks for, with -1 worked out.
fn resolve(x: &Tensor, dims: &[isize]) -> Result<Shape> {
    let fail =
        || Error::invalid("reshape", format!("{} has {} elements, not {dims:?}", x.shape(), x.numel()));
    let known = dims.iter().filter(|d| **d != -1);
    let known = known.map(|d| usize::try_from(*d).map_err(|_| fail())).collect::<Result<Vec<_>>>()?;
    let open = dims.len() - known.len();
    let product = Shape::new(&known)?.numel();
    let rest = match open {
        0 => 1,
        1 if product > 0 && x.numel() % product == 0 => x.numel() / product,
        _ => return Err(fail()),
    };
    let full: Vec<usize> = dims.iter().map(|d| usize::try_from(*d).unwrap_or(rest)).collect();
    let shape = Shape::new(&full)?;
    if shape.numel() == x.numel() { Ok(shape) } else { Err(fail()) }
}
