//! Cosines and sines of rotary angles, plain or stretched to longer contexts.
//!
//! Angles are computed in f64 and rounded once; the tables of a model are shared by all its blocks.

use std::f64::consts::PI;

use roundpipe::{Param, TensorResult};

use crate::config::{RopeConfig, RopeScaling};

/// Cosines and sines [positions, head_dim / 2], frozen.
#[derive(Debug, Clone)]
pub(crate) struct RopeTables {
    pub(crate) cos: Param,
    pub(crate) sin: Param,
}

impl RopeTables {
    pub(crate) fn new(rope: &RopeConfig, positions: usize, head_dim: usize) -> TensorResult<Self> {
        let (steps, scale) = angles(rope, head_dim);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            for step in &steps {
                let (s, c) = (position as f64 * step).sin_cos();
                cos.push((c * scale) as f32);
                sin.push((s * scale) as f32);
            }
        }
        let dims = [positions, head_dim / 2];
        let table = |values: &[f32]| Param::from_slice(values, &dims).map(Param::frozen);
        Ok(Self { cos: table(&cos)?, sin: table(&sin)? })
    }
}

/// Angle per position of every pair, and what cosines and sines are multiplied with.
fn angles(rope: &RopeConfig, head_dim: usize) -> (Vec<f64>, f64) {
    let pairs = head_dim / 2;
    let plain = |i: usize| rope.theta.powf(-2.0 * i as f64 / head_dim as f64);
    let each = |f: &dyn Fn(usize, f64) -> f64| (0..pairs).map(|i| f(i, plain(i))).collect();
    match rope.scaling {
        RopeScaling::None => (each(&|_, step| step), 1.0),
        RopeScaling::Linear { factor } => (each(&|_, step| step / factor), 1.0),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            let blend = |_: usize, step: f64| {
                // Turns within the trained context decide how much of the plain angle is kept.
                let turns = original * step / (2.0 * PI);
                let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let keep = keep.clamp(0.0, 1.0);
                (1.0 - keep) * step / factor + keep * step
            };
            (each(&blend), 1.0)
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, attention_factor } => {
            // The pair that makes so many turns within the trained context.
            let pair =
                |turns: f64| head_dim as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * rope.theta.ln());
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
    use super::angles;
    use crate::config::{RopeConfig, RopeScaling};

    /// Fast pairs are kept, slow ones divided, and nothing leaves that range.
    #[test]
    fn stretching_keeps_fast_pairs_and_divides_slow_ones() {
        let theta = 500_000.0;
        let plain = angles(&RopeConfig { theta, scaling: RopeScaling::None }, 64).0;
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
            assert!((stretched[31] * 8.0 / plain[31] - 1.0).abs() < 1e-12, "{scaling:?}");
            let within = |(s, p): (&f64, &f64)| *s <= p * (1.0 + 1e-12) && *s >= p / 8.0 * (1.0 - 1e-12);
            assert!(stretched.iter().zip(&plain).all(within), "{scaling:?}");
        }
        assert_eq!(angles(&RopeConfig { theta, scaling: yarn }, 64).1, 1.2);
    }
}
