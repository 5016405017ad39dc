//! Documents through the engine: the loss of each, and how many of its tokens were the likeliest.

use std::sync::Arc;

use roundpipe::{
    Device, HostInputs, HostTensor, Inputs, Lag, MergeOutput, Params, Ring, RingOptions, RoundPipe,
    RunConfig, Sequential, SplitInput, Tree,
};
use roundpipe_data::Document;
use roundpipe_models::Model;

use crate::error::Result;

/// Share of a worker's memory that weights may take and still stay there.
const RESIDENT_SHARE: f64 = 0.6;
/// The fewest tokens and sequences of a packed row, so that few shapes occur.
const LEAST_TOKENS: usize = 64;
const LEAST_SEQUENCES: usize = 16;
/// A position where nothing is learned.
const IGNORED: i64 = -100;

/// What a model says to a document.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Sum of the losses of its learned tokens: minus their log-likelihood.
    pub loss: f64,
    /// Learned tokens.
    pub tokens: u64,
    /// Learned tokens that were the likeliest.
    pub hits: u64,
}

/// A model that scores documents.
pub struct Scorer {
    engine: RoundPipe<Sequential>,
    row_tokens: usize,
    parts: usize,
    pad: i64,
}

impl Scorer {
    /// On all of `devices`; documents of at most `row_tokens` tokens are packed into rows of that
    /// many.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        model: &Model,
        devices: &[Arc<dyn Device>],
        options: &RingOptions,
        row_tokens: usize,
    ) -> Result<Self> {
        let ring = Ring::new(devices, options)?;
        let params = model.named_params();
        let bytes: u64 = params.iter().map(|(_, param)| param.bytes() as u64).sum();
        let rooms = ring.workers().iter().map(|w| w.pool().capacity().0);
        let room = rooms.min().unwrap_or(0) as f64 * RESIDENT_SHARE;
        let engine = RoundPipe::builder(model.layers.clone())
            .name("eval")
            .max_lag(Lag::Zero)
            .inference(true)
            .ring(&ring)
            .pin(options.pin)
            .resident(bytes as f64 <= room)
            .build()?;
        engine.set_training(false);
        // One worker works through one row after another; more overlap.
        let parts = match devices.len() {
            1 => 1,
            devices => devices + 1,
        };
        Ok(Self {
            engine,
            row_tokens: row_tokens.max(1),
            parts,
            pad: 0,
        })
    }

    /// The longest document that is taken, in tokens that a model is given.
    pub fn longest(&self) -> usize {
        self.row_tokens
    }

    /// Scores documents in their order; `each` gets what came with them.
    ///
    /// # Errors
    /// What `documents` and `each` return, and what the engine reports.
    pub fn score<K>(
        &self,
        documents: impl IntoIterator<Item = Result<(K, Document)>>,
        mut each: impl FnMut(K, Score) -> Result<()>,
    ) -> Result<()> {
        let mut call: Vec<Row<K>> = Vec::new();
        for document in documents {
            let (key, document) = document?;
            if document.inputs() == 0 {
                // Nothing is predicted; told in its turn.
                self.row_for(&mut call, 0).documents.push((key, 0));
                continue;
            }
            let needs = document.inputs();
            let is_full = call
                .last()
                .is_none_or(|row| row.ids.len() + needs > self.row_tokens);
            if is_full && call.len() == self.parts {
                self.run(&mut call, &mut each)?;
            }
            let row = self.row_for(&mut call, needs);
            row.push(key, &document);
        }
        if call.is_empty() {
            return Ok(());
        }
        self.run(&mut call, &mut each)
    }

    /// The last row, or a new one where it has no room.
    fn row_for<'c, K>(&self, call: &'c mut Vec<Row<K>>, needs: usize) -> &'c mut Row<K> {
        let last = call.len().wrapping_sub(1);
        let fits = call
            .last()
            .is_some_and(|row| row.ids.len() + needs <= self.row_tokens);
        if fits {
            return &mut call[last];
        }
        call.push(Row::default());
        let last = call.len() - 1;
        &mut call[last]
    }

    fn run<K>(
        &self,
        call: &mut Vec<Row<K>>,
        each: &mut impl FnMut(K, Score) -> Result<()>,
    ) -> Result<()> {
        let rows = std::mem::take(call);
        let used = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        if used == 0 {
            return rows
                .into_iter()
                .flat_map(|row| row.documents)
                .try_for_each(|(key, _)| each(key, Score::default()));
        }
        let width = used
            .next_power_of_two()
            .max(LEAST_TOKENS)
            .min(self.row_tokens)
            .max(used);
        let parts = rows
            .iter()
            .map(|row| row.inputs(width, self.pad))
            .collect::<Result<Vec<_>>>()?;
        let whole = parts[0].named.iter();
        let inputs = whole.fold(Inputs::new(), |inputs, (name, value)| {
            inputs.named(name.clone(), value.clone())
        });
        let given = parts.clone();
        let config = RunConfig::new()
            .num_microbatch(rows.len())
            .requires_grad(false)
            .split_input(SplitInput::function(move |_, _| Ok(given.clone())))
            .merge_output(MergeOutput::Off);
        let outputs = self.engine.forward(inputs, &config)?.unmerged();
        for (microbatch, row) in rows.into_iter().enumerate() {
            let losses = outputs.get("losses").wait(microbatch)?.tensor()?;
            let hits = outputs.get("hits").wait(microbatch)?.tensor()?;
            row.tell(&losses.to_f64_vec()?, &hits.to_f64_vec()?, each)?;
        }
        Ok(())
    }
}

