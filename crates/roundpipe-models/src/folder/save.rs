//! From parameters into a folder that transformers opens unchanged.
//!
//! Tensors are written in the layout of the folder, piece by piece, through one small buffer: no
//! file is ever in memory. Every file is complete and on the disk under a temporary name before the
//! first of them gets its own, and the index comes last, so that a folder with an index has all its
//! shards.
//!
//! Refused: a folder that already holds something, unless `overwrite` says so.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use roundpipe::{DType, HostRef};
use roundpipe_files::atomic::{AtomicFile, sync_folder};
use roundpipe_files::error::{unreadable, unwritten};
use roundpipe_files::small;
use roundpipe_files::text::shown;
use roundpipe_files::weights::{PlannedTensor, header_bytes};
use serde_json::{Value, json};

use super::convert::{Float, for_float, write_plain, write_transposed};
use super::load::check_entries;
use super::{INDEX, SINGLE};
use crate::entry::{Entry, Piece, PieceLayout};
use crate::error::{Error, Result};
use crate::limits;

/// Bytes that are put together before they are written.
const BUFFER: usize = 8 << 20;

/// Files that belong to a model beside its weights and `config.json`.
const COMPANIONS: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "LICENSE",
];

/// What a user may choose about saving.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// The most bytes of tensors in one file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// The type to save floats in; by default each parameter's own.
    pub dtype: Option<DType>,
    /// What `config.json` says, apart from the type of the weights; null for no such file.
    pub config: Value,
    /// A folder whose tokenizer, chat template and generation settings are copied.
    pub copy_from: Option<PathBuf>,
    /// Replaces the model in a folder that is not empty; other files there stay.
    pub overwrite: bool,
}

impl Default for SaveOptions {
    fn default() -> Self {
        let max_shard_bytes = 5_000_000_000;
        Self {
            max_shard_bytes,
            dtype: None,
            config: Value::Null,
            copy_from: None,
            overwrite: false,
        }
    }
}

/// Writes the parameters of `entries` into the folder `dir`, which is made if it is not there.
///
/// # Errors
/// [`Error::File`] when the folder is not empty or cannot be written; it then holds what it held
/// before. [`Error::Argument`] for entries or options that cannot work; [`Error::Tensor`] while a
/// parameter is written.
pub fn save(dir: impl AsRef<Path>, entries: &[Entry], options: &SaveOptions) -> Result<()> {
    let dir = dir.as_ref();
    let shards = plan(entries, options)?;
    let made = prepare(dir, options.overwrite)?;
    let result = write_all(dir, &shards, options);
    if result.is_err() && made {
        // Only what this call made is taken away, and only while it is empty.
        let _ = std::fs::remove_dir(dir);
    }
    result
}

/// One tensor to write.
#[derive(Clone, Copy)]
struct Part<'a> {
    entry: &'a Entry,
    piece: &'a Piece,
    dtype: DType,
}

impl Part<'_> {
    fn planned(&self) -> PlannedTensor {
        PlannedTensor {
            name: self.piece.tensor.clone(),
            dtype: self.dtype,
            dims: self.piece.dims.clone(),
        }
    }

    fn bytes(&self) -> u64 {
        (self.piece.numel() * self.dtype.size()) as u64
    }
}

/// Which tensors go into which file; nothing is touched yet.
fn plan<'a>(entries: &'a [Entry], options: &SaveOptions) -> Result<Vec<Vec<Part<'a>>>> {
    check_entries(entries)?;
    if let Some(dtype) = options.dtype.filter(|d| !d.is_float()) {
        return Err(Error::argument(
            "dtype",
            format!("weights cannot be saved as {dtype}; use a float type"),
        ));
    }
    let mut seen = HashSet::new();
    let mut shards: Vec<Vec<Part<'_>>> = vec![Vec::new()];
    let mut room = options.max_shard_bytes;
    for (entry, piece) in entries
        .iter()
        .flat_map(|e| e.pieces.iter().map(move |p| (e, p)))
    {
        if !seen.insert(&piece.tensor) {
            let why = "two pieces are saved under this name; give each its own";
            return Err(Error::argument(
                format!("tensor {}", shown(&piece.tensor)),
                why,
            ));
        }
        let own = entry.param.dtype();
        let part = Part {
            entry,
            piece,
            dtype: options.dtype.filter(|_| own.is_float()).unwrap_or(own),
        };
        let shard = shards.last_mut().expect("never empty");
        if part.bytes() > room && !shard.is_empty() {
            shards.push(vec![part]);
            room = options.max_shard_bytes.saturating_sub(part.bytes());
        } else {
            shard.push(part);
            room = room.saturating_sub(part.bytes());
        }
    }
    for shard in &mut shards {
        // Wide types first: every tensor then starts at a multiple of its own element.
        shard.sort_by_key(|part| std::cmp::Reverse(part.dtype.size()));
    }
    Ok(shards)
}

