//! Offloading is invisible on a GPU too: workers of one card, resident or offloaded, every grain
//! and lag. Without a GPU this is skipped, and says so.

#[path = "../../../roundpipe-tensor/tests/support/skip.rs"]
mod skip;

use std::sync::Arc;

use roundpipe::nn::Func;
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Inputs, Lag, PlanKind, RoundPipe,
    RunConfig, Sequential, Tensor, Update,
};
use roundpipe_tensor::{Cuda, DeviceKind};

use crate::invisible::{Way, rule, run_for, same};
use crate::models;
use crate::simulation::chain;

const STEPS: u64 = 20;

fn workers(count: usize) -> Option<Vec<Arc<dyn Device>>> {
    match Cuda::workers(0, count) {
        Ok(workers) => Some(
            workers
                .into_iter()
                .map(|worker| worker as Arc<dyn Device>)
                .collect(),
        ),
        Err(error) => {
            let test = std::thread::current()
                .name()
                .unwrap_or("a test of a GPU")
                .to_owned();
            skip::skipped(&test, &error.to_string());
            None
        }
    }
}

#[test]
fn a_gpu_trains_to_the_same_bits_however_it_is_run() {
    for dtype in [DType::F32, DType::BF16] {
        let batch = move |step| models::tokens(step, 9, dtype);
        let model = || models::transformer(dtype, true);
        for lag in [Lag::Zero, Lag::One] {
            let Some(one) = workers(1) else { return };
            let whole = ExecutePlan::from_sizes(PlanKind::Fused, &[], &[6]);
            let cut = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 2], &[2, 1, 3]);
            let serial = Way {
                serial: true,
                lag,
                plan: Some(whole.clone()),
                ..Way::threaded(one)
            };
            let want = run_for(STEPS, &model(), &serial, &batch, models::token_loss);
            for count in [1, 2, 4] {
                for grain in [Grain::Stage, Grain::Layer] {
                    for plan in [&whole, &cut] {
                        for keep in [Bytes(0), Bytes::mib(8)] {
                            let Some(devices) = workers(count) else {
                                return;
                            };
                            let (plan, keep) = (Some(plan.clone()), Some(keep));
                            let way = Way {
                                grain,
                                plan,
                                keep,
                                lag,
                                ..Way::threaded(devices)
                            };
                            let got = run_for(STEPS, &model(), &way, &batch, models::token_loss);
                            same(
                                &format!("{dtype} {lag:?} {count} workers {grain:?} {keep:?}"),
                                &want,
                                &got,
                            );
                        }
                    }
                }
            }
        }
    }
}

fn beside_context(device: &dyn Device, memory: Bytes) -> Bytes {
    Bytes(memory.0 + device.cost_model().context_bytes().0)
}

/// An engine with so much memory beside the context.
fn engine(device: Arc<dyn Device>, memory: Bytes) -> RoundPipe {
    let memory = beside_context(&*device, memory);
    RoundPipe::builder(models::transformer(DType::F32, true))
        .optimizer(rule())
        .devices([device])
        .memory(memory)
        .run_config(RunConfig::default().num_microbatch(2))
        .build()
        .unwrap()
}

