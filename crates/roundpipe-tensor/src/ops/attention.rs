//! Attention.

use crate::cx::{Cx, float, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{AttentionSpec, Kernel};
use crate::shape::Shape;
use crate::tape::Back;
use crate::tensor::Tensor;
use crate::worker::Worker;

const OP: &str = "attention";

/// How queries attend to keys; the default is: every query to every key, scaled by 1/√d.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention<'a> {
    /// Factor of the scores; 1/√d when `None`.
    pub scale: Option<f64>,
    /// A query sees keys up to its own position. The last query stands at the last key.
    pub causal: bool,
    /// A query at position p sees keys at positions greater than p - window.
    pub window: Option<usize>,
    /// One more score per query head, `[heads]`, which takes weight and gives no value.
    pub sinks: Option<&'a Tensor>,
    /// Cumulative lengths (i32) of the queries and keys of sequences packed into one row of the
    /// batch: sequence i has rows `lens[i]..lens[i + 1]`. Rows outside attend to nothing.
    pub lens: Option<(&'a Tensor, &'a Tensor)>,
    /// The backward may add in an order that is not the same every time, where a device is faster
    /// so: gradients of equal operands then differ in their last bits from run to run.
    pub any_order: bool,
}

impl Cx {
    /// softmax(scale · q kᵀ) v per head, in memory linear in the sequence: q `[b, sq, hq, d]`, k
    /// `[b, sk, hk, d]`, v `[b, sk, hk, dv]` give `[b, sq, hq, dv]`. hq is a multiple of hk: query
    /// heads share key heads in order. A query that sees no key gives 0.
    ///
    /// # Errors
    /// When shapes or types do not fit, or cumulative lengths do not ascend or leave the rows.
    pub fn attention(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        how: &Attention<'_>,
    ) -> Result<Tensor> {
        Ok(self.attention_known(q, k, v, how, None)?.0)
    }

    /// As [`Cx::attention`], with the logarithm of each query's sum of weights, `[b, hq, sq]` in
    /// the accumulator type, beside the result. Given both as `known`, of the same operands,
    /// nothing is computed: for a recompute of long sequences, whose forward kept them.
    ///
    /// # Errors
    /// As [`Cx::attention`], and for known values of other shapes or types.
    pub fn attention_known(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        how: &Attention<'_>,
        known: Option<(Tensor, Tensor)>,
    ) -> Result<(Tensor, Tensor)> {
        check(q, k, v, how)?;
        let [b, sq, hq, d] = *q.dims() else {
            unreachable!("checked above")
        };
        let spec = AttentionSpec {
            scale: how.scale.unwrap_or(1.0 / (d as f64).sqrt()),
            causal: how.causal,
            window: how.window,
            any_order: how.any_order,
        };
        let worker = self.worker();
        let [dense_q, dense_k, dense_v] = [q, k, v].map(|t| rows_dense(worker, t));
        let dense = |t: Option<&Tensor>| t.map(|t| worker.contiguous(&t.detach())).transpose();
        let saved = SavedAttention {
            q: dense_q?,
            k: dense_k?,
            v: dense_v?,
            sinks: dense(how.sinks)?,
            lens_q: dense(how.lens.map(|l| l.0))?,
            lens_k: dense(how.lens.map(|l| l.1))?,
            spec,
        };
        let shapes = (
            Shape::new(&[b, sq, hq, v.dims()[3]])?,
            Shape::new(&[b, hq, sq])?,
        );
        let (o, lse) = match known {
            Some((o, lse)) => {
                let types = (q.dtype(), q.dtype().accumulator());
                if (*o.shape(), *lse.shape()) != shapes || (o.dtype(), lse.dtype()) != types {
                    let what = format!(
                        "known results {} {} of queries {}",
                        o.shape(),
                        lse.shape(),
                        q.shape()
                    );
                    return Err(Error::invalid(OP, what));
                }
                (
                    worker.contiguous(&o)?.detach(),
                    worker.contiguous(&lse)?.detach(),
                )
            }
            None => {
                let o = worker.alloc(OP, q.dtype(), shapes.0)?;
                let lse = worker.alloc(OP, q.dtype().accumulator(), shapes.1)?;
                let [sinks, lens_q, lens_k] = saved.options();
                let src = [
                    Some(&saved.q),
                    Some(&saved.k),
                    Some(&saved.v),
                    sinks,
                    lens_q,
                    lens_k,
                ];
                worker.launch(&Kernel::Attention(spec), &src, &[Some(&o), Some(&lse)])?;
                (o, lse)
            }
        };
        let inputs: Vec<&Tensor> = [q, k, v].into_iter().chain(how.sinks).collect();
        let (kept, sums) = (o.detach(), lse.detach());
        let o = self.record_one(OP, &inputs, o, move |bx| saved.backward(bx, &kept, &sums))?;
        Ok((o, lse))
    }
}

