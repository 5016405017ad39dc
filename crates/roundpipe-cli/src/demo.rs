//! `roundpipe demo`: a small transformer learns a story, on any machine, in about a minute.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use roundpipe::lr::LrDecay;
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cpu, Cx, DType, LrSchedule, Meta, Optimizer, Params, RngSite, Update, Worker,
};
use roundpipe_models::memory::host_memory;
use roundpipe_models::{DEMO_TEXT, Model, Sampler, Windows, continue_text, preset};

use crate::bounds;

/// The longest text to learn from; a device may have no end.
const MOST_TEXT: u64 = 256 << 20;
/// The longest sample. Nothing is shown before it is complete.
const MOST_SAMPLE: usize = 1 << 16;

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
            "--batch {}: a step would take {peak} of memory, this machine has {memory}",
            self.batch
        );
        let worker = Worker::new(Cpu::new(self.threads)?, peak)?;
        writeln!(
            out,
            "{} parameters, {} layers; {} bytes of text; a step takes {} x {seq} tokens and {peak} beside the weights",
            model.num_params(),
            model.layers.len(),
            text.len(),
            self.batch,
        )?;
        let sampler = Sampler {
            temperature: 0.7,
            seed: self.seed,
            ..Sampler::default()
        };
        let before = continue_text(&model, &worker, &self.prompt, self.sample, sampler)?;
        writeln!(out, "\nbefore training:\n{}\n", printable(&before))?;
        self.train(&model, &worker, &windows, out)?;
        let after = continue_text(&model, &worker, &self.prompt, self.sample, sampler)?;
        writeln!(out, "\nafter training:\n{}", printable(&after))?;
        let used = worker.usage().high_water;
        writeln!(
            out,
            "\npeak memory of a step: {peak} predicted, {used} used"
        )?;
        Ok(())
    }

    /// Peak of a training step, from shapes alone. A sample needs less: one sequence and no
    /// gradients.
    fn predict(&self, model: &Model) -> anyhow::Result<Bytes> {
        let worker = Worker::new(Meta::like(roundpipe::DeviceKind::Cpu), Bytes(1 << 60))?;
        let ids = vec![0i64; self.batch * model.config.max_positions];
        step(
            model,
            &worker,
            self.batch,
            &ids,
            &ids,
            RngSite::default(),
            |_, _| Ok(()),
        )?;
        Ok(worker.usage().high_water)
    }

    fn train(
        &self,
        model: &Model,
        worker: &Worker,
        windows: &Windows,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let rule = AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        };
        // Decay matrices only, as is usual.
        let decays = |_: &str, p: &roundpipe::Param| p.shape().rank() > 1;
        let mut optimizer = Optimizer::new(model.trainable_params(), rule)?.decay_where(decays);
        let decay = LrDecay::Cosine {
            total_steps: self.steps,
            min_ratio: 0.1,
        };
        let schedule = LrSchedule::new(self.lr, self.steps / 10, decay)?;
        let bar = bar(self.steps);
        let start = Instant::now();
        let tokens = self.batch * model.config.max_positions;
        let every = (self.steps / 10).max(1);
        for index in 0..self.steps {
            let (ids, labels) = windows.batch(index, self.batch);
            let site = RngSite {
                seed: self.seed,
                step: index,
                ..RngSite::default()
            };
            let mut loss = f64::NAN;
            step(
                model,
                worker,
                self.batch,
                &ids,
                &labels,
                site,
                |value, grads| {
                    loss = value.item()?;
                    optimizer.add(grads)?;
                    Ok(())
                },
            )?;
            optimizer.step(&Update {
                clip: Some(1.0),
                ..Update::new(schedule.at(index + 1))
            })?;
            let rate = (index + 1) as f64 * tokens as f64 / start.elapsed().as_secs_f64();
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
        bar.finish_and_clear();
        Ok(())
    }
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

/// Forward and backward of one batch; `then` sees the loss and the gradients.
fn step(
    model: &Model,
    worker: &Worker,
    batch: usize,
    ids: &[i64],
    labels: &[i64],
    site: RngSite,
    then: impl FnOnce(&roundpipe::Tensor, &roundpipe::Gradients) -> roundpipe::Result<()>,
) -> roundpipe::Result<()> {
    let mut cx = Cx::train(worker).at(site);
    let dims = [batch, model.config.max_positions];
    let (ids, labels) = (cx.tensor(ids, &dims)?, cx.tensor(labels, &dims)?);
    let loss = model.loss(&mut cx, &ids, &labels)?;
    let grads = cx.backward(&loss)?;
    then(&loss, &grads)
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
