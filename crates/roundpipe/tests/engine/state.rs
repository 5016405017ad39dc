//! Weights and optimizer state in and out of a living engine.

use roundpipe::nn::{Dropout, Init, Linear};
use roundpipe::optim::{Adafactor, AdamW, Muon, Sgd};
use roundpipe::{
    Bytes, Cx, DType, HostTensor, Lag, ParamGroup, Params, RingOptions, RoundPipe, Rule, RunConfig,
    Sequential, Tensor, TensorError, TensorResult, TrainingState, Tree, Update,
};

use crate::models;

fn model(dtype: DType) -> Sequential {
    let mut init = Init::new(5, dtype);
    Sequential::new()
        .named("a", Linear::new(&mut init, 5, 16, true).unwrap())
        .named("drop", Dropout { p: 0.25 })
        .named("b", Linear::new(&mut init, 16, 3, true).unwrap())
}

fn engine(model: &Sequential, rule: impl Into<Rule>, workers: usize) -> RoundPipe {
    engine_with_state(model, rule, workers, DType::F32)
}

fn engine_with_state(
    model: &Sequential,
    rule: impl Into<Rule>,
    workers: usize,
    optim_dtype: DType,
) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(rule)
        .optim_dtype(optim_dtype)
        .optimizer_threads(1)
        .seed(models::SEED)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(models::cpus(workers))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

/// The losses of some steps.
fn train(engine: &RoundPipe, dtype: DType, steps: std::ops::Range<u64>, lag: Lag) -> Vec<u64> {
    let step = |step| {
        let (x, weights) = models::numbers(step, 6, dtype);
        let losses = engine.forward_backward(x, weights, models::weighted);
        engine.update(&Update::new(0.05), lag).unwrap();
        models::bits(&losses.unwrap())
    };
    steps.map(step).collect()
}

pub fn same_state(a: &TrainingState, b: &TrainingState) -> bool {
    let same = |a: &HostTensor, b: &HostTensor| a.same_bits(b).unwrap();
    let params = a.params.iter().zip(&b.params);
    let mut all = params.map(|((name, a), (other, b))| {
        let mut moments = a.moments.iter().zip(&b.moments);
        name == other
            && a.frozen_steps == b.frozen_steps
            && same(&a.value, &b.value)
            && moments.all(|(a, b)| same(a, b))
    });
    (a.updates, a.calls, a.params.len()) == (b.updates, b.calls, b.params.len())
        && all.all(|same| same)
}

/// A run that goes on in another engine has the bits of one that never stopped, in every type and at
/// both lags, dropout included.
#[test]
fn a_run_goes_on_from_its_state() {
    for dtype in [DType::F32, DType::BF16] {
        for lag in [Lag::Zero, Lag::One] {
            let whole = engine(&model(dtype), AdamW::default(), 1);
            train(&whole, dtype, 0..3, lag);
            // At lag 1 this is a step whose weights the next call reads, as after a resume.
            let state = whole.training_state().unwrap();
            assert_eq!((state.updates, state.calls), (3, 3));
            let want = train(&whole, dtype, 3..6, lag);
            let end = whole.training_state().unwrap();

            let resumed = engine(&model(dtype), AdamW::default(), 2);
            train(&resumed, dtype, 20..21, lag);
            resumed.load_training_state(&state).unwrap();
            assert!(same_state(&resumed.training_state().unwrap(), &state));
            assert_eq!(train(&resumed, dtype, 3..6, lag), want, "{dtype} {lag:?}");
            assert!(same_state(&resumed.training_state().unwrap(), &end));
            assert!(!same_state(&state, &end));
        }
    }
}

/// A failure after a state was loaded goes back to its place in the random stream, not to that of
/// the steps that the engine made before.
#[test]
fn a_failure_goes_back_to_the_place_of_a_loaded_state() {
    let dtype = DType::F32;
    let engine = engine(&model(dtype), AdamW::default(), 1);
    train(&engine, dtype, 0..1, Lag::Zero);
    let state = engine.training_state().unwrap();
    train(&engine, dtype, 1..4, Lag::Zero);
    engine.load_training_state(&state).unwrap();
    let (x, weights) = models::numbers(0, 6, dtype);
    let fails = |_: &mut Cx, _: Tree, _: Tree| -> TensorResult<Tensor> {
        Err(TensorError::invalid("loss", "no loss"))
    };
    assert!(engine.forward_backward(x, weights, fails).is_err());
    assert_eq!(engine.training_state().unwrap().calls, state.calls);
}

