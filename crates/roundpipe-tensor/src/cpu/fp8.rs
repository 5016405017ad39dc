//! 8-bit floats on the cpu: rows quantised, and products by table.
//!
//! A product widens codes to bf16, which holds every value of both formats, multiplies with f32
//! sums as any bf16 product does, and applies the scales: the definition itself, in the order of
//! sums that all products of this backend have. It takes a few hundred rows at a time, so that
//! scratch is bounded by the right side.
//!
//! # Invariants
//! - Codes, scales and elements depend neither on the number of threads nor on the number of rows.

use half::{bf16, f16};

use super::access::{Call, Float, SharedSlice, slice, slice_mut};
use super::gemm::{self, Mat, MatMut, Product};
use crate::dtype::DType;
use crate::error::Result;
use crate::fp8::{Fp8, larger};
use crate::kernel::View;

/// Values that make a task worth handing over.
const TASK: usize = 1 << 15;
/// Rows of a transposed matrix that are read together: their values lie side by side.
const SIDE_BY_SIDE: usize = 64;
/// Rows of a product that are widened at once.
const ROWS: usize = 256;

/// `[x] -> [codes, scales]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn quantize(call: &Call<'_>, format: Fp8) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.src(0).dtype {
            DType::F32 => quantize_as::<f32>(call, format),
            DType::BF16 => quantize_as::<bf16>(call, format),
            DType::F16 => quantize_as::<f16>(call, format),
            _ => return Err(call.unsupported()),
        }
    }
    Ok(())
}

/// # Safety
/// As [`quantize`]; x holds `T`.
unsafe fn quantize_as<T: Float<Acc = f32>>(call: &Call<'_>, format: Fp8) {
    let x = call.src(0);
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let (row, column) = (x.layout.strides()[0], x.layout.strides()[1]);
    // SAFETY: destinations are dense, of these types, and this call's alone.
    let (codes, scales) = unsafe {
        (
            SharedSlice::new(slice_mut::<u8>(call.dst(0))),
            SharedSlice::new(slice_mut::<f32>(call.dst(1))),
        )
    };
    let start_of = x.ptr as usize;
    let value = |i: usize, j: usize| {
        let at = i as isize * row + j as isize * column;
        // SAFETY: an element of x, which is alive and not written during the call.
        unsafe { (*(start_of as *const T).offset(at)).up() }
    };
    // Rows that lie side by side are walked together, others one by one.
    let together = if row == 1 { SIDE_BY_SIDE } else { 1 };
    let per_task = (TASK / columns.max(1)).next_multiple_of(together);
    call.pieces(rows, per_task, |start, end| {
        for first in (start..end).step_by(together) {
            let last = (first + together).min(end);
            let mut most = [0f32; SIDE_BY_SIDE];
            for j in 0..columns {
                for i in first..last {
                    most[i - first] = larger(most[i - first], value(i, j));
                }
            }
            // SAFETY: each row and its scale are written by one task.
            let (codes, scales) = unsafe {
                (
                    codes.part(first * columns, last * columns),
                    scales.part(first, last),
                )
            };
            let mut inverse = [0f32; SIDE_BY_SIDE];
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = format.scale(most[i]);
                inverse[i] = 1.0 / *scale;
            }
            for j in 0..columns {
                for i in first..last {
                    let at = i - first;
                    codes[at * columns + j] = format.encode(value(i, j) * inverse[at]);
                }
            }
        }
    });
}

/// Where things lie in the scratch memory of a product: the right side, some rows of the left one,
/// and their sums.
struct Rooms {
    left: usize,
    sums: usize,
    total: usize,
}

impl Rooms {
    fn of(m: usize, n: usize, k: usize) -> Self {
        let rows = m.min(ROWS);
        let left = (n * k * size_of::<bf16>()).next_multiple_of(256);
        let sums = left + (rows * k * size_of::<bf16>()).next_multiple_of(256);
        Self {
            left,
            sums,
            total: sums + rows * n * size_of::<f32>(),
        }
    }
}

/// Bytes of scratch that a product wants.
pub(super) fn scratch(src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let ([Some(a), ..], [Some(c), ..]) = (src, dst) else {
        return 0;
    };
    match c.numel() {
        0 => 0,
        _ => Rooms::of(c.shape()[0], c.shape()[1], a.shape()[1]).total,
    }
}

/// `[a, scales, b, scales, bias?] -> [c]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn matmul(call: &Call<'_>, formats: [Fp8; 2], accumulate: bool) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.dst(0).dtype {
            DType::F32 => matmul_as::<f32>(call, formats, accumulate),
            DType::BF16 => matmul_as::<bf16>(call, formats, accumulate),
            DType::F16 => matmul_as::<f16>(call, formats, accumulate),
            _ => return Err(call.unsupported()),
        }
    }
    Ok(())
}

