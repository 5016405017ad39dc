//! Times of events that stay exact however long the program runs.
//!
//! A driver tells the time between two events in f32 milliseconds. Counted from one origin for
//! ever, its steps are 0.25 ms after an hour and 8 ms after a day, more than the layers take that
//! are timed with it. So the origin is renewed: an event is counted from the newest origin of when
//! it was recorded, and an origin's own time is the sum, in f64, of the times between it and all
//! before it.
//!
//! The difference of two times is then off by half a step of what was measured: 0.12 µs, or 3e-8 of
//! the difference where that is longer. An origin made after a pause carries the rounding of that
//! pause, but so does all after it.
//!
//! # Invariants
//! - An origin has passed before an event that is counted from it is recorded, so no time is
//!   negative.
//! - No thread waits for the device while it holds the lock. Of two threads that renew at once the
//!   first wins, and both count from its origin.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::sync::lock;

/// How old the newest origin may be: below 4096 ms an f32 tells 0.24 µs apart, about what a GPU's
/// clock does. Making one waits for a stream that nothing else uses, a few µs, while other threads
/// go on.
const RENEW: Duration = Duration::from_secs(4);

/// An event, and when it passed.
pub(super) struct ClockOrigin<E> {
    pub(super) event: E,
    at_ms: f64,
}

impl<E> ClockOrigin<E> {
    /// The time of an event so many milliseconds behind this one.
    pub(super) fn ns(&self, behind_ms: f32) -> u64 {
        ((self.at_ms + f64::from(behind_ms)) * 1e6).round() as u64
    }
}

/// The newest origin of a card, and the host's time when it was made.
type Newest<E> = Option<(Arc<ClockOrigin<E>>, Instant)>;

/// The clock of a card.
pub(super) struct Clock<E> {
    newest: Mutex<Newest<E>>,
    /// What times are counted from, on the host's clock.
    zero: Instant,
}

