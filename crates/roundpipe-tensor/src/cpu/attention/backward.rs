//! The backward pass, in one of two ways that give the same bits.
//!
//! Together: one task per key head of a sequence. It walks over the blocks of queries of all its
//! query heads, and for each over the blocks of keys it sees: five products per pair of blocks.
//!
//! Apart: first one task per block of queries for dq, then one per block of keys for dk and dv.
//! Seven products per pair, but as many tasks as there are blocks: for few heads and many threads.
//!
//! The gradient of a block of queries is summed in a buffer of the task over rising keys. Those of
//! keys and values are summed over rising heads and queries where they end up, or in scratch where
//! the tensor's type is narrower than its sums.

use std::ops::Range;

use super::load::{DenseRows, store_transposed};
use super::softmax::weigh_back;
use super::tile::{LANES, Left, TileProduct, multiply};
use super::{
    AttentionFloat, KEYS, Mask, Operand, PerQuery, Problem, QUERIES, RowSequence, converted, grain,
    lanes, query_blocks, readable, with_buffers,
};
use crate::cpu::access::{Call, Real, SharedSlice, slice_mut};
use crate::error::Result;
use crate::kernel::{AttentionSpec, View};

/// Scratch memory: `[sequences, heads]` f64 sums of the sinks' gradients, then the sums of dk and
/// dv.
pub(super) struct GradScratch {
    sinks_bytes: usize,
    dk_bytes: usize,
    dv_bytes: usize,
}

impl GradScratch {
    /// From the operands of the kernel.
    pub fn new(src: &[Option<View>], dst: &[Option<View>]) -> Self {
        let of = |all: &[Option<View>], i: usize| all.get(i).copied().flatten();
        let q = of(src, 0).expect("q is always there");
        let sequences = of(src, 7).map_or(q.shape()[0], |lens| lens.numel().saturating_sub(1));
        let narrow = q.dtype.accumulator() != q.dtype;
        let sums = |i: usize| match of(dst, i) {
            Some(view) if narrow => view.numel() * q.dtype.accumulator().size(),
            _ => 0,
        };
        let sinks_bytes = of(dst, 3).map_or(0, |_| sequences * q.shape()[2] * size_of::<f64>());
        Self {
            sinks_bytes,
            dk_bytes: sums(1),
            dv_bytes: sums(2),
        }
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.sinks_bytes + self.dk_bytes + self.dv_bytes
    }
}

/// Operands and results beside those of [`Problem`].
struct BackwardPass<'a, T: AttentionFloat> {
    problem: Problem<'a, T>,
    o: Operand,
    d_o: Operand,
    lse: u64,
    queries: usize,
    dq: Operand,
    /// The tensors' gradients.
    dk: Operand,
    dv: Operand,
    /// Where they are summed: themselves or scratch.
    dk_sums: Operand,
    dv_sums: Operand,
    /// Address of the sinks' partial sums, where they are wanted.
    sink_parts: u64,
    key_heads: usize,
    /// Sequences that are real; rows without a sequence come after them.
    real: usize,
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn run<T: AttentionFloat>(call: &Call<'_>, spec: AttentionSpec) -> Result<()> {
    // SAFETY: the caller's promise.
    let problem = unsafe { Problem::<T>::new(call, spec, 6)? };
    let sizes = GradScratch::new(call.src, call.dst);
    let scratch = call.scratch.map_or(0, |s| s.ptr);
    let real = call.src_opt(7).map_or(problem.sequences.len(), |lens| {
        lens.numel().saturating_sub(1)
    });
    let (dk, dv) = (Operand::new(call.dst(1)), Operand::new(call.dst(2)));
    let sums = |tensor: Operand, offset: usize| match T::is_acc() {
        true => tensor,
        false => Operand {
            ptr: scratch + offset as u64,
            ..tensor
        },
    };
    let pass = BackwardPass {
        o: Operand::new(call.src(3)),
        d_o: Operand::new(call.src(5)),
        lse: call.src(4).ptr,
        queries: call.src(0).shape()[1],
        dq: Operand::new(call.dst(0)),
        dk,
        dv,
        dk_sums: sums(dk, sizes.sinks_bytes),
        dv_sums: sums(dv, sizes.sinks_bytes + sizes.dk_bytes),
        sink_parts: scratch,
        key_heads: call.src(1).shape()[2],
        real,
        problem,
    };
    // SAFETY: the operands live during the launch.
    unsafe {
        if pass.together(call) {
            pass.run_together(call);
        } else {
            pass.run_apart(call);
        }
        if let Some(view) = call.dst_opt(3) {
            pass.run_sinks(call, view);
        }
    }
    Ok(())
}

