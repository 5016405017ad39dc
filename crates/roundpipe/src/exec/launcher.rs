//! One worker's tasks, in the order of its jobs.
//!
//! A job is one stage of a call: a stage, all microbatches in order. The launcher seats each layer's
//! weights when its first microbatch gets there, so that compute starts with the first layer that
//! has landed, and asks for the next job's weights before it starts this one's tasks. The input of
//! the next microbatch is sent for before the current one is computed; so is what the first
//! microbatch of a backward job that follows has saved.
//!
//! # What stays on the worker
//! - A value whose every reader is on this worker, while the budget lasts: it is never downloaded.
//! - A value that a stage passed on unchanged (positions, masks): uploaded once per call.
//!
//! Both are let go when their last reader has them, or after their call has ended: another call's
//! jobs may run between a forward and its backward.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use roundpipe_tensor::device::Stamp;
use roundpipe_tensor::transfer::{Arrival, HostValue, Port, Slot};
use roundpipe_tensor::{Cx, DType, LaneKind, RngSite, Shape, Tensor, Worker};

use super::call::{
    Call, Leaf, Model, Passed, SavedForRecompute, Seed, Source, StageValue, State, Timed,
};
use super::copy_threads::{CopyThreads, Gradient, GradientDownload, WeightUpload};
use super::ring::JobQueue;
use super::run_layer::{self, Activation, LoadedLayer, Mode, Ran, Taped};
use crate::config::Grain;
use crate::error::{Error, Result};
use crate::plan::Pass;
use crate::trace::Category;
use crate::tree::Tree;
use crate::version::ReadTicket;

/// What stays until the backward, and constants, leave one part in so many of what may stay to
/// values that the next stage takes: those come and go with every stage, and the others would push
/// them out for a whole step.
const SOON_SHARE: u64 = 4;
/// Values on their way out may hold one part in so many of a worker's memory.
const OUTBOX_SHARE: u64 = 16;

/// One stage of a call, and the right to read the weights of its layers.
pub(crate) struct Job {
    pub call: Arc<Call>,
    pub stage: usize,
    /// By layer of the stage, in the order of upload.
    pub tickets: HashMap<usize, Vec<ReadTicket>>,
    /// Whether its weights were asked for already.
    pub ordered: bool,
}

/// A value that stays on the worker.
struct Kept {
    tensor: Tensor,
    /// Keeps the address, by which it is found, from being used again.
    _parcel: HostValue,
    /// Whose value it is.
    call: Weak<Call>,
    /// Readers to come; `None` until the call ends.
    uses: Option<usize>,
}

/// How long a value stays.
#[derive(Clone, Copy)]
enum Until {
    /// Until the next stage has it.
    NextStage,
    /// Until the backward, or the end of the call.
    Later,
}

/// A layer's weights that stay on the worker.
struct ResidentWeights {
    model: Weak<Model>,
    layer: usize,
    version: u64,
    /// What [`Store::writes`](crate::Store) said when they were sent.
    writes: u64,
    tensors: Vec<Tensor>,
}

impl ResidentWeights {
    fn is(&self, call: &Call, layer: usize) -> bool {
        !call.spec.training
            && std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(&call.spec.model))
            && self.layer == layer
            && self.version == call.spec.version
            && self.writes == call.spec.model.store.writes(layer)
    }
}

/// Whether the outputs of other calls that a microbatch starts from are there, or will never be.
fn has_come(call: &Call, microbatch: usize) -> bool {
    let source = call.lock().inputs[microbatch].clone();
    let come = |source: &&Source| match source {
        Source::Value(_) => true,
        Source::Output(other, m) => {
            let state = other.lock();
            state.outputs[*m].is_some() || state.has_failed()
        }
    };
    source.is_some_and(|source| source.leaves().iter().all(come))
}

/// Whether a visit starts from gradients of the caller's.
fn takes_seed(task: &Task<'_>) -> bool {
    let spec = &task.call.spec;
    spec.loss.is_none() && task.stage == spec.forward_stages
}

/// The gradients that the stage before has passed on for a visit, once.
fn passed_grads(state: &mut State, task: &Task<'_>) -> Option<Vec<Option<HostValue>>> {
    let passed = &mut state.passed[task.stage - 1][task.microbatch];
    match passed.take() {
        Some(Passed::Grads(grads)) => Some(grads),
        other => {
            *passed = other;
            None
        }
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!(
        "it panicked: {}",
        text.unwrap_or_else(|| "without a message".to_owned())
    )
}

/// One worker's hands.
pub(crate) struct Launcher {
    pub index: usize,
    pub who: String,
    pub port: Arc<Port>,
    /// The port's worker, whose kernels report bad data to the current job.
    worker: Worker,
    pub copies: CopyThreads,
    /// Bytes of values that may stay on the worker.
    pub keep_limit: u64,
    kept: HashMap<usize, Kept>,
    kept_bytes: u64,
    /// What forwards saved, on its way, by layer and microbatch.
    prefetched: HashMap<(usize, usize), Prefetched>,
    /// Weights that stay from call to call.
    settled: Vec<ResidentWeights>,
    /// The call of the current job.
    call: Weak<Call>,
    /// Where jobs come from, and the one that follows the current one.
    line: Option<Arc<JobQueue>>,
    pub next: Option<Job>,
}

/// What a microbatch's visit is called in errors.
struct Task<'a> {
    call: &'a Arc<Call>,
    stage: usize,
    microbatch: usize,
}

impl Task<'_> {
    /// Where a layer's random numbers begin.
    fn site(&self, layer: usize) -> RngSite {
        let spec = &self.call.spec;
        RngSite {
            seed: spec.model.seed,
            step: spec.number,
            microbatch: self.microbatch as u32,
            layer: (spec.model.first_layer + layer) as u32,
            site: 0,
        }
    }
}

/// What a launcher is busy with, for people.
struct Doing<'a>(&'a Task<'a>, Option<usize>);

impl fmt::Display for Doing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(task, layer) = self;
        let model = &task.call.spec.model;
        write!(f, "{}: stage {}, ", model.name, task.stage)?;
        match layer {
            Some(layer) => write!(f, "layer {layer} ({})", model.layers[*layer].0)?,
            None => write!(f, "loss")?,
        }
        write!(f, ", microbatch {}", task.microbatch)
    }
}

