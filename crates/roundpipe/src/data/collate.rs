//! How samples become a batch: [`Stack`] for samples of one shape, [`Pad`] for unequal lengths, or a
//! function.
//!
//! Samples are taken apart into tensors ([`Sample`]), tensors at the same place are put together
//! along a new first dimension, and the batch has the samples' structure again. Numbers become
//! tensors, texts a list.

use std::marker::PhantomData;

use roundpipe_tensor::{DType, Element, HostTensor, bf16, f16};

use super::dataset::DataError;
use crate::tree::Tree;

/// Puts samples together into a batch.
pub trait Collate<S>: Send + Sync {
    /// The batch.
    type Batch: Send;

    /// Puts samples together. There is at least one.
    ///
    /// # Errors
    /// What is wrong with them; the loader says in which batch.
    fn collate(&self, samples: Vec<S>) -> Result<Self::Batch, DataError>;
}

/// What [`Stack`] and [`Pad`] can put together: tensors, trees of tensors, numbers, vectors of
/// numbers, and pairs of these.
pub trait Sample: Sized {
    /// Samples put together.
    type Batch: Send;

    /// The sample as a tree.
    ///
    /// # Errors
    /// When there is no memory for it.
    fn into_tree(self) -> Result<Tree<HostTensor>, DataError>;

    /// A batch from the tree that the trees of samples became.
    ///
    /// # Errors
    /// When it has another structure.
    fn from_tree(batch: Tree<HostTensor>) -> Result<Self::Batch, DataError>;
}

impl Sample for HostTensor {
    type Batch = HostTensor;

    fn into_tree(self) -> Result<Tree<HostTensor>, DataError> {
        Ok(self.into())
    }

    fn from_tree(batch: Tree<HostTensor>) -> Result<HostTensor, DataError> {
        Ok(batch.tensor()?)
    }
}

impl Sample for Tree<HostTensor> {
    type Batch = Self;

    fn into_tree(self) -> Result<Self, DataError> {
        Ok(self)
    }

    fn from_tree(batch: Self) -> Result<Self, DataError> {
        Ok(batch)
    }
}

impl<A: Sample, B: Sample> Sample for (A, B) {
    type Batch = (A::Batch, B::Batch);

    fn into_tree(self) -> Result<Tree<HostTensor>, DataError> {
        Ok(Tree::list([self.0.into_tree()?, self.1.into_tree()?]))
    }

    fn from_tree(batch: Tree<HostTensor>) -> Result<Self::Batch, DataError> {
        let Tree::List(parts) = batch else {
            return Err(format!("a pair became {}", batch.kind()).into());
        };
        let [first, second] = <[_; 2]>::try_from(parts)
            .map_err(|parts| format!("a pair became a list of {}", parts.len()))?;
        Ok((A::from_tree(first)?, B::from_tree(second)?))
    }
}

/// One-dimensional sequences of numbers.
impl<T: Element> Sample for Vec<T> {
    type Batch = HostTensor;

    fn into_tree(self) -> Result<Tree<HostTensor>, DataError> {
        Ok(HostTensor::from_slice(&self, &[self.len()])?.into())
    }

    fn from_tree(batch: Tree<HostTensor>) -> Result<HostTensor, DataError> {
        Ok(batch.tensor()?)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Sample for $number {
            type Batch = HostTensor;

            fn into_tree(self) -> Result<Tree<HostTensor>, DataError> {
                Ok(HostTensor::from_slice(&[self], &[])?.into())
            }

            fn from_tree(batch: Tree<HostTensor>) -> Result<HostTensor, DataError> {
                Ok(batch.tensor()?)
            }
        }
    )*};
}

numbers!(f64, f32, bf16, f16, i64, i32, u32, u8);

impl Sample for bool {
    type Batch = HostTensor;

    fn into_tree(self) -> Result<Tree<HostTensor>, DataError> {
        Ok(HostTensor::from_bools(&[self], &[])?.into())
    }

    fn from_tree(batch: Tree<HostTensor>) -> Result<HostTensor, DataError> {
        Ok(batch.tensor()?)
    }
}

/// Samples of one shape, along a new first dimension.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stack;

impl<S: Sample> Collate<S> for Stack {
    type Batch = S::Batch;

    fn collate(&self, samples: Vec<S>) -> Result<S::Batch, DataError> {
        S::from_tree(together(
            trees(samples)?,
            "sample",
            &mut |tensors, path| stack(&tensors, path),
        )?)
    }
}

fn stack(tensors: &[HostTensor], path: &str) -> Result<HostTensor, DataError> {
    let first = &tensors[0];
    let odd = tensors
        .iter()
        .find(|t| t.shape() != first.shape() || t.dtype() != first.dtype());
    if let Some(odd) = odd {
        let what = format!(
            "{path} is {} {} in one sample and {} {} in another; use `Pad` for unequal lengths",
            first.dtype(),
            first.shape(),
            odd.dtype(),
            odd.shape()
        );
        return Err(what.into());
    }
    Ok(HostTensor::stack(tensors, 0)?)
}

