//! Optimizers over parameters in host memory.
//!
//! The path of a gradient: [`Gradients`] -> the optimizer's own f32 slab ([`Optimizer::add`], which
//! adds up calls) -> one fused pass over gradient, master weights and moments that writes the new
//! working weights ([`Optimizer::step`]). Master weights exist only where working weights are
//! narrower than f32.
//!
//! # Invariants
//! - A frozen parameter has no state and is never written.
//! - A step either updates every parameter or, when a slab is in use elsewhere, none.
//! - The same gradients in the same order give the same bits, for any number of threads.

use std::collections::HashMap;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{self, AdamSlabs, Floats, FloatsMut, SgdSlabs};
use roundpipe_tensor::{DType, Gradients, HostBuf, Param, ParamId};

pub use roundpipe_tensor::optim::{AdamW, Sgd, WeightDecay};

use crate::error::{Error, Result};

/// What to do with a gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Adam or AdamW.
    Adam(AdamW),
    /// Gradient descent.
    Sgd(Sgd),
}

/// What all parameters share in one update, beside the rule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared {
    /// Learning rate; stands in for the rule's own.
    pub lr: f64,
    /// From 1 on.
    pub step: u64,
    /// What gradients are multiplied with first.
    pub factor: f32,
}

/// What an update of one parameter, or of part of one, reads and writes; all of one length.
pub(crate) struct Slabs<'a> {
    pub grad: Floats<'a>,
    pub master: &'a mut [f32],
    /// As many as [`Rule::moments`] says.
    pub moments: Vec<&'a mut [f32]>,
    /// Where the new weights go as well; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

impl Rule {
    /// How many f32 slabs of state it keeps beside the weights.
    pub fn moments(&self) -> usize {
        match self {
            Self::Adam(rule) => 2 + usize::from(rule.amsgrad),
            Self::Sgd(rule) => usize::from(rule.momentum != 0.0),
        }
    }

    /// Refuses settings that no step would accept, whatever its learning rate.
    ///
    /// # Errors
    /// The setting and its range.
    pub fn check_settings(&self) -> Result<()> {
        let threads = Threads::new(Some(1))?;
        let lr = match self {
            Self::Adam(rule) => rule.lr,
            Self::Sgd(rule) => rule.lr,
        };
        self.check(
            &threads,
            Shared {
                lr,
                step: 1,
                factor: 1.0,
            },
        )
    }

    /// Refuses settings that no pass would accept.
    pub(crate) fn check(self, threads: &Threads, shared: Shared) -> Result<()> {
        let mut moments = vec![[0.0f32; 0]; self.moments()];
        let moments = moments.iter_mut().map(|moment| &mut moment[..]).collect();
        let slabs = Slabs {
            grad: Floats::F32(&[]),
            master: &mut [],
            moments,
            working: None,
        };
        self.update(threads, shared, true, slabs).map(drop)
    }

    /// One fused pass. `decays` says whether weight decay applies to this parameter. Returns
    /// whether some elements kept their value because the new one was not finite.
    pub(crate) fn update(
        self,
        threads: &Threads,
        shared: Shared,
        decays: bool,
        slabs: Slabs<'_>,
    ) -> Result<bool> {
        let Shared { lr, step, factor } = shared;
        let Slabs {
            grad,
            master,
            moments,
            working,
        } = slabs;
        let mut moments = moments.into_iter();
        match self {
            Self::Adam(rule) => {
                let weight_decay = if decays { rule.weight_decay } else { 0.0 };
                let (Some(exp_avg), Some(exp_avg_sq)) = (moments.next(), moments.next()) else {
                    unreachable!("Adam has two moments")
                };
                let max_exp_avg_sq = moments.next();
                let slabs = AdamSlabs {
                    grad,
                    master,
                    exp_avg,
                    exp_avg_sq,
                    max_exp_avg_sq,
                    working,
                };
                Ok(AdamW {
                    lr,
                    weight_decay,
                    ..rule
                }
                .step(threads, step, factor, slabs)?)
            }
            Self::Sgd(rule) => {
                let weight_decay = if decays { rule.weight_decay } else { 0.0 };
                let slabs = SgdSlabs {
                    grad,
                    master,
                    momentum: moments.next(),
                    working,
                };
                Ok(Sgd {
                    lr,
                    weight_decay,
                    ..rule
                }
                .step(threads, step, factor, slabs)?)
            }
        }
    }
}

