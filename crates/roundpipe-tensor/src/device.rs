//! What the engine needs from a backend: memory, lanes, order, and mathematics.
//!
//! Two small object-safe traits carry every backend: [`Device`] with its [`Lane`]s (memory and
//! order) and [`Ops`] (mathematics). A *worker* is one `Device` value: a card that is listed twice
//! is two values with their own lanes and arenas.
//!
//! All of these traits are unsafe to implement, because safe code relies on what they say:
//! addresses that an arena gave are read and written, and memory is let go when an event says that
//! a lane has passed. Each names what it promises. A device cannot be put together from safe parts,
//! such as memory that is only counted and mathematics that computes:
//!
//! ```compile_fail
//! use roundpipe_tensor::device::{Arena, Device, DeviceId, Lane, LaneKind, Ops};
//! use roundpipe_tensor::{Bytes, Cpu, Meta, Result};
//! use std::sync::Arc;
//!
//! #[derive(Debug)]
//! struct Both(Arc<Cpu>, Arc<Meta>);
//!
//! impl Device for Both {
//!     fn id(&self) -> DeviceId { self.0.id() }
//!     fn memory(&self) -> Bytes { self.0.memory() }
//!     fn reserve(&self, bytes: Bytes) -> Result<Arena> { self.1.reserve(bytes) }
//!     fn lane(&self, kind: LaneKind) -> &dyn Lane { self.0.lane(kind) }
//!     fn ops(&self) -> &dyn Ops { self.0.ops() }
//! }
//! ```
//!
//! # Rules of order
//! 1. A lane runs what it is given in order; two lanes run independently.
//! 2. Only events order two lanes: `b.wait(&a.record()?)` puts all later work of `b` after all
//!    earlier work of `a`.
//! 3. The host learns that work has ended only by a fence ([`Event::fence`], [`Lane::fence`], or
//!    landing a [`Flight`]).
//! 4. A copy owns both of its ends until it has landed.
//! 5. Device memory is reserved once per worker; blocks are carved from it in the host order of the
//!    compute lane, so a block freed and handed out again is ordered by that lane.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::host::{HostBuf, HostMut, HostRef, Pin};
use crate::kernel::{DecodeBlockSizes, Kernel, View};
use crate::pins::Pins;
use crate::pool::Block;
use crate::rates::KernelRates;

/// The kinds of backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Computes on the host's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// Cpu mathematics on a virtual clock, with checks and faults.
    Sim,
    /// Shapes only.
    Meta,
}

impl DeviceKind {
    /// Whether it has memory of its own beside the host's and computes by itself.
    pub const fn is_gpu(self) -> bool {
        matches!(self, Self::Cuda)
    }
}

/// What planning knows about the devices of a backend before anything runs: memory that kernels
/// want, and rough rates. Each backend has one in its folder; `backends.rs` lists them.
pub trait BackendCosts: Send + Sync + fmt::Debug {
    /// Backend.
    fn kind(&self) -> DeviceKind;

    /// As [`Ops::scratch`].
    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize;

    /// As [`Ops::min_gemm_rows`].
    fn min_gemm_rows(&self) -> usize;

    /// As [`Ops::few_rows`].
    fn few_rows(&self) -> usize {
        0
    }

    /// As [`Ops::takes_block`].
    fn takes_block(&self, _sizes: &DecodeBlockSizes) -> bool {
        false
    }

    /// Floating-point operations in a millisecond. Only ratios matter to a plan; measured times
    /// replace these after the first step.
    fn flops_per_ms(&self) -> f64;

    /// Bytes of operands in a millisecond; as rough as [`BackendCosts::flops_per_ms`].
    fn bytes_per_ms(&self) -> f64;

    /// As [`Device::aliases_host`].
    fn aliases_host(&self) -> bool {
        false
    }

    /// What a process takes of a device beside its arenas: the driver's context, loaded kernels and
    /// the libraries' own memory.
    fn context_bytes(&self) -> Bytes {
        Bytes(0)
    }
}

