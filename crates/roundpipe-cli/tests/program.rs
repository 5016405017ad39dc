//! The built program: what a user sees, and what bad input gives.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use roundpipe::{Cpu, DType, Device, Params, RingOptions};
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{GenerateOptions, Generator, LoraConfig, Model, SaveOptions, preset};

fn roundpipe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .args(args)
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One line on standard error, a failing status, nothing else.
#[test]
fn bad_input_gets_one_clear_line() {
    let out = std::env::temp_dir().join(format!("roundpipe-bad-{}", std::process::id()));
    let out = out.display().to_string();
    let cases: [(&[&str], &str); 3] = [
        (
            &["demo", "--out", &out, "--text", "/no/such/file"],
            "/no/such/file",
        ),
        (&["demo", "--out", &out, "--steps", "0"], "steps"),
        (&["demo", "--out", &out, "--workers", "0"], "--workers"),
    ];
    for (args, words) in cases {
        let output = roundpipe(args);
        let error = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert_eq!(error.lines().count(), 1, "{args:?}: {error}");
        assert!(
            error.starts_with("error: ") && error.contains(words),
            "{args:?}: {error}"
        );
    }
    std::fs::remove_dir_all(out).unwrap();
    assert_eq!(roundpipe(&["no-such-command"]).status.code(), Some(2));
}

/// A trace comes with the rates of copies, and behind the figures: where it cannot be written, none
/// is lost.
#[test]
fn a_trace_comes_last_and_says_how_fast_copies_were() {
    let path = std::env::temp_dir().join(format!("roundpipe-trace-{}.json", std::process::id()));
    let run = |path: &str| {
        let args = [
            "bench",
            "tiny",
            "--batch",
            "4",
            "--seq",
            "32",
            "--steps",
            "1",
            "--warm-up",
            "1",
        ];
        roundpipe(&[&args[..], &["--devices", "cpu", "--trace", path]].concat())
    };
    let good = run(&path.display().to_string());
    assert!(
        good.status.success() && text(&good.stderr).contains("gradient download: "),
        "{good:?}"
    );
    assert!(
        std::fs::read_to_string(&path)
            .unwrap()
            .contains("traceEvents")
    );
    std::fs::remove_file(path).unwrap();
    let bad = run("/no/such/folder/trace.json");
    assert!(
        !bad.status.success()
            && text(&bad.stderr)
                .lines()
                .last()
                .unwrap()
                .contains("/no/such/folder")
    );
    assert!(
        text(&bad.stdout)
            .lines()
            .last()
            .unwrap()
            .contains("tokens_per_s")
    );
}

/// Memory of a GPU is predicted on a machine without one: more tokens take more, and what does not
/// fit is refused.
#[test]
fn a_dry_run_says_what_a_step_takes_of_a_gpu() {
    let dry = |batch: &str, memory: &str| {
        let args = [
            "bench",
            "tiny",
            "--batch",
            batch,
            "--seq",
            "64",
            "--microbatches",
            "2",
            "--dry-run",
        ];
        roundpipe(&[&args[..], &["--gpu-memory", memory]].concat())
    };
    let peak = |batch: &str| {
        // A GiB beside the context.
        let output = dry(batch, "1664MiB");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let out = text(&output.stdout);
        let line: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!(line["dry_run"], true);
        line["gpu_peak_gib"].as_f64().unwrap()
    };
    let (small, large) = (peak("64"), peak("512"));
    assert!(
        small > 0.0 && large > 2.0 * small && large < 1.0,
        "{small} {large}"
    );
    let refused = dry("4096", "16MiB");
    assert!(!refused.status.success() && text(&refused.stderr).lines().count() == 1);
    let both = roundpipe(&["bench", "tiny", "--dry-run", "--devices", "cpu"]);
    assert!(text(&both.stderr).contains("--dry-run"));
    assert!(text(&roundpipe(&["bench", "tiny", "--dry-run"]).stderr).contains("--gpu-memory"));
}

