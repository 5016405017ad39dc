//! The engine: a model whose layers run on whichever worker is next.
//!
//! ```
//! use roundpipe::nn::{Func, Init, Linear};
//! use roundpipe::{
//!     DType, HostTensor, Lag, LossReduction, RoundPipe, Rule, RunConfig, Sequential, Update,
//! };
//! # use roundpipe::optim::AdamW;
//!
//! # fn main() -> roundpipe::Result<()> {
//! let mut init = Init::new(7, DType::F32);
//! let model = Sequential::new()
//!     .with(Linear::new(&mut init, 4, 16, true)?)
//!     .with(Func(|cx: &mut roundpipe::Cx, x: &roundpipe::Tensor| cx.relu(x)))
//!     .with(Linear::new(&mut init, 16, 3, true)?);
//! let engine = RoundPipe::builder(model)
//!     .optimizer(Rule::Adam(AdamW::default()))
//!     .run_config(RunConfig::new().loss_reduction(LossReduction::Mean)) // cross_entropy is a mean
//!     .build()?;
//! let data = HostTensor::from_slice(&[0.5f32; 24], &[6, 4])?;
//! let labels = HostTensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6])?;
//! for _ in 0..3 {
//!     let loss = engine.forward_backward(data.clone(), labels.clone(), |cx, output, label| {
//!         cx.cross_entropy(&output.tensor()?, &label.tensor()?, Default::default())
//!     })?;
//!     assert!(loss.total().is_finite());
//!     engine.update(&Update::new(1e-3), Lag::One)?;
//! }
//! engine.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises
//! - Losses, gradients and weights are the same bits for any number of workers, any plan, any
//!   grain, threaded or serial, as long as the number of microbatches is the same.
//! - A failure is returned as an error that names the task; the model and its optimizer are then as
//!   before the step, and the engine works on.
//! - It never prints and never ends the process.

pub(crate) mod core;
mod inputs;
mod mean_loss;
mod outputs;
mod planner;
mod recorder;
mod recover;

use std::ops::Deref;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use roundpipe_tensor::{
    Bytes, Cx, DType, Device, HostTensor, Param, Pin, Result as TensorResult, Tensor,
};

use self::core::{CallRequest, Core, PendingCall};
use self::inputs::host_value;
pub use self::inputs::{Input, Inputs};
pub use self::outputs::{InputGrads, MicrobatchOutputs};
use self::outputs::{Leaves, host_tensor, to_host};
use crate::batch::{MergeOutput, merge, split_grads};
pub use crate::config::Lag;
use crate::config::{OutputDevice, RunConfig};
use crate::cost::LayerTimes;
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::model::{LossFn, Model};
use crate::exec::optimizer_thread::{Outcome, Work};
use crate::exec::ring::{Ring, RingOptions};
use crate::exec::value::Seed;
use crate::layer::{Layer, Sequential};
use crate::optim::{Rule, StepReport};
use crate::plan::PlanKind;
use crate::scaler::GradScaler;
use crate::status::{Report, StatusLine, Watchdog};
use crate::store::{Store, StoreBytes, StoreConfig};
use crate::trace::Trace;
use crate::tree::Tree;
use crate::update::{OptimHandle, OptimParams, Update};

/// A model under an engine. It gives the original model when dereferenced.
pub struct RoundPipe<M = Sequential> {
    original: Arc<M>,
    core: Arc<Core>,
    _watchdog: Option<Arc<Watchdog>>,
    _handle: Handle,
}

/// The right to ask for steps. Forwards that are kept do not have it.
struct Handle(Arc<Core>);

impl Drop for Handle {
    fn drop(&mut self) {
        // Where the user keeps no forward, the engine itself is dropped now, which cancels steps
        // instead.
        if Arc::strong_count(&self.0) > 1 {
            self.0.retire();
        }
    }
}

/// What to do when an engine stalls.
type OnStall = Arc<dyn Fn(&Report) + Send + Sync>;

/// Which parameters decay.
type Decays = dyn Fn(&str, &Param) -> bool;

/// Options of an engine.
pub struct Builder<M> {
    model: M,
    name: String,
    config: RunConfig,
    grad_dtype: Option<DType>,
    pin: Pin,
    rule: Option<Rule>,
    decays: Option<Arc<Decays>>,
    max_lag: Lag,
    seed: u64,
    first_layer: usize,
    devices: Vec<Arc<dyn Device>>,
    ring: Option<Ring>,
    options: RingOptions,
    threads: Option<usize>,
    stall: Option<(Duration, OnStall)>,
    resident: bool,
    inference: bool,
    max_nonfinite_steps: u64,
}

