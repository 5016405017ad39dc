//! Writes the adapter that a LoRA run begins with.
//!
//! `cargo run --release -p roundpipe-models --example new_adapter MODEL OUT RANK ALPHA SEED`: branches
//! on all linear layers of the folder MODEL in f32, as PEFT reads them. `checks/curve.py` calls it.

use std::error::Error;

use roundpipe::DType;
use roundpipe_models::{LoraConfig, Model};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, out, rank, alpha, seed] = args.as_slice() else {
        return Err("give MODEL OUT RANK ALPHA SEED".into());
    };
    let mut model = Model::load(model, Some(DType::F32))?;
    model.add_lora(&LoraConfig {
        rank: rank.parse()?,
        alpha: alpha.parse()?,
        seed: seed.parse()?,
        ..LoraConfig::default()
    })?;
    model.save_adapter(out)?;
    Ok(())
}
