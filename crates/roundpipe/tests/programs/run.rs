//! Runs a program on a ring and writes down all that can be seen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use roundpipe::OptimParams;
use roundpipe::engine::{InputGrads, Inputs, MicrobatchOutputs, StepHandle};
use roundpipe::{
    Bytes, Cpu, DType, Device, Error, ExecutePlan, Forward, Grain, HostTensor, Lag, Losses,
    MergeOutput, Param, Params, PlanKind, Result, Ring, RingOptions, RoundPipe, RunConfig, Tree,
    Update, bf16,
};
use roundpipe_tensor::SimWorld;

use crate::models::{self, Built};
use crate::program::{
    Batch, Dice, EngineSpec, Fault, ForwardKind, Function, Loss, ModelKind, Odd, Op, Program, Side,
    UpdateSpec, What,
};

/// The rings that a program runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingKind {
    /// So many cpu workers.
    Cpus(usize),
    /// Two simulated workers with the delays of a seed.
    Sims(u64),
}

pub const RINGS: [RingKind; 4] = [
    RingKind::Cpus(1),
    RingKind::Cpus(3),
    RingKind::Sims(0),
    RingKind::Sims(1),
];

/// What one call to an engine returned.
#[derive(Debug, Clone)]
pub struct Reply {
    pub engine: usize,
    pub call: &'static str,
    pub result: Result<Value, Told>,
}

/// An error as it was told.
#[derive(Debug, Clone)]
pub struct Told {
    pub text: String,
    /// Whether it only says that something else failed.
    pub echo: bool,
}

/// What can be compared, in bits; every NaN is the same.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Done,
    /// The losses of each microbatch and their sum; outputs where they were asked for.
    Losses(Vec<u64>, Option<Vec<u64>>),
    /// Outputs of all microbatches.
    Rows(Vec<u64>),
    /// Gradients of the input, by microbatch.
    InputGrads(Vec<Option<Vec<u64>>>),
    Report {
        step: u64,
        /// `None` where it is not finite.
        norm: Option<u64>,
        skipped: bool,
    },
    /// By layer and parameter.
    Gradients(Vec<Named<Option<Vec<u64>>>>),
    Left(Left),
}

pub type Named<T> = (String, T);

/// What an engine that stands still has.
#[derive(Debug, Clone, PartialEq)]
pub struct Left {
    pub weights: Vec<Named<Vec<u64>>>,
    /// The optimizer's values and its state; `None` of an engine that is gone.
    pub copies: Option<Vec<Named<Vec<Vec<u64>>>>>,
    pub steps: Option<u64>,
    /// Steps that were skipped.
    pub nonfinite: Option<u64>,
}

/// What was seen on one ring.
pub struct Trace {
    /// The replies of each operation, then of the end.
    pub ops: Vec<Vec<Reply>>,
    /// Accesses that no event orders.
    pub races: Vec<String>,
}

/// What a program is doing just now, for whoever waits for it.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Watched>>);

#[derive(Default)]
struct Watched {
    doing: String,
    engines: Vec<Weak<RoundPipe>>,
}

