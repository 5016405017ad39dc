//! Elementwise arithmetic with broadcasting.

use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::exec::Worker;
use crate::kernel::{Binary, Kernel, Unary};
use crate::tensor::Tensor;

impl Cx {
    /// a + b.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn add(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("add", Binary::Add, a, b)?;
        let (left, right) = (*a.shape(), *b.shape());
        self.record_one("add", &[a, b], y, move |bx| {
            let dy = bx.dy()?;
            if bx.needs(0) {
                let da = bx.worker().sum_to(&dy, left)?;
                bx.give(0, da)?;
            }
            if bx.needs(1) {
                let db = bx.worker().sum_to(&dy, right)?;
                drop(dy);
                bx.give(1, db)?;
            }
            Ok(())
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
            let dy = bx.dy()?;
            if bx.needs(0) {
                let da = bx.worker().sum_to(&dy, left)?;
                bx.give(0, da)?;
            }
            if bx.needs(1) {
                let db = bx.worker().sum_to(&dy, right)?;
                drop(dy);
                let db = raw_unary(bx.worker(), "sub", Unary::Neg, &db)?;
                bx.give(1, db)?;
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
            let dy = bx.dy()?;
            for (i, (this, other)) in [(&left, &right), (&right, &left)].into_iter().enumerate() {
                if bx.needs(i) {
                    let full = raw_binary(bx.worker(), "mul", Binary::Mul, &dy, other)?;
                    let grad = bx.worker().sum_to(&full, *this.shape())?;
                    drop(full);
                    bx.give(i, grad)?;
                }
            }
            Ok(())
        })
    }

    /// a / b. Integers truncate; an integer divided by zero is 0.
    ///
    /// # Errors
    /// When types differ or shapes do not broadcast.
    pub fn div(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let y = self.binary("div", Binary::Div, a, b)?;
        let (left, right, quotient) = (*a.shape(), b.detach(), y.detach());
        self.record_one("div", &[a, b], y, move |bx| {
            let dy = bx.dy()?;
            // dy / b is the gradient of a; that of b is -(dy / b) · y.
            let part = raw_binary(bx.worker(), "div", Binary::Div, &dy, &right)?;
            drop(dy);
            if bx.needs(0) {
                let da = bx.worker().sum_to(&part, left)?;
                bx.give(0, da)?;
            }
            if bx.needs(1) {
                let full = raw_binary(bx.worker(), "div", Binary::Mul, &part, &quotient)?;
                drop(part);
                let sum = bx.worker().sum_to(&full, *right.shape())?;
                drop(full);
                let db = raw_unary(bx.worker(), "div", Unary::Neg, &sum)?;
                drop(sum);
                bx.give(1, db)?;
            }
            Ok(())
        })
    }

    /// -x.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn neg(&mut self, x: &Tensor) -> Result<Tensor> {
        self.sloped("neg", Unary::Neg, -1.0, x)
    }

    /// x · mul + add. Integer tensors take whole numbers.
    ///
    /// # Errors
    /// When `x` holds integers and a number is not whole.
    pub fn affine(&mut self, x: &Tensor, mul: f64, add: f64) -> Result<Tensor> {
        for number in [mul, add] {
            whole("affine", x, number)?;
        }
        self.sloped("affine", Unary::Affine { mul, add }, mul, x)
    }

    /// A function whose derivative is the constant `slope`.
    fn sloped(&mut self, op: &'static str, kind: Unary, slope: f64, x: &Tensor) -> Result<Tensor> {
        let y = raw_unary(self.worker(), op, kind, x)?;
        self.record_one(op, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = raw_unary(bx.worker(), op, Unary::Affine { mul: slope, add: 0.0 }, &dy)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    fn binary(&mut self, op: &'static str, kind: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        raw_binary(self.worker(), op, kind, a, b)
    }
}

/// Refuses a number that an integer tensor cannot be combined with.
fn whole(op: &'static str, x: &Tensor, number: f64) -> Result<()> {
    if x.dtype() == DType::Bool {
        let expected = "convert it with `cast`";
        return Err(Error::DType { op, dtype: x.dtype(), shape: *x.shape(), expected });
    }
    if x.dtype().is_float() || (number.fract() == 0.0 && number.abs() < 9.3e18) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{number} is not a whole number, but {} {} is", x.dtype(), x.shape())))
}

/// The kernel alone, unrecorded.
pub(crate) fn raw_unary(worker: &Worker, op: &'static str, kind: Unary, x: &Tensor) -> Result<Tensor> {
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
    worker.launch(&Kernel::Binary(kind), &[Some(&left), Some(&right)], &[Some(&out)])?;
    Ok(out)
}
