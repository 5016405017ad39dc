//! Kernels along dimensions on a GPU: reductions, positions of extremes, running sums, softmax, the
//! k largest.
//!
//! A reduction sorts the dimensions of its source into kept and folded ones and merges neighbours
//! ([`ReducePlan`]). Where neighbouring results lie side by side, threads fold whole stretches of
//! results (column sums); elsewhere a thread, a warp or a block folds one result. Few results of
//! many elements are cut into parts, which meet in scratch memory and are folded by a second
//! launch.
//!
//! # Invariants
//! - How the work is cut, and the order in which parts are joined, depends on the operands' layouts
//!   alone: neither on addresses nor on the GPU.
//! - Floats are folded in the accumulator type and rounded once.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use super::elementwise::{stage, unsupported};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{Kernel, Reduce, View};
use crate::shape::{Layout, Shape};

const FOLD: &str = include_str!("kernels/fold.cu");
const ARG: &str = include_str!("kernels/arg.cu");
const SCAN: &str = include_str!("kernels/scan.cu");
const SOFTMAX: &str = include_str!("kernels/softmax.cu");
const TOPK: &str = include_str!("kernels/topk.cu");

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    if call.dst(0).numel() == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Reduce { op, accumulate } => reduce(call, *op, *accumulate),
            Kernel::ArgReduce { largest, dim } => arg_reduce(call, *largest, *dim),
            Kernel::CumSum { dim, reverse } => cumsum(call, *dim, *reverse),
            Kernel::Softmax { log } => softmax(call, *log),
            Kernel::SoftmaxGrad { log } => softmax_grad(call, *log),
            Kernel::TopK { largest } => topk(call, *largest),
            _ => Err(unsupported(call)),
        }
    }
}

/// Room for the parts of a reduction; the others need none.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    match (kernel, src, dst) {
        (Kernel::Reduce { .. }, [Some(x)], [Some(y)]) => {
            let plan = ReducePlan::new(x, y);
            if plan.parts == 1 {
                0
            } else {
                plan.parts * plan.kept * stage_size(x.dtype)
            }
        }
        _ => 0,
    }
}

/// Bytes of the type that a type is folded in.
fn stage_size(dtype: DType) -> usize {
    if matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        4
    } else {
        8
    }
}

/// Bools are bytes here: 0 and 1 are folded like any numbers.
fn item(dtype: DType) -> &'static str {
    if dtype == DType::Bool {
        c_type(DType::U8)
    } else {
        c_type(dtype)
    }
}

/// A dimension: size and stride.
type Dim = (usize, isize);

/// A reduction, independent of types but for the size of an element.
#[derive(Debug)]
struct ReducePlan {
    /// The kept dimensions, in order.
    keep: Vec<Dim>,
    /// The folded dimensions, largest stride first.
    fold: Vec<Dim>,
    /// Number of results.
    kept: usize,
    /// Number of elements per result.
    folded: usize,
    /// Whether neighbouring results are folded together.
    columns: bool,
    /// Threads that fold one result (or, in the column case, stretches of results) together.
    threads: usize,
    /// Parts into which the elements of each result are cut.
    parts: usize,
    /// Elements of a part.
    each: usize,
}

impl ReducePlan {
    fn new(x: &View, y: &View) -> Self {
        let (mut keep, mut fold) = (Vec::new(), Vec::new());
        for (axis, (&size, &stride)) in x.shape().iter().zip(x.layout.strides()).enumerate() {
            if size != 1 {
                if y.shape()[axis] == 1 {
                    &mut fold
                } else {
                    &mut keep
                }
                .push((size, stride));
            }
        }
        fold.sort_by_key(|(_, stride): &Dim| std::cmp::Reverse(stride.abs()));
        let (keep, fold) = (merged(&keep), merged(&fold));
        let count = |dims: &[Dim]| dims.iter().map(|d| d.0).product::<usize>();
        let (kept, folded) = (count(&keep), count(&fold));
        let dense = fold.last().is_some_and(|d| d.1 == 1);
        let width = keep
            .last()
            .filter(|d| d.1 == 1 && !dense && !fold.is_empty())
            .map_or(0, |d| d.0);
        let columns = width >= 32;
        let (threads, parts) = if columns {
            let stretches = kept / width * width.div_ceil(256);
            let threads = folded.next_power_of_two().min(8);
            (
                threads,
                1024usize.div_ceil(stretches.max(1)).min(folded / 64),
            )
        } else {
            match folded {
                0..=8 => (1, 1),
                9..=2048 => (32, 1),
                _ => (256, 1024usize.div_ceil(kept.max(1)).min(folded / 8192)),
            }
        };
        // Parts begin at multiples of any pack.
        let each = folded.div_ceil(parts.max(1)).next_multiple_of(16).max(1);
        let parts = folded.div_ceil(each).max(1);
        Self {
            keep,
            fold,
            kept,
            folded,
            columns,
            threads,
            parts,
            each,
        }
    }

