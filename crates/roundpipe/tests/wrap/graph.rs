//! The way back through any graph of engines and computations on the host, against a tape over the
//! whole model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roundpipe::nn::{Dropout, Init, Linear};
use roundpipe::wrap::{Run, Value, Values};
use roundpipe::{
    Composite, Cx, DType, HostTensor, Lag, Module, Node, Param, ParamVisitor, Params, RunConfig,
    Tree, Update, WrapConfig, Wrapped, wrap,
};

use super::{BATCH, Block, WIDTH, auto, bits, config, data, output_bits};

/// What a graph does with its blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    /// x + a(x)
    Residual,
    /// a(x) + b(x)
    Branches,
    /// a(a(x))
    Twice,
    /// h = a(x); (b(h) * h) + c(h): one output, three uses.
    Shared,
    /// Two outputs of one computation on the host, taken apart: a(first) + b(second) + first.
    Split,
    /// A residual around a list of engines whose outputs stay unmerged in between.
    AroundList,
    /// A weight of the module's own beside two engines, used twice.
    OwnWeight,
}

const SHAPES: [Shape; 7] = [
    Shape::Residual,
    Shape::Branches,
    Shape::Twice,
    Shape::Shared,
    Shape::Split,
    Shape::AroundList,
    Shape::OwnWeight,
];

struct Graph {
    shape: Shape,
    own: Param,
    blocks: Vec<Arc<Block>>,
}

impl Graph {
    fn new(shape: Shape, dtype: DType) -> Arc<Self> {
        let mut init = Init::new(21, dtype);
        let own = init.normal(&[WIDTH], 1.0).unwrap();
        let mut block = || Block {
            linear: Linear::new(&mut init, WIDTH, WIDTH, true).unwrap(),
            dropout: Dropout { p: 0.0 },
        };
        Arc::new(Self {
            shape,
            own,
            blocks: (0..3).map(|_| Arc::new(block())).collect(),
        })
    }

    fn list(&self) -> Node {
        let blocks = self.blocks[1..].iter();
        Node::list(blocks.map(|block| Node::Layer(block.clone())))
    }
}

impl Params for Graph {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("own", &self.own);
        visit.child("a", &*self.blocks[0]);
        visit.child("rest", &self.list());
    }
}

fn both(left: Value, right: Value) -> Values {
    Values::new().arg(left).arg(right)
}

fn add(cx: &mut Cx, both: Tree) -> roundpipe::TensorResult<Tree> {
    let [left, right] = both.tensors()?;
    Ok(cx.add(&left, &right)?.into())
}

