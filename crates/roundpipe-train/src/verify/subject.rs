//! What is trained: small models that are built in, or the first layers of a model of the user's.
//!
//! A subject is a recipe: every run makes the model anew, with the same bits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roundpipe::optim::AdamW;
use roundpipe::{DType, HostTensor, Inputs, Param, Params, RngSite, Rule, host_memory};
use roundpipe_models::{
    Folder, LoadOptions, LoraConfig, Model, ModelConfig, load, preset, read_config,
};
use serde_json::{Value, json};

use super::VerifyOptions;
use crate::error::{Error, Result};

/// Seed of weights, noise and dropout.
pub(super) const SEED: u64 = 23;
/// Operations that all runs of a model of the user's may take together.
const OPERATIONS: f64 = 3e12;
/// Runs of a subject in which a model computes, roughly.
const RUNS: f64 = 18.0;
/// Parameters of a model of the user's, at most.
const MOST_PARAMS: u64 = 160_000_000;
/// Host memory that a parameter takes while two runs are compared.
const BYTES_PER_PARAM: u64 = 64;
/// Tokens that a vocabulary is cut to where its embedding alone is too large.
const FEW_TOKENS: usize = 2048;
/// Rows of the rotary tables.
const MOST_POSITIONS: usize = 2048;

/// A model and its batches.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub name: String,
    about: String,
    config: ModelConfig,
    dtype: DType,
    weights: Option<PathBuf>,
    lora: Option<LoraConfig>,
    /// Whether head and embedding are one in the folder and two here.
    is_untied: bool,
    /// Noise on embeddings, as NEFTune has it: a random operation in every forward.
    noise: f64,
    pub rows: usize,
    pub seq: usize,
    pub microbatches: usize,
    /// Steps before and behind the save of a run that is resumed.
    pub half: u64,
    /// Simulated machines, each with other delays, that the order of copies is checked on.
    pub seeds: u64,
}

impl Subject {
    /// The subjects that the user asked for.
    pub fn choose(options: &VerifyOptions) -> Result<Vec<Self>> {
        match &options.model {
            Some(model) => Ok(vec![Self::of_model(model, options.quick)?]),
            None => Self::built_in(options.quick),
        }
    }

    /// A dense model, one with experts, and adapters on the dense one.
    fn built_in(quick: bool) -> Result<Vec<Self>> {
        let (width, layers, seq, half) = if quick {
            (32, 2, 12, 2)
        } else {
            (128, 4, 40, 4)
        };
        let common = json!({
            "vocab_size": 256, "hidden_size": width, "intermediate_size": 3 * width,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": width / 4, "max_position_embeddings": 64, "bos_token_id": null,
            "eos_token_id": null,
        });
        let dense = preset("qwen3-0.6b")?.with(&common)?;
        let experts = json!({
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width,
            "output_router_logits": true,
        });
        let moe = preset("qwen3-30b-a3b")?.with(&common)?.with(&experts)?;
        let subject = |name: &str, config: ModelConfig| Self {
            name: name.to_owned(),
            about: "built in".to_owned(),
            config,
            dtype: DType::BF16,
            weights: None,
            lora: None,
            is_untied: false,
            noise: 0.0,
            rows: 6,
            seq,
            microbatches: 3,
            half,
            seeds: if quick { 3 } else { 10 },
        };
        let lora = LoraConfig {
            rank: 4,
            dropout: 0.1,
            seed: SEED,
            ..LoraConfig::default()
        };
        Ok(vec![
            Self {
                noise: 5.0,
                ..subject("dense", dense.clone())
            },
            subject("experts", moe),
            Self {
                lora: Some(lora),
                ..subject("LoRA", dense)
            },
        ])
    }

    /// As many layers of a model as this machine compares in minutes.
    fn of_model(name: &str, quick: bool) -> Result<Self> {
        let (config, weights) = if let Ok(config) = preset(name) {
            (config, None)
        } else {
            let path = roundpipe_models::hub::resolve(name)?;
            (read_config(&path)?, Some(path))
        };
        if let Some(how) = config.quantization() {
            return Err(Error::Usage(format!(
                "{name}: its weights are quantized ({how}), and here all weights are trained; name a \
                 model with whole weights"
            )));
        }
        let left = host_memory::available().map_or(u64::MAX, |left| left.0);
        let most = MOST_PARAMS.min(left / BYTES_PER_PARAM);
        let all = config.layers;
        let mut about = format!("{name}, the first LAYERS of {all} layers");
        let largest = |config: &ModelConfig| -> Result<Option<ModelConfig>> {
            for layers in (1..=all).rev() {
                let cut = first_layers(config, layers)?;
                if cut.num_params() <= most {
                    return Ok(Some(cut));
                }
            }
            Ok(None)
        };
        let (cut, weights) = match largest(&config)? {
            Some(cut) => (cut, weights),
            None => {
                let tokens = config.vocab.min(FEW_TOKENS);
                let small = config.with(&json!({
                    "vocab_size": tokens, "bos_token_id": null, "eos_token_id": null,
                    "pad_token_id": null,
                }))?;
                about += &format!(
                    ", with random weights and {tokens} of its tokens, since its embedding is too large for this machine"
                );
                let cut = largest(&small)?.ok_or_else(|| {
                    Error::DoesNotFit(format!(
                        "{name}: one layer has more than {most} parameters; verify a smaller model, or none"
                    ))
                })?;
                (cut, None)
            }
        };
        if weights.is_none() && !about.contains("random weights") {
            about += ", with random weights";
        }
        let about = about.replace("LAYERS", &cut.layers.to_string());
        let sized = Self::sized(name, about, cut, weights);
        let seq = if quick { sized.seq.min(16) } else { sized.seq };
        Ok(Self { seq, ..sized })
    }

