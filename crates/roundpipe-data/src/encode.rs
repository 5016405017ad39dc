//! Rows to tokens: the model's own chat template and tokenizer, and which tokens are learned.
//!
//! Of a conversation the assistant's turns are learned, with the token that ends each; of a prompt
//! with its completion, the completion and an end; of a text, all of it. `roundpipe-models` finds the
//! assistant's turns; where it cannot, the row is refused.
//!
//! # Invariants
//! - What comes out depends on the row, the tokenizer and the options alone: not on the clock, which
//!   some templates would write into the text.

use std::ops::Range;

use roundpipe_models::chat::mask::{IGNORED, TrainOn, assistant_labels};
use roundpipe_models::chat::{ChatTemplate, RenderOptions};
use roundpipe_models::tokenizer::Tokenizer;
use serde_json::{Map, Value as Json};

use crate::error::{Error, Result};
use crate::format::{Chat, Example};
use crate::preference::Pair;

/// 1 January 2025: the date that templates write unless another is given.
const NOW_S: i64 = 1_735_689_600;

/// Bytes of a text that are tokenised at once.
const SLICE_BYTES: usize = 128 << 10;
/// The most bytes of a conversation, which is tokenised as a whole.
const MOST_CHAT_BYTES: usize = 1 << 20;

/// Which tokens are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Learn {
    /// What the assistant says, and completions.
    #[default]
    Assistant,
    /// Only the assistant's last turn.
    LastTurn,
    /// Everything, prompts too.
    Everything,
}

/// How rows become tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodeOptions {
    /// Which tokens are learned.
    pub learn: Learn,
    /// Further variables of the chat template, such as `enable_thinking`; those of a row win.
    pub variables: Map<String, Json>,
    /// The time that templates see, in seconds since 1970. It is not the clock's, so that a run that
    /// resumes tomorrow sees the same tokens.
    pub now_s: i64,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            learn: Learn::default(),
            variables: Map::new(),
            now_s: NOW_S,
        }
    }
}

/// A row as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// For each token whether it is learned.
    pub learned: Vec<bool>,
}

impl Document {
    /// How many tokens a model is given: all but the last, which is only predicted.
    pub fn inputs(&self) -> usize {
        self.ids.len().saturating_sub(1)
    }

    /// How many tokens are predicted and learned.
    pub fn labels(&self) -> usize {
        self.learned
            .iter()
            .skip(1)
            .filter(|learned| **learned)
            .count()
    }

    /// The label at an input: the token behind it where that is learned, else -100.
    pub(crate) fn label(&self, at: usize) -> i64 {
        if self.learned[at + 1] {
            i64::from(self.ids[at + 1])
        } else {
            IGNORED
        }
    }

    /// The inputs `range` and the token behind them.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        Self {
            ids: self.ids[range.start..=range.end].to_vec(),
            learned: self.learned[range.start..=range.end].to_vec(),
        }
    }
}

/// Turns rows into tokens.
#[derive(Debug)]
pub struct Encoder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    tools_template: Option<ChatTemplate>,
    options: EncodeOptions,
}

impl Encoder {
    /// With the chat template of the tokenizer's folder, if there is one.
    ///
    /// # Errors
    /// [`Error::Setting`] when the template cannot be parsed.
    pub fn new(tokenizer: Tokenizer, options: EncodeOptions) -> Result<Self> {
        let template = |with_tools| {
            let template = tokenizer.chat_template(with_tools);
            template.map_err(|e| Error::setting("chat template", e.to_string()))
        };
        Ok(Self {
            template: template(false)?,
            tools_template: template(true)?,
            tokenizer,
            options,
        })
    }

