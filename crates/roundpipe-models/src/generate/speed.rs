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
    /// likeliest ones. The first run of a few tokens is not timed.
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
        if texts == 0 || prompt == 0 || tokens < 2 {
            let why = "at least one text, a prompt of one token and two new ones are needed";
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
        self.timed(&prompts, tokens.min(4))?;
        let (prompt_time, all) = self.timed(&prompts, tokens)?;
        let steps = tokens - 1;
        Ok(Speed {
            prompt_seconds: prompt_time.as_secs_f64(),
            step_seconds: (all - prompt_time).as_secs_f64() / steps as f64,
            steps,
            bytes_per_step: step_bytes(model, texts, prompt + tokens / 2),
            bandwidth: bandwidth(&worker)?,
        })
    }

    /// Time until every text has its first token, and until the end.
    fn timed(&self, prompts: &[Vec<u32>], tokens: usize) -> Result<(Duration, Duration)> {
        let options = GenerateOptions {
            max_tokens: tokens,
            ..GenerateOptions::default()
        };
        let start = Instant::now();
        let (mut begun, mut first) = (vec![false; prompts.len()], Duration::ZERO);
        self.generate_batch(prompts, &options, |text, _| {
            if !std::mem::replace(&mut begun[text], true) {
                first = start.elapsed();
            }
            ControlFlow::Continue(())
        })?;
        Ok((first, start.elapsed()))
    }
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
