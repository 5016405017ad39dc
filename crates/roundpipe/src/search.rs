//! Looks for a good plan: cuts whose simulated step is shortest.
//!
//! The path: for every number of stages, the smallest slowest stage (exact, by dynamic programming) -> for
//! every common stage time, the fewest stages that keep it -> the most promising by the paper's formula
//! `(M·S + N(N-1))·t`, with a few more stages tried around each -> those replayed by the simulator, then
//! the best of them in all orders of big and small stages -> the shortest step; of equals, the fewest stages.
//!
//! A stage never exceeds half the memory limit (the other half is the stage being prefetched), nor
//! `upper_threshold` times the slowest single layer: stages of equal length are what keeps a ring busy, and
//! the bound keeps a visit's activations near those of one layer.
//!
//! Nothing here measures or reads a clock: equal inputs give equal plans.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::costs::LayerCosts;
use crate::error::{Error, Result};
use crate::plan::{ExecutePlan, PlanKind};
use crate::simulate::{Setting, ring, slots};

/// Base candidates that survive the formula.
const KEPT: usize = 24;
/// More stages per direction than needed that are tried around each of them.
const EXTRA: usize = 3;
/// Candidates that are tried in all orders.
const FINALISTS: usize = 4;
/// Sums of the same times in another order are still equal.
const SLACK: f64 = 1.0 + 1e-9;

/// What a search may assume and must respect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AutoOptions {
    /// The machine and the batch.
    pub setting: Setting,
    /// Whether steps overlap (optimizer lag 1), which changes what is best.
    pub asynchronous: bool,
    /// Stages wanted at least, where the layers allow it; the number of devices if not said.
    pub min_stages: Option<usize>,
    /// How much longer than the slowest layer a stage may be.
    pub upper_threshold: f64,
    /// Parameter bytes on a device: half for the running stage, half for the next.
    pub model_memory_limit: Option<u64>,
}

impl AutoOptions {
    /// The defaults: asynchronous, as many stages as devices, 1.1, no memory limit.
    pub fn new(devices: usize, microbatches: usize) -> Self {
        Self {
            setting: Setting::new(devices, microbatches),
            asynchronous: true,
            min_stages: None,
            upper_threshold: 1.1,
            model_memory_limit: None,
        }
    }

    fn stage_bytes(&self) -> u64 {
        self.model_memory_limit.map_or(u64::MAX, |limit| limit / 2)
    }

    fn check(&self) -> Result<()> {
        if !(self.upper_threshold.is_finite() && self.upper_threshold >= 1.0) {
            let what = format!("{} would forbid the slowest layer; at least 1", self.upper_threshold);
            return Err(Error::config("upper_threshold", what));
        }
        self.setting.check()
    }
}

impl ExecutePlan {
    /// Plans models that run as one call, in this order: one common stage time for all, and the fused stage,
    /// if `kind` has one, for the last. Returns a plan per model; under [`PlanKind::Fused`] those before the
    /// last are plans of kind [`PlanKind::Train`].
    ///
    /// # Errors
    /// [`Error::Config`] for impossible costs or options, and for a layer larger than half the memory limit.
    pub fn auto(kind: PlanKind, models: &[&LayerCosts], options: &AutoOptions) -> Result<Vec<ExecutePlan>> {
        options.check()?;
        if models.is_empty() {
            return Err(Error::config("execute_plan", "there is no model to plan"));
        }
        for model in models {
            model.check()?;
            check_memory(model, options)?;
        }
        let mut search = Search::new(kind, models, options);
        let shapes = search.shapes();
        Ok(search.best(shapes))
    }
}

fn check_memory(model: &LayerCosts, options: &AutoOptions) -> Result<()> {
    let Some((index, layer)) =
        model.layers.iter().enumerate().find(|(_, layer)| layer.bytes > options.stage_bytes())
    else {
        return Ok(());
    };
    let what = format!(
        "layer {index} ({}) has {} bytes of parameters, a stage may have {} (half the limit)",
        layer.name,
        layer.bytes,
        options.stage_bytes()
    );
    Err(Error::config("model_memory_limit", what))
}

/// How many stages everything has; the cuts follow from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Shape {
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

struct Search<'a> {
    kind: PlanKind,
    models: &'a [&'a LayerCosts],
    options: &'a AutoOptions,
    cap_ms: f64,
    forward: Vec<Cuts>,
    backward: Vec<Cuts>,
    /// Even cuts by (backward, model, end, stages, order); many candidates share them.
    memo: HashMap<(bool, usize, usize, usize, Order), Vec<usize>>,
}

