//! Device memory for one layer's weights, and the upload that fills it.
//!
//! The life of a slot: [`Slot::reserve`] takes a block, [`Slot::fill`] queues its chunks in the
//! parameter lane, [`FilledSlot::tensors`] puts the compute lane behind them. A slot may also take a
//! host value ([`Slot::fill_with`]), or leave its memory to kernels ([`Slot::unfilled`]). It never
//! chooses which weights it holds. It refuses segments that do not fit and tensors that leave it.
//!
//! # Invariants
//! - Every upload waits for the last use of the block it fills (rule 3).
//! - At most four chunks are under way (rule 8).
//! - A kernel reads a slot only behind its upload, and an unused slot goes back behind it (rule 4).

use std::collections::VecDeque;
use std::sync::Arc;

use super::copy_log::CopyLog;
use super::host_value::HostValue;
use super::{abandon, copy_in, drain_lane};
use crate::device::{Event, Flight, Lane, LaneKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::HostRef;
use crate::pool::Block;
use crate::shape::Shape;
use crate::tensor::{Storage, Tensor};
use crate::worker::Worker;

/// Device memory for one layer's weights, not filled yet.
#[derive(Debug)]
pub struct Slot {
    worker: Worker,
    storage: Arc<Storage>,
    free: Option<Event>,
}

/// A range of host memory and where it goes in a slot.
#[derive(Debug)]
pub struct SlotSegment {
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

    /// Leaves it to kernels to write what they read.
    pub fn unfilled(self) -> FilledSlot {
        FilledSlot {
            worker: self.worker,
            storage: self.storage,
            // They come behind the last use of the block, as an upload would (rule 3).
            event: self.free,
        }
    }

    /// Starts filling its first bytes with those of a host value, in the parameter lane. The value
    /// keeps its memory until the copy has landed (rule 6).
    ///
    /// # Errors
    /// When the value has no bytes or does not fit, or the device refuses.
    pub fn fill_with(self, what: &str, value: &HostValue, log: &CopyLog) -> Result<FilledSlot> {
        let Storage::Block(block) = &*self.storage else {
            unreachable!("a slot is a block")
        };
        let bytes = value.size_bytes();
        if bytes as u64 > block.bytes() {
            let what = format!("{what}: {value:?} into a slot of {}", block.bytes());
            return Err(Error::invalid("fill", what));
        }
        let claim = value.fence()?.read(0..bytes)?;
        let lane = self.worker.device().lane(LaneKind::ParamUpload);
        if let Some(free) = &self.free {
            lane.wait(free)?;
        }
        let from = log.start(lane)?;
        let event = copy_in(lane, what, claim.addr(), block.addr(), bytes as u64)?;
        value.add_reader(event.clone(), claim);
        log.end(lane, from, what, bytes as u64)?;
        Ok(FilledSlot {
            worker: self.worker.clone(),
            storage: self.storage,
            event: Some(event),
        })
    }

    /// Whether the last use of its memory has ended, so that filling it waits for no kernel.
    pub fn is_free(&self) -> bool {
        let free = self.free.as_ref();
        // A lane that failed has run dry.
        free.is_none_or(|event| event.passed().unwrap_or(true))
    }

    /// Starts filling it in the parameter lane, in chunks of at most `chunk` bytes (rule 8; the
    /// host waits for all but the last four chunks). The flight keeps the host memory.
    ///
    /// # Errors
    /// When a segment does not fit or the device refuses.
    pub fn fill(
        self,
        what: &str,
        segments: Vec<SlotSegment>,
        chunk: u64,
        log: &CopyLog,
    ) -> Result<(FilledSlot, Flight<Vec<SlotSegment>>)> {
        let Storage::Block(block) = &*self.storage else {
            unreachable!("a slot is a block")
        };
        for SlotSegment { host, offset } in &segments {
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
        let from = log.start(lane)?;
        let event = match fill(lane, what, base, &segments, chunk.max(1)) {
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
            segments
                .iter()
                .map(|segment| segment.host.bytes().len() as u64)
                .sum(),
        )?;
        let filled = FilledSlot {
            worker: self.worker.clone(),
            storage: self.storage,
            event: Some(event.clone()),
        };
        Ok((filled, Flight::new(event, segments)))
    }
}

/// Chunks of an upload that are queued at once. A thread that sleeps until the first has passed
/// takes longer to wake up than one chunk of 16 MiB travels; a copy of another lane waits for these
/// at most.
const UNDER_WAY: usize = 4;

fn fill(
    lane: &dyn Lane,
    what: &str,
    base: u64,
    segments: &[SlotSegment],
    chunk: u64,
) -> Result<Event> {
    let mut under_way: VecDeque<Event> = VecDeque::new();
    for SlotSegment { host, offset } in segments {
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

/// A slot whose upload is queued: a layer's weights on their way to a worker, or there.
#[derive(Debug)]
pub struct FilledSlot {
    worker: Worker,
    storage: Arc<Storage>,
    event: Option<Event>,
}

impl FilledSlot {
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

impl Drop for FilledSlot {
    fn drop(&mut self) {
        abandon(&self.worker, self.event.take());
    }
}
