//! Which samples come when: a permutation by seed and epoch.
//!
//! # Invariants
//! - The order depends on (seed, epoch, number of samples) alone, on every platform.
//! - Every order of the samples is equally likely, as far as the words of Philox are random.

use roundpipe_tensor::{RngKey, RngSite};

/// Words from a place of the random stream that no model draws from.
struct Words {
    key: RngKey,
    next: u64,
}

impl Words {
    fn new(seed: u64, epoch: u64) -> Self {
        let site = RngSite {
            seed,
            step: epoch,
            // Layers, losses and initial values stand elsewhere.
            microbatch: u32::MAX - 1,
            layer: u32::MAX - 1,
            site: 0,
        };
        Self {
            key: site.key(),
            next: 0,
        }
    }

    fn word(&mut self) -> u64 {
        let halves = [self.next, self.next + 1].map(|i| u64::from(self.key.word(i)));
        self.next += 2;
        halves[0] << 32 | halves[1]
    }

    /// A number below `bound`, each equally likely.
    fn below(&mut self, bound: u64) -> u64 {
        // 2^64 is no multiple of most bounds: words of the incomplete last turn are drawn again.
        let whole_turns = u64::MAX - (u64::MAX % bound + 1) % bound;
        loop {
            let word = self.word();
            if word <= whole_turns {
                return word % bound;
            }
        }
    }
}

/// The samples `0..len` in the order of an epoch.
pub(super) fn shuffled(seed: u64, epoch: u64, len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut words = Words::new(seed, epoch);
    for last in (1..len).rev() {
        let other = words.below(last as u64 + 1) as usize;
        order.swap(last, other);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_sample_once() {
        for len in [0, 1, 2, 3, 1000] {
            let mut order = shuffled(3, 5, len);
            order.sort_unstable();
            assert_eq!(order, (0..len).collect::<Vec<_>>());
        }
    }

    /// All six orders of three samples, about as often: 6000 epochs, 5 deviations.
    #[test]
    fn every_order_is_as_likely_as_another() {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            *counts.entry(shuffled(1, epoch, 3)).or_insert(0i64) += 1;
        }
        assert_eq!(counts.len(), 6);
        for (order, count) in counts {
            assert!((count - 1000).abs() < 145, "{order:?}: {count}");
        }
    }

    #[test]
    fn numbers_stay_below_their_bound() {
        let mut words = Words::new(2, 0);
        let huge = u64::MAX / 2 + 2;
        for bound in [1, 2, 3, 10, huge, u64::MAX] {
            assert!((0..100).all(|_| words.below(bound) < bound), "{bound}");
        }
    }
}
