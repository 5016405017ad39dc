//! What stays on a worker between calls: outputs that the next call takes, and weights that do not
//! change.

use std::collections::BTreeMap;
use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::trace::{Category, Lane};
use roundpipe::{
    Cx, DType, Device, ExecutePlan, HostTensor, Inputs, Layer, MergeOutput, Module, OutputDevice,
    ParamVisitor, Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, TensorError,
    TensorResult, Tree,
};
use roundpipe_tensor::SimWorld;
use roundpipe_tensor::sim::{Fault, FaultKind};

use crate::models;
use crate::simulation::chain;

/// Adds what it sees to a running sum that it passes on: the smallest thing with a past.
struct Adds {
    name: String,
    linear: Linear,
}

impl Params for Adds {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("linear", &self.linear);
    }
}

impl Layer for Adds {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let Tree::Map(mut map) = input else {
            return Err(TensorError::invalid("adds", "a map is expected"));
        };
        let mut past = match map.remove("past") {
            // A whole output of the call before, of which the past is one entry.
            Some(Tree::Map(mut last)) => match last.remove("past") {
                Some(Tree::Map(past)) => past,
                _ => last,
            },
            _ => BTreeMap::new(),
        };
        let x = map.remove("x").expect("x is given").tensor()?;
        let y = self.linear.forward(cx, &x)?;
        let sum = match past.remove(&self.name) {
            Some(before) => cx.add(&before.tensor()?, &y)?,
            None => y,
        };
        past.insert(self.name.clone(), sum.clone().into());
        Ok(Tree::Map(
            [
                ("x".to_owned(), sum.into()),
                ("past".to_owned(), Tree::Map(past)),
            ]
            .into(),
        ))
    }
}

fn model() -> Sequential {
    let mut init = Init::new(5, DType::F32);
    let mut model = Sequential::new();
    for i in 0..4 {
        let linear = Linear::new(&mut init, 8, 8, true).unwrap();
        model = model.named(
            format!("adds{i}"),
            Adds {
                name: format!("sum{i}"),
                linear,
            },
        );
    }
    model.set_trainable(false);
    model
}

fn engine(devices: Vec<Arc<dyn Device>>, resident: bool) -> RoundPipe {
    let engine = RoundPipe::builder(model())
        .devices(devices)
        .resident(resident);
    let options = RingOptions {
        memory: Some(roundpipe::Bytes::mib(1)),
        ..RingOptions::default()
    };
    engine.ring_options(options).build().unwrap()
}

/// Five calls, each with the output of the last as its past; the sums that came out.
fn run(engine: &RoundPipe, output: OutputDevice) -> Vec<Vec<f64>> {
    engine.set_training(false);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1, 2, 1], &[]);
    let config = RunConfig::new()
        .num_microbatch(1)
        .requires_grad(false)
        .merge_output(MergeOutput::Off);
    let config = config.output_device(output).execute_plan(plan);
    let mut last = None;
    let mut seen = Vec::new();
    for step in 0..5 {
        let x: Vec<f64> = (0..16).map(|i| f64::from(i + step) / 7.0).collect();
        let x = HostTensor::from_f64s(&x, DType::F32, &[2, 8]).unwrap();
        let mut args = Inputs::new().named("x", x);
        if let Some(last) = last.take() {
            args = args.named("past", last);
        }
        let outputs = engine.forward(args, &config).unwrap().unmerged();
        let x = outputs.get("x").wait(0).unwrap().tensor().unwrap();
        seen.push(x.to_f64_vec().unwrap());
        last = Some(outputs);
    }
    seen
}

/// Outputs that stay on the worker give the same bits as those that go through the host, and move
/// less.
#[test]
fn outputs_may_stay_for_the_next_call() {
    let host = run(&engine(models::cpus(1), false), OutputDevice::Host);
    assert_eq!(
        run(&engine(models::cpus(1), false), OutputDevice::Worker(0)),
        host
    );
    assert_eq!(
        run(&engine(models::cpus(3), false), OutputDevice::Worker(0)),
        host,
        "three workers"
    );
    for output in [OutputDevice::Host, OutputDevice::Worker(0)] {
        let world = SimWorld::seeded(9).unwrap();
        let devices: Vec<Arc<dyn Device>> = world
            .workers(1)
            .into_iter()
            .map(|worker| worker as Arc<dyn Device>)
            .collect();
        let engine = engine(devices, false);
        engine.trace().on();
        assert_eq!(run(&engine, output), host, "{output:?}");
        engine.synchronize().unwrap();
        let spans = engine.trace().spans();
        let uploads = spans
            .iter()
            .filter(|s| s.track.lane == Lane::ActivationUpload);
        let bytes: u64 = uploads.filter_map(|s| s.bytes).sum();
        match output {
            OutputDevice::Host => assert!(bytes > 5 * 64, "{bytes}"),
            OutputDevice::Worker(_) => assert_eq!(bytes, 5 * 64, "only the five inputs"),
        }
        assert!(world.races().is_empty(), "{:?}", world.races());
    }
}

