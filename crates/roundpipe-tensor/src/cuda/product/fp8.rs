//! Products of 8-bit floats with a scale per row of either side.
//!
//! Three ways, tried in this order; which one is taken depends on the card, the library and the
//! shape alone:
//! 1. cuBLASLt applies the scales itself. It does so on Hopper from version 12.9 on
//!    (`CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`), for results of 16 bits.
//! 2. cuBLASLt gives plain sums in f32, some rows at a time so that they stay in the card's cache,
//!    and `finish_rows` applies scales and bias: Ada and Blackwell, older libraries, f32 results
//!    with a bias.
//! 3. A kernel of our own, without tensor cores: shapes that the library does not take, and cards
//!    without fp8.
//!
//! Our b `[n, k]` is the library's first operand, transposed, our a its second, as it is: the TN form
//! that it asks for. So its A has b's scales, n of them, and its B has a's.
//!
//! # Fast accumulation
//! Hopper's tensor cores add fp8 products with fewer bits than f32 has. By default the library moves
//! these sums to f32 every few steps; with fast accumulation it does not. Forward products, whose
//! left side is E4M3, use it, gradients (E5M2) do not: errors of a forward are as those of rounding
//! to fp8 in the first place, those of gradients add up over layers.

use super::lt::{self, Fp8Operands, Lie, LtTask, ProductShape, Side};
use super::{ProductSizes, fit, workspace};
use crate::cuda::call::{Args, Call};
use crate::cuda::compile::Unit;
use crate::cuda::fp8::{TYPES, number, unit};
use crate::cuda::library;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fp8::Fp8;
use crate::kernel::View;

/// cuBLASLt that applies vectors of scales.
const OUTER_SCALES_FROM: usize = 120_900;
/// Bytes of sums that are finished at once: they stay in the caches of cards that have fp8.
const SUMS_BYTES: usize = 24 << 20;
/// Rows whose sums are finished at once are a multiple of this.
const ROW_STEP: usize = 128;

/// Where things lie in the scratch memory: the library's workspace, then sums of some rows.
struct Rooms {
    workspace: usize,
    /// Rows whose sums have room.
    rows: usize,
    total: usize,
}

impl Rooms {
    fn of(m: usize, n: usize) -> Self {
        let of_row = n * size_of::<f32>();
        let rows = (SUMS_BYTES / of_row / ROW_STEP * ROW_STEP)
            .max(ROW_STEP)
            .min(m);
        let sizes = ProductSizes {
            batches: 1,
            m,
            n,
            k: 1,
        };
        let workspace = workspace(&sizes);
        Self {
            workspace,
            rows,
            total: workspace + rows * of_row,
        }
    }
}

pub(super) fn scratch(dst: &[Option<View>]) -> usize {
    match dst {
        [Some(c), ..] if c.numel() > 0 => Rooms::of(c.shape()[0], c.shape()[1]).total,
        _ => 0,
    }
}

pub(super) fn units() -> Vec<Unit> {
    let all = TYPES.into_iter().flat_map(|dtype| {
        [
            unit("finish_rows", dtype),
            plain(dtype, Fp8::E4M3, Fp8::E4M3),
            plain(dtype, Fp8::E5M2, Fp8::E4M3),
        ]
    });
    all.collect()
}

fn plain(dtype: DType, left: Fp8, right: Fp8) -> Unit {
    unit("plain_fp8", dtype)
        .with("LEFT", number(left))
        .with("RIGHT", number(right))
}

/// A whole call of [`Kernel::Fp8MatMul`](crate::kernel::Kernel::Fp8MatMul).
struct Fp8Call<'a> {
    a: &'a View,
    a_scales: &'a View,
    b: &'a View,
    b_scales: &'a View,
    bias: Option<&'a View>,
    c: &'a View,
    left: Fp8,
    right: Fp8,
    /// Whether the result is added to c.
    accumulate: bool,
}

impl Fp8Call<'_> {
    /// m, n, k.
    fn sizes(&self) -> [usize; 3] {
        [self.c.shape()[0], self.c.shape()[1], self.a.shape()[1]]
    }

    /// The library's call for `rows` rows from `first` on, with the result at `c`.
    fn task(
        &self,
        [first, rows]: [usize; 2],
        (dtype, c): (DType, u64),
        applies_scales: bool,
        workspace: (u64, usize),
    ) -> LtTask {
        let [_, n, k] = self.sizes();
        let line = k as i64;
        let shape = ProductShape {
            m: rows,
            n,
            k,
            batches: 1,
            steps: [0; 3],
        };
        let a = Side {
            ptr: self.a.ptr + (first * k) as u64,
            lie: Lie {
                transposed: false,
                line,
            },
        };
        // [n, k] as the [k, n] that the library multiplies with.
        let b = Side {
            ptr: self.b.ptr,
            lie: Lie {
                transposed: true,
                line,
            },
        };
        let bias = self.bias.filter(|_| applies_scales).map(|bias| bias.ptr);
        let out = (DType::U8, dtype, c);
        // Sums that are finished here begin at 0; c is added when they are.
        let beta = f64::from(u8::from(self.accumulate && applies_scales));
        let task = LtTask::new(shape, a, b, out, bias, [1.0, beta], workspace);
        let a_scales = self.a_scales.ptr + (first * size_of::<f32>()) as u64;
        let operands = Fp8Operands {
            left: self.left,
            right: self.right,
            applies_scales,
        };
        task.in_fp8(operands, [a_scales, self.b_scales.ptr])
    }
}

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn matmul(
    call: &Call<'_>,
    [left, right]: [Fp8; 2],
    accumulate: bool,
) -> Result<()> {
    let product = Fp8Call {
        a: call.src(0),
        a_scales: call.src(1),
        b: call.src(2),
        b_scales: call.src(3),
        bias: call.maybe_src(4),
        c: call.dst(0),
        left,
        right,
        accumulate,
    };
    if !TYPES.contains(&product.c.dtype) {
        let what = format!("gives no {} values", product.c.dtype);
        return Err(Error::invalid(call.kernel.name(), what));
    }
    let [m, n, k] = product.sizes();
    if m * n == 0 {
        return Ok(());
    }
    let fits = [m, n, k].iter().all(|size| *size <= i32::MAX as usize);
    let (major, minor) = call.gpu.capability;
    // SAFETY: the launch contract, passed on.
    unsafe {
        if fits && k > 0 && major * 10 + minor >= crate::cuda::FP8_CARD {
            let rooms = Rooms::of(m, n);
            if major == 9 && scaled_by_library(call, &product, &rooms)? {
                return Ok(());
            }
            if finished_here(call, &product, &rooms)? {
                return Ok(());
            }
        }
        plainly(call, &product)
    }
}

