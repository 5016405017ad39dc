//! The sub-allocator: carves a worker's reserved arena into blocks.
//!
//! Blocks are taken and given back in the host order of the worker's compute lane, so reuse is
//! ordered by that lane without any wait. Requests are rounded up to [`ALIGN`].
//!
//! The arena has two ends, one for each life time, so that long-lived blocks do not cut the space of
//! short-lived ones into pieces. Working memory of kernels ([`Pool::alloc`]) grows up from the start;
//! what is uploaded ([`Pool::lend`]: weights, inputs) or stays between tasks ([`Pool::alloc_long`])
//! grows down from the end. In each end the smallest hole that fits is used, the outermost of equals;
//! only when there is none the end grows. So the same sequence of requests always gives the same
//! layout, on any device and in an arena of any size that is enough: that is how the meta device
//! knows the peak of a real one exactly. A request that its own end has no room for takes a hole of
//! the other.
//!
//! A task may claim its working memory before it starts ([`Pool::claim_working`]). What can wait or
//! live elsewhere (the next weights, values that may stay) then asks with `beside`, and gets room
//! only where it leaves the claim whole. What a task itself needs may use the claim.
//!
//! Blocks of a task's working memory may be moved to join the holes between them, when a request
//! finds none that is large enough (`pool/moves.rs`).
//!
//! When a block that was lent is dropped, it is set aside with an event of the compute lane, so that
//! the next upload into it starts as soon as its last reader has ended, not when everything queued
//! so far has. Blocks set aside go back to the arena when it runs short.
//!
//! `tests/loom.rs` runs lending, filling and setting aside in every order that threads and lanes
//! can take.
//!
//! # Invariants
//! - Live blocks never overlap; neighbouring holes of an end are always merged; no hole lies at its
//!   frontier.
//! - `high_water` is the most that both ends have spanned together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bytes::Bytes;
use crate::device::{Arena, Device, Event, LaneKind};
use crate::error::{Error, Result};
use crate::kernel_times::KernelTimes;
use crate::sync::{Mutex, MutexGuard, unpoisoned};

mod moves;

use moves::{Movable, Spot};

/// Blocks start at multiples of this many bytes.
pub const ALIGN: u64 = 256;

/// The arena of one worker and what is in use of it.
pub struct Pool {
    device: Arc<dyn Device>,
    arena: Arena,
    state: Mutex<PoolState>,
    /// Launches and reads of values that no watch has seen ([`crate::repeat`]).
    unseen: AtomicU64,
    times: KernelTimes,
}

/// The two ends of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Working memory, up from the start.
    Short,
    /// Uploads and what stays between tasks, down from the end.
    Long,
}

