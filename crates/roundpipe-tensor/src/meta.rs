//! The meta backend: shapes only.
//!
//! It runs the same operations through the same pool as a real device, without memory or
//! arithmetic, and counts. Addresses, scratch and the order of allocations are those of the device
//! it stands for, so its peak is that device's peak to the byte, known before anything is loaded.
//!
//! It refuses to give data: reading a value on the host is an error.
//!
//! # What is counted
//! - `flops`: a product of m·k by k·n is 2·m·n·k; attention counts the pairs that the mask leaves
//!   visible; elementwise work counts one per element written. Packed sequences count as one long
//!   one, and groups of experts as all rows: upper bounds where the answer depends on data.
//! - `traffic`: bytes of every operand, read or written once.
//! - `time_ns`: by [`KernelRates`](crate::KernelRates), for a device that is described.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::bytes::Bytes;
use crate::cx::Cx;
use crate::device::{
    Arena, Copy, CostModel, Device, DeviceId, DeviceKind, Direction, Event, Faults, Lane, LaneKind,
    Ops,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{DecodeBlockSizes, Kernel, View};
use crate::shape::Shape;
use crate::sync::lock;
use crate::tensor::Tensor;
use crate::work::{bytes, flops};
use crate::worker::Worker;

/// What a piece of work costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of operands read and written.
    pub traffic: u64,
    /// Kernels launched.
    pub kernels: u64,
    /// Nanoseconds that they take, where the device that is stood for says what its kernels reach
    /// ([`CostModel::with_rates`]); else 0.
    pub time_ns: u64,
    /// Bytes the arena must have: everything alive at the worst moment, and the holes between.
    pub peak: u64,
    /// Bytes still alive at the end.
    pub kept: u64,
}

/// What a layer costs in the three ways the engine runs it. Peaks include the inputs, and in
/// backward the gradients of outputs, inputs and parameters.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Without a tape.
    pub forward: Cost,
    /// With a tape.
    pub recompute: Cost,
    /// From output gradients back, after `recompute` in the same memory.
    pub backward: Cost,
    /// Type and shape of each output.
    pub outputs: Vec<(DType, Shape)>,
}

/// An input of a profiled function.
#[derive(Debug, Clone, Copy)]
pub struct Given {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
    /// Whether its gradient is wanted.
    pub grad: bool,
}

/// A device that counts instead of computing.
pub struct Meta {
    like: CostModel,
    index: u32,
    memory: Bytes,
    lanes: [MetaLane; 5],
    ops: MetaOps,
}

impl Meta {
    /// Stands for another device, or for any of a kind; `sim` counts like `cpu`.
    pub fn like(device: impl Into<CostModel>) -> Arc<Self> {
        Self::numbered(device, 0, Bytes(1 << 60))
    }

    /// One of several devices of a machine, each with so much memory free.
    pub fn numbered(device: impl Into<CostModel>, index: u32, memory: Bytes) -> Arc<Self> {
        let like = device.into();
        let ops = MetaOps {
            like,
            cost: Mutex::default(),
        };
        Arc::new(Self {
            like,
            index,
            memory,
            lanes: LaneKind::ALL.map(MetaLane),
            ops,
        })
    }

    /// What was counted so far; `peak` and `kept` are a worker's and stay 0 here.
    pub fn cost(&self) -> Cost {
        *lock(&self.ops.cost)
    }
}

/// Runs `body` on a fresh worker that stands for `device` and says what it cost.
///
/// # Errors
/// What `body` reports.
pub fn measure<R>(
    device: impl Into<CostModel>,
    body: impl FnOnce(&Worker) -> Result<R>,
) -> Result<(R, Cost)> {
    let meta = Meta::like(device);
    let worker = Worker::new(meta.clone(), Bytes(1 << 60))?;
    let out = body(&worker)?;
    let usage = worker.usage();
    Ok((
        out,
        Cost {
            peak: usage.high_water.0,
            kept: usage.used.0,
            ..meta.cost()
        },
    ))
}

