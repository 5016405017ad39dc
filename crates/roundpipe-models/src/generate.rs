//! Text from a model, token by token, through the same engine that trains it.
//!
//! The path of a token: ids -> embedding -> blocks, each beside the keys and values it has seen ->
//! logits of the last position -> [`Sampler`] -> the caller, and back as the next id. Keys and
//! values stay on the worker from token to token. Weights stay there too where they fit; else they
//! are streamed through it for every token, which is slow but needs no more than two stages of
//! memory.
//!
//! One sequence at a time, on the first worker: what a second could do while the first decodes is
//! nothing.
//!
//! # Invariants
//! - The tokens depend on model, prompt and sampler only: not on residency, nor on how the prompt
//!   is cut.

use std::ops::ControlFlow;
use std::sync::Arc;

use roundpipe::engine::{Inputs, MicrobatchOutputs};
use roundpipe::{
    Device, HostTensor, Lag, MergeOutput, OutputDevice, Params, Pin, Ring, RingOptions, RoundPipe,
    RunConfig, Sequential, Tree,
};

use crate::decoder::Model;
use crate::error::{Error, Result};
use crate::sample::Sampler;

/// Tokens of a prompt that are run at once: bounds the memory of a long one.
const PROMPT_STEP: usize = 1024;
/// Share of a worker's memory that weights may take and still stay there.
const RESIDENT_SHARE: f64 = 0.6;

/// What is generated, and when it ends.
#[derive(Debug, Clone, Default)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How each is chosen.
    pub sampler: Sampler,
    /// Tokens that end the text; they are not part of it.
    pub stop: Vec<u32>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
    /// The model's longest sequence is full.
    Context,
    /// The caller wanted no more.
    Caller,
}

/// A model ready to write.
pub struct Generator {
    engine: RoundPipe<Sequential>,
    config: RunConfig,
    vocab: usize,
    max_positions: usize,
    resident: bool,
}

impl Generator {
    /// An engine on the first of `devices` that reads the weights of `model`. A model that another
    /// engine trains goes on being trained: each text is written with the newest weights when it
    /// begins, and memory is shared.
    ///
    /// # Errors
    /// [`Error::Argument`] without devices; when memory runs out.
    pub fn new(model: &Model, devices: &[Arc<dyn Device>], options: &RingOptions) -> Result<Self> {
        let Some(device) = devices.first() else {
            return Err(Error::argument("devices", "there is none to generate on"));
        };
        let ring = Ring::new(std::slice::from_ref(device), options)?;
        let bytes: u64 = model
            .named_params()
            .iter()
            .map(|(_, p)| p.bytes() as u64)
            .sum();
        let room = ring.workers()[0].pool().capacity().0 as f64 * RESIDENT_SHARE;
        Self::build(model, &ring, options.pin, bytes as f64 <= room)
    }

