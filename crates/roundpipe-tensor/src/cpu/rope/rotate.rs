//! Rotary embedding: pairs of a head's elements rotated by an angle of the head's position.

use super::heads::HeadRows;
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::norm::lanes::{blocks, carve, combine, grain, sum1, sum3, widen};
use crate::cpu::simd::vectorize;
use crate::error::{Error, Result};
use crate::kernel::RopeStyle;

/// Cosines and sines by position, and the position of every (batch, step).
#[derive(Clone, Copy)]
struct Table<'a, A> {
    cos: &'a [A],
    sin: &'a [A],
    /// Angles per position: half the elements rotated.
    angles: usize,
    positions: Option<&'a [i32]>,
    steps: usize,
    heads: usize,
}

impl<'a, A: Real> Table<'a, A> {
    /// From sources `cos`, `cos + 1` and `positions` of the call; x is `[b, s, h, d]`.
    ///
    /// # Safety
    /// As [`Ops::launch`](crate::device::Ops::launch).
    unsafe fn of(call: &Call<'_>, cos: usize, positions: usize) -> Result<Self> {
        let table = call.src(cos).shape().dims();
        let (size, angles) = (table[0], table[1]);
        let dims = call.src(0).shape().dims();
        // SAFETY: the kernel's description gives types, sizes and density.
        let (cos, sin, positions) = unsafe {
            let positions = call.src_opt(positions).map(|v| slice::<i32>(v));
            (
                slice::<A>(call.src(cos)),
                slice::<A>(call.src(cos + 1)),
                positions,
            )
        };
        for (at, &index) in positions.unwrap_or_default().iter().enumerate() {
            if !usize::try_from(index).is_ok_and(|i| i < size) {
                return Err(Error::Index {
                    op: call.kernel.name(),
                    index: i64::from(index),
                    at,
                    size,
                });
            }
        }
        Ok(Self {
            cos,
            sin,
            angles,
            positions,
            steps: dims[1],
            heads: dims[2],
        })
    }

    /// The angles of row `i` of `[b, s, h]`.
    #[inline(always)]
    fn angle(&self, i: usize) -> Angle<'a, A> {
        let place = i / self.heads;
        let position = self
            .positions
            .map_or(place % self.steps, |p| p[place] as usize);
        let at = position * self.angles..(position + 1) * self.angles;
        Angle {
            cos: &self.cos[at.clone()],
            sin: &self.sin[at],
        }
    }
}

/// Cosines and sines of one position.
#[derive(Clone, Copy)]
struct Angle<'a, A> {
    cos: &'a [A],
    sin: &'a [A],
}

/// Pairs of a head that are rotated at a time.
const STAGE: usize = 64;

/// First and second elements of the pairs at hand.
type Stage<A> = [[A; STAGE]; 2];

/// A weight of every element of a head, in the order of [`paired`], and a common factor.
type Scale<'a, A> = Option<(&'a [A], A)>;

/// Turns one head by the angle, or by minus the angle with `sign` -1, after scaling it; elements
/// past the rotated ones are only scaled. Loading, rotating and storing are separate loops over a
/// small stage, so that each vectorises for every type and style.
#[inline(always)]
fn rotate<T: Float, U: Float<Acc = T::Acc>>(
    (x, y): (&[T], &mut [U]),
    angle: Angle<'_, T::Acc>,
    sign: T::Acc,
    style: RopeStyle,
    scale: Scale<'_, T::Acc>,
    stage: &mut Stage<T::Acc>,
) {
    let half = angle.cos.len();
    for from in (0..half).step_by(STAGE) {
        let to = (from + STAGE).min(half);
        let [a, b] = &mut *stage;
        let (a, b) = (&mut a[..to - from], &mut b[..to - from]);
        load(x, half, from, style, a, b);
        if let Some((w, factor)) = scale {
            for (part, w) in [(&mut *a, &w[from..]), (&mut *b, &w[half + from..])] {
                for (p, w) in part.iter_mut().zip(w) {
                    *p = *p * factor * *w;
                }
            }
        }
        let angles = angle.cos[from..to].iter().zip(&angle.sin[from..to]);
        for ((a, b), (cos, sin)) in a.iter_mut().zip(&mut *b).zip(angles) {
            let sin = *sin * sign;
            (*a, *b) = (*a * *cos - *b * sin, *b * *cos + *a * sin);
        }
        store(y, half, from, style, a, b);
    }
    let (x, y) = (&x[2 * half..], &mut y[2 * half..]);
    match scale {
        None => {
            for (y, x) in y.iter_mut().zip(x) {
                *y = U::down(x.up());
            }
        }
        Some((w, factor)) => {
            for ((y, x), w) in y.iter_mut().zip(x).zip(&w[2 * half..]) {
                *y = U::down(x.up() * factor * *w);
            }
        }
    }
}

