//! Versions of a layer's weights: who may read which, and when the next may be written.
//!
//! A version counts the optimizer steps that a weight has seen. Version v lives in slab `v %
//! slabs`: one slab when updates wait for readers (lag 0), two when they run beside the next step
//! (lag 1). The protocol moves no bytes and knows no memory; it only says when.
//!
//! # Rules
//! 1. A reader of version v holds a [`ReadTicket`] for it, from before its work is submitted until
//!    its last read has ended. The version need not exist yet.
//! 2. A reader reads after [`ReadTicket::wait_readable`]: version v has been published. It stays
//!    whole as long as the ticket lives, because of rule 3.
//! 3. The writer of version v holds a [`WriteTicket`], which is given once no ticket for version
//!    `v - slabs` or older is alive. From the moment the writer asks, no new ticket for those is
//!    given: it cannot starve.
//! 4. Versions are published one after another. A write ticket that is dropped instead publishes
//!    nothing: a failed step leaves the protocol as if it had never begun.
//! 5. The gradient slab of a layer is written for step s (from 1 on) only once version s - 1 is
//!    complete: the update before has read it then ([`Versions::wait_grad_free`]). A version is
//!    complete when it is published, or, where its moments come later
//!    ([`WriteTicket::publish_weights`]), when the [`MomentsTicket`] is dropped.
//! 6. A [`Hold`] keeps a layer as it is, masters and moments included: no writer gets its ticket
//!    while one lives, whatever the number of slabs. The thread that writes takes it between two
//!    versions, the first of them complete, and hands it to a reader of what lies beside the weights
//!    (a checkpoint).
//! 7. Every wait ends when its [`Abort`] is set, at once for waits on the abort's own gate and
//!    within [`POLL`] for others.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, unpoisoned};

/// The longest time a wait sleeps before it looks at its [`Abort`] again.
pub const POLL: Duration = Duration::from_millis(100);

/// A wait was called off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("called off, because another part of the step failed")]
pub struct Aborted;

/// What all layers of a store wait at.
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    layers: Vec<LayerVersions>,
    waiting: Vec<Waiting>,
    next_wait: u64,
    /// How long writers waited for holds.
    held_up: Duration,
}

#[derive(Default)]
struct LayerVersions {
    /// The newest published version.
    version: u64,
    /// The newest version whose moments are those of its step, too.
    complete: u64,
    /// The version that a writer writes or waits to write.
    writing: Option<u64>,
    /// Tickets alive: version and how many.
    tickets: Vec<(u64, usize)>,
    /// Holds alive.
    holds: usize,
}

/// One wait that is going on, for a watchdog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    id: u64,
    /// The layer waited for.
    pub layer: usize,
    /// What for.
    pub what: &'static str,
    /// The version, or the step for gradients.
    pub version: u64,
    /// Since when.
    pub since: Instant,
}

impl Gate {
    /// A gate for `layers` layers, all at version 0.
    pub fn new(layers: usize) -> Arc<Self> {
        let layers = (0..layers).map(|_| LayerVersions::default()).collect();
        let state = Mutex::new(GateState {
            layers,
            ..GateState::default()
        });
        Arc::new(Self {
            state,
            changed: Condvar::new(),
        })
    }

    /// The waits that are going on now.
    pub fn waiting(&self) -> Vec<Waiting> {
        self.lock().waiting.clone()
    }

    /// How long writers have waited for holds since this was last asked.
    pub(crate) fn take_held_up(&self) -> Duration {
        std::mem::take(&mut self.lock().held_up)
    }

