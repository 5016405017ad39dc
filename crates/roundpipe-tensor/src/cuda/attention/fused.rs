//! Attention by cuDNN: which cases it takes, and its graphs.
//!
//! Taken: bf16 and f16, widths 64 and 128 alike for keys and values, lengths that are multiples of
//! 128, full or causal with as many queries as keys, grouped heads, sinks (which the caller adds).
//! Not taken: windows, packed sequences; our own kernels have them. Other lengths would be taken
//! too, but every length wants plans of its own, up to a second each, and batches whose lengths
//! differ would wait for new plans at every step.
//!
//! The backward is the one that repeats bit for bit, unless any order of its sums will do: dq is
//! multiplied straight from the scores' gradients, which the library then keeps in its workspace,
//! so it goes in pieces ([`PieceSplit`]). A piece's graph takes the statistics of whole rows, so
//! the weights of its pairs are those of the whole, whichever keys it holds.
//!
//! # Invariants
//! - What is taken, and in which pieces, depends on the operands alone; scratch on their sizes.
//! - Scratch holds whatever a plan may need; a plan that wants more is refused, and the refusal is
//!   remembered.

use super::cut::{AttentionSizes, Piece, PieceSplit, ScratchLayout};
use super::graph::{Data, Function as F, Graph, GraphPlan, GraphTensor, Refused, Sum, TargetGpu};
use super::sums::Addition;
use crate::dtype::DType;
use crate::kernel::{AttentionSpec, View};

/// Numbers of the operands in the graphs.
const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const O: i64 = 4;
const LSE: i64 = 5;
const SCALE: i64 = 6;
const HIDDEN: i64 = 7;
const D_O: i64 = 8;
const DQ: i64 = 9;
const DK: i64 = 10;
const DV: i64 = 11;
const ROWS: i64 = 12;
const ONE: i64 = 13;
const DQ_SUM: i64 = 14;
/// Of the operands in the order in which they are kept.
const NUMBERS: [i64; 8] = [Q, K, V, O, D_O, DQ, DK, DV];

/// `[batch, rows, heads]` strides of an operand.
type Strides = [i64; 3];

/// All that a plan depends on. Sizes are those of a piece, strides those of what it reads and
/// writes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct AttentionCase {
    dtype: DType,
    batch: i64,
    heads: i64,
    key_heads: i64,
    queries: i64,
    keys: i64,
    width: i64,
    causal: bool,
    backward: bool,
    any_order: bool,
    /// q, k, v, o; in backward do, dq, dk, dv too.
    strides: Vec<Strides>,
    /// Strides of batches and heads in lse.
    lse: [i64; 2],
}

/// A call as cuDNN takes it.
#[derive(Debug)]
pub(super) struct FusedAttention {
    sizes: AttentionSizes,
    cut: PieceSplit,
    places: ScratchLayout,
    dtype: DType,
    /// Addresses and strides of the whole: q, k, v, o, then do, dq, dk, dv.
    operands: Vec<(u64, Strides)>,
    /// Whether all rows lie as cuDNN reads them. Not part of what is taken, so that scratch depends
    /// on sizes alone.
    pub aligned: bool,
    lse: u64,
    scale: f32,
    hidden: f32,
    one: f32,
}

impl FusedAttention {
    /// The forward, if cuDNN takes such sizes.
    pub fn forward(
        spec: &AttentionSpec,
        src: &[Option<View>],
        dst: &[Option<View>],
    ) -> Option<Self> {
        plain(&src[4..])?;
        let [q, k, v] = [src[0]?, src[1]?, src[2]?];
        Self::new(spec, &[q, k, v, dst[0]?], &dst[1]?)
    }

    /// The backward, if cuDNN takes such sizes.
    pub fn backward(
        spec: &AttentionSpec,
        src: &[Option<View>],
        dst: &[Option<View>],
    ) -> Option<Self> {
        plain(&src[7..])?;
        let operands = [
            src[0]?, src[1]?, src[2]?, src[3]?, src[5]?, dst[0]?, dst[1]?, dst[2]?,
        ];
        Self::new(spec, &operands, &src[4]?)
    }

