//! Optimizers over parameters in host memory.
//!
//! The path of a gradient: [`Gradients`] -> the optimizer's own f32 slab ([`Optimizer::add`], which adds
//! up calls) -> one fused pass over gradient, master weights and moments that writes the new working
//! weights ([`Optimizer::step`]). Master weights exist only where working weights are narrower than f32.
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
#[derive(Debug, Clone, Copy)]
enum Rule {
    Adam(AdamW),
    Sgd(Sgd),
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
}

/// What a step saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Which step this was, from 1 on.
    pub step: u64,
    /// L2 norm of all gradients, before clipping.
    pub grad_norm: f64,
}

impl Optimizer {
    /// Adam with decoupled weight decay (or plain, by its settings).
    ///
    /// # Errors
    /// When a parameter's type cannot be optimised or the system has no memory.
    pub fn adamw(params: impl IntoIterator<Item = (String, Param)>, rule: AdamW) -> Result<Self> {
        Self::new(params, Rule::Adam(rule), 2 + usize::from(rule.amsgrad))
    }

    /// Stochastic gradient descent.
    ///
    /// # Errors
    /// As [`Optimizer::adamw`].
    pub fn sgd(params: impl IntoIterator<Item = (String, Param)>, rule: Sgd) -> Result<Self> {
        Self::new(params, Rule::Sgd(rule), usize::from(rule.momentum != 0.0))
    }

    fn new(params: impl IntoIterator<Item = (String, Param)>, rule: Rule, moments: usize) -> Result<Self> {
        let threads = Threads::new(None)?;
        let mut entries: Vec<Entry> = Vec::new();
        let mut places = HashMap::new();
        for (name, param) in params {
            if !param.is_trainable() || places.contains_key(&param.id()) {
                continue;
            }
            places.insert(param.id(), entries.len());
            entries.push(Entry::new(&threads, name, param, moments)?);
        }
        Ok(Self { rule, threads, entries, places, steps: 0, max_norm: None })
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
        let of =
            |e: &Entry| e.grad.len() + e.master.iter().chain(&e.moments).map(HostBuf::len).sum::<usize>();
        self.entries.iter().map(of).sum()
    }

    /// Adds gradients to those since the last step. Gradients of parameters this optimizer does not have
    /// are left out.
    ///
    /// # Errors
    /// When the device failed or a slab is in use elsewhere.
    pub fn add(&mut self, gradients: &Gradients) -> Result<()> {
        for (param, grad) in gradients.params() {
            let Some(&place) = self.places.get(&param.id()) else { continue };
            let entry = &mut self.entries[place];
            if entry.filled {
                let fresh = HostBuf::zeroed("gradient", entry.grad.len())?;
                grad.read_into(&mut fresh.write(0..fresh.len())?)?;
                let mut sum = entry.grad.write(0..entry.grad.len())?;
                let fresh = fresh.read_all()?;
                optim::accumulate(&self.threads, Floats::F32(fresh.as_slice()), sum.as_mut_slice())?;
            } else {
                grad.read_into(&mut entry.grad.write(0..entry.grad.len())?)?;
                entry.filled = true;
            }
        }
        Ok(())
    }

    /// Updates every parameter that has a gradient, with the learning rate `lr`, and starts the sums anew.
    ///
    /// # Errors
    /// [`Error::Config`] when there are no gradients; a parameter that a pass still reads is an error that
    /// leaves all parameters as they were.
    pub fn step(&mut self, lr: f64) -> Result<StepReport> {
        if !self.entries.iter().any(|e| e.filled) {
            return Err(Error::config("step", "no gradients were added since the last step"));
        }
        let mut squared = 0.0;
        for entry in self.entries.iter().filter(|e| e.filled) {
            squared += optim::squared_norm(&self.threads, Floats::F32(entry.grad.read_all()?.as_slice()));
        }
        let factor = self.max_norm.map_or(1.0, |max| optim::clip_factor(squared, max));
        // All guards first: a parameter in use stops the step before anything is written.
        let mut open = Vec::new();
        for entry in self.entries.iter().filter(|e| e.filled) {
            open.push((entry.decays, Open::new(entry)?));
        }
        self.steps += 1;
        for (decays, open) in open {
            open.update(&self.threads, self.rule, lr, decays, self.steps, factor)?;
        }
        self.zero_grad();
        Ok(StepReport { step: self.steps, grad_norm: squared.sqrt() })
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
        let master = match param.dtype() {
            DType::F32 => None,
            DType::BF16 | DType::F16 => {
                let master = slab("master")?;
                let working = param.data().read_all()?;
                let mut into = master.write(0..bytes)?;
                optim::cast(threads, floats(param.dtype(), &working), FloatsMut::F32(into.as_mut_slice()))?;
                drop(into);
                Some(master)
            }
            other => {
                return Err(Error::config(
                    "optimizer",
                    format!("{name} is {other}; it takes f32, bf16 and f16"),
                ));
            }
        };
        let grad = slab("gradient")?;
        let moments = (0..moments).map(|_| slab("moment")).collect::<Result<_, _>>()?;
        Ok(Self { name, param, decays: true, grad, filled: false, master, moments })
    }
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
            working: all(entry.param.data())?,
            master: entry.master.as_ref().map(all).transpose()?,
            moments: entry.moments.iter().map(all).collect::<Result<_, _>>()?,
        })
    }

    fn update(
        mut self,
        threads: &Threads,
        rule: Rule,
        lr: f64,
        decays: bool,
        step: u64,
        factor: f32,
    ) -> Result<()> {
        let grad = Floats::F32(self.grad.as_slice());
        let (master, working) = match &mut self.master {
            None => (self.working.as_mut_slice::<f32>(), None),
            Some(master) if self.dtype == DType::BF16 => {
                (master.as_mut_slice(), Some(FloatsMut::BF16(self.working.as_mut_slice())))
            }
            Some(master) => (master.as_mut_slice(), Some(FloatsMut::F16(self.working.as_mut_slice()))),
        };
        let mut moments = self.moments.iter_mut().map(HostMut::as_mut_slice::<f32>);
        match rule {
            Rule::Adam(rule) => {
                let weight_decay = if decays { rule.weight_decay } else { 0.0 };
                let (Some(exp_avg), Some(exp_avg_sq)) = (moments.next(), moments.next()) else {
                    unreachable!("Adam has two moments")
                };
                let max_exp_avg_sq = moments.next();
                let slabs = AdamSlabs { grad, master, exp_avg, exp_avg_sq, max_exp_avg_sq, working };
                AdamW { lr, weight_decay, ..rule }.step(threads, step, factor, slabs)?;
            }
            Rule::Sgd(rule) => {
                let weight_decay = if decays { rule.weight_decay } else { 0.0 };
                let slabs = SgdSlabs { grad, master, momentum: moments.next(), working };
                Sgd { lr, weight_decay, ..rule }.step(threads, step, factor, slabs)?;
            }
        }
        Ok(())
    }
}

/// Working weights as the optimizer's kernels see them.
fn floats(dtype: DType, data: &HostRef) -> Floats<'_> {
    match dtype {
        DType::BF16 => Floats::BF16(data.as_slice()),
        DType::F16 => Floats::F16(data.as_slice()),
        _ => Floats::F32(data.as_slice()),
    }
}
