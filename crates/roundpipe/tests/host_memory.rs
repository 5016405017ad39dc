//! What the process takes, as the system counts it. One test in a process of its own, so that
//! nothing else moves the figures.
#![cfg(target_os = "linux")]

use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, ExecutePlan, HostTensor, Lag, Params, PlanKind, RingOptions,
    RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorResult, Tree, Update,
};

const MIB: usize = 1 << 20;
const MICROBATCHES: usize = 2;
/// Stacks, the allocator's own, code that is touched for the first time: less than a byte per
/// trainable parameter.
const SLACK: usize = 12 * MIB;

/// Memory of the process that is in RAM now.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .trim_end_matches(" kB")
        .parse::<usize>()
        .unwrap()
        << 10
}

/// Eight layers, a quarter of them frozen.
fn model(width: usize) -> Sequential {
    let mut init = Init::new(1, DType::BF16);
    let mut model = Sequential::new();
    for i in 0..8 {
        let layer = Linear::new(&mut init, width, width, false).unwrap();
        layer.set_trainable(i % 4 != 1);
        model = model.with(layer);
    }
    model
}

fn engine(model: Sequential, lag: Lag) -> RoundPipe {
    let devices = Cpu::workers(2, Some(2))
        .unwrap()
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>);
    // Several stages whose values all go through host memory.
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 2, 2], &[2, 2, 2, 2]);
    let options = RingOptions {
        memory: Some(Bytes::mib(256)),
        activation_budget: Some(Bytes(0)),
        ..RingOptions::default()
    };
    RoundPipe::builder(model)
        .optimizer(Rule::AdamW(AdamW::default()))
        .max_lag(lag)
        .run_config(
            RunConfig::new()
                .num_microbatch(MICROBATCHES)
                .execute_plan(plan),
        )
        .devices(devices)
        .ring_options(options)
        .build()
        .unwrap()
}

fn square(cx: &mut Cx, output: Tree, _: Tree) -> TensorResult<Tensor> {
    let squared = cx.square(&output.tensor()?)?;
    cx.mean_all(&squared)
}

fn steps(engine: &RoundPipe, width: usize, lag: Lag, count: usize) {
    for _ in 0..count {
        let input = HostTensor::from_f64s(&vec![0.5; 4 * width], DType::BF16, &[4, width]).unwrap();
        engine.forward_backward(input, Tree::None, square).unwrap();
        engine.update(&Update::new(1e-3), lag).unwrap();
    }
    engine.synchronize().unwrap();
}

/// Everything that the engine counts by name is all that there is: 14 or 16 bytes and an eighth per trainable
/// bf16 parameter, 2 per frozen one, activations, and the workers' own memory (which on cpu is the
/// process's as well).
fn training_takes_what_is_counted() {
    const WIDTH: usize = 1536;
    // In eighths of a byte.
    for (lag, per_param) in [(Lag::Zero, 14 * 8 + 1), (Lag::One, 16 * 8 + 1)] {
        let before = resident();
        let model = model(WIDTH);
        let engine = engine(model.clone(), lag);
        steps(&engine, WIDTH, lag, 4);
        let taken = resident().saturating_sub(before);
        let state = engine.host_bytes().total();
        assert_eq!(state, (6 * per_param + 2 * 2 * 8) * WIDTH * WIDTH / 8);
        let workers = engine
            .ring()
            .workers()
            .iter()
            .map(|w| w.usage().high_water.0 as usize)
            .sum::<usize>();
        let counted = state + workers + engine.ring().host_use().allocated.0 as usize;
        let what = format!("{lag:?}: {} MiB of {} MiB", taken / MIB, counted / MIB);
        assert!(taken <= counted + SLACK, "more than is counted: {what}");
        assert!(
            taken + SLACK >= state,
            "less than the state, so something was not measured: {what}"
        );
    }
}

/// A long run takes what a short one does.
fn nothing_grows_with_steps() {
    const WIDTH: usize = 32;
    for lag in [Lag::Zero, Lag::One] {
        let engine = engine(model(WIDTH), lag);
        steps(&engine, WIDTH, lag, 100);
        let before = resident();
        steps(&engine, WIDTH, lag, 500);
        let grown = resident().saturating_sub(before);
        assert!(grown < MIB, "{lag:?}: {} KiB in 500 steps", grown >> 10);
        // Inputs of stages and their gradients, of each microbatch of two calls, and as many
        // losses.
        let flow = 4 / MICROBATCHES * WIDTH * 2;
        let most = 2 * MICROBATCHES * (2 * 4 * flow + 2);
        let pool = engine.ring().host_use();
        assert!(
            (1..=most).contains(&(pool.allocated.0 as usize)),
            "{lag:?}: {pool:?}, {most} expected"
        );
    }
}

#[test]
fn host_memory_is_what_is_counted_and_does_not_grow() {
    // The small run first: it warms up what every run needs once.
    nothing_grows_with_steps();
    training_takes_what_is_counted();
}
