//! The queues of all lanes of a world, and what runs next.
//!
//! # Rules
//! 1. Queuing an item runs nothing. Items run, one at a time, when a host thread fences or polls an
//!    event, or when too many are queued.
//! 2. Of all lanes whose head is not waiting, the head that ends first on the virtual clock runs;
//!    equal ends are decided by the seed. Its effect falls on its end.
//! 3. A virtual start is the latest of: the end of the item before it in its lane, the passing of
//!    the events waited for, and the clock of the host thread that queued it. So one seed gives one
//!    timing, whatever the host threads do, as long as each lane is fed by one thread.
//! 4. When a fence returns, with an error or without, the lane has passed the event.
//! 5. What an executed item held is dropped after the lock is released.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use super::fault::{FaultKind, FaultPlan};
use super::order::{Access, AccessHistory, Clash, VectorClock, ranges};
use super::timing::{KernelTime, Timing, throw};
use super::{Race, Span};
use crate::cpu::CpuOps;
use crate::device::{Arena, Copy, DeviceId, Direction, LaneKind};
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// Freed and failed memory is filled with this: NaN in every float type, -1 in every integer.
const POISON: u8 = 0xff;

/// Reports kept; a program with more races than this has one bug many times.
const MOST_RACES: usize = 1000;

/// A point in a lane, passed or not.
#[derive(Debug)]
pub(super) struct Mark {
    pub lane: usize,
    pub seq: u64,
    /// Marks of the world before this one.
    number: u64,
    passed: OnceLock<Passed>,
}

impl Mark {
    /// When the lane passed it.
    pub fn time_ns(&self) -> Option<u64> {
        self.passed.get().map(|passed| passed.time)
    }
}

/// When a mark was passed and what had happened before it.
#[derive(Debug)]
struct Passed {
    time: u64,
    clock: Arc<VectorClock>,
}

/// What an item does.
pub(super) enum ItemWork {
    Kernel(Box<QueuedKernel>),
    /// A copy, and what it reads where that was staged when it was queued.
    Copy(Copy, Option<Box<[u8]>>),
    Free(Range<u64>),
    Record {
        mark: Arc<Mark>,
        lost: bool,
    },
    Wait(Arc<Mark>),
}

/// A kernel with its operands.
pub(super) struct QueuedKernel {
    pub kernel: Kernel,
    pub src: Vec<Option<View>>,
    pub dst: Vec<Option<View>>,
    pub scratch: Option<View>,
    /// Where it reports bad data; by the lane's events without.
    pub faults: Option<super::SimFaults>,
}

/// One queued piece of work.
struct QueuedItem {
    seq: u64,
    what: String,
    /// `what` with its place, for reports.
    name: Arc<str>,
    work: ItemWork,
    /// The clock of the host thread that queued it.
    ready: u64,
    nanos: u64,
    /// What had happened before it by the host's fences.
    host: Arc<VectorClock>,
    reads: Vec<Range<u64>>,
    writes: Vec<Range<u64>>,
    /// Fails when it runs.
    fails: bool,
}

/// One lane of one worker.
pub(super) struct Queue {
    pub device: DeviceId,
    pub kind: LaneKind,
    items: VecDeque<QueuedItem>,
    time: u64,
    clock: VectorClock,
    next: u64,
    done: u64,
    /// Kernels and copies ever queued: what dice are thrown by, so that frees do not shift them.
    works: u64,
}

/// A reserved arena.
pub(super) struct Reserved {
    pub worker: u32,
    pub end: u64,
    /// First address never handed out.
    fresh: u64,
}

/// An arena that was given back while items may still touch it.
struct Retired {
    arena: Arena,
    until: Vec<u64>,
}

/// Something that went wrong.
struct Pending {
    /// Told by fences behind this item; `None`: by any.
    at: Option<(usize, u64)>,
    device: DeviceId,
    /// The error itself for the first who asks, its words for the others.
    error: Option<Error>,
    words: String,
    /// Marks from this one on say nothing of it.
    forgotten: Option<u64>,
}

