//! Muon, with the formulas of `torch.optim.Muon`: momentum whose singular values are all made about
//! equal.
//!
//! Per matrix; several matrices in one parameter (more than two dimensions) are updated one by one:
//!
//! ```text
//! g = grad_scale * clip(grad)
//! m = momentum * m + (1 - momentum) * g
//! x = momentum * m + (1 - momentum) * g       (nesterov), or m
//! x = x / max(norm(x), eps)
//! repeat ns_steps times, (a, b, c) being ns_coefficients:
//!     s = x x^T                               (x^T x on the right where x is taller than wide)
//!     x = a x + (b s + c s s) x
//! p = p * (1 - lr * weight_decay) - lr * ratio * x
//! ```
//!
//! The iteration runs in f32, with the crate's own matrix products; PyTorch's runs in
//! bf16. Each of the `ns_steps` takes at most three times the multiplications of the product of
//! the matrix with its transpose. A step takes working memory of two matrices and two squares of the
//! shorter side, in f32.
//!
//! Refused: slabs that do not fit the matrices they are said to hold.
//!
//! # Invariants
//! - The same bits for any number of threads. Products fuse operations where the processor does, so
//!   bits may differ between instruction sets, unlike those of the other rules.
//! - A gradient that is not finite leaves its matrix and its momentum as they were: every element
//!   depends on all others.

use half::{bf16, f16};

use super::finite::commit;
use super::grads::squared_norm;
use super::matrices::Matrices;
use super::simd::{GradFactors, GradReader, LANES, PassIsa, Simd, SlabElement, SlabPass, padded};
use super::{
    CHUNK, Floats, FloatsMut, StepSettings, any, check_at_least_zero, check_below_one,
    check_finite, check_len, check_setting, for_each, optional_chunks, scale, with_slice,
};
use crate::cpu::gemm::{self, Mat, MatMut, Product};
use crate::cpu::threads::Threads;
use crate::error::{Error, Result};

const OP: &str = "muon";

/// More steps of the iteration would take longer than training them is worth; PyTorch's limit.
const MAX_NS_STEPS: u32 = 99;

/// Hyperparameters of Muon; the default is PyTorch's. It is for the matrices of hidden layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Decay of the momentum, from 0 to below 1.
    pub momentum: f64,
    /// Whether a step looks ahead along the momentum.
    pub nesterov: bool,
    /// Goes straight into the parameter (decoupled), times the learning rate; at least 0.
    pub weight_decay: f64,
    /// The least norm that a matrix is divided by; above 0.
    pub eps: f64,
    /// Steps of the Newton–Schulz iteration, from 1 to 99.
    pub ns_steps: u32,
    /// Its coefficients of the first, third and fifth power.
    pub ns_coefficients: (f64, f64, f64),
    /// How the learning rate follows the sizes of a matrix.
    pub adjust_lr: AdjustLr,
}

/// What [`Muon`] multiplies the learning rate with, by the sizes of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdjustLr {
    /// `sqrt(max(1, rows / cols))`, of Muon's author.
    #[default]
    Original,
    /// `0.2 * sqrt(max(rows, cols))`: updates are about as large as AdamW's, so that one learning
    /// rate and weight decay serves both.
    MatchRmsAdamW,
}

impl AdjustLr {
    fn ratio(self, matrices: Matrices) -> f64 {
        let (rows, cols) = (matrices.rows as f64, matrices.cols as f64);
        match self {
            Self::Original => (rows / cols).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(cols).sqrt(),
        }
    }
}

impl Default for Muon {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            eps: 1e-7,
            ns_steps: 5,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            adjust_lr: AdjustLr::Original,
        }
    }
}

/// What one step of [`Muon`] reads and writes; all of one length.
#[derive(Debug)]
pub struct MuonSlabs<'a> {
    /// How the elements are matrices.
    pub matrices: Matrices,
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// Parameters in full precision.
    pub master: &'a mut [f32],
    /// The momentum.
    pub momentum: &'a mut [f32],
    /// Where the new parameters go as well, rounded; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

