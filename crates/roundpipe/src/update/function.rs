//! What a function of the user sees of the optimizer's state, in a step and between steps.

use roundpipe_tensor::optim::Floats;
use roundpipe_tensor::{HostBuf, Param, Shape};

use super::open::{OpenLayer, OpenParam};
use crate::error::Result;

/// All optimizer copies, for a function of the user.
pub struct OptimParams<'a> {
    pub(super) layers: Vec<OpenLayer<'a>>,
}

/// One optimizer copy.
#[derive(Debug)]
pub struct OptimParam<'a> {
    /// Full dotted name.
    pub name: &'a str,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    /// The values, to be changed.
    pub value: &'a mut [f32],
    /// The gradient as stored; `None` when there is none.
    pub grad: Option<Floats<'a>>,
}

impl<'a> OptimParams<'a> {
    /// All of them, in model order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = OptimParam<'_>> {
        self.each().map(OpenParam::view)
    }

    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut OpenParam<'a>> {
        self.layers.iter_mut().flat_map(|layer| &mut layer.params)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.params.len()).sum()
    }

    /// Whether nothing is trainable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl OptimParam<'_> {
    /// The gradient as f32, where there is one.
    pub fn grad_f32(&self) -> Option<Vec<f32>> {
        Some(match self.grad? {
            Floats::F32(grad) => grad.to_vec(),
            Floats::BF16(grad) => grad.iter().map(|x| x.to_f32()).collect(),
            Floats::F16(grad) => grad.iter().map(|x| x.to_f32()).collect(),
        })
    }
}

/// An optimizer copy to read, and the rule's state with it.
#[derive(Debug, Clone)]
pub struct OptimHandle {
    /// Full dotted name.
    pub name: String,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    pub(super) param: Param,
    pub(super) master: Option<HostBuf>,
    pub(super) moments: Vec<HostBuf>,
}

impl OptimHandle {
    /// Where the newest values lie, as f32. For f32 weights this is the weights, which move with
    /// every version.
    pub fn value(&self) -> HostBuf {
        self.master.clone().unwrap_or_else(|| self.param.data())
    }

    /// Where the rule's state lies, as f32, in the rule's order.
    pub fn moments(&self) -> &[HostBuf] {
        &self.moments
    }

    /// A copy of the newest values.
    ///
    /// # Errors
    /// While an update writes them.
    pub fn to_vec(&self) -> Result<Vec<f32>> {
        Ok(self.value().read_all()?.as_slice().to_vec())
    }
}
