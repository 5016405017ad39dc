//! What the calls of an engine promise, one by one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roundpipe::ScalerState;
use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::{AdamW, Sgd};
use roundpipe::{
    Bytes, Cx, DType, Device, Devices, ExecutePlan, GradScaler, Grain, HostInputs, HostTensor,
    Inputs, Lag, Layer, Merge, MergeOutput, Module, Param, ParamVisitor, Params, PlanKind, Ring,
    RingOptions, RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorError, TensorResult, Tree,
    Update,
};
use roundpipe_tensor::SimWorld;

use crate::invisible::{self, Way};
use crate::models;
use crate::simulation::chain;

fn way(workers: usize) -> Way {
    Way::threaded(models::cpus(workers))
}

pub fn options(serial: bool) -> RingOptions {
    RingOptions {
        memory: Some(Bytes::mib(16)),
        serial,
        ..RingOptions::default()
    }
}

/// A small engine on the processor.
fn small(model: &Sequential, workers: usize, microbatches: usize, rule: Rule) -> RoundPipe {
    builder(model, workers, microbatches)
        .optimizer(rule)
        .build()
        .unwrap()
}

fn builder(
    model: &Sequential,
    workers: usize,
    microbatches: usize,
) -> roundpipe::engine::Builder<Sequential> {
    RoundPipe::builder(model.clone())
        .optimizer_threads(1)
        .seed(models::SEED)
        .run_config(RunConfig::default().num_microbatch(microbatches))
        .on_stall(Duration::from_secs(20), models::show_stall)
        .devices(models::cpus(workers))
        .ring_options(options(false))
}

pub fn sgd() -> Rule {
    Rule::Sgd(Sgd::default())
}

pub fn sims(seed: u64, count: usize) -> (SimWorld, Vec<Arc<dyn Device>>) {
    let world = SimWorld::seeded(seed).unwrap();
    let devices = world
        .workers(count)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect();
    (world, devices)
}

fn host_bits(tensor: &HostTensor) -> Vec<u64> {
    models::f64_bits(tensor.to_f64_vec().unwrap())
}

// ---- forward, backward, outputs ----

/// A forward through the engine is a plain forward over the microbatches, whatever its kind,
/// workers and plan.
#[test]
fn a_merged_forward_is_a_plain_forward() {
    let model = models::transformer(DType::F32, false);
    let (inputs, _) = models::tokens(0, 9, DType::F32);
    let infer = [
        None,
        Some(ExecutePlan::from_sizes(PlanKind::Infer, &[2, 1, 3], &[])),
    ];
    let train = [
        None,
        Some(ExecutePlan::from_sizes(
            PlanKind::Train,
            &[2, 4],
            &[3, 2, 1],
        )),
    ];
    for (requires_grad, plans) in [(false, &infer), (true, &train)] {
        for (workers, plan) in [1, 3]
            .into_iter()
            .flat_map(|w| plans.iter().map(move |plan| (w, plan)))
        {
            let engine = invisible::engine(&model, &way(workers));
            let mut config = RunConfig::default().requires_grad(requires_grad);
            config.execute_plan = plan.clone();
            for number in 0..2 {
                let want = models::plain_forward(&model, &inputs, (9, 4), number, true);
                let forward = engine.forward(inputs.clone(), &config).unwrap();
                let got = forward.output().unwrap().clone().tensor().unwrap();
                assert_eq!(got.dims(), [9, models::SEQ, models::VOCAB]);
                assert!(
                    host_bits(&got) == want,
                    "grad {requires_grad}, {workers} workers, {plan:?}, {number}"
                );
            }
        }
    }
}

/// In evaluation dropout passes everything, and the random stream stands still.
#[test]
fn set_training_switches_dropout_and_keeps_the_random_stream() {
    let model = models::transformer(DType::F32, false);
    let (inputs, _) = models::tokens(0, 6, DType::F32);
    let engine = invisible::engine(&model, &way(2));
    let config = RunConfig::default().requires_grad(false);
    let run = || {
        engine
            .forward(inputs.clone(), &config)
            .unwrap()
            .output()
            .unwrap()
            .clone()
            .tensor()
            .unwrap()
    };
    engine.set_training(false);
    let plain = models::plain_forward(&model, &inputs, (6, 4), 0, false);
    assert!(host_bits(&run()) == plain && host_bits(&run()) == plain);
    engine.set_training(true);
    assert!(host_bits(&run()) == models::plain_forward(&model, &inputs, (6, 4), 0, true));
}

/// A backward from given gradients is the backward of a loss with these gradients.
#[test]
fn backward_from_gradients_is_the_backward_of_the_loss() {
    let (inputs, _) = models::tokens(0, 9, DType::F32);
    let weights = models::numbers(3, 9 * models::SEQ * models::VOCAB / 3, DType::F32)
        .1
        .to_vec::<f32>()
        .unwrap();
    let dims = [9, models::SEQ, models::VOCAB];
    let weights = HostTensor::from_slice(&weights, &dims).unwrap();
    for (workers, grain) in [(1, Grain::Stage), (2, Grain::Layer), (3, Grain::Stage)] {
        let model = models::transformer(DType::F32, false);
        let fused = invisible::engine(&model, &way(workers));
        fused
            .forward_backward(inputs.clone(), weights.clone(), models::weighted)
            .unwrap();
        let want = models::grads(&fused);
        let apart = invisible::engine(
            &models::transformer(DType::F32, false),
            &Way {
                grain,
                ..way(workers)
            },
        );
        let forward = apart
            .forward(inputs.clone(), &RunConfig::default())
            .unwrap();
        forward.backward(weights.clone()).unwrap();
        assert!(want == models::grads(&apart), "{workers} workers");
    }
}

/// Input gradients are those that a plain tape gives, from both kinds of backward.
#[test]
fn input_gradients_are_those_of_a_plain_tape() {
    let (x, weights) = models::numbers(0, 8, DType::F32);
    let model = models::perceptron(DType::F32);
    let worker =
        roundpipe::Worker::new(roundpipe::Cpu::new(Some(1)).unwrap(), Bytes::mib(16)).unwrap();
    let plain = |m: usize| {
        let mut cx = Cx::train(&worker);
        let cut = |t: &HostTensor| models::upload(&worker, &models::piece(t, 8, 3, m));
        let input = cx.input(&cut(&x)).unwrap();
        let output = model.forward(&mut cx, input.clone()).unwrap();
        let loss = models::weighted(&mut cx, output, cut(&weights).into()).unwrap();
        models::f64_bits(
            cx.backward(&loss)
                .unwrap()
                .take(&input)
                .unwrap()
                .to_f64_vec()
                .unwrap(),
        )
    };
    let want: Vec<Vec<u64>> = (0..3).map(plain).collect();
    for workers in [1, 2] {
        let engine = small(&models::perceptron(DType::F32), workers, 3, sgd());
        let config = RunConfig::default().input_grads(true);
        let trained = engine
            .train(x.clone())
            .labels(weights.clone())
            .loss(models::weighted);
        let fused = trained
            .config(config.clone())
            .run()
            .unwrap()
            .input_grads
            .unwrap();
        let apart = engine
            .forward(x.clone(), &config)
            .unwrap()
            .backward(weights.clone())
            .unwrap();
        for (m, want) in want.iter().enumerate() {
            for (name, grads) in [("fused", &fused), ("apart", &apart)] {
                let got = grads
                    .wait(m)
                    .unwrap()
                    .remove(0)
                    .expect("the loss depends on it");
                assert_eq!(
                    &host_bits(&got),
                    want,
                    "{name}, microbatch {m}, {workers} workers"
                );
            }
        }
    }
}

