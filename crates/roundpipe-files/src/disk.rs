//! The operations by which a folder of files is written, as a trait.
//!
//! A save that survives a full disk and a lost machine has an argument about every single operation,
//! and an argument needs a test: [`SystemDisk`] is the disk, and tests put one in its place whose
//! n-th operation fails, or after whose n-th operation nothing happens any more.
//!
//! This module decides nothing: what is written in which order is the business of
//! [`folder`](crate::folder) and its callers. Reading is not here either, since a reader can be given
//! files that are damaged in any way.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

/// Where folders are written.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Makes one folder, whose parent exists.
    ///
    /// # Errors
    /// The system's.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes an empty file that is not there yet.
    ///
    /// # Errors
    /// The system's.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Gives a file or folder another name, whose old owner is replaced if both are files.
    ///
    /// # Errors
    /// The system's.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes sure that the names in a folder are on the disk, as far as the system can.
    ///
    /// # Errors
    /// The system's.
    fn flush_folder(&self, path: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The system's.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    ///
    /// # Errors
    /// The system's.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written, by several threads at once if they write different ranges.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// Makes the file `bytes` long.
    ///
    /// # Errors
    /// The system's.
    fn set_len(&self, bytes: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// The system's; some of the bytes may be written then.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes sure that the file's bytes and length are on the disk.
    ///
    /// # Errors
    /// The system's.
    fn flush(&self) -> io::Result<()>;
}

/// The system's own files and folders.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = File::options().write(true).create_new(true).open(path)?;
        Ok(Box::new(SystemFile(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn flush_folder(&self, path: &Path) -> io::Result<()> {
        // Elsewhere a folder cannot be opened as a file.
        #[cfg(not(unix))]
        let _ = path;
        #[cfg(unix)]
        File::open(path)?.sync_all()?;
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir(path)
    }
}

#[derive(Debug)]
struct SystemFile(File);

impl DiskFile for SystemFile {
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    #[cfg(unix)]
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.0, bytes, offset)
    }

    #[cfg(windows)]
    fn write_at(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match std::os::windows::fs::FileExt::seek_write(&self.0, bytes, offset)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => {
                    bytes = &bytes[written..];
                    offset += written as u64;
                }
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

/// Fills `bytes` from a file, starting at `offset`.
///
/// # Errors
/// The system's, and for a file that ends before.
pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let (mut at, mut offset) = (0, offset);
        while at < bytes.len() {
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[at..], offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => {
                    at += read;
                    offset += read as u64;
                }
            }
        }
        Ok(())
    }
}
