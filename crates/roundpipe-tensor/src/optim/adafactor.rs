//! Adafactor, with the formulas of `torch.optim.Adafactor`.
//!
//! A matrix keeps the means of its squared gradients by row and by column instead of one number per
//! element; several matrices in one parameter (more than two dimensions) have their own each. A
//! vector keeps one number per element. Per parameter, `t` counting from 1, `w = t^beta2_decay`:
//!
//! ```text
//! g = grad_scale * clip(grad)                         (negated when maximizing)
//! a = max(eps2, rms(p)) * min(lr, 1 / sqrt(t))
//! p = p * (1 - lr * weight_decay)
//! r = r + w * (mean of g^2 by row - r)                (a matrix)
//! c = c + w * (mean of g^2 by column - c)
//! v = r * c / max(mean(r), eps1)
//! v = (1 - w) * v + w * g^2                           (a vector)
//! u = g / sqrt(max(v, eps1^2))
//! p = p - a / max(1, rms(u) / d) * u
//! ```
//!
//! Means and root mean squares are over the whole parameter, except for those of `r` and `c`, which
//! are over one matrix. They are summed in f64, in an order that the sizes give; elements are
//! computed in f32, each operation rounded on its own. A step reads the gradient three times: for
//! the means, for `rms(u)` and for the update.
//!
//! Refused: slabs that do not fit the matrices they are said to hold.
//!
//! # Invariants
//! - The same bits for any number of threads and any instruction set.
//! - A gradient that is not finite, or whose squares are not finite in f32, leaves the whole
//!   parameter and its state as they were: every element depends on all others.

use half::{bf16, f16};

use super::finite::commit;
use super::grads::squared_norm_with;
use super::matrices::Matrices;
use super::simd::{GradFactors, GradReader, LANES, PassIsa, Simd, SlabElement, SlabPass, padded};
use super::{
    CHUNK, Floats, FloatsMut, StepSettings, any, check_at_least_zero, check_len, check_setting,
    for_each, optional_chunks, with_slice,
};
use crate::cpu::threads::Threads;
use crate::error::Result;

const OP: &str = "adafactor";

/// Blocks of columns whose sums are in registers at one time.
const TILE: usize = 4;

/// Most tasks that sum the squares of one matrix: each has sums of its own for every column.
const MAX_SUM_TASKS: usize = 64;

/// Hyperparameters of Adafactor; the default is PyTorch's. Its learning rate is relative to the
/// size of the weights, and PyTorch's default for it is 0.01.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// Step `t` has the weight `t^beta2_decay` in the means of squares; at most 0.
    pub beta2_decay: f64,
    /// The least root of a second moment; above 0. `None` is the epsilon of f32, 2^-23, in which
    /// elements are computed.
    pub eps1: Option<f64>,
    /// The least size of weights that the learning rate is relative to; at least 0.
    pub eps2: f64,
    /// The largest root mean square of an update before the learning rate; at least 1.
    pub d: f64,
    /// Goes straight into the parameter (decoupled), times the learning rate; at least 0.
    pub weight_decay: f64,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            beta2_decay: -0.8,
            eps1: None,
            eps2: 1e-3,
            d: 1.0,
            weight_decay: 0.0,
            maximize: false,
        }
    }
}

/// What one step of [`Adafactor`] reads and writes.
#[derive(Debug)]
pub struct AdafactorSlabs<'a> {
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// Parameters in full precision.
    pub master: &'a mut [f32],
    /// The means of squared gradients.
    pub second: SecondMoment<'a>,
    /// Where the new parameters go as well, rounded; `None` when `master` is the working slab.
    pub working: Option<FloatsMut<'a>>,
}

/// The means of squared gradients that [`Adafactor`] keeps.
#[derive(Debug)]
pub enum SecondMoment<'a> {
    /// One per row and one per column of each matrix, the matrices one after another.
    Factored {
        /// How the parameter's elements are matrices.
        matrices: Matrices,
        /// `count * rows`.
        by_row: &'a mut [f32],
        /// `count * cols`.
        by_col: &'a mut [f32],
    },
    /// One per element.
    Full(&'a mut [f32]),
}