/// The costs of one device, as a value that a stand-in for it holds ([`Device::cost_model`]).
#[derive(Debug, Clone, Copy)]
pub struct CostModel {
    costs: &'static dyn BackendCosts,
    rates: Option<KernelRates>,
}

impl CostModel {
    /// For backends.
    pub fn new(costs: &'static dyn BackendCosts) -> Self {
        Self { costs, rates: None }
    }

    /// The same device with what its kernels reach, for plans of a machine that is described.
    #[must_use]
    pub fn with_rates(self, rates: KernelRates) -> Self {
        Self {
            rates: Some(rates),
            ..self
        }
    }

    /// What its kernels reach, where that was said.
    pub fn rates(&self) -> Option<&KernelRates> {
        self.rates.as_ref()
    }
}

impl Deref for CostModel {
    type Target = dyn BackendCosts;

    fn deref(&self) -> &Self::Target {
        self.costs
    }
}

/// One worker: the backend, which of its devices, and which of the workers on that device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// Backend.
    pub kind: DeviceKind,
    /// Device of that backend.
    pub index: u32,
    /// Worker on that device.
    pub worker: u32,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Sim => "sim",
            DeviceKind::Meta => "meta",
        };
        match self.worker {
            0 => write!(f, "{kind}:{}", self.index),
            worker => write!(f, "{kind}:{}#{worker}", self.index),
        }
    }
}

/// The in-order queues of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LaneKind {
    /// Kernels.
    Compute,
    /// Weights going in.
    ParamUpload,
    /// Activations going in.
    ActivationUpload,
    /// Activations coming out.
    ActivationDownload,
    /// Gradients coming out.
    GradDownload,
}

impl LaneKind {
    /// All lanes of a worker; the discriminant is the index.
    pub const ALL: [Self; 5] = [
        Self::Compute,
        Self::ParamUpload,
        Self::ActivationUpload,
        Self::ActivationDownload,
        Self::GradDownload,
    ];

    /// Name for errors and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::ParamUpload => "parameter upload",
            Self::ActivationUpload => "activation upload",
            Self::ActivationDownload => "activation download",
            Self::GradDownload => "gradient download",
        }
    }
}

/// A worker's memory and lanes.
///
/// # Safety
/// - [`Device::lane`] gives the same lane whenever it is asked for a kind, and lanes and
///   [`Device::ops`] reach the memory that [`Device::reserve`] gave.
/// - Where [`Device::aliases_host`] says so, lanes and kernels reach the host's memory by its
///   addresses as well, and are done with it when the call that queued them returns.
/// - [`Device::host_buffer`] gives as many bytes as it was asked for, from an address that is a
///   multiple of 64 on.
pub unsafe trait Device: Send + Sync + fmt::Debug {
    /// Which worker this is.
    fn id(&self) -> DeviceId;

    /// Memory of the device that this worker may reserve from.
    fn memory(&self) -> Bytes;

    /// Takes device memory; called once per worker, at start. Contents are undefined.
    ///
    /// # Errors
    /// When the device has less.
    fn reserve(&self, bytes: Bytes) -> Result<Arena>;

    /// One of the five queues.
    fn lane(&self, kind: LaneKind) -> &dyn Lane;

    /// The mathematics of this device.
    fn ops(&self) -> &dyn Ops;

