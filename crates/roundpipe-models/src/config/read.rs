//! From JSON to a checked config. Every message names the key and its value.

use std::collections::HashSet;

use roundpipe::kernel::Glu;
use roundpipe::ops::RouteWeights;
use roundpipe::{DType, Quantization};
use serde_json::{Map, Value};

use super::{Family, ModelConfig, MoeConfig, RopeConfig, RopeScaling};

type Read<T> = Result<T, String>;

/// Larger sizes are a broken file, and their products would overflow.
const MOST: u64 = 1 << 31;
/// More blocks than any model has.
const MOST_LAYERS: usize = 4096;
/// More experts than any block has.
const MOST_EXPERTS: usize = 65_536;
/// Wider than any head is.
const MOST_HEAD_DIM: usize = 65_536;
/// Elements of both rotary tables: 16 million positions of heads of 128, or 8 GiB. The longest
/// context of a published model is 10 million.
const MOST_ROPE: u64 = 1 << 31;

/// A JSON object and its family.
pub(super) struct Reader<'a> {
    json: &'a Map<String, Value>,
    family: Family,
}

impl<'a> Reader<'a> {
    pub(super) fn new(json: &'a Value) -> Read<Self> {
        let Value::Object(json) = json else {
            return Err("is not a JSON object; a config.json is expected".into());
        };
        Ok(Self {
            json,
            family: family(json)?,
        })
    }

    pub(super) fn config(&self) -> Read<ModelConfig> {
        self.refuse_unsupported()?;
        let (hidden, layers) = (self.size("hidden_size")?, self.size("num_hidden_layers")?);
        if layers > MOST_LAYERS {
            return Err(format!(
                "num_hidden_layers = {layers} is more than {MOST_LAYERS}"
            ));
        }
        let heads = self.size("num_attention_heads")?;
        let family = self.family;
        let oss = family == Family::GptOss;
        let bias = self.flag("attention_bias", oss)?;
        let config = ModelConfig {
            family,
            vocab: self.size("vocab_size")?,
            hidden,
            layers,
            heads,
            kv_heads: self.size_or("num_key_value_heads", heads)?,
            head_dim: self.head_dim(hidden, heads)?,
            intermediate: self.size("intermediate_size")?,
            max_positions: self.size_or("max_position_embeddings", 2048)?,
            rope: self.rope()?,
            eps: self.positive("rms_norm_eps", Some(if oss { 1e-5 } else { 1e-6 }))?,
            tied: self.flag("tie_word_embeddings", false)?,
            qkv_bias: family == Family::Qwen2 || (family != Family::Mistral && bias),
            o_bias: !matches!(family, Family::Qwen2 | Family::Mistral) && bias,
            mlp_bias: family == Family::Llama && self.flag("mlp_bias", false)?,
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            sinks: oss,
            windows: self.windows(layers)?,
            moe: self.moe(layers)?,
            dtype: self.dtype()?,
            raw: self.json.clone(),
        };
        check(&config)?;
        Ok(config)
    }

    /// Options that change the result and that nothing here computes.
    fn refuse_unsupported(&self) -> Read<()> {
        if let Some(act) = self.value("hidden_act").filter(|act| *act != "silu") {
            return Err(format!(
                "hidden_act = {act} is not supported; it must be \"silu\""
            ));
        }
        for (key, neutral) in [
            ("partial_rotary_factor", 1.0),
            ("pretraining_tp", 1.0),
            ("attention_dropout", 0.0),
        ] {
            if let Some(value) = self
                .value(key)
                .filter(|value| value.as_f64() != Some(neutral))
            {
                return Err(format!(
                    "{key} = {value} is not supported; it must be {neutral}"
                ));
            }
        }
        let Some(quantization) = self.value("quantization_config") else {
            return Ok(());
        };
        let method = &quantization["quant_method"];
        if self.family == Family::GptOss && method == "mxfp4" {
            return Ok(());
        }
        if method == "bitsandbytes" {
            return bitsandbytes(quantization).map(drop);
        }
        Err(format!(
            "quantization_config.quant_method = {method} is not supported; use the model's weights in bf16 or f32"
        ))
    }

    fn head_dim(&self, hidden: usize, heads: usize) -> Read<usize> {
        let fixed = match self.family {
            Family::Qwen3 => Some(128),
            Family::GptOss => Some(64),
            _ => None,
        };
        if let (None, None) = (self.value("head_dim"), fixed) {
            if !hidden.is_multiple_of(heads) {
                return Err(format!(
                    "num_attention_heads = {heads} does not divide hidden_size = {hidden}"
                ));
            }
            return Ok(hidden / heads);
        }
        self.size_or("head_dim", fixed.unwrap_or(0))
    }

