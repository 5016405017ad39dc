//! The sim backend: workers on a virtual clock, computing with the cpu's kernels, that check order.
//!
//! A [`SimWorld`] holds any number of workers ([`SimWorld::workers`]); events of one may be waited
//! for by another. Lanes are asynchronous: a call only queues. Work runs when a host thread fences,
//! in the order of its virtual end, which the seed varies, so that a missing event gives wrong data
//! as it would on a device. Besides, a missing event is reported: see below. Bits are those of the
//! cpu backend.
//!
//! # What is checked
//! - Every access to every byte (kernels, copies, both ends) is ordered after the last write of
//!   that byte, and every write after the reads since: by the lane, by events, or by a host fence
//!   before it was queued. The host counts as one: a fence of any thread orders what any thread
//!   queues later.
//! - A freed block is poisoned in the order of the compute lane, and that is a write: another lane
//!   that still uses the block, or that fills it for its next owner, needs an event.
//! - Nothing touches a block between its return to the pool and its next owner.
//! - Kernels touch memory of their own worker only; copies end where their direction says.
//! - An upload of memory that is not pinned reads its source when it is queued, as a driver may
//!   that stages it: a download that is to write there and that the host has not seen land is
//!   reported. [`SimConfig::pinned`] limits what can be pinned.
//!
//! A violation is a [`Race`] in [`SimWorld::races`] and the error of the next fence. A fence
//! returns only after the lane has passed, even when it returns an error. Events behind a failed
//! item return its error, in any lane, unless a fence of a lane behind it ([`Lane::fence`]) had
//! forgotten it when they were recorded. When several are due, the first is returned.
//!
//! Fresh memory, freed memory and the destinations of what failed hold NaN (-1 as integers).
//!
//! # What it refuses
//! It never reads the wall clock, and it is no model of a processor: kernels of one worker never
//! overlap. A user's kernel must not call back into the world it runs in (that panics).

mod costs;
mod fault;
mod order;
mod state;
mod timing;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

pub(crate) use costs::SimCosts;
pub use fault::{Fault, FaultKind, When};
pub use timing::{KernelTime, Launch, Timing};

use crate::bytes::Bytes;
use crate::cpu::threads::Threads;
use crate::cpu::{self, CpuOps};
use crate::device::{
    Arena, BackendCosts, Copy, Device, DeviceId, Direction, Event, EventState, FaultReport, Faults,
    Lane, LaneKind, Ops, Stamp,
};
use crate::error::{Error, Result};
use crate::host::{HostBuf, Pin};
use crate::kernel::{Kernel, View};
use crate::pins::{Ledger, Pins, Refusal};
use crate::sync::lock;
use order::{MOST_RANGES, ranges};
use state::{ItemWork, Mark, QueuedKernel, State};

/// What a world is made from.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Decides durations, stalls, ties, and faults by chance.
    pub seed: u64,
    /// Memory of each worker.
    pub memory: Bytes,
    /// Host memory that can be pinned, for all workers together.
    pub pinned: Bytes,
    /// Virtual durations.
    pub timing: Timing,
    /// Planned faults.
    pub faults: Vec<Fault>,
    /// Threads that kernels compute with.
    pub threads: usize,
    /// Items that may be queued in the world before queuing runs some.
    pub queue: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            memory: Bytes::gib(4),
            pinned: Bytes(u64::MAX),
            timing: Timing::default(),
            faults: Vec::new(),
            threads: 1,
            queue: 1 << 14,
        }
    }
}

/// Several sim workers with one virtual clock; cloning shares it.
#[derive(Clone)]
pub struct SimWorld(Arc<SharedWorld>);

/// An order violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Race {
    /// Whose memory it is; for host memory, who touched it first.
    pub device: DeviceId,
    /// The bytes concerned.
    pub region: String,
    /// The access that ran first.
    pub first: String,
    /// The access that is not ordered after it.
    pub second: String,
}

impl Race {
    fn error(&self) -> Error {
        let Self {
            device,
            region,
            first,
            second,
        } = self.clone();
        Error::Race {
            device,
            region,
            first,
            second,
        }
    }
}

/// One executed kernel or copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Which worker.
    pub worker: u32,
    /// In which lane.
    pub lane: LaneKind,
    /// Its number in the lane.
    pub item: u64,
    /// What it was.
    pub name: String,
    /// Virtual start.
    pub start_ns: u64,
    /// Virtual end.
    pub end_ns: u64,
}

