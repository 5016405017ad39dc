use std::collections::BTreeMap;

use roundpipe_tensor::{DType, HostTensor, Shape, bf16};

use super::{
    Cut, HostInputs, Merge, MergeOutput, SplitInput, SplitLabel, merge, split_beside, split_grads,
    split_inputs, split_label,
};
use crate::error::Error;
use crate::tree::Tree;

type Host = Tree<HostTensor>;

fn count(dims: &[usize]) -> HostTensor {
    let n = dims.iter().product::<usize>() as i32;
    HostTensor::from_slice(&(0..n).collect::<Vec<_>>(), dims).unwrap()
}

fn scalar(x: f32) -> HostTensor {
    HostTensor::scalar(x).unwrap()
}

fn ints(tree: &Host) -> Vec<i32> {
    tree.clone().tensor().unwrap().to_vec().unwrap()
}

/// The sizes along dimension 0 of one positional input in each part.
fn rows(parts: &[HostInputs], arg: usize) -> Vec<usize> {
    parts
        .iter()
        .map(|part| part.args[arg].clone().tensor().unwrap().dims()[0])
        .collect()
}

fn text<T>(result: Result<T, Error>) -> String {
    result.err().expect("must be refused").to_string()
}

fn same(a: &Host, b: &Host) -> bool {
    a.same_structure(b)
        && a.leaves()
            .iter()
            .zip(b.leaves())
            .all(|(a, b)| a.same_bits(b).unwrap())
}

#[test]
fn the_first_layer_receives_inputs_in_the_shape_they_were_given() {
    let x = || count(&[2]);
    assert!(matches!(HostInputs::new().into_tree(), Tree::None));
    assert!(matches!(HostInputs::from(x()).into_tree(), Tree::Tensor(_)));
    assert!(matches!(HostInputs::from([x(), x()]).into_tree(), Tree::List(l) if l.len() == 2));
    assert!(
        matches!(HostInputs::new().named("x", x()).into_tree(), Tree::Map(m) if m.contains_key("x"))
    );
    let both = HostInputs::from(vec![x(), x()]).named("y", x()).into_tree();
    assert!(
        matches!(both, Tree::List(l) if matches!(l[..], [Tree::Tensor(_), Tree::Tensor(_), Tree::Map(_)]))
    );
    let tree = HostInputs::from(Tree::map([("a", x().into())])).into_tree();
    assert!(tree.get("a").is_ok(), "a tree alone is not wrapped");
}

/// Nested tensors are cut, scalars and plain values repeated, and the memory stays the user's.
#[test]
fn automatic_positional_inputs_are_cut_along_0_without_copying() {
    let x = count(&[5, 2]);
    let nested = Tree::map([
        ("x", x.clone().into()),
        ("s", scalar(3.0).into()),
        ("k", Tree::Int(7)),
    ]);
    let split = split_inputs(&HostInputs::new().arg(nested), &SplitInput::Auto, 3).unwrap();
    assert_eq!(
        (split.parts.len(), split.batch, split.warnings.len()),
        (3, Some(5), 0)
    );
    let mut at = 0;
    for (part, size) in split.parts.iter().zip([2, 2, 1]) {
        let tree = &part.args[0];
        let cut = tree.get("x").unwrap().clone().tensor().unwrap();
        assert_eq!(
            (cut.dims(), cut.byte_range()),
            (&[size, 2][..], at..at + size * 8)
        );
        assert_eq!(cut.buf().len(), x.buf().len(), "a view of the whole batch");
        at += size * 8;
        assert_eq!(
            tree.get("s")
                .unwrap()
                .clone()
                .tensor()
                .unwrap()
                .item()
                .unwrap(),
            3.0
        );
        assert!(matches!(tree.get("k"), Ok(Tree::Int(7))));
    }
}

#[test]
fn a_small_batch_gives_fewer_microbatches_and_says_so() {
    let split = split_inputs(&count(&[2, 4]).into(), &SplitInput::Auto, 3).unwrap();
    assert_eq!(rows(&split.parts, 0), [1, 1]);
    assert_eq!(
        split.warnings,
        ["split_input: a batch of 2 (args[0] [2, 4]) gives 2 microbatches, not 3"]
    );
}

