//! Tests that need what a machine may not have say so when they are left out.
//!
//! The test runner hides what passing tests print, so lines go to the terminal directly. Every case
//! is also a line of `skipped.txt` in the target's folder for tests, which the CI counts.

use std::io::Write as _;

/// Says that a test was left out, and counts it.
#[allow(dead_code, reason = "not every test binary has whole tests to skip")]
pub fn skipped(what: &str, why: &str) {
    let _ = std::io::stderr().write_all(format!("skipped: {what}: {why}\n").as_bytes());
    counted(what, why);
}

/// Counts a case that was left out.
pub fn counted(what: &str, why: &str) {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/skipped.txt");
    let line = format!("{why}\t{what}\n");
    // In one piece, for tests run beside each other.
    let file = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path);
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}
