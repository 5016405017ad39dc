//! Attention: softmax(q kᵀ) v in blocks, forward and backward, without ever holding the matrix of scores.
//!
//! Two families of our own kernels: one that is right for every type, width and stride, and one on tensor cores for
//! bf16 and f16 ([`own`]). Backward is two kernels, dq over blocks of queries and dk, dv over blocks of keys: seven
//! products instead of five, and no atomics. The way is chosen by the operands alone.
//!
//! # Invariants
//! - With our own kernels a row's bits depend on its own sequence alone: neither batch nor neighbours in a packed
//!   batch change them.
//! - Cumulative lengths that make no sense raise the alarm and reach no memory outside the operands.

mod own;

use super::call::Call;
use super::compile::Unit;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Attention(spec) => own::forward(call, spec),
            Kernel::AttentionGrad(spec) => own::backward(call, spec),
            _ => Err(Error::invalid(call.kernel.name(), "is no attention")),
        }
    }
}

/// Scratch bytes: a function of the operands alone.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], _dst: &[Option<View>]) -> usize {
    match kernel {
        Kernel::AttentionGrad(_) => own::delta_bytes(src[0].as_ref().expect("q is always there")),
        _ => 0,
    }
}

/// Every variant that models use.
pub(super) fn units() -> Vec<Unit> {
    own::units()
}

/// Plans of attention, by shape.
#[derive(Default)]
pub(crate) struct Plans;
