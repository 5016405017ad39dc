//! Matrix products on the cpu: `c = alpha a b + bias + beta c`.
//!
//! The path of an operand: strided memory -> panels (`pack`, converted if need be) -> kernel. The
//! path of a result: the kernel's registers -> sums in f32 (f64 for f64) -> rounded once to the
//! output's type. Where the output has the type of the sums they are kept in place.
//!
//! A product is cut into blocks whose panels fit the shared cache, a block into tiles that fit a
//! core's own cache. Threads first pack a block together, then multiply its tiles.
//!
//! This module checks nothing: shapes, bounds and overlaps are the caller's.
//!
//! # Invariants
//!
//! - An element is the sum, in rising order, of the sums of pieces of k. The pieces depend on k and
//!   the instruction set alone; so neither the number of threads nor m and n nor the element's
//!   place change its bits.
//! - Elements outside the described operands are neither read nor written.
//! - Buffers are bounded (see [`BlockExtents`]) and kept by their threads.

mod cast;
mod element;
mod isa;
mod pack;
mod plan;
mod portable;
mod scratch;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;

use std::ops::Range;

use self::element::{Dest, FewRows, PanelKernel, Sum};
use self::pack::Lines;
use self::plan::{BlockExtents, MAX_TILE_COLS};
use self::scratch::{Scratch, Use};
use super::threads::Threads;

pub(crate) use self::element::{GemmElement, SumTarget};
pub(crate) use self::isa::Isa;

/// An operand: element `(i, j)` lies at `ptr + i * row + j * col`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mat<T> {
    /// Element (0, 0).
    pub ptr: *const T,
    /// Elements from a row to the next; any sign, or 0.
    pub row: isize,
    /// Elements from a column to the next; any sign, or 0.
    pub col: isize,
}

/// The output: element `(i, j)` lies at `ptr + i * row + j`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatMut<O> {
    /// Element (0, 0).
    pub ptr: *mut O,
    /// Elements from a row to the next.
    pub row: isize,
}

/// `c = alpha a b + bias + beta c`, with a `[m, k]`, b `[k, n]`, c `[m, n]`, bias `[n]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<T, O> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Mat<T>,
    pub b: Mat<T>,
    pub c: MatMut<O>,
    /// Added to every row; contiguous.
    pub bias: Option<*const T>,
    pub alpha: f64,
    /// With 0, c is not read.
    pub beta: f64,
}

// SAFETY: a description of memory; who runs it vouches for the memory.
unsafe impl<T: Send, O: Send> Send for Product<T, O> {}
// SAFETY: as above.
unsafe impl<T: Sync, O: Sync> Sync for Product<T, O> {}

/// Products with fewer multiplications than this run on the calling thread: sharing costs more.
const WORTH_SHARING: usize = 1 << 20;
/// The same for a few rows by columns that are read where they lie: memory bounds those, and one
/// thread does not get all of its rate.
const WORTH_SHARING_FEW: usize = 1 << 17;

/// Multiplies on `threads`.
///
/// # Safety
/// Every element that `product` describes exists; c does not overlap a, b, bias or itself, and
/// nothing else touches it during the call.
pub(crate) unsafe fn gemm<T: GemmElement, O: SumTarget<T::Sum>>(
    threads: &Threads,
    product: &Product<T, O>,
) {
    // SAFETY: the caller's promises; the machine runs its best instruction set.
    unsafe { gemm_with(Isa::best(), Some(threads), product) }
}

/// Multiplies on the calling thread; made for small blocks inside a task.
///
/// # Safety
/// As for [`gemm`].
pub(crate) unsafe fn gemm_serial<T: GemmElement, O: SumTarget<T::Sum>>(product: &Product<T, O>) {
    // SAFETY: the caller's promises; the machine runs its best instruction set.
    unsafe { gemm_with(Isa::best(), None, product) }
}

