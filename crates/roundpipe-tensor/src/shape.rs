//! Shapes and layouts: how many elements a tensor has along each dimension, and where they lie.
//!
//! Nothing here touches memory. Every product of sizes is checked, so that a hostile or mistaken
//! shape is an error before it can become an allocation.
//!
//! # Invariants
//! - The elements of every [`Shape`] can be counted, and so can their bytes in any type: a shape is
//!   made by [`Shape::new`] or out of one that was, without growing.
//! - Bytes become elements in one place, [`Shape::byte_range`]: all code that shows memory as a type
//!   and a shape asks it.

use std::fmt;
use std::ops::{Deref, Range};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// The most dimensions a tensor can have.
pub const MAX_RANK: usize = 8;

/// The sizes of a tensor's dimensions, outermost first. No dimensions means a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sizes, then ones: two equal shapes are equal in every entry.
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Default for Shape {
    /// A scalar's.
    fn default() -> Self {
        Self {
            dims: [1; MAX_RANK],
            rank: 0,
        }
    }
}

impl Shape {
    /// Checks rank and element count.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are more than [`MAX_RANK`] dimensions or the number of
    /// elements (empty dimensions taken as one) does not fit an `isize`.
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_RANK {
            let what = format!("{} dimensions; the most is {MAX_RANK}", dims.len());
            return Err(Error::Invalid { op: "shape", what });
        }
        let count = dims
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)));
        if count.is_none_or(|n| n > (isize::MAX as usize) / 8) {
            return Err(Error::Invalid {
                op: "shape",
                what: format!("{dims:?} has too many elements"),
            });
        }
        let mut shape = Self {
            dims: [1; MAX_RANK],
            rank: dims.len() as u8,
        };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// The sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of elements; 1 for a scalar.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// Strides, in elements, of a dense row-major tensor of this shape.
    pub fn contiguous_strides(&self) -> [isize; MAX_RANK] {
        let mut strides = [0; MAX_RANK];
        let mut next = 1isize;
        for axis in (0..self.rank()).rev() {
            strides[axis] = next;
            next *= self.dims[axis].max(1) as isize;
        }
        strides
    }

    /// Turns a dimension index that may count from the end (-1 is the last) into a plain one.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `op` when there is no such dimension.
    pub fn axis(&self, op: &'static str, dim: isize) -> Result<usize> {
        let rank = self.rank() as isize;
        let axis = if dim < 0 { dim + rank } else { dim };
        if (0..rank).contains(&axis) {
            return Ok(axis as usize);
        }
        Err(Error::Invalid {
            op,
            what: format!("no dimension {dim} in {self}"),
        })
    }

    /// The common shape of two operands after broadcasting (sizes of 1 stretch).
    ///
    /// # Errors
    /// [`Error::Shape`] naming `op` and both shapes.
    pub fn broadcast(&self, other: &Self, op: &'static str) -> Result<Self> {
        let rank = self.rank().max(other.rank());
        let mut dims = [1; MAX_RANK];
        for back in 1..=rank {
            let size = |s: &Self| {
                if back <= s.rank() {
                    s.dims[s.rank() - back]
                } else {
                    1
                }
            };
            dims[rank - back] = match (size(self), size(other)) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => {
                    return Err(Error::Shape {
                        op,
                        left: *self,
                        right: *other,
                    });
                }
            };
        }
        Self::new(&dims[..rank])
    }

    /// This shape with the size of dimension `axis` replaced.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `op` when there is no such dimension or too many elements come
    /// out.
    pub fn with(&self, op: &'static str, axis: usize, size: usize) -> Result<Self> {
        if axis >= self.rank() {
            return Err(Error::invalid(op, format!("no dimension {axis} in {self}")));
        }
        let mut dims = self.dims;
        dims[axis] = size;
        let dims = &dims[..self.rank()];
        Self::new(dims).map_err(|_| Error::invalid(op, format!("{dims:?} has too many elements")))
    }

    /// This shape with dimension `axis` cut down to `size`, which is not above its size (or 1).
    #[must_use]
    pub(crate) fn cut(&self, axis: usize, size: usize) -> Self {
        assert!(
            size <= self[axis].max(1),
            "dimension {axis} of {self} cannot be cut to {size}"
        );
        let mut out = *self;
        out.dims[axis] = size;
        out
    }

    /// Where the elements lie when they are `dtype`, dense, and begin `first_byte` bytes into
    /// `memory`, a range of addresses: their bytes, counted from the memory's start.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `op` when they reach past the end or their addresses do not suit
    /// the type.
    pub(crate) fn byte_range(
        &self,
        op: &'static str,
        dtype: DType,
        memory: Range<u64>,
        first_byte: u64,
    ) -> Result<Range<u64>> {
        let have = memory.end.saturating_sub(memory.start);
        let need = self.numel() as u64 * dtype.size() as u64;
        let end = first_byte.checked_add(need);
        let Some(end) = end.filter(|end| *end <= have) else {
            let what = format!("{dtype} {self} at byte {first_byte} needs {need} bytes of {have}");
            return Err(Error::invalid(op, what));
        };
        let size = dtype.size() as u64;
        if !(memory.start + first_byte).is_multiple_of(size) {
            let what = format!(
                "{dtype} {self} cannot start at byte {first_byte} of this memory: its address must be a multiple of {size}"
            );
            return Err(Error::invalid(op, what));
        }
        Ok(first_byte..end)
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        self.dims()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl TryFrom<&[usize]> for Shape {
    type Error = Error;
    fn try_from(dims: &[usize]) -> Result<Self> {
        Self::new(dims)
    }
}

impl<const N: usize> TryFrom<[usize; N]> for Shape {
    type Error = Error;
    fn try_from(dims: [usize; N]) -> Result<Self> {
        Self::new(&dims)
    }
}

/// A shape together with the distance, in elements, between neighbours along each dimension.
/// A stride of 0 repeats one element (broadcasting).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    shape: Shape,
    strides: [isize; MAX_RANK],
}

