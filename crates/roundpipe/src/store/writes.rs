//! Weights that the user writes: how a store sees them.
//!
//! A host buffer counts the claims to write it. The store knows its own, so that all others are the
//! user's: the next update starts from the values written, and calls that follow read them.
//!
//! A master that is a weight and a remainder needs to know which weights changed, so what the user
//! writes over is kept until the remainders have followed ([`Overwritten`]).
//!
//! # Invariants
//! - A write to the newest version is never lost; one to an older version is refused by the next
//!   update.
//! - What is kept is what was there before the first write since the remainders followed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use roundpipe_tensor::{HostBuf, HostMark, bf16};

use super::Store;
use super::layer::StoreLayer;
use crate::error::{Error, Result};
use crate::sync::lock;

/// Who wrote a layer's weights, in each slab: by the number of claims to write.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Claims that updates made.
    pub own: [u64; 2],
    /// Claims of the user that calls know of.
    pub(super) noticed: [u64; 2],
    /// All claims on each parameter when an update last looked: more since then are the user's.
    pub params: Vec<[u64; 2]>,
}

/// What was in a slab of weights before the user wrote there. Updates write unwatched.
#[derive(Debug, Default)]
pub(crate) struct Overwritten {
    /// Whether there are remainders, which weights alone do not give.
    is_on: AtomicBool,
    /// In the order of the writes.
    parts: Mutex<Vec<(Range<usize>, Vec<u8>)>>,
}

impl Overwritten {
    /// Keeps what is written over in these ranges of `slab`, as long as `this` lives.
    pub(super) fn watch(this: &Arc<Self>, slab: &HostBuf, ranges: Vec<Range<usize>>) {
        let kept = Arc::downgrade(this);
        slab.watch(move |range, bytes| {
            let is_ours = ranges
                .iter()
                .any(|ours| ours.start < range.end && range.start < ours.end);
            if let (true, Some(kept)) = (is_ours, kept.upgrade()) {
                kept.keep(range, bytes);
            }
            Ok(())
        });
    }

    pub(super) fn record(&self) {
        self.is_on.store(true, Ordering::Release);
    }

    fn keep(&self, range: Range<usize>, bytes: &[u8]) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let mut parts = lock(&self.parts);
        let has_all =
            |(known, _): &(Range<usize>, _)| known.start <= range.start && range.end <= known.end;
        if !range.is_empty() && !parts.iter().any(has_all) {
            parts.push((range, bytes.to_vec()));
        }
    }

    /// What was in `range` before the user wrote there, given what is there `now`; `None` where
    /// nothing was written.
    pub fn before(&self, range: &Range<usize>, now: &[u8]) -> Option<Vec<bf16>> {
        let parts = lock(&self.parts);
        let mut parts = parts
            .iter()
            .filter(|(part, _)| meet(part, range))
            .peekable();
        parts.peek()?;
        let mut bytes = now.to_vec();
        let parts: Vec<_> = parts.collect();
        // The first write saw the oldest bytes.
        for (part, old) in parts.into_iter().rev() {
            let start = part.start.max(range.start);
            let end = part.end.min(range.end);
            bytes[start - range.start..end - range.start]
                .copy_from_slice(&old[start - part.start..end - part.start]);
        }
        let (pairs, _) = bytes.as_chunks();
        Some(
            pairs
                .iter()
                .map(|pair| bf16::from_ne_bytes(*pair))
                .collect(),
        )
    }

    /// The remainders of `range` have followed, or have others now.
    pub fn forget(&self, range: &Range<usize>) {
        lock(&self.parts).retain(|(part, _)| !meet(part, range));
    }

    fn forget_all(&self) {
        lock(&self.parts).clear();
    }
}