impl Adafactor {
    /// One step. A gradient that is not finite leaves everything as it is, and so does an element
    /// whose new weight would not be finite; returns whether that happened.
    ///
    /// # Errors
    /// For a hyperparameter outside its range and for slabs that do not fit together; nothing is
    /// written then.
    pub fn step(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: AdafactorSlabs<'_>,
    ) -> Result<bool> {
        self.step_with(PassIsa::best(), threads, settings, slabs)
    }

    pub(super) fn step_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: AdafactorSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        check_slabs(&slabs)?;
        if slabs.master.is_empty() {
            return Ok(false);
        }
        let AdafactorSlabs {
            grad,
            master,
            second,
            working,
        } = slabs;
        let factors = self.factors(isa, threads, settings, master);
        Ok(with_slice!(Floats, grad, grad => {
            let pass = TypedAdafactorSlabs { grad, master, factors };
            match working {
                None => pass.run::<f32>(isa, threads, second, None),
                Some(FloatsMut::F32(working)) => pass.run(isa, threads, second, Some(working)),
                Some(FloatsMut::BF16(working)) => pass.run::<bf16>(isa, threads, second, Some(working)),
                Some(FloatsMut::F16(working)) => pass.run::<f16>(isa, threads, second, Some(working)),
            }
        }))
    }

    /// Refuses hyperparameters outside their range, as every step does.
    ///
    /// # Errors
    /// The hyperparameter and its range.
    pub fn check(&self) -> Result<()> {
        let decay = self.beta2_decay;
        check_setting(
            OP,
            "beta2_decay",
            decay,
            decay <= 0.0,
            "finite and at most 0",
        )?;
        let eps1 = self.eps1();
        check_setting(OP, "eps1", eps1, eps1 > 0.0, "finite and above 0")?;
        check_at_least_zero(OP, "eps2", self.eps2)?;
        check_setting(OP, "d", self.d, self.d >= 1.0, "finite and at least 1")?;
        check_at_least_zero(OP, "weight_decay", self.weight_decay)
    }

    fn eps1(&self) -> f64 {
        self.eps1.unwrap_or(f64::from(f32::EPSILON))
    }

    fn factors(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        master: &[f32],
    ) -> AdafactorFactors {
        let StepSettings { step, lr, .. } = settings;
        let squares = squared_norm_with(isa, threads, Floats::F32(master));
        let size = (squares / master.len() as f64).sqrt();
        let eps1 = self.eps1();
        // A root is the same on every platform, a power almost: both are rounded to f32 before
        // elements see them.
        let weight = (step as f64).powf(self.beta2_decay);
        AdafactorFactors {
            grad: settings.grad_factors(self.maximize),
            keep: (1.0 - lr * self.weight_decay) as f32,
            weight,
            eps1,
            // Not 0 as an f32, or a gradient of 0 would be divided by it.
            floor: ((eps1 * eps1) as f32).max(f32::MIN_POSITIVE),
            step_size: self.eps2.max(size) * lr.min(1.0 / (step as f64).sqrt()),
            d: self.d,
        }
    }
}

fn check_slabs(slabs: &AdafactorSlabs<'_>) -> Result<()> {
    let len = slabs.master.len();
    check_len(OP, "gradient", slabs.grad.len(), len)?;
    if let Some(working) = &slabs.working {
        check_len(OP, "working", working.len(), len)?;
    }
    match &slabs.second {
        SecondMoment::Full(second) => check_len(OP, "second moment", second.len(), len),
        SecondMoment::Factored {
            matrices,
            by_row,
            by_col,
        } => {
            check_len(OP, "parameter", len, matrices.numel())?;
            check_len(OP, "row", by_row.len(), matrices.count * matrices.rows)?;
            check_len(OP, "column", by_col.len(), matrices.count * matrices.cols)
        }
    }
}

/// What all elements share in one step.
#[derive(Debug, Clone, Copy)]
struct AdafactorFactors {
    grad: GradFactors,
    keep: f32,
    /// Of this step in the means of squares.
    weight: f64,
    eps1: f64,
    /// The least second moment.
    floor: f32,
    /// What an update is multiplied with, unless its root mean square is larger than `d`.
    step_size: f64,
    d: f64,
}

