//! Which tensors a GGUF file has: names, types, and where their rows come from.
//!
//! Tensors are written in the order of the model: embedding, blocks, last norm, head. Their names are
//! llama.cpp's. A tensor is rows of a parameter, in an order of its own ([`Rows`]): llama.cpp's
//! `llama` rotates neighbouring elements of a head where transformers rotates its halves, and experts
//! have gates and ups apart.
//!
//! Norms, biases, sinks and routers are f32. Rows that are no whole blocks are f16 in a file of
//! blocks. In a q4_0 file the head, or the embedding that is one, is q8_0; llama.cpp's own tool takes
//! q6_K there where it can, which is a quarter smaller.

use std::sync::OnceLock;

use rayon::prelude::*;
use roundpipe::{DType, Element, HostRef, Param, bf16, f16};
use roundpipe_files::text::shown;

use super::GgufType;
use super::blocks::{BLOCK, Kind};
use super::format::{Body, Info};
use super::keys::Architecture;
use crate::config::{ModelConfig, RopeScaling};
use crate::decoder::Model;
use crate::entry::Entry;
use crate::error::{Error, Result};
use crate::rope;

/// Bytes that are put together before they are written.
const BUFFER: usize = 8 << 20;

/// Which row of the parameter is row `r` of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// The same.
    InOrder,
    /// Halves of a head become pairs of neighbours.
    Rotary { head_dim: usize },
    /// The first or second half of each expert's rows.
    Half { size: usize, second: bool },
    /// Every other row.
    Alternate { second: bool },
}

impl Rows {
    fn source(self, r: usize) -> usize {
        match self {
            Self::InOrder => r,
            Self::Rotary { head_dim } => {
                let (head, inside) = (r / head_dim, r % head_dim);
                head * head_dim + inside % 2 * (head_dim / 2) + inside / 2
            }
            Self::Half { size, second } => {
                let (expert, inside) = (r / size, r % size);
                (2 * expert + usize::from(second)) * size + inside
            }
            Self::Alternate { second } => 2 * r + usize::from(second),
        }
    }
}

/// One tensor to write.
#[derive(Debug)]
pub(super) struct Planned {
    name: String,
    dims: Vec<usize>,
    kind: Kind,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Rows of `width` elements.
    Param {
        param: Param,
        rows: Rows,
        width: usize,
    },
    Values(Vec<f32>),
}

/// All tensors of a model.
pub(super) fn plan(
    model: &Model,
    architecture: Architecture,
    dtype: GgufType,
) -> Result<Vec<Planned>> {
    let config = &model.config;
    let mut plan = Plan {
        architecture,
        config,
        dtype,
        all: Vec::new(),
    };
    for entry in &model.entries() {
        plan.add(entry)?;
    }
    if let RopeScaling::Llama3 { .. } = config.rope.scaling {
        let values = rope::divisors(&config.rope, config.head_dim);
        plan.all.push(Planned {
            name: "rope_freqs.weight".into(),
            dims: vec![values.len()],
            kind: Kind::F32,
            source: Source::Values(values),
        });
    }
    Ok(plan.all)
}

struct Plan<'a> {
    architecture: Architecture,
    config: &'a ModelConfig,
    dtype: GgufType,
    all: Vec<Planned>,
}

