//! Host memory: page-aligned, exactly sized buffers, lent out by range.
//!
//! A buffer is anonymous memory (zero-filled, committed by the system when first touched), a mapped
//! file (read-only), memory that a device driver gave, or none at all: bytes that a function makes
//! whenever they are read ([`HostBuf::made_on_read`], read-only). Its bytes are reachable only through
//! [`HostRef`] and [`HostMut`], which hold their range until dropped: a transfer keeps its guard,
//! so no other code can write what a copy still reads. There is no padding: a buffer of n bytes
//! takes n bytes, rounded to pages by the system alone. A [`HostBuf::slice`] is a view of part of a
//! buffer: it shares the memory and the claims on it, so a flat slab can be the home of many
//! parameters.
//!
//! # Invariants
//! - At any time a byte is either unclaimed, claimed by readers, or claimed by one writer.
//! - A mapped file is never written.
//! - Bytes made on read are made once for all who read them at the same time, and take no memory
//!   while no guard holds them.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::bytes::Bytes;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::pages::{PAGE, Pages};
use crate::shape::Shape;
use crate::sync::lock;

/// Large buffers start a few pages apart from where the system puts them: slabs of one size mapped
/// back to back would otherwise fall on the same cache sets, and a pass over several of them takes
/// twice as long. The unused pages are address space, never memory.
const COLORED: usize = 1 << 20;
const COLORS: usize = 16;

/// How host memory is tied to physical pages, so that a device can copy from it at full speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Pin {
    /// Page-locked memory from the device's driver as long as it has any, pageable memory from then
    /// on. How much became which: [`Device::pins`](crate::Device::pins).
    #[default]
    Try,
    /// Page-locked memory from the device's driver, or an error.
    Alloc,
    /// Ordinary pages, registered with the driver afterwards, or an error.
    Register,
    /// Pageable memory.
    Off,
}

/// A piece of host memory; cloning shares it.
#[derive(Clone)]
pub struct HostBuf {
    memory: Arc<Inner>,
    /// The part of the memory that this value shows.
    view: Range<usize>,
}

/// The bytes of a view at one moment ([`HostBuf::mark`]): of two equal marks, the later one found the
/// same view, and it was not lent for writing in between. A mark keeps no bytes alive, and no other
/// memory has an equal one, also after its own is gone.
#[derive(Debug, Clone)]
pub struct HostMark {
    /// While it is held, nothing else is allocated at the address that it is compared by.
    memory: Weak<Inner>,
    view: Range<usize>,
    writes: u64,
}

impl PartialEq for HostMark {
    fn eq(&self, other: &Self) -> bool {
        self.memory.ptr_eq(&other.memory) && self.view == other.view && self.writes == other.writes
    }
}

struct Inner {
    name: String,
    ptr: *mut u8,
    writable: bool,
    pinned: bool,
    claims: Mutex<Claims>,
    /// Where there is no memory behind `ptr`: how to get some.
    made_on_read: Option<MadeOnRead>,
    /// What sees bytes before they are lent for writing.
    watch: OnceLock<Box<Watch>>,
    /// Keeps the memory behind `ptr` alive.
    owner: Box<dyn Any + Send + Sync>,
}

/// Fills a buffer whose bytes are made on read.
type Make = dyn Fn(&HostBuf) -> Result<()> + Send + Sync;

/// Sees the bytes of a range before it is lent for writing.
type Watch = dyn Fn(Range<usize>, &[u8]) -> Result<()> + Send + Sync;

/// Bytes that exist while they are read.
struct MadeOnRead {
    bytes: usize,
    make: Box<Make>,
    /// Those that are being read now.
    made: Mutex<Weak<Inner>>,
}