impl AdafactorFactors {
    /// What `u` is multiplied with, given the sum of its squares; `None` when that is not finite.
    fn update_factor(&self, squares: f64, len: usize) -> Option<f32> {
        let size = (squares / len as f64).sqrt();
        let factor = self.step_size / (size / self.d).max(1.0);
        (squares.is_finite() && factor.is_finite()).then_some(factor as f32)
    }
}

/// The slabs with the gradient's type known.
struct TypedAdafactorSlabs<'a, G> {
    grad: &'a [G],
    master: &'a mut [f32],
    factors: AdafactorFactors,
}

impl<G: SlabElement> TypedAdafactorSlabs<'_, G> {
    fn run<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        second: SecondMoment<'_>,
        working: Option<&mut [W]>,
    ) -> bool {
        match second {
            SecondMoment::Full(second) => self.run_full(isa, threads, second, working),
            SecondMoment::Factored {
                matrices,
                by_row,
                by_col,
            } => self.run_factored(isa, threads, matrices, (by_row, by_col), working),
        }
    }

    fn run_full<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        second: &mut [f32],
        working: Option<&mut [W]>,
    ) -> bool {
        let factors = self.factors;
        let mut squares = vec![0.0; self.grad.len().div_ceil(CHUNK)];
        let chunks = self.grad.chunks(CHUNK).zip(second.chunks(CHUNK));
        for_each(
            threads,
            chunks.zip(&mut squares),
            |((grad, second), sum)| {
                *sum = isa.run(FullSquaresPass {
                    grad,
                    second,
                    factors,
                });
            },
        );
        let Some(step) = factors.update_factor(squares.iter().sum(), self.grad.len()) else {
            return true;
        };
        let chunks = self
            .grad
            .chunks(CHUNK)
            .zip(self.master.chunks_mut(CHUNK))
            .zip(second.chunks_mut(CHUNK))
            .zip(optional_chunks(working));
        any(threads, chunks, |(((grad, master), second), working)| {
            isa.run(FullPass {
                grad,
                master,
                second,
                working,
                factors,
                step,
            })
        })
    }

    fn run_factored<W: SlabElement>(
        self,
        isa: PassIsa,
        threads: &Threads,
        matrices: Matrices,
        (by_row, by_col): (&mut [f32], &mut [f32]),
        working: Option<&mut [W]>,
    ) -> bool {
        let factors = self.factors;
        let means = Means::of(isa, threads, matrices, self.grad, factors.grad);
        let (Some(new_rows), Some(new_cols)) = (
            next_moment(&means.by_row, by_row, factors.weight),
            next_moment(&means.by_col, by_col, factors.weight),
        ) else {
            return true;
        };
        let row_factors = row_factors(matrices, &new_rows, factors.eps1);
        let rows = matrices.row_tasks(CHUNK);
        let mut squares = vec![0.0; rows.len()];
        let tasks = rows.iter().zip(&mut squares);
        for_each(threads, tasks, |(task, sum)| {
            *sum = isa.run(FactoredSquaresPass {
                grad: &self.grad[task.elements.clone()],
                rows: &row_factors[task.rows.clone()],
                cols: &new_cols[task.cols.clone()],
                factors,
            });
        });
        let Some(step) = factors.update_factor(squares.iter().sum(), self.grad.len()) else {
            return true;
        };
        by_row.copy_from_slice(&new_rows);
        by_col.copy_from_slice(&new_cols);
        let masters = matrices.split(&rows, self.master);
        let working = matrices.split_optional(&rows, working);
        let tasks = rows.iter().zip(masters).zip(working);
        any(threads, tasks, |((task, master), working)| {
            isa.run(FactoredPass {
                grad: &self.grad[task.elements.clone()],
                rows: &row_factors[task.rows.clone()],
                cols: &new_cols[task.cols.clone()],
                master,
                working,
                factors,
                step,
            })
        })
    }
}

