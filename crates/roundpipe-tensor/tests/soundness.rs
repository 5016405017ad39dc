//! What safe code may ask for is done or refused: sizes that wrap, memory that is not aligned,
//! dimensions without elements, buffers that are written while a lane reads them.
#![forbid(unsafe_code)]

use roundpipe_tensor::kernel::{ConvSpec, PoolSpec};
use roundpipe_tensor::ops::{Attention, BatchNorm};
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::transfer::{CopyLog, HostPool, HostValue, Port, Slot, SlotSegment};
use roundpipe_tensor::{
    Bytes, Cpu, Cx, DType, Error, HostBuf, HostTensor, Meta, Param, Pin, Result, Shape, SimWorld,
    Tensor, Worker,
};

fn worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(8)).unwrap()
}

fn sim() -> (SimWorld, Worker) {
    let world = SimWorld::seeded(5).unwrap();
    let worker = Worker::new(world.worker(), Bytes::mib(8)).unwrap();
    (world, worker)
}

/// One line that names the place, instead of a value.
fn refused<T>(what: &str, outcome: Result<T>, words: &[&str]) {
    let error = outcome
        .err()
        .unwrap_or_else(|| panic!("{what} must be refused"))
        .to_string();
    assert!(
        !error.contains('\n') && words.iter().all(|word| error.contains(word)),
        "{what}: {error}"
    );
}

/// A part of a slot whose end comes round to a small number would be written before the slot, into
/// another tensor.
#[test]
fn a_part_does_not_begin_before_its_slot() {
    for worker in [worker(), sim().1] {
        let mut cx = Cx::infer(&worker);
        let before = cx.tensor(&[7.0f32; 64], &[64]).unwrap();
        for offset in [u64::MAX - 255, u64::MAX, 1, 256, 1 << 40] {
            let slot = Slot::reserve(&worker, 256).unwrap();
            let host = HostBuf::from_slice("weights", &[666.0f32; 64])
                .unwrap()
                .read_all()
                .unwrap();
            let filled = slot.fill(
                "w",
                vec![SlotSegment { host, offset }],
                1 << 20,
                &CopyLog::default(),
            );
            let at = offset.to_string();
            refused(
                "a part outside",
                filled.map(drop),
                &["fill", "256 bytes", &at],
            );
        }
        assert_eq!(before.to_vec::<f32>().unwrap(), [7.0; 64]);
    }
}

/// Shapes whose elements cannot be counted do not come to be, whichever way they are made:
/// everything that takes a shape relies on it.
#[test]
fn no_shape_wraps() {
    let line = Shape::new(&[1, 16]).unwrap();
    refused(
        "a size changed",
        line.with("test", 0, (1 << 60) + 1),
        &["test", "too many elements"],
    );
    refused(
        "a dimension added",
        line.with("test", 2, 1),
        &["test", "no dimension 2"],
    );
    refused(
        "sizes given",
        Shape::new(&[(1 << 60) + 1, 16]),
        &["too many elements"],
    );
    let stretched = Shape::new(&[1 << 40, 1])
        .unwrap()
        .broadcast(&Shape::new(&[1, 1 << 40]).unwrap(), "add");
    refused("sizes stretched", stretched, &["too many elements"]);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let one = cx.full(DType::F32, &[1], 1.0).unwrap();
    let wide = cx.broadcast_to(&one, &[1 << 40]).unwrap();
    let index = cx.tensor(&[0i64], &[1]).unwrap();
    let index = cx.broadcast_to(&index, &[1 << 40]).unwrap();
    refused(
        "a tensor repeated",
        cx.cat(&[&wide; 1 << 10], 0)
            .and_then(|x| cx.unsqueeze(&x, 0)),
        &[],
    );
    let tall = cx.unsqueeze(&wide, 0).unwrap();
    refused("a selection", cx.index_select(&tall, 0, &index), &[]);
}