impl Muon {
    /// One step. A matrix whose gradient is not finite keeps what it has, and so does an element
    /// whose new weight would not be finite; returns whether any did.
    ///
    /// # Errors
    /// For a hyperparameter outside its range and for slabs that do not fit together; nothing is
    /// written then. When memory for the iteration runs out, which leaves the matrices before as
    /// updated.
    pub fn step(
        &self,
        threads: &Threads,
        settings: StepSettings,
        mut slabs: MuonSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        check_slabs(&slabs)?;
        let size = slabs.matrices.rows * slabs.matrices.cols;
        if slabs.master.is_empty() {
            return Ok(false);
        }
        let factors = self.factors(settings, slabs.matrices);
        let mut scratch = NewtonSchulz::new(slabs.matrices)?;
        let mut kept = false;
        for matrix in 0..slabs.matrices.count {
            let range = matrix * size..(matrix + 1) * size;
            let grad = slabs.grad.range(range.clone());
            let momentum = &mut slabs.momentum[range.clone()];
            if !self.direction(threads, factors, grad, momentum, &mut scratch) {
                kept = true;
                continue;
            }
            let master = &mut slabs.master[range.clone()];
            let x = &scratch.x[..];
            kept |= match slabs.working.as_mut().map(|working| working.range(range)) {
                None => descend::<f32>(threads, factors, x, master, None),
                Some(FloatsMut::F32(w)) => descend(threads, factors, x, master, Some(w)),
                Some(FloatsMut::BF16(w)) => descend::<bf16>(threads, factors, x, master, Some(w)),
                Some(FloatsMut::F16(w)) => descend::<f16>(threads, factors, x, master, Some(w)),
            };
        }
        Ok(kept)
    }

    /// Refuses hyperparameters outside their range, as every step does.
    ///
    /// # Errors
    /// The hyperparameter and its range.
    pub fn check(&self) -> Result<()> {
        check_below_one(OP, "momentum", self.momentum)?;
        check_at_least_zero(OP, "weight_decay", self.weight_decay)?;
        check_setting(OP, "eps", self.eps, self.eps > 0.0, "finite and above 0")?;
        let steps = f64::from(self.ns_steps);
        let in_range = (1..=MAX_NS_STEPS).contains(&self.ns_steps);
        check_setting(OP, "ns_steps", steps, in_range, "from 1 to 99")?;
        let (a, b, c) = self.ns_coefficients;
        [a, b, c]
            .into_iter()
            .try_for_each(|x| check_finite(OP, "a coefficient of ns_coefficients", x))
    }

    fn factors(&self, settings: StepSettings, matrices: Matrices) -> MuonFactors {
        let lr = settings.lr;
        MuonFactors {
            grad: settings.grad_factors(false),
            momentum: self.momentum as f32,
            rest: (1.0 - self.momentum) as f32,
            nesterov: self.nesterov,
            keep: (1.0 - lr * self.weight_decay) as f32,
            step: (lr * self.adjust_lr.ratio(matrices)) as f32,
        }
    }

    /// Updates the momentum and leaves the direction of the step in `scratch.x`; false, and nothing
    /// is changed, when one of them would not be finite.
    fn direction(
        &self,
        threads: &Threads,
        factors: MuonFactors,
        grad: Floats<'_>,
        momentum: &mut [f32],
        scratch: &mut NewtonSchulz,
    ) -> bool {
        let isa = PassIsa::best();
        let NewtonSchulz { x, next, .. } = scratch;
        with_slice!(Floats, grad, grad => {
            let chunks = grad
                .chunks(CHUNK)
                .zip(momentum.chunks(CHUNK))
                .zip(x.chunks_mut(CHUNK))
                .zip(next.chunks_mut(CHUNK));
            for_each(threads, chunks, |(((grad, momentum), x), new_momentum)| {
                isa.run(MomentumPass { grad, momentum, x, new_momentum, factors });
            });
        });
        let squares = squared_norm(threads, Floats::F32(x));
        if !squares.is_finite() || !squared_norm(threads, Floats::F32(next)).is_finite() {
            return false;
        }
        momentum.copy_from_slice(next);
        let norm = squares.sqrt().max(self.eps);
        // Twice, because the inverse of a norm below 2^-126 would not be an f32.
        let root = (1.0 / norm.sqrt()) as f32;
        scale(threads, FloatsMut::F32(x), root);
        scale(threads, FloatsMut::F32(x), root);
        (0..self.ns_steps).for_each(|_| scratch.iterate(threads, self.ns_coefficients));
        true
    }
}

fn check_slabs(slabs: &MuonSlabs<'_>) -> Result<()> {
    let len = slabs.master.len();
    check_len(OP, "parameter", len, slabs.matrices.numel())?;
    check_len(OP, "gradient", slabs.grad.len(), len)?;
    check_len(OP, "momentum", slabs.momentum.len(), len)?;
    match &slabs.working {
        Some(working) => check_len(OP, "working", working.len(), len),
        None => Ok(()),
    }
}

