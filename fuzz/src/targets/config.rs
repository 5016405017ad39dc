//! `config.json`: read, written back, and the model it describes loaded; a small one also runs.

use std::cell::OnceCell;
use std::fmt::Write;

use roundpipe::{Bytes, Cpu, Cx, DType, Worker};
use roundpipe_models::{Folder, Model, ModelConfig, read_config};

use super::super::scratch::Scratch;
use super::super::{Syntax, Target, bundle};
use super::{accepted, refused};

const FILE: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

pub const TARGET: Target = Target {
    name: "config",
    files: &[FILE],
    heap_bytes: 64 << 20,
    heap_per_byte: 64,
    words: include_str!("../../words/config.txt"),
    syntax: Syntax::Json,
    run,
};

/// Models up to so many parameters are loaded from weights that fit, and run.
const SMALL: u64 = 1 << 13;
/// The memory of the machine that configs are read for: the same everywhere, and small enough to be
/// filled.
const MEMORY: Bytes = Bytes::mib(16);

fn run(scratch: &mut Scratch, input: &[u8]) -> bool {
    scratch.fill([(FILE, input)]);
    let Some(config) = accepted(read_config(scratch.dir())) else {
        return false;
    };
    let again = ModelConfig::from_json(&config.to_json(), "again")
        .expect("what was read can be read again");
    assert_eq!(
        format!("{:?}", again.windows),
        format!("{:?}", config.windows)
    );
    if is_small(&config) {
        let dtype = config.dtype.unwrap_or(DType::F32);
        // Weights that fit; where memory ends even before, there is nothing to load.
        let Some(model) = accepted(Model::empty(config, dtype)) else {
            return false;
        };
        scratch.put(WEIGHTS, &weights_of(&model));
        drop(model);
        let model =
            Model::load_within(scratch.dir(), None, MEMORY).expect("weights that fit are loaded");
        forward(&model);
        return true;
    }
    scratch.put(
        WEIGHTS,
        &bundle::safetensors(
            br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            0,
            0,
        ),
    );
    assert!(Folder::open(scratch.dir()).is_ok());
    accepted(Model::load_within(scratch.dir(), None, MEMORY)).is_some()
}

fn is_small(config: &ModelConfig) -> bool {
    let c = config;
    let sizes = [c.vocab, c.hidden, c.heads * c.head_dim, c.intermediate];
    let experts = c
        .moe
        .as_ref()
        .map_or(0, |moe| moe.experts * moe.intermediate);
    let rows = c.max_positions.saturating_mul(c.head_dim) as u64;
    let wide = sizes.into_iter().chain([experts]).max().unwrap_or(0);
    wide < SMALL as usize && c.layers <= 4 && rows <= SMALL && c.num_params() <= SMALL
}

/// A safetensors file with all tensors of a model.
fn weights_of(model: &Model) -> Vec<u8> {
    let mut header = String::new();
    let mut at = 0;
    for piece in model.entries().iter().flat_map(|entry| &entry.pieces) {
        let end = at + 4 * piece.numel();
        let start = if header.is_empty() { '{' } else { ',' };
        let (name, dims) = (&piece.tensor, &piece.dims);
        write!(
            header,
            r#"{start}"{name}":{{"dtype":"F32","shape":{dims:?},"data_offsets":[{at},{end}]}}"#
        )
        .expect("text grows");
        at = end;
    }
    header.push('}');
    bundle::safetensors(header.as_bytes(), 0, 0)
}

/// Runs three tokens; a model may refuse to, but not fall over.
fn forward(model: &Model) {
    thread_local! {
        static WORKER: OnceCell<Worker> = const { OnceCell::new() };
    }
    let tokens = [0i64, 0, 0];
    WORKER.with(|worker| {
        let cpu = || Cpu::new(Some(1)).expect("a processor");
        let worker =
            worker.get_or_init(|| Worker::new(cpu(), Bytes::mib(64)).expect("address space"));
        let mut cx = Cx::infer(worker);
        let ids = cx.tensor(&tokens, &[1, tokens.len()]).expect("three ids");
        if let Err(error) = model.logits(&mut cx, &ids) {
            refused(&error);
        }
    });
}
