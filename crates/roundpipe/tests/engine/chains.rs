//! Outputs of one call as inputs of others: whole, in part, inside lists and maps, used twice, used
//! by two engines. The bits are those of a detour through the host.

use std::sync::Arc;

use roundpipe::engine::{Input, InputGrads};
use roundpipe::nn::{Init, Linear};
use roundpipe::{
    Cx, DType, Device, HostTensor, Inputs, Lag, Layer, MergeOutput, Module, ParamVisitor, Params,
    Ring, RoundPipe, RunConfig, Sequential, TensorResult, Tree, Update,
};

use super::api::{options, sgd, sims};
use super::models;

const WIDTH: usize = 6;
const ROWS: usize = 7;

/// From x to `{"h": A x, "more": [B x, tanh(B x)], "n": 3}`.
struct Front {
    a: Linear,
    b: Linear,
}

impl Params for Front {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("a", &self.a);
        visit.child("b", &self.b);
    }
}

impl Layer for Front {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let x = input.tensor()?;
        let first = self.a.forward(cx, &x)?;
        let second = self.b.forward(cx, &x)?;
        let third = cx.tanh(&second)?;
        Ok(Tree::map([
            ("h", first.into()),
            ("more", [second, third].into()),
            ("n", Tree::Int(3)),
        ]))
    }
}

/// A product of all tensors that come in, each times a weight.
struct Back(Vec<Linear>);

impl Params for Back {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        for (i, linear) in self.0.iter().enumerate() {
            visit.child(&i.to_string(), linear);
        }
    }
}

impl Layer for Back {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let leaves = input.into_leaves();
        let mut product = None;
        for (linear, leaf) in self.0.iter().zip(&leaves) {
            let next = linear.forward(cx, leaf)?;
            product = Some(match product {
                Some(product) => cx.mul(&product, &next)?,
                None => next,
            });
        }
        Ok(product.unwrap().into())
    }
}

fn front() -> Sequential {
    let mut init = Init::new(1, DType::F32);
    let mut linear = || Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
    Sequential::new().named(
        "front",
        Front {
            a: linear(),
            b: linear(),
        },
    )
}

fn back(seed: u64) -> Sequential {
    let mut init = Init::new(seed, DType::F32);
    let linears = (0..4).map(|_| Linear::new(&mut init, WIDTH, WIDTH, true).unwrap());
    Sequential::new().named("back", Back(linears.collect()))
}

fn build(model: Sequential, ring: &Ring) -> RoundPipe {
    RoundPipe::builder(model)
        .optimizer(sgd())
        .run_config(RunConfig::default().num_microbatch(3))
        .ring(ring)
        .build()
        .unwrap()
}

fn numbers(seed: u64) -> HostTensor {
    let values: Vec<f32> = (0..ROWS * WIDTH)
        .map(|i| ((i as u64 * 37 + seed * 11) % 17) as f32 / 9.0 - 0.8)
        .collect();
    HostTensor::from_slice(&values, &[ROWS, WIDTH]).unwrap()
}

fn loss(cx: &mut Cx, out: Tree, _: Tree) -> TensorResult<roundpipe::Tensor> {
    cx.sum(&out.tensor()?, &[], false)
}

/// Trains `engine` on inputs and gives its loss, its gradients and those of its inputs.
fn train(engine: &RoundPipe, inputs: Inputs) -> (f64, InputGrads) {
    let call = engine.train(inputs).loss(loss);
    let out = call
        .config(RunConfig::default().input_grads(true))
        .run()
        .unwrap();
    (out.losses.total(), out.input_grads.unwrap())
}

/// The gradients of one input, merged over microbatches.
fn merged(grads: &InputGrads, input: usize, leaf: usize) -> HostTensor {
    let grads = grads.arg(input).unwrap();
    let parts = (0..grads.len()).map(|m| grads.wait(m).unwrap()[leaf].clone().unwrap());
    let parts: Vec<HostTensor> = parts.collect();
    let values: Vec<f32> = parts
        .iter()
        .flat_map(|part| part.to_vec::<f32>().unwrap())
        .collect();
    HostTensor::from_slice(&values, &[ROWS, WIDTH]).unwrap()
}

fn added(a: &HostTensor, b: &HostTensor) -> HostTensor {
    let pairs = a.to_vec::<f32>().unwrap().into_iter();
    let sums: Vec<f32> = pairs
        .zip(b.to_vec::<f32>().unwrap())
        .map(|(a, b)| a + b)
        .collect();
    HostTensor::from_slice(&sums, &[ROWS, WIDTH]).unwrap()
}

fn zeros() -> HostTensor {
    HostTensor::from_slice(&[0f32; ROWS * WIDTH], &[ROWS, WIDTH]).unwrap()
}

fn places() -> Vec<(&'static str, Vec<Arc<dyn Device>>)> {
    let (_, simulated) = sims(9, 2);
    vec![
        ("1 cpu", models::cpus(1)),
        ("3 cpus", models::cpus(3)),
        ("2 sims", simulated),
    ]
}

fn off() -> RunConfig {
    RunConfig::default().merge_output(MergeOutput::Off)
}

