//! What a model keeps changes nothing: keys and values from token to token, results for a recompute.

use std::ops::ControlFlow;
use std::sync::Arc;

use roundpipe::optim::AdamW;
use roundpipe::{
    ActivationUse, Bytes, Cpu, Cuda, Cx, DType, Device, ExecutePlan, HostTensor, Inputs, Lag,
    Params, PlanKind, RingOptions, RoundPipe, Rule, RunConfig, Update, Worker,
};
use roundpipe_models::{
    Error, Finish, GenerateOptions, Generator, LoraConfig, Model, ModelConfig, Sampler, preset,
};
use roundpipe_tensor::{DeviceKind, SimWorld, meta};
use serde_json::json;

#[path = "../../roundpipe-tensor/tests/support/skip.rs"]
mod skip;

/// A window shorter than the texts, sinks, experts, biases.
fn gpt_oss() -> ModelConfig {
    let small = json!({
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 61, "max_position_embeddings": 64, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    });
    preset("gpt-oss-20b").unwrap().with(&small).unwrap()
}

fn qwen3() -> ModelConfig {
    preset("tiny")
        .unwrap()
        .with(&json!({ "vocab_size": 61, "max_position_embeddings": 64 }))
        .unwrap()
}

/// Weights large enough that logits differ clearly.
fn model(config: ModelConfig) -> Model {
    model_of(config, DType::F32)
}

fn model_of(config: ModelConfig, dtype: DType) -> Model {
    let model = Model::random(config, dtype, 3).unwrap();
    for (name, param) in model.named_params() {
        if param.dtype() == DType::F32 && !name.contains("rope") {
            let home = param.data();
            home.write(0..home.len())
                .unwrap()
                .as_mut_slice::<f32>()
                .iter_mut()
                .for_each(|x| *x *= 4.0);
        }
    }
    model
}

fn cpu() -> Vec<Arc<dyn Device>> {
    vec![Cpu::new(Some(2)).unwrap()]
}

fn sim(world: &SimWorld) -> Vec<Arc<dyn Device>> {
    world
        .workers(1)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect()
}

fn memory(bytes: u64) -> RingOptions {
    RingOptions {
        memory: Some(Bytes(bytes)),
        ..RingOptions::default()
    }
}

fn tokens(generator: &Generator, prompt: &[u32], sampler: Sampler) -> Vec<u32> {
    let options = GenerateOptions {
        max_tokens: 12,
        sampler,
        stop: Vec::new(),
    };
    generator
        .generate(prompt, &options, |_| ControlFlow::Continue(()))
        .unwrap()
        .0
}

/// Every token by a forward over all that came before, without an engine or a cache.
fn plain(model: &Model, prompt: &[u32], sampler: Sampler) -> Vec<u32> {
    let worker = Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::mib(64)).unwrap();
    let mut seen: Vec<i64> = prompt.iter().map(|id| i64::from(*id)).collect();
    for at in 0..12 {
        let mut cx = Cx::infer(&worker);
        let ids = cx.tensor(&seen, &[1, seen.len()]).unwrap();
        let logits = model.logits(&mut cx, &ids).unwrap();
        let last: Vec<f32> = cx
            .narrow(&logits, 1, seen.len() - 1, 1)
            .unwrap()
            .to_vec()
            .unwrap();
        seen.push(sampler.choose(&last, at) as i64);
    }
    seen[prompt.len()..].iter().map(|id| *id as u32).collect()
}

/// A cache changes nothing, nor where the weights are: on the host, resident, or streamed for each
/// token.
#[test]
fn tokens_do_not_depend_on_cache_or_place() {
    let warm = Sampler {
        temperature: 0.9,
        top_k: Some(20),
        top_p: Some(0.95),
        seed: 5,
    };
    for config in [qwen3(), gpt_oss()] {
        let model = model(config);
        for sampler in [Sampler::default(), warm] {
            let prompt = [7, 1, 60, 22, 5, 5, 41];
            let expected = plain(&model, &prompt, sampler);
            assert!(
                expected.iter().any(|id| *id != expected[0]),
                "{expected:?} says nothing"
            );
            let generator = Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap();
            assert_eq!(tokens(&generator, &prompt, sampler), expected);
            let bytes: usize = model.named_params().iter().map(|(_, p)| p.bytes()).sum();
            for (room, resident) in [(64 << 20, true), (bytes as u64 * 8 / 5, false)] {
                let world = SimWorld::seeded(2).unwrap();
                let generator = Generator::new(&model, &sim(&world), &memory(room)).unwrap();
                assert_eq!(generator.is_resident(), resident);
                assert_eq!(
                    tokens(&generator, &prompt, sampler),
                    expected,
                    "resident: {resident}"
                );
                assert!(world.races().is_empty(), "{:?}", world.races());
            }
        }
    }
}

