//! A model of which parts are engines: its forward runs on the host and passes values from engine
//! to engine.
//!
//! A forward keeps a record of its calls, each with the calls that its inputs come from. The way
//! back follows the record from the output, and is there as long as each call takes the outputs of
//! at most one other: a chain. MicrobatchOutputs outputs and their gradients pass from engine to engine
//! microbatch by microbatch, without a host wait.
//!
//! It refuses `forward_backward` (a loss needs to run behind the last layer, and there is no last
//! layer) and the way back through anything that is not a chain.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{
    Bytes, Cpu, Cx, Device, Gradients, HostTensor, Param, Result as TensorResult, RngSite, Tensor,
    Worker,
};

use super::run::{Kind, Origin, Run, Value, Values, run_inside};
use super::{Decision, Node, Place, full_name, groups_at, join, shown};
use crate::config::RunConfig;
use crate::engine::{Forward, InputGrads, Inputs, IntoLosses, Lag, Losses, RoundPipe, StepHandle};
use crate::error::{Error, Result};
use crate::exec::ring::Ring;
use crate::groups::{ParamGroup, check_patterns};
use crate::layer::Params;
use crate::optim::StepReport;
use crate::store::Store;
use crate::sync::lock;
use crate::tree::Tree;
use crate::update::{self, OptimHandle, OptimParams, Update};

/// A gradient for each tensor of a value; `None` where there is none.
type Grads = Tree<Option<HostTensor>>;

/// Engines for parts of a model, on one ring, and the model's own forward over them.
pub struct AutoWrapped(Arc<Shared>);

pub(super) struct Shared {
    model: Node,
    place: Place,
    engines: Vec<(String, RoundPipe<Node>)>,
    decisions: Vec<Decision>,
    ring: Ring,
    seed: u64,
    /// What no engine has, by name.
    unwrapped: Vec<(String, Param)>,
    grads: Mutex<HashMap<String, HostTensor>>,
    /// What runs unwrapped modules; made when the first does.
    host: Mutex<Option<Worker>>,
    training: AtomicBool,
    /// Training forwards so far: the place in the random stream.
    number: AtomicU64,
}

impl AutoWrapped {
    pub(super) fn new(
        model: Node,
        place: Place,
        engines: Vec<(String, RoundPipe<Node>)>,
        decisions: Vec<Decision>,
        ring: Ring,
        seed: u64,
    ) -> Self {
        let wrapped: HashSet<_> = engines
            .iter()
            .flat_map(|(_, engine)| engine.named_params())
            .map(|(_, p)| p.id())
            .collect();
        let mut unwrapped = model.named_params();
        unwrapped.retain(|(_, param)| !wrapped.contains(&param.id()));
        Self(Arc::new(Shared {
            model,
            place,
            engines,
            decisions,
            ring,
            seed,
            unwrapped,
            grads: Mutex::default(),
            host: Mutex::default(),
            training: AtomicBool::new(true),
            number: AtomicU64::new(0),
        }))
    }

    /// Runs the model's forward over its engines. Of the configuration `requires_grad`,
    /// `input_grads` and `recompute_grain` hold for every engine.
    ///
    /// # Errors
    /// [`Error::Config`] for other settings, which belong to single engines; what goes wrong in an
    /// engine.
    pub fn forward(&self, inputs: impl Into<Inputs>, config: &RunConfig) -> Result<AutoForward> {
        refuse_settings(config)?;
        let training = self.0.training.load(Ordering::Relaxed);
        let number = self
            .0
            .number
            .fetch_add(u64::from(training), Ordering::Relaxed);
        let mut recorder = Recorder {
            shared: self.0.clone(),
            config: config.clone(),
            training,
            number,
            calls: Vec::new(),
        };
        let run = recorder.call(&self.0.place, "", Values::from_inputs(inputs.into())?);
        let output = run.and_then(|value| Ok((value.to_host()?, value.origin)));
        match output {
            Ok((output, origin)) => Ok(AutoForward {
                shared: self.0.clone(),
                calls: recorder.calls,
                output,
                origin,
            }),
            Err(error) => {
                drop(recorder);
                Err(self.0.failed(error))
            }
        }
    }

