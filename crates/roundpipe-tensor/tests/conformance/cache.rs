//! Caches: what is written stays, and attention to the filled part is attention to that part.

use std::sync::Arc;

use roundpipe_tensor::ops::Attention;
use roundpipe_tensor::{Bytes, Cpu, Cx, DType, Device, Error, Result, SimWorld, Tensor, Worker};

use crate::bed::{self, Input, Strict, check_with, fixed, noise, values};

const CAUSAL: Attention<'_> = Attention {
    scale: None,
    causal: true,
    window: None,
    sinks: None,
    lens: None,
    any_order: false,
};

fn quiet(seed: u64, dims: &[usize]) -> Input {
    let count = dims.iter().product();
    let all: Vec<f64> = noise(seed, count).into_iter().map(|x| x / 2.0).collect();
    values(&all, dims).constant()
}

const FORWARD: Strict = Strict {
    slack: 1.0,
    differences: false,
    dtypes: &[DType::F32, DType::BF16, DType::F16],
};

/// Fills caches of 11 places with what came before and one step more, and attends to them.
fn decode(how: Attention<'static>) -> impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>> {
    move |cx, x| {
        let [q, k, v, before_k, before_v, start, at, sinks] = x else {
            panic!("eight inputs")
        };
        let [b, _, h, d] = *k.dims() else {
            panic!("four dimensions")
        };
        let cache_k = cx.cache(k.dtype(), [b, 11, h, d])?;
        let cache_v = cx.cache(v.dtype(), [b, 11, h, v.dims()[3]])?;
        for (cache, first, then) in [(&cache_k, before_k, k), (&cache_v, before_v, v)] {
            cx.cache_write(cache, first, start)?;
            cx.cache_write(cache, then, at)?;
        }
        let how = Attention {
            sinks: Some(sinks),
            ..how
        };
        let o = cx.cached_attention(q, &cache_k, &cache_v, at, &how)?;
        Ok(vec![o, cache_k, cache_v])
    }
}

fn inputs(steps: usize, width: usize) -> Vec<Input> {
    vec![
        quiet(1, &[3, steps, 4, width]),
        quiet(2, &[3, steps, 2, width]),
        quiet(3, &[3, steps, 2, width]),
        quiet(4, &[3, 7, 2, width]),
        quiet(5, &[3, 7, 2, width]),
        fixed(DType::I32, &[0, 0, 0], &[3]),
        fixed(DType::I32, &[7, 0, 4], &[3]),
        quiet(6, &[4]),
    ]
}

#[test]
fn cached_attention_conforms() {
    for (steps, width) in [(1, 8), (3, 8), (1, 5), (1, 64), (1, 128)] {
        let name = format!("{steps} steps of width {width}");
        check_with(&name, &inputs(steps, width), FORWARD, decode(CAUSAL));
        let window = Attention {
            window: Some(3),
            ..CAUSAL
        };
        check_with(&name, &inputs(steps, width), FORWARD, decode(window));
    }
}

/// A row gets the bits of plain attention over its own keys, whatever stands beside it.
#[test]
fn a_row_is_what_it_is_alone() {
    let worker = Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::mib(64)).unwrap();
    let (heads, groups, width, capacity) = (4, 2, 16, 300);
    let at: [i32; 4] = [0, 63, 130, 299];
    let mut cx = Cx::infer(&worker);
    let tensor = |cx: &mut Cx, seed, dims: &[usize]| {
        let all: Vec<f32> = noise(seed, dims.iter().product())
            .into_iter()
            .map(|x| x as f32)
            .collect();
        cx.tensor(&all, dims).unwrap()
    };
    let q = tensor(&mut cx, 1, &[4, 1, heads, width]);
    let k = tensor(&mut cx, 2, &[4, capacity, groups, width]);
    let v = tensor(&mut cx, 3, &[4, capacity, groups, width]);
    let places = cx.tensor(&at, &[4]).unwrap();
    let all = cx.cached_attention(&q, &k, &v, &places, &CAUSAL).unwrap();
    for (row, at) in at.iter().enumerate() {
        let one = |cx: &mut Cx, t: &Tensor| cx.narrow(t, 0, row, 1).unwrap();
        let seen = |cx: &mut Cx, t: &Tensor| {
            let t = one(cx, t);
            cx.narrow(&t, 1, 0, *at as usize + 1).unwrap()
        };
        let (q, k, v) = (one(&mut cx, &q), seen(&mut cx, &k), seen(&mut cx, &v));
        let alone = cx.attention(&q, &k, &v, &CAUSAL).unwrap();
        let together = one(&mut cx, &all);
        let bits = |t: &Tensor| -> Vec<u32> {
            let all: Vec<f32> = t.to_vec().unwrap();
            all.into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(bits(&together), bits(&alone), "row {row}");
    }
}

