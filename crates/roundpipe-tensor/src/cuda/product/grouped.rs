//! Products of groups of rows whose bounds are in device memory only.
//!
//! 16-bit types go through tensor cores, on Hopper by its own instructions (`hopper.rs`); wide ones
//! through the plain tile. The host does not know
//! the groups: the grid has room for as many tiles as any bounds can need, and a block without a
//! tile ends at once. Bounds that do not ascend from 0 within the rows raise the alarm; what they
//! ask for is cut to what exists.

use crate::cuda::call::{Args, Call, c_type, holds_two};
use crate::cuda::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::View;

use super::hopper;

const PLAIN_TEXT: &str = concat!(
    include_str!("../kernels/product_tile.cuh"),
    include_str!("../kernels/groups.cuh"),
    include_str!("../kernels/grouped.cu")
);
const MMA_TEXT: &str = concat!(
    include_str!("../kernels/groups.cuh"),
    include_str!("../kernels/grouped_mma.cu")
);

/// Rows and columns of a tile by tensor cores.
const SIDE: usize = 128;
/// A left and a right tile of 5120 elements of 2 bytes, which wait in shared memory together.
const STAGE_BYTES: u32 = 2 * 5120 * 2;

/// Stages: three where a processor holds two such blocks, so that one multiplies while the other
/// waits.
fn stages(shared_memory: usize) -> u32 {
    if holds_two(shared_memory, 3 * STAGE_BYTES) {
        3
    } else {
        2
    }
}

pub(super) fn units() -> Vec<Unit> {
    let wide = [DType::F32, DType::F64].into_iter();
    let mut units: Vec<Unit> = wide
        .flat_map(|t| [plain(t, t, "grouped"), plain(t, t, "grouped_grad")])
        .collect();
    for t in [DType::BF16, DType::F16] {
        for (out, stages, fast) in [
            (t, 3, true),
            (t, 2, true),
            (DType::F32, 3, true),
            (DType::F32, 2, false),
        ] {
            let made = |entry| mma(t, out, entry, stages, fast);
            units.extend([false, true].map(|by_depth| forward_unit(made("grouped_mma"), by_depth)));
            units.push(made("grouped_grad_mma"));
        }
    }
    units.extend(hopper::units());
    units
}

fn plain(src: DType, dst: DType, entry: &'static str) -> Unit {
    Unit::new("grouped", PLAIN_TEXT, entry)
        .with("IN", c_type(src))
        .with("OUT", c_type(dst))
}

fn mma(src: DType, dst: DType, entry: &'static str, stages: u32, fast: bool) -> Unit {
    Unit::new("grouped_mma", MMA_TEXT, entry)
        .with("OUT", c_type(dst))
        .with("HALF", u8::from(src == DType::F16))
        .with("STAGES", stages)
        .with("FAST", u8::from(fast))
}

