//! Rotary embedding, alone and behind the RMS norm of a head, and gated linear units.
//!
//! Sources keep their strides except in the last dimension, so that queries and keys are read where
//! a joint projection left them. Positions are checked against the table before anything is
//! written.

mod glu;
mod heads;
mod rotate;

use super::access::{Call, for_float};
use super::norm::lanes;
use crate::error::Result;
use crate::kernel::{Kernel, View};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let dtype = call.src(0).dtype;
    // SAFETY: the caller's promise is passed on unchanged; `T` is the type of the first source.
    unsafe {
        match *call.kernel {
            Kernel::Rope { style, inverse } => {
                for_float!(call, dtype, T => rotate::rope::<T>(call, style, inverse))
            }
            Kernel::RopeNorm { style, eps } => {
                for_float!(call, dtype, T => rotate::rope_norm::<T>(call, style, eps))
            }
            Kernel::RopeNormGrad { style, accumulate } => {
                for_float!(call, dtype, T => rotate::rope_norm_grad::<T>(call, style, accumulate))
            }
            Kernel::Glu(kind) => for_float!(call, dtype, T => glu::forward::<T>(call, kind)),
            Kernel::GluGrad(kind) => for_float!(call, dtype, T => glu::backward::<T>(call, kind)),
            _ => Err(call.unsupported()),
        }
    }
}

/// Scratch bytes of this family's kernels.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let Some(Some(x)) = src.first() else { return 0 };
    let Some(&width) = x.shape().last() else {
        return 0;
    };
    let elements = match kernel {
        Kernel::RopeNorm { .. } => width,
        Kernel::RopeNormGrad { .. } => {
            let blocks = lanes::blocks(lanes::rows_of(x), width).count;
            // The weight; of every block one head rotated back and perhaps a partial dw.
            let sums = usize::from(dst.get(1).is_some_and(Option::is_some));
            width * (1 + blocks * (1 + sums))
        }
        _ => 0,
    };
    elements * x.dtype.accumulator().size()
}
