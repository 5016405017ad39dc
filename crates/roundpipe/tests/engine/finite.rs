//! Infinities and NaN never reach the weights.

use std::sync::Arc;

use roundpipe::ScalerState;
use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::{AdamW, Sgd};
use roundpipe::{
    Bytes, Cx, DType, Device, Error, GradScaler, HostTensor, Lag, RoundPipe, Rule, RunConfig,
    Sequential, Tensor, TensorResult, Tree, Update,
};
use roundpipe_tensor::SimWorld;

use crate::models;
use crate::simulation::chain;

fn model(dtype: DType) -> Sequential {
    let mut init = Init::new(7, dtype);
    Sequential::new()
        .named("a", Linear::new(&mut init, 4, 8, true).unwrap())
        .named("relu", Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
        .named("b", Linear::new(&mut init, 8, 8, true).unwrap())
        .named("c", Linear::new(&mut init, 8, 3, true).unwrap())
}

fn engine(model: &Sequential, rule: Rule, devices: Vec<Arc<dyn Device>>) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(rule)
        .optimizer_threads(1)
        .max_nonfinite_steps(4)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(devices)
        .memory(Bytes::mib(8))
        .build()
        .unwrap()
}

fn adam() -> Rule {
    Rule::AdamW(AdamW::default())
}

fn sims() -> Vec<Arc<dyn Device>> {
    let world = SimWorld::seeded(5).unwrap();
    world
        .workers(2)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect()
}

/// Six rows of numbers, of which one may be something else.
fn batch(dtype: DType, odd: f64) -> (HostTensor, HostTensor) {
    let mut x: Vec<f64> = (0..24).map(|i| (f64::from(i) * 0.37).sin()).collect();
    x[17] = odd;
    let x = HostTensor::from_f64s(&x, dtype, &[6, 4]).unwrap();
    (
        x,
        HostTensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6]).unwrap(),
    )
}

/// The loss, times a number.
fn times(
    factor: f64,
) -> impl Fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor> + Send + Sync + 'static {
    move |cx, output, labels| {
        let logits = cx.cast(&output.tensor()?, DType::F32)?;
        let loss = cx.cross_entropy(&logits, &labels.tensor()?, Default::default())?;
        cx.affine(&loss, factor, 0.0)
    }
}

fn all_finite(model: &Sequential) -> bool {
    let finite =
        |(_, bits): &(String, Vec<u64>)| bits.iter().all(|bits| f64::from_bits(*bits).is_finite());
    models::params(model).iter().all(finite)
}

/// A loss or an input that is not finite: the step is skipped and says so, and the next good one
/// goes on as if the bad one had not been.
#[test]
fn a_step_that_is_not_finite_is_skipped_and_reported() {
    for dtype in [DType::F32, DType::BF16] {
        for lag in [Lag::Zero, Lag::One] {
            for (factor, odd) in [
                (f64::NAN, 0.5),
                (f64::INFINITY, 0.5),
                (1.0, f64::NAN),
                (1.0, f64::INFINITY),
            ] {
                for clip in [None, Some(1.0)] {
                    let (model, untroubled) = (model(dtype), model(dtype));
                    let engine_ = engine(&model, adam(), models::cpus(2));
                    let update = Update {
                        clip,
                        ..Update::new(0.01)
                    };
                    let before = models::params(&model);
                    let (x, y) = batch(dtype, odd);
                    engine_.forward_backward(x, y, times(factor)).unwrap();
                    let report = engine_.update(&update, lag).unwrap().wait().unwrap();
                    assert!(
                        report.skipped && report.step == 0 && !report.grad_norm.is_finite(),
                        "{report:?}"
                    );
                    engine_.synchronize().unwrap();
                    assert_eq!(
                        models::params(&model),
                        before,
                        "{dtype} {lag:?} {factor} {odd}"
                    );
                    let plain = engine(&untroubled, adam(), models::cpus(1));
                    for engine in [&engine_, &plain] {
                        let (x, y) = batch(dtype, 0.5);
                        engine.forward_backward(x, y, times(1.0)).unwrap();
                        let report = engine.update(&update, lag).unwrap().wait().unwrap();
                        assert!(
                            !report.skipped && !report.partial && report.step == 1,
                            "{report:?}"
                        );
                        engine.synchronize().unwrap();
                    }
                    assert_eq!(models::params(&model), models::params(&untroubled));
                    assert_ne!(models::params(&model), before);
                }
            }
        }
    }
}

