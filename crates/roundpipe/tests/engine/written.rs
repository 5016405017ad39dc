//! What calls read: the newest weights when they were waited for, what somebody wrote, and never
//! what was refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::{AdamW, Sgd};
use roundpipe::{
    Bytes, Cx, DType, Device, Error, ExecutePlan, Forward, HostTensor, Lag, MergeOutput, Module,
    Param, ParamVisitor, Params, PlanKind, RoundPipe, Rule, RunConfig, Sequential, Tensor,
    TensorResult, Tree, Update,
};
use roundpipe_tensor::SimWorld;

use crate::models;
use crate::simulation::chain;

fn model(dtype: DType) -> Sequential {
    let mut init = Init::new(7, dtype);
    Sequential::new()
        .named("a", Linear::new(&mut init, 4, 8, true).unwrap())
        .named("b", Linear::new(&mut init, 8, 3, true).unwrap())
}

fn sims() -> Vec<Arc<dyn Device>> {
    let world = SimWorld::seeded(5).unwrap();
    world
        .workers(2)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect()
}

fn builder(
    model: &Sequential,
    devices: Vec<Arc<dyn Device>>,
) -> roundpipe::engine::Builder<Sequential> {
    RoundPipe::builder(model.clone())
        .name("first")
        .optimizer(Rule::Sgd(Sgd::default()))
        .optimizer_threads(1)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(devices)
        .memory(Bytes::mib(8))
}

fn batch(dtype: DType) -> (HostTensor, HostTensor) {
    let x: Vec<f64> = (0..24).map(|i| (f64::from(i) * 0.37).sin()).collect();
    let x = HostTensor::from_f64s(&x, dtype, &[6, 4]).unwrap();
    (
        x,
        HostTensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6]).unwrap(),
    )
}

fn loss(cx: &mut Cx, output: Tree, labels: Tree) -> TensorResult<Tensor> {
    let logits = cx.cast(&output.tensor()?, DType::F32)?;
    cx.cross_entropy(&logits, &labels.tensor()?, Default::default())
}

fn train(engine: &RoundPipe, dtype: DType) {
    let (x, y) = batch(dtype);
    engine.forward_backward(x, y, loss).unwrap();
}

/// What the model says now.
fn outputs(engine: &RoundPipe, dtype: DType) -> Vec<u64> {
    let config = RunConfig::default().requires_grad(false);
    bits_of(&engine.forward(batch(dtype).0, &config).unwrap())
}

fn bits_of(forward: &Forward) -> Vec<u64> {
    let output = forward.output().unwrap().clone().tensor().unwrap();
    models::f64_bits(output.to_f64_vec().unwrap())
}

/// What an engine that never knew another version says of the weights that the parameters hold.
fn saved(from: &Sequential, dtype: DType) -> Vec<u64> {
    let copy = model(dtype);
    for ((_, from), (_, to)) in from.named_params().into_iter().zip(copy.named_params()) {
        let bytes = from.data().read_all().unwrap().bytes().to_vec();
        to.data()
            .write(0..to.bytes())
            .unwrap()
            .bytes()
            .copy_from_slice(&bytes);
    }
    outputs(&builder(&copy, models::cpus(1)).build().unwrap(), dtype)
}

fn write(param: &Param, value: f64) {
    let values = HostTensor::from_f64s(
        &vec![value; param.shape().numel()],
        param.dtype(),
        &[param.shape().numel()],
    );
    let bytes = values.unwrap().buf().read_all().unwrap().bytes().to_vec();
    param
        .data()
        .write(0..param.bytes())
        .unwrap()
        .bytes()
        .copy_from_slice(&bytes);
}

fn read(param: &Param) -> Vec<f64> {
    HostTensor::new(param.data(), param.dtype(), param.shape().dims())
        .unwrap()
        .to_f64_vec()
        .unwrap()
}

