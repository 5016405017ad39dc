//! Passes over gradient slabs: norm, scaling, finiteness, accumulation, casts.
//!
//! The squared norm is a sum of f64 in a fixed order: within a chunk, sixteen running sums (element
//! `i` goes to sum `i % 16`) that are then added in order; the chunks' sums are added in order as
//! well.

use std::sync::atomic::{AtomicBool, Ordering};

use super::simd::{LANES, PassIsa, Simd, SlabElement, SlabPass, clamp, padded};
use super::{CHUNK, Floats, FloatsMut, any, check_len, for_each, with_slice};
use crate::cpu::threads::Threads;
use crate::error::Result;

/// The sum of the squares of all elements. Not finite when an element is not.
pub fn squared_norm(threads: &Threads, slab: Floats<'_>) -> f64 {
    squared_norm_with(PassIsa::best(), threads, slab)
}

/// The sums that [`squared_norm`] adds up in order, one per chunk of 65,536 elements. For slabs
/// that are computed piece by piece: pieces of whole chunks, added in order, give the bits of the
/// whole. With `clip_value`, of the elements clipped to between minus it and it; the sum of a chunk
/// with an infinity is still not finite.
pub fn chunk_squares(threads: &Threads, slab: Floats<'_>, clip_value: Option<f32>) -> Vec<f64> {
    chunk_squares_with(PassIsa::best(), threads, slab, clip_value)
}

/// [`chunk_squares`] of the sum of two slabs, which is written nowhere: the bits of [`cast`], then
/// [`accumulate`], then [`chunk_squares`].
///
/// # Errors
/// When the slabs differ in length.
pub fn chunk_squares_of_sum(
    threads: &Threads,
    first: Floats<'_>,
    second: Floats<'_>,
    clip_value: Option<f32>,
) -> Result<Vec<f64>> {
    chunk_squares_of_sum_with(PassIsa::best(), threads, first, second, clip_value)
}

/// What to multiply gradients with so that their norm is at most `max_norm`, as `clip_grad_norm_`
/// does: `max_norm / (norm + 1e-6)`, at most 1. NaN when the norm is NaN.
pub fn clip_factor(squared_norm: f64, max_norm: f64) -> f32 {
    let factor = max_norm / (squared_norm.sqrt() + 1e-6);
    // Not `min`, which would turn a NaN into 1 and hide it.
    (if factor > 1.0 { 1.0 } else { factor }) as f32
}

/// Multiplies every element by `factor`, in f32.
pub fn scale(threads: &Threads, slab: FloatsMut<'_>, factor: f32) {
    scale_with(PassIsa::best(), threads, slab, factor);
}

/// Whether no element is infinite or NaN.
pub fn all_finite(threads: &Threads, slab: Floats<'_>) -> bool {
    all_finite_with(PassIsa::best(), threads, slab)
}

/// Adds `src` to `acc`, in f32.
///
/// # Errors
/// When the slabs differ in length.
pub fn accumulate(threads: &Threads, src: Floats<'_>, acc: &mut [f32]) -> Result<()> {
    accumulate_with(PassIsa::best(), threads, src, acc)
}

/// Writes `src` to `dst` in the type of `dst`, rounded to nearest even.
///
/// # Errors
/// When the slabs differ in length.
pub fn cast(threads: &Threads, src: Floats<'_>, dst: FloatsMut<'_>) -> Result<()> {
    cast_with(PassIsa::best(), threads, src, dst)
}

/// Writes `src` to `dst` as [`cast`] does, except for elements that would become infinite or NaN:
/// they keep what they have. Returns whether one did whose new value was finite in f32.
///
/// # Errors
/// When the slabs differ in length.
pub fn narrow(threads: &Threads, src: &[f32], dst: FloatsMut<'_>) -> Result<bool> {
    narrow_with(PassIsa::best(), threads, src, dst)
}

pub(super) fn narrow_with(
    isa: PassIsa,
    threads: &Threads,
    src: &[f32],
    dst: FloatsMut<'_>,
) -> Result<bool> {
    check_len("narrow", "source", src.len(), dst.len())?;
    Ok(with_slice!(FloatsMut, dst, dst => {
        any(threads, src.chunks(CHUNK).zip(dst.chunks_mut(CHUNK)), |(src, dst)| {
            isa.run(NarrowPass(src, dst))
        })
    }))
}

/// Makes `master` follow weights that the user wrote: an element that does not round to its weight
/// becomes the weight.
///
/// # Errors
/// When the slabs differ in length.
pub fn follow(threads: &Threads, weights: Floats<'_>, master: &mut [f32]) -> Result<()> {
    check_len("follow", "weights", weights.len(), master.len())?;
    with_slice!(Floats, weights, weights => {
        for_each(threads, weights.chunks(CHUNK).zip(master.chunks_mut(CHUNK)), |(weights, master)| {
            PassIsa::Portable.run(FollowPass(weights, master));
        });
    });
    Ok(())
}

pub(super) fn squared_norm_with(isa: PassIsa, threads: &Threads, slab: Floats<'_>) -> f64 {
    chunk_squares_with(isa, threads, slab, None).iter().sum()
}

