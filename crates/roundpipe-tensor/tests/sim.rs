//! The sim backend: bits of the cpu, order checked, faults survived.

use std::sync::Arc;

use roundpipe_tensor::device::{Copy, Direction, Event, Lane};
use roundpipe_tensor::kernel::{HostKernel, HostView, HostViewMut, Kernel, Unary, View};
use roundpipe_tensor::pool::Block;
use roundpipe_tensor::shape::Layout;
use roundpipe_tensor::sim::{Fault, FaultKind, SimConfig, Timing};
use roundpipe_tensor::transfer::{HostPool, Port};
use roundpipe_tensor::{
    Bytes, Cpu, Cx, DType, Device, Error, HostBuf, LaneKind, Pin, Result, Shape, SimWorld, Worker,
};

const COUNT: usize = 256;
const SIZE: u64 = 4 * COUNT as u64;
/// Miri takes a second for each MiB that sim fills with NaN.
const ARENA: Bytes = Bytes(if cfg!(miri) { 16 << 10 } else { 1 << 20 });

fn one_worker(seed: u64) -> (SimWorld, Worker) {
    let world = SimWorld::seeded(seed).unwrap();
    let worker = Worker::new(world.worker(), ARENA).unwrap();
    (world, worker)
}

fn lane(worker: &Worker, kind: LaneKind) -> &dyn Lane {
    worker.device().lane(kind)
}

fn block(worker: &Worker) -> Block {
    worker.pool().alloc("test", SIZE).unwrap()
}

fn view(addr: u64) -> View {
    View {
        ptr: addr,
        dtype: DType::F32,
        layout: Layout::contiguous(Shape::new(&[COUNT]).unwrap()),
    }
}

fn ones() -> HostBuf {
    HostBuf::from_slice("ones", &[1.0f32; COUNT]).unwrap()
}

/// Queues y = -x.
fn negate(worker: &Worker, on: LaneKind, x: u64, y: u64) -> Result<()> {
    let (src, dst) = ([Some(view(x))], [Some(view(y))]);
    // SAFETY: both views lie in the worker's arena, which outlives the queue; order is what is
    // tested, and sim runs one item at a time.
    unsafe {
        worker.device().ops().launch(
            lane(worker, on),
            &Kernel::Unary(Unary::Neg),
            &src,
            &dst,
            None,
            None,
        )
    }
}

/// Queues a copy within the device.
fn move_bytes(worker: &Worker, on: LaneKind, src: u64, dst: u64) -> Result<()> {
    carry(worker, on, Direction::Local, src, dst)
}

/// Queues a copy between memory of the worker's and of a host buffer that outlives the queue.
fn carry(worker: &Worker, on: LaneKind, direction: Direction, src: u64, dst: u64) -> Result<()> {
    let copy = Copy {
        what: "move".to_owned(),
        direction,
        src,
        dst,
        bytes: SIZE,
    };
    // SAFETY: as in `negate`.
    unsafe { lane(worker, on).copy(&copy) }
}

fn after(worker: &Worker, second: LaneKind, first: LaneKind) -> Result<()> {
    lane(worker, second).wait(&lane(worker, first).record()?)
}

/// Upload, negate, download, each in its own lane, twice through the same memory. `skip` leaves one
/// of the five waits out. Gives the last downloaded values.
fn three_lanes(worker: &Worker, skip: Option<usize>) -> (Result<()>, Vec<f32>) {
    use LaneKind::{ActivationDownload, Compute, ParamUpload};
    let out = HostBuf::from_slice("out", &[0.0f32; COUNT]).unwrap();
    let order = |number: usize, second, first| match skip == Some(number) {
        true => Ok(()),
        false => after(worker, second, first),
    };
    let pass = |values: &HostBuf| -> Result<()> {
        let (x, y) = (
            worker.pool().alloc("test", SIZE)?,
            worker.pool().alloc("test", SIZE)?,
        );
        let (x_at, y_at) = (x.addr(), y.addr());
        // The blocks may have been freed by work of the compute lane.
        order(0, ParamUpload, Compute)?;
        let weights = lane(worker, ParamUpload).upload("weights", values.read_all()?, x)?;
        order(1, Compute, ParamUpload)?;
        negate(worker, Compute, x_at, y_at)?;
        order(2, ActivationDownload, Compute)?;
        let result =
            lane(worker, ActivationDownload).download("result", y, out.write(0..out.len())?)?;
        order(3, ParamUpload, Compute)?;
        // SAFETY: the world runs dry before the arena and the host values are let go.
        let (_, x) = unsafe { weights.hand_to(lane(worker, Compute))? };
        let again = lane(worker, ParamUpload).upload("next weights", values.read_all()?, x)?;
        order(4, Compute, ParamUpload)?;
        let (y, host) = result.land()?;
        drop(host);
        negate(worker, Compute, x_at, y_at)?;
        order(2, ActivationDownload, Compute)?;
        lane(worker, ActivationDownload)
            .download("result", y, out.write(0..out.len())?)?
            .land()?;
        again.land().map(drop)
    };
    let outcome = pass(&ones()).and_then(|()| pass(&ones()));
    let values = out.read_all().unwrap().as_slice::<f32>().to_vec();
    (outcome, values)
}