/// Two forwards may be open at once, and go back in any order: what one keeps on a worker is not
/// the other's.
#[test]
fn forwards_overlap_and_go_back_in_any_order() {
    let model = models::perceptron(DType::F32);
    let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2, 2], &[1, 1, 2]);
    let config = RunConfig::default().execute_plan(plan);
    let batches: Vec<_> = (0..3)
        .map(|step| models::numbers(step, 6, DType::F32))
        .collect();
    let alone = |at: usize| {
        let engine = small(&models::perceptron(DType::F32), 1, 3, sgd());
        let (x, weights) = batches[at].clone();
        engine
            .forward(x, &config)
            .unwrap()
            .backward(weights)
            .unwrap();
        models::grads(&engine)
    };
    let (_world, devices) = sims(5, 1);
    for (name, devices) in [("cpu", models::cpus(1)), ("sim", devices)] {
        let engine = builder(&model, 1, 3)
            .devices(devices)
            .optimizer(sgd())
            .build()
            .unwrap();
        let mut open: Vec<_> = batches
            .iter()
            .map(|(x, _)| engine.forward(x.clone(), &config).unwrap())
            .collect();
        drop(open.remove(1));
        for at in [2, 0] {
            open.pop().unwrap().backward(batches[at].1.clone()).unwrap();
            assert_eq!(models::grads(&engine), alone(at), "{name}, batch {at}");
            engine
                .update(&Update::new(0.0), Lag::Zero)
                .map(drop)
                .unwrap_or(());
            engine.synchronize().unwrap();
            if at == 2 {
                // A step closes every forward before it, even one that changed no value.
                let error = open
                    .pop()
                    .unwrap()
                    .backward(batches[0].1.clone())
                    .unwrap_err();
                assert!(
                    error.to_string().contains("run the forward again"),
                    "{error}"
                );
                open.push(engine.forward(batches[0].0.clone(), &config).unwrap());
            }
        }
    }
}

/// Two engines that hand microbatches to each other are one engine over both models.
#[test]
fn chained_engines_are_one_engine() {
    let layers = |range: std::ops::Range<usize>| {
        let model = models::perceptron(DType::F32);
        model
            .layers()
            .enumerate()
            .filter(|(i, _)| range.contains(i))
            .fold(Sequential::new(), |part, (_, (name, layer))| {
                part.named(name, models::Shared(layer.clone()))
            })
    };
    let (x, weights) = models::numbers(0, 7, DType::F32);
    let one = small(&models::perceptron(DType::F32), 1, 3, sgd());
    let want_loss = models::bits(
        &one.forward_backward(x.clone(), weights.clone(), models::weighted)
            .unwrap(),
    );
    let want = models::grads(&one);
    let (_world, simulated) = sims(9, 2);
    for (name, devices) in [
        ("1 cpu", models::cpus(1)),
        ("3 cpus", models::cpus(3)),
        ("2 sims", simulated),
    ] {
        let ring = Ring::new(&devices, &options(false)).unwrap();
        let build = |model: Sequential| {
            let config = RunConfig::default().num_microbatch(3);
            RoundPipe::builder(model)
                .optimizer(sgd())
                .run_config(config)
                .ring(&ring)
                .build()
                .unwrap()
        };
        let (front, back) = (build(layers(0..2)), build(layers(2..4)));
        let off = RunConfig::default().merge_output(MergeOutput::Off);
        for step in 0..2 {
            let forward = front.forward(x.clone(), &off).unwrap();
            let trained = back
                .train(forward.unmerged())
                .labels(weights.clone())
                .loss(models::weighted);
            let trained = trained
                .config(RunConfig::default().input_grads(true))
                .run()
                .unwrap();
            assert_eq!(
                models::bits(&trained.losses),
                want_loss,
                "{name}, step {step}"
            );
            forward
                .backward_from(&trained.input_grads.unwrap())
                .unwrap();
            let got: Vec<_> = models::grads(&front)
                .into_iter()
                .chain(models::grads(&back))
                .collect();
            assert_eq!(got, want, "{name}, step {step}");
            for engine in [&front, &back] {
                engine.update(&Update::new(0.0), Lag::One).unwrap();
            }
        }
    }
}

/// A layer that waits for a word from outside.
pub fn gated(gate: Receiver<()>) -> impl Layer {
    let gate = Mutex::new(gate);
    Func(move |_: &mut Cx, x: &Tensor| {
        match gate.lock().unwrap().recv_timeout(Duration::from_secs(20)) {
            Ok(()) => Ok(x.clone()),
            Err(e) => Err(TensorError::invalid("gate", e.to_string())),
        }
    })
}

/// Chained calls are submitted while the first layer of the first has not run yet.
/// Microbatches of another call set the batch: a mask of one row and a table of some are the same
/// for all, rows go with their samples; and of two calls with unequal numbers the fewer are used.
#[test]
fn constants_go_beside_the_microbatches_of_another_call() {
    let front = small(&models::perceptron(DType::F32), 1, 4, sgd());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sizes = seen.clone();
    let sink = Watch(Box::new(move |tree: &Tree| {
        let dims = |name: &str| {
            tree.get(name)
                .unwrap()
                .clone()
                .tensor()
                .unwrap()
                .shape()
                .dims()[0]
        };
        let sizes_of = ["mask", "table", "rows"].map(dims);
        sizes.lock().unwrap().push(sizes_of);
    }));
    let back = small(&Sequential::new().named("watch", sink), 1, 4, sgd());
    let off = RunConfig::default()
        .merge_output(MergeOutput::Off)
        .requires_grad(false);
    let (x, _) = models::numbers(0, 10, DType::F32);
    let forward = front.forward(x.clone(), &off).unwrap();
    let rows =
        |count: usize| HostTensor::from_slice(&vec![1.0f32; count * 3], &[count, 3]).unwrap();
    let inputs = Inputs::new()
        .named("x", forward.unmerged())
        .named("mask", rows(1))
        .named("table", rows(5))
        .named("rows", rows(10));
    let merged = back.forward(inputs, &off).unwrap();
    assert_eq!(merged.unmerged().len(), 4);
    for microbatch in 0..4 {
        merged.unmerged().wait(microbatch).unwrap();
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen, [[1, 5, 3], [1, 5, 3], [1, 5, 2], [1, 5, 2]]);

    let fewer = front.forward(x, &off.clone().num_microbatch(3)).unwrap();
    let both = Inputs::new()
        .named("x", forward.unmerged())
        .named("mask", fewer.unmerged())
        .named("table", rows(1))
        .named("rows", rows(1));
    back.take_warnings();
    assert_eq!(back.forward(both, &off).unwrap().unmerged().len(), 3);
    let warnings = back.take_warnings();
    assert!(warnings[0].contains("3 and 4 microbatches"), "{warnings:?}");
}

