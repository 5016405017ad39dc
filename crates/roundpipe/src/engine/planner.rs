//! Plans of an engine: made once per shape of the input, and again when measured times differ from
//! those that a plan was made with.
//!
//! The planner knows the model, the workers and what calls have taken so far. It has its own lock,
//! under which it computes and never waits.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use roundpipe_tensor::{Bytes, DType, HostTensor, LaneKind, Shape, host_memory};

use crate::budget::{CallNeeds, PieceRoom, StageNeeds, StageRoom, WorkerBudget};
use crate::config::{Grain, Resolved};
use crate::cost::{
    CopyRates, CostMode, LayerCosts, LayerTimes, MachineRates, Phase, Spec, WorkerSpeeds,
    model_costs,
};
use crate::error::{Error, Result};
use crate::exec::early_rows::TABLE;
use crate::exec::model::Model;
use crate::exec::ring::Ring;
use crate::plan::{ExecutePlan, Lag, Pass, PlanKind, Stage};
use crate::search::AutoOptions;
use crate::sync::lock;
use crate::tree::Tree;

/// Measured shares may move by this much before a plan is made again.
const DRIFT: f64 = 0.3;
/// Plans that are kept, one for each shape of the input.
const MOST_PLANS: usize = 1024;
/// Calls between two looks at the drift: the first comes soon after the copies were timed.
const LOOK_EVERY: u64 = 8;
/// Training calls whose copies are timed, after the first, which pins memory.
const TIMED_CALLS: u64 = 4;
/// Bytes per millisecond between host and device until copies are measured: a PCIe 4.0 link.
const LINK: f64 = 20e6;
/// What a byte in host memory saves by default, in times of its copy: nothing is sent there for small
/// gains unless the user says so.
const MUCH: f64 = 1.5;
/// Shares of the usual limits that are tried until a plan fits: smaller ones give shorter stages.
const SHARES: [f64; 5] = [1.0, 0.75, 0.5, 0.25, 0.0];

/// Makes and remembers plans.
pub(super) struct Planner {
    model: Arc<Model>,
    /// The layers that its plans are for, which they count from 0.
    layers: Range<usize>,
    ring: Ring,
    max_lag: Lag,
    state: Mutex<PlannerState>,
}

#[derive(Default)]
struct PlannerState {
    plans: HashMap<PlanKey, KnownPlan>,
    /// The plan of the last call of each kind.
    last: HashMap<PlanKind, ExecutePlan>,
    times: LayerTimes,
    speeds: WorkerSpeeds,
    rates: CopyRates,
    /// Calls that train, so far.
    trained: u64,
    /// Those whose times were learned.
    learned: u64,
}

/// What a plan is made for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    kind: PlanKind,
    grain: Grain,
    recompute_all: bool,
    microbatches: usize,
    input: Vec<(DType, Shape)>,
    /// The plan that the user gave, if any.
    given: Option<ExecutePlan>,
}

impl PlanKey {
    fn new(kind: PlanKind, config: &Resolved, batch: &Batch<'_>) -> Self {
        let leaves = batch.example.map(Tree::leaves).unwrap_or_default();
        let input = leaves
            .iter()
            .map(|tensor| (tensor.dtype(), *tensor.shape()));
        Self {
            kind,
            grain: config.recompute_grain,
            recompute_all: config.recompute_all,
            microbatches: batch.microbatches,
            input: input.collect(),
            given: config.execute_plan.clone(),
        }
    }
}

struct KnownPlan {
    plan: ExecutePlan,
    needs: CallNeeds,
    costs: LayerCosts,
    rates: CopyRates,
    calls: u64,
}

/// The batch that a plan is for.
pub(super) struct Batch<'a> {
    pub microbatches: usize,
    /// One microbatch, where it is known before other calls have run.
    pub example: Option<&'a Tree<HostTensor>>,
    pub training: bool,
}