/// Seeds to try: all, and with Miri, which takes seconds for each, two.
fn seeds(all: u64) -> std::ops::Range<u64> {
    0..if cfg!(miri) { 2 } else { all }
}

/// A small training step: every output and gradient as bits.
fn training_bits(worker: &Worker) -> Result<Vec<u32>> {
    let spread = |n: usize, k: f32| -> Vec<f32> {
        (0..n).map(|i| ((i * 7 % 23) as f32 - 11.0) * k).collect()
    };
    let mut bits = Vec::new();
    for step in 0..3 {
        let mut cx = Cx::train(worker);
        let x = cx.tensor(&spread(6 * 33, 0.1 + step as f32), &[6, 33])?;
        let w = cx.tensor(&spread(17 * 33, 0.05), &[17, 33])?;
        let (x, w) = (cx.input(&x)?, cx.input(&w)?);
        let y = cx.linear(&x, &w, None)?;
        let z = cx.mul(&y, &y)?;
        let half = cx.narrow(&z, 1, 3, 9)?;
        let half = cx.contiguous(&half)?;
        let shifted = cx.affine(&half, 0.3, -1.0)?;
        let loss = cx.sum_all(&shifted)?;
        let grads = cx.backward(&loss)?;
        for t in [&z, &loss, grads.of(&x).unwrap(), grads.of(&w).unwrap()] {
            bits.extend(t.to_vec::<f32>()?.iter().map(|v| v.to_bits()));
        }
    }
    Ok(bits)
}

/// Virtual time, poison and reuse of memory change no bit of what is computed.
#[test]
fn training_gives_the_bits_of_the_cpu() {
    let cpu = Worker::new(Cpu::new(Some(1)).unwrap(), ARENA).unwrap();
    let want = training_bits(&cpu).unwrap();
    for seed in seeds(20) {
        let (world, worker) = one_worker(seed);
        assert_eq!(training_bits(&worker).unwrap(), want, "seed {seed}");
        assert_eq!(world.races(), [], "seed {seed}");
        assert!(world.timeline().iter().any(|s| s.name == "kernel matmul"));
    }
}

/// A scheduler bug must be repeatable from its seed, and other seeds must try other orders.
#[test]
fn a_seed_fixes_the_timeline() {
    let run = |seed| {
        let (world, worker) = one_worker(seed);
        let (outcome, values) = three_lanes(&worker, None);
        outcome.unwrap();
        assert_eq!(values, [-1.0; COUNT], "seed {seed}");
        (world.timeline(), world.now_ns())
    };
    let overlapping = |seed| {
        let (world, worker) = one_worker(seed);
        let [a, b] = [block(&worker), block(&worker)];
        let c = block(&worker);
        for _ in 0..4 {
            negate(&worker, LaneKind::Compute, c.addr(), a.addr()).unwrap();
            negate(&worker, LaneKind::ActivationUpload, c.addr(), b.addr()).unwrap();
        }
        world.fence_all().unwrap();
        world
            .timeline()
            .into_iter()
            .map(|s| (s.lane, s.item))
            .collect::<Vec<_>>()
    };
    for seed in seeds(5) {
        assert_eq!(run(seed), run(seed), "seed {seed}");
        assert_eq!(overlapping(seed), overlapping(seed), "seed {seed}");
    }
    assert_ne!(run(1), run(2));
    if !cfg!(miri) {
        let orders: std::collections::HashSet<_> = (0..20).map(overlapping).collect();
        assert!(orders.len() > 5, "20 seeds tried {} orders", orders.len());
    }
}