/// What all matrices of a parameter share in one step.
#[derive(Debug, Clone, Copy)]
struct MuonFactors {
    grad: GradFactors,
    momentum: f32,
    rest: f32,
    nesterov: bool,
    keep: f32,
    step: f32,
}

/// The iteration on one matrix.
struct NewtonSchulz {
    matrices: Matrices,
    /// The matrix.
    x: Vec<f32>,
    /// Where the next one is made.
    next: Vec<f32>,
    /// `s` and `b s + c s s`, square with the shorter side.
    square: Vec<f32>,
    update: Vec<f32>,
}

impl NewtonSchulz {
    fn new(matrices: Matrices) -> Result<Self> {
        let Matrices { rows, cols, .. } = matrices;
        let side = rows.min(cols);
        Ok(Self {
            matrices,
            x: zeros(rows * cols)?,
            next: zeros(rows * cols)?,
            square: zeros(side * side)?,
            update: zeros(side * side)?,
        })
    }

    /// One step: `x` becomes `a x + (b s + c s s) x`.
    fn iterate(&mut self, threads: &Threads, (a, b, c): (f64, f64, f64)) {
        let Matrices { rows, cols, .. } = self.matrices;
        let side = rows.min(cols);
        let x = Operand::new(&self.x, cols);
        let tall = rows > cols;
        let (left, right) = if tall {
            (x.transposed(), x)
        } else {
            (x, x.transposed())
        };
        let square_sizes = [side, side, rows.max(cols)];
        multiply(
            threads,
            square_sizes,
            left,
            right,
            &mut self.square,
            (1.0, 0.0),
        );
        self.update.copy_from_slice(&self.square);
        let square = Operand::new(&self.square, side);
        let update_sizes = [side, side, side];
        multiply(
            threads,
            update_sizes,
            square,
            square,
            &mut self.update,
            (c, b),
        );
        self.next.copy_from_slice(&self.x);
        let update = Operand::new(&self.update, side);
        // Transposed on the right, so that both forms give the same bits for a matrix and its
        // transpose.
        let (left, right) = if tall {
            (x, update.transposed())
        } else {
            (update, x)
        };
        multiply(
            threads,
            [rows, cols, side],
            left,
            right,
            &mut self.next,
            (1.0, a),
        );
        std::mem::swap(&mut self.x, &mut self.next);
    }
}

/// Zeros, or an error where the system has no memory for them.
fn zeros(len: usize) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .map_err(|_| Error::HostMemory {
            what: "the iteration of Muon",
            need: crate::bytes::Bytes((len * size_of::<f32>()) as u64),
            cause: std::io::ErrorKind::OutOfMemory.into(),
        })?;
    values.resize(len, 0.0);
    Ok(values)
}

/// A matrix in a slab, by rows or by columns.
#[derive(Clone, Copy)]
struct Operand<'a> {
    values: &'a [f32],
    row: usize,
    col: usize,
}

impl<'a> Operand<'a> {
    /// By rows of `width` elements.
    fn new(values: &'a [f32], width: usize) -> Self {
        Self {
            values,
            row: width,
            col: 1,
        }
    }

    fn transposed(self) -> Self {
        Self {
            values: self.values,
            row: self.col,
            col: self.row,
        }
    }

    /// Panics when an element of `[rows, cols]` lies outside the slab.
    fn mat(self, rows: usize, cols: usize) -> Mat<f32> {
        let last = (rows - 1) * self.row + (cols - 1) * self.col;
        assert!(last < self.values.len(), "{OP}: an operand is too short");
        Mat {
            ptr: self.values.as_ptr(),
            row: self.row as isize,
            col: self.col as isize,
        }
    }
}

/// `into = alpha * left right + beta * into`, with left `[m, k]` and right `[k, n]`, none of them 0.
fn multiply(
    threads: &Threads,
    [m, n, k]: [usize; 3],
    left: Operand<'_>,
    right: Operand<'_>,
    into: &mut [f32],
    (alpha, beta): (f64, f64),
) {
    assert_eq!(into.len(), m * n, "{OP}: a result has the wrong size");
    let product = Product::<f32, f32> {
        m,
        n,
        k,
        a: left.mat(m, k),
        b: right.mat(k, n),
        c: MatMut {
            ptr: into.as_mut_ptr(),
            row: n as isize,
        },
        bias: None,
        alpha,
        beta,
    };
    // SAFETY:
    // - every element of the operands exists: `Operand::mat` checked the last one;
    // - `into` holds m·n elements (asserted above) and is borrowed mutably, so that it overlaps no
    //   operand and nothing else touches it during the call.
    unsafe { gemm::gemm(threads, &product) }
}

