//! Weights that the user writes: how a store sees them.
//!
//! A host buffer counts the claims to write it. The store knows its own, so that all others are the
//! user's: the next update starts from the values written, and calls that follow read them.
//!
//! # Invariants
//! - A write to the newest version is never lost; one to an older version is refused by the next
//!   update.

use std::sync::MutexGuard;

use roundpipe_tensor::HostBuf;

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

    /// A number that changes whenever the weights of a layer may have changed without a new
    /// version: when the user wrote them, or another store moved them.
    pub(crate) fn writes(&self, layer: usize) -> u64 {
        let here = &self.layers[layer];
        let homes = here.params.iter().map(|param| param.param.data());
        homes.fold(0, |sum, home| {
            sum.wrapping_mul(31).wrapping_add(home.writes() ^ home.id())
        })
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
        seen.params[index][slab] = self.writes(index, slab);
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
