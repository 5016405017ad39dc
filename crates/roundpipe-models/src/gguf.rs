//! GGUF: a model with its tokenizer in one file, as llama.cpp and what is built on it read it.
//!
//! The path of a file: config -> keys, tokenizer -> keys, entries -> planned tensors -> header; then
//! the tensors one after another, each in pieces of a few MiB. Only `config`, the vocabulary and one
//! parameter are in memory at a time, so a [mapped](Model::load_mapped) model may be larger than it.
//!
//! | part | where |
//! |---|---|
//! | bytes of the format: header, keys, alignment | `format.rs` |
//! | blocks of 8 and 4 bits, as ggml defines them | `blocks.rs` |
//! | names, order and types of tensors, and how rows are reordered | `tensors.rs` |
//! | what the config becomes | `keys.rs` |
//! | what the tokenizer becomes, and how its splitting rule is named | `vocab.rs`, `splits.rs` |
//!
//! Refused, with one line each: models that llama.cpp has no architecture for (experts in some blocks
//! only, biases where it has none), tokenizers that it has no algorithm for, values that the chosen
//! type cannot hold. What it only approximates is a note in the [`GgufReport`].
//!
//! # Invariants
//! - A file is complete under its name, or there is none.
//! - A value is rounded once, from the parameter's type to the file's. Any number of threads writes
//!   the same bytes.

mod blocks;
mod format;
mod keys;
mod splits;
mod tensors;
mod vocab;

use std::fmt;
use std::path::Path;

use roundpipe_files::AtomicFile;
use roundpipe_files::atomic::sync_folder;

use crate::decoder::Model;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The type that most tensors of a file have; norms, biases and routers are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// 32 bits.
    F32,
    /// IEEE 16 bits.
    F16,
    /// 16 bits with the range of f32.
    Bf16,
    /// 8 bits and a scale per 32 values.
    Q8_0,
    /// 4 bits and a scale per 32 values; the head, or the embedding that is one, has 8.
    Q4_0,
}

impl GgufType {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0];

    /// As llama.cpp's tools write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a user may choose about a file.
#[derive(Debug, Clone)]
pub struct GgufOptions {
    /// The type of most tensors.
    pub dtype: GgufType,
    /// What the model is called in the file.
    pub name: String,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufReport {
    /// The architecture, as llama.cpp calls it.
    pub architecture: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// What llama.cpp will do differently, a sentence each.
    pub notes: Vec<String>,
}

impl Model {
    /// Writes the model and the tokenizer of `folder` into the file `path`, which must not exist.
    /// Adapters are not part of it: merge them first.
    ///
    /// # Errors
    /// [`Error::File`] when the file exists or cannot be written, or the tokenizer cannot be
    /// expressed; [`Error::Argument`] for a model or a value that cannot.
    pub fn save_gguf(
        &self,
        path: impl AsRef<Path>,
        folder: impl AsRef<Path>,
        options: &GgufOptions,
    ) -> Result<GgufReport> {
        let (path, folder) = (path.as_ref(), folder.as_ref());
        refuse_existing(path)?;
        if let Some(how) = self.quantization() {
            let why = format!(
                "the weights are quantised ({how}) in a form that GGUF has not; call Model::dequantize first"
            );
            return Err(Error::argument("save_gguf", why));
        }
        let architecture = keys::Architecture::of(&self.config)?;
        let tensors = tensors::plan(self, architecture, options.dtype)?;
        let tokenizer = Tokenizer::open(folder)?;
        let vocab = vocab::Vocab::read(folder, &tokenizer, &self.config)?;
        let mut notes = keys::notes(&self.config);
        notes.extend(vocab.notes.iter().cloned());
        let mut all = keys::general(architecture, options);
        all.extend(keys::model(architecture, &self.config));
        all.extend(vocab.keys());

        let header = format::Header::new(&all, tensors.iter().map(tensors::Planned::info))?;
        let file = AtomicFile::create(path)?;
        let mut out = format::Body::begin(&file, &header)?;
        for tensor in &tensors {
            tensor.write(&mut out)?;
        }
        let bytes = out.finish()?;
        file.finish()?;
        sync_folder(parent(path))?;
        Ok(GgufReport {
            architecture: architecture.name(),
            bytes,
            tensors: tensors.len(),
            notes,
        })
    }
}

fn refuse_existing(path: &Path) -> Result<()> {
    let Ok(meta) = path.symlink_metadata() else {
        return Ok(());
    };
    let what = if meta.is_dir() {
        "is a folder; name a file in it, such as model-f16.gguf"
    } else {
        "exists already; choose another name, or remove it first"
    };
    Err(Error::file(path, what))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
