//! Faults to inject: which calls fail, and when.
//!
//! A fault is one failure of one call. Nothing stays broken: the call after it works again.

use super::timing::throw;
use crate::device::LaneKind;

/// What fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Reserving the arena.
    Reserve,
    /// Handing out a block of the pool.
    Alloc,
    /// Queuing a kernel; the launch returns the error.
    Launch,
    /// A kernel while it runs; its destinations are poisoned, a fence returns the error.
    Kernel,
    /// A copy while it runs; its destination is poisoned, a fence returns the error.
    Copy,
    /// Recording an event; the lane is drained first, so that no thread is left waiting.
    Record,
    /// Queuing a wait for an event.
    Wait,
    /// An event that is recorded and never passes. The first wait for it returns the dead-lock as
    /// an error; then the event passes.
    Lost,
}

impl FaultKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Alloc => "alloc",
            Self::Launch => "launch",
            Self::Kernel => "kernel",
            Self::Copy => "copy",
            Self::Record => "record",
            Self::Wait => "wait",
            Self::Lost => "lost event",
        }
    }
}

/// Which of the matching calls fail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum When {
    /// The n-th from now on, counted from 1.
    Nth(u64),
    /// Each with this probability, by the seed.
    Chance(f64),
}

/// A planned fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// What fails.
    pub kind: FaultKind,
    /// When.
    pub when: When,
    /// On this worker only.
    pub worker: Option<u32>,
    /// In this lane only.
    pub lane: Option<LaneKind>,
}

impl Fault {
    /// The n-th call of a kind, counted from 1, on any worker and lane.
    pub fn nth(kind: FaultKind, n: u64) -> Self {
        Self {
            kind,
            when: When::Nth(n),
            worker: None,
            lane: None,
        }
    }

    /// Any call of a kind with probability `p`.
    pub fn chance(kind: FaultKind, p: f64) -> Self {
        Self {
            kind,
            when: When::Chance(p),
            worker: None,
            lane: None,
        }
    }

    /// Narrows it to one worker.
    #[must_use]
    pub fn on_worker(mut self, worker: u32) -> Self {
        self.worker = Some(worker);
        self
    }

    /// Narrows it to one kind of lane.
    #[must_use]
    pub fn on_lane(mut self, lane: LaneKind) -> Self {
        self.lane = Some(lane);
        self
    }

    fn meets(&self, kind: FaultKind, worker: u32, lane: Option<LaneKind>) -> bool {
        self.kind == kind
            && self.worker.is_none_or(|w| w == worker)
            && (self.lane.is_none() || self.lane == lane)
    }
}

/// All planned faults, each with the number of calls it has met.
#[derive(Debug, Default)]
pub(super) struct FaultPlan {
    rules: Vec<(Fault, u64)>,
}

impl FaultPlan {
    pub fn add(&mut self, fault: Fault) {
        self.rules.push((fault, 0));
    }

    pub fn clear(&mut self) {
        self.rules.clear();
    }

    /// Whether this call fails; every planned fault that it meets counts it.
    pub fn strikes(
        &mut self,
        seed: u64,
        kind: FaultKind,
        worker: u32,
        lane: Option<LaneKind>,
    ) -> bool {
        let mut hit = false;
        for (number, (fault, met)) in self.rules.iter_mut().enumerate() {
            if fault.meets(kind, worker, lane) {
                *met += 1;
                hit |= match fault.when {
                    When::Nth(n) => *met == n,
                    // Lanes are numbered from 0 up; rules from the other end, so that throws
                    // differ.
                    When::Chance(p) => throw(seed, u32::MAX as usize - number, *met, 3) < p,
                };
            }
        }
        hit
    }
}
