//! Which tokens of a conversation to learn: what the assistant says and the token that ends its
//! turn.
//!
//! Three ways to find them, in this order: the template's own `{% generation %}` blocks; rendering
//! the conversation up to and with each turn of the assistant, where the shorter texts begin the
//! longer ones; and rendering with a turn replaced by a known word, where what stands around the
//! word stands in the full text too. Where none of them agrees with the full text, the conversation
//! is refused rather than learned wrongly.
//!
//! # Invariants
//! - The ids are those of the full text; only labels differ between the ways.
//! - There is at least one label.

use std::ops::Range;

use serde_json::{Map, Value as Json};

use super::{ChatTemplate, Message, RenderOptions};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The label of a token that is not learned.
pub const IGNORED: i64 = -100;

/// Which turns of the assistant are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainOn {
    /// Every one.
    #[default]
    All,
    /// The last one only.
    Last,
}

/// A conversation as ids, with the label of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labelled {
    /// The ids of the whole text.
    pub ids: Vec<u32>,
    /// The id itself where it is learned, else [`IGNORED`]; not shifted.
    pub labels: Vec<i64>,
}

impl Labelled {
    /// Inputs, and for each the label of the token that follows it.
    pub fn shifted(&self) -> (Vec<i64>, Vec<i64>) {
        let ids = self.ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>();
        (
            ids[..ids.len().saturating_sub(1)].to_vec(),
            self.labels.iter().skip(1).copied().collect(),
        )
    }
}

/// The ids and labels of a conversation. `name` is what messages call it.
///
/// # Errors
/// [`Error::Argument`] naming the conversation when nothing of it can be learned, or when it is
/// unclear what; [`Error::Template`] when it does not render.
pub fn assistant_labels(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    options: &RenderOptions,
    train_on: TrainOn,
    name: &str,
) -> Result<Labelled> {
    let turns: Vec<usize> = (0..messages.len())
        .filter(|i| messages[*i].role() == "assistant")
        .collect();
    if turns.is_empty() {
        return Err(Error::argument(
            name,
            "has no turn of the assistant to learn; remove it",
        ));
    }
    let options = RenderOptions {
        add_generation_prompt: false,
        ..options.clone()
    };
    let full = template.render_spans(messages, &options)?;
    let search = Search {
        tokenizer,
        template,
        messages,
        options: &options,
        full: &full.text,
    };
    let spans = match &full.spans {
        Some(spans) if train_on == TrainOn::Last => search.last_of(spans, &turns),
        Some(spans) => spans.clone(),
        None => {
            let wanted = if train_on == TrainOn::Last {
                &turns[turns.len() - 1..]
            } else {
                &turns
            };
            wanted
                .iter()
                .map(|turn| search.turn(*turn, name))
                .collect::<Result<_>>()?
        }
    };
    let (ids, offsets) = tokenizer.encode_with_offsets(&full.text, false)?;
    let learned = |at: &Range<usize>| spans.iter().any(|s| at.start < s.end && at.end > s.start);
    let labels: Vec<i64> = ids
        .iter()
        .zip(&offsets)
        .map(|(id, at)| if learned(at) { i64::from(*id) } else { IGNORED })
        .collect();
    if labels.iter().all(|label| *label == IGNORED) {
        return Err(Error::argument(
            name,
            "no token of the assistant is left to learn (its turns are empty)",
        ));
    }
    Ok(Labelled { ids, labels })
}

/// Looks for turns in a rendered conversation.
struct Search<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    messages: &'a [Message],
    options: &'a RenderOptions,
    full: &'a str,
}

impl Search<'_> {
    /// The spans that belong to the last turn: those that the conversation before it does not have.
    fn last_of(&self, spans: &[Range<usize>], turns: &[usize]) -> Vec<Range<usize>> {
        let before = turns.last().and_then(|last| {
            self.template
                .render_spans(&self.messages[..*last], self.options)
                .ok()?
                .spans
                .map(|s| s.len())
        });
        let last_only = spans.len().saturating_sub(1);
        spans[before.unwrap_or(last_only).min(last_only)..].to_vec()
    }

    /// The bytes of one turn.
    fn turn(&self, turn: usize, name: &str) -> Result<Range<usize>> {
        let found = self
            .by_prefixes(turn)
            .or_else(|| self.by_word(turn, false))
            .or_else(|| self.by_word(turn, true));
        found.ok_or_else(|| {
            Error::argument(
                name,
                format!(
                    "cannot tell which part of the text is message {turn}: the template writes other messages \
                     differently with and without it; add {{% generation %}} blocks to the template"
                ),
            )
        })
    }

    /// The text before the turn, with the words that begin an answer, and the text through it must
    /// both begin the full text. Of no use where the template does not write those words: they
    /// would be learned.
    fn by_prefixes(&self, turn: usize) -> Option<Range<usize>> {
        let prompt = RenderOptions {
            add_generation_prompt: true,
            ..self.options.clone()
        };
        let before = self.template.render(&self.messages[..turn], &prompt).ok()?;
        if before
            == self
                .template
                .render(&self.messages[..turn], self.options)
                .ok()?
        {
            return None;
        }
        let through = self
            .template
            .render(&self.messages[..=turn], self.options)
            .ok()?;
        let agree = through.starts_with(&before) && self.full.starts_with(&through);
        agree.then(|| self.without_tail(before.len()..through.len()))
    }

    /// Cuts the whitespace behind the token that ends the turn.
    fn without_tail(&self, span: Range<usize>) -> Range<usize> {
        let kept = self.full[span.clone()].trim_end();
        if self.tokenizer.ends_with_added(kept) {
            span.start..span.start + kept.len()
        } else {
            span
        }
    }

    /// Replaces the turn, or only its content, by a word, and takes what is not around the word.
    fn by_word(&self, turn: usize, content_only: bool) -> Option<Range<usize>> {
        let word = (0..100)
            .map(|i| format!("Zq{i}xwvK"))
            .find(|w| !self.full.contains(w.as_str()))?;
        let mut messages = self.messages.to_vec();
        let mut fields = if content_only {
            messages[turn].0.clone()
        } else {
            Map::new()
        };
        fields.insert("role".into(), Json::String("assistant".into()));
        fields.insert("content".into(), Json::String(word.clone()));
        messages[turn] = Message(fields);
        let text = self.template.render(&messages, self.options).ok()?;
        let (before, after) = text
            .split_once(&word)
            .filter(|(_, after)| !after.contains(&word))?;
        let fits = self.full.len() >= before.len() + after.len();
        if !(fits && self.full.starts_with(before) && self.full.ends_with(after)) {
            return None;
        }
        let end = self.full.len() - after.len();
        let closing = self
            .tokenizer
            .added_prefix(after)
            .map_or(0, |token| token.len());
        Some(before.len()..end + closing)
    }
}