impl Pending {
    fn new(at: Option<(usize, u64)>, device: DeviceId, error: Error) -> Self {
        let words = error.to_string();
        let words = words
            .strip_prefix(&format!("{device}: "))
            .unwrap_or(&words)
            .to_owned();
        Self {
            at,
            device,
            words,
            error: Some(error),
            forgotten: None,
        }
    }

    /// The error itself, then copies of it.
    fn error(&mut self) -> Error {
        let again = || Error::Device {
            device: self.device,
            what: self.words.clone(),
        };
        self.error.take().unwrap_or_else(again)
    }
}

/// Everything of a world that changes.
pub(super) struct State {
    pub seed: u64,
    pub bound: usize,
    pub timing: Timing,
    pub kernel_time: Option<Arc<KernelTime>>,
    pub plan: FaultPlan,
    pub lanes: Vec<Queue>,
    pub arenas: BTreeMap<u64, Reserved>,
    /// Host memory that is pinned, by where it starts: where it ends.
    pub pinned: BTreeMap<u64, u64>,
    pub races: Vec<Race>,
    pub faults: Vec<String>,
    pub timeline: Vec<Span>,
    pub now: u64,
    ops: CpuOps,
    queued: usize,
    host: Arc<VectorClock>,
    threads: HashMap<ThreadId, u64>,
    ledger: AccessHistory,
    /// Blocks given back and not handed out again, in host order, with who freed them.
    freed: BTreeMap<u64, (u64, Arc<str>)>,
    /// Pairs of accesses that were reported, by lane and number.
    reported: HashSet<(usize, u64, usize, u64)>,
    pending: Vec<Pending>,
    /// Marks ever made.
    marks: u64,
    lost: Vec<(Arc<Mark>, Passed)>,
    retired: Vec<Retired>,
    spent: Vec<QueuedItem>,
}

impl State {
    pub fn new(seed: u64, bound: usize, timing: Timing, ops: CpuOps) -> Self {
        Self {
            seed,
            bound,
            timing,
            kernel_time: None,
            plan: FaultPlan::default(),
            lanes: Vec::new(),
            arenas: BTreeMap::new(),
            pinned: BTreeMap::new(),
            races: Vec::new(),
            faults: Vec::new(),
            timeline: Vec::new(),
            now: 0,
            ops,
            queued: 0,
            host: Arc::default(),
            threads: HashMap::new(),
            ledger: AccessHistory::default(),
            freed: BTreeMap::new(),
            reported: HashSet::new(),
            pending: Vec::new(),
            marks: 0,
            lost: Vec::new(),
            retired: Vec::new(),
            spent: Vec::new(),
        }
    }

    /// Adds the lanes of one more worker; gives the number of the first.
    pub fn add_worker(&mut self) -> (usize, DeviceId) {
        let first = self.lanes.len();
        let index = (first / LaneKind::ALL.len()) as u32;
        let device = DeviceId {
            kind: crate::device::DeviceKind::Sim,
            index,
            worker: 0,
        };
        self.lanes.extend(LaneKind::ALL.map(|kind| Queue {
            device,
            kind,
            items: VecDeque::new(),
            time: 0,
            clock: VectorClock::default(),
            next: 1,
            done: 0,
            works: 0,
        }));
        (first, device)
    }

    /// What executed items held; to be dropped without the lock.
    pub fn take_spent(&mut self) -> impl Sized + use<> {
        std::mem::take(&mut self.spent)
    }

    /// A lane for people.
    pub fn lane_label(&self, lane: usize) -> String {
        format!(
            "{} {}",
            self.lanes[lane].device,
            self.lanes[lane].kind.name()
        )
    }

    /// The virtual time of the calling thread.
    pub fn host_time(&mut self) -> &mut u64 {
        self.threads.entry(std::thread::current().id()).or_default()
    }

    /// Whether a planned fault strikes this call; if so, the error for it.
    pub fn strike(
        &mut self,
        kind: FaultKind,
        lane: Option<usize>,
        worker: u32,
        what: &str,
    ) -> Option<Error> {
        let lane_kind = lane.map(|l| self.lanes[l].kind);
        if !self.plan.strikes(self.seed, kind, worker, lane_kind) {
            return None;
        }
        let place = match lane {
            Some(lane) => format!(
                "{what} (item {} of {})",
                self.lanes[lane].next,
                self.lane_label(lane)
            ),
            None => what.to_owned(),
        };
        let what = format!("injected {} fault: {place}", kind.name());
        self.faults.push(what.clone());
        let device = self.lanes[worker as usize * LaneKind::ALL.len()].device;
        Some(Error::Device { device, what })
    }

