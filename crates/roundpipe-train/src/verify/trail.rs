//! All that a run leaves, and how two of them differ.

use std::collections::BTreeMap;

use roundpipe::{DType, HostTensor};
use serde::Serialize;

use crate::error::Result;

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Of a step.
    Losses,
    /// Of the last step.
    Gradients,
    /// Behind the last step, as layers read them.
    Weights,
    /// The optimizer's own copies.
    Masters,
    /// The optimizer's moments.
    Moments,
    /// Sizes of memory.
    Bytes,
    /// Copies and kernels whose order was checked.
    Accesses,
}

impl Kind {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Losses => "losses",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
            Self::Masters => "masters",
            Self::Moments => "moments",
            Self::Bytes => "sizes",
            Self::Accesses => "copies and kernels",
        }
    }
}

/// How many values of a kind were compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Counted {
    /// What they are.
    pub kind: Kind,
    /// How many.
    pub values: u64,
    /// How many of them differ.
    pub differ: u64,
}

/// What a run leaves, by kind and name.
#[derive(Debug, Default)]
pub(super) struct Trail {
    pub losses: Vec<f64>,
    pub tensors: Vec<(Kind, String, HostTensor)>,
}

impl Trail {
    /// The same without some kinds, for a run that does not have them.
    pub fn without(mut self, kinds: &[Kind]) -> Self {
        self.tensors.retain(|(kind, ..)| !kinds.contains(kind));
        self
    }

    /// Compares bits. The first name that differs is for people.
    pub fn compare(&self, other: &Self) -> Result<(Vec<Counted>, Option<String>)> {
        let mut found = Findings::default();
        let losses = self.losses.len().max(other.losses.len());
        for step in 0..losses {
            let bits = |trail: &Self| trail.losses.get(step).map(|loss| loss.to_bits());
            let differs = bits(self) != bits(other);
            let what = || format!("the loss of step {}", step + 1);
            found.count(Kind::Losses, 1, u64::from(differs), what);
        }
        let mut theirs: BTreeMap<_, Vec<&HostTensor>> = BTreeMap::new();
        for (kind, name, tensor) in &other.tensors {
            theirs.entry((*kind, name)).or_default().push(tensor);
        }
        // A parameter may have several moments, which have its name: they go by their order.
        for (kind, name, tensor) in &self.tensors {
            let values = tensor.numel() as u64;
            let same = theirs.get_mut(&(*kind, name)).filter(|all| !all.is_empty());
            let differ = match same {
                Some(all) => different_values(tensor, all.remove(0))?,
                None => values,
            };
            found.count(*kind, values, differ, || {
                format!("{} of {name}", kind.name())
            });
        }
        for ((kind, name), tensors) in theirs {
            for tensor in tensors {
                let values = tensor.numel() as u64;
                found.count(kind, values, values, || {
                    let kind = kind.name();
                    format!("{kind} of {name}, which one run has and the other does not")
                });
            }
        }
        Ok((found.counted, found.first))
    }

    /// The gradients, one after another, in f64.
    pub fn gradients(&self) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for (kind, _, tensor) in &self.tensors {
            if *kind == Kind::Gradients {
                all.extend(tensor.to_f64_vec()?);
            }
        }
        Ok(all)
    }
}

#[derive(Default)]
struct Findings {
    counted: Vec<Counted>,
    first: Option<String>,
}

impl Findings {
    fn count(&mut self, kind: Kind, values: u64, differ: u64, what: impl Fn() -> String) {
        if differ > 0 && self.first.is_none() {
            self.first = Some(format!("first in {}", what()));
        }
        match self.counted.iter_mut().find(|counted| counted.kind == kind) {
            Some(counted) => {
                counted.values += values;
                counted.differ += differ;
            }
            None => self.counted.push(Counted {
                kind,
                values,
                differ,
            }),
        }
    }
}

