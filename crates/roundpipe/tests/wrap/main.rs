//! Wrapping a tree of modules: the rules decide as documented, and what they make computes the
//! model's bits.

mod calls;
mod graph;
mod tied;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roundpipe::nn::{Dropout, Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::wrap::{Action, Run, Value, Values, decide};
use roundpipe::{
    AutoWrapped, Bytes, Composite, Cpu, Cx, DType, Device, ExecutePlan, HostTensor, Inputs, Lag,
    Layer, LossReduction, MergeOutput, Module, Node, Param, ParamGroup, ParamVisitor, Params, Pin,
    PlanKind, Ring, RingOptions, RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorResult,
    Tree, Update, WrapConfig, Wrapped, wrap,
};
use roundpipe_tensor::SimWorld;

const WIDTH: usize = 8;
const BATCH: usize = 7;

fn ring(workers: usize) -> Ring {
    let devices = Cpu::workers(workers, Some(1)).unwrap();
    let devices: Vec<Arc<dyn Device>> = devices
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>)
        .collect();
    Ring::new(
        &devices,
        &RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        },
    )
    .unwrap()
}

/// Nothing runs as one microbatch only because it is small, as everything here is.
fn config(workers: usize) -> WrapConfig {
    WrapConfig {
        lower_threshold: 0,
        run_config: RunConfig::new().num_microbatch(3),
        ring: Some(ring(workers)),
        optimizer: Some(rule()),
        optimizer_threads: Some(1),
        seed: 5,
        name: Some("model".into()),
        ..WrapConfig::default()
    }
}

fn rule() -> Rule {
    Rule::AdamW(AdamW {
        weight_decay: 0.05,
        ..AdamW::default()
    })
}

fn auto(model: impl Into<Node>, config: &WrapConfig) -> AutoWrapped {
    match wrap(model, config).unwrap() {
        Wrapped::Auto(auto) => auto,
        Wrapped::Engine(engine) => panic!("one engine: {engine:?}"),
    }
}

fn refusal(model: impl Into<Node>, config: &WrapConfig) -> String {
    wrap(model, config).unwrap_err().to_string()
}

fn data(seed: usize) -> HostTensor {
    let values: Vec<f32> = (0..BATCH * WIDTH)
        .map(|i| ((i * 37 + seed * 11) % 23) as f32 / 11.0 - 1.0)
        .collect();
    HostTensor::from_slice(&values, &[BATCH, WIDTH]).unwrap()
}

fn bits(tensor: &HostTensor) -> Vec<u64> {
    tensor
        .to_f64_vec()
        .unwrap()
        .into_iter()
        .map(f64::to_bits)
        .collect()
}

fn output_bits(output: &Tree<HostTensor>) -> Vec<u64> {
    bits(&output.clone().tensor().unwrap())
}

// ---- rules ----

/// A layer of so many bytes.
struct Blob(Param);

fn blob(bytes: usize) -> Node {
    Node::layer(Blob(Param::zeros(DType::U8, &[bytes]).unwrap()))
}

impl Params for Blob {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("blob", &self.0);
    }
}

impl Module for Blob {
    fn forward(&self, _: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        Ok(x.clone())
    }
}

