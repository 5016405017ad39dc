//! What a function of the user sees of the optimizer's state, in a step and between steps.
//!
//! A function may change values, unscale gradients with a [`GradScaler`] and skip the step. What it
//! asks for is done when it has returned; it publishes nothing itself.
//!
//! # Invariants
//! - Stored gradients are never written: unscaled ones are f32 copies that live as long as the step.

use std::ops::Range;
use std::sync::Arc;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{self, Floats, FloatsMut, Remainders};
use roundpipe_tensor::{DType, HostBuf, Param, Shape};

use super::open::{OpenLayer, OpenParam};
use crate::error::{Error, Result};
use crate::optim::{MomentPart, floats};
use crate::scaler::GradScaler;
use crate::store::{Overwritten, StoreLayer};

/// All optimizer copies, for a function of the user.
pub struct OptimParams<'a> {
    pub(super) layers: Vec<OpenLayer<'a>>,
    pub(super) threads: &'a Threads,
    /// The version of the weights that the gradients were computed with.
    pub(super) read_version: u64,
    pub(super) scaled: Option<ScaledStep>,
    pub(super) skipped: bool,
}

/// What a scaler found in the gradients of a step.
#[derive(Debug, Clone)]
pub(crate) struct ScaledStep {
    pub scaler: GradScaler,
    /// The scale that the gradients were computed with.
    pub used: f64,
    pub found_nonfinite: bool,
}

/// What became of a step by a function.
#[derive(Debug, Default)]
pub struct FunctionReport {
    /// Whether it asked for the step to be skipped.
    pub skipped: bool,
    pub(crate) scaled: Option<ScaledStep>,
}

/// One optimizer copy.
#[derive(Debug)]
pub struct OptimParam<'a> {
    /// Full dotted name.
    pub name: &'a str,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    /// The values, to be changed.
    pub value: &'a mut [f32],
    /// The gradient as stored, or unscaled; `None` when there is none.
    pub grad: Option<Floats<'a>>,
}

impl<'a> OptimParams<'a> {
    /// All of them, in model order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = OptimParam<'_>> {
        self.each().map(OpenParam::view)
    }

    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut OpenParam<'a>> {
        self.layers.iter_mut().flat_map(|layer| &mut layer.params)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.params.len()).sum()
    }

    /// Whether nothing is trainable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Leaves all weights as they are, also those that the function changes, and drops the
    /// gradients. The step does not count, and is reported as skipped.
    pub fn skip(&mut self) {
        self.skipped = true;
    }
}

impl GradScaler {
    /// In a step function: divides all gradients by the scale that they were computed with, which is
    /// [`RoundPipe::loss_scale`](crate::RoundPipe::loss_scale) of their calls, at lag 1 too. Says
    /// whether all are finite. From then on [`OptimParam::grad`] is f32; that takes 4 bytes per
    /// parameter until the step is done. Then the scale moves, as after
    /// [`RoundPipe::update_scaled`](crate::RoundPipe::update_scaled). A scaler that is disabled does
    /// nothing and says yes.
    ///
    /// ```
    /// # use roundpipe::{GradScaler, OptimParams};
    /// # fn step(scaler: &GradScaler, params: &mut OptimParams<'_>) -> roundpipe::Result<()> {
    /// if !scaler.unscale(params)? {
    ///     params.skip();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for gradients that a scaler unscaled already, and for a scaler of another
    /// engine; when memory runs out.
    pub fn unscale(&self, params: &mut OptimParams<'_>) -> Result<bool> {
        if params.scaled.is_some() {
            let what = "the gradients of this step are unscaled already";
            return Err(Error::config("scaler", what));
        }
        self.check_asked()?;
        let version = params.read_version;
        let used = self.settled_scale_at(version).ok_or_else(|| {
            let what =
                format!("it knows no scale for version {version}; use one scaler per engine");
            Error::config("scaler", what)
        })?;
        let mut is_finite = true;
        if self.is_enabled() {
            let threads = params.threads;
            let factor = (1.0 / used) as f32;
            for param in params.each() {
                is_finite &= param.unscale(threads, factor)?;
            }
        }
        params.scaled = Some(ScaledStep {
            scaler: self.clone(),
            used,
            found_nonfinite: !is_finite,
        });
        Ok(is_finite)
    }