/// A layer that shows its input to a function.
struct Watch(Box<dyn Fn(&Tree) + Send + Sync>);

impl Params for Watch {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for Watch {
    fn run(&self, _: &mut Cx, input: Tree) -> TensorResult<Tree> {
        (self.0)(&input);
        Ok(input.get("x")?.clone())
    }
}

/// With merging off, the outputs of a training call stay microbatches.
#[test]
fn unmerged_outputs_of_a_training_call() {
    let engine = small(&models::perceptron(DType::F32), 1, 3, sgd());
    let (x, weights) = models::numbers(0, 7, DType::F32);
    let run = |merge: MergeOutput| {
        let call = engine.train(x.clone()).labels(weights.clone());
        let call = call.loss(models::weighted).return_outputs();
        call.config(RunConfig::new().merge_output(merge))
            .run()
            .unwrap()
    };
    let merged = run(MergeOutput::Auto);
    let unmerged = run(MergeOutput::Off);
    assert!(unmerged.outputs.is_none());
    let all = host_bits(&merged.outputs.unwrap().tensor().unwrap());
    for outputs in [merged.unmerged.unwrap(), unmerged.unmerged.unwrap()] {
        assert_eq!(outputs.len(), 3);
        let parts =
            (0..3).flat_map(|part| host_bits(&outputs.wait(part).unwrap().tensor().unwrap()));
        assert_eq!(parts.collect::<Vec<_>>(), all);
    }
}

#[test]
fn a_chain_is_submitted_without_a_host_wait() {
    let (open, gate) = channel();
    let ring = Ring::new(&models::cpus(2), &options(false)).unwrap();
    let build = |model: Sequential| RoundPipe::builder(model).ring(&ring).build().unwrap();
    let (front, back) = (
        build(Sequential::new().with(gated(gate))),
        build(models::perceptron(DType::F32)),
    );
    let (x, _) = models::numbers(0, 6, DType::F32);
    let config = RunConfig::default()
        .requires_grad(false)
        .merge_output(MergeOutput::Off);
    // Told, since the planner would ask the layer what it computes.
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1], &[]);
    let first = front
        .forward(x.clone(), &config.clone().execute_plan(plan))
        .unwrap();
    let second = back.forward(first.unmerged(), &config).unwrap();
    for _ in 0..first.unmerged().len() {
        open.send(()).unwrap();
    }
    let alone = back
        .forward(x, &RunConfig::default())
        .unwrap()
        .output()
        .unwrap()
        .clone()
        .tensor()
        .unwrap();
    let rows: Vec<u64> = (0..second.unmerged().len())
        .flat_map(|m| host_bits(&second.unmerged().wait(m).unwrap().tensor().unwrap()))
        .collect();
    assert_eq!(rows, host_bits(&alone));
}

/// Outputs come back merged as told, several losses are summed one by one.
#[test]
fn outputs_and_several_losses_come_back() {
    let (x, weights) = models::numbers(0, 7, DType::F32);
    let engine = small(&models::perceptron(DType::F32), 2, 3, sgd());
    let plain = engine
        .forward(x.clone(), &RunConfig::default())
        .unwrap()
        .output()
        .unwrap()
        .clone();
    let call = |merge: MergeOutput| {
        let losses = |cx: &mut Cx, output: Tree, weights: Tree| {
            let twice = models::weighted(cx, output.clone(), weights.clone())?;
            Ok(vec![models::weighted(cx, output, weights)?, twice])
        };
        let config = RunConfig::default().merge_output(merge);
        engine
            .train(x.clone())
            .labels(weights.clone())
            .loss(losses)
            .return_outputs()
            .config(config)
            .run()
            .unwrap()
    };
    let trained = call(MergeOutput::Auto);
    assert_eq!(
        host_bits(&trained.outputs.unwrap().tensor().unwrap()),
        host_bits(&plain.tensor().unwrap())
    );
    let each = trained.losses.each();
    assert_eq!((each.len(), each[0]), (2, each[1]));
    assert_eq!(trained.losses.total(), each[0] + each[1]);
    assert_eq!(trained.losses.microbatches().len(), 3);
    let sum = |a: HostTensor, b: HostTensor| -> roundpipe::Result<HostTensor> {
        let total = a.item()? + b.to_f64_vec()?.iter().sum::<f64>();
        Ok(HostTensor::from_f64s(&[total], DType::F32, &[])?)
    };
    let spec = MergeOutput::Spec(Merge::reduce(HostTensor::scalar(0.0).unwrap(), sum).into());
    assert_eq!(call(spec).outputs.unwrap().tensor().unwrap().numel(), 1);
    // An output that cannot be merged as told fails the call: no gradient of it is left.
    engine.synchronize().unwrap();
    engine.update(&Update::new(0.0), Lag::Zero).unwrap();
    let wrong = RunConfig::default().merge_output(MergeOutput::Spec(Merge::Equal.into()));
    let call = engine
        .train(x.clone())
        .labels(weights.clone())
        .loss(models::weighted)
        .return_outputs();
    assert!(
        call.config(wrong)
            .run()
            .unwrap_err()
            .to_string()
            .contains("merge_output")
    );
    assert!(
        models::grads(&engine)
            .iter()
            .all(|(_, grad)| grad.is_empty())
    );
    engine
        .forward_backward(x, weights, models::weighted)
        .unwrap();
}