impl Watch {
    fn set(&self, change: impl FnOnce(&mut Watched)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// What is being done, and what every thread of the engines waits for.
    pub fn report(&self) -> String {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines = vec![watched.doing.clone()];
        for engine in watched.engines.iter().filter_map(Weak::upgrade) {
            lines.extend(
                engine
                    .status()
                    .iter()
                    .map(|line| format!("    {}: {line:?}", engine.name())),
            );
        }
        lines.join("\n")
    }
}

/// The bits of a number; all NaNs are one.
pub fn bits(value: f64) -> u64 {
    if value.is_nan() {
        f64::NAN.to_bits()
    } else {
        value.to_bits()
    }
}

fn tensor_bits(tensor: &HostTensor) -> Vec<u64> {
    tensor
        .to_f64_vec()
        .expect("a tensor that nobody writes")
        .into_iter()
        .map(bits)
        .collect()
}

pub fn loss_bits(losses: &Losses) -> Vec<u64> {
    let each = losses.microbatches().iter().flatten().chain(losses.each());
    each.map(|loss| bits(*loss)).collect()
}

/// The values of all parameters and buffers.
pub fn weights(model: &impl Params) -> Vec<Named<Vec<u64>>> {
    let read = |(name, param): (String, Param)| {
        let tensor =
            HostTensor::new(param.data(), param.dtype(), param.shape()).expect("a parameter");
        (name, tensor_bits(&tensor))
    };
    model.named_params().into_iter().map(read).collect()
}

/// Runs a program from its start to its end.
pub fn run(program: &Program, ring: RingKind, watch: &Watch) -> Trace {
    let mut session = Session::new(program, ring, watch);
    let mut ops = Vec::with_capacity(program.ops.len() + 1);
    for op in &program.ops {
        watch.set(|watched| {
            watched.doing = format!("{ring:?}, #{} engine {}: {:?}", op.tag, op.engine, op.what)
        });
        ops.push(session.op(op));
    }
    watch.set(|watched| watched.doing = format!("{ring:?}, at the end"));
    ops.push(session.end());
    let world = session.world.clone();
    drop(session);
    watch.set(|watched| watched.doing = format!("{ring:?}, done; what was seen is judged"));
    let races = world
        .iter()
        .flat_map(|world| world.races())
        .map(|race| format!("{race:?}"))
        .collect();
    Trace { ops, races }
}

/// A forward that is kept.
struct KeptForward {
    engine: usize,
    batch: Batch,
    input_grads: bool,
    /// Whether its engine is gone; it can be read then, no more.
    orphan: bool,
    forward: Forward,
}

/// A program that runs.
struct Session<'a> {
    program: &'a Program,
    dice_seed: u64,
    kept: BTreeMap<usize, KeptForward>,
    /// Which engines may have failed since they last came to rest.
    troubled: Vec<bool>,
    engines: Vec<Arc<RoundPipe>>,
    models: Vec<Built>,
    ring: Ring,
    world: Option<SimWorld>,
    watch: &'a Watch,
}

impl<'a> Session<'a> {
    fn new(program: &'a Program, kind: RingKind, watch: &'a Watch) -> Self {
        let (devices, world, dice_seed) = devices(program.seed, kind);
        let keep = [None, Some(Bytes(0))][Dice::new(dice_seed, 5).below(2)];
        let options = RingOptions {
            memory: Some(Bytes::mib(1)),
            activation_budget: keep,
            ..RingOptions::default()
        };
        let ring = Ring::new(&devices, &options).expect("a ring");
        let models: Vec<Built> = program.engines.iter().map(models::build).collect();
        let mut session = Self {
            program,
            dice_seed,
            kept: BTreeMap::new(),
            troubled: vec![false; program.engines.len()],
            engines: Vec::new(),
            models,
            ring,
            world,
            watch,
        };
        for at in 0..program.engines.len() {
            let engine = session.build(at).expect("an engine");
            session.engines.push(Arc::new(engine));
        }
        session.tell();
        session
    }

    fn tell(&self) {
        let engines = self.engines.iter().map(Arc::downgrade).collect();
        self.watch.set(|watched| watched.engines = engines);
    }

    fn build(&self, at: usize) -> Result<RoundPipe> {
        let spec = &self.program.engines[at];
        let mut builder = RoundPipe::builder(self.models[at].model.clone())
            .name(format!("engine {at}"))
            .max_lag(spec.max_lag)
            .seed(spec.seed)
            .optimizer_threads(1)
            .ring(&self.ring);
        if let Some(rule) = models::rule(spec.rule) {
            builder = builder.optimizer(rule);
        }
        // Else as it was measured.
        if spec.seed % 3 < 2 {
            builder = builder.weights_first(spec.seed % 3 == 1);
        }
        if spec.grad_f32 {
            builder = builder.grad_dtype(DType::F32);
        }
        if spec.optim_bf16 {
            builder = builder.optim_dtype(DType::BF16);
        }
        builder.build()
    }

