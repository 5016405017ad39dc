//! The bytes of a file of examples, where rows can be read in any order.
//!
//! A plain file is read where it is. A compressed one cannot be read from the middle, so it is
//! unpacked once into a scratch file, which has no name any more (unix) or goes away with its owner.
//!
//! Refused: pipes and devices, archives that unpack to far more than their size, and archives that
//! are cut off or damaged.
//!
//! # Invariants
//! - Memory does not grow with the file.
//! - A scratch file takes at most [`UNPACKED_BASE`] + [`UNPACKED_RATIO`] × the archive's bytes.

use std::fs::File;
use std::io::{BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use roundpipe_files::small;

use crate::error::{Error, Result};

/// Bytes that any archive may unpack to.
pub const UNPACKED_BASE: u64 = 64 << 20;
/// Further bytes for each byte of the archive. Text rarely shrinks to less than a fiftieth.
pub const UNPACKED_RATIO: u64 = 200;
/// The largest window that a zstd frame may ask for, as a power of two: what `zstd --long=27` needs.
const WINDOW_LOG: u32 = 27;
const BLOCK_BYTES: usize = 1 << 20;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// By gzip.
    Gzip,
    /// By zstd.
    Zstd,
}

/// Bytes that can be read at any place.
#[derive(Debug)]
pub(crate) struct Storage {
    file: File,
    pub bytes: u64,
    /// A scratch file that still has a name.
    named: Option<PathBuf>,
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(path) = self.named.take() {
            // It is in the folder for such files, which the system empties.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Storage {
    /// Opens a file, unpacked if it is compressed, and says how it was. The first bytes decide, not
    /// the name.
    pub fn open(path: &Path, scratch: &Path) -> Result<(Self, Option<Compression>)> {
        let (mut file, meta) = small::open(path).map_err(|e| match e {
            roundpipe_files::Error::File { what, .. } => Error::file(path, what),
            other => Error::file(path, other.to_string()),
        })?;
        let compression = detect(&mut file).map_err(|e| unreadable(path, &e))?;
        let Some(compression) = compression else {
            let storage = Self {
                file,
                bytes: meta.len(),
                named: None,
            };
            return Ok((storage, None));
        };
        let limit = UNPACKED_BASE.saturating_add(meta.len().saturating_mul(UNPACKED_RATIO));
        let mut scratch = Scratch::new(path, scratch, limit)?;
        match compression {
            Compression::Gzip => unpack_gzip(path, file, &mut scratch)?,
            Compression::Zstd => unpack_zstd(path, file, &mut scratch)?,
        }
        Ok((scratch.storage, Some(compression)))
    }

    /// Another handle of the same file.
    pub fn handle(&self, path: &Path) -> Result<File> {
        self.file.try_clone().map_err(|e| unreadable(path, &e))
    }

    /// Fills `into` with the bytes from `offset` on.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<()> {
        read_exact_at(&self.file, into, offset)
    }

    /// Hands all bytes to `take`, in blocks with their offsets.
    pub fn blocks<E>(
        &self,
        path: &Path,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<Result<(), E>> {
        let mut block = vec![0; BLOCK_BYTES];
        let mut offset = 0;
        while offset < self.bytes {
            let count = (self.bytes - offset).min(BLOCK_BYTES as u64) as usize;
            self.read_at(&mut block[..count], offset)
                .map_err(|e| unreadable(path, &e))?;
            if let Err(stop) = take(offset, &block[..count]) {
                return Ok(Err(stop));
            }
            offset += count as u64;
        }
        Ok(Ok(()))
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, into: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut into: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !into.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, into, offset)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        into = &mut into[count..];
        offset += count as u64;
    }
    Ok(())
}

pub(crate) fn unreadable(path: &Path, e: &std::io::Error) -> Error {
    Error::file(path, roundpipe_files::error::unreadable(path, e))
}

fn detect(file: &mut File) -> std::io::Result<Option<Compression>> {
    let mut first = Vec::new();
    Read::take(&mut *file, 4).read_to_end(&mut first)?;
    file.rewind()?;
    Ok(match first.as_slice() {
        [0x1f, 0x8b, ..] => Some(Compression::Gzip),
        // The second is a frame to skip, which parallel compressors write first.
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Some(Compression::Zstd),
        _ => None,
    })
}

/// A file for what was unpacked, which takes no more than its limit.
pub(crate) struct Scratch {
    pub storage: Storage,
    path: PathBuf,
    folder: PathBuf,
    limit: u64,
}

impl Scratch {
    /// An empty one in `folder`, for the rows of `path`.
    pub fn new(path: &Path, folder: &Path, limit: u64) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = folder.join(format!("roundpipe-{}-{number}.rows", std::process::id()));
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options
            .open(&name)
            .map_err(|e| unwritten(path, folder, &e))?;
        let mut storage = Storage {
            file,
            bytes: 0,
            named: Some(name.clone()),
        };
        // An open file lives on without its name, and is gone even if the process is killed.
        if cfg!(unix) && std::fs::remove_file(&name).is_ok() {
            storage.named = None;
        }
        Ok(Self {
            storage,
            path: path.to_path_buf(),
            folder: folder.to_path_buf(),
            limit,
        })
    }

    /// Appends bytes, or refuses them.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.storage.bytes += bytes.len() as u64;
        if self.storage.bytes > self.limit {
            let what = format!(
                "unpacks to more than {} MiB, far more than text does; unpack it by hand if that is right",
                self.limit >> 20
            );
            return Err(Error::file(&self.path, what));
        }
        let written = self.storage.file.write_all(bytes);
        written.map_err(|e| unwritten(&self.path, &self.folder, &e))
    }

    /// Appends all that `from` gives; the error is of reading.
    fn append_all(&mut self, mut from: impl Read) -> Result<std::io::Result<()>> {
        let mut block = vec![0; BLOCK_BYTES];
        loop {
            match from.read(&mut block) {
                Ok(0) => return Ok(Ok(())),
                Ok(count) => self.append(&block[..count])?,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Ok(Err(e)),
            }
        }
    }
}

fn unwritten(path: &Path, folder: &Path, e: &std::io::Error) -> Error {
    let folder = folder.display();
    let what = format!(
        "could not be unpacked into {folder} ({e}); free space there or set `scratch` to another folder"
    );
    Error::file(path, what)
}

fn damaged(path: &Path, kind: &str, e: &dyn std::fmt::Display) -> Error {
    let what = format!("is damaged or cut off ({kind}: {e}); fetch or compress it again");
    Error::file(path, what)
}

fn unpack_gzip(path: &Path, file: File, scratch: &mut Scratch) -> Result<()> {
    let from = flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(BLOCK_BYTES, file));
    scratch
        .append_all(from)?
        .map_err(|e| damaged(path, "gzip", &e))
}

/// All frames of a file, frames to skip among them; their checksums are compared.
fn unpack_zstd(path: &Path, file: File, scratch: &mut Scratch) -> Result<()> {
    let damaged = |e| damaged(path, "zstd", &e);
    let from = BufReader::with_capacity(BLOCK_BYTES, file);
    let mut from = zstd::Decoder::with_buffer(from).map_err(damaged)?;
    from.window_log_max(WINDOW_LOG).map_err(damaged)?;
    scratch.append_all(from)?.map_err(damaged)
}
