//! Kernels for 64-bit Arm: 6 rows by four vectors, 24 of the 32 registers hold sums.

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::element::{Dest, PanelKernel, nothing};
use super::pack::{self, Lines};
use super::{cast, portable};

const MR: usize = 6;
const KC: usize = 256;

macro_rules! kernel {
    ($name:ident, $src:ty, $sum:ty, $nr:literal, $widen:path, $multiply:path) => {
        pub(super) static $name: PanelKernel<$src> = {
            unsafe fn pack<const W: usize>(lines: &Lines<$src>, dst: *mut u8) {
                // SAFETY: the caller's promises are the callee's; `widen` gets ranges inside both.
                unsafe { pack::panel::<_, $sum, W>(lines, dst.cast(), |s, d, n| $widen(s, d, n)) }
            }
            PanelKernel {
                mr: MR,
                nr: $nr,
                round: 1,
                kc: KC,
                unit: size_of::<$sum>(),
                pack_a: pack::<MR>,
                pack_b: pack::<$nr>,
                multiply: $multiply,
                few: None,
                enter: nothing,
                leave: nothing,
            }
        };
    };
}

kernel!(F32, f32, f32, 16, portable::copy, multiply_f32);
kernel!(F64, f64, f64, 8, portable::copy, multiply_f64);
kernel!(BF16, bf16, f32, 16, cast::widen_bf16, multiply_f32);
kernel!(F16, f16, f32, 16, cast::widen_f16, multiply_f32);

macro_rules! multiply {
    ($name:ident, $sum:ty, $lanes:literal, $dup:ident, $load:ident, $store:ident, $fma:ident) => {
        /// # Safety
        /// Panels of `k` steps and the destination exist.
        unsafe fn $name(k: usize, a: *const u8, b: *const u8, dest: &Dest<$sum>) {
            const NR: usize = 4 * $lanes;
            let (mut a, mut b) = (a.cast::<$sum>(), b.cast::<$sum>());
            let mut tile = [[0.0; NR]; MR];
            // SAFETY: every 64-bit Arm has NEON; the panels hold k steps; a row holds four vectors.
            unsafe {
                let mut sums = [[$dup(0.0); 4]; MR];
                for _ in 0..k {
                    let y = [0, 1, 2, 3].map(|v| $load(b.add(v * $lanes)));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = *a.add(i);
                        for (sum, &y) in row.iter_mut().zip(&y) {
                            *sum = $fma(*sum, y, x);
                        }
                    }
                    a = a.add(MR);
                    b = b.add(NR);
                }
                for (row, sums) in tile.iter_mut().zip(&sums) {
                    for (v, &sum) in sums.iter().enumerate() {
                        $store(row.as_mut_ptr().add(v * $lanes), sum);
                    }
                }
            }
            // SAFETY: the caller's destination.
            unsafe { portable::store(dest, &tile) }
        }
    };
}

multiply!(
    multiply_f32,
    f32,
    4,
    vdupq_n_f32,
    vld1q_f32,
    vst1q_f32,
    vfmaq_n_f32
);
multiply!(
    multiply_f64,
    f64,
    2,
    vdupq_n_f64,
    vld1q_f64,
    vst1q_f64,
    vfmaq_n_f64
);
