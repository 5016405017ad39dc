//! Norms: of rows (RMS norm, layer norm; `norm_rows.cu`) and of planes (group norm, batch norm;
//! `norm_planes.cu`).
//!
//! Gradients of weights are sums over rows: blocks leave partial sums in scratch memory, a second
//! kernel adds them up (`sum_chunks.cu`). How rows are cut depends on the sizes alone, so the sums
//! have one order on every GPU.
//!
//! Rows are read 16 bytes at a time where their addresses and lengths allow, else element by
//! element; a thread then meets other elements, so an odd address may change the last bits of a
//! sum.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

const ROWS: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/norm_rows.cu")
);
const PLANES: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/norm_planes.cu")
);

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    if i32::try_from(extent(call.src(0)).1).is_err() {
        let what = format!("rows of {} are too long", call.src(0).shape());
        return Err(Error::invalid(call.kernel.name(), what));
    }
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match *call.kernel {
            Kernel::RmsNorm { eps } | Kernel::LayerNorm { eps } => rows(call, eps),
            Kernel::RmsNormGrad { accumulate } | Kernel::LayerNormGrad { accumulate } => {
                rows_grad(call, accumulate)
            }
            Kernel::GroupNorm { groups, eps } => {
                planes(call, &Planes::by_group(call.src(0), groups), eps)
            }
            Kernel::BatchNorm { eps } => planes(call, &Planes::by_channel(call.src(0)), eps),
            Kernel::GroupNormGrad { groups, accumulate } => planes_grad(
                call,
                &Planes::by_group(call.src(0), groups),
                true,
                accumulate,
            ),
            Kernel::BatchNormGrad {
                batch_stats,
                accumulate,
            } => planes_grad(
                call,
                &Planes::by_channel(call.src(0)),
                batch_stats,
                accumulate,
            ),
            _ => Err(Error::invalid(call.kernel.name(), "is no norm")),
        }
    }
}

/// Scratch bytes of this family's kernels.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let Some(Some(x)) = src.first() else { return 0 };
    let wanted = |i: usize| usize::from(dst.get(i).is_some_and(Option::is_some));
    let elements = match *kernel {
        Kernel::RmsNormGrad { .. } => partial(x) * wanted(1),
        Kernel::LayerNormGrad { .. } => partial(x) * (wanted(1) + wanted(2)),
        Kernel::GroupNorm { .. } => 2 * Planes::by_channel(x).count,
        // Given statistics need no sums.
        Kernel::BatchNorm { .. } => match src.get(3).is_some_and(Option::is_some) {
            true => 0,
            false => 2 * Planes::by_channel(x).count,
        },
        Kernel::GroupNormGrad { groups, .. } => Planes::by_group(x, groups).gradient_scratch(),
        Kernel::BatchNormGrad { .. } => Planes::by_channel(x).gradient_scratch(),
        _ => 0,
    };
    elements * x.dtype.accumulator().size()
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = vec![sum_chunks_unit(DType::F32), sum_chunks_unit(DType::F64)];
    for dtype in FLOATS {
        for wide in [false, true] {
            for center in [false, true] {
                units.extend(
                    ["norm_rows", "norm_rows_grad"]
                        .map(|entry| row_unit(entry, dtype, center, wide)),
                );
            }
            let mapped = ["plane_moments", "plane_apply", "plane_sums", "plane_grad"];
            units.extend(mapped.map(|entry| plane_unit(entry, dtype, wide)));
        }
        let joined = ["join_moments", "join_sums", "given_moments"];
        units.extend(joined.map(|entry| plane_unit(entry, dtype, false)));
    }
    units
}

fn row_unit(entry: &'static str, dtype: DType, center: bool, wide: bool) -> Unit {
    let unit = Unit::new("norm_rows", ROWS, entry).with("ELEMENT", c_type(dtype));
    unit.with("CENTER", u8::from(center))
        .with("WIDE", u8::from(wide))
}

fn plane_unit(entry: &'static str, dtype: DType, wide: bool) -> Unit {
    Unit::new("norm_planes", PLANES, entry)
        .with("ELEMENT", c_type(dtype))
        .with("WIDE", u8::from(wide))
}

