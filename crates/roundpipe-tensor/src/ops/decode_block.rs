//! A dense decoder block for one new token of each row: attention to caches and a gated unit, each
//! behind a norm and added to the stream.
//!
//! Where a device has a kernel for all of it, it is one launch. Elsewhere the operations that it is
//! made of are launched: those of a few rows ([`Cx::few_rows`]), to the same bits as the one launch,
//! or those of training.

use super::attention::Attention;
use super::decode::{LinearMap, NewHeads, NormWeight};
use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{DecodeBlockSizes, DecodeBlockSpec, Kernel, RopeStyle};
use crate::tensor::Tensor;

const OP: &str = "decode_block";

/// The weights of a block, and where its new tokens stand.
#[derive(Debug, Clone, Copy)]
pub struct DecodeBlock<'a> {
    /// Of what attention takes, `[c]`.
    pub attn_norm: NormWeight<'a>,
    /// `[hq · d, c]`.
    pub q: LinearMap<'a>,
    /// `[hk · d, c]`.
    pub k: LinearMap<'a>,
    /// `[hk · d, c]`.
    pub v: LinearMap<'a>,
    /// Norms of queries and keys, where there are some: `[d]`.
    pub head_norms: Option<(NormWeight<'a>, NormWeight<'a>)>,
    /// Tables `[positions, r / 2]`; pairs are an element and the one half of r behind it.
    pub cos: &'a Tensor,
    /// As `cos`.
    pub sin: &'a Tensor,
    /// `[b, 1]`, i32.
    pub positions: &'a Tensor,
    /// Keys and values, `[b, capacity, hk, d]`; written as by [`Cx::cache_write`].
    pub caches: [&'a Tensor; 2],
    /// Places that rows have filled: `[b]`, i32.
    pub at: &'a Tensor,
    /// Scale, window and sinks.
    pub attention: Attention<'a>,
    /// `[c, hq · d]`.
    pub o: LinearMap<'a>,
    /// Of what the gated unit takes, `[c]`.
    pub mlp_norm: NormWeight<'a>,
    /// `[n, c]`.
    pub gate: LinearMap<'a>,
    /// `[n, c]`.
    pub up: LinearMap<'a>,
    /// `[c, n]`.
    pub down: LinearMap<'a>,
}

impl Cx {
    /// A block of a step of decoding: x `[b, 1, c]` gives `[b, 1, c]`, and the new keys and values
    /// are in the caches afterwards.
    ///
    /// # Errors
    /// When sizes or types do not fit; as [`Cx::cache_write`] and [`Cx::cached_attention`].
    pub fn decode_block(&mut self, x: &Tensor, block: &DecodeBlock<'_>) -> Result<Tensor> {
        let sizes = block.sizes(x)?;
        let ops = self.worker().device().ops();
        if !self.records() && ops.takes_block(&sizes) && block.is_dense() {
            return self.launch_block(x, block, &sizes);
        }
        let whole = |width: usize| (width * sizes.dtype.size()).is_multiple_of(16);
        let widths = [sizes.hidden, sizes.units, sizes.heads * sizes.head_dim];
        if sizes.rows <= self.few_rows()
            && sizes.dtype != DType::F64
            && widths.into_iter().all(whole)
        {
            return self.block_of_few_rows(x, block, &sizes);
        }
        self.block_of_parts(x, block, &sizes)
    }

    fn launch_block(
        &mut self,
        x: &Tensor,
        block: &DecodeBlock<'_>,
        sizes: &DecodeBlockSizes,
    ) -> Result<Tensor> {
        let worker = self.worker();
        let y = worker.alloc(OP, x.dtype(), *x.shape())?;
        let (x, at) = (worker.contiguous(x)?, worker.contiguous(block.at)?);
        let positions = worker.contiguous(block.positions)?;
        let spec = DecodeBlockSpec {
            attn_eps: block.attn_norm.1,
            head_eps: block.head_norms.map_or(0.0, |((_, eps), _)| eps),
            mlp_eps: block.mlp_norm.1,
            scale: (block.attention.scale).unwrap_or(1.0 / (sizes.head_dim as f64).sqrt()),
            window: block.attention.window,
        };
        let src = [
            Some(&x),
            Some(block.attn_norm.0),
            Some(block.q.0),
            Some(block.k.0),
            Some(block.v.0),
            block.q.1,
            block.k.1,
            block.v.1,
            block.head_norms.map(|((w, _), _)| w),
            block.head_norms.map(|(_, (w, _))| w),
            Some(block.cos),
            Some(block.sin),
            Some(&positions),
            Some(&at),
            block.attention.sinks,
            Some(block.o.0),
            block.o.1,
            Some(block.mlp_norm.0),
            Some(block.gate.0),
            Some(block.up.0),
            Some(block.down.0),
            block.gate.1,
            block.up.1,
            block.down.1,
        ];
        let dst = [Some(&y), Some(block.caches[0]), Some(block.caches[1])];
        worker.launch(&Kernel::DecodeBlock(spec), &src, &dst)?;
        Ok(y)
    }

