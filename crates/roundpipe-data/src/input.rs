//! What a user names as data: files and folders, each with a weight, and the files that they mean.
//!
//! # Invariants
//! - The files of a folder come in the order of their names, whatever order the system lists them
//!   in.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Endings that are taken from a folder, before `.gz` or `.zst`.
const ENDINGS: [&str; 7] = ["jsonl", "ndjson", "json", "csv", "tsv", "txt", "parquet"];
/// Folders within folders.
const DEEPEST: usize = 8;
/// The most files of a run.
const MOST_FILES: usize = 100_000;

/// A file or folder of examples, and how often an epoch takes its rows.
///
/// ```
/// use roundpipe_data::Input;
/// let input = Input::parse("chats.jsonl=0.5").unwrap();
/// assert_eq!((input.path.to_str().unwrap(), input.weight), ("chats.jsonl", 0.5));
/// assert_eq!(Input::parse("chats.jsonl").unwrap().weight, 1.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The file or folder.
    pub path: PathBuf,
    /// 1: every row once an epoch; 0.5: half of them, others each epoch; 2: every row twice.
    pub weight: f64,
}

impl Input {
    /// Reads `PATH` or `PATH=WEIGHT`. A file whose own name has `=` in it wins.
    ///
    /// # Errors
    /// [`Error::Setting`] for a weight that is not a number above 0.
    pub fn parse(text: &str) -> Result<Self> {
        let whole = Self {
            path: text.into(),
            weight: 1.0,
        };
        let Some((path, weight)) = text.rsplit_once('=') else {
            return Ok(whole);
        };
        if Path::new(text).exists() {
            return Ok(whole);
        }
        let weight: f64 = weight.trim().parse().map_err(|_| {
            let why = format!("`{weight}` is no number; write PATH=WEIGHT, as in chats.jsonl=0.5");
            Error::setting("weight", why)
        })?;
        check_weight(weight)?;
        Ok(Self {
            path: path.into(),
            weight,
        })
    }
}

impl<P: Into<PathBuf>> From<P> for Input {
    fn from(path: P) -> Self {
        Self {
            path: path.into(),
            weight: 1.0,
        }
    }
}

fn check_weight(weight: f64) -> Result<()> {
    if weight.is_finite() && weight > 0.0 && weight <= 1000.0 {
        return Ok(());
    }
    let why = format!("{weight} is not above 0 and at most 1000; 1 takes every row once an epoch");
    Err(Error::setting("weight", why))
}

/// The files of all inputs, each with its weight.
pub(crate) fn expand(inputs: &[Input]) -> Result<Vec<Input>> {
    let mut files = Vec::new();
    for input in inputs {
        check_weight(input.weight)?;
        let meta = std::fs::metadata(&input.path).map_err(|e| {
            let what = roundpipe_files::error::unreadable(&input.path, &e);
            Error::file(&input.path, what)
        })?;
        if !meta.is_dir() {
            files.push(input.clone());
            continue;
        }
        let before = files.len();
        walk(&input.path, input.weight, 0, &mut files)?;
        if files.len() == before {
            let what = format!(
                "has no file of examples; they end in .{} (and .gz or .zst)",
                ENDINGS.join(", .")
            );
            return Err(Error::file(&input.path, what));
        }
    }
    if files.is_empty() {
        return Err(Error::setting("data", "no file is given; name one or more"));
    }
    Ok(files)
}

fn walk(folder: &Path, weight: f64, depth: usize, files: &mut Vec<Input>) -> Result<()> {
    let fail = |e: std::io::Error| {
        let what = roundpipe_files::error::unreadable(folder, &e);
        Error::file(folder, what)
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    for path in paths {
        if path.is_dir() {
            if depth == DEEPEST {
                let what = format!("has more than {DEEPEST} folders within folders; name files");
                return Err(Error::file(folder, what));
            }
            walk(&path, weight, depth + 1, files)?;
        } else if ENDINGS.contains(&ending(&path).as_str()) {
            files.push(Input { path, weight });
        }
        if files.len() > MOST_FILES {
            let what = format!("has more than {MOST_FILES} files; join them into fewer");
            return Err(Error::file(folder, what));
        }
    }
    Ok(())
}

/// The ending of a name without that of its compression, in small letters.
pub(crate) fn ending(path: &Path) -> String {
    let lower = |path: &Path| {
        let ending = path.extension().unwrap_or_default();
        ending.to_string_lossy().to_ascii_lowercase()
    };
    let last = lower(path);
    if ["gz", "gzip", "zst", "zstd"].contains(&last.as_str()) {
        return lower(&path.with_extension(""));
    }
    last
}
