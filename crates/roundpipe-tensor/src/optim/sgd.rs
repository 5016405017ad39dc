//! Gradient descent in one pass over memory, with the formulas of `torch.optim.SGD`.
//!
//! Per parameter, in f32, each operation rounded on its own:
//!
//! ```text
//! g = grad_scale * clip(grad)                 (negated when maximizing)
//! g = g + weight_decay * p
//! b = momentum * b + (1 - dampening) * g      (in the first step: b = g)
//! g = g + momentum * b                        (nesterov) or g = b
//! p = p - lr * g
//! ```

use half::{bf16, f16};

use super::finite::commit;
use super::simd::{GradFactors, GradReader, LANES, PassIsa, Simd, SlabElement, SlabPass, padded};
use super::{
    CHUNK, Floats, FloatsMut, StepSettings, any, check_at_least_zero, check_finite, check_len,
    optional_chunks, with_slice,
};
use crate::cpu::threads::Threads;
use crate::error::{Error, Result};

const OP: &str = "sgd";

/// Hyperparameters of gradient descent; the default is PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// At least 0; needs one more slab unless it is 0.
    pub momentum: f64,
    /// Share of the gradient kept out of the momentum.
    pub dampening: f64,
    /// An L2 penalty, at least 0.
    pub weight_decay: f64,
    /// Look ahead along the momentum; needs momentum, and no dampening.
    pub nesterov: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }
}

/// What one step of [`Sgd`] reads and writes; all of one length.
#[derive(Debug)]
pub struct SgdSlabs<'a> {
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// Parameters in full precision.
    pub master: &'a mut [f32],
    /// The running direction, with momentum and only then; what it holds before step 1 is not read.
    pub momentum: Option<&'a mut [f32]>,
    /// Where the new parameters go as well, rounded; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

impl Sgd {
    /// One step. An element whose new weight or momentum would not be finite keeps what it has;
    /// returns whether any did.
    ///
    /// # Errors
    /// For a hyperparameter outside its range and for slabs that do not fit together; nothing is
    /// written then.
    pub fn step(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: SgdSlabs<'_>,
    ) -> Result<bool> {
        self.step_with(PassIsa::best(), threads, settings, slabs)
    }

    pub(super) fn step_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: SgdSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        self.check_slabs(&slabs)?;
        let factors = self.factors(settings);
        let SgdSlabs {
            grad,
            master,
            momentum,
            working,
        } = slabs;
        Ok(with_slice!(Floats, grad, grad => {
            let state = TypedSgdSlabs { grad, master, momentum };
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
        check_at_least_zero(OP, "momentum", self.momentum)?;
        check_finite(OP, "dampening", self.dampening)?;
        check_at_least_zero(OP, "weight_decay", self.weight_decay)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::invalid(
                OP,
                "nesterov needs momentum above 0 and dampening 0",
            ));
        }
        Ok(())
    }

    fn check_slabs(&self, slabs: &SgdSlabs<'_>) -> Result<()> {
        let len = slabs.master.len();
        check_len(OP, "gradient", slabs.grad.len(), len)?;
        if let Some(working) = &slabs.working {
            check_len(OP, "working", working.len(), len)?;
        }
        match (&slabs.momentum, self.momentum != 0.0) {
            (Some(momentum), true) => check_len(OP, "momentum", momentum.len(), len),
            (None, false) => Ok(()),
            (None, true) => Err(Error::invalid(OP, "momentum needs a slab of its own")),
            (Some(_), false) => Err(Error::invalid(
                OP,
                "a momentum slab is of no use with momentum 0",
            )),
        }
    }

    fn factors(&self, settings: StepSettings) -> SgdFactors {
        let StepSettings { step, lr, .. } = settings;
        SgdFactors {
            first: step == 1,
            nesterov: self.nesterov,
            grad: settings.grad_factors(self.maximize),
            penalty: self.weight_decay as f32,
            momentum: self.momentum as f32,
            rest: (1.0 - self.dampening) as f32,
            lr: lr as f32,
        }
    }
}

