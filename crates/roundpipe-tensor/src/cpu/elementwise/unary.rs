//! Functions of one value.

use super::super::access::Call;
use super::super::simd::vectorize;
use super::stage::{Stage, for_stage};
use super::walk::{Source, Target};
use super::{BLOCK, blocks};
use crate::error::Result;
use crate::kernel::Unary;

/// `[x] -> [y]`, same types.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn unary(call: &Call<'_>, op: Unary) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, y) = unsafe { (Source::new(call, 0), Target::new(call, 0)) };
    if x.dtype() != y.dtype() {
        return Err(call.unsupported());
    }
    for_stage!(y.dtype(), S => {
        let (f, [p, q]) = S::map(op).ok_or_else(|| call.unsupported())?;
        blocks(call, y.numel(), |start, len| {
            let (mut buf, mut out) = ([S::default(); BLOCK], [S::default(); BLOCK]);
            let values = S::read(&x, start, &mut buf[..len]);
            S::write(&y, start, &mut out[..len], |out| f(p, q, values, out));
        });
    });
    Ok(())
}

/// A function of one value and two constants over blocks.
type Map<S> = fn(S, S, &[S], &mut [S]);

/// Stages with functions of one value.
trait Functions: Stage {
    /// The function and its constants, if this stage has it.
    fn map(op: Unary) -> Option<(Map<Self>, [Self; 2])>;
}

macro_rules! float {
    ($t:ty) => {
        impl Functions for $t {
            fn map(op: Unary) -> Option<(Map<$t>, [$t; 2])> {
                vectorize! {
                    fn affine(p: $t, q: $t, x: &[$t], y: &mut [$t]) {
                        y.iter_mut().zip(x).for_each(|(y, x)| *y = *x * p + q);
                    }
                }
                match op {
                    Unary::Affine { mul, add } => Some((affine, [mul as $t, add as $t])),
                    Unary::Neg => Some((affine, [-1.0, 0.0])),
                    _ => None,
                }
            }
        }
    };
}

float!(f32);
float!(f64);

impl Functions for i64 {
    fn map(op: Unary) -> Option<(Map<i64>, [i64; 2])> {
        vectorize! {
            fn affine(p: i64, q: i64, x: &[i64], y: &mut [i64]) {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = x.wrapping_mul(p).wrapping_add(q));
            }
        }
        match op {
            Unary::Affine { mul, add } => Some((affine, [mul as i64, add as i64])),
            Unary::Neg => Some((affine, [-1, 0])),
            _ => None,
        }
    }
}