    /// Elements of a result that lie side by side and are folded at once.
    fn row_pack(&self, size: usize) -> usize {
        let pack = 16 / size;
        match self.fold.last() {
            Some(&(inner, 1)) if self.fold.len() == 1 || inner.is_multiple_of(pack) => pack,
            _ => 1,
        }
    }

    /// Whether packs of rows (or columns) lie at multiples of 16 bytes.
    fn aligned(&self, ptr: u64, size: usize) -> bool {
        let whole = |dims: &[Dim]| {
            dims.iter()
                .all(|d| (d.1.unsigned_abs() * size).is_multiple_of(16))
        };
        let last = usize::from(!self.keep.is_empty());
        let [keep, fold] = match self.columns {
            true => [&self.keep[..self.keep.len() - last], &self.fold[..]],
            false => [
                &self.keep[..],
                &self.fold[..self.fold.len().saturating_sub(1)],
            ],
        };
        ptr.is_multiple_of(16) && whole(keep) && whole(fold)
    }
}

/// Neighbouring dimensions that one stride covers, made one.
fn merged(dims: &[Dim]) -> Vec<Dim> {
    let mut out: Vec<Dim> = Vec::with_capacity(dims.len());
    for &(size, stride) in dims {
        match out.last_mut() {
            Some(last) if last.1 == stride * size as isize => *last = (last.0 * size, stride),
            _ => out.push((size, stride)),
        }
    }
    out
}

/// An address with dimensions.
fn laid(ptr: u64, dtype: DType, dims: &[Dim]) -> Result<View> {
    let sizes: Vec<usize> = dims.iter().map(|d| d.0).collect();
    let strides: Vec<isize> = dims.iter().map(|d| d.1).collect();
    Ok(View {
        ptr,
        dtype,
        layout: Layout::strided(Shape::new(&sizes)?, &strides),
    })
}

/// The macro that `fold.cu` knows an operation by.
fn op_name(op: Reduce) -> &'static str {
    match op {
        Reduce::Sum | Reduce::Mean => "SUM",
        Reduce::Prod => "PROD",
        Reduce::Max => "MAX",
        Reduce::Min => "MIN",
        Reduce::Any => "ANY",
        Reduce::All => "ALL",
    }
}

fn fold_unit(
    entry: &'static str,
    op: Reduce,
    x: &'static str,
    y: &'static str,
    pack: usize,
) -> Unit {
    let columns = u8::from(entry == "fold_columns");
    let unit = Unit::new("fold", FOLD, entry)
        .with("OP", op_name(op))
        .with("X_T", x)
        .with("Y_T", y);
    unit.with("WIDTH", pack).with("COLUMNS", columns)
}

/// What the last launch of a reduction does to a result, and where it goes.
struct ReduceFinish {
    ptr: u64,
    name: &'static str,
    mean: bool,
    count: usize,
    accumulate: bool,
}

impl ReduceFinish {
    fn args(&self, args: Args) -> Args {
        args.i32(i32::from(self.mean))
            .size(self.count)
            .i32(i32::from(self.accumulate))
    }
}

/// # Safety
/// As [`run`].
unsafe fn reduce(call: &Call<'_>, op: Reduce, accumulate: bool) -> Result<()> {
    let (x, y) = (call.src(0), call.dst(0));
    let plan = ReducePlan::new(x, y);
    let wide = stage(x.dtype);
    let name = if item(y.dtype) == wide {
        wide
    } else {
        item(x.dtype)
    };
    let last = ReduceFinish {
        ptr: y.ptr,
        name,
        mean: op == Reduce::Mean,
        count: plan.folded,
        accumulate,
    };
    // SAFETY: the caller's promise; scratch holds `parts · kept` values in the stage, written whole
    // by the first launch before the second reads them on the same stream.
    unsafe {
        if plan.parts == 1 {
            return fold(call, &plan, op, x, &last);
        }
        let parts = call.scratch_ptr();
        fold(
            call,
            &plan,
            op,
            x,
            &ReduceFinish {
                ptr: parts,
                name: wide,
                mean: false,
                count: 0,
                accumulate: false,
            },
        )?;
        join(call, &plan, op, wide, parts, &last)
    }
}