    fn spec(&self, engine: usize) -> &EngineSpec {
        &self.program.engines[engine]
    }

    // ---- operations ----

    fn op(&mut self, op: &Op) -> Vec<Reply> {
        let mut replies = Vec::new();
        self.act(op, &mut replies);
        let failed = replies.iter().any(|reply: &Reply| reply.result.is_err());
        let program = self.program;
        if program.strict || needs_rest(program, op) || (program.after_errors && failed) {
            let back = match op.what {
                What::Chain { back, .. } => Some(back),
                _ => None,
            };
            for engine in std::iter::once(op.engine).chain(back) {
                self.synchronize(engine, &mut replies);
            }
        }
        replies
    }

    fn act(&mut self, op: &Op, replies: &mut Vec<Reply>) {
        let Op { tag, engine, what } = *op;
        self.troubled[engine] |= may_fail(self.program, &what);
        match what {
            What::Train {
                batch,
                loss,
                fault,
                outputs,
                input_grads,
            } => {
                let call = TrainCall {
                    tag,
                    batch,
                    loss,
                    fault,
                    outputs,
                    input_grads,
                };
                self.train(engine, &call, replies);
            }
            What::Forward { batch, fault, kind } => {
                self.forward(engine, tag, batch, fault, kind, replies)
            }
            What::Read { of } => self.read(of, replies),
            What::Backward { of, odd } => self.backward(of, odd, replies),
            What::Drop { of } => drop(self.kept.remove(&of)),
            What::Chain {
                back,
                batch,
                loss,
                fault,
                pause,
            } => {
                let call = ChainCall {
                    tag,
                    front: engine,
                    back,
                    batch,
                    loss,
                    fault,
                    pause,
                };
                self.chain(&call, replies);
            }
            What::Update { lag, update, wait } => {
                let stepping = self.engines[engine].update(&options(&update), lag);
                wait_for(engine, stepping, wait, replies);
            }
            What::Step {
                lag,
                function,
                wait,
            } => {
                let stepping = self.step(engine, tag, function, lag);
                wait_for(engine, stepping, wait, replies);
            }
            What::Synchronize => self.synchronize(engine, replies),
            What::Gradients => {
                self.synchronize(engine, replies);
                replies.push(reply(engine, "gradients", self.gradients(engine)));
            }
            What::Weights => {
                self.synchronize(engine, replies);
                replies.push(reply(engine, "weights", self.left(engine)));
            }
            What::SetTraining(training) => self.engines[engine].set_training(training),
            What::Write { param, data } => {
                self.synchronize(engine, replies);
                // A forward that is kept would go back with other weights than it came with.
                self.drop_kept(engine);
                replies.push(reply(engine, "write", self.write(engine, param, data, 0)));
            }
            What::Second => {
                let second = self.build(engine).map(|_| Value::Done);
                replies.push(reply(engine, "second engine", second));
            }
            What::Race {
                param,
                data,
                lag,
                update,
            } => {
                self.synchronize(engine, replies);
                self.drop_kept(engine);
                let stepping = self.engines[engine].update(&options(&update), lag);
                wait_for(engine, stepping, false, replies);
                // Another moment on each ring.
                let mut dice = Dice::new(self.dice_seed, 2000 + tag as u64);
                let mut moments = || dice.below(4) * dice.below(30);
                pass(moments());
                replies.push(reply(
                    engine,
                    "write",
                    self.write(engine, param, data, moments()),
                ));
                self.synchronize(engine, replies);
                replies.push(reply(engine, "weights", self.left(engine)));
            }
            What::Rebuild { holds } => self.rebuild(engine, holds, replies),
        }
    }

    /// Everything comes to rest, and is read.
    fn end(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        for engine in 0..self.engines.len() {
            self.synchronize(engine, &mut replies);
        }
        for engine in 0..self.engines.len() {
            replies.push(reply(engine, "gradients", self.gradients(engine)));
            replies.push(reply(engine, "weights", self.left(engine)));
        }
        replies
    }