/// Parts of an output, one of them twice, inside a list and a map beside a host value: what comes
/// out, and every gradient, is what a detour through the host gives.
#[test]
fn parts_of_outputs_go_anywhere() {
    for (name, devices) in places() {
        let ring = Ring::new(&devices, &options(false)).unwrap();
        let mask = numbers(3);
        // The detour: merged outputs become inputs, input gradients become output gradients.
        let (first, second) = (build(front(), &ring), build(back(2), &ring));
        let forward = first.forward(numbers(0), &RunConfig::default()).unwrap();
        let output = forward.output().unwrap().clone();
        let h = output.get("h").unwrap().clone().tensor().unwrap();
        let [more, _] = output.get("more").unwrap().clone().tensors().unwrap();
        let inputs = Inputs::new()
            .arg(mask.clone())
            .arg(h.clone())
            .arg(more)
            .arg(h);
        let (want_loss, grads) = train(&second, inputs);
        let twice = added(&merged(&grads, 1, 0), &merged(&grads, 3, 0));
        let outputs = Tree::map([
            ("h", twice.into()),
            ("more", [merged(&grads, 2, 0), zeros()].into()),
            ("n", Tree::Int(3)),
        ]);
        forward.backward(outputs).unwrap();
        let want = (models::grads(&first), models::grads(&second));

        let (first, second) = (build(front(), &ring), build(back(2), &ring));
        let forward = first.forward(numbers(0), &off()).unwrap();
        let parts = forward.unmerged();
        let nested: Tree<Input> = Tree::list([
            Tree::map([
                ("mask", Tree::Tensor(mask.into())),
                ("x", Tree::Tensor(parts.get("h").into())),
            ]),
            Tree::Tensor(parts.get("more").at(0).into()),
        ]);
        let inputs = Inputs::new().arg(Input::nested(nested)).arg(parts.get("h"));
        let (loss, grads) = train(&second, inputs);
        assert_eq!(loss.to_bits(), want_loss.to_bits(), "{name}");
        forward.backward_from(&grads).unwrap();
        assert_eq!(
            (models::grads(&first), models::grads(&second)),
            want,
            "{name}"
        );
        for engine in [&first, &second] {
            engine.update(&Update::new(0.1), Lag::One).unwrap();
            engine.synchronize().unwrap();
        }
    }
}

/// Two engines use one output: the gradients of both are added in the order in which they are given.
#[test]
fn gradients_of_two_users_are_added() {
    for (name, devices) in places() {
        let ring = Ring::new(&devices, &options(false)).unwrap();
        let engines = || {
            (
                build(front(), &ring),
                build(back(2), &ring),
                build(back(5), &ring),
            )
        };
        let (first, left, right) = engines();
        let forward = first.forward(numbers(0), &RunConfig::default()).unwrap();
        let h = forward.output().unwrap().get("h").unwrap().clone();
        let (_, left_grads) = train(&left, h.clone().into());
        let (_, right_grads) = train(&right, h.into());
        let sum = added(&merged(&left_grads, 0, 0), &merged(&right_grads, 0, 0));
        let outputs = Tree::map([
            ("h", sum.into()),
            ("more", [zeros(), zeros()].into()),
            ("n", Tree::Int(3)),
        ]);
        forward.backward(outputs).unwrap();
        let want = models::grads(&first);

        let (first, left, right) = engines();
        let forward = first.forward(numbers(0), &off()).unwrap();
        let h = forward.unmerged().get("h");
        let (_, left_grads) = train(&left, h.clone().into());
        let (_, right_grads) = train(&right, h.into());
        forward
            .backward_from_all([&left_grads, &right_grads])
            .unwrap();
        let got = models::grads(&first);
        assert_eq!(got[..2], want[..2], "{name}");
        // Nothing used the second branch; above it got zeros.
        assert!(got[2..].iter().all(|(_, grad)| grad.is_empty()), "{name}");
    }
}

/// A part that is not there: one line that says what is, from whoever uses it.
#[test]
fn a_missing_part_is_named() {
    let ring = Ring::new(&models::cpus(2), &options(false)).unwrap();
    let (first, second) = (build(front(), &ring), build(back(2), &ring));
    let forward = first.forward(numbers(0), &off()).unwrap();
    let outputs = forward.unmerged();
    let says = "no `output.hidden`; `output` is a map where there are `h`, `more`, `n`";
    let text = outputs.get("hidden").wait(0).unwrap_err().to_string();
    assert!(text.contains(says), "{text}");
    let wrong = second.forward(outputs.get("hidden"), &RunConfig::default());
    let text = wrong.unwrap_err().to_string();
    assert!(text.contains(says) && !text.contains('\n'), "{text}");
    let n = outputs.get("n").wait(1).unwrap();
    assert!(matches!(n, Tree::Int(3)));
    // Both engines go on.
    let (loss, grads) = train(&second, outputs.get("more").at(1).into());
    assert!(loss.is_finite());
    forward.backward_from(&grads).unwrap();
    first.update(&Update::new(0.1), Lag::Zero).unwrap();
    second.update(&Update::new(0.1), Lag::Zero).unwrap();
}
