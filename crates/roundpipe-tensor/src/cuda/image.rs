//! Convolution and pooling of images `[n, c, h, w]`, dense.
//!
//! Convolutions are cuDNN's where it is here and takes them ([`cudnn`]). Ours and their gradients
//! are products of matrices that are read where they lie, tile by tile through shared memory;
//! groups of few channels, which would leave the tiles empty, are summed directly. Gradients of
//! pooling are gathered by the elements from the windows that reach them.
//!
//! # Invariants
//! - An output element is one sum in the accumulator type in an order that the sizes fix, rounded
//!   once.
//! - Sizes beyond the 32-bit counting of the convolutions are refused; pooling counts in 64 bits
//!   where it must.

mod cudnn;

pub(crate) use cudnn::ConvPlans;

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{ConvSpec, Kernel, PoolSpec, View};
use crate::shape::Shape;

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Conv2d(_) | Kernel::Conv2dGradInput(_) | Kernel::Conv2dGradFilter { .. }
                if cudnn::run(call)? =>
            {
                Ok(())
            }
            Kernel::Conv2d(spec) => forward(call, spec),
            Kernel::Conv2dGradInput(spec) => grad_input(call, spec),
            Kernel::Conv2dGradFilter { spec, accumulate } => grad_filter(call, spec, *accumulate),
            Kernel::MaxPool2d(spec) => max(call, spec),
            Kernel::MaxPool2dGrad(spec) => max_grad(call, spec),
            Kernel::AvgPool2d(spec) => mean(call, Some(spec)),
            Kernel::AvgPool2dGrad(spec) => mean_grad(call, Some(spec)),
            Kernel::AdaptiveAvgPool2d => mean(call, None),
            Kernel::AdaptiveAvgPool2dGrad => mean_grad(call, None),
            _ => Err(Error::invalid(
                call.kernel.name(),
                "not an operation of images",
            )),
        }
    }
}

/// Scratch bytes: enough for either way, whatever is installed.
pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let library = cudnn::ConvCase::of(kernel, src, dst).map_or(0, |case| case.workspace());
    library.max(own_scratch(kernel, src, dst))
}

fn own_scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    match (kernel, src, dst) {
        (Kernel::Conv2dGradFilter { spec, .. }, [Some(x), Some(dy)], [Some(df)]) => {
            let product = ConvProduct::of_filter(spec, x.shape(), dy.shape(), df.shape());
            if product.is_direct() || product.parts == 1 {
                return 0;
            }
            product.parts * df.numel() * df.dtype.size()
        }
        _ => 0,
    }
}

/// Side of a tile of `conv_tiles`.
const TILE: usize = 64;

/// A convolution as a product of matrices per group.
#[derive(Debug, Clone, Copy)]
struct ConvProduct {
    groups: usize,
    rows: usize,
    cols: usize,
    /// Products per element.
    terms: usize,
    /// Terms of one part, and how many parts there are.
    chunk: usize,
    parts: usize,
}

impl ConvProduct {
    fn new(groups: usize, rows: usize, cols: usize, terms: usize) -> Self {
        Self {
            groups,
            rows,
            cols,
            terms,
            chunk: terms,
            parts: 1,
        }
    }

    /// Few elements of many terms: cut into parts for some 512 blocks, each of 1024 terms or more.
    fn of_filter(spec: &ConvSpec, x: &Shape, dy: &Shape, df: &Shape) -> Self {
        let (cols, terms) = (df[1] * df[2] * df[3], x[0] * dy[2] * dy[3]);
        let whole = Self::new(spec.groups, df[0] / spec.groups, cols, terms);
        let wanted = 512usize
            .div_ceil(whole.tiles().max(1))
            .min(terms.div_ceil(1024))
            .max(1);
        let chunk = terms.div_ceil(wanted).next_multiple_of(16);
        Self {
            chunk,
            parts: terms.div_ceil(chunk.max(1)).max(1),
            ..whole
        }
    }

