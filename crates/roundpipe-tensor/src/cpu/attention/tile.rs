//! Products of small matrices that lie in a core's caches: `c = a b` or `c += a b`.
//!
//! Nothing is packed. Elements of `a` are read one by one and spread over a vector, rows of `b` are
//! read as vectors: attention keeps its blocks so that this is how they lie already.
//!
//! # Invariants
//! - An element is the sum over k in rising order, added to `c` at the end; so its bits do not
//!   depend on m, n or its place.
//! - No element of `c` outside `[m, n]` is written. Of `b`, rows are read up to a multiple of
//!   [`LANES`].

use super::level::{self, AttentionAcc, LevelLoop};
use super::vector::{Quad, Vector};

/// Rows of a right operand are readable up to a multiple of this many elements.
pub(super) const LANES: usize = 16;

/// A left operand.
#[derive(Clone, Copy)]
pub(super) enum Left<T> {
    /// Element (i, p) at `ptr + i * stride + p`.
    Rows(*const T, isize),
    /// Element (i, p) at `ptr + i + p * stride`.
    Cols(*const T, isize),
}

/// `c = a b`, or `c += a b` with `add`: a [m, k], b [k, n], c [m, n].
#[derive(Clone, Copy)]
pub(super) struct TileProduct<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Left<T>,
    /// Element (0, 0) and the step from a row to the next.
    pub b: (*const T, usize),
    /// As `b`.
    pub c: (*mut T, usize),
    pub add: bool,
}

/// Multiplies on the calling thread.
///
/// # Safety
/// All elements described exist, rows of `b` up to a multiple of [`LANES`]; `c` overlaps neither
/// `a` nor `b`, and nothing else touches it during the call.
pub(super) unsafe fn multiply<T: AttentionAcc>(product: TileProduct<T>) {
    level::run(Checked(product));
}

/// A product whose maker vouches for the memory.
struct Checked<T>(TileProduct<T>);

impl<T: AttentionAcc> LevelLoop for Checked<T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        let p = self.0;
        // SAFETY: promised to `multiply`; registers of BYTES exist.
        unsafe {
            match BYTES {
                64 => strips::<T, T::Widest, 8>(&p),
                32 => strips::<T, T::Wide, 6>(&p),
                _ => strips::<T, Quad<T>, 4>(&p),
            }
        }
    }
}

/// Strips of two registers' columns, each over all rows in steps of `MR`: as many sums as leave
/// registers for the operands.
///
/// # Safety
/// As [`multiply`]; the processor has the register.
#[inline(always)]
unsafe fn strips<T: AttentionAcc, V: Vector<T>, const MR: usize>(p: &TileProduct<T>) {
    let mut j = 0;
    while j < p.n {
        // SAFETY: j < n, and reading stays below n rounded up to LANES: of that, one or two
        // registers are a divisor, or two are taken only where one would not do.
        unsafe {
            if p.n - j <= V::LANES {
                strip::<T, V, MR, 1>(p, j);
            } else {
                strip::<T, V, MR, 2>(p, j);
            }
        }
        j += 2 * V::LANES;
    }
}

/// `N` registers' columns from `j` on, of all rows.
///
/// # Safety
/// As [`strips`].
#[inline(always)]
unsafe fn strip<T: AttentionAcc, V: Vector<T>, const MR: usize, const N: usize>(
    p: &TileProduct<T>,
    j: usize,
) {
    let mut i = 0;
    // SAFETY: i + the rows of each call <= m.
    unsafe {
        while i + MR <= p.m {
            spot::<T, V, MR, N>(p, i, j);
            i += MR;
        }
        // What is left, in as few pieces as bits.
        if p.m - i >= 4 {
            spot::<T, V, 4, N>(p, i, j);
            i += 4;
        }
        if p.m - i >= 2 {
            spot::<T, V, 2, N>(p, i, j);
            i += 2;
        }
        if p.m > i {
            spot::<T, V, 1, N>(p, i, j);
        }
    }
}

/// Rows `i..i + R`, `N` registers' columns from `j` on.
///
/// # Safety
/// As [`strips`].
#[inline(always)]
unsafe fn spot<T: AttentionAcc, V: Vector<T>, const R: usize, const N: usize>(
    p: &TileProduct<T>,
    i: usize,
    j: usize,
) {
    // SAFETY: rows and columns lie in the operands; see `multiply`.
    unsafe {
        let b = p.b.0.add(j);
        let sums: [[V; N]; R] = match p.a {
            Left::Rows(a, stride) => {
                let a = a.offset(i as isize * stride);
                sum(p.k, b, p.b.1, |row, step| {
                    a.offset(row as isize * stride).add(step)
                })
            }
            Left::Cols(a, stride) => {
                let a = a.add(i);
                sum(p.k, b, p.b.1, |row, step| {
                    a.offset(step as isize * stride).add(row)
                })
            }
        };
        for (row, sums) in sums.iter().enumerate() {
            let c = p.c.0.add((i + row) * p.c.1 + j);
            if j + N * V::LANES <= p.n {
                put(c, sums, p.add);
            } else {
                put_some(c, p.n - j, sums, p.add);
            }
        }
    }
}

/// Writes or adds one row.
///
/// # Safety
/// `c` has as many elements as the registers.
#[inline(always)]
unsafe fn put<T: AttentionAcc, V: Vector<T>, const N: usize>(c: *mut T, sums: &[V; N], add: bool) {
    for (v, &sum) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let c = c.add(v * V::LANES);
            let sum = if add { sum.add(V::load(c)) } else { sum };
            sum.store(c);
        }
    }
}

/// As [`put`] for the first `n` elements.
///
/// # Safety
/// `c` has `n` elements, fewer than the registers.
#[inline(always)]
unsafe fn put_some<T: AttentionAcc, V: Vector<T>, const N: usize>(
    c: *mut T,
    n: usize,
    sums: &[V; N],
    add: bool,
) {
    let mut all = [T::ZERO; 2 * LANES];
    // SAFETY: two registers hold at most twice LANES elements; `c` has n.
    unsafe {
        put(all.as_mut_ptr(), sums, false);
        for (i, sum) in all.iter().enumerate().take(n) {
            *c.add(i) = if add { *c.add(i) + *sum } else { *sum };
        }
    }
}

/// The sums over k of `R` rows and `N` registers' columns.
///
/// # Safety
/// `b` has `k` rows of as many elements, `row` apart; `a(r, p)` is readable for all r < R, p < k.
#[inline(always)]
unsafe fn sum<T: AttentionAcc, V: Vector<T>, const R: usize, const N: usize>(
    k: usize,
    b: *const T,
    row: usize,
    a: impl Fn(usize, usize) -> *const T,
) -> [[V; N]; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[V::zero(); N]; R];
        for step in 0..k {
            let mut right = [V::zero(); N];
            for (v, right) in right.iter_mut().enumerate() {
                *right = V::load(b.add(step * row + v * V::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = *a(r, step);
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = sum.add_product(x, right);
                }
            }
        }
        sums
    }
}
