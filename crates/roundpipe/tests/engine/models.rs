//! Small models with everything that could tell workers, plans and grains apart, and a plain loop
//! over them.

use std::sync::Arc;

use roundpipe::kernel::{ConvSpec, PoolSpec};
use roundpipe::nn::{BatchNorm2d, Conv2d, Dropout, Embedding, Func, Init, LayerNorm, Linear};
use roundpipe::ops::{Attention, CrossEntropy};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, HostInputs, HostTensor, Layer, Losses, Module, Optimizer, Param,
    ParamVisitor, Params, RngSite, Rule, Sequential, Tensor, TensorResult, Tree, Update, Worker,
};

pub const SEED: u64 = 5;
pub const VOCAB: usize = 23;
pub const SEQ: usize = 7;
pub const WIDTH: usize = 16;
const HEADS: usize = 2;

/// Dice of one case.
pub struct Dice(roundpipe::RngKey, u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(
            RngSite {
                seed,
                step: 99,
                ..RngSite::default()
            }
            .key(),
            0,
        )
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        self.0.word(self.1) as usize % n
    }
}

/// Tokens and their mask come in; hidden states, the mask and a scale that no layer changes go on.
struct Embed {
    tokens: Embedding,
}

impl Params for Embed {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("tokens", &self.tokens);
    }
}

impl Layer for Embed {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let ids = input.take("ids")?.tensor()?;
        let hidden = self.tokens.forward(cx, &ids)?;
        let Tree::Map(mut map) = input else {
            unreachable!("it had ids")
        };
        map.insert("hidden".into(), hidden.into());
        Ok(Tree::Map(map))
    }

    fn rows_read(&self, input: &Tree<HostTensor>) -> Option<HostTensor> {
        input.get("ids").ok()?.clone().tensor().ok()
    }
}

/// Attention and a gated product, with dropout and a value kept for the recompute.
struct Block {
    norm: LayerNorm,
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(init: &mut Init) -> TensorResult<Self> {
        Ok(Self {
            norm: LayerNorm::new(init, WIDTH, 1e-5)?,
            qkv: Linear::new(init, WIDTH, 3 * WIDTH, true)?,
            out: Linear::new(init, WIDTH, WIDTH, false)?,
            up: Linear::new(init, WIDTH, 2 * WIDTH, true)?,
            down: Linear::new(init, 2 * WIDTH, WIDTH, true)?,
            dropout: Dropout { p: 0.1 },
        })
    }
}

impl Params for Block {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("norm", &self.norm);
        visit.child("qkv", &self.qkv);
        visit.child("out", &self.out);
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Layer for Block {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let x = input.take("hidden")?.tensor()?;
        let scale = input.get("scale")?.clone().tensor()?;
        // A forward that will be repeated leaves its row sums; the repetition must find the very
        // same.
        if cx.doing_recompute() {
            let saved = cx.recompute_data()?;
            assert_eq!(
                saved.len(),
                1,
                "saved in the forward, given in the recompute"
            );
            assert_eq!(saved[0].dims(), &x.dims()[..2]);
        } else {
            let sums = cx.no_grad(|cx| cx.sum(&x, &[2], false))?;
            cx.save_for_recompute(&[&sums])?;
        }
        let (batch, seq, width) = (x.dims()[0] as isize, x.dims()[1] as isize, WIDTH as isize);
        let y = self.norm.forward(cx, &x)?;
        let y = cx.mul(&y, &scale)?;
        let qkv = self.qkv.forward(cx, &y)?;
        let qkv = cx.reshape(
            &qkv,
            &[batch, seq, 3 * HEADS as isize, width / HEADS as isize],
        )?;
        let heads = |cx: &mut Cx, i: usize| cx.narrow(&qkv, 2, i * HEADS, HEADS);
        let (q, k, v) = (heads(cx, 0)?, heads(cx, 1)?, heads(cx, 2)?);
        let y = cx.attention(
            &q,
            &k,
            &v,
            &Attention {
                causal: true,
                ..Attention::default()
            },
        )?;
        let y = cx.reshape(&y, &[batch, seq, width])?;
        let y = self.out.forward(cx, &y)?;
        let y = self.dropout.forward(cx, &y)?;
        let x = cx.add(&x, &y)?;
        let y = self.up.forward(cx, &x)?;
        let y = cx.gelu(&y)?;
        let y = self.down.forward(cx, &y)?;
        let x = cx.add(&x, &y)?;
        let Tree::Map(mut map) = input else {
            unreachable!("it had hidden")
        };
        map.insert("hidden".into(), x.into());
        Ok(Tree::Map(map))
    }
}

/// Logits over the vocabulary; the weight may be the embedding's.
struct Head {
    weight: Param,
}

impl Params for Head {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
    }
}