/// A microbatch's values on their way to the worker.
type Arriving = Tree<Awaited>;

/// What a forward saved for a layer's recompute, on its way: its input, and the rest once that is
/// known.
struct Prefetched {
    input: Arriving,
    extra: Option<ArrivingSaved>,
}

/// A gradient that is on the worker, or on its way.
enum Grad {
    Here(Tensor),
    Arriving(Arrival),
}

/// What a layer itself saved, and its buffers by place.
struct ArrivingSaved {
    data: Vec<Arrival>,
    buffers: Vec<(usize, Arrival)>,
}

enum Awaited {
    Here(Activation),
    Arriving(Arrival, Leaf),
}

/// The layers of a job that are on the worker.
#[derive(Default)]
struct LoadedLayers(HashMap<usize, LoadedLayer>);

impl Launcher {
    pub fn new(
        index: usize,
        port: Arc<Port>,
        copies: CopyThreads,
        keep_limit: u64,
        line: Option<Arc<JobQueue>>,
    ) -> Self {
        let who = format!("{} launcher", port.worker().device().id());
        let kept = HashMap::new();
        let (prefetched, settled, call, next) = (HashMap::new(), Vec::new(), Weak::new(), None);
        let worker = port.worker().clone();
        Self {
            index,
            who,
            port,
            worker,
            copies,
            keep_limit,
            kept,
            kept_bytes: 0,
            prefetched,
            settled,
            call,
            line,
            next,
        }
    }

    fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Runs a job to its end. A failure goes to the call.
    pub fn run(&mut self, mut job: Job) {
        let call = job.call.clone();
        self.enter(&call);
        let error = if call.has_failed() {
            None
        } else {
            self.run_catching(&mut job).err()
        };
        let here = error.is_some();
        if let Some(error) = error {
            call.fail(error);
        }
        if call.has_failed() {
            self.forget(|kept| !std::ptr::addr_eq(kept.as_ptr(), Arc::as_ptr(&call)));
        }
        if here {
            call.spec.ring_calls.drain(&self.port);
        }
        self.worker = self.port.worker().clone();
        drop(job);
        call.end_part();
    }

    /// Whatever panics fails its call, not the worker.
    fn run_catching(&mut self, job: &mut Job) -> Result<()> {
        let (call, stage) = (job.call.clone(), job.stage);
        let ran = catch_unwind(AssertUnwindSafe(|| self.run_job(job)));
        ran.unwrap_or_else(|panic| {
            let what = roundpipe_tensor::Error::invalid("task", panic_text(&*panic));
            Err(call.place(stage, None, None, what))
        })
    }

    /// Values of calls that have ended are let go.
    fn enter(&mut self, call: &Arc<Call>) {
        if !std::ptr::addr_eq(self.call.as_ptr(), Arc::as_ptr(call)) {
            self.forget(|call| {
                call.upgrade()
                    .is_some_and(|call| !call.has_ended() && !call.has_failed())
            });
            // Weights of engines that are gone, and older versions of this one's.
            let (model, version) = (Arc::as_ptr(&call.spec.model), call.spec.version);
            self.settled.retain(
                |settled| match std::ptr::addr_eq(settled.model.as_ptr(), model) {
                    true => settled.version == version,
                    false => settled.model.strong_count() > 0,
                },
            );
            self.call = Arc::downgrade(call);
        }
    }

    /// Lets go of all values but those of some calls.
    fn forget(&mut self, but: impl Fn(&Weak<Call>) -> bool) {
        // Jobs of one call take all that was sent for, unless it failed.
        self.prefetched.clear();
        self.kept.retain(|_, kept| but(&kept.call));
        self.kept_bytes = self
            .kept
            .values()
            .map(|kept| kept.tensor.size_bytes() as u64)
            .sum();
    }

    /// Asks for the weights of the job that follows, as soon as there is one.
    fn look_ahead(&mut self) {
        if self.next.is_some() {
            return;
        }
        let Some(mut next) = self.line.as_ref().and_then(|line| line.try_pop()) else {
            return;
        };
        if !next.call.has_failed() {
            // Without room for two stages the next one waits for this one to end.
            let _ = self.order(&mut next);
        }
        self.next = Some(next);
    }

    fn run_job(&mut self, job: &mut Job) -> Result<()> {
        self.order(job)?;
        let call = job.call.clone();
        let faults = self
            .port
            .worker()
            .open_faults()
            .map_err(|e| call.place(job.stage, None, None, e))?;
        if let Some(faults) = &faults {
            call.data
                .watch(call.task_place(job.stage, None, None), faults.clone());
        }
        self.worker = self.port.worker().reporting_to(faults);
        let pass = call.spec.stages[job.stage].pass;
        let mut loaded = LoadedLayers::default();
        let earlier = call.lock().adds_to.clone();
        if pass != Pass::Forward
            && let Some(earlier) = earlier
        {
            earlier.wait_end(&self.who);
        }
        let mut ahead = None;
        for microbatch in 0..call.spec.microbatches {
            self.look_ahead();
            let task = Task {
                call: &call,
                stage: job.stage,
                microbatch,
            };
            self.port.turn().map_err(|e| self.place(&task, None, e))?;
            match pass {
                Pass::Forward => self.forward(job, &mut loaded, &task, &mut ahead)?,
                Pass::Fused => self.fused(job, &mut loaded, &task, &mut ahead)?,
                Pass::Backward => self.backward(job, &mut loaded, &task)?,
            }
        }
        self.finish(job, loaded)
    }

    /// Adds the place to an error.
    fn place(
        &self,
        task: &Task<'_>,
        layer: Option<usize>,
        source: roundpipe_tensor::Error,
    ) -> Error {
        task.call
            .place(task.stage, layer, Some(task.microbatch), source)
    }

    // ---- weights ----