impl SimWorld {
    /// A world without workers.
    ///
    /// # Errors
    /// When the system starts no threads.
    pub fn new(config: SimConfig) -> Result<Self> {
        let ops = CpuOps {
            threads: Threads::new(Some(config.threads.max(1)))?,
        };
        let mut state = State::new(config.seed, config.queue, config.timing, ops);
        config
            .faults
            .into_iter()
            .for_each(|fault| state.plan.add(fault));
        Ok(Self(Arc::new(SharedWorld {
            memory: config.memory,
            pinned: config.pinned,
            state: Mutex::new(state),
        })))
    }

    /// A world with default timing and no faults.
    ///
    /// # Errors
    /// As [`SimWorld::new`].
    pub fn seeded(seed: u64) -> Result<Self> {
        Self::new(SimConfig {
            seed,
            ..SimConfig::default()
        })
    }

    /// Adds `count` workers.
    pub fn workers(&self, count: usize) -> Vec<Arc<Sim>> {
        (0..count).map(|_| self.worker()).collect()
    }

    /// Adds one worker.
    pub fn worker(&self) -> Arc<Sim> {
        let (first, id) = self.0.with(State::add_worker);
        let lane = |kind| SimLane {
            world: self.0.clone(),
            number: first + kind as usize,
            kind,
        };
        let (ops, pins, world) = (SimOps, Ledger::default(), self.0.clone());
        Arc::new(Sim {
            id,
            lanes: LaneKind::ALL.map(lane),
            ops,
            pins,
            world,
        })
    }

    /// Every order violation found so far.
    pub fn races(&self) -> Vec<Race> {
        self.0.with(|state| state.races.clone())
    }

    /// Every fault injected so far, in words.
    pub fn faults(&self) -> Vec<String> {
        self.0.with(|state| state.faults.clone())
    }

    /// Plans one more fault; it counts calls from now on.
    pub fn inject(&self, fault: Fault) {
        self.0.with(|state| state.plan.add(fault));
    }

    /// Drops all planned faults.
    pub fn heal(&self) {
        self.0.with(|state| state.plan.clear());
    }

    /// Every kernel and copy executed since the start or the last [`SimWorld::clear_timeline`], in
    /// the order of execution.
    pub fn timeline(&self) -> Vec<Span> {
        self.0.with(|state| state.timeline.clone())
    }

    /// Forgets the timeline; the clock goes on.
    pub fn clear_timeline(&self) {
        self.0.with(|state| state.timeline.clear());
    }

    /// The latest virtual end of anything executed, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.0.with(|state| state.now)
    }

    /// The virtual clock of the calling thread: the latest event it saw pass, and the time it spent
    /// queuing.
    pub fn host_ns(&self) -> u64 {
        self.0.with(|state| *state.host_time())
    }

    /// Advances the calling thread's clock, e.g. for work on the host or a message from another
    /// thread.
    pub fn host_reach_ns(&self, time: u64) {
        self.0.with(|state| {
            let host = state.host_time();
            *host = time.max(*host);
        });
    }

    /// Says how long kernels take from now on, before dice.
    pub fn set_kernel_time(&self, time: Arc<KernelTime>) {
        self.0.with(|state| state.kernel_time = Some(time));
    }

    /// Runs all that is queued.
    ///
    /// # Errors
    /// The first error of any lane that no fence has returned yet.
    pub fn fence_all(&self) -> Result<()> {
        let results = self.0.with(|state| {
            let marks: Vec<Arc<Mark>> = (0..state.lanes.len())
                .map(|lane| state.push_record(lane))
                .collect();
            marks.iter().for_each(|mark| state.pass(mark));
            marks
                .iter()
                .map(|mark| state.result_at(mark, true))
                .collect::<Vec<_>>()
        });
        results.into_iter().collect()
    }
}

impl fmt::Debug for SimWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seed, lanes, now) = self
            .0
            .with(|state| (state.seed, state.lanes.len(), state.now));
        write!(
            f,
            "SimWorld(seed {seed}, {} workers, {now} ns)",
            lanes / LaneKind::ALL.len()
        )
    }
}

/// What the workers of a world share.
struct SharedWorld {
    memory: Bytes,
    pinned: Bytes,
    state: Mutex<State>,
}