/// With all waits in place no seed finds anything, and the data are right.
#[test]
fn the_right_program_is_never_reported() {
    for seed in seeds(200) {
        let (world, worker) = one_worker(seed);
        let (outcome, values) = three_lanes(&worker, None);
        assert!(outcome.is_ok(), "seed {seed}: {outcome:?}");
        assert_eq!(world.races(), [], "seed {seed}");
        assert_eq!(values, [-1.0; COUNT], "seed {seed}");
    }
}

/// A missing wait is reported under every seed, with both sides named; and under some seeds it
/// gives wrong data, as on a device.
#[test]
fn every_missing_wait_is_found() {
    let sides = [
        ("free", "upload of weights"),
        ("upload of weights", "kernel unary"),
        ("kernel unary", "download of result"),
        ("kernel unary", "upload of next weights"),
        ("upload of next weights", "kernel unary"),
    ];
    for (skip, (one, other)) in sides.into_iter().enumerate() {
        let mut wrong = 0;
        for seed in seeds(40) {
            let (world, worker) = one_worker(seed);
            let (outcome, values) = three_lanes(&worker, Some(skip));
            let races = world.races();
            let named = |r: &roundpipe_tensor::sim::Race| {
                let text = format!("{} | {}", r.first, r.second);
                text.contains(one) && text.contains(other)
            };
            assert!(
                races.iter().any(named),
                "seed {seed}, without wait {skip}: {races:?}"
            );
            let told = outcome.and_then(|()| world.fence_all());
            assert!(
                matches!(told, Err(Error::Race { .. })),
                "seed {seed}, without wait {skip}: {told:?}"
            );
            wrong += u32::from(values != [-1.0; COUNT]);
        }
        if (1..3).contains(&skip) && !cfg!(miri) {
            assert!(
                wrong > 0,
                "without wait {skip}: 40 seeds and the data were always right"
            );
        }
    }
}

