//! The backward pass: one task per key head of one sequence.
//!
//! A task walks over the blocks of queries of all its query heads, and for each over the blocks of keys it
//! sees. The gradient of the queries is summed in a buffer of the task; those of keys and values are
//! summed where they end up, or in scratch where the tensor's type is narrower than its sums.

use std::ops::Range;

use super::load::store_transposed;
use super::softmax::weigh_back;
use super::tile::{LANES, Left, Product, multiply};
use super::{
    KEYS, Operand, PerQuery, Problem, QUERIES, Sequence, Sight, Value, converted, grain, lanes, query_blocks,
    readable, with_buffers,
};
use crate::cpu::access::{Call, Real, slice_mut};
use crate::error::Result;
use crate::kernel::{AttentionSpec, View};

/// Scratch memory: `[sequences, heads]` f64 sums of the sinks' gradients, then the sums of dk and dv.
pub(super) struct Scratch {
    sinks_bytes: usize,
    dk_bytes: usize,
    dv_bytes: usize,
}

impl Scratch {
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
        Self { sinks_bytes, dk_bytes: sums(1), dv_bytes: sums(2) }
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.sinks_bytes + self.dk_bytes + self.dv_bytes
    }
}

/// Operands and results beside those of [`Problem`].
struct Pass<'a, T: Value> {
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
    /// Address of the sinks' partial sums, if wanted.
    d_sinks: Option<u64>,
    /// Sequences that are real; rows without a sequence come after them.
    real: usize,
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn run<T: Value>(call: &Call<'_>, spec: AttentionSpec) -> Result<()> {
    // SAFETY: the caller's promise.
    let problem = unsafe { Problem::<T>::new(call, spec, 6)? };
    let sizes = Scratch::new(call.src, call.dst);
    let scratch = call.scratch.map_or(0, |s| s.ptr);
    let real = call.src_opt(7).map_or(problem.sequences.len(), |lens| lens.numel().saturating_sub(1));
    let (dk, dv) = (Operand::new(call.dst(1)), Operand::new(call.dst(2)));
    let sums = |tensor: Operand, offset: usize| match T::is_acc() {
        true => tensor,
        false => Operand { ptr: scratch + offset as u64, ..tensor },
    };
    let pass = Pass {
        o: Operand::new(call.src(3)),
        d_o: Operand::new(call.src(5)),
        lse: call.src(4).ptr,
        queries: call.src(0).shape()[1],
        dq: Operand::new(call.dst(0)),
        dk,
        dv,
        dk_sums: sums(dk, sizes.sinks_bytes),
        dv_sums: sums(dv, sizes.sinks_bytes + sizes.dk_bytes),
        d_sinks: call.dst_opt(3).map(|_| scratch),
        real,
        problem,
    };
    let heads = call.src(1).shape()[2];
    let units = pass.problem.sequences.len() * heads;
    let longest = pass.problem.sequences.iter().map(|s| s.keys * s.queries).max().unwrap_or(0);
    let work = longest * pass.problem.group * (pass.problem.q.width + pass.problem.v.width);
    call.pieces(units, grain(units, work), |start, end| {
        for unit in start..end {
            // SAFETY: operands live during the launch; every unit has rows of its own.
            unsafe { pass.head(unit / heads, unit % heads) }
        }
    });
    if let Some(view) = call.dst_opt(3) {
        // SAFETY: the caller's promise; the tasks are done.
        unsafe { pass.sum_sinks(view) }
    }
    Ok(())
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

impl<T: Value> Pass<'_, T> {
    /// Everything of one key head of one sequence.
    ///
    /// # Safety
    /// Operands and results exist; nobody else writes this head's rows or its query heads' rows.
    unsafe fn head(&self, index: usize, key_head: usize) {
        let p = &self.problem;
        let (d, dv) = (p.q.width, p.v.width);
        let (wide, wide_v) = (d.next_multiple_of(LANES), dv.next_multiple_of(LANES));
        let lens = [
            d * QUERIES,
            d * QUERIES,
            wide * QUERIES,
            dv * QUERIES,
            wide_v * QUERIES,
            KEYS * QUERIES,
            KEYS * QUERIES,
            converted::<T>(KEYS * d),
            converted::<T>(KEYS * dv),
        ];
        with_buffers(lens, |[q_t, dq_t, q, do_t, d_o, weights, grads, k, v]| {
            let mut buffers = Buffers { q_t, dq_t, q, do_t, d_o, weights, grads, k, v };
            let sequence = &p.sequences[index];
            // SAFETY: the caller's promise.
            unsafe {
                self.clear(sequence, key_head);
                for head in key_head * p.group..(key_head + 1) * p.group {
                    let mut d_sink = 0.0;
                    for queries in query_blocks(sequence.queries) {
                        d_sink += self.block(sequence, head, queries, &mut buffers);
                    }
                    if let Some(sums) = self.d_sinks.filter(|_| index < self.real) {
                        *(sums as *mut f64).add(index * p.heads + head) = d_sink;
                    }
                }
                self.settle(sequence, key_head);
            }
        });
    }

    /// One block of queries: its dq, and its part of dk and dv. Gives its part of the sink's gradient.
    ///
    /// # Safety
    /// As [`Pass::head`].
    unsafe fn block(
        &self,
        sequence: &Sequence,
        head: usize,
        queries: Range<usize>,
        buffers: &mut Buffers<'_, T::Acc>,
    ) -> f64 {
        // SAFETY: the caller's promise.
        let (lse, delta) = unsafe { self.load(sequence, head, &queries, buffers) };
        let sight = Sight::new(&self.problem.spec, sequence);
        let mut add = false;
        for keys in sight.blocks(&queries) {
            // SAFETY: as above.
            unsafe { self.meet(sequence, head, &queries, keys, &sight, (&lse, &delta), add, buffers) };
            add = true;
        }
        if !add {
            buffers.dq_t.fill(T::Acc::ZERO);
        }
        let row = sequence.first_query + queries.start;
        let scale = [T::Acc::of(self.problem.spec.scale); QUERIES];
        // SAFETY: as above; dq is contiguous.
        unsafe {
            let to = self.dq.at::<T>(sequence.batch, row, head);
            store_transposed(buffers.dq_t, &scale, to, self.dq.strides[1] as usize, queries.len());
        }
        let Some(sink) = self.problem.sink(head) else { return 0.0 };
        let part = |i: usize| -((sink - lse[i]).f64().exp2() * delta[i].f64());
        (0..queries.len()).map(part).sum()
    }

    /// Brings a block of queries with its gradient; gives lse in units of ln 2 and the sums of do · o.
    ///
    /// # Safety
    /// As [`Pass::head`].
    unsafe fn load(
        &self,
        sequence: &Sequence,
        head: usize,
        queries: &Range<usize>,
        buffers: &mut Buffers<'_, T::Acc>,
    ) -> (PerQuery<T::Acc>, PerQuery<T::Acc>) {
        let p = &self.problem;
        let first = sequence.first_query + queries.start;
        let rows = first..first + queries.len();
        let of = |operand: &Operand| operand.rows::<T>(sequence.batch, rows.clone(), head);
        let (q, o, d_o) = (of(&p.q), of(&self.o), of(&self.d_o));
        // A query that saw nothing has weights 0, as have the lanes past the last query.
        let mut lse = [-T::Acc::NEG_INF; QUERIES];
        let mut delta = [T::Acc::ZERO; QUERIES];
        let at = (sequence.batch * p.heads + head) * self.queries + first;
        // SAFETY: the caller's promise; at most QUERIES rows.
        unsafe {
            q.transposed(buffers.q_t, p.binary_scale());
            d_o.transposed(buffers.do_t, T::Acc::ONE);
            if q.width > 0 {
                q.dense(buffers.q, q.width.next_multiple_of(LANES), T::Acc::of(p.spec.scale));
            }
            if d_o.width > 0 {
                d_o.dense(buffers.d_o, d_o.width.next_multiple_of(LANES), T::Acc::ONE);
            }
            o.dots(d_o, &mut delta);
            let saved = std::slice::from_raw_parts((self.lse as *const T::Acc).add(at), queries.len());
            for (lse, &saved) in lse.iter_mut().zip(saved) {
                if saved != T::Acc::NEG_INF {
                    *lse = saved * T::Acc::of(std::f64::consts::LOG2_E);
                }
            }
        }
        (lse, delta)
    }

    /// A block of queries meets a block of keys.
    ///
    /// # Safety
    /// As [`Pass::head`].
    #[allow(clippy::too_many_arguments, reason = "the coordinates of a block and what is known about it")]
    unsafe fn meet(
        &self,
        sequence: &Sequence,
        head: usize,
        queries: &Range<usize>,
        keys: Range<usize>,
        sight: &Sight,
        (lse, delta): (&PerQuery<T::Acc>, &PerQuery<T::Acc>),
        add: bool,
        buffers: &mut Buffers<'_, T::Acc>,
    ) {
        let p = &self.problem;
        let (d, dv, count, n) = (p.q.width, p.v.width, keys.len(), lanes(queries.len()));
        let (batch, head) = (sequence.batch, head / p.group);
        let first = sequence.first_key + keys.start;
        let rows = first..first + count;
        // SAFETY: the rows exist and are only read; buffers hold KEYS rows.
        let (k, v) = unsafe {
            (
                readable(p.k.rows::<T>(batch, rows.clone(), head), buffers.k),
                readable(p.v.rows::<T>(batch, rows, head), buffers.v),
            )
        };
        let (weights, grads) =
            (&mut buffers.weights[..count * QUERIES], &mut buffers.grads[..count * QUERIES]);
        let rows_by_columns = |m, n, k, a, b, c, add| Product { m, n, k, a, b, c, add };
        let block = |m, k, a, b, c, add| rows_by_columns(m, n, k, a, (b, QUERIES), (c, QUERIES), add);
        let into = |n, a, b, c: &Operand| {
            let to = (c.at::<T::Acc>(batch, first, head), c.strides[1] as usize);
            rows_by_columns(count, n, queries.len(), Left::Rows(a, QUERIES as isize), b, to, true)
        };
        // SAFETY: buffers hold these blocks; the rows of dk and dv are this task's; dense operands are
        // padded to whole lanes.
        unsafe {
            multiply(block(
                count,
                d,
                Left::Rows(k.0, k.1),
                buffers.q_t.as_ptr(),
                weights.as_mut_ptr(),
                false,
            ));
            multiply(block(
                count,
                dv,
                Left::Rows(v.0, v.1),
                buffers.do_t.as_ptr(),
                grads.as_mut_ptr(),
                false,
            ));
            sight.hide(weights, keys, queries);
            weigh_back(weights, grads, lse, delta);
            let wide = (buffers.d_o.as_ptr(), dv.next_multiple_of(LANES));
            multiply(into(dv, weights.as_ptr(), wide, &self.dv_sums));
            let wide = (buffers.q.as_ptr(), d.next_multiple_of(LANES));
            multiply(into(d, grads.as_ptr(), wide, &self.dk_sums));
            multiply(block(d, count, Left::Cols(k.0, k.1), grads.as_ptr(), buffers.dq_t.as_mut_ptr(), add));
        }
    }

    /// Sets the sums of a key head to zero.
    ///
    /// # Safety
    /// As [`Pass::head`].
    unsafe fn clear(&self, sequence: &Sequence, head: usize) {
        for operand in [&self.dk_sums, &self.dv_sums] {
            for row in sequence.first_key..sequence.first_key + sequence.keys {
                let at = operand.at::<T::Acc>(sequence.batch, row, head);
                // SAFETY: the caller's promise; all bits zero is 0.
                unsafe { at.write_bytes(0, operand.width) };
            }
        }
    }

    /// Rounds the sums of a key head to the tensor's type, where they are apart.
    ///
    /// # Safety
    /// As [`Pass::head`].
    unsafe fn settle(&self, sequence: &Sequence, head: usize) {
        if T::is_acc() {
            return;
        }
        for (sums, tensor) in [(&self.dk_sums, &self.dk), (&self.dv_sums, &self.dv)] {
            for row in sequence.first_key..sequence.first_key + sequence.keys {
                let from = sums.at::<T::Acc>(sequence.batch, row, head);
                let to = tensor.at::<T>(sequence.batch, row, head);
                // SAFETY: the caller's promise; both rows have the tensor's width.
                let (from, to) = unsafe {
                    (
                        std::slice::from_raw_parts(from, tensor.width),
                        std::slice::from_raw_parts_mut(to, tensor.width),
                    )
                };
                to.iter_mut().zip(from).for_each(|(to, x)| *to = T::down(*x));
            }
        }
    }

    /// Adds the sinks' partial sums, sequence by sequence.
    ///
    /// # Safety
    /// The tasks are done; `view` is the sinks' gradient.
    unsafe fn sum_sinks(&self, view: &View) {
        let heads = self.problem.heads;
        let Some(sums) = self.d_sinks.filter(|_| heads > 0) else { return };
        // SAFETY: the caller's promise; scratch holds `[sequences, heads]`, all written by the tasks.
        let (sums, to) = unsafe {
            let sums: &[f64] = match self.real {
                0 => &[],
                real => std::slice::from_raw_parts(sums as *const f64, real * heads),
            };
            (sums, slice_mut::<T::Acc>(view))
        };
        for (head, to) in to.iter_mut().enumerate() {
            *to = T::Acc::of(sums.iter().skip(head).step_by(heads).sum());
        }
    }
}
