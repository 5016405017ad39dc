//! How a worker's memory is divided: the only place that knows shares.
//!
//! A [`WorkerBudget`] is a pure value made from the size of a worker's arena. The planner takes from
//! it how large a stage may be, the launcher what may stay on the worker, what may come early and
//! how much may wait to be copied out. It prints itself line by line.
//!
//! The lines are limits, not reservations, and all but `weights` and `task` are soft: a value that
//! does not fit its line goes to host memory, a prefetch that does not fit comes later.

use std::fmt;

use roundpipe_tensor::Bytes;

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
    /// The part of `kept` that only values for the next stage may use. They come and go with every
    /// stage; without it, values that stay until the backward would push them out for a whole step.
    pub kept_for_next_stage: u64,
    /// Values on their way to host memory.
    pub outbox: u64,
    /// Up to this much may be in use when something comes before it is needed.
    pub prefetch_below: u64,
}

/// What a call needs of every worker, and what it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallNeeds {
    /// What its tasks work in at most, beside weights.
    pub task_bytes: u64,
    /// Activations that may stay on a worker beside its largest stage.
    pub kept_bytes: u64,
}

impl WorkerBudget {
    /// The budget of an arena. A worker that reads host memory in place needs no room for weights.
    /// `kept` is what the user chose for activations that stay, if anything.
    pub fn new(arena: u64, reads_host: bool, kept: Option<u64>) -> Self {
        let share = |tenths: u64| arena / 10 * tenths + arena % 10 * tenths / 10;
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
            kept_for_next_stage: Self::for_next_stage(kept),
            outbox: arena / 16,
            prefetch_below: arena / 2,
        }
    }

    /// The part of `kept` bytes that only values for the next stage may use.
    pub fn for_next_stage(kept: u64) -> u64 {
        kept / 4
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

    /// The needs of a call whose tasks work in at most `task_bytes`, and whose stages need at most
    /// `stage_bytes` together with their weights; `None` if it does not fit.
    pub fn needs(&self, task_bytes: u64, stage_bytes: u64) -> Option<CallNeeds> {
        let rest = self.arena.checked_sub(stage_bytes)?;
        Some(CallNeeds {
            task_bytes,
            kept_bytes: rest.saturating_sub(self.outbox).min(self.kept),
        })
    }

    /// Whether `bytes` may come before they are needed, with `used` bytes in use now and `peak` at
    /// most so far: half of the worker stays free for the task under way, and what was ever in use
    /// at once fits beside them.
    pub fn allows_prefetch(&self, bytes: u64, used: u64, peak: u64) -> bool {
        used.saturating_add(bytes) <= self.prefetch_below
            && peak.saturating_add(bytes) <= self.arena
    }
}

impl fmt::Display for WorkerBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [
            ("weights (two stages)", self.weights),
            ("one task", self.task),
            ("one task, at most", self.largest_task),
            ("kept activations", self.kept),
            ("  of these for the next stage", self.kept_for_next_stage),
            ("outgoing copies", self.outbox),
            ("prefetch below", self.prefetch_below),
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
                assert!(budget.kept_for_next_stage <= budget.kept);
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
        let kept = |stage| budget.needs(1, stage).map(|needs| needs.kept_bytes);
        assert_eq!(kept(100), Some(160));
        assert_eq!(kept(1400), Some(100));
        assert_eq!(kept(1550), Some(0));
        assert_eq!(kept(1601), None, "it does not fit");
    }

    #[test]
    fn a_prefetch_leaves_room_for_the_task_under_way() {
        let budget = WorkerBudget::new(1000, false, None);
        assert!(budget.allows_prefetch(100, 400, 900));
        assert!(
            !budget.allows_prefetch(101, 400, 500),
            "half must stay free"
        );
        assert!(!budget.allows_prefetch(100, 0, 901), "the peak comes again");
        assert!(!budget.allows_prefetch(u64::MAX, 1, 1));
    }

    #[test]
    fn the_budget_prints_a_line_for_each_use() {
        let text = WorkerBudget::new(1 << 30, false, None).to_string();
        assert_eq!(text.lines().count(), 8);
        assert!(
            text.contains("kept activations") && text.contains("1.00 GiB"),
            "{text}"
        );
    }
}