/// Each row's moment over the mean of its matrix's: `v` is this times the column's moment.
fn row_factors(matrices: Matrices, by_row: &[f32], eps1: f64) -> Vec<f32> {
    let mut factors = Vec::with_capacity(by_row.len());
    for rows in by_row.chunks(matrices.rows.max(1)) {
        let sum: f64 = rows.iter().map(|&row| f64::from(row)).sum();
        let mean = (sum / rows.len() as f64).max(eps1);
        factors.extend(rows.iter().map(|&row| (f64::from(row) / mean) as f32));
    }
    factors
}

/// The means of squared gradients in one step.
struct Means {
    by_row: Vec<f64>,
    by_col: Vec<f64>,
}

impl Means {
    fn of<G: SlabElement>(
        isa: PassIsa,
        threads: &Threads,
        matrices: Matrices,
        grad: &[G],
        factors: GradFactors,
    ) -> Self {
        let Matrices { count, rows, cols } = matrices;
        let least = rows.div_ceil(MAX_SUM_TASKS) * cols;
        let tasks = matrices.row_tasks(least.max(CHUNK));
        let mut by_row = vec![0.0; count * rows];
        let mut parts = vec![0.0; tasks.len() * cols];
        {
            let mut rest = &mut by_row[..];
            let row_sums = tasks.iter().map(|task| {
                let (here, behind) = std::mem::take(&mut rest).split_at_mut(task.rows.len());
                rest = behind;
                here
            });
            let jobs = tasks.iter().zip(row_sums).zip(parts.chunks_mut(cols));
            for_each(threads, jobs, |((task, row_sums), col_sums)| {
                isa.run(MatrixSquaresPass {
                    grad: &grad[task.elements.clone()],
                    factors,
                    row_sums,
                    col_sums,
                });
            });
        }
        let mut by_col = vec![0.0; count * cols];
        for (task, part) in tasks.iter().zip(parts.chunks(cols)) {
            for (sum, part) in by_col[task.cols.clone()].iter_mut().zip(part) {
                *sum += part;
            }
        }
        by_row.iter_mut().for_each(|sum| *sum /= cols as f64);
        by_col.iter_mut().for_each(|sum| *sum /= rows as f64);
        Self { by_row, by_col }
    }
}

/// A moment after this step; `None` when it would not be finite.
fn next_moment(means: &[f64], moment: &[f32], weight: f64) -> Option<Vec<f32>> {
    let new = means.iter().zip(moment).map(|(mean, old)| {
        let old = f64::from(*old);
        (old + weight * (mean - old)) as f32
    });
    let new: Vec<f32> = new.collect();
    new.iter().all(|x| x.is_finite()).then_some(new)
}

/// The squares of some rows of one matrix, summed by row and by column.
struct MatrixSquaresPass<'a, G> {
    grad: &'a [G],
    factors: GradFactors,
    row_sums: &'a mut [f64],
    col_sums: &'a mut [f64],
}

impl<G: SlabElement> SlabPass for MatrixSquaresPass<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let reader = GradReader::new(s, self.factors);
        let cols = self.col_sums.len();
        let mut of_rows = vec![s.no_sums(); self.row_sums.len()];
        for (tile, col_sums) in self.col_sums.chunks_mut(TILE * LANES).enumerate() {
            let start = tile * TILE * LANES;
            let mut of_cols = [s.no_sums(); TILE];
            for (row, of_row) in self.grad.chunks(cols).zip(&mut of_rows) {
                let (blocks, rest) = row[start..start + col_sums.len()].as_chunks();
                for (block, of_col) in blocks.iter().zip(&mut of_cols) {
                    let g = reader.read(block);
                    *of_col = s.add_squares(*of_col, g);
                    *of_row = s.add_squares(*of_row, g);
                }
                // Zeros behind the last column change no sum of squares.
                if !rest.is_empty() {
                    let g = reader.read(&padded(rest));
                    of_cols[blocks.len()] = s.add_squares(of_cols[blocks.len()], g);
                    *of_row = s.add_squares(*of_row, g);
                }
            }
            for (sums, of_col) in col_sums.chunks_mut(LANES).zip(of_cols) {
                sums.copy_from_slice(&s.read_sums(of_col)[..sums.len()]);
            }
        }
        for (sum, of_row) in self.row_sums.iter_mut().zip(of_rows) {
            *sum = s.read_sums(of_row).iter().sum();
        }
    }
}

