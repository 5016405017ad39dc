//! The store keeps bits, takes exactly the memory it should, and updates as the plain optimizer
//! does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use roundpipe::optim::{Adafactor, Adam, AdamW, AdjustLr, Lion, Muon, Sgd, StepReport};
use roundpipe::testing::{Apply, FunctionVersions, Segment, Store, StoreConfig};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Error, HostBuf, HostTensor, Lag, Layer, Param, ParamGroup, ParamVisitor,
    Params, Pin, RngKey, RngSite, Rule, TensorResult, Tree, Update, bf16, f16,
};
use roundpipe_tensor::SimWorld;
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{
    self, AdafactorSlabs, AdamSlabs, CHUNK, Floats, FloatsMut, LionSlabs, Matrices, MuonSlabs,
    SecondMoment, SgdSlabs, StepSettings,
};
use roundpipe_tensor::sim::SimConfig;

/// Parameters with names, and nothing to compute.
struct Plain(Vec<(&'static str, Param)>);

impl Params for Plain {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        for (name, param) in &self.0 {
            visit.param(name, param);
        }
    }
}

impl Layer for Plain {
    fn run(&self, _: &mut Cx, input: Tree) -> TensorResult<Tree> {
        Ok(input)
    }
}

type Layers = Vec<(String, Arc<dyn Layer>)>;

fn layers(all: Vec<Vec<(&'static str, Param)>>) -> Layers {
    let layer = |(i, params)| (format!("l{i}"), Arc::new(Plain(params)) as Arc<dyn Layer>);
    all.into_iter().enumerate().map(layer).collect()
}

fn key(site: u32, step: u64) -> RngKey {
    RngSite {
        seed: 5,
        step,
        site,
        ..RngSite::default()
    }
    .key()
}

fn param(dtype: DType, numel: usize, site: u32) -> Param {
    shaped(dtype, &[numel], site)
}

fn shaped(dtype: DType, dims: &[usize], site: u32) -> Param {
    Param::normal(dtype, dims, 0.5, key(site, 0)).unwrap()
}

/// Three layers: an f32 norm beside weights of `dtype`, a weight that all share (three terms, so
/// that the order of the sum shows), a frozen one, a buffer, odd sizes, matrices and experts.
fn model(dtype: DType) -> Layers {
    let tied = shaped(dtype, &[13, 77], 1);
    layers(vec![
        vec![
            ("embed", tied.clone()),
            ("steps", Param::from_slice(&[3i64], &[1]).unwrap()),
        ],
        vec![
            ("base", param(dtype, 77, 2).frozen()),
            ("norm", param(DType::F32, 33, 3)),
            ("weight", param(dtype, 70_003, 4)),
            ("bias", param(dtype, 1, 5)),
            ("shared", tied.clone()),
            ("up", shaped(dtype, &[21, 40], 7)),
            ("experts", shaped(dtype, &[3, 12, 10], 8)),
        ],
        vec![
            ("norm", param(dtype, 65, 6)),
            ("head", tied.clone()),
            ("again", tied),
        ],
    ])
}

fn config(max_lag: Lag, rule: Option<Rule>) -> StoreConfig {
    StoreConfig {
        max_lag,
        rule,
        threads: Some(2),
        ..StoreConfig::new(Cpu::new(Some(1)).unwrap())
    }
}

/// A step that makes version `next` from gradients of the version before.
fn versions(next: u64) -> FunctionVersions {
    FunctionVersions {
        read: next - 1,
        next,
    }
}

fn named(layers: &Layers) -> Vec<(String, Param)> {
    let mut all: Vec<(String, Param)> = Vec::new();
    for (layer, params) in layers {
        for (name, param) in params.named_params() {
            if all.iter().all(|(_, p)| p.id() != param.id()) {
                all.push((format!("{layer}.{name}"), param));
            }
        }
    }
    all
}

fn bytes(buf: &HostBuf) -> Vec<u8> {
    buf.read_all().unwrap().bytes().to_vec()
}

fn bits(layers: &Layers) -> Vec<(String, Vec<u8>)> {
    named(layers)
        .into_iter()
        .map(|(name, param)| (name, bytes(&param.data())))
        .collect()
}

/// The gradient that layer `layer` has for its parameter `index` in a step; some have none.
fn gradient(layer: usize, index: usize, step: u64, numel: usize) -> Option<Vec<f32>> {
    if (layer, index) == (1, 3) && step == 2 || (layer, index) == (2, 1) && step == 4 {
        return None;
    }
    let values = Param::normal(
        DType::F32,
        &[numel],
        0.1,
        key((layer * 10 + index) as u32, step),
    )
    .unwrap();
    Some(values.to_vec().unwrap())
}

enum Rounded {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Rounded {
    fn new(values: &[f32], dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::BF16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
            DType::F16 => Self::F16(values.iter().map(|x| f16::from_f32(*x)).collect()),
            _ => Self::F32(values.to_vec()),
        }
    }

    fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => Floats::F32(values),
            Self::BF16(values) => Floats::BF16(values),
            Self::F16(values) => Floats::F16(values),
        }
    }

    fn write(&self, range: &HostBuf) {
        let mut range = range.write(0..range.len()).unwrap();
        match self {
            Self::F32(values) => range.as_mut_slice().copy_from_slice(values),
            Self::BF16(values) => range.as_mut_slice().copy_from_slice(values),
            Self::F16(values) => range.as_mut_slice().copy_from_slice(values),
        }
    }
}

/// Writes the gradients of a step, times `scale`, where and when downloads would.
fn land(store: &Store, step: u64, scale: f32) {
    for l in 0..store.layers().len() {
        store.wait_grad_free(l, step, &store.abort()).unwrap();
    }
    write_gradients(store, step, scale);
}

fn write_gradients(store: &Store, step: u64, scale: f32) {
    for (l, layer) in store.layers().iter().enumerate() {
        for (i, param) in layer.params().iter().enumerate() {
            let Some(range) = layer.grad_range(i).unwrap() else {
                continue;
            };
            if let Some(mut values) = gradient(l, i, step, param.shape.numel()) {
                values.iter_mut().for_each(|x| *x *= scale);
                Rounded::new(&values, param.grad_dtype).write(&range);
                layer.set_filled(i, true);
            }
        }
    }
}

/// Adds the same gradients to a plain optimizer, the last layer's first.
fn add(optimizer: &mut PlainOptimizer, store: &Store, layers: &Layers, step: u64) {
    for (l, (_, layer)) in layers.iter().enumerate().rev() {
        for (i, (_, param)) in layer.named_params().into_iter().enumerate() {
            if !param.is_trainable() {
                continue;
            }
            if let Some(values) = gradient(l, i, step, param.shape().numel()) {
                let dtype = store.layers()[l].params()[i].grad_dtype;
                optimizer.add_grad(&param, Rounded::new(&values, dtype).floats());
            }
        }
    }
}

