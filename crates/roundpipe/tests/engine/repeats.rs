//! What recomputes leave out, and what forwards keep for them: fewer operations, the same bits.

use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::{AdamW, Rule};
use roundpipe::trace::{Category, Lane, Span};
use roundpipe::{
    Bytes, Cx, DType, Device, ExecutePlan, Grain, HostTensor, Lag, PlanKind, RingOptions,
    RoundPipe, RunConfig, Sequential, Tensor, Update,
};
use roundpipe::{Module, ParamVisitor, Params};
use roundpipe_tensor::sim::{SimConfig, Timing};
use roundpipe_tensor::{DeviceKind, Meta, SimWorld};

use crate::models;

/// Two linear maps, the inner width four times the outer.
struct Unit {
    up: Linear,
    down: Linear,
}

const WIDTH: usize = 16;
const ROWS: usize = 120;

impl Params for Unit {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Unit {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> roundpipe_tensor::Result<Tensor> {
        let up = self.up.forward(cx, x)?;
        let inner = cx.gelu(&up)?;
        let inner = cx.dropout(&inner, 0.1)?;
        let down = self.down.forward(cx, &inner)?;
        cx.add(x, &down)
    }
}

/// Six of them.
fn units() -> Sequential {
    let mut init = Init::new(9, DType::F32);
    let mut linear = |from, to| Linear::new(&mut init, from, to, true).unwrap();
    let units = (0..6).map(|_| Unit {
        up: linear(WIDTH, 4 * WIDTH),
        down: linear(4 * WIDTH, WIDTH),
    });
    units.fold(Sequential::new(), |model, unit| model.with(unit))
}

fn numbers(step: u64) -> HostTensor {
    let values: Vec<f32> = (0..ROWS * WIDTH)
        .map(|i| (i as f32 + step as f32 * 0.3).sin())
        .collect();
    HostTensor::from_slice(&values, &[ROWS, WIDTH]).unwrap()
}

/// Bytes that may stay on a worker, and go to host memory.
type Keep = (Option<Bytes>, Option<Bytes>);

fn engine(model: &Sequential, devices: Vec<Arc<dyn Device>>, keep: Keep) -> RoundPipe {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 3], &[1, 2, 3]);
    RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .seed(models::SEED)
        .devices(devices)
        .run_config(RunConfig::default().num_microbatch(3).execute_plan(plan))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(32)),
            activation_budget: keep.0,
            host_activations: keep.1,
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

/// The first step of a model studies its recomputes, the second leaves out what they do not need,
/// and keeps what has room.
#[test]
fn later_steps_compute_less() {
    let flops = |grain: Grain, keep: Keep| {
        let meta = Meta::like(DeviceKind::Sim);
        let engine = engine(&units(), vec![meta.clone() as Arc<dyn Device>], keep);
        let mut steps = Vec::new();
        for step in 0..4 {
            let before = meta.cost().flops;
            let config = RunConfig::new().recompute_grain(grain);
            let call = engine.train(numbers(step)).loss(weighted);
            call.config(config).run().unwrap();
            engine.update(&Update::new(0.01), Lag::Zero).unwrap();
            engine.synchronize().unwrap();
            steps.push(meta.cost().flops - before);
        }
        assert_eq!(steps[2], steps[3]);
        steps
    };
    let (no, few) = (Some(Bytes(0)), Some(Bytes(100 << 10)));
    // Outputs inside a stage are kept, too, so nothing of it is left to do.
    let all_kept = [Grain::Stage, Grain::Layer].map(|grain| flops(grain, (None, no))[2]);
    assert_eq!(all_kept[0], all_kept[1]);
    for grain in [Grain::Stage, Grain::Layer] {
        let none = flops(grain, (no, no));
        assert!(none[2] < none[0], "{grain:?}: {none:?}");
        for keep in [(few, no), (no, few)] {
            let some = flops(grain, keep);
            assert!(some[2] < none[2], "{grain:?}: {keep:?} {some:?}");
            let all = flops(grain, (None, no));
            assert!(all[2] < some[2], "{grain:?}: {keep:?} {some:?} {all:?}");
        }
    }
}

