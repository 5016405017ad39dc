//! Kernels for AVX-512: 14 rows by two vectors, 28 of the 32 registers hold sums.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::element::{Dest, FewRows, PanelKernel, nothing};
use super::pack::{self, Lines};
use super::{cast, portable};

/// Rows of a left panel. Each step reads them one by one, so fewer at the lower edge cost less.
const MR: usize = 14;

/// Rows up to which columns are transposed in registers instead of packed.
const FEW: usize = 4;

macro_rules! few {
    ($pack:ident, $multiply:path) => {
        Some(FewRows {
            rows: FEW,
            pack: $pack::<MR>,
            multiply: $multiply,
        })
    };
}

macro_rules! kernel {
    ($name:ident, $src:ty, $round:literal, $kc:literal, $nr:literal, $unit:literal, $pack:ident, $multiply:path, $few:expr) => {
        pub(super) static $name: PanelKernel<$src> = PanelKernel {
            mr: MR,
            nr: $nr,
            round: $round,
            kc: $kc,
            unit: $unit,
            pack_a: $pack::<MR>,
            pack_b: $pack::<$nr>,
            multiply: $multiply,
            few: $few,
            enter: nothing,
            leave: nothing,
        };
    };
}

kernel!(
    F32,
    f32,
    1,
    512,
    32,
    4,
    pack_f32,
    multiply_f32,
    few!(pack_f32, few_f32)
);
kernel!(F64, f64, 1, 256, 16, 8, pack_f64, multiply_f64, None);
kernel!(
    BF16,
    bf16,
    1,
    512,
    32,
    4,
    pack_bf16,
    multiply_f32,
    few!(pack_bf16, few_bf16)
);
kernel!(
    F16,
    f16,
    1,
    512,
    32,
    4,
    pack_f16,
    multiply_f32,
    few!(pack_f16, few_f16)
);
kernel!(
    BF16_PAIRS,
    bf16,
    2,
    1024,
    32,
    2,
    pack_pairs,
    multiply_pairs,
    few!(pack_pairs, few_pairs)
);

macro_rules! multiply {
    (
        $name:ident, $features:literal, $sum:ty, $lanes:literal, $packed:ty, $steps:literal, $zero:ident,
        $splat:expr, $load_b:expr, $dot:ident, $set1:ident, $load:ident, $store:ident, $mask_load:ident,
        $mask_store:ident, $fmadd:ident, $mul:ident
    ) => {
        /// # Safety
        /// Panels of `k` steps and the destination exist; the machine has the features.
        #[target_feature(enable = $features)]
        unsafe fn $name(k: usize, a: *const u8, b: *const u8, dest: &Dest<$sum>) {
            #[target_feature(enable = $features)]
            unsafe fn rows<const R: usize>(
                k: usize,
                a: *const u8,
                b: *const u8,
                dest: &Dest<$sum>,
            ) {
                let (mut a, mut b) = (a.cast::<$packed>(), b.cast::<$packed>());
                let mut sums = [[$zero(); 2]; R];
                for _ in 0..k.div_ceil($steps) {
                    // SAFETY: the panels hold k steps, rounded up.
                    unsafe {
                        let (b0, b1) = ($load_b(b), $load_b(b.add($lanes)));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = $splat(*a.add(i));
                            sum[0] = $dot!(x, b0, sum[0]);
                            sum[1] = $dot!(x, b1, sum[1]);
                        }
                        a = a.add(MR);
                        b = b.add(2 * $lanes);
                    }
                }
                let alpha = $set1(dest.alpha);
                let whole = dest.cols == 2 * $lanes;
                let masks = [first(dest.cols), first(dest.cols.saturating_sub($lanes))];
                for (i, sum) in sums.iter().enumerate() {
                    for (half, &sum) in sum.iter().enumerate() {
                        // SAFETY: the destination has R rows; a whole row holds two vectors, and
                        // the masks keep to `cols` in any other.
                        unsafe {
                            let place = dest
                                .ptr
                                .offset(i as isize * dest.row)
                                .wrapping_add(half * $lanes);
                            let mask = masks[half] as _;
                            if whole {
                                let sum = if dest.add {
                                    $fmadd(alpha, sum, $load(place))
                                } else {
                                    $mul(alpha, sum)
                                };
                                $store(place, sum);
                            } else {
                                let sum = if dest.add {
                                    $fmadd(alpha, sum, $mask_load(mask, place))
                                } else {
                                    $mul(alpha, sum)
                                };
                                $mask_store(place, mask, sum);
                            }
                        }
                    }
                }
            }
            // SAFETY: the caller's promises; `rows` is the number asked for.
            unsafe {
                match dest.rows {
                    1 => rows::<1>(k, a, b, dest),
                    2 => rows::<2>(k, a, b, dest),
                    3 => rows::<3>(k, a, b, dest),
                    4 => rows::<4>(k, a, b, dest),
                    5 => rows::<5>(k, a, b, dest),
                    6 => rows::<6>(k, a, b, dest),
                    7 => rows::<7>(k, a, b, dest),
                    8 => rows::<8>(k, a, b, dest),
                    9 => rows::<9>(k, a, b, dest),
                    10 => rows::<10>(k, a, b, dest),
                    11 => rows::<11>(k, a, b, dest),
                    12 => rows::<12>(k, a, b, dest),
                    13 => rows::<13>(k, a, b, dest),
                    _ => rows::<MR>(k, a, b, dest),
                }
            }
        }
    };
}

