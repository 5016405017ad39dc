//! The sub-allocator: carves a worker's reserved arena into blocks.
//!
//! Blocks are taken and given back in the host order of the worker's compute lane, so reuse is
//! ordered by that lane without any wait. Requests are rounded up to [`ALIGN`]; the smallest hole
//! below the top that fits is used, the lowest of equals; only when there is none the top rises. So
//! the same sequence of requests always gives the same addresses, on any device and in an arena of
//! any size that is enough: that is how the meta device knows the peak of a real one exactly.
//!
//! Blocks that another lane fills (uploads) come from [`Pool::lend`]. When such a block is dropped
//! it is set aside with an event of the compute lane, so that the next upload into it starts as
//! soon as its last reader has ended, not when everything queued so far has. Blocks set aside go
//! back to the arena when it runs short.
//!
//! `tests/loom.rs` runs lending, filling and setting aside in every order that threads and lanes
//! can take.
//!
//! # Invariants
//! - Live blocks never overlap; neighbouring holes are always merged; no hole ends at the top.
//! - `high_water` is one past the highest byte ever in use, relative to the arena's base.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::bytes::Bytes;
use crate::device::{Arena, Device, Event, LaneKind};
use crate::error::{Error, Result};
use crate::sync::{Mutex, MutexGuard};

/// Blocks start at multiples of this many bytes.
pub const ALIGN: u64 = 256;

/// The arena of one worker and what is in use of it.
pub struct Pool {
    device: Arc<dyn Device>,
    arena: Arena,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Everything from here on is free.
    top: u64,
    /// Free holes below the top by offset, and the same by (size, offset) for best fit.
    holes: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    used: u64,
    peak_used: u64,
    high_water: u64,
    allocations: u64,
    /// Blocks set aside for uploads, oldest first.
    aside: Vec<Aside>,
}

/// A block that is kept for the next upload.
struct Aside {
    start: u64,
    bytes: u64,
    /// Behind the last use; `None` when the lane had run dry.
    free: Option<Event>,
}

/// What a pool has given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// In use now.
    pub used: Bytes,
    /// Most ever in use at once.
    pub peak_used: Bytes,
    /// One past the highest byte ever in use: what an arena must have to repeat the same requests.
    pub high_water: Bytes,
    /// Blocks ever handed out.
    pub allocations: u64,
}

impl Pool {
    /// Reserves `bytes` on `device` and makes a pool of them.
    ///
    /// # Errors
    /// When the device has less.
    pub fn reserve(device: Arc<dyn Device>, bytes: Bytes) -> Result<Arc<Self>> {
        let arena = device.reserve(bytes)?;
        if arena.base().checked_add(arena.bytes().0).is_none() {
            return Err(Error::Device {
                device: device.id(),
                what: format!("no address space for {bytes}"),
            });
        }
        Ok(Arc::new(Self {
            device,
            arena,
            state: Mutex::new(State::default()),
        }))
    }

