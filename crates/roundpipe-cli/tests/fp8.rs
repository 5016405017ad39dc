//! Projections in fp8, through the built program.

mod kit;

use std::process::Output;

use kit::{Run, files, losses, program, stopped_at, text};
use serde_json::Value;

fn refused(output: &Output, wanted: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(wanted), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

/// Runs learn, with the same losses and the same model for any workers, grain and stop; without fp8
/// the losses are others.
#[test]
fn runs_in_fp8_are_the_same_wherever_they_run() {
    let room = Run::new("fp8");
    let (model, data) = (room.model(), room.chats(24));
    let arguments = |out: &str, more: &[&str]| -> Vec<String> {
        let common = [
            "train",
            &model,
            &data,
            "--out",
            out,
            "--steps",
            "6",
            "seq=64",
            "batch=2",
            "microbatches=2",
            "lr=1e-2",
            "dtype=bf16",
            "sample_every=0",
            "save_every=3",
        ];
        let all = common.iter().chain(more);
        all.map(|word| (*word).to_owned()).collect()
    };
    let run = |name: &str, more: &[&str]| {
        let out = room.path(name);
        let all = arguments(&out, more);
        let words: Vec<&str> = all.iter().map(String::as_str).collect();
        let output = program(&words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        (losses(out.as_ref()), files(format!("{out}/model").as_ref()))
    };
    let one = run("one", &["--fp8", "--devices", "cpu"]);
    assert!(one.0.len() == 6 && one.0[5] < one.0[0], "{:?}", one.0);
    let settings = std::fs::read_to_string(room.path("one/run.toml")).unwrap();
    assert!(settings.contains("fp8 = true"), "{settings}");
    assert_ne!(run("without", &["--devices", "cpu"]).0, one.0);
    for devices in ["cpu:2", "cpu:3"] {
        for grain in ["stage", "layer"] {
            let name = format!("{}-{grain}", devices.replace(':', "-"));
            let grain = format!("grain={grain}");
            let got = run(&name, &["--fp8", "--devices", devices, &grain]);
            assert_eq!(got, one, "{name}");
        }
    }
    let out = room.path("stopped");
    let all = arguments(&out, &["--fp8", "--devices", "cpu"]);
    let words: Vec<&str> = all.iter().map(String::as_str).collect();
    stopped_at(&words, out.as_ref(), 2);
    let resumed = program(&["train", "--out", &out, "--devices", "cpu:2"]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    let model = files(format!("{out}/model").as_ref());
    assert_eq!((losses(out.as_ref()), model), one, "stopped and resumed");
}

#[test]
fn what_fp8_does_not_go_with_is_refused() {
    let room = Run::new("fp8-refused");
    let (model, data) = (room.model(), room.chats(8));
    let pair = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
    let pairs = room.write("pairs.jsonl", format!("{pair}\n").repeat(4));
    let out = room.path("out");
    let train = |data: &str, more: &[&str]| {
        let words = [
            "train",
            &model,
            data,
            "--fp8",
            "--out",
            &out,
            "--devices",
            "cpu",
        ];
        program(&[&words[..], more].concat())
    };
    let quantized = train(&data, &["--lora", "quantize=nf4"]);
    refused(&quantized, "leave fp8 or the quantized weights out");
    refused(&train(&pairs, &["--method", "dpo"]), "leave fp8 out");
    let plan = |gpus: &str| program(&["plan", "qwen3-0.6b", "--fp8", "--gpus", gpus]);
    refused(&plan("rtx3090"), "rtx3090");
    let bench = program(&["bench", "tiny", "--fp8", "--quantize", "nf4"]);
    assert_eq!(bench.status.code(), Some(2), "{}", text(&bench.stderr));
}

/// `bench` computes in fp8 and says so; a dry run counts the memory of codes and scratch.
#[test]
fn bench_and_plan_know_fp8() {
    let last = |words: &[&str]| -> Value {
        let output = program(words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap()
    };
    let tiny = [
        "bench",
        "tiny",
        "--batch",
        "2",
        "--seq",
        "32",
        "--steps",
        "1",
        "--warm-up",
        "0",
    ];
    let timed = |more: &[&str]| last(&[&tiny[..], &["--devices", "cpu"], more].concat());
    let (with, without) = (timed(&["--fp8"]), timed(&[]));
    assert_eq!(
        (&with["fp8"], &without["fp8"]),
        (&true.into(), &false.into())
    );
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!(loss(&with) != loss(&without), "{with} {without}");
    assert!((loss(&with) / loss(&without) - 1.0).abs() < 0.01);
    let plan = |more: &[&str]| {
        let words = [
            "plan",
            "qwen3-0.6b",
            "--gpus",
            "h200",
            "--host-memory",
            "64GiB",
            "batch=16",
            "seq=2048",
            "steps=10",
            "--json",
        ];
        let output = program(&[&words[..], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["prediction"]["speed"]["tokens_per_s"]
            .as_f64()
            .unwrap()
    };
    let gain = plan(&["--fp8"]) / plan(&[]);
    assert!((1.02..1.7).contains(&gain), "{gain}");
}