    fn windows(&self, layers: usize) -> Read<Vec<Option<usize>>> {
        let used = match self.family {
            Family::Llama => false,
            Family::Mistral | Family::GptOss => true,
            _ => self.flag("use_sliding_window", false)?,
        };
        let fallback = if self.family == Family::GptOss {
            Some(128)
        } else {
            None
        };
        let window = match self.value("sliding_window") {
            Some(_) => Some(self.size("sliding_window")?),
            None => fallback,
        };
        let (true, Some(window)) = (used, window) else {
            return Ok(vec![None; layers]);
        };
        let typed = matches!(self.family, Family::Qwen2 | Family::Qwen3 | Family::GptOss);
        if typed && let Some(types) = self.value("layer_types") {
            return self.layer_types(types, layers, window);
        }
        let slides = match self.family {
            Family::Qwen2 | Family::Qwen3 => {
                let first = self.whole("max_window_layers", 28)?;
                (0..layers).map(|i| i >= first).collect()
            }
            Family::GptOss => (0..layers).map(|i| i % 2 == 0).collect(),
            _ => vec![true; layers],
        };
        Ok(slides
            .into_iter()
            .map(|slides: bool| slides.then_some(window))
            .collect())
    }

    fn layer_types(&self, types: &Value, layers: usize, window: usize) -> Read<Vec<Option<usize>>> {
        let items = types.as_array().filter(|items| items.len() >= layers);
        let items = items.ok_or_else(|| format!("layer_types must be a list of {layers} names"))?;
        let each = |item: &Value| match item.as_str() {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            _ => Err(format!(
                "layer_types has {item}, which is not supported; there are \"full_attention\" and \"sliding_attention\""
            )),
        };
        items[..layers].iter().map(each).collect()
    }

    fn moe(&self, layers: usize) -> Read<Option<MoeConfig>> {
        let (experts, coef) = (["num_experts", "num_local_experts"], "router_aux_loss_coef");
        let named = experts
            .into_iter()
            .find(|key| self.value(key).is_some())
            .unwrap_or(experts[0]);
        let aux_coef = self.number(coef, Some(0.001))?;
        if !(0.0..=1e6).contains(&aux_coef) {
            return Err(format!("{coef} = {aux_coef} cannot be a share of a loss"));
        }
        // The switch that transformers has for it.
        let aux_coef = if self.flag("output_router_logits", false)? {
            aux_coef
        } else {
            0.0
        };
        let moe = match self.family {
            Family::Qwen3Moe => MoeConfig {
                experts: self.size(named)?,
                top_k: self.size("num_experts_per_tok")?,
                intermediate: self.size("moe_intermediate_size")?,
                weights: match self.flag("norm_topk_prob", false)? {
                    true => RouteWeights::Renormalized,
                    false => RouteWeights::Plain,
                },
                glu: Glu::Silu,
                bias: false,
                aux_coef,
                sparse: self.sparse(layers)?,
            },
            Family::GptOss => MoeConfig {
                experts: self.size(named)?,
                top_k: match self.value("num_experts_per_tok") {
                    Some(_) => self.size("num_experts_per_tok")?,
                    None => self.size_or("experts_per_token", 4)?,
                },
                intermediate: self.size("intermediate_size")?,
                weights: RouteWeights::Chosen,
                glu: Glu::Clamped {
                    alpha: self.positive("swiglu_alpha", Some(1.702))?,
                    limit: self.positive("swiglu_limit", Some(7.0))?,
                },
                bias: true,
                aux_coef,
                sparse: vec![true; layers],
            },
            _ => return Ok(None),
        };
        if moe.experts > MOST_EXPERTS || moe.top_k > moe.experts {
            let (k, e) = (moe.top_k, moe.experts);
            return Err(format!(
                "num_experts_per_tok = {k} of {named} = {e} cannot be chosen"
            ));
        }
        Ok(moe.sparse.contains(&true).then_some(moe))
    }

    /// Which blocks of a Qwen3-MoE have experts.
    fn sparse(&self, layers: usize) -> Read<Vec<bool>> {
        let step = self.size_or("decoder_sparse_step", 1)?;
        let dense: HashSet<u64> = match self.value("mlp_only_layers") {
            None => HashSet::new(),
            Some(list) => {
                let items = list
                    .as_array()
                    .map(|items| items.iter().map(Value::as_u64).collect());
                items.flatten().ok_or_else(|| {
                    format!("mlp_only_layers = {list} must be a list of block numbers")
                })?
            }
        };
        Ok((0..layers)
            .map(|i| !dense.contains(&(i as u64)) && (i + 1).is_multiple_of(step))
            .collect())
    }