    /// Never works: says why, and what does.
    ///
    /// # Errors
    /// Always.
    pub fn forward_backward<L: IntoLosses>(
        &self,
        _inputs: impl Into<Inputs>,
        _labels: impl Into<Tree<HostTensor>>,
        _loss: impl Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    ) -> Result<Losses> {
        let what = format!(
            "the model was wrapped in {} parts, not as one sequence, so there is no last layer to run the loss \
             behind; use `forward` and its `backward`, or give `wrap` a preset that makes a `Sequential` of it",
            self.0.engines.len()
        );
        Err(Error::config("forward_backward", what))
    }

    /// Updates the weights of all engines that computed gradients since their last step. With
    /// `clip` or `skip_nonfinite` it first waits for all gradients, since their norm is taken over
    /// all engines. Parameters that are in no engine are left alone: see
    /// [`AutoWrapped::take_unwrapped_gradients`].
    ///
    /// # Errors
    /// As [`RoundPipe::update`]. Engines before the one that failed, in their order, are updated
    /// then.
    pub fn update(&self, update: &Update, lag: Lag) -> Result<AutoStepping> {
        update.check()?;
        let (update, decision) = self.together(update)?;
        let skip = decision.is_some_and(|decision| decision.skip);
        let steps = self.each_with_gradients(|_, engine| match skip {
            true => engine.skip_nonfinite_step(lag),
            false => engine.update(&update, lag),
        })?;
        Ok(AutoStepping {
            steps,
            grad_norm: decision.map(|decision| decision.grad_norm),
        })
    }

