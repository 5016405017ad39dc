//! One block: attention and a gated unit or experts, each behind a norm and added to the stream.

use roundpipe::kernel::RopeStyle;
use roundpipe::nn::RmsNorm;
use roundpipe::ops::Attention;
use roundpipe::{
    Cx, DType, Layer, Module, Param, ParamVisitor, Params, Quantization, Tensor, TensorResult, Tree,
};

use super::{
    Contents, Experts, Flow, Form, Maker, Projection, QuantizedWeight, Weight, fields, optional,
    take,
};
use crate::config::{Family, ModelConfig};
use crate::rope::RopeTables;

/// Names of the experts' matrices in a block.
pub(crate) const GATE_UP: &str = "mlp.experts.gate_up_proj";
pub(crate) const DOWN: &str = "mlp.experts.down_proj";

/// Sequences from this length on keep what attention gave for the recompute, unless told otherwise.
const LONG_TOKENS: usize = 32_768;

/// What stands behind the second norm.
#[derive(Debug, Clone)]
pub(crate) enum Unit {
    /// down(silu(gate) · up).
    Dense {
        gate: Projection,
        up: Projection,
        down: Projection,
    },
    /// A choice of many such units.
    Sparse(Experts),
}

/// Attention and unit.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) attn_norm: RmsNorm,
    pub(crate) q: Projection,
    pub(crate) k: Projection,
    pub(crate) v: Projection,
    pub(crate) o: Projection,
    /// Norms of queries and keys.
    pub(crate) qk: Option<(RmsNorm, RmsNorm)>,
    /// [heads].
    pub(crate) sinks: Option<Param>,
    pub(crate) mlp_norm: RmsNorm,
    pub(crate) unit: Unit,
    pub(super) rope: RopeTables,
    window: Option<usize>,
    pub(crate) keeps_from: usize,
    /// Gradients of attention may be added in any order.
    pub(crate) any_order: bool,
    index: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Block {
    pub(crate) fn new(
        config: &ModelConfig,
        index: usize,
        make: &mut Maker,
        rope: &RopeTables,
    ) -> TensorResult<Self> {
        let c = config;
        let (queries, keys) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let (into, back) = (0.02, 0.02 / (2.0 * c.layers as f64).sqrt());
        let q = Projection::new(make, &[queries, c.hidden], c.qkv_bias, into)?;
        let k = Projection::new(make, &[keys, c.hidden], c.qkv_bias, into)?;
        let v = Projection::new(make, &[keys, c.hidden], c.qkv_bias, into)?;
        let o = Projection::new(make, &[c.hidden, queries], c.o_bias, back)?;
        let unit = match &c.moe {
            Some(moe) if moe.sparse[index] => {
                Unit::Sparse(Experts::new(c, moe, make, [into, back])?)
            }
            _ => Unit::Dense {
                gate: Projection::new(make, &[c.intermediate, c.hidden], c.mlp_bias, into)?,
                up: Projection::new(make, &[c.intermediate, c.hidden], c.mlp_bias, into)?,
                down: Projection::new(make, &[c.hidden, c.intermediate], c.mlp_bias, back)?,
            },
        };
        let sinks = if c.sinks {
            Some(make.normal(&[c.heads], into)?)
        } else {
            None
        };
        let mut norm = |width: usize| -> TensorResult<RmsNorm> {
            Ok(RmsNorm {
                weight: make.full(&[width], 1.0)?,
                eps: c.eps,
            })
        };
        let qk = if c.qk_norm {
            Some((norm(c.head_dim)?, norm(c.head_dim)?))
        } else {
            None
        };
        Ok(Self {
            attn_norm: norm(c.hidden)?,
            mlp_norm: norm(c.hidden)?,
            q,
            k,
            v,
            o,
            qk,
            sinks,
            unit,
            rope: rope.clone(),
            window: c.windows[index],
            keeps_from: LONG_TOKENS,
            any_order: false,
            index,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
        })
    }

    /// Linear maps by their names in transformers.
    pub(crate) fn projections(&self) -> Vec<(&'static str, &Projection)> {
        let mut all = vec![
            ("self_attn.q_proj", &self.q),
            ("self_attn.k_proj", &self.k),
            ("self_attn.v_proj", &self.v),
            ("self_attn.o_proj", &self.o),
        ];
        match &self.unit {
            Unit::Dense { gate, up, down } => {
                all.extend([
                    ("mlp.gate_proj", gate),
                    ("mlp.up_proj", up),
                    ("mlp.down_proj", down),
                ]);
            }
            Unit::Sparse(Experts {
                router,
                gate_up,
                down,
                router_name,
                ..
            }) => {
                all.extend([(*router_name, router), (GATE_UP, gate_up), (DOWN, down)]);
            }
        }
        all
    }

    /// As [`Block::projections`], to be changed.
    pub(crate) fn projections_mut(&mut self) -> Vec<(&'static str, &mut Projection)> {
        let mut all = vec![
            ("self_attn.q_proj", &mut self.q),
            ("self_attn.k_proj", &mut self.k),
            ("self_attn.v_proj", &mut self.v),
            ("self_attn.o_proj", &mut self.o),
        ];
        match &mut self.unit {
            Unit::Dense { gate, up, down } => {
                all.extend([
                    ("mlp.gate_proj", gate),
                    ("mlp.up_proj", up),
                    ("mlp.down_proj", down),
                ]);
            }
            Unit::Sparse(Experts {
                router,
                gate_up,
                down,
                router_name,
                ..
            }) => {
                all.extend([(*router_name, router), (GATE_UP, gate_up), (DOWN, down)]);
            }
        }
        all
    }

    /// Puts codes and scales in the place of whole weights, routers excepted, one weight after the
    /// other. A weight that the format cannot take stays whole.
    pub(crate) fn quantize(
        &mut self,
        family: Family,
        how: Quantization,
        contents: Contents,
    ) -> TensorResult<()> {
        for (name, projection) in self.projections_mut() {
            let Some(form) = own_form(family, name, projection, how) else {
                continue;
            };
            let Weight::Whole(whole) = &projection.weight else {
                continue;
            };
            let weight = QuantizedWeight::zeros(form, *whole.shape(), whole.dtype())?;
            if contents == Contents::Random {
                weight.fill(whole)?;
            }
            projection.weight = Weight::Quantized(weight);
        }
        Ok(())
    }

    /// A projection as heads [B, S, heads, D], turned by its positions.
    fn heads(
        &self,
        cx: &mut Cx,
        x: &Tensor,
        (project, count, norm): (&Projection, usize, Option<&RmsNorm>),
        positions: Option<&Tensor>,
    ) -> TensorResult<Tensor> {
        let flat = project.forward(cx, x)?;
        let split = self.split(cx, &flat, count)?;
        drop(flat);
        let (cos, sin) = (cx.get(&self.rope.cos)?, cx.get(&self.rope.sin)?);
        match norm {
            Some(norm) => {
                let weight = cx.get(&norm.weight)?;
                cx.rope_norm(
                    &split,
                    &weight,
                    &cos,
                    &sin,
                    positions,
                    RopeStyle::Half,
                    norm.eps,
                )
            }
            None => cx.rope(&split, &cos, &sin, positions, RopeStyle::Half),
        }
    }

    fn split(&self, cx: &mut Cx, flat: &Tensor, count: usize) -> TensorResult<Tensor> {
        let dims = [flat.dims()[0], flat.dims()[1], count, self.head_dim].map(|d| d as isize);
        cx.reshape(flat, &dims)
    }

    fn attend(&self, cx: &mut Cx, x: &Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        let past = self.past(flow)?;
        let positions = match (optional(flow, "positions")?, &past) {
            (None, Some(Some((k, _)))) => {
                let (from, steps) = (k.dims()[1] as f64, x.dims()[1] as f64);
                Some(cx.arange(DType::I64, from, from + steps, 1.0)?)
            }
            (given, _) => given,
        };
        let (q_norm, k_norm) = self
            .qk
            .as_ref()
            .map_or((None, None), |(q, k)| (Some(q), Some(k)));
        let q = self.heads(cx, x, (&self.q, self.heads, q_norm), positions.as_ref())?;
        let mut k = self.heads(cx, x, (&self.k, self.kv_heads, k_norm), positions.as_ref())?;
        let flat = self.v.forward(cx, x)?;
        let mut v = self.split(cx, &flat, self.kv_heads)?;
        drop(flat);
        if let Some(before) = past {
            if let Some((old_k, old_v)) = before {
                (k, v) = (cx.cat(&[&old_k, &k], 1)?, cx.cat(&[&old_v, &v], 1)?);
            }
            for (name, seen) in [("k", &k), ("v", &v)] {
                flow.insert(format!("past.{}.{name}", self.index), seen.clone().into());
            }
        }
        let sinks = self.sinks.as_ref().map(|sinks| cx.get(sinks)).transpose()?;
        let lens = optional(flow, "lens")?;
        let how = Attention {
            causal: true,
            window: self.window,
            sinks: sinks.as_ref(),
            lens: lens.as_ref().map(|lens| (lens, lens)),
            any_order: self.any_order,
            ..Attention::default()
        };
        // Attention grows with the square of the length, what it gives does not.
        let keeps = x.dims()[1] >= self.keeps_from;
        let known = match keeps && cx.doing_recompute() {
            true => <[Tensor; 2]>::try_from(cx.recompute_data()?)
                .ok()
                .map(|[o, lse]| (o, lse)),
            false => None,
        };
        let (mixed, lse) = cx.attention_known(&q, &k, &v, &how, known)?;
        drop((q, k, v));
        if keeps {
            cx.save_for_recompute(&[&mixed, &lse])?;
        }
        drop(lse);
        let width = (self.heads * self.head_dim) as isize;
        let flat = cx.reshape(&mixed, &[x.dims()[0] as isize, x.dims()[1] as isize, width])?;
        drop(mixed);
        self.o.forward(cx, &flat)
    }

    /// Earlier keys and values, taken out of the flow; the outer `None` where none are kept, the
    /// inner where there are none yet.
    fn past(&self, flow: &mut Flow) -> TensorResult<Option<Option<(Tensor, Tensor)>>> {
        let names = ["k", "v"].map(|name| format!("past.{}.{name}", self.index));
        match flow.contains_key(&names[0]) {
            true => Ok(Some(Some((take(flow, &names[0])?, take(flow, &names[1])?)))),
            false => Ok(flow.contains_key("cache").then_some(None)),
        }
    }
}