impl Composite for Graph {
    fn children(&self) -> Vec<(String, Node)> {
        vec![
            ("a".into(), Node::Layer(self.blocks[0].clone())),
            ("rest".into(), self.list()),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let x = input.at(0)?;
        match self.shape {
            Shape::Residual => {
                let y = run.child("a", x.clone())?;
                run.apply(both(x, y), add)
            }
            Shape::Branches => {
                let left = run.child("a", x.clone())?;
                let right = run.child("rest.0", x)?;
                run.apply(both(left, right), add)
            }
            Shape::Twice => {
                let once = run.child("a", x)?;
                run.child("a", once)
            }
            Shape::Shared => {
                let h = run.child("a", x)?;
                let b = run.child("rest.0", h.clone())?;
                let c = run.child("rest.1", h.clone())?;
                let product = run.apply(both(b, h), |cx, both| {
                    let [b, h] = both.tensors()?;
                    Ok(cx.mul(&b, &h)?.into())
                })?;
                run.apply(both(product, c), add)
            }
            Shape::Split => {
                let parts = run.apply(x, |cx, x| {
                    let x = x.tensor()?;
                    let parts = [("first", cx.tanh(&x)?), ("second", cx.gelu(&x)?)];
                    Ok(Tree::map(parts.map(|(name, part)| (name, part.into()))))
                })?;
                let (first, second) = (parts.get("first")?, parts.get("second")?);
                let left = run.child("a", first.clone())?;
                let right = run.child("rest.0", second)?;
                let sum = run.apply(both(left, right), add)?;
                run.apply(both(sum, first), add)
            }
            Shape::AroundList => {
                let h = run.child("a", x)?;
                let y = run.child("rest", h.clone())?;
                run.apply(both(y, h), add)
            }
            Shape::OwnWeight => {
                let scale = |cx: &mut Cx, x: Tree| {
                    let own = cx.get(&self.own)?;
                    Ok(cx.mul(&x.tensor()?, &own)?.into())
                };
                let h = run.apply(x, scale)?;
                let h = run.child("a", h)?;
                let h = run.apply(h, scale)?;
                run.child("rest.0", h)
            }
        }
    }
}

fn in_parts(workers: usize) -> WrapConfig {
    WrapConfig {
        // The graph's own weight is below this.
        lower_threshold: 100,
        upper_threshold: Some(0),
        // Gradients are rounded once per call, and a graph may call an engine twice.
        grad_dtype: Some(DType::F32),
        ..config(workers)
    }
}

fn grad(number: usize, dtype: DType) -> HostTensor {
    let values = data(number).to_f64_vec().unwrap();
    HostTensor::from_f64s(&values, dtype, &[BATCH, WIDTH]).unwrap()
}

/// Output, gradients of parameters by name, gradient of the input.
type Trail = (Vec<u64>, Vec<(String, Vec<u64>)>, Vec<u64>);

/// All of the graph as one layer of one engine, which is one tape per microbatch.
fn as_a_whole(shape: Shape, dtype: DType, microbatches: usize) -> Trail {
    let graph = Graph::new(shape, dtype);
    let whole = WrapConfig {
        upper_threshold: Some(u64::MAX),
        run_config: RunConfig::new().num_microbatch(microbatches),
        grad_dtype: Some(DType::F32),
        ..config(1)
    };
    let Wrapped::Engine(engine) = wrap(Node::Composite(graph), &whole).unwrap() else {
        panic!("it fits as a whole")
    };
    let asks = RunConfig::new().input_grads(true);
    let forward = engine.forward(grad(1, dtype), &asks).unwrap();
    let output = output_bits(forward.output().unwrap());
    let back = forward.backward(grad(2, dtype)).unwrap();
    engine.synchronize().unwrap();
    let mut grads = Vec::new();
    for (name, grad) in engine.gradients().unwrap() {
        let name = name.strip_prefix("model.").unwrap().to_owned();
        grads.extend(grad.map(|grad| (name, bits(&grad))));
    }
    grads.sort();
    let parts = (0..back.len()).flat_map(|m| bits(back.wait(m).unwrap()[0].as_ref().unwrap()));
    (output, grads, parts.collect())
}

fn parts_of(shape: Shape, dtype: DType, config: &WrapConfig) -> Trail {
    let graph = Graph::new(shape, dtype);
    let model = auto(Node::Composite(graph), config);
    let asks = RunConfig::new().input_grads(true);
    let forward = model.forward(grad(1, dtype), &asks).unwrap();
    let output = output_bits(forward.output());
    let back = forward.backward(grad(2, dtype)).unwrap();
    model.synchronize().unwrap();
    let mut grads: Vec<(String, Vec<u64>)> = Vec::new();
    for (name, grad) in model.gradients().unwrap() {
        grads.extend(grad.map(|grad| (name, bits(&grad))));
    }
    let unwrapped = model.take_unwrapped_gradients();
    grads.extend(
        unwrapped
            .iter()
            .map(|(name, grad)| (name.clone(), bits(grad))),
    );
    grads.sort();
    let input = back.merged(0).unwrap().tensor().unwrap().unwrap();
    (output, grads, bits(&input))
}

/// Every graph has the bits of a tape over the whole module.
#[test]
fn a_graph_equals_a_tape_over_the_whole() {
    for dtype in [DType::F32, DType::BF16] {
        for shape in SHAPES {
            let want = as_a_whole(shape, dtype, 1);
            assert!(want.1.len() >= 2, "{shape:?}");
            let config = WrapConfig {
                run_config: RunConfig::new().num_microbatch(1),
                ..in_parts(2)
            };
            let have = parts_of(shape, dtype, &config);
            assert_eq!(have.0, want.0, "output of {shape:?}, {dtype:?}");
            assert_eq!(have.2, want.2, "input of {shape:?}, {dtype:?}");
            assert_eq!(have.1, want.1, "parameters of {shape:?}, {dtype:?}");
        }
    }
}

/// Microbatches change the order of sums over samples, and nothing else; workers change nothing.
#[test]
fn a_graph_does_not_depend_on_the_workers() {
    for shape in SHAPES {
        let want = parts_of(shape, DType::F32, &in_parts(1));
        for workers in [2, 3] {
            let have = parts_of(shape, DType::F32, &in_parts(workers));
            assert_eq!(have, want, "{shape:?}, {workers} workers");
        }
        // What is per sample is as over one tape per microbatch.
        let whole = as_a_whole(shape, DType::F32, 3);
        assert_eq!((&want.0, &want.2), (&whole.0, &whole.2), "{shape:?}");
        if shape != Shape::Twice && shape != Shape::OwnWeight {
            assert_eq!(want.1, whole.1, "{shape:?}");
        }
    }
}

/// Steps over a graph with branches go as over one engine.
#[test]
fn steps_over_a_graph_equal_one_engine() {
    let steps = |model: &Wrapped, graph: &Graph, lag: Lag| {
        let mut norms = Vec::new();
        for step in 0..3 {
            for call in 0..2 {
                let (x, back) = (data(2 * step + call), data(40 + step));
                match model {
                    Wrapped::Engine(engine) => {
                        let forward = engine.forward(x, &RunConfig::new()).unwrap();
                        forward.backward(back).map(drop).unwrap();
                    }
                    Wrapped::Auto(model) => {
                        let forward = model.forward(x, &RunConfig::new()).unwrap();
                        forward.backward(back).map(drop).unwrap();
                    }
                }
            }
            let update = Update {
                clip: Some(0.5),
                ..Update::new(0.02)
            };
            norms.push(match model {
                Wrapped::Engine(engine) => engine.update(&update, lag).unwrap(),
                Wrapped::Auto(model) => model.update(&update, lag).unwrap(),
            });
        }
        let norms: Vec<f64> = norms
            .iter()
            .map(|step| step.wait().unwrap().grad_norm)
            .collect();
        let weights: Vec<Vec<f32>> = graph
            .blocks
            .iter()
            .flat_map(|block| block.named_params())
            .map(|(_, param)| param.to_vec::<f32>().unwrap())
            .collect();
        (norms, weights)
    };
    for lag in [Lag::Zero, Lag::One] {
        let graph = Graph::new(Shape::Shared, DType::F32);
        let whole = WrapConfig {
            upper_threshold: Some(u64::MAX),
            ..config(2)
        };
        let model = wrap(Node::Composite(graph.clone()), &whole).unwrap();
        assert!(matches!(model, Wrapped::Engine(_)));
        let want = steps(&model, &graph, lag);
        for workers in [1, 3] {
            let graph = Graph::new(Shape::Shared, DType::F32);
            let model = wrap(Node::Composite(graph.clone()), &in_parts(workers)).unwrap();
            assert!(matches!(model, Wrapped::Auto(_)));
            assert_eq!(
                steps(&model, &graph, lag),
                want,
                "{lag:?}, {workers} workers"
            );
        }
    }
}

/// An engine that is called twice draws other numbers the second time.
#[test]
fn two_calls_of_one_engine_draw_different_numbers() {
    let mut graph = Graph::new(Shape::Branches, DType::F32);
    {
        let graph = Arc::get_mut(&mut graph).unwrap();
        for block in &mut graph.blocks {
            Arc::get_mut(block).unwrap().dropout.p = 0.5;
        }
    }
    struct Pair(Arc<Graph>);
    impl Params for Pair {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            visit.child("a", &*self.0.blocks[0]);
        }
    }
    impl Composite for Pair {
        fn children(&self) -> Vec<(String, Node)> {
            vec![("a".into(), Node::Layer(self.0.blocks[0].clone()))]
        }

        fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
            let left = run.child("a", input.clone())?;
            let right = run.child("a", input)?;
            run.apply(both(left, right), |cx, both| {
                let [left, right] = both.tensors()?;
                Ok(cx.sub(&left, &right)?.into())
            })
        }
    }
    let model = auto(Node::composite(Pair(graph.clone())), &in_parts(2));
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let first = forward
        .output()
        .clone()
        .tensor()
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    assert!(first.iter().any(|difference| *difference != 0.0));
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let second = forward
        .output()
        .clone()
        .tensor()
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    assert_ne!(first, second, "the next forward draws others again");
    model.set_training(false);
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let third = forward
        .output()
        .clone()
        .tensor()
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    assert!(third.iter().all(|difference| *difference == 0.0));
}

/// What each microbatch takes whole has the sum of their gradients.
#[test]
fn a_value_that_every_microbatch_takes_sums_its_gradients() {
    struct Shifted {
        shift: Param,
        block: Arc<Shifter>,
    }
    struct Shifter(Linear);
    impl Params for Shifter {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            visit.child("linear", &self.0);
        }
    }
    impl roundpipe::Layer for Shifter {
        fn run(&self, cx: &mut Cx, input: Tree) -> roundpipe::TensorResult<Tree> {
            let Tree::List(mut items) = input else {
                unreachable!("one by place, one by name")
            };
            let shift = items.pop().unwrap().take("shift")?.tensor()?;
            let x = self.0.forward(cx, &items.remove(0).tensor()?)?;
            Ok(cx.add(&x, &shift)?.into())
        }
    }
    impl Params for Shifted {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            visit.param("shift", &self.shift);
            visit.child("block", &*self.block);
        }
    }
    impl Composite for Shifted {
        fn children(&self) -> Vec<(String, Node)> {
            vec![("block".into(), Node::Layer(self.block.clone()))]
        }

        fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
            let shift = run.apply(Values::new(), |cx, _| Ok(cx.get(&self.shift)?.into()))?;
            let inputs = Values::new().arg(input.at(0)?).named("shift", shift);
            run.child("block", inputs)
        }
    }
    let linear = Linear::new(&mut Init::new(4, DType::F32), WIDTH, WIDTH, false).unwrap();
    let model = Shifted {
        shift: Param::full(DType::F32, &[1, WIDTH], 0.5).unwrap(),
        block: Arc::new(Shifter(linear)),
    };
    let model = auto(Node::composite(model), &in_parts(2));
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    forward.backward(data(1)).unwrap();
    model.synchronize().unwrap();
    let grads = model.take_unwrapped_gradients();
    let rows = data(1).to_vec::<f32>().unwrap();
    // Microbatches of 3, 2 and 2 rows: each summed, then the sums.
    let sum = |from: usize, to: usize, column: usize| {
        (from..to).fold(0.0f32, |sum, row| sum + rows[row * WIDTH + column])
    };
    let want: Vec<f32> = (0..WIDTH)
        .map(|column| sum(0, 3, column) + sum(3, 5, column) + sum(5, 7, column))
        .collect();
    assert_eq!(grads[0].0, "shift");
    assert_eq!(grads[0].1.to_vec::<f32>().unwrap(), want);
}