impl Plan<'_> {
    fn add(&mut self, entry: &Entry) -> Result<()> {
        let param = &entry.param;
        if !matches!(
            param.dtype(),
            DType::F32 | DType::BF16 | DType::F16 | DType::F64
        ) {
            let why = format!("{} weights cannot be exported; load floats", param.dtype());
            return Err(Error::argument(shown(&entry.name), why));
        }
        let name = match entry.name.as_str() {
            "model.embed_tokens.weight" => "token_embd.weight",
            "model.norm.weight" => "output_norm.weight",
            "lm_head.weight" => "output.weight",
            name => return self.add_of_block(name, param),
        };
        self.push(name.into(), param, Rows::InOrder);
        Ok(())
    }

    /// A parameter of a block: `model.layers.7.self_attn.q_proj.weight`.
    fn add_of_block(&mut self, name: &str, param: &Param) -> Result<()> {
        let unknown = || {
            let why = "llama.cpp has no name for it; export to hf instead";
            Error::argument(format!("tensor {}", shown(name)), why)
        };
        let rest = name.strip_prefix("model.layers.").ok_or_else(unknown)?;
        let (block, rest) = rest.split_once('.').ok_or_else(unknown)?;
        if let Some(rest) = rest.strip_prefix("mlp.experts.gate_up_proj") {
            // A bias has a row of one element for each row of the weight.
            let ending = if rest.is_empty() { "weight" } else { "bias" };
            for (half, second) in [("gate", false), ("up", true)] {
                let name = format!("blk.{block}.ffn_{half}_exps.{ending}");
                self.push(name, param, self.expert_rows(second));
            }
            return Ok(());
        }
        let (stem, ending) = match rest {
            "self_attn.sinks" => (rest, "weight"),
            "mlp.experts.down_proj" => (rest, "weight"),
            "mlp.experts.down_proj_bias" => ("mlp.experts.down_proj", "bias"),
            _ => rest.rsplit_once('.').ok_or_else(unknown)?,
        };
        let stem = self.stem(stem).ok_or_else(unknown)?;
        let rotates = self.architecture == Architecture::Llama;
        let rows = match stem {
            "attn_q" | "attn_k" if rotates => Rows::Rotary {
                head_dim: self.config.head_dim,
            },
            _ => Rows::InOrder,
        };
        self.push(format!("blk.{block}.{stem}.{ending}"), param, rows);
        Ok(())
    }

    /// llama.cpp's name of a part of a block.
    fn stem(&self, stem: &str) -> Option<&'static str> {
        let is_oss = self.architecture == Architecture::GptOss;
        Some(match stem {
            "input_layernorm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "self_attn.sinks" => "attn_sinks",
            "post_attention_layernorm" if is_oss => "post_attention_norm",
            "post_attention_layernorm" => "ffn_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.gate" | "mlp.router" => "ffn_gate_inp",
            "mlp.experts.down_proj" => "ffn_down_exps",
            _ => return None,
        })
    }

    fn expert_rows(&self, second: bool) -> Rows {
        let size = self.config.moe.as_ref().map_or(0, |moe| moe.intermediate);
        match self.architecture {
            Architecture::GptOss => Rows::Alternate { second },
            _ => Rows::Half { size, second },
        }
    }

    fn push(&mut self, name: String, param: &Param, rows: Rows) {
        let mut dims = param.shape().dims().to_vec();
        let is_bias = name.ends_with(".bias");
        if matches!(rows, Rows::Half { .. } | Rows::Alternate { .. }) {
            let outputs = if is_bias {
                dims.len() - 1
            } else {
                dims.len() - 2
            };
            dims[outputs] /= 2;
        }
        let width = if is_bias || dims.len() < 2 {
            1
        } else {
            dims[dims.len() - 1]
        };
        let source = Source::Param {
            param: param.clone(),
            rows,
            width,
        };
        self.all.push(Planned {
            kind: self.kind(&name, &dims),
            name,
            dims,
            source,
        });
    }

    fn kind(&self, name: &str, dims: &[usize]) -> Kind {
        let stays_wide =
            dims.len() < 2 || !name.ends_with(".weight") || name.ends_with("ffn_gate_inp.weight");
        if stays_wide {
            return Kind::F32;
        }
        let is_head = name == "output.weight" || (self.config.tied && name == "token_embd.weight");
        let kind = match self.dtype {
            GgufType::F32 => Kind::F32,
            GgufType::F16 => Kind::F16,
            GgufType::Bf16 => Kind::Bf16,
            GgufType::Q8_0 => Kind::Q8_0,
            GgufType::Q4_0 if is_head => Kind::Q8_0,
            GgufType::Q4_0 => Kind::Q4_0,
        };
        if kind.is_blocks() && !dims[dims.len() - 1].is_multiple_of(BLOCK) {
            return Kind::F16;
        }
        kind
    }
}

