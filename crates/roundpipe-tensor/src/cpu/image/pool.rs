//! Pooling: planes are tasks; gradients are gathered band by band of a plane, so that overlapping
//! windows add up in the accumulator type.

use std::ops::Range;

use super::lattice::{Axis, WindowAxis};
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::simd::vectorize;
use crate::kernel::{PoolSpec, View};

/// Outputs of a row that are worked on at one time.
const CHUNK: usize = 256;

/// Elements of a plane whose gradient is gathered at one time.
const BAND: usize = 4096;

/// Element operations that make a task worth handing over.
const TASK: usize = 1 << 15;

/// Runs `body(plane)` over the planes of `[n, c, h, w]`, `work` element operations each.
fn planes(call: &Call<'_>, view: &View, work: usize, body: impl Fn(usize) + Sync + Send) {
    let count = view.shape()[0] * view.shape()[1];
    call.pieces(count, TASK / work.max(1), |start, end| {
        (start..end).for_each(&body)
    });
}

/// Elements of a plane.
fn area(view: &View) -> usize {
    view.shape()[2] * view.shape()[3]
}

fn axes(spec: &PoolSpec, x: &View, y: &View) -> [Axis; 2] {
    [0, 1].map(|a| {
        let window = WindowAxis {
            kernel: spec.kernel[a],
            stride: spec.stride[a],
            padding: spec.padding[a],
            dilation: spec.dilation[a],
        };
        Axis::forward(x.shape()[2 + a], y.shape()[2 + a], window)
    })
}

/// `[x] -> [y, at]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); x and y are T, at is i32.
pub(super) unsafe fn max<T: Float>(call: &Call<'_>, spec: &PoolSpec) {
    let (x, y) = (call.src(0), call.dst(0));
    let axes = axes(spec, x, y);
    let (size, out) = (area(x), area(y));
    let work = out * spec.kernel[0] * spec.kernel[1];
    // SAFETY: contiguous operands by the kernel's description; destinations overlap nothing.
    let (data, values, places) = unsafe {
        let places = SharedSlice::new(slice_mut::<i32>(call.dst(1)));
        (slice::<T>(x), SharedSlice::new(slice_mut::<T>(y)), places)
    };
    planes(call, x, work, |p| {
        // SAFETY: each plane is written by one task.
        let (values, places) = unsafe {
            let range = p * out..(p + 1) * out;
            (
                values.part(range.start, range.end),
                places.part(range.start, range.end),
            )
        };
        max_plane(&axes, &data[p * size..(p + 1) * size], values, places);
    });
}

vectorize! {
    fn max_plane<T: Float>(axes: &[Axis; 2], x: &[T], values: &mut [T], places: &mut [i32]) {
        let [rows, cols] = axes;
        let mut best = [T::Acc::NEG_INF; CHUNK];
        for i in 0..rows.count {
            for start in (0..cols.count).step_by(CHUNK) {
                let end = (start + CHUNK).min(cols.count);
                let line = i * cols.count + start..i * cols.count + end;
                let (best, at) = (&mut best[..end - start], &mut places[line.clone()]);
                best.fill(T::Acc::NEG_INF);
                at.fill(-1);
                for tap in &rows.taps {
                    let Some(row) = rows.meets(*tap, i) else { continue };
                    for tap in &cols.taps {
                        let valid = cols.valid(*tap);
                        let low = valid.start.clamp(start, end);
                        let high = valid.end.clamp(low, end);
                        if low < high {
                            let first = row * cols.size + (tap.offset + (low * cols.step) as isize) as usize;
                            let range = low - start..high - start;
                            raise(&mut best[range.clone()], &mut at[range], x, first, cols.step);
                        }
                    }
                }
                values[line].iter_mut().zip(best).for_each(|(y, best)| *y = T::down(*best));
            }
        }
    }
}

