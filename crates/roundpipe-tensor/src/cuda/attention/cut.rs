//! How a call of attention is cut for cuDNN: which batches, heads, queries and keys go together,
//! and where things lie in scratch. Plain arithmetic, nothing is launched here.
//!
//! The forward is never cut. The backward that repeats bit for bit keeps the scores' gradients in
//! its workspace, 2 bytes per pair of a query and a key, so what goes together is bounded by
//! [`SCRATCH_BYTES`]:
//!
//! - Short sequences are cut over batches and over heads: never through a group of heads that share
//!   keys. Every piece writes its part of the gradients and is done.
//! - Sequences longer than [`BLOCK`], or whose group of heads is too much, are cut into blocks of
//!   queries and of keys as well. A block of queries meets every block of keys that it sees:
//!   squares without a mask below the diagonal, causal ones on it, nothing above. What a piece adds
//!   to a gradient goes to a part in scratch, is added to a sum in f32, in the order of the pieces,
//!   and is rounded when the last is in.
//!
//! Why these bounds: 4 × 16 heads × 4,096² are 2 GiB of pairs, and cuDNN is a tenth slower on two
//! halves of it than on the whole. Fewer tokens take less, so a card that is too small for 2.5 GiB
//! beside a layer of 16,384 tokens gets there by its microbatch. A block of 16,384 by four heads
//! has 512 tiles of 128 keys, several for every processor of the largest GPU, and its additions
//! take 3% of its time; longer blocks of fewer heads would wait for their last tile.
//!
//! Where gradients may be added in any order there are no such pairs, only a sum of dq in f32
//! beside the workspace: a call is cut over batches and heads alone, and hardly ever. What is too
//! long even so goes as the exact one does.
//!
//! # Invariants
//! - Cut and scratch depend on the sizes alone.
//! - Every pair that a query sees is in one piece, and in no other.
//! - Blocks begin at multiples of 128, so addresses of pieces are as aligned as those of the whole.

use std::ops::Range;

/// Most bytes of scratch that a backward asks for.
pub(super) const SCRATCH_BYTES: usize = 5 << 29;
/// Most queries or keys of a block.
pub(super) const BLOCK: usize = 16384;
/// Blocks are whole tiles of cuDNN's kernels.
const TILE: usize = 128;
/// More than the few hundred bytes that plans were seen to want beside what is counted.
const SLACK_BYTES: usize = 64 << 10;
/// Everything in scratch begins at a multiple of this.
const ALIGN: u128 = 256;

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSizes {
    pub batch: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub width: usize,
    pub causal: bool,
    pub backward: bool,
    /// Of a backward: dq may be added in any order.
    pub any_order: bool,
}

/// What goes together.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceSplit {
    sizes: AttentionSizes,
    /// Batches and heads of a piece.
    pub batch: usize,
    pub heads: usize,
    pub key_heads: usize,
    /// Most queries and keys of a piece.
    pub queries: usize,
    pub keys: usize,
}

/// A call of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    /// The first batch and head of keys.
    pub batch: usize,
    pub key_head: usize,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// Queries see the keys up to their own place in the piece.
    pub causal: bool,
    /// Of the sums of dq, and of dk and dv.
    pub dq: SumTurn,
    pub dkv: SumTurn,
}

/// Where a piece stands among those that add to the same sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SumTurn {
    pub first: bool,
    pub last: bool,
}

/// Offsets in scratch, and its bytes. Sums and parts are those of dq, dk, dv; sums of dk, dv hold
/// all keys. Of what is added in any order there is the sum of dq alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ScratchLayout {
    pub sums: [usize; 3],
    pub parts: [usize; 3],
    pub rows: usize,
    pub workspace: usize,
    pub bytes: usize,
}

impl PieceSplit {
    /// The cut with the fewest blocks, then the largest pieces; none where nothing fits.
    pub fn new(sizes: &AttentionSizes) -> Option<Self> {
        Self::within(sizes, BLOCK, SCRATCH_BYTES)
    }

    /// [`PieceSplit::new`] with other bounds.
    pub fn within(sizes: &AttentionSizes, longest: usize, limit: usize) -> Option<Self> {
        let length = sizes.queries.max(sizes.keys);
        let all = Self::of(sizes, sizes.batch, sizes.key_heads, length);
        if !sizes.backward {
            return Some(all);
        }
        let fits = |cut: &Self| cut.places().is_some_and(|places| places.bytes <= limit);
        if !fits(&Self::of(sizes, 1, 1, TILE)) && !fits(&Self::of(sizes, 1, 1, length)) {
            return None;
        }
        let longest = if sizes.any_order { length } else { longest };
        let block = (length.div_ceil(longest)..=length.div_ceil(TILE))
            .map(|blocks| length.div_ceil(blocks).next_multiple_of(TILE).min(length))
            .find(|block| fits(&Self::of(sizes, 1, 1, *block)))?;
        let key_heads = largest(sizes.key_heads, |n| fits(&Self::of(sizes, 1, n, block)))?;
        let batch = match key_heads == sizes.key_heads && block == length {
            true => largest(sizes.batch, |n| fits(&Self::of(sizes, n, key_heads, block)))?,
            false => 1,
        };
        Some(Self::of(sizes, batch, key_heads, block))
    }

