//! How a call comes to its workers: prepared, planned, registered, queued.
//!
//! Preparing and planning change nothing, so what they refuse leaves no trace. Registering makes the
//! call known to its engine: from then on failures of others reach it. Queueing hands its jobs, each
//! with the right to read its weights, to the workers.
//!
//! This module waits in one case only, for layers that set buffers (running statistics): the next
//! call reads them.
//!
//! # Invariants
//! - Jobs of calls are queued in the order of the calls, for all workers alike.
//! - A call reads one version of the weights, forward and backward.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use roundpipe_tensor::transfer::HostValue;
use roundpipe_tensor::{Device, HostTensor, host_memory};

use super::core::{Core, Sequence};
use super::hooks::find_layer;
use super::inputs::{Inputs, SplitInputs, host_values, split};
use super::mean_loss::{mean_loss, shares, with_shares};
use super::outputs::InputLeaves;
use super::planner::Batch;
use crate::batch::split_label;
use crate::budget::{ActivationUse, CallNeeds, HostBudget};
use crate::config::{Grain, LossReduction, OutputDevice, Resolved, RunConfig};
use crate::cost::{LayerCosts, Phase};
use crate::error::{Error, Result};
use crate::exec::call::{Call, CallSpec};
use crate::exec::early_rows::{CallRows, RowRequest, TABLE, rows_of_call};
use crate::exec::held_weights::HoldPlan;
use crate::exec::model::LossFn;
use crate::exec::queue::StageJob;
use crate::exec::repeats::{KeepPlan, KeepableWeights, RecomputedLayer};
use crate::exec::stage_value::{Seed, Source};
use crate::plan::{ExecutePlan, Pass, PlanKind, Stage};
use crate::sync::lock;
use crate::tree::Tree;
use crate::version::ReadTicket;

/// What a call is to do.
pub(crate) struct CallRequest {
    /// Which part of the engine is called.
    pub part: usize,
    pub kind: PlanKind,
    pub inputs: Inputs,
    pub labels: Tree<HostTensor>,
    pub loss: Option<LossFn>,
    /// Whether `loss` gives the model's outputs as they are.
    pub outputs_are_losses: bool,
    pub wants_outputs: bool,
    /// Whether the caller reads results before anything else. It is a part of the call then, and
    /// ends it.
    pub reads: bool,
    pub config: RunConfig,
    /// The place in the random stream, where a forward over several parts has one for all of them.
    pub place: Option<RandomPlace>,
}

/// A place in the random stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomPlace {
    pub number: u64,
    /// How often the same part was called before under this number.
    pub repeat: usize,
}

/// A request that is checked and split.
struct Prepared {
    config: Resolved,
    /// Whether layers run in training mode.
    training: bool,
    wants_input_grads: bool,
    inputs: SplitInputs,
    labels: Vec<Tree<HostValue>>,
    loss: Option<LossFn>,
    output_gradients: Option<Vec<f64>>,
    /// The layers whose outputs are wanted.
    hidden: Vec<usize>,
}

impl Prepared {
    fn batch(&self) -> Batch<'_> {
        Batch {
            microbatches: self.inputs.sources.len(),
            example: self.inputs.example.as_ref(),
            training: self.training,
        }
    }
}

/// A call that was submitted.
pub(crate) struct PendingCall {
    pub call: Arc<Call>,
    pub config: Resolved,
    pub input_leaves: Arc<[InputLeaves]>,
    /// The samples of each microbatch, where they are known.
    pub samples: Option<Arc<[usize]>>,
}

/// The layers that a call recomputes.
fn recomputed_layers(
    stages: &[Stage],
    grain: Grain,
    forward_ms: &dyn Fn(usize) -> Option<f64>,
) -> Vec<RecomputedLayer> {
    let mut recomputed = Vec::new();
    let forward = stages.iter().enumerate();
    for (first, stage) in forward.filter(|(_, stage)| stage.pass == Pass::Forward) {
        for layer in stage.layers.clone() {
            let is_back =
                |stage: &Stage| stage.pass == Pass::Backward && stage.layers.contains(&layer);
            let Some(last) = stages.iter().position(is_back) else {
                continue;
            };
            recomputed.push(RecomputedLayer {
                layer,
                stages: first..=last,
                needs_output: grain == Grain::Stage && layer + 1 < stages[last].layers.end,
                forward_ms: forward_ms(layer),
            });
        }
    }
    recomputed
}

/// The error of a call that was submitted while another failed.
fn cancelled() -> Error {
    Error::Cancelled {
        why: "another call failed before it began".to_owned(),
    }
}

