//! Weights that stay, and values that come early, lie in the way of the backward they are for.

use std::sync::Arc;

use roundpipe::nn::{Embedding, Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, HostTensor, Lag, MachineRates, Module, ParamVisitor,
    Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, Tensor, TensorResult, Update,
};
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::{DeviceKind, Meta, SimWorld};

use crate::held::squares;
use crate::models;

const WIDTH: usize = 16;
const HIDDEN: usize = 256;
const ROWS: usize = 1024;
const MICRO: usize = 2;

/// Few weights, much to work in.
struct Deep {
    up: Linear,
    down: Linear,
}

impl Params for Deep {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Deep {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.up.forward(cx, x)?;
        let y = cx.tanh(&y)?;
        let y = cx.tanh(&y)?;
        self.down.forward(cx, &y)
    }
}

/// A table, a deep layer, a last one; each a stage, over a slow link.
fn run(
    devices: Vec<Arc<dyn Device>>,
    memory: Bytes,
    vocab: usize,
    steps: usize,
    recompute_all: bool,
) -> roundpipe::Result<Vec<u64>> {
    let mut init = Init::new(21, DType::F32);
    let table = Embedding::new(&mut init, vocab, WIDTH, 0.5).unwrap();
    let up = Linear::new(&mut init, WIDTH, HIDDEN, false).unwrap();
    let down = Linear::new(&mut init, HIDDEN, WIDTH, false).unwrap();
    let last = Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
    let model = Sequential::new()
        .with(table)
        .with(Deep { up, down })
        .with(last);
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[1, 1], &[1, 1, 1]);
    let config = RunConfig::default()
        .num_microbatch(MICRO)
        .recompute_all(recompute_all)
        .execute_plan(plan);
    let engine = RoundPipe::builder(model)
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .max_lag(Lag::One)
        .seed(models::SEED)
        .devices(devices)
        .run_config(config)
        .ring_options(RingOptions {
            memory: Some(memory),
            ..RingOptions::default()
        })
        .build()?;
    engine.assume_rates(&MachineRates {
        upload_bytes_per_s: 1e3,
        download_bytes_per_s: 1e15,
        updated_params_per_s: 1e9,
    })?;
    let mut losses = Vec::new();
    for _ in 0..steps {
        let ids: Vec<i64> = (0..ROWS * MICRO)
            .map(|i| ((i * 7) % vocab) as i64)
            .collect();
        let ids = HostTensor::from_slice(&ids, &[ROWS * MICRO]).unwrap();
        losses.push(models::bits(&engine.train(ids).loss(squares).run()?.losses));
        engine.update(&Update::new(1e-4), Lag::One)?;
    }
    engine.synchronize()?;
    Ok(losses)
}

/// The least memory that the planner accepts.
fn least(vocab: usize) -> u64 {
    let (mut refused, mut accepted) = (0, 64 << 20);
    while accepted - refused > 256 {
        let middle = (refused + accepted) / 2 / 256 * 256;
        let metas = vec![Meta::like(DeviceKind::Sim) as Arc<dyn Device>];
        match run(metas, Bytes(middle), vocab, 1, false) {
            Err(error) if error.to_string().starts_with("memory:") => refused = middle,
            _ => accepted = middle,
        }
    }
    accepted
}

fn trains_in_percent_more_than_the_least(vocab: usize, percent: u64, recompute_all: bool) {
    let least = least(vocab);
    let memory = Bytes(least + least * percent / 100 / 256 * 256);
    for seed in 0..3 {
        let world = SimWorld::new(SimConfig {
            seed,
            memory: Bytes::mib(128),
            ..SimConfig::default()
        })
        .unwrap();
        let devices = world
            .workers(1)
            .into_iter()
            .map(|device| device as _)
            .collect();
        let trained = run(devices, memory, vocab, 4, recompute_all);
        let losses = trained.unwrap_or_else(|error| panic!("{vocab} in {memory}: {error}"));
        let plain = run(models::cpus(1), Bytes::mib(128), vocab, 4, recompute_all);
        assert_eq!(losses, plain.unwrap());
    }
}

#[test]
fn weights_that_stay_leave_their_backward_its_room() {
    for (vocab, percent) in [(17_393, 0), (20_872, 1), (20_872, 4)] {
        trains_in_percent_more_than_the_least(vocab, percent, false);
    }
}

#[test]
fn values_that_come_early_leave_their_task_its_room() {
    for (vocab, percent) in [(19_132, 2), (20_872, 3)] {
        trains_in_percent_more_than_the_least(vocab, percent, true);
    }
}
