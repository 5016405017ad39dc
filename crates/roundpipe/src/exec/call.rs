//! One call of an engine: what its tasks pass to each other, and how it ends.
//!
//! The threads of all workers meet here. A value is put once by the task that made it and taken
//! once by the task that needs it, so that host memory is let go as early as it can be.
//!
//! # Invariants
//! - A call ends exactly once, after each of its parts (jobs, transfers, a caller that reads
//!   results) has ended, whether it failed or not.
//! - The first failure is kept; every wait of the call returns after it.
//! - A failing call fails all calls of its engine that were submitted after it. What went wrong in
//!   a lane may belong to any call of the ring that has not ended: whoever sees it first fails them
//!   all. Bad data, such as an index out of range, belongs to the call whose kernel met it, and to
//!   those that took its values ([`DataCheck`]).

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use roundpipe_tensor::device::Stamp;
use roundpipe_tensor::transfer::{HostValue, Loaded, Port};
use roundpipe_tensor::{Cx, DeviceId, Faults, HostTensor, Param, Result as TensorResult, Tensor};

use crate::config::Grain;
use crate::error::{Error, Result, TaskPlace};
use crate::layer::Layer;
use crate::plan::Stage;
use crate::status::Board;
use crate::store::Store;
use crate::trace::Category;
use crate::tree::Tree;
use crate::version::Abort;

/// Turns a microbatch's outputs and labels into losses.
pub(crate) type LossFn =
    Arc<dyn Fn(&mut Cx, Tree, Tree) -> TensorResult<Vec<Tensor>> + Send + Sync>;

/// A model as executors see it.
pub(crate) struct Model {
    pub name: String,
    pub layers: Vec<(String, Arc<dyn Layer>)>,
    pub store: Store,
    pub seed: u64,
    /// The number of its first layer in the random stream.
    pub first_layer: usize,
    /// Whether a layer was seen to set a buffer: calls then run one after another.
    pub sets_buffers: AtomicBool,
    /// Whether weights stay on a worker from call to call, while they do not change.
    pub resident: bool,
    /// Whether weights are only read.
    pub inference: bool,
}

/// A leaf of a value between stages.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub parcel: HostValue,
    pub grad: bool,
    /// Whether every microbatch has the same: it is sent to a worker once.
    pub constant: bool,
    /// Where it stayed, with an empty parcel: an output that its worker keeps for the calls that
    /// follow.
    pub here: Option<Arc<(usize, Tensor)>>,
}

impl Leaf {
    /// A value that is on its way or on the host.
    pub fn new(parcel: HostValue, grad: bool) -> Self {
        Self {
            parcel,
            grad,
            constant: false,
            here: None,
        }
    }
}

/// A value between stages.
pub(crate) type StageValue = Tree<Leaf>;

/// A leaf of a call's input: a value, or the whole output of another call's microbatch.
#[derive(Clone)]
pub(crate) enum Source {
    Value(Leaf),
    Output(Arc<Call>, usize),
}

/// What one stage passes to the next for a microbatch.
pub(crate) enum Passed {
    StageValue(StageValue),
    Grads(Vec<Option<HostValue>>),
}

/// What a layer's recompute needs beside its input.
#[derive(Default)]
pub(crate) struct SavedForRecompute {
    pub data: Vec<HostValue>,
    pub buffers: Vec<(usize, HostValue)>,
}

impl SavedForRecompute {
    /// What it takes on a worker.
    pub fn bytes(&self) -> usize {
        self.data
            .iter()
            .chain(self.buffers.iter().map(|(_, parcel)| parcel))
            .map(HostValue::size_bytes)
            .sum()
    }
}

/// Gradients of a microbatch's outputs.
pub(crate) enum Seed {
    Given(Vec<Option<HostValue>>),
    /// Those of some leaves of another call's input.
    Of(Arc<Call>, Option<std::ops::Range<usize>>),
}

/// One timed piece of work.
pub(crate) struct Timed {
    pub worker: usize,
    pub stage: usize,
    pub layer: Option<usize>,
    pub microbatch: usize,
    pub category: Category,
    pub from: Stamp,
    pub to: Stamp,
}

