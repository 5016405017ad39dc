//! Memory, lanes, tensors, tape and operations of roundpipe.
//!
//! The modules stand in data order: bytes and shapes, memory, devices and their order, tensors, the
//! tape, operations, then the backends that run them. Each uses only those above it (the backends
//! implement the traits of [`device`]). This is the only crate of the project with `unsafe` code.
//!
//! ```
//! use roundpipe_tensor::{Bytes, Cpu, Cx, Worker};
//!
//! # fn main() -> roundpipe_tensor::Result<()> {
//! let worker = Worker::new(Cpu::new(None)?, Bytes::mib(64))?;
//! let mut cx = Cx::train(&worker);
//! let x = cx.tensor(&[1.0f32, 2.0, 3.0], &[3])?;
//! let x = cx.input(&x)?;
//! let y = cx.mul(&x, &x)?;
//! let loss = cx.sum_all(&y)?;
//! let grads = cx.backward(&loss)?;
//! assert_eq!(grads.of(&x).unwrap().to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```

pub mod bytes;
pub mod dtype;
pub mod error;
pub mod shape;

mod pages;
mod sync;

pub mod disk_space;
pub mod host;
pub mod host_memory;
pub mod host_tensor;
pub mod nvtx;
pub mod pins;
pub mod rng;

pub mod fp8;
pub mod quant;

pub mod kernel;
pub mod rates;
mod work;

pub mod device;

pub mod kernel_times;

pub mod pool;

pub mod tensor;

pub mod repeat;
pub mod worker;

pub mod transfer;

pub mod param;
pub mod tape;

pub mod cx;
pub mod ops;

pub mod cpu;
pub mod cuda;
pub mod meta;
pub mod optim;
pub mod sim;

mod backends;

pub use bytes::Bytes;
pub use cpu::Cpu;
pub use cuda::Cuda;
pub use cx::{CustomOp, Cx, Gradients, Recompute};
pub use device::{CostModel, Device, DeviceId, DeviceKind, Faults, LaneKind};
pub use disk_space::DiskSpace;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use fp8::Fp8;
pub use half::{bf16, f16};
pub use host::{HostBuf, HostMark, HostMut, HostRef, Pin};
pub use host_tensor::{Hits, HostTensor};
pub use kernel_times::KernelTime;
pub use meta::Meta;
pub use param::{Keeper, Param, ParamId};
pub use pins::Pins;
pub use quant::Quantization;
pub use rates::{AttentionRate, KernelRates};
pub use repeat::{KeepChoice, PassSteps, Watch, Watched};
pub use rng::{RngKey, RngSite};
pub use shape::Shape;
pub use sim::SimWorld;
pub use tensor::Tensor;
pub use worker::{Recording, Worker};
