//! How an engine is made: its options, and [`Builder::build`], which checks them.
//!
//! A builder only collects. What cannot work is refused by `build`, before memory is reserved where
//! that can be known.
//!
//! # Invariants
//! - Parameters keep their values when `build` fails.
//! - An engine that was built has at least one layer and one worker.

use std::collections::HashSet;
use std::panic::Location;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roundpipe_tensor::{Bytes, DType, Device, Pin};

use super::core::Core;
use super::hooks::{find_layer, register};
use super::part::PartSpec;
use super::{Handle, RoundPipe};
use crate::config::{Lag, RunConfig};
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::exec::early_rows::EarlyRows;
use crate::exec::hooks::{Hook, LayerGradient, LayerOutput};
use crate::exec::model::Model;
use crate::exec::optimizer_thread::OptimizerOptions;
use crate::exec::repeats::Repeats;
use crate::exec::ring::{Ring, RingOptions};
use crate::exec::row_gradients::LandedRows;
use crate::groups::{self, ParamGroup};
use crate::layer::Layer;
use crate::optim::{MomentType, Rule, check_moments, check_optim_dtype};
use crate::status::{Report, Watchdog};
use crate::store::{Store, StoreConfig};
use crate::trace::Trace;

/// What to do when an engine stalls.
type OnStall = Arc<dyn Fn(&Report) + Send + Sync>;

