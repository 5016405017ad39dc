//! Splitting: decide for each tensor whether and where it is cut, then cut all at the same samples.

use std::collections::BTreeMap;
use std::ops::Range;

use roundpipe_tensor::{HostTensor, Shape};

use super::{Cut, HostInputs, SplitInput, SplitLabel, flat, spread};
use crate::error::{Error, Result};
use crate::tree::{Tree, keys};

const INPUT: &str = "split_input";
const LABEL: &str = "split_label";

/// The microbatches of something.
#[derive(Debug, Clone)]
pub struct Split<T> {
    /// One for each microbatch, in order.
    pub parts: Vec<T>,
    /// How many samples were cut, when these rules did it and there was something to cut.
    pub batch: Option<usize>,
    /// The samples of each microbatch, or 1 each where nothing was cut and all get the same; `None`
    /// when a function split, which alone knows.
    pub samples: Option<Vec<usize>>,
    /// What the user should hear about; one line each.
    pub warnings: Vec<String>,
}

/// Splits inputs into `n` microbatches, or fewer when the batch is smaller.
///
/// # Errors
/// [`Error::Config`] when `n` is 0, the spec does not fit the inputs, or sizes do not go together;
/// what a split function reports.
pub fn split_inputs(inputs: &HostInputs, how: &SplitInput, n: usize) -> Result<Split<HostInputs>> {
    check_count(INPUT, n)?;
    let (leaves, exact) = match how {
        SplitInput::Function(f) => return by_function(f(inputs, n)?, n),
        SplitInput::Auto => (auto_inputs(inputs, n)?, true),
        SplitInput::Spec { args, named } => (spec_inputs(inputs, args, named)?, false),
    };
    let plan = plan(INPUT, &leaves, n, exact)?;
    cut_inputs(inputs, &leaves, plan)
}

/// Splits inputs that are given beside `n` microbatches of other calls, of `batch` samples in all
/// where that is known.
///
/// # Errors
/// As [`split_inputs`].
pub(crate) fn split_beside(
    inputs: &HostInputs,
    how: &SplitInput,
    n: usize,
    batch: Option<usize>,
) -> Result<Split<HostInputs>> {
    let Some(batch) = batch.filter(|batch| *batch >= n) else {
        return split_inputs(inputs, how, n);
    };
    let leaves = match how {
        SplitInput::Function(f) => return by_function(f(inputs, n)?, n),
        SplitInput::Auto => auto_beside(inputs, batch)?,
        SplitInput::Spec { args, named } => spec_inputs(inputs, args, named)?,
    };
    let plan = Plan {
        cuts: EvenCuts { batch, parts: n },
        batch: Some(batch),
        warnings: Vec::new(),
    };
    cut_inputs(inputs, &leaves, plan)
}

fn cut_inputs(inputs: &HostInputs, leaves: &[SplitLeaf], plan: Plan) -> Result<Split<HostInputs>> {
    let Plan {
        cuts,
        batch,
        warnings,
    } = plan;
    let mut parts = vec![HostInputs::new(); cuts.parts];
    let mut axes = leaves.iter().map(|leaf| leaf.axis);
    for arg in &inputs.args {
        for (part, cut) in parts.iter_mut().zip(cuts.cut(arg, &mut axes)?) {
            part.args.push(cut);
        }
    }
    for (name, value) in &inputs.named {
        for (part, cut) in parts.iter_mut().zip(cuts.cut(value, &mut axes)?) {
            part.named.insert(name.clone(), cut);
        }
    }
    Ok(Split {
        parts,
        batch,
        samples: Some(samples(batch, cuts.parts)),
        warnings,
    })
}

