//! Batches of an endless or bounded number of epochs, and where a run stands among them.
//!
//! The path of a row: its place in the epoch's order -> its file -> an example -> tokens (threads,
//! ahead of the caller) -> the packer (the caller's thread, in order) -> a batch.
//!
//! # Invariants
//! - Batches depend on the rows, the encoder and the options alone: not on threads, the machine, or
//!   where a run was resumed.
//! - An epoch takes every row once; rows are closed at its end, so no row mixes two epochs.
//! - A row that fails is reported behind all batches that do not need it.
//! - No thread outlives the stream.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ahead::{Ahead, Make};
use crate::batch::TrainBatch;
use crate::encode::{Document, Encoder};
use crate::error::{Error, Result};
use crate::format::Example;
use crate::hash;
use crate::pack::{Carry, DocumentPlace, PackedRow, Packer};
use crate::source::{Order, Rows};

/// Rows that a thread takes at once.
const CHUNK: u64 = 4;
/// The most tokens of a batch: lengths are 32-bit.
const MOST_TOKENS: usize = 1 << 30;

/// What is done with a row of more tokens than fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// Its first tokens are kept.
    Cut,
    /// It is left out.
    Drop,
    /// It becomes several documents.
    Split,
}

/// What is done with a row that cannot be read or learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BadRows {
    /// The stream ends with an error that names it.
    #[default]
    Refuse,
    /// It is left out and counted.
    Skip,
}

/// How rows become batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamOptions {
    /// Tokens of a row.
    pub seq: usize,
    /// Rows of a batch.
    pub batch_rows: usize,
    /// Several documents in a row, which do not see each other.
    pub packing: bool,
    /// Rows that the packer keeps open: more waste less room and mix documents further.
    pub open_rows: usize,
    /// The seed of the order of rows; without one they come as in the files.
    pub shuffle: Option<u64>,
    /// How often all rows are taken; without end unless given.
    pub epochs: Option<u64>,
    /// Unless given, texts are split, and conversations and completions cut.
    pub too_long: Option<TooLong>,
    /// What is done with rows that cannot be read or learned.
    pub bad_rows: BadRows,
    /// Rows are pairs of answers: each becomes a row of a batch with two documents, the chosen one
    /// first, and nothing is packed beside them. Each side has at most `seq` tokens.
    pub pairs: bool,
    /// Threads that tokenise ahead; with 0 the caller does.
    pub threads: usize,
}

impl StreamOptions {
    /// Packed rows, shuffled by seed 0, without end, two threads.
    pub fn new(seq: usize, batch_rows: usize) -> Self {
        Self {
            seq,
            batch_rows,
            packing: true,
            open_rows: 16,
            shuffle: Some(0),
            epochs: None,
            too_long: None,
            bad_rows: BadRows::Refuse,
            pairs: false,
            threads: 2,
        }
    }

    fn check(&self) -> Result<()> {
        let refuse = |setting, why: &str| Err(Error::setting(setting, why));
        if self.seq == 0 || self.seq > MOST_TOKENS {
            return refuse("seq", "is not from 1 to 2^30; 2048 is usual");
        }
        let documents = if self.pairs { 2 } else { 1 };
        let tokens = self.batch_rows.saturating_mul(self.seq);
        if self.batch_rows == 0 || tokens.saturating_mul(documents) > MOST_TOKENS {
            return refuse(
                "batch_rows",
                "is 0 or makes more than 2^30 tokens; choose another",
            );
        }
        if self.open_rows == 0 || self.open_rows > 4096 {
            return refuse("open_rows", "is not from 1 to 4096; 16 is usual");
        }
        if self.threads > 1024 {
            return refuse("threads", "is more than 1024; choose as many as cores");
        }
        Ok(())
    }
}

/// What became of the rows so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows that were read.
    pub rows: u64,
    /// Documents that they became.
    pub documents: u64,
    /// Rows whose end was cut off.
    pub cut: u64,
    /// Rows that became several documents.
    pub split: u64,
    /// Rows left out because they are too long.
    pub too_long: u64,
    /// Rows left out because nothing of them is learned, perhaps behind a cut.
    pub empty: u64,
    /// Rows left out because they cannot be read or learned.
    pub bad: u64,
    /// Tokens in batches, without padding.
    pub tokens: u64,
    /// Tokens that were learned.
    pub tokens_trained: u64,
    /// Padding in batches.
    pub padding: u64,
}

