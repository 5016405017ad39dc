//! A loss of the merged outputs, outside the engine: the bits of a gradient written by hand.

use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::ops::{CrossEntropy, Reduction};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, HostTensor, Layer, MergeOutput, ParamVisitor, Params, RoundPipe,
    RunConfig, Sequential, Tensor, TensorError, TensorResult, Tree, Worker,
};
use roundpipe_tensor::SimWorld;
use roundpipe_tensor::sim::SimConfig;

use crate::invisible::{self, Way};
use crate::models;

/// A mean over the whole batch: microbatches of unequal size cannot add it up.
fn mean_of_tokens(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    let logits = cx.reshape(&output.tensor()?, &[-1, models::VOCAB as isize])?;
    let label = cx.reshape(&label.tensor()?, &[-1])?;
    let options = CrossEntropy {
        reduction: Reduction::Mean,
        ..CrossEntropy::default()
    };
    cx.cross_entropy(&logits, &label, options)
}

/// The loss and the gradient of the output, by a context of the test's own.
fn by_hand(output: &HostTensor, labels: &HostTensor) -> (u64, HostTensor) {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(16)).unwrap();
    let mut cx = Cx::train(&worker);
    let output = cx.input(&models::upload(&worker, output)).unwrap();
    let labels = models::upload(&worker, labels);
    let loss = mean_of_tokens(&mut cx, output.clone().into(), labels.into()).unwrap();
    let value = loss.item().unwrap().to_bits();
    let grad = cx.backward(&loss).unwrap().take(&output).unwrap();
    let grad = HostTensor::from_f64s(&grad.to_f64_vec().unwrap(), grad.dtype(), grad.dims());
    (value, grad.unwrap())
}

/// Cpu or simulated workers.
pub fn devices(sim: bool, count: usize) -> Vec<Arc<dyn Device>> {
    if !sim {
        return models::cpus(count);
    }
    let config = SimConfig {
        seed: 3,
        memory: Bytes::mib(128),
        ..SimConfig::default()
    };
    let workers = SimWorld::new(config).unwrap().workers(count);
    workers.into_iter().map(|worker| worker as _).collect()
}

/// `loss` and `backward` are the lines that a user would write by hand, to the bit, wherever the
/// model runs.
#[test]
fn a_loss_of_the_outputs_equals_a_gradient_written_by_hand() {
    for dtype in [DType::F32, DType::BF16] {
        let (inputs, labels) = models::tokens(0, 7, dtype);
        let mut first = None;
        for (sim, workers) in [(false, 1), (false, 3), (true, 2)] {
            let way = Way {
                microbatches: 3,
                ..Way::threaded(devices(sim, workers))
            };
            let engine = || invisible::engine(&models::transformer(dtype, true), &way);
            let config = RunConfig::new();
            let (written, called) = (engine(), engine());
            let forward = written.forward(inputs.clone(), &config).unwrap();
            let output = forward.output().unwrap().clone().tensor().unwrap();
            let (value, grad) = by_hand(&output, &labels);
            forward.backward(grad).unwrap();
            let loss = called
                .forward(inputs.clone(), &config)
                .unwrap()
                .loss(labels.clone(), mean_of_tokens)
                .unwrap();
            assert_eq!(loss.value().to_bits(), value, "{dtype}, {workers} workers");
            loss.backward().unwrap();
            let found = (value, models::grads(&called));
            assert!(found.1 == models::grads(&written), "{dtype}, sim {sim}");
            let first = first.get_or_insert_with(|| found.clone());
            assert!(*first == found, "{dtype}, {workers} workers, sim {sim}");
        }
    }
}

fn small(model: Sequential, config: RunConfig) -> RoundPipe {
    RoundPipe::builder(model)
        .devices(models::cpus(2))
        .memory(Bytes::mib(16))
        .run_config(config)
        .seed(models::SEED)
        .build()
        .unwrap()
}

/// One microbatch is the whole batch, so the engine's own loss must agree.
#[test]
fn with_one_microbatch_it_is_forward_backward() {
    let (x, weights) = models::numbers(0, 6, DType::F32);
    let config = RunConfig::new().num_microbatch(1);
    let fused = small(models::perceptron(DType::F32), config.clone());
    let apart = small(models::perceptron(DType::F32), config);
    let two = |cx: &mut Cx, output: Tree, weights: Tree| {
        let output = output.tensor()?;
        let squares = cx.mul(&output, &output)?;
        Ok(vec![
            models::weighted(cx, output.into(), weights)?,
            cx.sum_all(&squares)?,
        ])
    };
    let want = fused
        .forward_backward(x.clone(), weights.clone(), two)
        .unwrap();
    let forward = apart
        .forward(x, &RunConfig::new().input_grads(true))
        .unwrap();
    let loss = forward.loss(weights, two).unwrap();
    assert_eq!(loss.each(), want.each());
    assert_eq!(loss.value().to_bits(), want.total().to_bits());
    assert_eq!(loss.forward().unmerged().len(), 1);
    let input_grads = loss.backward().unwrap();
    assert!(models::grads(&fused) == models::grads(&apart));
    let input_grads = input_grads.wait(0).unwrap();
    assert_eq!(input_grads[0].as_ref().unwrap().dims(), [6, 5]);
}

