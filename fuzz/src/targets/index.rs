//! Indexes of shards: opened, read whole, loaded into a model. The shards are sound unless the
//! input brings others.

use roundpipe_models::{Folder, Model};

use super::super::scratch::Scratch;
use super::super::{Syntax, Target, bundle};
use super::{LLAMA, accepted, read_all};

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["a.safetensors", "b.safetensors"];

pub const TARGET: Target = Target {
    name: "index",
    files: &[INDEX, SHARDS[0], SHARDS[1]],
    heap_bytes: 1 << 20,
    heap_per_byte: 64,
    words: include_str!("../../words/index.txt"),
    syntax: Syntax::Json,
    run,
};

/// The weights of [`LLAMA`] in two halves, as headers.
const HALVES: [&str; 2] = [
    r#"{"model.embed_tokens.weight":{"dtype":"BF16","shape":[5,4],"data_offsets":[0,40]},
"model.layers.0.input_layernorm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[40,48]},
"model.layers.0.self_attn.q_proj.weight":{"dtype":"BF16","shape":[4,4],"data_offsets":[48,80]},
"model.layers.0.self_attn.k_proj.weight":{"dtype":"BF16","shape":[2,4],"data_offsets":[80,96]},
"model.layers.0.self_attn.v_proj.weight":{"dtype":"BF16","shape":[2,4],"data_offsets":[96,112]},
"model.layers.0.self_attn.o_proj.weight":{"dtype":"BF16","shape":[4,4],"data_offsets":[112,144]}}"#,
    r#"{"model.layers.0.post_attention_layernorm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},
"model.layers.0.mlp.gate_proj.weight":{"dtype":"BF16","shape":[6,4],"data_offsets":[8,56]},
"model.layers.0.mlp.up_proj.weight":{"dtype":"BF16","shape":[6,4],"data_offsets":[56,104]},
"model.layers.0.mlp.down_proj.weight":{"dtype":"BF16","shape":[4,6],"data_offsets":[104,152]},
"model.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[152,160]}}"#,
];

fn run(scratch: &mut Scratch, input: &[u8]) -> bool {
    let mut files = bundle::files(input, TARGET.files);
    for (name, header) in SHARDS.into_iter().zip(HALVES) {
        if files.iter().all(|(known, _)| *known != name) {
            files.push((name, bundle::safetensors(header.as_bytes(), 0, 0)));
        }
    }
    files.push(("config.json", LLAMA.as_bytes().to_vec()));
    scratch.fill(files.iter().map(|(name, bytes)| (*name, &bytes[..])));
    if let Some(folder) = accepted(Folder::open(scratch.dir())) {
        read_all(&folder);
        for name in folder.tensors() {
            assert!(
                folder
                    .shard_of(name)
                    .is_some_and(|shard| shard.stored(name).is_some()),
                "{name}"
            );
        }
    }
    accepted(Model::load(scratch.dir(), None)).is_some()
}