impl<'a> Search<'a> {
    fn new(kind: PlanKind, models: &'a [&'a LayerCosts], options: &'a AutoOptions) -> Self {
        let cap_ms = slowest_ms(kind, models) * options.upper_threshold * SLACK;
        let cuts = |stage: fn(&crate::costs::LayerCost) -> f64| {
            let one = |model: &&LayerCosts| {
                let times: Vec<f64> = model.layers.iter().map(stage).collect();
                let bytes: Vec<u64> = model.layers.iter().map(|layer| layer.bytes).collect();
                Cuts::new(&times, &bytes, cap_ms, options.stage_bytes())
            };
            models.iter().map(one).collect::<Vec<_>>()
        };
        Self {
            kind,
            models,
            options,
            cap_ms,
            forward: cuts(|layer| layer.forward_ms),
            backward: cuts(|layer| layer.recompute_ms + layer.backward_ms),
            memo: HashMap::new(),
        }
    }

    /// Stage counts worth replaying.
    fn shapes(&self) -> Vec<Shape> {
        let mut scored = Vec::new();
        for fused_at in self.fused_starts() {
            for stage_ms in self.stage_times(fused_at) {
                scored.extend(
                    self.shape(fused_at, stage_ms).map(|shape| (self.score(&shape, stage_ms), shape)),
                );
            }
        }
        let wanted = self.options.min_stages.unwrap_or(self.options.setting.devices);
        let most = scored.iter().map(|(_, shape)| self.stages(shape)).max().unwrap_or(0);
        scored.retain(|(_, shape)| self.stages(shape) >= wanted.min(most));
        scored.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut seen = HashSet::new();
        scored.retain(|(_, shape)| seen.insert(shape.clone()));
        scored.truncate(KEPT);
        let kept: Vec<Shape> = scored.into_iter().map(|(_, shape)| shape).collect();
        let mut all = kept.clone();
        for shape in &kept {
            all.extend(self.around(shape).into_iter().filter(|shape| seen.insert(shape.clone())));
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
                && last.bytes(*start..last.len()) <= self.options.stage_bytes()
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
    fn shape(&self, fused_at: usize, stage_ms: f64) -> Option<Shape> {
        let last = self.models.len() - 1;
        let counts = |cuts: &[Cuts]| {
            let count = |(model, cuts): (usize, &Cuts)| {
                cuts.fewest(if model == last { fused_at } else { self.models[model].len() }, stage_ms)
            };
            cuts.iter().enumerate().map(count).collect::<Option<Vec<_>>>()
        };
        let backward = match self.kind {
            PlanKind::Infer => vec![0; self.models.len()],
            _ => counts(&self.backward)?,
        };
        Some(Shape { fused_at, forward: counts(&self.forward)?, backward })
    }

    fn stages(&self, shape: &Shape) -> usize {
        let fused = usize::from(self.kind == PlanKind::Fused);
        shape.forward.iter().sum::<usize>() + shape.backward.iter().sum::<usize>() + fused
    }

    /// The paper's estimate of a step, with the fused stage's own time: it may be far longer than the others.
    /// Overlapping steps have no fill and drain.
    fn score(&self, shape: &Shape, stage_ms: f64) -> f64 {
        let Setting { devices, microbatches, .. } = self.options.setting;
        let fill = if self.options.asynchronous { 0 } else { devices * (devices - 1) };
        let (mut cut, mut fused) = (self.stages(shape), 0.0);
        if self.kind == PlanKind::Fused {
            cut -= 1;
            fused = fused_ms(self.models[self.models.len() - 1], shape.fused_at);
        }
        microbatches as f64 * (cut as f64 * stage_ms + fused) + fill as f64 * stage_ms.max(fused)
    }

    /// The same with a few more stages of the last model: shorter ones can fit the ring better.
    fn around(&self, shape: &Shape) -> Vec<Shape> {
        let last = self.models.len() - 1;
        let mut shapes = Vec::new();
        for more_forward in 0..EXTRA {
            for more_backward in 0..EXTRA {
                let mut more = shape.clone();
                more.forward[last] += more_forward;
                more.backward[last] += more_backward;
                let backward_fits = more.backward[last] <= shape.fused_at || more_backward == 0;
                if more.forward[last] <= shape.fused_at && backward_fits {
                    shapes.push(more);
                }
            }
        }
        if self.kind == PlanKind::Infer {
            shapes.retain(|more| more.backward == shape.backward);
        }
        shapes
    }

    /// The plans of the shape whose replayed step is shortest.
    fn best(&mut self, shapes: Vec<Shape>) -> Vec<ExecutePlan> {
        let mut tried: Vec<(f64, usize, Shape)> = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let plans = self.plans(&shape, Order::ShortFirst, Order::ShortFirst);
            tried.push((self.step_ms(&plans, 2), self.stages(&shape), shape));
        }
        tried.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        tried.truncate(FINALISTS);
        let orders = [Order::ShortFirst, Order::LongFirst];
        let mut best: Option<(f64, usize, Vec<ExecutePlan>)> = None;
        for (_, stages, shape) in tried {
            for (forward, backward) in orders.iter().flat_map(|f| orders.iter().map(move |b| (*f, *b))) {
                let plans = self.plans(&shape, forward, backward);
                let step_ms = self.step_ms(&plans, 2 * self.options.setting.devices);
                let better = best.as_ref().is_none_or(|(best_ms, fewest, _)| {
                    step_ms * SLACK < *best_ms || (step_ms <= best_ms * SLACK && stages < *fewest)
                });
                if better {
                    best = Some((step_ms, stages, plans));
                }
            }
        }
        // One layer per stage keeps every bound, so some shape was tried.
        best.map(|(_, _, plans)| plans).expect("a plan of single layers always fits")
    }

    /// A step's time: one replayed, or the mean of `steady` steps after as many to get going.
    fn step_ms(&self, plans: &[ExecutePlan], steady: usize) -> f64 {
        let pairs: Vec<_> = plans.iter().zip(self.models.iter().copied()).collect();
        let setting = &self.options.setting;
        let slots = slots(self.kind, &pairs, setting.ahead);
        if !self.options.asynchronous {
            return ring(&slots, setting, 0, 1, |_| {})[0];
        }
        let ends = ring(&slots, setting, 1, 2 * steady, |_| {});
        (ends[2 * steady - 1] - ends[steady - 1]) / steady as f64
    }

    /// Even cuts for a shape. Backward runs from the last layer, so its order is that of the layers reversed.
    fn plans(&mut self, shape: &Shape, forward: Order, backward: Order) -> Vec<ExecutePlan> {
        let last = self.models.len() - 1;
        let mut plans = Vec::with_capacity(self.models.len());
        for model in 0..=last {
            let layers = self.models[model].len();
            let end = if model == last { shape.fused_at } else { layers };
            let forward = self.even(false, model, end, shape.forward[model], forward);
            let mut plan = ExecutePlan { forward, backward: Vec::new() };
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
        let cuts = if backward { &self.backward[model] } else { &self.forward[model] };
        let ends = self
            .memo
            .entry((backward, model, end, count, order))
            .or_insert_with(|| cuts.even(end, count, order));
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts.zip(ends.iter().copied()).map(|(start, end)| start..end).collect()
    }
}

/// The longest stage of a single layer: no plan can have a shorter slowest stage.
fn slowest_ms(kind: PlanKind, models: &[&LayerCosts]) -> f64 {
    let mut slowest: f64 = 0.0;
    for (model, costs) in models.iter().enumerate() {
        for (index, layer) in costs.layers.iter().enumerate() {
            let fused = kind == PlanKind::Fused && model + 1 == models.len() && index + 1 == costs.len();
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
struct Cuts {
    /// Time of the layers before each layer.
    until_ms: Vec<f64>,
    /// First layer that a stage ending at a layer may have.
    first: Vec<usize>,
    /// `slowest_ms[c][end]`: the smallest slowest stage of `c` stages over layers `0..end`; infinite if none.
    slowest_ms: Vec<Vec<f64>>,
}

impl Cuts {
    fn new(times: &[f64], bytes: &[u64], cap_ms: f64, cap_bytes: u64) -> Self {
        let mut until_ms = vec![0.0];
        for time in times {
            until_ms.push(until_ms[until_ms.len() - 1] + time);
        }
        let mut first = vec![0; times.len() + 1];
        let (mut start, mut held) = (0, 0_u64);
        for end in 1..=times.len() {
            held = held.saturating_add(bytes[end - 1]);
            // A single layer is always allowed: the caller has refused one that is too large.
            while start + 1 < end && (held > cap_bytes || until_ms[end] - until_ms[start] > cap_ms) {
                held -= bytes[start];
                start += 1;
            }
            first[end] = start;
        }
        let mut cuts = Self { until_ms, first, slowest_ms: Vec::new() };
        cuts.fill();
        cuts
    }

    fn stage_ms(&self, start: usize, end: usize) -> f64 {
        self.until_ms[end] - self.until_ms[start]
    }

    /// The table, row by row. Of the last stage's possible starts, the slowest stage before it grows and the
    /// last stage shrinks, so the best start is where the two cross.
    fn fill(&mut self) {
        let layers = self.first.len() - 1;
        let mut row = vec![f64::INFINITY; layers + 1];
        row[0] = 0.0;
        self.slowest_ms.push(row);
        for count in 1..=layers {
            let before = &self.slowest_ms[count - 1];
            let mut row = vec![f64::INFINITY; layers + 1];
            for end in count..=layers {
                let (mut low, mut high) = (self.first[end].max(count - 1), end - 1);
                while low < high {
                    let middle = usize::midpoint(low, high);
                    // Before enough layers for `count - 1` stages there is no plan, hence not "slower".
                    if before[middle] >= self.stage_ms(middle, end) {
                        high = middle
                    } else {
                        low = middle + 1
                    }
                }
                let at = |start: usize| before[start].max(self.stage_ms(start, end));
                let least = self.first[end].max(count - 1);
                row[end] = if low > least { at(low).min(at(low - 1)) } else { at(low) };
            }
            self.slowest_ms.push(row);
        }
    }

    /// The slowest stage for each possible number of stages.
    fn slowest(&self, end: usize) -> impl Iterator<Item = f64> {
        self.slowest_ms[..=end].iter().map(move |row| row[end]).filter(|ms| ms.is_finite())
    }

    /// The fewest stages over `0..end` of which none is slower than `stage_ms`.
    fn fewest(&self, end: usize, stage_ms: f64) -> Option<usize> {
        (0..=end).find(|&count| self.slowest_ms[count][end] <= stage_ms * SLACK)
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
