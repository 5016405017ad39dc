//! `roundpipe bench`: how fast a model trains here, in tokens per second, and in how much memory.
//!
//! The last line is JSON. Times are means over all measured steps with everything under way ended
//! at the end, so that nothing is counted before it is done. At lag 1 that counts one update which
//! runs beside nothing, as at the end of a run; `steady_tokens_per_s` is the rate from the first
//! measured loss to the last, which a long run has.

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use roundpipe::optim::{AdamW, MomentType};
use roundpipe::trace::{Lane, Span};
use roundpipe::{
    Bytes, Device, DeviceKind, Grain, HostBudget, HostTensor, Inputs, Lag, LossReduction, Meta,
    Params, PlanKind, Quantization, RingOptions, RngSite, RoundPipe, Rule, RunConfig, Update,
};
use roundpipe_models::memory::host_memory;
use roundpipe_models::{LoraConfig, LoraTargets, Model, TrainMode, preset};

use roundpipe_train::batches::{self, random_documents};
use roundpipe_train::machine::{self, StateTypes, processors, product_rate};

use crate::place::{Place, size};
use crate::{bounds, open};

/// More would keep nothing but queues busy.
const MOST_MICROBATCHES: usize = 1 << 16;

/// Lines of the table of kernels.
const MOST_KERNELS: usize = 60;

