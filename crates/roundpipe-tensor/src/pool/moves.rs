//! Joins holes of working memory by moving the blocks between them.
//!
//! A task's blocks come and go in any order and leave holes. A request may then find enough memory
//! free, but not in one piece. Blocks of [`Pool::alloc_movable`] are moved down in that case, by
//! copies in the compute lane, until neighbouring holes are one. It is the last resort of a request:
//! the cheapest holes to join are taken, and nothing moves while a hole is large enough.
//!
//! # Rules
//! 1. A block moves only in a request of the thread that allocated it, and only while it has no pin.
//! 2. That thread reads an address behind its last allocation before the kernel or copy that uses
//!    it, so no move comes between.
//! 3. Other threads pin a block before they read its address, until their work is queued. Recordings,
//!    and values that are handed to other threads with an event, are pinned for good.
//! 4. A move is queued in the compute lane: kernels queued before it use the old address, those
//!    behind it the new one. Where another lane reads the block, the compute lane waits for that
//!    first ([`Block::read_until`]).
//! 5. Starts and pins change under the pool's lock, so a pin waits for a move under way. Copies are
//!    queued under it too: no device takes memory of a pool while it queues a kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use super::{Block, End, Place, Pool, PoolState};
use crate::device::{Event, LaneKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::shape::{Layout, Shape};

/// What moves are called in errors and traces.
const OP: &str = "move";

/// Where a movable block lies now.
#[derive(Debug)]
pub(super) struct Spot {
    /// Distance from the start of the arena.
    start: AtomicU64,
    /// Readers that do not follow moves.
    pins: AtomicU32,
    /// Who allocated it and may move it.
    owner: ThreadId,
}

impl Spot {
    pub fn start(&self) -> u64 {
        // Rules 2 and 3: no move comes between this and the use of the address.
        self.start.load(Ordering::Relaxed)
    }

    /// Whether this thread allocated it.
    fn is_own(&self) -> bool {
        self.owner == thread::current().id()
    }

    fn may_move(&self) -> bool {
        self.is_own() && self.pins.load(Ordering::Relaxed) == 0
    }
}

/// A movable block as the pool knows it.
pub(super) struct Movable {
    bytes: u64,
    spot: Arc<Spot>,
    /// Behind what other lanes read of it.
    readers: Vec<Event>,
}

/// A hole, and blocks above it that leave a larger hole behind when they move down.
#[derive(Clone, Copy)]
struct Run {
    start: u64,
    blocks: usize,
    moved_bytes: u64,
}

impl Pool {
    /// As [`Pool::alloc`], for a block that may be moved later; when no hole is large enough, such
    /// blocks of this thread are moved to make one.
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    pub(crate) fn alloc_movable(self: &Arc<Self>, op: &'static str, bytes: u64) -> Result<Block> {
        let place = match self.find_place(End::Short, op, bytes, None) {
            Err(Error::DeviceMemory { .. }) if self.join_holes(bytes)? => {
                self.find_place(End::Short, op, bytes, None)
            }
            found => found,
        }?;
        let mut block = self.hand_out(op, bytes, place)?;
        if place.end == End::Short && place.bytes > 0 {
            block.spot = Some(self.lock().let_move(place));
        }
        Ok(block)
    }

    /// Moves blocks until working memory has `bytes` in one piece; whether it has.
    fn join_holes(&self, bytes: u64) -> Result<bool> {
        let Some(size) = bytes.checked_next_multiple_of(super::ALIGN) else {
            return Ok(false);
        };
        let mut state = self.lock();
        let Some(run) = state.cheapest_run(size, self.usable()) else {
            return Ok(false);
        };
        let mut hole = run.start;
        for _ in 0..run.blocks {
            hole = self.slide(&mut state, hole)?;
        }
        Ok(true)
    }

    /// Moves the block above the hole at `hole` down onto it; gives the start of the hole that it
    /// leaves.
    fn slide(&self, state: &mut PoolState, hole: u64) -> Result<u64> {
        let gap = state.short.holes[&hole];
        let from = hole + gap;
        let block = state.movable.get_mut(&from).expect("a run has blocks");
        let bytes = block.bytes;
        for event in block.readers.drain(..) {
            self.device.lane(LaneKind::Compute).wait(&event)?;
        }
        self.copy_down(state, hole, gap, bytes)?;
        let block = state.movable.remove(&from).expect("found above");
        block.spot.start.store(hole, Ordering::Relaxed);
        state.movable.insert(hole, block);
        state.short.remove_hole(hole, gap);
        state.short.give_back(hole + bytes, gap);
        Ok(hole + bytes)
    }

    /// Queues the copies that move a block of `bytes` down by `gap`, onto the hole at `hole`.
    fn copy_down(&self, state: &PoolState, hole: u64, gap: u64, bytes: u64) -> Result<()> {
        let dst = self.arena.base() + hole;
        let src = dst + gap;
        // The block takes this much of the hole, and leaves as much at its other side.
        let taken = gap.min(bytes);
        // SAFETY: a hole of this device's arena, which the lock keeps from others.
        unsafe { self.device.handing_out(OP, dst, taken)? };
        let copied = self.copy_chunks(state, (src, dst, bytes), hole);
        // SAFETY: the block lies below these bytes now; without the copies, its contents are lost
        // with the device.
        unsafe { self.device.freed(src + bytes - taken, taken) };
        copied
    }

    /// Copies `bytes` from `src` down to `dst`, in chunks that do not overlap: of the gap between
    /// them, or through a larger piece that is free.
    fn copy_chunks(
        &self,
        state: &PoolState,
        (src, dst, bytes): (u64, u64, u64),
        hole: u64,
    ) -> Result<()> {
        let gap = src - dst;
        let (spare, spare_bytes) = state.spare_piece(hole, self.usable());
        if gap >= bytes || gap >= spare_bytes {
            return each_chunk(bytes, gap, |at, chunk| {
                self.queue_copy(src + at, dst + at, chunk)
            });
        }
        let spare = self.arena.base() + spare;
        // SAFETY: a free piece of this device's arena, which the lock keeps from others.
        unsafe { self.device.handing_out(OP, spare, spare_bytes)? };
        let copied = each_chunk(bytes, spare_bytes, |at, chunk| {
            self.queue_copy(src + at, spare, chunk)?;
            self.queue_copy(spare, dst + at, chunk)
        });
        // SAFETY: it was handed out above, and no block has it.
        unsafe { self.device.freed(spare, spare_bytes) };
        copied
    }

    /// Queues a copy between two pieces of the arena that do not overlap.
    fn queue_copy(&self, src: u64, dst: u64, bytes: u64) -> Result<()> {
        // Integers, so that every bit is copied as it is.
        let dtype = DType::I64;
        let shape = Shape::new(&[bytes as usize / dtype.size()])?;
        let view = |ptr| View {
            ptr,
            dtype,
            layout: Layout::contiguous(shape),
        };
        let lane = self.device.lane(LaneKind::Compute);
        let ops = self.device.ops();
        let (src, dst) = ([Some(view(src))], [Some(view(dst))]);
        // SAFETY: both ranges are `bytes` long, a multiple of `ALIGN`, lie in this device's arena
        // and do not overlap; the lock keeps the block and the free pieces from others until this is
        // queued, and the lane orders it with every kernel that uses them (rule 4).
        unsafe { ops.launch(lane, &Kernel::Copy, &src, &dst, None, None) }
    }
}

/// Calls `copy` for each chunk of so many bytes with its place, from the lowest on.
fn each_chunk(bytes: u64, chunk: u64, mut copy: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    let mut at = 0;
    while at < bytes {
        copy(at, chunk.min(bytes - at))?;
        at += chunk;
    }
    Ok(())
}

impl PoolState {
    fn let_move(&mut self, place: Place) -> Arc<Spot> {
        let spot = Arc::new(Spot {
            start: AtomicU64::new(place.start),
            pins: AtomicU32::new(0),
            owner: thread::current().id(),
        });
        let movable = Movable {
            bytes: place.bytes,
            spot: spot.clone(),
            readers: Vec::new(),
        };
        self.movable.insert(place.start, movable);
        spot
    }

    /// The moves of the fewest bytes that leave a hole of `size` bytes.
    fn cheapest_run(&self, size: u64, cap: u64) -> Option<Run> {
        let mut best: Option<Run> = None;
        for hole in self.short.holes.keys() {
            let most = best.map_or(u64::MAX, |run| run.moved_bytes);
            best = self.run_from(*hole, size, cap, most).or(best);
        }
        best
    }

    /// The blocks above a hole that leave one of `size` bytes, if they have fewer bytes than `most`.
    fn run_from(&self, hole: u64, size: u64, cap: u64, most: u64) -> Option<Run> {
        let mut run = Run {
            start: hole,
            blocks: 0,
            moved_bytes: 0,
        };
        let mut free = 0;
        let mut at = hole;
        while at < self.short.top {
            if let Some(bytes) = self.short.holes.get(&at) {
                free += bytes;
                at += bytes;
                if free >= size {
                    return Some(run);
                }
                continue;
            }
            let block = self.movable.get(&at)?;
            run.blocks += 1;
            run.moved_bytes += block.bytes;
            at += block.bytes;
            if !block.spot.may_move() || run.moved_bytes >= most {
                return None;
            }
        }
        free += cap.saturating_sub(self.span());
        (free >= size).then_some(run)
    }

    /// The largest free piece but the hole at `hole`, by start and size: between the ends, or below
    /// the top of the short one.
    fn spare_piece(&self, hole: u64, cap: u64) -> (u64, u64) {
        let between = (self.short.top, cap.saturating_sub(self.span()));
        let mut holes = self.short.by_size.iter().rev();
        match holes.find(|(_, start)| *start != hole) {
            Some((bytes, start)) if *bytes > between.1 => (*start, *bytes),
            _ => between,
        }
    }
}

impl Block {
    /// Whether another thread may move it.
    pub(crate) fn is_moved_by_others(&self) -> bool {
        self.spot.as_ref().is_some_and(|spot| !spot.is_own())
    }

    /// From now on it stays where it is, until [`Block::unpin`].
    pub(crate) fn pin(&self) {
        if let Some(spot) = &self.spot {
            let _state = self.pool.lock();
            spot.pins.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes one pin back.
    pub(crate) fn unpin(&self) {
        if let Some(spot) = &self.spot {
            let _state = self.pool.lock();
            spot.pins.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Another lane reads it until `event`.
    pub(crate) fn read_until(&self, event: &Event) {
        if let Some(spot) = &self.spot {
            let mut state = self.pool.lock();
            let block = state.movable.get_mut(&spot.start());
            block.expect("it lives").readers.push(event.clone());
        }
    }

    /// It goes back to the pool, so it is moved no more.
    pub(super) fn end_moves(&self) {
        if let Some(spot) = &self.spot {
            let mut state = self.pool.lock();
            state.movable.remove(&spot.start());
        }
    }
}