    /// Takes what `body` queues on the compute lane from this thread as one piece of work that can
    /// be launched again and again; nothing of it runs now. `None`, without a call of `body`, where
    /// the device gains nothing by it.
    ///
    /// # Errors
    /// What `body` or the device reports.
    fn capture(&self, _body: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Replay>>> {
        Ok(None)
    }

    /// Host memory that this device copies from and to as fast as `pin` allows.
    ///
    /// # Errors
    /// When the system has none, or the driver pins none although `pin` insists.
    fn host_buffer(&self, name: &str, bytes: usize, _pin: Pin) -> Result<HostBuf> {
        HostBuf::zeroed(name, bytes)
    }

    /// How much of the host memory that this device gave is pinned; nothing where no copy gains by
    /// it.
    fn pins(&self) -> Pins {
        Pins::default()
    }

    /// The device whose costs this one has: itself, unless it only counts for another.
    fn cost_model(&self) -> CostModel {
        self.id().kind.into()
    }

    /// Why this device does not multiply 8-bit floats by hardware, in one line that names it. `None`
    /// where it does, and where a reference computes them ([`fp8`](crate::fp8)).
    fn lacks_fp8(&self) -> Option<String> {
        None
    }

    /// Whether memory of this device has contents. A device that only counts moves no bytes, and
    /// values that come from it have none.
    fn moves_bytes(&self) -> bool {
        true
    }

    /// Whether kernels can read host memory in place, so that an upload may be no copy at all.
    fn aliases_host(&self) -> bool {
        false
    }

    /// Whether something went wrong that no [`Lane::fence`] has forgotten yet, as far as is known
    /// without waiting.
    fn has_failed(&self) -> bool {
        false
    }

    /// A place where kernels report data that they must refuse, for one piece of work alone. `None`
    /// on devices whose kernels report such data when they are launched.
    ///
    /// # Errors
    /// When the device has no memory for it.
    fn open_faults(&self) -> Result<Option<Box<dyn FaultReport>>> {
        Ok(None)
    }

    /// Called when a block is about to leave the pool for `op`; the device may refuse. `sim`
    /// injects faults here.
    ///
    /// # Safety
    /// For the pool: no block holds these bytes of an arena of this device.
    ///
    /// # Errors
    /// When the device refuses; the block goes back to the pool.
    unsafe fn handing_out(&self, _op: &'static str, _start: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Called when a block goes back to the pool. `sim` poisons it.
    ///
    /// # Safety
    /// For the pool: these bytes were a block of an arena of this device, and their holder has let
    /// them go.
    unsafe fn freed(&self, _start: u64, _bytes: u64) {}
}

/// A queue that runs in order. Only events order two lanes.
///
/// # Safety
/// - The lane touches the two ranges of a copy and nothing else, not before the events that it
///   waits for have passed, and not after an event that was recorded behind the copy has.
/// - When [`Lane::record`] fails, the lane has done all that was queued.
pub unsafe trait Lane: Send + Sync + fmt::Debug {
    /// Which of the worker's lanes this is.
    fn kind(&self) -> LaneKind;

    /// Queues a copy.
    ///
    /// # Safety
    /// Both ranges must stay valid until the lane has passed the copy; until then nothing else
    /// writes the source or touches the destination, unless events order it.
    ///
    /// # Errors
    /// When the device refuses.
    unsafe fn copy(&self, copy: &Copy) -> Result<()>;

    /// A mark behind all work queued so far.
    ///
    /// # Errors
    /// When the device refuses; the lane has run dry then, so that memory in use by copies can be
    /// let go.
    fn record(&self) -> Result<Event>;

    /// Later work of this lane runs after `event`.
    ///
    /// # Errors
    /// When the device refuses or the event belongs to another backend.
    fn wait(&self, event: &Event) -> Result<()>;

    /// The host waits until all work queued so far has ended. An error is returned and forgotten:
    /// events recorded from now on do not report it. Events recorded before go on reporting it to
    /// every waiter, so that a waiter whose work it spoiled does not take that work for done
    /// because another received the error first.
    ///
    /// # Errors
    /// What went wrong in the lane since the last such fence.
    fn fence(&self) -> Result<()> {
        self.record()?.fence()
    }

    /// The time when the lane gets here. Backends whose lanes run behind the host override this.
    ///
    /// # Errors
    /// When the device refuses.
    fn stamp(&self) -> Result<Stamp> {
        Ok(Stamp::Host(Instant::now()))
    }

    /// For backends to recognise their own lanes.
    fn as_any(&self) -> &dyn Any;
}

/// What times of lanes and of the host are counted from: one moment for all devices of the process,
/// so that spans of several cards and of the host stand beside each other.
pub fn time_zero() -> Instant {
    static ZERO: OnceLock<Instant> = OnceLock::new();
    *ZERO.get_or_init(Instant::now)
}

/// A moment in a lane.
#[derive(Debug, Clone)]
pub enum Stamp {
    /// The host's clock, for lanes that run while the host waits.
    Host(Instant),
    /// The lane's clock; known once the lane has passed.
    Lane(Event),
}

impl Stamp {
    /// Nanoseconds since [`time_zero`], or on the virtual clock of a simulated lane; `None` while the
    /// lane has not passed.
    pub fn ns(&self) -> Option<u64> {
        match self {
            Self::Host(at) => {
                u64::try_from(at.saturating_duration_since(time_zero()).as_nanos()).ok()
            }
            Self::Lane(event) => event.state().time_ns(),
        }
    }
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Host to device.
    Upload,
    /// Device to host.
    Download,
    /// Within a device.
    Local,
}

/// One copy as a value.
#[derive(Debug, Clone)]
pub struct Copy {
    /// What is being copied, for traces and race reports.
    pub what: String,
    /// Which way.
    pub direction: Direction,
    /// First byte read.
    pub src: u64,
    /// First byte written.
    pub dst: u64,
    /// How many.
    pub bytes: u64,
}

/// Work that [`Device::capture`] took.
pub trait Replay: Send + Sync {
    /// Queues it behind what the compute lane has.
    ///
    /// # Safety
    /// All memory that its kernels touch is as when it was captured: alive, and no other's.
    ///
    /// # Errors
    /// What the device reports.
    unsafe fn launch(&self) -> Result<()>;
}

/// The mathematics of a backend.
///
/// # Safety
/// - A kernel reads its sources and writes its destinations and its scratch, and touches nothing
///   else; in the order of the lane, so that an event recorded behind it passes when it is done.
/// - It needs no more scratch than [`Ops::scratch`] says for the same operands.
pub unsafe trait Ops: Send + Sync {
    /// Queues a kernel. Data that it must refuse, such as an index out of range, is reported to
    /// `faults`; without them, by the events of the lane. A device that computes at once returns
    /// the error instead.
    ///
    /// # Safety
    /// The views must be what the kernel's documentation asks for, lie in live memory of this
    /// device (or host memory where the device aliases it), and stay valid until the lane has
    /// passed the kernel; writes must be ordered against other accesses by lanes and events.
    ///
    /// # Errors
    /// What the device or the kernel reports, e.g. an index out of range.
    unsafe fn launch(
        &self,
        lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
        faults: Option<&Faults>,
    ) -> Result<()>;

    /// Bytes of scratch memory the kernel wants for these operands.
    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize;

    /// Rows above which a product that is added to a large f32 matrix is bound by arithmetic, not
    /// by reading and writing the matrix. Products that are cut into chunks of rows have at least
    /// this many.
    fn min_gemm_rows(&self) -> usize;

    /// Rows up to which a step of decoding goes by kernels of its own
    /// ([`Kernel::FewLinear`]); 0 where there are none.
    fn few_rows(&self) -> usize {
        0
    }

    /// Whether [`Kernel::DecodeBlock`] is there for such a block.
    fn takes_block(&self, _sizes: &DecodeBlockSizes) -> bool {
        false
    }
}

/// What a backend keeps for one [`Faults`].
pub trait FaultReport: Send + Sync {
    /// What was reported first, as a new error each time.
    ///
    /// # Errors
    /// The report.
    fn check(&self) -> Result<()>;

    /// Called when nothing will ask any more. Kernels that were queued in `lane` before may still
    /// report.
    fn retire(&self, lane: &dyn Lane);

    /// For backends to recognise their own.
    fn as_any(&self) -> &dyn Any;
}

/// Where the kernels of one piece of work report bad data: an index out of range, offsets that make
/// no sense.
///
/// Bad data spoils the results of the work it belongs to and nothing else: the device goes on, and
/// work of others on the same lane is not concerned. So it is reported here and not by the lane's
/// events, which all work on the lane shares. [`Worker::open_faults`](crate::Worker::open_faults)
/// makes one.
///
/// A report is visible once the host knows by a fence that the kernel has run.
pub struct Faults {
    device: Arc<dyn Device>,
    report: Box<dyn FaultReport>,
}

impl Faults {
    /// Those of `device`, where its kernels report later than they are launched.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub(crate) fn open(device: &Arc<dyn Device>) -> Result<Option<Arc<Self>>> {
        let report = device.open_faults()?;
        Ok(report.map(|report| {
            Arc::new(Self {
                device: device.clone(),
                report,
            })
        }))
    }

    /// Whether any kernel has reported so far.
    ///
    /// # Errors
    /// The first report, every time.
    pub fn check(&self) -> Result<()> {
        self.report.check()
    }

    /// The backend's part.
    pub(crate) fn report(&self) -> &dyn FaultReport {
        &*self.report
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.report.retire(self.device.lane(LaneKind::Compute));
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faults({}, {:?})", self.device.id(), self.check())
    }
}

/// Reserved device memory; given back when dropped.
pub struct Arena {
    base: u64,
    bytes: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Arena {
    /// Memory from `base` on, kept alive by `owner`. Backends call this.
    ///
    /// # Safety
    /// `base` is aligned to [`ALIGN`](crate::pool::ALIGN); the device that gives the arena away may
    /// read and write `bytes` bytes from there until `owner` is dropped, and nothing
    /// else does. (Meta touches nothing.)
    pub unsafe fn new(base: u64, bytes: Bytes, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            base,
            bytes: bytes.0,
            _owner: owner,
        }
    }