    // ---- queuing ----

    /// Queues a kernel or a copy; `nanos` is its duration before dice.
    pub fn push_work(
        &mut self,
        lane: usize,
        what: &str,
        nanos: u64,
        work: ItemWork,
        (reads, writes): (Vec<Range<u64>>, Vec<Range<u64>>),
    ) {
        let queue = &mut self.lanes[lane];
        queue.works += 1;
        let nanos = self.timing.thrown(nanos, self.seed, lane, queue.works);
        let kind = match &work {
            ItemWork::Copy(..) => FaultKind::Copy,
            _ => FaultKind::Kernel,
        };
        let worker = queue.device.index;
        let error = self.strike(kind, Some(lane), worker, what);
        let seq = self.lanes[lane].next;
        let fails = error.is_some();
        let device = self.lanes[lane].device;
        self.pending
            .extend(error.map(|error| Pending::new(Some((lane, seq)), device, error)));
        let cost = self.timing.queue_ns;
        *self.host_time() += cost;
        self.use_after_free(lane, what, &reads, false);
        self.use_after_free(lane, what, &writes, true);
        self.push(
            lane,
            what,
            QueuedItem {
                nanos,
                reads,
                writes,
                fails,
                ..QueuedItem::of(work)
            },
        );
    }

    /// Queues the return of a block: it is poisoned in the order of the lane.
    pub fn push_free(&mut self, lane: usize, range: Range<u64>) {
        let name = self.label(lane, "free");
        self.freed.insert(range.start, (range.end, name));
        let writes = vec![range.clone()];
        self.push(
            lane,
            "free",
            QueuedItem {
                writes,
                ..QueuedItem::of(ItemWork::Free(range))
            },
        );
    }

    /// Queues a mark behind all work so far.
    pub fn push_record(&mut self, lane: usize) -> Arc<Mark> {
        let worker = self.lanes[lane].device.index;
        let lost = self
            .strike(FaultKind::Lost, Some(lane), worker, "event")
            .is_some();
        let (seq, number) = (self.lanes[lane].next, self.marks);
        self.marks += 1;
        let mark = Arc::new(Mark {
            lane,
            seq,
            number,
            passed: OnceLock::new(),
        });
        self.push(
            lane,
            "event",
            QueuedItem::of(ItemWork::Record {
                mark: mark.clone(),
                lost,
            }),
        );
        mark
    }

    /// Puts later work of the lane behind a mark.
    pub fn push_wait(&mut self, lane: usize, mark: Arc<Mark>) {
        self.push(lane, "wait", QueuedItem::of(ItemWork::Wait(mark)));
    }

    fn push(&mut self, lane: usize, what: &str, mut item: QueuedItem) {
        item.what = what.to_owned();
        item.name = self.label(lane, what);
        item.ready = *self.host_time();
        item.host = self.host.clone();
        let queue = &mut self.lanes[lane];
        item.seq = queue.next;
        queue.next += 1;
        queue.items.push_back(item);
        self.queued += 1;
        while self.queued > self.bound && self.step() {}
    }

    /// How reports name the item that the lane gets next.
    fn label(&self, lane: usize, what: &str) -> Arc<str> {
        format!(
            "{what} (item {} of {})",
            self.lanes[lane].next,
            self.lane_label(lane)
        )
        .into()
    }

    // ---- running ----

    /// Start and end of a lane's head, unless it waits for an event.
    fn due(&self, queue: &Queue) -> Option<(u64, u64)> {
        let item = queue.items.front()?;
        let start = match &item.work {
            ItemWork::Wait(mark) => queue.time.max(mark.passed.get()?.time),
            // A device knows nothing of these; they take the lane as it is.
            ItemWork::Record { .. } | ItemWork::Free(_) => queue.time,
            ItemWork::Kernel(_) | ItemWork::Copy(..) => queue.time.max(item.ready),
        };
        Some((start, start + item.nanos))
    }

