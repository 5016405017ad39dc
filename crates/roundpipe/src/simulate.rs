//! What a plan would take: schedules replayed on a clock, without devices.
//!
//! RoundPipe's rules, as the engine follows them:
//!
//! 1. Stage slot `i` of a call runs on device `(g0 + i) mod N`; `g0` carries over from call to call.
//! 2. A device runs all microbatches of its slot, in order, before its next slot.
//! 3. Microbatch `m` of a slot needs microbatch `m` of the slot before it, plus a hop between devices.
//! 4. With the synchronous optimizer a step starts when the step before it ended. With the asynchronous one
//!    (lag 1) it starts when the step before *that* ended, so neighbouring steps overlap.
//!
//! The other schedules bind stage `s` to device `s mod N` for good; they are here to be compared with.
//!
//! The RoundPipe authors' own simulation bends these rules in three ways, which [`Setting::published`]
//! repeats so that their figures can be compared with: a visit takes only `N` microbatches, the rest follow in
//! further rounds; recompute starts before the gradient has arrived, and the fused stage's forward even
//! before its input has; asynchronous figures are one step's bubble less its fill and drain
//! ([`Timeline::inner_bubble`]) instead of a steady state. Their other schedules recompute only after the
//! gradient has arrived.

use std::ops::Range;

use crate::costs::LayerCosts;
use crate::error::{Error, Result};
use crate::plan::{ExecutePlan, Pass, PlanKind};

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
pub enum Ahead {
    /// Nothing: a task is one piece.
    #[default]
    Nothing,
    /// Recompute, as soon as the forward that saved its input has run.
    Recompute,
    /// Recompute, and the fused stage's forward. No real device can do that; the published figures assume it.
    RecomputeAndFused,
}

/// The machine and the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Devices in the ring.
    pub devices: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Microbatches that one visit of a stage takes; the engine takes all.
    pub visit: usize,
    /// What may run early.
    pub ahead: Ahead,
}

impl Setting {
    /// The engine's rules.
    pub fn new(devices: usize, microbatches: usize) -> Self {
        Self { devices, microbatches, visit: microbatches, ahead: Ahead::Nothing }
    }

    /// The rules under which RoundPipe's simulated bubbles were published.
    pub fn published(devices: usize, microbatches: usize) -> Self {
        Self { devices, microbatches, visit: devices, ahead: Ahead::RecomputeAndFused }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.devices == 0 || self.microbatches == 0 || self.visit == 0 {
            let what = "devices, microbatches and microbatches per visit must be at least 1";
            return Err(Error::config("simulation", what));
        }
        Ok(())
    }
}

/// One microbatch in one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    /// Where it ran.
    pub device: usize,
    /// When it began.
    pub start_ms: f64,
    /// When it ended.
    pub end_ms: f64,
    /// Which step it belongs to; 0 but for [`Schedule::RoundPipeAsync`].
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
    pub tasks: Vec<Task>,
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
        self.tasks.iter().fold(0.0, |latest, task| task.end_ms.max(latest))
    }

    /// The bubble without the time before a device's first task and after its last, relative to the whole.
    pub fn inner_bubble(&self) -> f64 {
        let mut inside_ms = 0.0;
        for device in 0..self.devices {
            let mine = || self.tasks.iter().filter(|task| task.device == device);
            let first = mine().map(|task| task.start_ms).fold(f64::INFINITY, f64::min);
            let last = mine().map(|task| task.end_ms).fold(first, f64::max);
            let busy: f64 = mine().map(|task| task.end_ms - task.start_ms).sum();
            if first.is_finite() {
                inside_ms += last - first - busy;
            }
        }
        ratio(inside_ms, self.devices as f64 * self.makespan_ms())
    }
}

/// Replays `schedule`. RoundPipe reads the plan as `kind` says; the other schedules take its forward ranges
/// as their stages (empty ones allowed), and train.
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
    setting.check()?;
    costs.check()?;
    let lag = match schedule {
        Schedule::RoundPipe => 0,
        Schedule::RoundPipeAsync => 1,
        _ => return bound(schedule, &plan.forward, costs, setting),
    };
    plan.check(kind, costs.len())?;
    Ok(replay(&slots(kind, &[(plan, costs)], setting.ahead), setting, lag))
}

/// One stage slot of a call: what the ring needs to know about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slot {
    pass: Pass,
    /// What may run before the input has arrived.
    ahead_ms: f64,
    /// The slot whose result the early part needs.
    saved_by: Option<usize>,
    /// What needs the input.
    body_ms: f64,
    /// The input's way from the slot before.
    hop_ms: f64,
}

