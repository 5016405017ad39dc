//! Conversions of rows between 16-bit floats and f32, by instruction set.
//!
//! Rounding is to nearest, ties to even; NaN stays NaN. All sets give the same bits, except for the
//! payload of a NaN and for numbers below bf16's normal range, which `vcvtneps2bf16` flushes to
//! zero.

use half::{bf16, f16};

use super::isa::Isa;

/// One function per set around one body; the compiler vectorises the body for each.
macro_rules! by_isa {
    ($(#[$doc:meta])* $name:ident, $src:ty, $dst:ty, $body:path, $avx2:path, $avx512:path, $bf16_set:path) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Both ranges of `n` elements exist and do not overlap; the machine runs `isa`.
        #[inline]
        pub(super) unsafe fn $name(isa: Isa, src: *const $src, dst: *mut $dst, n: usize) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2(src: *const $src, dst: *mut $dst, n: usize) {
                // SAFETY: the caller's ranges.
                unsafe { $avx2(src, dst, n) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
            unsafe fn avx512(src: *const $src, dst: *mut $dst, n: usize) {
                // SAFETY: the caller's ranges.
                unsafe { $avx512(src, dst, n) }
            }
            // SAFETY: the caller's ranges, and the machine runs `isa`.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2(src, dst, n),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => avx512(src, dst, n),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512Bf16 | Isa::Amx => $bf16_set(src, dst, n),
                    _ => $body(src, dst, n),
                }
            }
        }
    };
}

by_isa!(
    /// Widens bf16.
    bf16_to_f32, bf16, f32, widen_bf16, widen_bf16, widen_bf16, x86::widen_bf16
);
by_isa!(
    /// Rounds to bf16.
    f32_to_bf16, f32, bf16, narrow_bf16, narrow_bf16, narrow_bf16, x86::narrow_bf16
);
by_isa!(
    /// Widens f16.
    f16_to_f32, f16, f32, widen_f16, x86::widen_f16_avx2, x86::widen_f16_avx512, x86::widen_f16_avx512
);
by_isa!(
    /// Rounds to f16.
    f32_to_f16, f32, f16, narrow_f16, x86::narrow_f16_avx2, x86::narrow_f16_avx512, x86::narrow_f16_avx512
);

/// # Safety
/// Both ranges of `n` elements exist and do not overlap.
#[inline(always)]
pub(super) unsafe fn widen_bf16(src: *const bf16, dst: *mut f32, n: usize) {
    for i in 0..n {
        // SAFETY: i < n.
        unsafe { *dst.add(i) = f32::from_bits(u32::from((*src.add(i)).to_bits()) << 16) }
    }
}

/// # Safety
/// Both ranges of `n` elements exist and do not overlap.
#[inline(always)]
unsafe fn narrow_bf16(src: *const f32, dst: *mut bf16, n: usize) {
    for i in 0..n {
        // SAFETY: i < n.
        unsafe {
            let x = *src.add(i);
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could turn a NaN into an infinity: it is cut and made quiet instead.
            let bits = if x.is_nan() {
                (bits >> 16) | 0x40
            } else {
                rounded
            };
            *dst.add(i) = bf16::from_bits(bits as u16);
        }
    }
}

/// # Safety
/// Both ranges of `n` elements exist and do not overlap.
#[inline(always)]
pub(super) unsafe fn widen_f16(src: *const f16, dst: *mut f32, n: usize) {
    for i in 0..n {
        // SAFETY: i < n.
        unsafe { *dst.add(i) = (*src.add(i)).to_f32() }
    }
}

