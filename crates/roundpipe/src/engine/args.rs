//! What goes into a call and what comes out: host values, and outputs of other calls that have not
//! come yet.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use roundpipe_tensor::transfer::HostValue;
use roundpipe_tensor::{HostBuf, HostTensor};

use crate::batch::{Inputs, Split, SplitInput, assemble, split_inputs};
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::value::{Leaf, Source, StageValue};
use crate::tree::Tree;

/// One input of a model.
#[derive(Debug, Clone)]
pub enum Arg {
    /// Values in host memory, split into microbatches.
    Value(Tree<HostTensor>),
    /// The outputs of another call, taken microbatch by microbatch as they come.
    Outputs(MicrobatchOutputs),
}

/// All inputs of a call, by position and by name.
#[derive(Debug, Clone, Default)]
pub struct Args {
    args: Vec<Arg>,
    named: BTreeMap<String, Arg>,
}

impl Args {
    /// No inputs yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an input by position.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<Arg>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds an input by name.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>, arg: impl Into<Arg>) -> Self {
        self.named.insert(name.into(), arg.into());
        self
    }

    /// By position, and by name.
    pub(crate) fn into_parts(self) -> (Vec<Arg>, BTreeMap<String, Arg>) {
        (self.args, self.named)
    }

    fn all(&self) -> impl Iterator<Item = &Arg> {
        self.args.iter().chain(self.named.values())
    }

    /// How many microbatches outputs of other calls bring, when there are such.
    fn given_parts(&self) -> Result<Option<usize>> {
        let mut counts = self.all().filter_map(|arg| match arg {
            Arg::Outputs(outputs) => Some(outputs.len()),
            Arg::Value(_) => None,
        });
        let Some(first) = counts.next() else {
            return Ok(None);
        };
        match counts.find(|count| *count != first) {
            None => Ok(Some(first)),
            Some(other) => {
                let what = format!("one unmerged input has {first} microbatches, another {other}");
                Err(Error::config("inputs", what))
            }
        }
    }
}

impl Arg {
    fn samples(&self) -> Option<Arc<[usize]>> {
        match self {
            Self::Value(_) => None,
            Self::Outputs(outputs) => outputs.samples.clone(),
        }
    }
}

impl From<HostTensor> for Arg {
    fn from(tensor: HostTensor) -> Self {
        Self::Value(tensor.into())
    }
}

impl From<Tree<HostTensor>> for Arg {
    fn from(tree: Tree<HostTensor>) -> Self {
        Self::Value(tree)
    }
}

impl From<MicrobatchOutputs> for Arg {
    fn from(outputs: MicrobatchOutputs) -> Self {
        Self::Outputs(outputs)
    }
}

impl<A: Into<Arg>> From<A> for Args {
    fn from(arg: A) -> Self {
        Self::new().arg(arg)
    }
}

impl From<Inputs> for Args {
    fn from(inputs: Inputs) -> Self {
        let value = |(name, tree)| (name, Arg::Value(tree));
        Self {
            args: inputs.args.into_iter().map(Arg::Value).collect(),
            named: inputs.named.into_iter().map(value).collect(),
        }
    }
}

impl<const N: usize> From<[HostTensor; N]> for Args {
    fn from(tensors: [HostTensor; N]) -> Self {
        Self {
            args: tensors.into_iter().map(Arg::from).collect(),
            named: BTreeMap::new(),
        }
    }
}

/// The outputs of a call, one tree per microbatch, some of which may not have been computed yet;
/// cloning shares them. As an input of another engine they chain both without a host wait.
#[derive(Clone)]
pub struct MicrobatchOutputs {
    pub(crate) call: Arc<Call>,
    /// The samples of each microbatch, where they are known.
    pub(crate) samples: Option<Arc<[usize]>>,
}

impl MicrobatchOutputs {
    /// How many microbatches.
    pub fn len(&self) -> usize {
        self.call.spec.microbatches
    }

    /// Never: a call has at least one microbatch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits for one microbatch's output.
    ///
    /// # Errors
    /// What went wrong in the call.
    pub fn wait(&self, microbatch: usize) -> Result<Tree<HostTensor>> {
        let output = to_host(&self.value(microbatch)?)?;
        self.call.confirm()?;
        Ok(output)
    }