    /// Rows of all heads and batches, where it is causal and heads have this width.
    pub fn causal_rows(&self, width: usize) -> Option<usize> {
        let sizes = &self.sizes;
        let fits = sizes.causal && sizes.width == width;
        fits.then_some(sizes.batch * sizes.heads * sizes.queries)
    }

    fn new(spec: &AttentionSpec, operands: &[View], lse: &View) -> Option<Self> {
        let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
        let ([batch, queries, heads, width], [_, keys, key_heads, _]) = (dims(q)?, dims(k)?);
        let fits = matches!(q.dtype, DType::BF16 | DType::F16)
            && matches!(width, 64 | 128)
            && v.shape()[3] == width
            && batch * heads * queries * keys > 0
            && queries % 128 == 0
            && keys % 128 == 0
            && queries.max(keys) < 1 << 30
            && (!spec.causal || queries == keys)
            && spec.window.is_none_or(|window| window >= queries + keys);
        if !fits {
            return None;
        }
        let (causal, backward) = (spec.causal, operands.len() > 4);
        let any_order = backward && spec.any_order;
        let sizes = AttentionSizes {
            batch,
            heads,
            key_heads,
            queries,
            keys,
            width,
            causal,
            backward,
            any_order,
        };
        let cut = PieceSplit::new(&sizes)?;
        Some(Self {
            sizes,
            cut,
            places: cut.places()?,
            dtype: q.dtype,
            operands: operands
                .iter()
                .map(|view| (view.ptr, strides(view)))
                .collect(),
            aligned: operands.iter().all(aligned),
            lse: lse.ptr,
            scale: spec.scale as f32,
            hidden: f32::NEG_INFINITY,
            one: 1.0,
        })
    }

    /// Scratch bytes: sums and parts of gradients, row sums, workspace.
    pub fn scratch(&self) -> usize {
        self.places.bytes
    }

    /// Most bytes of workspace that a plan may want.
    pub fn workspace(&self) -> usize {
        self.places.bytes - self.places.workspace
    }

    /// Where the workspace lies.
    pub fn workspace_at(&self, scratch: u64) -> u64 {
        scratch + self.places.workspace as u64
    }

    /// All pieces, in the order in which they are to run.
    pub fn pieces(&self) -> Vec<Piece> {
        self.cut.pieces()
    }

    /// What the plan of a piece depends on.
    pub fn case(&self, piece: &Piece) -> AttentionCase {
        let (sizes, cut) = (&self.sizes, &self.cut);
        let mut strides: Vec<Strides> = self.operands.iter().map(|(_, strides)| *strides).collect();
        if cut.adds() && sizes.backward {
            strides.truncate(5);
            let (rows, columns) = (piece.queries.len(), piece.keys.len());
            for (heads, rows) in [
                (cut.heads, rows),
                (cut.key_heads, columns),
                (cut.key_heads, columns),
            ] {
                strides.push(
                    [rows * heads * sizes.width, heads * sizes.width, sizes.width]
                        .map(|n| n as i64),
                );
            }
        }
        AttentionCase {
            dtype: self.dtype,
            batch: cut.batch as i64,
            heads: cut.heads as i64,
            key_heads: cut.key_heads as i64,
            queries: piece.queries.len() as i64,
            keys: piece.keys.len() as i64,
            width: sizes.width as i64,
            causal: piece.causal,
            backward: sizes.backward,
            any_order: self.sums_up(),
            strides,
            lse: [(sizes.heads * sizes.queries) as i64, sizes.queries as i64],
        }
    }

    /// Makes the plan of a case.
    pub fn plan(&self, case: &AttentionCase, target: &TargetGpu<'_>) -> Result<GraphPlan, Refused> {
        let graph = if case.backward {
            case.backward()?
        } else {
            case.forward()?
        };
        GraphPlan::new(graph, target, self.workspace())
    }

    /// Whether cuDNN adds dq up by itself, in any order.
    fn sums_up(&self) -> bool {
        self.sizes.any_order && !self.cut.adds()
    }

    /// Where cuDNN adds dq up, and its bytes.
    pub fn sum(&self, scratch: u64) -> Option<(u64, usize)> {
        let bytes = 4 * self.cut.batch * self.cut.heads * self.cut.queries * self.sizes.width;
        self.sums_up()
            .then(|| (scratch + self.places.sums[0] as u64, bytes))
    }