/// Whether a linear map of this name chooses experts.
pub(crate) fn is_router(name: &str) -> bool {
    name.ends_with("mlp.gate") || name.ends_with("mlp.router")
}

/// How a linear map is quantised here; `None` for routers and for sizes that the format does not
/// take. Matrices are those that folders have: an expert's gate and up are two, except in GPT-OSS.
pub(crate) fn own_form(
    family: Family,
    name: &str,
    projection: &Projection,
    how: Quantization,
) -> Option<Form> {
    if is_router(name) {
        return None;
    }
    let (matrices, rows, columns) = match *projection.weight.shape().dims() {
        [experts, out, inner] if name.ends_with(GATE_UP) && family != Family::GptOss => {
            (2 * experts, out / 2, inner)
        }
        [experts, out, inner] => (experts, out, inner),
        [out, inner] => (1, out, inner),
        _ => return None,
    };
    how.takes(rows, columns).then_some(Form {
        how,
        double: how == Quantization::Nf4,
        matrices,
    })
}

impl Unit {
    fn forward(&self, cx: &mut Cx, x: Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        match self {
            Self::Sparse(experts) => experts.forward(cx, &x, flow),
            Self::Dense { gate, up, down } => {
                let (gated, upped) = (gate.forward(cx, &x)?, up.forward(cx, &x)?);
                drop(x);
                let inner = cx.swiglu(&gated, &upped)?;
                drop((gated, upped));
                down.forward(cx, &inner)
            }
        }
    }
}

