//! Products of groups of rows by Hopper's own instructions: tiles that the copy engine brings
//! (TMA) and the tensor cores read from shared memory (wgmma).
//!
//! [`GroupedPlan::of`] says whether a product can go this way, by its types, widths and strides
//! alone, never by the number of rows: the sums differ in their last bits from those of the kernel
//! for all cards, and a row's result must not depend on how many rows there are.
//!
//! # Invariants
//! - Every address and stride that the copy engine gets is a multiple of 16 bytes.
//! - What the copy engine reads past the end of a tensor is 0, so no width need be a multiple of a
//!   tile's.

use crate::cuda::call::{Args, Call, c_type};
use crate::cuda::compile::Unit;
use crate::cuda::tensor_map::{LINE, TensorMap};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::View;

const TEXT: &str = concat!(
    include_str!("../kernels/hopper.cuh"),
    include_str!("../kernels/groups.cuh"),
    include_str!("../kernels/grouped_wgmma.cu")
);

/// Rows of a tile, and steps of the depth in one stage.
const TILE_ROWS: usize = 128;
const TILE_DEPTH: usize = 64;
/// Shared memory of a block that tiles may take; 228 KiB less what the driver and barriers take.
const TILE_BYTES: usize = 224 << 10;

/// How a product is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GroupedPlan {
    /// Columns of a tile.
    cols: usize,
    /// Whether lines of the matrices are along the depth.
    by_depth: bool,
    /// Whether the result is added to.
    adds: bool,
}

impl GroupedPlan {
    /// `None` where the kernel for all cards must do it: x [t, k] times w [e, k, n].
    pub(super) fn of(capability: (i32, i32), x: &View, w: &View, adds: bool) -> Option<Self> {
        let is_narrow = matches!(x.dtype, DType::BF16 | DType::F16);
        if capability != (9, 0) || !is_narrow {
            return None;
        }
        let (k, n) = (w.shape()[1], w.shape()[2]);
        let fits = |size: usize| i32::try_from(size).is_ok();
        if k == 0 || !fits(k) || !fits(n) {
            return None;
        }
        let (sx, sw) = (x.layout.strides(), w.layout.strides());
        let by_depth = sw[1] == 1;
        let line = match (by_depth, sw[2] == 1) {
            (true, _) => sw[2],
            (false, true) => sw[1],
            (false, false) => return None,
        };
        let is_even = |view: &View, strides: &[isize]| {
            let steps = strides.iter().all(|stride| *stride > 0 && stride % 8 == 0);
            steps && view.ptr.is_multiple_of(16)
        };
        if sx[1] != 1 || !is_even(x, &sx[..1]) || !is_even(w, &[line, sw[0]]) {
            return None;
        }
        let cols = match n {
            0..=64 => 64,
            65..=128 => 128,
            _ => 256,
        };
        Some(Self {
            cols,
            by_depth,
            adds,
        })
    }

    fn stage_bytes(&self) -> usize {
        (TILE_ROWS + self.cols) * TILE_DEPTH * 2
    }

    fn stages(&self) -> usize {
        // Room for the first tile to begin at a multiple of 1024 bytes.
        ((TILE_BYTES - 1024) / self.stage_bytes()).min(8)
    }

    fn unit(&self, src: DType, dst: DType) -> Unit {
        Unit::new("grouped_wgmma", TEXT, "grouped_wgmma")
            .with("OUT", c_type(dst))
            .with("ADDS", u8::from(self.adds))
            .with("HALF", u8::from(src == DType::F16))
            .with("BN", self.cols)
            .with("STAGES", self.stages())
            .with("RIGHT_BY_DEPTH", u8::from(self.by_depth))
            .for_hopper()
    }
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for cols in [64, 128, 256] {
        for (by_depth, adds) in [(false, false), (true, false), (false, true), (true, true)] {
            let plan = GroupedPlan {
                cols,
                by_depth,
                adds,
            };
            let types = [DType::BF16, DType::F16];
            units.extend(types.map(|dtype| plan.unit(dtype, dtype)));
        }
    }
    units
}

/// The product of `main`, and of `beside` on top of it.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); `plan` is of both pairs of operands.
pub(super) unsafe fn forward(
    call: &Call<'_>,
    plan: GroupedPlan,
    main: [&View; 2],
    beside: Option<[&View; 2]>,
) -> Result<()> {
    let ([x, w], offsets, y) = (main, call.src(2), call.dst(0));
    let (t, n, e) = (x.shape()[0], y.shape()[1], w.shape()[0]);
    let main_maps = PairMaps::new(call, &plan, main)?;
    // Without a second pair its depth is 0, and no copy of it is ordered.
    let beside_maps = PairMaps::new(call, &plan, beside.unwrap_or(main))?;
    let depth = |[x, _]: [&View; 2]| x.shape()[1] as i32;
    let whole = y.ptr.is_multiple_of(16) && n.is_multiple_of(8);
    let tiles = (t / TILE_ROWS + e + 1).saturating_mul(n.div_ceil(plan.cols));
    let grid = [super::fit(call, tiles.min(call.gpu.processors()?))?, 1, 1];
    let args = beside_maps.pass(main_maps.pass(Args::new()));
    let args = args.ptr(offsets.ptr).ptr(y.ptr).i32(t as i32).i32(e as i32);
    let args = args.i32(depth(main)).i32(beside.map_or(0, depth));
    let args = args.size(n).i32(i32::from(whole));
    let (alarm, code) = (call.alarm.device, call.alarm.code(call.kernel.name()));
    let shared = (plan.stages() * plan.stage_bytes() + 1024) as u32;
    let unit = plan.unit(x.dtype, y.dtype);
    // SAFETY: the arguments are the kernel's; the maps say how far the operands reach; blocks write
    // their own tiles.
    unsafe {
        call.launch(
            &unit,
            grid,
            [384, 1, 1],
            shared,
            &mut args.ptr(alarm).u32(code),
        )
    }
}

/// Rows and matrices of one product, as the copy engine sees them.
struct PairMaps {
    rows: TensorMap,
    matrices: TensorMap,
}

impl PairMaps {
    fn new(call: &Call<'_>, plan: &GroupedPlan, [x, w]: [&View; 2]) -> Result<Self> {
        let ([t, k], [e, n]) = ([x.shape()[0], x.shape()[1]], [w.shape()[0], w.shape()[2]]);
        let (sx, sw) = (x.layout.strides(), w.layout.strides());
        let rows = TensorMap::new(call, x, &[k, t], &[sx[0]], &[LINE, TILE_ROWS])?;
        let matrices = if plan.by_depth {
            TensorMap::new(call, w, &[k, n, e], &[sw[2], sw[0]], &[LINE, plan.cols, 1])?
        } else {
            TensorMap::new(call, w, &[n, k, e], &[sw[1], sw[0]], &[LINE, TILE_DEPTH, 1])?
        };
        Ok(Self { rows, matrices })
    }

    fn pass(&self, args: Args) -> Args {
        args.words(&self.rows.0).words(&self.matrices.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{GroupedPlan, TILE_BYTES};

    /// A block's stages fit its shared memory, and there are enough to keep copies ahead.
    #[test]
    fn stages_fit() {
        for cols in [64, 128, 256] {
            let plan = GroupedPlan {
                cols,
                by_depth: true,
                adds: false,
            };
            assert!(plan.stages() >= 4, "{cols} columns");
            let bytes = plan.stages() * plan.stage_bytes() + 1024;
            assert!(bytes <= TILE_BYTES, "{cols} columns: {bytes} bytes");
        }
    }
}
