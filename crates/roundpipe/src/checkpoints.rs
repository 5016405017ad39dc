//! The checkpoints of one run: a folder of them, of which the last few and the best are kept.
//!
//! ```no_run
//! # use roundpipe::{Checkpoints, RoundPipe};
//! # fn example(engine: RoundPipe) -> roundpipe::Result<()> {
//! let checkpoints = Checkpoints::open("run")?.keep_last(2);
//! let newest = checkpoints.newest()?;
//! newest.skipped.iter().for_each(|line| eprintln!("{line}"));
//! let mut step = 0;
//! if let Some(checkpoint) = &newest.checkpoint {
//!     engine.restore_from(checkpoint)?;
//!     step = newest.step;
//! }
//! while step < 1000 {
//!     // ... a step ...
//!     step += 1;
//!     if step % 100 == 0 {
//!         checkpoints.save(&engine, step, "")?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The folder has `step-00000100`, … and `best`, a file with the number of the best step. Nothing is
//! removed before the checkpoint that takes its place is complete.
//!
//! Refused: to keep none. Other files in the folder are left alone.
//!
//! # Invariants
//! - As long as saves are made in the order of steps, the last `keep_last` that are complete and not
//!   known to be damaged are there, and so is the best.
//! - A crash at any moment leaves the checkpoints that there were, or these and the new one.
//! - Only a save changes the folder: reading it disturbs no run that writes there. What a crash left
//!   is removed by the first save of the next run.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use roundpipe_files::small::{self, FileLimits};
use roundpipe_files::{Disk, SystemDisk, folder};
use roundpipe_tensor::Bytes;

use crate::checkpoint::write::{SaveTarget, ShardLimits, SpareMemory};
use crate::checkpoint::{Checkpoint, Saving};
use crate::engine::RoundPipe;
use crate::error::{Error, Result};
use crate::sync::lock;

/// The file that names the best step.
const BEST: &str = "best";

const BEST_LIMITS: FileLimits = FileLimits {
    bytes: 64,
    json_values: 1,
};

/// How many are kept by default.
const KEPT: usize = 3;

/// The checkpoints of one run.
#[derive(Debug)]
pub struct Checkpoints {
    shared: Arc<Shared>,
    limits: ShardLimits,
    spare: Mutex<SpareMemory>,
    last: Mutex<Option<Saving>>,
}

/// What the thread that writes a checkpoint needs to remove others.
#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    disk: Arc<dyn Disk>,
    keep_last: Mutex<usize>,
    /// Steps whose checkpoints were found damaged.
    damaged: Mutex<BTreeSet<u64>>,
    /// Whether what a crash left was removed.
    tidied: Mutex<bool>,
}

/// What [`Checkpoints::newest`] found.
#[derive(Debug)]
pub struct Newest {
    /// The newest that verifies; `None` where there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Its step; 0 without one.
    pub step: u64,
    /// Why newer ones were left out, a line each.
    pub skipped: Vec<String>,
}

