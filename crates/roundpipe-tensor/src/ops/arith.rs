//! Elementwise arithmetic with broadcasting.
//!
//! Integers wrap on overflow; an integer divided by zero is 0. Bool tensors take part in
//! comparisons, choices and logic, not in arithmetic: convert them with [`Cx::cast`].

mod choose;
mod unary;

use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Binary, Compare, Kernel, Reduce, Unary};
use crate::shape::{Layout, Shape};
use crate::tape::Back;
use crate::tensor::Tensor;
use crate::worker::Worker;

pub(crate) use choose::{raw_compare, raw_select};

impl Cx {
    /// a + b.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn add(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("add", Binary::Add, a, b)?;
        let (left, right) = (*a.shape(), *b.shape());
        self.record_one("add", &[a, b], y, move |bx| {
            let dy = incoming(bx);
            give_sum(bx, 0, dy.clone(), left)?;
            give_sum(bx, 1, dy, right)
        })
    }

    /// a - b.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn sub(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("sub", Binary::Sub, a, b)?;
        let (left, right) = (*a.shape(), *b.shape());
        self.record_one("sub", &[a, b], y, move |bx| {
            let dy = incoming(bx);
            give_sum(bx, 0, dy.clone(), left)?;
            if bx.needs(1) {
                let negative = raw_unary(bx.worker(), "sub", Unary::Neg, &dy)?;
                drop(dy);
                give_sum(bx, 1, negative, right)?;
            }
            Ok(())
        })
    }

    /// a · b.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn mul(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("mul", Binary::Mul, a, b)?;
        let (left, right) = (a.detach(), b.detach());
        self.record_one("mul", &[a, b], y, move |bx| {
            let dy = incoming(bx);
            for (i, (this, other)) in [(&left, &right), (&right, &left)].into_iter().enumerate() {
                if bx.needs(i) {
                    let full = raw_binary(bx.worker(), "mul", Binary::Mul, &dy, other)?;
                    give_sum(bx, i, full, *this.shape())?;
                }
            }
            Ok(())
        })
    }

    /// a / b.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn div(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("div", Binary::Div, a, b)?;
        let (left, right, quotient) = (*a.shape(), b.detach(), y.detach());
        self.record_one("div", &[a, b], y, move |bx| {
            let dy = incoming(bx);
            // dy / b is the gradient of a; that of b is -(dy / b) · y.
            let part = raw_binary(bx.worker(), "div", Binary::Div, &dy, &right)?;
            drop(dy);
            if bx.needs(1) {
                let full = raw_binary(bx.worker(), "div", Binary::Mul, &part, &quotient)?;
                let negative = raw_unary(bx.worker(), "div", Unary::Neg, &full)?;
                drop(full);
                give_sum(bx, 1, negative, *right.shape())?;
            }
            give_sum(bx, 0, part, left)
        })
    }

    /// a to the power b, element by element.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn pow(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("pow", Binary::Pow, a, b)?;
        let (base, exponent, power) = (a.detach(), b.detach(), y.detach());
        self.record_one("pow", &[a, b], y, move |bx| {
            let dy = incoming(bx);
            if bx.needs(0) {
                let da = base_grad(bx.worker(), &base, &exponent, &dy)?;
                give_sum(bx, 0, da, *base.shape())?;
            }
            if bx.needs(1) {
                let db = exponent_grad(bx.worker(), &base, &exponent, &power, &dy)?;
                give_sum(bx, 1, db, *exponent.shape())?;
            }
            Ok(())
        })
    }

    /// The larger of a and b; NaN where either is. The gradient of equal elements is shared half
    /// and half.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn maximum(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.extremum("maximum", Binary::Max, Compare::Gt, a, b)
    }

    /// The smaller of a and b; NaN where either is. The gradient of equal elements is shared half
    /// and half.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn minimum(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.extremum("minimum", Binary::Min, Compare::Lt, a, b)
    }

    fn extremum(
        &mut self,
        op: &'static str,
        kind: Binary,
        wins: Compare,
        a: &Tensor,
        b: &Tensor,
    ) -> Result<Tensor> {
        let y = self.binary(op, kind, a, b)?;
        let (left, right) = (a.detach(), b.detach());
        self.record_one(op, &[a, b], y, move |bx| {
            let dy = incoming(bx);
            for (i, (this, other)) in [(&left, &right), (&right, &left)].into_iter().enumerate() {
                if bx.needs(i) {
                    let grad = winner_grad(bx.worker(), op, wins, this, other, &dy)?;
                    give_sum(bx, i, grad, *this.shape())?;
                }
            }
            Ok(())
        })
    }

    fn binary(&mut self, op: &'static str, kind: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        if a.dtype() == DType::Bool {
            return Err(no_bool(op, a));
        }
        raw_binary(self.worker(), op, kind, a, b)
    }
}

