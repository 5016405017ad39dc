//! Weights that stay in a folder's files: the same bits as weights in memory, and less memory.
#![allow(
    clippy::print_stdout,
    reason = "a process with little memory prints what its parent compares"
)]

mod golden;

use std::process::Command;
use std::sync::Arc;

use golden::{Golden, Temp, cpus, folder};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cpu, DType, Device, HostTensor, Inputs, Lag, Param, Params, Pin, RingOptions, RoundPipe,
    Rule, RunConfig, Update, bf16,
};
use roundpipe_models::{LoraConfig, LoraTargets, Model, ModelConfig, SaveOptions};
use roundpipe_tensor::SimWorld;

const FAMILIES: [&str; 5] = ["llama3", "qwen3", "qwen3_moe", "qwen3_moe_plain", "gpt_oss"];

/// Set in a process with little memory: the folder to load, and whether its weights stay there.
const FOLDER: &str = "ROUNDPIPE_TEST_FOLDER";
const MAPPED: &str = "ROUNDPIPE_TEST_MAPPED";

fn saved(model: &Model) -> Temp {
    let dir = folder();
    model.save(&dir, SaveOptions::default()).unwrap();
    dir
}

fn bytes(param: &Param) -> Vec<u8> {
    param.data().read_all().unwrap().bytes().to_vec()
}

fn lora(model: &mut Model) {
    let config = LoraConfig {
        rank: 4,
        targets: LoraTargets::AllLinear,
        ..LoraConfig::default()
    };
    model.add_lora(&config).unwrap();
}

/// The losses of three steps, and the adapters after them.
fn train(mut model: Model, devices: Vec<Arc<dyn Device>>) -> (Vec<u64>, Vec<Vec<u8>>) {
    lora(&mut model);
    let engine = RoundPipe::builder(model.layers.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(devices)
        .pin(Pin::Off)
        // A stack for each core of a large machine would count as data.
        .optimizer_threads(1)
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(48)),
            pin: Pin::Off,
            ..RingOptions::default()
        })
        .build()
        .unwrap();
    let frozen = engine.host_bytes();
    let base = model
        .entries()
        .iter()
        .map(|e| e.param.bytes())
        .sum::<usize>();
    let mapped = model.entries()[0].param.data().stays_in_file();
    assert_eq!(frozen.in_files, if mapped { base } else { 0 });
    let ids: Vec<i64> = (0..32).map(|i| i * 7 % 60).collect();
    let ids = HostTensor::from_slice(&ids, &[2, 16]).unwrap();
    let losses = (0..3).map(|_| {
        let inputs = Inputs::new()
            .named("ids", ids.clone())
            .named("labels", ids.clone());
        let loss = engine.train(inputs).run().unwrap().losses.total();
        engine.update(&Update::new(1e-2), Lag::One).unwrap();
        loss.to_bits()
    });
    let losses = losses.collect();
    engine.synchronize().unwrap();
    let adapters = model.named_params();
    let adapters = adapters.iter().filter(|(_, p)| p.is_trainable());
    (losses, adapters.map(|(_, p)| bytes(p)).collect())
}

/// Every layout of every family, as it is and with another type: the values are those of a load
/// into memory, the parameters take no memory, and training LoRA gives the same bits on processors
/// that read in place and on devices that copy.
#[test]
fn weights_in_files_are_those_in_memory() {
    for name in FAMILIES {
        let dir = saved(&Golden::open(name).model(DType::BF16));
        for dtype in [DType::BF16, DType::F32] {
            let loaded = Model::load(&dir, Some(dtype)).unwrap();
            let mapped = Model::load_mapped(&dir, Some(dtype)).unwrap();
            for (have, want) in mapped.entries().iter().zip(loaded.entries()) {
                let what = format!("{name} {dtype}: {}", want.name);
                assert!(have.param.data().stays_in_file(), "{what}");
                assert_eq!(bytes(&have.param), bytes(&want.param), "{what}");
            }
            let want = train(loaded, cpus());
            assert_eq!(train(mapped, cpus()), want, "{name} {dtype}");
            let world = SimWorld::seeded(3).unwrap();
            let sim = Model::load_mapped(&dir, Some(dtype)).unwrap();
            let copied = train(sim, sims(&world));
            assert_eq!(copied, want, "{name} {dtype}, copied");
        }
    }
}

/// Sums that are made when they are read are those of a merge in memory, as parameters and as a
/// saved folder in shards; no weight moves into memory.
#[test]
fn adapters_merged_on_read_are_those_merged_in_memory() {
    for name in FAMILIES {
        let dir = saved(&Golden::open(name).model(DType::BF16));
        let adapter = folder();
        let mut trained = Model::load(&dir, None).unwrap();
        lora(&mut trained);
        for (i, (_, param)) in trained.trainable_params().into_iter().enumerate() {
            let home = param.data();
            let mut values = home.write(0..home.len()).unwrap();
            for (j, value) in values.as_mut_slice::<bf16>().iter_mut().enumerate() {
                *value = bf16::from_f32(((i + 3 * j) % 11) as f32 / 16.0 - 0.3);
            }
        }
        trained.save_adapter(&adapter).unwrap();
        for dtype in [DType::BF16, DType::F32] {
            let what = format!("{name} {dtype}");
            let mut loaded = Model::load(&dir, Some(dtype)).unwrap();
            loaded.load_adapter(&adapter).unwrap();
            loaded.merge_lora().unwrap();
            let mut mapped = Model::load_mapped(&dir, Some(dtype)).unwrap();
            let base = bytes(&mapped.entries()[2].param);
            mapped.load_adapter(&adapter).unwrap();
            mapped.merge_lora_on_read().unwrap();
            assert!(mapped.lora().is_none(), "{what}");
            assert_ne!(bytes(&mapped.entries()[2].param), base, "{what}");
            for (have, want) in mapped.entries().iter().zip(loaded.entries()) {
                assert!(have.param.data().stays_in_file(), "{what}: {}", want.name);
                assert_eq!(
                    bytes(&have.param),
                    bytes(&want.param),
                    "{what}: {}",
                    want.name
                );
            }
            assert_eq!(saved_files(&mapped), saved_files(&loaded), "{what}");
        }
    }
}