/// Makes the folder; gives whether it was not there before.
fn prepare(dir: &Path, overwrite: bool) -> Result<bool> {
    if let Ok(meta) = std::fs::metadata(dir) {
        if !meta.is_dir() {
            return Err(Error::file(dir, "is a file; choose a folder to save into"));
        }
        let mut held = std::fs::read_dir(dir).map_err(|e| Error::file(dir, unreadable(dir, &e)))?;
        if held.next().is_some() && !overwrite {
            return Err(Error::file(
                dir,
                "is not empty; choose another folder or pass overwrite",
            ));
        }
        return Ok(false);
    }
    std::fs::create_dir_all(dir).map_err(|e| unwritten(dir, &e))?;
    Ok(true)
}

/// Writes every file under a temporary name, then gives them theirs.
fn write_all(dir: &Path, shards: &[Vec<Part<'_>>], options: &SaveOptions) -> Result<()> {
    let names: Vec<String> = match shards.len() {
        1 => vec![SINGLE.into()],
        n => (1..=n)
            .map(|i| format!("model-{i:05}-of-{n:05}.safetensors"))
            .collect(),
    };
    let mut ready = companions(dir, shards, options)?;
    for (name, parts) in names.iter().zip(shards) {
        ready.push(write_shard(&dir.join(name), parts)?);
    }
    if shards.len() > 1 {
        ready.push(write_json(&dir.join(INDEX), &index(&names, shards))?);
    }
    put_in_place(dir, ready, &names)?;
    sync_folder(dir)?;
    Ok(())
}

/// Gives the new files their names; from here on only names change. What was there comes back
/// unless all of them got theirs.
fn put_in_place(dir: &Path, ready: Vec<AtomicFile>, names: &[String]) -> Result<()> {
    let mut aside = Aside::default();
    // An old index goes first: it must never name new shards.
    aside.take(dir.join(INDEX))?;
    for path in stale(dir, names)? {
        aside.take(path)?;
    }
    for partial in &ready {
        aside.take(partial.target().to_path_buf())?;
    }
    for partial in ready {
        aside.placed.push(partial.target().to_path_buf());
        partial.finish()?;
    }
    aside.forget();
    Ok(())
}

/// Shards of a model that was here before, which would be taken for part of this one.
fn stale(dir: &Path, names: &[String]) -> Result<Vec<PathBuf>> {
    let listing = std::fs::read_dir(dir).map_err(|e| Error::file(dir, unreadable(dir, &e)))?;
    let is_shard =
        |n: &String| n == SINGLE || (n.starts_with("model-") && n.ends_with(".safetensors"));
    let found = listing
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned());
    Ok(found
        .filter(|n| is_shard(n) && !names.contains(n))
        .map(|n| dir.join(n))
        .collect())
}

/// Old files under other names, which get theirs back when this is dropped.
#[derive(Default)]
struct Aside {
    taken: Vec<(PathBuf, PathBuf)>,
    placed: Vec<PathBuf>,
}