/// Takes x\[first + i · step\] where it is larger than what is there; the first element always, and
/// the first NaN.
#[inline(always)]
fn raise<T: Float>(best: &mut [T::Acc], at: &mut [i32], x: &[T], first: usize, step: usize) {
    for (i, ((best, at), x)) in best
        .iter_mut()
        .zip(at)
        .zip(x[first..].iter().step_by(step))
        .enumerate()
    {
        let value = x.up();
        #[allow(clippy::eq_op, reason = "only NaN differs from itself")]
        let new_nan = value != value && *best == *best;
        if value > *best || *at < 0 || new_nan {
            *best = value;
            *at = (first + i * step) as i32;
        }
    }
}

/// `[dy, at] -> [dx]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); dy and dx are T, at is i32.
pub(super) unsafe fn max_grad<T: Float>(call: &Call<'_>, spec: &PoolSpec) {
    let (dy, dx) = (call.src(0), call.dst(0));
    let (width, across) = (dx.shape()[3], dy.shape()[3]);
    let out = area(dy);
    let rows = &axes(spec, dx, dy)[0];
    // SAFETY: contiguous sources by the kernel's description.
    let (grads, places) = unsafe { (slice::<T>(dy), slice::<i32>(call.src(1))) };
    // SAFETY: as for this function.
    unsafe {
        gather::<T>(call, dx, area(dx) + out, |p, band, sums| {
            let lines = band.start / width..(band.end - 1) / width + 1;
            for i in (0..rows.count).filter(|i| reaches(rows, *i, &lines)) {
                let line = p * out + i * across..p * out + (i + 1) * across;
                for (dy, at) in grads[line.clone()].iter().zip(&places[line]) {
                    if let Ok(at) = usize::try_from(*at)
                        && band.contains(&at)
                    {
                        sums[at - band.start] += dy.up();
                    }
                }
            }
        });
    }
}

/// Whether window `i` spans some of `lines`.
fn reaches(axis: &Axis, i: usize, lines: &Range<usize>) -> bool {
    let (Some(first), Some(last)) = (axis.taps.first(), axis.taps.last()) else {
        return false;
    };
    let at = (i * axis.step) as isize;
    first.offset + at < lines.end as isize && last.offset + at >= lines.start as isize
}

/// Fills dx band by band: `add(plane, band, sums)` adds what reaches the band.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); dx is T.
unsafe fn gather<T: Float>(
    call: &Call<'_>,
    dx: &View,
    work: usize,
    add: impl Fn(usize, Range<usize>, &mut [T::Acc]) + Sync + Send,
) {
    let size = area(dx);
    // SAFETY: contiguous by the kernel's description; overlaps no source.
    let out = unsafe { SharedSlice::new(slice_mut::<T>(dx)) };
    planes(call, dx, work, |p| {
        let mut sums = [T::Acc::ZERO; BAND];
        for start in (0..size).step_by(BAND) {
            let band = start..(start + BAND).min(size);
            let sums = &mut sums[..band.len()];
            sums.fill(T::Acc::ZERO);
            add(p, band.clone(), sums);
            // SAFETY: each plane is written by one task.
            let out = unsafe { out.part(p * size + band.start, p * size + band.end) };
            out.iter_mut()
                .zip(sums)
                .for_each(|(dx, sum)| *dx = T::down(*sum));
        }
    });
}

/// The elements one output averages along one axis, and its part of the divisor.
struct AveragedSpan {
    elements: Range<usize>,
    size: usize,
}

/// The windows along both axes; adaptive ones without a spec.
fn spans(spec: Option<&PoolSpec>, x: &View, y: &View) -> [Vec<AveragedSpan>; 2] {
    [0, 1].map(|a| {
        let (size, count) = (x.shape()[2 + a], y.shape()[2 + a]);
        let span = |i: usize| match spec {
            None => {
                let elements = i * size / count..((i + 1) * size).div_ceil(count);
                AveragedSpan {
                    size: elements.len(),
                    elements,
                }
            }
            Some(spec) => {
                let (pad, start) = (spec.padding[a], i * spec.stride[a]);
                let end = (start + spec.kernel[a]).min(size + 2 * pad);
                let elements = start.max(pad) - pad..end.clamp(pad, size + pad) - pad;
                AveragedSpan {
                    size: if spec.count_include_pad {
                        end - start
                    } else {
                        elements.len()
                    },
                    elements,
                }
            }
        };
        (0..count).map(span).collect()
    })
}