impl MadeOnRead {
    /// All bytes, made now unless another reader holds them already.
    fn get(&self, name: &str) -> Result<HostBuf> {
        let mut made = lock(&self.made);
        if let Some(memory) = made.upgrade() {
            return Ok(HostBuf {
                memory,
                view: 0..self.bytes,
            });
        }
        let buf = HostBuf::zeroed(name, self.bytes)?;
        (self.make)(&buf)?;
        *made = Arc::downgrade(&buf.memory);
        Ok(buf)
    }
}

#[derive(Default)]
struct Claims {
    next: u64,
    /// How often each range was claimed for writing.
    written: Vec<(Range<usize>, u64)>,
    live: Vec<(u64, Range<usize>, bool)>,
}

/// Ranges that [`HostBuf::writes`] counts apart; more are counted as one.
const COUNTED_APART: usize = 4096;

impl Claims {
    fn count_write(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        if let Some((_, count)) = self.written.iter_mut().find(|(known, _)| known == range) {
            *count += 1;
            return;
        }
        if self.written.len() < COUNTED_APART {
            self.written.push((range.clone(), 1));
            return;
        }
        // Too coarse is safe: a reader of the count takes unchanged bytes for changed.
        let whole =
            self.written
                .drain(..)
                .fold((range.clone(), 1), |(all, sum), (range, count)| {
                    (
                        all.start.min(range.start)..all.end.max(range.end),
                        sum + count,
                    )
                });
        self.written.push(whole);
    }
}

