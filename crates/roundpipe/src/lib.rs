//! roundpipe: train models far larger than a GPU's memory on one machine.
//!
//! A model is a [`Sequential`] of [`Layer`]s. A layer is parameters plus a forward; gradients come
//! from the tape. Weights live in host memory, a [`Worker`] computes, an [`Optimizer`] updates on
//! the host.
//!
//! The modules stand in data order: values between layers, batches and microbatches, layers,
//! ready-made layers, costs, plans and their simulation, run configurations, what threads are doing
//! and did, learning rates, optimizers, versions of weights, the store and its updates, executors,
//! the engine, and the rules that make engines of a tree of modules. This crate has no `unsafe`
//! code.
#![forbid(unsafe_code)]

pub mod error;
pub mod tree;

pub mod batch;

pub mod layer;
pub mod nn;

pub mod plan;

pub mod budget;
pub mod cost;
pub mod schedule;

pub mod timeline;

pub mod search;

pub mod config;

pub mod status;
pub mod trace;

pub mod lr;
pub mod optim;
pub mod scaler;

mod sync;
pub mod version;

pub mod store;
pub mod update;

pub mod optimizer;

pub mod devices;

mod exec;
#[cfg(loom)]
pub use exec::ending;

pub mod engine;
pub mod wrap;

pub use batch::{Cut, HostInputs, Merge, MergeOutput, SplitInput, SplitLabel};
pub use config::{Grain, Lag, LossReduction, OutputDevice, RunConfig};
pub use cost::{LayerCost, LayerCosts, LayerTimes};
pub use devices::Devices;
pub use engine::{Forward, Input, Inputs, Losses, RoundPipe, TrainOutput};
pub use error::{Error, Result, TaskPlace};
pub use exec::ring::{Ring, RingOptions};
pub use layer::{Layer, Module, ParamVisitor, Params, Sequential};
pub use lr::LrSchedule;
pub use optim::{Rule, Update};
pub use optimizer::Optimizer;
pub use plan::{ExecutePlan, Pass, PlanKind, Stage};
pub use roundpipe_tensor::{
    Bytes, CostModel, Cpu, Cuda, CustomOp, Cx, DType, Device, DeviceKind, Element, Gradients,
    HostBuf, HostMut, HostRef, HostTensor, Meta, Param, Pin, Pins, RngKey, RngSite, Shape, Tensor,
    Worker, bf16, f16, kernel, ops,
};
pub use roundpipe_tensor::{Error as TensorError, Result as TensorResult};
pub use scaler::GradScaler;
pub use search::AutoOptions;
pub use status::{Board, Watchdog};
pub use store::{Store, StoreConfig};
pub use timeline::{Schedule, Setting, Timeline, simulate, simulate_models};
pub use trace::{Span, Trace};
pub use tree::Tree;
pub use wrap::{AutoWrapped, Composite, Node, WrapConfig, Wrapped, wrap};