/// Widens a weight in the order in which [`rotate`] holds a head: first elements of the pairs,
/// second ones, the rest.
///
/// # Safety
/// As [`widen`].
unsafe fn paired<T: Float>(call: &Call<'_>, half: usize, style: RopeStyle, out: &mut [T::Acc]) {
    // SAFETY: passed on.
    unsafe { widen::<T>(call.src_opt(1), out, T::Acc::ONE) };
    let Some(weight) = call.src_opt(1).filter(|_| style == RopeStyle::Interleaved) else {
        return;
    };
    // SAFETY: as above.
    let weight = unsafe { slice::<T>(weight) };
    let (a, b) = out[..2 * half].split_at_mut(half);
    load(weight, half, 0, style, a, b);
}

/// Reads the pairs from `from` on.
#[inline(always)]
fn load<T: Float>(
    x: &[T],
    half: usize,
    from: usize,
    style: RopeStyle,
    a: &mut [T::Acc],
    b: &mut [T::Acc],
) {
    match style {
        RopeStyle::Half => {
            let (first, second) = (&x[from..half], &x[half + from..2 * half]);
            for (a, x) in a.iter_mut().zip(first) {
                *a = x.up();
            }
            for (b, x) in b.iter_mut().zip(second) {
                *b = x.up();
            }
        }
        RopeStyle::Interleaved => {
            let pairs = x[2 * from..2 * half].as_chunks::<2>().0;
            for ((a, b), pair) in a.iter_mut().zip(b).zip(pairs) {
                (*a, *b) = (pair[0].up(), pair[1].up());
            }
        }
    }
}

/// Writes the pairs from `from` on.
#[inline(always)]
fn store<U: Float>(
    y: &mut [U],
    half: usize,
    from: usize,
    style: RopeStyle,
    a: &[U::Acc],
    b: &[U::Acc],
) {
    match style {
        RopeStyle::Half => {
            let (first, second) = y[..2 * half].split_at_mut(half);
            for (y, a) in first[from..].iter_mut().zip(a) {
                *y = U::down(*a);
            }
            for (y, b) in second[from..].iter_mut().zip(b) {
                *y = U::down(*b);
            }
        }
        RopeStyle::Interleaved => {
            let pairs = y[2 * from..2 * half].as_chunks_mut::<2>().0;
            for ((y, a), b) in pairs.iter_mut().zip(a).zip(b) {
                *y = [U::down(*a), U::down(*b)];
            }
        }
    }
}

/// [`Kernel::Rope`](crate::kernel::Kernel::Rope).
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch), `T` is the type of x.
pub(super) unsafe fn rope<T: Float>(
    call: &Call<'_>,
    style: RopeStyle,
    inverse: bool,
) -> Result<()> {
    let width = call.src(0).shape()[3];
    // SAFETY: the kernel's description gives types, sizes and density; y overlaps nothing.
    let (x, table, y) = unsafe {
        let y = SharedSlice::new(slice_mut::<T>(call.dst(0)));
        (
            HeadRows::<T>::new(call.src(0)),
            Table::<T::Acc>::of(call, 1, 3)?,
            y,
        )
    };
    let sign = T::Acc::of(if inverse { -1.0 } else { 1.0 });
    let rows = call.dst(0).numel().checked_div(width).unwrap_or(0);
    call.pieces(rows, grain(width), |first, last| {
        // SAFETY: pieces of rows are disjoint.
        let y = unsafe { y.part(first * width, last * width) };
        rope_rows::<T>(x, table, first, y, sign, style);
    });
    Ok(())
}

vectorize! {
    fn rope_rows<T: Float>(
        x: HeadRows<'_, T>,
        table: Table<'_, T::Acc>,
        first: usize,
        y: &mut [T],
        sign: T::Acc,
        style: RopeStyle,
    ) {
        let width = x.row(first).len();
        let mut stage = [[T::Acc::ZERO; STAGE]; 2];
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            rotate((x.row(first + i), y), table.angle(first + i), sign, style, None, &mut stage);
        }
    }
}

/// [`Kernel::RopeNorm`](crate::kernel::Kernel::RopeNorm).
///
/// # Safety
/// As [`rope`].
pub(super) unsafe fn rope_norm<T: Float>(
    call: &Call<'_>,
    style: RopeStyle,
    eps: f64,
) -> Result<()> {
    let width = call.src(0).shape()[3];
    // SAFETY: as in `rope`; the scratch is used here alone.
    let (x, table, w, y, rstd) = unsafe {
        let w = carve::<T::Acc>(call, width);
        paired::<T>(call, call.src(2).shape()[1], style, w);
        (
            HeadRows::<T>::new(call.src(0)),
            Table::<T::Acc>::of(call, 2, 4)?,
            &*w,
            SharedSlice::new(slice_mut::<T>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
        )
    };
    call.pieces(call.dst(1).numel(), grain(width), |first, last| {
        // SAFETY: pieces of rows are disjoint.
        let (y, rstd) = unsafe { (y.part(first * width, last * width), rstd.part(first, last)) };
        norm_rows::<T>(
            NormRows {
                x,
                table,
                w,
                first,
                y,
                rstd,
            },
            style,
            eps,
        );
    });
    Ok(())
}

/// A piece of [`rope_norm`].
struct NormRows<'a, T: Float> {
    x: HeadRows<'a, T>,
    table: Table<'a, T::Acc>,
    w: &'a [T::Acc],
    first: usize,
    y: &'a mut [T],
    rstd: &'a mut [T::Acc],
}

