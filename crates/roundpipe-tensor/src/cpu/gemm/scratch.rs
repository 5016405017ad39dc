//! Buffers that a thread keeps between products.
//!
//! A buffer is taken out of its thread's shelf and put back when dropped. It is never borrowed in
//! place: a worker that waits inside one product may start another one, which then simply finds the
//! shelf empty and allocates.

use std::cell::Cell;

use crate::cpu::access::CacheLine;

/// What a buffer is for; each use has its own place on the shelf.
#[derive(Debug, Clone, Copy)]
pub(super) enum Use {
    /// Panels of the left operand.
    A,
    /// Panels of the right operand.
    B,
    /// One panel of the right operand.
    Panel,
    /// Sums of one tile.
    Tile,
    /// Sums of a whole block.
    Sums,
}

thread_local! {
    static SHELF: [Cell<Vec<CacheLine>>; 5] = const { [const { Cell::new(Vec::new()) }; 5] };
}

/// Uninitialised memory, aligned to a cache line.
pub(super) struct Scratch {
    usage: Use,
    lines: Vec<CacheLine>,
}

impl Scratch {
    /// At least `bytes` bytes.
    pub(super) fn take(usage: Use, bytes: usize) -> Self {
        let mut lines = SHELF.with(|shelf| shelf[usage as usize].take());
        let need = bytes.div_ceil(size_of::<CacheLine>());
        if lines.capacity() < need {
            // Dropped first, so that old and new never exist together.
            lines = Vec::new();
            lines.reserve_exact(need);
        }
        Self { usage, lines }
    }

    /// The first byte.
    pub(super) fn ptr(&mut self) -> *mut u8 {
        self.lines.as_mut_ptr().cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        // A thread that is ending has no shelf any more; the buffer is then freed.
        let _ = SHELF.try_with(|shelf| {
            let place = &shelf[self.usage as usize];
            let other = place.take();
            place.set(if other.capacity() > lines.capacity() {
                other
            } else {
                lines
            });
        });
    }
}
