//! Kernels along one dimension: positions of extremes, running sums, softmax, the k largest.
//!
//! # Invariants
//! - A line is one task's business from its first element to its last, so its result has one order.
//! - `TopK` works in its destinations; no line needs memory of its own.

use super::{FoldItem, FoldType, for_item, offset};
use crate::cpu::access::{Call, Float, Real, SharedSlice, for_float, slice, slice_mut};
use crate::cpu::simd::vectorize;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{Kernel, View};

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let dtype = call.src(0).dtype;
    // SAFETY: the caller's promise is passed on; the element types are the views'.
    unsafe {
        match call.kernel {
            Kernel::ArgReduce { largest, dim } => {
                for_item!(dtype, T => arg_reduce::<T>(call, *largest, *dim));
            }
            Kernel::CumSum { dim, reverse } => {
                for_item!(dtype, T => cumsum::<T>(call, *dim, *reverse))
            }
            Kernel::Softmax { log } => for_float!(call, dtype, T => softmax::<T>(call, *log)),
            Kernel::SoftmaxGrad { log } => {
                for_float!(call, dtype, T => softmax_grad::<T>(call, *log))
            }
            Kernel::TopK { largest } => for_item!(dtype, T => topk::<T>(call, *largest)),
            _ => return Err(call.unsupported()),
        }
    }
    Ok(())
}

/// Size and stride of every dimension but `dim`.
fn others(view: &View, dim: usize) -> Vec<(usize, isize)> {
    let dims = view
        .shape()
        .iter()
        .copied()
        .zip(view.layout.strides().iter().copied());
    dims.enumerate()
        .filter(|(axis, _)| *axis != dim)
        .map(|(_, d)| d)
        .collect()
}

/// # Safety
/// As [`run`], and `T` is the source's type.
unsafe fn arg_reduce<T: FoldItem>(call: &Call<'_>, largest: bool, dim: usize) {
    let x = *call.src(0);
    // SAFETY: the destination is dense, holds i64 and is this call's alone.
    let y = SharedSlice::new(unsafe { slice_mut::<i64>(call.dst(0)) });
    let (size, stride) = (x.shape()[dim], x.layout.strides()[dim]);
    let outer = others(&x, dim);
    let count = outer.iter().map(|d| d.0).product();
    call.pieces(count, 32768 / size.max(1), |from, to| {
        // SAFETY: pieces are disjoint.
        let out = unsafe { y.part(from, to) };
        for (line, best) in (from..to).zip(out) {
            let first = (x.ptr as *const T).wrapping_offset(offset(&outer, line));
            // SAFETY: `i` lies inside the dimension, so the element lies in the live source.
            let at = |i: usize| unsafe { first.wrapping_offset(i as isize * stride).read() }.up();
            *best = extreme(size, largest, at) as i64;
        }
    });
}

/// The first place of the largest (smallest) value; the first NaN, if there is one.
fn extreme<C: FoldType>(size: usize, largest: bool, at: impl Fn(usize) -> C) -> usize {
    let (mut best, mut place) = (at(0), 0);
    for i in 1..size {
        let value = at(i);
        let better = if largest { value > best } else { value < best };
        if better || (is_nan(value) && !is_nan(best)) {
            (best, place) = (value, i);
        }
    }
    place
}

#[inline(always)]
#[allow(
    clippy::eq_op,
    reason = "only NaN differs from itself, and integers have none"
)]
fn is_nan<C: FoldType>(x: C) -> bool {
    x != x
}

/// Running sums of neighbouring lines go together, this many at a time.
const ABREAST: usize = 64;

