//! What layers do when they are run a second time, and what of a first run is worth keeping for it.
//!
//! The first recompute of a layer is studied ([`roundpipe_tensor::repeat`]); later ones leave out
//! what the backward does not need. From the second call on, forwards also keep pieces for their
//! recompute, on the worker or in host memory: a call's choice is made when it is submitted
//! ([`Repeats::choose`]), by seconds saved per byte.
//!
//! Refused: layers whose forward and recompute differ, or that look at values on the host. They are
//! recomputed whole.
//!
//! # Invariants
//! - No choice changes a bit of any result.
//! - What a worker keeps can be dropped at any time; the recompute then computes it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{DType, KeepChoice, PassSteps, Shape};

use super::run_layer::Activation;
use crate::budget::PieceRoom;
use crate::sync::lock;
use crate::tree::Tree;

/// Passes that are remembered; batches of ever new shapes would fill memory otherwise.
const MOST_PASSES: usize = 4096;

/// What a pass over a layer depends on, as far as its steps go.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PassKey {
    layer: usize,
    /// Kernels differ between kinds of devices.
    worker: usize,
    training: bool,
    input: Vec<(DType, Shape, bool)>,
}

impl PassKey {
    pub fn new(layer: usize, worker: usize, training: bool, input: &Tree<Activation>) -> Self {
        let leaves = input.leaves().into_iter();
        let input = leaves.map(|leaf| (leaf.tensor.dtype(), *leaf.tensor.shape(), leaf.grad));
        Self {
            layer,
            worker,
            training,
            input: input.collect(),
        }
    }
}

/// What is known of a pass.
#[derive(Debug, Clone)]
pub(crate) struct KnownPass {
    pub steps: Arc<PassSteps>,
    /// What is worth keeping, the best first; empty where forward and recompute differ.
    pub choices: Arc<[KeepChoice]>,
    /// What all of it takes, as far as that is known before it runs.
    pub whole_seconds: f64,
}

/// What is known of a model's layers.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Mutex<HashMap<PassKey, Option<KnownPass>>>);

/// A layer that a call recomputes.
pub(crate) struct RecomputedLayer {
    pub layer: usize,
    /// The worker of its forward.
    pub worker: usize,
    /// Whether its recompute is on the same one.
    pub is_local: bool,
    /// What its forward takes, where that was measured.
    pub forward_ms: Option<f64>,
}

/// How many of a layer's choices are kept, the best first: some on its worker, those behind them in
/// host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LayerKeep {
    pub stay: usize,
    pub leave: usize,
}

/// How much of the layers of a call is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeepPlan {
    pub layers: HashMap<usize, LayerKeep>,
    /// For each worker, what stays there when all microbatches are kept.
    pub worker_bytes: HashMap<usize, u64>,
    /// What leaves for host memory.
    pub host_bytes: u64,
}

impl Repeats {
    /// What is known of a pass; `None` if it has to be studied. Inside, `None` if it must run whole.
    pub fn get(&self, key: &PassKey) -> Option<Option<KnownPass>> {
        lock(&self.0).get(key).cloned()
    }

    /// Remembers a pass that was studied; `steps` is `None` for one that must run whole.
    pub fn learn(&self, key: PassKey, steps: Option<PassSteps>, forward_signature: u64) {
        let known = steps.map(|steps| {
            // Numbers of pieces mean the same in both runs only if both took the same ones.
            let choices = match steps.signature() == forward_signature {
                true => steps.choices(),
                false => Vec::new(),
            };
            KnownPass {
                whole_seconds: steps.whole_seconds(),
                steps: Arc::new(steps),
                choices: choices.into(),
            }
        });
        let mut passes = lock(&self.0);
        if passes.len() >= MOST_PASSES {
            passes.clear();
        }
        passes.insert(key, known);
    }

    /// A pass that differs from what was learned is run whole from now on.
    pub fn distrust(&self, key: PassKey) {
        lock(&self.0).insert(key, None);
    }

