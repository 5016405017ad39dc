//! The operations in plain Rust: for other processors, and the reference for the rest.
//!
//! Arrays rather than one element at a time, so that the compiler uses the vectors of its target.

use std::array::from_fn;

use half::{bf16, f16};

use super::super::moments::round_with;
use super::{LANES, Simd};

/// Needs nothing, so anyone may make one.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn both(a: V, b: V, op: impl Fn(f32, f32) -> f32) -> V {
    from_fn(|i| op(a[i], b[i]))
}

impl Simd for Portable {
    type V = V;
    type Sums = [f64; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, src: &[f32; LANES]) -> V {
        *src
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16; LANES]) -> V {
        src.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16; LANES]) -> V {
        src.map(f16::to_f32_const)
    }
    #[inline(always)]
    fn store(self, v: V, dst: &mut [f32; LANES]) {
        *dst = v;
    }
    #[inline(always)]
    fn store_bf16(self, v: V, dst: &mut [bf16; LANES]) {
        *dst = v.map(|x| bf16::from_bits(round_bf16(x)));
    }
    #[inline(always)]
    fn store_bf16_random(self, v: V, random: &[u16; LANES], dst: &mut [bf16; LANES]) {
        *dst = from_fn(|i| round_with(v[i], u32::from(random[i])));
    }
    #[inline(always)]
    fn load_split(self, weights: &[bf16; LANES], low: &[u16; LANES]) -> V {
        from_fn(|i| {
            let high = u32::from(weights[i].to_bits()) << 16;
            f32::from_bits(high.wrapping_add(i32::from(low[i] as i16) as u32))
        })
    }
    #[inline(always)]
    fn splits_simply(self, v: V) -> bool {
        // Differences whose sign says so, not comparisons: those become vectors.
        let mut signs = 0;
        for x in v {
            let bits = x.to_bits();
            let no_tie = ((bits & 0x1_ffff) ^ 0x8000).wrapping_sub(1);
            let is_small = 0x7f7f_7fff_u32.wrapping_sub(bits & 0x7fff_ffff);
            signs |= no_tie | is_small;
        }
        signs >> 31 == 0
    }
    #[inline(always)]
    fn store_split(self, v: V, weights: &mut [bf16; LANES], low: &mut [u16; LANES]) {
        *weights = v.map(|x| bf16::from_bits((x.to_bits().wrapping_add(0x8000) >> 16) as u16));
        *low = v.map(|x| x.to_bits() as u16);
    }
    #[inline(always)]
    fn store_f16(self, v: V, dst: &mut [f16; LANES]) {
        *dst = v.map(f16::from_f32_const);
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn is_ordered(self, a: V) -> bool {
        !a.iter().any(|x| x.is_nan())
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        [0.0; LANES]
    }
    #[inline(always)]
    fn add_squares(self, sums: Self::Sums, v: V) -> Self::Sums {
        from_fn(|i| {
            let x = f64::from(v[i]);
            sums[i] + x * x
        })
    }
    #[inline(always)]
    fn read_sums(self, sums: Self::Sums) -> [f64; LANES] {
        sums
    }
}

/// Adding half of the last kept bit, less one when that bit is even, rounds to nearest even.
#[inline(always)]
fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // The quiet bit keeps a NaN whose payload is in the lost half from becoming an infinity.
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}
