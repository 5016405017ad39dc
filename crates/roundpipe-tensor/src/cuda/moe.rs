//! Mixture of experts: sorting choices by expert, and adding up what the experts gave.
//!
//! The sort is that of the indices: stable, in scratch memory. How many tokens an expert got stays
//! on the device. A choice of no expert is reported and sent to expert 0; a place outside the rows
//! is reported and left out.
//!
//! # Invariants
//! - A token's results are added in the order of its choices, in the accumulator type, and rounded
//!   once.

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use super::index::sort::{self, Sort};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::MoeSort { experts } => sort(call, *experts),
            Kernel::MoeCombine => combine(call),
            Kernel::MoeCombineGrad => combine_grad(call),
            _ => Err(Error::invalid(
                call.kernel.name(),
                "not an operation of experts",
            )),
        }
    }
}

pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], _dst: &[Option<View>]) -> usize {
    match (kernel, src.first()) {
        (Kernel::MoeSort { experts }, Some(Some(choice))) if choice.numel() > 0 => {
            Sort::new(choice.numel(), *experts).bytes()
        }
        _ => 0,
    }
}

fn places() -> Unit {
    Unit::new(
        "moe_places",
        include_str!("kernels/moe_places.cu"),
        "moe_places",
    )
}

fn sums(entry: &'static str, dtype: DType, columns: usize) -> Unit {
    Unit::new("moe", include_str!("kernels/moe.cu"), entry)
        .with("REAL", c_type(dtype))
        .with("FEW", columns)
}

/// `[choice] -> [rows, inverse, offsets]`.
///
/// # Safety
/// As [`run`].
unsafe fn sort(call: &Call<'_>, experts: usize) -> Result<()> {
    let (choice, name) = (call.src(0), call.kernel.name());
    let (count, scratch) = (choice.numel(), call.scratch_ptr());
    let sort = Sort::checked(name, count, experts)?;
    let args = Args::new()
        .ptr(choice.ptr)
        .i32(0)
        .size(count)
        .size(experts)
        .u32(0);
    let mut args = args
        .ptr(sort.keys(scratch))
        .ptr(call.alarm.device)
        .u32(call.alarm.code(name));
    // SAFETY: the arguments are the kernels' parameters; the scratch memory is as large as the sort
    // asks; keys are below the number of experts and items below that of choices. Without choices
    // only the offsets are written.
    unsafe {
        call.launch(
            &sort::unit("index_keys"),
            Call::blocks(count),
            [256, 1, 1],
            0,
            &mut args,
        )?;
        let sorted = if count > 0 {
            sort.run(call, scratch)?
        } else {
            sort::Sorted { keys: 0, items: 0 }
        };
        let per_token = choice.shape()[1].max(1);
        let args = Args::new()
            .ptr(sorted.keys)
            .ptr(sorted.items)
            .size(count)
            .size(per_token)
            .size(experts);
        let mut args = args
            .ptr(call.dst(0).ptr)
            .ptr(call.dst(1).ptr)
            .ptr(call.dst(2).ptr);
        call.launch(
            &places(),
            Call::blocks(count + 1),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// Columns that a thread takes at once: 16 bytes where rows and addresses allow.
fn columns(width: usize, views: &[Option<&View>], dtype: DType) -> usize {
    let most = 16 / dtype.size();
    let even = views
        .iter()
        .flatten()
        .all(|view| view.ptr.is_multiple_of(16));
    if even && width.is_multiple_of(most) {
        most
    } else {
        1
    }
}

/// `[y, inverse, weight?] -> [out]`.
///
/// # Safety
/// As [`run`].
unsafe fn combine(call: &Call<'_>) -> Result<()> {
    let (y, inverse, weight, out) = (call.src(0), call.src(1), call.maybe_src(2), call.dst(0));
    let (tokens, width) = (out.shape()[0], out.shape()[1]);
    if out.numel() == 0 {
        return Ok(());
    }
    let few = columns(width, &[Some(y), Some(out)], y.dtype);
    let (packs, choices) = (width / few, inverse.numel() / tokens);
    let args = Args::new()
        .ptr(y.ptr)
        .ptr(inverse.ptr)
        .maybe(weight)
        .ptr(out.ptr)
        .size(tokens);
    let args = args.i32(choices as i32).size(packs).ptr(call.alarm.device);
    let mut args = args.u32(call.alarm.code(call.kernel.name()));
    let unit = sums("moe_combine", y.dtype, few);
    // SAFETY: the arguments are the kernel's parameters; packs are aligned, as found by `columns`;
    // places are checked there.
    unsafe {
        call.launch(
            &unit,
            Call::blocks(tokens * packs),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// `[y?, inverse, weight, dout] -> [dy?, dweight?]`.
///
/// # Safety
/// As [`run`].
unsafe fn combine_grad(call: &Call<'_>) -> Result<()> {
    let (y, inverse, weight, dout) = (call.maybe_src(0), call.src(1), call.src(2), call.src(3));
    let (dy, dweight) = (call.maybe_dst(0), call.maybe_dst(1));
    let (tokens, width, total) = (dout.shape()[0], dout.shape()[1], inverse.numel());
    if total == 0 || (dy.is_none() && dweight.is_none()) {
        return Ok(());
    }
    let few = columns(width, &[y, Some(dout), dy], dout.dtype);
    let args = Args::new()
        .maybe(y)
        .ptr(inverse.ptr)
        .ptr(weight.ptr)
        .ptr(dout.ptr)
        .maybe(dy)
        .maybe(dweight);
    let args = args
        .size(total)
        .i32((total / tokens) as i32)
        .size(width / few)
        .ptr(call.alarm.device);
    let mut args = args.u32(call.alarm.code(call.kernel.name()));
    let unit = sums("moe_combine_grad", dout.dtype, few);
    let grid = [total.div_ceil(8) as u32, 1, 1];
    // SAFETY: as in `combine`; y is there where dweight is.
    unsafe { call.launch(&unit, grid, [256, 1, 1], 0, &mut args) }
}

pub(super) fn units() -> Vec<Unit> {
    let floats = [DType::F64, DType::F32, DType::BF16, DType::F16];
    let all = floats.into_iter().flat_map(|dtype| {
        let widths = [1, 16 / dtype.size()];
        widths.map(|few| ["moe_combine", "moe_combine_grad"].map(|entry| sums(entry, dtype, few)))
    });
    all.flatten().chain([places()]).collect()
}
