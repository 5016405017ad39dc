//! What may be chosen about a store, and where its memory comes from.

use std::sync::Arc;

use roundpipe_tensor::{DType, Device, HostBuf, Pin};

use crate::config::Lag;
use crate::error::{Error, Result};
use crate::optim::{MomentType, Rule};

/// What a user may choose about a store.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// What errors call the store's engine.
    pub name: String,
    /// Whose host memory weights and gradients lie in.
    pub device: Arc<dyn Device>,
    /// How that memory is pinned. Frozen parameters stay where they are, e.g. in a mapped file,
    /// with [`Pin::Off`] and where the driver has no more with [`Pin::Try`]: moved to pageable
    /// memory they would gain nothing.
    pub pin: Pin,
    /// The most that an update may lag; weights have two versions at [`Lag::One`].
    pub max_lag: Lag,
    /// The optimizer; without one there are no moments, and updates are closures.
    pub rule: Option<Rule>,
    /// The type of gradients in host memory; by default each parameter's own.
    pub grad_dtype: Option<DType>,
    /// The type of masters and moments; f32 by default. Parameters of this type have their state in
    /// it, and are their own masters; all others have it in f32.
    pub optim_dtype: DType,
    /// In what moments are kept whose parameter has an f32 state; f32 by default.
    pub moments: MomentType,
    /// Of the random bits that bf16 moments are rounded with.
    pub seed: u64,
    /// Threads of updates; by default one per core.
    pub threads: Option<usize>,
    /// Whether parameters are only read, also those that are trainable: another store may train
    /// them meanwhile.
    pub inference: bool,
}

impl StoreConfig {
    /// Pinned memory of `device`, updates between steps, no rule.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self {
            name: "the store".to_owned(),
            device,
            pin: Pin::default(),
            max_lag: Lag::Zero,
            rule: None,
            grad_dtype: None,
            optim_dtype: DType::F32,
            moments: MomentType::F32,
            seed: 0,
            threads: None,
            inference: false,
        }
    }

    pub(super) fn buffer(&self, name: &str, bytes: usize) -> Result<HostBuf> {
        match bytes {
            // Drivers refuse to allocate nothing.
            0 => Ok(HostBuf::zeroed(name, 0)?),
            _ => Ok(self.device.host_buffer(name, bytes, self.pin)?),
        }
    }

    /// A slab for frozen parameters; `None` where they stay in their own buffers.
    pub(super) fn frozen(&self, name: &str, bytes: usize) -> Result<Option<HostBuf>> {
        let refused = || self.pin == Pin::Try && self.device.pins().refused.is_some();
        if self.pin == Pin::Off || refused() {
            return Ok(None);
        }
        match self.buffer(name, bytes) {
            // The first that the driver has no more for.
            Ok(slab) => Ok((slab.is_pinned() || !refused()).then_some(slab)),
            Err(Error::Tensor(roundpipe_tensor::Error::HostRoom { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