    /// The same on workers that another engine has: weights are sent there when they are used, so
    /// no memory is taken from that engine but while a text is written.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn on_ring(model: &Model, ring: &Ring, pin: Pin) -> Result<Self> {
        Self::build(model, ring, pin, false)
    }

    fn build(model: &Model, ring: &Ring, pin: Pin, resident: bool) -> Result<Self> {
        let engine = RoundPipe::builder(model.layers.clone())
            .name("generate")
            .max_lag(Lag::Zero)
            .inference(true)
            .ring(ring)
            .pin(pin)
            .resident(resident)
            .build()?;
        engine.set_training(false);
        let config = RunConfig::new()
            .num_microbatch(1)
            .requires_grad(false)
            .merge_output(MergeOutput::Off)
            .output_device(OutputDevice::Worker(0));
        let (vocab, max_positions) = (model.config.vocab, model.config.max_positions);
        Ok(Self {
            engine,
            config,
            vocab,
            max_positions,
            resident,
        })
    }

    /// Whether the weights stay on the worker.
    pub fn is_resident(&self) -> bool {
        self.resident
    }

    /// The engine.
    pub fn engine(&self) -> &RoundPipe<Sequential> {
        &self.engine
    }

    /// Continues `prompt`; `each` sees every token as it comes and may break off. Returns the new
    /// tokens and why they end.
    ///
    /// # Errors
    /// [`Error::Argument`] for a prompt that is empty, too long or not of this model; what the
    /// engine reports.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Vec<u32>, Finish)> {
        self.check(prompt)?;
        let mut tokens: Vec<u32> = Vec::new();
        let mut past = None;
        let mut fed = 0;
        let mut next = prompt.to_vec();
        loop {
            if tokens.len() >= options.max_tokens {
                return Ok((tokens, Finish::Length));
            }
            if fed + next.len() > self.max_positions {
                return Ok((tokens, Finish::Context));
            }
            fed += next.len();
            let logits = self.feed(&next, &mut past)?;
            let token = options.sampler.choose(&logits, tokens.len() as u64) as u32;
            if options.stop.contains(&token) {
                return Ok((tokens, Finish::Stop));
            }
            tokens.push(token);
            if each(token).is_break() {
                return Ok((tokens, Finish::Caller));
            }
            next = vec![token];
        }
    }

    /// Continues every prompt; `each` sees every token as it comes, with the number of its prompt,
    /// and may break that text off. Returns the new tokens of each and why they end, in the order of
    /// the prompts. What a prompt gets does not depend on which others stand beside it: it is what
    /// [`Generator::generate`] gives for it alone.
    ///
    /// # Errors
    /// As [`Generator::generate`]; a prompt that is refused is refused before any token is made.
    pub fn generate_batch(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        mut each: impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Vec<(Vec<u32>, Finish)>> {
        for prompt in prompts {
            self.check(prompt)?;
        }
        prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| self.generate(prompt, options, |token| each(i, token)))
            .collect()
    }

    /// Logits [1, S, V] of every position of `ids`, without a past.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn logits(&self, ids: &[u32]) -> Result<HostTensor> {
        self.check(ids)?;
        let args = Inputs::new().named("ids", tensor(ids)?);
        Ok(self
            .engine
            .forward(args, &self.config)?
            .unmerged()
            .wait(0)?
            .tensor()?)
    }

    fn check(&self, prompt: &[u32]) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::argument(
                "prompt",
                "it has no tokens; write at least one word",
            ));
        }
        if prompt.len() > self.max_positions {
            let why = format!(
                "{} tokens; the model's longest sequence is {}",
                prompt.len(),
                self.max_positions
            );
            return Err(Error::argument("prompt", why));
        }
        match prompt.iter().find(|id| **id as usize >= self.vocab) {
            None => Ok(()),
            Some(id) => {
                let why = format!(
                    "token {id}; the model knows {} (is this its tokenizer?)",
                    self.vocab
                );
                Err(Error::argument("prompt", why))
            }
        }
    }

    /// Runs some tokens behind the past and gives the logits of the last.
    fn feed(&self, ids: &[u32], past: &mut Option<MicrobatchOutputs>) -> Result<Vec<f32>> {
        for part in ids.chunks(PROMPT_STEP) {
            let mut args = Inputs::new().named("ids", tensor(part)?);
            args = args
                .named("keep", Tree::Int(1))
                .named("cache", Tree::Bool(true));
            if let Some(past) = past.take() {
                args = args.named("past", past);
            }
            *past = Some(self.engine.forward(args, &self.config)?.unmerged());
        }
        let Some(past) = past else {
            return Err(Error::argument("prompt", "it has no tokens"));
        };
        let logits = past.get("logits").wait(0)?.tensor()?;
        Ok(logits.to_f64_vec()?.into_iter().map(|x| x as f32).collect())
    }
}

fn tensor(ids: &[u32]) -> Result<HostTensor> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    Ok(HostTensor::from_slice(&ids, &[1, ids.len()])?)
}