/// Without a loss function the model's output is the loss, which must be one number.
/// A printed model shows each layer with its kind, its parameters and what is frozen; layers alike
/// are shown once.
#[test]
fn a_model_prints_itself() {
    let mut init = Init::new(1, DType::BF16);
    let mut linear = |inputs, outputs| Linear::new(&mut init, inputs, outputs, false).unwrap();
    let last = linear(4, 2);
    last.weight.set_trainable(false);
    let model = Sequential::new()
        .named("in", linear(3, 4))
        .named("0", linear(4, 4))
        .named("1", linear(4, 4))
        .named("bend", Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
        .named("out", last);
    let want = "5 layers, 52 parameters, 44 of them trained
(in) Linear, 12 parameters
    weight: [4, 3] bf16
(0 to 1) 2 x Linear, 16 parameters
    weight: [4, 4] bf16
(bend) Func, 0 parameters
(out) Linear, 8 parameters
    weight: [2, 4] bf16, frozen";
    assert_eq!(model.to_string(), want);
    assert_eq!(format!("{model:?}"), want);
}

#[test]
fn plans_can_be_asked_for_and_layers_are_timed_updates_too() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 1, 2, sgd());
    // The first update says nothing about the others; the times of the second are known to the
    // call after it.
    for step in 0..2 {
        let (x, weights) = models::numbers(step, 6, DType::F32);
        engine
            .forward_backward(x, weights, models::weighted)
            .unwrap();
        let times = engine.layer_times();
        assert!(times.layers().iter().all(|time| time.update_ms.is_none()));
        engine.update(&Update::new(0.1), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
    }
    let (x, weights) = models::numbers(3, 6, DType::F32);
    engine
        .forward_backward(x, weights, models::weighted)
        .unwrap();
    let plan = engine.last_plan(PlanKind::Fused).unwrap();
    plan.check(PlanKind::Fused, model.len()).unwrap();
    // What a call would have, before it is made; asking changes nothing.
    let (x, _) = models::numbers(4, 6, DType::F32);
    let config = RunConfig::default();
    let ask = |kind| engine.auto_plan(kind, x.clone(), &config).unwrap();
    assert_eq!(ask(PlanKind::Fused), plan);
    let planned = ask(PlanKind::Infer);
    assert!(engine.last_plan(PlanKind::Infer).is_none());
    let infer = config.clone().requires_grad(false);
    engine.forward(x.clone(), &infer).unwrap();
    assert_eq!(engine.last_plan(PlanKind::Infer), Some(planned));
    let costs = engine.layer_costs(PlanKind::Fused, x.clone(), &config);
    let costs = costs.unwrap();
    assert_eq!(costs.layers.len(), model.len());
    let options = roundpipe::AutoOptions::new(2, 3);
    let plans = ExecutePlan::auto(PlanKind::Fused, &[&costs, &costs], &options).unwrap();
    plans[1].check(PlanKind::Fused, model.len()).unwrap();
    let uneven = HostTensor::from_slice(&[0f32; 4], &[4]).unwrap();
    let wrong = Inputs::new().arg(x).arg(uneven);
    assert!(engine.auto_plan(PlanKind::Fused, wrong, &config).is_err());
    let times = engine.layer_times();
    for ((name, layer), time) in model.layers().zip(times.layers()) {
        assert!(
            time.forward_ms.is_some() && time.backward_ms.is_some(),
            "{name}"
        );
        let has_params = !layer.named_params().is_empty();
        assert_eq!(time.update_ms.is_some(), has_params, "{name}");
    }
}

#[test]
fn the_output_is_the_loss_by_default() {
    let (x, _) = models::numbers(0, 6, DType::F32);
    let total =
        models::perceptron(DType::F32).named("sum", Func(|cx: &mut Cx, x: &Tensor| cx.sum_all(x)));
    let engine = small(&total, 1, 2, sgd());
    let losses = engine.train(x.clone()).run().unwrap().losses;
    let explicit = small(&models::perceptron(DType::F32), 1, 2, sgd());
    let sum = |cx: &mut Cx, output: Tree, _: Tree| cx.sum_all(&output.tensor()?);
    assert_eq!(
        losses,
        explicit
            .forward_backward(x.clone(), Tree::None, sum)
            .unwrap()
    );
    let error = explicit.train(x).run().unwrap_err();
    assert!(
        chain(&error).contains("reduce it to one number"),
        "{}",
        chain(&error)
    );
}

// ---- gradients and steps ----

/// Gradients of two calls add up as those of one call over all their microbatches, in f32 to the
/// bit.
#[test]
fn accumulation_over_calls_is_one_larger_call() {
    for dtype in [DType::F32, DType::BF16] {
        let (x, weights) = models::numbers(0, 8, dtype);
        let half = |t: &HostTensor, at: usize| t.narrow(0, at * 4, 4).unwrap();
        let two_calls = |serial: bool, workers: usize, lag: Lag| {
            let model = models::perceptron(dtype);
            let engine = builder(&model, workers, 2)
                .optimizer(sgd())
                .ring_options(options(serial))
                .build()
                .unwrap();
            for step in 0..2 {
                for at in 0..2 {
                    engine
                        .forward_backward(half(&x, at), half(&weights, at), models::weighted)
                        .unwrap();
                }
                if step == 1 {
                    break;
                }
                engine.update(&Update::new(0.125), lag).unwrap();
            }
            let grads = models::grads(&engine);
            engine.update(&Update::new(0.125), lag).unwrap();
            engine.synchronize().unwrap();
            (grads, models::params(&model))
        };
        let want = two_calls(true, 1, Lag::Zero);
        for workers in [1, 2, 3] {
            assert_eq!(
                two_calls(false, workers, Lag::Zero),
                want,
                "{dtype}, {workers} workers"
            );
        }
        assert_eq!(
            two_calls(false, 2, Lag::One),
            two_calls(true, 1, Lag::One),
            "{dtype}, lag 1"
        );
        if dtype == DType::F32 {
            let model = models::perceptron(dtype);
            let engine = small(&model, 2, 4, sgd());
            engine
                .forward_backward(x.clone(), weights.clone(), models::weighted)
                .unwrap();
            engine.update(&Update::new(0.125), Lag::Zero).unwrap();
            engine
                .forward_backward(x, weights, models::weighted)
                .unwrap();
            assert_eq!(models::grads(&engine), want.0);
        }
    }
}

/// A weight that two layers share has the same bits however the layers are cut.
#[test]
fn tied_weights_do_not_depend_on_the_plan() {
    let batch = |step| models::tokens(step, 9, DType::BF16);
    let run = |plan: &[&[usize]; 2], workers| {
        let plan = Some(ExecutePlan::from_sizes(PlanKind::Fused, plan[0], plan[1]));
        let model = models::transformer(DType::BF16, true);
        invisible::run(
            &model,
            &Way {
                plan,
                ..way(workers)
            },
            &batch,
            models::token_loss,
        )
    };
    let want = run(&[&[], &[6]], 1);
    for plan in [
        [&[3, 2][..], &[1, 5][..]],
        [&[1, 1, 1, 1, 1], &[1, 1, 1, 1, 1, 1]],
        [&[4], &[2, 4]],
    ] {
        invisible::same(&format!("{plan:?}"), &want, &run(&plan, 3));
    }
}