    /// Waits until `ready` holds for the newest version of every layer. Nothing calls it off: what
    /// is waited for is published, or its caller takes `ready` back.
    pub(crate) fn wait_all(&self, ready: impl Fn(u64) -> bool) {
        let mut state = self.lock();
        while !state.layers.iter().all(|layer| ready(layer.version)) {
            // A caller that takes `ready` back does not wake this thread, so look again now and then.
            let woken = self.changed.wait_timeout(state, POLL);
            state = unpoisoned(woken).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        // A panic elsewhere leaves counts that are whole: each is changed in one statement.
        unpoisoned(self.state.lock())
    }

    /// Sleeps until `ready`, then returns the lock.
    fn wait(
        &self,
        abort: &Abort,
        (layer, what, version): (usize, &'static str, u64),
        ready: impl Fn(&LayerVersions) -> bool,
    ) -> Result<MutexGuard<'_, GateState>, Aborted> {
        let mut state = self.lock();
        let mut listed = None;
        loop {
            // An abort comes first, so that a step that has failed stops at its next wait.
            let done = if abort.is_set() {
                Some(Err(Aborted))
            } else {
                ready(&state.layers[layer]).then_some(Ok(()))
            };
            if let Some(result) = done {
                state.waiting.retain(|w| Some(w.id) != listed);
                return result.map(|()| state);
            }
            if listed.is_none() {
                let id = state.next_wait;
                state.next_wait += 1;
                listed = Some(id);
                state.waiting.push(Waiting {
                    id,
                    layer,
                    what,
                    version,
                    since: Instant::now(),
                });
            }
            let woken = self.changed.wait_timeout(state, POLL);
            state = unpoisoned(woken).0;
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

/// Calls off waits; cloning shares it. One per call of the engine, so that a failed call leaves no
/// trace.
#[derive(Debug, Clone)]
pub struct Abort {
    gate: Arc<Gate>,
    set: Arc<AtomicBool>,
}

impl Abort {
    /// Not set; setting it wakes the waits at `gate`.
    pub fn new(gate: &Arc<Gate>) -> Self {
        Self {
            gate: gate.clone(),
            set: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Calls off all waits with this abort, now and later.
    pub fn set(&self) {
        // Under the lock: a waiter has either not looked yet, or sleeps and is woken.
        let _state = self.gate.lock();
        self.set.store(true, Ordering::SeqCst);
        self.gate.changed.notify_all();
    }

    /// Whether it was set.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::SeqCst)
    }
}

/// The versions of one layer's weights; cloning shares them.
#[derive(Debug, Clone)]
pub struct Versions {
    gate: Arc<Gate>,
    layer: usize,
    slabs: u64,
}

impl Versions {
    /// Those of layer `layer` at `gate`, kept in one or two slabs.
    pub fn new(gate: &Arc<Gate>, layer: usize, slabs: u64) -> Self {
        assert!(
            slabs == 1 || slabs == 2,
            "versions live in one slab or in two, not in {slabs}"
        );
        Self {
            gate: gate.clone(),
            layer,
            slabs,
        }
    }

    /// The newest published version.
    pub fn current(&self) -> u64 {
        self.gate.lock().layers[self.layer].version
    }

    /// How many versions exist at a time.
    pub fn slabs(&self) -> u64 {
        self.slabs
    }

    /// The slab that version `v` lives in.
    pub fn slab(&self, v: u64) -> usize {
        (v % self.slabs) as usize
    }

    /// Registers a reader of version `v`, which may not exist yet.
    ///
    /// # Panics
    /// When the version has been overwritten or its overwriting has been asked for: the caller
    /// submitted an update and then work that wants weights from before it.
    pub fn reserve(&self, v: u64) -> ReadTicket {
        let mut state = self.gate.lock();
        let layer = &mut state.layers[self.layer];
        let oldest = (layer.writing.unwrap_or(layer.version) + 1).saturating_sub(self.slabs);
        assert!(
            v >= oldest,
            "layer {}: version {v} is reserved when {oldest} is the oldest left",
            self.layer
        );
        match layer.tickets.iter_mut().find(|(version, _)| *version == v) {
            Some((_, count)) => *count += 1,
            None => layer.tickets.push((v, 1)),
        }
        ReadTicket {
            versions: self.clone(),
            version: v,
        }
    }

    /// Waits for the right to write version `v`, which must be the one after the newest.
    ///
    /// # Errors
    /// [`Aborted`]; nothing has changed then.
    ///
    /// # Panics
    /// When `v` is not the next version, or another writer holds a ticket.
    pub fn wait_writable(&self, v: u64, abort: &Abort) -> Result<WriteTicket, Aborted> {
        {
            let mut state = self.gate.lock();
            let layer = &mut state.layers[self.layer];
            assert_eq!(
                v,
                layer.version + 1,
                "layer {}: versions are written one after another",
                self.layer
            );
            assert_eq!(
                layer.complete, layer.version,
                "layer {}: version {v} is written before the moments of the one before",
                self.layer
            );
            assert!(
                layer.writing.is_none(),
                "layer {}: version {v} has a writer already",
                self.layer
            );
            layer.writing = Some(v);
        }
        // From here on the ticket takes the claim back, whatever happens.
        let ticket = WriteTicket {
            versions: self.clone(),
            version: v,
        };
        let slabs = self.slabs;
        if self.is_held() {
            let start = Instant::now();
            let what = (self.layer, "the checkpoint that is written of it", v);
            let waited = self.gate.wait(abort, what, |layer| layer.holds == 0);
            waited?.held_up += start.elapsed();
        }
        let free = |layer: &LayerVersions| {
            layer.holds == 0 && layer.tickets.iter().all(|(version, _)| version + slabs > v)
        };
        drop(
            self.gate
                .wait(abort, (self.layer, "readers of an old version", v), free)?,
        );
        Ok(ticket)
    }

    /// Keeps the layer as it is. Taken by the thread that writes, between two versions.
    ///
    /// # Panics
    /// While a version or its moments are being written.
    pub fn hold(&self) -> Hold {
        let mut state = self.gate.lock();
        let layer = &mut state.layers[self.layer];
        assert!(
            layer.writing.is_none() && layer.complete == layer.version,
            "layer {}: held while it is written",
            self.layer
        );
        layer.holds += 1;
        Hold {
            versions: self.clone(),
        }
    }

    /// Whether a hold is alive.
    pub(crate) fn is_held(&self) -> bool {
        self.gate.lock().layers[self.layer].holds > 0
    }

    /// Waits until the gradient slab may be written for step `s`, from 1 on.
    ///
    /// # Errors
    /// [`Aborted`].
    pub fn wait_grad_free(&self, s: u64, abort: &Abort) -> Result<(), Aborted> {
        let free = |layer: &LayerVersions| layer.complete + 1 >= s;
        self.gate
            .wait(
                abort,
                (self.layer, "the update that reads the gradients", s),
                free,
            )
            .map(drop)
    }

    /// Waits until version `v` is published. Only a ticket makes sure that it is still there.
    ///
    /// # Errors
    /// [`Aborted`].
    pub fn wait_published(&self, v: u64, abort: &Abort) -> Result<(), Aborted> {
        self.gate
            .wait(abort, (self.layer, "an update", v), |layer| {
                layer.version >= v
            })
            .map(drop)
    }
}

/// The right to read a version, once it exists. Dropping it gives the right back.
#[derive(Debug)]
pub struct ReadTicket {
    versions: Versions,
    version: u64,
}

impl ReadTicket {
    /// Which version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether the version is published.
    pub fn is_readable(&self) -> bool {
        self.versions.current() >= self.version
    }

    /// Waits until the version is published.
    ///
    /// # Errors
    /// [`Aborted`].
    pub fn wait_readable(&self, abort: &Abort) -> Result<(), Aborted> {
        self.versions.wait_published(self.version, abort)
    }
}

impl Drop for ReadTicket {
    fn drop(&mut self) {
        let mut state = self.versions.gate.lock();
        let tickets = &mut state.layers[self.versions.layer].tickets;
        if let Some((_, count)) = tickets
            .iter_mut()
            .find(|(version, _)| *version == self.version)
        {
            *count -= 1;
        }
        tickets.retain(|(_, count)| *count > 0);
        self.versions.gate.changed.notify_all();
    }
}

/// Keeps a layer as it is until it is dropped.
#[derive(Debug)]
pub struct Hold {
    versions: Versions,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.versions.gate.lock();
        state.layers[self.versions.layer].holds -= 1;
        self.versions.gate.changed.notify_all();
    }
}

/// The right to write the next version. Dropping it without [`WriteTicket::publish`] gives the
/// right back.
#[derive(Debug)]
pub struct WriteTicket {
    versions: Versions,
    version: u64,
}

impl WriteTicket {
    /// Which version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Makes the version the newest, and lets its readers go.
    pub fn publish(self) {
        let version = self.version;
        self.publish_as(version);
    }

    /// The same under a later number: what was written is the version of another run. No reader may
    /// wait for the numbers in between.
    pub(crate) fn publish_as(self, version: u64) {
        assert!(version >= self.version, "versions never go back");
        let mut state = self.versions.gate.lock();
        let layer = &mut state.layers[self.versions.layer];
        layer.version = version;
        layer.complete = version;
        layer.writing = None;
        // Dropping the ticket wakes all waiters.
    }

    /// Makes the version the newest, and lets its readers go, before its moments are written and its
    /// gradients are read for the last time.
    pub fn publish_weights(self) -> MomentsTicket {
        let mut state = self.versions.gate.lock();
        let layer = &mut state.layers[self.versions.layer];
        layer.version = self.version;
        layer.writing = None;
        MomentsTicket {
            versions: self.versions.clone(),
            version: self.version,
        }
    }
}

/// The right to write the moments of the newest version and to read its gradients. Dropping it makes
/// the version complete.
#[derive(Debug)]
pub struct MomentsTicket {
    versions: Versions,
    version: u64,
}

impl Drop for MomentsTicket {
    fn drop(&mut self) {
        let mut state = self.versions.gate.lock();
        state.layers[self.versions.layer].complete = self.version;
        self.versions.gate.changed.notify_all();
    }
}

impl Drop for WriteTicket {
    fn drop(&mut self) {
        let mut state = self.versions.gate.lock();
        // After a publish the claim may be the next writer's already.
        state.layers[self.versions.layer]
            .writing
            .take_if(|v| *v == self.version);
        self.versions.gate.changed.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Abort, Aborted, Gate, Versions};

    fn versions(slabs: u64) -> (Versions, Abort) {
        let gate = Gate::new(1);
        (Versions::new(&gate, 0, slabs), Abort::new(&gate))
    }

    /// With one slab the writer waits for readers of the newest version, with two for those of the
    /// one before.
    #[test]
    fn a_writer_waits_for_the_readers_of_what_it_overwrites() {
        for slabs in [1, 2] {
            let (versions, abort) = versions(slabs);
            for v in 1..slabs {
                versions.wait_writable(v, &abort).unwrap().publish();
            }
            let old = versions.reserve(0);
            let newer = versions.reserve(1);
            std::thread::scope(|scope| {
                let writer =
                    scope.spawn(|| versions.wait_writable(slabs, &abort).unwrap().publish());
                std::thread::sleep(Duration::from_millis(20));
                assert!(!writer.is_finished(), "{slabs} slabs");
                drop(old);
                writer.join().unwrap();
            });
            assert_eq!(versions.current(), slabs);
            newer.wait_readable(&abort).unwrap();
        }
    }

    /// A failed step must not leave the layer locked: the same version can be written afterwards.
    #[test]
    fn a_dropped_write_ticket_publishes_nothing() {
        let (versions, abort) = versions(1);
        drop(versions.wait_writable(1, &abort).unwrap());
        assert_eq!(versions.current(), 0);
        drop(versions.reserve(0));
        versions.wait_writable(1, &abort).unwrap().publish();
        assert_eq!(versions.current(), 1);
    }

    /// A held layer is not written, with two slabs either: masters and moments have only one.
    #[test]
    fn a_writer_waits_for_holds() {
        for slabs in [1, 2] {
            let (versions, abort) = versions(slabs);
            let (first, second) = (versions.hold(), versions.hold());
            assert!(versions.is_held());
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| versions.wait_writable(1, &abort).unwrap().publish());
                drop(first);
                std::thread::sleep(Duration::from_millis(20));
                assert!(!writer.is_finished(), "{slabs} slabs");
                drop(second);
                writer.join().unwrap();
            });
            assert!(!versions.is_held());
            assert!(versions.gate.take_held_up() > Duration::ZERO);
            assert_eq!(versions.gate.take_held_up(), Duration::ZERO);
            versions.wait_writable(2, &abort).unwrap().publish_as(7);
            assert_eq!(versions.current(), 7);
        }
    }

    #[test]
    fn gradients_are_free_once_the_update_before_is_published() {
        let (versions, abort) = versions(2);
        versions.wait_grad_free(1, &abort).unwrap();
        std::thread::scope(|scope| {
            let download = scope.spawn(|| versions.wait_grad_free(2, &abort));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!download.is_finished());
            versions.wait_writable(1, &abort).unwrap().publish();
            download.join().unwrap().unwrap();
        });
    }

