//! `roundpipe train --method dpo` and `orpo` as they are built: PyTorch's losses, bits that repeat,
//! what an interruption leaves, what is refused.

mod kit;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kit::{Run, files, last_step, losses, metrics, program, stopped_at, text};
use serde_json::{Value, json};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");

fn assert_done(output: &Output) {
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{error}");
}

/// The fixture's model with its tokenizer.
fn golden_model(run: &Run) -> String {
    let folder = run.path("golden");
    std::fs::create_dir_all(&folder).unwrap();
    let files = [
        "dpo/model.safetensors",
        "dpo/config.json",
        "chat/tokenizers/byte_level/tokenizer.json",
        "chat/tokenizers/byte_level/tokenizer_config.json",
    ];
    for file in files {
        let from = Path::new(FIXTURES).join(file);
        let to = Path::new(&folder).join(from.file_name().unwrap());
        std::fs::copy(&from, to).unwrap();
    }
    folder
}

/// Twenty steps of each loss are those of PyTorch on the same pairs: fixtures/make_dpo.py. The largest
/// difference of a loss was 1.9e-6.
#[test]
fn losses_are_those_of_pytorch() {
    let run = Run::new("dpo-golden");
    let model = golden_model(&run);
    let pairs = format!("{FIXTURES}/dpo/pairs.jsonl");
    let expected = std::fs::read(format!("{FIXTURES}/dpo/expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    for (name, case) in expected["cases"].as_object().unwrap() {
        let out = run.path(name);
        let settings = case["settings"].as_object().unwrap().iter();
        let settings: Vec<String> = settings
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let mut arguments = vec!["train", &model, &pairs, "--out", &out, "microbatches=3"];
        arguments.extend([
            "devices=cpu:2",
            "dtype=f32",
            "shuffle=false",
            "schedule=constant",
        ]);
        arguments.extend(["warmup=0", "clip=0", "validation=off", "sample_every=0"]);
        arguments.extend(["save_every=1000"]);
        arguments.extend(settings.iter().map(String::as_str));
        assert_done(&program(&arguments));
        let records = metrics(Path::new(&out));
        let steps: Vec<&Value> = records.iter().filter(|r| r["type"] == "step").collect();
        let wanted = case["steps"].as_array().unwrap();
        assert_eq!((steps.len(), wanted.len()), (20, 20), "{name}");
        for (step, (found, wanted)) in (1..).zip(steps.iter().zip(wanted)) {
            let far = |ours: &str, theirs: &str| {
                let numbers = (found[ours].as_f64(), wanted[theirs].as_f64());
                (numbers.0.unwrap() - numbers.1.unwrap()).abs()
            };
            let difference = far("loss", "loss");
            assert!(difference < 1e-4, "{name}, step {step}: {found} {wanted}");
            let margin = far("reward_margin", "margin");
            assert!(margin < 1e-3, "{name}, step {step}: {found} {wanted}");
            // Before the first update both are the same, and a rounding decides.
            let counts = step > 1 || name == "orpo";
            assert!(
                !counts || far("reward_accuracy", "accuracy") < 1e-9,
                "{name}, step {step}"
            );
        }
    }
}

/// Conversations with two answers each.
fn pairs(run: &Run, count: usize) -> String {
    let row = |number: usize| {
        let asked = json!([{"role": "user", "content": format!("Where is ship {number}?")}]);
        let said = |text: String| json!([{"role": "assistant", "content": text}]);
        json!({
            "prompt": asked,
            "chosen": said("It passes by the pier. ".repeat(1 + number % 4)),
            "rejected": said("No ship is there. ".repeat(1 + number % 3)),
        })
    };
    let rows: String = (0..count)
        .map(|number| format!("{}\n", row(number)))
        .collect();
    run.write("pairs.jsonl", rows)
}

/// Workers, interruptions and the reference that is read again leave no trace.
#[test]
fn a_run_repeats_on_any_workers_and_goes_on_with_its_bits() {
    let run = Run::new("dpo-exact");
    let (model, data) = (run.model(), pairs(&run, 30));
    for (name, settings) in [
        ("full", vec!["lag=1", "dpo_label_smoothing=0.1"]),
        ("lora", vec!["--lora", "lora_dropout=0.1", "dpo_loss=ipo"]),
    ] {
        let arguments = |out: &str, more: &[&str]| -> Vec<String> {
            let mut all = vec!["train", &model, &data, "--method", "dpo", "--out", out];
            all.extend([
                "steps=40",
                "batch=4",
                "microbatches=2",
                "save_every=3",
                "lr=1e-3",
            ]);
            all.extend(["validation=4", "eval_every=10", "sample_every=0"]);
            all.extend(settings.iter().chain(more));
            all.into_iter().map(str::to_owned).collect()
        };
        let train = |out: &str, more: &[&str]| {
            let arguments = arguments(out, more);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            program(&arguments)
        };
        let whole = run.path(&format!("{name}-whole"));
        let first = train(&whole, &["devices=cpu"]);
        assert_done(&first);
        let said = text(&first.stdout);
        for part in [
            "what the model says of 30 pairs before training",
            "rows of preference pairs",
            "% right)",
            "  chosen:\n",
            "  rejected:\n",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let cut = run.path(&format!("{name}-cut"));
        let start = arguments(&cut, &["devices=cpu:2"]);
        let start: Vec<&str> = start.iter().map(String::as_str).collect();
        let mut stopped = stopped_at(&start, Path::new(&cut), 5);
        for _ in 0..9 {
            if !stopped.status.success() {
                break;
            }
            // It was over before it was stopped.
            std::fs::remove_dir_all(&cut).unwrap();
            stopped = stopped_at(&start, Path::new(&cut), 5);
        }
        assert_eq!(stopped.status.code(), Some(4), "{}", text(&stopped.stderr));
        let going_on = train(&cut, &["devices=cpu:3", "grain=layer"]);
        assert_done(&going_on);
        assert!(!text(&going_on.stdout).contains("before training"));
        let (whole, cut) = (Path::new(&whole), Path::new(&cut));
        assert_eq!(losses(whole), losses(cut), "{name}");
        assert_eq!(
            files(&whole.join("model")),
            files(&cut.join("model")),
            "{name}"
        );
        let reference = |run: &Path| std::fs::read(run.join("reference.safetensors")).unwrap();
        assert_eq!(reference(whole), reference(cut), "{name}");
        let records = metrics(whole);
        let evals: Vec<&Value> = records.iter().filter(|r| r["type"] == "eval").collect();
        assert_eq!(evals.len(), 4);
        assert!(
            evals.iter().all(|eval| eval["reward_accuracy"].is_f64()),
            "{evals:?}"
        );
        let found = losses(whole);
        assert!(found[39] < found[0], "{found:?}");
    }
}

/// A run that is killed before its reference is there, before its first checkpoint and later ends
/// with the bytes of one that nobody disturbed.
#[test]
fn kills_leave_nothing_that_matters() {
    let run = Run::new("dpo-kills");
    let (model, data) = (run.model(), pairs(&run, 120));
    let command = |out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roundpipe"));
        command.args(["train", &model, &data, "--method", "dpo", "--out", out]);
        command.args([
            "steps=24",
            "batch=3",
            "microbatches=2",
            "save_every=5",
            "lr=1e-3",
        ]);
        command.args(["validation=off", "sample_every=0", "devices=cpu:2"]);
        command
    };
    let (whole, killed) = (run.path("whole"), run.path("killed"));
    assert_done(&command(&whole).output().unwrap());
    let (whole, out) = (Path::new(&whole), Path::new(&killed));
    let moments: [&dyn Fn() -> bool; 4] = [
        &|| out.join("run.toml").exists(),
        &|| out.join("reference.safetensors").exists(),
        &|| last_step(out, "step") >= 7,
        &|| last_step(out, "step") >= 15,
    ];
    for moment in moments {
        let mut child = command(&killed)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() && !moment() {
            assert!(
                start.elapsed() < Duration::from_secs(300),
                "nothing happens"
            );
            std::thread::sleep(Duration::from_micros(500));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_done(&command(&killed).output().unwrap());
    assert_eq!(losses(whole), losses(out));
    assert_eq!(files(&whole.join("model")), files(&out.join("model")));
}

/// The number of microbatches changes no more than rounding, for losses over pairs and over tokens.
#[test]
fn microbatches_change_only_rounding() {
    let run = Run::new("dpo-parts");
    let (model, data) = (run.model(), pairs(&run, 12));
    for method in ["dpo", "orpo"] {
        let train = |parts: &str| {
            let out = run.path(&format!("{method}-{parts}"));
            let mut arguments = vec!["train", &model, &data, "--method", method, "--out", &out];
            arguments.extend(["steps=4", "batch=6", parts, "lr=1e-3", "devices=cpu"]);
            arguments.extend(["validation=off", "sample_every=0"]);
            assert_done(&program(&arguments));
            losses(Path::new(&out))
        };
        let (one, five) = (train("microbatches=1"), train("microbatches=5"));
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(
            one.iter().zip(&five).all(is_near),
            "{method}: {one:?} {five:?}"
        );
    }
}

/// A reference of other data is refused where a run goes on; one that is damaged is computed again.
#[test]
fn a_reference_belongs_to_its_model_and_data() {
    let run = Run::new("dpo-reference");
    let (model, data) = (run.model(), pairs(&run, 12));
    let out = run.path("run");
    let train = |steps: &str| {
        let mut arguments = vec!["train", &model, &data, "--method", "dpo", "--out", &out];
        arguments.extend([steps, "batch=2", "lr=1e-3", "devices=cpu", "validation=off"]);
        arguments.extend(["sample_every=0", "save_every=1"]);
        program(&arguments)
    };
    assert_done(&train("steps=2"));
    let file = Path::new(&out).join("reference.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let mut broken = whole.clone();
    let last = broken.len() - 3;
    broken[last] ^= 1;
    std::fs::write(&file, &broken).unwrap();
    let again = train("steps=3");
    assert_done(&again);
    assert!(
        text(&again.stdout).contains("it is computed again"),
        "{}",
        text(&again.stdout)
    );
    assert_eq!(std::fs::read(&file).unwrap(), whole);
    // Other words of the same length.
    let rows = std::fs::read_to_string(&data).unwrap();
    std::fs::write(&data, rows.replace("pier", "dock")).unwrap();
    let refused = train("steps=4");
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(error.contains("is of another model, other data"), "{error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    std::fs::write(&data, rows).unwrap();
    assert_done(&train("steps=4"));
}

/// Settings and data that do not go together are refused in one line, before anything is read.
#[test]
fn what_does_not_go_together_is_refused() {
    let run = Run::new("dpo-refused");
    let (model, data, chats) = (run.model(), pairs(&run, 4), run.chats(4));
    let odd = json!({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"});
    let odd = run.write("odd.jsonl", odd.to_string());
    for (arguments, code, says) in [
        (vec![&data], 2, "add --method dpo or orpo"),
        (
            vec![&chats, "--method", "dpo"],
            2,
            "`chosen` and `rejected`",
        ),
        (vec![&data, "--method", "dpo", "dpo_beta=0"], 2, "dpo_beta"),
        (
            vec![&data, "--method", "dpo", "dpo_label_smoothing=0.5"],
            2,
            "dpo_label_smoothing",
        ),
        (
            vec![&data, "--method", "dpo", "label_smoothing=0.1"],
            2,
            "dpo_label_smoothing",
        ),
        (
            vec![&data, "--method", "orpo", "too_long=split"],
            2,
            "cut or drop",
        ),
        (
            vec![&data, "--method", "orpo", "learn=everything"],
            2,
            "answers alone",
        ),
        (vec![&data, "method=dpo"], 2, "objective=dpo"),
        (
            vec![&odd, "--method", "dpo"],
            1,
            "odd.jsonl: row 1: its `chosen`",
        ),
    ] as [(Vec<&str>, i32, &str); 9]
    {
        let out = run.path("refused");
        let mut all = vec!["train", &model, "--out", &out, "steps=1", "devices=cpu"];
        all.extend(&arguments);
        let output = program(&all);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(says), "{arguments:?}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
        assert!(!Path::new(&out).exists(), "{arguments:?} left a folder");
    }
}