    /// Calls a function over the optimizer copies of each engine that computed gradients since its
    /// last step, with the engine's path.
    ///
    /// # Errors
    /// As [`RoundPipe::step`]. Engines before the one that failed, in their order, are updated
    /// then.
    pub fn step(
        &self,
        step_fn: impl Fn(&str, &mut OptimParams<'_>) -> Result<()> + Send + Sync + 'static,
        lag: Lag,
    ) -> Result<AutoStepping> {
        let step_fn = Arc::new(step_fn);
        let steps = self.each_with_gradients(|path, engine| {
            let (step_fn, path) = (step_fn.clone(), path.to_owned());
            engine.step(move |params| step_fn(&path, params), lag)
        })?;
        Ok(AutoStepping {
            steps,
            grad_norm: None,
        })
    }

    fn each_with_gradients(
        &self,
        step: impl Fn(&str, &RoundPipe<Node>) -> Result<StepHandle>,
    ) -> Result<Vec<StepHandle>> {
        let mut steps = Vec::new();
        for (path, engine) in self
            .0
            .engines
            .iter()
            .filter(|(_, engine)| engine.has_gradients())
        {
            steps.push(step(path, engine).map_err(|error| self.0.failed(error))?);
        }
        if steps.is_empty() {
            return Err(Error::config(
                "step",
                "no engine computed gradients since the last step",
            ));
        }
        Ok(steps)
    }

    /// Replaces the groups of [`WrapConfig::groups`](super::WrapConfig::groups) for the updates that
    /// are asked for from now on.
    ///
    /// # Errors
    /// As [`RoundPipe::set_groups`]; the groups are as before then.
    pub fn set_groups(&self, groups: impl IntoIterator<Item = ParamGroup>) -> Result<()> {
        let groups: Vec<_> = groups.into_iter().collect();
        let engines = || {
            let engines = self.0.engines.iter();
            engines.map(|(path, engine)| (path, engine, engine.sequence().is_none()))
        };
        let names: Vec<String> = engines()
            .flat_map(|(path, engine, single)| {
                let names = engine.trained_names();
                names.map(move |name| full_name(path, name, single))
            })
            .collect();
        check_patterns(&groups, names.iter().map(String::as_str))?;
        // Settings are refused by the first engine or by none: all have one rule.
        engines().try_for_each(|(path, engine, single)| {
            engine.set_groups(groups_at(&groups, path, single))
        })
    }

    /// What clipping and skipping over the gradients of all engines mean for each of them.
    fn together(&self, update: &Update) -> Result<(Update, Option<update::Decision>)> {
        if update.clip.is_none() && !update.skip_nonfinite {
            return Ok((*update, None));
        }
        self.synchronize()?;
        let clip_value = update.stored_clip_value();
        let mut squares = Vec::new();
        for (_, engine) in self
            .0
            .engines
            .iter()
            .filter(|(_, engine)| engine.has_gradients())
        {
            squares.extend(engine.squares(clip_value)?);
        }
        let decision = update.decide(Store::total(&squares));
        let factor = f64::from(decision.factor);
        let each = Update {
            clip: None,
            // Exact in f64, and so is the quotient that each engine takes: it clips to the same.
            clip_value: clip_value.map(|clip| f64::from(clip) * factor),
            grad_scale: factor,
            ..*update
        };
        Ok((each, Some(decision)))
    }

    /// Waits until nothing moves in any engine.
    ///
    /// # Errors
    /// What went wrong since the last call.
    pub fn synchronize(&self) -> Result<()> {
        match self.0.settle() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The optimizer's copies of all engines' trainable parameters.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_parameters(&self) -> Result<impl Iterator<Item = OptimHandle>> {
        Ok(self.optim_named_parameters("", true)?.map(|(_, copy)| copy))
    }

    /// The same with their names in the tree, `prefix` in front. Shared parameters are listed once,
    /// or under each of their names.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_named_parameters(
        &self,
        prefix: &str,
        remove_duplicate: bool,
    ) -> Result<impl Iterator<Item = (String, OptimHandle)>> {
        let mut all = Vec::new();
        for (path, engine) in &self.0.engines {
            let path = if path.is_empty() {
                prefix.to_owned()
            } else {
                join(prefix, path)
            };
            let single = engine.sequence().is_none();
            let named = engine.optim_named_parameters("", remove_duplicate)?;
            all.extend(named.map(|(name, copy)| (full_name(&path, &name, single), copy)));
        }
        Ok(all.into_iter())
    }

    /// The gradients since the last step by their names in the tree, of parameters in engines. Call
    /// [`AutoWrapped::synchronize`] first.
    ///
    /// # Errors
    /// While a gradient is being written.
    pub fn gradients(&self) -> Result<Vec<(String, Option<HostTensor>)>> {
        let mut all = Vec::new();
        for (path, engine) in &self.0.engines {
            let single = engine.sequence().is_none();
            let grads = engine.gradients()?.into_iter();
            all.extend(grads.map(|(name, grad)| (full_name(path, &name, single), grad)));
        }
        Ok(all)
    }

    /// Parameters and buffers that are in no engine; their update is the caller's.
    pub fn unwrapped_params(&self) -> &[(String, Param)] {
        &self.0.unwrapped
    }

    /// The gradients of parameters in no engine, summed over backwards since they were last taken,
    /// by name.
    pub fn take_unwrapped_gradients(&self) -> Vec<(String, HostTensor)> {
        let mut grads: Vec<_> = std::mem::take(&mut *lock(&self.0.grads))
            .into_iter()
            .collect();
        grads.sort_by(|a, b| a.0.cmp(&b.0));
        grads
    }

    /// Whether layers behave as in training; on by default.
    pub fn set_training(&self, training: bool) {
        self.0.training.store(training, Ordering::Relaxed);
        self.0
            .engines
            .iter()
            .for_each(|(_, engine)| engine.set_training(training));
    }

    /// The engines with their paths, in the order of the tree.
    pub fn engines(&self) -> impl Iterator<Item = (&str, &RoundPipe<Node>)> {
        self.0
            .engines
            .iter()
            .map(|(path, engine)| (path.as_str(), engine))
    }

    /// What was decided on each module.
    pub fn decisions(&self) -> &[Decision] {
        &self.0.decisions
    }

    /// The model that this was made from.
    pub fn original(&self) -> &Node {
        &self.0.model
    }

    /// The workers.
    pub fn ring(&self) -> &Ring {
        &self.0.ring
    }

    /// What the user should know and has not asked for, of all engines; each is returned once.
    pub fn take_warnings(&self) -> Vec<String> {
        let of = |(path, engine): &(String, RoundPipe<Node>)| {
            engine
                .take_warnings()
                .into_iter()
                .map(|text| format!("{path}: {text}"))
                .collect::<Vec<_>>()
        };
        self.0.engines.iter().flat_map(of).collect()
    }
}

impl std::fmt::Debug for AutoWrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (engines, workers) = (self.0.engines.len(), self.0.ring.len());
        write!(f, "AutoWrapped({engines} engines on {workers} workers)")
    }
}