    /// Asks for the weights of a job's layers, in the order they are needed. A worker that reads
    /// host memory in place needs no copies.
    fn order(&mut self, job: &mut Job) -> Result<()> {
        if job.ordered || self.worker().device().aliases_host() {
            return Ok(());
        }
        let call = job.call.clone();
        let stage = &call.spec.stages[job.stage];
        let mut layers: Vec<usize> = stage.layers.clone().collect();
        if stage.pass == Pass::Backward && call.spec.grain == Grain::Layer {
            layers.reverse();
        }
        let task = Task {
            call: &call,
            stage: job.stage,
            microbatch: 0,
        };
        layers.retain(|layer| !self.settled.iter().any(|settled| settled.is(&call, *layer)));
        let mut slots = Vec::new();
        for layer in layers {
            let bytes = call.spec.model.store.layer(layer).block_bytes() as u64;
            let stage = Slot::reserve(self.worker(), bytes)
                .map_err(|e| self.place(&task, Some(layer), e))?;
            slots.push((layer, stage));
        }
        job.ordered = true;
        for (layer, memory) in slots {
            let tickets = job.tickets.remove(&layer).unwrap_or_default();
            self.copies.load(WeightUpload {
                call: call.clone(),
                stage: job.stage,
                layer,
                memory,
                tickets,
            });
        }
        Ok(())
    }