/// A text is the same alone and beside any others, whatever their lengths, and each ends for a
/// reason of its own.
#[test]
fn a_batch_writes_what_each_prompt_gets_alone() {
    let warm = Sampler {
        temperature: 0.9,
        seed: 5,
        ..Sampler::default()
    };
    let prompts: Vec<Vec<u32>> = [1, 7, 3, 55, 20]
        .into_iter()
        .map(|len| (0..len).map(|i| (i * 13 + len) % 61).collect())
        .collect();
    for config in [qwen3(), gpt_oss()] {
        let model = model(config);
        let generator = Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap();
        for sampler in [Sampler::default(), warm] {
            let mut options = GenerateOptions {
                max_tokens: 12,
                sampler,
                stop: Vec::new(),
            };
            let free = generator
                .generate(&prompts[0], &options, |_| ControlFlow::Continue(()))
                .unwrap();
            options.stop = vec![free.0[4]];
            let alone: Vec<(Vec<u32>, Finish)> = prompts
                .iter()
                .map(|prompt| {
                    let go = |_| ControlFlow::Continue(());
                    generator.generate(prompt, &options, go).unwrap()
                })
                .collect();
            assert_eq!(alone[0].1, Finish::Stop);
            assert!(alone.iter().any(|(_, why)| *why != Finish::Stop));
            for order in [vec![0, 1, 2, 3, 4], vec![4, 2, 0], vec![3, 3]] {
                let batch: Vec<_> = order.iter().map(|i| prompts[*i].clone()).collect();
                let mut seen = vec![Vec::new(); batch.len()];
                let told = generator
                    .generate_batch(&batch, &options, |i, token| {
                        seen[i].push(token);
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                for (place, i) in order.iter().enumerate() {
                    assert_eq!(told[place], alone[*i], "prompt {i} in {order:?}");
                    assert_eq!(seen[place], told[place].0);
                }
            }
        }
    }
}

/// On a GPU a text depends on its prompt alone: whether the weights stay or are streamed, and
/// whatever is written beside it; and where numbers are as exact as the processor's, the tokens are
/// the processor's.
#[test]
fn a_gpu_writes_the_same_alone_in_a_batch_and_streamed() {
    let gpus = || -> Option<Vec<Arc<dyn Device>>> {
        let workers = Cuda::workers(0, 1).ok()?;
        Some(workers.into_iter().map(|w| w as Arc<dyn Device>).collect())
    };
    if gpus().is_none() {
        skip::skipped("texts on a GPU", "no GPU");
        return;
    }
    let prompts: Vec<Vec<u32>> = [1, 7, 3, 40, 20]
        .into_iter()
        .map(|len| (0..len).map(|i| (i * 13 + len) % 61).collect())
        .collect();
    let options = GenerateOptions {
        max_tokens: 12,
        ..GenerateOptions::default()
    };
    for (config, dtype) in [
        (qwen3(), DType::F32),
        (qwen3(), DType::BF16),
        (gpt_oss(), DType::F32),
    ] {
        let exact = dtype == DType::F32;
        let dense = config.moe.is_none();
        let model = model_of(config, dtype);
        let resident = Generator::new(&model, &gpus().unwrap(), &memory(1 << 30)).unwrap();
        assert!(resident.is_resident());
        let bytes: usize = model.named_params().iter().map(|(_, p)| p.bytes()).sum();
        let room = memory((640 << 20) + (bytes as u64 * 3 / 2).max(8 << 20));
        let streamed = Generator::new(&model, &gpus().unwrap(), &room).unwrap();
        let processor = Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap();
        let go = |_, _| ControlFlow::Continue(());
        let together = resident.generate_batch(&prompts, &options, go).unwrap();
        for (prompt, told) in prompts.iter().zip(&together) {
            let alone = tokens(&resident, prompt, Sampler::default());
            if dense {
                assert_eq!(told.0, alone, "{dtype} in a batch: {prompt:?}");
                let sent = tokens(&streamed, prompt, Sampler::default());
                assert_eq!(sent, alone, "{dtype} streamed: {prompt:?}");
            }
            if exact {
                let expected = tokens(&processor, prompt, Sampler::default());
                assert_eq!(alone, expected, "{dtype}: {prompt:?}");
            }
        }
    }
}

/// A text ends at a stop token, at its length, when the context is full, or when the caller says
/// so.
#[test]
fn texts_end_for_a_reason() {
    let generator = Generator::new(&model(qwen3()), &cpu(), &memory(64 << 20)).unwrap();
    let all = tokens(&generator, &[3], Sampler::default());
    let options = |max_tokens, stop: &[u32]| GenerateOptions {
        max_tokens,
        stop: stop.to_vec(),
        ..Default::default()
    };
    let go = |_| ControlFlow::Continue(());
    let first = all.iter().position(|id| *id == all[2]).unwrap();
    let (told, finish) = generator
        .generate(&[3], &options(12, &[all[2]]), go)
        .unwrap();
    assert_eq!((told.as_slice(), finish), (&all[..first], Finish::Stop));
    let (told, finish) = generator.generate(&[3], &options(2, &[]), go).unwrap();
    assert_eq!((told.len(), finish), (2, Finish::Length));
    let (told, finish) = generator
        .generate(&[3; 60], &options(100, &[]), go)
        .unwrap();
    assert_eq!(
        (told.len(), finish),
        (5, Finish::Context),
        "60 + 4 are fed, and the last gives one more"
    );
    let (told, finish) = generator
        .generate(&[3], &options(9, &[]), |_| ControlFlow::Break(()))
        .unwrap();
    assert_eq!((told.len(), finish), (1, Finish::Caller));
}

#[test]
fn prompts_that_cannot_work_are_refused() {
    let generator = Generator::new(&model(qwen3()), &cpu(), &memory(64 << 20)).unwrap();
    for (prompt, word) in [
        (vec![], "no tokens"),
        (vec![61], "tokenizer"),
        (vec![1; 65], "longest"),
    ] {
        let refused = generator.generate(&prompt, &GenerateOptions::default(), |_| {
            ControlFlow::Continue(())
        });
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, Error::Argument { .. }) && error.to_string().contains(word),
            "{error}"
        );
    }
    assert!(Generator::new(&model(qwen3()), &[], &memory(64 << 20)).is_err());
}