/// Does `count` products that do not touch each other's outputs: strided batches and groups of any
/// sizes.
///
/// # Safety
/// As for [`gemm`], for each of `product(0)` … `product(count - 1)`; no output overlaps another
/// one.
pub(crate) unsafe fn gemm_batch<T: GemmElement, O: SumTarget<T::Sum>>(
    threads: &Threads,
    count: usize,
    product: impl Fn(usize) -> Product<T, O> + Sync + Send,
) {
    // Large ones are cut into tiles of their own; small ones are shared out whole, several to a
    // task.
    const LARGE: usize = 1 << 23;
    const TASK: usize = 1 << 18;
    let work = |i: usize| {
        let Product { m, n, k, .. } = product(i);
        (m * n).saturating_mul(k.max(1))
    };
    let most = (0..count).map(work).max().unwrap_or(0);
    if count > 1 && most < LARGE {
        let group = (TASK / most.max(1)).max(1);
        let run = |task: usize| {
            for i in cut(count, group).nth(task).unwrap_or_default() {
                // SAFETY: the caller's promises.
                unsafe { gemm_serial(&product(i)) }
            }
        };
        threads.run(count.div_ceil(group), run);
        return;
    }
    for i in 0..count {
        // SAFETY: the caller's promises.
        unsafe { gemm(threads, &product(i)) }
    }
}

/// As [`gemm`] with a chosen instruction set; without threads, on the calling one.
///
/// # Safety
/// As for [`gemm`]; the machine runs `isa`.
unsafe fn gemm_with<T: GemmElement, O: SumTarget<T::Sum>>(
    isa: Isa,
    threads: Option<&Threads>,
    product: &Product<T, O>,
) {
    // SAFETY: the caller's promises; the kernel belongs to the set.
    unsafe { gemm_by(isa, T::kernel(isa), threads, product) }
}

/// As [`gemm_with`] with a chosen kernel.
///
/// # Safety
/// As for [`gemm`]; the machine runs `isa` and the kernel.
unsafe fn gemm_by<T: GemmElement, O: SumTarget<T::Sum>>(
    isa: Isa,
    kernel: &PanelKernel<T>,
    threads: Option<&Threads>,
    product: &Product<T, O>,
) {
    let Product { m, n, k, .. } = *product;
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        // SAFETY: the caller's promises.
        return unsafe { without_sums(isa, product) };
    }
    let few = kernel
        .few
        .as_ref()
        .filter(|few| m <= few.rows && product.b.row == 1);
    let least = match few {
        Some(_) => WORTH_SHARING_FEW,
        None => WORTH_SHARING,
    };
    let threads = threads.filter(|_| (m * n).saturating_mul(k) >= least);
    let mut plan = BlockExtents::new(kernel, threads.map_or(1, Threads::count), [m, n, k]);
    if few.is_some() {
        plan.take_columns_where_they_lie(kernel, [n, k]);
    }
    let mut a = Scratch::take(Use::A, plan.a_bytes(kernel));
    let mut b = Scratch::take(Use::B, plan.b_bytes(kernel));
    let keeps_sums = !O::IS_SUM && plan.block_k < k;
    let sums_bytes = if keeps_sums {
        plan.block_m * plan.block_n * size_of::<T::Sum>()
    } else {
        0
    };
    let mut sums = Scratch::take(Use::Sums, sums_bytes);
    let (a, b) = (a.ptr(), b.ptr());
    let sums = keeps_sums.then(|| sums.ptr().cast());
    let (down, deep) = (m.div_ceil(plan.block_m), k.div_ceil(plan.block_k));
    for cols in cut(n, plan.block_n) {
        for turn in 0..down * deep {
            // Right panels serve all rows before the next steps, unless there is room for the sums
            // of one block of rows only.
            let (row, step) = if keeps_sums {
                (turn / deep, turn % deep)
            } else {
                (turn % down, turn / down)
            };
            let rows = row * plan.block_m..m.min((row + 1) * plan.block_m);
            let steps = step * plan.block_k..k.min((step + 1) * plan.block_k);
            let pack_b = !plan.lean && (keeps_sums || row == 0);
            let cols = cols.clone();
            PackedBlock {
                isa,
                product,
                kernel,
                plan: &plan,
                rows,
                cols,
                steps,
                a,
                b,
                sums,
                pack_b,
                few,
            }
            .run(threads);
        }
    }
}