    /// Waits for one microbatch's output and reads one entry of it, where it is a map.
    ///
    /// # Errors
    /// [`Error::Config`] when there is no such entry; what went wrong in the call.
    pub fn wait_entry(&self, microbatch: usize, name: &str) -> Result<Tree<HostTensor>> {
        match self.value(microbatch)? {
            Tree::Map(map) if map.contains_key(name) => {
                let entry = to_host(&map[name])?;
                self.call.confirm()?;
                Ok(entry)
            }
            _ => Err(Error::config(
                "outputs",
                format!("there is no `{name}` in the output"),
            )),
        }
    }

    fn value(&self, microbatch: usize) -> Result<StageValue> {
        if microbatch >= self.len() {
            let what = format!("there is no microbatch {microbatch} of {}", self.len());
            return Err(Error::config("outputs", what));
        }
        let call = &self.call;
        let output = call.wait_output("caller", microbatch);
        output.map_err(|error| call.take_error().unwrap_or(error))
    }
}

impl std::fmt::Debug for MicrobatchOutputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "MicrobatchOutputs({} microbatches of {})",
            self.len(),
            self.call.spec.model.name
        )
    }
}

/// The gradients of a call's inputs, one list of leaves per microbatch, some of which may not have
/// been computed yet; cloning shares them.
#[derive(Clone)]
pub struct InputGrads {
    pub(crate) call: Arc<Call>,
    /// The leaves of each input by position, then by name.
    pub(crate) args: Vec<Leaves>,
    /// The leaves that these are; all of them if not said.
    pub(crate) leaves: Option<Range<usize>>,
}

/// How many leaves an input has.
#[derive(Clone)]
pub(crate) enum Leaves {
    Known(usize),
    /// As many as the outputs of another call.
    Of(MicrobatchOutputs),
}

impl InputGrads {
    /// How many microbatches.
    pub fn len(&self) -> usize {
        self.call.spec.microbatches
    }

    /// Never: a call has at least one microbatch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those of one input: by position first, then by name in alphabetical order.
    ///
    /// # Errors
    /// [`Error::Config`] when there is no such input.
    pub fn arg(&self, index: usize) -> Result<Self> {
        if index >= self.args.len() {
            let what = format!("there is no input {index} of {}", self.args.len());
            return Err(Error::config("input_grads", what));
        }
        if self.args.len() == 1 {
            return Ok(self.clone());
        }
        let counts: Vec<usize> = self.args[..=index].iter().map(Leaves::count).collect();
        let start = counts[..index].iter().sum();
        let args = std::iter::once(self.args[index].clone()).collect();
        Ok(Self {
            call: self.call.clone(),
            args,
            leaves: Some(start..start + counts[index]),
        })
    }

    /// Waits for one microbatch's gradients, a value per leaf; `None` where the loss does not
    /// depend on it.
    ///
    /// # Errors
    /// What went wrong in the call.
    pub fn wait(&self, microbatch: usize) -> Result<Vec<Option<HostTensor>>> {
        if microbatch >= self.len() {
            let what = format!("there is no microbatch {microbatch} of {}", self.len());
            return Err(Error::config("input_grads", what));
        }
        let call = &self.call;
        let grads = call.wait_input_grads("caller", microbatch);
        let grads = grads.map_err(|error| call.take_error().unwrap_or(error))?;
        let host =
            |host_value: &Option<HostValue>| host_value.as_ref().map(host_tensor).transpose();
        let leaves = self.leaves.clone().unwrap_or(0..grads.len());
        let grads = grads[leaves].iter().map(host).collect::<Result<_>>()?;
        call.confirm()?;
        Ok(grads)
    }
}

impl std::fmt::Debug for InputGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "InputGrads({} microbatches of {})",
            self.len(),
            self.call.spec.model.name
        )
    }
}

/// Waits for a host_value and gives its bytes as a tensor.
pub(crate) fn host_tensor(host_value: &HostValue) -> Result<HostTensor> {
    Ok(HostTensor::new(
        host_value.fence()?,
        host_value.dtype(),
        host_value.shape(),
    )?)
}

pub(crate) fn to_host(value: &StageValue) -> Result<Tree<HostTensor>> {
    value.clone().try_map(|leaf| match &leaf.resident {
        Some(resident) => {
            let tensor = &resident.tensor;
            let host = HostBuf::zeroed("output", tensor.size_bytes())?;
            tensor.read_into(&mut host.write(0..host.len())?)?;
            Ok(HostTensor::new(host, tensor.dtype(), tensor.dims())?)
        }
        None => host_tensor(&leaf.host),
    })
}