/// The same with every rule, whose moments have sizes of their own, and with bf16 state; the number
/// of workers changes no bit of it.
#[test]
fn every_rule_goes_on_from_its_state() {
    let dtype = DType::BF16;
    let rules: [Rule; 3] = [
        Adafactor::default().into(),
        Muon::default().into(),
        AdamW::default().into(),
    ];
    for rule in rules {
        for optim_dtype in [DType::F32, DType::BF16] {
            let what = format!("{rule}, {optim_dtype}");
            let whole = engine_with_state(&model(dtype), rule, 1, optim_dtype);
            train(&whole, dtype, 0..3, Lag::One);
            let state = whole.training_state().unwrap();
            let want = train(&whole, dtype, 3..6, Lag::One);
            let end = whole.training_state().unwrap();
            let resumed = engine_with_state(&model(dtype), rule, 3, optim_dtype);
            resumed.load_training_state(&state).unwrap();
            assert!(
                same_state(&resumed.training_state().unwrap(), &state),
                "{what}"
            );
            assert_eq!(train(&resumed, dtype, 3..6, Lag::One), want, "{what}");
            assert!(
                same_state(&resumed.training_state().unwrap(), &end),
                "{what}"
            );
        }
    }
}

/// Moments are read and set by name, in the sizes and the type that they have.
#[test]
fn moments_have_the_sizes_of_their_rule() {
    let dtype = DType::BF16;
    let sizes = |engine: &RoundPipe, name: &str| -> Vec<Vec<usize>> {
        train(engine, dtype, 0..1, Lag::Zero);
        let state = engine.training_state().unwrap();
        let moments = &state.params[name].moments;
        moments.iter().map(|m| m.dims().to_vec()).collect()
    };
    let factored = engine(&model(dtype), Adafactor::default(), 1);
    assert_eq!(sizes(&factored, "a.weight"), [[16, 1], [1, 5]]);
    assert_eq!(sizes(&factored, "a.bias"), [[16]]);
    let muon = engine(&model(dtype), Muon::default(), 1);
    assert_eq!(sizes(&muon, "a.weight"), [[16, 5]]);
    assert_eq!(sizes(&muon, "a.bias"), [[16], [16]]);
    let narrow = engine_with_state(&model(dtype), AdamW::default(), 1, DType::BF16);
    train(&narrow, dtype, 0..1, Lag::Zero);
    let mut state = narrow.training_state().unwrap();
    let param = state.params.get_mut("a.bias").unwrap();
    assert_eq!(param.moments[1].dtype(), DType::BF16);
    param.moments[1] = HostTensor::from_f64s(&[0.5; 16], DType::BF16, &[16]).unwrap();
    narrow.load_training_state(&state).unwrap();
    assert!(same_state(&narrow.training_state().unwrap(), &state));
    // States of other rules and types are refused.
    let refused = factored.load_training_state(&state).unwrap_err();
    assert!(refused.to_string().contains("a moment of `a."), "{refused}");
    let wide = engine(&model(dtype), AdamW::default(), 1);
    let refused = wide.load_training_state(&state).unwrap_err();
    assert!(refused.to_string().contains("optim_dtype"), "{refused}");
}

/// bf16 state is for bf16 parameters; the types that cannot be are refused when the engine is built.
#[test]
fn the_type_of_the_state_is_checked() {
    let build = |optim_dtype| {
        let builder = RoundPipe::builder(model(DType::F16)).optimizer(AdamW::default());
        let built = builder
            .optim_dtype(optim_dtype)
            .devices(models::cpus(1))
            .build();
        built.map(drop).map_err(|error| error.to_string())
    };
    assert!(build(DType::F16).unwrap_err().contains("use f32"));
    assert!(build(DType::I64).unwrap_err().contains("f32 or bf16"));
    let wide = engine_with_state(&model(DType::F32), AdamW::default(), 1, DType::BF16);
    train(&wide, DType::F32, 0..1, Lag::Zero);
    let mut handles = wide.optim_parameters().unwrap();
    assert!(handles.all(|handle| handle.dtype == DType::F32));
}

/// A parameter that a group froze for a while is corrected for its own updates, also after a resume.
#[test]
fn frozen_steps_are_a_part_of_the_state() {
    let dtype = DType::F32;
    let frozen = [ParamGroup::matching("a.*").frozen(true)];
    let whole = engine(&model(dtype), AdamW::default(), 1);
    whole.set_groups(frozen).unwrap();
    train(&whole, dtype, 0..2, Lag::Zero);
    whole.set_groups([]).unwrap();
    let state = whole.training_state().unwrap();
    let count = |name: &str| state.params[name].frozen_steps;
    assert_eq!((count("a.weight"), count("b.weight")), (2, 0));
    let want = train(&whole, dtype, 2..5, Lag::Zero);
    let resumed = engine(&model(dtype), AdamW::default(), 1);
    resumed.load_training_state(&state).unwrap();
    assert_eq!(train(&resumed, dtype, 2..5, Lag::Zero), want);
}

