//! Group norm and batch norm of `[n, c, ..]`: a plane is what lies under one sample and one
//! channel.
//!
//! A group's planes lie side by side and are normalised as one row. Batch norm's tasks are runs of
//! channels; each goes over all samples, so no two tasks share a sum.

use super::lanes::{carve, combine, grain, sum1, sum2};
use super::rows::moments;
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::simd::vectorize;
use crate::kernel::View;

/// Sizes of `[n, c, plane]`.
#[derive(Debug, Clone, Copy)]
struct PlaneSizes {
    samples: usize,
    channels: usize,
    plane: usize,
}

impl PlaneSizes {
    fn of(view: &View) -> Self {
        let dims = view.shape().dims();
        Self {
            samples: dims[0],
            channels: dims[1],
            plane: dims[2..].iter().product(),
        }
    }

    /// Those of a sum over samples: empty ones, which take no memory and may be any number, have
    /// nothing to add.
    fn summed(view: &View) -> Self {
        let sizes = Self::of(view);
        if sizes.plane == 0 {
            Self {
                samples: 0,
                ..sizes
            }
        } else {
            sizes
        }
    }
}

/// A weight or a bias of every channel.
///
/// # Safety
/// As [`slice`] of `T`.
unsafe fn per_channel<'a, T: Float>(call: &Call<'_>, i: usize) -> Option<&'a [T]> {
    // SAFETY: promised by the caller.
    call.src_opt(i).map(|v| unsafe { slice::<T>(v) })
}

/// [`Kernel::GroupNorm`](crate::kernel::Kernel::GroupNorm).
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch), `T` is the type of x.
pub(super) unsafe fn group<T: Float>(call: &Call<'_>, groups: usize, eps: f64) {
    let sizes = PlaneSizes::of(call.src(0));
    let width = sizes.channels / groups;
    let row = width * sizes.plane;
    // SAFETY: the kernel's description gives types, sizes and density; destinations overlap
    // nothing.
    let (x, w, b, y, mean, rstd) = unsafe {
        (
            slice::<T>(call.src(0)),
            per_channel::<T>(call, 1),
            per_channel::<T>(call, 2),
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(2))),
        )
    };
    call.pieces(sizes.samples * groups, grain(row), |first, last| {
        // SAFETY: pieces of groups are disjoint.
        let (y, mean, rstd) = unsafe {
            (
                y.part(first * row, last * row),
                mean.part(first, last),
                rstd.part(first, last),
            )
        };
        for i in 0..last - first {
            let channel = (first + i) % groups * width;
            let affine = Affine {
                w,
                b,
                channel,
                plane: sizes.plane,
            };
            let at = i * row..(i + 1) * row;
            let x = &x[(first + i) * row..(first + i + 1) * row];
            (mean[i], rstd[i]) = group_row::<T>(x, affine, &mut y[at], eps);
        }
    });
}

/// Weight and bias of the channels from `channel` on.
#[derive(Clone, Copy)]
struct Affine<'a, T> {
    w: Option<&'a [T]>,
    b: Option<&'a [T]>,
    channel: usize,
    plane: usize,
}

impl<T: Float> Affine<'_, T> {
    #[inline(always)]
    fn weight(&self, i: usize) -> T::Acc {
        self.w.map_or(T::Acc::ONE, |w| w[self.channel + i].up())
    }

    #[inline(always)]
    fn bias(&self, i: usize) -> T::Acc {
        self.b.map_or(T::Acc::ZERO, |b| b[self.channel + i].up())
    }
}

vectorize! {
    /// Normalises one group of one sample; gives its mean and rstd.
    fn group_row<T: Float>(x: &[T], affine: Affine<'_, T>, y: &mut [T], eps: f64) -> (T::Acc, T::Acc) {
        let (mean, var) = moments(x);
        let rstd = T::Acc::ONE / (var + T::Acc::of(eps)).sqrt();
        let plane = affine.plane.max(1);
        for (i, (x, y)) in x.chunks_exact(plane).zip(y.chunks_exact_mut(plane)).enumerate() {
            scale_plane(x, y, mean, rstd, affine.weight(i), affine.bias(i));
        }
        (mean, rstd)
    }
}

/// y = (x - mean) · rstd · w + b.
#[inline(always)]
fn scale_plane<T: Float>(x: &[T], y: &mut [T], mean: T::Acc, rstd: T::Acc, w: T::Acc, b: T::Acc) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::down((x.up() - mean) * rstd * w + b);
    }
}

