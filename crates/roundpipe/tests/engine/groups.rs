//! Groups of parameters under an engine: given at build, changed between steps.

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, DType, HostTensor, Lag, ParamGroup, RoundPipe, RunConfig, Sequential, Update,
};

use crate::models;

fn model() -> Sequential {
    let mut init = Init::new(7, DType::BF16);
    Sequential::new()
        .named("a", Linear::new(&mut init, 4, 8, true).unwrap())
        .named("b", Linear::new(&mut init, 8, 3, true).unwrap())
}

fn engine(model: &Sequential, groups: Vec<ParamGroup>) -> roundpipe::Result<RoundPipe> {
    RoundPipe::builder(model.clone())
        .optimizer(AdamW::default())
        .groups(groups)
        .optimizer_threads(1)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(models::cpus(2))
        .memory(Bytes::mib(8))
        .build()
}

fn train(engine: &RoundPipe) {
    let x: Vec<f64> = (0..24).map(|i| (f64::from(i) * 0.37).sin()).collect();
    let x = HostTensor::from_f64s(&x, DType::BF16, &[6, 4]).unwrap();
    let y = HostTensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6]).unwrap();
    engine
        .forward_backward(x, y, |cx, output, labels| {
            let logits = cx.cast(&output.tensor()?, DType::F32)?;
            cx.cross_entropy(&logits, &labels.tensor()?, Default::default())
        })
        .unwrap();
}

fn biases() -> ParamGroup {
    ParamGroup::matching("*.bias")
}

/// Groups hold for the updates that are asked for after them, also while an older update is under
/// way.
#[test]
fn groups_change_between_steps() {
    for lag in [Lag::Zero, Lag::One] {
        let run = |given: bool| {
            let model = model();
            let first = biases().lr_factor(30.0);
            let at_build = if given { vec![first.clone()] } else { vec![] };
            let engine = engine(&model, at_build).unwrap();
            if !given {
                engine.set_groups([first]).unwrap();
            }
            train(&engine);
            let step = engine.update(&Update::new(0.01), lag).unwrap();
            engine.set_groups([biases().frozen(true)]).unwrap();
            step.wait().unwrap();
            engine.synchronize().unwrap();
            let once = models::params(&model);
            train(&engine);
            engine.update(&Update::new(0.01), lag).unwrap();
            engine.set_groups([]).unwrap();
            engine.synchronize().unwrap();
            (once, models::params(&model))
        };
        let start = models::params(&model());
        let (once, twice) = run(true);
        for ((before, once), twice) in start.iter().zip(&once).zip(&twice) {
            let name = &before.0;
            assert_ne!(before, once, "{name}, {lag:?}");
            let frozen = name.ends_with("bias");
            assert_eq!(once == twice, frozen, "{name}, {lag:?}");
        }
        assert_eq!(run(false), (once, twice), "{lag:?}");
    }
}

/// `build` says which pattern means nothing, before anything is moved.
#[test]
fn build_refuses_groups_that_mean_nothing() {
    let text = engine(&model(), vec![biases(), ParamGroup::matching("*.bais")])
        .map(drop)
        .unwrap_err()
        .to_string();
    let line = "groups: \"*.bais\" matches no parameter; the first trained one is \"a.weight\"";
    assert_eq!(text, line);
    let text = engine(&model(), vec![biases().weight_decay(f64::NAN)])
        .map(drop)
        .unwrap_err()
        .to_string();
    let line = "groups: \"*.bias\": adam: weight_decay is NaN, it must be finite and at least 0";
    assert_eq!(text, line);
}