/// How many values of two tensors have other bits; all where types or sizes differ.
fn different_values(one: &HostTensor, other: &HostTensor) -> Result<u64> {
    if one.dtype() != other.dtype() || one.dims() != other.dims() {
        return Ok(one.numel() as u64);
    }
    let size = one.dtype().size();
    let (one, other) = (one.read()?, other.read()?);
    let pairs = one.bytes().chunks(size).zip(other.bytes().chunks(size));
    Ok(pairs.filter(|(one, other)| one != other).count() as u64)
}

/// The norm of a difference beside the norm of what it is a difference from.
pub(super) fn relative_difference(values: &[f64], reference: &[f64]) -> f64 {
    if values.len() != reference.len() || values.is_empty() {
        return f64::INFINITY;
    }
    let square = |sum: f64, x: f64| sum + x * x;
    let pairs = values.iter().zip(reference);
    let difference = pairs.map(|(value, reference)| value - reference);
    let difference = difference.fold(0.0, square).sqrt();
    let norm = reference.iter().copied().fold(0.0, square).sqrt();
    match difference / norm {
        share if share.is_finite() => share,
        // Two runs of nothing but zeros agree; anything else beside zeros or NaN does not.
        _ if difference == 0.0 => 0.0,
        _ => f64::INFINITY,
    }
}

/// A copy of a tensor that later runs cannot change.
pub(super) fn copy_of(
    data: &roundpipe::HostBuf,
    dtype: DType,
    dims: &[usize],
) -> Result<HostTensor> {
    let copy = HostTensor::zeros(dtype, dims)?;
    let source = data.read_all()?;
    copy.write()?.bytes().copy_from_slice(source.bytes());
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trail(losses: &[f64], weights: &[f32]) -> Trail {
        let tensor = HostTensor::from_slice(weights, &[weights.len()]).unwrap();
        Trail {
            losses: losses.to_vec(),
            tensors: vec![(Kind::Weights, "w".into(), tensor)],
        }
    }

    /// Bits count, not values: 0 and -0 differ, NaN and the same NaN do not.
    #[test]
    fn bits_are_compared_and_counted() {
        let one = trail(&[1.0, f64::NAN], &[0.0, 1.0, f32::NAN]);
        let (counted, first) = one
            .compare(&trail(&[1.0, f64::NAN], &[0.0, 1.0, f32::NAN]))
            .unwrap();
        let sums: Vec<(u64, u64)> = counted.iter().map(|c| (c.values, c.differ)).collect();
        assert_eq!((sums, first), (vec![(2, 0), (3, 0)], None));
        let (counted, first) = one.compare(&trail(&[1.0], &[-0.0, 1.0, 2.0])).unwrap();
        let sums: Vec<(u64, u64)> = counted.iter().map(|c| (c.values, c.differ)).collect();
        assert_eq!(sums, [(2, 1), (3, 2)]);
        assert_eq!(first.as_deref(), Some("first in the loss of step 2"));
    }

    /// What only one of them has counts as different, whichever it is.
    #[test]
    fn nothing_that_is_missing_agrees() {
        let (full, none) = (trail(&[], &[1.0, 2.0]), Trail::default());
        for (one, other) in [(&full, &none), (&none, &full)] {
            let (counted, first) = one.compare(other).unwrap();
            assert_eq!((counted[0].values, counted[0].differ), (2, 2));
            assert!(first.is_some());
        }
    }

    #[test]
    fn differences_are_relative_and_never_hide() {
        assert_eq!(relative_difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_difference(&[0.0, 4.0], &[0.0, 5.0]), 0.2);
        assert_eq!(relative_difference(&[0.0], &[0.0]), 0.0);
        for (values, reference) in [(&[1.0][..], &[0.0][..]), (&[f64::NAN], &[1.0]), (&[], &[])] {
            assert_eq!(relative_difference(values, reference), f64::INFINITY);
        }
    }
}