/// `0..n` in pieces of `size`.
fn cut(n: usize, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..n)
        .step_by(size)
        .map(move |start| start..n.min(start + size))
}

/// `c = bias + beta c`.
///
/// # Safety
/// As for [`gemm`].
unsafe fn without_sums<T: GemmElement, O: SumTarget<T::Sum>>(isa: Isa, product: &Product<T, O>) {
    let mut zeros = [T::Sum::default(); MAX_TILE_COLS];
    for cols in cut(product.n, MAX_TILE_COLS) {
        for i in 0..product.m {
            // SAFETY: the caller's promises; the row holds as many columns as the cut.
            unsafe {
                zeros.fill(T::Sum::default());
                store_row(isa, product, i, cols.clone(), zeros.as_mut_ptr());
            }
        }
    }
}

/// Writes one row of the output: `c = alpha sums + bias + beta c`. Spoils the sums.
///
/// # Safety
/// Row `i` has the columns `cols`, at most [`MAX_TILE_COLS`], `sums` holds as many; as for [`gemm`]
/// else.
unsafe fn store_row<T: GemmElement, O: SumTarget<T::Sum>>(
    isa: Isa,
    product: &Product<T, O>,
    i: usize,
    cols: Range<usize>,
    sums: *mut T::Sum,
) {
    let n = cols.len();
    // SAFETY: the caller's promises; `sums` is not part of any operand.
    unsafe {
        let c = product
            .c
            .ptr
            .offset(i as isize * product.c.row)
            .add(cols.start);
        if product.alpha != 1.0 {
            let alpha = T::Sum::of(product.alpha);
            std::slice::from_raw_parts_mut(sums, n)
                .iter_mut()
                .for_each(|s| *s = alpha * *s);
        }
        if let Some(bias) = product.bias {
            add(isa, sums, bias.add(cols.start), n, 1.0);
        }
        if product.beta != 0.0 {
            add(isa, sums, c.cast_const(), n, product.beta);
        }
        O::narrow(isa, sums, c, n);
    }
}

/// `sums += factor row`.
///
/// # Safety
/// Both hold `n` elements, at most [`MAX_TILE_COLS`]; the machine runs `isa`.
unsafe fn add<S: Sum, T: SumTarget<S>>(
    isa: Isa,
    sums: *mut S,
    row: *const T,
    n: usize,
    factor: f64,
) {
    let mut wide = [S::default(); MAX_TILE_COLS];
    // SAFETY: the caller's promises.
    let sums = unsafe {
        T::widen(isa, row, wide.as_mut_ptr(), n);
        std::slice::from_raw_parts_mut(sums, n)
    };
    let factor = S::of(factor);
    sums.iter_mut()
        .zip(&wide)
        .for_each(|(s, &x)| *s = *s + factor * x);
}

/// A part of a product whose panels are packed at one time.
struct PackedBlock<'a, T: GemmElement, O> {
    isa: Isa,
    product: &'a Product<T, O>,
    kernel: &'a PanelKernel<T>,
    plan: &'a BlockExtents,
    rows: Range<usize>,
    cols: Range<usize>,
    steps: Range<usize>,
    /// Panels of the block: `[piece of k][panel][step][lane]`.
    a: *mut u8,
    b: *mut u8,
    /// `[block_m, block_n]`, where sums outlive a block and the output cannot hold them.
    sums: Option<*mut T::Sum>,
    /// Whether the right operand's panels are to be packed together.
    pack_b: bool,
    /// How a few rows are multiplied, where the right operand's columns are read where they lie.
    few: Option<&'a FewRows<T>>,
}

