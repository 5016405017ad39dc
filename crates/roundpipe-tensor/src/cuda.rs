//! The cuda backend: NVIDIA GPUs through the driver, found at run time.
//!
//! Nothing of CUDA is needed to build or start: the driver, NVRTC, cuBLASLt and cuDNN are looked
//! for when the first GPU is opened ([`library`]). Kernels are written in CUDA C++, compiled for
//! the GPU at hand and kept on disk ([`compile`]); products are cuBLASLt's.
//!
//! Lanes are streams, events are events. A [`Cuda`] is one worker; several may share a card, each
//! with its own lanes and its own part of the memory.
//!
//! # What kernels report
//! A kernel that meets an index out of range writes a word of host memory and goes on with index 0;
//! the next fence of that worker returns it as an error. So no launch ever waits.
//!
//! # Invariants
//! - The result of a kernel depends on its operands alone: no atomics on floats, fixed orders of
//!   sums.
//! - Memory is taken once per worker, plainly; nothing is allocated afterwards.
//! - No call here prints or ends the process. After an error that the driver does not recover from,
//!   the card is lost: every later call returns that same error; other devices go on.
//! - Nothing waits for the device but fences, the first product of a shape ([`product`]), copies of
//!   pageable memory, and a stamp every few seconds ([`clock`]).

mod attention;
mod call;
mod clock;
pub mod compile;
mod elementwise;
mod image;
mod index;
pub mod library;
mod loss;
mod moe;
mod norm;
mod product;
mod reduce;
mod rope;

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use cudarc::driver::{result, sys};

use crate::bytes::Bytes;
use crate::device::{
    Arena, Copy, CostModel, Device, DeviceId, DeviceKind, Direction, Event, EventState,
    FaultReport, Faults, Lane, LaneKind, Ops, Stamp,
};
use crate::error::{Error, Result};
use crate::host::{HostBuf, Pin};
use crate::kernel::{Family, Kernel, View};
use crate::pins::{Ledger, Pins, Refusal};
use crate::sync::lock;
use call::Call;
use clock::{Clock, Origin};
use compile::{Table, Unit};

/// A card's context, given back when dropped.
struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

