//! What a plan would take: schedules replayed on a clock, without devices.
//!
//! RoundPipe's rules, as the engine follows them:
//!
//! 1. Stage `i` of a call runs on device `(g0 + i) mod N`; `g0` carries over from call to
//!    call.
//! 2. A device runs all microbatches of its slot, in order, before its next slot.
//! 3. Microbatch `m` of a slot needs microbatch `m` of the slot before it, plus a hop between
//!    devices.
//! 4. With the synchronous optimizer a step starts when the step before it ended. With the
//!    asynchronous one (lag 1) it starts when the step before *that* ended, so neighbouring steps
//!    overlap.
//! 5. Where a rate says how fast parameters travel, a visit needs its first layer's parameters to
//!    start, and its last layer's when it gets there. A device uploads one stage at a time, and
//!    that of its visit `j + 1` once its visit `j - 1` ended: two sets of parameters are on the
//!    device. No upload starts before rule 4 lets its step start, because it would bring old
//!    weights.
//! 6. Where a rate says how fast gradients travel, a device downloads those of a stage after its
//!    visit, one stage at a time; in a call's last stage each layer's leave as soon as its last
//!    microbatch is done. Only the end of the step waits for them.
//! 7. Where layers say how long their update takes, the host updates a step's layers from the first
//!    to the last once the step has ended, one step after another. Rule 4 lets steps start; the
//!    parameters of each layer wait for their update.
//!
//! The other schedules bind stage `s` to device `s mod N` for good, parameters included; they are
//! here to be compared with.
//!
//! The RoundPipe authors' own simulation bends these rules in three ways, which
//! [`Setting::published`] repeats so that their figures can be compared with: a visit takes only
//! `N` microbatches, the rest follow in further rounds; recompute starts before the gradient has
//! arrived, and the fused stage's forward even before its input has; asynchronous figures are one
//! step's bubble less its fill and drain ([`Timeline::inner_bubble`]) instead of a steady state.
//! Their other schedules recompute only after the gradient has arrived.

pub mod published;

use std::ops::Range;

use crate::cost::{LayerCost, LayerCosts};
use crate::error::{Error, Result};
use crate::plan::{ExecutePlan, Pass, PlanKind};
use crate::schedule::RoundRobin;

/// Who runs what when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schedule {
    /// RoundPipe, one step at a time.
    RoundPipe,
    /// RoundPipe with the asynchronous optimizer: the steady state of overlapping steps.
    RoundPipeAsync,
    /// All forwards, then all backwards; one stage per device.
    GPipe,
    /// One forward, one backward after the warm-up; one stage per device.
    OneForwardOneBackward,
    /// The same with several stages per device, in rounds of microbatches.
    Interleaved,
    /// Several stages per device, each run for all microbatches before the next.
    LoopedBfs,
}

/// What may run on a device before a stage's input has arrived there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum EarlyWork {
    /// Nothing: a task is one piece.
    #[default]
    Nothing,
    /// Recompute, as soon as the forward that saved its input has run.
    Recompute,
    /// Recompute, and the fused stage's forward. No real device can do that; the published figures
    /// assume it.
    RecomputeAndFused,
}

/// The machine and the batch. What is not said costs no time.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Devices in the ring.
    pub devices: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Microbatches that one visit of a stage takes; the engine takes all.
    pub visit: usize,
    /// What may run early.
    pub ahead: EarlyWork,
    /// Whether all devices compute on the same cores, as workers on the host do: see
    /// `RoundRobin::shares_cores`.
    pub shares_cores: bool,
    /// Speed of each device, relative to the one that the costs were taken on; nothing means 1.0
    /// for all.
    pub speeds: Vec<f64>,
    /// Parameters on their way to a device.
    pub upload_bytes_per_ms: Option<f64>,
    /// Gradients on their way to the host.
    pub grad_bytes_per_ms: Option<f64>,
    /// Activations all the way from one device to the next; without it, or for a layer whose
    /// `activation_bytes` are not known, `hop_ms` counts.
    pub hop_bytes_per_ms: Option<f64>,
}

