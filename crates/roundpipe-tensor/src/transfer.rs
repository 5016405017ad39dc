//! Moving tensors between host memory and workers without host waits.
//!
//! A [`HostValue`] is a dense tensor in host memory that a lane may still be writing. A [`Port`] is a
//! worker's door: [`Port::send`] turns a tensor into a host value, [`Port::receive`] a host value into a
//! tensor on its way, on any worker of the same backend. A [`Slot`] is device memory for the
//! weights of one layer, filled in chunks. Nothing here waits on the host unless it says so; order
//! is kept by events, and every end of a copy stays alive until the copy has landed.
//!
//! # The event protocol
//! 1. A download waits for a compute event recorded behind the kernel that made its source.
//! 2. The source of a download goes back to the arena only after the compute lane waits for the
//!    download ([`Port::turn`] does so two visits later, [`Port::make_room`] earlier), or after the
//!    host saw it land.
//! 3. An upload waits for the event behind the last use of the block it fills ([`Pool::lend`]).
//! 4. The compute lane waits for an upload before the first kernel that reads it, and before the
//!    block of an upload that nobody used is given back.
//! 5. An upload of a host value waits for the download that wrote it, on whichever worker that was.
//! 6. A host value's host memory is written again only by a download that waits for all uploads that
//!    read it ([`HostPool`]); memory that others hold is let go only after the host saw these
//!    uploads land. Until then each upload has a claim on what it reads, so that whoever was given
//!    the bytes ([`HostValue::fence`]) cannot write them.
//! 7. The host reads a host value only after it saw its download land.
//! 8. The chunks of a slot follow each other with at most four under way, so that an activation
//!    never queues behind more than four chunks of weights; the host memory they read is held until
//!    the last has landed.
//! 9. An upload of pageable memory is queued after the host saw the download that wrote it land: a
//!    driver may read the source at once, whatever the lane waits for ([`pins`](crate::pins)).
//!
//! [`Pool::lend`]: crate::pool::Pool::lend

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bytes::Bytes;
use crate::device::{Copy, Device, DeviceKind, Direction, Event, Flight, Lane, LaneKind, Stamp};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostMut, HostRef, Pin};
use crate::pool::Block;
use crate::shape::Shape;
use crate::tensor::{Storage, Tensor};
use crate::worker::Worker;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One copy as it happened.
#[derive(Debug, Clone)]
pub struct CopyRecord {
    /// In which lane.
    pub lane: LaneKind,
    /// What was copied.
    pub what: String,
    /// How much.
    pub bytes: u64,
    /// When the lane began, after what it waited for.
    pub from: Stamp,
    /// When it was done.
    pub to: Stamp,
}

/// Notes copies while it is on; off, it costs a look at a flag.
#[derive(Debug, Default)]
pub struct CopyLog {
    on: AtomicBool,
    moves: Mutex<Vec<CopyRecord>>,
}

impl CopyLog {
    /// Switches it on or off.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// What was noted since the last call.
    pub fn take(&self) -> Vec<CopyRecord> {
        std::mem::take(&mut lock(&self.moves))
    }

    fn start(&self, lane: &dyn Lane) -> Option<Stamp> {
        // A device that refuses a stamp has worse to tell soon.
        self.on
            .load(Ordering::Relaxed)
            .then(|| lane.stamp().ok())
            .flatten()
    }

    fn end(&self, lane: &dyn Lane, from: Option<Stamp>, what: &str, bytes: u64) {
        if let Some(from) = from
            && let Ok(to) = lane.stamp()
        {
            lock(&self.moves).push(CopyRecord {
                lane: lane.kind(),
                what: what.to_owned(),
                bytes,
                from,
                to,
            });
        }
    }
}

/// Host memory for host values, used again and again.
pub struct HostPool {
    device: Arc<dyn Device>,
    pin: Pin,
    state: Mutex<HostState>,
}

#[derive(Default)]
struct HostState {
    spare: Vec<(HostBuf, Vec<Event>)>,
    allocated: usize,
    lent: usize,
    peak: usize,
}

