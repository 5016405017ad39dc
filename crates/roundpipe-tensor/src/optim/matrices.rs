//! How the elements of a parameter are matrices, for rules that work on rows and columns.
//!
//! The last two dimensions are a matrix, and those before them count matrices: the experts of a
//! layer, say. A parameter with fewer dimensions holds no matrix.
//!
//! # Invariants
//! - Tasks follow from sizes alone, never from the number of threads.

use std::ops::Range;

use crate::shape::Shape;

/// The matrices of a parameter, one after another, each by rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrices {
    /// How many.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
}

/// Whole rows of one matrix, which one task works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowTask {
    /// Among the elements of the parameter.
    pub(super) elements: Range<usize>,
    /// Among the rows of all matrices.
    pub(super) rows: Range<usize>,
    /// The matrix's columns, among those of all matrices.
    pub(super) cols: Range<usize>,
}

impl Matrices {
    /// The matrices of a parameter with these sizes; `None` with fewer than two dimensions.
    pub fn of(shape: &Shape) -> Option<Self> {
        let [before @ .., rows, cols] = shape.dims() else {
            return None;
        };
        Some(Self {
            count: before.iter().product(),
            rows: *rows,
            cols: *cols,
        })
    }

    /// Elements of all.
    pub fn numel(&self) -> usize {
        self.count * self.rows * self.cols
    }

    /// All rows in tasks of at most `elements` elements, but at least one row.
    pub(super) fn row_tasks(&self, elements: usize) -> Vec<RowTask> {
        let Self { count, rows, cols } = *self;
        let step = (elements / cols.max(1)).max(1);
        let mut tasks = Vec::new();
        for matrix in 0..count {
            for first in (0..rows).step_by(step) {
                let here = matrix * rows + first..matrix * rows + rows.min(first + step);
                tasks.push(RowTask {
                    elements: here.start * cols..here.end * cols,
                    rows: here,
                    cols: matrix * cols..(matrix + 1) * cols,
                });
            }
        }
        tasks
    }

    /// The part of `slab` that each task works on.
    pub(super) fn split<'a, T>(&self, tasks: &[RowTask], slab: &'a mut [T]) -> Vec<&'a mut [T]> {
        let mut rest = slab;
        let part = |task: &RowTask| {
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(task.elements.len());
            rest = behind;
            here
        };
        tasks.iter().map(part).collect()
    }

    /// The same of a slab that may not be there.
    pub(super) fn split_optional<'a, T>(
        &self,
        tasks: &[RowTask],
        slab: Option<&'a mut [T]>,
    ) -> Vec<Option<&'a mut [T]>> {
        match slab {
            Some(slab) => self.split(tasks, slab).into_iter().map(Some).collect(),
            None => tasks.iter().map(|_| None).collect(),
        }
    }
}