/// Options of an engine.
pub struct Builder<M> {
    model: M,
    name: String,
    config: RunConfig,
    grad_dtype: Option<DType>,
    optim_dtype: DType,
    moments: MomentType,
    pin: Pin,
    rule: Option<Rule>,
    groups: Vec<ParamGroup>,
    max_lag: Lag,
    seed: u64,
    parts: Vec<PartSpec>,
    devices: Vec<Arc<dyn Device>>,
    ring: Option<Ring>,
    options: RingOptions,
    threads: Option<usize>,
    stall: Option<(Duration, OnStall)>,
    resident: bool,
    inference: bool,
    fp8: bool,
    max_nonfinite_steps: u64,
    weights_first: Option<bool>,
    hooks: Vec<(&'static str, String, Hook)>,
}

/// [`Builder::max_nonfinite_steps`] unless said otherwise.
const MAX_NONFINITE_STEPS: u64 = 10;

impl<M: Layer + 'static> RoundPipe<M> {
    /// An engine for a [`Sequential`](crate::Sequential), whose layers are placed one by one, or for
    /// any other layer as a whole. Its name is the place of this call, unless another is given.
    #[track_caller]
    pub fn builder(model: M) -> Builder<M> {
        let at = Location::caller();
        let file = at.file().rsplit(['/', '\\']).next().unwrap_or(at.file());
        Builder {
            model,
            name: format!("{file}:{}", at.line()),
            config: RunConfig::default(),
            grad_dtype: None,
            optim_dtype: DType::F32,
            moments: MomentType::F32,
            pin: Pin::default(),
            rule: None,
            groups: Vec::new(),
            max_lag: Lag::One,
            seed: 0,
            parts: Vec::new(),
            devices: Vec::new(),
            ring: None,
            options: RingOptions::default(),
            threads: None,
            stall: None,
            resident: false,
            inference: false,
            fp8: false,
            max_nonfinite_steps: MAX_NONFINITE_STEPS,
            weights_first: None,
            hooks: Vec::new(),
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

    /// The type of the optimizer's masters and moments; f32 by default.
    ///
    /// With [`DType::BF16`], bf16 parameters are their own masters and have bf16 moments, as with a
    /// PyTorch optimizer over bf16 parameters: AdamW then takes 8 bytes per parameter with its
    /// weight and gradient, instead of 14. Each element is computed in f32 and rounded to nearest
    /// even. Parameters of other types keep f32 state.
    ///
    /// RoundPipe's own default is each parameter's type. Ours is f32, because bf16 has 8 bits: an
    /// update below 2^-9 of a weight is rounded away, and late in a run most are.
    #[must_use]
    pub fn optim_dtype(mut self, dtype: DType) -> Self {
        self.optim_dtype = dtype;
        self
    }

    /// In what the optimizer's moments are kept; f32 by default. AdamW then takes 14 bytes of host
    /// memory per bf16 parameter with its weight, gradient and master (16 at lag 1), with
    /// [`MomentType::Bf16`] 10 (12) and with [`MomentType::Bits8`] 8 (10).
    ///
    /// [`MomentType::Bf16`] rounds at random, with bits of the engine's seed, the step, the parameter
    /// and the element: any number of workers and a resumed run give the same ones.
    /// [`MomentType::Bits8`] is the quantisation by blocks of bitsandbytes; as there, parameters with
    /// fewer than 4,096 elements keep f32 moments, and so do embeddings ([`Param::is_embedding`]).
    /// Adafactor's, which are small, are f32 in any case. [`ParamGroup::moments`] decides for some
    /// parameters.
    ///
    /// [`Param::is_embedding`]: crate::Param::is_embedding
    #[must_use]
    pub fn moments(mut self, moments: MomentType) -> Self {
        self.moments = moments;
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

    /// Parameters with settings of their own; the first group that matches one decides.
    /// [`RoundPipe::set_groups`] changes them in a run.
    #[must_use]
    pub fn groups(mut self, groups: impl IntoIterator<Item = ParamGroup>) -> Self {
        self.groups = groups.into_iter().collect();
        self
    }

    /// The most that a step may lag; [`Lag::One`] by default, which takes a second version of the
    /// weights. [`Lag::Zero`] saves its memory and refuses steps at lag 1.
    #[must_use]
    pub fn max_lag(mut self, lag: Lag) -> Self {
        self.max_lag = lag;
        self
    }

    /// Whether updates at lag 0 write weights first and the moments of Adam and AdamW behind them,
    /// beside the next backward. The next forward then waits for two thirds of the memory that an
    /// update moves, and the host moves a third more. By default so where steps leave time for it, and
    /// never on a processor. No bit of a result depends on it.
    #[must_use]
    pub fn weights_first(mut self, weights_first: bool) -> Self {
        self.weights_first = Some(weights_first);
        self
    }

    /// The start of the random stream.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Layers that are called by themselves, beside the whole model.
    #[must_use]
    pub(crate) fn parts(mut self, parts: Vec<PartSpec>) -> Self {
        self.parts = parts;
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

    /// Threads of the optimizer. By default one per core, less one in eight where devices have
    /// memory of their own: the caller and the copies to them need cores, too.
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

    /// Computes the projections of the model in 8-bit floats, in training: forward products in
    /// E4M3, gradients of inputs in E5M2 by E4M3, a power-of-two scale for every row
    /// ([`fp8`](roundpipe_tensor::fp8)). Gradients of weights, everything that is not a projection,
    /// and calls outside training ([`RoundPipe::set_training`]) stay in the working type. Which
    /// linear maps take part is the layers' business: those that they compute by
    /// [`Cx::projection`](roundpipe_tensor::Cx::projection). Off by default, since it changes
    /// results; plans, grains and workers still do not.
    #[must_use]
    pub fn fp8(mut self, fp8: bool) -> Self {
        self.fp8 = fp8;
        self
    }

    /// After so many steps in a row that were not finite, a step fails with [`Error::NotFinite`],
    /// which names the first layer whose output or gradient was not; 10 by default. Until then such
    /// steps are skipped and reported ([`StepReport`](crate::StepReport)). While a
    /// [`GradScaler`](crate::GradScaler) can still lower its scale, its steps do not count.
    #[must_use]
    pub fn max_nonfinite_steps(mut self, steps: u64) -> Self {
        self.max_nonfinite_steps = steps;
        self
    }

    /// Shows a layer's output to a hook: [`RoundPipe::on_output`] from the first call on.
    #[must_use]
    pub fn on_output(
        mut self,
        layer: impl Into<String>,
        hook: impl Fn(&LayerOutput<'_>) + Send + Sync + 'static,
    ) -> Self {
        let hook = Hook::Output(Arc::new(hook));
        self.hooks.push(("on_output", layer.into(), hook));
        self
    }

    /// Shows the gradients of a layer's output to a hook: [`RoundPipe::on_gradient`] from the first
    /// call on.
    #[must_use]
    pub fn on_gradient(
        mut self,
        layer: impl Into<String>,
        hook: impl Fn(&LayerGradient<'_>) + Send + Sync + 'static,
    ) -> Self {
        let hook = Hook::Gradient(Arc::new(hook));
        self.hooks.push(("on_gradient", layer.into(), hook));
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
        groups::check_settings(&self.groups, self.rule)?;
        check_optim_dtype(self.optim_dtype)?;
        check_moments(self.moments, self.optim_dtype)?;
        if self.max_nonfinite_steps == 0 {
            return Err(Error::config(
                "max_nonfinite_steps",
                "0; allow at least one",
            ));
        }
        // Cheap refusals come first: making a ring reserves device memory.
        let ring = match self.ring {
            Some(ring) => ring,
            None if self.devices.is_empty() => Ring::of(&Devices::all()?, &self.options)?,
            None => Ring::new(&self.devices, &self.options)?,
        };
        if self.fp8 {
            check_fp8(&ring)?;
        }
        let original = Arc::new(self.model);
        let layers: Vec<(String, Arc<dyn Layer>)> = match original.sequence() {
            Some(sequence) => sequence
                .layers()
                .map(|(name, layer)| (name.to_owned(), layer.clone()))
                .collect(),
            // Not a sequence: one layer, which is never cut.
            None => vec![("model".to_owned(), original.clone() as Arc<dyn Layer>)],
        };
        if layers.is_empty() {
            return Err(Error::config(
                "model",
                "it has no layers; add them by `Sequential::with` or `named`",
            ));
        }
        let mut names = HashSet::new();
        if let Some((name, _)) = layers.iter().find(|(name, _)| !names.insert(name)) {
            let what = format!(
                "two layers are called `{name}`, so their parameters would have the same names; \
                 name one of them differently"
            );
            return Err(Error::config("model", what));
        }
        for (option, layer, _) in &self.hooks {
            find_layer(&layers, option, layer)?;
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
                optim_dtype: self.optim_dtype,
                moments: self.moments,
                seed: self.seed,
                threads: self.threads.or_else(|| spared_cores(&ring)),
            },
        )?;
        store.set_groups(&self.groups)?;
        let seed = self.seed;
        let mut parts = self.parts;
        // The last of them, which this handle stands for.
        let part = parts.len();
        parts.push(PartSpec {
            name: self.name.clone(),
            layers: 0..layers.len(),
            config: self.config,
        });
        let sets_buffers = AtomicBool::new(false);
        let (resident, inference, fp8) = (self.resident, self.inference, self.fp8);
        let model = Model {
            name: self.name,
            layers,
            store,
            seed,
            sets_buffers,
            set_buffers: Mutex::default(),
            resident,
            inference,
            repeats: Repeats::default(),
            early_rows: EarlyRows::default(),
            landed_rows: LandedRows::default(),
            fp8,
            hooks: Mutex::default(),
        };
        let watchdog = self
            .stall
            .map(|(after, report)| Arc::new(Watchdog::start(ring.board().clone(), after, report)));
        let trace = Arc::new(Trace::new());
        let mut workers = ring.workers().iter();
        let optimizer = OptimizerOptions {
            most_nonfinite: self.max_nonfinite_steps,
            weights_first: self.weights_first,
            shares_cores: workers.any(|worker| worker.device().aliases_host()),
        };
        let core = Core::new(model, ring, parts, self.max_lag, trace, optimizer)?;
        for (option, layer, hook) in self.hooks {
            register(&core.model, option, &layer, hook)?;
        }
        let core = Arc::new(core);
        Ok(RoundPipe {
            original,
            core: core.clone(),
            part,
            _watchdog: watchdog,
            _handle: Arc::new(Handle(core)),
        })
    }
}

/// Refuses a ring with a device whose fp8 products would be slower than bf16's.
fn check_fp8(ring: &Ring) -> Result<()> {
    let mut reasons = ring.workers().iter().map(|worker| worker.device());
    let Some(why) = reasons.find_map(|device| device.lacks_fp8()) else {
        return Ok(());
    };
    let what = format!("{why}; leave fp8 off, or run on other devices");
    Err(Error::config("fp8", what))
}

/// The cores that updates take beside devices with memory of their own; `None` for all.
fn spared_cores(ring: &Ring) -> Option<usize> {
    let cores = std::thread::available_parallelism().ok()?.get();
    (!ring.is_host()).then_some(cores - cores / 8)
}
