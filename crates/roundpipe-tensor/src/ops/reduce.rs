//! Reductions, softmax, running sums and selection along dimensions.
//!
//! Where an operation takes several dimensions, none given means all. Statistics of 16-bit floats
//! are computed in f32 and rounded once.

use super::arith::{raw_binary, raw_compare, raw_select, raw_unary};
use crate::cx::{Cx, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Binary, Compare, Kernel, Reduce, Unary};
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// What a reduction leaves of a shape.
#[derive(Debug, Clone, Copy)]
struct ReducedShape {
    from: Shape,
    /// `from` with 1 in place of each reduced dimension.
    kept: Shape,
    /// The result's shape: `kept`, or without those dimensions.
    out: Shape,
    /// Elements per result.
    count: usize,
}

impl ReducedShape {
    fn new(op: &'static str, x: &Tensor, dims: &[isize], keep: bool) -> Result<Self> {
        let from = *x.shape();
        let mut folded = vec![dims.is_empty(); from.rank()];
        for &dim in dims {
            let axis = from.axis(op, dim)?;
            if std::mem::replace(&mut folded[axis], true) {
                return Err(Error::invalid(
                    op,
                    format!("dimension {dim} of {from} is named twice"),
                ));
            }
        }
        let axes = || folded.iter().enumerate();
        let kept = axes()
            .filter(|(_, f)| **f)
            .fold(from, |shape, (axis, _)| shape.cut(axis, 1));
        let rest: Vec<usize> = axes()
            .filter(|(_, f)| !**f)
            .map(|(axis, _)| from[axis])
            .collect();
        let count = axes()
            .filter(|(_, f)| **f)
            .map(|(axis, _)| from[axis])
            .product();
        Ok(Self {
            from,
            kept,
            out: if keep { kept } else { Shape::new(&rest)? },
            count,
        })
    }

    /// Runs the kernel; the result has the kept shape.
    fn run(
        &self,
        worker: &Worker,
        op: &'static str,
        kind: Reduce,
        x: &Tensor,
        to: DType,
    ) -> Result<Tensor> {
        let y = worker.alloc(op, to, self.kept)?;
        worker.launch(
            &Kernel::Reduce {
                op: kind,
                accumulate: false,
            },
            &[Some(x)],
            &[Some(&y)],
        )?;
        Ok(y)
    }

    /// A tensor of the kept shape as the result.
    fn shown(&self, y: &Tensor) -> Tensor {
        y.relaid(Layout::contiguous(self.out))
    }

    /// A dense tensor of the result's shape as the kept shape.
    fn held(&self, y: &Tensor) -> Tensor {
        y.relaid(Layout::contiguous(self.kept))
    }

    /// A dense tensor of the result's shape, stretched over the reduced dimensions.
    fn spread(&self, op: &'static str, y: &Tensor) -> Result<Tensor> {
        Ok(y.relaid(Layout::contiguous(self.kept).broadcast_to(self.from, op)?))
    }

    /// Refuses what has no elements to choose from.
    fn nonempty(&self, op: &'static str) -> Result<()> {
        if self.count > 0 || self.out.numel() == 0 {
            return Ok(());
        }
        Err(Error::invalid(
            op,
            format!("{} has no elements to choose from", self.from),
        ))
    }
}

impl Cx {
    /// The sum over `dims`; `keep` leaves them with size 1. Integers and bools sum to i64.
    ///
    /// # Errors
    /// When a dimension does not exist or is named twice.
    pub fn sum(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        self.total("sum", Reduce::Sum, x, dims, keep)
    }

    /// The mean over `dims`; floats only.
    ///
    /// # Errors
    /// As [`Cx::sum`].
    pub fn mean(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        float("mean", x)?;
        self.total("mean", Reduce::Mean, x, dims, keep)
    }