/// [`Builder::max_nonfinite_steps`] unless said otherwise.
const MAX_NONFINITE_STEPS: u64 = 10;

impl<M: Layer + 'static> RoundPipe<M> {
    /// An engine for a [`Sequential`], whose layers are placed one by one, or for any other layer
    /// as a whole. Its name is the place of this call, unless another is given.
    #[track_caller]
    pub fn builder(model: M) -> Builder<M> {
        let at = Location::caller();
        let file = at.file().rsplit(['/', '\\']).next().unwrap_or(at.file());
        Builder {
            model,
            name: format!("{file}:{}", at.line()),
            config: RunConfig::default(),
            grad_dtype: None,
            pin: Pin::default(),
            rule: None,
            decays: None,
            max_lag: Lag::One,
            seed: 0,
            first_layer: 0,
            devices: Vec::new(),
            ring: None,
            options: RingOptions::default(),
            threads: None,
            stall: None,
            resident: false,
            inference: false,
            max_nonfinite_steps: MAX_NONFINITE_STEPS,
        }
    }
}

impl<M: Layer + 'static> Builder<M> {
    /// What logs, traces and errors call the engine.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The base of every call's run configuration.
    #[must_use]
    pub fn run_config(mut self, config: RunConfig) -> Self {
        self.config = config;
        self
    }

    /// The type of gradients in host memory: each parameter's own by default, or f32.
    #[must_use]
    pub fn grad_dtype(mut self, dtype: DType) -> Self {
        self.grad_dtype = Some(dtype);
        self
    }

    /// How host memory is pinned.
    #[must_use]
    pub fn pin(mut self, pin: Pin) -> Self {
        self.pin = pin;
        self.options.pin = pin;
        self
    }

    /// The rule of [`RoundPipe::update`]; its state lives in the engine.
    #[must_use]
    pub fn optimizer(mut self, rule: impl Into<Rule>) -> Self {
        self.rule = Some(rule.into());
        self
    }

    /// Applies weight decay only where `decays` says so; by default everywhere.
    #[must_use]
    pub fn decay_where(mut self, decays: impl Fn(&str, &Param) -> bool + 'static) -> Self {
        self.decays = Some(Arc::new(decays));
        self
    }

    /// The most that a step may lag; [`Lag::One`] by default, which takes a second version of the
    /// weights. [`Lag::Zero`] saves its memory and refuses steps at lag 1.
    #[must_use]
    pub fn max_lag(mut self, lag: Lag) -> Self {
        self.max_lag = lag;
        self
    }

    /// The start of the random stream.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Layers draw random numbers as if `layers` others stood before them: engines in a row then
    /// draw those of one engine over all layers.
    #[must_use]
    pub(crate) fn behind(mut self, layers: usize) -> Self {
        self.first_layer = layers;
        self
    }

    /// The devices to run on; one listed twice gives two workers. By default every GPU that can be
    /// used, or the processor where there is none; [`Ring::notes`] says which were left out, and
    /// why.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = Arc<dyn Device>>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// Memory that each worker reserves at start and never exceeds.
    #[must_use]
    pub fn memory(mut self, bytes: Bytes) -> Self {
        self.options.memory = Some(bytes);
        self
    }

    /// All options of the ring that is made from the devices.
    #[must_use]
    pub fn ring_options(mut self, options: RingOptions) -> Self {
        self.options = options;
        self
    }

    /// A ring that other engines use too, instead of devices of its own.
    #[must_use]
    pub fn ring(mut self, ring: &Ring) -> Self {
        self.ring = Some(ring.clone());
        self
    }

    /// Threads of the optimizer; by default one per core.
    #[must_use]
    pub fn optimizer_threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Calls `report` when nothing has moved for `after` although a thread waits, with what
    /// each of them waits for.
    #[must_use]
    pub fn on_stall(
        mut self,
        after: Duration,
        report: impl Fn(&Report) + Send + Sync + 'static,
    ) -> Self {
        self.stall = Some((after, Arc::new(report)));
        self
    }

    /// Leaves weights on the worker that they were sent to, until they change: for running a model
    /// that fits many times, as generation does.
    #[must_use]
    pub fn resident(mut self, resident: bool) -> Self {
        self.resident = resident;
        self
    }

    /// An engine that only reads the weights, wherever they are: also while another engine trains
    /// them, of which it then uses the newest. Off by default, when a parameter that a living
    /// engine trains is refused.
    #[must_use]
    pub fn inference(mut self, inference: bool) -> Self {
        self.inference = inference;
        self
    }

    /// After so many steps in a row that were not finite, a step fails with [`Error::NotFinite`],
    /// which names the first layer whose output or gradient was not; 10 by default. Until then such
    /// steps are skipped and reported ([`StepReport`]). While a [`GradScaler`] can still lower its
    /// scale, its steps do not count.
    #[must_use]
    pub fn max_nonfinite_steps(mut self, steps: u64) -> Self {
        self.max_nonfinite_steps = steps;
        self
    }

    /// Reserves memory, moves the weights and starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] for options that cannot work, and for a parameter that another living
    /// engine trains; when memory runs out.
    pub fn build(self) -> Result<RoundPipe<M>> {
        if let Some(rule) = &self.rule {
            rule.check_settings()?;
        }
        if self.max_nonfinite_steps == 0 {
            return Err(Error::config(
                "max_nonfinite_steps",
                "0; allow at least one",
            ));
        }
        let ring = match self.ring {
            Some(ring) => ring,
            None if self.devices.is_empty() => Ring::of(&Devices::all()?, &self.options)?,
            None => Ring::new(&self.devices, &self.options)?,
        };
        let original = Arc::new(self.model);
        let layers: Vec<(String, Arc<dyn Layer>)> = match original.sequence() {
            Some(sequence) => sequence
                .layers()
                .map(|(name, layer)| (name.to_owned(), layer.clone()))
                .collect(),
            None => vec![("model".to_owned(), original.clone() as Arc<dyn Layer>)],
        };
        if layers.is_empty() {
            return Err(Error::config("model", "it has no layers"));
        }
        let store = Store::new(
            &layers,
            StoreConfig {
                name: self.name.clone(),
                inference: self.inference,
                device: ring.host_device().clone(),
                pin: self.pin,
                max_lag: self.max_lag,
                rule: self.rule,
                grad_dtype: self.grad_dtype,
                threads: self.threads,
            },
        )?;
        let store = match self.decays {
            Some(decays) => store.decay_where(|name, param| decays(name, param)),
            None => store,
        };
        let (seed, first_layer) = (self.seed, self.first_layer);
        let sets_buffers = AtomicBool::new(false);
        let (resident, inference) = (self.resident, self.inference);
        let model = Model {
            name: self.name,
            layers,
            store,
            seed,
            first_layer,
            sets_buffers,
            resident,
            inference,
        };
        let watchdog = self
            .stall
            .map(|(after, report)| Arc::new(Watchdog::start(ring.board().clone(), after, report)));
        let trace = Arc::new(Trace::new());
        let core = Core::new(
            model,
            ring,
            self.config,
            self.max_lag,
            trace,
            self.max_nonfinite_steps,
        )?;
        let core = Arc::new(core);
        Ok(RoundPipe {
            original,
            core: core.clone(),
            _watchdog: watchdog,
            _handle: Handle(core),
        })
    }
}