    /// By the operations of a few rows.
    fn block_of_few_rows(
        &mut self,
        x: &Tensor,
        block: &DecodeBlock<'_>,
        sizes: &DecodeBlockSizes,
    ) -> Result<Tensor> {
        let maps = [block.q, block.k, block.v];
        let flat = self.few_linears(x, Some(block.attn_norm), &maps)?;
        let [q, k, v] = self.split_heads(&flat, sizes)?;
        let new = NewHeads {
            q: &q,
            k: &k,
            v: &v,
            norms: block.head_norms,
            cos: block.cos,
            sin: block.sin,
            positions: block.positions,
        };
        let q = self.decode_heads(&new, block.caches, block.at)?;
        let mixed = self.attend_cached(&q, block)?;
        let x = self.few_linear_add(&mixed, block.o, x)?;
        let inner = self.few_swiglu(&x, Some(block.mlp_norm), block.gate, block.up)?;
        self.few_linear_add(&inner, block.down, &x)
    }

    /// By the operations of training.
    fn block_of_parts(
        &mut self,
        x: &Tensor,
        block: &DecodeBlock<'_>,
        sizes: &DecodeBlockSizes,
    ) -> Result<Tensor> {
        let (weight, eps) = block.attn_norm;
        let normed = self.rms_norm(x, Some(weight), eps)?;
        let mut flat = Vec::new();
        for (weight, bias) in [block.q, block.k, block.v] {
            flat.push(self.linear(&normed, weight, bias)?);
        }
        let [q, k, v] = self.split_heads(&flat, sizes)?;
        let q = self.turn(&q, block.head_norms.map(|(norm, _)| norm), block)?;
        let k = self.turn(&k, block.head_norms.map(|(_, norm)| norm), block)?;
        for (cache, new) in block.caches.into_iter().zip([&k, &v]) {
            self.cache_write(cache, new, block.at)?;
        }
        let mixed = self.attend_cached(&q, block)?;
        let attended = self.linear(&mixed, block.o.0, block.o.1)?;
        let (weight, eps) = block.mlp_norm;
        let (x, normed) = self.add_rms_norm(&attended, x, Some(weight), eps)?;
        let gate = self.linear(&normed, block.gate.0, block.gate.1)?;
        let up = self.linear(&normed, block.up.0, block.up.1)?;
        let inner = self.swiglu(&gate, &up)?;
        let out = self.linear(&inner, block.down.0, block.down.1)?;
        self.add(&x, &out)
    }

    /// Queries, keys and values as heads `[b, 1, heads, d]`.
    fn split_heads(&mut self, flat: &[Tensor], sizes: &DecodeBlockSizes) -> Result<[Tensor; 3]> {
        let mut split = |flat: &Tensor, heads: usize| {
            let dims = [sizes.rows, 1, heads, sizes.head_dim].map(|size| size as isize);
            self.reshape(flat, &dims)
        };
        Ok([
            split(&flat[0], sizes.heads)?,
            split(&flat[1], sizes.kv_heads)?,
            split(&flat[2], sizes.kv_heads)?,
        ])
    }

    fn turn(
        &mut self,
        heads: &Tensor,
        norm: Option<NormWeight<'_>>,
        block: &DecodeBlock<'_>,
    ) -> Result<Tensor> {
        let (cos, sin, positions) = (block.cos, block.sin, Some(block.positions));
        match norm {
            Some((weight, eps)) => {
                self.rope_norm(heads, weight, cos, sin, positions, RopeStyle::Half, eps)
            }
            None => self.rope(heads, cos, sin, positions, RopeStyle::Half),
        }
    }

    /// What the heads mix, flat.
    fn attend_cached(&mut self, q: &Tensor, block: &DecodeBlock<'_>) -> Result<Tensor> {
        let how = Attention {
            causal: true,
            lens: None,
            ..block.attention
        };
        let [k, v] = block.caches;
        let mixed = self.cached_attention(q, k, v, block.at, &how)?;
        let width = q.dims()[2] * q.dims()[3];
        self.reshape(&mixed, &[q.dims()[0] as isize, 1, width as isize])
    }
}

