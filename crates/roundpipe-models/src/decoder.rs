//! Decoder-only transformers of the Llama and Qwen3 kind as a [`Sequential`]: embedding, one layer per
//! block, head with loss.
//!
//! Between layers flows a map: `ids` [B, S] at first, then `hidden` [B, S, H]; `labels` [B, S] ride along
//! where given. The head turns `hidden` and `labels` into the mean loss over labelled tokens, or
//! `hidden` alone into logits.

use std::collections::BTreeMap;

use roundpipe::kernel::RopeStyle;
use roundpipe::nn::{Embedding, Init, Linear, RmsNorm};
use roundpipe::ops::{Attention, CrossEntropy, rope_tables};
use roundpipe::{
    Cx, DType, Error, Layer, Module, Param, Params, Result, Sequential, Tensor, TensorError, TensorResult,
    Tree, Visit,
};

/// Sizes and options of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Number of different tokens.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width inside the gated unit.
    pub intermediate: usize,
    /// Longest sequence.
    pub max_seq: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Added inside norms.
    pub eps: f64,
    /// Norm of queries and keys per head, as in Qwen3.
    pub qk_norm: bool,
    /// Head and embedding share their weights.
    pub tied: bool,
}

impl DecoderConfig {
    /// A model of under a million parameters that learns letters on a laptop.
    pub fn tiny() -> Self {
        Self {
            vocab: 256,
            hidden: 128,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            intermediate: 352,
            max_seq: 128,
            rope_theta: 10_000.0,
            eps: 1e-6,
            qk_norm: true,
            tied: true,
        }
    }

    /// Refuses sizes that cannot work.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate", self.intermediate),
            ("max_seq", self.max_seq),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::config(name, "must be at least 1"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let what = format!("{} does not divide heads = {}", self.kv_heads, self.heads);
            return Err(Error::config("kv_heads", what));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::config(
                "head_dim",
                format!("{} is odd; rotary pairs need an even one", self.head_dim),
            ));
        }
        Ok(())
    }
}

/// A decoder and its layers.
#[derive(Clone)]
pub struct Decoder {
    /// Sizes and options.
    pub config: DecoderConfig,
    /// Embedding, blocks, head.
    pub layers: Sequential,
}

impl Decoder {
    /// Random weights: normal with deviation 0.02, projections back into the stream scaled down by the number
    /// of blocks.
    ///
    /// # Errors
    /// When the sizes cannot work or the system has no memory.
    pub fn random(config: DecoderConfig, dtype: DType, seed: u64) -> Result<Self> {
        config.check()?;
        let mut init = Init::new(seed, dtype);
        let (cos, sin) = rope_tables(config.max_seq, config.head_dim, config.rope_theta);
        let table = |values: Vec<f64>| {
            let values: Vec<f32> = values.into_iter().map(|v| v as f32).collect();
            Param::from_slice(&values, &[config.max_seq, config.head_dim / 2]).map(Param::frozen)
        };
        let rope = Rope { cos: table(cos)?, sin: table(sin)? };
        let embed = Embed { tokens: Embedding::new(&mut init, config.vocab, config.hidden, 0.02)? };
        let tied = config.tied.then(|| embed.tokens.weight.clone());
        let mut layers = Sequential::new().named("embed", embed);
        for i in 0..config.layers {
            layers = layers.named(format!("layers.{i}"), Block::random(&config, &mut init, &rope)?);
        }
        let weight = match tied {
            Some(weight) => weight,
            None => init.normal(&[config.vocab, config.hidden], 0.02)?,
        };
        let head = Head { norm: RmsNorm::new(&mut init, config.hidden, config.eps)?, weight };
        Ok(Self { layers: layers.named("head", head), config })
    }

    /// Mean loss over the labels that are not -100; `ids` and `labels` are [B, S].
    ///
    /// # Errors
    /// What a layer reports.
    pub fn loss(&self, cx: &mut Cx, ids: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let input = flow([("ids", ids.clone()), ("labels", labels.clone())]);
        Ok(self.layers.forward(cx, input)?.tensor()?)
    }

    /// Logits [B, S, V].
    ///
    /// # Errors
    /// What a layer reports.
    pub fn logits(&self, cx: &mut Cx, ids: &Tensor) -> Result<Tensor> {
        Ok(self.layers.forward(cx, flow([("ids", ids.clone())]))?.tensor()?)
    }
}

impl Params for Decoder {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.layers.visit(visit);
    }
}

/// The map that flows between layers.
fn flow<const N: usize>(items: [(&str, Tensor); N]) -> Tree {
    Tree::Map(items.into_iter().map(|(name, tensor)| (name.to_owned(), Tree::Tensor(tensor))).collect())
}

/// Takes the map apart.
fn fields(input: Tree) -> TensorResult<BTreeMap<String, Tree>> {
    match input {
        Tree::Map(map) => Ok(map),
        _ => Err(TensorError::invalid("decoder", "a layer expects a map with `ids` or `hidden`")),
    }
}

/// Takes one tensor out of the map.
fn take(map: &mut BTreeMap<String, Tree>, name: &str) -> TensorResult<Tensor> {
    let missing = || TensorError::invalid("decoder", format!("the map between layers lacks `{name}`"));
    map.remove(name).ok_or_else(missing)?.tensor()
}

/// Token embedding.
struct Embed {
    tokens: Embedding,
}

impl Params for Embed {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("tokens", &self.tokens);
    }
}

impl Layer for Embed {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut map = fields(input)?;
        let ids = take(&mut map, "ids")?;
        let hidden = self.tokens.forward(cx, &ids)?;
        map.insert("hidden".into(), hidden.into());
        Ok(Tree::Map(map))
    }
}

