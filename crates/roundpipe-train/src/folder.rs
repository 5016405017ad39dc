//! The folder of a run: who may write into it, and what is where.
//!
//! ```text
//! run.toml         every setting, as resolved when the run began
//! checkpoints/     what a run goes on from
//! metrics.jsonl    a line for each step, validation, sample, save
//! events/          the same for TensorBoard
//! model/           the finished model or adapter
//! report.html      curves, samples and a timeline, for a browser
//! ```
//!
//! # Invariants
//! - One process at a time: the lock is the system's, so a process that is killed leaves none.
//! - A file is complete under its name, or it is what it was before.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use roundpipe_files::AtomicFile;

use crate::error::{Error, Result};
use crate::settings::{Given, Settings};

/// A run's folder, locked.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Unlocked when it is closed.
    _lock: File,
}

impl RunFolder {
    /// Makes the folder where it is not there, and locks it.
    ///
    /// # Errors
    /// [`Error::Failed`] while another process has it, and when it cannot be written.
    pub fn open(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|e| Error::io("make", path, &e))?;
        let name = path.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&name)
            .map_err(|e| Error::io("write", &name, &e))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: path.to_path_buf(),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(Error::Failed(format!(
                "{}: another process trains here; wait for it, or choose another folder with --out",
                path.display()
            ))),
            Err(TryLockError::Error(e)) => Err(Error::io("lock", &name, &e)),
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings that the run began with, if it has begun.
    ///
    /// # Errors
    /// [`Error::Usage`] when the file was damaged.
    pub fn settings(&self) -> Result<Option<Settings>> {
        let path = self.file("run.toml");
        if !path.exists() {
            return Ok(None);
        }
        let mut settings = Settings::default();
        Given::file(&path)?.apply(&mut settings);
        Ok(Some(settings))
    }

    /// Writes the settings.
    ///
    /// # Errors
    /// [`Error::Failed`] when the disk is full, for example; the old file stays.
    pub fn write_settings(&self, settings: &Settings) -> Result<()> {
        self.write("run.toml", settings.to_toml().as_bytes())
    }

    /// Writes a small file, complete or not at all.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.file(name);
        let file = AtomicFile::of_bytes(&path, bytes).and_then(AtomicFile::finish);
        file.map_err(|e| Error::Failed(e.to_string()))
    }

    /// A path in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Where a run's folder has a model: the folder of weights, and that of an adapter on them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunModel {
    /// A folder or a hub id.
    pub base: String,
    /// An adapter on it.
    pub adapter: Option<PathBuf>,
}

/// The result in a run's folder; nothing where the folder is no run's.
///
/// # Errors
/// [`Error::Failed`] for a run that has not finished.
pub fn run_model(path: &Path) -> Result<Option<RunModel>> {
    let config = path.join("run.toml");
    if !config.is_file() {
        return Ok(None);
    }
    let mut settings = Settings::default();
    Given::file(&config)?.apply(&mut settings);
    let result = path.join("model");
    if !result.is_dir() {
        return Err(Error::Failed(format!(
            "{}: the run has not finished, so it has no model yet; go on with `roundpipe train --out {}`",
            path.display(),
            path.display()
        )));
    }
    let is_adapter = result.join("adapter_config.json").is_file();
    let base = match settings.model {
        Some(model) if is_adapter => model,
        _ => result.display().to_string(),
    };
    Ok(Some(RunModel {
        base,
        adapter: is_adapter.then_some(result),
    }))
}
