//! Tensors in host memory: what a user feeds in and gets back, before and after any device.
//!
//! A host tensor is dense and row-major; it is a [`HostBuf`], its first byte, a type and a shape.
//! Cloning shares the memory, and so does a cut along the outermost dimension. Nothing is computed
//! in this file: elements are moved as bytes, whatever their type; `metrics` sums and compares them. Reading and writing claim exactly the
//! tensor's bytes, so that two cuts of one buffer can be in use at the same time.
//!
//! # Invariants
//! - The bytes lie inside the buffer and start at an address that is a multiple of the element
//!   size.

mod metrics;

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostMut, HostRef};
use crate::shape::Shape;

pub use self::metrics::Hits;

/// The name under which new tensors ask for memory.
const NAME: &str = "host tensor";

/// A typed, shaped, dense piece of host memory; cloning shares it.
#[derive(Clone)]
pub struct HostTensor {
    buf: HostBuf,
    first_byte: usize,
    dtype: DType,
    shape: Shape,
}

impl HostTensor {
    /// A tensor over a whole buffer.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the buffer is not exactly as large as the shape and type ask, or
    /// does not begin where elements of the type can.
    pub fn new(buf: HostBuf, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        buf.place_all(NAME, dtype, &shape)?;
        Ok(Self {
            buf,
            first_byte: 0,
            dtype,
            shape,
        })
    }

    /// A tensor over a part of a buffer that starts at `first_byte`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the part reaches past the buffer or does not start at a whole
    /// element.
    pub fn within(buf: HostBuf, first_byte: usize, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        buf.byte_range(NAME, first_byte, dtype, &shape)?;
        Ok(Self {
            buf,
            first_byte,
            dtype,
            shape,
        })
    }

    /// Given values.
    ///
    /// # Errors
    /// When their number is not the shape's, or the system has no memory.
    pub fn from_slice<T: Element>(values: &[T], dims: &[usize]) -> Result<Self> {
        let shape = counted(values.len(), dims)?;
        Ok(Self {
            buf: HostBuf::from_slice(NAME, values)?,
            first_byte: 0,
            dtype: T::DTYPE,
            shape,
        })
    }

    /// Given truth values.
    ///
    /// # Errors
    /// As [`HostTensor::from_slice`].
    pub fn from_bools(values: &[bool], dims: &[usize]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().map(|&b| u8::from(b)).collect();
        Ok(Self {
            dtype: DType::Bool,
            ..Self::from_slice(&bytes, dims)?
        })
    }

    /// Given values, each rounded once to `dtype` (truth values: whatever is not 0 is true).
    ///
    /// # Errors
    /// As [`HostTensor::from_slice`].
    pub fn from_f64s(values: &[f64], dtype: DType, dims: &[usize]) -> Result<Self> {
        fn round<T: Element>(values: &[f64], dims: &[usize]) -> Result<HostTensor> {
            HostTensor::from_slice(
                &values.iter().map(|&x| T::from_f64(x)).collect::<Vec<_>>(),
                dims,
            )
        }
        match dtype {
            DType::F64 => Self::from_slice(values, dims),
            DType::F32 => round::<f32>(values, dims),
            DType::BF16 => round::<bf16>(values, dims),
            DType::F16 => round::<f16>(values, dims),
            DType::I64 => round::<i64>(values, dims),
            DType::I32 => round::<i32>(values, dims),
            DType::U32 => round::<u32>(values, dims),
            DType::U8 => round::<u8>(values, dims),
            DType::Bool => {
                Self::from_bools(&values.iter().map(|&x| x != 0.0).collect::<Vec<_>>(), dims)
            }
        }
    }

    /// All zeros.
    ///
    /// # Errors
    /// When the shape is absurd or the system has no memory.
    pub fn zeros(dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        Self::new(
            HostBuf::zeroed(NAME, shape.numel() * dtype.size())?,
            dtype,
            dims,
        )
    }

    /// One value everywhere, rounded to `dtype`.
    ///
    /// # Errors
    /// As [`HostTensor::zeros`].
    pub fn full(dtype: DType, dims: &[usize], value: f64) -> Result<Self> {
        let out = Self::zeros(dtype, dims)?;
        let one = Self::from_f64s(&[value], dtype, &[])?;
        if out.size_bytes() > 0 {
            let (src, mut dst) = (one.read()?, out.write()?);
            for element in dst.bytes().chunks_exact_mut(dtype.size()) {
                element.copy_from_slice(src.bytes());
            }
        }
        Ok(out)
    }

