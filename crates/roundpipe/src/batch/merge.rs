//! Merging: check that the microbatches' outputs nest alike, then put each tensor together by its
//! rule.

use roundpipe_tensor::{HostTensor, Shape};

use super::{Merge, MergeOutput, spread};
use crate::error::{Error, Result};
use crate::tree::{Tree, keys};

const NAME: &str = "merge_output";
/// The call that gradients are given to.
const BACKWARD: &str = "backward";
const ROOT: &str = "outputs";

/// Puts the outputs of microbatches, in their order, together.
///
/// # Errors
/// [`Error::Config`] naming the place, like `outputs.loss[1]`, when the outputs do not go together
/// or the spec does not fit them; what a reducer or a function reports; always for
/// [`MergeOutput::Off`].
pub fn merge(parts: Vec<Tree<HostTensor>>, how: &MergeOutput) -> Result<Tree<HostTensor>> {
    let Some(first) = parts.first() else {
        return Err(Error::config(NAME, "there are no microbatches to merge"));
    };
    let rules: Vec<Option<&Merge>> = match how {
        MergeOutput::Off => return Err(Error::config(NAME, "outputs are to stay unmerged")),
        MergeOutput::Function(f) => return f(parts),
        MergeOutput::Auto => vec![None; first.leaves().len()],
        MergeOutput::Spec(spec) => spread(NAME, ROOT, first, spec)?
            .into_iter()
            .map(|ruled| Some(ruled.rule))
            .collect(),
    };
    for (m, part) in parts.iter().enumerate().skip(1) {
        agree(first, part, ROOT, m)?;
    }
    let paths = first.paths(ROOT);
    let columns: Vec<Vec<&HostTensor>> = parts.iter().map(Tree::leaves).collect();
    let merged = rules
        .into_iter()
        .zip(paths)
        .enumerate()
        .map(|(i, (rule, path))| {
            let column: Vec<_> = columns.iter().map(|leaves| leaves[i].clone()).collect();
            let auto = auto_rule(&column[0]);
            merge_leaf(&column, rule.unwrap_or(&auto), &path)
        });
    let merged = merged.collect::<Result<Vec<_>>>()?;
    Ok(first.with_leaves(merged)?)
}

/// Gradients of the microbatches' outputs from those of the merged output: the inverse of [`merge`]
/// for tensors that were concatenated or averaged. `shapes` has the shapes of each microbatch's
/// output leaves; the result has the gradients in the same order. A missing gradient is missing for
/// every microbatch.
///
/// # Errors
/// [`Error::Config`] when a gradient has not its output's shape, or belongs to an output that was
/// merged in a way that has no inverse.
pub fn split_grads(
    grad: &Tree<Option<HostTensor>>,
    shapes: &[Vec<Shape>],
    how: &MergeOutput,
) -> Result<Vec<Vec<Option<HostTensor>>>> {
    let leaves = grad.leaves();
    let rules: Vec<Option<&Merge>> = match how {
        MergeOutput::Off => {
            return Err(Error::config(
                NAME,
                "outputs are unmerged; so must their gradients be",
            ));
        }
        MergeOutput::Function(_) => return Err(no_inverse("a function", ROOT)),
        MergeOutput::Auto => vec![None; leaves.len()],
        MergeOutput::Spec(spec) => spread(NAME, ROOT, grad, spec)?
            .into_iter()
            .map(|ruled| Some(ruled.rule))
            .collect(),
    };
    let mut parts = Vec::new();
    for shapes in shapes {
        if shapes.len() != leaves.len() {
            let what = format!("{} gradients for {} outputs", leaves.len(), shapes.len());
            return Err(Error::config(BACKWARD, what));
        }
        parts.push(Vec::with_capacity(leaves.len()));
    }
    for (i, ((rule, leaf), path)) in rules
        .into_iter()
        .zip(leaves)
        .zip(grad.paths(ROOT))
        .enumerate()
    {
        let column: Vec<_> = shapes.iter().map(|shapes| shapes[i]).collect();
        let grads = match leaf {
            Some(grad) => split_leaf(grad, &column, rule, &path)?
                .into_iter()
                .map(Some)
                .collect(),
            None => vec![None; shapes.len()],
        };
        for (part, grad) in parts.iter_mut().zip(grads) {
            part.push(grad);
        }
    }
    Ok(parts)
}

