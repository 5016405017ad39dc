//! Checkpoints of a living engine: ordered here, written by a thread of their own.
//!
//! A save is a request to the optimizer's thread, behind the newest step that was asked for. Its
//! caller waits for nothing but a save before it and, where layers set buffers, the calls so far:
//! at lag 1 calls and steps go on as if there were no save. A restore waits until nothing moves.
//!
//! Refused: gradients that wait for an update, engines that only read weights, parts of an engine,
//! and checkpoints that do not fit.
//!
//! # Invariants
//! - A run with saves, a run without, and a run that was resumed have the same bits.
//! - A checkpoint that does not fit, or is damaged, is refused before anything is changed.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use roundpipe_files::text::{one_line, shown};
use roundpipe_tensor::ParamId;

use super::RoundPipe;
use super::core::{Core, RequestedStep, Sequence};
use crate::checkpoint::manifest::{Counters, NOTES_CAP};
use crate::checkpoint::state::{BufferCopy, RunState, check_fits, load};
use crate::checkpoint::write::{SaveTarget, refuse_other_folder};
use crate::checkpoint::{Checkpoint, SaveProgress, Saving};
use crate::config::Lag;
use crate::error::{Error, Result};
use crate::exec::optimizer_thread::SaveRequest;
use crate::scaler::GradScaler;
use crate::store::StoredParam;
use crate::sync::lock;

/// Where a restored run goes on.
#[derive(Debug, Clone)]
pub struct Restored {
    /// Updates that had been asked for, skipped ones included.
    pub steps: u64,
    /// Updates that had been made, skipped ones left out.
    pub updates: u64,
    /// Calls in training mode so far: the place in the random stream.
    pub calls: u64,
    /// What the caller of `save` noted.
    pub notes: String,
    /// The scaler that updates used, as it was: give this one to the updates that follow.
    pub scaler: Option<GradScaler>,
}

impl<M> RoundPipe<M> {
    /// Orders a checkpoint of the run as it is behind the newest update that was asked for, and
    /// returns at once: it is written beside training, from the memory in which the state lives. An
    /// update that comes to a layer before the save has read it waits for that layer.
    ///
    /// `notes` is text of the caller's own, such as JSON with the place in the data; it is kept as it
    /// is. A checkpoint at `path` is replaced once the new one is complete. A save that comes while
    /// another is being written waits for that one.
    ///
    /// Until it has read them, parameters cannot be written by hand: [`RoundPipe::synchronize`] waits
    /// for that, but not for the disk.
    ///
    /// At lag 1 the older weights that the next call reads are saved too: unlike
    /// [`RoundPipe::synchronize`], a save does not change what calls read.
    ///
    /// # Errors
    /// [`Error::Config`] for gradients that wait for an update and for an engine that does not
    /// train; [`Error::Checkpoint`] for a path at which something else is; what went wrong in the
    /// calls before. What fails later, a full disk say, is returned by [`Saving::wait`] and is a
    /// warning of the engine ([`RoundPipe::take_warnings`]); training goes on.
    pub fn save(&self, path: impl AsRef<Path>, notes: impl Into<String>) -> Result<Saving> {
        self.save_to(SaveTarget::new(path.as_ref()), notes.into())
    }

    /// The same with settings that only tests and rotations need.
    #[doc(hidden)]
    pub fn save_to(&self, target: SaveTarget, notes: String) -> Result<Saving> {
        self.check_whole("save")?;
        self.core.save(target, notes)
    }

    /// Goes on from a checkpoint, in an engine over the same model and rule: any number of workers,
    /// plan, grain and memory. Every hash is compared before anything changes. Waits until nothing
    /// moves; gradients since the last update are dropped.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for one that is damaged or does not fit, with the first difference; what
    /// went wrong in the calls before. The engine is as before then.
    pub fn restore(&self, path: impl AsRef<Path>) -> Result<Restored> {
        // It may be the one that this engine is writing.
        self.core.finish_save();
        self.restore_from(&Checkpoint::open(path)?)
    }

    /// The same with a checkpoint that is open already; one that was verified is not verified again.
    ///
    /// # Errors
    /// As [`RoundPipe::restore`].
    pub fn restore_from(&self, checkpoint: &Checkpoint) -> Result<Restored> {
        self.check_whole("restore")?;
        self.core.restore(checkpoint)
    }
}

impl Core {
    fn save(&self, target: SaveTarget, notes: String) -> Result<Saving> {
        self.enter("save")?;
        if self.model.inference {
            let what = "the engine was built with inference(true), so it has nothing to save";
            return Err(Error::config("save", what));
        }
        if notes.len() > NOTES_CAP {
            let what = format!(
                "the notes have {} bytes, the most is {NOTES_CAP}; keep data in a file of its own",
                notes.len()
            );
            return Err(Error::config("save", what));
        }
        refuse_other_folder(&target.path)?;
        let _one_at_a_time = lock(&self.saving);
        self.finish_save();
        let mut sequence = self.turn();
        self.check(&mut sequence)?;
        self.notice_writes(&mut sequence)?;
        if !sequence.since_step.is_empty() {
            let what = "gradients wait for an update, and a checkpoint has none; save after the \
                        update, or drop them with `zero_grad`";
            return Err(Error::config("save", what));
        }
        let buffers = self.copy_buffers(&mut sequence)?;
        let counters = Counters {
            steps: sequence.steps,
            calls: sequence.number,
            seed: self.model.seed,
            lag: sequence.steps - sequence.visible(),
            ..Counters::default()
        };
        let progress = SaveProgress::new(&target.path);
        self.optimizer.save(SaveRequest {
            run: RunState {
                counters,
                scaler: None,
                buffers,
                notes,
            },
            target,
            progress: progress.clone(),
        });
        Ok(Saving::new(&progress))
    }

