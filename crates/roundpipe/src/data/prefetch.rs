//! Batches made ahead of the caller, by threads, in order.
//!
//! 1. A thread takes the lowest number that no thread has taken, if it is less than `ahead` beyond
//!    what the caller has received; otherwise it waits.
//! 2. It makes the batch without holding the lock, and puts it under its number.
//! 3. The caller takes the batch of the next number, and waits for it if it is not there. Since
//!    numbers are taken in order, a thread is at work on it.
//! 4. Dropping the iterator sets `stopped`; threads leave at their next look, and are joined.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::sync::{lock, unpoisoned};

/// Makes the batch of a number.
pub(super) type Make<B> = dyn Fn(usize) -> Result<B> + Send + Sync;

/// Threads that make batches ahead, and what they have made.
pub(super) struct Prefetch<B> {
    shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<B> {
    make: Arc<Make<B>>,
    end: usize,
    /// How many batches may be under way or waiting to be received.
    ahead: usize,
    state: Mutex<State<B>>,
    /// A batch is there.
    made: Condvar,
    /// There is room for another, or the iteration has stopped.
    room: Condvar,
}

struct State<B> {
    /// The next that a thread takes.
    next: usize,
    /// The next that the caller receives.
    received: usize,
    ready: BTreeMap<usize, Result<B>>,
    stopped: bool,
}

impl<B: Send + 'static> Prefetch<B> {
    /// Starts `threads` threads that make `batches`, at most `ahead` of them beyond the caller.
    ///
    /// # Errors
    /// [`Error::Config`] when the system refuses a thread.
    pub fn start(
        make: Arc<Make<B>>,
        batches: Range<usize>,
        threads: usize,
        ahead: usize,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            make,
            end: batches.end,
            ahead,
            state: Mutex::new(State {
                next: batches.start,
                received: batches.start,
                ready: BTreeMap::new(),
                stopped: false,
            }),
            made: Condvar::new(),
            room: Condvar::new(),
        });
        // Dropping it joins the threads that were started, also when the next one is refused.
        let mut prefetch = Self {
            shared,
            threads: Vec::new(),
        };
        for number in 0..threads.min(batches.len()) {
            let shared = prefetch.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("loader {number}"))
                .spawn(move || shared.work());
            let thread = thread.map_err(|error| {
                let what = format!("the system refused thread {number} of {threads}: {error}");
                Error::config("threads", what)
            })?;
            prefetch.threads.push(thread);
        }
        Ok(prefetch)
    }

    /// Waits for the next batch. The caller asks only while there is one.
    pub fn next(&self) -> Result<B> {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        loop {
            let number = state.received;
            if let Some(batch) = state.ready.remove(&number) {
                state.received += 1;
                shared.room.notify_all();
                return batch;
            }
            state = unpoisoned(shared.made.wait(state));
        }
    }
}

impl<B> Drop for Prefetch<B> {
    fn drop(&mut self) {
        lock(&self.shared.state).stopped = true;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // A batch that panics is caught where it is made, so a thread has nothing to report.
            let _ = thread.join();
        }
    }
}

impl<B> Shared<B> {
    fn work(&self) {
        while let Some(number) = self.take() {
            let batch = (self.make)(number);
            lock(&self.state).ready.insert(number, batch);
            self.made.notify_all();
        }
    }

    /// The number of the batch to make next; `None` when there is none.
    fn take(&self) -> Option<usize> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped || state.next >= self.end {
                return None;
            }
            if state.next < state.received.saturating_add(self.ahead) {
                state.next += 1;
                return Some(state.next - 1);
            }
            state = unpoisoned(self.room.wait(state));
        }
    }
}
