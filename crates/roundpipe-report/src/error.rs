//! What can go wrong, in one line that names the file or the port.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong when a run is written down or shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or a folder refused.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file could not be replaced.
    #[error(transparent)]
    File(#[from] roundpipe_files::Error),
    /// A line of a metrics file is no record.
    #[error("{}, line {line}: {why}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A file is larger than anything that is read at once.
    #[error(
        "{} has {bytes} bytes, more than the {limit} that are read at once; read it record by record with `Records`",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What is read at most.
        limit: u64,
    },
    /// The live page has no port.
    #[error("the live page cannot listen on 127.0.0.1:{port}: {source}; choose another port")]
    Bind {
        /// The port; 0 where the system was to choose.
        port: u16,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// Names what was tried with a file.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
