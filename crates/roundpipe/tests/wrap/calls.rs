//! Settings of a call, chains, presets that models bring along, and the way to the original.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::wrap::{Run, Value, Values};
use roundpipe::{
    Composite, Cx, DType, ExecutePlan, Grain, HostTensor, Inputs, Lag, Layer, Node, ParamVisitor,
    Params, PlanKind, RoundPipe, RunConfig, Sequential, Tensor, TensorResult, Tree, WrapConfig,
    Wrapped, wrap,
};

use super::{
    BATCH, Block, Same, WIDTH, auto, blocks, by_chain, by_one_engine, config, data, one_list,
    one_sequence, output_bits, refusal, ring, rule, told, update, values,
};

/// A layer that notes how many rows it sees in the forwards of tasks.
fn rows(seen: &Arc<Mutex<Vec<usize>>>) -> Node {
    let seen = seen.clone();
    // Plans are made on the caller's thread.
    let planner = std::thread::current().id();
    Node::layer(Func(move |cx: &mut Cx, x: &Tensor| {
        if std::thread::current().id() != planner {
            seen.lock().unwrap().push(x.dims()[0]);
        }
        cx.tanh(x)
    }))
}

fn seen_by(seen: &Arc<Mutex<Vec<usize>>>) -> Vec<usize> {
    std::mem::take(&mut *seen.lock().unwrap())
}

fn without_grad() -> RunConfig {
    RunConfig::new().requires_grad(false)
}

/// A small first element leaves its list the microbatches that were asked for.
#[test]
fn a_small_first_element_does_not_decide_for_its_list() {
    let seen: Vec<Arc<Mutex<Vec<usize>>>> = (0..3).map(|_| Arc::default()).collect();
    let blocks = blocks(1);
    let list = Node::list([
        rows(&seen[0]),
        Node::Layer(blocks[0].clone()),
        rows(&seen[1]),
    ]);
    let config = WrapConfig {
        lower_threshold: 100,
        ..config(2)
    };
    let model = auto(list, &config);
    model.forward(data(0), &without_grad()).unwrap();
    assert_eq!(seen_by(&seen[0]), [3, 2, 2]);
    assert_eq!(seen_by(&seen[1]), [3, 2, 2]);
    // Outside a list, what is small runs as one.
    struct Alone(Node);
    impl Params for Alone {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            visit.child("x", &self.0);
        }
    }
    impl Composite for Alone {
        fn children(&self) -> Vec<(String, Node)> {
            vec![("x".into(), self.0.clone())]
        }

        fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
            run.child("x", input)
        }
    }
    let skip = WrapConfig {
        use_sequential_preset: Some(false),
        lower_threshold: 100,
        upper_threshold: None,
        ..config.clone()
    };
    let alone = Node::composite(Alone(rows(&seen[2])));
    let Wrapped::Engine(engine) = wrap(alone, &skip).unwrap() else {
        panic!("it fits as a whole")
    };
    engine.forward(data(0), &without_grad()).unwrap();
    assert_eq!(seen_by(&seen[2]), [BATCH]);
}

/// Settings at the call win over those of the engines, and those of single engines over both.
#[test]
fn settings_at_the_call_win() {
    let seen: Vec<Arc<Mutex<Vec<usize>>>> = (0..2).map(|_| Arc::default()).collect();
    let mut config = config(2);
    config
        .override_config
        .insert("0".into(), RunConfig::new().num_microbatch(7));
    // Merged in between, so that each engine cuts for itself.
    let merged = RunConfig::new().merge_output(roundpipe::MergeOutput::Auto);
    let own = merged.over(&config.override_config["0"]);
    config.override_config.insert("0".into(), own);
    let model = auto(Node::list([rows(&seen[0]), rows(&seen[1])]), &config);
    let both = || (seen_by(&seen[0]).len(), seen_by(&seen[1]).len());
    let run = |call: &RunConfig, engines: &[(&str, RunConfig)]| {
        let engines: BTreeMap<String, RunConfig> = engines
            .iter()
            .map(|(path, config)| ((*path).to_owned(), config.clone()))
            .collect();
        model.forward_with(data(0), call, &engines).map(drop)
    };
    run(&without_grad(), &[]).unwrap();
    assert_eq!(both(), (7, 3), "the engines' own");
    run(&without_grad().num_microbatch(2), &[]).unwrap();
    assert_eq!(both(), (2, 2), "the call's");
    let one = RunConfig::new().num_microbatch(5);
    run(&without_grad().num_microbatch(2), &[("1", one.clone())]).unwrap();
    assert_eq!(both(), (2, 5), "the engine's at the call");
    run(&without_grad(), &[]).unwrap();
    assert_eq!(both(), (7, 3), "it held for one call");

    let text = run(&without_grad(), &[("2", one)]).unwrap_err().to_string();
    assert_eq!(text, "forward_with: `2` is no engine; there are `0`, `1`");
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1], &[]);
    let planned = RunConfig::new().execute_plan(plan.clone());
    let text = run(&planned, &[]).unwrap_err().to_string();
    assert!(
        text.starts_with("execute_plan: it belongs to single engines; use `forward_with`"),
        "{text}"
    );
    run(&without_grad(), &[("0", planned)]).unwrap();
    let (_, engine) = model.engines().next().unwrap();
    assert_eq!(engine.last_plan(PlanKind::Infer).unwrap(), plan);
    let text = run(&RunConfig::new().num_microbatch(0), &[]).unwrap_err();
    assert!(text.to_string().starts_with("num_microbatch: 0"), "{text}");
}

