//! `roundpipe train` as it is built: what a person gets, what an interruption leaves, what repeats.

mod kit;

use std::path::Path;
use std::process::Output;

use kit::{Run, files, losses, metrics, program, stopped_at, text};
use serde_json::Value;

fn assert_done(output: &Output) {
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{error}");
}

/// Without an argument the program trains on its own stories: workers change no loss, it learns,
/// and leaves a model that writes.
#[test]
fn the_demo_learns_and_repeats_on_any_number_of_workers() {
    let run = Run::new("demo");
    let demo = |workers: &str| {
        let out = run.path(&format!("demo-{workers}"));
        let output = program(&["demo", "--steps", "12", "--workers", workers, "--out", &out]);
        assert_done(&output);
        (out, text(&output.stdout))
    };
    let (one, _) = demo("1");
    let (three, shown) = demo("3");
    let first = losses(Path::new(&one));
    assert_eq!(first, losses(Path::new(&three)), "1 and 3 workers");
    assert_eq!(first.len(), 12);
    assert!(first[11] < first[0] - 1.0, "{first:?}");
    assert_eq!(
        files(&Path::new(&one).join("model")),
        files(&Path::new(&three).join("model"))
    );
    for part in [
        "step 0: \"The cat \" ->",
        "step 12: \"The cat \" ->",
        "stages of layers 0..2 2..4 | 4..6 2..4 0..2",
        "the result is in ",
        "roundpipe generate ",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    for file in [
        "run.toml",
        "metrics.jsonl",
        "report.html",
        "checkpoints",
        "events",
    ] {
        assert!(Path::new(&three).join(file).exists(), "{file}");
    }
    let output = program(&[
        "generate",
        &three,
        "--prompt",
        "The cat",
        "--max-tokens",
        "5",
    ]);
    assert_done(&output);
    // The same command finds it finished.
    let again = program(&["train", "--out", &three]);
    assert_done(&again);
    assert!(text(&again.stdout).starts_with("the result is in "));
}

/// A run that is stopped and started again on other workers ends with the files and the losses of
/// one that was not.
#[test]
fn a_run_goes_on_as_if_nothing_had_been() {
    let run = Run::new("resume");
    let data = run.chats(40);
    let model = run.model();
    for (name, settings) in [
        ("full", vec!["lag=1"]),
        ("lora", vec!["method=lora", "lora_dropout=0.1"]),
        ("half", vec!["dtype=f16", "lag=1"]),
    ] {
        let arguments = |out: &str, more: &[&str]| -> Vec<String> {
            let mut arguments = vec![
                "train",
                &model,
                &data,
                "--out",
                out,
                "steps=60",
                "save_every=3",
            ];
            arguments.extend([
                "batch=4",
                "microbatches=2",
                "sample_tokens=4",
                "validation=5",
            ]);
            arguments.extend(["eval_every=7", "sample_every=20"]);
            arguments.extend(settings.iter().chain(more));
            arguments.into_iter().map(str::to_owned).collect()
        };
        let train = |out: &str, more: &[&str]| {
            let arguments = arguments(out, more);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            program(&arguments)
        };
        let whole = run.path(&format!("{name}-whole"));
        assert_done(&train(&whole, &["devices=cpu"]));
        let cut = run.path(&format!("{name}-cut"));
        let first = arguments(&cut, &["devices=cpu:2"]);
        let first: Vec<&str> = first.iter().map(String::as_str).collect();
        let stopped = stopped_at(&first, Path::new(&cut), 5);
        assert_eq!(stopped.status.code(), Some(4), "{}", text(&stopped.stderr));
        assert!(text(&stopped.stderr).contains("goes on"));
        assert_done(&train(&cut, &["devices=cpu:3", "grain=layer"]));
        assert_eq!(losses(Path::new(&whole)), losses(Path::new(&cut)), "{name}");
        assert_eq!(
            files(&Path::new(&whole).join("model")),
            files(&Path::new(&cut).join("model")),
            "{name}"
        );
        let steps: Vec<Value> = metrics(Path::new(&cut))
            .into_iter()
            .filter(|record| record["type"] == "step")
            .map(|record| record["step"].clone())
            .collect();
        assert_eq!(
            steps,
            (1..=60).map(Value::from).collect::<Vec<_>>(),
            "{name}"
        );
    }
}
