//! Memory of a card and host memory that the driver pins.
//!
//! Both are given back by owners that hold their card: after an error that the card does not
//! recover from, the driver keeps what it has until the process ends.
//!
//! # Invariants
//! - Device memory is taken by [`Cuda::reserve_arena`], and by a lane for its [`BarrierWord`].
//! - Pinned host memory is zeroed before anything reads it, and unpinned exactly once, the way it
//!   was pinned.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Gpu, is_fatal};
use super::device::Cuda;
use crate::bytes::Bytes;
use crate::device::{Arena, Device};
use crate::error::{Error, Result};
use crate::host::{HostBuf, Pin};
use crate::pins::Refusal;

/// A driver's allocation.
struct Allocation {
    gpu: Arc<Gpu>,
    ptr: sys::CUdeviceptr,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.gpu.current().is_ok() {
            // SAFETY: the driver allocated it for this value; freeing waits for kernels that still use it.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}

/// Where the blocks of one launch wait for each other, see `kernels/decode_block.cu`.
///
/// Every lane has its own: its launches run one after another, those of two lanes may run at the same
/// time. A launch leaves the word as the next one wants it, so it is cleared once.
pub(super) struct BarrierWord(Allocation);

impl BarrierWord {
    const BYTES: usize = 4;

    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        gpu.enter()?;
        // SAFETY: a plain allocation, owned by the value that is made of it.
        let ptr = unsafe { result::malloc_sync(Self::BYTES) };
        let ptr = ptr.map_err(|e| gpu.failed("take memory for a barrier", e))?;
        let gpu = gpu.clone();
        Ok(Self(Allocation { gpu, ptr }))
    }

    /// Clears it in `stream`, before all that is queued there later.
    pub(super) fn clear(&self, stream: sys::CUstream) -> Result<()> {
        let gpu = &self.0.gpu;
        gpu.enter()?;
        // SAFETY: the memory is this value's and as long as that; the stream is of its context.
        let cleared = unsafe { result::memset_d8_async(self.0.ptr, 0, Self::BYTES, stream) };
        cleared.map_err(|e| gpu.failed("clear a barrier", e))
    }

    /// Its address on the card.
    pub(super) fn ptr(&self) -> u64 {
        self.0.ptr
    }
}

/// Page-locked host memory of the driver's, or pages registered with it.
struct Pinned {
    gpu: Arc<Gpu>,
    ptr: *mut c_void,
    /// The pages, when they are not the driver's.
    pages: Option<HostBuf>,
}

// SAFETY: the pointer is only used to give the memory back.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.current().is_err() {
            return;
        }
        // SAFETY: pinned by `pinned_buffer` in exactly this way, and given back once.
        let _ = unsafe {
            match self.pages {
                Some(_) => sys::cuMemHostUnregister(self.ptr).result(),
                None => result::free_host(self.ptr),
            }
        };
    }
}

/// Pinned memory, and its pages where we mapped them.
type Locked = std::result::Result<(*mut c_void, Option<HostBuf>), result::DriverError>;

impl Cuda {
    /// Takes memory of the card; freed with the arena.
    ///
    /// # Errors
    /// When the card has less.
    pub(super) fn reserve_arena(&self, bytes: Bytes) -> Result<Arena> {
        self.gpu.enter()?;
        // SAFETY: a plain allocation, owned by the arena.
        let ptr = unsafe { result::malloc_sync(bytes.0.max(1) as usize) };
        let ptr = ptr.map_err(|e| match self.gpu.failed("reserve memory", e) {
            lost if is_fatal(e.0) => lost,
            _ => {
                let what = format!(
                    "cannot reserve {bytes}, {} are free ({:?})",
                    self.memory(),
                    e.0
                );
                Error::Device {
                    device: self.id,
                    what,
                }
            }
        })?;
        let owner = Allocation {
            gpu: self.gpu.clone(),
            ptr,
        };
        // SAFETY: the driver aligns to 256 bytes and more; the arena alone has the address of this
        // memory, and its owner frees it.
        Ok(unsafe { Arena::new(ptr, bytes, Box::new(owner)) })
    }

    /// Host memory that the driver pins as `pin` asks.
    ///
    /// # Errors
    /// When the driver pins none although `pin` insists.
    pub(super) fn pinned_buffer(&self, name: &str, bytes: usize, pin: Pin) -> Result<HostBuf> {
        self.gpu.pins.buffer(name, bytes, pin, || {
            self.gpu.enter()?;
            let pinned = match pin {
                Pin::Register => self.register(name, bytes)?,
                _ => self.allocate(bytes),
            };
            let (ptr, pages) = pinned.map_err(|e| self.refuse_pin(name, bytes, e))?;
            let owner = Pinned {
                gpu: self.gpu.clone(),
                ptr,
                pages,
            };
            // SAFETY: zeroed, page-aligned, of this size, reached through this value alone, alive
            // in the owner.
            Ok(unsafe { HostBuf::from_owner(name, ptr.cast(), bytes, Box::new(owner)) })
        })
    }

    /// Zeroed memory of the driver's.
    fn allocate(&self, bytes: usize) -> Locked {
        // SAFETY: a plain allocation in the current context, zeroed below, before anything reads it.
        let ptr = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }?;
        // SAFETY: just allocated with this size.
        unsafe { ptr.cast::<u8>().write_bytes(0, bytes) };
        Ok((ptr, None))
    }

    /// Zeroed pages of ours, locked by the driver.
    fn register(&self, name: &str, bytes: usize) -> Result<Locked> {
        let pages = HostBuf::zeroed(name, bytes)?;
        let ptr = pages.addr() as *mut c_void;
        // SAFETY: the pages are mapped, and live in the owner until they are unregistered.
        let locked = unsafe {
            sys::cuMemHostRegister_v2(ptr, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE).result()
        };
        Ok(locked.map(|()| (ptr, Some(pages))))
    }

    fn refuse_pin(&self, name: &str, bytes: usize, error: result::DriverError) -> Refusal {
        let lost = self.gpu.failed("pin host memory", error);
        if self.gpu.is_lost() {
            return lost.into();
        }
        let need = Bytes(bytes as u64);
        let what = format!(
            "cannot pin {need} of host memory for {name} ({:?})",
            error.0
        );
        Refusal {
            error: Error::Device {
                device: self.id,
                what,
            },
            scarce: is_scarce(error.0),
        }
    }
}

/// Whether the driver has no more memory to pin or may not pin any, while all else works.
fn is_scarce(error: sys::CUresult) -> bool {
    use sys::CUresult as E;
    matches!(
        error,
        E::CUDA_ERROR_OUT_OF_MEMORY
            | E::CUDA_ERROR_NOT_PERMITTED
            | E::CUDA_ERROR_NOT_SUPPORTED
            | E::CUDA_ERROR_OPERATING_SYSTEM
    )
}