/// Which gradients a meeting of two blocks adds to.
#[derive(Clone, Copy, PartialEq)]
enum Want {
    All,
    Queries,
    Keys,
}

/// What is known of each query of a block.
struct Stats<A> {
    /// In units of ln 2.
    lse: PerQuery<A>,
    /// The sum of do · o.
    delta: PerQuery<A>,
}

/// The buffers of a task. `t` at the end: transposed, `[width, QUERIES]`.
struct Buffers<'a, A> {
    /// Queries in units for scores, and their gradient.
    q_t: &'a mut [A],
    dq_t: &'a mut [A],
    /// Queries times the scale, `[QUERIES, width padded]`.
    q: &'a mut [A],
    /// The output's gradient, both ways.
    do_t: &'a mut [A],
    d_o: &'a mut [A],
    /// Weights, and their gradients, then the scores' gradients: `[KEYS, QUERIES]`.
    weights: &'a mut [A],
    grads: &'a mut [A],
    /// Converted keys and values.
    k: &'a mut [A],
    v: &'a mut [A],
}

impl<T: AttentionFloat> BackwardPass<'_, T> {
    /// Key heads of all sequences.
    fn key_heads(&self) -> usize {
        self.problem.sequences.len() * self.key_heads
    }

    /// Multiplications of one query head of the longest sequence.
    fn work(&self) -> usize {
        let pairs = |s: &RowSequence| s.keys.saturating_mul(s.queries);
        let longest = self.problem.sequences.iter().map(pairs).max().unwrap_or(0);
        longest.saturating_mul(self.problem.q.width + self.problem.v.width)
    }

    /// Whether whole key heads keep the threads busy enough. The bits are the same either way.
    fn together(&self, call: &Call<'_>) -> bool {
        let (units, threads) = (self.key_heads(), call.threads.count());
        let small = (units * self.problem.group).saturating_mul(self.work()) < 1 << 18;
        small || 5 * units.next_multiple_of(threads) <= 7 * units
    }

    /// One task per key head of a sequence.
    ///
    /// # Safety
    /// Operands and results exist and nothing else writes the results; all functions here rely on
    /// this.
    unsafe fn run_together(&self, call: &Call<'_>) {
        let units = self.key_heads();
        call.pieces(
            units,
            grain(units, self.work().saturating_mul(self.problem.group)),
            |start, end| {
                for unit in start..end {
                    let (sequence, head) = (
                        &self.problem.sequences[unit / self.key_heads],
                        unit % self.key_heads,
                    );
                    // SAFETY: the caller's promise; every unit has rows of its own.
                    self.with_buffers(|buffers| unsafe {
                        self.clear(sequence, head, 0..sequence.keys);
                        for head in self.query_heads(head) {
                            for queries in query_blocks(sequence.queries) {
                                self.queries_block(sequence, head, queries, Want::All, buffers);
                            }
                        }
                        self.round_keys(sequence, head, 0..sequence.keys);
                    });
                }
            },
        );
    }

    /// One task per block of queries, then one per block of keys.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`].
    unsafe fn run_apart(&self, call: &Call<'_>) {
        let mut units = Vec::new();
        for sequence in &self.problem.sequences {
            for head in 0..self.problem.heads {
                units.extend(
                    query_blocks(sequence.queries).map(|queries| (sequence, head, queries)),
                );
            }
        }
        call.pieces(units.len(), 1, |unit, _| {
            let (sequence, head, queries) = units[unit].clone();
            // SAFETY: the caller's promise; every unit has rows of its own.
            self.with_buffers(|buffers| unsafe {
                self.queries_block(sequence, head, queries, Want::Queries, buffers);
            });
        });
        let mut units = Vec::new();
        for sequence in &self.problem.sequences {
            for head in 0..self.key_heads {
                units.extend(
                    (0..sequence.keys)
                        .step_by(KEYS)
                        .map(|first| (sequence, head, first)),
                );
            }
        }
        call.pieces(units.len(), 1, |unit, _| {
            let (sequence, head, first) = units[unit];
            let keys = first..sequence.keys.min(first + KEYS);
            // SAFETY: as above.
            self.with_buffers(|buffers| unsafe { self.keys_block(sequence, head, keys, buffers) });
        });
    }

    fn query_heads(&self, key_head: usize) -> Range<usize> {
        key_head * self.problem.group..(key_head + 1) * self.problem.group
    }

    fn with_buffers(&self, body: impl FnOnce(&mut Buffers<'_, T::Acc>)) {
        let (d, dv) = (self.problem.q.width, self.problem.v.width);
        let lens = [
            d * QUERIES,
            d * QUERIES,
            d.next_multiple_of(LANES) * QUERIES,
            dv * QUERIES,
            dv.next_multiple_of(LANES) * QUERIES,
            KEYS * QUERIES,
            KEYS * QUERIES,
            converted::<T>(KEYS * d),
            converted::<T>(KEYS * dv),
        ];
        with_buffers(lens, |[q_t, dq_t, q, do_t, d_o, weights, grads, k, v]| {
            body(&mut Buffers {
                q_t,
                dq_t,
                q,
                do_t,
                d_o,
                weights,
                grads,
                k,
                v,
            });
        });
    }

    /// One block of queries with all blocks of keys it sees: its dq and, with [`Want::All`], its
    /// part of dk and dv.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`]; the rows written are this task's.
    unsafe fn queries_block(
        &self,
        sequence: &RowSequence,
        head: usize,
        queries: Range<usize>,
        want: Want,
        buffers: &mut Buffers<'_, T::Acc>,
    ) {
        // SAFETY: the caller's promise.
        let stats = unsafe { self.load(sequence, head, &queries, buffers) };
        let mask = Mask::new(&self.problem.spec, sequence);
        buffers.dq_t.fill(T::Acc::ZERO);
        for keys in mask.blocks(&queries) {
            // SAFETY: as above.
            unsafe { self.block_pair(sequence, head, &queries, keys, want, &stats, buffers) };
        }
        let row = sequence.first_query + queries.start;
        let scale = [T::Acc::of(self.problem.spec.scale); QUERIES];
        // SAFETY: as above; dq is contiguous.
        unsafe {
            let to = self.dq.at::<T>(sequence.batch, row, head);
            store_transposed(
                buffers.dq_t,
                &scale,
                to,
                self.dq.strides[1] as usize,
                queries.len(),
            );
        }
    }

    /// One block of keys with all blocks of queries that see it: its dk and dv.
    ///
    /// # Safety
    /// As [`BackwardPass::queries_block`].
    unsafe fn keys_block(
        &self,
        sequence: &RowSequence,
        key_head: usize,
        keys: Range<usize>,
        buffers: &mut Buffers<'_, T::Acc>,
    ) {
        let mask = Mask::new(&self.problem.spec, sequence);
        // SAFETY: the caller's promise.
        unsafe {
            self.clear(sequence, key_head, keys.clone());
            for head in self.query_heads(key_head) {
                for queries in query_blocks(sequence.queries) {
                    let Some(keys) = mask.seen(&queries, keys.clone()) else {
                        continue;
                    };
                    let stats = self.load(sequence, head, &queries, buffers);
                    self.block_pair(sequence, head, &queries, keys, Want::Keys, &stats, buffers);
                }
            }
            self.round_keys(sequence, key_head, keys);
        }
    }

    /// Brings a block of queries with its gradient.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`].
    unsafe fn load(
        &self,
        sequence: &RowSequence,
        head: usize,
        queries: &Range<usize>,
        buffers: &mut Buffers<'_, T::Acc>,
    ) -> Stats<T::Acc> {
        let p = &self.problem;
        let of = |operand: &Operand| self.rows_of(operand, sequence, head, queries);
        let (q, d_o) = (of(&p.q), of(&self.d_o));
        // SAFETY: the caller's promise; at most QUERIES rows.
        unsafe {
            q.transposed(buffers.q_t, p.binary_scale());
            d_o.transposed(buffers.do_t, T::Acc::ONE);
            if q.width > 0 {
                q.dense(
                    buffers.q,
                    q.width.next_multiple_of(LANES),
                    T::Acc::of(p.spec.scale),
                );
            }
            if d_o.width > 0 {
                d_o.dense(buffers.d_o, d_o.width.next_multiple_of(LANES), T::Acc::ONE);
            }
            self.stats(sequence, head, queries)
        }
    }

    fn rows_of(
        &self,
        operand: &Operand,
        sequence: &RowSequence,
        head: usize,
        queries: &Range<usize>,
    ) -> DenseRows<T> {
        let first = sequence.first_query + queries.start;
        operand.rows(sequence.batch, first..first + queries.len(), head)
    }

    /// What is known of each query of a block.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`].
    unsafe fn stats(
        &self,
        sequence: &RowSequence,
        head: usize,
        queries: &Range<usize>,
    ) -> Stats<T::Acc> {
        let of = |operand: &Operand| self.rows_of(operand, sequence, head, queries);
        // A query that saw nothing has weights 0, as have the lanes past the last query.
        let mut lse = [-T::Acc::NEG_INF; QUERIES];
        let mut delta = [T::Acc::ZERO; QUERIES];
        let first = sequence.first_query + queries.start;
        let at = (sequence.batch * self.problem.heads + head) * self.queries + first;
        // SAFETY: the caller's promise; at most QUERIES rows.
        let saved = unsafe {
            of(&self.o).dots(of(&self.d_o), &mut delta);
            std::slice::from_raw_parts((self.lse as *const T::Acc).add(at), queries.len())
        };
        for (lse, &saved) in lse.iter_mut().zip(saved) {
            if saved != T::Acc::NEG_INF {
                *lse = saved * T::Acc::of(std::f64::consts::LOG2_E);
            }
        }
        Stats { lse, delta }
    }

    /// A block of queries meets a block of keys.
    ///
    /// # Safety
    /// As [`BackwardPass::queries_block`].
    #[allow(
        clippy::too_many_arguments,
        reason = "the coordinates of a pair of blocks and what is known of it"
    )]
    unsafe fn block_pair(
        &self,
        sequence: &RowSequence,
        head: usize,
        queries: &Range<usize>,
        keys: Range<usize>,
        want: Want,
        stats: &Stats<T::Acc>,
        buffers: &mut Buffers<'_, T::Acc>,
    ) {
        let p = &self.problem;
        let (d, dv, count, n) = (p.q.width, p.v.width, keys.len(), lanes(queries.len()));
        let (batch, head) = (sequence.batch, head / p.group);
        let first = sequence.first_key + keys.start;
        let rows = first..first + count;
        let (weights, grads) = (
            &mut buffers.weights[..count * QUERIES],
            &mut buffers.grads[..count * QUERIES],
        );
        // Products into buffers, and sums of keys' rows.
        let inner = |m, k, a, b, c, add| TileProduct {
            m,
            n,
            k,
            a,
            b: (b, QUERIES),
            c: (c, QUERIES),
            add,
        };
        let outer = |n: usize, a, b, c: &Operand| {
            let c = (c.at::<T::Acc>(batch, first, head), c.strides[1] as usize);
            let a = Left::Rows(a, QUERIES as isize);
            TileProduct {
                m: count,
                n,
                k: queries.len(),
                a,
                b: (b, n.next_multiple_of(LANES)),
                c,
                add: true,
            }
        };
        // SAFETY: the rows exist; buffers hold these blocks, dense ones padded to whole lanes; the
        // rows of dk and dv are this task's.
        unsafe {
            let k = readable(p.k.rows::<T>(batch, rows.clone(), head), buffers.k);
            let v = readable(p.v.rows::<T>(batch, rows, head), buffers.v);
            let (q_t, do_t) = (buffers.q_t.as_ptr(), buffers.do_t.as_ptr());
            multiply(inner(
                count,
                d,
                Left::Rows(k.0, k.1),
                q_t,
                weights.as_mut_ptr(),
                false,
            ));
            multiply(inner(
                count,
                dv,
                Left::Rows(v.0, v.1),
                do_t,
                grads.as_mut_ptr(),
                false,
            ));
            Mask::new(&p.spec, sequence).apply(weights, keys, queries);
            weigh_back(weights, grads, &stats.lse, &stats.delta);
            if want != Want::Queries {
                multiply(outer(
                    dv,
                    weights.as_ptr(),
                    buffers.d_o.as_ptr(),
                    &self.dv_sums,
                ));
                multiply(outer(d, grads.as_ptr(), buffers.q.as_ptr(), &self.dk_sums));
            }
            if want != Want::Keys {
                let dq_t = buffers.dq_t.as_mut_ptr();
                multiply(inner(
                    d,
                    count,
                    Left::Cols(k.0, k.1),
                    grads.as_ptr(),
                    dq_t,
                    true,
                ));
            }
        }
    }

    /// Sets the sums of keys to zero.
    ///
    /// # Safety
    /// As [`BackwardPass::queries_block`].
    unsafe fn clear(&self, sequence: &RowSequence, head: usize, keys: Range<usize>) {
        for operand in [&self.dk_sums, &self.dv_sums] {
            for key in keys.clone() {
                let at = operand.at::<T::Acc>(sequence.batch, sequence.first_key + key, head);
                // SAFETY: the caller's promise; all bits zero is 0.
                unsafe { at.write_bytes(0, operand.width) };
            }
        }
    }

    /// Rounds the sums of keys to the tensor's type, where they are apart.
    ///
    /// # Safety
    /// As [`BackwardPass::queries_block`].
    unsafe fn round_keys(&self, sequence: &RowSequence, head: usize, keys: Range<usize>) {
        if T::is_acc() {
            return;
        }
        for (sums, tensor) in [(&self.dk_sums, &self.dk), (&self.dv_sums, &self.dv)] {
            // Without elements there may be no scratch either, and so no address for a slice.
            let keys = if tensor.width == 0 {
                0..0
            } else {
                keys.clone()
            };
            for key in keys {
                let row = sequence.first_key + key;
                let from = sums.at::<T::Acc>(sequence.batch, row, head);
                let to = tensor.at::<T>(sequence.batch, row, head);
                // SAFETY: the caller's promise; both rows have the tensor's width.
                let (from, to) = unsafe {
                    (
                        std::slice::from_raw_parts(from, tensor.width),
                        std::slice::from_raw_parts_mut(to, tensor.width),
                    )
                };
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, x)| *to = T::down(*x));
            }
        }
    }

    /// The gradients of the sinks, -weight · delta summed over a head's queries: first per
    /// sequence, then over sequences.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`]; `view` is the sinks' gradient.
    unsafe fn run_sinks(&self, call: &Call<'_>, view: &View) {
        let (sequences, heads) = (&self.problem.sequences[..self.real], self.problem.heads);
        // SAFETY: the caller's promise; scratch holds `[sequences, heads]` first.
        let (parts, total) = unsafe {
            let parts: &mut [f64] = match self.real * heads {
                0 => &mut [],
                len => std::slice::from_raw_parts_mut(self.sink_parts as *mut f64, len),
            };
            (parts, slice_mut::<T::Acc>(view))
        };
        let shared = SharedSlice::new(parts);
        let work = self.queries * self.problem.v.width;
        let units = sequences.len() * heads;
        call.pieces(units, grain(units, work), |start, end| {
            // SAFETY: pieces do not overlap.
            let parts = unsafe { shared.part(start, end) };
            for (unit, part) in (start..end).zip(parts) {
                // SAFETY: the caller's promise.
                *part = unsafe { self.sink_part(&sequences[unit / heads], unit % heads) };
            }
        });
        // SAFETY: the tasks are done.
        let parts = unsafe { shared.part(0, units) };
        for (head, total) in total.iter_mut().enumerate() {
            *total = T::Acc::of(parts.iter().skip(head).step_by(heads).sum());
        }
    }

    /// One head's queries of one sequence.
    ///
    /// # Safety
    /// As [`BackwardPass::run_together`].
    unsafe fn sink_part(&self, sequence: &RowSequence, head: usize) -> f64 {
        let Some(sink) = self.problem.sink(head) else {
            return 0.0;
        };
        let mut sum = 0.0;
        for queries in query_blocks(sequence.queries) {
            // SAFETY: the caller's promise.
            let Stats { lse, delta } = unsafe { self.stats(sequence, head, &queries) };
            let weight = |i: usize| (sink - lse[i]).f64().exp2();
            sum -= (0..queries.len())
                .map(|i| weight(i) * delta[i].f64())
                .sum::<f64>();
        }
        sum
    }
}
