//! Our kernels for Hopper: tiles that the copy engine brings (TMA) and the tensor cores read from
//! shared memory (wgmma).
//!
//! [`HopperHeads::of`] says whether operands can go this way, by the card, types, widths and
//! strides alone, never by lengths: sums differ in their last bits from those of the kernels for
//! all cards, and a row's result must not depend on what it is packed with.

use super::native::{KernelProblem, aligned};
use crate::cuda::call::{Args, Call, c_type};
use crate::cuda::compile::Unit;
use crate::cuda::tensor_map::{LINE, TensorMap};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::View;

const TEXT: &str = concat!(
    include_str!("../kernels/attention.cuh"),
    include_str!("../kernels/attention_half.cuh"),
    include_str!("../kernels/hopper.cuh"),
    include_str!("../kernels/attention_tiles.cuh"),
    include_str!("../kernels/attention_wgmma.cu")
);

/// Rows of a block: queries, or keys in dk and dv.
const ROWS: usize = 128;
/// Threads of a block: two warpgroups that multiply and one that orders copies.
pub(super) const THREADS: u32 = 384;

/// The kernels of attention_wgmma.cu.
#[derive(Debug, Clone, Copy, PartialEq)]
enum HopperKernel {
    Forward,
    Dq,
    Dkv,
}

/// Heads that these kernels take: as wide as their values, 64 or 128.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct HopperHeads {
    dtype: DType,
    width: usize,
}

impl HopperKernel {
    const ALL: [Self; 3] = [Self::Forward, Self::Dq, Self::Dkv];

    fn entry(self) -> &'static str {
        match self {
            Self::Forward => "attention_wgmma_forward",
            Self::Dq => "attention_wgmma_dq",
            Self::Dkv => "attention_wgmma_dkv",
        }
    }

    /// Rows of the other side that come together: as many as registers hold scores of.
    fn columns(self) -> usize {
        match self {
            Self::Forward | Self::Dq => 128,
            Self::Dkv => 64,
        }
    }

    /// Tiles of the other side that shared memory holds.
    fn stages(self, width: usize) -> usize {
        match (self, width) {
            (Self::Forward | Self::Dq, 128) => 2,
            _ => 4,
        }
    }
}

impl HopperHeads {
    /// `None` where other kernels must do it. `read` are the operands that the copy engine brings,
    /// `written` those that are written 16 bytes at a time.
    pub(super) fn of(
        capability: (i32, i32),
        p: &KernelProblem,
        read: &[&View],
        written: &[&View],
    ) -> Option<Self> {
        let (dtype, width) = (read[0].dtype, p.width);
        let is_half = matches!(dtype, DType::BF16 | DType::F16);
        let is_wide = matches!(width, 64 | 128) && p.value_width == width;
        let is_small = p.queries < 1 << 30 && p.keys < 1 << 30;
        let fits = capability == (9, 0)
            && is_half
            && is_wide
            && is_small
            && read.iter().all(|view| is_describable(view))
            && written.iter().all(|view| aligned(view));
        fits.then_some(Self { dtype, width })
    }

    fn unit(self, kernel: HopperKernel) -> Unit {
        Unit::new("attention_wgmma", TEXT, kernel.entry())
            .with("TYPE", c_type(self.dtype))
            .with("HALF", self.dtype == DType::F16)
            .with("PART", kernel as u32)
            .with("D", self.width)
            .with("COLS", kernel.columns())
            .with("STAGES", kernel.stages(self.width))
            .for_hopper()
    }

    /// Shared memory: twice the block's own rows (the queries of this work and the next; in the
    /// backward those of two operands), two tiles per stage, and room to begin at a multiple of
    /// 1024 bytes.
    fn shared(self, kernel: HopperKernel) -> u32 {
        let passing = 2 * kernel.stages(self.width) * kernel.columns();
        ((2 * ROWS + passing) * self.width * 2 + 1024) as u32
    }
}

/// Whether the copy engine can be told how the view lies: rows of 16 bytes at positive distances.
fn is_describable(view: &View) -> bool {
    let rows = view.shape().iter().zip(view.layout.strides()).take(3);
    let are_ahead = rows.into_iter().all(|(n, stride)| *n <= 1 || *stride > 0);
    aligned(view) && are_ahead && view.numel() > 0
}

