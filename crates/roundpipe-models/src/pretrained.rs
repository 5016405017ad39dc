//! A model from a folder and into one: config, entries and files put together.

use std::path::Path;

use roundpipe::{Bytes, DType, Quantization};
use roundpipe_files::small;

use crate::config::ModelConfig;
use crate::decoder::{Contents, Form, Model, QuantizedWeight, Weight, is_router, own_form};
use crate::error::{Error, Result};
use crate::folder::{
    Folder, LoadOptions, SaveOptions, load_all, not_taken, save, stored_form, take_widened,
};
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
    /// where it names none). Weights that bitsandbytes saved in 8 or 4 bits stay so.
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
        let fits = match config.quantization() {
            None => config.fits(dtype, memory),
            Some(how) => Self::empty_quantized(config.clone(), dtype, how)?.fits(memory),
        };
        fits.map_err(|what| Error::file(dir.join(CONFIG), what))?;
        Self::fill(dir, config, dtype, Contents::Zero, None)
    }

    /// Like [`Model::load`], with the linear maps of blocks, experts included, quantised as they are
    /// read: memory holds the quantised model and one tensor. Embedding, head, norms, routers and
    /// biases stay in `dtype`, in which quantised weights compute too. They are frozen: train
    /// adapters beside them ([`Model::add_lora`]). A folder that bitsandbytes quantised in the same
    /// way is taken as it is.
    ///
    /// ```no_run
    /// # use roundpipe_models::{LoraConfig, Model, Quantization};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut model = Model::load_quantized("Qwen3-32B", None, Quantization::Nf4)?;
    /// model.add_lora(&LoraConfig::default())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Model::load`]; [`Error::File`] for a folder that is quantised in another way.
    pub fn load_quantized(
        dir: impl AsRef<Path>,
        dtype: Option<DType>,
        how: Quantization,
    ) -> Result<Self> {
        let dir = dir.as_ref();
        let config = read_config(dir)?;
        if let Some(stored) = config.quantization().filter(|stored| *stored != how) {
            let what = format!(
                "says that the weights are quantised as {stored}, not {how}; ask for {stored}, or load whole weights"
            );
            return Err(Error::file(dir.join(CONFIG), what));
        }
        let dtype = dtype.or(config.dtype).unwrap_or(DType::F32);
        Self::empty_quantized(config.clone(), dtype, how)?
            .fits(host_memory())
            .map_err(|what| Error::file(dir.join(CONFIG), what))?;
        Self::fill(dir, config, dtype, Contents::Zero, Some(how))
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
        Self::fill(dir, config, dtype, Contents::Absent, None)
    }

    fn fill(
        dir: &Path,
        config: ModelConfig,
        dtype: DType,
        contents: Contents,
        how: Option<Quantization>,
    ) -> Result<Self> {
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
        let mut model = Self::without_tables(config, dtype, contents)?;
        model.take_forms(&folder, how)?;
        model.read_weights(&folder, &options)?;
        model.fill_rope()?;
        Ok(model)
    }

    /// Reads all parameters. Those that are whole here but quantised in the folder are widened behind
    /// it, or whenever they are read where weights stay in files.
    fn read_weights(&self, folder: &Folder, options: &LoadOptions) -> Result<()> {
        let mut entries = self.entries();
        let mut quantized = self.quantized_entries();
        let mut widened = Vec::new();
        for (param, coded) in take_widened(folder, &mut entries)? {
            widened.push((param, coded.weight.clone()));
            quantized.push(coded);
        }
        load_all(folder, &entries, &quantized, options)?;
        for (param, weight) in widened {
            match options.mapped {
                true => weight.rehome_on_read(&param)?,
                false => weight.widen_into(&param.data())?,
            }
        }
        Ok(())
    }

    /// Gives linear maps the form in which the folder has them, or `how`.
    fn take_forms(&mut self, folder: &Folder, how: Option<Quantization>) -> Result<()> {
        let family = self.config.family;
        let mut forms = Vec::new();
        for (block, of) in self.blocks.iter().enumerate() {
            for (name, projection) in of.projections() {
                let pieces = self.pieces_of(block, (name, projection));
                let stored = pieces
                    .iter()
                    .map(|piece| stored_form(folder, &piece.tensor));
                let stored: Vec<_> = stored.collect();
                if stored.windows(2).any(|pair| pair[0] != pair[1]) {
                    let what = format!(
                        "the matrices of model.layers.{block}.{name} are quantised in different ways; quantise the model anew"
                    );
                    return Err(Error::file(folder.path(), what));
                }
                let own = |how| own_form(family, name, projection, how);
                let form = match stored.first().copied().flatten() {
                    None => how.and_then(own),
                    // Routers are whole here; their codes are widened when they are read.
                    Some(_) if is_router(name) => None,
                    Some((how, double)) => {
                        let own = own(how).ok_or_else(|| not_taken(folder, &pieces[0], how))?;
                        Some(Form { double, ..own })
                    }
                };
                forms.push(form);
            }
        }
        let mut any = false;
        for (form, (_, projection)) in forms.into_iter().zip(self.projections_mut()) {
            if let (Some(form), Weight::Whole(whole)) = (form, &projection.weight) {
                let weight = QuantizedWeight::zeros(form, *whole.shape(), whole.dtype())?;
                projection.weight = Weight::Quantized(weight);
                any = true;
            }
        }
        if any {
            self.assemble();
        }
        Ok(())
    }

    /// Writes a folder that transformers opens. Adapters are not part of it: merge or save them.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written; [`Error::Argument`] when weights are quantised.
    pub fn save(&self, dir: impl AsRef<Path>, options: SaveOptions) -> Result<()> {
        if let Some(how) = self.quantization() {
            let why = format!(
                "the weights are quantised ({how}) and not saved so; save the adapter, or call Model::dequantize first"
            );
            return Err(Error::argument("save", why));
        }
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
