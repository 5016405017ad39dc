//! How a worker's memory is divided: the only place that knows shares.
//!
//! A [`WorkerBudget`] is a pure value made from the size of a worker's arena. The planner takes from
//! it how large a stage may be, the launcher what may stay on the worker, what may come early and
//! how much may wait to be copied out. It prints itself line by line.
//!
//! What a stage must have ([`StageNeeds`]) is checked when a call is planned: its weights, what one
//! task works in, and what is on its way out fit the arena together. Everything else is optional and
//! never stands in its way: a value that may stay goes to host memory, weights of the next stage and
//! other prefetches come later.

use std::fmt;

use roundpipe_tensor::optim::remainder_bytes;
use roundpipe_tensor::{Bytes, DType, Param};

use crate::error::{Error, Result};

/// A task's blocks may leave gaps of this part of what they take.
const GAPS: u64 = 8;

/// The arena of a worker that takes `asked` bytes of its device, of which the driver's context and
/// the libraries take `context`.
///
/// # Errors
/// When nothing is left.
pub(crate) fn asked_arena(asked: u64, context: u64) -> Result<u64> {
    asked
        .checked_sub(context)
        .filter(|arena| *arena > 0 || context == 0)
        .ok_or_else(|| {
            let what = format!(
                "{} of a device are less than its context and libraries take ({}); allow more",
                Bytes(asked),
                Bytes(context)
            );
            Error::config("memory", what)
        })
}

/// What the workers on a device reserve together when `free` bytes of it are free. Host memory also
/// holds the model and its optimizer, so half of it stays. Of other devices a sixteenth stays for
/// displays and other programs, or what a context takes if that is more: libraries load late.
pub(crate) fn default_arena(free: u64, context: u64, is_host: bool) -> u64 {
    if is_host {
        return free / 2;
    }
    free.saturating_sub(context.max(free / 16))
}

/// Host memory of a training run, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostBudget {
    /// Working weights and buffers, all versions.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// Masters of narrower weights: what bf16 weights lack of them, f32 copies of f16 weights.
    pub masters: u64,
    /// State of the rule.
    pub moments: u64,
    /// Saved inputs of stages, for all microbatches of a call.
    pub activations: u64,
    /// Frozen weights that stay in files: memory only while they are used, so not part of the sum.
    pub in_files: u64,
}

impl HostBudget {
    /// What training these parameters takes, each named once, with so many moments per element and
    /// a second version of the weights or not; activations are not known from parameters.
    pub fn training<'a>(
        params: impl IntoIterator<Item = &'a Param>,
        moments: u64,
        second_version: bool,
    ) -> Self {
        let mut budget = Self::default();
        for param in params {
            let bytes = param.bytes() as u64;
            if !param.is_trainable() && param.data().stays_in_file() {
                budget.in_files += bytes;
                continue;
            }
            budget.weights += bytes;
            if !param.is_trainable() {
                continue;
            }
            let accumulator = param.dtype().accumulator();
            let wide = (param.shape().numel() * accumulator.size()) as u64;
            budget.weights += if second_version { bytes } else { 0 };
            budget.gradients += bytes;
            budget.masters += Self::master_bytes(param);
            budget.moments += moments * wide;
        }
        budget
    }

    /// What the master of a trained parameter takes beside its weights.
    pub fn master_bytes(param: &Param) -> u64 {
        let len = param.shape().numel();
        match (param.dtype(), param.dtype().accumulator()) {
            (DType::BF16, _) => remainder_bytes(len) as u64,
            (own, wide) if own == wide => 0,
            (_, wide) => (len * wide.size()) as u64,
        }
    }

    /// All of it that takes memory.
    pub fn total(&self) -> u64 {
        let lines = [
            self.weights,
            self.gradients,
            self.masters,
            self.moments,
            self.activations,
        ];
        lines.into_iter().fold(0, u64::saturating_add)
    }

    /// Compares what is still to be allocated with the memory that is `left`. A system gives out
    /// more than it has and ends the process that fills it, so this comes before.
    ///
    /// # Errors
    /// When it is more; the line names the largest part and the cheapest way out.
    pub fn check(&self, left: Bytes) -> Result<()> {
        if self.total() <= left.0 {
            return Ok(());
        }
        let optimizer = self.masters.saturating_add(self.moments);
        let way_out = if self.activations > self.gradients.saturating_add(optimizer) {
            "use a smaller batch or shorter sequences"
        } else {
            "train fewer parameters (LoRA), use lag 0, or a machine with more memory"
        };
        let what = format!(
            "training needs {} more ({} weights, {} gradients, {} masters, {} moments, {} activations), \
             and {left} are left; {way_out}",
            Bytes(self.total()),
            Bytes(self.weights),
            Bytes(self.gradients),
            Bytes(self.masters),
            Bytes(self.moments),
            Bytes(self.activations),
        );
        Err(Error::config("host memory", what))
    }
}