/// What a step asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Learning rate.
    pub lr: f64,
    /// Scales gradients down when their common norm exceeds this.
    pub clip: Option<f64>,
    /// What gradients are multiplied with first: one over the loss scale they were computed with.
    pub grad_scale: f64,
    /// Whether a step whose gradients are not all finite is skipped as a whole; on by default. Off,
    /// only the elements whose new values would not be finite keep what they have.
    pub skip_nonfinite: bool,
}

impl Update {
    /// Nothing but a learning rate.
    pub fn new(lr: f64) -> Self {
        Self {
            lr,
            clip: None,
            grad_scale: 1.0,
            skip_nonfinite: true,
        }
    }

    /// Refuses options that would ruin the weights.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the option.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &'static str, value: f64, what: &str| {
            Err(Error::config(name, format!("{value}; it must be {what}")))
        };
        if !self.lr.is_finite() || self.lr < 0.0 {
            return refuse("lr", self.lr, "a finite number, 0 or more");
        }
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip <= 0.0) {
            return refuse("clip", clip, "above 0; None clips nothing");
        }
        if !self.grad_scale.is_finite() || self.grad_scale <= 0.0 {
            return refuse("grad_scale", self.grad_scale, "a finite number above 0");
        }
        Ok(())
    }

    /// What to do with gradients whose squares, as they are stored, add up to `squared`.
    pub fn decide(&self, squared: f64) -> Decision {
        // Unscaled before they are measured, so that the threshold means the same at every scale.
        let squared = squared * self.grad_scale * self.grad_scale;
        let clip = self
            .clip
            .map_or(1.0, |max| optim::clip_factor(squared, max));
        Decision {
            factor: (f64::from(clip) * self.grad_scale) as f32,
            grad_norm: squared.sqrt(),
            skip: self.skip_nonfinite && !squared.is_finite(),
        }
    }
}

/// What [`Update::decide`] says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// What stored gradients are multiplied with.
    pub factor: f32,
    /// L2 norm of all gradients, unscaled, before clipping.
    pub grad_norm: f64,
    /// Whether the step is skipped: [`Store::skip`](crate::Store::skip) instead of
    /// [`Store::apply`](crate::Store::apply) for every layer.
    pub skip: bool,
}

/// The state of one parameter.
struct Entry {
    name: String,
    param: Param,
    decays: bool,
    /// Sum of the gradients since the last step, f32.
    grad: HostBuf,
    /// Whether `grad` holds anything.
    filled: bool,
    /// f32 weights, where the working weights are narrower.
    master: Option<HostBuf>,
    /// Moments or momentum, f32, in the rule's order.
    moments: Vec<HostBuf>,
}

/// Updates parameters in place.
pub struct Optimizer {
    rule: Rule,
    threads: Threads,
    entries: Vec<Entry>,
    places: HashMap<ParamId, usize>,
    steps: u64,
    max_norm: Option<f64>,
    /// Where a gradient lands that is added to another; grows to the largest.
    landing: Option<HostBuf>,
}

/// What a step saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Which step this was, from 1 on.
    pub step: u64,
    /// L2 norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Whether nothing was updated because a gradient was not finite; `step` is the last that was.
    pub skipped: bool,
    /// Whether some weights kept their value because the rule's result for them was not finite.
    pub partial: bool,
}

impl Optimizer {
    /// Adam with decoupled weight decay (or plain, by its settings).
    ///
    /// # Errors
    /// When a parameter's type cannot be optimised or the system has no memory.
    pub fn adamw(params: impl IntoIterator<Item = (String, Param)>, rule: AdamW) -> Result<Self> {
        Self::new(params, Rule::Adam(rule))
    }

    /// Stochastic gradient descent.
    ///
    /// # Errors
    /// As [`Optimizer::adamw`].
    pub fn sgd(params: impl IntoIterator<Item = (String, Param)>, rule: Sgd) -> Result<Self> {
        Self::new(params, Rule::Sgd(rule))
    }

    /// Any rule.
    ///
    /// # Errors
    /// As [`Optimizer::adamw`].
    pub fn new(params: impl IntoIterator<Item = (String, Param)>, rule: Rule) -> Result<Self> {
        let threads = Threads::new(None)?;
        let mut entries: Vec<Entry> = Vec::new();
        let mut places = HashMap::new();
        for (name, param) in params {
            if !param.is_trainable() || places.contains_key(&param.id()) {
                continue;
            }
            places.insert(param.id(), entries.len());
            entries.push(Entry::new(&threads, name, param, rule.moments())?);
        }
        Ok(Self {
            rule,
            threads,
            entries,
            places,
            steps: 0,
            max_norm: None,
            landing: None,
        })
    }