/// Bad data of a call: where its kernels report it, and those of the calls whose values it took.
///
/// Kernels report later than they are launched, so a call looks at the reports before it hands out
/// results and before it ends: all kernels that these depend on have run then.
#[derive(Default)]
pub(crate) struct DataCheck(Mutex<DataState>);

#[derive(Default)]
struct DataState {
    own: Vec<Reports>,
    /// Of other calls. They are copied from there, since two calls may take values of each other.
    taken: Vec<Reports>,
}

/// Where the kernels of one job report.
#[derive(Clone)]
struct Reports {
    place: TaskPlace,
    faults: Arc<Faults>,
}

impl DataCheck {
    fn lock(&self) -> MutexGuard<'_, DataState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kernels of a job report here.
    pub fn watch(&self, place: TaskPlace, faults: Arc<Faults>) {
        self.lock().own.push(Reports { place, faults });
    }

    /// Values of another call are used: what is wrong with them is wrong with these.
    fn depend_on(&self, source: &DataCheck) {
        let theirs: Vec<Reports> = {
            let state = source.lock();
            state.own.iter().chain(&state.taken).cloned().collect()
        };
        let mut state = self.lock();
        for reports in theirs {
            let same = |known: &Reports| Arc::ptr_eq(&known.faults, &reports.faults);
            if !state.own.iter().chain(&state.taken).any(same) {
                state.taken.push(reports);
            }
        }
    }

    /// All is known to be good.
    fn clear(&self) {
        *self.lock() = DataState::default();
    }

    /// # Errors
    /// The first report, with its place; [`Error::Cancelled`] for that of another call.
    fn check(&self) -> Result<()> {
        let state = self.lock();
        let failed = |reports: &Reports| {
            let source = Box::new(Error::Tensor(reports.faults.check().err()?));
            Some(Error::Task {
                place: Box::new(reports.place.clone()),
                source,
            })
        };
        if let Some(error) = state.own.iter().find_map(failed) {
            return Err(error);
        }
        match state.taken.iter().find_map(failed) {
            None => Ok(()),
            Some(error) => {
                let why = format!(
                    "its input comes from a call that failed: {}",
                    error.in_full()
                );
                Err(Error::Cancelled { why })
            }
        }
    }
}

/// What is fixed about a call.
pub(crate) struct CallSpec {
    pub id: u64,
    pub model: Arc<Model>,
    /// Forward slots, then backward ones.
    pub stages: Vec<Stage>,
    /// How many slots the forward has; a fused one counts as backward.
    pub forward_stages: usize,
    /// The worker of each stage.
    pub workers: Vec<usize>,
    /// All workers.
    pub devices: Vec<DeviceId>,
    pub microbatches: usize,
    pub grain: Grain,
    pub training: bool,
    /// Whether a backward follows.
    pub trains: bool,
    /// The version of the weights that all its tasks read.
    pub version: u64,
    /// The optimizer step that its gradients are for.
    pub step: u64,
    /// Its number among the calls of the model: the random stream.
    pub number: u64,
    /// Whether every layer's output is looked at for values that are not finite: steps before it
    /// were not.
    pub probes: bool,
    pub loss: Option<LossFn>,
    pub wants_outputs: bool,
    /// Whether outputs stay on the worker that made them.
    pub keeps_outputs: bool,
    pub wants_input_grads: bool,
    pub board: Board,
    /// The calls of all engines on the same workers.
    pub ring_calls: Arc<CallList>,
}

/// A call under way.
pub(crate) struct Call {
    pub spec: CallSpec,
    pub abort: Abort,
    pub data: DataCheck,
    call_list: Arc<CallList>,
    state: Mutex<State>,
    changed: Condvar,
}

