//! Gated linear units: up, let through by a function of the gate.

use super::heads::{HeadRows, RowsMut};
use super::lanes::{grain, rows_of};
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::simd::vectorize;
use crate::error::Result;
use crate::kernel::{Glu, View};

/// [`Kernel::Glu`](crate::kernel::Kernel::Glu).
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch), `T` is the type of the gate.
pub(super) unsafe fn forward<T: Float>(call: &Call<'_>, kind: Glu) -> Result<()> {
    let (gate, up, y) = (call.src(0), call.src(1), call.dst(0));
    if [gate, up].iter().all(|v| v.layout.is_contiguous()) {
        // SAFETY: dense by the test above and the kernel's description; y overlaps nothing.
        let (gate, up, y) = unsafe {
            (
                slice::<T>(gate),
                slice::<T>(up),
                SharedSlice::new(slice_mut::<T>(y)),
            )
        };
        call.pieces(gate.len(), grain(1), |a, b| {
            // SAFETY: pieces are disjoint.
            gate_row::<T>(&gate[a..b], &up[a..b], unsafe { y.part(a, b) }, kind);
        });
        return Ok(());
    }
    // SAFETY: the last dimensions are dense by the kernel's description; y overlaps nothing.
    let (from, to) = unsafe {
        (
            (HeadRows::<T>::new(gate), HeadRows::<T>::new(up)),
            RowsMut::<T>::new(y),
        )
    };
    each_row(call, gate, |row| {
        // SAFETY: every row is visited once.
        gate_row::<T>(
            from.0.row(row),
            from.1.row(row),
            unsafe { to.row(row) },
            kind,
        );
    });
    Ok(())
}

/// [`Kernel::GluGrad`](crate::kernel::Kernel::GluGrad).
///
/// # Safety
/// As [`forward`].
pub(super) unsafe fn backward<T: Float>(call: &Call<'_>, kind: Glu) -> Result<()> {
    let (src, dst) = ([0, 1, 2].map(|i| call.src(i)), [0, 1].map(|i| call.dst(i)));
    if src.iter().chain(&dst).all(|v| v.layout.is_contiguous()) {
        // SAFETY: as in `forward`.
        let ([gate, up, dy], [dgate, dup]) = unsafe {
            (
                src.map(|v| slice::<T>(v)),
                dst.map(|v| SharedSlice::new(slice_mut::<T>(v))),
            )
        };
        call.pieces(gate.len(), grain(1), |a, b| {
            // SAFETY: pieces are disjoint.
            let (dgate, dup) = unsafe { (dgate.part(a, b), dup.part(a, b)) };
            gate_row_grad::<T>([&gate[a..b], &up[a..b], &dy[a..b]], dgate, dup, kind);
        });
        return Ok(());
    }
    // SAFETY: as in `forward`; halves of one tensor share no element.
    let ([gate, up, dy], [dgate, dup]) = unsafe {
        (
            src.map(|v| HeadRows::<T>::new(v)),
            dst.map(|v| RowsMut::<T>::new(v)),
        )
    };
    each_row(call, src[0], |row| {
        // SAFETY: every row is visited once.
        let (dgate, dup) = unsafe { (dgate.row(row), dup.row(row)) };
        gate_row_grad::<T>([gate.row(row), up.row(row), dy.row(row)], dgate, dup, kind);
    });
    Ok(())
}

/// Visits every row once.
fn each_row(call: &Call<'_>, view: &View, body: impl Fn(usize) + Sync + Send) {
    let width = view.shape().last().copied().unwrap_or(1);
    let rows = if width == 0 { 0 } else { rows_of(view) };
    call.pieces(rows, grain(width), |first, last| {
        (first..last).for_each(&body)
    });
}

/// The unit's value and its derivatives by gate and up.
trait GluValue<A: Real>: Copy {
    fn value(self, gate: A, up: A) -> A;
    fn slopes(self, gate: A, up: A) -> (A, A);
}

#[inline(always)]
fn sigmoid<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

#[derive(Clone, Copy)]
struct Silu;

impl<A: Real> GluValue<A> for Silu {
    #[inline(always)]
    fn value(self, gate: A, up: A) -> A {
        gate * sigmoid(gate) * up
    }

