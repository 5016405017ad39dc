//! The workers in round-robin order, and the threads that serve them.
//!
//! A ring may serve several engines: the stages of all their calls go to its workers one after
//! another, in the order of submission, starting where the last call left off.
//!
//! # Invariants
//! - Every worker's queue has the calls in the same order, so that a job only ever waits for jobs
//!   that stand earlier in some queue: no two workers can wait for each other.
//! - All device memory is reserved when the ring is made.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use roundpipe_tensor::host::Pin;
use roundpipe_tensor::transfer::{CopyRecord, HostPool, HostUse, Port};
use roundpipe_tensor::{Bytes, Device, Error as TensorError, Pins, Worker};

use super::call::CallList;
use super::copy_threads::CopyThreads;
use super::launcher::Launcher;
use super::queue::{JobQueue, StageJob};
use crate::budget::{self, WorkerBudget};
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::plan::{Pass, Stage};
use crate::schedule::RoundRobin;
use crate::status::Board;
use crate::sync::lock;

thread_local! {
    /// The ring that the thread runs a job of.
    static AT_WORK: Cell<usize> = const { Cell::new(0) };
}

/// Tells rings apart while they live; never 0.
fn ring_id(calls: &Arc<CallList>) -> usize {
    Arc::as_ptr(calls) as usize
}

/// Workers that stages are dispatched to; cloning shares them.
#[derive(Clone)]
pub struct Ring(Arc<Inner>);

struct Inner {
    workers: Vec<Worker>,
    /// By worker.
    budgets: Vec<WorkerBudget>,
    host_activations: Option<Bytes>,
    ports: Vec<Arc<Port>>,
    /// Whose host memory is used.
    host_device: Arc<dyn Device>,
    host: Arc<HostPool>,
    /// Gives each stage its worker. Held while a call's jobs are queued, so that all queues have
    /// calls in the same order.
    schedule: Mutex<RoundRobin>,
    executor: Executor,
    threads: Mutex<Vec<JoinHandle<()>>>,
    board: Board,
    /// What its devices were found with.
    notes: Vec<String>,
    /// The calls of all engines.
    calls: Arc<CallList>,
}

/// Who runs jobs.
enum Executor {
    /// The caller, one job after another: the oracle.
    Serial(Mutex<Vec<Launcher>>),
    /// A launcher thread per worker.
    Threaded(Vec<Arc<JobQueue>>),
}

/// What a ring is made from.
#[derive(Debug, Clone, Default)]
pub struct RingOptions {
    /// The most that each worker takes of its device, the driver's context and libraries included.
    /// By default what the device has free when the ring is made, less a sixteenth or what a context
    /// takes; half of it where the device is the host. Workers on one device get equal parts.
    pub memory: Option<Bytes>,
    /// Bytes of activations that may stay on a worker; by default a quarter of its memory where
    /// weights are read in place, elsewhere a tenth or what the stages of a call leave, if that is
    /// more. Beside the inputs of stages, results are kept that spare recomputes the most time.
    pub activation_budget: Option<Bytes>,
    /// Bytes of host memory that activations may take: what inputs of stages do not need may hold
    /// such results where workers have no room for them. By default up to a quarter of what is free,
    /// and only for results that spare much more time than their copies take.
    pub host_activations: Option<Bytes>,
    /// How host memory for activations is pinned.
    pub pin: Pin,
    /// One job after another on the caller's thread: slow, and the oracle of the threaded executor.
    pub serial: bool,
}

impl Ring {
    /// Reserves memory on each device and starts its threads.
    ///
    /// # Errors
    /// [`Error::Config`] without devices; when a device has less memory than asked for or no thread
    /// starts.
    pub fn new(devices: &[Arc<dyn Device>], options: &RingOptions) -> Result<Self> {
        Self::with_notes(devices, options, Vec::new())
    }

    /// As [`Ring::new`], of devices that were looked for; what was noted on the way is kept for
    /// [`Ring::notes`].
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub fn of(devices: &Devices, options: &RingOptions) -> Result<Self> {
        Self::with_notes(&devices.workers, options, devices.notes())
    }