// SAFETY: `ptr` points into memory kept alive by `owner`, which is itself `Send + Sync`; access
// goes through guards whose ranges the `claims` mutex keeps disjoint wherever one of them writes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl HostBuf {
    /// Zero-filled, pageable memory.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system has none.
    pub fn zeroed(name: impl Into<String>, bytes: usize) -> Result<Self> {
        let slack = if bytes >= COLORED { COLORS * PAGE } else { 1 };
        let fail = |cause| Error::HostMemory {
            what: "a buffer",
            need: Bytes(bytes as u64),
            cause,
        };
        let len = bytes
            .checked_add(slack)
            .ok_or_else(|| fail(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut pages = Pages::zeroed(len, false).map_err(fail)?;
        let base = pages.ptr();
        let color = if bytes >= COLORED {
            base as usize / len % COLORS
        } else {
            0
        };
        let ptr = base.wrapping_add(color * PAGE);
        Ok(Self::wrap(name.into(), ptr, bytes, true, Box::new(pages)))
    }

    /// Memory that holds a copy of `values`.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system has none.
    pub fn from_slice<T: Element>(name: impl Into<String>, values: &[T]) -> Result<Self> {
        let buf = Self::zeroed(name, size_of_val(values))?;
        buf.write(0..buf.len())?
            .as_mut_slice::<T>()
            .copy_from_slice(values);
        Ok(buf)
    }

    /// A read-only view of a file's bytes, loaded as they are touched.
    ///
    /// # Errors
    /// [`Error::Map`] when the file cannot be opened or mapped.
    pub fn map_file(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).map_err(|cause| Error::Map {
            path: path.to_owned(),
            cause,
        })?;
        Self::map_opened(&file, path)
    }

    /// The same of a file that is open already; `path` is its name in messages.
    ///
    /// # Errors
    /// [`Error::Map`] when the file cannot be mapped.
    pub fn map_opened(file: &std::fs::File, path: &Path) -> Result<Self> {
        let fail = |cause| Error::Map {
            path: path.to_owned(),
            cause,
        };
        let len = file.metadata().map_err(fail)?.len();
        let name = path.display().to_string();
        if len == 0 {
            return Self::zeroed(name, 0);
        }
        // SAFETY: the mapping is read-only and private to this value. Another process that
        // truncates the file while it is mapped makes reads fault; that is the documented price of
        // mapping.
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(fail)?;
        let (ptr, len) = (map.as_ptr().cast_mut(), map.len());
        Ok(Self::wrap(name, ptr, len, false, Box::new(map)))
    }

    /// `bytes` bytes without memory: `make` writes all of them into a zeroed buffer of that size
    /// at a read, and the memory is given back with the last guard. It must write the same
    /// bytes each time, and must not read this buffer.
    pub fn made_on_read(
        name: impl Into<String>,
        bytes: usize,
        make: impl Fn(&HostBuf) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let made_on_read = MadeOnRead {
            bytes,
            make: Box::new(make),
            made: Mutex::default(),
        };
        let memory = Inner {
            name: name.into(),
            // Never followed: every access goes to the memory that was made.
            ptr: std::ptr::without_provenance_mut(PAGE),
            writable: false,
            pinned: false,
            claims: Mutex::default(),
            made_on_read: Some(made_on_read),
            watch: OnceLock::new(),
            owner: Box::new(()),
        };
        Self {
            memory: Arc::new(memory),
            view: 0..bytes,
        }
    }

    /// `bytes` bytes that are not there yet: reading and writing are errors. It holds the place of
    /// values that [`Param::rehome`](crate::Param::rehome) brings.
    pub fn absent(name: impl Into<String>, bytes: usize) -> Self {
        Self::made_on_read(name, bytes, |buf| {
            let what = format!("{} has no values yet; load them first", buf.name());
            Err(Error::invalid("host buffer", what))
        })
    }

    /// Whether the bytes stay in a file, or are made on read: they take no memory for good and
    /// cannot be written.
    pub fn stays_in_file(&self) -> bool {
        self.memory.made_on_read.is_some() || self.memory.owner.is::<memmap2::Mmap>()
    }

    /// Whether the bytes are made on read: they take memory while they are read.
    pub fn is_made_on_read(&self) -> bool {
        self.memory.made_on_read.is_some()
    }

    /// Tells the system that the bytes of a mapped file will be read soon, so that it reads them
    /// from disk in large pieces. Other memory is left alone.
    pub fn expect_soon(&self) {
        #[cfg(unix)]
        if let Some(map) = self.memory.owner.downcast_ref::<memmap2::Mmap>() {
            // Only a hint.
            let _ = map.advise_range(memmap2::Advice::WillNeed, self.view.start, self.view.len());
        }
    }

    /// Tells the system that a mapped file will be read from front to back. Other memory is left
    /// alone.
    pub fn expect_stream(&self) {
        #[cfg(unix)]
        if let Some(map) = self.memory.owner.downcast_ref::<memmap2::Mmap>() {
            // Only a hint: pages are read ahead of their use.
            let _ = map.advise(memmap2::Advice::Sequential);
        }
    }

    /// Gives the pages of a mapped file that lie wholly in `range` back to the system: they stop
    /// counting as this process's memory, and who reads them again has them read from the file
    /// again. Other memory is left alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is out of bounds.
    pub fn let_go(&self, range: Range<usize>) -> Result<()> {
        self.check(&range)?;
        #[cfg(unix)]
        if let Some(map) = self.memory.owner.downcast_ref::<memmap2::Mmap>() {
            let start = (self.view.start + range.start).next_multiple_of(PAGE);
            let end = (self.view.start + range.end) / PAGE * PAGE;
            if start < end {
                // SAFETY: the map is a shared, read-only view of a file, so a page that is dropped
                // comes back with the file's bytes: a holder of a slice of it sees no
                // difference. Failure leaves everything as it was and costs memory only.
                let _ = unsafe {
                    map.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        end - start,
                    )
                };
            }
        }
        Ok(())
    }

    /// Memory that a device's driver allocated.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `bytes` bytes, initialised, page-aligned,
    /// reached through this value alone, and must stay so until `owner` is dropped.
    pub unsafe fn from_owner(
        name: impl Into<String>,
        ptr: *mut u8,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self::wrap(name.into(), ptr, bytes, true, owner)
    }

    fn wrap(
        name: String,
        ptr: *mut u8,
        len: usize,
        writable: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let memory = Inner {
            name,
            ptr,
            writable,
            pinned: false,
            claims: Mutex::default(),
            made_on_read: None,
            watch: OnceLock::new(),
            owner,
        };
        Self {
            memory: Arc::new(memory),
            view: 0..len,
        }
    }

    /// This memory, which has no other holder, marked as pinned or not, and `more` to be dropped
    /// before it: the next owner of the same pages must not find what `more` records about these.
    pub(crate) fn owned_by(self, pinned: bool, more: Box<dyn Any + Send + Sync>) -> Self {
        assert!(
            self.is_sole(),
            "{} is held elsewhere, by claims that would not be seen",
            self.name()
        );
        let Inner {
            name,
            ptr,
            writable,
            ..
        } = &*self.memory;
        let (name, ptr, writable, view) = (name.clone(), *ptr, *writable, self.view.clone());
        let memory = Inner {
            name,
            ptr,
            writable,
            pinned,
            claims: Mutex::default(),
            made_on_read: None,
            watch: OnceLock::new(),
            owner: Box::new((more, self)),
        };
        Self {
            memory: Arc::new(memory),
            view,
        }
    }

    /// A view of part of this one; offsets count from its start. Memory and claims are shared.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        self.check(&range)?;
        let start = self.view.start;
        Ok(Self {
            memory: self.memory.clone(),
            view: start + range.start..start + range.end,
        })
    }

    /// Whether both show the same bytes of the same memory.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory) && self.view == other.view
    }

    /// Whether this value is the only holder of the memory: no clone, no other view, no guard.
    pub fn is_sole(&self) -> bool {
        self.is_sole_but(0)
    }

    /// Whether only this value and `guards` guards of the caller hold the memory.
    pub(crate) fn is_sole_but(&self, guards: usize) -> bool {
        let sole = Arc::strong_count(&self.memory) == 1 + guards;
        // The last holder on another thread is done with the bytes: pairs with the release of its
        // drop.
        fence(Ordering::Acquire);
        sole
    }

    /// Where `dtype` `shape` lies in this memory, dense and from `first_byte` on.
    ///
    /// # Errors
    /// As [`Shape::byte_range`].
    pub(crate) fn byte_range(
        &self,
        op: &'static str,
        first_byte: usize,
        dtype: DType,
        shape: &Shape,
    ) -> Result<Range<usize>> {
        let memory = self.addr()..self.addr() + self.len() as u64;
        let bytes = shape.byte_range(op, dtype, memory, first_byte as u64)?;
        Ok(bytes.start as usize..bytes.end as usize)
    }

    /// As [`HostBuf::byte_range`] from the first byte to the last.
    ///
    /// # Errors
    /// As [`Shape::byte_range`], and when bytes are left over.
    pub(crate) fn place_all(&self, op: &'static str, dtype: DType, shape: &Shape) -> Result<()> {
        let need = shape.numel() * dtype.size();
        if need != self.len() {
            return Err(Error::invalid(
                op,
                format!("{dtype} {shape} needs {need} bytes, not {}", self.len()),
            ));
        }
        self.byte_range(op, 0, dtype, shape).map(drop)
    }

    /// Address of the first byte; who copies there must keep others away by other means than
    /// claims.
    pub(crate) fn addr(&self) -> u64 {
        self.memory.ptr as u64 + self.view.start as u64
    }

    /// Whether the first byte lies at a multiple of `bytes`, as a part of a mapped file may not.
    pub fn is_aligned_to(&self, bytes: usize) -> bool {
        self.addr().is_multiple_of(bytes as u64)
    }

    /// Whether a device's driver keeps the pages where they are.
    pub fn is_pinned(&self) -> bool {
        self.memory.pinned
    }

    /// What the buffer is for.
    pub fn name(&self) -> &str {
        &self.memory.name
    }

    /// Size in bytes, exact.
    pub fn len(&self) -> usize {
        self.view.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// How often bytes of this view were lent for writing, through any view of the memory. Who
    /// keeps a copy of the bytes sees by this number whether they may have changed.
    pub fn writes(&self) -> u64 {
        let claims = lock(&self.memory.claims);
        let meets = |(range, _): &&(Range<usize>, u64)| {
            range.start < self.view.end && self.view.start < range.end
        };
        claims
            .written
            .iter()
            .filter(meets)
            .map(|(_, count)| count)
            .sum()
    }

    /// The bytes of this view as they are, to ask later whether they still are.
    pub fn mark(&self) -> HostMark {
        HostMark {
            memory: Arc::downgrade(&self.memory),
            view: self.view.clone(),
            writes: self.writes(),
        }
    }

    /// Whether this is memory of [`HostBuf::zeroed`] that was never lent for writing: all zeros, and
    /// pages of it take no memory yet.
    pub fn is_untouched(&self) -> bool {
        self.memory.owner.is::<Pages>() && self.writes() == 0
    }

    /// Tells buffers apart while they live; clones and views of one memory agree.
    pub fn id(&self) -> u64 {
        Arc::as_ptr(&self.memory) as u64
    }

    /// Lends `range` for reading.
    ///
    /// # Errors
    /// [`Error::Busy`] while the range is being written; [`Error::Invalid`] when it is out of
    /// bounds.
    pub fn read(&self, range: Range<usize>) -> Result<HostRef> {
        let Some(made_on_read) = &self.memory.made_on_read else {
            return Ok(HostRef(self.claim(range, false)?));
        };
        self.check(&range)?;
        let made = made_on_read.get(self.name())?;
        made.slice(self.view.clone())?.read(range)
    }

    /// Lends the whole buffer for reading.
    ///
    /// # Errors
    /// [`Error::Busy`] while any of it is being written.
    pub fn read_all(&self) -> Result<HostRef> {
        self.read(0..self.len())
    }

    /// Lends `range` for writing.
    ///
    /// # Errors
    /// [`Error::Busy`] while the range is being read or written; [`Error::Invalid`] when it is out
    /// of bounds or its bytes stay in a file.
    pub fn write(&self, range: Range<usize>) -> Result<HostMut> {
        let lent = self.write_unwatched(range)?;
        if let Some(watch) = self.memory.watch.get() {
            watch(lent.0.range.clone(), lent.as_bytes())?;
        }
        Ok(lent)
    }

    /// Lends `range` for writing as [`HostBuf::write`] does, but what [`HostBuf::watch`] set does not
    /// see it: for who set it.
    ///
    /// # Errors
    /// As [`HostBuf::write`].
    pub fn write_unwatched(&self, range: Range<usize>) -> Result<HostMut> {
        if !self.memory.writable {
            let what = format!(
                "{} stays in a file, which is only read; load it into memory to change it",
                self.name()
            );
            return Err(Error::invalid("host buffer", what));
        }
        Ok(HostMut(self.claim(range, true)?))
    }

    /// Shows `watch` the bytes of every range of the memory before it is lent for writing, through
    /// any view; its error is the caller's. Ranges count from the start of the memory. There is one
    /// for the life of the memory: returns false where there is one already.
    pub fn watch(
        &self,
        watch: impl Fn(Range<usize>, &[u8]) -> Result<()> + Send + Sync + 'static,
    ) -> bool {
        self.memory.watch.set(Box::new(watch)).is_ok()
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len() {
            return Ok(());
        }
        let what = format!(
            "bytes {range:?} of {}, which has {}",
            self.name(),
            self.len()
        );
        Err(Error::invalid("host buffer", what))
    }

    fn claim(&self, range: Range<usize>, write: bool) -> Result<RangeGuard> {
        self.check(&range)?;
        let at = self.view.start + range.start..self.view.start + range.end;
        let mut claims = lock(&self.memory.claims);
        let clash = |(_, other, writes): &(u64, Range<usize>, bool)| {
            (write || *writes) && other.start < at.end && at.start < other.end
        };
        if claims.live.iter().any(clash) {
            return Err(Error::Busy {
                name: self.name().to_owned(),
                start: range.start,
                end: range.end,
            });
        }
        let id = claims.next;
        claims.next += 1;
        if write {
            claims.count_write(&at);
        }
        claims.live.push((id, at.clone(), write));
        Ok(RangeGuard {
            buf: self.memory.clone(),
            range: at,
            id,
        })
    }
}

