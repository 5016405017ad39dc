//! GGUF files read back: keys, tokens, and every tensor's place, type and values.

mod golden;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use golden::{Temp, folder};
use roundpipe::{DType, Params, bf16};
use roundpipe_models::{GgufOptions, GgufReport, GgufType, Model, ModelConfig, SaveOptions};
use serde_json::{Value, json};

/// Rows of the embedding that no token has.
const SPARE: usize = 5;

fn tokens(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    fixtures.join("chat/tokenizers").join(name)
}

fn vocab(name: &str) -> usize {
    let tokenizer = roundpipe_models::tokenizer::Tokenizer::open(&tokens(name));
    tokenizer.unwrap().vocab_size()
}

/// A small model of a family.
fn model(family: &str, changes: &Value) -> Model {
    let mut json = json!({
        "model_type": family, "vocab_size": vocab("byte_level") + SPARE, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "dtype": "float32",
    });
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    let config = ModelConfig::from_json(&json, "config.json").unwrap();
    Model::random(config, DType::F32, 11).unwrap()
}

fn options(dtype: GgufType) -> GgufOptions {
    GgufOptions {
        dtype,
        name: "small".into(),
    }
}

fn written(model: &Model, dtype: GgufType, tokenizer: &str) -> (Gguf, GgufReport) {
    let dir = folder();
    let path = dir.as_ref().join("model.gguf");
    let report = model
        .save_gguf(&path, tokens(tokenizer), &options(dtype))
        .unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, report.bytes);
    let file = Gguf::parse(&bytes);
    assert_eq!(file.tensors.len(), report.tensors);
    (file, report)
}

/// A parameter's values by its name in transformers.
fn values(model: &Model, name: &str) -> Vec<f32> {
    let entries = model.entries();
    let entry = entries.iter().find(|entry| entry.name == name).unwrap();
    entry.param.to_vec::<f32>().unwrap()
}

/// What a file holds.
struct Gguf {
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    /// Fastest dimension first.
    dims: Vec<usize>,
    kind: u32,
    bytes: Vec<u8>,
}

impl Tensor {
    fn floats(&self) -> Vec<f32> {
        assert_eq!(self.kind, 0);
        let four = self.bytes.chunks_exact(4);
        four.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }
}

/// A cursor over a file.
struct Reader<'a>(&'a [u8], usize);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        self.1 += count;
        &self.0[self.1 - count..self.1]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> usize {
        u64::from_le_bytes(self.take(8).try_into().unwrap()) as usize
    }

    fn text(&mut self) -> String {
        let length = self.u64();
        String::from_utf8(self.take(length).to_vec()).unwrap()
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            4 => self.u32().into(),
            5 => (self.u32() as i32).into(),
            6 => f32::from_bits(self.u32()).into(),
            7 => (self.take(1)[0] == 1).into(),
            8 => self.text().into(),
            9 => {
                let of = self.u32();
                let count = self.u64();
                (0..count).map(|_| self.value(of)).collect()
            }
            other => panic!("type {other}"),
        }
    }
}

impl Gguf {
    fn parse(bytes: &[u8]) -> Self {
        let mut reader = Reader(bytes, 0);
        assert_eq!(reader.take(4), b"GGUF");
        assert_eq!(reader.u32(), 3);
        let (tensors, keys) = (reader.u64(), reader.u64());
        let mut this = Self {
            keys: BTreeMap::new(),
            tensors: BTreeMap::new(),
        };
        for _ in 0..keys {
            let key = reader.text();
            let kind = reader.u32();
            let value = reader.value(kind);
            assert!(this.keys.insert(key, value).is_none());
        }
        let mut places = Vec::new();
        for _ in 0..tensors {
            let name = reader.text();
            let rank = reader.u32();
            let dims: Vec<usize> = (0..rank).map(|_| reader.u64()).collect();
            places.push((name, dims, reader.u32(), reader.u64()));
        }
        let data = reader.1.next_multiple_of(32);
        for (name, dims, kind, at) in places {
            assert_eq!(at % 32, 0, "{name}");
            let count: usize = dims.iter().product();
            let length = match kind {
                0 => count * 4,
                1 | 30 => count * 2,
                2 => count / 32 * 18,
                8 => count / 32 * 34,
                other => panic!("type {other}"),
            };
            let bytes = bytes[data + at..][..length].to_vec();
            let tensor = Tensor { dims, kind, bytes };
            assert!(this.tensors.insert(name, tensor).is_none());
        }
        this
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.tensors[name].floats()
    }
}

