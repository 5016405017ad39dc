//! Frozen weights in 8 and 4 bits: bitsandbytes' folders, the same bits wherever and however they
//! are trained on, and what is refused.

mod golden;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use golden::{Golden, Temp, cpus, folder, worker};
use roundpipe::optim::AdamW;
use roundpipe::quant::nf4_books;
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, Grain, HostTensor, Inputs, Lag, Param, Params, RingOptions,
    RoundPipe, Rule, RunConfig, Update, bf16,
};
use roundpipe_models::export::Source;
use roundpipe_models::{
    Entry, GgufOptions, GgufType, LoraConfig, Model, Quantization, SaveOptions, preset, read_config,
};
use roundpipe_tensor::SimWorld;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

const BOTH: [Quantization; 2] = [Quantization::Nf4, Quantization::Int8];

fn fixture(name: &str) -> PathBuf {
    let root = [env!("CARGO_MANIFEST_DIR"), "../../fixtures/bnb", name];
    root.iter().collect()
}

fn saved(model: &Model) -> Temp {
    let dir = folder();
    model.save(&dir, SaveOptions::default()).unwrap();
    dir
}

fn bytes(param: &Param) -> Vec<u8> {
    param.data().read_all().unwrap().bytes().to_vec()
}

/// Every parameter by name, as bytes.
fn all_bytes(model: &Model) -> Vec<(String, Vec<u8>)> {
    let params = model.named_params().into_iter();
    params.map(|(name, param)| (name, bytes(&param))).collect()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let data = file.tensor(name).unwrap();
    let words = data.data().chunks_exact(4);
    words
        .map(|word| f64::from(f32::from_le_bytes(word.try_into().unwrap())))
        .collect()
}