/// A buffer smaller than type and shape ask is no tensor, parameter or host value.
#[test]
fn memory_is_as_large_as_its_elements() {
    let worker = worker();
    let small = HostBuf::from_slice("small", &[1.0f32; 16]).unwrap();
    let shape = Shape::new(&[17]).unwrap();
    let words = ["f32 [17]", "68 bytes", "64"];
    refused("an alias", worker.alias(&small, DType::F32, shape), &words);
    refused(
        "a host value",
        HostValue::given(small.clone(), DType::F32, shape),
        &words,
    );
    refused(
        "a parameter",
        Param::new(small.clone(), DType::F32, &[17]),
        &words,
    );
    refused(
        "a host tensor",
        HostTensor::new(small.clone(), DType::F32, &[17]),
        &words,
    );
    refused(
        "a part",
        HostTensor::within(small.clone(), 8, DType::F32, &[15]),
        &["f32 [15]", "60 bytes of 64"],
    );
    refused(
        "a far part",
        HostTensor::within(small, usize::MAX - 3, DType::F32, &[1]),
        &["4 bytes of 64"],
    );
    let slot = Slot::reserve(&worker, 256).unwrap();
    let (loaded, flight) = slot.fill("w", vec![], 1, &CopyLog::default()).unwrap();
    flight.land().unwrap();
    let places = [(256, DType::U8, Shape::new(&[1]).unwrap())];
    refused(
        "a place in a slot",
        loaded.tensors(&places),
        &["u8 [1] at byte 256"],
    );
}

/// Elements are read as references, which must be aligned: memory that does not begin at a multiple
/// of the element's size is refused wherever it enters, in place of a panic or worse when it is
/// read.
#[test]
fn crooked_memory_is_refused() {
    let worker = worker();
    let mut cx = Cx::train(&worker);
    for dtype in DType::ALL {
        let size = dtype.size();
        let slab = HostBuf::zeroed("slab", 9 * size).unwrap();
        for shift in 0..=size {
            let crooked = shift % size != 0;
            let home = slab.slice(shift..shift + 8 * size).unwrap();
            let shape = Shape::new(&[8]).unwrap();
            let param = Param::zeros(dtype, &[8]).unwrap();
            let outcomes: [(&str, Result<()>); 7] = [
                (
                    "a new parameter",
                    Param::new(home.clone(), dtype, &[8]).map(drop),
                ),
                ("a parameter's new home", param.rehome(home.clone())),
                ("an alias", worker.alias(&home, dtype, shape).map(drop)),
                (
                    "a host value",
                    HostValue::given(home.clone(), dtype, shape).map(drop),
                ),
                (
                    "a host tensor",
                    HostTensor::new(home.clone(), dtype, &[8]).map(drop),
                ),
                (
                    "a part",
                    HostTensor::within(home.clone(), 0, dtype, &[7]).map(drop),
                ),
                (
                    "no elements",
                    HostTensor::within(home.clone(), 0, dtype, &[0]).map(drop),
                ),
            ];
            for (what, outcome) in outcomes {
                let what = format!("{what}: {dtype} at byte {shift}");
                match crooked {
                    true => refused(&what, outcome, &[dtype.name(), "multiple of"]),
                    false => outcome.unwrap_or_else(|e| panic!("{what}: {e}")),
                }
            }
            // Wherever the parameter lives now, it is read.
            assert_eq!(cx.get(&param).unwrap().to_f64_vec().unwrap(), [0.0; 8]);
        }
    }
    let param = Param::zeros(DType::F32, &[64]).unwrap();
    let crooked = HostBuf::zeroed("slab", 257).unwrap().slice(1..257).unwrap();
    assert!(param.rehome(crooked).is_err());
    assert_eq!(param.to_vec::<f32>().unwrap(), [0.0; 64]);
}