    fn synchronize(&mut self, engine: usize, replies: &mut Vec<Reply>) {
        self.troubled[engine] = false;
        let done = self.engines[engine].synchronize().map(|()| Value::Done);
        replies.push(reply(engine, "synchronize", done));
    }

    fn train(&self, engine: usize, call: &TrainCall, replies: &mut Vec<Reply>) {
        let TrainCall {
            tag,
            batch,
            loss,
            fault,
            ..
        } = *call;
        let spec = self.spec(engine);
        self.arm(engine, tag, fault, &batch);
        let labels = models::labels(spec.dtype, &batch, loss, tag, fault);
        let args = Inputs::new()
            .named("x", models::input(spec, &batch, tag, fault))
            .named("tag", models::tag_rows(batch.rows, tag));
        let config = self
            .config(engine, tag, PlanKind::Fused, &batch)
            .input_grads(call.input_grads);
        let mut train = self.engines[engine]
            .train(args)
            .labels(labels)
            .loss(models::loss_with(loss, tag, fault, batch.parts()))
            .config(config);
        if call.outputs {
            train = train.return_outputs();
        }
        let trained = train.run();
        let grads = trained
            .as_ref()
            .ok()
            .and_then(|trained| trained.input_grads.clone());
        let value = trained.map(|trained| {
            let outputs = trained.outputs.map(rows);
            Value::Losses(loss_bits(&trained.losses), outputs)
        });
        replies.push(reply(engine, "train", value));
        if let Some(grads) = grads {
            replies.push(reply(engine, "input gradients", read_grads(&grads)));
        }
    }

    fn forward(
        &mut self,
        engine: usize,
        tag: usize,
        batch: Batch,
        fault: Option<Fault>,
        how: ForwardKind,
        replies: &mut Vec<Reply>,
    ) {
        let spec = self.spec(engine);
        self.arm(engine, tag, fault, &batch);
        let args = Inputs::new()
            .named("x", models::input(spec, &batch, tag, fault))
            .named("tag", models::tag_rows(batch.rows, tag));
        let kind = if how.requires_grad {
            PlanKind::Train
        } else {
            PlanKind::Infer
        };
        let merge = if how.merged {
            MergeOutput::Auto
        } else {
            MergeOutput::Off
        };
        let config = self
            .config(engine, tag, kind, &batch)
            .requires_grad(how.requires_grad)
            .input_grads(how.input_grads)
            .merge_output(merge);
        let forward = self.engines[engine].forward(args, &config);
        let value = forward
            .as_ref()
            .map_err(told)
            .map(|forward| match forward.output() {
                Ok(output) => Value::Rows(rows(output.clone())),
                Err(_) => Value::Done,
            });
        replies.push(Reply {
            engine,
            call: "forward",
            result: value,
        });
        if let (Ok(forward), true) = (forward, how.keep) {
            let input_grads = how.input_grads;
            self.kept.insert(
                tag,
                KeptForward {
                    engine,
                    batch,
                    input_grads,
                    orphan: false,
                    forward,
                },
            );
        }
    }

    /// Forwards of an engine and of those before it are gone.
    fn drop_kept(&mut self, engine: usize) {
        // The engine that would wait for these is gone, and they may still read the weights.
        for kept in self
            .kept
            .values()
            .filter(|kept| kept.engine == engine && kept.orphan)
        {
            let _ = read_rows(&kept.forward.unmerged());
        }
        self.kept.retain(|_, kept| kept.engine != engine);
    }

    fn read(&self, of: usize, replies: &mut Vec<Reply>) {
        let Some(kept) = self.kept.get(&of) else {
            return;
        };
        replies.push(reply(
            kept.engine,
            "read",
            read_rows(&kept.forward.unmerged()),
        ));
    }

