//! Rows of a table that the next call reads before the table is updated whole: the same bits.

use std::sync::Arc;

use roundpipe::engine::Builder;
use roundpipe::nn::{Embedding, Init, Linear};
use roundpipe::ops::CrossEntropy;
use roundpipe::optim::{AdamW, MomentType, Rule, Sgd};
use roundpipe::trace::Lane;
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Lag, Module, Param, ParamVisitor,
    Params, PlanKind, RingOptions, RoundPipe, RunConfig, Sequential, Tensor, TensorResult, Tree,
    Update,
};

use crate::api::sims;
use crate::models;

const ROWS: usize = 70;
const WIDTH: usize = 32;
const BATCH: usize = 8;
const SEQ: usize = 5;
pub const STEPS: u64 = 6;
/// So wide that its update takes longer than it takes to submit a call.
const HIDDEN: usize = 1 << 14;

/// Two linear layers, added to their input.
struct Wide {
    up: Linear,
    down: Linear,
}

impl Params for Wide {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Wide {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let hidden = self.up.forward(cx, x)?;
        let hidden = cx.tanh(&hidden)?;
        let y = self.down.forward(cx, &hidden)?;
        cx.add(x, &y)
    }
}

/// Logits by the table, or by a matrix of its own.
struct Head(Param);

impl Params for Head {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.0);
    }
}

impl Module for Head {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let weight = cx.get(&self.0)?;
        cx.linear(x, &weight, None)
    }
}

/// A table, a wide layer, two narrow ones, a head: five layers.
pub fn model(dtype: DType, tied: bool) -> Sequential {
    let mut init = Init::new(3, dtype);
    let table = Embedding::new(&mut init, ROWS, WIDTH, 0.5).unwrap();
    let head = match tied {
        true => table.weight.clone(),
        false => init.normal(&[ROWS, WIDTH], 0.3).unwrap(),
    };
    let up = Linear::new(&mut init, WIDTH, HIDDEN, false).unwrap();
    let down = Linear::new(&mut init, HIDDEN, WIDTH, false).unwrap();
    let narrow = |init: &mut Init| Linear::new(init, WIDTH, WIDTH, true).unwrap();
    Sequential::new()
        .with(table)
        .with(Wide { up, down })
        .with(narrow(&mut init))
        .with(narrow(&mut init))
        .with(Head(head))
}

/// Tokens of a batch, many of them twice; later microbatches name rows that earlier ones named too.
fn tokens(step: u64) -> HostTensor {
    let ids: Vec<i64> = (0..BATCH * SEQ)
        .map(|i| ((i * i + 7 * step as usize) % ROWS) as i64)
        .collect();
    HostTensor::from_slice(&ids, &[BATCH, SEQ]).unwrap()
}

fn loss(cx: &mut Cx, output: Tree, labels: Tree) -> TensorResult<Tensor> {
    cx.cross_entropy(
        &output.tensor()?,
        &labels.tensor()?,
        CrossEntropy::default(),
    )
}

/// Stages of these sizes forward, the head fused with the loss, all others backward at once.
pub fn config(forward: &[usize], grain: Grain) -> RunConfig {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, forward, &[1, 4]);
    RunConfig::new().execute_plan(plan).recompute_grain(grain)
}

pub fn builder(model: &Sequential, devices: Vec<Arc<dyn Device>>) -> Builder<Sequential> {
    RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(2)
        .seed(models::SEED)
        .devices(devices)
        .memory(Bytes::mib(256))
        .run_config(RunConfig::default().num_microbatch(3))
}

pub fn train(engine: &RoundPipe, step: u64, config: RunConfig) -> u64 {
    let call = engine
        .train(tokens(step))
        .labels(tokens(step + 1))
        .loss(loss);
    models::bits(&call.config(config).run().unwrap().losses)
}

pub fn clipped() -> Update {
    Update {
        clip: Some(0.5),
        ..Update::new(0.01)
    }
}

/// Trains at lag 0; the bits of all losses.
pub fn train_all(engine: &RoundPipe, forward: &[usize], grain: Grain) -> Vec<u64> {
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.push(train(engine, step, config(forward, grain)));
        engine.update(&clipped(), Lag::Zero).unwrap();
    }
    engine.synchronize().unwrap();
    losses
}

