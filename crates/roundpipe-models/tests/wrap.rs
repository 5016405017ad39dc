//! Models wrapped by the rules, in parts, against their preset, one engine: every bit, for tied
//! weights too, at both lags, with f16 and a loss scale, and over several calls per step.

use std::sync::Arc;

use roundpipe::engine::StepHandle;
use roundpipe::optim::AdamW;
use roundpipe::{
    AutoWrapped, Bytes, Cpu, Cx, DType, Device, GradScaler, HostTensor, Inputs, Lag, Node, Params,
    Ring, RingOptions, RoundPipe, Rule, RunConfig, ScalerState, Tree, Update, WrapConfig, Wrapped,
    wrap,
};
use roundpipe_models::{Model, ModelConfig, preset};
use roundpipe_tensor::Worker;
use serde_json::{Value, json};

const VOCAB: usize = 96;
const BATCH: usize = 4;
const SEQ: usize = 6;

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
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        }),
        _ => json!({}),
    };
    if let (Value::Object(sizes), Value::Object(more)) = (&mut sizes, more) {
        sizes.extend(more);
    }
    preset(name).unwrap().with(&sizes).unwrap()
}

fn ring(workers: usize) -> Ring {
    let devices = Cpu::workers(workers, Some(1)).unwrap();
    let devices: Vec<Arc<dyn Device>> = devices
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>)
        .collect();
    let options = RingOptions {
        memory: Some(Bytes::mib(64)),
        ..RingOptions::default()
    };
    Ring::new(&devices, &options).unwrap()
}

fn config(workers: usize, by_rules: bool) -> WrapConfig {
    let rule = AdamW {
        weight_decay: 0.01,
        ..AdamW::default()
    };
    WrapConfig {
        use_sequential_preset: by_rules.then_some(false),
        run_config: RunConfig::new().num_microbatch(2),
        lower_threshold: 1 << 30,
        upper_threshold: Some(0),
        ring: Some(ring(workers)),
        optimizer: Some(Rule::AdamW(rule)),
        optimizer_threads: Some(1),
        seed: 3,
        ..WrapConfig::default()
    }
}

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
    fn new(model: &Model, workers: usize, by_rules: bool) -> Self {
        match wrap(model.clone(), &config(workers, by_rules)).unwrap() {
            Wrapped::Engine(engine) => {
                let notes = engine.take_warnings();
                let family = model.config.family.model_type();
                let note = format!("wrap: a preset for {family} was found;");
                assert!(notes[0].starts_with(&note), "{notes:?}");
                Self::Preset(engine)
            }
            Wrapped::Auto(auto) => {
                let paths: Vec<&str> = auto.engines().map(|(path, _)| path).collect();
                let want = [
                    "model.embed_tokens",
                    "model.layers.0",
                    "model.layers.1",
                    "model.layers.2",
                    "lm_head",
                ];
                assert_eq!(paths, want);
                Self::Auto(auto)
            }
        }
    }

    /// A forward, the loss outside the model, and the backward; the loss, and the bits of the logits.
    fn classic(&self, call: usize, scale: f64) -> (u64, Vec<u64>) {
        let inputs = Inputs::new().named("ids", ids(call));
        match self {
            Self::Preset(engine) => {
                let forward = engine.forward(inputs, &RunConfig::new()).unwrap();
                let logits = forward.output().unwrap().clone().tensor().unwrap();
                let (loss, grad) = loss(&logits, call, scale);
                forward.backward(grad).unwrap();
                (loss.to_bits(), bits(&logits))
            }
            Self::Auto(model) => {
                let forward = model.forward(inputs, &RunConfig::new()).unwrap();
                let logits = forward.output().clone().tensor().unwrap();
                let (loss, grad) = loss(&logits, call, scale);
                forward.backward(grad).unwrap();
                (loss.to_bits(), bits(&logits))
            }
        }
    }

    /// The same with the loss in the model's last layer.
    fn with_labels(&self, call: usize) -> Vec<u64> {
        let inputs = Inputs::new()
            .named("input_ids", ids(call))
            .named("labels", ids(call + 1))
            .named("position_ids", positions());
        let one = HostTensor::scalar(1.0f32).unwrap();
        match self {
            Self::Preset(engine) => {
                let forward = engine.forward(inputs, &RunConfig::new()).unwrap();
                let loss = forward.output().unwrap().clone().tensor().unwrap();
                forward.backward(one).unwrap();
                bits(&loss)
            }
            Self::Auto(model) => {
                let forward = model.forward(inputs, &RunConfig::new()).unwrap();
                let loss = forward.output().clone().tensor().unwrap();
                forward.backward(one).unwrap();
                bits(&loss)
            }
        }
    }
}

