//! The reference's tests of models, with random small ones instead of downloaded ones: losses of
//! training through the engine, in f16 with a loss scale, beside a plain loop in f32 without engine,
//! microbatches or padding masks. At lag 1 that loop reads the weights of the step before.
//!
//! The reference allows 0.5% for f32 and forwards and 1% for f16, in the mean over all steps; here
//! every step has to be as near.

use std::collections::HashMap;
use std::sync::Arc;

use roundpipe::ops::{CrossEntropy, Reduction};
use roundpipe::optim::Adam;
use roundpipe::{
    AutoWrapped, Bytes, Cpu, Cx, DType, Device, GradScaler, Grain, HostTensor, Inputs, Lag, Node,
    Param, Params, Ring, RingOptions, RoundPipe, RunConfig, ScalerState, Tensor, TensorResult,
    Tree, Update, WrapConfig, Wrapped, wrap,
};
use roundpipe_models::{Model, ModelConfig, preset};
use roundpipe_tensor::Worker;
use serde_json::{Value, json};

const VOCAB: usize = 96;
const STEPS: usize = 8;
const LR: f64 = 1e-3;

/// A family at a size for tests; the rest is as in the model of that name.
fn small(name: &str) -> ModelConfig {
    let mut sizes = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64
    });
    let more = match name {
        "qwen3-30b-a3b" => json!({
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "output_router_logits": true, "router_aux_loss_coef": 0.1
        }),
        "gpt-oss-20b" => json!({
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "output_router_logits": true, "router_aux_loss_coef": 0.1
        }),
        _ => json!({}),
    };
    if let (Value::Object(sizes), Value::Object(more)) = (&mut sizes, more) {
        sizes.extend(more);
    }
    preset(name).unwrap().with(&sizes).unwrap()
}

/// Texts of unequal length, padded on the right.
struct Texts {
    ids: HostTensor,
    mask: HostTensor,
    /// The token that comes next, -100 where there is none.
    next: HostTensor,
    /// The token itself, -100 at padding.
    labels: HostTensor,
    /// Tokens that are predicted.
    count: usize,
}

impl Texts {
    fn new(lengths: &[usize], seed: usize) -> Self {
        let longest = *lengths.iter().max().unwrap();
        let (mut ids, mut mask, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for (row, &length) in lengths.iter().enumerate() {
            // Words that repeat, so that there is something to learn.
            let token = |at: usize| ((at * (row + 3) + seed * 7 + at / 3) % 29 + 1) as i64;
            for at in 0..longest {
                let is_text = at < length;
                ids.push(if is_text { token(at) } else { 0 });
                mask.push(i64::from(is_text));
                next.push(if at + 1 < length { token(at + 1) } else { -100 });
            }
        }
        let labels: Vec<i64> = ids
            .iter()
            .zip(&mask)
            .map(|(id, mask)| if *mask == 1 { *id } else { -100 })
            .collect();
        let count = next.iter().filter(|label| **label != -100).count();
        let dims = [lengths.len(), longest];
        let tensor = |values: &[i64]| HostTensor::from_slice(values, &dims).unwrap();
        Self {
            ids: tensor(&ids),
            mask: tensor(&mask),
            next: tensor(&next),
            labels: tensor(&labels),
            count,
        }
    }

    /// The batch of a step.
    fn of_step(step: usize) -> Self {
        let mut lengths = [9, 5, 11, 7];
        lengths.rotate_left(step % 4);
        Self::new(&lengths, step % 4)
    }

    /// Each text by itself, padded as in the batch.
    fn samples(&self) -> Vec<Self> {
        let sample = |row: usize| {
            let cut = |tensor: &HostTensor| {
                let values = tensor.narrow(0, row, 1).unwrap().to_vec::<i64>().unwrap();
                HostTensor::from_slice(&values, &[1, values.len()]).unwrap()
            };
            Self {
                ids: cut(&self.ids),
                mask: cut(&self.mask),
                next: cut(&self.next),
                labels: cut(&self.labels),
                count: self.count,
            }
        };
        (0..self.ids.dims()[0]).map(sample).collect()
    }

    fn inputs(&self) -> Inputs {
        Inputs::new()
            .named("input_ids", self.ids.clone())
            .named("attention_mask", self.mask.clone())
    }
}

/// The sum over tokens, divided by the tokens of the whole batch.
fn token_loss(cx: &mut Cx, logits: &Tensor, next: &Tensor, count: usize) -> TensorResult<Tensor> {
    let wide = cx.cast(logits, DType::F32)?;
    let flat = cx.reshape(&wide, &[-1, VOCAB as isize])?;
    let next = cx.reshape(next, &[-1])?;
    let how = CrossEntropy {
        reduction: Reduction::Sum,
        ..CrossEntropy::default()
    };
    let sum = cx.cross_entropy(&flat, &next, how)?;
    cx.mul_scalar(&sum, 1.0 / count as f64)
}

fn worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap()
}