    fn with_notes(
        devices: &[Arc<dyn Device>],
        options: &RingOptions,
        notes: Vec<String>,
    ) -> Result<Self> {
        let Some(host_device) = host_device(devices) else {
            return Err(Error::config(
                "devices",
                "there is none; a ring needs at least one worker",
            ));
        };
        for note in &notes {
            tracing::info!("{note}");
        }
        let board = Board::new();
        let host = HostPool::new(host_device.clone(), options.pin);
        let mut workers = Vec::with_capacity(devices.len());
        for (device, arena) in devices.iter().zip(arenas(devices, options.memory)?) {
            let worker = Worker::new(device.clone(), arena);
            workers.push(worker.map_err(|cause| no_arena(cause, options))?);
        }
        let port = |worker: &Worker| Arc::new(Port::new(worker.clone(), host.clone()));
        let ports: Vec<Arc<Port>> = workers.iter().map(port).collect();
        let calls = Arc::<CallList>::default();
        let mut threads = Vec::new();
        let budget = |worker: &Worker| {
            let arena = worker.pool().capacity().0;
            let reads_host = worker.device().aliases_host();
            let kept = options.activation_budget.map(|bytes| bytes.0);
            WorkerBudget::new(arena, reads_host, kept)
        };
        let executor = if options.serial {
            let inline = |(i, port): (usize, &Arc<Port>)| {
                Launcher::new(
                    i,
                    port.clone(),
                    CopyThreads::Inline(port.clone()),
                    budget(port.worker()),
                    None,
                )
            };
            Executor::Serial(Mutex::new(ports.iter().enumerate().map(inline).collect()))
        } else {
            let mut queues = Vec::new();
            for (i, port) in ports.iter().enumerate() {
                let queue = Arc::new(JobQueue::default());
                let copies = CopyThreads::start(port, &mut threads)?;
                let launcher = Launcher::new(
                    i,
                    port.clone(),
                    copies,
                    budget(port.worker()),
                    Some(queue.clone()),
                );
                threads.push(start(launcher, ring_id(&calls))?);
                queues.push(queue);
            }
            Executor::Threaded(queues)
        };
        let schedule = RoundRobin::new(workers.len()).shares_cores(is_host(&workers));
        let threads = Mutex::new(threads);
        let inner = Inner {
            host_activations: options.host_activations,
            budgets: workers.iter().map(budget).collect(),
            workers,
            ports,
            host_device,
            host,
            schedule: Mutex::new(schedule),
            executor,
            threads,
            board,
            notes,
            calls,
        };
        Ok(Self(Arc::new(inner)))
    }

    /// The workers in order.
    pub fn workers(&self) -> &[Worker] {
        &self.0.workers
    }

    /// How many workers there are.
    pub fn len(&self) -> usize {
        self.0.workers.len()
    }

    /// Never: a ring has at least one worker.
    pub fn is_empty(&self) -> bool {
        self.0.workers.is_empty()
    }

    /// Whether every worker computes in host memory, and so on the host's cores.
    pub(crate) fn is_host(&self) -> bool {
        is_host(self.workers())
    }

    /// How each worker's memory is divided.
    pub fn budgets(&self) -> &[WorkerBudget] {
        &self.0.budgets
    }

    /// Host memory for results that spare recomputes their time, where the user has said how much.
    pub(crate) fn host_activations(&self) -> Option<Bytes> {
        self.0.host_activations
    }

    /// The budget that a plan for all workers must fit.
    pub(crate) fn least_budget(&self) -> WorkerBudget {
        let least = WorkerBudget::least(self.budgets());
        least.expect("a ring has at least one worker")
    }

    /// Why there is no GPU among the workers and which GPUs were left out, a line each, where the
    /// devices were looked for: by [`Ring::of`], or by an engine that was given none.
    pub fn notes(&self) -> &[String] {
        &self.0.notes
    }

    /// How much is pinned of the host memory that the ring's device for it gave: activations, and
    /// the weights and gradients of engines on this ring. That device is the first that copies from
    /// host memory, where there is one.
    pub fn pins(&self) -> Pins {
        self.0.host_device.pins()
    }

    /// The device whose host memory is used.
    pub(crate) fn host_device(&self) -> &Arc<dyn Device> {
        &self.0.host_device
    }

    /// Host memory of activations.
    pub fn host_use(&self) -> HostUse {
        self.0.host.usage()
    }

    /// Where activations wait in host memory.
    pub(crate) fn host_pool(&self) -> &Arc<HostPool> {
        &self.0.host
    }

    pub(crate) fn port(&self, worker: usize) -> &Arc<Port> {
        &self.0.ports[worker]
    }

    pub(crate) fn board(&self) -> &Board {
        &self.0.board
    }

    /// The workers of a call's stages.
    pub(crate) fn assign(&self, stages: &[Stage]) -> Vec<usize> {
        let passes: Vec<Pass> = stages.iter().map(|stage| stage.pass).collect();
        lock(&self.0.schedule).take(&passes)
    }

    /// Whether copies are noted.
    pub(crate) fn log_copies(&self, on: bool) {
        self.0.ports.iter().for_each(|port| port.log().set(on));
    }

    /// The copies noted since the last call, with their workers.
    pub(crate) fn take_copies(&self) -> Vec<(usize, CopyRecord)> {
        let mut taken = Vec::new();
        for (worker, port) in self.0.ports.iter().enumerate() {
            taken.extend(port.log().take().into_iter().map(|copy| (worker, copy)));
        }
        taken
    }

    /// Whether the calling thread is one of the ring's, or runs a job of it.
    pub(crate) fn is_here(&self) -> bool {
        AT_WORK.get() == ring_id(&self.0.calls)
    }

