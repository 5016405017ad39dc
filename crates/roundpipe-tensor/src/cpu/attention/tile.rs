//! Products of small matrices that lie in a core's caches: `c = a b` or `c += a b`.
//!
//! Nothing is packed. Elements of `a` are read one by one and spread over a vector, rows of `b` are read
//! as vectors: attention keeps its blocks so that this is how they lie already.
//!
//! # Invariants
//! - An element is the sum over k in rising order, added to `c` at the end; so its bits do not depend on
//!   m, n or its place.
//! - No element of `c` outside `[m, n]` is written. Of `b`, rows are read up to a multiple of [`LANES`].

use super::level::{self, Job, Lane};

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
pub(super) struct Product<T> {
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
/// All elements described exist, rows of `b` up to a multiple of [`LANES`]; `c` overlaps neither `a` nor
/// `b`, and nobody else touches it meanwhile.
pub(super) unsafe fn multiply<T: Lane>(product: Product<T>) {
    level::run(Checked(product));
}

/// A product whose maker vouches for the memory.
struct Checked<T>(Product<T>);

impl<T: Lane> Job for Checked<T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        let p = self.0;
        // Registers: 16 accumulators of 32 with AVX-512, 12 of 16 with AVX2, 8 of 16 otherwise.
        // SAFETY: promised to `multiply`.
        unsafe {
            match (BYTES, size_of::<T>()) {
                (64, 4) => strips::<T, FMA, 8, 32>(&p),
                (64, _) => strips::<T, FMA, 8, 16>(&p),
                (32, 4) => strips::<T, FMA, 6, 16>(&p),
                (32, _) => strips::<T, FMA, 6, 8>(&p),
                (_, 4) => strips::<T, FMA, 4, 8>(&p),
                (_, _) => strips::<T, FMA, 4, 4>(&p),
            }
        }
    }
}

/// Strips of `NR` columns, the last one of 16 where that is enough.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn strips<T: Lane, const FMA: bool, const MR: usize, const NR: usize>(p: &Product<T>) {
    let mut j = 0;
    while j < p.n {
        // SAFETY: j < n; reading stays below n rounded up to LANES, of which every width is a divisor
        // or, for 32, taken only where 16 would not do.
        unsafe {
            if NR > LANES && p.n - j <= LANES {
                strip::<T, FMA, MR, LANES>(p, j);
            } else {
                strip::<T, FMA, MR, NR>(p, j);
            }
        }
        j += NR;
    }
}

/// Columns `j..j + NR` of all rows.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn strip<T: Lane, const FMA: bool, const MR: usize, const NR: usize>(p: &Product<T>, j: usize) {
    let mut i = 0;
    // SAFETY: i + the rows of each call <= m.
    unsafe {
        while i + MR <= p.m {
            spot::<T, FMA, MR, NR>(p, i, j);
            i += MR;
        }
        match p.m - i {
            1 => spot::<T, FMA, 1, NR>(p, i, j),
            2 => spot::<T, FMA, 2, NR>(p, i, j),
            3 => spot::<T, FMA, 3, NR>(p, i, j),
            4 => spot::<T, FMA, 4, NR>(p, i, j),
            5 => spot::<T, FMA, 5, NR>(p, i, j),
            6 => spot::<T, FMA, 6, NR>(p, i, j),
            7 => spot::<T, FMA, 7, NR>(p, i, j),
            _ => {}
        }
    }
}

/// Rows `i..i + R`, columns `j..j + NR`.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn spot<T: Lane, const FMA: bool, const R: usize, const NR: usize>(p: &Product<T>, i: usize, j: usize) {
    // SAFETY: rows and columns lie in the operands; see `multiply`.
    unsafe {
        let b = p.b.0.add(j);
        let sums = match p.a {
            Left::Rows(a, stride) => {
                let a = a.offset(i as isize * stride);
                sum::<T, FMA, R, NR>(p.k, b, p.b.1, |row, step| a.offset(row as isize * stride).add(step))
            }
            Left::Cols(a, stride) => {
                let a = a.add(i);
                sum::<T, FMA, R, NR>(p.k, b, p.b.1, |row, step| a.offset(step as isize * stride).add(row))
            }
        };
        for (row, sums) in sums.iter().enumerate() {
            let c = p.c.0.add((i + row) * p.c.1 + j);
            if j + NR <= p.n {
                put(c, sums, p.add);
            } else {
                let tail: [T; NR] = *sums;
                put(c, &tail[..p.n - j], p.add);
            }
        }
    }
}

/// Writes or adds one row.
///
/// # Safety
/// `c` has as many elements as `sums`, and they do not overlap.
#[inline(always)]
unsafe fn put<T: Lane>(c: *mut T, sums: &[T], add: bool) {
    // SAFETY: the caller's promise.
    let c = unsafe { std::slice::from_raw_parts_mut(c, sums.len()) };
    if add {
        c.iter_mut().zip(sums).for_each(|(c, s)| *c += *s);
    } else {
        c.copy_from_slice(sums);
    }
}

/// The sums over k of `R` rows and `NR` columns.
///
/// # Safety
/// `b` has `k` rows of `NR` elements, `row` apart; `a(r, p)` is readable for all r < R, p < k.
#[inline(always)]
unsafe fn sum<T: Lane, const FMA: bool, const R: usize, const NR: usize>(
    k: usize,
    b: *const T,
    row: usize,
    a: impl Fn(usize, usize) -> *const T,
) -> [[T; NR]; R] {
    let mut sums = [[T::ZERO; NR]; R];
    for step in 0..k {
        // SAFETY: the caller's promise.
        let b: [T; NR] = unsafe { *b.add(step * row).cast() };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let x = unsafe { *a(r, step) };
            for (s, y) in sums.iter_mut().zip(&b) {
                *s = T::mul_add::<FMA>(x, *y, *s);
            }
        }
    }
    sums
}
