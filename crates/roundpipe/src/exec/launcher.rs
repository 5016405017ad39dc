//! One worker's tasks, in the order of its jobs.
//!
//! A job is one slot of a call: a stage, all microbatches in order. The launcher seats each layer's
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
use roundpipe_tensor::transfer::{Arrival, Parcel, Port, Slot};
use roundpipe_tensor::{Cx, DType, LaneKind, RngSite, Shape, Tensor, Worker};

use super::call::{Call, Extra, Flow, Leaf, Model, Passed, Seed, Source, State, Timed};
use super::copier::{Gradient, Load, Mover, Unload};
use super::ring::Line;
use super::visit::{self, Held, Mode, Ran, Seated, Taped};
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

/// One slot of a call, and the right to read the weights of its layers.
pub(crate) struct Job {
    pub call: Arc<Call>,
    pub slot: usize,
    /// By layer of the stage, in the order of upload.
    pub tickets: HashMap<usize, Vec<ReadTicket>>,
    /// Whether its weights were asked for already.
    pub ordered: bool,
}

/// A value that stays on the worker.
struct Kept {
    tensor: Tensor,
    /// Keeps the address, by which it is found, from being used again.
    _parcel: Parcel,
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
struct Settled {
    model: Weak<Model>,
    layer: usize,
    version: u64,
    /// What [`Store::writes`](crate::Store) said when they were sent.
    writes: u64,
    tensors: Vec<Tensor>,
}

impl Settled {
    fn is(&self, call: &Call, layer: usize) -> bool {
        !call.terms.training
            && std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(&call.terms.model))
            && self.layer == layer
            && self.version == call.terms.version
            && self.writes == call.terms.model.store.writes(layer)
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
fn takes_seed(visit: &Visit<'_>) -> bool {
    let terms = &visit.call.terms;
    terms.loss.is_none() && visit.slot == terms.forward_slots
}

/// The gradients that the slot before has passed on for a visit, once.
fn passed_grads(state: &mut State, visit: &Visit<'_>) -> Option<Vec<Option<Parcel>>> {
    let passed = &mut state.passed[visit.slot - 1][visit.microbatch];
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
    pub mover: Mover,
    /// Bytes of values that may stay on the worker.
    pub keep_limit: u64,
    kept: HashMap<usize, Kept>,
    kept_bytes: u64,
    /// What forwards saved, on its way, by layer and microbatch.
    coming: HashMap<(usize, usize), Ahead>,
    /// Weights that stay from call to call.
    settled: Vec<Settled>,
    /// The call of the current job.
    call: Weak<Call>,
    /// Where jobs come from, and the one that follows the current one.
    line: Option<Arc<Line>>,
    pub next: Option<Job>,
}

/// What a microbatch's visit is called in errors.
struct Visit<'a> {
    call: &'a Arc<Call>,
    slot: usize,
    microbatch: usize,
}

impl Visit<'_> {
    /// Where a layer's random numbers begin.
    fn site(&self, layer: usize) -> RngSite {
        let terms = &self.call.terms;
        RngSite {
            seed: terms.model.seed,
            step: terms.number,
            microbatch: self.microbatch as u32,
            layer: (terms.model.first_layer + layer) as u32,
            site: 0,
        }
    }
}

/// What a launcher is busy with, for people.
struct Doing<'a>(&'a Visit<'a>, Option<usize>);

impl fmt::Display for Doing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(visit, layer) = self;
        let model = &visit.call.terms.model;
        write!(f, "{}: stage {}, ", model.name, visit.slot)?;
        match layer {
            Some(layer) => write!(f, "layer {layer} ({})", model.layers[*layer].0)?,
            None => write!(f, "loss")?,
        }
        write!(f, ", microbatch {}", visit.microbatch)
    }
}

/// A microbatch's values on their way to the worker.
type Coming = Tree<Awaited>;

/// What a forward saved for a layer's recompute, on its way: its input, and the rest once that is
/// known.
struct Ahead {
    input: Coming,
    extra: Option<Extras>,
}

/// A gradient that is on the worker, or on its way.
enum Grad {
    Here(Tensor),
    Coming(Arrival),
}

/// What a layer itself saved, and its buffers by place.
struct Extras {
    data: Vec<Arrival>,
    buffers: Vec<(usize, Arrival)>,
}

enum Awaited {
    Here(Held),
    Coming(Arrival, Leaf),
}

/// The layers of a job that are on the worker.
#[derive(Default)]
struct Seats(HashMap<usize, Seated>);

impl Launcher {
    pub fn new(
        index: usize,
        port: Arc<Port>,
        mover: Mover,
        keep_limit: u64,
        line: Option<Arc<Line>>,
    ) -> Self {
        let who = format!("{} launcher", port.worker().device().id());
        let kept = HashMap::new();
        let (coming, settled, call, next) = (HashMap::new(), Vec::new(), Weak::new(), None);
        let worker = port.worker().clone();
        Self {
            index,
            who,
            port,
            worker,
            mover,
            keep_limit,
            kept,
            kept_bytes: 0,
            coming,
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
            self.survive(&mut job).err()
        };
        let here = error.is_some();
        if let Some(error) = error {
            call.fail(error);
        }
        if call.has_failed() {
            self.forget(|kept| !std::ptr::addr_eq(kept.as_ptr(), Arc::as_ptr(&call)));
        }
        if here {
            call.terms.neighbours.drain(&self.port);
        }
        self.worker = self.port.worker().clone();
        drop(job);
        call.end_part();
    }