impl Checkpoints {
    /// Those in a folder, which is made by the first save if it is not there.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when something else has the name.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_on(dir.as_ref(), Arc::new(SystemDisk), ShardLimits::default())
    }

    /// The same with a disk and sizes of files that only tests choose.
    #[doc(hidden)]
    pub fn open_on(dir: &Path, disk: Arc<dyn Disk>, limits: ShardLimits) -> Result<Self> {
        if dir.exists() && !dir.is_dir() {
            let what = "is not a folder; choose another name";
            return Err(Error::checkpoint(dir, what));
        }
        let shared = Shared {
            dir: dir.to_path_buf(),
            disk,
            keep_last: Mutex::new(KEPT),
            damaged: Mutex::default(),
            tidied: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            limits,
            spare: Mutex::default(),
            last: Mutex::default(),
        })
    }

    /// How many of the last are kept, beside the best: 3 by default, at least 1.
    #[must_use]
    pub fn keep_last(self, count: usize) -> Self {
        *lock(&self.shared.keep_last) = count.max(1);
        self
    }

    /// The most host memory that saves from now on borrow for copies, so that updates need not wait for
    /// the disk; without a number, a quarter of what the system has left.
    pub fn borrow_at_most(&self, bytes: Option<Bytes>) {
        lock(&self.spare).bytes = bytes.map(|bytes| bytes.0);
    }

    /// Orders the checkpoint of a step, as [`RoundPipe::save`]. Once it is complete, older ones that
    /// are neither among the last nor the best are removed.
    ///
    /// # Errors
    /// As [`RoundPipe::save`].
    pub fn save<M>(
        &self,
        engine: &RoundPipe<M>,
        step: u64,
        notes: impl Into<String>,
    ) -> Result<Saving> {
        self.order(engine, step, notes.into(), false)
    }

    /// The same, and the checkpoint is the best from the moment on that it is complete.
    ///
    /// # Errors
    /// As [`RoundPipe::save`].
    pub fn save_best<M>(
        &self,
        engine: &RoundPipe<M>,
        step: u64,
        notes: impl Into<String>,
    ) -> Result<Saving> {
        self.order(engine, step, notes.into(), true)
    }

    fn order<M>(
        &self,
        engine: &RoundPipe<M>,
        step: u64,
        notes: String,
        is_best: bool,
    ) -> Result<Saving> {
        self.shared.tidy()?;
        let shared = self.shared.clone();
        let then = move || {
            lock(&shared.damaged).remove(&step);
            if is_best {
                shared.write_best(step)?;
            }
            shared.rotate(step)
        };
        let before = self.steps()?.into_iter().rfind(|known| *known != step);
        let saving = engine.save_to(
            SaveTarget {
                path: self.path(step),
                disk: self.shared.disk.clone(),
                limits: self.limits,
                spare: *lock(&self.spare),
                then: Some(Box::new(then)),
                stays: before.map(|step| format!("the checkpoint of step {step} stays")),
            },
            notes,
        )?;
        *lock(&self.last) = Some(saving.clone());
        Ok(saving)
    }

    /// Marks a checkpoint as the best, so that it stays; the one before may go with the next save.
    /// Waits for the save that is under way.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when there is none of this step, or the mark cannot be written.
    pub fn mark_best(&self, step: u64) -> Result<()> {
        if let Some(last) = lock(&self.last).clone() {
            // Its error is its own caller's business.
            let _ = last.wait();
        }
        if folder::complete(&self.path(step)).is_none() {
            let what = "is not there, so it cannot be the best; save it first";
            return Err(Error::checkpoint(self.path(step), what));
        }
        self.shared.write_best(step)
    }

    /// The step that was marked as the best and whose checkpoint is there.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when the mark cannot be read.
    pub fn best(&self) -> Result<Option<u64>> {
        let best = self.shared.best()?;
        Ok(best.filter(|step| folder::complete(&self.path(*step)).is_some()))
    }

    /// The steps of which there is a checkpoint, in ascending order. Damage is not looked for.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        self.shared.steps()
    }

    /// Where the checkpoint of a step is, or would be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.shared.path(step)
    }

    /// The newest checkpoint that verifies, and why newer ones do not. Those stay where they are,
    /// until newer ones take their place.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when the folder cannot be read.
    pub fn newest(&self) -> Result<Newest> {
        let mut skipped = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let opened = Checkpoint::open(self.path(step));
            match opened.and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint)) {
                Ok(checkpoint) => {
                    return Ok(Newest {
                        checkpoint: Some(checkpoint),
                        step,
                        skipped,
                    });
                }
                Err(error) => {
                    lock(&self.shared.damaged).insert(step);
                    skipped.push(format!("{error}; step {step} is skipped"));
                }
            }
        }
        Ok(Newest {
            checkpoint: None,
            step: 0,
            skipped,
        })
    }
}

