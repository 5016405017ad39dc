//! Weights on their way in and gradients on their way out, beside the launcher.
//!
//! Each worker has two threads here, so that a prefetch never waits behind launches, and a gradient
//! never behind a prefetch that waits for a new version of the weights. The serial executor does
//! both on the spot.
//!
//! # Order
//! 1. Weights are read once the version that the call asks for has been published, under a ticket
//!    that keeps the optimizer from writing there until the last chunk has landed.
//! 2. A gradient is written once the update before has read the one that lies there.
//! 3. Weights that come early are sent while the next upload that a job asked for cannot begin: its
//!    version is not published, or kernels still use its memory. They wait for their own memory to
//!    be free, so that no other copy stands behind kernels that they wait for.
//! 4. At most [`MOST_DOWNLOADS`] jobs' gradients of a worker are on their way; the launcher waits for
//!    room.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use roundpipe_tensor::device::{Event, Flight};
use roundpipe_tensor::host::HostMut;
use roundpipe_tensor::transfer::{FilledSlot, Port, Slot, SlotSegment};
use roundpipe_tensor::{HostBuf, Tensor, nvtx};

use super::call::Call;
use super::early_rows::CallRows;
use super::early_weights::EarlyRequest;
use super::row_gradients::{Rounded, RowLanding};
use crate::error::{Error, Result};
use crate::store::Writes;
use crate::sync::{lock, unpoisoned};
use crate::version::ReadTicket;

/// Weights and gradients travel in pieces of this size, so that activations can pass between them.
pub(super) const CHUNK: u64 = 16 << 20;
const MOST_DOWNLOADS: usize = 2;
/// How often uploads that cannot begin are looked at while some of them are early.
const READY_POLL: Duration = Duration::from_micros(100);

/// A layer's weights to bring.
pub(crate) struct WeightUpload {
    pub call: Arc<Call>,
    pub stage: usize,
    pub layer: usize,
    /// For all weights, or for those in front of the frozen ones.
    pub slot: Slot,
    pub frozen: FrozenTarget,
    pub tickets: Vec<ReadTicket>,
}

impl WeightUpload {
    /// Whether its copy would wait for nothing.
    fn is_ready(&self) -> bool {
        let frozen = match &self.frozen {
            FrozenTarget::OwnSlot(_, slot) => slot.is_free(),
            FrozenTarget::SameSlot | FrozenTarget::Held(_) => true,
        };
        let is_free = frozen && self.slot.is_free();
        let is_published = self.tickets.iter().all(ReadTicket::is_readable);
        // That of a failed call ends at once.
        self.call.has_failed() || is_free && is_published
    }
}

/// Where the frozen weights of a layer go, which stand behind the others in its block.
pub(crate) enum FrozenTarget {
    /// Where the others go.
    SameSlot,
    /// To memory of their own; they begin at this byte of the block.
    OwnSlot(usize, Slot),
    /// Nowhere: those from this byte of the block on are on the worker.
    Held(usize),
}

/// A layer's weights on their way to a worker, or there.
#[derive(Debug)]
pub(crate) struct FilledWeights {
    pub slot: FilledSlot,
    /// The frozen ones, where they have memory of their own.
    pub frozen: Option<FilledSlot>,
    /// [`Store::writes_at`](crate::Store) before host memory was read: who writes there later
    /// changes it.
    pub writes: Writes,
}

/// The gradients of a job to take away.
pub(crate) struct GradientDownload {
    pub call: Arc<Call>,
    pub stage: usize,
    pub gradients: Vec<Gradient>,
    /// Behind the kernels that made them.
    pub after: Event,
}

/// One parameter's gradient, in its final type.
pub(crate) struct Gradient {
    pub layer: usize,
    pub param: usize,
    pub tensor: Tensor,
    /// The rows that it consists of, if it is not whole.
    pub rows: Option<Arc<CallRows>>,
}

impl Gradient {
    /// Of a layer's parameter.
    pub fn new((layer, param): (usize, usize), rounded: Rounded) -> Self {
        let Rounded { tensor, rows } = rounded;
        Self {
            layer,
            param,
            tensor,
            rows,
        }
    }
}

/// Jobs whose gradients are on their way.
type Room = Arc<(Mutex<usize>, Condvar)>;

/// Who moves weights and gradients of a worker.
pub(crate) enum CopyThreads {
    /// The calling thread, on the spot.
    Inline(Arc<Port>),
    /// Two threads.
    Threads {
        uploads: Sender<Upload>,
        downloads: Sender<GradientDownload>,
        room: Room,
    },
}

