//! roundpipe: train models far larger than a GPU's memory on one machine.
//!
//! A model is a [`Sequential`] of [`Layer`]s. A layer is parameters plus a forward; gradients come
//! from the tape. [`RoundPipe`] runs it: weights, gradients and optimizer state live in host memory,
//! and stages of layers go round-robin over the workers. The page of [`engine`] has a training loop.
//! Without an engine, a [`Worker`] computes and an [`Optimizer`] updates.
//!
//! | to | see |
//! |---|---|
//! | write a layer | [`Module`], [`Layer`], [`Params`], [`Cx`]; ready-made ones in [`nn`] |
//! | read data | [`data`] |
//! | train | [`RoundPipe::builder`], [`RoundPipe::forward_backward`], [`RoundPipe::update`] |
//! | say how a batch is split | [`RunConfig`], [`LossReduction`], [`Inputs`] |
//! | choose the update | [`optim`], [`lr`], [`Update`], [`GradScaler`] |
//! | choose the devices | [`Devices`], [`Ring`] |
//! | save a run and go on later | [`checkpoint`], [`RoundPipe::save`], [`RoundPipe::restore`], [`Checkpoints`] |
//! | see what happens | [`trace`], [`RoundPipe::status`], [`Ring::budgets`] |
//! | cut a model by hand, or simulate a plan | [`ExecutePlan`], [`timeline`], [`cost`] |
//! | make engines of a tree of modules | [`wrap`](mod@wrap) |
//!
//! The modules stand in data order, and each uses only those above it: values between layers,
//! batches and microbatches, layers, plans and costs, run configurations, what threads are doing and
//! did, learning rates and rules, versions of weights, the store and its updates, checkpoints,
//! executors, the engine. This crate has no `unsafe` code.
#![forbid(unsafe_code)]

mod error;
mod planted;
mod sync;
mod tree;

mod batch;

pub mod data;

mod layer;
pub mod nn;

mod plan;

mod budget;
pub mod cost;
mod schedule;

pub mod timeline;

mod search;

mod config;

mod status;
pub mod trace;

pub mod lr;
pub mod optim;
mod scaler;

mod groups;

mod version;

mod store;
mod update;

mod optimizer;

mod devices;

pub mod checkpoint;

mod exec;

pub mod engine;

mod checkpoints;

pub mod wrap;

pub use batch::{Cut, HostInputs, InputsOf, Merge, MergeOutput, SplitInput, SplitLabel};
pub use budget::{ActivationUse, HostBudget, PieceRoom, StageRoom, WorkerBudget};
pub use checkpoint::{Checkpoint, SaveReport, Saving};
pub use checkpoints::{Checkpoints, Newest};
pub use config::{Grain, Lag, LossReduction, OutputDevice, RunConfig};
pub use cost::{LayerCost, LayerCosts, LayerTimes, MachineRates};
pub use devices::Devices;
pub use engine::{
    Forward, HookHandle, HostLoss, Input, Inputs, LayerGradient, LayerOutput, Losses, ParamState,
    Restored, RoundPipe, TrainOutput, TrainingState,
};
pub use error::{Error, Result, TaskPlace};
pub use exec::ring::{Ring, RingOptions};
pub use groups::{ParamGroup, ParamRule};
pub use layer::{Layer, Module, ParamVisitor, Params, Sequential};
pub use lr::LrSchedule;
pub use optim::{MomentType, Rule, StepReport, Update};
pub use optimizer::Optimizer;
pub use plan::{ExecutePlan, Pass, PlanKind, Stage};
pub use roundpipe_tensor::{
    AttentionRate, Bytes, CostModel, Cpu, Cuda, CustomOp, Cx, DType, Device, DeviceKind, DiskSpace,
    Element, Gradients, Hits, HostBuf, HostMut, HostRef, HostTensor, Keeper, KernelRates, Meta,
    Param, ParamId, Pin, Pins, Quantization, Recording, RngKey, RngSite, Shape, Tensor, Worker,
    bf16, f16, fp8, host_memory, kernel, ops, quant,
};
pub use roundpipe_tensor::{Error as TensorError, Result as TensorResult};
pub use scaler::{GradScaler, ScalerState};
pub use search::AutoOptions;
pub use status::{Report, StatusLine};
pub use store::StoreBytes;
pub use timeline::{Schedule, Setting, Timeline, simulate, simulate_models};
pub use trace::{Span, Trace};
pub use tree::Tree;
#[doc(hidden)]
pub use tree::node::TreeFields;
pub use tree::node::TreeNode;
pub use update::{OptimHandle, OptimParam, OptimParams};
pub use wrap::{AutoWrapped, Composite, Node, WrapConfig, Wrapped, wrap};

/// What only the tests of this crate need: the store and the protocol of its versions. Not a part of
/// the public interface.
#[doc(hidden)]
pub mod testing {
    pub use crate::checkpoint::write::{SaveTarget, ShardLimits, SpareMemory};
    #[cfg(loom)]
    pub use crate::exec::ending;
    pub use crate::groups::ResolvedGroups;
    pub use crate::optim::Decision;
    pub use crate::store::{Segment, Store, StoreConfig};
    pub use crate::update::{Apply, FunctionVersions, LateMoments};
    pub use crate::version::{
        Abort, Aborted, Gate, Hold, MomentsTicket, ReadTicket, Versions, WriteTicket,
    };
}