/// Folders that transformers saved with bitsandbytes: the weights widen to bitsandbytes' values bit
/// for bit, and logits are transformers'.
#[test]
fn folders_of_bitsandbytes_load() {
    let expected = std::fs::read(fixture("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let ids: Vec<i64> = (0..12).map(|i| i * 7 % 48).collect();
    for (name, how) in [
        ("nf4", Quantization::Nf4),
        ("nf4_plain", Quantization::Nf4),
        ("int8", Quantization::Int8),
    ] {
        for mut model in [
            Model::load(fixture(name), None).unwrap(),
            Model::load_mapped(fixture(name), None).unwrap(),
            Model::load_quantized(fixture(name), None, how).unwrap(),
        ] {
            assert_eq!(model.quantization(), Some(how), "{name}");
            let worker = worker();
            let mut cx = Cx::infer(&worker);
            let tokens = cx.tensor(&ids, &[1, 12]).unwrap();
            let logits = model.logits(&mut cx, &tokens).unwrap();
            let logits = logits.to_f64_vec().unwrap();
            if name != "int8" {
                golden::assert_close(name, &logits, &floats(&expected, name));
            }
            drop(cx);
            model.dequantize().unwrap();
            assert_eq!(model.quantization(), None);
            let entries = model.entries();
            let entry = entries.iter().find(|e| e.name.ends_with("q_proj.weight"));
            let have = entry.unwrap().param.to_vec::<f32>().unwrap();
            let have: Vec<f64> = have.into_iter().map(f64::from).collect();
            assert_eq!(have, floats(&expected, &format!("{name}.q_proj")), "{name}");
            let mut cx = Cx::infer(&worker);
            let tokens = cx.tensor(&ids, &[1, 12]).unwrap();
            let whole = model.logits(&mut cx, &tokens).unwrap();
            assert_eq!(whole.to_f64_vec().unwrap(), logits, "{name}: widened");
        }
    }
}

/// What is exported of a quantised base are whole weights: those that its codes stand for, and with
/// an adapter the sum of both, rounded once.
#[test]
fn exports_are_whole() {
    let values = |model: &Model| -> Vec<(String, Vec<f32>)> {
        let entries = model.entries().into_iter();
        let value = |entry: Entry| (entry.name, entry.param.to_vec::<f32>().unwrap());
        entries.map(value).collect()
    };
    let temp = folder();
    let room: &Path = temp.as_ref();
    let write = |source: &Source, name: &str| {
        let out = room.join(name);
        let dtype = Some(DType::F32);
        source.write_folder(&out, dtype, u64::MAX).unwrap();
        assert!(Model::load(&out, None).unwrap().quantization().is_none());
        values(&Model::load(&out, Some(DType::F32)).unwrap())
    };
    for name in ["nf4", "nf4_plain", "int8"] {
        let mut want = Model::load(fixture(name), None).unwrap();
        let error = want.save_gguf(room.join("no.gguf"), fixture(name), &gguf());
        assert!(error.unwrap_err().to_string().contains("dequantize"));
        want.dequantize().unwrap();
        let source = Source {
            folder: fixture(name),
            adapter: None,
            quantize: None,
        };
        assert!(write(&source, name) == values(&want), "{name}");
    }
    // An adapter that was trained beside codes is added to what they stand for.
    let adapter = room.join("adapter");
    for how in BOTH {
        let mut model = Model::load_quantized(fixture("whole"), Some(DType::F32), how).unwrap();
        model.add_lora(&LoraConfig::default()).unwrap();
        for (name, param) in model.trainable_params() {
            let home = param.data();
            let mut bytes = home.write(0..home.len()).unwrap();
            let values = bytes.as_mut_slice::<f32>().iter_mut().enumerate();
            values.for_each(|(i, x)| *x = ((i + name.len()) % 7) as f32 / 40.0);
        }
        model.save_adapter(&adapter).unwrap();
        model.dequantize().unwrap();
        model.merge_lora().unwrap();
        let source = Source {
            folder: fixture("whole"),
            adapter: Some(adapter.clone()),
            quantize: Some(how),
        };
        let have = write(&source, &format!("merged {how}"));
        assert!(have == values(&model), "{how}");
    }
}

/// What codes stand for is rounded once, to the type that is written: a config that says bf16 takes
/// nothing away from an export in f32 or f16.
#[test]
fn exports_round_once() {
    let temp = folder();
    let room: &Path = temp.as_ref();
    for name in ["nf4", "nf4_plain", "int8"] {
        let dir = with_config(name, "\"dtype\": \"float32\"", "\"dtype\": \"bfloat16\"");
        let source = Source {
            folder: dir.as_ref().to_path_buf(),
            adapter: None,
            quantize: None,
        };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let out = room.join(format!("{name} {dtype}"));
            source.write_folder(&out, Some(dtype), u64::MAX).unwrap();
            let have = Model::load(&out, None).unwrap();
            let mut want = Model::load(fixture(name), Some(dtype)).unwrap();
            want.dequantize().unwrap();
            assert!(all_bytes(&have) == all_bytes(&want), "{name} in {dtype}");
        }
        let (model, own) = source.open().unwrap();
        // A GGUF file is written from this model.
        assert_eq!((model.dtype(), own), (DType::F32, DType::BF16), "{name}");
    }
}

/// A copy of a fixture with another config.
fn with_config(name: &str, from: &str, to: &str) -> Temp {
    let dir = changed(name, |_, dtype, dims, data| Some((dtype, dims, data)));
    let path = dir.as_ref().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    assert!(config.contains(from), "{config}");
    std::fs::write(path, config.replacen(from, to, 1)).unwrap();
    dir
}

fn gguf() -> GgufOptions {
    GgufOptions {
        dtype: GgufType::F32,
        name: "codes".to_owned(),
    }
}

/// What we quantise while loading is what bitsandbytes quantised.
#[test]
fn loading_quantises_as_bitsandbytes_does() {
    for (name, how) in [("nf4", Quantization::Nf4), ("int8", Quantization::Int8)] {
        let theirs = Model::load(fixture(name), Some(DType::F32)).unwrap();
        let ours = Model::load_quantized(fixture("whole"), Some(DType::F32), how).unwrap();
        let book = &nf4_books()[16..];
        for ((name, have), (_, want)) in all_bytes(&ours).into_iter().zip(all_bytes(&theirs)) {
            if how == Quantization::Nf4 && name.ends_with(".scales") {
                // bitsandbytes' cpu kernel looks magnitudes up in a table that is coarse around
                // their mean: there, and only there, it may take a neighbour.
                for (have, want) in have.iter().zip(&want) {
                    let [have, want] = [have, want].map(|code| book[usize::from(*code)]);
                    assert!((have - want).abs() < 3e-5, "{name}: {have} and {want}");
                }
                continue;
            }
            assert!(have == want, "{how}: {name} differs");
        }
    }
}

/// Random weights that are quantised as they are made are those that a folder of the whole ones
/// gives; they take a fraction of the memory.
#[test]
fn random_weights_are_quantised_as_they_are_made() {
    for name in ["qwen3", "qwen3_moe", "gpt_oss"] {
        let config = Golden::open(name).config();
        let whole = Model::random(config.clone(), DType::BF16, 5).unwrap();
        let dir = saved(&whole);
        for how in BOTH {
            let made = Model::random_quantized(config.clone(), DType::BF16, 5, how).unwrap();
            let read = Model::load_quantized(&dir, None, how).unwrap();
            assert!(all_bytes(&made) == all_bytes(&read), "{name} {how}");
            let empty = Model::empty_quantized(config.clone(), DType::BF16, how).unwrap();
            for ((a, have), (b, want)) in empty.named_params().iter().zip(made.named_params()) {
                assert_eq!((a, have.bytes()), (&b, want.bytes()), "{name} {how}");
            }
        }
    }
    let config = preset("tiny").unwrap();
    let size = |model: &Model| -> usize {
        let blocks = model.named_params().into_iter();
        let linear = blocks.filter(|(name, _)| name.contains("_proj"));
        linear.map(|(_, param)| param.bytes()).sum()
    };
    let whole = size(&Model::empty(config.clone(), DType::BF16).unwrap());
    for (how, most) in [(Quantization::Nf4, 0.30), (Quantization::Int8, 0.56)] {
        let model = Model::empty_quantized(config.clone(), DType::BF16, how).unwrap();
        let share = size(&model) as f64 / whole as f64;
        assert!(share < most, "{how}: {share} of bf16");
    }
}

/// A model of random codes has the parameters of any other, none of them left out, and its weights
/// are about as large as those of a random model.
#[test]
fn random_codes_make_a_whole_model() {
    for name in ["qwen3", "qwen3_moe", "gpt_oss"] {
        let config = Golden::open(name).config();
        for how in BOTH {
            let made = Model::random_codes(config.clone(), DType::F32, 5, how).unwrap();
            let other = Model::random_quantized(config.clone(), DType::F32, 5, how).unwrap();
            let pairs = made.named_params().into_iter().zip(other.named_params());
            for ((a, have), (b, want)) in pairs {
                let what = format!("{name} {how} {a}");
                assert_eq!((&a, have.bytes()), (&b, want.bytes()), "{what}");
                let is_zero = |param: &Param| bytes(param).iter().all(|byte| *byte == 0);
                let is_scale = a.ends_with("scales") || a.ends_with("nested");
                assert!(is_scale || is_zero(&have) == is_zero(&want), "{what}");
            }
            let [have, want] = [made, other].map(|model| {
                let losses = train(model, processors(1), Grain::Stage, Bytes::mib(64)).0;
                f64::from_bits(losses[0])
            });
            assert!((have - want).abs() < 0.5, "{name} {how}: {have}, {want}");
        }
    }
}

/// Losses of two steps, and the adapters after them, as bits.
fn train(
    mut model: Model,
    devices: Vec<Arc<dyn Device>>,
    grain: Grain,
    memory: Bytes,
) -> (Vec<u64>, Vec<Vec<u8>>) {
    let config = LoraConfig {
        rank: 4,
        ..LoraConfig::default()
    };
    model.add_lora(&config).unwrap();
    let engine = RoundPipe::builder(model.layers.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(
            RunConfig::default()
                .num_microbatch(2)
                .recompute_grain(grain),
        )
        .devices(devices)
        .optimizer_threads(1)
        .ring_options(RingOptions {
            memory: Some(memory),
            ..RingOptions::default()
        })
        .build()
        .unwrap();
    let ids: Vec<i64> = (0..32).map(|i| i * 7 % 60).collect();
    let ids = HostTensor::from_slice(&ids, &[2, 16]).unwrap();
    let losses = (0..2).map(|_| {
        let inputs = Inputs::new()
            .named("ids", ids.clone())
            .named("labels", ids.clone());
        let loss = engine.train(inputs).run().unwrap().losses.total();
        engine.update(&Update::new(1e-2), Lag::One).unwrap();
        loss.to_bits()
    });
    let losses = losses.collect();
    engine.synchronize().unwrap();
    let params = model.named_params();
    let adapters = params.iter().filter(|(_, p)| p.is_trainable());
    let adapters: Vec<_> = adapters.map(|(_, p)| bytes(p)).collect();
    assert!(!adapters.is_empty());
    (losses, adapters)
}

fn processors(count: usize) -> Vec<Arc<dyn Device>> {
    let all = Cpu::workers(count, Some(2)).unwrap().into_iter();
    all.map(|worker| worker as Arc<dyn Device>).collect()
}

/// Training beside codes gives the bits of training beside the weights that they widen to, whatever
/// the workers, the grain and the memory, on processors that read in place and on simulated devices
/// that weights are sent to.
#[test]
fn adapters_learn_as_beside_the_widened_weights() {
    for (name, dtype) in [
        ("llama3", DType::F32),
        ("qwen3", DType::BF16),
        ("qwen3_moe", DType::BF16),
        ("gpt_oss", DType::F32),
    ] {
        let dir = saved(&Golden::open(name).model(DType::F32));
        for how in BOTH {
            let load = || Model::load_quantized(&dir, Some(dtype), how).unwrap();
            let mut whole = load();
            whole.dequantize().unwrap();
            let much = Bytes::mib(48);
            let want = train(whole, cpus(), Grain::Stage, much);
            let case = format!("{name} {dtype} {how}");
            assert_eq!(train(load(), cpus(), Grain::Stage, much), want, "{case}");
            for workers in [1, 2, 3] {
                for grain in [Grain::Stage, Grain::Layer] {
                    let got = train(load(), processors(workers), grain, much);
                    assert_eq!(got, want, "{case}: {workers} workers, {grain:?}");
                }
            }
            for (workers, memory) in [(1, much), (2, Bytes::mib(2)), (3, much)] {
                let world = SimWorld::seeded(workers as u64).unwrap();
                let sims = world.workers(workers).into_iter();
                let sims = sims.map(|worker| worker as Arc<dyn Device>).collect();
                let got = train(load(), sims, Grain::Layer, memory);
                assert_eq!(got, want, "{case}: {workers} simulated workers");
            }
        }
    }
}

/// Host memory that an engine holds is the codes', not the whole weights'.
#[test]
fn an_engine_holds_codes() {
    let held = |model: &Model| {
        let engine = RoundPipe::builder(model.layers.clone())
            .inference(true)
            .devices(cpus())
            .ring_options(RingOptions {
                memory: Some(Bytes::mib(64)),
                ..RingOptions::default()
            })
            .build()
            .unwrap();
        engine.host_bytes().total()
    };
    let config = preset("tiny").unwrap();
    let whole = Model::random(config.clone(), DType::BF16, 1).unwrap();
    let nf4 = Model::random_quantized(config, DType::BF16, 1, Quantization::Nf4).unwrap();
    let linear: usize = whole
        .named_params()
        .iter()
        .filter(|(name, _)| name.contains("_proj"))
        .map(|(_, param)| param.bytes())
        .sum();
    let saved = held(&whole).saturating_sub(held(&nf4));
    assert!(saved > linear * 2 / 3, "{saved} of {linear} bytes saved");
}

/// Adapters of a quantised base go out and come in as ever, and apply to the whole one.
#[test]
fn adapters_are_files_as_ever() {
    let dir = saved(&Golden::open("qwen3").model(DType::F32));
    let mut model = Model::load_quantized(&dir, None, Quantization::Nf4).unwrap();
    model.add_lora(&LoraConfig::default()).unwrap();
    let out = folder();
    model.save_adapter(&out).unwrap();
    let mut whole = Model::load(&dir, None).unwrap();
    whole.load_adapter(&out).unwrap();
    let adapters = |model: &Model| -> Vec<(String, Vec<u8>)> {
        let all = all_bytes(model).into_iter();
        all.filter(|(name, _)| name.contains("lora_")).collect()
    };
    assert!(adapters(&whole) == adapters(&model));
    whole.merge_lora().unwrap();
    // Codes that became whole weights merge too.
    model.dequantize().unwrap();
    model.merge_lora().unwrap();
}

/// A copy of a fixture whose tensors are changed.
fn changed(
    name: &str,
    change: impl Fn(&str, Dtype, Vec<usize>, Vec<u8>) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
) -> Temp {
    let dir = folder();
    let path: &Path = dir.as_ref();
    std::fs::copy(fixture(name).join("config.json"), path.join("config.json")).unwrap();
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().filter_map(|(name, view)| {
        let (dtype, dims) = (view.dtype(), view.shape().to_vec());
        Some((
            name.clone(),
            change(&name, dtype, dims, view.data().to_vec())?,
        ))
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, (dtype, dims, data))| {
        (name, TensorView::new(*dtype, dims.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path.join("model.safetensors")).unwrap();
    dir
}

fn refused(dir: impl AsRef<Path>, parts: &[&str]) {
    let text = Model::load(dir, None).err().expect("refused").to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut model = Model::load(fixture("nf4"), None).unwrap();
    let text = model
        .save(folder(), SaveOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("quantised (nf4)") && text.contains("adapter"),
        "{text}"
    );
    model.add_lora(&LoraConfig::default()).unwrap();
    let text = model.merge_lora().unwrap_err().to_string();
    assert!(
        text.contains("quantised (nf4)") && text.contains("dequantize"),
        "{text}"
    );
    let other = Model::load_quantized(fixture("nf4"), None, Quantization::Int8);
    let text = other.err().expect("another format").to_string();
    assert!(text.contains("quantised as nf4, not int8"), "{text}");

    let at = "model.layers.0.self_attn.k_proj.weight";
    for part in ["absmax", "quant_map", "nested_quant_map"] {
        let gone = format!("{at}.{part}");
        let dir = changed("nf4", |name, dtype, dims, data| {
            (name != gone).then_some((dtype, dims, data))
        });
        refused(dir, &[&gone]);
    }
    let state = format!("{at}.quant_state.bitsandbytes__nf4");
    for (from, to, says) in [
        (
            "\"blocksize\": 64",
            "\"blocksize\": 128",
            "blocksize = 128, only 64 is read; quantise the model again with blocksize 64",
        ),
        (
            "\"shape\": [32, 64]",
            "\"shape\": [64, 32]",
            "check that config.json",
        ),
        (
            "\"nested_blocksize\": 256",
            "\"nested_blocksize\": 128",
            "quantise the model again with nested blocksize 256",
        ),
        (
            "\"nested_offset\": ",
            "\"nested_offset\": 1e39, \"was\": ",
            "nested_offset",
        ),
        ("{", "<", "is no JSON"),
    ] {
        let dir = changed("nf4", |name, dtype, dims, data| {
            if name != state {
                return Some((dtype, dims, data));
            }
            let text = String::from_utf8(data).unwrap().replacen(from, to, 1);
            assert!(text.contains(to), "{text}");
            Some((dtype, vec![text.len()], text.into_bytes()))
        });
        refused(dir, &[&state, says]);
    }
    let codes = changed("nf4", |name, dtype, dims, mut data| {
        let cut = name == at;
        data.truncate(if cut { data.len() - 2 } else { data.len() });
        let dims = if cut { vec![data.len()] } else { dims };
        Some((dtype, dims, data))
    });
    refused(codes, &[at, "the model needs 1024"]);
    let rows = changed("int8", |name, dtype, dims, data| {
        (!name.ends_with("k_proj.SCB")).then_some((dtype, dims, data))
    });
    refused(rows, &["k_proj.SCB"]);
    let dir = folder();
    let config = std::fs::read_to_string(fixture("nf4").join("config.json")).unwrap();
    let config = config.replace(
        "\"bnb_4bit_quant_type\": \"nf4\"",
        "\"bnb_4bit_quant_type\": \"fp4\"",
    );
    std::fs::write(dir.as_ref().join("config.json"), config).unwrap();
    refused(dir, &["fp4", "not supported"]);
}

/// Codes of 8 bits in the order of a GPU's tiles are no rows: read as rows, they would be another
/// model without a word.
#[test]
fn tiles_of_eight_bits_are_refused() {
    let format = "model.layers.0.self_attn.k_proj.weight_format";
    for (value, says) in [
        (1, "1 (col32)"),
        (2, "2 (col_turing)"),
        (3, "3 (col_ampere)"),
        (4, "is 4,"),
    ] {
        let dir = changed("int8", |name, dtype, dims, data| {
            let data = if name == format { vec![value] } else { data };
            Some((dtype, dims, data))
        });
        refused(dir, &[format, says, "stores rows"]);
    }
    // A folder that does not say has rows, as bitsandbytes takes it.
    let silent = changed("int8", |name, dtype, dims, data| {
        (!name.ends_with("weight_format")).then_some((dtype, dims, data))
    });
    let have = Model::load(silent, None).unwrap();
    let want = Model::load(fixture("int8"), None).unwrap();
    assert!(all_bytes(&have) == all_bytes(&want));
}

/// What a plan counts for a quantised folder, which it makes from the config alone, is what loads.
#[test]
fn a_config_tells_what_its_folder_takes() {
    let sizes = |model: &Model| -> Vec<(String, usize)> {
        let params = model.named_params().into_iter();
        params.map(|(name, param)| (name, param.bytes())).collect()
    };
    for name in ["nf4", "nf4_plain", "int8"] {
        let config = read_config(fixture(name)).unwrap();
        let how = config.quantization().unwrap();
        let empty = Model::empty_quantized(config, DType::F32, how).unwrap();
        let loaded = Model::load(fixture(name), Some(DType::F32)).unwrap();
        assert_eq!(sizes(&empty), sizes(&loaded), "{name}");
    }
    // Another tool's quantisation says nothing about ours.
    let whole = Golden::open("gpt_oss").config();
    let theirs = json!({"quantization_config": {"quant_method": "mxfp4"}});
    let [mxfp4, whole] = [whole.with(&theirs).unwrap(), whole]
        .map(|config| Model::empty_quantized(config, DType::F32, Quantization::Nf4).unwrap());
    assert_eq!(sizes(&whole), sizes(&mxfp4));
}

/// The element type under which codes of NF4 are stored says nothing about them: a load reads what a
/// folder of bytes has.
#[test]
fn codes_are_read_from_any_storage_type() {
    let is_codes = |name: &str| name.ends_with("_proj.weight");
    for fixture_name in ["nf4", "nf4_plain"] {
        let want = all_bytes(&Model::load(fixture(fixture_name), None).unwrap());
        for (dtype, size) in [(Dtype::BF16, 2), (Dtype::F16, 2), (Dtype::F32, 4)] {
            let dir = changed(fixture_name, |name, own, dims, data| {
                let dims = match is_codes(name) {
                    true => vec![data.len() / size, 1],
                    false => dims,
                };
                Some((if is_codes(name) { dtype } else { own }, dims, data))
            });
            let models = [
                Model::load(&dir, None).unwrap(),
                Model::load_mapped(&dir, None).unwrap(),
            ];
            for model in models {
                assert!(all_bytes(&model) == want, "{fixture_name} as {dtype}");
            }
        }
    }
    let at = "model.layers.0.self_attn.k_proj.weight";
    let cut = changed("nf4", |name, dtype, dims, mut data| {
        if name != at {
            return Some((dtype, dims, data));
        }
        data.truncate(data.len() - 2);
        Some((Dtype::BF16, vec![data.len() / 2, 1], data))
    });
    refused(cut, &[at, "BF16", "1024 bytes of codes"]);
}

/// bitsandbytes also takes matrices that are no whole blocks; here the reason and a way out are said.
#[test]
fn parts_of_blocks_are_refused_with_the_reason() {
    // Attention's matrices are whole blocks then, those of the unit are not.
    let config = std::fs::read_to_string(fixture("nf4").join("config.json")).unwrap();
    let config = config.replace("\"hidden_size\": 64", "\"hidden_size\": 30");
    let config = config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 15");
    let dir = changed("nf4", |_, dtype, dims, data| Some((dtype, dims, data)));
    std::fs::write(dir.as_ref().join("config.json"), config).unwrap();
    let gate = "model.layers.0.mlp.gate_proj.weight";
    refused(dir, &[gate, "[15, 30]", "multiples of 64", "8 bits"]);
}

/// A scale that is no number would make all it scales none: a loss of NaN that says nothing of where
/// it comes from.
#[test]
fn scales_that_are_no_numbers_are_refused() {
    let module = "model.layers.0.self_attn.k_proj";
    for (fixture_name, part) in [
        ("int8", "SCB"),
        ("nf4_plain", "weight.absmax"),
        ("nf4_plain", "weight.quant_map"),
        ("nf4", "weight.nested_absmax"),
        ("nf4", "weight.nested_quant_map"),
    ] {
        for (value, says) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
            let odd = format!("{module}.{part}");
            let dir = changed(fixture_name, |name, dtype, dims, mut data| {
                if name == odd {
                    let last = data.len() - 4;
                    data[last..].copy_from_slice(&value.to_le_bytes());
                }
                Some((dtype, dims, data))
            });
            refused(dir, &[&odd, says, "no finite number"]);
        }
    }
}

/// A tensor as a file has it.
type Written = (String, Dtype, Vec<usize>, Vec<u8>);

/// A matrix as bitsandbytes saves it, and the values that it stands for.
struct Coded {
    tensors: Vec<Written>,
    values: Vec<f32>,
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// In NF4 without double quantisation.
fn in_four_bits(name: &str, dims: &[usize]) -> Coded {
    let count: usize = dims.iter().product();
    let blocks = count.div_ceil(64);
    let book = &nf4_books()[..16];
    let codes: Vec<u8> = (0..count / 2).map(|i| (i * 37 % 251) as u8).collect();
    let largest: Vec<f32> = (0..blocks).map(|i| 0.1 + i as f32 / 64.0).collect();
    let nibbles = codes.iter().flat_map(|code| [code >> 4, code & 15]);
    let values = nibbles.enumerate();
    let values = values.map(|(i, code)| book[usize::from(code)] * largest[i / 64]);
    let values = values.collect();
    let state = format!("{{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": {dims:?}}}");
    let part = |part: &str| format!("{name}.{part}");
    let tensors = vec![
        (name.to_owned(), Dtype::U8, vec![count / 2, 1], codes),
        (part("absmax"), Dtype::F32, vec![blocks], le(&largest)),
        (part("quant_map"), Dtype::F32, vec![16], le(book)),
        (
            part("quant_state.bitsandbytes__nf4"),
            Dtype::U8,
            vec![state.len()],
            state.into_bytes(),
        ),
    ];
    Coded { tensors, values }
}

fn in_eight_bits(name: &str, dims: &[usize]) -> Coded {
    let &[rows, columns] = dims else {
        panic!("{name} is no matrix")
    };
    let codes: Vec<u8> = (0..rows * columns).map(|i| (i * 37 % 251) as u8).collect();
    let largest: Vec<f32> = (0..rows).map(|i| 0.1 + i as f32 / 64.0).collect();
    let values = codes.iter().enumerate();
    let values = values.map(|(i, code)| f32::from(*code as i8) * (largest[i / columns] / 127.0));
    let values = values.collect();
    let module = name.strip_suffix("weight").unwrap();
    let tensors = vec![
        (name.to_owned(), Dtype::I8, dims.to_vec(), codes),
        (format!("{module}SCB"), Dtype::F32, vec![rows], le(&largest)),
        (format!("{module}weight_format"), Dtype::U8, vec![], vec![0]),
    ];
    Coded { tensors, values }
}

/// Puts a quantised matrix in the place of a whole one.
fn replace(dir: &Temp, name: &str, code: fn(&str, &[usize]) -> Coded) -> Vec<f32> {
    let path = dir.as_ref().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let coded = code(name, file.tensor(name).unwrap().shape());
    let others = file
        .tensors()
        .into_iter()
        .filter(|(other, _)| other != name);
    let quantised = coded.tensors.iter().map(|(name, dtype, dims, data)| {
        let view = TensorView::new(*dtype, dims.clone(), data).unwrap();
        (name.clone(), view)
    });
    let all = safetensors::serialize(others.chain(quantised), None).unwrap();
    std::fs::write(path, all).unwrap();
    coded.values
}

/// bitsandbytes quantises a head or a router where nothing keeps it from that. They are whole here,
/// so they load as what their codes stand for.
#[test]
fn a_quantised_head_and_router_are_widened() {
    let config = Golden::open("qwen3_moe").config();
    let config = config
        .with(&json!({"vocab_size": 96, "num_experts": 6}))
        .unwrap();
    let (head, router) = ("lm_head.weight", "model.layers.1.mlp.gate.weight");
    let codings: [fn(&str, &[usize]) -> Coded; 2] = [in_four_bits, in_eight_bits];
    for code in codings {
        let dir = saved(&Model::random(config.clone(), DType::F32, 1).unwrap());
        let want = [head, router].map(|name| (name, replace(&dir, name, code)));
        for dtype in [DType::F32, DType::BF16] {
            for model in [
                Model::load(&dir, Some(dtype)).unwrap(),
                Model::load_mapped(&dir, Some(dtype)).unwrap(),
            ] {
                let entries = model.entries();
                for (name, want) in &want {
                    let param = &entries.iter().find(|e| e.name == *name).unwrap().param;
                    let home = param.data().read_all().unwrap();
                    let same = match dtype {
                        DType::F32 => home.as_slice::<f32>() == want,
                        _ => {
                            let rounded: Vec<_> =
                                want.iter().copied().map(bf16::from_f32).collect();
                            home.as_slice::<bf16>() == rounded
                        }
                    };
                    assert!(same, "{name} in {dtype}");
                }
            }
        }
    }
    // 97 rows of 32 values are no whole blocks.
    let dir = saved(&Golden::open("qwen3_moe").model(DType::F32));
    replace(&dir, head, in_four_bits);
    refused(dir, &[head, "[97, 32]", "multiples of 64", "8 bits"]);
}