/// Narrow weights, dropout and both grains: the bits of a plain loop.
#[test]
fn bf16_training_has_the_bits_of_a_plain_loop() {
    let batch = |step| models::tokens(step, 7, DType::BF16);
    let model = || models::transformer(DType::BF16, false);
    let want = models::plain_loop(
        &model(),
        invisible::rule(),
        0.01,
        5,
        &batch,
        4,
        models::token_loss,
    );
    for (grain, workers) in [(Grain::Stage, 2), (Grain::Layer, 3)] {
        let plan = Some(ExecutePlan::from_sizes(
            PlanKind::Fused,
            &[2, 2],
            &[2, 3, 1],
        ));
        let got = invisible::run(
            &model(),
            &Way {
                grain,
                plan,
                ..way(workers)
            },
            &batch,
            models::token_loss,
        );
        invisible::same(&format!("{grain:?}"), &want, &got);
    }
}

/// A frozen weight beside two small trained ones.
struct Adapter {
    base: Param,
    down: Param,
    up: Param,
}

impl Adapter {
    fn new(init: &mut Init) -> Self {
        let base = init.normal(&[32, 32], 0.1).unwrap().frozen();
        Self {
            base,
            down: init.normal(&[32, 32], 0.1).unwrap(),
            up: init.normal(&[32, 32], 0.1).unwrap(),
        }
    }
}

impl Params for Adapter {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("base", &self.base);
        visit.param("down", &self.down);
        visit.param("up", &self.up);
    }
}

impl Module for Adapter {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let (base, down, up) = (cx.get(&self.base)?, cx.get(&self.down)?, cx.get(&self.up)?);
        let y = cx.linear(x, &base, None)?;
        let z = cx.linear(x, &down, None)?;
        let z = cx.linear(&z, &up, None)?;
        cx.add(&y, &z)
    }
}

/// Frozen weights cost two bytes each and never change; the rest trains the same everywhere.
#[test]
fn frozen_weights_have_no_state_and_no_gradient() {
    let model = || {
        let mut init = Init::new(4, DType::BF16);
        let embed = Linear::new(&mut init, 32, 32, false).unwrap();
        embed.set_trainable(false);
        let (a, b) = (Adapter::new(&mut init), Adapter::new(&mut init));
        Sequential::new()
            .named("embed", embed)
            .named("a", a)
            .named("b", b)
    };
    let x = HostTensor::from_f64s(&vec![0.25; 6 * 32], DType::BF16, &[6, 32]).unwrap();
    let run = |workers: usize, plan: &[&[usize]; 2]| {
        let model = model();
        let before = models::params(&model);
        let engine = small(&model, workers, 3, Rule::AdamW(AdamW::default()));
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, plan[0], plan[1]);
        for _ in 0..3 {
            let call = engine
                .train(x.clone())
                .labels(x.clone())
                .loss(models::weighted);
            call.config(RunConfig::default().execute_plan(plan.clone()))
                .run()
                .unwrap();
            engine.update(&Update::new(0.01), Lag::One).unwrap();
        }
        engine.synchronize().unwrap();
        let bytes = engine.host_bytes();
        assert_eq!(
            (bytes.frozen, bytes.gradients),
            (3 * 32 * 32 * 2, 4 * 32 * 32 * 2)
        );
        assert_eq!(
            (bytes.masters, bytes.moments),
            (4 * 32 * 32 * 17 / 8, 4 * 32 * 32 * 8)
        );
        let names: Vec<String> = engine.optim_parameters().unwrap().map(|p| p.name).collect();
        assert_eq!(names, ["a.down", "a.up", "b.down", "b.up"]);
        let after = models::params(&model);
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            let frozen = name.ends_with("base") || name.starts_with("embed");
            assert_eq!(before == after, frozen, "{name}");
        }
        after
    };
    let want = run(1, &[&[], &[3]]);
    assert_eq!(run(2, &[&[1, 1], &[1, 1, 1]]), want);
    assert_eq!(run(3, &[&[1], &[2, 1]]), want);
}

/// Counts its forwards in a buffer.
struct Counter {
    count: Param,
}

impl Params for Counter {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("count", &self.count);
    }
}

impl Module for Counter {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let count = cx.get(&self.count)?;
        let one = cx.full(DType::F32, &[1], 1.0)?;
        let more = cx.no_grad(|cx| cx.add(&count, &one))?;
        cx.set_buffer(&self.count, &more)?;
        // The value the forward saw enters the output, so that a recompute with another would be
        // seen.
        cx.mul(x, &more)
    }
}

/// A buffer is set once per microbatch, whether its layer is recomputed or not, and a recompute
/// sees the value of its forward.
#[test]
fn buffers_count_microbatches_not_recomputes() {
    let run = |plan: &[&[usize]; 2], grain: Grain, workers: usize| {
        let count = Param::zeros(DType::F32, &[1]).unwrap().frozen();
        let mut init = Init::new(8, DType::F32);
        let model = Sequential::new()
            .with(Linear::new(&mut init, 5, 5, true).unwrap())
            .with(Counter {
                count: count.clone(),
            })
            .with(Linear::new(&mut init, 5, 3, true).unwrap());
        let engine = small(&model, workers, 3, sgd());
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, plan[0], plan[1]);
        let config = RunConfig::default()
            .execute_plan(plan)
            .recompute_grain(grain);
        let mut losses = Vec::new();
        for step in 0..3 {
            let (x, weights) = models::numbers(step, 7, DType::F32);
            let call = engine
                .train(x)
                .labels(weights)
                .loss(models::weighted)
                .config(config.clone());
            losses.push(models::bits(&call.run().unwrap().losses));
            engine.update(&Update::new(0.01), Lag::One).unwrap();
        }
        engine.synchronize().unwrap();
        assert_eq!(count.to_vec::<f32>().unwrap(), [9.0]);
        (losses, models::params(&model))
    };
    let want = run(&[&[], &[3]], Grain::Stage, 1);
    for grain in [Grain::Stage, Grain::Layer] {
        for workers in [1, 2, 3] {
            assert_eq!(
                run(&[&[2], &[1, 2]], grain, workers),
                want,
                "{grain:?}, {workers} workers"
            );
            assert_eq!(
                run(&[&[1, 1], &[1, 1, 1]], grain, workers),
                want,
                "{grain:?}, {workers} workers"
            );
        }
    }
}