/// Samples of unequal length: each tensor is padded along one dimension to the longest of the
/// batch, then stacked. Numbers are stacked as they are.
///
/// ```
/// use roundpipe::data::{Collate, Pad};
///
/// # fn main() -> Result<(), roundpipe::data::DataError> {
/// // Tokens are padded with 0, labels with the -100 that a cross entropy ignores.
/// let pad = Pad::new(0.0).leaf(1, -100.0);
/// let samples = vec![(vec![5i64, 6, 7], vec![6i64, 7, 2]), (vec![8], vec![2])];
/// let (tokens, labels) = pad.collate(samples)?;
/// assert_eq!(tokens.to_vec::<i64>()?, [5, 6, 7, 8, 0, 0]);
/// assert_eq!(labels.to_vec::<i64>()?, [6, 7, 2, 2, -100, -100]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Pad {
    value: f64,
    leaves: Vec<(usize, f64)>,
    names: Vec<(String, f64)>,
    dim: isize,
    multiple: usize,
    left: bool,
}

impl Pad {
    /// Pads with `value` at the end of the samples' first dimension.
    pub fn new(value: f64) -> Self {
        Self {
            value,
            leaves: Vec::new(),
            names: Vec::new(),
            dim: 0,
            multiple: 1,
            left: false,
        }
    }

    /// Pads one tensor with another value, by its number: of a pair, 0 or 1; of a tree, in the
    /// order of [`Tree::leaves`].
    #[must_use]
    pub fn leaf(mut self, number: usize, value: f64) -> Self {
        self.leaves.push((number, value));
        self
    }

    /// Pads the tensors that a map has under `name` with another value.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>, value: f64) -> Self {
        self.names.push((name.into(), value));
        self
    }

    /// Pads along another dimension of a sample; negative ones count from the end.
    #[must_use]
    pub fn dim(mut self, dim: isize) -> Self {
        self.dim = dim;
        self
    }

    /// Pads to a multiple of `size`. An engine plans each shape of input anew, so fewer lengths
    /// make fewer plans.
    #[must_use]
    pub fn multiple_of(mut self, size: usize) -> Self {
        self.multiple = size;
        self
    }

    /// Pads in front of the values instead of behind them.
    #[must_use]
    pub fn left(mut self) -> Self {
        self.left = true;
        self
    }

    fn value_of(&self, number: usize, path: &str) -> f64 {
        let by_number = self.leaves.iter().rev().find(|(leaf, _)| *leaf == number);
        if let Some((_, value)) = by_number {
            return *value;
        }
        let is_below = |name: &str| path.split(['.', '[', ']']).any(|key| key == name);
        let by_name = self.names.iter().rev().find(|(name, _)| is_below(name));
        by_name.map_or(self.value, |(_, value)| *value)
    }

    fn pad(
        &self,
        tensors: Vec<HostTensor>,
        value: f64,
        path: &str,
    ) -> Result<HostTensor, DataError> {
        if tensors[0].dims().is_empty() {
            return stack(&tensors, path);
        }
        let mut longest = 0;
        for tensor in &tensors {
            let axis = axis_of(tensor, self.dim, path)?;
            longest = longest.max(tensor.dims()[axis]);
        }
        let size = longest
            .checked_next_multiple_of(self.multiple)
            .ok_or("multiple_of: 0 is no size; use 1 or more")?;
        let padded = tensors
            .iter()
            .map(|tensor| self.pad_one(tensor, size, value, path))
            .collect::<Result<Vec<_>, _>>()?;
        stack(&padded, path)
    }

    fn pad_one(
        &self,
        tensor: &HostTensor,
        size: usize,
        value: f64,
        path: &str,
    ) -> Result<HostTensor, DataError> {
        let axis = axis_of(tensor, self.dim, path)?;
        let mut dims = tensor.dims().to_vec();
        dims[axis] = size - dims[axis];
        if dims[axis] == 0 {
            return Ok(tensor.clone());
        }
        let filler = HostTensor::full(tensor.dtype(), &dims, value)?;
        // A byte cannot be -100; a float may round.
        if !tensor.dtype().is_float() && filler.numel() > 0 && filler.max()? != value {
            let what = format!("{path} is {}, which cannot hold {value}", tensor.dtype());
            return Err(what.into());
        }
        let parts = if self.left {
            [filler, tensor.clone()]
        } else {
            [tensor.clone(), filler]
        };
        Ok(HostTensor::cat(&parts, axis as isize)?)
    }
}

