//! One weight in two engines: the bits of one engine over the whole, in every type, at both lags,
//! over several calls per step, with and without a loss scale.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roundpipe::nn::{Dropout, Embedding, Func, Init, Linear};
use roundpipe::wrap::{Run, Value, Values};
use roundpipe::{
    AutoWrapped, Bytes, Composite, Cx, DType, Device, GradScaler, HostTensor, Lag, Node,
    ParamGroup, ParamVisitor, Params, RingOptions, RoundPipe, RunConfig, ScalerState, Sequential,
    StepReport, Tensor, TrainingState, Update, WrapConfig,
};

use roundpipe_tensor::SimWorld;

use super::{Block, auto, bits, config, output_bits, ring, rule};

const VOCAB: usize = 11;
const WIDTH: usize = 8;
const BATCH: usize = 5;
const SEQ: usize = 3;

/// An embedding, blocks, and a head over the embedding's weight.
struct Decoder {
    embed: Arc<Embedding>,
    blocks: Vec<Arc<Block>>,
    head: Arc<Linear>,
}

impl Decoder {
    fn new(dtype: DType) -> Arc<Self> {
        let mut init = Init::new(3, dtype);
        let embed = Embedding::new(&mut init, VOCAB, WIDTH, 0.5).unwrap();
        let mut block = || Block {
            linear: Linear::new(&mut init, WIDTH, WIDTH, true).unwrap(),
            dropout: Dropout { p: 0.2 },
        };
        let blocks = (0..3).map(|_| Arc::new(block())).collect();
        let head = Linear {
            weight: embed.weight.clone(),
            bias: None,
        };
        Arc::new(Self {
            embed: Arc::new(embed),
            blocks,
            head: Arc::new(head),
        })
    }

    /// The layers with their names in the tree.
    fn layers(&self) -> Vec<(String, Node)> {
        let mut layers = vec![("embed".to_owned(), Node::Layer(self.embed.clone()))];
        for (i, block) in self.blocks.iter().enumerate() {
            layers.push((format!("blocks.{i}"), Node::Layer(block.clone())));
        }
        layers.push(("head".to_owned(), Node::Layer(self.head.clone())));
        layers
    }
}

impl Params for Decoder {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.layers()
            .iter()
            .for_each(|(name, layer)| visit.child(name, layer));
    }
}

impl Composite for Decoder {
    fn children(&self) -> Vec<(String, Node)> {
        let blocks = self.blocks.iter().map(|block| Node::Layer(block.clone()));
        vec![
            ("embed".into(), Node::Layer(self.embed.clone())),
            ("blocks".into(), Node::list(blocks)),
            ("head".into(), Node::Layer(self.head.clone())),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
        let x = run.child("embed", input)?;
        let x = run.child("blocks", x)?;
        run.child("head", x)
    }
}

/// The same model as one engine, or in parts.
enum Model {
    One(RoundPipe<Sequential>),
    Parts(AutoWrapped),
}

macro_rules! either {
    ($model:expr, $it:ident => $do:expr) => {
        match $model {
            Model::One($it) => $do,
            Model::Parts($it) => $do,
        }
    };
}

struct Layered(Node);

impl Params for Layered {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl roundpipe::Layer for Layered {
    fn run(&self, cx: &mut Cx, input: roundpipe::Tree) -> roundpipe::TensorResult<roundpipe::Tree> {
        let Node::Layer(layer) = &self.0 else {
            unreachable!("all of them are layers")
        };
        layer.run(cx, input)
    }
}

impl Model {
    fn one(decoder: &Decoder) -> Self {
        let named =
            |model: Sequential, (name, node): (String, Node)| model.named(name, Layered(node));
        let layers = decoder.layers().into_iter().fold(Sequential::new(), named);
        let engine = RoundPipe::builder(layers)
            .optimizer(rule())
            .optimizer_threads(1)
            .seed(5)
            .run_config(RunConfig::new().num_microbatch(3))
            .ring(&ring(2))
            .build();
        Self::One(engine.unwrap())
    }

    fn parts(decoder: &Arc<Decoder>, workers: usize) -> Self {
        Self::parts_with(decoder, &in_parts(workers))
    }

