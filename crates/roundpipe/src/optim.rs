//! What an update does with a gradient: the rule, what a step asks for, and the fused pass.
//!
//! A pass reads a gradient, updates master weights and moments, and writes the new working weights.
//! Master weights exist only where working weights are narrower than f32. This module holds no
//! state: the store does, for engines and for [`Optimizer`](crate::Optimizer) alike.
//!
//! # Invariants
//! - The same gradients give the same bits, for any number of threads.
//! - What was finite stays finite: an element whose new value would not be keeps the old one.

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{
    self, AdamSlabs, Floats, FloatsMut, LionSlabs, SgdSlabs, StepSettings,
};
use roundpipe_tensor::{DType, HostBuf, Param};

pub use roundpipe_tensor::optim::{Adam, AdamW, Lion, Sgd};

use crate::error::{Error, Result};

/// What to do with a gradient. The learning rate comes with each step ([`Update::lr`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Adam: weight decay goes into the gradient, and is off by default.
    Adam(Adam),
    /// AdamW: weight decay goes into the weights, and is 0.01 by default.
    AdamW(AdamW),
    /// Lion: one moment, steps of one length.
    Lion(Lion),
    /// Gradient descent.
    Sgd(Sgd),
}

/// What one parameter has that is not the rule's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ParamSettings {
    pub lr_factor: f64,
    pub weight_decay: Option<f64>,
    pub betas: Option<(f64, f64)>,
    pub frozen: bool,
}

impl Default for ParamSettings {
    fn default() -> Self {
        Self {
            lr_factor: 1.0,
            weight_decay: None,
            betas: None,
            frozen: false,
        }
    }
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

impl From<Adam> for Rule {
    fn from(rule: Adam) -> Self {
        Self::Adam(rule)
    }
}

impl From<AdamW> for Rule {
    fn from(rule: AdamW) -> Self {
        Self::AdamW(rule)
    }
}

impl From<Lion> for Rule {
    fn from(rule: Lion) -> Self {
        Self::Lion(rule)
    }
}

impl From<Sgd> for Rule {
    fn from(rule: Sgd) -> Self {
        Self::Sgd(rule)
    }
}

impl Rule {
    /// How many f32 slabs of state it keeps beside the weights.
    pub fn moments(&self) -> usize {
        match self {
            Self::Adam(Adam { amsgrad, .. }) | Self::AdamW(AdamW { amsgrad, .. }) => {
                2 + usize::from(*amsgrad)
            }
            Self::Lion(_) => 1,
            Self::Sgd(rule) => usize::from(rule.momentum != 0.0),
        }
    }

    /// Refuses settings that no step would accept.
    ///
    /// # Errors
    /// The setting and its range.
    pub fn check_settings(&self) -> Result<()> {
        match self {
            Self::Adam(rule) => rule.check()?,
            Self::AdamW(rule) => rule.check()?,
            Self::Lion(rule) => rule.check()?,
            Self::Sgd(rule) => rule.check()?,
        }
        Ok(())
    }

    /// The rule with the settings of a group, which [`Rule::check_settings`] may refuse.
    pub(crate) fn with(self, settings: ParamSettings) -> Self {
        let decay = |own: f64| settings.weight_decay.unwrap_or(own);
        match self {
            Self::Adam(rule) => {
                let (beta1, beta2) = settings.betas.unwrap_or((rule.beta1, rule.beta2));
                Self::Adam(Adam {
                    beta1,
                    beta2,
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                })
            }
            Self::AdamW(rule) => {
                let (beta1, beta2) = settings.betas.unwrap_or((rule.beta1, rule.beta2));
                Self::AdamW(AdamW {
                    beta1,
                    beta2,
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                })
            }
            Self::Lion(rule) => {
                let (beta1, beta2) = settings.betas.unwrap_or((rule.beta1, rule.beta2));
                Self::Lion(Lion {
                    beta1,
                    beta2,
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                })
            }
            Self::Sgd(rule) => Self::Sgd(Sgd {
                weight_decay: decay(rule.weight_decay),
                ..rule
            }),
        }
    }

    /// One fused pass. Returns whether some elements kept their value because the new one was not
    /// finite.
    pub(crate) fn update(
        self,
        threads: &Threads,
        settings: StepSettings,
        slabs: Slabs<'_>,
    ) -> Result<bool> {
        Ok(match self {
            Self::Adam(rule) => rule.step(threads, settings, slabs.of_adam())?,
            Self::AdamW(rule) => rule.step(threads, settings, slabs.of_adam())?,
            Self::Lion(rule) => rule.step(threads, settings, slabs.of_lion())?,
            Self::Sgd(rule) => rule.step(threads, settings, slabs.of_sgd())?,
        })
    }
}

impl<'a> Slabs<'a> {
    fn of_adam(self) -> AdamSlabs<'a> {
        let mut moments = self.moments.into_iter();
        let (Some(exp_avg), Some(exp_avg_sq)) = (moments.next(), moments.next()) else {
            unreachable!("Adam has two moments")
        };
        AdamSlabs {
            grad: self.grad,
            master: self.master,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq: moments.next(),
            working: self.working,
        }
    }

    fn of_lion(self) -> LionSlabs<'a> {
        let Some(exp_avg) = self.moments.into_iter().next() else {
            unreachable!("Lion has a moment")
        };
        LionSlabs {
            grad: self.grad,
            master: self.master,
            exp_avg,
            working: self.working,
        }
    }

    fn of_sgd(self) -> SgdSlabs<'a> {
        SgdSlabs {
            grad: self.grad,
            master: self.master,
            momentum: self.moments.into_iter().next(),
            working: self.working,
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
    /// Clips every gradient to between minus this and this, before their norm is taken:
    /// `clip_grad_value_`, then `clip_grad_norm_`. A step with an infinite gradient is skipped all
    /// the same, unless `skip_nonfinite` is off.
    pub clip_value: Option<f64>,
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
            clip_value: None,
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
        if let Some(clip) = self.clip_value.filter(|clip| clip.is_nan() || *clip <= 0.0) {
            return refuse("clip_value", clip, "above 0; None clips nothing");
        }
        if !self.grad_scale.is_finite() || self.grad_scale <= 0.0 {
            return refuse("grad_scale", self.grad_scale, "a finite number above 0");
        }
        Ok(())
    }

    /// What gradients are clipped to by value, as they are stored: before they are unscaled.
    #[doc(hidden)]
    pub fn stored_clip_value(&self) -> Option<f32> {
        self.clip_value.map(|clip| (clip / self.grad_scale) as f32)
    }

    /// What to do with gradients whose squares add up to `squared`, as they are stored but clipped
    /// by value.
    #[doc(hidden)]
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
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// What stored gradients are multiplied with.
    pub factor: f32,
    /// L2 norm of all gradients, unscaled and clipped by value, before clipping by the norm.
    pub grad_norm: f64,
    /// Whether the step is skipped: `Store::skip` instead of `Store::apply` for every layer.
    pub skip: bool,
}

/// What a step saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Which step this was, from 1 on.
    pub step: u64,
    /// L2 norm of all gradients, clipped by value where that is on, before clipping by the norm:
    /// what `clip_grad_norm_` returns behind `clip_grad_value_`.
    pub grad_norm: f64,
    /// Whether nothing was updated because a gradient was not finite; `step` is the last that was.
    pub skipped: bool,
    /// Whether some weights kept their value because the rule's result for them was not finite.
    pub partial: bool,
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