/// The sum of the squares of `u` in one chunk of a vector.
struct FullSquaresPass<'a, G> {
    grad: &'a [G],
    second: &'a [f32],
    factors: AdafactorFactors,
}

impl<G: SlabElement> SlabPass for FullSquaresPass<'_, G> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let update = AdafactorUpdate::new(s, self.factors, 0.0);
        let mut sums = s.no_sums();
        let (grad, grad_rest) = self.grad.as_chunks();
        let (second, second_rest) = self.second.as_chunks();
        for (grad, second) in grad.iter().zip(second) {
            sums = s.add_squares(sums, update.full(grad, second).0);
        }
        let (u, _) = update.full(&padded(grad_rest), &padded(second_rest));
        sums = s.add_squares(sums, u);
        s.read_sums(sums).iter().sum()
    }
}

/// The update of one chunk of a vector.
struct FullPass<'a, G, W> {
    grad: &'a [G],
    master: &'a mut [f32],
    second: &'a mut [f32],
    working: Option<&'a mut [W]>,
    factors: AdafactorFactors,
    step: f32,
}

impl<G: SlabElement, W: SlabElement> SlabPass for FullPass<'_, G, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = AdafactorUpdate::new(s, self.factors, self.step);
        let (grad, grad_rest) = self.grad.as_chunks();
        let (p, p_rest) = self.master.as_chunks_mut();
        let (v, v_rest) = self.second.as_chunks_mut();
        let (mut w, w_rest) = self.working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, ((grad, p), v)) in grad.iter().zip(p).zip(v).enumerate() {
            let w = w.as_mut().map(|w| &mut w[i]);
            kept |= update.full_block(LANES, grad, (p, v), w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let (mut p, mut v) = (padded(p_rest), padded(v_rest));
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        kept |= update.full_block(len, &padded(grad_rest), (&mut p, &mut v), w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        v_rest.copy_from_slice(&v[..len]);
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }
}

/// The sum of the squares of `u` in some rows of one matrix.
struct FactoredSquaresPass<'a, G> {
    grad: &'a [G],
    rows: &'a [f32],
    cols: &'a [f32],
    factors: AdafactorFactors,
}

impl<G: SlabElement> SlabPass for FactoredSquaresPass<'_, G> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let update = AdafactorUpdate::new(s, self.factors, 0.0);
        let mut sums = s.no_sums();
        for (grad, row) in self.grad.chunks(self.cols.len()).zip(self.rows) {
            let row = s.splat(*row);
            let (grad, grad_rest) = grad.as_chunks();
            let (cols, cols_rest) = self.cols.as_chunks();
            for (grad, cols) in grad.iter().zip(cols) {
                sums = s.add_squares(sums, update.factored(grad, row, cols));
            }
            if !grad_rest.is_empty() {
                let u = update.factored(&padded(grad_rest), row, &padded(cols_rest));
                sums = s.add_squares(sums, u);
            }
        }
        s.read_sums(sums).iter().sum()
    }
}

/// The update of some rows of one matrix.
struct FactoredPass<'a, G, W> {
    grad: &'a [G],
    rows: &'a [f32],
    cols: &'a [f32],
    master: &'a mut [f32],
    working: Option<&'a mut [W]>,
    factors: AdafactorFactors,
    step: f32,
}

impl<G: SlabElement, W: SlabElement> SlabPass for FactoredPass<'_, G, W> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = AdafactorUpdate::new(s, self.factors, self.step);
        let width = self.cols.len();
        let mut working = self.working.map(|working| working.chunks_mut(width));
        let rows = self.grad.chunks(width).zip(self.master.chunks_mut(width));
        let mut kept = false;
        for ((grad, p), row) in rows.zip(self.rows) {
            let working = working.as_mut().and_then(Iterator::next);
            kept |= update.row(grad, p, (*row, self.cols), working);
        }
        kept
    }
}