/// The report of a write after a read says who, where, and which bytes.
#[test]
fn a_report_names_lanes_items_and_bytes() {
    let (world, worker) = one_worker(3);
    let [x, y, z] = [block(&worker), block(&worker), block(&worker)];
    negate(&worker, LaneKind::Compute, x.addr(), y.addr()).unwrap();
    move_bytes(&worker, LaneKind::GradDownload, z.addr(), x.addr()).unwrap();
    let told = world.fence_all().unwrap_err().to_string();
    for part in [
        "sim:0",
        "kernel unary (item 1 of sim:0 compute)",
        "copy of move",
        "gradient download",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    assert!(
        told.contains("read by") && told.contains("write by"),
        "{told}"
    );
    assert!(told.contains("arena bytes 0x0..0x400"), "{told}");
    assert_eq!(world.races().len(), 1);
    world.fence_all().unwrap();
}

/// Kernels in two lanes that write the two halves of one tensor's columns do not meet.
#[test]
fn halves_of_one_tensor_are_apart() {
    let (world, worker) = one_worker(4);
    let mut cx = Cx::infer(&worker);
    let whole = cx.zeros(DType::F32, &[32, 16]).unwrap();
    after(&worker, LaneKind::ActivationUpload, LaneKind::Compute).unwrap();
    let fill = |on, from: usize, cx: &mut Cx| {
        let half = cx.narrow(&whole, 1, from, 8).unwrap().view();
        let ops = worker.device().ops();
        // SAFETY: `whole` lives past the fence below.
        unsafe {
            ops.launch(
                lane(&worker, on),
                &Kernel::Fill { value: 2.0 },
                &[],
                &[Some(half)],
                None,
                None,
            )
        }
    };
    fill(LaneKind::Compute, 0, &mut cx).unwrap();
    fill(LaneKind::ActivationUpload, 8, &mut cx).unwrap();
    world.fence_all().unwrap();
    assert_eq!(whole.to_vec::<f32>().unwrap(), [2.0; 512]);
    fill(LaneKind::ActivationUpload, 7, &mut cx).unwrap();
    fill(LaneKind::Compute, 0, &mut cx).unwrap();
    assert!(world.fence_all().is_err(), "these share a column");
}

/// Memory that went back belongs to no tensor: a later use is reported, and a use still under way
/// as well.
#[test]
fn use_after_free_is_reported() {
    let (world, worker) = one_worker(5);
    let (x, y) = (block(&worker), block(&worker));
    let gone = x.addr();
    drop(x);
    negate(&worker, LaneKind::Compute, gone, y.addr()).unwrap();
    let told = world.fence_all().unwrap_err().to_string();
    assert!(
        told.contains("read of freed memory by kernel unary") && told.contains("free (item"),
        "{told}"
    );

    let x = block(&worker);
    assert_eq!(x.addr(), gone, "the test wants the same block again");
    after(&worker, LaneKind::GradDownload, LaneKind::Compute).unwrap();
    move_bytes(&worker, LaneKind::GradDownload, x.addr(), y.addr()).unwrap();
    drop(x);
    let told = world.fence_all().unwrap_err().to_string();
    assert!(
        told.contains("free (item") && told.contains("by copy of move"),
        "{told}"
    );

    let host = HostBuf::from_slice("seen", &[0.0f32; COUNT]).unwrap();
    let fresh = block(&worker);
    let down = lane(&worker, LaneKind::Compute);
    down.download("fresh", fresh, host.write(0..host.len()).unwrap())
        .unwrap()
        .land()
        .unwrap();
    assert!(
        host.read_all()
            .unwrap()
            .as_slice::<f32>()
            .iter()
            .all(|v| v.is_nan()),
        "freed memory is poisoned"
    );
}

/// One program that makes every kind of call.
fn every_call(world: &SimWorld) -> Result<Vec<f32>> {
    let worker = Worker::new(world.worker(), ARENA)?;
    let (outcome, values) = three_lanes(&worker, None);
    outcome?;
    world.fence_all()?;
    Ok(values)
}

/// Every waiter whose work is behind a failure receives its error, however late; after a fence of
/// the lane, no new event reports it.
#[test]
fn every_event_behind_a_failure_reports_it() {
    let world = SimWorld::seeded(3).unwrap();
    let worker = Worker::new(world.worker(), ARENA).unwrap();
    let lane = worker.device().lane(LaneKind::Compute);
    let before = lane.record().unwrap();
    world.inject(Fault::nth(FaultKind::Kernel, 1));
    let x = worker
        .full(DType::F32, Shape::new(&[8]).unwrap(), 1.0)
        .unwrap();
    let (one, two) = (lane.record().unwrap(), lane.record().unwrap());
    for event in [&one, &two, &one] {
        let told = event.fence().unwrap_err();
        assert!(
            matches!(told, Error::Device { .. }) && told.to_string().contains("injected"),
            "{told}"
        );
    }
    assert!(x.to_f64_vec().is_err() && before.fence().is_ok());
    assert!(lane.fence().is_err());
    assert!(one.fence().is_err() && before.fence().is_ok());
    lane.record().unwrap().fence().unwrap();
    lane.fence().unwrap();
    assert!(
        x.to_f64_vec().unwrap().iter().all(|x| x.is_nan()),
        "what failed holds nothing"
    );
}

/// Each kind of fault comes back as one error value that names itself, and the next run is fine.
#[test]
fn faults_are_errors_and_pass() {
    use FaultKind::{Alloc, Copy, Kernel, Launch, Lost, Record, Reserve, Wait};
    for kind in [Reserve, Alloc, Launch, Kernel, Copy, Record, Wait, Lost] {
        for nth in 1..=if cfg!(miri) { 1 } else { 8 } {
            let world = SimWorld::seeded(nth).unwrap();
            world.inject(Fault::nth(kind, nth));
            let first = every_call(&world);
            let struck = !world.faults().is_empty();
            assert_eq!(first.is_err(), struck, "{kind:?} {nth}: {first:?}");
            if let Err(error) = first {
                let text = error.to_string();
                assert!(
                    matches!(error, Error::Device { .. }) && text.contains("sim:0"),
                    "{text}"
                );
                let named = if kind == Lost { "lost" } else { "injected" };
                assert!(text.contains(named), "{kind:?} {nth}: {text}");
                assert!(
                    text.contains("item") || matches!(kind, Reserve | Lost),
                    "{text}"
                );
            }
            // The next fence returns what a dropped flight did not, then it is over.
            world.heal();
            let _ = world.fence_all();
            assert_eq!(every_call(&world).unwrap(), [-1.0; COUNT], "{kind:?} {nth}");
            assert_eq!(world.races(), [], "{kind:?} {nth}");
        }
    }
    let chance = SimConfig {
        faults: vec![Fault::chance(Copy, 0.3)],
        seed: 7,
        ..SimConfig::default()
    };
    let world = SimWorld::new(chance).unwrap();
    let fails = |_: &i32| {
        let failed = every_call(&world).is_err();
        let _ = world.fence_all();
        failed
    };
    // Most fail; Miri takes seconds for each, and six may all fail.
    let (tries, most) = if cfg!(miri) { (6, 6) } else { (20, 19) };
    let failed = (0..tries).filter(fails).count();
    assert!((1..=most).contains(&failed), "{failed} of {tries}");
    world.heal();
    let _ = world.fence_all();
    assert!(every_call(&world).is_ok());
}

/// A failed copy leaves no plausible data behind, and faults can be aimed at one lane of one
/// worker.
#[test]
fn a_failed_copy_poisons_its_destination() {
    let world = SimWorld::seeded(1).unwrap();
    let workers: Vec<Worker> = world
        .workers(2)
        .into_iter()
        .map(|d| Worker::new(d, ARENA).unwrap())
        .collect();
    world.inject(
        Fault::nth(FaultKind::Copy, 1)
            .on_worker(1)
            .on_lane(LaneKind::ParamUpload),
    );
    let up = |worker: &Worker, on| {
        lane(worker, on)
            .upload("w", ones().read_all().unwrap(), block(worker))
            .and_then(|f| f.land())
    };
    up(&workers[0], LaneKind::ParamUpload).unwrap();
    up(&workers[1], LaneKind::ActivationUpload).unwrap();
    let x = block(&workers[1]);
    let at = x.addr();
    let flight = lane(&workers[1], LaneKind::ParamUpload)
        .upload("w", ones().read_all().unwrap(), x)
        .unwrap();
    let y = block(&workers[1]);
    // SAFETY: both ends are held past the fence below.
    let x = unsafe {
        flight
            .hand_to(lane(&workers[1], LaneKind::Compute))
            .unwrap()
    };
    negate(&workers[1], LaneKind::Compute, at, y.addr()).unwrap();
    let host = HostBuf::zeroed("seen", SIZE as usize).unwrap();
    let down = lane(&workers[1], LaneKind::Compute);
    let seen = down
        .download("y", y, host.write(0..host.len()).unwrap())
        .unwrap()
        .land();
    let text = seen.unwrap_err().to_string();
    assert!(
        text.contains("sim:1") && text.contains("parameter upload") && text.contains("upload of w"),
        "{text}"
    );
    assert!(
        host.read_all()
            .unwrap()
            .as_slice::<f32>()
            .iter()
            .all(|v| v.is_nan())
    );
    drop(x);
}

/// No thread hangs on an event that never comes: lanes and events are named, and the lanes go on.
#[test]
fn a_dead_lock_is_an_error() {
    let world = SimWorld::seeded(2).unwrap();
    let workers: Vec<Worker> = world
        .workers(2)
        .into_iter()
        .map(|d| Worker::new(d, ARENA).unwrap())
        .collect();
    world.inject(Fault::nth(FaultKind::Lost, 1));
    let never = lane(&workers[0], LaneKind::ParamUpload).record().unwrap();
    lane(&workers[1], LaneKind::Compute).wait(&never).unwrap();
    let (x, y) = (block(&workers[1]), block(&workers[1]));
    negate(&workers[1], LaneKind::Compute, x.addr(), y.addr()).unwrap();
    let told = workers[1].fence().unwrap_err().to_string();
    for part in [
        "dead-lock",
        "sim:1 compute waits at item 1 for event 1 of sim:0 parameter upload",
        "lost",
    ] {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
    assert_eq!(world.timeline().len(), 1, "the kernel ran in the end");
    workers[1].fence().unwrap();
}

/// Events order lanes of different workers; those of another world are refused.
#[test]
fn events_cross_workers_but_not_worlds() {
    let world = SimWorld::seeded(6).unwrap();
    let workers: Vec<Worker> = world
        .workers(3)
        .into_iter()
        .map(|d| Worker::new(d, ARENA).unwrap())
        .collect();
    let blocks: Vec<Block> = workers.iter().map(block).collect();
    let mut before: Option<Event> = None;
    for i in [0, 1, 2, 1, 0] {
        let compute = lane(&workers[i], LaneKind::Compute);
        if let Some(event) = &before {
            compute.wait(event).unwrap();
        }
        move_bytes(
            &workers[i],
            LaneKind::Compute,
            blocks[(i + 1) % 3].addr(),
            blocks[i].addr(),
        )
        .unwrap();
        before = Some(compute.record().unwrap());
    }
    before.unwrap().fence().unwrap();
    assert_eq!(world.races(), []);
    let other = SimWorld::seeded(6).unwrap().worker();
    let foreign = other.lane(LaneKind::Compute).record().unwrap();
    assert!(matches!(
        lane(&workers[0], LaneKind::Compute).wait(&foreign),
        Err(Error::Foreign { .. })
    ));
    let cpu = Cpu::new(Some(1)).unwrap();
    let foreign = cpu.lane(LaneKind::Compute).record().unwrap();
    assert!(lane(&workers[0], LaneKind::Compute).wait(&foreign).is_err());
}

/// Kernels work on their own worker's memory; anything else is refused before it is touched.
#[test]
fn memory_of_others_is_refused() {
    let world = SimWorld::seeded(0).unwrap();
    let workers: Vec<Worker> = world
        .workers(2)
        .into_iter()
        .map(|d| Worker::new(d, ARENA).unwrap())
        .collect();
    let (here, there) = (block(&workers[0]), block(&workers[1]));
    let text = negate(&workers[0], LaneKind::Compute, there.addr(), here.addr())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("kernel unary") && text.contains("not the worker's memory"),
        "{text}"
    );
    let text = lane(&workers[0], LaneKind::ParamUpload)
        .upload("w", ones().read_all().unwrap(), there)
        .unwrap_err()
        .to_string();
    assert!(text.contains("upload of w"), "{text}");
    let text = world
        .worker()
        .reserve(Bytes::gib(5))
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("sim:2") && text.contains("4.00 GiB"),
        "{text}"
    );
}

