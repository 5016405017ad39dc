//! Weights that stay on a worker from a layer's forward to its backward: fewer copies, the same bits.

use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::trace::{Lane, Span};
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Lag, MachineRates, Params, PlanKind,
    RingOptions, RoundPipe, RunConfig, Sequential, Tensor, TensorError, Update,
};

use crate::api::sims;
use crate::held::squares;
use crate::models;

const WIDTH: usize = 16;
const ROWS: usize = 12;
const LAYERS: usize = 6;
const STEPS: u64 = 5;

/// Maps with something to recompute between them.
fn maps() -> Sequential {
    let mut init = Init::new(21, DType::F32);
    let mut model = Sequential::new();
    for _ in 0..LAYERS {
        let linear = Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
        let tanh = Func(|cx: &mut Cx, x: &Tensor| cx.tanh(x));
        model = model.with(Sequential::new().with(linear).with(tanh));
    }
    model
}

fn numbers(step: u64) -> HostTensor {
    let values = (0..ROWS * WIDTH).map(|i| (i as f32 * 0.3 + step as f32).sin());
    let values: Vec<f32> = values.collect();
    HostTensor::from_slice(&values, &[ROWS, WIDTH]).unwrap()
}

fn engine(model: &Sequential, devices: Vec<Arc<dyn Device>>, memory: Bytes) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .seed(models::SEED)
        .devices(devices)
        .run_config(RunConfig::default().num_microbatch(3))
        .ring_options(RingOptions {
            memory: Some(memory),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

/// Two stages forward, one fused with the loss, two backward.
fn config() -> RunConfig {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 3], &[1, 2, 3]);
    RunConfig::new().execute_plan(plan)
}

fn train(engine: &RoundPipe, config: &RunConfig, lag: Lag) -> Vec<u64> {
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let call = engine.train(numbers(step)).loss(squares);
        losses.push(models::bits(
            &call.config(config.clone()).run().unwrap().losses,
        ));
        engine.update(&Update::new(0.01), lag).unwrap();
    }
    engine.synchronize().unwrap();
    losses
}

/// Bytes of weights that the last call of a trace was sent.
fn sent(engine: &RoundPipe) -> u64 {
    let spans = engine.trace().spans();
    let is_upload = |span: &&Span| span.track.lane == Lane::ParamUpload;
    let call = spans.iter().filter(is_upload).map(|span| span.call).max();
    let spans = spans.iter().filter(is_upload);
    let of_last = spans.filter(|span| Some(span.call) == call);
    of_last.filter_map(|span| span.bytes).sum()
}

/// The same bits as on the processor, which is sent nothing, for both grains and lags, on one worker
/// and on several, with room for all weights, for some, and nearly without.
#[test]
fn what_stays_changes_no_bit() {
    for grain in [Grain::Stage, Grain::Layer] {
        for lag in [Lag::Zero, Lag::One] {
            let config = config().recompute_grain(grain);
            let model = maps();
            let plain = engine(&model, models::cpus(1), Bytes::mib(32));
            let losses = train(&plain, &config, lag);
            assert_eq!(plain.kept_weights(), [], "a processor is sent nothing");
            drop(plain);
            let params = models::params(&model);
            let rooms = [
                Bytes::mib(32),
                Bytes(24 << 10),
                Bytes(20 << 10),
                Bytes(16 << 10),
            ];
            let cases = rooms.map(|memory| (1, memory));
            for (workers, memory) in cases
                .into_iter()
                .chain([2, 3, 5].map(|n| (n, Bytes::mib(32))))
            {
                let name = format!("{grain:?} {lag:?}, {workers} workers of {memory}");
                let model = maps();
                let (world, devices) = sims(31 + workers as u64, workers);
                let engine = engine(&model, devices, memory);
                assert_eq!(train(&engine, &config, lag), losses, "{name}");
                assert_eq!(models::params(&model), params, "{name}");
                assert_eq!(world.races(), [], "{name}");
                let kept: Vec<usize> = engine
                    .kept_weights()
                    .iter()
                    .map(|(layer, _)| *layer)
                    .collect();
                match (workers, memory >= Bytes::mib(32)) {
                    (1, true) => assert_eq!(kept, [0, 1, 2, 3, 4], "{name}"),
                    // Forward stages 0 and 1, the fused one 2, backward 3 (layers 3, 4) and 4.
                    (2, _) => assert_eq!(kept, [0, 1, 3, 4], "{name}"),
                    (3, _) => assert_eq!(kept, [2], "{name}"),
                    (5, _) => assert!(kept.is_empty(), "{name}: {kept:?}"),
                    _ => {}
                }
            }
        }
    }
}