/// # Safety
/// As [`matmul`]; c holds `T`.
unsafe fn matmul_as<T: Float<Acc = f32>>(
    call: &Call<'_>,
    [left, right]: [Fp8; 2],
    accumulate: bool,
) {
    let (m, n) = (call.dst(0).shape()[0], call.dst(0).shape()[1]);
    let k = call.src(0).shape()[1];
    let (Some(scratch), true) = (call.scratch.as_ref(), m > 0 && n > 0) else {
        return;
    };
    let rooms = Rooms::of(m, n, k);
    // SAFETY: dense operands of these types by the kernel's description; the destination overlaps
    // none.
    let (a, b, c, bias) = unsafe {
        let bias = call.src_opt(4).map(|bias| slice::<T>(bias));
        let c = SharedSlice::new(slice_mut::<T>(call.dst(0)));
        (slice::<u8>(call.src(0)), slice::<u8>(call.src(2)), c, bias)
    };
    // SAFETY: as above.
    let scales = unsafe { [slice::<f32>(call.src(1)), slice::<f32>(call.src(3))] };
    let at = |offset: usize| (scratch.ptr as usize + offset) as *mut u8;
    let (wide_b, wide_a) = (at(0).cast::<bf16>(), at(rooms.left).cast::<bf16>());
    let sums = at(rooms.sums).cast::<f32>();
    let finish = Finish {
        n,
        scales,
        bias,
        c,
        accumulate,
    };
    // SAFETY: the scratch memory has room for the right side at its start.
    widen(call, right, b, unsafe {
        std::slice::from_raw_parts_mut(wide_b, n * k)
    });
    for first in (0..m).step_by(ROWS) {
        let rows = ROWS.min(m - first);
        let here = &a[first * k..(first + rows) * k];
        // SAFETY: the scratch memory has room for so many rows behind the right side.
        widen(call, left, here, unsafe {
            std::slice::from_raw_parts_mut(wide_a, rows * k)
        });
        let product = Product::<bf16, f32> {
            m: rows,
            n,
            k,
            a: Mat {
                ptr: wide_a,
                row: k as isize,
                col: 1,
            },
            // [n, k] read as [k, n].
            b: Mat {
                ptr: wide_b,
                row: 1,
                col: k as isize,
            },
            c: MatMut {
                ptr: sums,
                row: n as isize,
            },
            bias: None,
            alpha: 1.0,
            beta: 0.0,
        };
        // SAFETY: both sides were widened above; the sums have a room of their own, which is read
        // when they are written.
        let sums = unsafe {
            gemm::gemm(call.threads, &product);
            std::slice::from_raw_parts(sums, rows * n)
        };
        finish.rows(call, sums, first);
    }
}

/// What becomes of sums.
struct Finish<'a, T> {
    n: usize,
    /// Of the rows of the left and of the right side.
    scales: [&'a [f32]; 2],
    bias: Option<&'a [T]>,
    c: SharedSlice<'a, T>,
    /// Whether they are added to what is there.
    accumulate: bool,
}

impl<T: Float<Acc = f32>> Finish<'_, T> {
    /// The rows of c from `first` on: sums times both scales, plus the bias and what is there, rounded once.
    fn rows(&self, call: &Call<'_>, sums: &[f32], first: usize) {
        let n = self.n;
        call.pieces(sums.len() / n, TASK / n, |start, end| {
            for i in start..end {
                let row = first + i;
                // SAFETY: each row is written by one task.
                let out = unsafe { self.c.part(row * n, (row + 1) * n) };
                let scale = self.scales[0][row];
                let sums = &sums[i * n..(i + 1) * n];
                for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                    let bias = self.bias.map_or(0.0, |bias| bias[j].up());
                    let there = if self.accumulate { out.up() } else { 0.0 };
                    *out = T::down(sum * scale * self.scales[1][j] + bias + there);
                }
            }
        });
    }
}

/// Codes as the values they stand for.
fn widen(call: &Call<'_>, format: Fp8, codes: &[u8], out: &mut [bf16]) {
    let values = format.values().map(bf16::from_f32);
    let out = SharedSlice::new(out);
    call.pieces(codes.len(), TASK, |start, end| {
        // SAFETY: each piece is written by one task.
        let out = unsafe { out.part(start, end) };
        for (value, code) in out.iter_mut().zip(&codes[start..end]) {
            *value = values[usize::from(*code)];
        }
    });
}
