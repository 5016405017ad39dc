//! Kernels that read and add at indexed places.
//!
//! Reading copies words: whole rows where they lie densely, elements otherwise. Adding first sorts
//! the indices by destination ([`sort`]) and then the thread that finds the first of a run of equal
//! ones adds the run in order; short lines of a scatter are added by one thread each. An index
//! outside its dimension is reported and left out.
//!
//! # Invariants
//! - Additions to one element happen in the order of the indices; nothing is added atomically.
//! - How work is cut depends on sizes and layouts alone.

pub(super) mod sort;

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use sort::Sort;

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::IndexSelect { dim } => index_select(call, *dim),
            Kernel::Gather { dim } => pick(call, *dim, false),
            Kernel::IndexAdd { dim } => index_add(call, *dim),
            Kernel::ScatterAdd { dim } => scatter_add(call, *dim),
            _ => Err(Error::invalid(
                call.kernel.name(),
                "not an operation of indices",
            )),
        }
    }
}

pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let (Some(Some(x)), Some(Some(index)), Some(Some(y))) = (src.first(), src.get(1), dst.first())
    else {
        return 0;
    };
    match kernel {
        Kernel::IndexAdd { dim } if y.numel() > 0 && index.numel() > 0 => {
            Sort::new(index.numel(), y.shape()[*dim]).bytes()
        }
        Kernel::ScatterAdd { dim } if sorts(x, y, *dim) => Sort::new(x.numel(), y.numel()).bytes(),
        _ => 0,
    }
}

/// `kind` of `index_at` in common.cuh.
fn kind(index: &View) -> i32 {
    match index.dtype {
        DType::I64 => 0,
        DType::I32 => 1,
        _ => 2,
    }
}

/// Elements that dimensions before `dim` give, and those after.
fn around(view: &View, dim: usize) -> (usize, usize) {
    (
        view.shape()[..dim].iter().product(),
        view.shape()[dim + 1..].iter().product(),
    )
}

/// Whether elements of dimensions after `dim` lie densely.
fn dense_after(view: &View, dim: usize) -> bool {
    let mut next = 1;
    let after = view
        .shape()
        .iter()
        .zip(view.layout.strides())
        .skip(dim + 1)
        .rev();
    after.into_iter().all(|(size, stride)| {
        let fits = *size == 1 || *stride == next;
        next *= *size as isize;
        fits
    })
}

/// Whether rows of `inner` elements after `dim` start at multiples of `bytes` and are made of them.
fn even_rows(view: &View, dim: usize, inner: usize, bytes: usize) -> bool {
    let size = view.dtype.size();
    let steps = view.shape().iter().zip(view.layout.strides()).take(dim + 1);
    let even = |stride: &isize| (stride.unsigned_abs() * size).is_multiple_of(bytes);
    view.ptr.is_multiple_of(bytes as u64)
        && (inner * size).is_multiple_of(bytes)
        && steps.into_iter().all(|(n, stride)| *n == 1 || even(stride))
}

fn word(bytes: usize) -> &'static str {
    match bytes {
        1 => "unsigned char",
        2 => "unsigned short",
        4 => "unsigned",
        8 => "unsigned long long",
        _ => "uint4",
    }
}

fn copies(entry: &'static str, bytes: usize) -> Unit {
    Unit::new("index_pick", include_str!("kernels/index_pick.cu"), entry).with("WORD", word(bytes))
}

