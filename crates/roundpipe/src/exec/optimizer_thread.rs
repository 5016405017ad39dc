//! The optimizer beside the workers.
//!
//! A step is ordered when its calls are submitted, and begins when all of them have ended: every
//! gradient has landed then, so the step is sure to happen. Until that moment it can be called off
//! without a trace. Layers are updated from the first to the last, each published as soon as it is
//! done, so that the next call's forward follows layer by layer behind the update instead of
//! waiting for all of it. A table in front of a model, of which the next call reads some rows, is put
//! off: those rows come first, the others last ([`super::early_rows`]). What needs all gradients
//! before, their norm, is summed as they land.
//!
//! # Invariants
//! - Steps are done one after another, in the order they were asked for.
//! - A step whose calls failed publishes nothing, and fails the calls that were submitted after it.
//! - A step of the rule that has begun is done, even when the engine is dropped: no model is left
//!   half updated.
//! - A save is taken between the two steps that it was ordered between. It copies nothing here: the
//!   layers are held, and a thread of its own writes them.
//! - A step whose gradients are not finite changes no weight. After [`Streak::most`] of them in a
//!   row the step fails, with the first layer that was not finite: from the second on, calls look
//!   at the output of every layer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use roundpipe_tensor::nvtx;

use super::call::{Call, CallList, Landed};
use super::early_rows::TABLE;
use super::model::Model;
use super::pace::Urgency;
use super::step_update::{StepUpdate, UpdateOrder, UpdateTiming};
use super::task::panic_text;
use crate::checkpoint::SaveProgress;
use crate::checkpoint::manifest::SavedScaler;
use crate::checkpoint::state::{HeldState, RunState};
use crate::checkpoint::write::{SaveTarget, Snapshot, Written, write};
use crate::config::Lag;
use crate::error::{Error, Result};
use crate::groups::ResolvedGroups;
use crate::optim::StepReport;
use crate::scaler::GradScaler;
use crate::status::Board;
use crate::store::Store;
use crate::sync::{lock, unpoisoned};
use crate::trace::{Category, Lane, Span, Trace, Track};
use crate::update::{Apply, BegunSquares, Decision, FunctionVersions, OptimParams, Update};
use crate::version::Abort;

/// How long a step waits for a user who holds a parameter.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);