/// [`Kernel::GroupNormGrad`](crate::kernel::Kernel::GroupNormGrad).
///
/// # Safety
/// As [`group`].
pub(super) unsafe fn group_grad<T: Float>(call: &Call<'_>, groups: usize, accumulate: bool) {
    let sizes = PlaneSizes::of(call.src(0));
    let width = sizes.channels / groups;
    let row = width * sizes.plane;
    let planes = sizes.samples * sizes.channels;
    // SAFETY: as in `group`; the scratch is used here alone.
    let (x, w, mean, rstd, dy, dx, (along, flat)) = unsafe {
        (
            slice::<T>(call.src(0)),
            per_channel::<T>(call, 1),
            slice::<T::Acc>(call.src(2)),
            slice::<T::Acc>(call.src(3)),
            slice::<T>(call.src(4)),
            call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v))),
            carve::<T::Acc>(call, 2 * planes).split_at_mut(planes),
        )
    };
    let sums = (SharedSlice::new(along), SharedSlice::new(flat));
    call.pieces(sizes.samples * groups, grain(row), |first, last| {
        for i in first..last {
            let at = (i * row, (i + 1) * row);
            let own = (i * width, (i + 1) * width);
            // SAFETY: groups are disjoint, and so are their sums.
            let (dx, along, flat) = unsafe {
                (
                    dx.as_ref().map(|d| d.part(at.0, at.1)),
                    sums.0.part(own.0, own.1),
                    sums.1.part(own.0, own.1),
                )
            };
            let affine = Affine {
                w,
                b: None,
                channel: i % groups * width,
                plane: sizes.plane,
            };
            let (x, dy) = (&x[at.0..at.1], &dy[at.0..at.1]);
            group_row_grad::<T>(GroupRow {
                x,
                dy,
                affine,
                mean: mean[i],
                rstd: rstd[i],
                dx,
                along,
                flat,
            });
        }
    });
    for (dst, partial) in [(1, along), (2, flat)] {
        if let Some(grad) = call.dst_opt(dst) {
            // SAFETY: dw and db are dense, in the accumulator type; the tasks that wrote the sums
            // are done.
            combine(
                call,
                partial,
                unsafe { slice_mut::<T::Acc>(grad) },
                accumulate,
            );
        }
    }
}

/// One group of one sample of [`group_grad`].
struct GroupRow<'a, T: Float> {
    x: &'a [T],
    dy: &'a [T],
    affine: Affine<'a, T>,
    mean: T::Acc,
    rstd: T::Acc,
    dx: Option<&'a mut [T]>,
    /// Sum of dy · x̂ of each channel.
    along: &'a mut [T::Acc],
    /// Sum of dy of each channel.
    flat: &'a mut [T::Acc],
}

vectorize! {
    fn group_row_grad<T: Float>(row: GroupRow<'_, T>) {
        let GroupRow { x, dy, affine, mean, rstd, dx, along, flat } = row;
        let plane = affine.plane.max(1);
        let pairs = || x.chunks_exact(plane).zip(dy.chunks_exact(plane));
        let (mut total_along, mut total_flat) = (T::Acc::ZERO, T::Acc::ZERO);
        along.fill(T::Acc::ZERO);
        flat.fill(T::Acc::ZERO);
        for (i, (x, dy)) in pairs().enumerate() {
            along[i] = sum2(x, dy, |x, dy| dy * ((x - mean) * rstd));
            flat[i] = sum1(dy, |dy| dy);
            total_along += affine.weight(i) * along[i];
            total_flat += affine.weight(i) * flat[i];
        }
        let Some(dx) = dx else { return };
        let count = T::Acc::of(x.len() as f64);
        let (total_along, total_flat) = (total_along / count, total_flat / count);
        for (i, ((x, dy), dx)) in pairs().zip(dx.chunks_exact_mut(plane)).enumerate() {
            let w = affine.weight(i);
            for ((d, x), dy) in dx.iter_mut().zip(x).zip(dy) {
                let hat = (x.up() - mean) * rstd;
                *d = T::down(rstd * (dy.up() * w - total_flat - hat * total_along));
            }
        }
    }
}

/// The most channels of one batch norm task: its sums live on the stack.
const RUN: usize = 64;

/// Channels per task of a batch norm. Without planes (`[n, c]`) channels are the vector.
fn run_of(sizes: PlaneSizes) -> usize {
    let least = if sizes.plane == 1 { 16 } else { 1 };
    grain(sizes.samples * sizes.plane).clamp(least, RUN)
}

