//! Where kernels report data that they must refuse, such as an index out of range.
//!
//! A kernel writes words of pinned host memory and goes on, so no launch ever waits. Work that has
//! [`Faults`] of its own reports to its own slot; all other work reports to slot 0, which the
//! events of the lanes return as an error.
//!
//! # Invariants
//! - A slot is given out again only when no kernel can write it any more.
//! - The words live until the lanes that could write them have been waited for.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};

use super::context::Gpu;
use super::event::RawEvent;
use super::lane::CudaLane;
use crate::device::{FaultReport, Faults, Lane};
use crate::error::{Error, Result};
use crate::sync::lock;

/// What a kernel reported: an index out of range.
#[derive(Clone, Copy)]
struct IndexReport {
    op: &'static str,
    index: i64,
    at: usize,
    size: usize,
}

impl IndexReport {
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
/// [`Faults`], and slot 0 for all other work, which the events of the lanes report.
pub(crate) struct ErrorWord {
    /// Its context must be there when the words are given back, so the alarm keeps the card.
    gpu: Arc<Gpu>,
    host: *mut u32,
    device: u64,
    /// Which operation a code stands for.
    codes: Mutex<Vec<&'static str>>,
    /// How many reports of slot 0 were taken, and the last of them.
    taken: Mutex<(u64, Option<IndexReport>)>,
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
pub(super) struct CudaFaults {
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

    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        gpu.enter()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a plain allocation; it is zeroed below, before anything reads it.
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
    pub(super) fn open(self: &Arc<Self>) -> Result<CudaFaults> {
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
        self.gpu.recycle(event);
        for word in 0..Self::WORDS {
            self.word(slot, word).store(0, Ordering::Release);
        }
        Ok(CudaFaults {
            alarm: self.clone(),
            slot,
        })
    }

    /// Where a launch that belongs to `faults` reports to; without any, to slot 0.
    pub(super) fn slot(&self, faults: Option<&Faults>) -> AlarmSlot<'_> {
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
    pub(super) fn count(&self) -> u64 {
        lock(&self.taken).0
    }

    /// Whether slot 0 has a report that no fence has taken.
    pub(super) fn rings(&self) -> bool {
        self.word(0, 0).load(Ordering::Acquire) != 0
    }

    /// Takes the report of slot 0: events that are recorded from now on do not return it.
    pub(super) fn take(&self) -> Result<()> {
        let mut taken = lock(&self.taken);
        let Some(report) = self.report(0) else {
            return Ok(());
        };
        self.word(0, 0).store(0, Ordering::Release);
        // Kernels use word 7 among themselves: the first to report takes it.
        self.word(0, 7).store(0, Ordering::Release);
        *taken = (taken.0 + 1, Some(report));
        Err(report.error())
    }

    /// The report of slot 0 as an event sees it that was recorded after `count` reports. Which
    /// kernels ran before an event is not known, so an event returns every report that was taken
    /// after it was recorded.
    pub(super) fn look(&self, count: u64) -> Result<()> {
        let taken = lock(&self.taken);
        let last = || taken.1.filter(|_| count < taken.0);
        self.report(0)
            .or_else(last)
            .map_or(Ok(()), |report| Err(report.error()))
    }

    fn report(&self, slot: usize) -> Option<IndexReport> {
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
        Some(IndexReport {
            op,
            index: value(1) as i64,
            at: value(3) as usize,
            size: value(5) as usize,
        })
    }
}

impl Drop for ErrorWord {
    fn drop(&mut self) {
        self.gpu
            .recycle(lock(&self.free).drain(..).filter_map(|(_, event)| event));
        if self.gpu.current().is_ok() {
            // SAFETY: allocated in `new`; lanes that could write it have been waited for.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}