/// The passes of `roundpipe_tensor::optim` over vectors: what a store must equal, without slabs,
/// versions or chunks.
struct PlainOptimizer {
    rule: Rule,
    threads: Threads,
    steps: u64,
    params: Vec<PlainParam>,
}

struct PlainParam {
    name: String,
    param: Param,
    /// Of master and moments.
    state_dtype: DType,
    decays: bool,
    grad: Option<Vec<f32>>,
    master: Vec<f32>,
    moments: Vec<Vec<f32>>,
}

impl PlainOptimizer {
    fn new(layers: &Layers, rule: Rule, decays: impl Fn(&str, &Param) -> bool) -> Self {
        Self::with_state(layers, rule, DType::F32, decays)
    }

    fn with_state(
        layers: &Layers,
        rule: Rule,
        optim_dtype: DType,
        decays: impl Fn(&str, &Param) -> bool,
    ) -> Self {
        let trained = |(_, param): &(String, Param)| param.is_trainable();
        let params = named(layers).into_iter().filter(trained);
        let params = params.map(|(name, param)| {
            let values = HostTensor::new(param.data(), param.dtype(), param.shape()).unwrap();
            let master: Vec<f32> = values
                .to_f64_vec()
                .unwrap()
                .iter()
                .map(|value| *value as f32)
                .collect();
            PlainParam {
                decays: decays(&name, &param),
                grad: None,
                moments: rule_of(rule, &name, &param)
                    .moment_shapes(param.shape())
                    .iter()
                    .map(|shape| vec![0.0; shape.numel()])
                    .collect(),
                state_dtype: match param.dtype() {
                    own if own == optim_dtype => own,
                    _ => DType::F32,
                },
                name,
                master,
                param,
            }
        });
        Self {
            rule,
            threads: Threads::new(Some(1)).unwrap(),
            steps: 0,
            params: params.collect(),
        }
    }

    fn add_grad(&mut self, param: &Param, values: Floats<'_>) {
        let mut params = self.params.iter_mut();
        let here = params.find(|here| here.param.id() == param.id()).unwrap();
        match &mut here.grad {
            Some(sum) => optim::accumulate(&self.threads, values, sum).unwrap(),
            None => {
                let mut first = vec![0.0; values.len()];
                optim::cast(&self.threads, values, FloatsMut::F32(&mut first)).unwrap();
                here.grad = Some(first);
            }
        }
    }

    fn step(&mut self, update: &Update) -> StepReport {
        if let Some(clip) = update.clip_value {
            let grads = self.params.iter_mut().filter_map(|here| here.grad.as_mut());
            let clip = clip as f32;
            grads.flatten().for_each(|x| *x = x.clamp(-clip, clip));
        }
        let grads = self.params.iter().filter_map(|here| here.grad.as_ref());
        let squares = grads.map(|grad| optim::squared_norm(&self.threads, Floats::F32(grad)));
        let decision = update.decide(squares.fold(0.0, |sum, square| sum + square));
        assert!(!decision.skip);
        self.steps += 1;
        for here in &mut self.params {
            if let Some(grad) = here.grad.take() {
                let settings = StepSettings {
                    grad_scale: decision.factor,
                    ..StepSettings::new(self.steps, update.lr)
                };
                here.update(&self.threads, self.rule, settings, &grad);
            }
        }
        StepReport {
            step: self.steps,
            grad_norm: decision.grad_norm,
            skipped: false,
            partial: false,
        }
    }
}