/// Refuses outputs of microbatch `m` that do not nest like those of microbatch 0 or have other
/// plain values.
fn agree(first: &Tree<HostTensor>, other: &Tree<HostTensor>, path: &str, m: usize) -> Result<()> {
    let differ = |a: String, b: String| {
        let what = format!("{path} is {a} in microbatch 0 and {b} in microbatch {m}");
        Err(Error::config(NAME, what))
    };
    match (first, other) {
        (Tree::List(a), Tree::List(b)) if a.len() == b.len() => {
            let mut pairs = a.iter().zip(b).enumerate();
            pairs.try_for_each(|(i, (a, b))| agree(a, b, &format!("{path}[{i}]"), m))
        }
        (Tree::Map(a), Tree::Map(b)) => {
            if !a.keys().eq(b.keys()) {
                let what = format!(
                    "in {path} of microbatch 0 there {}, of microbatch {m} there {}",
                    keys(a),
                    keys(b)
                );
                return Err(Error::config(NAME, what));
            }
            let mut pairs = a.iter().zip(b.values());
            pairs.try_for_each(|((key, a), b)| agree(a, b, &format!("{path}.{key}"), m))
        }
        (Tree::Tensor(_), Tree::Tensor(_)) | (Tree::None, Tree::None) => Ok(()),
        (Tree::Bool(a), Tree::Bool(b)) if a == b => Ok(()),
        (Tree::Bool(a), Tree::Bool(b)) => differ(a.to_string(), b.to_string()),
        (Tree::Int(a), Tree::Int(b)) if a == b => Ok(()),
        (Tree::Int(a), Tree::Int(b)) => differ(a.to_string(), b.to_string()),
        (Tree::Float(a), Tree::Float(b)) if a == b || (a.is_nan() && b.is_nan()) => Ok(()),
        (Tree::Float(a), Tree::Float(b)) => differ(a.to_string(), b.to_string()),
        (Tree::Text(a), Tree::Text(b)) if a == b => Ok(()),
        (Tree::Text(a), Tree::Text(b)) => differ(format!("{a:?}"), format!("{b:?}")),
        (a, b) => differ(a.kind(), b.kind()),
    }
}

/// Rule 5.
fn auto_rule(tensor: &HostTensor) -> Merge {
    match tensor.shape().rank() {
        0 if tensor.dtype().is_float() => Merge::Mean,
        0 => Merge::Equal,
        _ => Merge::Cat(0),
    }
}

fn merge_leaf(column: &[HostTensor], rule: &Merge, path: &str) -> Result<HostTensor> {
    match rule {
        Merge::Cat(dim) => HostTensor::cat(column, *dim)
            .map_err(|e| Error::config(NAME, format!("{path} cannot be concatenated: {e}"))),
        Merge::Mean => mean(column, path),
        Merge::Equal => {
            for (m, other) in column.iter().enumerate().skip(1) {
                if !column[0].same_bits(other)? {
                    let what = format!(
                        "{path} must be equal in all microbatches; {} in microbatch 0 and {} in microbatch {m} \
                         are not",
                        show(&column[0]),
                        show(other)
                    );
                    return Err(Error::config(NAME, what));
                }
            }
            Ok(column[0].clone())
        }
        Merge::Reduce { init, f } => column
            .iter()
            .try_fold(init.clone(), |sum, next| f(sum, next.clone())),
    }
}

