//! Operations of a step of decoding for devices where launches cost as much as they compute.
//!
//! A device says how many rows it takes so ([`Cx::few_rows`]); others, and training, use the
//! operations that these are made of. Values are rounded where those would round them, but sums may
//! run in another order.

use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{FewLinear, Kernel};
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;

/// A matrix `[out, in]` and its bias `[out]`.
pub type LinearMap<'a> = (&'a Tensor, Option<&'a Tensor>);

/// Weight `[d]` of a norm, and what is added to the mean square.
pub type NormWeight<'a> = (&'a Tensor, f64);

/// Queries, keys and values of new tokens and how they are turned.
#[derive(Debug, Clone, Copy)]
pub struct NewHeads<'a> {
    /// `[b, s, heads, d]`.
    pub q: &'a Tensor,
    /// `[b, s, kv heads, d]`.
    pub k: &'a Tensor,
    /// `[b, s, kv heads, d]`.
    pub v: &'a Tensor,
    /// Norms of queries and keys, where there are some.
    pub norms: Option<(NormWeight<'a>, NormWeight<'a>)>,
    /// Tables `[positions, r / 2]`; pairs are an element and the one half of r behind it.
    pub cos: &'a Tensor,
    /// As `cos`.
    pub sin: &'a Tensor,
    /// `[b, s]`, i32.
    pub positions: &'a Tensor,
}

impl Cx {
    /// Rows that the operations here take on this device: 0 where it has none of them, and while
    /// gradients are recorded.
    pub fn few_rows(&self) -> usize {
        if self.records() {
            return 0;
        }
        self.worker().device().ops().few_rows()
    }