fn forward_unit(unit: Unit, by_depth: bool) -> Unit {
    unit.with("FORWARD", 1)
        .with("RIGHT_BY_DEPTH", u8::from(by_depth))
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// The number of rows, which bounds of 32 bits must reach.
fn rows_of(call: &Call<'_>, x: &View) -> Result<i32> {
    let rows = x.shape()[0];
    i32::try_from(rows)
        .map_err(|_| Error::invalid(call.kernel.name(), format!("{rows} rows are too many")))
}

/// Strides as the kernels take them.
fn strides(view: &View) -> Vec<i64> {
    view.layout
        .strides()
        .iter()
        .map(|stride| *stride as i64)
        .collect()
}

/// An operand in 16-bit elements as lines: elements of a line side by side, and every line at 16
/// bytes.
fn is_fast(view: &View, step: i64, others: &[i64]) -> bool {
    step == 1 && view.ptr.is_multiple_of(16) && others.iter().all(|stride| stride % 8 == 0)
}

/// Whether elements 2i and 2i + 1 of every line can be written at once.
fn is_paired(view: &View, step: i64, others: &[i64]) -> bool {
    let pair = 2 * view.dtype.size() as u64;
    step == 1 && view.ptr.is_multiple_of(pair) && others.iter().all(|stride| stride % 2 == 0)
}

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn forward(call: &Call<'_>, accumulate: bool) -> Result<()> {
    let main = [call.src(0), call.src(1)];
    let beside = call.maybe_src(3).zip(call.maybe_src(4));
    let beside = beside.map(|(low, narrow)| [low, narrow]);
    if call.dst(0).numel() == 0 {
        return Ok(());
    }
    let plan = |[x, w]: [&View; 2]| hopper::GroupedPlan::of(call.gpu.capability, x, w, accumulate);
    // SAFETY: the launch contract; plans are of the operands that they are given.
    unsafe {
        match (plan(main), beside) {
            (Some(both), Some(pair)) if plan(pair) == Some(both) => {
                hopper::forward(call, both, main, beside)
            }
            _ => {
                product(call, main, accumulate)?;
                beside.map_or(Ok(()), |pair| product(call, pair, true))
            }
        }
    }
}

/// One pair of x and w.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
unsafe fn product(call: &Call<'_>, [x, w]: [&View; 2], accumulate: bool) -> Result<()> {
    let (offsets, y) = (call.src(2), call.dst(0));
    let (t, k, n, e) = (rows_of(call, x)?, x.shape()[1], y.shape()[1], w.shape()[0]);
    if let Some(plan) = hopper::GroupedPlan::of(call.gpu.capability, x, w, accumulate) {
        // SAFETY: the launch contract; the plan is of these operands.
        return unsafe { hopper::forward(call, plan, [x, w], None) };
    }
    let (sx, sw) = (strides(x), strides(w));
    let side = if is_narrow(x.dtype) {
        SIDE
    } else {
        super::TILE
    };
    let tiles = (t as usize / side + e + 1) * n.div_ceil(side);
    let grid = [super::fit(call, tiles)?, 1, 1];
    let (alarm, code) = (call.alarm.device, call.alarm.code(call.kernel.name()));
    if !is_narrow(x.dtype) {
        let args = Args::new().ptr(x.ptr).i64(sx[0]).i64(sx[1]);
        let args = args.ptr(w.ptr).i64(sw[0]).i64(sw[1]).i64(sw[2]);
        let args = args
            .ptr(offsets.ptr)
            .ptr(y.ptr)
            .i32(t)
            .i32(e as i32)
            .size(k)
            .size(n)
            .i32(i32::from(accumulate));
        let unit = plain(x.dtype, y.dtype, "grouped");
        // SAFETY: the arguments are the kernel's; operands have these shapes by contract; blocks
        // write their own tiles.
        return unsafe { call.launch(&unit, grid, [256, 1, 1], 0, &mut args.ptr(alarm).u32(code)) };
    }
    // Lines along the columns where they lie so, along the depth else.
    let by_depth = sw[2] != 1;
    let (line, step) = if by_depth {
        (sw[2], sw[1])
    } else {
        (sw[1], sw[2])
    };
    let fast = is_fast(x, sx[1], &sx[..1]) && is_fast(w, step, &[line, sw[0]]);
    let paired = i32::from(is_paired(y, 1, &[n as i64]));
    let args = Args::new()
        .ptr(x.ptr)
        .i64(sx[0])
        .i64(sx[1])
        .ptr(w.ptr)
        .i64(sw[0])
        .i64(line)
        .i64(step);
    let args = args
        .ptr(offsets.ptr)
        .ptr(y.ptr)
        .i32(t)
        .i32(e as i32)
        .size(k)
        .size(n)
        .i32(paired)
        .i32(i32::from(accumulate));
    let stages = stages(call.gpu.shared_memory);
    let unit = forward_unit(mma(x.dtype, y.dtype, "grouped_mma", stages, fast), by_depth);
    // SAFETY: as above.
    unsafe {
        call.launch(
            &unit,
            grid,
            [128, 1, 1],
            stages * STAGE_BYTES,
            &mut args.ptr(alarm).u32(code),
        )
    }
}

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn gradient(call: &Call<'_>, accumulate: bool) -> Result<()> {
    let (mut a, mut b, offsets, dw) = (call.src(0), call.src(1), call.src(2), call.dst(0));
    let (t, e) = (rows_of(call, a)?, dw.shape()[0]);
    if dw.numel() == 0 {
        return Ok(());
    }
    let sd = strides(dw);
    let (mut row, mut col) = (sd[1], sd[2]);
    // A result whose columns lie side by side is computed as dyᵀ x instead of xᵀ dy: lines are
    // written whole.
    if col != 1 && row == 1 {
        std::mem::swap(&mut a, &mut b);
        std::mem::swap(&mut row, &mut col);
    }
    let (m, n) = (a.shape()[1], b.shape()[1]);
    let (sa, sb) = (strides(a), strides(b));
    let side = if is_narrow(a.dtype) {
        SIDE
    } else {
        super::TILE
    };
    let tiles = e
        .saturating_mul(m.div_ceil(side))
        .saturating_mul(n.div_ceil(side));
    let grid = [super::fit(call, tiles)?, 1, 1];
    let (alarm, code) = (call.alarm.device, call.alarm.code(call.kernel.name()));
    let result = |args: Args| {
        let args = args
            .ptr(offsets.ptr)
            .ptr(dw.ptr)
            .i64(sd[0])
            .i64(row)
            .i64(col);
        args.i32(t)
            .i32(e as i32)
            .size(m)
            .size(n)
            .i32(i32::from(accumulate))
    };
    if !is_narrow(a.dtype) {
        let args = Args::new()
            .ptr(a.ptr)
            .i64(sa[0])
            .i64(sa[1])
            .ptr(b.ptr)
            .i64(sb[0])
            .i64(sb[1]);
        let unit = plain(a.dtype, dw.dtype, "grouped_grad");
        // SAFETY: the arguments are the kernel's; operands have these shapes by contract; blocks
        // write their own tiles.
        return unsafe {
            call.launch(
                &unit,
                grid,
                [256, 1, 1],
                0,
                &mut result(args).ptr(alarm).u32(code),
            )
        };
    }
    let fast = is_fast(a, sa[1], &sa[..1]) && is_fast(b, sb[1], &sb[..1]);
    let paired = i32::from(is_paired(dw, col, &[row, sd[0]]));
    let args = Args::new()
        .ptr(a.ptr)
        .i64(sa[0])
        .i64(sa[1])
        .ptr(b.ptr)
        .i64(sb[0])
        .i64(sb[1]);
    let args = result(args).i32(paired).ptr(alarm).u32(code);
    let stages = stages(call.gpu.shared_memory);
    let unit = mma(a.dtype, dw.dtype, "grouped_grad_mma", stages, fast);
    // SAFETY: as above.
    unsafe {
        call.launch(&unit, grid, [128, 1, 1], stages * STAGE_BYTES, &mut {
            args
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{STAGE_BYTES, stages};

    /// Three stages on cards of data centres, two where three of two blocks are more than a
    /// processor has.
    #[test]
    fn two_blocks_fit_every_card() {
        for (kib, count) in [(228, 3), (164, 3), (128, 3), (100, 2)] {
            assert_eq!(stages(kib << 10), count, "{kib} KiB");
            assert!(
                2 * (count * STAGE_BYTES + 1024) as usize <= kib << 10,
                "{kib} KiB"
            );
        }
    }
}