    fn tiles(&self) -> usize {
        self.groups * self.rows.div_ceil(TILE) * self.cols.div_ceil(TILE)
    }

    /// Groups that would leave most rows of a tile empty.
    fn is_direct(&self) -> bool {
        self.groups > 1 && self.rows < 8
    }
}

fn conv(entry: &'static str, dtype: DType, kind: usize) -> Unit {
    let unit = Unit::new("conv", include_str!("kernels/conv.cu"), entry);
    unit.with("REAL", c_type(dtype)).with("KIND", kind)
}

/// GEOMETRY of conv.cu: x `[n, c, h, w]`, f `[o, .., kh, kw]`, y `[n, o, oh, ow]`.
fn geometry(args: Args, spec: &ConvSpec, x: &Shape, f: &Shape, y: &Shape) -> Args {
    let sizes = [x[0], x[1], x[2], x[3], f[0], f[2], f[3], y[2], y[3]];
    let pairs = [spec.stride, spec.padding, spec.dilation];
    let all = sizes
        .into_iter()
        .chain(pairs.into_iter().flatten())
        .chain([spec.groups]);
    all.fold(args, |args, size| args.i32(size as i32))
}

/// Refuses what 32-bit coordinates cannot count.
fn countable(call: &Call<'_>, spec: &ConvSpec, x: &Shape, f: &Shape, y: &Shape) -> Result<()> {
    let reach = |a: usize| {
        let window = spec.dilation[a].saturating_mul(f[2 + a]);
        x[2 + a]
            .saturating_add(spec.padding[a].saturating_mul(2))
            .saturating_add(window)
            .max(spec.stride[a])
    };
    let planes = x[0].saturating_mul(x[1].max(f[0]));
    let most = [
        reach(0),
        reach(1),
        planes,
        f.numel(),
        x[2] * x[3],
        y[2] * y[3],
    ];
    if most.into_iter().all(|size| size < 1 << 30) {
        return Ok(());
    }
    let what = format!("images {x} with a filter {f} are too large for a GPU's convolution");
    Err(Error::invalid(call.kernel.name(), what))
}

/// `[x, f, bias?] -> [y]`.
///
/// # Safety
/// As [`run`].
unsafe fn forward(call: &Call<'_>, spec: &ConvSpec) -> Result<()> {
    let (x, f, bias, y) = (call.src(0), call.src(1), call.maybe_src(2), call.dst(0));
    let (xs, fs, ys) = (x.shape(), f.shape(), y.shape());
    countable(call, spec, xs, fs, ys)?;
    let cols = ys[0] * ys[2] * ys[3];
    let product = ConvProduct::new(
        spec.groups,
        fs[0] / spec.groups,
        cols,
        fs[1] * fs[2] * fs[3],
    );
    let args = Args::new().ptr(f.ptr).ptr(x.ptr).maybe(bias).ptr(y.ptr);
    if product.is_direct() {
        let mut args = geometry(args, spec, xs, fs, ys).size(y.numel());
        let unit = conv("conv_direct", x.dtype, 0);
        // SAFETY: the arguments are the kernel's parameters.
        return unsafe { call.launch(&unit, Call::blocks(y.numel()), [256, 1, 1], 0, &mut args) };
    }
    let args = geometry(args.ptr(0), spec, xs, fs, ys);
    // SAFETY: the arguments are the kernel's parameters up to the product's.
    unsafe { tiles(call, &conv("conv_tiles", x.dtype, 0), args, &product, false) }
}