impl Params for Block {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("input_layernorm", &self.attn_norm);
        for (name, projection) in &self.projections()[..4] {
            visit.child(name, *projection);
        }
        if let Some((q, k)) = &self.qk {
            visit.child("self_attn.q_norm", q);
            visit.child("self_attn.k_norm", k);
        }
        visit.maybe("self_attn.sinks", self.sinks.as_ref());
        visit.child("post_attention_layernorm", &self.mlp_norm);
        for (name, projection) in &self.projections()[4..] {
            match *name {
                GATE_UP | DOWN => projection.visit_stacked(visit, name),
                _ => visit.child(name, *projection),
            }
        }
        visit.param("rope.cos", &self.rope.cos);
        visit.param("rope.sin", &self.rope.sin);
    }
}

impl Layer for Block {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut flow = fields(input)?;
        let x = take(&mut flow, "hidden")?;
        let normed = self.attn_norm.forward(cx, &x)?;
        let attended = self.attend(cx, &normed, &mut flow)?;
        drop(normed);
        let weight = cx.get(&self.mlp_norm.weight)?;
        let (x, normed) = cx.add_rms_norm(&attended, &x, Some(&weight), self.mlp_norm.eps)?;
        drop((attended, weight));
        let out = self.unit.forward(cx, normed, &mut flow)?;
        flow.insert("hidden".into(), cx.add(&x, &out)?.into());
        Ok(Tree::Map(flow))
    }
}
