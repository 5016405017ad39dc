//! Elementwise kernels: fills, copies, arithmetic, comparisons, random numbers.
//!
//! Every kernel walks its destination in row-major order in blocks of [`BLOCK`] elements. An
//! operand's block is borrowed where it lies side by side in memory in the type of the arithmetic
//! (its *stage*: f64, f32 for the narrower floats, i64 for integers and bool); otherwise it is
//! gathered and widened into a buffer that stays in the first-level cache. So the functions are
//! compiled once per stage, not once per element type and stride pattern.
//!
//! Integer arithmetic wraps. Integer division truncates; dividing by zero gives 0 (an asynchronous
//! device could not return the error from the call).

mod binary;
mod choose;
mod copy;
pub(crate) mod random;
mod stage;
mod unary;
mod walk;

use std::cell::RefCell;

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

/// A type of at most 8 bytes and alignment for which any bits are a value.
///
/// # Safety
/// Exactly that.
unsafe trait Plain: Copy + Default {}

macro_rules! plain {
    ($($t:ty),*) => {$(
        // SAFETY: a primitive number of at most 8 bytes.
        unsafe impl Plain for $t {}
    )*};
}

plain!(f64, f32, i64, u64, u32, u16, u8);

/// Room for three blocks.
type Room = [[u64; BLOCK]; 3];

thread_local! {
    /// Kept between calls, because clearing it would cost as much as the work.
    static ROOM: RefCell<Room> = const { RefCell::new([[0; BLOCK]; 3]) };
}

/// Runs `body(buffers, start, len)` over `0..count` in blocks, tasks of [`GRAIN`] elements side by
/// side. The buffers hold whatever was there before.
fn blocks<T: Plain>(
    call: &Call<'_>,
    count: usize,
    body: impl Fn([&mut [T; BLOCK]; 3], usize, usize) + Sync + Send,
) {
    call.pieces(count, GRAIN, |start, end| {
        ROOM.with_borrow_mut(|room| {
            for at in (start..end).step_by(BLOCK) {
                // SAFETY: a block of u64 holds as many `T`, which are no larger nor more aligned
                // and may have any bits (`Plain`); the cast keeps the borrow of the room, and each
                // buffer comes from a block of its own.
                let buffers = room
                    .each_mut()
                    .map(|block| unsafe { &mut *std::ptr::from_mut(block).cast::<[T; BLOCK]>() });
                body(buffers, at, BLOCK.min(end - at));
            }
        });
    });
}
