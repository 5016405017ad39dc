//! Looks for a good plan: cuts whose simulated step is shortest.
//!
//! The path of a candidate:
//!
//! 1. For every number of stages, the smallest slowest stage (exact, by dynamic programming).
//! 2. For every stage time so reached, the fewest stages that keep it, and a few stages more or
//!    less; those that the paper's formula `(M·S + N(N-1))·t` likes come first.
//! 3. Replayed by the simulator with cuts as even as can be, within a budget of tasks.
//! 4. The best of these in all orders of short and long stages, then with cuts moved layer by
//!    layer.
//! 5. The shortest step; of equals, the fewest stages.
//!
//! Budgets count tasks, not seconds, so equal inputs give equal plans; 96 layers take a few
//! milliseconds. Small models are searched so widely that the plan is usually the best there is.
//!
//! A stage never exceeds half the memory limit (the other half is the stage being prefetched), nor
//! `upper_threshold` times the slowest single layer: stages of equal length are what keeps a ring
//! busy, and the bound keeps a visit's activations near those of one layer. Where the costs know
//! what a visit works in (`keep_bytes`, `peak_bytes`, `grad_bytes`), backward and fused stages keep
//! a limit on that too.
//!
//! Workers that share one processor have no ring to fill: for them the least work is best, which is
//! the longest fused stage that fits (it recomputes nothing). Where parameters and gradients are
//! copied, more and shorter stages let the first weights arrive and the last gradients leave
//! earlier, and at lag 0 they follow more closely behind the host's update. Stages of equal length
//! are tried, and the shortest step of those with stages joined wherever it stays close to that; the
//! fewest backward stages win, since each saves an input, then the fewest of all. So stages are
//! short only where something waits for them. Otherwise as few stages as fit, and nothing is
//! replayed.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use roundpipe_tensor::Bytes;

use crate::cost::{LayerCost, LayerCosts};
use crate::error::{Error, Result};
use crate::plan::{ExecutePlan, Lag, Pass, PlanKind};
use crate::timeline::{Setting, mean_step_ms, ring, sim_stages};

/// Stage counts that survive the formula.
const KEPT: usize = 48;
/// How many stages more or less are tried around each of them.
const REACH: isize = 6;
/// Tasks that may be replayed to compare them all.
const COMPARE_TASKS: usize = 800_000;
/// Tasks that may be replayed to try the best of them in all orders.
const ORDER_TASKS: usize = 800_000;
/// Tasks that may be replayed to move single cuts of the best of those, at most half of it for one
/// plan.
const POLISH_TASKS: usize = 1_000_000;
/// Making a plan's slots takes as long as replaying so many tasks per layer.
const PREPARE_TASKS: usize = 12;
/// Neighbouring cuts that are moved together at most.
const LONGEST_RUN: usize = 8;
/// Overlapping steps that are averaged to compare shapes.
const QUICK: usize = 2;
/// A step is close to the shortest if it takes at most so much longer: what a stage costs beside its
/// copies (launches, a saved input) is not replayed.
const CLOSE: f64 = 1.005;
/// Sums of the same times in another order are still equal.
const SLACK: f64 = 1.0 + 1e-9;

/// What a search may assume and must respect.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoOptions {
    /// The machine and the batch.
    pub setting: Setting,
    /// Steps overlap at lag 1, which changes what is best.
    pub lag: Lag,
    /// Stages wanted at least, where the layers allow it; the number of devices if not said.
    pub min_stages: Option<usize>,
    /// Whether the workers share one processor, as several workers of one card do. Then stages need
    /// not be equal, `upper_threshold` says nothing, and one stage is enough unless `min_stages`
    /// says otherwise.
    pub shared_compute: bool,
    /// How much longer than the slowest layer a stage may be.
    pub upper_threshold: f64,
    /// Parameter bytes on a device: half for the running stage, half for the next.
    pub model_memory_limit: Option<u64>,
    /// Parameter bytes of a forward stage, where that is less: what it leaves is for activations
    /// that stay until the backward. A layer that has more is a stage of its own.
    pub forward_memory_limit: Option<u64>,
    /// What a backward or fused visit may work in beside parameters, in bytes: tapes, working
    /// memory and gradients of one microbatch.
    pub stage_memory_limit: Option<u64>,
    /// Whether backward stages recompute layer by layer, so that one layer's tape exists at a time.
    /// The fused stage recomputes nothing and keeps the tapes of all its layers.
    pub layer_grain: bool,
}

impl AutoOptions {
    /// The defaults: lag 1, as many stages as devices, 1.1, grain stage, no memory limit.
    pub fn new(devices: usize, microbatches: usize) -> Self {
        Self {
            setting: Setting::new(devices, microbatches),
            lag: Lag::One,
            min_stages: None,
            shared_compute: false,
            upper_threshold: 1.1,
            model_memory_limit: None,
            forward_memory_limit: None,
            stage_memory_limit: None,
            layer_grain: false,
        }
    }

