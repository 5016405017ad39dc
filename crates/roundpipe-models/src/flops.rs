//! How much arithmetic a token takes: the floor that a measured time is set beside.
//!
//! Only products and attention are counted, as a run does them that recomputes every block: what
//! norms, copies and optimizers take is what a good run hides.

use crate::config::ModelConfig;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainMode {
    /// Every weight.
    All,
    /// Branches beside frozen weights; their own few operations are not counted.
    Adapters,
    /// Nothing: a forward only.
    Nothing,
}

impl ModelConfig {
    /// Floating-point operations per token of sequences of `seq` tokens.
    pub fn flops_per_token(&self, seq: usize, trains: TrainMode) -> f64 {
        let (products, attention) = (self.block_products(), self.attention(seq));
        let head = 2.0 * self.vocab as f64 * self.hidden as f64;
        // Forward, recompute, and gradients of inputs and of weights; attention's backward is 2.5
        // forwards.
        match trains {
            TrainMode::All => 4.0 * products + 4.5 * attention + 3.0 * head,
            TrainMode::Adapters => 3.0 * products + 4.5 * attention + 2.0 * head,
            TrainMode::Nothing => products + attention + head,
        }
    }

    /// Products of all blocks for one token, forward.
    fn block_products(&self) -> f64 {
        let product = |a: usize, b: usize| 2.0 * a as f64 * b as f64;
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let projections = 2.0 * product(queries, self.hidden) + 2.0 * product(keys, self.hidden);
        let unit = |layer: usize| match &self.moe {
            Some(moe) if moe.sparse[layer] => {
                let one = 3.0 * product(self.hidden, moe.intermediate);
                moe.top_k as f64 * one + product(moe.experts, self.hidden)
            }
            _ => 3.0 * product(self.hidden, self.intermediate),
        };
        (0..self.layers)
            .map(|layer| projections + unit(layer))
            .sum()
    }

    /// Attention of all blocks for one token, forward: scores and values of the keys that it sees
    /// on average.
    fn attention(&self, seq: usize) -> f64 {
        let width = (self.heads * self.head_dim) as f64;
        let seen = |window: &Option<usize>| {
            let (seq, window) = (seq as f64, window.unwrap_or(seq).min(seq) as f64);
            // The first `window` positions see ever more keys, the others all see `window`.
            (window * window / 2.0 + (seq - window) * window) / seq.max(1.0)
        };
        self.windows
            .iter()
            .map(|window| 4.0 * width * seen(window))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::TrainMode;
    use crate::presets::preset;

    /// Qwen3-1.7B at 4096 tokens takes 15.3 GFLOP per token with its blocks recomputed.
    #[test]
    fn a_known_model_takes_what_is_known() {
        let config = preset("qwen3-1.7b").unwrap();
        let giga = config.flops_per_token(4096, TrainMode::All) / 1e9;
        assert!((giga - 15.3).abs() < 0.1, "{giga}");
        assert!(
            config.flops_per_token(4096, TrainMode::Adapters)
                < config.flops_per_token(4096, TrainMode::All)
        );
        let sparse = preset("qwen3-30b-a3b").unwrap();
        let active = sparse.flops_per_token(1, TrainMode::Nothing) / 2e9;
        assert!(
            (2.5..3.5).contains(&active),
            "about 3 billion active parameters: {active}"
        );
    }
}
