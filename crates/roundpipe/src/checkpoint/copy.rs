//! The tensors of a checkpoint on their way to files: from the memory they live in, or, where the
//! disk is slower than the optimizer, by way of spare memory.
//!
//! Writers take tensors from the front, hash them and write them; each is let go when it is in the
//! page cache. A system takes only so many unwritten pages, though, and then writes at the speed of
//! the disk. So after a moment other threads copy tensors from the back into spare memory, let them
//! go, and leave the writing for later. Without spare memory updates wait for the disk.
//!
//! # Invariants
//! - A tensor is let go once its bytes are in the page cache or in spare memory, never before.
//! - Spare memory never exceeds its limit, and is given back tensor by tensor.
//! - After a failure nothing more is written, and everything is let go.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use roundpipe_files::{AtomicFolder, DiskFile, Hash128, Hasher128};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::HostRef;
use roundpipe_tensor::optim::{self, Remainders};
use roundpipe_tensor::{DType, HostBuf, Shape, bf16, host_memory};

use crate::error::Result;
use crate::sync::{lock, unpoisoned};
use crate::version::Hold;

/// What is hashed and written at once, in bytes.
const CHUNK: usize = 1 << 20;
/// The part of the memory that is left which a save may borrow.
const SPARE_PART: u64 = 4;
/// The most threads that copy into spare memory.
const MOST_COPIERS: usize = 8;
/// A state that is larger begins to be copied at once: the next update comes sooner than the disk.
const LARGE_BYTES: u64 = 2 << 30;

/// Memory that a save may borrow.
#[derive(Debug, Clone, Copy)]
pub struct SpareMemory {
    /// At most so much; without a number, a quarter of what the system has left.
    pub bytes: Option<u64>,
    /// When the save has taken so long, if its state is not large: small ones need none.
    pub after: Duration,
}

impl Default for SpareMemory {
    fn default() -> Self {
        Self {
            bytes: None,
            after: Duration::from_millis(200),
        }
    }
}

impl SpareMemory {
    fn limit(&self) -> u64 {
        let left = || host_memory::available().map_or(0, |left| left.0 / SPARE_PART);
        self.bytes.unwrap_or_else(left)
    }
}

/// One tensor of a snapshot.
pub(crate) struct TensorSource {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    pub bytes: SourceBytes,
}

/// Where a tensor's bytes are.
pub(crate) enum SourceBytes {
    /// In host memory that the optimizer writes later. The guard comes first, so that it is dropped
    /// before the hold.
    Held { guard: HostRef, _hold: Arc<Hold> },
    /// The same, in two parts that are put together as they are written.
    Split {
        value: SplitGuards,
        _hold: Arc<Hold>,
    },
    /// A copy of something small.
    Copied(Vec<u8>),
    /// A copy in spare memory.
    Spared(HostRef),
}

/// Guards on bf16 weights and on what they lack of their f32 masters.
pub(crate) struct SplitGuards {
    pub weights: HostRef,
    pub remainder: HostRef,
}

impl TensorSource {
    /// Size in bytes.
    pub fn len(&self) -> usize {
        match &self.bytes {
            SourceBytes::Held { guard, .. } => guard.bytes().len(),
            SourceBytes::Split { value, .. } => value.len() * size_of::<f32>(),
            SourceBytes::Copied(bytes) => bytes.len(),
            SourceBytes::Spared(guard) => guard.bytes().len(),
        }
    }

    /// Gives `sink` all bytes in order, [`CHUNK`] at a time.
    fn each_chunk(&self, sink: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let bytes = match &self.bytes {
            SourceBytes::Held { guard, .. } => guard.bytes(),
            SourceBytes::Split { value, .. } => return value.each_chunk(sink),
            SourceBytes::Copied(bytes) => bytes,
            SourceBytes::Spared(guard) => guard.bytes(),
        };
        bytes.chunks(CHUNK).try_for_each(sink)
    }
}

impl SplitGuards {
    fn len(&self) -> usize {
        self.weights.as_slice::<bf16>().len()
    }

