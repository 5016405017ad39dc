//! Rotary embedding, alone and behind the RMS norm of a head (`rope.cu`), and gated linear units
//! (`glu.cu`).
//!
//! Operands keep their strides except in the last dimension, so that queries, keys and gates are
//! read where a joint projection left them. A position that is not in the table raises the alarm.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use super::norm::{RowSplit, partial, piece, sum_chunks};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Glu, Kernel, RopeStyle, View};
use crate::shape::{Layout, Shape};

const ROPE: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/rope.cu")
);
const GLU: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/glu.cu")
);

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match *call.kernel {
            Kernel::Rope { style, inverse } => rope(call, style, inverse),
            Kernel::RopeNorm { style, eps } => rope_norm(call, style, eps),
            Kernel::RopeNormGrad { style, accumulate } => rope_norm_grad(call, style, accumulate),
            Kernel::Glu(kind) => gated(call, kind, "glu", &[call.src(0), call.src(1), call.dst(0)]),
            Kernel::GluGrad(kind) => {
                let operands = [
                    call.src(0),
                    call.src(1),
                    call.src(2),
                    call.dst(0),
                    call.dst(1),
                ];
                gated(call, kind, "glu_grad", &operands)
            }
            _ => Err(Error::invalid(
                call.kernel.name(),
                "is neither a rotary embedding nor a gated unit",
            )),
        }
    }
}

/// Scratch bytes of this family's kernels.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let Some(Some(x)) = src.first() else { return 0 };
    match kernel {
        Kernel::RopeNormGrad { .. } if dst.get(1).is_some_and(Option::is_some) => {
            partial(x) * x.dtype.accumulator().size()
        }
        _ => 0,
    }
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for dtype in FLOATS {
        for wide in [false, true] {
            for style in [RopeStyle::Half, RopeStyle::Interleaved] {
                units.push(rope_unit("rope_heads", dtype, style, false, wide));
                units.push(rope_unit("rope_heads", dtype, style, true, wide));
                units.push(rope_unit("rope_heads_grad", dtype, style, true, wide));
            }
            for kind in [
                Glu::Silu,
                Glu::GeluTanh,
                Glu::Clamped {
                    alpha: 1.0,
                    limit: 1.0,
                },
            ] {
                units.extend(["glu", "glu_grad"].map(|entry| glu_unit(entry, dtype, kind, wide)));
            }
        }
    }
    units
}

fn rope_unit(entry: &'static str, dtype: DType, style: RopeStyle, norm: bool, wide: bool) -> Unit {
    let unit = Unit::new("rope", ROPE, entry)
        .with("ELEMENT", c_type(dtype))
        .with("WIDE", u8::from(wide));
    unit.with("STYLE", u8::from(style == RopeStyle::Interleaved))
        .with("NORM", u8::from(norm))
}

fn glu_unit(entry: &'static str, dtype: DType, kind: Glu, wide: bool) -> Unit {
    let number = match kind {
        Glu::Silu => 0,
        Glu::GeluTanh => 1,
        Glu::Clamped { .. } => 2,
    };
    let unit = Unit::new("glu", GLU, entry).with("ELEMENT", c_type(dtype));
    unit.with("KIND", number).with("WIDE", u8::from(wide))
}

/// Heads `[b, s, h, d]` and the tables they turn by.
struct Heads<'a> {
    x: &'a View,
    rows: u32,
    cos: &'a View,
    sin: &'a View,
    positions: Option<&'a View>,
    wide: bool,
    /// Threads of a head.
    lanes: u32,
}

impl<'a> Heads<'a> {
    /// Of sources 0, `cos`, `cos + 1` and `positions`; `others` are the operands that lie like
    /// heads.
    fn new(
        call: &'a Call<'_>,
        cos: usize,
        positions: usize,
        others: &[Option<&View>],
    ) -> Result<Self> {
        let (x, table, sin) = (call.src(0), call.src(cos), call.src(cos + 1));
        let (width, half) = (x.shape()[3], table.shape()[1]);
        let rows: usize = x.shape()[..3].iter().product();
        let Ok(rows) = i32::try_from(rows) else {
            return Err(Error::invalid(
                call.kernel.name(),
                format!("{} has more than 2^31 heads", x.shape()),
            ));
        };
        let n = piece(x.dtype);
        let table_bytes = (n * table.dtype.size()) as u64;
        let wide = half.is_multiple_of(n)
            && others.iter().flatten().chain([&x]).all(|v| steps_of(v, n))
            && [table, sin]
                .iter()
                .all(|v| v.ptr.is_multiple_of(table_bytes));
        let n = if wide { n } else { 1 };
        let units = half / n + (width - 2 * half).div_ceil(2 * n);
        let lanes = units.next_power_of_two().min(32) as u32;
        let positions = call.maybe_src(positions);
        Ok(Self {
            x,
            rows: rows as u32,
            cos: table,
            sin,
            positions,
            wide,
            lanes,
        })
    }