/// A user's update.
pub(crate) type StepFn = Box<dyn FnOnce(&mut OptimParams<'_>) -> Result<()> + Send>;

/// What a step does.
pub(crate) enum Work {
    /// The store's rule.
    Rule(RuleWork),
    /// Nothing: the gradients are dropped, and the next version is equal to the newest.
    Skip,
    /// A user's function.
    Function(StepFn),
}

/// A step by the store's rule.
pub(crate) struct RuleWork {
    pub update: Update,
    /// The settings of each parameter when the step was asked for.
    pub groups: ResolvedGroups,
    /// The scale that the losses were multiplied with.
    pub scaler: Option<(GradScaler, f64)>,
}

impl RuleWork {
    /// What [`Work::Skip`] does with weights: nothing.
    fn skip() -> Self {
        Self {
            update: Update::new(0.0),
            groups: ResolvedGroups::default(),
            scaler: None,
        }
    }
}

/// One step to do.
pub(crate) struct StepRequest {
    /// The version that it makes.
    pub version: u64,
    /// The version that its calls read.
    pub read_version: u64,
    pub calls: Vec<Arc<Call>>,
    /// The first call that is submitted after it.
    pub next_call: u64,
    pub lag: Lag,
    pub work: Work,
    pub outcome: Arc<Outcome>,
}

/// What the thread is asked for.
enum Request {
    Step(StepRequest),
    Save(Box<SaveRequest>),
}

/// A checkpoint to write.
pub(crate) struct SaveRequest {
    /// The version that it is of is `run.counters.steps`.
    pub run: RunState,
    pub target: SaveTarget,
    pub progress: Arc<SaveProgress>,
}

/// Ends saves: what went wrong is a warning of the engine, whether or not a caller waits.
#[derive(Clone)]
struct SaveEnd {
    engine: String,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl SaveEnd {
    fn end(&self, progress: &SaveProgress, written: Result<Written>) {
        let warning = match &written {
            Ok(written) => written.warning.as_ref(),
            Err(error) => Some(error),
        };
        if let Some(warning) = warning {
            tracing::warn!(engine = self.engine, "{warning}");
            lock(&self.warnings).push(warning.to_string());
        }
        progress.end(written.map(|written| written.report));
    }
}

/// How a step went so far.
#[derive(Debug)]
enum StepPhase {
    Waiting,
    /// All gradients are there: it will happen.
    Begun,
    /// All weights are there; moments may still be written.
    Updated(StepReport),
    Done(StepReport),
    /// It will not happen; the calls submitted after it are being failed.
    Failing,
    Failed(Option<Error>),
}

/// What became of a step.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub version: u64,
    /// The first of its calls: its place in the random stream.
    pub number: u64,
    phase: Mutex<StepPhase>,
    changed: Condvar,
    /// Who waits for the end of a step hurries its update.
    urgency: Arc<Urgency>,
}

impl Outcome {
    pub fn new(version: u64, number: u64, urgency: &Arc<Urgency>) -> Arc<Self> {
        Arc::new(Self {
            version,
            number,
            phase: Mutex::new(StepPhase::Waiting),
            changed: Condvar::new(),
            urgency: urgency.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, StepPhase> {
        lock(&self.phase)
    }

    fn set(&self, phase: StepPhase) {
        *self.lock() = phase;
        self.changed.notify_all();
    }

    /// Waits until `found` finds what it looks for.
    fn wait_for<R>(&self, mut found: impl FnMut(&mut StepPhase) -> Option<R>) -> R {
        let mut phase = self.lock();
        loop {
            if let Some(result) = found(&mut phase) {
                return result;
            }
            phase = unpoisoned(self.changed.wait(phase));
        }
    }

    /// The same for who needs the whole update: it hurries.
    fn hurry_for<R>(&self, mut found: impl FnMut(&mut StepPhase) -> Option<R>) -> R {
        // A step that is over hurries nothing: the update under way is another's.
        if let Some(result) = found(&mut self.lock()) {
            return result;
        }
        let _hurried = self.urgency.hurry();
        self.wait_for(found)
    }

    /// The report, when all weights are there; the error, once, when it failed.
    pub fn wait(&self) -> Result<StepReport> {
        self.hurry_for(|phase| match phase {
            StepPhase::Updated(report) | StepPhase::Done(report) => Some(Ok(*report)),
            StepPhase::Failed(error) => Some(Err(error.take().unwrap_or_else(failed_before))),
            _ => None,
        })
    }

    /// Waits until it is sure to happen.
    pub fn wait_begun(&self) -> Result<()> {
        self.wait_for(|phase| match phase {
            StepPhase::Begun | StepPhase::Updated(_) | StepPhase::Done(_) => Some(Ok(())),
            StepPhase::Failed(error) => Some(Err(error.take().unwrap_or_else(failed_before))),
            StepPhase::Waiting | StepPhase::Failing => None,
        })
    }

    /// Waits until it is over, whatever came of it; whether it was done.
    pub fn wait_over(&self) -> bool {
        self.hurry_for(|phase| match phase {
            StepPhase::Done(_) => Some(true),
            StepPhase::Failed(_) => Some(false),
            StepPhase::Waiting | StepPhase::Begun | StepPhase::Updated(_) | StepPhase::Failing => {
                None
            }
        })
    }

    /// Whether it has failed, or is about to.
    pub fn has_failed(&self) -> bool {
        matches!(*self.lock(), StepPhase::Failing | StepPhase::Failed(_))
    }

    /// What it saw, once nothing of it is left to do.
    pub fn report(&self) -> Option<StepReport> {
        match &*self.lock() {
            StepPhase::Done(report) => Some(*report),
            _ => None,
        }
    }

    /// Why it failed; `None` when it did not, or the error was returned already.
    pub fn take_error(&self) -> Option<Error> {
        match &mut *self.lock() {
            StepPhase::Failed(error) => error.take(),
            _ => None,
        }
    }
}

fn failed_before() -> Error {
    Error::Cancelled {
        why: "the step failed before".to_owned(),
    }
}

/// Steps in a row that were not finite.
pub(crate) struct Streak {
    /// How many are allowed.
    most: u64,
    /// How many there were, and where the last of them was not finite.
    seen: Mutex<(u64, String)>,
}

impl Streak {
    fn new(most: u64) -> Self {
        Self {
            most,
            seen: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, String)> {
        lock(&self.seen)
    }

    /// Whether the last step was not finite.
    pub fn is_on(&self) -> bool {
        self.lock().0 > 0
    }

    fn end(&self) {
        *self.lock() = Default::default();
    }

    /// How many there were, and where the last of them was not finite.
    fn saved(&self) -> (u64, String) {
        self.lock().clone()
    }

    /// Goes on from a checkpoint.
    pub fn restore(&self, steps: u64, place: &str) {
        *self.lock() = (steps, place.to_owned());
    }

    fn add(&self, place: String) {
        let mut seen = self.lock();
        *seen = (seen.0 + 1, place);
    }

    /// Ends a streak that is too long.
    ///
    /// # Errors
    /// [`Error::NotFinite`] then.
    fn check(&self) -> Result<()> {
        let mut seen = self.lock();
        if seen.0 < self.most {
            return Ok(());
        }
        let (steps, place) = std::mem::take(&mut *seen);
        Err(Error::NotFinite { steps, place })
    }
}

/// The thread that updates one engine's model.
pub(crate) struct OptimizerHandle {
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
    abort: Abort,
    pub streak: Arc<Streak>,
    /// What updates took since the last look.
    times: Arc<Mutex<Vec<UpdateTime>>>,
    /// The scaler that a step used last, or that a checkpoint brought.
    pub scaler: Arc<Mutex<Option<GradScaler>>>,
    /// The last save that was ordered.
    last_save: Mutex<Option<Arc<SaveProgress>>>,
    /// What went wrong in saves, as warnings.
    save_warnings: Arc<Mutex<Vec<String>>>,
    pub urgency: Arc<Urgency>,
    id: ThreadId,
}

/// What the update of a layer took.
pub(crate) struct UpdateTime {
    pub layer: usize,
    pub ms: f64,
}

/// What an engine asks of its optimizer's thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptimizerOptions {
    /// A step fails after so many in a row that were not finite.
    pub most_nonfinite: u64,
    /// Whether updates at lag 0 write weights first; measured if not said.
    pub weights_first: Option<bool>,
    /// Whether a worker computes on the cores that update, and reads weights where they lie.
    pub shares_cores: bool,
}

/// What the thread works with.
pub(super) struct OptimizerThread {
    pub(super) model: Arc<Model>,
    call_list: Arc<CallList>,
    board: Board,
    pub(super) trace: Arc<Trace>,
    abort: Abort,
    streak: Arc<Streak>,
    pub(super) times: Arc<Mutex<Vec<UpdateTime>>>,
    scaler: Arc<Mutex<Option<GradScaler>>>,
    save_warnings: Arc<Mutex<Vec<String>>>,
    /// Why the last step failed that was not called off.
    last_failure: Mutex<String>,
    pub(super) timing: Mutex<UpdateTiming>,
    pub(super) urgency: Arc<Urgency>,
}

impl OptimizerHandle {
    /// Starts the thread.
    pub fn start(
        model: &Arc<Model>,
        call_list: &Arc<CallList>,
        board: &Board,
        trace: &Arc<Trace>,
        options: OptimizerOptions,
    ) -> Result<Self> {
        let streak = Arc::new(Streak::new(options.most_nonfinite));
        let times = Arc::<Mutex<Vec<UpdateTime>>>::default();
        let scaler = Arc::<Mutex<Option<GradScaler>>>::default();
        let save_warnings = Arc::<Mutex<Vec<String>>>::default();
        let (requests, to_do) = channel();
        let abort = model.store.abort();
        let urgency = Urgency::new(model.store.threads().clone());
        let thread_body = OptimizerThread {
            model: model.clone(),
            call_list: call_list.clone(),
            board: board.clone(),
            trace: trace.clone(),
            abort: abort.clone(),
            streak: streak.clone(),
            times: times.clone(),
            scaler: scaler.clone(),
            save_warnings: save_warnings.clone(),
            last_failure: Mutex::default(),
            timing: Mutex::new(UpdateTiming::new(model.store.threads().count(), options)),
            urgency: urgency.clone(),
        };
        let name = format!("{} optimizer", model.name);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || thread_body.run(&to_do))
            .map_err(|error| {
                let what = format!("cannot start the optimizer thread: {error}");
                Error::config("threads", what)
            })?;
        let id = thread.thread().id();
        Ok(Self {
            requests: Some(requests),
            thread: Some(thread),
            abort,
            streak,
            times,
            scaler,
            last_save: Mutex::default(),
            save_warnings,
            urgency,
            id,
        })
    }

    /// What updates of layers took since the last call of this.
    pub fn take_times(&self) -> Vec<UpdateTime> {
        std::mem::take(&mut *lock(&self.times))
    }

    /// Whether the calling thread is the one that runs steps.
    pub fn is_here(&self) -> bool {
        std::thread::current().id() == self.id
    }

    pub fn request(&self, request: StepRequest) {
        self.send(Request::Step(request));
    }

    /// Orders a save behind the steps so far.
    pub fn save(&self, request: SaveRequest) {
        *lock(&self.last_save) = Some(request.progress.clone());
        self.send(Request::Save(Box::new(request)));
    }

    /// The last save that was ordered.
    pub fn last_save(&self) -> Option<Arc<SaveProgress>> {
        lock(&self.last_save).clone()
    }

    /// What went wrong in saves since the last call of this.
    pub fn take_save_warnings(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.save_warnings))
    }

    fn send(&self, request: Request) {
        if let Some(requests) = &self.requests {
            // The thread ends only after this sender is gone.
            drop(requests.send(request));
        }
    }
}

impl Drop for OptimizerHandle {
    fn drop(&mut self) {
        // Ends the wait of a user's function for its slabs. A step of the rule ignores it
        // (`apply`), and the loop ends behind the requests that are left.
        self.abort.set();
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Its thread holds memory of the store, which another engine may want to train.
        if let Some(save) = self.last_save() {
            let _ = save.wait();
        }
    }
}

impl OptimizerThread {
    fn run(&self, requests: &Receiver<Request>) {
        for request in requests {
            match request {
                Request::Step(request) => self.run_step(request),
                Request::Save(request) => self.start_save(*request),
            }
            self.board.tick();
        }
    }

    fn run_step(&self, request: StepRequest) {
        let StepRequest {
            version,
            read_version,
            calls,
            next_call,
            lag,
            work,
            outcome,
        } = request;
        // A function of the user may panic; the store is then as before.
        let step = catch_unwind(AssertUnwindSafe(|| {
            self.step((read_version, version), lag, &calls, work, &outcome)
        }));
        let step = step.unwrap_or_else(|panic| Err(Error::config("step", panic_text(&*panic))));
        // A step that failed serves no one; calls that asked fail with it.
        drop(self.model.early_rows.close());
        match step {
            Ok(report) => outcome.set(StepPhase::Done(report)),
            Err(error) => self.fail_step(&outcome, next_call, error),
        }
    }

    /// Holds the layers as they are now, and starts the thread that writes them.
    fn start_save(&self, request: SaveRequest) {
        let SaveRequest {
            run,
            target,
            progress,
        } = request;
        let end = SaveEnd {
            engine: self.model.name.clone(),
            warnings: self.save_warnings.clone(),
        };
        let snapshot = match self.snapshot(run) {
            Ok(snapshot) => snapshot,
            Err(error) => {
                let error = Error::checkpoint(&progress.path, error.to_string());
                end.end(&progress, Err(error));
                return;
            }
        };
        let gate = self.model.store.gate().clone();
        gate.take_held_up();
        let (end_late, saving) = (end.clone(), progress.clone());
        let body = move || {
            let written = catch_unwind(AssertUnwindSafe(|| write(target, snapshot, &saving)));
            let mut written = written
                .unwrap_or_else(|panic| Err(Error::checkpoint(&saving.path, panic_text(&*panic))));
            if let Ok(written) = &mut written {
                written.report.held_up_seconds = gate.take_held_up().as_secs_f64();
            }
            end_late.end(&saving, written);
        };
        let name = format!("{} save", self.model.name);
        if let Err(error) = std::thread::Builder::new().name(name).spawn(body) {
            let what = format!("cannot start the thread that writes it: {error}");
            end.end(&progress, Err(Error::checkpoint(&progress.path, what)));
        }
    }

    /// What a save writes: the state between the step before and the next.
    fn snapshot(&self, mut run: RunState) -> Result<Snapshot> {
        let store = &self.model.store;
        let version = run.counters.steps;
        if store.layer(0).versions().current() != version {
            let why = lock(&self.last_failure).clone();
            return Err(Error::Cancelled { why });
        }
        // Weights that the user wrote count as trained.
        self.patiently(Some(BUSY_TIMEOUT), || store.follow_writes())?;
        let (nonfinite, place) = self.streak.saved();
        run.counters.nonfinite = nonfinite;
        run.counters.nonfinite_place = place;
        let scaler = lock(&self.scaler).clone();
        run.scaler = scaler.map(|scaler| {
            let (state, previous) = scaler.saved(version);
            SavedScaler::new(state, previous)
        });
        let held = self.patiently(Some(BUSY_TIMEOUT), || HeldState::take(store, &run.counters))?;
        Ok(Snapshot::new(store, held, run))
    }

    /// Fails a step and the calls that were submitted after it.
    fn fail_step(&self, outcome: &Outcome, next_call: u64, error: Error) {
        let why = format!("the optimizer step before it failed: {error}");
        // A step that failed only because another did has nothing to add.
        if !error.is_secondary() {
            lock(&self.last_failure).clone_from(&why);
        }
        // Calls that wait for this version fail first: once the step has `Failed`, a caller may
        // submit new ones. A call that comes in between sees `Failing`.
        outcome.set(StepPhase::Failing);
        // Engines that read these weights wait for what was asked for; that is no more than there
        // is now.
        let store = &self.model.store;
        store.set_asked(store.layer(0).versions().current());
        self.call_list.fail_from(next_call, &why);
        outcome.set(StepPhase::Failed(Some(error)));
    }

    fn step(
        &self,
        (read_version, version): (u64, u64),
        lag: Lag,
        calls: &[Arc<Call>],
        work: Work,
        outcome: &Outcome,
    ) -> Result<StepReport> {
        // Its error is looked at behind the calls: theirs says why gradients are missing.
        let measured = match &work {
            Work::Rule(work) => self.measure(calls, &work.groups, work.update.stored_clip_value()),
            Work::Skip | Work::Function(_) => self.measure(calls, &ResolvedGroups::default(), None),
        };
        for call in calls {
            if !call.wait_end("optimizer") {
                let cause = Box::new(call.take_error().unwrap_or_else(|| call.cancelled()));
                return Err(Error::Undone {
                    first: version,
                    cause,
                });
            }
        }
        // A function without gradients has no call that would have failed with the step before.
        if self.model.store.layer(0).versions().current() + 1 != version {
            let why = lock(&self.last_failure).clone();
            let cause = Box::new(Error::Cancelled { why });
            return Err(Error::Undone {
                first: version,
                cause,
            });
        }
        let squares = measured?;
        match work {
            Work::Rule(work) => {
                let decision = work.update.decide(Store::total(&squares));
                // A loss scale that is too large is the scaler's business: it lowers it.
                let counts = work.scaler.as_ref().is_none_or(|(_, used)| *used <= 1.0);
                if decision.skip && counts {
                    self.streak.add(self.nonfinite_place(calls, &squares));
                }
                self.streak.check()?;
                self.apply((version, lag), decision, work, outcome)
            }
            Work::Skip => {
                let decision = Decision {
                    factor: 0.0,
                    grad_norm: Store::total(&squares).sqrt(),
                    skip: true,
                };
                self.apply((version, lag), decision, RuleWork::skip(), outcome)
            }
            Work::Function(function) => {
                let versions = FunctionVersions {
                    read: read_version,
                    next: version,
                };
                self.call(versions, Store::total(&squares), function, outcome)
            }
        }
    }

    fn layer_name(&self, layer: usize) -> String {
        format!("layer {layer} ({})", self.model.layers[layer].0)
    }

    /// Where the first value of a step that was not finite came from.
    fn nonfinite_place(&self, calls: &[Arc<Call>], squares: &[Vec<f64>]) -> String {
        if let Some((layer, microbatch)) = calls.iter().find_map(|call| call.first_nonfinite()) {
            return format!(
                "the first is the output of {}, microbatch {microbatch}",
                self.layer_name(layer)
            );
        }
        // The backward comes to the last layer first.
        match squares
            .iter()
            .rposition(|layer| !layer.iter().sum::<f64>().is_finite())
        {
            Some(layer) => format!("the first is the gradient of {}", self.layer_name(layer)),
            None => "only their sum is".to_owned(),
        }
    }

    /// The squares of all gradients, layer by layer as they land: the last call before a step makes
    /// them final.
    fn measure(
        &self,
        calls: &[Arc<Call>],
        groups: &ResolvedGroups,
        clip_value: Option<f32>,
    ) -> Result<Vec<Vec<f64>>> {
        let store = &self.model.store;
        let Some((last, before)) = calls.split_last() else {
            return store.all_squares(groups, clip_value);
        };
        // Earlier calls are summed up in the gradients of the last. After a failure there is
        // nothing to measure; `step` finds the failed call and returns its error.
        if !before.iter().all(|call| call.wait_end("optimizer")) {
            return Ok(Vec::new());
        }
        let mut squares = vec![Vec::new(); store.layers().len()];
        let mut open: Vec<_> = (0..squares.len())
            .map(|layer| (layer, store.grad_layers(layer)))
            .collect();
        let mut begun = BegunSquares::default();
        let mut landed = Landed::default();
        while !open.is_empty() {
            landed = last.wait_landed("optimizer", &mut open, &landed)?;
            for &layer in &landed.ready {
                squares[layer] = store.finish_squares(layer, groups, clip_value, &mut begun)?;
            }
            // Of a large gradient the first parts are squared while the last are on their way.
            for (layer, _) in &open {
                let bytes = |layer, param| landed.bytes(layer, param);
                store.begin_squares(*layer, groups, clip_value, &bytes, &mut begun)?;
            }
        }
        Ok(squares)
    }

    fn apply(
        &self,
        (version, lag): (u64, Lag),
        decision: Decision,
        work: RuleWork,
        outcome: &Outcome,
    ) -> Result<StepReport> {
        let store = &self.model.store;
        let _range = nvtx::range(|| format!("{} update {version}", self.model.name));
        let step = store.steps() + u64::from(!decision.skip);
        let apply = Apply {
            step,
            lr: work.update.lr,
            factor: decision.factor,
            clip_value: work.update.stored_clip_value(),
            groups: work.groups,
            next_version: version,
        };
        if !decision.skip {
            store.check(&apply)?;
        }
        // This abort is never set. Readers of what is overwritten were submitted before this step
        // and do not wait for it, so the waits end without one.
        let never = store.abort();
        self.patiently(Some(BUSY_TIMEOUT), || store.check_open(version, &never))?;
        let how = match lag {
            _ if decision.skip => UpdateOrder::Skip,
            // No call reads what it writes before the step after it is asked for.
            Lag::One => UpdateOrder::Beside,
            Lag::Zero => UpdateOrder::Ahead {
                by_rows: store.updates_by_rows(TABLE, &apply)?,
            },
        };
        let mut update = StepUpdate::new(self, &apply, &never);
        let updated = update.run(how, || outcome.set(StepPhase::Begun));
        let report = updated.map(|first_partial| {
            let report = StepReport {
                step,
                grad_norm: decision.grad_norm,
                skipped: decision.skip,
                partial: first_partial.is_some(),
            };
            self.end_update(first_partial, report, version, work.scaler);
            outcome.set(StepPhase::Updated(report));
            report
        });
        update.finish().and(report)
    }

    /// All weights of a step are there.
    fn end_update(
        &self,
        first_partial: Option<usize>,
        report: StepReport,
        version: u64,
        scaler: Option<(GradScaler, f64)>,
    ) {
        self.model.store.set_steps(report.step);
        match first_partial {
            Some(layer) => self.streak.add(format!(
                "the first is the update of {}",
                self.layer_name(layer)
            )),
            None if !report.skipped => self.streak.end(),
            None => {}
        }
        if let Some((scaler, used)) = scaler {
            scaler.update_at(version, used, report.skipped);
            *lock(&self.scaler) = Some(scaler);
        }
    }

    fn call(
        &self,
        versions: FunctionVersions,
        squared: f64,
        function: StepFn,
        outcome: &Outcome,
    ) -> Result<StepReport> {
        let store = &self.model.store;
        let mut function = Some(function);
        self.patiently(Some(BUSY_TIMEOUT), || {
            store.check_open(versions.next, &self.abort)
        })?;
        let start = self.trace.now_ns();
        let report =
            store.apply_fn(versions, &self.abort, &mut |params| match function.take() {
                Some(function) => function(params),
                None => Ok(()),
            })?;
        self.note(0, "", versions.next, start);
        if let Some(scaled) = report.scaled {
            scaled
                .scaler
                .update_at(versions.next, scaled.used, scaled.found_nonfinite);
            *lock(&self.scaler) = Some(scaled.scaler);
        }
        // Not before: a function may fail at any parameter, and then nothing has happened.
        outcome.set(StepPhase::Begun);
        Ok(StepReport {
            step: store.steps(),
            grad_norm: squared.sqrt(),
            skipped: report.skipped,
            partial: false,
        })
    }

    /// A user may be looking at a parameter just now; an update that could not begin has changed
    /// nothing. It is tried again for so long, or until it begins.
    pub(super) fn patiently<R>(
        &self,
        patience: Option<Duration>,
        mut update: impl FnMut() -> Result<R>,
    ) -> Result<R> {
        let start = Instant::now();
        loop {
            let patient = patience.is_none_or(|patience| start.elapsed() < patience);
            match update() {
                Err(Error::Tensor(roundpipe_tensor::Error::Busy { name, .. })) if patient => {
                    let what = format!("waiting for the user who holds {name}");
                    let _watched = self.board.wait("optimizer", &what);
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }

    /// Notes an update for the trace; `what` of the layer it was, if not all.
    pub(super) fn note(&self, layer: usize, what: &str, version: u64, start_ns: u64) {
        self.trace.record(|| Span {
            track: Track {
                worker: usize::MAX,
                worker_name: "host".to_owned(),
                lane: Lane::Optimizer,
            },
            name: format!("{}{what}", self.model.layers[layer].0),
            category: Category::Optimizer,
            start_ns,
            end_ns: self.trace.now_ns(),
            call: version,
            stage: None,
            layer: Some(layer),
            microbatch: None,
            bytes: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use roundpipe_tensor::cpu::threads::Threads;

    use super::*;

    /// Who asks for a report has it as soon as all weights are there, and hurries nothing then; who
    /// needs the whole step waits for its end.
    #[test]
    fn a_report_does_not_wait_for_moments() {
        let threads = Threads::new(Some(4)).unwrap();
        let urgency = Urgency::new(threads.clone());
        let outcome = Outcome::new(1, 1, &urgency);
        let update = urgency.begin(3);
        let report = StepReport {
            step: 1,
            grad_norm: 0.5,
            skipped: false,
            partial: false,
        };
        outcome.set(StepPhase::Updated(report));
        outcome.wait_begun().unwrap();
        assert_eq!(outcome.wait().unwrap(), report);
        assert!(outcome.report().is_none(), "it is not over");
        assert!(!update.was_hurried());
        std::thread::scope(|scope| {
            let over = scope.spawn(|| outcome.wait_over());
            while threads.most() < 4 {
                std::thread::yield_now();
            }
            assert!(update.was_hurried() && !over.is_finished());
            outcome.set(StepPhase::Done(report));
            assert!(over.join().unwrap());
        });
        assert_eq!(outcome.report(), Some(report));
    }
}
