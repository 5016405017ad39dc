//! The protocol of slots in every order that threads and lanes can take: no upload touches memory
//! that a kernel still reads, no kernel reads what has not landed, and no thread waits for ever.
//!
//! The pool, the slots and their events are the real ones; the device is a model whose two lanes
//! are threads of loom, and whose memory is cells that report any access not ordered after the last
//! one.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p roundpipe-tensor --test loom`.
#![cfg(loom)]

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use roundpipe_tensor::device::{Arena, Copy, Device, Event, EventState, Lane, LaneKind, Ops};
use roundpipe_tensor::pool::ALIGN;
use roundpipe_tensor::transfer::{CopyLog, FilledSlot, Slot, SlotSegment};
use roundpipe_tensor::{
    Bytes, DType, DeviceId, DeviceKind, HostBuf, Result, Shape, Tensor, Worker,
};

const BASE: u64 = 1 << 20;
const MODEL: DeviceId = DeviceId {
    kind: DeviceKind::Sim,
    index: 0,
    worker: 0,
};

/// A point in a lane: a flag that the lane sets when it gets there.
#[derive(Default)]
struct Mark {
    passed: Mutex<bool>,
    changed: Condvar,
}

impl Mark {
    fn pass(&self) {
        *self.passed.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut passed = self.passed.lock().unwrap();
        while !*passed {
            passed = self.changed.wait(passed).unwrap();
        }
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mark")
    }
}

#[derive(Debug)]
struct MarkState(Arc<Mark>);

// SAFETY: a mark is set by its lane, behind all work that was queued before it.
unsafe impl EventState for MarkState {
    fn passed(&self) -> Result<bool> {
        Ok(*self.0.passed.lock().unwrap())
    }

    fn fence(&self) -> Result<()> {
        self.0.wait();
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What a lane does.
enum Work {
    Wait(Arc<Mark>),
    Pass(Arc<Mark>),
    /// Writes a number into the block at an address.
    Write(u64, u64),
    /// Expects that number there.
    Read(u64, u64),
}

/// An in-order queue; a thread runs it.
struct Queue {
    kind: LaneKind,
    work: Mutex<(VecDeque<Work>, bool)>,
    changed: Condvar,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())
    }
}

impl Queue {
    fn new(kind: LaneKind) -> Self {
        Self {
            kind,
            work: Mutex::new((VecDeque::new(), false)),
            changed: Condvar::new(),
        }
    }

    fn push(&self, work: Work) {
        self.work.lock().unwrap().0.push_back(work);
        self.changed.notify_all();
    }

    fn close(&self) {
        self.work.lock().unwrap().1 = true;
        self.changed.notify_all();
    }

    fn pop(&self) -> Option<Work> {
        let mut work = self.work.lock().unwrap();
        loop {
            if let Some(first) = work.0.pop_front() {
                return Some(first);
            }
            if work.1 {
                return None;
            }
            work = self.changed.wait(work).unwrap();
        }
    }
}

// SAFETY: a thread runs the queue in order; copies touch cells, whose order loom checks.
unsafe impl Lane for Queue {
    fn kind(&self) -> LaneKind {
        self.kind
    }

    unsafe fn copy(&self, copy: &Copy) -> Result<()> {
        self.push(Work::Write(copy.dst, copy.what.parse().unwrap()));
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        let mark = Arc::new(Mark::default());
        self.push(Work::Pass(mark.clone()));
        Ok(Event::new(Arc::new(MarkState(mark))))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let MarkState(mark) = event.state().as_any().downcast_ref().unwrap();
        self.push(Work::Wait(mark.clone()));
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A block of device memory.
struct Cell(UnsafeCell<u64>);

// SAFETY: loom checks every access of the cell against all others; that is what the models are for.
unsafe impl Sync for Cell {}

/// Two lanes and some blocks of memory.
struct Machine {
    compute: Queue,
    upload: Queue,
    memory: Vec<Cell>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Machine")
    }
}

impl Machine {
    /// Blocks of memory, and a thread for each lane.
    fn start(blocks: usize) -> (Arc<Self>, Vec<thread::JoinHandle<()>>) {
        let machine = Arc::new(Self {
            compute: Queue::new(LaneKind::Compute),
            upload: Queue::new(LaneKind::ParamUpload),
            memory: (0..blocks).map(|_| Cell(UnsafeCell::new(0))).collect(),
        });
        let run = |lane: fn(&Self) -> &Queue| {
            let machine = machine.clone();
            thread::spawn(move || {
                while let Some(work) = lane(&machine).pop() {
                    machine.perform(work);
                }
            })
        };
        let threads = vec![run(|m| &m.compute), run(|m| &m.upload)];
        (machine, threads)
    }

    fn perform(&self, work: Work) {
        let cell = |address: u64| &self.memory[((address - BASE) / ALIGN) as usize].0;
        match work {
            Work::Wait(mark) => mark.wait(),
            Work::Pass(mark) => mark.pass(),
            // SAFETY: loom panics when another access is not ordered before this one.
            Work::Write(at, value) => cell(at).with_mut(|p| unsafe { *p = value }),
            Work::Read(at, expected) => cell(at).with(|p| {
                // SAFETY: as above.
                assert_eq!(
                    unsafe { *p },
                    expected,
                    "the kernel read another upload's bytes"
                );
            }),
        }
    }