/// What the thread that brings weights is asked for.
pub(crate) enum Upload {
    /// By a job, in the order of jobs.
    Asked(WeightUpload),
    /// For a later job, when there is time.
    Early(EarlyRequest),
}

impl CopyThreads {
    /// Starts the threads of a worker.
    pub fn start(port: &Arc<Port>, threads: &mut Vec<JoinHandle<()>>) -> Result<Self> {
        let (uploads, to_upload) = channel::<Upload>();
        let (downloads, to_download) = channel::<GradientDownload>();
        let room: Room = Arc::default();
        let id = port.worker().device().id();
        let up = port.clone();
        let down = port.clone();
        let freed = room.clone();
        threads.push(spawn(format!("{id} up"), move || {
            upload_all(&up, to_upload);
        })?);
        threads.push(spawn(format!("{id} down"), move || {
            download_all(&down, &to_download, &freed);
        })?);
        Ok(Self::Threads {
            uploads,
            downloads,
            room,
        })
    }

    /// Brings a layer's weights; they appear in the call, and a part of it ends.
    pub fn upload(&self, upload: WeightUpload) {
        // Before it is sent: the call must not end while a copy of it is under way.
        upload.call.open_part();
        match self {
            Self::Inline(port) => upload_weights(port, upload),
            // The thread ends only after this sender is gone, so the message arrives.
            Self::Threads { uploads, .. } => drop(uploads.send(Upload::Asked(upload))),
        }
    }

    /// Brings frozen weights of a later job when there is time.
    pub fn upload_early(&self, request: EarlyRequest) {
        match self {
            Self::Inline(port) => upload_early(port, request),
            Self::Threads { uploads, .. } => drop(uploads.send(Upload::Early(request))),
        }
    }

    /// Waits until no gradients are on their way.
    pub fn wait_downloads(&self) {
        let Self::Threads { room, .. } = self else {
            return;
        };
        let (count, freed) = &**room;
        let mut count = lock(count);
        while *count > 0 {
            count = unpoisoned(freed.wait(count));
        }
    }

    /// Takes a job's gradients away; then a part of the call ends.
    pub fn download(&self, download: GradientDownload) {
        download.call.open_part();
        match self {
            Self::Inline(port) => download_gradients(port, download),
            Self::Threads {
                downloads, room, ..
            } => {
                let (count, freed) = &**room;
                let mut count = lock(count);
                while *count >= MOST_DOWNLOADS {
                    count = unpoisoned(freed.wait(count));
                }
                // Counted before it is sent, so that `wait_downloads` misses none.
                *count += 1;
                drop(count);
                drop(downloads.send(download));
            }
        }
    }
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let started = std::thread::Builder::new().name(name.clone()).spawn(body);
    started.map_err(|error| {
        let what = format!("cannot start the thread {name}: {error}");
        Error::config("threads", what)
    })
}

fn upload_all(port: &Port, uploads: Receiver<Upload>) {
    let mut waiting = WaitingUploads::new(uploads);
    while let Some(upload) = waiting.next() {
        match upload {
            Upload::Asked(upload) => upload_weights(port, upload),
            Upload::Early(request) => upload_early(port, request),
        }
    }
}

/// Uploads that were asked for, in the order in which they are made.
struct WaitingUploads {
    uploads: Receiver<Upload>,
    asked: VecDeque<WeightUpload>,
    early: VecDeque<EarlyRequest>,
}

impl WaitingUploads {
    fn new(uploads: Receiver<Upload>) -> Self {
        Self {
            uploads,
            asked: VecDeque::new(),
            early: VecDeque::new(),
        }
    }

    fn sort_in(&mut self, upload: Upload) {
        match upload {
            Upload::Asked(upload) => self.asked.push_back(upload),
            Upload::Early(request) => self.early.push_back(request),
        }
    }

