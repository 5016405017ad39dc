//! The 51 things that a user may get wrong: each gives one line that names the setting or the place
//! and the fix, or works where it is no mistake; nothing panics or hangs, and the engine trains on.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use roundpipe::nn::{Embedding, Func, Init, Linear};
use roundpipe::optim::{AdamW, Sgd};
use roundpipe::wrap::{Run, Value, Values};
use roundpipe::{
    AutoWrapped, Bytes, Composite, Cx, DType, Devices, Error, GradScaler, HostTensor, Inputs, Lag,
    Module, Node, Param, ParamVisitor, Params, Result, RoundPipe, RunConfig, Sequential, Tensor,
    TensorResult, Tree, Update, WrapConfig, Wrapped, wrap,
};

use crate::kit::{
    Scale, builder, classes, cpus, cross_entropy, mlp, number, ones, ring, rows, sum,
};

/// What a case should come to.
enum Want {
    /// One line that has all of these.
    Line(&'static [&'static str]),
    /// It is no mistake; the case itself checks the result.
    Works,
    /// A line where there is no GPU, no error where there is one.
    LineWithoutGpu(&'static [&'static str]),
}
use Want::{Line, LineWithoutGpu, Works};

/// What is done wrong.
enum Do {
    /// To the engine that all these cases have one like; it must train afterwards.
    Engine(fn(&RoundPipe) -> Result<()>),
    /// To something that the case makes.
    Alone(fn() -> Result<()>),
}
use Do::{Alone, Engine};

struct Case(&'static str, Do, Want);

fn adam() -> RoundPipe {
    let built = builder(mlp(DType::F32), 2).optimizer(AdamW::default());
    built.build().unwrap()
}

fn batch() -> HostTensor {
    rows(6, 4)
}

fn labels() -> HostTensor {
    classes(&[0, 1, 2, 0, 1, 2])
}

fn train(engine: &RoundPipe) -> Result<()> {
    engine
        .forward_backward(batch(), labels(), cross_entropy)
        .map(drop)
}

/// The engine computes and steps as one that nothing went wrong with.
fn works_on(engine: &RoundPipe) {
    train(engine).unwrap();
    let step = engine.update(&Update::new(0.1), Lag::Zero).unwrap();
    assert!(!step.wait().unwrap().skipped);
    engine.synchronize().unwrap();
}

/// Trains and asks for a step.
fn update(engine: &RoundPipe, update: &Update, lag: Lag) -> Result<()> {
    train(engine)?;
    engine.update(update, lag)?.wait().map(drop)
}

fn constant(cx: &mut Cx, _: Tree, _: Tree) -> TensorResult<Tensor> {
    cx.zeros(DType::F32, &[])
}

fn linear(inputs: usize, outputs: usize) -> Arc<Linear> {
    Arc::new(Linear::new(&mut Init::new(1, DType::F32), inputs, outputs, true).unwrap())
}

/// Two layers that the module calls one after the other.
struct Pair {
    up: Arc<Linear>,
    down: Arc<Linear>,
}

impl Params for Pair {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("up", &*self.up);
        visit.child("down", &*self.down);
    }
}

impl Composite for Pair {
    fn children(&self) -> Vec<(String, Node)> {
        vec![
            ("up".into(), Node::Layer(self.up.clone())),
            ("down".into(), Node::Layer(self.down.clone())),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> Result<Value> {
        let x = run.child("up", input)?;
        run.child("down", x)
    }
}

/// `f(x) + relu(f(x))`: a way around what the host computes.
struct Residual(Arc<Linear>);

impl Params for Residual {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("f", &*self.0);
    }
}

impl Composite for Residual {
    fn children(&self) -> Vec<(String, Node)> {
        vec![("f".into(), Node::Layer(self.0.clone()))]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> Result<Value> {
        let a = run.child("f", input)?;
        let b = run.apply(a.clone(), |cx, x| Ok(cx.relu(&x.tensor()?)?.into()))?;
        run.apply(Values::new().arg(a).arg(b), |cx, x| {
            let [a, b] = x.tensors::<2>()?;
            Ok(cx.add(&a, &b)?.into())
        })
    }
}

/// Wrapped by the rules, in parts.
fn parts(model: impl Composite) -> Result<AutoWrapped> {
    let config = WrapConfig {
        use_sequential_preset: Some(false),
        lower_threshold: 8,
        upper_threshold: Some(0),
        ring: Some(ring(1)),
        optimizer: Some(Sgd::default().into()),
        ..WrapConfig::default()
    };
    match wrap(Node::composite(model), &config)? {
        Wrapped::Auto(auto) => Ok(auto),
        Wrapped::Engine(engine) => panic!("one engine: {engine:?}"),
    }
}

fn pair() -> Pair {
    Pair {
        up: linear(4, 8),
        down: linear(8, 3),
    }
}

/// Shows nothing of its weight.
struct Hidden(Param);

impl Params for Hidden {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Module for Hidden {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let w = cx.get(&self.0)?;
        cx.mul(x, &w)
    }
}

/// Has an integer among its parameters.
struct Counted(Linear, Param);

impl Params for Counted {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
        visit.param("count", &self.1);
    }
}

impl Module for Counted {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        self.0.forward(cx, x)
    }
}