/// The mask of the first `n` lanes.
#[inline(always)]
fn first(n: usize) -> u16 {
    if n >= 16 { !0 } else { (1 << n) - 1 }
}

macro_rules! fma_f32 {
    ($x:expr, $y:expr, $sum:expr) => {
        _mm512_fmadd_ps($x, $y, $sum)
    };
}
macro_rules! fma_f64 {
    ($x:expr, $y:expr, $sum:expr) => {
        _mm512_fmadd_pd($x, $y, $sum)
    };
}
macro_rules! dot_pairs {
    ($x:expr, $y:expr, $sum:expr) => {
        _mm512_dpbf16_ps($sum, $x, $y)
    };
}

multiply!(
    multiply_f32,
    "avx512f",
    f32,
    16,
    f32,
    1,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    fma_f32,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_maskz_loadu_ps,
    _mm512_mask_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_mul_ps
);
multiply!(
    multiply_f64,
    "avx512f",
    f64,
    8,
    f64,
    1,
    _mm512_setzero_pd,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    fma_f64,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_maskz_loadu_pd,
    _mm512_mask_storeu_pd,
    _mm512_fmadd_pd,
    _mm512_mul_pd
);
multiply!(
    multiply_pairs,
    "avx512f,avx512bf16",
    f32,
    16,
    i32,
    2,
    _mm512_setzero_ps,
    splat_pair,
    load_pairs,
    dot_pairs,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_maskz_loadu_ps,
    _mm512_mask_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_mul_ps
);

/// One pair in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn splat_pair(pair: i32) -> __m512bh {
    // SAFETY: both are 64 bytes of plain data.
    unsafe { std::mem::transmute(_mm512_set1_epi32(pair)) }
}

/// 16 pairs.
///
/// # Safety
/// 64 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load_pairs(src: *const i32) -> __m512bh {
    // SAFETY: the caller's promise; both are 64 bytes of plain data.
    unsafe { std::mem::transmute(_mm512_loadu_si512(src.cast())) }
}

/// # Safety
/// As for [`pack::panel`]; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_f32<const W: usize>(lines: &Lines<f32>, dst: *mut u8) {
    // SAFETY: the caller's promises are the callees'; the mask keeps reads to existing elements.
    unsafe {
        if lines.step == 1 && lines.lane != 1 {
            transpose::<W>(lines.lanes, lines.k, dst.cast(), |lane, p| {
                _mm512_maskz_loadu_ps(first(lines.k - p), lines.at(lane, p))
            });
        } else {
            pack::panel::<_, f32, W>(lines, dst.cast(), |s, d, n| portable::copy(s, d, n));
        }
    }
}

/// # Safety
/// As for [`pack_f32`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_f64<const W: usize>(lines: &Lines<f64>, dst: *mut u8) {
    // SAFETY: the caller's promises are the callee's.
    unsafe { pack::panel::<_, f64, W>(lines, dst.cast(), |s, d, n| portable::copy(s, d, n)) }
}

/// # Safety
/// As for [`pack_f32`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_bf16<const W: usize>(lines: &Lines<bf16>, dst: *mut u8) {
    // SAFETY: the caller's promises are the callees'; the mask keeps reads to existing elements.
    unsafe {
        if lines.step == 1 && lines.lane != 1 {
            transpose::<W>(lines.lanes, lines.k, dst.cast(), |lane, p| {
                let x = _mm256_maskz_loadu_epi16(first(lines.k - p), lines.at(lane, p).cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
            });
        } else {
            pack::panel::<_, f32, W>(lines, dst.cast(), |s, d, n| cast::widen_bf16(s, d, n));
        }
    }
}

