//! What comes out of a call before all of it is there: the outputs of each microbatch, and the
//! gradients of its inputs.
//!
//! Both are handles to a call. They wait for a microbatch when it is read, not before, and never
//! start work.
//!
//! # Invariants
//! - What is read was confirmed after it arrived: a call that failed meanwhile gives its error
//!   instead.

use std::ops::Range;
use std::sync::Arc;

use roundpipe_tensor::transfer::HostValue;
use roundpipe_tensor::{HostBuf, HostTensor};

use super::core::Core;
use crate::batch::MergeOutput;
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::stage_value::{ChooseGrads, Grads, StageValue};
use crate::tree::{Tree, TreePath};

/// The outputs of a call, one tree per microbatch, some of which may not have been computed yet;
/// cloning shares them. As an input of another engine they chain both without a host wait, whole, or
/// in part ([`MicrobatchOutputs::get`], [`MicrobatchOutputs::at`]), also inside a list or a map
/// ([`Input::Nested`](super::Input::Nested)).
#[derive(Clone)]
pub struct MicrobatchOutputs {
    pub(crate) call: Arc<Call>,
    /// The samples of each microbatch, where they are known.
    pub(crate) samples: Option<Arc<[usize]>>,
    /// The part of each microbatch's output that this is.
    pub(crate) part: TreePath,
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

    /// The part under a key, where outputs are maps. Waits for nothing: who reads or uses it learns
    /// whether it is there.
    #[must_use]
    pub fn get(&self, key: &str) -> Self {
        Self {
            part: self.part.key(key),
            ..self.clone()
        }
    }

    /// The part at a position, where outputs are lists. Waits for nothing, as
    /// [`MicrobatchOutputs::get`].
    #[must_use]
    pub fn at(&self, index: usize) -> Self {
        Self {
            part: self.part.index(index),
            ..self.clone()
        }
    }

    /// Waits for one microbatch's output.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a part that is not there; what went wrong in the call.
    pub fn wait(&self, microbatch: usize) -> Result<Tree<HostTensor>> {
        // Read first, then confirmed: reports are complete only behind the copy.
        let output = to_host(&self.value(microbatch)?)?;
        self.call.confirm()?;
        Ok(output)
    }

    fn value(&self, microbatch: usize) -> Result<StageValue> {
        if microbatch >= self.len() {
            let what = format!("there is no microbatch {microbatch} of {}", self.len());
            return Err(Error::config("outputs", what));
        }
        let call = &self.call;
        let output = call.wait_output("caller", microbatch);
        let output = output.map_err(|error| call.take_error().unwrap_or(error))?;
        let (part, _) = self.part.find(&output)?;
        Ok(part.clone())
    }
}

impl std::fmt::Debug for MicrobatchOutputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "MicrobatchOutputs({} microbatches of {}{})",
            self.len(),
            self.call.spec.name,
            self.part
        )
    }
}

/// The gradients of a call's inputs, one list of leaves per microbatch, some of which may not have
/// been computed yet; cloning shares them.
#[derive(Clone)]
pub struct InputGrads {
    pub(crate) call: Arc<Call>,
    /// The leaves of each input by position, then by name.
    pub(crate) input_leaves: Arc<[InputLeaves]>,
    /// The inputs that these are of.
    pub(crate) inputs: Range<usize>,
}

/// Where the leaves of an input come from, in their order.
pub(crate) type InputLeaves = Vec<Leaves>;

/// Leaves of an input that come from one place.
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
        let inputs = self.inputs.clone();
        let Some(input) = inputs.clone().nth(index) else {
            let what = format!("there is no input {index} of {}", inputs.len());
            return Err(Error::config("input_grads", what));
        };
        Ok(Self {
            inputs: input..input + 1,
            ..self.clone()
        })
    }

    /// Where these lie among the gradients of all inputs, group by group.
    fn groups(&self) -> Result<Vec<(&Leaves, Range<usize>)>> {
        let mut groups = Vec::new();
        let mut end = 0;
        for (input, leaves) in self.input_leaves[..self.inputs.end].iter().enumerate() {
            for group in leaves {
                let start = end;
                end += group.count()?;
                if input >= self.inputs.start {
                    groups.push((group, start..end));
                }
            }
        }
        Ok(groups)
    }

    /// Chooses among the gradients of all inputs those of the outputs of `call`: by where they came
    /// from if some input did come from there, else by position.
    pub(crate) fn choose(&self, call: &Arc<Call>) -> Arc<ChooseGrads> {
        let inputs = self.inputs.clone();
        let mut groups = Vec::new();
        for (input, leaves) in self.input_leaves[..inputs.end].iter().enumerate() {
            let is_wanted = input >= inputs.start;
            groups.extend(leaves.iter().map(|group| match group {
                Leaves::Known(count) => (is_wanted, LeafGroup::Known(*count)),
                // Not the call itself, which will keep what is made here.
                Leaves::Of(outputs) if Arc::ptr_eq(&outputs.call, call) => {
                    (is_wanted, LeafGroup::Here(outputs.part.clone()))
                }
                Leaves::Of(outputs) => (is_wanted, LeafGroup::Elsewhere(outputs.clone())),
            }));
        }
        Arc::new(move |grads, output| choose(&groups, grads, output))
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
        // The call's own error says more than that a value will not come.
        let grads = grads.map_err(|error| call.take_error().unwrap_or(error))?;
        let mut read = Vec::new();
        for (_, leaves) in self.groups()? {
            for grad in &grads[leaves] {
                read.push(grad.as_ref().map(host_tensor).transpose()?);
            }
        }
        call.confirm()?;
        Ok(read)
    }
}