impl Setting {
    /// The engine's rules, equal devices, transfers for free.
    pub fn new(devices: usize, microbatches: usize) -> Self {
        Self {
            devices,
            microbatches,
            visit: microbatches,
            ahead: EarlyWork::Nothing,
            shares_cores: false,
            speeds: Vec::new(),
            upload_bytes_per_ms: None,
            grad_bytes_per_ms: None,
            hop_bytes_per_ms: None,
        }
    }

    /// The rules under which RoundPipe's simulated bubbles were published.
    pub fn published(devices: usize, microbatches: usize) -> Self {
        Self {
            visit: devices,
            ahead: EarlyWork::RecomputeAndFused,
            ..Self::new(devices, microbatches)
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.devices == 0 || self.microbatches == 0 || self.visit == 0 {
            let what = "devices, microbatches and microbatches per visit must be at least 1";
            return Err(Error::config("simulation", what));
        }
        if !self.speeds.is_empty() && self.speeds.len() != self.devices {
            let what = format!(
                "{} speeds for {} devices; one each, or none",
                self.speeds.len(),
                self.devices
            );
            return Err(Error::config("speeds", what));
        }
        let rates = [
            ("upload_bytes_per_ms", self.upload_bytes_per_ms),
            ("grad_bytes_per_ms", self.grad_bytes_per_ms),
            ("hop_bytes_per_ms", self.hop_bytes_per_ms),
        ];
        let speeds = self.speeds.iter().map(|speed| ("speeds", Some(*speed)));
        for (name, rate) in speeds.chain(rates) {
            if let Some(wrong) = rate.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
                return Err(Error::config(
                    name,
                    format!("{wrong} is no rate; it must be above 0"),
                ));
            }
        }
        Ok(())
    }

    /// Whether parameters or gradients take time to move.
    pub(crate) fn copies_parameters(&self) -> bool {
        self.upload_bytes_per_ms.is_some() || self.grad_bytes_per_ms.is_some()
    }

    fn speed(&self, device: usize) -> f64 {
        self.speeds.get(device).copied().unwrap_or(1.0)
    }

    fn hop_ms(&self, layer: &LayerCost) -> f64 {
        match self.hop_bytes_per_ms {
            Some(rate) if layer.activation_bytes > 0 => layer.activation_bytes as f64 / rate,
            _ => layer.hop_ms,
        }
    }

    /// Steps to replay before the clock is read, and steps to average. Where a step's first device
    /// matters, each is the first as often as in a long run.
    pub(crate) fn sample(&self, lag: usize, steady: usize) -> (usize, usize) {
        let alike = self.speeds.windows(2).all(|pair| pair[0] == pair[1]);
        match lag {
            0 if alike => (0, 1),
            0 => (0, self.devices),
            _ => (steady, steady),
        }
    }
}

/// One microbatch in one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimelineTask {
    /// Where it ran.
    pub device: usize,
    /// When it began.
    pub start_ms: f64,
    /// When it ended.
    pub end_ms: f64,
    /// Which step it belongs to; several are replayed if they overlap or differ.
    pub step: usize,
    /// Its stage: the slot of the call in RoundPipe, the bound stage in other schedules.
    pub stage: usize,
    /// Its microbatch.
    pub microbatch: usize,
    /// What it did.
    pub pass: Pass,
}

/// What happened when.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Every task, in the order they were decided; each device's tasks are in the order they ran.
    pub tasks: Vec<TimelineTask>,
    /// Devices, idle ones included.
    pub devices: usize,
    /// From one step to the next.
    pub step_ms: f64,
    /// Share of device time in a step that nothing ran, 0 to 1.
    pub bubble: f64,
}

impl Timeline {
    /// When the last task ended.
    pub fn makespan_ms(&self) -> f64 {
        self.tasks
            .iter()
            .fold(0.0, |latest, task| task.end_ms.max(latest))
    }

    /// The bubble without the time before a device's first task and after its last, relative to the
    /// whole.
    pub fn inner_bubble(&self) -> f64 {
        let mut inside_ms = 0.0;
        for device in 0..self.devices {
            let mine = || self.tasks.iter().filter(|task| task.device == device);
            let first = mine()
                .map(|task| task.start_ms)
                .fold(f64::INFINITY, f64::min);
            let last = mine().map(|task| task.end_ms).fold(first, f64::max);
            let busy: f64 = mine().map(|task| task.end_ms - task.start_ms).sum();
            if first.is_finite() {
                inside_ms += last - first - busy;
            }
        }
        ratio(inside_ms, self.devices as f64 * self.makespan_ms())
    }
}