    fn parts_with(decoder: &Arc<Decoder>, config: &WrapConfig) -> Self {
        let model = auto(Node::Composite(decoder.clone()), config);
        let paths: Vec<&str> = model.engines().map(|(path, _)| path).collect();
        assert_eq!(paths, ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]);
        Self::Parts(model)
    }

    /// One forward and backward; the bits of the output.
    fn call(&self, number: usize, dtype: DType, scale: f64) -> Vec<u64> {
        let (ids, grads) = (ids(number), grads(number, dtype, scale));
        match self {
            Self::One(engine) => {
                let forward = engine.forward(ids, &RunConfig::new()).unwrap();
                let output = output_bits(forward.output().unwrap());
                forward.backward(grads).unwrap();
                output
            }
            Self::Parts(model) => {
                let forward = model.forward(ids, &RunConfig::new()).unwrap();
                let output = output_bits(forward.output());
                forward.backward(grads).unwrap();
                output
            }
        }
    }

    fn gradients(&self) -> Vec<(String, Option<Vec<u64>>)> {
        either!(self, it => it.synchronize()).unwrap();
        let grads = either!(self, it => it.gradients()).unwrap();
        let read = |grad: Option<HostTensor>| grad.map(|grad| bits(&grad));
        grads
            .into_iter()
            .map(|(name, grad)| (name, read(grad)))
            .collect()
    }

    fn update(&self, update: &Update, lag: Lag) -> roundpipe::engine::StepHandle {
        either!(self, it => it.update(update, lag)).unwrap()
    }

    fn state(&self) -> TrainingState {
        either!(self, it => it.training_state()).unwrap()
    }
}

fn in_parts(workers: usize) -> WrapConfig {
    WrapConfig {
        lower_threshold: 1,
        upper_threshold: Some(0),
        ..config(workers)
    }
}

fn ids(number: usize) -> HostTensor {
    let ids: Vec<i64> = (0..BATCH * SEQ)
        .map(|i| ((i * i * 7 + number * 5) % VOCAB) as i64)
        .collect();
    HostTensor::from_slice(&ids, &[BATCH, SEQ]).unwrap()
}

fn grads(number: usize, dtype: DType, scale: f64) -> HostTensor {
    let values: Vec<f64> = (0..BATCH * SEQ * VOCAB)
        .map(|i| scale * (((i * 29 + number * 13) % 17) as f64 / 64.0 - 0.125))
        .collect();
    HostTensor::from_f64s(&values, dtype, &[BATCH, SEQ, VOCAB]).unwrap()
}

fn clipped() -> Update {
    Update {
        clip: Some(0.7),
        clip_value: Some(0.3),
        skip_nonfinite: true,
        ..Update::new(0.01)
    }
}

/// Updates, calls, and the values and moments of each parameter.
type StateBits = (u64, u64, Vec<(String, Vec<Vec<u64>>)>);

fn state_bits(state: &TrainingState) -> StateBits {
    let params = state.params.iter().map(|(name, param)| {
        let tensors = std::iter::once(&param.value).chain(&param.moments);
        (name.clone(), tensors.map(bits).collect())
    });
    (state.updates, state.calls, params.collect())
}

fn weights(decoder: &Decoder) -> Vec<Vec<u64>> {
    let read = |(_, param): (String, roundpipe::Param)| {
        let buf = param.data();
        let tensor = HostTensor::new(buf, param.dtype(), param.shape().dims()).unwrap();
        bits(&tensor)
    };
    decoder.named_params().into_iter().map(read).collect()
}

type Trail = (
    Vec<Vec<u64>>,
    Vec<Vec<(String, Option<Vec<u64>>)>>,
    Vec<u64>,
    StateBits,
    Vec<Vec<u64>>,
);

/// Four steps of so many calls each. At lag 1 the next call runs beside the update.
fn train(model: &Model, decoder: &Decoder, lag: Lag, calls: usize, dtype: DType) -> Trail {
    let (mut outputs, mut grads, mut steps) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..4 {
        for call in 0..calls {
            outputs.push(model.call(step * calls + call, dtype, 1.0));
        }
        if step == 3 {
            grads.push(model.gradients());
        }
        steps.push(model.update(&clipped(), lag));
    }
    let norm = |step: &roundpipe::engine::StepHandle| step.wait().unwrap().grad_norm.to_bits();
    let norms = steps.iter().map(norm).collect();
    let state = state_bits(&model.state());
    (outputs, grads, norms, state, weights(decoder))
}

/// A weight in the first and the last engine has the bits that it has in one engine: outputs,
/// gradients of both uses, norms, masters, moments, working weights.
#[test]
fn a_tied_weight_equals_one_engine() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (lag, calls) in [(Lag::Zero, 1), (Lag::Zero, 3), (Lag::One, 1), (Lag::One, 2)] {
            let decoder = Decoder::new(dtype);
            let want = train(&Model::one(&decoder), &decoder, lag, calls, dtype);
            let uses = want.1[0]
                .iter()
                .filter(|(name, _)| name == "embed.weight" || name == "head.weight");
            assert_eq!(uses.filter(|(_, grad)| grad.is_some()).count(), 2);
            for workers in [1, 2, 3] {
                let decoder = Decoder::new(dtype);
                let model = Model::parts(&decoder, workers);
                let have = train(&model, &decoder, lag, calls, dtype);
                assert_eq!(
                    have, want,
                    "{dtype:?}, {lag:?}, {calls} calls, {workers} workers"
                );
            }
        }
    }
}

