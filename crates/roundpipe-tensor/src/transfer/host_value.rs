//! A dense tensor in host memory that a lane may still be writing.
//!
//! A host value knows where its bytes are, which download writes them and which uploads read them.
//! It refuses to give bytes that it does not have: a device-only value has no host copy.
//!
//! # Invariants
//! - The bytes live until every copy that touches them has landed (rule 6), also when the value is
//!   dropped before.
//! - The host sees the bytes only behind the download that writes them (rule 7).

use std::fmt;
use std::sync::{Arc, Mutex};

use super::host_pool::HostPool;
use crate::device::Event;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostRef};
use crate::shape::Shape;
use crate::sync::{lock, unpoisoned};
use crate::tensor::Tensor;

/// Where a host value's bytes are.
pub(super) enum Backing {
    /// Nowhere: it was kept on its worker.
    DeviceOnly,
    /// Nowhere: the worker only counts.
    Counted,
    /// In memory of a pool, written by a lane or, without an event, by the host.
    Pooled {
        buf: HostBuf,
        written: Option<Event>,
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
    backing: Backing,
    /// Uploads that read it.
    readers: Mutex<Vec<UploadReader>>,
}

/// An upload under way, and its claim on what it reads.
struct UploadReader {
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
    /// When size or alignment are wrong, or while the buffer is being written.
    pub fn given(buf: HostBuf, dtype: DType, shape: Shape) -> Result<Self> {
        buf.place_all("host value", dtype, &shape)?;
        let claim = Some(buf.read_all()?);
        Ok(Self::new(dtype, shape, Backing::Given { buf, claim }))
    }

    /// Values that the host writes now, in memory of `pool`, which lets go of it as of any host value.
    /// The host waits for copies that still use the memory.
    ///
    /// # Errors
    /// When the system has no memory; what `write` returns.
    pub fn written_by_host<E: From<Error>>(
        pool: &Arc<HostPool>,
        dtype: DType,
        shape: Shape,
        write: impl FnOnce(&HostBuf) -> Result<(), E>,
    ) -> Result<Self, E> {
        let bytes = shape.numel() * dtype.size();
        // Pinning memory stops the driver for milliseconds, so a value that is a little larger than
        // the last must find that one's memory large enough.
        let (buf, free) = pool.take(rounded_up(bytes))?;
        free.iter().for_each(|event| event.state().wait_quietly());
        // From here on the value gives the memory back, whatever happens.
        let backing = Backing::Pooled {
            buf: buf.clone(),
            written: None,
            pool: pool.clone(),
        };
        let value = Self::new(dtype, shape, backing);
        let bytes = buf.slice(0..bytes)?;
        drop(buf);
        write(&bytes)?;
        Ok(value)
    }

    /// A host value without bytes, for a value that stays on its worker.
    pub fn device_only(tensor: &Tensor) -> Self {
        Self::new(tensor.dtype(), *tensor.shape(), Backing::DeviceOnly)
    }

    pub(super) fn new(dtype: DType, shape: Shape, backing: Backing) -> Self {
        Self(Arc::new(Contents {
            dtype,
            shape,
            backing,
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
        matches!(self.0.backing, Backing::DeviceOnly)
    }

    /// Tells host values apart while they live; clones agree.
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The bytes, and the point behind the copy that fills them where one does; `None` without
    /// bytes in host memory.
    pub(super) fn source(&self) -> Option<(&HostBuf, Option<&Event>)> {
        match &self.0.backing {
            Backing::DeviceOnly | Backing::Counted => None,
            Backing::Pooled { buf, written, .. } => Some((buf, written.as_ref())),
            Backing::Given { buf, .. } => Some((buf, None)),
        }
    }

    /// Keeps `claim` until the upload behind `landed` has read the bytes.
    pub(super) fn add_reader(&self, landed: Event, claim: HostRef) {
        lock(&self.0.readers).push(UploadReader { landed, claim });
    }

    /// The point behind the copy that fills it; `None` when it is filled.
    pub fn written(&self) -> Option<&Event> {
        match &self.0.backing {
            Backing::Pooled { written, .. } => written.as_ref(),
            _ => None,
        }
    }

    /// Waits until it is filled and gives the bytes. They stay valid while the buffer is held, and
    /// cannot be written while an upload still reads them.
    ///
    /// # Errors
    /// What went wrong in the lane; [`Error::Invalid`] for a host value without bytes.
    pub fn fence(&self) -> Result<HostBuf> {
        match &self.0.backing {
            Backing::DeviceOnly => Err(Error::invalid(
                "host value",
                "the value was kept on its worker",
            )),
            Backing::Counted => HostBuf::zeroed("what a meta worker gives", self.size_bytes()),
            Backing::Pooled { buf, written, .. } => {
                if let Some(written) = written {
                    written.fence()?;
                }
                self.0.forget_landed();
                buf.slice(0..self.size_bytes())
            }
            Backing::Given { buf, .. } => Ok(buf.clone()),
        }
    }
}

/// At most an eighth more, such that values of about one size take the same.
fn rounded_up(bytes: usize) -> usize {
    let step = bytes.checked_next_power_of_two().unwrap_or(8) / 8;
    bytes.checked_next_multiple_of(step.max(1)).unwrap_or(bytes)
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
        let readers = std::mem::take(unpoisoned(self.readers.get_mut()));
        let (mut events, claims): (Vec<_>, Vec<_>) =
            readers.into_iter().map(|r| (r.landed, r.claim)).unzip();
        match std::mem::replace(&mut self.backing, Backing::DeviceOnly) {
            Backing::DeviceOnly | Backing::Counted => {}
            Backing::Pooled { buf, written, pool } => {
                events.extend(written);
                pool.give_back(buf, events, claims);
            }
            Backing::Given { claim, .. } => {
                events.iter().for_each(|event| event.state().wait_quietly());
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