impl Context {
    fn retain(device: sys::CUdevice) -> std::result::Result<Self, result::DriverError> {
        // SAFETY: callers have the handle from the driver.
        let raw = unsafe { result::primary_ctx::retain(device) }?;
        Ok(Self { device, raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`; whoever owns this lets go of all that was made in it
        // before.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// One card, shared by its workers.
pub(crate) struct Gpu {
    pub(crate) index: u32,
    device: sys::CUdevice,
    pub(crate) capability: (i32, i32),
    /// Bytes of shared memory of a processor, for all its blocks.
    pub(crate) shared_memory: usize,
    functions: Mutex<Table<Unit, Function>>,
    /// Events without timing that nobody holds.
    spare: Mutex<Vec<RawEvent>>,
    /// What it was lost to.
    lost: OnceLock<String>,
    /// Host memory that it gave.
    pins: Ledger,
    /// What times are counted from.
    clock: Clock<Moment>,
    /// Where origins of the clock are recorded, behind nothing.
    ticks: sys::CUstream,
    pub(crate) products: product::Products,
    pub(crate) attention: attention::Plans,
    pub(crate) convolutions: image::Plans,
    /// The last field, so that everything else is gone before it.
    context: Context,
}

/// A compiled kernel.
#[derive(Clone, Copy)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

// SAFETY: driver handles may be used from any thread while their context is current there.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A driver's event.
#[derive(Clone, Copy)]
struct RawEvent(sys::CUevent);

// SAFETY: driver handles may be used from any thread while their context is current there.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// An event that times are counted from.
struct Moment {
    event: RawEvent,
    context: sys::CUcontext,
}

// SAFETY: driver handles may be used from any thread while their context is current there.
unsafe impl Send for Moment {}
// SAFETY: as above.
unsafe impl Sync for Moment {}

impl Drop for Moment {
    fn drop(&mut self) {
        // SAFETY: the context is retained by a card that lives longer than its clock and its
        // events; nobody else holds the event.
        let _ = unsafe {
            result::ctx::set_current(self.context)
                .and_then(|()| result::event::destroy(self.event.0))
        };
    }
}

/// Milliseconds between two events that have passed.
///
/// # Safety
/// Both are alive and have a clock; their context is current.
unsafe fn elapsed_ms(
    from: RawEvent,
    to: RawEvent,
) -> std::result::Result<f32, result::DriverError> {
    // SAFETY: the caller's promise.
    unsafe { library::elapsed(from.0, to.0) }
}

// SAFETY: as above; the maps and lists are behind locks.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Gpu({}, sm_{}{})",
            self.index, self.capability.0, self.capability.1
        )
    }
}

impl Gpu {
    fn open(index: u32) -> Result<Arc<Self>> {
        let fail = |what: &'static str| move |e: result::DriverError| failed(index, what, e);
        let (device, capability) = find(index)?;
        if let Some(what) = too_old(capability) {
            return Err(Error::Device {
                device: card(index),
                what,
            });
        }
        let context = Context::retain(device).map_err(fail("make a context"))?;
        // SAFETY: the context was just given by the driver.
        unsafe { result::ctx::set_current(context.raw) }.map_err(fail("use the context"))?;
        let attribute =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
        // SAFETY: the device handle was given by the driver.
        let shared_memory = unsafe { result::device::get_attribute(device, attribute) };
        let shared_memory = shared_memory.map_err(fail("ask the device"))?;
        // From here on nothing fails before the card owns both.
        let ticks = highest_priority_stream().map_err(fail("make a stream"))?;
        let gpu = Arc::new(Self {
            index,
            device,
            capability,
            shared_memory: usize::try_from(shared_memory).unwrap_or(0),
            functions: Mutex::default(),
            spare: Mutex::default(),
            lost: OnceLock::new(),
            pins: Ledger::default(),
            clock: Clock::default(),
            ticks,
            products: product::Products::default(),
            attention: attention::Plans::default(),
            convolutions: image::Plans::default(),
            context,
        });
        // Time begins here.
        gpu.origin()?;
        Ok(gpu)
    }

    /// What the time of an event recorded from now on is counted from.
    fn origin(&self) -> Result<Arc<Origin<Moment>>> {
        let fresh = || {
            let moment = Moment {
                event: self.event(true)?,
                context: self.context.raw,
            };
            // SAFETY: the event was just made, the stream lives as long as the card; both belong to
            // the current context.
            let passed = unsafe {
                result::event::record(moment.event.0, self.ticks)
                    .and_then(|()| result::event::synchronize(moment.event.0))
            };
            passed.map_err(|e| self.failed("start the clock", e))?;
            Ok(moment)
        };
        let between = |from: &Moment, to: &Moment| {
            // SAFETY: both are alive and have passed; `fresh` made the context current.
            unsafe { elapsed_ms(from.event, to.event) }
                .map_err(|e| self.failed("read the clock", e))
        };
        self.clock.origin(Instant::now(), fresh, between)
    }

    /// Makes the card's context current on this thread, if the card is not lost.
    pub(crate) fn enter(&self) -> Result<()> {
        match self.lost.get() {
            Some(what) => Err(Error::Device {
                device: card(self.index),
                what: what.clone(),
            }),
            None => self
                .current()
                .map_err(|e| self.failed("use the context", e)),
        }
    }

    /// Makes the card's context current: for giving things back, which a lost card does not forbid.
    fn current(&self) -> std::result::Result<(), result::DriverError> {
        // SAFETY: the context is retained as long as this value lives.
        unsafe { result::ctx::set_current(self.context.raw) }
    }

    /// The error of a call; the first one that the card does not recover from is every later one's.
    pub(crate) fn failed(&self, what: &str, error: result::DriverError) -> Error {
        let failed = failed(self.index, what, error);
        if !is_fatal(error.0) {
            return failed;
        }
        let first = || match failed {
            Error::Device { what, .. } => {
                format!("{what}; the device is lost, restart the program")
            }
            other => other.to_string(),
        };
        Error::Device {
            device: card(self.index),
            what: self.lost.get_or_init(first).clone(),
        }
    }

    /// A compiled kernel, from memory, from disk, or made now.
    pub(crate) fn function(&self, unit: &Unit) -> Result<Function> {
        if let Some(function) = lock(&self.functions).get(unit) {
            return Ok(*function);
        }
        let image = compile::image(unit, self.capability)?;
        self.enter()?;
        // SAFETY: the image is a whole cubin; it outlives the call, which copies it.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let module =
            module.map_err(|e| self.failed(&format!("load the kernel {}", unit.name()), e))?;
        let name = CString::new(unit.entry()).expect("names have no zero");
        // SAFETY: the module was just loaded and is never unloaded.
        let function = unsafe { result::module::get_function(module, name) };
        let function =
            function.map_err(|e| self.failed(&format!("find the kernel {}", unit.name()), e))?;
        let function = Function(function);
        lock(&self.functions).insert(unit.clone(), function);
        Ok(function)
    }

    fn event(&self, timing: bool) -> Result<RawEvent> {
        if !timing && let Some(event) = lock(&self.spare).pop() {
            return Ok(event);
        }
        use sys::CUevent_flags as F;
        self.enter()?;
        if timing {
            let made = result::event::create(F::CU_EVENT_DEFAULT);
            return Ok(RawEvent(made.map_err(|e| self.failed("make an event", e))?));
        }
        // Both flags: waits give the processor to the optimizer, and events cost less without a
        // clock.
        let flags = F::CU_EVENT_BLOCKING_SYNC as u32 | F::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is written by the call; the flags are the driver's own.
        let made = unsafe { sys::cuEventCreate(&mut event, flags).result() };
        made.map_err(|e| self.failed("make an event", e))?;
        Ok(RawEvent(event))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.current().is_err() {
            return;
        }
        // Libraries let go of the context before it goes.
        self.products = product::Products::default();
        self.attention.close();
        let spare = std::mem::take(&mut *lock(&self.spare));
        self.clock.close();
        for event in spare {
            // SAFETY: nobody holds these events any more.
            let _ = unsafe { result::event::destroy(event.0) };
        }
        // SAFETY: made in `open`; whoever records there holds the card, and nobody does any more.
        let _ = unsafe { result::stream::destroy(self.ticks) };
    }
}

/// A stream that waits for no other and comes before them, in the current context. Streams of other
/// priorities have other hardware queues, so that it does not stand behind a lane's kernels.
fn highest_priority_stream() -> std::result::Result<sys::CUstream, result::DriverError> {
    let (_, soonest) = result::stream::get_priority_range()?;
    result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, soonest)
}

/// A card and its compute capability, without opening it.
fn find(index: u32) -> Result<(sys::CUdevice, (i32, i32))> {
    library::driver()?;
    let fail = |what: &'static str| move |e: result::DriverError| failed(index, what, e);
    result::init().map_err(fail("start the driver"))?;
    let device = result::device::get(index as i32).map_err(fail("open the device"))?;
    use sys::CUdevice_attribute as A;
    let ask = |what| {
        // SAFETY: the device handle was just given by the driver.
        unsafe { result::device::get_attribute(device, what) }.map_err(fail("ask the device"))
    };
    let major = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok((
        device,
        (major, ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?),
    ))
}

/// Why a card of this compute capability is refused.
fn too_old((major, minor): (i32, i32)) -> Option<String> {
    let what = || format!("compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed");
    (major * 10 + minor < library::OLDEST_CARD as i32).then(what)
}

fn card(index: u32) -> DeviceId {
    DeviceId {
        kind: DeviceKind::Cuda,
        index,
        worker: 0,
    }
}

fn failed(index: u32, what: &str, error: result::DriverError) -> Error {
    let text = error
        .error_string()
        .ok()
        .and_then(|s| s.to_str().ok())
        .unwrap_or("unknown error")
        .to_owned();
    Error::Device {
        device: card(index),
        what: format!("cannot {what}: {text} ({:?})", error.0),
    }
}

/// Whether a context is of no use after an error: the driver returns it from every later call.
fn is_fatal(error: sys::CUresult) -> bool {
    use sys::CUresult as E;
    matches!(
        error,
        E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_LAUNCH_FAILED
            | E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_CONTAINED
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            // The card does not answer, or another one took this process down with it.
            | E::CUDA_ERROR_DEVICE_UNAVAILABLE
            | E::CUDA_ERROR_EXTERNAL_DEVICE
            | E::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | E::CUDA_ERROR_TENSOR_MEMORY_LEAK
    )
}

/// What a kernel reported: an index out of range.
#[derive(Clone, Copy)]
struct Report {
    op: &'static str,
    index: i64,
    at: usize,
    size: usize,
}

impl Report {
    fn error(self) -> Error {
        let Self {
            op,
            index,
            at,
            size,
        } = self;
        Error::Index {
            op,
            index,
            at,
            size,
        }
    }
}

/// Words that the kernels of a worker write when they meet what they must refuse: a slot for each
/// [`Faults`], and slot 0 for all other work, which the events of the lanes tell of.
pub(crate) struct ErrorWord {
    /// Its context must be there when the words are given back, whoever holds the alarm last.
    gpu: Arc<Gpu>,
    host: *mut u32,
    device: u64,
    /// Which operation a code stands for.
    codes: Mutex<Vec<&'static str>>,
    /// How many reports of slot 0 were taken, and the last of them.
    taken: Mutex<(u64, Option<Report>)>,
    /// Slots to be given out, each behind an event once kernels may have written it, the oldest
    /// first.
    free: Mutex<VecDeque<(usize, Option<RawEvent>)>>,
}

/// Where a launch reports to.
#[derive(Clone, Copy)]
pub(crate) struct AlarmSlot<'a> {
    alarm: &'a ErrorWord,
    /// The address of its words, as kernels see it.
    pub(crate) device: u64,
}

impl AlarmSlot<'_> {
    /// The code that stands for an operation; never 0.
    pub(crate) fn code(&self, op: &'static str) -> u32 {
        self.alarm.code(op)
    }
}

/// One slot of an alarm.
struct CudaFaults {
    alarm: Arc<ErrorWord>,
    slot: usize,
}

impl FaultReport for CudaFaults {
    fn check(&self) -> Result<()> {
        self.alarm
            .report(self.slot)
            .map_or(Ok(()), |report| Err(report.error()))
    }

    fn retire(&self, lane: &dyn Lane) {
        let Some(lane) = lane.as_any().downcast_ref::<CudaLane>() else {
            return;
        };
        // A slot whose event cannot be recorded is never used again: the card is about to be lost.
        let gpu = &self.alarm.gpu;
        let Ok(event) = gpu.enter().and_then(|()| gpu.event(false)) else {
            return;
        };
        // SAFETY: event and stream belong to the context that was just made current.
        if unsafe { result::event::record(event.0, lane.stream) }.is_ok() {
            lock(&self.alarm.free).push_back((self.slot, Some(event)));
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the words are read and written as atomics.
unsafe impl Send for ErrorWord {}
// SAFETY: as above.
unsafe impl Sync for ErrorWord {}

impl ErrorWord {
    const WORDS: usize = 8;
    /// A call of the engine takes one per job, so this is for dozens of calls under way.
    const SLOTS: usize = 4096;

    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        gpu.enter()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a plain allocation; it is zeroed before anybody reads it.
        let host = unsafe { result::malloc_host(Self::SLOTS * Self::WORDS * 4, flags) };
        let host: *mut u32 = host
            .map_err(|e| gpu.failed("take pinned memory", e))?
            .cast();
        let (codes, taken) = (Mutex::default(), Mutex::default());
        let free = Mutex::new((1..Self::SLOTS).map(|slot| (slot, None)).collect());
        let mut alarm = Self {
            gpu: gpu.clone(),
            host,
            device: 0,
            codes,
            taken,
            free,
        };
        // SAFETY: just allocated with room for these words.
        unsafe { host.write_bytes(0, Self::SLOTS * Self::WORDS) };
        // SAFETY: the memory was allocated as mapped.
        let mapped = unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut alarm.device, host.cast(), 0).result()
        };
        mapped.map_err(|e| gpu.failed("map pinned memory", e))?;
        Ok(alarm)
    }

    /// A slot that no kernel writes any more.
    fn open(self: &Arc<Self>) -> Result<CudaFaults> {
        let mut free = lock(&self.free);
        let past = |event: &Option<RawEvent>| match event {
            None => true,
            // SAFETY: the event is alive: it is given back below, or with the alarm.
            Some(event) => unsafe { result::event::query(event.0) }.is_ok(),
        };
        let Some(at) = free.iter().position(|(_, event)| past(event)) else {
            let what = format!(
                "more than {} jobs are under way; wait for some to end",
                Self::SLOTS - 1
            );
            return Err(Error::invalid("faults", what));
        };
        let (slot, event) = free.remove(at).expect("just found");
        lock(&self.gpu.spare).extend(event);
        for word in 0..Self::WORDS {
            self.word(slot, word).store(0, Ordering::Release);
        }
        Ok(CudaFaults {
            alarm: self.clone(),
            slot,
        })
    }

    /// Where a launch that belongs to `faults` reports to; without any, the lane's events tell.
    fn slot(&self, faults: Option<&Faults>) -> AlarmSlot<'_> {
        let own = |faults: &&CudaFaults| std::ptr::eq(&*faults.alarm, self);
        let faults = faults
            .and_then(|f| f.report().as_any().downcast_ref::<CudaFaults>())
            .filter(own);
        let slot = faults.map_or(0, |faults| faults.slot);
        AlarmSlot {
            alarm: self,
            device: self.device + (slot * Self::WORDS * 4) as u64,
        }
    }

    /// The code that stands for an operation; never 0.
    fn code(&self, op: &'static str) -> u32 {
        let mut codes = lock(&self.codes);
        let known = codes.iter().position(|known| *known == op);
        let at = known.unwrap_or_else(|| {
            codes.push(op);
            codes.len() - 1
        });
        at as u32 + 1
    }

    fn word(&self, slot: usize, at: usize) -> &AtomicU32 {
        assert!(
            slot < Self::SLOTS && at < Self::WORDS,
            "an alarm has no word {at} of slot {slot}"
        );
        // SAFETY: it is one of the words that were allocated; the memory is aligned and lives as
        // long as this value.
        unsafe { AtomicU32::from_ptr(self.host.add(slot * Self::WORDS + at)) }
    }

    /// Reports taken so far.
    fn count(&self) -> u64 {
        lock(&self.taken).0
    }

    /// Whether there is a report that nobody has taken.
    fn rings(&self) -> bool {
        self.word(0, 0).load(Ordering::Acquire) != 0
    }

    /// What a kernel reported, and no more of it to events of later.
    fn take(&self) -> Result<()> {
        let mut taken = lock(&self.taken);
        let Some(report) = self.report(0) else {
            return Ok(());
        };
        self.word(0, 0).store(0, Ordering::Release);
        // Word 7 is the kernels' own: who writes first.
        self.word(0, 7).store(0, Ordering::Release);
        *taken = (taken.0 + 1, Some(report));
        Err(report.error())
    }

    /// What a kernel reported, to an event recorded after `count` reports. Which kernels were
    /// before an event is not known, so one that was recorded before a report was taken tells that.
    fn look(&self, count: u64) -> Result<()> {
        let taken = lock(&self.taken);
        let last = || taken.1.filter(|_| count < taken.0);
        self.report(0)
            .or_else(last)
            .map_or(Ok(()), |report| Err(report.error()))
    }

    fn report(&self, slot: usize) -> Option<Report> {
        let code = self.word(slot, 0).load(Ordering::Acquire);
        if code == 0 {
            return None;
        }
        let half = |at| u64::from(self.word(slot, at).load(Ordering::Relaxed));
        let value = |at| half(at) | half(at + 1) << 32;
        let op = lock(&self.codes)
            .get(code as usize - 1)
            .copied()
            .unwrap_or("kernel");
        Some(Report {
            op,
            index: value(1) as i64,
            at: value(3) as usize,
            size: value(5) as usize,
        })
    }
}

impl Drop for ErrorWord {
    fn drop(&mut self) {
        lock(&self.gpu.spare).extend(lock(&self.free).drain(..).filter_map(|(_, event)| event));
        if self.gpu.current().is_ok() {
            // SAFETY: allocated in `new`; lanes that could write it have been waited for.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}

/// A worker on an NVIDIA GPU.
pub struct Cuda {
    id: DeviceId,
    gpu: Arc<Gpu>,
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
            // Activations are what somebody waits for; weights and gradients fill the gaps. Lower
            // is sooner.
            let priority = match kind {
                LaneKind::Compute => 0,
                LaneKind::ActivationUpload | LaneKind::ActivationDownload => range.1,
                LaneKind::ParamUpload | LaneKind::GradDownload => range.0,
            };
            let made = result::stream::create_with_priority(
                result::stream::StreamKind::NonBlocking,
                priority,
            );
            let stream = made.map_err(|e| gpu.failed("make a stream", e))?;
            Ok(CudaLane {
                kind,
                stream,
                gpu: gpu.clone(),
                id,
                alarm: alarm.clone(),
            })
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

    /// Why attention is slower than it could be on this machine's GPUs, in one line: which cuDNN
    /// was found where, its version, and what computes instead. `None` where cuDNN is used.
    pub fn attention_note() -> Option<String> {
        attention::note()
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

/// A driver's allocation.
struct Allocation {
    gpu: Arc<Gpu>,
    ptr: sys::CUdeviceptr,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.gpu.current().is_ok() {
            // SAFETY: allocated in `reserve`; freeing waits for whatever still uses it.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}

/// Page-locked host memory of the driver's, or pages registered with it.
struct Pinned {
    gpu: Arc<Gpu>,
    ptr: *mut c_void,
    /// The pages, when they are not the driver's.
    pages: Option<HostBuf>,
}

// SAFETY: the pointer is only used to give the memory back.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.current().is_err() {
            return;
        }
        // SAFETY: locked by `host_buffer` in exactly this way, and given back once.
        let _ = unsafe {
            match self.pages {
                Some(_) => sys::cuMemHostUnregister(self.ptr).result(),
                None => result::free_host(self.ptr),
            }
        };
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
        let library_attention = attention::may_take_backward(self.gpu.capability);
        CostModel {
            kind: DeviceKind::Cuda,
            library_attention,
        }
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
        self.gpu.enter()?;
        // SAFETY: a plain allocation, owned by the arena.
        let ptr = unsafe { result::malloc_sync(bytes.0.max(1) as usize) };
        let ptr = ptr.map_err(|e| match self.gpu.failed("reserve memory", e) {
            lost if is_fatal(e.0) => lost,
            _ => {
                let what = format!(
                    "cannot reserve {bytes}, {} are free ({:?})",
                    self.memory(),
                    e.0
                );
                Error::Device {
                    device: self.id,
                    what,
                }
            }
        })?;
        let owner = Allocation {
            gpu: self.gpu.clone(),
            ptr,
        };
        // SAFETY: the driver aligns to 256 bytes and more; nobody else knows this memory, and the
        // owner frees it.
        Ok(unsafe { Arena::new(ptr, bytes, Box::new(owner)) })
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

    fn host_buffer(&self, name: &str, bytes: usize, pin: Pin) -> Result<HostBuf> {
        self.gpu.pins.buffer(name, bytes, pin, || {
            self.gpu.enter()?;
            let pinned = match pin {
                Pin::Register => self.register(name, bytes)?,
                _ => self.allocate(bytes),
            };
            let (ptr, pages) = pinned.map_err(|e| self.refuse_pin(name, bytes, e))?;
            let owner = Pinned {
                gpu: self.gpu.clone(),
                ptr,
                pages,
            };
            // SAFETY: zeroed, page-aligned, of this size, reached through this value alone, alive
            // in the owner.
            Ok(unsafe { HostBuf::from_owner(name, ptr.cast(), bytes, Box::new(owner)) })
        })
    }

    fn pins(&self) -> Pins {
        self.gpu.pins.pins()
    }
}

/// Locked memory, and the pages where they are not the driver's.
type Locked = std::result::Result<(*mut c_void, Option<HostBuf>), result::DriverError>;

impl Cuda {
    /// Zeroed memory of the driver's.
    fn allocate(&self, bytes: usize) -> Locked {
        // SAFETY: a plain allocation in the current context, zeroed before anybody reads it.
        let ptr = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }?;
        // SAFETY: just allocated with this size.
        unsafe { ptr.cast::<u8>().write_bytes(0, bytes) };
        Ok((ptr, None))
    }

    /// Zeroed pages of ours, locked by the driver.
    fn register(&self, name: &str, bytes: usize) -> Result<Locked> {
        let pages = HostBuf::zeroed(name, bytes)?;
        let ptr = pages.addr() as *mut c_void;
        // SAFETY: the pages are mapped, and live in the owner until they are unregistered.
        let locked = unsafe {
            sys::cuMemHostRegister_v2(ptr, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE).result()
        };
        Ok(locked.map(|()| (ptr, Some(pages))))
    }

    fn refuse_pin(&self, name: &str, bytes: usize, error: result::DriverError) -> Refusal {
        let lost = self.gpu.failed("pin host memory", error);
        if self.gpu.lost.get().is_some() {
            return lost.into();
        }
        let need = Bytes(bytes as u64);
        let what = format!(
            "cannot pin {need} of host memory for {name} ({:?})",
            error.0
        );
        Refusal {
            error: Error::Device {
                device: self.id,
                what,
            },
            scarce: is_scarce(error.0),
        }
    }
}

/// Whether the driver has no more memory to pin or may not pin any, while all else works.
fn is_scarce(error: sys::CUresult) -> bool {
    use sys::CUresult as E;
    matches!(
        error,
        E::CUDA_ERROR_OUT_OF_MEMORY
            | E::CUDA_ERROR_NOT_PERMITTED
            | E::CUDA_ERROR_NOT_SUPPORTED
            | E::CUDA_ERROR_OPERATING_SYSTEM
    )
}

/// A stream.
pub(crate) struct CudaLane {
    kind: LaneKind,
    stream: sys::CUstream,
    alarm: Arc<ErrorWord>,
    gpu: Arc<Gpu>,
    id: DeviceId,
}

// SAFETY: streams may be used from any thread while their context is current there.
unsafe impl Send for CudaLane {}
// SAFETY: as above.
unsafe impl Sync for CudaLane {}

impl CudaLane {
    fn failed(&self, what: &str, error: result::DriverError) -> Error {
        match self.gpu.failed(what, error) {
            Error::Device { what, .. } if self.gpu.lost.get().is_none() => Error::Device {
                device: self.id,
                what: format!("{}: {what}", self.kind.name()),
            },
            other => other,
        }
    }

    fn mark(&self, timing: bool) -> Result<Event> {
        let marked = self.try_mark(timing);
        if marked.is_err() && self.gpu.current().is_ok() {
            // Callers let go of what their copies touch when this fails.
            // SAFETY: the stream is valid.
            let _ = unsafe { result::stream::synchronize(self.stream) };
        }
        marked
    }

    fn try_mark(&self, timing: bool) -> Result<Event> {
        let origin = if timing {
            Some(self.gpu.origin()?)
        } else {
            None
        };
        let event = self.gpu.event(timing)?;
        let (gpu, alarm) = (self.gpu.clone(), self.alarm.clone());
        let made = CudaEvent {
            event,
            origin,
            gpu,
            id: self.id,
            reports: alarm.count(),
            alarm,
        };
        self.gpu.enter()?;
        // SAFETY: event and stream belong to the current context.
        let recorded = unsafe { result::event::record(event.0, self.stream) };
        recorded.map_err(|error| self.failed("record an event", error))?;
        Ok(Event::new(Arc::new(made)))
    }
}

impl fmt::Debug for CudaLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaLane({}, {})", self.id, self.kind.name())
    }
}

impl Drop for CudaLane {
    fn drop(&mut self) {
        if self.gpu.current().is_ok() {
            // SAFETY: made in `on`; the stream is waited for, so nothing of it touches memory
            // afterwards.
            unsafe {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
            }
        }
    }
}

// SAFETY: a lane is a stream, which runs in order and waits for events; a failing record
// synchronises it (`mark`).
unsafe impl Lane for CudaLane {
    fn kind(&self) -> LaneKind {
        self.kind
    }

    unsafe fn copy(&self, copy: &Copy) -> Result<()> {
        self.gpu.enter()?;
        let (src, dst, bytes) = (copy.src, copy.dst, copy.bytes as usize);
        // SAFETY: the caller vouches for both ranges and their order.
        let copied = unsafe {
            match copy.direction {
                Direction::Upload => {
                    sys::cuMemcpyHtoDAsync_v2(dst, src as *const c_void, bytes, self.stream)
                }
                Direction::Download => {
                    sys::cuMemcpyDtoHAsync_v2(dst as *mut c_void, src, bytes, self.stream)
                }
                Direction::Local => sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, self.stream),
            }
        };
        copied
            .result()
            .map_err(|e| self.failed(&format!("copy {}", copy.what), e))
    }

    fn record(&self) -> Result<Event> {
        self.mark(false)
    }

    fn wait(&self, event: &Event) -> Result<()> {
        if event.is_past() {
            return Ok(());
        }
        let Some(event) = event.state().as_any().downcast_ref::<CudaEvent>() else {
            // Another backend's: only the host can order the two.
            return event.fence();
        };
        self.gpu.enter()?;
        // SAFETY: the event is alive in its owner; the flag is the default.
        let waited = unsafe {
            result::stream::wait_event(
                self.stream,
                event.event.0,
                sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
        };
        waited.map_err(|e| self.failed("wait for an event", e))
    }

    fn fence(&self) -> Result<()> {
        let told = self.record()?.fence();
        // Where the GPU is lost there is nothing to forget.
        let taken = self.alarm.take();
        told.and(taken)
    }

    fn stamp(&self) -> Result<Stamp> {
        Ok(Stamp::Lane(self.mark(true)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A point in a stream.
struct CudaEvent {
    event: RawEvent,
    /// What its time is counted from, where it has a clock. Before the card, which must go last.
    origin: Option<Arc<Origin<Moment>>>,
    alarm: Arc<ErrorWord>,
    gpu: Arc<Gpu>,
    id: DeviceId,
    /// How many of the alarm's reports were taken when it was recorded.
    reports: u64,
}

impl CudaEvent {
    fn failed(&self, error: result::DriverError) -> Error {
        match self.gpu.failed("finish what was queued", error) {
            Error::Device { what, .. } if self.gpu.lost.get().is_none() => Error::Device {
                device: self.id,
                what,
            },
            other => other,
        }
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent({})", self.id)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.origin.is_none() {
            lock(&self.gpu.spare).push(self.event);
        } else if self.gpu.current().is_ok() {
            // SAFETY: nobody else holds it; the driver keeps what is under way.
            let _ = unsafe { result::event::destroy(self.event.0) };
        }
    }
}

// SAFETY: the driver waits for the event, or says whether it has passed; a card that is lost runs
// nothing any more.
unsafe impl EventState for CudaEvent {
    fn passed(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.event.0) } {
            Ok(()) => self.alarm.look(self.reports).map(|()| true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn fence(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event.0) }.map_err(|e| self.failed(e))?;
        self.alarm.look(self.reports)
    }

    fn wait_quietly(&self) {
        if self.gpu.current().is_ok() {
            // SAFETY: the event is alive.
            let _ = unsafe { result::event::synchronize(self.event.0) };
        }
    }

    fn time_ns(&self) -> Option<u64> {
        let origin = self.origin.as_ref()?;
        self.gpu.enter().ok()?;
        // SAFETY: both events are alive; one that has not passed gives an error.
        let ms = unsafe { elapsed_ms(origin.event.event, self.event) }.ok()?;
        Some(origin.ns(ms))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An element of the sum costs 2 operations per row and 8 bytes; an H200 does 700e12 of the former
/// in the time of 4e12 of the latter, so both are equal at 700 rows. Its head of 151,936 classes
/// takes 107, 76, 61–67 and 60 ms for 16,384 tokens with 256, 512, 1,024 and 2,048 rows at a time.
pub(crate) const THICK: usize = 1024;

/// The GPU's mathematics.
pub(crate) struct CudaOps {
    alarm: Arc<ErrorWord>,
    gpu: Arc<Gpu>,
}

// SAFETY: kernels run in the lane's stream; what they touch is argued by family. Scratch is stated
// by the functions that the launches themselves cut it with.
unsafe impl Ops for CudaOps {
    unsafe fn launch(
        &self,
        lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
        faults: Option<&Faults>,
    ) -> Result<()> {
        let Some(lane) = lane.as_any().downcast_ref::<CudaLane>() else {
            return Err(Error::Foreign {
                op: kernel.name(),
                what: format!("{lane:?} is no lane of a GPU"),
            });
        };
        self.gpu.enter()?;
        let (gpu, alarm, stream) = (&*self.gpu, self.alarm.slot(faults), lane.stream);
        let call = Call {
            gpu,
            alarm,
            stream,
            kernel,
            src,
            dst,
            scratch,
        };
        // SAFETY: the caller's promise is passed on unchanged to the family that knows the kernel.
        unsafe {
            match kernel.family() {
                Family::Elementwise => elementwise::run(&call),
                Family::Reduce => reduce::run(&call),
                Family::Index => index::run(&call),
                Family::Product => product::run(&call),
                Family::Norm => norm::run(&call),
                Family::Rope => rope::run(&call),
                Family::Attention => attention::run(&call),
                Family::Loss => loss::run(&call),
                Family::Moe => moe::run(&call),
                Family::Image => image::run(&call),
                Family::Host(host) => Err(Error::invalid(
                    host.name(),
                    "a kernel written for host memory does not run on a GPU; write it with the operations of Cx",
                )),
            }
        }
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        // Of attention alone, for the first time this is asked cuDNN is looked for.
        let library_attention = matches!(kernel, Kernel::AttentionGrad(_))
            && attention::may_take_backward(self.gpu.capability);
        scratch(kernel, src, dst, library_attention)
    }

    fn min_gemm_rows(&self) -> usize {
        THICK
    }
}

/// Scratch bytes that kernels want: of the operands and of what a likeness tells, so that meta can
/// ask too.
pub(crate) fn scratch(
    kernel: &Kernel,
    src: &[Option<View>],
    dst: &[Option<View>],
    library_attention: bool,
) -> usize {
    use Kernel as K;
    match kernel {
        K::Reduce { .. } | K::ArgReduce { .. } | K::CumSum { .. } | K::TopK { .. } => {
            reduce::scratch(kernel, src, dst)
        }
        K::IndexAdd { .. } | K::ScatterAdd { .. } => index::scratch(kernel, src, dst),
        K::MatMul { .. } | K::GroupedMatMul | K::GroupedMatMulGrad { .. } => {
            product::scratch(kernel, src, dst)
        }
        K::RmsNormGrad { .. }
        | K::LayerNormGrad { .. }
        | K::GroupNorm { .. }
        | K::GroupNormGrad { .. }
        | K::BatchNorm { .. }
        | K::BatchNormGrad { .. } => norm::scratch(kernel, src, dst),
        K::RopeNormGrad { .. } => rope::scratch(kernel, src, dst),
        K::Attention(_) | K::AttentionGrad(_) => {
            attention::scratch(kernel, src, dst, library_attention)
        }
        K::MoeSort { .. } | K::MoeCombineGrad => moe::scratch(kernel, src, dst),
        K::Conv2d(_) | K::Conv2dGradInput(_) | K::Conv2dGradFilter { .. } => {
            image::scratch(kernel, src, dst)
        }
        _ => 0,
    }
}

fn trap() -> Unit {
    Unit::new("trap", include_str!("cuda/kernels/trap.cu"), "trap_now")
}

/// Every kernel in the variants that models use: what a machine without a GPU compiles to see that
/// it can.
pub fn units() -> Vec<Unit> {
    let families = [
        elementwise::units(),
        reduce::units(),
        index::units(),
        product::units(),
        norm::units(),
        rope::units(),
        attention::units(),
        loss::units(),
        moe::units(),
        image::units(),
        vec![trap()],
    ];
    families.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests;
