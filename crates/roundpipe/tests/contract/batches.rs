//! The reference's `test_batch.py` over engines whose only layer hands its input on: what is split
//! and merged again is what went in, nested, named, by spec, and beside microbatches of other calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roundpipe::engine::{Input, MicrobatchOutputs};
use roundpipe::{
    Cut, Cx, DType, HostTensor, Inputs, Layer, Merge, MergeOutput, ParamVisitor, Params, Ring,
    RoundPipe, RunConfig, Sequential, SplitInput, SplitLabel, TensorResult, Tree,
};

use crate::kit::{engine, ones, ring, scale, sum};

/// Hands its input on.
struct Pass;

impl Params for Pass {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for Pass {
    fn run(&self, _: &mut Cx, input: Tree) -> TensorResult<Tree> {
        Ok(input)
    }
}

fn pass(ring: &Ring) -> RoundPipe {
    let model = Sequential::new().named("pass", Pass);
    RoundPipe::builder(model).ring(ring).build().unwrap()
}

fn config(microbatches: usize) -> RunConfig {
    RunConfig::new()
        .requires_grad(false)
        .num_microbatch(microbatches)
}

/// Numbers that differ from place to place, and from seed to seed.
fn tensor(dims: &[usize], seed: usize) -> HostTensor {
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count).map(|i| (i * 31 + seed * 1009) as f32).collect();
    HostTensor::from_slice(&values, dims).unwrap()
}

fn number() -> HostTensor {
    HostTensor::scalar(233.0).unwrap()
}

fn text(words: &str) -> Tree<HostTensor> {
    Tree::Text(words.into())
}

/// A leaf of a nested input.
fn leaf(value: impl Into<Input>) -> Tree<Input> {
    Tree::Tensor(value.into())
}

/// The outputs of a call that was given `whole`, in `parts` microbatches.
fn packed(engine: &RoundPipe, whole: &HostTensor, parts: usize) -> MicrobatchOutputs {
    let off = config(parts).merge_output(MergeOutput::Off);
    let forward = engine.forward(whole.clone(), &off).unwrap();
    assert_eq!(forward.unmerged().len(), parts);
    forward.unmerged()
}

fn merged(engine: &RoundPipe, inputs: Inputs, config: &RunConfig) -> Tree<HostTensor> {
    let forward = engine.forward(inputs, config).unwrap();
    forward.output().unwrap().clone()
}

/// The same structure, plain values and tensors, to the bit.
#[track_caller]
fn same(have: &Tree<HostTensor>, want: &Tree<HostTensor>) {
    let shape = |tree: &Tree<HostTensor>| format!("{:?}", tree.map_ref(|t| t.dims().to_vec()));
    assert_eq!(shape(have), shape(want));
    for (have, want) in have.leaves().into_iter().zip(want.leaves()) {
        assert!(have.same_bits(want).unwrap());
    }
}

/// `count` times the tensor, one below the other.
fn repeated(tensor: &HostTensor, count: usize) -> HostTensor {
    HostTensor::cat(&vec![tensor.clone(); count], 0).unwrap()
}

/// Labels that each microbatch of a call got, in order.
fn labels_seen(
    labels: Tree<HostTensor>,
    how: SplitLabel,
    microbatches: usize,
) -> Vec<Vec<Vec<f32>>> {
    let engine = engine(scale(DType::F32, 1.0).0, 1);
    let seen: Arc<Mutex<Vec<Vec<Vec<f32>>>>> = Arc::default();
    let log = seen.clone();
    let loss = move |cx: &mut Cx, output: Tree, labels: Tree| {
        assert!(matches!(&labels, Tree::List(items) if items[2].leaves().is_empty()));
        let leaves = labels.leaves().into_iter();
        let values: TensorResult<Vec<_>> = leaves.map(|leaf| leaf.to_vec::<f32>()).collect();
        log.lock().unwrap().push(values?);
        sum(cx, output, Tree::None)
    };
    let config = RunConfig::new()
        .num_microbatch(microbatches)
        .split_label(how);
    let call = engine.train(ones(12)).labels(labels).loss(loss);
    call.config(config).run().unwrap();
    let seen = seen.lock().unwrap();
    seen.clone()
}

