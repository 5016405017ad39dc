//! One call of an engine: what its tasks pass to each other, and how it ends.
//!
//! The threads of all workers meet here. Every edge between tasks is a mailbox: the task that makes
//! a value puts it once, the task that needs it takes it once, and host memory is freed as early as
//! possible. All mailboxes of a call share one lock; nothing is computed, copied or waited for while
//! it is held.
//!
//! # Invariants
//! - A call ends exactly once, after each of its parts (jobs, copies, a caller that reads results)
//!   has ended, whether it failed or not ([`Ending`]).
//! - The first failure is kept. Every wait of the call returns after it.
//! - Every change wakes all waiters, so waits need no timeout.
//! - A failing call fails all calls of its engine that were submitted after it. A device failure may
//!   belong to any unfinished call of the ring, so the first thread that sees it fails them all. Bad
//!   data belongs to the call whose kernel met it, and to calls that took its values ([`DataCheck`]).

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use roundpipe_tensor::device::Stamp;
use roundpipe_tensor::transfer::{HostValue, Port};
use roundpipe_tensor::{DeviceId, HostTensor, Param, Result as TensorResult};

use super::copy_threads::FilledWeights;
use super::data_check::DataCheck;
use super::early_rows::CallRows;
use super::ending::{Ending, PartEnd};
use super::held_weights::HoldPlan;
use super::hooks::Hooks;
use super::model::{LossFn, Model};
use super::repeats::KeepPlan;
use super::stage_value::{Grads, SavedForRecompute, Seed, Source, StageValue};
use crate::budget::CallNeeds;
use crate::config::Grain;
use crate::error::{Error, Result, TaskPlace};
use crate::plan::{Pass, Stage};
use crate::status::Board;
use crate::sync::{lock, unpoisoned};
use crate::trace::Category;
use crate::tree::Tree;
use crate::version::Abort;

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

/// What is fixed about a call.
pub(crate) struct CallSpec {
    pub id: u64,
    pub model: Arc<Model>,
    /// The part of its engine that is called, and what errors call it.
    pub part: usize,
    pub name: Arc<str>,
    /// Forward stages, then backward ones.
    pub stages: Vec<Stage>,
    /// How many of them are forward; a fused stage counts as backward.
    pub forward_stages: usize,
    /// What it needs of every worker.
    pub needs: CallNeeds,
    /// What forwards keep for their recompute.
    pub keep: KeepPlan,
    /// Which frozen weights stay on their workers.
    pub hold: HoldPlan,
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
    /// How often the same part was called before under this number.
    pub repeat: usize,
    /// Whether every layer's output is checked for values that are not finite, because earlier
    /// steps were not.
    pub probes: bool,
    /// What the user sees of layers while they run.
    pub hooks: Arc<Hooks>,
    /// The layers whose outputs the caller wants.
    pub hidden: Vec<usize>,
    pub loss: Option<LossFn>,
    /// The gradient of every microbatch's losses, where the model's outputs are the losses.
    pub output_gradients: Option<Vec<f64>>,
    pub wants_outputs: bool,
    /// Whether outputs stay on the worker that made them.
    pub keeps_outputs: bool,
    pub wants_input_grads: bool,
    /// The rows that it reads of the table in front of the model, where that is all it reads of it.
    pub table_rows: Option<Arc<CallRows>>,
    pub board: Board,
    /// The calls of all engines on the same workers.
    pub ring_calls: Arc<CallList>,
}

impl CallSpec {
    /// What weights of later jobs may take on a stage's worker while it runs.
    pub fn early_room(&self, stage: usize) -> u64 {
        let left = self.keep.left.get(stage).copied().unwrap_or(0);
        left.min(self.needs.early_bytes)
    }

    /// The backward or fused stage of a layer.
    pub fn backward_stage(&self, layer: usize) -> Option<usize> {
        if !self.trains {
            return None;
        }
        self.stages
            .iter()
            .position(|stage| stage.pass != Pass::Forward && stage.layers.contains(&layer))
    }