/// The slots of one call over several models: forward from the first to the last, backward in reverse.
/// Only the last model is fused when `kind` says so.
pub(crate) fn slots(kind: PlanKind, models: &[(&ExecutePlan, &LayerCosts)], ahead: Ahead) -> Vec<Slot> {
    let mut slots = Vec::new();
    let mut saved_at = Vec::new();
    for (model, (plan, costs)) in models.iter().enumerate() {
        // The input of a model's first layer is the output of the model before it.
        let before = model.checked_sub(1).and_then(|before| models[before].1.layers.last());
        saved_at.push(slots.len());
        for layers in &plan.forward {
            let source = layers.start.checked_sub(1).map_or(before, |layer| costs.layers.get(layer));
            slots.push(Slot {
                pass: Pass::Forward,
                ahead_ms: 0.0,
                saved_by: None,
                body_ms: costs.forward_ms(layers.clone()),
                hop_ms: source.map_or(0.0, |layer| layer.hop_ms),
            });
        }
    }
    if kind == PlanKind::Infer {
        return slots;
    }
    for (model, (plan, costs)) in models.iter().enumerate().rev() {
        for (index, layers) in plan.backward.iter().enumerate() {
            let fused = kind == PlanKind::Fused && model + 1 == models.len() && index == 0;
            slots.push(if fused {
                fused_slot(layers, costs, ahead)
            } else {
                // A stage's input was saved by the forward stage that ran its first layer.
                let run_by = plan.forward.iter().position(|forward| forward.contains(&layers.start));
                let saved_by = run_by.map(|slot| saved_at[model] + slot);
                backward_slot(layers, costs, ahead, saved_by)
            });
        }
    }
    slots
}

fn fused_slot(layers: &Range<usize>, costs: &LayerCosts, ahead: Ahead) -> Slot {
    let forward_ms = costs.forward_ms(layers.clone());
    let backward_ms = costs.backward_ms(layers.clone());
    let early = ahead == Ahead::RecomputeAndFused;
    Slot {
        pass: Pass::Fused,
        ahead_ms: if early { forward_ms } else { 0.0 },
        saved_by: None,
        body_ms: if early { backward_ms } else { forward_ms + backward_ms },
        hop_ms: layers.start.checked_sub(1).map_or(0.0, |layer| costs.layers[layer].hop_ms),
    }
}

fn backward_slot(layers: &Range<usize>, costs: &LayerCosts, ahead: Ahead, saved_by: Option<usize>) -> Slot {
    let recompute_ms = costs.recompute_ms(layers.clone());
    let backward_ms = costs.backward_ms(layers.clone());
    let early = ahead != Ahead::Nothing;
    Slot {
        pass: Pass::Backward,
        ahead_ms: if early { recompute_ms } else { 0.0 },
        saved_by: if early { saved_by } else { None },
        body_ms: if early { backward_ms } else { recompute_ms + backward_ms },
        hop_ms: costs.layers[layers.end - 1].hop_ms,
    }
}

/// One step (lag 0), or the steady state of many (lag 1).
fn replay(slots: &[Slot], setting: &Setting, lag: usize) -> Timeline {
    let mut tasks = Vec::new();
    // Every device has seen every `g0` several times before the clock is read, and again while it is.
    let (warm_up, measured) = if lag == 0 { (0, 1) } else { (2 * setting.devices, 2 * setting.devices) };
    let ends = ring(slots, setting, lag, warm_up + measured, |task| tasks.push(task));
    let from = warm_up.checked_sub(1).map_or(0.0, |step| ends[step]);
    let step_ms = (ends[ends.len() - 1] - from) / measured as f64;
    let bubble = bubble(slots, setting, step_ms);
    Timeline { tasks, devices: setting.devices, step_ms, bubble }
}

/// Share of a step's device time in which none of its work ran.
fn bubble(slots: &[Slot], setting: &Setting, step_ms: f64) -> f64 {
    let busy_ms: f64 = slots.iter().map(|slot| slot.ahead_ms + slot.body_ms).sum();
    let all_ms = setting.devices as f64 * step_ms;
    ratio(all_ms - busy_ms * setting.microbatches as f64, all_ms)
}