/// Replays `schedule`. RoundPipe reads the plan as `kind` says; the other schedules take its
/// forward ranges as their stages (empty ones allowed), and train.
///
/// # Errors
/// [`Error::Config`] for a plan that does not fit the layers or the schedule, or impossible costs.
pub fn simulate(
    schedule: Schedule,
    kind: PlanKind,
    plan: &ExecutePlan,
    costs: &LayerCosts,
    setting: &Setting,
) -> Result<Timeline> {
    simulate_models(schedule, kind, &[(plan, costs)], setting)
}

/// [`simulate`] for models that run as one call, in this order. Under [`PlanKind::Fused`] the plans
/// before the last are of kind [`PlanKind::Train`]. To the schedules that bind stages, the models
/// are one long model.
///
/// # Errors
/// [`Error::Config`] as for [`simulate`], and for no model at all.
pub fn simulate_models(
    schedule: Schedule,
    kind: PlanKind,
    models: &[(&ExecutePlan, &LayerCosts)],
    setting: &Setting,
) -> Result<Timeline> {
    setting.check()?;
    if models.is_empty() {
        return Err(Error::config("simulation", "there is no model to simulate"));
    }
    for (_, costs) in models {
        costs.check()?;
    }
    let lag = match schedule {
        Schedule::RoundPipe => 0,
        Schedule::RoundPipeAsync => 1,
        _ => {
            let (stages, costs) = joined(models);
            return bound(schedule, &stages, &costs, setting);
        }
    };
    for (index, (plan, costs)) in models.iter().enumerate() {
        let fused = kind == PlanKind::Fused && index + 1 < models.len();
        plan.check(if fused { PlanKind::Train } else { kind }, costs.len())?;
    }
    Ok(replay(&sim_stages(kind, models, setting), setting, lag))
}

/// Forward stages and layers of several models as those of one.
fn joined(models: &[(&ExecutePlan, &LayerCosts)]) -> (Vec<Range<usize>>, LayerCosts) {
    let mut stages = Vec::new();
    let mut all = LayerCosts::default();
    for (plan, costs) in models {
        let before = all.len();
        stages.extend(
            plan.forward
                .iter()
                .map(|range| before + range.start..before + range.end),
        );
        all.layers.extend_from_slice(&costs.layers);
    }
    (stages, all)
}

/// One stage of a call: what the ring needs to know about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimStage {
    pass: Pass,
    /// What may run before the input has arrived.
    ahead_ms: f64,
    /// The slot whose result the early part needs.
    saved_by: Option<usize>,
    /// What needs the input.
    body_ms: f64,
    /// The input's way from the slot before.
    hop_ms: f64,
    moved: Copies,
}

/// What a visit moves between host and device beside activations.
#[derive(Debug, Clone, PartialEq, Default)]
struct Copies {
    /// The parameters of each layer; none if they take no time.
    params: Vec<ParamCopy>,
    /// The gradients, in the order in which they leave; none if they take no time.
    grads: Vec<GradCopy>,
}

/// The parameters of a layer on their way to a visit.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ParamCopy {
    /// From the start of an update until it has made them.
    updated_ms: f64,
    upload_ms: f64,
    /// From a microbatch's start until it needs them, at speed 1.
    needed_ms: f64,
}

/// Gradients that leave a visit together.
#[derive(Debug, Clone, Copy, PartialEq)]
struct GradCopy {
    /// From when they are final to the end of the visit, at speed 1.
    early_ms: f64,
    download_ms: f64,
}

impl Copies {
    fn new(pass: Pass, layers: &Range<usize>, model: &SimModel<'_>, setting: &Setting) -> Self {
        let SimModel { costs, updated_ms } = model;
        let mut moved = Self::default();
        let rate = setting.upload_bytes_per_ms;
        if rate.is_some() || updated_ms[layers.end - 1] > 0.0 {
            let mut needed_ms = 0.0;
            for layer in layers.clone() {
                let cost = &costs.layers[layer];
                moved.params.push(ParamCopy {
                    updated_ms: updated_ms[layer],
                    upload_ms: rate.map_or(0.0, |rate| cost.bytes as f64 / rate),
                    needed_ms,
                });
                needed_ms += match pass {
                    Pass::Backward => cost.recompute_ms,
                    Pass::Forward | Pass::Fused => cost.forward_ms,
                };
            }
        }
        if let Some(rate) = setting.grad_bytes_per_ms.filter(|_| pass != Pass::Forward) {
            moved.grads.push(GradCopy {
                early_ms: 0.0,
                download_ms: costs.grad_bytes(layers.clone()) as f64 / rate,
            });
        }
        moved
    }

