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
