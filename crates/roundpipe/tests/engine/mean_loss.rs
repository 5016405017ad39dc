//! A loss that is a mean: how a batch is split changes its rounding and nothing else.

use roundpipe::optim::Sgd;
use roundpipe::{
    Cx, DType, HostInputs, HostTensor, Lag, LossReduction, MergeOutput, Ring, RingOptions,
    RoundPipe, Rule, RunConfig, Sequential, SplitInput, Tensor, TensorResult, Tree, Update,
};

use crate::models;
use crate::simulation::chain;

/// Not a multiple of the microbatches below, so that their sizes differ.
const BATCH: usize = 7;

fn mean(microbatches: usize) -> RunConfig {
    RunConfig::new()
        .num_microbatch(microbatches)
        .loss_reduction(LossReduction::Mean)
}

fn engine(model: &Sequential, workers: usize, config: RunConfig) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(Rule::Sgd(Sgd::default()))
        .optimizer_threads(1)
        .run_config(config)
        .devices(models::cpus(workers))
        .build()
        .unwrap()
}

fn mse(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    cx.mse_loss(&output.tensor()?, &label.tensor()?, Default::default())
}

/// The same loss, weighted by hand.
fn share_of_mse(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    let (output, label) = (output.tensor()?, label.tensor()?);
    let loss = cx.mse_loss(&output, &label, Default::default())?;
    let loss = cx.cast(&loss, DType::F32)?;
    cx.mul_scalar(&loss, output.dims()[0] as f64 / BATCH as f64)
}

/// The largest difference, relative to the largest value.
fn distance(a: &[(String, Vec<u64>)], b: &[(String, Vec<u64>)]) -> f64 {
    let values = |all: &[(String, Vec<u64>)]| -> Vec<f64> {
        let bits = all.iter().flat_map(|(_, bits)| bits);
        bits.map(|bits| f64::from_bits(*bits)).collect()
    };
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len());
    let largest = a.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let apart = a
        .iter()
        .zip(&b)
        .fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    apart / largest
}

/// Loss and gradients are those of one microbatch, however many there are; a sum's are not.
#[test]
fn the_number_of_microbatches_changes_nothing_but_rounding() {
    let (x, y) = models::numbers(0, BATCH, DType::F32);
    let run = |config: RunConfig| {
        let engine = engine(&models::perceptron(DType::F32), 2, config);
        let losses = engine.forward_backward(x.clone(), y.clone(), mse).unwrap();
        (losses.total(), models::grads(&engine))
    };
    let whole = run(mean(1));
    assert_eq!(
        whole,
        run(RunConfig::new().num_microbatch(1)),
        "a share of 1"
    );
    for microbatches in 2..=BATCH {
        let (loss, grads) = run(mean(microbatches));
        let apart = distance(&whole.1, &grads);
        assert!(apart < 1e-6, "{microbatches} microbatches: {apart}");
        assert!(
            (loss / whole.0 - 1.0).abs() < 1e-6,
            "{loss} and {}",
            whole.0
        );
    }
    let summed = run(RunConfig::new().num_microbatch(3));
    assert!(
        distance(&whole.1, &summed.1) > 1.0,
        "the test tells nothing"
    );
}

/// Any number of workers gives the bits of a sum that is weighted by hand, at both lags, with
/// gradients of two calls in a step.
#[test]
fn the_bits_are_those_of_weights_by_hand() {
    for (dtype, lag) in [
        (DType::F32, Lag::Zero),
        (DType::F32, Lag::One),
        (DType::BF16, Lag::Zero),
        (DType::BF16, Lag::One),
    ] {
        let run = |workers: usize, by_hand: bool| {
            let model = models::perceptron(dtype);
            let config = match by_hand {
                true => RunConfig::new().num_microbatch(3),
                false => mean(3),
            };
            let engine = engine(&model, workers, config);
            let mut losses = Vec::new();
            for step in 0..3 {
                for half in 0..2 {
                    let (x, y) = models::numbers(2 * step + half, BATCH, dtype);
                    let loss = match by_hand {
                        true => engine.forward_backward(x, y, share_of_mse),
                        false => engine.forward_backward(x, y, mse),
                    };
                    losses.push(models::bits(&loss.unwrap()));
                }
                let update = Update {
                    grad_scale: 0.5,
                    ..Update::new(0.25)
                };
                engine.update(&update, lag).unwrap();
            }
            engine.synchronize().unwrap();
            (losses, models::params(&model))
        };
        let want = run(1, true);
        for workers in [1, 3] {
            assert!(
                run(workers, false) == want,
                "{dtype}, {lag:?}, {workers} workers"
            );
        }
    }
}

