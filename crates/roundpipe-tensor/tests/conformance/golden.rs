//! Answers of PyTorch from `fixtures/blocks`, and the comparison with them; names as in
//! `fixtures/README.md`.

use std::collections::HashMap;
use std::path::PathBuf;

use roundpipe_tensor::{Cx, DType, Result, Tensor};
use safetensors::{Dtype, SafeTensors};

use crate::bed::{close, upload, worker};

/// One file.
pub struct Golden {
    name: String,
    bytes: Vec<u8>,
}

/// Reads `fixtures/blocks/<name>.safetensors`.
pub fn open(name: &str) -> Golden {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../fixtures/blocks"]
        .iter()
        .collect();
    let path = path.join(format!("{name}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Golden {
        name: name.to_owned(),
        bytes,
    }
}

impl Golden {
    /// One case of the file; the empty prefix for files of one case.
    pub fn case(&self, prefix: &str) -> Case {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let start = if prefix.is_empty() {
            String::new()
        } else {
            format!("{prefix}/")
        };
        let tensors: HashMap<_, _> = file
            .tensors()
            .into_iter()
            .filter_map(|(name, t)| Some((name.strip_prefix(&start)?.to_owned(), t)))
            .map(|(name, t)| {
                let (dtype, values) = numbers(t.dtype(), t.data());
                (name, (dtype, values, t.shape().to_vec()))
            })
            .collect();
        assert!(!tensors.is_empty(), "{} has no case {prefix}", self.name);
        Case {
            name: format!("{} {prefix}", self.name),
            tensors,
        }
    }
}

/// One case of a file.
pub struct Case {
    name: String,
    tensors: HashMap<String, (DType, Vec<f64>, Vec<usize>)>,
}

/// The tensors a case gives to an operation, by name.
pub struct Inputs(HashMap<String, Tensor>);

impl Inputs {
    /// The tensor `name`, e.g. `in.x`.
    pub fn of(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The tensor `name` if the case has it.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }
}

impl Case {
    /// Values and sizes of a tensor of any type.
    pub fn f64(&self, name: &str) -> (Vec<f64>, Vec<usize>) {
        let (_, values, dims) = self
            .tensors
            .get(name)
            .unwrap_or_else(|| panic!("{} has no {name}", self.name));
        (values.clone(), dims.clone())
    }

    /// Whether the case has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The case with its answers replaced by those computed in f64, where the file has both.
    pub fn with_exact_answers(mut self) -> Self {
        let exact: Vec<_> = self
            .tensors
            .iter()
            .filter_map(|(name, t)| Some((name.strip_prefix("exact.")?.to_owned(), t.clone())))
            .collect();
        self.tensors.extend(exact);
        self
    }

    /// Runs `f` in f64 and f32 and compares its output and all gradients with the case's `out` and
    /// `g.*`.
    pub fn check(&self, f: impl Fn(&mut Cx, &Inputs) -> Result<Tensor>) {
        // The answers are f32, so f64 cannot agree better than their rounding.
        for (dtype, limit) in [(DType::F64, 1e-7), (DType::F32, 4e-6)] {
            self.check_in(dtype, limit, &f);
        }
    }

    /// [`Case::check`] in one type, with a norm-wise limit.
    pub fn check_in(
        &self,
        dtype: DType,
        limit: f64,
        f: &impl Fn(&mut Cx, &Inputs) -> Result<Tensor>,
    ) {
        let name = format!("{} {dtype}", self.name);
        let mut cx = Cx::train(&worker(2));
        let inputs = self.inputs(&mut cx, dtype);
        let y = f(&mut cx, &inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (out, dims) = self.f64("out");
        assert_eq!(y.dims(), dims, "{name}: shape");
        close(&name, &[y.to_f64_vec().unwrap()], &[out], limit);
        let wanted: Vec<&String> = self
            .tensors
            .keys()
            .filter(|n| n.starts_with("g."))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let dout = upload(&mut cx, &self.f64("dout").0, &dims, y.dtype()).unwrap();
        let grads = cx
            .backward_from(&[(y, dout)])
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        for grad in wanted {
            let leaf = inputs.of(&grad[2..]);
            let have = grads
                .of(leaf)
                .unwrap_or_else(|| panic!("{name}: no {grad}"));
            let (have, want) = (have.to_f64_vec().unwrap(), self.f64(grad).0);
            if want.iter().all(|w| w.abs() < 1e-9) {
                // A gradient that cancels exactly has no scale of its own; that of the upstream one
                // is about 1.
                assert!(
                    have.iter().all(|h| h.abs() < limit),
                    "{name} {grad}: {have:?} should vanish"
                );
                continue;
            }
            close(&format!("{name} {grad}"), &[have], &[want], limit);
        }
    }

    /// Everything an operation reads; what has a gradient in the file becomes an input.
    pub fn inputs(&self, cx: &mut Cx, dtype: DType) -> Inputs {
        let given = |name: &&String| {
            ["in.", "p.", "buf."]
                .iter()
                .any(|kind| name.starts_with(kind))
        };
        let load = |name: &String| {
            let (own, values, dims) = &self.tensors[name];
            let to = if own.is_float() { dtype } else { *own };
            let tensor = upload(cx, values, dims, to).unwrap();
            let leaf = self.has(&format!("g.{name}"));
            (
                name.clone(),
                if leaf {
                    cx.input(&tensor).unwrap()
                } else {
                    tensor
                },
            )
        };
        Inputs(self.tensors.keys().filter(given).map(load).collect())
    }
}

/// The values of a stored tensor.
fn numbers(dtype: Dtype, data: &[u8]) -> (DType, Vec<f64>) {
    fn read<const N: usize>(data: &[u8], to: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.chunks_exact(N)
            .map(|c| to(c.try_into().unwrap()))
            .collect()
    }
    match dtype {
        Dtype::F32 => (DType::F32, read(data, |b| f64::from(f32::from_le_bytes(b)))),
        Dtype::F64 => (DType::F64, read(data, f64::from_le_bytes)),
        Dtype::BF16 => (
            DType::BF16,
            read(data, |b| roundpipe_tensor::bf16::from_le_bytes(b).to_f64()),
        ),
        Dtype::I64 => (DType::I64, read(data, |b| i64::from_le_bytes(b) as f64)),
        Dtype::BOOL => (DType::Bool, read(data, |[b]: [u8; 1]| f64::from(b))),
        other => panic!("golden files hold no {other:?}"),
    }
}
