//! Layers that users write learn on a cpu; optimizers touch what they should and nothing else.

use roundpipe::kernel::{ConvSpec, PoolSpec};
use roundpipe::nn::{BatchNorm2d, Conv2d, Embedding, Func, Init, LayerNorm, Linear};
use roundpipe::optim::{AdamW, Sgd};
use roundpipe::{
    Bytes, Cpu, Cx, DType, DeviceKind, Layer, Module, Optimizer, Param, ParamGroup, ParamVisitor,
    Params, Sequential, Shape, Tensor, TensorResult, Tree, Update, Worker, bf16, cost,
};
use roundpipe_tensor::meta::Given;
use roundpipe_tensor::ops::CrossEntropy;

fn worker(threads: usize) -> Worker {
    Worker::new(Cpu::new(Some(threads)).unwrap(), Bytes::gib(1)).unwrap()
}

/// A residual block with batch norm, as a user would write it.
struct Residual {
    conv1: Conv2d,
    norm1: BatchNorm2d,
    conv2: Conv2d,
    norm2: BatchNorm2d,
    short: Option<Conv2d>,
}

impl Residual {
    fn new(init: &mut Init, inputs: usize, outputs: usize, stride: usize) -> TensorResult<Self> {
        let spec = |stride, pad| ConvSpec {
            stride: [stride; 2],
            padding: [pad; 2],
            ..ConvSpec::default()
        };
        let short = inputs != outputs || stride != 1;
        Ok(Self {
            conv1: Conv2d::new(init, inputs, outputs, 3, false, spec(stride, 1))?,
            norm1: BatchNorm2d::new(init, outputs)?,
            conv2: Conv2d::new(init, outputs, outputs, 3, false, spec(1, 1))?,
            norm2: BatchNorm2d::new(init, outputs)?,
            short: short
                .then(|| Conv2d::new(init, inputs, outputs, 1, false, spec(stride, 0)))
                .transpose()?,
        })
    }
}

impl Params for Residual {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("conv1", &self.conv1);
        visit.child("norm1", &self.norm1);
        visit.child("conv2", &self.conv2);
        visit.child("norm2", &self.norm2);
        if let Some(short) = &self.short {
            visit.child("short", short);
        }
    }
}

impl Module for Residual {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let y = self.conv1.forward(cx, x)?;
        let y = self.norm1.forward(cx, &y)?;
        let y = cx.relu(&y)?;
        let y = self.conv2.forward(cx, &y)?;
        let y = self.norm2.forward(cx, &y)?;
        let short = match &self.short {
            Some(conv) => conv.forward(cx, x)?,
            None => x.clone(),
        };
        let sum = cx.add(&y, &short)?;
        cx.relu(&sum)
    }
}

fn resnet(classes: usize) -> TensorResult<Sequential> {
    let mut init = Init::new(3, DType::F32);
    let stem = ConvSpec {
        padding: [1; 2],
        ..ConvSpec::default()
    };
    Ok(Sequential::new()
        .named("stem", Conv2d::new(&mut init, 1, 8, 3, true, stem)?)
        .named(
            "pool",
            Func(|cx: &mut Cx, x: &Tensor| cx.max_pool2d(x, PoolSpec::window([2, 2]))),
        )
        .named("block1", Residual::new(&mut init, 8, 8, 1)?)
        .named("block2", Residual::new(&mut init, 8, 16, 2)?)
        .named(
            "mean",
            Func(|cx: &mut Cx, x: &Tensor| {
                let y = cx.global_avg_pool2d(x)?;
                cx.flatten(&y, 1, -1)
            }),
        )
        .named("head", Linear::new(&mut init, 16, classes, true)?))
}

/// Images of four classes: a bright quadrant on noise.
fn images(step: u64, count: usize) -> (Vec<f32>, Vec<i64>) {
    let key = roundpipe::RngSite {
        seed: 21,
        step,
        ..roundpipe::RngSite::default()
    }
    .key();
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for n in 0..count as u64 {
        let class = u64::from(key.word(1_000_000 + n)) % 4;
        labels.push(class as i64);
        for at in 0..144 {
            let (row, column) = (at / 12, at % 12);
            let bright = (row / 6) * 2 + column / 6 == class;
            let noise = (key.word(n * 144 + at) >> 8) as f32 / 16_777_216.0 - 0.5;
            pixels.push(noise + f32::from(u8::from(bright)));
        }
    }
    (pixels, labels)
}

