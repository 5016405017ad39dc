//! From a batch to microbatches and back: which tensors are cut where, and how outputs are put
//! together.
//!
//! The path of a batch: [`HostInputs`] -> [`split_inputs`] -> one [`HostInputs`] per microbatch -> the
//! model -> [`merge`]. Labels go the same way through [`split_label`]; gradients of a merged output
//! go back through [`split_grads`]. Everything here is a pure function of host tensors. A cut along
//! dimension 0 shares the user's memory.
//!
//! Each rule is automatic, a spec (a tree of rules beside the tree of values, in which one rule at
//! a place holds for everything below it), or a function. Nothing is printed: what a user should
//! hear about but need not fix comes back as a warning.
//!
//! # Automatic rules
//!
//! 1. Positional inputs and labels: a tensor with dimensions is cut along dimension 0; scalars and
//!    plain values are repeated.
//! 2. The batch is the smallest of the sizes that are cut. The others must be multiples of it and
//!    are cut at the same samples: 5 samples of 4 rows in 3 microbatches give 8, 8 and 4 rows.
//! 3. Named inputs: a tensor is cut along dimension 0 when that is as large as the batch of the
//!    positional inputs, and repeated otherwise. Without positional tensors, the batch is the one
//!    size other than 1 that named tensors have along dimension 0; when there are several it is an
//!    error, not a guess.
//! 4. Microbatches differ by at most one sample, larger ones first. A batch smaller than the number
//!    of microbatches gives fewer, with a warning.
//!    One microbatch gets everything as it is, whatever the sizes.
//! 5. Outputs: tensors with dimensions are concatenated along dimension 0, float scalars averaged
//!    (in f64, rounded once; the microbatches count the same), everything else must be equal.
//! 6. Beside outputs of another call that are microbatches already, their samples are the batch:
//!    named tensors with as many rows are cut like them, the others (masks, tables) are repeated.

mod merge;
mod split;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use roundpipe_tensor::HostTensor;

use crate::error::{Error, Result};
use crate::tree::{Tree, keys, leaf};

pub use merge::{merge, split_grads};
pub(crate) use split::split_beside;
pub use split::{Split, split_inputs, split_label};

/// Inputs by position and by name; `V` is what one of them is. A call takes
/// [`Inputs`](crate::Inputs), whose values may still be computed by another engine; split functions
/// see [`HostInputs`].
#[derive(Debug, Clone)]
pub struct InputsOf<V> {
    /// By position.
    pub args: Vec<V>,
    /// By name.
    pub named: BTreeMap<String, V>,
}

/// Inputs in host memory.
pub type HostInputs = InputsOf<Tree<HostTensor>>;

impl<V> InputsOf<V> {
    /// None yet.
    pub fn new() -> Self {
        Self {
            args: Vec::new(),
            named: BTreeMap::new(),
        }
    }

    /// Appends a positional input.
    #[must_use]
    pub fn arg(mut self, value: impl Into<V>) -> Self {
        self.args.push(value.into());
        self
    }

    /// Adds a named input, or replaces the one of that name.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>, value: impl Into<V>) -> Self {
        self.named.insert(name.into(), value.into());
        self
    }

    /// All of them: by position, then by name in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = &V> {
        self.args.iter().chain(self.named.values())
    }

    /// The same with each input replaced by what `f` makes of it.
    pub(crate) fn try_map<U, E>(
        self,
        mut f: impl FnMut(V) -> Result<U, E>,
    ) -> Result<InputsOf<U>, E> {
        let mut mapped = InputsOf::new();
        for value in self.args {
            mapped.args.push(f(value)?);
        }
        for (name, value) in self.named {
            mapped.named.insert(name, f(value)?);
        }
        Ok(mapped)
    }

    /// As [`InputsOf::try_map`], for what cannot fail.
    pub(crate) fn map<U>(self, mut f: impl FnMut(V) -> U) -> InputsOf<U> {
        let named = self.named.into_iter();
        InputsOf {
            args: self.args.into_iter().map(&mut f).collect(),
            named: named.map(|(name, value)| (name, f(value))).collect(),
        }
    }
}