const DATA: &[Case] = &[
    Case(
        "labels of 3 for a batch of 6",
        Engine(|net| {
            let labels = classes(&[0, 1, 2]);
            net.forward_backward(batch(), labels, cross_entropy)
                .map(drop)
        }),
        Line(&["split_label: label [3]", "batch of 6", "say with a spec"]),
    ),
    Case(
        "labels of 4 for a batch of 6",
        Engine(|net| {
            let labels = classes(&[0, 1, 2, 0]);
            net.forward_backward(batch(), labels, cross_entropy)
                .map(drop)
        }),
        Line(&["split_label: label [4]", "batch of 6", "say with a spec"]),
    ),
    Case(
        "f32 data for a bf16 model",
        Alone(|| train(&builder(mlp(DType::BF16), 1).build()?)),
        Line(&[
            "net: fused stage 0",
            "layer 0 (0)",
            "f32 [",
            "bf16 [",
            "convert one with `cast`",
        ]),
    ),
    Case(
        "5 features for a layer of 4",
        Engine(|net| {
            let loss = net.forward_backward(rows(6, 5), labels(), cross_entropy);
            loss.map(drop)
        }),
        Line(&[
            "net: fused stage 0",
            "layer 0 (0)",
            "linear: shapes [2, 5] and [8, 4]",
        ]),
    ),
    Case(
        "f32 labels for cross-entropy",
        Engine(|net| {
            let loss = net.forward_backward(batch(), rows(6, 1), cross_entropy);
            loss.map(drop)
        }),
        Line(&[
            "net: fused stage 0",
            "cross_entropy: f32 [2, 1]",
            "indices are i64, i32 or u32",
        ]),
    ),
    Case(
        "i32 labels for cross-entropy",
        Engine(|net| {
            let narrow = HostTensor::from_slice(&[0i32, 1, 2, 0, 1, 2], &[6])?;
            let wide = net.forward_backward(batch(), labels(), cross_entropy)?;
            let loss = net.forward_backward(batch(), narrow, cross_entropy)?;
            assert_eq!(loss, wide);
            Ok(())
        }),
        Works,
    ),
    Case(
        "a label of 7 for 3 classes",
        Engine(|net| {
            let labels = classes(&[0, 0, 0, 7, 0, 0]);
            net.forward_backward(batch(), labels, cross_entropy)
                .map(drop)
        }),
        Line(&[
            "net: fused stage 0",
            "microbatch 1",
            "cross_entropy: index 7 at position 1 is outside 0..3",
        ]),
    ),
    Case(
        "a label of -1 for 3 classes",
        Engine(|net| {
            let labels = classes(&[0, 0, 0, -1, 0, 0]);
            net.forward_backward(batch(), labels, cross_entropy)
                .map(drop)
        }),
        Line(&[
            "net: fused stage 0",
            "microbatch 1",
            "cross_entropy: index -1 at position 1 is outside 0..3",
        ]),
    ),
    Case(
        "a token out of the vocabulary",
        Alone(|| {
            let embed = Embedding::new(&mut Init::new(1, DType::F32), 10, 4, 0.1)?;
            let net = builder(Sequential::new().named("embed", embed), 2).build()?;
            let bad = net.forward(classes(&[1, 2, 11]), &RunConfig::new());
            let bad = bad.and_then(|forward| forward.output().map(drop));
            net.forward(classes(&[1, 2, 9]), &RunConfig::new())?
                .output()?;
            bad
        }),
        Line(&[
            "layer 0 (embed)",
            "microbatch 2",
            "index 11 at position 0 is outside 0..10",
        ]),
    ),
    Case(
        "NaN in the data",
        Alone(|| {
            let model = mlp(DType::F32);
            let net = builder(model.clone(), 2).build()?;
            let bad = HostTensor::from_slice(&[f32::NAN; 24], &[6, 4])?;
            net.forward_backward(bad, labels(), cross_entropy)?;
            let report = net.update(&Update::new(0.1), Lag::Zero)?.wait()?;
            assert!(
                report.skipped && !report.grad_norm.is_finite(),
                "{report:?}"
            );
            net.synchronize()?;
            assert_eq!(net.nonfinite_steps(), 1);
            let weights = model.named_params().into_iter();
            assert!(
                weights
                    .flat_map(|(_, p)| p.to_vec::<f32>().unwrap())
                    .all(f32::is_finite)
            );
            works_on(&net);
            Ok(())
        }),
        Works,
    ),
    Case(
        "an empty batch",
        Engine(|net| {
            let empty = HostTensor::zeros(DType::F32, &[0, 4])?;
            net.forward(empty, &RunConfig::new()).map(drop)
        }),
        Line(&["split_input: args[0] [0, 4] is empty"]),
    ),
    Case(
        "no inputs at all",
        Engine(|net| net.forward(Inputs::new(), &RunConfig::new()).map(drop)),
        Line(&[
            "layer 0 (0)",
            "found nothing; was a label or an input left out?",
        ]),
    ),
    Case(
        "two inputs for a layer of one",
        Engine(|net| {
            let forward = net.forward([batch(), batch()], &RunConfig::new())?;
            forward.output().map(drop)
        }),
        Line(&[
            "layer 0 (0)",
            "found a list of 2; give one input, or read all by `tensors`",
        ]),
    ),
    Case(
        "a named input for a layer of one",
        Engine(|net| {
            let inputs = Inputs::new().named("x", batch());
            net.forward(inputs, &RunConfig::new())?.output().map(drop)
        }),
        Line(&[
            "layer 0 (0)",
            "found a map where there is `x`; give the input by position",
        ]),
    ),
];

