//! Models by name: a folder, or a hub id through the cache.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use roundpipe::{Bytes, DType, Quantization};
use roundpipe_models::{Model, hub};

use crate::place::{PinArg, Place};

/// Types of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TypeArg {
    /// 16 bits with the range of f32.
    Bf16,
    /// IEEE 16 bits.
    F16,
    /// 32 bits.
    F32,
}

impl TypeArg {
    /// As options have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

impl From<TypeArg> for DType {
    fn from(arg: TypeArg) -> Self {
        match arg {
            TypeArg::Bf16 => Self::BF16,
            TypeArg::F16 => Self::F16,
            TypeArg::F32 => Self::F32,
        }
    }
}

/// How frozen weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantizeArg {
    /// Four bits, as bitsandbytes' NF4.
    Nf4,
    /// Eight bits, a factor for each row.
    Int8,
}

impl From<QuantizeArg> for Quantization {
    fn from(arg: QuantizeArg) -> Self {
        match arg {
            QuantizeArg::Nf4 => Self::Nf4,
            QuantizeArg::Int8 => Self::Int8,
        }
    }
}

/// A model and where it came from.
pub struct Opened {
    pub model: Model,
    pub path: PathBuf,
}

/// Whether a name can be a folder or a hub id.
pub fn looks_like_a_model(name: &str) -> bool {
    name.contains('/') || Path::new(name).exists()
}

/// What a name stands for: a model, or what a run trained.
pub struct Found {
    /// A folder or hub id.
    base: String,
    /// The adapter on it.
    pub adapter: Option<PathBuf>,
    quantize: Option<Quantization>,
}

impl Found {
    /// Looks a name up. An adapter and weights in 8 or 4 bits that the user asks for come before those
    /// of a run.
    pub fn find(
        name: &str,
        adapter: Option<&Path>,
        quantize: Option<QuantizeArg>,
    ) -> anyhow::Result<Self> {
        let run = roundpipe_train::run_model(name.as_ref())?;
        let mut found = match run {
            Some(run) => Self {
                base: run.base,
                adapter: run.adapter,
                quantize: run.quantize,
            },
            None => Self {
                base: name.to_owned(),
                adapter: None,
                quantize: None,
            },
        };
        if let Some(adapter) = adapter {
            found.adapter = Some(adapter.to_owned());
        }
        match (quantize, found.quantize) {
            (Some(asked), _) => found.quantize = Some(asked.into()),
            (None, Some(how)) => writeln!(
                std::io::stderr(),
                "the weights are quantised ({how}), as they were when {name} was trained"
            )?,
            (None, None) => {}
        }
        Ok(found)
    }

    /// Loads the model, without the adapter.
    pub fn open(&self, dtype: Option<DType>, place: &Place) -> anyhow::Result<Opened> {
        model_quantized(&self.base, dtype, place, self.quantize)
    }
}

/// [`model`], with its linear layers in 8 or 4 bits where asked; those are always in memory.
pub fn model_quantized(
    name: &str,
    dtype: Option<DType>,
    place: &Place,
    quantize: Option<Quantization>,
) -> anyhow::Result<Opened> {
    let Some(how) = quantize else {
        return model(name, dtype, place);
    };
    let path = hub::resolve(name)?;
    let model = Model::load_quantized(&path, dtype, how)?;
    Ok(Opened { model, path })
}

/// Loads a model, in the type its config names unless another is given. Without pinned memory its
/// weights stay in the files, and a line on standard error says so.
pub fn model(name: &str, dtype: Option<DType>, place: &Place) -> anyhow::Result<Opened> {
    let path = hub::resolve(name)?;
    let model = if place.pin == PinArg::Off {
        let model = Model::load_mapped(&path, dtype)?;
        let bytes = model.entries().iter().map(|e| e.param.bytes() as u64).sum();
        writeln!(
            std::io::stderr(),
            "{} of weights stay in files (--pin off); those that are not trained are read from there at each use",
            Bytes(bytes)
        )?;
        model
    } else {
        Model::load(&path, dtype)?
    };
    Ok(Opened { model, path })
}
