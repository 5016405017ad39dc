//! What is in the files, and what would become of every row: lengths, rows that would be cut or left
//! out, rows that cannot be read. It makes no batch.
//!
//! Every row is counted. Rows are read up to [`SurveyOptions::read_bytes`], and tokenised up to
//! [`SurveyOptions::measured_bytes`]; of larger files every n-th row is, and [`Survey`] says how many
//! that were.
//!
//! # Invariants
//! - What is found depends on the rows, the encoder and the options alone, not on threads.
//! - Memory does not grow with the number of rows.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value as Json;

use crate::encode::{Document, Encoder};
use crate::error::Error;
use crate::format::Example;
use crate::source::{Order, Rows};
use crate::stream::{Encoded, Fate, Fit, TooLong};

/// Rows that a thread takes at once.
const CHUNK: u64 = 64;
/// Lengths below this have a bucket each; above, so many buckets are in each power of two.
const EXACT: u64 = 64;

/// How rows are looked at.
#[derive(Debug, Clone)]
pub struct SurveyOptions {
    /// Tokens of a row; without them none is too long.
    pub seq: Option<usize>,
    /// What is done with longer ones, as in a stream.
    pub too_long: Option<TooLong>,
    /// Bytes of rows that are read, about.
    pub read_bytes: u64,
    /// Bytes of rows that are tokenised, about.
    pub measured_bytes: u64,
    /// Rows of each kind that are named.
    pub named: usize,
    /// Rows that are shown.
    pub shown: usize,
    /// Threads that read and tokenise.
    pub threads: usize,
}

impl Default for SurveyOptions {
    fn default() -> Self {
        Self {
            seq: None,
            too_long: None,
            read_bytes: 16 << 30,
            measured_bytes: 48 << 20,
            named: 5,
            shown: 2,
            threads: 2,
        }
    }
}

/// What lengths count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Tokens that a model is given.
    Tokens,
    /// Characters of texts, where there is no tokenizer.
    Characters,
}

/// A row and what there is to say of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedRow {
    /// Its file.
    pub path: PathBuf,
    /// Its number there, from 1.
    pub row: u64,
    /// What there is to say.
    pub what: String,
}

/// Rows of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// How many, among those that were looked at.
    pub count: u64,
    /// The first of them.
    pub first: Vec<NamedRow>,
}

/// A document as text: what is learned and what is not, in order.
pub type Pieces = Vec<(String, bool)>;

/// A row as it would be trained: its file and number, and pieces of text that are learned or not;
/// of a pair both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenRow {
    /// Its file.
    pub path: PathBuf,
    /// Its number there, from 1.
    pub row: u64,
    /// One document, or the chosen and the rejected one.
    pub sides: Vec<Pieces>,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// All rows.
    pub rows: u64,
    /// Those that were read.
    pub read: u64,
    /// Those whose lengths were taken.
    pub measured: u64,
    /// What lengths count.
    pub unit: Unit,
    /// Lengths of rows before anything is cut; of a pair, of its longer side.
    pub lengths: Histogram,
    /// Units of all documents, behind cuts.
    pub total: u64,
    /// Tokens of them that are learned.
    pub learned: u64,
    /// Rows whose end is cut off.
    pub cut: Found,
    /// Rows that become several documents.
    pub split: Found,
    /// Rows left out because they are too long.
    pub too_long: Found,
    /// Rows left out because nothing of them is learned.
    pub empty: Found,
    /// Rows that cannot be read or learned.
    pub bad: Found,
    /// The first rows that are trained.
    pub shown: Vec<SeenRow>,
}