/// Whether the library computed it, scales and bias included.
///
/// # Safety
/// As [`matmul`].
unsafe fn scaled_by_library(call: &Call<'_>, product: &Fp8Call<'_>, rooms: &Rooms) -> Result<bool> {
    // SAFETY: the call only reads a constant.
    let version = unsafe { library::cublaslt()?.cublasLtGetVersion() };
    let narrow = product.c.dtype != DType::F32;
    if version < OUTER_SCALES_FROM || !(narrow || product.bias.is_none()) {
        return Ok(false);
    }
    let [m, ..] = product.sizes();
    let workspace = (call.scratch_ptr(), rooms.workspace);
    let out = (product.c.dtype, product.c.ptr);
    let task = product.task([0, m], out, true, workspace);
    // SAFETY: operands, scales and result are as large as the task says; the workspace is the
    // scratch memory's start.
    unsafe {
        if !lt::takes(call, &task)? {
            return Ok(false);
        }
        lt::run(call, &task)?;
    }
    Ok(true)
}

/// Whether the library computed the sums, finished here.
///
/// # Safety
/// As [`matmul`].
unsafe fn finished_here(call: &Call<'_>, product: &Fp8Call<'_>, rooms: &Rooms) -> Result<bool> {
    let [m, n, _] = product.sizes();
    let workspace = (call.scratch_ptr(), rooms.workspace);
    let sums = call.scratch_ptr() + rooms.workspace as u64;
    let task = |first: usize| {
        let rows = rooms.rows.min(m - first);
        product.task([first, rows], (DType::F32, sums), false, workspace)
    };
    // There are two kinds of pieces: those of all rows that have room, and the last.
    let last = (m - 1) / rooms.rows * rooms.rows;
    // SAFETY: the operands are as large as the tasks say; the sums have the scratch memory behind
    // the workspace, a piece after the other.
    unsafe {
        if !lt::takes(call, &task(0))? || !lt::takes(call, &task(last))? {
            return Ok(false);
        }
        for first in (0..m).step_by(rooms.rows) {
            lt::run(call, &task(first))?;
            let rows = rooms.rows.min(m - first);
            finish(call, product, [first, rows, n], sums)?;
        }
    }
    Ok(true)
}

/// Sums of some rows times their scales.
///
/// # Safety
/// There are such sums, queued in the same stream.
unsafe fn finish(
    call: &Call<'_>,
    product: &Fp8Call<'_>,
    [first, rows, n]: [usize; 3],
    sums: u64,
) -> Result<()> {
    let c = product.c.ptr + (first * n * product.c.dtype.size()) as u64;
    let mut args = Args::new()
        .ptr(sums)
        .ptr(product.a_scales.ptr + (first * size_of::<f32>()) as u64)
        .ptr(product.b_scales.ptr)
        .maybe(product.bias)
        .ptr(c)
        .size(rows)
        .size(n)
        .i32(i32::from(product.accumulate));
    // SAFETY: the arguments are the kernel's; n is a multiple of 4 by the kernel's description, and
    // so are the addresses of whole rows.
    unsafe {
        call.launch(
            &unit("finish_rows", product.c.dtype),
            Call::blocks((rows * n).div_ceil(4)),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// The whole product by the kernel that takes everything.
///
/// # Safety
/// As [`matmul`].
unsafe fn plainly(call: &Call<'_>, product: &Fp8Call<'_>) -> Result<()> {
    let [m, n, k] = product.sizes();
    let blocks = fit(call, m.div_ceil(16) * n.div_ceil(16))?;
    let mut args = Args::new()
        .ptr(product.a.ptr)
        .ptr(product.a_scales.ptr)
        .ptr(product.b.ptr)
        .ptr(product.b_scales.ptr)
        .maybe(product.bias)
        .ptr(product.c.ptr)
        .size(m)
        .size(n)
        .size(k)
        .i32(i32::from(product.accumulate));
    // SAFETY: the arguments are the kernel's; each thread writes one element of c.
    unsafe {
        call.launch(
            &plain(product.c.dtype, product.left, product.right),
            [blocks, 1, 1],
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}