fn sum_chunks_unit(acc: DType) -> Unit {
    Unit::new(
        "sum_chunks",
        include_str!("kernels/sum_chunks.cu"),
        "sum_chunks",
    )
    .with("SUM", c_type(acc))
}

/// Elements of a type in 16 bytes.
pub(super) fn piece(dtype: DType) -> usize {
    16 / dtype.size()
}

/// Whether rows of `cols` elements that begin at these operands can be read 16 bytes at a time.
pub(super) fn wide<'a>(cols: usize, views: impl IntoIterator<Item = Option<&'a View>>) -> bool {
    views
        .into_iter()
        .flatten()
        .all(|v| v.ptr.is_multiple_of(16) && cols.is_multiple_of(piece(v.dtype)))
}

/// Threads of a row and rows of a block, for rows of `pieces` pieces of which a thread holds
/// `held`.
fn block_of(pieces: usize, held: usize) -> [u32; 3] {
    match pieces.div_ceil(held) {
        0..=32 => [32, 8, 1],
        threads => [threads.next_multiple_of(32).min(1024) as u32, 1, 1],
    }
}

/// How sums over rows are cut: `count` blocks of `per` rows, the last may be shorter.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowSplit {
    pub per: usize,
    pub count: usize,
}

impl RowSplit {
    /// Enough blocks to fill a GPU, few enough that partial sums stay small beside the rows.
    pub fn new(rows: usize, cols: usize) -> Self {
        let most = ((2 << 20) / cols.max(1)).clamp(256, 1024);
        let per = rows.div_ceil(most).max(8);
        Self {
            per,
            count: rows.div_ceil(per),
        }
    }
}

/// Rows and columns of the last dimension.
pub(super) fn extent(x: &View) -> (usize, usize) {
    let dims = x.shape().dims();
    let (cols, rest) = dims.split_last().unwrap_or((&1, &[]));
    (rest.iter().product(), *cols)
}

/// Elements of one operand's partial sums.
pub(super) fn partial(x: &View) -> usize {
    let (rows, cols) = extent(x);
    RowSplit::new(rows, cols).count * cols
}

/// Adds partial sums `[chunks, out]` at `partial` into `out`.
///
/// # Safety
/// The partial sums are in out's type and live until the lane has passed this.
pub(super) unsafe fn sum_chunks(
    call: &Call<'_>,
    partial: u64,
    chunks: usize,
    out: &View,
    accumulate: bool,
) -> Result<()> {
    let cols = out.numel();
    let args = Args::new()
        .ptr(partial)
        .ptr(out.ptr)
        .size(chunks)
        .size(cols)
        .i32(accumulate.into());
    let grid = [cols.div_ceil(32) as u32, 1, 1];
    // SAFETY: the arguments are those of `sum_chunks`; the memory is the caller's promise.
    unsafe {
        call.launch(&sum_chunks_unit(out.dtype), grid, [32, 32, 1], 0, &mut {
            args
        })
    }
}

/// [`Kernel::RmsNorm`] and [`Kernel::LayerNorm`].
///
/// # Safety
/// As [`run`].
unsafe fn rows(call: &Call<'_>, eps: f64) -> Result<()> {
    let center = matches!(call.kernel, Kernel::LayerNorm { .. });
    let x = call.src(0);
    let (rows, cols) = extent(x);
    // RMS norm: x, w, residual to y, rstd, sum. Layer norm: x, w, b to y, mean, rstd.
    let (w, third, y) = (call.maybe_src(1), call.maybe_src(2), call.dst(0));
    let (b, residual) = if center { (third, None) } else { (None, third) };
    let (mean, rstd) = if center {
        (Some(call.dst(1)), call.dst(2))
    } else {
        (None, call.dst(1))
    };
    let sum = residual.map(|_| call.dst(2));
    let wide = wide(cols, [Some(x), w, third, Some(y), sum]);
    let block = block_of(if wide { cols / piece(x.dtype) } else { cols }, 2);
    let args = Args::new().ptr(x.ptr).maybe(w).maybe(b).maybe(residual);
    let args = args
        .ptr(y.ptr)
        .maybe(mean)
        .ptr(rstd.ptr)
        .maybe(sum)
        .size(rows)
        .size(cols)
        .f64(eps);
    let grid = [rows.div_ceil(block[1] as usize) as u32, 1, 1];
    let unit = row_unit("norm_rows", x.dtype, center, wide);
    // SAFETY: the arguments are those of `norm_rows`; operands are dense, of the types the contract
    // says.
    unsafe { call.launch(&unit, grid, block, 0, &mut { args }) }
}