    #[inline(always)]
    fn slopes(self, gate: A, up: A) -> (A, A) {
        let s = sigmoid(gate);
        (up * s * (A::ONE + gate * (A::ONE - s)), gate * s)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

/// √(2/π) and the factor of the cube.
const GELU: (f64, f64) = (0.797_884_560_802_865_4, 0.044_715);

impl<A: Real> GluValue<A> for GeluTanh {
    #[inline(always)]
    fn value(self, gate: A, up: A) -> A {
        let inner = A::of(GELU.0) * (gate + A::of(GELU.1) * gate * gate * gate);
        A::of(0.5) * gate * (A::ONE + inner.tanh()) * up
    }

    #[inline(always)]
    fn slopes(self, gate: A, up: A) -> (A, A) {
        let inner = A::of(GELU.0) * (gate + A::of(GELU.1) * gate * gate * gate);
        let slope = A::of(GELU.0) * (A::ONE + A::of(3.0 * GELU.1) * gate * gate);
        let t = inner.tanh();
        let half = A::of(0.5) * (A::ONE + t);
        (
            up * (half + A::of(0.5) * gate * (A::ONE - t * t) * slope),
            gate * half,
        )
    }
}

#[derive(Clone, Copy)]
struct Clamped<A> {
    alpha: A,
    limit: A,
}

impl<A: Real> Clamped<A> {
    /// Comparisons are written so that NaN passes.
    #[inline(always)]
    fn clamp(self, gate: A, up: A) -> (A, A) {
        let gate = if gate > self.limit { self.limit } else { gate };
        let up = if up > self.limit { self.limit } else { up };
        (gate, if up < -self.limit { -self.limit } else { up })
    }
}

impl<A: Real> GluValue<A> for Clamped<A> {
    #[inline(always)]
    fn value(self, gate: A, up: A) -> A {
        let (g, u) = self.clamp(gate, up);
        g * sigmoid(self.alpha * g) * (u + A::ONE)
    }

    #[inline(always)]
    fn slopes(self, gate: A, up: A) -> (A, A) {
        let (g, u) = self.clamp(gate, up);
        let s = sigmoid(self.alpha * g);
        let by_gate = (u + A::ONE) * s * (A::ONE + self.alpha * g * (A::ONE - s));
        // A value on the bound passes its gradient.
        let by_gate = if gate > self.limit { A::ZERO } else { by_gate };
        (
            by_gate,
            if up.abs() > self.limit {
                A::ZERO
            } else {
                g * s
            },
        )
    }
}

#[inline(always)]
fn values<T: Float>(gate: &[T], up: &[T], y: &mut [T], unit: impl GluValue<T::Acc>) {
    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
        *y = T::down(unit.value(g.up(), u.up()));
    }
}

#[inline(always)]
fn slopes<T: Float>(
    [gate, up, dy]: [&[T]; 3],
    dgate: &mut [T],
    dup: &mut [T],
    unit: impl GluValue<T::Acc>,
) {
    for ((((dg, du), g), u), dy) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dy) {
        let (by_gate, by_up) = unit.slopes(g.up(), u.up());
        *dg = T::down(dy.up() * by_gate);
        *du = T::down(dy.up() * by_up);
    }
}

vectorize! {
    fn gate_row<T: Float>(gate: &[T], up: &[T], y: &mut [T], kind: Glu) {
        match kind {
            Glu::Silu => values(gate, up, y, Silu),
            Glu::GeluTanh => values(gate, up, y, GeluTanh),
            Glu::Clamped { alpha, limit } => {
                values(gate, up, y, Clamped { alpha: T::Acc::of(alpha), limit: T::Acc::of(limit) });
            }
        }
    }
}

vectorize! {
    fn gate_row_grad<T: Float>(src: [&[T]; 3], dgate: &mut [T], dup: &mut [T], kind: Glu) {
        match kind {
            Glu::Silu => slopes(src, dgate, dup, Silu),
            Glu::GeluTanh => slopes(src, dgate, dup, GeluTanh),
            Glu::Clamped { alpha, limit } => {
                slopes(src, dgate, dup, Clamped { alpha: T::Acc::of(alpha), limit: T::Acc::of(limit) });
            }
        }
    }
}
