//! Widens quantised weights (`quantized.cu`), eight values of a thread at a time: reads of 4 or 8
//! bytes and writes of 16 lie side by side across a warp. No scratch.
//!
//! # Invariants
//! - Products and sums are rounded one by one in f32, as on the cpu: the same bits.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use super::fp8;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::quant::{NF4_BLOCK, Quantization};

/// Packs of values that a thread widens.
const PACKS: usize = 4;
/// Values in a pack.
const PACK: usize = 8;
const THREADS: usize = 256;
/// Matrices that a grid can have in its second dimension; more are taken in turns.
const MOST_ROWS: usize = 65_535;

fn unit(entry: &'static str, dtype: DType, pack: usize) -> Unit {
    Unit::new("quantized", include_str!("kernels/quantized.cu"), entry)
        .with("REAL", c_type(dtype))
        .with("PACK", pack)
        .with("PACKS", PACKS)
}

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Dequantize(Quantization::Int8) => int8(call),
            Kernel::Dequantize(Quantization::Nf4) => nf4(call),
            Kernel::QuantizeRows(format) => fp8::quantize(call, *format),
            _ => Err(Error::invalid(
                call.kernel.name(),
                "widens no quantised weight",
            )),
        }
    }
}

/// Blocks of threads for so many packs.
fn grid(packs: usize) -> u32 {
    packs.div_ceil(THREADS * PACKS) as u32
}

/// `[codes, factors] -> [w]`.
///
/// # Safety
/// As [`run`].
unsafe fn int8(call: &Call<'_>) -> Result<()> {
    let (codes, factors, out) = (call.src(0), call.src(1), call.dst(0));
    let columns = codes.numel() / factors.numel().max(1);
    let even = codes.ptr.is_multiple_of(PACK as u64) && out.ptr.is_multiple_of(16);
    let pack = match even && columns.is_multiple_of(PACK) {
        true => PACK,
        false => 1,
    };
    let packs = codes.numel() / pack;
    let mut args = Args::new()
        .ptr(codes.ptr)
        .ptr(factors.ptr)
        .ptr(out.ptr)
        .size(packs)
        .size(columns / pack);
    // SAFETY: the arguments are the kernel's parameters; packs lie in one row and are aligned, as
    // found above.
    unsafe {
        call.launch(
            &unit("widen_int8", out.dtype, pack),
            [grid(packs), 1, 1],
            [THREADS as u32, 1, 1],
            0,
            &mut args,
        )
    }
}

/// `[codes, magnitudes, nested?, books] -> [w]`.
///
/// # Safety
/// As [`run`].
unsafe fn nf4(call: &Call<'_>) -> Result<()> {
    let (codes, magnitudes, nested, books) =
        (call.src(0), call.src(1), call.maybe_src(2), call.src(3));
    let out = call.dst(0);
    let (matrices, blocks) = (magnitudes.shape()[0], magnitudes.shape()[1]);
    let packs = blocks * NF4_BLOCK / PACK;
    let entry = match magnitudes.dtype {
        DType::U8 => "widen_nf4",
        _ => "widen_nf4_plain",
    };
    let mut args = Args::new()
        .ptr(codes.ptr)
        .ptr(magnitudes.ptr)
        .maybe(nested)
        .ptr(books.ptr)
        .ptr(out.ptr)
        .size(matrices)
        .size(packs);
    if !(codes.ptr.is_multiple_of(4) && out.ptr.is_multiple_of(16)) {
        let what = "the parts of a quantised weight do not begin at a multiple of 16 bytes";
        return Err(Error::invalid(call.kernel.name(), what));
    }
    // SAFETY: the arguments are the kernel's parameters; a pack lies in one block and is aligned,
    // as checked above; magnitudes that are codes come with their factors.
    unsafe {
        call.launch(
            &unit(entry, out.dtype, PACK),
            [grid(packs), matrices.min(MOST_ROWS) as u32, 1],
            [THREADS as u32, 1, 1],
            0,
            &mut args,
        )
    }
}

pub(super) fn units() -> Vec<Unit> {
    let all = FLOATS.into_iter().flat_map(|dtype| {
        [
            unit("widen_int8", dtype, PACK),
            unit("widen_int8", dtype, 1),
            unit("widen_nf4", dtype, PACK),
            unit("widen_nf4_plain", dtype, PACK),
        ]
    });
    all.collect()
}
