//! Widens quantised weights, codes and scales to values of a float type; rows of fp8 are in
//! [`fp8`].

use super::access::{Call, Float, Real, SharedSlice, for_float, slice, slice_mut};
use super::fp8;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::quant::{NF4_BLOCK, NF4_NESTED, Quantization, int8_value, nf4_magnitude};

/// Values that make a task worth handing over.
const TASK: usize = 1 << 15;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Dequantize(Quantization::Int8) => {
                for_float!(call, call.dst(0).dtype, T => int8::<T>(call))
            }
            Kernel::Dequantize(Quantization::Nf4) => {
                for_float!(call, call.dst(0).dtype, T => nf4::<T>(call))
            }
            Kernel::QuantizeRows(format) => fp8::quantize(call, *format),
            _ => Err(call.unsupported()),
        }
    }
}

/// A value computed in f32, rounded to the type that is wanted.
#[inline(always)]
fn rounded<T: Float>(x: f32) -> T {
    T::down(T::Acc::of(f64::from(x)))
}

/// `[codes, factors] -> [w]`.
unsafe fn int8<T: Float>(call: &Call<'_>) -> Result<()> {
    // SAFETY: contiguous operands of these types by the kernel's description; the destination
    // overlaps none.
    let (codes, factors, out) = unsafe {
        let out = SharedSlice::new(slice_mut::<T>(call.dst(0)));
        (slice::<u8>(call.src(0)), slice::<f32>(call.src(1)), out)
    };
    let columns = codes.len() / factors.len().max(1);
    let rows_of_task = TASK / columns.max(1);
    call.pieces(factors.len(), rows_of_task, |start, end| {
        for (row, factor) in factors.iter().enumerate().take(end).skip(start) {
            let here = row * columns..(row + 1) * columns;
            // SAFETY: each row is written by one task.
            let out = unsafe { out.part(here.start, here.end) };
            for (w, code) in out.iter_mut().zip(&codes[here]) {
                *w = rounded(int8_value(*code, *factor));
            }
        }
    });
    Ok(())
}

/// `[codes, magnitudes, nested?, books] -> [w]`.
unsafe fn nf4<T: Float>(call: &Call<'_>) -> Result<()> {
    let coded = call.src(1).dtype == DType::U8;
    let (blocks, of_matrix) = (call.src(1).numel(), call.src(1).shape()[1]);
    // SAFETY: contiguous operands of these types by the kernel's description, nested where
    // magnitudes are coded; the destination overlaps none.
    let (codes, books, out) = unsafe {
        let out = SharedSlice::new(slice_mut::<T>(call.dst(0)));
        (slice::<u8>(call.src(0)), slice::<f32>(call.src(3)), out)
    };
    // SAFETY: as above.
    let (plain, coded) = unsafe {
        match coded {
            true => {
                let nested = call.src(2);
                let coded = (
                    slice::<u8>(call.src(1)),
                    slice::<f32>(nested),
                    nested.shape()[1],
                );
                (&[][..], Some(coded))
            }
            false => (slice::<f32>(call.src(1)), None),
        }
    };
    let magnitude = |block: usize| match coded {
        None => plain[block],
        Some((magnitudes, nested, stride)) => {
            let (matrix, inside) = (block / of_matrix, block % of_matrix);
            let scales = &nested[matrix * stride..][..stride];
            let factor = scales[1 + inside / NF4_NESTED];
            nf4_magnitude(magnitudes[block], factor, scales[0], books)
        }
    };
    call.pieces(blocks, TASK / NF4_BLOCK, |start, end| {
        for block in start..end {
            let magnitude = magnitude(block);
            // A block has few different values.
            let mut values = [T::default(); 16];
            for (value, book) in values.iter_mut().zip(books) {
                *value = rounded(book * magnitude);
            }
            let from = block * NF4_BLOCK;
            // SAFETY: each block is written by one task.
            let out = unsafe { out.part(from, from + NF4_BLOCK) };
            let codes = &codes[from / 2..][..NF4_BLOCK / 2];
            for (pair, code) in out.chunks_exact_mut(2).zip(codes) {
                pair[0] = values[usize::from(code >> 4)];
                pair[1] = values[usize::from(code & 15)];
            }
        }
    });
    Ok(())
}
