//! Frozen weights that stay on a worker from step to step.
//!
//! A layer with adapters has weights that change with every step and many more that never do. Where
//! copying them is what a call waits for, some layers' frozen weights stay on the worker, and only
//! the trained ones come anew. [`HoldPlan`] says which layers; a pure value, made when a call is
//! submitted from the bytes that the planner set aside. Holding is optional: memory that a task
//! needs is taken from here, and the weights come again.
//!
//! Refused: layers whose frozen weights lie in files or in another engine's memory, layers that share
//! trained weights, and models whose layers set buffers.
//!
//! # Invariants
//! - No bit of a result depends on what is held.
//! - A job has it only where it lies beside what its tasks work in; it comes again elsewhere.
//! - What is held is equal to host memory: a write of the user, or a store that takes the weights
//!   over, changes [`FrozenPart::writes`](crate::store::FrozenPart), and the old copy is not used.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use roundpipe_tensor::Tensor;

use super::call::Call;
use super::model::Model;
use super::repeats::spread;
use crate::plan::Stage;
use crate::store::Writes;

/// Which layers' frozen weights stay, by worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HoldPlan(HashMap<usize, HashSet<usize>>);

impl HoldPlan {
    /// Takes layers on each worker, up to so many bytes, spread over its stages: the link catches up
    /// behind a layer that need not be sent, but only one stage ahead. `frozen` has the bytes of each
    /// layer that can stay, 0 for others; `assigned` the workers of the stages, of which there are
    /// `workers` in all.
    ///
    /// Nothing stays where stages do not go round evenly: the next call would find its layers on
    /// other workers.
    pub fn choose(
        stages: &[Stage],
        assigned: &[usize],
        workers: usize,
        frozen: &[u64],
        bytes: u64,
    ) -> Self {
        let mut plan = Self::default();
        if bytes == 0 || workers == 0 || !stages.len().is_multiple_of(workers) {
            return plan;
        }
        for worker in 0..workers {
            let own = stages.iter().zip(assigned).filter(|(_, by)| **by == worker);
            let mut layers: Vec<usize> = Vec::new();
            for layer in own.flat_map(|(stage, _)| stage.layers.clone()) {
                if frozen[layer] > 0 && !layers.contains(&layer) {
                    layers.push(layer);
                }
            }
            let mut places: Vec<usize> = (0..layers.len()).collect();
            places.sort_by_key(|place| spread(*place));
            let mut left = bytes;
            let held = plan.0.entry(worker).or_default();
            for layer in places.into_iter().map(|place| layers[place]) {
                if frozen[layer] <= left {
                    left -= frozen[layer];
                    held.insert(layer);
                }
            }
        }
        plan
    }

    /// Whether a layer stays on a worker.
    pub fn has(&self, worker: usize, layer: usize) -> bool {
        self.0
            .get(&worker)
            .is_some_and(|layers| layers.contains(&layer))
    }

    /// Whether a layer stays on any worker.
    pub fn names(&self, layer: usize) -> bool {
        self.0.values().any(|layers| layers.contains(&layer))
    }

    /// The layers that stay wherever these stages run them, so that they are never sent.
    pub fn everywhere(&self, stages: &[Stage], assigned: &[usize]) -> Vec<usize> {
        let visits = || stages.iter().zip(assigned);
        let mut layers: Vec<usize> = self.0.values().flatten().copied().collect();
        layers.sort_unstable();
        layers.dedup();
        layers.retain(|layer| {
            visits()
                .filter(|(stage, _)| stage.layers.contains(layer))
                .all(|(_, worker)| self.has(*worker, *layer))
        });
        layers
    }
}

/// The frozen weights of a layer on a worker.
pub(super) struct HeldWeights {
    pub model: Weak<Model>,
    pub layer: usize,
    /// [`FrozenPart::writes`](crate::store::FrozenPart) when they were sent.
    pub writes: Writes,
    /// By parameter; `None` for trained ones.
    pub tensors: Vec<Option<Tensor>>,
}

impl HeldWeights {
    pub fn are_of(&self, model: &Arc<Model>, layer: usize) -> bool {
        self.layer == layer && std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(model))
    }

    /// Whether they may stay when a worker turns to `call`.
    pub fn may_stay(&self, call: &Call, worker: usize) -> bool {
        let spec = &call.spec;
        if !std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(&spec.model)) {
            return self.model.strong_count() > 0;
        }
        // A validation between two steps needs its memory for itself only if there is too little.
        !spec.trains || spec.hold.has(worker, self.layer)
    }
}

#[cfg(test)]
mod tests {
    use super::HoldPlan;
    use crate::plan::{Pass, Stage};

    fn stages(cuts: &[(std::ops::Range<usize>, Pass)]) -> Vec<Stage> {
        let stage = |(layers, pass): &(std::ops::Range<usize>, Pass)| Stage {
            layers: layers.clone(),
            pass: *pass,
        };
        cuts.iter().map(stage).collect()
    }

    #[test]
    fn layers_stay_as_far_as_they_fit() {
        let stages = stages(&[
            (0..2, Pass::Forward),
            (2..4, Pass::Fused),
            (0..2, Pass::Backward),
        ]);
        let plan = HoldPlan::choose(&stages, &[0, 0, 0], 1, &[5, 0, 9, 4], 10);
        let held: Vec<bool> = (0..4).map(|layer| plan.has(0, layer)).collect();
        // The third does not fit beside the first; the fourth does.
        assert_eq!(held, [true, false, false, true]);
        assert_eq!(plan.everywhere(&stages, &[0, 0, 0]), vec![0, 3]);
    }

    #[test]
    fn layers_that_stay_are_spread() {
        let stages = stages(&[
            (0..8, Pass::Forward),
            (8..16, Pass::Fused),
            (0..8, Pass::Backward),
        ]);
        let plan = HoldPlan::choose(&stages, &[0, 0, 0], 1, &[1; 16], 4);
        assert_eq!(plan.everywhere(&stages, &[0, 0, 0]), vec![0, 4, 8, 12]);
    }

    #[test]
    fn a_layer_is_sent_where_one_of_its_workers_lacks_it() {
        let stages = stages(&[
            (0..1, Pass::Forward),
            (1..2, Pass::Forward),
            (1..2, Pass::Backward),
            (0..1, Pass::Backward),
        ]);
        let plan = HoldPlan::choose(&stages, &[0, 1, 0, 1], 2, &[4, 4], 4);
        assert!(plan.has(0, 0) && plan.has(1, 1));
        assert!(!plan.has(0, 1) && !plan.has(1, 0));
        assert!(plan.everywhere(&stages, &[0, 1, 0, 1]).is_empty());
        let plan = HoldPlan::choose(&stages, &[0, 1, 0, 1], 2, &[4, 4], 8);
        assert_eq!(plan.everywhere(&stages, &[0, 1, 0, 1]), vec![0, 1]);
    }

    #[test]
    fn nothing_stays_where_the_next_call_finds_other_workers() {
        let stages = stages(&[
            (0..1, Pass::Forward),
            (1..2, Pass::Fused),
            (0..1, Pass::Backward),
        ]);
        let plan = HoldPlan::choose(&stages, &[0, 1, 0], 2, &[4, 4], 100);
        assert_eq!(plan, HoldPlan::default());
    }
}