/// # Safety
/// As [`run`], and `T` is the source's and the destination's type.
unsafe fn cumsum<T: FoldItem>(call: &Call<'_>, dim: usize, reverse: bool) {
    let (x, y) = (*call.src(0), *call.dst(0));
    let (size, stride) = (x.shape()[dim], x.layout.strides()[dim]);
    if y.numel() == 0 {
        return;
    }
    let (from_x, from_y) = (others(&x, dim), others(&y, dim));
    let step = y.shape().contiguous_strides()[dim];
    let lines: usize = from_x.iter().map(|d| d.0).product();
    let grain = (32768 / size).next_multiple_of(ABREAST);
    call.pieces(lines, grain, |from, to| {
        for start in (from..to).step_by(ABREAST) {
            let many = ABREAST.min(to - start);
            let mut at = [(0isize, 0isize); ABREAST];
            let mut sums = [T::Cell::ZERO; ABREAST];
            for (i, at) in at[..many].iter_mut().enumerate() {
                *at = (offset(&from_x, start + i), offset(&from_y, start + i));
            }
            for i in 0..size {
                let i = if reverse { size - 1 - i } else { i } as isize;
                for (sum, (src, dst)) in sums[..many].iter_mut().zip(&at) {
                    // SAFETY: both places lie inside live operands; each line is written by one
                    // task.
                    unsafe {
                        let value = (x.ptr as *const T).wrapping_offset(src + i * stride).read();
                        *sum = sum.plus(value.up());
                        (y.ptr as *mut T)
                            .wrapping_offset(dst + i * step)
                            .write(T::down(*sum));
                    }
                }
            }
        }
    });
}

const LANES: usize = 32;

/// Folds `value(0..count)` in lanes, joined by a fixed tree.
#[inline(always)]
pub(in crate::cpu) fn lanes<A: Real>(
    count: usize,
    start: A,
    value: impl Fn(usize) -> A,
    join: impl Fn(A, A) -> A,
) -> A {
    let mut lanes = [start; LANES];
    let whole = count / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane = join(*lane, value(i + l));
        }
    }
    for (l, lane) in lanes.iter_mut().enumerate().take(count - whole) {
        *lane = join(*lane, value(whole + l));
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
    }
    lanes[0]
}

/// The largest value of a row (0 where that is infinite) and the sum of e^(x - largest).
#[inline(always)]
pub(in crate::cpu) fn peak_and_sum<T: Float>(x: &[T]) -> (T::Acc, T::Acc) {
    let peak = lanes(x.len(), T::Acc::NEG_INF, |i| x[i].up(), Real::max_nan);
    let peak = if peak.abs() == -T::Acc::NEG_INF {
        T::Acc::ZERO
    } else {
        peak
    };
    let sum = lanes(
        x.len(),
        T::Acc::ZERO,
        |i| (x[i].up() - peak).exp(),
        |a, b| a + b,
    );
    (peak, sum)
}

/// Rows of the last dimension: their number and length.
fn rows(view: &View) -> (usize, usize) {
    let width = view.shape().last().copied().unwrap_or(1);
    (view.numel() / width.max(1), width)
}

/// # Safety
/// As [`run`], and `T` is the operands' type.
unsafe fn softmax<T: Float>(call: &Call<'_>, log: bool) {
    let (rows, width) = rows(call.src(0));
    // SAFETY: both are dense and hold `T`; the destination is this call's alone.
    let (x, y) = unsafe {
        (
            slice::<T>(call.src(0)),
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
        )
    };
    call.pieces(rows, 8192 / width.max(1), |from, to| {
        // SAFETY: pieces are disjoint.
        let y = unsafe { y.part(from * width, to * width) };
        softmax_rows(&x[from * width..to * width], y, width, log);
    });
}

vectorize! {
    fn softmax_rows<T: Float>(x: &[T], y: &mut [T], width: usize, log: bool) {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let (peak, sum) = peak_and_sum(x);
            if log {
                let shift = peak + sum.ln();
                for (y, x) in y.iter_mut().zip(x) {
                    *y = T::down(x.up() - shift);
                }
            } else {
                let scale = T::Acc::ONE / sum;
                for (y, x) in y.iter_mut().zip(x) {
                    *y = T::down((x.up() - peak).exp() * scale);
                }
            }
        }
    }
}

