//! Frozen weights that stay on a worker from step to step: fewer copies, the same bits.

use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::trace::Lane;
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Lag, MachineRates, Module, Param,
    ParamVisitor, Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, Tensor, Update,
};

use crate::api::sims;
use crate::models;

const WIDTH: usize = 16;
const ROWS: usize = 12;
const LAYERS: usize = 6;
/// Numbers of the table that layers share.
const TABLE: usize = 16;
const STEPS: u64 = 6;

/// A frozen map with a trained one beside it, and a table that all layers share.
struct Adapted {
    frozen: Linear,
    trained: Linear,
    table: Param,
}

impl Params for Adapted {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("trained", &self.trained);
        visit.child("frozen", &self.frozen);
        visit.param("table", &self.table);
    }
}

impl Module for Adapted {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> roundpipe_tensor::Result<Tensor> {
        let (a, b) = (self.frozen.forward(cx, x)?, self.trained.forward(cx, x)?);
        let sum = cx.add(&a, &b)?;
        let table = cx.get(&self.table)?;
        let sum = cx.add(&sum, &table)?;
        cx.tanh(&sum)
    }
}

/// Six of them; the third has nothing to train.
pub fn adapted() -> Sequential {
    let mut init = Init::new(11, DType::F32);
    let mut linear = || Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
    let table = Param::zeros(DType::F32, &[TABLE]).unwrap().frozen();
    let layers = (0..LAYERS).map(|layer| {
        let (frozen, trained) = (linear(), linear());
        frozen.set_trainable(false);
        trained.set_trainable(layer != 2);
        Adapted {
            frozen,
            trained,
            table: table.clone(),
        }
    });
    layers.fold(Sequential::new(), |model, layer| model.with(layer))
}

pub fn numbers(step: u64) -> HostTensor {
    let values: Vec<f32> = (0..ROWS * WIDTH)
        .map(|i| (i as f32 * 0.7 + step as f32).cos())
        .collect();
    HostTensor::from_slice(&values, &[ROWS, WIDTH]).unwrap()
}

pub fn squares(
    cx: &mut Cx,
    output: roundpipe::Tree,
    _: roundpipe::Tree,
) -> roundpipe_tensor::Result<Tensor> {
    let y = output.tensor()?;
    let y = cx.mul(&y, &y)?;
    cx.sum_all(&y)
}

/// With a link that takes seconds for a layer where that is `slow`, and no time else.
fn engine(
    model: &Sequential,
    devices: Vec<Arc<dyn Device>>,
    memory: Bytes,
    slow: bool,
) -> RoundPipe {
    let options = RingOptions {
        memory: Some(memory),
        ..RingOptions::default()
    };
    engine_of(model, devices, options, slow)
}

/// As [`engine`], with other options of the ring.
pub fn engine_of(
    model: &Sequential,
    devices: Vec<Arc<dyn Device>>,
    options: RingOptions,
    slow: bool,
) -> RoundPipe {
    let engine = RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .seed(models::SEED)
        .devices(devices)
        .run_config(RunConfig::default().num_microbatch(3))
        .ring_options(options)
        .build()
        .unwrap();
    let rate = if slow { 1e3 } else { 1e15 };
    let rates = MachineRates {
        upload_bytes_per_s: rate,
        download_bytes_per_s: 1e15,
        updated_params_per_s: 1e9,
        first_rows: None,
    };
    engine.assume_rates(&rates).unwrap();
    engine
}

/// Two stages forward, one fused with the loss, one backward.
fn config() -> RunConfig {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 3], &[1, 5]);
    RunConfig::new().execute_plan(plan)
}

/// Writes a parameter, as a user who loads other weights.
fn change(param: &Param, new: impl Fn(f32) -> f32) {
    let home = param.data();
    let mut bytes = home.write(0..home.len()).unwrap();
    for value in bytes.bytes().chunks_exact_mut(4) {
        let old = f32::from_le_bytes(value.try_into().unwrap());
        value.copy_from_slice(&new(old).to_le_bytes());
    }
}

/// Trains; before the fourth step the frozen weights of one layer and the table are written, and
/// after it the model is evaluated.
fn train(model: &Sequential, engine: &RoundPipe, grain: Grain, lag: Lag) -> Vec<u64> {
    train_with(model, engine, &config().recompute_grain(grain), lag)
}