impl fmt::Display for HostBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("masters", self.masters),
            ("moments", self.moments),
            ("activations", self.activations),
            ("host memory in all", self.total()),
            ("weights read from files", self.in_files),
        ];
        for (name, bytes) in lines {
            writeln!(f, "{name:<32}{}", Bytes(bytes))?;
        }
        Ok(())
    }
}

/// The memory of one worker, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerBudget {
    /// Everything that was reserved on the device.
    pub arena: u64,
    /// Weights of the stage that runs and of the one that is uploaded meanwhile; 0 where the device
    /// reads host memory in place.
    pub weights: u64,
    /// What one task works in beside weights: tapes, working memory, sums of gradients.
    pub task: u64,
    /// The same for a model with a layer that needs more than `task`.
    pub largest_task: u64,
    /// Activations that stay on the worker instead of going to host memory.
    pub kept: u64,
    /// Whether activations may also take what a call's stages leave. Not where the user chose
    /// `kept`, nor in host memory, where nothing is spare.
    pub takes_spare: bool,
    /// Values on their way to host memory.
    pub outbox: u64,
}

/// What a stage of a call needs of its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageNeeds {
    /// Its weights; where the device reads host memory in place, those that are made when it does.
    pub weights: u64,
    /// What a task works in beside weights, values on their way out and the sums of gradients
    /// included.
    pub task: u64,
    /// The part of `task` that the sums of gradients take from the first microbatch on.
    pub sums: u64,
    /// The part of `task` that values on their way out take.
    pub outbox: u64,
}

impl StageNeeds {
    /// What the task of a microbatch still has to find. The first one leaves its sums behind.
    pub fn of_microbatch(&self, microbatch: usize) -> u64 {
        if microbatch == 0 {
            self.task
        } else {
            self.task.saturating_sub(self.sums)
        }
    }

    /// Weights and working memory together.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.task)
    }
}

/// What pieces of forwards may take.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PieceRoom {
    /// By stage, on its worker while it runs.
    pub stages: Vec<StageRoom>,
    /// On each worker, of what may stay there, for other values.
    pub other_bytes: u64,
    /// What those would take if all of them stayed.
    pub most_other_bytes: u64,
    /// In host memory, for all workers.
    pub host_bytes: u64,
    /// What a byte in host memory must save at least, in seconds.
    pub host_worth: f64,
}

/// What pieces of forwards may take on a worker while a stage runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageRoom {
    /// Those that stay there.
    pub stay: u64,
    /// Those that come back from host memory, beside `stay`.
    pub arrive: u64,
}

impl PieceRoom {
    /// Whether nothing can be kept.
    pub fn is_empty(&self) -> bool {
        self.host_bytes == 0 && self.stages.iter().all(|stage| stage.stay == 0)
    }
}

/// What the activations of a call that trains take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ActivationUse {
    /// Inputs of what is recomputed, for all microbatches.
    pub saved: u64,
    /// What of them may stay on each worker; the rest goes to host memory.
    pub may_stay: u64,
    /// Results of forwards that spare recomputes time, on all workers.
    pub pieces_on_workers: u64,
    /// The same in host memory.
    pub pieces_in_host: u64,
}