pub(super) fn chunk_squares_with(
    isa: PassIsa,
    threads: &Threads,
    slab: Floats<'_>,
    clip_value: Option<f32>,
) -> Vec<f64> {
    let mut sums = vec![0.0; slab.len().div_ceil(CHUNK)];
    with_slice!(Floats, slab, slab => {
        for_each(threads, slab.chunks(CHUNK).zip(&mut sums), |(chunk, sum)| {
            *sum = match clip_value {
                Some(bound) => isa.run(ClippedSquaresPass(chunk, bound)),
                None => isa.run(SquaresPass(chunk)),
            };
        });
    });
    sums
}

pub(super) fn chunk_squares_of_sum_with(
    isa: PassIsa,
    threads: &Threads,
    first: Floats<'_>,
    second: Floats<'_>,
    clip_value: Option<f32>,
) -> Result<Vec<f64>> {
    check_len("squares", "second", second.len(), first.len())?;
    let mut sums = vec![0.0; first.len().div_ceil(CHUNK)];
    with_slice!(Floats, first, first => with_slice!(Floats, second, second => {
        let chunks = first.chunks(CHUNK).zip(second.chunks(CHUNK)).zip(&mut sums);
        for_each(threads, chunks, |((first, second), sum)| {
            *sum = isa.run(SumSquaresPass(first, second, clip_value));
        });
    }));
    Ok(sums)
}

pub(super) fn scale_with(isa: PassIsa, threads: &Threads, slab: FloatsMut<'_>, factor: f32) {
    with_slice!(FloatsMut, slab, slab => {
        for_each(threads, slab.chunks_mut(CHUNK), |chunk| isa.run(ScalePass(chunk, factor)));
    });
}

pub(super) fn all_finite_with(isa: PassIsa, threads: &Threads, slab: Floats<'_>) -> bool {
    let finite = AtomicBool::new(true);
    with_slice!(Floats, slab, slab => {
        for_each(threads, slab.chunks(CHUNK), |chunk| {
            // The rest need not be read once the answer is known.
            if finite.load(Ordering::Relaxed) && !isa.run(FinitePass(chunk)) {
                finite.store(false, Ordering::Relaxed);
            }
        });
    });
    finite.into_inner()
}

pub(super) fn accumulate_with(
    isa: PassIsa,
    threads: &Threads,
    src: Floats<'_>,
    acc: &mut [f32],
) -> Result<()> {
    check_len("accumulate", "source", src.len(), acc.len())?;
    with_slice!(Floats, src, src => {
        for_each(threads, src.chunks(CHUNK).zip(acc.chunks_mut(CHUNK)), |(src, acc)| {
            isa.run(AccumulatePass(src, acc));
        });
    });
    Ok(())
}

pub(super) fn cast_with(
    isa: PassIsa,
    threads: &Threads,
    src: Floats<'_>,
    dst: FloatsMut<'_>,
) -> Result<()> {
    check_len("cast", "source", src.len(), dst.len())?;
    with_slice!(Floats, src, src => with_slice!(FloatsMut, dst, dst => {
        for_each(threads, src.chunks(CHUNK).zip(dst.chunks_mut(CHUNK)), |(src, dst)| {
            isa.run(CastPass(src, dst));
        });
    }));
    Ok(())
}

struct SquaresPass<'a, T>(&'a [T]);

impl<T: SlabElement> SlabPass for SquaresPass<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let (blocks, rest) = self.0.as_chunks();
        let mut sums = s.no_sums();
        for block in blocks {
            sums = s.add_squares(sums, T::load(s, block));
        }
        // Zeros change no sum of squares.
        sums = s.add_squares(sums, T::load(s, &padded(rest)));
        s.read_sums(sums).iter().sum()
    }
}

struct SumSquaresPass<'a, A, B>(&'a [A], &'a [B], Option<f32>);

impl<A: SlabElement, B: SlabElement> SlabPass for SumSquaresPass<'_, A, B> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let (first, first_rest) = self.0.as_chunks();
        let (second, second_rest) = self.1.as_chunks();
        let mut sums = s.no_sums();
        for (first, second) in first.iter().zip(second) {
            sums = s.add_squares(sums, sum_of(s, first, second, self.2));
        }
        let rest = sum_of(s, &padded(first_rest), &padded(second_rest), self.2);
        s.read_sums(s.add_squares(sums, rest)).iter().sum()
    }
}

/// The sum of two blocks, clipped where a bound is given.
#[inline(always)]
fn sum_of<S: Simd, A: SlabElement, B: SlabElement>(
    s: S,
    first: &[A; LANES],
    second: &[B; LANES],
    bound: Option<f32>,
) -> S::V {
    let sum = s.add(A::load(s, first), B::load(s, second));
    match bound {
        Some(bound) => clipped(s, sum, s.splat(bound)),
        None => sum,
    }
}

struct ClippedSquaresPass<'a, T>(&'a [T], f32);

