//! Files that appear whole or not at all.
//!
//! The path of a file: temporary name beside the target -> bytes -> flush -> rename. Several files
//! that belong together are each brought as far as the flush before the first gets its name.
//!
//! # Invariants
//! - The name of the target leads to the old file until [`AtomicFile::finish`] has renamed the new
//!   one, whose bytes are on the disk by then.
//! - A file that fails or is dropped before that leaves no temporary file behind.
//! - The temporary name holds the process's number, so two processes never share one. Two threads
//!   that write the same target at once would: their caller lets one finish first.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Result, unwritten};

/// A file being written beside the one it will replace; dropped unfinished, it disappears.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    partial: PathBuf,
    finished: bool,
}

impl AtomicFile {
    /// Makes the empty file under its temporary name.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when its folder is not there or cannot be written.
    pub fn create(target: &Path) -> Result<Self> {
        let name = target
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let partial = target.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let this = Self {
            target: target.to_path_buf(),
            partial,
            finished: false,
        };
        this.check(File::create(&this.partial))?;
        Ok(this)
    }

    /// A complete file of these bytes, on the disk and still without its name.
    ///
    /// # Errors
    /// As [`AtomicFile::create`].
    pub fn of_bytes(target: &Path, bytes: &[u8]) -> Result<Self> {
        let this = Self::create(target)?;
        this.check(this.file()?.write_all(bytes))?;
        this.sync()?;
        Ok(this)
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The file, opened for writing at its start.
    ///
    /// # Errors
    /// As [`AtomicFile::create`].
    pub fn file(&self) -> Result<File> {
        self.check(File::options().write(true).open(&self.partial))
    }

    /// The result of a write, its error with what it means for the user.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) for a write that failed.
    pub fn check<T>(&self, result: std::io::Result<T>) -> Result<T> {
        result.map_err(|e| unwritten(&self.target, &e))
    }

    /// Makes sure that the bytes are on the disk.
    ///
    /// # Errors
    /// As [`AtomicFile::create`].
    pub fn sync(&self) -> Result<()> {
        self.check(self.file()?.sync_all())
    }

    /// Gives the file its name; the bytes are on the disk before.
    ///
    /// # Errors
    /// As [`AtomicFile::create`]; whatever had the name still has it then.
    pub fn finish(mut self) -> Result<()> {
        self.sync()?;
        self.check(std::fs::rename(&self.partial, &self.target))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that cannot even be removed.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// Makes sure that the names in a folder are on the disk, as far as the system can.
///
/// # Errors
/// [`Error::File`](crate::Error::File) when the folder cannot be opened or flushed.
pub fn sync_folder(dir: &Path) -> Result<()> {
    // Elsewhere a folder cannot be opened as a file.
    #[cfg(not(unix))]
    let _ = dir;
    #[cfg(unix)]
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| unwritten(dir, &e))?;
    Ok(())
}