    /// Where moments come later, readers have the version before, and gradients wait for the end.
    #[test]
    fn moments_may_come_behind_the_version() {
        let (versions, abort) = versions(1);
        let moments = versions.wait_writable(1, &abort).unwrap();
        let moments = moments.publish_weights();
        let reader = versions.reserve(1);
        reader.wait_readable(&abort).unwrap();
        std::thread::scope(|scope| {
            let download = scope.spawn(|| versions.wait_grad_free(2, &abort));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!download.is_finished());
            drop(moments);
            download.join().unwrap().unwrap();
        });
        drop(reader);
        drop(versions.hold());
        versions.wait_writable(2, &abort).unwrap().publish();
    }

    #[test]
    #[should_panic(expected = "version 2 is written before the moments of the one before")]
    fn versions_are_completed_one_after_another() {
        let (versions, abort) = versions(1);
        let _moments = versions.wait_writable(1, &abort).unwrap().publish_weights();
        let _ticket = versions.wait_writable(2, &abort);
    }

    /// Every wait can be named, and an abort ends it at once.
    #[test]
    fn an_abort_ends_every_wait_and_waits_have_names() {
        let (versions, abort) = versions(1);
        let ticket = versions.reserve(0);
        std::thread::scope(|scope| {
            let later = versions.reserve(1);
            let abort = &abort;
            let reader = scope.spawn(move || later.wait_readable(abort));
            let writer = scope.spawn(|| versions.wait_writable(1, abort).map(drop));
            while versions.gate.waiting().len() < 2 {
                std::thread::yield_now();
            }
            assert!(
                versions
                    .gate
                    .waiting()
                    .iter()
                    .any(|w| w.what.contains("readers") && w.version == 1)
            );
            let start = Instant::now();
            abort.set();
            assert_eq!(
                (reader.join().unwrap(), writer.join().unwrap()),
                (Err(Aborted), Err(Aborted))
            );
            assert!(start.elapsed() < Duration::from_secs(60));
        });
        assert!(versions.gate.waiting().is_empty());
        drop(ticket);
        versions
            .wait_writable(1, &Abort::new(&versions.gate))
            .unwrap()
            .publish();
    }

    #[test]
    #[should_panic(expected = "version 0 is reserved when 1 is the oldest left")]
    fn an_overwritten_version_cannot_be_reserved() {
        let (versions, abort) = versions(1);
        versions.wait_writable(1, &abort).unwrap().publish();
        let _ticket = versions.reserve(0);
    }
}
