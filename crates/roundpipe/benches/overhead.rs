//! What the engine costs beside a plain loop, on cpu workers that share two threads: prints the
//! best tokens per second of alternating rounds, and the ratio to the plain loop: the median over
//! rounds of the ratio within each, so that neither a lucky round nor a slow spell of the machine
//! decides.
//!
//! Goals: one worker reaches 0.97 of the plain loop, two workers 1.0 of it. On a machine where
//! others work as well, more rounds help: `cargo bench -p roundpipe --bench overhead -- 20`.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use roundpipe::nn::{Embedding, Init, Linear, RmsNorm};
use roundpipe::ops::Attention;
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, HostTensor, Lag, Module, Optimizer, ParamVisitor, Params,
    RngSite, RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorResult, Tree, Update, Worker,
};

const VOCAB: usize = 512;
const WIDTH: usize = 256;
const HEADS: usize = 4;
const BLOCKS: usize = 6;
const SEQ: usize = 128;
const MICROBATCHES: usize = 4;
const BATCH: usize = 2 * MICROBATCHES;
const THREADS: usize = 2;
const LR: f64 = 1e-3;
/// Steps of a round; nothing is under way when it ends.
const STEPS: u64 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|word| word.parse().ok())
        .unwrap_or(8);
    let mut out = std::io::stdout().lock();
    let mut plain = Plain::new()?;
    let mut ways = vec![("plain loop".to_owned(), Vec::new())];
    let mut engines = Vec::new();
    for workers in [1, 2] {
        for lag in [Lag::Zero, Lag::One] {
            engines.push((engine(workers, lag)?, lag));
            let name = if workers == 1 {
                "one worker"
            } else {
                "two workers"
            };
            ways.push((format!("{name}, lag {}", lag as u8), Vec::new()));
        }
    }
    writeln!(
        out,
        "{} parameters, {THREADS} threads, {rounds} rounds",
        plain.model.num_params()
    )?;
    for round in 0..=rounds {
        let mut seconds = vec![timed(|| plain.steps())?];
        for (engine, lag) in &engines {
            seconds.push(timed(|| steps(engine, *lag))?);
        }
        // The first round warms up.
        for (way, seconds) in ways.iter_mut().zip(seconds).filter(|_| round > 0) {
            way.1.push(seconds);
        }
    }
    let tokens = (STEPS as usize * BATCH * SEQ) as f64;
    for (name, seconds) in &ways {
        let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let ratio = median(
            ways[0]
                .1
                .iter()
                .zip(seconds)
                .map(|(plain, engine)| plain / engine)
                .collect(),
        );
        writeln!(
            out,
            "{name:<18} {:>8.0} tokens/s  {ratio:.3} of the plain loop",
            tokens / best
        )?;
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn timed(run: impl FnOnce() -> roundpipe::Result<()>) -> roundpipe::Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

fn engine(workers: usize, lag: Lag) -> roundpipe::Result<RoundPipe> {
    let devices = Cpu::workers(workers, Some(THREADS))?
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>);
    RoundPipe::builder(decoder()?)
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(THREADS)
        .max_lag(lag)
        .run_config(RunConfig::new().num_microbatch(MICROBATCHES))
        .devices(devices)
        .memory(Bytes::gib(1))
        .build()
}

fn steps(engine: &RoundPipe, lag: Lag) -> roundpipe::Result<()> {
    for step in 0..STEPS {
        let (ids, labels) = batch(step, BATCH)?;
        engine.forward_backward(ids, labels, loss)?;
        engine.update(&Update::new(LR), lag)?;
    }
    engine.synchronize()
}

/// The fastest loop that knows no engine: weights read in place, gradients summed in place.
struct Plain {
    model: Sequential,
    worker: Worker,
    optimizer: Optimizer,
}

impl Plain {
    fn new() -> roundpipe::Result<Self> {
        let model = decoder()?;
        let worker = Worker::new(Cpu::new(Some(THREADS))?, Bytes::gib(1))?;
        let optimizer = Optimizer::new(model.trainable_params(), AdamW::default())?;
        Ok(Self {
            model,
            worker,
            optimizer,
        })
    }

    fn steps(&mut self) -> roundpipe::Result<()> {
        (0..STEPS).try_for_each(|step| self.step(step))
    }