/// Both engines see the version of one update, although only one of them is the weight's home.
#[test]
fn both_engines_read_one_version() {
    let decoder = Decoder::new(DType::F32);
    let Model::Parts(model) = Model::parts(&decoder, 2) else {
        unreachable!("it was made in parts")
    };
    let before = decoder.embed.weight.to_vec::<f32>().unwrap();
    let embed = || {
        let (_, engine) = model.engines().next().unwrap();
        let ids = HostTensor::from_slice(&[4i64], &[1, 1]).unwrap();
        let output = engine.forward(ids, &RunConfig::new()).unwrap();
        output
            .output()
            .unwrap()
            .clone()
            .tensor()
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    };
    let head = || {
        let (_, engine) = model.engines().last().unwrap();
        let mut one = vec![0.0f32; WIDTH];
        one[2] = 1.0;
        let one = HostTensor::from_slice(&one, &[1, 1, WIDTH]).unwrap();
        let output = engine.forward(one, &RunConfig::new()).unwrap();
        output
            .output()
            .unwrap()
            .clone()
            .tensor()
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    };
    for lag in [Lag::Zero, Lag::One, Lag::One] {
        let forward = model.forward(ids(0), &RunConfig::new()).unwrap();
        forward.backward(grads(0, DType::F32, 1.0)).unwrap();
        model.update(&Update::new(0.1), lag).unwrap();
        assert_eq!(embed()[2].to_bits(), head()[4].to_bits(), "{lag:?}");
    }
    model.synchronize().unwrap();
    assert_ne!(before[4 * WIDTH + 2], embed()[2]);
    assert_eq!(embed()[2].to_bits(), head()[4].to_bits());
}

/// The optimizer, the state and memory count a tied weight once; groups know it by both names.
#[test]
fn a_tied_weight_counts_once() {
    let decoder = Decoder::new(DType::BF16);
    let Model::Parts(model) = Model::parts(&decoder, 1) else {
        unreachable!("it was made in parts")
    };
    let names = |once| -> Vec<String> {
        let named = model.optim_named_parameters("", once).unwrap();
        named.map(|(name, _)| name).collect()
    };
    assert_eq!(names(true).len(), 7);
    assert!(!names(true).contains(&"head.weight".to_owned()));
    assert_eq!(names(false).len(), 8);
    assert_eq!(model.optim_parameters().unwrap().count(), 7);
    assert!(model.unwrapped_params().is_empty());
    let state = model.training_state().unwrap();
    assert_eq!(state.params.len(), 7);
    let (_, engine) = model.engines().next().unwrap();
    let elements = VOCAB * WIDTH + 3 * (WIDTH * WIDTH + WIDTH);
    let masters = engine.host_bytes().masters;
    // Each parameter's tie bits and place end at whole words.
    let least = 2 * elements + elements / 8;
    assert!((least..least + 7 * 4).contains(&masters), "{masters}");
    model
        .set_groups([ParamGroup::matching("head.*").frozen(true)])
        .unwrap();
    let forward = model.forward(ids(0), &RunConfig::new()).unwrap();
    forward.backward(grads(0, DType::BF16, 1.0)).unwrap();
    let before = weights(&decoder);
    model.update(&Update::new(0.1), Lag::Zero).unwrap();
    model.synchronize().unwrap();
    let after = weights(&decoder);
    assert_eq!(before[0], after[0], "the head's weight is the embedding's");
    assert_ne!(before[1], after[1]);
}