/// [`Kernel::RmsNormGrad`] and [`Kernel::LayerNormGrad`].
///
/// # Safety
/// As [`run`].
unsafe fn rows_grad(call: &Call<'_>, accumulate: bool) -> Result<()> {
    let center = matches!(call.kernel, Kernel::LayerNormGrad { .. });
    let (x, w) = (call.src(0), call.maybe_src(1));
    let (rows, cols) = extent(x);
    // RMS norm: x, w, rstd, dy, dsum. Layer norm: x, w, mean, rstd, dy.
    let (mean, rstd, dy, dsum) = match center {
        true => (Some(call.src(2)), call.src(3), call.src(4), None),
        false => (None, call.src(2), call.src(3), call.maybe_src(4)),
    };
    let (dx, dw) = (call.maybe_dst(0), call.maybe_dst(1));
    let db = call.maybe_dst(2).filter(|_| center);
    let wide = wide(cols, [Some(x), w, Some(dy), dsum, dx]);
    let block = block_of(if wide { cols / piece(x.dtype) } else { cols }, 1);
    let cut = RowSplit::new(rows, cols);
    let bytes = x.dtype.accumulator().size();
    let (for_w, for_b) = (
        call.scratch_ptr(),
        call.scratch_ptr() + dw.map_or(0, |_| partial(x) * bytes) as u64,
    );
    let (partial_w, partial_b) = (dw.map_or(0, |_| for_w), db.map_or(0, |_| for_b));
    let args = Args::new()
        .ptr(x.ptr)
        .maybe(w)
        .maybe(mean)
        .ptr(rstd.ptr)
        .ptr(dy.ptr)
        .maybe(dsum)
        .maybe(dx);
    // Rows on their way to the threads: as many as the smallest shared memory holds for the longest
    // rows.
    let (operands, ahead) = if dsum.is_some() { (3, 1) } else { (2, 2) };
    let args = args
        .ptr(partial_w)
        .ptr(partial_b)
        .size(rows)
        .size(cols)
        .size(cut.per)
        .i32(ahead);
    let unit_bytes = if wide { 16 } else { x.dtype.size() };
    let ring = (block[0] * block[1]) as usize * unit_bytes * operands * (ahead as usize + 1);
    // Warps of one block join their sums in the same memory, afterwards.
    let room = ring.max(if block[1] > 1 {
        block[1] as usize * cols * bytes
    } else {
        0
    });
    let unit = row_unit("norm_rows_grad", x.dtype, center, wide);
    let grid = [cut.count as u32, 1, 1];
    // SAFETY: the arguments are those of `norm_rows_grad`; operands are dense, of the types the
    // contract says; `scratch` asked for the partial sums.
    unsafe { call.launch(&unit, grid, block, room as u32, &mut { args }) }?;
    for (out, partial) in [(dw, partial_w), (db, partial_b)] {
        if let Some(out) = out {
            // SAFETY: the kernel before left `count` rows of partial sums there.
            unsafe { sum_chunks(call, partial, cut.count, out, accumulate) }?;
        }
    }
    Ok(())
}

/// `[n, c, plane]`, and which planes share statistics.
#[derive(Debug, Clone, Copy)]
struct Planes {
    /// n · c.
    count: usize,
    plane: usize,
    samples: usize,
    channels: usize,
    /// Number of statistics; plane p has number p / per % stats.
    stats: usize,
    per: usize,
    /// Statistics r are those of planes r · base + j · step, j < many.
    base: usize,
    step: usize,
    many: usize,
    groups: usize,
}

impl Planes {
    /// Statistics of a group of channels of a sample.
    fn by_group(x: &View, groups: usize) -> Self {
        let all = Self::by_channel(x);
        let width = all.channels.checked_div(groups).unwrap_or(0);
        let stats = all.samples * groups;
        Self {
            stats,
            per: width.max(1),
            base: width,
            step: 1,
            many: width,
            groups,
            ..all
        }
    }

