//! Matrix products: turns views into calls of [`gemm`](super::gemm).

use super::access::{Call, Float, for_float, slice};
use super::fp8;
use super::gemm::{self, Mat, MatMut, Product};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::shape::MAX_RANK;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::MatMul { alpha, beta } => matmul(call, *alpha, *beta),
            Kernel::Fp8MatMul {
                left,
                right,
                accumulate,
            } => fp8::matmul(call, [*left, *right], *accumulate),
            Kernel::GroupedMatMul { accumulate } => {
                grouped(call, [call.src(0), call.src(1)], *accumulate)?;
                match (call.src_opt(3), call.src_opt(4)) {
                    (Some(low), Some(narrow)) => grouped(call, [low, narrow], true),
                    _ => Ok(()),
                }
            }
            Kernel::GroupedMatMulGrad { accumulate } => grouped_grad(call, *accumulate),
            _ => Err(call.unsupported()),
        }
    }
}

/// Runs `$body` with `$t` and `$o` standing for the types of operands and result.
macro_rules! for_types {
    ($call:expr, $src:expr, $dst:expr, $t:ident, $o:ident => $body:expr) => {
        for_float!($call, $src, $t => {
            if $dst == $src {
                type $o = $t;
                $body
            } else if $dst == $src.accumulator() {
                type $o = <$t as Float>::Acc;
                $body
            } else {
                return Err($call.unsupported());
            }
        })
    };
}

/// One matrix of a view, given the element offset of its first element.
fn mat<T>(view: &View, offset: isize) -> Mat<T> {
    let strides = view.layout.strides();
    let rank = strides.len();
    Mat {
        ptr: (view.ptr as *const T).wrapping_offset(offset),
        row: strides[rank - 2],
        col: strides[rank - 1],
    }
}

/// Element offset of batch `index`, counted row-major over all but the last two dimensions.
fn batch_offset(view: &View, index: usize) -> isize {
    let (shape, strides) = (view.shape(), view.layout.strides());
    let mut rest = index;
    let mut offset = 0;
    for axis in (0..shape.rank() - 2).rev() {
        offset += (rest % shape[axis]) as isize * strides[axis];
        rest /= shape[axis];
    }
    offset
}

unsafe fn matmul(call: &Call<'_>, alpha: f64, beta: f64) -> Result<()> {
    let (a, b, c) = (call.src(0), call.src(1), call.dst(0));
    let bias = call.src_opt(2);
    debug_assert!(c.shape().rank() >= 2 && c.shape().rank() <= MAX_RANK);
    let rank = c.shape().rank();
    let (m, n, k) = (
        c.shape()[rank - 2],
        c.shape()[rank - 1],
        a.shape()[rank - 1],
    );
    let batches: usize = c.shape()[..rank - 2].iter().product();
    for_types!(call, a.dtype, c.dtype, T, O => {
        let one = |i: usize| Product::<T, O> {
            m,
            n,
            k,
            a: mat(a, batch_offset(a, i)),
            b: mat(b, batch_offset(b, i)),
            c: MatMut { ptr: (c.ptr as *mut O).wrapping_add(i * m * n), row: n as isize },
            bias: bias.map(|v| v.ptr as *const T),
            alpha,
            beta,
        };
        // SAFETY: the launch contract gives live operands of these shapes and a result that
        // overlaps none of them; batch i of the dense result is elements i·m·n..(i+1)·m·n, so
        // batches do not overlap.
        unsafe { gemm::gemm_batch(call.threads, batches, one) }
    });
    Ok(())
}

/// The group bounds, checked: ascending from 0 and within `rows`, so that every row is in a group
/// or past them.
unsafe fn bounds(call: &Call<'_>, view: &View, rows: usize) -> Result<Vec<usize>> {
    debug_assert_eq!(view.dtype, DType::I32);
    // SAFETY: offsets are a dense i32 view by the kernel's contract.
    let raw = unsafe { slice::<i32>(view) };
    let wide: Vec<usize> = raw
        .iter()
        .map(|o| usize::try_from(*o).unwrap_or(usize::MAX))
        .collect();
    let ascending = wide.windows(2).all(|w| w[0] <= w[1]);
    if !ascending || wide.first() != Some(&0) || wide.last().is_none_or(|last| *last > rows) {
        let what = format!("offsets must ascend from 0 within {rows} rows, not {raw:?}");
        return Err(Error::Invalid {
            op: call.kernel.name(),
            what,
        });
    }
    Ok(wide)
}