    /// The masters as [`TensorSource::each_chunk`] gives them.
    fn each_chunk(&self, mut sink: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        const ELEMENTS: usize = CHUNK / size_of::<f32>();
        let len = self.len();
        let weights = self.weights.as_slice();
        let chunk = HostBuf::zeroed("masters", CHUNK.min(len * size_of::<f32>()));
        let chunk = chunk.map_err(io::Error::other)?;
        let one = Threads::new(Some(1)).map_err(io::Error::other)?;
        let remainders = Remainders::new(&self.remainder, len).map_err(io::Error::other)?;
        for start in (0..len).step_by(ELEMENTS) {
            let range = start..len.min(start + ELEMENTS);
            let mut here =
                (chunk.write(0..range.len() * size_of::<f32>())).map_err(io::Error::other)?;
            let masters = here.as_mut_slice();
            optim::join(
                &one,
                &weights[range.clone()],
                remainders.range(range),
                masters,
            )
            .map_err(io::Error::other)?;
            sink(here.bytes())?;
        }
        Ok(())
    }
}

/// A tensor on its way to a file.
pub(super) struct TensorJob {
    pub index: usize,
    pub file: usize,
    pub offset: u64,
    pub source: TensorSource,
}

/// Tensors that one writer has to write.
#[derive(Default)]
struct Lane {
    /// In the memory they live in, in the order of updates.
    held: VecDeque<TensorJob>,
    /// In spare memory.
    spared: Vec<TensorJob>,
    /// Being copied there.
    copying: usize,
}

struct State {
    lanes: Vec<Lane>,
    spare: u64,
    failed: bool,
}

/// What writers and copiers share.
struct Work {
    state: Mutex<State>,
    changed: Condvar,
}

/// Copies all tensors to their files; their hashes, in their order. `files` are those that jobs
/// name, `lanes` the jobs of each writer.
pub(super) fn copy(
    folder: &AtomicFolder,
    files: &[&dyn DiskFile],
    lanes: Vec<Vec<TensorJob>>,
    spare: SpareMemory,
) -> Result<Vec<Hash128>> {
    let bytes = |job: &TensorJob| job.source.len() as u64;
    let is_large = lanes.iter().flatten().map(bytes).sum::<u64>() > LARGE_BYTES;
    let after = if is_large {
        Duration::ZERO
    } else {
        spare.after
    };
    let relief = Instant::now() + after;
    let count = lanes.iter().map(Vec::len).sum();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let writers = cores.min(lanes.len()).max(1);
    let mut of_writers: Vec<Vec<TensorJob>> = (0..writers).map(|_| Vec::new()).collect();
    for (lane, jobs) in lanes.into_iter().enumerate() {
        of_writers[lane % writers].extend(jobs);
    }
    let lanes = of_writers.into_iter().map(|mut jobs| {
        // A writer with several lanes goes through them side by side.
        jobs.sort_by_key(|job| job.index);
        Lane {
            held: jobs.into(),
            ..Lane::default()
        }
    });
    let work = Work {
        state: Mutex::new(State {
            lanes: lanes.collect(),
            spare: spare.limit(),
            failed: false,
        }),
        changed: Condvar::new(),
    };
    let results: Vec<Result<Vec<(usize, Hash128)>>> = std::thread::scope(|scope| {
        let copiers = (cores / 2).clamp(1, MOST_COPIERS);
        for _ in 0..copiers {
            scope.spawn(|| work.relieve(relief));
        }
        let work = &work;
        let writers = (0..writers).map(|lane| scope.spawn(move || work.write(folder, files, lane)));
        let writers: Vec<_> = writers.collect();
        let ended = writers.into_iter().map(|writer| match writer.join() {
            Ok(result) => result,
            Err(panic) => {
                work.fail();
                std::panic::resume_unwind(panic)
            }
        });
        ended.collect()
    });
    let mut hashes = vec![Hash128::of(&[]); count];
    for result in results {
        for (index, hash) in result? {
            hashes[index] = hash;
        }
    }
    Ok(hashes)
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Stops everything and lets all tensors go.
    fn fail(&self) {
        let mut state = self.lock();
        state.failed = true;
        state.lanes.iter_mut().for_each(|lane| {
            lane.held.clear();
            lane.spared.clear();
        });
        self.changed.notify_all();
    }

    /// Writes the tensors of a lane.
    fn write(
        &self,
        folder: &AtomicFolder,
        files: &[&dyn DiskFile],
        lane: usize,
    ) -> Result<Vec<(usize, Hash128)>> {
        let mut hashes = Vec::new();
        while let Some((job, spared)) = self.next(lane) {
            let index = job.index;
            let written = write_tensor(files[job.file], job);
            let hash = folder.check(written).inspect_err(|_| self.fail())?;
            hashes.push((index, hash));
            if spared > 0 {
                self.lock().spare += spared;
                self.changed.notify_all();
            }
        }
        Ok(hashes)
    }

    /// The next tensor of a lane, and what of it is in spare memory.
    fn next(&self, lane: usize) -> Option<(TensorJob, u64)> {
        let mut state = self.lock();
        loop {
            let queue = &mut state.lanes[lane];
            if let Some(job) = queue.held.pop_front() {
                return Some((job, 0));
            }
            if let Some(job) = queue.spared.pop() {
                let bytes = job.source.len() as u64;
                return Some((job, bytes));
            }
            if queue.copying == 0 {
                // The copiers may be waiting for more.
                self.changed.notify_all();
                return None;
            }
            state = unpoisoned(self.changed.wait(state));
        }
    }

    /// Copies tensors into spare memory, from the last on, until none is left.
    fn relieve(&self, from: Instant) {
        let mut state = self.lock();
        loop {
            if state.lanes.iter().all(|lane| lane.held.is_empty()) {
                return;
            }
            let wait = from.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                state = unpoisoned(self.changed.wait_timeout(state, wait)).0;
                continue;
            }
            let Some((lane, mut job)) = take_last(&mut state) else {
                // Until a writer gives spare memory back.
                state = unpoisoned(self.changed.wait(state));
                continue;
            };
            drop(state);
            let copy = copied(&job.source);
            let has_copy = copy.is_some();
            if let Some(copy) = copy {
                // Lets the tensor go.
                job.source.bytes = SourceBytes::Spared(copy);
            }
            state = self.lock();
            state.lanes[lane].copying -= 1;
            if state.failed {
                drop(job);
            } else if has_copy {
                state.lanes[lane].spared.push(job);
            } else {
                // The system has less memory than it said: the disk has to do.
                state.lanes[lane].held.push_back(job);
                state.spare = 0;
            }
            self.changed.notify_all();
        }
    }
}