/// Rows of `width` values in another order.
fn reordered(values: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    let row = |r: &usize| values[r * width..(r + 1) * width].to_vec();
    rows.iter().flat_map(row).collect()
}

/// Llama: rotated rows in pairs, the rest as it is; a tied head is not repeated.
#[test]
fn a_llama_is_written_as_llama_cpp_wants_it() {
    let model = model(
        "llama",
        &json!({"tie_word_embeddings": true, "rope_theta": 5e5}),
    );
    let (file, report) = written(&model, GgufType::F32, "byte_level");
    assert_eq!((report.architecture, report.notes.len()), ("llama", 0));
    let mut want = vec![
        "token_embd.weight".to_owned(),
        "output_norm.weight".to_owned(),
    ];
    for block in 0..2 {
        let parts = [
            "attn_k",
            "attn_norm",
            "attn_output",
            "attn_q",
            "attn_v",
            "ffn_down",
        ];
        let parts = parts.into_iter().chain(["ffn_gate", "ffn_norm", "ffn_up"]);
        want.extend(parts.map(|part| format!("blk.{block}.{part}.weight")));
    }
    want.sort();
    assert_eq!(file.names(), want);
    let q = values(&model, "model.layers.1.self_attn.q_proj.weight");
    let pairs = [0, 4, 1, 5, 2, 6, 3, 7];
    let rows: Vec<usize> = (0..4).flat_map(|h| pairs.map(|r| r + 8 * h)).collect();
    assert_eq!(file.floats("blk.1.attn_q.weight"), reordered(&q, 32, &rows));
    let k = values(&model, "model.layers.0.self_attn.k_proj.weight");
    assert_eq!(
        file.floats("blk.0.attn_k.weight"),
        reordered(&k, 32, &rows[..16])
    );
    for (theirs, ours) in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        (
            "blk.0.attn_v.weight",
            "model.layers.0.self_attn.v_proj.weight",
        ),
        (
            "blk.1.ffn_down.weight",
            "model.layers.1.mlp.down_proj.weight",
        ),
        (
            "blk.1.ffn_norm.weight",
            "model.layers.1.post_attention_layernorm.weight",
        ),
    ] {
        assert_eq!(file.floats(theirs), values(&model, ours), "{theirs}");
    }
    assert_eq!(file.tensors["blk.0.ffn_down.weight"].dims, [64, 32]);
    let keys = [
        ("general.architecture", json!("llama")),
        ("general.name", json!("small")),
        ("general.file_type", json!(0)),
        ("llama.block_count", json!(2)),
        ("llama.context_length", json!(64)),
        ("llama.embedding_length", json!(32)),
        ("llama.feed_forward_length", json!(64)),
        ("llama.attention.head_count", json!(4)),
        ("llama.attention.head_count_kv", json!(2)),
        ("llama.attention.key_length", json!(8)),
        ("llama.rope.dimension_count", json!(8)),
        ("llama.rope.freq_base", json!(5e5)),
        ("llama.vocab_size", json!(vocab("byte_level") + SPARE)),
    ];
    for (key, want) in keys {
        assert_eq!(file.keys[key], want, "{key}");
    }
}

