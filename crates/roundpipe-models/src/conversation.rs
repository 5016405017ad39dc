//! A conversation with a model: messages so far, the next answer, and what is dropped when the
//! model's longest sequence is full.
//!
//! The path of a turn: the user's words -> all messages through the chat template -> tokens -> a
//! [`Sequence`], which computes only what it does not hold -> the answer, which becomes a message.
//!
//! A model without a chat template is refused: it has no words for turns.
//!
//! # Invariants
//! - Messages alternate between user and assistant, after the system's where there is one; a turn
//!   that fails leaves them as they were.
//! - What is dropped is always whole turns, the oldest first, and never the system's message.

use std::ops::ControlFlow;

use crate::chat::Message;
use crate::error::{Error, Result};
use crate::generate::{Finish, GenerateOptions, Generator, Sequence};
use crate::tokenizer::Tokenizer;

/// Of the model's longest sequence, the part that an answer may count on: turns are dropped until
/// there is room for as much, or for the answer that is asked for if that is less.
const ANSWER_SHARE: usize = 4;

/// Messages and the tokens that a generator holds of them.
pub struct Conversation<'g> {
    tokenizer: &'g Tokenizer,
    sequence: Sequence<'g>,
    system: Option<String>,
    /// The user's words and the answer.
    turns: Vec<(String, String)>,
    max_positions: usize,
    asked: u64,
}

/// What a model said in a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its words.
    pub text: String,
    /// Why they end.
    pub finish: Finish,
    /// Turns that were dropped before, since the model's longest sequence was full.
    pub dropped: usize,
    /// Tokens of the conversation before the answer, and those of them that were computed now.
    pub prompt_tokens: (usize, usize),
}

impl<'g> Conversation<'g> {
    /// An empty conversation.
    ///
    /// # Errors
    /// [`Error::Argument`] where the tokenizer has no chat template, or one that cannot be rendered.
    pub fn new(
        generator: &'g Generator,
        tokenizer: &'g Tokenizer,
        system: Option<String>,
    ) -> Result<Self> {
        let conversation = Self {
            tokenizer,
            sequence: generator.sequence(),
            system,
            turns: Vec::new(),
            max_positions: generator.max_positions(),
            asked: 0,
        };
        conversation.tokens(0, "…")?;
        Ok(conversation)
    }

    /// The messages so far.
    pub fn messages(&self) -> Vec<Message> {
        self.messages_from(0)
    }

    /// Forgets all turns; the system's message stays.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// Replaces the system's message and forgets all turns.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.reset();
    }

    /// Answers; `each` sees the answer's words as they come and may break off, and what came until
    /// then is the answer. With a temperature, every turn draws other random numbers.
    ///
    /// # Errors
    /// [`Error::Argument`] when the words alone are too long for the model; what the engine reports.
    pub fn ask(
        &mut self,
        words: &str,
        options: &GenerateOptions,
        mut each: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        let room = options.max_tokens.min(self.max_positions / ANSWER_SHARE);
        let mut dropped = 0;
        let mut prompt = self.tokens(0, words)?;
        while prompt.len() + room > self.max_positions && dropped < self.turns.len() {
            dropped += 1;
            prompt = self.tokens(dropped, words)?;
        }
        if prompt.len() >= self.max_positions {
            let why = format!(
                "{} tokens; the model's longest sequence is {}: say it in fewer words",
                prompt.len(),
                self.max_positions
            );
            return Err(Error::argument("message", why));
        }
        let mut options = options.clone();
        options.sampler.seed = options.sampler.seed.wrapping_add(self.asked);
        let held = self.sequence.held().iter().zip(&prompt);
        let known = held
            .take_while(|(a, b)| a == b)
            .count()
            .min(prompt.len() - 1);
        let mut stream = self.tokenizer.stream(true);
        let mut text = String::new();
        let mut failed = None;
        let (_, finish) =
            self.sequence
                .generate(&prompt, &options, |token| match stream.push(token) {
                    Ok(Some(piece)) => {
                        text.push_str(&piece);
                        each(&piece)
                    }
                    Ok(None) => ControlFlow::Continue(()),
                    Err(error) => {
                        failed = Some(error);
                        ControlFlow::Break(())
                    }
                })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = stream.finish()?;
        if !rest.is_empty() {
            text.push_str(&rest);
            let _ = each(&rest);
        }
        self.turns.drain(..dropped);
        self.turns.push((words.to_owned(), text.clone()));
        self.asked += 1;
        Ok(Answer {
            text,
            finish,
            dropped,
            prompt_tokens: (prompt.len(), prompt.len() - known),
        })
    }

    /// The tokens of the conversation without its first turns, up to where the answer to `words`
    /// begins.
    fn tokens(&self, first: usize, words: &str) -> Result<Vec<u32>> {
        let mut messages = self.messages_from(first);
        messages.push(Message::new("user", words));
        self.tokenizer.encode_chat(&messages)?.ok_or_else(|| {
            let why = "it has no chat template, so it knows no turns; `roundpipe generate --raw` continues a text";
            Error::argument("model", why)
        })
    }

    fn messages_from(&self, first: usize) -> Vec<Message> {
        let system = self
            .system
            .iter()
            .map(|text| Message::new("system", text.as_str()));
        let turns = self.turns[first..].iter().flat_map(|(words, answer)| {
            [
                Message::new("user", words.as_str()),
                Message::new("assistant", answer.as_str()),
            ]
        });
        system.chain(turns).collect()
    }
}