fn here(worker: &Worker, tensor: &HostTensor) -> Tensor {
    let alias = worker.alias(tensor.buf(), tensor.dtype(), *tensor.shape());
    alias.unwrap()
}

/// The loss of logits on the host, and their gradient times `scale`.
fn host_loss(logits: &HostTensor, texts: &Texts, scale: f64) -> (f64, HostTensor) {
    let worker = worker();
    let mut cx = Cx::train(&worker);
    let input = cx.input(&here(&worker, logits)).unwrap();
    let next = here(&worker, &texts.next);
    let loss = token_loss(&mut cx, &input, &next, texts.count).unwrap();
    let value = loss.item().unwrap();
    let scaled = cx.mul_scalar(&loss, scale).unwrap();
    let mut grads = cx.backward(&scaled).unwrap();
    let grad = grads.take(&input).unwrap();
    let host = HostTensor::zeros(grad.dtype(), grad.dims()).unwrap();
    grad.read_into(&mut host.write().unwrap()).unwrap();
    (value, host)
}

// ---- the plain loop ----

/// Adam in f64 over the parameters of a model, each once.
struct PlainAdam {
    params: Vec<Param>,
    /// Value and two moments of each element.
    state: Vec<Vec<[f64; 3]>>,
    step: i32,
}

impl PlainAdam {
    fn new(model: &Model) -> Self {
        let mut params: Vec<Param> = Vec::new();
        for (_, param) in model.named_params() {
            let is_new = params.iter().all(|known| known.id() != param.id());
            if is_new && param.is_trainable() {
                params.push(param);
            }
        }
        let element = |value: f32| [f64::from(value), 0.0, 0.0];
        let start = |param: &Param| param.to_vec::<f32>().unwrap().into_iter().map(element);
        let state = params.iter().map(|param| start(param).collect()).collect();
        Self {
            params,
            state,
            step: 0,
        }
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let values = |state: &Vec<[f64; 3]>| state.iter().map(|[v, ..]| *v as f32).collect();
        self.state.iter().map(values).collect()
    }

    fn update(&mut self, grad_of: impl Fn(&Param) -> Vec<f64>) {
        self.step += 1;
        let Adam {
            beta1, beta2, eps, ..
        } = Adam::default();
        let (first, second) = (1.0 - beta1.powi(self.step), 1.0 - beta2.powi(self.step));
        for (param, state) in self.params.iter().zip(&mut self.state) {
            for ([value, m, v], grad) in state.iter_mut().zip(grad_of(param)) {
                *m = beta1 * *m + (1.0 - beta1) * grad;
                *v = beta2 * *v + (1.0 - beta2) * grad * grad;
                *value -= LR * (*m / first) / ((*v / second).sqrt() + eps);
            }
        }
    }

    /// Writes values into the parameters.
    fn write(&self, values: &[Vec<f32>]) {
        for (param, values) in self.params.iter().zip(values) {
            let data = param.data();
            let mut bytes = data.write(0..data.len()).unwrap();
            bytes.as_mut_slice::<f32>().copy_from_slice(values);
        }
    }
}