#[test]
fn a_state_of_something_else_is_refused_and_changes_nothing() {
    let model = model(DType::F32);
    let engine = engine(&model, AdamW::default(), 1);
    train(&engine, DType::F32, 0..2, Lag::Zero);
    let state = engine.training_state().unwrap();
    let refused = |change: &dyn Fn(&mut TrainingState)| {
        let mut other = state.clone();
        change(&mut other);
        let line = engine.load_training_state(&other).unwrap_err().to_string();
        assert!(
            same_state(&engine.training_state().unwrap(), &state),
            "{line}"
        );
        line
    };
    let line = refused(&|state| drop(state.params.remove("a.weight")));
    assert!(line.contains("no parameter `a.weight`"), "{line}");
    let line = refused(&|state| {
        let one = state.params["a.weight"].clone();
        state.params.insert("c.weight".to_owned(), one);
    });
    assert!(line.contains("trains no parameter `c.weight`"), "{line}");
    let line = refused(&|state| drop(state.params.get_mut("b.bias").unwrap().moments.pop()));
    assert!(line.contains("`b.bias` has 1 moments"), "{line}");
    let line = refused(&|state| {
        let wrong = HostTensor::zeros(DType::F32, &[4]).unwrap();
        state.params.get_mut("b.bias").unwrap().value = wrong;
    });
    assert!(line.contains("`b.bias` is [3]"), "{line}");
    // A user who looks at a parameter: nothing is written, not even what is free.
    let mut other = state.clone();
    other.updates = 9;
    other.params.get_mut("a.bias").unwrap().value = HostTensor::zeros(DType::F32, &[16]).unwrap();
    let last = model.named_params().pop().unwrap().1;
    let held = last.data().read_all().unwrap();
    let line = engine.load_training_state(&other).unwrap_err().to_string();
    assert!(line.contains("in use"), "{line}");
    let bias = HostTensor::zeros(DType::F32, &[16]).unwrap();
    let weight = HostTensor::zeros(DType::F32, last.shape().dims()).unwrap();
    let name = model.named_params().pop().unwrap().0;
    let both = [("a.bias".to_owned(), bias), (name, weight)];
    assert!(engine.load_params(both).is_err());
    drop(held);
    assert!(same_state(&engine.training_state().unwrap(), &state));
    let plain = super::state::engine(&super::state::model(DType::F32), Sgd::default(), 1);
    let line = plain.load_training_state(&state).unwrap_err().to_string();
    assert!(line.contains("rule"), "{line}");
}

/// Values by name reach the next call and the optimizer, also in the middle of a run at lag 1; a
/// name or size that is wrong changes nothing.
#[test]
fn parameters_are_loaded_by_name() {
    for dtype in [DType::F32, DType::BF16] {
        let model = model(dtype);
        let engine = engine(&model, Sgd::default(), 1);
        train(&engine, dtype, 0..2, Lag::One);
        let threes = HostTensor::from_f64s(&[3.0; 3], DType::F32, &[3]).unwrap();
        let before = engine.training_state().unwrap();
        let wrong = [("b.bias", threes.clone()), ("b.bios", threes.clone())];
        let line = engine.load_params(wrong).unwrap_err().to_string();
        assert!(line.contains("`b.bios`"), "{line}");
        let line = engine.load_params([("a.bias", threes.clone())]);
        let line = line.unwrap_err().to_string();
        assert!(line.contains("`a.bias` is [16]"), "{line}");
        assert!(same_state(&engine.training_state().unwrap(), &before));

        engine.load_params([("b.bias", threes)]).unwrap();
        let state = engine.training_state().unwrap();
        let value = |state: &TrainingState| state.params["b.bias"].value.to_f64_vec().unwrap();
        assert_eq!(value(&state), [3.0; 3]);
        let bias = model
            .named_params()
            .into_iter()
            .find(|(name, _)| name == "b.bias");
        let bias = bias.unwrap().1;
        let weights = HostTensor::new(bias.data(), bias.dtype(), bias.shape().dims()).unwrap();
        assert_eq!(weights.to_f64_vec().unwrap(), [3.0; 3]);
        train(&engine, dtype, 2..3, Lag::One);
        let moved = value(&engine.training_state().unwrap());
        assert!(
            moved
                .iter()
                .all(|value| (2.0..4.0).contains(value) && *value != 3.0),
            "{moved:?}"
        );
    }
}
