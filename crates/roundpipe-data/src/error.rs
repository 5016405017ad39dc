//! What can go wrong between a file of examples and a batch. Bugs panic; these do not.

use std::fmt;
use std::path::{Path, PathBuf};

use roundpipe_files::text::Line;

/// One line that names the place and the fix. What it quotes of a file is shown without control
/// characters, and of a long message the middle is left out.
#[derive(thiserror::Error, Clone)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder cannot be used.
    #[error("{}: {}", path.display(), Line(what))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why, and the fix.
        what: String,
    },
    /// A row cannot be used.
    #[error("{}: row {row}: {}", path.display(), Line(what))]
    Row {
        /// Its file.
        path: PathBuf,
        /// Its number in the file, from 1; blank lines and a header do not count.
        row: u64,
        /// Why, and the fix.
        what: String,
    },
    /// A setting cannot work.
    #[error("{setting}: {}", Line(why))]
    Setting {
        /// Its name.
        setting: &'static str,
        /// Why not, and the fix.
        why: String,
    },
    /// A batch could not be made: no memory.
    #[error("{}", Line(_0))]
    Tensor(String),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Self {
        Self::File {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }

    pub(crate) fn setting(setting: &'static str, why: impl Into<String>) -> Self {
        Self::Setting {
            setting,
            why: why.into(),
        }
    }
}

impl From<roundpipe::TensorError> for Error {
    fn from(error: roundpipe::TensorError) -> Self {
        Self::Tensor(error.to_string())
    }
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
