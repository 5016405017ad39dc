//! Weights that are on a worker already must not lie where the tasks work that they are for: random
//! models of frozen and trained layers over slow links, in little more than the planner accepts.

use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Lag, MachineRates, Module, Param,
    ParamVisitor, Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, Tensor,
    TensorResult, Update,
};
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::{DeviceKind, Meta, SimWorld};

use crate::held::squares;
use crate::models;
use crate::simulation::{chain, seeds};

const STEPS: usize = 6;

/// Two products with a width to work in, beside weights that take room and no work.
struct Wide {
    ballast: Option<Param>,
    mean: Option<Param>,
    up: Linear,
    down: Linear,
    shift: Option<Param>,
}

impl Params for Wide {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        let own = [("ballast", &self.ballast), ("mean", &self.mean)];
        for (name, param) in own.into_iter().chain([("shift", &self.shift)]) {
            if let Some(param) = param {
                visit.param(name, param);
            }
        }
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Wide {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let mut y = x.clone();
        if let Some(shift) = &self.shift {
            let shift = cx.get(shift)?;
            y = cx.add(&y, &shift)?;
        }
        if let Some(mean) = &self.mean {
            let mean = cx.get(mean)?;
            let mean = cx.mean_all(&mean)?;
            y = cx.add(&y, &mean)?;
        }
        let y = self.up.forward(cx, &y)?;
        let y = cx.tanh(&y)?;
        let y = cx.tanh(&y)?;
        let y = self.down.forward(cx, &y)?;
        cx.add(x, &y)
    }
}

#[derive(Debug, Clone, Copy)]
struct WideCase {
    hidden: usize,
    /// Frozen numbers that nothing reads.
    ballast: usize,
    /// Trained numbers.
    mean: usize,
    frozen: bool,
    shift: bool,
}

impl WideCase {
    fn new(dice: &mut models::Dice) -> Self {
        let mut numbers = |one_in: usize, sizes: usize| match dice.below(one_in) {
            0 => (64 << dice.below(sizes)) + dice.below(64),
            _ => 0,
        };
        let (ballast, mean) = (numbers(2, 11), numbers(3, 9));
        Self {
            hidden: 4 << dice.below(8),
            ballast,
            mean,
            frozen: dice.below(2) == 0,
            shift: dice.below(2) == 0,
        }
    }

    fn layer(&self, init: &mut Init, width: usize) -> Wide {
        let up = Linear::new(init, width, self.hidden, true).unwrap();
        let down = Linear::new(init, self.hidden, width, false).unwrap();
        up.set_trainable(!self.frozen);
        down.set_trainable(!self.frozen);
        let zeros = |count: usize| Param::zeros(DType::F32, &[count]).unwrap();
        Wide {
            ballast: (self.ballast > 0).then(|| zeros(self.ballast).frozen()),
            mean: (self.mean > 0).then(|| zeros(self.mean)),
            up,
            down,
            shift: self.shift.then(|| zeros(width)),
        }
    }
}

/// One random way to train a random model.
#[derive(Debug)]
struct Case {
    seed: u64,
    layers: Vec<WideCase>,
    /// Sizes of forward and of backward stages; `None` where the planner chooses.
    stages: Option<[Vec<usize>; 2]>,
    width: usize,
    rows: usize,
    microbatches: usize,
    workers: usize,
    grain: Grain,
    lag: Lag,
    recompute_all: bool,
    activation_budget: Option<Bytes>,
    upload_bytes_per_s: f64,
    /// How much more than the least memory there is.
    percent: u64,
    calls_per_step: usize,
    evaluates: bool,
}

