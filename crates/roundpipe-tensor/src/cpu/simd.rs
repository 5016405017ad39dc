//! Vector code chosen at run time, and mathematics that vectorises.
//!
//! The crate is built for the plainest processor of its architecture. A loop wrapped by
//! [`vectorize!`] is compiled three times (AVX-512, AVX2, plain) and the best version the processor has is
//! called. No version uses fused multiply-add unless the loop says so, so all give the same bits.
//!
//! The functions of [`Math`] are branch-free polynomials, so that loops over them vectorise and give the
//! same bits on every machine. Errors are below 2 units in the last place for f32.

use std::sync::OnceLock;

use half::{bf16, f16};

/// What the processor can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// The architecture's baseline.
    Plain,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best level of this processor; found once.
pub(crate) fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Plain,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Plain
}

/// Defines `fn $name` that runs its body compiled for the best level of the processor. The body must be
/// plain safe (or internally unsafe) Rust whose callees are `#[inline(always)]`.
macro_rules! vectorize {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $b:path),*>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $b),*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($g: $b),*>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512 $(<$($g: $b),*>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($g),*>)? ($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$($g: $b),*>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($g),*>)? ($($arg),*) }

            match $crate::cpu::simd::level() {
                // SAFETY: `level` found these features on this processor.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx512 => unsafe { avx512 $(::<$($g),*>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx2 => unsafe { avx2 $(::<$($g),*>)? ($($arg),*) },
                $crate::cpu::simd::Level::Plain => body $(::<$($g),*>)? ($($arg),*),
            }
        }
    };
}
pub(crate) use vectorize;

/// Conversions of 16-bit floats as plain integer arithmetic, which vectorises on every processor.
pub(crate) trait Widen: Copy {
    fn widen(self) -> f32;
    fn narrow(x: f32) -> Self;
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let round = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // A NaN keeps its sign and high bits and stays quiet.
        let nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        Self::from_bits(if is_nan { nan } else { round } as u16)
    }
}

impl Widen for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        // Move exponent and mantissa into place, then rescale by 2^112: subnormals come out right because
        // the multiplication normalises them. Infinity and NaN get the full exponent afterwards.
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
        let special = magnitude | 0x7f80_0000;
        let value = if (bits & 0x7c00) == 0x7c00 { special } else { scaled.to_bits() };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // Normal results: re-bias the exponent and round to nearest even on 13 bits.
        let rebased = magnitude.wrapping_sub(0x3800_0000);
        let normal = rebased.wrapping_add(0xfff + ((rebased >> 13) & 1)) >> 13;
        // Subnormal results: adding 0.5 aligns the mantissa so that the sum's low bits are the answer.
        let tiny = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let nan = if magnitude > 0x7f80_0000 { 0x7e00 | ((magnitude >> 13) & 0x3ff) } else { 0x7c00 };
        let finite = if magnitude < 0x3880_0000 { tiny } else { normal };
        let value = if magnitude >= 0x4780_0000 { nan } else { finite };
        Self::from_bits((value | sign) as u16)
    }
}

/// Functions whose library versions are calls; these inline and vectorise.
pub(crate) trait Math: Copy {
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
}

impl Math for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        // e^x = 2^n · e^r, r = x - n·ln 2 in two parts, |r| <= ln 2 / 2; a polynomial of degree 6 for e^r.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
        const ROUND: f32 = 12_582_912.0;
        let x = self.clamp(-104.0, 89.0);
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = (x - n * LN2_HIGH) - n * LN2_LOW;
        let mut p = 1.388_888_9e-3;
        for c in [8.333_333e-3, 4.166_666_7e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0] {
            p = p * r + c;
        }
        // 2^n in two factors, so that results near the ends of the range neither overflow nor vanish early.
        let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
        let half = n >> 1;
        let power = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
        let y = p * power(half) * power(n - half);
        if self.is_nan() { self } else { y }
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        // Near 0 an odd polynomial (no cancellation), elsewhere 1 - 2 / (e^2|x| + 1).
        let x = self.abs();
        let s = x * x;
        let small =
            x + x * s * (-0.333_333_34 + s * (0.133_333_33 + s * (-0.053_968_254 + s * 0.021_869_488)));
        let large = 1.0 - 2.0 / (Math::exp(2.0 * x) + 1.0);
        let y = if x < 0.25 { small } else { large };
        y.copysign(self)
    }
}

impl Math for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
}

#[cfg(test)]
mod tests {
    use super::{Math, Widen};
    use half::{bf16, f16};

    /// All 65,536 patterns widen as the `half` crate says, and every f32 near a rounding edge narrows so.
    #[test]
    fn sixteen_bit_conversions_agree_with_half() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(b.widen().to_bits() == b.to_f32().to_bits() || b.is_nan(), "bf16 {bits:#x}");
            assert!(h.widen().to_bits() == h.to_f32().to_bits() || h.is_nan(), "f16 {bits:#x}");
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x0fff, 0x1000, 0x1001, 0x3000] {
                let x = f32::from_bits(u32::from(bits) << 16 | low);
                if x.is_nan() {
                    assert!(<bf16 as Widen>::narrow(x).is_nan() && <f16 as Widen>::narrow(x).is_nan());
                    continue;
                }
                assert_eq!(
                    <bf16 as Widen>::narrow(x).to_bits(),
                    bf16::from_f32(x).to_bits(),
                    "bf16 of {x:e}"
                );
                assert_eq!(<f16 as Widen>::narrow(x).to_bits(), f16::from_f32(x).to_bits(), "f16 of {x:e}");
            }
        }
    }

    #[test]
    fn exp_and_tanh_are_close_everywhere_and_right_at_the_ends() {
        for i in -120_000..=120_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            if exact < 3.4e38 && exact > 1.2e-38 {
                let error = (f64::from(Math::exp(x)) - exact).abs() / exact;
                assert!(error < 2.5e-7, "exp({x}): {error:e}");
            }
            let exact = f64::from(x).tanh();
            let error = (f64::from(Math::tanh(x)) - exact).abs() / exact.abs().max(1e-30);
            assert!(error < 4e-7, "tanh({x}): {error:e}");
        }
        assert_eq!(Math::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Math::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(Math::exp(0.0f32), 1.0);
        assert!(Math::exp(f32::NAN).is_nan() && Math::tanh(f32::NAN).is_nan());
        assert_eq!(Math::tanh(f32::INFINITY), 1.0);
    }
}
