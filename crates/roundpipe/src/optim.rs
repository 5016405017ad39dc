//! What an update does with a gradient: the rule, what a step asks for, and the fused pass.
//!
//! A pass reads a gradient, updates master weights and moments, and writes the new working weights.
//! Master weights exist only where working weights are narrower than f32. Most rules look at one
//! element at a time; Adafactor and Muon look at a whole matrix, so that a pass has the sizes of its
//! parameter. This module holds no state: the store does, for engines and for
//! [`Optimizer`](crate::Optimizer) alike.
//!
//! # Invariants
//! - The same gradients give the same bits, for any number of threads.
//! - What was finite stays finite: an element whose new value would not be keeps the old one.

use std::fmt;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{
    self, AdafactorSlabs, AdamSlabs, Floats, FloatsMut, LionSlabs, Matrices, MuonSlabs,
    SecondMoment, SgdSlabs, StepSettings,
};
use roundpipe_tensor::{DType, HostBuf, Param, Shape};

pub use roundpipe_tensor::optim::{Adafactor, Adam, AdamW, AdjustLr, Lion, MomentType, Muon, Sgd};

use crate::error::{Error, Result};

/// What to do with a gradient. The learning rate comes with each step ([`Update::lr`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Adafactor: a matrix keeps a number per row and per column instead of a moment per element.
    Adafactor(Adafactor),
    /// Adam: weight decay goes into the gradient, and is off by default.
    Adam(Adam),
    /// AdamW: weight decay goes into the weights, and is 0.01 by default.
    AdamW(AdamW),
    /// Lion: one moment, steps of one length.
    Lion(Lion),
    /// Muon for the matrices of hidden layers, AdamW for the rest.
    ///
    /// Muon makes all directions of a matrix about equally long. That is right where a matrix maps
    /// one vector to another, and wrong for tables, whose rows are vectors of their own. So AdamW
    /// updates
    /// - parameters with other than two or three dimensions (three: a matrix per expert), and
    /// - those with a part of their dotted name that contains `embed` or is `wte`, `wpe`, `lm_head`,
    ///   `head`, `classifier` or `score`.
    ///
    /// A [`ParamGroup`](crate::ParamGroup) with a rule of its own decides for parameters whose names
    /// say less; [`RoundPipe::param_rules`](crate::RoundPipe::param_rules) lists what goes where.
    /// With [`AdjustLr::MatchRmsAdamW`] one learning rate serves both, else
    /// [`ParamGroup::lr_factor`](crate::ParamGroup::lr_factor) makes two.
    Muon {
        /// Of the matrices of hidden layers.
        matrices: Muon,
        /// Of everything else.
        rest: AdamW,
    },
    /// Gradient descent.
    Sgd(Sgd),
}

/// Parameters with fewer elements keep f32 moments where others have 8 bits.
const LEAST_IN_8_BITS: usize = 4096;

/// Memory that a moment, or part of one, lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MomentPart {
    pub dtype: DType,
    pub shape: Shape,
}

impl MomentPart {
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }
}

/// What one parameter has that is not the rule's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ParamSettings {
    /// The rule of a group; once resolved, that of the parameter.
    pub rule: Option<Rule>,
    pub lr_factor: f64,
    pub weight_decay: Option<f64>,
    pub betas: Option<(f64, f64)>,
    /// Those of a group; once resolved, those of the parameter.
    pub moments: Option<MomentType>,
    pub frozen: bool,
}

impl Default for ParamSettings {
    fn default() -> Self {
        Self {
            rule: None,
            lr_factor: 1.0,
            weight_decay: None,
            betas: None,
            moments: None,
            frozen: false,
        }
    }
}

/// What an update of one parameter, or of part of one, reads and writes. All are of one length,
/// except for the moments of [`Rule::Adafactor`].
pub(crate) struct Slabs<'a> {
    /// Sizes of the parameter. A part has them too; rules that look at matrices are given no parts.
    pub shape: Shape,
    pub grad: Floats<'a>,
    pub master: &'a mut [f32],
    /// As many as [`Rule::moment_shapes`] says.
    pub moments: Vec<&'a mut [f32]>,
    /// Where the new weights go as well; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

impl From<Adafactor> for Rule {
    fn from(rule: Adafactor) -> Self {
        Self::Adafactor(rule)
    }
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

impl From<Muon> for Rule {
    /// With the default AdamW for the rest.
    fn from(matrices: Muon) -> Self {
        let rest = AdamW::default();
        Self::Muon { matrices, rest }
    }
}

impl From<Sgd> for Rule {
    fn from(rule: Sgd) -> Self {
        Self::Sgd(rule)
    }
}

impl Rule {
    /// The state that it keeps for a parameter of this shape beside the weights: the sizes of each
    /// moment.
    pub fn moment_shapes(&self, shape: &Shape) -> Vec<Shape> {
        match self {
            Self::Adafactor(_) => match shape.dims() {
                [before @ .., rows, cols] => {
                    let with_end = |end: [usize; 2]| {
                        let dims: Vec<usize> = before.iter().copied().chain(end).collect();
                        Shape::new(&dims).expect("no larger than the parameter")
                    };
                    vec![with_end([*rows, 1]), with_end([1, *cols])]
                }
                _ => vec![*shape],
            },
            Self::Adam(Adam { amsgrad, .. }) | Self::AdamW(AdamW { amsgrad, .. }) => {
                vec![*shape; 2 + usize::from(*amsgrad)]
            }
            Self::Lion(_) => vec![*shape],
            Self::Muon { rest, .. } => match Matrices::of(shape) {
                Some(_) => vec![*shape],
                None => Self::AdamW(*rest).moment_shapes(shape),
            },
            Self::Sgd(rule) => vec![*shape; usize::from(rule.momentum != 0.0)],
        }
    }

