//! safetensors files: opened, read whole, written again, loaded into a model.

use roundpipe_files::weights::{Stored, param_dtype};
use roundpipe_files::{Tensors, read_tensors, write_tensors};
use roundpipe_models::{Folder, Model};

use super::super::scratch::Scratch;
use super::super::{Syntax, Target, bundle};
use super::{BASE, accepted, base_config, read_all};

const FILE: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const COPY: &str = "copy.safetensors";

pub const TARGET: Target = Target {
    name: "safetensors",
    files: &[FILE, BASE],
    heap_bytes: 1 << 20,
    heap_per_byte: 64,
    words: include_str!("../../words/safetensors.txt"),
    syntax: Syntax::Json,
    run,
};

fn run(scratch: &mut Scratch, input: &[u8]) -> bool {
    let files = bundle::files(input, TARGET.files);
    let weights = files
        .iter()
        .find(|(name, _)| *name == FILE)
        .map_or(&[][..], |(_, bytes)| bytes);
    scratch.fill([(CONFIG, base_config(&files).as_bytes()), (FILE, weights)]);
    let path = scratch.path(FILE);
    let opened = accepted(Folder::open(&path));
    if let Some(folder) = &opened {
        read_all(folder);
    }
    let read = accepted(read_tensors(&path));
    let usable = |t: &Stored| param_dtype(t.dtype).is_some();
    let whole = opened
        .as_ref()
        .is_some_and(|folder| folder.shards()[0].tensors().iter().all(usable));
    assert_eq!(
        whole,
        read.is_some(),
        "a file is sound to one reader and not to the other"
    );
    if let Some(tensors) = read {
        write_again(scratch, &tensors);
    }
    drop(opened);
    accepted(Model::load(scratch.dir(), None)).is_some()
}

/// What is written is what was read.
fn write_again(scratch: &Scratch, tensors: &Tensors) {
    let path = scratch.path(COPY);
    write_tensors(&path, &tensors.metadata, &tensors.tensors)
        .expect("what was read can be written");
    let again = read_tensors(&path).expect("what was written can be read");
    assert_eq!(contents(tensors), contents(&again));
    std::fs::remove_file(path).expect("the copy");
}

/// Names, types, shapes and bytes, by name.
fn contents(tensors: &Tensors) -> Vec<(String, String, Vec<u8>)> {
    let one = |(name, param): &(String, roundpipe::Param)| {
        let bytes = param
            .data()
            .read_all()
            .expect("nobody writes")
            .bytes()
            .to_vec();
        (
            name.clone(),
            format!("{} {:?}", param.dtype(), param.shape().dims()),
            bytes,
        )
    };
    let mut all: Vec<_> = tensors.tensors.iter().map(one).collect();
    all.sort();
    all
}
