//! A model from a folder and into one: config, entries and files put together.

use std::path::Path;

use roundpipe::DType;
use serde_json::Value;

use crate::config::ModelConfig;
use crate::decoder::Model;
use crate::error::{Error, Result};
use crate::folder::{Folder, LoadOptions, SaveOptions, load, save};

const CONFIG: &str = "config.json";

/// The config of a folder.
///
/// # Errors
/// [`Error::File`] when there is no `config.json`, or it says what is not supported.
pub fn read_config(dir: impl AsRef<Path>) -> Result<ModelConfig> {
    let path = dir.as_ref().join(CONFIG);
    let text = std::fs::read_to_string(&path)
        .map_err(|e| Error::file(&path, format!("cannot be read ({e}); give a folder with a {CONFIG}")))?;
    let json: Value = serde_json::from_str(&text)
        .map_err(|e| Error::file(&path, format!("is not JSON ({e}); download it again")))?;
    ModelConfig::from_json(&json, &path)
}

impl Model {
    /// Reads a folder into parameters of type `dtype`, or of the type that its config names (f32 where it names
    /// none).
    ///
    /// # Errors
    /// [`Error::File`] naming the key, tensor or file that does not fit.
    pub fn load(dir: impl AsRef<Path>, dtype: Option<DType>) -> Result<Self> {
        let dir = dir.as_ref();
        let config = read_config(dir)?;
        let folder = Folder::open(dir)?;
        let dtype = dtype.or(config.dtype).unwrap_or(DType::F32);
        let mut options = LoadOptions::default();
        if config.tied {
            // Some tools save the shared weight twice.
            options = options.ignoring("lm_head.weight");
        }
        let model = Self::empty(config, dtype)?;
        load(&folder, &model.entries(), &options)?;
        Ok(model)
    }

    /// Writes a folder that transformers opens. Adapters are not part of it: merge or save them.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn save(&self, dir: impl AsRef<Path>, options: SaveOptions) -> Result<()> {
        save(dir, &self.entries(), &SaveOptions { config: self.config.to_json(), ..options })
    }
}
