//! Bad data of one call, an index out of range, concerns that call and those that use its values.
//! Simulated workers report it late, as GPUs do.

use std::sync::Arc;

use roundpipe::nn::{Dropout, Embedding, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cx, DType, Device, Error, HostTensor, Lag, MergeOutput, Ring, RingOptions, RoundPipe,
    Rule, RunConfig, Sequential, TensorResult, Tree, Update,
};
use roundpipe_tensor::SimWorld;

use crate::models;
use crate::simulation::chain;

fn model() -> Sequential {
    let mut init = Init::new(7, DType::F32);
    Sequential::new()
        .named("a", Linear::new(&mut init, 4, 8, true).unwrap())
        .named("drop", Dropout { p: 0.2 })
        .named("b", Linear::new(&mut init, 8, 3, true).unwrap())
}

fn rings() -> Vec<(String, Vec<Arc<dyn Device>>)> {
    let sims = |seed: u64| -> Vec<Arc<dyn Device>> {
        let world = SimWorld::seeded(seed).unwrap();
        world
            .workers(2)
            .into_iter()
            .map(|worker| worker as Arc<dyn Device>)
            .collect()
    };
    let mut rings = vec![
        ("1 cpu".to_owned(), models::cpus(1)),
        ("3 cpus".to_owned(), models::cpus(3)),
    ];
    rings.extend((0..12).map(|seed| (format!("2 sims, seed {seed}"), sims(seed))));
    rings
}

fn ring(devices: &[Arc<dyn Device>]) -> Ring {
    Ring::new(
        devices,
        &RingOptions {
            memory: Some(Bytes::mib(8)),
            ..RingOptions::default()
        },
    )
    .unwrap()
}

fn engine(model: &Sequential, ring: &Ring) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .run_config(RunConfig::default().num_microbatch(3))
        .on_stall(std::time::Duration::from_secs(20), models::show_stall)
        .ring(ring)
        .build()
        .unwrap()
}

fn batch() -> (HostTensor, HostTensor) {
    let x: Vec<f64> = (0..24).map(|i| (f64::from(i) * 0.37).sin()).collect();
    let x = HostTensor::from_f64s(&x, DType::F32, &[6, 4]).unwrap();
    (
        x,
        HostTensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6]).unwrap(),
    )
}

/// Labels of which one is no class.
fn bad_labels() -> HostTensor {
    HostTensor::from_slice(&[0i64, 1, 2, 0, 77, 2], &[6]).unwrap()
}

fn loss(cx: &mut Cx, output: Tree, labels: Tree) -> TensorResult<roundpipe::Tensor> {
    cx.cross_entropy(&output.tensor()?, &labels.tensor()?, Default::default())
}

/// Trains on labels that are wrong; the error names the place and the index, and nothing else is
/// said of it.
fn fail(engine: &RoundPipe) {
    let failed = engine.forward_backward(batch().0, bad_labels(), loss);
    let text = chain(&failed.map(|losses| losses.total()).unwrap_err());
    assert!(
        text.contains("stage") && text.contains("index 77"),
        "{text}"
    );
    assert!(!text.contains("did not happen"), "{text}");
    engine.synchronize().unwrap();
}

/// A step that was asked for before the wrong labels came stands, with its bits.
#[test]
fn wrong_labels_undo_no_step_before_them() {
    let (x, y) = batch();
    for (name, devices) in rings() {
        for fails in [false, true] {
            let model = model();
            let engine = engine(&model, &ring(&devices));
            engine.forward_backward(x.clone(), y.clone(), loss).unwrap();
            let kept = engine.forward(x.clone(), &RunConfig::default()).unwrap();
            engine.update(&Update::new(0.01), Lag::One).unwrap();
            if fails {
                fail(&engine);
            }
            engine.synchronize().unwrap();
            assert_eq!(engine.steps(), 1, "{name}");
            static WANT: std::sync::OnceLock<Vec<(String, Vec<u64>)>> = std::sync::OnceLock::new();
            let params = models::params(&model);
            assert_eq!(
                WANT.get_or_init(|| params.clone()),
                &params,
                "{name}, fails {fails}"
            );
            drop(kept);
        }
    }
}