/// How many microbatches received rows before their table.
fn row_copies(engine: &RoundPipe) -> usize {
    let spans = engine.trace().spans().into_iter();
    let rows = spans
        .filter(|span| span.track.lane == Lane::ParamUpload && span.name.starts_with("rows of"));
    rows.count()
}

/// How many copies of gradients had only rows of the table.
fn gradient_row_copies(engine: &RoundPipe) -> usize {
    let spans = engine.trace().spans().into_iter();
    let rows = spans
        .filter(|span| span.track.lane == Lane::GradDownload && span.name == "rows of a gradient");
    rows.count()
}

/// The same bits as on the processor, where weights are read in place: any grain and stage, one
/// worker and two, tied and not, f32 and bf16; and rows do come first, and leave alone.
#[test]
fn rows_that_come_first_change_no_bit() {
    let (mut copies, mut gradients) = (0, 0);
    for (dtype, tied) in [
        (DType::F32, true),
        (DType::BF16, true),
        (DType::BF16, false),
    ] {
        for (grain, forward) in [(Grain::Stage, [1, 3]), (Grain::Layer, [2, 2])] {
            let plain_model = model(dtype, tied);
            let plain = builder(&plain_model, models::cpus(1)).build().unwrap();
            let losses = train_all(&plain, &forward, grain);
            drop(plain);
            for workers in [1, 2] {
                let name = format!("{dtype} tied {tied} {grain:?}, {workers} workers");
                let model = model(dtype, tied);
                let (world, devices) = sims(9, workers);
                let engine = builder(&model, devices).build().unwrap();
                engine.trace().on();
                assert_eq!(train_all(&engine, &forward, grain), losses, "{name}");
                copies += row_copies(&engine);
                gradients += gradient_row_copies(&engine);
                drop(engine);
                assert_eq!(
                    models::params(&model),
                    models::params(&plain_model),
                    "{name}"
                );
                assert_eq!(world.races(), [], "{name}");
            }
        }
    }
    assert!(copies > 0, "no call has read rows before their table");
    let calls = 3 * 2 * 2 * STEPS as usize;
    assert_eq!(gradients, calls, "copies of rows of gradients");
}

/// Other rules, moments in fewer bits, two slabs of weights, one job after another, little memory:
/// by rows or whole, the bits are the same.
#[test]
fn other_settings_change_no_bit() {
    type Settings = fn(Builder<Sequential>) -> Builder<Sequential>;
    let sgd: Settings = |builder| {
        builder.optimizer(Rule::Sgd(Sgd {
            momentum: 0.9,
            ..Sgd::default()
        }))
    };
    let settings: [(&str, Settings); 5] = [
        ("sgd", sgd),
        ("bf16 moments", |b| b.moments(MomentType::Bf16)),
        ("8-bit moments", |b| b.moments(MomentType::Bits8)),
        ("two slabs", |b| b.max_lag(Lag::One)),
        ("f32 gradients", |b| b.grad_dtype(DType::F32)),
    ];
    for (name, with) in settings {
        let forward = [2, 2];
        let plain_model = model(DType::BF16, true);
        let plain = with(builder(&plain_model, models::cpus(1)))
            .build()
            .unwrap();
        let losses = train_all(&plain, &forward, Grain::Stage);
        drop(plain);
        for (serial, memory) in [(false, 256), (true, 256), (false, 13)] {
            let name = format!("{name}, serial {serial}, {memory} MiB");
            let model = model(DType::BF16, true);
            let (world, devices) = sims(4, 1);
            let options = RingOptions {
                memory: Some(Bytes::mib(memory)),
                serial,
                ..RingOptions::default()
            };
            let engine = with(builder(&model, devices).ring_options(options)).build();
            let engine = engine.unwrap();
            assert_eq!(train_all(&engine, &forward, Grain::Stage), losses, "{name}");
            drop(engine);
            assert_eq!(
                models::params(&model),
                models::params(&plain_model),
                "{name}"
            );
            assert_eq!(world.races(), [], "{name}");
        }
    }
}

