//! Kernels for AVX2 with FMA: 6 rows by two vectors, 12 of the 16 registers hold sums.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::element::{Dest, PanelKernel, nothing};
use super::pack::{self, Lines};
use super::{cast, portable};

const MR: usize = 6;
const KC: usize = 256;

macro_rules! kernel {
    ($name:ident, $src:ty, $sum:ty, $nr:literal, $widen:path, $multiply:path) => {
        pub(super) static $name: PanelKernel<$src> = {
            #[target_feature(enable = "avx2,fma,f16c")]
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
kernel!(F16, f16, f32, 16, cast::x86::widen_f16_avx2, multiply_f32);

macro_rules! multiply {
    ($name:ident, $sum:ty, $lanes:literal, $zero:ident, $set1:ident, $load:ident, $store:ident, $fmadd:ident, $mul:ident) => {
        /// # Safety
        /// Panels of `k` steps and the destination exist; the machine has AVX2 and FMA.
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(k: usize, a: *const u8, b: *const u8, dest: &Dest<$sum>) {
            const NR: usize = 2 * $lanes;
            let (mut a, mut b) = (a.cast::<$sum>(), b.cast::<$sum>());
            let mut sums = [[$zero(); 2]; MR];
            for _ in 0..k {
                // SAFETY: the panels hold k steps.
                unsafe {
                    let (b0, b1) = ($load(b), $load(b.add($lanes)));
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let x = $set1(*a.add(i));
                        sum[0] = $fmadd(x, b0, sum[0]);
                        sum[1] = $fmadd(x, b1, sum[1]);
                    }
                    a = a.add(MR);
                    b = b.add(NR);
                }
            }
            if dest.cols < NR || dest.rows < MR {
                let mut tile = [[0.0; NR]; MR];
                for (row, sum) in tile.iter_mut().zip(&sums) {
                    // SAFETY: a row holds two vectors.
                    unsafe {
                        $store(row.as_mut_ptr(), sum[0]);
                        $store(row.as_mut_ptr().add($lanes), sum[1]);
                    }
                }
                // SAFETY: the caller's destination.
                return unsafe { portable::store(dest, &tile) };
            }
            let alpha = $set1(dest.alpha);
            for (i, sum) in sums.iter().enumerate() {
                // SAFETY: the destination has MR whole rows of NR.
                unsafe {
                    let place = dest.ptr.offset(i as isize * dest.row);
                    for (half, &sum) in sum.iter().enumerate() {
                        let place = place.add(half * $lanes);
                        // Not fused, as at the edges: an element's bits must not depend on where it
                        // lies.
                        let sum = $mul(alpha, sum);
                        $store(
                            place,
                            if dest.add {
                                add::$name(sum, $load(place))
                            } else {
                                sum
                            },
                        );
                    }
                }
            }
        }
    };
}

mod add {
    pub(super) use std::arch::x86_64::{
        _mm256_add_pd as multiply_f64, _mm256_add_ps as multiply_f32,
    };
}

multiply!(
    multiply_f32,
    f32,
    8,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    _mm256_mul_ps
);
multiply!(
    multiply_f64,
    f64,
    4,
    _mm256_setzero_pd,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_fmadd_pd,
    _mm256_mul_pd
);
