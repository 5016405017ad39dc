//! RMS norm and layer norm: every row of the last dimension is normalised by itself.

use super::lanes::{blocks, carve, combine, grain, sum1, sum3, widen};
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::simd::vectorize;

/// [`Kernel::RmsNorm`](crate::kernel::Kernel::RmsNorm).
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch), `T` is the type of x.
pub(super) unsafe fn rms<T: Float>(call: &Call<'_>, eps: f64) {
    // SAFETY: the kernel's description gives types, sizes and density; destinations overlap
    // nothing.
    let (x, residual, w, y, rstd, sum) = unsafe {
        let w = carve::<T::Acc>(call, call.src(0).shape().last().copied().unwrap_or(1));
        widen::<T>(call.src_opt(1), w, T::Acc::ONE);
        (
            slice::<T>(call.src(0)),
            call.src_opt(2).map(|v| slice::<T>(v)),
            &*w,
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
            call.dst_opt(2).map(|v| SharedSlice::new(slice_mut::<T>(v))),
        )
    };
    let (cols, rows) = (w.len(), call.dst(1).numel());
    call.pieces(rows, grain(cols), |a, b| {
        let (from, to) = (a * cols, b * cols);
        // SAFETY: pieces of rows are disjoint.
        let (y, rstd, sum) = unsafe {
            (
                y.part(from, to),
                rstd.part(a, b),
                sum.as_ref().map(|s| s.part(from, to)),
            )
        };
        let joined = residual.zip(sum).map(|(r, s)| (&r[from..to], s));
        rms_rows::<T>(&x[from..to], joined, w, y, rstd, eps);
    });
}

vectorize! {
    fn rms_rows<T: Float>(
        x: &[T],
        joined: Option<(&[T], &mut [T])>,
        w: &[T::Acc],
        y: &mut [T],
        rstd: &mut [T::Acc],
        eps: f64,
    ) {
        let cols = w.len();
        let (count, eps) = (T::Acc::of(cols as f64), T::Acc::of(eps));
        let mut joined = joined;
        for (i, rstd) in rstd.iter_mut().enumerate() {
            let at = i * cols..(i + 1) * cols;
            let row = match &mut joined {
                Some((residual, sum)) => {
                    let sum = &mut sum[at.clone()];
                    for ((s, x), r) in sum.iter_mut().zip(&x[at.clone()]).zip(&residual[at.clone()]) {
                        *s = T::down(x.up() + r.up());
                    }
                    &*sum
                }
                None => &x[at.clone()],
            };
            let scale = T::Acc::ONE / (sum1(row, |x| x * x) / count + eps).sqrt();
            *rstd = scale;
            for ((y, x), w) in y[at].iter_mut().zip(row).zip(w) {
                *y = T::down(x.up() * scale * *w);
            }
        }
    }
}

/// [`Kernel::RmsNormGrad`](crate::kernel::Kernel::RmsNormGrad).
///
/// # Safety
/// As [`rms`].
pub(super) unsafe fn rms_grad<T: Float>(call: &Call<'_>, accumulate: bool) {
    let cols = call.src(0).shape().last().copied().unwrap_or(1);
    let rows = call.src(2).numel();
    let cut = blocks(rows, cols);
    let want = call.dst_opt(1).is_some();
    // SAFETY: as in `rms`.
    let (x, rstd, dy, dsum, dx, (w, partial)) = unsafe {
        let scratch = carve::<T::Acc>(call, cols * (1 + cut.count * usize::from(want)));
        widen::<T>(call.src_opt(1), &mut scratch[..cols], T::Acc::ONE);
        (
            slice::<T>(call.src(0)),
            slice::<T::Acc>(call.src(2)),
            slice::<T>(call.src(3)),
            call.src_opt(4).map(|v| slice::<T>(v)),
            call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v))),
            scratch.split_at_mut(cols),
        )
    };
    let (w, shared) = (&*w, SharedSlice::new(partial));
    call.pieces(rows, cut.rows, |a, b| {
        let (from, to, block) = (a * cols, b * cols, a / cut.rows);
        // SAFETY: pieces of rows, and so blocks, are disjoint.
        let (dx, dw) = unsafe {
            let dw = want.then(|| shared.part(block * cols, (block + 1) * cols));
            (dx.as_ref().map(|d| d.part(from, to)), dw)
        };
        let (x, dy, dsum) = (&x[from..to], &dy[from..to], dsum.map(|d| &d[from..to]));
        rms_rows_grad::<T>(RmsBlock {
            x,
            dy,
            dsum,
            w,
            rstd: &rstd[a..b],
            dx,
            dw,
        });
    });
    if let Some(dw) = call.dst_opt(1) {
        // SAFETY: dw is dense, in the accumulator type, and the tasks that wrote the partial sums
        // are done.
        combine(
            call,
            partial,
            unsafe { slice_mut::<T::Acc>(dw) },
            accumulate,
        );
    }
}

