//! What a test can keep of how the code reads.

use std::collections::HashSet;
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
    for file in all_files() {
        for (number, line) in text(&file).lines().enumerate() {
            let line = line.to_lowercase();
            let words = banned.iter().filter(|word| line.contains(**word));
            found.extend(words.map(|word| format!("{}:{}: {word}", file.display(), number + 1)));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

/// Kinds of devices matter where they are chosen; what a kind costs stands in its backend.
#[test]
fn kinds_of_devices_stay_in_their_places() {
    let allowed = ["devices.rs", "lib.rs"];
    let modules = [
        "exec", "engine", "cost", "store", "update", "search", "timeline", "trace", "wrap",
    ];
    for file in modules.iter().flat_map(|module| files(module)) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let is_used = without_comments(&text(&file)).contains("DeviceKind");
        assert!(!is_used || allowed.contains(&name), "{}", file.display());
    }
}

/// Every source file of the workspace.
fn all_files() -> Vec<PathBuf> {
    let folders = [
        "src",
        "../roundpipe-tensor/src",
        "../roundpipe-files/src",
        "../roundpipe-chat/src",
        "../roundpipe-models/src",
        "../roundpipe-data/src",
        "../roundpipe-report/src",
        "../roundpipe-train/src",
        "../roundpipe-cli/src",
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    folders
        .iter()
        .flat_map(|folder| files_below(root.join(folder)))
        .collect()
}

/// Names that follow one of `keywords` in code.
fn declared(code: &str, keywords: &[&str]) -> HashSet<String> {
    let mut words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    let mut names = HashSet::new();
    while let Some(word) = words.next() {
        if keywords.contains(&word)
            && let Some(name) = words.next().filter(|name| !name.is_empty())
        {
            names.insert(name.to_owned());
        }
    }
    names
}

/// A chapter of ARCHITECTURE.md, without the next.
fn chapter(title: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let text = fs::read_to_string(path).unwrap();
    let heading = format!("## {title}\n");
    let start = text.find(&heading).expect("the chapter") + heading.len();
    let end = text[start..].find("\n## ").map(|end| start + end);
    text[start..end.unwrap_or(text.len())].to_owned()
}

/// What stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

const TYPES: &[&str] = &["struct", "enum", "trait", "type"];

/// Names of types and functions in `text` that the sources do not have. `A::b` is a type and a
/// function of that name, or a variant; names with a dot are files.
fn unknown(text: &str) -> Vec<String> {
    let code: String = all_files()
        .iter()
        .map(|file| without_comments(&fs::read_to_string(file).unwrap()))
        .collect();
    let types = declared(&code, TYPES);
    let functions = declared(&code, &["fn"]);
    let words: HashSet<&str> = code
        .split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .collect();
    let mut unknown = Vec::new();
    for name in quoted(text) {
        if name.contains('.') || name.contains('/') {
            continue;
        }
        let (owner, member) = name.rsplit_once("::").unwrap_or((name, ""));
        let is_type = |word: &str| word.starts_with(char::is_uppercase);
        let owner_known = types.contains(owner) || (!is_type(owner) && words.contains(owner));
        let member_known = member.is_empty()
            || functions.contains(member)
            || (is_type(member) && words.contains(member));
        if !owner_known || !member_known {
            unknown.push(name.to_owned());
        }
    }
    unknown
}

/// The glossary and the walk name nothing that is gone.
#[test]
fn architecture_names_what_exists() {
    for title in ["Glossary", "A newcomer's walk of one batch"] {
        let text = chapter(title);
        assert!(text.lines().count() < 300, "{title} is too long to read");
        assert_eq!(unknown(&text), Vec::<String>::new(), "{title}");
        for file in quoted(&text)
            .into_iter()
            .filter(|name| name.ends_with(".rs"))
        {
            let exists = all_files().iter().any(|path| path.ends_with(file));
            assert!(exists || file.contains("tests/"), "{title}: {file}");
        }
    }
}

/// A reader of the engine finds its types in the glossary.
#[test]
fn the_engines_types_are_in_the_glossary() {
    let text = chapter("Glossary");
    let listed: HashSet<&str> = quoted(&text).into_iter().collect();
    let mut missing = Vec::new();
    for file in ["exec", "engine"].iter().flat_map(|module| files(module)) {
        let types = declared(&without_comments(&self::text(&file)), TYPES);
        missing.extend(
            types
                .into_iter()
                .filter(|name| !listed.contains(name.as_str())),
        );
    }
    missing.sort();
    assert!(missing.len() <= 10, "{missing:?}");
}
