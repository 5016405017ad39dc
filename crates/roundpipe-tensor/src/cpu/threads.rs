//! The cores that one cpu device computes with.
//!
//! A kernel cuts its work into tasks whose number and extent depend on the sizes alone, never on
//! the number of threads, and no task reads what another writes. So any number of threads gives the
//! same bits; this type only decides who runs which task.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use crate::bytes::Bytes;
use crate::error::{Error, Result};

/// A set of worker threads; cloning shares them.
#[derive(Debug, Clone)]
pub struct Threads {
    pool: Option<Arc<rayon::ThreadPool>>,
    count: usize,
    /// How many work at a time.
    most: Arc<AtomicUsize>,
}

impl Threads {
    /// `count` threads, or one per core when `None`. One thread means: the calling one.
    ///
    /// # Errors
    /// When the system starts no threads.
    pub fn new(count: Option<usize>) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = count.unwrap_or(cores).clamp(1, 1024);
        if count == 1 || cfg!(miri) {
            return Ok(Self::of(None, count));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|i| format!("roundpipe-cpu-{i}"))
            .build()
            .map_err(|e| Error::HostMemory {
                what: "worker threads",
                need: Bytes(0),
                cause: std::io::Error::other(e),
            })?;
        Ok(Self::of(Some(Arc::new(pool)), count))
    }

    fn of(pool: Option<Arc<rayon::ThreadPool>>, count: usize) -> Self {
        let most = Arc::new(AtomicUsize::new(count));
        Self { pool, count, most }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Lets at most so many of them work at a time, from the next [`Threads::run`] on.
    pub fn set_most(&self, most: usize) {
        self.most
            .store(most.clamp(1, self.count), Ordering::Relaxed);
    }

    /// How many of them work at a time.
    pub fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    /// Runs `task(0)` … `task(tasks - 1)`, in any order, on these threads; returns when all are
    /// done.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync + Send) {
        self.share(tasks, &task);
    }

    /// Not generic on purpose: rayon's machinery is compiled once instead of once per kernel.
    fn share(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        match &self.pool {
            Some(pool) if tasks > 1 => {
                let most = self.most();
                if most < self.count {
                    return pool.install(|| share_among(most, tasks, task));
                }
                pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task));
            }
            #[cfg(miri)]
            None if self.count > 1 && tasks > 1 => plain_threads(self.count, tasks, task),
            _ => (0..tasks).for_each(task),
        }
    }
}

/// Some of a pool's threads take the tasks one by one.
fn share_among(threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < tasks);
    let work = |_| std::iter::from_fn(take).for_each(task);
    (0..threads).into_par_iter().with_max_len(1).for_each(work);
}

/// Miri refuses the queues that rayon stands on, whatever runs in them; whether tasks meet shows on
/// any threads.
#[cfg(miri)]
fn plain_threads(threads: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < tasks);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(tasks) {
            scope.spawn(|| std::iter::from_fn(take).for_each(task));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::Threads;

    #[test]
    fn every_task_runs_once() {
        for count in [1, 2, 5] {
            let hits: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            let threads = Threads::new(Some(count)).unwrap();
            threads.run(hits.len(), |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                "{count} threads"
            );
        }
    }

    #[test]
    fn no_more_work_than_may() {
        let threads = Threads::new(Some(4)).unwrap();
        for (most, allowed) in [(2, 2), (0, 1), (9, 4)] {
            threads.set_most(most);
            let (hits, at_once, peak) = (
                AtomicUsize::new(0),
                AtomicUsize::new(0),
                AtomicUsize::new(0),
            );
            threads.run(97, |_| {
                peak.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                at_once.fetch_sub(1, Ordering::SeqCst);
                hits.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(hits.into_inner(), 97, "at most {most}");
            assert!(peak.into_inner() <= allowed, "at most {most}");
        }
    }
}
