//! What layers do when they are run a second time, and what of a first run is worth keeping for it.
//!
//! The first recompute of a layer is studied ([`roundpipe_tensor::repeat`]); later ones leave out
//! what the backward does not need. From the second call on, forwards also keep pieces for their
//! recompute, on the worker or in host memory: a call's choice is made when it is submitted
//! ([`Repeats::choose`]), by seconds saved per byte. What pieces leave of a worker's memory keeps
//! weights between the two ([`super::kept_weights`]).
//!
//! Refused: layers whose forward and recompute differ, or that look at values on the host. They are
//! recomputed whole.
//!
//! # Invariants
//! - No choice changes a bit of any result.
//! - What a worker keeps can be dropped at any time; the recompute then computes it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{DType, KeepChoice, PassSteps, Shape};

use super::run_layer::Activation;
use crate::budget::{PieceRoom, StageRoom};
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
    /// Of a recompute whose output is not needed, and of one whose output the next layer starts
    /// from.
    choices: [Arc<[KeepChoice]>; 2],
    /// What all of it takes, as far as that is known before it runs.
    pub whole_seconds: f64,
}

impl KnownPass {
    /// What is worth keeping, the best first; empty where forward and recompute differ.
    pub fn choices(&self, needs_output: bool) -> &Arc<[KeepChoice]> {
        &self.choices[usize::from(needs_output)]
    }
}

/// What is known of a model's layers.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Mutex<HashMap<PassKey, Option<KnownPass>>>);

/// A layer that a call recomputes.
pub(crate) struct RecomputedLayer {
    pub layer: usize,
    /// The stages of its forward and of its recompute.
    pub stages: RangeInclusive<usize>,
    /// Whether a next layer is recomputed with it.
    pub needs_output: bool,
    /// What its forward takes, where that was measured.
    pub forward_ms: Option<f64>,
}

/// How many of a layer's choices are kept, the best first: some on its worker, those behind them in
/// host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LayerKeep {
    pub stay: usize,
    pub leave: usize,
    /// Whether a next layer is recomputed with it, which decides what there is to choose from.
    pub needs_output: bool,
}

/// What may be kept of a call beside pieces of its forwards: weights, from the forward of a layer to
/// its backward.
pub(crate) struct KeepableWeights<'a> {
    /// By layer and worker; 0 where they are not sent or stay anyway.
    pub bytes: &'a dyn Fn(usize, usize) -> u64,
    /// On each worker, before all pieces, because copies are what the backward waits for.
    pub first: u64,
    /// On each worker, beside pieces that take so many bytes there.
    pub beside: &'a dyn Fn(u64) -> u64,
    /// What those beside pieces leave for weights that come early.
    pub for_early: u64,
}