/// After as many in a row as the builder allows, training stops with the layer that was the first;
/// good steps between start the count anew, and the engine works on afterwards.
#[test]
fn training_stops_when_steps_go_on_being_not_finite() {
    for devices in [models::cpus(2), sims()] {
        for lag in [Lag::Zero, Lag::One] {
            for (factor, odd, place) in [
                (1.0, f64::NAN, "the output of layer 0 (a), microbatch 1"),
                (f64::NAN, 0.5, "the gradient of layer 3 (c)"),
            ] {
                let model = model(DType::F32);
                let before = models::params(&model);
                let engine = engine(&model, adam(), devices.clone());
                let step = |factor: f64, odd: f64| {
                    let (x, y) = batch(DType::F32, odd);
                    engine.forward_backward(x, y, times(factor)).map(drop)?;
                    engine.update(&Update::new(0.0), lag)?.wait()
                };
                for _ in 0..3 {
                    assert!(step(factor, odd).unwrap().skipped);
                }
                assert!(!step(1.0, 0.5).unwrap().skipped, "a good one ends the row");
                for _ in 0..3 {
                    assert!(step(factor, odd).unwrap().skipped);
                }
                let error = step(factor, odd).unwrap_err();
                assert!(
                    matches!(error, Error::NotFinite { steps: 4, .. }),
                    "{error:?}"
                );
                let text = chain(&error);
                assert!(
                    text.contains(place) && text.contains("learning rate"),
                    "{lag:?}: {text}"
                );
                assert!(!step(1.0, 0.5).unwrap().skipped);
                engine.synchronize().unwrap();
                assert_eq!(models::params(&model), before);
                // Six were skipped in two rows; the seventh failed.
                let warnings = engine.take_warnings();
                assert_eq!(
                    (engine.nonfinite_steps(), warnings.len()),
                    (6, 2),
                    "{warnings:?}"
                );
                assert!(
                    warnings.iter().all(|text| text.contains("was skipped")),
                    "{warnings:?}"
                );
            }
        }
    }
}

/// A scale that is too large is the scaler's business, for as long as it can lower it.
#[test]
fn a_scaler_may_skip_as_often_as_it_lowers_its_scale() {
    let engine = engine(&model(DType::F16), adam(), models::cpus(1));
    let scaler = GradScaler::new(ScalerState {
        scale: 256.0,
        ..ScalerState::default()
    })
    .unwrap();
    let (x, y) = batch(DType::F16, f64::NAN);
    let mut skipped = 0;
    let error = loop {
        let scale = engine.loss_scale(&scaler).unwrap();
        engine
            .forward_backward(x.clone(), y.clone(), times(scale))
            .unwrap();
        let step = engine
            .update_scaled(&Update::new(0.01), &scaler, Lag::Zero)
            .and_then(|step| step.wait());
        match step {
            Ok(report) => assert!(report.skipped),
            Err(error) => break error,
        }
        skipped += 1;
    };
    // From 256 to 1, and then the row.
    assert_eq!(skipped, 8 + 3);
    assert!(matches!(error, Error::NotFinite { .. }), "{error:?}");
}

/// Settings under which finite gradients make weights that are not finite: these elements keep
/// their value, the report says so, and training stops when it goes on.
#[test]
fn an_update_that_would_not_be_finite_is_left_out() {
    let zero_eps = Rule::AdamW(AdamW {
        eps: 0.0,
        ..AdamW::default()
    });
    let cases = [
        (zero_eps, 0.01),
        (adam(), 1e300),
        (
            Rule::Sgd(Sgd {
                momentum: 0.9,
                ..Sgd::default()
            }),
            1e300,
        ),
    ];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rule, lr) in cases {
            let model = model(dtype);
            let engine = engine(&model, rule, models::cpus(1));
            let (x, y) = batch(dtype, 0.5);
            let dead = HostTensor::zeros(dtype, &[6, 4]).unwrap();
            let mut stopped = None;
            for _ in 0..6 {
                // Rows of zeros: gradients of the first weights are exactly zero.
                let x = if matches!(rule, Rule::AdamW(AdamW { eps: 0.0, .. })) {
                    dead.clone()
                } else {
                    x.clone()
                };
                engine.forward_backward(x, y.clone(), times(1.0)).unwrap();
                match engine
                    .update(&Update::new(lr), Lag::Zero)
                    .and_then(|step| step.wait())
                {
                    Ok(report) => assert!(
                        report.partial && !report.skipped,
                        "{dtype} {rule:?}: {report:?}"
                    ),
                    Err(error) => {
                        stopped = Some(chain(&error));
                        break;
                    }
                }
                engine.synchronize().unwrap();
                assert!(all_finite(&model), "{dtype} {rule:?} {lr}");
            }
            let text = stopped.expect("it goes on and on");
            assert!(text.contains("the update of layer 0 (a)"), "{text}");
        }
    }
}

/// What a step function makes infinite or NaN is refused, and nothing has changed then.
#[test]
fn a_step_function_cannot_write_what_is_not_finite() {
    for (dtype, value) in [
        (DType::F32, f32::NAN),
        (DType::F32, f32::INFINITY),
        (DType::BF16, f32::NEG_INFINITY),
        (DType::BF16, f32::MAX),
        (DType::F16, 70_000.0),
    ] {
        for lag in [Lag::Zero, Lag::One] {
            let model = model(dtype);
            let engine = engine(&model, adam(), models::cpus(1));
            let before = models::params(&model);
            let (x, y) = batch(dtype, 0.5);
            engine.forward_backward(x, y, times(1.0)).unwrap();
            let step = engine.step(
                move |params| {
                    params.iter_mut().for_each(|param| param.value.fill(1.0));
                    params.iter_mut().last().unwrap().value[1] = value;
                    Ok(())
                },
                lag,
            );
            let text = chain(&step.and_then(|step| step.wait()).unwrap_err());
            assert!(
                text.contains("element 1 of c.bias") && text.contains("not finite"),
                "{text}"
            );
            let _ = engine.synchronize();
            assert_eq!(models::params(&model), before, "{dtype} {value} {lag:?}");
        }
    }
}