/// One end of an arena. Distances are from that end, so both grow alike.
#[derive(Default)]
struct Region {
    /// Everything from here on is free.
    top: u64,
    /// Free holes below the top by distance, and the same by (size, distance) for best fit.
    holes: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

#[derive(Default)]
struct PoolState {
    short: Region,
    long: Region,
    used: u64,
    peak_used: u64,
    high_water: u64,
    allocations: u64,
    /// How far the short end may grow for the task under way.
    claim: u64,
    /// Blocks set aside for uploads, oldest first.
    aside: Vec<Aside>,
    /// Blocks of the short end that may be moved, by start.
    movable: BTreeMap<u64, Movable>,
}

/// A block that is kept for the next upload.
struct Aside {
    place: Place,
    /// Behind the last use; `None` when the lane had run dry.
    free: Option<Event>,
}

/// A piece of the arena.
#[derive(Debug, Clone, Copy)]
struct Place {
    end: End,
    /// Distance of its nearer side from that end.
    start: u64,
    bytes: u64,
}

/// What a pool has given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// In use now.
    pub used: Bytes,
    /// Most ever in use at once.
    pub peak_used: Bytes,
    /// The most that both ends of the arena have spanned: what an arena must have to repeat the same
    /// requests.
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
            state: Mutex::new(PoolState::default()),
            unseen: AtomicU64::new(0),
            times: KernelTimes::default(),
        }))
    }

    /// Counts a use of values that no watch sees.
    pub(crate) fn note_unseen(&self) {
        // Compared by the thread that also launches, so no order is needed.
        self.unseen.fetch_add(1, Ordering::Relaxed);
    }

    /// Uses of values so far that no watch has seen.
    pub(crate) fn unseen(&self) -> u64 {
        self.unseen.load(Ordering::Relaxed)
    }

    /// Times of the worker's kernels.
    pub(crate) fn kernel_times(&self) -> &KernelTimes {
        &self.times
    }

    /// The worker whose memory this is.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// A block of at least `bytes` for working memory; `op` is named if there is none.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when no hole is large enough; otherwise what the device reports.
    pub fn alloc(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<Block> {
        self.alloc_at(End::Short, op, bytes, None)
    }

    /// As [`Pool::alloc`], for a block that stays while other tasks run.
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    pub fn alloc_long(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<Block> {
        self.alloc_at(End::Long, op, bytes, None)
    }

    /// As [`Pool::alloc_long`], for what could do without: the claim of the task under way stays
    /// whole, and working memory has room for `beside` bytes in all.
    ///
    /// # Errors
    /// As [`Pool::alloc`], and when only that space is left.
    pub fn alloc_beside(
        self: &Arc<Self>,
        op: &'static str,
        bytes: u64,
        beside: u64,
    ) -> Result<Block> {
        self.alloc_at(End::Long, op, bytes, Some(beside))
    }

    fn alloc_at(
        self: &Arc<Self>,
        end: End,
        op: &'static str,
        bytes: u64,
        beside: Option<u64>,
    ) -> Result<Block> {
        let place = self.find_place(end, op, bytes, beside)?;
        self.hand_out(op, bytes, place)
    }

    /// A block of what `find_place` found.
    fn hand_out(self: &Arc<Self>, op: &'static str, bytes: u64, place: Place) -> Result<Block> {
        let block = Block {
            pool: self.clone(),
            place,
            lent: false,
            spot: None,
        };
        if bytes > 0 {
            // SAFETY: `find_place` gave this piece of the device's arena to this block alone.
            unsafe { self.device.handing_out(op, block.addr(), place.bytes)? };
        }
        Ok(block)
    }

    /// A block of at least `bytes` for another lane to fill, and the event which that lane must
    /// wait for first.
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    pub fn lend(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<(Block, Option<Event>)> {
        self.lend_at(op, bytes, None)
    }

    /// As [`Pool::lend`], for what is not needed yet; see [`Pool::alloc_beside`].
    ///
    /// # Errors
    /// As [`Pool::alloc_beside`].
    pub fn lend_beside(
        self: &Arc<Self>,
        op: &'static str,
        bytes: u64,
        beside: u64,
    ) -> Result<(Block, Option<Event>)> {
        self.lend_at(op, bytes, Some(beside))
    }

    fn lend_at(
        self: &Arc<Self>,
        op: &'static str,
        bytes: u64,
        beside: Option<u64>,
    ) -> Result<(Block, Option<Event>)> {
        if let Some(Aside { place, free }) = self.take_aside(bytes, beside) {
            let block = Block {
                pool: self.clone(),
                place,
                lent: true,
                spot: None,
            };
            return Ok((block, free));
        }
        let mut block = self.alloc_at(End::Long, op, bytes, beside)?;
        block.lent = true;
        // Kernels that use this memory may still be queued in the compute lane.
        let free = self.device.lane(LaneKind::Compute).record()?;
        Ok((block, Some(free)))
    }

    /// Claims `bytes` in one piece for the working memory of a task that starts now, in place of
    /// the claim before. Without so much room all that is left is claimed, and the answer is
    /// `false`.
    pub fn claim_working(&self, bytes: u64) -> bool {
        let has_claimed = self.lock().claim(bytes, self.usable());
        if has_claimed {
            return true;
        }
        self.trim();
        self.lock().claim(bytes, self.usable())
    }

    /// The task has ended.
    pub fn end_claim(&self) {
        self.lock().claim = 0;
    }

    /// The smallest block set aside that has `bytes` and not much more.
    fn take_aside(&self, bytes: u64, beside: Option<u64>) -> Option<Aside> {
        let most = bytes.saturating_add(bytes / 4).saturating_add(ALIGN);
        let mut state = self.lock();
        let limit = state.long_limit(self.usable(), beside);
        let best = state
            .aside
            .iter()
            .enumerate()
            .filter(|(_, aside)| (bytes..=most).contains(&aside.place.bytes))
            .filter(|(_, aside)| aside.place.is_within(limit))
            .min_by_key(|(_, aside)| aside.place.bytes)
            .map(|(index, _)| index)?;
        Some(state.aside.remove(best))
    }

    /// Gives blocks that were set aside back to the arena.
    pub fn trim(&self) {
        let aside = std::mem::take(&mut self.lock().aside);
        for Aside { place, .. } in aside {
            self.release(place);
        }
    }

    /// Gives those of them back that lie where working memory would grow.
    pub fn trim_frontier(&self) {
        while let Some(Aside { place, .. }) = self.take_frontier() {
            self.release(place);
        }
    }

    fn take_frontier(&self) -> Option<Aside> {
        let mut state = self.lock();
        let top = state.long.top;
        let is_last = |Place { end, start, bytes }: Place| end == End::Long && start + bytes == top;
        let mut aside = state.aside.iter();
        let index = aside.position(|aside| is_last(aside.place))?;
        Some(state.aside.remove(index))
    }

    fn set_aside(&self, place: Place) {
        if place.bytes == 0 {
            return;
        }
        let free = self.device.lane(LaneKind::Compute).record().ok();
        self.lock().aside.push(Aside { place, free });
    }

    fn find_place(
        &self,
        end: End,
        op: &'static str,
        bytes: u64,
        beside: Option<u64>,
    ) -> Result<Place> {
        if bytes == 0 {
            return Ok(Place {
                end,
                start: 0,
                bytes,
            });
        }
        let cap = self.usable();
        let size = bytes.checked_next_multiple_of(ALIGN);
        let take = |state: &mut PoolState| size.and_then(|size| state.take(end, size, cap, beside));
        let mut state = self.lock();
        let mut found = take(&mut state);
        if found.is_none() && !state.aside.is_empty() {
            drop(state);
            self.trim();
            state = self.lock();
            found = take(&mut state);
        }
        let Some(place) = found else {
            return Err(Error::DeviceMemory {
                device: self.device.id(),
                op,
                need: Bytes(bytes),
                line: match end {
                    End::Short => "working memory",
                    End::Long => "memory for weights and values",
                },
                largest: Bytes(state.largest(cap)),
                used: Bytes(state.used),
                cap: self.arena.bytes(),
            });
        };
        state.used += place.bytes;
        state.allocations += 1;
        state.peak_used = state.peak_used.max(state.used);
        state.high_water = state.high_water.max(state.span());
        Ok(place)
    }

    /// Bytes that blocks can have: both ends are aligned.
    fn usable(&self) -> u64 {
        self.arena.bytes().0 / ALIGN * ALIGN
    }

    /// The first address of a place.
    fn addr(&self, place: Place) -> u64 {
        let base = self.arena.base();
        match place.end {
            End::Short => base + place.start,
            End::Long => base + (self.usable() - place.start - place.bytes),
        }
    }

    fn release(&self, place: Place) {
        if place.bytes == 0 {
            return;
        }
        // SAFETY: blocks come from `find_place` and are released once, by their owner or out of those
        // set aside.
        unsafe { self.device.freed(self.addr(place), place.bytes) };
        let mut state = self.lock();
        state.used -= place.bytes;
        state.region(place.end).give_back(place.start, place.bytes);
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
        state.high_water = state.span();
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        unpoisoned(self.state.lock())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}, {:?})", self.device.id(), self.usage())
    }
}