/// A kernel that meets what it must refuse says so at the next fence; the step leaves no trace.
#[test]
fn an_index_out_of_range_on_a_gpu_is_an_error_and_nothing_else() {
    let Some(device) = workers(1).map(|mut all| all.remove(0)) else {
        return;
    };
    let engine = engine(device, Bytes::mib(64));
    let before = models::params(&engine);
    let (good, labels) = models::tokens(0, 6, DType::F32);
    let mut ids = good.named["ids"]
        .clone()
        .tensor()
        .unwrap()
        .to_vec::<i64>()
        .unwrap();
    ids[5] = 999;
    let ids = HostTensor::from_slice(&ids, &[6, models::SEQ]).unwrap();
    let bad = Inputs::new()
        .named("ids", ids)
        .named("scale", good.named["scale"].clone());
    let trained = engine.forward_backward(bad, labels.clone(), models::token_loss);
    let ended = trained
        .and_then(|_| engine.update(&Update::new(0.1), Lag::Zero))
        .and_then(|_| engine.synchronize());
    let text = chain(&ended.unwrap_err());
    assert!(
        text.contains("999") && text.contains("cuda:0") && text.contains("stage"),
        "{text}"
    );
    assert_eq!(models::params(&engine), before, "the step left a trace");
    engine
        .forward_backward(good, labels, models::token_loss)
        .unwrap();
    engine.update(&Update::new(0.1), Lag::Zero).unwrap();
    engine.synchronize().unwrap();
    assert_ne!(models::params(&engine), before);
}

/// Memory that is not enough is an error that names the task; what fits runs afterwards.
#[test]
fn an_exhausted_gpu_is_an_error_and_smaller_batches_still_run() {
    let Some(device) = workers(1).map(|mut all| all.remove(0)) else {
        return;
    };
    let engine = engine(device, Bytes(16 << 20));
    let (inputs, labels) = models::tokens(0, 64_000, DType::F32);
    let text = chain(
        &engine
            .forward_backward(inputs, labels, models::token_loss)
            .unwrap_err(),
    );
    assert!(text.contains("layer") || text.contains("stage"), "{text}");
    let (inputs, labels) = models::tokens(0, 2, DType::F32);
    engine
        .forward_backward(inputs, labels, models::token_loss)
        .unwrap();
    engine.synchronize().unwrap();
    assert!(engine.ring().workers()[0].usage().high_water <= Bytes(16 << 20));
}

/// A GPU that breaks down is lost to the whole process, so this runs in one of its own.
#[test]
fn a_gpu_that_breaks_down_is_an_error_that_names_the_task() {
    if workers(1).is_none() {
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "gpu::child_on_a_gpu_that_breaks_down",
        "--ignored",
        "--nocapture",
    ]);
    let output = command.env(CHILD, "1").output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(
        output.status.success() && text[0].contains("1 passed"),
        "{}\n{}",
        text[0],
        text[1]
    );
}

const CHILD: &str = "ROUNDPIPE_TEST_CHILD";

#[test]
#[ignore = "run by a_gpu_that_breaks_down_is_an_error_that_names_the_task"]
fn child_on_a_gpu_that_breaks_down() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let cuda = Cuda::new(0).unwrap();
    let breaker = cuda.clone();
    // Plans are made on meta, which has nothing to break.
    let fault = Func(move |cx: &mut Cx, x: &Tensor| {
        if cx.worker().device().id().kind == DeviceKind::Cuda {
            breaker.trap()?;
        }
        Ok(x.clone())
    });
    let build = |model: Sequential, device: Arc<dyn Device>| {
        let memory = beside_context(&*device, Bytes::mib(64));
        let builder = RoundPipe::builder(model)
            .optimizer(rule())
            .devices([device])
            .memory(memory);
        builder.build().unwrap()
    };
    let engine = build(models::perceptron(DType::F32).named("fault", fault), cuda);
    let step = |engine: &RoundPipe| {
        let (x, weights) = models::numbers(0, 6, DType::F32);
        let trained = engine.forward_backward(x, weights, models::weighted);
        trained
            .and_then(|_| engine.update(&Update::new(0.1), Lag::Zero))
            .and_then(|_| engine.synchronize())
    };
    for _ in 0..2 {
        let text = chain(&step(&engine).unwrap_err());
        assert!(
            text.contains("cuda:0") && text.contains("the device is lost, restart the program"),
            "{text}"
        );
        assert!(text.contains("layer") || text.contains("stage"), "{text}");
    }
    drop(engine);
    step(&build(
        models::perceptron(DType::F32),
        models::cpus(1).remove(0),
    ))
    .unwrap();
}
