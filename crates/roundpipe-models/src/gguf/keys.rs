//! What a model's config becomes in a GGUF file, and which models llama.cpp has no place for.

use roundpipe::ops::RouteWeights;

use super::format::{Key, Value};
use super::{GgufOptions, GgufType};
use crate::config::{Family, ModelConfig, RopeScaling};
use crate::error::{Error, Result};

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    GptOss,
}

impl Architecture {
    /// The architecture of a config.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the key of `config.json` that it has no place for.
    pub fn of(config: &ModelConfig) -> Result<Self> {
        let this = match config.family {
            Family::Llama | Family::Mistral => Self::Llama,
            Family::Qwen2 => Self::Qwen2,
            Family::Qwen3 => Self::Qwen3,
            Family::Qwen3Moe => Self::Qwen3Moe,
            Family::GptOss => Self::GptOss,
        };
        match this.lacks(config) {
            None => Ok(this),
            Some(what) => Err(Error::argument(
                "gguf",
                format!(
                    "llama.cpp's `{}` has no place for {what}; export to hf instead",
                    this.name()
                ),
            )),
        }
    }

    /// llama.cpp's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::GptOss => "gpt-oss",
        }
    }

    /// The first thing that a model of this config has and the architecture has not.
    fn lacks(self, config: &ModelConfig) -> Option<&'static str> {
        let is_llama = self == Self::Llama;
        let is_oss = self == Self::GptOss;
        if config.o_bias && !(is_llama || is_oss) {
            return Some("a bias of o_proj (attention_bias)");
        }
        if config.mlp_bias && !is_llama {
            return Some("biases of the gated unit (mlp_bias)");
        }
        if self == Self::Qwen2 && config.heads * config.head_dim != config.hidden {
            return Some("heads that are not hidden_size wide together (head_dim)");
        }
        if is_oss && config.tied {
            return Some("a head that is the embedding (tie_word_embeddings)");
        }
        if matches!(config.rope.scaling, RopeScaling::Llama3 { .. }) && !is_llama {
            return Some("rotary scaling of the kind llama3");
        }
        let Some(moe) = &config.moe else {
            return None;
        };
        if !moe.sparse.iter().all(|sparse| *sparse) {
            return Some("blocks without experts (mlp_only_layers, decoder_sparse_step)");
        }
        if self == Self::Qwen3Moe && moe.weights != RouteWeights::Renormalized {
            return Some("experts' weights that do not add up to 1 (norm_topk_prob)");
        }
        None
    }
}

/// Keys of every file.
pub(super) fn general(architecture: Architecture, options: &GgufOptions) -> Vec<Key> {
    let text = |key: &str, value: &str| (format!("general.{key}"), Value::Text(value.into()));
    // llama.cpp's numbers of file types.
    let file_type = match options.dtype {
        GgufType::F32 => 0,
        GgufType::F16 => 1,
        GgufType::Q4_0 => 2,
        GgufType::Q8_0 => 7,
        GgufType::Bf16 => 32,
    };
    vec![
        text("architecture", architecture.name()),
        text("type", "model"),
        text("name", &options.name),
        ("general.file_type".into(), Value::U32(file_type)),
        ("general.quantization_version".into(), Value::U32(2)),
    ]
}

/// Sizes and options of the model.
pub(super) fn model(architecture: Architecture, config: &ModelConfig) -> Vec<Key> {
    let arch = architecture.name();
    let mut keys = Vec::new();
    let mut number = |key: &str, value: usize| {
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        keys.push((format!("{arch}.{key}"), Value::U32(value)));
    };
    number("block_count", config.layers);
    number("context_length", config.max_positions);
    number("embedding_length", config.hidden);
    number("feed_forward_length", config.intermediate);
    number("attention.head_count", config.heads);
    number("attention.head_count_kv", config.kv_heads);
    number("attention.key_length", config.head_dim);
    number("attention.value_length", config.head_dim);
    number("rope.dimension_count", config.head_dim);
    number("vocab_size", config.vocab);
    if let Some(moe) = &config.moe {
        number("expert_count", moe.experts);
        number("expert_used_count", moe.top_k);
        number("expert_feed_forward_length", moe.intermediate);
    }
    if let (Architecture::GptOss, Some(window)) = (architecture, first_window(config)) {
        number("attention.sliding_window", window);
    }
    let mut float = |key: &str, value: f64| {
        keys.push((format!("{arch}.{key}"), Value::F32(value as f32)));
    };
    float("attention.layer_norm_rms_epsilon", config.eps);
    float("rope.freq_base", config.rope.theta);
    keys.extend(scaling(arch, config));
    keys
}

/// Rotary scaling; that of Llama 3 is a tensor.
fn scaling(arch: &str, config: &ModelConfig) -> Vec<Key> {
    let key = |key: &str| format!("{arch}.rope.scaling.{key}");
    let float = |name: &str, value: f64| (key(name), Value::F32(value as f32));
    match config.rope.scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => Vec::new(),
        RopeScaling::Linear { factor } => {
            vec![
                (key("type"), Value::Text("linear".into())),
                float("factor", factor),
            ]
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original,
            attention_factor,
            ..
        } => {
            let mut keys = vec![
                (key("type"), Value::Text("yarn".into())),
                float("factor", factor),
                (key("original_context_length"), Value::U32(original as u32)),
                float("yarn_beta_fast", beta_fast),
                float("yarn_beta_slow", beta_slow),
            ];
            // llama.cpp multiplies with what YaRN's authors propose by itself.
            let own = attention_factor / (1.0 + 0.1 * factor.ln());
            if (own - 1.0).abs() > 1e-6 {
                keys.push(float("attn_factor", own));
            }
            keys
        }
    }
}

fn first_window(config: &ModelConfig) -> Option<usize> {
    config.windows.iter().copied().flatten().next()
}

/// What llama.cpp computes differently, a sentence each.
pub(super) fn notes(config: &ModelConfig) -> Vec<String> {
    let mut notes = Vec::new();
    let alternates = config
        .windows
        .iter()
        .enumerate()
        .all(|(i, window)| window.is_some() == (i % 2 == 0));
    if let Some(window) = first_window(config)
        && !(config.family == Family::GptOss && alternates)
    {
        notes.push(format!(
            "llama.cpp does not apply this model's sliding window: texts longer than {window} tokens \
             will differ"
        ));
    }
    if let RopeScaling::Yarn {
        truncate: false, ..
    } = config.rope.scaling
    {
        notes.push(
            "llama.cpp rounds the bounds of YaRN to whole dimensions, which this model does not: \
             results differ slightly"
                .into(),
        );
    }
    notes
}
