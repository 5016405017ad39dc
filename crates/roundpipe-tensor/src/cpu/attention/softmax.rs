//! The parts of attention that work on a block of scores, element by element.
//!
//! A block of scores lies transposed, `[keys, QUERIES]`: a vector holds one key's scores with many
//! queries, so that maxima and sums over keys need no reduction inside a vector. Scores are in
//! units of ln 2 (the queries were multiplied by log2 e), so that e^x is 2^x here.

use super::QUERIES;
use super::level::{self, AttentionAcc, LevelLoop};
use super::tile::LANES;

/// One number per query of a block.
pub(super) type PerQuery<T> = [T; QUERIES];

/// What the softmax of a block of queries knows so far.
pub(super) struct Running<T> {
    /// Largest score.
    pub max: PerQuery<T>,
    /// Sum of 2^(score - max).
    pub sum: PerQuery<T>,
}

/// Turns scores `[keys, QUERIES]` into weights 2^(score - max) after raising the running maximum,
/// adds them to the running sum, and gives in `rescale` the factor of everything summed under the
/// old maximum.
pub(super) fn online_softmax<T: AttentionAcc>(
    scores: &mut [T],
    lanes: usize,
    running: &mut Running<T>,
    rescale: &mut PerQuery<T>,
) {
    level::run(OnlineSoftmax {
        scores,
        lanes,
        running,
        rescale,
    });
}

struct OnlineSoftmax<'a, T> {
    scores: &'a mut [T],
    lanes: usize,
    running: &'a mut Running<T>,
    rescale: &'a mut PerQuery<T>,
}

impl<T: AttentionAcc> LevelLoop for OnlineSoftmax<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(mut self) {
        if self.lanes == QUERIES {
            self.strip::<FMA, QUERIES>(0);
        } else {
            (0..self.lanes)
                .step_by(LANES)
                .for_each(|at| self.strip::<FMA, LANES>(at));
        }
    }
}

impl<T: AttentionAcc> OnlineSoftmax<'_, T> {
    #[inline(always)]
    fn strip<const FMA: bool, const W: usize>(&mut self, at: usize) {
        let old: [T; W] = take(&self.running.max, at);
        let mut max = old;
        for row in self.scores.chunks_exact(QUERIES) {
            let row: [T; W] = take(row, at);
            for (m, s) in max.iter_mut().zip(row) {
                *m = if s > *m { s } else { *m };
            }
        }
        self.running.max[at..at + W].copy_from_slice(&max);
        // A query that has seen nothing yet would subtract infinities.
        let base = max.map(|m| if m == T::NEG_INF { T::ZERO } else { m });
        let mut sum: [T; W] = take(&self.running.sum, at);
        for i in 0..W {
            let rescale = T::exp2::<FMA>(old[i] - base[i]);
            self.rescale[at + i] = rescale;
            sum[i] *= rescale;
        }
        for row in self.scores.chunks_exact_mut(QUERIES) {
            let row = &mut row[at..at + W];
            for i in 0..W {
                row[i] = T::exp2::<FMA>(row[i] - base[i]);
                sum[i] += row[i];
            }
        }
        self.running.sum[at..at + W].copy_from_slice(&sum);
    }
}

/// Multiplies each query's column of `rows` `[n, QUERIES]` by its factor.
pub(super) fn scale<T: AttentionAcc>(rows: &mut [T], factor: &PerQuery<T>) {
    level::run(ScaleRow { rows, factor });
}

struct ScaleRow<'a, T> {
    rows: &'a mut [T],
    factor: &'a PerQuery<T>,
}

impl<T: AttentionAcc> LevelLoop for ScaleRow<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        for row in self.rows.chunks_exact_mut(QUERIES) {
            row.iter_mut().zip(self.factor).for_each(|(x, f)| *x *= *f);
        }
    }
}

/// The backward step of a block: scores become weights 2^(score - lse), and the weights' gradients
/// `grads` become those of the scores, weight · (gradient - delta).
pub(super) fn weigh_back<T: AttentionAcc>(
    scores: &mut [T],
    grads: &mut [T],
    lse: &PerQuery<T>,
    delta: &PerQuery<T>,
) {
    level::run(WeighBack {
        scores,
        grads,
        lse,
        delta,
    });
}

struct WeighBack<'a, T> {
    scores: &'a mut [T],
    grads: &'a mut [T],
    lse: &'a PerQuery<T>,
    delta: &'a PerQuery<T>,
}

impl<T: AttentionAcc> LevelLoop for WeighBack<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        let (lse, delta) = (*self.lse, *self.delta);
        let grads = self.grads.chunks_exact_mut(QUERIES);
        for (scores, grads) in self.scores.chunks_exact_mut(QUERIES).zip(grads) {
            for i in 0..QUERIES {
                let weight = T::exp2::<FMA>(scores[i] - lse[i]);
                scores[i] = weight;
                grads[i] = weight * (grads[i] - delta[i]);
            }
        }
    }
}

#[inline(always)]
fn take<T: Copy, const W: usize>(from: &[T], at: usize) -> [T; W] {
    from[at..at + W].try_into().expect("W elements")
}
