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
        let mut stopped = stopped_at(&first, Path::new(&cut), 5);
        for _ in 0..9 {
            if !stopped.status.success() {
                break;
            }
            // It was over before it was stopped.
            std::fs::remove_dir_all(&cut).unwrap();
            stopped = stopped_at(&first, Path::new(&cut), 5);
        }
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

/// A step that does not fit gets more microbatches, which change nothing but rounding; where not
/// even a row fits, the run is refused with a status of its own.
#[test]
fn a_step_that_does_not_fit_gets_more_microbatches() {
    let run = Run::new("fit");
    let story = run.write("story.txt", "The lamp was lit at dusk. ".repeat(400));
    let train = |name: &str, memory: &str| {
        let out = run.path(name);
        let memory = format!("gpu_memory={memory}");
        let mut arguments = vec!["train", "--init", "tiny", &story, "--out", &out, "steps=3"];
        arguments.extend(["seq=128", "batch=16", "microbatches=1", "sample_every=0"]);
        arguments.extend(["devices=cpu", "validation=off", &memory]);
        (program(&arguments), out)
    };
    let (roomy, whole) = train("roomy", "64MiB");
    assert_done(&roomy);
    assert!(!text(&roomy.stdout).contains("do not fit"));
    let (tight, parts) = train("tight", "12MiB");
    assert_done(&tight);
    let said = text(&tight.stdout);
    assert!(
        said.contains("1 microbatches do not fit, so a step has 2 from now on"),
        "{said}"
    );
    let (whole, parts) = (losses(Path::new(&whole)), losses(Path::new(&parts)));
    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
    assert!(whole.iter().zip(&parts).all(is_near), "{whole:?} {parts:?}");
    let (none, _) = train("none", "1MiB");
    let error = text(&none.stderr);
    assert_eq!(none.status.code(), Some(3), "{error}");
    assert!(
        error.contains("does not fit") && error.contains("lower seq"),
        "{error}"
    );
}

/// Every optimizer and schedule trains, and the rates are those that the schedule says.
#[test]
fn optimizers_and_schedules_have_one_interface() {
    let run = Run::new("rules");
    let data = run.chats(20);
    let model = run.model();
    let rules = ["adamw", "adam", "sgd", "lion", "muon", "adafactor"];
    let schedules = ["cosine", "linear", "constant", "wsd"];
    for (rule, schedule) in rules.iter().zip(schedules.iter().cycle()) {
        let out = run.path(rule);
        let settings = [
            format!("optimizer={rule}"),
            format!("schedule={schedule}"),
            "groups=[{ match = \"*norm*\", lr_factor = 0.5 }, { match = \"*embed*\", freeze = true }]".into(),
        ];
        let mut arguments = vec!["train", &model, &data, "--out", &out, "steps=10", "batch=2"];
        arguments.extend([
            "lr=0.001",
            "warmup=2",
            "min_lr=0.1",
            "decay=0.4",
            "sample_every=0",
        ]);
        arguments.extend([
            "devices=cpu",
            "neftune=5",
            "label_smoothing=0.1",
            "validation=off",
        ]);
        arguments.extend(settings.iter().map(String::as_str));
        assert_done(&program(&arguments));
        let records = metrics(Path::new(&out));
        let steps = records.iter().filter(|record| record["type"] == "step");
        let rates: Vec<f64> = steps.filter_map(|step| step["lr"].as_f64()).collect();
        assert_eq!(rates.len(), 10);
        let at = |step: usize| rates[step - 1] / 0.001;
        let expected = match *schedule {
            "cosine" => 0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * 4.0 / 8.0).cos()),
            "linear" => 1.0 - 0.9 * 4.0 / 8.0,
            _ => 1.0,
        };
        assert!(
            (at(1) - 0.5).abs() < 1e-9 && (at(2) - 1.0).abs() < 1e-9,
            "{rates:?}"
        );
        assert!((at(6) - expected).abs() < 1e-9, "{schedule}: {rates:?}");
        let last = if *schedule == "constant" { 1.0 } else { 0.1 };
        assert!((at(10) - last).abs() < 1e-9, "{schedule}: {rates:?}");
    }
}

/// Validation, samples and saves change nothing that is learned: not the weights, not the place in
/// the random stream, not which version a step reads.
#[test]
fn looking_at_a_run_changes_no_bit() {
    let run = Run::new("looking");
    let (model, data) = (run.model(), run.chats(30));
    let other = run.write(
        "other.jsonl",
        "{\"text\": \"The pier is long.\"}\n".repeat(5),
    );
    let other = format!("validation={other}");
    let train = |name: &str, looks: [&str; 4]| {
        let out = run.path(name);
        let mut arguments = vec!["train", &model, &data, "--out", &out, "steps=12", "batch=4"];
        arguments.extend([
            "method=lora",
            "lora_dropout=0.2",
            "neftune=5",
            "lag=1",
            "lr=0.01",
        ]);
        arguments.extend(["devices=cpu", "sample_tokens=3"]);
        arguments.extend(looks);
        assert_done(&program(&arguments));
        out
    };
    let never = [
        "validation=off",
        "eval_every=0",
        "sample_every=0",
        "save_every=1000",
    ];
    let blind = train("blind", never);
    let often = [
        other.as_str(),
        "eval_every=1",
        "sample_every=2",
        "save_every=1",
    ];
    let watched = train("watched", often);
    let (blind, watched) = (Path::new(&blind), Path::new(&watched));
    assert_eq!(losses(blind), losses(watched));
    assert_eq!(files(&blind.join("model")), files(&watched.join("model")));
    let records = metrics(watched);
    let count = |kind: &str| {
        records
            .iter()
            .filter(|record| record["type"] == kind)
            .count()
    };
    assert_eq!((count("eval"), count("save")), (12, 12));
}