/// On every backend, with rows of whole words and without.
#[test]
fn written_rows_conform() {
    for width in [1, 3, 8] {
        let inputs = [
            quiet(7, &[5, width]),
            quiet(8, &[3, width]),
            fixed(DType::I32, &[4, 0, 3], &[3]),
        ];
        let write = |cx: &mut Cx, x: &[Tensor]| {
            let [table, rows, at] = x else {
                panic!("three inputs")
            };
            let worker = cx.worker().clone();
            let table = worker.copied_long(table, table.dtype())?;
            worker.write_rows(&table, rows, at)?;
            Ok(vec![table])
        };
        check_with(&format!("rows of {width}"), &inputs, FORWARD, write);
    }
}

/// Rows of a table beside tasks, in its own type and in another, each as often as it is named.
#[test]
fn rows_beside_conform() {
    for dtype in [None, Some(DType::F32), Some(DType::BF16)] {
        let inputs = [quiet(9, &[5, 3]), fixed(DType::I32, &[4, 0, 3, 4], &[4])];
        let gather = |cx: &mut Cx, x: &[Tensor]| {
            let dtype = dtype.unwrap_or(x[0].dtype());
            let rows = cx.worker().rows_beside(&x[0], &x[1], dtype, 0)?;
            // Compared in the type of the inputs.
            Ok(vec![cx.cast(&rows.expect("there is room"), x[0].dtype())?])
        };
        check_with(
            &format!("rows beside as {dtype:?}"),
            &inputs,
            FORWARD,
            gather,
        );
    }
}

/// More rows than are gathered at a time have the bits of a cast of the whole table; where there is no
/// room for them there are none.
#[test]
fn many_rows_are_gathered_in_pieces() {
    const WIDTH: usize = 1 << 20;
    let world = SimWorld::seeded(3).unwrap();
    let sim = world.workers(1).remove(0);
    let cpu: Arc<dyn Device> = Cpu::new(Some(2)).unwrap();
    for device in [cpu, sim] {
        let device = Worker::new(device, Bytes::mib(112)).unwrap();
        let mut cx = Cx::infer(&device);
        let table: Vec<f32> = (0..3 * WIDTH).map(|i| i as f32 * 0.37).collect();
        let table = cx.tensor(&table, &[3, WIDTH]).unwrap();
        let whole = cx.cast(&table, DType::BF16).unwrap();
        let whole: Vec<u16> = bits(&whole);
        let places = [2_i32, 0, 0, 1, 2, 0, 1, 1, 2, 0];
        let at = cx.tensor(&places, &[places.len()]).unwrap();
        let rows = device.rows_beside(&table, &at, DType::BF16, 0).unwrap();
        let rows = bits(&rows.expect("there is room"));
        for (row, place) in rows.chunks(WIDTH).zip(places) {
            let start = place as usize * WIDTH;
            assert!(row == &whole[start..start + WIDTH], "row {place}");
        }
    }
    let sim = world.workers(1).remove(0);
    let device = Worker::new(sim, Bytes::mib(1)).unwrap();
    let mut cx = Cx::infer(&device);
    let table = cx.zeros(DType::F32, &[4, 64]).unwrap();
    let at = cx.tensor(&[0_i32; 2048], &[2048]).unwrap();
    let rows = device
        .rows_beside(&table, &at, DType::F32, 1 << 19)
        .unwrap();
    assert!(rows.is_some(), "half of the memory");
    let more = device
        .rows_beside(&table, &at, DType::F32, 1 << 19)
        .unwrap();
    assert!(more.is_none(), "the other half is for tasks");
}

