//! Protocols in every order that threads can run (loom reports a deadlock; its waits have no
//! timeout).
//!
//! - Versions: no reader sees a torn or overwritten version, and no writer waits for ever.
//! - The end of a call: it ends once, committed or failed, and a failure has reached the other calls
//!   before it does.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p roundpipe --test loom`.
#![cfg(loom)]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use roundpipe::testing::ending::{Ending, PartEnd};
use roundpipe::testing::{Abort, Aborted, Gate, Versions};

/// A slab of weights: loom's cell reports a read beside a write, the number says which version is
/// in it.
struct Slab {
    access: UnsafeCell<()>,
    version: AtomicU64,
}

struct Layer {
    versions: Versions,
    abort: Abort,
    slabs: Vec<Slab>,
}

impl Layer {
    fn new(slabs: u64) -> Arc<Self> {
        let gate = Gate::new(1);
        let slab = |v| Slab {
            access: UnsafeCell::new(()),
            version: AtomicU64::new(v),
        };
        Arc::new(Self {
            versions: Versions::new(&gate, 0, slabs),
            abort: Abort::new(&gate),
            slabs: (0..slabs).map(slab).collect(),
        })
    }

    fn write(&self, v: u64) {
        let ticket = self.versions.wait_writable(v, &self.abort).unwrap();
        let slab = &self.slabs[self.versions.slab(v)];
        slab.access
            .with_mut(|_| slab.version.store(v, Ordering::Relaxed));
        ticket.publish();
    }

    fn read(&self, ticket: roundpipe::testing::ReadTicket) {
        ticket.wait_readable(&self.abort).unwrap();
        let v = ticket.version();
        let slab = &self.slabs[self.versions.slab(v)];
        slab.access.with(|_| {
            assert_eq!(
                slab.version.load(Ordering::Relaxed),
                v,
                "version {v} was overwritten"
            )
        });
    }
}

/// As the engine does it: tickets are taken in order by the thread that submits, read by another,
/// while the optimizer writes ahead.
fn train(slabs: u64) {
    let layer = Layer::new(slabs);
    let steps = 3;
    // Step s reads the version that lag allows: s - 1 with one slab, s - 2 with two.
    let first: Vec<_> = (1..=steps)
        .map(|s: u64| layer.versions.reserve(s.saturating_sub(slabs)))
        .collect();
    let reader = {
        let layer = layer.clone();
        thread::spawn(move || first.into_iter().for_each(|ticket| layer.read(ticket)))
    };
    for v in 1..=steps {
        layer.write(v);
    }
    reader.join().unwrap();
    assert_eq!(layer.versions.current(), steps);
}

#[test]
fn readers_see_their_version_whole_at_lag_0() {
    loom::model(|| train(1));
}

#[test]
fn readers_see_their_version_whole_at_lag_1() {
    loom::model(|| train(2));
}

/// Two readers of one version and one of the next; the writer gets through whoever ends last.
#[test]
fn several_readers_of_one_version_never_starve_the_writer() {
    for slabs in [1, 2] {
        loom::model(move || {
            let layer = Layer::new(slabs);
            let tickets = [layer.versions.reserve(0), layer.versions.reserve(0)];
            let readers = tickets.map(|ticket| {
                let layer = layer.clone();
                thread::spawn(move || layer.read(ticket))
            });
            for v in 1..=slabs {
                layer.write(v);
            }
            layer.read(layer.versions.reserve(slabs));
            readers
                .into_iter()
                .for_each(|reader| reader.join().unwrap());
        });
    }
}

/// The gradients of step 2 are written only after the update of step 1 has read those of step 1, also
/// where it reads them again for the moments behind the weights.
#[test]
fn gradients_are_not_overwritten_before_they_are_read() {
    for moments_later in [false, true] {
        loom::model(move || {
            let layer = Layer::new(2);
            let grads = Arc::new(UnsafeCell::new(()));
            let download = {
                let (layer, grads) = (layer.clone(), grads.clone());
                thread::spawn(move || {
                    layer.versions.wait_grad_free(2, &layer.abort).unwrap();
                    grads.with_mut(|_| ());
                })
            };
            let ticket = layer.versions.wait_writable(1, &layer.abort).unwrap();
            grads.with(|_| ());
            if moments_later {
                let moments = ticket.publish_weights();
                grads.with(|_| ());
                drop(moments);
            } else {
                ticket.publish();
            }
            download.join().unwrap();
        });
    }
}