/// What a loss function may return: one loss, or several.
pub trait IntoLosses {
    /// As a list.
    fn into_losses(self) -> Vec<Tensor>;
}

impl IntoLosses for Tensor {
    fn into_losses(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl IntoLosses for Vec<Tensor> {
    fn into_losses(self) -> Vec<Tensor> {
        self
    }
}

/// The losses of a call: for each that the loss function gave, what the microbatches add up to
/// ([`LossReduction`](crate::LossReduction)).
#[derive(Debug, Clone, PartialEq)]
pub struct Losses {
    sums: Vec<f64>,
    microbatches: Vec<Vec<f64>>,
}

impl Losses {
    /// The loss of the batch: all of [`Losses::each`] together.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Each loss over the batch: the sum over its microbatches, or the mean over its samples.
    pub fn each(&self) -> &[f64] {
        &self.sums
    }

    /// What each microbatch adds to [`Losses::each`]: its losses, or its share of the means.
    pub fn microbatches(&self) -> &[Vec<f64>] {
        &self.microbatches
    }
}

/// What a forward and backward in one call gives.
#[derive(Debug)]
pub struct TrainOutput {
    /// The losses.
    pub losses: Losses,
    /// The merged outputs, if they were asked for.
    pub outputs: Option<Tree<HostTensor>>,
    /// The gradients of the inputs, if `input_grads` asked for them.
    pub input_grads: Option<InputGrads>,
}

/// A forward and backward to be run, with all options.
pub struct TrainCall<'a, M> {
    engine: &'a RoundPipe<M>,
    inputs: Inputs,
    labels: Tree<HostTensor>,
    loss: LossFn,
    outputs: bool,
    config: RunConfig,
}

impl<M> TrainCall<'_, M> {
    /// Labels, given to the loss function microbatch by microbatch.
    #[must_use]
    pub fn labels(mut self, labels: impl Into<Tree<HostTensor>>) -> Self {
        self.labels = labels.into();
        self
    }