    /// Runs the next item; false when every lane is empty or waits.
    fn step(&mut self) -> bool {
        let heads = self.lanes.iter().enumerate().filter_map(|(lane, queue)| {
            let (start, end) = self.due(queue)?;
            let lot = throw(self.seed, lane, queue.done, 4);
            Some((end, lot, lane, start))
        });
        let first =
            heads.min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        let Some((end, _, lane, start)) = first else {
            return false;
        };
        let queue = &mut self.lanes[lane];
        let item = queue.items.pop_front().expect("the head was looked at");
        self.queued -= 1;
        if !queue.clock.covers(&item.host) {
            queue.clock.join(&item.host);
        }
        queue.clock.reach(lane, item.seq);
        queue.time = end;
        queue.done = item.seq;
        self.now = self.now.max(end);
        self.perform(lane, &item, start, end);
        self.spent.push(item);
        true
    }

    fn perform(&mut self, lane: usize, item: &QueuedItem, start: u64, end: u64) {
        match &item.work {
            ItemWork::Wait(mark) => {
                let passed = mark
                    .passed
                    .get()
                    .expect("a lane goes past a wait after its event only");
                self.lanes[lane].clock.join(&passed.clock);
            }
            ItemWork::Record { mark, lost } => {
                let passed = Passed {
                    time: end,
                    clock: Arc::new(self.lanes[lane].clock.clone()),
                };
                if *lost {
                    self.lost.push((mark.clone(), passed));
                } else {
                    let first = mark.passed.set(passed).is_ok();
                    debug_assert!(first, "a record runs once");
                }
            }
            ItemWork::Free(range) => {
                self.note(lane, item);
                // SAFETY: the block lies in an arena, which is kept until every lane has passed
                // what was queued while it lived; its owner gave it back and runs are serialised by
                // the lock.
                unsafe { poison(range) };
            }
            ItemWork::Copy(..) | ItemWork::Kernel(_) => {
                self.note(lane, item);
                self.execute(lane, item);
                let queue = &self.lanes[lane];
                self.timeline.push(Span {
                    worker: queue.device.index,
                    lane: queue.kind,
                    item: item.seq,
                    name: item.what.clone(),
                    start_ns: start,
                    end_ns: end,
                });
            }
        }
    }

    /// Moves or computes the data of an item.
    fn execute(&mut self, lane: usize, item: &QueuedItem) {
        let outcome = match &item.work {
            _ if item.fails => Err(None),
            ItemWork::Copy(copy, staged) => {
                let src = staged
                    .as_ref()
                    .map_or(copy.src as *const u8, |bytes| bytes.as_ptr());
                let dst = copy.dst as *mut u8;
                // SAFETY: the caller that queued the copy promised that both ranges stay valid
                // until the lane has passed it, which is now; runs are serialised by the lock, so
                // nothing else moves them. What was staged has the size of the copy.
                unsafe { std::ptr::copy(src, dst, copy.bytes as usize) };
                Ok(())
            }
            ItemWork::Kernel(call) => {
                let QueuedKernel {
                    kernel,
                    src,
                    dst,
                    scratch,
                    faults,
                } = &**call;
                // SAFETY: the caller that queued the kernel promised operands as its documentation
                // asks and memory that stays until the lane has passed it, which is now; runs are
                // serialised by the lock.
                let computed = unsafe { self.ops.compute(kernel, src, dst, *scratch) };
                // What a kernel refuses is the data: only the work that it belongs to is concerned.
                computed.map_err(|error| match faults {
                    Some(faults) => {
                        faults.put(error);
                        None
                    }
                    None => Some(error),
                })
            }
            ItemWork::Free(_) | ItemWork::Record { .. } | ItemWork::Wait(_) => Ok(()),
        };
        if let Err(error) = outcome {
            for range in exact_writes(item) {
                // SAFETY: these are bytes of the destinations, valid as above.
                unsafe { poison(&range) };
            }
            let device = self.lanes[lane].device;
            self.pending
                .extend(error.map(|error| Pending::new(Some((lane, item.seq)), device, error)));
        }
    }

