//! Convolution and pooling of images `[n, c, h, w]`.
//!
//! A convolution becomes matrix products: the elements that the taps of the filter meet are laid
//! out as columns (one per output position), a block of positions at a time, and multiplied by the
//! filter. The gradient of the input is the same with the roles exchanged, once per residue of the
//! stride, so that no product with a zero between the positions is done. Filters with one channel
//! per group are applied directly.
//!
//! # Invariants
//! - An output element is one sum in the accumulator type in an order that the sizes fix, rounded
//!   once.
//! - Scratch memory is bounded by the filter's sizes, not by the image's.

mod conv;
mod depthwise;
mod lattice;
mod pool;

use super::access::{Call, for_float};
use crate::error::Result;
use crate::kernel::{Kernel, View};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let dtype = call.src(0).dtype;
    // SAFETY: the caller's promise is passed on; the first source's type is the kernel's.
    for_float!(call, dtype, T => unsafe {
        match call.kernel {
            Kernel::Conv2d(spec) => conv::forward::<T>(call, spec),
            Kernel::Conv2dGradInput(spec) => conv::grad_input::<T>(call, spec),
            Kernel::Conv2dGradFilter { spec, accumulate } => conv::grad_filter::<T>(call, spec, *accumulate),
            Kernel::MaxPool2d(spec) => pool::max::<T>(call, spec),
            Kernel::MaxPool2dGrad(spec) => pool::max_grad::<T>(call, spec),
            Kernel::AvgPool2d(spec) => pool::average::<T>(call, Some(spec)),
            Kernel::AvgPool2dGrad(spec) => pool::average_grad::<T>(call, Some(spec)),
            Kernel::AdaptiveAvgPool2d => pool::average::<T>(call, None),
            Kernel::AdaptiveAvgPool2dGrad => pool::average_grad::<T>(call, None),
            _ => return Err(call.unsupported()),
        }
    });
    Ok(())
}

/// Scratch bytes of a convolution; pooling needs none.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let (Some(Some(a)), Some(Some(b)), Some(Some(y))) = (src.first(), src.get(1), dst.first())
    else {
        return 0;
    };
    match kernel {
        Kernel::Conv2d(spec) => conv::forward_scratch(spec, a, b, y),
        Kernel::Conv2dGradInput(spec) => conv::grad_input_scratch(spec, a, b, y),
        Kernel::Conv2dGradFilter { spec, .. } => conv::grad_filter_scratch(spec, a, b, y),
        _ => 0,
    }
}
