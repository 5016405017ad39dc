//! Cross entropy of rows of logits against labels, and its gradient.
//!
//! All labels are checked before the first row is computed. Rows are independent tasks.

use super::access::{Call, Float, Real, SharedSlice, for_float, slice, slice_mut};
use super::reduce::lines::{lanes, peak_and_sum};
use super::simd::vectorize;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let dtype = call.src(0).dtype;
    // SAFETY: the caller's promise is passed on; the element types are the views'.
    unsafe {
        match *call.kernel {
            Kernel::CrossEntropy { ignore, smoothing } => {
                let rows = LabelRows::checked(call, ignore, smoothing)?;
                for_float!(call, dtype, T => forward::<T>(call, &rows));
            }
            Kernel::CrossEntropyGrad { ignore, smoothing } => {
                let rows = LabelRows::checked(call, ignore, smoothing)?;
                match (dtype, call.dst(0).dtype) {
                    (DType::F32, DType::BF16) => backward::<f32, half::bf16>(call, &rows),
                    (DType::F32, DType::F16) => backward::<f32, half::f16>(call, &rows),
                    (DType::BF16, DType::F32) => backward::<half::bf16, f32>(call, &rows),
                    (DType::F16, DType::F32) => backward::<half::f16, f32>(call, &rows),
                    (from, to) if from == to => {
                        for_float!(call, dtype, T => backward::<T, T>(call, &rows))
                    }
                    _ => return Err(call.unsupported()),
                }
            }
            _ => return Err(call.unsupported()),
        }
    }
    Ok(())
}

/// What rows are measured against.
struct LabelRows<'a> {
    labels: &'a [i64],
    width: usize,
    ignore: i64,
    smoothing: f64,
}

impl LabelRows<'_> {
    /// # Safety
    /// The label view is live and dense, and nothing writes it while this lives.
    unsafe fn checked(call: &Call<'_>, ignore: i64, smoothing: f64) -> Result<Self> {
        let width = call.src(0).shape()[1];
        // SAFETY: promised by the caller; the kernel's description says i64.
        let labels = unsafe { slice::<i64>(call.src(1)) };
        let inside =
            |label: i64| label == ignore || usize::try_from(label).is_ok_and(|l| l < width);
        match labels.iter().position(|label| !inside(*label)) {
            Some(at) => Err(Error::Index {
                op: "cross_entropy",
                index: labels[at],
                at,
                size: width,
            }),
            None => Ok(Self {
                labels,
                width,
                ignore,
                smoothing,
            }),
        }
    }

    /// The label of a row, `None` to leave the row out.
    #[inline(always)]
    fn label(&self, row: usize) -> Option<usize> {
        let label = self.labels[row];
        (label != self.ignore).then_some(label as usize)
    }
}

/// # Safety
/// As [`run`], and the logits hold `T`.
unsafe fn forward<T: Float>(call: &Call<'_>, rows: &LabelRows<'_>) {
    // SAFETY: all operands are dense; the destinations hold `T::Acc` and are this call's alone.
    let (x, loss, lse) = unsafe {
        (
            slice::<T>(call.src(0)),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(0))),
            SharedSlice::new(slice_mut::<T::Acc>(call.dst(1))),
        )
    };
    call.pieces(rows.labels.len(), 8192 / rows.width.max(1), |from, to| {
        // SAFETY: pieces are disjoint.
        let (loss, lse) = unsafe { (loss.part(from, to), lse.part(from, to)) };
        for row in from..to {
            let x = &x[row * rows.width..(row + 1) * rows.width];
            (loss[row - from], lse[row - from]) = row_loss(x, rows.label(row), rows.smoothing);
        }
    });
}

vectorize! {
    /// Loss and log-sum-exp of one row.
    fn row_loss<T: Float>(x: &[T], label: Option<usize>, smoothing: f64) -> (T::Acc, T::Acc) {
        let (peak, sum) = peak_and_sum(x);
        let lse = peak + sum.ln();
        let Some(label) = label else { return (T::Acc::ZERO, lse) };
        let hard = lse - x[label].up();
        if smoothing == 0.0 {
            return (hard, lse);
        }
        // Against the largest value, so that the sum neither overflows nor loses what the mean is
        // made of.
        let below = lanes(x.len(), T::Acc::ZERO, |i| peak - x[i].up(), |a, b| a + b);
        let soft = (lse - peak) + below / T::Acc::of(x.len() as f64);
        (T::Acc::of(1.0 - smoothing) * hard + T::Acc::of(smoothing) * soft, lse)
    }
}

/// # Safety
/// As [`run`]; the logits hold `T`, the destination `D`, and they are the same memory only if `T`
/// is `D`.
unsafe fn backward<T: Float, D: Float<Acc = T::Acc>>(call: &Call<'_>, rows: &LabelRows<'_>) {
    let (x, dx, width) = (call.src(0).ptr, call.dst(0).ptr, rows.width);
    // SAFETY: both are dense and hold the accumulator type; a kernel only reads its sources.
    let (lse, dloss) = unsafe { (slice::<T::Acc>(call.src(2)), slice::<T::Acc>(call.src(3))) };
    call.pieces(rows.labels.len(), 16384 / width.max(1), |from, to| {
        for row in from..to {
            let src = (x as *const T).wrapping_add(row * width);
            let dst = (dx as *mut D).wrapping_add(row * width);
            match rows.label(row) {
                Some(label) => {
                    row_grad::<T, D>(src, dst, width, label, lse[row], dloss[row], rows.smoothing)
                }
                // SAFETY: the row lies inside the live destination and is this task's alone.
                None => unsafe { std::slice::from_raw_parts_mut(dst, width).fill(D::default()) },
            }
        }
    });
}

/// Elements that are read before the first of them is overwritten.
const BLOCK: usize = 256;

vectorize! {
    /// dlogits of one row: dloss · (softmax - target). The caller gives a live row of logits and
    /// one to write that is this task's alone; they may be the same memory.
    fn row_grad<T: Float, D: Narrow<T>>(
        src: *const T, dst: *mut D, width: usize, label: usize, lse: T::Acc, dloss: T::Acc, smoothing: f64,
    ) {
        let share = T::Acc::of(smoothing / width as f64);
        // SAFETY: the label was checked; the row is live.
        let at_label = unsafe { src.add(label).read() }.up();
        let mut block = [T::Acc::ZERO; BLOCK];
        for start in (0..width).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(width - start)];
            // SAFETY: inside the live row, which this task alone writes, and not while this slice
            // lives.
            let xs = unsafe { std::slice::from_raw_parts(src.add(start), block.len()) };
            for (b, x) in block.iter_mut().zip(xs) {
                *b = dloss * ((x.up() - lse).exp() - share);
            }
            // SAFETY: inside the row that is this task's; the slice of logits is not used any more.
            let out = unsafe { std::slice::from_raw_parts_mut(dst.add(start), block.len()) };
            for (y, b) in out.iter_mut().zip(block) {
                *y = D::narrow(*b);
            }
        }
        let target = T::Acc::of(1.0 - smoothing) + share;
        // SAFETY: the label was checked; the row is this task's.
        unsafe { dst.add(label).write(D::narrow(dloss * ((at_label - lse).exp() - target))) };
    }
}

/// A type that gradients of `T` are rounded to.
trait Narrow<T: Float>: Float {
    fn narrow(x: T::Acc) -> Self;
}

impl<T: Float, D: Float<Acc = T::Acc>> Narrow<T> for D {
    #[inline(always)]
    fn narrow(x: T::Acc) -> Self {
        D::down(x)
    }
}
