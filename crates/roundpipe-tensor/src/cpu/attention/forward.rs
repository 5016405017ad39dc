//! The forward pass: one task per block of queries of one head.

use std::ops::Range;

use super::load::store_transposed;
use super::softmax::{Running, online_softmax, scale};
use super::tile::{Left, TileProduct, multiply};
use super::{
    AttentionFloat, KEYS, Mask, Operand, PerQuery, Problem, QUERIES, RowSequence, converted, grain,
    lanes, query_blocks, readable, with_buffers,
};
use crate::cpu::access::{Call, Real};
use crate::error::Result;
use crate::kernel::AttentionSpec;

/// A block of queries of one head.
struct QueryBlock {
    sequence: RowSequence,
    head: usize,
    queries: Range<usize>,
}

/// Where results go.
struct ForwardOutput {
    o: Operand,
    /// Address of `[batch, heads, queries]`.
    lse: u64,
    heads: usize,
    queries: usize,
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn run<T: AttentionFloat>(call: &Call<'_>, spec: AttentionSpec) -> Result<()> {
    // SAFETY: the caller's promise.
    let problem = unsafe { Problem::<T>::new(call, spec, 3)? };
    let (o, lse, queries) = (
        Operand::new(call.dst(0)),
        call.dst(1).ptr,
        call.src(0).shape()[1],
    );
    let output = ForwardOutput {
        o,
        lse,
        heads: problem.heads,
        queries,
    };
    let mut units = Vec::new();
    for &sequence in &problem.sequences {
        for head in 0..problem.heads {
            units.extend(query_blocks(sequence.queries).map(|queries| QueryBlock {
                sequence,
                head,
                queries,
            }));
        }
    }
    let longest = problem.sequences.iter().map(|s| s.keys).max().unwrap_or(0);
    let d_total = problem.q.width + problem.v.width;
    let work = QUERIES
        .min(output.queries)
        .saturating_mul(longest)
        .saturating_mul(d_total);
    call.pieces(units.len(), grain(units.len(), work), |start, end| {
        for unit in &units[start..end] {
            // SAFETY: operands live during the launch; every unit has rows of its own.
            unsafe { attend(&problem, unit, &output) }
        }
    });
    Ok(())
}

/// Computes the rows of one unit.
///
/// # Safety
/// Operands and outputs exist; nothing else writes this unit's rows.
unsafe fn attend<T: AttentionFloat>(
    problem: &Problem<'_, T>,
    unit: &QueryBlock,
    output: &ForwardOutput,
) {
    let (d, dv) = (problem.q.width, problem.v.width);
    let lens = [
        d * QUERIES,
        dv * QUERIES,
        KEYS * QUERIES,
        converted::<T>(KEYS * d),
        converted::<T>(KEYS * dv),
    ];
    with_buffers(lens, |[q, o, scores, k, v]| {
        // SAFETY: the caller's promise.
        let running = unsafe { blocks(problem, unit, q, o, scores, (k, v)) };
        // SAFETY: as above.
        unsafe { finish::<T>(unit, o, &running, output) };
    });
}

/// Meets one block of keys after the other; leaves the unscaled, transposed output in `o`.
///
/// # Safety
/// As [`attend`].
unsafe fn blocks<T: AttentionFloat>(
    problem: &Problem<'_, T>,
    unit: &QueryBlock,
    q: &mut [T::Acc],
    o: &mut [T::Acc],
    scores: &mut [T::Acc],
    (k, v): (&mut [T::Acc], &mut [T::Acc]),
) -> Running<T::Acc> {
    let QueryBlock {
        sequence,
        head,
        queries,
    } = unit;
    let (d, dv, n) = (problem.q.width, problem.v.width, lanes(queries.len()));
    let rows = sequence.first_query + queries.start..sequence.first_query + queries.end;
    // SAFETY: the rows exist; at most QUERIES.
    unsafe {
        problem
            .q
            .rows::<T>(sequence.batch, rows, *head)
            .transposed(q, problem.binary_scale())
    };
    let sink = problem.sink(*head);
    let mut running = Running {
        max: [sink.unwrap_or(T::Acc::NEG_INF); QUERIES],
        sum: [if sink.is_some() {
            T::Acc::ONE
        } else {
            T::Acc::ZERO
        }; QUERIES],
    };
    let mut rescale = [T::Acc::ONE; QUERIES];
    let mask = Mask::new(&problem.spec, sequence);
    let mut add = false;
    for keys in mask.blocks(queries) {
        let count = keys.len();
        let rows = sequence.first_key + keys.start..sequence.first_key + keys.end;
        // SAFETY: the rows exist and are only read; buffers hold KEYS rows and products of QUERIES
        // columns.
        let (k, v) = unsafe {
            let head = head / problem.group;
            (
                readable(problem.k.rows::<T>(sequence.batch, rows.clone(), head), k),
                readable(problem.v.rows::<T>(sequence.batch, rows, head), v),
            )
        };
        let to_scores = TileProduct {
            m: count,
            n,
            k: d,
            a: Left::Rows(k.0, k.1),
            b: (q.as_ptr(), QUERIES),
            c: (scores.as_mut_ptr(), QUERIES),
            add: false,
        };
        // SAFETY: as above.
        unsafe { multiply(to_scores) };
        let scores = &mut scores[..count * QUERIES];
        mask.apply(scores, keys, queries);
        online_softmax(scores, n, &mut running, &mut rescale);
        if add {
            scale(o, &rescale);
        }
        let to_output = TileProduct {
            m: dv,
            n,
            k: count,
            a: Left::Cols(v.0, v.1),
            b: (scores.as_ptr(), QUERIES),
            c: (o.as_mut_ptr(), QUERIES),
            add,
        };
        // SAFETY: as above.
        unsafe { multiply(to_output) };
        add = true;
    }
    if !add {
        o.fill(T::Acc::ZERO);
    }
    running
}

/// Divides by the sums and writes output and lse.
///
/// # Safety
/// As [`attend`].
unsafe fn finish<T: AttentionFloat>(
    unit: &QueryBlock,
    o: &[T::Acc],
    running: &Running<T::Acc>,
    output: &ForwardOutput,
) {
    let QueryBlock {
        sequence,
        head,
        queries,
    } = unit;
    let row = sequence.first_query + queries.start;
    let inverse: PerQuery<T::Acc> = running.sum.map(|s| {
        if s == T::Acc::ZERO {
            T::Acc::ZERO
        } else {
            T::Acc::ONE / s
        }
    });
    let lse = (sequence.batch * output.heads + head) * output.queries + row;
    // SAFETY: the caller's promise; o is contiguous, lse `[batch, heads, queries]`.
    unsafe {
        let to = output.o.at::<T>(sequence.batch, row, *head);
        store_transposed(o, &inverse, to, output.o.strides[1] as usize, queries.len());
        let lse = (output.lse as *mut T::Acc).add(lse);
        for i in 0..queries.len() {
            let value = running.max[i] * T::Acc::of(std::f64::consts::LN_2) + running.sum[i].ln();
            *lse.add(i) = value;
        }
    }
}