    /// First address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Size.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:#x}, {})", self.base, self.bytes())
    }
}

/// A point in a lane.
#[derive(Debug, Clone)]
pub struct Event(Arc<dyn EventState>);

/// What a backend knows about a point in one of its lanes.
///
/// # Safety
/// [`EventState::fence`] and [`EventState::wait_quietly`] return when the lane has passed the point,
/// whether with an error or without; [`EventState::passed`] says `Ok(true)` only then.
pub unsafe trait EventState: Send + Sync + fmt::Debug {
    /// Whether the lane has passed it.
    ///
    /// # Errors
    /// What went wrong in the lane, unless a [`Lane::fence`] had forgotten it when this was
    /// recorded.
    fn passed(&self) -> Result<bool>;

    /// The host waits until the lane has passed it.
    ///
    /// # Errors
    /// As [`EventState::passed`].
    fn fence(&self) -> Result<()>;

    /// The host waits as in [`EventState::fence`]; what went wrong stays for the next fence of the
    /// lane.
    fn wait_quietly(&self) {
        let _ = self.fence();
    }

    /// When the lane passed it, in nanoseconds since [`time_zero`], or on a virtual clock that all
    /// lanes share; `None` before that, or when the backend keeps no time.
    fn time_ns(&self) -> Option<u64> {
        None
    }

