//! What a person asks of host tensors after an evaluation: sums, means, extremes, accuracies.
//!
//! These walk host memory once, on the caller's thread. They are for outputs and labels of a batch,
//! not for training: what a model computes runs on a worker, through [`Cx`](crate::Cx).
//!
//! # Invariants
//! - Results do not depend on the machine: sums run in the order of the elements, in f64, and of
//!   integers exactly, rounded once.
//! - Values are compared in their own type, so large i64 stay distinct. A NaN is larger than any
//!   number for `argmax`, `max` and top-k, and smaller for `argmin` and `min`: it is never hidden.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use half::{bf16, f16};

use super::HostTensor;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// Runs `$body` with the elements of `$tensor` as `$values`, a slice of their own type.
macro_rules! with_values {
    ($tensor:expr, $values:ident => $body:expr) => {{
        let guard = $tensor.read()?;
        match $tensor.dtype() {
            DType::F64 => {
                let $values = guard.as_slice::<f64>();
                $body
            }
            DType::F32 => {
                let $values = guard.as_slice::<f32>();
                $body
            }
            DType::BF16 => {
                let $values = guard.as_slice::<bf16>();
                $body
            }
            DType::F16 => {
                let $values = guard.as_slice::<f16>();
                $body
            }
            DType::I64 => {
                let $values = guard.as_slice::<i64>();
                $body
            }
            DType::I32 => {
                let $values = guard.as_slice::<i32>();
                $body
            }
            DType::U32 => {
                let $values = guard.as_slice::<u32>();
                $body
            }
            DType::U8 | DType::Bool => {
                let $values = guard.as_slice::<u8>();
                $body
            }
        }
    }};
}

/// How many predictions were right, of how many that count. Those of batches are added up.
///
/// ```
/// # use roundpipe_tensor::HostTensor;
/// # fn main() -> roundpipe_tensor::Result<()> {
/// let logits = HostTensor::from_slice(&[0.1f32, 0.9, 0.8, 0.2], &[2, 2])?;
/// let labels = HostTensor::from_slice(&[1i64, 1], &[2])?;
/// let mut all = logits.hits(&labels, 1)?;
/// all += logits.hits(&labels, 1)?;
/// assert_eq!((all.right, all.counted, all.share()), (2, 4, Some(0.5)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hits {
    /// Predictions that were right.
    pub right: usize,
    /// Predictions that count.
    pub counted: usize,
}

impl Hits {
    /// The share that was right, 0 to 1; `None` when none counts.
    pub fn share(&self) -> Option<f64> {
        (self.counted > 0).then(|| self.right as f64 / self.counted as f64)
    }
}

impl Add for Hits {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            right: self.right + other.right,
            counted: self.counted + other.counted,
        }
    }
}

impl AddAssign for Hits {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Hits {
    fn sum<I: Iterator<Item = Self>>(hits: I) -> Self {
        hits.fold(Self::default(), Add::add)
    }
}

impl HostTensor {
    /// The sum of all elements.
    ///
    /// # Errors
    /// While the tensor is being written.
    pub fn sum(&self) -> Result<f64> {
        if self.dtype().is_float() {
            return Ok(with_values!(self, values => values.iter().map(|x| x.to_f64()).sum()));
        }
        let exact: i128 = self.integers()?.into_iter().map(i128::from).sum();
        Ok(exact as f64)
    }

    /// The mean of all elements.
    ///
    /// # Errors
    /// When there are none, or while the tensor is being written.
    pub fn mean(&self) -> Result<f64> {
        self.nonempty("mean")?;
        Ok(self.sum()? / self.numel() as f64)
    }

    /// The largest element; NaN if one is.
    ///
    /// # Errors
    /// When there are none, or while the tensor is being written.
    pub fn max(&self) -> Result<f64> {
        self.nonempty("max")?;
        Ok(with_values!(self, values => values[extreme(values.iter(), true)].to_f64()))
    }

