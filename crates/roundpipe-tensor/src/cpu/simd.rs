//! Vector code chosen at run time, and mathematics that vectorises.
//!
//! The crate is built for the plainest processor of its architecture. A loop wrapped by
//! [`vectorize!`] is compiled three times (AVX-512, AVX2, plain) and the best version the processor
//! has is called. No version uses fused multiply-add unless the loop says so, so all give the same
//! bits.
//!
//! The functions of [`Math`] are branch-free polynomials, so that loops over them vectorise and
//! give the same bits on every machine. Relative errors for f32 are below 4e-7 (erfc: 1.5e-6).

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

/// Defines `fn $name` that runs its body compiled for the best level of the processor. The body
/// must be plain safe (or internally unsafe) Rust whose callees are `#[inline(always)]`.
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
        // Move exponent and mantissa into place, then rescale by 2^112: subnormals come out right
        // because the multiplication normalises them. Infinity and NaN get the full exponent
        // afterwards.
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
        let special = magnitude | 0x7f80_0000;
        let value = if (bits & 0x7c00) == 0x7c00 {
            special
        } else {
            scaled.to_bits()
        };
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
        // Subnormal results: adding 0.5 aligns the mantissa so that the sum's low bits are the
        // answer.
        let tiny = (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(0x3f00_0000);
        let nan = if magnitude > 0x7f80_0000 {
            0x7e00 | ((magnitude >> 13) & 0x3ff)
        } else {
            0x7c00
        };
        let finite = if magnitude < 0x3880_0000 {
            tiny
        } else {
            normal
        };
        let value = if magnitude >= 0x4780_0000 {
            nan
        } else {
            finite
        };
        Self::from_bits((value | sign) as u16)
    }
}

/// Functions whose library versions are calls; these inline and, for f32, vectorise.
pub(crate) trait Math: Copy {
    fn exp(self) -> Self;
    /// e^x - 1, exact near 0.
    fn exp_m1(self) -> Self;
    fn ln(self) -> Self;
    /// ln(1 + e^x), exact at both ends.
    fn softplus(self) -> Self;
    fn tanh(self) -> Self;
    /// f32: full accuracy up to 10^8; beyond, the error grows with the argument.
    fn sin(self) -> Self;
    /// As [`Math::sin`].
    fn cos(self) -> Self;
    fn erf(self) -> Self;
    /// 1 - erf(x), exact in the tail.
    fn erfc(self) -> Self;
}

impl Math for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        // e^x = 2^n · e^r, r = x - n·ln 2 in two parts, |r| <= ln 2 / 2; a polynomial of degree 6
        // for e^r.
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
        // 2^n in two factors, so that results near the ends of the range neither overflow nor
        // vanish early.
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
        let small = x + x
            * s
            * (-0.333_333_34 + s * (0.133_333_33 + s * (-0.053_968_254 + s * 0.021_869_488)));
        let large = 1.0 - 2.0 / (Math::exp(2.0 * x) + 1.0);
        let y = if x < 0.25 { small } else { large };
        y.copysign(self)
    }

    #[inline(always)]
    fn exp_m1(self) -> f32 {
        let x = self;
        let mut p = 2.480_158_7e-5;
        for c in [
            1.984_127e-4,
            1.388_888_9e-3,
            8.333_333e-3,
            4.166_666_7e-2,
            1.666_666_7e-1,
            0.5,
        ] {
            p = p * x + c;
        }
        if x.abs() < 0.5 {
            x + x * x * p
        } else {
            Math::exp(x) - 1.0
        }
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        // x = 2^k · m with m in [√½, √2); with f = m - 1 and s = f / (2 + f), ln m = 2 · artanh s,
        // written as f - s · (f - r) so that f, which is exact, carries the result near 1.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const ROOT_HALF: u32 = 0x3f35_04f3;
        let tiny = self < f32::MIN_POSITIVE;
        let bits = if tiny { self * 33_554_432.0 } else { self }.to_bits();
        let exponent = (bits.wrapping_sub(ROOT_HALF) as i32) >> 23;
        let m = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23));
        let k = exponent as f32 - if tiny { 25.0 } else { 0.0 };
        let f = m - 1.0;
        let s = f / (2.0 + f);
        let z = s * s;
        let r = z * (0.666_666_7 + z * (0.4 + z * (0.285_714_3 + z * 0.222_222_22)));
        let y = k * LN2_HIGH - ((s * (f - r) - k * LN2_LOW) - f);
        let y = if self < 0.0 { f32::NAN } else { y };
        let y = if self == 0.0 { f32::NEG_INFINITY } else { y };
        if self < f32::INFINITY { y } else { self }
    }

    #[inline(always)]
    fn softplus(self) -> f32 {
        // max(x, 0) + ln(1 + u), u = e^-|x| in (0, 1]; ln(1 + u) = 2 · artanh s, s = u / (2 + u) <=
        // 1/3.
        let u = Math::exp(-self.abs());
        let s = u / (2.0 + u);
        let z = s * s;
        let mut p = 1.0 / 17.0;
        for c in [
            1.0 / 15.0,
            1.0 / 13.0,
            1.0 / 11.0,
            1.0 / 9.0,
            1.0 / 7.0,
            0.2,
            1.0 / 3.0,
            1.0,
        ] {
            p = p * z + c;
        }
        self.max(0.0) + 2.0 * s * p
    }

    #[inline(always)]
    fn sin(self) -> f32 {
        sin_quarters(self, 0)
    }

    #[inline(always)]
    fn cos(self) -> f32 {
        sin_quarters(self, 1)
    }

    #[inline(always)]
    fn erf(self) -> f32 {
        // Near 0 the power series, elsewhere the complement.
        let x = self.abs();
        let z = x * x;
        let mut p = -8.548_327e-4;
        for c in [
            5.223_977_6e-3,
            -2.686_617e-2,
            1.128_379_2e-1,
            -3.761_264e-1,
            std::f32::consts::FRAC_2_SQRT_PI,
        ] {
            p = p * z + c;
        }
        let y = if x < 0.5 { x * p } else { 1.0 - tail(x) };
        y.copysign(self)
    }

    #[inline(always)]
    fn erfc(self) -> f32 {
        let y = tail(self.abs());
        if self < 0.0 { 2.0 - y } else { y }
    }
}

