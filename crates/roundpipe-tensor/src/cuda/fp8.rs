//! Rows as 8-bit floats (`fp8.cu`): a dense matrix in one kernel, the transpose of one in two,
//! magnitudes first.
//!
//! A dense row is held in the registers of its block; one that is too long for them is read twice, the
//! second time from the cache. The transposed matrix,
//! which the gradient of an input wants of a weight, is read twice from memory: its magnitudes go
//! by chunks of lines to scratch, and what is quantised is turned in shared memory.
//!
//! # Invariants
//! - Codes and scales are those of [`Fp8::quantize`], bit for bit; maxima have no order to keep.

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fp8::Fp8;
use crate::kernel::View;

/// The types that are quantised, and that products in fp8 give.
pub(super) const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Times eight values that a thread of `quantize_short_rows` holds.
const PACKS: usize = 4;
/// Rows of the result that a block of `column_magnitudes` has.
const MAGNITUDE_ROWS: usize = 256;
/// Lines of a chunk of magnitudes at least, and chunks at most.
const CHUNK_LINES: usize = 64;
const MOST_CHUNKS: usize = 32;
/// Rows and columns of a square of `quantize_columns`.
const SQUARE: [usize; 2] = [64, 128];

/// A unit of `fp8.cu` for values of a type.
pub(super) fn unit(entry: &'static str, dtype: DType) -> Unit {
    Unit::new("fp8", include_str!("kernels/fp8.cu"), entry).with("REAL", c_type(dtype))
}

/// The number of a format in `fp8.cu`.
pub(super) fn number(format: Fp8) -> usize {
    match format {
        Fp8::E4M3 => 0,
        Fp8::E5M2 => 1,
    }
}

fn quantizer(entry: &'static str, dtype: DType, format: Fp8) -> Unit {
    unit(entry, dtype)
        .with("FORMAT", number(format))
        .with("PACKS", PACKS)
}

pub(super) fn units() -> Vec<Unit> {
    let all = TYPES.into_iter().flat_map(|dtype| {
        [
            quantizer("quantize_rows", dtype, Fp8::E4M3),
            quantizer("quantize_rows", dtype, Fp8::E5M2),
            quantizer("quantize_short_rows", dtype, Fp8::E4M3),
            quantizer("quantize_short_rows", dtype, Fp8::E5M2),
            quantizer("column_magnitudes", dtype, Fp8::E4M3),
            quantizer("quantize_columns", dtype, Fp8::E4M3),
        ]
    });
    all.collect()
}

/// Whether rows lie side by side: the transpose of a dense matrix.
fn is_transposed(x: &View) -> bool {
    !x.layout.is_contiguous()
}

/// Chunks of lines that magnitudes are found in, and the lines of one.
fn chunks(columns: usize) -> (usize, usize) {
    let lines = columns.div_ceil(MOST_CHUNKS).max(CHUNK_LINES);
    (columns.div_ceil(lines), lines)
}

pub(super) fn scratch(src: &[Option<View>]) -> usize {
    match src {
        [Some(x), ..] if is_transposed(x) => {
            let (rows, columns) = (x.shape()[0], x.shape()[1]);
            chunks(columns).0 * rows * size_of::<f32>()
        }
        _ => 0,
    }
}

/// `[x] -> [codes, scales]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn quantize(call: &Call<'_>, format: Fp8) -> Result<()> {
    let x = call.src(0);
    if !TYPES.contains(&x.dtype) || !is_whole(x) {
        let what = format!("cannot quantise {} {}", x.dtype, x.shape());
        return Err(Error::invalid(call.kernel.name(), what));
    }
    if x.numel() == 0 {
        return Ok(());
    }
    // SAFETY: the launch contract, passed on.
    unsafe {
        match is_transposed(x) {
            true => transposed(call, format),
            false => dense(call, format),
        }
    }
}

