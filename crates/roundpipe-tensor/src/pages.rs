//! Anonymous pages from the system: what host buffers and arenas in host memory are made of.
//!
//! Pages are zero and take memory when they are first touched. Miri, which knows neither the flags
//! nor the hints below, gets the same from the allocator.

use std::io;

/// A page, or less where the system's are larger.
pub(crate) const PAGE: usize = 4096;

/// From here on huge pages are asked for: fewer page faults on first touch, and fewer TLB misses.
#[cfg(all(target_os = "linux", not(miri)))]
const HUGE: usize = 4 << 20;

/// Zeroed memory of its own, from the start of a page on; given back when dropped.
pub(crate) struct Pages(Memory);

#[cfg(not(miri))]
type Memory = memmap2::MmapMut;

impl Pages {
    /// `bytes` bytes, at least one. With `reserve` the system counts none of them before they are
    /// touched.
    #[cfg(not(miri))]
    pub(crate) fn zeroed(bytes: usize, reserve: bool) -> io::Result<Self> {
        let mut options = memmap2::MmapOptions::new();
        options.len(bytes.max(1));
        if reserve {
            options.no_reserve_swap();
        }
        let map = options.map_anon()?;
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // Only a hint.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self(map))
    }

    /// As above.
    #[cfg(miri)]
    pub(crate) fn zeroed(bytes: usize, _reserve: bool) -> io::Result<Self> {
        Memory::zeroed(bytes).map(Self)
    }

    /// The first byte.
    pub(crate) fn ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}

#[cfg(miri)]
struct Memory(std::ptr::NonNull<u8>, std::alloc::Layout);

#[cfg(miri)]
// SAFETY: the value owns what the pointer points to, and only its holder uses it.
unsafe impl Send for Memory {}
#[cfg(miri)]
// SAFETY: as above; nothing is read or written by way of a shared reference.
unsafe impl Sync for Memory {}

#[cfg(miri)]
impl Memory {
    fn zeroed(bytes: usize) -> io::Result<Self> {
        // What the system would refuse as well: more than a machine has.
        let fits = bytes < 1 << 40;
        let layout = std::alloc::Layout::from_size_align(bytes.max(1), PAGE)
            .ok()
            .filter(|_| fits);
        let layout = layout.ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the size is not 0.
        let ptr = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
        Ok(Self(ptr.ok_or(io::ErrorKind::OutOfMemory)?, layout))
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_ptr()
    }
}

#[cfg(miri)]
impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), self.1) };
    }
}