    /// The defaults for devices of which the smallest has so much memory: 60% of it for parameters.
    pub fn for_memory(devices: usize, microbatches: usize, smallest_device_bytes: u64) -> Self {
        let limit = smallest_device_bytes / 5 * 3 + smallest_device_bytes % 5 * 3 / 5;
        Self {
            model_memory_limit: Some(limit),
            ..Self::new(devices, microbatches)
        }
    }

    fn stage_bytes(&self) -> u64 {
        self.model_memory_limit.map_or(u64::MAX, |limit| limit / 2)
    }

    /// Whether a stage keeps the memory limits, whatever its time.
    fn fits(&self, pass: Pass, costs: &LayerCosts, layers: Range<usize>) -> bool {
        let works_in = |limit: u64| match pass {
            Pass::Forward => true,
            Pass::Backward if self.layer_grain => {
                costs.layerwise_visit_bytes(layers.clone()) <= limit
            }
            Pass::Backward | Pass::Fused => costs.visit_bytes(layers.clone()) <= limit,
        };
        let is_forward = pass == Pass::Forward && layers.len() > 1;
        let forward = self.forward_memory_limit.filter(|_| is_forward);
        let most = forward.map_or(self.stage_bytes(), |limit| limit.min(self.stage_bytes()));
        costs.bytes(layers.clone()) <= most && self.stage_memory_limit.is_none_or(works_in)
    }

    fn check(&self) -> Result<()> {
        if !(self.upper_threshold.is_finite() && self.upper_threshold >= 1.0) {
            let what = format!(
                "{} would forbid the slowest layer; at least 1",
                self.upper_threshold
            );
            return Err(Error::config("upper_threshold", what));
        }
        self.setting.check()
    }
}

impl ExecutePlan {
    /// Plans models that run as one call, in this order: one common stage time for all, and the
    /// fused stage, if `kind` has one, for the last. Returns a plan per model; under
    /// [`PlanKind::Fused`] those before the last are plans of kind [`PlanKind::Train`].
    ///
    /// # Errors
    /// [`Error::Config`] for impossible costs or options, and for a layer that alone exceeds a
    /// memory limit.
    pub fn auto(
        kind: PlanKind,
        models: &[&LayerCosts],
        options: &AutoOptions,
    ) -> Result<Vec<ExecutePlan>> {
        options.check()?;
        if models.is_empty() {
            return Err(Error::config("execute_plan", "there is no model to plan"));
        }
        for model in models {
            model.check()?;
            check_memory(kind, model, options)?;
        }
        let mut search = PlanSearch::new(kind, models, options);
        if options.shared_compute {
            return Ok(search.least_work_plans());
        }
        let shapes = search.shapes();
        Ok(search.best(shapes))
    }
}

/// Refuses a layer that no cut can make fit. Alone in its stage, a layer needs the same with either
/// grain.
fn check_memory(kind: PlanKind, model: &LayerCosts, options: &AutoOptions) -> Result<()> {
    let most = options
        .stage_memory_limit
        .filter(|_| kind != PlanKind::Infer);
    for (index, layer) in model.layers.iter().enumerate() {
        let LayerCost {
            name,
            bytes,
            keep_bytes,
            peak_bytes,
            grad_bytes,
            ..
        } = layer;
        if *bytes > options.stage_bytes() {
            let what = format!(
                "layer {index} ({name}) has {} of parameters, a stage may have {} (half the limit)",
                Bytes(*bytes),
                Bytes(options.stage_bytes())
            );
            return Err(Error::config("model_memory_limit", what));
        }
        let need = model.visit_bytes(index..index + 1);
        if let Some(limit) = most.filter(|limit| need > *limit) {
            let what = format!(
                "layer {index} ({name}) needs {} for the backward of a microbatch ({} kept, {} working, {} \
                 gradients), a stage may use {}; use more microbatches",
                Bytes(need),
                Bytes(*keep_bytes),
                Bytes(*peak_bytes),
                Bytes(*grad_bytes),
                Bytes(limit)
            );
            return Err(Error::config("stage_memory_limit", what));
        }
    }
    Ok(())
}

/// How many stages everything has; the cuts follow from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PlanShape {
    /// First layer of the last model's fused stage, or its number of layers.
    fused_at: usize,
    /// Stages per model.
    forward: Vec<usize>,
    /// Stages per model, without the fused stage.
    backward: Vec<usize>,
}

/// In which order even stages of slightly different length stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Order {
    ShortFirst,
    LongFirst,
}

/// Plans for all models and what they take.
struct Candidate {
    step_ms: f64,
    stages: usize,
    plans: Vec<ExecutePlan>,
}

impl Candidate {
    /// Backward stages, each of which keeps its input from the forward on; then all stages.
    fn saved_stages(&self) -> (usize, usize) {
        let backward = self.plans.iter().map(|plan| plan.backward.len()).sum();
        (backward, self.stages)
    }

