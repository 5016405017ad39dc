//! Everything that can go wrong in a training run. Bugs panic; these do not.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use roundpipe_tensor::DeviceId;

use crate::plan::Pass;

/// What this crate's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where in a call something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPlace {
    /// The engine's name.
    pub model: String,
    /// What the stage was doing.
    pub pass: Pass,
    /// Its number in the call.
    pub stage: usize,
    /// Its layers.
    pub layers: Range<usize>,
    /// The layer, where it is known: its number and name.
    pub layer: Option<(usize, String)>,
    /// The microbatch, where it is known.
    pub microbatch: Option<usize>,
    /// The worker.
    pub device: DeviceId,
}

impl fmt::Display for TaskPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Fused => "fused",
        };
        let Range { start, end } = self.layers;
        write!(
            f,
            "{}: {pass} stage {} (layers {start}..{end})",
            self.model, self.stage
        )?;
        if let Some((index, name)) = &self.layer {
            write!(f, ", layer {index} ({name})")?;
        }
        if let Some(microbatch) = self.microbatch {
            write!(f, ", microbatch {microbatch}")?;
        }
        write!(f, " on {}", self.device)
    }
}

/// By what the reader can do about it. Shown with its causes in one line, by `{}` and by `{:?}`: the
/// line that a `main` prints which returns it. So it has no `source`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation, a device or the memory refused.
    #[error(transparent)]
    Tensor(#[from] roundpipe_tensor::Error),
    /// A layer failed; says which.
    #[error("layer {index} ({layer}): {cause}")]
    Layer {
        /// Its place in the model.
        index: usize,
        /// Its name.
        layer: String,
        /// Why.
        cause: roundpipe_tensor::Error,
    },
    /// A task of a call failed; says which.
    #[error("{place}: {cause}")]
    Task {
        /// Which.
        place: Box<TaskPlace>,
        /// Why.
        cause: Box<Error>,
    },
    /// The call was called off because of something else; `why` says what.
    #[error("called off: {why}")]
    Cancelled {
        /// What happened.
        why: String,
    },
    /// Steps that were asked for did not happen, because something before them failed: the weights
    /// are those of the last step that stands.
    #[error("optimizer step {first} and those after it did not happen; the weights are those of step {}: {cause}", first - 1)]
    Undone {
        /// The first of them.
        first: u64,
        /// Why.
        cause: Box<Error>,
    },
    /// Too many steps in a row had gradients or results that were not finite. The weights are as
    /// before the first of them, but for elements that could be updated.
    #[error(
        "{steps} optimizer steps in a row were not finite; {place}; look at the data there, or lower the learning rate"
    )]
    NotFinite {
        /// How many.
        steps: u64,
        /// The first layer whose output or gradient was not finite, in words.
        place: String,
    },
    /// Another part of the step failed first; that error says why.
    #[error(transparent)]
    Aborted(#[from] crate::version::Aborted),
    /// A dataset, or the collation of its samples, failed; says for which batch.
    #[error("data: {place}: {cause}")]
    Data {
        /// The epoch, the batch and, where it is known, the sample, in words.
        place: String,
        /// What the dataset reported.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint, or a file of one, could not be written or used; says which, why and the fix.
    #[error("checkpoint {}: {what}", path.display())]
    Checkpoint {
        /// The folder or file.
        path: PathBuf,
        /// Why, and the fix.
        what: String,
    },
    /// A setting that can never work.
    #[error("{name}: {what}")]
    Config {
        /// The setting.
        name: &'static str,
        /// What is wrong and what would be right.
        what: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Whether it only says that something else failed.
    pub(crate) fn is_secondary(&self) -> bool {
        match self {
            Self::Cancelled { .. } | Self::Aborted(_) => true,
            Self::Undone { cause, .. } => cause.is_secondary(),
            _ => false,
        }
    }

    /// Whether a device reported it, perhaps later than it happened.
    pub(crate) fn is_of_device(&self) -> bool {
        use roundpipe_tensor::Error::{Device, Race};
        match self {
            Self::Task { cause, .. } | Self::Undone { cause, .. } => cause.is_of_device(),
            Self::Tensor(cause) | Self::Layer { cause, .. } => {
                matches!(cause, Device { .. } | Race { .. })
            }
            _ => false,
        }
    }

    /// Whether a worker had no room.
    pub(crate) fn is_device_full(&self) -> bool {
        match self {
            Self::Task { cause, .. } => cause.is_device_full(),
            Self::Tensor(cause) => {
                matches!(cause, roundpipe_tensor::Error::DeviceMemory { .. })
            }
            _ => false,
        }
    }

    /// Whether a recompute differed from the one that was studied.
    pub(crate) fn is_diverged(&self) -> bool {
        match self {
            Self::Task { cause, .. } => cause.is_diverged(),
            Self::Tensor(cause) => matches!(cause, roundpipe_tensor::Error::Diverged { .. }),
            _ => false,
        }
    }

    /// Shorthand for [`Error::Checkpoint`].
    pub(crate) fn checkpoint(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::Checkpoint {
            path: path.as_ref().to_path_buf(),
            what: what.into(),
        }
    }

    /// Whether a worker or the host has less memory than was asked for: fewer samples at a time, a
    /// smaller model or more memory would help.
    pub fn is_out_of_memory(&self) -> bool {
        use roundpipe_tensor::Error::{DeviceMemory, HostMemory};
        match self {
            Self::Task { cause, .. } | Self::Undone { cause, .. } => cause.is_out_of_memory(),
            Self::Tensor(cause) | Self::Layer { cause, .. } => {
                matches!(cause, DeviceMemory { .. } | HostMemory { .. })
            }
            Self::Config { name, .. } => matches!(*name, "memory" | "host memory"),
            _ => false,
        }
    }

    /// Shorthand for [`Error::Config`].
    pub fn config(name: &'static str, what: impl Into<String>) -> Self {
        Self::Config {
            name,
            what: what.into(),
        }
    }
}

impl From<roundpipe_files::Error> for Error {
    fn from(error: roundpipe_files::Error) -> Self {
        match error {
            roundpipe_files::Error::File { path, what } => Self::Checkpoint { path, what },
            roundpipe_files::Error::Tensor(error) => Self::Tensor(error),
            error @ roundpipe_files::Error::Argument { .. } => {
                Self::config("checkpoint", error.to_string())
            }
        }
    }
}