impl Layout {
    /// Dense, row-major.
    pub fn contiguous(shape: Shape) -> Self {
        Self {
            shape,
            strides: shape.contiguous_strides(),
        }
    }

    /// Any strides; the caller vouches that every element lies inside the storage.
    pub(crate) fn strided(shape: Shape, strides: &[isize]) -> Self {
        let mut all = [0; MAX_RANK];
        all[..shape.rank()].copy_from_slice(&strides[..shape.rank()]);
        Self {
            shape,
            strides: all,
        }
    }

    /// The sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Distance between neighbours along each dimension, in elements.
    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.shape.rank()]
    }

    /// Whether the elements lie densely in row-major order. Dimensions of size 1 do not matter;
    /// an empty tensor is contiguous.
    pub fn is_contiguous(&self) -> bool {
        let mut next = 1isize;
        for axis in (0..self.shape.rank()).rev() {
            let size = self.shape[axis];
            if size == 0 {
                return true;
            }
            if size != 1 {
                if self.strides[axis] != next {
                    return false;
                }
                next *= size as isize;
            }
        }
        true
    }

    /// Smallest and largest element offset reached, or `None` when there are no elements.
    pub fn extent(&self) -> Option<(isize, isize)> {
        let (mut low, mut high) = (0isize, 0isize);
        for (&size, &stride) in self.shape.dims().iter().zip(self.strides()) {
            if size == 0 {
                return None;
            }
            let reach = (size as isize - 1) * stride;
            low += reach.min(0);
            high += reach.max(0);
        }
        Some((low, high))
    }

    /// The same memory seen with dimensions in another order; `order` must be a permutation.
    pub(crate) fn permuted(&self, order: &[usize]) -> Self {
        let mut out = *self;
        for (to, &from) in order.iter().enumerate() {
            out.shape.dims[to] = self.shape.dims[from];
            out.strides[to] = self.strides[from];
        }
        out
    }

    /// Stretches size-1 dimensions (and adds leading ones) so that the layout reads as `shape`.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `op` when a size neither matches nor is 1.
    pub(crate) fn broadcast_to(&self, shape: Shape, op: &'static str) -> Result<Self> {
        let fail = || Error::Shape {
            op,
            left: self.shape,
            right: shape,
        };
        let lead = shape
            .rank()
            .checked_sub(self.shape.rank())
            .ok_or_else(fail)?;
        let mut strides = [0; MAX_RANK];
        for axis in 0..self.shape.rank() {
            let (have, want) = (self.shape[axis], shape[lead + axis]);
            strides[lead + axis] = match have == want {
                true => self.strides[axis],
                false if have == 1 => 0,
                false => return Err(fail()),
            };
        }
        Ok(Self { shape, strides })
    }

    /// The same elements in the same order under another shape, without moving them, where the
    /// strides allow it.
    pub(crate) fn reshaped(&self, shape: Shape) -> Option<Self> {
        if self.is_contiguous() {
            return Some(Self::contiguous(shape));
        }
        // Walk both shapes from the left, matching groups of equal element count; a group of old
        // dimensions must be mergeable (each stride covers the next dimension exactly).
        let old: Vec<(usize, isize)> = self
            .shape
            .dims()
            .iter()
            .zip(self.strides())
            .filter(|(d, _)| **d != 1)
            .map(|(d, s)| (*d, *s))
            .collect();
        let mut strides = [0; MAX_RANK];
        let (mut from, mut to) = (0, 0);
        while from < old.len() {
            let (mut have, start) = (old[from].0, from);
            let mut want = 1;
            let first = to;
            while to < shape.rank() && (want < have || shape[to] == 1) {
                want *= shape[to];
                to += 1;
                while have < want {
                    from += 1;
                    have *= old.get(from)?.0;
                }
            }
            if have != want {
                return None;
            }
            if old[start..=from]
                .windows(2)
                .any(|w| w[0].1 != w[1].1 * w[1].0 as isize)
            {
                return None;
            }
            let mut stride = old[from].1;
            for axis in (first..to).rev() {
                strides[axis] = stride;
                stride *= shape[axis] as isize;
            }
            from += 1;
        }
        Some(Self { shape, strides })
    }
}