/// A run that goes on from a state has the bits of one that never stopped, dropout included.
#[test]
fn a_run_in_parts_goes_on_from_its_state() {
    let dtype = DType::BF16;
    let run = |model: &Model, calls: std::ops::Range<usize>| {
        for call in calls {
            model.call(call, dtype, 1.0);
            model.update(&clipped(), Lag::One);
        }
    };
    let decoder = Decoder::new(dtype);
    let model = Model::parts(&decoder, 2);
    run(&model, 0..5);
    let want = (state_bits(&model.state()), weights(&decoder));
    let decoder = Decoder::new(dtype);
    let model = Model::parts(&decoder, 2);
    run(&model, 0..2);
    either!(&model, it => it.synchronize()).unwrap();
    let state = model.state();
    drop(model);
    let decoder = Decoder::new(dtype);
    let Model::Parts(parts) = Model::parts(&decoder, 1) else {
        unreachable!("it was made in parts")
    };
    parts.load_training_state(&state).unwrap();
    let model = Model::Parts(parts);
    // A step at lag 1 was waited for, so the run that went on reads what this one reads, but for
    // the call right behind it.
    let uninterrupted = Decoder::new(dtype);
    let whole = Model::parts(&uninterrupted, 2);
    run(&whole, 0..2);
    either!(&whole, it => it.synchronize()).unwrap();
    run(&whole, 2..5);
    run(&model, 2..5);
    let have = (state_bits(&model.state()), weights(&decoder));
    assert_eq!(have, (state_bits(&whole.state()), weights(&uninterrupted)));
    assert_eq!(
        (have.0).1,
        (want.0).1,
        "the same place in the random stream"
    );
}

/// From a checkpoint the run goes on as if it had never stopped, also right behind a step at lag 1;
/// one engine of several cannot be saved by itself.
#[test]
fn a_run_in_parts_goes_on_from_a_checkpoint() {
    let dtype = DType::BF16;
    let run = |model: &Model, calls: std::ops::Range<usize>| {
        for call in calls {
            model.call(call, dtype, 1.0);
            model.update(&clipped(), Lag::One);
        }
    };
    let whole = Decoder::new(dtype);
    let model = Model::parts(&whole, 2);
    run(&model, 0..5);
    let want = (state_bits(&model.state()), weights(&whole));

    let path = std::env::temp_dir().join(format!("roundpipe-parts-{}", std::process::id()));
    let model = Model::parts(&Decoder::new(dtype), 3);
    run(&model, 0..2);
    let Model::Parts(parts) = &model else {
        unreachable!("it was made in parts")
    };
    parts.save(&path, "two steps").unwrap().wait().unwrap();
    let (_, engine) = parts.engines().next().unwrap();
    let error = engine.save(&path, "").unwrap_err().to_string();
    assert!(error.contains("call it on the `AutoWrapped`"), "{error}");
    drop(model);

    let decoder = Decoder::new(dtype);
    let model = Model::parts(&decoder, 1);
    let Model::Parts(parts) = &model else {
        unreachable!("it was made in parts")
    };
    assert_eq!(parts.restore(&path).unwrap().notes, "two steps");
    run(&model, 2..5);
    assert_eq!((state_bits(&model.state()), weights(&decoder)), want);
    std::fs::remove_dir_all(&path).unwrap();
}

