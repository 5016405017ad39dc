//! The operations with NEON: four registers are one vector.

// The base of most aarch64 targets has NEON, and then only the loads and stores are unsafe.
#![allow(unused_unsafe)]

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use half::{bf16, f16};

use super::{LANES, Simd, SlabPass};

/// Proof that the processor has NEON.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Neon(());

impl Neon {
    /// The proof, where it holds.
    pub(in super::super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    pub(super) fn run<P: SlabPass>(self, pass: P) -> P::Output {
        #[target_feature(enable = "neon")]
        fn compiled<P: SlabPass>(s: Neon, pass: P) -> P::Output {
            pass.run(s)
        }
        // SAFETY: the feature of `compiled` is the one that `detect` found when it made `self`.
        unsafe { compiled(self, pass) }
    }
}

/// Runs intrinsics of the feature that `Neon` proves.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: the caller has a `Neon`, which exists only where `detect` found the feature; the
        // pointers, where there are any, come from references to as many elements as are read or
        // written, and these loads and stores need no more alignment than the element's.
        unsafe { $($body)* }
    };
}

type V = [float32x4_t; 4];

#[inline(always)]
fn quarters<T>(block: &[T; LANES]) -> [&[T; 4]; 4] {
    let (quarters, _) = block.as_chunks();
    from_fn(|i| &quarters[i])
}

#[inline(always)]
fn quarters_mut<T>(block: &mut [T; LANES]) -> impl Iterator<Item = &mut [T; 4]> {
    block.as_chunks_mut().0.iter_mut()
}

#[inline(always)]
fn round_bf16(_: Neon, v: float32x4_t) -> uint16x4_t {
    proven!({
        let bits = vreinterpretq_u32_f32(v);
        let kept = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(kept, vdupq_n_u32(1));
        let up = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, up));
        let quiet = vorrq_u32(kept, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
    })
}