/// Pieces in host memory are on their way before the task that needs them begins, so its kernels do
/// not wait for them.
#[test]
fn pieces_come_back_beside_kernels() {
    for grain in [Grain::Stage, Grain::Layer] {
        let world = SimWorld::new(SimConfig {
            // A piece takes as long as a kernel or two.
            timing: Timing {
                kernel_ns: 50_000,
                upload_bytes_per_ns: 0.2,
                download_bytes_per_ns: 0.2,
                ..Timing::exact()
            },
            ..SimConfig::default()
        })
        .unwrap();
        let devices = world.workers(1).into_iter().map(|worker| worker as _);
        let keep = (Some(Bytes(0)), Some(Bytes::mib(1)));
        let engine = engine(&units(), devices.collect(), keep);
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[5], &[1, 5]);
        let config = RunConfig::new().recompute_grain(grain).execute_plan(plan);
        for step in 0..3 {
            if step == 2 {
                engine.trace().on();
            }
            let call = engine.train(numbers(step)).loss(weighted);
            call.config(config.clone()).run().unwrap();
            engine.update(&Update::new(0.01), Lag::Zero).unwrap();
        }
        engine.synchronize().unwrap();
        let spans = engine.trace().spans();
        let pieces = spans.iter().filter(|s| {
            s.track.lane == Lane::ActivationUpload && s.name.contains("saved for recompute")
        });
        assert!(pieces.count() >= 3 * 5, "{grain:?}: pieces come back");
        // Those of the backward stage; the last layer is fused with the loss.
        let of_backward = |s: &&Span| {
            let is_back = matches!(s.category, Category::Recompute | Category::Backward);
            is_back && s.layer.is_some_and(|layer| layer < 5)
        };
        let kernels = || spans.iter().filter(|s| s.track.lane == Lane::Compute);
        // A trace also has the call before, which ends after it was switched on.
        let last_call = kernels().map(|s| s.call).max();
        let of_last = kernels().filter(|s| Some(s.call) == last_call);
        let busy = of_last.filter(of_backward).map(|s| (s.start_ns, s.end_ns));
        let mut busy: Vec<(u64, u64)> = busy.collect();
        busy.sort_unstable();
        let all = busy.last().unwrap().1 - busy[0].0;
        let idle: u64 = busy.windows(2).map(|w| w[1].0.saturating_sub(w[0].1)).sum();
        assert!(idle < all / 100, "{grain:?}: {idle} ns of {all} idle");
        assert_eq!(world.races(), []);
    }
}

/// A layer that looks at its values and goes one of two ways runs whole, and right.
#[test]
fn a_layer_that_looks_at_values_is_run_whole() {
    let model = || {
        let mut init = Init::new(4, DType::F32);
        let mut linear = || Linear::new(&mut init, 5, 5, true).unwrap();
        let looks = |cx: &mut Cx, x: &Tensor| {
            let y = cx.mul(x, x)?;
            let sum = cx.sum_all(&y)?;
            match sum.item()? > 10.0 {
                true => cx.tanh(&y),
                false => cx.exp(x),
            }
        };
        let (a, b, c) = (linear(), linear(), linear());
        Sequential::new()
            .with(a)
            .with(Func(looks))
            .with(b)
            .with(Func(looks))
            .with(c)
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.tanh(x)))
    };
    same_as_plain(&model, |step| {
        (models::numbers(step, 9, DType::F32).0, step)
    });
}

/// A layer that goes one of two ways by values that it reads through a copy of its own.
#[test]
fn a_layer_that_reads_a_copy_is_run_whole() {
    let model = || {
        let mut init = Init::new(5, DType::F32);
        let mut linear = || Linear::new(&mut init, 5, 5, true).unwrap();
        let (a, b) = (linear(), linear());
        let changes = |cx: &mut Cx, x: &Tensor| {
            let mut y = cx.mul(x, x)?;
            // Read through a copy that no watch sees as a read of `y`.
            let first = roundpipe::Worker::of(x).copied(x, DType::F32)?;
            if first.to_f64_vec()?[0] > 0.0 {
                y = cx.sin(&y)?;
            }
            cx.tanh(&y)
        };
        Sequential::new()
            .with(a)
            .with(Func(changes))
            .with(b)
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.tanh(x)))
    };
    same_as_plain(&model, |step| {
        (models::numbers(step, 9, DType::F32).0, step)
    });
}