impl Core {
    /// Prepares, registers and queues a call.
    pub fn submit(&self, request: CallRequest) -> Result<PendingCall> {
        self.enter("call")?;
        if self.model.inference && request.kind != PlanKind::Infer {
            let what = "the engine was built with inference(true), so it computes no gradients; \
                        run it with requires_grad off, or build one that trains";
            return Err(Error::config("requires_grad", what));
        }
        // Before the turn: it waits for updates of other engines, and callers of this one need not
        // wait behind that.
        self.model.store.wait_for_other_keepers();
        let mut sequence = self.turn();
        // A lane may have failed after its call had ended. No call would find out, and the next
        // would fail for it.
        self.ring.tidy();
        // Failures come before anything that this call does: `visible` below counts on steps that
        // stand.
        self.check(&mut sequence)?;
        self.notice_writes(&mut sequence)?;
        let prepared = self.prepare(&request)?;
        self.check_trains(request.part, request.kind, &prepared)?;
        // Kept even if the plan is refused: fewer microbatches than asked for may be why.
        for text in &prepared.inputs.warnings {
            let warning = match self.parts.len() {
                1 => text.clone(),
                _ => format!("{}: {text}", self.parts[request.part].name),
            };
            self.notes().warn(warning);
        }
        self.log_warnings();
        let (plan, needs) = self.plan(&request, &prepared)?;
        self.check_host_memory(request.kind, &needs)?;
        // As late as possible, since it waits for all calls under way.
        self.wait_for_buffers(&mut sequence)?;
        // Before the jobs are queued, so that their first copy is noted too.
        let timed = self.parts[request.part].planner.begin_call(request.kind);
        self.recorder.begin_call(timed);
        let config = prepared.config.clone();
        let input_leaves = prepared.inputs.leaves.clone();
        let samples = prepared.inputs.samples.clone();
        let call = self.register(&mut sequence, &request, prepared, &plan, needs)?;
        self.enqueue(&mut sequence, &request, &call);
        Ok(PendingCall {
            call,
            config,
            input_leaves,
            samples,
        })
    }

    /// Refuses a call that asks for gradients and would train nothing, or not all that it should.
    fn check_trains(&self, request_part: usize, kind: PlanKind, prepared: &Prepared) -> Result<()> {
        if kind == PlanKind::Infer {
            return Ok(());
        }
        if kind == PlanKind::Fused && !prepared.config.requires_grad {
            let what = "it is off in a call that trains; use `forward`, or leave it on";
            return Err(Error::config("requires_grad", what));
        }
        let mut params = self.model.store.params();
        let thawed = params.find(|stored| !stored.trainable && stored.param.is_trainable());
        if let Some(stored) = thawed {
            let what = format!(
                "{} was made trainable after the engine was built, which has no optimizer state for \
                 it; do so before, or build the engine again",
                stored.name
            );
            return Err(Error::config("parameter", what));
        }
        let has_use = prepared.wants_input_grads || self.has_trainable(request_part);
        if kind == PlanKind::Fused && !has_use {
            let what = if self.has_params(request_part) {
                "every parameter is frozen, so nothing would be trained; use `forward`, or make \
                 some trainable before the engine is built"
            } else {
                "the model shows no parameters, so nothing would be trained; use `forward`, or \
                 show them in `Params::visit`"
            };
            return Err(Error::config("requires_grad", what));
        }
        Ok(())
    }

    /// Whether the layers show any parameter.
    fn has_params(&self, part: usize) -> bool {
        let layers = &self.model.store.layers()[self.parts[part].layers.clone()];
        layers.iter().any(|layer| !layer.params().is_empty())
    }

    /// Whether any parameter is trainable now: a user may freeze some after the engine is built.
    pub(super) fn has_trainable(&self, part: usize) -> bool {
        let layers = &self.model.store.layers()[self.parts[part].layers.clone()];
        let mut params = layers.iter().flat_map(|layer| layer.params());
        params.any(|stored| stored.param.is_trainable())
    }

    /// Before the first call that trains allocates its state, looks whether the host has room for it.
    fn check_host_memory(&self, kind: PlanKind, needs: &CallNeeds) -> Result<()> {
        let mut workers = self.ring.workers().iter();
        let counts_only = workers.all(|worker| !worker.device().moves_bytes());
        if kind == PlanKind::Infer || counts_only {
            return Ok(());
        }
        let missing = self.model.store.training_bytes();
        if missing.total() == 0 {
            return Ok(());
        }
        let budget = HostBudget {
            weights: missing.weights as u64,
            gradients: missing.gradients as u64,
            masters: missing.masters as u64,
            moments: missing.moments as u64,
            activations: needs.host_bytes,
            in_files: 0,
        };
        match host_memory::available() {
            Some(left) => budget.check(left),
            None => Ok(()),
        }
    }

