//! A model of which parts are engines: its forward runs on the host and passes values from engine
//! to engine.
//!
//! The engines are parts of one (`engine/part.rs`), so everything about steps and state is that of
//! one engine over all of them: one norm of all gradients, one decision to skip, all weights
//! updated or none, and a parameter that several engines use counted once. The forward
//! (`record.rs`) notes its calls; the way back (`back.rs`) follows any graph of them.
//!
//! It refuses `forward_backward`: a loss needs to run behind the last layer, and there is no last
//! layer.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{Cx, Gradients, HostTensor, Param, Result as TensorResult, Tensor};

use super::back::AutoForward;
use super::record::{Asked, Recorder, download};
use super::{Decision, Node, Parts, Place, WrapConfig};
use crate::checkpoint::{Checkpoint, Saving};
use crate::config::RunConfig;
use crate::engine::{
    HostWorker, Inputs, IntoLosses, Lag, Losses, Restored, RoundPipe, StepHandle, TrainingState,
};
use crate::error::{Error, Result};
use crate::exec::ring::Ring;
use crate::groups::ParamGroup;
use crate::layer::{Params, Sequential};
use crate::scaler::GradScaler;
use crate::sync::lock;
use crate::tree::Tree;
use crate::update::{OptimHandle, OptimParams, Update};

/// Engines for parts of a model, on one ring, and the model's own forward over them. It gives the
/// model that it was made from when dereferenced.
pub struct AutoWrapped {
    original: Node,
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    model: Node,
    place: Place,
    /// The engine whose parts `engines` are; `None` where all of the model runs on the host.
    whole: Option<RoundPipe<Sequential>>,
    pub engines: Vec<(String, RoundPipe<Node>)>,
    decisions: Vec<Decision>,
    ring: Ring,
    pub seed: u64,
    /// The base of the settings of a call.
    run_config: RunConfig,
    /// What no engine has, by name.
    unwrapped: Vec<(String, Param)>,
    grads: Mutex<HashMap<String, HostTensor>>,
    /// What runs unwrapped modules; made when the first does.
    pub host: HostWorker,
    training: AtomicBool,
    /// Training forwards so far, where no engine counts them: the place in the random stream.
    number: AtomicU64,
}

impl AutoWrapped {
    pub(super) fn new(model: Node, parts: Parts, ring: Ring, config: &WrapConfig) -> Self {
        let Parts {
            place,
            whole,
            modules,
            decisions,
        } = parts;
        let mut engines = Vec::new();
        if let Some(whole) = &whole {
            for (part, (path, module)) in modules.into_iter().enumerate() {
                engines.push((path, whole.part(part, module)));
            }
        }
        let wrapped: HashSet<_> = engines
            .iter()
            .flat_map(|(_, engine)| engine.named_params())
            .map(|(_, p)| p.id())
            .collect();
        let mut unwrapped = model.named_params();
        unwrapped.retain(|(_, param)| !wrapped.contains(&param.id()));
        let shared = Shared {
            model: model.clone(),
            place,
            whole,
            engines,
            decisions,
            ring,
            seed: config.seed,
            run_config: config.run_config.clone(),
            unwrapped,
            grads: Mutex::default(),
            host: HostWorker::default(),
            training: AtomicBool::new(true),
            number: AtomicU64::new(0),
        };
        Self {
            original: model,
            shared: Arc::new(shared),
        }
    }

    /// Runs the model's forward over its engines. What `config` sets wins, for every engine, over
    /// the engine's own settings: `requires_grad`, `recompute_grain` and `num_microbatch`.
    /// `input_grads` asks for gradients of the model's inputs.
    ///
    /// # Errors
    /// [`Error::Config`] for other settings, which belong to single engines: see
    /// [`AutoWrapped::forward_with`]; what goes wrong in an engine.
    pub fn forward(&self, inputs: impl Into<Inputs>, config: &RunConfig) -> Result<AutoForward> {
        self.forward_with(inputs, config, &BTreeMap::new())
    }

