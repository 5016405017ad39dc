//! Samples by number: [`Dataset`], for vectors, tensors, trees of tensors and pairs.

use std::sync::Arc;

use roundpipe_tensor::HostTensor;

use crate::tree::Tree;

/// What a dataset or a collation may report: any error, so that `?` works on those of files,
/// decoders and tensors alike.
pub type DataError = Box<dyn std::error::Error + Send + Sync>;

/// Samples by number.
///
/// ```
/// use roundpipe::data::{DataError, Dataset};
///
/// /// The squares of the first numbers.
/// struct Squares(usize);
///
/// impl Dataset for Squares {
///     type Sample = f32;
///
///     fn len(&self) -> usize {
///         self.0
///     }
///
///     fn get(&self, index: usize) -> Result<f32, DataError> {
///         Ok((index * index) as f32)
///     }
/// }
/// assert_eq!(Squares(4).get(3).unwrap(), 9.0);
/// ```
pub trait Dataset: Send + Sync {
    /// One sample.
    type Sample;

    /// How many samples there are. The same at every call.
    fn len(&self) -> usize;

    /// The sample of a number below [`Dataset::len`]. Threads call it at the same time, in any
    /// order; the same number must give the same sample, or a run cannot be repeated.
    ///
    /// # Errors
    /// Whatever keeps it from giving the sample; the loader says which sample it was.
    fn get(&self, index: usize) -> Result<Self::Sample, DataError>;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks for what can never work, before the first sample of an epoch is asked for.
    ///
    /// # Errors
    /// What is wrong, in one line.
    fn check(&self) -> Result<(), DataError> {
        Ok(())
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        (**self).get(index)
    }

    fn check(&self) -> Result<(), DataError> {
        (**self).check()
    }
}

/// Samples in memory; each is cloned. A [`HostTensor`] clones without a copy.
impl<T: Clone + Send + Sync> Dataset for Vec<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        let sample = self.as_slice().get(index).cloned();
        sample.ok_or_else(|| no_sample(index, self.as_slice().len()))
    }
}

/// Samples along the first dimension, without it: of `[100, 3, 8]`, 100 of `[3, 8]`.
impl Dataset for HostTensor {
    type Sample = HostTensor;

    fn len(&self) -> usize {
        self.dims().first().copied().unwrap_or(0)
    }

    fn get(&self, index: usize) -> Result<HostTensor, DataError> {
        if index >= self.len() {
            return Err(no_sample(index, self.len()));
        }
        let row = self.narrow(0, index, 1)?;
        Ok(row.reshape(&self.dims()[1..])?)
    }

    fn check(&self) -> Result<(), DataError> {
        if self.dims().is_empty() {
            return Err("a tensor without dimensions has no samples".into());
        }
        Ok(())
    }
}

/// Samples along the first dimension of every tensor; plain values belong to each sample.
impl Dataset for Tree<HostTensor> {
    type Sample = Tree<HostTensor>;

    fn len(&self) -> usize {
        self.leaves().first().map_or(0, |leaf| Dataset::len(*leaf))
    }

    fn get(&self, index: usize) -> Result<Tree<HostTensor>, DataError> {
        self.clone().try_map(|tensor| Dataset::get(&tensor, index))
    }

    fn check(&self) -> Result<(), DataError> {
        let sizes: Vec<usize> = self.leaves().into_iter().map(Dataset::len).collect();
        for (leaf, path) in self.leaves().into_iter().zip(self.paths("data")) {
            leaf.check().map_err(|error| format!("{path}: {error}"))?;
            if Dataset::len(leaf) != sizes[0] {
                let what = format!(
                    "{path} {} has {} samples, the first tensor has {}",
                    leaf.shape(),
                    Dataset::len(leaf),
                    sizes[0]
                );
                return Err(what.into());
            }
        }
        Ok(())
    }
}

/// Samples of both at the same number, such as inputs and labels.
impl<A: Dataset, B: Dataset> Dataset for (A, B) {
    type Sample = (A::Sample, B::Sample);

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        Ok((self.0.get(index)?, self.1.get(index)?))
    }

    fn check(&self) -> Result<(), DataError> {
        self.0.check()?;
        self.1.check()?;
        let (first, second) = (self.0.len(), self.1.len());
        if first != second {
            let what = format!("{first} samples beside {second}; a pair needs as many of both");
            return Err(what.into());
        }
        Ok(())
    }
}

fn no_sample(index: usize, len: usize) -> DataError {
    format!("there is no sample {index} of {len}").into()
}