    /// The first head of queries of a piece.
    fn head(&self, piece: &Piece) -> usize {
        piece.key_head * (self.sizes.heads / self.sizes.key_heads)
    }

    /// Where a piece begins in an operand of the whole.
    fn address(&self, i: usize, piece: &Piece) -> u64 {
        let (address, [batch, row, head]) = self.operands[i];
        let (first, rows) = match NUMBERS[i] {
            K | V | DK | DV => (piece.key_head, piece.keys.start),
            _ => (self.head(piece), piece.queries.start),
        };
        let at = piece.batch as i64 * batch + rows as i64 * row + first as i64 * head;
        address.wrapping_add_signed(2 * at)
    }

    /// The operands of a piece, by their numbers.
    pub fn addresses(&self, piece: &Piece, scratch: u64) -> Vec<(i64, u64)> {
        let sizes = &self.sizes;
        let mut all: Vec<(i64, u64)> = Vec::with_capacity(14);
        for (i, number) in NUMBERS.into_iter().enumerate().take(self.operands.len()) {
            let address = match (number, self.cut.adds()) {
                (DQ | DK | DV, true) => scratch + self.places.parts[i - 5] as u64,
                _ => self.address(i, piece),
            };
            all.push((number, address));
        }
        let lse =
            (piece.batch * sizes.heads + self.head(piece)) * sizes.queries + piece.queries.start;
        all.push((LSE, self.lse + 4 * lse as u64));
        all.push((SCALE, (&raw const self.scale) as u64));
        if piece.causal {
            all.push((HIDDEN, (&raw const self.hidden) as u64));
        }
        if sizes.backward {
            all.push((ROWS, scratch + self.places.rows as u64));
            all.push((ONE, (&raw const self.one) as u64));
        }
        if self.sums_up() {
            all.push((DQ_SUM, scratch + self.places.sums[0] as u64));
        }
        all
    }

    /// What is to be added once a piece has run.
    pub fn additions(&self, piece: &Piece, scratch: u64) -> Vec<Addition> {
        if !self.cut.adds() || !self.sizes.backward {
            return Vec::new();
        }
        let (queries, keys) = (piece.queries.len(), piece.keys.len());
        let (heads, key_heads, width) = (self.cut.heads, self.cut.key_heads, self.sizes.width);
        // The sum of dq is that of one block; those of dk and dv hold the keys of all blocks.
        let keys_at = 4 * piece.keys.start * key_heads * width;
        let each = [
            (queries, heads, piece.dq, 0),
            (keys, key_heads, piece.dkv, keys_at),
            (keys, key_heads, piece.dkv, keys_at),
        ];
        let additions = each
            .into_iter()
            .enumerate()
            .map(|(i, (rows, heads, turn, at))| Addition {
                dtype: self.dtype,
                part: scratch + self.places.parts[i] as u64,
                sum: scratch + (self.places.sums[i] + at) as u64,
                out: self.address(5 + i, piece),
                rows,
                heads,
                width,
                row_stride: self.operands[5 + i].1[1],
                head_stride: self.operands[5 + i].1[2],
                turn,
            });
        additions.collect()
    }
}

/// The four sizes of an operand.
fn dims(view: &View) -> Option<[usize; 4]> {
    view.shape().dims().try_into().ok()
}

/// Strides, the usual ones where a dimension has one element and its stride may be anything.
fn strides(view: &View) -> Strides {
    let (s, usual) = (view.layout.strides(), view.shape().contiguous_strides());
    [0, 1, 2].map(|i| if view.shape()[i] > 1 { s[i] } else { usual[i] } as i64)
}

/// No lengths.
fn plain(options: &[Option<View>]) -> Option<()> {
    options.iter().all(Option::is_none).then_some(())
}

/// Whether every row of every head starts at a multiple of 16 bytes and steps forward.
fn aligned(view: &View) -> bool {
    let mut rows = view.shape().iter().zip(view.layout.strides()).take(3);
    view.ptr.is_multiple_of(16)
        && rows.all(|(n, stride)| *n <= 1 || (*stride > 0 && stride % 8 == 0))
}

