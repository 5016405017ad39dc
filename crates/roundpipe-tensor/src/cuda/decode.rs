//! What a step of decoding launches, see `kernels/decode.cu`: linear maps of a few rows, heads into
//! caches, attention to caches. A dense block of one new token per row has a kernel for all of it, see
//! `decode_block`.
//!
//! A step is bound by memory and by the time between two launches. Every column of a matrix is read
//! once, by one warp, for all rows; norms, residuals and gated units are part of the products beside
//! them.
//!
//! # Invariants
//! - No bit of a row depends on the number of rows or on the others: sums run along the columns in
//!   an order that depends on their length alone, and the past of a row is cut into chunks counted
//!   from its own first place.
//! - A place outside its cache is reported and written nowhere.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{AttentionSpec, FewLinear, Kernel, View};

/// Rows that [`few_linear`] takes at most.
pub(super) const MAX_ROWS: usize = 16;

const TEXT: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/decode.cuh"),
    include_str!("kernels/decode.cu")
);

/// Places of a chunk, as in the kernel.
pub(super) const KEYS: usize = 64;
/// Warps of a block of [`few_linear`], one column each.
const WARPS: usize = 8;
/// Threads of a block of [`cached_attention`], and the most that share the places of a column.
pub(super) const THREADS: usize = 128;
const MOST_SHARES: usize = 8;
/// Bytes of rows that a block of [`few_linear`] holds in shared memory, at most.
pub(super) const ROW_BYTES: usize = 96 << 10;
/// Query heads that share a key head: the numbers that are compiled ahead.
const GROUPS: [usize; 5] = [1, 2, 4, 5, 8];

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::CacheWrite => cache_write(call),
            Kernel::CachedAttention(spec) => cached_attention(call, spec),
            Kernel::FewLinear(spec) => few_linear(call, spec),
            Kernel::DecodeHeads { eps } => decode_heads(call, *eps),
            _ => Err(Error::invalid(call.kernel.name(), "is no step of decoding")),
        }
    }
}

pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let (Kernel::CachedAttention(_), [Some(q), Some(k), Some(v), ..], [Some(_), Some(lse)]) =
        (kernel, src, dst)
    else {
        return 0;
    };
    let rows = q.shape()[0] * q.shape()[1] * q.shape()[2];
    rows * k.shape()[1].div_ceil(KEYS) * (v.shape()[3] + 2) * lse.dtype.size()
}

pub(super) fn units() -> Vec<Unit> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let wide = dtype != DType::F64;
        all.push(heads_unit(dtype));
        for group in GROUPS {
            let (shares, pieces) = if wide { (MOST_SHARES, 8) } else { (0, 0) };
            all.push(attention_unit(
                dtype,
                wide,
                [group, shares, pieces],
                "cached_partial",
            ));
            all.push(attention_unit(dtype, wide, [group, 0, 0], "cached_combine"));
        }
        for rows in [1, 2, 4, 8, 16].into_iter().filter(|_| wide) {
            for (norm, glu) in [(true, false), (true, true), (false, false)] {
                all.push(linear_unit(dtype, rows, norm, glu));
            }
        }
    }
    all.extend([1, 2, 4, 8].map(write_unit));
    all
}

fn unit(dtype: DType, wide: bool, entry: &'static str) -> Unit {
    Unit::new("decode", TEXT, entry)
        .with("ELEMENT", c_type(dtype))
        .with("WIDE", wide)
}

fn linear_unit(dtype: DType, rows: usize, norm: bool, glu: bool) -> Unit {
    unit(dtype, true, "few_linear")
        .with("ROWS", rows)
        .with("NORM", norm)
        .with("GLU", glu)
}

fn heads_unit(dtype: DType) -> Unit {
    unit(dtype, false, "decode_heads")
}

fn attention_unit(
    dtype: DType,
    wide: bool,
    [group, shares, pieces]: [usize; 3],
    entry: &'static str,
) -> Unit {
    unit(dtype, wide, entry)
        .with("GROUP", group)
        .with("SHARES", shares)
        .with("PIECES", pieces)
}

/// Among how many threads the places of a piece of a value are shared; 0 where values are read
/// element by element.
fn shares(v: &View, group: usize) -> usize {
    if !is_wide(v) {
        return 0;
    }
    wide_shares(v.dtype, v.shape()[3], group)
}

/// The same of values whose rows are whole pieces of 16 bytes.
pub(super) fn wide_shares(dtype: DType, width: usize, group: usize) -> usize {
    let pieces = width * dtype.size() / 16;
    if pieces == 0 || pieces > THREADS || group * dtype.size() > 16 {
        return 0;
    }
    (THREADS / pieces).min(MOST_SHARES)
}

