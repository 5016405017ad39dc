//! The cpu backend: the host's cores as a device.
//!
//! Lanes are synchronous: work is done when the call returns, so events have always passed and
//! order is the order of calls. Kernels read parameters where they lie in host memory. An arena is
//! address space; pages are committed when first touched, so reserving much costs nothing until it
//! is used.
//!
//! # Invariants
//! - The result of a kernel depends on its operands alone, never on the number of threads.
//! - No instruction runs that the processor at hand does not have.

pub(crate) mod access;
mod attention;
mod costs;
pub(crate) mod elementwise;
mod fp8;
pub(crate) mod gemm;
mod image;
mod index;
mod loss;
mod moe;
mod norm;
mod product;
mod quantized;
mod reduce;
mod rope;
pub(crate) mod simd;
pub mod threads;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::device::{
    Arena, Copy, Device, DeviceId, DeviceKind, Event, Faults, Lane, LaneKind, Ops,
};
use crate::error::{Error, Result};
use crate::kernel::{Family, HostView, HostViewMut, Kernel, View};
use crate::pages::Pages;
pub(crate) use costs::CpuCosts;
use threads::Threads;

/// A worker on the host's cores.
pub struct Cpu {
    id: DeviceId,
    lanes: [CpuLane; 5],
    ops: CpuOps,
}

impl Cpu {
    /// One worker with `threads` threads, or one thread per core.
    ///
    /// # Errors
    /// When the system starts no threads.
    pub fn new(threads: Option<usize>) -> Result<Arc<Self>> {
        Ok(Self::workers(1, threads)?.remove(0))
    }

    /// `count` workers that share one set of threads.
    ///
    /// # Errors
    /// When the system starts no threads.
    pub fn workers(count: usize, threads: Option<usize>) -> Result<Vec<Arc<Self>>> {
        let threads = Threads::new(threads)?;
        let worker = |index| {
            let id = DeviceId {
                kind: DeviceKind::Cpu,
                index: index as u32,
                worker: 0,
            };
            let lanes = LaneKind::ALL.map(|kind| CpuLane {
                kind,
                threads: threads.clone(),
            });
            Arc::new(Self {
                id,
                lanes,
                ops: CpuOps {
                    threads: threads.clone(),
                },
            })
        };
        Ok((0..count.max(1)).map(worker).collect())
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({}, {} threads)", self.id, self.ops.threads.count())
    }
}

// SAFETY: there are five lanes, one per kind; all memory is the process's own, and lanes run while
// their callers wait. Host buffers are `HostBuf::zeroed`, as long as asked and page-aligned.
unsafe impl Device for Cpu {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn memory(&self) -> Bytes {
        Bytes(physical_memory())
    }

    fn reserve(&self, bytes: Bytes) -> Result<Arena> {
        reserve_host(bytes)
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        &self.lanes[kind as usize]
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }

    fn aliases_host(&self) -> bool {
        true
    }
}

/// Address space for an arena in host memory.
pub(crate) fn reserve_host(bytes: Bytes) -> Result<Arena> {
    let fail = |cause| Error::HostMemory {
        what: "an arena",
        need: bytes,
        cause,
    };
    let len = usize::try_from(bytes.0).map_err(|e| fail(std::io::Error::other(e)))?;
    let mut pages = Pages::zeroed(len, true).map_err(fail)?;
    let base = pages.ptr() as u64;
    // SAFETY: the pages are aligned, writable, as long as asked, and live in the owner.
    Ok(unsafe { Arena::new(base, bytes, Box::new(pages)) })
}

#[cfg(unix)]
fn physical_memory() -> u64 {
    // SAFETY: `sysconf` takes a number and gives a number; unknown names give -1.
    let (pages, size) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    u64::try_from(pages).unwrap_or(0) * u64::try_from(size).unwrap_or(0)
}

#[cfg(not(unix))]
fn physical_memory() -> u64 {
    8 << 30
}

#[derive(Debug)]
struct CpuLane {
    kind: LaneKind,
    threads: Threads,
}

/// Copies of more than this are shared by the threads: one core does not fill the memory's
/// bandwidth.
const COPY_PART: usize = 256 << 10;

