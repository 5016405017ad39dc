//! The values that pass between the tasks of a call.

use std::sync::Arc;

use roundpipe_tensor::Tensor;
use roundpipe_tensor::transfer::HostValue;

use super::call::Call;
use crate::error::Result;
use crate::tree::{Tree, TreePath};

/// A tensor that one worker keeps for the calls that follow.
#[derive(Debug)]
pub(crate) struct Resident {
    pub worker: usize,
    pub tensor: Tensor,
}

/// A leaf of a value between stages.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub host: HostValue,
    /// Whether a gradient will come back for it.
    pub grad: bool,
    /// Whether every microbatch has the same value. It is then uploaded once per worker.
    pub constant: bool,
    /// An output that stayed on its worker; `host` is then a device-only value.
    pub resident: Option<Arc<Resident>>,
}

impl Leaf {
    /// A value in host memory or on its way there.
    pub fn new(host: HostValue, grad: bool) -> Self {
        Self {
            host,
            grad,
            constant: false,
            resident: None,
        }
    }
}

/// A value between stages.
pub(crate) type StageValue = Tree<Leaf>;

/// A leaf of a call's input: a value, or the output of another call's microbatch or a part of it.
#[derive(Clone)]
pub(crate) enum Source {
    Value(Leaf),
    Output {
        call: Arc<Call>,
        microbatch: usize,
        part: TreePath,
    },
}

/// Gradients of a stage's inputs or outputs, leaf by leaf; `None` where no gradient flows.
pub(crate) type Grads = Vec<Option<HostValue>>;

/// Gradients of a call's outputs for one microbatch.
pub(crate) enum Seed {
    Given(Grads),
    /// Gradients that other calls compute for their inputs, which are added in this order.
    Of(Vec<SeedOf>),
}

/// Input gradients of another call, as gradients of this call's outputs.
pub(crate) struct SeedOf {
    pub call: Arc<Call>,
    pub choose: Arc<ChooseGrads>,
}

/// Which of a call's input gradients are of a given output, each with its place among the leaves of
/// that output. Both calls have made that microbatch, so it waits for nothing.
pub(crate) type ChooseGrads =
    dyn Fn(&Grads, &StageValue) -> Result<Vec<(usize, HostValue)>> + Send + Sync;

/// What a layer's recompute needs besides its input.
#[derive(Default)]
pub(crate) struct SavedForRecompute {
    /// What the layer saved itself.
    pub data: Vec<HostValue>,
    /// Buffers by their index among the layer's parameters, as the forward saw them.
    pub buffers: Vec<(usize, HostValue)>,
    /// Pieces of the forward by number: in host memory, or only on its worker, which keeps them if
    /// it can.
    pub kept: Vec<(usize, HostValue)>,
    /// Of the forward that kept them.
    pub signature: u64,
}