    fn stop(&self, threads: Vec<thread::JoinHandle<()>>) {
        self.compute.close();
        self.upload.close();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }

    /// A kernel that reads a tensor.
    fn read(&self, tensor: &Tensor, expected: u64) {
        self.compute.push(Work::Read(tensor.view().ptr, expected));
    }
}

// SAFETY: addresses are names of cells, whose order loom checks.
unsafe impl Device for Machine {
    fn id(&self) -> DeviceId {
        MODEL
    }

    fn memory(&self) -> Bytes {
        Bytes(self.memory.len() as u64 * ALIGN)
    }

    fn reserve(&self, bytes: Bytes) -> Result<Arena> {
        // SAFETY: the addresses are names of cells; nothing reads or writes there.
        Ok(unsafe { Arena::new(BASE, bytes, Box::new(())) })
    }

    fn lane(&self, kind: LaneKind) -> &dyn Lane {
        match kind {
            LaneKind::Compute => &self.compute,
            _ => &self.upload,
        }
    }

    fn ops(&self) -> &dyn Ops {
        unreachable!("the model has no mathematics")
    }
}

fn worker(machine: &Arc<Machine>) -> Worker {
    Worker::new(machine.clone(), machine.memory()).unwrap()
}

/// Fills a slot with a number, in the order of the parameter lane.
fn fill(slot: Slot, host: &HostBuf, value: u64) -> FilledSlot {
    let part = SlotSegment {
        host: host.read_all().unwrap(),
        offset: 0,
    };
    let (loaded, flight) = slot
        .fill(&value.to_string(), vec![part], ALIGN, &CopyLog::default())
        .unwrap();
    flight.land().unwrap();
    loaded
}

fn tensor(loaded: FilledSlot) -> Tensor {
    let shape = Shape::new(&[ALIGN as usize / 4]).unwrap();
    loaded.tensors(&[(0, DType::F32, shape)]).unwrap().remove(0)
}

fn host() -> HostBuf {
    HostBuf::zeroed("weights", ALIGN as usize).unwrap()
}

/// Every order with at most so many involuntary switches of threads.
fn every_order(switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}

/// As a worker does it: the launcher takes slots ahead and runs kernels, another thread brings the
/// weights. Two blocks serve three layers, so that the third upload goes where a kernel may still
/// be reading.
#[test]
fn an_upload_waits_for_the_last_reader_of_its_block() {
    let host = host();
    every_order(2, move || {
        let (machine, lanes) = Machine::start(2);
        let worker = worker(&machine);
        let (to_fill, slots) = loom::sync::mpsc::channel::<(u64, Slot)>();
        let (filled, loads) = loom::sync::mpsc::channel();
        let copier = {
            let host = host.clone();
            thread::spawn(move || {
                for _ in 1..=3 {
                    let (value, slot) = slots.recv().unwrap();
                    filled.send(fill(slot, &host, value)).unwrap();
                }
            })
        };
        let order = |value: u64| {
            to_fill
                .send((value, Slot::reserve(&worker, ALIGN).unwrap()))
                .unwrap()
        };
        let visit = |value: u64| machine.read(&tensor(loads.recv().unwrap()), value);
        order(1);
        order(2);
        visit(1);
        order(3);
        visit(2);
        visit(3);
        copier.join().unwrap();
        machine.stop(lanes);
    });
}

/// Weights of a call that failed: an unused upload gives its block back to kernels only
/// behind itself.
#[test]
fn an_upload_that_nobody_used_is_out_of_the_way_of_kernels() {
    let host = host();
    every_order(3, move || {
        let (machine, lanes) = Machine::start(1);
        let worker = worker(&machine);
        drop(fill(Slot::reserve(&worker, ALIGN).unwrap(), &host, 7));
        // The arena has run short: the block that was set aside goes back and to a kernel.
        let block = worker.pool().alloc("kernel", ALIGN).unwrap();
        machine.compute.push(Work::Write(block.addr(), 8));
        machine.compute.push(Work::Read(block.addr(), 8));
        drop(block);
        machine.read(
            &tensor(fill(Slot::reserve(&worker, ALIGN).unwrap(), &host, 9)),
            9,
        );
        machine.stop(lanes);
    });
}

/// A slot that is given back without being filled, by another thread than the one that launches.
#[test]
fn a_slot_may_be_given_back_from_any_thread() {
    let host = host();
    every_order(2, move || {
        let (machine, lanes) = Machine::start(1);
        let worker = worker(&machine);
        let loaded = fill(Slot::reserve(&worker, ALIGN).unwrap(), &host, 1);
        let first = tensor(loaded);
        machine.read(&first, 1);
        let other = thread::spawn(move || drop(first));
        other.join().unwrap();
        let unused = Slot::reserve(&worker, ALIGN).unwrap();
        drop(unused);
        machine.read(
            &tensor(fill(Slot::reserve(&worker, ALIGN).unwrap(), &host, 2)),
            2,
        );
        machine.stop(lanes);
    });
}
