//! The examples do what they say, with the sizes they print.

#[path = "../examples/chained.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod chained;
#[path = "../examples/custom_loss.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod custom_loss;
#[path = "../examples/own_layer.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod own_layer;
#[path = "../examples/resnet.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod resnet;
#[path = "../examples/save_cost.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod save_cost;
#[path = "../examples/training_loop.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod training_loop;

/// The README's claim: one script, any number of workers, the same losses to the last bit.
#[test]
fn the_training_loop_learns_the_same_on_any_number_of_workers() {
    let one = training_loop::run(1, 60).unwrap();
    assert!(one[0] > 1.0 && one[59] < 0.5 * one[0], "{one:?}");
    for workers in [2, 3, 8] {
        assert_eq!(
            one,
            training_loop::run(workers, 60).unwrap(),
            "on {workers} workers"
        );
    }
}

#[test]
fn the_resnet_tells_unseen_images() {
    let (losses, accuracy) = resnet::run(40).unwrap();
    assert!(accuracy > 0.9, "{accuracy}; {losses:?}");
}

#[test]
fn chained_models_learn_as_one_model_does() {
    let (two, one) = chained::run(3, 100).unwrap();
    assert_eq!(two, one);
    assert!(one[99] < 0.2 * one[0], "{one:?}");
}

#[test]
fn a_loss_with_two_terms_finds_the_noise() {
    let learned = custom_loss::run(1000).unwrap();
    let [left, right] = learned.noise;
    assert!(
        (0.07..0.14).contains(&left) && (0.3..0.5).contains(&right),
        "{left} {right}"
    );
    let (first, last) = (learned.terms[0], learned.terms[999]);
    assert!(last[0] < first[0] && last.iter().chain(&first).all(|term| term.is_finite()));
}

#[test]
fn signs_learn_exclusive_or() {
    let answers = own_layer::run(300).unwrap();
    for (want, have) in [0.0, 1.0, 1.0, 0.0].iter().zip(&answers) {
        assert!((want - have).abs() < 0.2, "{answers:?}");
    }
}

/// The cost of saves is measured on checkpoints that are as large as they say.
#[test]
fn the_cost_of_saves_is_measured() {
    let dir = std::env::temp_dir().join(format!("roundpipe-save-cost-{}", std::process::id()));
    let mut settings = save_cost::Settings {
        bytes: 1 << 20,
        width: 64,
        rows: 4,
        steps: 2,
        rounds: 2,
        lag: roundpipe::Lag::One,
        dir: dir.clone(),
    };
    for (lag, bytes) in [(roundpipe::Lag::One, 14), (roundpipe::Lag::Zero, 12)] {
        settings.lag = lag;
        let mut rounds = 0;
        save_cost::run(&settings, &mut |round| {
            let stored = (settings.bytes.div_ceil(12 * 4096)) * bytes * 4096;
            assert!(round.saved_bytes >= stored, "{} bytes", round.saved_bytes);
            assert!(round.with_seconds > 0.0 && round.without_seconds > 0.0);
            rounds += 1;
        })
        .unwrap();
        assert_eq!(rounds, 2);
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