/// A module with parameters of its own, whose forward calls its children in order.
struct Tower {
    own: Option<Param>,
    children: Vec<(&'static str, Node)>,
}

fn tower(own: usize, children: Vec<(&'static str, Node)>) -> Node {
    let own = (own > 0).then(|| Param::zeros(DType::U8, &[own]).unwrap());
    Node::composite(Tower { own, children })
}

impl Params for Tower {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.maybe("own", self.own.as_ref());
        self.children
            .iter()
            .for_each(|(name, child)| visit.child(name, child));
    }
}

impl Composite for Tower {
    fn children(&self) -> Vec<(String, Node)> {
        self.children
            .iter()
            .map(|(name, child)| ((*name).to_owned(), child.clone()))
            .collect()
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let mut names = self.children.iter().map(|(name, _)| *name);
        let first = run.child(names.next().unwrap(), input)?;
        names.try_fold(first, |value, name| run.child(name, value))
    }
}

fn sequence(sizes: &[usize]) -> Node {
    let blobs = sizes
        .iter()
        .map(|bytes| Param::zeros(DType::U8, &[*bytes]).unwrap());
    blobs
        .fold(Sequential::new(), |model, param| model.with(Blob(param)))
        .into()
}

/// One line per decision: path, action, and what is special.
fn told(model: &Node, config: &WrapConfig, workers: usize) -> Vec<String> {
    let line = |d: roundpipe::wrap::Decision| {
        let one = if d.one_microbatch { " one" } else { "" };
        let unmerged = if d.unmerged { " unmerged" } else { "" };
        format!("{}={:?}{one}{unmerged}", d.path, d.action)
    };
    decide(model, config, workers)
        .unwrap()
        .into_iter()
        .map(line)
        .collect()
}

/// Each rule at its threshold and one byte beside it.
#[test]
fn rules_decide_as_documented() {
    let config = |lower, upper| WrapConfig {
        lower_threshold: lower,
        upper_threshold: upper,
        ..WrapConfig::default()
    };
    let two = |own| tower(own, vec![("a", blob(300)), ("b", blob(200))]);
    let list = || Node::list([blob(900), sequence(&[50]), blob(50)]);
    let cases: Vec<(&str, Node, WrapConfig, &[&str])> = vec![
        (
            "own at the lower threshold",
            two(100),
            config(100, Some(0)),
            &["=Whole"],
        ),
        (
            "own below it",
            two(99),
            config(100, Some(0)),
            &["=Recurse", "a=Whole", "b=Whole"],
        ),
        (
            "total at the upper threshold",
            two(10),
            config(100, Some(510)),
            &["=Whole"],
        ),
        (
            "total above it",
            two(10),
            config(100, Some(509)),
            &["=Recurse", "a=Whole", "b=Whole"],
        ),
        (
            "total below the lower threshold",
            two(10),
            config(511, Some(510)),
            &["=Whole one"],
        ),
        (
            "total at the lower threshold",
            two(10),
            config(510, Some(510)),
            &["=Whole"],
        ),
        (
            "a sequence, however small or large",
            sequence(&[1, 900]),
            config(5000, Some(0)),
            &["=Sequence"],
        ),
        (
            "a layer with nothing below it",
            blob(300),
            config(5000, Some(0)),
            &["=Whole one"],
        ),
        (
            "elements of a list, whatever their size",
            list(),
            config(100, Some(0)),
            &[
                "=List",
                "0=Whole unmerged",
                "1=Sequence unmerged",
                "2=Whole",
            ],
        ),
        (
            "a list in a list ends where the outer one goes on",
            Node::list([Node::list([blob(200), blob(200)]), blob(200)]),
            config(100, Some(0)),
            &[
                "=List",
                "0=List",
                "0.0=Whole unmerged",
                "0.1=Whole unmerged",
                "1=Whole",
            ],
        ),
        (
            "a composite in a list is one engine",
            Node::list([two(10), two(10)]),
            config(100, Some(0)),
            &["=List", "0=Whole unmerged", "1=Whole"],
        ),
        (
            "a list fits nowhere as a whole: it has no forward",
            tower(0, vec![("body", list()), ("head", blob(100))]),
            config(100, Some(1050)),
            &[
                "=Recurse",
                "body=List",
                "body.0=Whole unmerged",
                "body.1=Sequence unmerged",
                "body.2=Whole",
                "head=Whole",
            ],
        ),
        (
            "a group has no forward, its elements have",
            tower(
                0,
                vec![(
                    "g",
                    Node::Group(vec![("x".into(), blob(200)), ("y".into(), blob(200))]),
                )],
            ),
            config(100, Some(300)),
            &["=Recurse", "g=Recurse", "g.x=Whole", "g.y=Whole"],
        ),
    ];
    for (name, model, config, want) in cases {
        assert_eq!(told(&model, &config, 1), want, "{name}");
    }
}

/// Without an upper threshold it is the model's bytes over one more than there are workers.
#[test]
fn the_upper_threshold_follows_the_workers() {
    let part = |own| tower(0, vec![("x", blob(own)), ("y", blob(100))]);
    let model = tower(0, vec![("a", part(200)), ("b", part(500))]);
    // 900 bytes: 450 for one worker, 300 for two, 225 for three.
    let config = WrapConfig {
        lower_threshold: 1000,
        ..WrapConfig::default()
    };
    let open = |d: &roundpipe::wrap::Decision| d.action == Action::Recurse;
    for (workers, want) in [
        (1, vec!["", "b"]),
        (2, vec!["", "b"]),
        (3, vec!["", "a", "b"]),
    ] {
        let decisions = decide(&model, &config, workers).unwrap();
        let opened: Vec<&str> = decisions
            .iter()
            .filter(|d| open(d))
            .map(|d| d.path.as_str())
            .collect();
        assert_eq!(opened, want, "{workers} workers");
    }
    assert_eq!(WrapConfig::default().lower_threshold, 16 * 1024);
}

#[test]
fn skipping_comes_first_and_names_must_be_right() {
    let model = tower(
        0,
        vec![
            ("a", sequence(&[300])),
            ("b", Node::list([blob(200), blob(100)])),
        ],
    );
    let mut config = WrapConfig {
        upper_threshold: Some(0),
        lower_threshold: 100,
        ..WrapConfig::default()
    };
    config.skip = vec!["a".into(), "b.0".into()];
    assert_eq!(
        told(&model, &config, 1),
        ["=Recurse", "a=Skip", "b=List", "b.0=Skip", "b.1=Whole"]
    );
    config.skip = vec![String::new()];
    assert_eq!(told(&model, &config, 1), ["=Skip"]);
    config.skip = vec!["c".into()];
    let text = decide(&model, &config, 1).unwrap_err().to_string();
    assert_eq!(
        text,
        "skip: no module `c` is decided on; there are ``, `a`, `b`, `b.0`, `b.1`"
    );
    config.skip.clear();
    config
        .override_config
        .insert("b.7".into(), RunConfig::new());
    assert!(
        decide(&model, &config, 1)
            .unwrap_err()
            .to_string()
            .starts_with("override_config: no module `b.7`")
    );
    let twice = tower(0, vec![("a", blob(200)), ("a", blob(200))]);
    config.override_config.clear();
    let text = decide(&twice, &config, 1).unwrap_err().to_string();
    assert_eq!(
        text,
        "wrap: child `a` of the model: names must differ, and have no dots"
    );
}

// ---- chains ----

/// A linear layer, an activation and dropout, whose numbers depend on the layer's place.
struct Block {
    linear: Linear,
    dropout: Dropout,
}

impl Params for Block {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("linear", &self.linear);
    }
}