// SAFETY: the threads that share a block write disjoint panels, then disjoint tiles.
unsafe impl<T: GemmElement, O: Sync> Sync for PackedBlock<'_, T, O> {}

impl<T: GemmElement, O: SumTarget<T::Sum>> PackedBlock<'_, T, O> {
    /// Packs, then multiplies.
    fn run(&self, threads: Option<&Threads>) {
        let a_tasks = self.a_panels().div_ceil(self.plan.pack_a);
        let b_tasks = if self.pack_b {
            self.b_panels().div_ceil(self.plan.pack_b)
        } else {
            0
        };
        let tiles = self.tile_rows() * self.cols.len().div_ceil(self.plan.tile_n);
        let pack = |task: usize| match task.checked_sub(b_tasks) {
            None => self.pack_b(task),
            Some(task) => self.pack_a(task),
        };
        match threads {
            Some(threads) => {
                if self.few.is_some() {
                    // Not worth a thread's while.
                    (0..a_tasks).for_each(pack);
                } else {
                    threads.run(a_tasks + b_tasks, pack);
                }
                threads.run(tiles, |tile| self.multiply(tile));
            }
            None => {
                (0..a_tasks + b_tasks).for_each(pack);
                (0..tiles).for_each(|tile| self.multiply(tile));
            }
        }
    }

    fn a_panels(&self) -> usize {
        self.rows.len().div_ceil(self.kernel.mr)
    }

    fn b_panels(&self) -> usize {
        self.cols.len().div_ceil(self.kernel.nr)
    }

    fn tile_rows(&self) -> usize {
        self.rows.len().div_ceil(self.plan.tile_m)
    }

    /// Where a panel begins among `panels` panels of `width` lanes.
    fn panel_bytes(
        &self,
        panels: usize,
        width: usize,
        piece: &Range<usize>,
        panel: usize,
    ) -> usize {
        // Every piece but the last is a multiple of `round`, so its start needs no rounding.
        let len = piece.len().next_multiple_of(self.kernel.round);
        (piece.start * panels + len * panel) * width * self.kernel.unit
    }

    fn pack_a(&self, task: usize) {
        let Product { a, .. } = self.product;
        for panel in cut(self.a_panels(), self.plan.pack_a)
            .nth(task)
            .unwrap_or_default()
        {
            let row = self.rows.start + panel * self.kernel.mr;
            let lanes = self.kernel.mr.min(self.rows.end - row);
            for piece in cut(self.steps.len(), self.plan.piece) {
                let offset =
                    row as isize * a.row + (self.steps.start + piece.start) as isize * a.col;
                let ptr = a.ptr.wrapping_offset(offset);
                let lines = Lines {
                    ptr,
                    lane: a.row,
                    step: a.col,
                    lanes,
                    k: piece.len(),
                };
                let at = self.panel_bytes(self.a_panels(), self.kernel.mr, &piece, panel);
                // SAFETY: the lines lie inside the operand; the panel inside the buffer, and this
                // task alone writes it.
                unsafe {
                    let pack = self.few.map_or(self.kernel.pack_a, |few| few.pack);
                    pack(&lines, self.a.add(at));
                }
            }
        }
    }

    fn pack_b(&self, task: usize) {
        for panel in cut(self.b_panels(), self.plan.pack_b)
            .nth(task)
            .unwrap_or_default()
        {
            for piece in cut(self.steps.len(), self.plan.piece) {
                let at = self.panel_bytes(self.b_panels(), self.kernel.nr, &piece, panel);
                // SAFETY: the panel lies inside the buffer, and this task alone writes it.
                unsafe { self.pack_b_panel(panel, &piece, self.b.add(at)) }
            }
        }
    }

    /// # Safety
    /// `dst` holds a panel of the piece's length.
    unsafe fn pack_b_panel(&self, panel: usize, piece: &Range<usize>, dst: *mut u8) {
        // SAFETY: the lines lie inside the operand; the caller vouches for `dst`.
        unsafe { (self.kernel.pack_b)(&self.b_lines(panel, piece), dst) }
    }

    /// The columns of a panel.
    fn b_lines(&self, panel: usize, piece: &Range<usize>) -> Lines<T> {
        let Product { b, .. } = self.product;
        let col = self.cols.start + panel * self.kernel.nr;
        let lanes = self.kernel.nr.min(self.cols.end - col);
        let offset = (self.steps.start + piece.start) as isize * b.row + col as isize * b.col;
        Lines {
            ptr: b.ptr.wrapping_offset(offset),
            lane: b.col,
            step: b.row,
            lanes,
            k: piece.len(),
        }
    }

    /// One tile of the block, over all of its steps.
    fn multiply(&self, tile: usize) {
        let (across, down) = (tile / self.tile_rows(), tile % self.tile_rows());
        let rows = cut(self.rows.len(), self.plan.tile_m)
            .nth(down)
            .unwrap_or_default();
        let cols = cut(self.cols.len(), self.plan.tile_n)
            .nth(across)
            .unwrap_or_default();
        let (first, last) = (self.steps.start == 0, self.steps.end == self.product.k);
        let local_bytes = rows.len() * cols.len() * size_of::<T::Sum>();
        let mut local = Scratch::take(
            Use::Tile,
            if O::IS_SUM || self.sums.is_some() {
                0
            } else {
                local_bytes
            },
        );
        let (ptr, row) = self.tile_target(&rows, &cols, &mut local);
        let alpha = T::Sum::of(if O::IS_SUM { self.product.alpha } else { 1.0 });
        let add = !first || O::IS_SUM && self.start(&rows, &cols);
        let dest = Dest {
            ptr,
            row,
            rows: 0,
            cols: 0,
            alpha,
            add,
        };
        // SAFETY: the machine runs the kernel; the destination was made for this tile.
        unsafe {
            (self.kernel.enter)();
            self.sum_tile(&rows, &cols, dest);
            (self.kernel.leave)();
        }
        if last && !O::IS_SUM {
            for i in rows.clone() {
                let cols = self.cols.start + cols.start..self.cols.start + cols.end;
                // SAFETY: this task alone writes this part of the output; the sums are complete.
                unsafe {
                    let sums = ptr.offset((i - rows.start) as isize * row);
                    store_row(self.isa, self.product, self.rows.start + i, cols, sums);
                }
            }
        }
    }

    /// Where the sums of a tile go: first element, and elements from a row to the next.
    fn tile_target(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
        local: &mut Scratch,
    ) -> (*mut T::Sum, isize) {
        let c = self.product.c;
        if O::IS_SUM {
            let offset = (self.rows.start + rows.start) as isize * c.row;
            (
                c.ptr
                    .wrapping_offset(offset)
                    .wrapping_add(self.cols.start + cols.start)
                    .cast(),
                c.row,
            )
        } else if let Some(sums) = self.sums {
            let width = self.plan.block_n;
            (
                sums.wrapping_add(rows.start * width + cols.start),
                width as isize,
            )
        } else {
            (local.ptr().cast(), cols.len() as isize)
        }
    }

    /// Prepares an output that holds its own sums; says whether to add to it.
    fn start(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        let Product { beta, bias, .. } = *self.product;
        if bias.is_none() && (beta == 0.0 || beta == 1.0) {
            return beta == 1.0;
        }
        let mut zeros = [T::Sum::default(); MAX_TILE_COLS];
        for i in rows.clone() {
            zeros.fill(T::Sum::default());
            let cols = self.cols.start + cols.start..self.cols.start + cols.end;
            // SAFETY: this task alone writes this part of the output.
            unsafe {
                store_row(
                    self.isa,
                    self.product,
                    self.rows.start + i,
                    cols,
                    zeros.as_mut_ptr(),
                )
            };
        }
        true
    }

    /// Multiplies all panels of a tile.
    ///
    /// # Safety
    /// `dest` begins at the tile's sums; the kernel has been entered.
    unsafe fn sum_tile(&self, rows: &Range<usize>, cols: &Range<usize>, mut dest: Dest<T::Sum>) {
        let PanelKernel { mr, nr, .. } = *self.kernel;
        for piece in cut(self.steps.len(), self.plan.piece) {
            if let Some(few) = self.few {
                // SAFETY: the caller's promises.
                unsafe { self.sum_few(few, cols, &piece, &dest) };
            } else if self.plan.lean {
                // SAFETY: the caller's promises.
                unsafe { self.sum_lean(rows, cols, &piece, &dest) };
            } else {
                for i in rows.clone().step_by(mr) {
                    for j in cols.clone().step_by(nr) {
                        let at = self.panel_bytes(self.b_panels(), nr, &piece, j / nr);
                        // SAFETY: tiles begin at whole panels, and both are packed.
                        unsafe {
                            self.sum_panels(rows, cols, &piece, (i, j), self.b.add(at), &dest)
                        };
                    }
                }
            }
            dest.add = true;
        }
    }

    /// All rows by columns that are read where they lie.
    ///
    /// # Safety
    /// As for [`Self::sum_tile`]; the rows were packed by `few`.
    unsafe fn sum_few(
        &self,
        few: &FewRows<T>,
        cols: &Range<usize>,
        piece: &Range<usize>,
        dest: &Dest<T::Sum>,
    ) {
        let PanelKernel { mr, nr, .. } = *self.kernel;
        let rows = self.a.wrapping_add(self.panel_bytes(1, mr, piece, 0));
        for j in cols.clone().step_by(nr) {
            let lines = self.b_lines(j / nr, piece);
            let dest = Dest {
                ptr: dest.ptr.wrapping_add(j - cols.start),
                rows: self.rows.len(),
                cols: nr.min(cols.end - j),
                ..*dest
            };
            // SAFETY: the columns lie inside the operand, and the destination inside the tile.
            unsafe { (few.multiply)(&lines, rows, &dest) };
        }
    }

    /// The only tile that needs these columns packs them itself, panel by panel.
    ///
    /// # Safety
    /// As for [`Self::sum_tile`].
    unsafe fn sum_lean(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
        piece: &Range<usize>,
        dest: &Dest<T::Sum>,
    ) {
        let PanelKernel {
            mr,
            nr,
            round,
            unit,
            ..
        } = *self.kernel;
        let mut panel = Scratch::take(Use::Panel, piece.len().next_multiple_of(round) * nr * unit);
        let panel = panel.ptr();
        for j in cols.clone().step_by(nr) {
            // SAFETY: the buffer was made for one panel, and the caller's promises.
            unsafe {
                self.pack_b_panel(j / nr, piece, panel);
                for i in rows.clone().step_by(mr) {
                    self.sum_panels(rows, cols, piece, (i, j), panel, dest);
                }
            }
        }
    }

    /// Multiplies the left panel of row `i` and the right panel `b` of column `j`.
    ///
    /// # Safety
    /// Both panels are packed; `dest` begins at the tile's sums; the kernel has been entered.
    #[inline]
    unsafe fn sum_panels(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
        piece: &Range<usize>,
        (i, j): (usize, usize),
        b: *const u8,
        dest: &Dest<T::Sum>,
    ) {
        let PanelKernel { mr, nr, .. } = *self.kernel;
        let at = self.panel_bytes(self.a_panels(), mr, piece, i / mr);
        // SAFETY: rows and columns of the destination lie inside the tile.
        unsafe {
            let ptr = dest
                .ptr
                .offset((i - rows.start) as isize * dest.row)
                .add(j - cols.start);
            let dest = Dest {
                ptr,
                rows: mr.min(rows.end - i),
                cols: nr.min(cols.end - j),
                ..*dest
            };
            (self.kernel.multiply)(piece.len(), self.a.add(at), b, &dest);
        }
    }
}
