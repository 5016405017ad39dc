//! Kernels along dimensions: reductions here, scans, softmax and selection in [`lines`].
//!
//! A reduction first sorts the dimensions of its source into kept and folded ones and merges
//! neighbours. Where the folded elements of one result lie densely they are folded as rows; where
//! neighbouring results lie densely, whole stretches of results are folded together (column sums).
//!
//! # Invariants
//! - How the work is cut, and the order in which parts are joined, depends on the operands' layouts
//!   alone.
//! - Floats are folded in the accumulator type and rounded once.

pub(super) mod lines;

use super::access::Call;
use super::simd::vectorize;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::kernel::{Kernel, Reduce, View};

use half::{bf16, f16};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Reduce { op, accumulate } => reduce(call, *op, *accumulate),
            _ => lines::run(call),
        }
    }
}

/// Scratch bytes of this family's kernels.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    match (kernel, src, dst) {
        (Kernel::Reduce { .. }, [Some(x)], [Some(y)]) => {
            let plan = FoldPlan::new(x, y);
            let partial = if x.dtype == DType::F64 || !x.dtype.is_float() {
                8
            } else {
                4
            };
            if plan.parts == 1 {
                0
            } else {
                plan.parts * plan.kept * partial
            }
        }
        _ => 0,
    }
}

/// A type that values are folded in.
pub(super) trait FoldType: Element + PartialOrd {
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    const HIGHEST: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The larger; NaN if either is.
    fn larger(self, other: Self) -> Self;
    /// The smaller; NaN if either is.
    fn smaller(self, other: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! float_cell {
    ($t:ty) => {
        impl FoldType for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = <$t>::NEG_INFINITY;
            const HIGHEST: Self = <$t>::INFINITY;
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if self > other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if self < other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
            #[inline(always)]
            fn over(self, count: usize) -> Self {
                self / count as $t
            }
        }
    };
}
float_cell!(f32);
float_cell!(f64);

impl FoldType for i64 {
    const ZERO: Self = 0;
    const ONE: Self = 1;
    const LOWEST: Self = Self::MIN;
    const HIGHEST: Self = Self::MAX;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn times(self, other: Self) -> Self {
        self.wrapping_mul(other)
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.max(other)
    }
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        self.min(other)
    }
    #[inline(always)]
    fn over(self, count: usize) -> Self {
        self.checked_div(count as Self).unwrap_or(0)
    }
}

/// A type that tensors hold, with the type it is folded in.
pub(super) trait FoldItem: Element {
    type Cell: FoldType;
    fn up(self) -> Self::Cell;
    fn down(cell: Self::Cell) -> Self;
}

macro_rules! item {
    ($($t:ty => $cell:ty, $up:expr, $down:expr;)*) => {$(
        impl FoldItem for $t {
            type Cell = $cell;
            #[inline(always)]
            fn up(self) -> $cell {
                $up(self)
            }
            #[inline(always)]
            fn down(cell: $cell) -> $t {
                $down(cell)
            }
        }
    )*};
}
item! {
    f64 => f64, |x| x, |x| x;
    f32 => f32, |x| x, |x| x;
    bf16 => f32, super::simd::Widen::widen, super::simd::Widen::narrow;
    f16 => f32, super::simd::Widen::widen, super::simd::Widen::narrow;
    i64 => i64, |x| x, |x| x;
    i32 => i64, i64::from, |x| x as i32;
    u32 => i64, i64::from, |x| x as u32;
    u8 => i64, i64::from, |x| x as u8;
}

/// Runs `$body` with `$t` standing for the element type of `$dtype`; bool reads as u8.
macro_rules! for_item {
    ($dtype:expr, $t:ident => $body:expr) => {
        $crate::cpu::reduce::for_item!(@ $dtype, $t, $body;
            F64 => f64, F32 => f32, BF16 => half::bf16, F16 => half::f16,
            I64 => i64, I32 => i32, U32 => u32, U8 => u8, Bool => u8)
    };
    (@ $dtype:expr, $t:ident, $body:expr; $($d:ident => $e:ty),*) => {
        match $dtype {
            $($crate::dtype::DType::$d => {
                type $t = $e;
                $body
            })*
        }
    };
}
pub(super) use for_item;