    /// Whether a layer's input is kept for a recompute.
    pub fn saves(&self, layer: usize) -> bool {
        let Some(stage) = self.backward_stage(layer) else {
            return false;
        };
        let stage = &self.stages[stage];
        let begins_a_recompute = self.grain == Grain::Layer || stage.layers.start == layer;
        stage.pass == Pass::Backward && begins_a_recompute
    }

    /// The workers that read the value in front of `layer` after `stage` has run: the next stage,
    /// and the backward that recomputes from it.
    pub fn readers(&self, stage: usize, layer: usize) -> Vec<usize> {
        let mut readers = Vec::new();
        if let Some(next) = self.stages.get(stage + 1) {
            let takes_it = next.layers.start == layer && self.stages[stage].layers.end == layer;
            if takes_it && next.pass != Pass::Backward {
                readers.push(self.workers[stage + 1]);
            }
        }
        if self.saves(layer)
            && let Some(back) = self.backward_stage(layer)
        {
            readers.push(self.workers[back]);
        }
        readers
    }

    /// The place of a task in an error.
    pub fn task_place(
        &self,
        stage: usize,
        layer: Option<usize>,
        microbatch: Option<usize>,
    ) -> TaskPlace {
        let Stage { pass, layers, .. } = &self.stages[stage];
        TaskPlace {
            model: self.name.to_string(),
            pass: *pass,
            stage,
            layers: layers.clone(),
            layer: layer.map(|layer| (layer, self.model.layers[layer].0.clone())),
            microbatch,
            device: self.devices[self.workers[stage]],
        }
    }
}

/// A call under way.
pub(crate) struct Call {
    pub spec: CallSpec,
    /// Set when the call fails: ends its waits for weights.
    pub abort: Abort,
    pub data: DataCheck,
    call_list: Arc<CallList>,
    state: Mutex<CallState>,
    changed: Condvar,
}

struct CallState {
    boxes: Mailboxes,
    ending: Ending,
    /// An earlier call whose gradients this one adds to.
    adds_to: Option<Arc<Call>>,
    /// The rows that it reads before their table is published.
    early_rows: Option<Arc<CallRows>>,
    /// The lowest place of the random stream since the call was submitted.
    first_number: u64,
    /// Buffers to write when the call is committed.
    buffers: Vec<(Param, HostValue)>,
    /// The largest and the smallest value of layers' outputs, by layer and microbatch.
    probes: Vec<(usize, usize, HostValue)>,
    /// Outputs that the caller asked for, by layer and microbatch.
    hidden: HashMap<(usize, usize), Tree<HostValue>>,
    timed: Vec<Timed>,
    error: Option<Error>,
    /// The error's text, for calls that depend on this one.
    why: String,
}

/// The edges between tasks. Lists are by microbatch.
struct Mailboxes {
    inputs: Vec<Option<Tree<Source>>>,
    labels: Vec<Option<Tree<HostValue>>>,
    /// What a forward stage passes to the next, by stage and microbatch.
    passed: HashMap<(usize, usize), StageValue>,
    /// Gradients that a stage passes to the one behind it, by stage and microbatch.
    grads: HashMap<(usize, usize), Grads>,
    /// Inputs of layers, by layer and microbatch.
    saved: HashMap<(usize, usize), StageValue>,
    /// By layer and microbatch.
    for_recompute: HashMap<(usize, usize), SavedForRecompute>,
    /// Uploaded weights, by stage and layer.
    weights: HashMap<(usize, usize), FilledWeights>,
    /// Rows of the first layer's table, by microbatch.
    rows: HashMap<usize, HostValue>,
    losses: Vec<Option<Vec<HostValue>>>,
    outputs: Vec<Option<StageValue>>,
    input_grads: Vec<Option<Grads>>,
    /// Gradients of the outputs, for a call whose backward the user starts.
    seeds: Vec<Option<Seed>>,
    landed: Landed,
}

/// Gradients of a call that are in host memory.
#[derive(Clone, Default)]
pub(crate) struct Landed {
    /// The layers that wait for no more, of those that were asked for.
    pub ready: Vec<usize>,
    /// Whether all gradients of a layer are there.
    layers: Vec<bool>,
    /// By layer and parameter, the bytes from the first on that are there.
    parts: HashMap<(usize, usize), usize>,
    /// How many parts have landed, of all gradients.
    count: usize,
}