/// Weights that stay are sent once, for any number of calls.
#[test]
fn weights_may_stay_for_the_next_call() {
    let mut bytes = Vec::new();
    let mut seen = Vec::new();
    for resident in [false, true] {
        let world = SimWorld::seeded(4).unwrap();
        let devices: Vec<Arc<dyn Device>> = world
            .workers(1)
            .into_iter()
            .map(|worker| worker as Arc<dyn Device>)
            .collect();
        let engine = engine(devices, resident);
        engine.trace().on();
        seen.push(run(&engine, OutputDevice::Host));
        engine.synchronize().unwrap();
        let spans = engine.trace().spans();
        let sent = spans
            .iter()
            .filter(|s| s.track.lane == Lane::ParamUpload && s.category == Category::Transfer);
        bytes.push(sent.filter_map(|s| s.bytes).sum::<u64>());
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(bytes[0], 5 * bytes[1]);
}

/// One call without merging: its first output where it is.
fn forward(
    engine: &RoundPipe,
    merge: MergeOutput,
) -> roundpipe::Result<roundpipe::engine::Forward> {
    engine.set_training(false);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1, 2, 1], &[]);
    let config = RunConfig::new()
        .num_microbatch(1)
        .requires_grad(false)
        .merge_output(merge)
        .execute_plan(plan);
    let x = HostTensor::from_f64s(&[0.25; 16], DType::F32, &[2, 8])?;
    engine.forward(Inputs::new().named("x", x), &config)
}

fn faulty(resident: bool) -> (SimWorld, RoundPipe) {
    let world = SimWorld::seeded(9).unwrap();
    let devices: Vec<Arc<dyn Device>> = world
        .workers(1)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect();
    let engine = engine(devices, resident);
    (world, engine)
}

/// A failure that only the reader of an output meets, after its call has ended, is told to that
/// reader; later calls are as good as new.
#[test]
fn a_failure_behind_the_end_of_a_call_does_not_last() {
    for resident in [false, true] {
        let (world, engine) = faulty(resident);
        let good = forward(&engine, MergeOutput::Off)
            .unwrap()
            .unmerged()
            .get("x")
            .wait(0)
            .unwrap();
        let good = good.tensor().unwrap().to_f64_vec().unwrap();
        world.inject(Fault::nth(FaultKind::Kernel, 1));
        let told =
            forward(&engine, MergeOutput::Off).and_then(|out| out.unmerged().get("x").wait(0));
        let told = chain(&told.unwrap_err());
        assert!(told.contains("injected"), "resident {resident}: {told}");
        // Where its call met it too, that is told as well.
        let _ = engine.synchronize();
        for _ in 0..3 {
            let x = forward(&engine, MergeOutput::Off)
                .unwrap()
                .unmerged()
                .get("x")
                .wait(0)
                .unwrap();
            assert_eq!(
                x.tensor().unwrap().to_f64_vec().unwrap(),
                good,
                "resident {resident}"
            );
        }
        engine.synchronize().unwrap();
    }
}

/// Whoever reads the output of a call whose work failed is told, however late, and whoever was told
/// before.
#[test]
fn a_late_reader_is_told_too() {
    let (world, engine) = faulty(false);
    world.inject(Fault::nth(FaultKind::Kernel, 1));
    let first = forward(&engine, MergeOutput::Off).unwrap().unmerged();
    let second = forward(&engine, MergeOutput::Auto);
    assert!(second.and_then(|out| out.output().map(drop)).is_err());
    engine.synchronize().ok();
    let third = forward(&engine, MergeOutput::Auto).unwrap();
    assert!(third.output().is_ok());
    assert!(first.get("x").wait(0).is_err(), "poison is no output");
}