impl fmt::Debug for HostBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf({}, {})", self.name(), Bytes(self.len() as u64))
    }
}

struct RangeGuard {
    buf: Arc<Inner>,
    range: Range<usize>,
    id: u64,
}

impl RangeGuard {
    fn ptr(&self) -> *mut u8 {
        // SAFETY: `range` was checked against the view when the claim was made, and every view
        // against the one it was cut from, the first of which is the whole memory.
        unsafe { self.buf.ptr.add(self.range.start) }
    }

    fn len(&self) -> usize {
        self.range.len()
    }

    /// Elements of type `T` in the range; panics when it does not hold whole, aligned ones.
    fn elements<T: Element>(&self) -> usize {
        assert!(
            self.ptr().cast::<T>().is_aligned(),
            "host range is not aligned for {}",
            T::DTYPE
        );
        assert_eq!(
            self.len() % size_of::<T>(),
            0,
            "host range holds no whole number of {}",
            T::DTYPE
        );
        self.len() / size_of::<T>()
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut claims = lock(&self.buf.claims);
        claims.live.retain(|(id, ..)| *id != self.id);
    }
}

impl fmt::Debug for RangeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{:?}]", self.buf.name, self.range)
    }
}

/// The right to read a range of a [`HostBuf`].
#[derive(Debug)]
pub struct HostRef(RangeGuard);

