//! When copies began and ended, for traces and for the planner.
//!
//! The log records stamps of the lane itself, so a time is known only once the lane has passed. It
//! waits only for a lane that refuses a stamp: the copy is an error then, and its memory may go.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::drain_lane;
use crate::device::{Lane, LaneKind, Stamp};
use crate::error::Result;
use crate::sync::lock;

/// One copy as it happened.
#[derive(Debug, Clone)]
pub struct CopyRecord {
    /// In which lane.
    pub lane: LaneKind,
    /// What was copied.
    pub what: String,
    /// How much.
    pub bytes: u64,
    /// When the lane began, after what it waited for.
    pub from: Stamp,
    /// When it was done.
    pub to: Stamp,
}

/// Records copies while it is on; off, it costs a look at a flag.
#[derive(Debug, Default)]
pub struct CopyLog {
    on: AtomicBool,
    records: Mutex<Vec<CopyRecord>>,
}

impl CopyLog {
    /// Switches it on or off.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// What was recorded since the last call.
    pub fn take(&self) -> Vec<CopyRecord> {
        std::mem::take(&mut lock(&self.records))
    }

    /// The stamp before a copy, while the log is on.
    ///
    /// # Errors
    /// When the device refuses; the lane has run dry then.
    pub(super) fn start(&self, lane: &dyn Lane) -> Result<Option<Stamp>> {
        if !self.on.load(Ordering::Relaxed) {
            return Ok(None);
        }
        stamp(lane).map(Some)
    }

    /// Records a copy that began at `from`.
    ///
    /// # Errors
    /// As [`CopyLog::start`].
    pub(super) fn end(
        &self,
        lane: &dyn Lane,
        from: Option<Stamp>,
        what: &str,
        bytes: u64,
    ) -> Result<()> {
        let Some(from) = from else {
            return Ok(());
        };
        let to = stamp(lane)?;
        lock(&self.records).push(CopyRecord {
            lane: lane.kind(),
            what: what.to_owned(),
            bytes,
            from,
            to,
        });
        Ok(())
    }
}

/// A stamp behind what is queued. A caller may free what its copies use when this fails.
fn stamp(lane: &dyn Lane) -> Result<Stamp> {
    lane.stamp().inspect_err(|_| drain_lane(lane))
}