/// A walk back that fails on the host takes the gradients of engines along.
#[test]
fn a_walk_that_fails_leaves_no_gradients() {
    let shape = Shape::OwnWeight;
    let graph = Graph::new(shape, DType::F32);
    let model = auto(Node::Composite(graph.clone()), &in_parts(2));
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let wrong = HostTensor::from_slice(&[1i64; BATCH * WIDTH], &[BATCH, WIDTH]).unwrap();
    assert!(forward.backward(wrong).is_err());
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let text = forward.backward(Tree::list([data(0).into(), data(1).into()]));
    let text = text.unwrap_err().to_string();
    assert_eq!(text, "backward: 2 gradients for 1 outputs");
    let forward = model.forward(data(0), &RunConfig::new().requires_grad(false));
    let text = forward.unwrap().backward(data(1)).unwrap_err().to_string();
    assert!(
        text.starts_with("backward: the output depends on nothing that has a gradient:"),
        "{text}"
    );
    // Engines behind the failure have gone back already when it comes.
    struct Foreign(Arc<Graph>, Param);
    impl Params for Foreign {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            self.0.visit(visit);
        }
    }
    impl Composite for Foreign {
        fn children(&self) -> Vec<(String, Node)> {
            self.0.children()
        }

        fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
            let h = run.apply(input, |cx, x| {
                let own = cx.get(&self.1)?;
                Ok(cx.mul(&x.tensor()?, &own)?.into())
            })?;
            run.child("a", h)
        }
    }
    let graph = Graph::new(shape, DType::F32);
    let hidden = Param::full(DType::F32, &[WIDTH], 2.0).unwrap();
    let model = auto(Node::composite(Foreign(graph, hidden)), &in_parts(1));
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    let text = forward.backward(data(1)).unwrap_err().to_string();
    assert_eq!(
        text,
        "backward: a parameter was used that the model does not list"
    );
    let text = model.update(&Update::new(0.1), Lag::Zero).unwrap_err();
    assert_eq!(
        text.to_string(),
        "step: no gradients were computed since the last step; call `forward_backward` or `backward` first"
    );
    let none = |(_, grad): &(String, Option<HostTensor>)| grad.is_none();
    assert!(model.gradients().unwrap().iter().all(none));
}

