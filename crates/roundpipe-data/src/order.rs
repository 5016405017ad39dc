//! Which row comes when: a permutation by seed and epoch that is computed place by place, so that a
//! run resumes anywhere without a list of rows.
//!
//! A Feistel network of [`ROUNDS`] rounds permutes the numbers below the next power of four; a number
//! that falls outside is permuted again until it is inside.
//!
//! # Invariants
//! - An order depends on (seed, epoch, purpose, number of places) alone, on every platform.
//! - Every place comes exactly once.

use crate::hash;

const ROUNDS: usize = 8;

/// A permutation of the numbers `0..len`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// One for a seed and an epoch; `purpose` tells several of them apart.
    pub fn new(seed: u64, epoch: u64, purpose: u64, len: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let key = |round: usize| hash::words(&[seed, epoch, purpose, round as u64]);
        Self {
            len,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(key),
        }
    }

    /// What stands at `place`, which is below the length.
    pub fn at(&self, place: u64) -> u64 {
        let mut number = self.round_trip(place);
        while number >= self.len {
            number = self.round_trip(number);
        }
        number
    }

    fn round_trip(&self, number: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            let next = left ^ (hash::mix(right ^ key) & mask);
            left = right;
            right = next;
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, epoch: u64, len: u64) -> Vec<u64> {
        let permutation = Permutation::new(seed, epoch, 0, len);
        (0..len).map(|place| permutation.at(place)).collect()
    }

    #[test]
    fn every_place_comes_once() {
        for len in [1, 2, 3, 4, 5, 17, 64, 65, 1000, 4097] {
            let mut all = order(3, 5, len);
            all.sort_unstable();
            assert_eq!(all, (0..len).collect::<Vec<_>>());
        }
    }

    /// All 24 orders of four rows, about as often: 24,000 epochs, 6 deviations.
    #[test]
    fn every_order_is_about_as_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..24_000 {
            *counts.entry(order(1, epoch, 4)).or_insert(0i64) += 1;
        }
        assert_eq!(counts.len(), 24);
        for (order, count) in counts {
            assert!((count - 1000).abs() < 200, "{order:?}: {count}");
        }
    }

    /// Rows that were neighbours are not, and rows do not stay where they were.
    #[test]
    fn neighbours_part() {
        let all = order(7, 0, 10_000);
        let kept = (1..all.len())
            .filter(|i| all[*i] == all[*i - 1] + 1)
            .count();
        let stayed = (0..all.len()).filter(|i| all[*i] == *i as u64).count();
        assert!(kept < 12 && stayed < 12, "{kept} {stayed}");
        assert_ne!(all, order(7, 1, 10_000));
        assert_ne!(all, order(8, 0, 10_000));
    }

    /// Checkpoints hold places of this order, so it never changes.
    #[test]
    fn the_order_is_what_it_was() {
        assert_eq!(order(42, 0, 8), [0, 4, 3, 6, 5, 2, 7, 1]);
    }
}
