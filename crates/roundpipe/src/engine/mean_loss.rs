//! [`LossReduction::Mean`](crate::LossReduction): a loss function that returns the mean over its
//! microbatch becomes one that returns the microbatch's part of the mean over the batch.
//!
//! The share of a microbatch travels with its labels, so executors know nothing of it: they add up
//! losses and gradients as for a sum. This module never guesses a share: where a function of the
//! user has split the inputs, it refuses.
//!
//! # Invariants
//! - Shares depend on the split alone, so the bits are the same for any number of workers.
//! - One microbatch has the share 1, which changes no bit.

use std::sync::Arc;

use roundpipe_tensor::transfer::HostValue;
use roundpipe_tensor::{Cx, DType, Result as TensorResult, Tensor};

use crate::error::{Error, Result};
use crate::exec::model::LossFn;
use crate::tree::Tree;

/// The share that each of `count` microbatches has in a batch.
pub(super) fn shares(samples: Option<&[usize]>, count: usize) -> Result<Vec<f64>> {
    match samples {
        Some(samples) => Ok(shares_of(samples)),
        None if count == 1 => Ok(vec![1.0]),
        None => {
            let what = "Mean weighs microbatches by their samples, but a function split the \
                        inputs, and how many samples each part has is not known; use Sum and \
                        return each microbatch's part of the mean";
            Err(Error::config("loss_reduction", what))
        }
    }
}

fn shares_of(samples: &[usize]) -> Vec<f64> {
    let batch: usize = samples.iter().sum();
    samples
        .iter()
        .map(|samples| *samples as f64 / batch as f64)
        .collect()
}

/// The labels of each microbatch together with its share of the batch, as [`mean_loss`] takes them.
pub(super) fn with_shares(labels: Vec<Tree<HostValue>>, shares: &[f64]) -> Vec<Tree<HostValue>> {
    let pairs = labels.into_iter().zip(shares);
    pairs
        .map(|(label, share)| Tree::List(vec![label, Tree::Float(*share)]))
        .collect()
}

/// Multiplies what `loss` returns with the share that [`with_shares`] put beside the labels.
pub(super) fn mean_loss(loss: LossFn) -> LossFn {
    Arc::new(move |cx: &mut Cx, outputs: Tree, labels: Tree| {
        let (labels, share) = match labels {
            Tree::List(mut pair) => match (pair.pop(), pair.pop()) {
                (Some(Tree::Float(share)), Some(labels)) => (labels, share),
                _ => unreachable!("`with_shares` puts a number behind the labels"),
            },
            _ => unreachable!("`with_shares` makes a list of two"),
        };
        let losses = loss(cx, outputs, labels)?;
        losses.iter().map(|loss| weigh(cx, loss, share)).collect()
    })
}

fn weigh(cx: &mut Cx, loss: &Tensor, share: f64) -> TensorResult<Tensor> {
    match loss.dtype() {
        // A share such as a third, rounded to 8 or 11 bits, would be off by more than the loss.
        DType::BF16 | DType::F16 => {
            let wide = cx.cast(loss, DType::F32)?;
            cx.mul_scalar(&wide, share)
        }
        _ => cx.mul_scalar(loss, share),
    }
}

#[cfg(test)]
mod tests {
    use super::shares_of;

    #[test]
    fn shares_add_up_to_one() {
        assert_eq!(shares_of(&[7]), [1.0]);
        assert_eq!(shares_of(&[2, 1, 1]), [0.5, 0.25, 0.25]);
        let uneven = shares_of(&[3, 2, 2]);
        assert!(
            (uneven.iter().sum::<f64>() - 1.0).abs() < 1e-15,
            "{uneven:?}"
        );
    }
}