/// erfc(x) for x >= 0: e^(-x²) times a polynomial in t = 1 / (1 + x / 2), which was fitted to
/// erfc(x) · e^(x²) / t by interpolation at Chebyshev nodes over x <= 10.2 (relative error 6e-8).
#[inline(always)]
fn tail(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * x);
    let mut p = -0.059_842_703;
    for c in [
        0.288_369_8,
        -0.495_058_25,
        0.286_999_54,
        -0.032_689_158,
        0.205_189_35,
        0.242_494_25,
        0.282_454_96,
        0.282_082_16,
    ] {
        p = p * t + c;
    }
    // x² rounded would cost x² units in the last place: square the upper half of x exactly, and
    // correct by the rest, which is small.
    let upper = f32::from_bits(x.to_bits() & 0xffff_f000);
    let rest = (x - upper) * (x + upper);
    let correction = 1.0 - rest * (1.0 - rest * (0.5 - rest * 0.166_666_67));
    // From 10.2 on the result is below the smallest f32; infinity would give NaN by its own
    // difference.
    let y = t * p * Math::exp(-upper * upper) * correction;
    if x > 10.2 { 0.0 } else { y }
}

/// sin(x + quarters · π/2), computed in f64 because the reduction to [-π/4, π/4] cancels.
#[inline(always)]
fn sin_quarters(x: f32, quarters: u64) -> f32 {
    // π/2 in two parts; the upper has few enough bits that its multiples stay exact.
    const UPPER: f64 = 1.570_796_325_802_803;
    const LOWER: f64 = 9.920_935_796_805_412e-10;
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * UPPER) - n * LOWER;
    let z = r * r;
    let sin =
        r + r * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0))));
    let mut cos = -1.0 / 3_628_800.0;
    for c in [1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0] {
        cos = cos * z + c;
    }
    let quadrant = shifted.to_bits().wrapping_add(quarters);
    let y = if quadrant & 1 == 0 { sin } else { cos };
    (if quadrant & 2 == 0 { y } else { -y }) as f32
}

