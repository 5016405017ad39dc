//! Kernels in plain Rust, for machines without one of their own and as a check on the others.

use half::{bf16, f16};

use super::cast;
use super::element::{Dest, PanelKernel, Sum, nothing};
use super::pack::{self, Lines};

const MR: usize = 4;
const NR: usize = 8;
const KC: usize = 256;

macro_rules! kernel {
    ($name:ident, $src:ty, $sum:ty, $widen:path) => {
        pub(super) static $name: PanelKernel<$src> = {
            unsafe fn pack<const W: usize>(lines: &Lines<$src>, dst: *mut u8) {
                // SAFETY: the caller's promises are the callee's; `widen` gets ranges inside both.
                unsafe { pack::panel::<_, $sum, W>(lines, dst.cast(), |s, d, n| $widen(s, d, n)) }
            }
            PanelKernel {
                mr: MR,
                nr: NR,
                round: 1,
                kc: KC,
                unit: size_of::<$sum>(),
                pack_a: pack::<MR>,
                pack_b: pack::<NR>,
                multiply: multiply::<$sum>,
                few: None,
                enter: nothing,
                leave: nothing,
            }
        };
    };
}

kernel!(F32, f32, f32, copy);
kernel!(F64, f64, f64, copy);
kernel!(BF16, bf16, f32, cast::widen_bf16);
kernel!(F16, f16, f32, cast::widen_f16);

/// # Safety
/// Both ranges of `n` elements exist and do not overlap.
#[inline(always)]
pub(super) unsafe fn copy<T>(src: *const T, dst: *mut T, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { src.copy_to_nonoverlapping(dst, n) }
}

/// # Safety
/// Panels of `k` steps and the destination exist.
unsafe fn multiply<S: Sum>(k: usize, a: *const u8, b: *const u8, dest: &Dest<S>) {
    let (a, b) = (a.cast::<[S; MR]>(), b.cast::<[S; NR]>());
    let mut sums = [[S::default(); NR]; MR];
    for p in 0..k {
        // SAFETY: p < k.
        let (x, y) = unsafe { (&*a.add(p), &*b.add(p)) };
        for (row, &x) in sums.iter_mut().zip(x) {
            for (sum, &y) in row.iter_mut().zip(y) {
                *sum = x * y + *sum;
            }
        }
    }
    // SAFETY: the caller's destination.
    unsafe { store(dest, &sums) }
}

/// Adds to or replaces the destination.
///
/// # Safety
/// The destination exists.
#[inline(always)]
pub(super) unsafe fn store<S: Sum, const R: usize, const C: usize>(
    dest: &Dest<S>,
    sums: &[[S; C]; R],
) {
    for (i, row) in sums[..dest.rows].iter().enumerate() {
        for (j, &sum) in row[..dest.cols].iter().enumerate() {
            // SAFETY: i < rows and j < cols.
            unsafe {
                let place = dest.ptr.offset(i as isize * dest.row).add(j);
                let sum = dest.alpha * sum;
                *place = if dest.add { sum + *place } else { sum };
            }
        }
    }
}