fn mean(column: &[HostTensor], path: &str) -> Result<HostTensor> {
    let first = &column[0];
    if !first.dtype().is_float() {
        return Err(Error::config(
            NAME,
            format!("{path} is {}; only floats have a mean", show(first)),
        ));
    }
    let mut same = true;
    let mut sums = first.to_f64_vec()?;
    for (m, other) in column.iter().enumerate().skip(1) {
        if (other.dtype(), other.shape()) != (first.dtype(), first.shape()) {
            let what = format!(
                "{path} is {} in microbatch 0 and {} in microbatch {m}",
                show(first),
                show(other)
            );
            return Err(Error::config(NAME, what));
        }
        same &= first.same_bits(other)?;
        sums.iter_mut()
            .zip(other.to_f64_vec()?)
            .for_each(|(sum, x)| *sum += x);
    }
    if same {
        // The mean of equal values is that value; in f64 the sum could round.
        return Ok(first.clone());
    }
    let count = column.len() as f64;
    sums.iter_mut().for_each(|sum| *sum /= count);
    Ok(HostTensor::from_f64s(&sums, first.dtype(), first.dims())?)
}

fn split_leaf(
    grad: &HostTensor,
    shapes: &[Shape],
    rule: Option<&Merge>,
    path: &str,
) -> Result<Vec<HostTensor>> {
    let Some(first) = shapes.first() else {
        return Ok(Vec::new());
    };
    let fits = |want: Shape| {
        if *grad.shape() == want {
            return Ok(());
        }
        let what = format!(
            "the gradient of {path} must have its shape {want}, not {}",
            grad.shape()
        );
        Err(Error::config(BACKWARD, what))
    };
    let alike = |check: &dyn Fn(&Shape) -> bool| match shapes.iter().find(|shape| !check(shape)) {
        None => Ok(()),
        Some(shape) => {
            let what = format!("{path} is {first} in one microbatch and {shape} in another");
            Err(Error::config(NAME, what))
        }
    };
    match rule {
        None if first.rank() == 0 => split_leaf(grad, shapes, Some(&Merge::Mean), path),
        None => split_leaf(grad, shapes, Some(&Merge::Cat(0)), path),
        Some(Merge::Cat(dim)) => {
            let axis = first.axis(NAME, *dim)?;
            let others = |shape: &Shape| shape.with(NAME, axis, 0).ok();
            alike(&|shape| shape.rank() == first.rank() && others(shape) == others(first))?;
            fits(first.with(NAME, axis, shapes.iter().map(|shape| shape[axis]).sum())?)?;
            let mut at = 0;
            let cut = shapes.iter().map(|shape| {
                at += shape[axis];
                Ok(grad.narrow(*dim, at - shape[axis], shape[axis])?)
            });
            cut.collect()
        }
        Some(Merge::Mean) => {
            alike(&|shape| shape == first)?;
            fits(*first)?;
            let count = shapes.len() as f64;
            let each: Vec<_> = grad.to_f64_vec()?.into_iter().map(|x| x / count).collect();
            let each = HostTensor::from_f64s(&each, grad.dtype(), grad.dims())?;
            Ok(vec![each; shapes.len()])
        }
        Some(Merge::Equal) => Err(no_inverse("`Equal`", path)),
        Some(Merge::Reduce { .. }) => Err(no_inverse("a reducer", path)),
    }
}

fn no_inverse(by: &str, path: &str) -> Error {
    let what = format!(
        "{path} was merged by {by}, through which no gradient goes back; use unmerged outputs (`MergeOutput::Off`)"
    );
    Error::config(NAME, what)
}

/// A tensor in an error: its value when it is a single one, else its type and shape.
fn show(tensor: &HostTensor) -> String {
    match tensor.item() {
        Ok(value) => format!("{} {value}", tensor.dtype()),
        Err(_) => format!("{} {}", tensor.dtype(), tensor.shape()),
    }
}
