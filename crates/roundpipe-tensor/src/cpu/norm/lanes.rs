//! Sums over rows in a fixed order, and how rows are cut into tasks.
//!
//! # Invariants
//! - Element i of a row is added to lane i mod [`LANES`]; the lanes are added in a fixed tree. So a
//!   sum vectorises and has the same bits on every processor.
//! - Blocks depend on the number of rows and columns alone.

use crate::cpu::access::{Call, Float, Real, SharedSlice};
use crate::cpu::simd::vectorize;
use crate::kernel::View;

/// Partial sums per row: two of the widest vectors for f32.
const LANES: usize = 32;

/// Elements that are worth handing to another thread.
const TASK: usize = 32 << 10;

/// The most blocks that keep a partial weight gradient each.
const MOST_BLOCKS: usize = 64;

/// How many pieces of how many rows each; the last may be shorter.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Blocks {
    pub rows: usize,
    pub count: usize,
}

/// Rows per task where every row stands alone.
pub(in crate::cpu) fn grain(cols: usize) -> usize {
    (TASK / cols.max(1)).max(1)
}

/// The cut for sums over rows: a bounded number of blocks, so that partial sums stay small.
pub(in crate::cpu) fn blocks(rows: usize, cols: usize) -> Blocks {
    let per = grain(cols).max(rows.div_ceil(MOST_BLOCKS));
    Blocks {
        rows: per,
        count: rows.div_ceil(per),
    }
}

/// Number of rows along the last dimension.
pub(in crate::cpu) fn rows_of(view: &View) -> usize {
    let dims = view.shape().dims();
    dims[..dims.len().saturating_sub(1)].iter().product()
}

/// The call's scratch as `len` values.
///
/// # Safety
/// `scratch` of this family promised at least that much, and no other slice of it exists.
pub(in crate::cpu) unsafe fn carve<'a, A: Real>(call: &Call<'_>, len: usize) -> &'a mut [A] {
    if len == 0 {
        return &mut [];
    }
    let view = call
        .scratch
        .as_ref()
        .expect("scratch was declared for this kernel");
    assert!(
        len * size_of::<A>() <= view.numel(),
        "{:?}: scratch is too small",
        call.kernel
    );
    // SAFETY: long enough by the assertion; blocks of a pool are aligned to 256 bytes; any bits are
    // a float; sole use by the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(view.ptr as *mut A, len) }
}

/// Copies a weight into `out` in the accumulator type; `fill` where there is none.
///
/// # Safety
/// As [`slice`](crate::cpu::access::slice) of `T`.
pub(in crate::cpu) unsafe fn widen<T: Float>(
    weight: Option<&View>,
    out: &mut [T::Acc],
    fill: T::Acc,
) {
    let Some(view) = weight else {
        return out.fill(fill);
    };
    // SAFETY: promised by the caller.
    let weight = unsafe { crate::cpu::access::slice::<T>(view) };
    for (o, w) in out.iter_mut().zip(weight) {
        *o = w.up();
    }
}

/// Elements whose terms are worked out at a time, a multiple of [`LANES`]. Working them out and
/// adding them up are loops that vectorise; in one loop, unrolled over the lanes, they do not.
const STAGE: usize = 128;

/// A sum under way. Its methods are always inlined, as closures are not: a loop that is not inlined
/// into its vectorised caller is compiled for the plainest processor.
struct LaneSum<A> {
    lanes: [A; LANES],
    stage: [A; STAGE],
}

impl<A: Real> LaneSum<A> {
    #[inline(always)]
    fn new() -> Self {
        Self {
            lanes: [A::ZERO; LANES],
            stage: [A::ZERO; STAGE],
        }
    }

    #[inline(always)]
    fn one<T: Float<Acc = A>>(&mut self, x: &[T], f: &impl Fn(A) -> A) {
        for (s, x) in self.stage.iter_mut().zip(x) {
            *s = f(x.up());
        }
        self.add(x.len());
    }

