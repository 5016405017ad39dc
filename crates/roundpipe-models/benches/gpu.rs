//! Figures of a GPU, each beside its floor: copies, products, attention, memory-bound kernels, a
//! head, launches, a decoder layer. Sections are named on the command line; without a GPU it says
//! so and ends.
//!
//! `cargo bench -p roundpipe-models --bench gpu -- copies products attention variants kernels head
//! launches layer`
#![allow(clippy::print_stdout, reason = "a program that prints figures")]

use std::time::Instant;

use roundpipe::kernel::RopeStyle;
use roundpipe::ops::{Attention, CrossEntropy};
use roundpipe::{Bytes, Cx, DType, Shape, Tensor, TensorResult, Tree, Worker};
use roundpipe_models::{Model, ModelConfig, preset};
use roundpipe_tensor::{Cuda, LaneKind};

type Section = fn(&Worker) -> Res<()>;
type Res<T> = Result<T, Box<dyn std::error::Error>>;

/// Qwen3-1.7B with as many blocks as asked for.
fn qwen(layers: usize, vocab: usize, seq: usize) -> Res<ModelConfig> {
    let changes = serde_json::json!({"num_hidden_layers": layers, "vocab_size": vocab});
    let mut config = preset("qwen3-1.7b")?.with(&changes)?;
    config.max_positions = seq;
    Ok(config)
}

/// Milliseconds of one call, in a round of `count`.
fn round(
    worker: &Worker,
    count: usize,
    f: &mut impl FnMut() -> TensorResult<()>,
) -> TensorResult<f64> {
    let start = Instant::now();
    for _ in 0..count {
        f()?;
    }
    worker.fence()?;
    Ok(start.elapsed().as_secs_f64() * 1e3 / count as f64)
}

/// Milliseconds of one call: the best of three rounds. The first call may compile and make plans,
/// for which the GPU waits and slows its clock down, so calls for 50 ms follow before any is timed.
fn time(
    worker: &Worker,
    count: usize,
    mut f: impl FnMut() -> TensorResult<()>,
) -> TensorResult<f64> {
    round(worker, 1, &mut f)?;
    let start = Instant::now();
    while start.elapsed().as_millis() < 50 {
        round(worker, count, &mut f)?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best = best.min(round(worker, count, &mut f)?);
    }
    Ok(best)
}

/// Milliseconds of one call of a GPU that has rested: calls for 10 ms, after half a second of none;
/// the best of three. Under longer load its clock goes down with its power limit, which [`time`]
/// shows.
fn rested(worker: &Worker, mut f: impl FnMut() -> TensorResult<()>) -> TensorResult<f64> {
    let guess = time(worker, 3, &mut f)?;
    let count = ((10.0 / guess) as usize).clamp(2, 1000);
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(500));
        round(worker, 1, &mut f)?;
        best = best.min(round(worker, count, &mut f)?);
    }
    Ok(best)
}

fn randn(worker: &Worker, dims: &[usize]) -> TensorResult<Tensor> {
    let mut cx = Cx::new(worker, false, true);
    cx.randn(DType::BF16, dims)
}

fn bandwidth(worker: &Worker) -> TensorResult<f64> {
    let x = randn(worker, &[1 << 28])?;
    let ms = time(worker, 10, || worker.copied(&x, DType::BF16).map(drop))?;
    Ok(2.0 * (1u64 << 29) as f64 / ms / 1e9)
}

