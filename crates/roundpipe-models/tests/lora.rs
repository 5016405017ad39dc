//! LoRA against PEFT: gradients of adapters, files in and out, merging; and what is refused.

mod golden;

use std::path::Path;

use golden::{
    Golden, Temp, assert_close, assert_same_direction, cpus, folder, rms_difference, worker,
};
use roundpipe::{
    Bytes, Cx, DType, HostTensor, Inputs, Lag, Param, Params, RingOptions, RngSite, RoundPipe,
    Rule, RunConfig, Update,
};
use roundpipe_models::{LoraConfig, LoraTargets, Model, preset};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

const WITH_LORA: [&str; 5] = ["llama3", "qwen3", "qwen3_moe", "qwen3_moe_plain", "gpt_oss"];

/// The adapter of a golden file as PEFT had written it; `prefix` is `a.` for values and `ag.` for
/// gradients.
fn peft_folder(file: &Golden, prefix: &str) -> Temp {
    let dir = folder();
    let path = dir.as_ref();
    let config = file.meta("adapter_config").unwrap();
    std::fs::write(path.join("adapter_config.json"), config.to_string()).unwrap();
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .names(prefix)
        .into_iter()
        .map(|name| {
            let full = format!("{prefix}{name}");
            let data = file
                .floats(&full)
                .into_iter()
                .flat_map(|x| (x as f32).to_le_bytes())
                .collect();
            (name, file.dims(&full), data)
        })
        .collect();
    let views = bytes.iter().map(|(n, d, b)| {
        (
            n.as_str(),
            TensorView::new(Dtype::F32, d.clone(), b).unwrap(),
        )
    });
    safetensors::serialize_to_file(views, None, &path.join("adapter_model.safetensors")).unwrap();
    dir
}

fn with_adapter(file: &Golden, prefix: &str) -> Model {
    let mut model = file.model(DType::F32);
    model.load_adapter(peft_folder(file, prefix)).unwrap();
    model
}

fn floats(param: &Param) -> Vec<f64> {
    HostTensor::new(param.data(), param.dtype(), param.shape().dims())
        .unwrap()
        .to_f64_vec()
        .unwrap()
}

fn logits(model: &Model, file: &Golden) -> Vec<f64> {
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = cx
        .tensor(&file.ids("ids").to_vec::<i64>().unwrap(), &[2, 24])
        .unwrap();
    model.logits(&mut cx, &ids).unwrap().to_f64_vec().unwrap()
}

/// The loss and every adapter's gradient under the engine; the base has none.
#[test]
fn gradients_of_adapters_are_those_of_peft() {
    for name in WITH_LORA {
        let file = Golden::open(name);
        let model = with_adapter(&file, "a.");
        // A second model, whose adapters are the gradients that PEFT computed.
        let wanted = with_adapter(&file, "ag.").named_params();
        let engine = RoundPipe::builder(model.layers.clone())
            .optimizer(Rule::AdamW(roundpipe::optim::AdamW::default()))
            .run_config(RunConfig::default().num_microbatch(1))
            .devices(cpus())
            .ring_options(RingOptions {
                memory: Some(Bytes::mib(64)),
                ..RingOptions::default()
            })
            .build()
            .unwrap();
        let inputs = Inputs::new()
            .named("ids", file.ids("ids"))
            .named("labels", file.ids("labels"));
        let loss = engine.train(inputs).run().unwrap().losses.total();
        assert_close(&format!("{name}: loss"), &[loss], &file.floats("lora_loss"));
        engine.synchronize().unwrap();
        let grads = engine.gradients().unwrap();
        assert_eq!(
            grads.len(),
            file.names("a.").len(),
            "{name}: adapters and nothing else"
        );
        for (at, grad) in grads {
            let (_, want) = wanted.iter().find(|(n, _)| *n == at).unwrap();
            let have = grad.unwrap().to_f64_vec().unwrap();
            assert_same_direction(&format!("{name}: {at}"), &have, &floats(want));
        }
        engine.update(&Update::new(1e-3), Lag::Zero).unwrap();
        engine.synchronize().unwrap();
    }
}

/// What is saved is what was loaded, tensor by tensor, and loads again, also into adapters that are
/// there.
#[test]
fn adapters_go_out_as_they_came_in() {
    for name in WITH_LORA {
        let file = Golden::open(name);
        let model = with_adapter(&file, "a.");
        let dir = folder();
        model.save_adapter(&dir).unwrap();
        let bytes = std::fs::read(dir.as_ref().join("adapter_model.safetensors")).unwrap();
        let saved = SafeTensors::deserialize(&bytes).unwrap();
        let names: std::collections::BTreeSet<String> =
            saved.names().into_iter().map(str::to_owned).collect();
        assert_eq!(names, file.names("a."), "{name}");
        for tensor in names {
            let view = saved.tensor(&tensor).unwrap();
            let full = format!("a.{tensor}");
            assert_eq!(view.shape(), file.dims(&full), "{name}: {tensor}");
            let want: Vec<u8> = file
                .floats(&full)
                .into_iter()
                .flat_map(|x| (x as f32).to_le_bytes())
                .collect();
            assert_eq!(view.data(), want, "{name}: {tensor}");
        }
        let mut again = file.model(DType::F32);
        again.load_adapter(&dir).unwrap();
        again.load_adapter(&dir).unwrap();
        assert_eq!(logits(&again, &file), logits(&model, &file), "{name}");
    }
}

