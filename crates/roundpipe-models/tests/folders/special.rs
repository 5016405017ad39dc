//! Names in a folder that lead to no file: a pipe that nobody writes, a folder, a device without an
//! end, too long a file. Each is one line, at once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{Error, Folder, HubConfig, Model, SaveOptions, preset, read_config, save};
use roundpipe_tensor::DType;

use crate::made::Scratch;

/// Runs a call that might never end; says so instead.
fn ends<T: Send + 'static>(case: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(call()));
    receive
        .recv_timeout(Duration::from_secs(60))
        .unwrap_or_else(|_| panic!("{case} hangs"))
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// A name and a function that reads the file of that name in a folder.
type Reader = (&'static str, fn(&Path) -> Result<(), Error>);

const READERS: [Reader; 12] = [
    ("config.json", |dir| read_config(dir).map(drop)),
    ("config.json", |dir| Model::load(dir, None).map(drop)),
    ("model.safetensors", |dir| Folder::open(dir).map(drop)),
    ("model.safetensors.index.json", |dir| {
        Folder::open(dir).map(drop)
    }),
    ("adapter_config.json", |dir| {
        adapter_model().load_adapter(dir)
    }),
    ("tokenizer.json", |dir| Tokenizer::open(dir).map(drop)),
    ("tokenizer_config.json", |dir| {
        Tokenizer::open(dir).map(drop)
    }),
    ("special_tokens_map.json", |dir| {
        Tokenizer::open(dir).map(drop)
    }),
    ("generation_config.json", |dir| {
        Tokenizer::open(dir).map(drop)
    }),
    ("chat_template.json", |dir| Tokenizer::open(dir).map(drop)),
    ("chat_template.jinja", |dir| Tokenizer::open(dir).map(drop)),
    ("additional_chat_templates/rag.jinja", |dir| {
        Tokenizer::open(dir).map(drop)
    }),
];

fn adapter_model() -> Model {
    Model::random(preset("tiny").unwrap(), DType::F32, 1).unwrap()
}

/// A folder in which only the file of that name is missing.
fn folder_without(name: &str) -> (Scratch, PathBuf) {
    let dir = Scratch::new("special");
    let tokens =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat/tokenizers/byte_level");
    std::fs::copy(tokens.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let path = dir.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _ = std::fs::remove_file(&path);
    (dir, path)
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    for (name, read) in READERS {
        for kind in ["pipe", "folder", "device", "broken link"] {
            let (dir, path) = folder_without(name);
            match kind {
                "pipe" => pipe(&path),
                "folder" => std::fs::create_dir(&path).unwrap(),
                "device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                _ => std::os::unix::fs::symlink("gone", &path).unwrap(),
            }
            let folder = dir.0.clone();
            let error = ends(&format!("{name} as a {kind}"), move || read(&folder))
                .unwrap_err()
                .to_string();
            let word = if kind == "broken link" {
                "link to a file that is not there"
            } else {
                "is not a file"
            };
            assert!(
                error.contains(name) && error.contains(word) && error.contains(';'),
                "{kind}: {error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}

/// A file that is longer than its kind can be is not read.
#[test]
fn endless_files_are_not_read() {
    for (name, read) in READERS
        .into_iter()
        .filter(|(name, _)| *name != "model.safetensors")
    {
        let (dir, path) = folder_without(name);
        std::fs::write(&path, "{").unwrap();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        let folder = dir.0.clone();
        let error = ends(name, move || read(&folder)).unwrap_err().to_string();
        assert!(
            error.contains(name) && error.contains("1099511627776 bytes"),
            "{error}"
        );
    }
}

/// The cache's refs and the token's file are read with the same care.
#[test]
fn pipes_in_the_cache_do_not_hang() {
    let dir = Scratch::new("special");
    let refs = dir.join("hub/models--a--b/refs");
    std::fs::create_dir_all(&refs).unwrap();
    pipe(&refs.join("main"));
    pipe(&dir.join("token"));
    let home = dir.0.to_str().unwrap().to_owned();
    let config = ends("the token", move || {
        HubConfig::from_vars(|name| (name == "HF_HOME").then(|| home.clone()))
    });
    assert_eq!(config.token, None);
    let config = HubConfig {
        offline: true,
        ..config
    };
    let error = ends("the ref", move || config.resolve("a/b"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("not in the cache"), "{error}");
}

/// What is copied beside saved weights is read the same way.
#[test]
fn companions_are_files() {
    let (from, path) = folder_without("vocab.json");
    std::fs::write(&path, "{").unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let to = Scratch::new("special");
    let options = SaveOptions {
        copy_from: Some(from.0.clone()),
        ..SaveOptions::default()
    };
    let error = save(to.join("m"), &[], &options).unwrap_err().to_string();
    assert!(
        error.contains("vocab.json") && error.contains("1099511627776 bytes"),
        "{error}"
    );
}