/// Options that would ruin the weights are refused when they are given, and rules when the engine
/// is built.
#[test]
fn options_are_checked_when_they_are_given() {
    let model = model(DType::F32);
    let engine = engine(&model, adam(), models::cpus(1));
    let (x, y) = batch(DType::F32, 0.5);
    engine.forward_backward(x, y, times(1.0)).unwrap();
    let good = Update::new(0.1);
    let clip = |clip| {
        (
            "clip",
            Update {
                clip: Some(clip),
                ..good
            },
        )
    };
    let clip_value = |clip| {
        (
            "clip_value",
            Update {
                clip_value: Some(clip),
                ..good
            },
        )
    };
    let scale = |grad_scale| ("grad_scale", Update { grad_scale, ..good });
    let lr = |lr| ("lr", Update { lr, ..good });
    let wrong = [
        clip(-1.0),
        clip(0.0),
        clip(f64::NAN),
        clip_value(-1.0),
        clip_value(0.0),
        clip_value(f64::NAN),
        scale(f64::NAN),
        scale(f64::INFINITY),
        scale(0.0),
        scale(-1.0),
    ];
    for (name, update) in wrong
        .into_iter()
        .chain([lr(f64::NAN), lr(-1.0), lr(f64::INFINITY)])
    {
        for lag in [Lag::Zero, Lag::One] {
            let text = engine
                .update(&update, lag)
                .map(drop)
                .unwrap_err()
                .to_string();
            assert!(text.starts_with(&format!("{name}: ")), "{text}");
        }
    }
    engine.update(&good, Lag::Zero).unwrap().wait().unwrap();
    let wrong = [
        (
            Rule::AdamW(AdamW {
                beta1: 1.5,
                ..AdamW::default()
            }),
            "adam: beta1 is 1.5, it must be from 0 up to, but not including, 1",
        ),
        (
            Rule::AdamW(AdamW {
                weight_decay: -0.1,
                ..AdamW::default()
            }),
            "adam: weight_decay is -0.1, it must be finite and at least 0",
        ),
        (
            Rule::Sgd(Sgd {
                momentum: f64::NAN,
                ..Sgd::default()
            }),
            "sgd: momentum is NaN, it must be finite and at least 0",
        ),
    ];
    for (rule, line) in wrong {
        let built = RoundPipe::builder(self::model(DType::F32))
            .optimizer(rule)
            .devices(models::cpus(1))
            .build();
        let text = built.map(drop).unwrap_err().to_string();
        assert_eq!(text, line, "{rule:?}");
    }
}

/// Clipping by value bounds what each weight moves, at both lags and every loss scale; the norm is
/// taken behind it, and an infinite gradient still skips the step.
#[test]
fn clipping_by_value_bounds_every_gradient() {
    const CLIP: f64 = 0.03125;
    for lag in [Lag::Zero, Lag::One] {
        for scale in [1.0, 1024.0] {
            let model = model(DType::F32);
            let before = models::params(&model);
            let engine = engine(&model, Rule::Sgd(Sgd::default()), models::cpus(1));
            let update = Update {
                clip_value: Some(CLIP),
                grad_scale: 1.0 / scale,
                ..Update::new(1.0)
            };
            let (x, y) = batch(DType::F32, 0.5);
            engine.forward_backward(x, y, times(scale)).unwrap();
            let report = engine.update(&update, lag).unwrap().wait().unwrap();
            engine.synchronize().unwrap();
            let after = models::params(&model);
            let (mut count, mut most, mut squared) = (0, 0.0f64, 0.0f64);
            for ((_, old), (_, new)) in before.iter().zip(&after) {
                for (old, new) in old.iter().zip(new) {
                    let moved = (f64::from_bits(*old) - f64::from_bits(*new)).abs();
                    count += usize::from((moved - CLIP).abs() < 1e-6);
                    most = most.max(moved);
                    squared += moved * moved;
                }
            }
            let what = format!("{lag:?}, scale {scale}: {most}, {count}, {report:?}");
            assert!(most < CLIP + 1e-6 && count > 3, "{what}");
            assert!((report.grad_norm - squared.sqrt()).abs() < 1e-5, "{what}");

            let (x, y) = batch(DType::F32, 0.5);
            engine.forward_backward(x, y, times(f64::INFINITY)).unwrap();
            let report = engine.update(&update, lag).unwrap().wait().unwrap();
            assert!(report.skipped, "{report:?}");
            engine.synchronize().unwrap();
            assert_eq!(models::params(&model), after, "{lag:?}");
        }
    }
}