    /// As [`AutoWrapped::forward`], with settings of single engines for this call, by their paths.
    /// They win over `config`, that over
    /// [`WrapConfig::override_config`](super::WrapConfig::override_config), that over what the rules
    /// chose, and that over [`WrapConfig::run_config`](super::WrapConfig::run_config). Whether an
    /// engine computes gradients of its inputs follows from where they come from; a setting of its
    /// own does not count.
    ///
    /// # Errors
    /// As [`AutoWrapped::forward`]; [`Error::Config`] for a path that is no engine's.
    pub fn forward_with(
        &self,
        inputs: impl Into<Inputs>,
        config: &RunConfig,
        engines: &BTreeMap<String, RunConfig>,
    ) -> Result<AutoForward> {
        refuse_settings(config)?;
        let shared = &self.shared;
        let is_engine = |path: &String| shared.engines.iter().any(|(known, _)| known == path);
        if let Some(path) = engines.keys().find(|path| !is_engine(path)) {
            let names: Vec<String> = self
                .engines()
                .map(|(path, _)| format!("`{path}`"))
                .collect();
            let what = format!("`{path}` is no engine; there are {}", names.join(", "));
            return Err(Error::config("forward_with", what));
        }
        let base = config.over(&shared.run_config);
        let training = shared.training.load(Ordering::Relaxed);
        let number = match &shared.whole {
            Some(whole) => whole.next_number(),
            None => shared
                .number
                .fetch_add(u64::from(training), Ordering::Relaxed),
        };
        let asked = Asked {
            config: config.clone(),
            engines: engines.clone(),
            requires_grad: base.requires_grad.unwrap_or(true),
            input_grads: base.input_grads.unwrap_or(false),
            training,
            number,
        };
        let mut recorder = Recorder::new(shared, asked);
        let inputs = recorder.take_inputs(inputs.into())?;
        let run = recorder.call(&shared.place, "", inputs);
        match run.and_then(|value| Ok((value.to_host()?, value))) {
            Ok((output, value)) => Ok(AutoForward {
                shared: shared.clone(),
                number,
                calls: recorder.calls,
                output,
                value,
            }),
            Err(error) => {
                drop(recorder);
                let error = shared.failed(error);
                shared.return_number(number);
                Err(error)
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
            self.shared.engines.len()
        );
        Err(Error::config("forward_backward", what))
    }

    /// Updates the weights of all engines, or of none, from the gradients since the last step: as
    /// [`RoundPipe::update`] of one engine over all layers. Norm, clipping and the decision to skip
    /// are over all engines. Parameters that are in no engine are left alone: see
    /// [`AutoWrapped::take_unwrapped_gradients`].
    ///
    /// # Errors
    /// As [`RoundPipe::update`].
    pub fn update(&self, update: &Update, lag: Lag) -> Result<StepHandle> {
        self.whole("update")?.update(update, lag)
    }

    /// As [`AutoWrapped::update`] for output gradients that were multiplied with
    /// [`AutoWrapped::loss_scale`]: gradients are unscaled, and a step with gradients that are not
    /// finite, in any engine, is skipped by all. Gradients of parameters in no engine stay scaled.
    ///
    /// # Errors
    /// As [`RoundPipe::update_scaled`].
    pub fn update_scaled(
        &self,
        update: &Update,
        scaler: &GradScaler,
        lag: Lag,
    ) -> Result<StepHandle> {
        self.whole("update_scaled")?
            .update_scaled(update, scaler, lag)
    }

    /// What the loss of the next forward, and so the gradients of its output, are to be multiplied
    /// with.
    ///
    /// # Errors
    /// When the update it depends on failed.
    pub fn loss_scale(&self, scaler: &GradScaler) -> Result<f64> {
        self.whole("loss_scale")?.loss_scale(scaler)
    }

    /// Drops the gradients since the last step, as [`RoundPipe::skip_step`].
    ///
    /// # Errors
    /// As [`RoundPipe::skip_step`].
    pub fn skip_step(&self, lag: Lag) -> Result<StepHandle> {
        self.whole("skip_step")?.skip_step(lag)
    }

    /// Drops the gradients since the last step, if there are any, as [`RoundPipe::zero_grad`].
    ///
    /// # Errors
    /// As [`RoundPipe::zero_grad`].
    pub fn zero_grad(&self) -> Result<()> {
        self.whole("zero_grad")?.zero_grad()
    }

    /// Updates with a function over the optimizer copies of all engines, by their names in the tree.
    ///
    /// # Errors
    /// As [`RoundPipe::step`].
    pub fn step(
        &self,
        step_fn: impl FnOnce(&mut OptimParams<'_>) -> Result<()> + Send + 'static,
        lag: Lag,
    ) -> Result<StepHandle> {
        self.whole("step")?.step(step_fn, lag)
    }

    /// Replaces the groups of [`WrapConfig::groups`](super::WrapConfig::groups) for the updates that
    /// are asked for from now on.
    ///
    /// # Errors
    /// As [`RoundPipe::set_groups`]; the groups are as before then.
    pub fn set_groups(&self, groups: impl IntoIterator<Item = ParamGroup>) -> Result<()> {
        self.whole("set_groups")?.set_groups(groups)
    }

    /// A copy of what training has changed in all engines, by names in the tree; a parameter that
    /// several engines use is in it once, under the first of its names.
    ///
    /// # Errors
    /// As [`RoundPipe::training_state`].
    pub fn training_state(&self) -> Result<TrainingState> {
        self.whole("training_state")?.training_state()
    }

    /// Goes on from a state, as [`RoundPipe::load_training_state`].
    ///
    /// # Errors
    /// As [`RoundPipe::load_training_state`].
    pub fn load_training_state(&self, state: &TrainingState) -> Result<()> {
        let whole = self.whole("load_training_state")?;
        whole.load_training_state(state)
    }

    /// Orders a checkpoint of all engines, as [`RoundPipe::save`].
    ///
    /// # Errors
    /// As [`RoundPipe::save`].
    pub fn save(&self, path: impl AsRef<Path>, notes: impl Into<String>) -> Result<Saving> {
        self.whole("save")?.save(path, notes)
    }

    /// Goes on from a checkpoint, as [`RoundPipe::restore`].
    ///
    /// # Errors
    /// As [`RoundPipe::restore`].
    pub fn restore(&self, path: impl AsRef<Path>) -> Result<Restored> {
        self.whole("restore")?.restore(path)
    }

    /// The same with a checkpoint that is open already, as [`RoundPipe::restore_from`].
    ///
    /// # Errors
    /// As [`RoundPipe::restore`].
    pub fn restore_from(&self, checkpoint: &Checkpoint) -> Result<Restored> {
        self.whole("restore")?.restore_from(checkpoint)
    }

    /// Writes parameters and buffers of engines by their names in the tree, as
    /// [`RoundPipe::load_params`].
    ///
    /// # Errors
    /// As [`RoundPipe::load_params`].
    pub fn load_params<N: AsRef<str>>(
        &self,
        values: impl IntoIterator<Item = (N, HostTensor)>,
    ) -> Result<()> {
        self.whole("load_params")?.load_params(values)
    }

    /// Steps asked for so far.
    pub fn steps(&self) -> u64 {
        self.shared.whole.as_ref().map_or(0, RoundPipe::steps)
    }

    fn whole(&self, what: &'static str) -> Result<&RoundPipe<Sequential>> {
        self.shared.whole.as_ref().ok_or_else(|| {
            let why =
                "every module runs on the host, so no engine has parameters; skip fewer of them";
            Error::config(what, why)
        })
    }

    /// Waits until nothing moves in any engine.
    ///
    /// # Errors
    /// What went wrong since the last call.
    pub fn synchronize(&self) -> Result<()> {
        match &self.shared.whole {
            Some(whole) => whole.synchronize(),
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
        if let Some(whole) = &self.shared.whole {
            all.extend(whole.optim_named_parameters(prefix, remove_duplicate)?);
        }
        Ok(all.into_iter())
    }

    /// The gradients since the last step by their names in the tree, of parameters in engines; one
    /// for each use of a shared parameter. Call [`AutoWrapped::synchronize`] first.
    ///
    /// # Errors
    /// While a gradient is being written.
    pub fn gradients(&self) -> Result<Vec<(String, Option<HostTensor>)>> {
        match &self.shared.whole {
            Some(whole) => whole.gradients(),
            None => Ok(Vec::new()),
        }
    }

    /// Parameters and buffers that are in no engine; their update is the caller's.
    pub fn unwrapped_params(&self) -> &[(String, Param)] {
        &self.shared.unwrapped
    }

    /// The gradients of parameters in no engine, summed over backwards since they were last taken,
    /// by name.
    pub fn take_unwrapped_gradients(&self) -> Vec<(String, HostTensor)> {
        let mut grads: Vec<_> = std::mem::take(&mut *lock(&self.shared.grads))
            .into_iter()
            .collect();
        grads.sort_by(|a, b| a.0.cmp(&b.0));
        grads
    }

    /// Whether layers behave as in training; on by default.
    pub fn set_training(&self, training: bool) {
        self.shared.training.store(training, Ordering::Relaxed);
        if let Some(whole) = &self.shared.whole {
            whole.set_training(training);
        }
    }

    /// The engines with their paths, in the order of the tree. Each can be called by itself; steps
    /// and state are those of all together, and are had here.
    pub fn engines(&self) -> impl Iterator<Item = (&str, &RoundPipe<Node>)> {
        self.shared
            .engines
            .iter()
            .map(|(path, engine)| (path.as_str(), engine))
    }

    /// What was decided on each module.
    pub fn decisions(&self) -> &[Decision] {
        &self.shared.decisions
    }

    /// The model that this was made from.
    pub fn original(&self) -> &Node {
        &self.original
    }

    /// The same, to be changed. What the engines run stays as it is: modules are shared, and were
    /// taken from the model when it was wrapped.
    pub fn original_mut(&mut self) -> &mut Node {
        &mut self.original
    }

    /// Lets this dereference to another model, such as the one that the wrapped tree was made from.
    pub fn set_original_model(&mut self, original: impl Into<Node>) {
        self.original = original.into();
    }

    /// The workers.
    pub fn ring(&self) -> &Ring {
        &self.shared.ring
    }

    /// What the user should know and has not asked for, of all engines; each is returned once.
    pub fn take_warnings(&self) -> Vec<String> {
        let whole = self.shared.whole.as_ref();
        whole.map(RoundPipe::take_warnings).unwrap_or_default()
    }
}

impl Deref for AutoWrapped {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.original
    }
}

impl std::fmt::Debug for AutoWrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (engines, workers) = (self.shared.engines.len(), self.shared.ring.len());
        write!(f, "AutoWrapped({engines} engines on {workers} workers)")
    }
}

