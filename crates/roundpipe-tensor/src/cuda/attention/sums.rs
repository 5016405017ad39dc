//! Sums of gradients over pieces: a part in the operands' type is added to a sum in f32, which is
//! rounded once, with the last part.

use super::cut::SumTurn;
use crate::cuda::call::{Args, Call, c_type};
use crate::cuda::compile::Unit;
use crate::dtype::DType;
use crate::error::Result;

const TEXT: &str = include_str!("../kernels/attention_add.cu");
const THREADS: usize = 256;
/// Elements that a thread adds: 16 bytes of a part.
const PACK: usize = 8;

/// One part that joins its sum. Part and sum lie densely as `[rows, heads, width]`, the gradient at
/// strides.
pub(super) struct Addition {
    pub dtype: DType,
    pub part: u64,
    pub sum: u64,
    pub out: u64,
    pub rows: usize,
    pub heads: usize,
    /// A multiple of 8, as are the strides.
    pub width: usize,
    pub row_stride: i64,
    pub head_stride: i64,
    pub turn: SumTurn,
}

impl Addition {
    /// Queues the addition.
    ///
    /// # Safety
    /// The addresses are memory of these sizes, aligned to 16 bytes, which work queued before has
    /// filled.
    pub unsafe fn launch(&self, call: &Call<'_>) -> Result<()> {
        let packs = self.rows * self.heads * self.width / PACK;
        let mut args = Args::new()
            .ptr(self.part)
            .ptr(self.sum)
            .ptr(self.out)
            .u32(packs as u32)
            .u32(self.heads as u32)
            .u32((self.width / PACK) as u32)
            .i64(self.row_stride)
            .i64(self.head_stride)
            .i32(i32::from(self.turn.first))
            .i32(i32::from(self.turn.last));
        let grid = [packs.div_ceil(THREADS) as u32, 1, 1];
        // SAFETY: the arguments are the kernel's parameters; the memory is the caller's promise.
        unsafe {
            call.launch(
                &unit(self.dtype),
                grid,
                [THREADS as u32, 1, 1],
                0,
                &mut args,
            )
        }
    }
}

fn unit(dtype: DType) -> Unit {
    Unit::new("attention_add", TEXT, "attention_add").with("TYPE", c_type(dtype))
}

/// Every variant that models use.
pub(super) fn units() -> Vec<Unit> {
    [DType::BF16, DType::F16].map(unit).into()
}
