//! What a plan is about: a model, and data where they are given.
//!
//! A model may be a folder, a hub id (only its config and tokenizer are fetched), a preset after
//! `--init`, or the bare name of a preset. Data are looked at as `train` looks at them; without
//! data a row is one document of `seq` tokens. Nothing is written: the tokenizer of bytes that
//! `--init` has goes into a folder that is removed again.

use std::path::PathBuf;

use roundpipe::DType;
use roundpipe_data::{Rows, Stream};
use roundpipe_models::hub::HubConfig;
use roundpipe_models::{Model, ModelConfig, preset};

use super::DataFacts;
use crate::error::{Error, Result};
use crate::model::{Origin, without_weights};
use crate::resolve::{self, Lengths, Place};
use crate::settings::Settings;
use crate::start;

/// Steps that a run has where neither steps nor data say.
const STEPS: u64 = 1000;
/// Tokens of a row where neither `seq` nor data say.
const SEQ: usize = 2048;

/// A model and data, opened.
pub struct Subject {
    name: String,
    config: ModelConfig,
    /// Whether the weights are in files.
    has_files: bool,
    data: Option<(start::Data, Lengths, Settings)>,
}

impl Subject {
    /// Opens what the settings name; what data say of them is kept.
    ///
    /// # Errors
    /// [`Error::Usage`] without a model; when model or data cannot be read.
    pub fn open(settings: &Settings) -> Result<Self> {
        if let Some(name) = bare_preset(settings) {
            let config = preset(name).map_err(|e| Error::Usage(e.to_string()))?;
            if !settings.data.is_empty() {
                return Err(Error::Usage(format!(
                    "{name} is a preset without a tokenizer, so data cannot be looked at; name a model, or \
                     use --init {name}"
                )));
            }
            return Ok(Self {
                name: name.to_owned(),
                config,
                has_files: false,
                data: None,
            });
        }
        let bytes = Scratch::new();
        let hub = HubConfig::from_env();
        let origin = Origin::find_with(settings, &bytes.0, |model| hub.resolve_config(model))?;
        let name = settings.model.as_ref().or(settings.init.as_ref());
        let data = if settings.data.is_empty() {
            None
        } else {
            let mut settings = settings.clone();
            let (data, lengths) = start::open_data(&mut settings, &origin)?;
            Some((data, lengths, settings))
        };
        Ok(Self {
            name: name.cloned().unwrap_or_default(),
            has_files: settings.init.is_none(),
            config: origin.config,
            data,
        })
    }

    /// As the user named the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(crate) fn has_files(&self) -> bool {
        self.has_files
    }

    /// Settings with everything that was left open, and what is known of the data.
    pub(crate) fn resolve(
        &self,
        settings: &Settings,
        place: &Place,
    ) -> Result<(Settings, DataFacts)> {
        let mut settings = settings.clone();
        let Some((data, lengths, opened)) = &self.data else {
            let facts = self.assume(&mut settings, place)?;
            return Ok((settings, facts));
        };
        settings.validation.clone_from(&opened.validation);
        let kept = data.validation.as_ref().map_or(0, Rows::len);
        resolve::resolve(&mut settings, &self.config, lengths, place, kept)?;
        start::schedule(&settings)?;
        Stream::new(
            data.rows.clone(),
            data.encoder.clone(),
            start::stream_options(&settings),
        )?;
        let seq = settings.seq.unwrap_or(1);
        let mut notes = data.report.clone();
        notes.extend(lengths.too_long(&settings));
        let facts = DataFacts {
            context: lengths.context(seq),
            validation_tokens: lengths.tokens_of(kept, seq),
            validates: kept > 0 && settings.eval_every != Some(0),
            notes,
        };
        Ok((settings, facts))
    }

    /// Settings and data of a run that is only named.
    fn assume(&self, settings: &mut Settings, place: &Place) -> Result<DataFacts> {
        let mut notes = Vec::new();
        let seq = match settings.seq {
            Some(seq) => seq,
            None => SEQ.min(self.config.max_positions),
        };
        if settings.epochs.is_some() {
            let what = "epochs need data; name files, or give steps";
            return Err(Error::Usage(what.into()));
        }
        if settings.steps.is_none() {
            settings.steps = Some(STEPS);
            notes.push(format!(
                "no data and no steps are given: {STEPS} steps are assumed"
            ));
        }
        settings.seq = Some(seq);
        let lengths = Lengths::assumed(seq);
        resolve::resolve(settings, &self.config_for(seq)?, &lengths, place, 0)?;
        notes.push(format!(
            "no data are given: a row is one document of {seq} tokens, and nothing validates"
        ));
        Ok(DataFacts {
            context: seq,
            validation_tokens: 0.0,
            validates: false,
            notes,
        })
    }

    /// The config, with as many positions as rows need where no weights hold it back.
    fn config_for(&self, seq: usize) -> Result<ModelConfig> {
        let config = &self.config;
        if self.has_files || seq <= config.max_positions {
            return Ok(config.clone());
        }
        Ok(config.with(&serde_json::json!({ "max_position_embeddings": seq }))?)
    }

    /// The model without its weights, with adapters where they are trained.
    pub(crate) fn model(&self, settings: &Settings) -> Result<Model> {
        let dtype = settings.dtype.map(DType::from);
        let seq = settings.seq.unwrap_or(1);
        let config = self.config_for(seq)?;
        let dtype = dtype.or(config.dtype).unwrap_or(DType::F32);
        without_weights(config, dtype, settings)
    }
}

/// The model's name, where it is neither a folder nor a hub id but a preset.
fn bare_preset(settings: &Settings) -> Option<&str> {
    let name = settings.model.as_deref()?;
    let is_path = name.contains('/') || std::path::Path::new(name).exists();
    (!is_path).then_some(name)
}

/// A folder that goes away again.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let name = format!("roundpipe-plan-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It may not have been needed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