/// What belongs to single engines.
fn refuse_settings(config: &RunConfig) -> Result<()> {
    let set = [
        ("output_device", config.output_device.is_some()),
        ("num_microbatch", config.num_microbatch.is_some()),
        ("split_input", config.split_input.is_some()),
        ("split_label", config.split_label.is_some()),
        ("merge_output", config.merge_output.is_some()),
        ("loss_reduction", config.loss_reduction.is_some()),
        ("execute_plan", config.execute_plan.is_some()),
    ];
    match set.into_iter().find(|(_, set)| *set) {
        Some((name, _)) => {
            let what = "it belongs to single engines; use `run_config` or `override_config` of `WrapConfig`";
            Err(Error::config(name, what))
        }
        None => Ok(()),
    }
}

impl Shared {
    /// Waits until nothing moves; what went wrong first, rather than what was called off for it.
    fn settle(&self) -> Option<Error> {
        let mut found: Option<Error> = None;
        for (_, engine) in &self.engines {
            if let Err(error) = engine.synchronize()
                && found
                    .as_ref()
                    .is_none_or(|have| is_consequence(have) && !is_consequence(&error))
            {
                found = Some(error);
            }
        }
        found
    }

    /// Puts all engines in order after a failure and finds its cause.
    fn failed(&self, error: Error) -> Error {
        match self.settle() {
            Some(cause) if is_consequence(&error) => cause,
            _ => error,
        }
    }

    fn host_worker(&self) -> Result<Worker> {
        let mut host = lock(&self.host);
        if let Some(worker) = &*host {
            return Ok(worker.clone());
        }
        let cpu = Cpu::new(None)?;
        let bytes = Bytes(cpu.memory().0 / 4);
        Ok(host.insert(Worker::new(cpu, bytes)?).clone())
    }

    /// Adds gradients of parameters that are in no engine.
    fn add_grads(&self, gradients: &Gradients) -> Result<()> {
        let name = |param: &Param| self.unwrapped.iter().find(|(_, p)| p.id() == param.id());
        if let Some((param, _)) = gradients.params().find(|(param, _)| name(param).is_none()) {
            let all = self.model.named_params();
            let known = all.iter().find(|(_, p)| p.id() == param.id());
            let what = match known {
                Some((name, _)) => format!("`{name}` is in an engine, but was used outside it"),
                None => "a parameter was used that the model does not list".to_owned(),
            };
            return Err(Error::config("backward", what));
        }
        let mut sums = lock(&self.grads);
        for (param, grad) in gradients.params() {
            let Some((name, _)) = name(param) else {
                continue;
            };
            let mut values = grad.to_f64_vec()?;
            if let Some(sum) = sums.get(name) {
                values
                    .iter_mut()
                    .zip(sum.to_f64_vec()?)
                    .for_each(|(value, sum)| *value += sum);
            }
            sums.insert(
                name.clone(),
                HostTensor::from_f64s(&values, grad.dtype(), grad.dims())?,
            );
        }
        Ok(())
    }
}

/// Whether an error only says that another came first.
fn is_consequence(error: &Error) -> bool {
    match error {
        Error::Cancelled { .. } | Error::Aborted(_) => true,
        Error::Task { cause, .. } => is_consequence(cause),
        _ => false,
    }
}

/// Runs a forward and notes its calls.
pub(super) struct Recorder {
    shared: Arc<Shared>,
    config: RunConfig,
    training: bool,
    number: u64,
    calls: Vec<Called>,
}

/// One call of a forward.
struct Called {
    path: String,
    /// Where each input comes from.
    origins: Vec<Origin>,
    body: Body,
}