#[cfg(test)]
mod tests {
    use super::{Layout, Shape};
    use crate::dtype::DType;

    fn shape(dims: &[usize]) -> Shape {
        Shape::new(dims).unwrap()
    }

    /// The element count is checked before anyone multiplies it by a size.
    #[test]
    fn absurd_shapes_are_refused() {
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(
            Shape::new(&[0, usize::MAX, usize::MAX]).is_err(),
            "an empty dimension hides nothing"
        );
        assert!(Shape::new(&[1; 9]).is_err());
    }

    /// Changing one size of a checked shape is checked as a whole: [2^60 + 1, 16] would have "16"
    /// elements.
    #[test]
    fn a_changed_size_is_checked() {
        let line = shape(&[1, 16]);
        assert_eq!(line.with("test", 0, 3).unwrap(), shape(&[3, 16]));
        for (axis, size) in [(0, (1 << 60) + 1), (1, usize::MAX), (2, 1), (7, 0)] {
            assert!(line.with("test", axis, size).is_err(), "{size} at {axis}");
        }
        assert_eq!(
            (line.cut(1, 0), shape(&[0]).cut(0, 1)),
            (shape(&[1, 0]), shape(&[1]))
        );
        assert!(std::panic::catch_unwind(|| line.cut(1, 17)).is_err());
    }

    /// Memory is shown as elements only where they lie inside and at addresses of their type.
    #[test]
    fn elements_are_placed_inside_and_aligned() {
        let two = shape(&[2]);
        let place = |memory, first| two.byte_range("test", DType::F32, memory, first).ok();
        assert_eq!(
            (place(64..72, 0), place(64..80, 8)),
            (Some(0..8), Some(8..16))
        );
        for (memory, first) in [
            (64..71, 0),
            (64..72, 1),
            (64..72, 4),
            (64..72, u64::MAX - 7),
        ] {
            assert_eq!(
                place(memory.clone(), first),
                None,
                "{memory:?} from {first}"
            );
        }
        assert_eq!(
            (place(65..90, 0), place(64..90, 2), place(66..90, 2)),
            (None, None, Some(2..10))
        );
        assert!(
            shape(&[0]).byte_range("test", DType::F64, 4..4, 0).is_err(),
            "nor may nothing lie crooked"
        );
        assert_eq!(
            shape(&[5]).byte_range("test", DType::U8, 3..9, 1).unwrap(),
            1..6
        );
    }

    #[test]
    fn a_default_shape_is_a_scalars() {
        assert_eq!(Shape::default(), shape(&[]));
    }

    #[test]
    fn broadcasting_stretches_ones_and_names_both_shapes_otherwise() {
        assert_eq!(
            shape(&[3, 1, 5]).broadcast(&shape(&[4, 1]), "add").unwrap(),
            shape(&[3, 4, 5])
        );
        assert_eq!(
            shape(&[0]).broadcast(&shape(&[1]), "add").unwrap(),
            shape(&[0])
        );
        let text = shape(&[2, 3])
            .broadcast(&shape(&[4]), "add")
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("add") && text.contains("[2, 3]") && text.contains("[4]"),
            "{text}"
        );
    }

    /// Every reshape that keeps the memory must read the elements in the same order.
    #[test]
    fn reshaped_layouts_visit_the_same_offsets() {
        fn offsets(layout: &Layout) -> Vec<isize> {
            let mut out = vec![0];
            for (&size, &stride) in layout.shape().dims().iter().zip(layout.strides()) {
                out = out
                    .iter()
                    .flat_map(|o| (0..size as isize).map(move |i| o + i * stride))
                    .collect();
            }
            out
        }
        let base = Layout::contiguous(shape(&[4, 6, 5]));
        let cases = [base.permuted(&[1, 0, 2]), base.permuted(&[2, 0, 1]), base];
        for layout in cases {
            for dims in [
                &[120usize][..],
                &[24, 5],
                &[4, 6, 5],
                &[6, 2, 2, 5],
                &[6, 4, 5, 1],
                &[2, 3, 20],
                &[5, 24],
            ] {
                if let Some(new) = layout.reshaped(shape(dims)) {
                    assert_eq!(offsets(&new), offsets(&layout), "{layout:?} as {dims:?}");
                }
            }
        }
        assert!(
            base.permuted(&[1, 0, 2])
                .reshaped(shape(&[6, 2, 2, 5]))
                .is_some()
        );
        assert!(
            base.permuted(&[1, 0, 2])
                .reshaped(shape(&[24, 5]))
                .is_none()
        );
    }
}
