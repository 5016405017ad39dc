//! What layers do when they are run a second time, and what of a first run is worth keeping for it.
//!
//! The first recompute of a layer is studied ([`roundpipe_tensor::repeat`]); later ones leave out
//! what the backward does not need. From the second call on, forwards also keep pieces for their
//! recompute on the worker, as many as have room there: a call's choice is made when it is submitted
//! ([`Repeats::choose`]), by seconds saved per byte.
//!
//! Refused: layers whose forward and recompute differ, or that look at values on the host. They are
//! recomputed whole.
//!
//! # Invariants
//! - No choice changes a bit of any result.
//! - What is kept can be dropped at any time; the recompute then computes it.

use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{DType, KeepChoice, PassSteps, Shape};

use super::run_layer::Activation;
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
}

/// What is known of a model's layers.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Mutex<HashMap<PassKey, Option<KnownPass>>>);

/// A layer whose forward and backward a worker both runs in a call.
pub(crate) struct LocalLayer {
    pub layer: usize,
    pub worker: usize,
}

/// How much of the layers of a call is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeepPlan {
    /// For each layer, how many of its choices.
    pub choices: HashMap<usize, usize>,
    /// For each worker, what they take when all microbatches are kept.
    pub bytes: HashMap<usize, u64>,
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

    /// What to keep of a call's layers: on each worker the best by seconds per byte, until `budget`
    /// is full.
    pub fn choose(&self, local: &[LocalLayer], microbatches: usize, budget: u64) -> KeepPlan {
        let mut plan = KeepPlan::default();
        if budget == 0 || local.is_empty() {
            return plan;
        }
        let largest = self.largest_choices();
        let mut queue = BinaryHeap::new();
        let next = |layer: &LocalLayer, taken: usize| {
            let choice = largest.get(&layer.layer)?.get(taken)?;
            Some((
                Worth(choice.seconds_per_byte()),
                std::cmp::Reverse(layer.layer),
            ))
        };
        for (place, layer) in local.iter().enumerate() {
            queue.extend(next(layer, 0).map(|key| (key, place)));
        }
        while let Some((_, place)) = queue.pop() {
            let LocalLayer { layer, worker } = &local[place];
            let taken = plan.choices.entry(*layer).or_default();
            let choice = &largest[layer][*taken];
            let bytes = choice.bytes.saturating_mul(microbatches as u64);
            let used = plan.bytes.entry(*worker).or_default();
            // The list of a layer counts on everything before, so it ends with what has no room.
            if used.saturating_add(bytes) > budget {
                continue;
            }
            *used += bytes;
            *taken += 1;
            let taken = *taken;
            queue.extend(next(&local[place], taken).map(|key| (key, place)));
        }
        plan
    }

    /// The choices of every layer, for the largest input that it has met.
    fn largest_choices(&self) -> HashMap<usize, Arc<[KeepChoice]>> {
        let mut largest: HashMap<usize, (u64, Arc<[KeepChoice]>)> = HashMap::new();
        let bytes = |choices: &[KeepChoice]| choices.iter().map(|choice| choice.bytes).sum::<u64>();
        for (key, known) in lock(&self.0).iter() {
            let Some(known) = known else { continue };
            let new = (bytes(&known.choices), known.choices.clone());
            let have = largest.entry(key.layer).or_insert_with(|| new.clone());
            if new.0 > have.0 {
                *have = new;
            }
        }
        let largest = largest.into_iter();
        largest
            .map(|(layer, (_, choices))| (layer, choices))
            .collect()
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
