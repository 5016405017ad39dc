//! Functions of two values.

use super::super::access::Call;
use super::super::simd::vectorize;
use super::blocks;
use super::stage::{StageElement, for_stage};
use super::walk::{ReadOperand, WriteOperand};
use crate::error::Result;
use crate::kernel::Binary;

/// `[a, b] -> [y]`, same types.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn binary(call: &Call<'_>, op: Binary) -> Result<()> {
    // SAFETY: promised by the caller.
    let (a, b, y) = unsafe {
        (
            ReadOperand::new(call, 0),
            ReadOperand::new(call, 1),
            WriteOperand::new(call, 0),
        )
    };
    if a.dtype() != y.dtype() || b.dtype() != y.dtype() {
        return Err(call.unsupported());
    }
    for_stage!(y.dtype(), S => {
        let f = S::zip(op).ok_or_else(|| call.unsupported())?;
        blocks(call, y.numel(), |[left, right, out], start, len| {
            let left = S::read(&a, start, &mut left[..len]);
            let right = S::read(&b, start, &mut right[..len]);
            S::write(&y, start, &mut out[..len], |out| f(left, right, out));
        });
    });
    Ok(())
}

/// A function of two values over blocks.
type Zip<S> = fn(&[S], &[S], &mut [S]);

/// Stages with functions of two values.
trait Arithmetic: StageElement {
    /// The function, if this stage has it.
    fn zip(op: Binary) -> Option<Zip<Self>>;
}

/// One vector loop per function.
macro_rules! zips {
    ($t:ty, $op:expr, $a:ident, $b:ident, { $($name:ident => $e:expr,)* }) => {
        match $op {
            $(Binary::$name => {
                vectorize! {
                    fn run(a: &[$t], b: &[$t], y: &mut [$t]) {
                        for ((y, &$a), &$b) in y.iter_mut().zip(a).zip(b) {
                            *y = $e;
                        }
                    }
                }
                Some(run as Zip<$t>)
            })*
            #[allow(unreachable_patterns, reason = "integers have them all")]
            _ => None,
        }
    };
}

macro_rules! float {
    ($t:ty) => {
        impl Arithmetic for $t {
            fn zip(op: Binary) -> Option<Zip<$t>> {
                zips!($t, op, a, b, {
                    Add => a + b,
                    Sub => a - b,
                    Mul => a * b,
                    Div => a / b,
                    Pow => a.powf(b),
                    Max => if a > b || a.is_nan() { a } else { b },
                    Min => if a < b || a.is_nan() { a } else { b },
                })
            }
        }
    };
}

float!(f64);
float!(f32);

impl Arithmetic for i64 {
    fn zip(op: Binary) -> Option<Zip<i64>> {
        zips!(i64, op, a, b, {
            Add => a.wrapping_add(b),
            Sub => a.wrapping_sub(b),
            Mul => a.wrapping_mul(b),
            Div => if b == 0 { 0 } else { a.wrapping_div(b) },
            Pow => power(a, b),
            Max => a.max(b),
            Min => a.min(b),
            And => a & b,
            Or => a | b,
            Xor => a ^ b,
        })
    }
}

/// a to the power b, wrapping; negative powers round towards zero, those of 0 give 0.
#[inline(always)]
fn power(a: i64, b: i64) -> i64 {
    match (a, b) {
        (1, _) => 1,
        (-1, _) => {
            if b & 1 == 0 {
                1
            } else {
                -1
            }
        }
        (_, ..0) => 0,
        _ => {
            let (mut base, mut rest, mut out) = (a, b, 1i64);
            while rest > 0 {
                if rest & 1 == 1 {
                    out = out.wrapping_mul(base);
                }
                base = base.wrapping_mul(base);
                rest >>= 1;
            }
            out
        }
    }
}