/// What a [`HostPool`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostUse {
    /// Mapped from the system now.
    pub allocated: Bytes,
    /// Lent to host values now.
    pub lent: Bytes,
    /// Most ever lent at once.
    pub peak: Bytes,
}

impl HostPool {
    /// No memory yet; `device` says what it copies from fastest.
    pub fn new(device: Arc<dyn Device>, pin: Pin) -> Arc<Self> {
        Arc::new(Self {
            device,
            pin,
            state: Mutex::default(),
        })
    }

    /// What is and was in use.
    pub fn usage(&self) -> HostUse {
        let state = lock(&self.state);
        HostUse {
            allocated: Bytes(state.allocated as u64),
            lent: Bytes(state.lent as u64),
            peak: Bytes(state.peak as u64),
        }
    }

    /// Lets go of all memory that no host value holds; the host waits for copies that still read it.
    pub fn trim(&self) {
        let spare = {
            let mut state = lock(&self.state);
            let spare = std::mem::take(&mut state.spare);
            state.allocated -= spare.iter().map(|(buf, _)| buf.len()).sum::<usize>();
            spare
        };
        spare
            .iter()
            .flat_map(|(_, events)| events)
            .for_each(|event| event.state().settle());
    }

    /// A buffer of at least `bytes`, and what a lane must wait for before it writes there.
    fn take(&self, bytes: usize) -> Result<(HostBuf, Vec<Event>)> {
        let fits = |buf: &HostBuf| buf.len() >= bytes && buf.len() <= bytes + bytes / 4 + 4096;
        let mut state = lock(&self.state);
        let best = state
            .spare
            .iter()
            .enumerate()
            .filter(|(_, (buf, _))| fits(buf));
        let best = best.min_by_key(|(_, (buf, _))| buf.len()).map(|(at, _)| at);
        let found = match best {
            Some(at) => state.spare.remove(at),
            None => {
                drop(state);
                let fresh = self
                    .device
                    .host_buffer("activation", bytes.max(1), self.pin)?;
                state = lock(&self.state);
                state.allocated += fresh.len();
                (fresh, Vec::new())
            }
        };
        state.lent += found.0.len();
        state.peak = state.peak.max(state.lent);
        Ok(found)
    }

    /// Takes a buffer back that lanes use until `events` have passed, some of them under `claims`.
    fn give_back(&self, buf: HostBuf, mut events: Vec<Event>, claims: Vec<HostRef>) {
        // What has passed need not be waited for; an error stays for the fence of its lane.
        events.retain(|event| !event.is_past());
        if buf.is_sole_but(claims.len()) {
            // Nobody else can come to hold it any more, so what the claims forbade cannot happen.
            drop(claims);
            let mut state = lock(&self.state);
            state.lent -= buf.len();
            state.spare.push((buf, events));
            return;
        }
        // Somebody still holds it: it is theirs now, and may be written when nobody reads it any
        // more.
        let mut state = lock(&self.state);
        state.lent -= buf.len();
        state.allocated -= buf.len();
        drop(state);
        events.iter().for_each(|event| event.state().settle());
        drop(claims);
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        self.trim();
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPool({:?})", self.usage())
    }
}

/// Where a host value's bytes are.
enum Place {
    /// Nowhere: it was kept on its worker.
    Hollow,
    /// Nowhere: the worker only counts.
    Counted,
    /// In memory of a pool, written by a lane.
    Pooled {
        buf: HostBuf,
        written: Event,
        pool: Arc<HostPool>,
    },
    /// In a user's memory.
    Given {
        buf: HostBuf,
        claim: Option<HostRef>,
    },
}

struct Contents {
    dtype: DType,
    shape: Shape,
    place: Place,
    /// Uploads that read it.
    readers: Mutex<Vec<Reader>>,
}

/// An upload under way, and its claim on what it reads.
struct Reader {
    landed: Event,
    claim: HostRef,
}

/// A dense tensor in host memory that a lane may still be writing; cloning shares it.
#[derive(Clone)]
pub struct HostValue(Arc<Contents>);

