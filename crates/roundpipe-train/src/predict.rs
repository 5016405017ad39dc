//! What a run will take, before it begins: memory by name, stages, speed, and what limits it.
//!
//! ```text
//! Given -> Settings, resolved as `train` does -> a model without weights -> an engine on workers
//! that only count -> memory; layer times from the machine's rates -> the timeline -> tokens/s
//! ```
//! Settings, batches, engine and host memory come from the code that trains, so the two cannot
//! disagree. Weights are neither read nor allocated, and nothing is computed. What does not fit is
//! not refused here but said ([`Prediction::lacks`]); [`ways_to_fit`] looks for what would.
//!
//! It refuses what `train` refuses: settings that cannot work, models and data that cannot be read.
//!
//! # Invariants
//! - A described machine's prediction depends on nothing of this machine.
//! - Memory is stated by the same engine, pool and order of requests as a run's.

mod fit;
pub mod machine;
mod picture;
mod subject;

use std::sync::Arc;

use roundpipe::{
    Bytes, DType, ExecutePlan, HostBudget, HostTensor, Lag, LayerCosts, Params, PlanKind, RngSite,
    RoundPipe, Schedule, Setting, StoreBytes, Timeline, simulate,
};
use roundpipe_data::TrainBatch;
use roundpipe_models::Model;
use serde::Serialize;

use crate::batches;
use crate::error::{Error, Result};
use crate::host_limit;
use crate::model::{host_budget, in_files, rule};
use crate::resolve::Place;
use crate::settings::{GrainName, Method, Settings};
use crate::start;

pub use fit::{Way, ways_to_fit};
pub use machine::{Described, Machine};
pub use picture::{picture, trace};
pub use subject::Subject;

/// Steps that workers which only count take: as many as may overlap, and one more.
const DRY_STEPS: usize = 3;
/// More would take minutes to count.
const MOST_MICROBATCHES: usize = 1024;
/// Tokens of a step: more than anyone trains at once, and little memory.
const MOST_TOKENS: usize = 1 << 25;
/// The part of a step that an update in two passes may take, as the engine has it.
const TWO_PASSES_SHARE: f64 = 0.7;
/// Of what the host has left, what a save may take for copies: `SpareMemory`.
const SPARE_PART: u64 = 4;

/// Bytes under a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What they are for.
    pub name: String,
    /// How many.
    pub bytes: u64,
}

/// Memory of a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Default)]
pub struct MemoryUse {
    /// The most at a time.
    pub peak_bytes: u64,
    /// What there is, where that is known.
    pub limit_bytes: Option<u64>,
    /// What it is made of.
    pub parts: Vec<Part>,
}

impl MemoryUse {
    fn of(parts: &[(&str, u64)], limit_bytes: Option<u64>) -> Self {
        let used = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let part = |(name, bytes): &(&str, u64)| Part {
            name: (*name).to_owned(),
            bytes: *bytes,
        };
        Self {
            peak_bytes: parts
                .iter()
                .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
            limit_bytes,
            parts: used.map(part).collect(),
        }
    }

    fn lacks(&self) -> Option<u64> {
        let lack = self.peak_bytes.checked_sub(self.limit_bytes?)?;
        (lack > 0).then_some(lack)
    }
}

/// What a step may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Kernels of the cards.
    Compute,
    /// Copies between host and cards.
    Pcie,
    /// The host's memory, which cards and optimizer share.
    HostMemory,
    /// The optimizer's passes.
    Optimizer,
    /// Cards that wait for each other, for weights or for updates.
    Waiting,
}

impl Resource {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Pcie => "PCIe",
            Self::HostMemory => "host memory bandwidth",
            Self::Optimizer => "the optimizer",
            Self::Waiting => "stages that wait for each other",
        }
    }
}

/// How long a resource is busy in a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Busy {
    /// Which.
    pub resource: Resource,
    /// Of a step's time.
    pub share: f64,
}

/// Stages of a plan, as ranges of layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stages {
    /// First and behind the last layer of each forward stage.
    pub forward: Vec<(usize, usize)>,
    /// The same of backward stages; the first goes forward too.
    pub backward: Vec<(usize, usize)>,
}

