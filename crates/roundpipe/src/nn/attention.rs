//! Attention as a layer, with PyTorch's parameters.

use roundpipe_tensor::ops::Attention;
use roundpipe_tensor::{Cx, DType, Error, Param, Result, Tensor};

use super::{Init, Linear};
use crate::layer::{Layer, Module, ParamVisitor, Params};
use crate::tree::Tree;

/// Several heads of attention between linear layers, batch first, with the parameter names of
/// PyTorch's `MultiheadAttention`. Attention weights have no dropout.
///
/// As a layer it attends from a tensor `[batch, seq, width]` to itself. With padding it takes a map
/// with `x` and `key_padding_mask` (`[batch, seq]`, true for keys to leave out) and passes the map
/// on with the new `x`, so that layers in a row share the mask. [`MultiheadAttention::attend`] has
/// queries, keys and values apart.
#[derive(Debug, Clone)]
pub struct MultiheadAttention {
    /// Of queries, keys and values, one after another: `[3 · width, width]`.
    pub in_proj_weight: Param,
    /// `[3 · width]`.
    pub in_proj_bias: Option<Param>,
    /// What the heads go through together.
    pub out_proj: Linear,
    /// How many heads share the width.
    pub heads: usize,
    /// A query sees keys up to its own position; the last query stands at the last key.
    pub causal: bool,
}

impl MultiheadAttention {
    /// Uniform values by Glorot's rule for the projections in, ±1/√width for the projection out,
    /// zero biases, as PyTorch does. Every query sees every key; see
    /// [`MultiheadAttention::causal`].
    ///
    /// # Errors
    /// When the heads do not divide the width, or the system has no memory.
    pub fn new(init: &mut Init, width: usize, heads: usize, bias: bool) -> Result<Self> {
        if heads == 0 || !width.is_multiple_of(heads) {
            let what = format!("{heads} heads do not divide a width of {width}");
            return Err(Error::invalid(OP, what));
        }
        let bound = (6.0 / (4 * width).max(1) as f64).sqrt();
        let in_proj_weight = init.uniform(&[3 * width, width], bound)?;
        let mut out_proj = Linear::new(init, width, width, false)?;
        let mut in_proj_bias = None;
        if bias {
            in_proj_bias = Some(init.full(&[3 * width], 0.0)?);
            out_proj.bias = Some(init.full(&[width], 0.0)?);
        }
        Ok(Self {
            in_proj_weight,
            in_proj_bias,
            out_proj,
            heads,
            causal: false,
        })
    }

    /// The same, where a query sees keys up to its own position.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Attends from `query: [b, sq, width]` to `key` and `value: [b, sk, width]`. Keys for which
    /// `key_padding_mask: [b, sk]` (bool) holds are left out; a query that sees no key gets no
    /// value, so its result is the bias of the projection out. A mask takes memory of the size of
    /// all scores; without one it is linear in the sequence.
    ///
    /// # Errors
    /// When shapes or types do not fit.
    pub fn attend(
        &self,
        cx: &mut Cx,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        key_padding_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let width = self.out_proj.weight.shape()[0];
        for given in [query, key, value] {
            if given.rank() != 3 || given.dims()[2] != width {
                let what = format!("{} is no [batch, seq, {width}]", given.shape());
                return Err(Error::invalid(OP, what));
            }
        }
        let [q, k, v] = self.project(cx, [query, key, value])?;
        let y = match key_padding_mask {
            None => {
                let how = Attention {
                    causal: self.causal,
                    ..Attention::default()
                };
                cx.attention(&q, &k, &v, &how)?
            }
            Some(mask) => self.attend_masked(cx, &q, &k, &v, mask)?,
        };
        let y = cx.flatten(&y, 2, 3)?;
        self.out_proj.forward(cx, &y)
    }

