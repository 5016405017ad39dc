//! Kernels that read and add at indexed places.
//!
//! All indices are checked before the first element is touched, so a wrong one leaves the
//! destination as it was.
//!
//! # Invariants
//! - Additions to one element happen in the order of the indices: work is cut by destination, never
//!   by index, so any number of threads gives the same bits.

use super::access::{Call, slice};
use super::reduce::{FoldItem, FoldType, for_item, offset};
use super::simd::vectorize;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let dtype = call.src(0).dtype;
    let bytes = dtype.size();
    // SAFETY: the caller's promise is passed on; copies go by element size, sums by element type.
    unsafe {
        match call.kernel {
            Kernel::IndexSelect { dim } => match bytes {
                1 => index_select::<u8>(call, *dim),
                2 => index_select::<u16>(call, *dim),
                4 => index_select::<u32>(call, *dim),
                _ => index_select::<u64>(call, *dim),
            },
            Kernel::Gather { dim } => match bytes {
                1 => gather::<u8>(call, *dim),
                2 => gather::<u16>(call, *dim),
                4 => gather::<u32>(call, *dim),
                _ => gather::<u64>(call, *dim),
            },
            Kernel::CacheWrite => cache_write(call),
            Kernel::IndexAdd { dim } => for_item!(dtype, T => index_add::<T>(call, *dim)),
            Kernel::ScatterAdd { dim } => for_item!(dtype, T => scatter_add::<T>(call, *dim)),
            _ => Err(call.unsupported()),
        }
    }
}

