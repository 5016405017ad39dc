//! A `GradScaler` inside step functions: the bits of the rule with a scaler, at both lags.

use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, Cx, DType, Error, GradScaler, Lag, OptimParams, Result, RingOptions, RoundPipe,
    RunConfig, ScalerState, StepReport, TensorResult, Tree, Update,
};

use crate::models;

const STEPS: u64 = 8;

/// Steps whose gradients overflow.
const BAD: [u64; 2] = [2, 5];

fn engine(model: &roundpipe::Sequential, workers: usize) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(Sgd::default())
        .optimizer_threads(1)
        .seed(models::SEED)
        .run_config(RunConfig::default().num_microbatch(3))
        .devices(models::cpus(workers))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

fn scaler() -> GradScaler {
    GradScaler::new(ScalerState {
        scale: 1024.0,
        interval: 2,
        ..ScalerState::default()
    })
    .unwrap()
}

fn loss(cx: &mut Cx, output: Tree, weights: Tree) -> TensorResult<Vec<roundpipe::Tensor>> {
    Ok(vec![models::weighted(cx, output, weights)?])
}

/// A call whose losses are scaled; those of a bad step are infinite.
fn train(engine: &RoundPipe, scaler: &GradScaler, step: u64) {
    let (x, weights) = models::numbers(step, 6, DType::F16);
    let scaled = engine.scaled_loss(scaler, loss).unwrap();
    let factor = if BAD.contains(&step) {
        f64::INFINITY
    } else {
        1.0
    };
    let loss = move |cx: &mut Cx, output: Tree, labels: Tree| {
        let losses = scaled(cx, output, labels)?;
        let factor = cx.full(DType::F32, &[], factor)?;
        losses
            .iter()
            .map(|loss| cx.mul(loss, &factor))
            .collect::<TensorResult<Vec<_>>>()
    };
    engine.forward_backward(x, weights, loss).unwrap();
}

/// Plain gradient descent, as the rule of the engine does it.
fn descend(params: &mut OptimParams<'_>) -> Result<()> {
    for param in params.iter_mut() {
        let Some(grad) = param.grad_f32() else {
            continue;
        };
        for (value, grad) in param.value.iter_mut().zip(grad) {
            *value -= 0.05 * grad;
        }
    }
    Ok(())
}

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Rule,
    Step,
    UnscaleThenStep,
    UnscaleThenSkip,
}

/// Scales, whether steps were skipped, and the weights in the end.
type Trail = (Vec<f64>, Vec<(u64, bool)>, Vec<(String, Vec<u64>)>);

fn run(way: Way, workers: usize, lag: Lag) -> Trail {
    let model = models::perceptron(DType::F16);
    let engine = engine(&model, workers);
    let scaler = scaler();
    let (mut scales, mut handles) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        scales.push(engine.loss_scale(&scaler).unwrap());
        train(&engine, &scaler, step);
        let inside = scaler.clone();
        let step_fn = move |params: &mut OptimParams<'_>| match way {
            Way::UnscaleThenSkip => {
                if inside.unscale(params)? {
                    return descend(params);
                }
                // What was changed before is taken back.
                params.iter_mut().for_each(|param| param.value.fill(1.0));
                params.skip();
                Ok(())
            }
            _ => {
                if way == Way::UnscaleThenStep {
                    inside.unscale(params)?;
                }
                inside.step(params, descend).map(drop)
            }
        };
        handles.push(match way {
            Way::Rule => engine
                .update_scaled(&Update::new(0.05), &scaler, lag)
                .unwrap(),
            _ => engine.step(step_fn, lag).unwrap(),
        });
    }
    engine.synchronize().unwrap();
    scales.push(scaler.scale_factor());
    let report = |report: StepReport| (report.step, report.skipped);
    let reports = handles
        .iter()
        .map(|step| report(step.wait().unwrap()))
        .collect();
    (scales, reports, models::params(&model))
}

/// Unscaling, skipping and the scale of every version are those of `update_scaled`, to the bit.
#[test]
fn a_step_function_with_a_scaler_equals_the_rule_with_it() {
    for lag in [Lag::Zero, Lag::One] {
        let want = run(Way::Rule, 1, lag);
        let skipped: Vec<u64> = (0..STEPS).filter(|step| want.1[*step as usize].1).collect();
        assert_eq!(skipped, BAD, "{lag:?}");
        for way in [Way::Step, Way::UnscaleThenStep, Way::UnscaleThenSkip] {
            for workers in [1, 3] {
                assert_eq!(run(way, workers, lag), want, "{way:?}, {workers}, {lag:?}");
            }
        }
    }
}