/// Without a wait a call with gradients after a step at lag 1 reads the version before. What is
/// evaluated is the newest, with or without a wait, which is what is saved; after one the next
/// training call starts from it too.
#[test]
fn what_is_evaluated_after_a_wait_is_what_is_saved() {
    for dtype in [DType::F32, DType::BF16] {
        for devices in [models::cpus(1), models::cpus(3), sims()] {
            let model = model(dtype);
            let engine = builder(&model, devices).build().unwrap();
            let first = outputs(&engine, dtype);
            train(&engine, dtype);
            engine.update(&Update::new(0.1), Lag::One).unwrap();
            let with_gradients = engine
                .forward(batch(dtype).0, &RunConfig::default())
                .unwrap();
            assert_eq!(bits_of(&with_gradients), first, "the lag");
            drop(with_gradients);
            let second = outputs(&engine, dtype);
            assert_ne!(second, first);
            engine.synchronize().unwrap();
            assert_eq!(outputs(&engine, dtype), second);
            assert_eq!(second, saved(&model, dtype));
            train(&engine, dtype);
            engine.synchronize().unwrap();
            let grads = models::grads(&engine);
            let copy = self::model(dtype);
            for ((_, from), (_, to)) in model.named_params().into_iter().zip(copy.named_params()) {
                let bytes = from.data().read_all().unwrap().bytes().to_vec();
                to.data()
                    .write(0..to.bytes())
                    .unwrap()
                    .bytes()
                    .copy_from_slice(&bytes);
            }
            let fresh = builder(&copy, models::cpus(1)).build().unwrap();
            train(&fresh, dtype);
            fresh.synchronize().unwrap();
            assert_eq!(models::grads(&fresh), grads);
        }
    }
}

/// A function that is the first step of an engine, without gradients, finds masters that were made
/// from the weights before the update closed them.
#[test]
fn a_step_function_may_come_first() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for devices in [models::cpus(1), sims()] {
            let model = model(dtype);
            // One slab: the weights that masters are made from are those that the update writes.
            let builder = builder(&model, devices).max_lag(Lag::Zero);
            let engine = builder.build().unwrap();
            let halve = |params: &mut roundpipe::OptimParams<'_>| {
                params.iter_mut().for_each(|param| param.value.fill(0.5));
                Ok(())
            };
            let step = engine.step(halve, Lag::Zero).unwrap();
            step.wait().unwrap();
            let halves = models::f64_bits(vec![0.5]);
            for (name, bits) in models::params(&model) {
                assert!(
                    bits.iter().all(|bits| *bits == halves[0]),
                    "{name}, {dtype}"
                );
            }
        }
    }
}

/// A step function that is refused, by an error or a panic, changes nothing that any call reads:
/// not the newest weights, not the version before, not the copies, for every type and lag; and a
/// forward that was kept has its gradients.
#[test]
fn a_refused_step_function_leaves_every_version_as_it_was() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (first, second) in [Lag::Zero, Lag::One]
            .into_iter()
            .flat_map(|a| [(a, Lag::Zero), (a, Lag::One)])
        {
            for devices in [models::cpus(2), sims()] {
                let run = |refused: Option<bool>| {
                    let engine = builder(&model(dtype), devices.clone()).build().unwrap();
                    train(&engine, dtype);
                    engine.update(&Update::new(0.1), first).unwrap();
                    let before = outputs(&engine, dtype);
                    let kept = engine
                        .forward(batch(dtype).0, &RunConfig::default())
                        .unwrap();
                    if let Some(panics) = refused {
                        train(&engine, dtype);
                        let step = engine.step(
                            move |params| {
                                params.iter_mut().for_each(|param| param.value.fill(0.5));
                                assert!(!panics, "no step");
                                Err(Error::config("step", "no step"))
                            },
                            second,
                        );
                        let text = chain(&step.and_then(|step| step.wait()).unwrap_err());
                        assert!(text.contains("no step"), "{text}");
                        assert_eq!(
                            outputs(&engine, dtype),
                            before,
                            "{dtype} {first:?} {second:?}"
                        );
                    }
                    let seed = HostTensor::from_f64s(&[0.125; 18], dtype, &[6, 3]).unwrap();
                    kept.backward(seed).unwrap();
                    engine.synchronize().unwrap();
                    let copies: Vec<Vec<f32>> = engine
                        .optim_parameters()
                        .unwrap()
                        .map(|param| param.to_vec().unwrap())
                        .collect();
                    (
                        models::grads(&engine),
                        outputs(&engine, dtype),
                        copies,
                        engine.steps(),
                    )
                };
                let want = run(None);
                for panics in [false, true] {
                    assert!(
                        run(Some(panics)) == want,
                        "{dtype} {first:?} {second:?}, panics {panics}"
                    );
                }
            }
        }
    }
}