/// # Safety
/// Both ranges of `n` elements exist and do not overlap.
#[inline(always)]
unsafe fn narrow_f16(src: *const f32, dst: *mut f16, n: usize) {
    for i in 0..n {
        // SAFETY: i < n.
        unsafe { *dst.add(i) = f16::from_f32(*src.add(i)) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! f16 has instructions of its own, which the compiler does not find by itself.

    use std::arch::x86_64::*;

    use half::{bf16, f16};

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    /// # Safety
    /// Both ranges of `n` elements exist and do not overlap; the machine has AVX and F16C.
    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(in super::super) unsafe fn widen_f16_avx2(src: *const f16, dst: *mut f32, n: usize) {
        let whole = n - n % 8;
        for i in (0..whole).step_by(8) {
            // SAFETY: i + 8 <= n.
            unsafe {
                _mm256_storeu_ps(
                    dst.add(i),
                    _mm256_cvtph_ps(_mm_loadu_si128(src.add(i).cast())),
                )
            }
        }
        for i in whole..n {
            // SAFETY: i < n.
            unsafe {
                let bits = i32::from((*src.add(i)).to_bits());
                _mm_store_ss(dst.add(i), _mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
            }
        }
    }

    /// # Safety
    /// As for [`widen_f16_avx2`].
    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(super) unsafe fn narrow_f16_avx2(src: *const f32, dst: *mut f16, n: usize) {
        let whole = n - n % 8;
        for i in (0..whole).step_by(8) {
            // SAFETY: i + 8 <= n.
            unsafe {
                _mm_storeu_si128(
                    dst.add(i).cast(),
                    _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(src.add(i))),
                )
            }
        }
        for i in whole..n {
            // SAFETY: i < n.
            unsafe {
                let bits = _mm_cvtsi128_si32(_mm_cvtps_ph::<NEAREST>(_mm_load_ss(src.add(i))));
                *dst.add(i) = f16::from_bits(bits as u16);
            }
        }
    }

    /// # Safety
    /// As for [`widen_f16_avx2`], with AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) unsafe fn widen_f16_avx512(src: *const f16, dst: *mut f32, n: usize) {
        for i in (0..n).step_by(16) {
            let mask = tail(n - i);
            // SAFETY: the mask keeps the access below n.
            unsafe {
                let x = _mm256_maskz_loadu_epi16(mask, src.add(i).cast());
                _mm512_mask_storeu_ps(dst.add(i), mask, _mm512_cvtph_ps(x));
            }
        }
    }

    /// # Safety
    /// As for [`widen_f16_avx512`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) unsafe fn narrow_f16_avx512(src: *const f32, dst: *mut f16, n: usize) {
        for i in (0..n).step_by(16) {
            let mask = tail(n - i);
            // SAFETY: the mask keeps the access below n.
            unsafe {
                let x = _mm512_maskz_loadu_ps(mask, src.add(i));
                _mm256_mask_storeu_epi16(dst.add(i).cast(), mask, _mm512_cvtps_ph::<NEAREST>(x));
            }
        }
    }

    /// # Safety
    /// As for [`widen_f16_avx512`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn widen_bf16(src: *const bf16, dst: *mut f32, n: usize) {
        for i in (0..n).step_by(16) {
            let mask = tail(n - i);
            // SAFETY: the mask keeps the access below n.
            unsafe {
                let x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src.add(i).cast()));
                _mm512_mask_storeu_epi32(dst.add(i).cast(), mask, _mm512_slli_epi32::<16>(x));
            }
        }
    }

    /// # Safety
    /// As for [`widen_f16_avx512`]; the machine also has AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) unsafe fn narrow_bf16(src: *const f32, dst: *mut bf16, n: usize) {
        let whole = n - n % 32;
        for i in (0..whole).step_by(32) {
            // SAFETY: i + 32 <= n; both vector types are 64 bytes of plain data.
            unsafe {
                let pair = _mm512_cvtne2ps_pbh(
                    _mm512_loadu_ps(src.add(i + 16)),
                    _mm512_loadu_ps(src.add(i)),
                );
                _mm512_storeu_si512(
                    dst.add(i).cast(),
                    std::mem::transmute::<__m512bh, __m512i>(pair),
                );
            }
        }
        for i in (whole..n).step_by(16) {
            let mask = tail(n - i);
            // SAFETY: the mask keeps the access below n; both vector types are 32 bytes of plain
            // data.
            unsafe {
                let x = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, src.add(i)));
                _mm256_mask_storeu_epi16(
                    dst.add(i).cast(),
                    mask,
                    std::mem::transmute::<__m256bh, __m256i>(x),
                );
            }
        }
    }

    /// The mask of the first `n` of 16.
    #[inline(always)]
    fn tail(n: usize) -> __mmask16 {
        if n >= 16 { !0 } else { (1 << n) - 1 }
    }
}