fn ids(call: usize) -> HostTensor {
    let ids: Vec<i64> = (0..BATCH * SEQ)
        .map(|i| ((i * i * 31 + call * 17 + i) % VOCAB) as i64)
        .collect();
    HostTensor::from_slice(&ids, &[BATCH, SEQ]).unwrap()
}

/// One row for all: it is repeated, and must not be put together on its way.
fn positions() -> HostTensor {
    let positions: Vec<i64> = (0..SEQ as i64).map(|position| position + 3).collect();
    HostTensor::from_slice(&positions, &[1, SEQ]).unwrap()
}

fn bits(tensor: &HostTensor) -> Vec<u64> {
    let values = tensor.to_f64_vec().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

/// Cross-entropy of logits, and its gradient times `scale`.
fn loss(logits: &HostTensor, call: usize, scale: f64) -> (f64, HostTensor) {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(16)).unwrap();
    let mut cx = Cx::new(&worker, true, true);
    let here = |tensor: &HostTensor| {
        worker
            .alias(tensor.buf(), tensor.dtype(), *tensor.shape())
            .unwrap()
    };
    let input = cx.input(&here(logits)).unwrap();
    let flat = cx.reshape(&input, &[-1, VOCAB as isize]).unwrap();
    let labels = cx.reshape(&here(&ids(call + 1)), &[-1]).unwrap();
    let loss = cx
        .cross_entropy(&flat, &labels, Default::default())
        .unwrap();
    let value = loss.to_f64_vec().unwrap()[0];
    let seed = HostTensor::from_f64s(&[scale], loss.dtype(), loss.dims()).unwrap();
    let mut grads = cx.backward_if_any(&[(loss, here(&seed))]).unwrap();
    let grad = grads.take(&input).unwrap();
    let host = HostTensor::zeros(grad.dtype(), grad.dims()).unwrap();
    grad.read_into(&mut host.write().unwrap()).unwrap();
    (value, host)
}

fn weights(model: &Model) -> Vec<(String, Vec<u64>)> {
    let read = |(name, param): (String, roundpipe::Param)| {
        let tensor = HostTensor::new(param.data(), param.dtype(), param.shape().dims()).unwrap();
        (name, bits(&tensor))
    };
    model.named_params().into_iter().map(read).collect()
}

/// Losses and logits, which steps were skipped, weights.
type Trail = (Vec<(u64, Vec<u64>)>, Vec<bool>, Vec<(String, Vec<u64>)>);

/// A loop with the loss outside the model: f16, a scaler, a step per batch or per several calls.
fn classic(name: &str, by_rules: bool, workers: usize, lag: Lag, calls: usize) -> Trail {
    let model = Model::random(small(name), DType::F16, 7).unwrap();
    let wrapped = Wrap::new(&model, workers, by_rules);
    let scaler = GradScaler::new(ScalerState {
        scale: 2_097_152.0,
        ..ScalerState::default()
    })
    .unwrap();
    let (mut seen, mut steps): (Vec<_>, Vec<StepHandle>) = (Vec::new(), Vec::new());
    for step in 0..8 {
        let scale = either!(&wrapped, it => it.loss_scale(&scaler)).unwrap();
        for call in 0..calls {
            seen.push(wrapped.classic(step * calls + call, scale / calls as f64));
        }
        let update = Update {
            clip: Some(1.0),
            ..Update::new(1e-3)
        };
        let stepped = either!(&wrapped, it => it.update_scaled(&update, &scaler, lag));
        steps.push(stepped.unwrap());
    }
    let skipped = steps.iter().map(|step| step.wait().unwrap().skipped);
    let skipped = skipped.collect();
    either!(&wrapped, it => it.synchronize()).unwrap();
    (seen, skipped, weights(&model))
}

/// Qwen3-0.6B and Llama-3.2-1B have one weight for embedding and head.
#[test]
fn tied_models_in_parts_equal_their_preset() {
    for name in ["qwen3-0.6b", "llama-3.2-1b"] {
        assert!(small(name).tied);
        for (lag, calls) in [(Lag::Zero, 1), (Lag::One, 1), (Lag::Zero, 3), (Lag::One, 2)] {
            let want = classic(name, false, 2, lag, calls);
            assert!(
                want.1[0] && !want.1[7],
                "{name}: the scale starts too high: {:?}",
                want.1
            );
            for workers in [1, 2] {
                let have = classic(name, true, workers, lag, calls);
                assert!(
                    have == want,
                    "{name}, {lag:?}, {calls} calls, {workers} workers"
                );
            }
        }
    }
}