impl HostRef {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the claim keeps writers away from the range, and the guard keeps the memory
        // alive.
        unsafe { std::slice::from_raw_parts(self.0.ptr(), self.0.len()) }
    }

    /// The bytes as elements. Panics when the range does not hold whole, aligned elements.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        let count = self.0.elements::<T>();
        // SAFETY: alignment and length were just checked, every bit pattern is a valid `T`, and the
        // claim keeps writers away.
        unsafe { std::slice::from_raw_parts(self.0.ptr().cast(), count) }
    }

    /// Address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.0.ptr() as u64
    }
}

/// The right to write a range of a [`HostBuf`].
#[derive(Debug)]
pub struct HostMut(RangeGuard);

impl HostMut {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the claim is exclusive, and the guard keeps the memory alive.
        unsafe { std::slice::from_raw_parts(self.0.ptr(), self.0.len()) }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the claim is exclusive, and the guard keeps the memory alive.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr(), self.0.len()) }
    }

    /// The bytes as elements. Panics when the range does not hold whole, aligned elements.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        let count = self.0.elements::<T>();
        // SAFETY: alignment and length were just checked, every bit pattern is a valid `T`, and the
        // claim is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr().cast(), count) }
    }

    /// Address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.0.ptr() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::HostBuf;

    #[test]
    fn buffers_are_exact_zeroed_and_page_aligned() {
        // Miri looks at some of the bytes only.
        let step = if cfg!(miri) { 997 } else { 1 };
        for bytes in [0, 1, 4095, 4097, 5 << 20] {
            let buf = HostBuf::zeroed("t", bytes).unwrap();
            let all = buf.read_all().unwrap();
            assert_eq!((buf.len(), all.bytes().len()), (bytes, bytes));
            assert!(all.bytes().iter().step_by(step).all(|b| *b == 0));
            assert_eq!(all.addr() % 4096, 0);
        }
    }

    /// A watch sees what is about to be overwritten, whichever view is written; not what its own
    /// side writes. Its error gives the range back.
    #[test]
    fn a_watch_sees_bytes_before_they_are_written() {
        let buf = HostBuf::from_slice("weights", &[1u8, 2, 3, 4]).unwrap();
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let here = seen.clone();
        let is_new = buf.watch(move |range, bytes| {
            if range.end == 4 {
                return Err(crate::error::Error::invalid("test", "no"));
            }
            here.lock().unwrap().push((range, bytes.to_vec()));
            Ok(())
        });
        assert!(is_new && !buf.watch(|_, _| Ok(())));
        let view = buf.slice(1..4).unwrap();
        view.write(0..2).unwrap().bytes().fill(9);
        view.write_unwatched(0..2).unwrap().bytes().fill(8);
        view.write(0..1).unwrap();
        assert!(view.write(0..3).is_err());
        assert_eq!(buf.read_all().unwrap().bytes(), [1, 8, 8, 4]);
        let expected = [(1..3, vec![2, 3]), (1..2, vec![8])];
        assert_eq!(*seen.lock().unwrap(), expected);
    }

    /// A copy that is under way must never see its source change.
    #[test]
    fn overlapping_writes_are_refused_while_a_guard_lives() {
        let buf = HostBuf::from_slice("weights", &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        let reading = buf.read(0..8).unwrap();
        assert!(buf.read(4..12).is_ok(), "readers share");
        assert!(buf.write(8..16).is_ok(), "disjoint ranges do not meet");
        let text = buf.write(4..12).unwrap_err().to_string();
        assert!(text.contains("weights") && text.contains("4..12"), "{text}");
        drop(reading);
        let writing = buf.write(4..12).unwrap();
        assert!(buf.read(0..8).is_err());
        drop(writing);
        assert!(buf.read_all().is_ok());
        assert!(buf.read(8..20).is_err(), "past the end");
    }

    /// A slab's parameters are claimed one by one, and a view reaches nothing beyond its end.
    #[test]
    fn a_slice_shares_memory_and_claims() {
        let slab = HostBuf::from_slice("slab", &[1u8, 2, 3, 4, 5, 6]).unwrap();
        let part = slab.slice(1..5).unwrap().slice(1..4).unwrap();
        assert_eq!(
            (part.len(), part.read_all().unwrap().bytes()),
            (3, &[3u8, 4, 5][..])
        );
        let mut writing = part.write(1..2).unwrap();
        writing.bytes()[0] = 40;
        assert!(slab.read(3..4).is_err() && slab.read(2..3).is_ok() && slab.write(4..6).is_ok());
        drop(writing);
        assert_eq!(slab.read_all().unwrap().bytes(), [1, 2, 3, 40, 5, 6]);
        assert!(part.read(0..4).is_err() && part.slice(2..4).is_err());
        assert!(!slab.is_sole());
        drop(part);
        assert!(slab.is_sole());
    }

    /// Writes are counted where they may have changed something, through whichever view.
    #[test]
    fn zeros_are_untouched_until_they_are_lent_for_writing() {
        let slab = HostBuf::zeroed("slab", 4096).unwrap();
        let (first, second) = (slab.slice(0..16).unwrap(), slab.slice(16..32).unwrap());
        drop(first.read_all().unwrap());
        assert!(slab.is_untouched() && first.is_untouched());
        drop(first.write(0..4).unwrap());
        assert!(!slab.is_untouched() && !first.is_untouched() && second.is_untouched());
        assert!(
            !HostBuf::from_slice("values", &[0.0_f32])
                .unwrap()
                .is_untouched()
        );
    }

    #[test]
    fn writes_are_counted_by_range() {
        let slab = HostBuf::zeroed("slab", 4096).unwrap();
        let (first, second) = (slab.slice(0..16).unwrap(), slab.slice(16..32).unwrap());
        let counts = || (slab.writes(), first.writes(), second.writes());
        drop(first.read_all().unwrap());
        assert_eq!(counts(), (0, 0, 0));
        drop(first.write(0..4).unwrap());
        drop(first.write(0..4).unwrap());
        assert_eq!(counts(), (2, 2, 0));
        drop(slab.write(8..20).unwrap());
        assert_eq!(counts(), (3, 3, 1));
        for start in 100..600 {
            drop(slab.write(start..start + 1).unwrap());
        }
        let (all, ..) = counts();
        assert_eq!(all, 503, "however many ranges there are");
        let before = second.writes();
        drop(second.write(0..16).unwrap());
        assert!(second.writes() > before);
    }

    /// A holder that finds itself alone may write the memory without a claim: all reads are over.
    /// (A machine rarely shows the difference; Miri does.)
    #[test]
    fn reads_are_over_when_memory_is_sole() {
        let buf = HostBuf::from_slice("b", &[7u8; 64]).unwrap();
        let reader = buf.read_all().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || assert_eq!(reader.bytes(), [7; 64]));
            while !buf.is_sole() {
                std::thread::yield_now();
            }
            // SAFETY: inside the buffer, which has no other holder.
            unsafe { (buf.addr() as *mut u8).write(8) };
        });
        assert_eq!(buf.read(0..2).unwrap().bytes(), [8, 7]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn a_mapped_file_reads_and_refuses_writes() {
        let path = std::env::temp_dir().join(format!("roundpipe-map-{}", std::process::id()));
        std::fs::write(&path, b"hello").unwrap();
        let buf = HostBuf::map_file(&path).unwrap();
        assert_eq!(buf.read_all().unwrap().bytes(), b"hello");
        assert!(buf.write(0..1).is_err());
        buf.expect_stream();
        assert!(buf.let_go(0..6).is_err(), "past the end");
        std::fs::remove_file(&path).unwrap();
        assert!(
            HostBuf::map_file(&path)
                .unwrap_err()
                .to_string()
                .contains("roundpipe-map")
        );
    }

    /// Bytes made on read are there while they are read, once for all readers, and gone after it.
    #[test]
    fn bytes_made_on_read_are_made_once_for_all_readers() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = made.clone();
        let buf = HostBuf::made_on_read("weights", 8, move |buf| {
            count.fetch_add(1, Ordering::Relaxed);
            let mut bytes = buf.write(0..8)?;
            bytes.bytes().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
            Ok(())
        });
        assert!(buf.stays_in_file() && !buf.is_untouched() && buf.write(0..1).is_err());
        let part = buf.slice(2..6).unwrap().slice(1..3).unwrap();
        let first = part.read_all().unwrap();
        let second = buf.read(0..2).unwrap();
        assert_eq!((first.bytes(), second.bytes()), (&[4, 5][..], &[1, 2][..]));
        assert_eq!(made.load(Ordering::Relaxed), 1);
        drop((first, second));
        assert_eq!(part.read(1..2).unwrap().bytes(), [5]);
        assert_eq!(made.load(Ordering::Relaxed), 2);
        assert!(
            part.read(1..3).is_err() && buf.slice(7..9).is_err(),
            "past the end"
        );
        let text = HostBuf::absent("w", 4).read_all().unwrap_err().to_string();
        assert!(text.contains("w has no values yet"), "{text}");
    }

    /// Pages that were given back hold the file's bytes again when they are read again, and other
    /// memory keeps its own.
    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn pages_that_were_let_go_come_back() {
        let path = std::env::temp_dir().join(format!("roundpipe-let-go-{}", std::process::id()));
        let bytes: Vec<u8> = (0..40_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = HostBuf::map_file(&path).unwrap();
        let memory = HostBuf::from_slice("memory", &bytes).unwrap();
        for buf in [&file, &memory] {
            let held = buf.read_all().unwrap();
            assert_eq!(held.bytes(), bytes);
            buf.let_go(100..39_000).unwrap();
            assert_eq!(held.bytes(), bytes);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