/// [`Kernel::BatchNorm`](crate::kernel::Kernel::BatchNorm).
///
/// # Safety
/// As [`group`].
pub(super) unsafe fn batch<T: Float>(call: &Call<'_>, eps: f64) {
    let sizes = PlaneSizes::summed(call.src(0));
    // SAFETY: as in `group`.
    let (x, w, b, given, y, mean, rstd, var) = unsafe {
        let given = call.src_opt(3).zip(call.src_opt(4));
        (
            slice::<T>(call.src(0)),
            per_channel::<T>(call, 1),
            per_channel::<T>(call, 2),
            given.map(|(m, v)| (slice::<T::Acc>(m), slice::<T::Acc>(v))),
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(2))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(3))),
        )
    };
    call.pieces(sizes.channels, run_of(sizes), |first, last| {
        // SAFETY: runs of channels are disjoint.
        let (mean, rstd, var) = unsafe {
            (
                mean.part(first, last),
                rstd.part(first, last),
                var.part(first, last),
            )
        };
        match given {
            Some((m, v)) => {
                mean.copy_from_slice(&m[first..last]);
                var.copy_from_slice(&v[first..last]);
            }
            None => batch_moments::<T>(x, sizes, first, mean, var),
        }
        for (rstd, var) in rstd.iter_mut().zip(var) {
            *rstd = T::Acc::ONE / (*var + T::Acc::of(eps)).sqrt();
        }
        let affine = Affine {
            w,
            b,
            channel: first,
            plane: sizes.plane,
        };
        for sample in 0..sizes.samples {
            let (from, to) = slab(sizes, sample, first, last);
            // SAFETY: runs of channels are disjoint in every sample.
            let y = unsafe { y.part(from, to) };
            batch_slab::<T>(&x[from..to], affine, mean, rstd, y);
        }
    });
}

/// Where channels `first..last` of a sample lie.
fn slab(sizes: PlaneSizes, sample: usize, first: usize, last: usize) -> (usize, usize) {
    let base = sample * sizes.channels;
    ((base + first) * sizes.plane, (base + last) * sizes.plane)
}

/// Adds the sum of f over every plane of a slab to its channel's sum.
#[inline(always)]
fn add_planes<T: Float>(
    x: &[T],
    plane: usize,
    sums: &mut [T::Acc],
    f: impl Fn(usize, T::Acc) -> T::Acc,
) {
    if plane == 1 {
        for (i, (sum, x)) in sums.iter_mut().zip(x).enumerate() {
            *sum += f(i, x.up());
        }
        return;
    }
    for (i, (sum, x)) in sums
        .iter_mut()
        .zip(x.chunks_exact(plane.max(1)))
        .enumerate()
    {
        *sum += sum1(x, |x| f(i, x));
    }
}

vectorize! {
    /// Means and biased variances of the channels from `first` on, corrected as in [`moments`].
    fn batch_moments<T: Float>(x: &[T], sizes: PlaneSizes, first: usize, mean: &mut [T::Acc], var: &mut [T::Acc]) {
        let last = first + mean.len();
        let part = |sample| {
            let (from, to) = slab(sizes, sample, first, last);
            &x[from..to]
        };
        let count = T::Acc::of((sizes.samples * sizes.plane) as f64);
        let mut missed = [T::Acc::ZERO; RUN];
        let missed = &mut missed[..mean.len()];
        mean.fill(T::Acc::ZERO);
        var.fill(T::Acc::ZERO);
        for sample in 0..sizes.samples {
            add_planes(part(sample), sizes.plane, mean, |_, x| x);
        }
        mean.iter_mut().for_each(|m| *m = *m / count);
        let near = &*mean;
        for sample in 0..sizes.samples {
            add_planes(part(sample), sizes.plane, missed, |i, x| x - near[i]);
            add_planes(part(sample), sizes.plane, var, |i, x| (x - near[i]) * (x - near[i]));
        }
        for ((mean, var), missed) in mean.iter_mut().zip(var).zip(missed) {
            let missed = *missed / count;
            *var = *var / count - missed * missed;
            *mean += missed;
        }
    }
}

vectorize! {
    fn batch_slab<T: Float>(x: &[T], affine: Affine<'_, T>, mean: &[T::Acc], rstd: &[T::Acc], y: &mut [T]) {
        let plane = affine.plane.max(1);
        for (i, (x, y)) in x.chunks_exact(plane).zip(y.chunks_exact_mut(plane)).enumerate() {
            scale_plane(x, y, mean[i], rstd[i], affine.weight(i), affine.bias(i));
        }
    }
}

