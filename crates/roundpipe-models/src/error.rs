//! What can go wrong between a folder and a running model. Bugs panic; these do not.

use std::path::{Path, PathBuf};

/// One line that names the place and the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be used; says which, why, and what helps.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why, and the fix.
        what: String,
    },
    /// A chat template cannot be rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// An argument cannot work.
    #[error("{what}: {why}")]
    Argument {
        /// The argument or field.
        what: String,
        /// Why not, and the fix.
        why: String,
    },
    /// The engine's error.
    #[error(transparent)]
    Engine(#[from] roundpipe::Error),
    /// An operation's error.
    #[error(transparent)]
    Tensor(#[from] roundpipe::TensorError),
}

impl Error {
    /// A file that cannot be used.
    pub fn file(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::File { path: path.as_ref().to_path_buf(), what: what.into() }
    }

    /// An argument that cannot work.
    pub fn argument(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Argument { what: what.into(), why: why.into() }
    }
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