    /// The gradients of a call's last stage: each layer's leave as soon as they are final.
    fn grads_by_layer(layers: Range<usize>, costs: &LayerCosts, rate: f64) -> Vec<GradCopy> {
        let leaving = layers.clone().rev().map(|layer| GradCopy {
            early_ms: costs.backward_ms(layers.start..layer),
            download_ms: costs.grad_bytes(layer..layer + 1) as f64 / rate,
        });
        leaving.collect()
    }
}

/// One of the models of a call.
struct SimModel<'a> {
    costs: &'a LayerCosts,
    /// From the start of an update until it has made each layer's parameters (rule 7).
    updated_ms: Vec<f64>,
}

impl<'a> SimModel<'a> {
    fn new(kind: PlanKind, costs: &'a LayerCosts) -> Self {
        let mut sum_ms = 0.0;
        let updated_ms = costs.layers.iter().map(|layer| {
            if kind != PlanKind::Infer {
                sum_ms += layer.update_ms;
            }
            sum_ms
        });
        Self {
            updated_ms: updated_ms.collect(),
            costs,
        }
    }
}

/// The stages of one call over several models: forward from the first to the last, backward in
/// reverse. Only the last model is fused when `kind` says so.
pub(crate) fn sim_stages(
    kind: PlanKind,
    models: &[(&ExecutePlan, &LayerCosts)],
    setting: &Setting,
) -> Vec<SimStage> {
    let mut stages = Vec::new();
    let mut saved_at = Vec::new();
    let sim_models: Vec<SimModel<'_>> = models
        .iter()
        .map(|(_, costs)| SimModel::new(kind, costs))
        .collect();
    for (model, (plan, costs)) in models.iter().enumerate() {
        saved_at.push(stages.len());
        stages.extend(plan.forward.iter().map(|layers| SimStage {
            pass: Pass::Forward,
            ahead_ms: 0.0,
            saved_by: None,
            body_ms: costs.forward_ms(layers.clone()),
            hop_ms: hop_up(models, model, layers.start, setting),
            moved: Copies::new(Pass::Forward, layers, &sim_models[model], setting),
        }));
    }
    if kind == PlanKind::Infer {
        return stages;
    }
    for (model, (plan, _)) in models.iter().enumerate().rev() {
        let sim_model = &sim_models[model];
        for (index, layers) in plan.backward.iter().enumerate() {
            let fused = kind == PlanKind::Fused && model + 1 == models.len() && index == 0;
            stages.push(if fused {
                let hop_ms = hop_up(models, model, layers.start, setting);
                fused_stage(layers, sim_model, hop_ms, setting)
            } else {
                // A stage's input was saved by the forward stage that ran its first layer.
                let run_by = plan
                    .forward
                    .iter()
                    .position(|forward| forward.contains(&layers.start));
                let saved_by = run_by.map(|slot| saved_at[model] + slot);
                backward_stage(layers, sim_model, saved_by, setting)
            });
        }
    }
    let (plan, costs) = models[0];
    if let (Some(last), Some(rate)) = (stages.last_mut(), setting.grad_bytes_per_ms) {
        let layers = plan.backward[plan.backward.len() - 1].clone();
        last.moved.grads = Copies::grads_by_layer(layers, costs, rate);
    }
    stages
}

/// The way of a layer's input: the first layer of a model gets it from the model before.
fn hop_up(
    models: &[(&ExecutePlan, &LayerCosts)],
    model: usize,
    layer: usize,
    setting: &Setting,
) -> f64 {
    let source = match layer.checked_sub(1) {
        Some(before) => models[model].1.layers.get(before),
        None => model
            .checked_sub(1)
            .and_then(|before| models[before].1.layers.last()),
    };
    source.map_or(0.0, |layer| setting.hop_ms(layer))
}

