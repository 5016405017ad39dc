//! How a subject is run: devices, plan, grain, memory, lag; and the run itself.

use std::sync::Arc;

use roundpipe::{
    Bytes, Device, Devices, ExecutePlan, Grain, HostTensor, Inputs, Lag, LossReduction, Params,
    RingOptions, RoundPipe, RunConfig, Update,
};
use roundpipe_models::Model;
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::{Cuda, SimWorld};

use super::subject::{SEED, Subject};
use super::trail::{Kind, Trail, copy_of};
use crate::error::{Error, Result};
use crate::start::even_plan;

/// Workers that stand for many, where one device was given.
pub(super) const MANY: usize = 3;
const LR: f64 = 0.01;

/// Devices that this machine has, by how many are wanted.
pub(super) struct Place {
    /// A list for each number of workers.
    one: String,
    many: String,
    /// Why there is no GPU.
    note: Option<String>,
    pub has_gpu: bool,
}

impl Place {
    /// The devices of a list, or all.
    pub fn open(list: Option<&str>) -> Result<Self> {
        let usage = |list: &str, e: roundpipe::Error| Error::Usage(format!("devices {list}: {e}"));
        let (given, note) = match list {
            Some(list) => (list.to_owned(), None),
            None => match Cuda::count() {
                Ok(0) => ("cpu".to_owned(), Some("the driver knows no GPU".to_owned())),
                Ok(_) => ("cuda".to_owned(), None),
                Err(error) => ("cpu".to_owned(), Some(error.to_string())),
            },
        };
        let devices = Devices::parse(&given).map_err(|e| usage(&given, e))?;
        let name = |device: &Arc<dyn Device>| {
            let id = device.id();
            if id.kind.is_gpu() {
                format!("cuda:{}", id.index)
            } else {
                "cpu".to_owned()
            }
        };
        let names: Vec<String> = devices.workers.iter().map(name).collect();
        let one = names[0].clone();
        let many = if names.len() > 1 {
            names.join(",")
        } else {
            vec![one.clone(); MANY].join(",")
        };
        Ok(Self {
            has_gpu: names.iter().any(|name| name.starts_with("cuda")),
            one,
            many,
            note,
        })
    }

    /// A line for people.
    pub fn line(&self) -> String {
        let note = self.note.iter().map(|why| format!("; no GPU: {why}"));
        let note: String = note.collect();
        format!("on {}, and simulated devices{note}", self.one)
    }

    /// One worker.
    pub fn one(&self) -> Result<Vec<Arc<dyn Device>>> {
        Ok(Devices::parse(&self.one)?.workers)
    }

    /// Several workers.
    pub fn many(&self) -> Result<Vec<Arc<dyn Device>>> {
        Ok(Devices::parse(&self.many)?.workers)
    }

    /// What one worker runs on.
    pub fn name(&self) -> &str {
        &self.one
    }
}

/// Simulated devices with their own memory, whose every access is checked.
pub(super) fn simulated(seed: u64, workers: usize) -> Result<(SimWorld, Vec<Arc<dyn Device>>)> {
    let world = SimWorld::new(SimConfig {
        seed,
        // Of which engines take what they need.
        memory: Bytes(u64::MAX >> 16),
        ..SimConfig::default()
    })?;
    let devices = world.workers(workers).into_iter();
    let devices = devices.map(|worker| worker as Arc<dyn Device>).collect();
    Ok((world, devices))
}

/// How a subject is run.
#[derive(Clone)]
pub(super) struct Way {
    pub devices: Vec<Arc<dyn Device>>,
    pub serial: bool,
    pub grain: Grain,
    /// Stages of about equal size; as the engine plans where `None`.
    pub stages: Option<usize>,
    pub lag: Lag,
    /// Bytes of activations that stay on a worker.
    pub keep: Option<Bytes>,
    /// Whether forwards keep no results for their recompute.
    pub recompute_all: bool,
    /// Whether weights stay on a worker until they change.
    pub resident: bool,
    /// Whether updates at lag 0 write moments behind all weights; as it was measured where `None`.
    pub weights_first: Option<bool>,
}

impl Way {
    /// The plainest way: one job after another, one stage.
    pub fn plainest(devices: Vec<Arc<dyn Device>>, lag: Lag) -> Self {
        Self {
            serial: true,
            stages: Some(1),
            ..Self::usual(devices, lag)
        }
    }

    /// As training runs unless the user says otherwise.
    pub fn usual(devices: Vec<Arc<dyn Device>>, lag: Lag) -> Self {
        Self {
            devices,
            serial: false,
            grain: Grain::Stage,
            stages: None,
            lag,
            keep: None,
            recompute_all: false,
            resident: false,
            weights_first: None,
        }
    }

