//! What a test can keep of how the code reads.

use std::fs;
use std::path::{Path, PathBuf};

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The files of a module: `name.rs` and everything below `name/`.
fn files(name: &str) -> Vec<PathBuf> {
    let mut found = files_below(src().join(name));
    found.push(src().join(format!("{name}.rs")));
    found.retain(|path| path.exists());
    found
}

/// Every source file in a folder and those below it.
fn files_below(folder: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(folder) else {
            continue;
        };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.retain(|path| path.extension().is_some_and(|kind| kind == "rs"));
    found
}

/// The text of a file without its tests.
fn text(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let end = text.find("#[cfg(test)]").unwrap_or(text.len());
    text[..end].to_owned()
}

fn without_comments(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// `lib.rs` lists modules in the order of data: each uses only those above it. Errors name types of
/// other modules and are used by all.
#[test]
fn modules_use_only_those_above_them() {
    let lib = fs::read_to_string(src().join("lib.rs")).unwrap();
    let modules: Vec<&str> = lib
        .lines()
        .filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod "))
        .filter_map(|name| name.strip_suffix(';'))
        .collect();
    assert!(modules.len() > 15, "{modules:?}");
    let mut upward = Vec::new();
    for (index, module) in modules
        .iter()
        .enumerate()
        .filter(|(_, name)| **name != "error")
    {
        for file in files(module) {
            let code = without_comments(&text(&file));
            for below in &modules[index + 1..] {
                if code.contains(&format!("crate::{below}::")) {
                    upward.push(format!("{} uses {below}", file.display()));
                }
            }
        }
    }
    assert_eq!(upward, Vec::<String>::new());
}

/// Comments and messages name who acts.
#[test]
fn the_sources_speak_plainly() {
    let banned = [
        "nobody",
        "somebody",
        "whoever",
        "everybody",
        "is told",
        "are told",
        "was told",
        "one's own",
    ];
    let mut found = Vec::new();
    for folder in [
        "src",
        "../roundpipe-tensor/src",
        "../roundpipe-files/src",
        "../roundpipe-chat/src",
        "../roundpipe-models/src",
        "../roundpipe-cli/src",
    ] {
        for file in files_below(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)) {
            for (number, line) in text(&file).lines().enumerate() {
                let line = line.to_lowercase();
                let words = banned.iter().filter(|word| line.contains(**word));
                found
                    .extend(words.map(|word| format!("{}:{}: {word}", file.display(), number + 1)));
            }
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// Kinds of devices matter where they are chosen; what a kind costs stands in its backend.
#[test]
fn kinds_of_devices_stay_in_their_places() {
    let allowed = ["devices.rs", "lib.rs", "planner.rs"];
    let modules = [
        "exec", "engine", "cost", "store", "update", "search", "timeline", "trace", "wrap",
    ];
    for file in modules.iter().flat_map(|module| files(module)) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let is_used = without_comments(&text(&file)).contains("DeviceKind");
        assert!(!is_used || allowed.contains(&name), "{}", file.display());
    }
}