/// Full and LoRA steps on the processor; the figures agree with each other.
#[test]
fn bench_ends_with_a_line_of_json() {
    let args = [
        "bench",
        "tiny",
        "--batch",
        "4",
        "--seq",
        "32",
        "--steps",
        "2",
        "--warm-up",
        "1",
        "--dtype",
        "f32",
    ];
    for more in [
        &["--devices", "cpu:2", "--lag", "0", "--pin", "off"][..],
        &["--devices", "cpu", "--documents", "8"],
        &[
            "--devices",
            "cpu",
            "--pin",
            "alloc",
            "--mode",
            "lora",
            "--rank",
            "4",
            "--grain",
            "layer",
        ][..],
    ] {
        let output = roundpipe(&[&args[..], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let out = text(&output.stdout);
        let line: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        for key in [
            "tokens_per_s",
            "seconds_per_step",
            "host_peak_gib",
            "share_of_floor",
            "loss",
        ] {
            assert!(line[key].as_f64().unwrap() > 0.0, "{key}: {out}");
        }
        let rate =
            line["tokens_per_s"].as_f64().unwrap() * line["seconds_per_step"].as_f64().unwrap();
        assert!((rate / 128.0 - 1.0).abs() < 0.05, "{out}");
    }
}

/// What the commands refuse, each in one line.
#[test]
fn commands_say_what_they_cannot_use() {
    let folder = std::env::temp_dir().join(format!("roundpipe-no-model-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    for (args, word) in [
        (vec!["bench", "qwen9-1b"], "qwen3-1.7b"),
        (vec!["bench", "tiny", "--devices", "tpu"], "cuda:N"),
        (vec!["bench", "tiny", "--documents", "0"], "--documents"),
        (
            vec!["bench", "tiny", "--seq", "0", "--devices", "cpu"],
            "at least 1",
        ),
        (
            vec![
                "bench",
                "tiny",
                "--optimizer-threads",
                "0",
                "--devices",
                "cpu",
            ],
            "--optimizer-threads",
        ),
        (
            vec!["bench", "tiny", "--microbatches", "0", "--devices", "cpu"],
            "--microbatches",
        ),
        (
            vec!["generate", folder, "--prompt", "hi", "--devices", "cpu"],
            "config.json",
        ),
        (
            vec![
                "generate",
                "/no/such/folder",
                "--prompt",
                "hi",
                "--devices",
                "cpu",
            ],
            "/no/such/folder",
        ),
        (
            vec!["generate", folder, "--prompt", "hi", "--temperature=-1"],
            "--temperature",
        ),
        (
            vec!["generate", folder, "--prompt", "hi", "--top-p", "1.5"],
            "--top-p",
        ),
    ] {
        let output = roundpipe(&args);
        let error = text(&output.stderr);
        assert!(
            !output.status.success() && error.contains(word),
            "{args:?}: {error}"
        );
        assert_eq!(error.trim_end().lines().count(), 1, "{args:?}: {error}");
    }
    std::fs::remove_dir(folder).unwrap();
}

/// Numbers that no machine can do anything with: one line each, before anything is made of them.
#[test]
fn absurd_numbers_get_one_line() {
    let max = usize::MAX.to_string();
    let max = max.as_str();
    let cpu = ["--devices", "cpu"];
    let bench = |args: &[&'static str]| [&["bench", "tiny"], args, &cpu].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["demo", "--workers", max], "--workers"),
        (
            [&["bench", "tiny", "--batch", max][..], &cpu].concat(),
            "--batch",
        ),
        (
            [&["bench", "tiny", "--batch", max, "--seq", max][..], &cpu].concat(),
            "--batch",
        ),
        (bench(&["--batch", "100000000000"]), "--batch"),
        (
            [&["bench", "tiny", "--batch", "1", "--seq", max][..], &cpu].concat(),
            "--batch",
        ),
        (
            bench(&["--batch", "1", "--seq", "2000000000"]),
            "2000000000",
        ),
        (
            [&["bench", "tiny", "--microbatches", max][..], &cpu].concat(),
            "--microbatches",
        ),
        (
            bench(&["--optimizer-threads", "100000"]),
            "--optimizer-threads",
        ),
        (
            bench(&[
                "--batch",
                "1",
                "--seq",
                "8",
                "--mode",
                "lora",
                "--rank",
                "18446744073709551615",
            ]),
            "rank",
        ),
        (bench(&["--clip=-1"]), "--clip"),
        (bench(&["--clip", "nan"]), "--clip"),
        (
            vec!["bench", "tiny", "--devices", "cpu:100000"],
            "--devices",
        ),
    ];
    for (args, word) in cases {
        let output = roundpipe(&args);
        let error = text(&output.stderr);
        assert!(
            output
                .status
                .code()
                .is_some_and(|code| code == 1 || code == 2),
            "{args:?}: {error}"
        );
        let last = error
            .lines()
            .find(|line| line.starts_with("error: "))
            .unwrap_or_default();
        assert!(
            last.contains(word) && !error.contains("panicked"),
            "{args:?}: {error}"
        );
    }
}

/// What the program writes is what the library generates, with an adapter and without.
#[test]
fn generate_writes_what_the_model_says() {
    let folder = std::env::temp_dir().join(format!("roundpipe-generate-{}", std::process::id()));
    let tokens = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fixtures/chat/tokenizers/byte_level"
    );
    let tokenizer = Tokenizer::open(Path::new(tokens)).unwrap();
    let size =
        serde_json::json!({ "vocab_size": tokenizer.vocab_size(), "max_position_embeddings": 64 });
    let mut model =
        Model::random(preset("tiny").unwrap().with(&size).unwrap(), DType::F32, 5).unwrap();
    let copy_from = Some(tokens.into());
    model
        .save(
            folder.join("model"),
            SaveOptions {
                copy_from,
                ..SaveOptions::default()
            },
        )
        .unwrap();
    let ask = |more: &[&str]| {
        let model = folder.join("model");
        let args = [
            "generate",
            model.to_str().unwrap(),
            "--prompt",
            "hello",
            "--max-tokens",
            "9",
        ];
        let output = roundpipe(&[&args[..], &["--devices", "cpu"], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let expected = |model: &Model| {
        let prompt = tokenizer.encode("hello", true).unwrap();
        let devices: [Arc<dyn Device>; 1] = [Cpu::new(None).unwrap()];
        let generator = Generator::new(model, &devices, &RingOptions::default()).unwrap();
        let options = GenerateOptions {
            max_tokens: 9,
            stop: tokenizer.eos().to_vec(),
            ..Default::default()
        };
        let (said, _) = generator
            .generate(&prompt, &options, |_| ControlFlow::Continue(()))
            .unwrap();
        tokenizer.decode(&said, true).unwrap() + "\n"
    };
    let plain = expected(&model);
    assert_eq!(ask(&["--raw"]), plain);
    model
        .add_lora(&LoraConfig {
            rank: 4,
            ..LoraConfig::default()
        })
        .unwrap();
    for (name, param) in model.trainable_params() {
        if name.contains("lora_B") {
            let home = param.data();
            let mut bytes = home.write(0..home.len()).unwrap();
            bytes
                .as_mut_slice::<f32>()
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = (i % 7) as f32 - 3.0);
        }
    }
    model.save_adapter(folder.join("adapter")).unwrap();
    let adapted = expected(&model);
    assert_ne!(adapted, plain, "the adapter says nothing of its own");
    assert_eq!(
        ask(&[
            "--raw",
            "--adapter",
            folder.join("adapter").to_str().unwrap()
        ]),
        adapted
    );
    std::fs::remove_dir_all(folder).unwrap();
}

/// The guide's chapter on the program names all commands and options that there are, and no others.
#[test]
fn the_guide_names_what_the_program_has() {
    let chapter = include_str!("../../../docs/src/program.md");
    let (commands, common) = chapter.split_once("## Where it runs").unwrap();
    for section in commands.split("## `roundpipe ").skip(1) {
        let (command, section) = section.split_once('`').unwrap();
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let mut offered = options(&text(&roundpipe(&words).stdout));
        let has_engine = offered.contains("--pin");
        let common = if has_engine { common } else { "" };
        let mut named = options(section);
        named.extend(options(common));
        offered.remove("--help");
        assert_eq!(named, offered, "{command}");
    }
    let help = text(&roundpipe(&["--help"]).stdout);
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let offered = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let name = line.split_whitespace().next()?;
            (name != "help").then(|| name.to_owned())
        });
    let named: Vec<String> = commands
        .split("## `roundpipe ")
        .skip(1)
        .filter_map(|section| section.split(['`', ' ']).next().map(str::to_owned))
        .collect();
    assert_eq!(offered.collect::<Vec<_>>(), named);
}

/// The words of a text that are options.
fn options(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let options = words.filter(|word| word.starts_with("--") && word.len() > 3);
    options.map(str::to_owned).collect()
}
