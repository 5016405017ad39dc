//! How calls and steps of one engine follow each other.
//!
//! The caller's thread does little: it splits a batch, looks up the plan, queues the jobs and waits
//! for what it was asked for. Whatever fails after that is found by the next call of the engine: it
//! waits until nothing moves, puts the engine back to where it was before the call that failed, and
//! returns the error.
//!
//! # Invariants
//! - `steps` counts the steps that were asked for and not called off; calls read version `visible`:
//!   the newest, or after a step at lag 1 the one before it, until the caller has waited for the
//!   step.
//! - After a failure the weights, all versions of them, and the optimizer's state are as before the
//!   step that failed, or that the call which failed belongs to; its gradients are gone, and the
//!   random stream is where it was when its first call was submitted, but never before the last
//!   step that stands.
//! - Every failure is told: by whoever waits for what failed, or by the next call. A step that does
//!   not happen although its caller was told that it would is an error of its own
//!   ([`Error::Undone`]).
//! - No step function, loss function or layer enters the engine that runs it: that is refused,
//!   since it would wait for itself.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use roundpipe_tensor::transfer::{CopyRecord, HostValue};
use roundpipe_tensor::{DType, DeviceKind, HostTensor, LaneKind, Shape};

use super::args::{Args, Parts, host_values, split};
use crate::batch::split_label_of;
use crate::config::{Grain, OutputDevice, Resolved, RunConfig};
use crate::cost::{LayerCosts, LayerTimes, Phase, Spec, model_costs};
use crate::error::{Error, Result};
use crate::exec::call::{Call, CallList, CallSpec, Timed};
use crate::exec::model::{LossFn, Model};
use crate::exec::optimizer_thread::{Outcome, StepRequest, Stepper, Work};
use crate::exec::queue::Job;
use crate::exec::ring::Ring;
use crate::exec::value::Seed;
use crate::plan::{ExecutePlan, PlanKind};
use crate::search::AutoOptions;
use crate::trace::{Category, Lane, Span, Trace, Track};
use crate::tree::Tree;

/// Steps whose places in the random stream are remembered: more than can be under way.
const HISTORY: usize = 8;
/// Measured shares may move by this much before a plan is made anew.
const DRIFT: f64 = 0.3;
/// Plans that are kept, one for each shape of the input.
const MOST_PLANS: usize = 1024;
/// Calls between two looks at the drift.
const LOOK_EVERY: u64 = 16;

/// The parts of an engine that outlive a borrowed handle.
pub(crate) struct Core {
    pub model: Arc<Model>,
    pub ring: Ring,
    pub config: RunConfig,
    pub asynchronous: bool,
    pub trace: Arc<Trace>,
    call_list: Arc<CallList>,
    stepper: Stepper,
    /// Behind the stepper, which may still be at work when the engine is dropped.
    _trainer: Trainer,
    origin: Instant,
    state: Mutex<State>,
}

/// Gives the weights free when it is dropped.
struct Trainer(Arc<Model>);

impl Drop for Trainer {
    fn drop(&mut self) {
        self.0.store.retire();
    }
}

/// A step that was asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    version: u64,
    lag_one: bool,
    /// The place in the random stream.
    number: u64,
}

struct State {
    next_call: u64,
    /// Training calls so far: the place in the random stream.
    number: u64,
    training: bool,
    /// Whether a call in training has ended well: it is known then whether layers set buffers.
    trained: bool,
    steps: u64,
    /// The last steps that were asked for and not waited for.
    history: VecDeque<Asked>,
    /// The place in the random stream before which it never goes back, but for steps in `history`.
    settled_number: u64,
    /// Calls with gradients since the last step.
    since_step: Vec<Arc<Call>>,
    /// Calls that have not been seen to end well.
    watched: Vec<Arc<Call>>,
    outcomes: Vec<Arc<Outcome>>,
    plans: HashMap<Key, Planned>,
    times: LayerTimes,
    /// Copies whose ends were not known yet: call, worker, copy.
    moves: Vec<(u64, usize, CopyRecord)>,
    warnings: Vec<String>,
    /// Steps that were done and not finite, in all and since the last that was.
    nonfinite_steps: u64,
    nonfinite_in_a_row: u64,
}