    /// A shorter step or, if none is shorter, fewer stages.
    fn beats(&self, other: &Self) -> bool {
        let close = self.step_ms <= other.step_ms * SLACK;
        self.step_ms * SLACK < other.step_ms || (close && self.stages < other.stages)
    }
}

/// Neighbouring cuts of one model and direction.
struct StageRun {
    model: usize,
    backward: bool,
    cuts: Range<usize>,
}

struct PlanSearch<'a> {
    kind: PlanKind,
    models: &'a [&'a LayerCosts],
    options: &'a AutoOptions,
    cap_ms: f64,
    forward: Vec<StageCuts>,
    backward: Vec<StageCuts>,
    /// Even cuts by (backward, model, end, stages, order); many candidates share them.
    memo: HashMap<(bool, usize, usize, usize, Order), Vec<usize>>,
}

impl<'a> PlanSearch<'a> {
    fn new(kind: PlanKind, models: &'a [&'a LayerCosts], options: &'a AutoOptions) -> Self {
        let cap_ms = if options.shared_compute {
            f64::INFINITY
        } else {
            slowest_ms(kind, models) * options.upper_threshold * SLACK
        };
        let cuts = |pass: Pass, stage: fn(&LayerCost) -> f64| {
            let one = |model: &&LayerCosts| {
                let times: Vec<f64> = model.layers.iter().map(stage).collect();
                StageCuts::new(&times, cap_ms, |layers| options.fits(pass, model, layers))
            };
            models.iter().map(one).collect::<Vec<_>>()
        };
        Self {
            kind,
            models,
            options,
            cap_ms,
            forward: cuts(Pass::Forward, |layer| layer.forward_ms),
            backward: cuts(Pass::Backward, |layer| {
                layer.recompute_ms + layer.backward_ms
            }),
            memo: HashMap::new(),
        }
    }

    /// Stage counts worth replaying.
    fn shapes(&self) -> Vec<PlanShape> {
        let mut scored = Vec::new();
        for fused_at in self.fused_starts() {
            for stage_ms in self.stage_times(fused_at) {
                scored.extend(
                    self.shape(fused_at, stage_ms)
                        .map(|shape| (self.score(&shape, stage_ms), shape)),
                );
            }
        }
        let most = scored
            .iter()
            .map(|(_, shape)| self.stages(shape))
            .max()
            .unwrap_or(0);
        scored.retain(|(_, shape)| self.stages(shape) >= self.wanted().min(most));
        scored.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut seen = HashSet::new();
        scored.retain(|(_, shape)| seen.insert(shape.clone()));
        scored.truncate(KEPT);
        let kept: Vec<PlanShape> = scored.into_iter().map(|(_, shape)| shape).collect();
        let mut all = kept.clone();
        for distance in 1..=REACH {
            for shape in &kept {
                all.extend(
                    self.around(shape, distance)
                        .into_iter()
                        .filter(|near| seen.insert(near.clone())),
                );
            }
        }
        all
    }

    /// First layers that a fused stage may have; the end of the model if there is none.
    fn fused_starts(&self) -> Vec<usize> {
        let last = self.models[self.models.len() - 1];
        if self.kind != PlanKind::Fused {
            return vec![last.len()];
        }
        let fits = |start: &usize| {
            fused_ms(last, *start) <= self.cap_ms
                && self.options.fits(Pass::Fused, last, *start..last.len())
        };
        (0..last.len()).rev().take_while(fits).collect()
    }

    /// Every stage time that some number of stages reaches exactly.
    fn stage_times(&self, fused_at: usize) -> Vec<f64> {
        let last = self.models.len() - 1;
        let mut times = Vec::new();
        for (model, costs) in self.models.iter().enumerate() {
            let end = if model == last { fused_at } else { costs.len() };
            times.extend(self.forward[model].slowest(end));
            if self.kind != PlanKind::Infer {
                times.extend(self.backward[model].slowest(end));
            }
        }
        if self.kind == PlanKind::Fused {
            times.push(fused_ms(self.models[last], fused_at));
        }
        times.retain(|time| *time <= self.cap_ms);
        times.sort_by(f64::total_cmp);
        times.dedup();
        times
    }

    /// The fewest stages that all keep `stage_ms`.
    fn shape(&self, fused_at: usize, stage_ms: f64) -> Option<PlanShape> {
        let last = self.models.len() - 1;
        let counts = |cuts: &[StageCuts]| {
            let count = |(model, cuts): (usize, &StageCuts)| {
                cuts.fewest(
                    if model == last {
                        fused_at
                    } else {
                        self.models[model].len()
                    },
                    stage_ms,
                )
            };
            cuts.iter()
                .enumerate()
                .map(count)
                .collect::<Option<Vec<_>>>()
        };
        let backward = match self.kind {
            PlanKind::Infer => vec![0; self.models.len()],
            _ => counts(&self.backward)?,
        };
        Some(PlanShape {
            fused_at,
            forward: counts(&self.forward)?,
            backward,
        })
    }

    fn stages(&self, shape: &PlanShape) -> usize {
        let fused = usize::from(self.kind == PlanKind::Fused);
        shape.forward.iter().sum::<usize>() + shape.backward.iter().sum::<usize>() + fused
    }

    /// The paper's estimate of a step, with the fused stage's own time: it may be far longer than
    /// the others. Overlapping steps have no fill and drain.
    fn score(&self, shape: &PlanShape, stage_ms: f64) -> f64 {
        let Setting {
            devices,
            microbatches,
            ..
        } = &self.options.setting;
        let (devices, microbatches) = (*devices, *microbatches);
        let fill = if self.options.lag == Lag::One {
            0
        } else {
            devices * (devices - 1)
        };
        let (mut cut, mut fused) = (self.stages(shape), 0.0);
        if self.kind == PlanKind::Fused {
            cut -= 1;
            fused = fused_ms(self.models[self.models.len() - 1], shape.fused_at);
        }
        microbatches as f64 * (cut as f64 * stage_ms + fused) + fill as f64 * stage_ms.max(fused)
    }

    /// The same with `distance` stages of the last model more or less, in any mix of forward and
    /// backward: one common stage time is a rule of thumb, and shorter stages can fit the ring
    /// better.
    fn around(&self, shape: &PlanShape, distance: isize) -> Vec<PlanShape> {
        let last = self.models.len() - 1;
        let counts = |cuts: &[StageCuts], count: usize, by: isize| {
            let count = count.checked_add_signed(by)?;
            let row = cuts[last]
                .slowest_ms
                .get(count)
                .filter(|_| count <= shape.fused_at)?;
            row[shape.fused_at].is_finite().then_some(count)
        };
        let mut shapes = Vec::new();
        for forward_by in -distance..=distance {
            for backward_by in [distance - forward_by.abs(), forward_by.abs() - distance] {
                if self.kind == PlanKind::Infer && backward_by != 0 {
                    continue;
                }
                let forward = counts(&self.forward, shape.forward[last], forward_by);
                let backward = match self.kind {
                    PlanKind::Infer => Some(0),
                    _ => counts(&self.backward, shape.backward[last], backward_by),
                };
                if let (Some(forward), Some(backward)) = (forward, backward) {
                    let mut near = shape.clone();
                    (near.forward[last], near.backward[last]) = (forward, backward);
                    shapes.push(near);
                }
            }
        }
        shapes.retain(|near| self.stages(near) >= self.wanted().min(self.stages(shape)));
        shapes
    }

    /// Stages that a plan should have at least.
    fn wanted(&self) -> usize {
        let enough = if self.options.shared_compute {
            1
        } else {
            self.options.setting.devices
        };
        self.options.min_stages.unwrap_or(enough)
    }

    /// Plans for workers that share one processor; see the module header.
    fn least_work_plans(&mut self) -> Vec<ExecutePlan> {
        let fewest = self.wanted();
        let shape = self.least_work(fewest);
        let plans = self.plans(&shape, Order::ShortFirst, Order::ShortFirst);
        if !self.options.setting.copies_parameters() {
            return plans;
        }
        let mut candidates = vec![self.alone(&shape, plans)];
        let mut budget = COMPARE_TASKS;
        loop {
            let known = candidates.last().map_or(fewest, |last| last.stages);
            let shape = self.least_work(known + 1);
            let stages = self.stages(&shape);
            budget = budget.saturating_sub(self.tasks(stages, QUICK));
            // One layer per stage is the end.
            if stages <= known || budget == 0 {
                break;
            }
            let plans = self.plans(&shape, Order::ShortFirst, Order::ShortFirst);
            candidates.push(self.alone(&shape, plans));
        }
        let steps = candidates.iter().map(|candidate| candidate.step_ms);
        let shortest = steps.fold(f64::INFINITY, f64::min);
        let finest = candidates
            .iter()
            .find(|candidate| candidate.step_ms <= shortest * SLACK)
            .map(|candidate| self.joined(candidate, shortest * CLOSE));
        let close = |candidate: &Candidate| candidate.step_ms <= shortest * CLOSE;
        let best = candidates.into_iter().find(close);
        let best = best.expect("the shortest is close to itself");
        let saving = |finest: &Candidate| finest.saved_stages() < best.saved_stages();
        match finest.filter(saving) {
            Some(finest) => finest.plans,
            None => best.plans,
        }
    }

    /// The candidate with neighbouring stages made one: backward stages, each of which saves inputs,
    /// as long as the step keeps `most_ms`, and forward stages where that costs nothing.
    fn joined(&self, candidate: &Candidate, most_ms: f64) -> Candidate {
        let mut best = Candidate {
            plans: candidate.plans.clone(),
            ..*candidate
        };
        let mut budget = POLISH_TASKS;
        for backward in [true, false] {
            let most_ms = if backward {
                most_ms
            } else {
                best.step_ms * SLACK
            };
            for model in (0..best.plans.len()).rev() {
                let fused = self.kind == PlanKind::Fused && model + 1 == best.plans.len();
                let kept = usize::from(fused && backward);
                // A stage that has been joined is tried with the next one, too.
                let mut stage = kept + 1;
                while stage < stages_of(&best.plans[model], backward).len()
                    && best.stages > self.wanted()
                {
                    let tasks = self.tasks(best.stages, QUICK);
                    if budget < tasks {
                        return best;
                    }
                    budget -= tasks;
                    match self.joined_at(&best, model, backward, stage) {
                        Some(joined) if joined.step_ms <= most_ms => best = joined,
                        _ => stage += 1,
                    }
                }
            }
        }
        best
    }

    /// The candidate with a stage made one with the stage that runs before it, if that fits.
    fn joined_at(
        &self,
        candidate: &Candidate,
        model: usize,
        backward: bool,
        stage: usize,
    ) -> Option<Candidate> {
        let mut plans = candidate.plans.clone();
        let (stages, cuts) = if backward {
            (&mut plans[model].backward, &self.backward[model])
        } else {
            (&mut plans[model].forward, &self.forward[model])
        };
        let after = stages.remove(stage);
        let before = &mut stages[stage - 1];
        *before = before.start.min(after.start)..before.end.max(after.end);
        (before.start >= cuts.first[before.end]).then(|| Candidate {
            step_ms: self.alone_ms(&plans),
            stages: candidate.stages - 1,
            plans,
        })
    }

    /// Plans and what they take on a processor of their own.
    fn alone(&self, shape: &PlanShape, plans: Vec<ExecutePlan>) -> Candidate {
        Candidate {
            step_ms: self.alone_ms(&plans),
            stages: self.stages(shape),
            plans,
        }
    }

    fn alone_ms(&self, plans: &[ExecutePlan]) -> f64 {
        let setting = Setting {
            devices: 1,
            speeds: Vec::new(),
            ..self.options.setting.clone()
        };
        self.step_ms(plans, &setting, QUICK)
    }

    /// The shape that computes least, then with the fewest stages: the longest fused stage with
    /// which `wanted` stages can be reached, and what fits for the rest.
    fn least_work(&self, wanted: usize) -> PlanShape {
        let mut starts = self.fused_starts();
        starts.sort_unstable();
        let shape = |fused_at: &usize| self.shape(*fused_at, f64::INFINITY);
        let mut shapes = starts
            .iter()
            .filter_map(shape)
            .map(|shape| self.widened(shape, wanted));
        let first = shapes
            .next()
            .expect("a fused stage of one layer always fits");
        let enough = |shape: &PlanShape| self.stages(shape) >= wanted;
        if enough(&first) {
            return first;
        }
        let more = |best: PlanShape, next: PlanShape| {
            if enough(&best) || self.stages(&next) <= self.stages(&best) {
                best
            } else {
                next
            }
        };
        shapes.fold(first, more)
    }

    /// More stages where they have the most layers, until there are as many as wanted or one per
    /// layer.
    fn widened(&self, mut shape: PlanShape, wanted: usize) -> PlanShape {
        while self.stages(&shape) < wanted {
            let last = self.models.len() - 1;
            let layers = |model: usize| {
                if model == last {
                    shape.fused_at
                } else {
                    self.models[model].len()
                }
            };
            let counts = |counts: &[usize], backward: bool| {
                let density = |(model, &count): (usize, &usize)| {
                    let room = count > 0 && count < layers(model);
                    room.then(|| (layers(model) as f64 / count as f64, backward, model))
                };
                counts
                    .iter()
                    .enumerate()
                    .filter_map(density)
                    .collect::<Vec<_>>()
            };
            let mut places = counts(&shape.forward, false);
            places.extend(counts(&shape.backward, true));
            let Some((_, backward, model)) = places.into_iter().max_by(|a, b| a.0.total_cmp(&b.0))
            else {
                break;
            };
            let counts = if backward {
                &mut shape.backward
            } else {
                &mut shape.forward
            };
            counts[model] += 1;
        }
        shape
    }

    /// The plans whose replayed step is shortest.
    fn best(&mut self, shapes: Vec<PlanShape>) -> Vec<ExecutePlan> {
        let shapes = self.compared(shapes);
        let mut budget = POLISH_TASKS;
        let mut best: Option<Candidate> = None;
        for candidate in self.ordered(shapes) {
            let polished = self.polish(candidate, &mut budget);
            if best.as_ref().is_none_or(|best| polished.beats(best)) {
                best = Some(polished);
            }
        }
        // One layer per stage keeps every bound, so some shape was tried.
        best.map(|best| best.plans)
            .expect("a plan of single layers always fits")
    }

    /// Shapes by their replayed step, shortest first.
    fn compared(&mut self, shapes: Vec<PlanShape>) -> Vec<PlanShape> {
        let mut budget = COMPARE_TASKS;
        let mut compared: Vec<(f64, usize, PlanShape)> = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let stages = self.stages(&shape);
            let plans = self.plans(&shape, Order::ShortFirst, Order::ShortFirst);
            compared.push((
                self.step_ms(&plans, &self.options.setting, QUICK),
                stages,
                shape,
            ));
            budget = budget.saturating_sub(self.tasks(stages, QUICK));
            if budget == 0 {
                break;
            }
        }
        compared.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        compared.into_iter().map(|(_, _, shape)| shape).collect()
    }

    /// The first shapes in all orders of short and long stages, the shortest step first.
    fn ordered(&mut self, shapes: Vec<PlanShape>) -> Vec<Candidate> {
        let steady = self.steady();
        let orders = [Order::ShortFirst, Order::LongFirst];
        let mut budget = ORDER_TASKS;
        let mut ordered: Vec<Candidate> = Vec::new();
        for shape in shapes {
            let stages = self.stages(&shape);
            for (forward, backward) in orders
                .iter()
                .flat_map(|f| orders.iter().map(move |b| (*f, *b)))
            {
                let plans = self.plans(&shape, forward, backward);
                ordered.push(Candidate {
                    step_ms: self.step_ms(&plans, &self.options.setting, steady),
                    stages,
                    plans,
                });
                budget = budget.saturating_sub(self.tasks(stages, steady));
            }
            if budget == 0 {
                break;
            }
        }
        ordered.sort_by(|a, b| {
            a.step_ms
                .total_cmp(&b.step_ms)
                .then(a.stages.cmp(&b.stages))
        });
        ordered.dedup_by(|a, b| a.plans == b.plans);
        ordered
    }

    /// Moves cuts by a layer as long as that shortens the step and the budget lasts.
    fn polish(&self, mut best: Candidate, budget: &mut usize) -> Candidate {
        let steady = self.steady();
        let tasks = self.tasks(best.stages, steady);
        let mut own_budget = (POLISH_TASKS / 2).min(*budget);
        loop {
            let mut improved = false;
            for run in self.movable(&best.plans) {
                for up in [false, true] {
                    if own_budget < tasks {
                        return best;
                    }
                    let Some(plans) = self.moved(&best.plans, &run, up) else {
                        continue;
                    };
                    own_budget -= tasks;
                    *budget -= tasks;
                    let moved = Candidate {
                        step_ms: self.step_ms(&plans, &self.options.setting, steady),
                        plans,
                        ..best
                    };
                    if moved.beats(&best) {
                        (best, improved) = (moved, true);
                    }
                }
            }
            if !improved {
                return best;
            }
        }
    }

    /// Overlapping steps that are averaged where it counts: every device sees every first slot.
    fn steady(&self) -> usize {
        2 * self.options.setting.devices
    }

    /// Runs of neighbouring cuts that polishing may move together, short runs first. Cut `i` lies
    /// between the stages `i` and `i + 1` in layer order; the fused stage stays as it is.
    fn movable(&self, plans: &[ExecutePlan]) -> Vec<StageRun> {
        let mut runs = Vec::new();
        for (model, plan) in plans.iter().enumerate() {
            let fused = usize::from(self.kind == PlanKind::Fused && model + 1 == plans.len());
            for (backward, stages) in [
                (false, plan.forward.len()),
                (true, plan.backward.len().saturating_sub(fused)),
            ] {
                for first in 1..stages {
                    let ends = first..stages.min(first + LONGEST_RUN);
                    runs.extend(ends.map(|last| StageRun {
                        model,
                        backward,
                        cuts: first - 1..last,
                    }));
                }
            }
        }
        runs.sort_by_key(|run| run.cuts.len());
        runs
    }

    /// The plans with a run of cuts one layer up or down, if all stages still keep their bounds.
    fn moved(&self, plans: &[ExecutePlan], run: &StageRun, up: bool) -> Option<Vec<ExecutePlan>> {
        let mut moved = plans.to_vec();
        let plan = &mut moved[run.model];
        let (stages, cuts) = if run.backward {
            (&mut plan.backward, &self.backward[run.model])
        } else {
            (&mut plan.forward, &self.forward[run.model])
        };
        // Backward stages run from the last layer down.
        let count = stages.len();
        let place = |stage: usize| {
            if run.backward {
                count - 1 - stage
            } else {
                stage
            }
        };
        for cut in run.cuts.clone() {
            let end = stages[place(cut)].end;
            let end = if up { end + 1 } else { end - 1 };
            stages[place(cut)].end = end;
            stages[place(cut + 1)].start = end;
        }
        let touched = run.cuts.start..=run.cuts.end;
        let fits = |stage: usize| {
            let range = &stages[place(stage)];
            !range.is_empty() && range.start >= cuts.first[range.end]
        };
        touched.into_iter().all(fits).then_some(moved)
    }

    /// A step's time: the mean of `steady` steps after as many to get going, or of one that never
    /// overlaps.
    fn step_ms(&self, plans: &[ExecutePlan], setting: &Setting, steady: usize) -> f64 {
        let pairs: Vec<_> = plans.iter().zip(self.models.iter().copied()).collect();
        let slots = sim_stages(self.kind, &pairs, setting);
        let (warm_up, measured) = setting.sample(self.lag(), steady);
        mean_step_ms(
            &ring(&slots, setting, self.lag(), warm_up + measured, |_| {}),
            warm_up,
        )
    }

    fn lag(&self) -> usize {
        match self.options.lag {
            Lag::Zero => 0,
            Lag::One => 1,
        }
    }

    /// What [`PlanSearch::step_ms`] replays, and what it takes to prepare that, in tasks.
    fn tasks(&self, stages: usize, steady: usize) -> usize {
        let (warm_up, measured) = self.options.setting.sample(self.lag(), steady);
        let steps = warm_up + measured;
        let layers: usize = self.models.iter().map(|model| model.len()).sum();
        stages * self.options.setting.microbatches * steps + PREPARE_TASKS * layers
    }

    /// Even cuts for a shape. Backward runs from the last layer, so its order is that of the layers
    /// reversed.
    fn plans(&mut self, shape: &PlanShape, forward: Order, backward: Order) -> Vec<ExecutePlan> {
        let last = self.models.len() - 1;
        let mut plans = Vec::with_capacity(self.models.len());
        for model in 0..=last {
            let layers = self.models[model].len();
            let end = if model == last {
                shape.fused_at
            } else {
                layers
            };
            let forward = self.even(false, model, end, shape.forward[model], forward);
            let mut plan = ExecutePlan {
                forward,
                backward: Vec::new(),
            };
            if self.kind != PlanKind::Infer {
                plan.backward = self.even(true, model, end, shape.backward[model], backward);
                plan.backward.reverse();
            }
            if self.kind == PlanKind::Fused && model == last {
                plan.backward.insert(0, end..layers);
            }
            plans.push(plan);
        }
        plans
    }

    fn even(
        &mut self,
        backward: bool,
        model: usize,
        end: usize,
        count: usize,
        order: Order,
    ) -> Vec<Range<usize>> {
        let cuts = if backward {
            &self.backward[model]
        } else {
            &self.forward[model]
        };
        let ends = self
            .memo
            .entry((backward, model, end, count, order))
            .or_insert_with(|| cuts.even(end, count, order));
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts
            .zip(ends.iter().copied())
            .map(|(start, end)| start..end)
            .collect()
    }
}

