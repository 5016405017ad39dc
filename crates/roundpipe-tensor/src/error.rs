//! Everything that can go wrong, by what the reader can do about it.

use std::fmt;

use crate::bytes::Bytes;
use crate::device::DeviceId;
use crate::dtype::DType;
use crate::shape::Shape;

/// What this crate's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A wrong program panics; a wrong input or a wrong world is one of these. Shown with its cause in
/// one line, by `{}` and by `{:?}`, so it has no `source`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes that do not go together.
    #[error("{op}: shapes {left} and {right} do not fit together")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Shape of the first operand.
        left: Shape,
        /// Shape of the second operand.
        right: Shape,
    },
    /// Two element types that do not go together.
    #[error(
        "{op}: {left} {left_shape} and {right} {right_shape} differ in dtype; convert one with `cast`"
    )]
    DTypes {
        /// The operation.
        op: &'static str,
        /// Type of the first operand.
        left: DType,
        /// Shape of the first operand.
        left_shape: Shape,
        /// Type of the second operand.
        right: DType,
        /// Shape of the second operand.
        right_shape: Shape,
    },
    /// An element type the operation has no meaning for.
    #[error("{op}: {dtype} {shape} is not supported; {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The type given.
        dtype: DType,
        /// Shape of the operand.
        shape: Shape,
        /// What would be accepted.
        expected: &'static str,
    },
    /// An argument that can never work, in words.
    #[error("{op}: {what}")]
    Invalid {
        /// The operation.
        op: &'static str,
        /// What is wrong and what would be right.
        what: String,
    },
    /// An index outside the dimension it points into.
    #[error("{op}: index {index} at position {at} is outside 0..{size}")]
    Index {
        /// The operation.
        op: &'static str,
        /// The offending value.
        index: i64,
        /// Its position among the indices.
        at: usize,
        /// The size of the dimension.
        size: usize,
    },
    /// The reserved device memory is used up.
    #[error(
        "{device}: {op} needs {need} of {line}, but the largest free piece has {largest} ({used} of the \
         {cap} reserved are in use); use more microbatches or reserve more"
    )]
    DeviceMemory {
        /// Where.
        device: DeviceId,
        /// The operation that asked.
        op: &'static str,
        /// What it asked for.
        need: Bytes,
        /// The part of the worker's memory that it is for.
        line: &'static str,
        /// The largest piece that is free.
        largest: Bytes,
        /// What is taken.
        used: Bytes,
        /// What was reserved.
        cap: Bytes,
    },
    /// The operating system gave no memory.
    #[error("cannot get {need} of host memory for {what}: {cause}")]
    HostMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        need: Bytes,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// The driver pins no more host memory, and the system has too little to go on without.
    #[error(
        "{name} needs {need} of host memory, of which {left} are left, and no more can be pinned ({why}); \
         use a smaller model, fewer or smaller microbatches, lag 0 or a machine with more memory"
    )]
    HostRoom {
        /// The buffer.
        name: String,
        /// How much.
        need: Bytes,
        /// What there is.
        left: Bytes,
        /// Why it is not pinned.
        why: String,
    },
    /// A file could not be mapped.
    #[error("cannot map {path}: {cause}")]
    Map {
        /// The file.
        path: std::path::PathBuf,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// A range of a host buffer is being written, or being read while a write is wanted.
    #[error("host buffer {name}: bytes {start}..{end} are in use by another transfer or view")]
    Busy {
        /// The buffer.
        name: String,
        /// First byte asked for.
        start: usize,
        /// One past the last byte asked for.
        end: usize,
    },
    /// The value has no data behind it: it was made on the meta device.
    #[error("{op}: the meta device knows shapes only, there is no data to read")]
    Meta {
        /// The operation.
        op: &'static str,
    },
    /// A repeated forward did something else than the one that was studied ([`crate::repeat`]).
    #[error("{op}: this forward differs from the one before it; run it without what was kept")]
    Diverged {
        /// The operation where they part.
        op: &'static str,
    },
    /// A tensor that another tape or another device made.
    #[error("{op}: {what}")]
    Foreign {
        /// The operation.
        op: &'static str,
        /// Which tensor and why it cannot be used here.
        what: String,
    },
    /// The device has no implementation of this operation.
    #[error("{device}: {op} is not available for {dtype}")]
    Unsupported {
        /// Where.
        device: DeviceId,
        /// The operation.
        op: &'static str,
        /// The element type asked for.
        dtype: DType,
    },
    /// The device failed; on `sim`, a fault was injected.
    #[error("{device}: {what}")]
    Device {
        /// Where.
        device: DeviceId,
        /// What failed.
        what: String,
    },
    /// Two accesses to one buffer that no event orders (found by `sim`).
    #[error("{device}: race on {region}: {second} is not ordered after {first}")]
    Race {
        /// Where.
        device: DeviceId,
        /// The bytes concerned.
        region: String,
        /// The earlier access.
        first: String,
        /// The later access.
        second: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Shorthand for [`Error::Invalid`].
    pub fn invalid(op: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid {
            op,
            what: what.into(),
        }
    }
}
