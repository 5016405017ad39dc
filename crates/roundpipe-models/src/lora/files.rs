//! Adapters as PEFT has them on disk: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! A linear map's tensors are named `base_model.model.{module}.lora_A.weight` and
//! `..lora_B.weight`. Those of experts belong to the module `experts`: A is [experts · rank, in]; B
//! is [out, rank · experts], where the expert counts fastest. Where both matrices of a block's
//! experts have branches, `gate_up_proj`'s are one level deeper, under `base_layer`.

use std::collections::BTreeSet;
use std::path::Path;

use roundpipe::{DType, Element, HostBuf, Param, TensorResult, bf16, f16};
use roundpipe_files::small;
use roundpipe_files::text::shown;
use roundpipe_files::{View, Weights, write_tensors};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{LoraConfig, LoraTargets, MOST_RANK, branch_dims, ends_with, is_stacked, scale};
use crate::config::Family;
use crate::decoder::{Adapter, DOWN, GATE_UP, Model, Projection, Weight};
use crate::error::{Error, Result};
use crate::limits;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

impl Model {
    /// Writes the branches into `dir`, as PEFT reads them.
    ///
    /// # Errors
    /// [`Error::Argument`] when there are none; [`Error::File`] when the folder cannot be written.
    pub fn save_adapter(&self, dir: impl AsRef<Path>) -> Result<()> {
        self.save_adapter_of(dir, None)
    }

    /// The same with the name of the model that the branches belong to, where PEFT looks for it.
    ///
    /// # Errors
    /// As [`Model::save_adapter`].
    pub fn save_adapter_of(&self, dir: impl AsRef<Path>, base: Option<&str>) -> Result<()> {
        let dir = dir.as_ref();
        let config = self.lora.as_ref();
        let config = config
            .ok_or_else(|| Error::argument("adapter", "the model has none; add_lora makes them"))?;
        std::fs::create_dir_all(dir)
            .map_err(|e| Error::file(dir, format!("cannot be made: {e}")))?;
        let mut tensors = Vec::new();
        for (name, projection) in self.projections() {
            if let Some(adapter) = &projection.adapter {
                let at = self.file_name(&name, |other| self.has_adapter(other));
                let (a, b) = file_dims(&projection.weight, rank_of(adapter));
                let data = if is_stacked(&name) {
                    turned_out(&adapter.b)?
                } else {
                    adapter.b.data()
                };
                tensors.push((
                    format!("{at}.lora_A.weight"),
                    Param::new(adapter.a.data(), self.dtype(), &a)?,
                ));
                tensors.push((
                    format!("{at}.lora_B.weight"),
                    Param::new(data, self.dtype(), &b)?,
                ));
            }
        }
        write(&dir.join(CONFIG), &self.adapter_json(config, base))?;
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        write_tensors(dir.join(TENSORS), &metadata, &tensors)?;
        Ok(())
    }

    /// Reads branches from `dir`. A model without any gets those of the files; one that has some
    /// must have the same, and gets their values.
    ///
    /// # Errors
    /// [`Error::File`] naming the key or tensor that does not fit; the model is as before then.
    pub fn load_adapter(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        let path = dir.join(CONFIG);
        let json = small::read_json(&path, limits::SETTINGS)?;
        let written = Written::read(&json).map_err(|what| Error::file(&path, what))?;
        let path = dir.join(TENSORS);
        let file = Weights::open(&path)?;
        let adapters = self
            .read_adapters(&file, &written)
            .map_err(|what| Error::file(&path, what))?;
        match self.lora.is_some() {
            true => self
                .refill(adapters)
                .map_err(|what| Error::file(&path, what)),
            false => {
                self.attach(adapters, written.config);
                Ok(())
            }
        }
    }

    /// Branches for all linear maps that the file has tensors for; every tensor must find its
    /// place.
    fn read_adapters(
        &self,
        file: &Weights,
        written: &Written,
    ) -> Result<Vec<(String, Adapter)>, String> {
        let names: BTreeSet<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
        let mut left = names.clone();
        let inner = |other: &str| {
            let block = other
                .strip_suffix(GATE_UP)
                .or_else(|| other.strip_suffix(DOWN))
                .unwrap_or(other);
            names.contains(
                format!("base_model.model.{block}mlp.experts.base_layer.lora_A.weight").as_str(),
            )
        };
        let places: Vec<(String, String)> = self
            .projections()
            .map(|(name, _)| {
                (
                    self.file_name(&name, |other| inner(other) || written.has(other)),
                    name,
                )
            })
            .collect();
        let mut all = Vec::new();
        for ((at, name), (_, projection)) in places.into_iter().zip(self.projections()) {
            let [a, b] = ["A", "B"].map(|side| format!("{at}.lora_{side}.weight"));
            // With one branch for a block's experts the name alone does not say whose it is.
            if is_stacked(&name) && !inner(&name) && !written.has(&name) {
                continue;
            }
            if !left.remove(a.as_str()) {
                continue;
            }
            if !left.remove(b.as_str()) {
                return Err(format!("has {a} and no {b}"));
            }
            let view = |name: &str| file.view(name).ok_or_else(|| format!("has no {name}"));
            let pair = [(a.as_str(), view(&a)?), (b.as_str(), view(&b)?)];
            let adapter = read_pair(&name, projection, pair, written)?;
            all.push((name, adapter));
        }
        match left.first() {
            Some(extra) => Err(format!("has {extra}, which is no branch of this model")),
            None if all.is_empty() => Err("has no branch of this model".into()),
            None => Ok(all),
        }
    }