impl Layer for Head {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let hidden = input.take("hidden")?.tensor()?;
        let weight = cx.get(&self.weight)?;
        Ok(cx.linear(&hidden, &weight, None)?.into())
    }
}

/// Embedding, four blocks, head: six layers.
pub fn transformer(dtype: DType, tied: bool) -> Sequential {
    let mut init = Init::new(11, dtype);
    let embed = Embed {
        tokens: Embedding::new(&mut init, VOCAB, WIDTH, 0.5).unwrap(),
    };
    let weight = match tied {
        true => embed.tokens.weight.clone(),
        false => init.normal(&[VOCAB, WIDTH], 0.3).unwrap(),
    };
    let mut model = Sequential::new().named("embed", embed);
    for i in 0..4 {
        model = model.named(format!("block{i}"), Block::new(&mut init).unwrap());
    }
    model.named("head", Head { weight })
}

/// A batch of tokens for [`transformer`]: inputs and labels.
pub fn tokens(step: u64, batch: usize, dtype: DType) -> (HostInputs, HostTensor) {
    let key = RngSite {
        seed: 77,
        step,
        ..RngSite::default()
    }
    .key();
    let ids: Vec<i64> = (0..batch * SEQ)
        .map(|i| i64::from(key.word(i as u64)) % VOCAB as i64)
        .collect();
    let labels: Vec<i64> = (0..batch * SEQ)
        .map(|i| {
            if i % 5 == 3 {
                -100
            } else {
                i64::from(key.word(9000 + i as u64)) % VOCAB as i64
            }
        })
        .collect();
    // One row for all samples: it is repeated, not cut.
    let scale: Vec<f64> = (0..WIDTH).map(|i| 1.0 + i as f64 / 64.0).collect();
    let scale = HostTensor::from_f64s(&scale, dtype, &[1, 1, WIDTH]).unwrap();
    let ids = HostTensor::from_slice(&ids, &[batch, SEQ]).unwrap();
    (
        HostInputs::new().named("ids", ids).named("scale", scale),
        HostTensor::from_slice(&labels, &[batch, SEQ]).unwrap(),
    )
}

/// Cross entropy, as a sum over tokens that count, so that microbatches add up.
pub fn token_loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    let logits = output.tensor()?;
    let flat = cx.reshape(&logits, &[-1, VOCAB as isize])?;
    let label = label.tensor()?;
    let label = cx.reshape(&label, &[-1])?;
    cx.cross_entropy(&flat, &label, CrossEntropy::default())
}

/// A residual unit with batch norm.
struct Unit {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl Params for Unit {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("conv", &self.conv);
        visit.child("norm", &self.norm);
    }
}

impl Module for Unit {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.conv.forward(cx, x)?;
        let y = self.norm.forward(cx, &y)?;
        let y = cx.relu(&y)?;
        if y.shape() == x.shape() {
            cx.add(&y, x)
        } else {
            Ok(y)
        }
    }
}

/// A small ResNet: six layers, three of them with running statistics.
pub fn resnet() -> Sequential {
    let mut init = Init::new(3, DType::F32);
    let spec = ConvSpec {
        padding: [1; 2],
        ..ConvSpec::default()
    };
    let mut unit = |inputs: usize, outputs: usize| Unit {
        conv: Conv2d::new(&mut init, inputs, outputs, 3, false, spec).unwrap(),
        norm: BatchNorm2d::new(&mut init, outputs).unwrap(),
    };
    let (a, b, c) = (unit(1, 6), unit(6, 6), unit(6, 8));
    Sequential::new()
        .named("unit1", a)
        .named(
            "pool",
            Func(|cx: &mut Cx, x: &Tensor| cx.max_pool2d(x, PoolSpec::window([2, 2]))),
        )
        .named("unit2", b)
        .named("unit3", c)
        .named(
            "mean",
            Func(|cx: &mut Cx, x: &Tensor| {
                let y = cx.global_avg_pool2d(x)?;
                cx.flatten(&y, 1, -1)
            }),
        )
        .named("head", Linear::new(&mut init, 8, 4, true).unwrap())
}

/// Noise images and classes.
pub fn images(step: u64, batch: usize) -> (HostTensor, HostTensor) {
    let key = RngSite {
        seed: 31,
        step,
        ..RngSite::default()
    }
    .key();
    let pixels: Vec<f32> = (0..batch * 64)
        .map(|i| (key.word(i as u64) >> 8) as f32 / 16_777_216.0 - 0.5)
        .collect();
    let labels: Vec<i64> = (0..batch)
        .map(|i| i64::from(key.word(90_000 + i as u64)) % 4)
        .collect();
    let pixels = HostTensor::from_slice(&pixels, &[batch, 1, 8, 8]).unwrap();
    (pixels, HostTensor::from_slice(&labels, &[batch]).unwrap())
}