impl PoolState {
    fn region(&mut self, end: End) -> &mut Region {
        match end {
            End::Short => &mut self.short,
            End::Long => &mut self.long,
        }
    }

    /// What both ends reach over.
    fn span(&self) -> u64 {
        self.short.top + self.long.top
    }

    /// The largest block that an arena of `cap` bytes has now.
    fn largest(&self, cap: u64) -> u64 {
        let holes = [&self.short, &self.long].map(Region::largest_hole);
        let between = cap.saturating_sub(self.span());
        holes.into_iter().fold(between, u64::max)
    }

    fn claim(&mut self, bytes: u64, cap: u64) -> bool {
        let claim = self.short.top.saturating_add(bytes);
        let left = cap - self.long.top;
        self.claim = claim.min(left);
        claim <= left
    }

    /// How far blocks of the long end may reach. With `beside`, the short end keeps the claim and at
    /// least so much.
    fn long_limit(&self, cap: u64, beside: Option<u64>) -> u64 {
        match beside {
            Some(working) => cap.saturating_sub(self.short.top.max(self.claim).max(working)),
            None => cap.saturating_sub(self.short.top),
        }
    }

    /// Where `size` bytes go in an arena of `cap`.
    fn take(&mut self, end: End, size: u64, cap: u64, beside: Option<u64>) -> Option<Place> {
        let limit = match end {
            End::Short => cap - self.long.top,
            End::Long => self.long_limit(cap, beside),
        };
        let place = |end, start| Place {
            end,
            start,
            bytes: size,
        };
        let own = self.region(end);
        // A hole behind the limit would keep the frontier there after its neighbours have gone.
        if let Some(start) = own.take_hole(size, limit) {
            return Some(place(end, start));
        }
        if own.top.saturating_add(size) <= limit {
            return Some(place(end, own.grow(size)));
        }
        if beside.is_some() {
            return None;
        }
        let other = match end {
            End::Short => End::Long,
            End::Long => End::Short,
        };
        let start = self.region(other).take_hole(size, cap)?;
        Some(place(other, start))
    }
}