/// The first launch, or the only one.
///
/// # Safety
/// As [`run`]; `out` is room for `parts · kept` values of its type.
unsafe fn fold(
    call: &Call<'_>,
    plan: &ReducePlan,
    op: Reduce,
    x: &View,
    out: &ReduceFinish,
) -> Result<()> {
    let aligned = plan.aligned(x.ptr, x.dtype.size());
    let fold = laid(x.ptr, x.dtype, &plan.fold)?;
    if plan.columns {
        let pack = if aligned { 16 / x.dtype.size() } else { 1 };
        let (&(width, _), outer) = plan
            .keep
            .split_last()
            .expect("columns are a kept dimension");
        let stretch = 256 / plan.threads;
        let tiles = plan.kept / width * width.div_ceil(stretch * pack);
        let args = Args::new()
            .view(&laid(x.ptr, x.dtype, outer)?)
            .view(&fold)
            .ptr(out.ptr);
        let args = args
            .size(plan.kept)
            .size(width)
            .size(plan.folded)
            .size(plan.each)
            .i32(i32::from(aligned));
        let unit = fold_unit("fold_columns", op, item(x.dtype), out.name, pack);
        let (grid, block) = (
            [tiles as u32, plan.parts as u32, 1],
            [stretch as u32, plan.threads as u32, 1],
        );
        // SAFETY: the arguments are those of `fold_columns`; the rest is the caller's promise.
        return unsafe { call.launch(&unit, grid, block, 0, &mut out.args(args)) };
    }
    let pack = plan.row_pack(x.dtype.size());
    let args = Args::new()
        .view(&laid(x.ptr, x.dtype, &plan.keep)?)
        .view(&fold)
        .ptr(out.ptr);
    let args = args
        .size(plan.kept)
        .size(plan.folded)
        .size(plan.each)
        .i32(i32::from(aligned));
    let unit = fold_unit("fold_rows", op, item(x.dtype), out.name, pack);
    let (grid, block) = team(plan.kept, plan.threads);
    // SAFETY: the arguments are those of `fold_rows`; the rest is the caller's promise.
    unsafe {
        call.launch(
            &unit,
            [grid, plan.parts as u32, 1],
            block,
            0,
            &mut out.args(args),
        )
    }
}

/// The second launch: the parts of each result, in order.
///
/// # Safety
/// As [`run`]; `parts` holds `parts · kept` values of type `wide`.
unsafe fn join(
    call: &Call<'_>,
    plan: &ReducePlan,
    op: Reduce,
    wide: &'static str,
    parts: u64,
    out: &ReduceFinish,
) -> Result<()> {
    let keep = laid(parts, DType::F32, &[(plan.kept, 1)])?;
    let fold = laid(parts, DType::F32, &[(plan.parts, plan.kept as isize)])?;
    let threads = match plan.parts {
        0..=64 => 1,
        65..=256 => 32,
        _ => 256,
    };
    let args = Args::new().view(&keep).view(&fold).ptr(out.ptr);
    let args = args
        .size(plan.kept)
        .size(plan.parts)
        .size(plan.parts)
        .i32(0);
    let unit = fold_unit("fold_rows", op, wide, out.name, 1);
    let (grid, block) = team(plan.kept, threads);
    // SAFETY: the arguments are those of `fold_rows`; the rest is the caller's promise.
    unsafe { call.launch(&unit, [grid, 1, 1], block, 0, &mut out.args(args)) }
}

/// Blocks of 256 threads, `threads` of which take one of `count` lines.
fn team(count: usize, threads: usize) -> (u32, [u32; 3]) {
    let lines = (256 / threads).max(1);
    (
        count.div_ceil(lines) as u32,
        [threads as u32, lines as u32, 1],
    )
}

