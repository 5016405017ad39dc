//! Frozen weights of later jobs that come before their turn.
//!
//! The weights of the next job are requested while this one runs ([`super::weights`]). Where the
//! kernels of forwards take less time than the copies of their weights, that is too late, although
//! the link idles beside backwards, whose kernels take longer. Frozen weights of jobs further ahead
//! therefore come as soon as they have room: when a backward ends, the pieces that its forward kept
//! are gone, and until the next forward keeps its own there is room for weights.
//!
//! The path of an early weight: [`Launcher::fetch_early`] reserves a slot and sends an
//! [`EarlyRequest`]; the upload thread fills it when it has nothing more urgent to do; the job takes
//! it ([`FrozenSource::Early`](super::weights::FrozenSource)). Which jobs follow is read from the
//! queue, so nothing comes early in the serial executor.
//!
//! Refused: what [`super::held_weights`] refuses, and weights that are held or kept anyway.
//!
//! # Invariants
//! - No bit of a result depends on what comes early.
//! - It is optional: memory that a task needs is taken from here, the last job's first.
//! - An upload that waits is a part of its call until it is filled or called off. The thread that
//!   takes its slot ends that part, so the call never waits for a thread to get to it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use roundpipe_tensor::transfer::{FilledSlot, Slot};

use super::call::Call;
use super::launcher::Launcher;
use super::queue::StageJob;
use super::task::Task;
use super::weights::frozen_part;
use crate::error::{Error, Result};
use crate::plan::Pass;
use crate::store::{FrozenPart, Writes};
use crate::sync::{lock, unpoisoned};

/// Jobs ahead that are looked at.
const MOST_JOBS: usize = 128;

/// A layer's frozen weights on their way to a worker, before their job asks for them.
pub(crate) struct EarlyUpload {
    call: Arc<Call>,
    state: Mutex<EarlyState>,
    changed: Condvar,
}

enum EarlyState {
    /// Its copy has not begun.
    Waiting(Slot),
    Filling,
    Filled(FilledSlot),
    /// Called off, taken, or failed.
    Gone(Option<Error>),
}