    /// Resolves the configuration and splits the batch. Changes nothing.
    fn prepare(&self, request: &CallRequest) -> Result<Prepared> {
        let part = &self.parts[request.part];
        let config = request.config.over(&part.config).resolve(self.ring.len())?;
        let wants_input_grads = config.input_grads && request.kind != PlanKind::Infer;
        let names = config.hidden_layers.iter();
        let hidden = names.map(|name| {
            let layers = &self.model.layers[part.layers.clone()];
            Ok(part.layers.start + find_layer(layers, "hidden", name)?)
        });
        let hidden = hidden.collect::<Result<Vec<_>>>()?;
        let inputs = split(
            &request.inputs,
            &config.split_input,
            config.num_microbatch,
            wants_input_grads,
        )?;
        // Behind the inputs, whose samples decide where labels are cut.
        let mut labels = self.split_labels(request, &config, &inputs)?;
        let mut loss = request.loss.clone();
        let mut gradients = vec![1.0; labels.len()];
        if config.loss_reduction == LossReduction::Mean {
            loss = loss.map(mean_loss);
            gradients = shares(inputs.samples.as_deref(), labels.len())?;
            labels = with_shares(labels, &gradients);
        }
        Ok(Prepared {
            config,
            training: !self.notes().evaluating,
            wants_input_grads,
            inputs,
            labels,
            loss,
            output_gradients: request.outputs_are_losses.then_some(gradients),
            hidden,
        })
    }

    fn split_labels(
        &self,
        request: &CallRequest,
        config: &Resolved,
        inputs: &SplitInputs,
    ) -> Result<Vec<Tree<HostValue>>> {
        let count = inputs.sources.len();
        if request.kind != PlanKind::Fused || matches!(request.labels, Tree::None) {
            return Ok((0..count).map(|_| Tree::None).collect());
        }
        let labels = split_label(&request.labels, &config.split_label, count, inputs.batch)?;
        let mut split = Vec::with_capacity(count);
        for tree in host_values(&labels.parts)? {
            split.push(tree.map_ref(|(value, _)| value.clone()));
        }
        Ok(split)
    }

    fn plan(&self, request: &CallRequest, prepared: &Prepared) -> Result<(ExecutePlan, CallNeeds)> {
        let planner = &self.parts[request.part].planner;
        planner.plan(request.kind, &prepared.config, &prepared.batch())
    }

    /// The plan that a call would have, and the costs that it is made for. Changes nothing.
    pub fn preview(&self, request: &CallRequest) -> Result<(ExecutePlan, LayerCosts)> {
        let prepared = self.prepare(request)?;
        let planner = &self.parts[request.part].planner;
        planner.preview(request.kind, &prepared.config, &prepared.batch())
    }

    /// Which frozen weights stay on the workers of a call's stages.
    fn hold_plan(&self, stages: &[Stage], assigned: &[usize], needs: &CallNeeds) -> HoldPlan {
        let mut hold = HoldPlan::default();
        let mut never_sent = Vec::new();
        if needs.held_bytes > 0 {
            let store = &self.model.store;
            let bytes = |layer| store.frozen_part(layer).map_or(0, |part| part.bytes as u64);
            let frozen: Vec<u64> = (0..self.model.layers.len()).map(bytes).collect();
            let workers = self.ring.len();
            hold = HoldPlan::choose(stages, assigned, workers, &frozen, needs.held_bytes);
            let layers = hold.everywhere(stages, assigned).into_iter();
            never_sent = layers.map(|layer| (layer, frozen[layer])).collect();
        }
        self.notes().held_weights = never_sent;
        hold
    }