/// What belongs to single engines.
fn refuse_settings(config: &RunConfig) -> Result<()> {
    let set = [
        ("output_device", config.output_device.is_some()),
        ("split_input", config.split_input.is_some()),
        ("split_label", config.split_label.is_some()),
        ("merge_output", config.merge_output.is_some()),
        ("loss_reduction", config.loss_reduction.is_some()),
        ("execute_plan", config.execute_plan.is_some()),
        ("hidden", config.hidden_layers.is_some()),
    ];
    match set.into_iter().find(|(_, set)| *set) {
        Some((name, _)) => {
            let what = "it belongs to single engines; use `forward_with`, or `run_config` or `override_config` of \
                        `WrapConfig`";
            Err(Error::config(name, what))
        }
        None => Ok(()),
    }
}

impl Shared {
    /// Puts all engines in order after a failure and finds its cause.
    pub fn failed(&self, error: Error) -> Error {
        match self.whole.as_ref().map(RoundPipe::synchronize) {
            Some(Err(cause)) if is_consequence(&error) => cause,
            _ => error,
        }
    }

    /// Gives the place of a forward that failed in the random stream back.
    pub fn return_number(&self, number: u64) {
        if self.training.load(Ordering::Relaxed)
            && let Some(whole) = &self.whole
        {
            whole.return_number(number);
        }
    }