/// A merged model computes what base and branches computed, has no branches left and names of a
/// plain model.
#[test]
fn merging_keeps_the_function() {
    for name in WITH_LORA {
        let file = Golden::open(name);
        let mut model = with_adapter(&file, "a.");
        let before = logits(&model, &file);
        assert!(
            rms_difference(&before, &file.floats("logits")) > 0.01,
            "{name}: the adapter does something"
        );
        model.merge_lora().unwrap();
        assert_close(name, &logits(&model, &file), &before);
        assert!(model.lora().is_none());
        assert!(
            model
                .named_params()
                .iter()
                .all(|(n, _)| !n.contains("lora")),
            "{name}"
        );
        assert!(
            model
                .save_adapter(folder())
                .unwrap_err()
                .to_string()
                .contains("has none")
        );
    }
}

/// Fresh adapters change nothing (B is 0), A is uniform in ±1/√in and fixed by the seed; only they
/// are trained.
#[test]
fn fresh_adapters_do_nothing_yet() {
    for name in WITH_LORA {
        let file = Golden::open(name);
        let mut model = file.model(DType::F32);
        let before = logits(&model, &file);
        model
            .add_lora(&LoraConfig {
                rank: 4,
                dropout: 0.5,
                seed: 3,
                ..LoraConfig::default()
            })
            .unwrap();
        assert_eq!(logits(&model, &file), before, "{name}");
        let trained = model.trainable_params();
        assert!(trained.iter().all(|(n, _)| n.contains("lora_")), "{name}");
        for (at, param) in trained {
            let values = floats(&param);
            if at.ends_with("lora_B.weight") {
                assert!(values.iter().all(|x| *x == 0.0), "{name}: {at}");
                continue;
            }
            let bound = 1.0 / (param.shape().dims()[param.shape().rank() - 1] as f64).sqrt();
            let largest = values.iter().fold(0f64, |m, x| m.max(x.abs()));
            assert!(
                largest <= bound && largest > 0.8 * bound,
                "{name}: {at}: {largest} of {bound}"
            );
        }
        assert!(
            model.add_lora(&LoraConfig::default()).is_err(),
            "adapters twice"
        );
    }
}