/// Durations come from the model: copies overlap kernels, and waits line them up.
#[test]
fn the_clock_adds_up() {
    let timing = Timing {
        copy_ns: 1000,
        upload_bytes_per_ns: 1.0,
        queue_ns: 0,
        ..Timing::exact()
    };
    let world = SimWorld::new(SimConfig {
        timing,
        ..SimConfig::default()
    })
    .unwrap();
    let worker = Worker::new(world.worker(), ARENA).unwrap();
    world.set_kernel_time(Arc::new(|launch| {
        (launch.kernel.name() == "unary").then_some(10_000)
    }));
    let [x, y, z] = [block(&worker), block(&worker), block(&worker)];
    let at = x.addr();
    negate(&worker, LaneKind::Compute, z.addr(), y.addr()).unwrap();
    let flight = lane(&worker, LaneKind::ParamUpload)
        .upload("w", ones().read_all().unwrap(), x)
        .unwrap();
    assert_eq!(world.timeline(), [], "queuing runs nothing");
    // SAFETY: both ends are held past the fence below.
    let held = unsafe { flight.hand_to(lane(&worker, LaneKind::Compute)).unwrap() };
    negate(&worker, LaneKind::Compute, at, y.addr()).unwrap();
    worker.fence().unwrap();
    drop(held);
    let spans: Vec<(u64, u64)> = world
        .timeline()
        .iter()
        .map(|s| (s.start_ns, s.end_ns))
        .collect();
    assert_eq!(spans, [(0, 1000 + SIZE), (0, 10_000), (10_000, 20_000)]);
    assert_eq!((world.now_ns(), world.host_ns()), (20_000, 20_000));
}

