//! Points in streams: the driver's events, with a clock or without.
//!
//! Events without a clock are cheap and used again; an event with one says when its lane passed,
//! counted from an origin of the card's clock ([`clock`](super::clock)).
//!
//! # Invariants
//! - An event is destroyed, or handed to another owner, only when nothing refers to it any more.
//! - A worker's events report what its kernels reported, until a fence of the lane took it
//!   ([`faults`](super::faults)).

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::clock::ClockOrigin;
use super::context::Gpu;
use super::faults::ErrorWord;
use super::library;
use crate::device::{DeviceId, EventState};
use crate::error::{Error, Result};

/// A driver's event.
#[derive(Clone, Copy)]
pub(super) struct RawEvent(pub(super) sys::CUevent);

// SAFETY: driver handles may be used from any thread while their context is current there.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// An event that times are counted from.
pub(super) struct ClockEvent {
    pub(super) event: RawEvent,
    pub(super) context: sys::CUcontext,
}

// SAFETY: driver handles may be used from any thread while their context is current there.
unsafe impl Send for ClockEvent {}
// SAFETY: as above.
unsafe impl Sync for ClockEvent {}

impl Drop for ClockEvent {
    fn drop(&mut self) {
        // SAFETY: the context is retained by a card that lives longer than its clock and its
        // events; this value is the event's only owner.
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
pub(super) unsafe fn elapsed_ms(
    from: RawEvent,
    to: RawEvent,
) -> std::result::Result<f32, result::DriverError> {
    // SAFETY: the caller's promise.
    unsafe { library::elapsed(from.0, to.0) }
}

/// A point in a stream.
pub(super) struct CudaEvent {
    pub(super) event: RawEvent,
    /// What its time is counted from, where it has a clock. Before the card, which must go last.
    pub(super) origin: Option<Arc<ClockOrigin<ClockEvent>>>,
    pub(super) alarm: Arc<ErrorWord>,
    pub(super) gpu: Arc<Gpu>,
    pub(super) id: DeviceId,
    /// How many of the alarm's reports were taken when it was recorded.
    pub(super) reports: u64,
}

impl CudaEvent {
    fn failed(&self, error: result::DriverError) -> Error {
        match self.gpu.failed("finish what was queued", error) {
            Error::Device { what, .. } if !self.gpu.is_lost() => Error::Device {
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
            self.gpu.recycle([self.event]);
        } else if self.gpu.current().is_ok() {
            // SAFETY: this value is its only owner; the driver keeps what is under way.
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
