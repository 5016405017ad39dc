//! Text from a model, token by token.
//!
//! The path of a token: ids -> embedding -> blocks, each beside the keys and values it has seen ->
//! logits of the last position -> [`Sampler`] -> the caller, and back as the next id. Keys and
//! values stay on the worker from token to token.
//!
//! Where the weights fit beside that, they stay too, and several texts are written at once
//! (`resident`). Else they are streamed through the worker for every token by the engine that also
//! trains, one text after another: slow, but it needs no more than two stages of memory
//! (`streamed`).
//!
//! Everything runs on the first worker: what a second could do while the first decodes is nothing.
//!
//! # Invariants
//! - The tokens depend on model, prompt and sampler only: not on residency, nor on the prompts
//!   beside it. On a cpu not on how a prompt is cut either; a GPU computes the many rows of a chunk
//!   in another order than single ones.

mod resident;
mod speed;
mod streamed;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use roundpipe::{Device, HostTensor, Params, Pin, Ring, RingOptions, RoundPipe, Sequential};

use crate::decoder::Model;
use crate::error::{Error, Result};
use crate::sample::Sampler;
pub use speed::Speed;

use resident::{Outcome, Resident, Rows, UploadedWeights};
use streamed::Streamed;

/// Tokens of a prompt that are run at once: bounds the memory of a long one.
const PROMPT_STEP: usize = 1024;
/// Texts that are written at once, at most.
const MAX_ROWS: usize = 16;
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
    streamed: Streamed,
    resident: Option<Resident>,
    vocab: usize,
    max_positions: usize,
}

impl Generator {
    /// A generator on the first of `devices` that reads the weights of `model`. A model that an
    /// engine trains goes on being trained: each text is written with the newest weights when it
    /// begins, and memory is shared.
    ///
    /// # Errors
    /// [`Error::Argument`] without devices; when memory runs out.
    pub fn new(model: &Model, devices: &[Arc<dyn Device>], options: &RingOptions) -> Result<Self> {
        Ok(Self::several(&[model], devices, options)?.remove(0))
    }

    /// A generator for each model, all on the first of `devices`. Weights that models share are
    /// there once; they stay where those of all models fit.
    ///
    /// # Errors
    /// As [`Generator::new`].
    pub fn several(
        models: &[&Model],
        devices: &[Arc<dyn Device>],
        options: &RingOptions,
    ) -> Result<Vec<Self>> {
        let Some(device) = devices.first() else {
            return Err(Error::argument("devices", "there is none to generate on"));
        };
        let ring = Ring::new(std::slice::from_ref(device), options)?;
        let params = models.iter().flat_map(|model| model.named_params());
        let bytes: HashMap<_, _> = params.map(|(_, p)| (p.id(), p.bytes() as u64)).collect();
        let room = ring.workers()[0].pool().capacity().0 as f64 * RESIDENT_SHARE;
        let fits = bytes.values().sum::<u64>() as f64 <= room;
        let shared = UploadedWeights::default();
        let resident = fits.then_some(&shared);
        models
            .iter()
            .map(|model| Self::build(model, &ring, options.pin, resident))
            .collect()
    }

    /// The same on workers that another engine has: weights are sent there when they are used, or
    /// read in place, so no memory is taken from that engine but while a text is written.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn on_ring(model: &Model, ring: &Ring, pin: Pin) -> Result<Self> {
        let in_place = ring.workers()[0].device().aliases_host();
        let resident = UploadedWeights::default();
        Self::build(model, ring, pin, in_place.then_some(&resident))
    }

    fn build(
        model: &Model,
        ring: &Ring,
        pin: Pin,
        resident: Option<&UploadedWeights>,
    ) -> Result<Self> {
        // The engine is made in either case: it brings the weights to memory that is fast to send.
        let streamed = Streamed::new(model, ring, pin)?;
        let worker = &ring.workers()[0];
        Ok(Self {
            streamed,
            resident: resident.map(|weights| Resident::new(model, worker, weights)),
            vocab: model.config.vocab,
            max_positions: model.config.max_positions,
        })
    }

    /// Whether the weights stay on the worker.
    pub fn is_resident(&self) -> bool {
        self.resident.is_some()
    }

    /// The model's longest sequence, in tokens.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// The engine that streams the weights where they do not stay.
    pub fn engine(&self) -> &RoundPipe<Sequential> {
        self.streamed.engine()
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
        each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Vec<u32>, Finish)> {
        self.sequence().generate(prompt, options, each)
    }

    /// An empty sequence of tokens, to be continued several times.
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence {
            generator: self,
            rows: None,
            held: Vec::new(),
        }
    }

    /// Continues every prompt; `each` sees every token as it comes, with the number of its prompt,
    /// and may break that text off. Returns the new tokens of each and why they end, in the order of
    /// the prompts. What a prompt gets does not depend on which others stand beside it: it is what
    /// [`Generator::generate`] gives for it alone. Where the weights stay on the worker, up to 16
    /// texts are written at once.
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
        let Some(resident) = &self.resident else {
            let one = |(i, prompt): (usize, &Vec<u32>)| {
                self.generate(prompt, options, |token| each(i, token))
            };
            return prompts.iter().enumerate().map(one).collect();
        };
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let places = longest
            .saturating_add(options.max_tokens)
            .min(self.max_positions);
        let wanted = prompts.len().clamp(1, MAX_ROWS);
        let rows = Rows::new(resident, resident.rows_that_fit(wanted, places))?;
        let batch = Batch {
            rows,
            texts: Vec::new(),
            limits: Limits {
                options,
                max_positions: self.max_positions,
            },
        };
        batch.run(prompts, &mut each)
    }

    /// Logits [1, S, V] of every position of `ids`, without a past.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn logits(&self, ids: &[u32]) -> Result<HostTensor> {
        self.check(ids)?;
        self.streamed.logits(ids)
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
}

