//! Elementwise kernels: fills, copies, arithmetic, comparisons, random numbers.
//!
//! Every kernel walks its destination in row-major order in blocks of [`BLOCK`] elements. An operand's
//! block is borrowed where it lies side by side in memory in the type of the arithmetic (its *stage*:
//! f64, f32 for the narrower floats, i64 for integers and bool); otherwise it is gathered and widened
//! into a buffer that stays in the first-level cache. So the functions are compiled once per stage, not
//! once per element type and stride pattern.
//!
//! Integer arithmetic wraps. Integer division truncates; dividing by zero gives 0 (an asynchronous
//! device has nobody to report to).

mod binary;
mod choose;
mod copy;
mod random;
mod stage;
mod unary;
mod walk;

use super::access::Call;
use crate::error::Result;
use crate::kernel::Kernel;

/// Elements handled at a time: three buffers of them fit a first-level cache.
const BLOCK: usize = 1024;

/// Elements per task; a multiple of [`BLOCK`].
const GRAIN: usize = 32 * BLOCK;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Fill { value } => copy::fill(call, *value),
            Kernel::Arange { start, step } => random::arange(call, *start, *step),
            Kernel::Random { dist, key } => random::random(call, *dist, *key),
            Kernel::Copy => copy::copy(call),
            Kernel::Accumulate { alpha } => copy::accumulate(call, *alpha),
            Kernel::Unary(op) => unary::unary(call, *op),
            Kernel::UnaryGrad(op) => unary::unary_grad(call, *op),
            Kernel::Binary(op) => binary::binary(call, *op),
            Kernel::Compare(op) => choose::compare(call, *op),
            Kernel::Select => choose::select(call),
            Kernel::Dropout { p, key } => random::dropout(call, *p, *key),
            _ => Err(call.unsupported()),
        }
    }
}

/// Runs `body(start, len)` over `0..count` in blocks, tasks of [`GRAIN`] elements side by side.
fn blocks(call: &Call<'_>, count: usize, body: impl Fn(usize, usize) + Sync + Send) {
    call.pieces(count, GRAIN, |start, end| {
        for at in (start..end).step_by(BLOCK) {
            body(at, BLOCK.min(end - at));
        }
    });
}
