//! Calls that would train nothing, or less than the user means: one line that names the setting and
//! the fix, before any weight changes; and what an error says.

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, Cx, DType, Lag, Module, Param, ParamVisitor, Params, RingOptions, RoundPipe, Rule,
    RunConfig, Sequential, Tensor, TensorResult, Tree, Update,
};

use crate::models;

fn engine(model: &Sequential) -> RoundPipe {
    builder(model).build().unwrap()
}

fn builder(model: &Sequential) -> roundpipe::engine::Builder<Sequential> {
    RoundPipe::builder(model.clone())
        .name("net")
        .optimizer(Rule::Sgd(Sgd::default()))
        .optimizer_threads(1)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(models::cpus(1))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        })
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    Linear::new(&mut Init::new(3, DType::F32), inputs, outputs, true).unwrap()
}

/// What a training call says, and that the engine trains afterwards as if it had not been made.
fn refused(engine: &RoundPipe, loss: fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor>) -> String {
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let error = engine.forward_backward(x, weights, loss);
    error.expect_err("it trains nothing").to_string()
}

fn trains(engine: &RoundPipe) {
    let (x, weights) = models::numbers(1, 4, DType::F32);
    engine
        .forward_backward(x, weights, models::weighted)
        .unwrap();
    engine.update(&Update::new(0.1), Lag::Zero).unwrap();
}

#[track_caller]
fn says(line: &str, words: &[&str]) {
    assert_eq!(line.lines().count(), 1, "{line}");
    for word in words {
        assert!(line.contains(word), "`{line}` lacks `{word}`");
    }
}

#[test]
fn a_model_that_is_frozen_is_not_trained() {
    let model = models::perceptron(DType::F32);
    model.set_trainable(false);
    let engine = engine(&model);
    let line = refused(&engine, models::weighted);
    says(&line, &["requires_grad", "every parameter is frozen"]);
    // A forward is no mistake, but its backward is.
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let forward = engine.forward(x, &RunConfig::new()).unwrap();
    let line = forward.backward(weights).unwrap_err().to_string();
    says(&line, &["backward", "every parameter is frozen"]);
}

#[test]
fn a_loss_that_depends_on_nothing_is_refused() {
    let engine = engine(&models::perceptron(DType::F32));
    let constant = |cx: &mut Cx, _: Tree, _: Tree| cx.full(DType::F32, &[1], 3.0);
    says(
        &refused(&engine, constant),
        &["net: fused stage", "loss_fn", "nothing would be trained"],
    );
    trains(&engine);
}

/// A layer with a weight that it does not show.
struct Forgetful(Linear, Param);

impl Params for Forgetful {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Module for Forgetful {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.0.forward(cx, x)?;
        let scale = cx.get(&self.1)?;
        cx.mul(&y, &scale)
    }
}

#[test]
fn a_parameter_that_visit_forgets_is_found() {
    let scale = Param::full(DType::F32, &[1], 2.0).unwrap();
    let linear = linear(5, 3);
    let all = Sequential::new().named("forgetful", Forgetful(linear, scale.clone()));
    let engine = engine(&all);
    let line = refused(&engine, models::weighted);
    says(
        &line,
        &["layer 0 (forgetful)", "visit", "[1]", "never be updated"],
    );
    // A constant need not be shown.
    scale.set_trainable(false);
    trains(&engine);
}

#[test]
fn a_parameter_made_trainable_after_build_is_refused() {
    let model = models::perceptron(DType::F32);
    let (name, param) = model.named_params().remove(0);
    param.set_trainable(false);
    let engine = engine(&model);
    trains(&engine);
    param.set_trainable(true);
    let line = refused(&engine, models::weighted);
    says(&line, &["parameter", &name, "build the engine again"]);
    param.set_trainable(false);
    trains(&engine);
}

#[test]
fn requires_grad_off_does_not_train() {
    let engine = engine(&models::perceptron(DType::F32));
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let call = engine.train(x).labels(weights).loss(models::weighted);
    let call = call.config(RunConfig::new().requires_grad(false));
    says(
        &call.run().unwrap_err().to_string(),
        &["requires_grad", "forward"],
    );
    trains(&engine);
}

#[test]
fn two_layers_of_one_name_are_refused() {
    let twice = Sequential::new()
        .named("same", linear(5, 4))
        .named("same", linear(4, 3));
    let error = builder(&twice).build().expect_err("two layers of one name");
    says(&error.to_string(), &["model", "`same`"]);
}

/// Lines that name what the user wrote: the label that was left out, the call of `backward`, the
/// types that gradients can have.
#[test]
fn lines_name_what_the_user_wrote() {
    let model = models::perceptron(DType::F32);
    let engine = engine(&model);
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let unlabelled = engine.train(x.clone()).loss(models::weighted).run();
    says(
        &unlabelled.unwrap_err().to_string(),
        &["was a label or an input left out?"],
    );
    let forward = engine.forward(x, &RunConfig::new()).unwrap();
    let cut = weights.narrow(0, 0, 3).unwrap();
    let line = forward.backward(cut).unwrap_err().to_string();
    says(
        &line,
        &["backward: the gradient of outputs", "[4, 3]", "[3, 3]"],
    );
    drop(engine);
    let error = builder(&model).grad_dtype(DType::I64).build();
    let line = error.expect_err("gradients are floats").to_string();
    says(&line, &["grad_dtype", "its gradients are f32, not i64"]);
}

/// `{}` and `{:?}` are the same line with the cause: what `main` prints when it returns an error.
#[test]
fn an_error_is_one_line_with_its_cause() {
    let engine = engine(&models::perceptron(DType::F32));
    let broken = |cx: &mut Cx, output: Tree, _: Tree| {
        let x = output.tensor()?;
        let wrong = cx.full(DType::F32, &[3, 5, 7], 1.0)?;
        cx.add(&x, &wrong)
    };
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let error = engine.forward_backward(x, weights, broken).unwrap_err();
    let line = error.to_string();
    says(
        &line,
        &[
            "net: fused stage",
            "microbatch 0 on cpu:0: add: shapes",
            "[3, 5, 7]",
        ],
    );
    assert_eq!(format!("{error:?}"), line);
    assert!(
        std::error::Error::source(&error).is_none(),
        "the line has it all"
    );
}