/// Several rows per sample stay with their sample, also in uneven microbatches.
#[test]
fn multiples_of_the_batch_are_cut_at_the_same_samples() {
    let split = split_inputs(&[count(&[20]), count(&[5])].into(), &SplitInput::Auto, 3).unwrap();
    assert_eq!(
        (rows(&split.parts, 0), rows(&split.parts, 1)),
        (vec![8, 8, 4], vec![2, 2, 1])
    );
    let message = text(split_inputs(
        &[count(&[5]), count(&[7, 2])].into(),
        &SplitInput::Auto,
        2,
    ));
    assert!(
        message.contains("args[1] [7, 2] cannot be cut together with args[0] [5]"),
        "{message}"
    );
}

/// One microbatch has everything, whatever sizes there are, and labels too.
#[test]
fn one_microbatch_cuts_nothing() {
    let inputs = HostInputs::from([count(&[5]), count(&[7, 2])])
        .named("a", count(&[3]))
        .named("b", count(&[0, 2]));
    let split = split_inputs(&inputs, &SplitInput::Auto, 1).unwrap();
    assert_eq!(split.parts.len(), 1);
    let sizes = split.parts[0].clone().into_tree().leaves().len();
    assert_eq!(sizes, 4);
    assert_eq!(
        (rows(&split.parts, 0), rows(&split.parts, 1)),
        (vec![5], vec![7])
    );
    let unclear = HostInputs::new()
        .named("a", count(&[3]))
        .named("b", count(&[4]));
    let split = split_inputs(&unclear, &SplitInput::Auto, 1).unwrap();
    assert_eq!(split.parts[0].named["b"].leaves()[0].dims(), [4]);
    let label = split_label(&count(&[7]).into(), &SplitLabel::Auto, 1, Some(5)).unwrap();
    assert_eq!(label.parts[0].leaves()[0].dims(), [7]);
}

/// Beside microbatches of another call, their samples are the batch: tensors with as many rows are
/// cut like them, masks and tables are repeated.
#[test]
fn constants_beside_microbatches_are_repeated() {
    let inputs = HostInputs::new()
        .named("mask", count(&[1, 3]))
        .named("table", count(&[5, 3]))
        .named("rows", count(&[10, 3]));
    let split = split_beside(&inputs, &SplitInput::Auto, 4, Some(10)).unwrap();
    assert_eq!((split.parts.len(), split.batch), (4, Some(10)));
    let named = |name: &str| -> Vec<usize> {
        let parts = split.parts.iter();
        parts
            .map(|part| part.named[name].leaves()[0].dims()[0])
            .collect()
    };
    assert_eq!(named("mask"), [1, 1, 1, 1]);
    assert_eq!(named("table"), [5, 5, 5, 5]);
    assert_eq!(named("rows"), [3, 3, 2, 2]);
    let positional = HostInputs::from(count(&[7]));
    let message = text(split_beside(&positional, &SplitInput::Auto, 4, Some(10)));
    assert!(
        message.contains("the unmerged inputs' batch of 10"),
        "{message}"
    );
}

/// A spec for the positional inputs alone leaves the named ones to the automatic rule.
#[test]
fn a_spec_may_be_for_the_positional_inputs_alone() {
    let inputs = HostInputs::from(count(&[3, 4]))
        .named("mask", count(&[4, 2]))
        .named("table", count(&[3]));
    let spec = SplitInput::Spec {
        args: vec![Cut::Along(1).into()],
        named: BTreeMap::new(),
    };
    let split = split_inputs(&inputs, &spec, 2).unwrap();
    let sizes = |part: &HostInputs| {
        let dims = |tree: &Tree<HostTensor>| tree.leaves()[0].dims().to_vec();
        (
            dims(&part.args[0]),
            dims(&part.named["mask"]),
            dims(&part.named["table"]),
        )
    };
    assert_eq!(sizes(&split.parts[0]), (vec![3, 2], vec![2, 2], vec![3]));
    assert_eq!(sizes(&split.parts[1]), (vec![3, 2], vec![2, 2], vec![3]));
}

#[test]
fn named_inputs_follow_the_batch_of_the_positional_ones() {
    let inputs = HostInputs::from(count(&[4, 3]))
        .named("mask", count(&[4, 1]))
        .named("table", count(&[8, 2]))
        .named("scale", scalar(2.0));
    let split = split_inputs(&inputs, &SplitInput::Auto, 2).unwrap();
    for part in &split.parts {
        let dims = |name: &str| part.named[name].clone().tensor().unwrap().dims().to_vec();
        assert_eq!(
            (dims("mask"), dims("table"), dims("scale")),
            (vec![2, 1], vec![8, 2], vec![])
        );
    }
}