    fn dtype(&self) -> Read<Option<DType>> {
        let Some((key, name)) = ["dtype", "torch_dtype"]
            .into_iter()
            .find_map(|key| self.value(key).map(|value| (key, value)))
        else {
            return Ok(None);
        };
        match name.as_str().map(|name| name.trim_start_matches("torch.")) {
            Some("float32") => Ok(Some(DType::F32)),
            Some("bfloat16") => Ok(Some(DType::BF16)),
            Some("float16") => Ok(Some(DType::F16)),
            _ => Err(format!(
                "{key} = {name} is not supported; there are float32, bfloat16 and float16"
            )),
        }
    }

    fn rope(&self) -> Read<RopeConfig> {
        let empty = Map::new();
        let places = ["rope_parameters", "rope_scaling"];
        let (place, map) = match places
            .into_iter()
            .find_map(|key| self.value(key).map(|v| (key, v)))
        {
            None => ("rope_scaling", &empty),
            Some((key, Value::Object(map))) => (key, map),
            Some((key, value)) => return Err(format!("{key} = {value} must be an object")),
        };
        let inner = Reader {
            json: map,
            family: self.family,
        };
        let default = if self.family == Family::GptOss {
            150_000.0
        } else {
            10_000.0
        };
        let theta = match inner.value("rope_theta") {
            Some(_) => inner.positive("rope_theta", None)?,
            None => self.positive("rope_theta", Some(default))?,
        };
        if let Some(part) = inner
            .value("partial_rotary_factor")
            .filter(|part| part.as_f64() != Some(1.0))
        {
            return Err(format!(
                "{place}.partial_rotary_factor = {part} is not supported; it must be 1"
            ));
        }
        let named = inner.value("rope_type").or_else(|| inner.value("type"));
        let kind = match named {
            None if map.is_empty() && self.family == Family::GptOss => {
                return Ok(gpt_oss_rope(theta));
            }
            None => "default",
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err(format!("{place}.rope_type = {other} must be text")),
        };
        let scaling = match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => inner
                .positive("factor", None)
                .map(|factor| RopeScaling::Linear { factor }),
            "llama3" => inner.llama3(self.original()?),
            "yarn" => inner.yarn(self.original()?),
            other => {
                let known = "default, linear, llama3 and yarn";
                return Err(format!(
                    "{place}.rope_type = \"{other}\" is not supported; there are {known}"
                ));
            }
        };
        let scaling = scaling.map_err(|what| format!("{place}.{what}"))?;
        Ok(RopeConfig { theta, scaling })
    }

    /// The trained context, where the rotary parameters do not say.
    fn original(&self) -> Read<f64> {
        let outside = self.size_or("original_max_position_embeddings", 0);
        match self.value("original_max_position_embeddings") {
            Some(_) => Ok(outside? as f64),
            None => Ok(self.size_or("max_position_embeddings", 2048)? as f64),
        }
    }

    fn llama3(&self, original: f64) -> Read<RopeScaling> {
        let (low, high) = (
            self.positive("low_freq_factor", None)?,
            self.positive("high_freq_factor", None)?,
        );
        if low >= high {
            return Err(format!(
                "low_freq_factor = {low} must be below high_freq_factor = {high}"
            ));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.positive("factor", None)?,
            low_freq_factor: low,
            high_freq_factor: high,
            original: self.positive("original_max_position_embeddings", Some(original))?,
        })
    }

    fn yarn(&self, original: f64) -> Read<RopeScaling> {
        let factor = self.positive("factor", None)?;
        let sharpen = |scale: f64, m: f64| {
            if scale <= 1.0 {
                1.0
            } else {
                0.1 * m * scale.ln() + 1.0
            }
        };
        let optional = |key: &str| self.value(key).map(|_| self.number(key, None)).transpose();
        let scales = (optional("mscale")?, optional("mscale_all_dim")?);
        let attention_factor = match (optional("attention_factor")?, scales) {
            (Some(given), _) => given,
            (None, (Some(one), Some(all))) if one != 0.0 && all != 0.0 => {
                sharpen(factor, one) / sharpen(factor, all)
            }
            _ => sharpen(factor, 1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.positive("beta_fast", Some(32.0))?,
            beta_slow: self.positive("beta_slow", Some(1.0))?,
            original: self.positive("original_max_position_embeddings", Some(original))?,
            truncate: self.flag("truncate", true)?,
            attention_factor,
        })
    }

    /// A key's value, unless it is missing or null.
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str) -> Read<usize> {
        let value = self.value(key).ok_or_else(|| format!("has no {key}"))?;
        match value.as_u64() {
            Some(size @ 1..MOST) => Ok(size as usize),
            _ => Err(format!(
                "{key} = {value} must be a whole number from 1 to 2^31"
            )),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Read<usize> {
        if self.value(key).is_some() {
            self.size(key)
        } else {
            Ok(default)
        }
    }

    /// As a size, and 0 is allowed.
    fn whole(&self, key: &str, default: usize) -> Read<usize> {
        match self.value(key) {
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            _ => self.size_or(key, default),
        }
    }

    fn number(&self, key: &str, default: Option<f64>) -> Read<f64> {
        match (self.value(key), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(format!("{key} is missing")),
            (Some(value), _) => {
                let number = value.as_f64().filter(|number| number.is_finite());
                number.ok_or_else(|| format!("{key} = {value} must be a number"))
            }
        }
    }

    fn positive(&self, key: &str, default: Option<f64>) -> Read<f64> {
        let number = self.number(key, default)?;
        if number > 0.0 {
            Ok(number)
        } else {
            Err(format!("{key} = {number} must be above 0"))
        }
    }

    fn flag(&self, key: &str, default: bool) -> Read<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| format!("{key} = {value} must be true or false")),
        }
    }
}