    /// What a call's forwards keep for its backwards.
    fn keep_plan(
        &self,
        recomputed: &[RecomputedLayer],
        assigned: &[usize],
        (microbatches, version): (usize, u64),
        needs: &CallNeeds,
        hold: &HoldPlan,
    ) -> KeepPlan {
        let store = &self.model.store;
        let sets_buffers = self.model.sets_buffers.load(Ordering::SeqCst);
        let block_bytes = |layer| store.layer(layer).block_bytes() as u64;
        let bytes = |layer, worker: usize| {
            let is_sent = !self.ring.workers()[worker].device().aliases_host();
            // Of a table in front perhaps only some rows are sent.
            let is_whole = layer != TABLE || !self.model.early_rows.is_pending(version);
            if is_sent && is_whole && !sets_buffers && !hold.names(layer) {
                block_bytes(layer)
            } else {
                0
            }
        };
        let weights = KeepableWeights {
            bytes: &bytes,
            first: needs.first_weights,
            beside: &|pieces| needs.weights_may_stay(pieces),
            for_early: needs.early_bytes,
        };
        let repeats = &self.model.repeats;
        let keep = repeats.choose(recomputed, assigned, microbatches, &needs.pieces, &weights);
        let of = |bytes: &HashMap<usize, u64>, worker| bytes.get(&worker).copied().unwrap_or(0);
        let may_stay = (0..self.ring.len()).map(|worker| {
            let pieces = of(&keep.worker_bytes, worker);
            needs.may_stay(pieces, of(&keep.weight_bytes, worker)) - pieces
        });
        let kept = keep.weights.iter();
        let mut kept: Vec<(usize, u64)> = kept.map(|layer| (*layer, block_bytes(*layer))).collect();
        kept.sort_unstable();
        let mut notes = self.notes();
        notes.recompute_shares = repeats.shares_left(&keep, recomputed);
        notes.kept_weights = kept;
        notes.activations = Some(ActivationUse {
            saved: needs.host_bytes,
            may_stay: may_stay.min().unwrap_or(0),
            pieces_on_workers: keep.worker_bytes.values().sum(),
            pieces_in_host: keep.host_bytes,
        });
        drop(notes);
        keep
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
        let part = &self.parts[request.part];
        let stages = part.stages(plan, request.kind);
        let place = request.place.unwrap_or(RandomPlace {
            number: sequence.number,
            repeat: 0,
        });
        // A call that is cancelled below has moved the ring on; placement changes no result.
        let assigned = self.ring.assign(&stages);
        let microbatches = prepared.inputs.sources.len();
        let mut keep = KeepPlan::default();
        let mut hold = HoldPlan::default();
        if trains {
            hold = self.hold_plan(&stages, &assigned, &needs);
            let times = part.planner.times();
            let grain = prepared.config.recompute_grain;
            let recomputed = recomputed_layers(&stages, grain, &|layer| {
                times.average_ms(layer - part.layers.start, Phase::Forward)
            });
            let version = sequence.visible_to(request.kind);
            let of_call = (microbatches, version);
            keep = self.keep_plan(&recomputed, &assigned, of_call, &needs, &hold);
        }
        let workers = self.ring.workers().iter();
        let mut spec = CallSpec {
            id: sequence.next_call,
            model: self.model.clone(),
            part: request.part,
            name: part.name.clone(),
            workers: assigned,
            devices: workers.map(|worker| worker.device().id()).collect(),
            stages,
            forward_stages: plan.forward.len(),
            needs,
            keep,
            hold,
            microbatches,
            grain: prepared.config.recompute_grain,
            training,
            trains,
            version: sequence.visible_to(request.kind),
            // The step that its gradients will belong to, which at lag 1 is two ahead of the
            // version it reads.
            step: sequence.steps + 1,
            number: place.number,
            repeat: place.repeat,
            // Looking for the first layer that is not finite costs a pass over every value, so it
            // is done only after a step that was not.
            probes: trains && self.optimizer.streak.is_on(),
            hooks: lock(&self.model.hooks).clone(),
            hidden: prepared.hidden,
            loss: prepared.loss,
            output_gradients: prepared.output_gradients,
            wants_outputs: request.wants_outputs,
            // With several workers, the one that reads the output next is seldom the one that
            // made it.
            keeps_outputs: !trains
                && !request.reads
                && self.ring.len() == 1
                && prepared.config.output_device != OutputDevice::Host,
            wants_input_grads: prepared.wants_input_grads,
            table_rows: None,
            board: self.ring.board().clone(),
            ring_calls: self.ring.calls().clone(),
        };
        sequence.next_call += 1;
        // An evaluation draws no random numbers, so training goes on as if it had not been.
        if request.place.is_none() {
            sequence.number += u64::from(training);
        }
        let sources = prepared.inputs.sources;
        spec.table_rows = self.rows_read(&spec, &sources);
        let call = Call::new(spec, &self.call_list, sources, prepared.labels);
        sequence.watched.push(call.clone());
        if self.has_failed(sequence) {
            // The call is registered, so later failures reach it. A failure between `check` and
            // here did not; cancel it by hand.
            call.fail(cancelled());
            return Err(self.recover(sequence).unwrap_or_else(cancelled));
        }
        self.ask_for_rows(&call);
        Ok(call)
    }