/// Values written into a parameter between steps are what calls read, at either lag, and what the
/// next step starts from, also where the optimizer has copies; what was not written keeps its full
/// precision.
#[test]
fn written_values_are_read_and_trained_on() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for lag in [Lag::Zero, Lag::One] {
            for devices in [models::cpus(2), sims()] {
                let model = model(dtype);
                let engine = builder(&model, devices).build().unwrap();
                for _ in 0..2 {
                    train(&engine, dtype);
                    engine.update(&Update::new(0.01), lag).unwrap();
                }
                engine.synchronize().unwrap();
                let copies = || -> Vec<(String, Vec<f32>)> {
                    let all = engine.optim_parameters().unwrap();
                    all.map(|param| (param.name.clone(), param.to_vec().unwrap()))
                        .collect()
                };
                let before = copies();
                let params = model.named_params();
                let (_, bias) = params.iter().find(|(name, _)| name == "a.bias").unwrap();
                write(bias, 0.75);
                assert_eq!(
                    outputs(&engine, dtype),
                    saved(&model, dtype),
                    "{dtype} {lag:?}"
                );
                train(&engine, dtype);
                engine.update(&Update::new(0.0), lag).unwrap();
                engine.synchronize().unwrap();
                assert_eq!(read(bias), [0.75; 8], "{dtype} {lag:?}");
                for ((name, old), (_, new)) in before.iter().zip(copies()) {
                    match name.as_str() {
                        "a.bias" => assert_eq!(new, [0.75f32; 8]),
                        _ => assert_eq!(*old, new, "{name}"),
                    }
                }
            }
        }
    }
}

/// A write through a handle from before a step goes to memory that the parameter has left: the next
/// step refuses it with a line instead of losing it without one.
#[test]
fn a_write_to_old_memory_is_reported() {
    let model = model(DType::F32);
    let engine = builder(&model, models::cpus(1)).build().unwrap();
    let (_, bias) = model.named_params().remove(1);
    let old = bias.data();
    let step = || {
        train(&engine, DType::F32);
        engine
            .update(&Update::new(0.01), Lag::One)
            .map(drop)
            .and_then(|()| engine.synchronize())
    };
    step().unwrap();
    old.write(0..old.len())
        .unwrap()
        .as_mut_slice::<f32>()
        .fill(1.0);
    let before = models::params(&model);
    let text = chain(&step().unwrap_err());
    assert!(
        text.contains("a.bias") && text.contains("lost") && text.contains("synchronize"),
        "{text}"
    );
    assert_eq!((models::params(&model), engine.steps()), (before, 1));
    step().unwrap();
    assert_eq!(engine.steps(), 2);
}

/// A step that has to wait because the user writes a parameter takes none of its own attempts for a
/// user's write.
#[test]
fn a_step_waits_for_a_write_that_is_under_way() {
    let model = model(DType::BF16);
    let engine = builder(&model, models::cpus(1)).build().unwrap();
    let (_, bias) = model.named_params().remove(1);
    train(&engine, DType::BF16);
    engine.synchronize().unwrap();
    let mut held = bias.data().write(0..bias.bytes()).unwrap();
    engine.update(&Update::new(0.0), Lag::One).unwrap();
    // Long enough for several attempts of the step; with fewer the test still passes.
    std::thread::sleep(Duration::from_millis(50));
    held.bytes().fill(0);
    drop(held);
    engine.synchronize().unwrap();
    assert_eq!((read(&bias), engine.steps()), (vec![0.0; 8], 1));
}

/// Adds one to a buffer, slowly.
struct SlowCount {
    count: Param,
}

impl Params for SlowCount {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("count", &self.count);
    }
}

