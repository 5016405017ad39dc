//! `roundpipe demo`: a small transformer learns a story, on any machine, in about a minute, through
//! the engine that trains large ones.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use roundpipe::lr::LrDecay;
use roundpipe::optim::AdamW;
use roundpipe::trace::{Category, Span};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, DeviceKind, ExecutePlan, HostTensor, Inputs, Lag, LossReduction,
    LrSchedule, Meta, ParamGroup, Params, PlanKind, RoundPipe, RunConfig, Update, Worker,
};
use roundpipe_models::memory::host_memory;
use roundpipe_models::{DEMO_TEXT, Model, Sampler, Windows, continue_text, preset};

use crate::bounds;

/// The longest text to learn from; a device may have no end.
const MOST_TEXT: u64 = 256 << 20;
/// The longest sample. Nothing is shown before it is complete.
const MOST_SAMPLE: usize = 1 << 16;

/// Fixed, so that the number of workers changes no bit of the losses.
const MICROBATCHES: usize = 4;
/// More would only wait for each other.
const MOST_WORKERS: usize = 64;

/// Train a small transformer on a text and show what it learned
#[derive(Debug, clap::Args)]
pub struct DemoCmd {
    /// Text file to learn from [default: a story that ships with the program]
    #[arg(long)]
    text: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = DemoCmd::default().steps)]
    steps: u64,
    /// Sequences per step
    #[arg(long, default_value_t = DemoCmd::default().batch)]
    batch: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = DemoCmd::default().lr)]
    lr: f64,
    /// Seed of weights, batches and samples
    #[arg(long, default_value_t = DemoCmd::default().seed)]
    seed: u64,
    /// Threads [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    /// Workers that the stages of the model go round; they share the threads
    #[arg(long, default_value_t = DemoCmd::default().workers)]
    workers: usize,
    /// How the samples before and after training begin
    #[arg(long, default_value_t = DemoCmd::default().prompt)]
    prompt: String,
    /// Length of the samples in bytes
    #[arg(long, default_value_t = DemoCmd::default().sample)]
    sample: usize,
}

impl Default for DemoCmd {
    fn default() -> Self {
        Self {
            text: None,
            steps: 300,
            batch: 16,
            lr: 3e-3,
            seed: 1,
            threads: None,
            workers: 2,
            prompt: "The cat ".into(),
            sample: 200,
        }
    }
}