/// What ends a text.
struct Limits<'o> {
    options: &'o GenerateOptions,
    max_positions: usize,
}

impl Limits<'_> {
    /// Why a text of `tokens` tokens ends before the next, of which `fed` and `next` more would have
    /// been fed.
    fn before(&self, tokens: usize, fed: usize, next: usize) -> Option<Finish> {
        if tokens >= self.options.max_tokens {
            return Some(Finish::Length);
        }
        (fed + next > self.max_positions).then_some(Finish::Context)
    }

    /// The tokens that come next after `rows` texts of so many tokens each.
    fn choose(&self, outcome: &Outcome, rows: usize, tokens: &[usize]) -> Vec<u32> {
        let logits = match outcome {
            Outcome::Likeliest(tokens) => return tokens.clone(),
            Outcome::Logits(logits) => logits,
        };
        let choose = |(row, tokens): (&[f32], &usize)| {
            self.options.sampler.choose(row, *tokens as u64) as u32
        };
        let vocab = logits.len() / rows;
        logits.chunks_exact(vocab).zip(tokens).map(choose).collect()
    }

    /// Adds the next token to a text, or says why it ends with it.
    fn accept(
        &self,
        token: u32,
        tokens: &mut Vec<u32>,
        each: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> ControlFlow<Finish, u32> {
        if self.options.stop.contains(&token) {
            return ControlFlow::Break(Finish::Stop);
        }
        tokens.push(token);
        match each(token) {
            ControlFlow::Continue(()) => ControlFlow::Continue(token),
            ControlFlow::Break(()) => ControlFlow::Break(Finish::Caller),
        }
    }
}

/// Tokens that are continued several times, such as a conversation: what a prompt has in common
/// with the tokens before is not computed again where the weights stay on the worker.
///
/// The weights are those of the moment when the first text began.
pub struct Sequence<'g> {
    generator: &'g Generator,
    rows: Option<Rows<'g>>,
    /// Tokens that the caches hold.
    held: Vec<u32>,
}

impl Sequence<'_> {
    /// Tokens that a prompt may begin with without being computed again.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// Continues `prompt`, all of it, as [`Generator::generate`] does and with the same tokens.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        mut each: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(Vec<u32>, Finish)> {
        self.generator.check(prompt)?;
        let limits = Limits {
            options,
            max_positions: self.generator.max_positions,
        };
        if let Some(resident) = &self.generator.resident {
            if self.rows.is_none() {
                self.rows = Some(Rows::new(resident, 1)?);
            }
            // After a failure nothing is known of the caches.
            let held = std::mem::take(&mut self.held);
            self.held = self.rewind(&held, prompt);
        }
        let mut past = self.generator.streamed.start();
        let mut next = prompt[self.held.len()..].to_vec();
        let (mut tokens, mut fed) = (Vec::new(), self.held.len());
        loop {
            if let Some(finish) = limits.before(tokens.len(), fed, next.len()) {
                return Ok((tokens, finish));
            }
            fed += next.len();
            let likeliest = options.sampler.is_greedy();
            let outcome = match &mut self.rows {
                // Prompts always as such, also of one token: as in a batch.
                Some(rows) if !tokens.is_empty() => rows.step(&[Some(next[0])], likeliest)?,
                Some(rows) => Outcome::Logits(rows.feed(0, &next)?),
                None => Outcome::Logits(past.feed(&next)?),
            };
            let token = limits.choose(&outcome, 1, &[tokens.len()])[0];
            if self.rows.is_some() {
                self.held.extend(&next);
            }
            match limits.accept(token, &mut tokens, &mut each) {
                ControlFlow::Continue(token) => next = vec![token],
                ControlFlow::Break(finish) => return Ok((tokens, finish)),
            }
        }
    }

    /// Goes back to what `prompt` has in common with what is held, and says what that is. The last
    /// token is always fed: its logits are wanted.
    fn rewind(&mut self, held: &[u32], prompt: &[u32]) -> Vec<u32> {
        let common = held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let common = common.min(prompt.len() - 1);
        if let Some(rows) = &mut self.rows {
            rows.rewind(0, common);
        }
        prompt[..common].to_vec()
    }
}

