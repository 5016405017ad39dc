//! `roundpipe export`: a model in the form that other programs read.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use roundpipe::{Bytes, DType};
use roundpipe_models::export::FolderReport;
use roundpipe_models::{GgufOptions, GgufType, read_config};

use crate::Failure;
use crate::place;
use crate::source::{self, Found};

/// Write a model for transformers (hf), llama.cpp (gguf) or PEFT (adapter)
///
/// MODEL may be a run's folder; an adapter, the run's or --adapter's, is merged for hf and gguf.
/// Weights are read from the model's files one after another, so the model may be larger than
/// memory. What exists is never replaced.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ExportCmd {
    /// A folder, a run's folder, or a hub id such as Qwen/Qwen3-0.6B
    model: String,
    /// What to write
    #[arg(long, value_enum)]
    to: Form,
    /// The file (gguf) or folder (hf, adapter) to make
    #[arg(long)]
    out: PathBuf,
    /// Type of the weights; q8_0 and q4_0 are for gguf [default: the model's]
    #[arg(long, value_enum)]
    dtype: Option<ExportType>,
    /// The folder of an adapter on the model
    #[arg(long)]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    shards: ShardSize,
}

const EXAMPLES: &str = "Examples:
  roundpipe export runs/mine --to gguf --out mine-q8_0.gguf --dtype q8_0
  roundpipe export Qwen/Qwen3-8B --to hf --out qwen-f16 --dtype f16 --shard-size 2GB
  roundpipe export runs/mine --to adapter --out my-adapter --dtype f32";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// A Hugging Face folder
    Hf,
    /// A GGUF file with its tokenizer
    Gguf,
    /// A LoRA adapter in PEFT's form
    Adapter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExportType {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

impl ExportType {
    /// The type of a folder's weights; `None` for blocks.
    fn of_folder(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            Self::Q8_0 | Self::Q4_0 => None,
        }
    }

    fn of_file(self) -> GgufType {
        match self {
            Self::F32 => GgufType::F32,
            Self::F16 => GgufType::F16,
            Self::Bf16 => GgufType::Bf16,
            Self::Q8_0 => GgufType::Q8_0,
            Self::Q4_0 => GgufType::Q4_0,
        }
    }
}

/// How large the files of a folder are.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ShardSize {
    /// The most tensors in one file of an hf folder, for example 2GB [default: 5GB]
    #[arg(long, value_parser = place::size)]
    shard_size: Option<Bytes>,
}

impl ShardSize {
    pub fn bytes(&self) -> u64 {
        self.shard_size.map_or(5_000_000_000, |size| size.0)
    }
}

impl ExportCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let dtype = self.folder_type()?;
        if self.shards.shard_size.is_some() && self.to != Form::Hf {
            let what = "--shard-size is for --to hf, other forms are one file; leave it out";
            return Err(Failure::usage(what.into()));
        }
        let found = source::find(&self.model, self.adapter.as_deref())?;
        let source = &found.source;
        let fail = anyhow::Error::from;
        match self.to {
            Form::Gguf => self.write_gguf(&found, out),
            Form::Hf => {
                let shard = self.shards.bytes();
                let report = source.write_folder(&self.out, dtype, shard).map_err(fail)?;
                wrote_folder(out, &self.out, &report)
            }
            Form::Adapter => {
                let base = &found.base;
                let report = source.write_adapter(&self.out, dtype, base).map_err(fail)?;
                wrote_folder(out, &self.out, &report)
            }
        }
    }

    /// The type of a folder's weights, where one was given.
    fn folder_type(&self) -> Result<Option<DType>, Failure> {
        let Some(given) = self.dtype.filter(|_| self.to != Form::Gguf) else {
            return Ok(None);
        };
        let folder = given.of_folder();
        folder.map(Some).ok_or_else(|| {
            let name = given.of_file();
            Failure::usage(format!(
                "--dtype {name} is for --to gguf; choose f32, f16 or bf16"
            ))
        })
    }

    fn write_gguf(&self, found: &Found, out: &mut dyn Write) -> Result<(), Failure> {
        let dtype = match self.dtype {
            Some(dtype) => dtype.of_file(),
            None => own_type(&found.source.folder)?,
        };
        let options = GgufOptions {
            dtype,
            name: found.name.clone(),
        };
        let report = found
            .source
            .write_gguf(&self.out, &options)
            .map_err(anyhow::Error::from)?;
        for note in &report.notes {
            writeln!(std::io::stderr(), "note: {note}")?;
        }
        writeln!(
            out,
            "wrote {}: {} in {dtype}, {} tensors, {}",
            self.out.display(),
            report.architecture,
            report.tensors,
            Bytes(report.bytes)
        )?;
        Ok(())
    }
}

/// The type that a model's config names.
fn own_type(folder: &Path) -> Result<GgufType, Failure> {
    let config = read_config(folder).map_err(anyhow::Error::from)?;
    Ok(match config.dtype {
        Some(DType::BF16) => GgufType::Bf16,
        Some(DType::F16) => GgufType::F16,
        _ => GgufType::F32,
    })
}

/// Says what a folder holds now.
pub fn wrote_folder(
    out: &mut dyn Write,
    folder: &Path,
    report: &FolderReport,
) -> Result<(), Failure> {
    let files = if report.files == 1 { "file" } else { "files" };
    writeln!(
        out,
        "wrote {}: weights in {}, {} in {} {files}",
        folder.display(),
        report.dtype,
        Bytes(report.bytes),
        report.files
    )?;
    Ok(())
}