/// f16 with a scaler that starts too high: the same steps are skipped, by all engines, and the
/// scale falls and grows as over one engine.
#[test]
fn a_scaler_decides_for_all_engines() {
    let dtype = DType::F16;
    let run = |model: &Model, decoder: &Decoder, lag: Lag, calls: usize| {
        let scaler = GradScaler::new(ScalerState {
            scale: 4_194_304.0,
            interval: 2,
            ..ScalerState::default()
        })
        .unwrap();
        let (mut scales, mut steps) = (Vec::new(), Vec::new());
        for step in 0..12 {
            let scale = either!(model, it => it.loss_scale(&scaler)).unwrap();
            scales.push(scale);
            for call in 0..calls {
                model.call(step * calls + call, dtype, scale);
            }
            let update = Update::new(0.01);
            steps.push(either!(model, it => it.update_scaled(&update, &scaler, lag)).unwrap());
        }
        let reports: Vec<StepReport> = steps.iter().map(|step| step.wait().unwrap()).collect();
        let skipped: Vec<bool> = reports.iter().map(|report| report.skipped).collect();
        let norms: Vec<u64> = reports
            .iter()
            .map(|report| report.grad_norm.to_bits())
            .collect();
        (
            scales,
            skipped,
            norms,
            state_bits(&model.state()),
            weights(decoder),
        )
    };
    for (lag, calls) in [(Lag::Zero, 1), (Lag::Zero, 2), (Lag::One, 1), (Lag::One, 2)] {
        let decoder = Decoder::new(dtype);
        let want = run(&Model::one(&decoder), &decoder, lag, calls);
        assert!(
            want.1[0] && want.1.iter().any(|skipped| !skipped),
            "{:?}",
            want.1
        );
        for workers in [1, 3] {
            let decoder = Decoder::new(dtype);
            let have = run(&Model::parts(&decoder, workers), &decoder, lag, calls);
            assert_eq!(have, want, "{lag:?}, {calls} calls, {workers} workers");
        }
    }
}

/// Gradients that overflow in one engine alone skip the step of all.
#[test]
fn one_engine_that_overflows_skips_all() {
    let decoder = Decoder::new(DType::F16);
    let Model::Parts(model) = Model::parts(&decoder, 2) else {
        unreachable!("it was made in parts")
    };
    let scaler = GradScaler::default();
    let before = weights(&decoder);
    let (_, head) = model.engines().last().unwrap();
    assert_eq!(model.loss_scale(&scaler).unwrap(), 65536.0);
    // The head sees numbers whose sum is too large; what goes on from it is finite.
    let hidden = HostTensor::from_f64s(&[60000.0; WIDTH], DType::F16, &[1, 1, WIDTH]).unwrap();
    let forward = head.forward(hidden, &RunConfig::new()).unwrap();
    let grad = HostTensor::from_f64s(&[2.0; VOCAB], DType::F16, &[1, 1, VOCAB]).unwrap();
    forward.backward(grad).unwrap();
    let forward = model.forward(ids(0), &RunConfig::new()).unwrap();
    forward.backward(grads(0, DType::F16, 1.0)).unwrap();
    let step = model.update_scaled(&Update::new(0.1), &scaler, Lag::Zero);
    assert!(step.unwrap().wait().unwrap().skipped);
    model.synchronize().unwrap();
    assert_eq!(weights(&decoder), before);
    assert_eq!(model.loss_scale(&scaler).unwrap(), 32768.0);
}