/// What GPT-OSS means when it says nothing.
fn gpt_oss_rope(theta: f64) -> RopeConfig {
    let scaling = RopeScaling::Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original: 4096.0,
        truncate: false,
        attention_factor: 0.1 * 32f64.ln() + 1.0,
    };
    RopeConfig { theta, scaling }
}

fn family(json: &Map<String, Value>) -> Read<Family> {
    let architecture = json
        .get("architectures")
        .and_then(|list| list.get(0))
        .and_then(Value::as_str);
    if let Some(name) = architecture.filter(|name| !name.ends_with("ForCausalLM")) {
        return Err(format!(
            "architectures = \"{name}\" is not supported; it must be a ...ForCausalLM"
        ));
    }
    let found = match json.get("model_type").filter(|value| !value.is_null()) {
        Some(kind) => {
            let known = Family::ALL.iter().find(|(_, name, _)| kind == name);
            known.ok_or_else(|| format!("model_type = {kind}"))
        }
        None => {
            let known = Family::ALL
                .iter()
                .find(|(.., name)| Some(*name) == architecture);
            known.ok_or_else(|| match architecture {
                Some(name) => format!("architectures = \"{name}\""),
                None => "a config without model_type and architectures".into(),
            })
        }
    };
    let found = found
        .map_err(|what| format!("{what} is not supported; there are {}", Family::supported()))?;
    Ok(found.0)
}

/// What must fit together, and products that must not be absurd.
fn check(config: &ModelConfig) -> Read<()> {
    let c = config;
    if !c.heads.is_multiple_of(c.kv_heads) {
        let (kv, heads) = (c.kv_heads, c.heads);
        return Err(format!(
            "num_key_value_heads = {kv} does not divide num_attention_heads = {heads}"
        ));
    }
    if !c.head_dim.is_multiple_of(2) {
        return Err(format!(
            "head_dim = {} is odd; rotary pairs need an even one",
            c.head_dim
        ));
    }
    let widest = [c.vocab, c.intermediate, c.heads.saturating_mul(c.head_dim)]
        .into_iter()
        .max()
        .unwrap_or(0);
    let experts = c.moe.as_ref().map_or(1, |moe| {
        moe.experts
            .saturating_mul(moe.intermediate)
            .saturating_mul(2)
    });
    for (wide, what) in [(widest, "widest projection"), (experts, "experts")] {
        let elements = (wide as u64).saturating_mul(c.hidden as u64);
        if elements >= 1 << 42 {
            return Err(format!(
                "hidden_size = {} and the {what} give a tensor of {elements} elements",
                c.hidden
            ));
        }
    }
    if c.head_dim > MOST_HEAD_DIM {
        return Err(format!(
            "head_dim = {} is more than {MOST_HEAD_DIM}",
            c.head_dim
        ));
    }
    if (c.max_positions as u64).saturating_mul(c.head_dim as u64) > MOST_ROPE {
        return Err(format!(
            "max_position_embeddings = {} with head_dim = {} is more than any rotary table holds",
            c.max_positions, c.head_dim
        ));
    }
    Ok(())
}

/// How bitsandbytes quantised a model, by its `quantization_config`.
pub(super) fn bitsandbytes(settings: &Value) -> Read<Quantization> {
    if settings["load_in_8bit"] == true {
        return Ok(Quantization::Int8);
    }
    let kind = &settings["bnb_4bit_quant_type"];
    match settings["load_in_4bit"] == true && kind == "nf4" {
        true => Ok(Quantization::Nf4),
        false => Err(format!(
            "quantization_config.bnb_4bit_quant_type = {kind} is not supported; use nf4, 8 bits, or weights in bf16"
        )),
    }
}