/// Several texts under way.
struct Batch<'g> {
    rows: Rows<'g>,
    /// What each row writes.
    texts: Vec<Option<Text>>,
    limits: Limits<'g>,
}

/// A text under way.
struct Text {
    prompt: usize,
    tokens: Vec<u32>,
    next: u32,
}

impl Batch<'_> {
    fn run(
        mut self,
        prompts: &[Vec<u32>],
        each: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Vec<(Vec<u32>, Finish)>> {
        let mut done: Vec<Option<(Vec<u32>, Finish)>> = prompts.iter().map(|_| None).collect();
        let mut waiting = prompts.iter().enumerate();
        self.texts.resize_with(self.rows.len(), || None);
        loop {
            for row in 0..self.rows.len() {
                while self.texts[row].is_none() {
                    let Some((i, prompt)) = waiting.next() else {
                        break;
                    };
                    done[i] = self.start(row, i, prompt, each)?;
                }
            }
            if self.texts.iter().all(Option::is_none) {
                break;
            }
            self.leave_out_idle()?;
            self.step(&mut done, each)?;
        }
        Ok(done.into_iter().flatten().collect())
    }

    /// Feeds a prompt to a row; gives what came of it where that was all.
    fn start(
        &mut self,
        row: usize,
        i: usize,
        prompt: &[u32],
        each: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Option<(Vec<u32>, Finish)>> {
        let mut tokens = Vec::new();
        if let Some(finish) = self.limits.before(0, 0, prompt.len()) {
            return Ok(Some((tokens, finish)));
        }
        self.rows.rewind(row, 0);
        let outcome = Outcome::Logits(self.rows.feed(row, prompt)?);
        let token = self.limits.choose(&outcome, 1, &[0])[0];
        let mut told = |token| each(i, token);
        match self.limits.accept(token, &mut tokens, &mut told) {
            ControlFlow::Break(finish) => Ok(Some((tokens, finish))),
            ControlFlow::Continue(next) => {
                self.texts[row] = Some(Text {
                    prompt: i,
                    tokens,
                    next,
                });
                Ok(None)
            }
        }
    }

    /// Once half of the rows have nothing left to do, they are not computed any more.
    fn leave_out_idle(&mut self) -> Result<()> {
        let busy: Vec<usize> = (0..self.rows.len())
            .filter(|row| self.texts[*row].is_some())
            .collect();
        if 2 * busy.len() > self.rows.len() {
            return Ok(());
        }
        self.rows.keep(&busy)?;
        self.texts.retain(Option::is_some);
        Ok(())
    }

    /// One token more for every text.
    fn step(
        &mut self,
        done: &mut [Option<(Vec<u32>, Finish)>],
        each: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<()> {
        for row in 0..self.texts.len() {
            let fed = self.rows.seen(row);
            let Some(text) = &self.texts[row] else {
                continue;
            };
            if let Some(finish) = self.limits.before(text.tokens.len(), fed, 1) {
                self.finish(row, finish, done);
            }
        }
        let tokens: Vec<Option<u32>> = self.texts.iter().map(|t| Some(t.as_ref()?.next)).collect();
        if tokens.iter().all(Option::is_none) {
            return Ok(());
        }
        let likeliest = self.limits.options.sampler.is_greedy();
        let outcome = self.rows.step(&tokens, likeliest)?;
        let written = |text: &Option<Text>| text.as_ref().map_or(0, |text| text.tokens.len());
        let written: Vec<usize> = self.texts.iter().map(written).collect();
        let chosen = self.limits.choose(&outcome, tokens.len(), &written);
        for (row, token) in chosen.into_iter().enumerate() {
            let Some(text) = &mut self.texts[row] else {
                continue;
            };
            let prompt = text.prompt;
            let mut told = |token| each(prompt, token);
            match self.limits.accept(token, &mut text.tokens, &mut told) {
                ControlFlow::Continue(token) => text.next = token,
                ControlFlow::Break(finish) => self.finish(row, finish, done),
            }
        }
        Ok(())
    }

    fn finish(&mut self, row: usize, finish: Finish, done: &mut [Option<(Vec<u32>, Finish)>]) {
        if let Some(text) = self.texts[row].take() {
            done[text.prompt] = Some((text.tokens, finish));
        }
    }
}