/// Dense indices of any integer type, all inside the dimension they point into.
enum CheckedIndex<'a> {
    I64(&'a [i64]),
    I32(&'a [i32]),
    U32(&'a [u32]),
}

impl CheckedIndex<'_> {
    /// # Safety
    /// The view is live and dense, and nothing writes it while this lives.
    unsafe fn checked(op: &'static str, view: &View, size: usize) -> Result<Self> {
        // SAFETY: promised by the caller; the types are the view's.
        let index = unsafe {
            match view.dtype {
                DType::I64 => Self::I64(slice(view)),
                DType::I32 => Self::I32(slice(view)),
                DType::U32 => Self::U32(slice(view)),
                dtype => {
                    let expected = "indices are i64, i32 or u32";
                    return Err(Error::DType {
                        op,
                        dtype,
                        shape: *view.shape(),
                        expected,
                    });
                }
            }
        };
        let inside = |i: i64| usize::try_from(i).is_ok_and(|i| i < size);
        match (0..view.numel()).find(|&at| !inside(index.raw(at))) {
            Some(at) => Err(Error::Index {
                op,
                index: index.raw(at),
                at,
                size,
            }),
            None => Ok(index),
        }
    }

    #[inline(always)]
    fn raw(&self, at: usize) -> i64 {
        match self {
            Self::I64(i) => i[at],
            Self::I32(i) => i64::from(i[at]),
            Self::U32(i) => i64::from(i[at]),
        }
    }

    #[inline(always)]
    fn at(&self, at: usize) -> usize {
        self.raw(at) as usize
    }
}

/// Copies rows of `x` to their places in the cache; all places are checked first.
///
/// # Safety
/// As [`run`].
unsafe fn cache_write(call: &Call<'_>) -> Result<()> {
    let (x, at, cache) = (call.src(0), call.src(1), call.dst(0));
    let (rows, steps, capacity) = (x.shape()[0], x.shape()[1], cache.shape()[1]);
    // SAFETY: the launch contract: dense, one per row.
    let at = unsafe { slice::<i32>(at) };
    let starts = (capacity + 1).saturating_sub(steps);
    for (row, &start) in at.iter().enumerate() {
        if usize::try_from(start).is_ok_and(|start| start < starts) {
            continue;
        }
        return Err(Error::Index {
            op: call.kernel.name(),
            index: i64::from(start),
            at: row,
            size: starts,
        });
    }
    let place = x.shape()[2] * x.shape()[3] * x.dtype.size();
    let bytes = steps * place;
    let apart = if cache.shape()[0] == 1 { 0 } else { capacity };
    for (row, &start) in at.iter().enumerate().take(rows) {
        let src = (x.ptr as *const u8).wrapping_add(row * bytes);
        let first = row * apart + start as usize;
        let dst = (cache.ptr as *mut u8).wrapping_add(first * place);
        // SAFETY: both are dense; `steps` places from the start on lie inside the row, as checked
        // above, and the operands do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
    }
    Ok(())
}

/// Size and stride of every dimension.
fn dims(view: &View) -> Vec<(usize, isize)> {
    view.shape()
        .iter()
        .copied()
        .zip(view.layout.strides().iter().copied())
        .collect()
}

/// Elements per slice along `dim`: how many dimensions before it give, and how many after.
fn around(view: &View, dim: usize) -> (usize, usize) {
    (
        view.shape()[..dim].iter().product(),
        view.shape()[dim + 1..].iter().product(),
    )
}

/// Whether elements of dimensions after `dim` lie densely.
fn dense_after(view: &View, dim: usize) -> bool {
    let mut next = 1;
    dims(view)[dim + 1..].iter().rev().all(|&(size, stride)| {
        let fits = size == 1 || stride == next;
        next *= size as isize;
        fits
    })
}

/// # Safety
/// As [`run`], and `W` has the size of the source's elements.
unsafe fn index_select<W: Copy>(call: &Call<'_>, dim: usize) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    // SAFETY: promised by the caller.
    let index = unsafe { CheckedIndex::checked("index_select", call.src(1), x.shape()[dim])? };
    let ((outer, inner), many) = (around(&y, dim), y.shape()[dim]);
    let all = dims(&x);
    let (before, after, stride) = (&all[..dim], &all[dim + 1..], all[dim].1);
    let dense = dense_after(&x, dim);
    call.pieces(outer * many, 32768 / inner.max(1), |from, to| {
        for slot in from..to {
            let shift = offset(before, slot / many) + index.at(slot % many) as isize * stride;
            let src = (x.ptr as *const W).wrapping_offset(shift);
            let dst = (y.ptr as *mut W).wrapping_add(slot * inner);
            // SAFETY: the index was checked, so all source places lie in live memory; slots are
            // disjoint and lie inside the destination, which overlaps no source.
            unsafe {
                if dense {
                    std::ptr::copy_nonoverlapping(src, dst, inner);
                } else {
                    (0..inner).for_each(|i| {
                        dst.add(i)
                            .write(src.wrapping_offset(offset(after, i)).read())
                    });
                }
            }
        }
    });
    Ok(())
}

/// # Safety
/// As [`run`], and `W` has the size of the source's elements.
unsafe fn gather<W: Copy>(call: &Call<'_>, dim: usize) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    // SAFETY: promised by the caller.
    let index = unsafe { CheckedIndex::checked("gather", call.src(1), x.shape()[dim])? };
    let strides = x.layout.strides();
    // Walks the result's elements through the source, the gathered dimension standing still.
    let walk: Vec<(usize, isize)> = (0..y.shape().rank())
        .map(|axis| (y.shape()[axis], if axis == dim { 0 } else { strides[axis] }))
        .collect();
    call.pieces(y.numel(), 8192, |from, to| {
        for at in from..to {
            let shift = offset(&walk, at) + index.at(at) as isize * strides[dim];
            // SAFETY: the index was checked and the operation checked the other sizes, so the
            // source place is live; pieces of the destination are disjoint.
            unsafe {
                let value = (x.ptr as *const W).wrapping_offset(shift).read();
                (y.ptr as *mut W).wrapping_add(at).write(value);
            }
        }
    });
    Ok(())
}

/// Columns that one task adds up.
const TILE: usize = 1024;

/// # Safety
/// As [`run`], and `T` is the source's type; the destination holds `T` or its accumulator.
unsafe fn index_add<T: FoldItem>(call: &Call<'_>, dim: usize) -> Result<()> {
    let (src, y) = (*call.src(0), *call.dst(0));
    // SAFETY: promised by the caller.
    let index = unsafe { CheckedIndex::checked("index_add", call.src(1), y.shape()[dim])? };
    let ((outer, inner), size, many) = (around(&y, dim), y.shape()[dim], src.shape()[dim]);
    if outer * inner * many == 0 {
        return Ok(());
    }
    // Tasks own destination columns and ranges of destination rows; each goes through all indices
    // in order.
    let tiles = inner.div_ceil(TILE);
    let small = outer * inner * many < 32768;
    let ranges = if small {
        1
    } else {
        32usize.div_ceil(outer * tiles).min(size)
    };
    let each = size.div_ceil(ranges);
    let all = dims(&src);
    let (before, after, stride) = (&all[..dim], &all[dim + 1..], all[dim].1);
    let dense = dense_after(&src, dim);
    call.pieces(
        outer * tiles * ranges,
        if small { usize::MAX } else { 1 },
        |from, to| {
            for task in from..to {
                let (o, tile, range) = (
                    task / (tiles * ranges),
                    task / ranges % tiles,
                    task % ranges,
                );
                let first = tile * TILE;
                let width = TILE.min(inner - first);
                let rows = range * each..((range + 1) * each).min(size);
                let base = offset(before, o);
                for i in (0..many).filter(|i| rows.contains(&index.at(*i))) {
                    let dst = (o * size + index.at(i)) * inner + first;
                    let row = (src.ptr as *const T).wrapping_offset(base + i as isize * stride);
                    // SAFETY: the index was checked, so both rows lie in live memory; this task
                    // alone touches these columns of these destination rows.
                    unsafe {
                        if dense {
                            let row = std::slice::from_raw_parts(row.wrapping_add(first), width);
                            add_dense::<T>(&y, dst, row);
                        } else {
                            let at =
                                |c: usize| row.wrapping_offset(offset(after, first + c)).read();
                            (0..width).for_each(|c| add_one::<T>(&y, dst + c, at(c)));
                        }
                    }
                }
            }
        },
    );
    Ok(())
}

/// Adds a dense row to the destination from element `at` on.
///
/// # Safety
/// The places exist, hold `T` or its accumulator, and no other thread touches them.
unsafe fn add_dense<T: FoldItem>(y: &View, at: usize, row: &[T]) {
    // SAFETY: promised by the caller; the type is checked here.
    unsafe {
        if y.dtype == T::Cell::DTYPE {
            let out = std::slice::from_raw_parts_mut((y.ptr as *mut T::Cell).add(at), row.len());
            add_row::<T>(out, row);
        } else {
            let out = std::slice::from_raw_parts_mut((y.ptr as *mut T).add(at), row.len());
            add_row_same::<T>(out, row);
        }
    }
}

vectorize! {
    fn add_row<T: FoldItem>(out: &mut [T::Cell], row: &[T]) {
        for (y, x) in out.iter_mut().zip(row) {
            *y = y.plus(x.up());
        }
    }
}

vectorize! {
    fn add_row_same<T: FoldItem>(out: &mut [T], row: &[T]) {
        for (y, x) in out.iter_mut().zip(row) {
            *y = T::down(y.up().plus(x.up()));
        }
    }
}

/// Adds one value to element `at` of the destination.
///
/// # Safety
/// As [`add_dense`].
#[inline(always)]
unsafe fn add_one<T: FoldItem>(y: &View, at: usize, value: T) {
    // SAFETY: promised by the caller; the type is checked here.
    unsafe {
        if y.dtype == T::Cell::DTYPE {
            let place = (y.ptr as *mut T::Cell).add(at);
            *place = (*place).plus(value.up());
        } else {
            let place = (y.ptr as *mut T).add(at);
            *place = T::down((*place).up().plus(value.up()));
        }
    }
}

/// # Safety
/// As [`run`], and `T` is the source's type; the destination holds `T` or its accumulator.
unsafe fn scatter_add<T: FoldItem>(call: &Call<'_>, dim: usize) -> Result<()> {
    let (src, y) = (*call.src(0), *call.dst(0));
    // SAFETY: promised by the caller.
    let index = unsafe { CheckedIndex::checked("scatter_add", call.src(1), y.shape()[dim])? };
    let lines_of = |strides: &[isize]| -> Vec<(usize, isize)> {
        let axes = (0..src.shape().rank()).filter(|axis| *axis != dim);
        axes.map(|axis| (src.shape()[axis], strides[axis]))
            .collect()
    };
    let (to_y, to_index) = (
        y.shape().contiguous_strides(),
        src.shape().contiguous_strides(),
    );
    let walks = [src.layout.strides(), &to_y[..], &to_index[..]].map(lines_of);
    let (size, stride) = (src.shape()[dim], src.layout.strides()[dim]);
    let lines = src.numel().checked_div(size).unwrap_or(0);
    // No two lines share a destination element, and each is one task's.
    call.pieces(lines, 8192 / size.max(1), |from, to| {
        for line in from..to {
            let [at_src, at_y, at_index] = [0, 1, 2].map(|w| offset(&walks[w], line));
            for i in 0..size {
                let target = index.at((at_index + i as isize * to_index[dim]) as usize);
                // SAFETY: the index was checked and the operation checked the other sizes, so both
                // places are live; this task alone touches this line.
                unsafe {
                    let value = (src.ptr as *const T)
                        .wrapping_offset(at_src + i as isize * stride)
                        .read();
                    add_one::<T>(&y, (at_y + target as isize * to_y[dim]) as usize, value);
                }
            }
        }
    });
    Ok(())
}