    /// Turns outputs and labels of a microbatch into one loss or several, which are added up over
    /// microbatches as [`RunConfig::loss_reduction`] says. Without one, the model's output is the
    /// loss.
    #[must_use]
    pub fn loss<L: IntoLosses>(
        mut self,
        loss: impl Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    ) -> Self {
        self.loss =
            Arc::new(move |cx, outputs, labels| Ok(loss(cx, outputs, labels)?.into_losses()));
        self
    }

    /// Asks for the merged outputs as well.
    #[must_use]
    pub fn return_outputs(mut self) -> Self {
        self.outputs = true;
        self
    }

    /// The run configuration of this call, over the model's.
    #[must_use]
    pub fn config(mut self, config: RunConfig) -> Self {
        self.config = config;
        self
    }

    /// Runs it. Returns when the losses are known; the backward may still be under way, and what
    /// goes wrong there is returned by the engine's next call.
    ///
    /// # Errors
    /// [`Error::Config`] for inputs and options that cannot work; [`Error::Task`] with the place of
    /// what failed.
    pub fn run(self) -> Result<TrainOutput> {
        let Self {
            engine,
            inputs,
            labels,
            loss,
            outputs,
            config,
        } = self;
        let core = &engine.core;
        let (kind, loss) = (PlanKind::Fused, Some(loss));
        let request = CallRequest {
            kind,
            inputs,
            labels,
            loss,
            wants_outputs: outputs,
            reads: true,
            config,
        };
        let PendingCall {
            call,
            config,
            input_leaves,
            ..
        } = core.submit(request)?;
        let (losses, outputs) = read(core, &call, |call| {
            let losses = wait_losses(call)?;
            let outputs =
                outputs.then(|| merge(wait_outputs(call)?, &merged(&config.merge_output)));
            Ok((losses, outputs.transpose()?))
        })?;
        let input_grads = config.input_grads.then(|| InputGrads {
            call,
            input_leaves,
            leaves: None,
        });
        Ok(TrainOutput {
            losses,
            outputs,
            input_grads,
        })
    }
}

/// Reads what a call gives, as a part of it: what goes wrong here fails the call.
fn read<R>(core: &Core, call: &Call, results: impl FnOnce(&Call) -> Result<R>) -> Result<R> {
    let results = results(call);
    if let Err(error) = &results
        && !error.is_secondary()
    {
        call.fail(Error::Cancelled {
            why: error.to_string(),
        });
    }
    call.end_part();
    results.map_err(|error| core.failed(error))
}

/// How outputs that are returned at once are merged: they always are.
fn merged(how: &MergeOutput) -> MergeOutput {
    match how {
        MergeOutput::Off => MergeOutput::Auto,
        other => other.clone(),
    }
}

fn wait_losses(call: &Call) -> Result<Losses> {
    let mut losses = Losses {
        sums: Vec::new(),
        microbatches: Vec::new(),
    };
    for m in 0..call.spec.microbatches {
        let host_values = call.wait_losses("caller", m)?;
        let values = host_values
            .iter()
            .map(|p| Ok(host_tensor(p)?.item()?))
            .collect::<Result<Vec<f64>>>();
        let values = values
            .map_err(|error| call.error_at(call.spec.forward_stages, None, Some(m), error))?;
        call.confirm()?;
        losses.sums.resize(losses.sums.len().max(values.len()), 0.0);
        for (sum, value) in losses.sums.iter_mut().zip(&values) {
            *sum += value;
        }
        losses.microbatches.push(values);
    }
    Ok(losses)
}

