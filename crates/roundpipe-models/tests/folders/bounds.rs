//! Numbers in files, compared with the memory there is before anything is made of them.

use roundpipe::Params;
use roundpipe_models::lora::parse_adapter_config;
use roundpipe_models::{Model, ModelConfig, SaveOptions, preset};
use roundpipe_tensor::{Bytes, DType};
use serde_json::{Value, json};

use crate::made::{Scratch, address_space_peak};

/// More address space than this process needs, threads and their heaps included.
const ROOM: u64 = 16 << 30;

fn llama(changes: Value) -> Result<ModelConfig, String> {
    let mut base = json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, "max_position_embeddings": 64
    });
    for (key, value) in changes.as_object().unwrap() {
        base[key] = value.clone();
    }
    ModelConfig::from_bytes(base.to_string().as_bytes(), "m/config.json").map_err(|e| e.to_string())
}

/// A few hundred bytes of config that ask for tables of 32 GiB, and their kind.
#[test]
fn rotary_tables_of_absurd_length_are_refused_at_once() {
    let before = address_space_peak();
    for (changes, word) in [
        (
            json!({"max_position_embeddings": 2_147_483_647}),
            "max_position_embeddings = 2147483647",
        ),
        (
            json!({"max_position_embeddings": 600_000_000}),
            "max_position_embeddings = 600000000",
        ),
        (
            json!({"head_dim": 1 << 20, "max_position_embeddings": 1}),
            "head_dim = 1048576",
        ),
    ] {
        let error = llama(changes).unwrap_err();
        assert!(
            error.starts_with("m/config.json: ") && error.contains(word),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1);
    }
    assert!(address_space_peak() - before < ROOM);
}

/// Each number that can be too large is named, and exactly what fits is allowed.
#[test]
fn configs_are_compared_with_memory() {
    let config = llama(json!({})).unwrap();
    let need = config.num_params() * 4 + 64 * 4 * 4;
    config.fits(DType::F32, Bytes(need)).unwrap();
    config.fits(DType::BF16, Bytes(need - 1)).unwrap();
    assert!(config.fits(DType::F32, Bytes(need - 1)).is_err());
    let moe = json!({
        "model_type": "qwen3_moe", "num_experts": 60_000, "num_experts_per_tok": 2, "moe_intermediate_size": 1_000_000
    });
    let cases = [
        (json!({"vocab_size": 2_000_000_000}), "vocab_size"),
        (
            json!({"num_hidden_layers": 4000, "intermediate_size": 1 << 30}),
            "intermediate_size",
        ),
        (
            json!({"num_attention_heads": 1 << 30, "num_key_value_heads": 1 << 30}),
            "num_attention_heads",
        ),
        (
            json!({"max_position_embeddings": 500_000_000}),
            "max_position_embeddings",
        ),
        (moe, "num_experts"),
    ];
    for (changes, key) in cases {
        let config = llama(changes).unwrap();
        let error = config.fits(DType::BF16, Bytes(1 << 30)).unwrap_err();
        assert!(error.contains(key) && error.contains("1.00 GiB"), "{error}");
    }
}

/// The count of parameters that memory is compared with is the count that a model has.
#[test]
fn counted_parameters_are_those_of_the_model() {
    let names = ["tiny", "qwen3-0.6b"];
    let counted = |name: &str| {
        preset(name)
            .unwrap()
            .with(&json!({"vocab_size": 64, "num_hidden_layers": 1}))
            .unwrap()
    };
    for config in names.map(counted) {
        let model = Model::empty(config.clone(), DType::BF16).unwrap();
        let made: usize = model
            .named_params()
            .iter()
            .filter(|(name, _)| !name.contains("rope"))
            .map(|(_, p)| p.shape().numel())
            .sum();
        assert_eq!(config.num_params(), made as u64, "{:?}", config.family);
    }
}

/// A folder is compared with the memory it may take before its weights are opened.
#[test]
fn a_model_that_does_not_fit_is_not_loaded() {
    let dir = Scratch::new("bounds");
    let model = Model::random(llama(json!({})).unwrap(), DType::F32, 1).unwrap();
    model.save(dir.join("m"), SaveOptions::default()).unwrap();
    Model::load_within(dir.join("m"), None, Bytes(1 << 20)).unwrap();
    let error = Model::load_within(dir.join("m"), None, Bytes(1000))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("config.json: asks for") && error.contains("1000 B"),
        "{error}"
    );
    // The same folder with a config of another size: refused by the weights, with no table computed
    // before.
    let config = json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": 500_000_000
    });
    std::fs::write(dir.join("m/config.json"), config.to_string()).unwrap();
    let error = Model::load_within(dir.join("m"), None, Bytes(u64::MAX))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("model.safetensors") && error.contains("shape"),
        "{error}"
    );
}

/// The longest contexts that are published still have tables for all their positions.
#[test]
fn a_million_positions_are_legal() {
    let config = llama(json!({"max_position_embeddings": 1_048_576})).unwrap();
    let model = Model::empty(config, DType::F32).unwrap();
    let (_, table) = model
        .named_params()
        .into_iter()
        .find(|(name, _)| name.ends_with("rope.cos"))
        .unwrap();
    assert_eq!(table.shape().dims(), [1_048_576, 2]);
    let values = table.to_vec::<f32>().unwrap();
    assert_eq!(values[2 * 1_048_575], 1_048_575f64.cos() as f32);
    assert!(llama(json!({"max_position_embeddings": 10_485_760, "head_dim": 128})).is_ok());
}

/// Ranks of an adapter are bounded before they are multiplied.
#[test]
fn ranks_of_adapters_are_bounded() {
    let with = |changes: Value| {
        let mut base =
            json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]});
        for (key, value) in changes.as_object().unwrap() {
            base[key] = value.clone();
        }
        let path = std::path::Path::new("a/adapter_config.json");
        parse_adapter_config(path, base.to_string().as_bytes()).map_err(|e| e.to_string())
    };
    assert_eq!(
        with(json!({"rank_pattern": {"q_proj": 4}})).unwrap().rank,
        8
    );
    for (changes, word) in [
        (json!({"r": 1u64 << 40}), "rank"),
        (json!({"r": 0}), "rank"),
        (json!({"rank_pattern": {"q_proj": 1e300}}), "rank_pattern"),
        (json!({"rank_pattern": {"q_proj": -1}}), "rank_pattern"),
        (json!({"rank_pattern": {"q_proj": 1.5}}), "rank_pattern"),
        (
            json!({"rank_pattern": {"q_proj": u64::MAX}}),
            "rank_pattern",
        ),
        (json!({"rank_pattern": {"q_proj": "many"}}), "rank_pattern"),
        (
            json!({"alpha_pattern": {"q_proj": "much"}}),
            "alpha_pattern",
        ),
    ] {
        let error = with(changes.clone()).unwrap_err();
        assert!(
            error.contains("adapter_config.json") && error.contains(word),
            "{changes}: {error}"
        );
    }
}