    fn backward(&mut self, of: usize, odd: Odd, replies: &mut Vec<Reply>) {
        let Some(kept) = self.kept.remove(&of).filter(|kept| !kept.orphan) else {
            return;
        };
        let engine = kept.engine;
        let batch = Batch { odd, ..kept.batch };
        let grads = models::labels(self.spec(engine).dtype, &batch, Loss::Weighted, of, None);
        let done = kept.forward.backward(grads);
        let grads = done.as_ref().ok().filter(|_| kept.input_grads).cloned();
        replies.push(reply(engine, "backward", done.map(|_| Value::Done)));
        if let Some(grads) = grads {
            replies.push(reply(engine, "input gradients", read_grads(&grads)));
        }
    }

    fn chain(&mut self, call: &ChainCall, replies: &mut Vec<Reply>) {
        let ChainCall {
            tag,
            front,
            back,
            batch,
            loss,
            fault,
            pause,
        } = *call;
        if self.troubled[back] {
            // Whether its input gradients come before it fails depends on how far it is.
            self.synchronize(back, replies);
        }
        self.troubled[back] |= fault.is_some();
        let of = |side: Side| fault.filter(|(at, _)| *at == side).map(|(_, fault)| fault);
        self.arm(front, tag, of(Side::Front), &batch);
        self.arm(back, tag, of(Side::Back), &batch);
        let args = Inputs::new()
            .named(
                "x",
                models::input(self.spec(front), &batch, tag, of(Side::Front)),
            )
            .named("tag", models::tag_rows(batch.rows, tag));
        let config = self
            .config(front, tag, PlanKind::Train, &batch)
            .merge_output(MergeOutput::Off);
        let forward = self.engines[front].forward(args, &config);
        let forward = match forward {
            Ok(forward) => forward,
            Err(error) => return replies.push(reply(front, "chain forward", Err(error))),
        };
        replies.push(reply(front, "chain forward", Ok(Value::Done)));
        let labels = models::labels(self.spec(back).dtype, &batch, loss, tag, of(Side::Back));
        let args = Inputs::new()
            .named("x", forward.unmerged())
            .named("tag", models::tag_rows(batch.rows, tag));
        let trained = self.engines[back]
            .train(args)
            .labels(labels)
            .loss(models::loss_with(loss, tag, of(Side::Back), batch.parts()))
            .config(
                self.config(back, tag, PlanKind::Fused, &batch)
                    .input_grads(true),
            )
            .run();
        let grads = trained
            .as_ref()
            .ok()
            .and_then(|trained| trained.input_grads.clone());
        let value = trained.map(|trained| Value::Losses(loss_bits(&trained.losses), None));
        replies.push(reply(back, "chain train", value));
        let Some(grads) = grads else { return };
        if pause {
            self.synchronize(front, replies);
        }
        // Of `tag` and `x`, in this order.
        let done = grads.arg(1).and_then(|grads| forward.backward_from(&grads));
        replies.push(reply(front, "chain backward", done.map(|_| Value::Done)));
    }

