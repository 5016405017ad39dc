//! Not written yet.

use super::call::Call;
use super::compile::Unit;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    Err(Error::invalid(call.kernel.name(), "not on a GPU yet"))
}

pub(super) fn scratch(_kernel: &Kernel, _src: &[Option<View>], _dst: &[Option<View>]) -> usize {
    0
}

pub(super) fn units() -> Vec<Unit> {
    Vec::new()
}