fn train_resnet(threads: usize, steps: u64) -> (Vec<f64>, Sequential) {
    let worker = worker(threads);
    let model = resnet(4).unwrap();
    let rule = Sgd {
        momentum: 0.9,
        ..Sgd::default()
    };
    let mut optimizer = Optimizer::new(model.trainable_params(), rule).unwrap();
    let mut losses = Vec::new();
    for step in 0..steps {
        let (pixels, labels) = images(step, 16);
        let mut cx = Cx::train(&worker);
        let x = cx.tensor(&pixels, &[16, 1, 12, 12]).unwrap();
        let labels = cx.tensor(&labels, &[16]).unwrap();
        let logits = model.forward(&mut cx, x).unwrap().tensor().unwrap();
        let loss = cx
            .cross_entropy(&logits, &labels, CrossEntropy::default())
            .unwrap();
        let grads = cx.backward(&loss).unwrap();
        cx.commit_buffers().unwrap();
        losses.push(loss.item().unwrap());
        optimizer.add(&grads).unwrap();
        optimizer.step(&Update::new(0.05)).unwrap();
    }
    (losses, model)
}

/// A network with convolutions, batch norm and pooling learns, and the same bits come out for 1 and
/// 2 threads.
#[test]
fn a_small_resnet_learns_and_does_not_depend_on_threads() {
    let (one, model) = train_resnet(1, 30);
    let (two, other) = train_resnet(2, 30);
    assert_eq!(one, two, "losses differ between 1 and 2 threads");
    for ((name, a), (_, b)) in model.named_params().iter().zip(other.named_params()) {
        let bits = |p: &Param| p.data().read_all().unwrap().bytes().to_vec();
        assert_eq!(bits(a), bits(&b), "{name} differs between 1 and 2 threads");
    }
    assert!(
        one[0] > 1.0 && one[25..].iter().all(|l| *l < 0.2),
        "{one:?}"
    );
    // Running statistics moved, so inference works on unseen images.
    let worker = worker(2);
    let (pixels, labels) = images(999, 32);
    let mut cx = Cx::infer(&worker);
    let x = cx.tensor(&pixels, &[32, 1, 12, 12]).unwrap();
    let logits = model.forward(&mut cx, x).unwrap().tensor().unwrap();
    let chosen = cx
        .argmax(&logits, 1, false)
        .unwrap()
        .to_vec::<i64>()
        .unwrap();
    let right = chosen.iter().zip(&labels).filter(|(a, b)| a == b).count();
    assert!(right >= 30, "{right} of 32");
}

/// Accumulating two halves of a batch equals the whole batch (losses are sums here).
#[test]
fn gradients_add_up_over_calls() {
    let worker = worker(2);
    let values: Vec<f32> = (0..24).map(|i| (i as f32 * 0.37).sin()).collect();
    let run = |parts: usize| {
        let mut init = Init::new(5, DType::F32);
        let layer = Linear::new(&mut init, 3, 2, true).unwrap();
        let mut optimizer = Optimizer::new(layer.trainable_params(), Sgd::default()).unwrap();
        for part in values.chunks(24 / parts) {
            let mut cx = Cx::train(&worker);
            let x = cx.tensor(part, &[part.len() / 3, 3]).unwrap();
            let y = layer.forward(&mut cx, &x).unwrap();
            let y = cx.square(&y).unwrap();
            let loss = cx.sum_all(&y).unwrap();
            let grads = cx.backward(&loss).unwrap();
            optimizer.add(&grads).unwrap();
        }
        let report = optimizer.step(&Update::new(0.01)).unwrap();
        (layer.weight.to_vec::<f32>().unwrap(), report.grad_norm)
    };
    let ((whole, norm), (halves, other)) = (run(1), run(2));
    assert!((norm - other).abs() < 1e-4 * norm);
    assert!(
        whole.iter().zip(&halves).all(|(a, b)| (a - b).abs() < 1e-6),
        "{whole:?} {halves:?}"
    );
}

