//! Folders of made files, encoders, and what streams give.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use roundpipe_data::{
    EncodeOptions, Encoder, Example, Input, Rows, Source, SourceOptions, Stream, StreamOptions,
    TrainBatch,
};
use roundpipe_models::chat::ChatTemplate;
use roundpipe_models::tokenizer::Tokenizer;

/// A folder that goes away.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("roundpipe-data-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat")
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::open(&fixtures().join("tokenizers/byte_level")).unwrap()
}

pub const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                          {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub fn encoder(template: &str) -> Arc<Encoder> {
    let tokenizer = tokenizer();
    let template = ChatTemplate::parse(template, tokenizer.special_tokens()).unwrap();
    let encoder = Encoder::new(tokenizer, EncodeOptions::default()).unwrap();
    Arc::new(encoder.template(template))
}

pub fn open(path: impl Into<PathBuf>) -> Source {
    Source::open(&[Input::from(path.into())], &SourceOptions::default()).unwrap()
}

/// All rows in the order of the files.
pub fn examples(rows: &Rows) -> Vec<Example> {
    let order = rows.order(0, None);
    (0..rows.len())
        .map(|row| order.example(row).unwrap())
        .collect()
}

pub fn stream(rows: Rows, options: StreamOptions) -> Stream {
    Stream::new(rows, encoder(CHATML), options).unwrap()
}

/// All that a batch says, comparable.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    pub dims: Vec<usize>,
    pub ids: Vec<i64>,
    pub labels: Vec<i64>,
    pub positions: Vec<i64>,
    pub lens: Vec<Vec<i32>>,
    pub counts: [u64; 4],
}

pub fn seen(batch: &TrainBatch) -> Seen {
    Seen {
        dims: batch.ids.dims().to_vec(),
        ids: batch.ids.to_vec().unwrap(),
        labels: batch.labels.to_vec().unwrap(),
        positions: batch.positions.to_vec().unwrap(),
        lens: batch.lens.clone(),
        counts: [
            batch.tokens,
            batch.tokens_trained,
            batch.rows as u64,
            batch.documents as u64,
        ],
    }
}

/// A word of a seeded sequence.
pub fn word(seed: u64, at: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xd134_2543_de82_ef95);
    for _ in 0..3 {
        x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    x ^ (x >> 32)
}

/// Lines of texts of many lengths; each begins with its number.
pub fn texts(count: u64) -> String {
    let line = |number: u64| {
        let words = "the ships pass ".repeat((word(1, number) % 12) as usize);
        format!("{{\"text\": \"{number}: {words}\"}}\n")
    };
    (0..count).map(line).collect()
}