/// Without positional tensors the batch must be beyond doubt; a leading 1 only broadcasts.
#[test]
fn named_inputs_alone_agree_on_a_batch_or_are_refused() {
    let inputs = HostInputs::new()
        .named("ids", count(&[4, 3]))
        .named("positions", count(&[1, 3]));
    let split = split_inputs(&inputs, &SplitInput::Auto, 2).unwrap();
    assert_eq!(ints(&split.parts[1].named["ids"]), [6, 7, 8, 9, 10, 11]);
    assert_eq!(ints(&split.parts[1].named["positions"]), [0, 1, 2]);
    let message = text(split_inputs(
        &inputs.named("table", count(&[9])),
        &SplitInput::Auto,
        2,
    ));
    assert!(
        message.contains("the batch is not clear: named.ids [4, 3] or named.table [9]"),
        "{message}"
    );
}

#[test]
fn nothing_to_cut_is_repeated_with_a_warning() {
    let split = split_inputs(&scalar(1.0).into(), &SplitInput::Auto, 2).unwrap();
    assert_eq!((split.parts.len(), split.batch), (2, None));
    assert!(
        split.warnings[0].contains("nothing to cut"),
        "{:?}",
        split.warnings
    );
    assert!(
        split_inputs(&scalar(1.0).into(), &SplitInput::Auto, 1)
            .unwrap()
            .warnings
            .is_empty()
    );
    assert!(
        text(split_inputs(&count(&[0, 2]).into(), &SplitInput::Auto, 2))
            .contains("args[0] [0, 2] is empty")
    );
    assert!(
        text(split_inputs(&count(&[2]).into(), &SplitInput::Auto, 0)).contains("0 microbatches")
    );
}

fn spec(args: Vec<Tree<Cut>>) -> SplitInput {
    SplitInput::Spec {
        args,
        named: BTreeMap::new(),
    }
}

#[test]
fn a_spec_says_for_each_input_what_to_cut() {
    let nested = Tree::list([count(&[2, 4]).into(), scalar(1.0).into(), Tree::Bool(true)]);
    let inputs = HostInputs::from(count(&[3, 4]))
        .arg(nested)
        .named("w", count(&[4]));
    let how = SplitInput::Spec {
        args: vec![Cut::Along(-1).into(), Cut::Along(1).into()],
        named: [("w".to_owned(), Cut::Repeat.into())].into(),
    };
    let split = split_inputs(&inputs, &how, 2).unwrap();
    let second = &split.parts[1];
    assert_eq!(ints(&second.args[0]), [2, 3, 6, 7, 10, 11]);
    let Tree::List(items) = &second.args[1] else {
        panic!("the nesting stays")
    };
    assert_eq!(
        ints(&items[0]),
        [2, 3, 6, 7],
        "one rule holds for everything below"
    );
    assert!(
        matches!(items[2], Tree::Bool(true))
            && items[1].clone().tensor().unwrap().dims().is_empty()
    );
    assert_eq!(ints(&second.named["w"]), [0, 1, 2, 3]);
    let uneven = split_inputs(
        &[count(&[4]), count(&[6])].into(),
        &spec(vec![Cut::Along(0).into(); 2]),
        3,
    );
    assert_eq!(
        rows(&uneven.unwrap().parts, 1),
        [2, 2, 2],
        "told to cut, so it is cut"
    );
}

#[test]
fn a_spec_that_does_not_fit_is_refused_at_its_place() {
    let map = || Tree::map([("a", count(&[2]).into()), ("b", count(&[2]).into())]);
    let along = || Tree::from(Cut::Along(0));
    let cases = [
        (
            HostInputs::from(count(&[2])),
            spec(vec![]),
            "a spec for 0 positional inputs, but there are 1",
        ),
        (
            HostInputs::from(count(&[2])),
            spec(vec![Cut::Along(1).into()]),
            "args[0] [2] has no dimension 1",
        ),
        (
            HostInputs::from(scalar(1.0)),
            spec(vec![along()]),
            "args[0] [] has no dimension 0",
        ),
        (
            HostInputs::new().arg(map()),
            spec(vec![Tree::map([("a", along())])]),
            "in args[0] there are `a`, `b`, in its spec there is `a`",
        ),
        (
            HostInputs::new().arg(Tree::list([map()])),
            spec(vec![Tree::list([Tree::map([
                ("a", along()),
                ("b", [Cut::Repeat].into()),
            ])])]),
            "args[0][0].b is a tensor, but its spec is a list of 1",
        ),
        (
            HostInputs::new().named("x", count(&[2])),
            spec(vec![]),
            "among named inputs there is `x`, in their spec there are no keys",
        ),
    ];
    for (inputs, how, want) in cases {
        let message = text(split_inputs(&inputs, &how, 2));
        assert!(
            message.starts_with("split_input: ") && message.contains(want),
            "{message}"
        );
    }
}

