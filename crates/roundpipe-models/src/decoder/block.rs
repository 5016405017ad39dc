//! One block: attention and a gated unit or experts, each behind a norm and added to the stream.

use roundpipe::kernel::RopeStyle;
use roundpipe::nn::RmsNorm;
use roundpipe::ops::{Attention, DecodeBlock, NewHeads, ProjectionInput};
use roundpipe::{
    Cx, DType, Layer, Module, Param, ParamVisitor, Params, Quantization, Tensor, TensorResult, Tree,
};

use super::{
    Contents, Experts, Flow, Form, Maker, Projection, QuantizedWeight, Weight, fields, get,
    optional, take,
};
use crate::config::{Family, ModelConfig};
use crate::rope::RopeTables;

/// Names of the experts' matrices in a block.
pub(crate) const GATE_UP: &str = "mlp.experts.gate_up_proj";
pub(crate) const DOWN: &str = "mlp.experts.down_proj";

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
        config: &ModelConfig,
        how: Quantization,
        make: &mut Maker,
    ) -> TensorResult<()> {
        for (name, projection) in self.projections_mut() {
            let form = own_form(config.family, name, projection, how);
            let Weight::Whole(whole) = &projection.weight else {
                continue;
            };
            let Some(form) = form else {
                if make.contents == Contents::RandomCodes {
                    let dims = whole.shape().dims().to_vec();
                    projection.weight = Weight::Whole(make.normal(&dims, 0.02)?);
                }
                continue;
            };
            let double = form.double && config.has_double_quantization();
            let form = Form { double, ..form };
            let weight = QuantizedWeight::zeros(form, *whole.shape(), whole.dtype())?;
            match make.contents {
                Contents::Random => weight.fill(whole)?,
                Contents::RandomCodes => weight.fill_at_random(make.init.next_key(), 0.02)?,
                Contents::Zero | Contents::Absent => {}
            }
            projection.weight = Weight::Quantized(weight);
        }
        Ok(())
    }

    /// A projection as heads [B, S, heads, D], turned by its positions.
    fn heads(
        &self,
        cx: &mut Cx,
        input: &ProjectionInput,
        (project, count, norm): (&Projection, usize, Option<&RmsNorm>),
        positions: Option<&Tensor>,
    ) -> TensorResult<Tensor> {
        let flat = project.project(cx, input)?;
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
        let cache = self.cache(flow)?;
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
        let positions = positions.as_ref();
        let input = cx.projection_input(x)?;
        let q = self.heads(cx, &input, (&self.q, self.heads, q_norm), positions)?;
        let mut k = self.heads(cx, &input, (&self.k, self.kv_heads, k_norm), positions)?;
        let flat = self.v.project(cx, &input)?;
        drop(input);
        let mut v = self.split(cx, &flat, self.kv_heads)?;
        drop(flat);
        // Where the last of a row's tokens stands, where that is known to the device alone or the
        // row has one new token: both ways to keep the past then attend by the same kernel.
        let mut at = None;
        if let Some(cache) = cache {
            (k, v) = cache.extend(cx, k, v)?;
            at = cache.filled.is_none().then_some(cache.at);
        }
        if let Some(before) = past {
            if let Some((old_k, old_v)) = before {
                let (rows, seen) = (k.dims()[0], old_k.dims()[1]);
                if k.dims()[1] == 1 && !cx.is_training() {
                    at = Some(cx.full(DType::I32, &[rows], seen as f64)?);
                }
                (k, v) = (cx.cat(&[&old_k, &k], 1)?, cx.cat(&[&old_v, &v], 1)?);
            }
            for (name, seen) in [("k", &k), ("v", &v)] {
                flow.insert(format!("past.{}.{name}", self.index), seen.clone().into());
            }
        }
        let sinks = self.sinks.as_ref().map(|sinks| cx.get(sinks)).transpose()?;
        let lens = optional(flow, "lens")?;
        let how = Attention {
            lens: lens.as_ref().map(|lens| (lens, lens)),
            any_order: self.any_order,
            ..self.attention(sinks.as_ref())
        };
        let mixed = match at {
            Some(at) => cx.cached_attention(&q, &k, &v, &at, &how)?,
            None => cx.attention(&q, &k, &v, &how)?,
        };
        drop((q, k, v));
        let width = (self.heads * self.head_dim) as isize;
        let flat = cx.reshape(&mixed, &[x.dims()[0] as isize, x.dims()[1] as isize, width])?;
        drop(mixed);
        let input = cx.projection_input(&flat)?;
        self.o.project(cx, &input)
    }

    fn attention<'t>(&self, sinks: Option<&'t Tensor>) -> Attention<'t> {
        Attention {
            causal: true,
            window: self.window,
            sinks,
            ..Attention::default()
        }
    }

    /// Whether this is a step of decoding on a device with kernels for such.
    fn takes_few(&self, cx: &Cx, x: &Tensor, flow: &Flow) -> bool {
        let decodes = flow.contains_key("cache.at") || flow.contains_key("cache");
        let whole = |width: usize| (width * x.dtype().size()).is_multiple_of(16);
        let inner = match &self.unit {
            Unit::Dense { down, .. } => down.weight.shape().dims()[1],
            Unit::Sparse(_) => 0,
        };
        decodes
            && x.dims()[0] * x.dims()[1] <= cx.few_rows()
            && [x.dims()[2], inner, self.heads * self.head_dim]
                .into_iter()
                .all(whole)
            && self
                .projections()
                .iter()
                .all(|(_, p)| p.adapter.is_none() && matches!(p.weight, Weight::Whole(_)))
    }

    /// Whether every row has one new token, whose place in the block's cache the device knows.
    fn steps_by_one(&self, x: &Tensor, flow: &Flow) -> bool {
        let has = |name: &str| flow.contains_key(name);
        let keeps_past = has("cache") || has(&format!("past.{}.k", self.index));
        x.dims()[1] == 1
            && has(&format!("cache.{}.k", self.index))
            && has("positions")
            && !has("cache.filled")
            && !keeps_past
    }

    /// A step of decoding: as [`Layer::run`], in as few launches as there are.
    fn run_few(&self, cx: &mut Cx, x: Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        if self.steps_by_one(&x, flow)
            && let Unit::Dense { gate, up, down } = &self.unit
        {
            return self.run_one(cx, &x, flow, [gate, up, down]);
        }
        let mixed = self.attend_few(cx, &x, flow)?;
        let (weight, bias) = self.o.tensors(cx)?;
        let x = cx.few_linear_add(&mixed, (&weight, bias.as_ref()), &x)?;
        let weight = cx.get(&self.mlp_norm.weight)?;
        match &self.unit {
            Unit::Sparse(experts) => {
                let normed = self.mlp_norm.forward(cx, &x)?;
                let out = experts.forward(cx, &normed, flow)?;
                cx.add(&x, &out)
            }
            Unit::Dense { gate, up, down } => {
                let (gate, up) = (gate.tensors(cx)?, up.tensors(cx)?);
                let norm = Some((&weight, self.mlp_norm.eps));
                let (gate, up) = ((&gate.0, gate.1.as_ref()), (&up.0, up.1.as_ref()));
                let inner = cx.few_swiglu(&x, norm, gate, up)?;
                let (weight, bias) = down.tensors(cx)?;
                cx.few_linear_add(&inner, (&weight, bias.as_ref()), &x)
            }
        }
    }

    /// The same with one new token per row, as one operation.
    fn run_one(
        &self,
        cx: &mut Cx,
        x: &Tensor,
        flow: &mut Flow,
        [gate, up, down]: [&Projection; 3],
    ) -> TensorResult<Tensor> {
        let Some(cache) = self.cache(flow)? else {
            unreachable!("`steps_by_one` has seen it")
        };
        let positions = cx.cast(&get(flow, "positions")?, DType::I32)?;
        let positions = cx.broadcast_to(&positions, &[x.dims()[0], 1])?;
        let maps = [&self.q, &self.k, &self.v, &self.o, gate, up, down];
        let maps: Vec<(Tensor, Option<Tensor>)> = maps
            .into_iter()
            .map(|projection| projection.tensors(cx))
            .collect::<TensorResult<_>>()?;
        let map = |i: usize| (&maps[i].0, maps[i].1.as_ref());
        let attn_norm = cx.get(&self.attn_norm.weight)?;
        let mlp_norm = cx.get(&self.mlp_norm.weight)?;
        let heads = self.head_norms(cx)?;
        let sinks = self.sinks.as_ref().map(|sinks| cx.get(sinks)).transpose()?;
        let block = DecodeBlock {
            attn_norm: (&attn_norm, self.attn_norm.eps),
            q: map(0),
            k: map(1),
            v: map(2),
            head_norms: heads
                .as_ref()
                .map(|((q, eq), (k, ek))| ((q, *eq), (k, *ek))),
            cos: &cx.get(&self.rope.cos)?,
            sin: &cx.get(&self.rope.sin)?,
            positions: &positions,
            caches: [&cache.k, &cache.v],
            at: &cache.at,
            attention: self.attention(sinks.as_ref()),
            o: map(3),
            mlp_norm: (&mlp_norm, self.mlp_norm.eps),
            gate: map(4),
            up: map(5),
            down: map(6),
        };
        cx.decode_block(x, &block)
    }

    /// Norms of queries and keys on the worker.
    fn head_norms(&self, cx: &mut Cx) -> TensorResult<Option<HeadNorms>> {
        Ok(match &self.qk {
            Some((q, k)) => Some(((cx.get(&q.weight)?, q.eps), (cx.get(&k.weight)?, k.eps))),
            None => None,
        })
    }

    /// What the heads have mixed, flat, before the last projection.
    fn attend_few(&self, cx: &mut Cx, x: &Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        let (rows, steps) = (x.dims()[0], x.dims()[1]);
        let weight = cx.get(&self.attn_norm.weight)?;
        let maps = [&self.q, &self.k, &self.v].map(|p| p.tensors(cx));
        let [q, k, v] = maps;
        let (q, k, v) = (q?, k?, v?);
        let maps = [&q, &k, &v].map(|(weight, bias)| (weight, bias.as_ref()));
        let flat = cx.few_linears(x, Some((&weight, self.attn_norm.eps)), &maps)?;
        let q = self.split(cx, &flat[0], self.heads)?;
        let k = self.split(cx, &flat[1], self.kv_heads)?;
        let v = self.split(cx, &flat[2], self.kv_heads)?;
        let past = self.past(flow)?;
        let seen = match &past {
            Some(Some((old, _))) => old.dims()[1],
            _ => 0,
        };
        let positions = match optional(flow, "positions")? {
            Some(given) => cx.cast(&given, DType::I32)?,
            None => cx.arange(DType::I32, seen as f64, (seen + steps) as f64, 1.0)?,
        };
        let all = [rows as isize, steps as isize];
        let positions = cx.broadcast_to(&positions, &all.map(|size| size as usize))?;
        let cache = match self.cache(flow)? {
            Some(cache) => cache,
            // New keys and values by themselves, to be joined with those before.
            None => {
                let dims = [rows, steps, self.kv_heads, self.head_dim];
                Cache {
                    k: cx.cache(x.dtype(), dims)?,
                    v: cx.cache(x.dtype(), dims)?,
                    at: cx.zeros(DType::I32, &[rows])?,
                    filled: Some(0),
                }
            }
        };
        let norms = self.head_norms(cx)?;
        let new = NewHeads {
            q: &q,
            k: &k,
            v: &v,
            norms: norms
                .as_ref()
                .map(|((q, eq), (k, ek))| ((q, *eq), (k, *ek))),
            cos: &cx.get(&self.rope.cos)?,
            sin: &cx.get(&self.rope.sin)?,
            positions: &positions,
        };
        let q = cx.decode_heads(&new, [&cache.k, &cache.v], &cache.at)?;
        let (mut k, mut v) = cache.seen(cx, steps)?;
        let mut at = cache.filled.is_none().then_some(cache.at);
        if let Some(before) = past {
            if let Some((old_k, old_v)) = before {
                (k, v) = (cx.cat(&[&old_k, &k], 1)?, cx.cat(&[&old_v, &v], 1)?);
                if steps == 1 {
                    at = Some(cx.full(DType::I32, &[rows], seen as f64)?);
                }
            }
            for (name, seen) in [("k", &k), ("v", &v)] {
                flow.insert(format!("past.{}.{name}", self.index), seen.clone().into());
            }
        }
        let sinks = self.sinks.as_ref().map(|sinks| cx.get(sinks)).transpose()?;
        let how = self.attention(sinks.as_ref());
        let mixed = match at {
            Some(at) => cx.cached_attention(&q, &k, &v, &at, &how)?,
            None => cx.attention(&q, &k, &v, &how)?,
        };
        let width = (self.heads * self.head_dim) as isize;
        cx.reshape(&mixed, &[all[0], all[1], width])
    }

    /// The block's cache, taken out of the flow.
    fn cache(&self, flow: &mut Flow) -> TensorResult<Option<Cache>> {
        let names = ["k", "v"].map(|name| format!("cache.{}.{name}", self.index));
        if !flow.contains_key(&names[0]) {
            return Ok(None);
        }
        let filled = match flow.get("cache.filled") {
            Some(Tree::Int(filled)) => usize::try_from(*filled).ok(),
            _ => None,
        };
        Ok(Some(Cache {
            k: take(flow, &names[0])?,
            v: take(flow, &names[1])?,
            at: get(flow, "cache.at")?,
            filled,
        }))
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

/// Weights and eps of the norms of queries and keys.
type HeadNorms = ((Tensor, f64), (Tensor, f64));

/// Keys and values that are written in place.
struct Cache {
    /// [B, places, kv heads, D].
    k: Tensor,
    v: Tensor,
    /// Places that each row has filled, i32 [B].
    at: Tensor,
    /// The same of all rows, where the host knows it.
    filled: Option<usize>,
}

impl Cache {
    /// Writes new keys and values, and gives those that attention reads.
    fn extend(&self, cx: &mut Cx, k: Tensor, v: Tensor) -> TensorResult<(Tensor, Tensor)> {
        cx.cache_write(&self.k, &k, &self.at)?;
        cx.cache_write(&self.v, &v, &self.at)?;
        self.seen(cx, k.dims()[1])
    }

    /// Keys and values that attention reads once `steps` more are written: all places where only
    /// the device knows how many are filled.
    fn seen(&self, cx: &mut Cx, steps: usize) -> TensorResult<(Tensor, Tensor)> {
        let Some(filled) = self.filled else {
            return Ok((self.k.clone(), self.v.clone()));
        };
        let seen = filled + steps;
        Ok((
            cx.narrow(&self.k, 1, 0, seen)?,
            cx.narrow(&self.v, 1, 0, seen)?,
        ))
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
                let input = cx.projection_input(&x)?;
                let (gated, upped) = (gate.project(cx, &input)?, up.project(cx, &input)?);
                drop((x, input));
                let inner = cx.swiglu(&gated, &upped)?;
                drop((gated, upped));
                let input = cx.projection_input(&inner)?;
                down.project(cx, &input)
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
        if self.takes_few(cx, &x, &flow) {
            let out = self.run_few(cx, x, &mut flow)?;
            flow.insert("hidden".into(), out.into());
            return Ok(Tree::Map(flow));
        }
        // A block is a layer of its own wherever it runs, so its gradients may be joined.
        let out = cx.joining_gradients(|cx| self.run_many(cx, x, &mut flow))?;
        flow.insert("hidden".into(), out.into());
        Ok(Tree::Map(flow))
    }
}

impl Block {
    /// As [`Layer::run`], for any number of tokens.
    fn run_many(&self, cx: &mut Cx, x: Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        let normed = self.attn_norm.forward(cx, &x)?;
        let attended = self.attend(cx, &normed, flow)?;
        drop(normed);
        let weight = cx.get(&self.mlp_norm.weight)?;
        let (x, normed) = cx.add_rms_norm(&attended, &x, Some(&weight), self.mlp_norm.eps)?;
        drop((attended, weight));
        let out = self.unit.forward(cx, normed, flow)?;
        cx.add(&x, &out)
    }
}
