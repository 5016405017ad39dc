//! Tensors: a piece of a worker's memory with a type and a layout, and perhaps a place on a tape.
//!
//! A tensor never changes after the operation that made it, with one exception: gradient
//! accumulators, which only the tape that owns them writes. Cloning shares the memory; the memory
//! goes back to the pool with the last clone.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{Copy, Device, Direction, Event, LaneKind};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostMut, HostRef};
use crate::kernel::View;
use crate::pool::{Block, Pool};
use crate::shape::{Layout, Shape};
use crate::tape::NodeRef;
use crate::worker::Worker;

/// A typed, shaped piece of device memory.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    dtype: DType,
    layout: Layout,
    /// First element, counted from the start of the storage.
    offset: usize,
    pub(crate) node: Option<NodeRef>,
}

/// A tensor whose memory stays where it is.
pub(crate) struct PinnedTensor(Tensor);

impl Drop for PinnedTensor {
    fn drop(&mut self) {
        if let Storage::Block(block) = &*self.0.storage {
            block.unpin();
        }
    }
}

/// The memory behind a tensor.
#[derive(Debug)]
pub(crate) enum Storage {
    Block(Block),
    /// Host memory read in place (cpu only), and the pool of the worker that reads it.
    Host(HostRef, Arc<Pool>),
}

impl Storage {
    fn addr(&self) -> u64 {
        match self {
            Self::Block(block) => block.addr(),
            Self::Host(host, _) => host.addr(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Block(block) => block.bytes(),
            Self::Host(host, _) => host.bytes().len() as u64,
        }
    }

    fn pool(&self) -> &Arc<Pool> {
        match self {
            Self::Block(block) => block.pool(),
            Self::Host(_, pool) => pool,
        }
    }
}

impl Tensor {
    /// A dense tensor over a whole block.
    pub(crate) fn from_block(block: Block, dtype: DType, shape: Shape) -> Self {
        assert!(
            shape.numel() * dtype.size() <= block.bytes() as usize,
            "{dtype} {shape} in {block:?}"
        );
        let layout = Layout::contiguous(shape);
        Self {
            storage: Arc::new(Storage::Block(block)),
            dtype,
            layout,
            offset: 0,
            node: None,
        }
    }

    /// A dense tensor over host memory that the worker reads in place.
    ///
    /// # Errors
    /// As [`Tensor::within`].
    pub(crate) fn from_host(
        host: HostRef,
        pool: Arc<Pool>,
        dtype: DType,
        shape: Shape,
    ) -> Result<Self> {
        Self::within(Arc::new(Storage::Host(host, pool)), 0, dtype, shape)
    }

    /// A dense tensor `first_byte` bytes into a storage that others may share.
    ///
    /// # Errors
    /// When the storage ends before or its addresses do not suit the type.
    pub(crate) fn within(
        storage: Arc<Storage>,
        first_byte: u64,
        dtype: DType,
        shape: Shape,
    ) -> Result<Self> {
        let memory = storage.addr()..storage.addr() + storage.bytes();
        shape.byte_range("tensor", dtype, memory, first_byte)?;
        let size = dtype.size() as u64;
        if !first_byte.is_multiple_of(size) {
            let what =
                format!("{dtype} {shape} at byte {first_byte}, which is not a multiple of {size}");
            return Err(Error::invalid("tensor", what));
        }
        let layout = Layout::contiguous(shape);
        Ok(Self {
            storage,
            dtype,
            layout,
            offset: (first_byte / size) as usize,
            node: None,
        })
    }

    /// Whether both are the same memory under the same layout: a value that was passed on
    /// unchanged.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
            && self.offset == other.offset
            && self.layout == other.layout
            && self.dtype == other.dtype
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// Sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        self.layout.shape().dims()
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape().rank()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape().numel()
    }