unsafe fn grouped(call: &Call<'_>, [x, w]: [&View; 2], accumulate: bool) -> Result<()> {
    let y = call.dst(0);
    let (rows, k, n) = (x.shape()[0], x.shape()[1], y.shape()[1]);
    // SAFETY: the launch contract.
    let bounds = unsafe { bounds(call, call.src(2), rows)? };
    for_types!(call, x.dtype, y.dtype, T, O => {
        let one = |i: usize| {
            let (start, end) = (bounds[i], bounds[i + 1]);
            let stride = w.layout.strides();
            Product::<T, O> {
                m: end - start,
                n,
                k,
                a: mat(x, start as isize * x.layout.strides()[0]),
                b: Mat { ptr: (w.ptr as *const T).wrapping_offset(i as isize * stride[0]), row: stride[1], col: stride[2] },
                c: MatMut { ptr: (y.ptr as *mut O).wrapping_add(start * n), row: n as isize },
                bias: None,
                alpha: 1.0,
                beta: f64::from(u8::from(accumulate)),
            }
        };
        // SAFETY: the launch contract; groups are disjoint row ranges within the result (checked
        // above).
        unsafe { gemm::gemm_batch(call.threads, bounds.len() - 1, one) };
        let filled = bounds.last().map_or(0, |end| end * n);
        // SAFETY: the result is dense with `rows` · `n` elements, and only this call holds it.
        let rest = unsafe { std::slice::from_raw_parts_mut((y.ptr as *mut O).wrapping_add(filled), rows * n - filled) };
        if !accumulate {
            rest.fill(O::default());
        }
    });
    Ok(())
}

unsafe fn grouped_grad(call: &Call<'_>, accumulate: bool) -> Result<()> {
    let (x, dy, dw) = (call.src(0), call.src(1), call.dst(0));
    let (rows, k, n) = (x.shape()[0], x.shape()[1], dy.shape()[1]);
    // SAFETY: the launch contract.
    let bounds = unsafe { bounds(call, call.src(2), rows)? };
    let stride = dw.layout.strides();
    // The product writes rows of unit stride; a transposed dw is computed as dyᵀ x instead of xᵀ
    // dy.
    let flipped = stride[2] != 1 && n > 1;
    debug_assert!(
        !flipped || stride[1] == 1 || k <= 1,
        "dw needs one unit stride"
    );
    for_types!(call, x.dtype, dw.dtype, T, O => {
        let one = |i: usize| {
            let start = bounds[i] as isize;
            let (xs, ds) = (x.layout.strides(), dy.layout.strides());
            let px = (x.ptr as *const T).wrapping_offset(start * xs[0]);
            let pd = (dy.ptr as *const T).wrapping_offset(start * ds[0]);
            let xt = Mat { ptr: px, row: xs[1], col: xs[0] };
            let dt = Mat { ptr: pd, row: ds[1], col: ds[0] };
            let turn = |m: Mat<T>| Mat { ptr: m.ptr, row: m.col, col: m.row };
            let out = (dw.ptr as *mut O).wrapping_offset(i as isize * stride[0]);
            let (m, n, a, b, row) =
                if flipped { (n, k, dt, turn(xt), stride[2]) } else { (k, n, xt, turn(dt), stride[1]) };
            let beta = f64::from(u8::from(accumulate));
            let c = MatMut { ptr: out, row };
            Product::<T, O> { m, n, k: bounds[i + 1] - bounds[i], a, b, c, bias: None, alpha: 1.0, beta }
        };
        // SAFETY: the launch contract; each group writes its own matrix of dw.
        unsafe { gemm::gemm_batch(call.threads, bounds.len() - 1, one) }
    });
    Ok(())
}