#[test]
fn a_function_may_split_as_it_likes() {
    let how = SplitInput::function(|inputs, n| Ok(vec![inputs.clone(); n + 1]));
    let split = split_inputs(&count(&[2]).into(), &how, 2).unwrap();
    assert_eq!((split.parts.len(), split.warnings.len()), (3, 1));
    assert!(
        text(split_inputs(
            &count(&[2]).into(),
            &SplitInput::function(|_, _| Ok(vec![])),
            2
        ))
        .contains("no micro")
    );
    let fails = SplitInput::function(|_, _| Ok(vec![count(&[2]).narrow(0, 2, 1)?.into()]));
    assert!(text(split_inputs(&count(&[2]).into(), &fails, 2)).contains("narrow"));
}

#[test]
fn labels_give_as_many_microbatches_as_the_inputs() {
    let label = Tree::map([("y", count(&[5]).into()), ("w", scalar(1.0).into())]);
    let split = split_label(&label, &SplitLabel::Auto, 3, None).unwrap();
    assert_eq!(ints(split.parts[0].get("y").unwrap()), [0, 1]);
    assert_eq!(
        split_label(&Tree::None, &SplitLabel::Auto, 3, None)
            .unwrap()
            .parts
            .len(),
        3
    );
    let wants = "gives 2 microbatches, but the inputs give 3";
    assert!(text(split_label(&count(&[2]).into(), &SplitLabel::Auto, 3, None)).contains(wants));
    let two = SplitLabel::function(|label, _| Ok(vec![label.clone(); 2]));
    assert!(text(split_label(&count(&[6]).into(), &two, 3, None)).contains(wants));
    let across = SplitLabel::Spec(Cut::Along(1).into());
    let split = split_label(&count(&[1, 3]).into(), &across, 3, None).unwrap();
    assert_eq!(
        split.parts.iter().flat_map(ints).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert!(
        text(split_label(&scalar(1.0).into(), &across, 3, None))
            .contains("label [] has no dimension 1")
    );
}

/// Labels with a row per token must not drift against their samples when microbatches are uneven.
#[test]
fn labels_with_several_rows_per_sample_stay_with_their_samples() {
    let sizes = |label: HostTensor, batch| {
        let split = split_label(&label.into(), &SplitLabel::Auto, 3, batch)?;
        Ok(split
            .parts
            .iter()
            .map(|part| part.leaves()[0].dims()[0])
            .collect::<Vec<_>>())
    };
    assert_eq!(sizes(count(&[10]), Some(5)).unwrap(), [4, 4, 2]);
    assert_eq!(
        sizes(count(&[10]), None).unwrap(),
        [4, 3, 3],
        "nothing says what a sample is"
    );
    let message = text(sizes(count(&[7]), Some(5)));
    assert!(
        message.contains("label [7] cannot be cut together with the inputs' batch of 5"),
        "{message}"
    );
}

#[test]
fn automatic_outputs_are_concatenated_averaged_or_equal() {
    let part = |x: i32, loss: f32| {
        let tensors = [HostTensor::from_slice(&[x], &[1]).unwrap(), scalar(loss)];
        Tree::map([
            ("out", tensors.into()),
            ("n", Tree::Int(4)),
            ("id", HostTensor::from_slice(&[9u8], &[]).unwrap().into()),
        ])
    };
    let merged = merge(
        vec![part(1, 1.0), part(2, 2.0), part(3, 4.5)],
        &MergeOutput::Auto,
    )
    .unwrap();
    let [x, loss] = merged.get("out").unwrap().clone().tensors().unwrap();
    assert_eq!(
        (x.to_vec::<i32>().unwrap(), loss.to_vec::<f32>().unwrap()),
        (vec![1, 2, 3], vec![2.5])
    );
    assert!(matches!(merged.get("n"), Ok(Tree::Int(4))));
    assert!(text(merge(vec![], &MergeOutput::Auto)).contains("no microbatches"));
    assert!(text(merge(vec![Tree::None], &MergeOutput::Off)).contains("unmerged"));
}

/// The sum is exact enough that the mean is rounded once, in the output's type.
#[test]
fn means_are_computed_in_f64_and_rounded_once() {
    let half = |x: f32| Host::from(HostTensor::from_slice(&[bf16::from_f32(x)], &[]).unwrap());
    let parts = vec![half(256.0), half(1.0), half(1.0)];
    let merged = merge(parts, &MergeOutput::Auto).unwrap().tensor().unwrap();
    assert_eq!(
        merged.to_vec::<bf16>().unwrap(),
        [bf16::from_f64(258.0 / 3.0)],
        "a bf16 sum would stay at 256"
    );
    let tenth = || Host::from(HostTensor::from_slice(&[0.1f64], &[]).unwrap());
    let merged = merge(vec![tenth(); 3], &MergeOutput::Auto).unwrap();
    assert!(
        same(&merged, &tenth()),
        "the mean of equal values is the value"
    );
}

#[test]
fn outputs_that_do_not_go_together_are_named_by_path() {
    let wrap = |x: Host| Tree::map([("loss", Tree::list([Tree::None, x]))]);
    let byte = |x: u8| Host::from(HostTensor::from_slice(&[x], &[]).unwrap());
    let cases: [(Host, Host, &str); 9] = [
        (
            Tree::Int(1),
            Tree::Int(2),
            "is 1 in microbatch 0 and 2 in microbatch 1",
        ),
        (
            Tree::Text("a".into()),
            Tree::Text("b".into()),
            "is \"a\" in microbatch 0 and \"b\"",
        ),
        (
            Tree::Float(1.0),
            Tree::Bool(true),
            "is a number in microbatch 0 and a truth value",
        ),
        (
            byte(1),
            byte(2),
            "must be equal in all microbatches; u8 1 in microbatch 0 and u8 2",
        ),
        (
            count(&[2, 3]).into(),
            count(&[2, 4]).into(),
            "[2, 3] and [2, 4]",
        ),
        (
            scalar(1.0).into(),
            HostTensor::from_slice(&[1.0f64], &[]).unwrap().into(),
            "is f32 1 in microbatch 0 and f64 1",
        ),
        (
            count(&[1]).into(),
            Tree::None,
            "is a tensor in microbatch 0 and nothing",
        ),
        (
            [count(&[1])].into(),
            [count(&[1]), count(&[1])].into(),
            "is a list of 1 in microbatch 0 and a list of 2",
        ),
        (
            Tree::map([("a", Tree::None)]),
            Tree::map([("b", Tree::None)]),
            "of microbatch 0 there is `a`, of microbatch 1 there is `b`",
        ),
    ];
    for (a, b, want) in cases {
        let message = text(merge(vec![wrap(a), wrap(b)], &MergeOutput::Auto));
        assert!(
            message.contains("outputs.loss[1]") && message.contains(want),
            "{message}"
        );
    }
    assert!(
        merge(vec![Tree::Float(f64::NAN); 2], &MergeOutput::Auto).is_ok(),
        "NaN goes with NaN"
    );
}

#[test]
fn a_merge_spec_concatenates_compares_averages_or_reduces() {
    let part = |x: i32| {
        let column = HostTensor::from_slice(&[x, -x], &[2, 1]).unwrap();
        let total = HostTensor::from_slice(&[f64::from(x)], &[]).unwrap();
        Tree::list([
            column.into(),
            total.clone().into(),
            count(&[3]).into(),
            total.into(),
            Tree::Int(1),
        ])
    };
    let sum = Merge::reduce(HostTensor::from_slice(&[100.0f64], &[]).unwrap(), |a, b| {
        Ok(HostTensor::from_slice(&[a.item()? + b.item()?], &[])?)
    });
    let spec = Tree::list([
        Merge::Cat(-1).into(),
        sum.into(),
        Merge::Equal.into(),
        Merge::Mean.into(),
        Tree::None,
    ]);
    let merged = merge(vec![part(1), part(2)], &MergeOutput::Spec(spec)).unwrap();
    let Tree::List(items) = merged else {
        panic!("the nesting stays")
    };
    assert_eq!(ints(&items[0]), [1, 2, -1, -2]);
    let item = |i: usize| items[i].clone().tensor().unwrap().item().unwrap();
    assert_eq!((item(1), item(3)), (103.0, 1.5));
    assert_eq!(ints(&items[2]), [0, 1, 2]);
    let all = MergeOutput::Spec(Merge::Equal.into());
    assert!(text(merge(vec![part(1), part(2)], &all)).contains("outputs[0] must be equal"));
    let first = MergeOutput::function(|mut parts| Ok(parts.remove(0)));
    assert!(same(
        &merge(vec![part(1), part(2)], &first).unwrap(),
        &part(1)
    ));
}

fn shapes(parts: &[Host]) -> Vec<Vec<Shape>> {
    parts
        .iter()
        .map(|part| part.leaves().iter().map(|leaf| *leaf.shape()).collect())
        .collect()
}

#[test]
fn gradients_of_merged_outputs_go_back_to_the_microbatches() {
    let part = |rows: usize| {
        let x = HostTensor::zeros(DType::F32, &[rows, 2]).unwrap();
        Host::from([x, scalar(0.0), scalar(0.0)])
    };
    let parts = [part(2), part(1), part(0)];
    let grad = Tree::list([
        Tree::Tensor(Some(count(&[3, 2]))),
        Tree::Tensor(Some(scalar(6.0))),
        Tree::Tensor(None),
    ]);
    let grads = split_grads(&grad, &shapes(&parts), &MergeOutput::Auto).unwrap();
    let first = |m: usize| grads[m][0].as_ref().unwrap();
    assert_eq!(
        (
            first(0).dims(),
            first(1).to_vec::<i32>().unwrap(),
            first(2).numel()
        ),
        (&[2, 2][..], vec![4, 5], 0)
    );
    for grads in &grads {
        assert_eq!(
            grads[1].as_ref().unwrap().item().unwrap(),
            2.0,
            "a mean gives each its share"
        );
        assert!(grads[2].is_none());
    }
}

#[test]
fn gradients_that_cannot_go_back_are_refused() {
    let parts = [Host::from(count(&[2])), Host::from(count(&[1]))];
    let grad = |dims: &[usize]| Tree::Tensor(Some(HostTensor::zeros(DType::F32, dims).unwrap()));
    let zero = Merge::reduce(scalar(0.0), |a, _| Ok(a));
    let cases = [
        (
            grad(&[2]),
            MergeOutput::Auto,
            "backward: the gradient of outputs must have its shape [3], not [2]",
        ),
        (
            grad(&[3]),
            MergeOutput::Spec(Merge::Equal.into()),
            "use unmerged outputs",
        ),
        (
            grad(&[3]),
            MergeOutput::Spec(zero.into()),
            "use unmerged outputs",
        ),
        (
            grad(&[3]),
            MergeOutput::function(|mut parts| Ok(parts.remove(0))),
            "use unmerged outputs",
        ),
        (
            grad(&[3]),
            MergeOutput::Spec(Merge::Mean.into()),
            "outputs is [2] in one microbatch and [1] in another",
        ),
        (
            Tree::list([grad(&[3]), grad(&[3])]),
            MergeOutput::Auto,
            "backward: 2 gradients for 1 outputs",
        ),
    ];
    for (grad, how, want) in cases {
        let message = text(split_grads(&grad, &shapes(&parts), &how));
        assert!(message.contains(want), "{message}");
    }
    let none = split_grads(
        &Tree::Tensor(None),
        &shapes(&parts),
        &MergeOutput::Spec(Merge::Equal.into()),
    );
    assert!(
        none.unwrap().iter().flatten().all(Option::is_none),
        "no gradient needs no way back"
    );
}

/// Deterministic random cases.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below
    }

    fn tensor(&mut self, dims: &[usize]) -> HostTensor {
        let dtype = DType::ALL[self.roll(DType::ALL.len())];
        let values: Vec<_> = (0..dims.iter().product())
            .map(|_| self.roll(200) as f64 / 7.0 - 9.0)
            .collect();
        HostTensor::from_f64s(&values, dtype, dims).unwrap()
    }

    /// A random nesting; next to it the cut and the merge of each tensor that undo each other.
    fn tree(&mut self, batch: usize, depth: usize, auto: bool) -> (Host, Tree<Cut>, Tree<Merge>) {
        let kinds = if depth == 0 { 6 } else { 9 };
        match self.roll(kinds) {
            0 => (
                scalar(self.roll(99) as f32 / 7.0).into(),
                Cut::Repeat.into(),
                Merge::Mean.into(),
            ),
            1 => (Tree::Int(self.roll(9) as i64), Tree::None, Tree::None),
            2..6 => {
                let mut dims: Vec<_> = (0..=self.roll(3)).map(|_| self.roll(4)).collect();
                let axis = if auto { 0 } else { self.roll(dims.len()) };
                dims[axis] = batch * (1 + self.roll(3));
                (
                    self.tensor(&dims).into(),
                    Cut::Along(axis as isize).into(),
                    Merge::Cat(axis as isize).into(),
                )
            }
            6 => {
                let items =
                    (0..self.roll(4)).map(|i| (format!("k{i}"), self.tree(batch, depth - 1, auto)));
                let items: Vec<_> = items.collect();
                let cuts = Tree::map(items.iter().map(|(k, item)| (k.clone(), item.1.clone())));
                let merges = Tree::map(items.iter().map(|(k, item)| (k.clone(), item.2.clone())));
                (
                    Tree::map(items.into_iter().map(|(k, item)| (k, item.0))),
                    cuts,
                    merges,
                )
            }
            _ => {
                let items: Vec<_> = (0..self.roll(4))
                    .map(|_| self.tree(batch, depth - 1, auto))
                    .collect();
                let cuts = Tree::list(items.iter().map(|item| item.1.clone()));
                let merges = Tree::list(items.iter().map(|item| item.2.clone()));
                (
                    Tree::list(items.into_iter().map(|item| item.0)),
                    cuts,
                    merges,
                )
            }
        }
    }
}

