//! A worker as operations see it: memory from its pool, kernels on its compute lane.
//!
//! What is here never records on a tape; the tape and the operations of [`Cx`](crate::cx::Cx) stand
//! on it.

use std::sync::{Arc, Mutex};

use crate::bytes::Bytes;
use crate::device::{Copy, Device, Direction, Faults, LaneKind, Replay};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::host::HostBuf;
use crate::kernel::{Kernel, View};
use crate::kernel_times::{self, KernelTime};
use crate::pool::{Block, Pool, PoolUse};
use crate::repeat::{ActiveWatch, Watch, Watched};
use crate::shape::{Layout, Shape};
use crate::sync::lock;
use crate::tensor::{PinnedTensor, Tensor};

/// A device with its reserved memory; cloning shares both.
#[derive(Debug, Clone)]
pub struct Worker {
    pool: Arc<Pool>,
    /// Where kernels launched through this value report bad data.
    faults: Option<Arc<Faults>>,
    /// What the kernels of a recording touch.
    held: Option<Arc<Mutex<Vec<Tensor>>>>,
    /// Who notes memory and launches, and leaves some out.
    watch: Option<ActiveWatch>,
    /// Whether its tensors may be moved, see [`Worker::moving`].
    moves: bool,
}

/// Kernels that were launched once and can be launched again, see [`Worker::record`].
pub struct Recording {
    replay: Box<dyn Replay>,
    /// Every tensor that its kernels touch: their memory is no other's while this lives.
    held: Vec<Tensor>,
}

impl Recording {
    /// Queues the kernels again. They read and write the memory they were recorded with.
    ///
    /// # Errors
    /// What the device reports.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: the tensors of all launches are held here, so their memory is as it was.
        unsafe { self.replay.launch() }
    }
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Recording of {} tensors", self.held.len())
    }
}

impl Worker {
    /// Reserves `bytes` on `device`: all the memory that tensors of this worker will ever use.
    ///
    /// # Errors
    /// When the device has less.
    pub fn new(device: Arc<dyn Device>, bytes: Bytes) -> Result<Self> {
        Ok(Self {
            pool: Pool::reserve(device, bytes)?,
            faults: None,
            held: None,
            watch: None,
            moves: false,
        })
    }

    /// The worker whose memory holds `tensor`.
    pub fn of(tensor: &Tensor) -> Self {
        Self {
            pool: tensor.pool().clone(),
            faults: None,
            held: None,
            watch: None,
            moves: false,
        }
    }

    /// The same worker, watched while a layer runs through it; [`Worker::end_watch`] ends that.
    #[must_use]
    pub fn watched(&self, watch: Watch) -> Self {
        Self {
            watch: Some(ActiveWatch::begin(watch, &self.pool)),
            ..self.clone()
        }
    }

    /// Ends the watch and gives what it saw; `None` where there was none.
    pub fn end_watch(&mut self) -> Option<Watched> {
        let watch = self.watch.take()?;
        Some(watch.end(&self.pool))
    }