const LOSSES: &[Case] = &[
    Case(
        "no label although the loss wants one",
        Engine(|net| net.train(batch()).loss(cross_entropy).run().map(drop)),
        Line(&["net: fused stage 0", "was a label or an input left out?"]),
    ),
    Case(
        "a loss of several numbers",
        Engine(|net| {
            let all = |_: &mut Cx, output: Tree, _: Tree| output.tensor();
            net.train(batch()).loss(all).run().map(drop)
        }),
        Line(&["loss_fn: a loss has the shape [2, 3]; reduce it to one number"]),
    ),
    Case(
        "a loss that depends on nothing",
        Engine(|net| net.train(batch()).loss(constant).run().map(drop)),
        Line(&[
            "loss_fn: no loss depends on a trainable parameter",
            "compute it from the model's outputs",
        ]),
    ),
    Case(
        "an update after such a loss",
        Engine(|net| {
            net.train(batch()).loss(constant).run().unwrap_err();
            net.update(&Update::new(0.1), Lag::Zero).map(drop)
        }),
        Line(&["step: no gradients were computed since the last step; call `forward_backward`"]),
    ),
    Case(
        "a loss function that panics",
        Engine(|net| {
            let bad = |_: &mut Cx, _: Tree, _: Tree| -> TensorResult<Tensor> { panic!("ouch") };
            net.train(batch()).loss(bad).run().map(drop)
        }),
        Line(&["net: fused stage 0", "loss_fn: it panicked: ouch"]),
    ),
    Case(
        "a layer that panics",
        Alone(|| {
            let bad = Func(|_: &mut Cx, _: &Tensor| -> TensorResult<Tensor> { panic!("ouch") });
            let net = builder(Sequential::new().named("bad", bad), 2).build()?;
            net.forward(batch(), &RunConfig::new())?.output().map(drop)
        }),
        Line(&["layer 0 (bad)", "layer: it panicked: ouch"]),
    ),
    Case(
        "backward after a step",
        Engine(|net| {
            let forward = net.forward(batch(), &RunConfig::new())?;
            update(net, &Update::new(0.1), Lag::Zero)?;
            forward.backward(rows(6, 3)).map(drop)
        }),
        Line(&["backward: a step was made since this forward; run the forward again"]),
    ),
    Case(
        "backward with gradients of another shape",
        Engine(|net| {
            let forward = net.forward(batch(), &RunConfig::new())?;
            forward.backward(rows(6, 2)).map(drop)
        }),
        Line(&["backward: the gradient of outputs must have its shape [6, 3], not [6, 2]"]),
    ),
    Case(
        "backward with gradients of another type",
        Alone(|| {
            let w = number(DType::F32, 2.0);
            let net = builder(Sequential::new().with(Scale(w)), 1).build()?;
            let x = HostTensor::from_slice(&[1.0f32, 2.0], &[2, 1])?;
            let narrow = HostTensor::from_f64s(&[1.0, 1.0], DType::BF16, &[2, 1])?;
            net.forward(x, &RunConfig::new())?.backward(narrow)?;
            net.synchronize()?;
            let grad = net.gradients()?.remove(0).1.expect("a gradient");
            assert_eq!((grad.dtype(), grad.item()?), (DType::F32, 3.0));
            Ok(())
        }),
        Works,
    ),
];