impl<T> InputsOf<Tree<T>> {
    /// What the model's first layer receives: a single positional input as it is, several as a
    /// list, named ones as a map, and both as the list of the positional ones with the map at its
    /// end.
    pub fn into_tree(self) -> Tree<T> {
        let Self { mut args, named } = self;
        match (args.len(), named.is_empty()) {
            (0, true) => Tree::None,
            (0, false) => Tree::Map(named),
            (1, true) => args.remove(0),
            (_, true) => Tree::List(args),
            (_, false) => {
                args.push(Tree::Map(named));
                Tree::List(args)
            }
        }
    }
}

impl<V> Default for InputsOf<V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<V: From<HostTensor>> From<HostTensor> for InputsOf<V> {
    fn from(tensor: HostTensor) -> Self {
        Self::new().arg(tensor)
    }
}

impl<V: From<Tree<HostTensor>>> From<Tree<HostTensor>> for InputsOf<V> {
    fn from(tree: Tree<HostTensor>) -> Self {
        Self::new().arg(tree)
    }
}

impl<V: From<HostTensor>> From<Vec<HostTensor>> for InputsOf<V> {
    /// Each is a positional input of its own.
    fn from(tensors: Vec<HostTensor>) -> Self {
        tensors.into_iter().fold(Self::new(), Self::arg)
    }
}

impl<V: From<HostTensor>, const N: usize> From<[HostTensor; N]> for InputsOf<V> {
    /// Each is a positional input of its own.
    fn from(tensors: [HostTensor; N]) -> Self {
        Vec::from(tensors).into()
    }
}

/// What happens to one tensor, or to all tensors below a place, when a batch is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Cut along this dimension (-1 is the last).
    Along(isize),
    /// Every microbatch gets the whole.
    Repeat,
}

/// Makes the inputs of each microbatch from the inputs of the batch and the wished number of
/// microbatches.
pub type SplitInputFn = dyn Fn(&HostInputs, usize) -> Result<Vec<HostInputs>> + Send + Sync;
/// Makes the label of each microbatch from the label of the batch and the number of microbatches.
pub type SplitLabelFn =
    dyn Fn(&Tree<HostTensor>, usize) -> Result<Vec<Tree<HostTensor>>> + Send + Sync;
/// Makes the output of the batch from those of its microbatches, in their order.
pub type MergeFn = dyn Fn(Vec<Tree<HostTensor>>) -> Result<Tree<HostTensor>> + Send + Sync;
/// Puts one more microbatch's value to what was gathered so far.
pub type ReduceFn = dyn Fn(HostTensor, HostTensor) -> Result<HostTensor> + Send + Sync;

/// How inputs become microbatches.
#[derive(Clone, Default)]
pub enum SplitInput {
    /// By the rules of this module.
    #[default]
    Auto,
    /// By a rule for each input.
    Spec {
        /// One for each positional input.
        args: Vec<Tree<Cut>>,
        /// One for each named input.
        named: BTreeMap<String, Tree<Cut>>,
    },
    /// As the function does it.
    Function(Arc<SplitInputFn>),
}

impl SplitInput {
    /// As the function does it.
    pub fn function(
        f: impl Fn(&HostInputs, usize) -> Result<Vec<HostInputs>> + Send + Sync + 'static,
    ) -> Self {
        Self::Function(Arc::new(f))
    }
}

/// How labels become microbatches.
#[derive(Clone, Default)]
pub enum SplitLabel {
    /// By the rules of this module.
    #[default]
    Auto,
    /// By these rules.
    Spec(Tree<Cut>),
    /// As the function does it.
    Function(Arc<SplitLabelFn>),
}

impl SplitLabel {
    /// As the function does it.
    pub fn function(
        f: impl Fn(&Tree<HostTensor>, usize) -> Result<Vec<Tree<HostTensor>>> + Send + Sync + 'static,
    ) -> Self {
        Self::Function(Arc::new(f))
    }
}

/// How one output, or all outputs below a place, of the microbatches become one.
#[derive(Clone)]
pub enum Merge {
    /// One after another along this dimension (-1 is the last).
    Cat(isize),
    /// The mean of floats, element by element, in f64 and rounded once.
    Mean,
    /// All must have the same bits; that is the result.
    Equal,
    /// A function takes them in, microbatch by microbatch.
    Reduce {
        /// What it starts from.
        init: HostTensor,
        /// From what was gathered and the next microbatch's value to what is gathered then.
        f: Arc<ReduceFn>,
    },
}

