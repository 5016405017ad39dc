//! The operations with AVX-512: one register is one vector.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Simd, SlabPass};

/// Proof that the processor has AVX-512 F and BW (and AVX2, for the halves).
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    /// The proof, where it holds.
    pub(in super::super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx2");
        has.then_some(Self(()))
    }

    pub(super) fn run<P: SlabPass>(self, pass: P) -> P::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx2")]
        fn compiled<P: SlabPass>(s: Avx512, pass: P) -> P::Output {
            pass.run(s)
        }
        // SAFETY: the features of `compiled` are those that `detect` found when it made `self`.
        unsafe { compiled(self, pass) }
    }
}

/// Runs intrinsics of the features that `Avx512` proves.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: the caller has `self`, which exists only where `detect` found the features; the
        // pointers, where there are any, come from references to whole blocks, and the unaligned
        // forms of the loads and stores are used.
        unsafe { $($body)* }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    type Sums = [__m512d; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proven!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, src: &[f32; LANES]) -> __m512 {
        proven!(_mm512_loadu_ps(src.as_ptr()))
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16; LANES]) -> __m512 {
        proven!({
            let half = _mm256_loadu_si256(src.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        })
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16; LANES]) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast())))
    }
    #[inline(always)]
    fn store(self, v: __m512, dst: &mut [f32; LANES]) {
        proven!(_mm512_storeu_ps(dst.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn store_bf16(self, v: __m512, dst: &mut [bf16; LANES]) {
        proven!({
            let bits = _mm512_castps_si512(v);
            let kept = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(kept, _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
            let quiet = _mm512_or_si512(kept, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let half = _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), half);
        })
    }
    #[inline(always)]
    fn store_bf16_random(self, v: __m512, random: &[u16; LANES], dst: &mut [bf16; LANES]) {
        proven!({
            let bits = _mm512_castps_si512(v);
            let random = _mm512_cvtepu16_epi32(_mm256_loadu_si256(random.as_ptr().cast()));
            let up = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, random));
            let kept = _mm512_srli_epi32::<16>(bits);
            let magnitude = _mm512_and_si512(up, _mm512_set1_epi32(0x7fff));
            let infinite = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f80));
            let rounded = _mm512_mask_blend_epi32(infinite, up, kept);
            let quiet = _mm512_or_si512(kept, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let half = _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), half);
        })
    }
    #[inline(always)]
    fn load_split(self, weights: &[bf16; LANES], low: &[u16; LANES]) -> __m512 {
        proven!({
            let weights = _mm256_loadu_si256(weights.as_ptr().cast());
            let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(weights));
            let low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(low.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_add_epi32(high, low))
        })
    }
    #[inline(always)]
    fn splits_simply(self, v: __m512) -> bool {
        proven!({
            let bits = _mm512_castps_si512(v);
            let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff));
            let large = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(0x7f7f_8000));
            let end = _mm512_and_si512(bits, _mm512_set1_epi32(0x1_ffff));
            let tie = _mm512_cmpeq_epi32_mask(end, _mm512_set1_epi32(0x8000));
            large | tie == 0
        })
    }
    #[inline(always)]
    fn store_split(self, v: __m512, weights: &mut [bf16; LANES], low: &mut [u16; LANES]) {
        proven!({
            let bits = _mm512_castps_si512(v);
            let rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
            // The low half of `bits` and the upper half of `rounded`.
            let joined = _mm512_mask_blend_epi16(0x5555_5555, rounded, bits);
            // Even words first, then odd ones.
            let order = _mm512_set_epi16(
                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20,
                18, 16, 14, 12, 10, 8, 6, 4, 2, 0,
            );
            let sorted = _mm512_permutexvar_epi16(order, joined);
            _mm256_storeu_si256(low.as_mut_ptr().cast(), _mm512_castsi512_si256(sorted));
            let upper = _mm512_extracti64x4_epi64::<1>(sorted);
            _mm256_storeu_si256(weights.as_mut_ptr().cast(), upper);
        })
    }
    #[inline(always)]
    fn store_f16(self, v: __m512, dst: &mut [f16; LANES]) {
        proven!({
            let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), half);
        })
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        proven!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn is_ordered(self, a: __m512) -> bool {
        proven!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) == 0)
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        proven!([_mm512_setzero_pd(); 2])
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::Sums, v: __m512) -> Self::Sums {
        proven!({
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
            let upper = _mm512_extracti64x4_epi64::<1>(_mm512_castps_si512(v));
            let high = _mm512_cvtps_pd(_mm256_castsi256_ps(upper));
            [
                _mm512_add_pd(sums[0], _mm512_mul_pd(low, low)),
                _mm512_add_pd(sums[1], _mm512_mul_pd(high, high)),
            ]
        })
    }
    #[inline(always)]
    fn read_sums(self, sums: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        for (dst, sum) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
            proven!(_mm512_storeu_pd(dst.as_mut_ptr(), sum));
        }
        lanes
    }
}
