//! The exact backward in one pass on Hopper: dq, dk and dv from one reading of the scores.
//!
//! Taken: what cuDNN takes ([`FusedAttention`]) where it is causal, heads are 128 wide and the order
//! of sums counts. cuDNN's way to repeat bit for bit keeps two bytes for every pair of a query and a
//! key; here dq is summed in f32, in the order of keys, by blocks that wait for each other
//! (attention_wgmma_backward.cu).
//!
//! # Invariants
//! - What is taken depends on the card, types, sizes and strides alone; scratch on sizes.
//! - Sums are added in the order of keys, whatever runs when.

use super::fused::FusedAttention;
use super::hopper::{self, HopperHeads};
use super::native::{self, KernelProblem};
use crate::cuda::call::{Args, Call, c_type};
use crate::cuda::compile::Unit;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{AttentionSpec, View};

const TEXT: &str = concat!(
    include_str!("../kernels/attention.cuh"),
    include_str!("../kernels/attention_half.cuh"),
    include_str!("../kernels/hopper.cuh"),
    include_str!("../kernels/attention_tiles.cuh"),
    include_str!("../kernels/attention_wgmma_backward.cu")
);

/// Keys of a block.
const KEYS: usize = 128;
/// Queries of a tile.
const QUERIES: usize = 64;
/// The width of a head.
const WIDTH: usize = 128;
/// Tiles of queries that shared memory holds.
const STAGES: usize = 2;
/// Everything in scratch begins at a multiple of this.
const ALIGN: usize = 256;

/// Kernels of the pass.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PassKernel {
    /// dk, dv and the sums of dq.
    Gradients,
    /// dq from its sums.
    DqSums,
}

impl PassKernel {
    fn unit(self, dtype: DType) -> Unit {
        let entry = match self {
            Self::Gradients => "attention_wgmma_backward",
            Self::DqSums => "attention_wgmma_dq_sums",
        };
        Unit::new("attention_wgmma_backward", TEXT, entry)
            .with("TYPE", c_type(dtype))
            .with("HALF", dtype == DType::F16)
            .with("PART", self as u32)
            .with("D", WIDTH)
            .with("COLS", QUERIES)
            .with("STAGES", STAGES)
            .for_hopper()
    }
}

/// Shared memory: the keys and values of a block, tiles of queries and their gradients, two tiles of
/// the scores' gradients, a tile's part of dq, and room to begin at a multiple of 1024 bytes.
const SHARED: u32 = (2 * (2 * KEYS + 2 * STAGES * QUERIES) * WIDTH
    + 4 * KEYS * QUERIES
    + 4 * QUERIES * WIDTH
    + 1024) as u32;

// Tiles, barriers and statistics fit the 227 KiB that Hopper gives a block.
const _: () = assert!(SHARED + 4096 <= 227 << 10);

/// Where things lie in scratch, behind the row sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassScratch {
    /// Sums of dq.
    sums: usize,
    /// A ticket, then the number of blocks that have added to each tile of queries.
    counters: usize,
    counter_bytes: usize,
    pub bytes: usize,
}

impl PassScratch {
    /// For a call that cuDNN takes; `None` where the pass does not, on any card.
    pub fn of(fused: &FusedAttention, spec: &AttentionSpec, q: &View) -> Option<Self> {
        let rows = fused.causal_rows(WIDTH).filter(|_| !spec.any_order)?;
        let sums = native::delta_bytes(q).next_multiple_of(ALIGN);
        let counters = sums + rows * WIDTH * 4;
        let counter_bytes = 4 * (1 + rows / QUERIES);
        Some(Self {
            sums,
            counters,
            counter_bytes,
            bytes: counters + counter_bytes,
        })
    }
}

/// Every variant that models use.
pub(super) fn units() -> Vec<Unit> {
    let kernels = [PassKernel::Gradients, PassKernel::DqSums];
    let of = |dtype| kernels.map(|kernel| kernel.unit(dtype));
    [DType::BF16, DType::F16].into_iter().flat_map(of).collect()
}

/// Computes the gradients of a call that cuDNN takes; false where the pass does not take it.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn run(
    call: &Call<'_>,
    spec: &AttentionSpec,
    fused: &FusedAttention,
) -> Result<bool> {
    let (q, k, v, d_o) = (call.src(0), call.src(1), call.src(2), call.src(5));
    let (dq, dk, dv) = (call.dst(0), call.dst(1), call.dst(2));
    let p = KernelProblem::new(call, spec, 7);
    let heads = HopperHeads::of(call.gpu.capability, &p, &[q, k, v, d_o], &[dq, dk, dv]);
    let Some(scratch) = PassScratch::of(fused, spec, q).filter(|_| heads.is_some()) else {
        return Ok(false);
    };
    let delta = call.scratch_ptr();
    let sums = delta + scratch.sums as u64;
    let counters = delta + scratch.counters as u64;
    // SAFETY: the counters lie in scratch, behind whatever used that before on this stream.
    let zeroed = unsafe {
        let bytes = scratch.counter_bytes;
        cudarc::driver::result::memset_d8_async(counters, 0, bytes, call.stream)
    };
    zeroed.map_err(|e| call.gpu.failed("zero counters", e))?;
    let mut gradient_args = hopper::gradient_args(call, &p, (QUERIES, KEYS), delta)?
        .view(dk)
        .view(dv)
        .ptr(sums)
        .ptr(counters);
    let mut dq_args = Args::new().words(&p.words()).ptr(sums).view(dq);
    // SAFETY: the arguments are the kernels' parameters; the maps say how far the operands reach,
    // which are the caller's promise; scratch holds what `PassScratch` asked for.
    unsafe {
        native::row_sums(call, &p)?;
        call.launch(
            &PassKernel::Gradients.unit(q.dtype),
            p.grid(p.keys / KEYS, p.key_heads, 1),
            [hopper::THREADS, 1, 1],
            SHARED,
            &mut gradient_args,
        )?;
        call.launch(
            &PassKernel::DqSums.unit(q.dtype),
            p.grid(p.queries / QUERIES, p.heads, 1),
            [256, 1, 1],
            0,
            &mut dq_args,
        )?;
    }
    Ok(true)
}