    /// Size of the values, laid out densely.
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether elements lie densely in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// The worker whose memory holds this.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.storage.pool().device()
    }

    /// Whether a backward pass would reach this value.
    pub fn requires_grad(&self) -> bool {
        self.node.is_some()
    }

    /// The same value cut off from the tape.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self {
            node: None,
            ..self.clone()
        }
    }

    /// As [`Tensor::detach`], giving up this handle.
    pub(crate) fn off_tape(mut self) -> Self {
        self.node = None;
        self
    }

    /// The memory as kernels see it.
    pub fn view(&self) -> View {
        let ptr = self.storage.addr() + (self.offset * self.dtype.size()) as u64;
        View {
            ptr,
            dtype: self.dtype,
            layout: self.layout,
        }
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        self.storage.pool()
    }

    pub(crate) fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Its memory stays where it is from now on: for a tensor of a [`Worker::moving`] that another
    /// thread will copy behind an event of now.
    pub fn pin(&self) {
        if let Storage::Block(block) = &*self.storage {
            block.pin();
        }
    }

    /// Keeps its memory where it is while this lives; `None` if no other thread may move it.
    pub(crate) fn pinned(&self) -> Option<PinnedTensor> {
        let Storage::Block(block) = &*self.storage else {
            return None;
        };
        block.is_moved_by_others().then(|| {
            block.pin();
            PinnedTensor(self.detach())
        })
    }

    /// Another lane reads its memory until `event`, so a move waits for that.
    pub(crate) fn read_until(&self, event: &Event) {
        if let Storage::Block(block) = &*self.storage {
            block.read_until(event);
        }
    }

    /// Whether its memory lies where values stay while other tasks run.
    pub fn is_long(&self) -> bool {
        matches!(&*self.storage, Storage::Block(block) if block.is_long())
    }

    /// Whether its memory is what keeps working memory from growing further.
    pub fn is_at_frontier(&self) -> bool {
        matches!(&*self.storage, Storage::Block(block) if block.is_at_frontier())
    }

    /// Whether it leaves the claim of the task under way whole, and working memory room for `working`
    /// bytes in all.
    pub fn lies_beside(&self, working: u64) -> bool {
        !matches!(&*self.storage, Storage::Block(block) if !block.lies_beside(working))
    }

    /// Whether this tensor is the only holder of its memory, so that it may be written again.
    pub(crate) fn is_unique(&self) -> bool {
        if Arc::strong_count(&self.storage) != 1 {
            return false;
        }
        // The last holder on another thread has read it by now: pairs with the release of its drop.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        matches!(*self.storage, Storage::Block(_))
    }

    /// Whether the memory is the worker's own, not a host buffer that it only reads.
    pub(crate) fn is_writable(&self) -> bool {
        matches!(*self.storage, Storage::Block(_))
    }

    /// The same memory under another layout, without a place on the tape.
    pub(crate) fn with_layout(&self, layout: Layout, offset: usize) -> Self {
        Self {
            storage: self.storage.clone(),
            dtype: self.dtype,
            layout,
            offset,
            node: None,
        }
    }

    /// The same memory under another layout from the same first element, without a place on the
    /// tape.
    pub(crate) fn relaid(&self, layout: Layout) -> Self {
        self.with_layout(layout, self.offset)
    }

    /// `len` elements from `start` on along `axis`; bounds are the caller's business.
    pub(crate) fn narrowed(&self, axis: usize, start: usize, len: usize) -> Self {
        let shape = self.shape().cut(axis, len);
        let shift = if self.numel() == 0 {
            0
        } else {
            start as isize * self.layout.strides()[axis]
        };
        let layout = Layout::strided(shape, self.layout.strides());
        self.with_layout(layout, self.offset.wrapping_add_signed(shift))
    }

    /// Some of its rows: places of the first dimension. The memory is shared.
    ///
    /// # Panics
    /// When a row lies outside it.
    pub fn rows(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.dims()[0],
            "rows {range:?} of {self:?}"
        );
        self.narrowed(0, range.start, range.len())
    }

    /// Copies the elements to the host, in row-major order, after waiting for the compute lane.
    ///
    /// # Errors
    /// When `T` is not this tensor's type (bool reads as u8), on the meta device, or when the
    /// device failed.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        const OP: &str = "to_vec";
        if T::DTYPE != self.dtype && !(self.dtype == DType::Bool && T::DTYPE == DType::U8) {
            let what = format!(
                "asked for {} of a {} tensor {}",
                T::DTYPE,
                self.dtype,
                self.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let host = HostBuf::zeroed(OP, self.size_bytes())?;
        self.read_into(&mut host.write(0..host.len())?)?;
        Ok(host.read_all()?.as_slice::<T>().to_vec())
    }

    /// Copies the elements into host memory, in row-major order, after waiting for the compute
    /// lane.
    ///
    /// # Errors
    /// When the memory is not exactly as large as the tensor, on the meta device, or when the
    /// device failed.
    pub fn read_into(&self, host: &mut HostMut) -> Result<()> {
        const OP: &str = "read";
        let bytes = self.size_bytes();
        if host.bytes().len() != bytes {
            let what = format!(
                "{} {} into {} bytes of host memory",
                self.dtype,
                self.shape(),
                host.bytes().len()
            );
            return Err(Error::invalid(OP, what));
        }
        if bytes == 0 {
            return Ok(());
        }
        self.pool().note_unseen();
        let dense = Worker::of(self).contiguous(self)?;
        let _pin = dense.pinned();
        let copy = Copy {
            what: OP.to_owned(),
            direction: Direction::Download,
            src: dense.view().ptr,
            dst: host.addr(),
            bytes: bytes as u64,
        };
        let compute = self.device().lane(LaneKind::Compute);
        // SAFETY: `dense` holds the source and `host` the destination, both of `bytes` bytes, past
        // the fence; the lane orders the copy behind the kernels that wrote the source.
        unsafe { compute.copy(&copy)? };
        compute.record()?.fence()
    }

    /// Copies the elements to the host as f64, whatever their type.
    ///
    /// # Errors
    /// On the meta device, or when the device failed.
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        fn read<T: Element>(t: &Tensor) -> Result<Vec<f64>> {
            Ok(t.to_vec::<T>()?.into_iter().map(Element::to_f64).collect())
        }
        match self.dtype {
            DType::F64 => self.to_vec(),
            DType::F32 => read::<f32>(self),
            DType::BF16 => read::<half::bf16>(self),
            DType::F16 => read::<half::f16>(self),
            DType::I64 => read::<i64>(self),
            DType::I32 => read::<i32>(self),
            DType::U32 => read::<u32>(self),
            DType::U8 | DType::Bool => read::<u8>(self),
        }
    }

    /// The one element of a tensor that has one.
    ///
    /// # Errors
    /// When there is not exactly one element, and as [`Tensor::to_f64_vec`].
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(Error::invalid(
                "item",
                format!("{} has {} elements", self.shape(), self.numel()),
            ));
        }
        Ok(self.to_f64_vec()?[0])
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensor({} {} on {})",
            self.dtype,
            self.shape(),
            self.device().id()
        )
    }
}
