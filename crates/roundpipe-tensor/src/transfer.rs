//! Moving tensors between host memory and workers without host waits.
//!
//! A [`HostValue`] is a dense tensor in host memory that a lane may still be writing. A [`Port`] is
//! a worker's door: [`Port::send`] turns a tensor into a host value, [`Port::receive`] a host value
//! into a tensor on its way, on any worker of the same backend. A [`Slot`] is device memory for the
//! weights of one layer, filled in chunks. Nothing here waits on the host unless it says so; order
//! is kept by events, and every end of a copy stays alive until the copy has landed.
//!
//! | file | what |
//! |---|---|
//! | `host_pool.rs` | host memory for host values, used again and again |
//! | `host_value.rs` | a tensor in host memory, on its way there, or on one device only |
//! | `port.rs` | sending, receiving, and the outbox of a worker |
//! | `slot.rs` | device memory for a layer's weights, and the upload that fills it |
//! | `copy_log.rs` | when copies began and ended, for traces |
//!
//! # The event protocol
//! 1. A download waits for a compute event recorded behind the kernel that made its source.
//! 2. The source of a download goes back to the arena only after the compute lane waits for the
//!    download ([`Port::begin_task`] does so two tasks later, [`Port::make_room`] earlier), or after
//!    the host saw it land.
//! 3. An upload waits for the event behind the last use of the block it fills ([`Pool::lend`]).
//! 4. The compute lane waits for an upload before the first kernel that reads it, and before the
//!    block of an unused upload is given back.
//! 5. An upload of a host value waits for the download that wrote it, on any worker.
//! 6. A host value's host memory is written again only by a download that waits for all uploads that
//!    read it ([`HostPool`]); memory that others hold is let go only after the host saw these
//!    uploads land. Until then each upload has a claim on what it reads, so that a caller who got
//!    the bytes ([`HostValue::fence`]) cannot write them.
//! 7. The host reads a host value only after it saw its download land.
//! 8. The chunks of a slot follow each other with at most four under way, so that an activation
//!    never queues behind more than four chunks of weights; the host memory they read is held until
//!    the last has landed.
//! 9. An upload of pageable memory is queued after the host saw the download that wrote it land: a
//!    driver may read the source at once, whatever the lane waits for ([`pins`](crate::pins)).
//!
//! [`Pool::lend`]: crate::pool::Pool::lend

mod copy_log;
mod host_pool;
mod host_value;
mod port;
mod slot;

pub use copy_log::{CopyLog, CopyRecord};
pub use host_pool::{HostPool, HostUse};
pub use host_value::HostValue;
pub use port::{Arrival, Port};
pub use slot::{FilledSlot, Slot, SlotSegment};

use crate::device::{Copy, Direction, Event, Lane, LaneKind};
use crate::error::Result;
use crate::worker::Worker;

/// Queues one upload and gives the event behind it. When recording fails, the lane has run dry.
fn copy_in(lane: &dyn Lane, what: &str, src: u64, dst: u64, bytes: u64) -> Result<Event> {
    if bytes > 0 {
        let copy = Copy {
            what: what.to_owned(),
            direction: Direction::Upload,
            src,
            dst,
            bytes,
        };
        // SAFETY: the callers hold the source (a host value or a claimed range) and the destination
        // (a lent block, which the lane was put behind) until the event that is recorded next has
        // passed.
        unsafe { lane.copy(&copy)? };
    }
    lane.record()
}

/// The host waits for a lane and leaves its error for a later fence. A lane that refuses an event
/// has run dry.
fn drain_lane(lane: &dyn Lane) {
    if let Ok(event) = lane.record() {
        event.state().wait_quietly();
    }
}

/// Rule 4 for an upload that no kernel used.
fn abandon(worker: &Worker, event: Option<Event>) {
    if let Some(event) = event
        && worker
            .device()
            .lane(LaneKind::Compute)
            .wait(&event)
            .is_err()
    {
        event.state().wait_quietly();
    }
}