    fn of(sizes: &AttentionSizes, batch: usize, key_heads: usize, block: usize) -> Self {
        Self {
            sizes: *sizes,
            batch,
            heads: key_heads * (sizes.heads / sizes.key_heads),
            key_heads,
            queries: block.min(sizes.queries),
            keys: block.min(sizes.keys),
        }
    }

    /// Whether gradients are sums over pieces.
    pub fn adds(&self) -> bool {
        self.queries < self.sizes.queries || self.keys < self.sizes.keys
    }

    /// Most bytes of workspace that a plan of a piece may want.
    fn workspace(&self) -> u128 {
        if !self.sizes.backward {
            return SLACK_BYTES as u128;
        }
        let heads = self.batch as u128 * self.heads as u128;
        let (queries, keys) = (self.queries as u128, self.keys as u128);
        // Gradients per query head before they are summed over the group.
        let full = 8 * heads * queries.max(keys) * self.sizes.width as u128;
        let pairs = if self.sizes.any_order && !self.adds() {
            0
        } else {
            2 * heads * queries * keys
        };
        pairs + full + SLACK_BYTES as u128
    }

    /// Where everything lies; none where that is beyond all memory.
    pub fn places(&self) -> Option<ScratchLayout> {
        let (batch, width) = (self.batch as u128, self.sizes.width as u128);
        let (heads, key_heads) = (batch * self.heads as u128, batch * self.key_heads as u128);
        let (queries, keys) = (heads * self.queries as u128, key_heads * self.keys as u128);
        let all_keys = key_heads * self.sizes.keys as u128;
        let mut end = 0u128;
        let mut place = |bytes: u128| {
            let at = end;
            end += bytes.next_multiple_of(ALIGN);
            usize::try_from(at)
        };
        let (mut sums, mut parts) = ([0; 3], [0; 3]);
        if self.sizes.backward && self.adds() {
            for (i, (sum, part)) in [(queries, queries), (all_keys, keys), (all_keys, keys)]
                .into_iter()
                .enumerate()
            {
                sums[i] = place(4 * sum * width).ok()?;
                parts[i] = place(2 * part * width).ok()?;
            }
        }
        if self.sizes.any_order && !self.adds() {
            sums[0] = place(4 * queries * width).ok()?;
        }
        let rows = place(if self.sizes.backward { 4 * queries } else { 0 }).ok()?;
        let workspace = place(self.workspace()).ok()?;
        Some(ScratchLayout {
            sums,
            parts,
            rows,
            workspace,
            bytes: usize::try_from(end).ok()?,
        })
    }

    /// All pieces, in the order in which they run and are added.
    pub fn pieces(&self) -> Vec<Piece> {
        let (queries, keys) = (
            cuts(self.sizes.queries, self.queries),
            cuts(self.sizes.keys, self.keys),
        );
        let mut pieces = Vec::new();
        for batch in (0..self.sizes.batch).step_by(self.batch) {
            for key_head in (0..self.sizes.key_heads).step_by(self.key_heads) {
                for (i, rows) in queries.iter().enumerate() {
                    let seen = if self.sizes.causal { i + 1 } else { keys.len() };
                    for (j, columns) in keys[..seen].iter().enumerate() {
                        let first = i == if self.sizes.causal { j } else { 0 };
                        pieces.push(Piece {
                            batch,
                            key_head,
                            queries: rows.clone(),
                            keys: columns.clone(),
                            causal: self.sizes.causal && i == j,
                            dq: SumTurn {
                                first: j == 0,
                                last: j + 1 == seen,
                            },
                            dkv: SumTurn {
                                first,
                                last: i + 1 == queries.len(),
                            },
                        });
                    }
                }
            }
        }
        pieces
    }
}

/// Blocks of `block`, the last of what remains.
fn cuts(length: usize, block: usize) -> Vec<Range<usize>> {
    (0..length)
        .step_by(block)
        .map(|at| at..(at + block).min(length))
        .collect()
}