/// Every dimension but `dim`, merged.
fn others(view: &View, dim: usize) -> Result<View> {
    let dims = view
        .shape()
        .iter()
        .copied()
        .zip(view.layout.strides().iter().copied());
    let dims: Vec<Dim> = dims
        .enumerate()
        .filter(|(axis, d)| *axis != dim && d.0 != 1)
        .map(|(_, d)| d)
        .collect();
    laid(view.ptr, view.dtype, &merged(&dims))
}

fn arg_unit(dtype: DType, largest: bool) -> Unit {
    Unit::new("arg", ARG, "arg_line")
        .with("X_T", item(dtype))
        .with("LARGEST", u8::from(largest))
}

/// `[x any strides] -> [y: i64]`.
///
/// # Safety
/// As [`run`].
unsafe fn arg_reduce(call: &Call<'_>, largest: bool, dim: usize) -> Result<()> {
    let (x, y) = (call.src(0), call.dst(0));
    let (size, stride, count) = (x.shape()[dim], x.layout.strides()[dim], y.numel());
    let threads = match size {
        0..=16 => 1,
        _ if stride != 1 && count >= 4096 => 1,
        17..=2048 => 32,
        // The likeliest of a vocabulary: one line, on which the next step waits.
        32_768.. if count <= 64 => 1024,
        _ => 256,
    };
    let mut args = Args::new()
        .view(&others(x, dim)?)
        .ptr(y.ptr)
        .size(count)
        .size(size)
        .i64(stride as i64);
    let (grid, block) = team(count, threads);
    // SAFETY: the arguments are those of `arg_line`; y is dense, and the dimension is not empty by
    // contract.
    unsafe {
        call.launch(
            &arg_unit(x.dtype, largest),
            [grid, 1, 1],
            block,
            0,
            &mut args,
        )
    }
}

fn scan_unit(entry: &'static str, dtype: DType) -> Unit {
    Unit::new("scan", SCAN, entry).with("X_T", item(dtype))
}

/// `[x any strides] -> [y]`.
///
/// # Safety
/// As [`run`].
unsafe fn cumsum(call: &Call<'_>, dim: usize, reverse: bool) -> Result<()> {
    let (x, y) = (call.src(0), call.dst(0));
    let (size, stride) = (x.shape()[dim], x.layout.strides()[dim]);
    let step = y.shape().contiguous_strides()[dim];
    let count = y.numel() / size;
    // Strided lines go side by side if there are enough of them; short ones are not worth a block.
    let alone = size <= 16 || (stride != 1 && count >= 4096);
    let args = Args::new().view(&others(x, dim)?).view(&others(y, dim)?);
    let args = args
        .size(count)
        .size(size)
        .i64(stride as i64)
        .i64(step as i64);
    let mut args = args.i32(i32::from(reverse));
    let (entry, grid) = if alone {
        ("scan_one", Call::blocks(count))
    } else {
        ("scan_many", [count as u32, 1, 1])
    };
    // SAFETY: the arguments are those of either kernel; y is dense by contract and of x's shape and
    // type.
    unsafe { call.launch(&scan_unit(entry, x.dtype), grid, [256, 1, 1], 0, &mut args) }
}

/// Rows of the last dimension: their number and length.
fn rows(view: &View) -> (usize, usize) {
    let width = view.shape().last().copied().unwrap_or(1);
    (view.numel() / width.max(1), width)
}

/// How softmax cuts rows of a width: threads per row, and packs that a thread keeps in registers.
fn softmax_cut(width: usize, size: usize) -> (usize, usize) {
    let packs = width.div_ceil(16 / size);
    let threads = if packs <= 128 { 32 } else { 256 };
    match packs.div_ceil(threads) {
        1 => (threads, 1),
        2..=4 => (threads, 4),
        _ => (threads, 0),
    }
}

fn softmax_unit(entry: &'static str, dtype: DType, log: bool, hold: usize) -> Unit {
    let unit = Unit::new("softmax", SOFTMAX, entry).with("X_T", c_type(dtype));
    unit.with("LOG", u8::from(log))
        .with("HOLD", hold)
        .with("GRAD", u8::from(entry == "softmax_grad"))
}

/// `[x contiguous] -> [y]`.
///
/// # Safety
/// As [`run`].
unsafe fn softmax(call: &Call<'_>, log: bool) -> Result<()> {
    // SAFETY: the caller's promise is passed on.
    unsafe { along_rows(call, "softmax", log, &[*call.src(0), *call.dst(0)]) }
}

