//! A save that was ordered: how far it is, and what came of it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use crate::error::{Error, Result};
use crate::sync::{lock, unpoisoned};

/// What a save wrote, and what it took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SaveReport {
    /// Bytes of all files.
    pub bytes: u64,
    /// From the first byte to the flushed folder.
    pub seconds: f64,
    /// How long updates waited for the save to read what they overwrite.
    pub held_up_seconds: f64,
}

/// A checkpoint that is being written; cloning shares it.
///
/// Dropping it neither stops the save nor waits for it. Dropping the engine waits.
#[derive(Debug, Clone)]
pub struct Saving(Arc<SaveProgress>);

impl Saving {
    pub(crate) fn new(progress: &Arc<SaveProgress>) -> Self {
        Self(progress.clone())
    }

    /// Waits until the checkpoint is complete and on the disk, or has failed. May be asked again.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when it could not be written, or what failed in the steps before it.
    /// Training goes on in both cases, and what was at its place before still is.
    pub fn wait(&self) -> Result<SaveReport> {
        self.0.wait()
    }

    /// Whether [`Saving::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        matches!(*lock(&self.0.phase), Phase::Done(_))
    }

    /// Where the checkpoint is, or will be.
    pub fn path(&self) -> &Path {
        &self.0.path
    }
}

/// How far a save is.
#[derive(Debug)]
enum Phase {
    /// Its bytes are still in memory that updates write.
    Copying,
    /// All bytes were handed to the system; flushes follow.
    Copied,
    /// Errors are kept as text, since every waiter receives them.
    Done(Result<SaveReport, String>),
}

/// A save as the threads that work on it see it.
#[derive(Debug)]
pub(crate) struct SaveProgress {
    pub path: PathBuf,
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl SaveProgress {
    pub fn new(path: &Path) -> Arc<Self> {
        Arc::new(Self {
            path: path.to_path_buf(),
            phase: Mutex::new(Phase::Copying),
            changed: Condvar::new(),
        })
    }

    /// Nothing of the engine is read any more.
    pub fn set_copied(&self) {
        *lock(&self.phase) = Phase::Copied;
        self.changed.notify_all();
    }

    /// It has ended.
    pub fn end(&self, result: Result<SaveReport>) {
        let result = result.map_err(|error| match error {
            // The path is added again by `wait`.
            Error::Checkpoint { path, what } if path == self.path => what,
            other => other.to_string(),
        });
        *lock(&self.phase) = Phase::Done(result);
        self.changed.notify_all();
    }

    /// Waits until nothing of the engine is read any more.
    pub fn wait_copied(&self) {
        let mut phase = lock(&self.phase);
        while matches!(*phase, Phase::Copying) {
            phase = unpoisoned(self.changed.wait(phase));
        }
    }

    /// Waits for the end.
    pub fn wait(&self) -> Result<SaveReport> {
        let mut phase = lock(&self.phase);
        loop {
            match &*phase {
                Phase::Done(Ok(report)) => return Ok(*report),
                Phase::Done(Err(what)) => return Err(Error::checkpoint(&self.path, what.clone())),
                Phase::Copying | Phase::Copied => phase = unpoisoned(self.changed.wait(phase)),
            }
        }
    }
}
