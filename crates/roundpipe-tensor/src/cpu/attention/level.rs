//! The inner loops of attention compiled for what the processor has.
//!
//! As [`vectorize!`](crate::cpu::simd::vectorize), but the loop knows what it is compiled for:
//! whether multiply-add is one instruction (without it, asking for one would be a library call per
//! element) and how wide vectors are. So bits may differ between kinds of processors, as those of
//! products do.

#[cfg(not(target_arch = "x86_64"))]
use super::vector::Quad;
use super::vector::Vector;
use crate::cpu::access::Real;
use crate::cpu::simd;

/// A loop and its operands.
pub(super) trait LevelLoop {
    /// Does the work with vectors of `BYTES`. Must be `#[inline(always)]`.
    fn run<const FMA: bool, const BYTES: usize>(self);
}

/// Runs `job` compiled for the best level of this processor.
pub(super) fn run(job: impl LevelLoop) {
    match simd::level() {
        // SAFETY: `level` found these features on this processor.
        #[cfg(target_arch = "x86_64")]
        simd::Level::Avx512 => unsafe { avx512(job) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        simd::Level::Avx2 => unsafe { avx2(job) },
        // Every aarch64 processor has multiply-add.
        simd::Level::Plain => job.run::<{ cfg!(target_arch = "aarch64") }, 16>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn avx512(job: impl LevelLoop) {
    job.run::<true, 64>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2(job: impl LevelLoop) {
    job.run::<true, 32>();
}

/// What attention computes in: f32, or f64 for f64.
pub(super) trait AttentionAcc: Real {
    /// The registers of 32 and of 64 bytes, where they exist.
    type Wide: Vector<Self>;
    /// As above.
    type Widest: Vector<Self>;

    /// a · b + c, rounded once if `FMA`.
    fn mul_add<const FMA: bool>(a: Self, b: Self, c: Self) -> Self;

    /// 2^x for x <= 0; exactly 0 from -127 on down, NaN for NaN.
    fn exp2<const FMA: bool>(x: Self) -> Self;
}

impl AttentionAcc for f32 {
    #[cfg(target_arch = "x86_64")]
    type Wide = std::arch::x86_64::__m256;
    #[cfg(target_arch = "x86_64")]
    type Widest = std::arch::x86_64::__m512;
    #[cfg(not(target_arch = "x86_64"))]
    type Wide = Quad<f32>;
    #[cfg(not(target_arch = "x86_64"))]
    type Widest = Quad<f32>;

    #[inline(always)]
    fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
        if FMA {
            f32::mul_add(a, b, c)
        } else {
            a * b + c
        }
    }

    #[inline(always)]
    fn exp2<const FMA: bool>(x: f32) -> f32 {
        // 2^x = 2^n · 2^r with |r| <= 1/2 and a polynomial for 2^r, whose own error is 2e-9
        // (minimax).
        const TERMS: [f32; 6] = [
            1.339_993_1e-3,
            9.618_489e-3,
            5.550_328_6e-2,
            0.240_226_46,
            std::f32::consts::LN_2,
            1.0,
        ];
        // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
        const ROUND: f32 = 12_582_912.0;
        // Written so that NaN passes.
        let x = if x < -127.0 { -127.0 } else { x };
        let shifted = x + ROUND;
        let r = x - (shifted - ROUND);
        let mut p = 1.534_581_2e-4;
        for term in TERMS {
            p = AttentionAcc::mul_add::<FMA>(p, r, term);
        }
        // For n = -127 these bits are those of 0.
        p * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
    }
}

impl AttentionAcc for f64 {
    #[cfg(target_arch = "x86_64")]
    type Wide = std::arch::x86_64::__m256d;
    #[cfg(target_arch = "x86_64")]
    type Widest = std::arch::x86_64::__m512d;
    #[cfg(not(target_arch = "x86_64"))]
    type Wide = Quad<f64>;
    #[cfg(not(target_arch = "x86_64"))]
    type Widest = Quad<f64>;

    #[inline(always)]
    fn mul_add<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
        if FMA {
            f64::mul_add(a, b, c)
        } else {
            a * b + c
        }
    }

    #[inline(always)]
    fn exp2<const FMA: bool>(x: f64) -> f64 {
        f64::exp2(x)
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionAcc;

    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and Miri rounds the standard functions at random"
    )]
    fn exp2_is_close_below_zero_and_right_at_the_ends() {
        for i in 0..=126_000 {
            let x = -(i as f32) * 1e-3;
            let exact = f64::from(x).exp2();
            for have in [
                <f32 as AttentionAcc>::exp2::<false>(x),
                <f32 as AttentionAcc>::exp2::<true>(x),
            ] {
                let error = (f64::from(have) - exact).abs() / exact;
                assert!(error < 2e-7, "2^{x}: {error:e}");
            }
        }
        assert_eq!(<f32 as AttentionAcc>::exp2::<false>(0.0), 1.0);
        assert_eq!(<f32 as AttentionAcc>::exp2::<false>(-127.0), 0.0);
        assert_eq!(<f32 as AttentionAcc>::exp2::<false>(f32::NEG_INFINITY), 0.0);
        assert!(<f32 as AttentionAcc>::exp2::<false>(f32::NAN).is_nan());
    }
}
