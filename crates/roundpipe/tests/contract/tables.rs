//! The tables say the truth: every row that claims something names tests of the workspace, and every
//! other row says why.
//!
//! A row has four columns: the item, what it is here, how the two compare, and tests or files of
//! measurements between backquotes, or a reason. This module reads sources; it runs none of the
//! tests.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A row of a table.
struct Row {
    line: usize,
    item: String,
    status: String,
    proof: String,
}

fn here(file: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/contract").join(file)
}

fn rows(file: &str) -> Vec<Row> {
    let text = fs::read_to_string(here(file)).unwrap();
    let lines = text.lines().enumerate();
    let rows = lines.filter(|(_, line)| {
        line.starts_with("| ") && !line.starts_with("| item") && !line.starts_with("|---")
    });
    rows.map(|(number, line)| row(file, number + 1, line))
        .collect()
}

fn row(file: &str, line: usize, text: &str) -> Row {
    let columns: Vec<&str> = text.trim_matches('|').split(" | ").map(str::trim).collect();
    let [item, _, status, proof] = columns[..] else {
        panic!("{file}:{line}: {} columns, not 4", columns.len())
    };
    let [item, status, proof] = [item, status, proof].map(str::to_owned);
    Row {
        line,
        item,
        status,
        proof,
    }
}

/// Every file of Rust below the crates.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

/// The names of all test functions in the workspace.
fn tests() -> HashSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    sources(&crates, &mut files);
    let mut names = HashSet::new();
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" {
                is_test = true;
            } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| is_test) {
                let name = rest.split('(').next().unwrap_or_default();
                names.insert(name.to_owned());
                is_test = false;
            }
        }
    }
    names
}

/// What stands between backquotes and could be the name of a test, or a file of the repository.
fn named(proof: &str) -> Vec<&str> {
    let quoted = proof.split('`').skip(1).step_by(2);
    let is_name = |name: &&str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        is_file(name) || (name.contains('_') && name.chars().all(plain))
    };
    quoted.filter(is_name).collect()
}

fn is_file(name: &str) -> bool {
    name.contains('/')
}

fn exists(name: &str, tests: &HashSet<String>) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if is_file(name) {
        root.join(name).is_file()
    } else {
        tests.contains(name)
    }
}

/// What is wrong with the rows of a file.
fn faults(file: &str, proven: &[&str], explained: &[&str]) -> Vec<String> {
    let tests = tests();
    assert!(tests.len() > 500, "{} tests", tests.len());
    let mut faults = Vec::new();
    for row in rows(file) {
        let names = named(&row.proof);
        let unknown = names.iter().find(|name| !exists(name, &tests));
        let status = row.status.as_str();
        let fault = if let Some(name) = unknown {
            format!("there is no `{name}`")
        } else if proven.contains(&status) && names.is_empty() {
            "it names no test".to_owned()
        } else if explained.contains(&status) && row.proof.split_whitespace().count() < 4 {
            "it gives no reason".to_owned()
        } else if !proven.contains(&status) && !explained.contains(&status) {
            format!("`{status}` is no status")
        } else {
            continue;
        };
        faults.push(format!("{file}:{}: {}: {fault}", row.line, row.item));
    }
    faults
}

/// How many rows have each of the words as their status.
fn count<const N: usize>(file: &str, words: [&str; N]) -> [usize; N] {
    let rows = rows(file);
    words.map(|word| rows.iter().filter(|row| row.status == word).count())
}

/// The published pages: every class, method, option, default, rule and promise.
#[test]
fn every_published_item_is_proven_or_explained() {
    let faults = faults(
        "rows.md",
        &["same", "better"],
        &["differs", "not here", "not measured"],
    );
    assert_eq!(faults, Vec::<String>::new());
    assert_eq!(rows("rows.md").len(), 162);
}

/// The table's own account of itself is what its rows add up to.
#[test]
fn the_summary_counts_the_rows() {
    let text = fs::read_to_string(here("rows.md")).unwrap();
    let words = ["same", "better", "differs", "not here", "not measured"];
    let [same, better, differs, absent, unmeasured] = count("rows.md", words);
    let summary = format!(
        "162 items: {same} same, {better} better, {differs} differ, {absent} are not here, \
         {unmeasured} are not measured."
    );
    assert!(text.contains(&summary), "rows.md should say: {summary}");
}

/// The test suite of the Python package: every parametrised case.
#[test]
fn every_case_of_the_reference_is_translated_or_explained() {
    let faults = faults("cases.md", &["translated"], &["in part", "not here"]);
    assert_eq!(faults, Vec::<String>::new());
    assert_eq!(rows("cases.md").len(), 69);
    let text = fs::read_to_string(here("cases.md")).unwrap();
    let [translated, partly, absent] = count("cases.md", ["translated", "in part", "not here"]);
    let summary =
        format!("69 cases: {translated} translated, {partly} in part, {absent} not here.");
    assert!(text.contains(&summary), "cases.md should say: {summary}");
}
