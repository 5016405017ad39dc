//! Reading and adding at indexed places.
//!
//! Indices are i64, i32 or u32 and count from 0; one outside its dimension is refused before
//! anything is written. Gradients that add up at one place do so in the accumulator type, in the
//! order of the indices.

use super::arith::{raw_compare, raw_select};
use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Compare, Kernel};
use crate::shape::{Layout, Shape};
use crate::tape::Back;
use crate::tensor::Tensor;
use crate::worker::Worker;

/// How much [`Worker::rows_beside`] gathers at a time in a type that is not the final one.
const GATHERED_BYTES: usize = 32 << 20;

impl Worker {
    /// The rows of a dense matrix `x` `[m, c]` that `at` (1-d) names, in its order and in another type,
    /// beside the working memory of tasks ([`Worker::copied_beside`]); `None` when there is no room.
    ///
    /// # Errors
    /// When `x` is no matrix or the device fails. A place that `x` does not have is reported.
    pub fn rows_beside(
        &self,
        x: &Tensor,
        at: &Tensor,
        dtype: DType,
        working: u64,
    ) -> Result<Option<Tensor>> {
        const OP: &str = "rows_beside";
        check_index(OP, at, Some(1))?;
        if x.rank() != 2 {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *at.shape(),
            });
        }
        match self.gathered_beside(OP, x, at, dtype, working) {
            Ok(rows) => Ok(Some(rows)),
            Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn gathered_beside(
        &self,
        op: &'static str,
        x: &Tensor,
        at: &Tensor,
        dtype: DType,
        working: u64,
    ) -> Result<Tensor> {
        let shape = x.shape().with(op, 0, at.numel())?;
        let bytes = (shape.numel() * dtype.size()) as u64;
        let block = self.pool().alloc_beside(op, bytes, working)?;
        let rows = Tensor::from_block(block, dtype, shape);
        let row_bytes = x.dims()[1] * x.dtype().size();
        let most = (GATHERED_BYTES / row_bytes.max(1)).max(1);
        let select = Kernel::IndexSelect { dim: 0 };
        for start in (0..at.numel()).step_by(most) {
            let range = start..at.numel().min(start + most);
            let (here, places) = (rows.rows(range.clone()), at.rows(range));
            if dtype == x.dtype() {
                self.launch(&select, &[Some(x), Some(&places)], &[Some(&here)])?;
                continue;
            }
            let gathered = self.alloc(op, x.dtype(), *here.shape())?;
            self.launch(&select, &[Some(x), Some(&places)], &[Some(&gathered)])?;
            self.launch(&Kernel::Copy, &[Some(&gathered)], &[Some(&here)])?;
        }
        Ok(rows)
    }
}

impl Cx {
    /// The slices of `x` along `dim` that `index` (1-d) names, in its order.
    ///
    /// # Errors
    /// When the dimension does not exist or an index lies outside it.
    pub fn index_select(&mut self, x: &Tensor, dim: isize, index: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_select";
        let dim = x.shape().axis(OP, dim)?;
        check_index(OP, index, Some(1))?;
        self.take(OP, x, dim, index, None)
    }

    /// Rows of `weight` [n, c] for `ids` of any shape: [ids.., c].
    ///
    /// # Errors
    /// When `weight` is not a matrix or an id has no row.
    pub fn embedding(&mut self, weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
        self.embedding_padded(weight, ids, None)
    }

    /// As [`Cx::embedding`]; the row `padding` is read but gets no gradient from here.
    ///
    /// # Errors
    /// As [`Cx::embedding`].
    pub fn embedding_padded(
        &mut self,
        weight: &Tensor,
        ids: &Tensor,
        padding: Option<usize>,
    ) -> Result<Tensor> {
        const OP: &str = "embedding";
        check_index(OP, ids, None)?;
        if weight.rank() != 2 {
            return Err(Error::Shape {
                op: OP,
                left: *weight.shape(),
                right: *ids.shape(),
            });
        }
        let flat = self
            .worker()
            .contiguous(ids)?
            .relaid(Layout::contiguous(Shape::new(&[ids.numel()])?));
        let y = self.take(OP, weight, 0, &flat, padding)?;
        let dims: Vec<isize> = ids
            .dims()
            .iter()
            .chain(&weight.dims()[1..])
            .map(|d| *d as isize)
            .collect();
        self.reshape(&y, &dims)
    }

