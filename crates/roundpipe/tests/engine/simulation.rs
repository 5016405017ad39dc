//! Workers on a virtual clock: delays by the seed, every access checked for order, faults planned.
//!
//! A share of the seeds runs by default; `ROUNDPIPE_SEEDS=0..1000` runs as many as one likes.

use std::ops::Range;
use std::sync::Arc;

use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, DType, Device, ExecutePlan, Grain, Lag, Pin, PlanKind, RingOptions, RoundPipe, Rule,
    RunConfig, Sequential, Update,
};
use roundpipe_tensor::SimWorld;
use roundpipe_tensor::sim::{Fault, FaultKind, SimConfig, Timing};

use crate::models::{self, Dice, Trail};

const STEPS: u64 = 3;

/// The seeds to run: a share, or what the environment asks for.
pub fn seeds(share: Range<u64>) -> Range<u64> {
    let asked = std::env::var("ROUNDPIPE_SEEDS").ok();
    let range = asked
        .as_deref()
        .and_then(|text| text.split_once(".."))
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or(share)
}

/// Random cuts of six layers.
fn plan(dice: &mut Dice) -> ExecutePlan {
    let mut cut = |mut total: usize| {
        let mut sizes = Vec::new();
        while total > 0 {
            let size = 1 + dice.below(total);
            sizes.push(size);
            total -= size;
        }
        sizes
    };
    let backward = cut(6);
    let forward = cut(6 - backward[0]);
    ExecutePlan::from_sizes(PlanKind::Fused, &forward, &backward)
}

#[derive(Clone)]
struct Case {
    workers: usize,
    plan: ExecutePlan,
    grain: Grain,
    lag: Lag,
    microbatches: usize,
    batch: usize,
    keep: Bytes,
    tied: bool,
    dtype: DType,
}

fn case(seed: u64) -> Case {
    let mut dice = Dice::new(seed);
    let microbatches = 1 + dice.below(5);
    Case {
        workers: [1, 2, 3, 4, 8][dice.below(5)],
        plan: plan(&mut dice),
        grain: [Grain::Stage, Grain::Layer][dice.below(2)],
        lag: [Lag::Zero, Lag::One][dice.below(2)],
        microbatches,
        batch: microbatches + dice.below(5),
        keep: [Bytes(0), Bytes(8192), Bytes::mib(4)][dice.below(3)],
        tied: dice.below(2) == 0,
        dtype: [DType::F32, DType::BF16][dice.below(2)],
    }
}

fn engine(
    model: &Sequential,
    case: &Case,
    devices: Vec<Arc<dyn Device>>,
    serial: bool,
) -> RoundPipe {
    let config = RunConfig::default()
        .num_microbatch(case.microbatches)
        .recompute_grain(case.grain)
        .execute_plan(case.plan.clone());
    let options = RingOptions {
        memory: Some(Bytes::mib(16)),
        activation_budget: Some(case.keep),
        serial,
        ..RingOptions::default()
    };
    RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .max_lag(case.lag)
        .seed(models::SEED)
        .on_stall(std::time::Duration::from_secs(30), models::show_stall)
        .run_config(config)
        .devices(devices)
        .ring_options(options)
        .build()
        .unwrap()
}

fn run(engine: &RoundPipe, model: &Sequential, case: &Case, from: u64, to: u64) -> Trail {
    let mut trail = Trail {
        losses: Vec::new(),
        grads: Vec::new(),
        params: Vec::new(),
    };
    for step in from..to {
        let (inputs, labels) = models::tokens(step, case.batch, case.dtype);
        let losses = engine
            .forward_backward(inputs, labels, models::token_loss)
            .unwrap();
        trail.losses.push(models::bits(&losses));
        engine.update(&Update::new(0.01), case.lag).unwrap();
    }
    engine.synchronize().unwrap();
    trail.params = models::params(model);
    trail
}

/// What a serial run on one cpu worker gives, with one stage for everything.
fn oracle(case: &Case) -> Trail {
    synchronized_oracle(case, &[])
}