    /// In what the moments of a parameter of this shape are kept, where `asked` says how. Adafactor's
    /// are a number per row and column, and stay f32; so do, with 8 bits, those of parameters with
    /// fewer than 4,096 elements, as in bitsandbytes.
    pub fn moment_type(&self, shape: &Shape, asked: MomentType) -> MomentType {
        let is_small = asked == MomentType::Bits8 && shape.numel() < LEAST_IN_8_BITS;
        if is_small || matches!(self, Self::Adafactor(_)) {
            return MomentType::F32;
        }
        asked
    }

    /// The pieces of memory that moments lie in, where they are kept in `dtype`, or as `asked` where
    /// that is f32: with 8 bits the codes of a moment, then its scales.
    pub(crate) fn moment_parts(
        &self,
        shape: &Shape,
        dtype: DType,
        asked: MomentType,
    ) -> Vec<MomentPart> {
        let shapes = self.moment_shapes(shape);
        let whole = |dtype| move |shape| MomentPart { dtype, shape };
        match self.moment_type(shape, asked) {
            MomentType::Bf16 if dtype == DType::F32 => {
                shapes.into_iter().map(whole(DType::BF16)).collect()
            }
            MomentType::Bits8 if dtype == DType::F32 => {
                let parts = shapes.into_iter().flat_map(|shape| {
                    let scales = Shape::new(&[optim::scale_count(shape.numel())]);
                    [
                        whole(DType::U8)(shape),
                        whole(DType::F32)(scales.expect("fewer than elements")),
                    ]
                });
                parts.collect()
            }
            _ => shapes.into_iter().map(whole(dtype)).collect(),
        }
    }

    /// Bytes of the moments of a trained parameter, by all its names, with masters and moments in
    /// `optim_dtype` where the parameter has that type, and moments as `asked` elsewhere.
    pub fn moment_bytes<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        param: &Param,
        optim_dtype: DType,
        asked: MomentType,
    ) -> u64 {
        let rule = self.of_param(names.into_iter(), param.shape());
        let state = state_dtype("", param.dtype(), optim_dtype).unwrap_or(DType::F32);
        let parts = rule.moment_parts(param.shape(), state, moments_of(param, asked));
        parts.iter().map(|part| part.bytes() as u64).sum()
    }

    /// What it does with one parameter, by any of its names: [`Rule::Muon`] is AdamW for some.
    pub(crate) fn of_param<'a>(
        self,
        mut names: impl Iterator<Item = &'a str>,
        shape: &Shape,
    ) -> Self {
        match self {
            Self::Muon { rest, .. } if !is_matrix(shape) || names.any(is_table) => {
                Self::AdamW(rest)
            }
            other => other,
        }
    }

    /// The same for the rule of a group, which means all matrices in it, whatever their names.
    pub(crate) fn of_group_param(self, shape: &Shape) -> Self {
        self.of_param(std::iter::empty(), shape)
    }

    /// Whether an element's update depends on no other element.
    pub fn is_elementwise(&self) -> bool {
        !matches!(self, Self::Adafactor(_) | Self::Muon { .. })
    }

    /// Whether an update of bf16 weights with f32 masters can write the weights first and the moments
    /// later: they must not depend on the weights before the step.
    pub fn leaves_moments(&self) -> bool {
        match self {
            Self::Adam(rule) => !rule.amsgrad && rule.weight_decay == 0.0,
            Self::AdamW(rule) => !rule.amsgrad,
            _ => false,
        }
    }

    /// Refuses settings that no step would accept.
    ///
    /// # Errors
    /// The setting and its range.
    pub fn check_settings(&self) -> Result<()> {
        match self {
            Self::Adafactor(rule) => rule.check()?,
            Self::Adam(rule) => rule.check()?,
            Self::AdamW(rule) => rule.check()?,
            Self::Lion(rule) => rule.check()?,
            Self::Muon { matrices, rest } => {
                matrices.check()?;
                rest.check()?;
            }
            Self::Sgd(rule) => rule.check()?,
        }
        Ok(())
    }

    /// The rule with the settings of a group, which [`Rule::check_settings`] may refuse.
    pub(crate) fn with(self, settings: ParamSettings) -> Self {
        let decay = |own: f64| settings.weight_decay.unwrap_or(own);
        match self {
            Self::Adafactor(rule) => Self::Adafactor(Adafactor {
                weight_decay: decay(rule.weight_decay),
                ..rule
            }),
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
            // A resolved parameter has one of the two; unresolved settings are checked for both.
            Self::Muon { matrices, rest } => {
                let (beta1, beta2) = settings.betas.unwrap_or((rest.beta1, rest.beta2));
                Self::Muon {
                    matrices: Muon {
                        weight_decay: decay(matrices.weight_decay),
                        ..matrices
                    },
                    rest: AdamW {
                        beta1,
                        beta2,
                        weight_decay: decay(rest.weight_decay),
                        ..rest
                    },
                }
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
            Self::Adafactor(rule) => rule.step(threads, settings, slabs.of_adafactor())?,
            Self::Adam(rule) => rule.step(threads, settings, slabs.of_adam())?,
            Self::AdamW(rule) => rule.step(threads, settings, slabs.of_adam())?,
            Self::Lion(rule) => rule.step(threads, settings, slabs.of_lion())?,
            Self::Muon { matrices, rest } => match Matrices::of(&slabs.shape) {
                Some(of) => matrices.step(threads, settings, slabs.of_muon(of))?,
                None => rest.step(threads, settings, slabs.of_adam())?,
            },
            Self::Sgd(rule) => rule.step(threads, settings, slabs.of_sgd())?,
        })
    }
}