/// What a call needs of every worker, and what it leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct CallNeeds {
    /// By stage.
    pub stages: Vec<StageNeeds>,
    /// Activations that may stay on a worker beside any of its stages.
    pub kept_bytes: u64,
    /// What pieces of forwards may take, which save a recompute their time.
    pub pieces: PieceRoom,
    /// Activations that the call saves in host memory, if none stays.
    pub host_bytes: u64,
    /// Frozen weights that stay on each worker from step to step.
    pub held_bytes: u64,
    /// Frozen weights of later jobs that may be on each worker before their turn.
    pub early_bytes: u64,
    /// Weights that each worker keeps from a forward to its backward before any piece of a forward,
    /// because copies are what the backward waits for.
    pub first_weights: u64,
}

impl CallNeeds {
    /// Sets memory aside for frozen weights that stay: activations and pieces have so much less.
    pub fn holding(mut self, bytes: u64) -> Self {
        self.held_bytes = bytes;
        self.kept_bytes = self.kept_bytes.saturating_sub(bytes);
        for room in &mut self.pieces.stages {
            room.stay = room.stay.saturating_sub(bytes);
        }
        self
    }

    /// What activations may take on a worker in all when pieces of forwards take so much of it, and
    /// weights that wait for their backward so much beside it. Pieces may take more than `kept_bytes`
    /// where they are gone before the largest stage runs.
    pub fn may_stay(&self, pieces: u64, weights: u64) -> u64 {
        let with_pieces = pieces.saturating_add(self.pieces.other_bytes);
        self.kept_bytes.saturating_sub(weights).max(with_pieces)
    }

    /// What weights that wait for their backward may take on a worker beside so many bytes of pieces:
    /// they come once more where they do not stay, a saved input goes and comes.
    pub fn weights_may_stay(&self, pieces: u64) -> u64 {
        let PieceRoom {
            other_bytes,
            most_other_bytes,
            ..
        } = self.pieces;
        if most_other_bytes <= other_bytes {
            return u64::MAX;
        }
        let activations = pieces.saturating_add(most_other_bytes);
        self.kept_bytes.saturating_sub(activations)
    }
}

impl WorkerBudget {
    /// The budget of an arena. A worker that reads host memory in place has no share for weights.
    /// `kept` is what the user chose for activations that stay, if anything.
    pub fn new(arena: u64, reads_host: bool, kept: Option<u64>) -> Self {
        let share = |tenths: u64| arena / 10 * tenths + arena % 10 * tenths / 10;
        let takes_spare = kept.is_none() && !reads_host;
        let kept = match kept {
            Some(kept) => kept,
            None if reads_host => arena / 4,
            None => arena / 10,
        };
        Self {
            arena,
            weights: if reads_host { 0 } else { share(6) },
            task: if reads_host {
                arena / 2
            } else {
                arena / 10 * 3
            },
            largest_task: arena / 10 * 8,
            kept,
            takes_spare,
            outbox: arena / 16,
        }
    }

    /// The part of the `kept` bytes of a call that only values for the next stage may use. They come
    /// and go with every stage; without it, values that stay until the backward would push them out
    /// for a whole step.
    pub fn for_next_stage(&self, kept: u64) -> u64 {
        // What is spare beside `self.kept` is not needed by these.
        kept.min(self.kept) / 4
    }

    /// What may stay on a worker beside a stage that leaves `rest` bytes: the budget's share, or all
    /// that is left beside the weights of its neighbours and what comes early, if that is more.
    fn room_beside(&self, rest: u64, neighbours: u64) -> StageRoom {
        let share = rest.min(self.kept);
        let spare = rest.saturating_sub(neighbours);
        let arrive = spare.min(self.early());
        let stay = match self.takes_spare {
            true => share.max(spare - arrive),
            false => share,
        };
        StageRoom { stay, arrive }
    }

    /// What values that come before they are needed may take.
    fn early(&self) -> u64 {
        self.arena / 16
    }

    /// The part of that which inputs need, where nothing else comes early.
    pub fn early_inputs(&self) -> u64 {
        self.arena / 32
    }

