//! What checkpoints cost: a model with so much state is trained, a stretch of steps with a save and
//! a stretch without in turn, and the times of both are compared.
//!
//! ```text
//! cargo run --release -p roundpipe --example save_cost -- --gib 1 --steps 20 --rows 512 --dir DIR
//! ```
//! The state is what a checkpoint holds: 12 bytes per bf16 parameter with AdamW, 14 with `--lag 1`.
//! Of `--rows` a step takes its length. Without GPUs the processor computes.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Checkpoints, Cx, DType, HostTensor, Lag, Result, RoundPipe, Rule, RunConfig, Sequential,
    Tensor, Update,
};

/// What is measured.
pub struct Settings {
    /// Bytes of state, without the older weights of lag 1.
    pub bytes: u64,
    /// Inputs and outputs of each layer.
    pub width: usize,
    /// Samples of a batch.
    pub rows: usize,
    /// Steps of a stretch.
    pub steps: u64,
    /// Pairs of stretches.
    pub rounds: u64,
    /// The lag of updates.
    pub lag: Lag,
    /// Where checkpoints are written.
    pub dir: PathBuf,
}

/// A stretch with a save and one without.
pub struct Round {
    /// The stretch without.
    pub without_seconds: f64,
    /// The stretch with a save, up to its end.
    pub with_seconds: f64,
    /// From the first byte of the checkpoint to its end.
    pub save_seconds: f64,
    /// How long updates waited for it.
    pub held_up_seconds: f64,
    /// The size of the checkpoint.
    pub saved_bytes: u64,
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().without_time().init();
    let mut settings = Settings {
        bytes: 1 << 30,
        width: 2048,
        rows: 512,
        steps: 20,
        rounds: 3,
        lag: Lag::One,
        dir: std::env::temp_dir().join("save_cost"),
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("{name}: a value is needed"))?;
        match name.as_str() {
            "--gib" => settings.bytes = (value.parse::<f64>()? * (1u64 << 30) as f64) as u64,
            "--width" => settings.width = value.parse()?,
            "--rows" => settings.rows = value.parse()?,
            "--steps" => settings.steps = value.parse()?,
            "--rounds" => settings.rounds = value.parse()?,
            "--lag" => settings.lag = if value == "0" { Lag::Zero } else { Lag::One },
            "--dir" => settings.dir = value.into(),
            _ => return Err(format!("{name} is unknown").into()),
        }
    }
    let mut out = std::io::stdout().lock();
    let (mut with, mut without) = (0.0, 0.0);
    run(&settings, &mut |round| {
        with += round.with_seconds;
        without += round.without_seconds;
        let _ = writeln!(
            out,
            "{:.2} s a step without a save, {:.2} s with one in {}; {:.2} GB in {:.1} s, updates held up \
             {:.2} s",
            round.without_seconds / settings.steps as f64,
            round.with_seconds / settings.steps as f64,
            settings.steps,
            round.saved_bytes as f64 / 1e9,
            round.save_seconds,
            round.held_up_seconds,
        );
    })?;
    writeln!(
        out,
        "a save every {} steps costs {:.2}% of the time",
        settings.steps,
        (with / without - 1.0) * 100.0
    )?;
    Ok(())
}

/// Trains and measures; `show` gets each round as it ends.
pub fn run(settings: &Settings, show: &mut dyn FnMut(Round)) -> Result<()> {
    let engine = engine(settings)?;
    let x = HostTensor::full(DType::BF16, &[settings.rows, settings.width], 0.01)?;
    let y = HostTensor::full(DType::BF16, &[settings.rows, settings.width], 0.02)?;
    let step = || -> Result<()> {
        engine.forward_backward(x.clone(), y.clone(), |cx, output, label| {
            cx.mse_loss(&output.tensor()?, &label.tensor()?, Default::default())
        })?;
        engine.update(&Update::new(1e-4), settings.lag)?;
        Ok(())
    };
    let checkpoints = Checkpoints::open(&settings.dir)?.keep_last(1);
    // The first steps allocate, compile and measure.
    for _ in 0..settings.steps.min(5) {
        step()?;
    }
    for round in 0..settings.rounds {
        let stretch = |save: bool| -> Result<(f64, Option<Round>)> {
            engine.synchronize()?;
            let start = Instant::now();
            // Behind a step, as in a run: at lag 1 its update is still under way.
            step()?;
            let saving = match save {
                true => Some(checkpoints.save(&engine, round, "")?),
                false => None,
            };
            for _ in 1..settings.steps {
                step()?;
            }
            engine.synchronize()?;
            // A save that is longer than the stretch counts in full.
            let report = saving.map(|saving| saving.wait()).transpose()?;
            let seconds = start.elapsed().as_secs_f64();
            let round = report.map(|report| Round {
                without_seconds: 0.0,
                with_seconds: seconds,
                save_seconds: report.seconds,
                held_up_seconds: report.held_up_seconds,
                saved_bytes: report.bytes,
            });
            Ok((seconds, round))
        };
        let (without_seconds, _) = stretch(false)?;
        if let (_, Some(measured)) = stretch(true)? {
            show(Round {
                without_seconds,
                ..measured
            });
        }
    }
    Ok(())
}

fn engine(settings: &Settings) -> Result<RoundPipe> {
    let mut init = Init::new(1, DType::BF16);
    let layer_bytes = 12 * (settings.width * settings.width) as u64;
    let mut model = Sequential::new();
    for _ in 0..settings.bytes.div_ceil(layer_bytes).max(1) {
        let linear = Linear::new(&mut init, settings.width, settings.width, false)?;
        model = model.with(linear);
        model = model.with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)));
    }
    RoundPipe::builder(model)
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(RunConfig::new().num_microbatch(2))
        .build()
}
