//! Lanes as streams.
//!
//! A lane queues copies and kernels of one kind and never waits, but for a fence, a copy of
//! pageable memory, a record that the driver refuses, and kernels that are far ahead of the GPU
//! ([`backlog`](super::backlog)).
//!
//! # Invariants
//! - A stream waits only for events, never for another stream by default.
//! - When a record fails, the stream has been synchronised, so that callers may let go of what
//!   their copies touch.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::backlog::Backlog;
use super::context::Gpu;
use super::event::CudaEvent;
use super::faults::ErrorWord;
use super::memory::BarrierWord;
use crate::device::{Copy, DeviceId, Direction, Event, Lane, LaneKind, Stamp};
use crate::error::{Error, Result};

/// A stream.
pub(crate) struct CudaLane {
    pub(super) kind: LaneKind,
    pub(super) stream: sys::CUstream,
    /// Dropped after the stream has run dry.
    pub(super) barrier: BarrierWord,
    pub(super) backlog: Backlog,
    pub(super) alarm: Arc<ErrorWord>,
    pub(super) gpu: Arc<Gpu>,
    pub(super) id: DeviceId,
}

// SAFETY: streams may be used from any thread while their context is current there.
unsafe impl Send for CudaLane {}
// SAFETY: as above.
unsafe impl Sync for CudaLane {}

impl CudaLane {
    fn failed(&self, what: &str, error: result::DriverError) -> Error {
        match self.gpu.failed(what, error) {
            Error::Device { what, .. } if !self.gpu.is_lost() => Error::Device {
                device: self.id,
                what: format!("{}: {what}", self.kind.name()),
            },
            other => other,
        }
    }

    /// Waits until the GPU has room for one more operation behind those that are queued.
    pub(super) fn make_room(&self) -> Result<()> {
        self.backlog.make_room(|| self.record())
    }

    /// Records an event; when that fails, the stream has run dry.
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
            // SAFETY: made by `Cuda::on`; the stream is waited for, so nothing of it touches memory
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
        let passed = self.record()?.fence();
        // Where the GPU is lost there is nothing to forget.
        let taken = self.alarm.take();
        passed.and(taken)
    }

    fn stamp(&self) -> Result<Stamp> {
        Ok(Stamp::Lane(self.mark(true)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