/// bf16 weights move by less than their own precision a step; the f32 master must not lose it.
#[test]
fn narrow_weights_have_a_full_master() {
    let param = Param::from_slice(&[bf16::from_f32(1.0)], &[1]).unwrap();
    let worker = worker(1);
    let mut optimizer = Optimizer::new([("w".into(), param.clone())], Sgd::default()).unwrap();
    for _ in 0..100 {
        let mut cx = Cx::train(&worker);
        let w = cx.get(&param).unwrap();
        let loss = cx.sum_all(&w).unwrap();
        drop(w);
        let grads = cx.backward(&loss).unwrap();
        optimizer.add(&grads).unwrap();
        optimizer.step(&Update::new(1e-3)).unwrap();
    }
    assert_eq!(param.to_vec::<bf16>().unwrap()[0], bf16::from_f32(0.9));
}

#[test]
fn frozen_and_tied_parameters_are_treated_as_such() {
    let mut init = Init::new(7, DType::F32);
    let table = Embedding::new(&mut init, 5, 4, 0.5).unwrap();
    let frozen = LayerNorm::new(&mut init, 4, 1e-5).unwrap();
    frozen.set_trainable(false);
    let tied = Linear {
        weight: table.weight.clone(),
        bias: None,
    };
    let model = Sequential::new().with(table).with(frozen).with(tied);
    let names: Vec<String> = model
        .trainable_params()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        names,
        ["0.weight"],
        "a tied weight is named once, a frozen one not at all"
    );
    let mut optimizer = Optimizer::new(model.trainable_params(), AdamW::default()).unwrap();
    assert_eq!(
        optimizer.state_bytes(),
        20 * 12,
        "gradient and two moments of one f32 table"
    );
    let before: Vec<Vec<f32>> = model
        .named_params()
        .iter()
        .map(|(_, p)| p.to_vec().unwrap())
        .collect();
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let ids = cx.tensor(&[1i64, 3, 3], &[3]).unwrap();
    let labels = cx.tensor(&[3i64, 1, 0], &[3]).unwrap();
    let logits = model.forward(&mut cx, ids).unwrap().tensor().unwrap();
    let loss = cx
        .cross_entropy(&logits, &labels, CrossEntropy::default())
        .unwrap();
    let grads = cx.backward(&loss).unwrap();
    assert_eq!(grads.params().count(), 1);
    optimizer.add(&grads).unwrap();
    assert!(optimizer.step(&Update::new(0.1)).unwrap().grad_norm > 0.0);
    let after: Vec<Vec<f32>> = model
        .named_params()
        .iter()
        .map(|(_, p)| p.to_vec().unwrap())
        .collect();
    assert!(before[0] != after[0] && before[1..] == after[1..]);
    assert!(
        optimizer
            .step(&Update::new(0.1))
            .unwrap_err()
            .to_string()
            .contains("no gradients")
    );
}

/// A step while a pass still reads the weights is refused whole.
#[test]
fn a_step_during_a_pass_changes_nothing() {
    let mut init = Init::new(7, DType::F32);
    let layer = Linear::new(&mut init, 2, 2, true).unwrap();
    let mut optimizer = Optimizer::new(layer.trainable_params(), AdamW::default()).unwrap();
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let x = cx.zeros(DType::F32, &[1, 2]).unwrap();
    let y = layer.forward(&mut cx, &x).unwrap();
    let loss = cx.sum_all(&y).unwrap();
    let grads = cx.backward(&loss).unwrap();
    optimizer.add(&grads).unwrap();
    let held = cx.get(layer.bias.as_ref().unwrap()).unwrap();
    let before = layer.weight.to_vec::<f32>().unwrap();
    assert!(
        optimizer
            .step(&Update::new(0.1))
            .unwrap_err()
            .to_string()
            .contains("in use")
    );
    assert_eq!(layer.weight.to_vec::<f32>().unwrap(), before);
    drop((held, cx));
    optimizer.step(&Update::new(0.1)).unwrap();
}