    /// The smallest element; NaN if one is.
    ///
    /// # Errors
    /// When there are none, or while the tensor is being written.
    pub fn min(&self) -> Result<f64> {
        self.nonempty("min")?;
        Ok(with_values!(self, values => values[extreme(values.iter(), false)].to_f64()))
    }

    /// The index of the first largest value along `dim` (-1 is the last), as i64, without that
    /// dimension; the first NaN if there is one. As [`Cx::argmax`](crate::Cx::argmax).
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such dimension or it is empty.
    pub fn argmax(&self, dim: isize) -> Result<Self> {
        self.arg("argmax", dim, true)
    }

    /// The index of the first smallest value along `dim`, as [`HostTensor::argmax`].
    ///
    /// # Errors
    /// As [`HostTensor::argmax`].
    pub fn argmin(&self, dim: isize) -> Result<Self> {
        self.arg("argmin", dim, false)
    }

    fn arg(&self, op: &'static str, dim: isize, largest: bool) -> Result<Self> {
        let axis = self.shape().axis(op, dim)?;
        let size = self.dims()[axis];
        if size == 0 {
            let what = format!("dimension {axis} of {} is empty", self.shape());
            return Err(Error::invalid(op, what));
        }
        let inner: usize = self.dims()[axis + 1..].iter().product();
        let kept = [&self.dims()[..axis], &self.dims()[axis + 1..]].concat();
        let count: usize = kept.iter().product();
        let found: Vec<i64> = with_values!(self, values => (0..count)
            .map(|line| {
                let start = line / inner * size * inner + line % inner;
                let along = values[start..].iter().step_by(inner).take(size);
                extreme(along, largest) as i64
            })
            .collect());
        Self::from_slice(&found, &kept)
    }

    /// How many elements equal those of `other` at the same places. Whole numbers of any two types
    /// are compared exactly, others as f64; a NaN equals nothing.
    ///
    /// # Errors
    /// [`Error::Shape`] when the shapes differ.
    pub fn count_equal(&self, other: &Self) -> Result<usize> {
        self.same_shape("count_equal", other)?;
        if !self.dtype().is_float() && !other.dtype().is_float() {
            return Ok(equal(&self.integers()?, &other.integers()?));
        }
        Ok(equal(&self.to_f64_vec()?, &other.to_f64_vec()?))
    }