/// Trains four steps under the engine, in stages of one layer and in one of all, and by a plain
/// loop: the same bits.
fn same_as_plain(model: &dyn Fn() -> Sequential, batch: impl Fn(u64) -> (HostTensor, u64)) {
    let rule = Rule::AdamW(AdamW::default());
    let batch = |step: u64| {
        let (x, _) = batch(step);
        let weights = models::numbers(step, x.dims()[0], DType::F32).1;
        (roundpipe::HostInputs::from(x), weights)
    };
    let plain = model();
    let trail = models::plain_loop(&plain, rule, 0.05, 4, &batch, 3, weighted);
    for grain in [Grain::Stage, Grain::Layer] {
        let model = model();
        let layers = model.layers().count();
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[layers - 1], &[1, layers - 1]);
        let engine = RoundPipe::builder(model.clone())
            .optimizer(rule)
            .optimizer_threads(1)
            .seed(models::SEED)
            .devices(models::cpus(2))
            .run_config(
                RunConfig::new()
                    .num_microbatch(3)
                    .execute_plan(plan)
                    .recompute_grain(grain),
            )
            .build()
            .unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            let (x, weights) = batch(step);
            let loss = engine.forward_backward(x, weights, weighted).unwrap();
            losses.push(models::bits(&loss));
            engine.update(&Update::new(0.05), Lag::Zero).unwrap();
        }
        engine.synchronize().unwrap();
        assert_eq!(losses, trail.losses, "{grain:?}");
        assert_eq!(models::params(&model), trail.params, "{grain:?}");
    }
}

fn weighted(
    cx: &mut Cx,
    output: roundpipe::Tree,
    _: roundpipe::Tree,
) -> roundpipe_tensor::Result<Tensor> {
    let y = output.tensor()?;
    let y = cx.mul(&y, &y)?;
    cx.sum_all(&y)
}

/// The same bits whatever is kept, in stages of any size and grain, on devices with memory of their
/// own and without, with room for all, for some and for none.
#[test]
fn what_is_kept_changes_no_bit() {
    let rule = Rule::AdamW(AdamW::default());
    let batch = |step: u64| (roundpipe::HostInputs::from(numbers(step)), numbers(step));
    let trail = models::plain_loop(&units(), rule, 0.01, 4, &batch, 3, weighted);
    let devices = |way: usize| match way {
        0 => models::cpus(1),
        1 => models::cpus(3),
        2 => crate::api::sims(3, 1).1,
        _ => crate::api::sims(4, 2).1,
    };
    for way in 0..4 {
        for grain in [Grain::Stage, Grain::Layer] {
            let (none, some) = (Some(Bytes(0)), Some(Bytes(100 << 10)));
            for keep in [
                (None, None),
                (some, None),
                (none, some),
                (some, some),
                (none, none),
            ] {
                let model = units();
                let engine = engine(&model, devices(way), keep);
                let mut losses = Vec::new();
                for step in 0..4 {
                    let config = RunConfig::new().recompute_grain(grain);
                    let call = engine.train(numbers(step)).labels(numbers(step));
                    let done = call.loss(weighted).config(config).run().unwrap();
                    losses.push(models::bits(&done.losses));
                    engine.update(&Update::new(0.01), Lag::Zero).unwrap();
                }
                engine.synchronize().unwrap();
                assert_eq!(losses, trail.losses, "{way} {grain:?} {keep:?}");
                assert_eq!(
                    models::params(&model),
                    trail.params,
                    "{way} {grain:?} {keep:?}"
                );
            }
        }
    }
}