/// Where a stream stands: what a checkpoint keeps of the data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The next row in its order.
    pub row: u64,
    /// Documents of this epoch so far.
    pub epoch_documents: u64,
    /// Rows of the packer that are in no batch yet.
    pub carry: Carry,
    /// What became of the rows so far.
    pub counts: Counts,
    /// Of the files and options; another one is refused.
    pub fingerprint: u64,
}

/// Batches, one after another: an iterator.
///
/// ```no_run
/// use roundpipe_data::{EncodeOptions, Encoder, Input, Source, SourceOptions, Stream, StreamOptions};
/// use roundpipe_models::tokenizer::Tokenizer;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let source = Source::open(&[Input::from("chats.jsonl")], &SourceOptions::default())?;
/// let tokenizer = Tokenizer::open("model".as_ref())?;
/// let encoder = Encoder::new(tokenizer, EncodeOptions::default())?;
/// let mut stream = Stream::new(source.rows(), encoder.into(), StreamOptions::new(2048, 8))?;
/// while let Some(batch) = stream.next() {
///     let batch = batch?;
///     let inputs = batch.microbatch(0..batch.rows)?.inputs();
///     // engine.forward_backward(inputs, …)?;
///     let saved = serde_json::to_string(stream.position())?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Stream {
    maker: Arc<Maker>,
    options: StreamOptions,
    total: u64,
    end: u64,
    /// The next row, counted through all epochs.
    next: u64,
    ahead: Option<Ahead<Vec<Encoded>>>,
    ready: VecDeque<Encoded>,
    packer: Packer,
    position: Position,
    first_bad: Option<Error>,
    is_over: bool,
}

impl Stream {
    /// Batches from the first row of the first epoch on.
    ///
    /// # Errors
    /// [`Error::Setting`] for options that cannot work, and for no rows at all.
    pub fn new(rows: Rows, encoder: Arc<Encoder>, options: StreamOptions) -> Result<Self> {
        options.check()?;
        let total = rows.len();
        if total == 0 {
            return Err(Error::setting(
                "data",
                "there are no rows; give files that have some",
            ));
        }
        let fingerprint = fingerprint(&rows, &encoder, &options);
        let end = options
            .epochs
            .map_or(u64::MAX, |epochs| epochs.saturating_mul(total));
        Ok(Self {
            packer: packer(&options),
            maker: Arc::new(Maker {
                rows,
                encoder,
                seq: options.seq,
                too_long: options.too_long,
                shuffle: options.shuffle,
                pairs: options.pairs,
                end,
            }),
            total,
            end,
            options,
            next: 0,
            ahead: None,
            ready: VecDeque::new(),
            position: Position {
                fingerprint,
                ..Position::default()
            },
            first_bad: None,
            is_over: false,
        })
    }

    /// Where the stream stands: behind the last batch that it gave.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// What became of the rows so far.
    pub fn counts(&self) -> &Counts {
        &self.position.counts
    }

    /// Why the first row that was skipped since the start or [`Stream::seek`] is bad.
    pub fn first_bad(&self) -> Option<&Error> {
        self.first_bad.as_ref()
    }

    /// Goes on from a position of a stream with the same rows and options; threads, epochs and the
    /// rows of a batch may differ.
    ///
    /// # Errors
    /// [`Error::Setting`] for a position of other files or options.
    pub fn seek(&mut self, position: &Position) -> Result<()> {
        let refuse = |why: &str| Err(Error::setting("position", why));
        if position.fingerprint != self.position.fingerprint {
            return refuse(
                "is of other files, weights, seq, packing or shuffle; resume with those of the run, or start anew",
            );
        }
        let before = position.epoch.checked_mul(self.total);
        let Some(next) = before.and_then(|before| before.checked_add(position.row)) else {
            return refuse("names an epoch that cannot be; start anew");
        };
        let mut packer = packer(&self.options);
        let mut again = Again {
            maker: &self.maker,
            next,
            total: self.total,
            seen: HashMap::new(),
        };
        for places in &position.carry.open {
            packer.open.push(again.row(places)?);
        }
        for places in &position.carry.closed {
            packer.closed.push_back(again.row(places)?);
        }
        self.packer = packer;
        self.ahead = None;
        self.ready.clear();
        self.next = next;
        self.position = position.clone();
        self.first_bad = None;
        self.is_over = false;
        Ok(())
    }