fn stages_of(plan: &ExecutePlan, backward: bool) -> &[Range<usize>] {
    if backward {
        &plan.backward
    } else {
        &plan.forward
    }
}

/// The longest stage of a single layer: no plan can have a shorter slowest stage.
fn slowest_ms(kind: PlanKind, models: &[&LayerCosts]) -> f64 {
    let mut slowest: f64 = 0.0;
    for (model, costs) in models.iter().enumerate() {
        for (index, layer) in costs.layers.iter().enumerate() {
            let fused =
                kind == PlanKind::Fused && model + 1 == models.len() && index + 1 == costs.len();
            let layer_ms = match kind {
                PlanKind::Infer => layer.forward_ms,
                _ if fused => layer.forward_ms + layer.backward_ms,
                _ => layer.forward_ms.max(layer.recompute_ms + layer.backward_ms),
            };
            slowest = slowest.max(layer_ms);
        }
    }
    slowest
}

fn fused_ms(costs: &LayerCosts, start: usize) -> f64 {
    costs.forward_ms(start..costs.len()) + costs.backward_ms(start..costs.len())
}

/// All ways to cut the first layers of a model, for one direction.
struct StageCuts {
    /// Time of the layers before each layer.
    until_ms: Vec<f64>,
    /// First layer that a stage ending at a layer may have.
    first: Vec<usize>,
    /// `slowest_ms[c][end]`: the smallest slowest stage of `c` stages over layers `0..end`;
    /// infinite if none.
    slowest_ms: Vec<Vec<f64>>,
}