/// Runs `steps` steps by the rules of the module header; returns when each ended.
pub(crate) fn ring(
    slots: &[Slot],
    setting: &Setting,
    lag: usize,
    steps: usize,
    mut seen: impl FnMut(Task),
) -> Vec<f64> {
    let mut free_ms = vec![0.0_f64; setting.devices];
    let mut device = 0;
    let mut ends: Vec<f64> = Vec::with_capacity(steps);
    let mut done_ms = vec![0.0_f64; slots.len() * setting.visit.min(setting.microbatches)];
    for step in 0..steps {
        let gate_ms = (step + 1).checked_sub(lag + 2).map_or(0.0, |earlier| ends[earlier]);
        let mut end_ms = gate_ms;
        for first in (0..setting.microbatches).step_by(setting.visit) {
            let count = setting.visit.min(setting.microbatches - first);
            for (stage, slot) in slots.iter().enumerate() {
                let (before, now) = done_ms.split_at_mut(stage * count);
                let input = stage.checked_sub(1).map(|slot| &before[slot * count..][..count]);
                let saved = slot.saved_by.map(|slot| &before[slot * count..][..count]);
                let hop_ms = if setting.devices > 1 { slot.hop_ms } else { 0.0 };
                let mut at_ms = free_ms[device];
                for microbatch in 0..count {
                    let ready_ms = input.map_or(gate_ms, |done| done[microbatch] + hop_ms);
                    let early_ms = saved.map_or(at_ms, |done| at_ms.max(done[microbatch]));
                    let body_start_ms = ready_ms.max(early_ms + slot.ahead_ms);
                    let start_ms = body_start_ms - slot.ahead_ms;
                    at_ms = body_start_ms + slot.body_ms;
                    now[microbatch] = at_ms;
                    let microbatch = first + microbatch;
                    seen(Task { device, start_ms, end_ms: at_ms, step, stage, microbatch, pass: slot.pass });
                }
                free_ms[device] = at_ms;
                end_ms = end_ms.max(at_ms);
                device = (device + 1) % setting.devices;
            }
        }
        ends.push(end_ms);
    }
    ends
}

/// One entry of a bound schedule's list for a device.
#[derive(Debug, Clone, Copy)]
struct Entry {
    pass: Pass,
    stage: usize,
    microbatch: usize,
}

/// Schedules in which stage `s` stays on device `s mod N`: each device works through its list in order.
fn bound(
    schedule: Schedule,
    stages: &[Range<usize>],
    costs: &LayerCosts,
    setting: &Setting,
) -> Result<Timeline> {
    check_bound(schedule, stages, costs.len(), setting)?;
    let lists: Vec<_> =
        (0..setting.devices).map(|device| list(schedule, stages.len(), device, setting)).collect();
    let mut next = vec![0; setting.devices];
    let mut free_ms = vec![0.0_f64; setting.devices];
    let mut done = Done::new(stages.len(), setting.microbatches);
    let mut tasks = Vec::new();
    loop {
        let before = tasks.len();
        for device in 0..setting.devices {
            while let Some(&entry) = lists[device].get(next[device]) {
                let Some((ready_ms, from)) = done.input(entry) else { break };
                let away = from.is_some_and(|stage| stage % setting.devices != device);
                let hop_ms = if away { hop_into(entry, stages, costs) } else { 0.0 };
                let slot = bound_slot(entry.pass, &stages[entry.stage], costs, setting.ahead);
                let body_ms = (ready_ms + hop_ms).max(free_ms[device] + slot.0);
                let (start_ms, end_ms) = (body_ms - slot.0, body_ms + slot.1);
                free_ms[device] = end_ms;
                done.set(entry, end_ms);
                let Entry { pass, stage, microbatch } = entry;
                tasks.push(Task { device, start_ms, end_ms, step: 0, stage, microbatch, pass });
                next[device] += 1;
            }
        }
        if tasks.len() == before {
            break;
        }
    }
    assert_eq!(tasks.len(), 2 * stages.len() * setting.microbatches, "{schedule:?} has a cycle");
    let step_ms = free_ms.iter().copied().fold(0.0, f64::max);
    let busy_ms: f64 = tasks.iter().map(|task| task.end_ms - task.start_ms).sum();
    let all_ms = setting.devices as f64 * step_ms;
    Ok(Timeline { tasks, devices: setting.devices, step_ms, bubble: ratio(all_ms - busy_ms, all_ms) })
}

