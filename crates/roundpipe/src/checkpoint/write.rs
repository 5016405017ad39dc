//! A checkpoint, written: tensors from the memory they live in to the page cache, hashed on the
//! way; then flushes, then the rename.
//!
//! Every tensor is read once, in chunks that stay in a core's cache between hash and copy. As soon
//! as the last tensor of a layer is in the page cache its hold is dropped, and the optimizer may
//! write the layer; flushes come behind that. Only what a slow disk has not taken by then is copied
//! in memory, as far as there is some to spare ([`SpareMemory`]).
//!
//! # Invariants
//! - A save that fails leaves no file, and lets all layers go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use roundpipe_files::weights::{PlannedTensor, header_bytes};
use roundpipe_files::{AtomicFolder, Disk, DiskFile, Hash128, SystemDisk};

pub use super::copy::SpareMemory;
pub(crate) use super::copy::{SourceBytes, SplitGuards, TensorSource};
use super::copy::{TensorJob, copy};
use super::manifest::{Manifest, SavedFile, SavedTensor};
pub use super::shards::ShardLimits;
use super::shards::{LANES, deal, file_name};
use super::{MANIFEST, SaveProgress, SaveReport};
use crate::error::{Error, Result};

/// Where a checkpoint goes, and how.
pub struct SaveTarget {
    /// The folder.
    pub path: PathBuf,
    /// Who writes it.
    pub disk: Arc<dyn Disk>,
    /// When files are cut.
    pub limits: ShardLimits,
    /// Memory for what the disk has not taken yet.
    pub spare: SpareMemory,
    /// What is done once it is complete.
    pub then: Option<Box<dyn FnOnce() -> Result<()> + Send>>,
    /// What an error adds about others.
    pub stays: Option<String>,
}

impl SaveTarget {
    /// A folder of the system, with files of the usual size.
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
            disk: Arc::new(SystemDisk),
            limits: ShardLimits::default(),
            spare: SpareMemory::default(),
            then: None,
            stays: None,
        }
    }
}

impl std::fmt::Debug for SaveTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SaveTarget({})", self.path.display())
    }
}

/// A moment of a run, as it is to be written.
pub(crate) struct Snapshot {
    /// Without files, tensors and hash.
    pub manifest: Manifest,
    /// In the order in which they are to be let go.
    pub tensors: Vec<TensorSource>,
}

/// A file being written.
struct OpenFile {
    file: Box<dyn DiskFile>,
    lane: usize,
    header: Vec<u8>,
    bytes: u64,
}

/// What a save came to.
pub(crate) struct Written {
    pub report: SaveReport,
    /// What failed behind the save itself: the checkpoint is complete.
    pub warning: Option<Error>,
}

/// Writes a snapshot; `progress` learns when all of it is copied.
pub(crate) fn write(
    mut target: SaveTarget,
    snapshot: Snapshot,
    progress: &SaveProgress,
) -> Result<Written> {
    let start = Instant::now();
    let then = target.then.take();
    let bytes = write_folder(&target, snapshot, progress).map_err(|error| match error {
        Error::Checkpoint { path, what } => {
            let others = target.stays.as_ref();
            let others = others.map_or(String::new(), |stays| format!(", and {stays}"));
            let what = format!("{what}; training goes on{others}");
            Error::Checkpoint { path, what }
        }
        other => other,
    })?;
    let warning = then.and_then(|then| then().err());
    let report = SaveReport {
        bytes,
        seconds: start.elapsed().as_secs_f64(),
        held_up_seconds: 0.0,
    };
    Ok(Written { report, warning })
}

