//! What a render may use: steps, bytes alive, and nesting of values.
//!
//! The counters belong to the thread, so that values can count themselves without carrying a reference to the
//! render; a render sets them when it starts. Places that cannot fail (equality, drops) only count; the next
//! step of the interpreter reports.

use std::cell::Cell;

use super::Fault;

/// How deep lists and dictionaries may hold each other; bounds the stack that printing and dropping need.
const MAX_NESTING: u32 = 250;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
    static FUEL: Cell<u64> = const { Cell::new(u64::MAX) };
    static TOO_DEEP: Cell<bool> = const { Cell::new(false) };
}

/// Starts a render: from now on `bytes` more may live and `steps` be done.
pub(super) fn start(bytes: usize, steps: u64) {
    MOST.set(LIVE.get().saturating_add(bytes));
    FUEL.set(steps);
    TOO_DEEP.set(false);
}

/// Bytes that may still be made.
pub(super) fn room() -> usize {
    MOST.get().saturating_sub(LIVE.get())
}

/// Uses up steps; false when none are left.
pub(super) fn spend(steps: u64) -> bool {
    let left = FUEL.get().saturating_sub(steps);
    FUEL.set(left);
    left > 0
}

/// Uses up the steps of an operation on `bytes` bytes.
pub(super) fn spend_bytes(bytes: usize) {
    spend(bytes as u64 / 64);
}

/// Refuses a result of `bytes` that does not fit, before it is made.
pub(super) fn reserve(bytes: usize) -> Result<(), Fault> {
    if bytes <= room() {
        return Ok(());
    }
    Err(Fault::new("needs more memory than a render may use; the template repeats or collects too much"))
}

/// One step of the interpreter: reports what was counted since the last one.
pub(super) fn step() -> Result<(), Fault> {
    if TOO_DEEP.get() {
        return Err(Fault::new(format!("values hold each other deeper than {MAX_NESTING} levels")));
    }
    if !spend(1) {
        return Err(Fault::new("runs too long (a loop that does not end?); simplify the template"));
    }
    if LIVE.get() > MOST.get() { reserve(usize::MAX) } else { Ok(()) }
}

/// Notes the nesting of a new value; false when it must not be made.
pub(super) fn nesting_fits(depth: u32) -> bool {
    if depth > MAX_NESTING {
        TOO_DEEP.set(true);
    }
    depth <= MAX_NESTING
}

/// Counts bytes from its creation to its drop.
#[derive(Debug)]
pub(super) struct Charge(usize);

impl Charge {
    pub(super) fn new(bytes: usize) -> Self {
        LIVE.set(LIVE.get() + bytes);
        spend_bytes(bytes);
        Self(bytes)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        LIVE.set(LIVE.get().saturating_sub(self.0));
    }
}