/// A thread that only looks at an event sees it pass in the end.
#[test]
fn polling_makes_progress() {
    let (_world, worker) = one_worker(8);
    let (x, y) = (block(&worker), block(&worker));
    for _ in 0..50 {
        negate(&worker, LaneKind::Compute, x.addr(), y.addr()).unwrap();
    }
    let event = lane(&worker, LaneKind::Compute).record().unwrap();
    let polls = (0..1000).position(|_| event.passed().unwrap());
    assert!(polls.is_some_and(|n| n > 10), "{polls:?}");
}

struct Keeper(
    #[allow(dead_code, reason = "held so that it is dropped with the kernel")]
    roundpipe_tensor::Tensor,
);

impl HostKernel for Keeper {
    fn name(&self) -> &'static str {
        "keeper"
    }

    fn run(&self, _src: &[HostView<'_>], dst: &mut [HostViewMut<'_>]) -> Result<()> {
        dst[0].bytes.fill(0);
        Ok(())
    }
}

/// A user's kernel may own tensors, and a worker may go while its work is queued.
#[test]
fn what_is_queued_outlives_its_owners() {
    let (world, worker) = one_worker(9);
    let mut cx = Cx::infer(&worker);
    let kept = cx.zeros(DType::F32, &[COUNT]).unwrap();
    let y = block(&worker);
    let kernel = Kernel::Host(Arc::new(Keeper(kept)));
    let ops = worker.device().ops();
    // SAFETY: the view lies in the worker's arena; sim keeps it until the kernel has run.
    unsafe {
        ops.launch(
            lane(&worker, LaneKind::Compute),
            &kernel,
            &[],
            &[Some(view(y.addr()))],
            None,
            None,
        )
    }
    .unwrap();
    drop((kernel, y, cx));
    let event = lane(&worker, LaneKind::Compute).record().unwrap();
    drop(worker);
    event.fence().unwrap();
    world.fence_all().unwrap();
    assert!(world.timeline().iter().any(|s| s.name == "kernel keeper"));
}