/// Takes the last tensor of all that fits the spare memory, and its lane.
fn take_last(state: &mut State) -> Option<(usize, TensorJob)> {
    let spare = state.spare;
    let last = |lane: &Lane| {
        let job = lane.held.back()?;
        (job.source.len() as u64 <= spare).then_some(job.index)
    };
    let lanes = state.lanes.iter().enumerate();
    let (_, lane) = lanes.filter_map(|(i, lane)| Some((last(lane)?, i))).max()?;
    let queue = &mut state.lanes[lane];
    let job = queue.held.pop_back()?;
    queue.copying += 1;
    state.spare -= job.source.len() as u64;
    Some((lane, job))
}

/// A copy in large pages, if the system has the memory.
fn copied(source: &TensorSource) -> Option<HostRef> {
    let copy = HostBuf::zeroed("checkpoint", source.len()).ok()?;
    let mut write = copy.write(0..copy.len()).ok()?;
    let mut into = write.bytes().chunks_mut(CHUNK);
    let copied = source.each_chunk(|chunk| {
        let into = into.next().ok_or(io::ErrorKind::WriteZero)?;
        into.copy_from_slice(chunk);
        Ok(())
    });
    copied.ok()?;
    drop(write);
    copy.read_all().ok()
}

/// Writes one tensor and lets it go.
fn write_tensor(file: &dyn DiskFile, job: TensorJob) -> io::Result<Hash128> {
    let mut hasher = Hasher128::new();
    let mut at = job.offset;
    job.source.each_chunk(|chunk| {
        hasher.update(chunk);
        file.write_at(chunk, at)?;
        at += chunk.len() as u64;
        Ok(())
    })?;
    Ok(hasher.finish())
}