/// What forwards keep for their recompute, on the worker, in host memory or not at all: the same
/// losses and gradients, bit for bit.
#[test]
fn keeping_for_the_recompute_changes_no_bit() {
    let run = |on_worker: Option<Bytes>, in_host: Option<Bytes>| {
        let model = model(qwen3());
        let world = SimWorld::seeded(6).unwrap();
        let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[3], &[3, 3]);
        let engine = RoundPipe::builder(model.layers.clone())
            .devices(sim(&world))
            .ring_options(RingOptions {
                activation_budget: on_worker,
                host_activations: in_host,
                ..memory(64 << 20)
            })
            .run_config(RunConfig::new().num_microbatch(2).execute_plan(plan))
            .build()
            .unwrap();
        let ids: Vec<i64> = (0..1200).map(|i| i * 17 % 61).collect();
        let ids = HostTensor::from_slice(&ids, &[24, 50]).unwrap();
        let mut losses = Vec::new();
        for _ in 0..2 {
            let inputs = Inputs::new()
                .named("ids", ids.clone())
                .named("labels", ids.clone());
            losses.push(engine.train(inputs).run().unwrap().losses.total().to_bits());
        }
        engine.synchronize().unwrap();
        let grads = engine.gradients().unwrap();
        let grads: Vec<_> = grads
            .into_iter()
            .map(|(_, g)| g.unwrap().to_f64_vec().unwrap())
            .collect();
        (losses, grads, engine.activation_use().unwrap())
    };
    let no = Some(Bytes(0));
    let none = run(no, no);
    let on_worker = run(None, no);
    let in_host = run(no, Some(Bytes::gib(1)));
    for kept in [&on_worker, &in_host] {
        assert_eq!(kept.0, none.0);
        assert!(kept.1 == none.1, "gradients differ");
    }
    let pieces = |used: &ActivationUse| (used.pieces_on_workers > 0, used.pieces_in_host > 0);
    assert_eq!(pieces(&none.2), (false, false));
    assert_eq!(pieces(&on_worker.2), (true, false));
    assert_eq!(pieces(&in_host.2), (false, true));
}

