//! A custom layer with a custom operation: weights that are only a sign learn
//! exclusive or.
//!
//! ```text
//! cargo run --release -p roundpipe --example own_layer
//! ```

use std::io::Write;
use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    CustomOp, Cx, DType, HostTensor, Lag, LossReduction, Module, Param, ParamVisitor, Params,
    RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorResult, Update,
};

/// The sign forward; backward as if it had not been there (a straight-through estimator).
struct Sign;

impl CustomOp for Sign {
    fn name(&self) -> &'static str {
        "sign"
    }

    fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> TensorResult<Vec<Tensor>> {
        Ok(vec![cx.sign(&inputs[0])?])
    }

    fn backward(
        &self,
        _: &mut Cx,
        _: &[Tensor],
        _: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> TensorResult<Vec<Option<Tensor>>> {
        Ok(grads.to_vec())
    }
}

/// y = gelu(x sign(W)ᵀ + b).
struct SignLinear {
    weight: Param,
    bias: Param,
}

impl Params for SignLinear {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.param("bias", &self.bias);
    }
}

impl Module for SignLinear {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let (weight, bias) = (cx.get(&self.weight)?, cx.get(&self.bias)?);
        let signs = cx.custom(Arc::new(Sign), &[&weight])?;
        let y = cx.linear(x, &signs[0], Some(&bias))?;
        cx.gelu(&y)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints what the engine logs: warnings, and why devices were left out.
    tracing_subscriber::fmt().without_time().init();
    let mut out = std::io::stdout().lock();
    for ((a, b), have) in [(0, 0), (0, 1), (1, 0), (1, 1)].iter().zip(run(300)?) {
        writeln!(out, "{a} xor {b} = {have:.3}")?;
    }
    Ok(())
}

/// What the model says to each of the four pairs after some steps.
pub fn run(steps: u64) -> roundpipe::Result<Vec<f32>> {
    let mut init = Init::new(1, DType::F32);
    let hidden = SignLinear {
        weight: init.uniform(&[32, 2], 0.1)?,
        bias: init.uniform(&[32], 1.0)?,
    };
    let model = Sequential::new()
        .named("hidden", hidden)
        .named("out", Linear::new(&mut init, 32, 1, true)?);
    let engine = RoundPipe::builder(model)
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(
            RunConfig::new()
                .num_microbatch(2)
                .loss_reduction(LossReduction::Mean),
        )
        .build()?;
    let pairs = HostTensor::from_slice(&[0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], &[4, 2])?;
    let answers = HostTensor::from_slice(&[0.0f32, 1.0, 1.0, 0.0], &[4, 1])?;
    for _ in 0..steps {
        engine.forward_backward(pairs.clone(), answers.clone(), |cx, output, label| {
            cx.mse_loss(&output.tensor()?, &label.tensor()?, Default::default())
        })?;
        engine.update(&Update::new(1e-2), Lag::Zero)?;
    }
    let forward = engine.forward(pairs, &RunConfig::new().requires_grad(false))?;
    Ok(forward.output()?.clone().tensor()?.to_vec()?)
}