/// Threads that queue, wait for each other's events, fence and poll at once all come to an end.
#[test]
fn many_threads_do_not_hang() {
    let rounds = if cfg!(miri) { 5 } else { 60 };
    let config = SimConfig {
        queue: 64,
        seed: 3,
        ..SimConfig::default()
    };
    let world = SimWorld::new(config).unwrap();
    let workers: Vec<Worker> = world
        .workers(3)
        .into_iter()
        .map(|d| Worker::new(d, ARENA).unwrap())
        .collect();
    let board: std::sync::Mutex<Vec<Event>> = std::sync::Mutex::default();
    std::thread::scope(|scope| {
        for (number, kind) in LaneKind::ALL.into_iter().enumerate() {
            for worker in &workers {
                let board = &board;
                scope.spawn(move || {
                    let (x, y) = (block(worker), block(worker));
                    // Blocks may be others' freed ones.
                    after(worker, kind, LaneKind::Compute).unwrap();
                    for round in 0..rounds {
                        negate(worker, kind, x.addr(), y.addr()).unwrap();
                        let mine = lane(worker, kind).record().unwrap();
                        let theirs = {
                            let mut board = board.lock().unwrap();
                            board.push(mine.clone());
                            board[(round * 31 + number * 7) % board.len()].clone()
                        };
                        lane(worker, kind).wait(&theirs).unwrap();
                        match round % 5 {
                            0 => mine.fence().unwrap(),
                            1 => drop(theirs.passed().unwrap()),
                            _ => {}
                        }
                    }
                    lane(worker, kind).fence().unwrap();
                });
            }
        }
    });
    world.fence_all().unwrap();
    assert_eq!(world.timeline().len(), 15 * rounds);
}

/// A value goes from one worker to another through memory that could not be pinned: the upload
/// reads it when it is queued, so the host has seen the download land. Pinned, it need not.
#[test]
fn pageable_memory_is_sent_on_when_it_is_there() {
    for (seed, pinned) in
        (0..20).flat_map(|seed| [(seed, Bytes(0)), (seed, Bytes(SIZE)), (seed, Bytes::gib(1))])
    {
        let world = SimWorld::new(SimConfig {
            seed,
            pinned,
            ..SimConfig::default()
        })
        .unwrap();
        let workers = world
            .workers(2)
            .into_iter()
            .map(|w| Worker::new(w, Bytes(8 * SIZE)).unwrap());
        let workers: Vec<Worker> = workers.collect();
        let host = HostPool::new(workers[0].device().clone(), Pin::Try);
        let ports: Vec<Port> = workers
            .iter()
            .map(|w| Port::new(w.clone(), host.clone()))
            .collect();
        let mut there = Vec::new();
        for i in 0..3 {
            let value = workers[0]
                .full(DType::F32, Shape::new(&[COUNT]).unwrap(), f64::from(i))
                .unwrap();
            let sent = ports[0].send("value", &value).unwrap();
            there.push((
                ports[1].receive("value", &sent).unwrap().land().unwrap(),
                sent,
            ));
        }
        for (i, (value, _)) in there.iter().enumerate() {
            assert_eq!(
                value.to_vec::<f32>().unwrap(),
                [i as f32; COUNT],
                "seed {seed}, {pinned} pinned"
            );
        }
        world.fence_all().unwrap();
        let pins = workers[0].device().pins();
        assert_eq!(
            (pins.refused.is_some(), pins.pinned.0.min(SIZE)),
            (pinned.0 <= SIZE, pinned.0.min(SIZE))
        );
    }
}

