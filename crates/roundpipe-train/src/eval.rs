//! How good a model is: losses of examples, choices by likelihood, answers that it writes.
//!
//! ```text
//! rows of data  -> documents ------------------.
//! choices       -> one document per choice ----+-> packed rows -> engine -> Score of each document
//! questions     -> prompts -> Generator -> texts, compared with the answers
//! ```
//! Documents are packed, so short ones cost no padding, and go through the engine that trains: a
//! model larger than a GPU is evaluated as it is trained.
//!
//! # Invariants
//! - Nothing is learned and no file is changed.
//! - A document's score depends on its own tokens alone, but for the rounding of sums.
//! - Memory does not grow with the data.

mod choices;
mod score;
mod stats;
mod tasks;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use roundpipe_data::{
    Document, EncodeOptions, Encoder, Example, Input, Rows, Source, SourceOptions,
};
use roundpipe_models::{GenerateOptions, Generator};
use serde::Serialize;

pub use score::{Score, Scorer};
pub use stats::Estimate;
pub use tasks::{Compare, is_task_file};

use crate::error::{Error, Result};
use choices::Choices;
use stats::{Ratio, Share};
use tasks::{Asked, Task, TaskFile};

/// Documents that wait to be scored.
const AHEAD: usize = 256;

/// What is evaluated, and how.
#[derive(Debug, Clone)]
pub struct EvalOptions {
    /// Rows of each file at most.
    pub limit: Option<u64>,
    /// Prompts as they are, without the chat template.
    pub raw: bool,
    /// Tokens of a written answer at most.
    pub max_tokens: usize,
    /// How written answers are compared, where a row does not say it.
    pub compare: Compare,
    /// Questions that are answered together.
    pub batch: usize,
}

impl Default for EvalOptions {
    fn default() -> Self {
        Self {
            limit: None,
            raw: false,
            max_tokens: 128,
            compare: Compare::Exact,
            batch: 16,
        }
    }
}

/// What was found for one file or set of files.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finding {
    /// Of examples: how likely their learned tokens are.
    Examples {
        /// Rows that were read.
        rows: u64,
        /// Rows that were longer than a sequence, and cut or split.
        too_long: u64,
        /// Learned tokens.
        tokens: u64,
        /// Mean loss of a token.
        loss: Estimate,
        /// Its exponential.
        perplexity: Estimate,
        /// Share of tokens that were the likeliest.
        token_accuracy: Estimate,
    },
    /// Of questions with choices.
    Choices {
        /// Questions.
        rows: u64,
        /// Share answered right by the likelihood of the whole choice.
        accuracy: Estimate,
        /// The same by the likelihood per byte of the choice, which favours no short ones.
        accuracy_by_length: Estimate,
    },
    /// Of questions whose answers are written.
    Answers {
        /// Questions.
        rows: u64,
        /// Share answered right.
        accuracy: Estimate,
    },
}

/// One row, for a file of details.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Detail {
    /// The file.
    pub file: String,
    /// Its row, from 1; the line of a file of lines.
    pub row: u64,
    /// Whether it was right; examples are neither.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub right: Option<bool>,
    /// Mean loss of its learned tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Log-likelihoods of the choices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<f64>,
    /// What was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
    /// What would have been right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
}

/// Sees every row as it is done.
pub type Details<'d> = &'d mut dyn FnMut(&Detail) -> Result<()>;

/// Losses of the examples in `data`, a file or folder that `train` reads.
///
/// # Errors
/// For rows that cannot be read, with file and row; what the engine reports.
pub fn examples(
    scorer: &Scorer,
    encoder: &Arc<Encoder>,
    data: &str,
    options: &EvalOptions,
    details: Details<'_>,
) -> Result<Finding> {
    let input = Input::parse(data).map_err(|e| Error::Usage(format!("{data}: {e}")))?;
    let source = Source::open(&[input], &SourceOptions::default())?;
    let rows = source.rows();
    let name = data;
    let count = options
        .limit
        .map_or(rows.len(), |most| most.min(rows.len()));
    let (mut loss, mut hits) = (Ratio::default(), Ratio::default());
    let mut too_long = 0;
    let window = scorer.longest();
    std::thread::scope(|scope| {
        let (send, documents) = sync_channel(AHEAD);
        scope.spawn(|| {
            for place in 0..count {
                let encoded = encode(&rows, encoder, place);
                let failed = encoded.is_err();
                if send.send(encoded).is_err() || failed {
                    break;
                }
            }
            drop(send);
        });
        let mut pieces = Pieces::new(documents, window);
        scorer.score(&mut pieces, |row, score: Score| {
            loss.add(score.loss, score.tokens as f64);
            hits.add(score.hits as f64, score.tokens as f64);
            details(&Detail {
                loss: (score.tokens > 0).then(|| score.loss / score.tokens as f64),
                ..detail(name, row)
            })
        })?;
        too_long = pieces.too_long;
        Ok::<_, Error>(())
    })?;
    let tokens = loss.weight() as u64;
    if tokens == 0 {
        return Err(Error::Failed(format!(
            "{name}: no row has a token that is learned, so there is no loss"
        )));
    }
    let loss = loss.estimate();
    Ok(Finding::Examples {
        rows: count,
        too_long,
        tokens,
        perplexity: loss.exp(),
        loss,
        token_accuracy: hits.estimate(),
    })
}

fn encode(rows: &Rows, encoder: &Encoder, place: u64) -> Result<(u64, Document, bool)> {
    let order = rows.order(0, None);
    let example = order.example(place)?;
    let is_text = matches!(example, Example::Text { .. });
    let document = encoder
        .encode(&example)
        .map_err(|what| order.refuse(place, what))?;
    Ok((place + 1, document, is_text))
}

