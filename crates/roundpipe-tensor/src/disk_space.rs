//! How much room a disk has, as the system tells. Nothing here writes or refuses: callers compare.

use std::path::Path;

use crate::bytes::Bytes;

/// The room of the file system that holds a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// What this user may still write.
    pub free: Bytes,
    /// All of it.
    pub total: Bytes,
}

impl DiskSpace {
    /// The room where `path` lies, which must exist; `None` where the system does not tell.
    #[cfg(unix)]
    #[allow(
        clippy::unnecessary_cast,
        reason = "these numbers are narrower on some systems"
    )]
    pub fn at(path: &Path) -> Option<Self> {
        use std::os::unix::ffi::OsStrExt as _;
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
        let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: the path ends in a zero byte and lives until the call returns; the answer is
        // written to the place given.
        if unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: zeroed at first and written by the call: plain numbers.
        let answer = unsafe { answer.assume_init() };
        let block = answer.f_frsize as u64;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(block));
        Some(Self {
            free: bytes(answer.f_bavail as u64),
            total: bytes(answer.f_blocks as u64),
        })
    }

    /// The room where `path` lies, which must exist; `None` where the system does not tell.
    #[cfg(not(unix))]
    pub fn at(_: &Path) -> Option<Self> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::DiskSpace;

    #[test]
    #[cfg(unix)]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn a_folder_has_room_and_no_folder_has_none() {
        let space = DiskSpace::at(&std::env::temp_dir()).unwrap();
        assert!(space.total.0 > 0 && space.free <= space.total, "{space:?}");
        assert_eq!(DiskSpace::at("/no/such/folder".as_ref()), None);
        assert_eq!(DiskSpace::at("a\0b".as_ref()), None);
    }
}
