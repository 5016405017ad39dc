//! PEFT's adapters: loaded into a model, loaded again, saved and loaded into another, merged.

use roundpipe::DType;
use roundpipe_models::{Model, ModelConfig};

use super::super::scratch::Scratch;
use super::super::{Syntax, Target, bundle};
use super::{BASE, accepted, base_config};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

pub const TARGET: Target = Target {
    name: "adapter",
    files: &[CONFIG, TENSORS, BASE],
    heap_bytes: 4 << 20,
    heap_per_byte: 256,
    words: include_str!("../../words/adapter.txt"),
    syntax: Syntax::Json,
    run,
};

fn run(scratch: &mut Scratch, input: &[u8]) -> bool {
    let files = bundle::files(input, TARGET.files);
    let config = base_config(&files);
    scratch.fill(files.iter().map(|(name, bytes)| (*name, &bytes[..])));
    let mut model = model(config);
    if accepted(model.load_adapter(scratch.dir())).is_none() {
        assert!(
            model.lora().is_none(),
            "a refused adapter left something behind"
        );
        return false;
    }
    model
        .load_adapter(scratch.dir())
        .expect("the same adapter again");
    // Slow next to the rest, so not every time.
    if input
        .iter()
        .fold(0u8, |sum, byte| sum.wrapping_add(*byte))
        .is_multiple_of(4)
    {
        save_again(scratch, &model, config);
    }
    model.merge_lora().expect("nobody else holds the model");
    assert!(model.lora().is_none());
    true
}

fn model(config: &str) -> Model {
    let json = serde_json::from_str(config).expect("a config of ours");
    let config = ModelConfig::from_json(&json, "base").expect("a config of ours");
    let dtype = config.dtype.unwrap_or(DType::F32);
    Model::empty(config, dtype).expect("memory for a small model")
}

/// What is saved can be loaded.
fn save_again(scratch: &Scratch, with_adapter: &Model, config: &str) {
    let dir = scratch.path("saved");
    with_adapter
        .save_adapter(&dir)
        .expect("a loaded adapter can be saved");
    let result = model(config).load_adapter(&dir);
    std::fs::remove_dir_all(&dir).expect("the copy");
    result.expect("a saved adapter can be loaded");
}