    /// Batches that keep a model within [`OPERATIONS`].
    fn sized(name: &str, about: String, config: ModelConfig, weights: Option<PathBuf>) -> Self {
        let (rows, microbatches, half) = (4, 2, 1);
        let steps = 2.0 * half as f64;
        // Two operations forward, two again in recompute, four backward.
        let per_token = 8.0 * config.num_params() as f64;
        let tokens = OPERATIONS / (RUNS * steps * per_token);
        let seq = (tokens / rows as f64) as usize;
        let dtype = config.dtype.unwrap_or(DType::BF16);
        let last_part = name.trim_end_matches('/').rsplit('/').next();
        Self {
            name: last_part.unwrap_or(name).to_owned(),
            about,
            seq: seq.clamp(8, 64).min(config.max_positions),
            config,
            dtype,
            weights,
            lora: None,
            is_untied: false,
            noise: 0.0,
            rows,
            microbatches,
            half,
            seeds: 2,
        }
    }

    /// A line for people.
    pub fn line(&self) -> String {
        let params = self.config.num_params();
        let steps = 2 * self.half;
        format!(
            "{}: {}, {} layers, {params} parameters in {}; {steps} steps of {} rows with {} tokens, {} microbatches",
            self.name,
            self.about,
            self.config.layers,
            self.dtype,
            self.rows,
            self.seq,
            self.microbatches
        )
    }

    /// What updates its weights.
    pub fn rule(&self) -> Rule {
        Rule::AdamW(AdamW {
            weight_decay: 0.05,
            ..AdamW::default()
        })
    }

    /// How many layers an engine sees: the blocks, the embedding and the head.
    pub fn layers(&self) -> usize {
        self.config.layers + 2
    }

    /// Parameters, trained or not.
    pub fn num_params(&self) -> u64 {
        self.config.num_params()
    }

    /// Logits of a whole batch in f32: the largest values there are.
    pub fn logit_bytes(&self) -> u64 {
        (self.rows * self.seq * self.config.vocab * 4) as u64
    }

    /// The model, the same every time.
    pub fn model(&self) -> Result<Model> {
        let mut model = match &self.weights {
            Some(path) if self.is_untied => {
                let config = self.config.with(&json!({ "tie_word_embeddings": true }))?;
                untie(&load_first(path, &config, self.dtype)?, &self.config)?
            }
            Some(path) => load_first(path, &self.config, self.dtype)?,
            None => Model::random(self.config.clone(), self.dtype, SEED)?,
        };
        if let Some(lora) = &self.lora {
            model.add_lora(lora)?;
        }
        model.neftune(self.noise)?;
        Ok(model)
    }

    /// The same with a head of its own that starts as the embedding, where they are one.
    pub fn untied(&self) -> Result<Self> {
        if !self.config.tied {
            return Ok(self.clone());
        }
        let config = self.config.with(&json!({ "tie_word_embeddings": false }))?;
        Ok(Self {
            config,
            is_untied: true,
            ..self.clone()
        })
    }

    /// The model without random operations.
    pub fn still_model(&self) -> Result<Model> {
        self.still(self.dtype).model()
    }

    /// The same in f32, with the values that it has in its own type.
    pub fn wide_model(&self) -> Result<Model> {
        let narrow = self.still_model()?;
        let wide = self.still(DType::F32).model()?;
        let pairs = narrow.named_params().into_iter().zip(wide.named_params());
        for ((_, narrow), (_, wide)) in pairs {
            let values = HostTensor::new(narrow.data(), narrow.dtype(), narrow.shape())?;
            let values = HostTensor::from_f64s(&values.to_f64_vec()?, wide.dtype(), wide.shape())?;
            let home = wide.data();
            let mut home = home.write(0..home.len())?;
            home.bytes().copy_from_slice(values.read()?.bytes());
        }
        Ok(wide)
    }

    /// The recipe without noise and dropout, in a type.
    fn still(&self, dtype: DType) -> Self {
        let lora = self.lora.clone().map(|lora| LoraConfig {
            dropout: 0.0,
            ..lora
        });
        Self {
            noise: 0.0,
            lora,
            dtype,
            ..self.clone()
        }
    }

