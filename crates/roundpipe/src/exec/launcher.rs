//! One worker's jobs, one after another, on one thread.
//!
//! A job is one stage of a call: all microbatches in order. The launcher requests the next job's
//! weights before it starts this one's tasks ([`super::weights`]), takes and hands on values
//! ([`super::worker_values`]) and runs the layers ([`super::forward`], [`super::backward`]). It computes
//! nothing itself and decides no schedule: the queue has the jobs in the order they run.
//!
//! # Invariants
//! - A job that fails or panics fails its call, never the worker or the thread.
//! - Every job ends one part of its call, on every path.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use roundpipe_tensor::device::Stamp;
use roundpipe_tensor::transfer::{HostValue, Port};
use roundpipe_tensor::{DType, LaneKind, Tensor, Worker, nvtx};

use super::backward::Prefetched;
use super::call::{Call, Timed};
use super::copy_threads::{CopyThreads, Gradient, GradientDownload};
use super::early_rows::ArrivingRows;
use super::early_weights::EarlyWeights;
use super::held_weights::HeldWeights;
use super::kept_weights::KeptWeights;
use super::queue::{JobQueue, StageJob};
use super::row_gradients::Rounded;
use super::run_layer::LoadedLayer;
use super::task::{Task, TaskLabel, panic_text};
use super::weights::{LoadedLayers, ResidentWeights};
use super::worker_values::KeptValues;
use crate::budget::WorkerBudget;
use crate::error::Result;
use crate::plan::Pass;
use crate::planted;
use crate::trace::Category;

/// Runs the jobs of one worker.
pub(crate) struct Launcher {
    /// The worker's place in the ring.
    pub(super) index: usize,
    /// The thread's name on the status board.
    pub who: String,
    pub(super) port: Arc<Port>,
    /// The port's worker, whose kernels report bad data to the current job.
    worker: Worker,
    pub(super) copies: CopyThreads,
    pub(super) budget: WorkerBudget,
    pub(super) kept: KeptValues,
    /// What forwards saved, on its way here.
    pub(super) prefetched: Prefetched,
    pub(super) resident: Vec<ResidentWeights>,
    /// Frozen weights that stay from step to step.
    pub(super) held: Vec<HeldWeights>,
    /// Weights that stay from a layer's forward to its backward, by call in the order of layers.
    pub(super) kept_weights: Vec<KeptWeights>,
    /// The table of the current job, where its rows come apart.
    pub(super) rows: Option<ArrivingRows>,
    /// Frozen weights of the jobs behind the next one, in the order of the jobs.
    pub(super) early: Vec<EarlyWeights>,
    /// The call of the current job.
    pub(super) call: Weak<Call>,
    /// Where jobs come from; `None` in the serial executor, which hands them over.
    pub(super) queue: Option<Arc<JobQueue>>,
    /// The job behind the current one, whose weights may be on their way.
    pub(super) next: Option<StageJob>,
}

impl Launcher {
    pub fn new(
        index: usize,
        port: Arc<Port>,
        copies: CopyThreads,
        budget: WorkerBudget,
        queue: Option<Arc<JobQueue>>,
    ) -> Self {
        let worker = port.worker().clone();
        Self {
            index,
            who: format!("{} launcher", worker.device().id()),
            port,
            worker,
            copies,
            kept: KeptValues::new(&budget),
            budget,
            prefetched: Prefetched::default(),
            resident: Vec::new(),
            held: Vec::new(),
            kept_weights: Vec::new(),
            rows: None,
            early: Vec::new(),
            call: Weak::new(),
            queue,
            next: None,
        }
    }

    pub(super) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Runs jobs until the queue is closed.
    pub fn run_all(&mut self) {
        while let Some(job) = self.next_job() {
            self.run(job);
        }
    }

    fn next_job(&mut self) -> Option<StageJob> {
        if let Some(job) = self.next.take() {
            return Some(job);
        }
        self.queue.as_ref()?.pop()
    }

