//! Wrapping a tree of modules: thresholds, names, settings, what its calls read.

use std::sync::{Arc, Mutex};

use roundpipe::optim::Sgd;
use roundpipe::wrap::{Run, Value, Values, decide};
use roundpipe::{
    AutoWrapped, Bytes, Composite, Cx, DType, DeviceKind, Devices, Grain, HostTensor, Inputs, Lag,
    Layer, MergeOutput, Module, Node, Param, ParamVisitor, Params, Result, RingOptions, RunConfig,
    Tensor, TensorResult, Tree, Update, WrapConfig, Wrapped, wrap,
};

use crate::kit::{Scale, cpus, number, ring};

const KIB: usize = 1024;

/// Rows that a layer saw, in the order of its calls.
type Seen = Arc<Mutex<Vec<usize>>>;

/// A layer with so many parameters, of which one scales the input.
struct Blob(Param, Seen);

impl Params for Blob {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("w", &self.0);
    }
}

impl Module for Blob {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        // The planner asks for shapes on a device that computes nothing.
        if cx.worker().device().id().kind != DeviceKind::Meta {
            self.1.lock().unwrap().push(x.dims()[0]);
        }
        let w = cx.get(&self.0)?;
        let w = cx.narrow(&w, 0, 0, 1)?;
        cx.mul(x, &w)
    }
}

fn watched(bytes: usize, seen: &Seen) -> Node {
    let w = Param::full(DType::F32, &[bytes / 4], 1.0).unwrap();
    Node::layer(Blob(w, seen.clone()))
}

fn blob(bytes: usize) -> Node {
    watched(bytes, &Seen::default())
}

