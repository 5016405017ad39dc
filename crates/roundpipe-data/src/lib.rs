//! Files of examples to batches of tokens: what a fine-tune reads.
//!
//! ```text
//! Input -> Source -> Rows -> Order -> Example -> Document -> packed rows -> TrainBatch
//!          files,    split   epoch    format     template,   open rows     tensors
//!          index             shuffle             tokenizer
//! ```
//! A [`Source`] opens files (JSON lines, JSON arrays, CSV, text, parquet; plain, gzip or zstd), finds where
//! rows are and which format they have, and keeps some for validation. An [`Encoder`] turns a row
//! into tokens with the model's own template and says which are learned. A [`Stream`] does that in
//! threads, in the order of an epoch, packs documents into rows and gives [`TrainBatch`]es; its
//! [`Position`] is what a checkpoint keeps.
//!
//! Nothing here knows engines, devices or learning. Nothing is downloaded, and no file is changed.
//!
//! # Invariants
//! - Memory does not grow with the files but by eight bytes a row (and a bit where rows are split).
//! - Batches depend on files, tokenizer and options alone.
//! - A bad row is an error that names file and row, never a panic.
#![forbid(unsafe_code)]

pub mod error;

mod hash;

mod csv;
mod input;
mod scan;
mod storage;

mod format;

mod preference;

mod parquet;

mod file;
mod order;
mod subset;

mod source;

mod encode;

mod pack;

mod batch;

mod ahead;

mod stream;

mod survey;

pub use batch::{Microbatch, TrainBatch};
pub use encode::{Document, EncodeOptions, Encoder, Learn};
pub use error::{Error, Result};
pub use file::FileKind;
pub use format::{Chat, Example, Format};
pub use input::Input;
pub use pack::{Carry, DocumentPlace};
pub use preference::Pair;
pub use source::{FileReport, Order, Rows, Source, SourceOptions, Validation};
pub use storage::{Compression, UNPACKED_BASE, UNPACKED_RATIO};
pub use stream::{BadRows, Counts, Position, Stream, StreamOptions, TooLong};
pub use survey::{Found, Histogram, NamedRow, Pieces, SeenRow, Survey, SurveyOptions, Unit};