/// The same with the loss in the model, for families with experts too, whose balance passes from
/// layer to layer beside the activations.
#[test]
fn losses_in_parts_equal_those_of_the_preset() {
    for name in ["qwen3-0.6b", "llama-3.2-1b", "qwen3-30b-a3b", "gpt-oss-20b"] {
        let run = |by_rules: bool| {
            let model = Model::random(small(name), DType::F32, 7).unwrap();
            let wrapped = Wrap::new(&model, 2, by_rules);
            let mut losses = Vec::new();
            for step in 0..3 {
                losses.push(wrapped.with_labels(step));
                either!(&wrapped, it => it.update(&Update::new(1e-2), Lag::One)).unwrap();
            }
            either!(&wrapped, it => it.synchronize()).unwrap();
            let state = either!(&wrapped, it => it.training_state()).unwrap();
            let names: Vec<String> = state.params.into_keys().collect();
            (losses, weights(&model), names)
        };
        let (want, have) = (run(false), run(true));
        assert_eq!(have.0, want.0, "{name}");
        assert_eq!(have.2, want.2, "{name}: a state has the same names");
        assert!(have.1 == want.1, "{name}: weights");
        assert_ne!(want.0[0], want.0[2], "{name}: it learns");
    }
}

/// A state of the preset goes on in parts, and the model is reached through both.
#[test]
fn a_state_moves_from_the_preset_to_parts() {
    let model = Model::random(small("qwen3-0.6b"), DType::F32, 7).unwrap();
    let preset = Wrap::new(&model, 1, false);
    preset.classic(0, 1.0);
    either!(&preset, it => it.update(&Update::new(1e-2), Lag::Zero)).unwrap();
    let state = either!(&preset, it => it.training_state()).unwrap();
    let original = either!(&preset, it => it.downcast_ref::<Model>()).unwrap();
    assert_eq!(original.config.vocab, VOCAB);
    let other = Model::random(small("qwen3-0.6b"), DType::F32, 8).unwrap();
    let parts = Wrap::new(&other, 2, true);
    let original = either!(&parts, it => it.downcast_ref::<Model>()).unwrap();
    assert_eq!(original.config.vocab, VOCAB);
    either!(&parts, it => it.load_training_state(&state)).unwrap();
    for wrapped in [&preset, &parts] {
        wrapped.classic(1, 1.0);
        either!(wrapped, it => it.update(&Update::new(1e-2), Lag::Zero)).unwrap();
        either!(wrapped, it => it.synchronize()).unwrap();
    }
    assert!(weights(&model) == weights(&other));
    let Wrap::Auto(auto) = &parts else {
        unreachable!("it was wrapped by the rules")
    };
    let inputs = Inputs::new().named("ids", ids(0));
    let forward = auto.forward(inputs, &RunConfig::new()).unwrap();
    let grads = Tree::None;
    let text = forward.backward(grads).unwrap_err().to_string();
    assert_eq!(text, "backward: 0 gradients for 1 outputs");
}

/// The least loop: forward, a loss outside, backward, and an optimizer of the user's over the raw
/// parameters.
#[test]
fn raw_parameters_may_be_trained_by_hand() {
    let run = |by_rules: bool| {
        let model = Model::random(small("qwen3-0.6b"), DType::F32, 7).unwrap();
        let wrapped = Wrap::new(&model, 2, by_rules);
        let params = model.named_params();
        let mut losses = Vec::new();
        for step in 0..4 {
            losses.push(f64::from_bits(wrapped.classic(step % 2, 1.0).0));
            either!(&wrapped, it => it.synchronize()).unwrap();
            for (name, grad) in either!(&wrapped, it => it.gradients()).unwrap() {
                let name = match name.as_str() {
                    "lm_head.weight" => "model.embed_tokens.weight",
                    other => other,
                };
                let (_, param) = params.iter().find(|(known, _)| known == name).unwrap();
                let mut values = param.to_vec::<f32>().unwrap();
                let grad = grad.unwrap().to_vec::<f32>().unwrap();
                let moved = values.iter_mut().zip(grad);
                moved.for_each(|(value, grad)| *value -= 0.5 * grad);
                let data = param.data();
                let mut write = data.write(0..data.len()).unwrap();
                write.as_mut_slice::<f32>().copy_from_slice(&values);
            }
            either!(&wrapped, it => it.skip_step(Lag::Zero)).unwrap();
        }
        either!(&wrapped, it => it.synchronize()).unwrap();
        (losses, weights(&model))
    };
    let (want, have) = (run(false), run(true));
    assert_eq!(have.0, want.0);
    assert!(have.1 == want.1);
    assert!(
        want.0[2] < want.0[0] && want.0[3] < want.0[1],
        "{:?}",
        want.0
    );
}
