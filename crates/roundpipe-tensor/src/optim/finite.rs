//! What keeps infinities and NaN out of weights and moments.
//!
//! A pass computes the new values of a block and hands them to [`commit`], which writes them: all
//! of an element, or, when one of them is not finite or the weight would round to an infinity,
//! none. It never asks why; the pass reports that it happened.
//!
//! # Invariants
//! - An element whose values were finite stays so, whatever the gradient and the settings.
//! - Where all new values are finite, the bits written are those of the formulas.

use super::simd::{LANES, Simd, SlabElement};

/// Writes the new values of a block to their slabs, the weights first, and the weights rounded to
/// `working`. Returns whether one of the first `live` elements kept old values that were finite,
/// because a new one was not.
#[inline(always)]
pub(super) fn commit<S: Simd, W: SlabElement, const N: usize>(
    s: S,
    live: usize,
    new: [S::V; N],
    slabs: [Option<&mut [f32; LANES]>; N],
    working: Option<&mut [W; LANES]>,
) -> bool {
    // Zero times a finite number is a zero; times anything else it is a NaN, and that stays in a
    // sum.
    let zero = s.splat(0.0);
    let mut probe = s.mul(new[0], zero);
    for value in &new[1..] {
        probe = s.add(probe, s.mul(*value, zero));
    }
    let mut rounded = [W::default(); LANES];
    W::store(s, new[0], &mut rounded);
    if W::NARROW {
        probe = s.add(probe, s.mul(W::load(s, &rounded), zero));
    }
    if s.is_ordered(probe) {
        for (value, slab) in new.into_iter().zip(slabs) {
            if let Some(slab) = slab {
                s.store(value, slab);
            }
        }
        if let Some(working) = working {
            *working = rounded;
        }
        return false;
    }
    let mut bad = [0.0; LANES];
    s.store(probe, &mut bad);
    let mut values = [[0.0; LANES]; N];
    for (value, lanes) in new.into_iter().zip(&mut values) {
        s.store(value, lanes);
    }
    let (weights, kept) = write_finite(live, &bad, &values, slabs);
    if let Some(working) = working {
        W::store(s, s.load(&weights), working);
    }
    kept
}

/// The same one by one: elements whose `bad` is NaN keep what they had. Returns the weights that
/// the block has now.
#[cold]
fn write_finite<const N: usize>(
    live: usize,
    bad: &[f32; LANES],
    values: &[[f32; LANES]; N],
    mut slabs: [Option<&mut [f32; LANES]>; N],
) -> ([f32; LANES], bool) {
    let mut kept = false;
    for (i, bad) in bad.iter().enumerate() {
        let present = slabs
            .iter_mut()
            .zip(values)
            .filter_map(|(slab, new)| Some((slab.as_mut()?, new)));
        if bad.is_nan() {
            let mut was_finite = true;
            present.for_each(|(slab, _)| was_finite &= slab[i].is_finite());
            kept |= was_finite && i < live;
        } else {
            present.for_each(|(slab, new)| slab[i] = new[i]);
        }
    }
    (slabs[0].as_deref().copied().unwrap_or_default(), kept)
}