/// # Safety
/// As for [`pack_f32`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_f16<const W: usize>(lines: &Lines<f16>, dst: *mut u8) {
    // SAFETY: the caller's promises are the callees'; the mask keeps reads to existing elements.
    unsafe {
        if lines.step == 1 && lines.lane != 1 {
            transpose::<W>(lines.lanes, lines.k, dst.cast(), |lane, p| {
                _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(
                    first(lines.k - p),
                    lines.at(lane, p).cast(),
                ))
            });
        } else {
            pack::panel::<_, f32, W>(lines, dst.cast(), |s, d, n| {
                cast::x86::widen_f16_avx2(s, d, n)
            });
        }
    }
}

/// # Safety
/// As for [`pack::pairs`]; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) unsafe fn pack_pairs<const W: usize>(lines: &Lines<bf16>, dst: *mut u8) {
    // SAFETY: the caller's promises are the callees'; the mask keeps reads to existing elements.
    unsafe {
        if lines.lane == 1 {
            interleave::<W>(lines, dst.cast());
        } else if lines.step == 1 {
            // A pair fills one 32-bit lane, so this is the transpose of f32.
            transpose::<W>(
                lines.lanes,
                lines.k.div_ceil(2),
                dst.cast(),
                |lane, pair| {
                    let left = lines.k - 2 * pair;
                    let mask = if left >= 32 { !0 } else { (1 << left) - 1 };
                    _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(
                        mask,
                        lines.at(lane, 2 * pair).cast(),
                    ))
                },
            );
        } else {
            pack::pairs::<W>(lines, dst.cast());
        }
    }
}

/// Panels of pairs from lanes that lie side by side: two steps are woven into one row of pairs.
///
/// # Safety
/// As for [`pack::pairs`], with `lines.lane == 1`; the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn interleave<const W: usize>(lines: &Lines<bf16>, dst: *mut i32) {
    for pair in 0..lines.k.div_ceil(2) {
        for lane in (0..W).step_by(16) {
            // SAFETY: the step exists; the store keeps to the panel's width.
            unsafe {
                let woven = woven(lines, lane, 2 * pair);
                let place = dst.add(pair * W + lane);
                if W - lane >= 16 {
                    _mm512_storeu_si512(place.cast(), woven);
                } else {
                    _mm512_mask_storeu_epi32(place, first(W - lane), woven);
                }
            }
        }
    }
}

/// 32 steps of 16 lanes, one lane to a vector; zeros where there is nothing.
///
/// # Safety
/// The elements of `lines` exist; the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
pub(super) unsafe fn bf16_rows(lines: &Lines<bf16>, lane: usize, p: usize) -> [__m512i; 16] {
    let mut rows = [_mm512_setzero_si512(); 16];
    let lanes = lines.lanes.saturating_sub(lane).min(16);
    let steps = lines.k.saturating_sub(p).min(32);
    // SAFETY: every access is to a lane and a step that exist, or masked.
    unsafe {
        if lines.step == 1 {
            let mask = if steps == 32 { !0 } else { (1 << steps) - 1 };
            for (i, row) in rows.iter_mut().enumerate().take(lanes) {
                *row = _mm512_maskz_loadu_epi16(mask, lines.at(lane + i, p).cast());
            }
        } else if lines.lane == 1 {
            let mut pairs = [_mm512_setzero_ps(); 16];
            for (i, pair) in pairs.iter_mut().enumerate().take(steps.div_ceil(2)) {
                *pair = _mm512_castsi512_ps(woven(lines, lane, p + 2 * i));
            }
            rows = transpose_16(pairs).map(|x| _mm512_castps_si512(x));
        } else {
            let mut block = [[bf16::ZERO; 32]; 16];
            for (i, row) in block.iter_mut().enumerate().take(lanes) {
                for (q, x) in row.iter_mut().enumerate().take(steps) {
                    *x = *lines.at(lane + i, p + q);
                }
            }
            rows = block.map(|row| _mm512_loadu_si512(row.as_ptr().cast()));
        }
    }
    rows
}

/// Two steps of 16 lanes that lie side by side, as pairs; zeros where there is nothing.
///
/// # Safety
/// The elements of `lines` exist, `lines.lane == 1` and `p < lines.k`; the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn woven(lines: &Lines<bf16>, lane: usize, p: usize) -> __m512i {
    let mask = first(lines.lanes.saturating_sub(lane));
    let odd_mask = if p + 1 < lines.k { mask } else { 0 };
    let src = lines
        .ptr
        .wrapping_offset(p as isize * lines.step)
        .wrapping_add(lane);
    let next = src.wrapping_offset(lines.step);
    // SAFETY: the masks keep the reads to lanes and steps that exist.
    unsafe {
        let even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src.cast()));
        let odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd_mask, next.cast()));
        _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd))
    }
}