/// Writes the folder; the bytes of its files.
fn write_folder(target: &SaveTarget, snapshot: Snapshot, progress: &SaveProgress) -> Result<u64> {
    let Snapshot {
        mut manifest,
        tensors,
    } = snapshot;
    refuse_other_folder(&target.path)?;
    let folder = AtomicFolder::create(target.disk.clone(), &target.path)?;
    let sizes: Vec<u64> = tensors.iter().map(|t| t.len() as u64).collect();
    let shards = deal(&sizes, target.limits);
    let files = open_files(&folder, &tensors, &shards.files, &shards.lanes)?;
    manifest.tensors = saved_tensors(&tensors, &shards.files);
    let jobs = place(tensors, &shards.files, &files);
    let open: Vec<&dyn DiskFile> = files.iter().map(|file| &*file.file).collect();
    let hashes = copy(&folder, &open, jobs, target.spare)?;
    progress.set_copied();
    for (tensor, hash) in manifest.tensors.iter_mut().zip(hashes) {
        tensor.hash = hash.to_string();
    }
    manifest.tensors.sort_by_key(|tensor| tensor.file);
    manifest.files = finish_files(&folder, &files)?;
    let manifest = manifest.seal()?;
    let file = folder.create_file(MANIFEST)?;
    folder.check(file.write_at(&manifest, 0))?;
    folder.check(file.flush())?;
    folder.finish()?;
    Ok(files.iter().map(|file| file.bytes).sum::<u64>() + manifest.len() as u64)
}

/// Refuses to replace what is no checkpoint.
pub(crate) fn refuse_other_folder(path: &Path) -> Result<()> {
    let is_ours = |name: &String| {
        let inner = name.strip_prefix("state-");
        let number = inner.and_then(|inner| inner.strip_suffix(".safetensors"));
        name == MANIFEST || number.is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit()))
    };
    let Ok(meta) = path.symlink_metadata() else {
        return Ok(());
    };
    let what = "is there already and is no checkpoint; choose another name";
    if !meta.is_dir() {
        return Err(Error::checkpoint(path, what));
    }
    match roundpipe_files::folder::names(path)?.iter().all(is_ours) {
        true => Ok(()),
        false => Err(Error::checkpoint(path, what)),
    }
}

fn saved_tensors(tensors: &[TensorSource], files: &[usize]) -> Vec<SavedTensor> {
    let saved = tensors.iter().zip(files).map(|(tensor, file)| SavedTensor {
        name: tensor.name.clone(),
        file: *file,
        dtype: tensor.dtype.to_string(),
        shape: tensor.shape.dims().to_vec(),
        hash: String::new(),
    });
    saved.collect()
}

/// Makes all files in their full length.
fn open_files(
    folder: &AtomicFolder,
    tensors: &[TensorSource],
    file_of: &[usize],
    lanes: &[usize],
) -> Result<Vec<OpenFile>> {
    let mut plans = vec![Vec::new(); lanes.len()];
    for (tensor, file) in tensors.iter().zip(file_of) {
        plans[*file].push(PlannedTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            dims: tensor.shape.dims().to_vec(),
        });
    }
    let mut files = Vec::with_capacity(plans.len());
    for (index, plan) in plans.iter().enumerate() {
        let header = header_bytes(&BTreeMap::new(), plan)?;
        let content = tensors.iter().zip(file_of);
        let content = content.filter(|(_, file)| **file == index);
        let content: u64 = content.map(|(tensor, _)| tensor.len() as u64).sum();
        let bytes = header.len() as u64 + content;
        let file = folder.create_file(&file_name(index))?;
        folder.check(file.set_len(bytes))?;
        folder.check(file.write_at(&header, 0))?;
        files.push(OpenFile {
            file,
            lane: lanes[index],
            header,
            bytes,
        });
    }
    Ok(files)
}

/// The jobs of each lane, in the order of the tensors.
fn place(tensors: Vec<TensorSource>, file_of: &[usize], files: &[OpenFile]) -> Vec<Vec<TensorJob>> {
    let mut ends: Vec<u64> = files.iter().map(|file| file.header.len() as u64).collect();
    let mut lanes: Vec<Vec<TensorJob>> = (0..LANES).map(|_| Vec::new()).collect();
    for (index, (source, file)) in tensors.into_iter().zip(file_of).enumerate() {
        let offset = ends[*file];
        ends[*file] += source.len() as u64;
        lanes[files[*file].lane].push(TensorJob {
            index,
            file: *file,
            offset,
            source,
        });
    }
    lanes
}

/// Flushes all files.
fn finish_files(folder: &AtomicFolder, files: &[OpenFile]) -> Result<Vec<SavedFile>> {
    let mut saved = Vec::with_capacity(files.len());
    for (index, file) in files.iter().enumerate() {
        folder.check(file.file.flush())?;
        saved.push(SavedFile {
            name: file_name(index),
            bytes: file.bytes,
            header_bytes: file.header.len() as u64,
            header_hash: Hash128::of(&file.header).to_string(),
        });
    }
    Ok(saved)
}