fn wait_outputs(call: &Call) -> Result<Vec<Tree<HostTensor>>> {
    let wait = |m: usize| {
        let value = call.wait_output("caller", m)?;
        let output = to_host(&value)?;
        call.confirm()?;
        Ok(output)
    };
    (0..call.spec.microbatches).map(wait).collect()
}

/// What a forward gave, and the way back.
pub struct Forward {
    core: Arc<Core>,
    call: Arc<Call>,
    merge: MergeOutput,
    output: Option<Tree<HostTensor>>,
    input_leaves: Vec<Leaves>,
    samples: Option<Arc<[usize]>>,
    differentiable: bool,
    on: OutputDevice,
}

impl std::fmt::Debug for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Forward({:?})", self.output)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if self.differentiable {
            self.call.let_go();
        }
    }
}

impl Forward {
    /// The merged output.
    ///
    /// # Errors
    /// [`Error::Config`] when `merge_output` is off.
    pub fn output(&self) -> Result<&Tree<HostTensor>> {
        let unmerged =
            || Error::config("merge_output", "it is off; take the outputs by `unmerged`");
        self.output.as_ref().ok_or_else(unmerged)
    }

    /// The output of each microbatch on the worker that `output_device` names, to compute on with a
    /// [`Cx`] of that worker. They carry no gradient; give theirs to [`Forward::backward`].
    ///
    /// # Errors
    /// [`Error::Config`] when `output_device` is the host; otherwise what went wrong.
    pub fn tensors(&self) -> Result<Vec<Tree<Tensor>>> {
        let OutputDevice::Worker(worker) = self.on else {
            return Err(Error::config(
                "output_device",
                "it is the host; take the outputs by `output`",
            ));
        };
        let port = self.core.ring.port(worker);
        let bring = |m: usize| {
            let value = self.call.wait_output("caller", m);
            let value = value.map_err(|error| self.core.failed(error))?;
            value.try_map(|leaf| match leaf.resident {
                Some(resident) => Ok(resident.tensor.clone()),
                None => Ok(port.receive("output", &leaf.host)?.land()?),
            })
        };
        (0..self.call.spec.microbatches).map(bring).collect()
    }

    /// The output of each microbatch, whether merged or not.
    pub fn unmerged(&self) -> MicrobatchOutputs {
        MicrobatchOutputs {
            call: self.call.clone(),
            samples: self.samples.clone(),
        }
    }

    /// Runs the backward from gradients of the merged output. Gradients of parameters are added to
    /// those since the last step; those of inputs are returned if `input_grads` asked for them.
    ///
    /// # Errors
    /// [`Error::Config`] without `requires_grad`, or when a step was made since; otherwise what
    /// goes wrong.
    pub fn backward(self, grads: impl Into<Tree<HostTensor>>) -> Result<InputGrads> {
        self.backward_some(&grads.into().map_ref(|t| Some(t.clone())))
    }

    /// As [`Forward::backward`], where some outputs have no gradient.
    pub(crate) fn backward_some(self, grads: &Tree<Option<HostTensor>>) -> Result<InputGrads> {
        let mut leaves = grads.leaves().into_iter().flatten();
        if let Some(grad) = leaves.find(|grad| !grad.dtype().is_float()) {
            let what = format!(
                "a gradient is {} {}; gradients are floats",
                grad.dtype(),
                grad.shape()
            );
            return Err(Error::config("backward", what));
        }
        let shapes = (0..self.call.spec.microbatches).map(|m| {
            let value = self.call.wait_output("caller", m)?;
            Ok(value
                .leaves()
                .iter()
                .map(|leaf| *leaf.host.shape())
                .collect())
        });
        let shapes = shapes.collect::<Result<Vec<Vec<roundpipe_tensor::Shape>>>>();
        let shapes = shapes.map_err(|error| self.core.failed(error))?;
        let parts = split_grads(grads, &shapes, &merged(&self.merge))?;
        let seeds = parts.into_iter().map(|leaves| {
            let given = leaves
                .into_iter()
                .map(|leaf| leaf.as_ref().map(host_value).transpose());
            Ok(Seed::Given(given.collect::<Result<_>>()?))
        });
        let seeds = seeds.collect::<Result<Vec<_>>>()?;
        self.run_back(seeds)
    }