    /// A place where the kernels of one piece of work report bad data; `None` where launches return
    /// such errors.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn open_faults(&self) -> Result<Option<Arc<Faults>>> {
        Faults::open(self.device())
    }

    /// The same worker, whose kernels report bad data to `faults` instead of to the lane's events.
    #[must_use]
    pub fn reporting_to(&self, faults: Option<Arc<Faults>>) -> Self {
        Self {
            faults,
            ..self.clone()
        }
    }

    /// The same worker, whose tensors may be moved to join the holes between them when a request
    /// finds none that is large enough. A thread moves only what it allocated itself; operations of
    /// other threads keep their operands in place until they are queued.
    #[must_use]
    pub fn moving(&self) -> Self {
        Self {
            moves: true,
            ..self.clone()
        }
    }

    /// Records the kernels that `body` launches through the worker it is given, without running
    /// them; `None`, without a call of `body`, where the device gains nothing by it. `body` launches
    /// kernels and nothing else: it waits for nothing and moves nothing to or from the host.
    ///
    /// # Errors
    /// What `body` or the device reports.
    pub fn record<R>(
        &self,
        body: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<Option<(Recording, R)>> {
        let held = Arc::new(Mutex::new(Vec::new()));
        let worker = Self {
            held: Some(held.clone()),
            ..self.clone()
        };
        let (mut body, mut out) = (Some(body), None);
        let replay = self.device().capture(&mut || {
            let Some(body) = body.take() else {
                return Err(Error::invalid("record", "a step is recorded once"));
            };
            out = Some(body(&worker)?);
            Ok(())
        })?;
        let held = std::mem::take(&mut *lock(&held));
        Ok(replay
            .zip(out)
            .map(|(replay, out)| (Recording { replay, held }, out)))
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.pool.device()
    }

    /// The memory.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// What is and was in use of the memory.
    pub fn usage(&self) -> PoolUse {
        self.pool.usage()
    }

    /// The host waits for all kernels queued so far. This is how to go on after a failure: until
    /// then, reads and uploads of values return it again.
    ///
    /// # Errors
    /// What went wrong since the last such wait.
    pub fn fence(&self) -> Result<()> {
        self.device().lane(LaneKind::Compute).fence()
    }

    /// A dense tensor with undefined contents.
    pub(crate) fn alloc(&self, op: &'static str, dtype: DType, shape: Shape) -> Result<Tensor> {
        let alloc = || self.alloc_unwatched(op, dtype, shape);
        match &self.watch {
            Some(watch) => watch.take(&self.pool, op, dtype, shape, alloc),
            None => alloc(),
        }
    }

    fn alloc_unwatched(&self, op: &'static str, dtype: DType, shape: Shape) -> Result<Tensor> {
        let bytes = (shape.numel() * dtype.size()) as u64;
        let block = if self.moves {
            self.pool.alloc_movable(op, bytes)
        } else {
            self.pool.alloc(op, bytes)
        }?;
        Ok(Tensor::from_block(block, dtype, shape))
    }

    /// As [`Worker::alloc`], in memory for values that stay while other tasks run, if there is room.
    pub(crate) fn alloc_long(
        &self,
        op: &'static str,
        dtype: DType,
        shape: Shape,
    ) -> Result<Tensor> {
        let bytes = (shape.numel() * dtype.size()) as u64;
        match self.pool.alloc_long(op, bytes) {
            Ok(block) => Ok(Tensor::from_block(block, dtype, shape)),
            Err(Error::DeviceMemory { .. }) => self.alloc(op, dtype, shape),
            Err(error) => Err(error),
        }
    }

    /// Queues a kernel on the compute lane. The caller has checked the operands and owns the
    /// destinations (fresh, or accumulators that only this launch writes).
    pub(crate) fn launch(
        &self,
        kernel: &Kernel,
        src: &[Option<&Tensor>],
        dst: &[Option<&Tensor>],
    ) -> Result<()> {
        for tensor in src.iter().chain(dst).flatten() {
            self.check_home(kernel.name(), tensor)?;
        }
        // Nothing to write is nothing to do. Kernels need not care for such operands, whose other
        // sizes may be of any magnitude: they take no memory. What a user's kernel does beside
        // writing is the user's business.
        let idle = dst.iter().flatten().all(|tensor| tensor.numel() == 0);
        if idle && !matches!(kernel, Kernel::Host(_)) {
            return Ok(());
        }
        match &self.watch {
            Some(watch) if !watch.launch(&**self.device(), kernel, src, dst)? => return Ok(()),
            Some(_) => {}
            None => self.pool.note_unseen(),
        }
        let operands = || src.iter().chain(dst).flatten();
        // Other threads may move what they allocated, but not before the kernel is queued.
        let _pins: Vec<PinnedTensor> = operands().filter_map(|tensor| tensor.pinned()).collect();
        let ops = self.device().ops();
        let scratch = match ops.scratch(kernel, &views(src), &views(dst)) {
            0 => None,
            bytes => {
                let shape = Shape::new(&[bytes])?;
                Some(self.alloc_unwatched(kernel.name(), DType::U8, shape)?)
            }
        };
        if let Some(held) = &self.held {
            let mut held = lock(held);
            held.extend(operands().map(|tensor| tensor.detach()));
            held.extend(scratch.clone());
            held.iter().for_each(Tensor::pin);
        }
        // Behind the scratch: making room for it may have moved the operands.
        let (src, dst) = (views(src), views(dst));
        debug_assert!(
            disjoint(kernel, &src, &dst),
            "{kernel:?}: a destination overlaps another operand"
        );
        let lane = self.device().lane(LaneKind::Compute);
        let scratch = scratch.as_ref().map(Tensor::view);
        let faults = self.faults.as_deref();
        // SAFETY: the views come from live tensors of this worker; their blocks go back to the pool
        // in the host order of this same lane, so the memory stays theirs until the kernel has run;
        // the caller checked shapes and types and owns the destinations.
        let launch = || unsafe { ops.launch(lane, kernel, &src, &dst, scratch, faults) };
        let what = || kernel_times::describe(kernel, &src, &dst);
        self.pool.kernel_times().around(lane, what, launch)
    }

    /// Starts or ends timing every kernel of this worker, by all who launch on it. Timing slows the
    /// lane down a little; starting forgets earlier times.
    pub fn time_kernels(&self, is_on: bool) {
        self.pool.kernel_times().set(is_on);
    }

    /// What kernels took between [`Worker::time_kernels`] and now, the longest first; those that have
    /// not ended are left out.
    pub fn kernel_times(&self) -> Vec<KernelTime> {
        self.pool.kernel_times().report()
    }

    pub(crate) fn check_home(&self, op: &'static str, tensor: &Tensor) -> Result<()> {
        if Arc::ptr_eq(&self.pool, tensor.pool()) {
            return Ok(());
        }
        let (there, here) = (tensor.device().id(), self.device().id());
        let what = format!(
            "{} {} lives on another worker ({there}), not on {here}",
            tensor.dtype(),
            tensor.shape()
        );
        Err(Error::Foreign { op, what })
    }

    /// A tensor filled with one value.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn full(&self, dtype: DType, shape: Shape, value: f64) -> Result<Tensor> {
        let out = self.alloc("full", dtype, shape)?;
        self.launch(&Kernel::Fill { value }, &[], &[Some(&out)])?;
        Ok(out)
    }

    /// A tensor holding a copy of host values.
    ///
    /// # Errors
    /// When their number is not the shape's, or memory runs out.
    pub fn upload<T: Element>(&self, values: &[T], shape: Shape) -> Result<Tensor> {
        self.upload_as(T::DTYPE, values, shape)
    }

    /// As [`Worker::upload`] for bool tensors.
    ///
    /// # Errors
    /// As [`Worker::upload`].
    pub fn upload_bool(&self, values: &[bool], shape: Shape) -> Result<Tensor> {
        let bytes: Vec<u8> = values.iter().map(|b| u8::from(*b)).collect();
        self.upload_as(DType::Bool, &bytes, shape)
    }

    fn upload_as<T: Element>(&self, dtype: DType, values: &[T], shape: Shape) -> Result<Tensor> {
        const OP: &str = "tensor";
        if values.len() != shape.numel() {
            return Err(Error::invalid(
                OP,
                format!("{} values for shape {shape}", values.len()),
            ));
        }
        let out = self.alloc(OP, dtype, shape)?;
        if !values.is_empty() {
            let lane = self.device().lane(LaneKind::Compute);
            let copy = Copy {
                what: OP.to_owned(),
                direction: Direction::Upload,
                src: values.as_ptr() as u64,
                dst: out.view().ptr,
                bytes: size_of_val(values) as u64,
            };
            // SAFETY: `values` is borrowed and `out` is owned past the fence below; sizes agree.
            unsafe { lane.copy(&copy)? };
            lane.record()?.fence()?;
        }
        Ok(out)
    }

    /// Replaces the values of a tensor by those of another of its type and shape. All holders of
    /// `dst` see it: for values that a recording reads and writes.
    ///
    /// # Errors
    /// When type or shape differ, or `dst` is not dense memory of this worker's own.
    pub fn overwrite(&self, dst: &Tensor, src: &Tensor) -> Result<()> {
        const OP: &str = "overwrite";
        if (dst.dtype(), dst.shape()) != (src.dtype(), src.shape()) {
            let what = format!("{src:?} over {dst:?}");
            return Err(Error::invalid(OP, what));
        }
        if !dst.is_contiguous() || !dst.is_writable() || dst.requires_grad() {
            return Err(Error::invalid(OP, format!("{dst:?} cannot be written")));
        }
        self.launch(&Kernel::Copy, &[Some(src)], &[Some(dst)])
    }

    /// The same values, densely laid out; no copy when they are already.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn contiguous(&self, x: &Tensor) -> Result<Tensor> {
        if x.is_contiguous() {
            return Ok(x.clone());
        }
        self.cast_dense("contiguous", x, x.dtype())
    }

    /// The values of `x` in another type; no copy when it is the type already.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        if x.dtype() == dtype {
            return Ok(x.detach());
        }
        self.cast_dense("cast", x, dtype)
    }

    /// The values of `x` in another type, in memory of their own.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn copied(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        self.cast_dense("copy", x, dtype)
    }

    /// As [`Worker::copied`], in memory for values that stay while other tasks run.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn copied_long(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let bytes = (x.numel() * dtype.size()) as u64;
        let block = self.pool.alloc_long("keep", bytes)?;
        self.copied_to(x, dtype, block)
    }

    /// As [`Worker::copied_long`], but beside the working memory of tasks, for which `working` bytes
    /// or more stay; `None` when there is no room.
    ///
    /// # Errors
    /// When the device fails.
    pub fn copied_beside(&self, x: &Tensor, dtype: DType, working: u64) -> Result<Option<Tensor>> {
        let bytes = (x.numel() * dtype.size()) as u64;
        match self.pool.alloc_beside("keep", bytes, working) {
            Ok(block) => self.copied_to(x, dtype, block).map(Some),
            Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The values of `x` in another type, in a block that was taken before; panics when that is too
    /// small.
    ///
    /// # Errors
    /// When the device fails.
    pub fn copied_to(&self, x: &Tensor, dtype: DType, block: Block) -> Result<Tensor> {
        let out = Tensor::from_block(block, dtype, *x.shape());
        self.launch(&Kernel::Copy, &[Some(x)], &[Some(&out)])?;
        Ok(out)
    }

    fn cast_dense(&self, op: &'static str, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let out = self.alloc(op, dtype, *x.shape())?;
        self.launch(&Kernel::Copy, &[Some(x)], &[Some(&out)])?;
        Ok(out)
    }

    /// `a + b` of equal shapes as a new dense tensor.
    pub(crate) fn sum_of(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let out = self.alloc("add", a.dtype(), *a.shape())?;
        self.launch(
            &Kernel::Binary(crate::kernel::Binary::Add),
            &[Some(a), Some(b)],
            &[Some(&out)],
        )?;
        Ok(out)
    }

    /// The sum of `x` over broadcast dimensions, so that the result has `shape`. `x` itself when
    /// the shapes are equal.
    pub(crate) fn sum_to(&self, x: &Tensor, shape: Shape) -> Result<Tensor> {
        if *x.shape() == shape {
            return Ok(x.detach());
        }
        let lead = x.rank() - shape.rank();
        let mut kept = *x.shape();
        for axis in 0..x.rank() {
            let size = if axis < lead { 1 } else { shape[axis - lead] };
            kept = kept.cut(axis, size);
        }
        let out = self.alloc("sum", x.dtype(), kept)?;
        let kernel = Kernel::Reduce {
            op: crate::kernel::Reduce::Sum,
            accumulate: false,
        };
        self.launch(&kernel, &[Some(x)], &[Some(&out)])?;
        Ok(out.relaid(Layout::contiguous(shape)))
    }

    /// A host buffer as a tensor that this worker reads in place.
    ///
    /// # Errors
    /// When the worker cannot read host memory, the buffer is too small or not aligned for the
    /// type, or while it is being written.
    pub fn alias(&self, buf: &HostBuf, dtype: DType, shape: Shape) -> Result<Tensor> {
        const OP: &str = "alias";
        if !self.device().aliases_host() {
            let what = format!(
                "{} cannot read {dtype} {shape} in place",
                self.device().id()
            );
            return Err(Error::invalid(OP, what));
        }
        let bytes = buf.byte_range(OP, 0, dtype, &shape)?;
        Tensor::from_host(buf.read(bytes)?, self.pool().clone(), dtype, shape)
    }
}

/// The operands of a kernel where they lie now.
fn views(tensors: &[Option<&Tensor>]) -> Vec<Option<View>> {
    let view = |tensor: &Option<&Tensor>| tensor.map(Tensor::view);
    tensors.iter().map(view).collect()
}

/// No destination may overlap a source or another destination, unless the kernel works in place
/// there.
fn disjoint(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> bool {
    let meets = |a: &View, b: &View| match (a.extent(), b.extent()) {
        (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
        _ => false,
    };
    let in_place = matches!(kernel, Kernel::CrossEntropyGrad { .. });
    // Halves of one tensor interleave without sharing elements; extents cannot tell them apart.
    let strided = |v: &View| !v.layout.is_contiguous();
    dst.iter().flatten().enumerate().all(|(i, d)| {
        let others = dst.iter().flatten().skip(i + 1);
        let allowed = |o: &View| strided(d) || strided(o) || (in_place && o.ptr == d.ptr);
        let clash = |o: &View| meets(d, o) && !allowed(o);
        !src.iter().flatten().chain(others).any(clash)
    })
}