/// What is recomputed together, and where, changes no bit of a chain.
#[test]
fn a_grain_at_the_call_changes_no_bit() {
    let run = |call: &RunConfig| {
        let blocks = blocks(3);
        let model = auto(one_list(&blocks), &config(2));
        for step in 0..2 {
            let forward = model.forward(data(step), call).unwrap();
            forward.backward(data(step + 9)).unwrap();
            model.update(&update(), Lag::One).unwrap();
        }
        model.synchronize().unwrap();
        values(&blocks)
    };
    let want = run(&RunConfig::new());
    let grain = RunConfig::new().recompute_grain(Grain::Layer);
    assert_eq!(run(&grain), want);
    assert_ne!(run(&RunConfig::new().num_microbatch(1)), want);
}

/// A module that calls its children in order, some of them in a group.
struct Chain {
    is_chain: bool,
    blocks: Vec<Arc<Block>>,
}

impl Params for Chain {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        for (name, child) in self.children() {
            visit.child(&name, &child);
        }
    }
}

impl Composite for Chain {
    fn children(&self) -> Vec<(String, Node)> {
        let block = |i: usize| Node::Layer(self.blocks[i].clone());
        let body = vec![
            ("first".to_owned(), block(0)),
            ("rest".to_owned(), Node::list([block(1), block(2)])),
        ];
        vec![
            ("body".to_owned(), Node::Group(body)),
            ("head".to_owned(), block(3)),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let x = run.child("body.first", input)?;
        let x = run.child("body.rest", x)?;
        run.child("head", x)
    }

    fn is_chain(&self) -> bool {
        self.is_chain
    }

    fn preset(&self) -> Option<Sequential> {
        self.is_chain.then(|| one_sequence(&self.blocks))
    }
}

/// Outputs stay unmerged through a chain, in groups and lists too.
#[test]
fn a_chain_stays_unmerged() {
    let parts = WrapConfig {
        lower_threshold: 1,
        upper_threshold: Some(0),
        use_sequential_preset: Some(false),
        ..config(2)
    };
    let chain = |is_chain| {
        Node::composite(Chain {
            is_chain,
            blocks: blocks(4),
        })
    };
    let want = [
        "=Recurse",
        "body=Recurse",
        "body.first=Whole unmerged",
        "body.rest=List",
        "body.rest.0=Whole unmerged",
        "body.rest.1=Whole unmerged",
        "head=Whole",
    ];
    assert_eq!(told(&chain(true), &parts, 1), want);
    let merged = [
        "=Recurse",
        "body=Recurse",
        "body.first=Whole",
        "body.rest=List",
        "body.rest.0=Whole unmerged",
        "body.rest.1=Whole",
        "head=Whole",
    ];
    assert_eq!(told(&chain(false), &parts, 1), merged);
    // Merged or not, the bits are those of one engine.
    let want = by_one_engine(Lag::One, &[]);
    for is_chain in [true, false] {
        let blocks = blocks(4);
        let model = Node::composite(Chain {
            is_chain,
            blocks: blocks.clone(),
        });
        let trail = super::by_parts(&auto(model, &parts), &blocks, Lag::One);
        assert_eq!(trail.params, want.params, "{is_chain}");
        assert_eq!(trail.outputs, want.outputs, "{is_chain}");
        assert_eq!(trail.input_grads, want.input_grads, "{is_chain}");
        assert_eq!(trail.norms, want.norms, "{is_chain}");
    }
    assert_eq!(by_chain(&config(2), Lag::One), want);
}

/// A preset of the module's own is found and noted; it may be insisted on, or left alone.
#[test]
fn a_preset_of_the_model_is_found_and_noted() {
    let chain = || {
        Node::composite(Chain {
            is_chain: true,
            blocks: blocks(4),
        })
    };
    let Wrapped::Engine(engine) = wrap(chain(), &config(1)).unwrap() else {
        panic!("it has a preset")
    };
    assert_eq!(engine.last_plan(PlanKind::Infer), None);
    assert_eq!(
        engine.take_warnings(),
        [
            "wrap: a preset for Chain was found; use_sequential_preset: Some(false) wraps by the rules \
             instead, Some(true) takes it without a note"
        ]
    );
    assert!(engine.take_warnings().is_empty());
    let chosen = |use_it| WrapConfig {
        use_sequential_preset: Some(use_it),
        lower_threshold: 1,
        upper_threshold: Some(0),
        ..config(1)
    };
    let Wrapped::Engine(engine) = wrap(chain(), &chosen(true)).unwrap() else {
        panic!("it has a preset")
    };
    assert!(engine.take_warnings().is_empty());
    let model = auto(chain(), &chosen(false));
    assert_eq!(model.engines().count(), 4);
    assert!(model.take_warnings().is_empty());
    let without = Node::composite(Chain {
        is_chain: false,
        blocks: blocks(4),
    });
    assert_eq!(
        refusal(without, &chosen(true)),
        "use_sequential_preset: there is no preset for this model; set `preset`, or leave it unset to \
         use the rules"
    );
}

/// Both kinds give the model that they were made from, and may be given another.
#[test]
fn the_original_is_reached_through_both_kinds() {
    let blocks = blocks(4);
    let chain = Node::composite(Chain {
        is_chain: true,
        blocks: blocks.clone(),
    });
    let parts = WrapConfig {
        use_sequential_preset: Some(false),
        lower_threshold: 1,
        upper_threshold: Some(0),
        ..config(1)
    };
    let mut model = auto(chain.clone(), &parts);
    let original: &Chain = model.downcast_ref().unwrap();
    assert!(Arc::ptr_eq(&original.blocks[2], &blocks[2]));
    assert_eq!(model.named_params().len(), 8);
    assert_eq!(model.original().num_params(), model.num_params());
    model.set_original_model(one_list(&blocks[..1]));
    assert!(model.downcast_ref::<Chain>().is_none());
    assert_eq!(model.named_params().len(), 2);
    *model.original_mut() = chain.clone();
    assert_eq!(model.named_params().len(), 8);
    // The engines run what they ran before.
    let forward = model.forward(data(0), &RunConfig::new()).unwrap();
    forward.backward(data(1)).unwrap();
    model.update(&update(), Lag::Zero).unwrap().wait().unwrap();
    drop(model);

    let Wrapped::Engine(mut engine) = wrap(chain.clone(), &config(1)).unwrap() else {
        panic!("it has a preset")
    };
    assert!(engine.downcast_ref::<Chain>().is_some());
    engine.replace_original(one_list(&blocks[..1]));
    assert_eq!(engine.named_params().len(), 2);
    *engine.original_mut().unwrap() = chain;
    assert_eq!(engine.named_params().len(), 8);
    drop(engine);

    let linear = Linear::new(&mut Init::new(1, DType::F32), WIDTH, WIDTH, false).unwrap();
    let mut engine = RoundPipe::builder(linear).ring(&ring(1)).build().unwrap();
    let text = engine.original_mut().unwrap_err().to_string();
    assert!(
        text.starts_with("original_mut: the engine runs the model itself, as one layer,"),
        "{text}"
    );
}

/// The mean of squares against labels, as a layer.
struct Loss;

impl Params for Loss {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for Loss {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let (x, labels) = (input.take("x")?.tensor()?, input.take("labels")?.tensor()?);
        let wrong = cx.sub(&x, &labels)?;
        let squares = cx.mul(&wrong, &wrong)?;
        Ok(cx.mean_all(&squares)?.into())
    }
}

/// A model with a loss of its own.
struct Trained {
    block: Arc<Block>,
    loss: Arc<Loss>,
}

impl Params for Trained {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("block", &*self.block);
    }
}

