//! Golden files of whole models, and what tests do with them.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe::{Bytes, Cpu, DType, Device, Element, HostTensor, Params, Worker, bf16};
use roundpipe_models::{Entry, Model, ModelConfig, PieceLayout};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

/// All files, one per model.
pub const ALL: [&str; 9] = [
    "llama3",
    "llama2_tied",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_plain",
    "gpt_oss",
];

pub struct Golden {
    pub name: &'static str,
    bytes: Vec<u8>,
}

impl Golden {
    /// The file of a model.
    pub fn open(name: &'static str) -> Self {
        Self::read("models", name)
    }

    /// A file that stands beside the folder of models.
    pub fn beside(name: &'static str) -> Self {
        Self::read("", name)
    }

    fn read(folder: &str, name: &'static str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        let path = path.join(folder).join(format!("{name}.safetensors"));
        Self {
            name,
            bytes: std::fs::read(path).unwrap(),
        }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    pub fn names(&self, prefix: &str) -> BTreeSet<String> {
        let tensors = self.tensors();
        tensors
            .names()
            .into_iter()
            .filter_map(|n| n.strip_prefix(prefix))
            .map(str::to_owned)
            .collect()
    }

    pub fn meta(&self, key: &str) -> Option<Value> {
        let (_, header) = SafeTensors::read_metadata(&self.bytes).unwrap();
        Some(serde_json::from_str(header.metadata().as_ref()?.get(key)?).unwrap())
    }

    pub fn config(&self) -> ModelConfig {
        ModelConfig::from_json(&self.meta("config").unwrap(), self.name).unwrap()
    }

    pub fn dims(&self, name: &str) -> Vec<usize> {
        self.tensors().tensor(name).unwrap().shape().to_vec()
    }

    pub fn floats(&self, name: &str) -> Vec<f64> {
        let tensors = self.tensors();
        let view = tensors
            .tensor(name)
            .unwrap_or_else(|_| panic!("{}: no {name}", self.name));
        let data = view.data();
        match view.dtype() {
            Dtype::F32 => data
                .chunks(4)
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            Dtype::F64 => data
                .chunks(8)
                .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
                .collect(),
            Dtype::I64 => data
                .chunks(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
                .collect(),
            Dtype::I32 => data
                .chunks(4)
                .map(|b| f64::from(i32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    pub fn float(&self, name: &str) -> f64 {
        self.floats(name)[0]
    }

    pub fn ids(&self, name: &str) -> HostTensor {
        let values: Vec<i64> = self.floats(name).into_iter().map(|x| x as i64).collect();
        HostTensor::from_slice(&values, &self.dims(name)).unwrap()
    }

    /// The values of a parameter, put together from the tensors of a folder under `prefix`.
    pub fn gather(&self, entry: &Entry, prefix: &str) -> Vec<f64> {
        let mut all = vec![f64::NAN; entry.param.shape().numel()];
        for piece in &entry.pieces {
            let name = format!("{prefix}{}", piece.tensor);
            assert_eq!(self.dims(&name), piece.dims, "{}: {name}", self.name);
            let values = self.floats(&name);
            let into = &mut all[piece.at..piece.at + piece.numel()];
            match piece.layout {
                PieceLayout::Plain => into.copy_from_slice(&values),
                _ => {
                    let [.., rows, columns] = *piece.dims else {
                        panic!("{name}")
                    };
                    for (i, value) in values.into_iter().enumerate() {
                        let (matrix, row, column) =
                            (i / (rows * columns), i / columns % rows, i % columns);
                        into[matrix * rows * columns + column * rows + row] = value;
                    }
                }
            }
        }
        assert!(
            all.iter().all(|x| !x.is_nan()),
            "{}: {} is not covered",
            self.name,
            entry.name
        );
        all
    }

    /// The model with the file's weights; every tensor of the file is used once.
    pub fn model(&self, dtype: DType) -> Model {
        let model = Model::empty(self.config(), dtype).unwrap();
        let mut used = BTreeSet::new();
        for entry in model.entries() {
            let values = self.gather(&entry, "w.");
            match dtype {
                DType::F32 => write::<f32>(&entry, &values),
                _ => write::<bf16>(&entry, &values),
            }
            for piece in &entry.pieces {
                assert!(used.insert(piece.tensor.clone()), "{} twice", piece.tensor);
            }
        }
        assert_eq!(used, self.names("w."), "{}", self.name);
        model
    }
}

fn write<T: Element>(entry: &Entry, values: &[f64]) {
    let mut data = entry.param.data().write(0..entry.param.bytes()).unwrap();
    for (to, from) in data.as_mut_slice::<T>().iter_mut().zip(values) {
        *to = T::from_f64(*from);
    }
}

pub fn worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::gib(1)).unwrap()
}

/// Two cpu workers for an engine.
pub fn cpus() -> Vec<Arc<dyn Device>> {
    Cpu::workers(2, Some(1))
        .unwrap()
        .into_iter()
        .map(|cpu| cpu as Arc<dyn Device>)
        .collect()
}

pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

pub fn rms_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum: f64 = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum();
    (sum / a.len() as f64).sqrt()
}

/// Within 1e-4 of the largest.
pub fn assert_close(what: &str, have: &[f64], want: &[f64]) {
    assert_eq!(have.len(), want.len(), "{what}");
    let scale = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    let worst = have
        .iter()
        .zip(want)
        .fold(0f64, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst <= 1e-4 * scale, "{what}: off by {worst} of {scale}");
}

/// Cosine above 0.9999, norm within 0.1%.
pub fn assert_same_direction(what: &str, have: &[f64], want: &[f64]) {
    assert_eq!(have.len(), want.len(), "{what}");
    let (a, b) = (norm(have), norm(want));
    let dot: f64 = have.iter().zip(want).map(|(x, y)| x * y).sum();
    // Gradients that are 0 but for rounding have no direction.
    if b < 1e-9 && a < 1e-7 {
        return;
    }
    assert!(dot / (a * b) > 0.9999, "{what}: cosine {}", dot / (a * b));
    assert!((a / b - 1.0).abs() < 1e-3, "{what}: norm {a}, not {b}");
}

/// The name of a parameter under an engine or in `named_params`, by entry.
pub fn param_name(model: &Model, entry: &Entry) -> String {
    let found = model
        .named_params()
        .into_iter()
        .find(|(_, p)| p.id() == entry.param.id());
    found
        .unwrap_or_else(|| panic!("{} is no parameter", entry.name))
        .0
}

/// A folder of its own, gone at the end.
pub struct Temp(PathBuf);

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl AsRef<Path> for Temp {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

pub fn folder() -> Temp {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!(
        "roundpipe-models-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&path).unwrap();
    Temp(path)
}
