//! Language models for roundpipe: decoders as sequences of layers, LoRA, a byte tokenizer and sampling.
//!
//! Nothing here names a device: a model runs wherever its context does.
#![forbid(unsafe_code)]

pub mod entry;
pub mod error;

pub mod config;
pub mod floor;
pub mod presets;

mod rope;

pub mod decoder;
pub mod lora;

pub mod generate;
pub mod sample;
pub mod text;

pub use config::{Family, ModelConfig};
pub use decoder::Model;
pub use entry::{Entry, Piece, PieceLayout};
pub use error::{Error, Result};
pub use floor::Trains;
pub use generate::{Finish, GenerateOptions, Generator};
pub use lora::{LoraConfig, LoraTargets};
pub use presets::preset;
pub use sample::Sampler;
pub use text::{HARBOR, Windows, continue_text};
