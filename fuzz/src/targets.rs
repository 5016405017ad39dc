//! The parsers under test. A new one is a file here, a line in [`ALL`] and a folder of corpus.

mod adapter;
mod config;
mod index;
mod template;
mod tokenizer;
mod weights;

use std::fmt::Display;

use roundpipe_models::folder::Folder;

use super::Target;

/// All parsers.
pub const ALL: &[&Target] = &[
    &weights::TARGET,
    &index::TARGET,
    &config::TARGET,
    &tokenizer::TARGET,
    &template::TARGET,
    &template::GRAMMAR,
    &adapter::TARGET,
];

/// The parser of this name.
pub fn named(name: &str) -> Option<&'static Target> {
    ALL.iter().copied().find(|target| target.name == name)
}

/// Characters of a refusal, paths left out.
const LINE: usize = 1000;

/// Checks a refusal: one line, short, nothing in it that moves a terminal's cursor.
fn refused(error: &impl Display) {
    let text = error.to_string();
    assert!(
        !text.chars().any(char::is_control),
        "refused with control characters: {text:?}"
    );
    assert!(
        text.chars().count() <= LINE,
        "refused with {} characters: {text:.200}…",
        text.chars().count()
    );
}

/// What came out, where something did.
fn accepted<T, E: Display>(result: Result<T, E>) -> Option<T> {
    result.inspect_err(|error| refused(error)).ok()
}

/// Reads every byte that a folder claims to have.
fn read_all(folder: &Folder) -> u64 {
    let mut sum = 0u64;
    for name in folder.tensors() {
        let view = folder.tensor(name).expect("a tensor that the folder names");
        sum += view.bytes.iter().map(|b| u64::from(*b)).sum::<u64>();
    }
    sum
}

/// The part of a bundle that names the model its files are for.
const BASE: &str = "base";

/// The `config.json` of the model that a bundle names.
fn base_config(files: &[(&'static str, Vec<u8>)]) -> &'static str {
    let base = files
        .iter()
        .find(|(name, _)| *name == BASE)
        .map_or(&[][..], |(_, text)| text);
    match base.trim_ascii() {
        b"qwen3_moe" => QWEN_MOE,
        b"gpt_oss" => GPT_OSS,
        _ => LLAMA,
    }
}

/// Models of a few hundred numbers.
const LLAMA: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":5,"hidden_size":4,
"intermediate_size":6,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":2,
"max_position_embeddings":8,"tie_word_embeddings":true,"torch_dtype":"bfloat16"}"#;
const QWEN_MOE: &str = r#"{"architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe","vocab_size":5,"hidden_size":4,
"intermediate_size":6,"moe_intermediate_size":2,"num_experts":3,"num_experts_per_tok":2,"num_hidden_layers":2,
"mlp_only_layers":[0],"num_attention_heads":2,"num_key_value_heads":1,"head_dim":2,"max_position_embeddings":8,
"torch_dtype":"float32"}"#;
const GPT_OSS: &str = r#"{"architectures":["GptOssForCausalLM"],"model_type":"gpt_oss","vocab_size":5,"hidden_size":32,
"intermediate_size":32,"num_local_experts":2,"num_experts_per_tok":1,"num_hidden_layers":1,"num_attention_heads":2,
"num_key_value_heads":1,"head_dim":2,"max_position_embeddings":8,"sliding_window":4,"tie_word_embeddings":true,
"torch_dtype":"bfloat16"}"#;
