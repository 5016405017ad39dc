//! What goes into a call: host values, which are split into microbatches here, and outputs of other
//! calls, which are microbatches already.
//!
//! This module waits for nothing: outputs of other calls may still be computed.
//!
//! # Invariants
//! - The user's memory is never copied: a microbatch that is cut along dimension 0 is a view of it.
//! - A value that all microbatches share becomes one host value, so that it is sent to a worker once.
//! - Outputs of other calls decide the number of microbatches: the fewest of them, with a warning if
//!   they disagree.

use std::convert::Infallible;
use std::sync::Arc;

use roundpipe_tensor::HostTensor;
use roundpipe_tensor::transfer::HostValue;

use super::outputs::{InputLeaves, Leaves, MicrobatchOutputs};
use crate::batch::{HostInputs, InputsOf, Split, SplitInput, split_beside, split_inputs};
use crate::error::{Error, Result};
use crate::exec::stage_value::{Leaf, Source};
use crate::tree::Tree;

/// One input of a model.
#[derive(Debug, Clone)]
pub enum Input {
    /// Values in host memory, split into microbatches.
    Value(Tree<HostTensor>),
    /// The outputs of another call, taken microbatch by microbatch as they come.
    Outputs(MicrobatchOutputs),
    /// A list or map, at any depth, of values and outputs of other calls.
    Nested(Box<Tree<Input>>),
}

/// All inputs of a call, by position and by name. One tensor, tree or [`MicrobatchOutputs`] turns
/// into the only input; an array or a `Vec` of tensors into as many.
pub type Inputs = InputsOf<Input>;

impl Input {
    /// A list or map of values and outputs of other calls.
    pub fn nested(tree: Tree<Input>) -> Self {
        Self::Nested(Box::new(tree))
    }

    /// Outputs of other calls in it, in the order of leaves.
    fn outputs(&self) -> Vec<&MicrobatchOutputs> {
        match self {
            Self::Value(_) => Vec::new(),
            Self::Outputs(outputs) => vec![outputs],
            Self::Nested(tree) => {
                let leaves = tree.leaves().into_iter();
                leaves.flat_map(Self::outputs).collect()
            }
        }
    }

    /// What lies in host memory; outputs of other calls are blank.
    fn host(&self) -> Tree<HostTensor> {
        match self {
            Self::Value(tree) => tree.clone(),
            Self::Outputs(_) => Tree::None,
            Self::Nested(tree) => {
                let host = tree
                    .clone()
                    .try_flat_map::<_, Infallible>(&mut |input| Ok(input.host()));
                match host {
                    Ok(host) => host,
                    Err(never) => match never {},
                }
            }
        }
    }

    /// Where the leaves come from, given the host values of a microbatch.
    fn leaves(&self, host: &HostValues) -> Result<InputLeaves> {
        match self {
            Self::Value(_) => Ok(vec![Leaves::Known(host.leaves().len())]),
            Self::Outputs(outputs) => Ok(vec![Leaves::Of(outputs.clone())]),
            Self::Nested(tree) => {
                let mut all = Vec::new();
                beside(tree, host, &mut |input, host| {
                    all.extend(input.leaves(host)?);
                    Ok(Tree::<()>::None)
                })?;
                Ok(all)
            }
        }
    }
}

/// Walks a tree of inputs beside the host values of one microbatch, which have the same structure
/// down to each input, and puts what `leaf` gives in the inputs' places.
fn beside<U>(
    inputs: &Tree<Input>,
    host: &HostValues,
    leaf: &mut impl FnMut(&Input, &HostValues) -> Result<Tree<U>>,
) -> Result<Tree<U>> {
    match (inputs, host) {
        (Tree::Tensor(input), host) => leaf(input, host),
        (Tree::List(inputs), Tree::List(host)) if inputs.len() == host.len() => {
            let pairs = inputs.iter().zip(host);
            let items = pairs.map(|(input, host)| beside(input, host, leaf));
            Ok(Tree::List(items.collect::<Result<_>>()?))
        }
        (Tree::Map(inputs), Tree::Map(host)) if inputs.keys().eq(host.keys()) => {
            let pairs = inputs.iter().zip(host.values());
            let items = pairs.map(|((key, input), host)| {
                let item = beside(input, host, leaf)?;
                Ok((key.clone(), item))
            });
            Ok(Tree::Map(items.collect::<Result<_>>()?))
        }
        (Tree::None | Tree::Bool(_) | Tree::Int(_) | Tree::Float(_) | Tree::Text(_), host)
            if host.leaves().is_empty() =>
        {
            // A split function may give each microbatch a number of its own.
            let plain = host.clone();
            plain.try_flat_map(&mut |_| unreachable!("a tree without leaves"))
        }
        _ => Err(Error::config(
            "split_input",
            "the function changed the structure of an input that contains outputs of another call",
        )),
    }
}