impl Planned {
    pub fn info(&self) -> Info {
        Info {
            name: self.name.clone(),
            dims: self.dims.clone(),
            ggml_type: self.kind.number(),
            bytes: self.kind.bytes(self.dims.iter().product()) as u64,
        }
    }

    pub fn write(&self, out: &mut Body<'_>) -> Result<()> {
        out.begin_tensor()?;
        match &self.source {
            Source::Values(values) => {
                let mut bytes = vec![0; self.kind.bytes(values.len())];
                self.named(self.kind.write(values, &mut bytes))?;
                out.write(&bytes)
            }
            Source::Param { param, rows, width } => {
                let home = param.data();
                let held = home.read_all()?;
                match param.dtype() {
                    DType::F64 => self.write_rows::<f64>(&held, *rows, *width, out)?,
                    DType::F32 => self.write_rows::<f32>(&held, *rows, *width, out)?,
                    DType::F16 => self.write_rows::<f16>(&held, *rows, *width, out)?,
                    _ => self.write_rows::<bf16>(&held, *rows, *width, out)?,
                }
                drop(held);
                // The pages of a mapped file are not needed again.
                Ok(home.let_go(0..home.len())?)
            }
        }
    }

    fn write_rows<T: Element>(
        &self,
        held: &HostRef,
        rows: Rows,
        width: usize,
        out: &mut Body<'_>,
    ) -> Result<()> {
        let source = held.as_slice::<T>();
        let count = self.dims.iter().product::<usize>() / width.max(1);
        let row_bytes = self.kind.bytes(width);
        let each = (BUFFER / row_bytes.max(1)).max(1);
        let mut buffer = vec![0; each.min(count) * row_bytes];
        let failed = OnceLock::new();
        for first in (0..count).step_by(each) {
            let chunk = &mut buffer[..each.min(count - first) * row_bytes];
            chunk
                .par_chunks_mut(row_bytes)
                .with_min_len(BUFFER / row_bytes / 256 + 1)
                .enumerate()
                .for_each_init(
                    || vec![0f32; width],
                    |wide, (r, out)| {
                        let at = rows.source(first + r) * width;
                        for (wide, value) in wide.iter_mut().zip(&source[at..at + width]) {
                            *wide = value.to_f64() as f32;
                        }
                        if let Err(why) = self.kind.write(wide, out) {
                            let _ = failed.set(why);
                        }
                    },
                );
            self.named(failed.get().map_or(Ok(()), |why| Err(*why)))?;
            out.write(chunk)?;
        }
        Ok(())
    }

    fn named(&self, result: Result<(), &'static str>) -> Result<()> {
        result.map_err(|why| Error::argument(format!("tensor {}", self.name), why))
    }
}

#[cfg(test)]
mod tests {
    use super::Rows;

    /// Row 2i + j of a head is row j · (half) + i: what transformers' conversion to its own layout
    /// did, undone.
    #[test]
    fn halves_of_a_head_become_pairs() {
        let rows = Rows::Rotary { head_dim: 8 };
        let got: Vec<usize> = (0..16).map(|r| rows.source(r)).collect();
        let one = [0, 4, 1, 5, 2, 6, 3, 7];
        let two = one.map(|r| r + 8);
        assert_eq!(got, [one, two].concat());
    }

    /// Gates and ups of two experts of three rows each, one after another or in turn.
    #[test]
    fn experts_are_taken_apart() {
        let rows = |rows: Rows| (0..6).map(|r| rows.source(r)).collect::<Vec<_>>();
        let half = |second| rows(Rows::Half { size: 3, second });
        assert_eq!(half(false), [0, 1, 2, 6, 7, 8]);
        assert_eq!(half(true), [3, 4, 5, 9, 10, 11]);
        let alternate = |second| rows(Rows::Alternate { second });
        assert_eq!(alternate(false), [0, 2, 4, 6, 8, 10]);
        assert_eq!(alternate(true), [1, 3, 5, 7, 9, 11]);
    }
}
