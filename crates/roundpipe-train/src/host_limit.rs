//! The host memory that the user allows, and what a run takes of it.
//!
//! What weights, optimizer, program and batches take is known before an engine is made. The rest is for
//! activations, for the work of a processor, and for copies that a save borrows. `plan` adds up the
//! same parts.
//!
//! Refused: a limit that is less than the fixed part.

use roundpipe::{Bytes, RoundPipe};
use roundpipe_models::Model;

use crate::error::{Error, Result};
use crate::model::host_budget;
use crate::settings::{Objective, Settings};

/// CUDA's libraries, the program and the driver's own memory of the host. Measured: 1.10 to 1.12 GiB
/// more than weights and optimizer in runs on an H200.
const LIBRARIES: u64 = 1127 << 20;
/// The program alone, on a processor.
const PROGRAM: u64 = 64 << 20;
/// Of each token of a step: its number, label and position, as read and as given on.
const TOKEN_BYTES: u64 = 48;

/// What the program takes beside models and batches.
pub(crate) fn program_bytes(is_host: bool) -> u64 {
    match is_host {
        true => PROGRAM,
        false => LIBRARIES,
    }
}

/// What the tokens of a step take.
pub(crate) fn batch_bytes(tokens: u64) -> u64 {
    tokens.saturating_mul(TOKEN_BYTES)
}

/// Tokens of a step, with both documents of a pair.
pub(crate) fn tokens(settings: &Settings) -> u64 {
    let rows = settings.batch.unwrap_or(1) as u64;
    let tokens = rows.saturating_mul(settings.seq.unwrap_or(1) as u64);
    let documents = match settings.objective {
        Objective::Sft => 1,
        Objective::Dpo | Objective::Orpo => 2,
    };
    tokens.saturating_mul(documents)
}

/// Activations that a step saves in host memory: the inputs of what is recomputed and what spares
/// recomputes time, less what stays on the card.
pub(crate) fn activation_bytes(engine: &RoundPipe) -> u64 {
    let used = engine.activation_use().unwrap_or_default();
    // On a ring the next visit of a layer is on another card, so nothing stays.
    let stays = match engine.ring().workers().len() {
        1 => used.may_stay,
        _ => 0,
    };
    used.saved.saturating_sub(stays) + used.pieces_in_host
}

/// The user's limit and the fixed part of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostLimit {
    limit: u64,
    fixed: u64,
    is_host: bool,
}

impl HostLimit {
    /// `None` where all of the host's memory is allowed.
    pub fn of(settings: &Settings, model: &Model, is_host: bool) -> Option<Self> {
        let limit = settings.host_memory?.0;
        let fixed = host_budget(model, settings)
            .total()
            .saturating_add(program_bytes(is_host))
            .saturating_add(batch_bytes(tokens(settings)));
        Some(Self {
            limit,
            fixed,
            is_host,
        })
    }

    /// Refuses a limit that not even the fixed part keeps.
    ///
    /// # Errors
    /// [`Error::DoesNotFit`] then.
    pub fn check(self) -> Result<()> {
        let Self { limit, fixed, .. } = self;
        if fixed <= limit {
            return Ok(());
        }
        Err(Error::DoesNotFit(format!(
            "host_memory: weights, optimizer, program and batches take {}, and {} are allowed; allow \
             more, train fewer parameters (--lora), or use lag=0",
            Bytes(fixed),
            Bytes(limit)
        )))
    }

    fn left(self) -> u64 {
        self.limit.saturating_sub(self.fixed)
    }

    /// For activations of GPUs.
    pub fn activations(self) -> Option<Bytes> {
        (!self.is_host).then_some(Bytes(self.left()))
    }

    /// For the work of each of so many workers of a processor.
    pub fn work(self, workers: usize) -> Option<Bytes> {
        let each = self.left() / workers.max(1) as u64;
        self.is_host.then_some(Bytes(each))
    }

    /// For copies that a save borrows while an engine trains.
    pub fn spare(self, engine: &RoundPipe) -> u64 {
        let workers = engine.ring().workers().iter();
        let work: u64 = match self.is_host {
            true => workers.map(|worker| worker.usage().high_water.0).sum(),
            false => 0,
        };
        let taken = work.saturating_add(activation_bytes(engine));
        self.left().saturating_sub(taken)
    }
}
