//! How a product is cut.
//!
//! Pieces of k follow from k and the kernel alone, since the order of a sum decides its bits. All
//! other cuts may follow from anything, even the number of threads: they only decide who does what
//! when.

use super::element::{GemmElement, PanelKernel};

/// Most columns of a tile, for buffers of one row.
pub(super) const MAX_TILE_COLS: usize = 512;

/// Rows of a block. Few enough that its panels are still in the shared cache when they are
/// multiplied, more with more threads, which would else wait for each other too often.
const BLOCK_M_PER_THREAD: usize = 576;
const MAX_BLOCK_THREADS: usize = 4;
/// Bounds of a block: its panels take at most about 10 MB per operand, its sums 20 MB.
const MAX_BLOCK_N: usize = 2048;
const MAX_BLOCK_BYTES_K: usize = 4096;

/// Panels along each side of a tile, at most.
const TILE_PANELS: usize = 8;

/// Tiles that a block should have, so that threads finish together …
const MANY_TILES: usize = 64;
/// … as long as a tile has at least this many multiplications.
const SMALL_TILE: usize = 1 << 20;

/// Extents along m, n and k.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlockExtents {
    /// Rows, columns and steps that are packed at one time.
    pub block_m: usize,
    pub block_n: usize,
    pub block_k: usize,
    /// Steps that are summed before they are added to the output.
    pub piece: usize,
    /// Rows and columns of a task.
    pub tile_m: usize,
    pub tile_n: usize,
    /// Whether each tile packs its columns itself, since there is one row of tiles only.
    pub lean: bool,
    /// Panels that a task packs.
    pub pack_a: usize,
    pub pack_b: usize,
}

impl BlockExtents {
    /// For a product of `[m, k]` and `[k, n]`, none of them 0.
    pub(super) fn new<T: GemmElement>(
        kernel: &PanelKernel<T>,
        threads: usize,
        [m, n, k]: [usize; 3],
    ) -> Self {
        let PanelKernel {
            mr,
            nr,
            round,
            kc,
            unit,
            ..
        } = *kernel;
        let piece = even(k, kc, round);
        let block_k =
            ((MAX_BLOCK_BYTES_K / unit / piece).max(1) * piece).min(k.next_multiple_of(piece));
        let block_m = even(
            m,
            BLOCK_M_PER_THREAD * threads.clamp(1, MAX_BLOCK_THREADS),
            mr,
        );
        let block_n = even(n, MAX_BLOCK_N, nr);
        let (mut across, mut down) = (TILE_PANELS, TILE_PANELS);
        loop {
            let (tile_m, tile_n) = (down * mr, across * nr);
            let tiles = block_m.div_ceil(tile_m) * block_n.div_ceil(tile_n);
            let work = tile_m.min(m) * tile_n.min(n) * block_k.min(k);
            if tiles >= MANY_TILES || work < 2 * SMALL_TILE || across * down == 1 {
                break;
            }
            if across > 1 && tile_n >= tile_m || down == 1 {
                across /= 2
            } else {
                down /= 2
            }
        }
        let per_task = |width: usize| ((1 << 16) / (width * block_k.min(k))).max(1);
        Self {
            block_m,
            block_n,
            block_k,
            piece,
            tile_m: down * mr,
            tile_n: across * nr,
            lean: m <= down * mr,
            pack_a: per_task(mr),
            pack_b: per_task(nr),
        }
    }

    /// For few rows: the right operand is not packed, so one block holds all of the product.
    pub(super) fn take_columns_where_they_lie<T: GemmElement>(
        &mut self,
        kernel: &PanelKernel<T>,
        [n, k]: [usize; 2],
    ) {
        self.block_n = n.next_multiple_of(kernel.nr);
        self.block_k = k.next_multiple_of(self.piece);
        self.lean = true;
    }

    /// Bytes of a block's left panels.
    pub(super) fn a_bytes<T: GemmElement>(&self, kernel: &PanelKernel<T>) -> usize {
        self.block_m * self.block_k * kernel.unit
    }

    /// Bytes of a block's right panels, if they are packed together.
    pub(super) fn b_bytes<T: GemmElement>(&self, kernel: &PanelKernel<T>) -> usize {
        if self.lean {
            0
        } else {
            self.block_n * self.block_k * kernel.unit
        }
    }
}

/// The length of the equal parts of `n`, as few as `most` allows, rounded up to a multiple of
/// `unit`.
fn even(n: usize, most: usize, unit: usize) -> usize {
    n.div_ceil(n.div_ceil(most)).next_multiple_of(unit)
}