impl PlainParam {
    fn update(&mut self, threads: &Threads, rule: Rule, settings: StepSettings, grad: &[f32]) {
        let master = &mut self.master[..];
        let mut moments = self.moments.iter_mut().map(|moment| &mut moment[..]);
        let grad = Floats::F32(grad);
        let decay = |weight_decay| if self.decays { weight_decay } else { 0.0 };
        match rule_of(rule, &self.name, &self.param) {
            Rule::Adafactor(rule) => {
                let first = moments.next().unwrap();
                let second = match Matrices::of(self.param.shape()) {
                    Some(matrices) => SecondMoment::Factored {
                        matrices,
                        by_row: first,
                        by_col: moments.next().unwrap(),
                    },
                    None => SecondMoment::Full(first),
                };
                let slabs = AdafactorSlabs {
                    grad,
                    master,
                    second,
                    working: None,
                };
                let rule = Adafactor {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                rule.step(threads, settings, slabs).unwrap();
            }
            Rule::Muon { matrices: rule, .. } => {
                let slabs = MuonSlabs {
                    matrices: Matrices::of(self.param.shape()).unwrap(),
                    grad,
                    master,
                    momentum: moments.next().unwrap(),
                    working: None,
                };
                let rule = Muon {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                rule.step(threads, settings, slabs).unwrap();
            }
            Rule::Adam(rule) => {
                let rule = Adam {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                let slabs = adam_slabs(grad, master, moments);
                rule.step(threads, settings, slabs).unwrap();
            }
            Rule::AdamW(rule) => {
                let rule = AdamW {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                let slabs = adam_slabs(grad, master, moments);
                rule.step(threads, settings, slabs).unwrap();
            }
            Rule::Lion(rule) => {
                let slabs = LionSlabs {
                    grad,
                    master,
                    exp_avg: moments.next().unwrap(),
                    working: None,
                };
                let rule = Lion {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                rule.step(threads, settings, slabs).unwrap();
            }
            Rule::Sgd(rule) => {
                let slabs = SgdSlabs {
                    grad,
                    master,
                    momentum: moments.next(),
                    working: None,
                };
                let rule = Sgd {
                    weight_decay: decay(rule.weight_decay),
                    ..rule
                };
                rule.step(threads, settings, slabs).unwrap();
            }
        }
        if self.state_dtype == DType::BF16 {
            let all = self.moments.iter_mut().chain([&mut self.master]);
            all.flatten().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let round = |value: &f32| match self.param.dtype() {
            DType::BF16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        let rounded: Vec<u8> = self.master.iter().flat_map(round).collect();
        let data = self.param.data();
        let mut data = data.write(0..data.len()).unwrap();
        data.bytes().copy_from_slice(&rounded);
    }
}

/// Muon updates matrices that are no embedding; the tied one has that name in the first layer.
fn rule_of(rule: Rule, name: &str, param: &Param) -> Rule {
    match rule {
        Rule::Muon { rest, .. } if param.shape().rank() < 2 || name.contains("embed") => {
            Rule::AdamW(rest)
        }
        other => other,
    }
}

fn adam_slabs<'a>(
    grad: Floats<'a>,
    master: &'a mut [f32],
    mut moments: impl Iterator<Item = &'a mut [f32]>,
) -> AdamSlabs<'a> {
    AdamSlabs {
        grad,
        master,
        exp_avg: moments.next().unwrap(),
        exp_avg_sq: moments.next().unwrap(),
        max_exp_avg_sq: moments.next(),
        working: None,
    }
}

fn rules() -> [Rule; 8] {
    let adam = AdamW {
        weight_decay: 0.1,
        ..AdamW::default()
    };
    [
        Rule::AdamW(adam),
        Rule::Adam(Adam {
            weight_decay: 0.1,
            amsgrad: true,
            ..Adam::default()
        }),
        Rule::Sgd(Sgd {
            momentum: 0.9,
            weight_decay: 0.01,
            ..Sgd::default()
        }),
        Rule::Sgd(Sgd::default()),
        Rule::Lion(Lion {
            weight_decay: 0.1,
            ..Lion::default()
        }),
        Rule::Adafactor(Adafactor {
            weight_decay: 0.1,
            ..Adafactor::default()
        }),
        Rule::from(Muon::default()),
        Rule::Muon {
            matrices: Muon {
                adjust_lr: AdjustLr::MatchRmsAdamW,
                ..Muon::default()
            },
            rest: adam,
        },
    ]
}

/// 14 1/8 bytes per trainable bf16 parameter, 16 1/8 with two versions, 2 per frozen one; padding only in
/// front of parameters that devices copy, under 64 bytes each time.
#[test]
fn slabs_take_exactly_the_memory_they_should() {
    let sizes = [1, 2, 31, 32, 33, 63, 65, 127, 1000, 4095, 4097, 70_001];
    let all = |frozen: bool| {
        let make = |(i, n): (usize, &usize)| {
            let param = param(DType::BF16, *n, i as u32);
            ("p", if frozen { param.frozen() } else { param })
        };
        sizes.iter().enumerate().map(make).collect::<Vec<_>>()
    };
    let numel: usize = sizes.iter().sum();
    let rule = Some(Rule::AdamW(AdamW::default()));
    for lag in [Lag::Zero, Lag::One] {
        let store = Store::new(
            &layers(vec![all(false), all(true), all(false)]),
            config(lag, rule),
        )
        .unwrap();
        let inference = store.host_bytes();
        assert_eq!(
            (inference.gradients, inference.masters, inference.moments),
            (0, 0, 0)
        );
        store.prepare().unwrap();
        let used = store.host_bytes();
        let slabs = if lag == Lag::One { 2 } else { 1 };
        let slack = 64 * sizes.len();
        let within = |what: &str, bytes: usize, least: usize, padding: usize| {
            assert!(
                (least..least + padding.max(1)).contains(&bytes),
                "{what}: {bytes}, at least {least}"
            );
        };
        within(
            "weights",
            used.weights,
            2 * numel * 2 * slabs,
            slack * 2 * slabs,
        );
        within("gradients", used.gradients, 2 * numel * 2, slack * 2);
        within("frozen", used.frozen, numel * 2, slack);
        within("masters", used.masters, 2 * numel * 17 / 8, slack);
        within("moments", used.moments, 2 * numel * 8, 0);
        let per_trainable = 12 + 2 * slabs;
        within(
            "all",
            used.total(),
            numel * (2 * per_trainable + 2) + 2 * numel / 8,
            slack * (4 + 2 * slabs),
        );
    }
}

/// Moving in changes no bit, gives the old memory back, and clones move along.
#[test]
fn rehoming_keeps_bits() {
    for (pin, dtype) in [(Pin::Alloc, DType::BF16), (Pin::Off, DType::F32)] {
        let model = model(dtype);
        let before = bits(&model);
        let old: Vec<HostBuf> = named(&model)
            .into_iter()
            .map(|(_, param)| param.data())
            .collect();
        let store = Store::new(
            &model,
            StoreConfig {
                pin,
                ..config(Lag::One, None)
            },
        )
        .unwrap();
        assert_eq!(bits(&model), before);
        for (old, (name, param)) in old.iter().zip(named(&model)) {
            let stays = pin == Pin::Off && !param.is_trainable();
            assert_eq!(!old.is_sole(), stays, "{name} with {pin:?}");
        }
        let head = &store.layers()[2].params()[1];
        assert_eq!((head.home, head.name.as_str()), ((0, 0), "l2.head"));
        assert_eq!(
            store.layers()[2].params().len(),
            2,
            "a parameter named twice in a layer is one"
        );
        assert_eq!(
            (store.layers()[1].homes(), store.layers()[2].homes()),
            (&[0, 1][..], &[0, 2][..])
        );
        assert_eq!(
            (store.grad_layers(0), store.grad_layers(2)),
            (vec![0, 1, 2], vec![2])
        );
    }
}

/// What an upload brings is each parameter at its place, at every version, in as few copies as
/// there are slabs.
#[test]
fn segments_fill_the_block() {
    for (pin, counts) in [(Pin::Alloc, [2, 3, 2]), (Pin::Off, [2, 3, 2])] {
        let model = model(DType::BF16);
        let rule = Some(Rule::Sgd(Sgd::default()));
        let store = Store::new(
            &model,
            StoreConfig {
                pin,
                ..config(Lag::One, rule)
            },
        )
        .unwrap();
        for version in 0..3 {
            for (l, layer) in store.layers().iter().enumerate() {
                let segments = store.segments(l, version).unwrap();
                assert_eq!(segments.len(), counts[l], "layer {l} with {pin:?}");
                let mut block = vec![0xAAu8; layer.block_bytes()];
                for segment in segments {
                    let at = segment.block_offset;
                    assert_eq!(at % 64, 0);
                    block[at..at + segment.data.len()].copy_from_slice(&bytes(&segment.data));
                }
                for param in layer.params() {
                    let at = param.block_offset;
                    assert_eq!(at % 64, 0, "{}", param.name);
                    assert_eq!(
                        block[at..at + param.param.bytes()],
                        bytes(&param.param.data()),
                        "{}",
                        param.name
                    );
                }
            }
            land(&store, version + 1, 1.0);
            store
                .step(&Update::new(0.1), version + 1, &store.abort())
                .unwrap();
        }
    }
}

/// Frozen parameters move into pinned memory as long as there is any; where there is no more they
/// stay where they are, and what is uploaded has the same bytes either way.
#[test]
fn frozen_parameters_stay_where_nothing_can_be_pinned() {
    // Each layer has 400 bytes, of which half are frozen.
    let make = |l: u32| {
        vec![
            ("w", param(DType::F32, 50, l)),
            ("base", param(DType::F32, 50, 9 + l).frozen()),
        ]
    };
    for (pin, most, moved) in [
        (Pin::Try, 0, 0),
        (Pin::Try, 400, 1),
        (Pin::Try, 600, 1),
        (Pin::Try, 4096, 3),
        (Pin::Off, 4096, 0),
    ] {
        let world = SimWorld::new(SimConfig {
            pinned: Bytes(most),
            ..SimConfig::default()
        })
        .unwrap();
        let model = layers((0..3).map(make).collect());
        let base = |l: usize| model[l].1.named_params()[1].1.data();
        let (before, values): (Vec<HostBuf>, _) = ((0..3).map(base).collect(), bits(&model));
        let store = Store::new(
            &model,
            StoreConfig {
                pin,
                ..StoreConfig::new(world.worker())
            },
        )
        .unwrap();
        let has_moved: Vec<bool> = (0..3).map(|l| !base(l).is_same(&before[l])).collect();
        assert_eq!(
            has_moved,
            [moved > 0, moved > 1, moved > 2],
            "{pin:?}, {most} pinned"
        );
        assert!((0..moved).all(|l| base(l).is_pinned()) && bits(&model) == values);
        for (l, layer) in store.layers().iter().enumerate() {
            let mut block = vec![0; layer.block_bytes()];
            for Segment { data, block_offset } in store.segments(l, 0).unwrap() {
                block[block_offset..block_offset + data.len()].copy_from_slice(&bytes(&data));
            }
            let at = layer.params()[1].block_offset;
            assert_eq!(
                block[at..at + 200],
                bytes(&before[l]),
                "layer {l}, {pin:?}, {most} pinned"
            );
        }
    }
}

/// The store is a plain optimizer, moved: same gradients, same bits, with one slab and with two.
#[test]
fn updates_equal_the_plain_optimizer() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for rule in rules() {
            for lag in [Lag::Zero, Lag::One] {
                let clip = (lag == Lag::One).then_some(0.5).or(Some(1e6));
                compare(dtype, config(lag, Some(rule)), clip);
            }
        }
    }
    let rule = Some(rules()[0]);
    compare(
        DType::BF16,
        StoreConfig {
            grad_dtype: Some(DType::F32),
            ..config(Lag::One, rule)
        },
        None,
    );
    compare(
        DType::BF16,
        StoreConfig {
            threads: Some(3),
            ..config(Lag::Zero, rule)
        },
        Some(0.1),
    );
}

/// With bf16 masters and moments an element is computed in f32 and rounded once, by every rule; f32
/// parameters keep f32 state.
#[test]
fn narrow_state_equals_rounding_after_each_step() {
    for rule in rules() {
        for lag in [Lag::Zero, Lag::One] {
            let narrow = StoreConfig {
                optim_dtype: DType::BF16,
                ..config(lag, Some(rule))
            };
            compare(DType::BF16, narrow.clone(), Some(0.5));
            compare(DType::F32, narrow, None);
        }
    }
}

/// 8 bytes per bf16 parameter with bf16 masters and moments of AdamW, instead of 14 1/8: weight,
/// gradient and two moments. A custom step sees f32 values and rounds them.
#[test]
fn narrow_state_takes_half_the_memory() {
    let make = || layers(vec![vec![("weight", shaped(DType::BF16, &[64, 32], 1))]]);
    let bytes = |optim_dtype: DType| {
        let narrow = StoreConfig {
            optim_dtype,
            ..config(Lag::Zero, Some(Rule::AdamW(AdamW::default())))
        };
        let store = Store::new(&make(), narrow).unwrap();
        let forecast = store.host_bytes().weights;
        store.prepare().unwrap();
        let used = store.host_bytes();
        assert_eq!(used.weights, forecast);
        (used.masters, used.moments, used.total())
    };
    let numel = 64 * 32;
    let masters = 2 * numel + numel / 8;
    assert_eq!(
        bytes(DType::F32),
        (masters, 8 * numel, 12 * numel + masters)
    );
    assert_eq!(bytes(DType::BF16), (0, 4 * numel, 8 * numel));
    for lag in [Lag::Zero, Lag::One] {
        let model = make();
        let narrow = StoreConfig {
            optim_dtype: DType::BF16,
            ..config(lag, None)
        };
        let store = Store::new(&model, narrow).unwrap();
        let before = store.optim_params().unwrap()[0].to_vec().unwrap();
        land(&store, 1, 1.0);
        let step = |params: &mut roundpipe::OptimParams<'_>| {
            for param in params.iter_mut() {
                assert_eq!(param.value, &before[..]);
                param.value.iter_mut().for_each(|x| *x += 0.001);
            }
            Ok(())
        };
        store
            .apply_fn(versions(1), &store.abort(), &mut { step })
            .unwrap();
        let rounded = |x: &f32| bf16::from_f32(x + 0.001).to_f32();
        let expected: Vec<f32> = before.iter().map(rounded).collect();
        let after = store.optim_params().unwrap()[0].to_vec().unwrap();
        assert_eq!(after, expected, "{lag:?}");
        land(&store, 2, 1.0);
        let failing = &mut |params: &mut roundpipe::OptimParams<'_>| {
            params.iter_mut().for_each(|param| param.value.fill(7.0));
            Err(Error::config("test", "no"))
        };
        store
            .apply_fn(versions(2), &store.abort(), failing)
            .unwrap_err();
        let after = store.optim_params().unwrap()[0].to_vec().unwrap();
        assert_eq!(after, expected, "{lag:?}");
    }
}

/// Adafactor keeps a number per row and per column of each matrix, and one per element of a vector.
#[test]
fn adafactor_keeps_rows_and_columns() {
    let model = layers(vec![vec![
        ("up", shaped(DType::F32, &[30, 20], 1)),
        ("experts", shaped(DType::F32, &[4, 5, 6], 2)),
        ("norm", shaped(DType::F32, &[7], 3)),
    ]]);
    let store = Store::new(&model, config(Lag::Zero, Some(Adafactor::default().into()))).unwrap();
    store.prepare().unwrap();
    assert_eq!(store.host_bytes().moments, 4 * (30 + 20 + 4 * (5 + 6) + 7));
    let shapes: Vec<Vec<Vec<usize>>> = store
        .optim_params()
        .unwrap()
        .iter()
        .map(|param| param.moment_shapes().map(|s| s.to_vec()).collect())
        .collect();
    let expected = [
        vec![vec![30, 1], vec![1, 20]],
        vec![vec![4, 5, 1], vec![4, 1, 6]],
        vec![vec![7]],
    ];
    assert_eq!(shapes, expected);
}

/// What Muon updates and what AdamW does is decided by sizes and names, or by groups, and printed.
#[test]
fn parameters_have_the_rule_that_fits_them() {
    let layers = model(DType::BF16);
    let store = Store::new(&layers, config(Lag::Zero, Some(Muon::default().into()))).unwrap();
    let lines = |store: &Store| -> Vec<String> {
        let rules = store.param_rules();
        rules.iter().map(ToString::to_string).collect()
    };
    let expected = [
        "l0.embed [13, 77]: AdamW",
        "l1.norm [33]: AdamW",
        "l1.weight [70003]: AdamW",
        "l1.bias [1]: AdamW",
        "l1.up [21, 40]: Muon",
        "l1.experts [3, 12, 10]: Muon",
        "l2.norm [65]: AdamW",
    ];
    assert_eq!(lines(&store), expected);
    let groups = [
        ParamGroup::matching("*.up").rule(Sgd::default()),
        ParamGroup::matching("*.embed")
            .rule(Muon::default())
            .lr_factor(0.5),
        ParamGroup::matching("*.bias").frozen(true),
    ];
    store.set_groups(&groups).unwrap();
    let now = lines(&store);
    assert_eq!(now[0], "l0.embed [13, 77]: Muon, lr x 0.5");
    assert_eq!(now[3], "l1.bias [1]: frozen");
    assert_eq!(now[4], "l1.up [21, 40]: SGD");
    store.prepare().unwrap();
    let moments: usize = [2, 2, 2, 0, 1, 2]
        .iter()
        .zip([33, 70_003, 1, 21 * 40, 3 * 12 * 10, 65])
        .map(|(count, numel)| 4 * count * numel)
        .sum();
    assert_eq!(store.host_bytes().moments, moments + 4 * 13 * 77);
    land(&store, 1, 1.0);
    let update = Update::new(0.01);
    store.step(&update, 1, &store.abort()).unwrap();
    // The moments are there, so the rules stay.
    let error = store.set_groups(&[]).unwrap_err().to_string();
    assert!(error.contains("l0.embed has moments of Muon"), "{error}");
    assert_eq!(lines(&store), now);
    let other = ParamGroup::matching("*.experts").betas(0.9, 0.99);
    let error = store.set_groups(&[other]).unwrap_err().to_string();
    assert!(error.contains("Muon, which has no betas"), "{error}");
}

/// Clipping by value comes before the norm, of the sum where layers share a parameter.
#[test]
fn clipping_by_value_equals_a_plain_clamp() {
    for lag in [Lag::Zero, Lag::One] {
        for rule in rules() {
            let limits = Update {
                clip: Some(3.0),
                clip_value: Some(0.05),
                ..Update::new(0.0)
            };
            compare_with(DType::BF16, config(lag, Some(rule)), limits);
        }
    }
}

fn compare(dtype: DType, config: StoreConfig, clip: Option<f64>) {
    let limits = Update {
        clip,
        ..Update::new(0.0)
    };
    compare_with(dtype, config, limits);
}

/// `limits` are those of every step; the learning rate is another in each.
fn compare_with(dtype: DType, config: StoreConfig, limits: Update) {
    let what = format!("{dtype}, {:?}, {:?}", config.rule, config.max_lag);
    let decays = |name: &str, _: &Param| !name.contains("norm");
    let (plain, stored) = (model(dtype), model(dtype));
    let (rule, state) = (config.rule.unwrap(), config.optim_dtype);
    let mut optimizer = PlainOptimizer::with_state(&plain, rule, state, decays);
    let store = Store::new(&stored, config).unwrap();
    let norms = ParamGroup::matching("*norm*").weight_decay(0.0);
    store.set_groups(&[norms]).unwrap();
    for step in 1..=5 {
        let update = Update {
            lr: 0.01 / step as f64,
            ..limits
        };
        add(&mut optimizer, &store, &plain, step);
        land(&store, step, 1.0);
        let expected = optimizer.step(&update);
        let report = store.step(&update, step, &store.abort()).unwrap();
        assert_eq!(report, expected, "{what}");
        assert!(bits(&stored) == bits(&plain), "{what}, step {step}");
        assert!(
            store
                .layers()
                .iter()
                .all(|l| (0..l.params().len()).all(|i| !l.filled(i)))
        );
    }
    assert_eq!(store.steps(), 5);
}

/// The weights after four steps with these groups.
fn trained(lag: Lag, rule: AdamW, groups: &[ParamGroup], lr: f64) -> Vec<(String, Vec<u8>)> {
    let layers = model(DType::BF16);
    let store = Store::new(&layers, config(lag, Some(rule.into()))).unwrap();
    store.set_groups(groups).unwrap();
    for step in 1..=4 {
        land(&store, step, 1.0);
        let update = Update::new(lr);
        store.step(&update, step, &store.abort()).unwrap();
    }
    bits(&layers)
}

/// A group is the rule with other settings, bit by bit: each of its parameters equals the same one
/// in a store whose rule has these settings for all. The first group that matches decides alone,
/// and a shared parameter matches by any of its names.
#[test]
fn a_group_is_the_rule_with_other_settings() {
    let base = AdamW {
        weight_decay: 0.1,
        ..AdamW::default()
    };
    let betas = AdamW {
        beta1: 0.7,
        beta2: 0.8,
        ..base
    };
    let plain = AdamW {
        weight_decay: 0.0,
        ..base
    };
    let groups = [
        ParamGroup::matching("l2.hea*").lr_factor(0.5),
        ParamGroup::matching("l1.norm").betas(0.7, 0.8),
        ParamGroup::filter(|name, shape| name == "l1.weight" && shape.numel() == 70_003)
            .frozen(true),
        ParamGroup::matching("*norm*").weight_decay(0.0),
    ];
    for lag in [Lag::Zero, Lag::One] {
        let untrained = bits(&model(DType::BF16));
        let expected = [
            ("l0.embed", trained(lag, base, &[], 0.005)),
            ("l1.norm", trained(lag, betas, &[], 0.01)),
            ("l1.weight", untrained),
            ("l1.bias", trained(lag, base, &[], 0.01)),
            ("l2.norm", trained(lag, plain, &[], 0.01)),
        ];
        let own = trained(lag, base, &[], 0.01);
        let grouped = trained(lag, base, &groups, 0.01);
        for (name, all) in expected {
            let of = |all: &[(String, Vec<u8>)]| {
                let found = all.iter().find(|(other, _)| other == name);
                found.unwrap().1.clone()
            };
            assert!(of(&grouped) == of(&all), "{name}, {lag:?}");
            let differs = name != "l1.bias";
            assert_eq!(of(&grouped) != of(&own), differs, "{name}, {lag:?}");
        }
    }
}

/// Steps in which a group freezes a parameter are not steps of the parameter: when it is trained
/// again, it goes on as if they had not been. Its gradients are not part of the norm.
#[test]
fn a_group_can_be_frozen_for_some_steps() {
    let rule = Some(Rule::AdamW(AdamW::default()));
    for lag in [Lag::Zero, Lag::One] {
        let (late, fresh) = (model(DType::BF16), model(DType::BF16));
        let a = Store::new(&late, config(lag, rule)).unwrap();
        let b = Store::new(&fresh, config(lag, rule)).unwrap();
        let all = [ParamGroup::matching("*").frozen(true)];
        a.set_groups(&all).unwrap();
        for step in 1..=2 {
            land(&a, step, 1.0);
            let report = a.step(&Update::new(0.01), step, &a.abort()).unwrap();
            assert_eq!((report.step, report.grad_norm), (step, 0.0));
        }
        assert!(bits(&late) == bits(&fresh), "{lag:?}");
        a.set_groups(&[]).unwrap();
        for step in 3..=6 {
            land(&a, step, 1.0);
            a.step(&Update::new(0.01), step, &a.abort()).unwrap();
            b.wait_grad_free(0, step - 2, &b.abort()).unwrap();
            write_gradients(&b, step, 1.0);
            let report = b.step(&Update::new(0.01), step - 2, &b.abort()).unwrap();
            assert!(report.grad_norm > 0.0);
        }
        assert!(bits(&late) == bits(&fresh), "{lag:?}");
    }
}

/// What is wrong with a group is said where it is given, by the name that it has there, and the
/// groups before it stay.
#[test]
fn wrong_groups_are_refused() {
    let sgd = Rule::Sgd(Sgd::default());
    let adam = Rule::AdamW(AdamW::default());
    let any = || ParamGroup::matching("*");
    let wrong = [
        (
            adam,
            ParamGroup::matching("*.bais"),
            "groups: \"*.bais\" matches no parameter; the first trained one is \"l0.embed\"",
        ),
        (
            adam,
            ParamGroup::matching("l1.base"),
            "groups: \"l1.base\" matches no parameter; the first trained one is \"l0.embed\"",
        ),
        (
            adam,
            any().betas(0.9, 1.5),
            "groups: \"*\": adam: beta2 is 1.5, it must be from 0 up to, but not including, 1",
        ),
        (
            sgd,
            any().betas(0.9, 0.99),
            "groups: \"*\": the rule is SGD, which has no betas",
        ),
        (
            sgd,
            ParamGroup::filter(|_, _| true).weight_decay(-1.0),
            "groups: group 0: sgd: weight_decay is -1, it must be finite and at least 0",
        ),
        (
            sgd,
            any().lr_factor(f64::NAN),
            "groups: \"*\": lr_factor is NaN, it must be finite and at least 0",
        ),
    ];
    for (rule, group, line) in wrong {
        let store = Store::new(&model(DType::F32), config(Lag::Zero, Some(rule))).unwrap();
        store.set_groups(&[any().lr_factor(2.0)]).unwrap();
        let before = store.groups();
        let text = store.set_groups(&[group]).unwrap_err().to_string();
        assert_eq!(text, line);
        assert_eq!(store.groups(), before);
    }
    let store = Store::new(&model(DType::F32), config(Lag::Zero, None)).unwrap();
    let text = store.set_groups(&[any()]).unwrap_err().to_string();
    assert!(text.starts_with("groups: there is no rule"), "{text}");
    store.set_groups(&[]).unwrap();
}

/// A learning rate that becomes infinite with a group's factor is refused before the first layer
/// changes.
#[test]
fn a_rate_that_overflows_changes_nothing() {
    let layers = model(DType::F32);
    let before = bits(&layers);
    let rule = Some(Rule::Sgd(Sgd::default()));
    let store = Store::new(&layers, config(Lag::Zero, rule)).unwrap();
    let last = ParamGroup::matching("l2.norm").lr_factor(1e300);
    store.set_groups(&[last]).unwrap();
    land(&store, 1, 1.0);
    let error = store.step(&Update::new(1e300), 1, &store.abort());
    let text = error.unwrap_err().to_string();
    assert!(text.starts_with("lr: inf"), "{text}");
    assert!(bits(&layers) == before);
}

/// The engine updates layers as their gradients land, last first: the order must not matter.
#[test]
fn layer_by_layer_equals_the_whole() {
    let rule = Some(rules()[0]);
    let (whole, single) = (model(DType::BF16), model(DType::BF16));
    let a = Store::new(&whole, config(Lag::Zero, rule)).unwrap();
    let b = Store::new(&single, config(Lag::One, rule)).unwrap();
    let update = Update {
        clip: Some(0.3),
        ..Update::new(0.01)
    };
    for step in 1..=3 {
        land(&a, step, 1.0);
        land(&b, step, 1.0);
        a.step(&update, step, &a.abort()).unwrap();
        let mut squares: Vec<_> = (0..3)
            .rev()
            .map(|l| b.squares(l, &b.groups(), None).unwrap())
            .collect();
        squares.reverse();
        let decision = update.decide(Store::total(&squares));
        for layer in (0..3).rev() {
            let apply = Apply {
                step,
                lr: update.lr,
                clip_value: None,
                groups: b.groups(),
                factor: decision.factor,
                next_version: step,
            };
            b.apply(layer, &apply, &b.abort()).unwrap();
        }
        assert!(bits(&whole) == bits(&single), "step {step}");
    }
}

/// A shared parameter is summed in pieces; where they end must not show.
#[test]
fn a_large_shared_parameter_is_summed_as_a_whole() {
    let numel = 64 * CHUNK + 5;
    let make = || {
        let tied = param(DType::BF16, numel, 1);
        layers(vec![vec![("embed", tied.clone())], vec![("head", tied)]])
    };
    let (plain, stored) = (make(), make());
    let rule = Rule::AdamW(AdamW::default());
    let mut optimizer = PlainOptimizer::new(&plain, rule, |_, _| true);
    let update = Update {
        clip: Some(1.0),
        ..Update::new(0.1)
    };
    let store = Store::new(&stored, config(Lag::Zero, Some(rule))).unwrap();
    add(&mut optimizer, &store, &plain, 1);
    land(&store, 1, 1.0);
    let expected = optimizer.step(&update);
    let report = store.step(&update, 1, &store.abort()).unwrap();
    assert_eq!(report, expected);
    assert!(bits(&stored) == bits(&plain));
}

/// A power of two as loss scale changes no bit, and clipping measures what is unscaled.
#[test]
fn a_loss_scale_leaves_no_trace() {
    let (scaled, plain) = (model(DType::BF16), model(DType::BF16));
    let a = Store::new(&scaled, config(Lag::Zero, Some(rules()[0]))).unwrap();
    let b = Store::new(&plain, config(Lag::Zero, Some(rules()[0]))).unwrap();
    let update = Update {
        clip: Some(1.0),
        ..Update::new(0.01)
    };
    land(&a, 1, 1024.0);
    land(&b, 1, 1.0);
    let unscale = Update {
        grad_scale: 1.0 / 1024.0,
        ..update
    };
    let norms = [
        a.step(&unscale, 1, &a.abort()).unwrap(),
        b.step(&update, 1, &b.abort()).unwrap(),
    ];
    assert_eq!(norms[0], norms[1]);
    assert!(bits(&scaled) == bits(&plain));
}

/// A skipped step moves the version on, so that readers go on, and changes nothing else.
#[test]
fn a_step_with_infinite_gradients_is_skipped() {
    for lag in [Lag::Zero, Lag::One] {
        let model = model(DType::F16);
        let store = Store::new(&model, config(lag, Some(rules()[0]))).unwrap();
        let update = Update {
            skip_nonfinite: true,
            ..Update::new(0.01)
        };
        land(&store, 1, 1.0);
        assert!(!store.step(&update, 1, &store.abort()).unwrap().skipped);
        let before = (bits(&model), state(&store));
        land(&store, 2, f32::INFINITY);
        let report = store.step(&update, 2, &store.abort()).unwrap();
        assert!(report.skipped && report.step == 1);
        assert!((bits(&model), state(&store)) == before);
        assert_eq!(store.layers()[1].versions().current(), 2);
        assert!(!store.layers()[1].filled(2));
        land(&store, 3, 1.0);
        assert_eq!(store.step(&update, 3, &store.abort()).unwrap().step, 2);
    }
}

fn state(store: &Store) -> Vec<Vec<u8>> {
    let all = store.optim_params().unwrap();
    all.iter()
        .flat_map(|p| [p.value()].into_iter().chain(p.moments().to_vec()))
        .map(|b| bytes(&b))
        .collect()
}

/// Gradient descent as a user would write it has the bits of the built-in one.
#[test]
fn a_function_can_be_the_optimizer() {
    for dtype in [DType::BF16, DType::F32] {
        for lag in [Lag::Zero, Lag::One] {
            let (by_rule, by_function) = (model(dtype), model(dtype));
            let a = Store::new(&by_rule, config(lag, Some(Rule::Sgd(Sgd::default())))).unwrap();
            let b = Store::new(&by_function, config(lag, None)).unwrap();
            for step in 1..=4 {
                land(&a, step, 1.0);
                land(&b, step, 1.0);
                a.step(&Update::new(0.25), step, &a.abort()).unwrap();
                b.apply_fn(versions(step), &b.abort(), &mut |params| {
                    assert_eq!(params.len(), 7);
                    for param in params.iter_mut() {
                        let Some(grad) = param.grad_f32() else {
                            continue;
                        };
                        param
                            .value
                            .iter_mut()
                            .zip(grad)
                            .for_each(|(x, g)| *x -= 0.25 * g);
                    }
                    Ok(())
                })
                .unwrap();
                assert!(
                    bits(&by_rule) == bits(&by_function),
                    "{dtype}, {lag:?}, step {step}"
                );
            }
            let values = b.optim_params().unwrap();
            assert_eq!(values[0].name, "l0.embed");
            assert_eq!(
                values[0].to_vec().unwrap(),
                a.optim_params().unwrap()[0].to_vec().unwrap()
            );
        }
    }
}

/// A function that fails or panics half-way has changed nothing, and the step can be done again.
#[test]
fn a_failing_function_leaves_everything_as_before() {
    for (dtype, lag) in [
        (DType::BF16, Lag::Zero),
        (DType::BF16, Lag::One),
        (DType::F32, Lag::Zero),
        (DType::F32, Lag::One),
    ] {
        let model = model(dtype);
        let store = Store::new(&model, config(lag, Some(rules()[0]))).unwrap();
        land(&store, 1, 1.0);
        store.step(&Update::new(0.01), 1, &store.abort()).unwrap();
        land(&store, 2, 1.0);
        let before = (bits(&model), state(&store));
        let spoil = |panics: bool| {
            store.apply_fn(versions(2), &store.abort(), &mut |params| {
                for (i, param) in params.iter_mut().enumerate() {
                    param.value.fill(7.0);
                    assert!(!(panics && i == 2), "on purpose");
                }
                Err(Error::config("test", "on purpose"))
            })
        };
        assert!(spoil(false).unwrap_err().to_string().contains("on purpose"));
        assert!((bits(&model), state(&store)) == before, "{dtype}, {lag:?}");
        assert!(catch_unwind(AssertUnwindSafe(|| spoil(true))).is_err());
        assert!(
            (bits(&model), state(&store)) == before,
            "{dtype}, {lag:?}, after a panic"
        );
        assert_eq!(
            (
                store.layers()[0].versions().current(),
                store.layers()[1].filled(2)
            ),
            (1, true)
        );
        store.step(&Update::new(0.01), 2, &store.abort()).unwrap();
    }
}

/// A parameter that somebody reads stops the step before anything is written; afterwards it goes
/// through.
#[test]
fn a_busy_parameter_stops_the_whole_step() {
    let model = model(DType::BF16);
    let store = Store::new(&model, config(Lag::Zero, Some(rules()[0]))).unwrap();
    land(&store, 1, 1.0);
    let before = (bits(&model), state(&store));
    let reading = store.layers()[2].params()[0]
        .param
        .data()
        .read_all()
        .unwrap();
    assert!(store.step(&Update::new(0.01), 1, &store.abort()).is_err());
    assert!((bits(&model), state(&store)) == before);
    drop(reading);
    assert_eq!(
        store
            .step(&Update::new(0.01), 1, &store.abort())
            .unwrap()
            .step,
        1
    );
}

/// While updates run beside readers, a ticket's version stays the same bits to the end.
#[test]
fn readers_keep_their_version_while_updates_run() {
    for lag in [Lag::Zero, Lag::One] {
        let model = model(DType::BF16);
        let store = Store::new(&model, config(lag, Some(rules()[0]))).unwrap();
        store.prepare().unwrap();
        let abort = store.abort();
        let steps = 20;
        let lag = u64::from(lag == Lag::One);
        let ticket = |step: u64| {
            store.layers()[1]
                .versions()
                .reserve((step - 1).saturating_sub(lag))
        };
        std::thread::scope(|scope| {
            let (send, receive) =
                std::sync::mpsc::sync_channel::<roundpipe::testing::ReadTicket>(1);
            let reader = scope.spawn(|| {
                for ticket in receive {
                    ticket.wait_readable(&abort).unwrap();
                    let read = || bytes(&store.segments(1, ticket.version()).unwrap()[0].data);
                    let seen = read();
                    std::thread::yield_now();
                    assert!(read() == seen, "version {} changed", ticket.version());
                }
            });
            let mut next = ticket(1);
            for step in 1..=steps {
                let held = std::mem::replace(&mut next, ticket(step + 1));
                send.send(held).unwrap();
                land(&store, step, 1.0);
                store.step(&Update::new(0.01), step, &abort).unwrap();
            }
            drop(send);
            drop(next);
            reader.join().unwrap();
        });
        assert_eq!(store.layers()[1].versions().current(), steps);
    }
}

/// A checkpoint holds copies and moments; a run that goes on from them has the bits of one that
/// never stopped.
#[test]
fn state_moves_to_another_store() {
    for dtype in [DType::BF16, DType::F32] {
        let (first, second) = (model(dtype), model(dtype));
        let a = Store::new(&first, config(Lag::One, Some(rules()[1]))).unwrap();
        for step in 1..=3 {
            land(&a, step, 1.0);
            a.step(&Update::new(0.1), step, &a.abort()).unwrap();
        }
        let b = Store::new(&second, config(Lag::Zero, Some(rules()[1]))).unwrap();
        for (from, to) in a
            .optim_params()
            .unwrap()
            .iter()
            .zip(b.optim_params().unwrap())
        {
            let copy = |src: &HostBuf, dst: &HostBuf| {
                dst.write(0..dst.len())
                    .unwrap()
                    .bytes()
                    .copy_from_slice(&bytes(src));
            };
            let value = from.value().read_all().unwrap();
            b.set_value(&to, &value).unwrap();
            from.moments()
                .iter()
                .zip(to.moments())
                .for_each(|(src, dst)| copy(src, dst));
        }
        b.weights_from_copies().unwrap();
        b.set_steps(a.steps());
        assert!(
            bits(&first) == bits(&second) && state(&a) == state(&b),
            "{dtype}"
        );
        // Versions of the new store start at 0: its next is 1.
        land(&a, 4, 1.0);
        a.step(&Update::new(0.1), 4, &a.abort()).unwrap();
        write_gradients(&b, 4, 1.0);
        b.step(&Update::new(0.1), 1, &b.abort()).unwrap();
        assert!(
            bits(&first) == bits(&second) && state(&a) == state(&b),
            "{dtype}, one step on"
        );
    }
}

/// A master of which only the rounded weight is stored keeps all of its bits where the user writes
/// the weight that is there, however often and in whatever parts, and becomes the weight elsewhere.
#[test]
fn masters_keep_their_bits_under_weights_written_as_they_are() {
    for lag in [Lag::Zero, Lag::One] {
        let model = model(DType::BF16);
        let store = Store::new(&model, config(lag, Some(rules()[0]))).unwrap();
        let master = || -> Vec<f32> {
            let all = store.optim_params().unwrap();
            let weight = all.iter().find(|p| p.name == "l1.weight");
            weight.unwrap().to_vec().unwrap()
        };
        for step in 1..=3 {
            land(&store, step, 1.0);
            store
                .step(&Update::new(1e-4), step, &store.abort())
                .unwrap();
        }
        let before = master();
        let is_rounded = |x: &&f32| bf16::from_f32(**x).to_f32() == **x;
        assert!(before.iter().filter(is_rounded).count() < before.len() / 2);
        let weight = &store.layers()[1].params()[2].param;
        let handle = store.optim_params().unwrap().swap_remove(2);
        assert_eq!(handle.name, "l1.weight");
        let old = weight.to_vec::<bf16>().unwrap();
        let write = |range: std::ops::Range<usize>, change: &dyn Fn(usize, bf16) -> bf16| {
            let data = weight.data();
            let mut part = data.write(2 * range.start..2 * range.end).unwrap();
            for (at, x) in range.clone().zip(part.as_mut_slice::<bf16>()) {
                *x = change(at, old[at]);
            }
        };
        let seven = bf16::from_f32(7.0);
        write(100..70_003, &|_, _| seven);
        write(0..50_000, &|_, _| seven);
        // A copy that was taken before shows what the optimizer has until the next step.
        assert!(handle.to_vec().unwrap() == before, "{lag:?}");
        write(0..70_003, &|at, x| if at % 3 == 0 { seven } else { x });
        let expected = |(at, x): (usize, &f32)| if at % 3 == 0 { 7.0 } else { *x };
        let expected: Vec<f32> = before.iter().enumerate().map(expected).collect();
        assert!(master() == expected, "{lag:?}");
        // What one write changed and the next one changed back was never changed.
        write(0..70_003, &|at, x| if at % 3 == 0 { seven } else { x });
        assert!(master() == expected, "{lag:?}: written again");
    }
}

/// Weights loaded into the parameters after the store was made are what the next update starts
/// from.
#[test]
fn copies_follow_loaded_weights() {
    let model = model(DType::BF16);
    let store = Store::new(&model, config(Lag::Zero, Some(rules()[0]))).unwrap();
    store.prepare().unwrap();
    let weight = &store.layers()[1].params()[2].param;
    let values: Vec<bf16> = (0..70_003).map(|i| bf16::from_f32(i as f32)).collect();
    weight
        .data()
        .write(0..weight.bytes())
        .unwrap()
        .as_mut_slice()
        .copy_from_slice(&values);
    store.follow_writes().unwrap();
    let copy = store
        .optim_params()
        .unwrap()
        .into_iter()
        .find(|p| p.name == "l1.weight")
        .unwrap();
    assert!(
        copy.to_vec()
            .unwrap()
            .iter()
            .zip(&values)
            .all(|(copy, x)| *copy == x.to_f32())
    );
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let refuse =
        |layers: Layers, config: StoreConfig| Store::new(&layers, config).unwrap_err().to_string();
    let text = refuse(
        layers(vec![vec![("w", param(DType::F64, 3, 1))]]),
        config(Lag::Zero, None),
    );
    assert!(
        text.contains("l0.w is f64") && text.contains("freeze"),
        "{text}"
    );
    let wrong = StoreConfig {
        grad_dtype: Some(DType::F16),
        ..config(Lag::Zero, None)
    };
    let text = refuse(model(DType::BF16), wrong);
    assert!(
        text.contains("grad_dtype") && text.contains("l0.embed"),
        "{text}"
    );
    let store = Store::new(&model(DType::F32), config(Lag::Zero, None)).unwrap();
    assert!(
        store
            .step(&Update::new(0.1), 1, &store.abort())
            .unwrap_err()
            .to_string()
            .contains("no rule")
    );
    let store = Store::new(&model(DType::F32), config(Lag::Zero, Some(rules()[0]))).unwrap();
    assert!(
        store
            .step(&Update::new(0.1), 1, &store.abort())
            .unwrap_err()
            .to_string()
            .contains("no gradients")
    );
    assert_eq!(store.layers()[0].versions().current(), 0);
}