const STEPS: &[Case] = &[
    Case(
        "a step function that panics, at lag 1",
        Engine(|net| {
            train(net)?;
            net.step(|_| panic!("ouch"), Lag::One)?;
            net.synchronize()
        }),
        Line(&["step: it panicked: ouch"]),
    ),
    Case(
        "an update without a rule",
        Alone(|| {
            let net = RoundPipe::builder(mlp(DType::F32)).devices(cpus(1));
            let net = net.memory(Bytes::mib(8)).build()?;
            update(&net, &Update::new(0.1), Lag::Zero)
        }),
        Line(&["update: the engine has no rule; give the builder an optimizer"]),
    ),
    Case(
        "two updates in a row",
        Engine(|net| {
            update(net, &Update::new(0.1), Lag::Zero)?;
            net.update(&Update::new(0.1), Lag::Zero).map(drop)
        }),
        Line(&["step: no gradients were computed since the last step; call `forward_backward`"]),
    ),
    Case(
        "a learning rate of NaN",
        Engine(|net| update(net, &Update::new(f64::NAN), Lag::Zero)),
        Line(&["lr: NaN; it must be a finite number, 0 or more"]),
    ),
    Case(
        "a negative learning rate, at lag 1",
        Engine(|net| update(net, &Update::new(-1.0), Lag::One)),
        Line(&["lr: -1; it must be a finite number, 0 or more"]),
    ),
    Case(
        "a clip of 0",
        Alone(|| {
            let net = adam();
            let clip = Update {
                clip: Some(0.0),
                ..Update::new(0.1)
            };
            let refused = update(&net, &clip, Lag::Zero);
            works_on(&net);
            refused
        }),
        Line(&["clip: 0; it must be above 0; None clips nothing"]),
    ),
    Case(
        "a clip of -1",
        Engine(|net| {
            let clip = Update {
                clip: Some(-1.0),
                ..Update::new(0.1)
            };
            update(net, &clip, Lag::Zero)
        }),
        Line(&["clip: -1; it must be above 0"]),
    ),
    Case(
        "betas of 1.5",
        Alone(|| {
            let rule = AdamW {
                beta1: 1.5,
                ..AdamW::default()
            };
            builder(mlp(DType::F32), 1)
                .optimizer(rule)
                .build()
                .map(drop)
        }),
        Line(&["beta1", "1.5"]),
    ),
    Case(
        "lag 1 on an engine built without it",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).max_lag(Lag::Zero).build()?;
            let refused = update(&net, &Update::new(0.1), Lag::One);
            works_on(&net);
            refused
        }),
        Line(&["max_lag(Lag::One)"]),
    ),
    Case(
        "one scaler for two engines",
        Alone(|| {
            let scaler = GradScaler::default();
            for _ in 0..2 {
                let net = adam();
                for _ in 0..6 {
                    let loss = net.scaled_loss(&scaler, cross_entropy)?;
                    net.forward_backward(batch(), labels(), loss)?;
                    net.update_scaled(&Update::new(0.1), &scaler, Lag::Zero)?;
                }
            }
            Ok(())
        }),
        Line(&["scaler: it knows no scale", "use one scaler per engine"]),
    ),
    Case(
        "a scaled update of a loss that was not scaled",
        Engine(|net| {
            train(net)?;
            let scaler = GradScaler::default();
            net.update_scaled(&Update::new(0.1), &scaler, Lag::Zero)
                .map(drop)
        }),
        Line(&[
            "scaler: no loss was scaled",
            "`scaled_loss`",
            "`loss_scale`",
        ]),
    ),
];