fn write_unit(bytes: usize) -> Unit {
    let word = match bytes {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    };
    unit(DType::F32, false, "cache_write").with("WORD", word)
}

unsafe fn cache_write(call: &Call<'_>) -> Result<()> {
    let (x, at, cache) = (call.src(0), call.src(1), call.dst(0));
    let (steps, capacity) = (x.shape()[1], cache.shape()[1]);
    let place = x.shape()[2] * x.shape()[3] * x.dtype.size();
    let fits = |bytes: &usize| {
        let bytes = *bytes;
        place.is_multiple_of(bytes)
            && x.ptr.is_multiple_of(bytes as u64)
            && cache.ptr.is_multiple_of(bytes as u64)
    };
    let bytes = [8, 4, 2, 1].into_iter().find(fits).unwrap_or(1);
    let words = place / bytes;
    let total = x.shape()[0] * steps * words;
    let apart = if cache.shape()[0] == 1 { 0 } else { capacity };
    let mut args = Args::new()
        .ptr(x.ptr)
        .ptr(at.ptr)
        .ptr(cache.ptr)
        .size(steps)
        .size(words)
        .size(capacity)
        .size(apart)
        .size(total)
        .ptr(call.alarm.device)
        .u32(call.alarm.code(call.kernel.name()));
    // SAFETY: the arguments are the kernel's; both are dense, and places are checked there.
    unsafe {
        call.launch(
            &write_unit(bytes),
            Call::blocks(total),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// Whether pieces of 16 bytes along the last dimension are whole.
fn is_wide(view: &View) -> bool {
    let even = |elements: usize| (elements * view.dtype.size()).is_multiple_of(16);
    let strides = view.layout.strides();
    let rank = strides.len();
    view.dtype != DType::F64
        && view.ptr.is_multiple_of(16)
        && even(view.shape()[rank - 1])
        && strides[..rank - 1].iter().all(|s| even(s.unsigned_abs()))
}

unsafe fn cached_attention(call: &Call<'_>, spec: &AttentionSpec) -> Result<()> {
    let (q, k, v, at) = (call.src(0), call.src(1), call.src(2), call.src(4));
    let (o, lse) = (call.dst(0), call.dst(1));
    let [batch, steps, heads, d] = *q.shape().dims() else {
        unreachable!("checked by the operation")
    };
    let (capacity, key_heads, dv) = (k.shape()[1], k.shape()[2], v.shape()[3]);
    let (rows, group) = (batch * steps, heads / key_heads.max(1));
    let chunks = capacity.div_ceil(KEYS);
    let limit = |count: usize| u32::try_from(count).ok().filter(|count| *count < 65_536);
    let (Some(grid_rows), Some(grid_heads), true) = (limit(rows), limit(key_heads), group <= 16)
    else {
        return Err(Error::invalid(
            call.kernel.name(),
            "more rows or heads than a GPU takes at once",
        ));
    };
    let window = spec.window.map_or(0, |w| w.min(i32::MAX as usize).max(1));
    let scratch = call.scratch_ptr();
    let strides = |args: Args, view: &View| {
        let s = view.layout.strides();
        args.ptr(view.ptr)
            .i64(s[0] as i64)
            .i64(s[1] as i64)
            .i64(s[2] as i64)
    };
    let args = strides(strides(strides(Args::new(), q), k), v);
    let mut args = args
        .ptr(at.ptr)
        .ptr(scratch)
        .size(steps)
        .size(heads)
        .size(d)
        .size(dv)
        .size(capacity)
        .size(window)
        .f64(spec.scale)
        .ptr(call.alarm.device)
        .u32(call.alarm.code(call.kernel.name()));
    let wide = is_wide(k);
    let shares = if wide { shares(v, group) } else { 0 };
    // Pieces of a key that each of its two threads holds; 0 where that is not even or too much.
    let pieces = d * q.dtype.size() / 32;
    let is_even =
        wide && shares > 0 && KEYS.is_multiple_of(shares) && pieces * 32 == d * q.dtype.size();
    let pieces = if is_even && pieces <= 8 { pieces } else { 0 };
    let shared = (group * (d + shares * dv) * lse.dtype.size()) as u32;
    let grid = [chunks as u32, grid_heads, grid_rows];
    let partial = attention_unit(q.dtype, wide, [group, shares, pieces], "cached_partial");
    // SAFETY: the arguments are the kernel's; the scratch holds what `scratch` asked for, by the
    // same sizes; places are checked there.
    unsafe { call.launch_early(&partial, grid, [128, 1, 1], shared, &mut args)? };
    let mut args = Args::new()
        .ptr(scratch)
        .maybe(call.maybe_src(3))
        .ptr(at.ptr)
        .ptr(o.ptr)
        .ptr(lse.ptr)
        .size(steps)
        .size(heads)
        .size(dv)
        .size(capacity)
        .size(chunks)
        .size(window);
    let combine = attention_unit(q.dtype, wide, [group, 0, 0], "cached_combine");
    let grid = [heads as u32, grid_rows, 1];
    // SAFETY: as above; the parts that are read are those that were written before.
    unsafe { call.launch_early(&combine, grid, [128, 1, 1], 0, &mut args) }
}

unsafe fn few_linear(call: &Call<'_>, spec: &FewLinear) -> Result<()> {
    let x = call.src(0);
    let (rows, row_bytes) = (x.shape()[0], x.shape()[1] * x.dtype.size());
    // Two blocks share a processor's memory, of which the driver keeps a part.
    let room = ROW_BYTES.min((call.gpu.shared_memory / 2).saturating_sub(2 << 10));
    let most = (room / row_bytes).min(MAX_ROWS);
    if most == 0 {
        let what = format!("rows of {row_bytes} bytes are longer than {room}");
        return Err(Error::invalid(call.kernel.name(), what));
    }
    // Rows that do not fit go by themselves: none depends on another.
    let most = 1 << most.ilog2();
    for first in (0..rows).step_by(most) {
        // SAFETY: as for this function.
        unsafe { linear_of_rows(call, spec, first, most.min(rows - first))? };
    }
    Ok(())
}

/// Rows `first` to `first + rows` of a call.
unsafe fn linear_of_rows(
    call: &Call<'_>,
    spec: &FewLinear,
    first: usize,
    rows: usize,
) -> Result<()> {
    let x = call.src(0);
    let (k, size) = (x.shape()[1], x.dtype.size());
    let columns = |i: usize| match call.maybe_src(3 + i) {
        Some(w) if !(spec.glu && i == 1) => w.shape()[0],
        _ => 0,
    };
    let behind = |view: &View, width: usize| view.ptr + (first * width * size) as u64;
    let total = (0..3).map(columns).sum::<usize>();
    let residual = call.maybe_src(2).map_or(0, |view| behind(view, columns(0)));
    let mut args = Args::new()
        .ptr(behind(x, k))
        .maybe(call.maybe_src(1))
        .ptr(residual);
    for i in 3..9 {
        args = args.maybe(call.maybe_src(i));
    }
    for i in 0..3 {
        let y = call.maybe_dst(i).map_or(0, |view| behind(view, columns(i)));
        args = args.ptr(y);
    }
    for i in 0..3 {
        args = args.size(columns(i));
    }
    let mut args = args
        .size(k)
        .i32(rows as i32)
        .f64(spec.eps.unwrap_or_default());
    let compiled = rows.next_power_of_two();
    let unit = linear_unit(x.dtype, compiled, spec.eps.is_some(), spec.glu);
    let resident = if compiled <= 4 { 2 } else { 1 };
    let blocks = total.div_ceil(WARPS).min(resident * call.gpu.processors()?);
    let shared = (rows * k * size) as u32;
    // SAFETY: the arguments are the kernel's; the operation checked that matrices are dense, as wide
    // as x, and that rows are whole pieces of 16 bytes.
    unsafe { call.launch_early(&unit, [blocks as u32, 1, 1], [256, 1, 1], shared, &mut args) }
}

unsafe fn decode_heads(call: &Call<'_>, eps: f64) -> Result<()> {
    let (q, k, v, cos) = (call.src(0), call.src(1), call.src(2), call.src(5));
    let [batch, steps, hq, width] = *q.shape().dims() else {
        unreachable!("checked by the operation")
    };
    let hk = k.shape()[2];
    let capacity = call.dst(1).shape()[1];
    let mut args = Args::new()
        .ptr(q.ptr)
        .ptr(k.ptr)
        .ptr(v.ptr)
        .maybe(call.maybe_src(3))
        .maybe(call.maybe_src(4))
        .ptr(cos.ptr)
        .ptr(call.src(6).ptr)
        .ptr(call.src(7).ptr)
        .ptr(call.src(8).ptr)
        .ptr(call.dst(0).ptr)
        .ptr(call.dst(1).ptr)
        .ptr(call.dst(2).ptr)
        .size(steps)
        .size(hq)
        .size(hk)
        .size(width)
        .size(cos.shape()[1])
        .size(cos.shape()[0])
        .size(capacity)
        .f64(eps)
        .ptr(call.alarm.device)
        .u32(call.alarm.code(call.kernel.name()));
    let grid = [(hq + 2 * hk) as u32, (batch * steps) as u32, 1];
    // SAFETY: the arguments are the kernel's; all are dense, and places are checked there.
    unsafe { call.launch_early(&heads_unit(q.dtype), grid, [32, 1, 1], 0, &mut args) }
}