    /// With another chat template, for all conversations.
    #[must_use]
    pub fn template(mut self, template: ChatTemplate) -> Self {
        self.template = Some(template.clone());
        self.tools_template = Some(template);
        self
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The id that fills rows up: that for padding, else one that ends a text, else 0. Its label is
    /// -100, so which one it is changes nothing.
    pub fn pad(&self) -> u32 {
        let eos = self.tokenizer.eos().first().copied();
        self.tokenizer.pad().or(eos).unwrap_or(0)
    }

    /// A document as pieces of text that are learned or not.
    pub fn pieces(&self, document: &Document) -> Vec<(String, bool)> {
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < document.ids.len() {
            let learned = document.learned[start];
            let rest = document.learned[start..].iter();
            let end = start + rest.take_while(|other| **other == learned).count();
            let text = self.tokenizer.decode(&document.ids[start..end], false);
            pieces.push((text.unwrap_or_default(), learned));
            start = end;
        }
        pieces
    }

    /// The tokens of a row.
    ///
    /// # Errors
    /// Why it cannot be learned, and the fix; the caller knows which row it is.
    pub fn encode(&self, example: &Example) -> Result<Document, String> {
        match example {
            Example::Chat(chat) => self.chat(chat),
            Example::Completion { prompt, completion } => self.completion(prompt, completion),
            Example::Text { text, ends } => {
                let mut ids = self.ids(text)?.0;
                if *ends {
                    self.end(&mut ids);
                }
                let learned = vec![true; ids.len()];
                Ok(Document { ids, learned })
            }
            Example::Preference(_) => Err(
                "is a pair of answers, which only preference tuning learns from; use `--method dpo` or orpo"
                    .into(),
            ),
        }
    }

    /// The tokens of both sides of a pair, the chosen one first.
    ///
    /// # Errors
    /// As [`Encoder::encode`].
    pub fn encode_pair(&self, pair: &Pair) -> Result<[Document; 2], String> {
        let side = |example: &Example, key: &str| {
            let encoded = self.encode(example);
            encoded.map_err(|what| format!("its `{key}` {what}"))
        };
        Ok([
            side(&pair.chosen, "chosen")?,
            side(&pair.rejected, "rejected")?,
        ])
    }

    fn chat(&self, chat: &Chat) -> Result<Document, String> {
        let template = match chat.tools {
            Some(_) => &self.tools_template,
            None => &self.template,
        };
        let Some(template) = template else {
            let what = "is a conversation, and the model has no chat template; use a model that has one, \
                        or rows of `prompt` and `completion`";
            return Err(what.into());
        };
        let values = chat.messages.iter().flat_map(|message| message.0.values());
        if text_bytes(values) > MOST_CHAT_BYTES {
            let most = MOST_CHAT_BYTES;
            return Err(format!(
                "its messages have more than {most} bytes; split the conversation"
            ));
        }
        let mut variables = self.options.variables.clone();
        variables.extend(chat.variables.clone());
        let options = RenderOptions {
            tools: chat.tools.clone(),
            variables,
            now_s: Some(self.options.now_s),
            ..RenderOptions::default()
        };
        let messages = &chat.messages;
        if self.options.learn == Learn::Everything {
            let text = template
                .render(messages, &options)
                .map_err(|e| e.to_string())?;
            let ids = self
                .tokenizer
                .encode(&text, false)
                .map_err(|e| e.to_string())?;
            let learned = vec![true; ids.len()];
            return Ok(Document { ids, learned });
        }
        let train_on = match self.options.learn {
            Learn::LastTurn => TrainOn::Last,
            _ => chat.train_on,
        };
        let name = "the conversation";
        let labelled = assistant_labels(
            &self.tokenizer,
            template,
            messages,
            &options,
            train_on,
            name,
        )
        .map_err(|e| e.to_string())?;
        Ok(Document {
            ids: labelled.ids,
            learned: labelled
                .labels
                .iter()
                .map(|label| *label != IGNORED)
                .collect(),
        })
    }

    /// One text, so that no token depends on where the prompt ends; a token across that place is
    /// learned.
    fn completion(&self, prompt: &str, completion: &str) -> Result<Document, String> {
        let (mut ids, ends) = self.ids(&format!("{prompt}{completion}"))?;
        let everything = self.options.learn == Learn::Everything;
        let is_learned = |end: &usize| everything || *end > prompt.len();
        let mut learned: Vec<bool> = ends.iter().map(is_learned).collect();
        self.end(&mut ids);
        learned.resize(ids.len(), true);
        // The token that ends the text may have been there already.
        if let Some(last) = learned.last_mut() {
            *last = true;
        }
        Ok(Document { ids, learned })
    }

    /// Tokens of a text with those that begin one and without one that ends it, and where each ends.
    fn ids(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>), String> {
        let mut ids = Vec::new();
        let mut ends = Vec::new();
        for slice in slices(text) {
            let before = slice.start;
            let (more, offsets) = self
                .tokenizer
                .encode_with_offsets(&text[slice], before == 0)
                .map_err(|e| e.to_string())?;
            ids.extend(more);
            ends.extend(offsets.iter().map(|range| before + range.end));
            // An end that the tokenizer adds stands for no bytes.
            let added = offsets.last().is_some_and(|range| range.is_empty());
            if added && ids.last() == self.tokenizer.eos().first() {
                ids.pop();
                ends.pop();
            }
        }
        Ok((ids, ends))
    }

    /// Puts the token that ends a text behind it, unless it is there.
    fn end(&self, ids: &mut Vec<u32>) {
        if let Some(eos) = self.tokenizer.eos().first()
            && ids.last() != Some(eos)
        {
            ids.push(*eos);
        }
    }
}

/// A long text in parts that are tokenised one by one, since the tokenizer takes some 150 bytes for
/// each byte of a text. They begin with a space or a line end, where words do not join, if there is
/// one.
fn slices(text: &str) -> Vec<Range<usize>> {
    let mut slices = Vec::new();
    let mut start = 0;
    while text.len() - start > SLICE_BYTES {
        let most = text.floor_char_boundary(start + SLICE_BYTES);
        let part = &text.as_bytes()[start + 1..most];
        let last = |byte: u8| part.iter().rposition(|b| *b == byte);
        let pause = last(b'\n').filter(|at| *at > part.len() / 2).or(last(b' '));
        let end = pause.map_or(most, |at| start + 1 + at);
        slices.push(start..end);
        start = end;
    }
    slices.push(start..text.len());
    slices
}

/// Bytes of all texts in a value.
fn text_bytes<'a>(values: impl IntoIterator<Item = &'a Json>) -> usize {
    let bytes = |value: &Json| match value {
        Json::String(text) => text.len(),
        Json::Array(items) => text_bytes(items),
        Json::Object(fields) => text_bytes(fields.values()),
        _ => 0,
    };
    values.into_iter().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_the_text() {
        let words = "the ships pass ".repeat(50_000);
        let lines = "a line of text\n".repeat(50_000);
        let dense = "\u{e9}".repeat(300_000);
        for text in [String::new(), "short".into(), words, lines, dense] {
            let slices = slices(&text);
            let whole: String = slices.iter().map(|slice| &text[slice.clone()]).collect();
            assert_eq!(whole, text);
            assert!(slices.iter().all(|slice| slice.len() <= SLICE_BYTES));
            assert_eq!(slices.len() > 3, text.len() > 100);
        }
    }
}