impl Composite for Trained {
    fn children(&self) -> Vec<(String, Node)> {
        vec![
            ("block".into(), Node::Layer(self.block.clone())),
            ("loss".into(), Node::Layer(self.loss.clone())),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let x = run.child("block", input.get("x")?)?;
        let both = Values::new()
            .named("x", x)
            .named("labels", input.get("labels")?);
        run.child("loss", both)
    }
}

/// Rule 6: a loss that is a child is an engine, and its gradient goes back from a number.
#[test]
fn a_loss_that_is_a_child_is_an_engine() {
    struct Keeps(Same);
    impl Params for Keeps {
        fn visit(&self, visit: &mut ParamVisitor<'_>) {
            self.0.visit(visit);
        }
    }
    impl Layer for Keeps {
        fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
            let Tree::Map(mut map) = input else {
                unreachable!("inputs have names")
            };
            let x = map.remove("x").unwrap();
            map.insert("x".into(), self.0.run(cx, x)?);
            Ok(Tree::Map(map))
        }
    }
    let inputs = |step| {
        Inputs::new()
            .named("x", data(step))
            .named("labels", data(step + 7))
    };
    let one = HostTensor::from_slice(&[1.0f32], &[]).unwrap();
    let trained = blocks(1);
    let layers = Sequential::new()
        .with(Keeps(Same(trained[0].clone())))
        .with(Loss);
    let engine = RoundPipe::builder(layers)
        .optimizer(rule())
        .optimizer_threads(1)
        .seed(5)
        .run_config(RunConfig::new().num_microbatch(3))
        .ring(&ring(1))
        .build()
        .unwrap();
    let mut want = Vec::new();
    for step in 0..2 {
        let forward = engine.forward(inputs(step), &RunConfig::new()).unwrap();
        want.push(output_bits(forward.output().unwrap()));
        forward.backward(one.clone()).unwrap();
        engine.update(&update(), Lag::Zero).unwrap();
    }
    engine.synchronize().unwrap();
    want.extend(values(&trained));
    let trained = blocks(1);
    let model = Trained {
        block: trained[0].clone(),
        loss: Arc::new(Loss),
    };
    let parts = WrapConfig {
        lower_threshold: 1,
        upper_threshold: Some(0),
        override_config: BTreeMap::from([("loss".to_owned(), RunConfig::new().num_microbatch(3))]),
        ..config(2)
    };
    let model = auto(Node::composite(model), &parts);
    let paths: Vec<&str> = model.engines().map(|(path, _)| path).collect();
    assert_eq!(paths, ["block", "loss"]);
    let mut have = Vec::new();
    for step in 0..2 {
        let forward = model.forward(inputs(step), &RunConfig::new()).unwrap();
        have.push(output_bits(forward.output()));
        forward.backward(one.clone()).unwrap();
        model.update(&update(), Lag::Zero).unwrap();
    }
    model.synchronize().unwrap();
    have.extend(values(&trained));
    assert_eq!(have, want);
}