/// The largest divisor of `n` that fits.
fn largest(n: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    (1..=n)
        .rev()
        .find(|part| n.is_multiple_of(*part) && fits(*part))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use proptest::prelude::*;

    fn sizes(dims: [usize; 5], causal: bool) -> AttentionSizes {
        let [batch, heads, key_heads, length, width] = dims;
        AttentionSizes {
            batch,
            heads,
            key_heads,
            queries: length,
            keys: length,
            width,
            causal,
            backward: true,
            any_order: false,
        }
    }

    /// Every visible pair of tiles is in one piece, sums begin once and end once, and scratch is
    /// what was allowed.
    fn check(sizes: &AttentionSizes, longest: usize, limit: usize) {
        let Some(cut) = PieceSplit::within(sizes, longest, limit) else {
            return;
        };
        let places = cut.places().unwrap();
        assert!(places.bytes <= limit, "{sizes:?}: {places:?}");
        let (mut pairs, mut begun, mut open) = (HashSet::new(), HashSet::new(), HashSet::new());
        for piece in cut.pieces() {
            assert!(piece.queries.len() <= cut.queries && piece.keys.len() <= cut.keys);
            assert!(!piece.causal || piece.queries == piece.keys);
            for (kind, at, turn) in [
                (0, piece.queries.start, piece.dq),
                (1, piece.keys.start, piece.dkv),
            ] {
                let sum = (kind, piece.batch, piece.key_head, at);
                assert_eq!(turn.first, begun.insert(sum), "{sizes:?}: {piece:?}");
                open.insert(sum);
                assert!(!turn.last || open.remove(&sum), "{sizes:?}: {piece:?}");
            }
            let heads = (piece.batch..piece.batch + cut.batch).flat_map(|b| {
                (piece.key_head..piece.key_head + cut.key_heads).map(move |h| (b, h))
            });
            for (batch, head) in heads {
                for (q, k) in piece.queries.clone().step_by(TILE).flat_map(|q| {
                    let seen = if piece.causal {
                        piece.keys.start..q + 1
                    } else {
                        piece.keys.clone()
                    };
                    seen.step_by(TILE).map(move |k| (q, k))
                }) {
                    assert!(
                        pairs.insert((batch, head, q, k)),
                        "{sizes:?}: {q}, {k} twice"
                    );
                }
            }
        }
        assert!(open.is_empty(), "{sizes:?}: sums without an end");
        let seen = |q: usize| {
            if sizes.causal {
                q + 1
            } else {
                sizes.keys / TILE
            }
        };
        let visible: usize = (0..sizes.queries / TILE).map(seen).sum();
        assert_eq!(
            pairs.len(),
            sizes.batch * sizes.key_heads * visible,
            "{sizes:?}"
        );
    }

    proptest! {
        /// Random sizes, with bounds that are small enough to cut them in every way.
        #[test]
        fn pieces_cover_what_is_seen_once(
            (batch, key_heads, group) in (1usize..4, 1usize..5, 1usize..4),
            (queries, keys) in (1usize..12, 1usize..12),
            (wide, causal, any_order) in (any::<bool>(), any::<bool>(), any::<bool>()),
            (longest, limit) in (1usize..14, 1usize..64),
        ) {
            let keys = if causal { queries } else { keys };
            let sizes = AttentionSizes {
                batch,
                heads: key_heads * group,
                key_heads,
                queries: queries * TILE,
                keys: keys * TILE,
                width: if wide { 128 } else { 64 },
                causal,
                backward: true,
                any_order,
            };
            check(&sizes, longest * TILE, limit << 20);
        }
    }

    /// What training meets: pieces, the lengths of their blocks, and scratch within the bound.
    #[test]
    #[cfg_attr(
        miri,
        ignore = "arithmetic without memory, and half a million pairs of tiles"
    )]
    fn long_sequences_fit() {
        for (dims, pieces, block) in [
            ([4, 16, 8, 4096, 128], 1, 4096),
            ([2, 64, 8, 4096, 64], 2, 4096),
            ([1, 32, 8, 16384, 128], 8, 16384),
            ([1, 64, 8, 16384, 128], 4 * 3, 8192),
            ([1, 16, 8, 32768, 128], 4 * 3, 16384),
            ([1, 16, 8, 65536, 128], 4 * 10, 16384),
            ([1, 16, 8, 131072, 128], 4 * 36, 16384),
            ([2, 16, 8, 40960, 128], 2 * 4 * 6, 13696),
            ([1, 2, 1, 1 << 20, 128], 64 * 65 / 2, 16384),
        ] {
            let cut = PieceSplit::new(&sizes(dims, true)).unwrap();
            assert_eq!(
                (cut.pieces().len(), cut.queries),
                (pieces, block),
                "{dims:?}"
            );
            let bytes = cut.places().unwrap().bytes;
            assert!(bytes <= SCRATCH_BYTES, "{dims:?}: {bytes}");
        }
        for dims in [
            [4, 16, 8, 4096, 128],
            [1, 16, 8, 40960, 128],
            [1, 4, 1, 16512, 64],
        ] {
            check(&sizes(dims, true), BLOCK, SCRATCH_BYTES);
        }
        // The sums alone would be more.
        assert!(PieceSplit::new(&sizes([1, 1, 1, 1 << 29, 128], true)).is_none());
    }
}