/// [`AdafactorFactors`] in every lane.
#[derive(Clone, Copy)]
struct AdafactorUpdate<S: Simd> {
    s: S,
    grad: GradReader<S>,
    keep: S::V,
    weight: S::V,
    rest: S::V,
    floor: S::V,
    step: S::V,
}

impl<S: Simd> AdafactorUpdate<S> {
    #[inline(always)]
    fn new(s: S, f: AdafactorFactors, step: f32) -> Self {
        Self {
            s,
            grad: GradReader::new(s, f.grad),
            keep: s.splat(f.keep),
            weight: s.splat(f.weight as f32),
            rest: s.splat((1.0 - f.weight) as f32),
            floor: s.splat(f.floor),
            step: s.splat(step),
        }
    }

    /// Updates one row of a matrix, given its factor and the moments of the columns. Returns whether
    /// an element kept its value because the new one was not finite.
    #[inline(always)]
    fn row<G: SlabElement, W: SlabElement>(
        &self,
        grad: &[G],
        p: &mut [f32],
        (row, cols): (f32, &[f32]),
        working: Option<&mut [W]>,
    ) -> bool {
        let s = self.s;
        let row = s.splat(row);
        let (grad, grad_rest) = grad.as_chunks();
        let (p, p_rest) = p.as_chunks_mut();
        let (cols, cols_rest) = cols.as_chunks();
        let (mut w, w_rest) = working.map(|w| w.as_chunks_mut()).unzip();
        let mut kept = false;
        for (i, ((grad, p), cols)) in grad.iter().zip(p).zip(cols).enumerate() {
            let w = w.as_mut().map(|w| &mut w[i]);
            let new = self.weights(p, self.factored(grad, row, cols));
            kept |= commit(s, LANES, [new], [Some(p)], w);
        }
        if p_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = p_rest.len();
        let mut p = padded(p_rest);
        let mut w = w_rest.as_ref().map(|_| [W::default(); LANES]);
        let u = self.factored(&padded(grad_rest), row, &padded(cols_rest));
        let new = self.weights(&p, u);
        kept |= commit(s, len, [new], [Some(&mut p)], w.as_mut());
        p_rest.copy_from_slice(&p[..len]);
        if let (Some(rest), Some(w)) = (w_rest, w) {
            rest.copy_from_slice(&w[..len]);
        }
        kept
    }

    /// Updates one block of a vector, of which `live` elements count.
    #[inline(always)]
    fn full_block<G: SlabElement, W: SlabElement>(
        &self,
        live: usize,
        grad: &[G; LANES],
        (p, v): (&mut [f32; LANES], &mut [f32; LANES]),
        w: Option<&mut [W; LANES]>,
    ) -> bool {
        let (u, second) = self.full(grad, v);
        let new = self.weights(p, u);
        commit(self.s, live, [new, second], [Some(p), Some(v)], w)
    }

    /// `u` and the new second moment of a block of a vector.
    #[inline(always)]
    fn full<G: SlabElement>(&self, grad: &[G; LANES], second: &[f32; LANES]) -> (S::V, S::V) {
        let s = self.s;
        let g = self.grad.read(grad);
        let old = s.mul(s.load(second), self.rest);
        let second = s.add(old, s.mul(s.mul(g, self.weight), g));
        (self.direction(g, second), second)
    }

    /// `u` of a block of a matrix.
    #[inline(always)]
    fn factored<G: SlabElement>(&self, grad: &[G; LANES], row: S::V, cols: &[f32; LANES]) -> S::V {
        let s = self.s;
        self.direction(self.grad.read(grad), s.mul(s.load(cols), row))
    }

    #[inline(always)]
    fn direction(&self, g: S::V, second: S::V) -> S::V {
        let s = self.s;
        s.div(g, s.sqrt(s.max(self.floor, second)))
    }

    /// The new weights.
    #[inline(always)]
    fn weights(&self, p: &[f32; LANES], u: S::V) -> S::V {
        let s = self.s;
        s.sub(s.mul(s.load(p), self.keep), s.mul(u, self.step))
    }
}