    /// Whatever panics fails its call, not the worker.
    fn survive(&mut self, job: &mut Job) -> Result<()> {
        let (call, slot) = (job.call.clone(), job.slot);
        let ran = catch_unwind(AssertUnwindSafe(|| self.run_job(job)));
        ran.unwrap_or_else(|panic| {
            let what = roundpipe_tensor::Error::invalid("task", panic_text(&*panic));
            Err(call.place(slot, None, None, what))
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
            let (model, version) = (Arc::as_ptr(&call.terms.model), call.terms.version);
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
        self.coming.clear();
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
            .map_err(|e| call.place(job.slot, None, None, e))?;
        if let Some(faults) = &faults {
            call.data
                .watch(call.task_place(job.slot, None, None), faults.clone());
        }
        self.worker = self.port.worker().reporting_to(faults);
        let pass = call.terms.stages[job.slot].pass;
        let mut seats = Seats::default();
        let earlier = call.lock().adds_to.clone();
        if pass != Pass::Forward
            && let Some(earlier) = earlier
        {
            earlier.wait_end(&self.who);
        }
        let mut ahead = None;
        for microbatch in 0..call.terms.microbatches {
            self.look_ahead();
            let visit = Visit {
                call: &call,
                slot: job.slot,
                microbatch,
            };
            self.port.turn().map_err(|e| self.place(&visit, None, e))?;
            match pass {
                Pass::Forward => self.forward(job, &mut seats, &visit, &mut ahead)?,
                Pass::Fused => self.fused(job, &mut seats, &visit, &mut ahead)?,
                Pass::Backward => self.backward(job, &mut seats, &visit)?,
            }
        }
        self.finish(job, seats)
    }

    /// Adds the place to an error.
    fn place(
        &self,
        visit: &Visit<'_>,
        layer: Option<usize>,
        source: roundpipe_tensor::Error,
    ) -> Error {
        visit
            .call
            .place(visit.slot, layer, Some(visit.microbatch), source)
    }

    // ---- weights ----

    /// Asks for the weights of a job's layers, in the order they are needed. A worker that reads
    /// host memory in place needs no copies.
    fn order(&mut self, job: &mut Job) -> Result<()> {
        if job.ordered || self.worker().device().aliases_host() {
            return Ok(());
        }
        let call = job.call.clone();
        let stage = &call.terms.stages[job.slot];
        let mut layers: Vec<usize> = stage.layers.clone().collect();
        if stage.pass == Pass::Backward && call.terms.grain == Grain::Layer {
            layers.reverse();
        }
        let visit = Visit {
            call: &call,
            slot: job.slot,
            microbatch: 0,
        };
        layers.retain(|layer| !self.settled.iter().any(|settled| settled.is(&call, *layer)));
        let mut slots = Vec::new();
        for layer in layers {
            let bytes = call.terms.model.store.layer(layer).block_bytes() as u64;
            let slot = Slot::reserve(self.worker(), bytes)
                .map_err(|e| self.place(&visit, Some(layer), e))?;
            slots.push((layer, slot));
        }
        job.ordered = true;
        for (layer, memory) in slots {
            let tickets = job.tickets.remove(&layer).unwrap_or_default();
            self.mover.load(Load {
                call: call.clone(),
                slot: job.slot,
                layer,
                memory,
                tickets,
            });
        }
        Ok(())
    }

    /// Waits for a layer's weights and makes tensors of them.
    fn seat<'s>(
        &mut self,
        job: &mut Job,
        seats: &'s mut Seats,
        layer: usize,
        visit: &Visit<'_>,
    ) -> Result<&'s mut Seated> {
        match seats.0.entry(layer) {
            Entry::Occupied(seated) => Ok(seated.into_mut()),
            Entry::Vacant(free) => Ok(free.insert(self.seat_now(job, layer, visit)?)),
        }
    }