    /// The worker whose memory this is.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// A block of at least `bytes`; `op` is named if there is none.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when no hole is large enough; otherwise what the device reports.
    pub fn alloc(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<Block> {
        let (start, bytes) = self.place(op, bytes)?;
        let block = Block {
            pool: self.clone(),
            start,
            bytes,
            lent: false,
        };
        if bytes > 0 {
            // SAFETY: `place` gave this piece of the device's arena to nobody else.
            unsafe { self.device.handing_out(op, block.addr(), bytes)? };
        }
        Ok(block)
    }

    /// A block of at least `bytes` for another lane to fill, and the event which that lane must
    /// wait for first.
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    pub fn lend(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<(Block, Option<Event>)> {
        let fits = |a: &Aside| {
            a.bytes >= bytes && a.bytes <= bytes.saturating_add(bytes / 4).saturating_add(ALIGN)
        };
        let known = {
            let mut state = self.lock();
            let best = state
                .aside
                .iter()
                .enumerate()
                .filter(|(_, a)| fits(a))
                .min_by_key(|(_, a)| a.bytes);
            best.map(|(at, _)| at).map(|at| state.aside.remove(at))
        };
        if let Some(Aside { start, bytes, free }) = known {
            return Ok((
                Block {
                    pool: self.clone(),
                    start,
                    bytes,
                    lent: true,
                },
                free,
            ));
        }
        let mut block = self.alloc(op, bytes)?;
        block.lent = true;
        // Whoever had this memory before may still be queued in the compute lane.
        let free = self.device.lane(LaneKind::Compute).record()?;
        Ok((block, Some(free)))
    }

    /// Gives blocks that were set aside back to the arena.
    pub fn trim(&self) {
        let aside = std::mem::take(&mut self.lock().aside);
        for Aside { start, bytes, .. } in aside {
            self.release(start, bytes);
        }
    }

    fn set_aside(&self, start: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let free = self.device.lane(LaneKind::Compute).record().ok();
        self.lock().aside.push(Aside { start, bytes, free });
    }

    fn place(&self, op: &'static str, bytes: u64) -> Result<(u64, u64)> {
        if bytes == 0 {
            return Ok((0, 0));
        }
        let size = bytes.checked_next_multiple_of(ALIGN);
        let take = |state: &mut State| {
            size.and_then(|size| Some((state.take(size, self.arena.bytes().0)?, size)))
        };
        let mut state = self.lock();
        let mut found = take(&mut state);
        if found.is_none() && !state.aside.is_empty() {
            drop(state);
            self.trim();
            state = self.lock();
            found = take(&mut state);
        }
        let Some((start, size)) = found else {
            return Err(Error::DeviceMemory {
                device: self.device.id(),
                op,
                need: Bytes(bytes),
                used: Bytes(state.used),
                cap: self.arena.bytes(),
            });
        };
        state.used += size;
        state.allocations += 1;
        state.peak_used = state.peak_used.max(state.used);
        state.high_water = state.high_water.max(start + size);
        Ok((start, size))
    }

    fn release(&self, start: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        // SAFETY: blocks come from `place` and are released once, by their owner or out of those
        // set aside.
        unsafe { self.device.freed(self.arena.base() + start, bytes) };
        let mut state = self.lock();
        state.used -= bytes;
        let (mut start, mut bytes) = (start, bytes);
        if let Some((&before, &size)) = state.holes.range(..start).next_back()
            && before + size == start
        {
            state.remove_hole(before, size);
            (start, bytes) = (before, bytes + size);
        }
        if let Some(&size) = state.holes.get(&(start + bytes)) {
            state.remove_hole(start + bytes, size);
            bytes += size;
        }
        if start + bytes == state.top {
            state.top = start;
        } else {
            state.add_hole(start, bytes);
        }
    }

    /// All that may ever be in use.
    pub fn capacity(&self) -> Bytes {
        self.arena.bytes()
    }

    /// What is and was in use.
    pub fn usage(&self) -> PoolUse {
        let state = self.lock();
        PoolUse {
            used: Bytes(state.used),
            peak_used: Bytes(state.peak_used),
            high_water: Bytes(state.high_water),
            allocations: state.allocations,
        }
    }

    /// Starts the peaks anew from what is in use now.
    pub fn reset_peaks(&self) {
        let mut state = self.lock();
        state.peak_used = state.used;
        state.high_water = state.top;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}, {:?})", self.device.id(), self.usage())
    }
}

impl State {
    /// Where `size` bytes go in an arena of `cap`.
    fn take(&mut self, size: u64, cap: u64) -> Option<u64> {
        let Some((room, start)) = self.by_size.range((size, 0)..).next().copied() else {
            let start = self.top;
            self.top = start.checked_add(size).filter(|end| *end <= cap)?;
            return Some(start);
        };
        self.remove_hole(start, room);
        self.add_hole(start + size, room - size);
        Some(start)
    }

    fn add_hole(&mut self, start: u64, bytes: u64) {
        if bytes > 0 {
            self.holes.insert(start, bytes);
            self.by_size.insert((bytes, start));
        }
    }

    fn remove_hole(&mut self, start: u64, bytes: u64) {
        self.holes.remove(&start);
        self.by_size.remove(&(bytes, start));
    }
}

/// A piece of a worker's arena; goes back to the pool when dropped.
pub struct Block {
    pool: Arc<Pool>,
    start: u64,
    bytes: u64,
    /// Filled by another lane: set aside when dropped.
    lent: bool,
}

impl Block {
    /// First device address.
    pub fn addr(&self) -> u64 {
        self.pool.arena.base() + self.start
    }

    /// Size, rounded up to [`ALIGN`].
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it came from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.lent {
            true => self.pool.set_aside(self.start, self.bytes),
            false => self.pool.release(self.start, self.bytes),
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Block({}, {:#x}, {})",
            self.pool.device.id(),
            self.addr(),
            Bytes(self.bytes)
        )
    }
}
