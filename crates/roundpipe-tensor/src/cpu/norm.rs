//! Normalisation over rows (RMS norm, layer norm) and over planes of images (group norm, batch
//! norm).
//!
//! A row or a plane is summed in a fixed number of lanes ([`lanes`]), weight gradients are summed
//! over blocks of rows whose extent depends on the sizes alone and then over the blocks in order.
//! Statistics are kept in the accumulator type; a mean is corrected by a second pass, so that a
//! mean far from zero costs no digits of the variance.

pub(super) mod lanes;
mod planes;
mod rows;

use super::access::{Call, for_float};
use crate::error::Result;
use crate::kernel::{Kernel, View};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged; `T` is the type of x.
    unsafe {
        match *call.kernel {
            Kernel::RmsNorm { eps } => {
                for_float!(call, call.src(0).dtype, T => rows::rms::<T>(call, eps))
            }
            Kernel::RmsNormGrad { accumulate } => {
                for_float!(call, call.src(0).dtype, T => rows::rms_grad::<T>(call, accumulate));
            }
            Kernel::LayerNorm { eps } => {
                for_float!(call, call.src(0).dtype, T => rows::layer::<T>(call, eps))
            }
            Kernel::LayerNormGrad { accumulate } => {
                for_float!(call, call.src(0).dtype, T => rows::layer_grad::<T>(call, accumulate));
            }
            Kernel::GroupNorm { groups, eps } => {
                for_float!(call, call.src(0).dtype, T => planes::group::<T>(call, groups, eps));
            }
            Kernel::GroupNormGrad { groups, accumulate } => {
                for_float!(call, call.src(0).dtype, T => planes::group_grad::<T>(call, groups, accumulate));
            }
            Kernel::BatchNorm { eps } => {
                for_float!(call, call.src(0).dtype, T => planes::batch::<T>(call, eps))
            }
            Kernel::BatchNormGrad {
                batch_stats,
                accumulate,
            } => {
                for_float!(call, call.src(0).dtype, T => planes::batch_grad::<T>(call, batch_stats, accumulate));
            }
            _ => return Err(call.unsupported()),
        }
    }
    Ok(())
}

/// Scratch bytes of this family's kernels.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let Some(Some(x)) = src.first() else { return 0 };
    let wanted = |i: usize| usize::from(dst.get(i).is_some_and(Option::is_some));
    let cols = x.shape().last().copied().unwrap_or(1);
    let blocks = lanes::blocks(lanes::rows_of(x), cols).count;
    let elements = match kernel {
        Kernel::RmsNorm { .. } => cols,
        Kernel::RmsNormGrad { .. } => cols * (1 + blocks * wanted(1)),
        Kernel::LayerNorm { .. } => 2 * cols,
        Kernel::LayerNormGrad { .. } => cols * (1 + blocks * (wanted(1) + wanted(2))),
        // Two sums per plane, for dx as much as for dw and db.
        Kernel::GroupNormGrad { .. } => 2 * x.shape()[0] * x.shape()[1],
        _ => 0,
    };
    elements * x.dtype.accumulator().size()
}