impl Merge {
    /// A function takes the outputs in, microbatch by microbatch, starting from `init`.
    pub fn reduce(
        init: HostTensor,
        f: impl Fn(HostTensor, HostTensor) -> Result<HostTensor> + Send + Sync + 'static,
    ) -> Self {
        Self::Reduce {
            init,
            f: Arc::new(f),
        }
    }
}

/// How the outputs of microbatches become the output of the batch.
#[derive(Clone, Default)]
pub enum MergeOutput {
    /// By the rules of this module.
    #[default]
    Auto,
    /// By a rule for each output.
    Spec(Tree<Merge>),
    /// As the function does it.
    Function(Arc<MergeFn>),
    /// Not at all: one output per microbatch.
    Off,
}

impl MergeOutput {
    /// As the function does it.
    pub fn function(
        f: impl Fn(Vec<Tree<HostTensor>>) -> Result<Tree<HostTensor>> + Send + Sync + 'static,
    ) -> Self {
        Self::Function(Arc::new(f))
    }
}

leaf!(Cut, Merge);

impl fmt::Debug for SplitInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("Auto"),
            Self::Spec { args, named } => f
                .debug_struct("Spec")
                .field("args", args)
                .field("named", named)
                .finish(),
            Self::Function(_) => f.write_str("Function"),
        }
    }
}

impl fmt::Debug for SplitLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("Auto"),
            Self::Spec(spec) => f.debug_tuple("Spec").field(spec).finish(),
            Self::Function(_) => f.write_str("Function"),
        }
    }
}

impl fmt::Debug for Merge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cat(dim) => write!(f, "Cat({dim})"),
            Self::Mean => f.write_str("Mean"),
            Self::Equal => f.write_str("Equal"),
            Self::Reduce { init, .. } => write!(f, "Reduce({init:?})"),
        }
    }
}

impl fmt::Debug for MergeOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("Auto"),
            Self::Spec(spec) => f.debug_tuple("Spec").field(spec).finish(),
            Self::Function(_) => f.write_str("Function"),
            Self::Off => f.write_str("Off"),
        }
    }
}

/// The rule of a spec for one leaf, and whether it stands at the leaf itself rather than above it.
struct Ruled<'a, R> {
    rule: &'a R,
    direct: bool,
}

/// The rule for each leaf of `tree`, in the order of its leaves. `name` is the setting, `path`
/// where `tree` is.
fn spread<'a, T, R>(
    name: &'static str,
    path: &str,
    tree: &Tree<T>,
    spec: &'a Tree<R>,
) -> Result<Vec<Ruled<'a, R>>> {
    let misfit = || {
        let what = format!("{path} is {}, but its spec is {}", tree.kind(), spec.kind());
        Error::config(name, what)
    };
    match (tree, spec) {
        (_, Tree::Tensor(rule)) => {
            let direct = matches!(tree, Tree::Tensor(_));
            Ok(tree
                .leaves()
                .iter()
                .map(|_| Ruled { rule, direct })
                .collect())
        }
        (Tree::List(items), Tree::List(specs)) if items.len() == specs.len() => {
            let pairs = items.iter().zip(specs).enumerate();
            flat(pairs.map(|(i, (item, spec))| spread(name, &format!("{path}[{i}]"), item, spec)))
        }
        (Tree::Map(items), Tree::Map(specs)) => {
            if !items.keys().eq(specs.keys()) {
                let what = format!(
                    "in {path} there {}, in its spec there {}",
                    keys(items),
                    keys(specs)
                );
                return Err(Error::config(name, what));
            }
            let pairs = items.iter().zip(specs.values());
            flat(
                pairs.map(|((key, item), spec)| spread(name, &format!("{path}.{key}"), item, spec)),
            )
        }
        (Tree::Tensor(_) | Tree::List(_) | Tree::Map(_), _) | (_, Tree::List(_) | Tree::Map(_)) => {
            Err(misfit())
        }
        // Plain values need no rule.
        _ => Ok(Vec::new()),
    }
}

fn flat<T>(parts: impl Iterator<Item = Result<Vec<T>>>) -> Result<Vec<T>> {
    Ok(parts
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect())
}

#[cfg(test)]
mod tests;
