//! Cross entropy and its gradient (`cross_entropy.cu`). A label that is no class raises the alarm.
//! No scratch.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;

const TEXT: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/cross_entropy.cu")
);

/// The operation that an alarm names, of both kernels.
const OP: &str = "cross_entropy";

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let (logits, labels) = (call.src(0), call.src(1));
    let (tokens, width) = (logits.shape()[0], logits.shape()[1]);
    let (args, ignore, smoothing, entry, into) = match *call.kernel {
        Kernel::CrossEntropy { ignore, smoothing } => {
            let args = Args::new()
                .ptr(logits.ptr)
                .ptr(labels.ptr)
                .ptr(call.dst(0).ptr)
                .ptr(call.dst(1).ptr);
            (args, ignore, smoothing, OP, logits.dtype)
        }
        Kernel::CrossEntropyGrad { ignore, smoothing } => {
            let (lse, dloss, dlogits) = (call.src(2), call.src(3), call.dst(0));
            let args = Args::new()
                .ptr(logits.ptr)
                .ptr(labels.ptr)
                .ptr(lse.ptr)
                .ptr(dloss.ptr)
                .ptr(dlogits.ptr);
            (args, ignore, smoothing, "cross_entropy_grad", dlogits.dtype)
        }
        _ => return Err(Error::invalid(call.kernel.name(), "is no cross entropy")),
    };
    let args = args
        .size(width)
        .i64(ignore)
        .f64(smoothing)
        .ptr(call.alarm.device)
        .u32(call.alarm.code(OP));
    let unit = unit(entry, logits.dtype, into, smoothing != 0.0);
    // Few classes need few threads.
    let threads = (width / 8).next_multiple_of(32).clamp(32, 512) as u32;
    // SAFETY: the arguments are those of the entry; operands are dense, of the types the contract
    // says.
    unsafe {
        call.launch(&unit, [tokens as u32, 1, 1], [threads, 1, 1], 0, &mut {
            args
        })
    }
}

pub(super) fn units() -> Vec<Unit> {
    let pairs = FLOATS.map(|dtype| (dtype, dtype)).into_iter().chain([
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
    ]);
    let mut units: Vec<Unit> = pairs
        .map(|(from, into)| unit("cross_entropy_grad", from, into, false))
        .collect();
    for dtype in FLOATS {
        units.extend([false, true].map(|smooth| unit(OP, dtype, dtype, smooth)));
    }
    units
}

fn unit(entry: &'static str, from: DType, into: DType, smooth: bool) -> Unit {
    // The gradient's code is the same with and without smoothing.
    let smooth = smooth && entry == OP;
    let unit = Unit::new("cross_entropy", TEXT, entry)
        .with("FROM", c_type(from))
        .with("INTO", c_type(into));
    unit.with("SMOOTH", u8::from(smooth))
}
