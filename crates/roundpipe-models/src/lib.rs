//! Language models for roundpipe: configs and presets, folders and the hub, tokenizers and chat
//! templates, decoders as sequences of layers, LoRA, generation.
//!
//! Nothing here names a device: a model runs wherever its context does.
#![forbid(unsafe_code)]

pub mod entry;
pub mod error;

mod limits;
pub mod memory;

pub mod folder;
pub mod mxfp4;

pub mod hub;

pub mod config;
pub mod flops;
pub mod presets;

mod rope;

pub mod chat;
pub mod tokenizer;

pub mod decoder;
pub mod lora;
pub mod pretrained;

pub mod gguf;

pub mod export;

pub mod generate;
pub mod sample;

pub mod conversation;

pub use config::{Family, ModelConfig};
pub use decoder::Model;
pub use entry::{Entry, Piece, PieceLayout};
pub use error::{Error, Result};
pub use flops::TrainMode;
pub use folder::{Folder, LoadOptions, LoadReport, SaveOptions, load, save};
pub use generate::{Finish, GenerateOptions, Generator, Sequence};
pub use gguf::{GgufOptions, GgufReport, GgufType};
pub use hub::HubConfig;
pub use lora::{LoraConfig, LoraTargets};
pub use presets::preset;
pub use pretrained::read_config;
pub use roundpipe::Quantization;
pub use roundpipe_files::{Tensors, View, Weights, read_tensors, weights, write_tensors};
pub use sample::Sampler;

/// The programs of the README, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;

#[cfg(doctest)]
pub mod guide;