thread_local! {
    /// The world whose lock this thread holds, by address.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// Resets [`HELD`], also when a kernel panics.
struct Holding(usize);

impl Drop for Holding {
    fn drop(&mut self) {
        HELD.set(self.0);
    }
}

impl SharedWorld {
    fn with<R>(&self, body: impl FnOnce(&mut State) -> R) -> R {
        let me = std::ptr::from_ref(self) as usize;
        assert_ne!(
            HELD.get(),
            me,
            "a kernel must not call into the sim world that runs it"
        );
        let mut state = lock(&self.state);
        let holding = Holding(HELD.replace(me));
        let out = body(&mut state);
        let spent = state.take_spent();
        drop(state);
        drop(holding);
        // A user's kernel may own tensors, whose blocks go back through this very lock.
        drop(spent);
        out
    }
}

/// A worker of a [`SimWorld`].
pub struct Sim {
    id: DeviceId,
    lanes: [SimLane; 5],
    ops: SimOps,
    pins: Ledger,
    world: Arc<SharedWorld>,
}

impl Sim {
    /// The world this worker is in.
    pub fn world(&self) -> SimWorld {
        SimWorld(self.world.clone())
    }

    fn compute(&self) -> usize {
        self.lanes[LaneKind::Compute as usize].number
    }

    fn reserved(&self, state: &State) -> u64 {
        let mine = state
            .arenas
            .iter()
            .filter(|(_, a)| a.worker == self.id.index);
        mine.map(|(base, a)| a.end - base).sum()
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sim({})", self.id)
    }
}

// SAFETY: there are five lanes, one per kind, which reach the arenas that the world knows
// (`on_device`); host memory is not aliased. Host buffers are `HostBuf::zeroed`, as long as asked
// and page-aligned.
unsafe impl Device for Sim {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn memory(&self) -> Bytes {
        Bytes(
            self.world
                .with(|state| self.world.memory.0 - self.reserved(state)),
        )
    }

    fn reserve(&self, bytes: Bytes) -> Result<Arena> {
        self.world.with(|state| {
            let what = format!("reserve {bytes}");
            if let Some(error) = state.strike(FaultKind::Reserve, None, self.id.index, &what) {
                return Err(error);
            }
            let free = Bytes(self.world.memory.0 - self.reserved(state));
            if bytes > free {
                let what = format!(
                    "cannot reserve {bytes}, {free} of {} are free",
                    self.world.memory
                );
                return Err(Error::Device {
                    device: self.id,
                    what,
                });
            }
            let arena = cpu::reserve_host(bytes)?;
            let base = arena.base();
            state.adopt(self.id.index, base..base + bytes.0);
            let lease = Lease {
                world: self.world.clone(),
                arena: Some(arena),
            };
            // SAFETY: the host arena inside the lease has this base and size, and nothing else
            // uses it.
            Ok(unsafe { Arena::new(base, bytes, Box::new(lease)) })
        })
    }

    fn has_failed(&self) -> bool {
        self.world.with(|state| state.has_failed())
    }

    fn open_faults(&self) -> Result<Option<Box<dyn FaultReport>>> {
        Ok(Some(Box::new(SimFaults::default())))
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        &self.lanes[kind as usize]
    }

    fn ops(&self) -> &dyn Ops {
        &self.ops
    }

    fn host_buffer(&self, name: &str, bytes: usize, pin: Pin) -> Result<HostBuf> {
        self.pins.buffer(name, bytes, pin, || {
            let need = Bytes(bytes as u64);
            let most = self.world.pinned;
            let pages = HostBuf::zeroed(name, bytes)?;
            let start = pages.addr();
            // One question and answer, for others ask at the same time.
            let has_room = self.world.with(|state| {
                let held: u64 = state.pinned.iter().map(|(start, end)| end - start).sum();
                let has_room = held.saturating_add(need.0) <= most.0;
                if has_room {
                    state.pinned.insert(start, start + need.0);
                }
                has_room
            });
            if !has_room {
                let what =
                    format!("cannot pin {need} of host memory for {name}, {most} are the most");
                return Err(Refusal {
                    error: Error::Device {
                        device: self.id,
                        what,
                    },
                    scarce: true,
                });
            }
            Ok(pages.owned_by(
                true,
                Box::new(Locked {
                    world: self.world.clone(),
                    start,
                }),
            ))
        })
    }

    fn pins(&self) -> Pins {
        self.pins.pins()
    }

    unsafe fn handing_out(&self, op: &'static str, start: u64, bytes: u64) -> Result<()> {
        self.world.with(|state| {
            state.hand_out(&(start..start.saturating_add(bytes)));
            let what = format!("alloc of {} for {op}", Bytes(bytes));
            let lane = Some(self.compute());
            state
                .strike(FaultKind::Alloc, lane, self.id.index, &what)
                .map_or(Ok(()), Err)
        })
    }

    unsafe fn freed(&self, start: u64, bytes: u64) {
        let range = start..start.saturating_add(bytes);
        self.world.with(|state| {
            // Poison is written: an address that is not this worker's must not reach the queue.
            if state.on_device(Some(self.id.index), &range) {
                state.push_free(self.compute(), range);
            }
        });
    }
}

/// Pinned host memory, until it goes.
struct Locked {
    world: Arc<SharedWorld>,
    start: u64,
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.world.with(|state| state.pinned.remove(&self.start));
    }
}