/// Speed and what limits it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens of all cards.
    pub tokens_per_s: f64,
    /// From step to step.
    pub step_s: f64,
    /// Share of the cards' time in which none of their kernels runs.
    pub bubble: f64,
    /// What a faster one of would help most.
    pub limited_by: Resource,
    /// How busy each resource is.
    pub busy: Vec<Busy>,
}

/// What a run will take.
#[derive(Debug, Clone, Serialize)]
pub struct Prediction {
    /// As the user named it.
    pub model: String,
    /// All of them.
    pub parameters: u64,
    /// Those that are trained.
    pub trained_parameters: u64,
    /// What is trained.
    pub method: &'static str,
    /// Type of the weights.
    pub dtype: String,
    /// The optimizer's rule.
    pub optimizer: &'static str,
    /// Steps of the run.
    pub steps: u64,
    /// Rows of a step.
    pub batch: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Parts of a step.
    pub microbatches: usize,
    /// Steps that an update may take.
    pub lag: u64,
    /// What is recomputed together.
    pub grain: &'static str,
    /// The machine in words.
    pub machine: String,
    /// Where its figures come from.
    pub sources: Vec<String>,
    /// Memory of the fullest card, without what its context takes.
    pub gpu: Option<MemoryUse>,
    /// What a context and libraries take of a card beside it.
    pub gpu_context_bytes: u64,
    /// Memory of the host.
    pub host: MemoryUse,
    /// What a run leaves on the disk at most.
    pub disk: MemoryUse,
    /// Stages.
    pub stages: Stages,
    /// Speed.
    pub speed: Speed,
    /// The whole run.
    pub run_s: f64,
    /// Of that, validation.
    pub validation_s: f64,
    /// What else should be known.
    pub notes: Vec<String>,
    /// What does not fit, a line each.
    pub lacks: Vec<String>,
    /// What was replayed.
    #[serde(skip)]
    pub timeline: Timeline,
    /// The plan that was replayed.
    #[serde(skip)]
    pub plan: ExecutePlan,
    /// What layers take for a microbatch.
    #[serde(skip)]
    pub costs: LayerCosts,
}

/// Predicts a run of `settings` on a machine. Settings that are left open are resolved as `train`
/// would.
///
/// # Errors
/// As `train` for what cannot work; [`Error::DoesNotFit`] when not even one row fits a card.
pub fn predict(subject: &Subject, settings: &Settings, machine: &Machine) -> Result<Prediction> {
    predict_by(subject, settings, machine, DRY_STEPS)
}

/// Stages and speed alone: no step is taken, so memory is what planning checks, and no figure of it
/// holds but host and disk without activations.
///
/// # Errors
/// As [`predict`].
pub fn predict_speed(
    subject: &Subject,
    settings: &Settings,
    machine: &Machine,
) -> Result<Prediction> {
    predict_by(subject, settings, machine, 0)
}

fn predict_by(
    subject: &Subject,
    settings: &Settings,
    machine: &Machine,
    dry_steps: usize,
) -> Result<Prediction> {
    let place = Place {
        devices: machine.workers,
        is_host: machine.is_host,
    };
    let (mut settings, data) = subject.resolve(settings, &place)?;
    if !machine.is_host {
        // The most to take of a card is no more than the card has.
        let asked = settings.gpu_memory;
        settings.gpu_memory = asked.map(|asked| asked.min(machine.card_memory));
    }
    if settings.fp8 {
        machine.check_fp8()?;
    }
    let model = subject.model(&settings)?;
    let batch = Arc::new(batch(&settings, data.context, &model)?);
    let mut asked = Asked {
        subject,
        settings: &settings,
        batch: &batch,
        microbatches: settings.microbatches.unwrap_or(1).min(batch.rows),
        dry_steps,
    };
    if asked.microbatches > MOST_MICROBATCHES {
        return Err(Error::Usage(format!(
            "microbatches {}: plans are made for at most {MOST_MICROBATCHES}; choose fewer",
            asked.microbatches
        )));
    }
    // What the first steps take, by the plan that an engine makes before it has measured anything.
    let first = asked.dry_run(machine.unmeasured(), |_| Ok(()))?;
    let context = (!batch.lens.is_empty()).then_some(data.context as u64);
    let is_ahead = start::lag(&settings) == Lag::Zero && rule(&settings).is_elementwise();
    let first_rows = (is_ahead && !machine.is_host).then(|| named_rows(&model, &batch));
    let mut predict_with = |host: &Host| {
        let rates = machine.rates(host.awaited_per_param(), first_rows);
        let later = asked.dry_run(machine.devices(context), |engine| {
            Ok(engine.assume_rates(&rates)?)
        })?;
        let prediction = Maker {
            asked: &asked,
            model: &model,
            machine,
            host,
            data: &data,
            first: &first,
            later: &later,
        };
        prediction.make(subject)
    };
    let host = Host::of(&model, &settings, subject.has_files());
    if let Some(apart) = host.weights_first(&settings, machine.is_host) {
        let prediction = predict_with(&apart)?;
        if apart.update_bytes / machine.update_rate <= TWO_PASSES_SHARE * prediction.speed.step_s {
            return Ok(prediction);
        }
    }
    predict_with(&host)
}

