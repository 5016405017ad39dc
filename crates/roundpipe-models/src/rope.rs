//! Cosines and sines of rotary angles, plain or stretched to longer contexts.
//!
//! Angles are computed in f64 and rounded once; the tables of a model are shared by all its blocks.

use std::f64::consts::PI;

use rayon::prelude::*;
use roundpipe::{DType, Param, TensorResult};

use crate::config::{RopeConfig, RopeScaling};

/// Cosines and sines [positions, head_dim / 2], frozen.
#[derive(Debug, Clone)]
pub(crate) struct RopeTables {
    pub(crate) cos: Param,
    pub(crate) sin: Param,
}

/// Positions that a thread computes at once.
const ROWS: usize = 256;

impl RopeTables {
    /// Tables of zeros, which take no memory until they are filled.
    pub(crate) fn zeros(positions: usize, head_dim: usize) -> TensorResult<Self> {
        let table = || Param::zeros(DType::F32, &[positions, head_dim / 2]).map(Param::frozen);
        Ok(Self {
            cos: table()?,
            sin: table()?,
        })
    }

    /// Writes the values. Each depends on its place alone, so any number of threads gives the same.
    pub(crate) fn fill(&self, rope: &RopeConfig) -> TensorResult<()> {
        let pairs = self.cos.shape().dims()[1];
        if pairs == 0 {
            return Ok(());
        }
        let (steps, scale) = angles(rope, 2 * pairs);
        let (cos, sin) = (self.cos.data(), self.sin.data());
        let (mut cos, mut sin) = (cos.write(0..cos.len())?, sin.write(0..sin.len())?);
        let cos = cos.as_mut_slice::<f32>().par_chunks_mut(ROWS * pairs);
        let sin = sin.as_mut_slice::<f32>().par_chunks_mut(ROWS * pairs);
        cos.zip(sin).enumerate().for_each(|(part, (cos, sin))| {
            for (i, (c, s)) in cos.iter_mut().zip(sin).enumerate() {
                let position = part * ROWS + i / pairs;
                let (sine, cosine) = (position as f64 * steps[i % pairs]).sin_cos();
                (*c, *s) = ((cosine * scale) as f32, (sine * scale) as f32);
            }
        });
        Ok(())
    }
}

/// What the plain angle of every pair is divided by.
pub(crate) fn divisors(rope: &RopeConfig, head_dim: usize) -> Vec<f32> {
    let plain = RopeConfig {
        scaling: RopeScaling::None,
        ..*rope
    };
    let (plain, scaled) = (angles(&plain, head_dim).0, angles(rope, head_dim).0);
    let pairs = plain.iter().zip(&scaled);
    pairs
        .map(|(plain, scaled)| (plain / scaled) as f32)
        .collect()
}

/// Angle per position of every pair, and what cosines and sines are multiplied with.
fn angles(rope: &RopeConfig, head_dim: usize) -> (Vec<f64>, f64) {
    let pairs = head_dim / 2;
    let plain = |i: usize| rope.theta.powf(-2.0 * i as f64 / head_dim as f64);
    let each = |f: &dyn Fn(usize, f64) -> f64| (0..pairs).map(|i| f(i, plain(i))).collect();
    match rope.scaling {
        RopeScaling::None => (each(&|_, step| step), 1.0),
        RopeScaling::Linear { factor } => (each(&|_, step| step / factor), 1.0),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original,
        } => {
            let blend = |_: usize, step: f64| {
                // Turns within the trained context decide how much of the plain angle is kept.
                let turns = original * step / (2.0 * PI);
                let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let keep = keep.clamp(0.0, 1.0);
                (1.0 - keep) * step / factor + keep * step
            };
            (each(&blend), 1.0)
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original,
            truncate,
            attention_factor,
        } => {
            // The pair that makes so many turns within the trained context.
            let pair = |turns: f64| {
                head_dim as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let low = low.max(0.0);
            let mut high = high.min(head_dim as f64 - 1.0);
            if low == high {
                high += 0.001;
            }
            let blend = |i: usize, step: f64| {
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                step / factor * divided + step * (1.0 - divided)
            };
            (each(&blend), attention_factor)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ROWS, RopeTables, angles};
    use crate::config::{RopeConfig, RopeScaling};

    /// Every value is that of its position and pair, across the parts of several threads and a
    /// ragged end.
    #[test]
    fn tables_hold_the_angles_of_their_places() {
        let rope = RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        let (positions, head_dim) = (3 * ROWS + 7, 6);
        let tables = RopeTables::zeros(positions, head_dim).unwrap();
        tables.fill(&rope).unwrap();
        let (cos, sin) = (
            tables.cos.to_vec::<f32>().unwrap(),
            tables.sin.to_vec::<f32>().unwrap(),
        );
        assert_eq!(cos.len(), positions * 3);
        for position in 0..positions {
            for (pair, step) in angles(&rope, head_dim).0.into_iter().enumerate() {
                let angle = position as f64 * step;
                let at = position * 3 + pair;
                assert_eq!(
                    (cos[at], sin[at]),
                    (angle.cos() as f32, angle.sin() as f32),
                    "{position} {pair}"
                );
            }
        }
    }

    /// Fast pairs are kept, slow ones divided, and nothing leaves that range.
    #[test]
    fn stretching_keeps_fast_pairs_and_divides_slow_ones() {
        let theta = 500_000.0;
        let plain = angles(
            &RopeConfig {
                theta,
                scaling: RopeScaling::None,
            },
            64,
        )
        .0;
        let llama = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original: 8192.0,
        };
        let yarn = RopeScaling::Yarn {
            factor: 8.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original: 4096.0,
            truncate: false,
            attention_factor: 1.2,
        };
        for scaling in [llama, yarn] {
            let (stretched, _) = angles(&RopeConfig { theta, scaling }, 64);
            assert_eq!(stretched[0], plain[0], "{scaling:?}");
            assert!(
                (stretched[31] * 8.0 / plain[31] - 1.0).abs() < 1e-12,
                "{scaling:?}"
            );
            let within =
                |(s, p): (&f64, &f64)| *s <= p * (1.0 + 1e-12) && *s >= p / 8.0 * (1.0 - 1e-12);
            assert!(stretched.iter().zip(&plain).all(within), "{scaling:?}");
        }
        assert_eq!(
            angles(
                &RopeConfig {
                    theta,
                    scaling: yarn
                },
                64
            )
            .1,
            1.2
        );
    }
}
