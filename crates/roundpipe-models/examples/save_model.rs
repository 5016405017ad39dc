//! Writes a random model, an adapter and what they compute, for transformers and PEFT to compare.
//!
//! `cargo run -p roundpipe-models --example save_model CONFIG.json OUT` makes OUT/model,
//! OUT/adapter, OUT/merged and OUT/logits.safetensors with `ids`, `base` and `adapted`.
//! `fixtures/check_saved.py` calls it.

use std::path::PathBuf;

use roundpipe::{Bytes, Cpu, Cx, DType, Param, Params, RngSite, Worker};
use roundpipe_models::{LoraConfig, Model, ModelConfig, SaveOptions, write_tensors};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1).map(PathBuf::from);
    let (Some(config), Some(out)) = (args.next(), args.next()) else {
        return Err("give a config.json and a folder to make".into());
    };
    let json = serde_json::from_str(&std::fs::read_to_string(&config)?)?;
    let mut model = Model::random(ModelConfig::from_json(&json, &config)?, DType::F32, 11)?;
    // Biases of 0 and norms of 1 would not show when they are mixed up.
    for (i, entry) in model.entries().iter().enumerate() {
        if entry.param.shape().rank() == 1 || entry.name.ends_with("_bias") {
            shift(&entry.param, i as u64, 0.3)?;
        }
    }
    std::fs::create_dir_all(&out)?;
    model.save(
        out.join("model"),
        SaveOptions {
            max_shard_bytes: 60_000,
            ..SaveOptions::default()
        },
    )?;
    let ids: Vec<i64> = (0..48)
        .map(|i| i * 37 % model.config.vocab as i64)
        .collect();
    let base = logits(&model, &ids)?;
    model.add_lora(&LoraConfig {
        rank: 3,
        alpha: 5.0,
        ..LoraConfig::default()
    })?;
    for (i, (_, param)) in model.trainable_params().iter().enumerate() {
        shift(param, 1000 + i as u64, 0.2)?;
    }
    model.save_adapter(out.join("adapter"))?;
    let adapted = logits(&model, &ids)?;
    model.merge_lora()?;
    model.save(out.join("merged"), SaveOptions::default())?;
    let ids = Param::from_slice(&ids, &[2, 24])?;
    let tensors =
        [("ids", ids), ("base", base), ("adapted", adapted)].map(|(n, p)| (n.to_owned(), p));
    write_tensors(out.join("logits.safetensors"), &[].into(), &tensors)?;
    Ok(())
}

/// Adds uniform values in ±bound.
fn shift(param: &Param, site: u64, bound: f64) -> Outcome<()> {
    let key = RngSite {
        seed: 5,
        step: site,
        ..RngSite::default()
    }
    .key();
    let noise = Param::uniform(DType::F32, param.shape().dims(), bound, key)?.to_vec::<f32>()?;
    let mut data = param.data().write(0..param.bytes())?;
    data.as_mut_slice::<f32>()
        .iter_mut()
        .zip(noise)
        .for_each(|(x, n)| *x += n);
    Ok(())
}

fn logits(model: &Model, ids: &[i64]) -> Outcome<Param> {
    let worker = Worker::new(Cpu::new(None)?, Bytes::gib(1))?;
    let mut cx = Cx::infer(&worker);
    let ids = cx.tensor(ids, &[2, 24])?;
    let logits = model.logits(&mut cx, &ids)?;
    Ok(Param::from_slice(&logits.to_vec::<f32>()?, logits.dims())?)
}