/// What a layer does wrong with its recompute data is an error that names it.
#[test]
fn recompute_data_is_saved_once_and_read_in_a_recompute_only() {
    let twice = Func(|cx: &mut Cx, x: &Tensor| {
        cx.save_for_recompute(&[x])?;
        cx.save_for_recompute(&[x])?;
        Ok(x.clone())
    });
    let early = Func(|cx: &mut Cx, x: &Tensor| {
        cx.recompute_data()?;
        Ok(x.clone())
    });
    let (x, weights) = models::numbers(0, 6, DType::F32);
    for (name, layer, text) in [
        (
            "twice",
            Box::new(twice) as Box<dyn Layer>,
            "once per forward",
        ),
        ("early", Box::new(early), "no recompute"),
    ] {
        let model = Sequential::new().named(name, models::Shared(layer.into()));
        let mut init = Init::new(8, DType::F32);
        let model = model.named("end", Linear::new(&mut init, 5, 3, true).unwrap());
        let engine = small(&model, 1, 2, sgd());
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[1], &[1, 1]);
        let call = engine
            .train(x.clone())
            .labels(weights.clone())
            .loss(models::weighted);
        let error = chain(
            &call
                .config(RunConfig::default().execute_plan(plan))
                .run()
                .unwrap_err(),
        );
        assert!(
            error.contains(text) && error.contains(&format!("layer 0 ({name})")),
            "{error}"
        );
    }
}

/// A scaler that is restored, or made, in the middle of a run goes on from the engine's version.
#[test]
fn a_scaler_is_restored_in_mid_run() {
    let engine = small(&models::perceptron(DType::F32), 1, 2, sgd());
    let scaler = GradScaler::default();
    let step = |scaler: &GradScaler, step: u64| {
        let scale = engine.loss_scale(scaler).unwrap();
        let (x, weights) = models::numbers(step, 4, DType::F32);
        let loss = move |cx: &mut Cx, output: Tree, weights: Tree| {
            let loss = models::weighted(cx, output, weights)?;
            cx.mul_scalar(&loss, scale)
        };
        engine.forward_backward(x, weights, loss).unwrap();
        let update = Update::new(0.01);
        engine.update_scaled(&update, scaler, Lag::One).unwrap();
        scale
    };
    for number in 0..3 {
        assert_eq!(step(&scaler, number), 65536.0);
    }
    engine.synchronize().unwrap();
    let lower = ScalerState {
        scale: 1024.0,
        ..scaler.state()
    };
    scaler.restore(lower).unwrap();
    for number in 3..6 {
        assert_eq!(step(&scaler, number), 1024.0);
    }
    engine.synchronize().unwrap();
    assert_eq!(scaler.state().good, lower.good + 3);
    assert_eq!(step(&GradScaler::new(lower).unwrap(), 6), 1024.0);
}

/// A step with an overflow is skipped and halves the scale, at either lag, the same in every
/// executor.
#[test]
fn an_overflow_skips_the_step_and_halves_the_scale() {
    const STEPS: u64 = 6;
    let run = |serial: bool, workers: usize, lag: Lag| {
        let model = models::perceptron(DType::F16);
        let rule = Rule::AdamW(AdamW::default());
        let engine = builder(&model, workers, 3)
            .optimizer(rule)
            .ring_options(options(serial))
            .build()
            .unwrap();
        let state = ScalerState {
            scale: 1024.0,
            interval: 2,
            ..ScalerState::default()
        };
        let scaler = GradScaler::new(state).unwrap();
        let (mut trail, mut steps, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..STEPS {
            let (x, weights) = models::numbers(step, 6, DType::F16);
            let scale = engine.loss_scale(&scaler).unwrap();
            scales.push(scale);
            let factor = if step == 2 { f64::INFINITY } else { scale };
            let loss = move |cx: &mut Cx, output: Tree, weights: Tree| {
                let loss = models::weighted(cx, output, weights)?;
                let loss = cx.cast(&loss, DType::F32)?;
                let factor = cx.full(DType::F32, &[], factor)?;
                cx.mul(&loss, &factor)
            };
            let losses = engine.forward_backward(x, weights, loss).unwrap();
            trail.push(models::bits(&losses));
            steps.push(
                engine
                    .update_scaled(&Update::new(0.01), &scaler, lag)
                    .unwrap(),
            );
        }
        engine.synchronize().unwrap();
        let skipped: Vec<bool> = steps
            .iter()
            .map(|step| step.wait().unwrap().skipped)
            .collect();
        assert_eq!(skipped, [false, false, true, false, false, false]);
        let params = models::params(&model);
        assert!(
            params
                .iter()
                .flat_map(|(_, p)| p)
                .all(|bits| f64::from_bits(*bits).is_finite())
        );
        (trail, scales, scaler.scale_factor(), params)
    };
    for lag in [Lag::Zero, Lag::One] {
        let want = run(true, 1, lag);
        // 1024, doubled after two good steps, then the overflow.
        let at_overflow = want.1[2];
        assert!(want.1[3..].contains(&(at_overflow * 0.5)), "{:?}", want.1);
        for workers in [1, 3] {
            assert_eq!(run(false, workers, lag), want, "{lag:?}, {workers} workers");
        }
    }
}

/// Gradient descent written as a closure is the built-in rule, at either lag.
#[test]
fn a_closure_can_be_the_built_in_rule() {
    for (dtype, lag) in [
        (DType::F32, Lag::Zero),
        (DType::F32, Lag::One),
        (DType::BF16, Lag::One),
    ] {
        let run = |closure: bool| {
            let model = models::perceptron(dtype);
            let engine = small(&model, 2, 3, sgd());
            for step in 0..4 {
                let (x, weights) = models::numbers(step, 6, dtype);
                engine
                    .forward_backward(x, weights, models::weighted)
                    .unwrap();
                if closure {
                    let step = |params: &mut roundpipe::OptimParams<'_>| {
                        for param in params.iter_mut() {
                            let Some(grad) = param.grad_f32() else {
                                continue;
                            };
                            param
                                .value
                                .iter_mut()
                                .zip(grad)
                                .for_each(|(v, g)| *v -= 0.05 * g);
                        }
                        Ok(())
                    };
                    engine.step(step, lag).unwrap();
                } else {
                    engine
                        .update(&Update::new(f64::from(0.05f32)), lag)
                        .unwrap();
                }
            }
            engine.synchronize().unwrap();
            let copies: Vec<Vec<f32>> = engine
                .optim_parameters()
                .unwrap()
                .map(|p| p.to_vec().unwrap())
                .collect();
            (models::params(&model), copies)
        };
        assert_eq!(run(true), run(false), "{dtype}, {lag:?}");
    }
}

/// One number times the input, squared: what a step does can be told by hand.
struct Scale(Param);

impl Params for Scale {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("w", &self.0);
    }
}

impl Module for Scale {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let w = cx.get(&self.0)?;
        let y = cx.mul(x, &w)?;
        cx.mul(&y, &y)
    }
}