    fn seat_now(&mut self, job: &mut Job, layer: usize, visit: &Visit<'_>) -> Result<Seated> {
        let call = visit.call;
        let stored = call.terms.model.store.layer(layer);
        let fail = |e| self.place(visit, Some(layer), e);
        let tensors = if self.worker().device().aliases_host() {
            for ticket in job.tickets.get(&layer).into_iter().flatten() {
                let _watched = call
                    .terms
                    .board
                    .wait(&self.who, "waiting for a layer's weights");
                ticket.wait_readable(&call.abort)?;
            }
            let worker = self.worker();
            let mut tensors = Vec::new();
            for (i, p) in stored.params().iter().enumerate() {
                let data = call.terms.model.store.data(layer, i, call.terms.version)?;
                tensors.push(worker.alias(&data, p.dtype, p.shape).map_err(fail)?);
            }
            tensors
        } else if let Some(settled) = self.settled.iter().find(|settled| settled.is(call, layer)) {
            settled.tensors.clone()
        } else {
            let what = "waiting for a layer's weights to be sent";
            let loaded = call.wait(&self.who, what, |state| {
                state.loaded.remove(&(visit.slot, layer))
            })?;
            let places: Vec<(u64, DType, Shape)> = stored
                .params()
                .iter()
                .map(|p| (p.block_offset as u64, p.dtype, p.shape))
                .collect();
            let tensors = loaded.tensors(&places).map_err(fail)?;
            let model = &call.terms.model;
            // A layer that sets buffers has new ones without a new version.
            if model.resident && !call.terms.training && !model.sets_buffers.load(Ordering::SeqCst)
            {
                let writes = model.store.writes(layer);
                let (model, version) = (Arc::downgrade(model), call.terms.version);
                self.settled.push(Settled {
                    model,
                    layer,
                    version,
                    writes,
                    tensors: tensors.clone(),
                });
            }
            tensors
        };
        let sums = self.sums(visit, layer, tensors.len())?;
        let params = stored
            .params()
            .iter()
            .map(|p| p.param.clone())
            .zip(tensors)
            .collect();
        Ok(Seated {
            index: layer,
            params,
            set: vec![false; sums.len()],
            sums,
        })
    }

    /// Gradients of earlier calls since the last step, as the start of the sums.
    fn sums(
        &mut self,
        visit: &Visit<'_>,
        layer: usize,
        count: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let terms = &visit.call.terms;
        let mut sums: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        if visit.call.lock().adds_to.is_none() || terms.stages[visit.slot].pass == Pass::Forward {
            return Ok(sums);
        }
        let stored = terms.model.store.layer(layer);
        for (i, sum) in sums.iter_mut().enumerate() {
            let Some(grad) = stored.grad_range(i)?.filter(|_| stored.filled(i)) else {
                continue;
            };
            let start = || {
                let p = &stored.params()[i];
                let parcel = Parcel::given(grad, p.grad_dtype, p.shape)?;
                let here = self.port.receive("gradient so far", &parcel)?.land()?;
                // A sum is written to, so it must be the worker's own memory.
                let own = self.worker().copied(&here, p.dtype.accumulator())?;
                drop(here);
                Ok(own)
            };
            *sum = Some(start().map_err(|e| self.place(visit, Some(layer), e))?);
        }
        Ok(sums)
    }

    // ---- values ----

