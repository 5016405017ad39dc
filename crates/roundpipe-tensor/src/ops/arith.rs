//! Elementwise arithmetic with broadcasting.

use crate::cx::{Cx, same_dtype};
use crate::error::Result;
use crate::kernel::{Binary, Kernel};
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

    fn binary(&mut self, op: &'static str, kind: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        raw_binary(self.worker(), op, kind, a, b)
    }
}

/// The kernel alone, with broadcasting, unrecorded.
pub(crate) fn raw_binary(
    worker: &crate::exec::Worker,
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
