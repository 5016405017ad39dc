//! `roundpipe verify` as a user runs it, on the processor and simulated devices.

use serde_json::Value;

mod kit;
use kit::{program, text};

/// A preset: one JSON value on standard output, the same in the report, and every claim holds.
#[test]
fn a_model_is_verified_and_a_report_is_left() {
    let report = std::env::temp_dir().join(format!("roundpipe-verify-{}.json", std::process::id()));
    let arguments = [
        "verify",
        "tiny",
        "--quick",
        "--devices",
        "cpu",
        "--json",
        "--report",
    ];
    let output = program(&[&arguments[..], &[report.to_str().unwrap()]].concat());
    let error = text(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}\n{error}",
        text(&output.stdout)
    );
    let printed: Value = serde_json::from_slice(&output.stdout).expect(&error);
    let written: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    std::fs::remove_file(report).unwrap();
    assert_eq!(printed, written);
    assert_eq!(printed["holds"], true);
    assert!(printed["values"].as_u64().unwrap() > 1_000_000, "{printed}");
    let comparisons = printed["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 13);
    let skipped = comparisons.iter().filter(|c| c["outcome"] == "skipped");
    assert_eq!(skipped.count(), 1, "only a GPU is missing here");
}

#[test]
fn what_cannot_be_verified_gets_one_line() {
    for (arguments, code, word) in [
        (&["verify", "--devices", "tpu"][..], 2, "cuda:N"),
        (
            &["verify", "/no/such/model", "--devices", "cpu"],
            1,
            "/no/such/model",
        ),
        (
            &[
                "verify",
                "--report",
                "/no/such/folder/file",
                "--quick",
                "--devices",
                "tpu",
            ],
            2,
            "tpu",
        ),
    ] {
        let output = program(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(
            error.contains(word) && error.lines().count() == 1,
            "{error}"
        );
    }
}