    /// Runs a job to its end. A failure goes to the call.
    pub fn run(&mut self, mut job: StageJob) {
        let call = job.call.clone();
        self.enter(&call);
        let mut failed_here = false;
        if !call.has_failed()
            && let Err(error) = self.run_catching(&mut job)
        {
            call.fail(error);
            failed_here = true;
        }
        if call.has_failed() {
            // Values of other calls stay: their jobs take turns with this call's on the worker.
            self.forget_values(|kept| !std::ptr::addr_eq(kept.as_ptr(), Arc::as_ptr(&call)));
            self.drop_early_of_failed();
        }
        if failed_here {
            // Work of the job may still be queued on the device, and fail in its own way.
            call.spec.ring_calls.drain(&self.port);
        }
        self.rows = None;
        // Kernels of the next job report to its own call.
        self.worker = self.port.worker().clone();
        // No task is under way, so what comes early need not leave it room.
        self.worker.pool().end_claim();
        // Its tickets first: a thread that waits for the call's end may write the weights then.
        drop(job);
        call.end_part();
    }

    /// A panic fails the call, not the worker.
    fn run_catching(&mut self, job: &mut StageJob) -> Result<()> {
        let call = job.call.clone();
        let stage = job.stage;
        catch_unwind(AssertUnwindSafe(|| self.run_job(job))).unwrap_or_else(|panic| {
            let error = roundpipe_tensor::Error::invalid("task", panic_text(&*panic));
            Err(call.error_at(stage, None, None, error))
        })
    }

    /// Frees what only earlier calls needed.
    fn enter(&mut self, call: &Arc<Call>) {
        // Jobs of one call share its kept values, so nothing is freed between them.
        if std::ptr::addr_eq(self.call.as_ptr(), Arc::as_ptr(call)) {
            return;
        }
        self.forget_values(|call| {
            let call = call.upgrade();
            call.is_some_and(|call| !call.has_ended() && !call.has_failed())
        });
        let spec = &call.spec;
        self.resident
            .retain(|weights| weights.are_current(&spec.model, spec.version));
        let worker = self.index;
        self.held.retain(|held| held.may_stay(call, worker));
        let of_worker = |bytes: &HashMap<usize, u64>| bytes.get(&worker).copied().unwrap_or(0);
        let for_pieces = of_worker(&spec.keep.worker_bytes);
        let needs = &spec.needs;
        let for_next = self.budget.for_next_stage(needs.kept_bytes);
        let limit = needs.may_stay(for_pieces, of_worker(&spec.keep.weight_bytes));
        self.kept.set_limit(limit, for_next, for_pieces);
        self.call = Arc::downgrade(call);
    }

    /// Frees all values but those of the calls that `keep` names.
    fn forget_values(&mut self, keep: impl Fn(&Weak<Call>) -> bool) {
        // The jobs of a call take everything that they prefetch, unless it fails.
        self.prefetched.clear();
        self.kept_weights.retain(|kept| keep(&kept.call));
        self.kept.retain(keep);
    }

    /// Requests the weights of the job that follows, as soon as there is one and they have room.
    fn look_ahead(&mut self) {
        if self.next.is_none() {
            self.next = self.queue.as_ref().and_then(|queue| queue.try_pop());
        }
        let Some(mut next) = self.next.take() else {
            return;
        };
        if !next.call.has_failed() {
            // Values that will stay come on top of what the tasks of the job work in. What came
            // early has their room for a while.
            let will_stay = self.kept.room().saturating_sub(self.early_bytes());
            let working = next.needs().task.saturating_add(will_stay);
            // An error is not lost: the job requests its weights again when it starts. Usually
            // there is no room for two stages beside the working memory of the tasks.
            let _ = self.request_weights(&mut next, Some(working));
        }
        self.next = Some(next);
    }