/// Splits labels into as many microbatches as the inputs gave. Where the inputs were a batch of
/// `batch` samples ([`Split::batch`]), labels with several rows per sample are cut at the same
/// samples even when the microbatches are not equally large.
///
/// # Errors
/// As [`split_inputs`], when the labels give another number of microbatches, and when automatic
/// labels have no whole number of rows per sample.
pub fn split_label(
    label: &Tree<HostTensor>,
    how: &SplitLabel,
    n: usize,
    batch: Option<usize>,
) -> Result<Split<Tree<HostTensor>>> {
    check_count(LABEL, n)?;
    let (leaves, exact) = match how {
        SplitLabel::Function(f) => {
            let parts = f(label, n)?;
            check_labels(parts.len(), n, "the function")?;
            return Ok(Split {
                parts,
                batch: None,
                samples: None,
                warnings: Vec::new(),
            });
        }
        SplitLabel::Auto => (auto(label, "label"), true),
        SplitLabel::Spec(spec) => (by_spec(LABEL, label, spec, "label")?, false),
    };
    let sizes = || leaves.iter().filter_map(SplitLeaf::size);
    let cuts = match batch.filter(|batch| *batch > 0) {
        Some(batch) if batch >= n && sizes().all(|size| size > 0 && size % batch == 0) => {
            EvenCuts { batch, parts: n }
        }
        Some(batch)
            if exact
                && n > 1
                && let Some(leaf) = leaves
                    .iter()
                    .find(|l| l.size().is_some_and(|s| s % batch != 0)) =>
        {
            return Err(leaf.misfit(LABEL, &format!("the inputs' batch of {batch}")));
        }
        _ => plan(LABEL, &leaves, n, exact)?.cuts,
    };
    check_labels(cuts.parts, n, "the label")?;
    let mut axes = leaves.iter().map(|leaf| leaf.axis);
    let cut = sizes().next().map(|_| cuts.batch);
    Ok(Split {
        parts: cuts.cut(label, &mut axes)?,
        batch: cut,
        samples: Some(samples(cut, n)),
        warnings: Vec::new(),
    })
}

fn check_count(name: &'static str, n: usize) -> Result<()> {
    if n == 0 {
        return Err(Error::config(name, "0 microbatches; the least is 1"));
    }
    Ok(())
}

fn check_labels(found: usize, want: usize, who: &str) -> Result<()> {
    if found == want {
        return Ok(());
    }
    Err(Error::config(
        LABEL,
        format!("{who} gives {found} microbatches, but the inputs give {want}"),
    ))
}

fn by_function(parts: Vec<HostInputs>, n: usize) -> Result<Split<HostInputs>> {
    let warnings = match parts.len() {
        0 => {
            return Err(Error::config(
                INPUT,
                format!("the function gave no microbatches; {n} were asked for"),
            ));
        }
        found if found == n => Vec::new(),
        found => vec![format!(
            "{INPUT}: the function gave {found} microbatches; {n} were asked for"
        )],
    };
    Ok(Split {
        parts,
        batch: None,
        samples: None,
        warnings,
    })
}

/// A tensor among the inputs and where it is cut; no axis means that it is repeated.
struct SplitLeaf {
    path: String,
    shape: Shape,
    axis: Option<usize>,
}

impl SplitLeaf {
    fn size(&self) -> Option<usize> {
        self.axis.map(|axis| self.shape[axis])
    }

    fn misfit(&self, name: &'static str, other: &str) -> Error {
        let what = format!(
            "{} {} cannot be cut together with {other}: its size is no multiple; say with a spec what to cut \
             and what to repeat",
            self.path, self.shape
        );
        Error::config(name, what)
    }
}

/// Rule 1: whatever has dimensions is cut along the first.
fn auto(tree: &Tree<HostTensor>, path: &str) -> Vec<SplitLeaf> {
    let leaf = |(path, tensor): (String, &HostTensor)| {
        let shape = *tensor.shape();
        SplitLeaf {
            path,
            shape,
            axis: (shape.rank() > 0).then_some(0),
        }
    };
    tree.paths(path)
        .into_iter()
        .zip(tree.leaves())
        .map(leaf)
        .collect()
}

fn auto_args(inputs: &HostInputs) -> Vec<SplitLeaf> {
    let args = inputs.args.iter().enumerate();
    args.flat_map(|(i, arg)| auto(arg, &format!("args[{i}]")))
        .collect()
}

fn auto_named(inputs: &HostInputs) -> Vec<SplitLeaf> {
    let named = inputs.named.iter();
    named
        .flat_map(|(name, value)| auto(value, &format!("named.{name}")))
        .collect()
}

/// Rule 3: named tensors follow the batch.
fn follow(named: &mut [SplitLeaf], batch: Option<usize>) {
    for leaf in named {
        leaf.axis = leaf.axis.filter(|_| leaf.size() == batch);
    }
}

