//! Loads a folder shaped like Qwen3-1.7B (bf16, zeros in sparse files) and prints how much memory
//! that took.
//!
//! `cargo run --release -p roundpipe-models --example load_peak [GB_PER_SHARD]`. Fails when
//! anonymous memory peaks above the model plus 10%, or all resident memory, file pages included,
//! does.
#![allow(clippy::print_stdout, reason = "a program that prints its figures")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use roundpipe::{DType, Param};
use roundpipe_models::folder::{Folder, LoadOptions, load};
use roundpipe_models::{Entry, Piece};

type Tensors = Vec<(String, Vec<usize>)>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shard_gb: f64 = std::env::args()
        .nth(1)
        .map_or(Ok(2.0), |text| text.parse())?;
    let dir = std::env::temp_dir().join(format!("roundpipe-load-peak-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let result = measure(&dir, (shard_gb * 1e9) as u64);
    std::fs::remove_dir_all(&dir)?;
    result
}

fn measure(dir: &Path, shard_bytes: u64) -> Result<(), Box<dyn std::error::Error>> {
    let tensors = shapes();
    write_sparse(dir, &tensors, shard_bytes)?;
    let mut entries = Vec::new();
    for (name, dims) in &tensors {
        let param = Param::zeros(DType::BF16, dims)?;
        let pieces = vec![Piece::whole(name.clone(), &param)];
        entries.push(Entry {
            name: name.clone(),
            param,
            pieces,
        });
    }
    let model: u64 = entries.iter().map(|e| e.param.bytes() as u64).sum();
    let stop = Arc::new(AtomicBool::new(false));
    let watch = {
        let stop = stop.clone();
        std::thread::spawn(move || anon_peak(&stop))
    };
    let start = Instant::now();
    let folder = Folder::open(dir)?;
    let report = load(&folder, &entries, &LoadOptions::default())?;
    let seconds = start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    let anon = watch.join().map_err(|_| "the watching thread failed")?;
    let all = status("VmHWM");
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    println!(
        "{} tensors in {} files, {:.0} MiB, {seconds:.1} s; anonymous peak {:.0} MiB ({:+.1}%), resident peak \
         {:.0} MiB ({:+.1}%)",
        report.tensors,
        folder.shards().len(),
        mib(model),
        mib(anon),
        (anon as f64 / model as f64 - 1.0) * 100.0,
        mib(all),
        (all as f64 / model as f64 - 1.0) * 100.0,
    );
    assert!(
        anon < model / 10 * 11 && all < model / 10 * 11,
        "more than the model and 10%"
    );
    Ok(())
}

/// Names and shapes of the 1.7B model.
fn shapes() -> Tensors {
    let (hidden, inner, q, kv, head) = (2048, 6144, 2048, 1024, 128);
    let mut tensors = vec![(
        "model.embed_tokens.weight".to_owned(),
        vec![151_936, hidden],
    )];
    for layer in 0..28 {
        let parts: [(&str, Vec<usize>); 11] = [
            ("input_layernorm", vec![hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.k_norm", vec![head]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, q]),
            ("self_attn.q_norm", vec![head]),
            ("self_attn.q_proj", vec![q, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
        ];
        tensors.extend(
            parts.map(|(name, dims)| (format!("model.layers.{layer}.{name}.weight"), dims)),
        );
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    tensors
}

/// Shards that have a header and no blocks on the disk.
fn write_sparse(dir: &Path, tensors: &Tensors, shard_bytes: u64) -> std::io::Result<()> {
    let bytes = |dims: &[usize]| dims.iter().product::<usize>() as u64 * 2;
    let mut shards: Vec<Tensors> = vec![Vec::new()];
    let mut room = shard_bytes;
    for tensor in tensors {
        let size = bytes(&tensor.1);
        if size > room && shards.last().is_some_and(|s| !s.is_empty()) {
            shards.push(Vec::new());
            room = shard_bytes;
        }
        room = room.saturating_sub(size);
        shards.last_mut().expect("never empty").push(tensor.clone());
    }
    let mut map = serde_json::Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        let mut header = serde_json::Map::new();
        let mut at = 0;
        for (tensor, dims) in shard {
            let end = at + bytes(dims);
            header.insert(
                tensor.clone(),
                serde_json::json!({"dtype": "BF16", "shape": dims, "data_offsets": [at, end]}),
            );
            map.insert(tensor.clone(), name.clone().into());
            at = end;
        }
        let json = serde_json::Value::Object(header).to_string().into_bytes();
        let start = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        std::fs::write(dir.join(&name), &start)?;
        std::fs::File::options()
            .write(true)
            .open(dir.join(&name))?
            .set_len(start.len() as u64 + at)?;
    }
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), index)
}

/// The most anonymous memory seen until told to stop.
fn anon_peak(stop: &AtomicBool) -> u64 {
    let mut most = 0;
    while !stop.load(Ordering::Relaxed) {
        most = status("RssAnon").max(most);
        std::thread::sleep(Duration::from_millis(2));
    }
    status("RssAnon").max(most)
}

/// A line of this process's status, in bytes.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib << 10)
}
