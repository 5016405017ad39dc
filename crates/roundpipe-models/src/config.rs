//! What a `config.json` says about a model, checked.
//!
//! The path of a config: JSON -> [`ModelConfig::from_json`] -> a [`Model`](crate::decoder::Model);
//! back by [`ModelConfig::to_json`], which writes what was read. Old (`rope_theta`, `rope_scaling`,
//! `torch_dtype`) and new (`rope_parameters`, `dtype`) spellings are both read.
//!
//! What is not supported is refused by name and value, in one line, before anything is allocated:
//! other families, other activations, dynamic rotary scaling, partial rotation, quantisation other
//! than GPT-OSS's.

mod read;

use roundpipe::kernel::Glu;
use roundpipe::ops::RouteWeights;
use roundpipe::{Bytes, DType, Quantization};
use roundpipe_files::small;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::limits;
use crate::memory;
use read::Reader;

/// Who defined the model: decides names of tensors, defaults and quirks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2, 3 and what is shaped like them.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Biases of queries, keys and values.
    Qwen2,
    /// Norms of queries and keys.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Experts with biases, attention sinks, alternating windows.
    GptOss,
}

impl Family {
    const ALL: [(Self, &'static str, &'static str); 6] = [
        (Self::Llama, "llama", "LlamaForCausalLM"),
        (Self::Mistral, "mistral", "MistralForCausalLM"),
        (Self::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Self::Qwen3, "qwen3", "Qwen3ForCausalLM"),
        (Self::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
        (Self::GptOss, "gpt_oss", "GptOssForCausalLM"),
    ];

    /// The value of `model_type`.
    pub fn model_type(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(family, ..)| *family == self)
            .map_or("", |(_, name, _)| name)
    }

    fn supported() -> String {
        Self::ALL.map(|(_, name, _)| name).join(", ")
    }
}

/// How the rotary angles of a longer context are made from those of the trained one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// As they are.
    None,
    /// All divided.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Slow ones divided, fast ones kept, those between blended (Llama 3.1).
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Waves longer than the original context over this are divided.
        low_freq_factor: f64,
        /// Waves shorter than the original context over this are kept.
        high_freq_factor: f64,
        /// The trained context.
        original: f64,
    },
    /// As `Llama3` by number of turns, and attention sharpened.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Dimensions that turn more often than this in the trained context are kept.
        beta_fast: f64,
        /// Dimensions that turn less often are divided.
        beta_slow: f64,
        /// The trained context.
        original: f64,
        /// Whether the bounds between kept and divided are rounded to whole dimensions.
        truncate: bool,
        /// What cosines and sines are multiplied with.
        attention_factor: f64,
    },
}

/// Rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the angles.
    pub theta: f64,
    /// Stretching to longer contexts.
    pub scaling: RopeScaling,
}

/// Experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Experts per block.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Width inside one expert.
    pub intermediate: usize,
    /// How the chosen experts are weighed.
    pub weights: RouteWeights,
    /// What stands between an expert's two products.
    pub glu: Glu,
    /// Router and experts have biases.
    pub bias: bool,
    /// Share of the load-balancing loss in a training loss; 0 leaves it out, as does a config
    /// without `output_router_logits`.
    pub aux_coef: f64,
    /// Which blocks have experts; the others have one gated unit.
    pub sparse: Vec<bool>,
}

/// Sizes and options of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Who defined it.
    pub family: Family,
    /// Number of different tokens.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width inside the gated unit.
    pub intermediate: usize,
    /// Rows of the rotary tables. Every block carries them, so lower it where the longest sequence is
    /// known.
    pub max_positions: usize,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Added inside norms.
    pub eps: f64,
    /// Head and embedding share their weights.
    pub tied: bool,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// Bias of the projection back from attention.
    pub o_bias: bool,
    /// Biases of the gated unit.
    pub mlp_bias: bool,
    /// Norm of queries and keys per head.
    pub qk_norm: bool,
    /// One more score per query head that takes attention and gives nothing.
    pub sinks: bool,
    /// Per block: how many positions back a query sees, if not all.
    pub windows: Vec<Option<usize>>,
    /// Experts, where there are any.
    pub moe: Option<MoeConfig>,
    /// The type that the file names, or that of the model's parameters.
    pub dtype: Option<DType>,
    /// The JSON it came from.
    raw: Map<String, Value>,
}

