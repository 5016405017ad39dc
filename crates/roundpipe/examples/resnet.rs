//! A residual network of custom layers learns to tell where an image is bright.
//!
//! ```text
//! cargo run --release -p roundpipe --example resnet
//! ```
//! Nothing here knows about workers: `Residual` is parameters and a forward, the engine does the
//! rest, running statistics of batch norm included.

use std::io::Write;

use roundpipe::kernel::{ConvSpec, PoolSpec};
use roundpipe::nn::{BatchNorm2d, Conv2d, Func, Init, Linear};
use roundpipe::optim::Sgd;
use roundpipe::{
    Cx, DType, HostTensor, Lag, LossReduction, Module, ParamVisitor, Params, RngSite, RoundPipe,
    Rule, RunConfig, Sequential, Tensor, TensorResult, Update,
};

const BATCH: usize = 32;
const MICROBATCHES: usize = 2;
const SIDE: u64 = 12;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints what the engine logs: warnings, and why devices were left out.
    tracing_subscriber::fmt().without_time().init();
    let mut out = std::io::stdout().lock();
    let (losses, accuracy) = run(40)?;
    for (step, loss) in losses.iter().enumerate().step_by(5) {
        writeln!(out, "step {step:>2}  loss {loss:.4}")?;
    }
    writeln!(
        out,
        "{:.1}% of 256 unseen images are classified correctly",
        100.0 * accuracy
    )?;
    Ok(())
}

/// Trains, and gives the losses and the share of unseen images that are classified correctly.
pub fn run(steps: u64) -> roundpipe::Result<(Vec<f64>, f64)> {
    let engine = RoundPipe::builder(resnet()?)
        .optimizer(Rule::Sgd(Sgd {
            momentum: 0.9,
            ..Sgd::default()
        }))
        .run_config(
            RunConfig::new()
                .num_microbatch(MICROBATCHES)
                .loss_reduction(LossReduction::Mean),
        )
        .build()?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let (pixels, quadrants) = images(step, BATCH)?;
        let loss = engine.forward_backward(pixels, quadrants, |cx, output, label| {
            cx.cross_entropy(&output.tensor()?, &label.tensor()?, Default::default())
        })?;
        losses.push(loss.total());
        engine.update(&Update::new(0.05), Lag::Zero)?;
    }
    Ok((losses, accuracy(&engine)?))
}

/// The share of unseen images whose largest output is the right one.
fn accuracy(engine: &RoundPipe) -> roundpipe::Result<f64> {
    engine.set_training(false);
    let (pixels, quadrants) = images(u64::MAX, 256)?;
    let forward = engine.forward(pixels, &RunConfig::new().requires_grad(false))?;
    let logits = forward.output()?.clone().tensor()?.to_vec::<f32>()?;
    let best = |row: &[f32]| {
        (0..row.len())
            .max_by(|a, b| row[*a].total_cmp(&row[*b]))
            .unwrap_or(0) as i64
    };
    let labels = quadrants.to_vec::<i64>()?;
    let right = logits
        .chunks(4)
        .zip(&labels)
        .filter(|(row, label)| best(row) == **label)
        .count();
    Ok(right as f64 / labels.len() as f64)
}

/// Two convolutions with batch norm, and a way around them.
struct Residual {
    conv1: Conv2d,
    norm1: BatchNorm2d,
    conv2: Conv2d,
    norm2: BatchNorm2d,
    short: Option<Conv2d>,
}

impl Residual {
    fn new(init: &mut Init, inputs: usize, outputs: usize, stride: usize) -> TensorResult<Self> {
        let spec = |stride, pad| ConvSpec {
            stride: [stride; 2],
            padding: [pad; 2],
            ..ConvSpec::default()
        };
        let short = match inputs != outputs || stride != 1 {
            true => Some(Conv2d::new(
                init,
                inputs,
                outputs,
                1,
                false,
                spec(stride, 0),
            )?),
            false => None,
        };
        Ok(Self {
            conv1: Conv2d::new(init, inputs, outputs, 3, false, spec(stride, 1))?,
            norm1: BatchNorm2d::new(init, outputs)?,
            conv2: Conv2d::new(init, outputs, outputs, 3, false, spec(1, 1))?,
            norm2: BatchNorm2d::new(init, outputs)?,
            short,
        })
    }
}

impl Params for Residual {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("conv1", &self.conv1);
        visit.child("norm1", &self.norm1);
        visit.child("conv2", &self.conv2);
        visit.child("norm2", &self.norm2);
        if let Some(short) = &self.short {
            visit.child("short", short);
        }
    }
}

impl Module for Residual {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.conv1.forward(cx, x)?;
        let y = self.norm1.forward(cx, &y)?;
        let y = cx.relu(&y)?;
        let y = self.conv2.forward(cx, &y)?;
        let y = self.norm2.forward(cx, &y)?;
        let around = match &self.short {
            Some(conv) => conv.forward(cx, x)?,
            None => x.clone(),
        };
        let sum = cx.add(&y, &around)?;
        cx.relu(&sum)
    }
}

fn resnet() -> TensorResult<Sequential> {
    let mut init = Init::new(3, DType::F32);
    let stem = ConvSpec {
        padding: [1; 2],
        ..ConvSpec::default()
    };
    let mean = |cx: &mut Cx, x: &Tensor| {
        let y = cx.global_avg_pool2d(x)?;
        cx.flatten(&y, 1, -1)
    };
    Ok(Sequential::new()
        .named("stem", Conv2d::new(&mut init, 1, 8, 3, true, stem)?)
        .named(
            "pool",
            Func(|cx: &mut Cx, x: &Tensor| cx.max_pool2d(x, PoolSpec::window([2, 2]))),
        )
        .named("block1", Residual::new(&mut init, 8, 8, 1)?)
        .named("block2", Residual::new(&mut init, 8, 16, 2)?)
        .named("mean", Func(mean))
        .named("head", Linear::new(&mut init, 16, 4, true)?))
}

/// Noise with one bright quadrant, and which it is.
fn images(step: u64, count: usize) -> TensorResult<(HostTensor, HostTensor)> {
    let key = RngSite {
        seed: 21,
        step,
        ..RngSite::default()
    }
    .key();
    let (mut pixels, mut quadrants) = (Vec::new(), Vec::new());
    for n in 0..count as u64 {
        let quadrant = u64::from(key.word(1_000_000 + n)) % 4;
        quadrants.push(quadrant as i64);
        for at in 0..SIDE * SIDE {
            let (row, column) = (at / SIDE, at % SIDE);
            let bright = row / (SIDE / 2) * 2 + column / (SIDE / 2) == quadrant;
            let noise = key.word(n * SIDE * SIDE + at) as f32 / u32::MAX as f32 - 0.5;
            pixels.push(noise + f32::from(u8::from(bright)));
        }
    }
    let side = SIDE as usize;
    let pixels = HostTensor::from_slice(&pixels, &[count, 1, side, side])?;
    Ok((pixels, HostTensor::from_slice(&quadrants, &[count])?))
}
