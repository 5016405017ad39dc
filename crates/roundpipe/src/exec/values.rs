//! Values of a launcher's worker: which stay, which leave, and how others come.
//!
//! A value stays on the worker if every reader is there and the budget has room; then it is never
//! copied to the host. A value that a stage passes on unchanged (positions, masks) is uploaded once
//! per call. Kept values are freed when the last reader has them, or after their call has ended:
//! jobs of another call may run between a forward and its backward.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use roundpipe_tensor::transfer::{Arrival, HostValue};
use roundpipe_tensor::{Tensor, Worker};

use super::call::Call;
use super::launcher::Launcher;
use super::run_layer::Activation;
use super::task::Task;
use super::value::{Leaf, Resident, StageValue};
use crate::budget::WorkerBudget;
use crate::error::Result;
use crate::tree::Tree;

/// How long a value stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// Until the next stage has it.
    NextStage,
    /// Until the backward, or the end of the call.
    Later,
}

/// Whether a value of `bytes` stays on `worker`.
///
/// Without readers it is the host's, so it leaves. With a reader elsewhere it needs a host copy
/// anyway, so it leaves too.
pub(super) fn stays(
    worker: usize,
    readers: &[usize],
    bytes: u64,
    until: Until,
    budget: &KeepBudget,
) -> bool {
    is_local(worker, readers) && budget.has_room(bytes, until)
}

/// Whether a value's every reader is on `worker`.
fn is_local(worker: usize, readers: &[usize]) -> bool {
    !readers.is_empty() && readers.iter().all(|reader| *reader == worker)
}

/// Bytes of values that may stay on a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeepBudget {
    pub limit: u64,
    pub used: u64,
}

impl KeepBudget {
    fn has_room(&self, bytes: u64, until: Until) -> bool {
        let limit = match until {
            Until::NextStage => self.limit,
            Until::Later => self.limit - WorkerBudget::for_next_stage(self.limit),
        };
        self.used + bytes <= limit
    }
}