impl Math for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn exp_m1(self) -> f64 {
        f64::exp_m1(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn softplus(self) -> f64 {
        self.max(0.0) + (-self.abs()).exp().ln_1p()
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    #[inline(always)]
    fn sin(self) -> f64 {
        f64::sin(self)
    }

    #[inline(always)]
    fn cos(self) -> f64 {
        f64::cos(self)
    }

    fn erf(self) -> f64 {
        let x = self.abs();
        if x.is_nan() {
            return self;
        }
        if x < 2.0 {
            series(x).copysign(self)
        } else {
            (1.0 - fraction(x)).copysign(self)
        }
    }

    fn erfc(self) -> f64 {
        let x = self.abs();
        if x.is_nan() {
            return self;
        }
        if x < 0.5 {
            return 1.0 - series(x).copysign(self);
        }
        let y = if x < 2.0 {
            1.0 - series(x)
        } else {
            fraction(x)
        };
        if self < 0.0 { 2.0 - y } else { y }
    }
}

/// erf(x) for 0 <= x < 2: 2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (1 · 3 · … · (2n+1)), whose terms are
/// all positive.
fn series(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term > sum * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * gauss(x) * sum
}

/// erfc(x) for x >= 2: e^(-x²)/√π times the continued fraction 1/(x + ½/(x + 1/(x + 1½/(x + …)))).
fn fraction(x: f64) -> f64 {
    if x > 28.0 {
        return 0.0;
    }
    let mut below = x;
    for n in (1..=100).rev() {
        below = x + f64::from(n) * 0.5 / below;
    }
    0.5 * std::f64::consts::FRAC_2_SQRT_PI * gauss(x) / below
}

/// e^(-x²) without the error of rounding x².
fn gauss(x: f64) -> f64 {
    let upper = f64::from_bits(x.to_bits() & 0xffff_ffff_f800_0000);
    (-upper * upper).exp() * (-(x - upper) * (x + upper)).exp()
}

#[cfg(test)]
mod tests {
    use super::{Math, Widen};
    use half::{bf16, f16};

    /// All 65,536 patterns widen as the `half` crate says, and every f32 near a rounding edge
    /// narrows so.
    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and Miri rounds the standard functions at random"
    )]
    fn sixteen_bit_conversions_agree_with_half() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(
                b.widen().to_bits() == b.to_f32().to_bits() || b.is_nan(),
                "bf16 {bits:#x}"
            );
            assert!(
                h.widen().to_bits() == h.to_f32().to_bits() || h.is_nan(),
                "f16 {bits:#x}"
            );
            for low in [
                0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x0fff, 0x1000, 0x1001, 0x3000,
            ] {
                let x = f32::from_bits(u32::from(bits) << 16 | low);
                if x.is_nan() {
                    assert!(
                        <bf16 as Widen>::narrow(x).is_nan() && <f16 as Widen>::narrow(x).is_nan()
                    );
                    continue;
                }
                assert_eq!(
                    <bf16 as Widen>::narrow(x).to_bits(),
                    bf16::from_f32(x).to_bits(),
                    "bf16 of {x:e}"
                );
                assert_eq!(
                    <f16 as Widen>::narrow(x).to_bits(),
                    f16::from_f32(x).to_bits(),
                    "f16 of {x:e}"
                );
            }
        }
    }

    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and Miri rounds the standard functions at random"
    )]
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

    /// Largest relative error of `f` against `exact` over a sweep; exact results below `floor` do
    /// not count.
    fn sweep(
        name: &str,
        limit: f64,
        floor: f64,
        range: [f64; 2],
        f: fn(f32) -> f32,
        exact: fn(f64) -> f64,
    ) {
        let steps = 200_000;
        let (mut worst, mut at) = (0.0, 0.0);
        for i in 0..=steps {
            let x = (range[0] + (range[1] - range[0]) * f64::from(i) / f64::from(steps)) as f32;
            let want = exact(f64::from(x));
            let error = (f64::from(f(x)) - want).abs() / want.abs().max(floor);
            if error > worst {
                (worst, at) = (error, x);
            }
        }
        assert!(worst < limit, "{name}({at}): relative error {worst:e}");
    }

    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and Miri rounds the standard functions at random"
    )]
    fn f32_functions_are_close_everywhere() {
        sweep("ln", 2.5e-7, 1e-30, [1e-6, 20.0], Math::ln, f64::ln);
        sweep("ln", 2.5e-7, 1e-30, [0.9, 1.1], Math::ln, f64::ln);
        sweep("ln", 2.5e-7, 1e-30, [1e-42, 1e-37], Math::ln, f64::ln);
        sweep("ln", 2.5e-7, 1e-30, [1e20, 3e38], Math::ln, f64::ln);
        sweep(
            "exp_m1",
            4e-7,
            1e-38,
            [-30.0, 30.0],
            Math::exp_m1,
            f64::exp_m1,
        );
        sweep(
            "exp_m1",
            4e-7,
            1e-38,
            [-1e-3, 1e-3],
            Math::exp_m1,
            f64::exp_m1,
        );
        sweep(
            "softplus",
            4e-7,
            1e-37,
            [-80.0, 80.0],
            Math::softplus,
            Math::softplus,
        );
        // Relative to 1e-3: beside a zero of the function the argument's own rounding counts for
        // more.
        sweep("sin", 1e-7, 1e-3, [-100.0, 100.0], Math::sin, f64::sin);
        sweep("cos", 1e-7, 1e-3, [-100.0, 100.0], Math::cos, f64::cos);
        sweep("sin", 2e-6, 1e-2, [1e7, 1e8], Math::sin, f64::sin);
        sweep("cos", 2e-6, 1e-2, [-1e8, 1e8], Math::cos, f64::cos);
        sweep("erf", 6e-7, 1e-38, [-6.0, 6.0], Math::erf, Math::erf);
        sweep("erf", 6e-7, 1e-38, [-1e-3, 1e-3], Math::erf, Math::erf);
        sweep("erfc", 1.5e-6, 1e-37, [-9.0, 9.0], Math::erfc, Math::erfc);
    }

    #[test]
    fn f32_functions_at_the_ends() {
        assert_eq!(Math::ln(0.0f32), f32::NEG_INFINITY);
        assert_eq!(Math::ln(f32::INFINITY), f32::INFINITY);
        assert_eq!(Math::ln(1.0f32), 0.0);
        assert!(Math::ln(-1.0f32).is_nan() && Math::ln(f32::NAN).is_nan());
        assert_eq!(Math::softplus(f32::INFINITY), f32::INFINITY);
        assert_eq!(Math::softplus(f32::NEG_INFINITY), 0.0);
        assert_eq!(
            [Math::erf(f32::INFINITY), Math::erf(f32::NEG_INFINITY)],
            [1.0, -1.0]
        );
        assert_eq!(
            [Math::erfc(f32::INFINITY), Math::erfc(f32::NEG_INFINITY)],
            [0.0, 2.0]
        );
        assert!(Math::sin(f32::INFINITY).is_nan() && Math::cos(f32::NAN).is_nan());
        assert!(Math::erf(f32::NAN).is_nan() && Math::softplus(f32::NAN).is_nan());
        assert_eq!(Math::exp_m1(f32::NEG_INFINITY), -1.0);
    }

    /// Values computed with 60 digits.
    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and Miri rounds the standard functions at random"
    )]
    fn erf_in_f64_is_exact_to_the_last_digits() {
        let table: [(f64, f64, f64); 17] = [
            (1e-300, 1.1283791670955126e-300, 1.0),
            (1e-10, 1.1283791670955126e-10, 0.999999999887162),
            (0.1, 0.1124629160182849, 0.887537083981715),
            (0.25, 0.27632639016823696, 0.7236736098317631),
            (0.4999, 0.5204119951613866, 0.4795880048386134),
            (0.75, 0.7111556336535151, 0.28884436634648486),
            (1.0, 0.8427007929497149, 0.15729920705028513),
            (1.5, 0.9661051464753108, 0.033894853524689274),
            (1.99, 0.995111413199617, 0.004888586800383003),
            (2.0, 0.9953222650189527, 0.004677734981047266),
            (2.5, 0.999593047982555, 0.0004069520174449589),
            (3.0, 0.9999779095030014, 2.209049699858544e-05),
            (4.0, 0.9999999845827421, 1.541725790028002e-08),
            (5.5, 0.9999999999999927, 7.357847917974398e-15),
            (10.0, 1.0, 2.088487583762545e-45),
            (20.0, 1.0, 5.395865611607901e-176),
            (26.0, 1.0, 5.663192408856143e-296),
        ];
        for (x, erf, erfc) in table {
            let off = |have: f64, want: f64| ((have - want) / want).abs();
            assert!(
                off(Math::erf(x), erf) < 5e-16,
                "erf({x}) = {:e}",
                Math::erf(x)
            );
            assert!(
                off(Math::erf(-x), -erf) < 5e-16,
                "erf(-{x}) = {:e}",
                Math::erf(-x)
            );
            // Between ½ and 2 the complement loses what 1 - erf cancels.
            assert!(
                (Math::erfc(x) - erfc).abs() < 3e-16 || off(Math::erfc(x), erfc) < 3e-15,
                "erfc({x})"
            );
            assert!(off(Math::erfc(-x), 2.0 - erfc) < 5e-16, "erfc(-{x})");
        }
        assert!(Math::erf(f64::NAN).is_nan() && Math::erfc(f64::INFINITY) == 0.0);
    }
}