/// dy · b · a^(b - 1).
fn base_grad(worker: &Worker, base: &Tensor, exponent: &Tensor, dy: &Tensor) -> Result<Tensor> {
    const OP: &str = "pow";
    let less = raw_unary(
        worker,
        OP,
        Unary::Affine {
            mul: 1.0,
            add: -1.0,
        },
        exponent,
    )?;
    let power = raw_binary(worker, OP, Binary::Pow, base, &less)?;
    drop(less);
    let slope = raw_binary(worker, OP, Binary::Mul, &power, exponent)?;
    drop(power);
    // An exponent of 0 has slope 0 even where a^-1 is infinite.
    let zero = scalar(worker, exponent.dtype(), 0.0)?;
    let constant = raw_compare(worker, OP, Compare::Eq, exponent, &zero)?;
    let slope = raw_select(worker, OP, &constant, &zero, &slope)?;
    raw_binary(worker, OP, Binary::Mul, &slope, dy)
}

/// dy · a^b · ln a; 0 where the power is 0 (the logarithm may be infinite there).
fn exponent_grad(
    worker: &Worker,
    base: &Tensor,
    exponent: &Tensor,
    power: &Tensor,
    dy: &Tensor,
) -> Result<Tensor> {
    const OP: &str = "pow";
    let log = raw_unary(worker, OP, Unary::Log, base)?;
    let slope = raw_binary(worker, OP, Binary::Mul, power, &log)?;
    drop(log);
    let zero = scalar(worker, base.dtype(), 0.0)?;
    let still = raw_compare(worker, OP, Compare::Eq, base, &zero)?;
    let rising = raw_compare(worker, OP, Compare::Ge, exponent, &zero)?;
    let flat = raw_binary(worker, OP, Binary::And, &still, &rising)?;
    let slope = raw_select(worker, OP, &flat, &zero, &slope)?;
    raw_binary(worker, OP, Binary::Mul, &slope, dy)
}

/// dy where `this` wins, half of it where the two are equal, else 0.
fn winner_grad(
    worker: &Worker,
    op: &'static str,
    wins: Compare,
    this: &Tensor,
    other: &Tensor,
    dy: &Tensor,
) -> Result<Tensor> {
    let zero = scalar(worker, dy.dtype(), 0.0)?;
    let won = raw_compare(worker, op, wins, this, other)?;
    let whole = raw_select(worker, op, &won, dy, &zero)?;
    drop(won);
    let half = raw_unary(worker, op, Unary::Affine { mul: 0.5, add: 0.0 }, dy)?;
    let equal = raw_compare(worker, op, Compare::Eq, this, other)?;
    raw_select(worker, op, &equal, &half, &whole)
}

/// The gradient of the only output, as it lies: elementwise kernels take any strides.
fn incoming(bx: &mut Back<'_>) -> Tensor {
    bx.grad_strided(0)
        .expect("a node runs only with a gradient")
}

/// Contributes `full`, summed over the dimensions that broadcasting stretched, to input `i` of
/// `shape`. Sums are written in the accumulator type, straight into a parameter's gradient where
/// there is one.
fn give_sum(bx: &mut Back<'_>, i: usize, full: Tensor, shape: Shape) -> Result<()> {
    if !bx.needs(i) {
        return Ok(());
    }
    if *full.shape() == shape {
        return bx.give(i, full.detach());
    }
    let lead = full.rank() - shape.rank();
    let kept = (0..full.rank()).fold(*full.shape(), |kept, axis| {
        kept.cut(axis, if axis < lead { 1 } else { shape[axis - lead] })
    });
    let sink = bx.sink(i)?;
    let kernel = Kernel::Reduce {
        op: Reduce::Sum,
        accumulate: sink.accumulate,
    };
    let into = sink.tensor.relaid(Layout::contiguous(kept));
    bx.worker()
        .launch(&kernel, &[Some(&full)], &[Some(&into)])?;
    drop((full, into));
    bx.give_back(i, sink)
}

/// The refusal of arithmetic on truth values.
fn no_bool(op: &'static str, x: &Tensor) -> Error {
    Error::DType {
        op,
        dtype: x.dtype(),
        shape: *x.shape(),
        expected: "convert it with `cast`",
    }
}

/// A constant that broadcasts.
fn scalar(worker: &Worker, dtype: DType, value: f64) -> Result<Tensor> {
    worker.full(dtype, Shape::default(), value)
}

/// The kernel alone, unrecorded.
pub(crate) fn raw_unary(
    worker: &Worker,
    op: &'static str,
    kind: Unary,
    x: &Tensor,
) -> Result<Tensor> {
    let out = worker.alloc(op, x.dtype(), *x.shape())?;
    worker.launch(&Kernel::Unary(kind), &[Some(x)], &[Some(&out)])?;
    Ok(out)
}

/// The kernel alone, with broadcasting, unrecorded.
pub(crate) fn raw_binary(
    worker: &Worker,
    op: &'static str,
    kind: Binary,
    a: &Tensor,
    b: &Tensor,
) -> Result<Tensor> {
    same_dtype(op, a, b)?;
    let shape = a.shape().broadcast(b.shape(), op)?;
    let left = a.relaid(a.layout().broadcast_to(shape, op)?);
    let right = b.relaid(b.layout().broadcast_to(shape, op)?);
    let out = worker.alloc(op, a.dtype(), shape)?;
    worker.launch(
        &Kernel::Binary(kind),
        &[Some(&left), Some(&right)],
        &[Some(&out)],
    )?;
    Ok(out)
}
