//! Updates whose weights come first and whose moments come later: the same bits of both.

use roundpipe::engine::Builder;
use roundpipe::optim::{Adam, AdamW, MomentType, Rule, Sgd};
use roundpipe::trace::Category;
use roundpipe::{DType, Grain, Lag, ParamGroup, RoundPipe, Sequential, TrainingState, Update};

use crate::api::sims;
use crate::checkpoints::Folder;
use crate::early_rows::{STEPS, builder, clipped, config, eventful, model, train, train_all};
use crate::models;
use crate::state::same_state;

type Settings = fn(Builder<Sequential>) -> Builder<Sequential>;

const FORWARD: [usize; 2] = [2, 2];

/// Spans of moments that came behind their weights.
fn late_moments(engine: &RoundPipe) -> usize {
    let spans = engine.trace().spans().into_iter();
    let late = spans
        .filter(|span| span.category == Category::Optimizer && span.name.ends_with(" moments"));
    late.count()
}

/// Trains on a processor in one pass.
fn plain(dtype: DType, tied: bool, with: Settings) -> (Vec<u64>, TrainingState) {
    let engine = with(builder(&model(dtype, tied), models::cpus(1)));
    let engine = engine.weights_first(false).build().unwrap();
    engine.trace().on();
    let losses = train_all(&engine, &FORWARD, Grain::Stage);
    assert_eq!(late_moments(&engine), 0);
    (losses, engine.training_state().unwrap())
}

/// Rules, types of moments and of gradients, tables tied and not, one and two slabs, groups, one
/// worker and two: weights, masters and moments are those of one pass.
#[test]
fn moments_that_come_later_change_no_bit() {
    let l2: Settings = |b| {
        b.optimizer(Rule::Adam(Adam {
            weight_decay: 0.1,
            ..Adam::default()
        }))
    };
    let adam: Settings = |b| b.optimizer(Rule::Adam(Adam::default()));
    let sgd: Settings = |b| {
        b.optimizer(Rule::Sgd(Sgd {
            momentum: 0.9,
            ..Sgd::default()
        }))
    };
    let groups: Settings = |b| {
        b.groups([
            ParamGroup::matching("1.*").frozen(true),
            ParamGroup::matching("2.*").lr_factor(0.5),
        ])
    };
    // Whether moments can come later, and of how many of the five layers.
    let cases: [(&str, DType, usize, Settings); 10] = [
        ("adamw", DType::BF16, 5, |b| b),
        ("adam", DType::BF16, 5, adam),
        ("bf16 moments", DType::BF16, 5, |b| {
            b.moments(MomentType::Bf16)
        }),
        ("two slabs", DType::BF16, 5, |b| b.max_lag(Lag::One)),
        ("f32 gradients", DType::BF16, 5, |b| {
            b.grad_dtype(DType::F32)
        }),
        ("groups", DType::BF16, 4, groups),
        ("8-bit moments", DType::BF16, 5, |b| {
            b.moments(MomentType::Bits8)
        }),
        ("an L2 penalty", DType::BF16, 0, l2),
        ("sgd", DType::BF16, 0, sgd),
        ("f32", DType::F32, 0, |b| b),
    ];
    for (name, dtype, late, with) in cases {
        for tied in [false, true] {
            let (losses, state) = plain(dtype, tied, with);
            for workers in [1, 2] {
                let name = format!("{name}, tied {tied}, {workers} workers");
                let (world, devices) = sims(6, workers);
                let engine = with(builder(&model(dtype, tied), devices));
                let engine = engine.weights_first(true).build().unwrap();
                engine.trace().on();
                assert_eq!(train_all(&engine, &FORWARD, Grain::Stage), losses, "{name}");
                let late = late - usize::from(tied && late > 0);
                assert_eq!(late_moments(&engine), late * STEPS as usize, "{name}");
                assert!(
                    same_state(&engine.training_state().unwrap(), &state),
                    "{name}"
                );
                drop(engine);
                assert_eq!(world.races(), [], "{name}");
            }
        }
    }
}