    fn take(
        &mut self,
        op: &'static str,
        x: &Tensor,
        dim: usize,
        index: &Tensor,
        padding: Option<usize>,
    ) -> Result<Tensor> {
        let index = self.worker().contiguous(index)?;
        let y = self
            .worker()
            .alloc(op, x.dtype(), x.shape().with(op, dim, index.numel())?)?;
        self.worker().launch(
            &Kernel::IndexSelect { dim },
            &[Some(x), Some(&index)],
            &[Some(&y)],
        )?;
        self.record_one(op, &[x], y, move |bx| {
            let mut dy = bx.dy()?;
            if let Some(padding) = padding {
                dy = without(bx.worker(), op, &dy, &index, padding)?;
            }
            add_into(bx, 0, &Kernel::IndexAdd { dim }, &dy, &index)
        })
    }

    /// y\[.., i, ..\] = x\[.., index\[.., i, ..\], ..\] along `dim`; `index` has x's rank and,
    /// apart from `dim`, sizes not above x's.
    ///
    /// # Errors
    /// When shapes do not fit or an index lies outside the dimension.
    pub fn gather(&mut self, x: &Tensor, dim: isize, index: &Tensor) -> Result<Tensor> {
        const OP: &str = "gather";
        let dim = x.shape().axis(OP, dim)?;
        fits(OP, x, dim, index)?;
        let index = self.worker().contiguous(index)?;
        let y = picked(self.worker(), OP, x, dim, &index)?;
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.dy()?;
            add_into(bx, 0, &Kernel::ScatterAdd { dim }, &dy, &index)
        })
    }

    /// `x` with every element of `src` added at its index along `dim`; `index` has src's shape, and
    /// both, apart from `dim`, sizes not above x's.
    ///
    /// # Errors
    /// As [`Cx::gather`], and when types differ.
    pub fn scatter_add(
        &mut self,
        x: &Tensor,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "scatter_add";
        let dim = x.shape().axis(OP, dim)?;
        addable(OP, x, src)?;
        fits(OP, x, dim, index)?;
        if src.shape() != index.shape() {
            return Err(Error::Shape {
                op: OP,
                left: *index.shape(),
                right: *src.shape(),
            });
        }
        let index = self.worker().contiguous(index)?;
        let y = copy_of(self.worker(), OP, x)?;
        self.worker().launch(
            &Kernel::ScatterAdd { dim },
            &[Some(src), Some(&index)],
            &[Some(&y)],
        )?;
        self.record_one(OP, &[x, src], y, move |bx| {
            let dy = bx.dy()?;
            if bx.needs(1) {
                let dsrc = picked(bx.worker(), OP, &dy, dim, &index)?;
                bx.give(1, dsrc)?;
            }
            bx.give(0, dy)
        })
    }

    /// `x` with slice i of `src` along `dim` added at slice `index[i]` (1-d), in order of i.
    ///
    /// # Errors
    /// When shapes or types do not fit or an index lies outside the dimension.
    pub fn index_add(
        &mut self,
        x: &Tensor,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "index_add";
        let dim = x.shape().axis(OP, dim)?;
        addable(OP, x, src)?;
        check_index(OP, index, Some(1))?;
        if *src.shape() != x.shape().with(OP, dim, index.numel())? {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *src.shape(),
            });
        }
        let index = self.worker().contiguous(index)?;
        let y = copy_of(self.worker(), OP, x)?;
        self.worker().launch(
            &Kernel::IndexAdd { dim },
            &[Some(src), Some(&index)],
            &[Some(&y)],
        )?;
        self.record_one(OP, &[x, src], y, move |bx| {
            let dy = bx.dy()?;
            if bx.needs(1) {
                let dsrc =
                    bx.worker()
                        .alloc(OP, dy.dtype(), dy.shape().with(OP, dim, index.numel())?)?;
                let kernel = Kernel::IndexSelect { dim };
                bx.worker()
                    .launch(&kernel, &[Some(&dy), Some(&index)], &[Some(&dsrc)])?;
                bx.give(1, dsrc)?;
            }
            bx.give(0, dy)
        })
    }
}