fn fused_stage(
    layers: &Range<usize>,
    model: &SimModel<'_>,
    hop_ms: f64,
    setting: &Setting,
) -> SimStage {
    let costs = model.costs;
    let forward_ms = costs.forward_ms(layers.clone());
    let backward_ms = costs.backward_ms(layers.clone());
    let early = setting.ahead == EarlyWork::RecomputeAndFused;
    SimStage {
        pass: Pass::Fused,
        ahead_ms: if early { forward_ms } else { 0.0 },
        saved_by: None,
        body_ms: if early {
            backward_ms
        } else {
            forward_ms + backward_ms
        },
        hop_ms,
        moved: Copies::new(Pass::Fused, layers, model, setting),
    }
}

fn backward_stage(
    layers: &Range<usize>,
    model: &SimModel<'_>,
    saved_by: Option<usize>,
    setting: &Setting,
) -> SimStage {
    let costs = model.costs;
    let recompute_ms = costs.recompute_ms(layers.clone());
    let backward_ms = costs.backward_ms(layers.clone());
    let early = setting.ahead != EarlyWork::Nothing;
    SimStage {
        pass: Pass::Backward,
        ahead_ms: if early { recompute_ms } else { 0.0 },
        saved_by: if early { saved_by } else { None },
        body_ms: if early {
            backward_ms
        } else {
            recompute_ms + backward_ms
        },
        hop_ms: setting.hop_ms(&costs.layers[layers.end - 1]),
        moved: Copies::new(Pass::Backward, layers, model, setting),
    }
}

/// One step (lag 0), or the steady state of many (lag 1).
fn replay(stages: &[SimStage], setting: &Setting, lag: usize) -> Timeline {
    let mut tasks = Vec::new();
    // Every device has seen every `g0` several times before the clock is read, and again while it
    // is.
    let (warm_up, measured) = setting.sample(lag, 2 * setting.devices);
    let ends = ring(stages, setting, lag, warm_up + measured, |task| {
        tasks.push(task)
    });
    let step_ms = mean_step_ms(&ends, warm_up);
    let busy = tasks.iter().filter(|task| task.step >= warm_up);
    let busy_ms: f64 = busy.map(|task| task.end_ms - task.start_ms).sum();
    let all_ms = setting.devices as f64 * step_ms * measured as f64;
    Timeline {
        tasks,
        devices: setting.devices,
        step_ms,
        bubble: ratio(all_ms - busy_ms, all_ms),
    }
}

/// From one step's end to the next, after the warm-up.
pub(crate) fn mean_step_ms(ends_ms: &[f64], warm_up: usize) -> f64 {
    let from_ms = warm_up.checked_sub(1).map_or(0.0, |step| ends_ms[step]);
    (ends_ms[ends_ms.len() - 1] - from_ms) / (ends_ms.len() - warm_up) as f64
}

/// When a device of the ring is free for what.
#[derive(Debug, Clone, Copy, Default)]
struct Lanes {
    /// End of the last visit.
    free_ms: f64,
    /// End of the visit before that: its parameters' place may be overwritten.
    room_ms: f64,
    /// End of the last upload.
    uploaded_ms: f64,
    /// End of the last download.
    downloaded_ms: f64,
}

impl Lanes {
    /// When the next visit may start, as far as the device and its parameters are concerned (rules
    /// 2, 5 and 7).
    fn start_ms(&mut self, moved: &Copies, gate: StepGate, speed: f64) -> f64 {
        if moved.params.is_empty() {
            return self.free_ms;
        }
        let mut start_ms = self.free_ms;
        let mut arrived_ms = gate.open_ms.max(self.uploaded_ms).max(self.room_ms);
        for layer in &moved.params {
            let updated_ms = gate.update_ms + layer.updated_ms;
            arrived_ms = arrived_ms.max(updated_ms) + layer.upload_ms;
            // Waiting for a layer inside the visit is the same as starting later.
            start_ms = start_ms.max(arrived_ms - layer.needed_ms / speed);
        }
        self.uploaded_ms = arrived_ms;
        start_ms
    }