impl Survey {
    /// Looks at rows, with an encoder or without.
    pub fn take(rows: &Rows, encoder: Option<&Encoder>, options: &SurveyOptions) -> Self {
        let order = rows.order(0, None);
        let bytes = rows.bytes();
        let every = |most: u64| bytes.div_ceil(most.max(1)).max(1);
        let look = Look {
            order: &order,
            total: rows.len(),
            encoder,
            options,
            read_every: every(options.read_bytes),
            measured_every: match encoder {
                Some(_) => every(options.measured_bytes).max(every(options.read_bytes)),
                None => every(options.read_bytes),
            },
        };
        let next = AtomicU64::new(0);
        let threads = options.threads.clamp(1, 64);
        let parts = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| scope.spawn(|| look.chunks(&next)))
                .collect();
            let parts = workers.into_iter().map(|worker| worker.join());
            // A thread that panics has a bug of ours; its rows are missing from the counts.
            parts
                .map(|part| part.unwrap_or_default())
                .collect::<Vec<_>>()
        });
        let mut all = Part::default();
        parts.into_iter().for_each(|part| all.add(part));
        all.survey(&look)
    }

    /// Whether lengths are those of some rows only.
    pub fn is_sample(&self) -> bool {
        self.measured + self.bad.count < self.rows
    }
}

/// What threads look at.
struct Look<'a> {
    order: &'a Order,
    total: u64,
    encoder: Option<&'a Encoder>,
    options: &'a SurveyOptions,
    read_every: u64,
    measured_every: u64,
}

/// What one thread found; rows by their place.
#[derive(Default)]
struct Part {
    read: u64,
    measured: u64,
    lengths: Histogram,
    total: u64,
    learned: u64,
    cut: Places,
    split: Places,
    too_long: Places,
    empty: Places,
    bad: Places,
    shown: Vec<(u64, Vec<Pieces>)>,
}

/// Rows of one kind: how many, and the first of them.
#[derive(Default)]
struct Places {
    count: u64,
    first: Vec<(u64, String)>,
}

impl Places {
    /// A thread goes forward, so its first rows are those that it meets first.
    fn push(&mut self, most: usize, place: u64, what: String) {
        self.count += 1;
        if self.first.len() < most {
            self.first.push((place, what));
        }
    }

    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.first.extend(other.first);
    }

    fn found(mut self, look: &Look<'_>) -> Found {
        self.first.sort();
        self.first.truncate(look.options.named);
        let named = self.first.into_iter().map(|(place, what)| {
            let (path, row) = look.name(place);
            NamedRow { path, row, what }
        });
        Found {
            count: self.count,
            first: named.collect(),
        }
    }
}

impl Part {
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.measured += other.measured;
        self.lengths.add(&other.lengths);
        self.total += other.total;
        self.learned += other.learned;
        self.cut.add(other.cut);
        self.split.add(other.split);
        self.too_long.add(other.too_long);
        self.empty.add(other.empty);
        self.bad.add(other.bad);
        self.shown.extend(other.shown);
    }

    fn survey(mut self, look: &Look<'_>) -> Survey {
        self.shown.sort();
        self.shown.truncate(look.options.shown);
        let shown = self.shown.into_iter().map(|(place, sides)| {
            let (path, row) = look.name(place);
            SeenRow { path, row, sides }
        });
        Survey {
            rows: look.total,
            read: self.read,
            measured: self.measured,
            unit: match look.encoder {
                Some(_) => Unit::Tokens,
                None => Unit::Characters,
            },
            lengths: self.lengths,
            total: self.total,
            learned: self.learned,
            cut: self.cut.found(look),
            split: self.split.found(look),
            too_long: self.too_long.found(look),
            empty: self.empty.found(look),
            bad: self.bad.found(look),
            shown: shown.collect(),
        }
    }
}