impl ModelConfig {
    /// Reads the bytes of a `config.json`; `path` is only for messages.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`], and for bytes that are not JSON.
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_json(&small::parse_json(path, bytes, limits::SETTINGS)?, path)
    }

    /// Reads a `config.json`; `path` is only for messages.
    ///
    /// # Errors
    /// [`Error::File`] naming the key, its value and what is supported.
    pub fn from_json(json: &Value, path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        Reader::new(json)
            .and_then(|reader| reader.config())
            .map_err(|what| Error::file(path, what))
    }

    /// The same with other values for some keys of the JSON: for more blocks, a smaller vocabulary.
    ///
    /// # Errors
    /// [`Error::Argument`] when the result cannot work.
    pub fn with(&self, changes: &Value) -> Result<Self> {
        let Value::Object(changes) = changes else {
            return Err(Error::argument(
                "changes",
                "must be a JSON object of config.json keys",
            ));
        };
        let mut raw = self.raw.clone();
        raw.extend(changes.clone());
        let read = Reader::new(&Value::Object(raw)).and_then(|reader| reader.config());
        read.map_err(|what| Error::argument("config", what))
    }

    /// The `config.json` that transformers opens: what was read, with the type of the parameters,
    /// and without a quantisation that saved weights no longer have.
    pub fn to_json(&self) -> Value {
        let mut raw = self.raw.clone();
        raw.shift_remove("quantization_config");
        if let Some(dtype) = self.dtype.and_then(dtype_name) {
            let key = if raw.contains_key("torch_dtype") {
                "torch_dtype"
            } else {
                "dtype"
            };
            raw.insert(key.to_owned(), dtype.into());
        }
        Value::Object(raw)
    }

    /// How a folder with this config has its linear maps quantised by bitsandbytes.
    pub fn quantization(&self) -> Option<Quantization> {
        let settings = self.raw.get("quantization_config")?;
        let ours = settings["quant_method"] == "bitsandbytes";
        ours.then(|| read::bitsandbytes(settings).ok()).flatten()
    }

    /// Whether magnitudes of NF4 are in 8 bits: always where weights are quantised here, and where a
    /// folder's are, if its config says so.
    pub(crate) fn has_double_quantization(&self) -> bool {
        let settings = self.raw.get("quantization_config");
        // MXFP4 is whole here, and quantised as any whole weight.
        let theirs = settings.filter(|_| self.quantization().is_some());
        theirs.is_none_or(|settings| settings["bnb_4bit_use_double_quant"] == true)
    }

    /// Number of parameters, tied ones once.
    pub fn num_params(&self) -> u64 {
        let all = self.attention_params() + self.unit_params() + self.end_params();
        u64::try_from(all).unwrap_or(u64::MAX)
    }

    /// Embedding, head and the norm before it.
    fn end_params(&self) -> u128 {
        let tables = if self.tied { 1 } else { 2 };
        (tables * self.vocab as u128 + 1) * self.hidden as u128
    }

    /// Attention and norms of all blocks. Sizes are below 2^32, so 128 bits hold any product of
    /// three.
    fn attention_params(&self) -> u128 {
        let wide = |count: usize| count as u128;
        let flag = |on: bool, count: u128| if on { count } else { 0 };
        let (hidden, head_dim) = (wide(self.hidden), wide(self.head_dim));
        let (queries, keys) = (wide(self.heads) * head_dim, wide(self.kv_heads) * head_dim);
        let block = 2 * (queries + keys) * hidden
            + flag(self.qkv_bias, queries + 2 * keys)
            + flag(self.o_bias, hidden)
            + flag(self.qk_norm, 2 * head_dim)
            + flag(self.sinks, wide(self.heads))
            + 2 * hidden;
        wide(self.layers) * block
    }

    /// Gated units and experts of all blocks.
    fn unit_params(&self) -> u128 {
        let wide = |count: usize| count as u128;
        let flag = |on: bool, count: u128| if on { count } else { 0 };
        let (hidden, inner) = (wide(self.hidden), wide(self.intermediate));
        let dense = 3 * hidden * inner + flag(self.mlp_bias, 2 * inner + hidden);
        let Some(moe) = &self.moe else {
            return wide(self.layers) * dense;
        };
        let inner = wide(moe.intermediate);
        let expert = 3 * hidden * inner + hidden + flag(moe.bias, 2 * inner + hidden + 1);
        let sparse = wide(moe.sparse.iter().filter(|sparse| **sparse).count());
        sparse * wide(moe.experts) * expert + wide(self.layers).saturating_sub(sparse) * dense
    }

    /// Bytes of the rotary tables, which all blocks share in host memory.
    pub(crate) fn rope_bytes(&self) -> u128 {
        self.max_positions as u128 * self.head_dim as u128 * size_of::<f32>() as u128
    }

    /// Whether a model of this config and type fits into `limit` bytes: its parameters and rotary
    /// tables.
    ///
    /// # Errors
    /// What it needs, what there is, and the keys of `config.json` that ask for the most.
    pub fn fits(&self, dtype: DType, limit: Bytes) -> Result<(), String> {
        let size = dtype.size() as u128;
        let parts = [
            ("vocab_size and hidden_size", self.end_params() * size),
            (
                "num_attention_heads, head_dim, hidden_size and num_hidden_layers",
                self.attention_params() * size,
            ),
            (self.unit_keys(), self.unit_params() * size),
            ("max_position_embeddings and head_dim", self.rope_bytes()),
        ];
        memory::fits(&parts, limit)
    }

    /// The same for the rotary tables alone, for models whose parameters have no memory behind them
    /// yet.
    ///
    /// # Errors
    /// As [`ModelConfig::fits`].
    pub(crate) fn tables_fit(&self, limit: Bytes) -> Result<(), String> {
        memory::fits(
            &[("max_position_embeddings and head_dim", self.rope_bytes())],
            limit,
        )
    }

    fn unit_keys(&self) -> &'static str {
        match &self.moe {
            Some(_) => {
                "num_experts, the experts' intermediate size, hidden_size and num_hidden_layers"
            }
            None => "intermediate_size, hidden_size and num_hidden_layers",
        }
    }
}