impl StageCuts {
    /// `fits` must hold for every part of a range that it holds for. A single layer is always
    /// allowed: the caller has refused one that is too large.
    fn new(times: &[f64], cap_ms: f64, fits: impl Fn(Range<usize>) -> bool) -> Self {
        let mut until_ms = vec![0.0];
        for time in times {
            until_ms.push(until_ms[until_ms.len() - 1] + time);
        }
        let mut first = vec![0; times.len() + 1];
        let mut start = 0;
        for end in 1..=times.len() {
            while start + 1 < end && (until_ms[end] - until_ms[start] > cap_ms || !fits(start..end))
            {
                start += 1;
            }
            first[end] = start;
        }
        let mut cuts = Self {
            until_ms,
            first,
            slowest_ms: Vec::new(),
        };
        cuts.fill();
        cuts
    }

    fn stage_ms(&self, start: usize, end: usize) -> f64 {
        self.until_ms[end] - self.until_ms[start]
    }

    /// The table, row by row.
    fn fill(&mut self) {
        let layers = self.first.len() - 1;
        let mut row = vec![f64::INFINITY; layers + 1];
        row[0] = 0.0;
        self.slowest_ms.push(row);
        for count in 1..=layers {
            let before = &self.slowest_ms[count - 1];
            let slowest = |end| {
                if end < count {
                    f64::INFINITY
                } else {
                    self.slowest_of(before, count, end)
                }
            };
            let row = (0..=layers).map(slowest).collect();
            self.slowest_ms.push(row);
        }
    }

