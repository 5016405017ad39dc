//! Attention in blocks: softmax(q kᵀ) v without ever holding the matrix of scores.
//!
//! A block of [`QUERIES`] queries meets one block of at most [`KEYS`] keys after the other. The
//! forward keeps a running maximum and sum per query and saves only their logarithm (`lse`), from
//! which the backward makes the same weights again. Memory is linear in the sequence.
//!
//! The path of a block: tensor -> `load` (converted to f32, transposed where needed) -> `tile`
//! (products) -> `softmax` -> `tile` -> tensor. Scores lie transposed, `[keys, QUERIES]`: vectors
//! run along queries, so nothing is reduced inside a vector and products need no packing.
//!
//! Shapes and types were checked by the operation; cumulative lengths are data and are checked
//! here.
//!
//! # Invariants
//! - Blocks are counted from each sequence's own first row, and every sum has one order that
//!   depends on the sequence's lengths alone. So neither threads nor batch size nor the neighbours
//!   in a packed batch change a row's bits.
//! - Every element of a result is written by one task. Keys that no query of a block sees are
//!   skipped.

mod backward;
mod forward;
mod level;
mod load;
mod softmax;
mod tile;
mod vector;

use std::any::TypeId;
use std::cell::Cell;
use std::ops::Range;

use super::access::{CacheLine, Call, Float, Real, for_float, slice};
use crate::error::{Error, Result};
use crate::kernel::{AttentionSpec, Kernel, View};
use level::AttentionAcc;
use load::DenseRows;
use softmax::PerQuery;

/// Queries of a block.
const QUERIES: usize = 64;
/// Most keys of a block; blocks begin at multiples of it.
const KEYS: usize = 128;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Attention(spec) | Kernel::CachedAttention(spec) => {
                for_float!(call, call.src(0).dtype, T => forward::run::<T>(call, *spec))
            }
            Kernel::AttentionGrad(spec) => {
                for_float!(call, call.src(0).dtype, T => backward::run::<T>(call, *spec))
            }
            _ => Err(call.unsupported()),
        }
    }
}

/// Scratch bytes: see [`backward`].
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    match kernel {
        Kernel::AttentionGrad(_) => backward::GradScratch::new(src, dst).bytes(),
        _ => 0,
    }
}

/// A float whose accumulator attention computes in.
trait AttentionFloat: Float<Acc: AttentionAcc> {
    /// Whether the type is its own accumulator, so that tensors are read and added to in place.
    fn is_acc() -> bool {
        TypeId::of::<Self>() == TypeId::of::<Self::Acc>()
    }
}

impl<T: Float<Acc: AttentionAcc>> AttentionFloat for T {}

/// A tensor `[batch, rows, heads, width]` with a contiguous last dimension.
#[derive(Clone, Copy)]
struct Operand {
    ptr: u64,
    strides: [isize; 3],
    width: usize,
}

impl Operand {
    fn new(view: &View) -> Self {
        let s = view.layout.strides();
        Self {
            ptr: view.ptr,
            strides: [s[0], s[1], s[2]],
            width: view.shape()[3],
        }
    }

    /// Where a row of a head begins.
    fn at<T>(&self, batch: usize, row: usize, head: usize) -> *mut T {
        let [b, r, h] = self.strides;
        (self.ptr as *mut T)
            .wrapping_offset(batch as isize * b + row as isize * r + head as isize * h)
    }

    /// Consecutive rows of a head.
    fn rows<T>(&self, batch: usize, rows: Range<usize>, head: usize) -> DenseRows<T> {
        let ptr = self.at::<T>(batch, rows.start, head);
        DenseRows {
            ptr,
            stride: self.strides[1],
            rows: rows.len(),
            width: self.width,
        }
    }
}

/// Rows that attend to each other: `queries` rows from `first_query` on, and likewise keys.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RowSequence {
    batch: usize,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
}

/// The operands both directions share.
struct Problem<'a, T: AttentionFloat> {
    spec: AttentionSpec,
    q: Operand,
    k: Operand,
    v: Operand,
    /// Query heads, and how many of them share a key head.
    heads: usize,
    group: usize,
    sinks: Option<&'a [T]>,
    /// The sequences, then rows that belong to none.
    sequences: Vec<RowSequence>,
}