impl DecodeBlock<'_> {
    /// The sizes of the block, of which all operands are.
    fn sizes(&self, x: &Tensor) -> Result<DecodeBlockSizes> {
        let (&[rows, 1, hidden], &[_, capacity, kv_heads, head_dim]) =
            (x.dims(), self.caches[0].dims())
        else {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *self.caches[0].shape(),
            });
        };
        let sizes = DecodeBlockSizes {
            dtype: x.dtype(),
            rows,
            hidden,
            units: self.gate.0.dims().first().copied().unwrap_or(0),
            heads: self
                .q
                .0
                .dims()
                .first()
                .map_or(0, |wide| wide / head_dim.max(1)),
            kv_heads,
            head_dim,
            capacity,
        };
        self.check_maps(x, &sizes)?;
        self.check_places(x, &sizes)?;
        Ok(sizes)
    }

    fn check_maps(&self, x: &Tensor, sizes: &DecodeBlockSizes) -> Result<()> {
        let (wide, narrow) = (
            sizes.heads * sizes.head_dim,
            sizes.kv_heads * sizes.head_dim,
        );
        let maps = [
            (self.q, [wide, sizes.hidden]),
            (self.k, [narrow, sizes.hidden]),
            (self.v, [narrow, sizes.hidden]),
            (self.o, [sizes.hidden, wide]),
            (self.gate, [sizes.units, sizes.hidden]),
            (self.up, [sizes.units, sizes.hidden]),
            (self.down, [sizes.hidden, sizes.units]),
        ];
        for ((weight, bias), dims) in maps {
            let bias_fits = bias.is_none_or(|bias| bias.dims() == [dims[0]]);
            if weight.dims() != dims || !bias_fits {
                let what = format!("{weight:?} is no matrix {dims:?} with its bias");
                return Err(Error::invalid(OP, what));
            }
            same_dtype(OP, x, weight)?;
            bias.map_or(Ok(()), |bias| same_dtype(OP, x, bias))?;
        }
        let norms = [
            (self.attn_norm.0, sizes.hidden),
            (self.mlp_norm.0, sizes.hidden),
        ];
        let heads = self.head_norms.map(|((q, _), (k, _))| [q, k]);
        let heads = heads.into_iter().flatten().map(|w| (w, sizes.head_dim));
        let sinks = self.attention.sinks.map(|sinks| (sinks, sizes.heads));
        for (vector, size) in norms.into_iter().chain(heads).chain(sinks) {
            same_dtype(OP, x, vector)?;
            if vector.dims() != [size] {
                return Err(Error::invalid(
                    OP,
                    format!("{vector:?} is not {size} numbers"),
                ));
            }
        }
        Ok(())
    }

    fn check_places(&self, x: &Tensor, sizes: &DecodeBlockSizes) -> Result<()> {
        let dims = [sizes.rows, sizes.capacity, sizes.kv_heads, sizes.head_dim];
        for cache in self.caches {
            same_dtype(OP, x, cache)?;
            if cache.dims() != dims || !cache.is_contiguous() || !cache.is_writable() {
                let what = format!("{cache:?} is no cache {dims:?}: make one with `Cx::cache`");
                return Err(Error::invalid(OP, what));
            }
        }
        let table = x.dtype().accumulator();
        let fits = self.cos.rank() == 2
            && self.cos.shape() == self.sin.shape()
            && 2 * self.cos.dims()[1] <= sizes.head_dim
            && [self.cos, self.sin].iter().all(|t| t.dtype() == table)
            && self.positions.dims() == [sizes.rows, 1]
            && self.at.dims() == [sizes.rows]
            && [self.positions, self.at]
                .iter()
                .all(|t| t.dtype() == DType::I32);
        if !fits {
            let what = format!(
                "tables {:?}, positions {:?} and places {:?} do not fit {} rows",
                self.cos, self.positions, self.at, sizes.rows
            );
            return Err(Error::invalid(OP, what));
        }
        Ok(())
    }

    /// Whether all that a kernel reads as it lies is dense.
    fn is_dense(&self) -> bool {
        let maps = [
            self.q, self.k, self.v, self.o, self.gate, self.up, self.down,
        ];
        let vectors = [self.attn_norm.0, self.mlp_norm.0, self.cos, self.sin];
        let heads = self.head_norms.map(|((q, _), (k, _))| [q, k]);
        maps.into_iter()
            .flat_map(|(weight, bias)| [Some(weight), bias])
            .flatten()
            .chain(vectors)
            .chain(heads.into_iter().flatten())
            .chain(self.attention.sinks)
            .all(Tensor::is_contiguous)
    }
}