impl Inputs {
    /// The microbatches that outputs of other calls bring, when there are such.
    fn given(&self) -> Option<GivenMicrobatches> {
        let outputs: Vec<&MicrobatchOutputs> = self.iter().flat_map(Input::outputs).collect();
        let counts = outputs.iter().map(|outputs| outputs.len());
        let count = counts.clone().min()?;
        let most = counts.max()?;
        let warning = (most > count).then(|| {
            format!("inputs: unmerged inputs of {count} and {most} microbatches; {count} are used")
        });
        Some(GivenMicrobatches {
            count,
            samples: outputs.iter().find_map(|outputs| outputs.samples.clone()),
            warning,
        })
    }
}

/// What outputs of other calls say about the microbatches.
struct GivenMicrobatches {
    count: usize,
    /// The samples of each, where they are known.
    samples: Option<Arc<[usize]>>,
    warning: Option<String>,
}

impl GivenMicrobatches {
    fn batch(&self) -> Option<usize> {
        let samples = self.samples.as_ref()?;
        Some(samples.iter().take(self.count).sum())
    }
}

impl From<HostTensor> for Input {
    fn from(tensor: HostTensor) -> Self {
        Self::Value(tensor.into())
    }
}

impl From<Tree<HostTensor>> for Input {
    fn from(tree: Tree<HostTensor>) -> Self {
        Self::Value(tree)
    }
}

impl From<MicrobatchOutputs> for Input {
    fn from(outputs: MicrobatchOutputs) -> Self {
        Self::Outputs(outputs)
    }
}

impl From<MicrobatchOutputs> for Inputs {
    fn from(outputs: MicrobatchOutputs) -> Self {
        Self::new().arg(outputs)
    }
}

impl From<HostInputs> for Inputs {
    fn from(inputs: HostInputs) -> Self {
        inputs.map(Input::Value)
    }
}

/// A call's inputs, cut into microbatches.
pub(crate) struct SplitInputs {
    /// What each microbatch's first layer receives.
    pub sources: Vec<Tree<Source>>,
    /// The first microbatch, where all of it is known: for planning.
    pub example: Option<Tree<HostTensor>>,
    /// The leaves of each input by position, then by name.
    pub leaves: Arc<[InputLeaves]>,
    /// The samples that were cut, where the engine cut them.
    pub batch: Option<usize>,
    /// The samples of each microbatch, where they are known.
    pub samples: Option<Arc<[usize]>>,
    pub warnings: Vec<String>,
}

/// Cuts the inputs; `grads` says whether their gradients are wanted.
pub(crate) fn split(
    inputs: &Inputs,
    how: &SplitInput,
    wanted: usize,
    grads: bool,
) -> Result<SplitInputs> {
    let given = inputs.given();
    let Split {
        parts,
        batch,
        samples,
        mut warnings,
    } = split_host(inputs, how, given.as_ref(), wanted)?;
    if let Some(given) = &given {
        // The user chose the number of microbatches at the call before.
        warnings.clear();
        warnings.extend(given.warning.clone());
    }
    // Microbatches that another call has made are as large as that call says.
    let samples = match &given {
        Some(given) => given.samples.clone(),
        None => samples.map(Arc::from),
    };
    // Outputs of another call are not there yet, so such a call is planned without an example.
    let example = given.is_none().then(|| parts[0].clone().into_tree());
    let columns = columns(inputs, &parts)?;
    let mut sources = Vec::with_capacity(parts.len());
    for microbatch in 0..parts.len() {
        let mut each = inputs.iter().zip(&columns);
        let source = |_| {
            let (input, column) = each.next().expect("a column for each input");
            source(input, &column[microbatch], microbatch, grads)
        };
        sources.push(inputs.clone().try_map(source)?.into_tree());
    }
    let each = inputs.iter().zip(&columns);
    let leaves = each.map(|(input, column)| input.leaves(&column[0]));
    Ok(SplitInputs {
        sources,
        example,
        leaves: leaves.collect::<Result<_>>()?,
        batch,
        samples,
        warnings,
    })
}