impl HostValue {
    /// A user's values; `buf` is exactly as large as type and shape say, and is not written while
    /// this lives.
    ///
    /// # Errors
    /// When size or alignment are wrong or somebody is writing the buffer.
    pub fn given(buf: HostBuf, dtype: DType, shape: Shape) -> Result<Self> {
        buf.place_all("host value", dtype, &shape)?;
        let claim = Some(buf.read_all()?);
        Ok(Self::new(dtype, shape, Place::Given { buf, claim }))
    }

    /// A host value without bytes, for a value that stays on its worker.
    pub fn device_only(tensor: &Tensor) -> Self {
        Self::new(tensor.dtype(), *tensor.shape(), Place::Hollow)
    }

    fn new(dtype: DType, shape: Shape, place: Place) -> Self {
        Self(Arc::new(Contents {
            dtype,
            shape,
            place,
            readers: Mutex::default(),
        }))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Size of the values.
    pub fn size_bytes(&self) -> usize {
        self.0.shape.numel() * self.0.dtype.size()
    }

    /// Whether there are no bytes in host memory.
    pub fn is_device_only(&self) -> bool {
        matches!(self.0.place, Place::Hollow)
    }

    /// Tells host values apart while they live; clones agree.
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The point behind the copy that fills it; `None` when it is filled.
    pub fn written(&self) -> Option<&Event> {
        match &self.0.place {
            Place::Pooled { written, .. } => Some(written),
            _ => None,
        }
    }

    /// Waits until it is filled and gives the bytes. They stay valid while the buffer is held, and
    /// cannot be written while an upload still reads them.
    ///
    /// # Errors
    /// What went wrong in the lane; [`Error::Invalid`] for a host value without bytes.
    pub fn fence(&self) -> Result<HostBuf> {
        match &self.0.place {
            Place::Hollow => Err(Error::invalid(
                "host value",
                "the value was kept on its worker",
            )),
            Place::Counted => HostBuf::zeroed("what a meta worker gives", self.size_bytes()),
            Place::Pooled { buf, written, .. } => {
                written.fence()?;
                self.0.forget_landed();
                buf.slice(0..self.size_bytes())
            }
            Place::Given { buf, .. } => Ok(buf.clone()),
        }
    }
}

impl Contents {
    /// Lets go of the claims of uploads that have landed. One that failed keeps its claim until the
    /// host value goes.
    fn forget_landed(&self) {
        lock(&self.readers).retain(|reader| !matches!(reader.landed.passed(), Ok(true)));
    }
}

impl Drop for Contents {
    fn drop(&mut self) {
        let readers = std::mem::take(
            self.readers
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let (mut events, claims): (Vec<_>, Vec<_>) =
            readers.into_iter().map(|r| (r.landed, r.claim)).unzip();
        match std::mem::replace(&mut self.place, Place::Hollow) {
            Place::Hollow | Place::Counted => {}
            Place::Pooled { buf, written, pool } => {
                events.push(written);
                pool.give_back(buf, events, claims);
            }
            Place::Given { claim, .. } => {
                events.iter().for_each(|event| event.state().settle());
                drop((claims, claim));
            }
        }
    }
}

impl fmt::Debug for HostValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostValue({} {})", self.dtype(), self.shape())
    }
}

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

/// The host waits for a lane; what went wrong stays to be told. (A lane that refuses an event has
/// run dry.)
fn drain_lane(lane: &dyn Lane) {
    if let Ok(event) = lane.record() {
        event.state().settle();
    }
}

/// Rule 4 for what nobody used.
fn abandon(worker: &Worker, event: Option<Event>) {
    if let Some(event) = event
        && worker
            .device()
            .lane(LaneKind::Compute)
            .wait(&event)
            .is_err()
    {
        event.state().settle();
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        abandon(&self.worker, self.event.take());
    }
}

/// Sources of downloads that are let go two visits later.
#[derive(Default)]
struct Outbox {
    visit: u64,
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

    /// What passes through.
    pub fn log(&self) -> &CopyLog {
        &self.log
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        self.worker.device().lane(kind)
    }