/// Adds sums, whose rows are `sums_row` elements apart, to the destination, or replaces it by them.
///
/// # Safety
/// The sums and the destination exist; the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(dest: &Dest<f32>, sums: *const f32, sums_row: isize) {
    let alpha = _mm512_set1_ps(dest.alpha);
    for i in 0..dest.rows {
        for j in (0..dest.cols).step_by(16) {
            let mask = first(dest.cols - j);
            // SAFETY: i < rows, and the mask keeps to `cols`.
            unsafe {
                let place = dest.ptr.offset(i as isize * dest.row).add(j);
                let sum = _mm512_maskz_loadu_ps(mask, sums.offset(i as isize * sums_row).add(j));
                let sum = if dest.add {
                    _mm512_fmadd_ps(alpha, sum, _mm512_maskz_loadu_ps(mask, place))
                } else {
                    _mm512_mul_ps(alpha, sum)
                };
                if mask == !0 {
                    _mm512_storeu_ps(place, sum);
                } else {
                    _mm512_mask_storeu_ps(place, mask, sum);
                }
            }
        }
    }
}

/// Packs lanes whose steps lie side by side into `[steps][W]`, 16 by 16 through registers.
/// `load(lane, p)` gives the steps from p on of a lane, zeros after the last.
///
/// # Safety
/// `dst` holds `steps * W` elements, `lanes <= W`; the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn transpose<const W: usize>(
    lanes: usize,
    steps: usize,
    dst: *mut f32,
    load: impl Fn(usize, usize) -> __m512,
) {
    for lane in (0..W).step_by(16) {
        for p in (0..steps).step_by(16) {
            let mut block = [_mm512_setzero_ps(); 16];
            for (i, row) in block.iter_mut().enumerate() {
                if lane + i < lanes {
                    *row = load(lane + i, p);
                }
            }
            let block = transpose_16(block);
            for (q, &row) in block.iter().enumerate().take(steps - p) {
                // SAFETY: the step is below `steps`. A store wider than what is left of the row
                // runs into the next one, which is written after it; the last row has none, so it
                // is masked.
                unsafe {
                    let place = dst.add((p + q) * W + lane);
                    if W - lane >= 16 || (lane == 0 && p + q + 1 < steps) {
                        _mm512_storeu_ps(place, row);
                    } else {
                        _mm512_mask_storeu_ps(place, first(W - lane), row);
                    }
                }
            }
        }
    }
}

