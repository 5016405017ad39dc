//! How the next token is chosen.

use std::cmp::Ordering;

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
        let mut likely = self.likely(logits);
        let Some(best) = likely.iter().map(|(_, x)| *x).reduce(f64::max) else {
            return first_best(logits);
        };
        let weight = |x: f64| ((x - best) / self.temperature).exp();
        let all: f64 = likely.iter().map(|(_, x)| weight(*x)).sum();
        let key = RngSite {
            seed: self.seed,
            ..RngSite::default()
        }
        .key();
        let drawn = f64::from(key.word(at)) / 4_294_967_296.0;
        // The likeliest first, and no more of them than are looked at: a vocabulary is long.
        let mut sorted = 0;
        let (mut sum, mut weights) = (0.0, Vec::new());
        let share = self.top_p.unwrap_or(1.0);
        loop {
            while weights.len() < sorted {
                let next = weight(likely[weights.len()].1);
                sum += next;
                weights.push(next);
                // Without top_p the draw is over all of them, and ends where it lands.
                let is_enough = match self.top_p {
                    Some(_) => sum >= share * all,
                    None => sum > drawn * all,
                };
                if is_enough {
                    return likely[landed(&weights, drawn, self.top_p.map_or(all, |_| sum))].0;
                }
            }
            if sorted == likely.len() {
                return likely[landed(&weights, drawn, sum)].0;
            }
            let more = (sorted.max(FIRST_SORTED) * 4).min(likely.len());
            sort_first(&mut likely[sorted..], more - sorted);
            sorted = more;
        }
    }

    /// Candidates with their logits.
    fn likely(&self, logits: &[f32]) -> Vec<(usize, f64)> {
        let numbers = logits
            .iter()
            .enumerate()
            .filter(|(_, x)| !x.is_nan() && **x != f32::NEG_INFINITY);
        let mut all: Vec<(usize, f64)> = numbers.map(|(i, x)| (i, f64::from(*x))).collect();
        if let Some(k) = self.top_k.filter(|k| *k > 0 && *k < all.len()) {
            all.select_nth_unstable_by(k - 1, likelier);
            all.truncate(k);
        }
        all
    }
}

/// Candidates that are sorted first; four times as many whenever those do not reach.
const FIRST_SORTED: usize = 16;

/// The likelier first; the order of equal ones is their place, so that a run repeats.
fn likelier(a: &(usize, f64), b: &(usize, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Brings the first `count` in order to the front.
fn sort_first(all: &mut [(usize, f64)], count: usize) {
    if count < all.len() {
        all.select_nth_unstable_by(count, likelier);
    }
    all[..count].sort_unstable_by(likelier);
}

/// Where a draw among `total` lands.
fn landed(weights: &[f64], drawn: f64, total: f64) -> usize {
    let mut left = drawn * total;
    let found = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    found.unwrap_or(0)
}

fn first_best(logits: &[f32]) -> usize {
    let best = |a: (usize, f32), (i, x): (usize, &f32)| if *x > a.1 { (i, *x) } else { a };
    logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), best)
        .0
}

#[cfg(test)]
mod tests {
    use roundpipe::RngSite;

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

    /// Among many, the choice is that of a full sort.
    #[test]
    fn long_lists_are_drawn_from_as_if_sorted() {
        let logits: Vec<f32> = (0..5000)
            .map(|i| ((i * 7919) % 5000) as f32 / 900.0)
            .collect();
        let mut sorted: Vec<usize> = (0..logits.len()).collect();
        sorted.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let weights: Vec<f64> = sorted
            .iter()
            .map(|i| (f64::from(logits[*i]) - f64::from(logits[sorted[0]])).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        for (top_p, share) in [(None, 1.0), (Some(0.5), 0.5)] {
            let mut kept = 0;
            let mut sum = 0.0;
            while kept < weights.len() && sum < share * total {
                sum += weights[kept];
                kept += 1;
            }
            let sampler = Sampler {
                temperature: 1.0,
                top_p,
                ..Sampler::default()
            };
            for at in 0..200 {
                let key = RngSite::default().key();
                let drawn = f64::from(key.word(at)) / 4_294_967_296.0;
                let mut left = drawn * sum;
                let place = weights[..kept].iter().position(|weight| {
                    left -= weight;
                    left < 0.0
                });
                let expected = sorted[place.unwrap_or(0)];
                assert_eq!(sampler.choose(&logits, at), expected, "{top_p:?} at {at}");
            }
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