/// The same with a wait behind some steps: at lag 1 the call that follows reads the newest weights
/// then.
fn synchronized_oracle(case: &Case, waits: &[u64]) -> Trail {
    let model = models::transformer(case.dtype, case.tied);
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[], &[6]);
    let plain = Case {
        plan,
        grain: Grain::Stage,
        workers: 1,
        ..case.clone()
    };
    let engine = engine(&model, &plain, models::cpus(1), true);
    let mut losses = Vec::new();
    let mut from = 0;
    for to in waits.iter().copied() {
        losses.extend(run(&engine, &model, case, from, to).losses);
        from = to;
    }
    let mut trail = run(&engine, &model, case, from, STEPS);
    losses.append(&mut trail.losses);
    Trail { losses, ..trail }
}

fn world(seed: u64, workers: usize) -> (SimWorld, Vec<Arc<dyn Device>>) {
    world_with(seed, workers, SimConfig::default().pinned)
}

/// A world whose workers pin so much host memory at most.
fn world_with(seed: u64, workers: usize, pinned: Bytes) -> (SimWorld, Vec<Arc<dyn Device>>) {
    let memory = Bytes::mib(64);
    let config = SimConfig {
        seed,
        memory,
        pinned,
        timing: Timing::default(),
        ..SimConfig::default()
    };
    let world = SimWorld::new(config).unwrap();
    let devices = world
        .workers(workers)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect();
    (world, devices)
}

/// No dead-lock, no race, and the oracle's bits, whatever the delays, sizes, cuts, grains and lags.
#[test]
fn delays_change_no_bit_and_order_is_never_broken() {
    for seed in seeds(0..60) {
        let case = case(seed);
        let model = models::transformer(case.dtype, case.tied);
        let (world, devices) = world(seed, case.workers);
        let engine = engine(&model, &case, devices, false);
        let got = run(&engine, &model, &case, 0, STEPS);
        drop(engine);
        assert_eq!(world.races(), [], "seed {seed}: {}", case.plan);
        crate::invisible::same(&format!("seed {seed}"), &oracle(&case), &got);
    }
}

/// Where a driver pins little or nothing, the rest is pageable: uploads read it when they are
/// queued, and still the bits are the oracle's and no order is broken. What could not be pinned is
/// known afterwards.
#[test]
fn little_pinned_memory_changes_no_bit() {
    for seed in seeds(0..30) {
        // None, enough for a few weights, enough for all weights and more: for everything in the
        // smallest cases.
        let most = [Bytes(0), Bytes(10_000), Bytes(60_000)][seed as usize % 3];
        // The memory of many activations passes through the host.
        let case = Case {
            keep: Bytes(0),
            ..case(seed)
        };
        let model = models::transformer(case.dtype, case.tied);
        let (world, devices) = world_with(seed, case.workers, most);
        let engine = engine(&model, &case, devices, false);
        let got = run(&engine, &model, &case, 0, STEPS);
        let pins = engine.ring().pins();
        let why = pins.note();
        assert!(
            why.is_some() || most == Bytes(60_000),
            "seed {seed}: all of it was pinned, {pins:?}"
        );
        assert!(
            why.is_none_or(|why| why.contains("cannot pin") && !why.contains('\n')),
            "{pins:?}"
        );
        let refused = pins.refused.is_some();
        assert!(
            pins.pinned <= most && (pins.pageable > Bytes(0)) == refused,
            "seed {seed}: {pins:?}"
        );
        drop(engine);
        assert_eq!(world.races(), [], "seed {seed}: {}", case.plan);
        crate::invisible::same(&format!("seed {seed}, {most} pinned"), &oracle(&case), &got);
    }
}

/// Who insists on pinned memory is told that there is too little, with the way out; who wants none
/// gets none.
#[test]
fn a_pin_asked_for_by_name_is_had_or_refused() {
    let model = models::transformer(DType::F32, false);
    for (pin, most, works) in [
        (Pin::Alloc, Bytes(20_000), false),
        (Pin::Register, Bytes(20_000), false),
        (Pin::Alloc, Bytes::mib(64), true),
        (Pin::Off, Bytes(0), true),
    ] {
        let (_, devices) = world_with(1, 1, most);
        let built = RoundPipe::builder(model.clone())
            .memory(Bytes::mib(16))
            .pin(pin)
            .devices(devices)
            .build();
        match built {
            Ok(engine) => {
                let pins = engine.ring().pins();
                assert!(
                    works && pins.note().is_none() && (pins.pinned > Bytes(0)) == (pin != Pin::Off)
                );
            }
            Err(error) => {
                let text = chain(&error);
                assert!(
                    !works && text.contains("cannot pin") && text.contains("Pin::Try"),
                    "{text}"
                );
            }
        }
    }
}