/// Splitting moves bytes and changes none: merging gives back what was split, whatever the nesting.
#[test]
fn split_then_merge_gives_the_same_bits() {
    for seed in 0..600u64 {
        let mut dice = Dice(seed);
        let (batch, n) = (1 + dice.roll(9), 1 + dice.roll(6));
        let auto = seed % 2 == 0;
        let (body, cuts, merges) = dice.tree(batch, 3, auto);
        // One tensor that is exactly the batch fixes what a sample is.
        let base = dice.tensor(&[batch, 2]);
        let whole = Tree::list([base.into(), body]);
        let (how, back) = match auto {
            true => (SplitInput::Auto, MergeOutput::Auto),
            false => {
                let merges = Tree::list([Merge::Cat(0).into(), merges]);
                (
                    spec(vec![Tree::list([Cut::Along(0).into(), cuts])]),
                    MergeOutput::Spec(merges),
                )
            }
        };
        let split = split_inputs(&whole.clone().into(), &how, n).unwrap();
        assert_eq!(
            (split.parts.len(), split.batch),
            (n.min(batch), Some(batch)),
            "seed {seed}"
        );
        assert_eq!(split.warnings.len(), usize::from(batch < n), "seed {seed}");
        let parts: Vec<_> = split.parts.into_iter().map(HostInputs::into_tree).collect();
        let sizes: Vec<_> = parts
            .iter()
            .map(|part| part.leaves()[0].dims()[0])
            .collect();
        assert!(
            sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[sizes.len() - 1] <= 1,
            "seed {seed}: {sizes:?}"
        );
        let merged = merge(parts.clone(), &back).unwrap();
        assert!(same(&merged, &whole), "seed {seed}: batch {batch} in {n}");
        check_grads(&whole, &parts, &back, seed);
    }
}

/// The gradient of a concatenation, cut back, has the microbatches' bits.
fn check_grads(whole: &Host, parts: &[Host], how: &MergeOutput, seed: u64) {
    let cut = |leaf: &HostTensor| (!leaf.dims().is_empty()).then(|| leaf.clone());
    let grads = split_grads(&whole.map_ref(cut), &shapes(parts), how).unwrap();
    for (grads, part) in grads.iter().zip(parts) {
        for (grad, leaf) in grads.iter().zip(part.leaves()) {
            assert!(
                grad.as_ref()
                    .is_none_or(|grad| grad.same_bits(leaf).unwrap()),
                "seed {seed}"
            );
        }
    }
}