fn copies(worker: &Worker) -> Res<()> {
    println!("copy on the device: {:.2} TB/s", bandwidth(worker)?);
    let bytes = 512 << 20;
    let host = worker
        .device()
        .host_buffer("bench", bytes, roundpipe::Pin::Alloc)?;
    for (lane, name) in [
        (LaneKind::ParamUpload, "upload"),
        (LaneKind::GradDownload, "download"),
    ] {
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            let block = worker.pool().alloc("bench", bytes as u64)?;
            worker.fence()?;
            let start = Instant::now();
            match lane {
                LaneKind::ParamUpload => drop(
                    worker
                        .device()
                        .lane(lane)
                        .upload(name, host.read_all()?, block)?
                        .land()?,
                ),
                _ => drop(
                    worker
                        .device()
                        .lane(lane)
                        .download(name, block, host.write(0..bytes)?)?
                        .land()?,
                ),
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("pinned {name}: {:.1} GB/s", bytes as f64 / best / 1e9);
    }
    Ok(())
}

fn products(worker: &Worker) -> Res<()> {
    for (m, k, n) in [
        (16384, 2048, 6144),
        (16384, 6144, 2048),
        (16384, 2048, 2048),
        (8192, 8192, 8192),
    ] {
        let (x, w) = (randn(worker, &[m, k])?, randn(worker, &[n, k])?);
        let mut cx = Cx::new(worker, false, true);
        let rate = |ms: f64| 2.0 * (m * k * n) as f64 / ms / 1e9;
        let ms = time(worker, 10, || cx.linear(&x, &w, None).map(drop))?;
        let burst = rested(worker, || cx.linear(&x, &w, None).map(drop))?;
        println!(
            "product {m} x {k} x {n} bf16: {:.0} TFLOP/s, rested {:.0}",
            rate(ms),
            rate(burst)
        );
    }
    experts(worker)
}

/// Products of rows that are sorted by expert: forward, and both gradients.
fn experts(worker: &Worker) -> Res<()> {
    let (rows, experts) = (1usize << 17, 128usize);
    let ends: Vec<i32> = (0..=experts).map(|i| (i * rows / experts) as i32).collect();
    let ends = worker.upload(&ends, Shape::new(&[experts + 1])?)?;
    for (k, n) in [(2048, 768), (768, 2048)] {
        let (x, w) = (randn(worker, &[rows, k])?, randn(worker, &[experts, n, k])?);
        let dy = randn(worker, &[rows, n])?;
        let rate = |products: f64, ms: f64| products * 2.0 * (rows * k * n) as f64 / ms / 1e9;
        let mut cx = Cx::new(worker, false, true);
        let forward = time(worker, 10, || {
            cx.grouped_linear(&x, &w, &ends, None).map(drop)
        })?;
        let both = time(worker, 10, || {
            let mut cx = Cx::train(worker);
            let (x, w) = (cx.input(&x)?, cx.input(&w)?);
            let y = cx.grouped_linear(&x, &w, &ends, None)?;
            cx.backward_from(&[(y, dy.clone())]).map(drop)
        })?;
        println!(
            "product of {experts} experts, {rows} x {k} x {n} bf16: forward {:.0} TFLOP/s, with gradients {:.0}",
            rate(1.0, forward),
            rate(3.0, both)
        );
    }
    Ok(())
}

fn attention(worker: &Worker) -> Res<()> {
    for (b, hq, hk, s, d) in [
        (4, 16, 8, 4096, 128),
        (1, 32, 8, 16384, 128),
        (2, 64, 8, 4096, 64),
        (1, 16, 8, 65536, 128),
        (1, 16, 8, 131_072, 128),
    ] {
        let (q, k) = (
            randn(worker, &[b, s, hq, d])?,
            randn(worker, &[b, s, hk, d])?,
        );
        let (v, dy) = (
            randn(worker, &[b, s, hk, d])?,
            randn(worker, &[b, s, hq, d])?,
        );
        let how = Attention {
            causal: true,
            ..Attention::default()
        };
        let mut cx = Cx::new(worker, false, true);
        let flops = 2.0 * (b * hq * s * s * d) as f64;
        // About 50 ms a round, so that the wait at its end does not count.
        let count = ((25e12 / flops) as usize).clamp(3, 100);
        // Of a known forward, so that nothing but the backward is timed.
        let known = cx.attention_known(&q, &k, &v, &how, None)?;
        let back = |any_order: bool| {
            let mut cx = Cx::train(worker);
            let (q, k, v) = (cx.input(&q)?, cx.input(&k)?, cx.input(&v)?);
            let how = Attention { any_order, ..how };
            let (y, _) = cx.attention_known(&q, &k, &v, &how, Some(known.clone()))?;
            cx.backward_from(&[(y, dy.clone())]).map(drop)
        };
        let rates = |forward: f64, backward: f64, any_order: f64| {
            let [f, b, a] = [(1.0, forward), (2.5, backward), (2.5, any_order)]
                .map(|(n, ms)| n * flops / ms / 1e9);
            format!("forward {f:.0} TFLOP/s, backward {b:.0}, in any order {a:.0}")
        };
        let long = rates(
            time(worker, count, || cx.attention(&q, &k, &v, &how).map(drop))?,
            time(worker, count.div_ceil(3), || back(false))?,
            time(worker, count.div_ceil(3), || back(true))?,
        );
        println!("attention {b} x {hq}/{hk} x {s} x {d}: {long}");
        let short = rates(
            rested(worker, || cx.attention(&q, &k, &v, &how).map(drop))?,
            rested(worker, || back(false))?,
            rested(worker, || back(true))?,
        );
        println!("    rested: {short}");
    }
    Ok(())
}

/// What attention of other kinds takes, in milliseconds and in operations of the pairs that are
/// seen: sinks, windows, sequences packed into one row, and lengths that are no library's.
fn variants(worker: &Worker) -> Res<()> {
    let s = 4096usize;
    let causal = Attention {
        causal: true,
        ..Attention::default()
    };
    let pairs = |b: usize, s: usize, seen: usize, h: usize, d: usize| (b * h * s * seen * d) as f64;
    let (q, k) = (
        randn(worker, &[2, s, 64, 64])?,
        randn(worker, &[2, s, 8, 64])?,
    );
    let sinks = randn(worker, &[64])?;
    let sunk = Attention {
        sinks: Some(&sinks),
        ..causal
    };
    shown(
        worker,
        "2 x 64/8 x 4096 x 64, sinks",
        (&q, &k),
        &sunk,
        pairs(2, s, s / 2, 64, 64),
    )?;
    let narrow = Attention {
        window: Some(128),
        ..sunk
    };
    let name = "2 x 64/8 x 4096 x 64, sinks, window 128";
    shown(worker, name, (&q, &k), &narrow, pairs(2, s, 128, 64, 64))?;
    let operands = |b, s| -> Res<(Tensor, Tensor)> {
        Ok((
            randn(worker, &[b, s, 16, 128])?,
            randn(worker, &[b, s, 8, 128])?,
        ))
    };
    let (q, k) = operands(4, s)?;
    let wide = Attention {
        window: Some(1024),
        ..causal
    };
    let seen = 1024 - 1024 / 8;
    shown(
        worker,
        "4 x 16/8 x 4096 x 128, window 1024",
        (&q, &k),
        &wide,
        pairs(4, s, seen, 16, 128),
    )?;
    let (q, k) = operands(4, 4000)?;
    shown(
        worker,
        "4 x 16/8 x 4000 x 128",
        (&q, &k),
        &causal,
        pairs(4, 4000, 2000, 16, 128),
    )?;
    let (q, k) = operands(1, 4 * s)?;
    let ends: Vec<i32> = (0..=4).map(|i| i * s as i32).collect();
    let ends = worker.upload(&ends, Shape::new(&[5])?)?;
    let packed = Attention {
        lens: Some((&ends, &ends)),
        ..causal
    };
    let name = "4 x 4096 tokens in a row, 16/8 x 128";
    shown(worker, name, (&q, &k), &packed, pairs(4, s, s / 2, 16, 128))?;
    let ends = documents(4, s, 700.0);
    let seen: usize = ends
        .windows(2)
        .map(|pair| ((pair[1] - pair[0]) as usize).pow(2) / 2)
        .sum();
    let ends = worker.upload(&ends, Shape::new(&[ends.len()])?)?;
    let packed = Attention {
        lens: Some((&ends, &ends)),
        ..causal
    };
    let name = "4 x 4096 tokens, documents of 700, 16/8 x 128";
    shown(worker, name, (&q, &k), &packed, pairs(1, 1, seen, 16, 128))
}

/// Ends of documents that fill so many rows: exponential lengths of a fixed seed, cut where a row
/// ends.
fn documents(rows: usize, row: usize, mean: f64) -> Vec<i32> {
    let (mut ends, mut state) = (vec![0], 1u64);
    for first in (0..rows).map(|i| i * row) {
        let mut at = first;
        while at < first + row {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
            let length = (-mean * (1.0 - uniform).ln()).ceil().max(1.0) as usize;
            at = (at + length).min(first + row);
            ends.push(at as i32);
        }
    }
    ends
}

fn shown(
    worker: &Worker,
    name: &str,
    (q, k): (&Tensor, &Tensor),
    how: &Attention<'_>,
    pairs: f64,
) -> Res<()> {
    let mut cx = Cx::new(worker, false, true);
    let forward = time(worker, 5, || cx.attention(q, k, k, how).map(drop))?;
    let known = cx.attention_known(q, k, k, how, None)?;
    let backward = time(worker, 5, || {
        let mut cx = Cx::train(worker);
        let (q, k) = (cx.input(q)?, cx.input(k)?);
        let (y, _) = cx.attention_known(&q, &k, &k, how, Some(known.clone()))?;
        cx.backward_from(&[(y, q.clone())]).map(drop)
    })?;
    println!(
        "attention {name}: forward {forward:.2} ms, {:.0} TFLOP/s, backward {backward:.2} ms, {:.0}",
        4.0 * pairs / forward / 1e9,
        10.0 * pairs / backward / 1e9
    );
    Ok(())
}

/// One memory-bound kernel: bytes it must move, and the share of the copy rate it reaches.
fn bound(
    worker: &Worker,
    copy: f64,
    name: &str,
    bytes: usize,
    f: impl FnMut() -> TensorResult<()>,
) -> TensorResult<()> {
    let ms = time(worker, 10, f)?;
    let rate = bytes as f64 / ms / 1e9;
    println!(
        "{name}: {ms:.3} ms, {rate:.2} TB/s, {:.0}% of copy",
        100.0 * rate / copy
    );
    Ok(())
}

fn kernels(worker: &Worker) -> Res<()> {
    let copy = bandwidth(worker)?;
    let (rows, width) = (16384, 8192);
    let size = rows * width * 2;
    let (x, y) = (
        randn(worker, &[rows, width])?,
        randn(worker, &[rows, width])?,
    );
    let w = randn(worker, &[width])?;
    let mut cx = Cx::new(worker, false, true);
    bound(worker, copy, "add", 3 * size, || cx.add(&x, &y).map(drop))?;
    bound(worker, copy, "rms_norm", 2 * size, || {
        cx.rms_norm(&x, Some(&w), 1e-6).map(drop)
    })?;
    bound(worker, copy, "add_rms_norm", 4 * size, || {
        cx.add_rms_norm(&x, &y, Some(&w), 1e-6).map(drop)
    })?;
    bound(worker, copy, "swiglu", 3 * size, || {
        cx.swiglu(&x, &y).map(drop)
    })?;
    bound(worker, copy, "softmax", 2 * size, || {
        cx.softmax(&x, -1).map(drop)
    })?;
    bound(worker, copy, "dropout", 2 * size, || {
        cx.dropout(&x, 0.1).map(drop)
    })?;
    bound(worker, copy, "cast to f32", 3 * size, || {
        worker.copied(&x, DType::F32).map(drop)
    })?;
    bound(worker, copy, "sum of all", size, || {
        cx.sum_all(&x).map(drop)
    })?;
    bound(worker, copy, "column sums", size, || {
        cx.sum(&x, &[0], false).map(drop)
    })?;
    let back = |f: &dyn Fn(&mut Cx, &Tensor, &Tensor) -> TensorResult<Tensor>| {
        let mut cx = Cx::train(worker);
        let (a, b) = (cx.input(&x)?, cx.input(&y)?);
        let out = f(&mut cx, &a, &b)?;
        cx.backward_from(&[(out, y.clone())]).map(drop)
    };
    let norm = |cx: &mut Cx, a: &Tensor, _: &Tensor| {
        let w = cx.input(&w)?;
        cx.rms_norm(a, Some(&w), 1e-6)
    };
    bound(worker, copy, "rms_norm and its gradient", 5 * size, || {
        back(&norm)
    })?;
    bound(worker, copy, "swiglu and its gradient", 8 * size, || {
        back(&|cx, a, b| cx.swiglu(a, b))
    })?;
    let heads = cx.reshape(&x, &[4, 4096, 64, 128])?;
    let (cos, sin) = roundpipe::ops::rope_tables(4096, 128, 1e6);
    let table = |t: Vec<f64>| {
        let t: Vec<f32> = t.into_iter().map(|v| v as f32).collect();
        worker.upload(&t, Shape::new(&[4096, 64])?)
    };
    let (cos, sin, small) = (table(cos)?, table(sin)?, randn(worker, &[128])?);
    bound(worker, copy, "rope with norm", 2 * size, || {
        cx.rope_norm(&heads, &small, &cos, &sin, None, RopeStyle::Half, 1e-6)
            .map(drop)
    })?;
    let classes = 151_936;
    let logits = randn(worker, &[2048, classes])?;
    let labels: Vec<i64> = (0..2048).map(|i| i * 37 % classes as i64).collect();
    let labels = worker.upload(&labels, Shape::new(&[2048])?)?;
    bound(worker, copy, "cross entropy", 2048 * classes * 2, || {
        cx.cross_entropy(&logits, &labels, CrossEntropy::default())
            .map(drop)
    })?;
    let table = randn(worker, &[classes, 2048])?;
    let ids: Vec<i64> = (0..16384).map(|i| i * 911 % classes as i64).collect();
    let ids = worker.upload(&ids, Shape::new(&[16384])?)?;
    bound(worker, copy, "embedding", 2 * 16384 * 4096, || {
        cx.embedding(&table, &ids).map(drop)
    })?;
    let grad = randn(worker, &[16384, 2048])?;
    // The table of sums in f32 is filled with 0 and, as no parameter keeps it, cast to bf16; rows
    // are read from the table and written, their gradients read, and added to 16,384 rows of sums.
    let rows = 16384 * 2048 * (3 * 2 + 2 * 4) + classes * 2048 * (4 + 4 + 2);
    bound(worker, copy, "embedding and its gradient", rows, || {
        let mut cx = Cx::train(worker);
        let t = cx.input(&table)?;
        let y = cx.embedding(&t, &ids)?;
        cx.backward_from(&[(y, grad.clone())]).map(drop)
    })?;
    Ok(())
}

/// The last layer of 16,384 tokens, forward and backward, by the tokens of a chunk.
fn head(worker: &Worker) -> Res<()> {
    let (tokens, width, classes) = (16384usize, 2048usize, 151_936usize);
    let (x, w) = (
        randn(worker, &[tokens, width])?,
        randn(worker, &[classes, width])?,
    );
    let labels: Vec<i64> = (0..tokens as i64)
        .map(|i| i * 37 % classes as i64)
        .collect();
    let labels = worker.upload(&labels, Shape::new(&[tokens])?)?;
    let floor = 8.0 * (tokens * width * classes) as f64 / 700e9;
    for chunk_tokens in [
        None,
        Some(256),
        Some(512),
        Some(1024),
        Some(2048),
        Some(4096),
    ] {
        let how = CrossEntropy {
            chunk_tokens,
            ..CrossEntropy::default()
        };
        let ms = time(worker, 2, || {
            let mut cx = Cx::train(worker);
            let (x, w) = (cx.input(&x)?, cx.input(&w)?);
            let loss = cx.linear_cross_entropy(&x, &w, &labels, how)?;
            cx.backward(&loss).map(drop)
        })?;
        println!(
            "head, {} tokens a chunk: {ms:.1} ms, floor {floor:.1} ms at 700 TFLOP/s ({:.0}%)",
            chunk_tokens.map_or("its own choice of".to_owned(), |n| n.to_string()),
            100.0 * floor / ms
        );
    }
    Ok(())
}

/// What a launch costs the host, and what small kernels leave of the GPU's time.
fn launches(worker: &Worker) -> Res<()> {
    let x = randn(worker, &[256])?;
    let mut cx = Cx::new(worker, false, true);
    let count = 2000;
    let mut queue =
        |name: &str, f: &mut dyn FnMut(&mut Cx) -> TensorResult<()>| -> TensorResult<()> {
            f(&mut cx)?;
            worker.fence()?;
            let start = Instant::now();
            for _ in 0..count {
                f(&mut cx)?;
            }
            let queued = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
            worker.fence()?;
            let done = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
            println!("launch of {name}: {queued:.2} us to queue, {done:.2} us until it is done");
            Ok(())
        };
    queue("a small sum of two", &mut |cx| cx.add(&x, &x).map(drop))?;
    let rows = randn(worker, &[4, 256])?;
    let w = randn(worker, &[256])?;
    queue("a small norm", &mut |cx| {
        cx.rms_norm(&rows, Some(&w), 1e-6).map(drop)
    })?;
    let m = randn(worker, &[256, 256])?;
    queue("a small product", &mut |cx| {
        cx.linear(&rows, &m, None).map(drop)
    })?;
    let q = randn(worker, &[1, 128, 2, 64])?;
    let how = Attention {
        causal: true,
        ..Attention::default()
    };
    queue("a small attention", &mut |cx| {
        cx.attention(&q, &q, &q, &how).map(drop)
    })?;
    // One token through a block of Qwen3-1.7B: what generation with weights on the GPU does.
    let decoder = Model::random(qwen(1, 1024, 1024)?, DType::BF16, 1)?;
    let (_, block) = decoder.layers.layers().nth(1).ok_or("no block")?;
    let params: Vec<_> = block.named_params().into_iter().map(|(_, p)| p).collect();
    let on: Vec<Tensor> = params
        .iter()
        .map(|p| cx.get(p))
        .collect::<TensorResult<_>>()?;
    let bytes: usize = params.iter().map(|p| p.bytes()).sum();
    for tokens in [1, 64, 1024] {
        let hidden = randn(worker, &[1, tokens, 2048])?;
        let ms = time(worker, 50, || {
            let mut cx = Cx::new(worker, false, false);
            for (param, tensor) in params.iter().zip(&on) {
                cx.bind(param, tensor.clone(), None)?;
            }
            block
                .run(
                    &mut cx,
                    Tree::map([("hidden", Tree::Tensor(hidden.clone()))]),
                )
                .map(drop)
        })?;
        println!(
            "block of {tokens} tokens: {:.1} us, its weights alone take {:.1} us at 4 TB/s",
            ms * 1e3,
            bytes as f64 / 4e6
        );
    }
    Ok(())
}

fn layer(worker: &Worker) -> Res<()> {
    let (batch, seq) = (4, 4096);
    let decoder = Model::random(qwen(1, 1024, seq)?, DType::BF16, 1)?;
    let (_, block) = decoder.layers.layers().nth(1).ok_or("no block")?;
    let params: Vec<_> = block.named_params().into_iter().map(|(_, p)| p).collect();
    let mut cx = Cx::new(worker, false, true);
    let on: Vec<Tensor> = params
        .iter()
        .map(|p| cx.get(p))
        .collect::<TensorResult<_>>()?;
    let hidden = randn(worker, &[batch, seq, 2048])?;
    let flow = |t: &Tensor| Tree::map([("hidden", Tree::Tensor(t.clone()))]);
    let forward = time(worker, 5, || {
        let mut cx = Cx::new(worker, false, true);
        for (param, tensor) in params.iter().zip(&on) {
            cx.bind(param, tensor.clone(), None)?;
        }
        block.run(&mut cx, flow(&hidden)).map(drop)
    })?;
    let mut sums: Vec<Option<Tensor>> = params.iter().map(|_| None).collect();
    let dy = randn(worker, &[batch, seq, 2048])?;
    let both = time(worker, 5, || {
        let mut cx = Cx::train(worker);
        for ((param, tensor), sum) in params.iter().zip(&on).zip(&mut sums) {
            cx.bind(param, tensor.clone(), sum.take())?;
        }
        let x = cx.input(&hidden)?;
        let y = block.run(&mut cx, flow(&x))?.take("hidden")?.tensor()?;
        let mut grads = cx.backward_from(&[(y, dy.clone())])?;
        for (param, sum) in params.iter().zip(&mut sums) {
            *sum = grads.take_param(param);
        }
        Ok(())
    })?;
    let tokens = (batch * seq) as f64;
    let weights = (2048 * 2048 * 2 + 2048 * 1024 * 2 + 3 * 2048 * 6144) as f64;
    let product = 2.0 * tokens * weights;
    let mixing = 2.0 * 2.0 * tokens * seq as f64 / 2.0 * 2048.0;
    let flops = product + mixing;
    let floor = |times: f64| times * flops / 700e9;
    println!(
        "decoder layer forward: {forward:.2} ms, floor {:.2} ms at 700 TFLOP/s ({:.0}%)",
        floor(1.0),
        100.0 * floor(1.0) / forward
    );
    println!(
        "decoder layer recompute and backward: {both:.2} ms, floor {:.2} ms ({:.0}%)",
        floor(3.0),
        100.0 * floor(3.0) / both
    );
    println!(
        "decoder layer all: {:.2} ms, floor {:.2} ms ({:.0}%)",
        forward + both,
        floor(4.0),
        100.0 * floor(4.0) / (forward + both)
    );
    Ok(())
}

fn main() -> Res<()> {
    let device = match Cuda::new(0) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let asked: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|a| a == name);
    let cap = Bytes::gib(24);
    if [
        "copies",
        "products",
        "attention",
        "variants",
        "kernels",
        "head",
        "launches",
        "layer",
    ]
    .iter()
    .any(|name| wants(name))
    {
        let worker = Worker::new(device, cap)?;
        let sections: [(&str, Section); 8] = [
            ("copies", copies),
            ("products", products),
            ("attention", attention),
            ("variants", variants),
            ("kernels", kernels),
            ("head", head),
            ("launches", launches),
            ("layer", layer),
        ];
        for (name, section) in sections {
            if wants(name)
                && let Err(error) = section(&worker)
            {
                println!("{name}: failed: {error}");
            }
        }
    }
    Ok(())
}