/// Steps without the scaler in between move no scale, and the next call still has one.
#[test]
fn steps_may_leave_the_scaler_out() {
    for lag in [Lag::Zero, Lag::One] {
        let model = models::perceptron(DType::F16);
        let engine = engine(&model, 1);
        let scaler = scaler();
        let mut scales = Vec::new();
        for step in 0..STEPS {
            scales.push(engine.loss_scale(&scaler).unwrap());
            train(&engine, &scaler, if step == 6 { BAD[0] } else { 0 });
            match step % 3 {
                0 => engine
                    .update_scaled(&Update::new(0.0), &scaler, lag)
                    .unwrap(),
                1 => engine.skip_step(lag).unwrap(),
                _ => engine.step(|_| Ok(()), lag).unwrap(),
            };
        }
        engine.synchronize().unwrap();
        scales.push(engine.loss_scale(&scaler).unwrap());
        // Steps 0 and 3 are good and the scale grows; step 6 is not finite.
        let mut want = vec![1024.0; 4];
        want.extend([2048.0; 3]);
        want.extend([1024.0; 2]);
        if lag == Lag::One {
            // A call reads the scale of the version that it reads.
            want.insert(0, 1024.0);
            want.truncate(STEPS as usize);
            want.push(1024.0);
        }
        assert_eq!(scales, want, "{lag:?}");
    }
}

/// A step that fails leaves the scale as it was; what makes no sense is refused.
#[test]
fn a_failed_step_moves_no_scale() {
    let model = models::perceptron(DType::F16);
    let engine = engine(&model, 1);
    let scaler = scaler();
    let before = scaler.state();
    let fail = |step_fn: fn(&GradScaler, &mut OptimParams<'_>) -> Result<()>| {
        train(&engine, &scaler, 0);
        let inside = scaler.clone();
        let failed = engine.step(move |params| step_fn(&inside, params), Lag::Zero);
        failed.unwrap_err().to_string()
    };
    let error = fail(|scaler, params| {
        scaler.unscale(params)?;
        Err(Error::Cancelled {
            why: "enough".to_owned(),
        })
    });
    assert!(error.contains("enough"), "{error}");
    let error = fail(|scaler, params| {
        scaler.unscale(params)?;
        scaler.unscale(params).map(drop)
    });
    assert!(error.contains("unscaled already"), "{error}");
    let error = fail(|scaler, params| {
        scaler.step(params, |params| {
            params
                .iter_mut()
                .for_each(|param| param.value.fill(f32::NAN));
            Ok(())
        })?;
        Ok(())
    });
    assert!(error.contains("not finite"), "{error}");
    assert_eq!(scaler.state(), before);
    assert_eq!(engine.loss_scale(&scaler).unwrap(), 1024.0);
    // A scaler that is off changes nothing and looks at nothing.
    train(&engine, &GradScaler::disabled(), BAD[0]);
    let off = |params: &mut OptimParams<'_>| {
        assert!(GradScaler::disabled().unscale(params)?);
        Ok(())
    };
    engine.step(off, Lag::Zero).unwrap();
}

/// A function may run without gradients, as an average of weights does; the rule may not.
#[test]
fn a_step_function_needs_no_gradients() {
    for lag in [Lag::Zero, Lag::One] {
        let model = models::perceptron(DType::F32);
        let engine = engine(&model, 2);
        let before = models::params(&model);
        let double = |params: &mut OptimParams<'_>| {
            for param in params.iter_mut() {
                assert!(param.grad.is_none());
                param.value.iter_mut().for_each(|x| *x *= 2.0);
            }
            Ok(())
        };
        engine.step(double, lag).unwrap();
        engine.step(double, lag).unwrap();
        engine.synchronize().unwrap();
        let times_four = |bits: &u64| (4.0 * f64::from_bits(*bits)).to_bits();
        let want: Vec<(String, Vec<u64>)> = before
            .iter()
            .map(|(name, bits)| (name.clone(), bits.iter().map(times_four).collect()))
            .collect();
        assert_eq!(models::params(&model), want, "{lag:?}");
        let refused = engine.update(&Update::new(0.1), lag).unwrap_err();
        assert!(refused.to_string().contains("no gradients"), "{refused}");
    }
}

/// Gradients can be dropped at any time, whether there are any or not.
#[test]
fn gradients_can_be_dropped() {
    let model = models::perceptron(DType::F32);
    let engine = engine(&model, 1);
    let call = |step: u64| {
        let (x, weights) = models::numbers(step, 6, DType::F32);
        engine.forward_backward(x, weights, loss).unwrap();
    };
    let read = || -> Vec<Option<Vec<f64>>> {
        engine.synchronize().unwrap();
        let grads = engine.gradients().unwrap();
        grads
            .into_iter()
            .map(|(_, grad)| grad.map(|grad| grad.to_f64_vec().unwrap()))
            .collect()
    };
    engine.zero_grad().unwrap();
    let before = models::params(&model);
    call(1);
    let once = read();
    call(0);
    engine.zero_grad().unwrap();
    assert!(read().iter().all(Option::is_none));
    engine.zero_grad().unwrap();
    call(1);
    assert_eq!(read(), once);
    assert_eq!(models::params(&model), before);
    assert!(engine.update(&Update::new(0.1), Lag::Zero).is_ok());
    engine.synchronize().unwrap();
    assert_eq!(engine.nonfinite_steps(), 0, "dropped, not skipped");
    assert_eq!(engine.take_warnings(), Vec::<String>::new());
}