    /// Values into branches that are there already.
    fn refill(&self, adapters: Vec<(String, Adapter)>) -> Result<(), String> {
        let here: Vec<_> = self
            .projections()
            .filter_map(|(name, p)| p.adapter.as_ref().map(|a| (name, a)))
            .collect();
        if let Some((name, _)) = adapters.iter().find(|(name, _)| !self.has_adapter(name)) {
            return Err(format!("has a branch for {name}, the model has none there"));
        }
        if let Some((name, _)) = here
            .iter()
            .find(|(name, _)| !adapters.iter().any(|(other, _)| other == name))
        {
            return Err(format!("has no branch for {name}, the model has one there"));
        }
        for ((name, to), (_, from)) in here.iter().zip(&adapters) {
            let (have, want) = (rank_of(from), rank_of(to));
            if have != want {
                return Err(format!("has rank {have} for {name}, the model {want}"));
            }
            if from.scale != to.scale {
                return Err(format!(
                    "has a scale of {} for {name}, the model {}",
                    from.scale, to.scale
                ));
            }
        }
        for ((_, to), (_, from)) in here.iter().zip(&adapters) {
            for (to, from) in [(&to.a, &from.a), (&to.b, &from.b)] {
                copy(from, to).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    fn has_adapter(&self, name: &str) -> bool {
        self.projections()
            .any(|(other, projection)| other == name && projection.adapter.is_some())
    }

    /// Where PEFT has the branch of a linear map; `has` says which experts' matrices have one.
    fn file_name(&self, name: &str, has: impl Fn(&str) -> bool) -> String {
        let Some(block) = name
            .strip_suffix(GATE_UP)
            .or_else(|| name.strip_suffix(DOWN))
        else {
            return format!("base_model.model.{name}");
        };
        let deeper = name.ends_with(GATE_UP)
            && has(&format!("{block}{GATE_UP}"))
            && has(&format!("{block}{DOWN}"));
        let level = if deeper { ".base_layer" } else { "" };
        format!("base_model.model.{block}mlp.experts{level}")
    }

    fn adapter_json(&self, config: &LoraConfig, base: Option<&str>) -> Value {
        let (mut modules, mut parameters) = (BTreeSet::new(), BTreeSet::new());
        for (name, _) in self.projections().filter(|(_, p)| p.adapter.is_some()) {
            let short = name.splitn(4, '.').nth(3).unwrap_or(&name).to_owned();
            // In a Qwen3-MoE, PEFT takes the names of dense units for those of experts, and routers
            // are parameters.
            let weight = self.config.family == Family::Qwen3Moe && short.starts_with("mlp.");
            match (is_stacked(&name), weight || super::is_router(&name)) {
                (true, _) => parameters.insert(short),
                (_, true) => parameters.insert(format!("{short}.weight")),
                _ => modules.insert(short.rsplit('.').next().unwrap_or(&short).to_owned()),
            };
        }
        // PEFT refuses dropout beside branches of experts; it matters in training only.
        let dropout = if parameters.is_empty() {
            config.dropout
        } else {
            0.0
        };
        json!({
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": if config.alpha.fract() == 0.0 { json!(config.alpha as i64) } else { json!(config.alpha) },
            "lora_dropout": dropout,
            "peft_type": "LORA",
            "r": config.rank,
            "rank_pattern": self.patterns(config, |adapter, _| json!(rank_of(adapter))),
            "alpha_pattern": self.patterns(config, |adapter, rslora| {
                let rank = rank_of(adapter) as f64;
                json!(adapter.scale * if rslora { rank.sqrt() } else { rank })
            }),
            "target_modules": modules,
            "target_parameters": if parameters.is_empty() { Value::Null } else { json!(parameters) },
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": config.rslora,
        })
    }

    /// A value per branch whose rank is not the common one, by full name.
    fn patterns(&self, config: &LoraConfig, value: impl Fn(&Adapter, bool) -> Value) -> Value {
        let mut all = Map::new();
        for (name, projection) in self.projections() {
            if let Some(adapter) = projection
                .adapter
                .as_ref()
                .filter(|a| rank_of(a) != config.rank)
            {
                all.insert(name, value(adapter, config.rslora));
            }
        }
        Value::Object(all)
    }
}

/// Reads the bytes of an `adapter_config.json`; `path` is only for messages.
///
/// # Errors
/// [`Error::File`] when it is no config of LoRA, or of a variant that is not supported.
pub fn parse_adapter_config(path: &Path, bytes: &[u8]) -> Result<LoraConfig> {
    let json = small::parse_json(path, bytes, limits::SETTINGS)?;
    Written::read(&json)
        .map(|written| written.config)
        .map_err(|what| Error::file(path, what))
}

/// What an `adapter_config.json` says.
struct Written {
    config: LoraConfig,
    ranks: Vec<(String, usize)>,
    alphas: Vec<(String, f64)>,
    /// Names of experts' matrices.
    parameters: Vec<String>,
}

impl Written {
    fn read(json: &Value) -> Result<Self, String> {
        let kind = &json["peft_type"];
        if kind != "LORA" {
            return Err(format!(
                "peft_type = {kind} is not supported; it must be \"LORA\""
            ));
        }
        let off = [
            "use_dora",
            "lora_bias",
            "fan_in_fan_out",
            "modules_to_save",
            "layer_replication",
            "trainable_token_indices",
            "use_qalora",
            "alora_invocation_tokens",
        ];
        for key in off {
            let value = &json[key];
            if !matches!(value, Value::Null | Value::Bool(false)) {
                return Err(format!("{key} = {value} is not supported"));
            }
        }
        if let Some(bias) = json["bias"].as_str().filter(|bias| *bias != "none") {
            return Err(format!(
                "bias = \"{bias}\" is not supported; it must be \"none\""
            ));
        }
        let number = |key: &str| {
            json[key]
                .as_f64()
                .ok_or_else(|| format!("{key} = {} must be a number", json[key]))
        };
        let rank = json["r"].as_u64().unwrap_or(0) as usize;
        let config = LoraConfig {
            rank,
            alpha: number("lora_alpha")?,
            dropout: json["lora_dropout"].as_f64().unwrap_or(0.0),
            targets: targets(json),
            seed: 0,
            rslora: json["use_rslora"].as_bool().unwrap_or(false),
        };
        config.check().map_err(|e| e.to_string())?;
        let pattern = |key: &str| -> Result<Vec<(String, f64)>, String> {
            let items = json[key].as_object().into_iter().flatten();
            let number = |(name, value): (&String, &Value)| match value.as_f64() {
                Some(number) => Ok((plain(name), number)),
                None => Err(format!(
                    "{key} has {value} for {}; it must be a number",
                    shown(name)
                )),
            };
            items.map(number).collect()
        };
        let mut ranks = Vec::new();
        for (name, rank) in pattern("rank_pattern")? {
            let known = (1.0..=MOST_RANK as f64).contains(&rank) && rank.fract() == 0.0;
            if !known {
                return Err(format!(
                    "rank_pattern has {rank} for {}; it must be from 1 to {MOST_RANK}",
                    shown(&name)
                ));
            }
            ranks.push((name, rank as usize));
        }
        let parameters = names(&json["target_parameters"]);
        Ok(Self {
            config,
            ranks,
            alphas: pattern("alpha_pattern")?,
            parameters,
        })
    }

    /// Whether the config names this matrix of experts.
    fn has(&self, name: &str) -> bool {
        self.parameters.iter().any(|wanted| ends_with(name, wanted))
    }

    fn rank(&self, name: &str) -> usize {
        let own = self
            .ranks
            .iter()
            .find(|(wanted, _)| ends_with(name, wanted));
        own.map_or(self.config.rank, |(_, rank)| *rank)
    }

    fn alpha(&self, name: &str) -> f64 {
        let own = self
            .alphas
            .iter()
            .find(|(wanted, _)| ends_with(name, wanted));
        own.map_or(self.config.alpha, |(_, alpha)| *alpha)
    }
}

/// A pattern without the marks of a regular expression that PEFT puts before a name.
fn plain(pattern: &str) -> String {
    pattern
        .trim_start_matches(['^', '(', '.', '*', '\\'])
        .trim_end_matches('$')
        .replace("\\.", ".")
}

fn names(value: &Value) -> Vec<String> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

fn targets(json: &Value) -> LoraTargets {
    match &json["target_modules"] {
        Value::Array(_) => LoraTargets::Names(
            [
                names(&json["target_modules"]),
                names(&json["target_parameters"]),
            ]
            .concat(),
        ),
        _ => LoraTargets::AllLinear,
    }
}

fn rank_of(adapter: &Adapter) -> usize {
    adapter.b.shape().dims()[adapter.b.shape().rank() - 1]
}

/// Shapes of A and B in a file.
fn file_dims(weight: &Weight, rank: usize) -> (Vec<usize>, Vec<usize>) {
    match *weight.shape().dims() {
        [experts, out, inner] => (vec![experts * rank, inner], vec![out, rank * experts]),
        _ => branch_dims(weight, rank),
    }
}

/// A and B of one linear map, in the model's type and layout.
fn read_pair(
    name: &str,
    projection: &Projection,
    [(a_name, a), (b_name, b)]: [(&str, View<'_>); 2],
    written: &Written,
) -> Result<Adapter, String> {
    let rank = written.rank(name);
    let (want_a, want_b) = file_dims(&projection.weight, rank);
    for (name, view, want) in [(a_name, &a, want_a), (b_name, &b, want_b)] {
        if view.dims != want {
            return Err(format!(
                "has {name} of shape {:?}; rank {rank} here needs {want:?}",
                view.dims
            ));
        }
    }
    let dtype = projection.weight.dtype();
    let (a_dims, b_dims) = branch_dims(&projection.weight, rank);
    let read =
        |name: &str, view: &View<'_>| floats(view).map_err(|what| format!("has {name} {what}"));
    let (a, mut b) = (read(a_name, &a)?, read(b_name, &b)?);
    if let [experts, out, rank] = *b_dims {
        // The expert counts fastest in a file and slowest in the model.
        b = (0..experts)
            .flat_map(|e| (0..out * rank).map(move |i| (e, i)))
            .map(|(e, i)| b[i * experts + e])
            .collect();
    }
    let make =
        |values: &[f32], dims: &[usize]| param(values, dtype, dims).map_err(|e| e.to_string());
    let scale = scale(written.alpha(name), rank, written.config.rslora);
    Ok(Adapter {
        a: make(&a, &a_dims)?,
        b: make(&b, &b_dims)?,
        scale,
        dropout: written.config.dropout,
    })
}

fn floats(view: &View<'_>) -> Result<Vec<f32>, String> {
    let bytes = view.bytes;
    let two = |b: &[u8]| [b[0], b[1]];
    match view.dtype {
        Dtype::F32 => Ok(bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()),
        Dtype::BF16 => Ok(bytes
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes(two(b)).to_f32())
            .collect()),
        Dtype::F16 => Ok(bytes
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes(two(b)).to_f32())
            .collect()),
        other => Err(format!(
            "of type {other:?}; F32, BF16 and F16 are supported"
        )),
    }
}

fn param(values: &[f32], dtype: DType, dims: &[usize]) -> TensorResult<Param> {
    fn as_type<T: Element>(values: &[f32], dims: &[usize]) -> TensorResult<Param> {
        let values: Vec<T> = values.iter().map(|x| T::from_f64(f64::from(*x))).collect();
        Param::from_slice(&values, dims)
    }
    match dtype {
        DType::BF16 => as_type::<bf16>(values, dims),
        DType::F16 => as_type::<f16>(values, dims),
        _ => as_type::<f32>(values, dims),
    }
}

/// B of experts as in a file: [experts, out · rank] becomes [out · rank, experts].
fn turned_out(b: &Param) -> TensorResult<HostBuf> {
    let (experts, size) = (b.shape().dims()[0], b.dtype().size());
    let data = b.data().read_all()?;
    let (data, each) = (data.bytes(), b.shape().numel() / experts);
    let mut out = Vec::with_capacity(data.len());
    for i in 0..each {
        for e in 0..experts {
            out.extend_from_slice(&data[(e * each + i) * size..][..size]);
        }
    }
    HostBuf::from_slice("adapter", &out)
}

fn copy(from: &Param, to: &Param) -> TensorResult<()> {
    let data = from.data().read_all()?;
    to.data()
        .write(0..to.bytes())?
        .bytes()
        .copy_from_slice(data.bytes());
    Ok(())
}

fn write(path: &Path, json: &Value) -> Result<()> {
    let fail = |e: std::io::Error| Error::file(path, format!("cannot be written: {e}"));
    let part = path.with_extension("part");
    std::fs::write(&part, format!("{json:#}\n")).map_err(fail)?;
    std::fs::rename(&part, path).map_err(fail)
}