/// Keeps an arena until the lanes have passed what was queued while it lived.
struct Lease {
    world: Arc<SharedWorld>,
    arena: Option<Arena>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let arena = self.arena.take().expect("taken here only");
        self.world.with(|state| state.retire(arena));
    }
}

struct SimLane {
    world: Arc<SharedWorld>,
    /// Place among all lanes of the world.
    number: usize,
    kind: LaneKind,
}

impl SimLane {
    fn worker(&self) -> u32 {
        (self.number / LaneKind::ALL.len()) as u32
    }

    fn refuse(&self, state: &State, what: impl fmt::Display) -> Error {
        let device = state.lanes[self.number].device;
        Error::Device {
            device,
            what: format!("{}: {what}", self.kind.name()),
        }
    }
}

impl fmt::Debug for SimLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimLane({}, {})", self.worker(), self.kind.name())
    }
}

impl SimLane {
    fn mark(&self) -> Result<Arc<Mark>> {
        self.world.with(|state| {
            let error = state.strike(FaultKind::Record, Some(self.number), self.worker(), "event");
            let mark = state.push_record(self.number);
            match error {
                // Callers let go of what their copies touch when this fails.
                Some(error) => {
                    state.pass(&mark);
                    Err(error)
                }
                None => Ok(mark),
            }
        })
    }
}

// SAFETY: items run in order, behind the marks they wait for, and a mark passes after all items
// before it; a failing record passes its mark first (`mark`). What was staged is a copy that the
// item owns.
unsafe impl Lane for SimLane {
    fn kind(&self) -> LaneKind {
        self.kind
    }

    unsafe fn copy(&self, copy: &Copy) -> Result<()> {
        let (src, dst) = state::copy_ranges(copy);
        self.world.with(|state| {
            let own = Some(self.worker());
            let fits = copy.bytes == 0
                || match copy.direction {
                    Direction::Upload => !state.meets_device(&src) && state.on_device(own, &dst),
                    Direction::Download => state.on_device(own, &src) && !state.meets_device(&dst),
                    Direction::Local => state.on_device(None, &src) && state.on_device(None, &dst),
                };
            let name = state::copy_name(copy);
            if !fits {
                return Err(self.refuse(
                    state,
                    format_args!("{name} leaves the worker's memory: {copy:?}"),
                ));
            }
            let nanos = state.timing.copy(copy);
            let touched = match copy.bytes {
                0 => Default::default(),
                _ => (vec![src], vec![dst]),
            };
            let stages = copy.direction == Direction::Upload && !state.is_pinned(&touched.0);
            let staged = stages.then(|| {
                state.too_early(self.number, &name, &touched.0);
                // SAFETY: the caller promises that the source is valid and that no host thread
                // writes it; lanes write under the lock, which is held.
                unsafe { std::slice::from_raw_parts(copy.src as *const u8, copy.bytes as usize) }
                    .into()
            });
            state.push_work(
                self.number,
                &name,
                nanos,
                ItemWork::Copy(copy.clone(), staged),
                touched,
            );
            Ok(())
        })
    }

    fn record(&self) -> Result<Event> {
        let mark = self.mark()?;
        Ok(Event::new(Arc::new(SimEvent {
            world: self.world.clone(),
            mark,
        })))
    }

    fn fence(&self) -> Result<()> {
        let mark = self.mark()?;
        self.world.with(|state| {
            state.pass(&mark);
            state.result_at(&mark, true)
        })
    }