impl Aside {
    fn take(&mut self, path: PathBuf) -> Result<()> {
        let Ok(meta) = path.symlink_metadata() else {
            return Ok(());
        };
        if meta.is_dir() {
            return Err(Error::file(
                path,
                "is a folder, so the model was not saved; remove it or choose another",
            ));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let away = path.with_file_name(format!(".{name}.{}.old", std::process::id()));
        std::fs::rename(&path, &away).map_err(|e| unwritten(&path, &e))?;
        self.taken.push((path, away));
        Ok(())
    }

    /// All went well: the old files are not wanted any more.
    fn forget(mut self) {
        for (_, away) in self.taken.drain(..) {
            // One that stays is hidden and does no harm.
            let _ = std::fs::remove_file(away);
        }
        self.placed.clear();
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        for path in self.placed.drain(..) {
            let _ = std::fs::remove_file(path);
        }
        for (path, away) in self.taken.drain(..).rev() {
            let _ = std::fs::rename(away, path);
        }
    }
}

/// `config.json` and the copied files.
fn companions(
    dir: &Path,
    shards: &[Vec<Part<'_>>],
    options: &SaveOptions,
) -> Result<Vec<AtomicFile>> {
    let mut ready = Vec::new();
    for name in COMPANIONS {
        let Some(src) = options
            .copy_from
            .as_ref()
            .map(|d| d.join(name))
            .filter(|p| p.is_file())
        else {
            continue;
        };
        let bytes = small::read(&src, limits::VOCABULARY)?;
        ready.push(AtomicFile::of_bytes(&dir.join(name), &bytes)?);
    }
    if !options.config.is_null() {
        ready.push(write_json(
            &dir.join("config.json"),
            &config(&options.config, shards),
        )?);
    }
    Ok(ready)
}

/// The given configuration, true for these files: the type that most bytes have, and no
/// quantisation.
fn config(given: &Value, shards: &[Vec<Part<'_>>]) -> Value {
    let mut config = given.clone();
    let Some(map) = config.as_object_mut() else {
        return config;
    };
    map.shift_remove("quantization_config");
    let bytes_as = |d: DType| {
        shards
            .iter()
            .flatten()
            .filter(|p| p.dtype == d)
            .map(Part::bytes)
            .sum::<u64>()
    };
    let named = [
        (DType::F64, "float64"),
        (DType::F16, "float16"),
        (DType::BF16, "bfloat16"),
        (DType::F32, "float32"),
    ];
    let name = named
        .into_iter()
        .max_by_key(|(d, _)| bytes_as(*d))
        .map_or("float32", |(_, name)| name);
    // The key has an older name; whichever is there must not contradict the files.
    let old = map.contains_key("torch_dtype");
    let keys = [
        old.then_some("torch_dtype"),
        (!old || map.contains_key("dtype")).then_some("dtype"),
    ];
    for key in keys.into_iter().flatten() {
        map.insert(key.into(), name.into());
    }
    config
}

fn write_json(path: &Path, value: &Value) -> Result<AtomicFile> {
    Ok(AtomicFile::of_bytes(
        path,
        format!("{value:#}\n").as_bytes(),
    )?)
}

fn index(names: &[String], shards: &[Vec<Part<'_>>]) -> Value {
    let total: u64 = shards.iter().flatten().map(Part::bytes).sum();
    let map: BTreeMap<&str, &str> = names
        .iter()
        .zip(shards)
        .flat_map(|(name, parts)| {
            parts
                .iter()
                .map(move |p| (p.piece.tensor.as_str(), name.as_str()))
        })
        .collect();
    json!({ "metadata": { "total_size": total }, "weight_map": map })
}

fn write_shard(path: &Path, parts: &[Part<'_>]) -> Result<AtomicFile> {
    let plan: Vec<PlannedTensor> = parts.iter().map(Part::planned).collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = header_bytes(&metadata, &plan)?;
    let partial = AtomicFile::create(path)?;
    let mut file = partial.file()?;
    partial.check(file.write_all(&header))?;
    let mut out = Sink {
        partial: &partial,
        file,
        buffer: Vec::new(),
        held: None,
    };
    for part in parts {
        out.write_part(part)?;
    }
    drop(out);
    partial.sync()?;
    Ok(partial)
}

/// A file that is written through one buffer.
struct Sink<'a> {
    partial: &'a AtomicFile,
    file: File,
    buffer: Vec<u8>,
    /// The last parameter, if its values are made on read: its other pieces follow.
    held: Option<(u64, HostRef)>,
}

impl Sink<'_> {
    fn write_part(&mut self, part: &Part<'_>) -> Result<()> {
        let param = &part.entry.param;
        let size = param.dtype().size();
        let at = part.piece.at * size;
        let home = param.data();
        if home.stays_in_file() && self.held.as_ref().is_none_or(|(id, _)| *id != home.id()) {
            self.held = None;
            self.held = Some((home.id(), home.read_all()?));
        }
        let range = at..at + part.piece.numel() * size;
        let src = home.read(range.clone())?;
        self.write_values(part, &src)?;
        // The pages of a mapped file are not needed again.
        Ok(home.let_go(range)?)
    }

    fn write_values(&mut self, part: &Part<'_>, src: &HostRef) -> Result<()> {
        let param = &part.entry.param;
        let transposed = part.piece.layout != PieceLayout::Plain;
        if !transposed && part.dtype == param.dtype() {
            self.partial.check(self.file.write_all(src.bytes()))?;
            return Ok(());
        }
        let written = for_float!(param.dtype(), |S| for_float!(
            part.dtype,
            |D| if transposed {
                self.write_transposed::<S, D>(src.as_slice::<S>(), &part.piece.dims)
            } else {
                self.write_plain::<S, D>(src.as_slice::<S>())
            }
        ));
        written.flatten().expect("checked: only floats are changed")
    }

    fn write_plain<S: Float, D: Float>(&mut self, src: &[S]) -> Result<()> {
        for src in src.chunks(BUFFER / size_of::<D>()) {
            self.flush(src.len() * size_of::<D>(), |out| {
                write_plain::<S, D>(src, out)
            })?;
        }
        Ok(())
    }

    fn write_transposed<S: Float, D: Float>(&mut self, src: &[S], dims: &[usize]) -> Result<()> {
        let [.., rows, cols] = *dims else {
            unreachable!("checked: two or more dimensions")
        };
        if rows * cols == 0 {
            return Ok(());
        }
        let line = cols * size_of::<D>();
        let each = (BUFFER / line).max(1);
        for src in src.chunks_exact(rows * cols) {
            for first in (0..rows).step_by(each) {
                let count = each.min(rows - first);
                self.flush(count * line, |out| {
                    write_transposed::<S, D>(src, first, cols, out)
                })?;
            }
        }
        Ok(())
    }

    /// Has `fill` put `bytes` bytes together and writes them.
    fn flush(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.buffer.resize(self.buffer.len().max(bytes), 0);
        fill(&mut self.buffer[..bytes]);
        self.partial
            .check(self.file.write_all(&self.buffer[..bytes]))?;
        Ok(())
    }
}