/// Refuses indices of the wrong type or number of dimensions.
pub(super) fn check_index(op: &'static str, index: &Tensor, rank: Option<usize>) -> Result<()> {
    if !matches!(index.dtype(), DType::I64 | DType::I32 | DType::U32) {
        let expected = "indices are i64, i32 or u32";
        return Err(Error::DType {
            op,
            dtype: index.dtype(),
            shape: *index.shape(),
            expected,
        });
    }
    match rank {
        Some(rank) if index.rank() != rank => Err(Error::invalid(
            op,
            format!("the index {} must have {rank} dimension", index.shape()),
        )),
        _ => Ok(()),
    }
}

/// Refuses operands that cannot be added.
fn addable(op: &'static str, x: &Tensor, src: &Tensor) -> Result<()> {
    if x.dtype() == DType::Bool {
        let expected = "convert it with `cast`";
        return Err(Error::DType {
            op,
            dtype: x.dtype(),
            shape: *x.shape(),
            expected,
        });
    }
    same_dtype(op, x, src)
}

/// Refuses an index tensor that reaches beyond `x` in a dimension other than `dim`.
fn fits(op: &'static str, x: &Tensor, dim: usize, index: &Tensor) -> Result<()> {
    check_index(op, index, None)?;
    let inside = |axis: usize| axis == dim || index.dims()[axis] <= x.dims()[axis];
    if index.rank() == x.rank() && (0..x.rank()).all(inside) {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        left: *x.shape(),
        right: *index.shape(),
    })
}

fn picked(
    worker: &Worker,
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
) -> Result<Tensor> {
    let y = worker.alloc(op, x.dtype(), *index.shape())?;
    worker.launch(
        &Kernel::Gather { dim },
        &[Some(x), Some(index)],
        &[Some(&y)],
    )?;
    Ok(y)
}

/// A dense copy that may be written.
fn copy_of(worker: &Worker, op: &'static str, x: &Tensor) -> Result<Tensor> {
    let y = worker.alloc(op, x.dtype(), *x.shape())?;
    worker.launch(&Kernel::Copy, &[Some(x)], &[Some(&y)])?;
    Ok(y)
}

/// Adds `dy` at the indexed places of input `i`'s gradient, in the accumulator type.
fn add_into(
    bx: &mut Back<'_>,
    i: usize,
    kernel: &Kernel,
    dy: &Tensor,
    index: &Tensor,
) -> Result<()> {
    let sink = bx.sink(i)?;
    if !sink.accumulate {
        bx.worker()
            .launch(&Kernel::Fill { value: 0.0 }, &[], &[Some(&sink.tensor)])?;
    }
    bx.worker()
        .launch(kernel, &[Some(dy), Some(index)], &[Some(&sink.tensor)])?;
    bx.give_back(i, sink)
}

/// The rows of `dy` [n, c], 0 where the index is `padding`.
fn without(
    worker: &Worker,
    op: &'static str,
    dy: &Tensor,
    index: &Tensor,
    padding: usize,
) -> Result<Tensor> {
    let padding = worker.full(index.dtype(), Shape::default(), padding as f64)?;
    let real = raw_compare(worker, op, Compare::Ne, index, &padding)?;
    let column = real.relaid(Layout::contiguous(Shape::new(&[index.numel(), 1])?));
    // Chosen, not multiplied: what is not a number must not pass either.
    let zero = worker.full(dy.dtype(), Shape::default(), 0.0)?;
    raw_select(worker, op, &column, dy, &zero)
}