/// Whether weights and optimizer alone are more than the host has, or checkpoints of them more than
/// the disk: known without an engine.
fn exceeds_machine(subject: &Subject, settings: &Settings, machine: &Machine) -> Result<bool> {
    let place = Place {
        devices: machine.workers,
        is_host: machine.is_host,
    };
    let (settings, _) = subject.resolve(settings, &place)?;
    let model = subject.model(&settings)?;
    let host = Host::of(&model, &settings, subject.has_files());
    // At least: masters may be saved in more bytes. One more is being written beside those that stay.
    let checkpoint = 2 * host.trained + host.budget.moments;
    let checkpoints = checkpoint * (settings.keep.max(1) as u64 + 1);
    let exceeds = |limit: Option<Bytes>, least: u64| limit.is_some_and(|limit| least > limit.0);
    Ok(
        exceeds(machine.host_memory, host.budget.total())
            || exceeds(machine.disk_free, checkpoints),
    )
}

/// What is known of the data, or assumed.
#[derive(Debug, Clone)]
pub(crate) struct DataFacts {
    /// Tokens of the document that a token is in.
    pub context: usize,
    /// Tokens that one validation takes.
    pub validation_tokens: f64,
    /// Whether some rows validate.
    pub validates: bool,
    /// What was assumed.
    pub notes: Vec<String>,
}

/// A batch as a step has it: full rows, of documents of `context` tokens where rows are packed and
/// there is more than one.
fn batch(settings: &Settings, context: usize, model: &Model) -> Result<TrainBatch> {
    let rows = settings.batch.unwrap_or(1);
    let seq = settings.seq.unwrap_or(1);
    let tokens = rows
        .checked_mul(seq)
        .filter(|tokens| *tokens <= MOST_TOKENS);
    let Some(tokens) = tokens else {
        return Err(Error::Usage(format!(
            "batch {rows} of {seq} tokens is more than {MOST_TOKENS} tokens in a step; choose fewer"
        )));
    };
    let is_packed = settings.packing && context < seq;
    let document = if is_packed { context.max(1) } else { seq };
    let lens: Vec<i32> = (0..seq)
        .step_by(document)
        .chain([seq])
        .map(|end| end as i32)
        .collect();
    let dims = [rows, seq];
    // Drawn at random: how many rows of the table of embeddings they name counts.
    let dice = RngSite::default().key();
    let vocab = model.config.vocab.max(1) as u64;
    let ids: Vec<i64> = (0..tokens as u64)
        .map(|at| (u64::from(dice.word(at)) % vocab) as i64)
        .collect();
    let ids = HostTensor::from_slice(&ids, &dims).map_err(roundpipe::Error::from)?;
    let positions: Vec<i64> = (0..tokens).map(|at| (at % seq % document) as i64).collect();
    let positions = HostTensor::from_slice(&positions, &dims).map_err(roundpipe::Error::from)?;
    Ok(TrainBatch {
        labels: ids.clone(),
        ids,
        positions,
        documents: rows * (lens.len() - 1),
        lens: if is_packed {
            vec![lens; rows]
        } else {
            Vec::new()
        },
        tokens_trained: tokens as u64,
        tokens: tokens as u64,
        rows,
        keys: Vec::new(),
    })
}