/// How much of the layers of a call is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeepPlan {
    pub layers: HashMap<usize, LayerKeep>,
    /// The layers whose weights stay from their forward to their backward.
    pub weights: HashSet<usize>,
    /// For each worker, what pieces take there when all microbatches are kept.
    pub worker_bytes: HashMap<usize, u64>,
    /// For each worker, what weights that wait for their backward take there.
    pub weight_bytes: HashMap<usize, u64>,
    /// What leaves for host memory.
    pub host_bytes: u64,
    /// By stage, what they leave of the room on its worker while it runs.
    pub left: Vec<u64>,
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
            let is_same = steps.signature() == forward_signature;
            let choices = |needs_output| match is_same {
                true => Arc::from(steps.choices(needs_output)),
                false => Arc::from([]),
            };
            KnownPass {
                whole_seconds: steps.whole_seconds(),
                choices: [choices(false), choices(true)],
                steps: Arc::new(steps),
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

    /// What to keep of a call's layers: the best pieces by seconds per byte, on the workers until
    /// they are full, then in host memory; and weights in what is left on the workers. `workers` are
    /// those of the call's stages.
    pub fn choose(
        &self,
        recomputed: &[RecomputedLayer],
        workers: &[usize],
        microbatches: usize,
        room: &PieceRoom,
        weights: &KeepableWeights<'_>,
    ) -> KeepPlan {
        let mut plan = KeepPlan::default();
        if room.is_empty() || recomputed.is_empty() {
            plan.left = room.stages.iter().map(|room| room.stay).collect();
            return plan;
        }
        let largest = self.largest();
        let choice = |layer: &RecomputedLayer, taken: usize| {
            let known = largest.get(&layer.layer)?;
            known.choices(layer.needs_output).get(taken)
        };
        let scale = measured_scale(recomputed, &largest);
        let mut use_of = StageUse::new(room, workers, microbatches as u64);
        let first = KeepableWeights {
            beside: &|_| weights.first,
            for_early: 0,
            ..*weights
        };
        use_of.keep_weights(recomputed, &first);
        let mut queue = BinaryHeap::new();
        for (place, layer) in recomputed.iter().enumerate() {
            let first = choice(layer, 0).map(|choice| Worth(choice.seconds_per_byte()));
            queue.extend(first.map(|worth| (worth, Reverse(spread(place)), place)));
        }
        while let Some((Worth(seconds_per_byte), turn, place)) = queue.pop() {
            let layer = &recomputed[place];
            let keep = plan.layers.entry(layer.layer).or_default();
            keep.needs_output = layer.needs_output;
            let bytes = choice(layer, keep.stay + keep.leave).map_or(0, |choice| choice.bytes);
            // In the order of the list: what leaves is behind what stays.
            if keep.leave == 0 && use_of.stay(layer, bytes) {
                keep.stay += 1;
            } else if scale * seconds_per_byte >= room.host_worth && use_of.leave(layer, bytes) {
                keep.leave += 1;
            } else {
                // The list of a layer counts on everything before, so it ends here.
                continue;
            }
            let next = choice(layer, keep.stay + keep.leave);
            let worth = next.map(|choice| Worth(choice.seconds_per_byte()));
            queue.extend(worth.map(|worth| (worth, turn, place)));
        }
        use_of.keep_weights(recomputed, weights);
        plan.left = (0..workers.len()).map(|stage| use_of.left(stage)).collect();
        plan.weights = use_of.weights;
        plan.weight_bytes = use_of.weight_bytes;
        plan.worker_bytes = use_of.worker_bytes;
        plan.host_bytes = use_of.host_bytes;
        plan
    }

    /// For each of these layers, the share of its forward that its recompute still takes under a
    /// plan; 1 where nothing is known.
    pub fn shares_left(
        &self,
        plan: &KeepPlan,
        recomputed: &[RecomputedLayer],
    ) -> Vec<(usize, f64)> {
        let largest = self.largest();
        let share = |layer: &RecomputedLayer| {
            let Some(known) = largest.get(&layer.layer) else {
                return 1.0;
            };
            let keep = plan.layers.get(&layer.layer).copied().unwrap_or_default();
            let choices = known.choices(layer.needs_output);
            let kept = choices.len().min(keep.stay + keep.leave);
            known.steps.share_left(&choices[..kept], layer.needs_output)
        };
        let layers = recomputed.iter();
        layers.map(|layer| (layer.layer, share(layer))).collect()
    }

    /// What is known of every layer, for the largest input that it has met.
    fn largest(&self) -> HashMap<usize, KnownPass> {
        let mut largest: HashMap<usize, (u64, KnownPass)> = HashMap::new();
        let bytes = |known: &KnownPass| {
            let choices = known.choices(true).iter();
            choices.map(|choice| choice.bytes).sum::<u64>()
        };
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

/// What pieces and weights take on workers, stage by stage, and pieces in host memory.
struct StageUse<'a> {
    room: &'a PieceRoom,
    workers: &'a [usize],
    microbatches: u64,
    /// What stays, while each stage runs.
    staying: Vec<u64>,
    /// Pieces that one microbatch of a stage has back from host memory.
    arriving: Vec<u64>,
    worker_bytes: HashMap<usize, u64>,
    host_bytes: u64,
    /// The layers whose weights stay, and what they take on each worker.
    weights: HashSet<usize>,
    weight_bytes: HashMap<usize, u64>,
}

impl<'a> StageUse<'a> {
    fn new(room: &'a PieceRoom, workers: &'a [usize], microbatches: u64) -> Self {
        Self {
            room,
            workers,
            microbatches,
            staying: vec![0; workers.len()],
            arriving: vec![0; workers.len()],
            worker_bytes: HashMap::new(),
            host_bytes: 0,
            weights: HashSet::new(),
            weight_bytes: HashMap::new(),
        }
    }

    /// What may still stay on a stage's worker while it runs.
    fn left(&self, stage: usize) -> u64 {
        // Those of the task under way, and those of the next. A part of the room is theirs alone.
        let StageRoom { stay, arrive } = self.room.stages[stage];
        let arriving = (2 * self.arriving[stage]).saturating_sub(arrive);
        stay.saturating_sub(self.staying[stage] + arriving)
    }

    /// Keeps pieces of so many bytes per microbatch on the worker of their forward, if their
    /// recompute is there too and they have room from the one to the other.
    fn stay(&mut self, layer: &RecomputedLayer, bytes: u64) -> bool {
        let worker = self.workers[*layer.stages.start()];
        let all = bytes.saturating_mul(self.microbatches);
        let is_here = |stage: &usize| self.workers[*stage] == worker;
        let between: Vec<usize> = layer.stages.clone().filter(is_here).collect();
        let is_local = self.workers[*layer.stages.end()] == worker;
        if !is_local || between.iter().any(|stage| self.left(*stage) < all) {
            return false;
        }
        for stage in between {
            self.staying[stage] += all;
        }
        *self.worker_bytes.entry(worker).or_default() += all;
        true
    }

    /// Keeps weights between forward and backward, those of layers that are far apart first: the link
    /// catches up behind each of them.
    fn keep_weights(&mut self, recomputed: &[RecomputedLayer], weights: &KeepableWeights<'_>) {
        let mut places: Vec<usize> = (0..recomputed.len()).collect();
        places.sort_by_key(|place| spread(*place));
        for layer in places.into_iter().map(|place| &recomputed[place]) {
            let worker = self.workers[*layer.stages.start()];
            let bytes = (weights.bytes)(layer.layer, worker);
            let of_worker = |bytes: &HashMap<usize, u64>| bytes.get(&worker).copied().unwrap_or(0);
            let taken = of_worker(&self.weight_bytes).saturating_add(bytes);
            let most = (weights.beside)(of_worker(&self.worker_bytes));
            let is_new = bytes > 0 && !self.weights.contains(&layer.layer);
            if is_new && taken <= most {
                self.keep_weights_of(layer, bytes, weights.for_early);
            }
        }
    }

    /// Keeps the weights of a layer, if its backward is where its forward is and they have room
    /// between the two. Those stages count them as their own.
    fn keep_weights_of(&mut self, layer: &RecomputedLayer, bytes: u64, for_early: u64) {
        let (first, last) = (*layer.stages.start(), *layer.stages.end());
        let worker = self.workers[first];
        let is_here = |stage: &usize| self.workers[*stage] == worker;
        let between: Vec<usize> = (first + 1..last).filter(is_here).collect();
        let has_room = |stage: &usize| self.left(*stage) >= bytes.saturating_add(for_early);
        if self.workers[last] != worker || !between.iter().all(has_room) {
            return;
        }
        for stage in between {
            self.staying[stage] += bytes;
        }
        self.weights.insert(layer.layer);
        *self.weight_bytes.entry(worker).or_default() += bytes;
    }

    /// Keeps them in host memory, if there is room, and they have room when they come back.
    fn leave(&mut self, layer: &RecomputedLayer, bytes: u64) -> bool {
        let back = *layer.stages.end();
        let all = self
            .host_bytes
            .saturating_add(bytes.saturating_mul(self.microbatches));
        let reserved = self.room.stages[back]
            .arrive
            .saturating_sub(2 * self.arriving[back]);
        let has_room = 2 * bytes <= self.left(back).saturating_add(reserved);
        if !has_room || all > self.room.host_bytes {
            return false;
        }
        self.arriving[back] += bytes;
        self.host_bytes = all;
        true
    }
}

/// An order of places in which neighbours are far apart: the bits from the lowest to the highest.
/// Where only some of many equal layers keep a piece, their copies do not come in a burst then.
pub(super) fn spread(place: usize) -> usize {
    place.reverse_bits()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(stages: RangeInclusive<usize>) -> RecomputedLayer {
        RecomputedLayer {
            layer: 0,
            stages,
            needs_output: false,
            forward_ms: None,
        }
    }

    fn room(stay: [u64; 4], arrive: u64) -> PieceRoom {
        PieceRoom {
            stages: stay.map(|stay| StageRoom { stay, arrive }).to_vec(),
            host_bytes: 100,
            ..PieceRoom::default()
        }
    }

    /// A piece takes room from its forward to its recompute, on its own worker only.
    #[test]
    fn pieces_take_room_while_they_stay() {
        let room = room([100, 40, 40, 40], 0);
        let mut one_worker = StageUse::new(&room, &[0; 4], 2);
        assert!(!one_worker.stay(&layer(0..=3), 21), "42 of 40");
        assert!(one_worker.stay(&layer(0..=3), 10));
        assert!(!one_worker.stay(&layer(1..=2), 11), "20 and 22 of 40");
        assert!(one_worker.stay(&layer(1..=2), 10));
        assert_eq!(one_worker.worker_bytes[&0], 40);
        let mut two_workers = StageUse::new(&room, &[0, 1, 0, 1], 2);
        assert!(
            !two_workers.stay(&layer(0..=3), 1),
            "its recompute is elsewhere"
        );
        assert!(two_workers.stay(&layer(0..=2), 20));
        assert!(two_workers.stay(&layer(1..=3), 20));
    }

    /// Weights that stay take room between their two visits, which count them as their own, and leave
    /// some to weights that come early.
    #[test]
    fn weights_take_room_between_their_visits() {
        let room = room([0, 40, 40, 0], 0);
        let layers = |stages: [RangeInclusive<usize>; 3]| {
            let layers = stages.into_iter().enumerate();
            let layers = layers.map(|(at, stages)| RecomputedLayer {
                layer: at,
                ..layer(stages)
            });
            layers.collect::<Vec<_>>()
        };
        let kept = |recomputed: &[RecomputedLayer], workers: &[usize], most: u64| {
            let mut used = StageUse::new(&room, workers, 2);
            let weights = KeepableWeights {
                bytes: &|layer, _| [15, 20, 0][layer],
                first: 0,
                beside: &|_| most,
                for_early: 10,
            };
            used.keep_weights(recomputed, &weights);
            let mut layers: Vec<usize> = used.weights.iter().copied().collect();
            layers.sort_unstable();
            let left = [1, 2].map(|stage| used.left(stage));
            (layers, left, used.weight_bytes.get(&0).copied())
        };
        let all = layers([0..=3, 0..=3, 0..=3]);
        assert_eq!(
            kept(&all, &[0; 4], u64::MAX),
            (vec![0], [25, 25], Some(15)),
            "20 of 25 - 10"
        );
        assert_eq!(kept(&all, &[0; 4], 14), (vec![], [40, 40], None));
        let apart = layers([0..=2, 1..=3, 1..=2]);
        assert_eq!(
            kept(&apart, &[0; 4], u64::MAX),
            (vec![0, 1], [25, 20], Some(35))
        );
        // The first has its backward elsewhere, and stage 2 is elsewhere, too.
        let kept = kept(&layers([0..=2, 1..=3, 1..=3]), &[0, 0, 1, 0], u64::MAX);
        assert_eq!(kept, (vec![1], [40, 40], Some(20)));
    }

    /// What comes back from host memory has a part of the room for itself, twice: for the task under
    /// way and for the next.
    #[test]
    fn pieces_from_host_memory_have_a_place_to_land() {
        let room = room([0, 0, 0, 30], 20);
        let mut used = StageUse::new(&room, &[0; 4], 2);
        assert!(used.leave(&layer(0..=2), 10));
        assert!(!used.leave(&layer(0..=2), 1), "nothing may stay there");
        assert!(used.leave(&layer(1..=3), 20));
        assert!(!used.stay(&layer(3..=3), 6), "10 of 30 are left");
        assert!(used.stay(&layer(3..=3), 5));
        assert!(!used.leave(&layer(3..=3), 1));
        assert_eq!(used.host_bytes, 60);
        assert!(!used.leave(&layer(1..=2), 21), "there are 100 in all");
    }
}