    /// Scales gradients down when their common norm exceeds `norm`.
    #[must_use]
    pub fn clip(mut self, norm: f64) -> Self {
        self.max_norm = Some(norm);
        self
    }

    /// Applies weight decay only where `decays` says so; by default everywhere.
    #[must_use]
    pub fn decay_where(mut self, decays: impl Fn(&str, &Param) -> bool) -> Self {
        for entry in &mut self.entries {
            entry.decays = decays(&entry.name, &entry.param);
        }
        self
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Bytes of host memory beside the working weights.
    pub fn state_bytes(&self) -> usize {
        let of = |e: &Entry| {
            e.grad.len()
                + e.master
                    .iter()
                    .chain(&e.moments)
                    .map(HostBuf::len)
                    .sum::<usize>()
        };
        self.entries.iter().map(of).sum()
    }

    /// Adds gradients to those since the last step. Gradients of parameters this optimizer does not
    /// have are left out.
    ///
    /// # Errors
    /// When the device failed or a slab is in use elsewhere.
    pub fn add(&mut self, gradients: &Gradients) -> Result<()> {
        for (param, grad) in gradients.params() {
            let Some(&place) = self.places.get(&param.id()) else {
                continue;
            };
            let entry = &mut self.entries[place];
            if entry.filled {
                let landing = landing(&mut self.landing, entry.grad.len())?;
                grad.read_into(&mut landing.write(0..landing.len())?)?;
                entry.add(&self.threads, Floats::F32(landing.read_all()?.as_slice()))?;
            } else {
                grad.read_into(&mut entry.grad.write(0..entry.grad.len())?)?;
                entry.filled = true;
            }
        }
        Ok(())
    }

    /// Adds a gradient in host memory to those of `param` since the last step; it is left out when
    /// this optimizer does not have the parameter. Lets a plain loop round gradients as the engine
    /// does.
    ///
    /// # Errors
    /// When it has not as many elements as the parameter, or a slab is in use elsewhere.
    pub fn add_grad(&mut self, param: &Param, values: Floats<'_>) -> Result<()> {
        match self.places.get(&param.id()) {
            Some(&place) => self.entries[place].add(&self.threads, values),
            None => Ok(()),
        }
    }

    /// Updates every parameter that has a gradient, with the learning rate `lr`, and starts the
    /// sums anew. A step whose gradients are not all finite is skipped.
    ///
    /// # Errors
    /// [`Error::Config`] when there are no gradients or an option makes no sense; a parameter that
    /// a pass still reads is an error that leaves all parameters as they were.
    pub fn step(&mut self, lr: f64) -> Result<StepReport> {
        let update = Update {
            clip: self.max_norm,
            ..Update::new(lr)
        };
        update.check()?;
        if !self.entries.iter().any(|e| e.filled) {
            return Err(Error::config(
                "step",
                "no gradients were added since the last step",
            ));
        }
        let mut squared = 0.0;
        for entry in self.entries.iter().filter(|e| e.filled) {
            squared += optim::squared_norm(
                &self.threads,
                Floats::F32(entry.grad.read_all()?.as_slice()),
            );
        }
        let decision = update.decide(squared);
        let (factor, grad_norm) = (decision.factor, decision.grad_norm);
        // All guards first: a parameter in use stops the step before anything is written.
        let mut open = Vec::new();
        for entry in self.entries.iter().filter(|e| e.filled) {
            open.push((entry.decays, Open::new(entry)?));
        }
        let step = self.steps + 1;
        let shared = Shared { lr, step, factor };
        if decision.skip {
            self.zero_grad();
            return Ok(StepReport {
                step: self.steps,
                grad_norm,
                skipped: true,
                partial: false,
            });
        }
        let mut partial = false;
        for (decays, mut open) in open {
            partial |= self
                .rule
                .update(&self.threads, shared, decays, open.slabs())?;
        }
        // Only now: a refused learning rate is no step.
        self.steps = step;
        self.zero_grad();
        Ok(StepReport {
            step,
            grad_norm,
            skipped: false,
            partial,
        })
    }

    /// Forgets the gradients added since the last step.
    pub fn zero_grad(&mut self) {
        for entry in &mut self.entries {
            entry.filled = false;
        }
    }
}

impl Entry {
    fn new(threads: &Threads, name: String, param: Param, moments: usize) -> Result<Self> {
        let bytes = param.shape().numel() * size_of::<f32>();
        let slab = |what: &str| HostBuf::zeroed(format!("{name} {what}"), bytes);
        let master = if needs_master(&name, param.dtype())? {
            let master = slab("master")?;
            fill_master(threads, &param, &master)?;
            Some(master)
        } else {
            None
        };
        let grad = slab("gradient")?;
        let moments = (0..moments)
            .map(|_| slab("moment"))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name,
            param,
            decays: true,
            grad,
            filled: false,
            master,
            moments,
        })
    }

    fn add(&mut self, threads: &Threads, values: Floats<'_>) -> Result<()> {
        let mut sum = self.grad.write(0..self.grad.len())?;
        if self.filled {
            optim::accumulate(threads, values, sum.as_mut_slice())?;
        } else {
            optim::cast(threads, values, FloatsMut::F32(sum.as_mut_slice()))?;
            self.filled = true;
        }
        Ok(())
    }
}

