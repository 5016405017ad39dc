//! Host memory for host values, used again and again.
//!
//! A buffer goes round: a download fills it, uploads read it, the host value is dropped, and the
//! next value of about its size takes it. The pool never waits for copies on that way: it hands a
//! buffer out with the events that its next writer waits for (rule 6).
//!
//! # Invariants
//! - The pool never hands out a buffer that anything else can reach.
//! - Memory goes back to the system only by [`HostPool::trim`], or when another holder keeps it.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::bytes::Bytes;
use crate::device::{Device, Event};
use crate::error::Result;
use crate::host::{HostBuf, HostRef, Pin};
use crate::sync::lock;

/// Host memory for host values, used again and again.
pub struct HostPool {
    device: Arc<dyn Device>,
    pin: Pin,
    state: Mutex<HostState>,
}

#[derive(Default)]
struct HostState {
    spare: Vec<(HostBuf, Vec<Event>)>,
    allocated: usize,
    lent: usize,
    peak: usize,
}

/// What a [`HostPool`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostUse {
    /// Mapped from the system now.
    pub allocated: Bytes,
    /// Lent to host values now.
    pub lent: Bytes,
    /// Most ever lent at once.
    pub peak: Bytes,
}

impl HostPool {
    /// No memory yet; `device` says what it copies from fastest.
    pub fn new(device: Arc<dyn Device>, pin: Pin) -> Arc<Self> {
        Arc::new(Self {
            device,
            pin,
            state: Mutex::default(),
        })
    }

    /// What is and was in use.
    pub fn usage(&self) -> HostUse {
        let state = lock(&self.state);
        HostUse {
            allocated: Bytes(state.allocated as u64),
            lent: Bytes(state.lent as u64),
            peak: Bytes(state.peak as u64),
        }
    }

    /// Lets go of all memory that no host value holds; the host waits for copies that still read it.
    pub fn trim(&self) {
        let spare = {
            let mut state = lock(&self.state);
            let spare = std::mem::take(&mut state.spare);
            state.allocated -= spare.iter().map(|(buf, _)| buf.len()).sum::<usize>();
            spare
        };
        spare
            .iter()
            .flat_map(|(_, events)| events)
            .for_each(|event| event.state().wait_quietly());
    }

    /// Lends memory for as long as `work` runs. The host waits for copies that still use it.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn lend<R>(&self, bytes: usize, work: impl FnOnce(&HostBuf) -> R) -> Result<R> {
        let (buf, free) = self.take(bytes)?;
        free.iter().for_each(|event| event.state().wait_quietly());
        let done = work(&buf);
        self.give_back(buf, Vec::new(), Vec::new());
        Ok(done)
    }

    /// A buffer of at least `bytes`, and what a lane must wait for before it writes there.
    pub(super) fn take(&self, bytes: usize) -> Result<(HostBuf, Vec<Event>)> {
        let fits = |buf: &HostBuf| buf.len() >= bytes && buf.len() <= bytes + bytes / 4 + 4096;
        let mut state = lock(&self.state);
        let best = state
            .spare
            .iter()
            .enumerate()
            .filter(|(_, (buf, _))| fits(buf));
        let best = best.min_by_key(|(_, (buf, _))| buf.len()).map(|(at, _)| at);
        let found = match best {
            Some(at) => state.spare.remove(at),
            None => {
                drop(state);
                let fresh = self
                    .device
                    .host_buffer("activation", bytes.max(1), self.pin)?;
                state = lock(&self.state);
                state.allocated += fresh.len();
                (fresh, Vec::new())
            }
        };
        state.lent += found.0.len();
        state.peak = state.peak.max(state.lent);
        Ok(found)
    }

    /// Takes a buffer back that lanes use until `events` have passed, some of them under `claims`.
    pub(super) fn give_back(&self, buf: HostBuf, mut events: Vec<Event>, claims: Vec<HostRef>) {
        // Events that have passed need no wait; an error stays for the fence of its lane.
        events.retain(|event| !event.is_past());
        if buf.is_sole_but(claims.len()) {
            // The pool is the only holder left, so what the claims forbade cannot happen.
            drop(claims);
            let mut state = lock(&self.state);
            state.lent -= buf.len();
            state.spare.push((buf, events));
            return;
        }
        // Another holder keeps the buffer from now on, and may write it once no copy reads it.
        let mut state = lock(&self.state);
        state.lent -= buf.len();
        state.allocated -= buf.len();
        drop(state);
        events.iter().for_each(|event| event.state().wait_quietly());
        drop(claims);
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        self.trim();
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPool({:?})", self.usage())
    }
}