/// At lag 1 a call reads the weights from before the last step, at lag 0 the newest; the sequence
/// is the one computed by hand.
#[test]
fn lag_one_reads_the_weights_of_the_step_before() {
    let by_hand = |lag: usize| {
        let (mut versions, mut losses) = (vec![1.0f32], Vec::new());
        for step in 0..5usize {
            let read = versions[step.saturating_sub(lag)];
            losses.push(f64::from(read * read));
            versions.push(versions[step] - 0.25 * (2.0 * read));
        }
        (losses, versions[5])
    };
    assert_ne!(by_hand(0), by_hand(1));
    for (lag, behind) in [(Lag::Zero, 0), (Lag::One, 1)] {
        for workers in [1, 2] {
            let w = Param::full(DType::F32, &[1], 1.0).unwrap();
            let model = Sequential::new()
                .with(Scale(w.clone()))
                .with(Func(|cx: &mut Cx, x: &Tensor| cx.sum_all(x)));
            let engine = small(&model, workers, 1, sgd());
            let one = HostTensor::from_slice(&[1.0f32], &[1]).unwrap();
            let mut losses = Vec::new();
            for _ in 0..5 {
                losses.push(engine.train(one.clone()).run().unwrap().losses.total());
                engine.update(&Update::new(0.25), lag).unwrap();
            }
            engine.synchronize().unwrap();
            assert_eq!(
                (losses, w.to_vec::<f32>().unwrap()[0]),
                by_hand(behind),
                "{lag:?}, {workers} workers"
            );
        }
    }
}

// ---- names, numbers, refusals ----

/// Names of optimizer parameters: a prefix in front, shared ones once or under each name.
#[test]
fn optimizer_parameters_have_names() {
    let engine = invisible::engine(&models::transformer(DType::BF16, true), &way(1));
    let names = |prefix: &str, once: bool| -> Vec<String> {
        engine
            .optim_named_parameters(prefix, once)
            .unwrap()
            .map(|(name, _)| name)
            .collect()
    };
    let (once, all) = (names("", true), names("net", false));
    assert_eq!(
        (once.len() + 1, once[0].as_str()),
        (all.len(), "embed.tokens.weight")
    );
    assert_eq!(all.last().unwrap(), "net.head.weight");
    assert!(!once.contains(&"head.weight".to_owned()) && all[0] == "net.embed.tokens.weight");
    let copies: Vec<_> = engine
        .optim_named_parameters("", false)
        .unwrap()
        .map(|(_, copy)| copy)
        .collect();
    assert_eq!(
        copies[0].to_vec().unwrap(),
        copies.last().unwrap().to_vec().unwrap()
    );
    assert_eq!(engine.optim_parameters().unwrap().count(), once.len());
}

/// A name by default says where the engine was made; the original model is at hand.
#[test]
fn an_engine_has_a_name_and_its_model() {
    let line = line!() + 1;
    let engine = RoundPipe::builder(models::perceptron(DType::F32))
        .devices(models::cpus(1))
        .build()
        .unwrap();
    assert_eq!(engine.name(), format!("api.rs:{line}"));
    assert_eq!(engine.len(), 4, "the engine is its model when dereferenced");
    struct Original {
        vocab: usize,
    }
    let engine = engine.set_original_model(Original { vocab: 7 });
    assert_eq!(engine.vocab, 7);
    let (x, _) = models::numbers(0, 4, DType::F32);
    engine.forward(x, &RunConfig::default()).unwrap();
}

/// One microbatch more than workers by default; a small batch gives fewer and says so, once.
#[test]
fn microbatches_by_default_and_when_there_are_few_samples() {
    let model = models::perceptron(DType::F32);
    let build = || {
        RoundPipe::builder(model.clone())
            .devices(models::cpus(3))
            .build()
            .unwrap()
    };
    let engine = build();
    let run = |batch: usize| {
        let (x, weights) = models::numbers(0, batch, DType::F32);
        engine
            .forward_backward(x, weights, models::weighted)
            .unwrap()
            .microbatches()
            .len()
    };
    assert_eq!((run(8), engine.take_warnings().len()), (4, 0));
    assert_eq!(run(2), 2);
    let warnings = engine.take_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains('2') && warnings[0].contains('4'),
        "{warnings:?}"
    );
    assert!(engine.take_warnings().is_empty());
}

/// What cannot work is refused by name before anything runs, and the engine works on.
#[test]
fn what_cannot_work_is_refused() {
    let engine = small(&models::perceptron(DType::F32), 2, 2, sgd());
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let fused = |forward: &[usize], backward: &[usize]| {
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, forward, backward);
        let call = engine
            .train(x.clone())
            .labels(weights.clone())
            .loss(models::weighted);
        call.config(RunConfig::default().execute_plan(plan))
            .run()
            .unwrap_err()
            .to_string()
    };
    assert!(
        fused(&[1], &[2, 2]).contains("2..4"),
        "{}",
        fused(&[1], &[2, 2])
    );
    assert!(
        fused(&[2, 3], &[1, 4]).contains("2..5"),
        "{}",
        fused(&[2, 3], &[1, 4])
    );
    let refused = [
        engine
            .update(&Update::new(0.1), Lag::Zero)
            .unwrap_err()
            .to_string(),
        engine
            .forward(x.clone(), &RunConfig::default().num_microbatch(0))
            .unwrap_err()
            .to_string(),
        {
            let config = RunConfig::default().requires_grad(false);
            engine
                .forward(x.clone(), &config)
                .unwrap()
                .backward(weights.clone())
                .unwrap_err()
                .to_string()
        },
        {
            let config = RunConfig::default().merge_output(MergeOutput::Off);
            engine
                .forward(x.clone(), &config)
                .unwrap()
                .output()
                .unwrap_err()
                .to_string()
        },
        engine
            .train(x.clone())
            .labels(models::numbers(0, 3, DType::F32).1)
            .run()
            .unwrap_err()
            .to_string(),
    ];
    let texts = [
        "no gradients",
        "num_microbatch",
        "requires_grad off",
        "it is off",
        "label",
    ];
    for (error, text) in refused.iter().zip(texts) {
        assert!(error.contains(text), "{error}");
    }
    let lagless = builder(&models::perceptron(DType::F32), 1, 2)
        .optimizer(sgd())
        .max_lag(Lag::Zero);
    let lagless = lagless.build().unwrap();
    lagless
        .forward_backward(x.clone(), weights.clone(), models::weighted)
        .unwrap();
    let error = lagless
        .update(&Update::new(0.1), Lag::One)
        .unwrap_err()
        .to_string();
    assert!(error.contains("max_lag(Lag::One)"), "{error}");
    let ruleless = builder(&models::perceptron(DType::F32), 1, 2)
        .build()
        .unwrap();
    assert!(
        ruleless
            .update(&Update::new(0.1), Lag::Zero)
            .unwrap_err()
            .to_string()
            .contains("no rule")
    );
    engine
        .forward_backward(x, weights, models::weighted)
        .unwrap();
    engine.update(&Update::new(0.1), Lag::Zero).unwrap();
}