/// `[dy, f] -> [dx]`.
///
/// # Safety
/// As [`run`].
unsafe fn grad_input(call: &Call<'_>, spec: &ConvSpec) -> Result<()> {
    let (dy, f, dx) = (call.src(0), call.src(1), call.dst(0));
    let (xs, fs, ys) = (dx.shape(), f.shape(), dy.shape());
    countable(call, spec, xs, fs, ys)?;
    let (cols, terms) = (xs[0] * xs[2] * xs[3], fs[0] / spec.groups * fs[2] * fs[3]);
    let product = ConvProduct::new(spec.groups, fs[1], cols, terms);
    let args = Args::new().ptr(f.ptr).ptr(dy.ptr).ptr(0).ptr(dx.ptr);
    if product.is_direct() {
        let mut args = geometry(args, spec, xs, fs, ys).size(dx.numel());
        let unit = conv("conv_direct", dy.dtype, 1);
        // SAFETY: the arguments are the kernel's parameters.
        return unsafe { call.launch(&unit, Call::blocks(dx.numel()), [256, 1, 1], 0, &mut args) };
    }
    let args = geometry(args.ptr(0), spec, xs, fs, ys);
    // SAFETY: the arguments are the kernel's parameters up to the product's.
    unsafe {
        tiles(
            call,
            &conv("conv_tiles", dy.dtype, 1),
            args,
            &product,
            false,
        )
    }
}