/// What all parameters share in one step.
#[derive(Debug, Clone, Copy)]
struct SgdFactors {
    first: bool,
    nesterov: bool,
    grad: GradFactors,
    penalty: f32,
    momentum: f32,
    rest: f32,
    lr: f32,
}

/// The slabs with the gradient's type known.
struct TypedSgdSlabs<'a, G> {
    grad: &'a [G],
    master: &'a mut [f32],
    momentum: Option<&'a mut [f32]>,
}

impl<G: SlabElement> TypedSgdSlabs<'_, G> {
    fn run<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        factors: SgdFactors,
        working: Option<&mut [W]>,
    ) -> bool {
        let chunks = self
            .grad
            .chunks(CHUNK)
            .zip(self.master.chunks_mut(CHUNK))
            .zip(optional_chunks(self.momentum))
            .zip(optional_chunks(working))
            .map(|(((grad, master), momentum), working)| SgdPass {
                state: TypedSgdSlabs {
                    grad,
                    master,
                    momentum,
                },
                working,
                factors,
            });
        any(threads, chunks, |pass| isa.run(pass))
    }
}

/// One chunk.
struct SgdPass<'a, G, W> {
    state: TypedSgdSlabs<'a, G>,
    working: Option<&'a mut [W]>,
    factors: SgdFactors,
}

impl<G: SlabElement, W: SlabElement> SlabPass for SgdPass<'_, G, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = SgdUpdate::new(s, self.factors);
        let state = self.state;
        let (grad, grad_rest) = state.grad.as_chunks();
        let (p, p_rest) = state.master.as_chunks_mut();
        let (mut b, b_rest) = state.momentum.map(|b| b.as_chunks_mut()).unzip();
        let (mut w, w_rest) = self.working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, (grad, p)) in grad.iter().zip(p).enumerate() {
            let (b, w) = (b.as_mut().map(|b| &mut b[i]), w.as_mut().map(|w| &mut w[i]));
            kept |= update.block(LANES, grad, p, b, w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let (mut p, mut b) = (padded(p_rest), b_rest.as_deref().map(padded));
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        kept |= update.block(len, &padded(grad_rest), &mut p, b.as_mut(), w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        if let (Some(rest), Some(b)) = (b_rest, b) {
            rest.copy_from_slice(&b[..len]);
        }
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }
}

/// [`SgdFactors`] in every lane.
#[derive(Clone, Copy)]
struct SgdUpdate<S: Simd> {
    s: S,
    first: bool,
    nesterov: bool,
    with_penalty: bool,
    grad: GradReader<S>,
    penalty: S::V,
    momentum: S::V,
    rest: S::V,
    lr: S::V,
}

impl<S: Simd> SgdUpdate<S> {
    #[inline(always)]
    fn new(s: S, f: SgdFactors) -> Self {
        Self {
            s,
            first: f.first,
            nesterov: f.nesterov,
            with_penalty: f.penalty != 0.0,
            grad: GradReader::new(s, f.grad),
            penalty: s.splat(f.penalty),
            momentum: s.splat(f.momentum),
            rest: s.splat(f.rest),
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
        mut b: Option<&mut [f32; LANES]>,
        w: Option<&mut [W; LANES]>,
    ) -> bool {
        let s = self.s;
        let old = s.load(p);
        let mut g = self.grad.read(grad);
        if self.with_penalty {
            g = s.add(g, s.mul(old, self.penalty));
        }
        let mut direction = g;
        if let Some(b) = &mut b {
            if self.first {
                // What lies there means nothing yet, and an element that keeps its weight would
                // keep it.
                **b = [0.0; LANES];
            } else {
                direction = s.add(s.mul(s.load(b), self.momentum), s.mul(g, self.rest));
            }
            g = if self.nesterov {
                s.add(g, s.mul(direction, self.momentum))
            } else {
                direction
            };
        }
        let new = s.sub(old, s.mul(g, self.lr));
        commit(s, live, [new, direction], [Some(p), b], w)
    }
}