impl Landed {
    /// Bytes of a parameter's gradient that are there, from the first on.
    pub fn bytes(&self, layer: usize, param: usize) -> usize {
        self.parts.get(&(layer, param)).copied().unwrap_or(0)
    }
}

impl Mailboxes {
    fn new(spec: &CallSpec, inputs: Vec<Tree<Source>>, labels: Vec<Tree<HostValue>>) -> Self {
        fn none<T>(count: usize) -> Vec<Option<T>> {
            (0..count).map(|_| None).collect()
        }
        let microbatches = spec.microbatches;
        Self {
            inputs: inputs.into_iter().map(Some).collect(),
            labels: labels.into_iter().map(Some).collect(),
            passed: HashMap::new(),
            grads: HashMap::new(),
            saved: HashMap::new(),
            for_recompute: HashMap::new(),
            weights: HashMap::new(),
            rows: HashMap::new(),
            losses: none(microbatches),
            outputs: none(microbatches),
            input_grads: none(microbatches),
            seeds: none(microbatches),
            landed: Landed {
                layers: vec![false; spec.model.layers.len()],
                ..Landed::default()
            },
        }
    }

    /// Takes out the values between tasks: in a failed call no task takes them, and they hold memory
    /// of workers and of the host.
    fn take_leftovers(&mut self) -> Leftovers {
        Leftovers {
            _passed: std::mem::take(&mut self.passed),
            _grads: std::mem::take(&mut self.grads),
            _saved: std::mem::take(&mut self.saved),
            _for_recompute: std::mem::take(&mut self.for_recompute),
            _weights: std::mem::take(&mut self.weights),
            _rows: std::mem::take(&mut self.rows),
        }
    }
}

/// Values that no task will take. A value that the user gave waits for the copies that read it when
/// it is dropped, so these leave the lock before they go.
#[must_use]
#[derive(Default)]
struct Leftovers {
    _passed: HashMap<(usize, usize), StageValue>,
    _grads: HashMap<(usize, usize), Grads>,
    _saved: HashMap<(usize, usize), StageValue>,
    _for_recompute: HashMap<(usize, usize), SavedForRecompute>,
    _weights: HashMap<(usize, usize), FilledWeights>,
    _rows: HashMap<usize, HostValue>,
}

/// The calls of an engine, or of a ring, in the order of their submission.
#[derive(Default)]
pub(crate) struct CallList(Mutex<Vec<Weak<Call>>>);

impl CallList {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Call>>> {
        lock(&self.0)
    }

    fn add(&self, call: &Arc<Call>) {
        let mut list = self.lock();
        // Calls that are gone would pile up otherwise.
        list.retain(|call| call.strong_count() > 0);
        list.push(Arc::downgrade(call));
    }