    /// How many rows of scores have their label among the `k` largest. The scores are
    /// `[.., classes]`, the labels `[..]`; rows with a negative label (such as the -100 that
    /// [`Cx::cross_entropy`](crate::Cx::cross_entropy) ignores) do not count. Of equal scores the
    /// first is the larger.
    ///
    /// # Errors
    /// [`Error::Invalid`] when labels are no whole numbers, name no class or do not fit the scores,
    /// or `k` is 0.
    pub fn hits(&self, labels: &Self, k: usize) -> Result<Hits> {
        const OP: &str = "hits";
        let Some((&classes, rows)) = self.dims().split_last() else {
            return Err(Error::invalid(OP, "scores without dimensions"));
        };
        if labels.dtype().is_float() || labels.dims() != rows {
            let what = format!(
                "labels {} {} for scores {}; they are whole numbers of the shape {rows:?}",
                labels.dtype(),
                labels.shape(),
                self.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        if k == 0 {
            return Err(Error::invalid(OP, "k is 0; no label is among no scores"));
        }
        let labels = labels.integers()?;
        if let Some(label) = labels.iter().find(|label| **label >= classes as i64) {
            let what = format!("there is a label {label}, but {classes} classes");
            return Err(Error::invalid(OP, what));
        }
        let mut hits = Hits::default();
        with_values!(self, values => {
            for (row, label) in labels.iter().enumerate() {
                let Ok(label) = usize::try_from(*label) else {
                    continue;
                };
                let scores = &values[row * classes..(row + 1) * classes];
                hits.counted += 1;
                hits.right += usize::from(rank(scores, label) < k);
            }
        });
        Ok(hits)
    }

    /// The share of rows whose largest score is their label's: [`HostTensor::hits`] of one batch.
    ///
    /// # Errors
    /// As [`HostTensor::hits`], and when no row counts.
    pub fn accuracy(&self, labels: &Self) -> Result<f64> {
        self.topk_accuracy(labels, 1)
    }

    /// The share of rows whose label is among the `k` largest scores.
    ///
    /// # Errors
    /// As [`HostTensor::accuracy`].
    pub fn topk_accuracy(&self, labels: &Self, k: usize) -> Result<f64> {
        let share = self.hits(labels, k)?.share();
        share.ok_or_else(|| Error::invalid("accuracy", "no label counts: all are negative"))
    }

    /// The mean of the squared differences, in f64.
    ///
    /// # Errors
    /// [`Error::Shape`] when the shapes differ; when there are no elements.
    pub fn mean_squared_error(&self, other: &Self) -> Result<f64> {
        const OP: &str = "mean_squared_error";
        self.same_shape(OP, other)?;
        self.nonempty(OP)?;
        let squares: f64 = self.differences(other)?.map(|x| x * x).sum();
        Ok(squares / self.numel() as f64)
    }

    /// The largest difference of two elements at the same place, in f64; 0 without elements, NaN
    /// if one is.
    ///
    /// # Errors
    /// [`Error::Shape`] when the shapes differ.
    pub fn max_difference(&self, other: &Self) -> Result<f64> {
        self.same_shape("max_difference", other)?;
        let larger = |most: f64, x: f64| if above(&x, &most) { x } else { most };
        Ok(self.differences(other)?.map(f64::abs).fold(0.0, larger))
    }

    fn differences(&self, other: &Self) -> Result<impl Iterator<Item = f64>> {
        let pairs = self.to_f64_vec()?.into_iter().zip(other.to_f64_vec()?);
        Ok(pairs.map(|(a, b)| a - b))
    }

    /// The elements of a tensor of whole numbers.
    fn integers(&self) -> Result<Vec<i64>> {
        Ok(match self.dtype() {
            DType::I64 => self.to_vec()?,
            DType::I32 => self.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
            DType::U32 => self.to_vec::<u32>()?.into_iter().map(i64::from).collect(),
            DType::U8 | DType::Bool => self.to_vec::<u8>()?.into_iter().map(i64::from).collect(),
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 => {
                unreachable!("callers ask for whole numbers alone")
            }
        })
    }

    fn nonempty(&self, op: &'static str) -> Result<()> {
        if self.numel() > 0 {
            return Ok(());
        }
        Err(Error::invalid(
            op,
            format!("{} has no elements", self.shape()),
        ))
    }

    fn same_shape(&self, op: &'static str, other: &Self) -> Result<()> {
        if self.shape() == other.shape() {
            return Ok(());
        }
        Err(Error::Shape {
            op,
            left: *self.shape(),
            right: *other.shape(),
        })
    }
}

fn equal<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a == b).count()
}

/// Whether `a` stands above `b`: it is larger, or the only NaN of the two.
#[expect(clippy::eq_op, reason = "a NaN is what differs from itself")]
fn above<T: PartialOrd>(a: &T, b: &T) -> bool {
    a > b || (a != a && b == b)
}

/// The place of the first largest or smallest value; the first NaN if there is one.
#[expect(clippy::eq_op, reason = "a NaN is what differs from itself")]
fn extreme<'a, T: PartialOrd + 'a>(values: impl Iterator<Item = &'a T>, largest: bool) -> usize {
    let mut best: Option<(usize, &T)> = None;
    for (place, value) in values.enumerate() {
        let is_better = match best {
            None => true,
            Some((_, best)) if largest => above(value, best),
            Some((_, best)) => value < best || (value != value && best == best),
        };
        if is_better {
            best = Some((place, value));
        }
    }
    best.map_or(0, |(place, _)| place)
}

/// How many scores stand before that of `label`.
fn rank<T: PartialOrd>(scores: &[T], label: usize) -> usize {
    let mine = &scores[label];
    let before = |(place, score): &(usize, &T)| {
        above(*score, mine) || (*place < label && !above(mine, *score))
    };
    scores.iter().enumerate().filter(before).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Floats with a fraction that every type holds, whole numbers where there is none.
    fn of(dtype: DType, values: &[f64], dims: &[usize]) -> HostTensor {
        HostTensor::from_f64s(values, dtype, dims).unwrap()
    }

    #[test]
    fn sums_and_extremes_hold_for_every_type() {
        for dtype in DType::ALL {
            let t = of(dtype, &[1.0, 0.0, 1.0, 1.0], &[2, 2]);
            let found = (t.sum().unwrap(), t.mean().unwrap());
            assert_eq!(found, (3.0, 0.75), "{dtype}");
            assert_eq!((t.min().unwrap(), t.max().unwrap()), (0.0, 1.0), "{dtype}");
        }
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let t = of(dtype, &[-1.5, 0.25, 3.0], &[3]);
            assert_eq!(
                (t.sum().unwrap(), t.min().unwrap()),
                (1.75, -1.5),
                "{dtype}"
            );
        }
    }