fn axis_of(tensor: &HostTensor, dim: isize, path: &str) -> Result<usize, DataError> {
    let axis = tensor.shape().axis("pad", dim);
    axis.map_err(|error| format!("{path}: {error}").into())
}

impl<S: Sample> Collate<S> for Pad {
    type Batch = S::Batch;

    fn collate(&self, samples: Vec<S>) -> Result<S::Batch, DataError> {
        let mut number = 0;
        let batch = together(trees(samples)?, "sample", &mut |tensors, path| {
            let value = self.value_of(number, path);
            number += 1;
            self.pad(tensors, value, path)
        })?;
        S::from_tree(batch)
    }
}

/// A function as a [`Collate`]; [`Loader::collate_with`](super::Loader::collate_with) makes it.
pub struct CollateFn<F, S> {
    function: F,
    samples: PhantomData<fn(S)>,
}

impl<F, S> CollateFn<F, S> {
    pub(super) fn new(function: F) -> Self {
        Self {
            function,
            samples: PhantomData,
        }
    }
}

impl<S, B, F> Collate<S> for CollateFn<F, S>
where
    B: Send,
    F: Fn(Vec<S>) -> Result<B, DataError> + Send + Sync,
{
    type Batch = B;

    fn collate(&self, samples: Vec<S>) -> Result<B, DataError> {
        (self.function)(samples)
    }
}

fn trees<S: Sample>(samples: Vec<S>) -> Result<Vec<Tree<HostTensor>>, DataError> {
    samples.into_iter().map(Sample::into_tree).collect()
}

/// One tree of several that nest alike, with `join` of the tensors at each place, in the order of
/// [`Tree::leaves`].
fn together(
    samples: Vec<Tree<HostTensor>>,
    path: &str,
    join: &mut impl FnMut(Vec<HostTensor>, &str) -> Result<HostTensor, DataError>,
) -> Result<Tree<HostTensor>, DataError> {
    let mut rest = samples.iter();
    let Some(first) = rest.next() else {
        return Err("a batch without samples".into());
    };
    if let Some(odd) = rest.find(|sample| !first.same_structure(sample)) {
        let what = format!(
            "{path} is {} in one sample and {} in another, or their keys differ",
            first.kind(),
            odd.kind()
        );
        return Err(what.into());
    }
    match first {
        Tree::None => Ok(Tree::None),
        Tree::Tensor(_) => {
            let tensors = samples.into_iter().flat_map(Tree::into_leaves).collect();
            Ok(join(tensors, path)?.into())
        }
        Tree::Bool(_) => numbers_of(&samples, DType::Bool),
        Tree::Int(_) => numbers_of(&samples, DType::I64),
        Tree::Float(_) => numbers_of(&samples, DType::F64),
        Tree::Text(_) => Ok(Tree::List(samples)),
        Tree::List(items) => {
            let places = 0..items.len();
            let items = places.map(|i| {
                let column = samples.iter().map(|sample| item(sample, i)).collect();
                together(column, &format!("{path}[{i}]"), join)
            });
            Ok(Tree::List(items.collect::<Result<_, _>>()?))
        }
        Tree::Map(items) => {
            let mut batch = std::collections::BTreeMap::new();
            for name in items.keys() {
                let column = samples.iter().map(|sample| entry(sample, name)).collect();
                let entry = together(column, &format!("{path}.{name}"), join)?;
                batch.insert(name.clone(), entry);
            }
            Ok(Tree::Map(batch))
        }
    }
}

fn item(sample: &Tree<HostTensor>, index: usize) -> Tree<HostTensor> {
    match sample {
        Tree::List(items) => items[index].clone(),
        _ => unreachable!("the structure was compared"),
    }
}

fn entry(sample: &Tree<HostTensor>, name: &str) -> Tree<HostTensor> {
    match sample {
        Tree::Map(items) => items[name].clone(),
        _ => unreachable!("the structure was compared"),
    }
}

/// Plain numbers of samples as one tensor.
fn numbers_of(samples: &[Tree<HostTensor>], dtype: DType) -> Result<Tree<HostTensor>, DataError> {
    let count = [samples.len()];
    let tensor = match dtype {
        // Through f64, an i64 would lose bits.
        DType::I64 => {
            let value = |sample: &Tree<HostTensor>| match sample {
                Tree::Int(value) => *value,
                _ => unreachable!("the structure was compared"),
            };
            HostTensor::from_slice(&samples.iter().map(value).collect::<Vec<i64>>(), &count)?
        }
        _ => {
            let value = |sample: &Tree<HostTensor>| match sample {
                Tree::Bool(value) => f64::from(u8::from(*value)),
                Tree::Float(value) => *value,
                _ => unreachable!("the structure was compared"),
            };
            let values: Vec<f64> = samples.iter().map(value).collect();
            HostTensor::from_f64s(&values, dtype, &count)?
        }
    };
    Ok(tensor.into())
}