    // ---- order ----

    /// Notes what an item touches and reports what it is not ordered after.
    fn note(&mut self, lane: usize, item: &QueuedItem) {
        let free = matches!(item.work, ItemWork::Free(_));
        let access = Access {
            lane,
            seq: item.seq,
            name: item.name.clone(),
            free,
        };
        let clock = &self.lanes[lane].clock;
        let (mut read, mut wrote) = (Vec::new(), Vec::new());
        for range in &item.reads {
            self.ledger.read(range.clone(), &access, clock, &mut read);
        }
        for range in &item.writes {
            self.ledger.write(range.clone(), &access, clock, &mut wrote);
        }
        for (clashes, writes) in [(read, false), (wrote, true)] {
            for clash in clashes {
                self.clash(&clash, &access, writes);
            }
        }
    }

    fn clash(&mut self, clash: &Clash, second: &Access, writes: bool) {
        let Clash {
            range,
            first,
            first_wrote,
        } = clash;
        if !self
            .reported
            .insert((first.lane, first.seq, second.lane, second.seq))
        {
            return;
        }
        let verb = if writes { "write" } else { "read" };
        let second = match (second.free, first.free) {
            (true, _) => second.name.to_string(),
            (_, true) => format!("{verb} of freed memory by {}", second.name),
            _ => format!("{verb} by {}", second.name),
        };
        let first = match (first.free, first_wrote) {
            (true, _) => first.name.to_string(),
            (_, true) => format!("write by {}", first.name),
            _ => format!("read by {}", first.name),
        };
        self.report(clash.first.lane, range, first, second);
    }

    /// Reports ranges that were given back before, in host order, and not handed out again.
    fn use_after_free(&mut self, lane: usize, what: &str, ranges: &[Range<u64>], writes: bool) {
        let hit = ranges.iter().find_map(|r| {
            let (start, (end, by)) = self.freed.range(..r.end).next_back()?;
            (*end > r.start).then(|| ((*start).max(r.start)..(*end).min(r.end), by.clone()))
        });
        if let Some((range, by)) = hit {
            let verb = if writes { "write" } else { "read" };
            let second = format!("{verb} of freed memory by {}", self.label(lane, what));
            self.report(lane, &range, by.to_string(), second);
        }
    }

    /// Reports downloads under way to what a staged upload reads now.
    pub fn too_early(&mut self, lane: usize, what: &str, reads: &[Range<u64>]) {
        let writes = |item: &QueuedItem| {
            let meets = |w: &Range<u64>| reads.iter().any(|r| w.start < r.end && r.start < w.end);
            matches!(item.work, ItemWork::Copy(..)) && item.writes.iter().any(meets)
        };
        let found = self.lanes.iter().enumerate().find_map(|(lane, queue)| {
            let item = queue.items.iter().find(|item| writes(item))?;
            Some((
                lane,
                item.writes[0].clone(),
                format!("write by {}", item.name),
            ))
        });
        if let Some((first, range, by)) = found {
            let second = format!(
                "early read of pageable memory by {}",
                self.label(lane, what)
            );
            self.report(first, &range, by, second);
        }
    }

    fn report(&mut self, lane: usize, range: &Range<u64>, first: String, second: String) {
        let home = self
            .arenas
            .range(..=range.start)
            .next_back()
            .filter(|(_, a)| a.end >= range.end);
        let at = format!("{:#x}..{:#x}", range.start, range.end);
        let (device, region) = match home {
            Some((base, arena)) => (
                self.lanes[arena.worker as usize * LaneKind::ALL.len()].device,
                format!(
                    "arena bytes {:#x}..{:#x} (address {at})",
                    range.start - base,
                    range.end - base
                ),
            ),
            None => (self.lanes[lane].device, format!("host memory {at}")),
        };
        let race = Race {
            device,
            region,
            first,
            second,
        };
        if self.races.len() < MOST_RACES {
            self.pending
                .push(Pending::new(None, race.device, race.error()));
            self.races.push(race);
        }
    }

    // ---- waiting ----