/// Tensors lie as `[batch, rows, heads, width]`; graphs see `[batch, heads, rows, width]`.
impl AttentionCase {
    fn data(&self) -> Data {
        match self.dtype {
            DType::F16 => Data::CUDNN_DATA_HALF,
            _ => Data::CUDNN_DATA_BFLOAT16,
        }
    }

    /// Every query with every key.
    fn pairs(&self) -> [i64; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    /// One number per query.
    fn rows(&self) -> [i64; 4] {
        [self.batch, self.heads, self.queries, 1]
    }

    fn of_queries(&self) -> [i64; 4] {
        [self.batch, self.heads, self.queries, self.width]
    }

    fn of_keys(&self) -> [i64; 4] {
        [self.batch, self.key_heads, self.keys, self.width]
    }

    /// Operand `i` of `strides`; its matrices transposed where the graph wants them so.
    fn operand(
        &self,
        graph: &mut Graph,
        number: i64,
        i: usize,
        transposed: bool,
    ) -> Result<GraphTensor, Refused> {
        let [batch, row, head] = self.strides[i];
        let mut dims = if matches!(number, K | V | DK | DV) {
            self.of_keys()
        } else {
            self.of_queries()
        };
        let mut strides = [batch, head, row, 1];
        if transposed {
            dims.swap(2, 3);
            strides.swap(2, 3);
        }
        graph.operand(number, self.data(), dims, strides)
    }

    fn lse(&self, graph: &mut Graph) -> Result<GraphTensor, Refused> {
        graph.operand(
            LSE,
            Data::CUDNN_DATA_FLOAT,
            self.rows(),
            [self.lse[0], self.lse[1], 1, 1],
        )
    }

    /// softmax in steps, its statistics, and the product with v.
    fn forward(&self) -> Result<Graph, Refused> {
        let (mut graph, float) = (Graph::default(), Data::CUDNN_DATA_FLOAT);
        let g = &mut graph;
        let q = self.operand(g, Q, 0, false)?;
        let k = self.operand(g, K, 1, true)?;
        let v = self.operand(g, V, 2, false)?;
        let o = self.operand(g, O, 3, false)?;
        let (lse, scale) = (self.lse(g)?, g.number(SCALE)?);
        let (pairs, rows) = (self.pairs(), self.rows());
        let to = g.step(float, pairs)?;
        let raw = g.product(q, k, to)?;
        let to = g.step(float, pairs)?;
        let mut scores = g.each(F::CUDNN_POINTWISE_MUL, raw, Some(scale), to)?;
        if self.causal {
            let hidden = g.number(HIDDEN)?;
            scores = g.causal(scores, hidden, pairs)?;
        }
        let to = g.step(float, rows)?;
        let top = g.sum(Sum::CUDNN_REDUCE_TENSOR_MAX, scores, to)?;
        let to = g.step(float, pairs)?;
        let lower = g.each(F::CUDNN_POINTWISE_SUB, scores, Some(top), to)?;
        let to = g.step(float, pairs)?;
        let weights = g.each(F::CUDNN_POINTWISE_EXP, lower, None, to)?;
        let to = g.step(float, rows)?;
        let sum = g.sum(Sum::CUDNN_REDUCE_TENSOR_ADD, weights, to)?;
        let to = g.step(float, rows)?;
        let log = g.each(F::CUDNN_POINTWISE_LOG, sum, None, to)?;
        g.each(F::CUDNN_POINTWISE_ADD, top, Some(log), lse)?;
        let to = g.step(self.data(), pairs)?;
        let shares = g.each(F::CUDNN_POINTWISE_DIV, weights, Some(sum), to)?;
        g.product(shares, v, o)?;
        Ok(graph)
    }

    /// p again from the statistics; dv, ds, dk and dq.
    fn backward(&self) -> Result<Graph, Refused> {
        let (mut graph, float) = (Graph::default(), Data::CUDNN_DATA_FLOAT);
        let g = &mut graph;
        let q = self.operand(g, Q, 0, false)?;
        let k = self.operand(g, K, 1, true)?;
        let v = self.operand(g, V, 2, true)?;
        let o = self.operand(g, O, 3, false)?;
        let d_o = self.operand(g, D_O, 4, false)?;
        let dq = self.operand(g, DQ, 5, false)?;
        let dk = self.operand(g, DK, 6, false)?;
        let dv = self.operand(g, DV, 7, false)?;
        let (lse, scale) = (self.lse(g)?, g.number(SCALE)?);
        let delta = self.row_sums(g, d_o, o)?;
        let pairs = self.pairs();
        let to = g.step(float, pairs)?;
        let raw = g.product(q, k, to)?;
        let to = g.step(float, pairs)?;
        let scores = g.each(F::CUDNN_POINTWISE_MUL, raw, Some(scale), to)?;
        let to = g.step(float, pairs)?;
        let mut lower = g.each(F::CUDNN_POINTWISE_SUB, scores, Some(lse), to)?;
        if self.causal {
            let hidden = g.number(HIDDEN)?;
            lower = g.causal(lower, hidden, pairs)?;
        }
        let to = g.step(float, pairs)?;
        let p = g.each(F::CUDNN_POINTWISE_EXP, lower, None, to)?;
        self.to_keys(g, p, d_o, dv)?;
        let to = g.step(float, pairs)?;
        let dp = g.product(d_o, v, to)?;
        let to = g.step(float, pairs)?;
        let dp = g.each(F::CUDNN_POINTWISE_SUB, dp, Some(delta), to)?;
        let to = g.step(float, pairs)?;
        let ds = g.each(F::CUDNN_POINTWISE_MUL, dp, Some(p), to)?;
        let to = g.step(self.data(), pairs)?;
        let ds = g.each(F::CUDNN_POINTWISE_MUL, ds, Some(scale), to)?;
        self.to_keys(g, ds, q, dk)?;
        let [batch, row, head] = self.strides[1];
        let k = g.transposed(k, self.data(), self.of_keys(), [batch, head, row, 1])?;
        if !self.any_order {
            g.product(ds, k, dq)?;
            return Ok(graph);
        }
        let (heads, rows) = (self.queries * self.width, self.width);
        let strides = [self.heads * heads, heads, rows, 1];
        let sum = g.operand(DQ_SUM, float, self.of_queries(), strides)?;
        g.product(ds, k, sum)?;
        g.each(F::CUDNN_POINTWISE_IDENTITY, sum, None, dq)?;
        Ok(graph)
    }

    /// The row sums of do · o, kept in scratch. The factor 1 is where the library's pattern has
    /// dropout's: without it, plans keep two more matrices of pairs.
    fn row_sums(
        &self,
        g: &mut Graph,
        d_o: GraphTensor,
        o: GraphTensor,
    ) -> Result<GraphTensor, Refused> {
        let float = Data::CUDNN_DATA_FLOAT;
        let to = g.step(float, self.of_queries())?;
        let products = g.each(F::CUDNN_POINTWISE_MUL, d_o, Some(o), to)?;
        let to = g.step(float, self.rows())?;
        let sums = g.sum(Sum::CUDNN_REDUCE_TENSOR_ADD, products, to)?;
        let one = g.number(ONE)?;
        let to = g.operand(
            ROWS,
            float,
            self.rows(),
            [self.heads * self.queries, self.queries, 1, 1],
        )?;
        g.each(F::CUDNN_POINTWISE_MUL, sums, Some(one), to)
    }

    /// out = pairsᵀ x, summed over the query heads of a group.
    fn to_keys(
        &self,
        g: &mut Graph,
        pairs: GraphTensor,
        x: GraphTensor,
        out: GraphTensor,
    ) -> Result<(), Refused> {
        let [batch, heads, queries, keys] = self.pairs();
        let strides = [heads * queries * keys, queries * keys, 1, keys];
        let transposed =
            g.transposed(pairs, self.data(), [batch, heads, keys, queries], strides)?;
        if self.heads == self.key_heads {
            g.product(transposed, x, out)?;
            return Ok(());
        }
        let to = g.step(self.data(), [batch, heads, keys, self.width])?;
        let full = g.product(transposed, x, to)?;
        g.sum(Sum::CUDNN_REDUCE_TENSOR_ADD, full, out)?;
        Ok(())
    }
}
