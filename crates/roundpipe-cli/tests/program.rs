//! The built program: what a user sees, and what bad input gives.

use std::process::{Command, Output};

fn roundpipe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roundpipe")).args(args).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Losses as the step lines print them.
fn losses(output: &Output) -> Vec<f64> {
    let lines = text(&output.stdout);
    let number = |line: &str| line.split("loss ").nth(1)?.split_whitespace().next()?.parse().ok();
    lines.lines().filter(|l| l.starts_with("step")).filter_map(number).collect()
}

#[test]
fn the_demo_learns_repeats_and_keeps_its_promise_of_memory() {
    let args = ["demo", "--steps", "12", "--batch", "4", "--sample", "10"];
    let one = roundpipe(&[&args[..], &["--threads", "1"]].concat());
    let two = roundpipe(&[&args[..], &["--threads", "2"]].concat());
    assert!(one.status.success(), "{}", text(&one.stderr));
    let (first, second) = (losses(&one), losses(&two));
    assert_eq!(first, second, "1 and 2 threads print the same losses");
    assert!(first.len() >= 10 && first[first.len() - 1] < first[0] - 1.0, "{first:?}");
    let out = text(&one.stdout);
    assert!(out.contains("before training:") && out.contains("after training:"), "{out}");
    let last = out.lines().last().unwrap();
    let sizes: Vec<&str> = last.split(": ").nth(1).unwrap().split(", ").collect();
    assert_eq!(sizes[0].trim_end_matches(" predicted"), sizes[1].trim_end_matches(" used"), "{last}");
}

/// One line on standard error, a failing status, nothing else.
#[test]
fn bad_input_gets_one_clear_line() {
    let short = std::env::temp_dir().join(format!("roundpipe-short-{}", std::process::id()));
    std::fs::write(&short, "too short").unwrap();
    let short = short.display().to_string();
    let cases: [(&[&str], &str); 4] = [
        (&["demo", "--text", "/no/such/file"], "/no/such/file"),
        (&["demo", "--text", &short], "too few"),
        (&["demo", "--steps", "0"], "--steps"),
        (&["demo", "--lr", "nan", "--steps", "1", "--batch", "1", "--sample", "1"], "learning rate"),
    ];
    for (args, words) in cases {
        let output = roundpipe(args);
        let error = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert_eq!(error.lines().count(), 1, "{args:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(words), "{args:?}: {error}");
    }
    std::fs::remove_file(short).unwrap();
    assert_eq!(roundpipe(&["no-such-command"]).status.code(), Some(2));
}