#[inline(always)]
fn round_randomly(_: Neon, v: float32x4_t, random: &[u16; 4]) -> uint16x4_t {
    proven!({
        let bits = vreinterpretq_u32_f32(v);
        let random = vmovl_u16(vld1_u16(random.as_ptr()));
        let up = vshrq_n_u32::<16>(vaddq_u32(bits, random));
        let kept = vshrq_n_u32::<16>(bits);
        let magnitude = vandq_u32(up, vdupq_n_u32(0x7fff));
        let infinite = vceqq_u32(magnitude, vdupq_n_u32(0x7f80));
        let rounded = vbslq_u32(infinite, kept, up);
        let quiet = vorrq_u32(kept, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
    })
}

/// The conversions of the base instruction set, whose intrinsics need Rust's unstable `f16`.
#[inline(always)]
fn widen_f16(_: Neon, half: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the instruction is part of NEON (proven by the argument) and touches registers only.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
             options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

#[inline(always)]
fn narrow_f16(_: Neon, wide: float32x4_t) -> uint16x4_t {
    let half: uint16x4_t;
    // SAFETY: the instruction is part of NEON (proven by the argument) and touches registers only.
    unsafe {
        asm!("fcvtn {half:v}.4h, {wide:v}.4s", half = lateout(vreg) half, wide = in(vreg) wide,
             options(pure, nomem, nostack, preserves_flags));
    }
    half
}

impl Simd for Neon {
    type V = V;
    type Sums = [float64x2_t; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        proven!([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    fn load(self, src: &[f32; LANES]) -> V {
        quarters(src).map(|part| proven!(vld1q_f32(part.as_ptr())))
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16; LANES]) -> V {
        quarters(src).map(|part| {
            proven!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(
                part.as_ptr().cast()
            ))))
        })
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16; LANES]) -> V {
        quarters(src).map(|part| widen_f16(self, proven!(vld1_u16(part.as_ptr().cast()))))
    }
    #[inline(always)]
    fn store(self, v: V, dst: &mut [f32; LANES]) {
        for (dst, v) in quarters_mut(dst).zip(v) {
            proven!(vst1q_f32(dst.as_mut_ptr(), v));
        }
    }
    #[inline(always)]
    fn store_bf16(self, v: V, dst: &mut [bf16; LANES]) {
        for (dst, v) in quarters_mut(dst).zip(v) {
            proven!(vst1_u16(dst.as_mut_ptr().cast(), round_bf16(self, v)));
        }
    }
    #[inline(always)]
    fn store_bf16_random(self, v: V, random: &[u16; LANES], dst: &mut [bf16; LANES]) {
        let random = quarters(random);
        for (i, dst) in quarters_mut(dst).enumerate() {
            let rounded = round_randomly(self, v[i], random[i]);
            proven!(vst1_u16(dst.as_mut_ptr().cast(), rounded));
        }
    }
    #[inline(always)]
    fn load_split(self, weights: &[bf16; LANES], low: &[u16; LANES]) -> V {
        let (weights, low) = (quarters(weights), quarters(low));
        from_fn(|i| {
            proven!({
                let high = vshll_n_u16::<16>(vld1_u16(weights[i].as_ptr().cast()));
                let low = vmovl_s16(vreinterpret_s16_u16(vld1_u16(low[i].as_ptr())));
                vreinterpretq_f32_u32(vaddq_u32(high, vreinterpretq_u32_s32(low)))
            })
        })
    }
    #[inline(always)]
    fn splits_simply(self, v: V) -> bool {
        v.iter().all(|part| {
            proven!({
                let bits = vreinterpretq_u32_f32(*part);
                let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff_ffff));
                let large = vcgeq_u32(magnitude, vdupq_n_u32(0x7f7f_8000));
                let end = vandq_u32(bits, vdupq_n_u32(0x1_ffff));
                let tie = vceqq_u32(end, vdupq_n_u32(0x8000));
                vmaxvq_u32(vorrq_u32(large, tie)) == 0
            })
        })
    }
    #[inline(always)]
    fn store_split(self, v: V, weights: &mut [bf16; LANES], low: &mut [u16; LANES]) {
        for ((weights, low), v) in quarters_mut(weights).zip(quarters_mut(low)).zip(v) {
            proven!({
                let bits = vreinterpretq_u32_f32(v);
                let rounded = vshrn_n_u32::<16>(vaddq_u32(bits, vdupq_n_u32(0x8000)));
                vst1_u16(weights.as_mut_ptr().cast(), rounded);
                vst1_u16(low.as_mut_ptr(), vmovn_u32(bits));
            })
        }
    }
    #[inline(always)]
    fn store_f16(self, v: V, dst: &mut [f16; LANES]) {
        for (dst, v) in quarters_mut(dst).zip(v) {
            proven!(vst1_u16(dst.as_mut_ptr().cast(), narrow_f16(self, v)));
        }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        from_fn(|i| proven!(vaddq_f32(a[i], b[i])))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        from_fn(|i| proven!(vsubq_f32(a[i], b[i])))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        from_fn(|i| proven!(vmulq_f32(a[i], b[i])))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        from_fn(|i| proven!(vdivq_f32(a[i], b[i])))
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(|a| proven!(vsqrtq_f32(a)))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        from_fn(|i| proven!(vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i])))
    }
    #[inline(always)]
    fn is_ordered(self, a: V) -> bool {
        a.iter()
            .all(|part| proven!(vminvq_u32(vceqq_f32(*part, *part)) != 0))
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        proven!([vdupq_n_f64(0.0); 8])
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::Sums, v: V) -> Self::Sums {
        from_fn(|i| {
            proven!({
                let x = match i % 2 {
                    0 => vcvt_f64_f32(vget_low_f32(v[i / 2])),
                    _ => vcvt_high_f64_f32(v[i / 2]),
                };
                vaddq_f64(sums[i], vmulq_f64(x, x))
            })
        })
    }
    #[inline(always)]
    fn read_sums(self, sums: Self::Sums) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        for (dst, sum) in lanes.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
            proven!(vst1q_f64(dst.as_mut_ptr(), sum));
        }
        lanes
    }
}
