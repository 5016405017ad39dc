//! Values of a launcher's worker: which stay, which leave, and how others come.
//!
//! A value stays on the worker if every reader is there and the budget has room; then it is never
//! copied to the host. A value that a stage passes on unchanged (positions, masks) is uploaded once
//! per call. Kept values are freed when the last reader has them, or after their call has ended:
//! jobs of another call may run between a forward and its backward.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use roundpipe_tensor::Tensor;
use roundpipe_tensor::transfer::{Arrival, HostValue, Port};

use super::call::Call;
use super::launcher::Launcher;
use super::run_layer::Activation;
use super::stage_value::{Leaf, Resident, StageValue};
use super::task::Task;
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
    /// All of it.
    pub limit: u64,
    /// The part that only values for the next stage may use. They come and go with every stage;
    /// without it, values that stay until the backward would push them out for a whole step.
    pub for_next_stage: u64,
    /// The part that only pieces of forwards use, which save a recompute their time.
    pub for_pieces: u64,
    /// Taken by stage values.
    pub used: u64,
    /// Taken by pieces.
    pub used_by_pieces: u64,
}

impl KeepBudget {
    fn has_room(&self, bytes: u64, until: Until) -> bool {
        let reserved = match until {
            Until::NextStage => self.for_pieces,
            Until::Later => self.for_pieces + self.for_next_stage,
        };
        self.used + bytes <= self.limit.saturating_sub(reserved)
    }
}

/// A value that stays, for as long as its worker has room.
struct Kept {
    place: KeptPlace,
    /// Keeps its id from being given to another value.
    _host: HostValue,
    call: Weak<Call>,
    /// Readers to come; `None` if it stays until the call ends.
    readers: Option<usize>,
    /// Whether it is a piece of a forward, which a recompute can make again.
    is_piece: bool,
}

/// Where a kept value is.
#[derive(Clone)]
enum KeptPlace {
    Worker(Tensor),
    /// The worker needed its room.
    Host(HostValue),
}

impl KeptPlace {
    /// Bytes on the worker.
    fn bytes(&self) -> u64 {
        match self {
            Self::Worker(tensor) => tensor.size_bytes() as u64,
            Self::Host(_) => 0,
        }
    }
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
                for_next_stage: budget.for_next_stage(budget.kept),
                for_pieces: 0,
                used: 0,
                used_by_pieces: 0,
            },
            by_id: HashMap::new(),
        }
    }

    /// Bytes that may still stay.
    pub fn room(&self) -> u64 {
        let used = self.budget.used + self.budget.used_by_pieces;
        self.budget.limit.saturating_sub(used)
    }

    /// Pieces that may still stay.
    pub fn room_for_pieces(&self) -> u64 {
        let of_pieces = self.budget.for_pieces;
        of_pieces.saturating_sub(self.budget.used_by_pieces)
    }

    /// Values of a call may take so much, of which `for_pieces` is for pieces of its forwards.
    pub fn set_limit(&mut self, limit: u64, for_next_stage: u64, for_pieces: u64) {
        self.budget.limit = limit;
        self.budget.for_next_stage = for_next_stage;
        self.budget.for_pieces = for_pieces;
    }

    fn insert(
        &mut self,
        host: &HostValue,
        tensor: &Tensor,
        call: &Weak<Call>,
        readers: Option<usize>,
    ) {
        let place = KeptPlace::Worker(tensor.clone());
        self.budget.used += place.bytes();
        let kept = Kept {
            place,
            _host: host.clone(),
            call: call.clone(),
            readers,
            is_piece: false,
        };
        self.by_id.insert(host.id(), kept);
    }

    fn insert_piece(&mut self, host: &HostValue, tensor: &Tensor, call: &Weak<Call>) {
        let place = KeptPlace::Worker(tensor.clone());
        self.budget.used_by_pieces += place.bytes();
        let kept = Kept {
            place,
            _host: host.clone(),
            call: call.clone(),
            readers: Some(1),
            is_piece: true,
        };
        self.by_id.insert(host.id(), kept);
    }

    /// A piece of a forward, if it is still there.
    pub fn take_piece(&mut self, host: &HostValue) -> Option<Tensor> {
        let kept = self.by_id.remove(&host.id())?;
        self.budget.used_by_pieces -= kept.place.bytes();
        match kept.place {
            KeptPlace::Worker(tensor) => Some(tensor),
            KeptPlace::Host(_) => None,
        }
    }

    /// Frees the piece of a forward that keeps working memory from growing, if it is one that does.
    /// Its recompute makes it again.
    pub fn drop_piece_at_frontier(&mut self) -> bool {
        let mut pieces = self.by_id.iter().filter(|(_, kept)| kept.is_piece);
        let at_frontier = pieces.find(|(_, kept)| match &kept.place {
            KeptPlace::Worker(tensor) => tensor.is_at_frontier(),
            KeptPlace::Host(_) => false,
        });
        let Some(id) = at_frontier.map(|(id, _)| *id) else {
            return false;
        };
        let kept = self.by_id.remove(&id);
        self.budget.used_by_pieces -= kept.map_or(0, |kept| kept.place.bytes());
        true
    }

    /// Frees all pieces of forwards.
    pub fn drop_pieces(&mut self) {
        self.by_id.retain(|_, kept| !kept.is_piece);
        self.budget.used_by_pieces = 0;
    }

    /// Whether a value is on the worker.
    fn is_here(&self, host: &HostValue) -> bool {
        let kept = self.by_id.get(&host.id());
        kept.is_some_and(|kept| matches!(kept.place, KeptPlace::Worker(_)))
    }

    /// Where a value is, for one reader. The last reader takes it out.
    fn take(&mut self, host: &HostValue) -> Option<KeptPlace> {
        let kept = self.by_id.get_mut(&host.id())?;
        let place = kept.place.clone();
        if let Some(readers) = &mut kept.readers {
            *readers -= 1;
            if *readers == 0 {
                self.by_id.remove(&host.id());
                self.budget.used -= place.bytes();
            }
        }
        Some(place)
    }

    /// Sends all values to the host. Their readers bring them back. Pieces are dropped.
    ///
    /// # Errors
    /// When the device fails or the host has no memory; the rest stays.
    pub fn spill(&mut self, port: &Port) -> roundpipe_tensor::Result<()> {
        self.drop_pieces();
        for kept in self.by_id.values_mut() {
            if let KeptPlace::Worker(tensor) = &kept.place {
                let sent = port.send("kept value", tensor)?;
                self.budget.used -= kept.place.bytes();
                // The key stays: readers ask by the id of the device-only value that they were
                // given.
                kept.place = KeptPlace::Host(sent);
            }
        }
        Ok(())
    }

    /// Frees all values but those of the calls that `keep` names.
    pub fn retain(&mut self, keep: impl Fn(&Weak<Call>) -> bool) {
        self.by_id.retain(|_, kept| keep(&kept.call));
        // Counted anew: a spilled value takes nothing.
        let of = |is_piece: bool| {
            let kept = self.by_id.values().filter(|kept| kept.is_piece == is_piece);
            kept.map(|kept| kept.place.bytes()).sum()
        };
        (self.budget.used, self.budget.used_by_pieces) = (of(false), of(true));
    }
}