/// Calls after the failed one draw the random numbers that they would have drawn without it: not
/// those of an earlier step again, also when a forward from before the step is kept.
#[test]
fn the_random_stream_goes_on_behind_the_last_step() {
    let (x, y) = batch();
    let mut want = None;
    for (name, devices) in rings() {
        for fails in [false, true] {
            let engine = engine(&model(), &ring(&devices));
            engine.forward_backward(x.clone(), y.clone(), loss).unwrap();
            let kept = engine.forward(x.clone(), &RunConfig::default()).unwrap();
            engine.update(&Update::new(0.01), Lag::One).unwrap();
            engine.synchronize().unwrap();
            if fails {
                fail(&engine);
            }
            let got = models::bits(&engine.forward_backward(x.clone(), y.clone(), loss).unwrap());
            assert_eq!(*want.get_or_insert(got), got, "{name}, fails {fails}");
            drop(kept);
        }
    }
}

/// A forward that is kept over the failure of a later call has its backward, with the same
/// gradients.
#[test]
fn a_kept_forward_outlives_the_failure_of_a_later_call() {
    let (x, _) = batch();
    let seed = HostTensor::from_f64s(&[0.25; 18], DType::F32, &[6, 3]).unwrap();
    let mut want = None;
    for (name, devices) in rings() {
        for fails in [false, true] {
            let engine = engine(&model(), &ring(&devices));
            let kept = engine.forward(x.clone(), &RunConfig::default()).unwrap();
            if fails {
                fail(&engine);
            }
            kept.backward(seed.clone()).unwrap();
            engine.synchronize().unwrap();
            let got = models::grads(&engine);
            assert_eq!(
                want.get_or_insert_with(|| got.clone()),
                &got,
                "{name}, fails {fails}"
            );
        }
    }
}

/// Engines that share workers share no failures of data.
#[test]
fn wrong_labels_of_one_engine_are_nothing_to_another() {
    let (x, y) = batch();
    for (name, devices) in rings() {
        let ring = ring(&devices);
        let (good, bad) = (engine(&model(), &ring), engine(&model(), &ring));
        good.forward_backward(x.clone(), y.clone(), loss).unwrap();
        good.update(&Update::new(0.01), Lag::One).unwrap();
        fail(&bad);
        good.forward_backward(x.clone(), y.clone(), loss).unwrap();
        good.synchronize().unwrap();
        assert_eq!(good.steps(), 1, "{name}");
    }
}

/// A call that takes its input from one that failed fails with it, whichever reports first; and an
/// output that is read is never one of bad data.
#[test]
fn calls_that_use_bad_values_fail_with_them() {
    let ids = HostTensor::from_slice(&[0i64, 1, 9, 2, 3, 4], &[6]).unwrap();
    for (name, devices) in rings() {
        let ring = ring(&devices);
        let mut init = Init::new(3, DType::F32);
        let words = Sequential::new().named("words", Embedding::new(&mut init, 5, 4, 0.3).unwrap());
        let (first, second) = (engine(&words, &ring), engine(&model(), &ring));
        let unmerged = RunConfig::default()
            .merge_output(MergeOutput::Off)
            .requires_grad(false);
        let failures: Vec<Error> = (0..3)
            .filter_map(|round| {
                let forward = first.forward(ids.clone(), &unmerged);
                let used = forward.and_then(|forward| {
                    let outputs = forward.unmerged();
                    if round == 0 {
                        return outputs.wait(1).map(drop);
                    }
                    second
                        .forward(outputs, &RunConfig::default().requires_grad(false))
                        .map(drop)
                });
                // Each engine tells its own part.
                let _ = (first.synchronize(), second.synchronize());
                used.err()
            })
            .collect();
        assert_eq!(failures.len(), 3, "{name}");
        for error in failures {
            assert!(
                chain(&error).contains("index 9"),
                "{name}: {}",
                chain(&error)
            );
        }
        let good = HostTensor::from_slice(&[0i64, 1, 2, 2, 3, 4], &[6]).unwrap();
        let forward = first.forward(good, &unmerged).unwrap();
        second
            .forward(forward.unmerged(), &RunConfig::default())
            .unwrap();
    }
}

/// An inference call whose output nobody reads still reports its data, at the latest when the
/// engine is waited for.
#[test]
fn bad_data_is_reported_though_nobody_reads_the_output() {
    for (name, devices) in rings() {
        let mut init = Init::new(3, DType::F32);
        let words = Sequential::new().named("words", Embedding::new(&mut init, 5, 4, 0.3).unwrap());
        let engine = engine(&words, &ring(&devices));
        let ids = HostTensor::from_slice(&[0i64, 1, 9, 2, 3, 4], &[6]).unwrap();
        let unmerged = RunConfig::default()
            .merge_output(MergeOutput::Off)
            .requires_grad(false);
        let told = engine
            .forward(ids, &unmerged)
            .map(drop)
            .and_then(|()| engine.synchronize());
        assert!(chain(&told.unwrap_err()).contains("index 9"), "{name}");
        engine.synchronize().unwrap();
    }
}
