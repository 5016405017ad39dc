//! The user's guide beside the code: chapters that are listed and tested, and the table of
//! environment variables. rustdoc runs the programs in it (`src/guide.rs`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn chapter(name: &str) -> String {
    fs::read_to_string(root().join("docs/src").join(name)).unwrap()
}

/// The names of chapters in a text: links of a summary, or literals of a source file.
fn chapters_in(text: &str) -> BTreeSet<String> {
    let words = text.split(['(', ')', '"']);
    let files = words.filter(|word| word.ends_with(".md") && !word.contains('/'));
    files.map(str::to_owned).collect()
}

/// A chapter that the book does not list is not read; one that rustdoc does not see is not tested.
#[test]
fn every_chapter_is_listed_and_tested() {
    let entries = fs::read_dir(root().join("docs/src")).unwrap();
    let mut chapters: BTreeSet<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "images")
        .collect();
    assert!(chapters.remove("SUMMARY.md"));
    assert!(chapters.len() > 15, "{chapters:?}");
    assert_eq!(chapters_in(&chapter("SUMMARY.md")), chapters);
    let tested = fs::read_to_string(root().join("crates/roundpipe-models/src/guide.rs")).unwrap();
    assert_eq!(chapters_in(&tested), chapters);
}

/// rustdoc runs blocks marked `rust` alone, and compiles those with `no_run`. A mark that makes it
/// look away, or none at all, would leave a program untested.
#[test]
fn every_block_says_what_it_is() {
    let known = ["rust", "rust,no_run", "sh", "toml", "python"];
    for name in chapters_in(&chapter("SUMMARY.md")) {
        let text = chapter(&name);
        let fences = text.lines().filter_map(|line| line.strip_prefix("```"));
        let marks: Vec<&str> = fences.step_by(2).collect();
        for mark in marks {
            assert!(known.contains(&mark), "{name}: a block is marked `{mark}`");
        }
    }
}

/// A link to a chapter or a picture leads somewhere, and to a heading of it if it names one.
#[test]
fn links_between_chapters_lead_somewhere() {
    let chapters = chapters_in(&chapter("SUMMARY.md"));
    for name in &chapters {
        let text = chapter(name);
        for link in text.split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            if !file.ends_with(".md") {
                let is_there = root().join("docs/src").join(link).is_file();
                assert!(link.starts_with("https://") || is_there, "{name}: {link}");
                continue;
            }
            assert!(chapters.contains(file), "{name}: {link}");
            let target = chapter(file);
            let headings = target.lines().filter_map(|line| line.strip_prefix("## "));
            let mut ids = headings.map(|heading| heading.to_lowercase().replace(' ', "-"));
            assert!(heading.is_empty() || ids.any(|id| id == heading), "{link}");
        }
    }
}

/// Every variable that the sources read stands in the table, and no other.
#[test]
fn the_table_of_variables_is_complete() {
    let mut read = BTreeSet::new();
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        if code.contains("env::var") {
            read.extend(quoted_variables(code));
        }
    }
    let table = chapter("environment.md");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let first_cells = rows.map(|row| row.split('|').nth(1).unwrap());
    let listed: BTreeSet<String> = first_cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    assert!(read.len() > 15, "{read:?}");
    assert_eq!(listed, read);
}

/// Source files of all crates, without those that hold tests only.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let mut folders: Vec<PathBuf> = crates
        .map(|each| each.unwrap().path().join("src"))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_rust = path.extension().is_some_and(|kind| kind == "rs");
            if path.is_dir() {
                folders.push(path);
            } else if is_rust && path.file_stem().is_some_and(|name| name != "tests") {
                found.push(path);
            }
        }
    }
    found
}

/// Texts in quotes that look like the name of a variable, in code that reads some.
fn quoted_variables(code: &str) -> BTreeSet<String> {
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let quoted = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
    let is_name = |text: &&str| {
        text.len() > 3
            && text
                .chars()
                .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
    };
    let names = quoted.filter(is_name).filter(|name| *name != "TRUE");
    names.map(str::to_owned).collect()
}
