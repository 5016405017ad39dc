//! Sequences: counting, random numbers, dropout. Element i depends on i and the key alone.

use half::{bf16, f16};

use super::super::access::Call;
use super::super::simd::vectorize;
use super::stage::{StageElement, for_stage};
use super::walk::{ReadOperand, WriteOperand};
use super::{BLOCK, blocks};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::kernel::Dist;
use crate::rng::{RngKey, normal_pair, unit};

/// `[] -> [y]`: start + i · step.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn arange(call: &Call<'_>, start: f64, step: f64) -> Result<()> {
    // SAFETY: promised by the caller.
    let y = unsafe { WriteOperand::new(call, 0) };
    for_stage!(y.dtype(), S => blocks(call, y.numel(), |[out, ..], first, len| {
        S::write(&y, first, &mut out[..len], |out| {
            for (i, y) in out.iter_mut().enumerate() {
                *y = S::from_f64(start + (first + i) as f64 * step);
            }
        });
    }));
    Ok(())
}

/// `[] -> [y]`: a value per element.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn random(call: &Call<'_>, dist: Dist, key: RngKey) -> Result<()> {
    // SAFETY: promised by the caller.
    let y = unsafe { WriteOperand::new(call, 0) };
    let top = match dist {
        Dist::Uniform { high, .. } => below(y.dtype(), high),
        _ => 0.0,
    };
    if !y.dtype().is_float() && !matches!(dist, Dist::Bernoulli { .. }) {
        return Err(call.unsupported());
    }
    for_stage!(y.dtype(), S => blocks(call, y.numel(), |[out, ..], start, len| {
        let mut bits = [0; BLOCK];
        words(key, start, &mut bits);
        S::write(&y, start, &mut out[..len], |out| draw(dist, top, &bits, out));
    }));
    Ok(())
}

/// The words of elements `start..start + BLOCK`; `start` is a multiple of 4.
fn words(key: RngKey, start: usize, out: &mut [u32; BLOCK]) {
    vectorize! {
        fn run(key: RngKey, first: u64, out: &mut [u32]) {
            for (i, four) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *four = key.block(first + i as u64);
            }
        }
    }
    run(key, start as u64 / 4, out);
}

fn draw<S: StageElement>(dist: Dist, top: f64, bits: &[u32; BLOCK], out: &mut [S]) {
    match dist {
        Dist::Uniform { low, high } => {
            for (y, word) in out.iter_mut().zip(bits) {
                *y = S::from_f64((low + f64::from(unit(*word)) * (high - low)).min(top));
            }
        }
        Dist::Normal { mean, std } => {
            for (pair, words) in out.chunks_mut(2).zip(bits.as_chunks::<2>().0) {
                for (y, z) in pair.iter_mut().zip(normal_pair(words[0], words[1])) {
                    *y = S::from_f64(mean + std * f64::from(z));
                }
            }
        }
        Dist::Bernoulli { p } => {
            let limit = threshold(p);
            for (y, word) in out.iter_mut().zip(bits) {
                *y = S::from_i64(i64::from(u64::from(*word) < limit));
            }
        }
    }
}

/// How many of the 2^32 words make an event of probability p.
pub(crate) fn threshold(p: f64) -> u64 {
    (p * 4_294_967_296.0) as u64
}

/// The largest value of a float type below `high`: rounding must not reach a bound that is
/// excluded.
pub(crate) fn below(dtype: DType, high: f64) -> f64 {
    let (nearest, next) = match dtype {
        DType::BF16 => {
            let x = bf16::from_f64(high);
            (
                x.to_f64(),
                bf16::from_bits(step_down(u64::from(x.to_bits()), 15) as u16).to_f64(),
            )
        }
        DType::F16 => {
            let x = f16::from_f64(high);
            (
                x.to_f64(),
                f16::from_bits(step_down(u64::from(x.to_bits()), 15) as u16).to_f64(),
            )
        }
        DType::F32 => (f64::from(high as f32), f64::from((high as f32).next_down())),
        _ => (high, high.next_down()),
    };
    if nearest < high { nearest } else { next }
}

/// The bits of the next float downwards; `sign` is the number of the sign bit.
fn step_down(bits: u64, sign: u32) -> u64 {
    match bits {
        0 => (1 << sign) | 1,
        _ if bits >> sign == 0 => bits - 1,
        _ => bits + 1,
    }
}

/// `[x] -> [y]`.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn dropout(call: &Call<'_>, p: f64, key: RngKey) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, y) = unsafe { (ReadOperand::new(call, 0), WriteOperand::new(call, 0)) };
    if x.dtype() != y.dtype() {
        return Err(call.unsupported());
    }
    match y.dtype() {
        DType::F64 => drop_out::<f64>(call, x, y, p, key),
        DType::F32 | DType::BF16 | DType::F16 => drop_out::<f32>(call, x, y, p, key),
        _ => return Err(call.unsupported()),
    }
    Ok(())
}

fn drop_out<S: Keep>(call: &Call<'_>, x: ReadOperand, y: WriteOperand, p: f64, key: RngKey) {
    let scale = S::from_f64(if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 });
    let limit = threshold(p);
    blocks(call, y.numel(), |[buf, out, _], start, len| {
        let mut bits = [0; BLOCK];
        words(key, start, &mut bits);
        let values = S::read(&x, start, &mut buf[..len]);
        S::write(&y, start, &mut out[..len], |out| {
            S::keep(limit, scale, &bits, values, out)
        });
    });
}

/// Stages that drop out.
trait Keep: StageElement {
    /// Scales the elements whose word reaches the limit, zeroes the others.
    fn keep(limit: u64, scale: Self, words: &[u32], x: &[Self], y: &mut [Self]);
}

macro_rules! keep {
    ($($t:ty),*) => {$(
        impl Keep for $t {
            fn keep(limit: u64, scale: $t, words: &[u32], x: &[$t], y: &mut [$t]) {
                vectorize! {
                    fn run(limit: u64, scale: $t, words: &[u32], x: &[$t], y: &mut [$t]) {
                        for ((y, x), word) in y.iter_mut().zip(x).zip(words) {
                            *y = if u64::from(*word) >= limit { *x * scale } else { 0.0 };
                        }
                    }
                }
                run(limit, scale, words, x, y);
            }
        }
    )*};
}

keep!(f64, f32);