impl Look<'_> {
    /// File and number of the row at a place.
    fn name(&self, place: u64) -> (PathBuf, u64) {
        match self.order.refuse(place, "") {
            Error::Row { path, row, .. } => (path, row),
            _ => (PathBuf::new(), 0),
        }
    }

    fn chunks(&self, next: &AtomicU64) -> Part {
        let mut part = Part::default();
        loop {
            let first = next.fetch_add(CHUNK, Ordering::Relaxed);
            if first >= self.total {
                return part;
            }
            for place in first..(first + CHUNK).min(self.total) {
                if place.is_multiple_of(self.read_every) {
                    // Templates and tokenizers are other people's: a bug that they reach costs a row.
                    let row = AssertUnwindSafe(|| self.row(place, &mut part));
                    if catch_unwind(row).is_err() {
                        let what = "cannot be tokenised (a bug of ours; report it); remove it";
                        part.bad.push(self.options.named, place, what.into());
                    }
                }
            }
        }
    }

    fn row(&self, place: u64, part: &mut Part) {
        part.read += 1;
        let example = match self.order.example(place) {
            Ok(example) => example,
            Err(Error::Row { what, .. }) => {
                return part.bad.push(self.options.named, place, what);
            }
            Err(error) => return part.bad.push(self.options.named, place, error.to_string()),
        };
        if !place.is_multiple_of(self.measured_every) {
            return;
        }
        let Some(encoder) = self.encoder else {
            let characters = characters(&example);
            part.measured += 1;
            part.lengths.push(characters);
            part.total += characters;
            if part.shown.len() < self.options.shown {
                part.shown.push((place, spoken(&example)));
            }
            return;
        };
        match self.encode(&example, encoder) {
            Ok((length, encoded)) => self.measure(place, length, encoded, encoder, part),
            Err(what) => part.bad.push(self.options.named, place, what),
        }
    }

    /// The tokens of a row before anything is cut, and what becomes of it.
    fn encode(&self, example: &Example, encoder: &Encoder) -> Result<(u64, Encoded), String> {
        let fit = Fit {
            seq: self.options.seq.unwrap_or(usize::MAX),
            too_long: self.options.too_long,
        };
        if let Example::Preference(pair) = example {
            let documents = encoder.encode_pair(pair)?;
            let longer = documents.iter().map(Document::inputs).max();
            return Ok((longer.unwrap_or(0) as u64, fit.pair(documents)));
        }
        let document = encoder.encode(example)?;
        let length = document.inputs() as u64;
        Ok((length, fit.document(document, example)))
    }

    fn measure(
        &self,
        place: u64,
        length: u64,
        encoded: Encoded,
        encoder: &Encoder,
        part: &mut Part,
    ) {
        part.measured += 1;
        part.lengths.push(length);
        let said = format!("{length} tokens");
        let most = self.options.named;
        match encoded.fate {
            Fate::Whole => {}
            Fate::Cut => part.cut.push(most, place, said),
            Fate::Split => part.split.push(most, place, said),
            Fate::TooLong => part.too_long.push(most, place, said),
            Fate::Empty => {
                let what = format!("{said}, none of them learned within seq");
                part.empty.push(most, place, what);
            }
            Fate::Bad(ref error) => part.bad.push(most, place, error.to_string()),
        }
        for document in &encoded.documents {
            part.total += document.inputs() as u64;
            part.learned += document.labels() as u64;
        }
        if part.shown.len() < self.options.shown && !encoded.documents.is_empty() {
            // Of a row that is split the first part.
            let sides = match encoded.fate {
                Fate::Split => &encoded.documents[..1],
                _ => &encoded.documents[..],
            };
            let sides = sides.iter().map(|side| encoder.pieces(side)).collect();
            part.shown.push((place, sides));
        }
    }
}

/// Characters of a row's texts.
fn characters(example: &Example) -> u64 {
    let count = |text: &str| text.chars().count() as u64;
    match example {
        Example::Chat(chat) => {
            let messages = chat.messages.iter();
            messages
                .map(|message| said(message.0.get("content")))
                .map(|text| count(&text))
                .sum()
        }
        Example::Completion { prompt, completion } => count(prompt) + count(completion),
        Example::Text { text, .. } => count(text),
        Example::Preference(pair) => characters(&pair.chosen).max(characters(&pair.rejected)),
    }
}

/// The text of a message's content, which may be in parts.
fn said(content: Option<&Json>) -> String {
    match content {
        Some(Json::String(text)) => text.clone(),
        Some(Json::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.collect()
        }
        _ => String::new(),
    }
}

/// A row as it stands in its file, where no template says how it is trained.
fn spoken(example: &Example) -> Vec<Pieces> {
    let side = match example {
        Example::Chat(chat) => {
            let turn = |message: &roundpipe_models::chat::Message| {
                let role = message.role();
                let text = said(message.0.get("content"));
                (format!("{role}: {text}\n"), role == "assistant")
            };
            chat.messages.iter().map(turn).collect()
        }
        Example::Completion { prompt, completion } => {
            vec![(prompt.clone(), false), (completion.clone(), true)]
        }
        Example::Text { text, .. } => vec![(text.clone(), true)],
        Example::Preference(pair) => {
            let sides = [&pair.chosen, &pair.rejected].into_iter();
            return sides.flat_map(spoken).collect();
        }
    };
    vec![side]
}

