//! Weights that stay on a worker see every write of the user, however many there were: the numbers of
//! writes that they are compared by must not repeat.

use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, DType, Device, ExecutePlan, HostTensor, Lag, Param, Params, PlanKind, RoundPipe, Rule,
    RunConfig, Sequential, TensorError, Update,
};

use crate::api::sims;
use crate::models;

const WIDTH: usize = 4;
const LAYERS: usize = 8;

fn maps() -> Sequential {
    let mut init = Init::new(5, DType::F32);
    let mut model = Sequential::new();
    for _ in 0..LAYERS {
        model = model.with(Linear::new(&mut init, WIDTH, WIDTH, true).unwrap());
    }
    model
}

fn x() -> HostTensor {
    HostTensor::from_slice(&[0.5f32; 2 * WIDTH], &[2, WIDTH]).unwrap()
}

fn fill(param: &Param, value: f32) {
    let home = param.data();
    let mut bytes = loop {
        match home.write(0..home.len()) {
            Ok(bytes) => break bytes,
            Err(TensorError::Busy { .. }) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    bytes.as_mut_slice::<f32>().fill(value);
}

/// A reader whose weights stay says what they are after every write.
#[test]
fn every_write_is_seen_by_weights_that_stay_from_call_to_call() {
    let model = maps();
    let reader = |devices: Vec<Arc<dyn Device>>, resident| {
        let engine = RoundPipe::builder(model.clone())
            .devices(devices)
            .memory(Bytes::mib(8))
            .inference(true)
            .resident(resident)
            .build()
            .unwrap();
        engine.set_training(false);
        engine
    };
    let (resident, plain) = (reader(sims(3, 1).1, true), reader(models::cpus(1), false));
    let config = RunConfig::default().requires_grad(false);
    let says = |engine: &RoundPipe| {
        let forward = engine.forward(x(), &config).unwrap();
        let output = forward.output().unwrap().clone().tensor().unwrap();
        models::f64_bits(output.to_f64_vec().unwrap())
    };
    let params = model.named_params();
    // Biases are made zero, once.
    for (name, param) in &params {
        if name.ends_with("bias") {
            fill(param, 0.0);
        }
    }
    let mut stale = Vec::new();
    for layer in 0..LAYERS {
        for round in 0..40 {
            for (_, param) in &params[2 * layer..2 * layer + 2] {
                fill(param, 0.1 + (layer * 40 + round) as f32 / 4096.0);
            }
            if says(&resident) != says(&plain) {
                stale.push((layer, round));
            }
        }
    }
    assert_eq!(stale, []);
}

/// What is written between a forward and its backward reaches the backward.
#[test]
fn every_write_is_seen_by_weights_that_wait_for_their_backward() {
    let run = |devices: Vec<Arc<dyn Device>>| {
        let model = maps();
        let engine = RoundPipe::builder(model.clone())
            .optimizer(Rule::Sgd(Sgd::default()))
            .optimizer_threads(1)
            .devices(devices)
            .memory(Bytes::mib(8))
            .build()
            .unwrap();
        let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2, 6], &[4, 4]);
        let config = RunConfig::new().execute_plan(plan).num_microbatch(1);
        let params = model.named_params();
        for (name, param) in &params {
            if name.ends_with("bias") {
                fill(param, 0.0);
            }
        }
        let mut grads = Vec::new();
        for round in 0..40 {
            let forward = engine.forward(x(), &config).unwrap();
            let _ = forward.output().unwrap();
            for (_, param) in &params {
                fill(param, 0.1 + round as f32 / 256.0);
            }
            let seed = HostTensor::from_slice(&[0.25f32; 2 * WIDTH], &[2, WIDTH]).unwrap();
            forward.backward(seed).unwrap();
            engine.update(&Update::new(0.01), Lag::Zero).unwrap();
            engine.synchronize().unwrap();
            grads.push(models::params(&model));
        }
        (grads, engine.kept_weights())
    };
    let (plain, _) = run(models::cpus(1));
    let (here, kept) = run(sims(3, 1).1);
    assert!(!kept.is_empty());
    let differ: Vec<usize> = (0..plain.len()).filter(|i| plain[*i] != here[*i]).collect();
    assert_eq!(differ, Vec::<usize>::new());
}