/// Splits what lies in host memory, into as many microbatches as other calls bring (`given`), or
/// else as are wanted. Outputs of other calls are blank.
fn split_host(
    inputs: &Inputs,
    how: &SplitInput,
    given: Option<&GivenMicrobatches>,
    wanted: usize,
) -> Result<Split<HostInputs>> {
    let host = inputs.clone().map(|input| input.host());
    let is_blank = |input: &Tree<HostTensor>| input.leaves().is_empty();
    if let Some(given) = given.filter(|_| host.iter().all(is_blank)) {
        return Ok(Split {
            parts: vec![host; given.count],
            batch: given.batch(),
            samples: None,
            warnings: Vec::new(),
        });
    }
    let Some(given) = given else {
        return split_inputs(&host, how, wanted);
    };
    let split = split_beside(&host, how, given.count, given.batch())?;
    let found = split.parts.len();
    if found != given.count {
        let what = format!(
            "{found} microbatches beside an unmerged input of {}",
            given.count
        );
        return Err(Error::config("split_input", what));
    }
    Ok(split)
}

/// Values in host memory, each with whether all microbatches share it.
type HostValues = Tree<(HostValue, bool)>;

/// For each input, by position and then by name, the host values of its microbatches.
fn columns(inputs: &Inputs, parts: &[HostInputs]) -> Result<Vec<Vec<HostValues>>> {
    let mut columns = Vec::new();
    for at in 0..inputs.args.len() {
        let column: Vec<_> = parts.iter().map(|part| part.args[at].clone()).collect();
        columns.push(host_values(&column)?);
    }
    for name in inputs.named.keys() {
        let column: Vec<_> = parts.iter().map(|part| part.named[name].clone()).collect();
        columns.push(host_values(&column)?);
    }
    Ok(columns)
}

/// One microbatch of one input, of which `host` is what lies in host memory.
fn source(
    input: &Input,
    host: &HostValues,
    microbatch: usize,
    grads: bool,
) -> Result<Tree<Source>> {
    match input {
        Input::Value(_) => Ok(host.map_ref(|(value, constant)| {
            // Indices and masks of integers have no gradient, whatever the caller asks for.
            let grad = grads && value.dtype().is_float();
            Source::Value(Leaf {
                constant: *constant,
                ..Leaf::new(value.clone(), grad)
            })
        })),
        Input::Outputs(outputs) => Ok(Tree::Tensor(Source::Output {
            call: outputs.call.clone(),
            microbatch,
            part: outputs.part.clone(),
        })),
        Input::Nested(tree) => beside(tree, host, &mut |input, host| {
            source(input, host, microbatch, grads)
        }),
    }
}

/// A user's tensor as lanes read it.
pub(crate) fn host_value(tensor: &HostTensor) -> Result<HostValue> {
    Ok(HostValue::given(
        tensor.buf().slice(tensor.byte_range())?,
        tensor.dtype(),
        *tensor.shape(),
    )?)
}

/// The host values of several microbatches' trees. What all of them share becomes one host value.
pub(crate) fn host_values(parts: &[Tree<HostTensor>]) -> Result<Vec<HostValues>> {
    let Some(first) = parts.first() else {
        return Ok(Vec::new());
    };
    let known: Vec<(HostTensor, HostValue)> = first
        .leaves()
        .into_iter()
        .map(|t| Ok((t.clone(), host_value(t)?)))
        .collect::<Result<_>>()?;
    let mut out = Vec::with_capacity(parts.len());
    for part in parts {
        let mut at = 0;
        let leaf = |tensor: HostTensor| -> Result<(HostValue, bool)> {
            let same = known.get(at).filter(|(other, _)| other.is_same(&tensor));
            at += 1;
            match same {
                Some((_, shared)) => Ok((shared.clone(), parts.len() > 1)),
                None => Ok((host_value(&tensor)?, false)),
            }
        };
        out.push(part.clone().try_map(leaf)?);
    }
    // The first microbatch's own values are shared only if the second has them too.
    if parts.len() > 1 {
        let second: Vec<bool> = out[1].leaves().iter().map(|(_, shared)| *shared).collect();
        for (leaf, shared) in out[0].leaves_mut().into_iter().zip(second) {
            leaf.1 = shared;
        }
    }
    Ok(out)
}