    fn batch(&mut self) -> Result<Option<TrainBatch>> {
        while self.packer.closed.len() < self.options.batch_rows && self.next < self.end {
            let encoded = self.take()?;
            self.place(encoded)?;
        }
        let count = self.packer.closed.len().min(self.options.batch_rows);
        if count == 0 {
            return Ok(None);
        }
        let rows: Vec<PackedRow> = self.packer.closed.drain(..count).collect();
        let pad = self.maker.encoder.pad();
        let batch = if self.options.pairs {
            TrainBatch::of_pairs(&rows, self.keys(&rows), pad)?
        } else {
            TrainBatch::new(&rows, self.options.seq, self.options.packing, pad)?
        };
        let counts = &mut self.position.counts;
        counts.tokens += batch.tokens;
        counts.tokens_trained += batch.tokens_trained;
        counts.padding += batch.ids.numel() as u64 - batch.tokens;
        self.position.epoch = self.next / self.total;
        self.position.row = self.next % self.total;
        self.position.carry = self.packer.carry();
        Ok(Some(batch))
    }

    /// Which rows of the files pairs are.
    fn keys(&self, rows: &[PackedRow]) -> Vec<u64> {
        let mut orders: HashMap<u64, Order> = HashMap::new();
        let places = rows.iter().filter_map(|row| row.documents.first());
        places
            .map(|(place, _)| {
                let order = orders.entry(place.epoch).or_insert_with(|| {
                    let shuffle = self.maker.shuffle;
                    self.maker.rows.order(place.epoch, shuffle)
                });
                order.key(place.row)
            })
            .collect()
    }

    /// The tokens of the next row.
    fn take(&mut self) -> Result<Encoded> {
        if let Some(encoded) = self.ready.pop_front() {
            return Ok(encoded);
        }
        let chunk = self.next / CHUNK;
        let made = if self.options.threads == 0 {
            self.maker.chunk(chunk)
        } else {
            if self.ahead.is_none() {
                let maker = self.maker.clone();
                let make: Arc<Make<Vec<Encoded>>> = Arc::new(move |chunk| maker.chunk(chunk));
                let end = self.end.div_ceil(CHUNK);
                let threads = self.options.threads;
                self.ahead = Some(Ahead::start(make, chunk, end, threads)?);
            }
            match &self.ahead {
                Some(ahead) => ahead.next(),
                None => self.maker.chunk(chunk),
            }
        };
        // A resumed stream begins in the middle of a chunk.
        let skip = (self.next % CHUNK) as usize;
        self.ready.extend(made.into_iter().skip(skip));
        let first = self.ready.pop_front();
        first.ok_or_else(|| Error::setting("data", "a row is missing; report this as a bug"))
    }

    /// Packs the documents of the next row and counts what became of it.
    fn place(&mut self, encoded: Encoded) -> Result<()> {
        let counts = &mut self.position.counts;
        counts.rows += 1;
        match encoded.fate {
            Fate::Whole => {}
            Fate::Cut => counts.cut += 1,
            Fate::Split => counts.split += 1,
            Fate::TooLong => counts.too_long += 1,
            Fate::Empty => counts.empty += 1,
            Fate::Bad(error) if self.options.bad_rows == BadRows::Refuse => return Err(error),
            Fate::Bad(error) => {
                counts.bad += 1;
                self.first_bad.get_or_insert(error);
            }
        }
        counts.documents += encoded.documents.len() as u64;
        self.position.epoch_documents += encoded.documents.len() as u64;
        let place = |piece| DocumentPlace {
            epoch: self.next / self.total,
            row: self.next % self.total,
            piece,
        };
        let documents = (0..).zip(encoded.documents);
        let placed = documents.map(|(piece, document)| (place(piece), document));
        if self.options.pairs {
            let pair: Vec<_> = placed.collect();
            if !pair.is_empty() {
                self.packer.push_together(pair);
            }
        } else {
            placed.for_each(|(place, document)| self.packer.push(place, document));
        }
        self.next += 1;
        if self.next.is_multiple_of(self.total) {
            self.end_epoch()?;
        }
        Ok(())
    }