impl Module for Block {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.linear.forward(cx, x)?;
        let y = cx.gelu(&y)?;
        self.dropout.forward(cx, &y)
    }
}

fn blocks(count: usize) -> Vec<Arc<Block>> {
    let mut init = Init::new(9, DType::F32);
    let mut block = || Block {
        linear: Linear::new(&mut init, WIDTH, WIDTH, true).unwrap(),
        dropout: Dropout { p: 0.2 },
    };
    (0..count).map(|_| Arc::new(block())).collect()
}

/// A layer that is shared with whoever wants to look at it.
struct Same(Arc<Block>);

impl Params for Same {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Layer for Same {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        self.0.run(cx, input)
    }
}

fn one_sequence(blocks: &[Arc<Block>]) -> Sequential {
    blocks.iter().fold(Sequential::new(), |model, block| {
        model.with(Same(block.clone()))
    })
}

fn one_list(blocks: &[Arc<Block>]) -> Node {
    Node::list(blocks.iter().map(|block| Node::Layer(block.clone())))
}

/// Everything that a few steps leave.
#[derive(Debug, PartialEq)]
struct Trail {
    outputs: Vec<Vec<u64>>,
    grads: Vec<(String, Vec<u64>)>,
    input_grads: Vec<Vec<u64>>,
    params: Vec<Vec<u64>>,
    norms: Vec<u64>,
}

const STEPS: usize = 3;

fn update() -> Update {
    Update {
        clip: Some(0.7),
        clip_value: Some(0.3),
        skip_nonfinite: true,
        ..Update::new(0.01)
    }
}

fn call_config() -> RunConfig {
    RunConfig::new().input_grads(true)
}

fn values(blocks: &[Arc<Block>]) -> Vec<Vec<u64>> {
    let read = |(_, param): (String, Param)| {
        param
            .to_vec::<f32>()
            .unwrap()
            .into_iter()
            .map(|v| f64::from(v).to_bits())
            .collect()
    };
    blocks
        .iter()
        .flat_map(|block| block.named_params())
        .map(read)
        .collect()
}

fn grads_of(grads: Vec<(String, Option<HostTensor>)>) -> Vec<(String, Vec<u64>)> {
    grads
        .into_iter()
        .map(|(name, grad)| (name, bits(&grad.unwrap())))
        .collect()
}

fn inputs_of(grads: &roundpipe::engine::InputGrads) -> Vec<Vec<u64>> {
    (0..grads.len())
        .map(|m| bits(grads.wait(m).unwrap()[0].as_ref().unwrap()))
        .collect()
}

fn by_one_engine(lag: Lag, groups: &[ParamGroup]) -> Trail {
    let blocks = blocks(4);
    let engine = RoundPipe::builder(one_sequence(&blocks))
        .optimizer(rule())
        .groups(groups.to_vec())
        .optimizer_threads(1)
        .seed(5)
        .run_config(RunConfig::new().num_microbatch(3))
        .ring(&ring(2))
        .build()
        .unwrap();
    let (mut outputs, mut grads, mut input_grads, mut norms) = (vec![], vec![], vec![], vec![]);
    for step in 0..STEPS {
        let forward = engine.forward(data(step), &call_config()).unwrap();
        outputs.push(output_bits(forward.output().unwrap()));
        let back = forward.backward(data(step + 50)).unwrap();
        input_grads = inputs_of(&back);
        engine.synchronize().unwrap();
        grads = grads_of(engine.gradients().unwrap());
        norms.push(
            engine
                .update(&update(), lag)
                .unwrap()
                .wait()
                .unwrap()
                .grad_norm
                .to_bits(),
        );
    }
    engine.synchronize().unwrap();
    Trail {
        outputs,
        grads,
        input_grads,
        params: values(&blocks),
        norms,
    }
}

