//! Lion in one pass over memory, with the formulas of Chen et al., "Symbolic Discovery of
//! Optimization Algorithms" (2023).
//!
//! Per parameter, in f32, each operation rounded on its own:
//!
//! ```text
//! g = grad_scale * clip(grad)                 (negated when maximizing)
//! p = p * (1 - lr * weight_decay)
//! p = p - lr * sign(beta1 * m + (1 - beta1) * g)
//! m = beta2 * m + (1 - beta2) * g
//! ```
//!
//! The sign of a zero is 0. What depends on the hyperparameters alone is computed once, in f64, and
//! rounded to f32.

use half::{bf16, f16};

use super::finite::commit;
use super::simd::{
    GradFactors, GradReader, LANES, PassIsa, Simd, SlabElement, SlabPass, clamp, padded,
};
use super::{
    CHUNK, Floats, FloatsMut, StepSettings, any, check_at_least_zero, check_below_one, check_len,
    optional_chunks, with_slice,
};
use crate::cpu::threads::Threads;
use crate::error::Result;

const OP: &str = "lion";

/// Hyperparameters of Lion; the default is the authors'. Its steps are all of one length, so its
/// learning rate is three to ten times smaller than AdamW's, and its weight decay as much larger.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Share of the moment in the direction of a step, from 0 to below 1.
    pub beta1: f64,
    /// Decay of the moment, from 0 to below 1.
    pub beta2: f64,
    /// Goes straight into the parameter (decoupled), times the learning rate; at least 0.
    pub weight_decay: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for Lion {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
            maximize: false,
        }
    }
}

/// What one step of [`Lion`] reads and writes; all of one length.
#[derive(Debug)]
pub struct LionSlabs<'a> {
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// Parameters in full precision.
    pub master: &'a mut [f32],
    /// The moment.
    pub exp_avg: &'a mut [f32],
    /// Where the new parameters go as well, rounded; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

impl Lion {
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
        slabs: LionSlabs<'_>,
    ) -> Result<bool> {
        self.step_with(PassIsa::best(), threads, settings, slabs)
    }

    pub(super) fn step_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: LionSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        check_slabs(&slabs)?;
        let factors = self.factors(settings);
        let LionSlabs {
            grad,
            master,
            exp_avg,
            working,
        } = slabs;
        Ok(with_slice!(Floats, grad, grad => {
            let state = TypedLionSlabs { grad, master, exp_avg };
            match working {
                None => state.run::<f32>(isa, threads, factors, None),
                Some(FloatsMut::F32(working)) => state.run(isa, threads, factors, Some(working)),
                Some(FloatsMut::BF16(working)) => state.run::<bf16>(isa, threads, factors, Some(working)),
                Some(FloatsMut::F16(working)) => state.run::<f16>(isa, threads, factors, Some(working)),
            }
        }))
    }

    /// Refuses hyperparameters outside their range, as every step does.
    ///
    /// # Errors
    /// The hyperparameter and its range.
    pub fn check(&self) -> Result<()> {
        check_below_one(OP, "beta1", self.beta1)?;
        check_below_one(OP, "beta2", self.beta2)?;
        check_at_least_zero(OP, "weight_decay", self.weight_decay)
    }

    fn factors(&self, settings: StepSettings) -> LionFactors {
        let lr = settings.lr;
        LionFactors {
            grad: settings.grad_factors(self.maximize),
            keep: (1.0 - lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            lr: lr as f32,
        }
    }
}

fn check_slabs(slabs: &LionSlabs<'_>) -> Result<()> {
    let len = slabs.master.len();
    check_len(OP, "gradient", slabs.grad.len(), len)?;
    check_len(OP, "moment", slabs.exp_avg.len(), len)?;
    match &slabs.working {
        Some(working) => check_len(OP, "working", working.len(), len),
        None => Ok(()),
    }
}

/// What all parameters share in one step.
#[derive(Debug, Clone, Copy)]
struct LionFactors {
    grad: GradFactors,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    lr: f32,
}

