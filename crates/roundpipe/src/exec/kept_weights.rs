//! Weights that stay on a worker from a layer's forward to its backward.
//!
//! A call that trains sends the weights of a layer that it recomputes twice. Where both visits are on
//! one worker, and its memory has room from the one to the other, they can stay instead. Which layers'
//! do is a part of the call's [`KeepPlan`](super::repeats::KeepPlan): first as many as it takes until
//! copies no longer hold up the backward, then, behind the pieces of forwards, what has room.
//!
//! Trained weights stay for their own call alone: the next one reads other values. Frozen ones may
//! stay for longer ([`super::held_weights`]).
//!
//! Refused: models whose layers set buffers, and tables of which only some rows came.
//!
//! # Invariants
//! - No bit of a result depends on what stays.
//! - What stays is what the backward would be sent: where the user wrote the weights in between, they
//!   come again.
//! - It is optional: memory that a task needs is taken from here. A backward has it only where it lies
//!   beside what its tasks work in.
//! - The read ticket stays with the backward's job until that has the weights, so they can come again
//!   until then.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use roundpipe_tensor::Tensor;

use super::call::Call;
use super::launcher::Launcher;
use super::queue::StageJob;
use super::task::Task;
use super::weights::leave_room;
use crate::plan::Pass;
use crate::store::Writes;

/// The weights of a layer that wait for their backward.
pub(super) struct KeptWeights {
    pub call: Weak<Call>,
    layer: usize,
    /// [`Store::writes_at`](crate::Store) when they were uploaded.
    writes: Writes,
    tensors: Vec<Tensor>,
}

impl KeptWeights {
    fn are_of(&self, call: &Call, layer: usize) -> bool {
        self.layer == layer && std::ptr::eq(self.call.as_ptr(), call)
    }
}

impl Launcher {
    /// Keeps the weights of a layer that goes forward, if its call has chosen them.
    pub(super) fn keep_weights(
        &mut self,
        task: &Task<'_>,
        layer: usize,
        tensors: &[Tensor],
        writes: &Writes,
    ) {
        let chosen = &task.spec().keep.weights;
        if task.stage().pass != Pass::Forward || !chosen.contains(&layer) {
            return;
        }
        self.kept_weights.push(KeptWeights {
            call: Arc::downgrade(task.call),
            layer,
            writes: writes.clone(),
            tensors: tensors.to_vec(),
        });
    }

    /// The weights of a layer that goes backward, if they are here and as the host has them. With
    /// `working`, only where they leave the job's tasks so many bytes.
    pub(super) fn find_kept_weights(
        &self,
        call: &Call,
        layer: usize,
        working: Option<u64>,
    ) -> Option<Vec<Tensor>> {
        let mut kept = self.kept_weights.iter();
        let found = kept.find(|kept| kept.are_of(call, layer))?;
        if !leave_room(&found.tensors, working) {
            return None;
        }
        let spec = &call.spec;
        // A layer that sets buffers has new ones without a new version.
        if spec.model.sets_buffers.load(Ordering::SeqCst) {
            return None;
        }
        let writes = spec.model.store.writes_at(layer, spec.version).ok()?;
        (found.writes == writes).then(|| found.tensors.clone())
    }

    /// A backward's job knows where its weights come from: those that were kept for it are its own
    /// now, and the host's are not needed any more.
    pub(super) fn take_kept_weights(&mut self, job: &mut StageJob) {
        let call = job.call.clone();
        let stage = &call.spec.stages[job.stage];
        if stage.pass != Pass::Backward {
            return;
        }
        for layer in stage.layers.clone() {
            self.kept_weights.retain(|kept| !kept.are_of(&call, layer));
            if job.has_weights(layer) {
                job.tickets.remove(&layer);
            }
        }
    }

    /// Frees the weights of one layer: those that keep working memory from growing, if there are
    /// such, else those that are needed last.
    pub(super) fn drop_kept_weights(&mut self) -> bool {
        if self.kept_weights.is_empty() {
            return false;
        }
        let lies_in_the_way = |kept: &KeptWeights| kept.tensors.iter().any(Tensor::is_at_frontier);
        let place = self.kept_weights.iter().position(lies_in_the_way);
        // A call's first layer goes backward last.
        self.kept_weights.remove(place.unwrap_or(0));
        true
    }
}