/// The check can fail: a lane that waits for the download keeps a driver from nothing that it does
/// at once.
#[test]
fn an_upload_of_pageable_memory_that_only_its_lane_orders_is_reported() {
    for pin in [Pin::Off, Pin::Alloc] {
        let world = SimWorld::seeded(4).unwrap();
        let worker = Worker::new(world.worker(), Bytes(8 * SIZE)).unwrap();
        let host = worker
            .device()
            .host_buffer("between", SIZE as usize, pin)
            .unwrap();
        let (down, up) = (LaneKind::ActivationDownload, LaneKind::ActivationUpload);
        let (src, dst) = (block(&worker), block(&worker));
        let at = host.read_all().unwrap().bytes().as_ptr() as u64;
        after(&worker, down, LaneKind::Compute).unwrap();
        carry(&worker, down, Direction::Download, src.addr(), at).unwrap();
        after(&worker, up, down).unwrap();
        carry(&worker, up, Direction::Upload, at, dst.addr()).unwrap();
        assert_eq!(lane(&worker, up).fence().is_err(), pin == Pin::Off);
        let early = world
            .races()
            .iter()
            .any(|race| race.second.contains("early read of pageable memory"));
        assert_eq!(early, pin == Pin::Off, "{:?}", world.races());
    }
}

/// What was sent may be let go early, behind its download: an arena of four values sends ten, and
/// each arrives whole.
#[test]
fn room_is_made_behind_downloads() {
    for seed in seeds(20) {
        let world = SimWorld::seeded(seed).unwrap();
        let worker = Worker::new(world.worker(), Bytes(4 * SIZE)).unwrap();
        let port = Port::new(
            worker.clone(),
            HostPool::new(worker.device().clone(), Pin::Off),
        );
        let mut host_values = Vec::new();
        for i in 0..10 {
            let value = worker
                .full(DType::F32, Shape::new(&[COUNT]).unwrap(), f64::from(i))
                .unwrap();
            host_values.push(port.send("value", &value).unwrap());
            drop(value);
            port.make_room(2 * SIZE).unwrap();
            assert!(
                worker.usage().used <= Bytes(2 * SIZE),
                "{:?}",
                worker.usage()
            );
        }
        for (i, sent) in host_values.iter().enumerate() {
            let bytes = sent.fence().unwrap().read_all().unwrap();
            assert_eq!(bytes.as_slice::<f32>(), [i as f32; COUNT], "seed {seed}");
        }
        assert!(world.races().is_empty(), "seed {seed}: {:?}", world.races());
    }
}

/// Bad data is reported to the work it belongs to: the lane's events, which others wait for, say
/// nothing of it, and work that reports elsewhere is not concerned.
#[test]
fn bad_data_is_reported_to_its_own_work() {
    for seed in seeds(8) {
        let (world, worker) = one_worker(seed);
        let (bad, good) = (
            worker.open_faults().unwrap().unwrap(),
            worker.open_faults().unwrap().unwrap(),
        );
        let pick = |faults: Option<Arc<roundpipe_tensor::Faults>>, ids: &[i64]| {
            let mut cx = Cx::infer(&worker.reporting_to(faults));
            let table = cx.tensor(&[1.0f32, 2.0, 3.0], &[3, 1]).unwrap();
            let ids = cx.tensor(ids, &[ids.len()]).unwrap();
            cx.index_select(&table, 0, &ids).unwrap()
        };
        let (spoiled, right) = (
            pick(Some(bad.clone()), &[0, 9]),
            pick(Some(good.clone()), &[2, 0]),
        );
        assert_eq!(right.to_vec::<f32>().unwrap(), [3.0, 1.0], "seed {seed}");
        good.check().unwrap();
        for _ in 0..2 {
            let text = bad.check().unwrap_err().to_string();
            assert!(text.contains("index 9") && text.contains("0..3"), "{text}");
        }
        worker.fence().unwrap();
        drop(spoiled);
        // Without a place of its own, the lane tells.
        let spoiled = pick(None, &[5]);
        assert!(
            spoiled
                .to_vec::<f32>()
                .unwrap_err()
                .to_string()
                .contains("index 5")
        );
        assert!(worker.fence().is_err());
        assert_eq!(world.races(), []);
    }
}