/// Qwen's rows stay in order, and what is not a matrix is f32 in every file.
#[test]
fn qwens_keep_their_order_and_biases() {
    let model2 = model("qwen2", &json!({}));
    let (file, _) = written(&model2, GgufType::F16, "byte_level");
    let bias = values(&model2, "model.layers.0.self_attn.q_proj.bias");
    assert_eq!(file.floats("blk.0.attn_q.bias"), bias);
    assert_eq!(file.tensors["output.weight"].kind, 1);
    let model3 = model("qwen3", &json!({"head_dim": 16}));
    let (file, _) = written(&model3, GgufType::F32, "byte_level");
    let q = values(&model3, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(file.floats("blk.0.attn_q.weight"), q);
    assert_eq!(file.tensors["blk.0.attn_q_norm.weight"].dims, [16]);
    assert_eq!(file.keys["qwen3.attention.value_length"], 16);
}

/// Experts stand in one tensor per matrix; gates and ups are taken apart.
#[test]
fn experts_are_stacked() {
    let experts = json!({
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
    });
    let qwen = model("qwen3_moe", &experts);
    let (file, _) = written(&qwen, GgufType::F32, "byte_level");
    let both = values(&qwen, "model.layers.1.mlp.experts.gate_up_proj");
    let rows = |second: usize| -> Vec<usize> {
        let of = |e: usize| (0..16).map(move |r| (2 * e + second) * 16 + r);
        (0..4).flat_map(of).collect()
    };
    assert_eq!(file.tensors["blk.1.ffn_up_exps.weight"].dims, [32, 16, 4]);
    for (name, second) in [("gate", 0), ("up", 1)] {
        let got = file.floats(&format!("blk.1.ffn_{name}_exps.weight"));
        assert_eq!(got, reordered(&both, 32, &rows(second)), "{name}");
    }
    let (quantised, _) = written(&qwen, GgufType::Q8_0, "byte_level");
    assert_eq!(
        quantised.tensors["blk.1.ffn_gate_inp.weight"].kind, 0,
        "a router"
    );
    let down = &quantised.tensors["blk.1.ffn_down_exps.weight"];
    assert_eq!(down.kind, 1, "rows of 16 are no whole blocks");

    let oss = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 8});
    let oss = model("gpt_oss", &oss);
    let (file, report) = written(&oss, GgufType::F32, "byte_level");
    assert_eq!(report.architecture, "gpt-oss");
    let both = values(&oss, "model.layers.0.mlp.experts.gate_up_proj");
    let odd: Vec<usize> = (0..64).map(|r| 2 * r + 1).collect();
    assert_eq!(
        file.floats("blk.0.ffn_up_exps.weight"),
        reordered(&both, 32, &odd)
    );
    let bias = values(&oss, "model.layers.0.mlp.experts.gate_up_proj_bias");
    let even: Vec<usize> = (0..64).map(|r| 2 * r).collect();
    assert_eq!(
        file.floats("blk.0.ffn_gate_exps.bias"),
        reordered(&bias, 1, &even)
    );
    assert_eq!(file.tensors["blk.0.ffn_gate_exps.bias"].dims, [16, 4]);
    for name in [
        "attn_sinks.weight",
        "post_attention_norm.weight",
        "ffn_gate_inp.bias",
    ] {
        assert!(
            file.tensors.contains_key(&format!("blk.1.{name}")),
            "{name}"
        );
    }
    assert_eq!(file.keys["gpt-oss.attention.sliding_window"], 8);
    assert_eq!(file.keys["gpt-oss.rope.scaling.type"], "yarn");
}

/// Types of a file: what is rounded, and what stays.
#[test]
fn types_follow_the_file() {
    let model = model("llama", &json!({}));
    let kinds = |dtype: GgufType| {
        let (file, _) = written(&model, dtype, "byte_level");
        let kind = |name: &str| file.tensors[name].kind;
        let names = [
            "blk.0.ffn_up.weight",
            "token_embd.weight",
            "output.weight",
            "output_norm.weight",
        ];
        names.map(kind)
    };
    assert_eq!(kinds(GgufType::F16), [1, 1, 1, 0]);
    assert_eq!(kinds(GgufType::Bf16), [30, 30, 30, 0]);
    assert_eq!(kinds(GgufType::Q8_0), [8, 8, 8, 0]);
    assert_eq!(kinds(GgufType::Q4_0), [2, 2, 8, 0], "the head keeps 8 bits");
    let (file, _) = written(&model, GgufType::Bf16, "byte_level");
    let up = values(&model, "model.layers.0.mlp.up_proj.weight");
    let want: Vec<u8> = up
        .iter()
        .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
        .collect();
    assert_eq!(file.tensors["blk.0.ffn_up.weight"].bytes, want);
}

/// The scaling of Llama 3 is a tensor of divisors, YaRN's and linear ones are keys.
#[test]
fn rotary_scaling_is_carried() {
    let llama3 = json!({"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }});
    let (file, _) = written(&model("llama", &llama3), GgufType::F32, "byte_level");
    let divisors = file.floats("rope_freqs.weight");
    // Wave lengths are 2π · 10^i; 8 is short, and what is longer than 32 is divided.
    assert_eq!(divisors.len(), 4);
    assert_eq!((divisors[0], divisors[2], divisors[3]), (1.0, 8.0, 8.0));
    let linear = json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}});
    let (file, _) = written(&model("llama", &linear), GgufType::F32, "byte_level");
    assert_eq!(file.keys["llama.rope.scaling.type"], "linear");
    assert_eq!(file.keys["llama.rope.scaling.factor"], 4.0);
}