vectorize! {
    fn norm_rows<T: Float>(rows: NormRows<'_, T>, style: RopeStyle, eps: f64) {
        let NormRows { x, table, w, first, y, rstd } = rows;
        let width = w.len();
        let (count, eps) = (T::Acc::of(width as f64), T::Acc::of(eps));
        let mut stage = [[T::Acc::ZERO; STAGE]; 2];
        for (i, rstd) in rstd.iter_mut().enumerate() {
            let head = x.row(first + i);
            *rstd = T::Acc::ONE / (sum1(head, |x| x * x) / count + eps).sqrt();
            let y = &mut y[i * width..(i + 1) * width];
            let scale = Some((w, *rstd));
            rotate((head, y), table.angle(first + i), T::Acc::ONE, style, scale, &mut stage);
        }
    }
}

/// [`Kernel::RopeNormGrad`](crate::kernel::Kernel::RopeNormGrad).
///
/// # Safety
/// As [`rope`].
pub(super) unsafe fn rope_norm_grad<T: Float>(
    call: &Call<'_>,
    style: RopeStyle,
    accumulate: bool,
) -> Result<()> {
    let width = call.src(0).shape()[3];
    let rows = call.src(2).numel();
    let cut = blocks(rows, width);
    let want = call.dst_opt(1).is_some();
    // SAFETY: as in `rope_norm`.
    let (x, rstd, table, dy, dx, (w, rest)) = unsafe {
        let scratch = carve::<T::Acc>(call, width * (1 + cut.count * (1 + usize::from(want))));
        widen::<T>(call.src_opt(1), &mut scratch[..width], T::Acc::ONE);
        (
            HeadRows::<T>::new(call.src(0)),
            slice::<T::Acc>(call.src(2)),
            Table::<T::Acc>::of(call, 3, 6)?,
            HeadRows::<T>::new(call.src(5)),
            call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v))),
            scratch.split_at_mut(width),
        )
    };
    let (rotated, partial) = rest.split_at_mut(width * cut.count);
    let (w, rotated, sums) = (&*w, SharedSlice::new(rotated), SharedSlice::new(partial));
    call.pieces(rows, cut.rows, |first, last| {
        let block = first / cut.rows * width;
        // SAFETY: pieces of rows, and so blocks, are disjoint.
        let (dx, rotated, dw) = unsafe {
            let dx = dx.as_ref().map(|d| d.part(first * width, last * width));
            (
                dx,
                rotated.part(block, block + width),
                want.then(|| sums.part(block, block + width)),
            )
        };
        let rstd = &rstd[first..last];
        norm_rows_grad::<T>(
            NormBlock {
                x,
                dy,
                table,
                w,
                first,
                rstd,
                rotated,
                dx,
                dw,
            },
            style,
        );
    });
    if let Some(dw) = call.dst_opt(1) {
        // SAFETY: dw is dense, in the accumulator type; the tasks that wrote the partial sums are
        // done.
        combine(
            call,
            partial,
            unsafe { slice_mut::<T::Acc>(dw) },
            accumulate,
        );
    }
    Ok(())
}

/// A block of [`rope_norm_grad`].
struct NormBlock<'a, T: Float> {
    x: HeadRows<'a, T>,
    dy: HeadRows<'a, T>,
    table: Table<'a, T::Acc>,
    w: &'a [T::Acc],
    first: usize,
    rstd: &'a [T::Acc],
    /// Room for the gradient of one normalised head.
    rotated: &'a mut [T::Acc],
    dx: Option<&'a mut [T]>,
    dw: Option<&'a mut [T::Acc]>,
}

vectorize! {
    fn norm_rows_grad<T: Float>(block: NormBlock<'_, T>, style: RopeStyle) {
        let NormBlock { x, dy, table, w, first, rstd, rotated, mut dx, mut dw } = block;
        let width = w.len();
        if let Some(dw) = &mut dw {
            dw.fill(T::Acc::ZERO);
        }
        let mut stage = [[T::Acc::ZERO; STAGE]; 2];
        for (i, &rstd) in rstd.iter().enumerate() {
            let x = x.row(first + i);
            let (head, angle) = (dy.row(first + i), table.angle(first + i));
            rotate((head, &mut *rotated), angle, -T::Acc::ONE, style, None, &mut stage);
            if let Some(dx) = &mut dx {
                let mean = sum3(x, rotated, w, |x, g, w| g * w * x) * rstd / T::Acc::of(width as f64);
                let dx = &mut dx[i * width..(i + 1) * width];
                for (((d, x), g), w) in dx.iter_mut().zip(x).zip(&*rotated).zip(w) {
                    *d = T::down(rstd * (*g * *w - x.up() * rstd * mean));
                }
            }
            if let Some(dw) = &mut dw {
                for ((dw, x), g) in dw.iter_mut().zip(x).zip(&*rotated) {
                    *dw += *g * (x.up() * rstd);
                }
            }
        }
    }
}
