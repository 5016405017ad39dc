//! How many threads an update at lag 1 takes, and whether one at lag 0 writes weights first.
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

/// What weights first and moments later take together, beside an update in one pass: both read
/// gradients and moments.
const TWO_PASSES: f64 = 1.4;

/// The part of a step that both passes may take, and the part behind which they are given up again.
const TWO_PASSES_SHARE: [f64; 2] = [0.7, 0.9];

/// Whether updates at lag 0 write weights first and moments later ([`crate::update`]): a forward waits
/// for less then, and the host does more. Where nothing leaves time for that, one pass is sooner done.
pub(super) struct WeightsFirst {
    forced: Option<bool>,
    is_on: bool,
    /// What the last update took, both passes; `None` where it says nothing, or a caller waited for
    /// its end.
    update_ms: Option<f64>,
}

impl WeightsFirst {
    /// By what updates take, unless it is `forced`.
    pub fn new(forced: Option<bool>) -> Self {
        Self {
            forced,
            is_on: false,
            update_ms: None,
        }
    }

    /// Whether the update that begins does so, `step_ms` behind the last.
    pub fn decide(&mut self, step_ms: Option<f64>) -> bool {
        if let Some(forced) = self.forced {
            return forced;
        }
        let (passes, share) = if self.is_on {
            (1.0, TWO_PASSES_SHARE[1])
        } else {
            (TWO_PASSES, TWO_PASSES_SHARE[0])
        };
        let times = self.update_ms.zip(step_ms);
        self.is_on =
            times.is_some_and(|(update_ms, step_ms)| passes * update_ms <= share * step_ms);
        self.is_on
    }

    /// The last update took so long; `None` where a caller waited for its end.
    pub fn record(&mut self, update_ms: Option<f64>) {
        self.update_ms = update_ms;
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

    /// Two passes are for steps that leave time for them, and not where a caller waits for their end.
    #[test]
    fn weights_come_first_where_there_is_time() {
        let mut first = WeightsFirst::new(None);
        assert!(!first.decide(None), "nothing is known");
        first.record(Some(400.0));
        assert!(first.decide(Some(1600.0)));
        // Both passes now.
        first.record(Some(560.0));
        assert!(first.decide(Some(1600.0)));
        assert!(first.decide(Some(640.0)), "it stays for a while");
        assert!(!first.decide(Some(600.0)));
        first.record(Some(400.0));
        assert!(!first.decide(Some(600.0)));
        first.record(None);
        assert!(!first.decide(Some(1600.0)));
        for forced in [false, true] {
            assert_eq!(WeightsFirst::new(Some(forced)).decide(None), forced);
        }
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
