//! Keys and values that generation keeps: written in place, and attended to.
//!
//! A cache is a tensor `[b, capacity, heads, d]` of which row i holds `at[i]` places so far. New
//! keys are written behind them, so no token copies those before it; attention reads the filled part
//! of each row. `at` lies on the device: a step of decoding has the same operands whatever the
//! lengths are, and nothing waits for the host.
//!
//! Rows of a table that come apart from the others are written the same way ([`Worker::write_rows`]).
//!
//! No gradient passes here: what a tape records must not change afterwards.
//!
//! # Invariants
//! - A cache is written by [`Cx::cache_write`] alone, a table by [`Worker::write_rows`], in the order of the compute lane; places
//!   outside the written ones stay as they were.
//! - What a row of queries gets depends on its own row of the cache and its own `at` alone.

use super::attention::{Attention, check, rows_dense};
use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{AttentionSpec, Kernel};
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

impl Worker {
    /// Writes `rows` `[n, c]` into `table` `[m, c]` in place: row i at `at[i]` (i32), each place once.
    /// Other rows stay as they are. All holders of the table see it.
    ///
    /// # Errors
    /// When shapes or types do not fit, or a place lies outside the table.
    pub fn write_rows(&self, table: &Tensor, rows: &Tensor, at: &Tensor) -> Result<()> {
        const OP: &str = "write_rows";
        same_dtype(OP, table, rows)?;
        let ([places, width], [count, row_width]) = (table.dims(), rows.dims()) else {
            return Err(Error::Shape {
                op: OP,
                left: *table.shape(),
                right: *rows.shape(),
            });
        };
        let all_dense = [table, rows, at]
            .iter()
            .all(|tensor| tensor.is_contiguous());
        let fits = width == row_width && at.dims() == [*count] && at.dtype() == DType::I32;
        if !all_dense || !fits || !table.is_writable() {
            let what = format!("{rows:?} at {at:?} of {table:?}");
            return Err(Error::invalid(OP, what));
        }
        let cache = Shape::new(&[1, *places, 1, *width])?;
        let rows_shape = Shape::new(&[*count, 1, 1, *width])?;
        let cache = table.detach().relaid(Layout::contiguous(cache));
        let rows = rows.detach().relaid(Layout::contiguous(rows_shape));
        self.launch(
            &Kernel::CacheWrite,
            &[Some(&rows), Some(at)],
            &[Some(&cache)],
        )
    }
}

impl Cx {
    /// An empty cache, `[b, capacity, heads, d]`, in memory for values that stay.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn cache(&mut self, dtype: DType, dims: [usize; 4]) -> Result<Tensor> {
        let cache = self
            .worker()
            .alloc_long("cache", dtype, Shape::new(&dims)?)?;
        // Whatever a kernel reads of unfilled places is multiplied by 0, so it must be a number.
        self.worker()
            .launch(&Kernel::Fill { value: 0.0 }, &[], &[Some(&cache)])?;
        Ok(cache)
    }

    /// Writes `x` `[b, s, h, d]` into `cache` `[b, capacity, h, d]` in place: row i from place
    /// `at[i]` (i32) on. All holders of the cache see it.
    ///
    /// # Errors
    /// When shapes or types do not fit, a row would pass the capacity, or a gradient would have to
    /// pass.
    pub fn cache_write(&mut self, cache: &Tensor, x: &Tensor, at: &Tensor) -> Result<()> {
        const OP: &str = "cache_write";
        same_dtype(OP, cache, x)?;
        check_at(OP, at, x)?;
        let fits = cache.rank() == 4
            && x.rank() == 4
            && (cache.dims()[0], &cache.dims()[2..]) == (x.dims()[0], &x.dims()[2..])
            && cache.dims()[1] >= x.dims()[1];
        if !fits {
            return Err(Error::Shape {
                op: OP,
                left: *cache.shape(),
                right: *x.shape(),
            });
        }
        if !cache.is_contiguous() || !cache.is_writable() {
            let what = format!("{cache:?} is no cache: make one with `Cx::cache`");
            return Err(Error::invalid(OP, what));
        }
        self.no_gradient(OP, &[cache, x])?;
        let worker = self.worker();
        let (x, at) = (worker.contiguous(x)?, worker.contiguous(at)?);
        worker.launch(&Kernel::CacheWrite, &[Some(&x), Some(&at)], &[Some(cache)])
    }

    /// Attention of q `[b, s, hq, d]` to the filled part of caches k and v: query j of row i stands
    /// at place `at[i] + j` (i32) and sees the places up to its own, within the window. The same
    /// bits as [`Cx::attention`] of that row alone on a cpu.
    ///
    /// # Errors
    /// As [`Cx::attention`], for cumulative lengths, and when a row would pass the capacity or a
    /// gradient would have to pass.
    pub fn cached_attention(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        at: &Tensor,
        how: &Attention<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "cached_attention";
        check(q, k, v, how)?;
        check_at(OP, at, q)?;
        if how.lens.is_some() || !how.causal {
            let what = "the filled part of a cache is one causal sequence per row";
            return Err(Error::invalid(OP, what));
        }
        self.no_gradient(OP, &[q, k, v])?;
        let [b, sq, hq, d] = *q.dims() else {
            unreachable!("checked above")
        };
        let spec = AttentionSpec {
            scale: how.scale.unwrap_or(1.0 / (d as f64).sqrt()),
            causal: true,
            window: how.window,
            any_order: false,
        };
        let worker = self.worker();
        let [q, k, v] = [q, k, v].map(|t| rows_dense(worker, t));
        let (q, k, v) = (q?, k?, v?);
        let sinks = how.sinks.map(|t| worker.contiguous(t)).transpose()?;
        let at = worker.contiguous(at)?;
        let o = worker.alloc(OP, q.dtype(), Shape::new(&[b, sq, hq, v.dims()[3]])?)?;
        let lse = worker.alloc(OP, q.dtype().accumulator(), Shape::new(&[b, hq, sq])?)?;
        let src = [Some(&q), Some(&k), Some(&v), sinks.as_ref(), Some(&at)];
        worker.launch(
            &Kernel::CachedAttention(spec),
            &src,
            &[Some(&o), Some(&lse)],
        )?;
        Ok(o)
    }

    fn no_gradient(&self, op: &'static str, inputs: &[&Tensor]) -> Result<()> {
        if self.tracks(inputs) {
            let what = "a cache passes no gradient; detach its operands or use `Cx::infer`";
            return Err(Error::invalid(op, what));
        }
        Ok(())
    }
}

/// One place per row of `x`.
fn check_at(op: &'static str, at: &Tensor, x: &Tensor) -> Result<()> {
    if at.dtype() != DType::I32 {
        return Err(Error::DType {
            op,
            dtype: at.dtype(),
            shape: *at.shape(),
            expected: "places are i32",
        });
    }
    if at.rank() != 1 || x.rank() == 0 || at.dims()[0] != x.dims()[0] {
        return Err(Error::Shape {
            op,
            left: *at.shape(),
            right: *x.shape(),
        });
    }
    Ok(())
}