    /// Forgets all gradients since the last step.
    pub fn drop_gradients(&self) {
        if let Some(whole) = &self.whole {
            whole.drop_gradients();
        }
        lock(&self.grads).clear();
    }

    /// The sum of two values, in their type.
    pub fn add(&self, a: &HostTensor, b: &HostTensor) -> Result<HostTensor> {
        let worker = self.host.get()?;
        let here = |tensor: &HostTensor| -> Result<Tensor> {
            let buf = tensor.buf().slice(tensor.byte_range())?;
            Ok(worker.alias(&buf, tensor.dtype(), *tensor.shape())?)
        };
        let mut cx = Cx::new(&worker, false, false);
        download(&cx.add(&here(a)?, &here(b)?)?)
    }

    fn unwrapped_name(&self, param: &Param) -> Option<&String> {
        let known = self.unwrapped.iter().find(|(_, p)| p.id() == param.id());
        known.map(|(name, _)| name)
    }

    /// Refuses gradients of parameters that are in an engine or that the model does not list.
    pub fn check_grads(&self, gradients: &Gradients) -> Result<()> {
        let mut params = gradients.params().map(|(param, _)| param);
        let Some(param) = params.find(|param| self.unwrapped_name(param).is_none()) else {
            return Ok(());
        };
        let all = self.model.named_params();
        let known = all.iter().find(|(_, p)| p.id() == param.id());
        let what = match known {
            Some((name, _)) => format!("`{name}` is in an engine, but was used outside it"),
            None => "a parameter was used that the model does not list".to_owned(),
        };
        Err(Error::config("backward", what))
    }

    /// Adds gradients of parameters that are in no engine.
    pub fn add_grads(&self, gradients: &Gradients) -> Result<()> {
        let mut sums = lock(&self.grads);
        for (param, grad) in gradients.params() {
            let Some(name) = self.unwrapped_name(param) else {
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
