//! The cuda backend: NVIDIA GPUs through the driver, found at run time.
//!
//! Nothing of CUDA is needed to build or start: the driver, NVRTC, cuBLASLt and cuDNN are looked
//! for when the first GPU is opened ([`library`]). Kernels are written in CUDA C++, compiled for
//! the GPU at hand and kept on disk ([`compile`]); products are cuBLASLt's.
//!
//! Lanes are streams, events are events. A [`Cuda`] is one worker; several may share a card, each
//! with its own lanes and its own part of the memory.
//!
//! | files | what |
//! |---|---|
//! | `context.rs`, `device.rs` | a card, shared by its workers; a worker on it |
//! | `lane.rs`, `event.rs`, `clock.rs` | streams, points in them, and when they were passed |
//! | `memory.rs`, `faults.rs` | reserved and pinned memory; where kernels report bad data |
//! | `library.rs`, `compile.rs`, `call.rs` | CUDA's libraries; kernels from text; launches |
//! | `tensor_map.rs` | tensors as Hopper's copy engine sees them |
//! | `ops.rs`, `costs.rs` | from a kernel to its family; what planning knows of a GPU |
//! | all others | one family of kernels each, as in `kernel.rs` |
//!
//! # What kernels report
//! A kernel that meets an index out of range writes a word of host memory and goes on with index 0;
//! the next fence of that worker returns it as an error. So no launch ever waits.
//!
//! # Invariants
//! - The result of a kernel depends on its operands alone: floats are added in fixed
//!   orders.
//! - Memory is taken once per worker, plainly; nothing is allocated afterwards.
//! - No call here prints or ends the process. After an error that the driver does not recover from,
//!   the card is lost: every later call returns that same error; other devices go on.
//! - Nothing waits for the device but fences, the first product of a shape ([`product`]), copies of
//!   pageable memory, and a stamp every few seconds ([`clock`]).

mod attention;
mod backlog;
mod call;
mod clock;
pub mod compile;
mod context;
mod costs;
mod decode;
mod decode_block;
mod device;
mod elementwise;
mod event;
mod faults;
mod fp8;
mod graph;
mod image;
mod index;
mod lane;
pub mod library;
mod loss;
mod memory;
mod moe;
mod norm;
mod ops;
mod product;
mod quantized;
mod reduce;
mod rope;
mod tensor_map;

pub(crate) use costs::WITH_CUDNN;
pub use device::Cuda;
pub use ops::units;

/// The first compute capability whose tensor cores multiply 8-bit floats: Ada's.
const FP8_CARD: i32 = 89;

#[cfg(test)]
mod tests;