    /// The parameters `HEADS` of `rope.cu`.
    fn args(&self, call: &Call<'_>, args: Args) -> Args {
        let (dims, table) = (self.x.shape().dims(), self.cos.shape());
        let args = args
            .size(dims[1])
            .size(dims[2])
            .size(dims[3])
            .size(table[1])
            .size(table[0]);
        let args = args
            .ptr(self.cos.ptr)
            .ptr(self.sin.ptr)
            .maybe(self.positions);
        args.ptr(call.alarm.device)
            .u32(call.alarm.code(call.kernel.name()))
    }

    /// Blocks of 256 threads for all heads.
    fn grid(&self) -> [u32; 3] {
        [self.rows.div_ceil(256 / self.lanes), 1, 1]
    }
}

/// Whether rows of a view all begin at multiples of `n` elements and of 16 bytes, and end at such.
fn steps_of(view: &View, n: usize) -> bool {
    let dims = view.shape().dims();
    let outer = dims.len().saturating_sub(1);
    let mut steps = dims[..outer].iter().zip(&view.layout.strides()[..outer]);
    view.ptr.is_multiple_of(16)
        && dims.last().is_none_or(|d| d.is_multiple_of(n))
        && steps.all(|(size, stride)| *size == 1 || stride % n as isize == 0)
}

/// A view and its three outer strides, as `rope.cu` takes heads.
fn strided(args: Args, view: &View) -> Args {
    let strides = view.layout.strides();
    args.ptr(view.ptr)
        .i64(strides[0] as i64)
        .i64(strides[1] as i64)
        .i64(strides[2] as i64)
}

/// [`Kernel::Rope`].
///
/// # Safety
/// As [`run`].
unsafe fn rope(call: &Call<'_>, style: RopeStyle, inverse: bool) -> Result<()> {
    let y = call.dst(0);
    if y.numel() == 0 {
        return Ok(());
    }
    let heads = Heads::new(call, 1, 3, &[Some(y)])?;
    let args = strided(Args::new(), heads.x).ptr(0).ptr(y.ptr).ptr(0);
    let args = heads
        .args(call, args)
        .u32(heads.rows)
        .i32(heads.lanes as i32);
    let args = args.f64(if inverse { -1.0 } else { 1.0 }).f64(0.0);
    let unit = rope_unit("rope_heads", heads.x.dtype, style, false, heads.wide);
    // SAFETY: the arguments are those of `rope_heads`, which uses no weight without NORM; heads are
    // dense.
    unsafe { call.launch(&unit, heads.grid(), [256, 1, 1], 0, &mut { args }) }
}

/// [`Kernel::RopeNorm`].
///
/// # Safety
/// As [`run`].
unsafe fn rope_norm(call: &Call<'_>, style: RopeStyle, eps: f64) -> Result<()> {
    let (w, y, rstd) = (call.src(1), call.dst(0), call.dst(1));
    let heads = Heads::new(call, 2, 4, &[Some(y), Some(w)])?;
    let args = strided(Args::new(), heads.x)
        .ptr(w.ptr)
        .ptr(y.ptr)
        .ptr(rstd.ptr);
    let args = heads
        .args(call, args)
        .u32(heads.rows)
        .i32(heads.lanes as i32)
        .f64(1.0)
        .f64(eps);
    let unit = rope_unit("rope_heads", heads.x.dtype, style, true, heads.wide);
    // SAFETY: the arguments are those of `rope_heads`; heads, weight and rstd are dense.
    unsafe { call.launch(&unit, heads.grid(), [256, 1, 1], 0, &mut { args }) }
}