    /// The tokens of a step, and those that follow them: one list of `rows` times `seq`.
    fn tokens(&self, step: u64) -> (Vec<i64>, Vec<i64>) {
        let key = RngSite {
            seed: SEED,
            step,
            ..RngSite::default()
        }
        .key();
        let vocab = self.config.vocab as u64;
        let token = |at: usize| ((u64::from(key.word(at as u64)) * vocab) >> 32) as i64;
        let at = |i: usize| i / self.seq * (self.seq + 1) + i % self.seq;
        let all = 0..self.rows * self.seq;
        let ids = all.clone().map(|i| token(at(i)));
        // One token in seven is not learned, as in conversations; the last of a row neither.
        let label = |i: usize| match (i % 7 == 3, (i + 1).is_multiple_of(self.seq)) {
            (false, false) => token(at(i) + 1),
            _ => -100,
        };
        (ids.collect(), all.map(label).collect())
    }

    /// The batch of a step. Its loss is the sum over labels divided by their number.
    pub fn batch(&self, step: u64) -> Result<Inputs> {
        let (ids, labels) = self.tokens(step);
        let dims = [self.rows, self.seq];
        Ok(Inputs::new()
            .named("weight", weight(&labels)?)
            .named("ids", HostTensor::from_slice(&ids, &dims)?)
            .named("labels", HostTensor::from_slice(&labels, &dims)?))
    }

    /// The microbatches of a step, as the engine splits rows: larger ones first.
    pub fn microbatches_of(&self, step: u64) -> Result<Vec<[HostTensor; 3]>> {
        let (ids, labels) = self.tokens(step);
        let mut parts = Vec::new();
        let mut start = 0;
        for index in 0..self.microbatches {
            let rows =
                self.rows / self.microbatches + usize::from(index < self.rows % self.microbatches);
            let range = start * self.seq..(start + rows) * self.seq;
            let dims = [rows, self.seq];
            parts.push([
                HostTensor::from_slice(&ids[range.clone()], &dims)?,
                HostTensor::from_slice(&labels[range], &dims)?,
                weight(&labels)?,
            ]);
            start += rows;
        }
        Ok(parts)
    }

    /// The rows of a batch behind each other in one row, which do not see each other.
    pub fn packed(&self, step: u64) -> Result<Inputs> {
        let (ids, labels) = self.tokens(step);
        let count = ids.len();
        let positions: Vec<i64> = (0..count).map(|i| (i % self.seq) as i64).collect();
        let lens: Vec<i32> = (0..=self.rows).map(|row| (row * self.seq) as i32).collect();
        Ok(Inputs::new()
            .named("weight", weight(&labels)?)
            .named("ids", HostTensor::from_slice(&ids, &[1, count])?)
            .named("labels", HostTensor::from_slice(&labels, &[1, count])?)
            .named(
                "positions",
                HostTensor::from_slice(&positions, &[1, count])?,
            )
            .named("lens", HostTensor::from_slice(&lens, &[self.rows + 1])?))
    }
}

/// What a loss is divided by: the labels that are learned.
fn weight(labels: &[i64]) -> Result<HostTensor> {
    let learned = labels.iter().filter(|label| **label >= 0).count();
    Ok(HostTensor::from_slice(&[learned.max(1) as i64], &[])?)
}

/// The config of a model's first layers.
fn first_layers(config: &ModelConfig, layers: usize) -> Result<ModelConfig> {
    // Every layer carries the rotary tables, and no batch here is long.
    let positions = config.max_positions.min(MOST_POSITIONS);
    let mut changes = json!({ "num_hidden_layers": layers, "max_position_embeddings": positions });
    if let Some(Value::Array(types)) = config.to_json().get("layer_types") {
        changes["layer_types"] = types.iter().take(layers).cloned().collect();
    }
    Ok(config.with(&changes)?)
}

/// Reads the layers that a config has from a folder that may have more.
fn load_first(path: &Path, config: &ModelConfig, dtype: DType) -> Result<Model> {
    let model = Model::empty(config.clone(), dtype)?;
    let folder = Folder::open(path)?;
    let is_cut = |name: &str| {
        let number = name.split('.').skip_while(|part| *part != "layers").nth(1);
        let number = number.and_then(|number| number.parse::<usize>().ok());
        number.is_some_and(|number| number >= config.layers)
    };
    let mut options = LoadOptions::default().ignoring("lm_head.weight");
    if !config.tied {
        options.ignored.retain(|name| name != "lm_head.weight");
    }
    let cut = folder.tensors().filter(|name| is_cut(name));
    options.ignored.extend(cut.map(str::to_owned));
    load(&folder, &model.entries(), &options)?;
    Ok(model)
}

/// A copy of a model with tied weights, whose head has weights of its own.
fn untie(tied: &Model, config: &ModelConfig) -> Result<Model> {
    let untied = Model::empty(config.clone(), tied.dtype())?;
    let (shared, _) = tied.layers.named_params().remove(0);
    let known: BTreeMap<String, Param> = tied.layers.named_params().into_iter().collect();
    for (name, param) in untied.layers.named_params() {
        // The head's is the only one that the tied model does not have.
        let source = known.get(&name).unwrap_or(&known[&shared]).data();
        let home = param.data();
        let mut home = home.write(0..home.len())?;
        home.bytes().copy_from_slice(source.read_all()?.bytes());
    }
    Ok(untied)
}