const SETTINGS: &[Case] = &[
    Case(
        "0 microbatches",
        Engine(|net| {
            let config = RunConfig::new().num_microbatch(0);
            net.forward(batch(), &config).map(drop)
        }),
        Line(&["num_microbatch: 0 microbatches; the least is 1"]),
    ),
    Case(
        "a model without layers",
        Alone(|| builder(Sequential::new(), 1).build().map(drop)),
        Line(&["model: it has no layers; add them"]),
    ),
    Case(
        "a worker with 1 KiB",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).memory(Bytes(1024)).build()?;
            let loss = net.forward_backward(rows(600, 4), classes(&[0; 600]), cross_entropy);
            loss.map(drop)
        }),
        Line(&["memory: layer ", "to work in", "use more microbatches"]),
    ),
    Case(
        "a batch too large for a worker of 1 MiB",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).memory(Bytes::mib(1)).build()?;
            let large = rows(60_000, 4);
            let loss = net.forward_backward(large, classes(&[0; 60_000]), cross_entropy);
            works_on(&net);
            loss.map(drop)
        }),
        Line(&["memory: layer ", "to work in", "use more microbatches"]),
    ),
    Case(
        "more memory than there is",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).memory(Bytes::gib(1 << 20));
            net.build().map(drop)
        }),
        Line(&[
            "memory: cannot get 1048576.00 GiB",
            "ask for less per worker",
        ]),
    ),
    Case(
        "an optim_dtype of f16",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).optim_dtype(DType::F16);
            net.build().map(drop)
        }),
        Line(&["optim_dtype: f16", "use f32, or bf16 weights"]),
    ),
    Case(
        "a grad_dtype of i64",
        Alone(|| {
            let net = builder(mlp(DType::F32), 1).grad_dtype(DType::I64);
            net.build().map(drop)
        }),
        Line(&["grad_dtype: 0.weight is f32; its gradients are f32, not i64"]),
    ),
    Case(
        "a trainable parameter of integers",
        Alone(|| {
            let count = Param::zeros(DType::I64, &[2])?;
            let first = Linear::new(&mut Init::new(1, DType::F32), 4, 3, true)?;
            let model = Sequential::new().named("a", Counted(first, count.clone()));
            let net = builder(model, 1).build()?;
            works_on(&net);
            let names: Vec<String> = net.optim_parameters()?.map(|copy| copy.name).collect();
            assert_eq!(names, ["a.weight", "a.bias"]);
            assert_eq!(count.to_vec::<i64>()?, [0, 0]);
            Ok(())
        }),
        Works,
    ),
    Case(
        "a parameter that visit does not show",
        Alone(|| {
            let hidden = Hidden(number(DType::F32, 2.0));
            let net = builder(Sequential::new().named("hidden", hidden), 1).build()?;
            net.forward_backward(ones(6), Tree::None, sum).map(drop)
        }),
        Line(&[
            "the model shows no parameters",
            "show them in `Params::visit`",
        ]),
    ),
    Case(
        "two layers of one name",
        Alone(|| {
            let model = Sequential::new()
                .named("a", Scale(number(DType::F32, 1.0)))
                .named("a", Scale(number(DType::F32, 2.0)));
            builder(model, 1).build().map(drop)
        }),
        Line(&[
            "model: two layers are called `a`",
            "name one of them differently",
        ]),
    ),
    Case(
        "a list of devices that is none",
        Alone(|| Devices::parse("gpu:0").map(drop)),
        Line(&["devices: `gpu:0` is none; use cuda, cuda:N, cpu or cpu:WORKERS"]),
    ),
    Case(
        "cuda where there is none",
        Alone(|| Devices::parse("cuda").map(drop)),
        LineWithoutGpu(&["cuda"]),
    ),
];