    /// Statistics of a channel over the samples.
    fn by_channel(x: &View) -> Self {
        let dims = x.shape().dims();
        let (samples, channels, plane) = (dims[0], dims[1], dims[2..].iter().product());
        Self {
            count: samples * channels,
            plane,
            samples,
            channels,
            stats: channels,
            per: 1,
            base: 1,
            step: channels,
            many: samples,
            groups: 1,
        }
    }

    /// Two sums per plane, two per statistics.
    fn gradient_scratch(&self) -> usize {
        2 * self.count + 2 * self.stats
    }

    /// Threads of a plane and planes of a block.
    fn block(&self, wide: bool, dtype: DType) -> [u32; 3] {
        match self.plane {
            0..=16 => [1, 256, 1],
            _ => block_of(
                if wide {
                    self.plane / piece(dtype)
                } else {
                    self.plane
                },
                2,
            ),
        }
    }

    /// Whether planes can be read 16 bytes at a time, and are long enough.
    fn wide<'a>(&self, views: impl IntoIterator<Item = Option<&'a View>>) -> bool {
        self.plane > 16 && wide(self.plane, views)
    }

    fn grid(&self, block: [u32; 3]) -> [u32; 3] {
        [self.count.div_ceil(block[1] as usize) as u32, 1, 1]
    }
}

/// Warps of a block of `join_moments` and `join_sums`.
const JOINED: u32 = 8;

/// [`Kernel::GroupNorm`] and [`Kernel::BatchNorm`].
///
/// # Safety
/// As [`run`].
unsafe fn planes(call: &Call<'_>, p: &Planes, eps: f64) -> Result<()> {
    let (x, w, b, y) = (
        call.src(0),
        call.maybe_src(1),
        call.maybe_src(2),
        call.dst(0),
    );
    let (mean, rstd, var) = (call.dst(1), call.dst(2), call.maybe_dst(3));
    let wide = p.wide([Some(x), Some(y)]);
    let block = p.block(wide, x.dtype);
    if let (Some(means), Some(vars)) = (call.maybe_src(3), call.maybe_src(4)) {
        let args = Args::new()
            .ptr(means.ptr)
            .ptr(vars.ptr)
            .ptr(mean.ptr)
            .ptr(rstd.ptr)
            .maybe(var);
        let args = args.size(p.channels).f64(eps);
        let unit = plane_unit("given_moments", x.dtype, false);
        // SAFETY: the arguments are those of `given_moments`; all are dense `[c]` in the
        // accumulator type.
        unsafe {
            call.launch(&unit, Call::blocks(p.channels), [256, 1, 1], 0, &mut {
                args
            })
        }?;
    } else {
        let (means, spreads) = (call.scratch_ptr(), after(call, x, p.count));
        let args = Args::new()
            .ptr(x.ptr)
            .ptr(means)
            .ptr(spreads)
            .size(p.count)
            .size(p.plane);
        let unit = plane_unit("plane_moments", x.dtype, wide);
        // SAFETY: the arguments are those of `plane_moments`; `scratch` asked for two numbers per
        // plane.
        unsafe { call.launch(&unit, p.grid(block), block, 0, &mut { args }) }?;
        let args = Args::new()
            .ptr(means)
            .ptr(spreads)
            .ptr(mean.ptr)
            .ptr(rstd.ptr)
            .maybe(var);
        let args = args
            .size(p.stats)
            .size(p.base)
            .size(p.step)
            .size(p.many)
            .size(p.plane)
            .f64(eps);
        let unit = plane_unit("join_moments", x.dtype, false);
        // SAFETY: the arguments are those of `join_moments`; every plane's numbers were just
        // written.
        unsafe { call.launch(&unit, joined(p.stats), [32, JOINED, 1], 0, &mut { args }) }?;
    }
    if p.plane == 0 {
        return Ok(());
    }
    let args = Args::new()
        .ptr(x.ptr)
        .maybe(w)
        .maybe(b)
        .ptr(mean.ptr)
        .ptr(rstd.ptr)
        .ptr(y.ptr);
    let args = args
        .size(p.count)
        .size(p.plane)
        .size(p.channels)
        .size(p.per)
        .size(p.stats);
    let unit = plane_unit("plane_apply", x.dtype, wide);
    // SAFETY: the arguments are those of `plane_apply`; operands are dense, of the types the
    // contract says.
    unsafe { call.launch(&unit, p.grid(block), block, 0, &mut { args }) }
}