impl Shared {
    fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step:08}"))
    }

    fn steps(&self) -> Result<Vec<u64>> {
        if !self.dir.exists() {
            return Ok(Vec::new());
        }
        let mut steps = BTreeSet::new();
        for name in folder::names(&self.dir)? {
            // One that a save had set aside when it was cut off counts: `Checkpoint::open` finds it.
            let name = folder::target_of_leftover(&name).unwrap_or(&name);
            let Some(step) = step_of(name) else { continue };
            if folder::complete(&self.path(step)).is_some_and(|path| path.is_dir()) {
                steps.insert(step);
            }
        }
        Ok(steps.into_iter().collect())
    }

    /// Once, before the first save, removes what crashes left. A folder that is not there yet has
    /// nothing of a crash, and what a later save would find in it may be a save under way.
    fn tidy(&self) -> Result<()> {
        let mut tidied = lock(&self.tidied);
        if *tidied {
            return Ok(());
        }
        if !self.dir.exists() {
            *tidied = true;
            return Ok(());
        }
        let names = folder::names(&self.dir)?;
        let targets = names
            .iter()
            .filter_map(|name| folder::target_of_leftover(name));
        let targets: HashSet<&str> = targets.collect();
        for target in targets {
            if target == BEST {
                let partial = self.dir.join(format!(".{BEST}.partial"));
                self.disk
                    .remove_file(&partial)
                    .map_err(|error| unmarked(&partial, &error))?;
            } else if step_of(target).is_some() {
                folder::tidy(&*self.disk, &self.dir.join(target))?;
            }
        }
        *tidied = true;
        Ok(())
    }

    fn best(&self) -> Result<Option<u64>> {
        let path = self.dir.join(BEST);
        let Some(bytes) = small::read_if_there(&path, BEST_LIMITS)? else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&bytes);
        let step = text.trim().parse().map_err(|_| {
            let what = "does not hold the number of a step; remove it, or mark the best again";
            Error::checkpoint(&path, what)
        })?;
        Ok(Some(step))
    }

    /// Names the best step, or leaves the mark as it was.
    fn write_best(&self, step: u64) -> Result<()> {
        let path = self.dir.join(BEST);
        let partial = self.dir.join(format!(".{BEST}.partial"));
        let written = || -> io::Result<()> {
            if partial.symlink_metadata().is_ok() {
                self.disk.remove_file(&partial)?;
            }
            let file = self.disk.create(&partial)?;
            file.write_at(format!("{step}\n").as_bytes(), 0)?;
            file.flush()?;
            self.disk.rename(&partial, &path)?;
            self.disk.flush_folder(&self.dir)
        };
        written().map_err(|error| unmarked(&path, &error))
    }

    /// Removes what the complete checkpoint of `step` makes superfluous.
    fn rotate(&self, step: u64) -> Result<()> {
        let keep_last = *lock(&self.keep_last);
        let damaged = lock(&self.damaged).clone();
        // A mark that cannot be read is no reason to remove what it may name.
        let best = self.best()?;
        let mut kept = 0;
        // Steps behind this one are of a run that was left; they go when this one has passed them.
        let steps = self.steps()?;
        for old in steps.into_iter().rev().skip_while(|old| *old > step) {
            if kept >= keep_last && Some(old) != best {
                folder::remove(&*self.disk, &self.path(old))?;
                lock(&self.damaged).remove(&old);
            } else if !damaged.contains(&old) {
                kept += 1;
            }
        }
        Ok(())
    }
}

fn unmarked(path: &Path, error: &io::Error) -> Error {
    let what = format!("could not be written ({error}); the mark before it still holds");
    Error::checkpoint(path, what)
}

/// The step that a name is the checkpoint of.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // Only names that `path` makes: not `step-+5`, nor `step-5`.
    (format!("step-{step:08}") == name).then_some(step)
}