/// When a value is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needed {
    /// By the task under way, whose working memory has room for it.
    Now,
    /// By a later task: it comes early only where tasks do not need the room, and leaves them so
    /// many bytes more.
    Later { spare: u64 },
}

/// A value on its way to the worker.
#[expect(
    clippy::large_enum_variant,
    reason = "few are under way at a time, and nearly all are arrivals"
)]
pub(super) enum Incoming {
    Arriving(Arrival),
    /// There was no room to bring it early.
    OnHost(HostValue),
}

/// A leaf on the worker or on its way there.
pub(super) enum Awaited {
    Here(Activation),
    /// Kept here until its task runs, unless a task before that needs the room.
    Kept(Leaf),
    Incoming(Incoming, Leaf),
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
            let moved = self.moved_aside(tensor);
            if let Some(tensor) = moved.map_err(|error| task.error(None, error))? {
                let value = HostValue::device_only(&tensor);
                self.kept
                    .insert(&value, &tensor, &self.call, Some(readers.len()));
                return Ok(value);
            }
        }
        let sent = self.port.send(what, tensor);
        sent.map_err(|error| task.error(None, error))
    }

    /// Keeps a piece of a forward for its recompute.
    pub(super) fn keep_piece(&mut self, tensor: &Tensor) -> HostValue {
        let value = HostValue::device_only(tensor);
        self.kept.insert_piece(&value, tensor, &self.call);
        value
    }

    /// A copy of a value that stays, away from the working memory: in the middle of it, it would cut
    /// that into pieces. `None` where the copy finds no room beside the working memory.
    pub(super) fn moved_aside(&self, tensor: &Tensor) -> roundpipe_tensor::Result<Option<Tensor>> {
        if self.worker().device().aliases_host() {
            return Ok(Some(tensor.clone()));
        }
        let working = self.next_working();
        self.worker().copied_beside(tensor, tensor.dtype(), working)
    }

    /// What the tasks of the next job work in, once its weights are on their way.
    pub(super) fn next_working(&self) -> u64 {
        // Until then the next job has no weights here, and `place_weights` makes room for all of
        // it.
        let next = self.next.as_ref().filter(|next| next.weights.is_some());
        next.map_or(0, |next| next.needs().task)
    }

    /// Starts bringing a value here.
    pub(super) fn bring(
        &self,
        what: &str,
        value: &HostValue,
        when: Needed,
    ) -> roundpipe_tensor::Result<Incoming> {
        let Needed::Later { spare } = when else {
            return self.port.receive(what, value).map(Incoming::Arriving);
        };
        let working = self.next_working().saturating_add(spare);
        let arrival = self.port.receive_beside(what, value, working)?;
        Ok(arrival.map_or_else(|| Incoming::OnHost(value.clone()), Incoming::Arriving))
    }

    /// Makes the kernels that follow wait for a value.
    pub(super) fn landed(
        &self,
        what: &str,
        incoming: Incoming,
    ) -> roundpipe_tensor::Result<Tensor> {
        match incoming {
            Incoming::Arriving(arrival) => arrival.land(),
            Incoming::OnHost(value) => self.port.receive(what, &value)?.land(),
        }
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
            // A value that is saved and handed on is sent once: the second time finds this copy.
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
                // It stays already, and its new readers will take it too.
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
        // The caller's thread reads it.
        activation.tensor.pin();
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
    pub(super) fn receive(
        &mut self,
        task: &Task<'_>,
        value: StageValue,
        when: Needed,
    ) -> Result<Arriving> {
        value.try_map(|leaf| self.receive_leaf(task, leaf, when))
    }

    fn receive_leaf(&mut self, task: &Task<'_>, leaf: Leaf, when: Needed) -> Result<Awaited> {
        let resident = leaf.resident.as_ref();
        let resident = resident.filter(|resident| resident.worker == self.index);
        if resident.is_none() && when != Needed::Now && self.kept.is_here(&leaf.host) {
            return Ok(Awaited::Kept(leaf));
        }
        let known = match resident {
            Some(resident) => Some(KeptPlace::Worker(resident.tensor.clone())),
            None => self.kept.take(&leaf.host),
        };
        let host = match known {
            Some(KeptPlace::Worker(tensor)) => {
                return Ok(Awaited::Here(Activation {
                    tensor,
                    grad: leaf.grad,
                    host: Some(leaf.host),
                }));
            }
            Some(KeptPlace::Host(spilled)) => spilled,
            None => leaf.host.clone(),
        };
        let incoming = self.bring("activation", &host, when);
        let incoming = incoming.map_err(|error| task.error(None, error))?;
        Ok(Awaited::Incoming(incoming, leaf))
    }

    /// Makes the kernels that follow wait for a value.
    pub(super) fn land(&mut self, task: &Task<'_>, value: Arriving) -> Result<Tree<Activation>> {
        value.try_map(|awaited| self.land_leaf(task, awaited))
    }

    fn land_leaf(&mut self, task: &Task<'_>, awaited: Awaited) -> Result<Activation> {
        match awaited {
            Awaited::Here(activation) => Ok(activation),
            Awaited::Kept(leaf) => {
                let now = self.receive_leaf(task, leaf, Needed::Now)?;
                self.land_leaf(task, now)
            }
            Awaited::Incoming(incoming, leaf) => {
                let tensor = self.landed("activation", incoming);
                let tensor = tensor.map_err(|error| task.error(None, error))?;
                let bytes = leaf.host.size_bytes() as u64;
                // Every microbatch brings the same value: the first that uploads it keeps it for
                // the others.
                if leaf.constant && self.kept.budget.has_room(bytes, Until::Later) {
                    self.kept.insert(&leaf.host, &tensor, &self.call, None);
                }
                Ok(Activation {
                    tensor,
                    grad: leaf.grad,
                    host: Some(leaf.host),
                })
            }
        }
    }

    /// Starts bringing a gradient here.
    pub(super) fn receive_grad(
        &mut self,
        task: &Task<'_>,
        grad: &HostValue,
    ) -> Result<ArrivingGrad> {
        let spilled;
        let host = match self.kept.take(grad) {
            Some(KeptPlace::Worker(tensor)) => return Ok(ArrivingGrad::Here(tensor)),
            Some(KeptPlace::Host(value)) => {
                spilled = value;
                &spilled
            }
            None => grad,
        };
        // Not `bring`: gradients are asked for by the task that needs them, so its working memory
        // has room.
        let arrival = self.port.receive("gradient", host);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(used: u64, for_pieces: u64) -> KeepBudget {
        KeepBudget {
            limit: 100,
            for_next_stage: 25,
            for_pieces,
            used,
            used_by_pieces: 0,
        }
    }

    #[test]
    fn a_value_stays_only_where_all_its_readers_are() {
        let budget = budget(0, 0);
        let decide = |readers: &[usize]| stays(1, readers, 10, Until::NextStage, &budget);
        assert!(decide(&[1]) && decide(&[1, 1]));
        assert!(!decide(&[]), "without readers it is the host's");
        assert!(!decide(&[0]) && !decide(&[1, 0]));
    }

    #[test]
    fn later_values_leave_a_part_of_the_budget_to_the_next_stage() {
        let decide = |used, bytes, until| stays(0, &[0], bytes, until, &budget(used, 0));
        assert!(decide(0, 75, Until::Later));
        assert!(!decide(0, 76, Until::Later));
        assert!(decide(75, 25, Until::NextStage));
        assert!(!decide(75, 26, Until::NextStage));
        assert!(decide(100, 0, Until::NextStage));
    }

    #[test]
    fn stage_values_leave_pieces_their_part() {
        let decide = |used, until| stays(0, &[0], 10, until, &budget(used, 40));
        assert!(decide(50, Until::NextStage) && !decide(51, Until::NextStage));
        assert!(decide(25, Until::Later) && !decide(26, Until::Later));
    }
}
