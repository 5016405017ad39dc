//! A worker's door for values: sending, receiving, and the outbox of what was sent.
//!
//! The path of a value out: tensor -> download -> [`HostValue`]; in: host value -> upload ->
//! [`Arrival`] -> tensor. Gradients leave by [`Port::unload`], into memory of the caller's.
//!
//! A port never decides what to move or when. It refuses tensors of other workers, and values that
//! have no bytes in host memory.
//!
//! # Invariants
//! - The outbox holds the source of every download until the compute lane waits for it (rule 2).
//! - An [`Arrival`] gives its tensor only behind the upload (rule 4).

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};

use super::copy_log::CopyLog;
use super::host_pool::HostPool;
use super::host_value::{Backing, HostValue};
use super::{abandon, copy_in, drain_lane};
use crate::device::{Copy, Direction, Event, Flight, Lane, LaneKind};
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostMut};
use crate::pool::Block;
use crate::sync::lock;
use crate::tensor::Tensor;
use crate::worker::Worker;

/// A tensor on its way to a worker.
#[derive(Debug)]
pub struct Arrival {
    worker: Worker,
    tensor: Option<Tensor>,
    event: Option<Event>,
}

impl Arrival {
    /// Puts the compute lane behind the upload and gives the tensor.
    ///
    /// # Errors
    /// When the lane refuses.
    pub fn land(mut self) -> Result<Tensor> {
        if let Some(event) = &self.event {
            self.worker.device().lane(LaneKind::Compute).wait(event)?;
        }
        self.event = None;
        Ok(self
            .tensor
            .take()
            .expect("an arrival holds its tensor until it lands"))
    }
}
impl Drop for Arrival {
    fn drop(&mut self) {
        abandon(&self.worker, self.event.take());
    }
}

/// Sources of downloads, let go two tasks later.
#[derive(Default)]
struct Outbox {
    /// The number of the task under way.
    task: u64,
    /// The task that sent it, the source, and the point behind its download; the oldest first.
    sent: VecDeque<(u64, Tensor, Event)>,
}

/// A worker's door for activations.
pub struct Port {
    worker: Worker,
    host: Arc<HostPool>,
    outbox: Mutex<Outbox>,
    log: CopyLog,
}

impl Port {
    /// Values sent here use memory of `host`.
    pub fn new(worker: Worker, host: Arc<HostPool>) -> Self {
        Self {
            worker,
            host,
            outbox: Mutex::default(),
            log: CopyLog::default(),
        }
    }

    /// The worker behind the door.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Whose memory it sends values to.
    pub fn host_pool(&self) -> &Arc<HostPool> {
        &self.host
    }

    /// What passes through.
    pub fn log(&self) -> &CopyLog {
        &self.log
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        self.worker.device().lane(kind)
    }

    /// Begins a new task: what was sent two tasks ago is let go, behind its download (rule 2).
    ///
    /// # Errors
    /// When the compute lane refuses to wait; nothing is let go then.
    pub fn begin_task(&self) -> Result<()> {
        let mut outbox = lock(&self.outbox);
        outbox.task += 1;
        let due = outbox.task.saturating_sub(2);
        while let Some((task, _, event)) = outbox.sent.front()
            && *task <= due
        {
            self.lane(LaneKind::Compute).wait(event)?;
            outbox.sent.pop_front();
        }
        Ok(())
    }

    /// Lets the oldest of what was sent go, behind its download (rule 2), until at most `most`
    /// bytes wait for theirs: a task of many layers would hold what all of them sent.
    ///
    /// # Errors
    /// As [`Port::begin_task`].
    pub fn make_room(&self, most: u64) -> Result<()> {
        let mut outbox = lock(&self.outbox);
        let mut bytes: u64 = outbox
            .sent
            .iter()
            .map(|(_, tensor, _)| tensor.size_bytes() as u64)
            .sum();
        while bytes > most
            && let Some((_, tensor, event)) = outbox.sent.front()
        {
            self.lane(LaneKind::Compute).wait(event)?;
            bytes -= tensor.size_bytes() as u64;
            outbox.sent.pop_front();
        }
        Ok(())
    }

    /// The host waits for all lanes, whether they failed or not; what was sent is let go. This is
    /// for recovering from a failure; [`Port::forget`] comes when every call has received it.
    ///
    /// # Errors
    /// The first thing that went wrong in a lane and was not forgotten yet.
    pub fn drain(&self) -> Result<()> {
        let results =
            LaneKind::ALL.map(|kind| self.lane(kind).record().and_then(|event| event.fence()));
        let sent = std::mem::take(&mut lock(&self.outbox).sent);
        sent.iter()
            .for_each(|(_, _, event)| event.state().wait_quietly());
        results.into_iter().collect()
    }