impl<'a, T: AttentionFloat> Problem<'a, T> {
    /// From `[q, k, v]` and the optional operands at `sinks`, `sinks + 1`, `sinks + 2`.
    ///
    /// # Safety
    /// As [`run`].
    unsafe fn new(call: &'a Call<'_>, spec: AttentionSpec, sinks: usize) -> Result<Self> {
        let (q, k, v) = (call.src(0), call.src(1), call.src(2));
        let [batch, queries, heads, _] = *q.shape().dims() else {
            unreachable!("checked by the operation")
        };
        let (keys, key_heads) = (k.shape()[1], k.shape()[2]);
        let cached = matches!(call.kernel, Kernel::CachedAttention(_));
        // SAFETY: the caller's promise; all are dense.
        let (sinks, first, second) = unsafe {
            (
                call.src_opt(sinks).map(|s| slice::<T>(s)),
                call.src_opt(sinks + 1).map(|lens| slice::<i32>(lens)),
                call.src_opt(sinks + 2).map(|lens| slice::<i32>(lens)),
            )
        };
        let sequences = match (first, second) {
            (Some(at), _) if cached => filled(call.kernel.name(), at, queries, keys)?,
            (Some(lens_q), Some(lens_k)) => {
                packed(call.kernel.name(), (lens_q, queries), (lens_k, keys))?
            }
            _ => (0..batch)
                .map(|batch| RowSequence {
                    batch,
                    first_query: 0,
                    queries,
                    first_key: 0,
                    keys,
                })
                .collect(),
        };
        let (q, k, v) = (Operand::new(q), Operand::new(k), Operand::new(v));
        Ok(Self {
            spec,
            q,
            k,
            v,
            heads,
            group: heads / key_heads.max(1),
            sinks,
            sequences,
        })
    }

    /// The sink of a head in units of ln 2.
    fn sink(&self, head: usize) -> Option<T::Acc> {
        self.sinks
            .map(|s| s[head].up() * T::Acc::of(std::f64::consts::LOG2_E))
    }

    /// Factor that turns products of queries and keys into scores in units of ln 2.
    fn binary_scale(&self) -> T::Acc {
        T::Acc::of(self.spec.scale * std::f64::consts::LOG2_E)
    }
}

/// The filled part of each row of a cache, `queries` places more than `at` says.
fn filled(
    op: &'static str,
    at: &[i32],
    queries: usize,
    capacity: usize,
) -> Result<Vec<RowSequence>> {
    let row = |(batch, &at): (usize, &i32)| {
        let keys = usize::try_from(at).map_or(usize::MAX, |at| at.saturating_add(queries));
        if keys > capacity {
            return Err(Error::Index {
                op,
                index: i64::from(at),
                at: batch,
                size: (capacity + 1).saturating_sub(queries),
            });
        }
        Ok(RowSequence {
            batch,
            first_query: 0,
            queries,
            first_key: 0,
            keys,
        })
    };
    at.iter().enumerate().map(row).collect()
}

/// Sequences from cumulative lengths, then the rows before the first and after the last as
/// sequences without a counterpart.
fn packed(op: &'static str, q: (&[i32], usize), k: (&[i32], usize)) -> Result<Vec<RowSequence>> {
    let q = cumulative(op, "queries", q.0, q.1)?;
    let k = cumulative(op, "keys", k.0, k.1)?;
    let part = |q: Range<usize>, k: Range<usize>| RowSequence {
        batch: 0,
        first_query: q.start,
        queries: q.len(),
        first_key: k.start,
        keys: k.len(),
    };
    let inner = 1..q.len() - 2;
    let mut all: Vec<RowSequence> = inner
        .map(|i| part(q[i]..q[i + 1], k[i]..k[i + 1]))
        .collect();
    for i in [0, q.len() - 2] {
        all.extend([part(q[i]..q[i + 1], 0..0), part(0..0, k[i]..k[i + 1])]);
    }
    Ok(all)
}

/// Cumulative lengths with 0 before and `rows` after them, so that all rows are covered.
fn cumulative(op: &'static str, what: &str, lens: &[i32], rows: usize) -> Result<Vec<usize>> {
    let mut all = vec![0];
    for (at, &end) in lens.iter().enumerate() {
        let before = *all.last().expect("never empty");
        match usize::try_from(end) {
            Ok(end) if before <= end && end <= rows => all.push(end),
            _ => {
                let what = format!(
                    "cumulative length {end} of {what} at position {at} is outside {before}..={rows}: \
                     lengths ascend and end within the rows"
                );
                return Err(Error::invalid(op, what));
            }
        }
    }
    all.push(rows);
    Ok(all)
}

/// Who sees whom in one sequence. Positions are those of keys; the last query stands at the last
/// key.
#[derive(Clone, Copy)]
struct Mask {
    keys: isize,
    /// Position of the first query.
    shift: isize,
    causal: bool,
    window: Option<isize>,
}

impl Mask {
    fn new(spec: &AttentionSpec, sequence: &RowSequence) -> Self {
        let (queries, keys) = (sequence.queries as isize, sequence.keys as isize);
        // A window longer than both hides nothing; the bound keeps sums small.
        let window = spec
            .window
            .filter(|w| *w < sequence.queries + sequence.keys)
            .map(|w| w as isize);
        Self {
            keys,
            shift: keys - queries,
            causal: spec.causal,
            window,
        }
    }

