//! When copies began and ended, for traces and for the planner.
//!
//! The log records stamps of the lane itself, so a time is known only once the lane has passed. It
//! never waits, and a device that refuses a stamp loses the record, not the copy.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::{Lane, LaneKind, Stamp};
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
    pub(super) fn start(&self, lane: &dyn Lane) -> Option<Stamp> {
        // A device that refuses a stamp will soon report something worse.
        self.on
            .load(Ordering::Relaxed)
            .then(|| lane.stamp().ok())
            .flatten()
    }

    /// Records a copy that began at `from`.
    pub(super) fn end(&self, lane: &dyn Lane, from: Option<Stamp>, what: &str, bytes: u64) {
        if let Some(from) = from
            && let Ok(to) = lane.stamp()
        {
            lock(&self.records).push(CopyRecord {
                lane: lane.kind(),
                what: what.to_owned(),
                bytes,
                from,
                to,
            });
        }
    }
}