    fn end_epoch(&mut self) -> Result<()> {
        self.packer.flush();
        if std::mem::take(&mut self.position.epoch_documents) > 0 {
            return Ok(());
        }
        let Counts {
            too_long,
            empty,
            bad,
            ..
        } = self.position.counts;
        let mut why = format!(
            "no row leaves anything to learn: {too_long} too long, {empty} empty, {bad} bad; raise `seq` or correct them"
        );
        if let Some(bad) = &self.first_bad {
            why += &format!(" (the first: {bad})");
        }
        Err(Error::setting("data", why))
    }
}

impl Iterator for Stream {
    type Item = Result<TrainBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let batch = self.batch().transpose();
        self.is_over = !matches!(batch, Some(Ok(_)));
        batch
    }
}

fn packer(options: &StreamOptions) -> Packer {
    let most_open = if options.packing {
        options.open_rows
    } else {
        0
    };
    Packer::new(options.seq, most_open)
}

fn fingerprint(rows: &Rows, encoder: &Encoder, options: &StreamOptions) -> u64 {
    let too_long = options.too_long.map_or(0, |too_long| too_long as u64 + 1);
    let open_rows = if options.packing {
        options.open_rows as u64
    } else {
        0
    };
    let mut words = vec![
        rows.fingerprint(),
        encoder.tokenizer().vocab_size() as u64,
        options.seq as u64,
        open_rows,
        u64::from(options.shuffle.is_some()),
        options.shuffle.unwrap_or(0),
        too_long,
        u64::from(options.bad_rows == BadRows::Skip),
    ];
    // Other streams have the number that they had before there were pairs.
    words.extend(options.pairs.then_some(2));
    hash::words(&words)
}

/// What became of a row.
pub(crate) enum Fate {
    Whole,
    Cut,
    Split,
    TooLong,
    Empty,
    Bad(Error),
}

/// The documents of a row, each of at most `seq` inputs.
pub(crate) struct Encoded {
    pub documents: Vec<Document>,
    pub fate: Fate,
}

impl Encoded {
    fn none(fate: Fate) -> Self {
        Self {
            documents: Vec::new(),
            fate,
        }
    }
}

/// Turns places into documents; shared by the threads.
struct Maker {
    rows: Rows,
    encoder: Arc<Encoder>,
    seq: usize,
    too_long: Option<TooLong>,
    shuffle: Option<u64>,
    pairs: bool,
    end: u64,
}

impl Maker {
    /// The rows of a chunk, counted through all epochs.
    fn chunk(&self, chunk: u64) -> Vec<Encoded> {
        let total = self.rows.len();
        let first = chunk * CHUNK;
        let last = first.saturating_add(CHUNK).min(self.end);
        let mut epoch = first / total;
        let mut order = self.rows.order(epoch, self.shuffle);
        let mut made = Vec::new();
        for number in first..last {
            if number / total != epoch {
                epoch = number / total;
                order = self.rows.order(epoch, self.shuffle);
            }
            made.push(self.row(&order, number % total));
        }
        made
    }

    fn row(&self, order: &Order, place: u64) -> Encoded {
        // Files, templates and tokenizers are other people's: a bug that they reach costs a row.
        let made = catch_unwind(AssertUnwindSafe(|| self.try_row(order, place)));
        let made = made.unwrap_or_else(|_| {
            Err(order.refuse(
                place,
                "cannot be tokenised (a bug of ours; report it); remove it",
            ))
        });
        made.unwrap_or_else(|error| Encoded::none(Fate::Bad(error)))
    }