fn check_bound(schedule: Schedule, stages: &[Range<usize>], layers: usize, setting: &Setting) -> Result<()> {
    let mut at = 0;
    for range in stages {
        if range.start != at || range.end < at || range.end > layers {
            let what = format!("stage {}..{} must start at {at}", range.start, range.end);
            return Err(Error::config("execute_plan", what));
        }
        at = range.end;
    }
    if at != layers {
        return Err(Error::config("execute_plan", format!("the stages end at {at} of {layers} layers")));
    }
    let looped = matches!(schedule, Schedule::Interleaved | Schedule::LoopedBfs);
    let fits =
        if looped { stages.len().is_multiple_of(setting.devices) } else { stages.len() == setting.devices };
    if !fits {
        let what =
            format!("{schedule:?} cannot place {} stages on {} devices", stages.len(), setting.devices);
        return Err(Error::config("execute_plan", what));
    }
    let rounds = (setting.microbatches / setting.devices).max(1);
    if schedule == Schedule::Interleaved && !setting.microbatches.is_multiple_of(rounds) {
        let what = format!("{} microbatches do not divide into {rounds} rounds", setting.microbatches);
        return Err(Error::config("simulation", what));
    }
    Ok(())
}

/// What `device` does, in order.
fn list(schedule: Schedule, stages: usize, device: usize, setting: &Setting) -> Vec<Entry> {
    let (devices, microbatches) = (setting.devices, setting.microbatches);
    let local = stages / devices;
    let forward = |stage, microbatch| Entry { pass: Pass::Forward, stage, microbatch };
    let backward = |stage, microbatch| Entry { pass: Pass::Backward, stage, microbatch };
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
            // The k-th forward: `round` microbatches of a local stage, then of the next, then around again.
            let place = |k: usize| (k / round % local, k / (round * local) * round + k % round);
            let nth_forward = |k| forward(place(k).0 * devices + device, place(k).1);
            let nth_backward = |k| backward((local - 1 - place(k).0) * devices + device, place(k).1);
            let ahead = (0..warm_up).map(nth_forward);
            let steady = (warm_up..total).flat_map(|k| [nth_forward(k), nth_backward(k - warm_up)]);
            let drain = (total - warm_up..total).map(nth_backward);
            ahead.chain(steady).chain(drain).collect()
        }
        _ => {
            let own = (0..local).map(|turn| turn * devices + device);
            let there = own.clone().flat_map(|stage| (0..microbatches).map(move |m| forward(stage, m)));
            let back = own.rev().flat_map(|stage| (0..microbatches).map(move |m| backward(stage, m)));
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
        Self { stages, microbatches, ends_ms: vec![None; 2 * stages * microbatches] }
    }

    fn place(&self, pass: Pass, stage: usize, microbatch: usize) -> usize {
        let half = if pass == Pass::Forward { 0 } else { self.stages };
        (half + stage) * self.microbatches + microbatch
    }

    fn set(&mut self, entry: Entry, end_ms: f64) {
        let place = self.place(entry.pass, entry.stage, entry.microbatch);
        self.ends_ms[place] = Some(end_ms);
    }

    /// When the input exists and the stage that made it; nothing if it was not made yet.
    fn input(&self, entry: Entry) -> Option<(f64, Option<usize>)> {
        let (pass, stage) = match entry.pass {
            Pass::Forward if entry.stage == 0 => return Some((0.0, None)),
            Pass::Forward => (Pass::Forward, entry.stage - 1),
            _ if entry.stage + 1 == self.stages => (Pass::Forward, entry.stage),
            _ => (Pass::Backward, entry.stage + 1),
        };
        self.ends_ms[self.place(pass, stage, entry.microbatch)].map(|end_ms| (end_ms, Some(stage)))
    }
}

/// The early part and the rest of one task of a bound schedule.
fn bound_slot(pass: Pass, layers: &Range<usize>, costs: &LayerCosts, ahead: Ahead) -> (f64, f64) {
    if pass == Pass::Forward {
        return (0.0, costs.forward_ms(layers.clone()));
    }
    let (recompute_ms, backward_ms) = (costs.recompute_ms(layers.clone()), costs.backward_ms(layers.clone()));
    if ahead == Ahead::Nothing { (0.0, recompute_ms + backward_ms) } else { (recompute_ms, backward_ms) }
}

/// The way of a bound task's input between devices.
fn hop_into(entry: Entry, stages: &[Range<usize>], costs: &LayerCosts) -> f64 {
    let range = &stages[entry.stage];
    let border = if entry.pass == Pass::Forward { range.start } else { range.end };
    // A border at the model's start belongs to an empty first stage, which hands the input on.
    costs.layers[border.saturating_sub(1)].hop_ms
}

/// A share that rounding cannot push below 0, and 0 of nothing.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).max(0.0) } else { 0.0 }
}