    /// Forgets what went wrong in the lanes.
    pub fn forget(&self) {
        for kind in LaneKind::ALL {
            let _ = self.lane(kind).fence();
        }
    }

    /// Starts a download in the activation lane.
    ///
    /// # Errors
    /// When memory runs out or the device refuses.
    pub fn send(&self, what: &str, tensor: &Tensor) -> Result<HostValue> {
        let dense = self.worker.contiguous(&tensor.detach())?;
        self.worker.check_home("send", &dense)?;
        let (dtype, shape) = (dense.dtype(), *dense.shape());
        // Until the copy is queued; from then on a move waits for it.
        let _pin = dense.pinned();
        if !self.worker.device().moves_bytes() {
            let written = self.lane(LaneKind::ActivationDownload).record()?;
            self.hold(dense, written);
            return Ok(HostValue::new(dtype, shape, Backing::Counted));
        }
        let bytes = shape.numel() * dtype.size();
        let (buf, free) = self.host.take(bytes)?;
        let sent = self.copy_out(what, &dense, &buf, bytes, &free);
        let written = match sent {
            Ok(written) => written,
            Err(error) => {
                // A refused lane has run dry, so the memory can serve again.
                self.host.give_back(buf, free, Vec::new());
                return Err(error);
            }
        };
        // The cpu has copied when it returns.
        if !self.worker.device().aliases_host() {
            self.hold(dense, written.clone());
        }
        Ok(HostValue::new(
            dtype,
            shape,
            Backing::Pooled {
                buf,
                written: Some(written),
                pool: self.host.clone(),
            },
        ))
    }

    /// Keeps what is on its way out.
    fn hold(&self, dense: Tensor, written: Event) {
        dense.read_until(&written);
        let mut outbox = lock(&self.outbox);
        let task = outbox.task;
        outbox.sent.push_back((task, dense, written));
    }

    fn copy_out(
        &self,
        what: &str,
        dense: &Tensor,
        buf: &HostBuf,
        bytes: usize,
        free: &[Event],
    ) -> Result<Event> {
        let lane = self.lane(LaneKind::ActivationDownload);
        lane.wait(&self.lane(LaneKind::Compute).record()?)?;
        free.iter().try_for_each(|event| lane.wait(event))?;
        let from = self.log.start(lane)?;
        if bytes > 0 {
            let copy = Copy {
                what: what.to_owned(),
                direction: Direction::Download,
                src: dense.view().ptr,
                dst: buf.addr(),
                bytes: bytes as u64,
            };
            // SAFETY: the lane waits for the kernel that wrote `dense` and for every copy that used
            // `buf`, which the pool lent to this call alone; the outbox keeps `dense`, and the host value (or its
            // pool) `buf`, behind the event.
            unsafe { lane.copy(&copy)? };
        }
        let written = lane.record()?;
        self.log.end(lane, from, what, bytes as u64)?;
        Ok(written)
    }

    /// Starts an upload in the activation lane. On a worker that reads host memory in place,
    /// nothing is copied.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a host value without bytes; when memory runs out or the device refuses.
    pub fn receive(&self, what: &str, value: &HostValue) -> Result<Arrival> {
        self.receive_at(what, value, None)
    }

