//! Language models for roundpipe: decoders as sequences of layers, a byte tokenizer and sampling.
//!
//! Nothing here names a device: a model runs wherever its context does.
#![forbid(unsafe_code)]

pub mod entry;
pub mod error;

pub mod chat;
pub mod decoder;
pub mod sample;
pub mod text;
pub mod tokenizer;

pub use decoder::{Decoder, DecoderConfig};
pub use entry::{Entry, Piece, PieceLayout};
pub use error::{Error, Result};
pub use sample::{Sampler, continue_text};
pub use text::{HARBOR, Windows};