    /// One entry, from the row of one stage less. Of the last stage's possible starts, the slowest
    /// stage before it grows and the last stage shrinks, so the best start is where the two cross.
    fn slowest_of(&self, before: &[f64], count: usize, end: usize) -> f64 {
        let least = self.first[end].max(count - 1);
        let (mut low, mut high) = (least, end - 1);
        while low < high {
            let middle = usize::midpoint(low, high);
            if before[middle] >= self.stage_ms(middle, end) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let at = |start: usize| before[start].max(self.stage_ms(start, end));
        if low > least {
            at(low).min(at(low - 1))
        } else {
            at(low)
        }
    }

    /// The slowest stage for each possible number of stages.
    fn slowest(&self, end: usize) -> impl Iterator<Item = f64> {
        self.slowest_ms[..=end]
            .iter()
            .map(move |row| row[end])
            .filter(|ms| ms.is_finite())
    }

    /// The fewest stages over `0..end` of which none is slower than `stage_ms`.
    fn fewest(&self, end: usize, stage_ms: f64) -> Option<usize> {
        let keeps = |slowest_ms: f64| slowest_ms.is_finite() && slowest_ms <= stage_ms * SLACK;
        (0..=end).find(|&count| keeps(self.slowest_ms[count][end]))
    }

    /// Ends of `count` stages: none slower than needed, and then as even as can be (least squares).
    fn even(&self, end: usize, count: usize, order: Order) -> Vec<usize> {
        let cap_ms = self.slowest_ms[count][end] * SLACK;
        let width = end + 1;
        let mut squares = vec![f64::INFINITY; (count + 1) * width];
        let mut start_of = vec![0; (count + 1) * width];
        squares[0] = 0.0;
        for stage in 1..=count {
            for to in stage..=end - (count - stage) {
                for from in (self.first[to].max(stage - 1)..to).rev() {
                    let stage_ms = self.stage_ms(from, to);
                    if stage_ms > cap_ms {
                        break;
                    }
                    let sum = squares[(stage - 1) * width + from] + stage_ms * stage_ms;
                    let (held, place) = (squares[stage * width + to], stage * width + to);
                    // Candidates come with a growing last stage; ties decide what stands first.
                    let wins = match order {
                        Order::ShortFirst => sum <= held * SLACK,
                        Order::LongFirst => sum * SLACK < held,
                    };
                    if wins && sum.is_finite() {
                        squares[place] = sum;
                        start_of[place] = from;
                    }
                }
            }
        }
        let mut ends = Vec::with_capacity(count);
        let mut to = end;
        for stage in (1..=count).rev() {
            ends.push(to);
            to = start_of[stage * width + to];
        }
        ends.reverse();
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table holds the true smallest slowest stage, compared with every way to cut.
    #[test]
    fn slowest_stages_are_the_smallest_possible() {
        for seed in 0..200_usize {
            let times: Vec<f64> = (0..7)
                .map(|layer| ((layer * 31 + seed * 13) % 17) as f64)
                .collect();
            let bytes: Vec<u64> = (0..7)
                .map(|layer| ((layer * 7 + seed * 5) % 11) as u64)
                .collect();
            let (cap_ms, cap_bytes) = (16.0 + (seed % 20) as f64, 10 + (seed % 15) as u64);
            let cuts = StageCuts::new(&times, cap_ms, |layers| {
                bytes[layers].iter().sum::<u64>() <= cap_bytes
            });
            let mut best = [f64::INFINITY; 8];
            for mask in 0..1 << 6 {
                let ends: Vec<usize> = (1..=7)
                    .filter(|end| *end == 7 || mask >> (end - 1) & 1 == 1)
                    .collect();
                let starts = std::iter::once(0).chain(ends.iter().copied());
                let stages: Vec<_> = starts
                    .zip(ends.iter().copied())
                    .map(|(from, to)| from..to)
                    .collect();
                let sums = stages
                    .iter()
                    .map(|stage| times[stage.clone()].iter().sum::<f64>());
                let slowest = sums.fold(0.0, f64::max);
                let held = stages
                    .iter()
                    .map(|stage| bytes[stage.clone()].iter().sum::<u64>())
                    .max();
                if slowest <= cap_ms && held <= Some(cap_bytes) {
                    best[ends.len()] = best[ends.len()].min(slowest);
                }
            }
            for (count, slowest) in best.iter().enumerate() {
                assert_eq!(
                    cuts.slowest_ms[count][7], *slowest,
                    "{count} stages, seed {seed}"
                );
            }
        }
    }
}