    /// Linear maps of `norm(x)`, or of x, in one launch: x `[.., in]` gives `[.., out]` for each of
    /// up to three.
    ///
    /// # Errors
    /// When sizes or types do not fit, or there are more rows than [`Cx::few_rows`].
    pub fn few_linears(
        &mut self,
        x: &Tensor,
        norm: Option<NormWeight<'_>>,
        maps: &[LinearMap<'_>],
    ) -> Result<Vec<Tensor>> {
        let outs: Vec<usize> = maps.iter().map(|(w, _)| w.dims()[0]).collect();
        self.few("few_linears", x, norm, None, maps, &outs, false)
    }

    /// residual + x Wᵀ + b in one launch.
    ///
    /// # Errors
    /// As [`Cx::few_linears`].
    pub fn few_linear_add(
        &mut self,
        x: &Tensor,
        map: LinearMap<'_>,
        residual: &Tensor,
    ) -> Result<Tensor> {
        let outs = [map.0.dims()[0]];
        let mut y = self.few(
            "few_linear_add",
            x,
            None,
            Some(residual),
            &[map],
            &outs,
            false,
        )?;
        Ok(y.remove(0))
    }

    /// silu(gate(x)) · up(x) of `norm(x)` in one launch.
    ///
    /// # Errors
    /// As [`Cx::few_linears`].
    pub fn few_swiglu(
        &mut self,
        x: &Tensor,
        norm: Option<NormWeight<'_>>,
        gate: LinearMap<'_>,
        up: LinearMap<'_>,
    ) -> Result<Tensor> {
        let outs = [gate.0.dims()[0]];
        let mut y = self.few("few_swiglu", x, norm, None, &[gate, up], &outs, true)?;
        Ok(y.remove(0))
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of one kernel")]
    fn few(
        &mut self,
        op: &'static str,
        x: &Tensor,
        norm: Option<NormWeight<'_>>,
        residual: Option<&Tensor>,
        maps: &[LinearMap<'_>],
        outs: &[usize],
        glu: bool,
    ) -> Result<Vec<Tensor>> {
        let width = x.dims().last().copied().unwrap_or(0);
        let rows = x.numel() / width.max(1);
        check_few(self, op, x, rows, maps)?;
        let worker = self.worker();
        let dense = |t: &Tensor| worker.contiguous(t);
        let flat = dense(x)?.relaid(Layout::contiguous(Shape::new(&[rows, width])?));
        let residual = residual.map(dense).transpose()?;
        let mut y = Vec::new();
        for out in outs {
            let shape = x.shape().with(op, x.rank() - 1, *out)?;
            y.push(worker.alloc(op, x.dtype(), shape)?);
        }
        let weight = |i: usize| maps.get(i).map(|(w, _)| *w);
        let bias = |i: usize| maps.get(i).and_then(|(_, b)| *b);
        let src = [
            Some(&flat),
            norm.map(|(w, _)| w),
            residual.as_ref(),
            weight(0),
            weight(1),
            weight(2),
            bias(0),
            bias(1),
            bias(2),
        ];
        let spec = FewLinear {
            eps: norm.map(|(_, eps)| eps),
            glu,
        };
        let dst: Vec<Option<&Tensor>> = y.iter().map(Some).collect();
        worker.launch(&Kernel::FewLinear(spec), &src, &dst)?;
        Ok(y)
    }

    /// Norms and turns queries and keys, writes keys and values into caches (as
    /// [`Cx::cache_write`]) and gives the queries, in one launch.
    ///
    /// # Errors
    /// When sizes or types do not fit; as [`Cx::cache_write`].
    pub fn decode_heads(
        &mut self,
        new: &NewHeads<'_>,
        caches: [&Tensor; 2],
        at: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "decode_heads";
        let NewHeads { q, k, v, .. } = *new;
        let (&[b, s, _, d], &[kb, ks, hk, kd]) = (q.dims(), k.dims()) else {
            return Err(Error::Shape {
                op: OP,
                left: *q.shape(),
                right: *k.shape(),
            });
        };
        let fits = (b, s, d) == (kb, ks, kd)
            && k.shape() == v.shape()
            && new.cos.rank() == 2
            && new.cos.shape() == new.sin.shape()
            && 2 * new.cos.dims()[1] <= d
            && new.positions.dims() == [b, s]
            && new.positions.dtype() == DType::I32
            && at.dims() == [b]
            && at.dtype() == DType::I32;
        if !fits || self.few_rows() == 0 {
            let what = format!(
                "{} and {} at {}",
                q.shape(),
                k.shape(),
                new.positions.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        for cache in caches {
            same_dtype(OP, q, cache)?;
            let [cb, capacity, ch, cd] = *cache.dims() else {
                return Err(Error::invalid(OP, format!("{cache:?} is no cache")));
            };
            let fits = (cb, ch, cd) == (b, hk, d) && capacity >= s;
            if !fits || !cache.is_contiguous() || !cache.is_writable() {
                return Err(Error::invalid(
                    OP,
                    format!("{cache:?} is no cache of {k:?}"),
                ));
            }
        }
        let worker = self.worker();
        let dense = |t: &Tensor| worker.contiguous(t);
        let out = worker.alloc(OP, q.dtype(), *q.shape())?;
        let (q, k, v) = (dense(q)?, dense(k)?, dense(v)?);
        let (positions, at) = (dense(new.positions)?, dense(at)?);
        let eps = new.norms.map_or(0.0, |((_, eps), _)| eps);
        let src = [
            Some(&q),
            Some(&k),
            Some(&v),
            new.norms.map(|((w, _), _)| w),
            new.norms.map(|(_, (w, _))| w),
            Some(new.cos),
            Some(new.sin),
            Some(&positions),
            Some(&at),
        ];
        let dst = [Some(&out), Some(caches[0]), Some(caches[1])];
        worker.launch(&Kernel::DecodeHeads { eps }, &src, &dst)?;
        Ok(out)
    }
}

/// Refuses what the kernel does not take.
fn check_few(
    cx: &Cx,
    op: &'static str,
    x: &Tensor,
    rows: usize,
    maps: &[LinearMap<'_>],
) -> Result<()> {
    let width = x.dims().last().copied().unwrap_or(0);
    let few = cx.few_rows();
    if rows > few || x.dtype() == DType::F64 || !(width * x.dtype().size()).is_multiple_of(16) {
        let what = format!("{x:?} is not up to {few} rows of whole 16 bytes");
        return Err(Error::invalid(op, what));
    }
    for (weight, bias) in maps {
        same_dtype(op, x, weight)?;
        let fits = weight.rank() == 2 && weight.dims()[1] == width && weight.is_contiguous();
        let bias_fits = bias.is_none_or(|b| b.dims() == [weight.dims()[0]] && b.is_contiguous());
        if !fits || !bias_fits {
            return Err(Error::Shape {
                op,
                left: *x.shape(),
                right: *weight.shape(),
            });
        }
    }
    Ok(())
}