/// Costs of a function of tensors (a layer), each way it is run.
///
/// # Errors
/// What the function reports.
pub fn profile(
    device: impl Into<CostModel>,
    given: &[Given],
    f: impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Profile> {
    let like = device.into();
    let inputs = |cx: &mut Cx| -> Result<Vec<Tensor>> {
        let place = |g: &Given| {
            let tensor = cx.worker().alloc("input", g.dtype, g.shape)?;
            if g.grad {
                cx.input(&tensor)
            } else {
                Ok(tensor)
            }
        };
        given.iter().map(place).collect()
    };
    let (outputs, forward) = measure(like, |worker| {
        let mut cx = Cx::new(worker, false, true);
        let x = inputs(&mut cx)?;
        f(&mut cx, &x)
    })?;
    let ((), recompute) = measure(like, |worker| {
        let mut cx = Cx::new(worker, true, true);
        let x = inputs(&mut cx)?;
        f(&mut cx, &x).map(drop)
    })?;
    let ((), both) = measure(like, |worker| {
        let mut cx = Cx::new(worker, true, true);
        let x = inputs(&mut cx)?;
        let y = f(&mut cx, &x)?;
        drop(x);
        let seeds: Vec<(Tensor, Tensor)> = y
            .iter()
            .filter(|t| t.requires_grad())
            .map(|t| Ok((t.clone(), worker.alloc("gradient", t.dtype(), *t.shape())?)))
            .collect::<Result<_>>()?;
        if seeds.is_empty() {
            Ok(())
        } else {
            cx.backward_from(&seeds).map(drop)
        }
    })?;
    let backward = Cost {
        flops: both.flops - recompute.flops,
        traffic: both.traffic - recompute.traffic,
        kernels: both.kernels - recompute.kernels,
        time_ns: both.time_ns - recompute.time_ns,
        ..both
    };
    let outputs = outputs.iter().map(|t| (t.dtype(), *t.shape())).collect();
    Ok(Profile {
        forward,
        recompute,
        backward,
        outputs,
    })
}

impl fmt::Debug for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Meta(like {:?}, {:?})", self.like, self.cost())
    }
}

// SAFETY: nothing here touches memory; host buffers are `HostBuf::zeroed`.
unsafe impl Device for Meta {
    fn id(&self) -> DeviceId {
        DeviceId {
            kind: DeviceKind::Meta,
            index: self.index,
            worker: 0,
        }
    }

    fn memory(&self) -> Bytes {
        self.memory
    }

    fn reserve(&self, bytes: Bytes) -> Result<Arena> {
        // SAFETY: aligned; this device never touches memory.
        Ok(unsafe { Arena::new(1 << 40, bytes, Box::new(())) })
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        &self.lanes[kind as usize]
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }

    fn cost_model(&self) -> CostModel {
        self.like
    }

    fn lacks_fp8(&self) -> Option<String> {
        let rates = self.like.rates()?;
        let what = || format!("the device that {} stands for has no fp8", self.id());
        rates.fp8_products.is_none().then(what)
    }

    fn moves_bytes(&self) -> bool {
        false
    }

    fn aliases_host(&self) -> bool {
        self.like.aliases_host()
    }
}

#[derive(Debug)]
struct MetaLane(LaneKind);

// SAFETY: copies touch nothing, so every event has passed.
unsafe impl Lane for MetaLane {
    fn kind(&self) -> LaneKind {
        self.0
    }

    unsafe fn copy(&self, copy: &Copy) -> Result<()> {
        match copy.direction {
            // The other lanes move values that the host does not read.
            Direction::Download if self.0 == LaneKind::Compute => Err(Error::Meta { op: "read" }),
            _ => Ok(()),
        }
    }

    fn record(&self) -> Result<Event> {
        Ok(Event::past())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        event.fence()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MetaOps {
    like: CostModel,
    cost: Mutex<Cost>,
}

// SAFETY: kernels touch nothing.
unsafe impl Ops for MetaOps {
    unsafe fn launch(
        &self,
        _lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        _scratch: Option<View>,
        _faults: Option<&Faults>,
    ) -> Result<()> {
        let traffic = src.iter().chain(dst).flatten().map(bytes).sum::<u64>();
        let rates = self.like.rates();
        let known = rates.and_then(|rates| rates.packed_pairs(kernel, src));
        let flops = flops(kernel, src, dst, known);
        let time_ns = rates.map_or(0, |rates| {
            (1e9 * rates.seconds(kernel, src, flops, traffic)) as u64
        });
        let mut cost = lock(&self.cost);
        cost.flops = cost.flops.saturating_add(flops);
        cost.traffic += traffic;
        cost.kernels += 1;
        cost.time_ns = cost.time_ns.saturating_add(time_ns);
        Ok(())
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        self.like.scratch(kernel, src, dst)
    }

    fn min_gemm_rows(&self) -> usize {
        self.like.min_gemm_rows()
    }

    fn few_rows(&self) -> usize {
        self.like.few_rows()
    }

    fn takes_block(&self, sizes: &DecodeBlockSizes) -> bool {
        self.like.takes_block(sizes)
    }
}