/// What the backward needs beside output and lse.
struct SavedAttention {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Option<Tensor>,
    lens_q: Option<Tensor>,
    lens_k: Option<Tensor>,
    spec: AttentionSpec,
}

impl SavedAttention {
    fn options(&self) -> [Option<&Tensor>; 3] {
        [
            self.sinks.as_ref(),
            self.lens_q.as_ref(),
            self.lens_k.as_ref(),
        ]
    }

    fn backward(self, bx: &mut Back<'_>, o: &Tensor, lse: &Tensor) -> Result<()> {
        let d_o = bx.dy()?;
        let worker = bx.worker().clone();
        let like = |t: &Tensor| worker.alloc(OP, t.dtype(), *t.shape());
        let (dq, dk, dv) = (like(&self.q)?, like(&self.k)?, like(&self.v)?);
        let d_sinks = match &self.sinks {
            Some(s) if bx.needs(3) => {
                Some(worker.alloc(OP, s.dtype().accumulator(), *s.shape())?)
            }
            _ => None,
        };
        let [sinks, lens_q, lens_k] = self.options();
        let src = [&self.q, &self.k, &self.v, o, lse, &d_o].map(Some);
        let src: Vec<_> = src.into_iter().chain([sinks, lens_q, lens_k]).collect();
        let dst = [Some(&dq), Some(&dk), Some(&dv), d_sinks.as_ref()];
        worker.launch(&Kernel::AttentionGrad(self.spec), &src, &dst)?;
        drop(d_o);
        drop(self);
        bx.give(0, dq)?;
        bx.give(1, dk)?;
        bx.give(2, dv)?;
        d_sinks.map_or(Ok(()), |d| bx.give(3, d))
    }
}

/// The tensor with a contiguous last dimension, cut off from the tape.
pub(super) fn rows_dense(worker: &Worker, t: &Tensor) -> Result<Tensor> {
    let last = t.rank() - 1;
    let dense = t.layout().strides()[last] == 1 || t.dims()[last] <= 1;
    if dense {
        Ok(t.detach())
    } else {
        Ok(worker.contiguous(t)?.detach())
    }
}

pub(super) fn check(q: &Tensor, k: &Tensor, v: &Tensor, how: &Attention<'_>) -> Result<()> {
    float(OP, q)?;
    for other in [k, v].into_iter().chain(how.sinks) {
        same_dtype(OP, q, other)?;
    }
    let (&[b, _, hq, d], &[kb, sk, hk, kd]) = (q.dims(), k.dims()) else {
        return Err(Error::Shape {
            op: OP,
            left: *q.shape(),
            right: *k.shape(),
        });
    };
    let grouped = if hk == 0 { hq == 0 } else { hq % hk == 0 };
    if (b, d) != (kb, kd) || !grouped {
        return Err(Error::Shape {
            op: OP,
            left: *q.shape(),
            right: *k.shape(),
        });
    }
    if v.rank() != 4 || v.dims()[..3] != [b, sk, hk] {
        return Err(Error::Shape {
            op: OP,
            left: *k.shape(),
            right: *v.shape(),
        });
    }
    if let Some(sinks) = how.sinks
        && sinks.dims() != [hq]
    {
        return Err(Error::Shape {
            op: OP,
            left: *q.shape(),
            right: *sinks.shape(),
        });
    }
    how.lens
        .map_or(Ok(()), |(lens_q, lens_k)| check_lens(b, lens_q, lens_k))
}

/// Types and sizes only: the values are the device's and checked there.
fn check_lens(batch: usize, lens_q: &Tensor, lens_k: &Tensor) -> Result<()> {
    for lens in [lens_q, lens_k] {
        if lens.dtype() != DType::I32 {
            let (dtype, shape) = (lens.dtype(), *lens.shape());
            return Err(Error::DType {
                op: OP,
                dtype,
                shape,
                expected: "cumulative lengths are i32",
            });
        }
    }
    if lens_q.rank() != 1 || lens_q.shape() != lens_k.shape() || lens_q.numel() == 0 {
        return Err(Error::Shape {
            op: OP,
            left: *lens_q.shape(),
            right: *lens_k.shape(),
        });
    }
    if batch != 1 {
        return Err(Error::invalid(
            OP,
            format!("packed sequences need a batch of 1, not {batch}"),
        ));
    }
    Ok(())
}
