//! Hooks and hidden outputs: each value once, the bits of a plain loop, and no trace in training.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roundpipe::{
    Bytes, Cpu, Cx, DType, ExecutePlan, Grain, HostTensor, Lag, LayerGradient, LayerOutput,
    PlanKind, RngSite, RoundPipe, RunConfig, Sequential, Tensor, Tree, Update, Worker,
};

use crate::host_loss::devices;
use crate::invisible::{self, Way};
use crate::models;

const MICROBATCHES: usize = 3;

/// Bits of values by layer and microbatch.
type Values = BTreeMap<(String, usize), Vec<u64>>;

/// What hooks saw; a value that comes twice is a failure.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Values>>);

impl Seen {
    fn note(&self, layer: &str, microbatch: usize, tensors: &[&HostTensor]) {
        let values = tensors.iter().flat_map(|t| t.to_f64_vec().unwrap());
        let key = (layer.to_owned(), microbatch);
        let before = self.0.lock().unwrap().insert(key, models::f64_bits(values));
        assert!(before.is_none(), "{layer}, microbatch {microbatch}: twice");
    }

    fn output(&self) -> impl Fn(&LayerOutput<'_>) + Send + Sync + 'static {
        let seen = self.clone();
        move |shown| seen.note(shown.layer, shown.microbatch, &shown.output.leaves())
    }

    fn gradient(&self) -> impl Fn(&LayerGradient<'_>) + Send + Sync + 'static {
        let seen = self.clone();
        move |shown| {
            let grads: Vec<&HostTensor> = shown.grads.iter().flatten().collect();
            seen.note(shown.layer, shown.microbatch, &grads);
        }
    }

    fn take(&self) -> Values {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Outputs of all layers, and gradients of them, by a tape for the layers behind each.
fn plain(model: &Sequential, x: &HostTensor, weights: &HostTensor) -> [Values; 2] {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(32)).unwrap();
    let bits = |t: &Tensor| models::f64_bits(t.to_f64_vec().unwrap());
    let mut found = [BTreeMap::new(), BTreeMap::new()];
    let batch = x.dims()[0];
    for m in 0..MICROBATCHES {
        let cut =
            |t: &HostTensor| models::upload(&worker, &models::piece(t, batch, MICROBATCHES, m));
        let layers: Vec<_> = model.layers().collect();
        let mut value = cut(x);
        for (at, (name, layer)) in layers.iter().enumerate() {
            let mut cx = Cx::infer(&worker);
            value = layer.run(&mut cx, value.into()).unwrap().tensor().unwrap();
            let key = ((*name).to_owned(), m);
            found[0].insert(key.clone(), bits(&value));
            let mut cx = Cx::train(&worker);
            let start = cx.input(&value).unwrap();
            let mut rest: Tree = start.clone().into();
            for (_, layer) in &layers[at + 1..] {
                rest = layer.run(&mut cx, rest).unwrap();
            }
            let loss = models::weighted(&mut cx, rest, cut(weights).into()).unwrap();
            let grad = cx.backward(&loss).unwrap().take(&start).unwrap();
            found[1].insert(key, bits(&grad));
        }
    }
    found
}

fn ways() -> Vec<(String, Way)> {
    let mut ways = Vec::new();
    for (sim, workers) in [(false, 1), (false, 3), (true, 2)] {
        for grain in [Grain::Stage, Grain::Layer] {
            for sizes in [
                None,
                Some((vec![1, 1], vec![2, 1, 1])),
                Some((vec![], vec![4])),
            ] {
                let plan = sizes.as_ref().map(|(forward, backward)| {
                    ExecutePlan::from_sizes(PlanKind::Fused, forward, backward)
                });
                let way = Way {
                    grain,
                    plan,
                    microbatches: MICROBATCHES,
                    ..Way::threaded(devices(sim, workers))
                };
                ways.push((
                    format!("{workers} workers, sim {sim}, {grain:?}, {sizes:?}"),
                    way,
                ));
            }
        }
    }
    ways
}

/// Every layer and microbatch is shown once, recompute or not, with the bits of a plain loop; and
/// what is trained is what would have been.
#[test]
fn hooks_see_every_value_once_and_change_none() {
    let (x, weights) = models::numbers(0, 7, DType::F32);
    let [outputs, grads] = plain(&models::perceptron(DType::F32), &x, &weights);
    let mut trained = None;
    for (name, way) in ways() {
        let model = models::perceptron(DType::F32);
        let engine = invisible::engine(&model, &way);
        let (seen, seen_grads) = (Seen::default(), Seen::default());
        for (layer, _) in model.layers() {
            engine.on_output(layer, seen.output()).unwrap();
            engine.on_gradient(layer, seen_grads.gradient()).unwrap();
        }
        engine
            .forward_backward(x.clone(), weights.clone(), models::weighted)
            .unwrap();
        engine.synchronize().unwrap();
        assert!(seen.take() == outputs, "{name}: outputs");
        assert!(seen_grads.take() == grads, "{name}: gradients");
        engine.update(&Update::new(0.1), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        let without = models::perceptron(DType::F32);
        let plain = trained.get_or_insert_with(|| {
            let engine = invisible::engine(&without, &way);
            engine
                .forward_backward(x.clone(), weights.clone(), models::weighted)
                .unwrap();
            engine.update(&Update::new(0.1), Lag::Zero).unwrap();
            engine.synchronize().unwrap();
            models::params(&without)
        });
        assert!(*plain == models::params(&model), "{name}: training");
    }
}

fn small(model: &Sequential, microbatches: usize) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .devices(models::cpus(2))
        .memory(Bytes::mib(16))
        .run_config(RunConfig::new().num_microbatch(microbatches))
        .build()
        .unwrap()
}

/// A forward and its backward, in two calls of the user, show each value once too.
#[test]
fn a_separate_backward_shows_its_gradients() {
    let (x, weights) = models::numbers(0, 7, DType::F32);
    let model = models::perceptron(DType::F32);
    let [outputs, grads] = plain(&model, &x, &weights);
    let (seen, seen_grads) = (Seen::default(), Seen::default());
    let mut builder = RoundPipe::builder(model.clone())
        .devices(models::cpus(2))
        .memory(Bytes::mib(16))
        .run_config(RunConfig::new().num_microbatch(MICROBATCHES));
    for (layer, _) in model.layers() {
        builder = builder
            .on_output(layer, seen.output())
            .on_gradient(layer, seen_grads.gradient());
    }
    let engine = builder.build().unwrap();
    let forward = engine.forward(x, &RunConfig::new()).unwrap();
    assert!(seen.take() == outputs);
    assert!(seen_grads.take().is_empty());
    forward.backward(weights).unwrap();
    engine.synchronize().unwrap();
    assert!(seen_grads.take() == grads);
    assert!(seen.take().is_empty(), "a recompute shows nothing");
}

/// A hidden output is what the layers before it give, merged as outputs are.
#[test]
fn hidden_outputs_are_those_of_the_layers() {
    let (inputs, labels) = models::tokens(0, 7, DType::F32);
    let model = models::transformer(DType::F32, false);
    // The layers up to and with the hidden one, as a model of their own.
    let front = model
        .layers()
        .take(3)
        .fold(Sequential::new(), |front, (name, layer)| {
            front.named(name, models::Shared(layer.clone()))
        });
    let batch = (7, MICROBATCHES);
    let config = RunConfig::new().hidden(["block1", "embed"]);
    for (sim, workers) in [(false, 1), (false, 3), (true, 2)] {
        for training in [true, false] {
            let way = Way {
                microbatches: MICROBATCHES,
                ..Way::threaded(devices(sim, workers))
            };
            let engine = invisible::engine(&models::transformer(DType::F32, false), &way);
            engine.set_training(training);
            let hidden = |tree: &Tree<HostTensor>| {
                let tensor = tree.get("hidden").unwrap().clone().tensor().unwrap();
                (
                    tensor.dims().to_vec(),
                    models::f64_bits(tensor.to_f64_vec().unwrap()),
                )
            };
            let config = config.clone().requires_grad(training);
            let forward = engine.forward(inputs.clone(), &config).unwrap();
            let found = hidden(&forward.hidden("block1").unwrap());
            assert_eq!(found.0, [7, models::SEQ, models::WIDTH]);
            let want = plain_hidden(&front, &inputs, batch, training);
            assert!(
                found.1 == want,
                "{workers} workers, sim {sim}, training {training}"
            );
            assert_eq!(hidden(&forward.hidden("embed").unwrap()).0, found.0);
            drop(forward);
        }
        let engine = invisible::engine(
            &models::transformer(DType::F32, false),
            &Way {
                microbatches: MICROBATCHES,
                ..Way::threaded(devices(sim, workers))
            },
        );
        let call = engine.train(inputs.clone()).labels(labels.clone());
        let trained = call
            .loss(models::token_loss)
            .config(config.clone())
            .run()
            .unwrap();
        let tensor = trained.hidden["block1"].get("hidden").unwrap().clone();
        let found = models::f64_bits(tensor.tensor().unwrap().to_f64_vec().unwrap());
        assert!(found == plain_hidden(&front, &inputs, batch, true));
        assert_eq!(trained.hidden.len(), 2);
    }
}

/// What some layers give in a map, under `hidden`, of all microbatches one after another.
fn plain_hidden(
    layers: &Sequential,
    inputs: &roundpipe::HostInputs,
    (batch, microbatches): (usize, usize),
    training: bool,
) -> Vec<u64> {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(32)).unwrap();
    let mut all = Vec::new();
    for m in 0..microbatches {
        let cut =
            |t: &HostTensor| models::upload(&worker, &models::piece(t, batch, microbatches, m));
        let mut value = inputs.clone().into_tree().map_ref(cut);
        for (index, (_, layer)) in layers.layers().enumerate() {
            let mut cx = Cx::new(&worker, false, training).at(RngSite {
                seed: models::SEED,
                step: 0,
                microbatch: m as u32,
                layer: index as u32,
                site: 0,
            });
            value = layer.run(&mut cx, value).unwrap();
        }
        let hidden = value.take("hidden").unwrap().tensor().unwrap();
        all.extend(models::f64_bits(hidden.to_f64_vec().unwrap()));
    }
    all
}

/// A layer that does not exist is named with those that do, before anything is changed.
#[test]
fn layers_that_do_not_exist_are_refused() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 2);
    let (x, _) = models::numbers(0, 4, DType::F32);
    let want = "no layer `fourth`; there are `first`, `bend`, `second`, `third`";
    let text = engine.on_output("fourth", |_| ()).unwrap_err().to_string();
    assert_eq!(text, format!("on_output: {want}"));
    let config = RunConfig::new().hidden(["fourth"]);
    let text = engine.forward(x.clone(), &config).unwrap_err().to_string();
    assert_eq!(text, format!("hidden: {want}"));
    let forward = engine.forward(x, &RunConfig::new()).unwrap();
    let text = forward.hidden("first").unwrap_err().to_string();
    assert!(text.contains("`first` was not asked for"), "{text}");
    let builder = RoundPipe::builder(models::perceptron(DType::F32)).devices(models::cpus(1));
    let built = builder
        .memory(Bytes::mib(16))
        .on_gradient("fourth", |_| ())
        .build();
    let text = built.err().unwrap().to_string();
    assert_eq!(text, format!("on_gradient: {want}"));
}