pub(crate) struct State {
    pub inputs: Vec<Option<Tree<Source>>>,
    pub labels: Vec<Option<Tree<HostValue>>>,
    pub passed: Vec<Vec<Option<Passed>>>,
    /// Inputs of layers, by layer and microbatch.
    pub saved: HashMap<(usize, usize), StageValue>,
    pub extras: HashMap<(usize, usize), SavedForRecompute>,
    pub loaded: HashMap<(usize, usize), Loaded>,
    pub losses: Vec<Option<Vec<HostValue>>>,
    pub outputs: Vec<Option<StageValue>>,
    pub input_grads: Vec<Option<Vec<Option<HostValue>>>>,
    /// Gradients of the outputs, for a backward of its own.
    pub seeds: Vec<Option<Seed>>,
    /// An earlier call whose gradients this one adds to.
    pub adds_to: Option<Arc<Call>>,
    buffers: Vec<(Param, HostValue)>,
    /// The largest and the smallest value of layers' outputs, by layer and microbatch.
    pub probes: Vec<(usize, usize, HostValue)>,
    /// Layers whose gradients of this call have all landed.
    pub landed: Vec<bool>,
    pub timed: Vec<Timed>,
    /// Parts that have not ended.
    open: usize,
    /// Whether a backward may still be asked for.
    held: bool,
    failed: bool,
    error: Option<Error>,
    /// What the error said, for those who depend on this call.
    why: String,
    ended: bool,
}

impl State {
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Ends the call when nothing is left to do.
    fn settle(&mut self) {
        // A failed call is never continued.
        if self.open > 0 || (self.held && !self.failed) {
            return;
        }
        self.ended = true;
        if self.failed {
            // Values that nobody will take hold memory of workers and of the host.
            self.passed.clear();
            self.saved.clear();
            self.extras.clear();
            self.loaded.clear();
        }
    }
}

/// The calls of an engine, or of a ring, in the order of their submission.
#[derive(Default)]
pub(crate) struct CallList(Mutex<Vec<Weak<Call>>>);

