//! How many kernels a launching thread may be ahead of its GPU.
//!
//! A stream holds about a thousand launches. With more, the driver makes the launching thread wait
//! inside the call, under a lock that copies of other threads need: uploads into other streams stop
//! until the GPU has caught up. A launching thread therefore waits here, outside the driver and
//! earlier.
//!
//! Nothing waits while a graph is captured: its launches are not queued.
//!
//! # Invariants
//! - At most [`MOST_MARKS`] + 1 times [`MARK_EVERY`] operations are queued that have not run.
//! - The GPU never runs dry for this: the thread waits for the oldest mark alone, and the operations
//!   behind it take longer than the thread needs to wake up.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::Event;
use crate::error::Result;
use crate::sync::lock;

/// Operations between two marks. An operation is one to three launches.
const MARK_EVERY: usize = 32;
/// Marks that the GPU may have before it.
const MOST_MARKS: usize = 8;

/// The operations of a stream that may not have run yet.
#[derive(Default)]
pub(super) struct Backlog {
    queued: Mutex<Queued>,
    is_capturing: AtomicBool,
}

#[derive(Default)]
struct Queued {
    /// Operations since the last mark.
    since_mark: usize,
    marks: VecDeque<Event>,
}

impl Backlog {
    /// Counts an operation that is queued next, and waits until there is room for it. `record` marks
    /// a point of the stream.
    ///
    /// # Errors
    /// When `record` fails.
    pub(super) fn make_room(&self, record: impl FnOnce() -> Result<Event>) -> Result<()> {
        if self.is_capturing.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut queued = lock(&self.queued);
        queued.since_mark += 1;
        if queued.since_mark < MARK_EVERY {
            return Ok(());
        }
        queued.since_mark = 0;
        queued.marks.push_back(record()?);
        if queued.marks.len() <= MOST_MARKS {
            return Ok(());
        }
        let oldest = queued.marks.pop_front();
        // Other threads may launch meanwhile, and wait for marks of their own.
        drop(queued);
        if let Some(oldest) = oldest {
            // A failure of the lane is for those who ask for results.
            oldest.state().wait_quietly();
        }
        Ok(())
    }

    /// Runs `capture`, in which launches are not queued.
    pub(super) fn while_capturing<R>(&self, capture: impl FnOnce() -> R) -> R {
        self.is_capturing.store(true, Ordering::Release);
        let captured = capture();
        self.is_capturing.store(false, Ordering::Release);
        captured
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::device::EventState;

    /// Counts who waited for it.
    #[derive(Debug)]
    struct Waited(Arc<AtomicUsize>);

    // SAFETY: no lane stands behind it, so there is nothing that could still run.
    unsafe impl EventState for Waited {
        fn passed(&self) -> Result<bool> {
            Ok(false)
        }

        fn fence(&self) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    /// A thread that launches without end waits for the oldest mark, from the ninth mark on.
    #[test]
    fn launches_wait_for_the_oldest_mark() {
        let waits = Arc::new(AtomicUsize::new(0));
        let backlog = Backlog::default();
        let launch = |count: usize| {
            for _ in 0..count {
                let mark = || Ok(Event::new(Arc::new(Waited(waits.clone()))));
                backlog.make_room(mark).unwrap();
            }
            waits.load(Ordering::Relaxed)
        };
        assert_eq!(launch(MARK_EVERY * MOST_MARKS), 0);
        assert_eq!(backlog.while_capturing(|| launch(10 * MARK_EVERY)), 0);
        assert_eq!(launch(MARK_EVERY - 1), 0);
        assert_eq!(launch(1), 1);
        assert_eq!(launch(3 * MARK_EVERY), 4);
    }
}