/// Rows become columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16(r: [__m512; 16]) -> [__m512; 16] {
    let mut s = r;
    // Pairs of rows woven by element, then by two: each 128-bit quarter holds 4 rows of a column.
    for i in 0..8 {
        s[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut t = s;
    for i in 0..4 {
        let [a, b, c, d] =
            [s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]].map(|x| _mm512_castps_pd(x));
        t[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        t[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        t[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        t[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    // t[4 i + c], quarter q: column 4 q + c of rows 4 i to 4 i + 3. Now the quarters change places.
    let mut out = t;
    for c in 0..4 {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(t[c], t[4 + c]);
        let high = _mm512_shuffle_f32x4::<0b11_01_11_01>(t[c], t[4 + c]);
        let low2 = _mm512_shuffle_f32x4::<0b10_00_10_00>(t[8 + c], t[12 + c]);
        let high2 = _mm512_shuffle_f32x4::<0b11_01_11_01>(t[8 + c], t[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, low2);
        out[4 + c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(high, high2);
        out[8 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, low2);
        out[12 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(high, high2);
    }
    out
}

/// The few-row kernel of a type: 16 columns at a time are transposed in registers and multiplied at
/// once. `$load(lines, lane, p)` gives 16 panel elements of a column from panel step p on.
macro_rules! multiply_few {
    ($name:ident, $features:literal, $src:ty, $packed:ty, $steps:literal, $splat:expr, $load:ident, $dot:ident) => {
        /// # Safety
        /// The columns, packed rows of as many steps and the destination exist; the columns' steps
        /// lie side by side; the machine has the features.
        #[target_feature(enable = $features)]
        unsafe fn $name(lines: &Lines<$src>, a: *const u8, dest: &Dest<f32>) {
            #[target_feature(enable = $features)]
            unsafe fn rows<const R: usize>(lines: &Lines<$src>, a: *const u8, dest: &Dest<f32>) {
                let a = a.cast::<$packed>();
                let steps = lines.k.div_ceil($steps);
                for lane in (0..dest.cols).step_by(16) {
                    let mut sums = [_mm512_setzero_ps(); R];
                    for p in (0..steps).step_by(16) {
                        let mut block = [_mm512_setzero_ps(); 16];
                        for (i, row) in block.iter_mut().enumerate() {
                            if lane + i < lines.lanes {
                                // SAFETY: the lane and the step exist.
                                *row = unsafe { $load(lines, lane + i, p) };
                            }
                        }
                        let block = transpose_16(block);
                        for (q, &b) in block.iter().enumerate().take(steps - p) {
                            for (r, sum) in sums.iter_mut().enumerate() {
                                // SAFETY: the packed rows hold as many steps.
                                let x = $splat(unsafe { *a.add((p + q) * MR + r) });
                                *sum = $dot!(x, b, *sum);
                            }
                        }
                    }
                    let part = Dest {
                        ptr: dest.ptr.wrapping_add(lane),
                        rows: R,
                        cols: (dest.cols - lane).min(16),
                        ..*dest
                    };
                    let mut held = [[0.0_f32; 16]; R];
                    for (row, sum) in held.iter_mut().zip(sums) {
                        // SAFETY: a row holds a vector.
                        unsafe { _mm512_storeu_ps(row.as_mut_ptr(), sum) };
                    }
                    // SAFETY: the part lies inside the destination.
                    unsafe { store(&part, held.as_ptr().cast(), 16) };
                }
            }
            // SAFETY: the caller's promises; `rows` is the number asked for.
            unsafe {
                match dest.rows {
                    1 => rows::<1>(lines, a, dest),
                    2 => rows::<2>(lines, a, dest),
                    3 => rows::<3>(lines, a, dest),
                    _ => rows::<FEW>(lines, a, dest),
                }
            }
        }
    };
}

macro_rules! fma_cast {
    ($x:expr, $y:expr, $sum:expr) => {
        _mm512_dpbf16_ps($sum, $x, as_pairs($y))
    };
}

multiply_few!(
    few_f32,
    "avx512f,avx512bw,avx512dq,avx512vl,f16c",
    f32,
    f32,
    1,
    _mm512_set1_ps,
    column_f32,
    fma_f32
);
multiply_few!(
    few_bf16,
    "avx512f,avx512bw,avx512dq,avx512vl,f16c",
    bf16,
    f32,
    1,
    _mm512_set1_ps,
    column_bf16,
    fma_f32
);
multiply_few!(
    few_f16,
    "avx512f,avx512bw,avx512dq,avx512vl,f16c",
    f16,
    f32,
    1,
    _mm512_set1_ps,
    column_f16,
    fma_f32
);
multiply_few!(
    few_pairs,
    "avx512f,avx512bw,avx512dq,avx512vl,f16c,avx512bf16",
    bf16,
    i32,
    2,
    splat_pair,
    column_pairs,
    fma_cast
);

/// Pairs under the type that products of pairs take.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn as_pairs(x: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid patterns.
    unsafe { std::mem::transmute::<__m512, __m512bh>(x) }
}

/// 16 steps of a column; zeros behind the last.
///
/// # Safety
/// The lane and the step exist; steps lie side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn column_f32(lines: &Lines<f32>, lane: usize, p: usize) -> __m512 {
    // SAFETY: the mask keeps the read to steps that exist.
    unsafe { _mm512_maskz_loadu_ps(first(lines.k - p), lines.at(lane, p)) }
}

/// As [`column_f32`], widened.
///
/// # Safety
/// As for [`column_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn column_bf16(lines: &Lines<bf16>, lane: usize, p: usize) -> __m512 {
    // SAFETY: the mask keeps the read to steps that exist.
    let x = unsafe { _mm256_maskz_loadu_epi16(first(lines.k - p), lines.at(lane, p).cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// As [`column_f32`], widened.
///
/// # Safety
/// As for [`column_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn column_f16(lines: &Lines<f16>, lane: usize, p: usize) -> __m512 {
    // SAFETY: the mask keeps the read to steps that exist.
    let x = unsafe { _mm256_maskz_loadu_epi16(first(lines.k - p), lines.at(lane, p).cast()) };
    _mm512_cvtph_ps(x)
}

/// 16 pairs of steps of a column from pair `p` on; zeros behind the last step.
///
/// # Safety
/// As for [`column_f32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn column_pairs(lines: &Lines<bf16>, lane: usize, p: usize) -> __m512 {
    let left = lines.k - 2 * p;
    let mask = if left >= 32 { !0 } else { (1 << left) - 1 };
    // SAFETY: the mask keeps the read to steps that exist.
    let x = unsafe { _mm512_maskz_loadu_epi16(mask, lines.at(lane, 2 * p).cast()) };
    _mm512_castsi512_ps(x)
}