/// `None` where the worker has no room; other errors stay.
pub(super) fn unless_full(
    made: roundpipe_tensor::Result<Tensor>,
) -> roundpipe_tensor::Result<Option<Tensor>> {
    match made {
        Ok(tensor) => Ok(Some(tensor)),
        Err(roundpipe_tensor::Error::DeviceMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A value that stays on the worker.
struct Kept {
    tensor: Tensor,
    /// Keeps its id from being given to another value.
    _host: HostValue,
    call: Weak<Call>,
    /// Readers to come; `None` if it stays until the call ends.
    readers: Option<usize>,
}

/// The values that stay on a worker.
pub(super) struct KeptValues {
    budget: KeepBudget,
    by_id: HashMap<usize, Kept>,
}

impl KeptValues {
    pub fn new(budget: &WorkerBudget) -> Self {
        Self {
            budget: KeepBudget {
                limit: budget.kept,
                used: 0,
            },
            by_id: HashMap::new(),
        }
    }

    /// Bytes that may still stay.
    pub fn room(&self) -> u64 {
        self.budget.limit.saturating_sub(self.budget.used)
    }

    /// Values of a call may take so much.
    pub fn set_limit(&mut self, limit: u64) {
        self.budget.limit = limit;
    }

    fn insert(
        &mut self,
        host: &HostValue,
        tensor: &Tensor,
        call: &Weak<Call>,
        readers: Option<usize>,
    ) {
        self.budget.used += tensor.size_bytes() as u64;
        let kept = Kept {
            tensor: tensor.clone(),
            _host: host.clone(),
            call: call.clone(),
            readers,
        };
        self.by_id.insert(host.id(), kept);
    }

    /// The tensor of a value, for one reader. The last reader takes it out.
    fn take(&mut self, host: &HostValue) -> Option<Tensor> {
        let kept = self.by_id.get_mut(&host.id())?;
        let tensor = kept.tensor.clone();
        if let Some(readers) = &mut kept.readers {
            *readers -= 1;
            if *readers == 0 {
                self.by_id.remove(&host.id());
                self.budget.used -= tensor.size_bytes() as u64;
            }
        }
        Some(tensor)
    }

    /// Moves values into holes between long-lived blocks, so that these take up less of the worker.
    ///
    /// # Errors
    /// When the device fails.
    pub fn compact(&mut self, worker: &Worker) -> roundpipe_tensor::Result<()> {
        for kept in self.by_id.values_mut() {
            if let Some(tensor) = unless_full(worker.copied_into_hole(&kept.tensor))? {
                kept.tensor = tensor;
            }
        }
        Ok(())
    }

    /// Frees all values but those of the calls that `keep` names.
    pub fn retain(&mut self, keep: impl Fn(&Weak<Call>) -> bool) {
        self.by_id.retain(|_, kept| keep(&kept.call));
        let kept = self.by_id.values();
        self.budget.used = kept.map(|kept| kept.tensor.size_bytes() as u64).sum();
    }
}

/// A leaf on the worker or on its way there.
pub(super) enum Awaited {
    Here(Activation),
    Arriving(Arrival, Leaf),
}

/// A value on its way to the worker.
pub(super) type Arriving = Tree<Awaited>;

/// A gradient on the worker or on its way there.
pub(super) enum ArrivingGrad {
    Here(Tensor),
    Arriving(Arrival),
}

impl Launcher {
    /// Keeps a value on the worker, or copies it to the host.
    pub(super) fn keep_or_send(
        &mut self,
        task: &Task<'_>,
        what: &str,
        tensor: &Tensor,
        readers: &[usize],
        until: Until,
    ) -> Result<HostValue> {
        let bytes = tensor.size_bytes() as u64;
        if stays(self.index, readers, bytes, until, &self.kept.budget) {
            let tensor = self.moved_aside(tensor);
            let tensor = tensor.map_err(|error| task.error(None, error))?;
            let value = HostValue::device_only(&tensor);
            self.kept
                .insert(&value, &tensor, &self.call, Some(readers.len()));
            return Ok(value);
        }
        let sent = self.port.send(what, tensor);
        sent.map_err(|error| task.error(None, error))
    }

    /// A copy of a value that stays, away from the working memory: in the middle of it, it would cut
    /// that into pieces. Where the copy finds no room, the value stays where it is.
    pub(super) fn moved_aside(&self, tensor: &Tensor) -> roundpipe_tensor::Result<Tensor> {
        if self.worker().device().aliases_host() {
            return Ok(tensor.clone());
        }
        let copy = unless_full(self.worker().copied_long(tensor, tensor.dtype()))?;
        Ok(copy.unwrap_or_else(|| tensor.clone()))
    }

    /// Makes a value available to its readers (the host, when there are none): it stays, is already
    /// elsewhere, or is copied to the host.
    pub(super) fn send(
        &mut self,
        task: &Task<'_>,
        value: &mut Tree<Activation>,
        readers: &[usize],
        until: Until,
    ) -> Result<StageValue> {
        let local = is_local(self.index, readers);
        let mut leaves = Vec::new();
        for activation in value.leaves_mut() {
            // A device-only value has no host copy, so other workers and the host cannot read it.
            let known = activation
                .host
                .clone()
                .filter(|host| local || !host.is_device_only());
            let host = match known {
                Some(host) => {
                    self.pass_on(&host, &activation.tensor, readers);
                    host
                }
                None => {
                    self.keep_or_send(task, "activation", &activation.tensor, readers, until)?
                }
            };
            activation.host = Some(host.clone());
            leaves.push(Leaf::new(host, activation.grad));
        }
        Ok(value.with_leaves(leaves)?)
    }

    /// A value that came here and goes on unchanged is not sent again, and stays for a next stage
    /// on this worker.
    fn pass_on(&mut self, host: &HostValue, tensor: &Tensor, readers: &[usize]) {
        if let Some(kept) = self.kept.by_id.get_mut(&host.id()) {
            if let Some(count) = &mut kept.readers {
                *count += readers.len();
            }
            return;
        }
        let bytes = tensor.size_bytes() as u64;
        if host.is_device_only() {
            // It must stay, whatever it takes: it is nowhere else.
            self.kept
                .insert(host, tensor, &self.call, Some(readers.len()));
        } else if readers.contains(&self.index) && self.kept.budget.has_room(bytes, Until::Later) {
            self.kept.insert(host, tensor, &self.call, None);
        }
    }

    /// An output that stays on this worker for later calls.
    pub(super) fn resident_output(&self, activation: &Activation) -> Leaf {
        let resident = Resident {
            worker: self.index,
            tensor: activation.tensor.clone(),
        };
        let host = HostValue::device_only(&activation.tensor);
        Leaf {
            resident: Some(Arc::new(resident)),
            ..Leaf::new(host, activation.grad)
        }
    }

    /// Starts bringing a value here.
    pub(super) fn receive(&mut self, task: &Task<'_>, value: StageValue) -> Result<Arriving> {
        value.try_map(|leaf| {
            let resident = leaf.resident.as_ref();
            let here = match resident.filter(|resident| resident.worker == self.index) {
                Some(resident) => Some(resident.tensor.clone()),
                None => self.kept.take(&leaf.host),
            };
            if let Some(tensor) = here {
                return Ok(Awaited::Here(Activation {
                    tensor,
                    grad: leaf.grad,
                    host: Some(leaf.host),
                }));
            }
            let arrival = self.port.receive("activation", &leaf.host);
            let arrival = arrival.map_err(|error| task.error(None, error))?;
            Ok(Awaited::Arriving(arrival, leaf))
        })
    }

    /// Makes the kernels that follow wait for a value.
    pub(super) fn land(&mut self, task: &Task<'_>, value: Arriving) -> Result<Tree<Activation>> {
        value.try_map(|awaited| match awaited {
            Awaited::Here(activation) => Ok(activation),
            Awaited::Arriving(arrival, leaf) => {
                let tensor = arrival.land().map_err(|error| task.error(None, error))?;
                let bytes = leaf.host.size_bytes() as u64;
                if leaf.constant && self.kept.budget.has_room(bytes, Until::Later) {
                    self.kept.insert(&leaf.host, &tensor, &self.call, None);
                }
                Ok(Activation {
                    tensor,
                    grad: leaf.grad,
                    host: Some(leaf.host),
                })
            }
        })
    }

    /// Starts bringing a gradient here.
    pub(super) fn receive_grad(
        &mut self,
        task: &Task<'_>,
        grad: &HostValue,
    ) -> Result<ArrivingGrad> {
        if let Some(tensor) = self.kept.take(grad) {
            return Ok(ArrivingGrad::Here(tensor));
        }
        let arrival = self.port.receive("gradient", grad);
        let arrival = arrival.map_err(|error| task.error(None, error))?;
        Ok(ArrivingGrad::Arriving(arrival))
    }

    /// Makes the kernels that follow wait for a gradient.
    pub(super) fn land_grad(&self, task: &Task<'_>, grad: ArrivingGrad) -> Result<Tensor> {
        match grad {
            ArrivingGrad::Here(tensor) => Ok(tensor),
            ArrivingGrad::Arriving(arrival) => {
                arrival.land().map_err(|error| task.error(None, error))
            }
        }
    }

    /// Whether `bytes` may come before they are needed.
    pub(super) fn has_headroom(&self, bytes: usize) -> bool {
        let usage = self.worker().pool().usage();
        self.budget
            .allows_prefetch(bytes as u64, usage.used.0, usage.peak_used.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stays_only_where_all_its_readers_are() {
        let budget = KeepBudget {
            limit: 100,
            used: 0,
        };
        let decide = |readers: &[usize]| stays(1, readers, 10, Until::NextStage, &budget);
        assert!(decide(&[1]) && decide(&[1, 1]));
        assert!(!decide(&[]), "without readers it is the host's");
        assert!(!decide(&[0]) && !decide(&[1, 0]));
    }

    #[test]
    fn later_values_leave_a_part_of_the_budget_to_the_next_stage() {
        let decide = |used, bytes, until| {
            let budget = KeepBudget { limit: 100, used };
            stays(0, &[0], bytes, until, &budget)
        };
        assert!(decide(0, 75, Until::Later));
        assert!(!decide(0, 76, Until::Later));
        assert!(decide(75, 25, Until::NextStage));
        assert!(!decide(75, 26, Until::NextStage));
        assert!(decide(100, 0, Until::NextStage));
    }
}