    /// Starts a new visit: what was sent two visits ago is let go, behind its download (rule 2).
    ///
    /// # Errors
    /// When the compute lane refuses to wait; nothing is let go then.
    pub fn turn(&self) -> Result<()> {
        let mut outbox = lock(&self.outbox);
        outbox.visit += 1;
        let due = outbox.visit.saturating_sub(2);
        while let Some((visit, _, event)) = outbox.sent.front()
            && *visit <= due
        {
            self.lane(LaneKind::Compute).wait(event)?;
            outbox.sent.pop_front();
        }
        Ok(())
    }

    /// Lets the oldest of what was sent go, behind its download (rule 2), until at most `most`
    /// bytes wait for theirs: a visit of many layers would hold what all of them sent.
    ///
    /// # Errors
    /// As [`Port::turn`].
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

    /// The host waits for all lanes, whatever they tell; what was sent is let go. This is for
    /// picking up after a failure; [`Port::forget`] comes when all whom it concerns know.
    ///
    /// # Errors
    /// The first thing that went wrong in a lane and was not forgotten yet.
    pub fn drain(&self) -> Result<()> {
        let told =
            LaneKind::ALL.map(|kind| self.lane(kind).record().and_then(|event| event.fence()));
        let sent = std::mem::take(&mut lock(&self.outbox).sent);
        sent.iter().for_each(|(_, _, event)| event.state().settle());
        told.into_iter().collect()
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
        if self.worker.device().id().kind == DeviceKind::Meta {
            let written = self.lane(LaneKind::ActivationDownload).record()?;
            self.hold(dense, written);
            return Ok(HostValue::new(dtype, shape, Place::Counted));
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
        if !written.is_past() {
            self.hold(dense, written.clone());
        }
        Ok(HostValue::new(
            dtype,
            shape,
            Place::Pooled {
                buf,
                written,
                pool: self.host.clone(),
            },
        ))
    }

    /// Keeps what is on its way out.
    fn hold(&self, dense: Tensor, written: Event) {
        let mut outbox = lock(&self.outbox);
        let visit = outbox.visit;
        outbox.sent.push_back((visit, dense, written));
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
        let from = self.log.start(lane);
        if bytes > 0 {
            let copy = Copy {
                what: what.to_owned(),
                direction: Direction::Download,
                src: dense.view().ptr,
                dst: buf.addr(),
                bytes: bytes as u64,
            };
            // SAFETY: the lane waits for the kernel that wrote `dense` and for every copy that used
            // `buf`, which nobody else holds; the outbox keeps `dense`, and the host value (or its
            // pool) `buf`, behind the event.
            unsafe { lane.copy(&copy)? };
        }
        let written = lane.record()?;
        self.log.end(lane, from, what, bytes as u64);
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
        let lend = |bytes: u64| match beside {
            Some(working) => self.worker.pool().lend_beside("receive", bytes, working),
            None => self.worker.pool().lend("receive", bytes),
        };
        let contents = &*value.0;
        let (dtype, shape) = (contents.dtype, contents.shape);
        let device = self.worker.device();
        let bytes = value.size_bytes();
        if device.id().kind == DeviceKind::Meta {
            let (block, _) = lend(bytes as u64)?;
            let tensor = Some(Tensor::from_block(block, dtype, shape));
            return Ok(Arrival {
                worker: self.worker.clone(),
                tensor,
                event: None,
            });
        }
        let (buf, written) = match &contents.place {
            Place::Hollow | Place::Counted => {
                return Err(Error::invalid(
                    "receive",
                    format!("{what}: {value:?} was kept elsewhere"),
                ));
            }
            Place::Pooled { buf, written, .. } => (buf, Some(written)),
            Place::Given { buf, .. } => (buf, None),
        };
        if device.aliases_host() {
            if let Some(written) = written {
                written.fence()?;
            }
            let host = buf.read(0..bytes)?;
            let tensor = Some(Tensor::from_host(
                host,
                self.worker.pool().clone(),
                dtype,
                shape,
            )?);
            return Ok(Arrival {
                worker: self.worker.clone(),
                tensor,
                event: None,
            });
        }
        let claim = buf.read(0..bytes)?;
        let (block, free) = lend(bytes as u64)?;
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
        let from = self.log.start(lane);
        let event = copy_in(lane, what, buf.addr(), block.addr(), bytes as u64)?;
        self.log.end(lane, from, what, bytes as u64);
        lock(&contents.readers).push(Reader {
            landed: event.clone(),
            claim,
        });
        let tensor = Some(Tensor::from_block(block, dtype, shape));
        Ok(Arrival {
            worker: self.worker.clone(),
            tensor,
            event: Some(event),
        })
    }

    /// Starts a download into memory of the caller's, in the gradient lane, behind `after`, in
    /// chunks. The flight keeps both ends.
    ///
    /// # Errors
    /// When sizes differ or the device refuses.
    pub fn unload(
        &self,
        what: &str,
        tensor: Tensor,
        after: &Event,
        mut host: HostMut,
        chunk: u64,
    ) -> Result<Flight<(Tensor, HostMut)>> {
        self.worker.check_home("unload", &tensor)?;
        let bytes = tensor.size_bytes() as u64;
        if host.bytes().len() as u64 != bytes || !tensor.is_contiguous() {
            let what = format!(
                "{what}: {tensor:?} into {} bytes of host memory",
                host.bytes().len()
            );
            return Err(Error::invalid("unload", what));
        }
        let lane = self.lane(LaneKind::GradDownload);
        lane.wait(after)?;
        let (src, dst) = (tensor.view().ptr, host.addr());
        let from = self.log.start(lane);
        for start in (0..bytes).step_by(chunk.max(1) as usize) {
            let copy = Copy {
                what: what.to_owned(),
                direction: Direction::Download,
                src: src + start,
                dst: dst + start,
                bytes: chunk.min(bytes - start),
            };
            // SAFETY: the flight below owns the tensor and the host range until the lane has passed
            // (and a failed copy or record leaves the lane dry); the lane waits for whoever wrote
            // the tensor.
            if let Err(error) = unsafe { lane.copy(&copy) } {
                drain_lane(lane);
                return Err(error);
            }
        }
        let landed = lane.record()?;
        self.log.end(lane, from, what, bytes);
        Ok(Flight::new(landed, (tensor, host)))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut lock(&self.outbox).sent);
        sent.iter().for_each(|(_, _, event)| event.state().settle());
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.worker.device().id())
    }
}