/// `[y, dy contiguous] -> [dx]`.
///
/// # Safety
/// As [`run`].
unsafe fn softmax_grad(call: &Call<'_>, log: bool) -> Result<()> {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        along_rows(
            call,
            "softmax_grad",
            log,
            &[*call.src(0), *call.src(1), *call.dst(0)],
        )
    }
}

/// # Safety
/// As [`run`]; the operands are dense, in the order of the kernel's arguments.
unsafe fn along_rows(
    call: &Call<'_>,
    entry: &'static str,
    log: bool,
    operands: &[View],
) -> Result<()> {
    let dtype = operands[0].dtype;
    if !dtype.is_float() || operands.iter().any(|v| v.dtype != dtype) {
        return Err(unsupported(call));
    }
    let (rows, width) = rows(&operands[0]);
    let (threads, hold) = softmax_cut(width, dtype.size());
    let packed = (width * dtype.size()).is_multiple_of(16)
        && operands.iter().all(|v| v.ptr.is_multiple_of(16));
    let args = operands.iter().fold(Args::new(), |args, v| args.ptr(v.ptr));
    let mut args = args.size(rows).size(width).i32(i32::from(packed));
    let (grid, block) = team(rows, threads);
    // SAFETY: the arguments are those of the kernel; the operands are the caller's promise.
    unsafe {
        call.launch(
            &softmax_unit(entry, dtype, log, hold),
            [grid, 1, 1],
            block,
            0,
            &mut args,
        )
    }
}

fn topk_unit(entry: &'static str, dtype: DType, largest: bool) -> Unit {
    Unit::new("topk", TOPK, entry)
        .with("X_T", item(dtype))
        .with("LARGEST", u8::from(largest))
}