enum Body {
    Engine(Box<Forward>),
    Host(Box<HostCall>),
}

/// What ran on the host, with its tape.
struct HostCall {
    cx: Cx,
    /// The inputs that a gradient is wanted for.
    inputs: Vec<Tree<Option<Tensor>>>,
    outputs: Tree,
    value: Tree<HostTensor>,
}

impl Recorder {
    /// Calls what became of a module.
    pub fn call(&mut self, place: &Place, path: &str, input: Values) -> Result<Value> {
        match place {
            Place::Engine(index) => self.engine(*index, path, input),
            Place::Unwrapped(node) => {
                self.on_host(path, input, |cx, tree| run_inside(node, cx, tree))
            }
            Place::Composite(module, children) => {
                module.forward(&mut Run::host(self, children, path), input)
            }
            Place::Group(_) => {
                let what =
                    format!("`{path}` has no forward; call its elements by their dotted paths");
                Err(Error::config("wrap", what))
            }
            Place::List(elements) => {
                let mut elements = elements.iter();
                let Some((name, first)) = elements.next() else {
                    return Err(Error::config(
                        "wrap",
                        format!("the list `{path}` has no elements"),
                    ));
                };
                let value = self.call(first, &join(path, name), input)?;
                elements.try_fold(value, |value, (name, next)| {
                    self.call(next, &join(path, name), value.into())
                })
            }
        }
    }

    fn engine(&mut self, index: usize, path: &str, input: Values) -> Result<Value> {
        let origins: Vec<Origin> = input.iter().map(|value| value.origin).collect();
        let mut config = self.config.clone();
        if origins.iter().any(|origin| *origin != Origin::Outside) {
            config.input_grads = Some(true);
        }
        let forward = self.shared.engines[index]
            .1
            .forward(input.into_inputs()?, &config)?;
        let kind = match forward.output() {
            Ok(output) => Kind::Host(output.clone()),
            Err(_) => Kind::MicrobatchOutputs(forward.unmerged()),
        };
        Ok(self.note(path, origins, Body::Engine(Box::new(forward)), kind))
    }

    fn note(&mut self, path: &str, origins: Vec<Origin>, body: Body, kind: Kind) -> Value {
        self.calls.push(Called {
            path: path.to_owned(),
            origins,
            body,
        });
        Value {
            kind,
            origin: Origin::Call(self.calls.len() - 1),
        }
    }

    /// Computes on the host, whole batches at a time.
    pub fn on_host(
        &mut self,
        path: &str,
        input: Values,
        compute: impl FnOnce(&mut Cx, Tree) -> TensorResult<Tree>,
    ) -> Result<Value> {
        let worker = self.shared.host_worker()?;
        let record = self.config.requires_grad.unwrap_or(true);
        // No layer of an engine has such a number.
        let layer = u32::MAX - self.calls.len() as u32;
        let site = RngSite {
            seed: self.shared.seed,
            step: self.number,
            microbatch: 0,
            layer,
            site: 0,
        };
        let mut cx = Cx::new(&worker, record, self.training).at(site);
        let origins: Vec<Origin> = input.iter().map(|value| value.origin).collect();
        let all_grads = self.config.input_grads == Some(true);
        let mut inputs = Vec::new();
        let mut bring = |cx: &mut Cx, value: &Value| -> Result<Tree> {
            let wanted = record && (all_grads || value.origin != Origin::Outside);
            let tree = value.to_host()?.try_map(|tensor| -> Result<Tensor> {
                let buf = tensor.buf().slice(tensor.byte_range())?;
                let here = worker.alias(&buf, tensor.dtype(), *tensor.shape())?;
                Ok(if wanted && here.dtype().is_float() {
                    cx.input(&here)?
                } else {
                    here
                })
            })?;
            inputs.push(
                tree.map_ref(|tensor| (wanted && tensor.requires_grad()).then(|| tensor.clone())),
            );
            Ok(tree)
        };
        let here = input.try_map(|value| bring(&mut cx, &value))?;
        let outputs = compute(&mut cx, here.into_tree()).map_err(|cause| Error::Layer {
            index: self.calls.len(),
            layer: path.to_owned(),
            cause,
        })?;
        let value = outputs.clone().try_map(|tensor| download(&tensor))?;
        if !record {
            cx.commit_buffers()?;
        }
        let body = HostCall {
            cx,
            inputs,
            outputs,
            value: value.clone(),
        };
        Ok(self.note(path, origins, Body::Host(Box::new(body)), Kind::Host(value)))
    }
}