pub fn image_loss(cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    cx.cross_entropy(&output.tensor()?, &label.tensor()?, CrossEntropy::default())
}

/// Cpu workers that share one thread.
pub fn cpus(count: usize) -> Vec<Arc<dyn Device>> {
    Cpu::workers(count, Some(1))
        .unwrap()
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>)
        .collect()
}

/// Everything a run leaves: losses of each step, gradients of the last, parameters and buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct Trail {
    pub losses: Vec<u64>,
    pub grads: Vec<(String, Vec<u64>)>,
    pub params: Vec<(String, Vec<u64>)>,
}

pub fn bits(losses: &Losses) -> u64 {
    losses.total().to_bits()
}

pub fn f64_bits(values: impl IntoIterator<Item = f64>) -> Vec<u64> {
    values.into_iter().map(f64::to_bits).collect()
}

/// The values of all parameters and buffers.
pub fn params(model: &Sequential) -> Vec<(String, Vec<u64>)> {
    let read = |(name, param): (String, Param)| {
        let data = param.data();
        let tensor = HostTensor::new(data, param.dtype(), param.shape()).unwrap();
        (name, f64_bits(tensor.to_f64_vec().unwrap()))
    };
    model.named_params().into_iter().map(read).collect()
}

/// A training loop that knows no engine: microbatches one after another on one worker, gradients
/// summed in place, an optimizer step at the end. `lag` is the number of steps that weights are
/// behind.
pub fn plain_loop(
    model: &Sequential,
    rule: Rule,
    lr: f64,
    steps: u64,
    batch: &dyn Fn(u64) -> (HostInputs, HostTensor),
    microbatches: usize,
    loss: fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor>,
) -> Trail {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
    let mut optimizer = Optimizer::new(model.trainable_params(), rule).unwrap();
    let mut trail = Trail {
        losses: Vec::new(),
        grads: Vec::new(),
        params: Vec::new(),
    };
    for step in 0..steps {
        let (inputs, labels) = batch(step);
        let mut sums: Vec<Option<Tensor>> = model.trainable_params().iter().map(|_| None).collect();
        let mut total = 0.0;
        for m in 0..microbatches {
            let cut = |t: &HostTensor| piece(t, labels.dims()[0], microbatches, m);
            let upload = |t: &HostTensor| upload(&worker, &cut(t));
            let mut cx = Cx::train(&worker);
            for ((_, param), sum) in model.trainable_params().iter().zip(&mut sums) {
                let host = param.data().read_all().unwrap();
                let values = HostTensor::from_f64s(
                    &read(param.dtype(), host.bytes()),
                    param.dtype(),
                    param.shape(),
                );
                let tensor = self::upload(&worker, &values.unwrap());
                cx.bind(param, tensor, sum.take()).unwrap();
            }
            let mut value = inputs.clone().into_tree().map_ref(upload);
            for (index, (_, layer)) in model.layers().enumerate() {
                let (microbatch, layer_index) = (m as u32, index as u32);
                cx = cx.at(RngSite {
                    seed: SEED,
                    step,
                    microbatch,
                    layer: layer_index,
                    site: 0,
                });
                value = layer.run(&mut cx, value).unwrap();
            }
            let label = upload(&labels);
            let loss = loss(&mut cx, value, label.into()).unwrap();
            let mut grads = cx.backward(&loss).unwrap();
            total += loss.item().unwrap();
            for ((_, param), sum) in model.trainable_params().iter().zip(&mut sums) {
                *sum = grads.take_param(param);
            }
            cx.commit_buffers().unwrap();
        }
        trail.losses.push(total.to_bits());
        trail.grads.clear();
        for ((name, param), sum) in model.trainable_params().iter().zip(&sums) {
            let rounded = worker.cast(sum.as_ref().unwrap(), param.dtype()).unwrap();
            trail
                .grads
                .push((name.clone(), f64_bits(rounded.to_f64_vec().unwrap())));
            let values: Vec<f32> = rounded
                .to_f64_vec()
                .unwrap()
                .iter()
                .map(|v| *v as f32)
                .collect();
            optimizer
                .add_grad(param, roundpipe_tensor::optim::Floats::F32(&values))
                .unwrap();
        }
        optimizer.step(&Update::new(lr)).unwrap();
    }
    trail.params = params(model);
    trail
}

fn read(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes
            .chunks(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        DType::BF16 => bytes
            .chunks(2)
            .map(|b| f64::from(roundpipe::bf16::from_le_bytes(b.try_into().unwrap()).to_f32()))
            .collect(),
        other => panic!("{other} is not used here"),
    }
}