fn detail(file: &str, row: u64) -> Detail {
    Detail {
        file: file.to_owned(),
        row,
        right: None,
        loss: None,
        choices: Vec::new(),
        written: None,
        expected: None,
    }
}

/// Documents no longer than a window: texts are split, conversations cut.
struct Pieces {
    documents: Receiver<Result<(u64, Document, bool)>>,
    window: usize,
    rest: Option<(u64, Document)>,
    too_long: u64,
}

impl Pieces {
    fn new(documents: Receiver<Result<(u64, Document, bool)>>, window: usize) -> Self {
        Self {
            documents,
            window,
            rest: None,
            too_long: 0,
        }
    }
}

impl Iterator for Pieces {
    type Item = Result<(u64, Document)>;

    fn next(&mut self) -> Option<Self::Item> {
        let (row, mut document, goes_on) = match self.rest.take() {
            Some((row, document)) => (row, document, true),
            None => match self.documents.recv().ok()? {
                Ok((row, document, is_text)) => {
                    self.too_long += u64::from(document.inputs() > self.window);
                    (row, document, is_text)
                }
                Err(error) => return Some(Err(error)),
            },
        };
        if document.inputs() > self.window {
            // A piece's last token is only predicted, and is the next piece's first.
            if goes_on {
                let ids = document.ids[self.window..].to_vec();
                let learned = document.learned[self.window..].to_vec();
                self.rest = Some((row, Document { ids, learned }));
            }
            document.ids.truncate(self.window + 1);
            document.learned.truncate(self.window + 1);
        }
        Some(Ok((row, document)))
    }
}

/// Accuracy on a file of tasks: questions with choices, questions with answers, or both.
///
/// `generator` makes the writer when the first question needs one.
///
/// # Errors
/// For rows that cannot be read, with file and line; what the engine reports.
pub fn tasks(
    scorer: &Scorer,
    encoder: &Encoder,
    generator: &mut dyn FnMut() -> Result<Arc<Generator>>,
    path: &Path,
    options: &EvalOptions,
    details: Details<'_>,
) -> Result<Vec<Finding>> {
    let mut by_sum = Share::default();
    let mut by_length = Share::default();
    let mut answers = Share::default();
    let name = path.display().to_string();
    let mut waiting: Vec<(u64, Asked)> = Vec::new();
    let mut choices = Choices::new(path, encoder, options, scorer.longest());
    for task in TaskFile::open(path, options.limit)? {
        let (line, task) = task?;
        match task {
            Task::Choice(choice) => choices.push(line, choice)?,
            Task::Answer(asked) => waiting.push((line, asked)),
        }
        if choices.len() >= AHEAD {
            choices.finish(scorer, &mut by_sum, &mut by_length, details)?;
        }
        if waiting.len() >= options.batch.max(1) {
            let generator = generator()?;
            ask(
                &generator,
                encoder,
                &mut waiting,
                options,
                &name,
                &mut answers,
                details,
            )?;
        }
    }
    if choices.len() > 0 {
        choices.finish(scorer, &mut by_sum, &mut by_length, details)?;
    }
    if !waiting.is_empty() {
        let generator = generator()?;
        ask(
            &generator,
            encoder,
            &mut waiting,
            options,
            &name,
            &mut answers,
            details,
        )?;
    }
    let mut findings = Vec::new();
    if by_sum.count() > 0 {
        findings.push(Finding::Choices {
            rows: by_sum.count(),
            accuracy: by_sum.estimate(),
            accuracy_by_length: by_length.estimate(),
        });
    }
    if answers.count() > 0 {
        findings.push(Finding::Answers {
            rows: answers.count(),
            accuracy: answers.estimate(),
        });
    }
    if findings.is_empty() {
        return Err(Error::Failed(format!("{name}: has no rows")));
    }
    Ok(findings)
}

/// Writes answers to the questions that wait, and compares them.
fn ask(
    generator: &Generator,
    encoder: &Encoder,
    waiting: &mut Vec<(u64, Asked)>,
    options: &EvalOptions,
    name: &str,
    answers: &mut Share,
    details: Details<'_>,
) -> Result<()> {
    let tokenizer = encoder.tokenizer();
    let mut prompts = Vec::new();
    for (line, asked) in waiting.iter() {
        let ids = tasks::prompt_ids(tokenizer, &asked.question, options.raw);
        prompts.push(ids.map_err(|e| Error::Failed(format!("{name}:{line}: {e}")))?);
    }
    let generate = GenerateOptions {
        max_tokens: options.max_tokens,
        stop: tokenizer.eos().to_vec(),
        ..GenerateOptions::default()
    };
    let written =
        generator.generate_batch(&prompts, &generate, |_, _| ControlFlow::Continue(()))?;
    for ((line, asked), (tokens, _)) in waiting.drain(..).zip(written) {
        let text = tokenizer.decode(&tokens, true)?;
        let compare = asked.compare.unwrap_or(options.compare);
        let right = asked
            .answers
            .iter()
            .any(|answer| compare.agrees(&text, answer));
        answers.add(right);
        details(&Detail {
            right: Some(right),
            written: Some(text),
            expected: asked.answers.into_iter().next(),
            ..detail(name, line)
        })?;
    }
    Ok(())
}

/// An encoder as `train` has it, for a model's tokenizer.
///
/// # Errors
/// When its chat template cannot be parsed.
pub fn encoder(tokenizer: roundpipe_models::tokenizer::Tokenizer) -> Result<Arc<Encoder>> {
    Ok(Arc::new(Encoder::new(tokenizer, EncodeOptions::default())?))
}
