//! Shape changes: views wherever the strides allow, copies only where they do not.

use crate::cx::{Cx, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Compare, Kernel};
use crate::shape::{Layout, MAX_RANK, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

use super::arith::raw_compare;

/// The most pieces that a tensor is split into: each is a tensor of its own, and one that takes no
/// memory (no elements, or one element stretched) has dimensions of any size.
const MOST_PIECES: usize = 1 << 20;

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
            None => self
                .worker()
                .contiguous(x)?
                .relaid(Layout::contiguous(shape)),
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
            let what = format!(
                "{order:?} is not an order of the dimensions of {}",
                x.shape()
            );
            return Err(Error::invalid("permute", what));
        }
        let y = x.relaid(x.layout().permuted(order));
        let rank = x.rank();
        self.record_one("permute", &[x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            bx.give(0, dy.relaid(dy.layout().permuted(&inverse[..rank])))
        })
    }

    /// Two dimensions exchanged; negative ones count from the end.
    ///
    /// # Errors
    /// When a dimension does not exist.
    pub fn transpose(&mut self, x: &Tensor, a: isize, b: isize) -> Result<Tensor> {
        let (a, b) = (
            x.shape().axis("transpose", a)?,
            x.shape().axis("transpose", b)?,
        );
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
        if start
            .checked_add(len)
            .is_none_or(|end| end > x.dims()[axis])
        {
            let what = format!(
                "{len} elements from {start} on along dimension {axis} of {}",
                x.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let y = x.narrowed(axis, start, len);
        let (shape, dtype) = (*x.shape(), x.dtype());
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            let dx = bx.worker().full(dtype, shape, 0.0)?;
            let part = dx.narrowed(axis, start, len);
            bx.worker()
                .launch(&Kernel::Copy, &[Some(&dy)], &[Some(&part)])?;
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
        let first = parts
            .first()
            .ok_or_else(|| Error::invalid(OP, "no tensors given"))?;
        let axis = first.shape().axis(OP, dim)?;
        let mut total = 0usize;
        for part in parts {
            same_dtype(OP, first, part)?;
            if part.rank() != first.rank() {
                return Err(Error::Shape {
                    op: OP,
                    left: *first.shape(),
                    right: *part.shape(),
                });
            }
            same_shape(OP, part, first.shape().with(OP, axis, part.dims()[axis])?)?;
            total = total.saturating_add(part.dims()[axis]);
        }
        let shape = first.shape().with(OP, axis, total)?;
        let y = self.worker().alloc(OP, first.dtype(), shape)?;
        let sizes: Vec<usize> = parts.iter().map(|p| p.dims()[axis]).collect();
        let mut start = 0;
        for part in parts {
            let place = y.narrowed(axis, start, part.dims()[axis]);
            self.worker()
                .launch(&Kernel::Copy, &[Some(part)], &[Some(&place)])?;
            start += part.dims()[axis];
        }
        self.record_one(OP, parts, y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
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

impl Cx {
    /// [`Cx::broadcast_to`] by another name.
    ///
    /// # Errors
    /// As [`Cx::broadcast_to`].
    pub fn expand(&mut self, x: &Tensor, dims: &[usize]) -> Result<Tensor> {
        self.broadcast_to(x, dims)
    }

    /// Without a dimension of size 1.
    ///
    /// # Errors
    /// When the dimension does not exist or has another size.
    pub fn squeeze(&mut self, x: &Tensor, dim: isize) -> Result<Tensor> {
        let axis = x.shape().axis("squeeze", dim)?;
        if x.dims()[axis] != 1 {
            let what = format!(
                "dimension {axis} of {} has size {}, not 1",
                x.shape(),
                x.dims()[axis]
            );
            return Err(Error::invalid("squeeze", what));
        }
        let mut dims = signed(x);
        dims.remove(axis);
        self.reshape(x, &dims)
    }

    /// With a new dimension of size 1 before dimension `dim`; -1 puts it last.
    ///
    /// # Errors
    /// When there is no such place.
    pub fn unsqueeze(&mut self, x: &Tensor, dim: isize) -> Result<Tensor> {
        let rank = x.rank() as isize;
        let axis = if dim < 0 { dim + rank + 1 } else { dim };
        if !(0..=rank).contains(&axis) {
            return Err(Error::invalid(
                "unsqueeze",
                format!("no place {dim} among the dimensions of {}", x.shape()),
            ));
        }
        let mut dims = signed(x);
        dims.insert(axis as usize, 1);
        self.reshape(x, &dims)
    }

    /// Dimensions `first` to `last`, both included, as one.
    ///
    /// # Errors
    /// When they do not exist or stand in the wrong order.
    pub fn flatten(&mut self, x: &Tensor, first: isize, last: isize) -> Result<Tensor> {
        const OP: &str = "flatten";
        if x.rank() == 0 {
            return self.reshape(x, &[1]);
        }
        let (from, to) = (x.shape().axis(OP, first)?, x.shape().axis(OP, last)?);
        if from > to {
            return Err(Error::invalid(
                OP,
                format!("dimensions {from} to {to} of {}", x.shape()),
            ));
        }
        let mut dims = signed(x);
        let merged = dims.drain(from..=to).product();
        dims.insert(from, merged);
        self.reshape(x, &dims)
    }

    /// Tensors of one shape one after the other along a new dimension before `dim`; -1 puts it
    /// last.
    ///
    /// # Errors
    /// When there is none, or types or shapes differ.
    pub fn stack(&mut self, parts: &[&Tensor], dim: isize) -> Result<Tensor> {
        for part in parts {
            same_shape("stack", part, *parts[0].shape())?;
        }
        let parts = parts
            .iter()
            .map(|p| self.unsqueeze(p, dim))
            .collect::<Result<Vec<_>>>()?;
        let axis = match parts.first() {
            Some(first) if dim < 0 => dim + first.rank() as isize,
            _ => dim,
        };
        self.cat(&parts.iter().collect::<Vec<_>>(), axis)
    }

    /// Pieces of the given sizes along `dim`, as views.
    ///
    /// # Errors
    /// When the sizes do not add up to the dimension's.
    pub fn split_sizes(&mut self, x: &Tensor, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
        const OP: &str = "split";
        let axis = x.shape().axis(OP, dim)?;
        let total = sizes
            .iter()
            .try_fold(0usize, |sum, size| sum.checked_add(*size));
        if total != Some(x.dims()[axis]) {
            let what = format!(
                "{sizes:?} do not add up to dimension {axis} of {}",
                x.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let starts = sizes
            .iter()
            .scan(0, |next, size| Some(std::mem::replace(next, *next + size)));
        let places: Vec<(usize, usize)> = starts.zip(sizes.iter().copied()).collect();
        let parts = places
            .iter()
            .map(|(start, len)| x.narrowed(axis, *start, *len))
            .collect();
        let (shape, dtype) = (*x.shape(), x.dtype());
        // One node for all pieces: their gradients are written side by side instead of summed.
        self.record(OP, &[x], parts, move |bx| {
            let dx = bx.worker().alloc(OP, dtype, shape)?;
            for (i, (start, len)) in places.into_iter().enumerate() {
                let place = dx.narrowed(axis, start, len);
                match bx.grad_strided(i) {
                    Some(dy) => bx
                        .worker()
                        .launch(&Kernel::Copy, &[Some(&dy)], &[Some(&place)])?,
                    None => {
                        bx.worker()
                            .launch(&Kernel::Fill { value: 0.0 }, &[], &[Some(&place)])?
                    }
                }
            }
            bx.give(0, dx)
        })
    }

    /// Pieces of `size` along `dim`, as views; the last may be smaller.
    ///
    /// # Errors
    /// When `size` is 0 or the dimension does not exist.
    pub fn split(&mut self, x: &Tensor, size: usize, dim: isize) -> Result<Vec<Tensor>> {
        let axis = x.shape().axis("split", dim)?;
        if size == 0 {
            return Err(Error::invalid(
                "split",
                format!("pieces of size 0 of {}", x.shape()),
            ));
        }
        let whole = x.dims()[axis];
        if whole.div_ceil(size) > MOST_PIECES {
            let what = format!(
                "pieces of size {size} of {}: more than {MOST_PIECES}",
                x.shape()
            );
            return Err(Error::invalid("split", what));
        }
        let mut sizes: Vec<usize> = (0..whole)
            .step_by(size)
            .map(|at| size.min(whole - at))
            .collect();
        if sizes.is_empty() {
            sizes.push(0);
        }
        self.split_sizes(x, &sizes, dim)
    }

    /// At most `count` pieces of equal size along `dim`, as views; the last may be smaller.
    ///
    /// # Errors
    /// When `count` is 0 or the dimension does not exist.
    pub fn chunk(&mut self, x: &Tensor, count: usize, dim: isize) -> Result<Vec<Tensor>> {
        let axis = x.shape().axis("chunk", dim)?;
        if count == 0 {
            return Err(Error::invalid(
                "chunk",
                format!("0 pieces of {}", x.shape()),
            ));
        }
        self.split(x, x.dims()[axis].div_ceil(count).max(1), dim)
    }

    /// The slice at `index` along `dim`, without that dimension.
    ///
    /// # Errors
    /// When it is not there.
    pub fn select(&mut self, x: &Tensor, dim: isize, index: usize) -> Result<Tensor> {
        let axis = x.shape().axis("select", dim)?;
        if index >= x.dims()[axis] {
            let what = format!("index {index} along dimension {axis} of {}", x.shape());
            return Err(Error::invalid("select", what));
        }
        let slice = self.narrow(x, dim, index, 1)?;
        self.squeeze(&slice, axis as isize)
    }

    /// The whole tensor `counts[i]` times along dimension i.
    ///
    /// # Errors
    /// When there is not one count per dimension, or memory runs out.
    pub fn repeat(&mut self, x: &Tensor, counts: &[usize]) -> Result<Tensor> {
        const OP: &str = "repeat";
        if counts.len() != x.rank() {
            return Err(Error::invalid(
                OP,
                format!("{} counts for {}", counts.len(), x.shape()),
            ));
        }
        let mut y = x.clone();
        for (axis, &count) in counts.iter().enumerate().filter(|(_, count)| **count != 1) {
            let mut dims = y.dims().to_vec();
            let size = dims[axis]
                .checked_mul(count)
                .and_then(|n| isize::try_from(n).ok());
            let size =
                size.ok_or_else(|| Error::invalid(OP, format!("{} {count} times", y.shape())))?;
            let mut merged = signed(&y);
            merged[axis] = size;
            // A stretched dimension in front of the one to repeat, then both as one.
            let spread = self.unsqueeze(&y, axis as isize)?;
            dims.insert(axis, count);
            let spread = self.broadcast_to(&spread, &dims)?;
            y = self.reshape(&spread, &merged)?;
        }
        Ok(y)
    }

    /// The elements in reverse order along `dims`.
    ///
    /// # Errors
    /// When a dimension does not exist or is named twice.
    pub fn flip(&mut self, x: &Tensor, dims: &[isize]) -> Result<Tensor> {
        const OP: &str = "flip";
        let mut axes = [false; MAX_RANK];
        for &dim in dims {
            let axis = x.shape().axis(OP, dim)?;
            if std::mem::replace(&mut axes[axis], true) {
                return Err(Error::invalid(
                    OP,
                    format!("dimension {axis} of {} twice", x.shape()),
                ));
            }
        }
        let y = reversed(self.worker(), x, &axes)?;
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            let dx = reversed(bx.worker(), &dy, &axes)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// With `value` around it: `around[i]` elements before and after along dimension i.
    ///
    /// # Errors
    /// When there is not one pair per dimension, or memory runs out.
    pub fn pad(&mut self, x: &Tensor, around: &[(usize, usize)], value: f64) -> Result<Tensor> {
        const OP: &str = "pad";
        if around.len() != x.rank() {
            return Err(Error::invalid(
                OP,
                format!("{} pairs for {}", around.len(), x.shape()),
            ));
        }
        let grown = x.dims().iter().zip(around);
        let grown: Vec<usize> = grown
            .map(|(size, (before, after))| size.saturating_add(*before).saturating_add(*after))
            .collect();
        let y = self.worker().full(x.dtype(), Shape::new(&grown)?, value)?;
        let (from, around) = (*x.shape(), around.to_vec());
        let inside = move |whole: &Tensor| {
            around
                .iter()
                .enumerate()
                .fold(whole.detach(), |t, (axis, (before, _))| {
                    t.narrowed(axis, *before, from[axis])
                })
        };
        self.worker()
            .launch(&Kernel::Copy, &[Some(x)], &[Some(&inside(&y))])?;
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            bx.give(0, inside(&dy))
        })
    }

    /// The elements on and below a diagonal of the last two dimensions, 0 elsewhere; diagonal 0 is
    /// the main one, positive ones lie above it.
    ///
    /// # Errors
    /// When there are fewer than two dimensions.
    pub fn tril(&mut self, x: &Tensor, diagonal: i64) -> Result<Tensor> {
        let above = self.beyond("tril", x, diagonal, Compare::Gt)?;
        self.masked_fill(x, &above, 0.0)
    }

    /// The elements on and above a diagonal of the last two dimensions, 0 elsewhere; as
    /// [`Cx::tril`].
    ///
    /// # Errors
    /// When there are fewer than two dimensions.
    pub fn triu(&mut self, x: &Tensor, diagonal: i64) -> Result<Tensor> {
        let below = self.beyond("triu", x, diagonal, Compare::Lt)?;
        self.masked_fill(x, &below, 0.0)
    }

    /// A mask of the last two dimensions: whether column - row is beyond `diagonal`.
    fn beyond(
        &mut self,
        op: &'static str,
        x: &Tensor,
        diagonal: i64,
        how: Compare,
    ) -> Result<Tensor> {
        let [.., rows, columns] = *x.dims() else {
            return Err(Error::invalid(
                op,
                format!("{} has fewer than two dimensions", x.shape()),
            ));
        };
        let column = self.arange(DType::I64, 0.0, columns as f64, 1.0)?;
        // Diagonals further out than the corners all mean the same.
        let side = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let start = diagonal.clamp(-side(rows), side(columns)) as f64;
        let row = self.arange(DType::I64, start, start + rows as f64, 1.0)?;
        let row = self.unsqueeze(&row, 1)?;
        raw_compare(self.worker(), op, how, &column, &row)
    }
}

/// The sizes as `reshape` takes them.
fn signed(x: &Tensor) -> Vec<isize> {
    x.dims().iter().map(|d| *d as isize).collect()
}

/// A dense copy with the marked dimensions in reverse order.
fn reversed(worker: &Worker, x: &Tensor, axes: &[bool; MAX_RANK]) -> Result<Tensor> {
    let out = worker.alloc("flip", x.dtype(), *x.shape())?;
    if x.numel() > 0 {
        let mut strides = x.layout().strides().to_vec();
        let mut last = x.detach();
        for axis in (0..x.rank()).filter(|axis| axes[*axis]) {
            last = last.narrowed(axis, x.dims()[axis] - 1, 1);
            strides[axis] = -strides[axis];
        }
        let backwards = last.relaid(Layout::strided(*x.shape(), &strides));
        worker.launch(&Kernel::Copy, &[Some(&backwards)], &[Some(&out)])?;
    }
    Ok(out)
}

/// The shape that `dims` asks for, with -1 worked out.
fn resolve(x: &Tensor, dims: &[isize]) -> Result<Shape> {
    let fail = || {
        Error::invalid(
            "reshape",
            format!("{} has {} elements, not {dims:?}", x.shape(), x.numel()),
        )
    };
    let known = dims.iter().filter(|d| **d != -1);
    let known = known
        .map(|d| usize::try_from(*d).map_err(|_| fail()))
        .collect::<Result<Vec<_>>>()?;
    let open = dims.len() - known.len();
    let product = Shape::new(&known)?.numel();
    let rest = match open {
        0 => 1,
        1 if product > 0 && x.numel().is_multiple_of(product) => x.numel() / product,
        _ => return Err(fail()),
    };
    let full: Vec<usize> = dims
        .iter()
        .map(|d| usize::try_from(*d).unwrap_or(rest))
        .collect();
    let shape = Shape::new(&full)?;
    if shape.numel() == x.numel() {
        Ok(shape)
    } else {
        Err(fail())
    }
}
