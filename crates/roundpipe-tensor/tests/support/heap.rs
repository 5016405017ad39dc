//! A global allocator that counts, and refuses what goes beyond a limit.
//!
//! A program that includes this file gets it as its allocator. Counts are of the whole process:
//! a test that measures lets nothing else run beside it. Memory that is mapped (`HostBuf`) does not
//! pass through here.
#![allow(dead_code, reason = "each program uses its part")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

#[global_allocator]
static HEAP: Heap = Heap;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The size of the request that was refused.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

struct Heap;

/// Bytes that are allocated now.
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Starts a measurement: from here on, `room` more bytes than now may be allocated.
pub fn start(room: usize) {
    let live = live();
    REFUSED.store(0, Relaxed);
    PEAK.store(live, Relaxed);
    LIMIT.store(live.saturating_add(room), Relaxed);
}

/// Ends a measurement: the most bytes that were allocated at once, and the size of the request that
/// was refused, 0 for none. The first that goes beyond the limit is refused, and none after it.
pub fn stop() -> (usize, usize) {
    LIMIT.store(usize::MAX, Relaxed);
    (PEAK.load(Relaxed), REFUSED.load(Relaxed))
}

impl Heap {
    /// Counts `bytes` more, if the limit allows.
    fn claim(bytes: usize) -> bool {
        let now = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
        if now > LIMIT.load(Relaxed) {
            LIVE.fetch_sub(bytes, Relaxed);
            // Once is enough to be found, and reporting it needs memory.
            REFUSED.store(bytes, Relaxed);
            LIMIT.store(usize::MAX, Relaxed);
            return false;
        }
        PEAK.fetch_max(now, Relaxed);
        true
    }

    fn release(bytes: usize) {
        LIVE.fetch_sub(bytes, Relaxed);
    }
}

// SAFETY: all memory is the system allocator's, asked with the caller's own layout; counting
// neither touches it nor unwinds, and null is a permitted answer.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !Self::claim(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller gives a layout of non-zero size, as `alloc` demands.
        let ptr = unsafe { System.alloc(layout) };
        if ptr.is_null() {
            Self::release(layout.size());
        }
        ptr
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::claim(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as in `alloc`.
        let ptr = unsafe { System.alloc_zeroed(layout) };
        if ptr.is_null() {
            Self::release(layout.size());
        }
        ptr
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller got `ptr` from this allocator, so from the system's, with this layout.
        unsafe { System.dealloc(ptr, layout) };
        Self::release(layout.size());
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both sizes count until the old one is gone, as they may both exist while bytes move.
        if !Self::claim(new_size) {
            return std::ptr::null_mut();
        }
        // SAFETY: as in `dealloc`; the caller promises that `new_size` is not 0 and fits the
        // alignment.
        let new = unsafe { System.realloc(ptr, layout, new_size) };
        Self::release(if new.is_null() {
            new_size
        } else {
            layout.size()
        });
        new
    }
}
