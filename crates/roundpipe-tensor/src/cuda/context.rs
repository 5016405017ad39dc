//! One card: its context, its compiled kernels, and what its errors mean.
//!
//! A [`Gpu`] is shared by all workers on the card and outlives what they made there: streams,
//! events, memory. It launches nothing.
//!
//! # Invariants
//! - The context is released last, after everything that was made in it.
//! - Every call enters the context first. A lost card refuses to be entered, with the error that it
//!   was lost to.

use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use cudarc::driver::{result, sys};

use super::clock::{Clock, ClockOrigin};
use super::compile::{self, Table, Unit};
use super::event::{ClockEvent, RawEvent, elapsed_ms};
use super::{attention, image, library, product};
use crate::device::{DeviceId, DeviceKind, time_zero};
use crate::error::{Error, Result};
use crate::pins::Ledger;
use crate::sync::lock;

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
        // SAFETY: retained once by `retain`; the owner lets go of all that was made in it before.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// One card, shared by its workers.
pub(crate) struct Gpu {
    pub(crate) index: u32,
    pub(super) device: sys::CUdevice,
    pub(crate) capability: (i32, i32),
    /// Bytes of shared memory of a processor, for all its blocks.
    pub(crate) shared_memory: usize,
    functions: Mutex<Table<Unit, Function>>,
    /// Events without timing, to be used again.
    spare: Mutex<Vec<RawEvent>>,
    /// What it was lost to.
    lost: OnceLock<String>,
    /// Host memory that it gave.
    pub(super) pins: Ledger,
    /// What times are counted from.
    clock: Clock<ClockEvent>,
    /// Where origins of the clock are recorded, behind nothing.
    ticks: sys::CUstream,
    pub(crate) products: product::Products,
    pub(crate) attention: attention::AttentionPlans,
    pub(crate) convolutions: image::ConvPlans,
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
    /// Processors of the card, which run blocks at a time.
    pub(crate) fn processors(&self) -> Result<usize> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the device handle was given by the driver.
        let count = unsafe { result::device::get_attribute(self.device, attribute) };
        let count = count.map_err(|error| self.failed("ask the device", error))?;
        Ok(usize::try_from(count).unwrap_or(1).max(1))
    }

    pub(super) fn open(index: u32) -> Result<Arc<Self>> {
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
            clock: Clock::since(time_zero()),
            ticks,
            products: product::Products::default(),
            attention: attention::AttentionPlans::default(),
            convolutions: image::ConvPlans::default(),
            context,
        });
        // Time begins here.
        gpu.origin()?;
        Ok(gpu)
    }

    /// What the time of an event recorded from now on is counted from.
    pub(super) fn origin(&self) -> Result<Arc<ClockOrigin<ClockEvent>>> {
        let fresh = || {
            let moment = ClockEvent {
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
        let between = |from: &ClockEvent, to: &ClockEvent| {
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
    pub(super) fn current(&self) -> std::result::Result<(), result::DriverError> {
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

    /// Whether it met an error that it does not recover from.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// An event of the driver's, with a clock or without.
    pub(super) fn event(&self, timing: bool) -> Result<RawEvent> {
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

    /// Takes back events without timing that have no other owner.
    pub(super) fn recycle(&self, events: impl IntoIterator<Item = RawEvent>) {
        lock(&self.spare).extend(events);
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
            // SAFETY: the last owner of each event gave it to `recycle`.
            let _ = unsafe { result::event::destroy(event.0) };
        }
        // SAFETY: made in `open`; only this card records there, and it is being dropped.
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
pub(super) fn find(index: u32) -> Result<(sys::CUdevice, (i32, i32))> {
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
pub(super) fn too_old((major, minor): (i32, i32)) -> Option<String> {
    let what = || format!("compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed");
    (major * 10 + minor < library::OLDEST_CARD as i32).then(what)
}

/// Why a card of this compute capability does not multiply 8-bit floats.
pub(super) fn lacks_fp8(name: &str, (major, minor): (i32, i32)) -> Option<String> {
    let what = || {
        format!(
            "{name} has no fp8: compute capability {major}.{minor}, and 8.9 (Ada) or newer is needed"
        )
    };
    (major * 10 + minor < super::FP8_CARD).then(what)
}

/// The card itself, in errors that concern all its workers.
pub(super) fn card(index: u32) -> DeviceId {
    DeviceId {
        kind: DeviceKind::Cuda,
        index,
        worker: 0,
    }
}

/// The error of a call that the driver refused.
pub(super) fn failed(index: u32, what: &str, error: result::DriverError) -> Error {
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
pub(super) fn is_fatal(error: sys::CUresult) -> bool {
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
