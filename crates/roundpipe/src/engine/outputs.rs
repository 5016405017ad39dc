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
use crate::exec::stage_value::StageValue;
use crate::tree::Tree;

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
        // Read first, then confirmed: reports are complete only behind the copy.
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
            self.call.spec.name
        )
    }
}

/// The gradients of a call's inputs, one list of leaves per microbatch, some of which may not have
/// been computed yet; cloning shares them.
#[derive(Clone)]
pub struct InputGrads {
    pub(crate) call: Arc<Call>,
    /// The leaves of each input by position, then by name.
    pub(crate) input_leaves: Vec<Leaves>,
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
        if index >= self.input_leaves.len() {
            let what = format!("there is no input {index} of {}", self.input_leaves.len());
            return Err(Error::config("input_grads", what));
        }
        if self.input_leaves.len() == 1 {
            return Ok(self.clone());
        }
        // Gradients lie leaf by leaf, so the leaves of the inputs before this one are skipped.
        let counts: Vec<usize> = self.input_leaves[..=index]
            .iter()
            .map(Leaves::count)
            .collect();
        let start = counts[..index].iter().sum();
        let input_leaves = std::iter::once(self.input_leaves[index].clone()).collect();
        Ok(Self {
            call: self.call.clone(),
            input_leaves,
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
        // The call's own error says more than that a value will not come.
        let grads = grads.map_err(|error| call.take_error().unwrap_or(error))?;
        let leaves = self.leaves.clone().unwrap_or(0..grads.len());
        let mut read = Vec::with_capacity(leaves.len());
        for grad in &grads[leaves] {
            read.push(grad.as_ref().map(host_tensor).transpose()?);
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

impl Leaves {
    /// Waits where it is not known yet.
    fn count(&self) -> usize {
        match self {
            Self::Known(count) => *count,
            Self::Of(outputs) => match outputs.call.wait_output("caller", 0) {
                Ok(output) => output.leaves().len(),
                // The gradients of a call whose input failed are never made: reading them returns
                // the error.
                Err(_) => 0,
            },
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