/// Documents that stand in one packed row.
struct Row<K> {
    ids: Vec<i64>,
    labels: Vec<i64>,
    positions: Vec<i64>,
    /// What came with each, and how many tokens of the row are its.
    documents: Vec<(K, usize)>,
}

impl<K> Default for Row<K> {
    fn default() -> Self {
        Self {
            ids: Vec::new(),
            labels: Vec::new(),
            positions: Vec::new(),
            documents: Vec::new(),
        }
    }
}

impl<K> Row<K> {
    fn push(&mut self, key: K, document: &Document) {
        let count = document.inputs();
        for at in 0..count {
            self.ids.push(i64::from(document.ids[at]));
            self.positions.push(at as i64);
            self.labels.push(match document.learned[at + 1] {
                true => i64::from(document.ids[at + 1]),
                false => IGNORED,
            });
        }
        self.documents.push((key, count));
    }

    /// The row filled up to `width` with a sequence that no document sees.
    fn inputs(&self, width: usize, pad: i64) -> Result<HostInputs> {
        let filled = |values: &[i64], with: i64| {
            let mut values = values.to_vec();
            values.resize(width, with);
            HostTensor::from_slice(&values, &[1, width])
        };
        let mut lens = vec![0i32];
        let mut end = 0;
        for (_, count) in self.documents.iter().filter(|(_, count)| *count > 0) {
            end += *count as i32;
            lens.push(end);
        }
        if end < width as i32 {
            lens.push(width as i32);
        }
        let sequences = (lens.len() - 1).max(LEAST_SEQUENCES).next_power_of_two();
        lens.resize(sequences + 1, width as i32);
        let mut positions = self.positions.clone();
        positions.extend((0..width - self.ids.len()).map(|at| at as i64));
        Ok(HostInputs::new()
            .named("ids", filled(&self.ids, pad)?)
            .named("labels", filled(&self.labels, IGNORED)?)
            .named(
                "positions",
                HostTensor::from_slice(&positions, &[1, width])?,
            )
            .named("lens", HostTensor::from_slice(&lens, &[lens.len()])?)
            .named("return_scores", Tree::Bool(true)))
    }

    fn tell(
        self,
        losses: &[f64],
        hits: &[f64],
        each: &mut impl FnMut(K, Score) -> Result<()>,
    ) -> Result<()> {
        let mut start = 0;
        for (key, count) in self.documents {
            let mut score = Score::default();
            for at in start..start + count {
                if self.labels[at] != IGNORED {
                    score.loss += losses[at];
                    score.tokens += 1;
                    score.hits += u64::from(hits[at] != 0.0);
                }
            }
            start += count;
            each(key, score)?;
        }
        Ok(())
    }
}