    #[inline(always)]
    fn two<T: Float<Acc = A>>(&mut self, x: &[T], y: &[T], f: &impl Fn(A, A) -> A) {
        for ((s, x), y) in self.stage.iter_mut().zip(x).zip(y) {
            *s = f(x.up(), y.up());
        }
        self.add(x.len());
    }

    #[inline(always)]
    fn three<T: Float<Acc = A>, U: Float<Acc = A>>(
        &mut self,
        x: &[T],
        y: &[U],
        w: &[A],
        f: &impl Fn(A, A, A) -> A,
    ) {
        for (((s, x), y), w) in self.stage.iter_mut().zip(x).zip(y).zip(w) {
            *s = f(x.up(), y.up(), *w);
        }
        self.add(x.len());
    }

    /// Adds the first `len` terms of the stage.
    #[inline(always)]
    fn add(&mut self, len: usize) {
        let (whole, rest) = self.stage[..len].as_chunks::<LANES>();
        // A copy that is only indexed by constants stays in registers.
        let mut sums = self.lanes;
        for terms in whole {
            for i in 0..LANES {
                sums[i] += terms[i];
            }
        }
        self.lanes = sums;
        for (lane, term) in self.lanes.iter_mut().zip(rest) {
            *lane += *term;
        }
    }

    #[inline(always)]
    fn total(mut self) -> A {
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                self.lanes[i] += self.lanes[i + half];
            }
            half /= 2;
        }
        self.lanes[0]
    }
}

/// Sum of f over a row.
#[inline(always)]
pub(in crate::cpu) fn sum1<T: Float>(x: &[T], f: impl Fn(T::Acc) -> T::Acc) -> T::Acc {
    let mut sum = LaneSum::new();
    // Whole stages have a length that the compiler knows.
    let (xs, x_rest) = x.as_chunks::<STAGE>();
    for x in xs {
        sum.one(x, &f);
    }
    sum.one(x_rest, &f);
    sum.total()
}

/// Sum of f over two rows of one length.
#[inline(always)]
pub(in crate::cpu) fn sum2<T: Float>(
    x: &[T],
    y: &[T],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc,
) -> T::Acc {
    let mut sum = LaneSum::new();
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<STAGE>(), y.as_chunks::<STAGE>());
    for (x, y) in xs.iter().zip(ys) {
        sum.two(x, y, &f);
    }
    sum.two(x_rest, y_rest, &f);
    sum.total()
}

/// Sum of f over two rows and a weight of one length.
#[inline(always)]
pub(in crate::cpu) fn sum3<T: Float, U: Float<Acc = T::Acc>>(
    x: &[T],
    y: &[U],
    w: &[T::Acc],
    f: impl Fn(T::Acc, T::Acc, T::Acc) -> T::Acc,
) -> T::Acc {
    let mut sum = LaneSum::new();
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<STAGE>(), y.as_chunks::<STAGE>());
    let (ws, w_rest) = w.as_chunks::<STAGE>();
    for ((x, y), w) in xs.iter().zip(ys).zip(ws) {
        sum.three(x, y, w, &f);
    }
    sum.three(x_rest, y_rest, w_rest, &f);
    sum.total()
}

/// Adds partial sums `[count, cols]` in order into `out`, which is overwritten unless `accumulate`.
pub(in crate::cpu) fn combine<A: Real>(
    call: &Call<'_>,
    partial: &[A],
    out: &mut [A],
    accumulate: bool,
) {
    let cols = out.len();
    let count = partial.len().checked_div(cols).unwrap_or(0);
    let out = SharedSlice::new(out);
    call.pieces(cols, (TASK / count.max(1)).max(LANES), |start, end| {
        // SAFETY: pieces of columns are disjoint.
        let out = unsafe { out.part(start, end) };
        if !accumulate {
            out.fill(A::ZERO);
        }
        add_blocks(partial, cols, start, out);
    });
}

vectorize! {
    /// Adds columns from `start` on of every block, block after block.
    fn add_blocks<A: Real>(partial: &[A], cols: usize, start: usize, out: &mut [A]) {
        for block in partial.chunks_exact(cols) {
            for (o, p) in out.iter_mut().zip(&block[start..]) {
                *o += *p;
            }
        }
    }
}
