//! Data for training: samples by number ([`Dataset`]), and batches of them in an order that can be
//! repeated ([`Loader`]).
//!
//! ```
//! use roundpipe::HostTensor;
//! use roundpipe::data::Loader;
//!
//! # fn main() -> roundpipe::Result<()> {
//! let x = HostTensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[6, 1])?;
//! let y = HostTensor::from_slice(&[0i64, 1, 0, 1, 0, 1], &[6])?;
//! let mut loader = Loader::new((x, y)).batch_size(4).shuffle(7).threads(2);
//! while loader.position().epoch < 3 {
//!     for batch in loader.epoch()? {
//!         let (x, y) = batch?;
//!         assert_eq!(x.dims()[0], y.dims()[0]);
//!         // engine.forward_backward(x, y, loss)?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A dataset says how many samples it has and gives each by its number; vectors, tensors and pairs
//! of datasets are datasets. The loader decides which samples make a batch, a [`Collate`] puts them
//! together, and threads do both ahead of the caller.
//!
//! Nothing here knows engines or devices: batches are host values. No file is read but by a dataset
//! of the user's own.
//!
//! # Invariants
//! - A batch depends on the dataset, the options, its epoch and its number alone: not on threads,
//!   the machine, or where a run was resumed.
//! - Batches are delivered in their order. A batch that fails ends the epoch's iterator, behind the
//!   batches before it.
//! - No thread outlives the iterator that started it.

mod collate;
mod dataset;
mod loader;
mod order;
mod prefetch;

pub use self::collate::{Collate, CollateFn, Pad, Sample, Stack};
pub use self::dataset::{DataError, Dataset};
pub use self::loader::{Batches, Loader, Position};