    /// An engine over a model of the subject's.
    pub fn engine(&self, subject: &Subject, model: &Model) -> Result<RoundPipe> {
        let plan = |stages| even_plan(subject.layers(), stages);
        let plan: Option<ExecutePlan> = self.stages.map(plan).transpose()?;
        let mut config = RunConfig::new()
            .num_microbatch(subject.microbatches)
            .recompute_grain(self.grain)
            .recompute_all(self.recompute_all)
            .loss_reduction(LossReduction::Sum);
        config.execute_plan = plan;
        let context = self.devices[0].cost_model().context_bytes().0;
        let mut engine = RoundPipe::builder(model.layers.clone());
        if let Some(weights_first) = self.weights_first {
            engine = engine.weights_first(weights_first);
        }
        let engine = engine
            .name("verify")
            .seed(SEED)
            .optimizer(subject.rule())
            .max_lag(self.lag)
            .devices(self.devices.clone())
            .resident(self.resident)
            .run_config(config)
            .ring_options(RingOptions {
                memory: Some(Bytes(context + memory(subject, &*self.devices[0]).0)),
                activation_budget: self.keep,
                serial: self.serial,
                ..RingOptions::default()
            })
            .build()?;
        Ok(engine)
    }

    /// All steps of a subject.
    pub fn run(&self, subject: &Subject) -> Result<Trail> {
        let model = subject.model()?;
        let engine = self.engine(subject, &model)?;
        run_steps(&engine, &model, subject, 0..2 * subject.half, self.lag)
    }
}

/// Device memory of a worker: generous for the model, little for the machine. GPUs get more, since
/// their libraries want working memory of a fixed size.
pub(super) fn memory(subject: &Subject, device: &dyn Device) -> Bytes {
    let fixed: u64 = if device.id().kind.is_gpu() {
        4 << 30
    } else {
        16 << 20
    };
    let weights = subject.num_params().saturating_mul(24);
    Bytes(weights + subject.logit_bytes().saturating_mul(4) + fixed)
}

/// Some steps of a run; what it leaves.
pub(super) fn run_steps(
    engine: &RoundPipe,
    model: &Model,
    subject: &Subject,
    steps: std::ops::Range<u64>,
    lag: Lag,
) -> Result<Trail> {
    let mut trail = Trail::default();
    for step in steps.clone() {
        trail
            .losses
            .push(engine.train(subject.batch(step)?).run()?.losses.total());
        if step + 1 == steps.end {
            engine.synchronize()?;
            trail.tensors.extend(gradients(engine)?);
        }
        engine.update(&Update::new(LR), lag)?;
    }
    engine.synchronize()?;
    trail.tensors.extend(weights(model)?);
    for (name, state) in engine.training_state()?.params {
        trail
            .tensors
            .push((Kind::Masters, name.clone(), state.value));
        let moments = state.moments.into_iter();
        trail
            .tensors
            .extend(moments.map(|moment| (Kind::Moments, name.clone(), moment)));
    }
    Ok(trail)
}

/// The loss and the gradients of one batch, without a step.
pub(super) fn one_step(
    way: &Way,
    subject: &Subject,
    model: &Model,
    batch: Inputs,
) -> Result<Trail> {
    let engine = way.engine(subject, model)?;
    let config = RunConfig::new().num_microbatch(1);
    let losses = engine.train(batch).config(config).run()?.losses;
    engine.synchronize()?;
    Ok(Trail {
        losses: vec![losses.total()],
        tensors: gradients(&engine)?,
    })
}

type Tensors = Vec<(Kind, String, HostTensor)>;

fn gradients(engine: &RoundPipe) -> Result<Tensors> {
    let all = engine.gradients()?.into_iter();
    let there = all.filter_map(|(name, grad)| Some((Kind::Gradients, name, grad?)));
    // The order of names is the same for everyone who lists them.
    let mut there: Tensors = there.collect();
    there.sort_by(|one, other| one.1.cmp(&other.1));
    Ok(there)
}

/// The trained weights of a model, as layers read them.
pub(super) fn weights(model: &Model) -> Result<Tensors> {
    let mut all = Vec::new();
    for (name, param) in model.trainable_params() {
        let copy = copy_of(&param.data(), param.dtype(), param.shape())?;
        all.push((Kind::Weights, name, copy));
    }
    Ok(all)
}

/// The step of every run, for the loop without an engine.
pub(super) fn update() -> Update {
    Update::new(LR)
}
