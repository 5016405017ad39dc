//! Work done ahead of the caller, by threads, delivered in order.
//!
//! 1. A thread takes the lowest number that no thread has taken, if it is less than `most` beyond
//!    what the caller has received; otherwise it waits.
//! 2. It works without holding the lock, and puts the result under its number.
//! 3. The caller takes the result of the next number, and waits for it if it is not there. Numbers
//!    are taken in order, so a thread is at work on it.
//! 4. Dropping sets `stopped`; threads leave at their next look, and are joined.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::{Error, Result};

/// What a number is turned into. It does not panic.
pub(crate) type Make<T> = dyn Fn(u64) -> T + Send + Sync;

/// Threads at work on numbers, and their results.
pub(crate) struct Ahead<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    make: Arc<Make<T>>,
    end: u64,
    most: u64,
    state: Mutex<State<T>>,
    /// A result is there.
    made: Condvar,
    /// There is room for another, or the work has stopped.
    room: Condvar,
}

struct State<T> {
    next: u64,
    received: u64,
    ready: BTreeMap<u64, T>,
    stopped: bool,
}

impl<T: Send + 'static> Ahead<T> {
    /// Starts `threads` threads on the numbers from `start` to below `end`.
    pub fn start(make: Arc<Make<T>>, start: u64, end: u64, threads: usize) -> Result<Self> {
        let shared = Shared {
            make,
            end,
            most: threads as u64 * 4,
            state: Mutex::new(State {
                next: start,
                received: start,
                ready: BTreeMap::new(),
                stopped: false,
            }),
            made: Condvar::new(),
            room: Condvar::new(),
        };
        // Dropping it joins the threads that were started, also when the next one is refused.
        let mut ahead = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
        };
        for number in 0..threads {
            let shared = ahead.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("tokens {number}"))
                // Templates need up to 1 MiB, nested JSON some more.
                .stack_size(8 << 20)
                .spawn(move || shared.work())
                .map_err(|e| {
                    let why = format!("the system refused thread {number} of {threads}: {e}");
                    Error::setting("threads", why)
                })?;
            ahead.threads.push(thread);
        }
        Ok(ahead)
    }

    /// Waits for the next result. The caller asks only while there is one.
    pub fn next(&self) -> T {
        let mut state = self.shared.lock();
        loop {
            let number = state.received;
            if let Some(result) = state.ready.remove(&number) {
                state.received += 1;
                self.shared.room.notify_all();
                return result;
            }
            let woken = self.shared.made.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // The work does not panic, so a thread has nothing to report.
            let _ = thread.join();
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(number) = self.take() {
            let result = (self.make)(number);
            self.lock().ready.insert(number, result);
            self.made.notify_all();
        }
    }

    fn take(&self) -> Option<u64> {
        let mut state = self.lock();
        loop {
            if state.stopped || state.next >= self.end {
                return None;
            }
            if state.next < state.received + self.most {
                state.next += 1;
                return Some(state.next - 1);
            }
            let woken = self.room.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
