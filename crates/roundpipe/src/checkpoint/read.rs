//! A checkpoint, read: opened, verified, its tensors by name.
//!
//! Bytes are read into memory, never mapped: a disk that fails is an error then, not a signal.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe_files::text::shown;
use roundpipe_files::{Hash128, Hasher128, disk, folder, small};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::HostMut;
use roundpipe_tensor::optim::{self, RemaindersMut};
use roundpipe_tensor::{HostBuf, HostTensor};

use super::manifest::{Manifest, PlacedTensor};
use crate::error::{Error, Result};
use crate::scaler::ScalerState;
use crate::sync::lock;

/// What is read and hashed at once, in bytes.
const CHUNK: usize = 1 << 20;

/// The most threads that read.
const MOST_THREADS: usize = 8;

/// Where a tensor of a checkpoint goes.
pub(crate) enum FillTarget {
    Memory(HostMut),
    /// f32 masters: bf16 weights, and what they lack.
    Split {
        weights: HostMut,
        remainder: HostMut,
    },
}

/// A checkpoint on the disk: what it says, and its tensors by name, without an engine.
#[derive(Debug)]
pub struct Checkpoint {
    /// As the user named it.
    path: PathBuf,
    /// Where it is: the same, unless a save that replaced it was cut off.
    dir: PathBuf,
    manifest: Manifest,
    tensors: Vec<PlacedTensor>,
    by_name: HashMap<String, usize>,
    verified: OnceLock<()>,
}