/// Stages per pass, at least, where each step waits for the update of the one before, or where
/// layers are large.
const SHORT_STAGES: usize = 12;

/// What a plan was made for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    kind: PlanKind,
    grain: Grain,
    microbatches: usize,
    input: Vec<(DType, Shape)>,
}

struct Planned {
    plan: ExecutePlan,
    costs: LayerCosts,
    calls: u64,
}

/// What a call is to do.
pub(crate) struct CallRequest {
    pub kind: PlanKind,
    pub args: Args,
    pub labels: Tree<HostTensor>,
    pub loss: Option<LossFn>,
    pub wants_outputs: bool,
    /// Whether the caller reads results before anything else: it is a part of the call then, and
    /// ends it.
    pub reads: bool,
    pub config: RunConfig,
}

/// A call that was submitted.
pub(crate) struct PendingCall {
    pub call: Arc<Call>,
    pub config: Resolved,
    pub args: Vec<super::args::Leaves>,
}

/// What a call is told that came while another failed.
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
        asynchronous: bool,
        trace: Arc<Trace>,
        most_nonfinite: u64,
    ) -> Result<Self> {
        let model = Arc::new(model);
        let call_list = Arc::<CallList>::default();
        let stepper = Stepper::start(&model, &call_list, ring.board(), &trace, most_nonfinite)?;
        let state = State {
            next_call: 0,
            number: 0,
            training: true,
            trained: false,
            steps: 0,
            history: VecDeque::new(),
            settled_number: 0,
            since_step: Vec::new(),
            watched: Vec::new(),
            outcomes: Vec::new(),
            plans: HashMap::new(),
            times: LayerTimes::default(),
            moves: Vec::new(),
            warnings: Vec::new(),
            nonfinite_steps: 0,
            nonfinite_in_a_row: 0,
        };
        let (origin, state) = (Instant::now(), Mutex::new(state));
        let _trainer = Trainer(model.clone());
        Ok(Self {
            model,
            ring,
            config,
            asynchronous,
            trace,
            call_list,
            stepper,
            _trainer,
            origin,
            state,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses calls from within the engine's own work, which would wait for themselves.
    fn enter(&self, what: &'static str) -> Result<()> {
        if self.stepper.is_here() || self.ring.is_here() {
            let why = "it was called from a layer, loss function or step function of an engine on the same workers, \
                       which would wait for itself; call it from outside";
            return Err(Error::config(what, why));
        }
        Ok(())
    }

    pub fn set_training(&self, training: bool) {
        self.lock().training = training;
    }

    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().warnings)
    }

    pub fn layer_times(&self) -> LayerTimes {
        self.lock().times.clone()
    }

    /// Steps so far that were skipped, or left weights out, because they were not finite.
    pub fn nonfinite_steps(&self) -> u64 {
        self.lock().nonfinite_steps
    }

    /// Steps that were asked for and not called off.
    pub fn steps(&self) -> u64 {
        // Not from the state, which a caller that waits for a step function holds.
        self.model.store.asked()
    }

    /// Whether a backward was asked for since the last step.
    pub fn has_gradients(&self) -> bool {
        !self.lock().since_step.is_empty()
    }

    /// Waits until the weights that the next call reads are there; says which version that is.
    pub fn wait_visible(&self) -> Result<u64> {
        self.enter("loss_scale")?;
        let mut state = self.lock();
        let version = state.visible();
        let mut pending = state
            .outcomes
            .iter()
            .filter(|outcome| outcome.version <= version);
        if pending.any(|outcome| !outcome.settle()) {
            self.check(&mut state)?;
        }
        Ok(state.visible())
    }

    // ---- calls ----

    /// Splits, plans and queues a call.
    pub fn submit(&self, request: CallRequest) -> Result<PendingCall> {
        self.enter("call")?;
        if self.model.inference && request.kind != PlanKind::Infer {
            let what = "the engine was built with inference(true), so it computes no gradients; run it with \
                        requires_grad off, or build one that trains";
            return Err(Error::config("requires_grad", what));
        }
        self.model.store.settle_others();
        let mut state = self.lock();
        self.ring.tidy();
        self.check(&mut state)?;
        self.notice_writes(&mut state)?;
        let config = request.config.over(&self.config).resolve(self.ring.len())?;
        let wants_input_grads = config.input_grads && request.kind != PlanKind::Infer;
        let parts = split(
            &request.args,
            &config.split_input,
            config.num_microbatch,
            wants_input_grads,
        )?;
        let labels = self.split_labels(&request, &config, &parts)?;
        state.warnings.extend(parts.warnings.iter().cloned());
        let plan = self.plan(&mut state, request.kind, &config, &parts)?;
        self.wait_for_buffers(&mut state)?;
        self.ring.log_moves(self.trace.is_on());
        let stages = plan.stages(request.kind);
        let forward_stages = plan.forward.len();
        let spec = CallSpec {
            id: state.next_call,
            model: self.model.clone(),
            workers: self.ring.assign(&stages),
            devices: self
                .ring
                .workers()
                .iter()
                .map(|w| w.device().id())
                .collect(),
            stages,
            forward_stages,
            microbatches: parts.sources.len(),
            grain: config.recompute_grain,
            training: state.training,
            trains: request.kind != PlanKind::Infer,
            version: state.visible(),
            step: state.steps + 1,
            number: state.number,
            probes: request.kind != PlanKind::Infer && self.stepper.streak.is_on(),
            loss: request.loss,
            wants_outputs: request.wants_outputs,
            keeps_outputs: request.kind == PlanKind::Infer
                && !request.reads
                && self.ring.len() == 1
                && config.output_device != OutputDevice::Host,
            wants_input_grads,
            board: self.ring.board().clone(),
            ring_calls: self.ring.calls().clone(),
        };
        state.next_call += 1;
        state.number += u64::from(state.training);
        let call = Call::new(spec, &self.call_list, parts.sources, labels);
        state.watched.push(call.clone());
        if self.has_failed(&state) {
            // It is on the list now: whatever fails from here on fails it too. What failed since
            // the look above did not.
            call.fail(cancelled());
            return Err(self.recover(&mut state).unwrap_or_else(cancelled));
        }
        let stages = match request.kind {
            PlanKind::Train => 0..forward_stages,
            _ => 0..call.spec.stages.len(),
        };
        if request.kind == PlanKind::Train {
            call.hold();
        }
        if request.reads {
            call.open_part();
        }
        if request.kind == PlanKind::Fused {
            call.set_adds_to(state.since_step.last().cloned());
            state.since_step.push(call.clone());
        }
        self.queue(&call, stages);
        Ok(PendingCall {
            call,
            config,
            args: parts.args,
        })
    }

    /// Waits for calls that may set buffers: what is submitted next reads them, and must not while
    /// they are written.
    fn wait_for_buffers(&self, state: &mut State) -> Result<()> {
        if !self.may_set_buffers(state) {
            return Ok(());
        }
        for call in &self.call_list.active() {
            call.wait_quiet("caller");
        }
        self.check(state)
    }

    /// Whether the calls under way may set buffers, which the next one is to read. Before the first
    /// has ended, every model with something frozen is taken for one that does.
    fn may_set_buffers(&self, state: &State) -> bool {
        let mut params = self
            .model
            .store
            .layers()
            .iter()
            .flat_map(|layer| layer.params());
        self.model.sets_buffers.load(Ordering::SeqCst)
            || (!state.trained && params.any(|p| !p.trainable))
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
        Ok(host_values(&labels.parts)?
            .iter()
            .map(|tree| tree.map_ref(|(host_value, _)| host_value.clone()))
            .collect())
    }

    /// Queues the jobs of some stages, each with the right to read its weights.
    fn queue(&self, call: &Arc<Call>, stages: std::ops::Range<usize>) {
        let store = &self.model.store;
        let mut jobs = Vec::with_capacity(stages.len());
        for stage in stages {
            let mut tickets = HashMap::new();
            for layer in call.spec.stages[stage].layers.clone() {
                let homes = store.layer(layer).homes().iter();
                let version = call.spec.version;
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
        let mut state = self.lock();
        self.check(&mut state)?;
        if call.spec.step != state.steps + 1 {
            let what =
                "a step was made since this forward; run the forward again with the new weights";
            return Err(Error::config("backward", what));
        }
        // The forward's own among them: they are written although the backward may fail.
        self.wait_for_buffers(&mut state)?;
        call.set_seeds(seeds);
        call.set_adds_to(state.since_step.last().cloned());
        state.since_step.push(call.clone());
        self.queue(call, call.spec.forward_stages..call.spec.stages.len());
        Ok(())
    }

    // ---- steps ----

    /// Orders a step. At lag 0 this waits until all gradients have landed.
    pub fn step(&self, work: Work, lag_one: bool) -> Result<Arc<Outcome>> {
        self.enter("step")?;
        let mut state = self.lock();
        self.check(&mut state)?;
        self.notice_writes(&mut state)?;
        if lag_one && !self.asynchronous {
            let what = "lag 1 needs a second version of the weights; build the engine with asynchronous(true)";
            return Err(Error::config("step", what));
        }
        if state.since_step.is_empty() {
            return Err(Error::config(
                "step",
                "no gradients were computed since the last step",
            ));
        }
        let calls = std::mem::take(&mut state.since_step);
        let version = state.steps + 1;
        // A kept forward may have been submitted before calls whose gradients came first.
        let first_number = calls
            .iter()
            .map(|call| call.spec.number)
            .min()
            .unwrap_or(state.number);
        let outcome = Outcome::new(version, first_number);
        let whole = matches!(work, Work::Function(_));
        let (next_call, kept) = (state.next_call, outcome.clone());
        state.steps = version;
        let number = state.number;
        state.history.push_back(Asked {
            version,
            lag_one,
            number,
        });
        state.outcomes.push(outcome.clone());
        self.model.store.set_asked(version);
        self.stepper.order(StepRequest {
            version,
            calls,
            next_call,
            work,
            outcome,
        });
        if !lag_one {
            let ready = if whole {
                kept.wait().map(drop)
            } else {
                kept.wait_begun()
            };
            if let Err(error) = ready {
                // This caller is told by this very error that the step did not happen.
                let strip = |error: Error| match error {
                    Error::Undone { first, source } if first == version => *source,
                    other => other,
                };
                let (error, first) = (strip(error), self.recover(&mut state).map(strip));
                return Err(match first {
                    Some(first)
                        if error.is_secondary() || matches!(first, Error::Undone { .. }) =>
                    {
                        first
                    }
                    _ => error,
                });
            }
        }
        Ok(kept)
    }

    /// Who writes the newest weights means the calls that follow to read them, so these have the
    /// newest then.
    fn notice_writes(&self, state: &mut State) -> Result<()> {
        match self.model.store.notice_writes() {
            true => self.settle_steps(state),
            false => Ok(()),
        }
    }

    /// Waits for the steps that were asked for: from then on calls read the newest weights.
    fn settle_steps(&self, state: &mut State) -> Result<()> {
        state
            .outcomes
            .iter()
            .for_each(|outcome| _ = outcome.settle());
        self.check(state)?;
        if let Some(last) = state.history.back() {
            state.settled_number = last.number;
        }
        state.history.clear();
        Ok(())
    }

    /// Waits until nothing moves.
    pub fn synchronize(&self) -> Result<()> {
        self.enter("synchronize")?;
        let mut state = self.lock();
        for call in &self.call_list.active() {
            call.wait_quiet("caller");
        }
        state
            .outcomes
            .iter()
            .for_each(|outcome| _ = outcome.settle());
        self.ring.tidy();
        self.settle_steps(&mut state)?;
        if !state.moves.is_empty() {
            self.ring.drain();
            self.note_moves(&mut state);
        }
        Ok(())
    }

    /// Waits for the steps that were asked for and for calls that may set buffers, then lets
    /// another engine train the weights: from then on this engine writes nothing. Forwards that the
    /// user still holds can be read.
    pub fn retire(&self) {
        let state = self.lock();
        state
            .outcomes
            .iter()
            .for_each(|outcome| _ = outcome.settle());
        // A layer that drops its own engine would wait for itself.
        if self.enter("drop").is_ok() && self.may_set_buffers(&state) {
            for call in &self.call_list.active() {
                call.wait_quiet("caller");
            }
        }
        self.model.store.retire();
    }

    // ---- failures ----

    /// Reports what failed since the last call, once, and puts the engine in order.
    fn check(&self, state: &mut State) -> Result<()> {
        if self.has_failed(state) {
            return self.recover(state).map_or(Ok(()), Err);
        }
        // Each is asked once: what fails just now stays for the next look.
        let (ended, open) = std::mem::take(&mut state.watched)
            .into_iter()
            .partition(|call| call.has_succeeded());
        state.watched = open;
        let ended: Vec<Arc<Call>> = ended;
        state.trained |= ended.iter().any(|call| call.spec.training);
        ended.iter().for_each(|call| self.learn(state, call));
        let outcomes = std::mem::take(&mut state.outcomes);
        state.outcomes = outcomes
            .into_iter()
            .filter(|outcome| !state.note_step(outcome))
            .collect();
        // Which version calls read depends on the last step alone.
        while state.history.len() > HISTORY {
            state.settled_number = state.history.pop_front().map_or(0, |asked| asked.number);
        }
        Ok(())
    }

    fn has_failed(&self, state: &State) -> bool {
        state.outcomes.iter().any(|outcome| outcome.has_failed())
            || state.watched.iter().any(|call| call.has_failed())
    }

    /// A call failed: puts the engine in order and says why.
    pub fn failed(&self, seen: Error) -> Error {
        match self.recover(&mut self.lock()) {
            Some(Error::Undone { first, source }) => {
                let source = if seen.is_secondary() {
                    source
                } else {
                    Box::new(seen)
                };
                Error::Undone { first, source }
            }
            Some(first) if seen.is_secondary() => first,
            _ => seen,
        }
    }

    /// Waits until nothing moves, then forgets what failed and gives the error that nobody was told
    /// yet.
    fn recover(&self, state: &mut State) -> Option<Error> {
        for call in &self.call_list.active() {
            call.wait_quiet("caller");
        }
        // Steps behind a failed one have failed calls themselves.
        state
            .outcomes
            .iter()
            .for_each(|outcome| _ = outcome.settle());
        self.ring.drain();
        let (calls, watched) = std::mem::take(&mut state.watched)
            .into_iter()
            .partition(|call| call.has_failed());
        state.watched = watched;
        let calls: Vec<Arc<Call>> = calls;
        let outcomes = std::mem::take(&mut state.outcomes);
        outcomes
            .iter()
            .for_each(|outcome| _ = state.note_step(outcome));
        let steps: Vec<&Arc<Outcome>> = outcomes
            .iter()
            .filter(|outcome| outcome.has_failed())
            .collect();
        if let Some(failed) = steps.iter().map(|step| step.version).min() {
            state.steps = failed - 1;
            state.history.retain(|asked| asked.version < failed);
            self.model.store.set_asked(state.steps);
        }
        let earliest = state
            .history
            .back()
            .map_or(state.settled_number, |asked| asked.number);
        let mut numbers: Vec<u64> = calls.iter().map(|call| call.spec.number).collect();
        numbers.extend(steps.iter().map(|step| step.number));
        if !steps.is_empty() || state.since_step.iter().any(|call| call.has_failed()) {
            numbers.extend(state.since_step.drain(..).map(|call| call.spec.number));
            self.model.store.clear_gradients();
        }
        // A kept forward that failed may be older than the last step: that one keeps its random
        // numbers.
        state.number = numbers
            .into_iter()
            .fold(state.number, u64::min)
            .max(earliest);
        let mut undone: Option<u64> = None;
        let mut errors = Vec::new();
        for error in steps.iter().filter_map(|step| step.take_error()) {
            match error {
                Error::Undone { first, source } => {
                    undone = Some(undone.map_or(first, |known| known.min(first)));
                    errors.push(*source);
                }
                other => errors.push(other),
            }
        }
        errors.extend(calls.iter().filter_map(|call| call.take_error()));
        let at = errors
            .iter()
            .position(|error| !error.is_secondary())
            .unwrap_or(0);
        let error = errors.into_iter().nth(at)?;
        Some(match undone {
            Some(first) => Error::Undone {
                first,
                source: Box::new(error),
            },
            None => error,
        })
    }

    // ---- plans ----

    fn plan(
        &self,
        state: &mut State,
        kind: PlanKind,
        config: &Resolved,
        parts: &Parts,
    ) -> Result<ExecutePlan> {
        let layers = self.model.layers.len();
        if let Some(plan) = &config.execute_plan {
            plan.check(kind, layers)?;
            return Ok(plan.clone());
        }
        let leaves = parts.example.as_ref().map(Tree::leaves).unwrap_or_default();
        let key = Key {
            kind,
            grain: config.recompute_grain,
            microbatches: parts.sources.len(),
            input: leaves.iter().map(|t| (t.dtype(), *t.shape())).collect(),
        };
        if let Some(planned) = state.plans.get_mut(&key) {
            planned.calls += 1;
            let stale =
                planned.calls % LOOK_EVERY == 1 && state.times.drift(&planned.costs) > DRIFT;
            if !stale {
                return Ok(planned.plan.clone());
            }
        }
        let guess = self.guess(state.training, parts.example.as_ref());
        let costs = state.times.to_costs(&guess);
        let mut options = self.options(&key, config);
        // A layer that needs more than a stage's usual share may have it, as long as weights and
        // values find room.
        let most = (0..layers)
            .map(|l| costs.visit_bytes(l..l + 1))
            .max()
            .unwrap_or(0);
        let (room, usual) = (
            self.ring.least_memory() / 10 * 8,
            options.stage_memory_limit,
        );
        options.stage_memory_limit = usual.map(|limit| limit.max(most.min(room)));
        let mut plan = ExecutePlan::auto(kind, &[&costs], &options)?.remove(0);
        let large = usual.is_some_and(|limit| most > limit);
        if !self.ring.is_host() && kind != PlanKind::Infer && (large || !self.asynchronous) {
            // Gradients leave and new weights come stage by stage: an exact update hides behind
            // short ones only. And they leave room.
            plan = plan.cut(kind, layers.div_ceil(SHORT_STAGES));
        }
        if state.plans.len() >= MOST_PLANS {
            // Batches of ever new sizes: a plan is soon made again.
            state.plans.clear();
        }
        state.plans.insert(
            key,
            Planned {
                plan: plan.clone(),
                costs,
                calls: 1,
            },
        );
        Ok(plan)
    }

    fn options(&self, key: &Key, config: &Resolved) -> AutoOptions {
        let workers = self.ring.workers();
        let smallest = self.ring.least_memory();
        let mut options = AutoOptions::for_memory(workers.len(), key.microbatches, smallest);
        let id = |i: usize| {
            (
                workers[i].device().id().kind,
                workers[i].device().id().index,
            )
        };
        let host = self.ring.is_host();
        options.asynchronous = self.asynchronous;
        options.layer_grain = config.recompute_grain == Grain::Layer;
        options.shared_compute = host || (0..workers.len()).all(|i| id(i) == id(0));
        options.stage_memory_limit = Some(smallest / 10 * 3);
        if host {
            // Weights are read in place.
            options.model_memory_limit = None;
            options.stage_memory_limit = Some(smallest / 2);
        }
        options
    }

    /// Costs before anything was measured: by the meta device, or by sizes where layers look at
    /// values.
    fn guess(&self, training: bool, example: Option<&Tree<HostTensor>>) -> LayerCosts {
        let device = match self.ring.workers()[0].device().cost_model() {
            card if card.kind == DeviceKind::Cuda => card,
            _ => DeviceKind::Cpu.into(),
        };
        let by_meta = example.and_then(|example| {
            let spec = |t: &HostTensor| -> Spec { (t.dtype(), *t.shape(), false) };
            let costs =
                || model_costs(&self.model.layers, device, &example.map_ref(spec), training).ok();
            // A layer that panics here will do so again in its task, and be reported there.
            catch_unwind(AssertUnwindSafe(costs)).ok().flatten()
        });
        by_meta.unwrap_or_else(|| {
            let bytes = |(name, layer): &(String, Arc<dyn crate::layer::Layer>)| {
                let params = layer.named_params();
                (
                    name.clone(),
                    params
                        .iter()
                        .map(|(_, p)| p.bytes() as u64)
                        .sum::<u64>()
                        .max(1),
                )
            };
            LayerCosts::from_bytes(self.model.layers.iter().map(bytes))
        })
    }

    /// Takes the times of a call that ended.
    fn learn(&self, state: &mut State, call: &Call) {
        for piece in call.take_times() {
            let (Some(start), Some(end)) = (piece.from.ns(self.origin), piece.to.ns(self.origin))
            else {
                continue;
            };
            let part = match piece.category {
                Category::Forward | Category::Fused => Some(Phase::Forward),
                Category::Recompute => Some(Phase::Recompute),
                Category::Backward => Some(Phase::Backward),
                _ => None,
            };
            if let (Some(layer), Some(part)) = (piece.layer, part) {
                state
                    .times
                    .record(layer, part, end.saturating_sub(start) as f64 / 1e6);
            }
            self.trace.record(|| self.span(call, &piece, start, end));
        }
        let id = call.spec.id;
        state.moves.extend(
            self.ring
                .take_moves()
                .into_iter()
                .map(|(worker, moved)| (id, worker, moved)),
        );
        self.note_moves(state);
    }

    /// Records the copies whose ends the lanes have passed; the others stay for the next look.
    fn note_moves(&self, state: &mut State) {
        state.moves.retain(|(call, worker, moved)| {
            let (Some(start), Some(end)) = (moved.from.ns(self.origin), moved.to.ns(self.origin))
            else {
                return true;
            };
            self.trace
                .record(|| self.transfer(*call, *worker, moved, start, end));
            false
        });
    }

    fn transfer(
        &self,
        call: u64,
        worker: usize,
        moved: &CopyRecord,
        start_ns: u64,
        end_ns: u64,
    ) -> Span {
        let lane = match moved.lane {
            LaneKind::Compute => Lane::Compute,
            LaneKind::ParamUpload => Lane::ParamUpload,
            LaneKind::ActivationUpload => Lane::ActivationUpload,
            LaneKind::ActivationDownload => Lane::ActivationDownload,
            LaneKind::GradDownload => Lane::GradDownload,
        };
        let worker_name = self.ring.workers()[worker].device().id().to_string();
        Span {
            track: Track {
                worker,
                worker_name,
                lane,
            },
            name: moved.what.clone(),
            category: Category::Transfer,
            start_ns,
            end_ns,
            call,
            stage: None,
            layer: None,
            microbatch: None,
            bytes: Some(moved.bytes),
        }
    }

    fn span(&self, call: &Call, piece: &Timed, start_ns: u64, end_ns: u64) -> Span {
        let layer = piece
            .layer
            .map_or("loss", |l| self.model.layers[l].0.as_str());
        Span {
            track: Track {
                worker: piece.worker,
                worker_name: self.ring.workers()[piece.worker].device().id().to_string(),
                lane: Lane::Compute,
            },
            name: layer.to_owned(),
            category: piece.category,
            start_ns,
            end_ns,
            call: call.spec.id,
            stage: Some(piece.stage),
            layer: piece.layer,
            microbatch: Some(piece.microbatch),
            bytes: None,
        }
    }
}

impl State {
    /// Notes a step that is done and was not finite; whether it is done.
    fn note_step(&mut self, outcome: &Outcome) -> bool {
        let Some(report) = outcome.report() else {
            return false;
        };
        if !report.skipped && !report.partial {
            self.nonfinite_in_a_row = 0;
            return true;
        }
        self.nonfinite_steps += 1;
        self.nonfinite_in_a_row += 1;
        // A user who asks for no report is told too, once for a row of them.
        if self.nonfinite_in_a_row == 1 {
            let what = if report.skipped {
                "was skipped"
            } else {
                "left some weights out"
            };
            let norm = report.grad_norm;
            self.warnings.push(format!(
                "optimizer step {} {what}, because it was not finite (gradient norm {norm})",
                outcome.version
            ));
        }
        true
    }

    /// After a step at lag 1, calls read the version before the one it makes.
    fn visible(&self) -> u64 {
        match self.history.back() {
            Some(asked) if asked.lag_one => asked.version - 1,
            Some(asked) => asked.version,
            None => self.steps,
        }
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