/// A user's tensor as lanes read it.
pub(crate) fn host_value(tensor: &HostTensor) -> Result<HostValue> {
    Ok(HostValue::given(
        tensor.buf().slice(tensor.byte_range())?,
        tensor.dtype(),
        *tensor.shape(),
    )?)
}

/// The host_values of several microbatches' trees. What all of them share becomes one host_value.
pub(crate) fn host_values(parts: &[Tree<HostTensor>]) -> Result<Vec<Tree<(HostValue, bool)>>> {
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

/// A call's inputs, cut into microbatches.
pub(crate) struct Parts {
    pub sources: Vec<Tree<Source>>,
    /// The first microbatch, where all of it is known: for planning.
    pub example: Option<Tree<HostTensor>>,
    pub args: Vec<Leaves>,
    pub batch: Option<usize>,
    /// The samples of each microbatch, where they are known.
    pub samples: Option<Arc<[usize]>>,
    pub warnings: Vec<String>,
}

/// Cuts the inputs; `grads` says whether their gradients are wanted.
pub(crate) fn split(args: &Args, how: &SplitInput, wanted: usize, grads: bool) -> Result<Parts> {
    let given = args.given_parts()?;
    let blank = |arg: &Arg| match arg {
        Arg::Value(tree) => tree.clone(),
        Arg::Outputs(_) => Tree::None,
    };
    let inputs = Inputs {
        args: args.args.iter().map(blank).collect(),
        named: args
            .named
            .iter()
            .map(|(name, arg)| (name.clone(), blank(arg)))
            .collect(),
    };
    let n = given.unwrap_or(wanted);
    let only_outputs = args.all().all(|arg| matches!(arg, Arg::Outputs(_))) && given.is_some();
    let Split {
        parts,
        batch,
        samples,
        mut warnings,
    } = if only_outputs {
        Split {
            parts: vec![inputs; n],
            batch: None,
            samples: None,
            warnings: Vec::new(),
        }
    } else {
        split_inputs(&inputs, how, n)?
    };
    if let Some(given) = given.filter(|given| *given != parts.len()) {
        let what = format!(
            "{} microbatches beside an unmerged input of {given}",
            parts.len()
        );
        return Err(Error::config("split_input", what));
    }
    if given.is_some() {
        warnings.clear();
    }
    // Microbatches that another call has made are as large as that call says.
    let samples = match given {
        Some(_) => args.all().find_map(Arg::samples),
        None => samples.map(Arc::from),
    };
    let example = given.is_none().then(|| parts[0].clone().into_tree());
    let mut columns = Vec::new();
    for at in 0..args.args.len() {
        columns.push(host_values(
            &parts.iter().map(|p| p.args[at].clone()).collect::<Vec<_>>(),
        )?);
    }
    for name in args.named.keys() {
        columns.push(host_values(
            &parts
                .iter()
                .map(|p| p.named[name].clone())
                .collect::<Vec<_>>(),
        )?);
    }
    let source = |tree: &Tree<(HostValue, bool)>| {
        tree.map_ref(|(host_value, constant)| {
            let grad = grads && host_value.dtype().is_float();
            Source::Value(Leaf {
                constant: *constant,
                ..Leaf::new(host_value.clone(), grad)
            })
        })
    };
    let mut sources = Vec::with_capacity(parts.len());
    for m in 0..parts.len() {
        let mut each = args.all().zip(&columns).map(|(arg, column)| match arg {
            Arg::Value(_) => source(&column[m]),
            Arg::Outputs(outputs) => Tree::Tensor(Source::Output(outputs.call.clone(), m)),
        });
        let by_place: Vec<Tree<Source>> = each.by_ref().take(args.args.len()).collect();
        let by_name = args.named.keys().cloned().zip(each).collect();
        sources.push(assemble(by_place, by_name));
    }
    let leaves = args.all().zip(&columns).map(|(arg, column)| match arg {
        Arg::Value(_) => Leaves::Known(column[0].leaves().len()),
        Arg::Outputs(outputs) => Leaves::Of(outputs.clone()),
    });
    let args = leaves.collect();
    Ok(Parts {
        sources,
        example,
        args,
        batch,
        samples,
        warnings,
    })
}

impl Leaves {
    /// Waits where it is not known yet.
    fn count(&self) -> usize {
        match self {
            Self::Known(count) => *count,
            Self::Of(outputs) => match outputs.call.wait_output("caller", 0) {
                Ok(output) => output.leaves().len(),
                Err(_) => 0,
            },
        }
    }
}
