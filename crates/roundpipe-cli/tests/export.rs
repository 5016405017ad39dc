//! `roundpipe merge` and `roundpipe export` on the built program.

mod kit;

use std::path::Path;

use kit::{Run, files, program, text};
use roundpipe::DType;
use roundpipe_models::{Folder, LoraConfig, Model, Weights};

/// Runs the program and expects it to do as told; gives what it printed.
fn done(arguments: &[&str]) -> String {
    let output = program(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Runs the program and expects one line on standard error with this code.
fn refused(arguments: &[&str], code: i32) -> String {
    let output = program(arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    let lines = error.lines().filter(|line| line.starts_with("error: "));
    assert_eq!(lines.count(), 1, "{arguments:?}: {error}");
    assert!(
        output.stdout.is_empty() && !error.contains("panicked"),
        "{error}"
    );
    error
}

/// An adapter on a model, with values that change what the model says.
fn adapter(run: &Run, base: &str) -> String {
    let mut model = Model::load(base, None).unwrap();
    let config = LoraConfig {
        rank: 2,
        ..LoraConfig::default()
    };
    model.add_lora(&config).unwrap();
    for (name, param) in roundpipe::Params::trainable_params(&model) {
        if name.contains("lora_B") {
            let home = param.data();
            let mut bytes = home.write(0..home.len()).unwrap();
            let values = bytes.as_mut_slice::<f32>().iter_mut().enumerate();
            values.for_each(|(i, x)| *x = (i % 7) as f32 / 4.0 - 0.7);
        }
    }
    model.save_adapter(run.path("adapter")).unwrap();
    run.path("adapter")
}

fn answer(model: &str, more: &[&str]) -> String {
    let arguments = [
        "generate",
        model,
        "--raw",
        "--prompt",
        "hello",
        "--max-tokens",
        "8",
    ];
    done(
        &[
            &arguments[..],
            &["--devices", "cpu", "--dtype", "f32"],
            more,
        ]
        .concat(),
    )
}

fn is_there(path: &str) -> bool {
    Path::new(path).symlink_metadata().is_ok()
}

/// A merged model is the model with its adapter, and has all that the model had.
#[test]
fn merge_makes_one_model_of_two() {
    let run = Run::new("merge");
    let (base, out) = (run.model(), run.path("merged"));
    let adapter = adapter(&run, &base);
    let said = done(&["merge", &base, &adapter, "--out", &out]);
    assert!(
        said.starts_with(&format!("wrote {out}: weights in f32, ")),
        "{said}"
    );
    let mut want = Model::load(&base, None).unwrap();
    want.load_adapter(&adapter).unwrap();
    want.merge_lora().unwrap();
    let got = Model::load(&out, None).unwrap();
    for (got, want) in got.entries().iter().zip(want.entries()) {
        let values = |param: &roundpipe::Param| param.to_vec::<f32>().unwrap();
        assert_eq!(values(&got.param), values(&want.param), "{}", want.name);
    }
    let names = |folder: &str| files(Path::new(folder)).into_keys().collect::<Vec<_>>();
    assert_eq!(
        names(&out),
        names(&base),
        "tokenizer and settings come along"
    );
    let plain = answer(&base, &[]);
    assert_eq!(answer(&out, &[]), answer(&base, &["--adapter", &adapter]));
    assert_ne!(answer(&out, &[]), plain);

    // What exists stays, what is missing is named.
    let line = refused(&["merge", &base, &adapter, "--out", &out], 1);
    assert!(line.contains("exists already"), "{line}");
    let other = run.path("other");
    for (arguments, word) in [
        (vec!["merge", &base, "--out", &other], "no adapter to merge"),
        (
            vec!["merge", &base, &base, "--out", &other],
            "adapter_config.json",
        ),
        (vec!["merge", &adapter, "--out", &other], "is an adapter"),
        (
            vec!["merge", "/no/such/model", "--out", &other],
            "/no/such/model",
        ),
    ] {
        let line = refused(&arguments, 1);
        assert!(line.contains(word), "{line}");
    }
    refused(&["merge", &base, &adapter], 2);
    assert!(!is_there(&other) && !is_there(&run.path(".other.partial")));
}

/// Folders in any type and in shards; the same weights, rounded once.
#[test]
fn export_writes_folders() {
    let run = Run::new("export-hf");
    let (base, out) = (run.model(), run.path("half"));
    done(&[
        "export",
        &base,
        "--to",
        "hf",
        "--out",
        &out,
        "--dtype",
        "bf16",
        "--shard-size",
        "20000",
    ]);
    let shards = files(Path::new(&out)).into_keys();
    let shards = shards.filter(|name| name.ends_with(".safetensors")).count();
    assert!(shards > 2, "{shards}");
    let half = Model::load(&out, None).unwrap();
    assert_eq!(half.dtype(), DType::BF16);
    let rounded = Model::load(&base, Some(DType::BF16)).unwrap();
    for (got, want) in half.entries().iter().zip(rounded.entries()) {
        let bytes = |param: &roundpipe::Param| param.data().read_all().unwrap().bytes().to_vec();
        assert_eq!(bytes(&got.param), bytes(&want.param), "{}", want.name);
    }
    assert!(
        Folder::open(&out)
            .unwrap()
            .path()
            .ends_with("model.safetensors.index.json")
    );

    let usage = [
        (vec!["--to", "hf", "--dtype", "q8_0"], "--dtype q8_0"),
        (vec!["--to", "gguf", "--shard-size", "1GB"], "--shard-size"),
        (vec!["--to", "onnx"], "onnx"),
        (vec!["--to", "hf", "--shard-size", "many"], "many"),
    ];
    for (more, word) in usage {
        let arguments = [&["export", base.as_str(), "--out", "x"], &more[..]].concat();
        let line = refused(&arguments, 2);
        assert!(line.contains(word), "{line}");
    }
    let line = refused(&["export", &base, "--to", "hf", "--out", &base], 1);
    assert!(line.contains("exists already"), "{line}");
}

/// From a LoRA run: its adapter in another type, the merged model, and a file for llama.cpp.
#[test]
fn a_run_is_exported_in_every_form() {
    let run = Run::new("export-run");
    let (base, trained) = (run.model(), run.path("run"));
    let chats = run.chats(12);
    let arguments = [
        "train", &base, &chats, "--lora", "--steps", "2", "--out", &trained,
    ];
    let settings = ["devices=cpu", "seq=32", "batch=2", "lora_rank=2", "lr=1e-2"];
    done(&[&arguments[..], &settings].concat());

    let adapter = run.path("adapter");
    done(&[
        "export", &trained, "--to", "adapter", "--out", &adapter, "--dtype", "bf16",
    ]);
    let tensors = Weights::open(Path::new(&adapter).join("adapter_model.safetensors")).unwrap();
    assert!(
        tensors
            .tensors()
            .iter()
            .all(|t| format!("{:?}", t.dtype) == "BF16")
    );
    let config = std::fs::read_to_string(Path::new(&adapter).join("adapter_config.json")).unwrap();
    assert!(config.contains(&base), "PEFT finds the model: {config}");

    let merged = run.path("merged");
    done(&["merge", &trained, "--out", &merged]);
    let exported = run.path("exported");
    done(&["export", &trained, "--to", "hf", "--out", &exported]);
    assert_eq!(files(Path::new(&merged)), files(Path::new(&exported)));
    assert_eq!(answer(&merged, &[]), answer(&trained, &[]));
    let line = refused(&["merge", &trained, &adapter, "--out", &run.path("x")], 1);
    assert!(line.contains("adapter of its own"), "{line}");

    // The run's file is that of the merged model, but for its name.
    let (first, second) = (run.path("run.gguf"), run.path("merged.gguf"));
    let said = done(&[
        "export", &trained, "--to", "gguf", "--dtype", "q8_0", "--out", &first,
    ]);
    assert!(
        said.starts_with(&format!("wrote {first}: ")) && said.contains(" in q8_0, "),
        "{said}"
    );
    done(&[
        "export", &merged, "--to", "gguf", "--dtype", "q8_0", "--out", &second,
    ]);
    let data = |path: &str| {
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(&bytes[..4], b"GGUF");
        bytes[bytes.len() - 10_000..].to_vec()
    };
    assert!(data(&first) == data(&second));
    let line = refused(&["export", &trained, "--to", "gguf", "--out", &first], 1);
    assert!(line.contains("exists already"), "{line}");
    let line = refused(
        &["export", &base, "--to", "adapter", "--out", &run.path("x")],
        1,
    );
    assert!(line.contains("--adapter"), "{line}");
}

/// A run that has not finished, a broken tokenizer, and a target that cannot be made: one line.
#[test]
fn what_cannot_be_exported_is_refused() {
    let run = Run::new("export-bad");
    let base = run.model();
    let out = run.path("x.gguf");
    let gguf =
        |model: &str, out: &str| refused(&["export", model, "--to", "gguf", "--out", out], 1);
    assert!(gguf(&base, "/no/such/folder/x.gguf").contains("/no/such/folder"));
    assert!(gguf("/no/such/model", &out).contains("/no/such/model"));
    let unfinished = run.path("unfinished");
    std::fs::create_dir(&unfinished).unwrap();
    std::fs::write(Path::new(&unfinished).join("run.toml"), "").unwrap();
    assert!(gguf(&unfinished, &out).contains("has not finished"));
    let tokenizer = Path::new(&base).join("tokenizer.json");
    std::fs::write(&tokenizer, "{").unwrap();
    assert!(gguf(&base, &out).contains("tokenizer.json"));
    std::fs::remove_file(&tokenizer).unwrap();
    assert!(gguf(&base, &out).contains("tokenizer.json"));
    let weights = Path::new(&base).join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 100]).unwrap();
    assert!(gguf(&base, &out).contains("model.safetensors"));
    let hf = refused(&["export", &base, "--to", "hf", "--out", &run.path("y")], 1);
    assert!(hf.contains("model.safetensors"));
    let beside = files_beside(&run);
    assert!(
        beside
            .iter()
            .all(|name| !name.contains("partial") && !name.starts_with('x')),
        "{beside:?}"
    );
}

fn files_beside(run: &Run) -> Vec<String> {
    let entries = std::fs::read_dir(run.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.collect()
}
