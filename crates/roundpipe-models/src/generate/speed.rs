//! How fast a model writes, beside what the device's memory allows.
//!
//! A token of one text reads every weight once, so memory bounds it: the share says how near decoding
//! comes to that bound. The bandwidth is that of a large copy on the same device in the same run,
//! bytes read and bytes written.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use roundpipe::{DType, Worker};

use super::{GenerateOptions, Generator};
use crate::decoder::Model;
use crate::error::{Error, Result};

/// Bytes that are copied to measure the bandwidth, at most.
const COPY_BYTES: u64 = 1 << 30;
const COPIES: usize = 8;
/// Tokens of each text that are not timed: with the first ones a step is recorded.
const BEFORE: usize = 4;

/// Figures of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Seconds from the prompts to the first token of the last of them.
    pub prompt_seconds: f64,
    /// Seconds per step of decoding, which gives every text a token.
    pub step_seconds: f64,
    /// Steps that were timed.
    pub steps: usize,
    /// Bytes that a step reads: all weights that it uses, and keys and values at half of the tokens.
    pub bytes_per_step: u64,
    /// Bytes per second that the device copies, read and written ones counted.
    pub bandwidth: f64,
}

impl Speed {
    /// Share of the bandwidth that decoding uses.
    pub fn share(&self) -> f64 {
        self.bytes_per_step as f64 / self.step_seconds / self.bandwidth
    }
}

impl Generator {
    /// Times `texts` texts that are written at once: prompts of `prompt` tokens, continued by `tokens`
    /// likeliest ones. A run of a few tokens before is not timed, nor are the first tokens of each
    /// text.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that the model does not take; as [`Generator::generate`].
    pub fn speed(
        &self,
        model: &Model,
        texts: usize,
        prompt: usize,
        tokens: usize,
    ) -> Result<Speed> {
        if texts == 0 || prompt == 0 || tokens <= BEFORE {
            let why = format!(
                "at least one text, a prompt of one token and {} new ones are needed",
                BEFORE + 1
            );
            return Err(Error::argument("sizes", why));
        }
        if prompt + tokens > self.max_positions {
            let why = format!(
                "{prompt} tokens and {tokens} new ones; the model's longest sequence is {}",
                self.max_positions
            );
            return Err(Error::argument("sizes", why));
        }
        let worker = self.engine().ring().workers()[0].clone();
        let ids = |text: usize| (0..prompt).map(move |i| ((i * 31 + text * 7) % self.vocab) as u32);
        let prompts: Vec<Vec<u32>> = (0..texts).map(|text| ids(text).collect()).collect();
        self.timed(&prompts, tokens.min(2 * BEFORE))?;
        let times = self.timed(&prompts, tokens)?;
        let steps = tokens - BEFORE;
        Ok(Speed {
            prompt_seconds: times.prompts.as_secs_f64(),
            step_seconds: (times.all - times.before).as_secs_f64() / steps as f64,
            steps,
            bytes_per_step: step_bytes(model, texts, prompt + tokens / 2),
            bandwidth: bandwidth(&worker)?,
        })
    }

    fn timed(&self, prompts: &[Vec<u32>], tokens: usize) -> Result<Times> {
        let options = GenerateOptions {
            max_tokens: tokens,
            ..GenerateOptions::default()
        };
        let start = Instant::now();
        let mut counts = vec![0; prompts.len()];
        let (mut first, mut before) = (Duration::ZERO, Duration::ZERO);
        self.generate_batch(prompts, &options, |text, _| {
            counts[text] += 1;
            match counts[text] {
                1 => first = start.elapsed(),
                BEFORE => before = start.elapsed(),
                _ => {}
            }
            ControlFlow::Continue(())
        })?;
        Ok(Times {
            prompts: first,
            before,
            all: start.elapsed(),
        })
    }
}

/// Times from the start: until every text has its first token, until every text has those that are
/// not timed, and until the end.
struct Times {
    prompts: Duration,
    before: Duration,
    all: Duration,
}

/// Bytes that a step of decoding reads.
fn step_bytes(model: &Model, texts: usize, places: usize) -> u64 {
    let c = &model.config;
    let size = c.dtype.unwrap_or(DType::F32).size();
    let weights: usize = model
        .entries()
        .iter()
        // Of the embedding a step reads a row per text, unless the head is the same matrix.
        .filter(|entry| c.tied || !entry.name.contains("embed_tokens"))
        .map(|entry| entry.param.bytes())
        .sum();
    let cached = 2 * c.layers * c.kv_heads * c.head_dim * size * places * texts;
    (weights + cached) as u64
}

/// Bytes per second that a worker copies within its memory: the best of several copies.
fn bandwidth(worker: &Worker) -> Result<f64> {
    let free = worker
        .pool()
        .capacity()
        .0
        .saturating_sub(worker.usage().used.0);
    let count = (COPY_BYTES.min(free / 4) / 4).max(1) as usize;
    let mut cx = roundpipe::Cx::infer(worker);
    let source = cx.zeros(DType::F32, &[count])?;
    let mut best = f64::INFINITY;
    for _ in 0..COPIES {
        worker.fence()?;
        let start = Instant::now();
        let copy = worker.copied(&source, DType::F32)?;
        worker.fence()?;
        best = best.min(start.elapsed().as_secs_f64());
        drop(copy);
    }
    Ok(2.0 * 4.0 * count as f64 / best)
}