    fn step(&self, engine: usize, tag: usize, function: Function, lag: Lag) -> Result<StepHandle> {
        let step = move |params: &mut OptimParams<'_>| {
            // The views are taken one by one, so the values travel.
            let grads: Vec<Option<Vec<f32>>> =
                params.iter_mut().map(|param| param.grad_f32()).collect();
            let mut views: Vec<_> = params
                .iter_mut()
                .map(|param| param.value)
                .zip(grads)
                .collect();
            models::change(function, tag, &mut views)
                .map_err(|what| Error::Config { name: "step", what })
        };
        self.engines[engine].step(step, lag)
    }

    /// Writes a parameter and holds it for some moments.
    fn write(&self, engine: usize, param: usize, data: u64, moments: usize) -> Result<Value> {
        let params = self.models[engine].model.named_params();
        let param = &params[param % params.len()].1;
        let values = models::written(data, param.shape().numel());
        let values = HostTensor::from_f64s(&values, param.dtype(), param.shape())?;
        let home = param.data();
        let mut held = home.write(0..home.len())?;
        pass(moments);
        held.bytes().copy_from_slice(values.read()?.bytes());
        pass(moments);
        Ok(Value::Done)
    }

    fn rebuild(&mut self, engine: usize, holds: bool, replies: &mut Vec<Reply>) {
        // Another engine may wait for what this one computes.
        for other in (0..self.engines.len()).filter(|other| *other != engine) {
            self.synchronize(other, replies);
        }
        if holds {
            self.kept
                .values_mut()
                .filter(|kept| kept.engine == engine)
                .for_each(|kept| kept.orphan = true);
        } else {
            self.drop_kept(engine);
        }
        let old = self.engines.remove(engine);
        drop(Arc::into_inner(old));
        let weights = weights(&self.models[engine].model);
        let left = Left {
            weights,
            copies: None,
            steps: None,
            nonfinite: None,
        };
        replies.push(reply(engine, "drop", Ok(Value::Left(left))));
        let built = self
            .build(engine)
            .expect("an engine after the first is gone");
        self.engines.insert(engine, Arc::new(built));
        self.tell();
    }

    fn gradients(&self, engine: usize) -> Result<Value> {
        let read =
            |(name, grad): (String, Option<HostTensor>)| (name, grad.as_ref().map(tensor_bits));
        Ok(Value::Gradients(
            self.engines[engine]
                .gradients()?
                .into_iter()
                .map(read)
                .collect(),
        ))
    }

    fn left(&self, engine: usize) -> Result<Value> {
        let wide = |values: Vec<f32>| {
            values
                .into_iter()
                .map(|value| bits(f64::from(value)))
                .collect()
        };
        let mut copies = Vec::new();
        for copy in self.engines[engine].optim_parameters()? {
            let mut all: Vec<Vec<u64>> = vec![wide(copy.to_vec()?)];
            for moment in copy.moments() {
                let moment = moment.read_all()?;
                all.push(wide(match copy.dtype {
                    DType::BF16 => moment
                        .as_slice::<bf16>()
                        .iter()
                        .map(|x| x.to_f32())
                        .collect(),
                    _ => moment.as_slice::<f32>().to_vec(),
                }));
            }
            copies.push((copy.name, all));
        }
        let weights = weights(&self.models[engine].model);
        let engine = &self.engines[engine];
        let (steps, nonfinite) = (Some(engine.steps()), Some(engine.nonfinite_steps()));
        Ok(Value::Left(Left {
            weights,
            copies: Some(copies),
            steps,
            nonfinite,
        }))
    }

    // ---- options ----

    fn arm(&self, engine: usize, tag: usize, fault: Option<Fault>, batch: &Batch) {
        if let Some(fault) = fault {
            self.models[engine].traps.arm(tag, fault, batch.parts());
        }
    }

    /// How a call is cut: another way on each ring, since no bit depends on it.
    fn config(&self, engine: usize, tag: usize, kind: PlanKind, batch: &Batch) -> RunConfig {
        let mut dice = Dice::new(self.dice_seed, 1000 + (tag * 8 + engine) as u64);
        let grain = dice.of(&[Grain::Stage, Grain::Layer]);
        let config = RunConfig::new()
            .num_microbatch(batch.micro)
            .recompute_grain(grain);
        match dice.percent(25) {
            true => config,
            false => config.execute_plan(plan(&mut dice, kind, self.models[engine].model.len())),
        }
    }
}

#[derive(Clone, Copy)]
struct TrainCall {
    tag: usize,
    batch: Batch,
    loss: Loss,
    fault: Option<Fault>,
    outputs: bool,
    input_grads: bool,
}

#[derive(Clone, Copy)]
struct ChainCall {
    tag: usize,
    front: usize,
    back: usize,
    batch: Batch,
    loss: Loss,
    fault: Option<(Side, Fault)>,
    pause: bool,
}

/// Whether an operation must come to rest before the next for its effect to be certain: whether
/// calls behind a failed forward fail with it depends on how far they are, and whether a buffer is
/// set beside a failing step as well.
pub fn needs_rest(program: &Program, op: &Op) -> bool {
    match op.what {
        What::Forward {
            fault: Some(fault),
            kind,
            ..
        } => !kind.merged && !fault.is_late(),
        What::Step { lag: Lag::One, .. } => program.engines[op.engine].model == ModelKind::Running,
        _ => false,
    }
}

