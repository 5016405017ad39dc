//! The model of a run: where it comes from, what of it is trained, and how it is written at the
//! end.
//!
//! # Invariants
//! - A model whose training does not fit the host is refused before its weights are read.
//! - `model/` in the run's folder is a complete model, or it is what it was before.

use std::path::{Path, PathBuf};

use roundpipe::{
    Bytes, DType, HostBudget, Params, Quantization, Rule,
    optim::{Adafactor, Adam, AdamW, Lion, Muon, Sgd},
};
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{
    LoraConfig, LoraTargets, Model, ModelConfig, SaveOptions, hub, preset, read_config,
};

use crate::bytes;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::machine::{self, StateTypes};
use crate::settings::{Method, PinName, RuleName, Settings, TypeName};

/// Embedding rows come in multiples of this.
const VOCAB_MULTIPLE: usize = 64;

/// A model that is to be trained.
pub(crate) struct Trained {
    pub model: Model,
    pub tokenizer: Tokenizer,
    /// Where the tokenizer's files are.
    pub files: PathBuf,
    /// The type to save weights in.
    pub saved_dtype: Option<DType>,
}

/// Where a model will come from: known before it is read.
pub(crate) struct Origin {
    pub config: ModelConfig,
    pub tokenizer: Tokenizer,
    files: PathBuf,
    weights: Option<PathBuf>,
}

impl Origin {
    /// Finds the model and opens its tokenizer.
    pub fn find(settings: &Settings, folder: &RunFolder) -> Result<Self> {
        Self::find_with(settings, &folder.file("tokenizer"), hub::resolve)
    }

    /// The same with a place for a tokenizer of bytes, and a way from names to folders.
    pub fn find_with(
        settings: &Settings,
        bytes_folder: &Path,
        resolve: impl Fn(&str) -> roundpipe_models::Result<PathBuf>,
    ) -> Result<Self> {
        let Some(name) = &settings.init else {
            let Some(model) = &settings.model else {
                let what = "no model is given; name a folder or a hub id, or --init a preset";
                return Err(Error::Usage(what.into()));
            };
            if settings.tokenizer.is_some() {
                let what = "tokenizer is for init, and a model has its own; leave it out";
                return Err(Error::Usage(what.into()));
            }
            let path = resolve(model)?;
            if path.join("run.toml").is_file() && !path.join("config.json").is_file() {
                return Err(Error::Usage(format!(
                    "{model}: is the folder of a run; name its model, {model}/model"
                )));
            }
            if path.join("adapter_config.json").is_file() && !path.join("config.json").is_file() {
                return Err(Error::Usage(format!(
                    "{model}: is an adapter, not a model; name the model that it belongs to"
                )));
            }
            return Ok(Self {
                config: read_config(&path)?,
                tokenizer: Tokenizer::open(&path)?,
                files: path.clone(),
                weights: Some(path),
            });
        };
        if settings.model.is_some() {
            let what = "model and init are both given; a run starts from weights or from nothing";
            return Err(Error::Usage(what.into()));
        }
        let config = preset(name).map_err(|e| Error::Usage(format!("init: {e}")))?;
        let files = match &settings.tokenizer {
            Some(tokenizer) => resolve(tokenizer)?,
            None => {
                bytes::write(bytes_folder)?;
                bytes_folder.to_path_buf()
            }
        };
        let tokenizer = Tokenizer::open(&files)?;
        let config = config.with(&serde_json::json!({
            "vocab_size": tokenizer.vocab_size().next_multiple_of(VOCAB_MULTIPLE),
            "eos_token_id": tokenizer.eos().first(),
            "bos_token_id": tokenizer.bos(),
        }))?;
        Ok(Self {
            config,
            tokenizer,
            files,
            weights: None,
        })
    }