impl CallList {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<Call>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All calls that have not ended.
    pub fn active(&self) -> Vec<Arc<Call>> {
        let mut list = self.list();
        list.retain(|call| call.upgrade().is_some_and(|call| !call.has_ended()));
        list.iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for a worker's lanes; what they tell fails all calls, and is forgotten then.
    pub fn drain(&self, port: &Port) {
        if let Err(error) = port.drain() {
            self.fail_from(0, &format!("a device failed: {error}"));
            port.forget();
        }
    }

    /// Fails all calls whose number is at least `id`.
    pub fn fail_from(&self, id: u64, why: &str) {
        for call in self.active() {
            if call.spec.id >= id {
                call.fail_alone(Error::Cancelled {
                    why: why.to_owned(),
                });
            }
        }
    }
}

impl Call {
    pub fn new(
        spec: CallSpec,
        call_list: &Arc<CallList>,
        inputs: Vec<Tree<Source>>,
        labels: Vec<Tree<HostValue>>,
    ) -> Arc<Self> {
        let (m, layers) = (spec.microbatches, spec.model.layers.len());
        let abort = spec.model.store.abort();
        fn none<T>(m: usize) -> Vec<Option<T>> {
            (0..m).map(|_| None).collect()
        }
        let state = State {
            inputs: inputs.into_iter().map(Some).collect(),
            labels: labels.into_iter().map(Some).collect(),
            passed: spec.stages.iter().map(|_| none(m)).collect(),
            saved: HashMap::new(),
            extras: HashMap::new(),
            loaded: HashMap::new(),
            losses: none(m),
            outputs: none(m),
            input_grads: none(m),
            seeds: none(m),
            adds_to: None,
            buffers: Vec::new(),
            probes: Vec::new(),
            landed: vec![false; layers],
            timed: Vec::new(),
            open: 0,
            held: false,
            failed: false,
            error: None,
            why: String::new(),
            ended: false,
        };
        let call = Arc::new(Self {
            spec,
            abort,
            data: DataCheck::default(),
            call_list: call_list.clone(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        for list in [call_list, &call.spec.ring_calls] {
            let mut list = list.list();
            // Those that are gone would pile up otherwise.
            list.retain(|call| call.strong_count() > 0);
            list.push(Arc::downgrade(&call));
        }
        call
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes whoever waits.
    pub fn put<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let out = change(&mut self.lock());
        self.changed.notify_all();
        self.spec.board.tick();
        out
    }

    /// Waits until `take` finds what it looks for.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait<R>(
        &self,
        who: &str,
        what: &str,
        mut take: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        let mut state = self.lock();
        let mut watched = None;
        loop {
            if state.failed {
                return Err(Error::Cancelled {
                    why: "the call failed".to_owned(),
                });
            }
            if let Some(found) = take(&mut state) {
                return Ok(found);
            }
            watched.get_or_insert_with(|| self.spec.board.wait(who, what));
            let woken = self.changed.wait_timeout(state, Duration::from_millis(200));
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// One more part must end before the call does.
    pub fn open_part(&self) {
        self.lock().open += 1;
    }

    /// A part has ended. The last one writes the buffers that layers set.
    pub fn end_part(&self) {
        let (last, buffers, failed) = {
            let mut state = self.lock();
            let last = state.open == 1;
            // Still counted, so that nobody takes the call for ended before its buffers are
            // written.
            if !last {
                state.open -= 1;
            }
            let buffers = if last {
                std::mem::take(&mut state.buffers)
            } else {
                Vec::new()
            };
            (last, buffers, state.failed)
        };
        if !last {
            return;
        }
        if !failed && let Err(error) = self.data.check().and_then(|()| write_buffers(buffers)) {
            self.fail(error);
        }
        let mut state = self.lock();
        state.open -= 1;
        state.settle();
        let good = state.ended && !state.failed;
        drop(state);
        if good {
            self.data.clear();
        }
        self.changed.notify_all();
    }

    /// Whether what was read of this call so far is right. Bad data fails the call, and its error
    /// is returned here.
    ///
    /// # Errors
    /// What its kernels reported.
    pub fn confirm(&self) -> Result<()> {
        let Err(error) = self.data.check() else {
            return Ok(());
        };
        self.fail(error);
        Err(self.take_error().unwrap_or_else(|| self.cancelled()))
    }

    /// Values of `other` are used: what is wrong with them is wrong with this call.
    pub fn depend_on(&self, other: &Call) {
        if !other.has_succeeded() {
            self.data.depend_on(&other.data);
        }
    }

    /// The first layer whose output was not finite, and its microbatch; `None` when none was looked
    /// at or all were.
    pub fn first_nonfinite(&self) -> Option<(usize, usize)> {
        let mut probes = std::mem::take(&mut self.lock().probes);
        probes.sort_by_key(|(layer, microbatch, _)| (*layer, *microbatch));
        let finite = |parcel: &HostValue| -> TensorResult<bool> {
            let values =
                HostTensor::new(parcel.fence()?, parcel.dtype(), parcel.shape())?.to_f64_vec()?;
            Ok(values.iter().all(|x| x.is_finite()))
        };
        // One that cannot be read says nothing.
        let found = probes
            .into_iter()
            .find(|(.., parcel)| !finite(parcel).unwrap_or(true));
        found.map(|(layer, microbatch, _)| (layer, microbatch))
    }

    /// The call does not end before [`Call::let_go`]: a backward may follow.
    pub fn hold(&self) {
        self.lock().held = true;
    }

    /// No backward will be asked for any more.
    pub fn let_go(&self) {
        let mut state = self.lock();
        state.held = false;
        state.settle();
        drop(state);
        self.changed.notify_all();
    }

    /// Notes values of buffers at the end of a forward.
    pub fn set_buffers(&self, buffers: Vec<(Param, HostValue)>) {
        if !buffers.is_empty() {
            self.lock().buffers.extend(buffers);
        }
    }

    /// Ends all waits of this call and of those that fail with it.
    pub fn fail(&self, error: Error) {
        let why = format!("another call failed: {}", error.in_full());
        let of_device = error.is_of_device();
        // Only the first failure reaches others: by the second, the engine may be at work again.
        if !self.fail_alone(error) {
            return;
        }
        match of_device {
            true => self.spec.ring_calls.fail_from(0, &why),
            false => self.call_list.fail_from(self.spec.id + 1, &why),
        }
    }

    fn fail_alone(&self, error: Error) -> bool {
        {
            let mut state = self.lock();
            if state.failed || state.ended {
                return false;
            }
            state.failed = true;
            state.why = error.in_full();
            state.error = Some(error);
            if state.open == 0 {
                state.settle();
            }
        }
        self.abort.set();
        self.changed.notify_all();
        true
    }

    pub fn has_failed(&self) -> bool {
        self.lock().failed
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// What another call says that depends on this one, which failed.
    pub fn cancelled(&self) -> Error {
        Error::Cancelled {
            why: format!(
                "the call of {} failed: {}",
                self.spec.model.name,
                self.lock().why
            ),
        }
    }

    /// Whether it ended as it should.
    pub fn has_succeeded(&self) -> bool {
        let state = self.lock();
        state.ended && !state.failed
    }

    /// The error that ended it; `None` when there is none, or it was told already.
    pub fn take_error(&self) -> Option<Error> {
        self.lock().error.take()
    }

    /// Waits until nothing of it is under way, though a backward may still follow.
    pub fn wait_quiet(&self, who: &str) -> bool {
        self.wait_until(who, |state| state.open == 0)
    }

    /// Waits until every part has ended; whether it succeeded.
    pub fn wait_end(&self, who: &str) -> bool {
        self.wait_until(who, |state| state.ended)
    }

    /// Waits until gradients of some of `open` have landed, and takes these layers out: those whose
    /// every gradient layer, listed beside them, is there, or all that are left once the call has
    /// ended.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_landed(
        &self,
        who: &str,
        open: &mut Vec<(usize, Vec<usize>)>,
    ) -> Result<Vec<usize>> {
        self.wait(who, "waiting for gradients", |state| {
            let mut here = Vec::new();
            open.retain(|(layer, needs)| {
                let landed = state.ended || needs.iter().all(|from| state.landed[*from]);
                if landed {
                    here.push(*layer);
                }
                !landed
            });
            (!here.is_empty() || open.is_empty()).then_some(here)
        })
    }

    fn wait_until(&self, who: &str, done: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        let mut watched = None;
        while !done(&state) {
            watched.get_or_insert_with(|| self.spec.board.wait(who, "waiting for a call to end"));
            let woken = self.changed.wait_timeout(state, Duration::from_millis(200));
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        !state.failed
    }

    /// Whether a layer's input is kept for a recompute.
    pub fn saves(&self, layer: usize) -> bool {
        self.backward_stage(layer).is_some_and(|stage| {
            let stage = &self.spec.stages[stage];
            stage.pass == crate::plan::Pass::Backward
                && (self.spec.grain == Grain::Layer || stage.layers.start == layer)
        })
    }

    /// Adds the place to an error of a task.
    pub fn place(
        &self,
        stage: usize,
        layer: Option<usize>,
        microbatch: Option<usize>,
        source: impl Into<Error>,
    ) -> Error {
        let place = self.task_place(stage, layer, microbatch);
        Error::Task {
            place: Box::new(place),
            source: Box::new(source.into()),
        }
    }

    /// What errors call a task.
    pub fn task_place(
        &self,
        stage: usize,
        layer: Option<usize>,
        microbatch: Option<usize>,
    ) -> TaskPlace {
        let spec = &self.spec;
        let Stage { pass, layers, .. } = &spec.stages[stage];
        TaskPlace {
            model: spec.model.name.clone(),
            pass: *pass,
            stage,
            layers: layers.clone(),
            layer: layer.map(|l| (l, spec.model.layers[l].0.clone())),
            microbatch,
            device: spec.devices[spec.workers[stage]],
        }
    }

    /// The backward or fused stage of a layer.
    pub fn backward_stage(&self, layer: usize) -> Option<usize> {
        let spec = &self.spec;
        if !spec.trains {
            return None;
        }
        let back = |stage: &Stage| {
            stage.pass != crate::plan::Pass::Forward && stage.layers.contains(&layer)
        };
        spec.stages.iter().position(back)
    }
}

fn write_buffers(buffers: Vec<(Param, HostValue)>) -> Result<()> {
    // All have landed before the first is written.
    let landed: Vec<_> = buffers
        .iter()
        .map(|(_, parcel)| parcel.fence())
        .collect::<TensorResult<_>>()?;
    for ((param, _), value) in buffers.iter().zip(landed) {
        let data = param.data();
        let mut into = data.write(0..data.len())?;
        into.bytes().copy_from_slice(value.read_all()?.bytes());
    }
    Ok(())
}