    /// In a step function: unscales the gradients, unless [`GradScaler::unscale`] did, and runs
    /// `update` if all are finite; else the step is skipped. Says which.
    ///
    /// ```no_run
    /// # use roundpipe::{GradScaler, Lag, RoundPipe};
    /// # fn step(engine: &RoundPipe, scaler: &GradScaler) -> roundpipe::Result<()> {
    /// let in_step = scaler.clone();
    /// engine.step(
    ///     move |params| {
    ///         in_step.step(params, |params| {
    ///             for param in params.iter_mut() {
    ///                 let Some(grad) = param.grad_f32() else { continue };
    ///                 for (value, grad) in param.value.iter_mut().zip(grad) {
    ///                     *value -= 0.01 * grad;
    ///                 }
    ///             }
    ///             Ok(())
    ///         })?;
    ///         Ok(())
    ///     },
    ///     Lag::One,
    /// )?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What `update` returns; [`Error::Config`] for gradients that another scaler unscaled, and for
    /// a scaler of another engine; when memory runs out.
    pub fn step(
        &self,
        params: &mut OptimParams<'_>,
        update: impl FnOnce(&mut OptimParams<'_>) -> Result<()>,
    ) -> Result<bool> {
        let is_finite = match &params.scaled {
            Some(scaled) if scaled.scaler.is_same(self) => !scaled.found_nonfinite,
            _ => self.unscale(params)?,
        };
        if is_finite {
            update(params)?;
        } else {
            params.skip();
        }
        Ok(is_finite)
    }
}

impl OpenParam<'_> {
    /// Makes the gradient an f32 copy times `factor`; whether that is finite.
    fn unscale(&mut self, threads: &Threads, factor: f32) -> Result<bool> {
        if self.grads.is_empty() {
            return Ok(true);
        }
        let name = format!("{} gradient, unscaled", self.stored.name);
        let copy = HostBuf::zeroed(name, self.stored.copy_bytes())?;
        let mut values = copy.write(0..copy.len())?;
        self.sum_grads(threads, values.as_mut_slice())?;
        optim::scale(threads, FloatsMut::F32(values.as_mut_slice()), factor);
        drop(values);
        let values = copy.read_all()?;
        let is_finite = optim::all_finite(threads, Floats::F32(values.as_slice()));
        self.sum = Some(values);
        Ok(is_finite)
    }
}

impl OptimParam<'_> {
    /// The gradient as f32, where there is one.
    pub fn grad_f32(&self) -> Option<Vec<f32>> {
        Some(self.grad?.to_vec_f32())
    }
}

/// Where the f32 value of a parameter is that has no copy: in its newest weights and their
/// remainders.
#[derive(Debug, Clone)]
pub(super) struct SplitValue {
    remainder: HostBuf,
    /// Where the weights lie in their slab.
    weights: Range<usize>,
    /// By the memory of each slab: what the user wrote over since the remainders followed.
    overwritten: [(Option<u64>, Arc<Overwritten>); 2],
}

impl SplitValue {
    pub fn of(layer: &StoreLayer, index: usize) -> Result<Option<Self>> {
        let Some(remainder) = layer.remainder(index)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            remainder,
            weights: layer.params()[index].weight_bytes(),
            overwritten: layer.overwritten(),
        }))
    }

    fn made_on_read(&self, param: &Param, len: usize) -> HostBuf {
        let param = param.clone();
        let this = self.clone();
        let name = this.remainder.name().to_owned();
        HostBuf::made_on_read(name, len * size_of::<f32>(), move |into| {
            // The remainders first: while they are held, no update moves the parameter.
            let remainder = this.remainder.read_all()?;
            let home = param.data();
            let weights = home.read_all()?;
            let slabs = this.overwritten.iter();
            let before = slabs
                .filter(|(memory, _)| *memory == Some(home.id()))
                .find_map(|(_, slab)| slab.before(&this.weights, weights.bytes()));
            optim::join(
                &Threads::new(Some(1))?,
                before.as_deref().unwrap_or(weights.as_slice()),
                Remainders::new(&remainder, len)?,
                into.write(0..into.len())?.as_mut_slice(),
            )
        })
    }
}

/// An optimizer copy to read, and the rule's state with it.
#[derive(Debug, Clone)]
pub struct OptimHandle {
    /// Full dotted name.
    pub name: String,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    /// Element type of the value: f32, unless
    /// [`Builder::optim_dtype`](crate::engine::Builder::optim_dtype) says otherwise.
    pub dtype: DType,
    pub(super) param: Param,
    /// Of the parameter in its layer.
    pub(super) index: usize,
    pub(super) master: Option<HostBuf>,
    pub(super) split: Option<SplitValue>,
    pub(super) moments: Vec<HostBuf>,
    pub(super) moment_parts: Vec<MomentPart>,
}

impl OptimHandle {
    /// The newest values. For bf16 weights with an f32 value they are made of the weights and their
    /// remainders when this is read, and cannot be written. For weights that have no copy this is the
    /// weights, which move with every version.
    pub fn value(&self) -> HostBuf {
        match (&self.split, &self.master) {
            (Some(split), _) => split.made_on_read(&self.param, self.shape.numel()),
            (None, Some(master)) => master.clone(),
            (None, None) => self.param.data(),
        }
    }

    /// Refuses a value that the user reads or writes just now: a write would fail half way.
    pub(crate) fn check_free(&self) -> Result<()> {
        let memory = match &self.split {
            Some(split) => split.remainder.clone(),
            None => self.value(),
        };
        memory.write(0..memory.len())?;
        Ok(())
    }

    /// Where the rule's state lies, in the rule's order; where moments are kept in 8 bits, the codes
    /// of each and then its scales.
    pub fn moments(&self) -> &[HostBuf] {
        &self.moments
    }

    /// The sizes of each of them: those of the parameter, of its rows and columns, or the number of
    /// scales.
    pub fn moment_shapes(&self) -> impl ExactSizeIterator<Item = &Shape> {
        self.moment_parts.iter().map(|part| &part.shape)
    }

    /// The element type of each of them.
    pub fn moment_dtypes(&self) -> impl ExactSizeIterator<Item = DType> {
        self.moment_parts.iter().map(|part| part.dtype)
    }

    /// A copy of the newest values, as f32.
    ///
    /// # Errors
    /// While an update writes them.
    pub fn to_vec(&self) -> Result<Vec<f32>> {
        let values = self.value().read_all()?;
        Ok(floats(self.dtype, &values).to_vec_f32())
    }
}
