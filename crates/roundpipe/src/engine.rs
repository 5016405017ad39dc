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
//!     .optimizer(Rule::AdamW(AdamW::default()))
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
//!
//! # Where to look
//! `builder` makes an engine; `forward`, `train` and `steps` are its calls; `inputs` and `outputs`
//! are what goes in and comes out. Behind them, `submit` brings a call to its workers, `planner`
//! chooses its stages, `core` keeps the order of calls and steps, `recover` puts things back after a
//! failure, `recorder` writes traces, `save` orders checkpoints and restores them.

mod builder;
mod core;
mod forward;
mod hooks;
mod host_loss;
mod inputs;
mod mean_loss;
mod outputs;
mod parameters;
mod part;
mod planner;
mod preview;
mod recorder;
mod recover;
mod save;
mod state;
mod steps;
mod submit;
mod train;
mod tree_struct;

use std::ops::Deref;
use std::sync::Arc;

pub use self::builder::Builder;
use self::core::Core;
pub use self::forward::Forward;
pub use self::hooks::HookHandle;
pub use self::host_loss::HostLoss;
pub(crate) use self::host_loss::HostWorker;
pub use self::inputs::{Input, Inputs};
pub use self::outputs::{InputGrads, MicrobatchOutputs};
pub(crate) use self::part::PartSpec;
pub use self::save::Restored;
pub use self::state::{ParamState, TrainingState};
pub use self::steps::StepHandle;
pub(crate) use self::submit::RandomPlace;
pub use self::train::{IntoLosses, Losses, TrainCall, TrainOutput};
use crate::budget::ActivationUse;
pub use crate::config::Lag;
use crate::cost::LayerTimes;
use crate::error::{Error, Result};
pub use crate::exec::hooks::{LayerGradient, LayerOutput};
use crate::exec::ring::Ring;
use crate::layer::Sequential;
use crate::plan::{ExecutePlan, PlanKind};
use crate::status::{StatusLine, Watchdog};
use crate::store::StoreBytes;
use crate::trace::Trace;

/// A model under an engine. It gives the original model when dereferenced.
pub struct RoundPipe<M = Sequential> {
    original: Arc<M>,
    core: Arc<Core>,
    /// The part of the core that this is.
    part: usize,
    _watchdog: Option<Arc<Watchdog>>,
    _handle: Arc<Handle>,
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

impl<M> RoundPipe<M> {
    /// The engine's name.
    pub fn name(&self) -> &str {
        &self.core.parts[self.part].name
    }

    /// The workers.
    pub fn ring(&self) -> &Ring {
        &self.core.ring
    }

    /// Whether layers behave as in training (dropout drops, batch norm uses the batch); on by
    /// default.
    pub fn set_training(&self, training: bool) {
        self.core.set_training(training);
    }

    /// Steps asked for so far.
    pub fn steps(&self) -> u64 {
        self.core.steps()
    }

    /// Steps that were skipped, or left weights out, because gradients or results were not finite,
    /// as far as the engine's calls have seen; [`RoundPipe::synchronize`] sees all.
    pub fn nonfinite_steps(&self) -> u64 {
        self.core.nonfinite_steps()
    }

    /// Host memory of weights, gradients and optimizer state; of all parts of a wrapped model.
    pub fn host_bytes(&self) -> StoreBytes {
        self.core.model.store.host_bytes()
    }

    /// What the activations of the last call that trains take, as planned; `None` before the first.
    pub fn activation_use(&self) -> Option<ActivationUse> {
        self.core.notes().activations
    }

    /// For each layer that the last call recomputed, the share of its forward that this takes, as far
    /// as that is known before kernels run: less than 1 where results were kept or are not needed.
    pub fn recompute_shares(&self) -> Vec<(usize, f64)> {
        self.core.notes().recompute_shares.clone()
    }

    /// The layers whose frozen weights stay on their workers from step to step, and the bytes that
    /// need not be sent for each. Weights stay where copying them is what a step waits for.
    pub fn held_weights(&self) -> Vec<(usize, u64)> {
        self.core.notes().held_weights.clone()
    }

    /// The layers whose weights stayed on their workers from forward to backward in the last call that
    /// trains, as planned, and the bytes of each. Weights stay where memory is left, and before
    /// anything else where copying them is what a backward waits for.
    pub fn kept_weights(&self) -> Vec<(usize, u64)> {
        self.core.notes().kept_weights.clone()
    }

    /// What every thread is doing or waiting for.
    pub fn status(&self) -> Vec<StatusLine> {
        self.core.ring.board().report()
    }

    /// What happened, once it is on: every task, transfer and update.
    pub fn trace(&self) -> &Trace {
        &self.core.trace
    }

    /// The plan of the last call of a kind: `Fused` for [`RoundPipe::forward_backward`], `Train`
    /// and `Infer` for [`RoundPipe::forward`] with and without `requires_grad`. It prints itself as
    /// ranges of layers.
    pub fn last_plan(&self, kind: PlanKind) -> Option<ExecutePlan> {
        self.core.parts[self.part].planner.last_plan(kind)
    }

    /// Measured times of each layer.
    pub fn layer_times(&self) -> LayerTimes {
        self.core.parts[self.part].planner.times()
    }

    /// What the user should know and has not asked for, e.g. a batch that gave fewer microbatches;
    /// each is returned once.
    pub fn take_warnings(&self) -> Vec<String> {
        self.core.take_warnings()
    }

    /// Adds to what [`RoundPipe::take_warnings`] returns.
    pub(crate) fn warn(&self, text: String) {
        self.core.warn(text);
    }

    /// The model that the engine dereferences to, to be changed. What the engine runs stays as it
    /// is: layers were taken from the model when it was built.
    ///
    /// ```
    /// use roundpipe::nn::{Init, Linear};
    /// use roundpipe::{DType, RoundPipe, Sequential};
    ///
    /// # fn main() -> roundpipe::Result<()> {
    /// let linear = Linear::new(&mut Init::new(7, DType::F32), 4, 2, true)?;
    /// let engine = RoundPipe::builder(Sequential::new().with(linear)).build()?;
    /// let mut engine = engine.set_original_model("a model of two classes".to_owned());
    /// engine.original_mut()?.push('!');
    /// assert_eq!(engine.as_str(), "a model of two classes!");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] when the model is no sequence: the engine runs it as its one layer then.
    /// Its fields can change if they can behind a shared reference, such as a `Mutex`.
    pub fn original_mut(&mut self) -> Result<&mut M> {
        Arc::get_mut(&mut self.original).ok_or_else(|| {
            let what = "the engine runs the model itself, as one layer, so it cannot be changed; \
                        build the engine over a `Sequential`, or give it another by \
                        `set_original_model`";
            Error::config("original_mut", what)
        })
    }

    /// The same engine, dereferencing to another model: the one that this was made from. An engine
    /// has the type of that model, so it is given back with the new one; for a model of the same
    /// type [`RoundPipe::replace_original`] changes it in place.
    pub fn set_original_model<O>(self, original: O) -> RoundPipe<O> {
        let Self {
            core,
            part,
            _watchdog,
            _handle,
            ..
        } = self;
        RoundPipe {
            original: Arc::new(original),
            core,
            part,
            _watchdog,
            _handle,
        }
    }

    /// Lets the engine dereference to another model of the same type.
    pub fn replace_original(&mut self, original: M) {
        self.original = Arc::new(original);
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
        let layers = self.layers().len();
        let workers = self.core.ring.len();
        write!(
            f,
            "RoundPipe({}, {layers} layers on {workers} workers)",
            self.name()
        )
    }
}