    /// The heads of queries, keys and values: `[b, s, heads, width / heads]` each.
    fn project(&self, cx: &mut Cx, given: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let width = self.out_proj.weight.shape()[0];
        let weight = cx.get(&self.in_proj_weight)?;
        let bias = self.in_proj_bias.as_ref();
        let bias = bias.map(|bias| cx.get(bias)).transpose()?;
        let heads = |cx: &mut Cx, x: &Tensor| {
            let dims = [x.dims()[0], x.dims()[1], self.heads, width / self.heads];
            cx.reshape(x, &dims.map(|size| size as isize))
        };
        let [query, key, value] = given;
        if query.is_same(key) && key.is_same(value) {
            // One product for all three.
            let all = cx.linear(query, &weight, bias.as_ref())?;
            let part = |cx: &mut Cx, i: usize| {
                let part = cx.narrow(&all, -1, i * width, width)?;
                heads(cx, &part)
            };
            return Ok([part(cx, 0)?, part(cx, 1)?, part(cx, 2)?]);
        }
        let part = |cx: &mut Cx, i: usize| {
            let weight = cx.narrow(&weight, 0, i * width, width)?;
            let bias = bias.as_ref();
            let bias = bias.map(|bias| cx.narrow(bias, 0, i * width, width));
            let y = cx.linear(given[i], &weight, bias.transpose()?.as_ref())?;
            heads(cx, &y)
        };
        Ok([part(cx, 0)?, part(cx, 1)?, part(cx, 2)?])
    }

    /// Attention by its formula, with scores in memory: `[b, sq, heads, width / heads]`.
    fn attend_masked(
        &self,
        cx: &mut Cx,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        padding: &Tensor,
    ) -> Result<Tensor> {
        let (batch, queries, keys) = (q.dims()[0], q.dims()[1], k.dims()[1]);
        if padding.dtype() != DType::Bool || padding.dims() != [batch, keys] {
            let what = format!(
                "key_padding_mask is {} {}; it is bool [{batch}, {keys}]",
                padding.dtype(),
                padding.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let mut hidden = cx.reshape(padding, &[batch as isize, 1, 1, keys as isize])?;
        if self.causal {
            let ones = cx.ones(q.dtype(), &[queries, keys])?;
            let later = cx.triu(&ones, keys as i64 - queries as i64 + 1)?;
            let later = cx.cast(&later, DType::Bool)?;
            hidden = cx.logical_or(&hidden, &later)?;
        }
        let [q, v] = [cx.transpose(q, 1, 2)?, cx.transpose(v, 1, 2)?];
        let k = cx.permute(k, &[0, 2, 3, 1])?;
        let scores = cx.matmul(&q, &k)?;
        let scale = 1.0 / (q.dims()[3] as f64).sqrt();
        let scores = cx.mul_scalar(&scores, scale)?;
        // Finite, so that a row without keys has no NaN; so low that its weights vanish beside
        // any score. Where a row has no key at all, the second mask makes them 0.
        let lowest = match q.dtype() {
            DType::F16 => -6e4,
            _ => -1e30,
        };
        let scores = cx.masked_fill(&scores, &hidden, lowest)?;
        let weights = cx.softmax(&scores, -1)?;
        let weights = cx.masked_fill(&weights, &hidden, 0.0)?;
        let y = cx.matmul(&weights, &v)?;
        cx.transpose(&y, 1, 2)
    }
}

const OP: &str = "multihead_attention";

impl Params for MultiheadAttention {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("in_proj_weight", &self.in_proj_weight);
        visit.maybe("in_proj_bias", self.in_proj_bias.as_ref());
        visit.child("out_proj", &self.out_proj);
    }
}

impl Layer for MultiheadAttention {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> Result<Tree> {
        if let Tree::Tensor(x) = &input {
            return Ok(self.attend(cx, x, x, x, None)?.into());
        }
        let x = input.take("x")?.tensor()?;
        let mask = input.get("key_padding_mask")?.clone().tensor()?;
        let y = self.attend(cx, &x, &x, &x, Some(&mask))?;
        if let Tree::Map(map) = &mut input {
            map.insert("x".to_owned(), y.into());
        }
        Ok(input)
    }
}