    /// The visit's end; returns when its gradients are on the host (rule 6).
    fn end(&mut self, moved: &Copies, end_ms: f64, speed: f64) -> f64 {
        (self.room_ms, self.free_ms) = (self.free_ms, end_ms);
        for grads in &moved.grads {
            let final_ms = end_ms - grads.early_ms / speed;
            self.downloaded_ms = self.downloaded_ms.max(final_ms) + grads.download_ms;
        }
        end_ms.max(self.downloaded_ms)
    }
}

/// What a step waits for.
#[derive(Debug, Clone, Copy, Default)]
struct StepGate {
    /// When it may start (rule 4).
    open_ms: f64,
    /// When the update that makes its parameters begins (rule 7).
    update_ms: f64,
}

/// Runs `steps` steps by the rules of the module header; returns when each ended.
pub(crate) fn ring(
    stages: &[SimStage],
    setting: &Setting,
    lag: usize,
    steps: usize,
    mut seen: impl FnMut(TimelineTask),
) -> Vec<f64> {
    let mut lanes = vec![Lanes::default(); setting.devices];
    let passes: Vec<Pass> = stages.iter().map(|stage| stage.pass).collect();
    let mut schedule = RoundRobin::new(setting.devices).shares_cores(setting.shares_cores);
    let mut ends: Vec<f64> = Vec::with_capacity(steps);
    let mut updates: Vec<f64> = Vec::with_capacity(steps);
    let params = stages.iter().flat_map(|stage| &stage.moved.params);
    let whole_update_ms = params.map(|param| param.updated_ms).fold(0.0, f64::max);
    let mut done_ms = vec![0.0_f64; stages.len() * setting.visit.min(setting.microbatches)];
    for step in 0..steps {
        // Before the first step there is an update as well: steps are alike.
        let earlier = step.checked_sub(lag + 1);
        let gate = earlier.map_or(StepGate::default(), |earlier| StepGate {
            open_ms: ends[earlier],
            update_ms: updates[earlier],
        });
        let mut step_end_ms = gate.open_ms;
        for first in (0..setting.microbatches).step_by(setting.visit) {
            let count = setting.visit.min(setting.microbatches - first);
            let devices = schedule.take(&passes);
            for (index, stage) in stages.iter().enumerate() {
                let device = devices[index];
                let (before, now) = done_ms.split_at_mut(index * count);
                let input = index
                    .checked_sub(1)
                    .map(|earlier| &before[earlier * count..][..count]);
                let saved = stage
                    .saved_by
                    .map(|earlier| &before[earlier * count..][..count]);
                let hop_ms = if setting.devices > 1 {
                    stage.hop_ms
                } else {
                    0.0
                };
                let speed = setting.speed(device);
                let (ahead_ms, body_ms) = (stage.ahead_ms / speed, stage.body_ms / speed);
                let mut at_ms = lanes[device].start_ms(&stage.moved, gate, speed);
                for microbatch in 0..count {
                    let ready_ms = input.map_or(gate.open_ms, |done| done[microbatch] + hop_ms);
                    let early_ms = saved.map_or(at_ms, |done| at_ms.max(done[microbatch]));
                    let body_start_ms = ready_ms.max(early_ms + ahead_ms);
                    let start_ms = body_start_ms - ahead_ms;
                    at_ms = body_start_ms + body_ms;
                    now[microbatch] = at_ms;
                    let microbatch = first + microbatch;
                    seen(TimelineTask {
                        device,
                        start_ms,
                        end_ms: at_ms,
                        step,
                        stage: index,
                        microbatch,
                        pass: stage.pass,
                    });
                }
                step_end_ms = step_end_ms.max(lanes[device].end(&stage.moved, at_ms, speed));
            }
        }
        ends.push(step_end_ms);
        let update_before = updates
            .last()
            .map_or(0.0, |start_ms| start_ms + whole_update_ms);
        updates.push(step_end_ms.max(update_before));
    }
    ends
}

/// One entry of a bound schedule's list for a device.
#[derive(Debug, Clone, Copy)]
struct ListedTask {
    pass: Pass,
    stage: usize,
    microbatch: usize,
}

