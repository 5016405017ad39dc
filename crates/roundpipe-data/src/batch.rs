//! Rows of documents as the tensors that a model takes.
//!
//! # Invariants
//! - A label stands where it is predicted and is of the same document; -100 where nothing is
//!   learned.
//! - Positions begin at 0 in every document.
//! - What fills a packed row up is a sequence of its own, which no document sees.
//! - A microbatch of pairs has both sides of each: documents 2i and 2i + 1 are pair i.

use std::ops::Range;

use roundpipe::{HostTensor, Inputs};
use roundpipe_models::chat::mask::IGNORED;

use crate::error::Result;
use crate::pack::PackedRow;

/// Rows that are not packed are as long as the longest, rounded up to this, so that few shapes
/// occur.
const ROUND_TOKENS: usize = 64;
/// The fewest sequences that a microbatch names.
const LEAST_SEQUENCES: usize = 16;

/// Lengths of microbatches of pairs are multiples of a power of two that is between a sixteenth and
/// an eighth of them: little is wasted, and few shapes occur.
const PAIR_STEPS: usize = 16;

/// The rows of one step.
#[derive(Debug, Clone)]
pub struct TrainBatch {
    /// Tokens, [B, S] (i64).
    pub ids: HostTensor,
    /// The token that comes next, or -100, [B, S] (i64).
    pub labels: HostTensor,
    /// Places in their documents, [B, S] (i64).
    pub positions: HostTensor,
    /// For each packed row the cumulative lengths of its sequences, from 0 to S; empty where rows
    /// are not packed.
    pub lens: Vec<Vec<i32>>,
    /// Tokens that are learned: labels that are not -100.
    pub tokens_trained: u64,
    /// Tokens without padding.
    pub tokens: u64,
    /// Rows, B.
    pub rows: usize,
    /// Documents in them.
    pub documents: usize,
    /// Where rows are pairs, which rows of the files they are ([`Order::key`](crate::Order::key));
    /// else empty.
    pub keys: Vec<u64>,
}

/// Some rows of a batch, in the form that a model takes at once.
#[derive(Debug, Clone)]
pub struct Microbatch {
    /// Tokens: [1, n · S] where rows are packed, else [n, S].
    pub ids: HostTensor,
    /// As the ids.
    pub labels: HostTensor,
    /// As the ids.
    pub positions: HostTensor,
    /// Cumulative lengths of all sequences (i32), where rows are packed. The last is repeated up to a
    /// power of two, so that few shapes occur: those sequences are empty.
    pub lens: Option<HostTensor>,
    /// Where rows are pairs, the number of the document that each token is in, as the ids; padding
    /// has the number behind the last.
    pub documents: Option<HostTensor>,
}

impl Microbatch {
    /// The named inputs of a [`Model`](roundpipe_models::Model), labels included.
    pub fn inputs(&self) -> Inputs {
        let inputs = Inputs::new()
            .named("ids", self.ids.clone())
            .named("labels", self.labels.clone())
            .named("positions", self.positions.clone());
        let more = [("lens", &self.lens), ("documents", &self.documents)];
        more.into_iter()
            .fold(inputs, |inputs, (name, value)| match value {
                Some(value) => inputs.named(name, value.clone()),
                None => inputs,
            })
    }
}

impl TrainBatch {
    /// Rows as a model takes them; memory is shared with the batch.
    ///
    /// # Errors
    /// When `rows` are not rows of the batch.
    pub fn microbatch(&self, rows: Range<usize>) -> Result<Microbatch> {
        if !self.keys.is_empty() {
            return self.pairs_of(rows);
        }
        let cut = |tensor: &HostTensor| tensor.narrow(0, rows.start, rows.len());
        let [ids, labels, positions] = [&self.ids, &self.labels, &self.positions].map(cut);
        let (ids, labels, positions) = (ids?, labels?, positions?);
        if self.lens.is_empty() {
            return Ok(Microbatch {
                ids,
                labels,
                positions,
                lens: None,
                documents: None,
            });
        }
        let one_row = [1, ids.numel()];
        let lens = joined(&self.lens[rows]);
        Ok(Microbatch {
            ids: ids.reshape(&one_row)?,
            labels: labels.reshape(&one_row)?,
            positions: positions.reshape(&one_row)?,
            lens: Some(HostTensor::from_slice(&lens, &[lens.len()])?),
            documents: None,
        })
    }