fn meet(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The weights of a layer as they were when they were copied: the copy is current while its layer
/// has an equal value.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Writes(Vec<HostMark>);

impl Writes {
    pub(super) fn add(&mut self, home: &HostBuf) {
        self.0.push(home.mark());
    }
}

impl Store {
    /// Whether the user wrote weights since this was last asked.
    pub(crate) fn notice_writes(&self) -> bool {
        // `count`, not `any`: every layer must take note of its own writes.
        let noticed = self
            .layers
            .iter()
            .filter(|layer| layer.notice_writes())
            .count();
        noticed > 0
    }

    /// A value that changes whenever the weights of a layer at one version are written, or lie
    /// elsewhere: by the user, as long as the caller holds a ticket for it.
    ///
    /// # Errors
    /// When the system has no memory for the second version.
    pub(crate) fn writes_at(&self, layer: usize, version: u64) -> Result<Writes> {
        let mut writes = Writes::default();
        for param in &self.layers[layer].params {
            writes.add(&self.param_data(param, version)?);
        }
        Ok(writes)
    }
}

impl StoreLayer {
    pub(crate) fn lock_seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }

    /// Takes all claims so far for the store's own: what the user wrote is gone.
    pub(crate) fn forget_writes(&self) {
        let mut seen = self.lock_seen();
        for slab in [0, 1] {
            seen.own[slab] = self.slab_writes(slab);
            for (index, _) in self.own_trainable() {
                seen.params[index][slab] = self.writes(index, slab);
            }
        }
        seen.noticed = [0, 0];
        self.overwritten.iter().for_each(|slab| slab.forget_all());
    }

    /// Keeps what the user writes over in the first slab.
    pub(super) fn watch_writes(&self) {
        let ranges = self.remainder_ranges();
        if !ranges.is_empty() {
            Overwritten::watch(&self.overwritten[0], &self.weights, ranges);
        }
    }

    /// What a parameter's weights in a slab were before the user wrote them; `now` are they as they
    /// are.
    pub(crate) fn before_writes(&self, index: usize, slab: usize, now: &[u8]) -> Option<Vec<bf16>> {
        self.overwritten[slab].before(&self.params[index].weight_bytes(), now)
    }

    /// Takes the weights of a parameter in a slab for what its remainders belong to.
    pub(crate) fn take_as_seen(&self, index: usize, slab: usize, seen: &mut Seen) {
        self.overwritten[slab].forget(&self.params[index].weight_bytes());
        seen.params[index][slab] = self.writes(index, slab);
    }

    /// What was written over in each slab, for who reads masters later.
    pub(crate) fn overwritten(&self) -> [(Option<u64>, Arc<Overwritten>); 2] {
        [0, 1].map(|slab| {
            let memory = self.slab(slab).map(HostBuf::id);
            (memory, self.overwritten[slab].clone())
        })
    }

    /// Whether the user wrote the newest weights since an update last looked.
    pub(crate) fn was_written(&self) -> bool {
        let seen = self.lock_seen();
        let slab = self.versions.slab(self.versions.current());
        self.own_trainable()
            .any(|(index, _)| self.is_written(index, slab, &seen))
    }

    /// Whether the user wrote a parameter in one of the slabs.
    pub(crate) fn is_written(&self, index: usize, slab: usize, seen: &Seen) -> bool {
        self.writes(index, slab) != seen.params[index][slab]
    }

    /// Refuses, once, values that the user wrote where an older version of a parameter was.
    ///
    /// # Errors
    /// [`Error::Config`] then.
    pub(crate) fn refuse_lost_write(
        &self,
        index: usize,
        slab: usize,
        seen: &mut Seen,
    ) -> Result<()> {
        if !self.is_written(index, slab, seen) {
            return Ok(());
        }
        self.take_as_seen(index, slab, seen);
        let what = format!(
            "{} was written in memory that it has left, so the values are lost; call `synchronize`, then write \
             through `Param::data`",
            self.params[index].name
        );
        Err(Error::config("parameter", what))
    }

    /// How often a parameter was lent for writing in one of the slabs.
    pub(crate) fn writes(&self, index: usize, slab: usize) -> u64 {
        let param = &self.params[index];
        let home = self.slab(slab).and_then(|slab| {
            slab.slice(param.offset..param.offset + param.param.bytes())
                .ok()
        });
        home.map_or(0, |home| home.writes())
    }

    /// Whether the user wrote weights since this was last asked.
    pub(super) fn notice_writes(&self) -> bool {
        let mut seen = self.lock_seen();
        let now = [0, 1].map(|slab| self.slab_writes(slab) - seen.own[slab]);
        std::mem::replace(&mut seen.noticed, now) != now
    }

    pub(super) fn slab_writes(&self, slab: usize) -> u64 {
        self.slab(slab).map_or(0, HostBuf::writes)
    }

    pub(super) fn slab(&self, slab: usize) -> Option<&HostBuf> {
        match slab {
            0 => Some(&self.weights),
            _ => self
                .training
                .get()
                .and_then(|training| training.second.as_ref()),
        }
    }
}