/// Whether sizes are those that the kernels take in steps.
fn is_whole(x: &View) -> bool {
    let steps = if is_transposed(x) { [8, 16] } else { [1, 8] };
    x.shape()
        .iter()
        .zip(steps)
        .all(|(size, step)| size.is_multiple_of(step))
}

/// 1 where packs of 16 bytes begin at multiples of 16.
fn aligned(x: &View) -> usize {
    usize::from(x.ptr.is_multiple_of(16))
}

/// # Safety
/// As [`quantize`]; x is dense.
unsafe fn dense(call: &Call<'_>, format: Fp8) -> Result<()> {
    let (x, codes, scales) = (call.src(0), call.dst(0), call.dst(1));
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let blocks = [rows.min(i32::MAX as usize) as u32, 1, 1];
    let threads = (columns / 8).div_ceil(PACKS).next_multiple_of(32);
    if threads <= 1024 && i32::try_from(rows).is_ok() {
        let mut args = Args::new().ptr(x.ptr).ptr(codes.ptr).ptr(scales.ptr);
        args = args.size(columns).size(aligned(x));
        let unit = quantizer("quantize_short_rows", x.dtype, format);
        // SAFETY: the arguments are the kernel's; columns are a multiple of 8, as checked above; the
        // threads of a block hold a row.
        return unsafe { call.launch(&unit, blocks, [threads as u32, 1, 1], 0, &mut args) };
    }
    let threads = (columns / 8).next_multiple_of(32).min(256) as u32;
    let mut args = Args::new()
        .ptr(x.ptr)
        .ptr(codes.ptr)
        .ptr(scales.ptr)
        .size(rows)
        .size(columns)
        .size(aligned(x));
    // SAFETY: the arguments are the kernel's; columns are a multiple of 8, as checked above.
    unsafe {
        call.launch(
            &quantizer("quantize_rows", x.dtype, format),
            blocks,
            [threads, 1, 1],
            0,
            &mut args,
        )
    }
}

/// # Safety
/// As [`quantize`]; x is the transpose of a dense matrix.
unsafe fn transposed(call: &Call<'_>, format: Fp8) -> Result<()> {
    let (x, codes, scales) = (call.src(0), call.dst(0), call.dst(1));
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    if x.layout.strides() != [1, rows as isize] {
        let what = format!("{} lies neither densely nor transposed", x.shape());
        return Err(Error::invalid(call.kernel.name(), what));
    }
    let (chunks, lines) = chunks(columns);
    let magnitudes = call.scratch_ptr();
    let mut args = Args::new()
        .ptr(x.ptr)
        .ptr(magnitudes)
        .size(rows)
        .size(columns)
        .size(lines)
        .size(aligned(x));
    let grid = [rows.div_ceil(MAGNITUDE_ROWS) as u32, chunks as u32, 1];
    let magnitude_unit = quantizer("column_magnitudes", x.dtype, format);
    // SAFETY: the arguments are the kernel's; the scratch memory has a float for every chunk and
    // row; rows are a multiple of 8, as checked above.
    unsafe { call.launch(&magnitude_unit, grid, [256, 1, 1], 0, &mut args)? };
    let mut args = Args::new()
        .ptr(x.ptr)
        .ptr(magnitudes)
        .ptr(codes.ptr)
        .ptr(scales.ptr)
        .size(rows)
        .size(columns)
        .size(chunks)
        .size(aligned(x));
    let across = columns.div_ceil(SQUARE[1]);
    if across > 65_535 {
        let what = format!("{columns} columns are too many for one launch");
        return Err(Error::invalid(call.kernel.name(), what));
    }
    let grid = [rows.div_ceil(SQUARE[0]) as u32, across as u32, 1];
    let unit = quantizer("quantize_columns", x.dtype, format);
    // SAFETY: the arguments are the kernel's; magnitudes were queued before in the same stream;
    // sizes are multiples of 8 and 16, as checked above.
    unsafe { call.launch(&unit, grid, [256, 1, 1], 0, &mut args) }
}
