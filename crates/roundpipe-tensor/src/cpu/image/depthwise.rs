//! Filters with one channel per group, applied without laying out columns: row by row, tap by tap.

use std::ops::Range;

use super::conv::ConvJob;
use crate::cpu::access::{Call, Float, Real, SharedSlice};
use crate::cpu::simd::vectorize;

/// Positions of a row that are summed at one time.
const CHUNK: usize = 256;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// Element operations that make a task worth handing over.
const TASK: usize = 1 << 15;

/// Moves `filter: [to, depth]` over `src` and writes the job's elements of `dst`.
pub(super) fn correlate<T: Float>(
    call: &Call<'_>,
    job: &ConvJob,
    src: &[T],
    filter: &[T],
    bias: Option<&[T]>,
    dst: SharedSlice<'_, T>,
) {
    let (from, to) = (job.from / job.groups, job.to / job.groups);
    let (plane, area, depth) = (
        job.rows.size * job.cols.size,
        job.plane[0] * job.plane[1],
        job.depth(),
    );
    let valid: Vec<Range<usize>> = job
        .cols
        .taps
        .iter()
        .map(|tap| job.cols.valid(*tap))
        .collect();
    let work = job.rows.count * job.cols.count * (depth + 1);
    call.pieces(job.images * job.to, TASK / work.max(1), |start, end| {
        for p in start..end {
            let (image, channel) = (p / job.to, p % job.to);
            let first = (image * job.from + channel / to * from) * plane;
            let bias = bias.map_or(T::Acc::ZERO, |b| b[channel].up());
            let filter = &filter[channel * depth..(channel + 1) * depth];
            // SAFETY: each plane of the destination is written by one task.
            let out = unsafe { dst.part(p * area, (p + 1) * area) };
            correlate_plane(
                job,
                &valid,
                &src[first..first + from * plane],
                filter,
                bias,
                out,
            );
        }
    });
}

vectorize! {
    fn correlate_plane<T: Float>(
        job: &ConvJob,
        valid: &[Range<usize>],
        src: &[T],
        filter: &[T],
        bias: T::Acc,
        out: &mut [T],
    ) {
        let (rows, cols) = (&job.rows, &job.cols);
        let plane = rows.size * cols.size;
        let mut sums = [T::Acc::ZERO; CHUNK];
        for i in 0..rows.count {
            for start in (0..cols.count).step_by(CHUNK) {
                let end = (start + CHUNK).min(cols.count);
                let sums = &mut sums[..end - start];
                sums.fill(bias);
                let mut weights = filter.chunks_exact(cols.taps.len().max(1));
                for channel in src.chunks_exact(plane.max(1)) {
                    for tap in &rows.taps {
                        let weights = weights.next().unwrap_or_default();
                        let Some(row) = rows.meets(*tap, i) else { continue };
                        let row = &channel[row * cols.size..(row + 1) * cols.size];
                        for ((tap, valid), weight) in cols.taps.iter().zip(valid).zip(weights) {
                            let low = valid.start.clamp(start, end);
                            let high = valid.end.clamp(low, end);
                            if low < high {
                                let first = (tap.offset + (low * cols.step) as isize) as usize;
                                let sums = &mut sums[low - start..high - start];
                                add_scaled(sums, weight.up(), &row[first..], cols.step);
                            }
                        }
                    }
                }
                let row = (rows.first + i * rows.stride) * job.plane[1];
                let line = &mut out[row + cols.first + start * cols.stride..];
                for (y, sum) in line.iter_mut().step_by(cols.stride).zip(sums) {
                    *y = T::down(*sum);
                }
            }
        }
    }
}

/// sums\[i\] += weight · x\[i · step\].
#[inline(always)]
fn add_scaled<T: Float>(sums: &mut [T::Acc], weight: T::Acc, x: &[T], step: usize) {
    match step {
        1 => sums
            .iter_mut()
            .zip(x)
            .for_each(|(s, x)| *s += weight * x.up()),
        2 => sums
            .iter_mut()
            .zip(x.iter().step_by(2))
            .for_each(|(s, x)| *s += weight * x.up()),
        _ => sums
            .iter_mut()
            .zip(x.iter().step_by(step))
            .for_each(|(s, x)| *s += weight * x.up()),
    }
}

/// `df: [to, taps]` from the images and the outputs' gradient: rows are summed, then images, in
/// order.
pub(super) fn grad_filter<T: Float>(
    call: &Call<'_>,
    job: &ConvJob,
    x: &[T],
    dy: &[T],
    df: &mut [T::Acc],
    accumulate: bool,
) {
    let (taps, per_group) = (job.taps(), job.to / job.groups);
    let (plane, area) = (job.rows.size * job.cols.size, job.plane[0] * job.plane[1]);
    let valid: Vec<Range<usize>> = job
        .cols
        .taps
        .iter()
        .map(|tap| job.cols.valid(*tap))
        .collect();
    let df = SharedSlice::new(df);
    let work = job.images * area * taps;
    call.pieces(job.to, TASK / work.max(1), |start, end| {
        let mut sums = vec![T::Acc::ZERO; taps];
        for channel in start..end {
            // SAFETY: each output channel's filter is written by one task.
            let out = unsafe { df.part(channel * taps, (channel + 1) * taps) };
            if !accumulate {
                out.fill(T::Acc::ZERO);
            }
            for image in 0..job.images {
                let x = &x[(image * job.from + channel / per_group) * plane..][..plane];
                let dy = &dy[(image * job.to + channel) * area..][..area];
                sums.fill(T::Acc::ZERO);
                plane_products(job, &valid, x, dy, &mut sums);
                out.iter_mut()
                    .zip(&sums)
                    .for_each(|(total, sum)| *total += *sum);
            }
        }
    });
}

vectorize! {
    fn plane_products<T: Float>(job: &ConvJob, valid: &[Range<usize>], x: &[T], dy: &[T], sums: &mut [T::Acc]) {
        let (rows, cols) = (&job.rows, &job.cols);
        for (i, dy) in dy.chunks_exact(cols.count.max(1)).enumerate() {
            for (r, tap) in rows.taps.iter().enumerate() {
                let Some(row) = rows.meets(*tap, i) else { continue };
                let row = &x[row * cols.size..(row + 1) * cols.size];
                let sums = &mut sums[r * cols.taps.len()..(r + 1) * cols.taps.len()];
                for ((tap, valid), sum) in cols.taps.iter().zip(valid).zip(sums) {
                    if !valid.is_empty() {
                        let first = (tap.offset + (valid.start * cols.step) as isize) as usize;
                        *sum += dot(&dy[valid.clone()], &row[first..], cols.step);
                    }
                }
            }
        }
    }
}

/// The sum of a\[i\] · b\[i · step\], in [`LANES`] partial sums.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T], step: usize) -> T::Acc {
    let mut lanes = [T::Acc::ZERO; LANES];
    let mut blocks = a.chunks_exact(LANES);
    let mut at = 0;
    for block in &mut blocks {
        match step {
            1 => {
                let b = &b[at..at + LANES];
                (0..LANES).for_each(|l| lanes[l] += block[l].up() * b[l].up());
            }
            _ => (0..LANES).for_each(|l| lanes[l] += block[l].up() * b[(at + l) * step].up()),
        }
        at += LANES;
    }
    for (l, a) in blocks.remainder().iter().enumerate() {
        lanes[l] += a.up() * b[(at + l) * step].up();
    }
    let mut width = LANES / 2;
    while width > 0 {
        (0..width).for_each(|l| lanes[l] += lanes[l + width]);
        width /= 2;
    }
    lanes[0]
}