    fn step(&mut self, step: u64) -> roundpipe::Result<()> {
        let (ids, labels) = batch(step, BATCH)?;
        let params = self.model.trainable_params();
        let mut sums: Vec<Option<Tensor>> = params.iter().map(|_| None).collect();
        let rows = BATCH / MICROBATCHES;
        for m in 0..MICROBATCHES {
            let mut cx = Cx::train(&self.worker);
            for ((_, param), sum) in params.iter().zip(&mut sums) {
                let weight = self
                    .worker
                    .alias(&param.data(), param.dtype(), *param.shape())?;
                cx.bind(param, weight, sum.take())?;
            }
            let mut part = |t: &HostTensor| {
                cx.tensor(&t.narrow(0, m * rows, rows)?.to_vec::<i64>()?, &[rows, SEQ])
            };
            let (ids, labels) = (part(&ids)?, part(&labels)?);
            let logits = self.model.forward(&mut cx, ids)?;
            let loss = loss(&mut cx, logits, labels.into())?;
            let mut grads = cx.backward(&loss)?;
            loss.item()?;
            if m + 1 == MICROBATCHES {
                self.optimizer.add(&grads)?;
            }
            for ((_, param), sum) in params.iter().zip(&mut sums) {
                *sum = grads.take_param(param);
            }
        }
        drop(sums);
        self.optimizer.step(&Update::new(LR))?;
        Ok(())
    }
}

/// Attention and a gated product, each behind a norm and beside its input.
struct Block {
    norm1: RmsNorm,
    qkv: Linear,
    out: Linear,
    norm2: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(init: &mut Init) -> TensorResult<Self> {
        Ok(Self {
            norm1: RmsNorm::new(init, WIDTH, 1e-6)?,
            qkv: Linear::new(init, WIDTH, 3 * WIDTH, false)?,
            out: Linear::new(init, WIDTH, WIDTH, false)?,
            norm2: RmsNorm::new(init, WIDTH, 1e-6)?,
            gate: Linear::new(init, WIDTH, 2 * WIDTH, false)?,
            up: Linear::new(init, WIDTH, 2 * WIDTH, false)?,
            down: Linear::new(init, 2 * WIDTH, WIDTH, false)?,
        })
    }
}

impl Params for Block {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("norm1", &self.norm1);
        visit.child("qkv", &self.qkv);
        visit.child("out", &self.out);
        visit.child("norm2", &self.norm2);
        visit.child("gate", &self.gate);
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Block {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let rows = x.dims()[0] as isize;
        let y = self.norm1.forward(cx, x)?;
        let qkv = self.qkv.forward(cx, &y)?;
        let qkv = cx.reshape(
            &qkv,
            &[
                rows,
                SEQ as isize,
                3 * HEADS as isize,
                (WIDTH / HEADS) as isize,
            ],
        )?;
        let heads = |cx: &mut Cx, i: usize| cx.narrow(&qkv, 2, i * HEADS, HEADS);
        let (q, k, v) = (heads(cx, 0)?, heads(cx, 1)?, heads(cx, 2)?);
        let y = cx.attention(
            &q,
            &k,
            &v,
            &Attention {
                causal: true,
                ..Attention::default()
            },
        )?;
        let y = cx.reshape(&y, &[rows, SEQ as isize, WIDTH as isize])?;
        let y = self.out.forward(cx, &y)?;
        let x = cx.add(x, &y)?;
        let y = self.norm2.forward(cx, &x)?;
        let gate = self.gate.forward(cx, &y)?;
        let gate = cx.silu(&gate)?;
        let up = self.up.forward(cx, &y)?;
        let y = cx.mul(&gate, &up)?;
        let y = self.down.forward(cx, &y)?;
        cx.add(&x, &y)
    }
}

fn decoder() -> TensorResult<Sequential> {
    let mut init = Init::new(1, DType::F32);
    let mut model = Sequential::new().named("embed", Embedding::new(&mut init, VOCAB, WIDTH, 0.5)?);
    for i in 0..BLOCKS {
        model = model.named(format!("block{i}"), Block::new(&mut init)?);
    }
    Ok(model
        .named("norm", RmsNorm::new(&mut init, WIDTH, 1e-6)?)
        .named("head", Linear::new(&mut init, WIDTH, VOCAB, false)?))
}

fn loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    let (logits, label) = (output.tensor()?, label.tensor()?);
    let logits = cx.reshape(&logits, &[-1, VOCAB as isize])?;
    let label = cx.reshape(&label, &[-1])?;
    cx.cross_entropy(&logits, &label, Default::default())
}

fn batch(step: u64, rows: usize) -> TensorResult<(HostTensor, HostTensor)> {
    let key = RngSite {
        seed: 2,
        step,
        ..RngSite::default()
    }
    .key();
    let ids: Vec<i64> = (0..=rows * SEQ)
        .map(|i| i64::from(key.word(i as u64)) % VOCAB as i64)
        .collect();
    let tensor = |from: usize| HostTensor::from_slice(&ids[from..from + rows * SEQ], &[rows, SEQ]);
    Ok((tensor(0)?, tensor(1)?))
}
