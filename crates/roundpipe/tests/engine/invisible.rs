//! Offloading is invisible: no bit depends on workers, plans, grains or threads.

use std::sync::Arc;

use roundpipe::optim::AdamW;
use roundpipe::{
    DType, Device, ExecutePlan, Grain, HostInputs, HostTensor, Lag, PlanKind, RingOptions,
    RoundPipe, Rule, RunConfig, Sequential, Tree, Update,
};

use crate::models::{self, Trail};

const STEPS: u64 = 5;
const LR: f64 = 0.01;

pub fn rule() -> Rule {
    Rule::AdamW(AdamW {
        weight_decay: 0.05,
        ..AdamW::default()
    })
}

/// How a model is run.
#[derive(Clone)]
pub struct Way {
    pub devices: Vec<Arc<dyn Device>>,
    pub serial: bool,
    pub grain: Grain,
    pub plan: Option<ExecutePlan>,
    pub lag: Lag,
    pub microbatches: usize,
    pub keep: Option<roundpipe::Bytes>,
}

impl Way {
    pub fn threaded(devices: Vec<Arc<dyn Device>>) -> Self {
        let (grain, lag) = (Grain::Stage, Lag::Zero);
        Self {
            devices,
            serial: false,
            grain,
            plan: None,
            lag,
            microbatches: 4,
            keep: None,
        }
    }
}

type Batch = dyn Fn(u64) -> (HostInputs, HostTensor);

pub fn engine(model: &Sequential, way: &Way) -> RoundPipe {
    let mut config = RunConfig::default()
        .num_microbatch(way.microbatches)
        .recompute_grain(way.grain);
    config.execute_plan = way.plan.clone();
    // What is asked for includes the context of the device.
    let context = way.devices[0].cost_model().context_bytes();
    let memory = Some(roundpipe::Bytes(roundpipe::Bytes::mib(48).0 + context.0));
    RoundPipe::builder(model.clone())
        .optimizer(rule())
        .optimizer_threads(1)
        .max_lag(way.lag)
        .seed(models::SEED)
        .on_stall(std::time::Duration::from_secs(20), models::show_stall)
        .run_config(config)
        .devices(way.devices.clone())
        .ring_options(RingOptions {
            memory,
            serial: way.serial,
            activation_budget: way.keep,
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

type Loss = fn(&mut roundpipe::Cx, Tree, Tree) -> roundpipe::TensorResult<roundpipe::Tensor>;

/// Five steps by the engine.
pub fn run(model: &Sequential, way: &Way, batch: &Batch, loss: Loss) -> Trail {
    run_for(STEPS, model, way, batch, loss)
}

/// Steps by the engine.
pub fn run_for(steps: u64, model: &Sequential, way: &Way, batch: &Batch, loss: Loss) -> Trail {
    let engine = engine(model, way);
    let mut trail = Trail {
        losses: Vec::new(),
        grads: Vec::new(),
        params: Vec::new(),
    };
    for step in 0..steps {
        let (inputs, labels) = batch(step);
        let losses = engine.forward_backward(inputs, labels, loss).unwrap();
        trail.losses.push(models::bits(&losses));
        if step + 1 == steps {
            engine.synchronize().unwrap();
            let grads = engine.gradients().unwrap();
            let read = |(name, grad): (String, Option<HostTensor>)| {
                (name, models::f64_bits(grad.unwrap().to_f64_vec().unwrap()))
            };
            trail.grads = grads.into_iter().map(read).collect();
        }
        engine.update(&Update::new(LR), way.lag).unwrap();
    }
    engine.synchronize().unwrap();
    trail.params = models::params(model);
    trail
}

fn token_batch(step: u64) -> (HostInputs, HostTensor) {
    models::tokens(step, 9, DType::F32)
}

fn image_batch(step: u64) -> (HostInputs, HostTensor) {
    let (images, labels) = models::images(step, 9);
    (images.into(), labels)
}

fn plan(forward: &[usize], backward: &[usize]) -> ExecutePlan {
    ExecutePlan::from_sizes(PlanKind::Fused, forward, backward)
}

/// The ways that must all give the bits of the plain loop.
fn ways() -> Vec<(String, Way)> {
    let plans = [
        plan(&[], &[6]),
        plan(&[2, 3], &[1, 2, 3]),
        plan(&[1, 1, 1, 1, 1], &[1, 1, 1, 1, 1, 1]),
        plan(&[4], &[2, 1, 3]),
    ];
    let mut ways = Vec::new();
    for workers in [1, 2, 3, 4, 8] {
        for (p, plan) in plans.iter().enumerate() {
            for (grain, name) in [(Grain::Stage, "stage"), (Grain::Layer, "layer")] {
                let devices = models::cpus(workers);
                let way = Way {
                    grain,
                    plan: Some(plan.clone()),
                    ..Way::threaded(devices)
                };
                ways.push((format!("{workers} workers, plan {p}, grain {name}"), way));
            }
        }
        ways.push((
            format!("{workers} workers, automatic"),
            Way::threaded(models::cpus(workers)),
        ));
    }
    let keep = Some(roundpipe::Bytes(0));
    let none = Way {
        keep,
        plan: Some(plans[1].clone()),
        ..Way::threaded(models::cpus(1))
    };
    ways.push(("nothing kept".into(), none));
    for workers in [1, 3] {
        let way = Way {
            serial: true,
            plan: Some(plans[1].clone()),
            ..Way::threaded(models::cpus(workers))
        };
        ways.push((format!("serial, {workers} workers"), way));
    }
    ways
}

/// The first place where two trails part.
#[track_caller]
pub fn same(name: &str, want: &Trail, got: &Trail) {
    assert_eq!(want.losses, got.losses, "losses: {name}");
    for (what, want, got) in [
        ("gradient", &want.grads, &got.grads),
        ("parameter", &want.params, &got.params),
    ] {
        assert_eq!(want.len(), got.len(), "{what}s: {name}");
        for ((path, a), (_, b)) in want.iter().zip(got) {
            let at = a.iter().zip(b).position(|(a, b)| a != b);
            assert!(
                a.len() == b.len() && at.is_none(),
                "{name}: {what} {path} differs at {at:?}"
            );
        }
    }
}

#[test]
fn a_transformer_is_trained_to_the_same_bits_however_it_is_run() {
    let model = || models::transformer(DType::F32, false);
    let want = models::plain_loop(
        &model(),
        rule(),
        LR,
        STEPS,
        &token_batch,
        4,
        models::token_loss,
    );
    for (name, way) in ways() {
        same(
            &name,
            &want,
            &run(&model(), &way, &token_batch, models::token_loss),
        );
    }
}

#[test]
fn a_resnet_is_trained_to_the_same_bits_however_it_is_run() {
    let want = models::plain_loop(
        &models::resnet(),
        rule(),
        LR,
        STEPS,
        &image_batch,
        4,
        models::image_loss,
    );
    for (name, way) in ways() {
        same(
            &name,
            &want,
            &run(&models::resnet(), &way, &image_batch, models::image_loss),
        );
    }
}