    fn run_job(&mut self, job: &mut StageJob) -> Result<()> {
        let call = job.call.clone();
        self.place_weights(job)?;
        self.await_rows(job)?;
        self.report_to(&call, job.stage)?;
        let pass = call.spec.stages[job.stage].pass;
        if pass != Pass::Forward
            && let Some(earlier) = call.adds_to()
        {
            // The sums start from the gradients of that call. Its jobs stand before this one in
            // every queue, so the wait ends; if it failed, no step uses these sums (`recover.rs`).
            earlier.wait_end(&self.who);
        }
        let mut loaded = LoadedLayers::default();
        let mut next_input = None;
        for microbatch in 0..call.spec.microbatches {
            let task = Task {
                call: &call,
                stage: job.stage,
                microbatch,
            };
            // Before the claim: it lets go of what earlier tasks sent, and the claim counts what is
            // free.
            let begun = self.port.begin_task();
            begun.map_err(|error| task.error(None, error))?;
            // Behind a claim, so that the next weights leave this task its room.
            if self.claim_working(&task)? {
                self.look_ahead();
                self.fetch_early(&task);
            }
            match pass {
                Pass::Forward => self.forward(job, &mut loaded, &task, &mut next_input)?,
                Pass::Fused => self.fused(job, &mut loaded, &task, &mut next_input)?,
                Pass::Backward => self.backward(job, &mut loaded, &task)?,
            }
        }
        self.finish(job, loaded)
    }

    /// Kernels of the job report bad data to its call.
    fn report_to(&mut self, call: &Call, stage: usize) -> Result<()> {
        let faults = self.port.worker().open_faults();
        let faults = faults.map_err(|error| call.error_at(stage, None, None, error))?;
        if let Some(faults) = &faults {
            let place = call.spec.task_place(stage, None, None);
            call.data.watch(place, faults.clone());
        }
        // Gradients and outputs that other threads copy are pinned in `download` and
        // `resident_output`.
        self.worker = self.port.worker().reporting_to(faults).moving();
        Ok(())
    }

