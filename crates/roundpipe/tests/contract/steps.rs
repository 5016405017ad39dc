//! Gradients and steps: what they add up to, which weights calls read, what a step function may do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roundpipe::optim::AdamW;
use roundpipe::{
    Cx, DType, GradScaler, HostTensor, Lag, Param, ParamGroup, Params, RoundPipe, RunConfig,
    Sequential, Tree, Update, bf16,
};

use crate::kit::{Scale, builder, engine, mlp, number, ones, scale, sum, value};

/// Two numbers, one after the other.
fn two() -> (Sequential, Param, Param) {
    let (a, b) = (number(DType::F32, 2.0), number(DType::F32, 3.0));
    let model = Sequential::new()
        .named("a", Scale(a.clone()))
        .named("b", Scale(b.clone()));
    (model, a, b)
}

fn train(engine: &RoundPipe, rows: usize) -> f64 {
    let losses = engine.forward_backward(ones(rows), Tree::None, sum);
    losses.unwrap().total()
}

#[track_caller]
fn near(have: f64, want: f64) {
    assert!((have - want).abs() < 1e-6, "{have}, not {want}");
}

/// Gradients of several calls add up until a step, which takes them.
#[test]
fn gradients_add_up_until_a_step() {
    let (model, w) = scale(DType::F32, 2.0);
    let engine = engine(model, 1);
    for step in [1.0, 2.0] {
        for _ in 0..3 {
            train(&engine, 4);
        }
        engine.update(&Update::new(0.1), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        near(value(&w), 2.0 - 0.1 * 12.0 * step);
    }
    train(&engine, 4);
    engine.zero_grad().unwrap();
    train(&engine, 4);
    engine.synchronize().unwrap();
    let grads = engine.gradients().unwrap();
    assert_eq!(grads[0].0, "0.w");
    assert_eq!(grads[0].1.as_ref().unwrap().item().unwrap(), 4.0);
}

/// At lag 1 a step returns at once, and the next call is over before its function is.
#[test]
fn a_step_at_lag_one_runs_beside_the_next_call() {
    let (model, w) = scale(DType::F32, 2.0);
    let engine = engine(model, 1);
    train(&engine, 2);
    let (open, gate) = channel::<()>();
    let step = engine.step(
        move |params| {
            gate.recv_timeout(Duration::from_secs(60)).unwrap();
            params.iter_mut().for_each(|param| param.value.fill(10.0));
            Ok(())
        },
        Lag::One,
    );
    let step = step.unwrap();
    assert_eq!(train(&engine, 2), 4.0, "the weights of the step before");
    open.send(()).unwrap();
    step.wait().unwrap();
    engine.step(|_| Ok(()), Lag::One).unwrap();
    assert_eq!(train(&engine, 2), 20.0, "one step behind");
    engine.synchronize().unwrap();
    assert_eq!(value(&w), 10.0);
}

/// At lag 0 a step waits for its function, and the next call reads the newest weights.
#[test]
fn a_step_at_lag_zero_is_over_when_it_returns() {
    let engine = engine(scale(DType::F32, 2.0).0, 1);
    train(&engine, 2);
    let done = Arc::new(AtomicBool::new(false));
    let mark = done.clone();
    let step = engine.step(
        move |params| {
            params.iter_mut().for_each(|param| param.value.fill(10.0));
            mark.store(true, Ordering::Release);
            Ok(())
        },
        Lag::Zero,
    );
    step.unwrap();
    assert!(done.load(Ordering::Acquire));
    assert_eq!(train(&engine, 2), 20.0);
}

/// After `synchronize` evaluation and training read the newest weights.
#[test]
fn synchronize_shows_the_newest_weights() {
    for evaluates in [true, false] {
        let (model, w) = scale(DType::F32, 2.0);
        let engine = engine(model, 1);
        train(&engine, 2);
        let fill = engine.step(
            |params| {
                params.iter_mut().for_each(|param| param.value.fill(10.0));
                Ok(())
            },
            Lag::One,
        );
        fill.unwrap();
        engine.synchronize().unwrap();
        assert_eq!(value(&w), 10.0);
        if evaluates {
            let config = RunConfig::new().requires_grad(false);
            let forward = engine.forward(ones(2), &config).unwrap();
            let output = forward.output().unwrap().clone().tensor().unwrap();
            assert_eq!(output.to_vec::<f32>().unwrap(), [10.0, 10.0]);
        } else {
            assert_eq!(train(&engine, 2), 20.0);
        }
    }
}

/// A parameter frozen after build is left alone by the next steps.
#[test]
fn a_parameter_may_be_frozen_in_a_run() {
    let (model, a, b) = two();
    let engine = engine(model, 1);
    a.set_trainable(false);
    train(&engine, 1);
    engine.update(&Update::new(0.1), Lag::Zero).unwrap();
    engine.synchronize().unwrap();
    near(value(&a), 2.0);
    near(value(&b), 2.8);
}

/// Two learning rates, by groups and by a step function.
#[test]
fn groups_and_functions_have_rates_of_their_own() {
    for by_groups in [true, false] {
        let (model, a, b) = two();
        let engine = engine(model, 1);
        train(&engine, 1);
        if by_groups {
            let slow = ParamGroup::matching("b.*").lr_factor(0.1);
            engine.set_groups([slow]).unwrap();
            engine.update(&Update::new(0.1), Lag::Zero).unwrap();
        } else {
            let step = engine.step(
                |params| {
                    for param in params.iter_mut() {
                        let lr = if param.name.starts_with("a.") {
                            0.1
                        } else {
                            0.01
                        };
                        let grad = param.grad_f32().unwrap_or_default();
                        let pairs = param.value.iter_mut().zip(grad);
                        pairs.for_each(|(value, grad)| *value -= lr * grad);
                    }
                    Ok(())
                },
                Lag::Zero,
            );
            step.unwrap();
        }
        engine.synchronize().unwrap();
        near(value(&a), 1.7);
        near(value(&b), 2.98);
    }
}

/// A step function may keep state of its own, at lag 1 too.
#[test]
fn a_step_function_may_keep_state() {
    let (model, a, _) = two();
    let engine = engine(model, 1);
    let state: Arc<Mutex<HashMap<String, Vec<f32>>>> = Arc::default();
    for _ in 0..3 {
        train(&engine, 1);
        let state = state.clone();
        let lion = engine.step(
            move |params| {
                let mut state = state.lock().unwrap();
                for param in params.iter_mut() {
                    let grad = param.grad_f32().unwrap_or_default();
                    let moment = state.entry(param.name.to_owned()).or_default();
                    moment.resize(grad.len(), 0.0);
                    for ((value, grad), moment) in param.value.iter_mut().zip(grad).zip(moment) {
                        *value -= 0.1 * (0.9 * *moment + 0.1 * grad).signum();
                        *moment = 0.99 * *moment + 0.01 * grad;
                    }
                }
                Ok(())
            },
            Lag::One,
        );
        lion.unwrap();
    }
    engine.synchronize().unwrap();
    near(value(&a), 1.7);
    assert_eq!(state.lock().unwrap().len(), 2);
}

/// Gradients are clipped to a norm, at either lag, and the report has the norm before.
#[test]
fn clipping_by_norm_is_reported() {
    for lag in [Lag::Zero, Lag::One] {
        let (model, w) = scale(DType::F32, 2.0);
        let engine = engine(model, 1);
        train(&engine, 10);
        let clip = Update {
            clip: Some(1.0),
            ..Update::new(1.0)
        };
        let report = engine.update(&clip, lag).unwrap().wait().unwrap();
        engine.synchronize().unwrap();
        near(report.grad_norm, 10.0);
        near(value(&w), 1.0);
    }
}

#[test]
fn the_scaler_starts_as_published() {
    let state = GradScaler::default().state();
    let have = (state.scale, state.growth, state.backoff, state.interval);
    assert_eq!(have, (65536.0, 2.0, 0.5, 2000));
    assert!(state.enabled);
    assert_eq!(GradScaler::disabled().scale_factor(), 1.0);
}

/// A step whose scaled gradients overflow is skipped and halves the scale, at lag 1 too.
#[test]
fn an_overflow_is_skipped_at_both_lags() {
    for lag in [Lag::Zero, Lag::One] {
        let (model, w) = scale(DType::F16, 2.0);
        let engine = engine(model, 1);
        let scaler = GradScaler::default();
        let loss = |cx: &mut Cx, output: Tree, _: Tree| {
            let wide = cx.cast(&output.tensor()?, DType::F32)?;
            let sum = cx.sum_all(&wide)?;
            cx.mul_scalar(&sum, 1e6)
        };
        let loss = engine.scaled_loss(&scaler, loss).unwrap();
        let x = HostTensor::from_f64s(&[1.0, 1.0], DType::F16, &[2, 1]).unwrap();
        engine.forward_backward(x, Tree::None, loss).unwrap();
        let step = engine.update_scaled(&Update::new(0.1), &scaler, lag);
        assert!(step.unwrap().wait().unwrap().skipped);
        engine.synchronize().unwrap();
        assert_eq!((scaler.scale_factor(), value(&w)), (32768.0, 2.0));
    }
}

/// With a fixed number of microbatches 1, 2, 4 and 8 workers have the same bits, at both lags.
#[test]
fn one_to_eight_workers_have_the_same_bits() {
    let squares = |cx: &mut Cx, output: Tree, _: Tree| {
        let output = output.tensor()?;
        let squares = cx.mul(&output, &output)?;
        cx.sum_all(&squares)
    };
    let run = |workers: usize, lag: Lag| {
        let model = mlp(DType::BF16);
        let engine = builder(model.clone(), workers)
            .optimizer(AdamW::default())
            .run_config(RunConfig::new().num_microbatch(9))
            .build()
            .unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            let values: Vec<f64> = (0..27 * 4)
                .map(|i| ((i * 5 + step) % 13) as f64 / 13.0 - 0.5)
                .collect();
            let x = HostTensor::from_f64s(&values, DType::BF16, &[27, 4]).unwrap();
            let loss = engine.forward_backward(x, Tree::None, squares).unwrap();
            losses.push(loss.total().to_bits());
            engine.update(&Update::new(1e-2), lag).unwrap();
        }
        engine.synchronize().unwrap();
        let named = model.named_params().into_iter();
        let weights: Vec<Vec<bf16>> = named.map(|(_, p)| p.to_vec().unwrap()).collect();
        (losses, weights)
    };
    for lag in [Lag::Zero, Lag::One] {
        let want = run(1, lag);
        for workers in [2, 4, 8] {
            assert!(run(workers, lag) == want, "{workers} workers, {lag:?}");
        }
    }
}