/// The files of a folder that is saved in small shards, in bf16.
fn saved_files(model: &Model) -> Vec<(String, Vec<u8>)> {
    let dir = folder();
    let options = SaveOptions {
        max_shard_bytes: 20_000,
        dtype: Some(DType::BF16),
        ..SaveOptions::default()
    };
    model.save(&dir, options).unwrap();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        files.push((name, std::fs::read(&path).unwrap()));
    }
    files.sort();
    files
}

fn sims(world: &SimWorld) -> Vec<Arc<dyn Device>> {
    let workers = world.workers(2).into_iter();
    workers.map(|worker| worker as Arc<dyn Device>).collect()
}

/// Weights in files cannot be written, but merging and training all of them work: both take memory.
#[test]
fn mapped_weights_move_into_memory_when_they_change() {
    let dir = saved(&Golden::open("qwen3_moe").model(DType::BF16));
    let param = &Model::load_mapped(&dir, None).unwrap().entries()[0].param;
    let text = param.data().write(0..1).unwrap_err().to_string();
    assert!(
        text.contains("stays in a file") && !text.contains('\n'),
        "{text}"
    );

    let merged = |mut model: Model| {
        lora(&mut model);
        for (name, param) in model.named_params() {
            if name.contains("lora_b") || name.contains("lora_B") {
                let mut data = param.data().write(0..param.bytes()).unwrap();
                data.bytes().fill(0x3c);
            }
        }
        model.merge_lora().unwrap();
        model
            .entries()
            .iter()
            .map(|e| bytes(&e.param))
            .collect::<Vec<_>>()
    };
    let before: Vec<_> = Model::load(&dir, None)
        .unwrap()
        .entries()
        .iter()
        .map(|e| bytes(&e.param))
        .collect();
    let want = merged(Model::load(&dir, None).unwrap());
    assert_ne!(want, before, "the branches are not 0");
    assert_eq!(merged(Model::load_mapped(&dir, None).unwrap()), want);

    let model = Model::load_mapped(&dir, None).unwrap();
    let engine = RoundPipe::builder(model.layers.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .devices(cpus())
        .pin(Pin::Off)
        .build()
        .unwrap();
    assert!(
        model
            .entries()
            .iter()
            .all(|e| !e.param.data().stays_in_file())
    );
    assert_eq!(engine.host_bytes().in_files, 0);
}

/// A model of which a process with a limit on its data holds two thirds: it cannot be loaded, it
/// can be mapped, and its training gives the bits of one with enough memory.
#[test]
#[cfg(target_os = "linux")]
fn lora_of_a_model_larger_than_memory() {
    if let Some(dir) = std::env::var_os(FOLDER) {
        let mapped = std::env::var_os(MAPPED).is_some();
        let model = if mapped {
            Model::load_mapped(dir, None)
        } else {
            Model::load(dir, None)
        };
        let (losses, adapters) = train(model.unwrap(), vec![Cpu::new(Some(1)).unwrap()]);
        println!("losses {losses:x?} adapters {:x}", checksum(&adapters));
        return;
    }
    let config = ModelConfig::from_json(
        &serde_json::json!({
            "model_type": "qwen3", "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        }),
        "config",
    )
    .unwrap();
    let model = Model::random(config, DType::BF16, 5).unwrap();
    let weights: usize = model.entries().iter().map(|e| e.param.bytes()).sum();
    let dir = saved(&model);
    drop(model);
    let run = |limit: Option<usize>, mapped: bool| {
        let mut command = Command::new("sh");
        let limit = limit.map_or("unlimited".to_owned(), |bytes| (bytes / 1024).to_string());
        command
            .args(["-c", "ulimit -d $1 && shift && exec \"$@\"", "sh", &limit])
            .arg(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "lora_of_a_model_larger_than_memory",
                "--nocapture",
            ])
            .args(["--test-threads", "1"])
            .env(FOLDER, dir.as_ref())
            .env("RAYON_NUM_THREADS", "2");
        if mapped {
            command.env(MAPPED, "1");
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text
            .lines()
            .find(|l| l.contains("losses "))
            .map(str::to_owned);
        line.ok_or_else(|| text + &String::from_utf8_lossy(&output.stderr))
    };
    let limit = weights * 2 / 3;
    let refused = run(Some(limit), false).unwrap_err();
    assert!(refused.contains("cannot get"), "{refused}");
    let want = run(None, false).unwrap();
    assert_eq!(run(Some(limit), true).unwrap(), want);
}

/// FNV-1a over all bytes.
fn checksum(parts: &[Vec<u8>]) -> u64 {
    parts
        .iter()
        .flatten()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        })
}