fn values(tensor: &HostTensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

/// `test_io_auto`: nested inputs by position and by name, text and numbers among them, and
/// microbatches of other calls at any depth.
#[test]
fn nested_inputs_come_back_as_they_went_in() {
    let ring = ring(1);
    let (front, engine) = (pass(&ring), pass(&ring));
    for microbatches in [2, 3, 4] {
        let wholes = [14, 16, 18].map(|width| tensor(&[12, width], width));
        let [p1, p2, p3] = [0, 1, 2].map(|i| packed(&front, &wholes[i], microbatches));
        let t = |width: usize| tensor(&[12, width], width);
        let list = |words: &str| -> Tree<HostTensor> {
            Tree::list([t(6).into(), t(7).into(), text(words)])
        };
        let inputs = Inputs::new()
            .arg(number())
            .arg(tensor(&[12, 3, 4], 1))
            .arg(p1)
            .arg(list("in a tuple"))
            .arg(list("in a list"))
            .arg(Input::nested(Tree::map([
                ("a", leaf(t(8))),
                ("packed", leaf(p2.clone())),
                ("string", leaf(text("in a map"))),
            ])))
            .arg(text("alone"))
            .arg(Tree::Int(42))
            .named("x", t(10))
            .named(
                "y",
                Input::nested(Tree::list([leaf(t(11)), leaf(text("word")), leaf(p2)])),
            )
            .named(
                "z",
                Tree::map([("tensor", tensor(&[6, 12], 3).into()), ("text", text("in"))]),
            )
            .named("float", Tree::Float(3.25))
            .named(
                "tuple",
                Tree::list([tensor(&[12, 5, 6], 4).into(), text("t")]),
            )
            .named("packed", p3);
        let named = Tree::map([
            ("x", t(10).into()),
            (
                "y",
                Tree::list([t(11).into(), text("word"), wholes[1].clone().into()]),
            ),
            (
                "z",
                Tree::map([
                    (
                        "tensor",
                        repeated(&tensor(&[6, 12], 3), microbatches).into(),
                    ),
                    ("text", text("in")),
                ]),
            ),
            ("float", Tree::Float(3.25)),
            (
                "tuple",
                Tree::list([tensor(&[12, 5, 6], 4).into(), text("t")]),
            ),
            ("packed", wholes[2].clone().into()),
        ]);
        let want = Tree::list([
            number().into(),
            tensor(&[12, 3, 4], 1).into(),
            wholes[0].clone().into(),
            list("in a tuple"),
            list("in a list"),
            Tree::map([
                ("a", t(8).into()),
                ("packed", wholes[1].clone().into()),
                ("string", text("in a map")),
            ]),
            text("alone"),
            Tree::Int(42),
            named,
        ]);
        let explicit = config(microbatches).merge_output(MergeOutput::Auto);
        for config in [config(microbatches), explicit] {
            same(&merged(&engine, inputs.clone(), &config), &want);
        }
        let whole = tensor(&[12, 3, 4], 2);
        let labels = Tree::list([number().into(), whole.clone().into(), Tree::Int(42)]);
        let rows = 12 / microbatches;
        let want: Vec<Vec<Vec<f32>>> = (0..microbatches)
            .map(|m| {
                vec![
                    vec![233.0],
                    values(&whole.narrow(0, m * rows, rows).unwrap()),
                ]
            })
            .collect();
        assert_eq!(labels_seen(labels, SplitLabel::Auto, microbatches), want);
    }
}

/// `test_io_spec`: specs for inputs, labels and outputs, along other dimensions, with a sum.
#[test]
fn specs_cut_and_merge_as_they_say() {
    let ring = ring(1);
    let (front, engine) = (pass(&ring), pass(&ring));
    for microbatches in [2, 3, 4] {
        let whole = tensor(&[12 * microbatches, 14], 5);
        let x = tensor(&[10, 12], 6);
        let wide = tensor(&[3, 12, 4], 7);
        let inputs = Inputs::new()
            .arg(number())
            .arg(wide.clone())
            .named("x", x.clone())
            .named("packed", packed(&front, &whole, microbatches))
            .named("text", text("hello"));
        let cuts = SplitInput::Spec {
            args: vec![Cut::Repeat.into(), Cut::Along(1).into()],
            named: BTreeMap::from([
                ("x".to_owned(), Cut::Along(0).into()),
                ("packed".to_owned(), Cut::Along(0).into()),
                ("text".to_owned(), Cut::Repeat.into()),
            ]),
        };
        let add = |a: HostTensor, b: HostTensor| -> roundpipe::Result<HostTensor> {
            Ok(HostTensor::scalar((a.item()? + b.item()?) as f32)?)
        };
        let zero = HostTensor::scalar(0.0).unwrap();
        let joined = Tree::list([
            Merge::reduce(zero, add).into(),
            Merge::Cat(1).into(),
            Tree::map([
                ("x", Merge::Cat(0).into()),
                ("packed", Merge::Cat(0).into()),
                ("text", Merge::Equal.into()),
            ]),
        ]);
        let config = config(microbatches)
            .split_input(cuts)
            .merge_output(MergeOutput::Spec(joined));
        let sum = HostTensor::scalar(233.0 * microbatches as f32).unwrap();
        let named = Tree::map([
            ("x", x.into()),
            ("packed", whole.into()),
            ("text", text("hello")),
        ]);
        let want = Tree::list([sum.into(), wide.clone().into(), named]);
        same(&merged(&engine, inputs, &config), &want);

        let labels = Tree::list([number().into(), wide.clone().into(), Tree::Int(42)]);
        let how = Tree::list([Cut::Repeat.into(), Cut::Along(1).into(), Cut::Repeat.into()]);
        let columns = 12 / microbatches;
        let want: Vec<Vec<Vec<f32>>> = (0..microbatches)
            .map(|m| {
                let cut = wide.narrow(1, m * columns, columns).unwrap();
                vec![vec![233.0], values(&cut)]
            })
            .collect();
        let seen = labels_seen(labels, SplitLabel::Spec(how), microbatches);
        assert_eq!(seen, want);
    }
}

/// `test_out_packed`: with merging off every part of the output stays as many microbatches, in
/// order.
#[test]
fn unmerged_parts_come_in_order() {
    let ring = ring(1);
    let (front, engine) = (pass(&ring), pass(&ring));
    for microbatches in [1, 2, 3, 4] {
        let whole = tensor(&[12, 2], 5);
        let (a, x) = (tensor(&[12, 3, 4], 1), tensor(&[12, 10], 2));
        let inputs = Inputs::new()
            .arg(number())
            .arg(a.clone())
            .named("x", x.clone())
            .named("packed", packed(&front, &whole, microbatches))
            .named("text", text("hello"));
        let off = config(microbatches).merge_output(MergeOutput::Off);
        let outputs = engine.forward(inputs, &off).unwrap().unmerged();
        assert_eq!(outputs.len(), microbatches);
        let rows = 12 / microbatches;
        for m in 0..microbatches {
            let part = |part: MicrobatchOutputs| part.wait(m).unwrap();
            let cut = |tensor: &HostTensor| tensor.narrow(0, m * rows, rows).unwrap().into();
            same(&part(outputs.at(0)), &number().into());
            same(&part(outputs.at(1)), &cut(&a));
            let named = outputs.at(2);
            same(&part(named.get("x")), &cut(&x));
            same(&part(named.get("packed")), &cut(&whole));
            same(&part(named.get("text")), &text("hello"));
        }
    }
}

/// `test_wrong_batch_size`: of 3 and 4 microbatches 3 are used, with a warning.
#[test]
fn the_fewest_microbatches_are_used_with_a_warning() {
    let ring = ring(1);
    let (front, engine) = (pass(&ring), pass(&ring));
    let (three, four) = (tensor(&[18, 7], 1), tensor(&[32, 9], 2));
    let (p3, p4) = (packed(&front, &three, 3), packed(&front, &four, 4));
    let inputs = Inputs::new()
        .arg(p3.clone())
        .arg(p4.clone())
        .named("p3", p3)
        .named("p4", p4);
    let have = merged(&engine, inputs, &config(6));
    let first = four.narrow(0, 0, 24).unwrap();
    let named = Tree::map([("p3", three.clone().into()), ("p4", first.clone().into())]);
    same(&have, &Tree::list([three.into(), first.into(), named]));
    let warnings = engine.take_warnings();
    assert!(warnings[0].contains("3 and 4 microbatches"), "{warnings:?}");
}

/// `test_guess_from_packed_data`: beside microbatches of another call, what has another number of
/// rows is the same for all.
#[test]
fn another_number_of_rows_is_repeated() {
    let ring = ring(1);
    let (front, engine) = (pass(&ring), pass(&ring));
    let (whole, table) = (tensor(&[32, 9], 1), tensor(&[5, 6], 2));
    let inputs = Inputs::new()
        .arg(packed(&front, &whole, 4))
        .named("table", table.clone());
    let have = merged(&engine, inputs, &config(4));
    let named = Tree::map([("table", repeated(&table, 4).into())]);
    same(&have, &Tree::list([whole.into(), named]));
}

/// `test_none`: nothing in, nothing out.
#[test]
fn nothing_comes_back_as_nothing() {
    let engine = pass(&ring(1));
    let inputs = Inputs::new().arg(Tree::None);
    same(&merged(&engine, inputs, &config(3)), &Tree::None);
    let both = Inputs::new().arg(Tree::None).arg(ones(6));
    let want = Tree::list([Tree::None, ones(6).into()]);
    same(&merged(&engine, both, &config(3)), &want);
}
