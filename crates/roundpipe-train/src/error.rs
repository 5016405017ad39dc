//! Why a run ends early, by what its user can do about it.

use std::path::Path;

/// What this crate's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One line that names the place and the fix.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting or an argument cannot work. Nothing was changed.
    #[error("{0}")]
    Usage(String),
    /// The run needs more memory than there is.
    #[error("{0}")]
    DoesNotFit(String),
    /// Something failed: a file, a device, the data.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// What a program returns: 1 failed, 2 usage, 3 does not fit.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::DoesNotFit(_) => 3,
        }
    }

    /// A file operation failed.
    pub(crate) fn io(doing: &str, path: &Path, error: &std::io::Error) -> Self {
        Self::Failed(format!("cannot {doing} {}: {error}", path.display()))
    }
}

impl From<roundpipe::Error> for Error {
    fn from(error: roundpipe::Error) -> Self {
        let line = error.to_string();
        if error.is_out_of_memory() {
            Self::DoesNotFit(line)
        } else {
            Self::Failed(line)
        }
    }
}

impl From<roundpipe::TensorError> for Error {
    fn from(error: roundpipe::TensorError) -> Self {
        roundpipe::Error::from(error).into()
    }
}

impl From<roundpipe_models::Error> for Error {
    fn from(error: roundpipe_models::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<roundpipe_files::Error> for Error {
    fn from(error: roundpipe_files::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<roundpipe_data::Error> for Error {
    fn from(error: roundpipe_data::Error) -> Self {
        let roundpipe_data::Error::Setting { setting, why } = &error else {
            return Self::Failed(error.to_string());
        };
        let name = match *setting {
            // Files are at fault, not what was asked for.
            "data" | "chat template" => return Self::Failed(error.to_string()),
            "position" => {
                let why = roundpipe_files::text::Line(why);
                return Self::Usage(format!("data: the place in the checkpoint {why}"));
            }
            // As they are called here.
            "threads" => "data_threads",
            "batch_rows" => "batch",
            name => name,
        };
        Self::Usage(format!("{name}: {}", roundpipe_files::text::Line(why)))
    }
}
