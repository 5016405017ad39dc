//! A model's folder as Hugging Face lays it out: one safetensors file, or shards named by an index.
//!
//! [`Folder::open`] maps and checks every file; [`load`] fills parameters from it and [`save`]
//! writes parameters into a folder that transformers opens unchanged. Which tensor belongs where is
//! said by [`Entry`](crate::Entry) values; this module moves bytes and knows no model.
//!
//! Refused: pickled weights, shard names that leave the folder, an index that does not match its
//! shards.

mod convert;
mod load;
mod quantized;
mod save;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub(crate) use load::load_all;
pub use load::{LoadOptions, LoadReport, load};
pub(crate) use quantized::{QuantizedEntry, is_quantized, not_taken, stored_form, take_widened};
pub use save::{SaveOptions, save};

use roundpipe_files::error::unreadable;
use roundpipe_files::small::{self, StringMap};
use roundpipe_files::text::{one_line, shown};
use roundpipe_files::{View, Weights};

use crate::error::{Error, Result};
use crate::limits;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The weights of a folder, mapped and checked.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    shards: Vec<Weights>,
    /// Which shard holds a tensor.
    by_name: HashMap<String, usize>,
}

impl Folder {
    /// Opens a folder, one safetensors file, or an index with its shards.
    ///
    /// # Errors
    /// [`Error::File`] naming the file that cannot be used, why, and what helps.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).map_err(|e| Error::file(path, unreadable(path, &e)))?;
        let file = if meta.is_dir() {
            find_weights(path)?
        } else {
            path.to_path_buf()
        };
        if file.extension().is_some_and(|e| e == "json") {
            Self::sharded(&file)
        } else {
            Self::single(&file)
        }
    }

    fn single(file: &Path) -> Result<Self> {
        let weights = Weights::open(file)?;
        let by_name = weights
            .tensors()
            .iter()
            .map(|t| (t.name.clone(), 0))
            .collect();
        Ok(Self {
            path: file.to_path_buf(),
            shards: vec![weights],
            by_name,
        })
    }

    fn sharded(index: &Path) -> Result<Self> {
        let map = read_index(index)?;
        let dir = index.parent().unwrap_or(Path::new(""));
        let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &map {
            by_shard.entry(shard).or_default().push(tensor);
        }
        let missing: Vec<_> = by_shard.keys().filter(|s| !dir.join(s).exists()).collect();
        if let Some(first) = missing.first() {
            let what = format!(
                "is missing ({} of {} shards are); download it again",
                missing.len(),
                by_shard.len()
            );
            return Err(Error::file(dir.join(first), what));
        }
        let mut shards = Vec::new();
        for (shard, tensors) in &by_shard {
            let weights = Weights::open(dir.join(shard))?;
            if let Some(name) = tensors.iter().find(|t| weights.stored(t).is_none()) {
                let what = format!(
                    "has no tensor {}, the index says it does; download both again",
                    shown(name)
                );
                return Err(Error::file(weights.path(), what));
            }
            shards.push(weights);
        }
        let by_name = name_shards(&shards, &map)?;
        Ok(Self {
            path: index.to_path_buf(),
            shards,
            by_name,
        })
    }

    /// The file that names the weights: the single file or the index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files.
    pub fn shards(&self) -> &[Weights] {
        &self.shards
    }

    /// Names of all tensors, file by file, in the order of their bytes.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.shards
            .iter()
            .flat_map(|s| s.tensors())
            .map(|t| t.name.as_str())
    }

    /// A tensor's type, shape and bytes.
    pub fn tensor(&self, name: &str) -> Option<View<'_>> {
        self.shard_of(name)?.view(name)
    }

    /// The file that holds a tensor.
    pub fn shard_of(&self, name: &str) -> Option<&Weights> {
        self.by_name.get(name).map(|i| &self.shards[*i])
    }
}

