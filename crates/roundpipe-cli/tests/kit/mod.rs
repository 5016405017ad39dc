//! Folders, models and data for tests of the built program.
#![allow(
    dead_code,
    reason = "each test program compiles the kit and uses a part of it"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use roundpipe::DType;
use roundpipe_models::{Model, SaveOptions, preset};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Runs the program to its end.
pub fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The records of a run, as far as they are whole.
pub fn metrics(run: &Path) -> Vec<Value> {
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let records = lines.lines().map(serde_json::from_str);
    records.filter_map(Result::ok).collect()
}

/// The losses of a run's steps.
pub fn losses(run: &Path) -> Vec<f64> {
    let records = metrics(run).into_iter();
    records
        .filter(|record| record["type"] == "step")
        .filter_map(|record| record["loss"].as_f64())
        .collect()
}

/// Every file of a folder and what is in it.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        found.insert(name, std::fs::read(&path).unwrap());
    }
    found
}

/// The last step that a run's metrics tell of; 0 before the first.
pub fn last_step(run: &Path, kind: &str) -> u64 {
    let records = metrics(run).into_iter();
    let steps = records.filter(|record| record["type"] == kind);
    steps
        .filter_map(|record| record["step"].as_u64())
        .max()
        .unwrap_or(0)
}

/// Sends a signal to a program that this test started.
pub fn send(signal: &str, child: &Child) {
    send_to(signal, child.id());
}

/// The same by its id, which nobody else has before it is waited for.
pub fn send_to(signal: &str, id: u32) {
    // It may have ended by now.
    let _ = Command::new("kill")
        .args([signal, &id.to_string()])
        .stderr(Stdio::null())
        .status();
}

/// A folder for one test, which goes away.
pub struct Run(PathBuf);

impl Run {
    pub fn new(name: &str) -> Self {
        let folder = format!("roundpipe-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.path(name)
    }

    /// Conversations, each with a number of its own.
    pub fn chats(&self, count: usize) -> String {
        let row = |number: usize| {
            let answer = "It passes by the pier. ".repeat(1 + number % 5);
            let messages = json!([
                {"role": "user", "content": format!("Where is ship {number}?")},
                {"role": "assistant", "content": answer},
            ]);
            format!("{}\n", json!({ "messages": messages }))
        };
        let rows: String = (0..count).map(row).collect();
        self.write("chats.jsonl", rows)
    }

    /// A small model with a tokenizer and a chat template.
    pub fn model(&self) -> String {
        let folder = self.0.join("model");
        let tokens = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fixtures/chat/tokenizers/byte_level"
        );
        let vocab = roundpipe_models::tokenizer::Tokenizer::open(tokens.as_ref())
            .unwrap()
            .vocab_size();
        let changes = json!({
            "vocab_size": vocab, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
        });
        let config = preset("tiny").unwrap().with(&changes).unwrap();
        let model = Model::random(config, DType::F32, 3).unwrap();
        let options = SaveOptions {
            copy_from: Some(tokens.into()),
            ..SaveOptions::default()
        };
        model.save(&folder, options).unwrap();
        std::fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
        folder.display().to_string()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts the program and asks it to stop once its metrics have a step.
pub fn stopped_at(arguments: &[&str], run: &Path, step: u64) -> Output {
    let child = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let start = Instant::now();
    let is_there = |record: &Value| record["type"] == "step" && record["step"] == step;
    while !metrics(run).iter().any(is_there) {
        assert!(start.elapsed() < Duration::from_secs(300), "no step {step}");
        std::thread::sleep(Duration::from_millis(2));
    }
    send("-TERM", &child);
    child.wait_with_output().expect("the program ends")
}