    /// Waits for a layer's weights and makes tensors of them.
    fn weights_of<'s>(
        &mut self,
        job: &mut Job,
        loaded: &'s mut LoadedLayers,
        layer: usize,
        task: &Task<'_>,
    ) -> Result<&'s mut LoadedLayer> {
        match loaded.0.entry(layer) {
            Entry::Occupied(layer_here) => Ok(layer_here.into_mut()),
            Entry::Vacant(free) => Ok(free.insert(self.load_weights(job, layer, task)?)),
        }
    }

    fn load_weights(
        &mut self,
        job: &mut Job,
        layer: usize,
        task: &Task<'_>,
    ) -> Result<LoadedLayer> {
        let call = task.call;
        let stored = call.spec.model.store.layer(layer);
        let fail = |e| self.place(task, Some(layer), e);
        let tensors = if self.worker().device().aliases_host() {
            for ticket in job.tickets.get(&layer).into_iter().flatten() {
                let _watched = call
                    .spec
                    .board
                    .wait(&self.who, "waiting for a layer's weights");
                ticket.wait_readable(&call.abort)?;
            }
            let worker = self.worker();
            let mut tensors = Vec::new();
            for (i, p) in stored.params().iter().enumerate() {
                let data = call.spec.model.store.data(layer, i, call.spec.version)?;
                tensors.push(worker.alias(&data, p.dtype, p.shape).map_err(fail)?);
            }
            tensors
        } else if let Some(settled) = self.settled.iter().find(|settled| settled.is(call, layer)) {
            settled.tensors.clone()
        } else {
            let what = "waiting for a layer's weights to be sent";
            let loaded = call.wait(&self.who, what, |state| {
                state.loaded.remove(&(task.stage, layer))
            })?;
            let places: Vec<(u64, DType, Shape)> = stored
                .params()
                .iter()
                .map(|p| (p.block_offset as u64, p.dtype, p.shape))
                .collect();
            let tensors = loaded.tensors(&places).map_err(fail)?;
            let model = &call.spec.model;
            // A layer that sets buffers has new ones without a new version.
            if model.resident && !call.spec.training && !model.sets_buffers.load(Ordering::SeqCst) {
                let writes = model.store.writes(layer);
                let (model, version) = (Arc::downgrade(model), call.spec.version);
                self.settled.push(ResidentWeights {
                    model,
                    layer,
                    version,
                    writes,
                    tensors: tensors.clone(),
                });
            }
            tensors
        };
        let sums = self.sums(task, layer, tensors.len())?;
        let params = stored
            .params()
            .iter()
            .map(|p| p.param.clone())
            .zip(tensors)
            .collect();
        Ok(LoadedLayer {
            index: layer,
            params,
            set: vec![false; sums.len()],
            sums,
        })
    }

    /// Gradients of earlier calls since the last step, as the start of the sums.
    fn sums(&mut self, task: &Task<'_>, layer: usize, count: usize) -> Result<Vec<Option<Tensor>>> {
        let spec = &task.call.spec;
        let mut sums: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        if task.call.lock().adds_to.is_none() || spec.stages[task.stage].pass == Pass::Forward {
            return Ok(sums);
        }
        let stored = spec.model.store.layer(layer);
        for (i, sum) in sums.iter_mut().enumerate() {
            let Some(grad) = stored.grad_range(i)?.filter(|_| stored.filled(i)) else {
                continue;
            };
            let start = || {
                let p = &stored.params()[i];
                let parcel = HostValue::given(grad, p.grad_dtype, p.shape)?;
                let here = self.port.receive("gradient so far", &parcel)?.land()?;
                // A sum is written to, so it must be the worker's own memory.
                let own = self.worker().copied(&here, p.dtype.accumulator())?;
                drop(here);
                Ok(own)
            };
            *sum = Some(start().map_err(|e| self.place(task, Some(layer), e))?);
        }
        Ok(sums)
    }

    // ---- values ----

    /// Keeps a value on the worker if every reader is here and the budget allows.
    fn keep(&mut self, tensor: &Tensor, readers: &[usize], until: Until) -> Option<HostValue> {
        if !self.stays(readers) || !self.has_room(tensor.size_bytes(), until) {
            return None;
        }
        let parcel = HostValue::device_only(tensor);
        self.hold(&parcel, tensor, Some(readers.len()));
        Some(parcel)
    }

    /// Whether a value's every reader is here; without readers it is the host's.
    fn stays(&self, readers: &[usize]) -> bool {
        !readers.is_empty() && readers.iter().all(|worker| *worker == self.index)
    }

    /// Whether the budget of values that stay allows `bytes` more.
    fn has_room(&self, bytes: usize, until: Until) -> bool {
        let limit = match until {
            Until::NextStage => self.keep_limit,
            Until::Later => self.keep_limit - self.keep_limit / SOON_SHARE,
        };
        self.kept_bytes + bytes as u64 <= limit
    }

    fn hold(&mut self, parcel: &HostValue, tensor: &Tensor, uses: Option<usize>) {
        self.kept_bytes += tensor.size_bytes() as u64;
        let kept = Kept {
            tensor: tensor.clone(),
            _parcel: parcel.clone(),
            call: self.call.clone(),
            uses,
        };
        self.kept.insert(parcel.id(), kept);
    }

    /// A value that is on the worker already.
    fn find(&mut self, parcel: &HostValue) -> Option<Tensor> {
        let kept = self.kept.get_mut(&parcel.id())?;
        let tensor = kept.tensor.clone();
        if let Some(uses) = &mut kept.uses {
            *uses -= 1;
            if *uses == 0 {
                self.kept.remove(&parcel.id());
                self.kept_bytes -= tensor.size_bytes() as u64;
            }
        }
        Some(tensor)
    }

    /// Starts bringing a value here.
    fn receive(&mut self, task: &Task<'_>, flow: StageValue) -> Result<Arriving> {
        let mut bring = |leaf: Leaf| -> Result<Awaited> {
            let kept = leaf.here.as_ref().filter(|here| here.0 == self.index);
            if let Some(tensor) = kept
                .map(|here| here.1.clone())
                .or_else(|| self.find(&leaf.parcel))
            {
                return Ok(Awaited::Here(Activation {
                    tensor,
                    grad: leaf.grad,
                    parcel: Some(leaf.parcel),
                }));
            }
            let arrival = self.port.receive("activation", &leaf.parcel);
            Ok(Awaited::Arriving(
                arrival.map_err(|e| self.place(task, None, e))?,
                leaf,
            ))
        };
        flow.try_map(&mut bring)
    }

    fn land(&mut self, task: &Task<'_>, prefetched: Arriving) -> Result<Tree<Activation>> {
        prefetched.try_map(|awaited| match awaited {
            Awaited::Here(held) => Ok(held),
            Awaited::Arriving(arrival, leaf) => {
                let tensor = arrival.land().map_err(|e| self.place(task, None, e))?;
                if leaf.constant && self.has_room(leaf.parcel.size_bytes(), Until::Later) {
                    self.hold(&leaf.parcel, &tensor, None);
                }
                Ok(Activation {
                    tensor,
                    grad: leaf.grad,
                    parcel: Some(leaf.parcel),
                })
            }
        })
    }

    /// Makes a value available to its readers (the host, when there are none): kept here, already
    /// elsewhere, or downloaded.
    fn send(
        &mut self,
        task: &Task<'_>,
        here: &mut Tree<Activation>,
        readers: &[usize],
        until: Until,
    ) -> Result<StageValue> {
        let mut leaves = Vec::new();
        for held in here.leaves_mut() {
            // What stayed here alone is nothing to others, nor to the host (no readers).
            let local = self.stays(readers);
            let parcel = match &held.parcel {
                Some(parcel) if local || !parcel.is_device_only() => {
                    self.pass_on(parcel, &held.tensor, readers)
                }
                _ => match self.keep(&held.tensor, readers, until) {
                    Some(parcel) => parcel,
                    None => {
                        let sent = self.port.send("activation", &held.tensor);
                        sent.map_err(|e| self.place(task, None, e))?
                    }
                },
            };
            held.parcel = Some(parcel.clone());
            leaves.push(Leaf::new(parcel, held.grad));
        }
        Ok(here.with_leaves(leaves)?)
    }

    /// A value that came here and goes on unchanged is not sent again, and stays for the next stage
    /// here.
    fn pass_on(&mut self, parcel: &HostValue, tensor: &Tensor, readers: &[usize]) -> HostValue {
        let here = readers.contains(&self.index);
        let room = self.has_room(tensor.size_bytes(), Until::Later);
        match self.kept.get_mut(&parcel.id()) {
            Some(Kept {
                uses: Some(uses), ..
            }) => *uses += readers.len(),
            Some(_) => {}
            // A hollow one must stay, whatever it takes: it is nowhere else.
            None if parcel.is_device_only() => self.hold(parcel, tensor, Some(readers.len())),
            None if here && room => self.hold(parcel, tensor, None),
            None => {}
        }
        parcel.clone()
    }

    /// The workers that will read the value in front of `layer` after stage `stage` ran.
    fn readers(&self, call: &Call, stage: usize, layer: usize) -> Vec<usize> {
        let spec = &call.spec;
        let next = spec
            .stages
            .get(stage + 1)
            .filter(|next| next.layers.start == layer);
        let mut readers: Vec<usize> = next
            .filter(|next| next.pass != Pass::Backward && spec.stages[stage].layers.end == layer)
            .map(|_| spec.workers[stage + 1])
            .into_iter()
            .collect();
        if call.saves(layer) {
            readers.extend(call.backward_stage(layer).map(|back| spec.workers[back]));
        }
        readers
    }

    // ---- forward ----

    /// The input of a microbatch, from the call or from the stage before; `None` when it is not
    /// there yet.
    fn input(&self, task: &Task<'_>, wait: bool) -> Result<Option<StageValue>> {
        let call = task.call;
        let microbatch = task.microbatch;
        if task.stage == 0 {
            if !wait && !has_come(call, microbatch) {
                return Ok(None);
            }
            let source = call.lock().inputs[microbatch].take();
            let Some(source) = source else {
                return Ok(None);
            };
            return self.resolve(task, source).map(Some);
        }
        let take = |state: &mut State| match state.passed[task.stage - 1][microbatch].take() {
            Some(Passed::StageValue(flow)) => Some(flow),
            other => {
                state.passed[task.stage - 1][microbatch] = other;
                None
            }
        };
        if !wait {
            return Ok(take(&mut call.lock()));
        }
        let what = format!(
            "waiting for microbatch {microbatch} of stage {}",
            task.stage - 1
        );
        call.wait(&self.who, &what, take).map(Some)
    }

    /// Outputs of other calls, microbatch by microbatch, as they come.
    fn resolve(&self, task: &Task<'_>, source: Tree<Source>) -> Result<StageValue> {
        source.try_flat_map(&mut |source| match source {
            Source::Value(leaf) => Ok(Tree::Tensor(leaf)),
            Source::Output(other, microbatch) => {
                let what = format!(
                    "waiting for microbatch {microbatch} of {}",
                    other.spec.model.name
                );
                let found = other.wait(&self.who, &what, |state| state.outputs[microbatch].clone());
                let found = found.map_err(|_| other.cancelled())?;
                task.call.depend_on(&other);
                let grads = task.call.spec.wants_input_grads;
                Ok(found.map_ref(|leaf| Leaf {
                    grad: leaf.grad && grads,
                    ..leaf.clone()
                }))
            }
        })
    }

    /// The input of this visit on the worker, and the next one's on its way.
    fn take_input(
        &mut self,
        task: &Task<'_>,
        ahead: &mut Option<Arriving>,
    ) -> Result<Tree<Activation>> {
        let prefetched = match ahead.take() {
            Some(prefetched) => prefetched,
            None => {
                let flow = self.input(task, true)?;
                let flow = flow.ok_or_else(|| Error::Cancelled {
                    why: "an input was taken twice".to_owned(),
                })?;
                self.receive(task, flow)?
            }
        };
        let here = self.land(task, prefetched)?;
        let next = Task {
            microbatch: task.microbatch + 1,
            ..*task
        };
        if next.microbatch < task.call.spec.microbatches
            && let Some(flow) = self.input(&next, false)?
        {
            *ahead = Some(self.receive(&next, flow)?);
        }
        Ok(here)
    }

    fn forward(
        &mut self,
        job: &mut Job,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        ahead: &mut Option<Arriving>,
    ) -> Result<()> {
        let (call, m) = (task.call, task.microbatch);
        let spec = &call.spec;
        let stage = &spec.stages[task.stage];
        let mut here = self.take_input(task, ahead)?;
        for layer in stage.layers.clone() {
            // What came from the stage before was saved there.
            if call.saves(layer) && (layer > stage.layers.start || task.stage == 0) {
                let readers = self.readers(call, task.stage, layer);
                let flow = self.send(task, &mut here, &readers, Until::Later)?;
                call.put(|state| state.saved.insert((layer, m), flow));
            }
            let layer_here = self.weights_of(job, loaded, layer, task)?;
            let mode = if spec.trains {
                Mode::Forward
            } else {
                Mode::Infer
            };
            let ran = self.run_layer(task, layer_here, Category::Forward, mode, &here)?;
            if spec.trains {
                self.save_for_recompute(task, layer, &ran)?;
            }
            here = ran.output;
        }
        let end = stage.layers.end;
        let last = spec
            .stages
            .get(task.stage + 1)
            .is_none_or(|next| next.pass == Pass::Backward);
        if last {
            let flow = match spec.keeps_outputs {
                true => here.map_ref(|held| self.kept_output(held)),
                false => self.send(task, &mut here, &[], Until::Later)?,
            };
            call.put(|state| state.outputs[m] = Some(flow));
            return Ok(());
        }
        let readers = self.readers(call, task.stage, end);
        let until = if call.saves(end) {
            Until::Later
        } else {
            Until::NextStage
        };
        let flow = self.send(task, &mut here, &readers, until)?;
        call.put(|state| {
            if call.saves(end) {
                state.saved.insert((end, m), flow.clone());
            }
            state.passed[task.stage][m] = Some(Passed::StageValue(flow));
        });
        Ok(())
    }

    /// An output that stays where it is.
    fn kept_output(&self, held: &Activation) -> Leaf {
        let here = Some(Arc::new((self.index, held.tensor.clone())));
        Leaf {
            here,
            ..Leaf::new(HostValue::device_only(&held.tensor), held.grad)
        }
    }

    /// What a layer saved for its recompute goes to the host. There is an entry even for nothing:
    /// the recompute may come here first, and waits for it.
    fn save_for_recompute(&mut self, task: &Task<'_>, layer: usize, ran: &Ran) -> Result<()> {
        let mut extra = SavedForRecompute::default();
        let send = |tensor: &Tensor| {
            self.port
                .send("saved for recompute", tensor)
                .map_err(|e| self.place(task, Some(layer), e))
        };
        for tensor in ran.saved.iter().flatten() {
            extra.data.push(send(tensor)?);
        }
        for (place, before) in &ran.buffers {
            extra.buffers.push((*place, send(before)?));
        }
        task.call
            .put(|state| state.extras.insert((layer, task.microbatch), extra));
        Ok(())
    }

    fn run_layer(
        &self,
        task: &Task<'_>,
        layer_here: &mut LoadedLayer,
        category: Category,
        mode: Mode,
        input: &Tree<Activation>,
    ) -> Result<Ran> {
        let spec = &task.call.spec;
        if task.call.has_failed() {
            // Nobody waits for the rest, which may take long.
            return Err(task.call.cancelled());
        }
        let layer = layer_here.index;
        let room = self.worker().pool().capacity().0 / OUTBOX_SHARE;
        self.port
            .make_room(room)
            .map_err(|e| self.place(task, Some(layer), e))?;
        let site = task.site(layer);
        let module = &*spec.model.layers[layer].1;
        let ran = self.timed(task, Some(layer), category, || {
            layer_here.run(module, self.worker(), spec.training, site, mode, input)
        })?;
        if spec.probes && category != Category::Recompute {
            self.probe(task, layer, &ran.output);
        }
        if !ran.buffers.is_empty() {
            // Known before the caller sees a result of this call, so before it can submit the next.
            spec.model.sets_buffers.store(true, Ordering::SeqCst);
        }
        Ok(ran)
    }

    /// Notes the largest and the smallest value of a layer's output: they tell whether all are
    /// finite. What cannot be looked at for want of memory is left out.
    fn probe(&self, task: &Task<'_>, layer: usize, output: &Tree<Activation>) {
        // Values that no gradient flows through, such as masks, may well be infinite.
        for held in output
            .leaves()
            .into_iter()
            .filter(|held| held.grad && held.tensor.numel() > 0)
        {
            let mut cx = Cx::infer(self.worker());
            let extremes = [
                cx.max(&held.tensor, &[], false),
                cx.min(&held.tensor, &[], false),
            ];
            for value in extremes.into_iter().flatten() {
                if let Ok(parcel) = self.port.send("probe", &value) {
                    task.call
                        .lock()
                        .probes
                        .push((layer, task.microbatch, parcel));
                }
            }
        }
    }

    /// Runs a piece of work between two stamps.
    fn timed<R>(
        &self,
        task: &Task<'_>,
        layer: Option<usize>,
        category: Category,
        work: impl FnOnce() -> roundpipe_tensor::Result<R>,
    ) -> Result<R> {
        let fail = |e| self.place(task, layer, e);
        // A user's layer or loss function may panic: it fails its call, not the worker.
        let work = || {
            let what = if layer.is_some() { "layer" } else { "loss_fn" };
            let failed = |panic: Box<dyn Any + Send>| {
                roundpipe_tensor::Error::invalid(what, panic_text(&*panic))
            };
            catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(failed(panic)))
        };
        let _doing = task.call.spec.board.enter(&self.who, Doing(task, layer));
        let lane = self.worker().device().lane(LaneKind::Compute);
        let from: Stamp = lane.stamp().map_err(fail)?;
        let out = work().map_err(fail)?;
        let to = lane.stamp().map_err(fail)?;
        let (worker, stage, microbatch) = (self.index, task.stage, task.microbatch);
        task.call.lock().timed.push(Timed {
            worker,
            stage,
            layer,
            microbatch,
            category,
            from,
            to,
        });
        Ok(out)
    }

    // ---- backward ----

    fn fused(
        &mut self,
        job: &mut Job,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        ahead: &mut Option<Arriving>,
    ) -> Result<()> {
        let (call, m) = (task.call, task.microbatch);
        let spec = &call.spec;
        let mut here = self.take_input(task, ahead)?;
        if task.microbatch + 1 == spec.microbatches {
            self.prefetch_for_next_job(task)?;
        }
        let mut tapes: Vec<Taped> = Vec::new();
        for layer in spec.stages[task.stage].layers.clone() {
            let layer_here = self.weights_of(job, loaded, layer, task)?;
            let ran = self.run_layer(task, layer_here, Category::Fused, Mode::Record, &here)?;
            tapes.extend(ran.tape);
            here = ran.output;
        }
        let label = call.lock().labels[m].take().unwrap_or(Tree::None);
        let label = label.map_ref(|parcel| Leaf::new(parcel.clone(), false));
        let prefetched = self.receive(task, label)?;
        let label = self
            .land(task, prefetched)?
            .map_ref(|held| held.tensor.clone());
        let loss = spec
            .loss
            .clone()
            .ok_or_else(|| Error::config("loss_fn", "a fused stage needs one"))?;
        // The loss draws behind the last layer.
        let site = task.site(spec.model.layers.len());
        let (losses, grads) = self.timed(task, None, Category::Loss, || {
            run_layer::losses(&loss, self.worker(), site, &here, label)
        })?;
        let outputs = if spec.wants_outputs {
            Some(self.send(task, &mut here, &[], Until::Later)?)
        } else {
            None
        };
        drop(here);
        let send = |loss: &Tensor| {
            self.port
                .send("loss", loss)
                .map_err(|e| self.place(task, None, e))
        };
        let losses = losses.iter().map(send).collect::<Result<Vec<_>>>()?;
        call.put(|state| {
            state.losses[m] = Some(losses);
            state.outputs[m] = outputs;
        });
        let grads = self.walk_back(task, loaded, tapes, grads)?;
        self.pass_grads(task, grads)
    }

    /// Layers of a visit from the last to the first.
    fn walk_back(
        &self,
        task: &Task<'_>,
        loaded: &mut LoadedLayers,
        tapes: Vec<Taped>,
        mut grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let layers = task.call.spec.stages[task.stage].layers.clone();
        for (layer, tape) in layers.zip(tapes).rev() {
            let layer_here = loaded.0.get_mut(&layer).expect("it was run in this task");
            grads = self.timed(task, Some(layer), Category::Backward, || {
                layer_here.back(tape, grads)
            })?;
        }
        Ok(grads)
    }

    fn backward(
        &mut self,
        job: &mut Job,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
    ) -> Result<()> {
        let spec = &task.call.spec;
        let layers = spec.stages[task.stage].layers.clone();
        if spec.grain == Grain::Stage {
            let (mut here, mut extra) = self.saved(task, layers.start)?;
            let asked = self.prefetch_grads(task)?;
            self.prefetch_saved(task, layers.start, task.microbatch + 1)?;
            let mut tapes = Vec::new();
            for layer in layers {
                let ran = self.recompute(job, loaded, task, layer, &here, extra.take())?;
                tapes.extend(ran.tape);
                here = ran.output;
            }
            drop(here);
            let grads = self.take_grads(task, asked)?;
            let grads = self.walk_back(task, loaded, tapes, grads)?;
            return self.pass_grads(task, grads);
        }
        let (mut grads, mut asked) = (None, None);
        for layer in layers.clone().rev() {
            let (here, extra) = self.saved(task, layer)?;
            if grads.is_none() {
                asked = self.prefetch_grads(task)?;
            }
            match layer > layers.start {
                true => self.prefetch_saved(task, layer - 1, task.microbatch)?,
                false => self.prefetch_saved(task, layers.end - 1, task.microbatch + 1)?,
            }
            let ran = self.recompute(job, loaded, task, layer, &here, extra)?;
            drop(here);
            let given = match grads.take() {
                Some(grads) => grads,
                None => self.take_grads(task, asked.take())?,
            };
            drop(ran.output);
            let tape = ran.tape.expect("a recompute is recorded");
            let layer_here = loaded.0.get_mut(&layer).expect("just run");
            grads = Some(self.timed(task, Some(layer), Category::Backward, || {
                layer_here.back(tape, given)
            })?);
        }
        self.pass_grads(task, grads.unwrap_or_default())
    }

    /// Starts bringing what was saved for a layer that is needed next, if it is there; behind the
    /// last microbatch that is the next job's.
    fn prefetch_saved(&mut self, task: &Task<'_>, layer: usize, microbatch: usize) -> Result<()> {
        if microbatch == task.call.spec.microbatches {
            return self.prefetch_for_next_job(task);
        }
        let key = (layer, microbatch);
        let (saved, extra) = {
            let mut state = task.call.lock();
            let Some(saved) = state.saved.remove(&key) else {
                return Ok(());
            };
            let bytes = state.extras.get(&key).map_or(0, SavedForRecompute::bytes);
            (
                saved,
                if self.has_headroom(bytes) {
                    state.extras.remove(&key)
                } else {
                    None
                },
            )
        };
        let input = self.receive(task, saved)?;
        let extra = extra
            .map(|extra| self.receive_saved(task, layer, &extra))
            .transpose()?;
        self.prefetched.insert(key, Prefetched { input, extra });
        Ok(())
    }

    /// Whether so much may come before it is needed: half of the worker stays free for the visit
    /// under way, and what was ever in use at once fits beside it.
    fn has_headroom(&self, bytes: usize) -> bool {
        let (usage, capacity) = (
            self.worker().pool().usage(),
            self.worker().pool().capacity().0,
        );
        let with = |used: u64| used.saturating_add(bytes as u64);
        with(usage.used.0) <= capacity / 2 && with(usage.peak_used.0) <= capacity
    }

    /// Starts bringing what the first microbatch of the next job needs, if that job goes backward
    /// in the same call.
    fn prefetch_for_next_job(&mut self, task: &Task<'_>) -> Result<()> {
        let (call, spec) = (task.call, &task.call.spec);
        let Some(next) = self
            .next
            .as_ref()
            .filter(|next| Arc::ptr_eq(&next.call, call))
        else {
            return Ok(());
        };
        let next_stage = next.stage;
        let stage = &spec.stages[next_stage];
        if stage.pass != Pass::Backward {
            return Ok(());
        }
        let layer = match spec.grain {
            Grain::Stage => stage.layers.start,
            Grain::Layer => stage.layers.end - 1,
        };
        let bytes: usize = {
            let state = call.lock();
            let saved = state
                .saved
                .get(&(layer, 0))
                .map(Tree::leaves)
                .unwrap_or_default();
            saved.iter().map(|leaf| leaf.parcel.size_bytes()).sum()
        };
        if !self.has_headroom(bytes) {
            return Ok(());
        }
        self.prefetch_saved(
            &Task {
                call,
                stage: next_stage,
                microbatch: 0,
            },
            layer,
            0,
        )
    }

    /// Starts bringing what a layer saved for its recompute.
    fn receive_saved(
        &self,
        task: &Task<'_>,
        layer: usize,
        extra: &SavedForRecompute,
    ) -> Result<ArrivingSaved> {
        let bring = |parcel: &HostValue| {
            let arrival = self.port.receive("saved for recompute", parcel);
            arrival.map_err(|e| self.place(task, Some(layer), e))
        };
        let data = extra.data.iter().map(bring).collect::<Result<Vec<_>>>()?;
        let buffers = extra
            .buffers
            .iter()
            .map(|(place, parcel)| Ok((*place, bring(parcel)?)));
        Ok(ArrivingSaved {
            data,
            buffers: buffers.collect::<Result<Vec<_>>>()?,
        })
    }

    /// The saved input of a layer, on the worker, and what else was sent for with it.
    fn saved(
        &mut self,
        task: &Task<'_>,
        layer: usize,
    ) -> Result<(Tree<Activation>, Option<ArrivingSaved>)> {
        let m = task.microbatch;
        if let Some(Prefetched { input, extra }) = self.prefetched.remove(&(layer, m)) {
            return Ok((self.land(task, input)?, extra));
        }
        let what = format!("waiting for the saved input of layer {layer}, microbatch {m}");
        let saved = task
            .call
            .wait(&self.who, &what, |state| state.saved.remove(&(layer, m)))?;
        let prefetched = self.receive(task, saved)?;
        Ok((self.land(task, prefetched)?, None))
    }

    fn recompute(
        &mut self,
        job: &mut Job,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        layer: usize,
        input: &Tree<Activation>,
        extra: Option<ArrivingSaved>,
    ) -> Result<Ran> {
        let extra = match extra {
            Some(extra) => extra,
            None => {
                let key = (layer, task.microbatch);
                let what = format!(
                    "waiting for the forward of layer {layer}, microbatch {}",
                    key.1
                );
                let extra = task
                    .call
                    .wait(&self.who, &what, |state| state.extras.remove(&key))?;
                self.receive_saved(task, layer, &extra)?
            }
        };
        let land = |arrival: Arrival| arrival.land().map_err(|e| self.place(task, Some(layer), e));
        let data = extra
            .data
            .into_iter()
            .map(land)
            .collect::<Result<Vec<_>>>()?;
        let buffers = extra
            .buffers
            .into_iter()
            .map(|(place, arrival)| Ok((place, land(arrival)?)));
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let layer_here = self.weights_of(job, loaded, layer, task)?;
        // The forward saw these buffers; the next microbatch brings its own.
        for (place, before) in buffers {
            layer_here.params[place].1 = before;
        }
        self.run_layer(
            task,
            layer_here,
            Category::Recompute,
            Mode::Recompute(data),
            input,
        )
    }

    /// Starts bringing the gradients of this stage's outputs, if the stage before has passed them
    /// on: they are needed before anything else that is sent for.
    fn prefetch_grads(&mut self, task: &Task<'_>) -> Result<Option<Vec<Option<Grad>>>> {
        if takes_seed(task) {
            return Ok(None);
        }
        let passed = {
            let mut state = task.call.lock();
            let bytes = match &state.passed[task.stage - 1][task.microbatch] {
                Some(Passed::Grads(grads)) => {
                    grads.iter().flatten().map(HostValue::size_bytes).sum()
                }
                _ => 0,
            };
            if self.has_headroom(bytes) {
                passed_grads(&mut state, task)
            } else {
                None
            }
        };
        passed
            .map(|parcels| self.bring_grads(task, parcels))
            .transpose()
    }

    /// The gradients of this stage's outputs, on the worker.
    fn take_grads(
        &mut self,
        task: &Task<'_>,
        asked: Option<Vec<Option<Grad>>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let grads = match asked {
            Some(grads) => grads,
            None => {
                let parcels = self.grads(task)?;
                self.bring_grads(task, parcels)?
            }
        };
        let land = |grad: Grad| match grad {
            Grad::Here(tensor) => Ok(tensor),
            Grad::Arriving(arrival) => arrival.land().map_err(|e| self.place(task, None, e)),
        };
        grads
            .into_iter()
            .map(|grad| grad.map(land).transpose())
            .collect()
    }

    fn bring_grads(
        &mut self,
        task: &Task<'_>,
        parcels: Vec<Option<HostValue>>,
    ) -> Result<Vec<Option<Grad>>> {
        let mut bring = |parcel: HostValue| match self.find(&parcel) {
            Some(tensor) => Ok(Grad::Here(tensor)),
            None => {
                let arrival = self.port.receive("gradient", &parcel);
                Ok(Grad::Arriving(
                    arrival.map_err(|e| self.place(task, None, e))?,
                ))
            }
        };
        parcels
            .into_iter()
            .map(|parcel| parcel.map(&mut bring).transpose())
            .collect()
    }

    /// The same where they are: from the stage before, from the user, or from another call.
    fn grads(&self, task: &Task<'_>) -> Result<Vec<Option<HostValue>>> {
        let m = task.microbatch;
        if takes_seed(task) {
            let seed = task.call.lock().seeds[m].take();
            return match seed {
                Some(Seed::Given(grads)) => Ok(grads),
                Some(Seed::Of(other, leaves)) => {
                    let what = format!(
                        "waiting for the input gradients of {}",
                        other.spec.model.name
                    );
                    let found = other.wait(&self.who, &what, |state| state.input_grads[m].clone());
                    let found = found.map_err(|_| other.cancelled())?;
                    task.call.depend_on(&other);
                    let leaves = leaves.unwrap_or(0..found.len());
                    Ok(found[leaves].to_vec())
                }
                None => Err(Error::Cancelled {
                    why: "the gradients were taken twice".to_owned(),
                }),
            };
        }
        let what = format!(
            "waiting for the gradients of microbatch {m} from stage {}",
            task.stage - 1
        );
        task.call
            .wait(&self.who, &what, |state| passed_grads(state, task))
    }

    /// The gradients of this stage's inputs go to the stage that runs the layers before.
    fn pass_grads(&mut self, task: &Task<'_>, grads: Vec<Option<Tensor>>) -> Result<()> {
        let spec = &task.call.spec;
        let next = spec.workers.get(task.stage + 1).copied();
        if next.is_none() && !spec.wants_input_grads {
            return Ok(());
        }
        let mut parcels = Vec::with_capacity(grads.len());
        for grad in grads {
            let Some(grad) = grad else {
                parcels.push(None);
                continue;
            };
            let readers: Vec<usize> = next.into_iter().collect();
            let parcel = match self.keep(&grad, &readers, Until::NextStage) {
                Some(parcel) => parcel,
                None => self
                    .port
                    .send("gradient", &grad)
                    .map_err(|e| self.place(task, None, e))?,
            };
            parcels.push(Some(parcel));
        }
        task.call.put(|state| match next {
            Some(_) => state.passed[task.stage][task.microbatch] = Some(Passed::Grads(parcels)),
            None => state.input_grads[task.microbatch] = Some(parcels),
        });
        Ok(())
    }

    // ---- the end of a job ----

    /// Sums of gradients, rounded once, and buffers leave the worker.
    fn finish(&mut self, job: &mut Job, loaded: LoadedLayers) -> Result<()> {
        let call = job.call.clone();
        let spec = &call.spec;
        let stage = &spec.stages[job.stage];
        let task = Task {
            call: &call,
            stage: job.stage,
            microbatch: spec.microbatches - 1,
        };
        if stage.pass != Pass::Backward && spec.training {
            self.send_buffers(&task, &loaded)?;
        }
        if stage.pass == Pass::Forward {
            return self.finish_forward(job);
        }
        let mut gradients = Vec::new();
        let mut layer_here: Vec<LoadedLayer> = loaded.0.into_values().collect();
        layer_here.sort_by_key(|layer_here| std::cmp::Reverse(layer_here.index));
        for LoadedLayer {
            index,
            params,
            sums,
            ..
        } in layer_here
        {
            let stored = spec.model.store.layer(index);
            for (i, sum) in sums.into_iter().enumerate() {
                let Some(sum) = sum else { continue };
                let rounded = self.worker().cast(&sum, stored.params()[i].grad_dtype);
                let tensor = rounded.map_err(|e| self.place(&task, Some(index), e))?;
                gradients.push(Gradient {
                    layer: index,
                    param: i,
                    tensor,
                });
            }
            drop(params);
        }
        let lane = self.worker().device().lane(LaneKind::Compute);
        let after = lane.record().map_err(|e| self.place(&task, None, e))?;
        self.copies.unload(GradientDownload {
            call: call.clone(),
            stage: job.stage,
            gradients,
            after,
        });
        Ok(())
    }

    /// Where kernels report bad data later than they are launched, a call that may end without a
    /// backward ends behind them.
    fn finish_forward(&mut self, job: &Job) -> Result<()> {
        let call = &job.call;
        let goes_on = call.spec.trains && call.spec.loss.is_some();
        if goes_on || self.worker().device().aliases_host() {
            return Ok(());
        }
        let lane = self.worker().device().lane(LaneKind::Compute);
        let after = lane
            .record()
            .map_err(|e| call.place(job.stage, None, None, e))?;
        self.copies.unload(GradientDownload {
            call: call.clone(),
            stage: job.stage,
            gradients: Vec::new(),
            after,
        });
        Ok(())
    }

    fn send_buffers(&mut self, task: &Task<'_>, loaded: &LoadedLayers) -> Result<()> {
        let mut buffers = Vec::new();
        for layer_here in loaded.0.values() {
            for ((param, tensor), set) in layer_here.params.iter().zip(&layer_here.set) {
                if *set {
                    let sent = self.port.send("buffer", tensor);
                    buffers.push((
                        param.clone(),
                        sent.map_err(|e| self.place(task, Some(layer_here.index), e))?,
                    ));
                }
            }
        }
        task.call.set_buffers(buffers);
        Ok(())
    }
}