impl Module for SlowCount {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        std::thread::sleep(Duration::from_millis(20));
        let count = cx.get(&self.count)?;
        let one = cx.full(DType::F32, &[1], 1.0)?;
        let more = cx.no_grad(|cx| cx.add(&count, &one))?;
        cx.set_buffer(&self.count, &more)?;
        Ok(x.clone())
    }
}

/// Once an engine is dropped it writes nothing, also where the user keeps a forward that was still
/// running.
#[test]
fn a_dropped_engine_sets_no_buffer_later() {
    for merge in [MergeOutput::Auto, MergeOutput::Off] {
        let count = Param::zeros(DType::F32, &[1]).unwrap().frozen();
        let model = model(DType::F32).named(
            "count",
            SlowCount {
                count: count.clone(),
            },
        );
        let engine = builder(&model, models::cpus(1)).build().unwrap();
        let config = RunConfig::default().merge_output(merge);
        let kept = engine.forward(batch(DType::F32).0, &config).unwrap();
        drop(engine);
        assert_eq!(
            count.to_vec::<f32>().unwrap(),
            [2.0],
            "one for each microbatch"
        );
        drop(kept);
        assert_eq!(count.to_vec::<f32>().unwrap(), [2.0]);
    }
}

/// One parameter has one trainer at a time; the error names the other one and the ways out.
#[test]
fn a_second_engine_over_the_same_weights_is_refused() {
    let model = model(DType::BF16);
    let first = builder(&model, models::cpus(1)).build().unwrap();
    let text = builder(&model, models::cpus(1))
        .build()
        .err()
        .unwrap()
        .to_string();
    assert!(
        text.contains("a.weight") && text.contains("first") && text.contains("inference(true)"),
        "{text}"
    );
    train(&first, DType::BF16);
    first.update(&Update::new(0.1), Lag::Zero).unwrap();
    // Outputs that somebody still holds are no reason to refuse the next one.
    let kept = first
        .forward(batch(DType::BF16).0, &RunConfig::default())
        .unwrap();
    let unmerged = kept.unmerged();
    train(&first, DType::BF16);
    first.update(&Update::new(0.1), Lag::One).unwrap();
    drop(first);
    let second = builder(&model, models::cpus(1)).build().unwrap();
    let newest = models::params(&model);
    assert!(unmerged.wait(0).is_ok() && kept.output().is_ok());
    drop(kept);
    assert_eq!(models::params(&model), newest);
    train(&second, DType::BF16);
    second.update(&Update::new(0.1), Lag::Zero).unwrap();
    second.synchronize().unwrap();
    assert_ne!(models::params(&model), newest);
}

/// An engine for inference reads the newest weights of the one that trains, whatever the lag and
/// where weights stay, and training goes on as if it were not there.
#[test]
fn an_engine_for_inference_follows_the_one_that_trains() {
    for dtype in [DType::F32, DType::BF16] {
        for lag in [Lag::Zero, Lag::One] {
            for devices in [models::cpus(1), sims()] {
                let (model, alone) = (model(dtype), model(dtype));
                let reader_of = |model: &Sequential| {
                    let reader = builder(model, devices.clone())
                        .inference(true)
                        .resident(true)
                        .build()
                        .unwrap();
                    reader.set_training(false);
                    reader
                };
                // One that was there before, one from the start, one that comes later.
                let early = reader_of(&model);
                let trainer = builder(&model, devices.clone()).build().unwrap();
                let plain = builder(&alone, devices.clone()).build().unwrap();
                let mut readers = vec![early, reader_of(&model)];
                for step in 0..4 {
                    for engine in [&trainer, &plain] {
                        train(engine, dtype);
                        engine.update(&Update::new(0.1), lag).unwrap();
                    }
                    if step == 1 {
                        readers.push(reader_of(&model));
                    }
                    for reader in &readers {
                        let said = outputs(reader, dtype);
                        trainer.synchronize().unwrap();
                        assert_eq!(said, saved(&model, dtype), "{dtype} {lag:?} step {step}");
                    }
                    // The other one is waited for as often, since that changes what the next call
                    // reads.
                    plain.synchronize().unwrap();
                }
                assert_eq!(
                    models::params(&model),
                    models::params(&alone),
                    "{dtype} {lag:?}"
                );
                let refused = readers[0].forward_backward(batch(dtype).0, batch(dtype).1, loss);
                assert!(refused.unwrap_err().to_string().contains("inference(true)"));
            }
        }
    }
}