/// Queues one upload and gives the event behind it. A failing record has run the lane dry.
fn copy_in(lane: &dyn Lane, what: &str, src: u64, dst: u64, bytes: u64) -> Result<Event> {
    if bytes > 0 {
        let copy = Copy {
            what: what.to_owned(),
            direction: Direction::Upload,
            src,
            dst,
            bytes,
        };
        // SAFETY: the callers hold the source (a host value or a claimed range) and the destination (a
        // lent block, which the lane was put behind) until the event that is recorded next has
        // passed.
        unsafe { lane.copy(&copy)? };
    }
    lane.record()
}

/// Device memory for one layer's weights, not filled yet.
#[derive(Debug)]
pub struct Slot {
    worker: Worker,
    storage: Arc<Storage>,
    free: Option<Event>,
}

/// A piece of host memory and where it goes in a slot.
#[derive(Debug)]
pub struct Part {
    /// What is copied.
    pub host: HostRef,
    /// First byte in the slot.
    pub offset: u64,
}

impl Slot {
    /// Takes `bytes` of a worker's memory.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn reserve(worker: &Worker, bytes: u64) -> Result<Self> {
        let lent = worker.pool().lend("weights", bytes)?;
        Ok(Self::new(worker, lent))
    }

    /// As [`Slot::reserve`], for weights that are not needed yet: the working memory of the task
    /// under way stays whole, and so does that of a task which needs `working` bytes.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn reserve_beside(worker: &Worker, bytes: u64, working: u64) -> Result<Self> {
        let lent = worker.pool().lend_beside("weights", bytes, working)?;
        Ok(Self::new(worker, lent))
    }

    fn new(worker: &Worker, (block, free): (Block, Option<Event>)) -> Self {
        Self {
            worker: worker.clone(),
            storage: Arc::new(Storage::Block(block)),
            free,
        }
    }

    /// Starts filling it in the parameter lane, in chunks of at most `chunk` bytes (rule 8; the
    /// host waits for all but the last four chunks). The flight keeps the host memory.
    ///
    /// # Errors
    /// When a part does not fit or the device refuses.
    pub fn fill(
        self,
        what: &str,
        parts: Vec<Part>,
        chunk: u64,
        log: &CopyLog,
    ) -> Result<(Loaded, Flight<Vec<Part>>)> {
        let Storage::Block(block) = &*self.storage else {
            unreachable!("a slot is a block")
        };
        for Part { host, offset } in &parts {
            let bytes = host.bytes().len() as u64;
            if offset
                .checked_add(bytes)
                .is_none_or(|end| end > block.bytes())
            {
                let what = format!(
                    "{what}: {bytes} bytes at byte {offset} of a slot of {}",
                    block.bytes()
                );
                return Err(Error::invalid("fill", what));
            }
        }
        let lane = self.worker.device().lane(LaneKind::ParamUpload);
        if let Some(free) = &self.free {
            lane.wait(free)?;
        }
        let base = block.addr();
        let from = log.start(lane);
        let event = match fill(lane, what, base, &parts, chunk.max(1)) {
            Ok(event) => event,
            Err(error) => {
                drain_lane(lane);
                return Err(error);
            }
        };
        log.end(
            lane,
            from,
            what,
            parts
                .iter()
                .map(|part| part.host.bytes().len() as u64)
                .sum(),
        );
        let loaded = Loaded {
            worker: self.worker.clone(),
            storage: self.storage,
            event: Some(event.clone()),
        };
        Ok((loaded, Flight::new(event, parts)))
    }
}