    /// Waits for the save that is under way, if there is one.
    pub(super) fn finish_save(&self) {
        if let Some(last) = self.optimizer.last_save() {
            // Its error is its own caller's business.
            let _ = last.wait();
        }
    }

    /// Copies of the buffers that layers have set, after the calls so far.
    fn copy_buffers(&self, sequence: &mut Sequence) -> Result<Vec<BufferCopy>> {
        if self.may_set_buffers(sequence) {
            self.wait_quiet();
            self.check(sequence)?;
        }
        let set = lock(&self.model.set_buffers).clone();
        let mut copies = Vec::with_capacity(set.len());
        for param in self.buffers(&set) {
            copies.push(BufferCopy {
                name: param.name.clone(),
                dtype: param.dtype,
                shape: param.shape,
                bytes: param.param.data().read_all()?.bytes().to_vec(),
            });
        }
        Ok(copies)
    }

    /// The parameters of these numbers, in model order.
    fn buffers<'a>(&'a self, set: &'a HashSet<ParamId>) -> impl Iterator<Item = &'a StoredParam> {
        let layers = self.model.store.layers().iter();
        let own = layers.flat_map(|layer| layer.own());
        own.map(|(_, param)| param)
            .filter(|param| !param.trainable && set.contains(&param.param.id()))
    }

    fn restore(&self, checkpoint: &Checkpoint) -> Result<Restored> {
        self.enter("restore")?;
        let counters = &checkpoint.manifest().counters;
        self.check_settings(checkpoint, counters)?;
        // Before the turn, since it takes a while and changes nothing.
        checkpoint.verify()?;
        self.model.store.wait_for_other_keepers();
        let mut sequence = self.turn();
        self.come_to_rest(&mut sequence)?;
        self.check_buffers(checkpoint)?;
        // The number that the version had, so that steps are counted on; later than all that this
        // engine has had, so that no call takes the old weights for these.
        let version = counters.steps.max(sequence.steps + 1);
        load(&self.model.store, checkpoint, version)?;
        let buffers = checkpoint.manifest().buffers.iter().map(String::as_str);
        self.note_buffers(&buffers.collect());
        self.optimizer
            .streak
            .restore(counters.nonfinite, &one_line(&counters.nonfinite_place));
        sequence.steps = version;
        sequence.number = counters.calls;
        sequence.earliest_number = counters.calls;
        sequence.since_step.clear();
        sequence.history.clear();
        if counters.lag == 1 {
            sequence.history.push_back(RequestedStep {
                version,
                lag: Lag::One,
                number: counters.calls,
            });
        }
        let scaler = checkpoint.manifest().scaler.as_ref();
        let scaler = scaler.and_then(|saved| saved.state());
        let scaler = scaler.map(|(state, previous)| GradScaler::resumed(state, version, previous));
        *lock(&self.optimizer.scaler) = scaler.clone();
        Ok(Restored {
            steps: counters.steps,
            updates: counters.updates,
            calls: counters.calls,
            notes: checkpoint.notes().to_owned(),
            scaler,
        })
    }

    /// Refuses a checkpoint that this engine cannot go on from with the same bits.
    fn check_settings(&self, checkpoint: &Checkpoint, counters: &Counters) -> Result<()> {
        if self.model.inference {
            let what = "the engine was built with inference(true), so it has no state to restore; \
                        read the weights with `Checkpoint::read` and `load_params`";
            return Err(Error::config("restore", what));
        }
        let refuse = |what: String| Err(Error::checkpoint(checkpoint.path(), what));
        if counters.seed != self.model.seed {
            return refuse(format!(
                "is of an engine with seed {}, and this one has {}; build it with seed({})",
                counters.seed, self.model.seed, counters.seed
            ));
        }
        if counters.lag == 1 && self.max_lag == Lag::Zero {
            return refuse(
                "was saved after an update at lag 1, whose older weights the next call reads; build \
                 the engine with max_lag(Lag::One), or save after `synchronize`"
                    .to_owned(),
            );
        }
        check_fits(&self.model.store, checkpoint)
    }

    /// Refuses a checkpoint from before a buffer was set that calls of this engine have set.
    fn check_buffers(&self, checkpoint: &Checkpoint) -> Result<()> {
        let set = lock(&self.model.set_buffers).clone();
        let saved: HashSet<&str> = checkpoint
            .manifest()
            .buffers
            .iter()
            .map(String::as_str)
            .collect();
        let mut buffers = self.buffers(&set);
        match buffers.find(|param| !saved.contains(param.name.as_str())) {
            None => Ok(()),
            Some(param) => {
                let what = format!(
                    "is from before buffer {} was set, which calls of this engine have changed; \
                     restore it into an engine that has made no call",
                    shown(&param.name)
                );
                Err(Error::checkpoint(checkpoint.path(), what))
            }
        }
    }

    /// Buffers that a checkpoint brought are saved again by the next.
    fn note_buffers(&self, names: &HashSet<&str>) {
        if names.is_empty() {
            return;
        }
        let layers = self.model.store.layers().iter();
        let own = layers.flat_map(|layer| layer.own());
        let ids = own.filter(|(_, param)| names.contains(param.name.as_str()));
        lock(&self.model.set_buffers).extend(ids.map(|(_, param)| param.param.id()));
        self.model.sets_buffers.store(true, Ordering::SeqCst);
    }
}
