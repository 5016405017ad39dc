//! A worker on a card: five streams, its share of the memory, and the mathematics.
//!
//! Opening a worker looks for the driver and refuses a card that is too old or not there, in one
//! line that names the cause.
//!
//! # Invariants
//! - A worker has one lane of each kind, all in the context of its card.
//! - Its memory is reserved once; nothing is allocated on the card afterwards.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;

use super::attention::BackwardWays;
use super::backlog::Backlog;
use super::context::{Gpu, card, failed, find, lacks_fp8, too_old};
use super::costs::cost_model;
use super::faults::ErrorWord;
use super::graph::CudaGraph;
use super::lane::CudaLane;
use super::memory::BarrierWord;
use super::ops::{CudaOps, trap};
use super::{attention, library};
use crate::bytes::Bytes;
use crate::device::{Arena, CostModel, Device, DeviceId, FaultReport, Lane, LaneKind, Ops, Replay};
use crate::error::Result;
use crate::host::{HostBuf, Pin};
use crate::pins::Pins;

/// A worker on an NVIDIA GPU.
pub struct Cuda {
    pub(super) id: DeviceId,
    pub(super) gpu: Arc<Gpu>,
    lanes: [CudaLane; 5],
    ops: CudaOps,
    total: u64,
}

impl Cuda {
    /// How many GPUs there are.
    ///
    /// # Errors
    /// One line that says which library is missing and how to get it.
    pub fn count() -> Result<usize> {
        library::driver()?;
        result::init().map_err(|e| failed(0, "start the driver", e))?;
        let count = result::device::get_count().map_err(|e| failed(0, "count the devices", e))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Why a GPU that is there would be refused, asked without opening it; `None` for one that can
    /// be used.
    ///
    /// # Errors
    /// When a library is missing or there is no such GPU.
    pub fn refuses(index: u32) -> Result<Option<String>> {
        let (device, capability) = find(index)?;
        let name = result::device::get_name(device).unwrap_or_else(|_| "a GPU".to_owned());
        Ok(too_old(capability).map(|why| format!("{name}: {why}")))
    }

    /// One worker on a GPU.
    ///
    /// # Errors
    /// As [`Cuda::workers`].
    pub fn new(index: u32) -> Result<Arc<Self>> {
        Ok(Self::workers(index, 1)?.remove(0))
    }

    /// `count` workers on one GPU, each with lanes of its own.
    ///
    /// # Errors
    /// When a library is missing, there is no such GPU, or it is too old.
    pub fn workers(index: u32, count: usize) -> Result<Vec<Arc<Self>>> {
        let gpu = Gpu::open(index)?;
        (0..count.max(1))
            .map(|worker| Self::on(&gpu, worker as u32))
            .collect()
    }

    fn on(gpu: &Arc<Gpu>, worker: u32) -> Result<Arc<Self>> {
        gpu.enter()?;
        let id = DeviceId {
            worker,
            ..card(gpu.index)
        };
        let alarm = Arc::new(ErrorWord::new(gpu)?);
        let range = result::stream::get_priority_range()
            .map_err(|e| gpu.failed("ask for priorities", e))?;
        let lane = |kind: LaneKind| {
            // Tasks wait for activations; weights and gradients fill the gaps. Lower is sooner.
            let priority = match kind {
                LaneKind::Compute => 0,
                LaneKind::ActivationUpload | LaneKind::ActivationDownload => range.1,
                LaneKind::ParamUpload | LaneKind::GradDownload => range.0,
            };
            let barrier = BarrierWord::new(gpu)?;
            let made = result::stream::create_with_priority(
                result::stream::StreamKind::NonBlocking,
                priority,
            );
            let stream = made.map_err(|e| gpu.failed("make a stream", e))?;
            let lane = CudaLane {
                kind,
                stream,
                barrier,
                backlog: Backlog::default(),
                gpu: gpu.clone(),
                id,
                alarm: alarm.clone(),
            };
            lane.barrier.clear(stream)?;
            Ok(lane)
        };
        let lanes = LaneKind::ALL
            .iter()
            .map(|kind| lane(*kind))
            .collect::<Result<Vec<_>>>()?;
        let lanes = lanes.try_into().expect("five kinds give five lanes");
        // SAFETY: the device handle is valid.
        let total = unsafe { result::device::total_mem(gpu.device) }
            .map_err(|e| gpu.failed("ask for memory", e))?;
        let ops = CudaOps {
            gpu: gpu.clone(),
            alarm,
        };
        Ok(Arc::new(Self {
            id,
            gpu: gpu.clone(),
            lanes,
            ops,
            total: total as u64,
        }))
    }

    /// The costs of any GPU on a machine where cuDNN does not run the backward of attention, which
    /// then wants less memory. `DeviceKind::Cuda.into()` are those where it may.
    pub fn costs_without_cudnn() -> CostModel {
        cost_model(BackwardWays::Own)
    }

    /// The costs of a GPU of this compute capability on a machine with cuDNN.
    pub fn costs_of(capability: (i32, i32)) -> CostModel {
        cost_model(BackwardWays::with_library(capability))
    }

    /// Why attention is slower than it could be on this machine's GPUs, in one line: which cuDNN
    /// was found where, its version, and what computes instead. `None` where cuDNN is used.
    pub fn attention_note() -> Option<String> {
        attention::note()
    }

    /// As the driver names the card.
    pub fn name(&self) -> String {
        result::device::get_name(self.gpu.device).unwrap_or_else(|_| "a GPU".to_owned())
    }

    /// All memory of the card, whether it is free or not.
    pub fn total_memory(&self) -> Bytes {
        Bytes(self.total)
    }

    /// The card's place on the bus, as Linux lists it under `/sys/bus/pci/devices`; `None` where
    /// the driver does not tell.
    pub fn pci_address(&self) -> Option<String> {
        use cudarc::driver::sys::CUdevice_attribute as A;
        let of = |what: A| {
            // SAFETY: the device handle was given by the driver.
            unsafe { result::device::get_attribute(self.gpu.device, what) }.ok()
        };
        let domain = of(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = of(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let slot = of(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
    }

    /// Major and minor number of the compute capability.
    pub fn capability(&self) -> (i32, i32) {
        self.gpu.capability
    }

    /// Breaks the GPU down for this process: queues a kernel that traps, as tests of failures want
    /// it.
    ///
    /// # Errors
    /// As for any launch; the trap itself is met by a later call.
    #[doc(hidden)]
    pub fn trap(&self) -> Result<()> {
        self.gpu.enter()?;
        let function = self.gpu.function(&trap())?;
        let stream = self.lanes[LaneKind::Compute as usize].stream;
        // SAFETY: the kernel has no parameters and touches no memory.
        let queued =
            unsafe { result::launch_kernel(function.0, (1, 1, 1), (1, 1, 1), 0, stream, &mut []) };
        queued.map_err(|e| self.gpu.failed("launch a trap", e))
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({}, {:?})", self.id, self.gpu)
    }
}

// SAFETY: there are five lanes, one per kind, whose streams reach the card's memory; host memory is
// not aliased. Host buffers come from the driver or from `HostBuf::zeroed`, as long as asked and
// page-aligned.
unsafe impl Device for Cuda {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn cost_model(&self) -> CostModel {
        cost_model(attention::backward_ways(self.gpu.capability))
    }

    fn lacks_fp8(&self) -> Option<String> {
        lacks_fp8(&self.name(), self.gpu.capability)
    }

    fn memory(&self) -> Bytes {
        let free = self
            .gpu
            .enter()
            .ok()
            .and_then(|()| result::mem_get_info().ok())
            .map(|(free, _)| free as u64);
        Bytes(free.unwrap_or(self.total))
    }

    fn reserve(&self, bytes: Bytes) -> Result<Arena> {
        self.reserve_arena(bytes)
    }

    fn has_failed(&self) -> bool {
        self.ops.alarm.rings()
    }

    fn open_faults(&self) -> Result<Option<Box<dyn FaultReport>>> {
        self.gpu.enter()?;
        Ok(Some(Box::new(self.ops.alarm.open()?)))
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        &self.lanes[kind as usize]
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }

    fn capture(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Replay>>> {
        let lane = &self.lanes[LaneKind::Compute as usize];
        let capture = || CudaGraph::capture(&self.gpu, lane.stream, body);
        let graph = lane.backlog.while_capturing(capture)?;
        Ok(Some(Box::new(graph)))
    }

    fn host_buffer(&self, name: &str, bytes: usize, pin: Pin) -> Result<HostBuf> {
        self.pinned_buffer(name, bytes, pin)
    }

    fn pins(&self) -> Pins {
        self.gpu.pins.pins()
    }
}
