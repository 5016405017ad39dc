//! How calls and steps of one engine follow each other.
//!
//! The caller's thread does little: it prepares a call (splits the batch, looks up the plan),
//! registers it and queues its jobs. A failure after that is found by the next call of the engine,
//! which waits until nothing moves, puts the engine back to where it was before the failed call, and
//! returns the error (`recover.rs`).
//!
//! # Locks
//! Callers take turns: [`Core::turn`] gives one of them the [`Sequence`], also while it waits for
//! work to end. No thread of the engine ever takes it. What others may ask at any time (warnings,
//! counts, times) is in [`Notes`] and the planner, whose locks are held for a moment only.
//!
//! # Invariants
//! - `steps` counts the steps that were asked for and not called off; calls read version `visible`:
//!   the newest, or after a step at lag 1 the one before it, until the caller has waited for the
//!   step.
//! - After a failure the weights, all versions of them, and the optimizer's state are as before the
//!   step that failed, or that the call which failed belongs to; its gradients are gone, and the
//!   random stream is at the lowest place it has had since its first call was submitted, but never
//!   before the last step that was made. That is the place of this call, unless it is a kept
//!   forward and another failure put the stream back meanwhile.
//! - Every failure is returned once: to the caller that waits for what failed, or by the next call.
//!   A step that does not happen although its caller was promised it is [`Error::Undone`].
//! - No step function, loss function or layer enters the engine that runs it: that is refused,
//!   since it would wait for itself.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use super::host_loss::HostWorker;
use super::part::{EnginePart, PartSpec};
use super::recorder::CallRecorder;
use crate::budget::ActivationUse;
use crate::config::Lag;
use crate::error::{Error, Result};
use crate::exec::call::{Call, CallList};
use crate::exec::model::Model;
use crate::exec::optimizer_thread::{OptimizerHandle, OptimizerOptions, Outcome};
use crate::exec::ring::Ring;
use crate::plan::PlanKind;
use crate::sync::lock;
use crate::trace::Trace;

/// The parts of an engine that outlive a borrowed handle.
pub(crate) struct Core {
    pub model: Arc<Model>,
    pub ring: Ring,
    /// What is called by itself: all layers, or some of them.
    pub(super) parts: Vec<EnginePart>,
    pub max_lag: Lag,
    pub trace: Arc<Trace>,
    pub(super) call_list: Arc<CallList>,
    pub(super) optimizer: OptimizerHandle,
    /// Dropped behind the optimizer, which may still be at work when the engine is dropped.
    _trainer: Trainer,
    pub(super) recorder: CallRecorder,
    sequence: Mutex<Sequence>,
    /// Held while a save is ordered: there is one at a time.
    pub(super) saving: Mutex<()>,
    notes: Mutex<Notes>,
    /// Computes losses in host memory, once one was asked for.
    pub(super) host: HostWorker,
}

/// Releases the weights when it is dropped.
struct Trainer(Arc<Model>);

impl Drop for Trainer {
    fn drop(&mut self) {
        self.0.store.retire();
    }
}

/// A step that was requested.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestedStep {
    pub version: u64,
    pub lag: Lag,
    /// The place in the random stream.
    pub number: u64,
}

/// Calls and steps so far. The caller whose turn it is holds it, also while it waits.
#[derive(Default)]
pub(super) struct Sequence {
    pub next_call: u64,
    /// Training calls so far: the place in the random stream.
    pub number: u64,
    /// Whether a call in training has succeeded: it is known then whether layers set buffers.
    pub trained: bool,
    pub steps: u64,
    /// The last steps that were requested and not waited for.
    pub history: VecDeque<RequestedStep>,
    /// The place in the random stream before which it never goes back, but for steps in `history`.
    pub earliest_number: u64,
    /// Calls with gradients since the last step.
    pub since_step: Vec<Arc<Call>>,
    /// Calls that have not been seen to succeed.
    pub watched: Vec<Arc<Call>>,
    pub outcomes: Vec<Arc<Outcome>>,
}

impl Sequence {
    /// The version that a call reads: one that computes no gradients, the newest that was asked
    /// for, so that what is evaluated does not depend on the lag.
    pub fn visible_to(&self, kind: PlanKind) -> u64 {
        match kind {
            PlanKind::Infer => self.steps,
            PlanKind::Train | PlanKind::Fused => self.visible(),
        }
    }

    /// The version that calls with gradients read: after a step at lag 1, the one before the
    /// version it makes.
    pub fn visible(&self) -> u64 {
        match self.history.back() {
            Some(step) if step.lag == Lag::One => step.version - 1,
            Some(step) => step.version,
            None => self.steps,
        }
    }

    /// Waits until the steps that were requested are made or have failed.
    pub fn wait_steps(&self) {
        // A step ends also when its calls fail, so this wait ends in any case.
        for outcome in &self.outcomes {
            outcome.wait_over();
        }
    }
}

/// What may be asked at any time.
#[derive(Default)]
pub(super) struct Notes {
    pub evaluating: bool,
    pub warnings: Vec<String>,
    /// Those of them that are not in the log yet.
    unlogged: Vec<String>,
    /// Steps that were made and not finite, in all and since the last that was.
    pub nonfinite_steps: u64,
    pub nonfinite_in_a_row: u64,
    /// Of the last call that trains.
    pub activations: Option<ActivationUse>,
    /// The share of their forward that recomputes of that call take, by layer.
    pub recompute_shares: Vec<(usize, f64)>,
    /// Frozen weights that it did not have to send, by layer, in bytes.
    pub held_weights: Vec<(usize, u64)>,
    /// Weights that it sent for the forward alone, by layer, in bytes.
    pub kept_weights: Vec<(usize, u64)>,
}