/// [`Kernel::RopeNormGrad`].
///
/// # Safety
/// As [`run`].
unsafe fn rope_norm_grad(call: &Call<'_>, style: RopeStyle, accumulate: bool) -> Result<()> {
    let (w, rstd, dy) = (call.src(1), call.src(2), call.src(5));
    let (dx, dw) = (call.maybe_dst(0), call.maybe_dst(1));
    let heads = Heads::new(call, 3, 6, &[Some(w), Some(dy), dx])?;
    let width = heads.x.shape()[3];
    let cut = RowSplit::new(heads.rows as usize, width);
    let partial = dw.map_or(0, |_| call.scratch_ptr());
    // Every group of threads keeps a sum of every column; wide heads have fewer groups in a block.
    let bytes = width * heads.x.dtype.accumulator().size();
    let room = |threads: u32| (threads / heads.lanes) as usize * bytes;
    let threads = [256, 128, 64]
        .into_iter()
        .find(|threads| room(*threads) <= 32 << 10)
        .unwrap_or(32);
    let args = strided(strided(Args::new(), heads.x), dy)
        .ptr(w.ptr)
        .ptr(rstd.ptr)
        .maybe(dx)
        .ptr(partial);
    let args = heads
        .args(call, args)
        .u32(heads.rows)
        .i32(heads.lanes as i32)
        .u32(cut.per as u32);
    let unit = rope_unit("rope_heads_grad", heads.x.dtype, style, true, heads.wide);
    let (grid, shared) = (
        [cut.count as u32, 1, 1],
        dw.map_or(0, |_| room(threads)) as u32,
    );
    // SAFETY: the arguments are those of `rope_heads_grad`; heads, weight and rstd are dense;
    // `scratch` asked for the partial sums.
    unsafe { call.launch(&unit, grid, [threads, 1, 1], shared, &mut { args }) }?;
    match dw {
        // SAFETY: the kernel before left `count` rows of partial sums there.
        Some(dw) => unsafe { sum_chunks(call, partial, cut.count, dw, accumulate) },
        None => Ok(()),
    }
}

/// The rows of a view: its dimensions but the last, as one where one stride says it all.
fn rows_of(view: &View) -> Result<View> {
    let (dims, strides) = (view.shape().dims(), view.layout.strides());
    let outer = dims.len().saturating_sub(1);
    let (dims, strides) = (&dims[..outer], &strides[..outer]);
    let mut apart = dims
        .iter()
        .zip(strides)
        .rev()
        .filter(|(size, _)| **size != 1);
    let (&size, &step) = apart.next().unwrap_or((&1, &0));
    let mut reach = step * size as isize;
    let one = apart.all(|(&size, &stride)| {
        let fits = stride == reach;
        reach *= size as isize;
        fits
    });
    let layout = match one {
        true => Layout::strided(Shape::new(&[dims.iter().product()])?, &[step]),
        false => Layout::strided(Shape::new(dims)?, strides),
    };
    Ok(View { layout, ..*view })
}

/// [`Kernel::Glu`] and [`Kernel::GluGrad`]: operands in the kernel's order.
///
/// # Safety
/// As [`run`].
unsafe fn gated(call: &Call<'_>, kind: Glu, entry: &'static str, operands: &[&View]) -> Result<()> {
    let (dtype, numel) = (operands[0].dtype, operands[0].numel());
    if numel == 0 {
        return Ok(());
    }
    let n = piece(dtype);
    // What is dense as a whole is one long row.
    let whole = operands.iter().all(|v| v.layout.is_contiguous());
    let cols = if whole {
        numel
    } else {
        operands[0].shape().last().copied().unwrap_or(1)
    };
    let wide = match whole {
        true => numel.is_multiple_of(n) && operands.iter().all(|v| v.ptr.is_multiple_of(16)),
        false => operands.iter().all(|v| steps_of(v, n)),
    };
    let rows = numel / cols;
    let pieces = if wide { cols / n } else { cols };
    let tx = pieces.next_power_of_two().min(256);
    let (across, down) = (pieces.div_ceil(tx), rows.div_ceil(256 / tx));
    let mut args = Args::new();
    for operand in operands {
        let one = || Layout::strided(Shape::default(), &[]);
        args = args.view(&if whole {
            View {
                layout: one(),
                ..**operand
            }
        } else {
            rows_of(operand)?
        });
    }
    let (alpha, limit) = match kind {
        Glu::Clamped { alpha, limit } => (alpha, limit),
        _ => (0.0, 0.0),
    };
    let args = args
        .size(rows)
        .size(cols)
        .u32(across as u32)
        .f64(alpha)
        .f64(limit);
    let (grid, block) = (
        [(across * down) as u32, 1, 1],
        [tx as u32, (256 / tx) as u32, 1],
    );
    // SAFETY: the arguments are those of `glu` or `glu_grad`; last dimensions are dense, shapes are
    // equal.
    unsafe {
        call.launch(&glu_unit(entry, dtype, kind, wide), grid, block, 0, &mut {
            args
        })
    }
}