    /// What to keep of a call's layers: the best by seconds per byte, on the workers until they are
    /// full, then in host memory.
    pub fn choose(
        &self,
        recomputed: &[RecomputedLayer],
        microbatches: usize,
        room: PieceRoom,
    ) -> KeepPlan {
        let mut plan = KeepPlan::default();
        if room.worker_bytes == 0 && room.host_bytes == 0 || recomputed.is_empty() {
            return plan;
        }
        let largest = self.largest();
        let worth = |layer: &RecomputedLayer, taken: usize| {
            let known = largest.get(&layer.layer)?;
            let choice = known.choices.get(taken)?;
            Some(Worth(choice.seconds_per_byte()))
        };
        let scale = measured_scale(recomputed, &largest);
        let mut queue = BinaryHeap::new();
        for (place, layer) in recomputed.iter().enumerate() {
            queue.extend(worth(layer, 0).map(|worth| (worth, Reverse(place))));
        }
        while let Some((Worth(seconds_per_byte), Reverse(place))) = queue.pop() {
            let layer = &recomputed[place];
            let keep = plan.layers.entry(layer.layer).or_default();
            let choice = &largest[&layer.layer].choices[keep.stay + keep.leave];
            let bytes = choice.bytes.saturating_mul(microbatches as u64);
            let here = plan.worker_bytes.entry(layer.worker).or_default();
            // In the order of the list: what leaves is behind what stays.
            let can_stay = layer.is_local && keep.leave == 0;
            if can_stay && here.saturating_add(bytes) <= room.worker_bytes {
                *here += bytes;
                keep.stay += 1;
            } else if scale * seconds_per_byte >= room.host_worth
                && plan.host_bytes.saturating_add(bytes) <= room.host_bytes
            {
                plan.host_bytes += bytes;
                keep.leave += 1;
            } else {
                // The list of a layer counts on everything before, so it ends here.
                continue;
            }
            let taken = keep.stay + keep.leave;
            queue.extend(worth(layer, taken).map(|worth| (worth, Reverse(place))));
        }
        plan
    }

    /// For each of these layers, the share of its forward that its recompute still takes under a
    /// plan; 1 where nothing is known. `needs_output` says whether a next layer is recomputed with it.
    pub fn shares_left(
        &self,
        plan: &KeepPlan,
        layers: impl Iterator<Item = (usize, bool)>,
    ) -> Vec<(usize, f64)> {
        let largest = self.largest();
        let share = |layer: usize, needs_output: bool| {
            let Some(known) = largest.get(&layer) else {
                return 1.0;
            };
            let keep = plan.layers.get(&layer).copied().unwrap_or_default();
            let kept = known.choices.len().min(keep.stay + keep.leave);
            let kept = &known.choices[..kept];
            known.steps.share_left(kept, needs_output)
        };
        layers
            .map(|(layer, needs_output)| (layer, share(layer, needs_output)))
            .collect()
    }

    /// What is known of every layer, for the largest input that it has met.
    fn largest(&self) -> HashMap<usize, KnownPass> {
        let mut largest: HashMap<usize, (u64, KnownPass)> = HashMap::new();
        let bytes =
            |known: &KnownPass| known.choices.iter().map(|choice| choice.bytes).sum::<u64>();
        for (key, known) in lock(&self.0).iter() {
            let Some(known) = known else { continue };
            let size = bytes(known);
            let have = largest.get(&key.layer).map(|(size, _)| *size);
            if have.is_none_or(|have| size > have) {
                largest.insert(key.layer, (size, known.clone()));
            }
        }
        let largest = largest.into_iter();
        largest.map(|(layer, (_, known))| (layer, known)).collect()
    }
}

/// By how much times that are known before anything runs differ from those of forwards that were
/// measured: one factor for all layers, so that noise does not change their order.
fn measured_scale(recomputed: &[RecomputedLayer], known: &HashMap<usize, KnownPass>) -> f64 {
    let (mut measured, mut expected) = (0.0, 0.0);
    for layer in recomputed {
        if let (Some(ms), Some(known)) = (layer.forward_ms, known.get(&layer.layer)) {
            measured += 1e-3 * ms;
            expected += known.whole_seconds;
        }
    }
    match measured > 0.0 && expected > 0.0 {
        true => measured / expected,
        false => 1.0,
    }
}

/// Seconds per byte, in order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Worth(f64);

impl Eq for Worth {}

impl PartialOrd for Worth {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Worth {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}