impl Checkpoint {
    /// Opens a checkpoint: its manifest is checked, and that its files are there, as long as they
    /// should be, with the headers that they should have.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] that names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let dir = folder::complete(path).ok_or_else(|| {
            let what = "is not there; check the path";
            Error::checkpoint(path, what)
        })?;
        let (manifest, tensors) = Manifest::read(&dir)?;
        let names = tensors.iter().enumerate();
        let by_name = names
            .map(|(at, tensor)| (tensor.name.clone(), at))
            .collect();
        let this = Self {
            path: path.to_path_buf(),
            dir,
            manifest,
            tensors,
            by_name,
            verified: OnceLock::new(),
        };
        (0..this.manifest.files.len()).try_for_each(|file| this.check_file(file))?;
        Ok(this)
    }

    /// Reads all of it and compares every hash, in several threads.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] that names the first tensor which is not as it was written.
    pub fn verify(&self) -> Result<()> {
        if self.verified.get().is_some() {
            return Ok(());
        }
        each(0..self.tensors.len(), |at| {
            let tensor = &self.tensors[at];
            let file = self.open_file(tensor.file)?;
            let mut chunk = vec![0; CHUNK.min(tensor.bytes as usize)];
            let mut hasher = Hasher128::new();
            let mut done = 0;
            while done < tensor.bytes {
                let len = (tensor.bytes - done).min(CHUNK as u64) as usize;
                self.read_at(tensor, &file, &mut chunk[..len], done)?;
                hasher.update(&chunk[..len]);
                done += len as u64;
            }
            self.check_hash(tensor, hasher.finish())
        })?;
        let _ = self.verified.set(());
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Updates that had been asked for, skipped ones included.
    pub fn steps(&self) -> u64 {
        self.manifest.counters.steps
    }

    /// Updates that had been made, skipped ones left out.
    pub fn updates(&self) -> u64 {
        self.manifest.counters.updates
    }

    /// Calls in training mode so far: the place in the random stream.
    pub fn calls(&self) -> u64 {
        self.manifest.counters.calls
    }

    /// The caller's notes.
    pub fn notes(&self) -> &str {
        &self.manifest.notes
    }

    /// The loss scale, if updates had one.
    pub fn scaler(&self) -> Option<ScalerState> {
        let (state, _) = self.manifest.scaler.as_ref()?.state()?;
        Some(state)
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// The names of its tensors: `layers.0.w` for a parameter's value, `layers.0.w@moment.0` for its
    /// first moment, and after an update at lag 1 `layers.0.w@previous` for the older weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// A copy of one tensor, its hash compared.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a name that it does not have, and for bytes that are not as they
    /// were written; when memory runs out.
    pub fn read(&self, name: &str) -> Result<HostTensor> {
        let index = self.index(name).ok_or_else(|| {
            let what = format!("has no tensor {}; `names` lists them", shown(name));
            Error::checkpoint(&self.path, what)
        })?;
        let tensor = &self.tensors[index];
        let value = HostTensor::zeros(tensor.dtype, tensor.shape.dims())?;
        self.fill(index, value.write()?.bytes())?;
        Ok(value)
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn tensor(&self, index: usize) -> &PlacedTensor {
        &self.tensors[index]
    }

    /// Reads tensors into memory of their sizes, in several threads; hashes are compared again.
    pub(crate) fn fill_all(&self, jobs: Vec<(usize, FillTarget)>) -> Result<()> {
        let jobs: Vec<_> = jobs
            .into_iter()
            .map(|(index, target)| (index, std::sync::Mutex::new(target)))
            .collect();
        each(0..jobs.len(), |at| {
            let (index, target) = &jobs[at];
            match &mut *lock(target) {
                FillTarget::Memory(memory) => self.fill(*index, memory.bytes()),
                FillTarget::Split { weights, remainder } => {
                    self.fill_split(*index, weights, remainder)
                }
            }
        })
    }

    /// Reads the f32 masters of weights into the weights and their remainders.
    fn fill_split(&self, index: usize, weights: &mut HostMut, rest: &mut HostMut) -> Result<()> {
        const ELEMENTS: usize = CHUNK / size_of::<f32>();
        let tensor = &self.tensors[index];
        let file = self.open_file(tensor.file)?;
        let weights = weights.as_mut_slice();
        let mut remainders = RemaindersMut::new(rest, weights.len())?;
        let chunk = HostBuf::zeroed("masters", CHUNK.min(size_of::<f32>() * weights.len()))?;
        let one = Threads::new(Some(1))?;
        let mut hasher = Hasher128::new();
        let mut done = 0;
        for (weights, remainders) in weights
            .chunks_mut(ELEMENTS)
            .zip(remainders.chunks(ELEMENTS))
        {
            let mut masters = chunk.write(0..size_of::<f32>() * weights.len())?;
            self.read_at(tensor, &file, masters.bytes(), done)?;
            hasher.update(masters.bytes());
            done += masters.bytes().len() as u64;
            optim::split(&one, masters.as_mut_slice(), Some(weights), remainders)?;
        }
        self.check_hash(tensor, hasher.finish())
    }

    /// Reads one tensor into memory of its size.
    fn fill(&self, index: usize, into: &mut [u8]) -> Result<()> {
        let tensor = &self.tensors[index];
        let file = self.open_file(tensor.file)?;
        let mut hasher = Hasher128::new();
        let mut done = 0;
        for chunk in into.chunks_mut(CHUNK) {
            self.read_at(tensor, &file, chunk, done)?;
            hasher.update(chunk);
            done += chunk.len() as u64;
        }
        self.check_hash(tensor, hasher.finish())
    }

    fn file_path(&self, file: usize) -> PathBuf {
        self.dir.join(&self.manifest.files[file].name)
    }

    fn open_file(&self, file: usize) -> Result<File> {
        Ok(small::open(&self.file_path(file))?.0)
    }

    fn read_at(
        &self,
        tensor: &PlacedTensor,
        file: &File,
        into: &mut [u8],
        done: u64,
    ) -> Result<()> {
        disk::read_at(file, into, tensor.offset + done).map_err(|error| {
            let what = format!("cannot be read ({error}); use another checkpoint");
            Error::checkpoint(self.file_path(tensor.file), what)
        })
    }

    fn check_hash(&self, tensor: &PlacedTensor, found: Hash128) -> Result<()> {
        if found == tensor.hash {
            return Ok(());
        }
        let what = format!(
            "tensor {} is not as it was written (its hash is {found}, not {}); use another \
             checkpoint",
            shown(&tensor.name),
            tensor.hash
        );
        Err(Error::checkpoint(self.file_path(tensor.file), what))
    }

    /// Compares a file's length and header with the manifest.
    fn check_file(&self, file: usize) -> Result<()> {
        let stated = &self.manifest.files[file];
        let path = self.file_path(file);
        let (opened, meta) = small::open(&path)?;
        if meta.len() != stated.bytes {
            let what = format!(
                "has {} bytes, not the {} that were written; use another checkpoint",
                meta.len(),
                stated.bytes
            );
            return Err(Error::checkpoint(path, what));
        }
        // No longer than the file, which was just compared.
        let mut header = vec![0; stated.header_bytes.min(meta.len()) as usize];
        let damaged = |why: String| {
            let what = format!("has another header than was written{why}; use another checkpoint");
            Error::checkpoint(&path, what)
        };
        disk::read_at(&opened, &mut header, 0).map_err(|error| damaged(format!(" ({error})")))?;
        match Hash128::of(&header).to_string() == stated.header_hash {
            true => Ok(()),
            false => Err(damaged(String::new())),
        }
    }
}

/// Runs `work` for every number of a range in several threads; the error of the first that failed.
fn each(range: std::ops::Range<usize>, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = cores.min(MOST_THREADS).min(range.len());
    let next = AtomicUsize::new(range.start);
    // The lowest number that failed: those before it are still done, those behind it are left out.
    let stop = AtomicUsize::new(range.end);
    let run = || {
        let mut first = None;
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= stop.load(Ordering::Relaxed) {
                return first;
            }
            if let Err(error) = work(at) {
                stop.fetch_min(at, Ordering::Relaxed);
                first = Some((at, error));
            }
        }
    };
    let failed = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let here = run();
        let others = others.into_iter().filter_map(|thread| match thread.join() {
            Ok(failed) => failed,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        others.chain(here).min_by_key(|(at, _)| *at)
    });
    failed.map_or(Ok(()), |(_, error)| Err(error))
}
