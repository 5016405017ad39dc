//! Rows of a strided view: everything but the last dimension, in row-major order.

use std::marker::PhantomData;

use crate::cpu::access::Float;
use crate::kernel::View;

/// Reads rows whose last dimension is dense.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, T> {
    base: *const T,
    view: View,
    /// Distance between rows when it is the same for all.
    step: Option<isize>,
    life: PhantomData<&'a [T]>,
}

// SAFETY: `HeadRows` only reads, and the memory is not written while it lives (promise of
// `HeadRows::new`).
unsafe impl<T: Sync> Send for HeadRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for HeadRows<'_, T> {}

impl<T: Float> HeadRows<'_, T> {
    /// Over the rows of `view`.
    ///
    /// # Safety
    /// The view lies in live memory, holds `T`, its last dimension is dense, and nothing writes its
    /// elements while this lives.
    pub unsafe fn new(view: &View) -> Self {
        Self {
            base: view.ptr as *const T,
            view: *view,
            step: step(view),
            life: PhantomData,
        }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[T] {
        let width = width(&self.view);
        // SAFETY: `offset` checks that there is a row `i`; its elements are dense and readable by
        // the promise of `new`.
        unsafe {
            std::slice::from_raw_parts(self.base.offset(offset(&self.view, self.step, i)), width)
        }
    }
}

/// Writes rows whose last dimension is dense.
pub(super) struct RowsMut<'a, T> {
    base: *mut T,
    view: View,
    step: Option<isize>,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: rows are handed out by `row`, whose caller promises that no row is held twice.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<T: Float> RowsMut<'_, T> {
    /// Over the rows of `view`.
    ///
    /// # Safety
    /// As [`HeadRows::new`], nothing else touches the elements, and no two rows share one.
    pub unsafe fn new(view: &View) -> Self {
        Self {
            base: view.ptr as *mut T,
            view: *view,
            step: step(view),
            life: PhantomData,
        }
    }

    /// Row `i`.
    ///
    /// # Safety
    /// No other slice of row `i` lives.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn row(&self, i: usize) -> &mut [T] {
        let width = width(&self.view);
        // SAFETY: as in `HeadRows::row`; sole access by the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.base.offset(offset(&self.view, self.step, i)),
                width,
            )
        }
    }
}

fn width(view: &View) -> usize {
    view.shape().last().copied().unwrap_or(1)
}

/// The distance between rows if one number says it all.
fn step(view: &View) -> Option<isize> {
    let (dims, strides) = (view.shape().dims(), view.layout.strides());
    let mut rows = dims
        .iter()
        .zip(strides)
        .rev()
        .skip(1)
        .filter(|(d, _)| **d != 1);
    let (&size, &first) = rows.next().unwrap_or((&1, &0));
    let mut reach = first * size as isize;
    for (&size, &stride) in rows {
        if stride != reach {
            return None;
        }
        reach *= size as isize;
    }
    Some(first)
}

/// Where row `i` begins.
fn offset(view: &View, step: Option<isize>, i: usize) -> isize {
    debug_assert!(
        i < super::lanes::rows_of(view),
        "row {i} of {}",
        view.shape()
    );
    if let Some(step) = step {
        return i as isize * step;
    }
    let (mut left, mut at) = (i, 0);
    for (&size, &stride) in view
        .shape()
        .dims()
        .iter()
        .zip(view.layout.strides())
        .rev()
        .skip(1)
    {
        at += (left % size) as isize * stride;
        left /= size;
    }
    at
}