/// A head of no elements has scores of 0 and gives nothing: no slice is made of memory that is not
/// there.
#[test]
fn attention_of_empty_heads_is_nothing() {
    // Blocks of queries and keys have a fixed size, which takes Miri a minute each.
    let dtypes =
        &[DType::BF16, DType::F64, DType::F32, DType::F16][..if cfg!(miri) { 1 } else { 4 }];
    let widths = &[(0, 0), (0, 5), (5, 0)][..if cfg!(miri) { 1 } else { 3 }];
    for worker in [worker(), sim().1] {
        for &dtype in dtypes {
            for &(d, dv) in widths {
                let mut cx = Cx::train(&worker);
                let mut input = |dims: &[usize]| {
                    let x = cx.full(dtype, dims, 0.5).unwrap();
                    cx.input(&x).unwrap()
                };
                let (q, k, v) = (
                    input(&[2, 3, 4, d]),
                    input(&[2, 6, 2, d]),
                    input(&[2, 6, 2, dv]),
                );
                let sinks = input(&[4]);
                let how = Attention {
                    sinks: Some(&sinks),
                    causal: true,
                    ..Attention::default()
                };
                let (o, lse) = cx.attention_known(&q, &k, &v, &how, None).unwrap();
                assert_eq!((o.dims(), lse.dims()), (&[2, 3, 4, dv][..], &[2, 4, 3][..]));
                let dy = cx.ones_like(&o).unwrap();
                let grads = cx.backward_from(&[(o, dy)]).unwrap();
                for (x, name) in [(&q, "q"), (&k, "k"), (&v, "v"), (&sinks, "sinks")] {
                    let grad = grads
                        .of(x)
                        .unwrap_or_else(|| panic!("no gradient of {name}"));
                    assert_eq!(grad.dims(), x.dims());
                    assert_eq!(grad.to_f64_vec().unwrap().len(), x.numel());
                }
            }
        }
    }
}

/// A tensor without elements, or of one stretched element, takes no memory whatever its other sizes
/// are. Nothing is allocated or counted by those.
#[test]
fn sizes_without_memory_cost_nothing() {
    const HUGE: usize = 1 << 40;
    let meta = Worker::new(
        Meta::like(roundpipe_tensor::DeviceKind::Cpu),
        Bytes(1 << 60),
    )
    .unwrap();
    for worker in [worker(), sim().1, meta] {
        let mut cx = Cx::train(&worker);
        let mut empty = |dims: &[usize]| {
            let x = cx.zeros(DType::BF16, dims).unwrap();
            cx.input(&x).unwrap()
        };
        let (q, k) = (empty(&[HUGE, 1, 0, 4]), empty(&[HUGE, 1, 0, 4]));
        let (wide, none) = (empty(&[1, HUGE, 0, 4]), empty(&[0, 1, HUGE, 1]));
        let (rows, filter) = (empty(&[HUGE, 0, 5]), empty(&[0, 1, HUGE, 1]));
        let (image, matrix) = (empty(&[1, 1, 2, 2]), empty(&[HUGE, 5, 0]));
        let mut outputs: Vec<Tensor> = Vec::new();
        for (q, k) in [(&q, &k), (&wide, &wide)] {
            outputs.push(cx.attention(q, k, k, &Attention::default()).unwrap());
        }
        outputs.push(cx.avg_pool2d(&none, PoolSpec::window([1, 1])).unwrap());
        refused(
            "a plane",
            cx.max_pool2d(&none, PoolSpec::window([2, 1])),
            &["2^31 - 1"],
        );
        outputs.push(cx.adaptive_avg_pool2d(&none, [3, 1]).unwrap());
        outputs.push(cx.matmul(&rows, &matrix).unwrap());
        outputs.push(cx.sum(&none, &[2], false).unwrap());
        let samples = cx
            .zeros(DType::BF16, &[HUGE, 3, 0])
            .and_then(|x| cx.input(&x))
            .unwrap();
        outputs.push(
            cx.batch_norm(&samples, None, None, None, BatchNorm::default())
                .unwrap(),
        );
        let padded = ConvSpec {
            padding: [HUGE / 1024, 0],
            ..ConvSpec::default()
        };
        refused(
            "a filter",
            cx.conv2d(&image, &filter, None, padded),
            &["window", "larger"],
        );
        refused("a split", cx.split(&none, 1, 2), &["split", "pieces"]);
        let seeds = outputs
            .iter()
            .map(|y| Ok((y.clone(), cx.zeros_like(y)?)))
            .collect::<Result<Vec<_>>>()
            .unwrap();
        assert!(cx.backward_from(&seeds).is_ok());
        let one = cx.zeros(DType::F32, &[1]).unwrap();
        let stretched = cx.broadcast_to(&one, &[HUGE]).unwrap();
        refused(
            "pieces of one element",
            cx.chunk(&stretched, HUGE, 0),
            &["split", "pieces"],
        );
    }
}

