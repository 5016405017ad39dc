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
//!   random stream is where it was when its first call was submitted, but never before the last
//!   step that was made.
//! - Every failure is returned once: to the caller that waits for what failed, or by the next call.
//!   A step that does not happen although its caller was promised it is [`Error::Undone`].
//! - No step function, loss function or layer enters the engine that runs it: that is refused,
//!   since it would wait for itself.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roundpipe_tensor::HostTensor;
use roundpipe_tensor::transfer::HostValue;

use super::inputs::{Inputs, Parts, host_values, split};
use super::mean_loss::{mean_loss, with_shares};
use super::outputs::Leaves;
use super::planner::{Batch, Planner};
use super::recorder::Recorder;
use crate::batch::split_label_of;
use crate::budget::CallNeeds;
use crate::config::{Lag, LossReduction, OutputDevice, Resolved, RunConfig};
use crate::cost::LayerTimes;
use crate::error::{Error, Result};
use crate::exec::call::{Call, CallList, CallSpec};
use crate::exec::model::{LossFn, Model};
use crate::exec::optimizer_thread::{OptimizerHandle, Outcome, StepRequest, Work};
use crate::exec::queue::Job;
use crate::exec::ring::Ring;
use crate::exec::value::Seed;
use crate::plan::{ExecutePlan, PlanKind};
use crate::trace::Trace;
use crate::tree::Tree;

/// The parts of an engine that outlive a borrowed handle.
pub(crate) struct Core {
    pub model: Arc<Model>,
    pub ring: Ring,
    pub config: RunConfig,
    pub max_lag: Lag,
    pub trace: Arc<Trace>,
    pub(super) call_list: Arc<CallList>,
    optimizer: OptimizerHandle,
    /// Dropped behind the optimizer, which may still be at work when the engine is dropped.
    _trainer: Trainer,
    pub(super) planner: Planner,
    pub(super) recorder: Recorder,
    sequence: Mutex<Sequence>,
    notes: Mutex<Notes>,
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
    pub settled_number: u64,
    /// Calls with gradients since the last step.
    pub since_step: Vec<Arc<Call>>,
    /// Calls that have not been seen to succeed.
    pub watched: Vec<Arc<Call>>,
    pub outcomes: Vec<Arc<Outcome>>,
}

impl Sequence {
    /// The version that calls read: after a step at lag 1, the one before the version it makes.
    fn visible(&self) -> u64 {
        match self.history.back() {
            Some(step) if step.lag == Lag::One => step.version - 1,
            Some(step) => step.version,
            None => self.steps,
        }
    }

    /// Waits until the steps that were requested are made or have failed.
    pub fn wait_steps(&self) {
        for outcome in &self.outcomes {
            outcome.wait_over();
        }
    }
}

/// What may be asked at any time.
#[derive(Default)]
pub(super) struct Notes {
    pub evaluating: bool,
    pub has_gradients: bool,
    pub warnings: Vec<String>,
    /// Steps that were made and not finite, in all and since the last that was.
    pub nonfinite_steps: u64,
    pub nonfinite_in_a_row: u64,
}

/// What a call is to do.
pub(crate) struct CallRequest {
    pub kind: PlanKind,
    pub inputs: Inputs,
    pub labels: Tree<HostTensor>,
    pub loss: Option<LossFn>,
    pub wants_outputs: bool,
    /// Whether the caller reads results before anything else. It is a part of the call then, and
    /// ends it.
    pub reads: bool,
    pub config: RunConfig,
}

/// A request that is checked and split.
struct Prepared {
    config: Resolved,
    /// Whether layers run in training mode.
    training: bool,
    wants_input_grads: bool,
    parts: Parts,
    labels: Vec<Tree<HostValue>>,
    loss: Option<LossFn>,
}

/// A call that was submitted.
pub(crate) struct PendingCall {
    pub call: Arc<Call>,
    pub config: Resolved,
    pub input_leaves: Vec<Leaves>,
    /// The samples of each microbatch, where they are known.
    pub samples: Option<Arc<[usize]>>,
}

/// The error of a call that was submitted while another failed.
fn cancelled() -> Error {
    Error::Cancelled {
        why: "another call failed before it began".to_owned(),
    }
}

impl Core {
    pub fn new(
        model: Model,
        ring: Ring,
        config: RunConfig,
        max_lag: Lag,
        trace: Arc<Trace>,
        most_nonfinite: u64,
    ) -> Result<Self> {
        let model = Arc::new(model);
        let call_list = Arc::<CallList>::default();
        let optimizer =
            OptimizerHandle::start(&model, &call_list, ring.board(), &trace, most_nonfinite)?;
        Ok(Self {
            optimizer,
            _trainer: Trainer(model.clone()),
            planner: Planner::new(model.clone(), ring.clone(), max_lag == Lag::One),
            recorder: Recorder::new(ring.clone(), trace.clone()),
            sequence: Mutex::default(),
            notes: Mutex::default(),
            model,
            ring,
            config,
            max_lag,
            trace,
            call_list,
        })
    }