fn bits(tensor: &Tensor) -> Vec<u16> {
    let all: Vec<roundpipe_tensor::bf16> = tensor.to_vec().unwrap();
    all.into_iter()
        .map(roundpipe_tensor::bf16::to_bits)
        .collect()
}

/// Rows come to their places, others stay, also minus zero; a place outside is refused.
#[test]
fn rows_are_written_to_their_places() {
    let world = SimWorld::seeded(2).unwrap();
    let sim = world.workers(1).remove(0);
    for device in [bed::worker(2), Worker::new(sim, Bytes::mib(16)).unwrap()] {
        let mut cx = Cx::infer(&device);
        for dtype in [DType::F32, DType::BF16] {
            let before: Vec<f32> = (0..15).map(|i| i as f32).collect();
            let table = cx.tensor(&before, &[5, 3]).unwrap();
            let table = cx.cast(&table, dtype).unwrap();
            let table = device.copied_long(&table, dtype).unwrap();
            let rows = cx
                .tensor(&[-0.0_f32, 0.5, -1.0, 7.0, 8.0, 9.0], &[2, 3])
                .unwrap();
            let rows = cx.cast(&rows, dtype).unwrap();
            let at = cx.tensor(&[4_i32, 1], &[2]).unwrap();
            device.write_rows(&table, &rows, &at).unwrap();
            let wide = cx.cast(&table, DType::F32).unwrap();
            let after: Vec<u32> = wide
                .to_vec::<f32>()
                .unwrap()
                .into_iter()
                .map(f32::to_bits)
                .collect();
            let mut expected = before;
            expected[3..6].copy_from_slice(&[7.0, 8.0, 9.0]);
            expected[12..].copy_from_slice(&[-0.0, 0.5, -1.0]);
            let expected: Vec<u32> = expected.into_iter().map(f32::to_bits).collect();
            assert_eq!(after, expected, "{dtype}");
            for bad in [-1_i32, 5] {
                let at = cx.tensor(&[0, bad], &[2]).unwrap();
                let written = device.write_rows(&table, &rows, &at);
                let written = written.and_then(|()| device.fence());
                assert!(matches!(written, Err(Error::Index { .. })), "{written:?}");
            }
            let short = cx.narrow(&rows, 1, 0, 2).unwrap();
            assert!(
                device.write_rows(&table, &short, &at).is_err(),
                "narrow rows"
            );
        }
    }
}

#[test]
fn places_outside_a_cache_are_refused() {
    let world = SimWorld::seeded(1).unwrap();
    let sim = world.workers(1).remove(0);
    for device in [bed::worker(2), Worker::new(sim, Bytes::mib(16)).unwrap()] {
        for at in [-1_i32, 4, i32::MAX] {
            let mut cx = Cx::infer(&device);
            let cache = cx.cache(DType::F32, [1, 4, 1, 2]).unwrap();
            let x = cx.zeros(DType::F32, &[1, 1, 1, 2]).unwrap();
            let at = cx.tensor(&[at], &[1]).unwrap();
            let written = cx
                .cache_write(&cache, &x, &at)
                .and_then(|()| device.fence());
            assert!(matches!(written, Err(Error::Index { .. })), "{written:?}");
            let read = cx
                .cached_attention(&x, &cache, &cache, &at, &CAUSAL)
                .and_then(|_| device.fence());
            assert!(matches!(read, Err(Error::Index { .. })), "{read:?}");
        }
        let mut cx = Cx::train(&device);
        let cache = cx.cache(DType::F32, [1, 4, 1, 2]).unwrap();
        let x = cx.zeros(DType::F32, &[1, 1, 1, 2]).unwrap();
        let x = cx.input(&x).unwrap();
        let at = cx.tensor(&[0_i32], &[1]).unwrap();
        assert!(cx.cache_write(&cache, &x, &at).is_err(), "a gradient");
    }
}