impl Notes {
    /// Keeps a warning until the user asks for it. [`Core::log_warnings`] also logs it.
    pub fn warn(&mut self, text: String) {
        self.unlogged.push(text.clone());
        self.warnings.push(text);
    }
}

impl Core {
    pub fn new(
        model: Model,
        ring: Ring,
        parts: Vec<PartSpec>,
        max_lag: Lag,
        trace: Arc<Trace>,
        options: OptimizerOptions,
    ) -> Result<Self> {
        let model = Arc::new(model);
        let part = |spec| EnginePart::new(spec, &model, &ring, max_lag);
        let parts = parts.into_iter().map(part).collect();
        let call_list = Arc::<CallList>::default();
        let optimizer = OptimizerHandle::start(&model, &call_list, ring.board(), &trace, options)?;
        Ok(Self {
            optimizer,
            _trainer: Trainer(model.clone()),
            recorder: CallRecorder::new(ring.clone(), trace.clone()),
            sequence: Mutex::default(),
            saving: Mutex::default(),
            notes: Mutex::default(),
            host: HostWorker::default(),
            model,
            ring,
            parts,
            max_lag,
            trace,
            call_list,
        })
    }

    /// Waits for the caller's turn.
    pub(super) fn turn(&self) -> MutexGuard<'_, Sequence> {
        // A caller that panicked in its turn must not lock the others out.
        lock(&self.sequence)
    }

    pub(super) fn notes(&self) -> MutexGuard<'_, Notes> {
        lock(&self.notes)
    }

    /// Logs warnings that are new. Without the lock: a subscriber may ask the engine something.
    pub(super) fn log_warnings(&self) {
        let unlogged = std::mem::take(&mut self.notes().unlogged);
        for text in unlogged {
            tracing::warn!(engine = self.model.name, "{text}");
        }
    }

    /// Refuses calls from within the engine's own work, which would wait for themselves.
    pub(super) fn enter(&self, what: &'static str) -> Result<()> {
        if self.optimizer.is_here() || self.ring.is_here() {
            let why = "it was called from a layer, loss function or step function of an engine on \
                       the same workers, which would wait for itself; call it from outside";
            return Err(Error::config(what, why));
        }
        Ok(())
    }

    /// The place in the random stream of a forward over several parts: it counts once, however many
    /// of them are called in it.
    pub fn next_number(&self) -> u64 {
        let training = self.is_training();
        let mut sequence = self.turn();
        let number = sequence.number;
        sequence.number += u64::from(training);
        number
    }

    /// Gives the place of a forward back that failed outside the engine, if no call came after it.
    pub fn return_number(&self, number: u64) {
        let mut sequence = self.turn();
        if sequence.number == number + 1 {
            sequence.number = number;
        }
    }

    // ---- questions ----

    pub fn is_training(&self) -> bool {
        !self.notes().evaluating
    }

    pub fn set_training(&self, training: bool) {
        self.notes().evaluating = !training;
    }

    pub fn warn(&self, text: String) {
        self.notes().warn(text);
        self.log_warnings();
    }

    pub fn take_warnings(&self) -> Vec<String> {
        let mut warnings = std::mem::take(&mut self.notes().warnings);
        warnings.extend(self.optimizer.take_save_warnings());
        warnings
    }

    /// Steps so far that were skipped, or left weights out, because they were not finite.
    pub fn nonfinite_steps(&self) -> u64 {
        self.notes().nonfinite_steps
    }

    /// Steps that were requested and not cancelled.
    pub fn steps(&self) -> u64 {
        self.model.store.asked()
    }

    /// Waits until the weights that the next call reads are there; says which version that is.
    pub fn wait_visible(&self) -> Result<u64> {
        self.enter("loss_scale")?;
        let mut sequence = self.turn();
        let version = sequence.visible();
        // A step that writes a later version does not matter: at lag 1 one may be under way.
        let mut pending = sequence
            .outcomes
            .iter()
            .filter(|outcome| outcome.version <= version);
        if pending.any(|outcome| !outcome.wait_over()) {
            self.check(&mut sequence)?;
        }
        // Asked again: a failure counts steps back.
        Ok(sequence.visible())
    }

    /// Waits for the steps that were requested and for calls that may set buffers, then lets
    /// another engine train the weights: from then on this engine writes nothing. Forwards that the
    /// user still holds can be read.
    pub fn retire(&self) {
        let sequence = self.turn();
        // Steps that were requested are made: the user was given handles for them.
        sequence.wait_steps();
        // A layer that drops its own engine would wait for itself.
        if self.enter("drop").is_ok() && self.may_set_buffers(&sequence) {
            self.wait_quiet();
        }
        self.model.store.retire();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // A program that ends with its engine has its last checkpoint, and the steps before it.
        if self.enter("drop").is_ok() {
            self.finish_save();
        }
        // The engine's handles are gone, so what is still under way is called off.
        self.call_list.fail_from(0, "the engine was dropped");
        for call in &self.call_list.active() {
            // A forward whose handle is alive ends with the handle.
            if call.has_failed() {
                call.wait_end("caller");
            }
        }
    }
}