/// A view `[batch, rows, heads, width]` of which `rows` rows of one head come at a time, a line's
/// width of columns each.
fn heads_map(call: &Call<'_>, view: &View, rows: usize) -> Result<TensorMap> {
    let dims = view.shape();
    let width = dims[3] as isize;
    // The distance between things of which there is one may be anything.
    let stride = |axis: usize| match dims[axis] {
        1 => width,
        _ => view.layout.strides()[axis],
    };
    TensorMap::new(
        call,
        view,
        &[dims[3], dims[1], dims[2], dims[0]],
        &[stride(1), stride(2), stride(0)],
        &[LINE, rows, 1, 1],
    )
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for width in [64, 128] {
            let heads = HopperHeads { dtype, width };
            units.extend(HopperKernel::ALL.map(|kernel| heads.unit(kernel)));
        }
    }
    units
}

/// # Safety
/// As [`super::run`]; `heads` is of these operands.
pub(super) unsafe fn forward(call: &Call<'_>, p: &KernelProblem, heads: HopperHeads) -> Result<()> {
    let kernel = HopperKernel::Forward;
    let (q, k, v, o) = (call.src(0), call.src(1), call.src(2), call.dst(0));
    let slots = p.slots(p.queries, ROWS);
    let mut args = Args::new()
        .words(&heads_map(call, q, ROWS)?.0)
        .words(&heads_map(call, k, kernel.columns())?.0)
        .words(&heads_map(call, v, kernel.columns())?.0)
        .words(&p.words())
        .maybe(call.maybe_src(3))
        .view(o)
        .ptr(call.dst(1).ptr)
        .size(slots)
        .ptr(call.alarm.device)
        .u32(call.alarm.code(call.kernel.name()));
    let [works, ..] = p.grid(slots, p.heads, 1);
    let blocks = works.min(call.gpu.processors()? as u32);
    // SAFETY: the arguments are the kernel's parameters; the maps say how far the operands reach,
    // which are the caller's promise.
    unsafe {
        call.launch(
            &heads.unit(kernel),
            [blocks, 1, 1],
            [THREADS, 1, 1],
            heads.shared(kernel),
            &mut args,
        )
    }
}

/// dq, then dk and dv.
///
/// # Safety
/// As [`super::run`]; `heads` is of these operands, and `delta` holds the row sums.
pub(super) unsafe fn products(
    call: &Call<'_>,
    p: &KernelProblem,
    heads: HopperHeads,
    delta: u64,
) -> Result<()> {
    let (dq, dk, dv) = (call.dst(0), call.dst(1), call.dst(2));
    let query_slots = p.slots(p.queries, ROWS);
    let key_slots = p.slots(p.keys, ROWS);
    // SAFETY: the arguments are the kernels' parameters; the maps say how far the operands reach,
    // which are the caller's promise.
    unsafe {
        let mut args = gradient_args(call, p, (ROWS, HopperKernel::Dq.columns()), delta)?
            .view(dq)
            .size(query_slots);
        call.launch(
            &heads.unit(HopperKernel::Dq),
            p.grid(query_slots, p.heads, 1),
            [THREADS, 1, 1],
            heads.shared(HopperKernel::Dq),
            &mut args,
        )?;
        let mut args = gradient_args(call, p, (HopperKernel::Dkv.columns(), ROWS), delta)?
            .view(dk)
            .view(dv)
            .size(key_slots);
        call.launch(
            &heads.unit(HopperKernel::Dkv),
            p.grid(key_slots, p.key_heads, 1),
            [THREADS, 1, 1],
            heads.shared(HopperKernel::Dkv),
            &mut args,
        )
    }
}

/// What kernels of the backward begin with: q, k, v, do as the copy engine sees them, so many
/// queries and keys at a time, the problem, the statistics and the row sums.
pub(super) fn gradient_args(
    call: &Call<'_>,
    p: &KernelProblem,
    (by_query, by_key): (usize, usize),
    delta: u64,
) -> Result<Args> {
    let args = Args::new()
        .words(&heads_map(call, call.src(0), by_query)?.0)
        .words(&heads_map(call, call.src(1), by_key)?.0)
        .words(&heads_map(call, call.src(2), by_key)?.0)
        .words(&heads_map(call, call.src(5), by_query)?.0)
        .words(&p.words())
        .ptr(call.src(4).ptr)
        .ptr(delta);
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::{HopperHeads, HopperKernel};
    use crate::dtype::DType;

    /// A block's tiles, barriers and statistics fit the 227 KiB that Hopper gives it.
    #[test]
    fn tiles_fit() {
        for width in [64, 128] {
            let heads = HopperHeads {
                dtype: DType::BF16,
                width,
            };
            for kernel in HopperKernel::ALL {
                let bytes = heads.shared(kernel);
                assert!(bytes + 4096 <= 227 << 10, "{kernel:?}, {width}: {bytes}");
            }
        }
    }
}