    /// The sum of all elements, as a scalar.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sum_all(&mut self, x: &Tensor) -> Result<Tensor> {
        self.sum(x, &[], false)
    }

    /// The mean of all elements, as a scalar.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn mean_all(&mut self, x: &Tensor) -> Result<Tensor> {
        self.mean(x, &[], false)
    }

    fn total(
        &mut self,
        op: &'static str,
        kind: Reduce,
        x: &Tensor,
        dims: &[isize],
        keep: bool,
    ) -> Result<Tensor> {
        let fold = ReducedShape::new(op, x, dims, keep)?;
        let wide = countable(self.worker(), x)?;
        let y = fold.run(self.worker(), op, kind, &wide, wide.dtype())?;
        let share = if kind == Reduce::Mean {
            1.0 / fold.count as f64
        } else {
            1.0
        };
        self.record_one(op, &[x], fold.shown(&y), move |bx| {
            let mut dy = bx.dy()?;
            if kind == Reduce::Mean {
                dy = raw_unary(
                    bx.worker(),
                    op,
                    Unary::Affine {
                        mul: share,
                        add: 0.0,
                    },
                    &dy,
                )?;
            }
            bx.give(0, fold.spread(op, &dy)?)
        })
    }

    /// The largest value over `dims`; NaN if there is one. Equal largest values share the gradient.
    ///
    /// # Errors
    /// As [`Cx::sum`], and when there is nothing to choose from.
    pub fn max(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        self.extreme("max", Reduce::Max, x, dims, keep)
    }

    /// The smallest value over `dims`; NaN if there is one. Equal smallest values share the
    /// gradient.
    ///
    /// # Errors
    /// As [`Cx::max`].
    pub fn min(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        self.extreme("min", Reduce::Min, x, dims, keep)
    }

    fn extreme(
        &mut self,
        op: &'static str,
        kind: Reduce,
        x: &Tensor,
        dims: &[isize],
        keep: bool,
    ) -> Result<Tensor> {
        let fold = ReducedShape::new(op, x, dims, keep)?;
        fold.nonempty(op)?;
        let y = fold.run(self.worker(), op, kind, x, x.dtype())?;
        let (source, best) = (x.detach(), y.clone());
        self.record_one(op, &[x], fold.shown(&y), move |bx| {
            let dy = fold.held(&bx.dy()?);
            let worker = bx.worker();
            let equal = raw_compare(worker, op, Compare::Eq, &source, &best)?;
            let hits = worker.cast(&equal, dy.dtype().accumulator())?;
            let ties = fold.run(worker, op, Reduce::Sum, &hits, hits.dtype())?;
            drop(hits);
            let share = raw_binary(
                worker,
                op,
                Binary::Div,
                &worker.cast(&dy, ties.dtype())?,
                &ties,
            )?;
            let share = worker.cast(&share, dy.dtype())?;
            let zero = worker.full(dy.dtype(), Shape::default(), 0.0)?;
            let dx = raw_select(worker, op, &equal, &share, &zero)?;
            bx.give(0, dx)
        })
    }

    /// The product over `dims`. Integers and bools multiply to i64.
    ///
    /// # Errors
    /// As [`Cx::sum`].
    pub fn prod(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        const OP: &str = "prod";
        let fold = ReducedShape::new(OP, x, dims, keep)?;
        let wide = countable(self.worker(), x)?;
        let y = fold.run(self.worker(), OP, Reduce::Prod, &wide, wide.dtype())?;
        let source = x.detach();
        self.record_one(OP, &[x], fold.shown(&y), move |bx| {
            let dy = fold.held(&bx.dy()?);
            let dx = prod_grad(bx.worker(), &fold, &source, &dy)?;
            bx.give(0, dx)
        })
    }

    /// The variance over `dims`; `unbiased` divides by one less than the number of elements.
    ///
    /// # Errors
    /// As [`Cx::sum`]; floats only.
    pub fn var(
        &mut self,
        x: &Tensor,
        dims: &[isize],
        unbiased: bool,
        keep: bool,
    ) -> Result<Tensor> {
        self.deviation("var", x, dims, unbiased, keep)
    }

    /// The standard deviation over `dims`; see [`Cx::var`]. Where it is 0 so is its gradient.
    ///
    /// # Errors
    /// As [`Cx::var`].
    pub fn std(
        &mut self,
        x: &Tensor,
        dims: &[isize],
        unbiased: bool,
        keep: bool,
    ) -> Result<Tensor> {
        self.deviation("std", x, dims, unbiased, keep)
    }

    fn deviation(
        &mut self,
        op: &'static str,
        x: &Tensor,
        dims: &[isize],
        unbiased: bool,
        keep: bool,
    ) -> Result<Tensor> {
        float(op, x)?;
        let fold = ReducedShape::new(op, x, dims, keep)?;
        let (worker, dtype, acc) = (self.worker().clone(), x.dtype(), x.dtype().accumulator());
        let over = fold.count as f64 - f64::from(u8::from(unbiased));
        let mean = fold.run(&worker, op, Reduce::Mean, x, acc)?;
        let centred = raw_binary(&worker, op, Binary::Sub, &worker.cast(x, acc)?, &mean)?;
        let squares = raw_unary(&worker, op, Unary::Square, &centred)?;
        drop(centred);
        let sum = fold.run(&worker, op, Reduce::Sum, &squares, acc)?;
        drop(squares);
        let mut y = divide(&worker, op, &sum, over)?;
        if op == "std" {
            y = raw_unary(&worker, op, Unary::Sqrt, &y)?;
        }
        let (source, spread) = (x.detach(), y.clone());
        let y = worker.cast(&fold.shown(&y), dtype)?;
        self.record_one(op, &[x], y, move |bx| {
            let worker = bx.worker().clone();
            let mut slope = worker.cast(&fold.held(&bx.dy()?), acc)?;
            if op == "std" {
                slope = over_length(&worker, op, &slope, &spread)?;
            }
            // d var = 2 (x - mean) / over; d std has the 2 cancelled by the root's.
            let slope = divide(
                &worker,
                op,
                &slope,
                if op == "std" { over } else { over / 2.0 },
            )?;
            let centred = raw_binary(&worker, op, Binary::Sub, &worker.cast(&source, acc)?, &mean)?;
            let dx = raw_binary(&worker, op, Binary::Mul, &centred, &slope)?;
            drop(centred);
            let dx = worker.cast(&dx, dtype)?;
            bx.give(0, dx)
        })
    }

    /// The Euclidean norm over `dims`. Where it is 0 so is its gradient.
    ///
    /// # Errors
    /// As [`Cx::sum`]; floats only.
    pub fn norm(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        const OP: &str = "norm";
        float(OP, x)?;
        let fold = ReducedShape::new(OP, x, dims, keep)?;
        let (worker, dtype, acc) = (self.worker().clone(), x.dtype(), x.dtype().accumulator());
        let squares = raw_unary(&worker, OP, Unary::Square, &worker.cast(x, acc)?)?;
        let sum = fold.run(&worker, OP, Reduce::Sum, &squares, acc)?;
        drop(squares);
        let length = raw_unary(&worker, OP, Unary::Sqrt, &sum)?;
        let source = x.detach();
        let y = worker.cast(&fold.shown(&length), dtype)?;
        self.record_one(OP, &[x], y, move |bx| {
            let worker = bx.worker().clone();
            let dy = worker.cast(&fold.held(&bx.dy()?), acc)?;
            let slope = over_length(&worker, OP, &dy, &length)?;
            let dx = raw_binary(
                &worker,
                OP,
                Binary::Mul,
                &worker.cast(&source, acc)?,
                &slope,
            )?;
            let dx = worker.cast(&dx, dtype)?;
            bx.give(0, dx)
        })
    }

    /// ln Σ eˣ over `dims`, without overflow.
    ///
    /// # Errors
    /// As [`Cx::max`]; floats only.
    pub fn logsumexp(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        const OP: &str = "logsumexp";
        float(OP, x)?;
        let fold = ReducedShape::new(OP, x, dims, keep)?;
        fold.nonempty(OP)?;
        let (worker, dtype, acc) = (self.worker().clone(), x.dtype(), x.dtype().accumulator());
        let lse = row_lse(&worker, &last(&fold, x), &fold)?;
        let source = x.detach();
        let y = worker.cast(&fold.shown(&lse), dtype)?;
        self.record_one(OP, &[x], y, move |bx| {
            let worker = bx.worker().clone();
            let dy = worker.cast(&fold.held(&bx.dy()?), acc)?;
            let below = raw_binary(&worker, OP, Binary::Sub, &worker.cast(&source, acc)?, &lse)?;
            let share = raw_unary(&worker, OP, Unary::Exp, &below)?;
            drop(below);
            let dx = raw_binary(&worker, OP, Binary::Mul, &share, &dy)?;
            drop(share);
            let dx = worker.cast(&dx, dtype)?;
            bx.give(0, dx)
        })
    }

    /// eˣ / Σ eˣ along `dim`. A line of -inf alone gives NaN.
    ///
    /// # Errors
    /// When the dimension does not exist; floats only.
    pub fn softmax(&mut self, x: &Tensor, dim: isize) -> Result<Tensor> {
        self.softmax_of("softmax", x, dim, false)
    }

    /// The logarithm of [`Cx::softmax`], without overflow.
    ///
    /// # Errors
    /// As [`Cx::softmax`].
    pub fn log_softmax(&mut self, x: &Tensor, dim: isize) -> Result<Tensor> {
        self.softmax_of("log_softmax", x, dim, true)
    }

    fn softmax_of(
        &mut self,
        op: &'static str,
        x: &Tensor,
        dim: isize,
        log: bool,
    ) -> Result<Tensor> {
        float(op, x)?;
        if x.shape().axis(op, dim)? + 1 != x.rank() {
            let transposed = self.transpose(x, dim, -1)?;
            let y = self.softmax_of(op, &transposed, -1, log)?;
            return self.transpose(&y, dim, -1);
        }
        let dense = self.contiguous(x)?;
        let y = self.worker().alloc(op, x.dtype(), *x.shape())?;
        self.worker()
            .launch(&Kernel::Softmax { log }, &[Some(&dense)], &[Some(&y)])?;
        let kept = y.clone();
        self.record_one(op, &[&dense], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().alloc(op, kept.dtype(), *kept.shape())?;
            bx.worker().launch(
                &Kernel::SoftmaxGrad { log },
                &[Some(&kept), Some(&dy)],
                &[Some(&dx)],
            )?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// The index of the first largest value along `dim`, as i64; the first NaN if there is one.
    ///
    /// # Errors
    /// When the dimension does not exist or is empty.
    pub fn argmax(&mut self, x: &Tensor, dim: isize, keep: bool) -> Result<Tensor> {
        self.arg("argmax", x, dim, keep, true)
    }

    /// The index of the first smallest value along `dim`, as i64; the first NaN if there is one.
    ///
    /// # Errors
    /// As [`Cx::argmax`].
    pub fn argmin(&mut self, x: &Tensor, dim: isize, keep: bool) -> Result<Tensor> {
        self.arg("argmin", x, dim, keep, false)
    }

    fn arg(
        &mut self,
        op: &'static str,
        x: &Tensor,
        dim: isize,
        keep: bool,
        largest: bool,
    ) -> Result<Tensor> {
        let shown = ReducedShape::new(op, x, &[dim], keep)?.out;
        let fold = ReducedShape::new(op, x, &[dim], false)?;
        fold.nonempty(op)?;
        let dim = x.shape().axis(op, dim)?;
        let y = self.worker().alloc(op, DType::I64, fold.out)?;
        self.worker()
            .launch(&Kernel::ArgReduce { largest, dim }, &[Some(x)], &[Some(&y)])?;
        Ok(y.relaid(Layout::contiguous(shown)))
    }

    /// Whether any value over `dims` is not 0, as bool.
    ///
    /// # Errors
    /// As [`Cx::sum`].
    pub fn any(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        let fold = ReducedShape::new("any", x, dims, keep)?;
        let truth = self.worker().cast(x, DType::Bool)?;
        Ok(fold.shown(&fold.run(self.worker(), "any", Reduce::Any, &truth, DType::Bool)?))
    }

    /// Whether every value over `dims` is not 0, as bool.
    ///
    /// # Errors
    /// As [`Cx::sum`].
    pub fn all(&mut self, x: &Tensor, dims: &[isize], keep: bool) -> Result<Tensor> {
        let fold = ReducedShape::new("all", x, dims, keep)?;
        let truth = self.worker().cast(x, DType::Bool)?;
        Ok(fold.shown(&fold.run(self.worker(), "all", Reduce::All, &truth, DType::Bool)?))
    }

    /// The running sum along `dim`. Integers and bools sum to i64.
    ///
    /// # Errors
    /// When the dimension does not exist.
    pub fn cumsum(&mut self, x: &Tensor, dim: isize) -> Result<Tensor> {
        const OP: &str = "cumsum";
        let dim = x.shape().axis(OP, dim)?;
        let wide = countable(self.worker(), x)?;
        let y = running(self.worker(), &wide, dim, false)?;
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = running(bx.worker(), &dy, dim, true)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// The `k` largest (or smallest) values along `dim` in order, and their indices as i64. Equal
    /// values come in order of their index; NaN counts as largest.
    ///
    /// # Errors
    /// When the dimension does not exist or is shorter than `k`.
    pub fn topk(
        &mut self,
        x: &Tensor,
        k: usize,
        dim: isize,
        largest: bool,
    ) -> Result<(Tensor, Tensor)> {
        const OP: &str = "topk";
        let axis = x.shape().axis(OP, dim)?;
        let size = x.dims()[axis];
        if k > size {
            let what = format!(
                "asked for {k} of {size} values along dimension {axis} of {}",
                x.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        if axis + 1 != x.rank() {
            let transposed = self.transpose(x, dim, -1)?;
            let (values, places) = self.topk(&transposed, k, -1, largest)?;
            return Ok((
                self.transpose(&values, dim, -1)?,
                self.transpose(&places, dim, -1)?,
            ));
        }
        let dense = self.contiguous(x)?;
        let (from, shape) = (*x.shape(), x.shape().cut(axis, k));
        let values = self.worker().alloc(OP, x.dtype(), shape)?;
        let places = self.worker().alloc(OP, DType::I64, shape)?;
        let outputs = [Some(&values), Some(&places)];
        self.worker()
            .launch(&Kernel::TopK { largest }, &[Some(&dense)], &outputs)?;
        let at = places.clone();
        let values = self.record_one(OP, &[&dense], values, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().full(dy.dtype(), from, 0.0)?;
            let kernel = Kernel::ScatterAdd { dim: axis };
            bx.worker()
                .launch(&kernel, &[Some(&dy), Some(&at)], &[Some(&dx)])?;
            drop(dy);
            bx.give(0, dx)
        })?;
        Ok((values, places))
    }

    /// The values along `dim` in ascending (or descending) order, and their indices as i64. Equal
    /// values keep their order; NaN counts as largest.
    ///
    /// # Errors
    /// When the dimension does not exist.
    pub fn sort(&mut self, x: &Tensor, dim: isize, descending: bool) -> Result<(Tensor, Tensor)> {
        let size = x.dims()[x.shape().axis("sort", dim)?];
        self.topk(x, size, dim, descending)
    }
}

/// Floats as they are, whole numbers and truth values as i64: what sums are made of.
fn countable(worker: &Worker, x: &Tensor) -> Result<Tensor> {
    if x.dtype().is_float() {
        Ok(x.detach())
    } else {
        worker.cast(x, DType::I64)
    }
}

fn running(worker: &Worker, x: &Tensor, dim: usize, reverse: bool) -> Result<Tensor> {
    let y = worker.alloc("cumsum", x.dtype(), *x.shape())?;
    worker.launch(&Kernel::CumSum { dim, reverse }, &[Some(x)], &[Some(&y)])?;
    Ok(y)
}

/// x / by, where `by` may be 0.
fn divide(worker: &Worker, op: &'static str, x: &Tensor, by: f64) -> Result<Tensor> {
    let by = worker.full(x.dtype(), Shape::default(), by)?;
    raw_binary(worker, op, Binary::Div, x, &by)
}

/// dy / length, finite where the length is 0: what it is multiplied with is 0 there.
fn over_length(worker: &Worker, op: &'static str, dy: &Tensor, length: &Tensor) -> Result<Tensor> {
    let least = worker.full(length.dtype(), Shape::default(), 1e-30)?;
    let length = raw_binary(worker, op, Binary::Max, length, &least)?;
    raw_binary(worker, op, Binary::Div, dy, &length)
}

/// `x` with the reduced dimensions of `fold` moved behind the others.
fn last(fold: &ReducedShape, x: &Tensor) -> Tensor {
    let reduced = |axis: &usize| fold.kept[*axis] != fold.from[*axis];
    let mut order: Vec<usize> = (0..x.rank()).filter(|axis| !reduced(axis)).collect();
    order.extend((0..x.rank()).filter(reduced));
    x.relaid(x.layout().permuted(&order))
}

/// Log-sum-exp of rows of `fold.count` elements, in the accumulator type and the kept shape. The
/// kernel of cross entropy computes it on the way; with every label left out it computes nothing
/// else.
fn row_lse(worker: &Worker, x: &Tensor, fold: &ReducedShape) -> Result<Tensor> {
    const OP: &str = "logsumexp";
    let rows = fold.kept.numel();
    let x = worker
        .contiguous(x)?
        .relaid(Layout::contiguous(Shape::new(&[rows, fold.count])?));
    let labels = worker.full(DType::I64, Shape::new(&[rows])?, -1.0)?;
    let acc = x.dtype().accumulator();
    let loss = worker.alloc(OP, acc, Shape::new(&[rows])?)?;
    let lse = worker.alloc(OP, acc, Shape::new(&[rows])?)?;
    let kernel = Kernel::CrossEntropy {
        ignore: -1,
        smoothing: 0.0,
    };
    worker.launch(
        &kernel,
        &[Some(&x), Some(&labels)],
        &[Some(&loss), Some(&lse)],
    )?;
    Ok(fold.held(&lse))
}

/// dx of a product: dy times the product of the others, which a division gives where nothing is 0.
/// With one 0 only that element has a gradient, with more none has.
fn prod_grad(worker: &Worker, fold: &ReducedShape, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    const OP: &str = "prod";
    let acc = x.dtype().accumulator();
    let constant = |value: f64| worker.full(acc, Shape::default(), value);
    let (zero, one) = (constant(0.0)?, constant(1.0)?);
    let (wide, dy) = (worker.cast(x, acc)?, worker.cast(dy, acc)?);
    let is_zero = raw_compare(worker, OP, Compare::Eq, &wide, &zero)?;
    let zeros = fold.run(worker, OP, Reduce::Sum, &worker.cast(&is_zero, acc)?, acc)?;
    let safe = raw_select(worker, OP, &is_zero, &one, &wide)?;
    let rest = fold.run(worker, OP, Reduce::Prod, &safe, acc)?;
    let slope = raw_binary(worker, OP, Binary::Mul, &dy, &rest)?;
    let when = |count: &Tensor| {
        let hit = raw_compare(worker, OP, Compare::Eq, &zeros, count)?;
        raw_select(worker, OP, &hit, &slope, &zero)
    };
    let (alone, whole) = (when(&one)?, when(&zero)?);
    let others = raw_binary(worker, OP, Binary::Div, &whole, &safe)?;
    drop(safe);
    let dx = raw_select(worker, OP, &is_zero, &alone, &others)?;
    drop(others);
    worker.cast(&dx, x.dtype())
}