fn by_chain(config: &WrapConfig, lag: Lag) -> Trail {
    let blocks = blocks(4);
    by_parts(&auto(one_list(&blocks), config), &blocks, lag)
}

fn by_parts(model: &AutoWrapped, blocks: &[Arc<Block>], lag: Lag) -> Trail {
    let (mut outputs, mut grads, mut input_grads, mut norms) = (vec![], vec![], vec![], vec![]);
    for step in 0..STEPS {
        let forward = model.forward(data(step), &call_config()).unwrap();
        outputs.push(output_bits(forward.output()));
        let back = forward.backward(data(step + 50)).unwrap();
        input_grads = inputs_of(back.unmerged(0).unwrap());
        model.synchronize().unwrap();
        grads = grads_of(model.gradients().unwrap());
        norms.push(
            model
                .update(&update(), lag)
                .unwrap()
                .wait()
                .unwrap()
                .grad_norm
                .to_bits(),
        );
    }
    model.synchronize().unwrap();
    Trail {
        outputs,
        grads,
        input_grads,
        params: values(blocks),
        norms,
    }
}

/// A chain of engines is one engine over all layers, in every bit: dropout, clipping and lag
/// included.
#[test]
fn a_chain_of_list_elements_equals_one_sequence() {
    for lag in [Lag::Zero, Lag::One] {
        let want = by_one_engine(lag, &[]);
        assert_eq!(want.grads[0].0, "0.linear.weight");
        for workers in [1, 2, 3] {
            assert_eq!(
                by_chain(&config(workers), lag),
                want,
                "{workers} workers, {lag:?}"
            );
        }
    }
}

/// Asking for an element's outputs merges them, and changes no bit.
#[test]
fn a_merged_element_changes_no_bit() {
    let mut config = config(2);
    config
        .override_config
        .insert("1".into(), RunConfig::new().merge_output(MergeOutput::Auto));
    assert_eq!(by_chain(&config, Lag::Zero), by_one_engine(Lag::Zero, &[]));
}

/// Groups go by the names in the tree, whichever engine has the parameters, and a pattern may mean
/// those of one engine only.
#[test]
fn groups_go_by_the_names_in_the_tree() {
    let groups = [
        ParamGroup::matching("1.*.bias").frozen(true),
        ParamGroup::matching("2.*").lr_factor(0.5).weight_decay(0.0),
        ParamGroup::filter(|name, shape| name.starts_with('3') && shape.rank() == 2)
            .betas(0.5, 0.6),
    ];
    let given = WrapConfig {
        groups: groups.to_vec(),
        ..config(2)
    };
    for lag in [Lag::Zero, Lag::One] {
        let chain = by_chain(&given, lag);
        assert_eq!(chain, by_one_engine(lag, &groups), "{lag:?}");
        assert_ne!(chain, by_one_engine(lag, &[]), "{lag:?}");
    }
    let wrong = WrapConfig {
        groups: vec![ParamGroup::matching("4.*")],
        ..config(2)
    };
    let text = refusal(one_list(&blocks(4)), &wrong);
    let line = "groups: \"4.*\" matches no parameter; the first trained one is ";
    assert!(text.starts_with(line), "{text}");
    let model = auto(one_list(&blocks(4)), &config(2));
    model.set_groups(groups).unwrap();
    let text = model.set_groups([ParamGroup::matching("4.*")]);
    let text = text.unwrap_err().to_string();
    assert!(text.starts_with(line), "{text}");
}

/// The rest of a list starts with the first microbatch, not when all have come.
#[test]
fn the_next_element_starts_with_the_first_microbatch() {
    static SECOND: AtomicBool = AtomicBool::new(false);
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    // Layers run on this thread as well, when a plan is made for them; that does not count.
    let planner = std::thread::current().id();
    let is_task = move || std::thread::current().id() != planner;
    let first = Func(move |_: &mut Cx, x: &Tensor| {
        let start = Instant::now();
        // The last microbatch is held back until the next element has done the first.
        if is_task() && CALLS.fetch_add(1, Ordering::SeqCst) == 1 {
            while !SECOND.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(
                SECOND.load(Ordering::SeqCst),
                "the next element waits for a microbatch that it does not need"
            );
        }
        Ok(x.clone())
    });
    let second = Func(move |_: &mut Cx, x: &Tensor| {
        SECOND.fetch_or(is_task(), Ordering::SeqCst);
        Ok(x.clone())
    });
    let mut config = config(2);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1], &[]);
    config.run_config = RunConfig::new().num_microbatch(2).execute_plan(plan);
    let model = auto(
        Node::list([Node::layer(first), Node::layer(second)]),
        &config,
    );
    let forward = model
        .forward(data(0), &RunConfig::new().requires_grad(false))
        .unwrap();
    assert_eq!(output_bits(forward.output()), bits(&data(0)));
    assert_eq!(CALLS.load(Ordering::SeqCst), 2);
}

