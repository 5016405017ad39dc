//! A model in another form: a Hugging Face folder, an adapter in PEFT's, a GGUF file.
//!
//! A [`Source`] is a folder of weights and perhaps an adapter on them. Its weights stay in their files
//! and are read tensor by tensor; where there is an adapter, each sum is made in f32 when it is read,
//! and rounded once to the type that is written. So memory holds one parameter at a time, whatever
//! the size of the model. Codes of a quantised base are widened in the same way, in f32 too: what is
//! written are whole weights. Where the base is quantised here, because the adapter was trained beside it so, its
//! codes are made first, and are in memory.
//!
//! Refused: a target that exists (an empty folder counts as none). Nothing is ever replaced.
//!
//! # Invariants
//! - A target is complete under its name, or not there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use roundpipe::{DType, Quantization};
use roundpipe_files::{AtomicFolder, SystemDisk};

use crate::decoder::Model;
use crate::error::{Error, Result};
use crate::folder::{Folder, SaveOptions, is_quantized};
use crate::gguf::{GgufOptions, GgufReport};
use crate::pretrained::read_config;

/// What is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The folder of weights, config and tokenizer.
    pub folder: PathBuf,
    /// A folder with an adapter on them.
    pub adapter: Option<PathBuf>,
    /// How the weights are quantised first, as they were when the adapter was trained.
    pub quantize: Option<Quantization>,
}

/// What was written into a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderReport {
    /// The type of the weights.
    pub dtype: DType,
    /// Files of weights.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Source {
    /// The model with the adapter merged, to be read only, and the type that its config names.
    ///
    /// # Errors
    /// [`Error::File`] when one of them cannot be used, or they do not fit together.
    pub fn open(&self) -> Result<(Model, DType)> {
        let own = read_config(&self.folder)?.dtype.unwrap_or(DType::F32);
        // In f32, so that sums and what codes stand for are rounded once, when they are written.
        let dtype = self.computes()?.then_some(DType::F32);
        let mut model = match self.quantize {
            Some(how) => Model::load_quantized(&self.folder, dtype, how)?,
            None => Model::load_mapped(&self.folder, dtype)?,
        };
        model.dequantize_on_read()?;
        if let Some(adapter) = &self.adapter {
            model.load_adapter(adapter)?;
            model.merge_lora_on_read()?;
        }
        Ok((model, own))
    }

    /// Whether values are computed on the way, and not only copied.
    fn computes(&self) -> Result<bool> {
        let added = self.adapter.is_some() || self.quantize.is_some();
        Ok(added || is_quantized(&Folder::open(&self.folder)?))
    }

    /// Writes a folder that transformers opens, in `dtype` or the type of the model's config, with at
    /// most `max_shard_bytes` of tensors in a file.
    ///
    /// # Errors
    /// [`Error::File`] when the target exists or cannot be written.
    pub fn write_folder(
        &self,
        target: &Path,
        dtype: Option<DType>,
        max_shard_bytes: u64,
    ) -> Result<FolderReport> {
        refuse_existing(target)?;
        let (model, own) = self.open()?;
        let dtype = dtype.unwrap_or(own);
        let folder = AtomicFolder::create(Arc::new(SystemDisk), target)?;
        let options = SaveOptions {
            max_shard_bytes,
            dtype: Some(dtype),
            copy_from: Some(self.folder.clone()),
            ..SaveOptions::default()
        };
        model.save(folder.path(), options)?;
        let report = report(folder.path(), dtype)?;
        folder.finish()?;
        Ok(report)
    }

    /// Writes the adapter as PEFT has it, in `dtype` or the type of the model's config. `base` is
    /// the name of the model that PEFT will look for.
    ///
    /// # Errors
    /// [`Error::Argument`] without an adapter; [`Error::File`] when the target exists or cannot be
    /// written.
    pub fn write_adapter(
        &self,
        target: &Path,
        dtype: Option<DType>,
        base: &str,
    ) -> Result<FolderReport> {
        let Some(adapter) = &self.adapter else {
            let why = "there is none; name a LoRA run, or an adapter's folder with --adapter";
            return Err(Error::argument("adapter", why));
        };
        refuse_existing(target)?;
        let mut model = Model::load_mapped(&self.folder, dtype)?;
        model.load_adapter(adapter)?;
        let folder = AtomicFolder::create(Arc::new(SystemDisk), target)?;
        model.save_adapter_of(folder.path(), Some(base))?;
        let report = report(folder.path(), model.dtype())?;
        folder.finish()?;
        Ok(report)
    }

    /// Writes a GGUF file.
    ///
    /// # Errors
    /// As [`Model::save_gguf`].
    pub fn write_gguf(&self, target: &Path, options: &GgufOptions) -> Result<GgufReport> {
        let (model, _) = self.open()?;
        model.save_gguf(target, &self.folder, options)
    }
}

fn refuse_existing(target: &Path) -> Result<()> {
    let Ok(meta) = target.symlink_metadata() else {
        return Ok(());
    };
    let mut entries = std::fs::read_dir(target).ok();
    let is_empty = entries.as_mut().is_some_and(|held| held.next().is_none());
    if meta.is_dir() && is_empty {
        return Ok(());
    }
    let what = "exists already; choose another folder, or remove it first";
    Err(Error::file(target, what))
}

/// Counts the files of weights.
fn report(folder: &Path, dtype: DType) -> Result<FolderReport> {
    let unread =
        |e: std::io::Error| Error::file(folder, roundpipe_files::error::unreadable(folder, &e));
    let mut report = FolderReport {
        dtype,
        files: 0,
        bytes: 0,
    };
    for entry in std::fs::read_dir(folder).map_err(unread)? {
        let entry = entry.map_err(unread)?;
        let is_weights = Path::new(&entry.file_name())
            .extension()
            .is_some_and(|ending| ending == "safetensors");
        if is_weights {
            report.files += 1;
            report.bytes += entry.metadata().map_err(unread)?.len();
        }
    }
    Ok(report)
}