/// As [`train`], by any plan.
pub fn train_with(
    model: &Sequential,
    engine: &RoundPipe,
    config: &RunConfig,
    lag: Lag,
) -> Vec<u64> {
    let mut losses = Vec::new();
    for step in 0..STEPS {
        if step == 3 {
            engine.synchronize().unwrap();
            let named = |name: &str| {
                let mut all = model.named_params().into_iter();
                all.find(|(other, _)| other == name).unwrap().1
            };
            change(&named("1.frozen.weight"), |x| 2.0 * x);
            change(&named("0.table"), |x| x + 0.25);
        }
        let call = engine.train(numbers(step)).loss(squares);
        let config = config.clone();
        losses.push(models::bits(&call.config(config).run().unwrap().losses));
        engine.update(&Update::new(0.01), lag).unwrap();
        if step == 3 {
            let config = RunConfig::new().requires_grad(false);
            drop(engine.forward(numbers(9), &config).unwrap());
        }
    }
    engine.synchronize().unwrap();
    losses
}

/// The same bits as on the processor, which holds nothing, on one worker and on two, with room and
/// nearly without; and where the link is slow, weights do stay.
#[test]
fn what_is_held_changes_no_bit() {
    for grain in [Grain::Stage, Grain::Layer] {
        for lag in [Lag::Zero, Lag::One] {
            let model = adapted();
            let plain = engine(&model, models::cpus(1), Bytes::mib(32), true);
            let losses = train(&model, &plain, grain, lag);
            assert_eq!(plain.held_weights(), [], "nothing is sent to a processor");
            drop(plain);
            let params = models::params(&model);
            for (workers, memory) in [
                (1, Bytes::mib(32)),
                (2, Bytes::mib(32)),
                (1, Bytes(110 << 10)),
            ] {
                let name = format!("{grain:?} {lag:?}, {workers} workers of {memory}");
                let model = adapted();
                let (world, devices) = sims(5, workers);
                let engine = engine(&model, devices, memory, true);
                assert_eq!(train(&model, &engine, grain, lag), losses, "{name}");
                assert_eq!(models::params(&model), params, "{name}");
                assert_eq!(world.races(), [], "{name}");
                if memory > Bytes::mib(1) {
                    assert_eq!(engine.held_weights().len(), LAYERS, "{name}");
                }
            }
        }
    }
}

/// Weights that stay are not sent again, and those that a step changes are.
#[test]
fn held_weights_are_sent_once() {
    let model = adapted();
    let engine = engine(&model, sims(6, 1).1, Bytes::mib(32), true);
    let mut sent = Vec::new();
    for step in 0..STEPS {
        engine.trace().on();
        let call = engine.train(numbers(step)).loss(squares);
        call.config(config()).run().unwrap();
        engine.update(&Update::new(0.01), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        let mut spans = engine.trace().spans();
        spans.retain(|span| span.track.lane == Lane::ParamUpload);
        let call = spans.iter().map(|span| span.call).max();
        spans.retain(|span| Some(span.call) == call);
        sent.push(spans.iter().filter_map(|span| span.bytes).sum::<u64>());
    }
    let own = 4 * (WIDTH * WIDTH + WIDTH) as u64;
    let layers = LAYERS as u64;
    // All layers come once, each with the table. Then trained weights do, of all but one, for every
    // visit; the last layer has one, fused with the loss.
    let tables = 4 * TABLE as u64 * layers;
    assert_eq!(
        sent[0],
        own * (2 * layers + layers - 2) + tables,
        "{sent:?}"
    );
    for later in &sent[1..] {
        assert_eq!(*later, own * (layers - 1 + layers - 2), "{sent:?}");
    }
}

/// Where kernels are what a step waits for, memory is left to activations.
#[test]
fn nothing_is_held_beside_a_fast_link() {
    let model = adapted();
    let engine = engine(&model, sims(7, 1).1, Bytes::mib(32), false);
    train(&model, &engine, Grain::Stage, Lag::Zero);
    assert_eq!(engine.held_weights(), []);
}