    /// For backends to recognise their own events.
    fn as_any(&self) -> &dyn Any;
}

/// What every event of a synchronous lane is.
#[derive(Debug)]
struct Past;

// SAFETY: every lane has passed what was past when it was made.
unsafe impl EventState for Past {
    fn passed(&self) -> Result<bool> {
        Ok(true)
    }

    fn fence(&self) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Event {
    /// A point that its lane has passed already: all that backends with synchronous lanes need.
    pub fn past() -> Self {
        Self::new(Arc::new(Past))
    }

    /// For backends.
    pub fn new(state: Arc<dyn EventState>) -> Self {
        Self(state)
    }

    /// Whether the lane has passed it.
    ///
    /// # Errors
    /// What went wrong in the lane.
    pub fn passed(&self) -> Result<bool> {
        self.0.passed()
    }

    /// The host waits until the lane has passed it.
    ///
    /// # Errors
    /// What went wrong in the lane.
    pub fn fence(&self) -> Result<()> {
        self.0.fence()
    }

    /// Whether this is the past of a synchronous lane, which needs no wait.
    pub fn is_past(&self) -> bool {
        self.0.as_any().is::<Past>()
    }

    /// For backends to recognise their own events.
    pub fn state(&self) -> &dyn EventState {
        &*self.0
    }
}

/// A copy under way. It owns what it touches; dropping it waits for the lane.
#[derive(Debug)]
pub struct Flight<T> {
    event: Event,
    hold: Option<T>,
}

impl<T> Flight<T> {
    pub(crate) fn new(event: Event, hold: T) -> Self {
        Self {
            event,
            hold: Some(hold),
        }
    }