/// A processor in front of a GPU reads host memory in place and pins none: what is pinned is the
/// GPU's all the same, for weights and for activations, and a pin that was asked for by name is had
/// or refused.
#[test]
fn host_memory_is_that_of_the_device_that_copies() {
    for seed in 0..4 {
        let case = Case {
            keep: Bytes(0),
            workers: 2,
            ..case(seed)
        };
        let model = models::transformer(case.dtype, case.tied);
        let (world, sims) = world(seed, 1);
        let engine = engine(
            &model,
            &case,
            models::cpus(1).into_iter().chain(sims).collect(),
            false,
        );
        let weights = engine.ring().pins();
        assert!(
            weights.pinned > Bytes(0) && weights.pageable == Bytes(0),
            "{weights:?}"
        );
        let got = run(&engine, &model, &case, 0, STEPS);
        let (pins, host, store) = (
            engine.ring().pins(),
            engine.ring().host_use(),
            engine.host_bytes(),
        );
        let slabs = (store.weights + store.frozen + store.gradients) as u64;
        assert!(
            host.allocated > Bytes(0) && pins.pageable == Bytes(0),
            "{pins:?}, {host:?}"
        );
        assert_eq!(
            pins.pinned.0,
            slabs + host.allocated.0,
            "{pins:?}, {host:?}, {store:?}"
        );
        drop(engine);
        assert_eq!(world.races(), [], "seed {seed}: {}", case.plan);
        crate::invisible::same(&format!("seed {seed}"), &oracle(&case), &got);
    }
    let (_, sims) = world_with(1, 1, Bytes(20_000));
    let devices = models::cpus(1).into_iter().chain(sims);
    let model = models::transformer(DType::F32, false);
    let built = RoundPipe::builder(model)
        .memory(Bytes::mib(16))
        .pin(Pin::Alloc)
        .devices(devices)
        .build();
    assert!(chain(&built.err().unwrap()).contains("cannot pin"));
}

/// A fault anywhere is an error value; afterwards the same step succeeds, with the oracle's bits.
#[test]
fn faults_are_errors_and_leave_no_trace() {
    let kinds = [
        FaultKind::Alloc,
        FaultKind::Launch,
        FaultKind::Kernel,
        FaultKind::Copy,
        FaultKind::Record,
        FaultKind::Wait,
    ];
    let mut struck = 0;
    for seed in seeds(1000..1060) {
        let case = case(seed);
        let mut dice = Dice::new(seed ^ 0xfa);
        let model = models::transformer(case.dtype, case.tied);
        // Every third without pinned memory, whose copies fail elsewhere.
        let pinned = if seed % 3 == 0 {
            Bytes(0)
        } else {
            SimConfig::default().pinned
        };
        let (world, devices) = world_with(seed, case.workers, pinned);
        let engine = engine(&model, &case, devices, false);
        let first = run(&engine, &model, &case, 0, 1);
        let kind = kinds[dice.below(kinds.len())];
        world.inject(Fault::nth(kind, 1 + dice.below(200) as u64));
        let (inputs, labels) = models::tokens(1, case.batch, case.dtype);
        let trained = engine.forward_backward(inputs, labels, models::token_loss);
        let stepped = trained.and_then(|_| engine.update(&Update::new(0.01), case.lag));
        let ended = stepped.and_then(|_| engine.synchronize());
        world.heal();
        let from = match ended {
            Ok(()) => {
                for fault in world.faults() {
                    assert!(
                        crate::faults::harmless(&fault),
                        "seed {seed}: nobody was told of {fault}"
                    );
                }
                2
            }
            Err(error) => {
                struck += 1;
                // The fault itself, or what poisoned values led to, and where.
                let text = chain(&error);
                assert!(
                    text.contains("sim:") && text.contains("stage"),
                    "seed {seed}: {text}"
                );
                1
            }
        };
        let waits = if from == 1 { &[1][..] } else { &[1, 2] };
        let mut want = synchronized_oracle(&case, waits);
        assert_eq!(first.losses[0], want.losses[0], "seed {seed}");
        want.losses.drain(..from as usize);
        let rest = run(&engine, &model, &case, from, STEPS);
        crate::invisible::same(&format!("seed {seed} after {kind:?}"), &want, &rest);
        assert_eq!(world.races(), [], "seed {seed}");
    }
    assert!(struck > 0, "no fault ever struck: the test tests nothing");
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
