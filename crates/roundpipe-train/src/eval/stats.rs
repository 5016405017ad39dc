//! Means and how sure they are.
//!
//! Tokens of one document hang together, so the standard error of a mean over tokens is computed
//! from documents: each counts with the sum and the number of its tokens (the linearised variance of
//! a ratio). It is missing where fewer than two documents were seen.

use serde::Serialize;

/// A figure and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The figure.
    pub value: f64,
    /// One standard error; none can be said of fewer than two rows.
    pub error: Option<f64>,
}

impl Estimate {
    /// The exponential, and its error to first order.
    #[must_use]
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        Self {
            value,
            error: self.error.map(|error| error * value),
        }
    }
}

/// Σ sums / Σ weights over documents.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ratio {
    count: u64,
    sum: f64,
    weight: f64,
    sum_squares: f64,
    products: f64,
    weight_squares: f64,
}

impl Ratio {
    /// One document; those without weight do not count.
    pub fn add(&mut self, sum: f64, weight: f64) {
        if weight <= 0.0 {
            return;
        }
        self.count += 1;
        self.sum += sum;
        self.weight += weight;
        self.sum_squares += sum * sum;
        self.products += sum * weight;
        self.weight_squares += weight * weight;
    }

    pub fn weight(&self) -> f64 {
        self.weight
    }

    pub fn estimate(&self) -> Estimate {
        let value = self.sum / self.weight;
        let n = self.count as f64;
        // Σ (sum - value · weight)², multiplied out.
        let squares =
            self.sum_squares - 2.0 * value * self.products + value * value * self.weight_squares;
        let error = (squares.max(0.0) * n / (n - 1.0)).sqrt() / self.weight;
        Estimate {
            value,
            error: (self.count > 1).then_some(error),
        }
    }
}

/// A share of rows that were right.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Share {
    right: u64,
    count: u64,
}

impl Share {
    pub fn add(&mut self, right: bool) {
        self.right += u64::from(right);
        self.count += 1;
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn estimate(&self) -> Estimate {
        let n = self.count as f64;
        let value = self.right as f64 / n;
        let error = (value * (1.0 - value) / (n - 1.0)).sqrt();
        Estimate {
            value,
            error: (self.count > 1).then_some(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_of_the_textbook() {
        // Equal weights: the standard error of a mean of 1, 2, 3, 6.
        let mut ratio = Ratio::default();
        for sum in [1.0, 2.0, 3.0, 6.0] {
            ratio.add(sum * 10.0, 10.0);
        }
        ratio.add(5.0, 0.0);
        let Estimate { value, error } = ratio.estimate();
        assert!((value - 3.0).abs() < 1e-12);
        let deviation = ((4.0 + 1.0 + 0.0 + 9.0) / 3.0f64).sqrt();
        assert!((error.unwrap() - deviation / 2.0).abs() < 1e-12);
        // Unequal ones: 3 of 4 right, written out.
        let mut ratio = Ratio::default();
        ratio.add(3.0, 3.0);
        ratio.add(0.0, 1.0);
        let Estimate { value, error } = ratio.estimate();
        assert!((value - 0.75).abs() < 1e-12);
        let squares = (3.0f64 - 2.25).powi(2) + 0.75f64.powi(2);
        assert!((error.unwrap() - (2.0 * squares).sqrt() / 4.0).abs() < 1e-12);
        let mut share = Share::default();
        [true, true, true, false]
            .into_iter()
            .for_each(|right| share.add(right));
        let Estimate { value, error } = share.estimate();
        assert!((value - 0.75).abs() < 1e-12);
        assert!((error.unwrap() - (0.1875f64 / 3.0).sqrt()).abs() < 1e-12);
        let mut one = Share::default();
        one.add(true);
        assert_eq!(one.estimate().error, None);
        let loss = Estimate {
            value: 2.0,
            error: Some(0.1),
        };
        assert!((loss.exp().error.unwrap() - 0.1 * 2.0f64.exp()).abs() < 1e-12);
    }
}