    /// The host waits for a mark; errors stay for the next fence that asks.
    pub fn pass(&mut self, mark: &Mark) {
        while mark.passed.get().is_none() {
            if !self.step() {
                self.unblock(mark);
            }
        }
        self.arrive(mark);
    }

    /// One step towards a mark; whether it has passed.
    pub fn poll(&mut self, mark: &Mark) -> bool {
        if mark.passed.get().is_none() && !self.step() {
            self.unblock(mark);
        }
        let passed = mark.passed.get().is_some();
        if passed {
            self.arrive(mark);
        } else {
            // Looking takes time; without this a thread that only looks would stand still.
            let now = self.now;
            let host = self.host_time();
            *host = now.max(*host);
        }
        passed
    }

    /// The first error that happened before a passed mark; with the others before it, later marks
    /// forget it if asked to.
    pub fn result_at(&mut self, mark: &Mark, forget: bool) -> Result<()> {
        let Some(passed) = mark.passed.get() else {
            return Ok(());
        };
        let clock = passed.clock.clone();
        let covers = |p: &&mut Pending| {
            p.forgotten.is_none_or(|from| mark.number < from)
                && p.at.is_none_or(|(lane, seq)| clock.has(lane, seq))
        };
        let found = self.pending.iter_mut().find(covers).map(Pending::error);
        if forget {
            let marks = self.marks;
            self.pending
                .iter_mut()
                .filter(covers)
                .for_each(|p| p.forgotten = p.forgotten.or(Some(marks)));
        }
        found.map_or(Ok(()), Err)
    }

    /// Whether something went wrong that is not forgotten.
    pub fn has_failed(&self) -> bool {
        self.pending.iter().any(|p| p.forgotten.is_none())
    }

    /// The calling thread knows that the mark has passed.
    fn arrive(&mut self, mark: &Mark) {
        let passed = mark.passed.get().expect("the caller saw it pass");
        if !self.host.covers(&passed.clock) {
            let mut host = (*self.host).clone();
            host.join(&passed.clock);
            self.host = Arc::new(host);
        }
        let host = self.host_time();
        *host = passed.time.max(*host);
        self.bury();
    }

    /// No lane can go on: says who waits for what, then lets the lost events pass.
    fn unblock(&mut self, wanted: &Mark) {
        let waits = self.lanes.iter().enumerate().filter_map(|(lane, queue)| {
            let item = queue.items.front()?;
            let ItemWork::Wait(mark) = &item.work else {
                return None;
            };
            let (who, whom) = (self.lane_label(lane), self.lane_label(mark.lane));
            Some(format!(
                "{who} waits at item {} for event {} of {whom}",
                item.seq, mark.seq
            ))
        });
        let host = format!(
            "the host waits for event {} of {}",
            wanted.seq,
            self.lane_label(wanted.lane)
        );
        let lost = self
            .lost
            .iter()
            .map(|(m, _)| format!("event {} of {} was lost", m.seq, self.lane_label(m.lane)));
        let what: Vec<String> = std::iter::once(host).chain(waits).chain(lost).collect();
        let what = format!("dead-lock: {}", what.join("; "));
        // Waits refer to records queued before them, so only a lost event can stop all lanes.
        assert!(!self.lost.is_empty(), "{what}");
        let device = self.lanes[wanted.lane].device;
        self.pending
            .push(Pending::new(None, device, Error::Device { device, what }));
        for (mark, passed) in self.lost.drain(..) {
            let first = mark.passed.set(passed).is_ok();
            debug_assert!(first, "a lost event has not passed");
        }
    }

    // ---- memory ----

    /// Notes a new arena.
    pub fn adopt(&mut self, worker: u32, range: Range<u64>) {
        self.ledger.clear(range.clone());
        self.arenas.insert(
            range.start,
            Reserved {
                worker,
                end: range.end,
                fresh: range.start,
            },
        );
    }

    /// Takes an arena back; its memory goes when every lane has passed what is queued now.
    pub fn retire(&mut self, arena: Arena) {
        self.arenas.remove(&arena.base());
        let range = arena.base()..arena.base() + arena.bytes().0;
        self.unfree(&range);
        let until = self.lanes.iter().map(|queue| queue.next - 1).collect();
        self.retired.push(Retired { arena, until });
        self.bury();
    }