    /// The point behind the copy.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Whether the copy has landed.
    ///
    /// # Errors
    /// What went wrong in the lane.
    pub fn landed(&self) -> Result<bool> {
        self.event.passed()
    }

    /// Waits for the copy and gives both ends back.
    ///
    /// # Errors
    /// What went wrong in the lane; the ends are dropped then.
    pub fn land(mut self) -> Result<T> {
        let hold = self
            .hold
            .take()
            .expect("a flight holds its ends until it lands");
        self.event.fence()?;
        Ok(hold)
    }

    /// Orders `lane` behind the copy without a host wait and gives both ends to the caller.
    ///
    /// # Safety
    /// The copy may still be under way: the caller keeps both ends, and does not touch the host's,
    /// until `lane` has passed this point or the copy's event has.
    ///
    /// # Errors
    /// When the lane refuses.
    pub unsafe fn hand_to(mut self, lane: &dyn Lane) -> Result<T> {
        lane.wait(&self.event)?;
        Ok(self
            .hold
            .take()
            .expect("a flight holds its ends until it lands"))
    }
}

impl<T> Drop for Flight<T> {
    fn drop(&mut self) {
        if self.hold.is_some() {
            // An error was or will be reported by the lane's next fence; here only the wait
            // matters.
            self.event.0.wait_quietly();
        }
    }
}

impl dyn Lane + '_ {
    /// Refuses a block of another device, whose addresses mean nothing here.
    fn check_home(&self, op: &str, what: &str, block: &Block) -> Result<()> {
        let device = block.pool().device();
        if std::ptr::addr_eq(self, device.lane(self.kind())) {
            return Ok(());
        }
        let home = device.id();
        let what = format!(
            "{op} of {what}: the block is memory of {home}, the lane belongs to another device"
        );
        Err(Error::Foreign { op: "copy", what })
    }

    /// Starts copying host bytes into a block of the same size or larger.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a block of another device, [`Error::Invalid`] when it is too small;
    /// otherwise what the device reports.
    pub fn upload(&self, what: &str, src: HostRef, dst: Block) -> Result<Flight<(HostRef, Block)>> {
        self.check_home("upload", what, &dst)?;
        let bytes = src.bytes().len() as u64;
        if bytes > dst.bytes() {
            return Err(Error::invalid(
                "upload",
                format!("{what}: {bytes} bytes into {}", dst.bytes()),
            ));
        }
        let copy = Copy {
            what: what.to_owned(),
            direction: Direction::Upload,
            src: src.addr(),
            dst: dst.addr(),
            bytes,
        };
        // SAFETY: the source is claimed for reading and the block is owned, both are moved into the
        // flight, which waits for the lane before it lets go of them; the sizes were just compared.
        unsafe { self.copy(&copy)? };
        Ok(Flight {
            event: self.record()?,
            hold: Some((src, dst)),
        })
    }

    /// Starts copying the first bytes of a block into host memory of that size.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a block of another device, [`Error::Invalid`] when it is smaller than
    /// the host range; otherwise what the device reports.
    pub fn download(
        &self,
        what: &str,
        src: Block,
        mut dst: HostMut,
    ) -> Result<Flight<(Block, HostMut)>> {
        self.check_home("download", what, &src)?;
        let bytes = dst.bytes().len() as u64;
        if bytes > src.bytes() {
            return Err(Error::invalid(
                "download",
                format!("{what}: {bytes} bytes from {}", src.bytes()),
            ));
        }
        let copy = Copy {
            what: what.to_owned(),
            direction: Direction::Download,
            src: src.addr(),
            dst: dst.addr(),
            bytes,
        };
        // SAFETY: as for `upload`, with the roles exchanged.
        unsafe { self.copy(&copy)? };
        Ok(Flight {
            event: self.record()?,
            hold: Some((src, dst)),
        })
    }
}
