//! Operands as sequences: elements in row-major order, whatever their strides.

use super::super::access::Call;
use crate::dtype::DType;
use crate::kernel::View;
use crate::shape::MAX_RANK;

/// A layout with dimensions of size 1 dropped and neighbours merged where one stride covers the
/// next dimension; at least one dimension is left.
#[derive(Clone, Copy)]
struct Walk {
    base: u64,
    dtype: DType,
    numel: usize,
    rank: usize,
    sizes: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

impl Walk {
    fn new(view: &View) -> Self {
        let mut walk = Self {
            base: view.ptr,
            dtype: view.dtype,
            numel: view.numel(),
            rank: 0,
            sizes: [1; MAX_RANK],
            strides: [1; MAX_RANK],
        };
        for (&size, &stride) in view.shape().dims().iter().zip(view.layout.strides()) {
            if size == 1 {
                continue;
            }
            let last = walk.rank.wrapping_sub(1);
            if walk.rank > 0 && walk.strides[last] == stride * size as isize {
                walk.sizes[last] *= size;
                walk.strides[last] = stride;
            } else {
                walk.sizes[walk.rank] = size;
                walk.strides[walk.rank] = stride;
                walk.rank += 1;
            }
        }
        walk.rank = walk.rank.max(1);
        walk
    }

    fn inner(&self) -> (usize, isize) {
        (self.sizes[self.rank - 1], self.strides[self.rank - 1])
    }

    /// Offset of element `at`, in elements, and its index along the innermost dimension.
    fn locate(&self, at: usize) -> (isize, [usize; MAX_RANK]) {
        let mut index = [0; MAX_RANK];
        let (mut rest, mut offset) = (at, 0);
        for axis in (0..self.rank).rev() {
            index[axis] = rest % self.sizes[axis];
            rest /= self.sizes[axis];
            offset += index[axis] as isize * self.strides[axis];
        }
        (offset, index)
    }

    /// Calls `line(offset, done, count)` for each run of elements along the innermost dimension
    /// within `start..start + len`: `count` elements from `offset` on are elements `done..` of the
    /// range.
    #[inline(always)]
    fn lines(&self, start: usize, len: usize, mut line: impl FnMut(isize, usize, usize)) {
        let (size, stride) = self.inner();
        let inner = self.rank - 1;
        let (mut offset, mut index) = self.locate(start);
        let mut done = 0;
        while done < len {
            let count = (size - index[inner]).min(len - done);
            line(offset, done, count);
            done += count;
            if done == len {
                return;
            }
            // On to the next line: back to its start, then carry.
            offset -= index[inner] as isize * stride;
            index[inner] = 0;
            for axis in (0..inner).rev() {
                index[axis] += 1;
                offset += self.strides[axis];
                if index[axis] < self.sizes[axis] {
                    break;
                }
                offset -= self.strides[axis] * self.sizes[axis] as isize;
                index[axis] = 0;
            }
        }
    }

    /// Offset of `start` if `len` elements from there on lie side by side.
    fn together(&self, start: usize, len: usize) -> Option<isize> {
        let (size, stride) = self.inner();
        (stride == 1 && start % size.max(1) + len <= size).then(|| self.locate(start).0)
    }

    fn check<T>(&self, start: usize, len: usize) {
        assert!(
            start + len <= self.numel && self.dtype.size() == size_of::<T>(),
            "a block outside its view"
        );
    }

    fn at<T>(&self, offset: isize) -> *mut T {
        (self.base as *mut T).wrapping_offset(offset)
    }
}

/// How a transposed source lies: planes of rows and columns in order, where a *column* is a run in
/// memory.
pub(super) struct TransposedSource {
    /// Rows and columns of a plane.
    pub sizes: [usize; 2],
    /// How many planes there are.
    pub planes: usize,
    /// Which dimension the rows are; the columns are the last.
    axis: usize,
    /// Sizes between the two.
    between: usize,
}

impl TransposedSource {
    /// Row-major index of an element; planes count in row-major order of the other dimensions.
    pub fn index(&self, plane: usize, row: usize, column: usize) -> usize {
        let (before, between) = (plane / self.between, plane % self.between);
        let [rows, columns] = self.sizes;
        ((before * rows + row) * self.between + between) * columns + column
    }
}

/// An operand that is read.
#[derive(Clone, Copy)]
pub(super) struct ReadOperand(Walk);

impl ReadOperand {
    /// Source `i` of a call.
    ///
    /// # Safety
    /// The view lies in live memory, and nothing writes it while this and what it lends live.
    pub unsafe fn new(call: &Call<'_>, i: usize) -> Self {
        Self(Walk::new(call.src(i)))
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Elements `start..start + len` where they lie, if side by side.
    pub fn lend<T: Copy>(&self, start: usize, len: usize) -> Option<&[T]> {
        self.0.check::<T>(start, len);
        let offset = self.0.together(start, len)?;
        // SAFETY: the elements are inside the view by `check` and `together`, live and unwritten by
        // the promise of `new`; blocks are aligned to 256 bytes and views start at whole elements.
        Some(unsafe { std::slice::from_raw_parts(self.0.at::<T>(offset), len) })
    }

    /// Copies the elements from `start` on into `out`.
    pub fn gather<T: Copy>(&self, start: usize, out: &mut [T]) {
        self.0.check::<T>(start, out.len());
        let stride = self.0.inner().1;
        self.0.lines(start, out.len(), |offset, done, count| {
            let out = &mut out[done..done + count];
            let from = self.0.at::<T>(offset);
            // SAFETY: as in `lend`; `lines` stays inside the view.
            unsafe {
                match stride {
                    1 => out.copy_from_slice(std::slice::from_raw_parts(from, count)),
                    0 => out.fill(*from),
                    _ => out
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, x)| *x = *from.offset(i as isize * stride)),
                }
            }
        });
    }