    /// The smallest of several workers' budgets, for a plan that must fit all of them.
    pub fn least<'a>(budgets: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        budgets
            .into_iter()
            .copied()
            .min_by_key(|budget| budget.arena)
    }

    /// What a task may work in when the largest layer of a model needs `largest_layer` bytes.
    pub fn task_limit(&self, largest_layer: u64) -> u64 {
        self.task.max(largest_layer.min(self.largest_task))
    }

    /// The needs of a stage whose tasks work in `task` bytes, of which `sums` stay, and have at most
    /// `sent` bytes on their way out.
    pub fn stage_needs(&self, weights: u64, task: u64, sums: u64, sent: u64) -> StageNeeds {
        // Blocks are rounded up and leave gaps, and what is sent waits for its copy.
        let gaps = task / GAPS;
        let outbox = sent.min(self.outbox);
        StageNeeds {
            weights,
            task: task.saturating_add(gaps).saturating_add(outbox),
            sums,
            outbox,
        }
    }

    /// The needs of a call whose stages go round so many workers; the stage that does not fit if
    /// there is one.
    ///
    /// # Errors
    /// The place of the largest stage.
    pub fn call_needs(&self, stages: Vec<StageNeeds>, workers: usize) -> Result<CallNeeds, usize> {
        let mut rooms = Vec::with_capacity(stages.len());
        for (place, stage) in stages.iter().enumerate() {
            let rest = self.arena.checked_sub(stage.total());
            // Weights come while the stage before still has its own, and those of the next call's
            // first stages while the last ones run.
            let count = stages.len();
            let next = (place + workers) % count;
            let before = (place + count - workers % count) % count;
            let neighbours = stages[next].weights.max(stages[before].weights);
            rooms.push(rest.map(|rest| self.room_beside(rest, neighbours)));
        }
        if rooms.contains(&None) {
            let totals = stages.iter().map(StageNeeds::total).enumerate();
            let largest = totals.max_by_key(|(_, total)| *total);
            return Err(largest.map_or(0, |(place, _)| place));
        }
        let rooms: Vec<StageRoom> = rooms.into_iter().flatten().collect();
        let least = rooms.iter().map(|room| room.stay).min();
        Ok(CallNeeds {
            kept_bytes: least.unwrap_or(self.kept),
            stages,
            pieces: PieceRoom {
                stages: rooms,
                ..PieceRoom::default()
            },
            host_bytes: 0,
            held_bytes: 0,
            early_bytes: 0,
            first_weights: 0,
        })
    }
}

