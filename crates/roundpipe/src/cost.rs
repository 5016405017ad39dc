//! What a layer costs, known before anything is computed.

use roundpipe_tensor::meta::{self, Given, Profile};
use roundpipe_tensor::{Cx, DeviceKind, Result, Tensor};

use crate::layer::Layer;
use crate::tree::Tree;

/// Bytes and FLOPs of a layer's forward, recompute and backward on a device of `kind`, for inputs of these
/// types and shapes. One input is passed as a tensor, several as a list.
///
/// # Errors
/// What the layer reports for such inputs.
pub fn profile(layer: &dyn Layer, kind: DeviceKind, inputs: &[Given]) -> Result<Profile> {
    meta::profile(kind, inputs, |cx: &mut Cx, tensors: &[Tensor]| {
        let input = match tensors {
            [one] => Tree::Tensor(one.clone()),
            many => Tree::List(many.iter().cloned().map(Tree::Tensor).collect()),
        };
        let output = layer.run(cx, input)?;
        Ok(output.leaves().into_iter().cloned().collect())
    })
}
