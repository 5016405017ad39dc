//! Questions with choices: every choice is a document whose likelihood is compared.

use std::path::Path;

use roundpipe_data::{Chat, Document, Encoder, Example};
use roundpipe_models::chat::Message;
use roundpipe_models::chat::mask::TrainOn;
use serde_json::Map;

use super::stats::Share;
use super::tasks::{Choice, Question};
use super::{Detail, Details, EvalOptions, Scorer, detail};
use crate::error::{Error, Result};

/// Questions that wait, each with one document per choice.
pub(super) struct Choices<'e> {
    name: String,
    encoder: &'e Encoder,
    has_template: bool,
    longest: usize,
    waiting: Vec<Waiting>,
}

struct Waiting {
    line: u64,
    documents: Vec<Document>,
    bytes: Vec<usize>,
    right: usize,
    expected: String,
}

impl<'e> Choices<'e> {
    pub fn new(path: &Path, encoder: &'e Encoder, options: &EvalOptions, longest: usize) -> Self {
        let template = encoder.tokenizer().chat_template(false);
        Self {
            name: path.display().to_string(),
            encoder,
            has_template: !options.raw && matches!(template, Ok(Some(_))),
            longest,
            waiting: Vec::new(),
        }
    }

    /// Questions that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, line: u64, choice: Choice) -> Result<()> {
        let refuse = |what: String| Error::Failed(format!("{}:{line}: {what}", self.name));
        let mut documents = Vec::new();
        for text in &choice.choices {
            let example = self.example(&choice.question, text);
            let mut document = self.encoder.encode(&example).map_err(refuse)?;
            self.without_end(&mut document);
            if document.inputs() > self.longest {
                let (count, most) = (document.inputs(), self.longest);
                return Err(refuse(format!(
                    "has {count} tokens with a choice, and rows have {most}; raise --seq"
                )));
            }
            documents.push(document);
        }
        self.waiting.push(Waiting {
            line,
            documents,
            bytes: choice.choices.iter().map(String::len).collect(),
            right: choice.right,
            expected: choice.choices[choice.right].clone(),
        });
        Ok(())
    }

    fn example(&self, question: &Question, choice: &str) -> Example {
        let answered = |mut messages: Vec<Message>| {
            messages.push(Message::new("assistant", choice));
            Example::Chat(Chat {
                messages,
                tools: None,
                variables: Map::new(),
                train_on: TrainOn::Last,
            })
        };
        let completed = |prompt: String| {
            let joins =
                prompt.ends_with(char::is_whitespace) || choice.starts_with(char::is_whitespace);
            let completion = if joins {
                choice.to_owned()
            } else {
                format!(" {choice}")
            };
            Example::Completion { prompt, completion }
        };
        match question {
            Question::Messages(messages) => answered(messages.clone()),
            Question::Asked(text) | Question::Prompt(text) if self.has_template => {
                answered(vec![Message::new("user", text.as_str())])
            }
            Question::Asked(text) => completed(format!("Question: {text}\nAnswer:")),
            Question::Prompt(text) | Question::Begun(text) => completed(text.clone()),
        }
    }

    /// The end of a text or a turn follows every choice, so it says nothing about them.
    fn without_end(&self, document: &mut Document) {
        let Some(last) = document.learned.iter().rposition(|learned| *learned) else {
            return;
        };
        if self.encoder.tokenizer().eos().contains(&document.ids[last]) {
            document.learned[last] = false;
            document.ids.truncate(last);
            document.learned.truncate(last);
        }
    }

    /// Scores all that wait.
    pub fn finish(
        &mut self,
        scorer: &Scorer,
        by_sum: &mut Share,
        by_length: &mut Share,
        details: Details<'_>,
    ) -> Result<()> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut likelihoods: Vec<Vec<f64>> = Vec::new();
        let documents = waiting
            .iter_mut()
            .flat_map(|question| {
                std::mem::take(&mut question.documents)
                    .into_iter()
                    .enumerate()
            })
            .map(Ok);
        scorer.score(documents, |choice, score| {
            if choice == 0 {
                likelihoods.push(Vec::new());
            }
            if let Some(last) = likelihoods.last_mut() {
                last.push(-score.loss);
            }
            Ok(())
        })?;
        for (question, choices) in waiting.into_iter().zip(likelihoods) {
            let per_byte: Vec<f64> = choices
                .iter()
                .zip(&question.bytes)
                .map(|(sum, bytes)| sum / *bytes as f64)
                .collect();
            let right = best(&choices) == question.right;
            by_sum.add(right);
            by_length.add(best(&per_byte) == question.right);
            details(&Detail {
                right: Some(right),
                choices,
                expected: Some(question.expected),
                ..detail(&self.name, question.line)
            })?;
        }
        Ok(())
    }
}

/// The first of the largest.
fn best(values: &[f64]) -> usize {
    let mut best = 0;
    for (place, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = place;
        }
    }
    best
}