    /// The calls of all engines that use this ring.
    pub(crate) fn calls(&self) -> &Arc<CallList> {
        &self.0.calls
    }

    /// Waits for all lanes. What went wrong in them belongs to calls that have failed, or to others
    /// under way, which fail now.
    pub(crate) fn drain(&self) {
        self.0
            .ports
            .iter()
            .for_each(|port| self.0.calls.drain(port));
    }

    /// Puts workers in order where something went wrong that no call will meet: in work of calls
    /// that have ended.
    pub(crate) fn tidy(&self) {
        if !self.0.calls.active().is_empty() {
            return;
        }
        for port in &self.0.ports {
            if port.worker().device().has_failed() {
                self.0.calls.drain(port);
            }
        }
    }

    /// Queues the jobs of one call (or of its backward), each on its worker.
    pub(crate) fn submit(&self, jobs: Vec<(usize, StageJob)>) {
        match &self.0.executor {
            Executor::Serial(launchers) => {
                let mut launchers = lock(launchers);
                AT_WORK.set(ring_id(&self.0.calls));
                // In the order of stages, so each job finds all that it waits for.
                for (worker, job) in jobs {
                    launchers[worker].run(job);
                }
                AT_WORK.set(0);
            }
            Executor::Threaded(queues) => {
                // One call at a time, so that every queue has the calls in the same order.
                let _order = lock(&self.0.schedule);
                let mut of_worker: Vec<Vec<StageJob>> = queues.iter().map(|_| Vec::new()).collect();
                for (worker, job) in jobs {
                    of_worker[worker].push(job);
                }
                // A worker sees all of them at once: it brings early what the next one needs.
                for (queue, jobs) in queues.iter().zip(of_worker) {
                    queue.push_all(jobs);
                }
            }
        }
    }
}

/// Whose host memory suits all: that of the first device that copies from it, since one that reads
/// it in place gains nothing by pins and gives none.
fn host_device(devices: &[Arc<dyn Device>]) -> Option<Arc<dyn Device>> {
    devices
        .iter()
        .find(|device| !device.aliases_host())
        .or(devices.first())
        .cloned()
}

/// What the user can do about a worker that gets no memory.
fn no_arena(cause: TensorError, options: &RingOptions) -> Error {
    match cause {
        TensorError::HostMemory { .. } if options.memory.is_some() => {
            Error::config("memory", format!("{cause}; ask for less per worker"))
        }
        cause => cause.into(),
    }
}

/// What each worker reserves, with `asked` or without. All devices are asked before anything is
/// reserved: what the first takes is no longer free for the second.
fn arenas(devices: &[Arc<dyn Device>], asked: Option<Bytes>) -> Result<Vec<Bytes>> {
    let free: Vec<u64> = devices.iter().map(|device| device.memory().0).collect();
    let mut arenas = Vec::with_capacity(devices.len());
    for device in devices {
        let same = |other: &Arc<dyn Device>| same_memory(&**other, &**device);
        let workers = devices.iter().filter(|other| same(other)).count() as u64;
        let costs = device.cost_model();
        let context = costs.context_bytes().0;
        let arena = match asked {
            Some(asked) => budget::asked_arena(asked.0, context / workers)?,
            None => {
                let of_device = devices.iter().zip(&free).filter(|(other, _)| same(other));
                // Another process may take some between two questions.
                let least = of_device.map(|(_, free)| *free).min().unwrap_or(0);
                budget::default_arena(least, context, device.aliases_host()) / workers
            }
        };
        arenas.push(Bytes(arena));
    }
    Ok(arenas)
}

/// Whether two workers take their memory from the same device.
fn same_memory(a: &dyn Device, b: &dyn Device) -> bool {
    (a.id().kind, a.id().index) == (b.id().kind, b.id().index)
}

fn start(mut launcher: Launcher, ring: usize) -> Result<JoinHandle<()>> {
    let body = {
        let name = launcher.who.clone();
        std::thread::Builder::new().name(name).spawn(move || {
            AT_WORK.set(ring);
            launcher.run_all();
        })
    };
    body.map_err(|error| {
        let what = format!("cannot start a launcher thread: {error}");
        Error::config("threads", what)
    })
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Executor::Threaded(queues) = &self.executor {
            queues.iter().for_each(|queue| queue.close());
        }
        // Behind the closing of all queues: a copy thread ends when its launcher has dropped its
        // senders, and the launcher when its queue is closed and empty.
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            // A panic was printed when it happened; here only the end of the thread matters.
            let _ = thread.join();
        }
        self.ports.iter().for_each(|port| self.calls.drain(port));
    }
}

/// Whether all workers compute in host memory.
fn is_host(workers: &[Worker]) -> bool {
    workers.iter().all(|worker| worker.device().aliases_host())
}