impl<T: SlabElement> SlabPass for ClippedSquaresPass<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let bound = s.splat(self.1);
        let (blocks, rest) = self.0.as_chunks();
        let mut sums = s.no_sums();
        for block in blocks.iter().chain([&padded(rest)]) {
            sums = s.add_squares(sums, clipped(s, T::load(s, block), bound));
        }
        s.read_sums(sums).iter().sum()
    }
}

/// A value between minus `bound` and it; NaN for an infinity.
#[inline(always)]
fn clipped<S: Simd>(s: S, value: S::V, bound: S::V) -> S::V {
    // Zero times a number is a zero. Times an infinity it is a NaN, so that clipping does not hide
    // it.
    s.add(clamp(s, value, bound), s.mul(value, s.splat(0.0)))
}

struct ScalePass<'a, T>(&'a mut [T], f32);

impl<T: SlabElement> SlabPass for ScalePass<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(self.1);
        let (blocks, rest) = self.0.as_chunks_mut();
        for block in blocks {
            T::store(s, s.mul(T::load(s, block), factor), block);
        }
        let mut block = padded(rest);
        T::store(s, s.mul(T::load(s, &block), factor), &mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
}

struct FinitePass<'a, T>(&'a [T]);

impl<T: SlabElement> SlabPass for FinitePass<'_, T> {
    type Output = bool;

    /// Zero times a finite number is a zero; times an infinity or a NaN it is a NaN, and that
    /// stays.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let zero = s.splat(0.0);
        let (blocks, rest) = self.0.as_chunks();
        let mut products = s.mul(T::load(s, &padded(rest)), zero);
        for block in blocks {
            products = s.add(products, s.mul(T::load(s, block), zero));
        }
        let mut lanes = [0.0; LANES];
        s.store(products, &mut lanes);
        lanes == [0.0; LANES]
    }
}

struct AccumulatePass<'a, T>(&'a [T], &'a mut [f32]);

impl<T: SlabElement> SlabPass for AccumulatePass<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (src, src_rest) = self.0.as_chunks();
        let (acc, acc_rest) = self.1.as_chunks_mut();
        for (src, acc) in src.iter().zip(acc) {
            s.store(s.add(s.load(acc), T::load(s, src)), acc);
        }
        let mut acc = padded(acc_rest);
        s.store(s.add(s.load(&acc), T::load(s, &padded(src_rest))), &mut acc);
        acc_rest.copy_from_slice(&acc[..acc_rest.len()]);
    }
}

struct FollowPass<'a, T>(&'a [T], &'a mut [f32]);

impl<T: SlabElement> SlabPass for FollowPass<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (weights, master) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
            let (mut rounded, mut back, mut values) =
                ([T::default(); LANES], [0.0; LANES], [0.0; LANES]);
            T::store(s, s.load(&padded(master)), &mut rounded);
            s.store(T::load(s, &rounded), &mut back);
            s.store(T::load(s, &padded(weights)), &mut values);
            for (i, master) in master.iter_mut().enumerate() {
                if back[i].to_bits() != values[i].to_bits() {
                    *master = values[i];
                }
            }
        }
    }
}

struct NarrowPass<'a, T>(&'a [f32], &'a mut [T]);

impl<T: SlabElement> SlabPass for NarrowPass<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (src, src_rest) = self.0.as_chunks();
        let (dst, dst_rest) = self.1.as_chunks_mut();
        let mut kept = false;
        for (src, dst) in src.iter().zip(dst) {
            kept |= narrow_block(s, src, dst);
        }
        let mut block = padded(dst_rest);
        kept |= narrow_block(s, &padded(src_rest), &mut block);
        dst_rest.copy_from_slice(&block[..dst_rest.len()]);
        kept
    }
}

#[inline(always)]
fn narrow_block<S: Simd, T: SlabElement>(s: S, src: &[f32; LANES], dst: &mut [T; LANES]) -> bool {
    let mut rounded = [T::default(); LANES];
    T::store(s, s.load(src), &mut rounded);
    // Zero times a number is a zero; times anything else it is a NaN.
    let probe = s.mul(T::load(s, &rounded), s.splat(0.0));
    if s.is_ordered(probe) {
        *dst = rounded;
        return false;
    }
    let mut bad = [0.0; LANES];
    s.store(probe, &mut bad);
    let mut kept = false;
    for (i, bad) in bad.iter().enumerate() {
        if bad.is_nan() {
            kept |= src[i].is_finite();
        } else {
            dst[i] = rounded[i];
        }
    }
    kept
}

struct CastPass<'a, A, B>(&'a [A], &'a mut [B]);

impl<A: SlabElement, B: SlabElement> SlabPass for CastPass<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (src, src_rest) = self.0.as_chunks();
        let (dst, dst_rest) = self.1.as_chunks_mut();
        for (src, dst) in src.iter().zip(dst) {
            B::store(s, A::load(s, src), dst);
        }
        let mut block = [B::default(); LANES];
        B::store(s, A::load(s, &padded(src_rest)), &mut block);
        dst_rest.copy_from_slice(&block[..dst_rest.len()]);
    }
}