/// Rows of the table of embeddings that a batch names: as many as of tokens drawn at random, since a
/// text names fewer.
fn named_rows(model: &Model, batch: &TrainBatch) -> usize {
    let vocab = model.config.vocab as f64;
    let tokens = batch.tokens as f64;
    let named = vocab * -f64::exp_m1(-tokens / vocab.max(1.0));
    named.ceil() as usize
}

/// Host memory and traffic that follow from parameters and rule.
struct Host {
    budget: HostBudget,
    /// Parameters that are trained.
    trained: u64,
    /// Bytes that an update moves.
    update_bytes: f64,
    /// Of these, the bytes that a forward at lag 0 waits for.
    awaited_bytes: f64,
}

impl Host {
    fn of(model: &Model, settings: &Settings, has_files: bool) -> Self {
        let mut budget = host_budget(model, settings);
        if has_files {
            in_files(&mut budget, model, settings);
        }
        let params = model.trainable_params();
        let trained: usize = params.iter().map(|(_, p)| p.shape().numel()).sum();
        let weights: usize = params.iter().map(|(_, p)| p.bytes()).sum();
        // The weights are read, too, unless an f32 copy of them is.
        let has_copy = |dtype| dtype == DType::F16;
        let copied = params.iter().filter(|(_, p)| has_copy(p.dtype()));
        let read = weights - copied.map(|(_, p)| p.bytes()).sum::<usize>();
        let state = budget.gradients + 2 * budget.masters + 2 * budget.moments;
        let update_bytes = (state + (weights + read) as u64) as f64;
        Self {
            update_bytes,
            awaited_bytes: update_bytes,
            trained: trained as u64,
            budget,
        }
    }

    /// The same with weights first and moments later, where updates can be so.
    fn weights_first(&self, settings: &Settings, is_host: bool) -> Option<Self> {
        let is_possible = start::lag(settings) == Lag::Zero
            && !is_host
            && self.budget.masters > 0
            && rule(settings).leaves_moments();
        let HostBudget {
            gradients, moments, ..
        } = self.budget;
        is_possible.then(|| Self {
            update_bytes: self.update_bytes + (gradients + moments) as f64,
            awaited_bytes: self.update_bytes - moments as f64,
            trained: self.trained,
            budget: self.budget,
        })
    }

    fn awaited_per_param(&self) -> f64 {
        self.awaited_bytes / self.trained.max(1) as f64
    }
}

/// What a run is asked to do.
struct Asked<'a> {
    subject: &'a Subject,
    settings: &'a Settings,
    batch: &'a Arc<TrainBatch>,
    /// As many as fit; more than was asked for where one did not.
    microbatches: usize,
    /// Steps that are taken to see their memory.
    dry_steps: usize,
}

/// What workers that only count have seen.
struct DryRun {
    plan: ExecutePlan,
    costs: LayerCosts,
    /// Of the fullest worker.
    gpu_peak: u64,
    /// Arena of a worker, and what its context takes beside it.
    arena: u64,
    context: u64,
    /// Activations in host memory.
    activations: u64,
    /// Weights that are not sent again for a backward.
    kept_weights: u64,
    store: StoreBytes,
}