    /// Waits for the caller's turn.
    pub(super) fn turn(&self) -> MutexGuard<'_, Sequence> {
        self.sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses calls from within the engine's own work, which would wait for themselves.
    fn enter(&self, what: &'static str) -> Result<()> {
        if self.optimizer.is_here() || self.ring.is_here() {
            let why = "it was called from a layer, loss function or step function of an engine on \
                       the same workers, which would wait for itself; call it from outside";
            return Err(Error::config(what, why));
        }
        Ok(())
    }

    // ---- questions ----

    pub fn set_training(&self, training: bool) {
        self.notes().evaluating = !training;
    }

    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.notes().warnings)
    }

    pub fn layer_times(&self) -> LayerTimes {
        self.planner.times()
    }

    /// Steps so far that were skipped, or left weights out, because they were not finite.
    pub fn nonfinite_steps(&self) -> u64 {
        self.notes().nonfinite_steps
    }

    /// Steps that were requested and not cancelled.
    pub fn steps(&self) -> u64 {
        self.model.store.asked()
    }

    /// Whether a backward was submitted since the last step.
    pub fn has_gradients(&self) -> bool {
        self.notes().has_gradients
    }

    /// Waits until the weights that the next call reads are there; says which version that is.
    pub fn wait_visible(&self) -> Result<u64> {
        self.enter("loss_scale")?;
        let mut sequence = self.turn();
        let version = sequence.visible();
        let mut pending = sequence
            .outcomes
            .iter()
            .filter(|outcome| outcome.version <= version);
        if pending.any(|outcome| !outcome.wait_over()) {
            self.check(&mut sequence)?;
        }
        Ok(sequence.visible())
    }

    // ---- calls ----

    /// Prepares, registers and queues a call.
    pub fn submit(&self, request: CallRequest) -> Result<PendingCall> {
        self.enter("call")?;
        if self.model.inference && request.kind != PlanKind::Infer {
            let what = "the engine was built with inference(true), so it computes no gradients; \
                        run it with requires_grad off, or build one that trains";
            return Err(Error::config("requires_grad", what));
        }
        self.model.store.settle_others();
        let mut sequence = self.turn();
        self.ring.tidy();
        self.check(&mut sequence)?;
        self.notice_writes(&mut sequence)?;
        let prepared = self.prepare(&request)?;
        let warnings = prepared.parts.warnings.iter().cloned();
        self.notes().warnings.extend(warnings);
        let (plan, needs) = self.plan(&request, &prepared)?;
        self.wait_for_buffers(&mut sequence)?;
        self.recorder.begin_call();
        let config = prepared.config.clone();
        let input_leaves = prepared.parts.leaves.clone();
        let samples = prepared.parts.samples.clone();
        let call = self.register(&mut sequence, &request, prepared, &plan, needs)?;
        self.enqueue(&mut sequence, &request, &call);
        Ok(PendingCall {
            call,
            config,
            input_leaves,
            samples,
        })
    }

    /// Resolves the configuration and splits the batch. Changes nothing.
    fn prepare(&self, request: &CallRequest) -> Result<Prepared> {
        let config = request.config.over(&self.config).resolve(self.ring.len())?;
        let wants_input_grads = config.input_grads && request.kind != PlanKind::Infer;
        let parts = split(
            &request.inputs,
            &config.split_input,
            config.num_microbatch,
            wants_input_grads,
        )?;
        let mut labels = self.split_labels(request, &config, &parts)?;
        let mut loss = request.loss.clone();
        if config.loss_reduction == LossReduction::Mean {
            loss = loss.map(mean_loss);
            labels = with_shares(labels, parts.samples.as_deref())?;
        }
        Ok(Prepared {
            config,
            training: !self.notes().evaluating,
            wants_input_grads,
            parts,
            labels,
            loss,
        })
    }

    fn split_labels(
        &self,
        request: &CallRequest,
        config: &Resolved,
        parts: &Parts,
    ) -> Result<Vec<Tree<HostValue>>> {
        let count = parts.sources.len();
        if request.kind != PlanKind::Fused || matches!(request.labels, Tree::None) {
            return Ok((0..count).map(|_| Tree::None).collect());
        }
        let labels = split_label_of(&request.labels, &config.split_label, count, parts.batch)?;
        if labels.parts.len() != count {
            let what = format!(
                "{} parts of labels for {count} microbatches",
                labels.parts.len()
            );
            return Err(Error::config("split_label", what));
        }
        let mut split = Vec::with_capacity(count);
        for tree in host_values(&labels.parts)? {
            split.push(tree.map_ref(|(value, _)| value.clone()));
        }
        Ok(split)
    }

    fn plan(&self, request: &CallRequest, prepared: &Prepared) -> Result<(ExecutePlan, CallNeeds)> {
        let batch = Batch {
            microbatches: prepared.parts.sources.len(),
            example: prepared.parts.example.as_ref(),
            training: prepared.training,
        };
        self.planner.plan(request.kind, &prepared.config, &batch)
    }

    /// Gives a call its number and its workers. From here on failures reach it.
    fn register(
        &self,
        sequence: &mut Sequence,
        request: &CallRequest,
        prepared: Prepared,
        plan: &ExecutePlan,
        needs: CallNeeds,
    ) -> Result<Arc<Call>> {
        let training = prepared.training;
        let trains = request.kind != PlanKind::Infer;
        let stages = plan.stages(request.kind);
        let workers = self.ring.workers().iter();
        let spec = CallSpec {
            id: sequence.next_call,
            model: self.model.clone(),
            workers: self.ring.assign(&stages),
            devices: workers.map(|worker| worker.device().id()).collect(),
            stages,
            forward_stages: plan.forward.len(),
            needs,
            microbatches: prepared.parts.sources.len(),
            grain: prepared.config.recompute_grain,
            training,
            trains,
            version: sequence.visible(),
            step: sequence.steps + 1,
            number: sequence.number,
            probes: trains && self.optimizer.streak.is_on(),
            loss: prepared.loss,
            wants_outputs: request.wants_outputs,
            keeps_outputs: !trains
                && !request.reads
                && self.ring.len() == 1
                && prepared.config.output_device != OutputDevice::Host,
            wants_input_grads: prepared.wants_input_grads,
            board: self.ring.board().clone(),
            ring_calls: self.ring.calls().clone(),
        };
        sequence.next_call += 1;
        sequence.number += u64::from(training);
        let sources = prepared.parts.sources;
        let call = Call::new(spec, &self.call_list, sources, prepared.labels);
        sequence.watched.push(call.clone());
        if self.has_failed(sequence) {
            // The call is registered, so later failures reach it. A failure between `check` and
            // here did not; cancel it by hand.
            call.fail(cancelled());
            return Err(self.recover(sequence).unwrap_or_else(cancelled));
        }
        Ok(call)
    }

    /// Queues the jobs of a call that was registered.
    fn enqueue(&self, sequence: &mut Sequence, request: &CallRequest, call: &Arc<Call>) {
        if request.reads {
            call.open_part();
        }
        let stages = match request.kind {
            PlanKind::Train => {
                // The user starts the backward.
                call.hold();
                0..call.spec.forward_stages
            }
            PlanKind::Fused => {
                self.add_gradients(sequence, call);
                0..call.spec.stages.len()
            }
            PlanKind::Infer => 0..call.spec.stages.len(),
        };
        self.queue(call, stages);
    }

    /// A call's gradients are added to those since the last step.
    fn add_gradients(&self, sequence: &mut Sequence, call: &Arc<Call>) {
        call.set_adds_to(sequence.since_step.last().cloned());
        sequence.since_step.push(call.clone());
        self.notes().has_gradients = true;
    }

    /// Queues the jobs of some stages, each with the right to read its weights.
    fn queue(&self, call: &Arc<Call>, stages: Range<usize>) {
        let store = &self.model.store;
        let version = call.spec.version;
        let mut jobs = Vec::with_capacity(stages.len());
        for stage in stages {
            let mut tickets = HashMap::new();
            for layer in call.spec.stages[stage].layers.clone() {
                let homes = store.layer(layer).homes().iter();
                let reserve = |home: &usize| store.layer(*home).versions().reserve(version);
                tickets.insert(layer, homes.map(reserve).collect());
            }
            call.open_part();
            let job = Job::new(call.clone(), stage, tickets);
            jobs.push((call.spec.workers[stage], job));
        }
        self.ring.submit(jobs);
    }

    /// Queues the backward of a call whose forward was queued before.
    pub fn submit_backward(&self, call: &Arc<Call>, seeds: Vec<Seed>) -> Result<()> {
        self.enter("backward")?;
        let mut sequence = self.turn();
        self.check(&mut sequence)?;
        if call.spec.step != sequence.steps + 1 {
            let what =
                "a step was made since this forward; run the forward again with the new weights";
            return Err(Error::config("backward", what));
        }
        // The buffers of the call's own forward as well: they are written although the backward may
        // fail.
        self.wait_for_buffers(&mut sequence)?;
        call.set_seeds(seeds);
        self.add_gradients(&mut sequence, call);
        self.queue(call, call.spec.forward_stages..call.spec.stages.len());
        Ok(())
    }

    /// Waits for calls that may set buffers: the next call reads them, and must not while they are
    /// written.
    fn wait_for_buffers(&self, sequence: &mut Sequence) -> Result<()> {
        if !self.may_set_buffers(sequence) {
            return Ok(());
        }
        self.wait_quiet();
        self.check(sequence)
    }

    /// Waits until no call has work under way.
    pub(super) fn wait_quiet(&self) {
        for call in &self.call_list.active() {
            call.wait_quiet("caller");
        }
    }

    /// Whether the calls under way may set buffers. Until the first has succeeded, every model with
    /// frozen parameters may.
    fn may_set_buffers(&self, sequence: &Sequence) -> bool {
        if self.model.sets_buffers.load(Ordering::SeqCst) {
            return true;
        }
        let layers = self.model.store.layers().iter();
        let mut params = layers.flat_map(|layer| layer.params());
        !sequence.trained && params.any(|param| !param.trainable)
    }

    // ---- steps ----

    /// Requests a step. At lag 0 this waits until all gradients have landed.
    pub fn step(&self, work: Work, lag: Lag) -> Result<Arc<Outcome>> {
        self.enter("step")?;
        let mut sequence = self.turn();
        self.check(&mut sequence)?;
        self.notice_writes(&mut sequence)?;
        if lag > self.max_lag {
            let what = "lag 1 needs a second version of the weights; build the engine with \
                        max_lag(Lag::One)";
            return Err(Error::config("step", what));
        }
        if sequence.since_step.is_empty() {
            let what = "no gradients were computed since the last step";
            return Err(Error::config("step", what));
        }
        let is_function = matches!(work, Work::Function(_));
        let outcome = self.request_step(&mut sequence, work, lag);
        if lag == Lag::One {
            return Ok(outcome);
        }
        let ready = if is_function {
            outcome.wait().map(drop)
        } else {
            outcome.wait_begun()
        };
        match ready {
            Ok(()) => Ok(outcome),
            Err(error) => Err(self.step_failed(&mut sequence, outcome.version, error)),
        }
    }

    fn request_step(&self, sequence: &mut Sequence, work: Work, lag: Lag) -> Arc<Outcome> {
        let calls = std::mem::take(&mut sequence.since_step);
        self.notes().has_gradients = false;
        let version = sequence.steps + 1;
        // A kept forward may have been submitted before calls whose gradients came first.
        let numbers = calls.iter().map(|call| call.spec.number);
        let first_number = numbers.min().unwrap_or(sequence.number);
        let outcome = Outcome::new(version, first_number);
        sequence.steps = version;
        sequence.history.push_back(RequestedStep {
            version,
            lag,
            number: sequence.number,
        });
        sequence.outcomes.push(outcome.clone());
        self.model.store.set_asked(version);
        self.optimizer.request(StepRequest {
            version,
            calls,
            next_call: sequence.next_call,
            work,
            outcome: outcome.clone(),
        });
        outcome
    }

    /// The error of a step that its caller waited for.
    fn step_failed(&self, sequence: &mut Sequence, version: u64, error: Error) -> Error {
        // This error itself says that the step was not made, so it need not be `Undone`.
        let plain = |error: Error| match error {
            Error::Undone { first, source } if first == version => *source,
            other => other,
        };
        let error = plain(error);
        match self.recover(sequence).map(plain) {
            Some(first) if error.is_secondary() => first,
            Some(undone @ Error::Undone { .. }) => undone,
            _ => error,
        }
    }

    /// A user who writes the newest weights expects later calls to read them, so those read the
    /// newest version.
    fn notice_writes(&self, sequence: &mut Sequence) -> Result<()> {
        if self.model.store.notice_writes() {
            self.settle_steps(sequence)?;
        }
        Ok(())
    }

    /// Waits for the steps that were requested. From then on calls read the newest weights.
    fn settle_steps(&self, sequence: &mut Sequence) -> Result<()> {
        sequence.wait_steps();
        self.check(sequence)?;
        if let Some(last) = sequence.history.back() {
            sequence.settled_number = last.number;
        }
        sequence.history.clear();
        Ok(())
    }

    /// Waits until nothing moves.
    pub fn synchronize(&self) -> Result<()> {
        self.enter("synchronize")?;
        let mut sequence = self.turn();
        self.wait_quiet();
        sequence.wait_steps();
        self.ring.tidy();
        self.settle_steps(&mut sequence)?;
        self.recorder.finish();
        Ok(())
    }

    /// Waits for the steps that were requested and for calls that may set buffers, then lets
    /// another engine train the weights: from then on this engine writes nothing. Forwards that the
    /// user still holds can be read.
    pub fn retire(&self) {
        let sequence = self.turn();
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
        self.call_list.fail_from(0, "the engine was dropped");
        for call in &self.call_list.active() {
            // A forward whose handle is alive ends with the handle.
            if call.has_failed() {
                call.wait_end("caller");
            }
        }
    }
}