/// # Safety
/// As [`run`], and `T` is the operands' type.
unsafe fn softmax_grad<T: Float>(call: &Call<'_>, log: bool) {
    let (rows, width) = rows(call.src(0));
    // SAFETY: all are dense and hold `T`; the destination is this call's alone.
    let (y, dy, dx) = unsafe {
        (
            slice::<T>(call.src(0)),
            slice::<T>(call.src(1)),
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
        )
    };
    call.pieces(rows, 16384 / width.max(1), |from, to| {
        let range = from * width..to * width;
        // SAFETY: pieces are disjoint.
        let dx = unsafe { dx.part(range.start, range.end) };
        softmax_grad_rows(&y[range.clone()], &dy[range], dx, width, log);
    });
}

vectorize! {
    fn softmax_grad_rows<T: Float>(y: &[T], dy: &[T], dx: &mut [T], width: usize, log: bool) {
        for ((y, dy), dx) in y.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width)) {
            let weigh = |i: usize| if log { dy[i].up() } else { dy[i].up() * y[i].up() };
            let sum = lanes(width, T::Acc::ZERO, weigh, |a, b| a + b);
            for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                let (y, dy) = (y.up(), dy.up());
                *dx = T::down(if log { dy - y.exp() * sum } else { y * (dy - sum) });
            }
        }
    }
}

/// # Safety
/// As [`run`], and `T` is the source's type.
unsafe fn topk<T: FoldItem>(call: &Call<'_>, largest: bool) {
    let ((rows, width), k) = (rows(call.src(0)), rows(call.dst(0)).1);
    // SAFETY: all are dense; bool reads as u8; the destinations are this call's alone.
    let (x, values, places) = unsafe {
        let source = View {
            dtype: T::DTYPE,
            ..*call.src(0)
        };
        let values = View {
            dtype: T::DTYPE,
            ..*call.dst(0)
        };
        (
            slice::<T>(&source),
            SharedSlice::new(slice_mut::<T>(&values)),
            slice_mut::<i64>(call.dst(1)),
        )
    };
    debug_assert_eq!(call.dst(1).dtype, DType::I64);
    let places = SharedSlice::new(places);
    if k == 0 {
        return;
    }
    call.pieces(rows, 4096 / width.max(1), |from, to| {
        for row in from..to {
            let x = &x[row * width..(row + 1) * width];
            // SAFETY: rows are disjoint.
            let (values, places) = unsafe {
                (
                    values.part(row * k, (row + 1) * k),
                    places.part(row * k, (row + 1) * k),
                )
            };
            select(x, places, largest);
            for (value, place) in values.iter_mut().zip(places) {
                *value = x[*place as usize];
            }
        }
    });
}

/// Fills `places` with the places of the first `places.len()` elements of `x` in order.
fn select<T: FoldItem>(x: &[T], places: &mut [i64], largest: bool) {
    let order = |a: &i64, b: &i64| {
        let (left, right) = (x[*a as usize].up(), x[*b as usize].up());
        let (first, second) = if largest {
            (right, left)
        } else {
            (left, right)
        };
        let values = first
            .partial_cmp(&second)
            .unwrap_or_else(|| is_nan(first).cmp(&is_nan(second)));
        values.then(a.cmp(b))
    };
    let k = places.len();
    places
        .iter_mut()
        .enumerate()
        .for_each(|(i, p)| *p = i as i64);
    if k < x.len() {
        // A heap with the last of the chosen on top, so that one comparison dismisses most
        // elements.
        for root in (0..k / 2).rev() {
            sift(places, root, &order);
        }
        for i in k as i64..x.len() as i64 {
            if order(&i, &places[0]).is_lt() {
                places[0] = i;
                sift(places, 0, &order);
            }
        }
    }
    places.sort_unstable_by(order);
}

/// Moves the entry at `root` down until no entry below it comes later in `order`.
fn sift(heap: &mut [i64], mut root: usize, order: &impl Fn(&i64, &i64) -> std::cmp::Ordering) {
    loop {
        let mut last = root;
        for child in [2 * root + 1, 2 * root + 2] {
            if child < heap.len() && order(&heap[child], &heap[last]).is_gt() {
                last = child;
            }
        }
        if last == root {
            return;
        }
        heap.swap(root, last);
        root = last;
    }
}