fn auto_inputs(inputs: &HostInputs, n: usize) -> Result<Vec<SplitLeaf>> {
    let mut leaves = auto_args(inputs);
    let mut named = auto_named(inputs);
    let batch = match leaves.iter().filter_map(SplitLeaf::size).min() {
        Some(batch) => Some(batch),
        // Where nothing is cut, nothing need be clear.
        None if n == 1 => named_batch(&named).unwrap_or_default(),
        None => named_batch(&named)?,
    };
    follow(&mut named, batch);
    leaves.append(&mut named);
    Ok(leaves)
}

/// Rule 6.
fn auto_beside(inputs: &HostInputs, batch: usize) -> Result<Vec<SplitLeaf>> {
    let mut leaves = auto_args(inputs);
    let is_misfit = |leaf: &&SplitLeaf| leaf.size().is_some_and(|size| size % batch != 0);
    if let Some(leaf) = leaves.iter().find(is_misfit) {
        return Err(leaf.misfit(INPUT, &format!("the unmerged inputs' batch of {batch}")));
    }
    let mut named = auto_named(inputs);
    follow(&mut named, Some(batch));
    leaves.append(&mut named);
    Ok(leaves)
}

/// The one size other than 1 along dimension 0; 1 when there is no other.
fn named_batch(leaves: &[SplitLeaf]) -> Result<Option<usize>> {
    let mut found: Option<&SplitLeaf> = None;
    for leaf in leaves.iter().filter(|leaf| leaf.axis.is_some()) {
        match found {
            Some(other)
                if other.size() != Some(1)
                    && leaf.size() != Some(1)
                    && other.size() != leaf.size() =>
            {
                let what = format!(
                    "the batch is not clear: {} {} or {} {}; say with a spec what to cut and what to repeat",
                    other.path, other.shape, leaf.path, leaf.shape
                );
                return Err(Error::config(INPUT, what));
            }
            Some(other) if other.size() != Some(1) => {}
            _ => found = Some(leaf),
        }
    }
    Ok(found.and_then(SplitLeaf::size))
}

fn spec_inputs(
    inputs: &HostInputs,
    args: &[Tree<Cut>],
    named: &BTreeMap<String, Tree<Cut>>,
) -> Result<Vec<SplitLeaf>> {
    if args.len() != inputs.args.len() {
        let what = format!(
            "a spec for {} positional inputs, but there are {}",
            args.len(),
            inputs.args.len()
        );
        return Err(Error::config(INPUT, what));
    }
    let follows = named.is_empty() && !args.is_empty();
    if !follows && !named.keys().eq(inputs.named.keys()) {
        let what = format!(
            "among named inputs there {}, in their spec there {}",
            keys(&inputs.named),
            keys(named)
        );
        return Err(Error::config(INPUT, what));
    }
    let positional = inputs.args.iter().zip(args).enumerate();
    let mut leaves =
        flat(positional.map(|(i, (arg, spec))| by_spec(INPUT, arg, spec, &format!("args[{i}]"))))?;
    if follows {
        // A spec for the positional inputs alone: rule 3 holds for the others.
        let mut named = auto_named(inputs);
        follow(&mut named, leaves.iter().filter_map(SplitLeaf::size).min());
        leaves.append(&mut named);
        return Ok(leaves);
    }
    let pairs = inputs.named.iter().zip(named.values());
    leaves.extend(flat(pairs.map(|((name, value), spec)| {
        by_spec(INPUT, value, spec, &format!("named.{name}"))
    }))?);
    Ok(leaves)
}

fn by_spec(
    name: &'static str,
    tree: &Tree<HostTensor>,
    spec: &Tree<Cut>,
    path: &str,
) -> Result<Vec<SplitLeaf>> {
    let rules = spread(name, path, tree, spec)?;
    let leaves = tree.paths(path).into_iter().zip(tree.leaves()).zip(rules);
    leaves
        .map(|((path, tensor), ruled)| {
            let shape = *tensor.shape();
            let axis = match ruled.rule {
                Cut::Repeat => None,
                // A rule for everything below a place means what can be cut there.
                Cut::Along(_) if !ruled.direct && shape.rank() == 0 => None,
                Cut::Along(dim) => Some(shape.axis(name, *dim).map_err(|_| {
                    Error::config(
                        name,
                        format!("{path} {shape} has no dimension {dim} to cut along"),
                    )
                })?),
            };
            Ok(SplitLeaf { path, shape, axis })
        })
        .collect()
}