    /// Runs the backward from gradients that another engine computes for its inputs, microbatch by
    /// microbatch as they come, without a host wait.
    ///
    /// # Errors
    /// As [`Forward::backward`].
    pub fn backward_from(self, grads: &InputGrads) -> Result<InputGrads> {
        if grads.len() != self.call.spec.microbatches {
            let (there, here) = (grads.len(), self.call.spec.microbatches);
            return Err(Error::config(
                "backward",
                format!("gradients of {there} microbatches for {here}"),
            ));
        }
        let of = |_| Seed::Of(grads.call.clone(), grads.leaves.clone());
        let seeds = (0..grads.len()).map(of).collect();
        self.run_back(seeds)
    }

    fn run_back(self, seeds: Vec<Seed>) -> Result<InputGrads> {
        if !self.differentiable {
            return Err(Error::config(
                "backward",
                "the forward was run with requires_grad off",
            ));
        }
        self.core.submit_backward(&self.call, seeds)?;
        Ok(InputGrads {
            call: self.call.clone(),
            input_leaves: self.input_leaves.clone(),
            leaves: None,
        })
    }
}

/// A step that was ordered.
#[derive(Debug)]
pub struct StepHandle(Arc<Outcome>);

impl StepHandle {
    /// Waits until it is done.
    ///
    /// # Errors
    /// What went wrong in it or in the calls before it; the engine's next call returns it
    /// otherwise.
    pub fn wait(&self) -> Result<StepReport> {
        self.0.wait()
    }
}

impl<M> RoundPipe<M> {
    /// Runs the model on a batch. Calls may follow at once; `merge_output` off does not even wait
    /// for the outputs.
    ///
    /// # Errors
    /// [`Error::Config`] for inputs and options that cannot work; [`Error::Task`] with the place of
    /// what failed.
    pub fn forward(&self, inputs: impl Into<Inputs>, config: &RunConfig) -> Result<Forward> {
        let core = &self.core;
        let resolved = config.over(&core.config).resolve(core.ring.len())?;
        let differentiable = resolved.requires_grad;
        let kind = if differentiable {
            PlanKind::Train
        } else {
            PlanKind::Infer
        };
        let (inputs, config) = (inputs.into(), config.clone());
        let reads = !matches!(resolved.merge_output, MergeOutput::Off);
        let request = CallRequest {
            kind,
            inputs,
            labels: Tree::None,
            loss: None,
            wants_outputs: true,
            reads,
            config,
        };
        let PendingCall {
            call,
            config,
            input_leaves,
            samples,
        } = core.submit(request)?;
        let (merge_output, on) = (config.merge_output, config.output_device);
        let mut forward = Forward {
            core: core.clone(),
            call,
            merge: merge_output,
            output: None,
            input_leaves,
            samples,
            differentiable,
            on,
        };
        if reads {
            let (call, how) = (&forward.call, &forward.merge);
            forward.output = Some(read(core, call, |call| merge(wait_outputs(call)?, how))?);
        }
        Ok(forward)
    }

    /// Forward, loss and backward in one call. `loss` is called for each microbatch; the batch's
    /// loss is the sum over microbatches, or with [`LossReduction::Mean`](crate::LossReduction) in
    /// the run configuration the mean over samples. See [`RoundPipe::train`] for all options.
    ///
    /// # Errors
    /// As [`TrainCall::run`].
    pub fn forward_backward<L: IntoLosses>(
        &self,
        inputs: impl Into<Inputs>,
        labels: impl Into<Tree<HostTensor>>,
        loss: impl Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    ) -> Result<Losses> {
        Ok(self.train(inputs).labels(labels).loss(loss).run()?.losses)
    }