    /// The keys that query `i` sees.
    fn keys_of(&self, i: usize) -> Range<usize> {
        let position = i as isize + self.shift;
        let end = if self.causal {
            (position + 1).clamp(0, self.keys)
        } else {
            self.keys
        };
        let start = self
            .window
            .map_or(0, |w| (position - w + 1).clamp(0, self.keys));
        start as usize..end as usize
    }

    /// The queries that see key `j`, of any number of queries.
    fn queries_of(&self, j: usize) -> Range<isize> {
        let twin = j as isize - self.shift;
        let start = if self.causal { twin } else { isize::MIN };
        let end = self.window.map_or(isize::MAX, |w| twin + w);
        start..end
    }

    /// From the first to the last of the keys that some of `queries` see, those that lie in `keys`.
    fn seen(&self, queries: &Range<usize>, keys: Range<usize>) -> Option<Range<usize>> {
        let (first, last) = (self.keys_of(queries.start), self.keys_of(queries.end - 1));
        let seen = first.start.max(keys.start)..last.end.min(keys.end);
        (!seen.is_empty()).then_some(seen)
    }

    /// The blocks of keys that some of `queries` see.
    fn blocks<'a>(&'a self, queries: &'a Range<usize>) -> impl Iterator<Item = Range<usize>> + 'a {
        let (start, end) = (
            self.keys_of(queries.start).start,
            self.keys_of(queries.end - 1).end,
        );
        let first = start / KEYS * KEYS;
        (first..end)
            .step_by(KEYS)
            .filter_map(|at| self.seen(queries, at..at + KEYS))
    }

    /// Sets the scores `[keys, QUERIES]` of pairs that do not see each other to -inf.
    fn apply<T: Real>(&self, scores: &mut [T], keys: Range<usize>, queries: &Range<usize>) {
        let (first, last) = (self.keys_of(queries.start), self.keys_of(queries.end - 1));
        if last.start <= keys.start && keys.end <= first.end {
            return;
        }
        let place = |i: isize| {
            i.saturating_sub(queries.start as isize)
                .clamp(0, queries.len() as isize) as usize
        };
        for (j, row) in keys.zip(scores.chunks_exact_mut(QUERIES)) {
            let seen = self.queries_of(j);
            row[..place(seen.start)].fill(T::NEG_INF);
            row[place(seen.end)..queries.len()].fill(T::NEG_INF);
        }
    }
}

/// `0..n` in blocks of [`QUERIES`].
fn query_blocks(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n)
        .step_by(QUERIES)
        .map(move |at| at..n.min(at + QUERIES))
}

/// The keys' or values' rows as a product reads them, first element and stride: in place, or
/// converted into `buffer`.
///
/// # Safety
/// The rows exist and nothing writes them; `buffer` holds them where the type is not its own
/// accumulator.
unsafe fn readable<T: AttentionFloat>(
    rows: DenseRows<T>,
    buffer: &mut [T::Acc],
) -> (*const T::Acc, isize) {
    if T::is_acc() {
        return (rows.ptr.cast(), rows.stride);
    }
    if rows.width > 0 {
        // SAFETY: the caller's promise.
        unsafe { rows.dense(buffer, rows.width, T::Acc::ONE) };
    }
    (buffer.as_ptr(), rows.width as isize)
}

thread_local! {
    static SHELF: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

/// Runs `body` with buffers of these lengths, which the thread keeps for the next task. Contents
/// are whatever was there.
fn with_buffers<A: Real, const N: usize>(lens: [usize; N], body: impl FnOnce([&mut [A]; N])) {
    let lines_of = |len: usize| (len * size_of::<A>()).div_ceil(size_of::<CacheLine>());
    let mut lines = SHELF.take();
    let need = lens.iter().map(|len| lines_of(*len)).sum();
    if lines.len() < need {
        lines.resize(need, CacheLine([0; 64]));
    }
    let mut rest = &mut lines[..];
    let buffers = lens.map(|len| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(lines_of(len));
        rest = after;
        // SAFETY: the lines are initialised, aligned for A, as long as `len` of them at least,
        // exclusively borrowed; every bit pattern is an A, since A is a float.
        unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<A>(), len) }
    });
    body(buffers);
    SHELF.set(lines);
}

/// The buffer length for converted rows: none where tensors are read in place.
fn converted<T: AttentionFloat>(len: usize) -> usize {
    if T::is_acc() { 0 } else { len }
}

/// Lanes in use of a block of queries.
fn lanes(queries: usize) -> usize {
    queries.next_multiple_of(tile::LANES)
}

/// Units of work per task, so that a task is worth handing to a thread. Depends on sizes alone.
fn grain(units: usize, work_per_unit: usize) -> usize {
    const WORTH: usize = 1 << 16;
    if units.saturating_mul(work_per_unit) < 2 * WORTH {
        return units;
    }
    WORTH.div_ceil(work_per_unit.max(1))
}