/// Calls its children in order; each gets the mask that came by name, if one came.
struct Tower(Vec<(&'static str, Node)>);

impl Params for Tower {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        for (name, child) in &self.0 {
            visit.child(name, child);
        }
    }
}

impl Composite for Tower {
    fn children(&self) -> Vec<(String, Node)> {
        let named = self.0.iter();
        named
            .map(|(name, child)| ((*name).to_owned(), child.clone()))
            .collect()
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> Result<Value> {
        let mut x = input.at(0)?;
        for (name, _) in &self.0 {
            let mut values = Values::new().arg(x);
            if let Ok(mask) = input.get("mask") {
                values = values.named("mask", mask);
            }
            x = run.child(name, values)?;
        }
        Ok(x)
    }
}

fn auto(model: impl Into<Node>, config: &WrapConfig) -> AutoWrapped {
    match wrap(model, config).unwrap() {
        Wrapped::Auto(auto) => auto,
        Wrapped::Engine(engine) => panic!("one engine: {engine:?}"),
    }
}

fn data(rows: usize) -> HostTensor {
    HostTensor::from_slice(&vec![1.0f32; rows * 2], &[rows, 2]).unwrap()
}

/// The published thresholds: 16 KiB, and a share of the whole for each worker and one more.
#[test]
fn thresholds_are_as_published() {
    let config = WrapConfig::default();
    assert_eq!(config.lower_threshold, 16 * 1024);
    assert_eq!(config.upper_threshold, None);
    let told = |model: Node, workers: usize| {
        let decisions = decide(&model, &config, workers).unwrap();
        let line = |d: &roundpipe::wrap::Decision| {
            let one = if d.one_microbatch { " one" } else { "" };
            format!("{}={:?}{one}", d.path, d.action)
        };
        decisions.iter().map(line).collect::<Vec<_>>().join(", ")
    };
    let tower = |sizes: [usize; 2]| {
        let children = vec![("a", blob(sizes[0])), ("b", blob(sizes[1]))];
        Node::composite(Tower(children))
    };
    let sizes = [8 * KIB, 640 * KIB];
    assert_eq!(told(tower(sizes), 1), "=Recurse, a=Whole one, b=Whole");
    let sizes = [16 * KIB, 640 * KIB];
    assert_eq!(told(tower(sizes), 1), "=Recurse, a=Whole, b=Whole");
    let nested = |b: usize| {
        let inner = tower([32 * KIB, 32 * KIB]);
        Node::composite(Tower(vec![("a", inner), ("b", blob(b))]))
    };
    // 64 KiB of 128 are half for one worker, and more than a third for two.
    assert_eq!(told(nested(64 * KIB), 1), "=Recurse, a=Whole, b=Whole");
    assert_eq!(
        told(nested(64 * KIB), 2),
        "=Recurse, a=Recurse, a.a=Whole, a.b=Whole, b=Whole"
    );
}

/// A wrapped model is called after the line that made it, and its engines after their paths.
#[test]
fn engines_have_the_name_of_the_call_and_their_path() {
    let list = Node::list([blob(64 * KIB), blob(64 * KIB)]);
    let config = WrapConfig {
        ring: Some(ring(1)),
        ..WrapConfig::default()
    };
    let line = line!() + 1;
    let Ok(Wrapped::Auto(model)) = wrap(list, &config) else {
        panic!("a list is taken apart")
    };
    let names: Vec<&str> = model.engines().map(|(_, engine)| engine.name()).collect();
    assert_eq!(
        names,
        [format!("trees.rs:{line}.0"), format!("trees.rs:{line}.1")]
    );
}

/// Settings of one engine are laid over those of all, so the number of microbatches stays.
#[test]
fn settings_of_one_engine_are_laid_over_those_of_all() {
    let seen = Seen::default();
    let mut config = WrapConfig {
        ring: Some(ring(1)),
        run_config: RunConfig::new().num_microbatch(4),
        ..WrapConfig::default()
    };
    let grain = RunConfig::new().recompute_grain(Grain::Layer);
    config.override_config.insert("a".into(), grain);
    let tower = Tower(vec![("a", watched(64 * KIB, &seen)), ("b", blob(64 * KIB))]);
    let model = auto(Node::composite(tower), &config);
    let without = RunConfig::new().requires_grad(false);
    model.forward(data(12), &without).unwrap();
    assert_eq!(*seen.lock().unwrap(), [3, 3, 3, 3]);
}

/// Steps reach all engines, and a forward after `synchronize` reads what they wrote.
#[test]
fn a_model_in_parts_steps_and_reads_the_newest_weights() {
    let config = WrapConfig {
        ring: Some(ring(1)),
        optimizer: Some(Sgd::default().into()),
        ..WrapConfig::default()
    };
    let list = Node::list([blob(64 * KIB), blob(64 * KIB)]);
    let model = auto(list, &config);
    let forward = model.forward(data(6), &RunConfig::new()).unwrap();
    forward.backward(data(6)).unwrap();
    let step = model.step(
        |params| {
            params.iter_mut().for_each(|param| param.value[0] = 5.0);
            Ok(())
        },
        Lag::One,
    );
    step.unwrap();
    model.synchronize().unwrap();
    let copies = model.optim_named_parameters("m", true).unwrap();
    let values: Vec<(String, f32)> = copies
        .map(|(name, copy)| (name, copy.to_vec().unwrap()[0]))
        .collect();
    assert_eq!(values, [("m.0.w".into(), 5.0), ("m.1.w".into(), 5.0)]);
    let without = RunConfig::new().requires_grad(false);
    let forward = model.forward(data(6), &without).unwrap();
    let output = forward.output().clone().tensor().unwrap();
    assert_eq!(output.to_vec::<f32>().unwrap(), [25.0; 12]);
}

/// Multiplies with a mask that comes by name.
struct Masked(Scale);

impl Params for Masked {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Layer for Masked {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let Tree::List(mut values) = input else {
            panic!("a value and names")
        };
        let mask = values[1].take("mask")?.tensor()?;
        let x = values.remove(0).tensor()?;
        let x = self.0.forward(cx, &x)?;
        Ok(cx.mul(&x, &mask)?.into())
    }
}

/// Every layer gets the same mask of one row beside microbatches that were never merged.
#[test]
fn every_layer_gets_the_same_mask() {
    let mut config = WrapConfig {
        ring: Some(ring(1)),
        lower_threshold: 1,
        upper_threshold: Some(0),
        ..WrapConfig::default()
    };
    let own = RunConfig::new().num_microbatch(4);
    for (name, merge) in [("l0", MergeOutput::Off), ("l1", MergeOutput::Auto)] {
        let own = own.clone().merge_output(merge);
        config.override_config.insert(name.into(), own);
    }
    let layer = |value| Node::layer(Masked(Scale(number(DType::F32, value))));
    let model = Tower(vec![("l0", layer(2.0)), ("l1", layer(3.0))]);
    let model = auto(Node::composite(model), &config);
    let mask = HostTensor::from_slice(&[1.0f32, 0.0], &[1, 2]).unwrap();
    let inputs = Inputs::new().arg(data(8)).named("mask", mask);
    let forward = model.forward(inputs, &RunConfig::new()).unwrap();
    let output = forward.output().clone().tensor().unwrap();
    assert_eq!(output.dims(), [8, 2]);
    assert_eq!(output.to_vec::<f32>().unwrap(), [6.0f32, 0.0].repeat(8));
    forward.backward(data(8)).unwrap();
    model.synchronize().unwrap();
    let grads = model.gradients().unwrap();
    let grad = |at: usize| grads[at].1.as_ref().unwrap().item().unwrap();
    assert_eq!((grad(0), grad(1)), (24.0, 16.0));
}

/// Without devices a wrapped model takes all that can be used, as an engine does.
#[test]
fn wrap_looks_for_devices_as_the_builder_does() {
    let config = WrapConfig {
        ring_options: RingOptions {
            memory: Some(Bytes::gib(1)),
            ..RingOptions::default()
        },
        ..WrapConfig::default()
    };
    let model = auto(Node::list([blob(64 * KIB), blob(64 * KIB)]), &config);
    let all = Devices::all().unwrap();
    assert_eq!(model.ring().len(), all.workers.len());
    assert_eq!(model.ring().notes(), all.notes());
    let one = WrapConfig {
        devices: cpus(3),
        ring_options: RingOptions {
            memory: Some(Bytes::mib(8)),
            ..RingOptions::default()
        },
        ..WrapConfig::default()
    };
    let model = auto(Node::list([blob(64 * KIB), blob(64 * KIB)]), &one);
    assert_eq!(model.ring().len(), 3);
}

/// The type of the optimizer's copies is a setting of a wrapped model too.
#[test]
fn wrap_takes_the_type_of_copies() {
    let config = WrapConfig {
        ring: Some(ring(1)),
        optimizer: Some(roundpipe::optim::Adam::default().into()),
        optim_dtype: DType::BF16,
        ..WrapConfig::default()
    };
    let layer = || Node::layer(Scale(number(DType::BF16, 2.0)));
    let model = auto(Node::list([layer(), layer()]), &config);
    let x = HostTensor::from_f64s(&[1.0; 4], DType::BF16, &[4, 1]).unwrap();
    let forward = model.forward(x.clone(), &RunConfig::new()).unwrap();
    forward.backward(x).unwrap();
    model.update(&Update::new(0.5), Lag::Zero).unwrap();
    model.synchronize().unwrap();
    for copy in model.optim_parameters().unwrap() {
        assert_eq!(copy.value().len(), 2);
        assert_eq!(copy.to_vec().unwrap(), [1.5]);
    }
}
