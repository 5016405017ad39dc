//! Reads the golden files that `fixtures/make_blocks.py` wrote.

use std::path::Path;
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors};

/// A file of answers, or one case of it.
#[derive(Clone)]
pub struct Golden {
    bytes: Arc<Vec<u8>>,
    prefix: String,
}

/// Opens `fixtures/blocks/<file>.safetensors`.
pub fn open(file: &str) -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/blocks");
    let path = folder.join(format!("{file}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Golden { bytes: Arc::new(bytes), prefix: String::new() }
}

impl Golden {
    /// The tensors under `prefix/`.
    pub fn case(&self, prefix: &str) -> Self {
        Self { bytes: self.bytes.clone(), prefix: format!("{}{prefix}/", self.prefix) }
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.file().tensor(&format!("{}{name}", self.prefix)).is_ok()
    }

    /// Values, integers too, and sizes.
    pub fn f64(&self, name: &str) -> (Vec<f64>, Vec<usize>) {
        let name = format!("{}{name}", self.prefix);
        let file = self.file();
        let tensor = file.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let data = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F32 => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Dtype::I64 => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            other => panic!("{name}: no reader for {other:?}"),
        };
        (values, tensor.shape().to_vec())
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a golden file is well formed")
    }
}