/// A hook that is taken off sees nothing more; one that writes into its copy changes nothing.
#[test]
fn a_hook_can_be_removed_and_owns_its_copy() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 2);
    let (x, _) = models::numbers(0, 4, DType::F32);
    let run = || {
        let forward = engine.forward(x.clone(), &RunConfig::new()).unwrap();
        let output = forward.output().unwrap().clone().tensor().unwrap();
        output.to_vec::<f32>().unwrap()
    };
    let want = run();
    let count = Arc::new(Mutex::new(0));
    let counted = count.clone();
    let handle = engine
        .on_output("first", move |shown| {
            *counted.lock().unwrap() += 1;
            for tensor in shown.output.leaves() {
                tensor.write().unwrap().as_mut_slice::<f32>().fill(7.0);
            }
        })
        .unwrap();
    assert_eq!(run(), want);
    assert_eq!(*count.lock().unwrap(), 2);
    handle.remove();
    assert_eq!(run(), want);
    assert_eq!(*count.lock().unwrap(), 2);
}

/// A hook that panics fails its call with the place; without it the engine goes on.
#[test]
fn a_hook_that_panics_fails_its_call() {
    let model = models::perceptron(DType::F32);
    let engine = small(&model, 2);
    let (x, weights) = models::numbers(0, 4, DType::F32);
    let handle = engine
        .on_gradient("second", |_| panic!("no such hook"))
        .unwrap();
    let trained = engine.forward_backward(x.clone(), weights.clone(), models::weighted);
    // The losses may be there before the backward fails.
    let error = match trained {
        Err(error) => error,
        Ok(_) => engine.synchronize().unwrap_err(),
    };
    assert!(error.to_string().contains("no such hook"), "{error}");
    handle.remove();
    engine
        .forward_backward(x.clone(), weights.clone(), models::weighted)
        .unwrap();
    let fresh = small(&models::perceptron(DType::F32), 2);
    fresh
        .forward_backward(x, weights, models::weighted)
        .unwrap();
    assert!(models::grads(&engine) == models::grads(&fresh));
}