struct Plan {
    cuts: EvenCuts,
    batch: Option<usize>,
    warnings: Vec<String>,
}

/// Rules 2 and 4. `exact` refuses sizes that are no multiple of the batch; a spec that asks for it
/// may cut them evenly.
fn plan(name: &'static str, leaves: &[SplitLeaf], n: usize, exact: bool) -> Result<Plan> {
    let cut = || leaves.iter().filter_map(|leaf| Some((leaf, leaf.size()?)));
    let Some((smallest, batch)) = cut().min_by_key(|(_, size)| *size) else {
        let warning = (n > 1)
            .then(|| format!("{name}: nothing to cut; each of {n} microbatches gets everything"));
        return Ok(Plan {
            cuts: EvenCuts { batch: 1, parts: n },
            batch: None,
            warnings: warning.into_iter().collect(),
        });
    };
    if n == 1 {
        // One microbatch has everything, whatever sizes there are.
        return Ok(Plan {
            cuts: EvenCuts {
                batch: batch.max(1),
                parts: 1,
            },
            batch: Some(batch),
            warnings: Vec::new(),
        });
    }
    let shown = format!("{} {}", smallest.path, smallest.shape);
    if batch == 0 {
        return Err(Error::config(
            name,
            format!("{shown} is empty; there is nothing to cut"),
        ));
    }
    if exact && let Some((leaf, _)) = cut().find(|(_, size)| size % batch != 0) {
        return Err(leaf.misfit(name, &shown));
    }
    let parts = n.min(batch);
    let warning = (parts < n).then(|| {
        format!("{name}: a batch of {batch} ({shown}) gives {parts} microbatches, not {n}")
    });
    Ok(Plan {
        cuts: EvenCuts { batch, parts },
        batch: Some(batch),
        warnings: warning.into_iter().collect(),
    })
}

/// Where a batch is cut.
struct EvenCuts {
    batch: usize,
    parts: usize,
}

impl EvenCuts {
    /// The microbatches of one tree; takes the axes of its leaves from `axes`.
    fn cut(
        &self,
        tree: &Tree<HostTensor>,
        axes: &mut impl Iterator<Item = Option<usize>>,
    ) -> Result<Vec<Tree<HostTensor>>> {
        let leaves = tree.leaves();
        let axes: Vec<_> = axes.take(leaves.len()).collect();
        let part = |part| {
            let cut = |(leaf, axis): (&&HostTensor, &Option<usize>)| match *axis {
                Some(axis) => {
                    let range = self.range(leaf.dims()[axis], part);
                    leaf.narrow(axis as isize, range.start, range.len())
                }
                None => Ok((*leaf).clone()),
            };
            let cut = leaves
                .iter()
                .zip(&axes)
                .map(cut)
                .collect::<Result<_, _>>()?;
            Ok(tree.with_leaves(cut)?)
        };
        (0..self.parts).map(part).collect()
    }

    /// The rows of one microbatch along a dimension of `size`.
    fn range(&self, size: usize, part: usize) -> Range<usize> {
        if !size.is_multiple_of(self.batch) {
            return even(size, self.parts, part);
        }
        let (rows, samples) = (size / self.batch, even(self.batch, self.parts, part));
        samples.start * rows..samples.end * rows
    }
}

/// The samples of each microbatch; 1 each where nothing is cut.
fn samples(batch: Option<usize>, parts: usize) -> Vec<usize> {
    let of = |part| batch.map_or(1, |batch| even(batch, parts, part).len());
    (0..parts).map(of).collect()
}

/// The `part`-th of `parts` pieces that differ by at most one, larger ones first.
fn even(size: usize, parts: usize, part: usize) -> Range<usize> {
    let (each, more) = (size / parts, size % parts);
    let start = part * each + part.min(more);
    start..start + each + usize::from(part < more)
}
