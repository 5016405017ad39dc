//! A worker's jobs, in the order of submission.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::call::Call;
use super::early_rows::RowSlots;
use super::weights::WeightSource;
use crate::budget::StageNeeds;
use crate::config::Grain;
use crate::plan::Pass;
use crate::sync::{lock, unpoisoned};
use crate::version::ReadTicket;

/// One stage of a call, and the right to read the weights of its layers.
pub(crate) struct StageJob {
    pub call: Arc<Call>,
    pub stage: usize,
    /// By layer of the stage.
    pub tickets: HashMap<usize, Vec<ReadTicket>>,
    /// Where each layer's weights come from, once they are requested.
    pub weights: Option<HashMap<usize, WeightSource>>,
    /// Where rows of its table go that come apart, once they are requested.
    pub rows: Option<RowSlots>,
}

impl StageJob {
    /// What it needs of its worker.
    pub fn needs(&self) -> StageNeeds {
        self.call.spec.needs.stages[self.stage]
    }

    /// Whether it holds the weights of a layer itself.
    pub fn has_weights(&self, layer: usize) -> bool {
        let source = self.weights.as_ref().and_then(|all| all.get(&layer));
        matches!(source, Some(WeightSource::Resident(_)))
    }

    /// The layers of a stage in the order in which their weights are needed.
    pub fn layers_in_order(call: &Call, stage: usize) -> Vec<usize> {
        let stage = &call.spec.stages[stage];
        let mut layers: Vec<usize> = stage.layers.clone().collect();
        if stage.pass == Pass::Backward && call.spec.grain == Grain::Layer {
            // Recomputing layer by layer begins with the last.
            layers.reverse();
        }
        layers
    }

    pub fn new(call: Arc<Call>, stage: usize, tickets: HashMap<usize, Vec<ReadTicket>>) -> Self {
        Self {
            call,
            stage,
            tickets,
            weights: None,
            rows: None,
        }
    }
}

/// Jobs of one worker.
#[derive(Default)]
pub(crate) struct JobQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<StageJob>,
    closed: bool,
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    pub fn push_all(&self, jobs: Vec<StageJob>) {
        self.lock().jobs.extend(jobs);
        self.changed.notify_all();
    }

    /// No job will come any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The next job, if there is one.
    pub fn try_pop(&self) -> Option<StageJob> {
        self.lock().jobs.pop_front()
    }

    /// The calls and stages of the next jobs, at most so many.
    pub fn upcoming(&self, most: usize) -> Vec<(Arc<Call>, usize)> {
        let state = self.lock();
        let jobs = state.jobs.iter().take(most);
        jobs.map(|job| (job.call.clone(), job.stage)).collect()
    }

    /// Waits for the next job; `None` when the queue is closed and empty.
    pub fn pop(&self) -> Option<StageJob> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            // Behind the jobs: also those of a closed queue must run, since each ends a part of its
            // call.
            if state.closed {
                return None;
            }
            state = unpoisoned(self.changed.wait(state));
        }
    }
}