/// Tokens by id with their kinds, merges, the name of the split, ends, and the template.
#[test]
fn a_byte_level_tokenizer_is_carried() {
    let (file, _) = written(&model("llama", &json!({})), GgufType::F16, "byte_level");
    let key = |name: &str| &file.keys[&format!("tokenizer.ggml.{name}")];
    let json: Value = serde_json::from_slice(
        &std::fs::read(tokens("byte_level").join("tokenizer.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(key("model"), "gpt2");
    let listed = key("tokens").as_array().unwrap();
    assert_eq!(listed.len(), vocab("byte_level") + SPARE);
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        assert_eq!(listed[id.as_u64().unwrap() as usize], **token);
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap() as usize;
        let kind = if added["special"] == true { 3 } else { 4 };
        assert_eq!(
            (&listed[id], &key("token_type")[id]),
            (&added["content"], &json!(kind))
        );
    }
    let last = listed.len() - 1;
    assert_eq!(listed[last], format!("[PAD{last}]"));
    assert_eq!(key("token_type")[last], 5);
    let merges = json["model"]["merges"].as_array().unwrap();
    assert_eq!(key("merges").as_array().unwrap().len(), merges.len());
}

/// Pieces: the earlier a merge, the higher the score of what it gives; bytes are marked.
#[test]
fn a_tokenizer_of_pieces_is_carried() {
    let size = json!({"vocab_size": vocab("byte_fallback")});
    let (file, report) = written(&model("llama", &size), GgufType::F16, "byte_fallback");
    assert_eq!(report.notes, [""; 0]);
    let key = |name: &str| &file.keys[&format!("tokenizer.ggml.{name}")];
    let json: Value = serde_json::from_slice(
        &std::fs::read(tokens("byte_fallback").join("tokenizer.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(
        (key("model"), key("pre")),
        (&json!("llama"), &json!("default"))
    );
    let id = |token: &str| json["model"]["vocab"][token].as_u64().unwrap() as usize;
    let kind = |token: &str| key("token_type")[id(token)].as_u64().unwrap();
    assert_eq!(
        (kind("<unk>"), kind("<s>"), kind("<0x0A>"), kind("\u{2581}")),
        (2, 3, 6, 1)
    );
    let score = |token: &str| key("scores")[id(token)].as_f64().unwrap();
    let results: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| match merge {
            Value::String(line) => line.replacen(' ', "", 1),
            pair => format!("{}{}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        })
        .collect();
    assert!(results.len() > 10);
    for pair in results.windows(2) {
        let is_new = !results[..]
            .iter()
            .take_while(|r| **r != pair[0])
            .any(|r| *r == pair[1]);
        assert!(
            !is_new || pair[0] == pair[1] || score(&pair[0]) > score(&pair[1]),
            "{pair:?}"
        );
    }
    assert_eq!(
        (key("bos_token_id"), key("add_bos_token")),
        (&json!(1), &json!(true))
    );
    assert_eq!(
        (key("add_space_prefix"), key("add_eos_token")),
        (&json!(true), &json!(false))
    );
}

/// Weights that stay in files give the same bytes.
#[test]
fn a_mapped_model_gives_the_same_file() {
    let experts = json!({
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,
    });
    for (family, changes) in [("llama", json!({})), ("qwen3_moe", experts)] {
        let dir = folder();
        let at = |name: &str| dir.as_ref().join(name);
        model(family, &changes)
            .save(at("hf"), SaveOptions::default())
            .unwrap();
        let write = |model: &Model, name: &str| {
            let options = options(GgufType::Q4_0);
            model
                .save_gguf(at(name), tokens("byte_level"), &options)
                .unwrap();
            std::fs::read(at(name)).unwrap()
        };
        let loaded = write(&Model::load(at("hf"), None).unwrap(), "loaded.gguf");
        let mapped = write(&Model::load_mapped(at("hf"), None).unwrap(), "mapped.gguf");
        assert!(loaded == mapped, "{family}");
    }
}

/// One line each, and nothing is left behind.
#[test]
fn what_cannot_be_written_is_refused() {
    let dir: Temp = folder();
    let at = |name: &str| dir.as_ref().join(name);
    std::fs::write(at("there.gguf"), "mine").unwrap();
    let refused = |model: &Model, path: PathBuf, tokenizer: &str| {
        let options = options(GgufType::F16);
        let error = model
            .save_gguf(path, tokens(tokenizer), &options)
            .unwrap_err();
        error.to_string()
    };
    let plain = model("llama", &json!({}));
    assert!(refused(&plain, at("there.gguf"), "byte_level").contains("exists already"));
    assert_eq!(std::fs::read(at("there.gguf")).unwrap(), b"mine");
    assert!(refused(&plain, dir.as_ref().to_path_buf(), "byte_level").contains("is a folder"));
    assert!(refused(&plain, at("no/such/x.gguf"), "byte_level").contains("create its folder"));
    let small = model("llama", &json!({"vocab_size": 20}));
    assert!(refused(&small, at("x.gguf"), "byte_level").contains("20 rows"));
    let sparse = json!({
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
        "mlp_only_layers": [0],
    });
    assert!(
        refused(&model("qwen3_moe", &sparse), at("x.gguf"), "byte_level")
            .contains("mlp_only_layers")
    );
    let huge = model("llama", &json!({}));
    let params = huge.layers.named_params();
    let (_, param) = params
        .iter()
        .find(|(name, _)| name.contains("up_proj"))
        .unwrap();
    let home = param.data();
    home.write(0..home.len()).unwrap().as_mut_slice::<f32>()[17] = 1e6;
    let line = refused(&huge, at("x.gguf"), "byte_level");
    assert!(
        line.contains("ffn_up") && line.contains("choose bf16"),
        "{line}"
    );
    let left: Vec<_> = std::fs::read_dir(dir.as_ref()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// The byte-level tokenizer with another `tokenizer.json`.
fn edited(change: impl Fn(&mut Value)) -> Temp {
    let dir = folder();
    for entry in std::fs::read_dir(tokens("byte_level")).unwrap() {
        let path = entry.unwrap().path();
        let target = dir.as_ref().join(path.file_name().unwrap());
        std::fs::copy(&path, target).unwrap();
    }
    let path = dir.as_ref().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    dir
}

/// A rule that llama.cpp does not have is said so; a kind of tokenizer that it does not have, and a
/// token that has two ids, are refused.
#[test]
fn tokenizers_that_llama_cpp_does_not_have() {
    let plain = model("llama", &json!({}));
    let write = |tokenizer: &Temp| {
        let out = folder();
        let path = out.as_ref().join("x.gguf");
        let report = plain.save_gguf(&path, tokenizer, &options(GgufType::F16))?;
        let file = Gguf::parse(&std::fs::read(&path).unwrap());
        Ok::<_, roundpipe_models::Error>((file, report))
    };
    let punctuation = edited(|json| json["pre_tokenizer"]["type"] = "Punctuation".into());
    assert!(
        write(&punctuation)
            .err()
            .unwrap()
            .to_string()
            .contains("neither byte-level")
    );
    let prefixed = edited(|json| {
        json["pre_tokenizer"] = json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        });
    });
    let (file, report) = write(&prefixed).unwrap();
    assert_eq!(file.keys["tokenizer.ggml.pre"], "default");
    assert!(
        report.notes.len() == 1 && report.notes[0].contains("`default`"),
        "{report:?}"
    );
    let unigram = edited(|json| {
        json["model"] =
            json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]});
        json["pre_tokenizer"] = Value::Null;
        json["decoder"] = Value::Null;
    });
    assert!(
        write(&unigram)
            .err()
            .unwrap()
            .to_string()
            .contains("Unigram")
    );
}

/// Named templates, and the token that ends a turn where it is not the one that ends a text.
#[test]
fn templates_and_ends_of_turns_are_carried() {
    let tokenizer = edited(|_| ());
    let at = |name: &str| tokenizer.as_ref().join(name);
    let specials = roundpipe_models::tokenizer::Tokenizer::open(tokenizer.as_ref()).unwrap();
    let json: Value =
        serde_json::from_slice(&std::fs::read(at("tokenizer.json")).unwrap()).unwrap();
    let eos = specials.eos()[0];
    let added = json["added_tokens"].as_array().unwrap();
    let turn = added
        .iter()
        .find(|token| token["id"] != eos && token["special"] == true);
    let turn = turn.unwrap();
    let generation = json!({"eos_token_id": [eos, turn["id"]]});
    std::fs::write(at("generation_config.json"), generation.to_string()).unwrap();
    let template = format!("{{{{ messages }}}}{}", turn["content"].as_str().unwrap());
    std::fs::write(at("chat_template.jinja"), &template).unwrap();
    std::fs::create_dir(at("additional_chat_templates")).unwrap();
    std::fs::write(at("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    let path = at("x.gguf");
    let model = model("llama", &json!({}));
    model
        .save_gguf(&path, tokenizer.as_ref(), &options(GgufType::F16))
        .unwrap();
    let file = Gguf::parse(&std::fs::read(&path).unwrap());
    assert_eq!(file.keys["tokenizer.ggml.eos_token_id"], eos);
    assert_eq!(file.keys["tokenizer.ggml.eot_token_id"], turn["id"]);
    assert_eq!(file.keys["tokenizer.chat_template"], template);
    assert_eq!(file.keys["tokenizer.chat_templates"], json!(["tool_use"]));
    assert_eq!(file.keys["tokenizer.chat_template.tool_use"], "tools");
}