impl std::fmt::Debug for InputGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "InputGrads({} microbatches of {})",
            self.len(),
            self.call.spec.name
        )
    }
}

/// Waits for a host value and gives its bytes as a tensor.
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
            // It stays where it is, for calls that use it there.
            let host = HostBuf::zeroed("output", tensor.size_bytes())?;
            tensor.read_into(&mut host.write(0..host.len())?)?;
            Ok(HostTensor::new(host, tensor.dtype(), tensor.dims())?)
        }
        None => host_tensor(&leaf.host),
    })
}

/// Leaves of an input, as one of the calls that its values came from sees them.
enum LeafGroup {
    Known(usize),
    /// A part of that call's output.
    Here(TreePath),
    Elsewhere(MicrobatchOutputs),
}

/// Of the gradients of some inputs, those of `output`, each with its place among its leaves.
fn choose(
    groups: &[(bool, LeafGroup)],
    grads: &Grads,
    output: &StageValue,
) -> Result<Vec<(usize, HostValue)>> {
    let mut by_origin = Vec::new();
    let mut by_position = Vec::new();
    let mut came_from_here = false;
    let mut end = 0;
    for (is_wanted, group) in groups {
        let start = end;
        let mut place = None;
        end += match group {
            LeafGroup::Known(count) => *count,
            LeafGroup::Elsewhere(outputs) => outputs.value(0)?.leaves().len(),
            LeafGroup::Here(part) => {
                let (found, before) = part.find(output)?;
                place = Some(before);
                found.leaves().len()
            }
        };
        if !is_wanted {
            continue;
        }
        let grads = &grads[start..end];
        by_position.extend(grads);
        if let Some(place) = place {
            came_from_here = true;
            by_origin.extend((place..).zip(grads));
        }
    }
    let want = output.leaves().len();
    if !came_from_here && by_position.len() != want {
        let what = format!(
            "{} gradients for an output of {want} tensors",
            by_position.len()
        );
        return Err(Error::config("backward", what));
    }
    if !came_from_here {
        by_origin = by_position.into_iter().enumerate().collect();
    }
    let there = by_origin.into_iter();
    Ok(there
        .filter_map(|(leaf, grad)| Some((leaf, grad.clone()?)))
        .collect())
}

impl Leaves {
    /// Waits where it is not known yet.
    fn count(&self) -> Result<usize> {
        match self {
            Self::Known(count) => Ok(*count),
            Self::Of(outputs) => Ok(outputs.value(0)?.leaves().len()),
        }
    }
}

/// Reads what a call gives, as a part of it: what goes wrong here fails the call.
pub(super) fn read<R>(
    core: &Core,
    call: &Call,
    results: impl FnOnce(&Call) -> Result<R>,
) -> Result<R> {
    let results = results(call);
    // An output that cannot be merged is found by the caller's thread alone. The call must fail for
    // it: its gradients would otherwise count in the next step.
    if let Err(error) = &results
        && !error.is_secondary()
    {
        call.fail(Error::Cancelled {
            why: error.to_string(),
        });
    }
    // Only now may the call end: a failure above must reach it before it is committed.
    call.end_part();
    results.map_err(|error| core.failed(error))
}

/// How outputs that are returned at once are merged: they always are.
pub(super) fn merged(how: &MergeOutput) -> MergeOutput {
    match how {
        MergeOutput::Off => MergeOutput::Auto,
        other => other.clone(),
    }
}

pub(super) fn wait_outputs(call: &Call) -> Result<Vec<Tree<HostTensor>>> {
    let mut outputs = Vec::with_capacity(call.spec.microbatches);
    for microbatch in 0..call.spec.microbatches {
        let value = call.wait_output("caller", microbatch)?;
        outputs.push(to_host(&value)?);
        call.confirm()?;
    }
    Ok(outputs)
}