/// Dropout drops in training only, and the same places again for the same step.
#[test]
fn dropout_is_fixed_by_the_place() {
    let file = Golden::open("qwen3_moe");
    let mut model = with_adapter(&file, "a.");
    let dir = folder();
    model.save_adapter(&dir).unwrap();
    let path = dir.as_ref().join("adapter_config.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    json["lora_dropout"] = 0.4.into();
    std::fs::write(&path, json.to_string()).unwrap();
    model = file.model(DType::F32);
    model.load_adapter(&dir).unwrap();
    let worker = worker();
    let loss = |cx: &mut Cx| {
        let ids = cx
            .tensor(&file.ids("ids").to_vec::<i64>().unwrap(), &[2, 24])
            .unwrap();
        let labels = cx
            .tensor(&file.ids("labels").to_vec::<i64>().unwrap(), &[2, 24])
            .unwrap();
        model.loss(cx, &ids, &labels).unwrap().item().unwrap()
    };
    let at = |step| {
        Cx::train(&worker).at(RngSite {
            seed: 1,
            step,
            ..RngSite::default()
        })
    };
    assert_eq!(loss(&mut at(1)), loss(&mut at(1)));
    assert_ne!(loss(&mut at(1)), loss(&mut at(2)));
    assert_ne!(loss(&mut at(1)), file.float("lora_loss"));
}

fn text(result: roundpipe_models::Result<()>) -> String {
    result.unwrap_err().to_string()
}

/// Whoever mistypes a target reads which there are; names may be as long as it takes to mean one
/// matrix.
#[test]
fn bad_configs_and_targets_are_named() {
    let mut model = Golden::open("qwen3_moe").model(DType::F32);
    let names =
        |names: &[&str]| LoraTargets::Names(names.iter().map(|n| (*n).to_owned()).collect());
    let config = LoraConfig::default();
    let mut refuse = |config: LoraConfig, what: &str| {
        let text = text(model.add_lora(&config));
        assert!(text.contains(what), "{text}");
    };
    refuse(
        LoraConfig {
            rank: 0,
            ..config.clone()
        },
        "rank: 0",
    );
    refuse(
        LoraConfig {
            alpha: f64::NAN,
            ..config.clone()
        },
        "alpha: NaN",
    );
    refuse(
        LoraConfig {
            dropout: 1.0,
            ..config.clone()
        },
        "dropout: 1",
    );
    refuse(
        LoraConfig {
            targets: names(&[]),
            ..config.clone()
        },
        "targets: no names",
    );
    refuse(
        LoraConfig {
            targets: names(&["q_proj", "fc1"]),
            ..config.clone()
        },
        "`fc1`; there are mlp.",
    );
    model
        .add_lora(&LoraConfig {
            targets: names(&["gate", "experts.down_proj"]),
            ..config
        })
        .unwrap();
    let names: Vec<_> = model
        .trainable_params()
        .into_iter()
        .map(|(n, _)| n)
        .collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(
        names[0].ends_with("layers.1.mlp.gate.lora_A.weight"),
        "{names:?}"
    );
}

/// Files that do not fit: each error names the file and the key or tensor, and the model is as
/// before.
#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let file = Golden::open("qwen3");
    let change = |dir: &Path, key: &str, value: serde_json::Value| {
        let path = dir.join("adapter_config.json");
        let mut json: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        json[key] = value;
        std::fs::write(&path, json.to_string()).unwrap();
    };
    let cases = [
        (
            "r",
            serde_json::json!(4),
            "q_proj.lora_A.weight of shape [3, 32]; rank 4 here needs [4, 32]",
        ),
        ("r", serde_json::json!(0), "rank: 0"),
        ("peft_type", serde_json::json!("IA3"), "peft_type = \"IA3\""),
        ("use_dora", serde_json::json!(true), "use_dora = true"),
        (
            "modules_to_save",
            serde_json::json!(["lm_head"]),
            "modules_to_save",
        ),
        ("bias", serde_json::json!("all"), "bias = \"all\""),
        ("lora_alpha", serde_json::json!("x"), "lora_alpha = \"x\""),
    ];
    let mut model = file.model(DType::F32);
    for (key, value, what) in cases {
        let dir = peft_folder(&file, "a.");
        change(dir.as_ref(), key, value);
        let text = text(model.load_adapter(&dir));
        assert!(
            text.contains(what) && text.contains("adapter_"),
            "{key}: {text}"
        );
        assert!(model.lora().is_none());
    }
    // Another model's adapter, one that is there already with another rank or other targets, a
    // damaged file.
    let other = peft_folder(&Golden::open("gpt_oss"), "a.");
    assert!(text(model.load_adapter(&other)).contains("adapter_model.safetensors"));
    let dir = peft_folder(&file, "a.");
    model
        .add_lora(&LoraConfig {
            rank: 3,
            alpha: 7.0,
            ..LoraConfig::default()
        })
        .unwrap();
    assert!(
        text(model.load_adapter(&dir))
            .contains("has no branch for model.layers.0.self_attn.k_proj")
    );
    let mut model = file.model(DType::F32);
    let targets = LoraTargets::Names(
        ["q_proj", "v_proj", "down_proj"]
            .map(str::to_owned)
            .to_vec(),
    );
    model
        .add_lora(&LoraConfig {
            rank: 5,
            targets,
            ..LoraConfig::default()
        })
        .unwrap();
    assert!(
        text(model.load_adapter(&dir))
            .contains("has rank 3 for model.layers.0.self_attn.q_proj, the model 5")
    );
    std::fs::write(dir.as_ref().join("adapter_model.safetensors"), b"nothing").unwrap();
    assert!(text(file.model(DType::F32).load_adapter(&dir)).contains("adapter_model.safetensors"));
    std::fs::remove_file(dir.as_ref().join("adapter_config.json")).unwrap();
    assert!(
        text(file.model(DType::F32).load_adapter(&dir)).contains("adapter_config.json: is missing")
    );
}

/// Every preset takes adapters: shapes of the small ones' blocks, made without touching memory.
#[test]
fn presets_take_adapters() {
    for name in roundpipe_models::presets::names() {
        let mut config = preset(name)
            .unwrap()
            .with(&serde_json::json!({"num_hidden_layers": 2, "vocab_size": 64}))
            .unwrap();
        config.max_positions = 16;
        let mut model = Model::empty(config, DType::BF16).unwrap();
        model
            .add_lora(&LoraConfig {
                rank: 1,
                ..LoraConfig::default()
            })
            .unwrap();
        let per_block = if model.config.moe.is_some() { 6 } else { 7 };
        assert_eq!(model.trainable_params().len(), 2 * 2 * per_block, "{name}");
    }
}