fn download(tensor: &Tensor) -> Result<HostTensor> {
    let host = HostTensor::zeros(tensor.dtype(), tensor.dims())?;
    tensor.read_into(&mut host.write()?)?;
    Ok(host)
}

/// What a forward gave, and the way back.
pub struct AutoForward {
    shared: Arc<Shared>,
    calls: Vec<Called>,
    output: Tree<HostTensor>,
    origin: Origin,
}

impl std::fmt::Debug for AutoForward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AutoForward({} calls)", self.calls.len())
    }
}

/// Gradients on their way back.
enum Flow {
    Merged(Grads),
    /// Of each microbatch, when they are computed.
    Later(InputGrads),
}

impl AutoForward {
    /// The merged output.
    pub fn output(&self) -> &Tree<HostTensor> {
        &self.output
    }

    /// Walks the calls of the forward back from gradients of its output. Gradients of parameters
    /// are added to those since the last step; those of the model's inputs are returned if
    /// `input_grads` asked for them, and if the first call was one of an engine.
    ///
    /// # Errors
    /// [`Error::Config`], and nothing is computed, when the calls are no chain; as
    /// [`Forward::backward`].
    pub fn backward(self, grads: impl Into<Tree<HostTensor>>) -> Result<Option<InputGrads>> {
        let chain = self.chain()?;
        let Self { shared, calls, .. } = self;
        let mut calls: Vec<Option<Called>> = calls.into_iter().map(Some).collect();
        let mut flow = Flow::Merged(grads.into().map_ref(|tensor| Some(tensor.clone())));
        for (at, arg) in chain {
            let Some(called) = calls[at].take() else {
                continue;
            };
            let back = match called.body {
                Body::Engine(forward) => back_engine(*forward, flow, arg),
                Body::Host(call) => back_host(&shared, *call, flow, arg).map(Flow::Merged),
            };
            flow = back.map_err(|error| shared.failed(error))?;
        }
        match flow {
            Flow::Later(grads) => Ok(Some(grads)),
            Flow::Merged(_) => Ok(None),
        }
    }

    /// The calls from the last to the first, each with the place of the input that comes from the
    /// next.
    fn chain(&self) -> Result<Vec<(usize, Option<usize>)>> {
        let part = |call: usize, by: &str| {
            let what = format!(
                "{by} takes a part of what {} gave; only whole outputs have a way back, so let it give just \
                 that part",
                shown(&self.calls[call].path)
            );
            Err(Error::config("backward", what))
        };
        let mut next = match self.origin {
            Origin::Call(call) => Some(call),
            Origin::Part(call) => return part(call, "the model's output"),
            Origin::Outside => {
                return Err(Error::config(
                    "backward",
                    "the output does not come from any call",
                ));
            }
        };
        let mut chain = Vec::new();
        while let Some(at) = next {
            let called = &self.calls[at];
            let mut from = called
                .origins
                .iter()
                .enumerate()
                .filter(|(_, o)| **o != Origin::Outside);
            let (first, second) = (from.next(), from.next());
            if second.is_some() {
                let what = format!(
                    "{} takes outputs of several calls, so the calls are no chain; wrap the module around them \
                     as a whole (raise `upper_threshold`), or detach what needs no gradient",
                    shown(&called.path)
                );
                return Err(Error::config("backward", what));
            }
            chain.push((at, first.map(|(arg, _)| arg)));
            next = match first {
                Some((_, Origin::Part(call))) => return part(*call, &shown(&called.path)),
                Some((_, Origin::Call(call))) => Some(*call),
                _ => None,
            };
        }
        Ok(chain)
    }
}

