//! Files that grow by whole entries, whatever becomes of a write.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file that grows by whole entries. A write that fails leaves it as it was, or the next write
/// takes off first what it left.
#[derive(Debug)]
pub(crate) struct AppendFile {
    path: PathBuf,
    file: File,
    /// Bytes of whole entries.
    whole_bytes: u64,
    /// Whether a write failed and may have left part of an entry.
    is_torn: bool,
}

impl AppendFile {
    /// Goes on with a file, or makes one that must be new.
    pub(crate) fn open(path: &Path, create_new: bool) -> io::Result<Self> {
        let file = OpenOptions::new()
            .append(true)
            .create_new(create_new)
            .open(path)?;
        Ok(Self {
            path: path.to_owned(),
            whole_bytes: file.metadata()?.len(),
            file,
            is_torn: false,
        })
    }

    /// Adds an entry with one write.
    pub(crate) fn append(&mut self, entry: &[u8]) -> Result<()> {
        let mended = self.mend();
        mended
            .and_then(|()| self.try_append(entry))
            .map_err(Error::io("write", &self.path))
    }

    fn try_append(&mut self, entry: &[u8]) -> io::Result<()> {
        self.is_torn = true;
        if let Err(error) = self.file.write_all(entry) {
            // If this fails too, the next entry tries again.
            let _ = self.mend();
            return Err(error);
        }
        self.is_torn = false;
        self.whole_bytes += entry.len() as u64;
        Ok(())
    }

    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.whole_bytes)?;
            self.is_torn = false;
        }
        Ok(())
    }

    /// Waits until the disk has all entries.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.file.sync_data();
        synced.map_err(Error::io("write", &self.path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What a failed write left is gone before the next entry comes.
    #[test]
    fn torn_entries_are_mended() {
        let path = std::env::temp_dir().join(format!("roundpipe-append-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let mut file = AppendFile::open(&path, true).expect("new");
        file.append(b"one\n").expect("written");
        // As if the disk had been full in the middle of an entry, and cutting had failed too.
        file.file.write_all(b"tw").expect("written");
        file.is_torn = true;
        file.append(b"three\n").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"one\nthree\n");
        drop(file);
        let mut again = AppendFile::open(&path, false).expect("opened");
        again.append(b"four\n").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"one\nthree\nfour\n");
        fs::remove_file(&path).expect("removed");
    }
}
