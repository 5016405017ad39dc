//! Adam and AdamW in one pass over memory, with the formulas of `torch.optim.Adam` and `AdamW`.
//!
//! Per parameter, in f32, each operation rounded on its own, `t` counting from 1:
//!
//! ```text
//! g = grad_scale * clip(grad)                 (negated when maximizing)
//! p = p * (1 - lr * weight_decay)             (decoupled) or
//! g = g + weight_decay * p                    (into the gradient)
//! m = beta1 * m + (1 - beta1) * g
//! v = beta2 * v + ((1 - beta2) * g) * g
//! x = max(x, v), or v without amsgrad
//! p = p - (lr / (1 - beta1^t) * m) / (sqrt(x) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! What depends on the hyperparameters alone is computed once, in f64, and rounded to f32; the
//! division by `sqrt(1 - beta2^t)` is a multiplication by its inverse.

use half::{bf16, f16};

use super::finite::commit;
use super::simd::{GradFactors, GradReader, LANES, PassIsa, Simd, SlabElement, SlabPass, padded};
use super::{
    CHUNK, Floats, FloatsMut, StepSettings, any, check_at_least_zero, check_below_one, check_len,
    optional_chunks, with_slice,
};
use crate::cpu::threads::Threads;
use crate::error::{Error, Result};

pub(super) const OP: &str = "adam";

/// Hyperparameters of Adam; the default is PyTorch's, without weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Decay of the first moment, from 0 to below 1.
    pub beta1: f64,
    /// Decay of the second moment, from 0 to below 1.
    pub beta2: f64,
    /// Added to the denominator, at least 0.
    pub eps: f64,
    /// Goes into the gradient, as an L2 penalty; at least 0.
    pub weight_decay: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
    /// Divide by the largest second moment seen; needs one more slab.
    pub amsgrad: bool,
}

/// Hyperparameters of AdamW; the default is PyTorch's, with a weight decay of 0.01.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment, from 0 to below 1.
    pub beta1: f64,
    /// Decay of the second moment, from 0 to below 1.
    pub beta2: f64,
    /// Added to the denominator, at least 0.
    pub eps: f64,
    /// Goes straight into the parameter (decoupled), times the learning rate; at least 0.
    pub weight_decay: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
    /// Divide by the largest second moment seen; needs one more slab.
    pub amsgrad: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            maximize: false,
            amsgrad: false,
        }
    }
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            maximize: false,
            amsgrad: false,
        }
    }
}

impl Adam {
    /// One step. An element whose new weight or moment would not be finite keeps what it has;
    /// returns whether any did.
    ///
    /// # Errors
    /// For a hyperparameter outside its range and for slabs that do not fit together; nothing is
    /// written then.
    pub fn step(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: AdamSlabs<'_>,
    ) -> Result<bool> {
        AdamRule::from(*self).step_with(PassIsa::best(), threads, settings, slabs)
    }

    /// Refuses hyperparameters outside their range, as every step does.
    ///
    /// # Errors
    /// The hyperparameter and its range.
    pub fn check(&self) -> Result<()> {
        AdamRule::from(*self).check()
    }
}

impl AdamW {
    /// One step. An element whose new weight or moment would not be finite keeps what it has;
    /// returns whether any did.
    ///
    /// # Errors
    /// For a hyperparameter outside its range and for slabs that do not fit together; nothing is
    /// written then.
    pub fn step(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: AdamSlabs<'_>,
    ) -> Result<bool> {
        AdamRule::from(*self).step_with(PassIsa::best(), threads, settings, slabs)
    }

    /// Refuses hyperparameters outside their range, as every step does.
    ///
    /// # Errors
    /// The hyperparameter and its range.
    pub fn check(&self) -> Result<()> {
        AdamRule::from(*self).check()
    }
}

/// What one step of [`Adam`] or [`AdamW`] reads and writes; all of one length.
#[derive(Debug)]
pub struct AdamSlabs<'a> {
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// Parameters in full precision.
    pub master: &'a mut [f32],
    /// First moment.
    pub exp_avg: &'a mut [f32],
    /// Second moment.
    pub exp_avg_sq: &'a mut [f32],
    /// Largest second moment seen, with `amsgrad` and only then.
    pub max_exp_avg_sq: Option<&'a mut [f32]>,
    /// Where the new parameters go as well, rounded; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

/// What both have in common, which is all but where weight decay enters.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdamRule {
    pub(super) settings: AdamW,
    /// Whether weight decay goes straight into the parameter.
    pub(super) decoupled: bool,
}

impl From<AdamW> for AdamRule {
    fn from(settings: AdamW) -> Self {
        Self {
            settings,
            decoupled: true,
        }
    }
}

impl From<Adam> for AdamRule {
    fn from(adam: Adam) -> Self {
        let Adam {
            beta1,
            beta2,
            eps,
            weight_decay,
            maximize,
            amsgrad,
        } = adam;
        Self {
            settings: AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
                maximize,
                amsgrad,
            },
            decoupled: false,
        }
    }
}