/// Losses of a loop over whole batches in f32.
fn plain(name: &str, lag: Lag) -> Vec<f64> {
    let model = Model::random(small(name), DType::F32, 7).unwrap();
    let mut adam = PlainAdam::new(&model);
    let mut versions = vec![adam.values()];
    let worker = worker();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let read = match lag {
            Lag::One => step.saturating_sub(1),
            Lag::Zero => step,
        };
        adam.write(&versions[read]);
        let texts = Texts::of_step(step);
        let mut cx = Cx::train(&worker);
        let (ids, next) = (here(&worker, &texts.ids), here(&worker, &texts.next));
        let loss = model.loss(&mut cx, &ids, &next).unwrap();
        losses.push(loss.item().unwrap());
        let grads = cx.backward(&loss).unwrap();
        adam.update(|param| grads.param(param).unwrap().to_f64_vec().unwrap());
        versions.push(adam.values());
        drop((ids, next, loss, grads, cx));
    }
    assert!(losses[STEPS - 1] < losses[0], "{losses:?}");
    losses
}

// ---- the engine ----

enum Wrap {
    Preset(Box<RoundPipe<Node>>),
    Auto(AutoWrapped),
}

macro_rules! either {
    ($model:expr, $it:ident => $do:expr) => {
        match $model {
            Wrap::Preset($it) => $do,
            Wrap::Auto($it) => $do,
        }
    };
}

impl Wrap {
    fn new(model: &Model, by_rules: bool, run_config: RunConfig) -> Self {
        let devices = Cpu::workers(2, Some(1)).unwrap().into_iter();
        let devices: Vec<Arc<dyn Device>> = devices.map(|cpu| cpu as Arc<dyn Device>).collect();
        let options = RingOptions {
            memory: Some(Bytes::mib(64)),
            ..RingOptions::default()
        };
        let config = WrapConfig {
            use_sequential_preset: Some(!by_rules),
            lower_threshold: 1 << 30,
            upper_threshold: Some(0),
            run_config,
            ring: Some(Ring::new(&devices, &options).unwrap()),
            optimizer: Some(Adam::default().into()),
            optimizer_threads: Some(1),
            ..WrapConfig::default()
        };
        match wrap(model.clone(), &config).unwrap() {
            Wrapped::Engine(engine) => Self::Preset(engine),
            Wrapped::Auto(auto) => Self::Auto(auto),
        }
    }

    /// The output of a forward without gradients.
    fn output(&self, inputs: Inputs) -> Tree<HostTensor> {
        let without = RunConfig::new().requires_grad(false);
        match self {
            Self::Preset(engine) => {
                let forward = engine.forward(inputs, &without).unwrap();
                forward.output().unwrap().clone()
            }
            Self::Auto(model) => {
                let forward = model.forward(inputs, &without).unwrap();
                forward.output().clone()
            }
        }
    }

    /// A forward, the loss outside, and the backward.
    fn classic(&self, texts: &Texts, scale: f64) -> f64 {
        let config = RunConfig::new();
        match self {
            Self::Preset(engine) => {
                let forward = engine.forward(texts.inputs(), &config).unwrap();
                let logits = forward.output().unwrap().clone().tensor().unwrap();
                let (loss, grad) = host_loss(&logits, texts, scale);
                forward.backward(grad).unwrap();
                loss
            }
            Self::Auto(model) => {
                let forward = model.forward(texts.inputs(), &config).unwrap();
                let logits = forward.output().clone().tensor().unwrap();
                let (loss, grad) = host_loss(&logits, texts, scale);
                forward.backward(grad).unwrap();
                loss
            }
        }
    }

    /// `forward_backward` with the loss on the workers.
    fn fused(&self, texts: &Texts, scaler: &GradScaler, scale: f64) -> f64 {
        let Self::Preset(engine) = self else {
            panic!("a model in parts has no last layer for a loss")
        };
        let count = texts.count;
        let loss = move |cx: &mut Cx, output: Tree, next: Tree| {
            token_loss(cx, &output.tensor()?, &next.tensor()?, count)
        };
        let loss = engine.scaled_loss(scaler, loss).unwrap();
        let losses = engine.forward_backward(texts.inputs(), texts.next.clone(), loss);
        losses.unwrap().total() / scale
    }
}

