//! A model from a folder and into one: config, entries and files put together.

use std::path::Path;

use roundpipe::{Bytes, DType};
use roundpipe_files::small;

use crate::config::ModelConfig;
use crate::decoder::{Contents, Model};
use crate::error::{Error, Result};
use crate::folder::{Folder, LoadOptions, SaveOptions, load, save};
use crate::limits;
use crate::memory::host_memory;

const CONFIG: &str = "config.json";

/// The config of a folder.
///
/// # Errors
/// [`Error::File`] when there is no `config.json`, or it says what is not supported.
pub fn read_config(dir: impl AsRef<Path>) -> Result<ModelConfig> {
    let path = dir.as_ref().join(CONFIG);
    ModelConfig::from_bytes(&small::read(&path, limits::SETTINGS)?, &path)
}

impl Model {
    /// Reads a folder into parameters of type `dtype`, or of the type that its config names (f32
    /// where it names none).
    ///
    /// # Errors
    /// [`Error::File`] naming the key, tensor or file that does not fit, or the keys that ask for
    /// more memory than this machine has.
    pub fn load(dir: impl AsRef<Path>, dtype: Option<DType>) -> Result<Self> {
        Self::load_within(dir, dtype, host_memory())
    }

    /// [`Model::load`] for a machine with so much memory.
    ///
    /// # Errors
    /// As there.
    pub fn load_within(dir: impl AsRef<Path>, dtype: Option<DType>, memory: Bytes) -> Result<Self> {
        let dir = dir.as_ref();
        let config = read_config(dir)?;
        let dtype = dtype.or(config.dtype).unwrap_or(DType::F32);
        config
            .fits(dtype, memory)
            .map_err(|what| Error::file(dir.join(CONFIG), what))?;
        Self::fill(dir, config, dtype, Contents::Zero)
    }

    /// Like [`Model::load`], but the weights stay in the folder's files, so that they may be larger
    /// than this machine's memory: whatever is read comes from disk, or from the system's cache of
    /// it. Weights that stand in the files in another type or layout than in the model (experts in
    /// pieces, quantised ones) are put together at each use.
    ///
    /// An engine with [`Pin::Off`](roundpipe::Pin::Off) leaves frozen weights there; weights that it
    /// trains, and with another `Pin` all of them, move into memory. The files must not change while
    /// the model lives.
    ///
    /// ```no_run
    /// # use roundpipe::{Pin, RoundPipe, Rule, optim::AdamW};
    /// # use roundpipe_models::{LoraConfig, Model};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut model = Model::load_mapped("Qwen3-235B-A22B", None)?;
    /// model.add_lora(&LoraConfig::default())?;
    /// let engine = RoundPipe::builder(model.layers.clone())
    ///     .pin(Pin::Off)
    ///     .optimizer(Rule::AdamW(AdamW::default()))
    ///     .build()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] naming the key, tensor or file that does not fit.
    pub fn load_mapped(dir: impl AsRef<Path>, dtype: Option<DType>) -> Result<Self> {
        let dir = dir.as_ref();
        let config = read_config(dir)?;
        config
            .tables_fit(host_memory())
            .map_err(|what| Error::file(dir.join(CONFIG), what))?;
        let dtype = dtype.or(config.dtype).unwrap_or(DType::F32);
        Self::fill(dir, config, dtype, Contents::Absent)
    }

    fn fill(dir: &Path, config: ModelConfig, dtype: DType, contents: Contents) -> Result<Self> {
        let folder = Folder::open(dir)?;
        let mut options = LoadOptions {
            mapped: contents == Contents::Absent,
            ..LoadOptions::default()
        };
        if config.tied {
            // Some tools save the shared weight twice.
            options = options.ignoring("lm_head.weight");
        }
        // Nothing is written until the files are found to be those of the config, the tables
        // included.
        let model = Self::without_tables(config, dtype, contents)?;
        load(&folder, &model.entries(), &options)?;
        model.fill_rope()?;
        Ok(model)
    }

    /// Writes a folder that transformers opens. Adapters are not part of it: merge or save them.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn save(&self, dir: impl AsRef<Path>, options: SaveOptions) -> Result<()> {
        save(
            dir,
            &self.entries(),
            &SaveOptions {
                config: self.config.to_json(),
                ..options
            },
        )
    }
}