    /// How the source is transposed: another dimension than the last lies side by side in memory.
    /// `None` for others, and for those too small to matter.
    pub fn transposed(&self) -> Option<TransposedSource> {
        let walk = &self.0;
        let last = walk.rank - 1;
        let (columns, stride) = walk.inner();
        if walk.numel < 4096 || matches!(stride, 0 | 1) {
            return None;
        }
        let axis = (0..last).rfind(|axis| walk.strides[*axis] == 1)?;
        let rows = walk.sizes[axis];
        let between = walk.sizes[axis + 1..last].iter().product();
        Some(TransposedSource {
            sizes: [rows, columns],
            planes: walk.numel / (rows * columns),
            axis,
            between,
        })
    }

    /// `count` rows of one column of a transposed source, which lie side by side.
    pub fn run<T: Copy>(
        &self,
        transposed: &TransposedSource,
        plane: usize,
        row: usize,
        column: usize,
        count: usize,
    ) -> &[T] {
        let start = transposed.index(plane, row, column);
        self.0.check::<T>(start, 1);
        let (offset, index) = self.0.locate(start);
        assert!(
            index[transposed.axis] + count <= self.0.sizes[transposed.axis],
            "rows outside their plane"
        );
        // SAFETY: the first element is inside the view by `check`, the others along a dimension of
        // stride 1 by the assertion and `transposed`; live and unwritten by the promise of `new`.
        unsafe { std::slice::from_raw_parts(self.0.at::<T>(offset), count) }
    }

    /// Elements from `start` on: lent, or gathered into `buf`.
    pub fn read<'b, T: Copy>(&'b self, start: usize, buf: &'b mut [T]) -> &'b [T] {
        match self.lend(start, buf.len()) {
            Some(lent) => lent,
            None => {
                self.gather(start, buf);
                buf
            }
        }
    }
}

/// An operand that is written, and perhaps read before.
#[derive(Clone, Copy)]
pub(super) struct WriteOperand(Walk);

impl WriteOperand {
    /// Destination `i` of a call.
    ///
    /// # Safety
    /// The view lies in live memory, no two of its elements share an address, and nothing else
    /// reads or writes it while this and what it lends live. Calls of one task at a time touch
    /// disjoint ranges.
    pub unsafe fn new(call: &Call<'_>, i: usize) -> Self {
        Self(Walk::new(call.dst(i)))
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub fn numel(&self) -> usize {
        self.0.numel
    }

    /// The view for reading, by the task that will write the same elements.
    pub fn source(&self) -> ReadOperand {
        ReadOperand(self.0)
    }

    /// Elements `start..start + len` where they lie, if side by side.
    #[allow(
        clippy::mut_from_ref,
        reason = "tasks touch disjoint ranges, as `new` was promised"
    )]
    pub fn lend<T: Copy>(&self, start: usize, len: usize) -> Option<&mut [T]> {
        self.0.check::<T>(start, len);
        let offset = self.0.together(start, len)?;
        // SAFETY: inside the view by `check` and `together`; live, and touched by this task alone,
        // by the promise of `new`; aligned as for sources.
        Some(unsafe { std::slice::from_raw_parts_mut(self.0.at::<T>(offset), len) })
    }

    /// Copies `values` to the elements from `start` on.
    pub fn scatter<T: Copy>(&self, start: usize, values: &[T]) {
        self.0.check::<T>(start, values.len());
        let stride = self.0.inner().1;
        self.0.lines(start, values.len(), |offset, done, count| {
            let to = self.0.at::<T>(offset);
            let values = &values[done..done + count];
            // SAFETY: as in `lend`; `lines` stays inside the view, and a borrowed slice is no part
            // of it.
            unsafe {
                match stride {
                    1 => std::ptr::copy_nonoverlapping(values.as_ptr(), to, count),
                    _ => values
                        .iter()
                        .enumerate()
                        .for_each(|(i, x)| *to.offset(i as isize * stride) = *x),
                }
            }
        });
    }

    /// Lets `fill` write the elements from `start` on, in place where they lie side by side, else
    /// by way of `buf`.
    pub fn write<T: Copy>(&self, start: usize, buf: &mut [T], fill: impl FnOnce(&mut [T])) {
        match self.lend(start, buf.len()) {
            Some(place) => fill(place),
            None => {
                fill(buf);
                self.scatter(start, buf);
            }
        }
    }
}