    /// As [`Port::receive`], for a value that is not needed yet: the working memory of the task
    /// under way stays whole, and so does that of a task which needs `working` bytes. `None` when
    /// there is no room.
    ///
    /// # Errors
    /// As [`Port::receive`].
    pub fn receive_beside(
        &self,
        what: &str,
        value: &HostValue,
        working: u64,
    ) -> Result<Option<Arrival>> {
        match self.receive_at(what, value, Some(working)) {
            Ok(arrival) => Ok(Some(arrival)),
            Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn receive_at(&self, what: &str, value: &HostValue, beside: Option<u64>) -> Result<Arrival> {
        let device = self.worker.device();
        if !device.moves_bytes() {
            let (block, _) = self.lend(value.size_bytes() as u64, beside)?;
            let tensor = Tensor::from_block(block, value.dtype(), *value.shape());
            return Ok(self.arrival(tensor, None));
        }
        let Some((buf, written)) = value.source() else {
            let what = format!("{what}: {value:?} was kept elsewhere");
            return Err(Error::invalid("receive", what));
        };
        if device.aliases_host() {
            if let Some(written) = written {
                written.fence()?;
            }
            let host = buf.read(0..value.size_bytes())?;
            let pool = self.worker.pool().clone();
            let tensor = Tensor::from_host(host, pool, value.dtype(), *value.shape())?;
            return Ok(self.arrival(tensor, None));
        }
        self.upload(what, value, (buf, written), beside)
    }

    /// Memory for an arrival; with `beside`, only where a task of that size still fits.
    fn lend(&self, bytes: u64, beside: Option<u64>) -> Result<(Block, Option<Event>)> {
        match beside {
            Some(working) => self.worker.pool().lend_beside("receive", bytes, working),
            None => self.worker.pool().lend("receive", bytes),
        }
    }

    /// The copy of [`Port::receive`]: `buf` holds the bytes of `value` once `written` has passed.
    fn upload(
        &self,
        what: &str,
        value: &HostValue,
        (buf, written): (&HostBuf, Option<&Event>),
        beside: Option<u64>,
    ) -> Result<Arrival> {
        let bytes = value.size_bytes();
        let claim = buf.read(0..bytes)?;
        let (block, free) = self.lend(bytes as u64, beside)?;
        let lane = self.lane(LaneKind::ActivationUpload);
        // Rule 9. The bytes are there when pageable memory was written by a staged copy, so this
        // rarely waits.
        let written = match written {
            Some(written) if !buf.is_pinned() => written.fence().map(|()| None)?,
            pinned => pinned.filter(|event| !event.is_past()),
        };
        for event in free.iter().chain(written) {
            lane.wait(event)?;
        }
        let from = self.log.start(lane)?;
        let event = copy_in(lane, what, claim.addr(), block.addr(), bytes as u64)?;
        self.log.end(lane, from, what, bytes as u64)?;
        value.add_reader(event.clone(), claim);
        let tensor = Tensor::from_block(block, value.dtype(), *value.shape());
        Ok(self.arrival(tensor, Some(event)))
    }

    fn arrival(&self, tensor: Tensor, event: Option<Event>) -> Arrival {
        Arrival {
            worker: self.worker.clone(),
            tensor: Some(tensor),
            event,
        }
    }

    /// Starts a download into memory of the caller's, in the gradient lane, behind `after`: one range
    /// behind the other, each in one copy, with a flight of its own that keeps both ends. A tensor
    /// that may be moved was pinned before `after`.
    ///
    /// # Errors
    /// When sizes differ or the device refuses.
    pub fn unload(
        &self,
        what: &str,
        tensor: &Tensor,
        after: &Event,
        mut ranges: Vec<HostMut>,
    ) -> Result<Vec<Flight<(Tensor, HostMut)>>> {
        self.worker.check_home("unload", tensor)?;
        let bytes = tensor.size_bytes() as u64;
        let sizes = ranges.iter_mut().map(|range| range.bytes().len() as u64);
        let host_bytes: u64 = sizes.sum();
        if host_bytes != bytes || !tensor.is_contiguous() {
            let what = format!("{what}: {tensor:?} into {host_bytes} bytes of host memory");
            return Err(Error::invalid("unload", what));
        }
        let lane = self.lane(LaneKind::GradDownload);
        lane.wait(after)?;
        let mut src = tensor.view().ptr;
        let from = self.log.start(lane)?;
        let mut flights = Vec::with_capacity(ranges.len());
        for mut range in ranges {
            let copy = Copy {
                what: what.to_owned(),
                direction: Direction::Download,
                src,
                dst: range.addr(),
                bytes: range.bytes().len() as u64,
            };
            src += copy.bytes;
            if copy.bytes > 0 {
                // SAFETY: the flight below owns the tensor and the host range until the lane has
                // passed (and a failed copy or record leaves the lane dry); the lane waits for the
                // kernel that wrote the tensor (`after`).
                let queued = unsafe { lane.copy(&copy) };
                queued.inspect_err(|_| drain_lane(lane))?;
            }
            flights.push(Flight::new(lane.record()?, (tensor.clone(), range)));
        }
        self.log.end(lane, from, what, bytes)?;
        Ok(flights)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut lock(&self.outbox).sent);
        sent.iter()
            .for_each(|(_, _, event)| event.state().wait_quietly());
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.worker.device().id())
    }
}