/// Everything that may stand between two steps: an evaluation, a call with a token that has no row,
/// a skipped step, one that is not finite, a function of the user, a step at lag 1, two calls of one
/// step.
pub fn eventful(engine: &RoundPipe) -> Vec<u64> {
    let config = || config(&[2, 2], Grain::Stage);
    let mut losses = Vec::new();
    for step in 0..9 {
        losses.push(train(engine, step, config()));
        if step == 7 {
            losses.push(train(engine, step + 1, config()));
        }
        let infinite = Update {
            grad_scale: f64::from(f32::MAX),
            ..clipped()
        };
        match step {
            2 => engine.skip_step(Lag::Zero).map(drop).unwrap(),
            3 => engine.update(&infinite, Lag::Zero).map(drop).unwrap(),
            4 => engine.step(halve, Lag::Zero).map(drop).unwrap(),
            5 => engine.update(&clipped(), Lag::One).map(drop).unwrap(),
            _ => engine.update(&clipped(), Lag::Zero).map(drop).unwrap(),
        }
        if step == 1 || step == 6 {
            let config = RunConfig::new().requires_grad(false);
            drop(engine.forward(tokens(step), &config).unwrap());
        }
        if step == 7 {
            let bad = HostTensor::from_slice(&[ROWS as i64; BATCH * SEQ], &[BATCH, SEQ]).unwrap();
            let call = engine.train(bad).labels(tokens(step)).loss(loss);
            assert!(
                call.config(config()).run().is_err(),
                "a token without a row"
            );
        }
    }
    engine.synchronize().unwrap();
    losses
}

fn halve(params: &mut roundpipe::OptimParams<'_>) -> roundpipe::Result<()> {
    for param in params.iter_mut() {
        param.value.iter_mut().for_each(|x| *x *= 0.5);
    }
    Ok(())
}

#[test]
fn what_comes_between_changes_no_bit() {
    let plain_model = model(DType::BF16, true);
    let with_lag = |builder: Builder<Sequential>| builder.max_lag(Lag::One).build().unwrap();
    let plain = with_lag(builder(&plain_model, models::cpus(1)));
    let losses = eventful(&plain);
    drop(plain);
    let mut copies = 0;
    for workers in [1, 2] {
        let model = model(DType::BF16, true);
        let (world, devices) = sims(8, workers);
        let engine = with_lag(builder(&model, devices));
        engine.trace().on();
        assert_eq!(eventful(&engine), losses, "{workers} workers");
        copies += row_copies(&engine);
        drop(engine);
        assert_eq!(
            models::params(&model),
            models::params(&plain_model),
            "{workers} workers"
        );
        assert_eq!(world.races(), [], "{workers} workers");
    }
    assert!(copies > 0, "no call has read rows before their table");
}

/// Rows of a gradient that is larger than what is under way at a time, others in every step, few and
/// many, in one call and in two of a step: all have the bits of the whole gradient, and rows of the
/// step before are zero again.
#[test]
fn rows_of_a_large_gradient_find_their_places() {
    const MANY: usize = 180_000;
    const WIDE: usize = 256;
    let ids = |step: usize| {
        // From 40 rows of all parts of the table to 1, and more than half of a part in between.
        let spread = [4_421, 1, 97, 13, 70_003][step % 5];
        let ids = (0..BATCH * SEQ).map(|i| ((i * spread + 31 * step) % MANY) as i64);
        HostTensor::from_slice(&ids.collect::<Vec<_>>(), &[BATCH, SEQ]).unwrap()
    };
    let run = |devices: Vec<Arc<dyn Device>>| {
        let mut init = Init::new(5, DType::BF16);
        let weight = Param::zeros(DType::BF16, &[MANY, WIDE]).unwrap();
        let table = Embedding {
            weight: weight.clone(),
        };
        let head = Linear::new(&mut init, WIDE, ROWS, false).unwrap();
        let model = Sequential::new().with(table).with(head);
        let engine = RoundPipe::builder(model.clone())
            .optimizer(Rule::Sgd(Sgd::default()))
            .seed(models::SEED)
            .devices(devices)
            .memory(Bytes::mib(600))
            .run_config(RunConfig::default().num_microbatch(2))
            .build()
            .unwrap();
        engine.trace().on();
        let mut norms = Vec::new();
        for step in 0..7 {
            for call in 0..=usize::from(step == 3) {
                let call = engine.train(ids(step + call)).labels(tokens(step as u64));
                call.loss(loss).run().unwrap();
            }
            let step = engine.update(&clipped(), Lag::Zero).unwrap();
            norms.push(step.wait().unwrap().grad_norm.to_bits());
        }
        let copies = gradient_row_copies(&engine);
        drop(engine);
        let rows = weight.data().read_all().unwrap().bytes().to_vec();
        (norms, rows, copies)
    };
    let (norms, rows, _) = run(models::cpus(1));
    let (world, devices) = sims(3, 2);
    let (sim_norms, sim_rows, copies) = run(devices);
    assert_eq!(sim_norms, norms);
    assert!(sim_rows == rows, "rows of the table differ");
    assert_eq!(world.races(), []);
    // One for each part of the table that has rows, and none of the second call of a step.
    assert!(copies > 7, "{copies} copies of rows");
}