/// A block of rows of [`rms_grad`].
struct RmsBlock<'a, T: Float> {
    x: &'a [T],
    dy: &'a [T],
    dsum: Option<&'a [T]>,
    w: &'a [T::Acc],
    rstd: &'a [T::Acc],
    dx: Option<&'a mut [T]>,
    dw: Option<&'a mut [T::Acc]>,
}

vectorize! {
    fn rms_rows_grad<T: Float>(block: RmsBlock<'_, T>) {
        let RmsBlock { x, dy, dsum, w, rstd, mut dx, mut dw } = block;
        let cols = w.len();
        if let Some(dw) = &mut dw {
            dw.fill(T::Acc::ZERO);
        }
        for (i, &rstd) in rstd.iter().enumerate() {
            let at = i * cols..(i + 1) * cols;
            let (x, dy) = (&x[at.clone()], &dy[at.clone()]);
            if let Some(dx) = &mut dx {
                // dx = rstd · (g - x̂ · mean(g · x̂)) with g = dy · w and x̂ = x · rstd.
                let mean = sum3(x, dy, w, |x, dy, w| dy * w * x) * rstd / T::Acc::of(cols as f64);
                let dx = &mut dx[at.clone()];
                match dsum {
                    None => {
                        for (((d, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(w) {
                            *d = T::down(rstd * (dy.up() * *w - x.up() * rstd * mean));
                        }
                    }
                    Some(dsum) => {
                        for ((((d, x), dy), w), s) in dx.iter_mut().zip(x).zip(dy).zip(w).zip(&dsum[at]) {
                            *d = T::down(rstd * (dy.up() * *w - x.up() * rstd * mean) + s.up());
                        }
                    }
                }
            }
            if let Some(dw) = &mut dw {
                for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
                    *dw += dy.up() * (x.up() * rstd);
                }
            }
        }
    }
}

/// [`Kernel::LayerNorm`](crate::kernel::Kernel::LayerNorm).
///
/// # Safety
/// As [`rms`].
pub(super) unsafe fn layer<T: Float>(call: &Call<'_>, eps: f64) {
    let cols = call.src(0).shape().last().copied().unwrap_or(1);
    // SAFETY: as in `rms`.
    let (x, (w, b), y, mean, rstd) = unsafe {
        let scratch = carve::<T::Acc>(call, 2 * cols).split_at_mut(cols);
        widen::<T>(call.src_opt(1), scratch.0, T::Acc::ONE);
        widen::<T>(call.src_opt(2), scratch.1, T::Acc::ZERO);
        (
            slice::<T>(call.src(0)),
            (&*scratch.0, &*scratch.1),
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(2))),
        )
    };
    call.pieces(call.dst(1).numel(), grain(cols), |first, last| {
        let (from, to) = (first * cols, last * cols);
        // SAFETY: pieces of rows are disjoint.
        let (y, mean, rstd) = unsafe {
            (
                y.part(from, to),
                mean.part(first, last),
                rstd.part(first, last),
            )
        };
        layer_rows::<T>(&x[from..to], w, b, y, mean, rstd, eps);
    });
}

/// Mean and variance of a row. The first mean is rounded; the second pass finds what it missed,
/// corrects it, and takes the error out of the variance.
#[inline(always)]
pub(super) fn moments<T: Float>(row: &[T]) -> (T::Acc, T::Acc) {
    let count = T::Acc::of(row.len() as f64);
    let near = sum1(row, |x| x) / count;
    let missed = sum1(row, |x| x - near) / count;
    let spread = sum1(row, |x| (x - near) * (x - near)) / count;
    (near + missed, spread - missed * missed)
}

vectorize! {
    fn layer_rows<T: Float>(
        x: &[T],
        w: &[T::Acc],
        b: &[T::Acc],
        y: &mut [T],
        mean: &mut [T::Acc],
        rstd: &mut [T::Acc],
        eps: f64,
    ) {
        let cols = w.len();
        for (i, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
            let at = i * cols..(i + 1) * cols;
            let row = &x[at.clone()];
            let (center, var) = moments(row);
            let scale = T::Acc::ONE / (var + T::Acc::of(eps)).sqrt();
            (*mean, *rstd) = (center, scale);
            for (((y, x), w), b) in y[at].iter_mut().zip(row).zip(w).zip(b) {
                *y = T::down((x.up() - center) * scale * *w + *b);
            }
        }
    }
}

