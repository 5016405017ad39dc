//! (to be written)

use super::access::Call;
use crate::error::Result;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    Err(call.unsupported())
}