/// Walks an engine's call back to the gradients of its input `arg`, or of all inputs.
fn back_engine(forward: Forward, flow: Flow, arg: Option<usize>) -> Result<Flow> {
    let grads = match flow {
        Flow::Merged(grads) => forward.backward_some(&grads)?,
        Flow::Later(grads) => match forward
            .output()
            .ok()
            .map(|output| gather(&grads, output))
            .transpose()?
        {
            Some(grads) => forward.backward_some(&grads)?,
            None => forward.backward_from(&grads)?,
        },
    };
    Ok(Flow::Later(match arg {
        Some(arg) => grads.arg(arg)?,
        None => grads,
    }))
}

fn back_host(shared: &Shared, call: HostCall, flow: Flow, arg: Option<usize>) -> Result<Grads> {
    let HostCall {
        mut cx,
        inputs,
        outputs,
        value,
    } = call;
    let grads = match flow {
        Flow::Merged(grads) => grads,
        Flow::Later(grads) => gather(&grads, &value)?,
    };
    let (outputs, grads) = (outputs.into_leaves(), grads.into_leaves());
    if outputs.len() != grads.len() {
        let what = format!("{} gradients for {} outputs", grads.len(), outputs.len());
        return Err(Error::config("backward", what));
    }
    let worker = cx.worker().clone();
    let mut seeds = Vec::new();
    for (output, grad) in outputs.into_iter().zip(grads) {
        if let Some(grad) = grad.filter(|_| output.requires_grad()) {
            let buf = grad.buf().slice(grad.byte_range())?;
            seeds.push((output, worker.alias(&buf, grad.dtype(), *grad.shape())?));
        }
    }
    let mut gradients = cx.backward_if_any(&seeds)?;
    drop(seeds);
    shared.add_grads(&gradients)?;
    cx.commit_buffers()?;
    let Some(arg) = arg else {
        return Ok(Tree::None);
    };
    let mut take = |tensor: &Option<Tensor>| tensor.as_ref().and_then(|t| gradients.take(t));
    let taken: Tree<Option<Tensor>> = inputs[arg].map_ref(&mut take);
    taken.try_map(|grad| grad.map(|grad| download(&grad)).transpose())
}

/// The gradients of a merged value from those of the microbatches that it was cut into.
fn gather(grads: &InputGrads, value: &Tree<HostTensor>) -> Result<Grads> {
    let parts = (0..grads.len())
        .map(|m| grads.wait(m))
        .collect::<Result<Vec<_>>>()?;
    let mut merged = Vec::new();
    for (i, whole) in value.leaves().into_iter().enumerate() {
        let column: Vec<HostTensor> = parts
            .iter()
            .filter_map(|part| part.get(i).cloned().flatten())
            .collect();
        let rows: usize = column.iter().filter_map(|part| part.dims().first()).sum();
        merged.push(match column.as_slice() {
            [] => None,
            [only] if only.dims() == whole.dims() => Some(only.clone()),
            _ if whole.dims().first() == Some(&rows) => Some(HostTensor::cat(&column, 0)?),
            _ => {
                let what = "a merged value was not cut along its first dimension, so its gradients cannot be \
                            put together; leave it unmerged";
                return Err(Error::config("backward", what));
            }
        });
    }
    Ok(value.with_leaves(merged)?)
}

/// Steps that were ordered.
#[derive(Debug)]
pub struct AutoStepping {
    steps: Vec<StepHandle>,
    grad_norm: Option<f64>,
}

impl AutoStepping {
    /// Waits until all are done. The norm is over all engines.
    ///
    /// # Errors
    /// What went wrong in one of them.
    pub fn wait(&self) -> Result<StepReport> {
        let reports = self
            .steps
            .iter()
            .map(StepHandle::wait)
            .collect::<Result<Vec<_>>>()?;
        let squared: f64 = reports
            .iter()
            .map(|report| report.grad_norm * report.grad_norm)
            .sum();
        Ok(StepReport {
            step: reports.iter().map(|report| report.step).max().unwrap_or(0),
            grad_norm: self.grad_norm.unwrap_or(squared.sqrt()),
            skipped: reports.iter().all(|report| report.skipped),
            partial: reports.iter().any(|report| report.partial),
        })
    }
}