/// Several threads may call one engine: each gets its own answer, and gradients of all calls add
/// up.
#[test]
fn one_engine_serves_several_threads() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 3, 2, sgd());
    let plain = |inputs: &HostTensor| {
        models::plain_forward(&model, &HostInputs::from(inputs.clone()), (4, 2), 0, true)
    };
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (engine, answered) = (&engine, &answered);
            scope.spawn(move || {
                for call in 0..5 {
                    let (x, weights) = models::numbers(10 * thread + call, 4, DType::F32);
                    let config = RunConfig::default().requires_grad(call % 2 == 0);
                    let output = engine.forward(x.clone(), &config).unwrap();
                    let output = output.output().unwrap().clone().tensor().unwrap();
                    assert_eq!(
                        host_bits(&output),
                        plain(&x),
                        "thread {thread}, call {call}"
                    );
                    engine
                        .forward_backward(x, weights, models::weighted)
                        .unwrap();
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(answered.load(Ordering::Relaxed), 20);
    assert!(
        models::grads(&engine)
            .iter()
            .all(|(_, grad)| !grad.is_empty())
    );
    engine.update(&Update::new(0.1), Lag::One).unwrap();
    engine.synchronize().unwrap();
    assert_eq!(engine.steps(), 1);
}

/// Training on several threads at once, steps and all, ends and leaves finite weights.
#[test]
fn threads_may_train_one_engine_together() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 2, 2, sgd());
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let engine = &engine;
            scope.spawn(move || {
                for call in 0..6 {
                    let (x, weights) = models::numbers(10 * thread + call, 4, DType::F32);
                    engine
                        .forward_backward(x, weights, models::weighted)
                        .unwrap();
                    // Another thread's step may have taken these gradients along.
                    let lag = if call % 2 == 0 { Lag::One } else { Lag::Zero };
                    if let Err(error) = engine.update(&Update::new(0.01), lag) {
                        assert!(error.to_string().contains("no gradients"), "{error}");
                    }
                }
            });
        }
    });
    engine.synchronize().unwrap();
    let params = models::params(&model);
    assert!(
        params
            .iter()
            .flat_map(|(_, p)| p)
            .all(|bits| f64::from_bits(*bits).is_finite())
    );
}

/// Outputs can be had on a worker, to compute on there.
#[test]
fn outputs_land_on_the_worker_that_was_asked_for() {
    let model = models::resnet();
    let engine = RoundPipe::builder(model)
        .devices(models::cpus(2))
        .memory(Bytes::mib(32))
        .build()
        .unwrap();
    let (images, _) = models::images(0, 5);
    let config = RunConfig::new().num_microbatch(2).requires_grad(false);
    let here = engine.forward(images.clone(), &config).unwrap();
    assert!(
        here.tensors()
            .unwrap_err()
            .to_string()
            .contains("output_device")
    );
    let want = here
        .output()
        .unwrap()
        .clone()
        .tensor()
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    let there = engine
        .forward(
            images,
            &config.output_device(roundpipe::OutputDevice::Worker(1)),
        )
        .unwrap();
    let tensors = there.tensors().unwrap();
    let worker = &engine.ring().workers()[1];
    let mut got = Vec::new();
    for tree in tensors {
        let tensor = tree.tensor().unwrap();
        assert_eq!(tensor.device().id(), worker.device().id());
        got.extend(tensor.to_vec::<f32>().unwrap());
    }
    assert_eq!(got, want);
}

/// A trace has the copies too, each in its lane with its bytes, and none once it is off.
#[test]
fn copies_are_spans_of_a_trace() {
    use roundpipe::trace::{Category, Lane};
    let model = models::transformer(DType::F32, false);
    let world = SimWorld::seeded(3).unwrap();
    let devices: Vec<Arc<dyn roundpipe::Device>> = world
        .workers(2)
        .into_iter()
        .map(|worker| worker as Arc<dyn roundpipe::Device>)
        .collect();
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 2], &[2, 2, 2]);
    let engine = invisible::engine(
        &model,
        &Way {
            plan: Some(plan),
            ..Way::threaded(devices)
        },
    );
    let step = |at: u64| {
        let (inputs, labels) = models::tokens(at, 8, DType::F32);
        engine
            .forward_backward(inputs, labels, models::token_loss)
            .unwrap();
        engine.update(&Update::new(0.01), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
    };
    step(0);
    assert!(
        engine.trace().spans().is_empty(),
        "nothing is noted before it is on"
    );
    engine.trace().on();
    step(1);
    engine.trace().off();
    let spans = engine.trace().spans();
    let moved = |lane: Lane| -> u64 {
        let of = spans
            .iter()
            .filter(|s| s.track.lane == lane && s.category == Category::Transfer);
        of.map(|s| s.bytes.unwrap()).sum()
    };
    let bytes =
        |params: Vec<(String, Param)>| params.iter().map(|(_, p)| p.bytes() as u64).sum::<u64>();
    // Forward stages and backward ones bring four and six layers; gradients leave once.
    assert!(
        moved(Lane::ParamUpload) > bytes(model.named_params()),
        "{}",
        moved(Lane::ParamUpload)
    );
    assert_eq!(moved(Lane::GradDownload), bytes(model.trainable_params()));
    assert!(moved(Lane::ActivationUpload) > 0 && moved(Lane::ActivationDownload) > 0);
    let count = spans.len();
    step(2);
    assert_eq!(
        engine.trace().spans().len(),
        count,
        "nothing is noted once it is off"
    );
}

/// An engine that looks for devices itself keeps what it found; one that is given them has nothing
/// to tell.
#[test]
fn a_ring_keeps_the_notes_of_its_devices() {
    let options = RingOptions {
        memory: Some(Bytes::mib(8)),
        ..RingOptions::default()
    };
    let (note, skipped) = (
        Some("no driver".to_owned()),
        vec!["cuda:1 is left out: too old".to_owned()],
    );
    let found = Devices {
        workers: models::cpus(1),
        note,
        skipped,
    };
    let ring = Ring::of(&found, &options).unwrap();
    assert_eq!(
        ring.notes(),
        ["no GPU: no driver", "cuda:1 is left out: too old"]
    );
    assert!(
        Ring::new(&found.workers, &options)
            .unwrap()
            .notes()
            .is_empty()
    );
    let model = models::transformer(DType::F32, false);
    let engine = RoundPipe::builder(model)
        .ring_options(options)
        .build()
        .unwrap();
    assert_eq!(engine.ring().notes(), Devices::all().unwrap().notes());
}