/// How two values become one.
trait Fold: Send + Sync + 'static {
    fn start<C: FoldType>() -> C;
    fn join<C: FoldType>(a: C, b: C) -> C;
}

macro_rules! fold {
    ($($(#[$meta:meta])* $name:ident: $start:ident, $join:ident;)*) => {$(
        $(#[$meta])*
        struct $name;
        impl Fold for $name {
            #[inline(always)]
            fn start<C: FoldType>() -> C {
                C::$start
            }
            #[inline(always)]
            fn join<C: FoldType>(a: C, b: C) -> C {
                a.$join(b)
            }
        }
    )*};
}
fold! {
    Total: ZERO, plus;
    Product: ONE, times;
    /// Also `any`: truth values are 0 and 1.
    Largest: LOWEST, larger;
    /// Also `all`.
    Smallest: HIGHEST, smaller;
}

/// Elements folded one after the other before their sum joins the next level: bounds rounding
/// errors.
const STRETCH: usize = 4096;
/// Rows added up before their column sums join the next level.
const STACK: usize = 256;
/// Results folded together in the column case.
const TILE: usize = 512;
const LANES: usize = 32;

/// A reduction, independent of types.
#[derive(Debug)]
struct FoldPlan {
    /// Size and stride of the kept dimensions, in order.
    keep: Vec<(usize, isize)>,
    /// Size and stride of the folded dimensions, largest stride first.
    fold: Vec<(usize, isize)>,
    /// Number of results.
    kept: usize,
    /// Number of elements per result.
    folded: usize,
    /// Whether neighbouring results lie densely in the source.
    columns: bool,
    /// Parts into which the elements of each result are cut.
    parts: usize,
}

impl FoldPlan {
    fn new(x: &View, y: &View) -> Self {
        let (mut keep, mut fold) = (Vec::new(), Vec::new());
        for (axis, (&size, &stride)) in x.shape().iter().zip(x.layout.strides()).enumerate() {
            if size != 1 {
                if y.shape()[axis] == 1 {
                    &mut fold
                } else {
                    &mut keep
                }
                .push((size, stride));
            }
        }
        fold.sort_by_key(|(_, stride): &(usize, isize)| std::cmp::Reverse(stride.abs()));
        let (keep, fold) = (merged(keep), merged(fold));
        let count = |dims: &[(usize, isize)]| dims.iter().map(|d| d.0).product::<usize>();
        let (kept, folded) = (count(&keep), count(&fold));
        let dense = |dims: &[(usize, isize)]| dims.last().is_some_and(|d| d.1 == 1);
        let columns = dense(&keep) && !dense(&fold);
        // Enough parts for 32 tasks, each big enough to be worth handing to a thread.
        let (units, least) = match keep.last() {
            Some(last) if columns => (kept / last.0.max(1) * last.0.div_ceil(TILE), 64),
            _ => (kept, STRETCH),
        };
        let wanted = 32usize.div_ceil(units.max(1));
        let parts = wanted
            .min(kept.saturating_mul(folded) >> 15)
            .min(folded / least)
            .max(1);
        Self {
            keep,
            fold,
            kept,
            folded,
            columns,
            parts,
        }
    }

    /// The elements of part `p`, counted through the folded dimensions.
    fn part(&self, p: usize) -> (usize, usize) {
        let size = self.folded.div_ceil(self.parts);
        (
            (p * size).min(self.folded),
            ((p + 1) * size).min(self.folded),
        )
    }
}

/// Neighbouring dimensions that one stride covers, made one.
fn merged(dims: Vec<(usize, isize)>) -> Vec<(usize, isize)> {
    let mut out: Vec<(usize, isize)> = Vec::with_capacity(dims.len());
    for (size, stride) in dims {
        match out.last_mut() {
            Some(last) if last.1 == stride * size as isize => *last = (last.0 * size, stride),
            _ => out.push((size, stride)),
        }
    }
    out
}

/// Offset of element `index`, counted row-major through `dims`.
#[inline(always)]
pub(super) fn offset(dims: &[(usize, isize)], mut index: usize) -> isize {
    let mut at = 0;
    for &(size, stride) in dims.iter().rev() {
        at += (index % size) as isize * stride;
        index /= size;
    }
    at
}

/// # Safety
/// As [`run`].
unsafe fn reduce(call: &Call<'_>, op: Reduce, accumulate: bool) -> Result<()> {
    // SAFETY: the caller's promise is passed on; the element type is the view's.
    for_item!(call.src(0).dtype, T => unsafe { reduce_as::<T>(call, op, accumulate) });
    Ok(())
}

/// # Safety
/// As [`run`], and `T` is the source's type.
unsafe fn reduce_as<T: FoldItem>(call: &Call<'_>, op: Reduce, accumulate: bool) {
    let (x, y) = (call.src(0), call.dst(0));
    let plan = FoldPlan::new(x, y);
    let count = if op == Reduce::Mean { plan.folded } else { 1 };
    let out = Out {
        y: *y,
        accumulate,
        divide: (op == Reduce::Mean).then_some(count),
    };
    // An empty "any" is false and an empty "all" true, which no element type's bounds say.
    if plan.folded == 0 && matches!(op, Reduce::Any | Reduce::All) {
        let value = if op == Reduce::All {
            T::Cell::ONE
        } else {
            T::Cell::ZERO
        };
        // SAFETY: every result is written once, by this thread.
        (0..plan.kept).for_each(|i| unsafe { out.put::<T>(i, value) });
        return;
    }
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match op {
            Reduce::Sum | Reduce::Mean => fold_all::<T, Total>(call, &plan, &out),
            Reduce::Prod => fold_all::<T, Product>(call, &plan, &out),
            Reduce::Max | Reduce::Any => fold_all::<T, Largest>(call, &plan, &out),
            Reduce::Min | Reduce::All => fold_all::<T, Smallest>(call, &plan, &out),
        }
    }
}

/// Where results go.
struct Out {
    y: View,
    accumulate: bool,
    divide: Option<usize>,
}

impl Out {
    /// Writes result `i`.
    ///
    /// # Safety
    /// `y` is live, dense, holds `T` or `T::Cell`, has more than `i` elements, and no other thread
    /// touches element `i`.
    #[inline(always)]
    unsafe fn put<T: FoldItem>(&self, i: usize, value: T::Cell) {
        let mut value = match self.divide {
            Some(count) => value.over(count),
            None => value,
        };
        // SAFETY: promised by the caller; the element type is checked here.
        unsafe {
            if self.y.dtype == T::Cell::DTYPE {
                let at = (self.y.ptr as *mut T::Cell).add(i);
                if self.accumulate {
                    value = value.plus(*at);
                }
                *at = value;
            } else {
                let at = (self.y.ptr as *mut T).add(i);
                if self.accumulate {
                    value = value.plus((*at).up());
                }
                *at = T::down(value);
            }
        }
    }
}

/// Folds everything: in parts if the plan says so, then the parts in order.
///
/// # Safety
/// As [`run`], and `T` is the source's type.
unsafe fn fold_all<T: FoldItem, F: Fold>(call: &Call<'_>, plan: &FoldPlan, out: &Out) {
    let x = call.src(0).ptr;
    if plan.parts == 1 {
        // SAFETY: tasks write disjoint results of a live destination; the source is live.
        let put = |i: usize, value: T::Cell| unsafe { out.put::<T>(i, value) };
        return fold_part::<T, F>(call, plan, x, &|_| (0, plan.folded), 1, &|_, i, v| {
            put(i, v)
        });
    }
    let partials = call.scratch.expect("declared in `scratch`").ptr;
    let place = |p: usize, i: usize| (partials as *mut T::Cell).wrapping_add(p * plan.kept + i);
    // SAFETY: scratch holds `parts · kept` cells, and each (part, result) is written by one task.
    let keep = |p: usize, i: usize, value: T::Cell| unsafe { place(p, i).write(value) };
    fold_part::<T, F>(call, plan, x, &|p| plan.part(p), plan.parts, &keep);
    for i in 0..plan.kept {
        // SAFETY: all partials were written above; results are written by this thread alone.
        unsafe {
            let total = (0..plan.parts).fold(F::start(), |a, p| F::join(a, place(p, i).read()));
            out.put::<T>(i, total);
        }
    }
}

/// Folds `parts` parts of every result and hands each (part, result, value) to `put` once.
fn fold_part<T: FoldItem, F: Fold>(
    call: &Call<'_>,
    plan: &FoldPlan,
    x: u64,
    range: &(impl Fn(usize) -> (usize, usize) + Sync),
    parts: usize,
    put: &(impl Fn(usize, usize, T::Cell) + Sync),
) {
    let each = plan.folded.div_ceil(parts).max(1);
    if plan.columns {
        let width = plan.keep.last().expect("columns are a kept dimension").0;
        let tiles = width.div_ceil(TILE);
        let units = plan.kept / width.max(1) * tiles;
        let grain = (32768 / (each * width.clamp(1, TILE))).max(1);
        return call.pieces(units * parts, grain, |from, to| {
            for task in from..to {
                let (p, unit) = (task / units, task % units);
                let first = unit / tiles * width + unit % tiles * TILE;
                let many = TILE.min(width - unit % tiles * TILE);
                let mut cells = [F::start::<T::Cell>(); TILE];
                column_tile::<T, F>(plan, x, first, range(p), &mut cells[..many]);
                cells[..many]
                    .iter()
                    .enumerate()
                    .for_each(|(c, v)| put(p, first + c, *v));
            }
        });
    }
    let grain = (32768 / each).max(1);
    call.pieces(plan.kept * parts, grain, |from, to| {
        for task in from..to {
            let (p, i) = (task / plan.kept, task % plan.kept);
            put(p, i, row::<T, F>(plan, x, i, range(p)));
        }
    });
}

vectorize! {
    /// Folds elements `range` of result `i`.
    fn row<T: FoldItem, F: Fold>(plan: &FoldPlan, x: u64, i: usize, range: (usize, usize)) -> T::Cell {
        let base = (x as *const T).wrapping_offset(offset(&plan.keep, i));
        let Some((&(inner, stride), outer)) = plan.fold.split_last() else {
            // SAFETY: no folded dimension: the result is one element of the live source.
            return unsafe { F::join(F::start(), base.read().up()) };
        };
        let mut total = F::start();
        let mut at = range.0;
        while at < range.1 {
            let start = at % inner;
            let len = (inner - start).min(range.1 - at);
            let first = base.wrapping_offset(offset(outer, at / inner) + start as isize * stride);
            total = F::join(total, stretch::<T, F>(first, len, stride));
            at += len;
        }
        total
    }
}

/// Folds `len` elements that lie `stride` apart.
#[inline(always)]
fn stretch<T: FoldItem, F: Fold>(first: *const T, len: usize, stride: isize) -> T::Cell {
    if stride == 1 {
        // SAFETY: the plan's dimensions lie inside the source; the elements are dense and only
        // read.
        return dense::<T, F>(unsafe { std::slice::from_raw_parts(first, len) });
    }
    let mut total = F::start();
    for start in (0..len).step_by(STRETCH) {
        let mut part = F::start();
        for i in start..len.min(start + STRETCH) {
            // SAFETY: as above.
            part = F::join(
                part,
                unsafe { first.wrapping_offset(i as isize * stride).read() }.up(),
            );
        }
        total = F::join(total, part);
    }
    total
}

/// Folds a slice in lanes, which a fixed tree joins.
#[inline(always)]
fn dense<T: FoldItem, F: Fold>(xs: &[T]) -> T::Cell {
    let mut total = F::start();
    for chunk in xs.chunks(STRETCH) {
        let mut lanes = [F::start::<T::Cell>(); LANES];
        let rows = chunk.chunks_exact(LANES);
        for (lane, x) in lanes.iter_mut().zip(rows.remainder()) {
            *lane = F::join(*lane, x.up());
        }
        for row in rows {
            for (lane, x) in lanes.iter_mut().zip(row) {
                *lane = F::join(*lane, x.up());
            }
        }
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for l in 0..width {
                lanes[l] = F::join(lanes[l], lanes[l + width]);
            }
        }
        total = F::join(total, lanes[0]);
    }
    total
}