impl AdamRule {
    pub(super) fn step_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: AdamSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        self.check_slabs(&slabs)?;
        let factors = self.factors(settings);
        let AdamSlabs {
            grad,
            master,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq,
            working,
        } = slabs;
        Ok(with_slice!(Floats, grad, grad => {
            let state = TypedAdamSlabs { grad, master, exp_avg, exp_avg_sq, max_exp_avg_sq };
            match working {
                None => state.run::<f32>(isa, threads, factors, None),
                Some(FloatsMut::F32(working)) => state.run(isa, threads, factors, Some(working)),
                Some(FloatsMut::BF16(working)) => state.run::<bf16>(isa, threads, factors, Some(working)),
                Some(FloatsMut::F16(working)) => state.run::<f16>(isa, threads, factors, Some(working)),
            }
        }))
    }

    pub(super) fn check(&self) -> Result<()> {
        let AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } = self.settings;
        check_below_one(OP, "beta1", beta1)?;
        check_below_one(OP, "beta2", beta2)?;
        check_at_least_zero(OP, "eps", eps)?;
        check_at_least_zero(OP, "weight_decay", weight_decay)
    }

    fn check_slabs(&self, slabs: &AdamSlabs<'_>) -> Result<()> {
        let len = slabs.master.len();
        check_len(OP, "gradient", slabs.grad.len(), len)?;
        check_len(OP, "first moment", slabs.exp_avg.len(), len)?;
        check_len(OP, "second moment", slabs.exp_avg_sq.len(), len)?;
        if let Some(working) = &slabs.working {
            check_len(OP, "working", working.len(), len)?;
        }
        match (&slabs.max_exp_avg_sq, self.settings.amsgrad) {
            (Some(max), true) => check_len(OP, "largest second moment", max.len(), len),
            (None, false) => Ok(()),
            (None, true) => Err(Error::invalid(
                OP,
                "amsgrad needs a slab for the largest second moment",
            )),
            (Some(_), false) => Err(Error::invalid(
                OP,
                "a slab for the largest second moment is of use with amsgrad only",
            )),
        }
    }

    pub(super) fn factors(&self, step_settings: StepSettings) -> AdamFactors {
        let StepSettings { step, lr, .. } = step_settings;
        let AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
            maximize,
            ..
        } = self.settings;
        let (keep, penalty) = if self.decoupled {
            (1.0 - lr * weight_decay, 0.0)
        } else {
            (1.0, weight_decay)
        };
        AdamFactors {
            grad: step_settings.grad_factors(maximize),
            keep: keep as f32,
            penalty: penalty as f32,
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            step: (lr / (1.0 - power(beta1, step))) as f32,
            root: (1.0 / (1.0 - power(beta2, step)).sqrt()) as f32,
            eps: eps as f32,
        }
    }
}

/// `base` to the `exponent`, by multiplications alone: the same bits on every platform.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            product *= base;
        }
        base *= base;
        exponent /= 2;
    }
    product
}

/// What all parameters share in one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdamFactors {
    grad: GradFactors,
    keep: f32,
    /// 0 when weight decay does not go through the gradient.
    penalty: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step: f32,
    root: f32,
    eps: f32,
}

/// The slabs with the gradient's type known.
struct TypedAdamSlabs<'a, G> {
    grad: &'a [G],
    master: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    max_exp_avg_sq: Option<&'a mut [f32]>,
}

impl<G: SlabElement> TypedAdamSlabs<'_, G> {
    fn run<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        factors: AdamFactors,
        working: Option<&mut [W]>,
    ) -> bool {
        let chunks = self
            .grad
            .chunks(CHUNK)
            .zip(self.master.chunks_mut(CHUNK))
            .zip(self.exp_avg.chunks_mut(CHUNK))
            .zip(self.exp_avg_sq.chunks_mut(CHUNK))
            .zip(optional_chunks(self.max_exp_avg_sq))
            .zip(optional_chunks(working))
            .map(
                |(((((grad, master), exp_avg), exp_avg_sq), max_exp_avg_sq), working)| AdamPass {
                    state: TypedAdamSlabs {
                        grad,
                        master,
                        exp_avg,
                        exp_avg_sq,
                        max_exp_avg_sq,
                    },
                    working,
                    factors,
                },
            );
        any(threads, chunks, |pass| isa.run(pass))
    }
}

/// One chunk.
struct AdamPass<'a, G, W> {
    state: TypedAdamSlabs<'a, G>,
    working: Option<&'a mut [W]>,
    factors: AdamFactors,
}