    /// The weights, with adapters where they are trained. `dtype`, `seq` are resolved by now.
    pub fn load(self, settings: &Settings, seq: usize) -> Result<Trained> {
        let dtype = settings.dtype.map(DType::from);
        let mut config = self.config;
        let saved_dtype = config.dtype;
        if self.weights.is_none() && seq > config.max_positions {
            config = config.with(&serde_json::json!({ "max_position_embeddings": seq }))?;
        }
        let type_now = dtype.or(config.dtype).unwrap_or(DType::F32);
        check_host(settings, &config, type_now, self.weights.is_some())?;
        let quantize = settings.quantize.map(Quantization::from);
        let mut model = match (&self.weights, quantize) {
            (None, None) => Model::random(config, type_now, settings.seed)?,
            (None, Some(how)) => Model::random_quantized(config, type_now, settings.seed, how)?,
            (Some(path), Some(how)) => Model::load_quantized(path, dtype, how)?,
            (Some(path), None) if settings.pin == PinName::Off => Model::load_mapped(path, dtype)?,
            (Some(path), None) => Model::load(path, dtype)?,
        };
        prepare(&mut model, settings, Model::add_lora)?;
        Ok(Trained {
            model,
            tokenizer: self.tokenizer,
            files: self.files,
            saved_dtype,
        })
    }
}

/// Everything that settings change of a model.
fn prepare(model: &mut Model, settings: &Settings, add: AddLora) -> Result<()> {
    adapt(model, settings, add)?;
    model.fast_attention(settings.fast_attention);
    model.label_smoothing(settings.label_smoothing)?;
    model.neftune(settings.neftune)?;
    Ok(())
}

/// A model as it would be trained, without its weights: no page of memory stands behind them.
pub(crate) fn without_weights(
    config: ModelConfig,
    dtype: DType,
    settings: &Settings,
) -> Result<Model> {
    let mut model = empty(config, dtype, settings)?;
    prepare(&mut model, settings, Model::add_empty_lora)?;
    Ok(model)
}

/// A model's parameters without memory, quantised where the settings or its files say so.
fn empty(config: ModelConfig, dtype: DType, settings: &Settings) -> Result<Model> {
    let quantize = settings.quantize.map(Quantization::from);
    Ok(match quantize.or(config.quantization()) {
        None => Model::empty(config, dtype)?,
        Some(how) => Model::empty_quantized(config, dtype, how)?,
    })
}

/// Counts frozen weights that stay in a model's files, where settings leave them there.
pub(crate) fn in_files(budget: &mut HostBudget, model: &Model, settings: &Settings) {
    if settings.pin != PinName::Off {
        return;
    }
    let mut params = model.layers.named_params();
    params.sort_by_key(|(_, param)| param.id());
    params.dedup_by_key(|(_, param)| param.id());
    let frozen = params.iter().filter(|(_, param)| !param.is_trainable());
    let bytes: u64 = frozen.map(|(_, param)| param.bytes() as u64).sum();
    budget.weights = budget.weights.saturating_sub(bytes);
    budget.in_files += bytes;
}

/// How branches are added: with values to start from, or without memory.
type AddLora = fn(&mut Model, &LoraConfig) -> roundpipe_models::Result<()>;

fn adapt(model: &mut Model, settings: &Settings, add: AddLora) -> Result<()> {
    if settings.method == Method::Full {
        return Ok(());
    }
    let is_all = settings.lora_targets == ["all-linear"];
    let targets = if is_all {
        LoraTargets::AllLinear
    } else {
        LoraTargets::Names(settings.lora_targets.clone())
    };
    let config = LoraConfig {
        rank: settings.lora_rank,
        alpha: settings.lora_alpha,
        dropout: settings.lora_dropout,
        targets,
        seed: settings.seed,
        rslora: settings.lora_rslora,
    };
    add(model, &config).map_err(|e| {
        let is_setting = ["rank: ", "alpha: ", "dropout: ", "targets: "]
            .iter()
            .any(|name| e.to_string().starts_with(name));
        // As they are called here.
        let gap = if is_setting { "_" } else { ": " };
        Error::Usage(format!("lora{gap}{e}"))
    })
}

/// Compares what training takes with what the host has left, and with what the user allows.
fn check_host(
    settings: &Settings,
    config: &ModelConfig,
    dtype: DType,
    has_files: bool,
) -> Result<()> {
    let mut model = empty(config.clone(), dtype, settings)?;
    adapt(&mut model, settings, Model::add_empty_lora)?;
    let mut budget = host_budget(&model, settings);
    if has_files {
        in_files(&mut budget, &model, settings);
    }
    let fits = |limit: Bytes, what: &str| {
        let checked = budget.check(limit);
        checked.map_err(|e| Error::DoesNotFit(format!("{what}{e}")))
    };
    if let Some(limit) = settings.host_memory {
        fits(limit, "host_memory: ")?;
    }
    match roundpipe::host_memory::available() {
        Some(left) => fits(left, ""),
        None => Ok(()),
    }
}