/// [`Kernel::BatchNormGrad`](crate::kernel::Kernel::BatchNormGrad).
///
/// # Safety
/// As [`group`].
pub(super) unsafe fn batch_grad<T: Float>(call: &Call<'_>, batch_stats: bool, accumulate: bool) {
    let sizes = PlaneSizes::summed(call.src(0));
    // SAFETY: as in `group`.
    let (x, w, mean, rstd, dy, dx, dw, db) = unsafe {
        let sums = |i| {
            call.dst_opt(i)
                .map(|v| SharedSlice::new(slice_mut::<T::Acc>(v)))
        };
        (
            slice::<T>(call.src(0)),
            per_channel::<T>(call, 1),
            slice::<T::Acc>(call.src(2)),
            slice::<T::Acc>(call.src(3)),
            slice::<T>(call.src(4)),
            call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v))),
            sums(1),
            sums(2),
        )
    };
    call.pieces(sizes.channels, run_of(sizes), |first, last| {
        let affine = Affine {
            w,
            b: None,
            channel: first,
            plane: sizes.plane,
        };
        let run = ChannelRun {
            x,
            dy,
            sizes,
            affine,
            mean: &mean[first..last],
            rstd: &rstd[first..last],
        };
        let mut sums = [[T::Acc::ZERO; RUN]; 2];
        let [along, flat] = &mut sums;
        let (along, flat) = (&mut along[..last - first], &mut flat[..last - first]);
        batch_sums::<T>(run, along, flat);
        for (dst, sums) in [(&dw, &*along), (&db, &*flat)] {
            let Some(dst) = dst else { continue };
            // SAFETY: runs of channels are disjoint.
            let dst = unsafe { dst.part(first, last) };
            for (d, s) in dst.iter_mut().zip(sums) {
                *d = if accumulate { *d + *s } else { *s };
            }
        }
        let Some(dx) = &dx else { return };
        // With constant statistics nothing flows through them.
        let share =
            T::Acc::of(if batch_stats { 1.0 } else { 0.0 } / (sizes.samples * sizes.plane) as f64);
        along.iter_mut().chain(&mut *flat).for_each(|s| *s *= share);
        for sample in 0..sizes.samples {
            let (from, to) = slab(sizes, sample, first, last);
            // SAFETY: runs of channels are disjoint in every sample.
            let dx = unsafe { dx.part(from, to) };
            batch_dx::<T>(run, from, along, flat, dx);
        }
    });
}

/// A run of channels of [`batch_grad`]; x and dy are whole.
#[derive(Clone, Copy)]
struct ChannelRun<'a, T: Float> {
    x: &'a [T],
    dy: &'a [T],
    sizes: PlaneSizes,
    affine: Affine<'a, T>,
    mean: &'a [T::Acc],
    rstd: &'a [T::Acc],
}

vectorize! {
    /// Sums of dy · x̂ and of dy of each channel.
    fn batch_sums<T: Float>(run: ChannelRun<'_, T>, along: &mut [T::Acc], flat: &mut [T::Acc]) {
        let ChannelRun { x, dy, sizes, affine, mean, rstd } = run;
        let plane = sizes.plane;
        for sample in 0..sizes.samples {
            let (from, to) = slab(sizes, sample, affine.channel, affine.channel + mean.len());
            let (x, dy) = (&x[from..to], &dy[from..to]);
            add_planes(dy, plane, flat, |_, dy| dy);
            if plane == 1 {
                for ((((a, x), dy), m), r) in along.iter_mut().zip(x).zip(dy).zip(mean).zip(rstd) {
                    *a += dy.up() * ((x.up() - *m) * *r);
                }
                continue;
            }
            let planes = x.chunks_exact(plane.max(1)).zip(dy.chunks_exact(plane.max(1)));
            for (i, (x, dy)) in planes.enumerate() {
                along[i] += sum2(x, dy, |x, dy| dy * ((x - mean[i]) * rstd[i]));
            }
        }
    }
}

vectorize! {
    /// dx = w · rstd · (dy - flat - x̂ · along) of the slab that begins at element `from`.
    fn batch_dx<T: Float>(run: ChannelRun<'_, T>, from: usize, along: &[T::Acc], flat: &[T::Acc], dx: &mut [T]) {
        let plane = run.sizes.plane.max(1);
        let to = from + dx.len();
        let planes = run.x[from..to].chunks_exact(plane).zip(run.dy[from..to].chunks_exact(plane));
        for (i, ((x, dy), dx)) in planes.zip(dx.chunks_exact_mut(plane)).enumerate() {
            let (mean, rstd, w) = (run.mean[i], run.rstd[i], run.affine.weight(i));
            for ((d, x), dy) in dx.iter_mut().zip(x).zip(dy) {
                let hat = (x.up() - mean) * rstd;
                *d = T::down(w * rstd * (dy.up() - flat[i] - hat * along[i]));
            }
        }
    }
}
