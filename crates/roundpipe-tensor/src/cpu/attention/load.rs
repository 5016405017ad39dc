//! Blocks on their way between tensors and the buffers of a task: converted, transposed, padded.

use super::level::{self, AttentionAcc, LevelLoop};
use super::softmax::PerQuery;
use super::{AttentionFloat, QUERIES};
use crate::cpu::access::Real;

/// `rows` rows of `width` elements with a contiguous last dimension, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct DenseRows<T> {
    pub ptr: *const T,
    pub stride: isize,
    pub rows: usize,
    pub width: usize,
}

impl<T: AttentionFloat> DenseRows<T> {
    /// Row `i`.
    ///
    /// # Safety
    /// The rows exist and nothing writes them; `i` is one of them.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> &[T] {
        // Rows of no elements lie anywhere, also outside of their tensor's memory.
        let row = self.ptr.wrapping_offset(i as isize * self.stride);
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(row, self.width) }
    }

    /// Writes the rows times `factor` to `to`, `padded` apart, the padding zero.
    ///
    /// # Safety
    /// The rows exist and nothing writes them.
    pub unsafe fn dense(self, to: &mut [T::Acc], padded: usize, factor: T::Acc) {
        level::run(Dense {
            from: self,
            to,
            padded,
            factor,
        });
    }

    /// Writes the transpose times `factor` to `to` `[width, QUERIES]`; columns past the rows are
    /// zero.
    ///
    /// # Safety
    /// The rows exist, at most [`QUERIES`], and nothing writes them.
    pub unsafe fn transposed(self, to: &mut [T::Acc], factor: T::Acc) {
        level::run(Transposed {
            from: self,
            to,
            factor,
        });
    }

    /// The sum of products of each row with the same row of `other`; 0 past the rows.
    ///
    /// # Safety
    /// The rows of both exist, at most [`QUERIES`] of equal width, and nothing writes them.
    pub unsafe fn dots(self, other: Self, to: &mut PerQuery<T::Acc>) {
        level::run(Dots {
            a: self,
            b: other,
            to,
        });
    }
}

struct Dense<'a, T: AttentionFloat> {
    from: DenseRows<T>,
    to: &'a mut [T::Acc],
    padded: usize,
    factor: T::Acc,
}

impl<T: AttentionFloat> LevelLoop for Dense<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        for (i, to) in self
            .to
            .chunks_exact_mut(self.padded)
            .take(self.from.rows)
            .enumerate()
        {
            // SAFETY: promised to `dense`; i < rows.
            let row = unsafe { self.from.row(i) };
            let (to, pad) = to.split_at_mut(row.len());
            to.iter_mut()
                .zip(row)
                .for_each(|(t, x)| *t = x.up() * self.factor);
            pad.fill(T::Acc::ZERO);
        }
    }
}

struct Transposed<'a, T: AttentionFloat> {
    from: DenseRows<T>,
    to: &'a mut [T::Acc],
    factor: T::Acc,
}

impl<T: AttentionFloat> LevelLoop for Transposed<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        let DenseRows { rows, width, .. } = self.from;
        if rows < QUERIES {
            self.to[..width * QUERIES].fill(T::Acc::ZERO);
        }
        // Squares, so that the lines being written stay in the cache.
        const SIDE: usize = 16;
        for i in (0..rows).step_by(SIDE) {
            for j in (0..width).step_by(SIDE) {
                for i in i..rows.min(i + SIDE) {
                    // SAFETY: promised to `transposed`; i < rows.
                    let row = unsafe { self.from.row(i) };
                    let columns = self.to[j * QUERIES..].chunks_exact_mut(QUERIES);
                    for (column, x) in columns.zip(&row[j..width.min(j + SIDE)]) {
                        column[i] = x.up() * self.factor;
                    }
                }
            }
        }
    }
}

struct Dots<'a, T: AttentionFloat> {
    a: DenseRows<T>,
    b: DenseRows<T>,
    to: &'a mut PerQuery<T::Acc>,
}

impl<T: AttentionFloat> LevelLoop for Dots<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        const WAYS: usize = 16;
        *self.to = [T::Acc::ZERO; QUERIES];
        for (i, to) in self.to.iter_mut().enumerate().take(self.a.rows) {
            // SAFETY: promised to `dots`; i < rows.
            let (a, b) = unsafe { (self.a.row(i), self.b.row(i)) };
            let mut sums = [T::Acc::ZERO; WAYS];
            let (a, a_tail) = a.as_chunks::<WAYS>();
            let (b, b_tail) = b.as_chunks::<WAYS>();
            for (a, b) in a.iter().zip(b) {
                for w in 0..WAYS {
                    sums[w] = AttentionAcc::mul_add::<FMA>(a[w].up(), b[w].up(), sums[w]);
                }
            }
            for (w, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
                sums[w] = AttentionAcc::mul_add::<FMA>(a.up(), b.up(), sums[w]);
            }
            *to = sums.into_iter().sum();
        }
    }
}

/// Writes the transpose of `from` `[width, QUERIES]` times a factor per query to `rows` rows at
/// `to`.
///
/// # Safety
/// The rows exist, `stride` apart, at most [`QUERIES`], and nothing else touches them.
pub(super) unsafe fn store_transposed<T: AttentionFloat>(
    from: &[T::Acc],
    factor: &PerQuery<T::Acc>,
    to: *mut T,
    stride: usize,
    rows: usize,
) {
    level::run(StoreTransposed {
        from,
        factor,
        to,
        stride,
        rows,
    });
}

struct StoreTransposed<'a, T: AttentionFloat> {
    from: &'a [T::Acc],
    factor: &'a PerQuery<T::Acc>,
    to: *mut T,
    stride: usize,
    rows: usize,
}

impl<T: AttentionFloat> LevelLoop for StoreTransposed<'_, T> {
    #[inline(always)]
    fn run<const FMA: bool, const BYTES: usize>(self) {
        let width = self.from.len() / QUERIES;
        for i in 0..self.rows {
            let row = self.to.wrapping_add(i * self.stride);
            // SAFETY: promised to `store_transposed`; i < rows. Rows of no elements may lie
            // anywhere.
            let row = unsafe { std::slice::from_raw_parts_mut(row, width) };
            for (to, from) in row.iter_mut().zip(self.from.chunks_exact(QUERIES)) {
                *to = T::down(from[i] * self.factor[i]);
            }
        }
    }
}