impl Asked<'_> {
    /// Plans and takes some steps and a validation on devices that only count.
    fn dry_run(
        &mut self,
        devices: Vec<Arc<dyn roundpipe::Device>>,
        prepare: impl Fn(&RoundPipe) -> Result<()>,
    ) -> Result<DryRun> {
        loop {
            match self.try_run(&devices, &prepare) {
                Err(Error::DoesNotFit(_)) if self.microbatches < self.batch.rows => {
                    // As `train` does.
                    self.microbatches = (2 * self.microbatches).min(self.batch.rows);
                }
                Err(Error::DoesNotFit(why)) => {
                    let seq = self.settings.seq.unwrap_or(0);
                    return Err(Error::DoesNotFit(format!(
                        "one row of {seq} tokens does not fit a card: {why}"
                    )));
                }
                other => return other,
            }
        }
    }

    fn try_run(
        &self,
        devices: &[Arc<dyn roundpipe::Device>],
        prepare: &impl Fn(&RoundPipe) -> Result<()>,
    ) -> Result<DryRun> {
        // Of its own for each engine: weights that one has had are no longer untouched, and the next
        // would copy them.
        let model = self.subject.model(self.settings)?;
        let layers = model.layers.len();
        let engine = start::build(self.settings, &model, devices)?;
        prepare(&engine)?;
        let (inputs, config) = self.call(layers)?;
        let plan = engine.auto_plan(PlanKind::Fused, inputs.clone(), &config)?;
        let mut costs = engine.layer_costs(PlanKind::Fused, inputs, &config)?;
        for _ in 0..self.dry_steps {
            let (inputs, config) = self.call(layers)?;
            engine.train(inputs).config(config).run()?;
            engine.skip_step(start::lag(self.settings))?;
        }
        engine.synchronize()?;
        // Results that are kept are not computed again.
        for (layer, share) in engine.recompute_shares() {
            costs.layers[layer].recompute_ms *= share;
        }
        let kept = engine.kept_weights();
        // Frozen weights that stay are not sent.
        for (layer, bytes) in engine.held_weights() {
            let sent = &mut costs.layers[layer].bytes;
            *sent = sent.saturating_sub(bytes);
        }
        if self.dry_steps > 0 && self.settings.eval_every != Some(0) {
            let (inputs, config) = self.call(layers)?;
            engine.set_training(false);
            drop(engine.forward(inputs, &config.requires_grad(false))?);
            engine.synchronize()?;
        }
        let workers = engine.ring().workers();
        let peaks = workers.iter().map(|worker| worker.usage().high_water.0);
        let context = workers
            .first()
            .map_or(0, |worker| worker.device().cost_model().context_bytes().0);
        Ok(DryRun {
            activations: host_limit::activation_bytes(&engine),
            kept_weights: kept.iter().map(|(_, bytes)| bytes).sum(),
            plan,
            costs,
            gpu_peak: peaks.max().unwrap_or(0),
            arena: engine.ring().budgets().first().map_or(0, |b| b.arena),
            context,
            store: engine.host_bytes(),
        })
    }

    fn call(&self, layers: usize) -> Result<(roundpipe::Inputs, roundpipe::RunConfig)> {
        let (inputs, config) = batches::call(self.batch, self.microbatches)?;
        Ok(match self.settings.stages {
            Some(stages) => {
                let plan = start::even_plan(layers, stages)?;
                (inputs, config.execute_plan(plan))
            }
            None => (inputs, config),
        })
    }
}

/// Everything that a prediction is made of.
struct Maker<'a> {
    asked: &'a Asked<'a>,
    model: &'a Model,
    machine: &'a Machine,
    host: &'a Host,
    data: &'a DataFacts,
    first: &'a DryRun,
    later: &'a DryRun,
}