// ---- modules with children ----

/// Calls its children in order; the activation between them is its own, with a scale to learn.
struct Net {
    scale: Param,
    blocks: Vec<Arc<Block>>,
}

impl Params for Net {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("scale", &self.scale);
        visit.child("first", &*self.blocks[0]);
        visit.child("rest", &one_list(&self.blocks[1..]));
    }
}

impl Composite for Net {
    fn children(&self) -> Vec<(String, Node)> {
        let first = Node::Layer(self.blocks[0].clone());
        vec![
            ("first".into(), first),
            ("rest".into(), one_list(&self.blocks[1..])),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let x = run.child("first", input)?;
        let x = run.apply(x, |cx, x| {
            let scale = cx.get(&self.scale)?;
            Ok(cx.mul(&x.tensor()?, &scale)?.into())
        })?;
        run.child("rest", x)
    }
}

fn net() -> (Arc<Net>, Node) {
    let scale = Param::full(DType::F32, &[WIDTH], 1.5).unwrap();
    let mut blocks = blocks(3);
    for block in &mut blocks {
        Arc::get_mut(block).unwrap().dropout.p = 0.0;
    }
    let net = Arc::new(Net { scale, blocks });
    (net.clone(), Node::Composite(net))
}

fn one_microbatch() -> WrapConfig {
    WrapConfig {
        run_config: RunConfig::new().num_microbatch(1),
        ..config(2)
    }
}

/// One forward for all: on a worker as a whole, and on the host over engines or what was skipped.
#[test]
fn a_module_computes_the_same_whole_and_in_parts() {
    let (net, node) = net();
    let whole = WrapConfig {
        upper_threshold: Some(u64::MAX),
        ..one_microbatch()
    };
    let Wrapped::Engine(engine) = wrap(node, &whole).unwrap() else {
        panic!("it fits as a whole")
    };
    let forward = engine.forward(data(1), &RunConfig::new()).unwrap();
    let want_output = output_bits(forward.output().unwrap());
    forward.backward(data(2)).unwrap();
    engine.synchronize().unwrap();
    let mut want = grads_of(engine.gradients().unwrap());
    want.iter_mut()
        .for_each(|(name, _)| *name = name.strip_prefix("model.").unwrap().to_owned());
    want.sort();
    assert_eq!(want.len(), net.named_params().len());

    // What is too small for an engine by itself runs on the host, as does the module's own part.
    let parts = WrapConfig {
        lower_threshold: 33,
        upper_threshold: Some(0),
        ..one_microbatch()
    };
    for skip in [
        vec![],
        vec!["first".to_owned()],
        vec!["rest.0".to_owned()],
        vec!["rest".to_owned()],
    ] {
        let (_, node) = self::net();
        let model = auto(
            node,
            &WrapConfig {
                skip: skip.clone(),
                ..parts.clone()
            },
        );
        let forward = model.forward(data(1), &RunConfig::new()).unwrap();
        assert_eq!(
            output_bits(forward.output()),
            want_output,
            "skipping {skip:?}"
        );
        forward.backward(data(2)).unwrap();
        model.synchronize().unwrap();
        let mut grads = grads_of(model.gradients().unwrap());
        let unwrapped = model.take_unwrapped_gradients();
        assert!(unwrapped.iter().any(|(name, _)| name == "scale"));
        grads.extend(
            unwrapped
                .iter()
                .map(|(name, grad)| (name.clone(), bits(grad))),
        );
        grads.sort();
        assert_eq!(grads, want, "skipping {skip:?}");
    }
}

/// A skipped module is nobody's business: no engine lists or updates its parameters.
#[test]
fn skipped_modules_stay_unwrapped() {
    let blocks = blocks(3);
    let model = auto(
        one_list(&blocks),
        &WrapConfig {
            skip: vec!["1".into()],
            ..one_microbatch()
        },
    );
    let paths: Vec<&str> = model.engines().map(|(path, _)| path).collect();
    assert_eq!(paths, ["0", "2"]);
    let names: Vec<String> = model
        .optim_named_parameters("net", true)
        .unwrap()
        .map(|(name, _)| name)
        .collect();
    let want = [
        "0.linear.weight",
        "0.linear.bias",
        "2.linear.weight",
        "2.linear.bias",
    ];
    assert_eq!(names, want.map(|name| format!("net.{name}")));
    let unwrapped: Vec<&str> = model
        .unwrapped_params()
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(unwrapped, ["1.linear.weight", "1.linear.bias"]);
    let before = values(&blocks);
    model
        .forward(data(0), &RunConfig::new())
        .unwrap()
        .backward(data(1))
        .unwrap();
    assert_eq!(
        model
            .update(&Update::new(0.1), Lag::Zero)
            .unwrap()
            .wait()
            .unwrap()
            .step,
        1
    );
    model.synchronize().unwrap();
    let after = values(&blocks);
    let changed: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
    assert_eq!(changed, [true, true, false, false, true, true]);
    let grads = model.take_unwrapped_gradients();
    assert_eq!(
        grads
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>(),
        ["1.linear.bias", "1.linear.weight"]
    );
    assert!(model.take_unwrapped_gradients().is_empty());
}

/// A function over the copies of all engines, which updates all of them or none.
#[test]
fn a_step_function_sees_every_engine() {
    let blocks = blocks(2);
    let model = auto(one_list(&blocks), &config(1));
    let text = model.update(&Update::new(0.1), Lag::Zero).unwrap_err();
    assert_eq!(
        text.to_string(),
        "step: no gradients were computed since the last step; call `forward_backward` or `backward` first"
    );
    let run = || {
        let forward = model.forward(data(0), &RunConfig::new()).unwrap();
        forward.backward(data(1)).unwrap();
    };
    run();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let into = seen.clone();
    let step = move |params: &mut roundpipe::OptimParams<'_>| {
        let names = params.iter_mut().map(|param| param.name.to_owned());
        into.lock().unwrap().extend(names);
        Ok(())
    };
    model.step(step, Lag::Zero).unwrap().wait().unwrap();
    let want = [
        "0.linear.weight",
        "0.linear.bias",
        "1.linear.weight",
        "1.linear.bias",
    ];
    assert_eq!(*seen.lock().unwrap(), want);
    run();
    let before = values(&blocks);
    let fails = |params: &mut roundpipe::OptimParams<'_>| {
        params.iter_mut().for_each(|param| param.value.fill(9.0));
        Err(roundpipe::Error::config("step", "changed its mind"))
    };
    assert!(model.step(fails, Lag::Zero).is_err());
    model.synchronize().unwrap();
    assert_eq!(values(&blocks), before);
    let (_, part) = model.engines().next().unwrap();
    let text = part.update(&update(), Lag::Zero).unwrap_err().to_string();
    assert_eq!(
        text,
        "update: model.0 is a part of model, whose parts have one optimizer; call it on the `AutoWrapped`"
    );
}