/// The slabs with the gradient's type known.
struct TypedLionSlabs<'a, G> {
    grad: &'a [G],
    master: &'a mut [f32],
    exp_avg: &'a mut [f32],
}

impl<G: SlabElement> TypedLionSlabs<'_, G> {
    fn run<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        factors: LionFactors,
        working: Option<&mut [W]>,
    ) -> bool {
        let chunks = self
            .grad
            .chunks(CHUNK)
            .zip(self.master.chunks_mut(CHUNK))
            .zip(self.exp_avg.chunks_mut(CHUNK))
            .zip(optional_chunks(working))
            .map(|(((grad, master), exp_avg), working)| LionPass {
                state: TypedLionSlabs {
                    grad,
                    master,
                    exp_avg,
                },
                working,
                factors,
            });
        any(threads, chunks, |pass| isa.run(pass))
    }
}

/// One chunk.
struct LionPass<'a, G, W> {
    state: TypedLionSlabs<'a, G>,
    working: Option<&'a mut [W]>,
    factors: LionFactors,
}

impl<G: SlabElement, W: SlabElement> SlabPass for LionPass<'_, G, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = LionUpdate::new(s, self.factors);
        let state = self.state;
        let (grad, grad_rest) = state.grad.as_chunks();
        let (p, p_rest) = state.master.as_chunks_mut();
        let (m, m_rest) = state.exp_avg.as_chunks_mut();
        let (mut w, w_rest) = self.working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, ((grad, p), m)) in grad.iter().zip(p).zip(m).enumerate() {
            let w = w.as_mut().map(|w| &mut w[i]);
            kept |= update.block(LANES, grad, p, m, w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let (mut p, mut m) = (padded(p_rest), padded(m_rest));
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        kept |= update.block(len, &padded(grad_rest), &mut p, &mut m, w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        m_rest.copy_from_slice(&m[..len]);
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }
}

/// [`LionFactors`] in every lane.
#[derive(Clone, Copy)]
struct LionUpdate<S: Simd> {
    s: S,
    grad: GradReader<S>,
    keep: S::V,
    beta1: S::V,
    rest1: S::V,
    beta2: S::V,
    rest2: S::V,
    lr: S::V,
}

impl<S: Simd> LionUpdate<S> {
    #[inline(always)]
    fn new(s: S, f: LionFactors) -> Self {
        Self {
            s,
            grad: GradReader::new(s, f.grad),
            keep: s.splat(f.keep),
            beta1: s.splat(f.beta1),
            rest1: s.splat(f.rest1),
            beta2: s.splat(f.beta2),
            rest2: s.splat(f.rest2),
            lr: s.splat(f.lr),
        }
    }

    /// Updates one block, of which `live` elements count. Returns whether one kept its values
    /// because new ones were not finite.
    #[inline(always)]
    fn block<G: SlabElement, W: SlabElement>(
        &self,
        live: usize,
        grad: &[G; LANES],
        p: &mut [f32; LANES],
        m: &mut [f32; LANES],
        w: Option<&mut [W; LANES]>,
    ) -> bool {
        let s = self.s;
        let g = self.grad.read(grad);
        let (old, moment) = (s.load(p), s.load(m));
        let direction = s.add(s.mul(moment, self.beta1), s.mul(g, self.rest1));
        let change = s.mul(sign(s, direction), self.lr);
        let new = s.sub(s.mul(old, self.keep), change);
        let moment = s.add(s.mul(moment, self.beta2), s.mul(g, self.rest2));
        commit(s, live, [new, moment], [Some(p), Some(m)], w)
    }
}

/// -1, 0 or 1; a NaN stays one.
#[inline(always)]
fn sign<S: Simd>(s: S, x: S::V) -> S::V {
    // Twice, because the smallest f32 is 2^-149 and the largest factor is below 2^128.
    let huge = s.splat(2.0f32.powi(100));
    clamp(s, s.mul(s.mul(x, huge), huge), s.splat(1.0))
}