    /// All calls that have not ended.
    pub fn active(&self) -> Vec<Arc<Call>> {
        let mut list = self.lock();
        list.retain(|call| call.upgrade().is_some_and(|call| !call.has_ended()));
        list.iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for a worker's lanes. A failure in them fails all calls; the worker can be used again
    /// then.
    pub fn drain(&self, port: &Port) {
        if let Err(error) = port.drain() {
            self.fail_from(0, &format!("a device failed: {error}"));
            // Only now: until every call has the error, each event of the lane must report it to
            // all that ask.
            port.forget();
        }
    }

    /// Fails all calls whose number is at least `id`.
    pub fn fail_from(&self, id: u64, why: &str) {
        for call in self.active() {
            // `fail_alone`: this loop reaches every call that fails with the first, so none passes
            // it on.
            if call.spec.id >= id {
                let why = why.to_owned();
                call.fail_alone(Error::Cancelled { why });
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
        let state = CallState {
            boxes: Mailboxes::new(&spec, inputs, labels),
            ending: Ending::default(),
            adds_to: None,
            early_rows: None,
            first_number: spec.number,
            buffers: Vec::new(),
            probes: Vec::new(),
            hidden: HashMap::new(),
            timed: Vec::new(),
            error: None,
            why: String::new(),
        };
        let call = Arc::new(Self {
            abort: spec.model.store.abort(),
            spec,
            data: DataCheck::default(),
            call_list: call_list.clone(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        // On two lists: a failed task fails later calls of its engine, a failed device all calls on
        // the ring.
        call_list.add(&call);
        call.spec.ring_calls.add(&call);
        call
    }

    fn lock(&self) -> MutexGuard<'_, CallState> {
        lock(&self.state)
    }

    /// Changes the state and wakes all waiters.
    fn update<R>(&self, change: impl FnOnce(&mut CallState) -> R) -> R {
        let out = change(&mut self.lock());
        // Waiters share one condition variable and look for different things, so all must look.
        self.changed.notify_all();
        out
    }

    /// Puts something into a mailbox.
    fn put<R>(&self, put: impl FnOnce(&mut Mailboxes) -> R) -> R {
        let out = self.update(|state| put(&mut state.boxes));
        self.spec.board.tick();
        out
    }

    /// Waits until `look` finds what it looks for.
    fn wait_until<R>(
        &self,
        who: &str,
        what: &str,
        mut look: impl FnMut(&mut CallState) -> Option<R>,
    ) -> R {
        let mut state = self.lock();
        let mut on_board = None;
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            // A value that is there costs no line on the board. The board's lock comes behind the
            // call's.
            on_board.get_or_insert_with(|| self.spec.board.wait(who, what));
            state = unpoisoned(self.changed.wait(state));
        }
    }

    /// Waits until `take` finds something in a mailbox.
    fn wait<R>(
        &self,
        who: &str,
        what: &str,
        mut take: impl FnMut(&mut Mailboxes) -> Option<R>,
    ) -> Result<R> {
        self.wait_until(who, what, |state| {
            // Before the mailbox: what still lies there belongs to work that no longer counts.
            if state.ending.has_failed() {
                let why = "the call failed".to_owned();
                return Some(Err(Error::Cancelled { why }));
            }
            take(&mut state.boxes).map(Ok)
        })
    }

    // ---- inputs and labels ----

    /// The input of a microbatch, once.
    pub fn take_input(&self, microbatch: usize) -> Option<Tree<Source>> {
        self.lock().boxes.inputs[microbatch].take()
    }

    /// Whether a microbatch's input is complete: the outputs of other calls that it contains have
    /// been made, or never will be.
    pub fn input_is_ready(&self, microbatch: usize) -> bool {
        // The locks of two calls are never held together.
        let Some(input) = self.lock().boxes.inputs[microbatch].clone() else {
            return false;
        };
        input.leaves().into_iter().all(|source| match source {
            Source::Value(_) => true,
            Source::Output {
                call: other,
                microbatch,
                ..
            } => {
                let state = other.lock();
                state.boxes.outputs[*microbatch].is_some() || state.ending.has_failed()
            }
        })
    }

    /// The labels of a microbatch, once.
    pub fn take_labels(&self, microbatch: usize) -> Tree<HostValue> {
        let labels = self.lock().boxes.labels[microbatch].take();
        labels.unwrap_or(Tree::None)
    }

    // ---- from stage to stage ----

    /// The output of a forward stage, for the next one.
    pub fn pass_value(&self, stage: usize, microbatch: usize, value: StageValue) {
        self.put(|boxes| boxes.passed.insert((stage, microbatch), value));
    }

    /// What `stage` has passed on, if it has.
    pub fn try_take_value(&self, stage: usize, microbatch: usize) -> Option<StageValue> {
        self.lock().boxes.passed.remove(&(stage, microbatch))
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_value(&self, who: &str, stage: usize, microbatch: usize) -> Result<StageValue> {
        let what = format!("waiting for microbatch {microbatch} of stage {stage}");
        self.wait(who, &what, |boxes| {
            boxes.passed.remove(&(stage, microbatch))
        })
    }

    /// The gradients of a stage's inputs, for the stage that runs the layers before it.
    pub fn pass_grads(&self, stage: usize, microbatch: usize, grads: Grads) {
        self.put(|boxes| boxes.grads.insert((stage, microbatch), grads));
    }

    /// The gradients that `stage` has passed on, if it has.
    pub fn try_take_grads(&self, stage: usize, microbatch: usize) -> Option<Grads> {
        self.lock().boxes.grads.remove(&(stage, microbatch))
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_grads(&self, who: &str, stage: usize, microbatch: usize) -> Result<Grads> {
        let what =
            format!("waiting for the gradients of microbatch {microbatch} from stage {stage}");
        self.wait(who, &what, |boxes| boxes.grads.remove(&(stage, microbatch)))
    }

    // ---- from forward to backward ----

    /// The input of a layer, for its recompute.
    pub fn save_input(&self, layer: usize, microbatch: usize, value: StageValue) {
        self.put(|boxes| boxes.saved.insert((layer, microbatch), value));
    }

    /// A layer's saved input, if it is there.
    pub fn try_take_saved(&self, layer: usize, microbatch: usize) -> Option<StageValue> {
        self.lock().boxes.saved.remove(&(layer, microbatch))
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_saved(&self, who: &str, layer: usize, microbatch: usize) -> Result<StageValue> {
        let what = format!("waiting for the saved input of layer {layer}, microbatch {microbatch}");
        self.wait(who, &what, |boxes| boxes.saved.remove(&(layer, microbatch)))
    }

    /// What a layer saved for its recompute. There is an entry even for nothing: the recompute may
    /// come first, and waits for it.
    pub fn save_for_recompute(&self, layer: usize, microbatch: usize, saved: SavedForRecompute) {
        self.put(|boxes| boxes.for_recompute.insert((layer, microbatch), saved));
    }

    /// What a layer saved for its recompute, if it is there.
    pub fn try_take_for_recompute(
        &self,
        layer: usize,
        microbatch: usize,
    ) -> Option<SavedForRecompute> {
        self.lock().boxes.for_recompute.remove(&(layer, microbatch))
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_for_recompute(
        &self,
        who: &str,
        layer: usize,
        microbatch: usize,
    ) -> Result<SavedForRecompute> {
        let what = format!("waiting for the forward of layer {layer}, microbatch {microbatch}");
        self.wait(who, &what, |boxes| {
            boxes.for_recompute.remove(&(layer, microbatch))
        })
    }

    // ---- weights and gradients ----

    /// Weights whose upload has been queued.
    pub fn put_weights(&self, stage: usize, layer: usize, weights: FilledWeights) {
        self.put(|boxes| boxes.weights.insert((stage, layer), weights));
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_weights(&self, who: &str, stage: usize, layer: usize) -> Result<FilledWeights> {
        let what = "waiting for a layer's weights to be sent";
        self.wait(who, what, |boxes| boxes.weights.remove(&(stage, layer)))
    }

    /// Rows come before their table: the optimizer has taken the request.
    pub fn set_early_rows(&self, rows: Arc<CallRows>) {
        self.lock().early_rows = Some(rows);
    }

    /// The rows that come before their table.
    pub fn early_rows(&self) -> Option<Arc<CallRows>> {
        self.lock().early_rows.clone()
    }

    /// New rows that a microbatch brings, and their places.
    pub fn put_rows(&self, microbatch: usize, rows: HostValue) {
        self.put(|boxes| boxes.rows.insert(microbatch, rows));
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_rows(&self, who: &str, microbatch: usize) -> Result<HostValue> {
        let what = format!("waiting for the rows of microbatch {microbatch}");
        self.wait(who, &what, |boxes| boxes.rows.remove(&microbatch))
    }

    /// All gradients of a layer are in host memory.
    pub fn mark_landed(&self, layer: usize) {
        self.put(|boxes| boxes.landed.layers[layer] = true);
    }

    /// The first bytes of a gradient are in host memory.
    pub fn mark_part_landed(&self, layer: usize, param: usize, bytes: usize) {
        self.put(|boxes| {
            boxes.landed.parts.insert((layer, param), bytes);
            boxes.landed.count += 1;
        });
    }

    /// Waits until more gradients have landed than `before`. Layers of `open` are ready, and taken
    /// out, when every gradient layer listed beside them is there, or all that are left once the call
    /// has ended.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_landed(
        &self,
        who: &str,
        open: &mut Vec<(usize, Vec<usize>)>,
        before: &Landed,
    ) -> Result<Landed> {
        self.wait_until(who, "waiting for gradients", |state| {
            if state.ending.has_failed() {
                let why = "the call failed".to_owned();
                return Some(Err(Error::Cancelled { why }));
            }
            // A layer without gradients never lands; the end of the call stands for it.
            let ended = state.ending.has_ended();
            let landed = &state.boxes.landed;
            let mut ready = Vec::new();
            open.retain(|(layer, needs)| {
                let is_ready = ended || needs.iter().all(|from| landed.layers[*from]);
                if is_ready {
                    ready.push(*layer);
                }
                !is_ready
            });
            let is_new = landed.count > before.count;
            let is_done = !ready.is_empty() || open.is_empty() || is_new;
            is_done.then(|| {
                let landed = landed.clone();
                Ok(Landed { ready, ..landed })
            })
        })
    }

    // ---- results ----

    /// The output of a microbatch.
    pub fn put_output(&self, microbatch: usize, value: StageValue) {
        self.put(|boxes| boxes.outputs[microbatch] = Some(value));
    }

    /// The losses of a microbatch, and its output if it is wanted.
    pub fn put_losses(
        &self,
        microbatch: usize,
        losses: Vec<HostValue>,
        output: Option<StageValue>,
    ) {
        self.put(|boxes| {
            boxes.losses[microbatch] = Some(losses);
            boxes.outputs[microbatch] = output;
        });
    }

    /// The gradients of the call's inputs for a microbatch.
    pub fn put_input_grads(&self, microbatch: usize, grads: Grads) {
        self.put(|boxes| boxes.input_grads[microbatch] = Some(grads));
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_losses(&self, who: &str, microbatch: usize) -> Result<Vec<HostValue>> {
        let what = format!("waiting for the loss of microbatch {microbatch}");
        self.wait(who, &what, |boxes| boxes.losses[microbatch].take())
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_output(&self, who: &str, microbatch: usize) -> Result<StageValue> {
        let what = format!(
            "waiting for the outputs of microbatch {microbatch} of {}",
            self.spec.name
        );
        // Cloned, not taken: the user, calls that take it as an input and the backward all read it.
        self.wait(who, &what, |boxes| boxes.outputs[microbatch].clone())
    }

    /// # Errors
    /// [`Error::Cancelled`] when the call fails.
    pub fn wait_input_grads(&self, who: &str, microbatch: usize) -> Result<Grads> {
        let what = format!("waiting for the input gradients of {}", self.spec.name);
        self.wait(who, &what, |boxes| boxes.input_grads[microbatch].clone())
    }

    // ---- the backward that the user starts ----

    /// Gradients of the outputs by microbatch, before the backward is queued.
    pub fn set_seeds(&self, seeds: Vec<Seed>) {
        self.put(|boxes| boxes.seeds = seeds.into_iter().map(Some).collect());
    }

    /// The gradients that a microbatch's backward starts from, once.
    pub fn take_seed(&self, microbatch: usize) -> Option<Seed> {
        self.lock().boxes.seeds[microbatch].take()
    }

    /// Gradients are added to those of `earlier`, a call of the same step.
    pub fn set_adds_to(&self, earlier: Option<Arc<Call>>) {
        self.lock().adds_to = earlier;
    }

    /// The call whose gradients this one adds to.
    pub fn adds_to(&self) -> Option<Arc<Call>> {
        self.lock().adds_to.clone()
    }

    // ---- notes ----

    /// An extreme value of a layer's output.
    pub fn note_probe(&self, layer: usize, microbatch: usize, value: HostValue) {
        self.lock().probes.push((layer, microbatch, value));
    }

    /// The first layer whose output was not finite, and its microbatch; `None` when none was
    /// probed or all were finite.
    pub fn first_nonfinite(&self) -> Option<(usize, usize)> {
        // Out of the lock first: reading a probe waits for its copy.
        let mut probes = std::mem::take(&mut self.lock().probes);
        probes.sort_by_key(|(layer, microbatch, _)| (*layer, *microbatch));
        for (layer, microbatch, value) in probes {
            // A probe that cannot be read says nothing.
            if !is_finite(&value).unwrap_or(true) {
                return Some((layer, microbatch));
            }
        }
        None
    }

    /// The output of a layer that the caller asked for. No thread waits for it alone.
    pub fn put_hidden(&self, layer: usize, microbatch: usize, value: Tree<HostValue>) {
        let key = (layer, microbatch);
        self.lock().hidden.insert(key, value);
    }

    /// The output of a hidden layer, if it is there.
    pub fn hidden(&self, layer: usize, microbatch: usize) -> Option<Tree<HostValue>> {
        self.lock().hidden.get(&(layer, microbatch)).cloned()
    }

    pub fn note_time(&self, timed: Timed) {
        self.lock().timed.push(timed);
    }

    pub fn take_times(&self) -> Vec<Timed> {
        std::mem::take(&mut self.lock().timed)
    }

    /// Values of buffers at the end of a forward; they are written when the call is committed.
    pub fn set_buffers(&self, buffers: Vec<(Param, HostValue)>) {
        if !buffers.is_empty() {
            self.lock().buffers.extend(buffers);
        }
    }

    // ---- the end ----

    /// One more part must end before the call does.
    pub fn open_part(&self) {
        self.lock().ending.add_part();
    }

    /// A part has ended. The last one commits the call: it writes the buffers that layers set.
    pub fn end_part(&self) {
        let (end, buffers, leftovers) = self.update(|state| match state.ending.end_part() {
            PartEnd::Commit => {
                let buffers = std::mem::take(&mut state.buffers);
                (PartEnd::Commit, buffers, Leftovers::default())
            }
            PartEnd::Nothing => (PartEnd::Nothing, Vec::new(), state.leftovers_if_over()),
        });
        drop(leftovers);
        if end == PartEnd::Commit {
            self.commit(buffers);
        }
    }

    /// Writes buffers and ends the call, or fails it.
    fn commit(&self, buffers: Vec<(Param, HostValue)>) {
        // Outside the lock: buffers wait for their copies. Reports come first, since a call that
        // fails for its data writes no buffer.
        if !buffers.is_empty() {
            let ids = buffers.iter().map(|(param, _)| param.id());
            lock(&self.spec.model.set_buffers).extend(ids);
        }
        if let Err(error) = self.data.check().and_then(|()| write_buffers(buffers)) {
            let of_device = error.is_of_device();
            let why = error.to_string();
            drop(self.update(|state| {
                state.ending.fail_commit();
                state.fail(error)
            }));
            self.abort.set();
            // Before the end: a caller that sees it may submit calls, and those must not fail.
            self.spread(of_device, &why);
        }
        drop(self.update(|state| {
            state.ending.end_commit();
            state.leftovers_if_over()
        }));
        if self.has_succeeded() {
            // Calls that take its values from here on need no reports: `depend_on` asks whether it
            // succeeded.
            self.data.clear();
        }
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
        // A commit under way finds the same reports, and fails the call itself.
        self.wait_until("caller", "waiting for a call to end", |state| {
            let is_over = !state.ending.is_committing();
            is_over.then_some(())
        });
        Err(self.take_error().unwrap_or_else(|| self.cancelled()))
    }

    /// Values of `other` are used, so its bad data is bad data of this call.
    pub fn depend_on(&self, other: &Call) {
        if !other.has_succeeded() {
            self.data.depend_on(&other.data);
        }
    }

    /// Where the random stream goes back to if this call fails: its own place, or a lower one that
    /// an earlier failure has put the stream back to since.
    pub fn first_number(&self) -> u64 {
        self.lock().first_number
    }

    /// A failure that this call survived has put the random stream back to `number`.
    pub fn note_went_back(&self, number: u64) {
        let mut state = self.lock();
        state.first_number = state.first_number.min(number);
    }

    /// The call does not end before [`Call::let_go`]: a backward may follow.
    pub fn hold(&self) {
        self.lock().ending.hold();
    }

    /// No backward will follow.
    pub fn let_go(&self) {
        drop(self.update(|state| {
            state.ending.let_go();
            state.leftovers_if_over()
        }));
    }

    /// Fails this call, and those that fail with it.
    pub fn fail(&self, error: Error) {
        let of_device = error.is_of_device();
        let why = error.to_string();
        // Only the first failure is passed on: by a second, the engine may have recovered and be at
        // work again.
        if self.begin_failure(error) {
            self.spread(of_device, &why);
            self.end_part();
        }
    }

    /// Fails this call and no other.
    fn fail_alone(&self, error: Error) {
        if self.begin_failure(error) {
            self.end_part();
        }
    }

    /// Marks the call as failed; `false` if it is too late. The caller ends the part that this is.
    fn begin_failure(&self, error: Error) -> bool {
        let leftovers = self.update(|state| {
            let fails = state.ending.fail();
            fails.then(|| state.fail(error))
        });
        let fails = leftovers.is_some();
        if fails {
            // Waits for versions of weights sleep at the store's gate, where the abort wakes them.
            self.abort.set();
        }
        fails
    }

    /// Fails the calls that fail with this one.
    fn spread(&self, of_device: bool, why: &str) {
        let why = format!("another call failed: {why}");
        if of_device {
            // Numbers of calls are an engine's own, so on a list of several engines only 0 has a
            // meaning.
            self.spec.ring_calls.fail_from(0, &why);
        } else {
            self.call_list.fail_from(self.spec.id + 1, &why);
        }
    }

    pub fn has_failed(&self) -> bool {
        self.lock().ending.has_failed()
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ending.has_ended()
    }

    /// Whether it has ended without a failure.
    pub fn has_succeeded(&self) -> bool {
        let state = self.lock();
        state.ending.has_ended() && !state.ending.has_failed()
    }

    /// The error of a call that depends on this one, which failed.
    pub fn cancelled(&self) -> Error {
        let name = &self.spec.name;
        let why = format!("the call of {name} failed: {}", self.lock().why);
        Error::Cancelled { why }
    }

    /// The error that ended it, once.
    pub fn take_error(&self) -> Option<Error> {
        self.lock().error.take()
    }

    /// Waits until nothing of it is under way, though a backward may still follow.
    pub fn wait_quiet(&self, who: &str) {
        self.wait_until(who, "waiting for a call to end", |state| {
            state.ending.is_quiet().then_some(())
        });
    }

    /// Waits until every part has ended; whether it succeeded.
    pub fn wait_end(&self, who: &str) -> bool {
        self.wait_until(who, "waiting for a call to end", |state| {
            let failed = state.ending.has_failed();
            state.ending.has_ended().then_some(!failed)
        })
    }

    /// Says in an error where it happened.
    pub fn error_at(
        &self,
        stage: usize,
        layer: Option<usize>,
        microbatch: Option<usize>,
        cause: impl Into<Error>,
    ) -> Error {
        Error::Task {
            place: Box::new(self.spec.task_place(stage, layer, microbatch)),
            cause: Box::new(cause.into()),
        }
    }
}

impl CallState {
    fn fail(&mut self, error: Error) -> Leftovers {
        self.why = error.to_string();
        self.error = Some(error);
        self.leftovers_if_over()
    }

    fn leftovers_if_over(&mut self) -> Leftovers {
        if self.ending.has_ended() && self.ending.has_failed() {
            self.boxes.take_leftovers()
        } else {
            Leftovers::default()
        }
    }
}

fn is_finite(value: &HostValue) -> TensorResult<bool> {
    let tensor = HostTensor::new(value.fence()?, value.dtype(), value.shape())?;
    Ok(tensor.to_f64_vec()?.iter().all(|x| x.is_finite()))
}

fn write_buffers(buffers: Vec<(Param, HostValue)>) -> Result<()> {
    // All have landed before the first is written.
    let mut landed = Vec::with_capacity(buffers.len());
    for (_, value) in &buffers {
        landed.push(value.fence()?);
    }
    for ((param, _), value) in buffers.iter().zip(landed) {
        let data = param.data();
        let mut into = data.write(0..data.len())?;
        into.bytes().copy_from_slice(value.read_all()?.bytes());
    }
    Ok(())
}