/// Gives its output with a mask that has no gradient and a second output that the loss ignores.
struct Beside(Linear);

impl Params for Beside {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("linear", &self.0);
    }
}

impl Layer for Beside {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let x = input.tensor()?;
        let y = roundpipe::Module::forward(&self.0, cx, &x)?;
        let other = cx.relu(&y)?;
        let mask = cx.full(DType::I64, &[x.dims()[0]], 1.0)?;
        Ok(Tree::map([
            ("mask", mask.into()),
            ("other", other.into()),
            ("y", y.into()),
        ]))
    }
}

/// Outputs without a gradient, and outputs that the loss does not use, stay out of the backward.
#[test]
fn outputs_that_a_loss_does_not_use_have_no_gradient() {
    let (x, _) = models::numbers(0, 5, DType::F32);
    let model = || {
        let mut init = Init::new(4, DType::F32);
        let linear = Linear::new(&mut init, 5, 3, true).unwrap();
        Sequential::new().with(Beside(linear))
    };
    let config = RunConfig::new().num_microbatch(2);
    let engine = small(model(), config.clone());
    let forward = engine.forward(x.clone(), &RunConfig::new()).unwrap();
    let loss = forward.loss(Tree::None, |cx, mut output, labels| {
        assert!(matches!(labels, Tree::None));
        let y = output.take("y")?.tensor()?;
        assert_eq!(output.take("mask")?.tensor()?.to_vec::<i64>()?, [1; 5]);
        cx.sum_all(&y)
    });
    loss.unwrap().backward().unwrap();
    let grads = models::grads(&engine);
    // The gradient of the bias is how often it was used.
    let bias = grads.iter().find(|(name, _)| name.ends_with("bias"));
    assert_eq!(bias.unwrap().1, models::f64_bits([5.0; 3]));
}

/// In evaluation the loss is a number, and going back is refused.
#[test]
fn without_gradients_it_gives_the_value_alone() {
    let (x, weights) = models::numbers(0, 6, DType::F32);
    let engine = small(models::perceptron(DType::F32), RunConfig::new());
    let value = |requires_grad: bool| {
        let config = RunConfig::new().requires_grad(requires_grad);
        let forward = engine.forward(x.clone(), &config).unwrap();
        forward.loss(weights.clone(), models::weighted).unwrap()
    };
    let evaluated = value(false);
    assert_eq!(evaluated.value().to_bits(), value(true).value().to_bits());
    let text = evaluated.backward().unwrap_err().to_string();
    assert!(text.contains("requires_grad off"), "{text}");
}

/// Each mistake is one line, and the engine trains on as if it had not been made.
#[test]
fn a_loss_that_fails_leaves_no_gradients() {
    let (x, weights) = models::numbers(0, 6, DType::F32);
    let engine = small(models::perceptron(DType::F32), RunConfig::new());
    let try_loss = |config: &RunConfig, loss: fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor>| {
        let forward = engine.forward(x.clone(), config).unwrap();
        let error = forward.loss(weights.clone(), loss).unwrap_err();
        error.to_string()
    };
    let on = RunConfig::new();
    let off = RunConfig::new().requires_grad(false);
    let unmerged = RunConfig::new().merge_output(MergeOutput::Off);
    let whole: fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor> = |_, output, _| output.tensor();
    for (text, want) in [
        (
            try_loss(&on, |_, _, _| Err(TensorError::invalid("mine", "no"))),
            "mine: no",
        ),
        (
            try_loss(&on, whole),
            "a loss has the shape [6, 3]; reduce it to one number",
        ),
        (
            try_loss(&off, whole),
            "a loss has the shape [6, 3]; reduce it to one number",
        ),
        (
            try_loss(&on, |cx, _, labels| cx.sum_all(&labels.tensor()?)),
            "no loss depends on a trainable parameter",
        ),
        (
            try_loss(&unmerged, models::weighted),
            "merge_output: it is off",
        ),
    ] {
        assert!(text.contains(want) && !text.contains('\n'), "{text}");
    }
    engine.synchronize().unwrap();
    assert!(
        engine
            .gradients()
            .unwrap()
            .iter()
            .all(|(_, grad)| grad.is_none())
    );
    let forward = engine.forward(x.clone(), &on).unwrap();
    let loss = forward.loss(weights.clone(), models::weighted).unwrap();
    loss.backward().unwrap();
    let fresh = small(models::perceptron(DType::F32), RunConfig::new());
    fresh
        .forward(x.clone(), &on)
        .unwrap()
        .backward(weights.clone())
        .unwrap();
    assert!(models::grads(&engine) == models::grads(&fresh));
}

/// A label that is no class is refused by the loss, as inside the engine.
#[test]
fn a_label_out_of_range_is_refused() {
    let mut init = Init::new(4, DType::F32);
    let model = Sequential::new()
        .with(Linear::new(&mut init, 5, 3, true).unwrap())
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)));
    let engine = small(model, RunConfig::new());
    let (x, _) = models::numbers(0, 2, DType::F32);
    let labels = HostTensor::from_slice(&[0i64, 3], &[2]).unwrap();
    let forward = engine.forward(x, &RunConfig::new()).unwrap();
    let text = forward
        .loss(labels, models::image_loss)
        .unwrap_err()
        .to_string();
    assert!(text.contains("cross_entropy"), "{text}");
}