/// `optim_dtype` reaches the engine of a sequence and those of a list: bf16 weights are their own
/// masters, with bf16 moments. What `build` refuses, `wrap` does.
#[test]
fn the_optimizers_type_is_that_of_the_config() {
    let mut init = Init::new(9, DType::BF16);
    let mut linear = || Linear::new(&mut init, WIDTH, WIDTH, true).unwrap();
    let sequence: Node = Sequential::new().with(linear()).with(linear()).into();
    let list = Node::list([Node::layer(linear()), Node::layer(linear())]);
    let narrow = WrapConfig {
        optim_dtype: DType::BF16,
        ..config(1)
    };
    let Wrapped::Engine(engine) = wrap(sequence, &narrow).unwrap() else {
        panic!("a sequence is one engine");
    };
    let parts = auto(list.clone(), &narrow);
    let of_engine = engine.optim_parameters().unwrap();
    let of_parts = parts.optim_parameters().unwrap();
    let kinds: Vec<DType> = of_engine.chain(of_parts).map(|copy| copy.dtype).collect();
    assert_eq!(kinds, [DType::BF16; 8]);
    assert_eq!(engine.host_bytes().masters, 0);
    drop(parts);
    let wide = WrapConfig {
        optim_dtype: DType::F16,
        ..config(1)
    };
    assert!(refusal(list, &wide).starts_with("optim_dtype: f16"));
}