/// Two branches that meet.
struct Fork {
    detached: bool,
    blocks: Vec<Arc<Block>>,
}

impl Params for Fork {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("left", &*self.blocks[0]);
        visit.child("right", &*self.blocks[1]);
    }
}

impl Composite for Fork {
    fn children(&self) -> Vec<(String, Node)> {
        let node = |i: usize| Node::Layer(self.blocks[i].clone());
        vec![("left".into(), node(0)), ("right".into(), node(1))]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let left = run.child("left", input.clone())?;
        let right = run.child("right", input)?;
        let right = if self.detached { right.detach() } else { right };
        run.apply(Values::new().arg(left).named("right", right), |cx, both| {
            let Tree::List(mut both) = both else {
                unreachable!("one by place, one by name")
            };
            let right = both.pop().unwrap().take("right")?.tensor()?;
            Ok(cx.add(&both.remove(0).tensor()?, &right)?.into())
        })
    }
}

/// A detached branch has no way back; weights without gradients stay, and draw no decay.
#[test]
fn a_detached_branch_stays_as_it_is() {
    let parts = WrapConfig {
        lower_threshold: 1,
        upper_threshold: Some(0),
        ..one_microbatch()
    };
    let blocks = blocks(2);
    let fork = Fork {
        detached: true,
        blocks: blocks.clone(),
    };
    let model = auto(Node::composite(fork), &parts);
    let before = values(&blocks);
    model
        .forward(data(0), &RunConfig::new())
        .unwrap()
        .backward(data(1))
        .unwrap();
    model.synchronize().unwrap();
    let filled: Vec<bool> = model
        .gradients()
        .unwrap()
        .iter()
        .map(|(_, grad)| grad.is_some())
        .collect();
    assert_eq!(
        filled,
        [true, true, false, false],
        "only the left branch has a way back"
    );
    model
        .update(&Update::new(0.1), Lag::Zero)
        .unwrap()
        .wait()
        .unwrap();
    model.synchronize().unwrap();
    let after = values(&blocks);
    let changed: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
    assert_eq!(changed, [true, true, false, false]);
}