    /// One f32 without dimensions.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn scalar(value: f32) -> Result<Self> {
        Self::from_slice(&[value], &[])
    }

    /// Whether both are the same memory under the same type and shape.
    pub fn is_same(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.shape == other.shape && {
            let (a, b) = (
                self.buf.slice(self.byte_range()),
                other.buf.slice(other.byte_range()),
            );
            matches!((a, b), (Ok(a), Ok(b)) if a.is_same(&b))
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// The memory, of which [`HostTensor::byte_range`] is this tensor's.
    pub fn buf(&self) -> &HostBuf {
        &self.buf
    }

    /// Where in the buffer the elements are.
    pub fn byte_range(&self) -> Range<usize> {
        self.first_byte..self.first_byte + self.size_bytes()
    }

    /// Lends the elements for reading.
    ///
    /// # Errors
    /// [`Error::Busy`] while they are being written.
    pub fn read(&self) -> Result<HostRef> {
        self.buf.read(self.byte_range())
    }

    /// Lends the elements for writing; every tensor that shares them sees the change.
    ///
    /// # Errors
    /// [`Error::Busy`] while they are in use; [`Error::Invalid`] when they are a mapped file.
    pub fn write(&self) -> Result<HostMut> {
        self.buf.write(self.byte_range())
    }

    /// A copy of the elements.
    ///
    /// # Errors
    /// When `T` is not this tensor's type (bool reads as u8), or while it is being written.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype && !(self.dtype == DType::Bool && T::DTYPE == DType::U8) {
            let what = format!(
                "asked for {} of a {} host tensor {}",
                T::DTYPE,
                self.dtype,
                self.shape
            );
            return Err(Error::invalid("to_vec", what));
        }
        Ok(self.read()?.as_slice::<T>().to_vec())
    }

    /// A copy of the elements as f64, whatever their type.
    ///
    /// # Errors
    /// While the tensor is being written.
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        fn widen<T: Element>(t: &HostTensor) -> Result<Vec<f64>> {
            Ok(t.read()?
                .as_slice::<T>()
                .iter()
                .map(|x| x.to_f64())
                .collect())
        }
        match self.dtype {
            DType::F64 => self.to_vec(),
            DType::F32 => widen::<f32>(self),
            DType::BF16 => widen::<bf16>(self),
            DType::F16 => widen::<f16>(self),
            DType::I64 => widen::<i64>(self),
            DType::I32 => widen::<i32>(self),
            DType::U32 => widen::<u32>(self),
            DType::U8 | DType::Bool => widen::<u8>(self),
        }
    }

    /// The one element of a tensor that has one.
    ///
    /// # Errors
    /// When there is not exactly one element, and as [`HostTensor::to_f64_vec`].
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(Error::invalid(
                "item",
                format!("{} has {} elements", self.shape, self.numel()),
            ));
        }
        Ok(self.to_f64_vec()?[0])
    }

    /// `len` entries from `start` on along dimension `dim` (-1 is the last). Shares the memory when
    /// the entries lie together, which they do along dimension 0; otherwise copies them.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such dimension or no such entries.
    pub fn narrow(&self, dim: isize, start: usize, len: usize) -> Result<Self> {
        const OP: &str = "narrow";
        let axis = self.shape.axis(OP, dim)?;
        if start
            .checked_add(len)
            .is_none_or(|end| end > self.shape[axis])
        {
            let what = format!(
                "{len} from {start} on along dimension {axis} of {}",
                self.shape
            );
            return Err(Error::invalid(OP, what));
        }
        let shape = self.shape.cut(axis, len);
        let (rows, inner) = self.around(axis);
        let (row, skip) = (self.shape[axis] * inner, start * inner);
        if rows <= 1 {
            // Without elements there is nothing to skip, and the range must stay inside the buffer.
            let skip = if self.numel() == 0 { 0 } else { skip };
            return Ok(Self {
                first_byte: self.first_byte + skip,
                shape,
                ..self.clone()
            });
        }
        let out = Self::zeros(self.dtype, shape.dims())?;
        if out.size_bytes() > 0 {
            let (src, mut dst) = (self.read()?, out.write()?);
            let cut = len * inner;
            for (to, from) in dst
                .bytes()
                .chunks_exact_mut(cut)
                .zip(src.bytes().chunks_exact(row))
            {
                to.copy_from_slice(&from[skip..skip + cut]);
            }
        }
        Ok(out)
    }

    /// The tensors one after another along dimension `dim` (-1 is the last). One tensor is shared,
    /// not copied.
    ///
    /// # Errors
    /// When there are none, or they differ in type or in another dimension.
    pub fn cat(parts: &[Self], dim: isize) -> Result<Self> {
        const OP: &str = "cat";
        let [first, rest @ ..] = parts else {
            return Err(Error::invalid(OP, "no tensors to put together"));
        };
        let axis = first.shape.axis(OP, dim)?;
        let mut size = first.shape[axis];
        for part in rest {
            first.check_same_dtype(part, OP)?;
            if part.shape.rank() != first.shape.rank()
                || part.shape.cut(axis, 0) != first.shape.cut(axis, 0)
            {
                return Err(Error::Shape {
                    op: OP,
                    left: first.shape,
                    right: part.shape,
                });
            }
            size = size.saturating_add(part.shape[axis]);
        }
        if rest.is_empty() {
            return Ok(first.clone());
        }
        let out = Self::zeros(first.dtype, first.shape.with(OP, axis, size)?.dims())?;
        if out.size_bytes() > 0 {
            out.fill_rows(parts, axis)?;
        }
        Ok(out)
    }

    /// The tensors side by side along a new dimension `dim` (-1 is the last).
    ///
    /// # Errors
    /// When there are none, or they differ in type or shape.
    pub fn stack(parts: &[Self], dim: isize) -> Result<Self> {
        const OP: &str = "stack";
        let Some(first) = parts.first() else {
            return Err(Error::invalid(OP, "no tensors to put together"));
        };
        let mut dims = first.dims().to_vec();
        let rank = dims.len() as isize + 1;
        let axis = if dim < 0 { dim + rank } else { dim };
        if !(0..rank).contains(&axis) {
            let what = format!("no place {dim} for a new dimension in {}", first.shape);
            return Err(Error::invalid(OP, what));
        }
        dims.insert(axis as usize, 1);
        let mut raised = Vec::with_capacity(parts.len());
        for part in parts {
            first.check_same_dtype(part, OP)?;
            if part.shape != first.shape {
                return Err(Error::Shape {
                    op: OP,
                    left: first.shape,
                    right: part.shape,
                });
            }
            raised.push(part.reshape(&dims)?);
        }
        Self::cat(&raised, axis)
    }

    /// The same elements, in the same memory, under another shape.
    ///
    /// # Errors
    /// When the shape has another number of elements.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        if shape.numel() != self.numel() {
            let what = format!(
                "{} has {} elements, {shape} has {}",
                self.shape,
                self.numel(),
                shape.numel()
            );
            return Err(Error::invalid("reshape", what));
        }
        Ok(Self {
            shape,
            ..self.clone()
        })
    }

    /// Whether type, shape and every bit agree.
    ///
    /// # Errors
    /// While one of them is being written.
    pub fn same_bits(&self, other: &Self) -> Result<bool> {
        if self.dtype != other.dtype || self.shape != other.shape {
            return Ok(false);
        }
        Ok(self.read()?.bytes() == other.read()?.bytes())
    }

    /// Writes the rows of `parts` side by side; sizes were checked by the caller.
    fn fill_rows(&self, parts: &[Self], axis: usize) -> Result<()> {
        let (_, inner) = self.around(axis);
        let row = self.shape[axis] * inner;
        let mut dst = self.write()?;
        let mut at = 0;
        for part in parts {
            let cut = part.shape[axis] * inner;
            if cut == 0 {
                continue;
            }
            let src = part.read()?;
            for (to, from) in dst
                .bytes()
                .chunks_exact_mut(row)
                .zip(src.bytes().chunks_exact(cut))
            {
                to[at..at + cut].copy_from_slice(from);
            }
            at += cut;
        }
        Ok(())
    }

    /// How often dimension `axis` is walked, and how many bytes one of its entries takes.
    fn around(&self, axis: usize) -> (usize, usize) {
        let rows = self.dims()[..axis].iter().product();
        let inner = self.dims()[axis + 1..].iter().product::<usize>() * self.dtype.size();
        (rows, inner)
    }

    fn check_same_dtype(&self, other: &Self, op: &'static str) -> Result<()> {
        if self.dtype == other.dtype {
            return Ok(());
        }
        let (left, right) = (self.dtype, other.dtype);
        Err(Error::DTypes {
            op,
            left,
            left_shape: self.shape,
            right,
            right_shape: other.shape,
        })
    }
}

