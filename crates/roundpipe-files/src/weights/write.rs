//! Safetensors files, written: a header that is planned beforehand, then the bytes in its order.
//!
//! Refused: two tensors of one name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use roundpipe_tensor::{DType, Param};
use safetensors::Dtype;

use crate::atomic::AtomicFile;
use crate::error::{Error, Result};
use crate::text::shown;

/// Writes named tensors into one file, under a temporary name until it is complete.
///
/// # Errors
/// [`Error::Argument`] for a name that occurs twice; [`Error::File`] when the file cannot be
/// written, and then whatever stood at `path` still does.
pub fn write_tensors(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    tensors: &[(String, Param)],
) -> Result<()> {
    let path = path.as_ref();
    let mut tensors: Vec<&(String, Param)> = tensors.iter().collect();
    // Wide types first: every tensor then starts at a multiple of its own element.
    tensors.sort_by_key(|(_, param)| std::cmp::Reverse(param.dtype().size()));
    let plan: Vec<PlannedTensor> = tensors
        .iter()
        .map(|(name, param)| PlannedTensor {
            name: name.clone(),
            dtype: param.dtype(),
            dims: param.shape().dims().to_vec(),
        })
        .collect();
    let header = header_bytes(metadata, &plan)?;
    let partial = AtomicFile::create(path)?;
    let write = |file: &mut File| -> Result<()> {
        partial.check(file.write_all(&header))?;
        for (_, param) in &tensors {
            partial.check(file.write_all(param.data().read_all()?.bytes()))?;
        }
        Ok(())
    };
    write(&mut partial.file()?)?;
    partial.finish()
}

/// A tensor about to be written.
#[derive(Debug, Clone)]
pub struct PlannedTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: Vec<usize>,
}

impl PlannedTensor {
    fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }
}

/// The start of a file, up to the first tensor's bytes, which is a multiple of 8.
///
/// # Errors
/// [`Error::Argument`] for a name that occurs twice.
pub fn header_bytes(
    metadata: &BTreeMap<String, String>,
    plan: &[PlannedTensor],
) -> Result<Vec<u8>> {
    let mut map = serde_json::Map::new();
    if !metadata.is_empty() {
        map.insert("__metadata__".into(), serde_json::json!(metadata));
    }
    let mut at = 0;
    for tensor in plan {
        let end = at + tensor.bytes();
        let info = serde_json::json!({
            "dtype": file_dtype(tensor.dtype).to_string(), "shape": tensor.dims, "data_offsets": [at, end],
        });
        if tensor.name == "__metadata__" || map.insert(tensor.name.clone(), info).is_some() {
            let why = "the name is taken in the file; give every tensor its own";
            return Err(Error::argument(
                format!("tensor {}", shown(&tensor.name)),
                why,
            ));
        }
        at = end;
    }
    let mut json = serde_json::Value::Object(map).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    Ok(out)
}

/// The type under which a parameter is written.
fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::Bool => Dtype::BOOL,
        // The only type left; a new one must be given its name here.
        _ => Dtype::U8,
    }
}