/// Two calls of half the batch and half the gradient scale train on the mean of the whole.
#[test]
fn calls_before_a_step_add_up_their_means() {
    let (x, y) = models::numbers(0, 8, DType::F32);
    let half = |t: &HostTensor, at: usize| t.narrow(0, at * 4, 4).unwrap();
    let model = models::perceptron(DType::F32);
    let one_call = engine(&model, 1, mean(3));
    one_call
        .forward_backward(x.clone(), y.clone(), mse)
        .unwrap();
    one_call.update(&Update::new(0.25), Lag::Zero).unwrap();
    one_call.synchronize().unwrap();
    let whole = models::params(&model);
    for workers in [1, 3] {
        let model = models::perceptron(DType::F32);
        let engine = engine(&model, workers, mean(3));
        for at in 0..2 {
            engine
                .forward_backward(half(&x, at), half(&y, at), mse)
                .unwrap();
        }
        let update = Update {
            grad_scale: 0.5,
            ..Update::new(0.25)
        };
        engine.update(&update, Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        let apart = distance(&whole, &models::params(&model));
        assert!(apart < 1e-6, "{workers} workers: {apart}");
    }
}

/// Microbatches that come from another engine have the shares that they had there.
#[test]
fn shares_go_with_chained_microbatches() {
    let (x, y) = models::numbers(0, BATCH, DType::F32);
    let single = engine(&models::perceptron(DType::F32), 1, mean(3));
    let want = single.forward_backward(x.clone(), y.clone(), mse).unwrap();
    let layers = |range: std::ops::Range<usize>| {
        let model = models::perceptron(DType::F32);
        model
            .layers()
            .enumerate()
            .filter(|(at, _)| range.contains(at))
            .fold(Sequential::new(), |part, (_, (name, layer))| {
                part.named(name, models::Shared(layer.clone()))
            })
    };
    for workers in [1, 3] {
        let ring = Ring::new(&models::cpus(workers), &RingOptions::default()).unwrap();
        let build = |model: Sequential| {
            RoundPipe::builder(model)
                .run_config(mean(3))
                .ring(&ring)
                .build()
                .unwrap()
        };
        let (front, back) = (build(layers(0..2)), build(layers(2..4)));
        let off = RunConfig::new().merge_output(MergeOutput::Off);
        let forward = front.forward(x.clone(), &off).unwrap();
        let trained = back
            .train(forward.unmerged())
            .labels(y.clone())
            .loss(mse)
            .run()
            .unwrap();
        assert_eq!(trained.losses, want, "{workers} workers");
        let rows: Vec<f64> = trained
            .losses
            .microbatches()
            .iter()
            .map(|losses| losses[0])
            .collect();
        assert_eq!(rows.len(), 3);
        assert_eq!(rows.iter().sum::<f64>(), trained.losses.total());
    }
}

/// A narrow loss is weighted in f32: three equal shares of 1 are 1.
#[test]
fn shares_are_not_rounded_to_a_narrow_loss() {
    let (x, y) = models::numbers(0, 6, DType::BF16);
    let engine = engine(&models::perceptron(DType::BF16), 1, mean(3));
    let one = |cx: &mut Cx, output: Tree, _: Tree| {
        let zero = cx.mul_scalar(&output.tensor()?, 0.0)?;
        let zero = cx.sum_all(&zero)?;
        cx.add_scalar(&zero, 1.0)
    };
    let loss = engine.forward_backward(x, y, one).unwrap().total();
    assert!((loss - 1.0).abs() < 1e-7, "{loss}");
}

/// A function that splits does not say how many samples each part has.
#[test]
fn parts_of_unknown_size_are_refused() {
    let (x, y) = models::numbers(0, 6, DType::F32);
    let engine = engine(&models::perceptron(DType::F32), 1, mean(2));
    let split = |parts: usize| {
        let size = 6 / parts;
        let cut = SplitInput::function(move |inputs: &HostInputs, _| {
            let x = inputs.args[0].clone().tensor()?;
            let part = |at: usize| Ok(HostInputs::from(x.narrow(0, at * size, size)?));
            (0..parts).map(part).collect()
        });
        let call = engine.train(x.clone()).labels(y.clone()).loss(mse);
        call.config(RunConfig::new().split_input(cut)).run()
    };
    let error = chain(&split(2).unwrap_err());
    assert!(
        error.contains("loss_reduction") && error.contains("use Sum"),
        "{error}"
    );
    // All samples in one part are the batch.
    split(1).unwrap();
}
