//! Named sizes: the configs of well-known models, for benches and random weights. No weights are
//! here.

use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::error::{Error, Result};

/// What differs between the sizes of a family.
struct Size {
    name: &'static str,
    base: fn() -> Value,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    tied: bool,
    /// Further keys.
    more: fn() -> Value,
}

const fn size(
    name: &'static str,
    base: fn() -> Value,
    [hidden, intermediate, layers, heads, kv_heads]: [usize; 5],
    tied: bool,
    more: fn() -> Value,
) -> Size {
    Size {
        name,
        base,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        tied,
        more,
    }
}

fn none() -> Value {
    json!({})
}

fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128,
        "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "bos_token_id": 151_643, "eos_token_id": 151_645
    })
}

fn qwen3_moe() -> Value {
    let mut base = qwen3();
    let own = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001, "output_router_logits": false
    });
    merge(&mut base, own);
    base
}

fn qwen25() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936,
        "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "use_sliding_window": false, "bos_token_id": 151_643, "eos_token_id": 151_645
    })
}

fn llama3() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        },
        "bos_token_id": 128_000, "eos_token_id": 128_001
    })
}

fn llama2() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2
    })
}

fn gpt_oss() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088, "head_dim": 64,
        "max_position_embeddings": 131_072, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": false
        },
        "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": true,
        "router_aux_loss_coef": 0.9, "eos_token_id": 200_002
    })
}

static SIZES: [Size; 20] = [
    size("tiny", qwen3, [128, 352, 4, 4, 2], true, || {
        json!({
            "vocab_size": 256, "head_dim": 32, "max_position_embeddings": 128, "rope_theta": 10_000.0,
            "bos_token_id": null, "eos_token_id": null
        })
    }),
    size("qwen3-0.6b", qwen3, [1024, 3072, 28, 16, 8], true, none),
    size("qwen3-1.7b", qwen3, [2048, 6144, 28, 16, 8], true, none),
    size("qwen3-4b", qwen3, [2560, 9728, 36, 32, 8], true, none),
    size("qwen3-8b", qwen3, [4096, 12_288, 36, 32, 8], false, none),
    size("qwen3-14b", qwen3, [5120, 17_408, 40, 40, 8], false, none),
    size("qwen3-32b", qwen3, [5120, 25_600, 64, 64, 8], false, none),
    size(
        "qwen3-30b-a3b",
        qwen3_moe,
        [2048, 6144, 48, 32, 4],
        false,
        || json!({"moe_intermediate_size": 768}),
    ),
    size(
        "qwen3-235b-a22b",
        qwen3_moe,
        [4096, 12_288, 94, 64, 4],
        false,
        || json!({"moe_intermediate_size": 1536}),
    ),
    size("qwen2.5-0.5b", qwen25, [896, 4864, 24, 14, 2], true, none),
    size("qwen2.5-1.5b", qwen25, [1536, 8960, 28, 12, 2], true, none),
    size("qwen2.5-3b", qwen25, [2048, 11_008, 36, 16, 2], true, none),
    size(
        "qwen2.5-7b",
        qwen25,
        [3584, 18_944, 28, 28, 4],
        false,
        || json!({"vocab_size": 152_064}),
    ),
    size(
        "llama-3.2-1b",
        llama3,
        [2048, 8192, 16, 32, 8],
        true,
        || json!({"head_dim": 64}),
    ),
    size(
        "llama-3.2-3b",
        llama3,
        [3072, 8192, 28, 24, 8],
        true,
        || json!({"head_dim": 128}),
    ),
    size(
        "llama-3.1-8b",
        llama3,
        [4096, 14_336, 32, 32, 8],
        false,
        || {
            json!({"rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192
            }})
        },
    ),
    size(
        "llama-2-7b",
        llama2,
        [4096, 11_008, 32, 32, 32],
        false,
        none,
    ),
    size(
        "gpt-oss-20b",
        gpt_oss,
        [2880, 2880, 24, 64, 8],
        false,
        || json!({"num_local_experts": 32}),
    ),
    size(
        "gpt-oss-120b",
        gpt_oss,
        [2880, 2880, 36, 64, 8],
        false,
        || json!({"num_local_experts": 128}),
    ),
    size("smollm2-135m", llama2, [576, 1536, 30, 9, 3], true, || {
        json!({
            "vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0, "bos_token_id": 0,
            "eos_token_id": 0
        })
    }),
];

/// All names, in the order of families and sizes.
pub fn names() -> impl Iterator<Item = &'static str> {
    SIZES.iter().map(|size| size.name)
}

/// The config of a name; capitals do not matter.
///
/// # Errors
/// [`Error::Argument`] that lists the names there are.
pub fn preset(name: &str) -> Result<ModelConfig> {
    let Some(size) = SIZES
        .iter()
        .find(|size| size.name.eq_ignore_ascii_case(name))
    else {
        let known: Vec<_> = names().collect();
        return Err(Error::argument(
            "preset",
            format!("there is no `{name}`; there are {}", known.join(", ")),
        ));
    };
    let mut json = (size.base)();
    let sizes = json!({
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "tie_word_embeddings": size.tied, "hidden_act": "silu", "initializer_range": 0.02,
        "attention_dropout": 0.0, "use_cache": true, "dtype": "bfloat16"
    });
    merge(&mut json, sizes);
    merge(&mut json, (size.more)());
    ModelConfig::from_json(&json, format!("preset {}", size.name))
}

fn merge(base: &mut Value, more: Value) {
    if let (Value::Object(base), Value::Object(more)) = (base, more) {
        base.extend::<Map<_, _>>(more);
    }
}

#[cfg(test)]
mod tests {
    use super::{names, preset};

    /// The sizes are those of the models they are named after: parameters as the models' cards
    /// count them.
    #[test]
    fn sizes_are_those_of_the_names() {
        let counts = [
            ("qwen3-0.6b", 0.596e9),
            ("qwen3-1.7b", 1.721e9),
            ("qwen3-4b", 4.022e9),
            ("qwen3-8b", 8.191e9),
            ("qwen3-14b", 14.768e9),
            ("qwen3-32b", 32.762e9),
            ("qwen3-30b-a3b", 30.532e9),
            ("qwen3-235b-a22b", 235.094e9),
            ("qwen2.5-0.5b", 0.494e9),
            ("qwen2.5-1.5b", 1.544e9),
            ("qwen2.5-3b", 3.086e9),
            ("qwen2.5-7b", 7.616e9),
            ("llama-3.2-1b", 1.236e9),
            ("llama-3.2-3b", 3.213e9),
            ("llama-3.1-8b", 8.030e9),
            ("llama-2-7b", 6.738e9),
            ("gpt-oss-20b", 20.91e9),
            ("gpt-oss-120b", 116.83e9),
            ("smollm2-135m", 0.1345e9),
        ];
        for (name, count) in counts {
            let have = preset(name).unwrap().num_params() as f64;
            assert!((have / count - 1.0).abs() < 2e-3, "{name}: {have}");
        }
        assert_eq!(counts.len() + 1, names().count());
        let text = preset("qwen9").unwrap_err().to_string();
        assert!(text.contains("qwen3-1.7b"), "{text}");
    }
}