/// Chunks of an upload that are queued at once. A thread that sleeps until the first has passed
/// takes longer to wake up than one chunk of 16 MiB travels; what passes between waits for these at
/// most.
const UNDER_WAY: usize = 4;

fn fill(lane: &dyn Lane, what: &str, base: u64, parts: &[Part], chunk: u64) -> Result<Event> {
    let mut under_way: VecDeque<Event> = VecDeque::new();
    for Part { host, offset } in parts {
        let bytes = host.bytes().len() as u64;
        for start in (0..bytes).step_by(chunk as usize) {
            if under_way.len() == UNDER_WAY
                && let Some(first) = under_way.pop_front()
            {
                first.fence()?;
            }
            let size = chunk.min(bytes - start);
            under_way.push_back(copy_in(
                lane,
                what,
                host.addr() + start,
                base + offset + start,
                size,
            )?);
        }
    }
    match under_way.pop_back() {
        Some(last) => Ok(last),
        None => lane.record(),
    }
}

/// A layer's weights on their way to, or on, a worker.
#[derive(Debug)]
pub struct Loaded {
    worker: Worker,
    storage: Arc<Storage>,
    event: Option<Event>,
}

impl Loaded {
    /// Puts the compute lane behind the upload and gives tensors at these places: first byte, type,
    /// shape.
    ///
    /// # Errors
    /// When a tensor would leave the slot or lie across its type's size, or the lane refuses.
    pub fn tensors(mut self, places: &[(u64, DType, Shape)]) -> Result<Vec<Tensor>> {
        if let Some(event) = &self.event {
            self.worker.device().lane(LaneKind::Compute).wait(event)?;
        }
        self.event = None;
        let make = |(offset, dtype, shape): &(u64, DType, Shape)| {
            Tensor::within(self.storage.clone(), *offset, *dtype, *shape)
        };
        places.iter().map(make).collect()
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        abandon(&self.worker, self.event.take());
    }
}

impl Worker {
    /// A host buffer as a tensor that this worker reads in place.
    ///
    /// # Errors
    /// When the worker cannot read host memory, the buffer is too small or not aligned for the
    /// type, or somebody is writing it.
    pub fn alias(&self, buf: &HostBuf, dtype: DType, shape: Shape) -> Result<Tensor> {
        const OP: &str = "alias";
        if !self.device().aliases_host() {
            let what = format!(
                "{} cannot read {dtype} {shape} in place",
                self.device().id()
            );
            return Err(Error::invalid(OP, what));
        }
        let bytes = buf.place(OP, 0, dtype, &shape)?;
        Tensor::from_host(buf.read(bytes)?, self.pool().clone(), dtype, shape)
    }
}