/// Host memory of training, by name.
pub(crate) fn host_budget(model: &Model, settings: &Settings) -> HostBudget {
    let state = StateTypes {
        optim_dtype: settings.state_dtype.into(),
        moments: settings.moments.into(),
    };
    machine::training_budget_of(&model.layers, &rule(settings), settings.lag == 1, state)
}

/// The optimizer's rule with the settings that were given.
pub(crate) fn rule(settings: &Settings) -> Rule {
    let decay = settings.weight_decay;
    match settings.optimizer {
        RuleName::AdamW => {
            let default = AdamW::default();
            Rule::AdamW(AdamW {
                weight_decay: decay.unwrap_or(default.weight_decay),
                beta1: settings.beta1.unwrap_or(default.beta1),
                beta2: settings.beta2.unwrap_or(default.beta2),
                ..default
            })
        }
        RuleName::Adam => {
            let default = Adam::default();
            Rule::Adam(Adam {
                weight_decay: decay.unwrap_or(default.weight_decay),
                beta1: settings.beta1.unwrap_or(default.beta1),
                beta2: settings.beta2.unwrap_or(default.beta2),
                ..default
            })
        }
        RuleName::Sgd => Rule::Sgd(Sgd {
            weight_decay: decay.unwrap_or(0.0),
            momentum: settings.momentum.unwrap_or(0.9),
            ..Sgd::default()
        }),
        RuleName::Lion => {
            let default = Lion::default();
            Rule::Lion(Lion {
                weight_decay: decay.unwrap_or(default.weight_decay),
                beta1: settings.beta1.unwrap_or(default.beta1),
                beta2: settings.beta2.unwrap_or(default.beta2),
                ..default
            })
        }
        RuleName::Muon => {
            let muon = Muon {
                weight_decay: decay.unwrap_or(0.1),
                momentum: settings.momentum.unwrap_or(0.95),
                adjust_lr: roundpipe::optim::AdjustLr::MatchRmsAdamW,
                ..Muon::default()
            };
            let default = AdamW::default();
            let adamw = AdamW {
                weight_decay: decay.unwrap_or(default.weight_decay),
                beta1: settings.beta1.unwrap_or(default.beta1),
                beta2: settings.beta2.unwrap_or(default.beta2),
                ..default
            };
            Rule::Muon {
                matrices: muon,
                rest: adamw,
            }
        }
        RuleName::Adafactor => Rule::Adafactor(Adafactor {
            weight_decay: decay.unwrap_or(0.0),
            ..Adafactor::default()
        }),
    }
}

/// Writes the finished model, or its adapter, into `model/` of the run's folder.
pub(crate) fn write_result(
    trained: &Trained,
    settings: &Settings,
    folder: &RunFolder,
) -> Result<PathBuf> {
    let target = folder.file("model");
    let partial = folder.file("model.partial");
    let old = folder.file("model.old");
    let clear = |path: &Path| match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, &e)),
        _ => Ok(()),
    };
    let rename = |from: &Path, to: &Path| {
        std::fs::rename(from, to).map_err(|e| Error::io("rename", from, &e))
    };
    clear(&partial)?;
    clear(&old)?;
    if settings.method == Method::Lora {
        let base = settings.model.as_deref();
        trained.model.save_adapter_of(&partial, base)?;
    } else {
        let options = SaveOptions {
            dtype: trained.saved_dtype.filter(|d| TypeName::of(*d).is_some()),
            copy_from: Some(trained.files.clone()),
            ..SaveOptions::default()
        };
        trained.model.save(&partial, options)?;
    }
    if target.exists() {
        rename(&target, &old)?;
    }
    rename(&partial, &target)?;
    roundpipe_files::atomic::sync_folder(folder.path())
        .map_err(|e| Error::Failed(e.to_string()))?;
    clear(&old)?;
    Ok(target)
}