/// Time training steps of a model, with random weights for a preset
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchCmd {
    /// A preset such as qwen3-1.7b (random weights), a folder, or a hub id
    model: String,
    /// Sequences per step
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 4096)]
    seq: usize,
    /// Packed rows: documents of so many tokens on average, instead of one per row
    #[arg(long, hide_short_help = true)]
    documents: Option<usize>,
    /// Microbatches per step, at most the batch [default: devices + 1]
    #[arg(long)]
    microbatches: Option<usize>,
    /// Measured steps, after the warm-up
    #[arg(long, default_value_t = 4)]
    steps: u64,
    /// Steps before the clock starts
    #[arg(long, default_value_t = 2)]
    warm_up: u64,
    /// What is trained
    #[arg(long, value_enum, default_value_t = Mode::Full)]
    mode: Mode,
    /// Rank of the adapters
    #[arg(long, default_value_t = 32)]
    rank: usize,
    /// 0: every step sees the newest weights; 1: updates run beside the next step
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    lag: u8,
    /// What is recomputed together
    #[arg(long, value_enum, default_value_t = GrainArg::Stage)]
    grain: GrainArg,
    /// Keep no results of forwards; compute all again before a backward
    #[arg(long)]
    recompute_all: bool,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = open::TypeArg::Bf16)]
    dtype: open::TypeArg,
    /// Frozen weights in 4 or 8 bits, for --mode lora
    #[arg(long, value_enum)]
    quantize: Option<open::QuantizeArg>,
    /// What the optimizer's moments are kept in: less host memory, more noise
    #[arg(long, value_enum, default_value_t = MomentsArg::F32)]
    moments: MomentsArg,
    /// Multiply projections in 8-bit floats: faster on GPUs from Ada (RTX 40) on, less exact
    #[arg(long, conflicts_with = "quantize")]
    fp8: bool,
    /// Gradients of attention in any order on GPUs: faster, but the last bits vary
    #[arg(long, hide_short_help = true)]
    fast_attention: bool,
    /// Threads of the optimizer [default: the cores, on GPUs less one in eight; fewer at lag 1]
    #[arg(long, hide_short_help = true)]
    optimizer_threads: Option<usize>,
    /// Scale gradients down to this norm
    #[arg(long, hide_short_help = true)]
    clip: Option<f64>,
    /// The most to take of host memory; what weights and optimizer leave keeps results
    ///
    /// Results of forwards that are kept need not be computed again before a backward.
    #[arg(long, value_parser = size)]
    host_memory: Option<Bytes>,
    /// Compute nothing: say how much GPU memory a step takes, without a GPU too
    #[arg(long, conflicts_with_all = ["devices", "trace", "kernels"], requires = "gpu_memory")]
    dry_run: bool,
    /// Write a trace of three more steps for Perfetto, and print how fast their copies were
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Time every kernel of two more steps, and print the longest by kind and sizes
    #[arg(long)]
    kernels: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Full,
    Lora,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MomentsArg {
    F32,
    Bf16,
    #[value(name = "8bit")]
    Bits8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GrainArg {
    Stage,
    Layer,
}

const EXAMPLES: &str = "Examples:
  roundpipe bench qwen3-1.7b --batch 16 --seq 4096 --microbatches 4 --gpu-memory 24GiB
  roundpipe bench qwen3-8b --mode lora --batch 8 --dry-run --gpu-memory 24GiB";

impl BenchCmd {
    pub fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        ensure!(
            self.batch > 0 && self.seq > 0 && self.steps > 0,
            "--batch, --seq and --steps must be at least 1"
        );
        bounds::threads("--optimizer-threads", self.optimizer_threads)?;
        let tokens = bounds::tokens(self.batch, self.seq, host_memory())?;
        ensure!(
            self.microbatches
                .is_none_or(|count| (1..=MOST_MICROBATCHES).contains(&count)),
            "--microbatches must be from 1 to {MOST_MICROBATCHES}"
        );
        ensure!(
            self.microbatches.is_none_or(|count| count <= self.batch),
            "--microbatches: a batch of {} sequences has at most as many",
            self.batch
        );
        ensure!(
            self.documents
                .is_none_or(|mean| (1..=self.seq).contains(&mean)),
            "--documents must be from 1 to --seq ({})",
            self.seq
        );
        ensure!(
            self.clip.is_none_or(|clip| clip > 0.0 && clip.is_finite()),
            "--clip must be above 0"
        );
        ensure!(
            self.quantize.is_none() || self.mode == Mode::Lora,
            "--quantize: quantized weights are not trained; add --mode lora"
        );
        if self.dry_run {
            return self.predict(out);
        }
        let devices = self.place.open(out)?;
        if let Some(note) = &devices.note {
            writeln!(out, "no GPU: {note}")?;
        }
        let rate = product_rate(devices.workers[0].clone(), self.dtype.into())?;
        let model = self.model(out)?;
        let engine = self.engine(&model, &devices.workers)?;
        let measured = self.measure(&engine, model.config.vocab, out)?;
        let (seconds, loss) = (measured.seconds, measured.loss);
        let trains = if self.mode == Mode::Full {
            TrainMode::All
        } else {
            TrainMode::Adapters
        };
        let tokens = tokens as f64;
        let pins = engine.ring().pins();
        let seq = self.attended(model.config.vocab)?;
        let floor = model.config.flops_per_token(seq, trains) * tokens / rate;
        self.tell(
            out,
            devices.workers.len(),
            serde_json::json!({
                "quantize": model.quantization().map(Quantization::name),
                "devices": devices.workers.iter().map(|d| d.id().to_string()).collect::<Vec<_>>(),
                "tokens_per_s": round(tokens / seconds, 1),
                "steady_tokens_per_s": measured.steady_seconds.map(|s| round(tokens / s, 1)),
                "seconds_per_step": round(seconds, 4),
                "gpu_peak_gib": round(gpu_peak(&engine), 2),
                "host_peak_gib": round(host_peak(&engine), 2),
                "kept_on_gpu_gib": kept_gib(&engine).0,
                "kept_in_host_gib": kept_gib(&engine).1,
                "held_weights_gib": held_gib(&engine),
                "kept_weights_gib": kept_weights_gib(&engine),
                "pinned_gib": round(pins.pinned.0 as f64 / f64::from(1 << 30), 2),
                "pageable_gib": round(pins.pageable.0 as f64 / f64::from(1 << 30), 2),
                "product_tflops": round(rate / 1e12, 2),
                "share_of_floor": round(floor / processors(&engine) as f64 / seconds, 3),
                "loss": round(loss, 4),
            }),
        )?;
        if self.kernels {
            self.time_kernels(&engine, model.config.vocab)?;
        }
        // Last, so that a disk that takes no trace loses no figure.
        self.trace
            .as_ref()
            .map_or(Ok(()), |path| self.trace(&engine, model.config.vocab, path))
    }

    fn model(&self, out: &mut impl Write) -> anyhow::Result<Model> {
        let start = Instant::now();
        let mut model = match preset(&self.model) {
            Ok(config) => {
                let config =
                    config.with(&serde_json::json!({ "max_position_embeddings": self.seq }))?;
                let dtype = self.dtype.into();
                let quantize = self.quantize.map(Quantization::from);
                let empty = match quantize {
                    None => Model::empty(config.clone(), dtype)?,
                    Some(how) => Model::empty_quantized(config.clone(), dtype, how)?,
                };
                if self.dry_run {
                    empty
                } else {
                    self.check_host_memory(empty)?;
                    match quantize {
                        None => Model::random(config, dtype, 1)?,
                        Some(how) => Model::random_codes(config, dtype, 1, how)?,
                    }
                }
            }
            Err(unknown) if !open::looks_like_a_model(&self.model) => return Err(unknown.into()),
            Err(_) => {
                let dtype = Some(self.dtype.into());
                let quantize = self.quantize.map(Into::into);
                open::model_quantized(&self.model, dtype, &self.place, quantize)?.model
            }
        };
        ensure!(
            self.seq <= model.config.max_positions,
            "--seq {}: the model's longest sequence is {}",
            self.seq,
            model.config.max_positions
        );
        let quantization = model.quantization();
        if let Some(how) = quantization {
            ensure!(
                self.mode == Mode::Lora,
                "{}: its weights are quantized ({how}) and are not trained; add --mode lora",
                self.model
            );
            ensure!(
                !self.fp8,
                "--fp8: quantized weights ({how}) are multiplied as they widen, without fp8; leave it out"
            );
        }
        self.adapt(&mut model)?;
        model.fast_attention(self.fast_attention);
        writeln!(
            out,
            "{} ready in {:.1} s",
            self.model,
            start.elapsed().as_secs_f64()
        )?;
        let trained: usize = model
            .trainable_params()
            .iter()
            .map(|(_, p)| p.shape().numel())
            .sum();
        // Codes are no parameters: two of them may share an element.
        let params = match quantization {
            None => model.num_params(),
            Some(_) => model.config.num_params() as usize + trained,
        };
        let kept = match quantization {
            None => String::new(),
            Some(how) => format!(", linear layers in {how}"),
        };
        writeln!(
            out,
            "{params} parameters, {trained} of them trained, {}{kept}",
            self.dtype.name()
        )?;
        Ok(model)
    }

    /// Adds the adapters that were asked for.
    fn adapt(&self, model: &mut Model) -> anyhow::Result<()> {
        if self.mode == Mode::Lora {
            let config = LoraConfig {
                rank: self.rank,
                targets: LoraTargets::AllLinear,
                ..LoraConfig::default()
            };
            model.add_lora(&config)?;
        }
        Ok(())
    }

    /// Refuses a model whose training does not fit the host, before its weights are made.
    fn check_host_memory(&self, mut model: Model) -> anyhow::Result<()> {
        let Some(left) = roundpipe::host_memory::available() else {
            return Ok(());
        };
        self.adapt(&mut model)?;
        let left = self.host_memory.into_iter().chain([left]).min();
        Ok(self
            .training_budget(&model)
            .check(left.unwrap_or_default())?)
    }

    /// Host memory of weights and optimizer.
    fn training_budget(&self, model: &Model) -> HostBudget {
        let rule = Rule::AdamW(AdamW::default());
        let state = StateTypes {
            moments: self.moments.into(),
            ..StateTypes::default()
        };
        machine::training_budget_of(&model.layers, &rule, self.lag() == Lag::One, state)
    }

    /// Parts of a step on so many workers.
    fn microbatches(&self, workers: usize) -> usize {
        let usual = (workers + 1).min(self.batch);
        self.microbatches.unwrap_or(usual)
    }

    fn engine(&self, model: &Model, workers: &[Arc<dyn Device>]) -> anyhow::Result<RoundPipe> {
        let mut config = RunConfig::new()
            .recompute_grain(self.grain.into())
            .recompute_all(self.recompute_all)
            .loss_reduction(LossReduction::Mean);
        config.num_microbatch = Some(self.microbatches(workers.len()));
        let builder = RoundPipe::builder(model.layers.clone())
            .optimizer(Rule::AdamW(AdamW::default()))
            .max_lag(self.lag())
            .moments(self.moments.into())
            .fp8(self.fp8)
            .devices(workers.to_vec())
            .ring_options(RingOptions {
                host_activations: self.host_memory.map(|limit| {
                    let state = self.training_budget(model).total();
                    Bytes(limit.0.saturating_sub(state))
                }),
                ..self.place.ring()
            })
            .pin(self.place.pin.into())
            .run_config(config);
        let builder = match self.optimizer_threads {
            Some(threads) => builder.optimizer_threads(threads),
            None => builder,
        };
        Ok(builder.build()?)
    }

    /// The line of JSON: what was asked for, then what was found.
    fn tell(
        &self,
        out: &mut impl Write,
        workers: usize,
        found: serde_json::Value,
    ) -> anyhow::Result<()> {
        let mut line = serde_json::json!({
            "model": self.model,
            "mode": format!("{:?}", self.mode).to_lowercase(),
            "batch": self.batch,
            "seq": self.seq,
            "documents": self.documents,
            "microbatches": self.microbatches(workers),
            "lag": self.lag,
            "grain": format!("{:?}", self.grain).to_lowercase(),
            "recompute_all": self.recompute_all,
            "fp8": self.fp8,
            "fast_attention": self.fast_attention,
            "moments": self.moments.to_possible_value().map(|name| name.get_name().to_owned()),
        });
        if let (Some(line), serde_json::Value::Object(found)) = (line.as_object_mut(), found) {
            line.extend(found);
        }
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }

    fn lag(&self) -> Lag {
        if self.lag == 1 { Lag::One } else { Lag::Zero }
    }

    /// Seconds of a step and the loss of the last.
    fn measure(
        &self,
        engine: &RoundPipe,
        vocab: usize,
        out: &mut impl Write,
    ) -> anyhow::Result<Measured> {
        let mut loss = 0.0;
        let mut start = Instant::now();
        self.run_steps(engine, vocab, 0..self.warm_up, |step, mean| {
            loss = mean;
            let seconds = start.elapsed().as_secs_f64();
            start = Instant::now();
            writeln!(out, "warm-up {step}: loss {loss:.4}, {seconds:.2} s")?;
            Ok(out.flush()?)
        })?;
        engine.synchronize()?;
        if let Some(note) = engine.ring().pins().note() {
            writeln!(out, "{note}")?;
        }
        let start = Instant::now();
        let mut losses_at = Vec::new();
        let steps = self.warm_up..self.warm_up + self.steps;
        self.run_steps(engine, vocab, steps, |step, mean| {
            loss = mean;
            let seconds = start.elapsed().as_secs_f64();
            losses_at.push(seconds);
            let step = step - self.warm_up;
            writeln!(out, "step {step}: loss {loss:.4}, {seconds:.2} s so far")?;
            Ok(out.flush()?)
        })?;
        engine.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / self.steps as f64;
        if let Some(plan) = engine.last_plan(PlanKind::Fused) {
            writeln!(out, "stages by layers: {plan}")?;
        }
        let steady_seconds = match losses_at[..] {
            [first, .., last] => Some((last - first) / (self.steps - 1) as f64),
            _ => None,
        };
        Ok(Measured {
            seconds,
            steady_seconds,
            loss,
        })
    }

    /// What steps take of a GPU, by a worker that only counts: as many as may overlap and one more,
    /// or as many as asked for.
    /// Their updates are skipped: weights that are not there need not be changed.
    fn predict(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let model = self.model(out)?;
        let engine = self.engine(&model, &[Meta::like(DeviceKind::Cuda)])?;
        for step in 0..self.steps.max(3) {
            let (inputs, config) = self.batch(&engine, model.config.vocab, step)?;
            engine.train(inputs).config(config).run()?;
            engine.skip_step(self.lag())?;
        }
        engine.synchronize()?;
        let peak = round(gpu_peak(&engine), 2);
        self.tell(
            out,
            1,
            serde_json::json!({
                "quantize": model.quantization().map(Quantization::name),
                "dry_run": true,
                "gpu_peak_gib": peak,
                "kept_on_gpu_gib": kept_gib(&engine).0,
                "kept_in_host_gib": kept_gib(&engine).1,
                "held_weights_gib": held_gib(&engine),
                "kept_weights_gib": kept_weights_gib(&engine),
            }),
        )
    }

    /// What the call of a step takes.
    fn batch(&self, engine: &RoundPipe, vocab: usize, step: u64) -> anyhow::Result<BenchBatch> {
        let Some(mean) = self.documents else {
            return Ok((self.inputs(vocab, step)?, RunConfig::default()));
        };
        let batch = random_documents([self.batch, self.seq], mean, vocab, step)?;
        let microbatches = self.microbatches(engine.ring().len());
        Ok(batches::call(&Arc::new(batch), microbatches)?)
    }

    /// Some steps from one on. Each tells `done` its loss, a mean over the batch.
    fn run_steps(
        &self,
        engine: &RoundPipe,
        vocab: usize,
        steps: Range<u64>,
        mut done: impl FnMut(u64, f64) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let update = Update {
            clip: self.clip,
            ..Update::new(1e-5)
        };
        let mut ahead = None;
        for step in steps.clone() {
            let (inputs, config) = match ahead.take() {
                Some(batch) => batch,
                None => self.batch(engine, vocab, step)?,
            };
            let trained = engine.train(inputs).config(config).run()?;
            // While the backward runs, as a data loader does: behind the update, at lag 0, the GPU
            // would wait for it.
            if step + 1 < steps.end {
                ahead = Some(self.batch(engine, vocab, step + 1)?);
            }
            engine.update(&update, self.lag())?;
            done(step, trained.losses.total())?;
        }
        Ok(())
    }

    /// The length of rows in which a token attends to as many others as it does here on average.
    fn attended(&self, vocab: usize) -> anyhow::Result<usize> {
        let Some(mean) = self.documents else {
            return Ok(self.seq);
        };
        let batch = random_documents([self.batch, self.seq], mean, vocab, self.warm_up)?;
        let squares = |ends: &Vec<i32>| {
            let lengths = ends.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
            lengths.map(|length| length * length).sum::<usize>()
        };
        Ok(batch.lens.iter().map(squares).sum::<usize>() / (self.batch * self.seq))
    }

    /// Random tokens, and the ones that follow them as labels.
    fn inputs(&self, vocab: usize, step: u64) -> anyhow::Result<Inputs> {
        let key = RngSite {
            seed: 7,
            step,
            ..RngSite::default()
        }
        .key();
        let (rows, seq) = (self.batch, self.seq);
        let token = |at: usize| ((u64::from(key.word(at as u64)) * vocab as u64) >> 32) as i64;
        let row = |shift: usize| {
            let ids: Vec<i64> = (0..rows * seq)
                .map(|i| token(i / seq * (seq + 1) + i % seq + shift))
                .collect();
            HostTensor::from_slice(&ids, &[rows, seq])
        };
        Ok(Inputs::new().named("ids", row(0)?).named("labels", row(1)?))
    }

    /// Runs two more steps with every kernel timed; prints milliseconds per step of the first worker.
    fn time_kernels(&self, engine: &RoundPipe, vocab: usize) -> anyhow::Result<()> {
        const STEPS: u64 = 2;
        engine.synchronize()?;
        let worker = &engine.ring().workers()[0];
        worker.time_kernels(true);
        let first = self.warm_up + self.steps;
        self.run_steps(engine, vocab, first..first + STEPS, |_, _| Ok(()))?;
        engine.synchronize()?;
        worker.time_kernels(false);
        let times = worker.kernel_times();
        let all: u64 = times.iter().map(|time| time.ns).sum();
        let ms = |ns: u64| ns as f64 / 1e6 / STEPS as f64;
        let mut out = std::io::stderr();
        writeln!(out, "kernels of a step: {:.2} ms", ms(all))?;
        for time in times.iter().take(MOST_KERNELS) {
            let (share, launches) = (100.0 * time.ns as f64 / all as f64, time.launches / STEPS);
            let what = &time.what;
            writeln!(
                out,
                "{:9.2} ms {share:5.1}% {launches:6} x {what}",
                ms(time.ns)
            )?;
        }
        Ok(())
    }

    fn trace(&self, engine: &RoundPipe, vocab: usize, path: &Path) -> anyhow::Result<()> {
        const TRACED: u64 = 3;
        engine.trace().on();
        let first = self.warm_up + self.steps;
        self.run_steps(engine, vocab, first..first + TRACED, |_, _| Ok(()))?;
        engine.synchronize()?;
        engine.trace().off();
        for line in copies(&engine.trace().spans()) {
            writeln!(std::io::stderr(), "{line}")?;
        }
        engine
            .trace()
            .write_to(path)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// What a call takes.
type BenchBatch = (Inputs, RunConfig);

/// What the measured steps took.
struct Measured {
    /// Of a step, with all that was under way at the end.
    seconds: f64,
    /// From one loss to the next; `None` with one step.
    steady_seconds: Option<f64>,
    /// Of the last step.
    loss: f64,
}

/// How fast each lane's copies were, and how much of their time kernels ran.
fn copies(spans: &[Span]) -> Vec<String> {
    let compute = spans.iter().filter(|s| s.track.lane == Lane::Compute);
    let mut all: Vec<(u64, u64)> = compute.map(|s| (s.start_ns, s.end_ns)).collect();
    all.sort_unstable();
    let mut busy: Vec<(u64, u64)> = Vec::new();
    for (from, to) in all {
        match busy.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => busy.push((from, to)),
        }
    }
    let beside = |s: &Span| -> u64 {
        busy.iter()
            .map(|(a, b)| s.end_ns.min(*b).saturating_sub(s.start_ns.max(*a)))
            .sum()
    };
    let lanes = [
        Lane::ParamUpload,
        Lane::ActivationUpload,
        Lane::ActivationDownload,
        Lane::GradDownload,
    ];
    let line = |lane: Lane| {
        let of = || spans.iter().filter(move |s| s.track.lane == lane);
        let bytes: u64 = of().filter_map(|s| s.bytes).sum();
        let time: u64 = of().map(|s| s.end_ns - s.start_ns).sum();
        let shared: u64 = of().map(beside).sum();
        (time > 0 && bytes > 1 << 20).then(|| {
            let (rate, share) = (
                bytes as f64 / time as f64,
                100.0 * shared as f64 / time as f64,
            );
            format!(
                "{}: {} at {rate:.1} GB/s, {share:.0}% of it beside kernels",
                lane.name(),
                Bytes(bytes)
            )
        })
    };
    lanes.into_iter().filter_map(line).collect()
}

impl From<MomentsArg> for MomentType {
    fn from(moments: MomentsArg) -> Self {
        match moments {
            MomentsArg::F32 => Self::F32,
            MomentsArg::Bf16 => Self::Bf16,
            MomentsArg::Bits8 => Self::Bits8,
        }
    }
}

impl From<GrainArg> for Grain {
    fn from(grain: GrainArg) -> Self {
        match grain {
            GrainArg::Stage => Self::Stage,
            GrainArg::Layer => Self::Layer,
        }
    }
}

fn round(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}

/// Results of forwards that are kept for recomputes, on GPUs and in host memory.
fn kept_gib(engine: &RoundPipe) -> (f64, f64) {
    let used = engine.activation_use().unwrap_or_default();
    let gib = |bytes: u64| round(bytes as f64 / f64::from(1 << 30), 2);
    (gib(used.pieces_on_workers), gib(used.pieces_in_host))
}

/// Frozen weights that stay on GPUs from step to step.
fn held_gib(engine: &RoundPipe) -> f64 {
    sum_gib(&engine.held_weights())
}

/// Weights that stay on GPUs from forward to backward.
fn kept_weights_gib(engine: &RoundPipe) -> f64 {
    sum_gib(&engine.kept_weights())
}

fn sum_gib(layers: &[(usize, u64)]) -> f64 {
    let bytes: u64 = layers.iter().map(|(_, bytes)| bytes).sum();
    round(bytes as f64 / f64::from(1 << 30), 2)
}

/// Most memory in use of any GPU's arena; 0 without one.
fn gpu_peak(engine: &RoundPipe) -> f64 {
    let gpus = engine
        .ring()
        .workers()
        .iter()
        .filter(|w| w.device().cost_model().kind().is_gpu());
    gpus.map(|w| w.usage().high_water.0).max().unwrap_or(0) as f64 / f64::from(1 << 30)
}

/// Most memory of the process, as the system counts it; else what the engine holds.
fn host_peak(engine: &RoundPipe) -> f64 {
    let peak = machine::host_peak();
    let held = engine.host_bytes().total() as f64 + engine.ring().host_use().peak.0 as f64;
    peak.map_or(held, |bytes| bytes as f64) / f64::from(1 << 30)
}