/// How a loop is run.
#[derive(Debug, Clone, Copy)]
struct Way {
    by_rules: bool,
    fused: bool,
    /// One text per call, and a step per batch.
    per_sample: bool,
    lag: Lag,
    grain: Grain,
}

const CLASSIC: Way = Way {
    by_rules: false,
    fused: false,
    per_sample: false,
    lag: Lag::One,
    grain: Grain::Stage,
};

const FUSED: Way = Way {
    fused: true,
    ..CLASSIC
};

/// Losses of f16 weights with f32 copies and a loss scale.
fn scaled(name: &str, way: Way) -> Vec<f64> {
    let model = Model::random(small(name), DType::F16, 7).unwrap();
    let microbatches = if way.per_sample { 1 } else { 3 };
    let config = RunConfig::new()
        .num_microbatch(microbatches)
        .recompute_grain(way.grain);
    let wrapped = Wrap::new(&model, way.by_rules, config);
    let scaler = GradScaler::new(ScalerState {
        scale: 8192.0,
        ..ScalerState::default()
    });
    let scaler = scaler.unwrap();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let texts = Texts::of_step(step);
        let calls = if way.per_sample {
            texts.samples()
        } else {
            vec![texts]
        };
        let scale = either!(&wrapped, it => it.loss_scale(&scaler)).unwrap();
        let call = |texts: &Texts| {
            if way.fused {
                wrapped.fused(texts, &scaler, scale)
            } else {
                wrapped.classic(texts, scale)
            }
        };
        losses.push(calls.iter().map(call).sum());
        let update = Update::new(LR);
        either!(&wrapped, it => it.update_scaled(&update, &scaler, way.lag)).unwrap();
    }
    either!(&wrapped, it => it.synchronize()).unwrap();
    losses
}

#[track_caller]
fn near(what: &str, have: &[f64], want: &[f64], share: f64) {
    assert_eq!(have.len(), want.len());
    for (step, (have, want)) in have.iter().zip(want).enumerate() {
        let off = (have - want).abs() / want;
        assert!(off < share, "{what}, step {step}: {have}, not {want}");
    }
}

#[track_caller]
fn follows(name: &str, way: Way) {
    let have = scaled(name, way);
    near(
        &format!("{name}, {way:?}"),
        &have,
        &plain(name, way.lag),
        0.005,
    );
}

/// `test_qwen3_miniumn`: f32, and an optimizer of the user's over the raw parameters.
fn minimum(by_rules: bool) {
    let model = Model::random(small("qwen3-0.6b"), DType::F32, 7).unwrap();
    let wrapped = Wrap::new(&model, by_rules, RunConfig::new().num_microbatch(3));
    let named: HashMap<String, Param> = model.named_params().into_iter().collect();
    let tied = named["model.embed_tokens.weight"].clone();
    let mut adam = PlainAdam::new(&model);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.push(wrapped.classic(&Texts::of_step(step), 1.0));
        either!(&wrapped, it => it.synchronize()).unwrap();
        let grads = either!(&wrapped, it => it.gradients()).unwrap();
        adam.update(|param| {
            let mut sum = vec![0.0; param.shape().numel()];
            // A tied weight has a gradient for each of its uses.
            for (name, grad) in &grads {
                let of = named.get(name).unwrap_or(&tied);
                if of.id() == param.id() {
                    let grad = grad.as_ref().unwrap().to_f64_vec().unwrap();
                    sum.iter_mut()
                        .zip(grad)
                        .for_each(|(sum, grad)| *sum += grad);
                }
            }
            sum
        });
        adam.write(&adam.values());
        either!(&wrapped, it => it.zero_grad()).unwrap();
    }
    let want = plain("qwen3-0.6b", Lag::Zero);
    near("minimum", &losses, &want, 0.005);
}

#[test]
fn qwen3_minimum_with_a_preset() {
    minimum(false);
}

#[test]
fn qwen3_minimum_by_the_rules() {
    minimum(true);
}

#[test]
fn qwen3_classic_with_a_preset() {
    for lag in [Lag::One, Lag::Zero] {
        follows("qwen3-0.6b", Way { lag, ..CLASSIC });
    }
}

