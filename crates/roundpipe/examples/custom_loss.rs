//! A custom loss with two terms, and the outputs beside it.
//!
//! ```text
//! cargo run --release -p roundpipe --example custom_loss
//! ```
//! A model learns a curve and how noisy it is: it gives a mean and the logarithm of a variance, and
//! is judged by how likely they make the data. The second term keeps the logarithm small. The noise
//! to be found is 0.1 where x is negative and 0.4 where it is not.

use std::io::Write;

use roundpipe::lr::LrDecay;
use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Cx, DType, HostTensor, Lag, LossReduction, LrSchedule, RngSite, RoundPipe, Rule, RunConfig,
    Sequential, Tensor, TensorResult, Tree, Update,
};

const BATCH: usize = 240;
const MICROBATCHES: usize = 3;

/// What was learned.
pub struct Learned {
    /// The two terms of every step.
    pub terms: Vec<[f64; 2]>,
    /// The noise found where x is negative, and where it is not.
    pub noise: [f64; 2],
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints what the engine logs: warnings, and why devices were left out.
    tracing_subscriber::fmt().without_time().init();
    let mut out = std::io::stdout().lock();
    let Learned { terms, noise } = run(1000)?;
    for (step, [likelihood, penalty]) in terms.iter().enumerate().step_by(125) {
        writeln!(
            out,
            "step {step:>3}  likelihood {likelihood:>8.4}  penalty {penalty:.4}"
        )?;
    }
    writeln!(
        out,
        "noise found: {:.2} on the left (0.10), {:.2} on the right (0.40)",
        noise[0], noise[1]
    )?;
    Ok(())
}

/// Trains for some steps.
pub fn run(steps: u64) -> roundpipe::Result<Learned> {
    let engine = RoundPipe::builder(model()?)
        .optimizer(Rule::AdamW(AdamW {
            weight_decay: 0.0,
            ..AdamW::default()
        }))
        .run_config(
            RunConfig::new()
                .num_microbatch(MICROBATCHES)
                .loss_reduction(LossReduction::Mean),
        )
        .build()?;
    let schedule = LrSchedule::new(
        1e-2,
        20,
        LrDecay::Cosine {
            total_steps: steps,
            min_ratio: 0.05,
        },
    )?;
    let (mut terms, mut last) = (Vec::new(), None);
    for step in 0..steps {
        let (x, y) = batch(step)?;
        let trained = engine
            .train(x.clone())
            .labels(y)
            .loss(loss)
            .return_outputs()
            .run()?;
        terms.push([trained.losses.each()[0], trained.losses.each()[1]]);
        last = trained.outputs.map(|outputs| (x, outputs));
        engine.update(
            &Update {
                clip: Some(1.0),
                ..Update::new(schedule.at(step + 1))
            },
            Lag::One,
        )?;
    }
    engine.synchronize()?;
    let (x, outputs) = last.expect("there was a step");
    Ok(Learned {
        terms,
        noise: noise(&x, outputs)?,
    })
}

/// Minus the logarithm of the likelihood, and a penalty, each as a mean over samples.
fn loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Vec<Tensor>> {
    let (output, y) = (output.tensor()?, label.tensor()?);
    let mean = cx.narrow(&output, 1, 0, 1)?;
    let log_var = cx.narrow(&output, 1, 1, 1)?;
    // 0.5 * ((y - mean)² / variance + log variance)
    let off = cx.sub(&y, &mean)?;
    let squared = cx.square(&off)?;
    let minus = cx.neg(&log_var)?;
    let precision = cx.exp(&minus)?;
    let weighted = cx.mul(&squared, &precision)?;
    let sum = cx.add(&weighted, &log_var)?;
    let likelihood = cx.mean_all(&sum)?;
    let penalty = cx.square(&log_var)?;
    let penalty = cx.mean_all(&penalty)?;
    Ok(vec![
        cx.affine(&likelihood, 0.5, 0.0)?,
        cx.affine(&penalty, 1e-3, 0.0)?,
    ])
}

fn model() -> TensorResult<Sequential> {
    let mut init = Init::new(4, DType::F32);
    let mut tanh = |model: Sequential, inputs: usize| -> TensorResult<Sequential> {
        let linear = Linear::new(&mut init, inputs, 48, true)?;
        Ok(model
            .with(linear)
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.tanh(x))))
    };
    let model = tanh(Sequential::new(), 1)?;
    let model = tanh(model, 48)?;
    Ok(model.with(Linear::new(&mut init, 48, 2, true)?))
}

/// A sine with noise that depends on the side.
fn batch(step: u64) -> TensorResult<(HostTensor, HostTensor)> {
    let key = RngSite {
        seed: 8,
        step,
        ..RngSite::default()
    }
    .key();
    let uniform = |i: usize| key.word(i as u64) as f32 / u32::MAX as f32 * 2.0 - 1.0;
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    for i in 0..BATCH {
        let x = uniform(i);
        // The sum of twelve uniform numbers is close to normal; in [-1, 1) each has a variance of a
        // third.
        let normal = (0..12).map(|k| uniform(BATCH + 12 * i + k)).sum::<f32>() / 2.0;
        xs.push(x);
        ys.push((3.0 * x).sin() + normal * if x < 0.0 { 0.1 } else { 0.4 });
    }
    Ok((
        HostTensor::from_slice(&xs, &[BATCH, 1])?,
        HostTensor::from_slice(&ys, &[BATCH, 1])?,
    ))
}

/// The mean deviation that the model states on either side, away from the border.
fn noise(x: &HostTensor, outputs: Tree<HostTensor>) -> roundpipe::Result<[f64; 2]> {
    let log_vars = outputs.tensor()?.to_f64_vec()?;
    let (mut sums, mut counts) = ([0.0; 2], [0.0; 2]);
    for (x, row) in x
        .to_f64_vec()?
        .iter()
        .zip(log_vars.chunks(2))
        .filter(|(x, _)| x.abs() > 0.25)
    {
        let side = usize::from(*x >= 0.0);
        sums[side] += (0.5 * row[1]).exp();
        counts[side] += 1.0;
    }
    Ok([sums[0] / counts[0], sums[1] / counts[1]])
}