vectorize! {
    /// Folds elements `range` of neighbouring results from `first` on into `cells`.
    fn column_tile<T: FoldItem, F: Fold>(
        plan: &FoldPlan, x: u64, first: usize, range: (usize, usize), cells: &mut [T::Cell],
    ) {
        let base = (x as *const T).wrapping_offset(offset(&plan.keep, first));
        let many = cells.len();
        let mut stack = [F::start::<T::Cell>(); TILE];
        for start in (range.0..range.1).step_by(STACK) {
            stack[..many].fill(F::start());
            for r in start..range.1.min(start + STACK) {
                // SAFETY: the plan's dimensions lie inside the source; `many` neighbours are dense.
                let xs = unsafe {
                    std::slice::from_raw_parts(base.wrapping_offset(offset(&plan.fold, r)), many)
                };
                for (cell, x) in stack[..many].iter_mut().zip(xs) {
                    *cell = F::join(*cell, x.up());
                }
            }
            for (cell, part) in cells.iter_mut().zip(&stack[..many]) {
                *cell = F::join(*cell, *part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FoldPlan, scratch};
    use crate::dtype::DType;
    use crate::kernel::{Kernel, Reduce};
    use crate::shape::Shape;
    use crate::worker::Worker;
    use crate::{Bytes, Cpu};

    fn worker() -> Worker {
        Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::mib(64)).unwrap()
    }

    /// Whole numbers sum exactly in any order, so every path must give the plain loop's answer.
    #[test]
    fn every_path_sums_what_a_plain_loop_sums() {
        let worker = worker();
        for (dims, out) in [
            (vec![7, 5], vec![7, 1]),
            (vec![7, 5], vec![1, 5]),
            (vec![3, 70_000], vec![1, 1]),
            (vec![900, 700], vec![1, 700]),
            (vec![2, 300, 600], vec![2, 1, 600]),
            (vec![4, 3, 5, 6], vec![1, 3, 1, 6]),
            (vec![4, 3, 5, 6], vec![4, 1, 5, 1]),
            (vec![], vec![]),
            (vec![0, 3], vec![1, 3]),
            (vec![0, 3], vec![0, 1]),
        ] {
            let count: usize = dims.iter().product();
            if cfg!(miri) && count > 1000 {
                continue;
            }
            let values: Vec<f32> = (0..count).map(|i| ((i * 7919) % 13) as f32 - 6.0).collect();
            let (shape, kept) = (Shape::new(&dims).unwrap(), Shape::new(&out).unwrap());
            let mut want = vec![1.0f32; kept.numel()];
            for (i, v) in values.iter().enumerate() {
                let (mut rest, mut at, mut step) = (i, 0, 1);
                for axis in (0..dims.len()).rev() {
                    at += if out[axis] == 1 {
                        0
                    } else {
                        rest % dims[axis] * step
                    };
                    step *= out[axis];
                    rest /= dims[axis];
                }
                want[at] += v;
            }
            let x = worker.upload(&values, shape).unwrap();
            let y = worker.upload(&vec![1.0f32; kept.numel()], kept).unwrap();
            let kernel = Kernel::Reduce {
                op: Reduce::Sum,
                accumulate: true,
            };
            worker.launch(&kernel, &[Some(&x)], &[Some(&y)]).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), want, "{dims:?} to {out:?}");
        }
    }

    /// Large reductions are cut so that threads have work, and scratch says what the cut needs.
    #[test]
    fn scratch_is_what_the_parts_need() {
        let worker = worker();
        let x = worker
            .alloc("x", DType::BF16, Shape::new(&[4096, 768]).unwrap())
            .unwrap();
        let y = worker
            .alloc("y", DType::F32, Shape::new(&[1, 768]).unwrap())
            .unwrap();
        let parts = FoldPlan::new(&x.view(), &y.view()).parts;
        assert_eq!(parts, 16);
        let kernel = Kernel::Reduce {
            op: Reduce::Sum,
            accumulate: false,
        };
        assert_eq!(
            scratch(&kernel, &[Some(x.view())], &[Some(y.view())]),
            16 * 768 * 4
        );
    }
}