/// Cuts so many layers into stages, most of them of one.
fn cut(dice: &mut models::Dice, layers: usize) -> Vec<usize> {
    let mut left = layers;
    let mut sizes = Vec::new();
    while left > 0 {
        let size = match dice.below(3) {
            0 => 1 + dice.below(left),
            _ => 1,
        };
        sizes.push(size);
        left -= size;
    }
    sizes
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut dice = models::Dice::new(seed);
        let count = 2 + dice.below(6);
        let layers = (0..count).map(|_| WideCase::new(&mut dice)).collect();
        let stages = (dice.below(3) > 0).then(|| {
            // The last layer is fused with the loss, perhaps with some before it.
            let fused = 1 + dice.below(count) / 2;
            let forward = cut(&mut dice, count + 1 - fused);
            let mut backward = vec![fused];
            backward.extend(cut(&mut dice, count + 1 - fused));
            [forward, backward]
        });
        Self {
            seed,
            layers,
            stages,
            width: 4 << dice.below(4),
            rows: 1 + dice.below(256),
            microbatches: 1 + dice.below(4),
            workers: [1, 1, 1, 2, 3][dice.below(5)],
            grain: [Grain::Stage, Grain::Layer][dice.below(2)],
            lag: [Lag::Zero, Lag::One][dice.below(2)],
            recompute_all: dice.below(4) == 0,
            activation_budget: (dice.below(3) == 0).then(|| Bytes(256 << dice.below(12))),
            upload_bytes_per_s: [1e3, 1e3, 1e5, 1e7, 1e9][dice.below(5)],
            percent: [0, 0, 1, 2, 4, 8, 15, 30][dice.below(8)],
            calls_per_step: 1 + dice.below(2),
            evaluates: dice.below(3) == 0,
        }
    }

    fn model(&self) -> Sequential {
        let mut init = Init::new(self.seed, DType::F32);
        let layers = self.layers.iter();
        let model = layers.fold(Sequential::new(), |model, layer| {
            model.with(layer.layer(&mut init, self.width))
        });
        // Something to train in any case.
        model.with(Linear::new(&mut init, self.width, self.width, true).unwrap())
    }

    fn engine(&self, devices: Vec<Arc<dyn Device>>, memory: Bytes) -> roundpipe::Result<RoundPipe> {
        let config = RunConfig::default()
            .num_microbatch(self.microbatches)
            .recompute_all(self.recompute_all)
            .recompute_grain(self.grain);
        let engine = RoundPipe::builder(self.model())
            .optimizer(Rule::AdamW(AdamW::default()))
            .optimizer_threads(1)
            .max_lag(self.lag)
            .seed(models::SEED)
            .devices(devices)
            .run_config(config)
            .ring_options(RingOptions {
                memory: Some(memory),
                activation_budget: self.activation_budget,
                ..RingOptions::default()
            })
            .build()?;
        engine.assume_rates(&MachineRates {
            upload_bytes_per_s: self.upload_bytes_per_s,
            download_bytes_per_s: 1e15,
            updated_params_per_s: 1e9,
            first_rows: None,
        })?;
        Ok(engine)
    }

    fn input(&self, number: usize) -> HostTensor {
        let rows = self.rows * self.microbatches;
        let values: Vec<f32> = (0..rows * self.width)
            .map(|i| ((i + number) as f32 * 0.7).cos())
            .collect();
        HostTensor::from_slice(&values, &[rows, self.width]).unwrap()
    }

    /// The losses of so many steps, in bits.
    fn train(
        &self,
        devices: Vec<Arc<dyn Device>>,
        memory: Bytes,
        steps: usize,
    ) -> roundpipe::Result<Vec<u64>> {
        let engine = self.engine(devices, memory)?;
        let mut config = RunConfig::new();
        if let Some([forward, backward]) = &self.stages {
            let plan = ExecutePlan::from_sizes(PlanKind::Fused, forward, backward);
            config = config.execute_plan(plan);
        }
        let mut losses = Vec::new();
        for step in 0..steps {
            for call in 0..self.calls_per_step {
                let call = engine.train(self.input(step + 3 * call)).loss(squares);
                losses.push(models::bits(&call.config(config.clone()).run()?.losses));
            }
            engine.update(&Update::new(1e-4), self.lag)?;
            if self.evaluates && step % 2 == 1 {
                let config = RunConfig::new().requires_grad(false);
                drop(engine.forward(self.input(9), &config)?);
            }
        }
        engine.synchronize()?;
        Ok(losses)
    }

    /// The least memory that the planner accepts.
    fn least(&self) -> u64 {
        let (mut refused, mut accepted) = (0, 64 << 20);
        while accepted - refused > 256 {
            let middle = (refused + accepted) / 2 / 256 * 256;
            let metas = (0..self.workers).map(|_| Meta::like(DeviceKind::Sim) as _);
            match self.train(metas.collect(), Bytes(middle), 2) {
                Err(error) if is_refusal(&error) => refused = middle,
                _ => accepted = middle,
            }
        }
        accepted
    }

    fn runs(&self) {
        let least = self.least();
        let memory = Bytes(least + least * self.percent / 100 / 256 * 256);
        let plain = self.train(models::cpus(1), Bytes::mib(128), STEPS).unwrap();
        let world = SimWorld::new(SimConfig {
            seed: self.seed,
            memory: Bytes::mib(128),
            ..SimConfig::default()
        })
        .unwrap();
        let devices = world.workers(self.workers).into_iter().map(|d| d as _);
        match self.train(devices.collect(), memory, STEPS) {
            Ok(losses) => assert_eq!(losses, plain, "{self:?} in {memory}"),
            Err(error) => panic!("{self:?} in {memory} was accepted: {}", chain(&error)),
        }
        assert_eq!(world.races(), [], "{self:?} in {memory}");
    }
}

fn is_refusal(error: &roundpipe::Error) -> bool {
    error.to_string().starts_with("memory:")
}

/// Cases that were accepted and failed once.
const ONCE_FAILED: [u64; 1] = [
    // Sums of a step's second call left holes where the gradients had come in.
    293,
];

/// Whatever stays on a worker or comes early, an accepted plan runs, with the bits of the processor.
#[test]
fn weights_that_are_there_leave_every_task_its_room() {
    for seed in seeds(0..40).chain(ONCE_FAILED) {
        Case::new(seed).runs();
    }
}

/// Frozen weights that stay from step to step come again where their backward would not have room
/// beside them: they were placed for a forward, which works in less.
#[test]
fn frozen_weights_that_stay_leave_their_backward_its_room() {
    let wide = |hidden, ballast, mean, frozen| WideCase {
        hidden,
        ballast,
        mean,
        frozen,
        shift: false,
    };
    let case = Case {
        seed: 1296,
        layers: vec![
            wide(16, 83, 0, false),
            wide(16, 8248, 126, false),
            wide(32, 0, 4124, true),
            wide(128, 0, 0, true),
            wide(4, 0, 0, false),
        ],
        stages: Some([vec![1; 4], vec![2, 1, 1, 1, 1]]),
        width: 4,
        rows: 98,
        microbatches: 4,
        workers: 1,
        grain: Grain::Stage,
        lag: Lag::Zero,
        recompute_all: false,
        activation_budget: None,
        upload_bytes_per_s: 1e3,
        percent: 4,
        calls_per_step: 2,
        evaluates: true,
    };
    case.runs();
}
