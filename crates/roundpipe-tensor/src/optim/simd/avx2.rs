//! The operations with AVX2 and F16C: two registers are one vector.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Simd, SlabPass};

/// Proof that the processor has AVX2 and F16C.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    /// The proof, where it holds.
    pub(in super::super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }

    pub(super) fn run<P: SlabPass>(self, pass: P) -> P::Output {
        #[target_feature(enable = "avx2,f16c")]
        fn compiled<P: SlabPass>(s: Avx2, pass: P) -> P::Output {
            pass.run(s)
        }
        // SAFETY: the features of `compiled` are those that `detect` found when it made `self`.
        unsafe { compiled(self, pass) }
    }
}

/// Runs intrinsics of the features that `Avx2` proves.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: the caller has an `Avx2`, which exists only where `detect` found the features;
        // the pointers, where there are any, come from references to as many elements as are read
        // or written, and the unaligned forms of the loads and stores are used.
        unsafe { $($body)* }
    };
}

type V = [__m256; 2];

// Written out by halves, not with `map`: a closure that is not inlined is not compiled for AVX2.

#[inline(always)]
fn halves<T>(block: &[T; LANES]) -> [&[T; 8]; 2] {
    let (halves, _) = block.as_chunks();
    [&halves[0], &halves[1]]
}

#[inline(always)]
fn halves_mut<T>(block: &mut [T; LANES]) -> [&mut [T; 8]; 2] {
    match block.as_chunks_mut().0 {
        [low, high] => [low, high],
        _ => unreachable!("a block is two halves"),
    }
}

#[inline(always)]
fn widen_bf16(_: Avx2, half: &[bf16; 8]) -> __m256 {
    proven!({
        let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(half.as_ptr().cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    })
}

/// Eight f32 as bf16 in the low halves of eight words.
#[inline(always)]
fn round_bf16(_: Avx2, v: __m256) -> __m256i {
    proven!({
        let bits = _mm256_castps_si256(v);
        let kept = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(kept, _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up));
        let quiet = _mm256_or_si256(kept, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(rounded, quiet, nan)
    })
}

/// Eight f32 rounded at random, in the low halves of eight words.
#[inline(always)]
fn round_randomly(_: Avx2, v: __m256, random: &[u16; 8]) -> __m256i {
    proven!({
        let bits = _mm256_castps_si256(v);
        let random = _mm256_cvtepu16_epi32(_mm_loadu_si128(random.as_ptr().cast()));
        let up = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, random));
        let kept = _mm256_srli_epi32::<16>(bits);
        let magnitude = _mm256_and_si256(up, _mm256_set1_epi32(0x7fff));
        let infinite = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f80));
        let rounded = _mm256_blendv_epi8(up, kept, infinite);
        let quiet = _mm256_or_si256(kept, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(rounded, quiet, nan)
    })
}

/// Weights and low halves, as [`Simd::load_split`] puts them together.
#[inline(always)]
fn join_split(_: Avx2, weights: &[bf16; 8], low: &[u16; 8]) -> __m256 {
    proven!({
        let weights = _mm256_cvtepu16_epi32(_mm_loadu_si128(weights.as_ptr().cast()));
        let low = _mm256_cvtepi16_epi32(_mm_loadu_si128(low.as_ptr().cast()));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<16>(weights), low))
    })
}

/// All ones in the lanes that keep [`Simd::splits_simply`] from holding.
#[inline(always)]
fn not_simple(_: Avx2, v: __m256) -> __m256i {
    proven!({
        let bits = _mm256_castps_si256(v);
        let magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff_ffff));
        let large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f7f_7fff));
        let end = _mm256_and_si256(bits, _mm256_set1_epi32(0x1_ffff));
        let tie = _mm256_cmpeq_epi32(end, _mm256_set1_epi32(0x8000));
        _mm256_or_si256(large, tie)
    })
}

