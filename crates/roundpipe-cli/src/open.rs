//! Models by name: a folder, or a hub id through the cache.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use roundpipe::DType;
use roundpipe_models::folder::{Folder, LoadOptions, load};
use roundpipe_models::{Model, ModelConfig, hub};

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

/// A model and where it came from.
pub struct Opened {
    pub model: Model,
    pub path: PathBuf,
}

/// Whether a name can be a folder or a hub id.
pub fn looks_like_a_model(name: &str) -> bool {
    name.contains('/') || Path::new(name).exists()
}

/// Loads a model, in the type its config names unless another is given.
pub fn model(name: &str, dtype: Option<DType>) -> anyhow::Result<Opened> {
    let path = hub::resolve(name)?;
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config)
        .with_context(|| format!("{}: cannot be read; a model folder has a config.json", config.display()))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{}: is no JSON; fetch it again", config.display()))?;
    let config = ModelConfig::from_json(&json, &config)?;
    let dtype = dtype.or(config.dtype).unwrap_or(DType::BF16);
    // Checked before memory is taken for the model.
    let folder = Folder::open(&path)?;
    let tied = config.tied;
    let model = Model::empty(config, dtype)?;
    let mut options = LoadOptions::default();
    if tied {
        options = options.ignoring("lm_head.weight");
    }
    load(&folder, &model.entries(), &options)?;
    Ok(Opened { model, path })
}