    /// Runs a piece of work between two time stamps.
    pub(super) fn timed<R>(
        &self,
        task: &Task<'_>,
        layer: Option<usize>,
        category: Category,
        work: impl FnOnce() -> roundpipe_tensor::Result<R>,
    ) -> Result<R> {
        let label = TaskLabel(*task, layer);
        let _on_board = task.spec().board.enter(&self.who, label);
        let _range = nvtx::range(|| range_name(task, layer, category));
        let from = self.stamp(task, layer)?;
        // A user's layer or loss function may panic. The error then names it.
        let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let what = if layer.is_some() { "layer" } else { "loss_fn" };
            Err(roundpipe_tensor::Error::invalid(what, panic_text(&*panic)))
        });
        let done = done.map_err(|error| task.error(layer, error))?;
        let to = self.stamp(task, layer)?;
        task.call.note_time(Timed {
            worker: self.index,
            stage: task.stage,
            layer,
            microbatch: task.microbatch,
            category,
            from,
            to,
        });
        Ok(done)
    }

    /// A point of the compute lane whose time can be read later.
    fn stamp(&self, task: &Task<'_>, layer: Option<usize>) -> Result<Stamp> {
        let lane = self.worker().device().lane(LaneKind::Compute);
        lane.stamp().map_err(|error| task.error(layer, error))
    }

    // ---- the end of a job ----

    /// Buffers and gradients leave the worker.
    fn finish(&mut self, job: &StageJob, loaded: LoadedLayers) -> Result<()> {
        let spec = &job.call.spec;
        let task = Task {
            call: &job.call,
            stage: job.stage,
            // An error from here on names the last microbatch.
            microbatch: spec.microbatches - 1,
        };
        let pass = task.stage().pass;
        // A recompute sets no buffers; the forward that it repeats has sent them.
        if pass != Pass::Backward && spec.training {
            self.send_buffers(&task, &loaded)?;
        }
        if pass != Pass::Forward {
            let gradients = self.round_gradients(&task, loaded)?;
            return self.download(&task, gradients);
        }
        // Kernels may report bad data after they are launched. A call that may end without a
        // backward must not end before them.
        let backward_follows = spec.trains && spec.loss.is_some();
        if backward_follows || self.worker().device().aliases_host() {
            return Ok(());
        }
        self.download(&task, Vec::new())
    }

    /// The sums of a layer that are final, rounded; none where there is no room for them beside the
    /// task, and then they leave with the job.
    pub(super) fn round_beside(
        &self,
        task: &Task<'_>,
        layer: &mut LoadedLayer,
    ) -> roundpipe_tensor::Result<Vec<Gradient>> {
        let index = layer.index;
        let stored = task.spec().model.store.layer(index);
        let mut gradients = Vec::new();
        for (param, sum) in layer.sums.iter().enumerate() {
            let Some(sum) = sum else {
                continue;
            };
            let dtype = stored.params()[param].grad_dtype;
            let Some(rounded) = self.rounded_beside(task, index, sum, dtype)? else {
                return Ok(Vec::new());
            };
            gradients.push(Gradient::new((index, param), rounded));
        }
        layer.sums.iter_mut().for_each(|sum| *sum = None);
        Ok(gradients)
    }

    /// The sums of gradients, rounded to the type in which they are stored. This happens once per
    /// call: sums of several calls in a step start from the rounded ones.
    fn round_gradients(&self, task: &Task<'_>, loaded: LoadedLayers) -> Result<Vec<Gradient>> {
        let mut gradients = Vec::new();
        for LoadedLayer { index, sums, .. } in loaded.0.into_values().rev() {
            let stored = task.spec().model.store.layer(index);
            for (param, sum) in sums.into_iter().enumerate() {
                let Some(sum) = sum else {
                    continue;
                };
                let dtype = stored.params()[param].grad_dtype;
                let rounded = self.rounded(task, index, sum, dtype);
                let rounded = rounded.map_err(|error| task.error(Some(index), error))?;
                gradients.push(Gradient::new((index, param), rounded));
            }
        }
        Ok(gradients)
    }

    /// A sum in another type. It outlives the job, so it leaves the working memory if it can.
    fn rounded(
        &self,
        task: &Task<'_>,
        layer: usize,
        sum: Tensor,
        dtype: DType,
    ) -> roundpipe_tensor::Result<Rounded> {
        if !self.worker().device().aliases_host()
            && let Some(rounded) = self.rounded_beside(task, layer, &sum, dtype)?
        {
            return Ok(rounded);
        }
        let tensor = self.worker().cast(&sum, dtype)?;
        Ok(Rounded { tensor, rows: None })
    }

    // ---- room ----

    /// Requests the weights of a job that starts now, unless they were requested before it.
    fn place_weights(&mut self, job: &mut StageJob) -> Result<()> {
        if self.try_weights(job)? {
            return Ok(());
        }
        self.wait_for_gradients();
        if self.try_weights(job)? {
            return Ok(());
        }
        while self.drop_last_early() || self.drop_kept_weights() {
            if self.try_weights(job)? {
                return Ok(());
            }
        }
        // Pieces of forwards first: they cost a recompute, not a copy to the host and back.
        while self.kept.drop_piece_at_frontier() {
            if self.try_weights(job)? {
                return Ok(());
            }
        }
        self.kept.drop_pieces();
        if self.try_weights(job)? {
            return Ok(());
        }
        // Nothing else is needed at this moment, and then the weights and the working memory of
        // the job fit: that was checked when the call was planned.
        let freed = self.free_optional();
        freed.map_err(|error| job.call.error_at(job.stage, None, None, error))?;
        if self.try_weights(job)? {
            return Ok(());
        }
        // The user holds outputs on the worker, or what the layers work in is not known.
        self.request_weights(job, None)
    }

    /// Requests a job's weights; `false` without room for them beside the working memory of its tasks.
    fn try_weights(&mut self, job: &mut StageJob) -> Result<bool> {
        match self.request_weights(job, Some(job.needs().task)) {
            Err(error) if error.is_device_full() => Ok(false),
            requested => requested.map(|()| true),
        }
    }

    /// Claims the working memory of a task in one piece. What is optional makes room. `false` where
    /// there is no such piece all the same: the task takes what there is.
    fn claim_working(&mut self, task: &Task<'_>) -> Result<bool> {
        let bytes = task.spec().needs.stages[task.stage].of_microbatch(task.microbatch);
        if self.worker.pool().claim_working(bytes) {
            return Ok(true);
        }
        // The cheap way first: the compute lane waits for copies that are under way anyway, the
        // oldest first.
        for quarters in (0..4).rev() {
            let drained = self.port.make_room(self.budget.outbox / 4 * quarters);
            drained.map_err(|error| task.error(None, error))?;
            if self.worker.pool().claim_working(bytes) {
                return Ok(true);
            }
        }
        self.wait_for_gradients();
        if self.worker.pool().claim_working(bytes) {
            return Ok(true);
        }
        while self.drop_last_early() || self.drop_kept_weights() {
            if self.worker.pool().claim_working(bytes) {
                return Ok(true);
            }
        }
        // Then what lies in the way and can be computed again.
        while self.kept.drop_piece_at_frontier() {
            if self.worker.pool().claim_working(bytes) {
                return Ok(true);
            }
        }
        self.prefetched.drop_pieces();
        if self.worker.pool().claim_working(bytes) {
            return Ok(true);
        }
        let freed = self.free_optional();
        freed.map_err(|error| task.error(None, error))?;
        Ok(self.worker.pool().claim_working(bytes))
    }

    /// Gradients of earlier jobs hold memory until they have landed, and slots that were read until
    /// the next upload: both give it back without anything being computed again.
    fn wait_for_gradients(&self) {
        self.copies.wait_downloads();
        self.worker.pool().trim();
    }

    /// Frees what the worker can do without: values that stay go to the host, and what is on its
    /// way out is awaited.
    fn free_optional(&mut self) -> roundpipe_tensor::Result<()> {
        // A job that uses resident weights holds their tensors itself.
        self.resident.clear();
        self.held.clear();
        self.kept_weights.clear();
        self.drop_early();
        self.prefetched.drop_pieces();
        self.kept.spill(&self.port)?;
        // Behind the spill, whose sources are in the outbox now.
        self.port.make_room(0)?;
        self.wait_for_gradients();
        Ok(())
    }

    /// Downloads gradients behind all kernels so far.
    pub(super) fn download(&self, task: &Task<'_>, gradients: Vec<Gradient>) -> Result<()> {
        let lane = self
            .worker()
            .device()
            .lane(planted::lane_before_gradients());
        // Before the point that the copies wait for: a move behind it would be too late for them.
        gradients.iter().for_each(|gradient| gradient.tensor.pin());
        let after = lane.record().map_err(|error| task.error(None, error))?;
        // The `down` thread waits for this point; the launcher goes on with its next job.
        self.copies.download(GradientDownload {
            call: task.call.clone(),
            stage: task.stage,
            gradients,
            after,
        });
        Ok(())
    }

    fn send_buffers(&self, task: &Task<'_>, loaded: &LoadedLayers) -> Result<()> {
        let mut buffers = Vec::new();
        for layer in loaded.0.values() {
            for ((param, tensor), is_set) in layer.params.iter().zip(&layer.set) {
                if *is_set {
                    let sent = self.send_value(task, layer.index, "buffer", tensor)?;
                    buffers.push((param.clone(), sent));
                }
            }
        }
        task.call.set_buffers(buffers);
        Ok(())
    }

    /// Copies a layer's tensor to the host.
    pub(super) fn send_value(
        &self,
        task: &Task<'_>,
        layer: usize,
        what: &str,
        tensor: &Tensor,
    ) -> Result<HostValue> {
        let sent = self.port.send(what, tensor);
        sent.map_err(|error| task.error(Some(layer), error))
    }
}

/// What a profiler's timeline calls a piece of work.
fn range_name(task: &Task<'_>, layer: Option<usize>, category: Category) -> String {
    let model = &task.spec().model;
    let mut name = format!("{} {}", model.name, category.name());
    if let Some(layer) = layer {
        name += &format!(", layer {}", model.layers[layer].0);
    }
    name + &format!(", microbatch {}", task.microbatch)
}