    /// f64 has 53 bits: a sum or comparison in f64 would lose the last ones of an i64.
    #[test]
    fn large_whole_numbers_are_told_apart() {
        let big = 1i64 << 60;
        let t = HostTensor::from_slice(&[big, big + 1, -big, -big], &[4]).unwrap();
        assert_eq!(t.sum().unwrap(), 1.0);
        assert_eq!(t.argmax(0).unwrap().to_vec::<i64>().unwrap(), [1]);
        let other = HostTensor::from_slice(&[big, big, -big, -big], &[4]).unwrap();
        assert_eq!(t.count_equal(&other).unwrap(), 3);
    }

    #[test]
    fn argmax_goes_along_any_dimension() {
        let values = [1.0, 5.0, 2.0, 4.0, 4.0, 0.0];
        for dtype in DType::ALL.into_iter().filter(|d| *d != DType::Bool) {
            let t = of(dtype, &values, &[2, 3]);
            let along = |dim| t.argmax(dim).unwrap();
            assert_eq!(along(-1).to_vec::<i64>().unwrap(), [1, 0], "{dtype}");
            assert_eq!(along(0).to_vec::<i64>().unwrap(), [1, 0, 0], "{dtype}");
            let least = t.argmin(1).unwrap();
            assert_eq!((least.dims(), least.dtype()), (&[2][..], DType::I64));
            assert_eq!(least.to_vec::<i64>().unwrap(), [0, 2], "{dtype}");
        }
        let deep = of(
            DType::F32,
            &[0.0, 1.0, 3.0, 2.0, 9.0, 8.0, 7.0, 9.0],
            &[2, 2, 2],
        );
        assert_eq!(
            deep.argmax(1).unwrap().to_vec::<i64>().unwrap(),
            [1, 1, 0, 1]
        );
        let empty = of(DType::F32, &[], &[0, 3]);
        assert_eq!(empty.argmax(1).unwrap().dims(), [0]);
    }

    #[test]
    fn a_nan_is_shown() {
        let t = of(DType::BF16, &[1.0, f64::NAN, 2.0, f64::NAN], &[4]);
        assert!(t.max().unwrap().is_nan() && t.min().unwrap().is_nan());
        assert!(t.sum().unwrap().is_nan());
        assert_eq!(t.argmax(0).unwrap().item().unwrap(), 1.0);
        assert_eq!(t.argmin(0).unwrap().item().unwrap(), 1.0);
        assert!(t.max_difference(&t).unwrap().is_nan());
        assert_eq!(t.count_equal(&t).unwrap(), 2);
        let rows = of(DType::F32, &[1.0, f64::NAN, 2.0], &[1, 3]);
        let hit = |label: i64, k| {
            let label = HostTensor::from_slice(&[label], &[1]).unwrap();
            rows.hits(&label, k).unwrap().right
        };
        assert_eq!((hit(1, 1), hit(2, 1), hit(2, 2), hit(0, 2)), (1, 0, 1, 0));
    }