    fn stamp(&self) -> Result<Stamp> {
        let mark = self.world.with(|state| state.push_record(self.number));
        Ok(Stamp::Lane(Event::new(Arc::new(SimEvent {
            world: self.world.clone(),
            mark,
        }))))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let known = event.state().as_any().downcast_ref::<SimEvent>();
        let Some(event) = known.filter(|e| Arc::ptr_eq(&e.world, &self.world)) else {
            let what = format!("{self:?} cannot wait for {event:?}, which is of another world");
            return Err(Error::Foreign { op: "wait", what });
        };
        self.world.with(|state| {
            let what = format!(
                "wait for event {} of {}",
                event.mark.seq,
                state.lane_label(event.mark.lane)
            );
            if let Some(error) =
                state.strike(FaultKind::Wait, Some(self.number), self.worker(), &what)
            {
                return Err(error);
            }
            state.push_wait(self.number, event.mark.clone());
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct SimEvent {
    world: Arc<SharedWorld>,
    mark: Arc<Mark>,
}

impl fmt::Debug for SimEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "SimEvent(lane {}, item {})",
            self.mark.lane, self.mark.seq
        )
    }
}

// SAFETY: `pass` runs the world until the lane has passed the mark, and `poll` tells whether it
// has.
unsafe impl EventState for SimEvent {
    fn passed(&self) -> Result<bool> {
        self.world.with(|state| match state.poll(&self.mark) {
            true => state.result_at(&self.mark, false).map(|()| true),
            false => Ok(false),
        })
    }

    fn fence(&self) -> Result<()> {
        self.world.with(|state| {
            state.pass(&self.mark);
            state.result_at(&self.mark, false)
        })
    }

    fn wait_quietly(&self) {
        self.world.with(|state| state.pass(&self.mark));
    }

    fn time_ns(&self) -> Option<u64> {
        self.mark.time_ns()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What kernels of one piece of work reported; the items they were queued as share it.
#[derive(Clone, Default)]
struct SimFaults(Arc<Mutex<Option<Error>>>);

impl SimFaults {
    /// Keeps the first report.
    fn put(&self, error: Error) {
        let mut found = lock(&self.0);
        found.get_or_insert(error);
    }
}

impl FaultReport for SimFaults {
    fn check(&self) -> Result<()> {
        let found = lock(&self.0);
        match &*found {
            None => Ok(()),
            Some(Error::Index {
                op,
                index,
                at,
                size,
            }) => Err(Error::Index {
                op,
                index: *index,
                at: *at,
                size: *size,
            }),
            Some(Error::Invalid { op, what }) => Err(Error::invalid(op, what.clone())),
            Some(other) => Err(Error::invalid("kernel", other.to_string())),
        }
    }

    fn retire(&self, _lane: &dyn Lane) {}

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Queues kernels; the world's cpu threads run them.
struct SimOps;

// SAFETY: kernels are the cpu's, run when the lane comes to them, with the cpu's scratch.
unsafe impl Ops for SimOps {
    unsafe fn launch(
        &self,
        lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
        faults: Option<&Faults>,
    ) -> Result<()> {
        let Some(lane) = lane.as_any().downcast_ref::<SimLane>() else {
            let what = format!("{kernel:?} on {lane:?}, which is no sim lane");
            return Err(Error::Foreign { op: "launch", what });
        };
        let touched = |all: &mut dyn Iterator<Item = &View>| -> Vec<Range<u64>> {
            all.flat_map(|v| ranges(v, MOST_RANGES)).collect()
        };
        let reads = touched(&mut src.iter().flatten());
        let writes = touched(&mut dst.iter().flatten().chain(&scratch));
        let name = format!("kernel {}", kernel.name());
        lane.world.with(|state| {
            let worker = lane.worker();
            if let Some(error) = state.strike(FaultKind::Launch, Some(lane.number), worker, &name) {
                return Err(error);
            }
            if let Some(r) = reads
                .iter()
                .chain(&writes)
                .find(|r| !state.on_device(Some(worker), r))
            {
                return Err(lane.refuse(
                    state,
                    format_args!("{name}: {r:#x?} is not the worker's memory"),
                ));
            }
            let launch = Launch {
                worker: state.lanes[lane.number].device,
                kernel,
                src,
                dst,
            };
            let given = state.kernel_time.as_ref().and_then(|time| time(&launch));
            let nanos = given.unwrap_or_else(|| state.timing.kernel(&launch));
            let faults = faults
                .and_then(|f| f.report().as_any().downcast_ref::<SimFaults>())
                .cloned();
            let (src, dst) = (src.to_vec(), dst.to_vec());
            let call = QueuedKernel {
                kernel: kernel.clone(),
                src,
                dst,
                scratch,
                faults,
            };
            state.push_work(
                lane.number,
                &name,
                nanos,
                ItemWork::Kernel(Box::new(call)),
                (reads, writes),
            );
            Ok(())
        })
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        SimCosts.scratch(kernel, src, dst)
    }

    fn min_gemm_rows(&self) -> usize {
        SimCosts.min_gemm_rows()
    }
}