impl Place {
    /// Whether it is a piece of the long end that reaches no further than `limit`. A block that was
    /// lent may lie at the other end, for want of room.
    fn is_within(&self, limit: u64) -> bool {
        self.end == End::Long && self.start + self.bytes <= limit
    }
}

impl Region {
    /// The smallest hole that has `size` bytes and ends within `limit`, the outermost of equals.
    fn take_hole(&mut self, size: u64, limit: u64) -> Option<u64> {
        let mut holes = self.by_size.range((size, 0)..).copied();
        let (room, start) = holes.find(|(_, start)| start + size <= limit)?;
        self.remove_hole(start, room);
        self.add_hole(start + size, room - size);
        Some(start)
    }

    fn largest_hole(&self) -> u64 {
        self.by_size.last().map_or(0, |(bytes, _)| *bytes)
    }

    /// `size` bytes at the frontier.
    fn grow(&mut self, size: u64) -> u64 {
        let start = self.top;
        self.top += size;
        start
    }

    fn give_back(&mut self, start: u64, bytes: u64) {
        let mut start = start;
        let mut bytes = bytes;
        if let Some((&before, &size)) = self.holes.range(..start).next_back()
            && before + size == start
        {
            self.remove_hole(before, size);
            start = before;
            bytes += size;
        }
        if let Some(&size) = self.holes.get(&(start + bytes)) {
            self.remove_hole(start + bytes, size);
            bytes += size;
        }
        if start + bytes == self.top {
            self.top = start;
        } else {
            self.add_hole(start, bytes);
        }
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
    place: Place,
    /// Filled by another lane: set aside when dropped.
    lent: bool,
    /// Where it lies now, if it may be moved; `place` then says where it was first.
    spot: Option<Arc<Spot>>,
}

impl Block {
    /// First device address.
    pub fn addr(&self) -> u64 {
        self.pool.addr(self.place())
    }

    fn place(&self) -> Place {
        let moved_to = self.spot.as_ref().map(|spot| spot.start());
        Place {
            start: moved_to.unwrap_or(self.place.start),
            ..self.place
        }
    }

    /// Size, rounded up to [`ALIGN`].
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// Whether it lies where values stay while other tasks run.
    pub fn is_long(&self) -> bool {
        self.place.end == End::Long
    }

    /// Whether it is the one that keeps working memory from growing further.
    pub fn is_at_frontier(&self) -> bool {
        let Place { end, start, bytes } = self.place;
        end == End::Long && start + bytes == self.pool.lock().long.top
    }

    /// Whether it leaves the claim of the task under way whole, and working memory room for `working`
    /// bytes in all.
    pub fn lies_beside(&self, working: u64) -> bool {
        let limit = self
            .pool
            .lock()
            .long_limit(self.pool.usable(), Some(working));
        self.place().is_within(limit)
    }

    /// Where it came from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // First, so that no move comes between: the place below is the last.
        self.end_moves();
        if self.lent {
            self.pool.set_aside(self.place());
        } else {
            self.pool.release(self.place());
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
            Bytes(self.place.bytes)
        )
    }
}