/// `[x, index] -> [y]`, by rows where they are dense.
///
/// # Safety
/// As [`run`].
unsafe fn index_select(call: &Call<'_>, dim: usize) -> Result<()> {
    let (x, index, y) = (call.src(0), call.src(1), call.dst(0));
    if y.numel() == 0 {
        return Ok(());
    }
    let ((outer, inner), many) = (around(y, dim), y.shape()[dim]);
    if !dense_after(x, dim) {
        // SAFETY: as for this function.
        return unsafe { pick(call, dim, true) };
    }
    let size = x.dtype.size();
    let fits =
        |bytes: &usize| even_rows(x, dim, inner, *bytes) && y.ptr.is_multiple_of(*bytes as u64);
    let bytes = [16, 8, 4, 2, 1].into_iter().find(fits).unwrap_or(1);
    let words = inner * size / bytes;
    let lanes = words.div_ceil(4).next_power_of_two().min(256);
    let rows = outer * many;
    let grid = [rows.div_ceil(256 / lanes) as u32, 1, 1];
    let args = Args::new()
        .view(x)
        .i32(dim as i32)
        .size(size)
        .ptr(index.ptr)
        .i32(kind(index))
        .ptr(y.ptr);
    let args = args
        .size(rows)
        .size(many)
        .size(words)
        .i32(lanes as i32)
        .ptr(call.alarm.device);
    let mut args = args.u32(call.alarm.code(call.kernel.name()));
    // SAFETY: the arguments are the kernel's parameters; rows and words fit the alignment, as found
    // above.
    unsafe {
        call.launch(
            &copies("index_rows", bytes),
            grid,
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// One element after the other; `along`: the index is one list along `dim`.
///
/// # Safety
/// As [`run`].
unsafe fn pick(call: &Call<'_>, dim: usize, along: bool) -> Result<()> {
    let (x, index, y) = (call.src(0), call.src(1), call.dst(0));
    let args = Args::new()
        .view(x)
        .view(y)
        .i32(dim as i32)
        .i32(i32::from(along))
        .ptr(index.ptr);
    let args = args.i32(kind(index)).size(y.numel()).ptr(call.alarm.device);
    let mut args = args.u32(call.alarm.code(call.kernel.name()));
    let unit = copies("index_pick", x.dtype.size());
    // SAFETY: the arguments are the kernel's parameters; the index is checked there.
    unsafe { call.launch(&unit, Call::blocks(y.numel()), [256, 1, 1], 0, &mut args) }
}

/// The types of an addition: bool counts as bytes.
fn adds(entry: &'static str, src: DType, dst: DType, columns: usize) -> Unit {
    let name = |dtype: DType| {
        if dtype == DType::Bool {
            "unsigned char"
        } else {
            c_type(dtype)
        }
    };
    let sum = match src {
        DType::F64 => "double",
        dtype if dtype.is_float() => "float",
        _ => "long long",
    };
    let unit = Unit::new("index_add", include_str!("kernels/index_add.cu"), entry);
    unit.with("SRC", name(src))
        .with("DST", name(dst))
        .with("SUM", sum)
        .with("FEW", columns)
}

/// Columns of a thread: 8 bytes of the source.
fn columns(dtype: DType) -> usize {
    8 / dtype.size()
}

/// `[src, index] -> [y]`: keys, sort, runs.
///
/// # Safety
/// As [`run`].
unsafe fn index_add(call: &Call<'_>, dim: usize) -> Result<()> {
    let (src, index, y) = (call.src(0), call.src(1), call.dst(0));
    let ((outer, inner), size, many) = (around(y, dim), y.shape()[dim], index.numel());
    if outer * inner * many == 0 {
        return Ok(());
    }
    let name = call.kernel.name();
    if size == 0 {
        return Err(Error::invalid(
            name,
            format!("{many} indices into {}, which has no place", y.shape()),
        ));
    }
    let sort = Sort::checked(name, many, size)?;
    let scratch = call.scratch_ptr();
    let args = Args::new()
        .ptr(index.ptr)
        .i32(kind(index))
        .size(many)
        .size(size)
        .u32(size as u32);
    let mut args = args
        .ptr(sort.keys(scratch))
        .ptr(call.alarm.device)
        .u32(call.alarm.code(name));
    // SAFETY: the arguments are the kernel's parameters; the keys are a list of the scratch memory,
    // which `scratch` made as large as the sort asks.
    let sorted = unsafe {
        call.launch(
            &sort::unit("index_keys"),
            Call::blocks(many),
            [256, 1, 1],
            0,
            &mut args,
        )?;
        sort.run(call, scratch)?
    };
    let few = columns(src.dtype);
    let packed = dense_after(src, dim)
        && inner.is_multiple_of(few)
        && even_rows(src, dim, inner, 8)
        && y.ptr.is_multiple_of((few * y.dtype.size()) as u64);
    let width = if packed { few } else { 1 };
    let threads = inner.div_ceil(width).next_multiple_of(32).min(256);
    let threads = if threads > 128 {
        256
    } else {
        threads.next_power_of_two()
    };
    let places = 256 / threads;
    let blocks = inner.div_ceil(width * threads).min(65_535);
    let grid = [
        many.div_ceil(places) as u32,
        blocks as u32,
        outer.min(65_535) as u32,
    ];
    let args = Args::new()
        .view(src)
        .i32(dim as i32)
        .ptr(sorted.keys)
        .ptr(sorted.items);
    let mut args = args
        .size(many)
        .size(size)
        .ptr(y.ptr)
        .size(outer)
        .size(inner);
    let unit = adds("index_add", src.dtype, y.dtype, width);
    // SAFETY: the arguments are the kernel's parameters; keys below the size are rows of y, items
    // are rows of src; packs are aligned, as found above.
    unsafe {
        call.launch(
            &unit,
            grid,
            [threads as u32, places as u32, 1],
            0,
            &mut args,
        )
    }
}

/// Whether a scatter is sorted: few lines, each too long for one thread.
fn sorts(src: &View, y: &View, dim: usize) -> bool {
    let Some(size) = src.shape().get(dim) else {
        return false;
    };
    let lines = src.numel().checked_div(*size).unwrap_or(0);
    *size > 256
        && lines < 1 << 16
        && Sort::fits(src.numel(), y.numel())
        && y.numel() > 0
        && lines > 0
}

/// `[src, index] -> [y]`: line by line, or by destination.
///
/// # Safety
/// As [`run`].
unsafe fn scatter_add(call: &Call<'_>, dim: usize) -> Result<()> {
    let (src, index, y) = (call.src(0), call.src(1), call.dst(0));
    let (many, name) = (src.numel(), call.kernel.name());
    if many == 0 {
        return Ok(());
    }
    let (alarm, code) = (call.alarm.device, call.alarm.code(name));
    let unit = |entry| adds(entry, src.dtype, y.dtype, 1);
    if !sorts(src, y, dim) {
        let lines = many / src.shape()[dim];
        let args = Args::new()
            .view(src)
            .view(y)
            .i32(dim as i32)
            .ptr(index.ptr)
            .i32(kind(index));
        let mut args = args.size(lines).ptr(alarm).u32(code);
        // SAFETY: the arguments are the kernel's parameters; lines share no element of y; indices
        // are checked there.
        return unsafe {
            call.launch(
                &unit("scatter_lines"),
                Call::blocks(lines),
                [256, 1, 1],
                0,
                &mut args,
            )
        };
    }
    let sort = Sort::checked(name, many, y.numel())?;
    let scratch = call.scratch_ptr();
    let args = Args::new()
        .view(src)
        .view(y)
        .i32(dim as i32)
        .ptr(index.ptr)
        .i32(kind(index))
        .size(many);
    let mut args = args
        .u32(y.numel() as u32)
        .ptr(sort.keys(scratch))
        .ptr(alarm)
        .u32(code);
    // SAFETY: as in `index_add`; keys below y's number of elements are places of y.
    unsafe {
        call.launch(
            &sort::unit("scatter_keys"),
            Call::blocks(many),
            [256, 1, 1],
            0,
            &mut args,
        )?;
        let sorted = sort.run(call, scratch)?;
        let args = Args::new()
            .view(src)
            .ptr(sorted.keys)
            .ptr(sorted.items)
            .size(many);
        let mut args = args.size(y.numel()).ptr(y.ptr);
        call.launch(
            &unit("scatter_runs"),
            Call::blocks(many),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = sort::units();
    units.extend([1, 2, 4, 8, 16].map(|bytes| copies("index_rows", bytes)));
    units.extend([1, 2, 4, 8].map(|bytes| copies("index_pick", bytes)));
    for src in [
        DType::F64,
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::I64,
        DType::I32,
        DType::U32,
        DType::U8,
    ] {
        let both = [src, src.accumulator()];
        for dst in &both[..if both[0] == both[1] { 1 } else { 2 }] {
            units.push(adds("index_add", src, *dst, 1));
            units.push(adds("scatter_runs", src, *dst, 1));
            units.push(adds("scatter_lines", src, *dst, 1));
            if columns(src) > 1 {
                units.push(adds("index_add", src, *dst, columns(src)));
            }
        }
    }
    units
}