/// Where weights stay from call to call, values written behind their copy to a worker and before the
/// job that reads them are what the next call reads.
#[test]
fn weights_written_behind_their_copy_do_not_stay() {
    for workers in [1, 2] {
        let model = model(DType::F32);
        let opened = Arc::new(AtomicBool::new(false));
        let gate = opened.clone();
        let gated = Sequential::new()
            .with(Func(move |_: &mut Cx, x: &Tensor| {
                while !gate.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                Ok(x.clone())
            }))
            .with(model.clone());
        let devices = SimWorld::seeded(5).unwrap().workers(workers);
        let devices = devices.into_iter().map(|worker| worker as Arc<dyn Device>);
        let resident = builder(&gated, devices.collect()).inference(true);
        let engine = resident.resident(true).build().unwrap();
        engine.set_training(false);
        let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1, 1], &[]);
        let config = RunConfig::default().requires_grad(false);
        let config = config.execute_plan(plan);
        let says = || bits_of(&engine.forward(batch(DType::F32).0, &config).unwrap());
        std::thread::scope(|scope| {
            let first = scope.spawn(says);
            // Long enough for the copy of the second stage's weights; with less the test still
            // passes.
            std::thread::sleep(Duration::from_millis(50));
            write(&model.named_params()[2].1, 0.75);
            opened.store(true, Ordering::SeqCst);
            first.join().unwrap();
        });
        assert_eq!(says(), saved(&model, DType::F32), "{workers} workers");
    }
}

/// A layer, loss or step function that calls its own engine would wait for itself: it gets an error
/// instead.
#[test]
fn calls_from_within_are_refused() {
    let model = model(DType::F32);
    let engine = Arc::new(
        builder(&model, models::cpus(2))
            .optimizer(Rule::AdamW(AdamW::default()))
            .build()
            .unwrap(),
    );
    let (x, y) = batch(DType::F32);
    let inner = engine.clone();
    let again = move |cx: &mut Cx, output: Tree, labels: Tree| {
        let called = inner
            .forward(batch(DType::F32).0, &RunConfig::default())
            .map(drop)
            .and(inner.synchronize());
        let text = called.unwrap_err().to_string();
        assert!(text.contains("would wait for itself"), "{text}");
        loss(cx, output, labels)
    };
    engine.forward_backward(x, y, again).unwrap();
    let inner = engine.clone();
    let step = engine.step(
        move |_| {
            assert_eq!(inner.steps(), 1);
            inner.synchronize()
        },
        Lag::Zero,
    );
    assert!(
        step.map(drop)
            .unwrap_err()
            .to_string()
            .contains("would wait for itself")
    );
    engine.synchronize().unwrap();
}

/// An engine for inference does not wait for a step that will never be done.
#[test]
fn a_failed_step_holds_up_nobody_who_reads_its_weights() {
    let model = model(DType::F32);
    let trainer = builder(&model, models::cpus(1)).build().unwrap();
    let reader = builder(&model, models::cpus(1))
        .inference(true)
        .build()
        .unwrap();
    let before = outputs(&reader, DType::F32);
    train(&trainer, DType::F32);
    trainer
        .step(|_| Err(Error::config("step", "no step")), Lag::One)
        .unwrap();
    assert_eq!(outputs(&reader, DType::F32), before);
    assert!(trainer.synchronize().is_err());
}

/// Gradients are floats.
#[test]
fn a_gradient_of_integers_is_refused() {
    let engine = builder(&model(DType::F32), models::cpus(1))
        .build()
        .unwrap();
    let forward = engine
        .forward(batch(DType::F32).0, &RunConfig::default())
        .unwrap();
    let grads = HostTensor::from_slice(&[1i64; 18], &[6, 3]).unwrap();
    let text = forward.backward(grads).map(drop).unwrap_err().to_string();
    assert!(text.contains("i64") && text.contains("floats"), "{text}");
}