/// Inputs by name, of which one is only for the module's own part.
struct Masked(Arc<Block>);

impl Params for Masked {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("block", &*self.0);
    }
}

impl Composite for Masked {
    fn children(&self) -> Vec<(String, Node)> {
        vec![("block".into(), Node::Layer(self.0.clone()))]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let y = run.child("block", input.get("x")?)?;
        run.apply(
            Values::new()
                .named("y", y)
                .named("mask", input.get("mask")?),
            |cx, mut both| {
                let mask = both.take("mask")?.tensor()?;
                Ok(cx.mul(&both.take("y")?.tensor()?, &mask)?.into())
            },
        )
    }
}

/// Named inputs have the same names on a worker and on the host, and gradients find the one they
/// belong to.
#[test]
fn inputs_keep_their_names() {
    let mut trails = Vec::new();
    for upper in [u64::MAX, 0] {
        let block = Arc::into_inner(blocks(1).remove(0)).unwrap();
        let block = Arc::new(Block {
            dropout: Dropout { p: 0.0 },
            ..block
        });
        let config = WrapConfig {
            lower_threshold: 1,
            upper_threshold: Some(upper),
            ..one_microbatch()
        };
        let inputs = Inputs::new().named("x", data(0)).named("mask", data(3));
        let node = Node::composite(Masked(block));
        trails.push(match wrap(node, &config).unwrap() {
            Wrapped::Engine(engine) => {
                let forward = engine.forward(inputs, &RunConfig::new()).unwrap();
                let output = output_bits(forward.output().unwrap());
                forward.backward(data(1)).unwrap();
                engine.synchronize().unwrap();
                (
                    output,
                    grads_of(engine.gradients().unwrap())
                        .into_iter()
                        .map(|(_, g)| g)
                        .collect::<Vec<_>>(),
                )
            }
            Wrapped::Auto(model) => {
                let forward = model.forward(inputs, &RunConfig::new()).unwrap();
                let output = output_bits(forward.output());
                forward.backward(data(1)).unwrap();
                model.synchronize().unwrap();
                (
                    output,
                    grads_of(model.gradients().unwrap())
                        .into_iter()
                        .map(|(_, g)| g)
                        .collect::<Vec<_>>(),
                )
            }
        });
    }
    assert_eq!(trails[0], trails[1]);
}

/// A gradient that is not finite in one engine skips the step of all.
#[test]
fn a_skipped_step_is_skipped_by_all() {
    let blocks = blocks(2);
    let model = auto(one_list(&blocks), &config(1));
    let before = values(&blocks);
    let mut grad = data(1).to_vec::<f32>().unwrap();
    grad[5] = f32::INFINITY;
    let grad = HostTensor::from_slice(&grad, &[BATCH, WIDTH]).unwrap();
    model
        .forward(data(0), &RunConfig::new())
        .unwrap()
        .backward(grad)
        .unwrap();
    let report = model.update(&update(), Lag::Zero).unwrap().wait().unwrap();
    assert!(report.skipped && report.step == 0, "{report:?}");
    model.synchronize().unwrap();
    assert_eq!(values(&blocks), before);
    model
        .forward(data(0), &RunConfig::new())
        .unwrap()
        .backward(data(1))
        .unwrap();
    let report = model.update(&update(), Lag::Zero).unwrap().wait().unwrap();
    assert!(!report.skipped && report.step == 1, "{report:?}");
}

// ---- refusals ----

#[test]
fn what_cannot_work_says_why() {
    let blocks = blocks(2);
    let model = auto(one_list(&blocks), &config(1));
    let loss = |cx: &mut Cx, output: Tree, _: Tree| cx.sum(&output.tensor()?, &[0, 1], false);
    let text = model
        .forward_backward(data(0), Tree::None, loss)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "forward_backward: the model was wrapped in 2 parts, not as one sequence, so there is no last layer to run \
         the loss behind; use `forward` and its `backward`, or give `wrap` a preset that makes a `Sequential` of it"
    );
    let mean = RunConfig::new().loss_reduction(LossReduction::Mean);
    let text = model.forward(data(0), &mean).unwrap_err().to_string();
    assert!(
        text.starts_with("loss_reduction: it belongs to single engines;"),
        "{text}"
    );
    // One engine and the host cannot share a weight.
    let tied = Node::list([
        Node::Layer(blocks[0].clone()),
        Node::Layer(blocks[0].clone()),
    ]);
    let skips = WrapConfig {
        skip: vec!["1".into()],
        ..config(1)
    };
    let text = refusal(tied, &skips);
    assert!(
        text.starts_with("wrap: `0.linear.weight` and `1.linear.weight` are one parameter, which"),
        "{text}"
    );
    let grouped = Node::list([Node::Group(vec![("a".into(), blob(3))]), blob(3)]);
    let text = refusal(grouped, &config(1));
    assert_eq!(
        text,
        "wrap: `0` stands in a list but has no forward; make it a list or a composite"
    );
}

