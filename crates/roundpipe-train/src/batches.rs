//! A batch of rows as the microbatches of a call.
//!
//! The loss of a step is one mean over all its learned tokens. Each microbatch gives the sum over
//! its own tokens divided by the number of all of them, and the engine adds these up: so neither
//! the number of microbatches nor which rows share one changes more than rounding.

use std::ops::Range;
use std::sync::Arc;

use roundpipe::{
    HostInputs, HostTensor, Inputs, LossReduction, MergeOutput, RngSite, RunConfig, SplitInput,
    Tree,
};
use roundpipe_data::TrainBatch;

use crate::error::Result;

/// Rows of random tokens in documents whose lengths are exponentially distributed, with a mean of
/// `mean` tokens. Each row is full; its last document is cut. The same for the same `step`.
///
/// # Errors
/// When the rows have no tokens, or more than memory holds.
pub fn random_documents(
    [rows, seq]: [usize; 2],
    mean: usize,
    vocab: usize,
    step: u64,
) -> Result<TrainBatch> {
    let site = RngSite {
        seed: 7,
        step,
        ..RngSite::default()
    };
    let (key, lengths) = (site.key(), RngSite { site: 1, ..site }.key());
    let token = |at: usize| ((u64::from(key.word(at as u64)) * vocab as u64) >> 32) as i64;
    let mut drawn = 0;
    let mut length = || {
        // Between 0 and 1, and never 0.
        let part = (f64::from(lengths.word(drawn)) + 1.0) / 4_294_967_297.0;
        drawn += 1;
        ((-part.ln() * mean as f64) as usize).max(1)
    };
    let mut positions = Vec::with_capacity(rows * seq);
    let mut lens = Vec::with_capacity(rows);
    for _ in 0..rows {
        let mut ends = vec![0i32];
        let mut used = 0;
        while used < seq {
            let count = length().min(seq - used);
            positions.extend(0..count as i64);
            used += count;
            ends.push(used as i32);
        }
        lens.push(ends);
    }
    let documents = lens.iter().map(|ends| ends.len() - 1).sum();
    let row = |shift: usize| {
        let ids: Vec<i64> = (0..rows * seq)
            .map(|i| token(i / seq * (seq + 1) + i % seq + shift))
            .collect();
        HostTensor::from_slice(&ids, &[rows, seq])
    };
    let tokens = (rows * seq) as u64;
    Ok(TrainBatch {
        ids: row(0)?,
        labels: row(1)?,
        positions: HostTensor::from_slice(&positions, &[rows, seq])?,
        lens,
        tokens_trained: tokens,
        tokens,
        rows,
        documents,
        keys: Vec::new(),
    })
}

/// The inputs of a call and how they are split, for at most `microbatches` of them.
///
/// # Errors
/// When the batch does not fit together.
pub fn call(batch: &Arc<TrainBatch>, microbatches: usize) -> Result<(Inputs, RunConfig)> {
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

#[cfg(test)]
mod tests {
    use super::random_documents;

    /// Documents fill their rows, count from 0 each, and are about as long as asked for.
    #[test]
    fn random_documents_fill_their_rows() {
        let batch = random_documents([64, 512], 50, 1000, 3).unwrap();
        let positions = batch.positions.to_vec::<i64>().unwrap();
        for (row, ends) in batch.lens.iter().enumerate() {
            assert_eq!((ends[0], *ends.last().unwrap()), (0, 512), "row {row}");
            for pair in ends.windows(2) {
                assert!(pair[0] < pair[1], "row {row}: {ends:?}");
                let first = row * 512 + pair[0] as usize;
                let count = (pair[1] - pair[0]) as i64;
                let own = &positions[first..first + count as usize];
                assert!(own.iter().copied().eq(0..count), "row {row}");
            }
        }
        let mean = batch.tokens as f64 / batch.documents as f64;
        // The last document of a row is cut, so the mean is a little shorter.
        assert!((40.0..52.0).contains(&mean), "{mean}");
        let again = random_documents([64, 512], 50, 1000, 3).unwrap();
        assert_eq!(again.lens, batch.lens);
        let other = random_documents([64, 512], 50, 1000, 4).unwrap();
        assert_ne!(other.lens, batch.lens);
    }
}
