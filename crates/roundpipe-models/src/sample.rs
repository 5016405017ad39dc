//! Text from a model, one byte at a time.

use roundpipe::{Cx, Result, RngSite, Worker};

use crate::decoder::Model;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy)]
pub struct Sampler {
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 takes the likeliest.
    pub temperature: f64,
    /// Fixes the choices.
    pub seed: u64,
}

impl Sampler {
    /// The index chosen for position `at`, given the logits.
    pub fn choose(&self, logits: &[f64], at: u64) -> usize {
        let best = logits
            .iter()
            .enumerate()
            .fold((0, f64::NEG_INFINITY), |a, (i, x)| if *x > a.1 { (i, *x) } else { a });
        if self.temperature <= 0.0 {
            return best.0;
        }
        let weights: Vec<f64> = logits.iter().map(|x| ((x - best.1) / self.temperature).exp()).collect();
        let key = RngSite { seed: self.seed, ..RngSite::default() }.key();
        let mut left = f64::from(key.word(at)) / 4_294_967_296.0 * weights.iter().sum::<f64>();
        for (i, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return i;
            }
        }
        best.0
    }
}

/// `prompt` continued by `count` bytes. The model sees at most its longest sequence of what came before.
///
/// # Errors
/// What the model reports.
pub fn continue_text(
    model: &Model,
    worker: &Worker,
    prompt: &str,
    count: usize,
    sampler: Sampler,
) -> Result<String> {
    let mut bytes = prompt.as_bytes().to_vec();
    if bytes.is_empty() {
        bytes.push(b'\n');
    }
    for at in 0..count as u64 {
        let seen = &bytes[bytes.len().saturating_sub(model.config.max_positions)..];
        let ids: Vec<i64> = seen.iter().map(|b| i64::from(*b)).collect();
        let mut cx = Cx::infer(worker);
        let ids = cx.tensor(&ids, &[1, seen.len()])?;
        let logits = model.logits(&mut cx, &ids)?;
        let last = cx.narrow(&logits, 1, seen.len() - 1, 1)?.to_f64_vec()?;
        bytes.push(sampler.choose(&last, at).min(255) as u8);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::Sampler;

    #[test]
    fn cold_takes_the_best_and_warm_follows_the_weights() {
        let logits = [0.0, 2.0, 1.0];
        let cold = Sampler { temperature: 0.0, seed: 1 };
        assert_eq!(cold.choose(&logits, 3), 1);
        let warm = Sampler { temperature: 1.0, seed: 1 };
        let mut counts = [0.0; 3];
        for at in 0..20_000 {
            counts[warm.choose(&logits, at)] += 1.0 / 20_000.0;
        }
        let total: f64 = logits.iter().map(|x| x.exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            assert!((count - logit.exp() / total).abs() < 0.015, "{counts:?}");
        }
    }
}