/// An error inside a model names the layer, and the shapes inside it.
#[test]
fn a_failing_layer_is_named() {
    let mut init = Init::new(1, DType::F32);
    let model = Sequential::new()
        .named("first", Linear::new(&mut init, 4, 8, true).unwrap())
        .named("second", Linear::new(&mut init, 9, 2, true).unwrap());
    let worker = worker(1);
    let mut cx = Cx::infer(&worker);
    let x = cx.zeros(DType::F32, &[3, 4]).unwrap();
    let error = model.forward(&mut cx, x).unwrap_err();
    let line = error.to_string();
    let cause = line.strip_prefix("layer 1 (second): ").unwrap();
    assert!(
        cause.contains("linear") && cause.contains("[3, 8]") && cause.contains("[2, 9]"),
        "{cause}"
    );
    let error = model.forward(&mut cx, Tree::Int(3)).unwrap_err();
    assert!(error.to_string().contains("a number"), "{error}");
}

/// Costs are per layer, before anything runs.
#[test]
fn a_layers_cost_is_known_beforehand() {
    let mut init = Init::new(1, DType::BF16);
    let layer = Linear::new(&mut init, 64, 128, false).unwrap();
    let shape = Shape::new(&[2, 16, 64]).unwrap();
    let given = [Given {
        dtype: DType::BF16,
        shape,
        grad: true,
    }];
    let costs = cost::profile(&layer as &dyn Layer, DeviceKind::Cpu, &given).unwrap();
    assert_eq!(costs.forward.flops, 2 * 32 * 64 * 128);
    assert_eq!(costs.forward.peak, (32 * 64 + 32 * 128) * 2);
    assert!(costs.backward.peak > costs.recompute.peak);
}

/// Clipping scales all gradients by their common norm, and decay stays where it was allowed.
#[test]
fn clipping_and_decay_do_what_they_say() {
    let worker = worker(1);
    let [wide, flat] = [&[2, 1][..], &[1]].map(|dims| Param::full(DType::F32, dims, 1.0).unwrap());
    let params = || {
        [
            ("wide".to_owned(), wide.clone()),
            ("flat".to_owned(), flat.clone()),
        ]
    };
    let gradients = |factor: f64| {
        let mut cx = Cx::train(&worker);
        let (a, b) = (cx.get(&wide).unwrap(), cx.get(&flat).unwrap());
        let sum = cx.add(&a, &b).unwrap();
        let sum = cx.sum_all(&sum).unwrap();
        let loss = cx.affine(&sum, factor, 0.0).unwrap();
        cx.backward(&loss).unwrap()
    };
    // Gradients are (3, 3) and 6: a norm of √54, scaled down to 1.
    let mut clipped = Optimizer::new(params(), Sgd::default()).unwrap();
    clipped.add(&gradients(3.0)).unwrap();
    let clip = Update {
        clip: Some(1.0),
        ..Update::new(1.0)
    };
    let report = clipped.step(&clip).unwrap();
    let refused = Optimizer::new(params(), Sgd::default()).map(drop);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("wide is trained by"), "{text}");
    drop(clipped);
    let norm = 54.0f64.sqrt();
    assert!(
        (report.grad_norm - norm).abs() < 1e-5,
        "the norm before clipping, not {}",
        report.grad_norm
    );
    let after = [
        wide.to_vec::<f32>().unwrap()[0],
        flat.to_vec::<f32>().unwrap()[0],
    ];
    for (have, grad) in after.iter().zip([3.0, 6.0]) {
        assert!(
            (f64::from(*have) - (1.0 - grad / norm)).abs() < 1e-5,
            "{after:?}"
        );
    }
    // With no gradient to speak of only decay moves a weight, and only the wide one may decay.
    let rule = Sgd {
        weight_decay: 0.5,
        ..Sgd::default()
    };
    let mut decayed = Optimizer::new(params(), rule).unwrap();
    let narrow = ParamGroup::filter(|_, shape| shape.rank() < 2);
    decayed.set_groups([narrow.weight_decay(0.0)]).unwrap();
    decayed.add(&gradients(0.0)).unwrap();
    decayed.step(&Update::new(0.1)).unwrap();
    assert!((wide.to_vec::<f32>().unwrap()[0] - after[0] * 0.95).abs() < 1e-6);
    assert_eq!(flat.to_vec::<f32>().unwrap()[0], after[1]);
}