    #[test]
    fn accuracies_count_labels_that_are_not_ignored() {
        let scores = [0.1, 0.7, 0.2, 0.5, 0.5, 0.0, 0.3, 0.2, 0.9, 1.0, 0.0, 0.0];
        let labels = [1.0, 1.0, 0.0, -100.0];
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let scores = of(dtype, &scores, &[2, 2, 3]);
            for whole in [DType::I64, DType::I32] {
                let labels = of(whole, &labels, &[2, 2]);
                let hits = |k| scores.hits(&labels, k).unwrap();
                let (right, counted) = (hits(1).right, hits(1).counted);
                // The second row is a tie, which its first score wins.
                assert_eq!((right, counted), (1, 3), "{dtype}, {whole}");
                assert_eq!((hits(2).right, hits(3).right), (3, 3));
                assert_eq!(scores.accuracy(&labels).unwrap(), 1.0 / 3.0);
                assert_eq!(scores.topk_accuracy(&labels, 2).unwrap(), 1.0);
                let all: Hits = [hits(1), hits(2)].into_iter().sum();
                assert_eq!((all.right, all.counted), (4, 6));
            }
        }
    }

    /// The largest score is the same by both ways, ties and all.
    #[test]
    fn accuracy_is_that_of_argmax() {
        let scores: Vec<f64> = (0..40).map(|i| f64::from(i * 7 % 5)).collect();
        let labels: Vec<i64> = (0..8).map(|i| i % 5).collect();
        let scores = of(DType::F16, &scores, &[8, 5]);
        let labels = HostTensor::from_slice(&labels, &[8]).unwrap();
        let equal = scores.argmax(-1).unwrap().count_equal(&labels).unwrap();
        assert_eq!(scores.hits(&labels, 1).unwrap().right, equal);
    }

    #[test]
    fn differences_are_taken_in_f64() {
        let a = of(DType::BF16, &[1.0, 2.0, -3.0], &[3]);
        let b = of(DType::F32, &[1.5, 2.0, -1.0], &[3]);
        assert_eq!(a.mean_squared_error(&b).unwrap(), 4.25 / 3.0);
        assert_eq!(a.max_difference(&b).unwrap(), 2.0);
    }

    /// A wrong argument is one line that shows the shapes.
    #[test]
    fn wrong_arguments_are_named() {
        let scores = of(DType::F32, &[0.0; 6], &[2, 3]);
        let labels = |values: &[i64], dims: &[usize]| HostTensor::from_slice(values, dims).unwrap();
        let empty = of(DType::F32, &[], &[0]);
        let cases = [
            (empty.mean().err(), "mean: [0] has no elements"),
            (empty.max().err(), "max: [0] has no elements"),
            (empty.argmax(0).err(), "dimension 0 of [0] is empty"),
            (scores.argmax(2).err(), "no dimension 2 in [2, 3]"),
            (scores.count_equal(&empty).err(), "[2, 3] and [0]"),
            (scores.max_difference(&empty).err(), "[2, 3] and [0]"),
            (
                scores.accuracy(&labels(&[0, 1, 2], &[3])).err(),
                "labels i64 [3] for scores [2, 3]; they are whole numbers of the shape [2]",
            ),
            (
                scores.accuracy(&of(DType::F32, &[0.0; 2], &[2])).err(),
                "labels f32 [2]",
            ),
            (
                scores.accuracy(&labels(&[0, 3], &[2])).err(),
                "there is a label 3, but 3 classes",
            ),
            (scores.hits(&labels(&[0, 1], &[2]), 0).err(), "k is 0"),
            (
                scores.accuracy(&labels(&[-1, -100], &[2])).err(),
                "no label counts",
            ),
            (
                HostTensor::scalar(1.0).unwrap().accuracy(&empty).err(),
                "scores without dimensions",
            ),
        ];
        for (i, (err, want)) in cases.into_iter().enumerate() {
            let text = err.unwrap_or_else(|| panic!("case {i} must be refused"));
            assert!(text.to_string().contains(want), "case {i}: {text}");
        }
    }
}
