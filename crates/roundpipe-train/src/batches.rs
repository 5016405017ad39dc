//! A batch of rows as the microbatches of a call.
//!
//! The loss of a step is one mean over all its learned tokens. Each microbatch gives the sum over
//! its own tokens divided by the number of all of them, and the engine adds these up: so neither
//! the number of microbatches nor which rows share one changes more than rounding.

use std::ops::Range;
use std::sync::Arc;

use roundpipe::{
    HostInputs, HostTensor, Inputs, LossReduction, MergeOutput, RunConfig, SplitInput, Tree,
};
use roundpipe_data::TrainBatch;

use crate::error::Result;

/// The inputs of a call and how they are split, for at most `microbatches` of them.
pub(crate) fn call(batch: &Arc<TrainBatch>, microbatches: usize) -> Result<(Inputs, RunConfig)> {
    // One microbatch gets these as they are.
    let whole = part(batch, 0..batch.rows)?;
    let named = whole.named.into_iter();
    let inputs = named.fold(Inputs::new(), |inputs, (name, value)| {
        inputs.named(name, value)
    });
    let batch = batch.clone();
    let count = microbatches.min(batch.rows);
    let split = SplitInput::function(move |_, count| split(&batch, count));
    let config = RunConfig::new()
        .num_microbatch(count)
        .loss_reduction(LossReduction::Sum)
        .split_input(split)
        .merge_output(MergeOutput::function(sum));
    Ok((inputs, config))
}

/// Rows in `count` parts, larger ones first.
fn split(batch: &TrainBatch, count: usize) -> roundpipe::Result<Vec<HostInputs>> {
    let parts = sizes(batch.rows, count).into_iter();
    parts.map(|rows| part(batch, rows)).collect()
}

/// The rows of each of `count` parts, larger ones first.
pub(crate) fn sizes(rows: usize, count: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let part = |index: usize| {
        let end = start + rows / count + usize::from(index < rows % count);
        std::mem::replace(&mut start, end)..end
    };
    (0..count).map(part).collect()
}

/// What the model takes for some rows: the loss of each is divided by the tokens of all.
fn part(batch: &TrainBatch, rows: Range<usize>) -> roundpipe::Result<HostInputs> {
    let weight = HostTensor::from_slice(&[batch.tokens_trained.max(1) as i64], &[])?;
    let microbatch = batch
        .microbatch(rows)
        .map_err(|e| roundpipe::Error::config("batch", e.to_string()))?;
    let inputs = HostInputs::new()
        .named("ids", microbatch.ids)
        .named("labels", microbatch.labels)
        .named("positions", microbatch.positions)
        .named("weight", weight);
    Ok(match microbatch.lens {
        Some(lens) => inputs.named("lens", lens),
        None => inputs,
    })
}

/// The losses of microbatches, added up.
fn sum(parts: Vec<Tree<HostTensor>>) -> roundpipe::Result<Tree<HostTensor>> {
    let mut total = 0.0;
    for part in parts {
        for loss in part.into_leaves() {
            total += loss.item()?;
        }
    }
    Ok(HostTensor::from_slice(&[total], &[])?.into())
}