impl<G: SlabElement, W: SlabElement> SlabPass for AdamPass<'_, G, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = AdamUpdate::new(s, self.factors);
        let state = self.state;
        let (grad, grad_rest) = state.grad.as_chunks();
        let (p, p_rest) = state.master.as_chunks_mut();
        let (m, m_rest) = state.exp_avg.as_chunks_mut();
        let (v, v_rest) = state.exp_avg_sq.as_chunks_mut();
        let (mut x, x_rest) = state.max_exp_avg_sq.map(|x| x.as_chunks_mut()).unzip();
        let (mut w, w_rest) = self.working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, (((grad, p), m), v)) in grad.iter().zip(p).zip(m).zip(v).enumerate() {
            let (x, w) = (x.as_mut().map(|x| &mut x[i]), w.as_mut().map(|w| &mut w[i]));
            kept |= update.block(LANES, grad, AdamBlock { p, m, v, x }, w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let (mut p, mut m, mut v) = (padded(p_rest), padded(m_rest), padded(v_rest));
        let mut x = x_rest.as_deref().map(padded);
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        let state = AdamBlock {
            p: &mut p,
            m: &mut m,
            v: &mut v,
            x: x.as_mut(),
        };
        kept |= update.block(len, &padded(grad_rest), state, w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        m_rest.copy_from_slice(&m[..len]);
        v_rest.copy_from_slice(&v[..len]);
        if let (Some(rest), Some(x)) = (x_rest, x) {
            rest.copy_from_slice(&x[..len]);
        }
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }
}

/// Weights and moments of one block, the largest second moment with `amsgrad` only.
pub(super) struct AdamBlock<'a> {
    pub(super) p: &'a mut [f32; LANES],
    pub(super) m: &'a mut [f32; LANES],
    pub(super) v: &'a mut [f32; LANES],
    pub(super) x: Option<&'a mut [f32; LANES]>,
}

/// [`AdamFactors`] in every lane.
#[derive(Clone, Copy)]
pub(super) struct AdamUpdate<S: Simd> {
    pub(super) s: S,
    with_penalty: bool,
    grad: GradReader<S>,
    keep: S::V,
    penalty: S::V,
    beta1: S::V,
    rest1: S::V,
    beta2: S::V,
    rest2: S::V,
    step: S::V,
    root: S::V,
    eps: S::V,
}

impl<S: Simd> AdamUpdate<S> {
    #[inline(always)]
    pub(super) fn new(s: S, f: AdamFactors) -> Self {
        Self {
            s,
            with_penalty: f.penalty != 0.0,
            grad: GradReader::new(s, f.grad),
            keep: s.splat(f.keep),
            penalty: s.splat(f.penalty),
            beta1: s.splat(f.beta1),
            rest1: s.splat(f.rest1),
            beta2: s.splat(f.beta2),
            rest2: s.splat(f.rest2),
            step: s.splat(f.step),
            root: s.splat(f.root),
            eps: s.splat(f.eps),
        }
    }

    /// Updates one block, of which `live` elements count. Returns whether one kept its values
    /// because new ones were not finite.
    #[inline(always)]
    pub(super) fn block<G: SlabElement, W: SlabElement>(
        &self,
        live: usize,
        grad: &[G; LANES],
        state: AdamBlock<'_>,
        w: Option<&mut [W; LANES]>,
    ) -> bool {
        let s = self.s;
        let AdamBlock { p, m, v, x } = state;
        let largest = x.as_deref().map(|x| s.load(x));
        let new = self.values(s.load(p), grad, s.load(m), s.load(v), largest);
        commit(s, live, new, [Some(p), Some(m), Some(v), x], w)
    }

    /// The new weights, first and second moments and largest second moments, which are the second
    /// ones where there is no slab for them.
    #[inline(always)]
    pub(super) fn values<G: SlabElement>(
        &self,
        old: S::V,
        grad: &[G; LANES],
        m: S::V,
        v: S::V,
        largest: Option<S::V>,
    ) -> [S::V; 4] {
        let s = self.s;
        let mut g = self.read(grad);
        if self.with_penalty {
            g = s.add(g, s.mul(old, self.penalty));
        }
        let [first, second] = self.moments(g, [m, v]);
        let largest = match largest {
            Some(largest) => s.max(largest, second),
            None => second,
        };
        let denominator = s.add(s.mul(s.sqrt(largest), self.root), self.eps);
        let change = s.div(s.mul(first, self.step), denominator);
        let new = s.sub(s.mul(old, self.keep), change);
        [new, first, second, largest]
    }

    /// Gradients as the formulas take them, without a penalty.
    #[inline(always)]
    pub(super) fn read<G: SlabElement>(&self, grad: &[G; LANES]) -> S::V {
        self.grad.read(grad)
    }

    /// The new moments.
    #[inline(always)]
    pub(super) fn moments(&self, g: S::V, [m, v]: [S::V; 2]) -> [S::V; 2] {
        let s = self.s;
        let first = s.add(s.mul(m, self.beta1), s.mul(g, self.rest1));
        let second = s.add(s.mul(v, self.beta2), s.mul(s.mul(g, self.rest2), g));
        [first, second]
    }
}
