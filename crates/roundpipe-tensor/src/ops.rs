//! Operations on tensors, as methods of [`Cx`](crate::cx::Cx), one file per family.
//!
//! Every method follows one shape: check the operands (naming the operation and both shapes when
//! they do not fit), allocate the result, launch the kernel, record how gradients flow back.
//! Nothing is allocated before the sizes are checked. Where a kernel wants dense operands a strided
//! one is copied first. Operands must share a type; nothing is converted silently.

mod arith;
mod attention;
mod cache;
mod custom;
mod decode;
mod decode_block;
mod fp8;
mod image;
mod index;
mod loss;
mod moe;
mod norm;
mod product;
mod quantized;
mod random;
mod reduce;
mod rope;
mod shape;

pub use attention::Attention;
pub use decode::{LinearMap, NewHeads, NormWeight};
pub use decode_block::DecodeBlock;
pub use fp8::{Fp8Rows, ProjectionInput};
pub use loss::{CrossEntropy, Reduction};
pub use moe::{Experts, MoeOptions, RouteWeights, Routing};
pub use norm::BatchNorm;
pub use product::Lora;
pub use quantized::Quantized;
pub use rope::rope_tables;
