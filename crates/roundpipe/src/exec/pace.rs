//! How many threads an update at lag 1 takes.
//!
//! Beside the next step an update has time, and its threads take memory bandwidth from copies to the
//! devices: with all cores, uploads of weights ran at half their rate. So an update takes about as
//! many threads as let it end within [`SHARE`] of a step, before the next backward wants to write
//! gradients that it has not read. Where a caller waits for it, it takes all of them ([`Urgency`]).
//!
//! # Invariants
//! - No bit of a result depends on the number of threads.
//! - An update that took longer than its share gets more threads, up to all of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use roundpipe_tensor::cpu::threads::Threads;

use crate::sync::lock;

/// The part of a step that an update may take. Forwards take a fifth to two fifths of it.
const SHARE: f64 = 0.3;
/// Steps that the time of a step is the least of: some have a validation or a checkpoint in them.
const REMEMBERED: usize = 4;

/// What updates took so far.
#[derive(Debug)]
pub(crate) struct Pace {
    /// All threads that there are.
    most: usize,
    /// What the next update takes.
    threads: usize,
    /// From the start of one update to the start of the next.
    steps_ms: VecDeque<f64>,
}

impl Pace {
    pub fn new(most: usize) -> Self {
        Self {
            most,
            threads: most,
            steps_ms: VecDeque::new(),
        }
    }

    /// The threads of the next update.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// An update with [`Pace::threads`] took `update_ms`, and began `step_ms` after the last.
    pub fn record(&mut self, step_ms: Option<f64>, update_ms: f64) {
        let Some(step_ms) = step_ms else {
            return;
        };
        if self.steps_ms.len() == REMEMBERED {
            self.steps_ms.pop_front();
        }
        self.steps_ms.push_back(step_ms);
        let step_ms = self.steps_ms.iter().copied().fold(f64::INFINITY, f64::min);
        // As if twice the threads took half the time. Memory gives them less, so this comes closer
        // from above, step by step.
        let wanted = (self.threads as f64 * update_ms / (SHARE * step_ms)).ceil();
        self.threads = (wanted as usize).clamp(1, self.most);
    }
}

/// Whether someone waits for updates, and the threads that make them.
#[derive(Debug)]
pub(crate) struct Urgency {
    threads: Threads,
    state: Mutex<UrgencyState>,
}

#[derive(Debug, Default)]
struct UrgencyState {
    /// Those who wait now.
    waiters: usize,
    /// Whether someone has waited since the update under way began.
    hurried: bool,
}

impl Urgency {
    pub fn new(threads: Threads) -> Arc<Self> {
        Arc::new(Self {
            threads,
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, UrgencyState> {
        lock(&self.state)
    }

    /// Lets the update under way and those that begin use all threads, as long as the result lives.
    pub fn hurry(self: &Arc<Self>) -> Hurried {
        let mut state = self.lock();
        state.waiters += 1;
        state.hurried = true;
        self.threads.set_most(self.threads.count());
        Hurried(self.clone())
    }

    /// An update begins, with so many threads unless someone waits for it.
    pub fn begin(&self, threads: usize) -> PacedUpdate<'_> {
        let mut state = self.lock();
        state.hurried = state.waiters > 0;
        if !state.hurried {
            // Under the lock, so that it comes before what a waiter sets.
            self.threads.set_most(threads);
        }
        PacedUpdate(self)
    }
}

/// Someone waits for updates.
pub(crate) struct Hurried(Arc<Urgency>);

impl Drop for Hurried {
    fn drop(&mut self) {
        self.0.lock().waiters -= 1;
    }
}

/// An update under way; all threads are free for other work behind it, however it ends.
pub(crate) struct PacedUpdate<'a>(&'a Urgency);

impl PacedUpdate<'_> {
    /// Whether someone waited for it, so that its time says nothing about its threads.
    pub fn was_hurried(&self) -> bool {
        self.0.lock().hurried
    }
}

impl Drop for PacedUpdate<'_> {
    fn drop(&mut self) {
        let threads = &self.0.threads;
        threads.set_most(threads.count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who comes before an update that has not begun hurries it as well as who comes later.
    #[test]
    fn who_waits_gets_all_threads() {
        let threads = Threads::new(Some(4)).unwrap();
        let urgency = Urgency::new(threads.clone());
        let calm = urgency.begin(1);
        assert_eq!(threads.most(), 1);
        let waits = urgency.hurry();
        assert_eq!(threads.most(), 4);
        assert!(calm.was_hurried());
        drop(calm);
        let hurried = urgency.begin(1);
        assert_eq!(threads.most(), 4, "it waits still");
        drop(waits);
        assert!(hurried.was_hurried());
        drop(hurried);
        let calm = urgency.begin(1);
        assert_eq!(threads.most(), 1);
        assert!(!calm.was_hurried());
        drop(calm);
        assert_eq!(threads.most(), 4);
    }

    /// An update on so many threads, each of which moves `rate`, where memory moves `most` at best.
    fn update_ms(work: f64, threads: usize, rate: f64, most: f64) -> f64 {
        work / (threads as f64 * rate).min(most)
    }

    #[test]
    fn threads_are_as_many_as_the_share_takes() {
        let mut pace = Pace::new(16);
        for _ in 0..10 {
            let ms = update_ms(30_000.0, pace.threads(), 11.0, 130.0);
            pace.record(Some(1300.0), ms);
        }
        assert_eq!(pace.threads(), 7, "30,000 / 7 / 11 is within 390 ms");
        // The host becomes slow: all threads are just enough.
        for _ in 0..10 {
            let ms = update_ms(30_000.0, pace.threads(), 4.0, 130.0);
            pace.record(Some(1300.0), ms);
        }
        assert_eq!(pace.threads(), 16);
    }

    #[test]
    fn a_pause_between_steps_changes_nothing() {
        let mut pace = Pace::new(8);
        pace.record(None, 100.0);
        assert_eq!(pace.threads(), 8, "no step is known yet");
        for step_ms in [1000.0, 1000.0, 60_000.0] {
            pace.record(Some(step_ms), 300.0 * 8.0 / pace.threads() as f64);
        }
        assert_eq!(pace.threads(), 8);
    }
}
