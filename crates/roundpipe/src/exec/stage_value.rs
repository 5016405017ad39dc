//! The values that pass between the tasks of a call.

use std::ops::Range;
use std::sync::Arc;

use roundpipe_tensor::Tensor;
use roundpipe_tensor::transfer::HostValue;

use super::call::Call;
use crate::tree::Tree;

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

/// A leaf of a call's input: a value, or the whole output of another call's microbatch.
#[derive(Clone)]
pub(crate) enum Source {
    Value(Leaf),
    Output(Arc<Call>, usize),
}

/// Gradients of a stage's inputs or outputs, leaf by leaf; `None` where no gradient flows.
pub(crate) type Grads = Vec<Option<HostValue>>;

/// Gradients of a call's outputs for one microbatch.
pub(crate) enum Seed {
    Given(Grads),
    /// The input gradients of another call, or those of some of its leaves.
    Of(Arc<Call>, Option<Range<usize>>),
}

/// What a layer's recompute needs besides its input.
#[derive(Default)]
pub(crate) struct SavedForRecompute {
    /// What the layer saved itself.
    pub data: Vec<HostValue>,
    /// Buffers by their index among the layer's parameters, as the forward saw them.
    pub buffers: Vec<(usize, HostValue)>,
}