impl Maker<'_> {
    fn make(&self, subject: &Subject) -> Result<Prediction> {
        let settings = self.asked.settings;
        let model = self.model;
        let costs = self.mean_costs();
        let timeline = self.replay(&costs)?;
        let speed = self.speed(&costs, &timeline);
        let host = self.host_use();
        let disk = self.disk_use();
        let gpu = (!self.machine.is_host).then(|| self.gpu_use());
        let steps = settings.steps.unwrap_or(1);
        let validation_s = self.validation_s(&costs);
        let mut lacks = Vec::new();
        for (place, needs) in [("host memory", &host), ("disk", &disk)] {
            if let (Some(lack), Some(limit)) = (needs.lacks(), needs.limit_bytes) {
                lacks.push(format!(
                    "{place}: {} are needed and there are {}, {} less",
                    Bytes(needs.peak_bytes),
                    Bytes(limit),
                    Bytes(lack)
                ));
            }
        }
        let trained = self.host.trained;
        let base = model.config.num_params();
        Ok(Prediction {
            model: subject.name().to_owned(),
            parameters: match settings.method {
                Method::Full => base,
                Method::Lora => base + trained,
            },
            trained_parameters: trained,
            method: settings.method.name(),
            dtype: model.dtype().to_string(),
            optimizer: settings.optimizer.name(),
            steps,
            batch: self.asked.batch.rows,
            seq: settings.seq.unwrap_or(1),
            microbatches: self.asked.microbatches,
            lag: settings.lag,
            grain: settings.grain.name(),
            machine: self.machine.name.clone(),
            sources: self.machine.sources.clone(),
            gpu,
            gpu_context_bytes: self.later.context,
            host,
            disk,
            stages: stages(&self.later.plan),
            run_s: steps as f64 * speed.step_s + validation_s,
            validation_s,
            speed,
            notes: self.notes(),
            lacks,
            timeline,
            plan: self.later.plan.clone(),
            costs,
        })
    }

    /// Costs of a microbatch of mean size: the last ones of an uneven batch are smaller.
    fn mean_costs(&self) -> LayerCosts {
        let rows = self.asked.batch.rows as f64;
        let count = self.asked.microbatches as f64;
        let share = rows / count / (rows / count).ceil();
        let mut costs = self.later.costs.clone();
        for layer in &mut costs.layers {
            layer.forward_ms *= share;
            layer.recompute_ms *= share;
            layer.backward_ms *= share;
            layer.activation_bytes = (layer.activation_bytes as f64 * share) as u64;
        }
        costs
    }

    fn replay(&self, costs: &LayerCosts) -> Result<Timeline> {
        let schedule = match start::lag(self.asked.settings) {
            Lag::One => Schedule::RoundPipeAsync,
            Lag::Zero => Schedule::RoundPipe,
        };
        let setting = self.setting(costs);
        let mut costs = costs.clone();
        // Of the table of embeddings only rows leave, if they are no more than half of it.
        let rows = named_rows(self.model, self.asked.batch) as u64;
        let vocab = self.model.config.vocab as u64;
        if 2 * rows <= vocab
            && let Some(table) = costs.layers.first_mut()
        {
            table.grad_bytes = table.grad_bytes / vocab.max(1) * rows;
        }
        Ok(simulate(
            schedule,
            PlanKind::Fused,
            &self.later.plan,
            &costs,
            &setting,
        )?)
    }

    /// The machine as the timeline wants it.
    fn setting(&self, costs: &LayerCosts) -> Setting {
        let mut setting = Setting::new(self.machine.workers, self.asked.microbatches);
        setting.shares_cores = self.machine.is_host;
        if self.machine.is_host {
            return setting;
        }
        let on_device = costs.grad_bytes(0..costs.len()) as f64;
        // Gradients are rounded before they travel.
        let rounded = on_device / (self.host.budget.gradients as f64).max(1.0);
        let download = self.machine.download / 1e3;
        setting.upload_bytes_per_ms = Some(self.machine.upload / 1e3);
        setting.grad_bytes_per_ms = Some(download * rounded.max(1e-9));
        let both = 1.0 / (1.0 / self.machine.upload + 1.0 / self.machine.download);
        setting.hop_bytes_per_ms = Some(both / 1e3);
        setting
    }

    fn speed(&self, costs: &LayerCosts, timeline: &Timeline) -> Speed {
        let machine = self.machine;
        let workers = machine.workers as f64;
        let moved = self.moved(costs);
        let all = 0..costs.len();
        let per_microbatch = work_ms(&self.later.plan, costs);
        let compute_ms = per_microbatch * self.asked.microbatches as f64 / workers;
        let pcie_s = (moved.up / machine.upload)
            .max(moved.down / machine.download)
            .max((moved.up + moved.down) / machine.both)
            / workers;
        let host_bytes = moved.up + moved.down + self.host.update_bytes;
        // The timeline has what is awaited.
        let update = self.host.update_bytes / self.host.awaited_bytes.max(1.0);
        let update_ms = update * costs.update_ms(all);
        let busy_ms = if machine.is_host {
            vec![
                (Resource::Compute, compute_ms * workers),
                (Resource::Optimizer, update_ms),
            ]
        } else {
            vec![
                (Resource::Compute, compute_ms),
                (Resource::Pcie, 1e3 * pcie_s),
                (Resource::HostMemory, 1e3 * host_bytes / machine.host_rate),
                (Resource::Optimizer, update_ms),
            ]
        };
        let (most, most_ms) = busy_ms
            .iter()
            .copied()
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or((Resource::Compute, 0.0));
        // No step is shorter than what its busiest resource takes.
        let step_ms = timeline.step_ms.max(most_ms);
        let limited_by = if most_ms < 0.6 * step_ms {
            Resource::Waiting
        } else {
            most
        };
        let share = |(resource, ms): &(Resource, f64)| Busy {
            resource: *resource,
            share: ms / step_ms,
        };
        let step_s = step_ms / 1e3;
        Speed {
            tokens_per_s: self.asked.batch.tokens as f64 / step_s,
            step_s,
            bubble: (1.0 - compute_ms / step_ms).max(0.0),
            limited_by,
            busy: busy_ms.iter().map(share).collect(),
        }
    }

    /// Bytes that a step moves between host and all cards.
    fn moved(&self, costs: &LayerCosts) -> Moved {
        let stages = self.later.plan.stages(PlanKind::Fused);
        let weights: u64 = stages.iter().map(|s| costs.bytes(s.layers.clone())).sum();
        let output = |layer: usize| costs.layers[layer].activation_bytes;
        let edges = stages.iter().skip(1);
        let hops: u64 = edges
            .map(|stage| match stage.pass {
                roundpipe::Pass::Backward => output(stage.layers.end - 1),
                _ => stage.layers.start.checked_sub(1).map_or(0, output),
            })
            .sum();
        let hops = hops as f64 * self.asked.microbatches as f64;
        let saved = self.later.activations as f64;
        let gradients = self.host.budget.gradients as f64;
        let is_ring = self.machine.workers > 1;
        Moved {
            up: weights.saturating_sub(self.later.kept_weights) as f64
                + saved
                + if is_ring { hops } else { 0.0 },
            down: gradients + if is_ring { hops.max(saved) } else { saved },
        }
    }

    fn gpu_use(&self) -> MemoryUse {
        let peak = self.first.gpu_peak.max(self.later.gpu_peak);
        let costs = &self.later.costs;
        let is_layer = self.asked.settings.grain == GrainName::Layer;
        let needs = self
            .later
            .plan
            .stages(PlanKind::Fused)
            .into_iter()
            .map(|stage| {
                let weights = costs.bytes(stage.layers.clone());
                (weights, costs.task_bytes(&stage, is_layer))
            });
        let (weights, task) = needs
            .max_by_key(|(weights, task)| weights + task)
            .unwrap_or((0, 0));
        let weights = weights.min(peak);
        let task = task.min(peak - weights);
        let parts = [
            ("weights of the largest stage", weights),
            ("one microbatch at work there", task),
            (
                "next stage, kept activations, copies",
                peak - weights - task,
            ),
        ];
        MemoryUse::of(&parts, Some(self.later.arena))
    }

    fn host_use(&self) -> MemoryUse {
        let budget = &self.host.budget;
        let store = &self.later.store;
        let in_files = budget.in_files;
        let libraries = host_limit::program_bytes(self.machine.is_host);
        let activations = self.first.activations.max(self.later.activations);
        let batches = host_limit::batch_bytes(self.asked.batch.tokens);
        let frozen = (store.frozen as u64).saturating_sub(in_files);
        let arena = match self.machine.is_host {
            // Each of them takes the largest stage some time: validations move stages on.
            true => {
                let most = self.first.gpu_peak.max(self.later.gpu_peak);
                most.saturating_mul(self.machine.workers as u64)
            }
            false => 0,
        };
        let parts = [
            ("weights", store.weights as u64 + frozen),
            ("gradients", store.gradients as u64),
            ("f32 masters", store.masters as u64),
            ("optimizer moments", store.moments as u64),
            ("activations", activations),
            ("work", arena),
            ("batches", batches),
            ("program and libraries", libraries),
        ];
        MemoryUse::of(&parts, self.machine.host_memory.map(|bytes| bytes.0))
    }

    /// Bytes of a checkpoint: masters, moments, and the weights that they do not give.
    fn checkpoint_bytes(&self) -> u64 {
        let store = &self.later.store;
        let versions = if self.asked.settings.lag == 1 { 2 } else { 1 };
        let weights = store.weights as u64 / versions;
        // A master is saved as f32, however the store holds it.
        let values = if store.masters == 0 {
            weights
        } else {
            self.host.trained * size_of::<f32>() as u64
        };
        let older = if versions == 2 { weights } else { 0 };
        values + store.moments as u64 + older
    }

    fn disk_use(&self) -> MemoryUse {
        let settings = self.asked.settings;
        let one = self.checkpoint_bytes();
        let model = match settings.method {
            Method::Full => self.model.config.num_params() * 2,
            Method::Lora => self.host.trained * 4,
        };
        let best = if self.data.validates { one } else { 0 };
        let parts = [
            ("checkpoints that stay", one * settings.keep.max(1) as u64),
            ("the best checkpoint", best),
            ("a checkpoint being written", one),
            ("the finished model", model),
        ];
        MemoryUse::of(&parts, self.machine.disk_free.map(|bytes| bytes.0))
    }

    /// Seconds of all validations: forwards only.
    fn validation_s(&self, costs: &LayerCosts) -> f64 {
        let settings = self.asked.settings;
        let every = settings.eval_every.unwrap_or(0);
        if every == 0 || !self.data.validates {
            return 0.0;
        }
        let times = settings.steps.unwrap_or(1).div_ceil(every) as f64;
        let forward_ms = costs.forward_ms(0..costs.len()) * self.asked.microbatches as f64;
        let per_token = forward_ms / 1e3 / self.asked.batch.tokens as f64;
        times * self.data.validation_tokens * per_token / self.machine.workers as f64
    }

    fn notes(&self) -> Vec<String> {
        let settings = self.asked.settings;
        let mut notes = self.data.notes.clone();
        let asked_for = settings.microbatches.unwrap_or(1);
        if self.asked.microbatches > asked_for {
            notes.push(format!(
                "{asked_for} microbatches do not fit, so a step has {}",
                self.asked.microbatches
            ));
        }
        if self.host.budget.in_files > 0 {
            notes.push(format!(
                "{} of weights stay in the model's files (pin = off) and are read at the disk's speed",
                Bytes(self.host.budget.in_files)
            ));
        }
        let one = self.checkpoint_bytes();
        if let Some(limit) = self.machine.host_memory {
            let left = limit.0.saturating_sub(self.host_use().peak_bytes);
            // What the user allows may be used up; of what is there, others need some.
            let spare = match settings.host_memory {
                Some(_) => left.min(one),
                None => (left / SPARE_PART).min(one),
            };
            notes.push(format!(
                "a save copies up to {} of its {} into memory that is free",
                Bytes(spare),
                Bytes(one)
            ));
        }
        if let Some(rate) = self.machine.disk_rate {
            notes.push(format!(
                "a save of {} takes {:.0} s beside the steps",
                Bytes(one),
                one as f64 / rate
            ));
        }
        notes
    }
}

/// Bytes of a step, of all cards.
struct Moved {
    up: f64,
    down: f64,
}

/// What kernels take for one microbatch: what the fused stage has is not recomputed.
fn work_ms(plan: &ExecutePlan, costs: &LayerCosts) -> f64 {
    let stages = plan.stages(PlanKind::Fused);
    let ms = stages.into_iter().map(|stage| {
        let layers = stage.layers;
        match stage.pass {
            roundpipe::Pass::Forward => costs.forward_ms(layers),
            roundpipe::Pass::Backward => {
                costs.recompute_ms(layers.clone()) + costs.backward_ms(layers)
            }
            roundpipe::Pass::Fused => costs.forward_ms(layers.clone()) + costs.backward_ms(layers),
        }
    });
    ms.sum()
}

fn stages(plan: &ExecutePlan) -> Stages {
    let pair = |range: &std::ops::Range<usize>| (range.start, range.end);
    Stages {
        forward: plan.forward.iter().map(pair).collect(),
        backward: plan.backward.iter().map(pair).collect(),
    }
}