/// The pin of a wrap holds for activations too, whatever the options of its ring say.
#[test]
fn a_pin_reaches_the_ring() {
    let loss = |cx: &mut Cx, output: Tree, _: Tree| cx.mean_all(&output.tensor()?);
    for pin in [Pin::Off, Pin::Alloc] {
        let options = RingOptions {
            memory: Some(Bytes::mib(16)),
            activation_budget: Some(Bytes(0)),
            ..RingOptions::default()
        };
        let devices = SimWorld::seeded(3).unwrap().workers(2);
        let devices = devices
            .into_iter()
            .map(|sim| sim as Arc<dyn Device>)
            .collect();
        let config = WrapConfig {
            ring: None,
            devices,
            ring_options: options,
            pin,
            ..config(1)
        };
        let Wrapped::Engine(engine) = wrap(one_sequence(&blocks(4)), &config).unwrap() else {
            panic!("it is a sequence")
        };
        engine.forward_backward(data(0), Tree::None, loss).unwrap();
        engine.synchronize().unwrap();
        let (pins, host) = (engine.ring().pins(), engine.ring().host_use());
        let other = if pin == Pin::Off {
            pins.pinned
        } else {
            pins.pageable
        };
        assert!(
            host.allocated > Bytes(0) && other == Bytes(0),
            "{pin:?}: {pins:?}, {host:?}"
        );
    }
}

/// A preset makes one engine of what it knows; it may be insisted on.
#[test]
fn a_preset_makes_a_sequence() {
    let (net, node) = net();
    let insist = WrapConfig {
        use_sequential_preset: Some(true),
        ..config(1)
    };
    let text = refusal(node.clone(), &insist);
    assert_eq!(
        text,
        "use_sequential_preset: there is no preset for this model; set `preset`, or leave it unset to use the rules"
    );
    let knows = |node: &Node| {
        let Node::Composite(module) = node else {
            return None;
        };
        let net = (&**module as &dyn std::any::Any).downcast_ref::<Net>()?;
        Some(one_sequence(&net.blocks))
    };
    let insist = WrapConfig {
        preset: Some(Arc::new(knows)),
        ..insist
    };
    let Wrapped::Engine(engine) = wrap(node.clone(), &insist).unwrap() else {
        panic!("it is a sequence")
    };
    let loss = |cx: &mut Cx, output: Tree, _: Tree| cx.sum(&output.tensor()?, &[0, 1], false);
    assert!(
        engine
            .forward_backward(data(0), Tree::None, loss)
            .unwrap()
            .total()
            .is_finite()
    );
    assert_eq!(
        engine.named_params().len(),
        net.named_params().len(),
        "the original, with its scale"
    );
    let text = refusal(one_list(&blocks(2)), &insist);
    assert!(
        text.starts_with("use_sequential_preset: the preset does not know this model;"),
        "{text}"
    );
    let ignores = WrapConfig {
        use_sequential_preset: Some(false),
        upper_threshold: Some(0),
        ..insist
    };
    let (_, node) = self::net();
    assert!(matches!(
        wrap(
            node,
            &WrapConfig {
                lower_threshold: 33,
                ..ignores
            }
        )
        .unwrap(),
        Wrapped::Auto(_)
    ));
}

/// The cause is told, not what was called off for it; all engines work on.
#[test]
fn a_failing_element_is_named_and_forgiven() {
    let fails = Arc::new(AtomicBool::new(true));
    let asked = fails.clone();
    let broken = Func(
        move |cx: &mut Cx, x: &Tensor| match asked.load(Ordering::SeqCst) {
            true => cx.reshape(x, &[3, 1]),
            false => Ok(x.clone()),
        },
    );
    let blocks = blocks(2);
    let [first, last] = [0, 1].map(|i| Node::Layer(blocks[i].clone()));
    let model = auto(Node::list([first, Node::layer(broken), last]), &config(2));
    let text = model
        .forward(data(0), &RunConfig::new())
        .unwrap_err()
        .to_string();
    assert!(text.starts_with("model.1: forward stage 0"), "{text}");
    fails.store(false, Ordering::SeqCst);
    model
        .forward(data(0), &RunConfig::new())
        .unwrap()
        .backward(data(1))
        .unwrap();
    model.update(&update(), Lag::Zero).unwrap().wait().unwrap();
    model.synchronize().unwrap();
}
