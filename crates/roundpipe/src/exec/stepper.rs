//! The optimizer beside the workers.
//!
//! A step is ordered when its calls are submitted, and begins when all of them have ended: every gradient has
//! landed then, so the step is sure to happen. Until that moment it can be called off without a trace. Layers
//! are updated from the first to the last, each published as soon as it is done, so that the next call's
//! forward follows layer by layer behind the update instead of waiting for all of it. What needs all gradients
//! before, their norm, is summed as they land.
//!
//! # Invariants
//! - Steps are done one after another, in the order they were asked for.
//! - A step whose calls failed publishes nothing, and fails the calls that were submitted after it.
//! - A step of the rule that has begun is done, even when the engine is dropped: no model is left half updated.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::call::{Call, Model, Peers};
use super::launcher::panic_text;
use crate::error::{Error, Result};
use crate::optim::StepReport;
use crate::scaler::GradScaler;
use crate::status::Board;
use crate::store::Store;
use crate::trace::{Category, Lane, Span, Trace, Track};
use crate::update::{Apply, OptimParams, Update};
use crate::version::Abort;

/// How long a step waits for somebody who looks at a parameter.
const PATIENCE: Duration = Duration::from_secs(60);

/// A user's update.
pub(crate) type StepFn = Box<dyn FnOnce(&mut OptimParams<'_>) -> Result<()> + Send>;

/// What a step does.
pub(crate) enum Work {
    /// The store's rule, with the scale that the losses were multiplied with.
    Rule(Update, Option<(GradScaler, f64)>),
    /// A user's function.
    Function(StepFn),
}

/// One step to do.
pub(crate) struct Order {
    /// The version that it makes.
    pub version: u64,
    pub calls: Vec<Arc<Call>>,
    /// The first call that is submitted after it.
    pub next_call: u64,
    pub work: Work,
    pub outcome: Arc<Outcome>,
}

/// How a step went so far.
#[derive(Debug)]
enum Phase {
    Waiting,
    /// All gradients are there: it will happen.
    Begun,
    Done(StepReport),
    /// It will not happen; the calls behind it are being told.
    Failing,
    Failed(Option<Error>),
}

/// What became of a step.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub version: u64,
    /// The first of its calls: its place in the random stream.
    pub number: u64,
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl Outcome {
    pub fn new(version: u64, number: u64) -> Arc<Self> {
        Arc::new(Self { version, number, phase: Mutex::new(Phase::Waiting), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        *self.lock() = phase;
        self.changed.notify_all();
    }

    /// The report, when it is done; the error, once, when it failed.
    pub fn wait(&self) -> Result<StepReport> {
        let mut phase = self.lock();
        loop {
            match &mut *phase {
                Phase::Done(report) => return Ok(*report),
                Phase::Failed(error) => return Err(error.take().unwrap_or_else(failed_before)),
                _ => phase = self.changed.wait(phase).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits until it is sure to happen.
    pub fn wait_begun(&self) -> Result<()> {
        let mut phase = self.lock();
        loop {
            match &mut *phase {
                Phase::Begun | Phase::Done(_) => return Ok(()),
                Phase::Failed(error) => return Err(error.take().unwrap_or_else(failed_before)),
                Phase::Waiting | Phase::Failing => {
                    phase = self.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Waits until it is over, whatever came of it; whether it was done.
    pub fn settle(&self) -> bool {
        let mut phase = self.lock();
        while matches!(*phase, Phase::Waiting | Phase::Begun | Phase::Failing) {
            phase = self.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
        }
        matches!(*phase, Phase::Done(_))
    }

    /// Whether it has failed, or is about to.
    pub fn has_failed(&self) -> bool {
        matches!(*self.lock(), Phase::Failing | Phase::Failed(_))
    }

    pub fn is_done(&self) -> bool {
        matches!(*self.lock(), Phase::Done(_))
    }

    /// Why it failed; `None` when it did not, or it was told already.
    pub fn take_error(&self) -> Option<Error> {
        match &mut *self.lock() {
            Phase::Failed(error) => error.take(),
            _ => None,
        }
    }
}

fn failed_before() -> Error {
    Error::CalledOff { why: "the step failed before".to_owned() }
}

/// The thread that updates one engine's model.
pub(crate) struct Stepper {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    abort: Abort,
}

/// What the thread works with.
struct Bench {
    model: Arc<Model>,
    peers: Arc<Peers>,
    board: Board,
    trace: Arc<Trace>,
    abort: Abort,
}

impl Stepper {
    pub fn start(model: &Arc<Model>, peers: &Arc<Peers>, board: &Board, trace: &Arc<Trace>) -> Result<Self> {
        let (orders, to_do) = channel();
        let abort = model.store.abort();
        let bench = Bench {
            model: model.clone(),
            peers: peers.clone(),
            board: board.clone(),
            trace: trace.clone(),
            abort: abort.clone(),
        };
        let name = format!("{} optimizer", model.name);
        let fail = |e| Error::config("threads", format!("cannot start the optimizer thread: {e}"));
        let thread = std::thread::Builder::new().name(name).spawn(move || bench.run(&to_do)).map_err(fail)?;
        Ok(Self { orders: Some(orders), thread: Some(thread), abort })
    }

    pub fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread ends only after this sender is gone.
            drop(orders.send(order));
        }
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        self.abort.set();
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Bench {
    fn run(&self, orders: &Receiver<Order>) {
        for order in orders {
            let Order { version, calls, next_call, work, outcome } = order;
            // A function of the user may panic; the store is then as before.
            let step = catch_unwind(AssertUnwindSafe(|| self.step(version, &calls, work, &outcome)));
            let step = step.unwrap_or_else(|panic| Err(Error::config("step", panic_text(&*panic))));
            match step {
                Ok(report) => outcome.set(Phase::Done(report)),
                Err(error) => {
                    let why = format!("the optimizer step before it failed: {error}");
                    // First the calls that wait for this version: once the failure is settled, new ones may come. One
                    // that comes in between sees that it is failing.
                    outcome.set(Phase::Failing);
                    self.peers.fail_from(next_call, &why);
                    outcome.set(Phase::Failed(Some(error)));
                }
            }
            self.board.tick();
        }
    }

    fn step(&self, version: u64, calls: &[Arc<Call>], work: Work, outcome: &Outcome) -> Result<StepReport> {
        let measured = self.measure(calls);
        for call in calls {
            if !call.wait_end("optimizer") {
                return Err(call.take_error().unwrap_or_else(failed_before));
            }
        }
        let squared = Store::total(&measured?);
        match work {
            Work::Rule(update, scaler) => self.apply(version, squared, update, scaler, outcome),
            Work::Function(function) => self.call(version, squared, function, outcome),
        }
    }

    /// The squares of all gradients, layer by layer as they land: the last call before a step makes them final.
    fn measure(&self, calls: &[Arc<Call>]) -> Result<Vec<Vec<f64>>> {
        let store = &self.model.store;
        let Some((last, before)) = calls.split_last() else { return store.all_squares() };
        if !before.iter().all(|call| call.wait_end("optimizer")) {
            return Ok(Vec::new());
        }
        let mut squares = vec![Vec::new(); store.layers().len()];
        let mut open: Vec<_> = (0..squares.len()).map(|layer| (layer, store.grad_layers(layer))).collect();
        while !open.is_empty() {
            for layer in last.wait_landed("optimizer", &mut open)? {
                squares[layer] = store.squares(layer)?;
            }
        }
        Ok(squares)
    }

    fn apply(
        &self,
        version: u64,
        squared: f64,
        update: Update,
        scaler: Option<(GradScaler, f64)>,
        outcome: &Outcome,
    ) -> Result<StepReport> {
        let store = &self.model.store;
        let layers = 0..store.layers().len();
        let decision = update.decide(squared);
        let step = store.steps() + u64::from(!decision.skip);
        let apply = Apply { step, lr: update.lr, factor: decision.factor, next_version: version };
        if !decision.skip {
            store.check(&apply)?;
        }
        outcome.set(Phase::Begun);
        // Never set: all calls before have ended, and those behind it read what it writes.
        let never = store.abort();
        for layer in layers {
            let start = self.trace.now_ns();
            self.patiently(layer, || match decision.skip {
                true => store.skip(layer, version, &never),
                false => store.apply(layer, &apply, &never),
            })?;
            self.note(layer, version, start);
        }
        store.set_steps(step);
        if let Some((scaler, used)) = scaler {
            scaler.update_from(used, decision.skip);
        }
        Ok(StepReport { step, grad_norm: decision.grad_norm, skipped: decision.skip })
    }

    fn call(&self, version: u64, squared: f64, function: StepFn, outcome: &Outcome) -> Result<StepReport> {
        let store = &self.model.store;
        let mut function = Some(function);
        let start = self.trace.now_ns();
        store.apply_fn(version, &self.abort, &mut |params| match function.take() {
            Some(function) => function(params),
            None => Ok(()),
        })?;
        self.note(0, version, start);
        outcome.set(Phase::Begun);
        Ok(StepReport { step: store.steps(), grad_norm: squared.sqrt(), skipped: false })
    }

    /// Somebody may be looking at a parameter just now; an update that could not begin has changed nothing.
    fn patiently(&self, layer: usize, mut update: impl FnMut() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        loop {
            match update() {
                Err(Error::Tensor(roundpipe_tensor::Error::Busy { .. })) if start.elapsed() < PATIENCE => {
                    let what = format!("waiting for whoever reads the weights of layer {layer}");
                    let _watched = self.board.wait("optimizer", &what);
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }

    fn note(&self, layer: usize, version: u64, start_ns: u64) {
        self.trace.record(|| Span {
            track: Track { worker: usize::MAX, worker_name: "host".to_owned(), lane: Lane::Optimizer },
            name: self.model.layers[layer].0.clone(),
            category: Category::Optimizer,
            start_ns,
            end_ns: self.trace.now_ns(),
            call: version,
            slot: None,
            layer: Some(layer),
            microbatch: None,
            bytes: None,
        });
    }
}
