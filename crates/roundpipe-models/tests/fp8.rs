//! Training with projections in fp8: the same bits on any workers, grain and memory; what takes no
//! part; what is refused.

#[path = "../../roundpipe-tensor/tests/support/skip.rs"]
mod skip;

use std::sync::Arc;

use roundpipe::optim::AdamW;
use roundpipe::{
    AttentionRate, Bytes, CostModel, Cpu, Cuda, DType, Device, DeviceKind, Grain, HostTensor,
    Inputs, KernelRates, Lag, Meta, Params, RingOptions, RoundPipe, Rule, RunConfig, Update,
};
use roundpipe_models::{LoraConfig, Model, preset};
use roundpipe_tensor::SimWorld;
use serde_json::json;

/// A small decoder whose projections all have sizes that are multiples of 16.
fn model() -> Model {
    let config = preset("tiny").unwrap();
    let smaller = json!({ "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96 });
    Model::random(config.with(&smaller).unwrap(), DType::BF16, 1).unwrap()
}

fn processors(count: usize) -> Vec<Arc<dyn Device>> {
    let all = Cpu::workers(count, Some(2)).unwrap().into_iter();
    all.map(|worker| worker as Arc<dyn Device>).collect()
}

fn engine(
    model: &Model,
    fp8: bool,
    devices: Vec<Arc<dyn Device>>,
    grain: Grain,
    memory: Bytes,
) -> roundpipe::Result<RoundPipe> {
    RoundPipe::builder(model.layers.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(
            RunConfig::default()
                .num_microbatch(2)
                .recompute_grain(grain),
        )
        .fp8(fp8)
        .devices(devices)
        .optimizer_threads(1)
        .ring_options(RingOptions {
            memory: Some(memory),
            ..RingOptions::default()
        })
        .build()
}

fn inputs() -> Inputs {
    let ids: Vec<i64> = (0..32).map(|i| i * 7 % 60).collect();
    let ids = HostTensor::from_slice(&ids, &[2, 16]).unwrap();
    Inputs::new().named("ids", ids.clone()).named("labels", ids)
}

/// Losses of three steps and the weights behind them, as bits.
fn train(model: Model, engine: &RoundPipe) -> (Vec<u64>, Vec<Vec<u8>>) {
    let losses = (0..3).map(|_| {
        let loss = engine.train(inputs()).run().unwrap().losses.total();
        engine.update(&Update::new(1e-2), Lag::One).unwrap();
        loss.to_bits()
    });
    let losses = losses.collect();
    engine.synchronize().unwrap();
    let params = model.named_params().into_iter();
    let params = params.filter(|(_, param)| param.is_trainable());
    let bytes = params.map(|(_, p)| p.data().read_all().unwrap().bytes().to_vec());
    (losses, bytes.collect())
}

const MUCH: Bytes = Bytes::mib(48);

fn trained(fp8: bool, model: Model) -> (Vec<u64>, Vec<Vec<u8>>) {
    let engine = engine(&model, fp8, processors(1), Grain::Stage, MUCH).unwrap();
    train(model, &engine)
}

fn with_lora() -> Model {
    let mut model = model();
    model.add_lora(&LoraConfig::default()).unwrap();
    model
}

/// fp8 changes what is computed, and nothing else does: not the workers, the grain or the memory, on
/// processors that read weights in place and on simulated devices that they are sent to.
#[test]
fn workers_and_grains_change_no_bit() {
    for (case, make) in [("full", model as fn() -> Model), ("lora", with_lora)] {
        let want = trained(true, make());
        assert_ne!(
            want,
            trained(false, make()),
            "{case}: fp8 must change something"
        );
        for workers in [1, 2, 3] {
            for grain in [Grain::Stage, Grain::Layer] {
                let model = make();
                let engine = engine(&model, true, processors(workers), grain, MUCH).unwrap();
                let got = train(model, &engine);
                assert_eq!(got, want, "{case}: {workers} workers, {grain:?}");
            }
        }
        for (workers, memory) in [(1, MUCH), (2, Bytes::mib(3)), (3, MUCH)] {
            let world = SimWorld::seeded(workers as u64).unwrap();
            let sims = world.workers(workers).into_iter();
            let sims = sims.map(|worker| worker as Arc<dyn Device>).collect();
            let model = make();
            let engine = engine(&model, true, sims, Grain::Layer, memory).unwrap();
            let got = train(model, &engine);
            assert_eq!(got, want, "{case}: {workers} simulated workers");
        }
    }
}

/// A GPU trains to the same bits however it is run, to losses near the processor's. Without one this
/// is skipped, and says so.
#[test]
fn a_gpu_trains_to_the_same_bits_however_it_is_run() {
    let want = trained(true, model());
    let mut first = None;
    for count in [1, 2] {
        for grain in [Grain::Stage, Grain::Layer] {
            let workers = match Cuda::workers(0, count) {
                Ok(workers) if workers[0].lacks_fp8().is_none() => workers,
                Ok(workers) => {
                    return skip::skipped("fp8 on a GPU", &workers[0].lacks_fp8().unwrap());
                }
                Err(error) => return skip::skipped("fp8 on a GPU", &error.to_string()),
            };
            let devices = workers.into_iter().map(|worker| worker as Arc<dyn Device>);
            let model = model();
            let engine = engine(&model, true, devices.collect(), grain, Bytes::gib(2)).unwrap();
            let got = train(model, &engine);
            for (got, want) in got.0.iter().zip(&want.0) {
                let (got, want) = (f64::from_bits(*got), f64::from_bits(*want));
                assert!((got / want - 1.0).abs() < 0.02, "{got} and {want}");
            }
            let first = first.get_or_insert_with(|| got.clone());
            assert_eq!(&got, first, "{count} workers, {grain:?}");
        }
    }
}

/// The first loss, before any update, is near that of bf16.
#[test]
fn losses_stay_near_those_of_bf16() {
    let loss = |fp8: bool| f64::from_bits(trained(fp8, model()).0[0]);
    let (fp8, plain) = (loss(true), loss(false));
    assert!(
        fp8 != plain && (fp8 - plain).abs() < 0.01 * plain,
        "{fp8} and {plain}"
    );
}

/// Embedding, head and norms take no part: a model whose projections all have other sizes trains to
/// the bits of bf16, although its head has sizes that fp8 would take.
#[test]
fn only_projections_take_part() {
    let other = || {
        let config = preset("tiny").unwrap();
        let odd = json!({
            "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 72, "head_dim": 10,
        });
        let config = config.with(&odd).unwrap();
        assert!(config.vocab.is_multiple_of(16));
        Model::random(config, DType::BF16, 1).unwrap()
    };
    assert_eq!(trained(true, other()), trained(false, other()));
}

/// Outside training the weights count as they are saved.
#[test]
fn validation_is_computed_without_fp8() {
    let loss = |fp8: bool| {
        let model = model();
        let engine = engine(&model, fp8, processors(1), Grain::Stage, MUCH).unwrap();
        engine.set_training(false);
        let config = RunConfig::default().requires_grad(false);
        let forward = engine.forward(inputs(), &config).unwrap();
        let output = forward
            .output()
            .unwrap()
            .map_ref(|t| t.to_f64_vec().unwrap());
        format!("{output:?}")
    };
    assert_eq!(loss(true), loss(false));
}

/// A device without fp8 is refused when the engine is built, in one line.
#[test]
fn a_device_without_fp8_is_refused() {
    let attention = AttentionRate {
        most: 1e14,
        half_at: 64.0,
        narrow: 1.0,
    };
    let rates = |fp8_products| KernelRates {
        products: 1e14,
        fp8_products,
        grouped_products: 1e14,
        attention,
        attention_grad: attention,
        attention_grad_any_order: attention,
        own_attention: attention,
        own_attention_grad: attention,
        bytes: 1e12,
        launch_s: 5e-6,
        library_attention: true,
        packed_context: None,
    };
    let build = |fp8: bool, fp8_products| {
        let like = CostModel::from(DeviceKind::Cuda).with_rates(rates(fp8_products));
        let devices: Vec<Arc<dyn Device>> = vec![Meta::numbered(like, 0, Bytes::gib(8))];
        engine(&model(), fp8, devices, Grain::Stage, Bytes::gib(1)).map(drop)
    };
    assert!(build(true, Some(2e14)).is_ok() && build(false, None).is_ok());
    let line = build(true, None).unwrap_err().to_string();
    assert!(
        line.starts_with("fp8: ") && line.contains("leave fp8 off"),
        "{line}"
    );
    assert!(!line.contains('\n'), "{line}");
}