    fn bury(&mut self) {
        let gone = |r: &Retired| {
            self.lanes
                .iter()
                .zip(&r.until)
                .all(|(queue, until)| queue.done >= *until)
        };
        let (gone, kept) = std::mem::take(&mut self.retired)
            .into_iter()
            .partition(gone);
        self.retired = kept;
        let gone: Vec<Retired> = gone;
        for Retired { arena, .. } in gone {
            self.ledger
                .clear(arena.base()..arena.base() + arena.bytes().0);
        }
    }

    /// A block is handed out: what was never handed out before is poisoned, contents are undefined.
    pub fn hand_out(&mut self, range: &Range<u64>) {
        self.unfree(range);
        let arena = self
            .arenas
            .range_mut(..=range.start)
            .next_back()
            .map(|(_, arena)| arena);
        if let Some(arena) = arena.filter(|a| range.end <= a.end && a.fresh < range.end) {
            // SAFETY: inside a live arena, at addresses that no block has had: nothing reads or
            // writes there.
            unsafe { poison(&(arena.fresh..range.end)) };
            arena.fresh = range.end;
        }
    }

    fn unfree(&mut self, range: &Range<u64>) {
        while let Some((&start, &(end, _))) = self.freed.range(..range.end).next_back()
            && end > range.start
        {
            let (_, by) = self.freed.remove(&start).expect("just seen");
            if end > range.end {
                self.freed.insert(range.end, (end, by.clone()));
            }
            if start < range.start {
                self.freed.insert(start, (range.start, by));
            }
        }
    }

    /// Whether all of a range lies in an arena of the worker (of any worker: `None`).
    pub fn on_device(&self, worker: Option<u32>, range: &Range<u64>) -> bool {
        let home = self.arenas.range(..=range.start).next_back();
        home.is_some_and(|(_, a)| range.end <= a.end && worker.is_none_or(|w| w == a.worker))
    }

    /// Whether all of these ranges are pinned host memory.
    pub fn is_pinned(&self, ranges: &[Range<u64>]) -> bool {
        let home = |r: &Range<u64>| self.pinned.range(..=r.start).next_back();
        ranges
            .iter()
            .all(|r| home(r).is_some_and(|(_, end)| r.end <= *end))
    }

    /// Whether any of a range lies in an arena.
    pub fn meets_device(&self, range: &Range<u64>) -> bool {
        self.arenas
            .range(..range.end)
            .next_back()
            .is_some_and(|(_, a)| a.end > range.start)
    }
}

impl QueuedItem {
    /// An item that takes no time and touches nothing; queuing gives it its place.
    fn of(work: ItemWork) -> Self {
        Self {
            seq: 0,
            what: String::new(),
            name: Arc::from(""),
            work,
            ready: 0,
            nanos: 0,
            host: Arc::default(),
            reads: Vec::new(),
            writes: Vec::new(),
            fails: false,
        }
    }
}

/// The bytes an item writes, row by row, however many rows there are.
fn exact_writes(item: &QueuedItem) -> Vec<Range<u64>> {
    match &item.work {
        ItemWork::Kernel(call) => call
            .dst
            .iter()
            .flatten()
            .flat_map(|v| ranges(v, usize::MAX))
            .collect(),
        _ => item.writes.clone(),
    }
}

/// # Safety
/// The range is valid for writes, and nothing else reads or writes it during the call.
unsafe fn poison(range: &Range<u64>) {
    // SAFETY: promised by the caller.
    unsafe {
        std::ptr::write_bytes(
            range.start as *mut u8,
            POISON,
            (range.end - range.start) as usize,
        )
    };
}

/// The bytes a copy reads and writes.
pub(super) fn copy_ranges(copy: &Copy) -> (Range<u64>, Range<u64>) {
    (
        copy.src..copy.src + copy.bytes,
        copy.dst..copy.dst + copy.bytes,
    )
}

/// What a copy is called in reports.
pub(super) fn copy_name(copy: &Copy) -> String {
    let way = match copy.direction {
        Direction::Upload => "upload",
        Direction::Download => "download",
        Direction::Local => "copy",
    };
    format!("{way} of {}", copy.what)
}