/// The name of a float type in JSON.
fn dtype_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float32"),
        DType::BF16 => Some("bfloat16"),
        DType::F16 => Some("float16"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Family, ModelConfig, RopeScaling};

    fn llama(changes: Value) -> Result<ModelConfig, String> {
        let mut base = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "torch_dtype": "bfloat16"
        });
        for (key, value) in changes.as_object().unwrap() {
            base[key] = value.clone();
        }
        ModelConfig::from_json(&base, "m/config.json").map_err(|e| e.to_string())
    }

    /// Old and new spellings of the same config are the same model, and the file is written back as
    /// it was.
    #[test]
    fn old_and_new_spellings_agree() {
        let old =
            llama(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}))
                .unwrap();
        let new = llama(json!({
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
        }))
        .unwrap();
        assert_eq!((old.rope, old.dtype), (new.rope, new.dtype));
        assert_eq!(old.rope.scaling, RopeScaling::Linear { factor: 2.0 });
        assert_eq!((old.kv_heads, old.head_dim), (4, 8));
        let json = old.to_json();
        assert_eq!(json["rope_scaling"]["type"], "linear");
        assert_eq!(ModelConfig::from_json(&json, "x").unwrap(), old);
    }

    /// A user whose model is not supported reads in one line what is, and what the file says.
    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            (json!({"model_type": "mamba"}), "model_type = \"mamba\""),
            (
                json!({"architectures": ["LlamaForSequenceClassification"]}),
                "LlamaForSequenceClassification",
            ),
            (json!({"hidden_act": "gelu"}), "hidden_act = \"gelu\""),
            (
                json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
                "\"dynamic\"",
            ),
            (
                json!({"rope_scaling": {"rope_type": "longrope"}}),
                "\"longrope\"",
            ),
            (json!({"rope_scaling": {"rope_type": "linear"}}), "factor"),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
                "factor = 0",
            ),
            (
                json!({"partial_rotary_factor": 0.5}),
                "partial_rotary_factor = 0.5",
            ),
            (json!({"pretraining_tp": 2}), "pretraining_tp = 2"),
            (json!({"attention_dropout": 0.1}), "attention_dropout = 0.1"),
            (
                json!({"quantization_config": {"quant_method": "gptq"}}),
                "gptq",
            ),
            (json!({"hidden_size": 0}), "hidden_size = 0"),
            (
                json!({"vocab_size": 1u64 << 40}),
                "vocab_size = 1099511627776",
            ),
            (json!({"vocab_size": -3}), "vocab_size = -3"),
            (json!({"vocab_size": "many"}), "vocab_size = \"many\""),
            (json!({"hidden_size": null}), "hidden_size"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads = 3"),
            (json!({"head_dim": 7}), "head_dim = 7"),
            (json!({"num_attention_heads": 5}), "num_attention_heads = 5"),
            (json!({"rms_norm_eps": -1.0}), "rms_norm_eps = -1"),
            (json!({"rope_theta": 0.0}), "rope_theta = 0"),
            (
                json!({"tie_word_embeddings": "yes"}),
                "tie_word_embeddings = \"yes\"",
            ),
            (json!({"torch_dtype": "int8"}), "int8"),
            (
                json!({"num_hidden_layers": 5000000}),
                "num_hidden_layers = 5000000",
            ),
        ];
        for (changes, text) in cases {
            let error = llama(changes.clone()).unwrap_err();
            assert!(
                error.starts_with("m/config.json: ") && error.contains(text),
                "{changes}: {error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(ModelConfig::from_json(&json!([]), "x").is_err());
    }

    /// The architecture decides when the type is missing.
    #[test]
    fn the_architecture_is_enough() {
        let config =
            llama(json!({"model_type": null, "architectures": ["Qwen2ForCausalLM"]})).unwrap();
        assert_eq!(
            (config.family, config.qkv_bias, config.o_bias),
            (Family::Qwen2, true, false)
        );
    }

    /// Windows: Qwen's start after some blocks and only when switched on, Mistral's are everywhere,
    /// GPT-OSS alternates.
    #[test]
    fn windows_are_where_the_family_has_them() {
        let windows = |changes: Value| llama(changes).unwrap().windows;
        let window = json!({"model_type": "qwen2", "architectures": null, "sliding_window": 8, "max_window_layers": 1});
        assert_eq!(windows(window.clone()), [None, None]);
        let mut on = window;
        on["use_sliding_window"] = true.into();
        assert_eq!(windows(on.clone()), [None, Some(8)]);
        on["layer_types"] = json!(["sliding_attention", "full_attention"]);
        assert_eq!(windows(on), [Some(8), None]);
        assert_eq!(
            windows(json!({"model_type": "mistral", "architectures": null, "sliding_window": 8})),
            [Some(8), Some(8)]
        );
        let oss = json!({
            "model_type": "gpt_oss", "architectures": null, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 8, "quantization_config": {"quant_method": "mxfp4"}
        });
        let oss = llama(oss).unwrap();
        assert_eq!(oss.windows, [Some(8), None]);
        assert!(oss.to_json().get("quantization_config").is_none());
    }

    /// The kind of files that models are published with: fields that say nothing here are passed
    /// over.
    #[test]
    fn published_files_are_read() {
        let smol = json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": true,
            "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
            "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100_000, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "vocab_size": 49152
        });
        let smol = ModelConfig::from_json(&smol, "x").unwrap();
        assert_eq!(
            (smol.head_dim, smol.rope.theta, smol.num_params()),
            (64, 100_000.0, 134_515_008)
        );
        let oss = json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
            "intermediate_size": 2880, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
            "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 64,
            "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": false
            },
            "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "vocab_size": 201_088
        });
        let oss = ModelConfig::from_json(&oss, "x").unwrap();
        assert_eq!(
            oss.moe.as_ref().map(|moe| (moe.top_k, moe.aux_coef)),
            Some((4, 0.0))
        );
        // What the family means when its file says nothing of rotation is the same.
        let silent = oss
            .with(&json!({"rope_scaling": null, "rope_theta": null}))
            .unwrap();
        assert_eq!((silent.rope, &silent.windows), (oss.rope, &oss.windows));
    }
}