    /// The next upload to make; `None` when there will be none.
    fn next(&mut self) -> Option<Upload> {
        loop {
            while let Ok(upload) = self.uploads.try_recv() {
                self.sort_in(upload);
            }
            let asked = self.asked.front();
            // Without early ones there is nothing better to do than to wait for it.
            if asked.is_some_and(|upload| self.early.is_empty() || upload.is_ready()) {
                return self.asked.pop_front().map(Upload::Asked);
            }
            let early = self.early.front();
            if early.is_some_and(|request| request.upload.is_ready()) {
                return self.early.pop_front().map(Upload::Early);
            }
            let received = match self.early.is_empty() {
                true => self.uploads.recv().map_err(RecvTimeoutError::from),
                false => self.uploads.recv_timeout(READY_POLL),
            };
            match received {
                Ok(upload) => self.sort_in(upload),
                Err(RecvTimeoutError::Timeout) => {}
                // The launcher is gone, and with it every job that would want early ones.
                Err(RecvTimeoutError::Disconnected) => {
                    return self.asked.pop_front().map(Upload::Asked);
                }
            }
        }
    }
}

fn download_all(port: &Port, downloads: &Receiver<GradientDownload>, room: &Room) {
    for download in downloads {
        download_gradients(port, download);
        // Whether it succeeded or not: a launcher waits for the count.
        *lock(&room.0) -= 1;
        room.1.notify_all();
    }
}

/// Fails a call with the layer that was being copied, unless the error is a consequence of another.
fn fail(call: &Call, stage: usize, layer: usize, error: Error) {
    if error.is_secondary() {
        call.fail(error);
    } else {
        call.fail(call.error_at(stage, Some(layer), None, error));
    }
}

fn upload_weights(port: &Port, upload: WeightUpload) {
    let call = upload.call.clone();
    let stage = upload.stage;
    let layer = upload.layer;
    if !call.has_failed()
        && let Err(error) = try_upload(port, upload)
    {
        fail(&call, stage, layer, error);
    }
    call.end_part();
}

fn try_upload(port: &Port, upload: WeightUpload) -> Result<()> {
    let WeightUpload {
        call,
        stage,
        layer,
        slot,
        frozen,
        tickets,
    } = upload;
    let spec = &call.spec;
    wait_published(port, &call, &tickets)?;
    let (frozen_at, frozen_slot) = match frozen {
        FrozenTarget::SameSlot => (usize::MAX, None),
        FrozenTarget::OwnSlot(at, slot) => (at, Some(slot)),
        FrozenTarget::Held(at) => (at, None),
    };
    let writes = spec.model.store.writes_at(layer, spec.version)?;
    let mut segments = Vec::new();
    let mut frozen_segments = Vec::new();
    for segment in spec.model.store.segments(layer, spec.version)? {
        let at = segment.block_offset;
        let (list, offset) = match at.checked_sub(frozen_at) {
            None => (&mut segments, at),
            Some(behind) if frozen_slot.is_some() => (&mut frozen_segments, behind),
            Some(_) => continue,
        };
        list.push(SlotSegment {
            host: segment.data.read_all()?,
            offset: offset as u64,
        });
    }
    let name = &spec.model.layers[layer].0;
    let _range = nvtx::range(|| format!("{} weights of {name} in", spec.model.name));
    let (slot, flight) = slot.fill(name, segments, CHUNK, port.log())?;
    let frozen = frozen_slot.map(|slot| slot.fill(name, frozen_segments, CHUNK, port.log()));
    let (frozen, frozen_flight) = frozen.transpose()?.unzip();
    // Kernels may be queued behind the copy now; only the tickets wait for its end.
    let filled = FilledWeights {
        slot,
        frozen,
        writes,
    };
    call.put_weights(stage, layer, filled);
    flight.land()?;
    if let Some(flight) = frozen_flight {
        flight.land()?;
    }
    // The chunks have been read; the optimizer may write there now.
    drop(tickets);
    Ok(())
}

fn upload_early(port: &Port, request: EarlyRequest) {
    let Some(slot) = request.upload.start() else {
        return;
    };
    let call = request.upload.call();
    match fill_frozen(port, call, &request, slot) {
        Ok((filled, flight)) => {
            request.upload.finish(Ok(filled));
            // A failure of the lane reaches the job through its kernels.
            let _ = flight.land();
        }
        Err(error) => request.upload.finish(Err(error)),
    }
    call.end_part();
}

/// Starts filling a slot with the frozen weights of a layer.
fn fill_frozen(
    port: &Port,
    call: &Call,
    request: &EarlyRequest,
    slot: Slot,
) -> Result<(FilledSlot, Flight<Vec<SlotSegment>>)> {
    let spec = &call.spec;
    let mut segments = Vec::new();
    for segment in spec.model.store.segments(request.layer, spec.version)? {
        let Some(offset) = segment.block_offset.checked_sub(request.block_offset) else {
            continue;
        };
        segments.push(SlotSegment {
            host: segment.data.read_all()?,
            offset: offset as u64,
        });
    }
    // A trace tells these copies from those that a job waits for.
    let name = format!("{}, early", spec.model.layers[request.layer].0);
    let _range = nvtx::range(|| format!("{} weights of {name}, in", spec.model.name));
    Ok(slot.fill(&name, segments, CHUNK, port.log())?)
}