impl Simd for Avx2 {
    type V = V;
    type Sums = [__m256d; 4];

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        proven!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, src: &[f32; LANES]) -> V {
        let [low, high] = halves(src);
        proven!([
            _mm256_loadu_ps(low.as_ptr()),
            _mm256_loadu_ps(high.as_ptr())
        ])
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16; LANES]) -> V {
        let [low, high] = halves(src);
        [widen_bf16(self, low), widen_bf16(self, high)]
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16; LANES]) -> V {
        let [low, high] = halves(src);
        proven!([
            _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast())),
        ])
    }
    #[inline(always)]
    fn store(self, v: V, dst: &mut [f32; LANES]) {
        let [low, high] = halves_mut(dst);
        proven!({
            _mm256_storeu_ps(low.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), v[1]);
        })
    }
    #[inline(always)]
    fn store_bf16(self, v: V, dst: &mut [bf16; LANES]) {
        let (low, high) = (round_bf16(self, v[0]), round_bf16(self, v[1]));
        proven!({
            // Packing works within 128-bit lanes; the permutation restores the order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), packed);
        })
    }
    #[inline(always)]
    fn store_bf16_random(self, v: V, random: &[u16; LANES], dst: &mut [bf16; LANES]) {
        let random = halves(random);
        let low = round_randomly(self, v[0], random[0]);
        let high = round_randomly(self, v[1], random[1]);
        proven!({
            // As in `store_bf16`.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), packed);
        })
    }
    #[inline(always)]
    fn load_split(self, weights: &[bf16; LANES], low: &[u16; LANES]) -> V {
        let (weights, low) = (halves(weights), halves(low));
        [
            join_split(self, weights[0], low[0]),
            join_split(self, weights[1], low[1]),
        ]
    }
    #[inline(always)]
    fn splits_simply(self, v: V) -> bool {
        let (low, high) = (not_simple(self, v[0]), not_simple(self, v[1]));
        proven!(_mm256_movemask_epi8(_mm256_or_si256(low, high)) == 0)
    }
    #[inline(always)]
    fn store_split(self, v: V, weights: &mut [bf16; LANES], low: &mut [u16; LANES]) {
        proven!({
            let bits = [_mm256_castps_si256(v[0]), _mm256_castps_si256(v[1])];
            let half = _mm256_set1_epi32(0x8000);
            let rounded = _mm256_packus_epi32(
                _mm256_srli_epi32::<16>(_mm256_add_epi32(bits[0], half)),
                _mm256_srli_epi32::<16>(_mm256_add_epi32(bits[1], half)),
            );
            let mask = _mm256_set1_epi32(0xffff);
            let rest = _mm256_packus_epi32(
                _mm256_and_si256(bits[0], mask),
                _mm256_and_si256(bits[1], mask),
            );
            // As in `store_bf16`.
            let rounded = _mm256_permute4x64_epi64::<0b11_01_10_00>(rounded);
            let rest = _mm256_permute4x64_epi64::<0b11_01_10_00>(rest);
            _mm256_storeu_si256(weights.as_mut_ptr().cast(), rounded);
            _mm256_storeu_si256(low.as_mut_ptr().cast(), rest);
        })
    }
    #[inline(always)]
    fn store_f16(self, v: V, dst: &mut [f16; LANES]) {
        let [low, high] = halves_mut(dst);
        proven!({
            let halves = [
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]),
            ];
            _mm_storeu_si128(low.as_mut_ptr().cast(), halves[0]);
            _mm_storeu_si128(high.as_mut_ptr().cast(), halves[1]);
        })
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        proven!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        proven!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        proven!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        proven!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        proven!([_mm256_sqrt_ps(a[0]), _mm256_sqrt_ps(a[1])])
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        proven!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn is_ordered(self, a: V) -> bool {
        // NaN in either operand counts, so one comparison serves both halves.
        proven!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[1])) == 0)
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        proven!([_mm256_setzero_pd(); 4])
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::Sums, v: V) -> Self::Sums {
        proven!({
            let a = _mm256_cvtps_pd(_mm256_castps256_ps128(v[0]));
            let b = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(v[0]));
            let c = _mm256_cvtps_pd(_mm256_castps256_ps128(v[1]));
            let d = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(v[1]));
            [
                _mm256_add_pd(sums[0], _mm256_mul_pd(a, a)),
                _mm256_add_pd(sums[1], _mm256_mul_pd(b, b)),
                _mm256_add_pd(sums[2], _mm256_mul_pd(c, c)),
                _mm256_add_pd(sums[3], _mm256_mul_pd(d, d)),
            ]
        })
    }
    #[inline(always)]
    fn read_sums(self, sums: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        for (dst, sum) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
            proven!(_mm256_storeu_pd(dst.as_mut_ptr(), sum));
        }
        lanes
    }
}
