//! Frozen weights in 8 and 4 bits, through the built program.

mod kit;

use kit::{Run, losses, program, text};

/// LoRA beside codes learns, with the same losses for any number of workers, and its run is an
/// ordinary one afterwards.
#[test]
fn quantised_runs_learn_alike_on_any_number_of_workers() {
    let room = Run::new("quantize");
    let (model, data) = (room.model(), room.chats(24));
    let run = |how: &str, devices: &str| {
        let out = room.path(&format!("{how}-{}", devices.replace(':', "-")));
        let output = program(&[
            "train",
            &model,
            &data,
            "--lora",
            "--out",
            &out,
            "--steps",
            "4",
            "--devices",
            devices,
            &format!("quantize={how}"),
            "lora_rank=4",
            "seq=128",
            "batch=2",
            "microbatches=2",
            "lr=1e-2",
            "sample_every=0",
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        (losses(out.as_ref()), out)
    };
    for how in ["nf4", "int8"] {
        let (one, out) = run(how, "cpu");
        assert_eq!(one.len(), 4);
        assert!(one[3] < one[0], "{how}: {one:?}");
        assert_eq!(run(how, "cpu:2").0, one, "{how}");
        let settings = std::fs::read_to_string(format!("{out}/run.toml")).unwrap();
        assert!(
            settings.contains(&format!("quantize = \"{how}\"")),
            "{settings}"
        );
        let said = program(&[
            "generate",
            &out,
            "--prompt",
            "Where?",
            "--max-tokens",
            "4",
            "--devices",
            "cpu",
            "--quantize",
            how,
        ]);
        assert!(said.status.success(), "{}", text(&said.stderr));
    }
    let whole = room.path("whole");
    let refused = program(&[
        "train",
        &model,
        &data,
        "--out",
        &whole,
        "quantize=nf4",
        "--devices",
        "cpu",
    ]);
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{error}");
    let wanted = "quantized weights are not trained; add --lora";
    assert!(error.contains(wanted), "{error}");
    let refused = program(&[
        "train",
        &model,
        &data,
        "--lora",
        "--out",
        &whole,
        "quantize=int4",
    ]);
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("nf4") && error.contains("int8"), "{error}");
}

#[test]
fn bench_times_quantised_weights() {
    let args = [
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
        "--devices",
        "cpu",
        "--quantize",
        "nf4",
    ];
    let output = program(&[&args[..], &["--mode", "lora"]].concat());
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(shown.contains("linear layers in nf4"), "{shown}");
    let line: serde_json::Value = serde_json::from_str(shown.lines().last().unwrap()).unwrap();
    assert_eq!(line["quantize"], "nf4");
    let refused = program(&args);
    let error = text(&refused.stderr);
    assert!(!refused.status.success());
    assert!(
        error.contains("add --mode lora") && error.lines().count() == 1,
        "{error}"
    );
}