/// `[x contiguous] -> [values, indices: i64]`.
///
/// # Safety
/// As [`run`].
unsafe fn topk(call: &Call<'_>, largest: bool) -> Result<()> {
    let (x, values, places) = (call.src(0), call.dst(0), call.dst(1));
    let ((count, width), k) = (rows(x), rows(values).1);
    let args = Args::new().ptr(x.ptr).ptr(values.ptr).ptr(places.ptr);
    // SAFETY: the arguments are those of the kernels; operands are dense by contract.
    unsafe {
        if k <= 64 {
            let (grid, block) = team(count, if width <= 2048 { 32 } else { 256 });
            let mut args = args.size(count).size(width).size(k);
            return call.launch(
                &topk_unit("topk_pick", x.dtype, largest),
                [grid, 1, 1],
                block,
                0,
                &mut args,
            );
        }
        let grid = [(count * width.div_ceil(256)) as u32, 1, 1];
        let mut args = args.size(width).size(k);
        call.launch(
            &topk_unit("topk_rank", x.dtype, largest),
            grid,
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// Every operation in the types that have it.
pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    let all = [Reduce::Sum, Reduce::Prod, Reduce::Max, Reduce::Min];
    for x in FLOATS {
        let (own, wide, pack) = (c_type(x), stage(x), 16 / x.size());
        for op in all {
            units.push(fold_unit("fold_rows", op, own, own, pack));
            units.push(fold_unit("fold_rows", op, own, wide, 1));
            units.push(fold_unit("fold_rows", op, wide, own, 1));
            units.push(fold_unit("fold_columns", op, own, wide, pack));
            units.push(fold_unit("fold_columns", op, own, own, 1));
        }
        for log in [false, true] {
            for hold in [0, 1, 4] {
                units.push(softmax_unit("softmax", x, log, hold));
                units.push(softmax_unit("softmax_grad", x, log, hold));
            }
        }
    }
    for x in [DType::I64, DType::I32, DType::U32, DType::U8] {
        let (own, wide, pack) = (item(x), stage(x), 16 / x.size());
        for op in all {
            units.push(fold_unit("fold_rows", op, own, own, pack));
            units.push(fold_unit("fold_columns", op, own, wide, pack));
        }
    }
    for op in [Reduce::Any, Reduce::All] {
        units.push(fold_unit(
            "fold_rows",
            op,
            item(DType::Bool),
            item(DType::Bool),
            16,
        ));
        units.push(fold_unit(
            "fold_columns",
            op,
            item(DType::Bool),
            item(DType::Bool),
            16,
        ));
    }
    for x in DType::ALL.into_iter().filter(|x| *x != DType::Bool) {
        for largest in [false, true] {
            units.push(arg_unit(x, largest));
            units.extend(["topk_pick", "topk_rank"].map(|entry| topk_unit(entry, x, largest)));
        }
        units.extend(["scan_one", "scan_many"].map(|entry| scan_unit(entry, x)));
    }
    units
}

#[cfg(test)]
mod tests {
    use super::{ReducePlan, scratch, softmax_cut};
    use crate::dtype::DType;
    use crate::kernel::{Kernel, Reduce, View};
    use crate::shape::{Layout, Shape};

    fn dense(dtype: DType, sizes: &[usize]) -> View {
        View {
            ptr: 1 << 20,
            dtype,
            layout: Layout::contiguous(Shape::new(sizes).unwrap()),
        }
    }

    fn offset(dims: &[(usize, isize)], mut i: usize) -> isize {
        let mut at = 0;
        for (size, stride) in dims.iter().rev() {
            at += (i % size) as isize * stride;
            i /= size;
        }
        at
    }

    /// The shapes that training folds: what is cut how.
    #[test]
    fn plans_of_the_shapes_that_matter() {
        let plan = |x: &[usize], y: &[usize]| {
            ReducePlan::new(&dense(DType::BF16, x), &dense(DType::F32, y))
        };
        let bias = plan(&[8192, 4096], &[1, 4096]);
        assert!(
            bias.columns && bias.threads == 8 && bias.parts == 64 && bias.each == 128,
            "{bias:?}"
        );
        let total = plan(&[1 << 20, 64], &[1, 1]);
        assert!(
            !total.columns && total.parts == 1024 && total.row_pack(2) == 8,
            "{total:?}"
        );
        let last = plan(&[8192, 4096], &[8192, 1]);
        assert!(
            !last.columns && last.threads == 256 && last.parts == 1,
            "{last:?}"
        );
        let narrow = plan(&[40_000, 2], &[1, 2]);
        assert!(!narrow.columns && narrow.row_pack(2) == 1, "{narrow:?}");
        let planes = plan(&[8, 3, 16, 16], &[1, 3, 1, 1]);
        assert!(
            !planes.columns && planes.row_pack(2) == 8 && planes.fold.len() == 2,
            "{planes:?}"
        );
        let kernel = Kernel::Reduce {
            op: Reduce::Sum,
            accumulate: false,
        };
        let (x, y) = (
            dense(DType::BF16, &[8192, 4096]),
            dense(DType::F32, &[1, 4096]),
        );
        assert_eq!(scratch(&kernel, &[Some(x)], &[Some(y)]), 64 * 4096 * 4);
    }

    /// Every element of the source is folded into its result once, whatever the cut.
    #[test]
    fn every_element_is_folded_once() {
        for (sizes, kept) in [
            (&[6, 40, 5][..], &[6, 1, 5][..]),
            (&[6, 40, 50], &[1, 40, 50]),
            (&[3, 4, 64], &[3, 1, 64]),
            (&[700, 33], &[1, 33]),
            (&[30_000], &[1]),
            (&[5], &[5]),
            (&[0, 3], &[1, 3]),
        ] {
            let (x, y) = (dense(DType::F32, sizes), dense(DType::F32, kept));
            let plan = ReducePlan::new(&x, &y);
            let mut seen = vec![0; x.numel()];
            for result in 0..plan.kept {
                for part in 0..plan.parts {
                    for i in part * plan.each..((part + 1) * plan.each).min(plan.folded) {
                        seen[(offset(&plan.keep, result) + offset(&plan.fold, i)) as usize] += 1;
                    }
                }
            }
            assert_eq!(plan.kept, y.numel(), "{sizes:?}");
            assert!(
                seen.iter().all(|n| *n == 1),
                "{sizes:?} to {kept:?}: {plan:?}"
            );
        }
    }

    /// Rows fit into what their threads hold.
    #[test]
    fn softmax_holds_whole_rows() {
        for size in [2, 4, 8] {
            for width in [1, 7, 128, 1031, 4096, 8192, 150_000] {
                let (threads, hold) = softmax_cut(width, size);
                assert!(
                    hold == 0 || threads * hold * 16 / size >= width,
                    "{width} of {size}"
                );
            }
        }
    }
}