/// What lies beside the weights, masters and moments, is in one place whatever the number of slabs:
/// a holder reads it whole, and the writer gets through behind it.
#[test]
fn a_held_layer_is_not_written() {
    for slabs in [1, 2] {
        loom::model(move || {
            let layer = Layer::new(slabs);
            let moments = Arc::new(UnsafeCell::new(()));
            let hold = layer.versions.hold();
            let saver = {
                let moments = moments.clone();
                thread::spawn(move || {
                    moments.with(|_| ());
                    drop(hold);
                })
            };
            for v in 1..=2 {
                let ticket = layer.versions.wait_writable(v, &layer.abort).unwrap();
                moments.with_mut(|_| ());
                ticket.publish();
            }
            saver.join().unwrap();
            assert_eq!(layer.versions.current(), 2);
        });
    }
}

/// An abort reaches a writer and a reader in whatever state they are.
#[test]
fn an_abort_is_never_missed() {
    loom::model(|| {
        let layer = Layer::new(1);
        let held = layer.versions.reserve(0);
        let future = layer.versions.reserve(1);
        let reader = {
            let layer = layer.clone();
            thread::spawn(move || assert_eq!(future.wait_readable(&layer.abort), Err(Aborted)))
        };
        let writer = {
            let layer = layer.clone();
            thread::spawn(move || {
                assert_eq!(
                    layer.versions.wait_writable(1, &layer.abort).err(),
                    Some(Aborted)
                )
            })
        };
        layer.abort.set();
        reader.join().unwrap();
        writer.join().unwrap();
        drop(held);
        assert_eq!(layer.versions.current(), 0);
    });
}

/// A call as far as its end is concerned, locked as the engine locks it.
struct Call {
    ending: Mutex<Ending>,
    changed: Condvar,
    commits: AtomicU64,
    passed_on: AtomicU64,
}

impl Call {
    fn new(parts: usize) -> Arc<Self> {
        let mut ending = Ending::default();
        (0..parts).for_each(|_| ending.add_part());
        Arc::new(Self {
            ending: Mutex::new(ending),
            changed: Condvar::new(),
            commits: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
        })
    }

    fn update<R>(&self, change: impl FnOnce(&mut Ending) -> R) -> R {
        let out = change(&mut self.ending.lock().unwrap());
        self.changed.notify_all();
        out
    }

    fn end_part(&self) {
        if self.update(Ending::end_part) == PartEnd::Commit {
            self.commits.fetch_add(1, Ordering::Relaxed);
            self.update(Ending::end_commit);
        }
    }

    fn fail(&self) {
        if self.update(Ending::fail) {
            self.passed_on.fetch_add(1, Ordering::Relaxed);
            self.end_part();
        }
    }

    /// Waits for the end; whether it failed.
    fn wait_end(&self) -> bool {
        let mut ending = self.ending.lock().unwrap();
        while !ending.has_ended() {
            ending = self.changed.wait(ending).unwrap();
        }
        ending.has_failed()
    }
}

/// Four threads around one lock have too many orders to try all; those with at most three
/// preemptions include every pair of races.
fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

#[test]
fn a_call_ends_once_committed_or_failed() {
    model(|| {
        let call = Call::new(2);
        let spawn = |work: fn(&Call)| {
            let call = call.clone();
            thread::spawn(move || work(&call))
        };
        let threads = [
            spawn(Call::end_part),
            spawn(Call::end_part),
            spawn(Call::fail),
        ];
        let failed = call.wait_end();
        // Before any other thread is waited for: this is what a caller sees.
        let commits = call.commits.load(Ordering::Relaxed);
        assert_eq!(commits, u64::from(!failed), "committed or failed, not both");
        if failed {
            assert_eq!(call.passed_on.load(Ordering::Relaxed), 1);
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(call.commits.load(Ordering::Relaxed), commits);
    });
}

#[test]
fn two_failures_are_one_end() {
    model(|| {
        let call = Call::new(1);
        let spawn = |work: fn(&Call)| {
            let call = call.clone();
            thread::spawn(move || work(&call))
        };
        let failing = |call: &Call| {
            call.fail();
        };
        let threads = [spawn(failing), spawn(Call::fail), spawn(Call::end_part)];
        let failed = call.wait_end();
        assert_eq!(call.passed_on.load(Ordering::Relaxed), u64::from(failed));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}