/// The name by which papers and PyTorch know it.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Adafactor(_) => "Adafactor",
            Self::Adam(_) => "Adam",
            Self::AdamW(_) => "AdamW",
            Self::Lion(_) => "Lion",
            Self::Muon { .. } => "Muon",
            Self::Sgd(_) => "SGD",
        })
    }
}

/// What moments of the store's type are for one parameter. Embeddings keep f32 where others have 8
/// bits: a block of 256 elements has rows of tokens that are common and rare, and 8 bits forget the
/// second moments of the rare ones.
pub(crate) fn moments_of(param: &Param, asked: MomentType) -> MomentType {
    match asked {
        MomentType::Bits8 if param.is_embedding() => MomentType::F32,
        other => other,
    }
}

/// Whether Muon takes it for one matrix or, with three dimensions, one per expert.
fn is_matrix(shape: &Shape) -> bool {
    matches!(shape.rank(), 2 | 3)
}

/// Whether a parameter is by its name an embedding or a head, whose rows are vectors of their own.
fn is_table(name: &str) -> bool {
    let tables = ["wte", "wpe", "lm_head", "head", "classifier", "score"];
    name.split('.').any(|part| {
        let part = part.to_ascii_lowercase();
        part.contains("embed") || tables.contains(&part.as_str())
    })
}

impl<'a> Slabs<'a> {
    fn of_adafactor(self) -> AdafactorSlabs<'a> {
        let mut moments = self.moments.into_iter();
        let Some(first) = moments.next() else {
            unreachable!("Adafactor has a moment")
        };
        let second = match (Matrices::of(&self.shape), moments.next()) {
            (Some(matrices), Some(by_col)) => SecondMoment::Factored {
                matrices,
                by_row: first,
                by_col,
            },
            _ => SecondMoment::Full(first),
        };
        AdafactorSlabs {
            grad: self.grad,
            master: self.master,
            second,
            working: self.working,
        }
    }

    fn of_muon(self, matrices: Matrices) -> MuonSlabs<'a> {
        let Some(momentum) = self.moments.into_iter().next() else {
            unreachable!("Muon has a moment")
        };
        MuonSlabs {
            matrices,
            grad: self.grad,
            master: self.master,
            momentum,
            working: self.working,
        }
    }

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

/// The type of a parameter's master and moments: f32, or the parameter's own where that was asked
/// for.
///
/// # Errors
/// For types that cannot be optimised.
pub(crate) fn state_dtype(name: &str, dtype: DType, optim_dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 => Ok(DType::F32),
        DType::BF16 | DType::F16 if dtype == optim_dtype => Ok(dtype),
        DType::BF16 | DType::F16 => Ok(DType::F32),
        other => Err(Error::config(
            "optimizer",
            format!("{name} is {other}; freeze it, or make it f32, bf16 or f16"),
        )),
    }
}

/// Refuses types that masters and moments cannot have.
///
/// # Errors
/// [`Error::Config`] with the reason.
pub(crate) fn check_optim_dtype(dtype: DType) -> Result<()> {
    let what = match dtype {
        DType::F32 | DType::BF16 => return Ok(()),
        DType::F16 => {
            "f16, in which squares of gradients below 2^-12 are 0; use f32, or bf16 weights"
                .to_owned()
        }
        other => format!("{other}; masters and moments are f32 or bf16"),
    };
    Err(Error::config("optim_dtype", what))
}

/// Refuses moments of a type of their own beside a state that has one already.
///
/// # Errors
/// [`Error::Config`] with the reason.
pub(crate) fn check_moments(moments: MomentType, optim_dtype: DType) -> Result<()> {
    if moments == MomentType::F32 || optim_dtype == DType::F32 {
        return Ok(());
    }
    let what = format!(
        "{moments}, and `optim_dtype` is {optim_dtype}, which makes moments {optim_dtype} too; set \
         one of them"
    );
    Err(Error::config("moments", what))
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