const WRAPPED: &[Case] = &[
    Case(
        "forward_backward on a model in parts",
        Alone(|| {
            let model = parts(pair())?;
            let loss = model.forward_backward(batch(), labels(), cross_entropy);
            model.forward(batch(), &RunConfig::new())?;
            loss.map(drop)
        }),
        Line(&[
            "forward_backward: the model was wrapped in 2 parts",
            "use `forward` and its `backward`",
        ]),
    ),
    Case(
        "use_sequential_preset without a preset",
        Alone(|| {
            let config = WrapConfig {
                use_sequential_preset: Some(true),
                ring: Some(ring(1)),
                ..WrapConfig::default()
            };
            wrap(Node::Layer(linear(4, 8)), &config).map(drop)
        }),
        Line(&["use_sequential_preset: there is no preset", "set `preset`"]),
    ),
    Case(
        "one weight in two engines",
        Alone(|| {
            let tied = linear(4, 4);
            let (up, down) = (tied.clone(), tied.clone());
            let model = parts(Pair { up, down })?;
            assert_eq!(model.engines().count(), 2);
            let before = tied.weight.to_vec::<f32>()?;
            model
                .forward(batch(), &RunConfig::new())?
                .backward(rows(6, 4))?;
            model.update(&Update::new(0.1), Lag::Zero)?;
            model.synchronize()?;
            assert_eq!(model.optim_parameters()?.count(), 2);
            assert_ne!(tied.weight.to_vec::<f32>()?, before);
            Ok(())
        }),
        Works,
    ),
    Case(
        "a residual around an engine",
        Alone(|| {
            let layer = linear(4, 4);
            let model = parts(Residual(layer))?;
            model
                .forward(batch(), &RunConfig::new())?
                .backward(rows(6, 4))?;
            model.synchronize()?;
            let grads = model.gradients()?;
            assert!(grads.iter().all(|(_, grad)| grad.is_some()), "{grads:?}");
            Ok(())
        }),
        Works,
    ),
    Case(
        "num_microbatch at the call of a model in parts",
        Alone(|| {
            let model = parts(pair())?;
            let config = RunConfig::new().num_microbatch(2);
            let forward = model.forward(batch(), &config)?;
            assert_eq!(forward.output().clone().tensor()?.dims(), [6, 3]);
            Ok(())
        }),
        Works,
    ),
];

/// What a case said; `None` without an error.
fn said(case: &'static Case) -> Option<String> {
    let (report, answer) = channel();
    // Apart, so that a case that hangs or panics is named.
    thread::spawn(move || {
        let result: Result<()> = match case.1 {
            Alone(run) => run(),
            Engine(run) => {
                let engine = adam();
                let result = run(&engine);
                works_on(&engine);
                result
            }
        };
        let line = |error: Error| {
            assert_eq!(format!("{error:?}"), error.to_string());
            error.to_string()
        };
        report.send(result.err().map(line)).unwrap();
    });
    match answer.recv_timeout(Duration::from_secs(120)) {
        Ok(line) => line,
        Err(RecvTimeoutError::Timeout) => panic!("{}: it hangs", case.0),
        Err(RecvTimeoutError::Disconnected) => panic!("{}: it panicked", case.0),
    }
}

fn check(cases: &'static [Case]) {
    for case in cases {
        let (name, line) = (case.0, said(case));
        let parts = match (&case.2, &line) {
            (Works, None) | (LineWithoutGpu(_), None) => continue,
            (Works, Some(line)) => panic!("{name}: it should work, not say `{line}`"),
            (Line(_), None) => panic!("{name}: there is no error"),
            (Line(parts) | LineWithoutGpu(parts), Some(_)) => parts,
        };
        let line = line.unwrap_or_default();
        assert_eq!(line.lines().count(), 1, "{name}: {line}");
        for part in *parts {
            assert!(line.contains(part), "{name}: `{line}` lacks `{part}`");
        }
    }
}

#[test]
fn wrong_data_gets_one_line() {
    check(DATA);
}

#[test]
fn wrong_losses_get_one_line() {
    check(LOSSES);
}

#[test]
fn wrong_steps_get_one_line() {
    check(STEPS);
}

#[test]
fn wrong_settings_get_one_line() {
    check(SETTINGS);
}

#[test]
fn wrong_trees_get_one_line() {
    check(WRAPPED);
}

/// None is lost when the lists change.
#[test]
fn there_are_51_cases() {
    let lists = [DATA, LOSSES, STEPS, SETTINGS, WRAPPED];
    assert_eq!(lists.iter().map(|cases| cases.len()).sum::<usize>(), 51);
}