/// Unless the user says so, weights come first once updates were seen to be short beside steps, and
/// never on a processor.
#[test]
fn weights_come_first_where_steps_leave_time() {
    let comes_later = |devices, most: u64| {
        let engine = builder(&model(DType::BF16, true), devices).build().unwrap();
        engine.trace().on();
        (0..most).any(|step| {
            train(&engine, step, config(&FORWARD, Grain::Stage));
            engine.update(&clipped(), Lag::Zero).unwrap();
            // A step is long beside its update. How many it takes depends on nothing else.
            std::thread::sleep(std::time::Duration::from_millis(50));
            late_moments(&engine) > 0
        })
    };
    assert!(comes_later(sims(2, 1).1, 200));
    assert!(!comes_later(models::cpus(1), 6));
}

/// Between such updates come evaluations, failures, functions of the user, steps at lag 1, saves.
#[test]
fn what_comes_between_finds_complete_moments() {
    let with_lag = |builder: Builder<Sequential>| builder.max_lag(Lag::One);
    let run = |weights_first, devices| {
        let engine = with_lag(builder(&model(DType::BF16, true), devices));
        let engine = engine.weights_first(weights_first).build().unwrap();
        (eventful(&engine), engine.training_state().unwrap())
    };
    let (losses, state) = run(false, models::cpus(1));
    for workers in [1, 2] {
        let (world, devices) = sims(3, workers);
        let found = run(true, devices);
        assert_eq!(found.0, losses, "{workers} workers");
        assert!(same_state(&found.1, &state), "{workers} workers");
        assert_eq!(world.races(), [], "{workers} workers");
    }
}

/// A save that is ordered behind a step has the moments of that step, and training goes on from it.
#[test]
fn a_save_has_the_moments_of_its_step() {
    let folder = Folder::new();
    let build = |seed| {
        let engine = builder(&model(DType::BF16, true), sims(seed, 1).1);
        engine.weights_first(true).build().unwrap()
    };
    let step = |engine: &RoundPipe, step| {
        let loss = train(engine, step, config(&FORWARD, Grain::Stage));
        engine.update(&clipped(), Lag::Zero).unwrap();
        loss
    };
    let engine = build(1);
    step(&engine, 0);
    step(&engine, 1);
    let path = folder.path("checkpoint");
    let saving = engine.save(&path, "").unwrap();
    let losses = [step(&engine, 2), step(&engine, 3)];
    saving.wait().unwrap();
    let resumed = build(2);
    resumed.restore(&path).unwrap();
    assert_eq!([step(&resumed, 2), step(&resumed, 3)], losses);
    let [a, b] = [&engine, &resumed].map(|engine| engine.training_state().unwrap());
    assert!(same_state(&a, &b));
}

/// Where elements keep their values because new ones would not be finite, their moments stay, too:
/// where zero is divided by zero, where all weights overflow, and where some do.
#[test]
fn elements_that_keep_their_values_keep_their_moments() {
    let run = |(eps, lr): (f64, f64), weights_first, devices| {
        let rule = Rule::AdamW(AdamW {
            eps,
            weight_decay: 0.0,
            ..AdamW::default()
        });
        let engine = builder(&model(DType::BF16, false), devices).optimizer(rule);
        let engine = engine.weights_first(weights_first).build().unwrap();
        let mut partial = Vec::new();
        for step in 0..4 {
            // Rows that no token names have gradients of zero.
            train(&engine, step, config(&FORWARD, Grain::Stage));
            let report = engine.update(&Update::new(lr), Lag::Zero);
            partial.push(report.unwrap().wait().is_ok_and(|report| report.partial));
        }
        (partial, engine.training_state().unwrap())
    };
    for how in [(0.0, 0.01), (1e-8, 1e300), (1e-8, 3e38)] {
        let (partial, state) = run(how, false, models::cpus(1));
        assert!(partial.contains(&true), "{how:?}");
        for workers in [1, 2] {
            let found = run(how, true, sims(7, workers).1);
            assert_eq!(found.0, partial, "{how:?}, {workers} workers");
            assert!(same_state(&found.1, &state), "{how:?}, {workers} workers");
        }
    }
}
