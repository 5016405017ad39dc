//! Weights that stay on a worker see every write of the user, however many there were and in whatever
//! memory: what they are compared by must not repeat.

use std::sync::Arc;

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, DType, Device, ExecutePlan, HostTensor, Lag, Param, Params, PlanKind, RoundPipe, Rule,
    RunConfig, Sequential, TensorError, Update,
};
use roundpipe_tensor::HostBuf;

use crate::api::sims;
use crate::held::squares;
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

/// An engine that reads the model's weights where they are; with `resident`, copies of them stay.
fn reader(model: &Sequential, devices: Vec<Arc<dyn Device>>, resident: bool) -> RoundPipe {
    let engine = RoundPipe::builder(model.clone())
        .devices(devices)
        .memory(Bytes::mib(8))
        .inference(true)
        .resident(resident)
        .build()
        .unwrap();
    engine.set_training(false);
    engine
}

fn says(engine: &RoundPipe) -> Vec<u64> {
    let config = RunConfig::default().requires_grad(false);
    let forward = engine.forward(x(), &config).unwrap();
    let output = forward.output().unwrap().clone().tensor().unwrap();
    models::f64_bits(output.to_f64_vec().unwrap())
}

/// A reader whose weights stay says what they are after every write, and has one copy of them.
#[test]
fn every_write_is_seen_by_weights_that_stay_from_call_to_call() {
    let model = maps();
    let resident = reader(&model, sims(3, 1).1, true);
    let plain = reader(&model, models::cpus(1), false);
    let params = model.named_params();
    // Biases are made zero, once.
    for (name, param) in &params {
        if name.ends_with("bias") {
            fill(param, 0.0);
        }
    }
    let mut stale = Vec::new();
    let mut used = Vec::new();
    for layer in 0..LAYERS {
        for round in 0..40 {
            for (_, param) in &params[2 * layer..2 * layer + 2] {
                fill(param, 0.1 + (layer * 40 + round) as f32 / 4096.0);
            }
            if says(&resident) != says(&plain) {
                stale.push((layer, round));
            }
        }
        used.push(resident.ring().workers()[0].usage().used.0);
    }
    assert_eq!(stale, []);
    // Values of a call may still be there; copies of 280 writes take 70 KiB.
    assert!(used[LAYERS - 1] < used[0] + (16 << 10), "{used:?}");
}

/// It does so when they lie in other memory each time, where all of it was written equally often: the
/// system gives out addresses of memory that is gone.
#[test]
fn new_memory_is_seen_by_weights_that_stay_from_call_to_call() {
    let model = maps();
    let params = model.named_params();
    let resident = reader(&model, sims(3, 1).1, true);
    let plain = reader(&model, models::cpus(1), false);
    let mut stale: Vec<u64> = Vec::new();
    for round in 0..40 {
        for (_, param) in &params {
            // Gone before the next, so that its address is free.
            let between = HostBuf::zeroed("between", param.bytes()).unwrap();
            param.rehome(between).unwrap();
            let home = HostBuf::zeroed("new weights", param.bytes()).unwrap();
            param.rehome(home).unwrap();
            fill(param, 0.1 + round as f32 / 4096.0);
        }
        if says(&resident) != says(&plain) {
            stale.push(round);
        }
    }
    assert_eq!(stale, Vec::<u64>::new());
}

/// And when they are another part of the same memory.
#[test]
fn another_part_of_memory_is_seen_by_weights_that_stay_from_call_to_call() {
    let model = maps();
    let (_, param) = &model.named_params()[0];
    let both = HostBuf::zeroed("two sets of weights", 2 * param.bytes()).unwrap();
    let sets = [0, 1].map(|set| set * param.bytes()..(set + 1) * param.bytes());
    let sets = sets.map(|bytes| both.slice(bytes).unwrap());
    for (set, value) in sets.iter().zip([0.25, 0.5]) {
        param.rehome(set.clone()).unwrap();
        fill(param, value);
    }
    let resident = reader(&model, sims(3, 1).1, true);
    let plain = reader(&model, models::cpus(1), false);
    for round in 0..4 {
        param.rehome(sets[round % 2].clone()).unwrap();
        assert_eq!(says(&resident), says(&plain), "round {round}");
    }
}

/// A reader follows engines that train one after another and take their memory along.
#[test]
fn weights_of_every_trainer_are_seen_by_a_reader() {
    let mut init = Init::new(5, DType::F32);
    let model = Sequential::new().with(Linear::new(&mut init, WIDTH, WIDTH, false).unwrap());
    let train = || {
        let engine = RoundPipe::builder(model.clone())
            .optimizer(Rule::Sgd(Sgd::default()))
            .optimizer_threads(1)
            .devices(models::cpus(1))
            .memory(Bytes::mib(8))
            .build()
            .unwrap();
        engine.train(x()).loss(squares).run().unwrap();
        engine.update(&Update::new(0.1), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        engine
    };
    // While it lives, so that readers leave its weights where they are.
    let first = train();
    let resident = reader(&model, sims(3, 1).1, true);
    let plain = reader(&model, models::cpus(1), false);
    assert_eq!(says(&resident), says(&plain));
    drop(first);
    let mut stale: Vec<u64> = Vec::new();
    for round in 0..50 {
        // The second takes over from the first, and the third may lie where the first was.
        (0..2).for_each(|_| drop(train()));
        if says(&resident) != says(&plain) {
            stale.push(round);
        }
    }
    assert_eq!(stale, Vec::<u64>::new());
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