impl<E> Clock<E> {
    /// A clock whose time 0 is a moment of the host's: one for all cards, so that their times can be
    /// compared.
    pub(super) fn since(zero: Instant) -> Self {
        Self {
            newest: Mutex::default(),
            zero,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Newest<E>> {
        lock(&self.newest)
    }

    /// What an event recorded after this call, about `now`, is counted from. `fresh` gives an event
    /// that has passed, `elapsed_ms` the time between two of them. The first origin takes its time
    /// from the host's clock, and is early by as long as `fresh` took.
    pub(super) fn origin(
        &self,
        now: Instant,
        fresh: impl FnOnce() -> Result<E>,
        elapsed_ms: impl FnOnce(&E, &E) -> Result<f32>,
    ) -> Result<Arc<ClockOrigin<E>>> {
        let before = match &*self.lock() {
            Some((origin, made)) if now.saturating_duration_since(*made) <= RENEW => {
                return Ok(origin.clone());
            }
            newest => newest.as_ref().map(|(origin, _)| origin.clone()),
        };
        let event = fresh()?;
        let at_ms = match &before {
            Some(before) => before.at_ms + f64::from(elapsed_ms(&before.event, &event)?),
            None => now.saturating_duration_since(self.zero).as_secs_f64() * 1e3,
        };
        let mine = Arc::new(ClockOrigin { event, at_ms });
        let mut newest = self.lock();
        match &*newest {
            // Another thread was first; its origin has passed as well.
            Some((other, _)) if before.is_none_or(|before| !Arc::ptr_eq(other, &before)) => {
                Ok(other.clone())
            }
            _ => {
                *newest = Some((mine.clone(), now));
                Ok(mine)
            }
        }
    }

    /// Lets go of the newest origin.
    pub(super) fn close(&self) {
        drop(self.lock().take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::Clock;

    const HOUR: u64 = 3_600_000_000_000;

    /// What a driver says: events are moments in ns, differences f32 milliseconds.
    fn elapsed_ms(from: &u64, to: &u64) -> f32 {
        assert!(from <= to, "an event before its origin");
        ((to - from) as f64 / 1e6) as f32
    }

    /// A layer takes 0.3 ms on the second day as on the first second, whether it was idle before or
    /// not, and time does not run away from the device's own.
    #[test]
    fn times_are_as_exact_after_two_days_as_at_once() {
        let start = Instant::now();
        let clock = Clock::since(start);
        let made = AtomicUsize::new(0);
        let time = |at: u64| {
            let fresh = || {
                made.fetch_add(1, Ordering::Relaxed);
                Ok(at)
            };
            let now = start + Duration::from_nanos(at);
            let origin = clock
                .origin(now, fresh, |from, to| Ok(elapsed_ms(from, to)))
                .unwrap();
            origin.ns(elapsed_ms(&origin.event, &at))
        };
        assert_eq!(time(0), 0);
        let mut stamps = 0;
        let mut check = |at: u64| {
            stamps += 2;
            let from = time(at);
            let took = time(at + 300_000) - from;
            assert!(
                took.abs_diff(300_000) < 500,
                "{took} ns instead of 300000 after {} s",
                at / 1_000_000_000
            );
        };
        // Half a second from one to the next, an hour long; then pauses of an hour.
        (0..7200).for_each(|half| check(half * 500_000_000 + 77_777));
        (1..48).for_each(|hour| check(hour * HOUR + 1_234_567));
        let end = 48 * HOUR;
        assert!(
            time(end).abs_diff(end) < 20_000_000,
            "off by {} ns",
            time(end).abs_diff(end)
        );
        let made = made.into_inner();
        assert!(
            made > 800 && made < stamps / 10,
            "{made} origins for {stamps} stamps"
        );
    }

    /// While one thread waits for a new origin another gets through, and both count from one and
    /// the same: a second first origin would begin time anew.
    #[test]
    fn two_threads_may_renew_at_once() {
        let start = Instant::now();
        let clock = Clock::since(start);
        let take = |at: u64, fresh: &mut dyn FnMut()| {
            let fresh = || {
                fresh();
                Ok(at)
            };
            clock
                .origin(start + Duration::from_nanos(at), fresh, |from, to| {
                    Ok(elapsed_ms(from, to))
                })
                .unwrap()
        };
        for at in [0, HOUR, 2 * HOUR] {
            let mut inner = None;
            std::thread::scope(|scope| {
                let outer = take(at, &mut || {
                    let (send, receive) = std::sync::mpsc::channel();
                    scope.spawn(move || send.send(take(at + 100, &mut || ())));
                    let other = receive.recv_timeout(Duration::from_secs(20));
                    inner = Some(other.expect("the lock is held while the device is waited for"));
                });
                assert!(Arc::ptr_eq(&outer, inner.as_ref().unwrap()), "at {at}");
                assert_eq!(outer.event, at + 100);
            });
            let later = take(at + 300_100, &mut || unreachable!("it was just renewed"));
            assert!(
                later
                    .ns(elapsed_ms(&later.event, &(at + 300_100)))
                    .abs_diff(at + 300_000)
                    < 500_000
            );
        }
    }

    /// Spans that lie across a renewal are whole: a span of 6 s has a new origin at its end.
    #[test]
    fn a_span_across_origins_is_exact_in_proportion() {
        let start = Instant::now();
        let clock = Clock::since(start);
        let time = |at: u64| {
            let now = start + Duration::from_nanos(at);
            let origin = clock
                .origin(now, || Ok(at), |from, to| Ok(elapsed_ms(from, to)))
                .unwrap();
            origin.ns(elapsed_ms(&origin.event, &at))
        };
        for (at, long) in [
            (100, 6_000_000_001u64),
            (HOUR, 3_999_999_999),
            (HOUR + 9_000_000_000, 60_123_456_789),
        ] {
            let took = time(at);
            let took = time(at + long) - took;
            assert!(
                took.abs_diff(long) < 250 + long / 10_000_000,
                "{took} instead of {long}"
            );
        }
    }
}
