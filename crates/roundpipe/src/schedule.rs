//! Which worker runs which stage: the schedule, as a value.
//!
//! Stages go round the workers. Stage `i` of a call runs on worker `(first + i) mod N`, and the next
//! call begins at the worker behind the last stage, so that no worker waits for a "first" one. The
//! executor and the [timeline](crate::timeline) both take their workers from [`RoundRobin::take`],
//! so a simulated step and a real one place their stages alike.
//!
//! This module knows no engine and no device, only how many workers there are.

use crate::plan::Pass;

/// Workers in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundRobin {
    workers: usize,
    next: usize,
    shares_cores: bool,
}

impl RoundRobin {
    /// Begins with worker 0 of `workers`, at least one.
    pub fn new(workers: usize) -> Self {
        Self {
            workers: workers.max(1),
            next: 0,
            shares_cores: false,
        }
    }

    /// Whether the workers compute on the same cores. A call of one fused stage then stays on the
    /// worker of the call before: moving on would gain nothing and leave a warm cache behind.
    #[must_use]
    pub fn shares_cores(mut self, shares: bool) -> Self {
        self.shares_cores = shares;
        self
    }

    /// The workers of a call's stages, given by what they do; the next call begins behind them.
    pub fn take(&mut self, stages: &[Pass]) -> Vec<usize> {
        let first = self.next;
        // Chained engines wait for each other's microbatches, so a stage that could be waited for
        // must not stay; only the last model of a chain has a fused stage.
        let stays = self.shares_cores && stages == [Pass::Fused];
        if !stays {
            self.next = (first + stages.len()) % self.workers;
        }
        (0..stages.len())
            .map(|stage| (first + stage) % self.workers)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_call_begins_behind_the_last_stage() {
        let mut schedule = RoundRobin::new(3);
        let forward = [Pass::Forward; 5];
        assert_eq!(schedule.take(&forward), [0, 1, 2, 0, 1]);
        assert_eq!(schedule.take(&forward[..2]), [2, 0]);
        assert_eq!(schedule.take(&[Pass::Fused]), [1]);
        assert_eq!(schedule.take(&[Pass::Fused]), [2]);
        assert_eq!(schedule.take(&[]), [0_usize; 0]);
    }

    #[test]
    fn one_fused_stage_stays_where_workers_share_cores() {
        let mut schedule = RoundRobin::new(2).shares_cores(true);
        assert_eq!(schedule.take(&[Pass::Forward]), [0]);
        assert_eq!(schedule.take(&[Pass::Fused]), [1]);
        assert_eq!(schedule.take(&[Pass::Fused]), [1]);
        assert_eq!(schedule.take(&[Pass::Fused, Pass::Backward]), [1, 0]);
    }
}
