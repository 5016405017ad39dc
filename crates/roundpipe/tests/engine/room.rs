//! What stays on a worker or comes early must not lie where the task works that it is for: with the least
//! memory that the planner accepts, and a little more, everything runs.

use std::sync::Arc;

use roundpipe::nn::{Embedding, Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, HostTensor, Lag, MachineRates, Module, Param,
    ParamVisitor, Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, Tensor,
    TensorResult, Update,
};
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::{DeviceKind, Meta, SimWorld};

use crate::held::squares;
use crate::models;

const WIDTH: usize = 16;
const HIDDEN: usize = 256;
const ROWS: usize = 1024;
const MICRO: usize = 2;

/// Few weights, much to work in, and something that is trained in any case.
struct Deep {
    up: Linear,
    down: Linear,
    shift: Param,
}

impl Params for Deep {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("up", &self.up);
        visit.child("down", &self.down);
        visit.param("shift", &self.shift);
    }
}

impl Module for Deep {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let shift = cx.get(&self.shift)?;
        let y = cx.add(x, &shift)?;
        let y = self.up.forward(cx, &y)?;
        let y = cx.tanh(&y)?;
        let y = cx.tanh(&y)?;
        self.down.forward(cx, &y)
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    vocab: usize,
    /// How much more than the least memory there is.
    percent: u64,
    recompute_all: bool,
    /// Whether the weights of the deep layer are, so that they may stay from step to step.
    frozen: bool,
}

/// A table, a deep layer, a last one; each a stage, over a slow link.
fn run(
    case: Case,
    devices: Vec<Arc<dyn Device>>,
    memory: Bytes,
    steps: usize,
) -> roundpipe::Result<Vec<u64>> {
    let Case {
        vocab,
        recompute_all,
        frozen,
        ..
    } = case;
    let mut init = Init::new(21, DType::F32);
    let table = Embedding::new(&mut init, vocab, WIDTH, 0.5).unwrap();
    let up = Linear::new(&mut init, WIDTH, HIDDEN, false).unwrap();
    let down = Linear::new(&mut init, HIDDEN, WIDTH, false).unwrap();
    up.set_trainable(!frozen);
    down.set_trainable(!frozen);
    let shift = Param::zeros(DType::F32, &[WIDTH]).unwrap();
    let last = Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
    let model = Sequential::new()
        .with(table)
        .with(Deep { up, down, shift })
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
        first_rows: None,
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
fn least(case: Case) -> u64 {
    let (mut refused, mut accepted) = (0, 64 << 20);
    while accepted - refused > 256 {
        let middle = (refused + accepted) / 2 / 256 * 256;
        let metas = vec![Meta::like(DeviceKind::Sim) as Arc<dyn Device>];
        match run(case, metas, Bytes(middle), 1) {
            Err(error) if error.to_string().starts_with("memory:") => refused = middle,
            _ => accepted = middle,
        }
    }
    accepted
}

fn runs(case: Case) -> Result<(), String> {
    let least = least(case);
    let memory = Bytes(least + least * case.percent / 100 / 256 * 256);
    let plain = run(case, models::cpus(1), Bytes::mib(128), 4).unwrap();
    for seed in 0..3 {
        let config = SimConfig {
            seed,
            memory: Bytes::mib(128),
            ..SimConfig::default()
        };
        let world = SimWorld::new(config).unwrap();
        let workers = world.workers(1).into_iter();
        let devices = workers.map(|worker| worker as Arc<dyn Device>).collect();
        let trained = run(case, devices, memory, 4);
        let losses = trained.map_err(|error| format!("{case:?} in {memory}: {error}"))?;
        assert_eq!(losses, plain, "{case:?}");
    }
    Ok(())
}

fn all_run(cases: &[(usize, u64)], recompute_all: bool, frozen: bool) {
    for &(vocab, percent) in cases {
        let case = Case {
            vocab,
            percent,
            recompute_all,
            frozen,
        };
        runs(case).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Weights that wait for their backward come again where its tasks would not have room beside them.
#[test]
fn weights_that_stay_leave_their_backward_its_room() {
    all_run(&[(17_393, 0), (20_872, 1), (20_872, 4)], false, false);
}

/// Values that wait on the worker for the next job may leave until it runs.
#[test]
fn values_that_come_early_leave_their_task_its_room() {
    all_run(&[(19_132, 2), (20_872, 3)], true, false);
}

/// Frozen weights that stay from step to step do so, too.
#[test]
fn frozen_weights_leave_every_task_its_room() {
    all_run(&[(17_393, 1), (20_872, 4)], false, true);
}