/// What a model is told of attention reaches the GPU's kernels: their scratch is another.
#[test]
fn fast_attention_reaches_the_kernels() {
    let changes =
        json!({"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 2048});
    let config = preset("qwen3-0.6b").unwrap().with(&changes).unwrap();
    let mut model = Model::empty(config, DType::BF16).unwrap();
    let mut peak = |fast: bool| {
        model.fast_attention(fast);
        let step = |worker: &Worker| {
            let mut cx = Cx::train(worker);
            let ids = cx.zeros(DType::I64, &[1, 2048])?;
            let loss = model.loss(&mut cx, &ids, &ids).unwrap();
            cx.backward(&loss).map(drop)
        };
        meta::measure(DeviceKind::Cuda, step).unwrap().1.peak
    };
    let (exact, fast) = (peak(false), peak(true));
    // The exact backward keeps two bytes per pair of a query and a key, of 16 heads.
    assert!(
        exact > fast + 2 * 16 * 2048 * 2048 / 2,
        "{exact} and {fast}"
    );
}

/// A text in the middle of training is written with the newest weights, and training goes on as if
/// nobody had asked for one: with a generator from before the first step, one that comes between
/// steps, and at either lag.
#[test]
fn sampling_changes_nothing_about_training() {
    let ids: Vec<i64> = (0..16).map(|i| i * 7 % 61).collect();
    let ids = HostTensor::from_slice(&ids, &[2, 8]).unwrap();
    for lag in [Lag::Zero, Lag::One] {
        let train = |samples: bool| {
            let model = model(qwen3());
            let trainer = RoundPipe::builder(model.layers.clone())
                .optimizer(Rule::AdamW(AdamW::default()))
                .devices(cpu())
                .memory(Bytes::mib(64))
                .build()
                .unwrap();
            let early = samples.then(|| Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap());
            let mut losses = Vec::new();
            for step in 0..4 {
                let batch = Inputs::new()
                    .named("ids", ids.clone())
                    .named("labels", ids.clone());
                losses.push(trainer.train(batch).run().unwrap().losses.total().to_bits());
                trainer.update(&Update::new(0.01), lag).unwrap();
                let Some(early) = &early else { continue };
                let late = Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap();
                let prompt = [3, 1, 4];
                let said = [
                    tokens(early, &prompt, Sampler::default()),
                    tokens(&late, &prompt, Sampler::default()),
                ];
                let newest = plain(&model, &prompt, Sampler::default());
                assert_eq!(said, [newest.clone(), newest], "{lag:?} step {step}");
            }
            trainer.synchronize().unwrap();
            assert!(
                model
                    .named_params()
                    .iter()
                    .any(|(_, param)| param.is_trainable())
            );
            losses
        };
        let alone = train(false);
        assert_ne!(alone[0], alone[3], "it trains");
        assert_eq!(train(true), alone, "{lag:?}");
    }
}

/// A generator that comes between two steps of an engine that trains adapters leaves every
/// parameter frozen or trained as it was, and the losses as they would be without it.
#[test]
fn a_generator_between_steps_changes_no_parameter_and_no_loss() {
    let ids: Vec<i64> = (0..16).map(|i| i * 7 % 61).collect();
    let ids = HostTensor::from_slice(&ids, &[2, 8]).unwrap();
    let train = |samples: bool| {
        let mut model = model(qwen3());
        model.add_lora(&LoraConfig::default()).unwrap();
        let flags = || {
            let params = model.named_params().into_iter();
            let flags = params.map(|(name, param)| (name, param.is_trainable()));
            flags.collect::<Vec<_>>()
        };
        let before = flags();
        assert!(before.iter().any(|(_, trained)| *trained));
        assert!(before.iter().any(|(_, trained)| !*trained));
        let trainer = RoundPipe::builder(model.layers.clone())
            .optimizer(Rule::AdamW(AdamW::default()))
            .devices(cpu())
            .memory(Bytes::mib(64))
            .build()
            .unwrap();
        let mut losses = Vec::new();
        for _ in 0..4 {
            let batch = Inputs::new()
                .named("ids", ids.clone())
                .named("labels", ids.clone());
            losses.push(trainer.train(batch).run().unwrap().losses.total().to_bits());
            trainer.update(&Update::new(0.01), Lag::One).unwrap();
            if samples {
                let generator = Generator::new(&model, &cpu(), &memory(64 << 20)).unwrap();
                tokens(&generator, &[3, 1, 4], Sampler::default());
                assert_eq!(flags(), before);
            }
        }
        losses
    };
    let alone = train(false);
    assert_ne!(alone[0], alone[3], "it trains");
    assert_eq!(train(true), alone);
}