    /// Pairs without the padding between them, as one row of 2n documents.
    fn pairs_of(&self, rows: Range<usize>) -> Result<Microbatch> {
        let width = self.ids.dims()[1];
        let columns = [&self.ids, &self.labels, &self.positions];
        let [ids, labels, positions] = columns.map(|tensor| tensor.to_vec::<i64>());
        let (ids, labels, positions) = (ids?, labels?, positions?);
        let mut made = Columns::default();
        let mut documents = Vec::new();
        let mut lens = vec![0i32];
        let first = rows.start;
        for row in rows {
            let start = row * width;
            for side in 0..2 {
                let [from, to] = [side, side + 1].map(|at| self.lens[row][at] as usize);
                let range = start + from..start + to;
                made.ids.extend(&ids[range.clone()]);
                made.labels.extend(&labels[range.clone()]);
                made.positions.extend(&positions[range]);
                documents.resize(made.ids.len(), (2 * (row - first) + side) as i64);
                lens.push(made.ids.len() as i32);
            }
        }
        let used = made.ids.len();
        let step = (used.next_power_of_two() / PAIR_STEPS).max(ROUND_TOKENS);
        let whole = used.next_multiple_of(step);
        for at in 0..whole - used {
            // Any token: no document sees it, and it has no label.
            made.push(0, IGNORED, at);
        }
        documents.resize(whole, lens.len() as i64 - 1);
        if used < whole {
            lens.push(whole as i32);
        }
        let lens = joined(&[lens]);
        let dims = [1, whole];
        Ok(Microbatch {
            ids: HostTensor::from_slice(&made.ids, &dims)?,
            labels: HostTensor::from_slice(&made.labels, &dims)?,
            positions: HostTensor::from_slice(&made.positions, &dims)?,
            lens: Some(HostTensor::from_slice(&lens, &[lens.len()])?),
            documents: Some(HostTensor::from_slice(&documents, &dims)?),
        })
    }

    /// How many tokens of each side of the pairs are learned: [n, 2], row by row.
    pub fn pair_labels(&self, rows: Range<usize>) -> Result<Vec<[u64; 2]>> {
        let width = self.ids.dims()[1];
        let labels = self.labels.to_vec::<i64>()?;
        let count = |row: usize, side: usize| {
            let [from, to] = [side, side + 1].map(|at| self.lens[row][at] as usize);
            let labels = &labels[row * width + from..row * width + to];
            labels.iter().filter(|label| **label != IGNORED).count() as u64
        };
        Ok(rows.map(|row| [count(row, 0), count(row, 1)]).collect())
    }

    /// Makes a batch of pairs, a row for each.
    pub(crate) fn of_pairs(rows: &[PackedRow], keys: Vec<u64>, pad: u32) -> Result<Self> {
        let longest = rows.iter().map(|row| row.used).max().unwrap_or(0);
        let width = longest.next_multiple_of(ROUND_TOKENS);
        let batch = Self::new(rows, width, true, pad)?;
        Ok(Self { keys, ..batch })
    }

    /// Makes a batch of rows; `seq` is their longest length.
    pub(crate) fn new(rows: &[PackedRow], seq: usize, packed: bool, pad: u32) -> Result<Self> {
        let width = if packed {
            seq
        } else {
            let longest = rows.iter().map(|row| row.used).max().unwrap_or(0);
            longest.next_multiple_of(ROUND_TOKENS).min(seq)
        };
        let mut made = Columns::default();
        let mut lens = Vec::new();
        for row in rows {
            let row_lens = made.row(row, width, pad);
            if packed {
                lens.push(row_lens);
            }
        }
        let dims = [rows.len(), width];
        let is_label = |label: &&i64| **label != IGNORED;
        Ok(Self {
            tokens_trained: made.labels.iter().filter(is_label).count() as u64,
            tokens: rows.iter().map(|row| row.used as u64).sum(),
            rows: rows.len(),
            documents: rows.iter().map(|row| row.documents.len()).sum(),
            ids: HostTensor::from_slice(&made.ids, &dims)?,
            labels: HostTensor::from_slice(&made.labels, &dims)?,
            positions: HostTensor::from_slice(&made.positions, &dims)?,
            lens,
            keys: Vec::new(),
        })
    }
}

/// Cumulative lengths of the sequences of several rows.
fn joined(rows: &[Vec<i32>]) -> Vec<i32> {
    let mut all = vec![0];
    for lens in rows {
        let before = all[all.len() - 1];
        all.extend(lens.iter().skip(1).map(|end| before + end));
    }
    let sequences = (all.len() - 1).max(LEAST_SEQUENCES).next_power_of_two();
    all.resize(sequences + 1, all[all.len() - 1]);
    all
}

#[derive(Default)]
struct Columns {
    ids: Vec<i64>,
    labels: Vec<i64>,
    positions: Vec<i64>,
}

impl Columns {
    /// Appends a row, and gives the cumulative lengths of its sequences.
    fn row(&mut self, row: &PackedRow, width: usize, pad: u32) -> Vec<i32> {
        let mut lens = vec![0];
        let mut used = 0;
        for (_, document) in &row.documents {
            for at in 0..document.inputs() {
                self.push(i64::from(document.ids[at]), document.label(at), at);
            }
            used += document.inputs();
            lens.push(used as i32);
        }
        for at in 0..width - used {
            self.push(i64::from(pad), IGNORED, at);
        }
        if used < width {
            lens.push(width as i32);
        }
        lens
    }

    fn push(&mut self, id: i64, label: i64, position: usize) {
        self.ids.push(id);
        self.labels.push(label);
        self.positions.push(position as i64);
    }
}