impl EarlyUpload {
    /// A part of the call from here on.
    fn new(call: &Arc<Call>, slot: Slot) -> Arc<Self> {
        call.open_part();
        Arc::new(Self {
            call: call.clone(),
            state: Mutex::new(EarlyState::Waiting(slot)),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, EarlyState> {
        lock(&self.state)
    }

    /// Whether its copy can begin at once, or never will.
    pub fn is_ready(&self) -> bool {
        match &*self.lock() {
            EarlyState::Waiting(slot) => slot.is_free(),
            _ => true,
        }
    }

    /// Whether the weights are there or will be.
    fn is_coming(&self) -> bool {
        !matches!(*self.lock(), EarlyState::Gone(_))
    }

    /// The slot to fill now; `None` if it was called off. The thread that fills it ends a part of
    /// the call.
    pub fn start(&self) -> Option<Slot> {
        self.take_waiting(EarlyState::Filling)
    }

    /// The call that it is for.
    pub fn call(&self) -> &Arc<Call> {
        &self.call
    }

    /// Takes back the slot of a copy that has not begun.
    pub fn call_off(&self) -> Option<Slot> {
        let slot = self.take_waiting(EarlyState::Gone(None))?;
        self.call.end_part();
        Some(slot)
    }

    fn take_waiting(&self, then: EarlyState) -> Option<Slot> {
        let mut state = self.lock();
        if !matches!(*state, EarlyState::Waiting(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, then) {
            EarlyState::Waiting(slot) => Some(slot),
            _ => None,
        }
    }

    /// The copy is queued, or was refused.
    pub fn finish(&self, filled: Result<FilledSlot>) {
        *self.lock() = match filled {
            Ok(slot) => EarlyState::Filled(slot),
            Err(error) => EarlyState::Gone(Some(error)),
        };
        self.changed.notify_all();
    }

    /// The slot of a copy that has begun, once it is queued: copies wait for kernels that are
    /// queued already, so this ends.
    ///
    /// # Errors
    /// When the copy was refused.
    pub fn wait(&self) -> Result<FilledSlot> {
        let mut state = self.lock();
        while matches!(*state, EarlyState::Filling) {
            state = unpoisoned(self.changed.wait(state));
        }
        match std::mem::replace(&mut *state, EarlyState::Gone(None)) {
            EarlyState::Filled(slot) => Ok(slot),
            EarlyState::Gone(Some(error)) => Err(error),
            _ => Err(Error::Cancelled {
                why: "weights that came early were taken twice".to_owned(),
            }),
        }
    }
}

/// What the upload thread is asked to bring when it has time.
pub(crate) struct EarlyRequest {
    pub layer: usize,
    /// Where frozen weights begin in the layer's block.
    pub block_offset: usize,
    pub upload: Arc<EarlyUpload>,
}

/// Frozen weights that come early, as their launcher knows them.
pub(super) struct EarlyWeights {
    stage: usize,
    layer: usize,
    bytes: u64,
    /// [`FrozenPart::writes`] when they were asked for.
    writes: Writes,
    upload: Arc<EarlyUpload>,
}

impl EarlyWeights {
    fn are_for(&self, call: &Call, stage: usize, layer: usize) -> bool {
        let is_same_call = std::ptr::eq(&*self.upload.call, call);
        is_same_call && self.stage == stage && self.layer == layer
    }

    /// Frees their memory.
    fn call_off(self) {
        if self.upload.call_off().is_none() {
            // The copy has begun, so it ends soon.
            let _ = self.upload.wait();
        }
    }
}

impl Launcher {
    /// Bytes of weights that came early or are on their way.
    pub(super) fn early_bytes(&self) -> u64 {
        self.early.iter().map(|early| early.bytes).sum()
    }

    /// The frozen weights of a job that came early, if they are still equal to host memory.
    pub(super) fn find_early(
        &self,
        call: &Call,
        stage: usize,
        layer: usize,
        part: &FrozenPart,
    ) -> Option<Arc<EarlyUpload>> {
        let mut early = self.early.iter();
        let found = early.find(|early| early.are_for(call, stage, layer))?;
        let is_current = found.writes == part.writes && found.upload.is_coming();
        is_current.then(|| found.upload.clone())
    }

    /// A job has asked for its weights: those that came early are its own now, and those that it
    /// could not use are freed.
    pub(super) fn take_early(&mut self, call: &Call, stage: usize, used: &[usize]) {
        for early in std::mem::take(&mut self.early) {
            if !early.are_for(call, stage, early.layer) {
                self.early.push(early);
            } else if !used.contains(&early.layer) {
                early.call_off();
            }
        }
    }

    /// Frees the early weights of the last of the jobs that have some.
    pub(super) fn drop_last_early(&mut self) -> bool {
        let last = self.early.pop();
        last.is_some_and(|early| {
            early.call_off();
            true
        })
    }

    pub(super) fn drop_early(&mut self) {
        while self.drop_last_early() {}
    }

    /// Frees early weights of calls that have failed.
    pub(super) fn drop_early_of_failed(&mut self) {
        for early in std::mem::take(&mut self.early) {
            if early.upload.call.has_failed() {
                early.call_off();
            } else {
                self.early.push(early);
            }
        }
    }

    /// Requests frozen weights of the jobs behind the next one, in their order, as far as there is
    /// room for them until their job runs.
    pub(super) fn fetch_early(&mut self, task: &Task<'_>) {
        if self.worker().device().aliases_host() {
            return;
        }
        // What is needed next comes first.
        let Some(next) = self.next.as_ref().filter(|next| next.weights.is_some()) else {
            return;
        };
        let mut window = EarlyWindow::new(self.early_bytes());
        window.pass(task.call, task.stage);
        window.pass(&next.call, next.stage);
        let model = task.spec().model.clone();
        for (call, stage) in self.upcoming() {
            // Rooms of calls of another engine do not count what this one has here.
            if !Arc::ptr_eq(&call.spec.model, &model) || call.has_failed() {
                return;
            }
            window.working = window.working.max(call.spec.needs.stages[stage].task);
            for layer in StageJob::layers_in_order(&call, stage) {
                if !self.fetch_layer(&call, stage, layer, &mut window) {
                    return;
                }
            }
            window.pass(&call, stage);
        }
    }

    /// The jobs behind the next one.
    fn upcoming(&self) -> Vec<(Arc<Call>, usize)> {
        let queue = self.queue.as_ref();
        queue.map_or_else(Vec::new, |queue| queue.upcoming(MOST_JOBS))
    }

    /// Requests the frozen weights of one layer; `false` if they have no room.
    fn fetch_layer(
        &mut self,
        call: &Arc<Call>,
        stage: usize,
        layer: usize,
        window: &mut EarlyWindow,
    ) -> bool {
        let mut early = self.early.iter();
        if let Some(known) = early.find(|early| early.are_for(call, stage, layer)) {
            window.behind -= known.bytes;
            return true;
        }
        let spec = &call.spec;
        let is_kept =
            spec.stages[stage].pass == Pass::Backward && spec.keep.weights.contains(&layer);
        let is_here = is_kept || spec.hold.has(self.index, layer);
        let Some(part) = frozen_part(call, layer).filter(|_| !is_here) else {
            return true;
        };
        let bytes = part.bytes as u64;
        if bytes > window.room {
            return false;
        }
        // Without room it comes later, or with its job.
        let Ok(slot) = Slot::reserve_beside(self.worker(), bytes, window.working) else {
            return false;
        };
        window.room -= bytes;
        let upload = EarlyUpload::new(call, slot);
        self.early.push(EarlyWeights {
            stage,
            layer,
            bytes,
            writes: part.writes,
            upload: upload.clone(),
        });
        self.copies.upload_early(EarlyRequest {
            layer,
            block_offset: part.block_offset,
            upload,
        });
        true
    }
}

/// The jobs between now and the one whose weights would come early.
struct EarlyWindow {
    /// The least that early weights may still take while these jobs run.
    room: u64,
    /// What those that are here take behind these jobs.
    behind: u64,
    /// What the tasks of the jobs work in.
    working: u64,
}

impl EarlyWindow {
    fn new(behind: u64) -> Self {
        Self {
            room: u64::MAX,
            behind,
            working: 0,
        }
    }

    /// Goes on behind a job: early weights lie beside it.
    fn pass(&mut self, call: &Call, stage: usize) {
        let spec = &call.spec;
        let left = spec.early_room(stage).saturating_sub(self.behind);
        self.room = self.room.min(left);
        self.working = self.working.max(spec.needs.stages[stage].task);
    }
}