impl fmt::Display for WorkerBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [
            ("weights (two stages)", self.weights),
            ("one task", self.task),
            ("one task, at most", self.largest_task),
            ("kept activations", self.kept),
            (
                "  of these for the next stage",
                self.for_next_stage(self.kept),
            ),
            ("outgoing copies", self.outbox),
            ("reserved in all", self.arena),
        ];
        for (name, bytes) in lines {
            writeln!(f, "{name:<32}{}", Bytes(bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_their_arena() {
        for arena in [0, 1, 9, 1023, 8 << 30, u64::MAX] {
            for reads_host in [false, true] {
                let budget = WorkerBudget::new(arena, reads_host, None);
                let WorkerBudget {
                    weights,
                    task,
                    kept,
                    ..
                } = budget;
                // Weights, a task and kept values exist at the same time.
                assert!(weights + task + kept <= arena, "{budget}");
                assert!(budget.largest_task <= arena && budget.outbox <= arena);
                assert!(budget.for_next_stage(budget.kept) <= budget.kept);
            }
        }
    }

    #[test]
    fn a_large_layer_may_have_more_than_the_usual_share() {
        let budget = WorkerBudget::new(1000, false, None);
        assert_eq!(budget.task_limit(10), 300);
        assert_eq!(budget.task_limit(500), 500);
        assert_eq!(budget.task_limit(5000), 800);
    }

    #[test]
    fn what_stays_shrinks_beside_a_large_stage() {
        let budget = WorkerBudget::new(1600, false, None);
        let call = |weights| {
            let stage = StageNeeds {
                weights,
                task: 100,
                sums: 30,
                outbox: 0,
            };
            budget.call_needs(vec![stage], 1)
        };
        let kept = |weights| call(weights).map(|needs| needs.kept_bytes);
        // All but the stage, the weights of the next one, and a sixteenth for what comes early.
        assert_eq!(kept(100), Ok(1600 - 200 - 100 - 100));
        assert_eq!(kept(600), Ok(1600 - 700 - 600 - 100));
        // At least the budget's share, as far as there is room.
        assert_eq!(kept(700), Ok(160));
        assert_eq!(kept(1400), Ok(100));
        assert_eq!(kept(1500), Ok(0));
        assert_eq!(kept(1501), Err(0), "it does not fit");
        let chosen = WorkerBudget::new(1600, false, Some(50));
        let stage = StageNeeds {
            weights: 100,
            task: 100,
            sums: 30,
            outbox: 0,
        };
        assert_eq!(chosen.call_needs(vec![stage], 1).unwrap().kept_bytes, 50);
    }

    #[test]
    fn room_is_counted_beside_the_weights_of_neighbours() {
        let budget = WorkerBudget::new(1600, false, None);
        let stage = |weights, task| StageNeeds {
            weights,
            task,
            sums: 0,
            outbox: 0,
        };
        let stages = vec![stage(500, 50), stage(100, 400), stage(60, 300)];
        let stay = |workers| -> Vec<u64> {
            let needs = budget.call_needs(stages.clone(), workers).unwrap();
            needs.pieces.stages.iter().map(|room| room.stay).collect()
        };
        // The second comes while the first has its weights, and the first of the next call while
        // the third has.
        let of = |own: u64, neighbours: u64| 1600 - own - neighbours - 100;
        assert_eq!(stay(1), [of(550, 100), of(500, 500), of(360, 500)]);
        // Three workers: the next on the same one is the same stage of the next call.
        assert_eq!(stay(3), [of(550, 500), of(500, 100), of(360, 60)]);
    }

    #[test]
    fn a_task_has_room_for_gaps_and_for_what_leaves() {
        let budget = WorkerBudget::new(1600, false, None);
        assert_eq!(budget.stage_needs(7, 320, 200, 30).task, 320 + 40 + 30);
        let needs = budget.stage_needs(7, 320, 200, u64::MAX);
        assert_eq!(needs.task, 320 + 40 + 100);
        assert_eq!(needs.total(), 467);
        let of = |microbatch| needs.of_microbatch(microbatch);
        assert_eq!([of(0), of(1), of(2)], [460, 260, 260]);
    }

    #[test]
    fn a_context_is_part_of_what_is_asked_for() {
        assert_eq!(asked_arena(1000, 300).unwrap(), 700);
        assert_eq!(asked_arena(1000, 0).unwrap(), 1000);
        let refused = asked_arena(300, 300).unwrap_err().to_string();
        assert!(refused.contains("300 B"), "{refused}");
        assert_eq!(default_arena(1600, 20, false), 1500);
        assert_eq!(default_arena(1600, 400, false), 1200);
        assert_eq!(default_arena(100, 400, false), 0);
        assert_eq!(default_arena(1600, 400, true), 800);
    }

    #[test]
    fn a_host_without_room_is_named_with_the_way_out() {
        let budget = HostBudget {
            weights: 2 << 30,
            gradients: 2 << 30,
            masters: 4 << 30,
            moments: 8 << 30,
            activations: 1 << 30,
            in_files: 900 << 30,
        };
        assert!(budget.check(Bytes::gib(17)).is_ok());
        let refused = budget.check(Bytes::gib(16)).unwrap_err().to_string();
        assert!(
            refused.contains("17.00 GiB more") && refused.contains("LoRA"),
            "{refused}"
        );
        let long = HostBudget {
            activations: 100 << 30,
            ..budget
        };
        let refused = long.check(Bytes::gib(16)).unwrap_err().to_string();
        assert!(refused.contains("smaller batch"), "{refused}");
        assert_eq!(long.to_string().lines().count(), 7);
    }

    #[test]
    fn the_budget_prints_a_line_for_each_use() {
        let text = WorkerBudget::new(1 << 30, false, None).to_string();
        assert_eq!(text.lines().count(), 7);
        assert!(
            text.contains("kept activations") && text.contains("1.00 GiB"),
            "{text}"
        );
    }
}