/// With room each layer comes once, without keeping anything once forward and once backward.
#[test]
fn weights_that_stay_are_sent_once() {
    let layer = 4 * (WIDTH * WIDTH + WIDTH) as u64;
    let sent_with = |config: &RunConfig| {
        let model = maps();
        let engine = engine(&model, sims(6, 1).1, Bytes::mib(32));
        engine.trace().on();
        train(&engine, config, Lag::Zero);
        sent(&engine) / layer
    };
    let layers = LAYERS as u64;
    assert_eq!(sent_with(&config()), layers);
    assert_eq!(
        sent_with(&config().recompute_all(true)),
        layers + layers - 1
    );
}

/// Where copies are what the backward waits for, weights stay before pieces of forwards; elsewhere
/// behind them.
#[test]
fn weights_stay_first_beside_a_slow_link() {
    let kept_with = |upload_bytes_per_s: f64| {
        let model = maps();
        let engine = engine(&model, sims(7, 1).1, Bytes(20 << 10));
        engine
            .assume_rates(&MachineRates {
                upload_bytes_per_s,
                download_bytes_per_s: 1e15,
                updated_params_per_s: 1e9,
                first_rows: None,
            })
            .unwrap();
        train(&engine, &config(), Lag::Zero);
        let pieces = engine.activation_use().unwrap().pieces_on_workers;
        let weights: u64 = engine.kept_weights().iter().map(|(_, bytes)| bytes).sum();
        (weights, pieces)
    };
    let (slow, fast) = (kept_with(1e3), kept_with(1e15));
    assert!(slow.0 > fast.0 && slow.1 < fast.1, "{slow:?} {fast:?}");
}

/// What the user writes between a forward and its backward reaches the backward, and a forward that
/// waits for its backward leaves room for other calls.
#[test]
fn weights_written_in_between_come_again() {
    let run = |devices: Vec<Arc<dyn Device>>, writes: bool| {
        let model = maps();
        let engine = engine(&model, devices, Bytes::mib(32));
        let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2, 4], &[3, 3]);
        let config = RunConfig::new().execute_plan(plan);
        train(&engine, &self::config(), Lag::One);
        let forward = engine.forward(numbers(8), &config).unwrap();
        let between = RunConfig::new().requires_grad(false);
        drop(engine.forward(numbers(9), &between).unwrap());
        if writes {
            let (_, weight) = &model.named_params()[3];
            let home = weight.data();
            // The forward's last job may still hold it for a moment.
            let mut bytes = loop {
                match home.write(0..home.len()) {
                    Ok(bytes) => break bytes,
                    Err(TensorError::Busy { .. }) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            };
            bytes.bytes()[..4].copy_from_slice(&0.75f32.to_le_bytes());
        }
        let seed =
            HostTensor::from_f64s(&[0.125; ROWS * WIDTH], DType::F32, &[ROWS, WIDTH]).unwrap();
        forward.backward(seed).unwrap();
        engine.update(&Update::new(0.01), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        models::params(&model)
    };
    let plain = [false, true].map(|writes| run(models::cpus(1), writes));
    assert_ne!(plain[0], plain[1]);
    for workers in [1, 2] {
        let (world, devices) = sims(40, workers);
        let here = [false, true].map(|writes| run(devices.clone(), writes));
        assert!(here == plain, "{workers} workers");
        assert_eq!(world.races(), []);
    }
}

/// A call that fails takes its weights along: the engine goes on with the same bits, in as much
/// memory.
#[test]
fn a_failed_call_leaves_no_weights() {
    let model = maps();
    let plain = engine(&model, models::cpus(1), Bytes::mib(32));
    let losses = train(&plain, &config(), Lag::One);
    drop(plain);
    let model = maps();
    let (world, devices) = sims(8, 1);
    let engine = engine(&model, devices, Bytes(24 << 10));
    for failing in 0..3 {
        let call = engine
            .train(numbers(failing))
            .loss(|_, _, _| Err::<Tensor, _>(TensorError::invalid("loss", "no")));
        assert!(call.config(config()).run().is_err());
    }
    assert_eq!(train(&engine, &config(), Lag::One), losses);
    assert_eq!(world.races(), []);
}

/// A processor beside a GPU is sent no weights, so none of its layers counts as kept.
#[test]
fn what_is_read_in_place_is_not_kept() {
    let cpu = models::cpus(1).into_iter();
    let devices = cpu.chain(sims(3, 1).1).collect();
    let engine = engine(&maps(), devices, Bytes::mib(8));
    // The processor has the first and the last stage.
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 2], &[2, 2, 2]);
    train(&engine, &RunConfig::new().execute_plan(plan), Lag::Zero);
    let kept = engine.kept_weights();
    let layers: Vec<usize> = kept.iter().map(|(layer, _)| *layer).collect();
    assert_eq!(layers, [2, 3]);
}