/// A forward or a way back that fails on the host leaves the random stream where it was.
#[test]
fn a_failure_on_the_host_draws_no_numbers() {
    struct Fragile {
        block: Arc<Block>,
        fails: Arc<AtomicBool>,
    }
    impl Params for Fragile {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            visit.child("block", &*self.block);
        }
    }
    impl Composite for Fragile {
        fn children(&self) -> Vec<(String, Node)> {
            vec![("block".into(), Node::Layer(self.block.clone()))]
        }

        fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
            let x = run.child("block", input)?;
            run.apply(x, |cx, x| {
                let x = cx.tanh(&x.tensor()?)?;
                Ok(match self.fails.load(Ordering::SeqCst) {
                    true => cx.reshape(&x, &[3, 1])?.into(),
                    false => x.into(),
                })
            })
        }
    }
    let outputs = |failures: bool| {
        let fails = Arc::new(AtomicBool::new(false));
        let linear = Linear::new(&mut Init::new(6, DType::F32), WIDTH, WIDTH, true).unwrap();
        let block = Arc::new(Block {
            linear,
            dropout: Dropout { p: 0.5 },
        });
        let fragile = Fragile {
            block,
            fails: fails.clone(),
        };
        let model = auto(Node::composite(fragile), &in_parts(2));
        let mut outputs = Vec::new();
        for step in 0..3 {
            if failures {
                fails.store(true, Ordering::SeqCst);
                assert!(model.forward(data(step), &RunConfig::new()).is_err());
                fails.store(false, Ordering::SeqCst);
                let forward = model.forward(data(step), &RunConfig::new()).unwrap();
                let wrong = HostTensor::from_slice(&[1.0f32; 3], &[3]).unwrap();
                assert!(forward.backward(wrong).is_err());
            }
            let forward = model.forward(data(step), &RunConfig::new()).unwrap();
            outputs.push(output_bits(forward.output()));
            forward.backward(data(step + 5)).unwrap();
            model.update(&Update::new(0.1), Lag::Zero).unwrap();
        }
        outputs
    };
    assert_eq!(outputs(true), outputs(false));
}