/// Schedules in which stage `s` stays on device `s mod N`: each device works through its list in
/// order.
fn bound(
    schedule: Schedule,
    stages: &[Range<usize>],
    costs: &LayerCosts,
    setting: &Setting,
) -> Result<Timeline> {
    check_bound(schedule, stages, costs.len(), setting)?;
    let lists: Vec<_> = (0..setting.devices)
        .map(|device| list(schedule, stages.len(), device, setting))
        .collect();
    let mut next = vec![0; setting.devices];
    let mut free_ms = vec![0.0_f64; setting.devices];
    let mut done = Done::new(stages.len(), setting.microbatches);
    let mut tasks = Vec::new();
    loop {
        let before = tasks.len();
        for device in 0..setting.devices {
            while let Some(&entry) = lists[device].get(next[device]) {
                let Some((ready_ms, from)) = done.input(entry) else {
                    break;
                };
                let away = from.is_some_and(|stage| stage % setting.devices != device);
                let hop_ms = if away {
                    setting.hop_ms(border_into(entry, stages, costs))
                } else {
                    0.0
                };
                let (ahead_ms, rest_ms) =
                    bound_stage(entry.pass, &stages[entry.stage], costs, setting.ahead);
                let (ahead_ms, rest_ms) = (
                    ahead_ms / setting.speed(device),
                    rest_ms / setting.speed(device),
                );
                let body_ms = (ready_ms + hop_ms).max(free_ms[device] + ahead_ms);
                let (start_ms, end_ms) = (body_ms - ahead_ms, body_ms + rest_ms);
                free_ms[device] = end_ms;
                done.set(entry, end_ms);
                let ListedTask {
                    pass,
                    stage,
                    microbatch,
                } = entry;
                tasks.push(TimelineTask {
                    device,
                    start_ms,
                    end_ms,
                    step: 0,
                    stage,
                    microbatch,
                    pass,
                });
                next[device] += 1;
            }
        }
        if tasks.len() == before {
            break;
        }
    }
    assert_eq!(
        tasks.len(),
        2 * stages.len() * setting.microbatches,
        "{schedule:?} has a cycle"
    );
    let step_ms = free_ms.iter().copied().fold(0.0, f64::max);
    let busy_ms: f64 = tasks.iter().map(|task| task.end_ms - task.start_ms).sum();
    let all_ms = setting.devices as f64 * step_ms;
    Ok(Timeline {
        tasks,
        devices: setting.devices,
        step_ms,
        bubble: ratio(all_ms - busy_ms, all_ms),
    })
}

fn check_bound(
    schedule: Schedule,
    stages: &[Range<usize>],
    layers: usize,
    setting: &Setting,
) -> Result<()> {
    let mut at = 0;
    for range in stages {
        if range.start != at || range.end < at || range.end > layers {
            let what = format!("stage {}..{} must start at {at}", range.start, range.end);
            return Err(Error::config("execute_plan", what));
        }
        at = range.end;
    }
    if at != layers {
        return Err(Error::config(
            "execute_plan",
            format!("the stages end at {at} of {layers} layers"),
        ));
    }
    let looped = matches!(schedule, Schedule::Interleaved | Schedule::LoopedBfs);
    let fits = if looped {
        stages.len().is_multiple_of(setting.devices)
    } else {
        stages.len() == setting.devices
    };
    if !fits {
        let what = format!(
            "{schedule:?} cannot place {} stages on {} devices",
            stages.len(),
            setting.devices
        );
        return Err(Error::config("execute_plan", what));
    }
    let rounds = (setting.microbatches / setting.devices).max(1);
    if schedule == Schedule::Interleaved && !setting.microbatches.is_multiple_of(rounds) {
        let what = format!(
            "{} microbatches do not divide into {rounds} rounds",
            setting.microbatches
        );
        return Err(Error::config("simulation", what));
    }
    Ok(())
}