/// Lets other threads run.
fn pass(moments: usize) {
    (0..moments).for_each(|_| std::thread::yield_now());
}

/// Whether an operation may fail after it has returned.
fn may_fail(program: &Program, what: &What) -> bool {
    match what {
        What::Train { fault, .. } | What::Forward { fault, .. } => fault.is_some(),
        What::Chain { fault, .. } => fault.is_some(),
        What::Backward { of, .. } => {
            let forward = program.ops.iter().find(|op| op.tag == *of);
            forward.is_some_and(|op| may_fail(program, &op.what))
        }
        // Gradients that are not finite make weights that are not.
        What::Step { function, .. } => *function != Function::Shrink,
        _ => false,
    }
}

fn devices(seed: u64, kind: RingKind) -> (Vec<Arc<dyn Device>>, Option<SimWorld>, u64) {
    match kind {
        RingKind::Cpus(count) => {
            let cpus = Cpu::workers(count, Some(1)).expect("cpu workers");
            (
                cpus.into_iter().map(|cpu| cpu as Arc<dyn Device>).collect(),
                None,
                seed * 8 + count as u64,
            )
        }
        RingKind::Sims(which) => {
            let world = SimWorld::seeded(seed * 2 + which).expect("a simulated world");
            let sims = world
                .workers(2)
                .into_iter()
                .map(|sim| sim as Arc<dyn Device>)
                .collect();
            (sims, Some(world), seed * 8 + 4 + which)
        }
    }
}

/// Random cuts.
fn plan(dice: &mut Dice, kind: PlanKind, layers: usize) -> ExecutePlan {
    let mut cut = |mut total: usize| {
        let mut sizes = Vec::new();
        while total > 0 {
            let size = 1 + dice.below(total);
            sizes.push(size);
            total -= size;
        }
        sizes
    };
    let backward = cut(layers);
    let forward = match kind {
        PlanKind::Fused => cut(layers - backward[0]),
        _ => cut(layers),
    };
    ExecutePlan::from_sizes(kind, &forward, &backward)
}

fn options(spec: &UpdateSpec) -> Update {
    Update {
        clip: spec.clip,
        grad_scale: spec.grad_scale,
        ..Update::new(spec.lr)
    }
}

fn told(error: &Error) -> Told {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    Told {
        text,
        echo: matches!(error, Error::Cancelled { .. } | Error::Aborted(_)),
    }
}

fn reply(engine: usize, call: &'static str, result: Result<Value>) -> Reply {
    Reply {
        engine,
        call,
        result: result.map_err(|error| told(&error)),
    }
}

/// What a step returned, and its report where it is waited for.
fn wait_for(engine: usize, stepping: Result<StepHandle>, wait: bool, replies: &mut Vec<Reply>) {
    let stepping = match stepping {
        Ok(stepping) => stepping,
        Err(error) => return replies.push(reply(engine, "step", Err(error))),
    };
    replies.push(reply(engine, "step", Ok(Value::Done)));
    if wait {
        let report = stepping.wait().map(|report| Value::Report {
            step: report.step,
            norm: report.grad_norm.is_finite().then(|| bits(report.grad_norm)),
            skipped: report.skipped,
        });
        replies.push(reply(engine, "report", report));
    }
}

fn rows(tree: Tree<HostTensor>) -> Vec<u64> {
    tensor_bits(&tree.tensor().expect("one output"))
}

fn read_rows(outputs: &MicrobatchOutputs) -> Result<Value> {
    let mut all = Vec::new();
    for part in 0..outputs.len() {
        all.extend(rows(outputs.wait(part)?));
    }
    Ok(Value::Rows(all))
}

fn read_grads(grads: &InputGrads) -> Result<Value> {
    // Of `tag`, which has none, and `x`.
    let part = |part| {
        Ok(grads
            .wait(part)?
            .last()
            .and_then(|grad| grad.as_ref().map(tensor_bits)))
    };
    Ok(Value::InputGrads(
        (0..grads.len()).map(part).collect::<Result<_>>()?,
    ))
}