/// Waits until the version that a call reads exists.
fn wait_published(port: &Port, call: &Call, tickets: &[ReadTicket]) -> Result<()> {
    let who = format!("{} up", port.worker().device().id());
    let what = "waiting for a new version of the weights";
    let _on_board = call.spec.board.wait(&who, what);
    for ticket in tickets {
        ticket.wait_readable(&call.abort)?;
    }
    Ok(())
}

fn download_gradients(port: &Port, download: GradientDownload) {
    let call = download.call.clone();
    let stage = download.stage;
    // The layer being copied: an error names it.
    let mut layer = call.spec.stages[stage].layers.start;
    if let Err(error) = try_download(port, download, &mut layer) {
        fail(&call, stage, layer, error);
    }
    call.end_part();
}

fn try_download(port: &Port, download: GradientDownload, current: &mut usize) -> Result<()> {
    let GradientDownload {
        call,
        gradients,
        after,
        ..
    } = download;
    if call.has_failed() {
        // The gradients' memory is freed once the kernels that write it have run.
        let _ = after.fence();
        return Ok(());
    }
    let store = &call.spec.model.store;
    let _range = nvtx::range(|| format!("{} gradients out", call.spec.model.name));
    // All copies are queued before the first is awaited, so that the lane has always work; rows have
    // no memory of their own and are queued when it is their turn.
    let mut landings = Vec::with_capacity(gradients.len());
    for gradient in gradients {
        let (layer, param) = (gradient.layer, gradient.param);
        *current = layer;
        {
            let what = "waiting for the optimizer to read the last ones";
            let _on_board = call.spec.board.wait("gradients", what);
            store.wait_grad_free(layer, call.spec.step, &call.abort)?;
        }
        let Some(range) = store.layer(layer).grad_range(param)? else {
            continue;
        };
        let landing = match gradient.rows.clone() {
            Some(rows) => Landing::Rows(RowLanding::new(gradient, rows, range).into()),
            None => {
                let parts = parts(&range)?;
                Landing::Whole(port.unload("gradient", &gradient.tensor, &after, parts)?)
            }
        };
        landings.push((layer, param, landing));
    }
    if landings.is_empty() {
        // Nothing else shows that the kernels of the job have run.
        after.fence()?;
    }
    let mut landings = landings.into_iter().peekable();
    while let Some((layer, param, landing)) = landings.next() {
        *current = layer;
        match landing {
            Landing::Whole(parts) => land_parts(&call, (layer, param), parts)?,
            Landing::Rows(rows) => rows.land(port, &call, &after)?,
        }
        // Before it counts as landed: the optimizer reads a layer that has landed at once.
        store.layer(layer).set_filled(param, true);
        // Gradients come sorted by layer (`round_gradients`).
        let is_last = landings.peek().is_none_or(|(next, ..)| *next != layer);
        if is_last {
            call.mark_landed(layer);
        }
    }
    Ok(())
}

/// A gradient on its way to host memory.
enum Landing {
    Whole(Vec<Flight<(Tensor, HostMut)>>),
    Rows(Box<RowLanding>),
}

fn land_parts(
    call: &Call,
    (layer, param): (usize, usize),
    parts: Vec<Flight<(Tensor, HostMut)>>,
) -> Result<()> {
    let mut landed = 0;
    for part in parts {
        let (_, mut host) = part.land()?;
        landed += host.bytes().len();
        // The optimizer reads what has landed, so no claim to write it may be left.
        drop(host);
        call.mark_part_landed(layer, param, landed);
    }
    Ok(())
}

/// Memory of a gradient in the pieces in which it lands.
fn parts(range: &HostBuf) -> Result<Vec<HostMut>> {
    let len = range.len();
    // One without elements is a piece, too: its flight says that the kernels of the job have run.
    let starts = (0..len.max(1)).step_by(CHUNK as usize);
    let parts = starts.map(|start| range.write(start..len.min(start + CHUNK as usize)));
    Ok(parts.collect::<Result<_, _>>()?)
}
