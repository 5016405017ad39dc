//! Comparisons, logic, and choosing between tensors.

use super::unary::held;
use super::{give_sum, incoming, raw_binary, raw_unary, scalar};
use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Binary, Compare, Kernel, Unary};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// Methods that only name a comparison: of two tensors, and of a tensor with a number.
macro_rules! comparisons {
    ($($name:ident $with_scalar:ident $kind:ident $sign:literal)*) => {
        impl Cx {$(
            #[doc = concat!("Whether a ", $sign, " b, as bool.")]
            ///
            /// # Errors
            /// When types differ or shapes do not broadcast.
            pub fn $name(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
                raw_compare(self.worker(), stringify!($name), Compare::$kind, a, b)
            }

            #[doc = concat!("Whether x ", $sign, " number, as bool.")]
            ///
            /// # Errors
            /// When `x` holds integers and the number is not one of its type.
            pub fn $with_scalar(&mut self, x: &Tensor, number: f64) -> Result<Tensor> {
                const OP: &str = stringify!($with_scalar);
                held(OP, x, number)?;
                let number = scalar(self.worker(), x.dtype(), number)?;
                raw_compare(self.worker(), OP, Compare::$kind, x, &number)
            }
        )*}
    };
}

comparisons! {
    eq eq_scalar Eq "="
    ne ne_scalar Ne "≠"
    lt lt_scalar Lt "<"
    le le_scalar Le "≤"
    gt gt_scalar Gt ">"
    ge ge_scalar Ge "≥"
}

/// Methods that only name a function of two truth values.
macro_rules! logic {
    ($($name:ident $kind:ident $doc:literal)*) => {
        impl Cx {$(
            #[doc = $doc]
            ///
            /// # Errors
            /// When an operand is not bool or shapes do not broadcast.
            pub fn $name(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
                truth(stringify!($name), a)?;
                raw_binary(self.worker(), stringify!($name), Binary::$kind, a, b)
            }
        )*}
    };
}

logic! {
    logical_and And "Whether both hold."
    logical_or Or "Whether either holds."
    logical_xor Xor "Whether exactly one holds."
}

impl Cx {
    /// Whether x does not hold.
    ///
    /// # Errors
    /// When `x` is not bool.
    pub fn logical_not(&mut self, x: &Tensor) -> Result<Tensor> {
        truth("logical_not", x)?;
        raw_unary(self.worker(), "logical_not", Unary::Not, x)
    }

    /// a where `cond` holds, else b; all three broadcast.
    ///
    /// # Errors
    /// When `cond` is not bool, the types of a and b differ, or shapes do not broadcast.
    pub fn where_cond(&mut self, cond: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        const OP: &str = "where_cond";
        truth(OP, cond)?;
        let y = raw_select(self.worker(), OP, cond, a, b)?;
        let (cond, left, right) = (cond.detach(), *a.shape(), *b.shape());
        self.record_one(OP, &[a, b], y, move |bx| {
            let dy = incoming(bx);
            let zero = scalar(bx.worker(), dy.dtype(), 0.0)?;
            if bx.needs(0) {
                let da = raw_select(bx.worker(), OP, &cond, &dy, &zero)?;
                give_sum(bx, 0, da, left)?;
            }
            if bx.needs(1) {
                let db = raw_select(bx.worker(), OP, &cond, &zero, &dy)?;
                drop(dy);
                give_sum(bx, 1, db, right)?;
            }
            Ok(())
        })
    }

    /// `value` where `mask` holds, else x. The mask broadcasts to x.
    ///
    /// # Errors
    /// When `mask` is not bool or does not broadcast to x's shape, or `x` holds integers and the
    /// value is not one of its type.
    pub fn masked_fill(&mut self, x: &Tensor, mask: &Tensor, value: f64) -> Result<Tensor> {
        const OP: &str = "masked_fill";
        truth(OP, mask)?;
        held(OP, x, value)?;
        if x.shape().broadcast(mask.shape(), OP)? != *x.shape() {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *mask.shape(),
            });
        }
        let value = scalar(self.worker(), x.dtype(), value)?;
        let y = raw_select(self.worker(), OP, mask, &value, x)?;
        let mask = mask.detach();
        self.record_one(OP, &[x], y, move |bx| {
            let dy = incoming(bx);
            let zero = scalar(bx.worker(), dy.dtype(), 0.0)?;
            let dx = raw_select(bx.worker(), OP, &mask, &zero, &dy)?;
            drop((mask, dy));
            bx.give(0, dx)
        })
    }
}

/// Refuses what is not bool.
fn truth(op: &'static str, x: &Tensor) -> Result<()> {
    if x.dtype() == DType::Bool {
        return Ok(());
    }
    Err(Error::DType {
        op,
        dtype: x.dtype(),
        shape: *x.shape(),
        expected: "it takes bool",
    })
}

/// The kernel alone, with broadcasting.
pub(crate) fn raw_compare(
    worker: &Worker,
    op: &'static str,
    kind: Compare,
    a: &Tensor,
    b: &Tensor,
) -> Result<Tensor> {
    same_dtype(op, a, b)?;
    let shape = a.shape().broadcast(b.shape(), op)?;
    let [left, right] = [a, b].map(|t| t.layout().broadcast_to(shape, op).map(|l| t.relaid(l)));
    let out = worker.alloc(op, DType::Bool, shape)?;
    worker.launch(
        &Kernel::Compare(kind),
        &[Some(&left?), Some(&right?)],
        &[Some(&out)],
    )?;
    Ok(out)
}

/// The kernel alone, with broadcasting, unrecorded; `cond` is bool.
pub(crate) fn raw_select(
    worker: &Worker,
    op: &'static str,
    cond: &Tensor,
    a: &Tensor,
    b: &Tensor,
) -> Result<Tensor> {
    same_dtype(op, a, b)?;
    let shape = a
        .shape()
        .broadcast(b.shape(), op)?
        .broadcast(cond.shape(), op)?;
    let [cond, left, right] =
        [cond, a, b].map(|t| t.layout().broadcast_to(shape, op).map(|l| t.relaid(l)));
    let out = worker.alloc(op, a.dtype(), shape)?;
    worker.launch(
        &Kernel::Select,
        &[Some(&cond?), Some(&left?), Some(&right?)],
        &[Some(&out)],
    )?;
    Ok(out)
}