/// Cosines and sines of the rotary angles, shared by all blocks.
#[derive(Clone)]
struct Rope {
    cos: Param,
    sin: Param,
}

/// Attention and gated unit, each behind a norm and added to the stream.
struct Block {
    attn_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Norms of queries and keys.
    qk: Option<(RmsNorm, RmsNorm)>,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    rope: Rope,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Block {
    fn random(config: &DecoderConfig, init: &mut Init, rope: &Rope) -> Result<Self> {
        let c = config;
        let (queries, keys) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let back = 0.02 / (2.0 * c.layers as f64).sqrt();
        let mut linear = |out: usize, inner: usize, std: f64| -> Result<Linear> {
            Ok(Linear { weight: init.normal(&[out, inner], std)?, bias: None })
        };
        let (q, k) = (linear(queries, c.hidden, 0.02)?, linear(keys, c.hidden, 0.02)?);
        let (v, o) = (linear(keys, c.hidden, 0.02)?, linear(c.hidden, queries, back)?);
        let (gate, up) = (linear(c.intermediate, c.hidden, 0.02)?, linear(c.intermediate, c.hidden, 0.02)?);
        let down = linear(c.hidden, c.intermediate, back)?;
        let mut norm = |width: usize| RmsNorm::new(init, width, c.eps);
        let qk = if c.qk_norm { Some((norm(c.head_dim)?, norm(c.head_dim)?)) } else { None };
        Ok(Self {
            attn_norm: norm(c.hidden)?,
            mlp_norm: norm(c.hidden)?,
            q,
            k,
            v,
            o,
            qk,
            gate,
            up,
            down,
            rope: rope.clone(),
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
        })
    }

    /// A projection as heads [B, S, heads, D], turned by its positions.
    fn heads(
        &self,
        cx: &mut Cx,
        x: &Tensor,
        project: &Linear,
        count: usize,
        norm: Option<&RmsNorm>,
    ) -> TensorResult<Tensor> {
        let flat = project.forward(cx, x)?;
        let dims = [x.dims()[0], x.dims()[1], count, self.head_dim].map(|d| d as isize);
        let split = cx.reshape(&flat, &dims)?;
        let (cos, sin) = (cx.get(&self.rope.cos)?, cx.get(&self.rope.sin)?);
        match norm {
            Some(norm) => {
                let weight = cx.get(&norm.weight)?;
                cx.rope_norm(&split, &weight, &cos, &sin, None, RopeStyle::Half, norm.eps)
            }
            None => cx.rope(&split, &cos, &sin, None, RopeStyle::Half),
        }
    }

    fn attend(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let (q_norm, k_norm) = self.qk.as_ref().map_or((None, None), |(q, k)| (Some(q), Some(k)));
        let q = self.heads(cx, x, &self.q, self.heads, q_norm)?;
        let k = self.heads(cx, x, &self.k, self.kv_heads, k_norm)?;
        let v = self.v.forward(cx, x)?;
        let v =
            cx.reshape(&v, &[x.dims()[0], x.dims()[1], self.kv_heads, self.head_dim].map(|d| d as isize))?;
        let mixed = cx.attention(&q, &k, &v, &Attention { causal: true, ..Attention::default() })?;
        let width = (self.heads * self.head_dim) as isize;
        let flat = cx.reshape(&mixed, &[x.dims()[0] as isize, x.dims()[1] as isize, width])?;
        self.o.forward(cx, &flat)
    }
}

impl Params for Block {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("input_layernorm", &self.attn_norm);
        visit.child("self_attn.q_proj", &self.q);
        visit.child("self_attn.k_proj", &self.k);
        visit.child("self_attn.v_proj", &self.v);
        visit.child("self_attn.o_proj", &self.o);
        if let Some((q, k)) = &self.qk {
            visit.child("self_attn.q_norm", q);
            visit.child("self_attn.k_norm", k);
        }
        visit.child("post_attention_layernorm", &self.mlp_norm);
        visit.child("mlp.gate_proj", &self.gate);
        visit.child("mlp.up_proj", &self.up);
        visit.child("mlp.down_proj", &self.down);
        visit.param("rope.cos", &self.rope.cos);
        visit.param("rope.sin", &self.rope.sin);
    }
}

impl Layer for Block {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut map = fields(input)?;
        let x = take(&mut map, "hidden")?;
        let normed = self.attn_norm.forward(cx, &x)?;
        let attended = self.attend(cx, &normed)?;
        drop(normed);
        let weight = cx.get(&self.mlp_norm.weight)?;
        let (x, normed) = cx.add_rms_norm(&attended, &x, Some(&weight), self.mlp_norm.eps)?;
        drop(attended);
        let gate = self.gate.forward(cx, &normed)?;
        let up = self.up.forward(cx, &normed)?;
        drop(normed);
        let inner = cx.swiglu(&gate, &up)?;
        drop((gate, up));
        let out = self.down.forward(cx, &inner)?;
        drop(inner);
        map.insert("hidden".into(), cx.add(&x, &out)?.into());
        Ok(Tree::Map(map))
    }
}

/// Last norm and the projection to tokens, with the loss where labels are given.
struct Head {
    norm: RmsNorm,
    weight: Param,
}

impl Params for Head {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("norm", &self.norm);
        visit.param("weight", &self.weight);
    }
}

impl Layer for Head {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut map = fields(input)?;
        let hidden = take(&mut map, "hidden")?;
        let normed = self.norm.forward(cx, &hidden)?;
        drop(hidden);
        let weight = cx.get(&self.weight)?;
        let out = match map.contains_key("labels") {
            true => {
                let labels = take(&mut map, "labels")?;
                cx.linear_cross_entropy(&normed, &weight, &labels, CrossEntropy::default())?
            }
            false => cx.linear(&normed, &weight, None)?,
        };
        Ok(out.into())
    }
}