/// How often lengths occur: exact below 64, within 1.6% above.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: u64,
    /// The least and the most.
    range: Option<(u64, u64)>,
}

impl Histogram {
    fn push(&mut self, length: u64) {
        let at = bucket(length);
        if self.buckets.len() <= at {
            self.buckets.resize(at + 1, 0);
        }
        self.buckets[at] += 1;
        self.count += 1;
        self.sum += length;
        let (least, most) = self.range.unwrap_or((length, length));
        self.range = Some((least.min(length), most.max(length)));
    }

    fn add(&mut self, other: &Self) {
        let buckets = self.buckets.len().max(other.buckets.len());
        self.buckets.resize(buckets, 0);
        for (sum, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += count;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.range = match (self.range, other.range) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
    }

    /// Lengths that were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean; 0 for none.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count.max(1) as f64
    }

    /// The shortest and the longest.
    pub fn range(&self) -> Option<(u64, u64)> {
        self.range
    }

    /// The length that this share of rows, 0 to 1, does not exceed.
    pub fn quantile(&self, share: f64) -> u64 {
        let Some((least, most)) = self.range else {
            return 0;
        };
        let rank = (share * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return (first_of(at + 1) - 1).clamp(least, most);
            }
        }
        most
    }

    /// How many lengths are in each power of two, those at both ends without any left out: the first
    /// length, the last, and how many.
    pub fn powers(&self) -> Vec<(u64, u64, u64)> {
        let Some((least, most)) = self.range else {
            return Vec::new();
        };
        let power = |length: u64| length.max(1).ilog2();
        (power(least)..=power(most))
            .map(|power| {
                let first = if power == 0 { 0 } else { 1u64 << power };
                let last = (1u64 << power) - 1 + (1u64 << power);
                let range = bucket(first)..=bucket(last);
                let counts = range.map(|at| self.buckets.get(at).copied().unwrap_or(0));
                (first, last, counts.sum())
            })
            .collect()
    }
}

/// The bucket of a length.
fn bucket(length: u64) -> usize {
    if length < EXACT {
        return length as usize;
    }
    let power = length.ilog2();
    let shift = power - EXACT.ilog2();
    let within = (length >> shift) - EXACT;
    (EXACT + u64::from(shift) * EXACT + within) as usize
}

/// The first length of a bucket.
fn first_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let shift = (bucket - EXACT) / EXACT;
    (EXACT + (bucket - EXACT) % EXACT) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_narrow() {
        for at in 0..2000 {
            let (first, next) = (first_of(at), first_of(at + 1));
            assert!(next > first, "{at}");
            assert_eq!(bucket(first), at);
            assert_eq!(bucket(next - 1), at);
            assert!(
                at < 64 || (next - first) as f64 / first as f64 <= 1.0 / 64.0,
                "{at}"
            );
        }
    }

    #[test]
    fn a_histogram_knows_its_lengths() {
        let mut all = Histogram::default();
        let mut other = Histogram::default();
        for length in 1..=1000 {
            if length % 3 == 0 {
                all.push(length);
            } else {
                other.push(length);
            }
        }
        all.add(&other);
        assert_eq!((all.count(), all.range()), (1000, Some((1, 1000))));
        assert_eq!(all.mean(), 500.5);
        for (share, want) in [(0.5, 500.0), (0.9, 900.0), (0.01, 10.0)] {
            let found = all.quantile(share) as f64;
            assert!((found - want).abs() / want < 0.016, "{share}: {found}");
        }
        assert_eq!(all.quantile(1.0), 1000);
        let powers = all.powers();
        assert_eq!(powers[0], (0, 1, 1));
        assert_eq!(powers[1], (2, 3, 2));
        assert_eq!(powers[9], (512, 1023, 489));
        assert_eq!(powers.iter().map(|power| power.2).sum::<u64>(), 1000);
        assert!(Histogram::default().powers().is_empty());
    }
}