/// A loop with an optimizer of the user's: gradients are read, parameters written, gradients
/// dropped.
#[test]
fn gradients_may_be_applied_by_hand() {
    let run = |model: &Model, decoder: &Decoder| {
        let params = decoder.named_params();
        for step in 0..3 {
            model.call(step, DType::F32, 1.0);
            for (name, grad) in model.gradients() {
                // Of both uses of a shared weight, one after the other.
                let name = if name == "head.weight" {
                    "embed.weight".to_owned()
                } else {
                    name
                };
                let (_, param) = params.iter().find(|(known, _)| *known == name).unwrap();
                let mut values = param.to_vec::<f32>().unwrap();
                for (value, grad) in values.iter_mut().zip(grad.unwrap()) {
                    *value -= 0.05 * f64::from_bits(grad) as f32;
                }
                let data = param.data();
                let mut write = data.write(0..data.len()).unwrap();
                write.as_mut_slice::<f32>().copy_from_slice(&values);
            }
            either!(model, it => it.skip_step(Lag::Zero)).unwrap();
        }
        either!(model, it => it.synchronize()).unwrap();
        weights(decoder)
    };
    let decoder = Decoder::new(DType::F32);
    let before = weights(&decoder);
    let want = run(&Model::one(&decoder), &decoder);
    assert_ne!(before, want);
    let decoder = Decoder::new(DType::F32);
    assert_eq!(run(&Model::parts(&decoder, 2), &decoder), want);
}

/// A backward that fails in one engine takes the gradients of all along, at both lags, and the next
/// step has the bits of a run in which nothing failed.
#[test]
fn a_failure_in_one_engine_is_one_of_all() {
    for lag in [Lag::Zero, Lag::One] {
        let run = |fails: bool| {
            let broken = Arc::new(AtomicBool::new(false));
            let asked = broken.clone();
            let decoder = Decoder::new(DType::F32);
            let fragile = Func(move |cx: &mut Cx, x: &Tensor| {
                // Only a recompute fails: the forward has come through before it is set.
                match asked.load(Ordering::SeqCst) {
                    true => cx.reshape(x, &[1, 1]),
                    false => cx.gelu(x),
                }
            });
            let mut layers = decoder.layers();
            layers.insert(2, ("fragile".into(), Node::layer(fragile)));
            let list = Node::List(
                layers
                    .into_iter()
                    .map(|(name, layer)| (name.replace('.', "_"), layer))
                    .collect(),
            );
            let model = auto(list, &in_parts(2));
            let call = |number| model.forward(ids(number), &RunConfig::new()).unwrap();
            call(0).backward(grads(0, DType::F32, 1.0)).unwrap();
            model.update(&clipped(), lag).unwrap();
            model.synchronize().unwrap();
            if fails {
                call(1).backward(grads(1, DType::F32, 1.0)).unwrap();
                let second = call(2);
                broken.store(true, Ordering::SeqCst);
                let back = second.backward(grads(2, DType::F32, 1.0));
                let step = back.and_then(|_| model.update(&clipped(), lag)?.wait().map(drop));
                let text = step.unwrap_err().to_string();
                assert!(text.contains("fragile"), "{text}");
                broken.store(false, Ordering::SeqCst);
                drop(model.synchronize());
                let text = model.update(&clipped(), lag).unwrap_err().to_string();
                assert_eq!(
                    text,
                    "step: no gradients were computed since the last step; call `forward_backward` or `backward` first"
                );
            }
            for number in 1..3 {
                call(number)
                    .backward(grads(number, DType::F32, 1.0))
                    .unwrap();
            }
            model.update(&clipped(), lag).unwrap();
            model.synchronize().unwrap();
            (
                state_bits(&model.training_state().unwrap()),
                weights(&decoder),
            )
        };
        assert_eq!(run(true), run(false), "{lag:?}");
    }
}

/// Workers whose lanes run late and out of step change no bit, and no access is out of order.
#[test]
fn delays_change_no_bit_of_a_tied_weight() {
    let dtype = DType::BF16;
    let decoder = Decoder::new(dtype);
    let want = train(&Model::one(&decoder), &decoder, Lag::One, 2, dtype);
    for seed in 0..4 {
        let world = SimWorld::seeded(seed).unwrap();
        let workers = world.workers(1 + seed as usize % 3).into_iter();
        let options = RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        };
        let late = WrapConfig {
            ring: None,
            devices: workers.map(|worker| worker as Arc<dyn Device>).collect(),
            ring_options: options,
            ..in_parts(1)
        };
        let decoder = Decoder::new(dtype);
        let model = Model::parts_with(&decoder, &late);
        let have = train(&model, &decoder, Lag::One, 2, dtype);
        assert!(have == want, "seed {seed}");
        drop(model);
        assert_eq!(world.races(), [], "seed {seed}");
    }
}