    /// A forward and backward with all options.
    pub fn train(&self, inputs: impl Into<Inputs>) -> TrainCall<'_, M> {
        let loss: LossFn = Arc::new(|_, outputs, _| Ok(outputs.into_leaves()));
        TrainCall {
            engine: self,
            inputs: inputs.into(),
            labels: Tree::None,
            loss,
            outputs: false,
            config: RunConfig::default(),
        }
    }

    /// Updates all weights by the engine's rule, from the gradients since the last step. At lag 0
    /// this returns when all gradients have landed; the next call then follows the update layer by
    /// layer.
    ///
    /// A step whose gradients are not all finite is skipped: [`StepReport::skipped`] says so.
    ///
    /// # Errors
    /// [`Error::Config`] without a rule, without gradients or for options that make no sense; what
    /// went wrong in the calls before; [`Error::NotFinite`] after too many steps in a row that were
    /// not finite ([`Builder::max_nonfinite_steps`]). Nothing is updated then.
    pub fn update(&self, update: &Update, lag: Lag) -> Result<StepHandle> {
        self.check_rule()?;
        update.check()?;
        Ok(StepHandle(self.core.step(Work::Rule(*update, None), lag)?))
    }

    /// As [`RoundPipe::update`] for losses that were multiplied with [`RoundPipe::loss_scale`]:
    /// gradients are unscaled, and a step with gradients that are not finite is skipped.
    ///
    /// # Errors
    /// As [`RoundPipe::update`].
    pub fn update_scaled(
        &self,
        update: &Update,
        scaler: &GradScaler,
        lag: Lag,
    ) -> Result<StepHandle> {
        self.check_rule()?;
        update.check()?;
        let used = self.loss_scale(scaler)?;
        let skip_nonfinite = update.skip_nonfinite || scaler.is_enabled();
        let update = Update {
            grad_scale: update.grad_scale / used,
            skip_nonfinite,
            ..*update
        };
        update.check()?;
        Ok(StepHandle(self.core.step(
            Work::Rule(update, Some((scaler.clone(), used))),
            lag,
        )?))
    }

    /// Drops the gradients since the last step and makes a new version of the weights that is equal
    /// to the newest: a step in everything but its effect.
    ///
    /// # Errors
    /// [`Error::Config`] without gradients; what went wrong in the calls before.
    pub fn skip_step(&self, lag: Lag) -> Result<StepHandle> {
        Ok(StepHandle(
            self.core.step(Work::Skip { nonfinite: false }, lag)?,
        ))
    }

    /// The same because gradients of this engine, or of one that is updated together with it, are
    /// not finite.
    pub(crate) fn skip_nonfinite_step(&self, lag: Lag) -> Result<StepHandle> {
        Ok(StepHandle(
            self.core.step(Work::Skip { nonfinite: true }, lag)?,
        ))
    }

    /// What losses of the next call are to be multiplied with.
    ///
    /// # Errors
    /// When the update it depends on failed.
    pub fn loss_scale(&self, scaler: &GradScaler) -> Result<f64> {
        let version = self.core.wait_visible()?;
        let unknown =
            || format!("it knows no scale for version {version}; use one scaler per engine");
        scaler
            .scale_at(version)
            .ok_or_else(|| Error::config("scaler", unknown()))
    }

    fn check_rule(&self) -> Result<()> {
        if self.core.model.store.rule().is_some() {
            return Ok(());
        }
        Err(Error::config(
            "update",
            "the engine has no rule; give the builder an optimizer, or use `step`",
        ))
    }

    /// Updates with a function over all optimizer copies. At lag 0 this waits for it; otherwise it
    /// runs beside the next call.
    ///
    /// # Errors
    /// At lag 0 what the function returns, what went wrong in the calls before, and
    /// [`Error::Config`] when the function makes a finite value infinite or NaN; at lag 1 the
    /// engine's next call returns these. Weights and copies are as before then.
    pub fn step(
        &self,
        step_fn: impl FnOnce(&mut OptimParams<'_>) -> Result<()> + Send + 'static,
        lag: Lag,
    ) -> Result<StepHandle> {
        Ok(StepHandle(
            self.core.step(Work::Function(Box::new(step_fn)), lag)?,
        ))
    }

    /// Waits until nothing moves: the model's parameters are then the newest weights, every call
    /// that follows reads them, also after a step at lag 1, and [`RoundPipe::gradients`] are all
    /// there.
    ///
    /// # Errors
    /// What went wrong since the last call of the engine.
    pub fn synchronize(&self) -> Result<()> {
        self.core.synchronize()
    }

    /// The optimizer's copies of all trainable parameters, each once.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_parameters(&self) -> Result<impl Iterator<Item = OptimHandle>> {
        Ok(self.core.model.store.optim_params()?.into_iter())
    }

    /// The same with names, `prefix` in front. Shared parameters are listed once, or under each of
    /// their names.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_named_parameters(
        &self,
        prefix: &str,
        remove_duplicate: bool,
    ) -> Result<impl Iterator<Item = (String, OptimHandle)>> {
        let dot = if prefix.is_empty() { "" } else { "." };
        let store = &self.core.model.store;
        let copies = store.optim_params()?;
        let mut all = Vec::new();
        for layer in store.layers() {
            for param in layer.params().iter().filter(|p| p.trainable) {
                let home = &store.layer(param.home.0).params()[param.home.1].name;
                let first = *home == param.name;
                let copy = copies.iter().find(|copy| copy.name == *home);
                if let Some(copy) = copy.filter(|_| first || !remove_duplicate) {
                    all.push((format!("{prefix}{dot}{}", param.name), copy.clone()));
                }
            }
        }
        Ok(all.into_iter())
    }

    /// The gradients since the last step, by name; `None` where there is none. Call
    /// [`RoundPipe::synchronize`] first.
    ///
    /// # Errors
    /// While a gradient is being written.
    pub fn gradients(&self) -> Result<Vec<(String, Option<HostTensor>)>> {
        let mut all = Vec::new();
        for layer in self.core.model.store.layers() {
            for (i, param) in layer
                .params()
                .iter()
                .enumerate()
                .filter(|(_, p)| p.trainable)
            {
                let grad = match (layer.filled(i), layer.grad_range(i)?) {
                    (true, Some(range)) => {
                        let copy = HostTensor::zeros(param.grad_dtype, &param.shape)?;
                        copy.write()?
                            .bytes()
                            .copy_from_slice(range.read_all()?.bytes());
                        Some(copy)
                    }
                    _ => None,
                };
                all.push((param.name.clone(), grad));
            }
        }
        Ok(all)
    }

    /// Whether a backward was asked for since the last step.
    pub(crate) fn has_gradients(&self) -> bool {
        self.core.has_gradients()
    }

    /// The squares of all gradients, by layer and parameter; for a norm over several engines.
    pub(crate) fn squares(&self) -> Result<Vec<Vec<f64>>> {
        self.core.model.store.all_squares()
    }

    /// Whether layers behave as in training (dropout drops, batch norm uses the batch); on by
    /// default.
    pub fn set_training(&self, training: bool) {
        self.core.set_training(training);
    }

    /// Steps that were skipped, or left weights out, because gradients or results were not finite,
    /// as far as the engine's calls have seen; [`RoundPipe::synchronize`] sees all.
    pub fn nonfinite_steps(&self) -> u64 {
        self.core.nonfinite_steps()
    }

    /// Steps asked for so far.
    pub fn steps(&self) -> u64 {
        self.core.steps()
    }

    /// The engine's name.
    pub fn name(&self) -> &str {
        &self.core.model.name
    }

    /// The workers.
    pub fn ring(&self) -> &Ring {
        &self.core.ring
    }

    /// Host memory of weights, gradients and optimizer state.
    pub fn host_bytes(&self) -> StoreBytes {
        self.core.model.store.host_bytes()
    }

    /// What every thread is doing or waiting for.
    pub fn status(&self) -> Vec<StatusLine> {
        self.core.ring.board().report()
    }

    /// What happened, once it is on: every task, transfer and update.
    pub fn trace(&self) -> &Trace {
        &self.core.trace
    }

    /// Measured times of each layer.
    pub fn layer_times(&self) -> LayerTimes {
        self.core.layer_times()
    }

    /// What the user should know and has not asked for, e.g. a batch that gave fewer microbatches;
    /// each is returned once.
    pub fn take_warnings(&self) -> Vec<String> {
        self.core.take_warnings()
    }

    /// The same engine, dereferencing to another model: the one that this was made from.
    pub fn set_original_model<O>(self, original: O) -> RoundPipe<O> {
        let Self {
            core,
            _watchdog,
            _handle,
            ..
        } = self;
        RoundPipe {
            original: Arc::new(original),
            core,
            _watchdog,
            _handle,
        }
    }
}

impl<M> Deref for RoundPipe<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.original
    }
}

impl<M> std::fmt::Debug for RoundPipe<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (layers, workers) = (self.core.model.layers.len(), self.core.ring.len());
        write!(
            f,
            "RoundPipe({}, {layers} layers on {workers} workers)",
            self.core.model.name
        )
    }
}