/// [`Kernel::LayerNormGrad`](crate::kernel::Kernel::LayerNormGrad).
///
/// # Safety
/// As [`rms`].
pub(super) unsafe fn layer_grad<T: Float>(call: &Call<'_>, accumulate: bool) {
    let cols = call.src(0).shape().last().copied().unwrap_or(1);
    let rows = call.src(2).numel();
    let cut = blocks(rows, cols);
    let (want_w, want_b) = (call.dst_opt(1).is_some(), call.dst_opt(2).is_some());
    let sums = |want: bool| cols * cut.count * usize::from(want);
    // SAFETY: as in `rms`.
    let (x, mean, rstd, dy, dx, (w, partial)) = unsafe {
        let scratch = carve::<T::Acc>(call, cols + sums(want_w) + sums(want_b));
        widen::<T>(call.src_opt(1), &mut scratch[..cols], T::Acc::ONE);
        (
            slice::<T>(call.src(0)),
            slice::<T::Acc>(call.src(2)),
            slice::<T::Acc>(call.src(3)),
            slice::<T>(call.src(4)),
            call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v))),
            scratch.split_at_mut(cols),
        )
    };
    let (partial_w, partial_b) = partial.split_at_mut(sums(want_w));
    let (w, shared_w, shared_b) = (
        &*w,
        SharedSlice::new(partial_w),
        SharedSlice::new(partial_b),
    );
    call.pieces(rows, cut.rows, |a, b| {
        let (from, to, block) = (a * cols, b * cols, a / cut.rows);
        let own = (block * cols, (block + 1) * cols);
        // SAFETY: pieces of rows, and so blocks, are disjoint.
        let (dx, dw, db) = unsafe {
            (
                dx.as_ref().map(|d| d.part(from, to)),
                want_w.then(|| shared_w.part(own.0, own.1)),
                want_b.then(|| shared_b.part(own.0, own.1)),
            )
        };
        let (x, dy) = (&x[from..to], &dy[from..to]);
        layer_rows_grad::<T>(LayerBlock {
            x,
            dy,
            w,
            mean: &mean[a..b],
            rstd: &rstd[a..b],
            dx,
            dw,
            db,
        });
    });
    for (dst, partial) in [(1, partial_w), (2, partial_b)] {
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

/// A block of rows of [`layer_grad`].
struct LayerBlock<'a, T: Float> {
    x: &'a [T],
    dy: &'a [T],
    w: &'a [T::Acc],
    mean: &'a [T::Acc],
    rstd: &'a [T::Acc],
    dx: Option<&'a mut [T]>,
    dw: Option<&'a mut [T::Acc]>,
    db: Option<&'a mut [T::Acc]>,
}

vectorize! {
    fn layer_rows_grad<T: Float>(block: LayerBlock<'_, T>) {
        let LayerBlock { x, dy, w, mean, rstd, mut dx, mut dw, mut db } = block;
        let cols = w.len();
        let count = T::Acc::of(cols as f64);
        for sums in [&mut dw, &mut db].into_iter().flatten() {
            sums.fill(T::Acc::ZERO);
        }
        for (i, (&mean, &rstd)) in mean.iter().zip(rstd).enumerate() {
            let at = i * cols..(i + 1) * cols;
            let (x, dy) = (&x[at.clone()], &dy[at.clone()]);
            if let Some(dx) = &mut dx {
                // dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w and x̂ = (x - mean)
                // · rstd.
                let flat = sum3(x, dy, w, |_, dy, w| dy * w) / count;
                let along = sum3(x, dy, w, |x, dy, w| dy * w * (x - mean)) * rstd / count;
                for (((d, x), dy), w) in dx[at].iter_mut().zip(x).zip(dy).zip(w) {
                    *d = T::down(rstd * (dy.up() * *w - flat - (x.up() - mean) * rstd * along));
                }
            }
            if let Some(dw) = &mut dw {
                for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
                    *dw += dy.up() * ((x.up() - mean) * rstd);
                }
            }
            if let Some(db) = &mut db {
                for (db, dy) in db.iter_mut().zip(dy) {
                    *db += dy.up();
                }
            }
        }
    }
}
