//! Frozen weights that come before their turn: fewer waits, the same bits.

use std::sync::Arc;

use roundpipe::{
    Bytes, Device, ExecutePlan, Grain, Lag, PlanKind, RingOptions, RoundPipe, RunConfig,
    Sequential, TensorError, Update,
};

use crate::api::sims;
use crate::held::{adapted, engine_of, numbers, squares, train_with};
use crate::models;

/// A budget for activations that the user chose: nothing is held then, and frozen weights can only
/// come early.
fn engine(
    model: &Sequential,
    devices: Vec<Arc<dyn Device>>,
    memory: Bytes,
    slow: bool,
) -> RoundPipe {
    let options = RingOptions {
        memory: Some(memory),
        activation_budget: Some(Bytes(memory.0 / 4)),
        ..RingOptions::default()
    };
    engine_of(model, devices, options, slow)
}

/// A stage for every layer, the last fused with the loss.
fn config() -> RunConfig {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[1; 5], &[1; 6]);
    RunConfig::new().execute_plan(plan)
}

/// Copies of weights that came early.
fn early_copies(engine: &RoundPipe) -> usize {
    let spans = engine.trace().spans();
    spans
        .iter()
        .filter(|span| span.name.ends_with(", early"))
        .count()
}

/// The same bits as on the processor, where nothing is copied, with room and nearly without, also
/// when the user writes frozen weights between steps; and with room, weights do come early.
#[test]
fn what_comes_early_changes_no_bit() {
    for grain in [Grain::Stage, Grain::Layer] {
        for lag in [Lag::Zero, Lag::One] {
            let config = config().recompute_grain(grain);
            let model = adapted();
            let plain = engine(&model, models::cpus(1), Bytes::mib(32), true);
            let losses = train_with(&model, &plain, &config, lag);
            drop(plain);
            let params = models::params(&model);
            for (seed, workers, memory) in [
                (1, 1, Bytes::mib(32)),
                (2, 2, Bytes::mib(32)),
                (3, 1, Bytes(110 << 10)),
                (4, 1, Bytes(90 << 10)),
            ] {
                let name = format!("{grain:?} {lag:?}, {workers} workers of {memory}");
                let model = adapted();
                let (world, devices) = sims(seed, workers);
                let engine = engine(&model, devices, memory, true);
                engine.trace().on();
                assert_eq!(train_with(&model, &engine, &config, lag), losses, "{name}");
                assert_eq!(models::params(&model), params, "{name}");
                assert_eq!(world.races(), [], "{name}");
                assert_eq!(engine.held_weights(), [], "{name}");
                if memory > Bytes::mib(1) {
                    assert!(early_copies(&engine) > 0, "{name}");
                }
            }
        }
    }
}

/// Where the link keeps up with forwards, nothing comes early.
#[test]
fn nothing_comes_early_beside_a_fast_link() {
    let model = adapted();
    let engine = engine(&model, sims(7, 1).1, Bytes::mib(32), false);
    engine.trace().on();
    train_with(&model, &engine, &config(), Lag::One);
    assert_eq!(early_copies(&engine), 0);
}

/// A call that fails takes what came early for it along, and the engine goes on as if it had not
/// been.
#[test]
fn a_failed_call_leaves_nothing_early() {
    let model = adapted();
    let plain = engine(&model, models::cpus(1), Bytes::mib(32), true);
    let losses = train_with(&model, &plain, &config(), Lag::One);
    drop(plain);
    let model = adapted();
    let (world, devices) = sims(8, 1);
    let engine = engine(&model, devices, Bytes::mib(32), true);
    for failing in 0..3 {
        let call = engine.train(numbers(failing)).loss(|_, _, _| {
            let error: Result<roundpipe::Tensor, _> = Err(TensorError::invalid("loss", "no"));
            error
        });
        assert!(call.config(config()).run().is_err());
    }
    assert_eq!(train_with(&model, &engine, &config(), Lag::One), losses);
    // And an engine that is dropped behind a call that it was not asked about ends.
    let call = engine.train(numbers(0)).loss(squares);
    drop(call.config(config()).run().unwrap());
    engine.update(&Update::new(0.01), Lag::One).unwrap();
    let call = engine.train(numbers(1)).loss(squares);
    drop(call.config(config()).run().unwrap());
    drop(engine);
    assert_eq!(world.races(), []);
}