    /// The rows of the table in front of the model that a call reads, where it lies apart from the
    /// host's memory.
    fn rows_read(&self, spec: &CallSpec, sources: &[Tree<Source>]) -> Option<Arc<CallRows>> {
        let begins = spec.stages[0].layers.start == TABLE;
        let mut devices = spec.workers.iter().map(|worker| self.device(*worker));
        if !(spec.trains && begins) || devices.all(|device| device.aliases_host()) {
            return None;
        }
        rows_of_call(&self.model, sources)
    }

    fn device(&self, worker: usize) -> &dyn Device {
        &**self.ring.workers()[worker].device()
    }

    /// Asks the update under way for the rows that a call reads, where its forward can do without the
    /// others, or for the whole table. This alone decides who may read rows.
    fn ask_for_rows(&self, call: &Arc<Call>) {
        let spec = &call.spec;
        let early = &self.model.early_rows;
        let layers = self.parts[spec.part].layers.clone();
        let first = self.device(spec.workers[0]);
        let is_apart =
            spec.stages[0].pass == Pass::Forward && first.moves_bytes() && !first.aliases_host();
        let rows = spec.table_rows.as_ref().filter(|_| is_apart);
        if spec.trains && layers.contains(&TABLE) {
            early.expect(rows.is_some());
        }
        let Some(rows) = rows else {
            let mut layers = self.model.store.layers()[layers].iter();
            if layers.any(|layer| layer.homes().contains(&TABLE)) {
                early.ask_all(spec.version);
            }
            return;
        };
        let request = RowRequest {
            call: call.clone(),
            rows: rows.clone(),
            memory: self.ring.host_pool().clone(),
            next: 0,
        };
        // Before the jobs are queued, which look for it.
        if early.ask(request) {
            call.set_early_rows(rows.clone());
        }
    }

    /// Queues the jobs of a call that was registered.
    fn enqueue(&self, sequence: &mut Sequence, request: &CallRequest, call: &Arc<Call>) {
        // Before the jobs, which could otherwise end the call before its results are read.
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
        // Calls of a step add to their gradients one after the other: the order of a sum is a part
        // of its bits.
        let mut earlier = sequence.since_step.iter().rev();
        let of_the_same = |earlier: &&Arc<Call>| earlier.spec.part == call.spec.part;
        call.set_adds_to(earlier.find(of_the_same).cloned());
        sequence.since_step.push(call.clone());
    }

    /// Queues the jobs of some stages, each with the right to read its weights.
    fn queue(&self, call: &Arc<Call>, stages: Range<usize>) {
        let mut jobs = Vec::with_capacity(stages.len());
        for stage in stages {
            // Tickets are taken here, not by the worker: from now on no update may overwrite the
            // version, however long the job waits in its queue.
            let tickets = self.tickets(call, stage);
            // For every job before the first is queued: one that ends early must not end the call.
            call.open_part();
            let job = StageJob::new(call.clone(), stage, tickets);
            jobs.push((call.spec.workers[stage], job));
        }
        self.ring.submit(jobs);
    }

    /// The right to read the weights of a stage's layers, by layer.
    fn tickets(&self, call: &Call, stage: usize) -> HashMap<usize, Vec<ReadTicket>> {
        let store = &self.model.store;
        let mut tickets = HashMap::new();
        for layer in call.spec.stages[stage].layers.clone() {
            let mut of_layer = Vec::new();
            // A shared parameter lives with the first layer that has it, and is updated there.
            for home in store.layer(layer).homes() {
                let versions = store.layer(*home).versions();
                of_layer.push(versions.reserve(call.spec.version));
            }
            tickets.insert(layer, of_layer);
        }
        tickets
    }

    /// Queues the backward of a call whose forward was queued before.
    pub fn submit_backward(&self, call: &Arc<Call>, seeds: Vec<Seed>) -> Result<()> {
        self.enter("backward")?;
        let mut sequence = self.turn();
        self.check(&mut sequence)?;
        if !call.spec.wants_input_grads && !self.has_trainable(call.spec.part) {
            let what = "every parameter is frozen and input_grads is off, so there is nothing to \
                        compute gradients of";
            return Err(Error::config("backward", what));
        }
        // Its gradients belong to weights that are gone.
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
    pub(super) fn may_set_buffers(&self, sequence: &Sequence) -> bool {
        if self.model.sets_buffers.load(Ordering::SeqCst) {
            return true;
        }
        let layers = self.model.store.layers().iter();
        let mut params = layers.flat_map(|layer| layer.params());
        // Buffers are parameters that are not trained. Whether a layer sets one shows when it runs.
        !sequence.trained && params.any(|param| !param.trainable)
    }
}