/// Address of the scratch memory after `elements` accumulators.
fn after(call: &Call<'_>, x: &View, elements: usize) -> u64 {
    call.scratch_ptr() + (elements * x.dtype.accumulator().size()) as u64
}

/// Blocks of `join_moments` and `join_sums`.
fn joined(results: usize) -> [u32; 3] {
    [results.div_ceil(JOINED as usize) as u32, 1, 1]
}

/// [`Kernel::GroupNormGrad`] and [`Kernel::BatchNormGrad`]; without `flows` the statistics are
/// constants.
///
/// # Safety
/// As [`run`].
unsafe fn planes_grad(call: &Call<'_>, p: &Planes, flows: bool, accumulate: bool) -> Result<()> {
    let by_weight = matches!(call.kernel, Kernel::BatchNormGrad { .. });
    let (x, w, mean, rstd, dy) = (
        call.src(0),
        call.maybe_src(1),
        call.src(2),
        call.src(3),
        call.src(4),
    );
    let dx = call.maybe_dst(0);
    let wide = p.wide([Some(x), Some(dy), dx]);
    let block = p.block(wide, x.dtype);
    let (along, flat) = (call.scratch_ptr(), after(call, x, p.count));
    let (total_along, total_flat) = (
        after(call, x, 2 * p.count),
        after(call, x, 2 * p.count + p.stats),
    );
    let args = Args::new()
        .ptr(x.ptr)
        .ptr(dy.ptr)
        .ptr(mean.ptr)
        .ptr(rstd.ptr)
        .ptr(along)
        .ptr(flat);
    let args = args.size(p.count).size(p.plane).size(p.per).size(p.stats);
    let unit = plane_unit("plane_sums", x.dtype, wide);
    // SAFETY: the arguments are those of `plane_sums`; `scratch` asked for two sums per plane.
    unsafe { call.launch(&unit, p.grid(block), block, 0, &mut { args }) }?;
    let join = plane_unit("join_sums", x.dtype, false);
    for (sums, out) in [(along, call.maybe_dst(1)), (flat, call.maybe_dst(2))] {
        let Some(out) = out else { continue };
        let args = Args::new().ptr(sums).ptr(0).ptr(out.ptr).size(p.channels);
        let args = args
            .size(1)
            .size(p.channels)
            .size(p.samples)
            .size(1)
            .f64(1.0)
            .i32(accumulate.into());
        // SAFETY: the arguments are those of `join_sums`; channel c of every sample was just
        // summed.
        unsafe { call.launch(&join, joined(p.channels), [32, JOINED, 1], 0, &mut { args }) }?;
    }
    let Some(dx) = dx.filter(|dx| dx.numel() > 0) else {
        return Ok(());
    };
    let share = if flows {
        1.0 / (p.many * p.plane) as f64
    } else {
        0.0
    };
    for (sums, out) in [(along, total_along), (flat, total_flat)] {
        // A batch norm's statistics belong to one channel, whose weight comes in later.
        let args = Args::new()
            .ptr(sums)
            .maybe(w.filter(|_| !by_weight))
            .ptr(out)
            .size(p.stats);
        let args = args
            .size(p.base)
            .size(p.step)
            .size(p.many)
            .size(p.groups)
            .f64(share)
            .i32(0);
        // SAFETY: the arguments are those of `join_sums`; `scratch` asked for two totals per
        // statistics.
        unsafe { call.launch(&join, joined(p.stats), [32, JOINED, 1], 0, &mut { args }) }?;
    }
    let args = Args::new()
        .ptr(x.ptr)
        .ptr(dy.ptr)
        .maybe(w)
        .ptr(mean.ptr)
        .ptr(rstd.ptr);
    let args = args.ptr(total_along).ptr(total_flat).ptr(dx.ptr);
    let args = args
        .size(p.count)
        .size(p.plane)
        .size(p.channels)
        .size(p.per)
        .size(p.stats)
        .i32(by_weight.into());
    let unit = plane_unit("plane_grad", x.dtype, wide);
    // SAFETY: the arguments are those of `plane_grad`; operands are dense, of the types the
    // contract says.
    unsafe { call.launch(&unit, p.grid(block), block, 0, &mut { args }) }
}