impl Planner {
    pub fn new(model: Arc<Model>, layers: Range<usize>, ring: Ring, max_lag: Lag) -> Self {
        Self {
            model,
            layers,
            ring,
            max_lag,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PlannerState> {
        lock(&self.state)
    }

    /// The plan of the last call of a kind.
    pub fn last_plan(&self, kind: PlanKind) -> Option<ExecutePlan> {
        self.lock().last.get(&kind).cloned()
    }

    /// Measured times so far.
    pub fn times(&self) -> LayerTimes {
        self.lock().times.clone()
    }

    /// The times of a call follow. Those of the first call that trains hold until the second:
    /// kernels are compiled and tuned in it.
    pub fn begin_learning(&self, trains: bool) {
        if trains {
            self.lock().begin_learning();
        }
    }

    /// A layer of the model took so long on a worker.
    pub fn record(&self, worker: usize, layer: usize, phase: Phase, ms: f64) {
        let layer = layer - self.layers.start;
        let state = &mut *self.lock();
        // Before the measurement is taken in: a speed is relative to what the layer took so far.
        if let Some(average_ms) = state.times.average_ms(layer, phase) {
            state.speeds.record(worker, average_ms, ms);
        }
        state.times.record(layer, phase, ms);
    }

    /// The host took so long to update a layer of the model, which may be none of these.
    pub fn record_update(&self, layer: usize, ms: f64) {
        if self.layers.contains(&layer) {
            let layer = layer - self.layers.start;
            self.lock().times.record(layer, Phase::Update, ms);
        }
    }

    /// A copy took so long.
    pub fn record_copy(&self, lane: LaneKind, bytes: u64, ms: f64) {
        self.lock().rates.record(lane, bytes, ms);
    }

    /// Takes what is known of a machine for measured: see
    /// [`RoundPipe::assume_rates`](crate::RoundPipe::assume_rates).
    pub fn assume(&self, known: &MachineRates) {
        /// Large enough to count.
        const COPY: u64 = 1 << 30;
        let mut state = self.lock();
        let copies = [
            (LaneKind::ParamUpload, known.upload_bytes_per_s),
            (LaneKind::ActivationUpload, known.upload_bytes_per_s),
            (LaneKind::ActivationDownload, known.download_bytes_per_s),
            (LaneKind::GradDownload, known.download_bytes_per_s),
        ];
        for (lane, rate) in copies {
            state.rates.record(lane, COPY, 1e3 * COPY as f64 / rate);
        }
        for layer in self.layers.clone() {
            let awaited = self.awaited_params(layer, known.first_rows);
            let ms = 1e3 * awaited as f64 / known.updated_params_per_s;
            let layer = layer - self.layers.start;
            state.times.record(layer, Phase::Update, ms);
        }
    }

    /// Trained parameters of a layer whose update the next forward waits for.
    fn awaited_params(&self, layer: usize, first_rows: Option<usize>) -> usize {
        let stored = self.model.store.layer(layer);
        let trained = stored.own_trainable();
        let count: usize = trained.map(|(_, param)| param.shape.numel()).sum();
        match (first_rows, stored.params()) {
            (Some(rows), [table]) if layer == TABLE && table.shape.rank() == 2 => {
                count.min(rows * table.shape.dims()[1])
            }
            _ => count,
        }
    }

    /// Counts a call that starts now; whether its copies should be timed.
    pub fn begin_call(&self, kind: PlanKind) -> bool {
        if kind == PlanKind::Infer || self.ring.is_host() {
            return false;
        }
        let mut state = self.lock();
        state.trained += 1;
        (2..2 + TIMED_CALLS).contains(&state.trained)
    }

    /// The plan of a call (the user's, the one made before, or a new one), and what it needs of
    /// every worker.
    ///
    /// # Errors
    /// When the user's does not suit the model, or nothing fits the workers.
    pub fn plan(
        &self,
        kind: PlanKind,
        config: &Resolved,
        batch: &Batch<'_>,
    ) -> Result<(ExecutePlan, CallNeeds)> {
        let key = PlanKey::new(kind, config, batch);
        let mut state = self.lock();
        let planned = match state.known(&key) {
            Some(known) => known,
            None => self.make_plan(&mut state, key, batch)?,
        };
        state.last.insert(kind, planned.0.clone());
        Ok(planned)
    }

    /// The plan that a call would have, and the costs that it is made for. Nothing is remembered.
    pub fn preview(
        &self,
        kind: PlanKind,
        config: &Resolved,
        batch: &Batch<'_>,
    ) -> Result<(ExecutePlan, LayerCosts)> {
        let key = PlanKey::new(kind, config, batch);
        let state = self.lock();
        let costs = self.costs(&state, batch);
        let plan = match state.plans.get(&key) {
            Some(known) => known.plan.clone(),
            None => self.choose(&key, &costs, &state)?.0,
        };
        Ok((plan, costs))
    }

    /// Known times replace guesses layer by layer, and bring the rest to the same unit.
    fn costs(&self, state: &PlannerState, batch: &Batch<'_>) -> LayerCosts {
        state.times.to_costs(&self.guess(batch))
    }

    /// The user's plan, or the best one.
    fn choose(
        &self,
        key: &PlanKey,
        costs: &LayerCosts,
        state: &PlannerState,
    ) -> Result<(ExecutePlan, CallNeeds)> {
        let Some(plan) = &key.given else {
            return self.search(key, costs, state);
        };
        plan.check(key.kind, self.layers.len())?;
        let needs = self.needs(key, plan, costs, state)?;
        Ok((plan.clone(), needs))
    }

    /// Makes a plan and remembers it.
    fn make_plan(
        &self,
        state: &mut PlannerState,
        key: PlanKey,
        batch: &Batch<'_>,
    ) -> Result<(ExecutePlan, CallNeeds)> {
        let costs = self.costs(state, batch);
        let (plan, needs) = match (self.choose(&key, &costs, state), state.plans.get(&key)) {
            // Times have drifted, and no other plan fits: the one that has run goes on.
            (Err(_), Some(known)) => return Ok((known.plan.clone(), known.needs.clone())),
            (chosen, _) => chosen?,
        };
        if state.plans.len() >= MOST_PLANS {
            // Batches of ever new sizes: a plan is soon made again.
            state.plans.clear();
        }
        let planned = KnownPlan {
            plan: plan.clone(),
            needs: needs.clone(),
            costs,
            rates: state.rates.clone(),
            calls: 1,
        };
        state.plans.insert(key, planned);
        Ok((plan, needs))
    }

    /// The best plan for these costs that fits the workers.
    fn search(
        &self,
        key: &PlanKey,
        costs: &LayerCosts,
        state: &PlannerState,
    ) -> Result<(ExecutePlan, CallNeeds)> {
        let layers = 0..self.layers.len();
        let alone = layers.map(|layer| layer..layer + 1);
        let largest = Largest {
            weights: alone
                .clone()
                .map(|layer| costs.bytes(layer))
                .max()
                .unwrap_or(0),
            visit: alone
                .map(|layer| costs.visit_bytes(layer))
                .max()
                .unwrap_or(0),
        };
        let mut refused = None;
        let mut tried = None;
        for share in SHARES {
            let options = self.options(key, costs, state, &largest, share);
            let plans = ExecutePlan::auto(key.kind, &[costs], &options);
            let plan = plans
                .map_err(|error| self.too_large(costs, error))?
                .remove(0);
            // The same plan would be refused for the same reason.
            if tried.as_ref() == Some(&plan) {
                continue;
            }
            match self.needs(key, &plan, costs, state) {
                Ok(needs) => return Ok((plan, needs)),
                Err(error) => refused = Some(error),
            }
            tried = Some(plan);
        }
        Err(refused.expect("the first plan is always tried"))
    }

    /// Why no plan was found. The limits of the search are ours: a user gave the worker's memory.
    fn too_large(&self, costs: &LayerCosts, error: Error) -> Error {
        let is_limit = |name: &str| matches!(name, "stage_memory_limit" | "model_memory_limit");
        if !matches!(&error, Error::Config { name, .. } if is_limit(name)) {
            return error;
        }
        let need =
            |layer: usize| costs.bytes(layer..layer + 1) + costs.visit_bytes(layer..layer + 1);
        let largest = (0..self.layers.len()).max_by_key(|layer| need(*layer));
        let layer = largest.expect("a layer exceeds a limit");
        let what = format!(
            "layer {layer} ({}) has {} of weights and needs {} to work in for one microbatch, but a \
             worker has {} for weights, work and copies; use more microbatches or shorter sequences, \
             or reserve more",
            costs.layers[layer].name,
            Bytes(costs.bytes(layer..layer + 1)),
            Bytes(costs.visit_bytes(layer..layer + 1)),
            Bytes(self.ring.least_budget().arena),
        );
        Error::config("memory", what)
    }

    /// What a plan needs of every worker.
    ///
    /// # Errors
    /// When a stage's weights and working memory do not fit together.
    fn needs(
        &self,
        key: &PlanKey,
        plan: &ExecutePlan,
        costs: &LayerCosts,
        state: &PlannerState,
    ) -> Result<CallNeeds> {
        let budget = self.ring.least_budget();
        let stages = plan.stages(key.kind);
        let needs: Vec<StageNeeds> = stages
            .iter()
            .map(|stage| self.stage_needs(&budget, stage, key.grain, costs))
            .collect();
        let workers = self.ring.workers().len();
        let mut link = self.link(key, &stages, costs, state);
        let checked = budget.call_needs(needs.clone(), workers).map(|checked| {
            let saved = saved_bytes(key, &stages, costs);
            let checked = CallNeeds {
                host_bytes: saved,
                ..checked
            };
            let held = self.held_bytes(key, &checked, &link);
            link.weights = link.weights.saturating_sub(held * workers as u64);
            let each = |bytes: u64| bytes / workers as u64;
            let still_frozen = self.frozen_bytes().saturating_sub(held * workers as u64);
            let checked = CallNeeds {
                early_bytes: each(link.forward_excess().min(still_frozen)),
                first_weights: each(link.backward_excess()),
                ..checked.holding(held)
            };
            if key.recompute_all {
                return CallNeeds {
                    kept_bytes: checked.kept_bytes.min(budget.kept),
                    pieces: PieceRoom::default(),
                    ..checked
                };
            }
            let pieces = self.piece_room(&checked, &link);
            CallNeeds { pieces, ..checked }
        });
        checked.map_err(|stage| {
            let needs = needs[stage];
            let what = format!(
                "stage {stage} (layers {}..{}) needs {} of weights and {} to work in for one \
                 microbatch, but a worker has {}; use more microbatches or shorter sequences, or \
                 reserve {}",
                stages[stage].layers.start,
                stages[stage].layers.end,
                Bytes(needs.weights),
                Bytes(needs.task),
                Bytes(budget.arena),
                Bytes(needs.total()),
            );
            Error::config("memory", what)
        })
    }

    /// Frozen weights that stay on each worker: as many as it takes until copies need no more time
    /// than kernels, of at most seven eighths of what may stay. A byte there saves copies of it,
    /// which is worth much where the link is what a call waits for, and nothing elsewhere.
    fn held_bytes(&self, key: &PlanKey, needs: &CallNeeds, link: &Link) -> u64 {
        let trains = key.kind != PlanKind::Infer;
        if !trains || !self.ring.least_budget().takes_spare {
            return 0;
        }
        let workers = self.ring.workers().len() as u64;
        let excess = link.excess_bytes(workers);
        excess
            .min(self.frozen_bytes())
            .min(needs.kept_bytes / 8 * 7)
    }

    /// Frozen weights that may lie apart from others.
    fn frozen_bytes(&self) -> u64 {
        let store = &self.model.store;
        let frozen = |layer| store.frozen_part(layer).map_or(0, |part| part.bytes as u64);
        self.layers.clone().map(frozen).sum()
    }

    /// What pieces of forwards may take in a call.
    fn piece_room(&self, needs: &CallNeeds, link: &Link) -> PieceRoom {
        let budget = self.ring.least_budget();
        let for_next = budget.for_next_stage(needs.kept_bytes);
        let free = needs.kept_bytes - for_next;
        let saved = needs.host_bytes;
        let workers = self.ring.workers().len() as u64;
        // Saved inputs stay first: that saves host memory. Where there are too many of them, the
        // link takes them, if it has time.
        let inputs = saved / workers;
        let stay = match link.spare_bytes(saved) {
            Some(_) => inputs.min(free / 3),
            None => inputs.min(free),
        };
        let spare = link.spare_bytes(saved - stay * workers);
        let (host_bytes, host_worth) = match self.ring.host_activations() {
            Some(bytes) => (bytes.0.saturating_sub(saved), 0.0),
            None => (self.usual_host_bytes(), MUCH / (1e3 * link.up_bytes_per_ms)),
        };
        let other_bytes = stay + for_next;
        // Where the user gave no host memory, few pieces go there, and those that stay need not
        // leave them a place to come back to.
        let arrive = match self.ring.host_activations() {
            None if budget.takes_spare => budget.early_inputs(),
            _ => u64::MAX,
        };
        let rooms = needs.pieces.stages.iter().map(|room| {
            let spare = room.arrive.saturating_sub(arrive);
            StageRoom {
                stay: (room.stay + spare).saturating_sub(other_bytes),
                arrive: room.arrive - spare,
            }
        });
        PieceRoom {
            stages: rooms.collect(),
            other_bytes,
            most_other_bytes: inputs + for_next,
            host_bytes: spare.unwrap_or(0).min(host_bytes),
            host_worth,
        }
    }

    /// What the link to the devices has to do in a call of these stages.
    fn link(
        &self,
        key: &PlanKey,
        stages: &[Stage],
        costs: &LayerCosts,
        state: &PlannerState,
    ) -> Link {
        let count = key.microbatches as f64;
        let kernels_ms = |pass: Pass| {
            let stages = stages.iter().filter(|stage| stage.pass == pass);
            let ms = stages.map(|stage| {
                let layers = || stage.layers.clone();
                match pass {
                    Pass::Forward => costs.forward_ms(layers()),
                    Pass::Backward => costs.recompute_ms(layers()) + costs.backward_ms(layers()),
                    Pass::Fused => costs.forward_ms(layers()) + costs.backward_ms(layers()),
                }
            });
            ms.sum::<f64>() * count
        };
        // Lanes share the link, so each is at most as fast as the link is.
        let fastest = |lanes: [LaneKind; 2]| {
            let rates = lanes.map(|lane| state.rates.bytes_per_ms(lane));
            rates.into_iter().flatten().reduce(f64::max).unwrap_or(LINK)
        };
        Link {
            exists: !self.ring.is_host(),
            weights: costs.bytes(0..self.layers.len()),
            forward_ms: kernels_ms(Pass::Forward),
            fused_ms: kernels_ms(Pass::Fused),
            backward_ms: kernels_ms(Pass::Backward),
            up_bytes_per_ms: fastest([LaneKind::ParamUpload, LaneKind::ActivationUpload]),
            down_bytes_per_ms: fastest([LaneKind::ActivationDownload, LaneKind::GradDownload]),
        }
    }

    /// Host memory that pieces of forwards may take where the user has not said how much.
    fn usual_host_bytes(&self) -> u64 {
        let mut workers = self.ring.workers().iter();
        if workers.all(|worker| !worker.device().moves_bytes()) {
            return u64::MAX;
        }
        host_memory::available().map_or(0, |left| left.0 / 4)
    }

    fn stage_needs(
        &self,
        budget: &WorkerBudget,
        stage: &Stage,
        grain: Grain,
        costs: &LayerCosts,
    ) -> StageNeeds {
        let layers = stage.layers.clone();
        let weights = if self.ring.is_host() {
            self.made_bytes(layers.clone())
        } else {
            costs.bytes(layers.clone())
        };
        if !costs.know_memory() {
            // Layers that look at values do not run on the meta device; the usual share holds.
            let task = budget.task.min(budget.arena.saturating_sub(weights));
            return StageNeeds {
                weights,
                task,
                sums: 0,
                outbox: budget.outbox,
            };
        }
        let sums = match stage.pass {
            Pass::Forward => 0,
            Pass::Backward | Pass::Fused => costs.grad_bytes(layers),
        };
        let task = costs.task_bytes(stage, grain == Grain::Layer);
        let sent = match stage.pass {
            // Inputs for recomputes, and pieces that leave, of every layer.
            Pass::Forward => u64::MAX,
            // A value at a time: a gradient or an output. The outbox has those of three tasks, and
            // takes one before it looks.
            Pass::Backward | Pass::Fused => {
                let before = stage.layers.start.saturating_sub(1);
                let passed = costs.layers[before..stage.layers.end].iter();
                let largest = passed.map(|layer| layer.activation_bytes).max();
                largest.unwrap_or(0).saturating_mul(4)
            }
        };
        budget.stage_needs(weights, task, sums, sent)
    }

    /// Weights of layers that are made when a worker reads them where they are, and that a job holds
    /// until it ends.
    fn made_bytes(&self, layers: Range<usize>) -> u64 {
        let first = self.layers.start;
        let layers = first + layers.start..first + layers.end;
        let params = layers.flat_map(|layer| self.model.store.layer(layer).params());
        let made = params.filter(|param| param.param.data().is_made_on_read());
        made.map(|param| param.param.bytes() as u64).sum()
    }

    /// What the search may assume: the machine as measured, and limits between those of the largest
    /// layer alone (share 0) and the budget's (share 1).
    fn options(
        &self,
        key: &PlanKey,
        costs: &LayerCosts,
        state: &PlannerState,
        largest: &Largest,
        share: f64,
    ) -> AutoOptions {
        let workers = self.ring.workers();
        let budget = self.ring.least_budget();
        let is_host = self.ring.is_host();
        let first = workers[0].device().id();
        let share_a_device = workers.iter().all(|worker| {
            let id = worker.device().id();
            (id.kind, id.index) == (first.kind, first.index)
        });
        let mut options = AutoOptions::new(workers.len(), key.microbatches);
        options.lag = self.max_lag;
        options.layer_grain = key.grain == Grain::Layer;
        options.shared_compute = is_host || share_a_device;
        let task = budget.task_limit(largest.visit);
        options.stage_memory_limit = Some(between(largest.visit.min(task), task, share));
        if !is_host {
            // Twice: while one stage runs, the weights of the next are uploaded.
            let weights = between(2 * largest.weights, budget.weights, share);
            options.model_memory_limit = Some(weights);
            // Pieces that stay beside the last forward stage stay beside its weights, too. With
            // several workers more stages are more copies between them.
            if workers.len() == 1 && budget.takes_spare && key.kind != PlanKind::Infer {
                options.forward_memory_limit = Some(budget.arena / 16);
            }
            let setting = &mut options.setting;
            let rate = |lane| state.rates.bytes_per_ms(lane).unwrap_or(LINK);
            setting.upload_bytes_per_ms = Some(rate(LaneKind::ParamUpload));
            // Costs count gradients as they lie on the device. They are rounded before they travel,
            // so the same link carries more of those bytes.
            setting.grad_bytes_per_ms =
                Some(rate(LaneKind::GradDownload) * self.gradients_on_device(costs));
            // From worker to worker is a copy down and one up.
            setting.hop_bytes_per_ms = Some(state.rates.hop_bytes_per_ms().unwrap_or(LINK / 2.0));
            setting.speeds = state.speeds.of(workers.len());
        } else if self.made_bytes(0..self.layers.len()) > 0 {
            // Nothing comes before its job, and half of the memory is for work.
            let weights = between(largest.weights, budget.arena / 2, share);
            options.model_memory_limit = Some(2 * weights);
        }
        options
    }

    /// How much larger gradients are on a device than on their way to the host, where they are
    /// rounded.
    fn gradients_on_device(&self, costs: &LayerCosts) -> f64 {
        let store = &self.model.store;
        let layers = self.layers.clone();
        let params = layers.flat_map(|layer| store.layer(layer).params());
        let sent: usize = params
            .filter(|param| param.param.is_trainable())
            .map(|param| param.shape.numel() * param.grad_dtype.size())
            .sum();
        let on_device = costs.grad_bytes(0..self.layers.len());
        if sent == 0 || on_device == 0 {
            return 1.0;
        }
        on_device as f64 / sent as f64
    }

    /// Costs before anything was measured: from the meta device, or from sizes where layers look at
    /// values.
    fn guess(&self, batch: &Batch<'_>) -> LayerCosts {
        if let Some(costs) = batch
            .example
            .and_then(|example| self.guess_by_meta(example, batch))
        {
            return costs;
        }
        let layers = &self.model.layers[self.layers.clone()];
        let sizes = layers.iter().map(|(name, layer)| {
            let params = layer.named_params();
            let bytes: u64 = params.iter().map(|(_, param)| param.bytes() as u64).sum();
            (name.clone(), bytes.max(1))
        });
        LayerCosts::from_bytes(sizes)
    }

    fn guess_by_meta(&self, example: &Tree<HostTensor>, batch: &Batch<'_>) -> Option<LayerCosts> {
        let device = self.ring.workers()[0].device().cost_model();
        let input = example.map_ref(|tensor| -> Spec { (tensor.dtype(), *tensor.shape(), false) });
        // A layer that panics here will do so again in its task, and be reported there.
        let guessed = catch_unwind(AssertUnwindSafe(|| {
            let layers = &self.model.layers[self.layers.clone()];
            let mode = CostMode {
                training: batch.training,
                fp8: self.model.fp8,
            };
            model_costs(layers, device, &input, mode)
        }));
        guessed.ok()?.ok()
    }
}

/// What a call saves for its backward: the input of every stage or layer that recomputes, for each
/// microbatch.
fn saved_bytes(key: &PlanKey, stages: &[Stage], costs: &LayerCosts) -> u64 {
    let mut sum = 0_u64;
    for stage in stages.iter().filter(|stage| stage.pass == Pass::Backward) {
        let starts = match key.grain {
            Grain::Stage => stage.layers.start..stage.layers.start + 1,
            Grain::Layer => stage.layers.clone(),
        };
        for layer in starts.filter(|layer| *layer > 0) {
            sum = sum.saturating_add(costs.layers[layer - 1].activation_bytes);
        }
    }
    sum.saturating_mul(key.microbatches as u64)
}

/// The link between host and devices in a call.
struct Link {
    exists: bool,
    /// That a backward brings anyway.
    weights: u64,
    /// What the kernels of all forward stages take, of fused ones, and of backward ones.
    forward_ms: f64,
    fused_ms: f64,
    backward_ms: f64,
    up_bytes_per_ms: f64,
    down_bytes_per_ms: f64,
}

impl Link {
    /// What would have to stay on each of so many workers for copies of weights to take no longer
    /// than kernels do. They come twice, for the forward and for the backward: on one worker a byte
    /// that stays saves both, on several the two are at different ones.
    fn excess_bytes(&self, workers: u64) -> u64 {
        if !self.exists {
            return 0;
        }
        let kernels_ms = self.forward_ms + self.fused_ms + self.backward_ms;
        let excess = 2.0 * self.weights as f64 - kernels_ms * self.up_bytes_per_ms;
        excess.max(0.0) as u64 / workers.max(2)
    }

    /// The weights that do not come in while the kernels of forwards run.
    fn forward_excess(&self) -> u64 {
        self.excess_beside(self.forward_ms)
    }

    /// The weights that do not come in while the kernels of backwards run.
    fn backward_excess(&self) -> u64 {
        self.excess_beside(self.fused_ms + self.backward_ms)
    }

    fn excess_beside(&self, kernels_ms: f64) -> u64 {
        /// The part of the time in which copies follow each other.
        const BUSY: f64 = 0.75;
        if !self.exists {
            return 0;
        }
        let beside = BUSY * kernels_ms * self.up_bytes_per_ms;
        (self.weights as f64 - beside).max(0.0) as u64
    }

    /// Of the time that kernels of backwards take, what copies beside them may take: rates are
    /// rough before they are measured, and copies come in bursts.
    const BACKWARD_SHARE: f64 = 0.6;

    /// The same of forwards. A piece that leaves has until its recompute, beside the fused stage
    /// too, so this is more. With 1.3 a plan sent 24 GiB where 17 GiB still hid behind kernels.
    const FORWARD_SHARE: f64 = 0.9;

    /// Bytes that may travel beside these, down beside the forwards and up beside the backwards;
    /// `None` if there is no time for these. In host memory nothing travels, and a value that stays
    /// saves a copy.
    fn spare_bytes(&self, saved: u64) -> Option<u64> {
        let down = Self::FORWARD_SHARE * self.forward_ms * self.down_bytes_per_ms;
        let up = Self::BACKWARD_SHARE * self.backward_ms * self.up_bytes_per_ms;
        let up = up - self.weights as f64;
        let spare = down.min(up) - saved as f64;
        (self.exists && spare >= 0.0).then_some(spare as u64)
    }
}

/// What the largest layers of a model need.
struct Largest {
    weights: u64,
    /// What a backward visit works in.
    visit: u64,
}

/// A limit between two.
fn between(least: u64, most: u64, share: f64) -> u64 {
    least.saturating_add((most.saturating_sub(least) as f64 * share) as u64)
}

impl PlannerState {
    fn begin_learning(&mut self) {
        if self.learned == 1 {
            self.times = LayerTimes::default();
            self.speeds = WorkerSpeeds::default();
        }
        self.learned += 1;
    }

    /// The plan made before, unless times have drifted since.
    fn known(&mut self, key: &PlanKey) -> Option<(ExecutePlan, CallNeeds)> {
        let planned = self.plans.get_mut(key)?;
        planned.calls += 1;
        if planned.calls % LOOK_EVERY == 1 {
            let of_times = self.times.drift(&planned.costs);
            let of_rates = self.rates.drift(&planned.rates);
            if of_times.max(of_rates) > DRIFT {
                return None;
            }
        }
        Some((planned.plan.clone(), planned.needs.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes early is what copies beside forwards leave over, and pieces go to host memory by
    /// the time of forward and backward stages, not of fused ones.
    #[test]
    fn the_link_is_shared_by_passes() {
        let mut link = Link {
            exists: true,
            weights: 1000,
            forward_ms: 10.0,
            fused_ms: 7.0,
            backward_ms: 60.0,
            up_bytes_per_ms: 50.0,
            down_bytes_per_ms: 50.0,
        };
        assert_eq!(link.forward_excess(), 1000 - 375);
        assert_eq!(link.backward_excess(), 0);
        assert_eq!(link.spare_bytes(50), Some(450 - 50), "down beside forwards");
        link.fused_ms = 70.0;
        assert_eq!(link.spare_bytes(50), Some(400));
        link.backward_ms = 40.0;
        assert_eq!(link.spare_bytes(50), Some(1200 - 1000 - 50), "up");
        assert_eq!(link.spare_bytes(201), None);
        link.forward_ms = 30.0;
        assert_eq!(link.forward_excess(), 0);
        (link.fused_ms, link.backward_ms) = (2.0, 8.0);
        assert_eq!(link.backward_excess(), 1000 - 375);
    }

    /// A first call that compiles for a second must not be seen in averages of milliseconds.
    #[test]
    fn times_of_the_first_call_are_forgotten() {
        let mut state = PlannerState::default();
        for ms in [1000.0, 2.0, 2.0] {
            state.begin_learning();
            state.times.record(0, Phase::Forward, ms);
        }
        assert_eq!(state.times.average_ms(0, Phase::Forward), Some(2.0));
    }

    /// A plan made before copies were timed is made again once they are, at the next look.
    #[test]
    fn measured_copies_make_a_plan_anew() {
        let key = PlanKey {
            kind: PlanKind::Fused,
            grain: Grain::Stage,
            recompute_all: false,
            microbatches: 1,
            input: Vec::new(),
            given: None,
        };
        let mut state = PlannerState::default();
        let planned = KnownPlan {
            plan: ExecutePlan::default(),
            needs: CallNeeds {
                stages: Vec::new(),
                kept_bytes: 0,
                pieces: PieceRoom::default(),
                host_bytes: 0,
                held_bytes: 0,
                early_bytes: 0,
                first_weights: 0,
            },
            costs: LayerCosts::default(),
            rates: CopyRates::default(),
            calls: 1,
        };
        state.plans.insert(key.clone(), planned);
        for _ in 0..2 * LOOK_EVERY {
            assert!(state.known(&key).is_some(), "nothing has changed");
        }
        state.rates.record(LaneKind::ParamUpload, 8 << 20, 1.0);
        let calls_until_noticed = (1..)
            .find(|_| state.known(&key).is_none())
            .expect("the drift is seen at some call");
        assert!(calls_until_noticed <= LOOK_EVERY);
    }
}