    fn try_row(&self, order: &Order, place: u64) -> Result<Encoded> {
        let example = order.example(place)?;
        let fit = Fit {
            seq: self.seq,
            too_long: self.too_long,
        };
        let encoded = match &example {
            Example::Preference(pair) if self.pairs => {
                let documents = self.encoder.encode_pair(pair);
                documents.map(|documents| fit.pair(documents))
            }
            _ if self.pairs => Err(NO_PAIR.to_owned()),
            _ => {
                let document = self.encoder.encode(&example);
                document.map(|document| fit.document(document, &example))
            }
        };
        encoded.map_err(|what| order.refuse(place, what))
    }
}

/// Why a row cannot be preferred over another.
pub(crate) const NO_PAIR: &str = "has no `chosen` and `rejected`, which preference tuning learns from; give pairs, or leave \
                       `--method` out";

/// Brings documents to at most `seq` inputs.
pub(crate) struct Fit {
    pub seq: usize,
    pub too_long: Option<TooLong>,
}

impl Fit {
    /// What becomes of a row's document.
    pub fn document(&self, document: Document, example: &Example) -> Encoded {
        if document.labels() == 0 {
            return Encoded::none(Fate::Empty);
        }
        let inputs = document.inputs();
        if inputs <= self.seq {
            return Encoded {
                documents: vec![document],
                fate: Fate::Whole,
            };
        }
        let usual = match example {
            Example::Text { .. } => TooLong::Split,
            _ => TooLong::Cut,
        };
        let (ends, fate) = match self.too_long.unwrap_or(usual) {
            TooLong::Drop => return Encoded::none(Fate::TooLong),
            TooLong::Cut => (self.seq, Fate::Cut),
            TooLong::Split => (inputs, Fate::Split),
        };
        let parts = (0..ends).step_by(self.seq);
        let documents: Vec<Document> = parts
            .map(|start| document.part(start..(start + self.seq).min(ends)))
            .filter(|part| part.labels() > 0)
            .collect();
        if documents.is_empty() {
            return Encoded::none(Fate::Empty);
        }
        Encoded { documents, fate }
    }

    /// What becomes of a pair: both sides or none. Nothing is learned where a side has no answer
    /// left, or where both are the same.
    pub fn pair(&self, documents: [Document; 2]) -> Encoded {
        let is_long = |document: &Document| document.inputs() > self.seq;
        let mut fate = Fate::Whole;
        if documents.iter().any(is_long) {
            if self.too_long == Some(TooLong::Drop) {
                return Encoded::none(Fate::TooLong);
            }
            fate = Fate::Cut;
        }
        let documents = documents.map(|document| {
            if is_long(&document) {
                document.part(0..self.seq)
            } else {
                document
            }
        });
        let has_none = |document: &Document| document.labels() == 0;
        if documents.iter().any(has_none) || documents[0] == documents[1] {
            return Encoded::none(Fate::Empty);
        }
        Encoded {
            documents: documents.to_vec(),
            fate,
        }
    }
}

/// Makes the documents of a position again.
struct Again<'a> {
    maker: &'a Maker,
    /// The row that the position stands before.
    next: u64,
    total: u64,
    seen: HashMap<(u64, u64), Vec<Document>>,
}

impl Again<'_> {
    fn row(&mut self, places: &[DocumentPlace]) -> Result<PackedRow> {
        let mut row = PackedRow::default();
        for place in places {
            row.push(*place, self.document(place)?);
        }
        let documents = if self.maker.pairs { 2 } else { 1 };
        if row.used > self.maker.seq * documents {
            return Err(changed());
        }
        Ok(row)
    }

    fn document(&mut self, place: &DocumentPlace) -> Result<Document> {
        let number = place
            .epoch
            .saturating_mul(self.total)
            .saturating_add(place.row);
        if place.row >= self.total || number >= self.next {
            return Err(changed());
        }
        let key = (place.epoch, place.row);
        if !self.seen.contains_key(&key) {
            let order = self.maker.rows.order(place.epoch, self.maker.shuffle);
            let encoded = self.maker.row(&order, place.row);
            if let Fate::Bad(error) = encoded.fate {
                return Err(error);
            }
            self.seen.insert(key, encoded.documents);
        }
        let documents = &self.seen[&key];
        documents
            .get(place.piece as usize)
            .cloned()
            .ok_or_else(changed)
    }
}

fn changed() -> Error {
    let why = "names rows that the files do not have; they have changed since, start anew";
    Error::setting("position", why)
}