/// `[x, dy] -> [df]`: one sum per part, then the sum of the parts.
///
/// # Safety
/// As [`run`].
unsafe fn grad_filter(call: &Call<'_>, spec: &ConvSpec, accumulate: bool) -> Result<()> {
    let (x, dy, df) = (call.src(0), call.src(1), call.dst(0));
    let (xs, fs, ys) = (x.shape(), df.shape(), dy.shape());
    countable(call, spec, xs, fs, ys)?;
    let product = ConvProduct::of_filter(spec, xs, ys, fs);
    let (partial, again) = (call.scratch_ptr(), i32::from(accumulate));
    let args = Args::new().ptr(dy.ptr).ptr(x.ptr);
    if product.is_direct() {
        let mut args = geometry(args.ptr(df.ptr), spec, xs, fs, ys).i32(again);
        let unit = conv("conv_filter", x.dtype, 2);
        // SAFETY: the arguments are the kernel's parameters; a block per element of df.
        return unsafe { call.launch(&unit, [df.numel() as u32, 1, 1], [256, 1, 1], 0, &mut args) };
    }
    let args = geometry(args.ptr(0).ptr(df.ptr).ptr(partial), spec, xs, fs, ys);
    // SAFETY: the arguments are the kernels' parameters; the scratch memory holds a copy of df per
    // part.
    unsafe {
        tiles(
            call,
            &conv("conv_tiles", x.dtype, 2),
            args,
            &product,
            accumulate,
        )?;
        if product.parts == 1 {
            return Ok(());
        }
        let args = Args::new().ptr(partial).ptr(df.ptr).size(df.numel());
        let mut args = args.i32(product.parts as i32).i32(again);
        call.launch(
            &conv("conv_join", x.dtype, 2),
            Call::blocks(df.numel()),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// Queues `conv_tiles`, whose arguments are given up to the geometry.
///
/// # Safety
/// As [`Call::launch`].
unsafe fn tiles(
    call: &Call<'_>,
    unit: &Unit,
    args: Args,
    product: &ConvProduct,
    accumulate: bool,
) -> Result<()> {
    let blocks = product.tiles() * product.parts;
    let Some(blocks) = u32::try_from(blocks)
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
    else {
        return Err(Error::invalid(
            call.kernel.name(),
            format!("{blocks} tiles are too many for a GPU"),
        ));
    };
    let args = args
        .size(product.rows)
        .size(product.cols)
        .size(product.terms)
        .size(product.chunk);
    let mut args = args.i32(product.parts as i32).i32(i32::from(accumulate));
    // SAFETY: the caller's promise, and the rest of the parameters.
    unsafe { call.launch(unit, [blocks, 1, 1], [256, 1, 1], 0, &mut args) }
}

/// A pooling kernel: `narrow` counts in 32 bits, `lanes` threads share an output.
fn pool(entry: &'static str, dtype: DType, narrow: bool, adaptive: bool, lanes: usize) -> Unit {
    let unit =
        Unit::new("pool", include_str!("kernels/pool.cu"), entry).with("REAL", c_type(dtype));
    let count = if narrow { "int" } else { "long long" };
    unit.with("COUNT", count)
        .with("ADAPTIVE", i32::from(adaptive))
        .with("LANES", lanes)
}

/// Windows side by side: what adaptive pooling, which has none, passes.
const NO_WINDOW: PoolSpec = PoolSpec {
    kernel: [1, 1],
    stride: [1, 1],
    padding: [0, 0],
    dilation: [1, 1],
    ceil_mode: false,
    count_include_pad: false,
};

/// AXES of pool.cu; little-endian words serve as int and as long long.
fn axes(args: Args, spec: &PoolSpec, x: &Shape, y: &Shape) -> Args {
    let pairs = [
        [x[2], x[3]],
        [y[2], y[3]],
        spec.kernel,
        spec.stride,
        spec.padding,
        spec.dilation,
    ];
    pairs.into_iter().flatten().fold(args, Args::size)
}

/// Whether 32 bits hold every number that the kernels form.
fn is_narrow(spec: &PoolSpec, x: &Shape, y: &Shape) -> bool {
    let axis = |a: usize| {
        let (size, count) = (x[2 + a].saturating_add(1), y[2 + a].saturating_add(1));
        let window = spec.dilation[a]
            .saturating_mul(spec.kernel[a])
            .max(spec.stride[a]);
        let border = size
            .saturating_add(spec.padding[a].saturating_mul(2))
            .saturating_add(window);
        border.max(size.saturating_mul(count))
    };
    [x.numel(), y.numel(), axis(0), axis(1)]
        .into_iter()
        .all(|size| size < 1 << 30)
}

/// `[x] -> [y, at]`.
///
/// # Safety
/// As [`run`].
unsafe fn max(call: &Call<'_>, spec: &PoolSpec) -> Result<()> {
    let (x, y, at) = (call.src(0), call.dst(0), call.dst(1));
    let args = Args::new()
        .ptr(x.ptr)
        .ptr(y.ptr)
        .ptr(at.ptr)
        .size(y.numel());
    let mut args = axes(args, spec, x.shape(), y.shape());
    let unit = pool(
        "pool_max",
        x.dtype,
        is_narrow(spec, x.shape(), y.shape()),
        false,
        1,
    );
    // SAFETY: the arguments are the kernel's parameters.
    unsafe { call.launch(&unit, Call::blocks(y.numel()), [256, 1, 1], 0, &mut args) }
}

/// `[dy, at] -> [dx]`.
///
/// # Safety
/// As [`run`].
unsafe fn max_grad(call: &Call<'_>, spec: &PoolSpec) -> Result<()> {
    let (dy, at, dx) = (call.src(0), call.src(1), call.dst(0));
    let args = Args::new()
        .ptr(dy.ptr)
        .ptr(at.ptr)
        .ptr(dx.ptr)
        .size(dx.numel());
    let mut args = axes(args, spec, dx.shape(), dy.shape());
    let unit = pool(
        "pool_max_grad",
        dy.dtype,
        is_narrow(spec, dx.shape(), dy.shape()),
        false,
        1,
    );
    // SAFETY: the arguments are the kernel's parameters.
    unsafe { call.launch(&unit, Call::blocks(dx.numel()), [256, 1, 1], 0, &mut args) }
}

/// `[x] -> [y]`; adaptive without a spec.
///
/// # Safety
/// As [`run`].
unsafe fn mean(call: &Call<'_>, window: Option<&PoolSpec>) -> Result<()> {
    let (x, y) = (call.src(0), call.dst(0));
    let (xs, ys, spec) = (x.shape(), y.shape(), window.unwrap_or(&NO_WINDOW));
    let area = match window {
        Some(spec) => spec.kernel[0] * spec.kernel[1],
        None => (xs[2] * xs[3]).checked_div(ys[2] * ys[3]).unwrap_or(0),
    };
    // A large window is worth a warp.
    let lanes = if area >= 64 { 32 } else { 1 };
    let args = Args::new()
        .ptr(x.ptr)
        .ptr(y.ptr)
        .size(y.numel())
        .i32(i32::from(spec.count_include_pad));
    let mut args = axes(args, spec, xs, ys);
    let unit = pool(
        "pool_mean",
        x.dtype,
        is_narrow(spec, xs, ys),
        window.is_none(),
        lanes,
    );
    // SAFETY: the arguments are the kernel's parameters.
    unsafe {
        call.launch(
            &unit,
            Call::blocks(y.numel() * lanes),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// `[dy] -> [dx]`; adaptive without a spec.
///
/// # Safety
/// As [`run`].
unsafe fn mean_grad(call: &Call<'_>, window: Option<&PoolSpec>) -> Result<()> {
    let (dy, dx) = (call.src(0), call.dst(0));
    let (xs, ys, spec) = (dx.shape(), dy.shape(), window.unwrap_or(&NO_WINDOW));
    let args = Args::new()
        .ptr(dy.ptr)
        .ptr(dx.ptr)
        .size(dx.numel())
        .i32(i32::from(spec.count_include_pad));
    let mut args = axes(args, spec, xs, ys);
    let unit = pool(
        "pool_mean_grad",
        dy.dtype,
        is_narrow(spec, xs, ys),
        window.is_none(),
        1,
    );
    // SAFETY: the arguments are the kernel's parameters.
    unsafe { call.launch(&unit, Call::blocks(dx.numel()), [256, 1, 1], 0, &mut args) }
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        units.extend([0, 1, 2].map(|kind| conv("conv_tiles", dtype, kind)));
        units.extend([0, 1].map(|kind| conv("conv_direct", dtype, kind)));
        units.extend(["conv_filter", "conv_join"].map(|entry| conv(entry, dtype, 2)));
        for narrow in [true, false] {
            units.extend(
                ["pool_max", "pool_max_grad"].map(|entry| pool(entry, dtype, narrow, false, 1)),
            );
            for adaptive in [false, true] {
                units
                    .extend([1, 32].map(|lanes| pool("pool_mean", dtype, narrow, adaptive, lanes)));
                units.push(pool("pool_mean_grad", dtype, narrow, adaptive, 1));
            }
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::ConvProduct;
    use crate::kernel::ConvSpec;
    use crate::shape::Shape;

    /// Parts cover all terms once, whatever the sizes.
    #[test]
    fn parts_cover_the_terms() {
        for (images, side, channels) in [
            (0, 4, 2),
            (1, 1, 1),
            (1, 61, 3),
            (70, 6, 3),
            (32, 112, 64),
            (2, 20, 900),
        ] {
            let shape = |dims: [usize; 4]| Shape::new(&dims).unwrap();
            let (x, f) = (
                shape([images, channels, side, side]),
                shape([channels, channels, 1, 1]),
            );
            let product = ConvProduct::of_filter(&ConvSpec::default(), &x, &x, &f);
            assert!(
                product.chunk.is_multiple_of(16) && product.parts >= 1,
                "{product:?}"
            );
            assert!(
                product.chunk * product.parts >= product.terms,
                "{product:?}"
            );
            assert!(
                product.chunk * (product.parts - 1) <= product.terms,
                "{product:?}"
            );
        }
    }

    /// The elements of adaptive windows and the windows that reach an element, as pool.cu finds
    /// them, agree.
    #[test]
    fn adaptive_windows_are_found_from_both_sides() {
        for (size, count) in [
            (7usize, 3usize),
            (8, 5),
            (40, 1),
            (3, 5),
            (1, 4),
            (6, 6),
            (13, 12),
        ] {
            for at in 0..size {
                let first = at * count / size;
                let last = ((at + 1) * count).div_ceil(size) - 1;
                for i in 0..count {
                    let holds = (i * size / count..((i + 1) * size).div_ceil(count)).contains(&at);
                    assert_eq!(
                        holds,
                        (first..=last).contains(&i),
                        "element {at} of {size}, window {i} of {count}"
                    );
                }
            }
        }
    }
}