/// The first `bytes` bytes of `buf`, which is made or grown as needed.
fn landing(buf: &mut Option<HostBuf>, bytes: usize) -> Result<HostBuf> {
    match buf {
        Some(buf) if buf.len() >= bytes => Ok(buf.slice(0..bytes)?),
        _ => Ok(buf
            .insert(HostBuf::zeroed("gradient landing", bytes)?)
            .clone()),
    }
}

/// Whether a parameter of this type has an f32 copy beside its working weights.
///
/// # Errors
/// For types that cannot be optimised.
pub(crate) fn needs_master(name: &str, dtype: DType) -> Result<bool> {
    match dtype {
        DType::F32 => Ok(false),
        DType::BF16 | DType::F16 => Ok(true),
        other => Err(Error::config(
            "optimizer",
            format!("{name} is {other}; freeze it, or make it f32, bf16 or f16"),
        )),
    }
}

/// Writes the parameter's values to `master`.
pub(crate) fn fill_master(threads: &Threads, param: &Param, master: &HostBuf) -> Result<()> {
    let working = param.data().read_all()?;
    let mut into = master.write(0..master.len())?;
    optim::cast(
        threads,
        floats(param.dtype(), &working),
        FloatsMut::F32(into.as_mut_slice()),
    )?;
    Ok(())
}

/// The slabs of one parameter, opened for an update.
struct Open {
    dtype: DType,
    grad: HostRef,
    working: HostMut,
    master: Option<HostMut>,
    moments: Vec<HostMut>,
}

impl Open {
    fn new(entry: &Entry) -> Result<Self> {
        let all = |buf: &HostBuf| buf.write(0..buf.len());
        Ok(Self {
            dtype: entry.param.dtype(),
            grad: entry.grad.read_all()?,
            working: all(&entry.param.data())?,
            master: entry.master.as_ref().map(all).transpose()?,
            moments: entry.moments.iter().map(all).collect::<Result<_, _>>()?,
        })
    }

    fn slabs(&mut self) -> Slabs<'_> {
        let grad = Floats::F32(self.grad.as_slice());
        let (master, working) = match &mut self.master {
            None => (self.working.as_mut_slice::<f32>(), None),
            Some(master) => (
                master.as_mut_slice(),
                Some(floats_mut(self.dtype, &mut self.working)),
            ),
        };
        let moments = self.moments.iter_mut().map(HostMut::as_mut_slice).collect();
        Slabs {
            grad,
            master,
            moments,
            working,
        }
    }
}

/// A host range as the optimizer's kernels read it.
pub(crate) fn floats(dtype: DType, data: &HostRef) -> Floats<'_> {
    match dtype {
        DType::BF16 => Floats::BF16(data.as_slice()),
        DType::F16 => Floats::F16(data.as_slice()),
        _ => Floats::F32(data.as_slice()),
    }
}

/// The same of a range that may be written.
pub(crate) fn floats_of(dtype: DType, data: &mut HostMut) -> Floats<'_> {
    match dtype {
        DType::BF16 => Floats::BF16(data.as_mut_slice()),
        DType::F16 => Floats::F16(data.as_mut_slice()),
        _ => Floats::F32(data.as_mut_slice()),
    }
}

/// A host range as the optimizer's kernels write it.
pub(crate) fn floats_mut(dtype: DType, data: &mut HostMut) -> FloatsMut<'_> {
    match dtype {
        DType::BF16 => FloatsMut::BF16(data.as_mut_slice()),
        DType::F16 => FloatsMut::F16(data.as_mut_slice()),
        _ => FloatsMut::F32(data.as_mut_slice()),
    }
}
