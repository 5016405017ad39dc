//! How the next token is chosen.

use roundpipe::RngSite;

/// A way to choose among logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 takes the likeliest.
    pub temperature: f64,
    /// Only so many of the likeliest are considered.
    pub top_k: Option<usize>,
    /// Only the likeliest whose probabilities reach this sum are considered, and always the first.
    pub top_p: Option<f64>,
    /// Fixes the choices.
    pub seed: u64,
}

impl Default for Sampler {
    /// The likeliest token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            seed: 0,
        }
    }
}

impl Sampler {
    /// Whether it always takes the likeliest.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 || self.top_k == Some(1)
    }

    /// The index chosen for position `at`, given the logits. Of equal ones the first wins; what is
    /// not a number is never chosen while there is anything else.
    pub fn choose(&self, logits: &[f32], at: u64) -> usize {
        if self.is_greedy() {
            return first_best(logits);
        }
        let likely = self.likely(logits);
        let Some((_, best)) = likely.first().copied() else {
            return first_best(logits);
        };
        let weights: Vec<f64> = likely
            .iter()
            .map(|(_, x)| ((x - best) / self.temperature).exp())
            .collect();
        let kept = match self.top_p {
            Some(p) => reaching(&weights, p),
            None => weights.len(),
        };
        let total: f64 = weights[..kept].iter().sum();
        let key = RngSite {
            seed: self.seed,
            ..RngSite::default()
        }
        .key();
        let mut left = f64::from(key.word(at)) / 4_294_967_296.0 * total;
        for ((index, _), weight) in likely[..kept].iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return *index;
            }
        }
        likely[0].0
    }

    /// Candidates with their logits, the likeliest first.
    fn likely(&self, logits: &[f32]) -> Vec<(usize, f64)> {
        let numbers = logits
            .iter()
            .enumerate()
            .filter(|(_, x)| !x.is_nan() && **x != f32::NEG_INFINITY);
        let mut all: Vec<(usize, f64)> = numbers.map(|(i, x)| (i, f64::from(*x))).collect();
        // The order of equal ones is their place, so that a run repeats.
        let order = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(k) = self.top_k.filter(|k| *k > 0 && *k < all.len()) {
            all.select_nth_unstable_by(k - 1, order);
            all.truncate(k);
        }
        all.sort_unstable_by(order);
        all
    }
}

fn first_best(logits: &[f32]) -> usize {
    let best = |a: (usize, f32), (i, x): (usize, &f32)| if *x > a.1 { (i, *x) } else { a };
    logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), best)
        .0
}

/// How many of the first weights have the share `p` of all; at least one.
fn reaching(weights: &[f64], p: f64) -> usize {
    let wanted = p * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let enough = weights.iter().position(|weight| {
        sum += weight;
        sum >= wanted
    });
    enough
        .map_or(weights.len(), |at| at + 1)
        .min(weights.len())
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::Sampler;

    const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, f32::NAN];

    fn shares(sampler: Sampler) -> [f64; 4] {
        let mut shares = [0.0; 4];
        for at in 0..20_000 {
            shares[sampler.choose(&LOGITS, at)] += 1.0 / 20_000.0;
        }
        shares
    }

    #[test]
    fn cold_takes_the_best_and_warm_follows_the_weights() {
        assert_eq!(Sampler::default().choose(&LOGITS, 3), 1);
        assert_eq!(
            Sampler::default().choose(&[1.0, 1.0], 3),
            0,
            "the first of equals"
        );
        assert_eq!(Sampler::default().choose(&[f32::NAN; 2], 3), 0);
        let found = shares(Sampler {
            temperature: 1.0,
            ..Sampler::default()
        });
        let total: f64 = LOGITS[..3].iter().map(|x| f64::from(*x).exp()).sum();
        for (share, logit) in found[..3].iter().zip(LOGITS) {
            assert!(
                (share - f64::from(logit).exp() / total).abs() < 0.015,
                "{found:?}"
            );
        }
    }

    /// Both limits drop the unlikely ones and leave the proportions of the others.
    #[test]
    fn limits_drop_the_unlikely() {
        let warm = Sampler {
            temperature: 1.0,
            ..Sampler::default()
        };
        for sampler in [
            Sampler {
                top_k: Some(2),
                ..warm
            },
            Sampler {
                top_p: Some(0.8),
                ..warm
            },
        ] {
            let found = shares(sampler);
            assert!(
                found[0] == 0.0 && (found[1] / found[2] - std::f64::consts::E).abs() < 0.2,
                "{found:?}"
            );
        }
        assert!(
            shares(Sampler {
                top_p: Some(0.0),
                ..warm
            })[1]
                > 0.999,
            "one always stays"
        );
        assert!(
            shares(Sampler {
                top_k: Some(1),
                ..warm
            })[1]
                > 0.999
        );
        assert_eq!(
            shares(Sampler {
                top_k: Some(100),
                top_p: Some(1.0),
                ..warm
            }),
            shares(warm)
        );
    }
}
