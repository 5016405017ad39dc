//! The training loop: the same script on one worker and on eight, with the same losses to the last
//! bit.
//!
//! ```text
//! cargo run --release -p roundpipe --example training_loop -- --workers 4
//! ```
//! The model is bf16 with f32 copies for the optimizer; it tells which of three spiral arms a point
//! lies on.

use std::f64::consts::TAU;
use std::io::Write;
use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Cpu, Cx, DType, Device, HostTensor, Lag, LossReduction, RngSite, RoundPipe, Rule, RunConfig,
    Sequential, Tensor, TensorResult, Tree, Update,
};

/// One more than the most workers that are to be kept busy. Fixed, so that the number of workers
/// means nothing.
const MICROBATCHES: usize = 9;
const BATCH: usize = 18 * MICROBATCHES;
const CLASSES: usize = 3;
const WIDTH: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints what the engine logs: warnings, and why devices were left out.
    tracing_subscriber::fmt().without_time().init();
    let workers = workers(&mut std::env::args().skip(1))?;
    let mut out = std::io::stdout().lock();
    let losses = run(workers, 200)?;
    for (step, loss) in losses
        .iter()
        .enumerate()
        .filter(|(step, _)| step % 20 == 0 || *step == 199)
    {
        writeln!(
            out,
            "step {step:>3}  loss {loss:.6}  bits {:016x}",
            loss.to_bits()
        )?;
    }
    writeln!(
        out,
        "on {workers} workers; any other number gives the same lines"
    )?;
    Ok(())
}

fn workers(args: &mut dyn Iterator<Item = String>) -> Result<usize, String> {
    match (args.next().as_deref(), args.next()) {
        (None, _) => Ok(2),
        (Some("--workers"), Some(count)) => match count.parse() {
            Ok(count @ 1..=64) => Ok(count),
            _ => Err(format!(
                "--workers {count}: a number from 1 to 64 is needed"
            )),
        },
        (Some(other), _) => Err(format!("{other}: the only option is --workers N")),
    }
}

/// Trains on `workers` workers and gives the loss of every step.
pub fn run(workers: usize, steps: u64) -> roundpipe::Result<Vec<f64>> {
    let devices = Cpu::workers(workers, None)?
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>);
    let engine = RoundPipe::builder(model()?)
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(
            RunConfig::new()
                .num_microbatch(MICROBATCHES)
                .loss_reduction(LossReduction::Mean),
        )
        .devices(devices)
        .build()?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let (points, arms) = batch(step)?;
        losses.push(engine.forward_backward(points, arms, loss)?.total());
        // Lag 1: the update runs beside the next step, which reads the weights from before it.
        engine.update(
            &Update {
                clip: Some(1.0),
                ..Update::new(3e-3)
            },
            Lag::One,
        )?;
    }
    engine.synchronize()?;
    Ok(losses)
}

/// The mean over a microbatch; `LossReduction::Mean` makes it one over the batch.
fn loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    cx.cross_entropy(&output.tensor()?, &label.tensor()?, Default::default())
}

fn model() -> TensorResult<Sequential> {
    let mut init = Init::new(7, DType::BF16);
    let mut model = Sequential::new().with(Linear::new(&mut init, 2, WIDTH, true)?);
    for _ in 0..3 {
        model = model
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.gelu(x)))
            .with(Linear::new(&mut init, WIDTH, WIDTH, true)?);
    }
    let head = Linear::new(&mut init, WIDTH, CLASSES, true)?;
    Ok(model
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.gelu(x)))
        .with(head))
}

/// Points on three spiral arms.
fn batch(step: u64) -> TensorResult<(HostTensor, HostTensor)> {
    let key = RngSite {
        seed: 5,
        step,
        ..RngSite::default()
    }
    .key();
    let (mut points, mut arms) = (Vec::new(), Vec::new());
    for i in 0..BATCH as u64 {
        let arm = i % CLASSES as u64;
        let along = f64::from(key.word(i)) / f64::from(u32::MAX);
        let angle = 3.0 * along + TAU * arm as f64 / CLASSES as f64;
        points.extend([2.0 * along * angle.cos(), 2.0 * along * angle.sin()]);
        arms.push(arm as i64);
    }
    let points = HostTensor::from_f64s(&points, DType::BF16, &[BATCH, 2])?;
    Ok((points, HostTensor::from_slice(&arms, &[BATCH])?))
}