/// A caller who got a host value's bytes cannot write them while an upload that was queued still
/// reads them.
#[test]
fn bytes_are_not_written_under_an_upload() {
    let world = SimWorld::new(SimConfig {
        seed: 3,
        pinned: Bytes::gib(1),
        ..SimConfig::default()
    })
    .unwrap();
    let workers = world
        .workers(2)
        .into_iter()
        .map(|w| Worker::new(w, Bytes::mib(1)).unwrap());
    let workers: Vec<Worker> = workers.collect();
    let host = HostPool::new(workers[0].device().clone(), Pin::Alloc);
    let ports: Vec<Port> = workers
        .iter()
        .map(|w| Port::new(w.clone(), host.clone()))
        .collect();
    let value = workers[0]
        .full(DType::F32, Shape::new(&[64]).unwrap(), 3.0)
        .unwrap();
    let sent = ports[0].send("value", &value).unwrap();
    let bytes = sent.fence().unwrap();
    assert!(bytes.write(0..4).is_ok(), "nothing reads it yet");
    let arrival = ports[1].receive("value", &sent).unwrap();
    for range in [0..4, 252..256, 0..256] {
        assert!(
            matches!(bytes.write(range), Err(Error::Busy { .. })),
            "the upload reads it"
        );
    }
    assert!(bytes.read_all().is_ok(), "readers share");
    let there = arrival.land().unwrap();
    assert!(
        bytes.write(0..4).is_err(),
        "the lane has not come to it, for all the host knows"
    );
    assert_eq!(there.to_vec::<f32>().unwrap(), [3.0; 64]);
    assert!(
        sent.fence().unwrap().write(0..4).is_ok(),
        "the host has seen it land"
    );
    // An upload is under way when the host value goes: the holder of the bytes may write them,
    // since the host waited.
    let arrival = ports[1].receive("value", &sent).unwrap();
    drop(sent);
    bytes.write(0..256).unwrap().as_mut_slice::<f32>().fill(9.0);
    assert_eq!(arrival.land().unwrap().to_vec::<f32>().unwrap(), [3.0; 64]);
    assert_eq!(host.usage().lent, Bytes(0));
    assert!(world.races().is_empty(), "{:?}", world.races());
}

/// Memory that lanes alone still read goes back to its pool at once, claims or not, and is used
/// again.
#[test]
fn a_host_value_under_way_gives_its_memory_back() {
    let (world, worker) = sim();
    let host = HostPool::new(worker.device().clone(), Pin::Alloc);
    let port = Port::new(worker.clone(), host.clone());
    let value = worker
        .full(DType::F32, Shape::new(&[64]).unwrap(), 3.0)
        .unwrap();
    let mut arrivals = Vec::new();
    for _ in 0..4 {
        let sent = port.send("value", &value).unwrap();
        arrivals.push(port.receive("value", &sent).unwrap());
    }
    let (usage, one) = (host.usage(), Bytes(256));
    assert_eq!(
        (usage.allocated, usage.lent, usage.peak),
        (one, Bytes(0), one)
    );
    for arrival in arrivals {
        assert_eq!(arrival.land().unwrap().to_vec::<f32>().unwrap(), [3.0; 64]);
    }
    world.fence_all().unwrap();
}
