//! Two models on one ring of workers: the second takes the first one's outputs microbatch by
//! microbatch as they come, and the first one's backward takes the second one's gradients the same
//! way. No thread waits in between.
//!
//! ```text
//! cargo run --release -p roundpipe --example chained
//! ```
//! An encoder squeezes eight numbers into two, a decoder restores them. A single model of the same
//! layers shows the same losses.

use std::io::Write;
use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Cpu, Cx, DType, Device, HostTensor, Lag, LossReduction, MergeOutput, Ring, RingOptions,
    RngSite, RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorResult, Tree, Update,
};

const BATCH: usize = 64;
const FEATURES: usize = 8;
const LR: f64 = 0.01;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints what the engine logs: warnings, and why devices were left out.
    tracing_subscriber::fmt().without_time().init();
    let mut out = std::io::stdout().lock();
    let (two, one) = run(2, 200)?;
    for (step, (two, one)) in two.iter().zip(&one).enumerate().step_by(25) {
        writeln!(
            out,
            "step {step:>3}  two models {two:.6}  one model {one:.6}"
        )?;
    }
    writeln!(
        out,
        "all {} losses are the same bits: {}",
        two.len(),
        two == one
    )?;
    Ok(())
}

/// The losses of two chained models, and of one that has the layers of both.
pub fn run(workers: usize, steps: u64) -> roundpipe::Result<(Vec<f64>, Vec<f64>)> {
    let devices = Cpu::workers(workers, None)?
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>);
    let ring = Ring::new(&devices.collect::<Vec<_>>(), &RingOptions::default())?;
    Ok((chained(&ring, steps)?, single(&ring, steps)?))
}

fn engine(model: Sequential, ring: &Ring) -> roundpipe::Result<RoundPipe> {
    RoundPipe::builder(model)
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(
            RunConfig::new()
                .num_microbatch(4)
                .loss_reduction(LossReduction::Mean),
        )
        .ring(ring)
        .build()
}

fn chained(ring: &Ring, steps: u64) -> roundpipe::Result<Vec<f64>> {
    let mut init = Init::new(3, DType::F32);
    let encoder = engine(encoder(Sequential::new(), &mut init)?, ring)?;
    let decoder = engine(decoder(Sequential::new(), &mut init)?, ring)?;
    let unmerged = RunConfig::new().merge_output(MergeOutput::Off);
    let mut losses = Vec::new();
    for step in 0..steps {
        let data = batch(step)?;
        let encoded = encoder.forward(data.clone(), &unmerged)?;
        let decoded = decoder
            .train(encoded.unmerged())
            .labels(data)
            .loss(loss)
            .config(RunConfig::new().input_grads(true))
            .run()?;
        losses.push(decoded.losses.total());
        if let Some(grads) = decoded.input_grads {
            encoded.backward_from(&grads)?;
        }
        decoder.update(&Update::new(LR), Lag::Zero)?;
        encoder.update(&Update::new(LR), Lag::Zero)?;
    }
    Ok(losses)
}

fn single(ring: &Ring, steps: u64) -> roundpipe::Result<Vec<f64>> {
    let mut init = Init::new(3, DType::F32);
    let both = decoder(encoder(Sequential::new(), &mut init)?, &mut init)?;
    let both = engine(both, ring)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let data = batch(step)?;
        losses.push(both.forward_backward(data.clone(), data, loss)?.total());
        both.update(&Update::new(LR), Lag::Zero)?;
    }
    Ok(losses)
}

/// The mean over a microbatch.
fn loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    cx.mse_loss(&output.tensor()?, &label.tensor()?, Default::default())
}

fn encoder(model: Sequential, init: &mut Init) -> TensorResult<Sequential> {
    Ok(model
        .with(Linear::new(init, FEATURES, 32, true)?)
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.gelu(x)))
        .with(Linear::new(init, 32, 2, true)?))
}

fn decoder(model: Sequential, init: &mut Init) -> TensorResult<Sequential> {
    Ok(model
        .with(Linear::new(init, 2, 32, true)?)
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.gelu(x)))
        .with(Linear::new(init, 32, FEATURES, true)?))
}

/// Eight numbers that depend on two.
fn batch(step: u64) -> TensorResult<HostTensor> {
    let key = RngSite {
        seed: 9,
        step,
        ..RngSite::default()
    }
    .key();
    let uniform = |i: usize| key.word(i as u64) as f32 / u32::MAX as f32 * 2.0 - 1.0;
    let mut rows = Vec::new();
    for i in 0..BATCH {
        let (a, b) = (uniform(2 * i), uniform(2 * i + 1));
        rows.extend([a, b, a + b, a - b, a * b, a * a, b * b, 0.5 * a]);
    }
    HostTensor::from_slice(&rows, &[BATCH, FEATURES])
}