impl DemoCmd {
    pub fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        ensure!(
            self.steps > 0 && self.batch > 0,
            "--steps and --batch must be at least 1"
        );
        bounds::threads("--threads", self.threads)?;
        ensure!(
            (1..=MOST_WORKERS).contains(&self.workers),
            "--workers must be from 1 to {MOST_WORKERS}"
        );
        ensure!(
            self.sample <= MOST_SAMPLE,
            "--sample must be at most {MOST_SAMPLE}"
        );
        let config = preset("tiny")?;
        let seq = config.max_positions;
        let memory = host_memory();
        bounds::tokens(self.batch, seq, memory)?;
        let text = match &self.text {
            Some(path) => read_text(path)?,
            None => DEMO_TEXT.to_owned(),
        };
        let windows = Windows::new(&text, seq, self.seed)?;
        let model = Model::random(config, DType::F32, self.seed)?;
        let peak = self.predict(&model)?;
        ensure!(
            peak <= memory,
            "--batch {}: a microbatch would take {peak} of memory, this machine has {memory}",
            self.batch
        );
        let sampling = Worker::new(Cpu::new(self.threads)?, peak)?;
        let engine = self.engine(&model)?;
        writeln!(
            out,
            "{} parameters, {} layers; {} bytes of text; a step takes {} x {seq} tokens in {} microbatches on {} workers",
            model.num_params(),
            model.layers.len(),
            text.len(),
            self.batch,
            self.batch.min(MICROBATCHES),
            self.workers,
        )?;
        let sampler = Sampler {
            temperature: 0.7,
            seed: self.seed,
            ..Sampler::default()
        };
        let before = continue_text(&model, &sampling, &self.prompt, self.sample, sampler)?;
        writeln!(out, "\nbefore training:\n{}\n", printable(&before))?;
        self.train(&engine, seq, &windows, out)?;
        let after = continue_text(&model, &sampling, &self.prompt, self.sample, sampler)?;
        writeln!(out, "\nafter training:\n{}", printable(&after))?;
        let workers = engine.ring().workers().iter();
        let used = workers.map(|worker| worker.usage().high_water).max();
        writeln!(
            out,
            "\npeak memory: {} of a worker; {} of weights, gradients and optimizer state",
            used.unwrap_or_default(),
            Bytes(engine.host_bytes().total() as u64),
        )?;
        Ok(())
    }

    /// Peak of a microbatch in training, from shapes alone. A sample needs less: one sequence and no
    /// gradients.
    fn predict(&self, model: &Model) -> anyhow::Result<Bytes> {
        let worker = Worker::new(Meta::like(DeviceKind::Cpu), Bytes(1 << 60))?;
        let rows = self.batch.div_ceil(MICROBATCHES);
        let dims = [rows, model.config.max_positions];
        let mut cx = Cx::train(&worker);
        let ids = cx.tensor(&vec![0i64; dims[0] * dims[1]], &dims)?;
        let loss = model.loss(&mut cx, &ids, &ids)?;
        let _grads = cx.backward(&loss)?;
        Ok(worker.usage().high_water)
    }

    fn engine(&self, model: &Model) -> anyhow::Result<RoundPipe> {
        let workers = Cpu::workers(self.workers, self.threads)?;
        let rule = AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        };
        let engine = RoundPipe::builder(model.layers.clone())
            .name("demo")
            .seed(self.seed)
            .optimizer(rule)
            // Decay matrices only, as is usual.
            .groups([ParamGroup::filter(|_, shape| shape.rank() < 2).weight_decay(0.0)])
            .devices(workers.into_iter().map(|cpu| cpu as Arc<dyn Device>))
            .run_config(
                RunConfig::new()
                    .num_microbatch(MICROBATCHES)
                    .loss_reduction(LossReduction::Mean)
                    // Workers that share the threads of a CPU gain nothing by stages, so the planner
                    // would make one. This shows what GPUs get.
                    .execute_plan(ExecutePlan::from_sizes(
                        PlanKind::Fused,
                        &[2, 2],
                        &[2, 2, 2],
                    )),
            )
            .build()?;
        Ok(engine)
    }

    fn train(
        &self,
        engine: &RoundPipe,
        seq: usize,
        windows: &Windows,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let decay = LrDecay::Cosine {
            total_steps: self.steps,
            min_ratio: 0.1,
        };
        let schedule = LrSchedule::new(self.lr, self.steps / 10, decay)?;
        let bar = bar(self.steps);
        let start = Instant::now();
        let every = (self.steps / 10).max(1);
        engine.trace().on();
        for index in 0..self.steps {
            let (ids, labels) = windows.batch(index, self.batch);
            let rows = |values: &[i64]| HostTensor::from_slice(values, &[self.batch, seq]);
            let inputs = Inputs::new()
                .named("ids", rows(&ids)?)
                .named("labels", rows(&labels)?);
            let loss = engine.train(inputs).run()?.losses.total();
            let update = Update {
                clip: Some(1.0),
                ..Update::new(schedule.at(index + 1))
            };
            engine.update(&update, Lag::One)?;
            if index == 0 {
                engine.synchronize()?;
                bar.suspend(|| writeln!(out, "{}", stages(engine)))?;
                engine.trace().off();
            }
            let tokens = (index + 1) as f64 * (self.batch * seq) as f64;
            let rate = tokens / start.elapsed().as_secs_f64();
            bar.set_message(format!("loss {loss:.3}  {rate:.0} tokens/s"));
            bar.inc(1);
            if (index + 1) % every == 0 || index == 0 {
                bar.suspend(|| {
                    writeln!(
                        out,
                        "step {:>5}  loss {loss:.4}  {rate:.0} tokens/s",
                        index + 1
                    )
                })?;
            }
        }
        // The samples that follow read the newest weights.
        engine.synchronize()?;
        bar.finish_and_clear();
        Ok(())
    }
}

/// Which layers ran as a stage, and where, from the trace of a step.
fn stages(engine: &RoundPipe) -> String {
    let mut stages: BTreeMap<usize, Vec<Span>> = BTreeMap::new();
    for span in engine.trace().spans() {
        if let (Some(stage), Some(_)) = (span.stage, span.layer) {
            stages.entry(stage).or_default().push(span);
        }
    }
    let lines: Vec<String> = stages.values().map(|spans| stage_line(spans)).collect();
    format!("stages of a step:\n{}\n", lines.join("\n"))
}

fn stage_line(spans: &[Span]) -> String {
    let layers = || spans.iter().filter_map(|span| span.layer);
    let has = |category| spans.iter().any(|span| span.category == category);
    let pass = match (has(Category::Backward), has(Category::Recompute)) {
        (false, _) => "forward",
        (true, false) => "forward, loss, backward",
        (true, true) => "recompute, backward",
    };
    format!(
        "  layers {}-{} on {}: {pass}",
        layers().min().unwrap_or_default(),
        layers().max().unwrap_or_default(),
        spans[0].track.worker_name,
    )
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let place = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MOST_TEXT + 1).read_to_end(&mut bytes))
        .with_context(place)?;
    ensure!(
        bytes.len() as u64 <= MOST_TEXT,
        "{}: it is longer than {}",
        place(),
        Bytes(MOST_TEXT)
    );
    String::from_utf8(bytes).with_context(place)
}

/// A bar on a terminal, nothing elsewhere.
fn bar(steps: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len}  {msg}  {eta} left");
    ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Control characters of an untrained model would upset a terminal.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if (c.is_control() && c != '\n') || c == '\u{fffd}' {
                '.'
            } else {
                c
            }
        })
        .collect()
}