/// A microbatch of a tensor, by the engine's rule: as even as can be, larger ones first.
pub fn piece(tensor: &HostTensor, batch: usize, parts: usize, part: usize) -> HostTensor {
    if tensor.dims().first() != Some(&batch) {
        return tensor.clone();
    }
    let size = |i: usize| batch / parts + usize::from(i < batch % parts);
    let start: usize = (0..part).map(size).sum();
    tensor.narrow(0, start, size(part)).unwrap()
}

pub fn upload(worker: &Worker, tensor: &HostTensor) -> Tensor {
    let shape = *tensor.shape();
    match tensor.dtype() {
        DType::F32 => worker
            .upload(&tensor.to_vec::<f32>().unwrap(), shape)
            .unwrap(),
        DType::BF16 => worker
            .upload(&tensor.to_vec::<roundpipe::bf16>().unwrap(), shape)
            .unwrap(),
        DType::I64 => worker
            .upload(&tensor.to_vec::<i64>().unwrap(), shape)
            .unwrap(),
        DType::Bool => {
            let bytes = tensor.to_vec::<u8>().unwrap();
            let truths: Vec<bool> = bytes.into_iter().map(|byte| byte != 0).collect();
            worker.upload_bool(&truths, shape).unwrap()
        }
        other => panic!("{other} is not used here"),
    }
}

/// The outputs of all microbatches of a forward that knows no engine, one after another. `number`
/// is the place in the random stream.
pub fn plain_forward(
    model: &Sequential,
    inputs: &HostInputs,
    (batch, microbatches): (usize, usize),
    number: u64,
    training: bool,
) -> Vec<u64> {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
    let mut all = Vec::new();
    for m in 0..microbatches {
        let mut cx = Cx::new(&worker, false, training);
        let cut = |t: &HostTensor| upload(&worker, &piece(t, batch, microbatches, m));
        let mut value = inputs.clone().into_tree().map_ref(cut);
        for (index, (_, layer)) in model.layers().enumerate() {
            let (microbatch, layer_index) = (m as u32, index as u32);
            cx = cx.at(RngSite {
                seed: SEED,
                step: number,
                microbatch,
                layer: layer_index,
                site: 0,
            });
            value = layer.run(&mut cx, value).unwrap();
        }
        all.extend(f64_bits(value.tensor().unwrap().to_f64_vec().unwrap()));
    }
    all
}

/// Gradients since the last step, by name.
pub fn grads(engine: &roundpipe::RoundPipe) -> Vec<(String, Vec<u64>)> {
    engine.synchronize().unwrap();
    let read = |(name, grad): (String, Option<HostTensor>)| {
        (
            name,
            grad.map(|grad| f64_bits(grad.to_f64_vec().unwrap()))
                .unwrap_or_default(),
        )
    };
    engine.gradients().unwrap().into_iter().map(read).collect()
}

/// Linear layers with a bend between them, no random operation: four layers.
pub fn perceptron(dtype: DType) -> Sequential {
    let mut init = Init::new(21, dtype);
    let mut linear = |inputs, outputs| Linear::new(&mut init, inputs, outputs, true).unwrap();
    let (a, b, c) = (linear(5, 8), linear(8, 8), linear(8, 3));
    Sequential::new()
        .named("first", a)
        .named("bend", Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
        .named("second", b)
        .named("third", c)
}

/// A batch for [`perceptron`] and weights of its outputs.
pub fn numbers(step: u64, batch: usize, dtype: DType) -> (HostTensor, HostTensor) {
    let key = RngSite {
        seed: 13,
        step,
        ..RngSite::default()
    }
    .key();
    let values = |from: u64, count: usize| -> Vec<f64> {
        (0..count)
            .map(|i| f64::from(key.word(from + i as u64) >> 8) / 16_777_216.0 - 0.5)
            .collect()
    };
    let x = HostTensor::from_f64s(&values(0, batch * 5), dtype, &[batch, 5]).unwrap();
    (
        x,
        HostTensor::from_f64s(&values(4000, batch * 3), dtype, &[batch, 3]).unwrap(),
    )
}

/// The sum of outputs, each weighted: the gradient of an output is its weight.
pub fn weighted(cx: &mut Cx, output: Tree, weights: Tree) -> TensorResult<Tensor> {
    let product = cx.mul(&output.tensor()?, &weights.tensor()?)?;
    cx.sum_all(&product)
}

/// A layer that several models hold.
pub struct Shared(pub Arc<dyn Layer>);

impl Params for Shared {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Layer for Shared {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        self.0.run(cx, input)
    }
}

/// A test that hangs says why before the runner's patience ends.
#[expect(
    clippy::print_stderr,
    reason = "a hanging test has no other way to speak"
)]
pub fn show_stall(report: &roundpipe::Report) {
    eprintln!("{report}");
}
