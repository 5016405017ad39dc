//! What a function of the user sees of the optimizer's state, in a step and between steps.

use roundpipe_tensor::optim::Floats;
use roundpipe_tensor::{DType, HostBuf, Param, Shape};

use super::open::{OpenLayer, OpenParam};
use crate::error::Result;
use crate::optim::floats;

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
        Some(self.grad?.to_vec_f32())
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
    /// Element type of the value and of the moments: f32, unless
    /// [`Builder::optim_dtype`](crate::engine::Builder::optim_dtype) says otherwise.
    pub dtype: DType,
    pub(super) param: Param,
    pub(super) master: Option<HostBuf>,
    pub(super) moments: Vec<HostBuf>,
    pub(super) moment_shapes: Vec<Shape>,
}

impl OptimHandle {
    /// Where the newest values lie. For weights that have no copy this is the weights, which move
    /// with every version.
    pub fn value(&self) -> HostBuf {
        self.master.clone().unwrap_or_else(|| self.param.data())
    }

    /// Where the rule's state lies, in the rule's order.
    pub fn moments(&self) -> &[HostBuf] {
        &self.moments
    }

    /// The sizes of each of the moments: those of the parameter, or of its rows and columns.
    pub fn moment_shapes(&self) -> &[Shape] {
        &self.moment_shapes
    }

    /// A copy of the newest values, as f32.
    ///
    /// # Errors
    /// While an update writes them.
    pub fn to_vec(&self) -> Result<Vec<f32>> {
        let values = self.value().read_all()?;
        Ok(floats(self.dtype, &values).to_vec_f32())
    }
}