/// What `device` does, in order.
fn list(schedule: Schedule, stages: usize, device: usize, setting: &Setting) -> Vec<ListedTask> {
    let (devices, microbatches) = (setting.devices, setting.microbatches);
    let local = stages / devices;
    let forward = |stage, microbatch| ListedTask {
        pass: Pass::Forward,
        stage,
        microbatch,
    };
    let backward = |stage, microbatch| ListedTask {
        pass: Pass::Backward,
        stage,
        microbatch,
    };
    match schedule {
        Schedule::OneForwardOneBackward => {
            let warm_up = microbatches.min(devices - device);
            let ahead = (0..warm_up).map(|m| forward(device, m));
            let steady = (0..microbatches).flat_map(|m| {
                let next = Some(m + warm_up).filter(|&next| next < microbatches);
                std::iter::once(backward(device, m)).chain(next.map(|next| forward(device, next)))
            });
            ahead.chain(steady).collect()
        }
        Schedule::Interleaved => {
            let round = microbatches / (microbatches / devices).max(1);
            let total = local * microbatches;
            let warm_up = total.min((local - 1) * round + 2 * (devices - 1 - device));
            // The k-th forward: `round` microbatches of a local stage, then of the next, then
            // around again.
            let place = |k: usize| (k / round % local, k / (round * local) * round + k % round);
            let nth_forward = |k| forward(place(k).0 * devices + device, place(k).1);
            let nth_backward =
                |k| backward((local - 1 - place(k).0) * devices + device, place(k).1);
            let ahead = (0..warm_up).map(nth_forward);
            let steady = (warm_up..total).flat_map(|k| [nth_forward(k), nth_backward(k - warm_up)]);
            let drain = (total - warm_up..total).map(nth_backward);
            ahead.chain(steady).chain(drain).collect()
        }
        _ => {
            let own = (0..local).map(|turn| turn * devices + device);
            let there = own
                .clone()
                .flat_map(|stage| (0..microbatches).map(move |m| forward(stage, m)));
            let back = own
                .rev()
                .flat_map(|stage| (0..microbatches).map(move |m| backward(stage, m)));
            there.chain(back).collect()
        }
    }
}

/// When each task of a bound schedule ended.
struct Done {
    stages: usize,
    microbatches: usize,
    ends_ms: Vec<Option<f64>>,
}

impl Done {
    fn new(stages: usize, microbatches: usize) -> Self {
        Self {
            stages,
            microbatches,
            ends_ms: vec![None; 2 * stages * microbatches],
        }
    }

    fn index_of(&self, pass: Pass, stage: usize, microbatch: usize) -> usize {
        let half = if pass == Pass::Forward {
            0
        } else {
            self.stages
        };
        (half + stage) * self.microbatches + microbatch
    }

    fn set(&mut self, entry: ListedTask, end_ms: f64) {
        let index = self.index_of(entry.pass, entry.stage, entry.microbatch);
        self.ends_ms[index] = Some(end_ms);
    }

    /// When the input exists and the stage that made it; nothing if it was not made yet.
    fn input(&self, entry: ListedTask) -> Option<(f64, Option<usize>)> {
        let (pass, stage) = match entry.pass {
            Pass::Forward if entry.stage == 0 => return Some((0.0, None)),
            Pass::Forward => (Pass::Forward, entry.stage - 1),
            _ if entry.stage + 1 == self.stages => (Pass::Forward, entry.stage),
            _ => (Pass::Backward, entry.stage + 1),
        };
        self.ends_ms[self.index_of(pass, stage, entry.microbatch)]
            .map(|end_ms| (end_ms, Some(stage)))
    }
}

/// The early part and the rest of one task of a bound schedule.
fn bound_stage(
    pass: Pass,
    layers: &Range<usize>,
    costs: &LayerCosts,
    ahead: EarlyWork,
) -> (f64, f64) {
    if pass == Pass::Forward {
        return (0.0, costs.forward_ms(layers.clone()));
    }
    let (recompute_ms, backward_ms) = (
        costs.recompute_ms(layers.clone()),
        costs.backward_ms(layers.clone()),
    );
    if ahead == EarlyWork::Nothing {
        (0.0, recompute_ms + backward_ms)
    } else {
        (recompute_ms, backward_ms)
    }
}

/// The layer over whose output a bound task's input comes.
fn border_into<'a>(
    entry: ListedTask,
    stages: &[Range<usize>],
    costs: &'a LayerCosts,
) -> &'a LayerCost {
    let range = &stages[entry.stage];
    let border = if entry.pass == Pass::Forward {
        range.start
    } else {
        range.end
    };
    // A border at the model's start belongs to an empty first stage, which hands the input on.
    &costs.layers[border.saturating_sub(1)]
}

/// A share that rounding cannot push below 0, and 0 of nothing.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 {
        (part / whole).max(0.0)
    } else {
        0.0
    }
}