/// `[x] -> [y]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); the operands are T.
pub(super) unsafe fn average<T: Float>(call: &Call<'_>, spec: Option<&PoolSpec>) {
    let (x, y) = (call.src(0), call.dst(0));
    let spans = spans(spec, x, y);
    let (size, out, width) = (area(x), area(y), x.shape()[3]);
    // SAFETY: contiguous operands by the kernel's description; the destination overlaps nothing.
    let (data, means) = unsafe { (slice::<T>(x), SharedSlice::new(slice_mut::<T>(y))) };
    planes(call, x, size + out, |p| {
        // SAFETY: each plane is written by one task.
        let means = unsafe { means.part(p * out, (p + 1) * out) };
        average_plane(&spans, &data[p * size..(p + 1) * size], width, means);
    });
}

vectorize! {
    fn average_plane<T: Float>(spans: &[Vec<AveragedSpan>; 2], x: &[T], width: usize, means: &mut [T]) {
        let [rows, cols] = spans;
        let mut means = means.iter_mut();
        for row in rows {
            for col in cols {
                let mut sum = T::Acc::ZERO;
                for i in row.elements.clone() {
                    sum += total(&x[i * width + col.elements.start..i * width + col.elements.end]);
                }
                let mean = sum / divisor::<T>(row, col);
                *means.next().expect("one output per pair of windows") = T::down(mean);
            }
        }
    }
}

fn divisor<T: Float>(row: &AveragedSpan, col: &AveragedSpan) -> T::Acc {
    T::Acc::of((row.size * col.size).max(1) as f64)
}

/// The sum of a row, in 16 partial sums where it is long.
#[inline(always)]
fn total<T: Float>(x: &[T]) -> T::Acc {
    let mut blocks = x.chunks_exact(16);
    let mut lanes = [T::Acc::ZERO; 16];
    let long = x.len() >= 16;
    for block in &mut blocks {
        (0..16).for_each(|l| lanes[l] += block[l].up());
    }
    let mut sum = T::Acc::ZERO;
    if long {
        lanes.iter().for_each(|lane| sum += *lane);
    }
    blocks.remainder().iter().for_each(|x| sum += x.up());
    sum
}

/// `[dy] -> [dx]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); the operands are T.
pub(super) unsafe fn average_grad<T: Float>(call: &Call<'_>, spec: Option<&PoolSpec>) {
    let (dy, dx) = (call.src(0), call.dst(0));
    let [rows, cols] = spans(spec, dx, dy);
    let (out, width) = (area(dy), dx.shape()[3]);
    // SAFETY: contiguous source by the kernel's description.
    let grads = unsafe { slice::<T>(dy) };
    // SAFETY: as for this function.
    unsafe {
        gather::<T>(call, dx, area(dx) + out, |p, band, sums| {
            let lines = band.start / width..(band.end - 1) / width + 1;
            let grads = &grads[p * out..(p + 1) * out];
            for (row, grads) in rows.iter().zip(grads.chunks_exact(cols.len().max(1))) {
                let reached = row.elements.start.max(lines.start)..row.elements.end.min(lines.end);
                for (col, dy) in cols.iter().zip(grads) {
                    let share = dy.up() / divisor::<T>(row, col);
                    for i in reached.clone() {
                        let at = i * width + col.elements.start..i * width + col.elements.end;
                        let low = at.start.clamp(band.start, band.end) - band.start;
                        let high = at.end.clamp(band.start, band.end) - band.start;
                        sums[low..high.max(low)]
                            .iter_mut()
                            .for_each(|sum| *sum += share);
                    }
                }
            }
        });
    }
}