/// An engine that is dropped while a call waits for rows ends, and its step is made.
#[test]
fn a_step_is_made_when_the_engine_is_dropped() {
    let run = |devices: Vec<Arc<dyn Device>>| {
        let model = model(DType::BF16, true);
        let engine = builder(&model, devices).build().unwrap();
        for step in 0..3 {
            train(&engine, step, config(&[2, 2], Grain::Stage));
            engine.update(&clipped(), Lag::Zero).unwrap();
        }
        // Not waited for: its forward asks for rows, and the engine goes.
        let config = RunConfig::new().requires_grad(true);
        drop(engine.forward(tokens(3), &config).unwrap());
        drop(engine);
        models::params(&model)
    };
    let plain = run(models::cpus(1));
    for seed in 0..4 {
        assert_eq!(run(sims(seed, 1).1), plain, "seed {seed}");
    }
}

/// A call that fails while its rows are on their way leaves the engine in order.
#[test]
fn a_failed_call_leaves_the_update_whole() {
    let fails = |_: &mut Cx, _: Tree, _: Tree| -> TensorResult<Tensor> {
        Err(roundpipe::TensorError::invalid("loss", "on purpose"))
    };
    let run = |devices: Vec<Arc<dyn Device>>| {
        let model = model(DType::BF16, true);
        let engine = builder(&model, devices).build().unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            losses.push(train(&engine, step, config(&[2, 2], Grain::Stage)));
            engine.update(&clipped(), Lag::Zero).unwrap();
            let call = engine.train(tokens(9)).labels(tokens(9)).loss(fails);
            assert!(call.config(config(&[2, 2], Grain::Stage)).run().is_err());
        }
        engine.synchronize().unwrap();
        drop(engine);
        (losses, models::params(&model))
    };
    let plain = run(models::cpus(1));
    let (world, devices) = sims(6, 2);
    assert_eq!(run(devices), plain);
    assert_eq!(world.races(), []);
}

/// A norm that is summed while a large gradient lands has the bits of one that is summed behind it.
#[test]
fn a_norm_is_summed_while_its_gradient_lands() {
    let large = || {
        let mut init = Init::new(5, DType::BF16);
        let table = Embedding::new(&mut init, 100_000, 128, 0.1).unwrap();
        let head = table.weight.clone();
        let narrow = Linear::new(&mut init, 128, 128, false).unwrap();
        Sequential::new().with(table).with(narrow).with(Head(head))
    };
    let norms = |waits: bool| {
        let (world, devices) = sims(2, 1);
        let engine = builder(&large(), devices).memory(Bytes::mib(512)).build();
        let engine = engine.unwrap();
        let mut norms = Vec::new();
        for step in 0..2 {
            let call = engine.train(tokens(step)).labels(tokens(step + 1));
            call.loss(loss).run().unwrap();
            if waits {
                engine.synchronize().unwrap();
            }
            let step = engine.update(&clipped(), Lag::Zero).unwrap();
            norms.push(step.wait().unwrap().grad_norm.to_bits());
        }
        assert_eq!(world.races(), []);
        norms
    };
    assert_eq!(norms(false), norms(true));
}