/// The shape, when it has `count` elements.
fn counted(count: usize, dims: &[usize]) -> Result<Shape> {
    let shape = Shape::new(dims)?;
    if shape.numel() != count {
        return Err(Error::invalid(
            NAME,
            format!("{count} values for shape {shape}"),
        ));
    }
    Ok(shape)
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({} {})", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::HostTensor;
    use crate::dtype::DType;
    use crate::host::HostBuf;

    fn count(dims: &[usize]) -> HostTensor {
        let n = dims.iter().product::<usize>() as i32;
        HostTensor::from_slice(&(0..n).collect::<Vec<_>>(), dims).unwrap()
    }

    /// Microbatches are cuts of the user's batch; copying them would double the host memory.
    #[test]
    fn cuts_along_the_outermost_dimension_share_memory() {
        let t = count(&[4, 3]);
        let cut = t.narrow(0, 1, 2).unwrap();
        assert_eq!((cut.dims(), cut.byte_range()), (&[2, 3][..], 12..36));
        assert_eq!(cut.to_vec::<i32>().unwrap(), [3, 4, 5, 6, 7, 8]);
        cut.write().unwrap().as_mut_slice::<i32>()[0] = 99;
        assert_eq!(
            t.to_vec::<i32>().unwrap()[3],
            99,
            "the cut is the same memory"
        );
        let inner = count(&[1, 1, 6]).narrow(-1, 2, 3).unwrap();
        assert_eq!(
            (inner.byte_range(), inner.buf().len()),
            (8..20, 24),
            "ones before it do not matter"
        );
        let nested = cut.narrow(0, 1, 1).unwrap();
        assert_eq!(nested.to_vec::<i32>().unwrap(), [6, 7, 8]);
    }

    /// Two microbatches of one buffer can be written at the same time, the same one cannot.
    #[test]
    fn a_claim_covers_just_the_tensors_bytes() {
        let t = count(&[4, 3]);
        let (a, b) = (t.narrow(0, 0, 2).unwrap(), t.narrow(0, 2, 2).unwrap());
        let writing = a.write().unwrap();
        assert!(b.write().is_ok() && a.read().is_err() && t.read().is_err());
        drop(writing);
        assert!(t.read().is_ok());
    }

    #[test]
    fn inner_cuts_are_dense_copies_and_cat_undoes_them() {
        let t = count(&[2, 5, 3]);
        let cut = t.narrow(1, 1, 2).unwrap();
        assert_eq!(
            cut.to_vec::<i32>().unwrap(),
            [3, 4, 5, 6, 7, 8, 18, 19, 20, 21, 22, 23]
        );
        for axis in 0..3isize {
            let size = t.dims()[axis as usize];
            let parts: Vec<_> = [(0, 1), (1, 0), (1, size - 1)]
                .map(|(start, len)| t.narrow(axis, start, len).unwrap())
                .into();
            assert!(
                HostTensor::cat(&parts, axis - 3)
                    .unwrap()
                    .same_bits(&t)
                    .unwrap(),
                "axis {axis}"
            );
        }
    }

    /// Every type travels as bytes; reading widens without loss for small values.
    #[test]
    fn every_dtype_cuts_joins_and_reads() {
        for dtype in DType::ALL {
            let values = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0];
            let t = HostTensor::from_f64s(&values, dtype, &[3, 2]).unwrap();
            assert_eq!(
                (t.dtype(), t.to_f64_vec().unwrap()),
                (dtype, values.to_vec())
            );
            for axis in [0, 1] {
                let parts = [t.narrow(axis, 0, 1).unwrap(), t.narrow(axis, 1, 1).unwrap()];
                let back = HostTensor::cat(&parts, axis).unwrap();
                assert!(
                    back.same_bits(&t.narrow(axis, 0, 2).unwrap()).unwrap(),
                    "{dtype} axis {axis}"
                );
            }
        }
        let bools = HostTensor::from_bools(&[true, false], &[2]).unwrap();
        assert_eq!(bools.to_vec::<u8>().unwrap(), [1, 0]);
    }

    #[test]
    fn empty_tensors_are_harmless() {
        let t = HostTensor::zeros(DType::F32, &[3, 0]).unwrap();
        assert_eq!(t.narrow(0, 1, 2).unwrap().dims(), [2, 0]);
        assert_eq!(t.narrow(1, 0, 0).unwrap().numel(), 0);
        assert_eq!(HostTensor::cat(&[t.clone(), t], 0).unwrap().dims(), [6, 0]);
        let full = count(&[2, 2]);
        assert_eq!(
            full.narrow(0, 2, 0).unwrap().to_vec::<i32>().unwrap(),
            [0i32; 0]
        );
        assert_eq!(full.narrow(1, 2, 0).unwrap().dims(), [2, 0]);
    }

    #[test]
    fn stacked_tensors_stand_along_a_new_dimension() {
        let parts = [count(&[2, 2]), count(&[2, 2])];
        let stacked = |dim| {
            let t = HostTensor::stack(&parts, dim).unwrap();
            (t.dims().to_vec(), t.to_vec::<i32>().unwrap())
        };
        assert_eq!(stacked(0), (vec![2, 2, 2], vec![0, 1, 2, 3, 0, 1, 2, 3]));
        assert_eq!(stacked(1), (vec![2, 2, 2], vec![0, 1, 0, 1, 2, 3, 2, 3]));
        assert_eq!(stacked(-1), (vec![2, 2, 2], vec![0, 0, 1, 1, 2, 2, 3, 3]));
        let scalars = [1.0, 2.0].map(|x| HostTensor::scalar(x).unwrap());
        let row = HostTensor::stack(&scalars, 0).unwrap();
        assert_eq!(
            (row.dims(), row.to_vec::<f32>().unwrap()),
            (&[2][..], vec![1.0, 2.0])
        );
    }

    /// A wrong argument is one line that shows the shapes.
    #[test]
    fn wrong_arguments_are_named() {
        let t = count(&[2, 3]);
        let cases = [
            (
                t.narrow(0, 1, 2).err(),
                "2 from 1 on along dimension 0 of [2, 3]",
            ),
            (t.narrow(0, usize::MAX, 2).err(), "[2, 3]"),
            (t.narrow(2, 0, 1).err(), "no dimension 2 in [2, 3]"),
            (t.item().err(), "[2, 3] has 6 elements"),
            (
                t.to_vec::<f32>().err(),
                "asked for f32 of a i32 host tensor [2, 3]",
            ),
            (
                HostTensor::from_slice(&[1.0f32], &[2]).err(),
                "1 values for shape [2]",
            ),
            (
                HostTensor::new(t.buf().clone(), DType::F64, &[2, 3]).err(),
                "f64 [2, 3] needs 48 bytes, not 24",
            ),
            (
                HostTensor::within(t.buf().clone(), 8, DType::I32, &[5]).err(),
                "needs 20 bytes of 24",
            ),
            (
                HostTensor::within(t.buf().clone(), 2, DType::I32, &[1]).err(),
                "cannot start at byte 2",
            ),
            (HostTensor::cat(&[], 0).err(), "no tensors"),
            (HostTensor::stack(&[], 0).err(), "no tensors"),
            (
                HostTensor::stack(&[t.clone(), count(&[3, 2])], 0).err(),
                "[2, 3] and [3, 2]",
            ),
            (
                HostTensor::stack(std::slice::from_ref(&t), 4).err(),
                "no place 4 for a new dimension in [2, 3]",
            ),
            (t.reshape(&[4]).err(), "[2, 3] has 6 elements, [4] has 4"),
            (
                HostTensor::cat(&[t.clone(), count(&[2, 4])], 0).err(),
                "[2, 3] and [2, 4]",
            ),
            (
                HostTensor::cat(&[t.clone(), count(&[6])], 0).err(),
                "[2, 3] and [6]",
            ),
            (
                HostTensor::cat(&[HostTensor::scalar(1.0).unwrap()], 0).err(),
                "no dimension 0 in []",
            ),
            (
                HostTensor::cat(&[t, HostTensor::zeros(DType::F32, &[2, 3]).unwrap()], 0).err(),
                "i32 [2, 3] and f32 [2, 3] differ in dtype",
            ),
        ];
        for (i, (err, want)) in cases.into_iter().enumerate() {
            let text = err
                .unwrap_or_else(|| panic!("case {i} must be refused"))
                .to_string();
            assert!(text.contains(want), "case {i}: {text}");
        }
    }

    #[test]
    fn bits_differ_where_values_agree() {
        let (a, b) = (
            HostTensor::scalar(0.0).unwrap(),
            HostTensor::scalar(-0.0).unwrap(),
        );
        assert!(!a.same_bits(&b).unwrap() && a.same_bits(&a.clone()).unwrap());
        assert_eq!(
            (a.item().unwrap(), a.dims(), a.size_bytes()),
            (0.0, &[][..], 4)
        );
        let part = HostTensor::within(
            HostBuf::from_slice("b", &[1i32, 2, 3]).unwrap(),
            4,
            DType::I32,
            &[2],
        );
        assert_eq!(part.unwrap().to_vec::<i32>().unwrap(), [2, 3]);
    }
}