    /// Keeps a value on the worker if every reader is here and the budget allows.
    fn keep(&mut self, tensor: &Tensor, readers: &[usize], until: Until) -> Option<Parcel> {
        if !self.stays(readers) || !self.has_room(tensor.size_bytes(), until) {
            return None;
        }
        let parcel = Parcel::hollow(tensor);
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

    fn hold(&mut self, parcel: &Parcel, tensor: &Tensor, uses: Option<usize>) {
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
    fn find(&mut self, parcel: &Parcel) -> Option<Tensor> {
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
    fn receive(&mut self, visit: &Visit<'_>, flow: Flow) -> Result<Coming> {
        let mut bring = |leaf: Leaf| -> Result<Awaited> {
            let kept = leaf.here.as_ref().filter(|here| here.0 == self.index);
            if let Some(tensor) = kept
                .map(|here| here.1.clone())
                .or_else(|| self.find(&leaf.parcel))
            {
                return Ok(Awaited::Here(Held {
                    tensor,
                    grad: leaf.grad,
                    parcel: Some(leaf.parcel),
                }));
            }
            let arrival = self.port.receive("activation", &leaf.parcel);
            Ok(Awaited::Coming(
                arrival.map_err(|e| self.place(visit, None, e))?,
                leaf,
            ))
        };
        flow.try_map(&mut bring)
    }

    fn land(&mut self, visit: &Visit<'_>, coming: Coming) -> Result<Tree<Held>> {
        coming.try_map(|awaited| match awaited {
            Awaited::Here(held) => Ok(held),
            Awaited::Coming(arrival, leaf) => {
                let tensor = arrival.land().map_err(|e| self.place(visit, None, e))?;
                if leaf.constant && self.has_room(leaf.parcel.size_bytes(), Until::Later) {
                    self.hold(&leaf.parcel, &tensor, None);
                }
                Ok(Held {
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
        visit: &Visit<'_>,
        here: &mut Tree<Held>,
        readers: &[usize],
        until: Until,
    ) -> Result<Flow> {
        let mut leaves = Vec::new();
        for held in here.leaves_mut() {
            // What stayed here alone is nothing to others, nor to the host (no readers).
            let local = self.stays(readers);
            let parcel = match &held.parcel {
                Some(parcel) if local || !parcel.is_hollow() => {
                    self.pass_on(parcel, &held.tensor, readers)
                }
                _ => match self.keep(&held.tensor, readers, until) {
                    Some(parcel) => parcel,
                    None => {
                        let sent = self.port.send("activation", &held.tensor);
                        sent.map_err(|e| self.place(visit, None, e))?
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
    fn pass_on(&mut self, parcel: &Parcel, tensor: &Tensor, readers: &[usize]) -> Parcel {
        let here = readers.contains(&self.index);
        let room = self.has_room(tensor.size_bytes(), Until::Later);
        match self.kept.get_mut(&parcel.id()) {
            Some(Kept {
                uses: Some(uses), ..
            }) => *uses += readers.len(),
            Some(_) => {}
            // A hollow one must stay, whatever it takes: it is nowhere else.
            None if parcel.is_hollow() => self.hold(parcel, tensor, Some(readers.len())),
            None if here && room => self.hold(parcel, tensor, None),
            None => {}
        }
        parcel.clone()
    }

    /// The workers that will read the value in front of `layer` after slot `slot` ran.
    fn readers(&self, call: &Call, slot: usize, layer: usize) -> Vec<usize> {
        let terms = &call.terms;
        let next = terms
            .stages
            .get(slot + 1)
            .filter(|next| next.layers.start == layer);
        let mut readers: Vec<usize> = next
            .filter(|next| next.pass != Pass::Backward && terms.stages[slot].layers.end == layer)
            .map(|_| terms.workers[slot + 1])
            .into_iter()
            .collect();
        if call.saves(layer) {
            readers.extend(call.backward_slot(layer).map(|back| terms.workers[back]));
        }
        readers
    }

    // ---- forward ----

    /// The input of a microbatch, from the call or from the slot before; `None` when it is not
    /// there yet.
    fn input(&self, visit: &Visit<'_>, wait: bool) -> Result<Option<Flow>> {
        let call = visit.call;
        let microbatch = visit.microbatch;
        if visit.slot == 0 {
            if !wait && !has_come(call, microbatch) {
                return Ok(None);
            }
            let source = call.lock().inputs[microbatch].take();
            let Some(source) = source else {
                return Ok(None);
            };
            return self.resolve(visit, source).map(Some);
        }
        let take = |state: &mut State| match state.passed[visit.slot - 1][microbatch].take() {
            Some(Passed::Flow(flow)) => Some(flow),
            other => {
                state.passed[visit.slot - 1][microbatch] = other;
                None
            }
        };
        if !wait {
            return Ok(take(&mut call.lock()));
        }
        let what = format!(
            "waiting for microbatch {microbatch} of stage {}",
            visit.slot - 1
        );
        call.wait(&self.who, &what, take).map(Some)
    }

    /// Outputs of other calls, microbatch by microbatch, as they come.
    fn resolve(&self, visit: &Visit<'_>, source: Tree<Source>) -> Result<Flow> {
        source.try_flat_map(&mut |source| match source {
            Source::Value(leaf) => Ok(Tree::Tensor(leaf)),
            Source::Output(other, microbatch) => {
                let what = format!(
                    "waiting for microbatch {microbatch} of {}",
                    other.terms.model.name
                );
                let found = other.wait(&self.who, &what, |state| state.outputs[microbatch].clone());
                let found = found.map_err(|_| other.called_off())?;
                visit.call.depend_on(&other);
                let grads = visit.call.terms.wants_input_grads;
                Ok(found.map_ref(|leaf| Leaf {
                    grad: leaf.grad && grads,
                    ..leaf.clone()
                }))
            }
        })
    }

    /// The input of this visit on the worker, and the next one's on its way.
    fn take_input(&mut self, visit: &Visit<'_>, ahead: &mut Option<Coming>) -> Result<Tree<Held>> {
        let coming = match ahead.take() {
            Some(coming) => coming,
            None => {
                let flow = self.input(visit, true)?;
                let flow = flow.ok_or_else(|| Error::CalledOff {
                    why: "an input was taken twice".to_owned(),
                })?;
                self.receive(visit, flow)?
            }
        };
        let here = self.land(visit, coming)?;
        let next = Visit {
            microbatch: visit.microbatch + 1,
            ..*visit
        };
        if next.microbatch < visit.call.terms.microbatches
            && let Some(flow) = self.input(&next, false)?
        {
            *ahead = Some(self.receive(&next, flow)?);
        }
        Ok(here)
    }

    fn forward(
        &mut self,
        job: &mut Job,
        seats: &mut Seats,
        visit: &Visit<'_>,
        ahead: &mut Option<Coming>,
    ) -> Result<()> {
        let (call, m) = (visit.call, visit.microbatch);
        let terms = &call.terms;
        let stage = &terms.stages[visit.slot];
        let mut here = self.take_input(visit, ahead)?;
        for layer in stage.layers.clone() {
            // What came from the slot before was saved there.
            if call.saves(layer) && (layer > stage.layers.start || visit.slot == 0) {
                let readers = self.readers(call, visit.slot, layer);
                let flow = self.send(visit, &mut here, &readers, Until::Later)?;
                call.put(|state| state.saved.insert((layer, m), flow));
            }
            let seated = self.seat(job, seats, layer, visit)?;
            let mode = if terms.trains {
                Mode::Ahead
            } else {
                Mode::Plain
            };
            let ran = self.run_layer(visit, seated, Category::Forward, mode, &here)?;
            if terms.trains {
                self.save_extras(visit, layer, &ran)?;
            }
            here = ran.output;
        }
        let end = stage.layers.end;
        let last = terms
            .stages
            .get(visit.slot + 1)
            .is_none_or(|next| next.pass == Pass::Backward);
        if last {
            let flow = match terms.keeps_outputs {
                true => here.map_ref(|held| self.kept_output(held)),
                false => self.send(visit, &mut here, &[], Until::Later)?,
            };
            call.put(|state| state.outputs[m] = Some(flow));
            return Ok(());
        }
        let readers = self.readers(call, visit.slot, end);
        let until = if call.saves(end) {
            Until::Later
        } else {
            Until::NextStage
        };
        let flow = self.send(visit, &mut here, &readers, until)?;
        call.put(|state| {
            if call.saves(end) {
                state.saved.insert((end, m), flow.clone());
            }
            state.passed[visit.slot][m] = Some(Passed::Flow(flow));
        });
        Ok(())
    }

    /// An output that stays where it is.
    fn kept_output(&self, held: &Held) -> Leaf {
        let here = Some(Arc::new((self.index, held.tensor.clone())));
        Leaf {
            here,
            ..Leaf::new(Parcel::hollow(&held.tensor), held.grad)
        }
    }

    /// What a layer saved for its recompute goes to the host. There is an entry even for nothing:
    /// the recompute may come here first, and waits for it.
    fn save_extras(&mut self, visit: &Visit<'_>, layer: usize, ran: &Ran) -> Result<()> {
        let mut extra = Extra::default();
        let send = |tensor: &Tensor| {
            self.port
                .send("saved for recompute", tensor)
                .map_err(|e| self.place(visit, Some(layer), e))
        };
        for tensor in ran.saved.iter().flatten() {
            extra.data.push(send(tensor)?);
        }
        for (place, before) in &ran.buffers {
            extra.buffers.push((*place, send(before)?));
        }
        visit
            .call
            .put(|state| state.extras.insert((layer, visit.microbatch), extra));
        Ok(())
    }

    fn run_layer(
        &self,
        visit: &Visit<'_>,
        seated: &mut Seated,
        category: Category,
        mode: Mode,
        input: &Tree<Held>,
    ) -> Result<Ran> {
        let terms = &visit.call.terms;
        if visit.call.has_failed() {
            // Nobody waits for the rest, which may take long.
            return Err(visit.call.called_off());
        }
        let layer = seated.index;
        let room = self.worker().pool().capacity().0 / OUTBOX_SHARE;
        self.port
            .make_room(room)
            .map_err(|e| self.place(visit, Some(layer), e))?;
        let site = visit.site(layer);
        let module = &*terms.model.layers[layer].1;
        let ran = self.timed(visit, Some(layer), category, || {
            seated.run(module, self.worker(), terms.training, site, mode, input)
        })?;
        if terms.probes && category != Category::Recompute {
            self.probe(visit, layer, &ran.output);
        }
        if !ran.buffers.is_empty() {
            // Known before the caller sees a result of this call, so before it can submit the next.
            terms.model.sets_buffers.store(true, Ordering::SeqCst);
        }
        Ok(ran)
    }

    /// Notes the largest and the smallest value of a layer's output: they tell whether all are
    /// finite. What cannot be looked at for want of memory is left out.
    fn probe(&self, visit: &Visit<'_>, layer: usize, output: &Tree<Held>) {
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
                    visit
                        .call
                        .lock()
                        .probes
                        .push((layer, visit.microbatch, parcel));
                }
            }
        }
    }

    /// Runs a piece of work between two stamps.
    fn timed<R>(
        &self,
        visit: &Visit<'_>,
        layer: Option<usize>,
        category: Category,
        work: impl FnOnce() -> roundpipe_tensor::Result<R>,
    ) -> Result<R> {
        let fail = |e| self.place(visit, layer, e);
        // A user's layer or loss function may panic: it fails its call, not the worker.
        let work = || {
            let what = if layer.is_some() { "layer" } else { "loss_fn" };
            let failed = |panic: Box<dyn Any + Send>| {
                roundpipe_tensor::Error::invalid(what, panic_text(&*panic))
            };
            catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(failed(panic)))
        };
        let _doing = visit.call.terms.board.enter(&self.who, Doing(visit, layer));
        let lane = self.worker().device().lane(LaneKind::Compute);
        let from: Stamp = lane.stamp().map_err(fail)?;
        let out = work().map_err(fail)?;
        let to = lane.stamp().map_err(fail)?;
        let (worker, slot, microbatch) = (self.index, visit.slot, visit.microbatch);
        visit.call.lock().timed.push(Timed {
            worker,
            slot,
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
        seats: &mut Seats,
        visit: &Visit<'_>,
        ahead: &mut Option<Coming>,
    ) -> Result<()> {
        let (call, m) = (visit.call, visit.microbatch);
        let terms = &call.terms;
        let mut here = self.take_input(visit, ahead)?;
        if visit.microbatch + 1 == terms.microbatches {
            self.send_for_next(visit)?;
        }
        let mut tapes: Vec<Taped> = Vec::new();
        for layer in terms.stages[visit.slot].layers.clone() {
            let seated = self.seat(job, seats, layer, visit)?;
            let ran = self.run_layer(visit, seated, Category::Fused, Mode::Record, &here)?;
            tapes.extend(ran.tape);
            here = ran.output;
        }
        let label = call.lock().labels[m].take().unwrap_or(Tree::None);
        let label = label.map_ref(|parcel| Leaf::new(parcel.clone(), false));
        let coming = self.receive(visit, label)?;
        let label = self
            .land(visit, coming)?
            .map_ref(|held| held.tensor.clone());
        let loss = terms
            .loss
            .clone()
            .ok_or_else(|| Error::config("loss_fn", "a fused stage needs one"))?;
        // The loss draws behind the last layer.
        let site = visit.site(terms.model.layers.len());
        let (losses, grads) = self.timed(visit, None, Category::Loss, || {
            visit::losses(&loss, self.worker(), site, &here, label)
        })?;
        let outputs = if terms.wants_outputs {
            Some(self.send(visit, &mut here, &[], Until::Later)?)
        } else {
            None
        };
        drop(here);
        let send = |loss: &Tensor| {
            self.port
                .send("loss", loss)
                .map_err(|e| self.place(visit, None, e))
        };
        let losses = losses.iter().map(send).collect::<Result<Vec<_>>>()?;
        call.put(|state| {
            state.losses[m] = Some(losses);
            state.outputs[m] = outputs;
        });
        let grads = self.walk_back(visit, seats, tapes, grads)?;
        self.pass_grads(visit, grads)
    }

    /// Layers of a visit from the last to the first.
    fn walk_back(
        &self,
        visit: &Visit<'_>,
        seats: &mut Seats,
        tapes: Vec<Taped>,
        mut grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let layers = visit.call.terms.stages[visit.slot].layers.clone();
        for (layer, tape) in layers.zip(tapes).rev() {
            let seated = seats.0.get_mut(&layer).expect("it was run in this visit");
            grads = self.timed(visit, Some(layer), Category::Backward, || {
                seated.back(tape, grads)
            })?;
        }
        Ok(grads)
    }

    fn backward(&mut self, job: &mut Job, seats: &mut Seats, visit: &Visit<'_>) -> Result<()> {
        let terms = &visit.call.terms;
        let layers = terms.stages[visit.slot].layers.clone();
        if terms.grain == Grain::Stage {
            let (mut here, mut extra) = self.saved(visit, layers.start)?;
            let asked = self.ask_grads(visit)?;
            self.send_for(visit, layers.start, visit.microbatch + 1)?;
            let mut tapes = Vec::new();
            for layer in layers {
                let ran = self.recompute(job, seats, visit, layer, &here, extra.take())?;
                tapes.extend(ran.tape);
                here = ran.output;
            }
            drop(here);
            let grads = self.take_grads(visit, asked)?;
            let grads = self.walk_back(visit, seats, tapes, grads)?;
            return self.pass_grads(visit, grads);
        }
        let (mut grads, mut asked) = (None, None);
        for layer in layers.clone().rev() {
            let (here, extra) = self.saved(visit, layer)?;
            if grads.is_none() {
                asked = self.ask_grads(visit)?;
            }
            match layer > layers.start {
                true => self.send_for(visit, layer - 1, visit.microbatch)?,
                false => self.send_for(visit, layers.end - 1, visit.microbatch + 1)?,
            }
            let ran = self.recompute(job, seats, visit, layer, &here, extra)?;
            drop(here);
            let given = match grads.take() {
                Some(grads) => grads,
                None => self.take_grads(visit, asked.take())?,
            };
            drop(ran.output);
            let tape = ran.tape.expect("a recompute is recorded");
            let seated = seats.0.get_mut(&layer).expect("just run");
            grads = Some(self.timed(visit, Some(layer), Category::Backward, || {
                seated.back(tape, given)
            })?);
        }
        self.pass_grads(visit, grads.unwrap_or_default())
    }

    /// Starts bringing what was saved for a layer that is needed next, if it is there; behind the
    /// last microbatch that is the next job's.
    fn send_for(&mut self, visit: &Visit<'_>, layer: usize, microbatch: usize) -> Result<()> {
        if microbatch == visit.call.terms.microbatches {
            return self.send_for_next(visit);
        }
        let key = (layer, microbatch);
        let (saved, extra) = {
            let mut state = visit.call.lock();
            let Some(saved) = state.saved.remove(&key) else {
                return Ok(());
            };
            let bytes = state.extras.get(&key).map_or(0, Extra::bytes);
            (
                saved,
                if self.is_roomy(bytes) {
                    state.extras.remove(&key)
                } else {
                    None
                },
            )
        };
        let input = self.receive(visit, saved)?;
        let extra = extra
            .map(|extra| self.receive_extra(visit, layer, &extra))
            .transpose()?;
        self.coming.insert(key, Ahead { input, extra });
        Ok(())
    }

    /// Whether so much may come before it is needed: half of the worker stays free for the visit
    /// under way, and what was ever in use at once fits beside it.
    fn is_roomy(&self, bytes: usize) -> bool {
        let (usage, capacity) = (
            self.worker().pool().usage(),
            self.worker().pool().capacity().0,
        );
        let with = |used: u64| used.saturating_add(bytes as u64);
        with(usage.used.0) <= capacity / 2 && with(usage.peak_used.0) <= capacity
    }

    /// Starts bringing what the first microbatch of the next job needs, if that job goes backward
    /// in the same call.
    fn send_for_next(&mut self, visit: &Visit<'_>) -> Result<()> {
        let (call, terms) = (visit.call, &visit.call.terms);
        let Some(next) = self
            .next
            .as_ref()
            .filter(|next| Arc::ptr_eq(&next.call, call))
        else {
            return Ok(());
        };
        let (slot, stage) = (next.slot, &terms.stages[next.slot]);
        if stage.pass != Pass::Backward {
            return Ok(());
        }
        let layer = match terms.grain {
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
        if !self.is_roomy(bytes) {
            return Ok(());
        }
        self.send_for(
            &Visit {
                call,
                slot,
                microbatch: 0,
            },
            layer,
            0,
        )
    }

    /// Starts bringing what a layer saved for its recompute.
    fn receive_extra(&self, visit: &Visit<'_>, layer: usize, extra: &Extra) -> Result<Extras> {
        let bring = |parcel: &Parcel| {
            let arrival = self.port.receive("saved for recompute", parcel);
            arrival.map_err(|e| self.place(visit, Some(layer), e))
        };
        let data = extra.data.iter().map(bring).collect::<Result<Vec<_>>>()?;
        let buffers = extra
            .buffers
            .iter()
            .map(|(place, parcel)| Ok((*place, bring(parcel)?)));
        Ok(Extras {
            data,
            buffers: buffers.collect::<Result<Vec<_>>>()?,
        })
    }

    /// The saved input of a layer, on the worker, and what else was sent for with it.
    fn saved(&mut self, visit: &Visit<'_>, layer: usize) -> Result<(Tree<Held>, Option<Extras>)> {
        let m = visit.microbatch;
        if let Some(Ahead { input, extra }) = self.coming.remove(&(layer, m)) {
            return Ok((self.land(visit, input)?, extra));
        }
        let what = format!("waiting for the saved input of layer {layer}, microbatch {m}");
        let saved = visit
            .call
            .wait(&self.who, &what, |state| state.saved.remove(&(layer, m)))?;
        let coming = self.receive(visit, saved)?;
        Ok((self.land(visit, coming)?, None))
    }

    fn recompute(
        &mut self,
        job: &mut Job,
        seats: &mut Seats,
        visit: &Visit<'_>,
        layer: usize,
        input: &Tree<Held>,
        extra: Option<Extras>,
    ) -> Result<Ran> {
        let extra = match extra {
            Some(extra) => extra,
            None => {
                let key = (layer, visit.microbatch);
                let what = format!(
                    "waiting for the forward of layer {layer}, microbatch {}",
                    key.1
                );
                let extra = visit
                    .call
                    .wait(&self.who, &what, |state| state.extras.remove(&key))?;
                self.receive_extra(visit, layer, &extra)?
            }
        };
        let land = |arrival: Arrival| {
            arrival
                .land()
                .map_err(|e| self.place(visit, Some(layer), e))
        };
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
        let seated = self.seat(job, seats, layer, visit)?;
        // The forward saw these buffers; the next microbatch brings its own.
        for (place, before) in buffers {
            seated.params[place].1 = before;
        }
        self.run_layer(visit, seated, Category::Recompute, Mode::Again(data), input)
    }

    /// Starts bringing the gradients of this stage's outputs, if the slot before has passed them
    /// on: they are needed before anything else that is sent for.
    fn ask_grads(&mut self, visit: &Visit<'_>) -> Result<Option<Vec<Option<Grad>>>> {
        if takes_seed(visit) {
            return Ok(None);
        }
        let passed = {
            let mut state = visit.call.lock();
            let bytes = match &state.passed[visit.slot - 1][visit.microbatch] {
                Some(Passed::Grads(grads)) => grads.iter().flatten().map(Parcel::size_bytes).sum(),
                _ => 0,
            };
            if self.is_roomy(bytes) {
                passed_grads(&mut state, visit)
            } else {
                None
            }
        };
        passed
            .map(|parcels| self.bring_grads(visit, parcels))
            .transpose()
    }

    /// The gradients of this stage's outputs, on the worker.
    fn take_grads(
        &mut self,
        visit: &Visit<'_>,
        asked: Option<Vec<Option<Grad>>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let grads = match asked {
            Some(grads) => grads,
            None => {
                let parcels = self.grads(visit)?;
                self.bring_grads(visit, parcels)?
            }
        };
        let land = |grad: Grad| match grad {
            Grad::Here(tensor) => Ok(tensor),
            Grad::Coming(arrival) => arrival.land().map_err(|e| self.place(visit, None, e)),
        };
        grads
            .into_iter()
            .map(|grad| grad.map(land).transpose())
            .collect()
    }

    fn bring_grads(
        &mut self,
        visit: &Visit<'_>,
        parcels: Vec<Option<Parcel>>,
    ) -> Result<Vec<Option<Grad>>> {
        let mut bring = |parcel: Parcel| match self.find(&parcel) {
            Some(tensor) => Ok(Grad::Here(tensor)),
            None => {
                let arrival = self.port.receive("gradient", &parcel);
                Ok(Grad::Coming(
                    arrival.map_err(|e| self.place(visit, None, e))?,
                ))
            }
        };
        parcels
            .into_iter()
            .map(|parcel| parcel.map(&mut bring).transpose())
            .collect()
    }

    /// The same where they are: from the slot before, from the user, or from another call.
    fn grads(&self, visit: &Visit<'_>) -> Result<Vec<Option<Parcel>>> {
        let m = visit.microbatch;
        if takes_seed(visit) {
            let seed = visit.call.lock().seeds[m].take();
            return match seed {
                Some(Seed::Given(grads)) => Ok(grads),
                Some(Seed::Of(other, leaves)) => {
                    let what = format!(
                        "waiting for the input gradients of {}",
                        other.terms.model.name
                    );
                    let found = other.wait(&self.who, &what, |state| state.input_grads[m].clone());
                    let found = found.map_err(|_| other.called_off())?;
                    visit.call.depend_on(&other);
                    let leaves = leaves.unwrap_or(0..found.len());
                    Ok(found[leaves].to_vec())
                }
                None => Err(Error::CalledOff {
                    why: "the gradients were taken twice".to_owned(),
                }),
            };
        }
        let what = format!(
            "waiting for the gradients of microbatch {m} from stage {}",
            visit.slot - 1
        );
        visit
            .call
            .wait(&self.who, &what, |state| passed_grads(state, visit))
    }

    /// The gradients of this stage's inputs go to the slot that runs the layers before.
    fn pass_grads(&mut self, visit: &Visit<'_>, grads: Vec<Option<Tensor>>) -> Result<()> {
        let terms = &visit.call.terms;
        let next = terms.workers.get(visit.slot + 1).copied();
        if next.is_none() && !terms.wants_input_grads {
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
                    .map_err(|e| self.place(visit, None, e))?,
            };
            parcels.push(Some(parcel));
        }
        visit.call.put(|state| match next {
            Some(_) => state.passed[visit.slot][visit.microbatch] = Some(Passed::Grads(parcels)),
            None => state.input_grads[visit.microbatch] = Some(parcels),
        });
        Ok(())
    }

    // ---- the end of a job ----

    /// Sums of gradients, rounded once, and buffers leave the worker.
    fn finish(&mut self, job: &mut Job, seats: Seats) -> Result<()> {
        let call = job.call.clone();
        let terms = &call.terms;
        let stage = &terms.stages[job.slot];
        let visit = Visit {
            call: &call,
            slot: job.slot,
            microbatch: terms.microbatches - 1,
        };
        if stage.pass != Pass::Backward && terms.training {
            self.send_buffers(&visit, &seats)?;
        }
        if stage.pass == Pass::Forward {
            return self.finish_forward(job);
        }
        let mut gradients = Vec::new();
        let mut seated: Vec<Seated> = seats.0.into_values().collect();
        seated.sort_by_key(|seated| std::cmp::Reverse(seated.index));
        for Seated {
            index,
            params,
            sums,
            ..
        } in seated
        {
            let stored = terms.model.store.layer(index);
            for (i, sum) in sums.into_iter().enumerate() {
                let Some(sum) = sum else { continue };
                let rounded = self.worker().cast(&sum, stored.params()[i].grad_dtype);
                let tensor = rounded.map_err(|e| self.place(&visit, Some(index), e))?;
                gradients.push(Gradient {
                    layer: index,
                    param: i,
                    tensor,
                });
            }
            drop(params);
        }
        let lane = self.worker().device().lane(LaneKind::Compute);
        let after = lane.record().map_err(|e| self.place(&visit, None, e))?;
        self.mover.unload(Unload {
            call: call.clone(),
            slot: job.slot,
            gradients,
            after,
        });
        Ok(())
    }

    /// Where kernels report bad data later than they are launched, a call that may end without a
    /// backward ends behind them.
    fn finish_forward(&mut self, job: &Job) -> Result<()> {
        let call = &job.call;
        let goes_on = call.terms.trains && call.terms.loss.is_some();
        if goes_on || self.worker().device().aliases_host() {
            return Ok(());
        }
        let lane = self.worker().device().lane(LaneKind::Compute);
        let after = lane
            .record()
            .map_err(|e| call.place(job.slot, None, None, e))?;
        self.mover.unload(Unload {
            call: call.clone(),
            slot: job.slot,
            gradients: Vec::new(),
            after,
        });
        Ok(())
    }

    fn send_buffers(&mut self, visit: &Visit<'_>, seats: &Seats) -> Result<()> {
        let mut buffers = Vec::new();
        for seated in seats.0.values() {
            for ((param, tensor), set) in seated.params.iter().zip(&seated.set) {
                if *set {
                    let sent = self.port.send("buffer", tensor);
                    buffers.push((
                        param.clone(),
                        sent.map_err(|e| self.place(visit, Some(seated.index), e))?,
                    ));
                }
            }
        }
        visit.call.set_buffers(buffers);
        Ok(())
    }
}