/// Which shard each tensor is in; a tensor in two files has no meaning.
fn name_shards(shards: &[Weights], map: &[(String, String)]) -> Result<HashMap<String, usize>> {
    let named: HashMap<&str, &str> = map.iter().map(|(t, s)| (t.as_str(), s.as_str())).collect();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = shard.path().file_name().unwrap_or_default();
        for tensor in shard.tensors() {
            let elsewhere = named.get(tensor.name.as_str()).is_some_and(|s| file != *s);
            if elsewhere || by_name.insert(tensor.name.clone(), i).is_some() {
                let what = format!(
                    "holds tensor {}, and so does another shard; save the model anew",
                    shown(&tensor.name)
                );
                return Err(Error::file(shard.path(), what));
            }
        }
    }
    Ok(by_name)
}

/// Tensor and shard names of an index.
pub(crate) fn read_index(path: &Path) -> Result<Vec<(String, String)>> {
    parse_index(path, &small::read(path, limits::INDEX)?)
}

/// Tensor and shard names from the bytes of an index, the latter checked to stay in the folder;
/// `path` is only for messages.
///
/// # Errors
/// [`Error::File`] when it is no index, names no tensors, or names files elsewhere.
pub fn parse_index(path: &Path, bytes: &[u8]) -> Result<Vec<(String, String)>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: StringMap,
    }
    let fail = |what: String| Error::file(path, what);
    if bytes.starts_with(b"version https://git-lfs") {
        return Err(fail(
            "is a Git LFS pointer; run `git lfs pull` in its folder, or download it again".into(),
        ));
    }
    let index: Index = serde_json::from_slice(bytes).map_err(|e| {
        fail(format!(
            "is no index of shards ({}); download it again",
            one_line(&e.to_string())
        ))
    })?;
    let map = index.weight_map.0;
    if map.is_empty() {
        return Err(fail("names no tensors; download it again".into()));
    }
    if let Some((_, shard)) = map.iter().find(|(_, shard)| !is_plain_name(shard)) {
        let what = format!(
            "names a shard {}, which is not a plain file name; use an index whose shards lie beside it",
            shown(shard)
        );
        return Err(fail(what));
    }
    if let Some((_, shard)) = map
        .iter()
        .find(|(_, shard)| !shard.ends_with(".safetensors"))
    {
        let what = format!(
            "names {}, which is not safetensors; convert it with transformers' save_pretrained",
            shown(shard)
        );
        return Err(fail(what));
    }
    Ok(map)
}

/// Whether a name is one file beside the one that names it, on every system.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let odd = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty() && name != "." && name != ".." && !name.contains(odd) && name.len() < 256
}

/// The file that names a folder's weights; transformers looks in this order too.
fn find_weights(dir: &Path) -> Result<PathBuf> {
    for name in [SINGLE, INDEX] {
        // A broken link is there, too: opening it says so.
        if dir.join(name).symlink_metadata().is_ok() {
            return Ok(dir.join(name));
        }
    }
    let listing = std::fs::read_dir(dir).map_err(|e| Error::file(dir, unreadable(dir, &e)))?;
    let mut names: Vec<String> = listing
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let indexes: Vec<_> = names
        .iter()
        .filter(|n| n.ends_with(".safetensors.index.json"))
        .collect();
    if let [only] = indexes[..] {
        return Ok(dir.join(only));
    }
    Err(Error::file(dir, no_weights(&names)))
}

/// Why a folder with these files has no usable weights.
fn no_weights(names: &[String]) -> String {
    let ending = |ends: &[&str]| names.iter().find(|n| ends.iter().any(|e| n.ends_with(e)));
    if let Some(name) = ending(&[".safetensors"]) {
        return format!(
            "has no {SINGLE}; pass the file itself if {} is meant",
            shown(name)
        );
    }
    if let Some(name) = ending(&[".bin", ".pt", ".pth", ".bin.index.json"]) {
        let name = shown(name);
        return format!(
            "has only pickled weights ({name}); convert them with transformers' save_pretrained"
        );
    }
    if let Some(name) = ending(&[".gguf", ".h5", ".msgpack", ".onnx"]) {
        return format!(
            "has no {SINGLE}, only {}; use the model's safetensors files",
            shown(name)
        );
    }
    format!("has no {SINGLE} and no {INDEX}; check the path or download the model again")
}