/// The new momentum of one chunk, and the matrix to be orthogonalised.
struct MomentumPass<'a, G> {
    grad: &'a [G],
    momentum: &'a [f32],
    x: &'a mut [f32],
    new_momentum: &'a mut [f32],
    factors: MuonFactors,
}

impl<G: SlabElement> SlabPass for MomentumPass<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let update = MomentumUpdate::new(s, self.factors);
        let (grad, grad_rest) = self.grad.as_chunks();
        let (m, m_rest) = self.momentum.as_chunks();
        let (x, x_rest) = self.x.as_chunks_mut();
        let (new, new_rest) = self.new_momentum.as_chunks_mut();
        for (((grad, m), x), new) in grad.iter().zip(m).zip(x).zip(new) {
            update.block(grad, m, new, x);
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let (mut new, mut x) = ([0.0; LANES], [0.0; LANES]);
        update.block(&padded(grad_rest), &padded(m_rest), &mut new, &mut x);
        new_rest.copy_from_slice(&new[..new_rest.len()]);
        x_rest.copy_from_slice(&x[..x_rest.len()]);
    }
}

/// What [`MomentumPass`] needs of [`MuonFactors`], in every lane.
#[derive(Clone, Copy)]
struct MomentumUpdate<S: Simd> {
    s: S,
    grad: GradReader<S>,
    momentum: S::V,
    rest: S::V,
    nesterov: bool,
}

impl<S: Simd> MomentumUpdate<S> {
    #[inline(always)]
    fn new(s: S, f: MuonFactors) -> Self {
        Self {
            s,
            grad: GradReader::new(s, f.grad),
            momentum: s.splat(f.momentum),
            rest: s.splat(f.rest),
            nesterov: f.nesterov,
        }
    }

    #[inline(always)]
    fn block<G: SlabElement>(
        &self,
        grad: &[G; LANES],
        momentum: &[f32; LANES],
        new: &mut [f32; LANES],
        x: &mut [f32; LANES],
    ) {
        let s = self.s;
        let g = s.mul(self.grad.read(grad), self.rest);
        let momentum = s.add(s.mul(s.load(momentum), self.momentum), g);
        s.store(momentum, new);
        if self.nesterov {
            s.store(s.add(s.mul(momentum, self.momentum), g), x);
        } else {
            s.store(momentum, x);
        }
    }
}

/// Moves weights against `x`; whether some kept their value.
fn descend<W: SlabElement>(
    threads: &Threads,
    factors: MuonFactors,
    x: &[f32],
    master: &mut [f32],
    working: Option<&mut [W]>,
) -> bool {
    let isa = PassIsa::best();
    let chunks = x
        .chunks(CHUNK)
        .zip(master.chunks_mut(CHUNK))
        .zip(optional_chunks(working));
    any(threads, chunks, |((x, master), working)| {
        isa.run(DescendPass {
            x,
            master,
            working,
            factors,
        })
    })
}

/// One chunk of [`descend`].
struct DescendPass<'a, W> {
    x: &'a [f32],
    master: &'a mut [f32],
    working: Option<&'a mut [W]>,
    factors: MuonFactors,
}

impl<W: SlabElement> SlabPass for DescendPass<'_, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let factors = (s.splat(self.factors.keep), s.splat(self.factors.step));
        let (x, x_rest) = self.x.as_chunks();
        let (p, p_rest) = self.master.as_chunks_mut();
        let (mut w, w_rest) = self.working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, (x, p)) in x.iter().zip(p).enumerate() {
            let w = w.as_mut().map(|w| &mut w[i]);
            kept |= descend_block(s, factors, LANES, x, p, w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let mut p = padded(p_rest);
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        kept |= descend_block(s, factors, len, &padded(x_rest), &mut p, w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }
}

/// One block, of which `live` elements count; the factors are `keep` and `step`.
#[inline(always)]
fn descend_block<S: Simd, W: SlabElement>(
    s: S,
    (keep, step): (S::V, S::V),
    live: usize,
    x: &[f32; LANES],
    p: &mut [f32; LANES],
    w: Option<&mut [W; LANES]>,
) -> bool {
    let new = s.sub(s.mul(s.load(p), keep), s.mul(s.load(x), step));
    commit(s, live, [new], [Some(p)], w)
}