// SAFETY: copies are done when the call returns, so every event has passed and no lane has anything
// queued.
unsafe impl Lane for CpuLane {
    fn kind(&self) -> LaneKind {
        self.kind
    }

    unsafe fn copy(&self, copy: &Copy) -> Result<()> {
        let bytes = copy.bytes as usize;
        let parts = bytes.div_ceil(COPY_PART).clamp(1, self.threads.count());
        let part = bytes.div_ceil(parts).next_multiple_of(64);
        self.threads.run(parts, |i| {
            let start = (i * part).min(bytes);
            let (src, dst) = (copy.src as usize + start, copy.dst as usize + start);
            let len = part.min(bytes - start);
            // SAFETY: the caller vouches for both ranges, of which the parts are disjoint pieces; a
            // download of a value onto itself cannot happen because source and destination are
            // owned apart.
            unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
        });
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        Ok(Event::past())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        event.fence()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The cpu's mathematics; `sim` computes with it too.
#[derive(Debug, Clone)]
pub(crate) struct CpuOps {
    pub(crate) threads: Threads,
}

// SAFETY: every kernel is done when the call returns; what it touches is argued where it is
// written. Scratch is stated by the functions that the kernels themselves cut it with.
unsafe impl Ops for CpuOps {
    unsafe fn launch(
        &self,
        _lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
        _faults: Option<&Faults>,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { self.compute(kernel, src, dst, scratch) }
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        scratch(kernel, src, dst)
    }

    fn min_gemm_rows(&self) -> usize {
        costs::MIN_GEMM_ROWS
    }
}

/// Scratch bytes the cpu's kernels want: a function of the operands alone, so that a plan can ask
/// without a device.
fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    match kernel {
        Kernel::Conv2d(_) | Kernel::Conv2dGradInput(_) | Kernel::Conv2dGradFilter { .. } => {
            image::scratch(kernel, src, dst)
        }
        Kernel::Fp8MatMul { .. } => fp8::scratch(src, dst),
        Kernel::AttentionGrad(_) => attention::scratch(kernel, src, dst),
        Kernel::Reduce { .. } => reduce::scratch(kernel, src, dst),
        Kernel::RmsNorm { .. }
        | Kernel::RmsNormGrad { .. }
        | Kernel::LayerNorm { .. }
        | Kernel::LayerNormGrad { .. }
        | Kernel::GroupNormGrad { .. } => norm::scratch(kernel, src, dst),
        Kernel::RopeNorm { .. } | Kernel::RopeNormGrad { .. } => rope::scratch(kernel, src, dst),
        _ => 0,
    }
}

impl CpuOps {
    /// Runs a kernel on the calling thread and this device's threads.
    ///
    /// # Safety
    /// As [`Ops::launch`].
    pub(crate) unsafe fn compute(
        &self,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
    ) -> Result<()> {
        let call = access::Call {
            threads: &self.threads,
            kernel,
            src,
            dst,
            scratch,
        };
        // SAFETY: the caller's promise is passed on unchanged to the family that knows the kernel.
        unsafe {
            match kernel.family() {
                Family::Elementwise => elementwise::run(&call),
                Family::Reduce => reduce::run(&call),
                Family::Index => index::run(&call),
                Family::Product => product::run(&call),
                Family::Quantized => quantized::run(&call),
                Family::Norm => norm::run(&call),
                Family::Rope => rope::run(&call),
                Family::Attention => attention::run(&call),
                Family::Loss => loss::run(&call),
                Family::Moe => moe::run(&call),
                Family::Image => image::run(&call),
                // `Ops::few_rows` is 0.
                Family::Decode => Err(call.unsupported()),
                Family::Host(host) => {
                    let read: Vec<HostView<'_>> = call
                        .src
                        .iter()
                        .flatten()
                        .map(|v| access::host_view(v))
                        .collect();
                    let mut write: Vec<HostViewMut<'_>> = call
                        .dst
                        .iter()
                        .flatten()
                        .map(|v| access::host_view_mut(v))
                        .collect();
                    host.run(&read, &mut write)
                }
            }
        }
    }
}