#[test]
fn qwen3_classic_by_the_rules() {
    for lag in [Lag::One, Lag::Zero] {
        let way = Way {
            by_rules: true,
            lag,
            ..CLASSIC
        };
        follows("qwen3-0.6b", way);
    }
}

#[test]
fn qwen3_classic_accumulates() {
    let way = Way {
        by_rules: true,
        per_sample: true,
        ..CLASSIC
    };
    follows("qwen3-0.6b", way);
}

#[test]
fn qwen3_fused_at_both_lags_and_grains() {
    for (lag, grain) in [
        (Lag::One, Grain::Stage),
        (Lag::Zero, Grain::Stage),
        (Lag::One, Grain::Layer),
    ] {
        follows(
            "qwen3-0.6b",
            Way {
                lag,
                grain,
                ..FUSED
            },
        );
    }
}

#[test]
fn qwen3_fused_accumulates() {
    let way = Way {
        per_sample: true,
        ..FUSED
    };
    follows("qwen3-0.6b", way);
}

#[test]
fn llama3_classic_by_the_rules() {
    let way = Way {
        by_rules: true,
        ..CLASSIC
    };
    follows("llama-3.2-1b", way);
}

#[test]
fn llama3_fused_follows_the_plain_loop() {
    follows("llama-3.2-1b", FUSED);
}

/// Ten texts, as many as the reference has in a batch.
fn ten_texts(seed: usize) -> Texts {
    Texts::new(&[24, 20, 16, 23, 12, 18, 24, 14, 22, 19], seed)
}

/// Loss and balance of a plain forward in f32 without microbatches.
fn plain_forward(model: &Model, texts: &Texts) -> (f64, f64) {
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let inputs = Tree::map([
        ("input_ids", here(&worker, &texts.ids).into()),
        ("attention_mask", here(&worker, &texts.mask).into()),
        ("labels", here(&worker, &texts.labels).into()),
        ("return_logits", Tree::Bool(true)),
    ]);
    let mut outputs = model.layers.forward(&mut cx, inputs).unwrap();
    let logits = outputs.take("logits").unwrap().tensor().unwrap();
    let next = here(&worker, &texts.next);
    let loss = token_loss(&mut cx, &logits, &next, texts.count).unwrap();
    let balance = outputs.take("aux_loss").unwrap().tensor().unwrap();
    (loss.item().unwrap(), balance.item().unwrap())
}

/// `test_qwen3moe_forward` and `test_gpt_oss_forward`: f16, four microbatches, losses within 0.5%
/// and, with a preset, the balance of the experts within 1%.
fn forwards(name: &str, by_rules: bool) {
    let wide = Model::random(small(name), DType::F32, 7).unwrap();
    let model = Model::random(small(name), DType::F16, 7).unwrap();
    let wrapped = Wrap::new(&model, by_rules, RunConfig::new().num_microbatch(4));
    for seed in 0..3 {
        let texts = ten_texts(seed);
        let (loss, balance) = plain_forward(&wide, &texts);
        let logits = if by_rules {
            wrapped.output(texts.inputs()).tensor().unwrap()
        } else {
            let inputs = texts
                .inputs()
                .named("labels", texts.labels.clone())
                .named("return_logits", Tree::Bool(true));
            let mut outputs = wrapped.output(inputs);
            let have = outputs.take("aux_loss").unwrap().tensor().unwrap();
            let have = have.to_f64_vec().unwrap();
            near(&format!("{name}: balance"), &have, &[balance], 0.01);
            outputs.take("logits").unwrap().tensor().unwrap()
        };
        let have = host_loss(&logits, &texts, 1.0).0;
        near(&format!("{name}: loss"), &[have], &[loss], 0.005);
    }
}

#[test]
fn qwen3_moe_forward_by_the_rules() {
    forwards("qwen3-30b-a3b", true);
}

#[test]
fn qwen3_moe_forward_with_a_preset() {
    forwards("qwen3-30b-a3b", false);
}

#[test]
fn gpt_oss_forward_by_the_rules() {
    forwards("gpt-oss-20b", true);
}

#[test]
fn gpt_oss_forward_with_a_preset() {
    forwards("gpt-oss-20b", false);
}
