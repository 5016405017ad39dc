//! Matrix products: cuBLASLt for whole products, tensor-core kernels of our own for products of groups.
//!
//! A [`Way`] is chosen from shapes, strides and types alone, so that the scratch it wants is known before the
//! memory is: the library where both operands lie as it wants them; the library over dense copies where one does
//! not and the product is worth a copy; else the plain kernel, which takes everything. That one also steps in
//! where the library knows no algorithm.
//!
//! # Bias
//! The sum is rounded once, after the bias. The library adds it where result and operands share a type; for
//! results in the accumulator's type, `bias + beta c` is written first and the product added to it.
//!
//! # Invariants
//! - A call over the same operands takes the same way and the library's same algorithm.
//! - `c` is not read when beta is 0, and is written even where there is nothing to sum.

mod grouped;
mod lt;

pub(crate) use lt::Products;

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::shape::Layout;
use lt::{Lie, Task};

const TILE_TEXT: &str = concat!(include_str!("kernels/product_tile.cuh"), include_str!("kernels/product.cu"));

/// Rows and columns of a tile of the plain kernel.
const TILE: usize = 64;

/// Operands that the library does not take are copied for products of more multiplications than this.
const WORTH_A_COPY: usize = 1 << 22;

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::MatMul { alpha, beta } => matmul(call, *alpha, *beta),
            Kernel::GroupedMatMul => grouped::forward(call),
            Kernel::GroupedMatMulGrad { accumulate } => grouped::gradient(call, *accumulate),
            _ => Err(Error::invalid(call.kernel.name(), "is no product")),
        }
    }
}

pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    let (Kernel::MatMul { .. }, [Some(a), Some(b), ..], [Some(c), ..]) = (kernel, src, dst) else { return 0 };
    match Way::of(a, b, c) {
        Way::Library { copies } => Rooms::of(a, b, c, copies).total,
        _ => 0,
    }
}

pub(super) fn units() -> Vec<Unit> {
    let types = [DType::F64, DType::F32, DType::BF16, DType::F16];
    let pairs =
        types.into_iter().flat_map(|t| [(t, t), (t, t.accumulator())].into_iter().take(1 + narrow(t)));
    let plain =
        pairs.flat_map(|(src, dst)| [plain(src, dst, "plain_product"), plain(src, dst, "settle_product")]);
    let copies = [2, 4, 8].map(dense);
    plain.chain(copies).chain(grouped::units()).collect()
}

/// 1 for types that are narrower than their accumulator.
fn narrow(dtype: DType) -> usize {
    usize::from(dtype != dtype.accumulator())
}

fn plain(src: DType, dst: DType, entry: &'static str) -> Unit {
    Unit::new("product", TILE_TEXT, entry).with("IN", c_type(src)).with("OUT", c_type(dst))
}

fn dense(element_bytes: usize) -> Unit {
    let word = match element_bytes {
        2 => "u16",
        4 => "u32",
        _ => "u64",
    };
    Unit::new("dense", include_str!("kernels/dense.cu"), "dense_matrices").with("WORD", word)
}

/// c = alpha a b + bias + beta c in numbers.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batches: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    fn of(a: &View, c: &View) -> Self {
        let (a, c) = (a.shape(), c.shape());
        let rank = c.rank();
        Self { batches: c[..rank - 2].iter().product(), m: c[rank - 2], n: c[rank - 1], k: a[rank - 1] }
    }

    fn multiplications(&self) -> usize {
        self.batches.saturating_mul(self.m).saturating_mul(self.n).saturating_mul(self.k)
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// The result is empty.
    Nothing,
    /// There is nothing to sum: c = bias + beta c.
    Settle,
    /// By the plain kernel.
    Plain,
    /// By the library; of left and right, whether a dense copy is made first.
    Library { copies: [bool; 2] },
}

impl Way {
    fn of(a: &View, b: &View, c: &View) -> Self {
        let sizes = Sizes::of(a, c);
        if c.numel() == 0 {
            return Self::Nothing;
        }
        if sizes.k == 0 {
            return Self::Settle;
        }
        let copies = [Lie::of(&a.layout).is_none(), Lie::of(&b.layout).is_none()];
        let huge = [sizes.m, sizes.n, sizes.k].into_iter().any(|size| size > i32::MAX as usize);
        if huge || (copies != [false; 2] && sizes.multiplications() <= WORTH_A_COPY) {
            return Self::Plain;
        }
        Self::Library { copies }
    }
}

/// Where things lie in the scratch memory: the library's workspace first.
struct Rooms {
    workspace: usize,
    copies: [usize; 2],
    total: usize,
}

impl Rooms {
    fn of(a: &View, b: &View, c: &View, copies: [bool; 2]) -> Self {
        let sizes = Sizes::of(a, c);
        let workspace = workspace(&sizes);
        let bytes = |view: &View, copied: bool| match copied {
            true => (distinct(view).numel() * view.dtype.size()).next_multiple_of(256),
            false => 0,
        };
        let left = workspace + bytes(a, copies[0]);
        Self { workspace, copies: [workspace, left], total: left + bytes(b, copies[1]) }
    }
}

/// What the library may use: sixteen times the result's sums (products cut along their depth), from 1 to 32 MiB.
fn workspace(sizes: &Sizes) -> usize {
    let sums = sizes.batches.saturating_mul(sizes.m).saturating_mul(sizes.n);
    sums.saturating_mul(4 * 16).clamp(1 << 20, 32 << 20).next_power_of_two()
}

/// The view without its repetitions: batch dimensions of stride 0 count once.
fn distinct(view: &View) -> View {
    let rank = view.shape().rank();
    let mut shape = *view.shape();
    for axis in 0..rank - 2 {
        if view.layout.strides()[axis] == 0 {
            shape = shape.with(axis, 1);
        }
    }
    View { layout: Layout::strided(shape, view.layout.strides()), ..*view }
}

/// The same values in dense matrices at `ptr`, after `distinct` was copied there.
fn packed(view: &View, ptr: u64) -> View {
    let dense = Layout::contiguous(*distinct(view).shape());
    let mut strides = dense.strides().to_vec();
    for axis in 0..strides.len() - 2 {
        if view.layout.strides()[axis] == 0 {
            strides[axis] = 0;
        }
    }
    View { ptr, layout: Layout::strided(*view.shape(), &strides), ..*view }
}

/// A whole call of [`Kernel::MatMul`].
struct Product<'a> {
    a: &'a View,
    b: &'a View,
    c: &'a View,
    bias: Option<&'a View>,
    alpha: f64,
    beta: f64,
}

unsafe fn matmul(call: &Call<'_>, alpha: f64, beta: f64) -> Result<()> {
    let (a, b, c) = (call.src(0), call.src(1), call.dst(0));
    let product = Product { a, b, c, bias: call.maybe_src(2), alpha, beta };
    // SAFETY: the launch contract, passed on.
    unsafe {
        match Way::of(a, b, c) {
            Way::Nothing => Ok(()),
            Way::Settle => settle(call, &product),
            Way::Plain => plainly(call, &product),
            Way::Library { copies } => by_library(call, &product, copies),
        }
    }
}

/// c = bias + beta c.
unsafe fn settle(call: &Call<'_>, product: &Product<'_>) -> Result<()> {
    let Product { a, c, bias, beta, .. } = *product;
    let n = c.shape()[c.shape().rank() - 1];
    let rows = c.numel() / n;
    let mut args = Args::new().maybe(bias).ptr(c.ptr).size(rows).size(n).f64(beta);
    let grid = [n.div_ceil(256) as u32, rows.min(65_535) as u32, 1];
    // SAFETY: the arguments are the kernel's; c is dense with `rows` rows of `n`, the bias has `n` elements.
    unsafe { call.launch(&plain(a.dtype, c.dtype, "settle_product"), grid, [256, 1, 1], 0, &mut args) }
}

/// The whole product by the kernel that takes everything.
unsafe fn plainly(call: &Call<'_>, product: &Product<'_>) -> Result<()> {
    let Product { a, b, c, bias, alpha, beta } = *product;
    let Sizes { batches, m, n, k } = Sizes::of(a, c);
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    let grid = [fit(call, tiles)?, batches.min(65_535) as u32, 1];
    let args = Args::new().view(a).view(b).maybe(bias).ptr(c.ptr);
    let mut args = args.size(batches).size(m).size(n).size(k).f64(alpha).f64(beta);
    // SAFETY: the arguments are the kernel's; the launch contract gives operands of these shapes, and each block
    // writes its own tile.
    unsafe { call.launch(&plain(a.dtype, c.dtype, "plain_product"), grid, [256, 1, 1], 0, &mut args) }
}

/// A number of blocks, if a grid has as many.
fn fit(call: &Call<'_>, blocks: usize) -> Result<u32> {
    let fits = i32::try_from(blocks).map(|blocks| blocks as u32);
    fits.map_err(|_| {
        Error::invalid(call.kernel.name(), format!("{blocks} tiles are too many for one product"))
    })
}

unsafe fn by_library(call: &Call<'_>, product: &Product<'_>, copies: [bool; 2]) -> Result<()> {
    let rooms = Rooms::of(product.a, product.b, product.c, copies);
    let side = |i: usize, view: &View| match copies[i] {
        true => packed(view, call.scratch_ptr() + rooms.copies[i] as u64),
        false => *view,
    };
    let (a, b) = (side(0, product.a), side(1, product.b));
    let direct = Product { a: &a, b: &b, ..*product };
    let shares_type = a.dtype == product.c.dtype && a.dtype != DType::F64;
    let mut plans = None;
    if product.bias.is_none() || shares_type {
        plans = lt::plan(call.gpu, &tasks(&direct, call.scratch_ptr(), rooms.workspace))?;
    }
    let mut first = None;
    if plans.is_none() && product.bias.is_some() && narrow(product.c.dtype) == 0 {
        let rest = Product { bias: None, beta: 1.0, ..direct };
        plans = lt::plan(call.gpu, &tasks(&rest, call.scratch_ptr(), rooms.workspace))?;
        first = Some(&direct);
    }
    let Some(plans) = plans else {
        // SAFETY: the launch contract.
        return unsafe { plainly(call, product) };
    };
    for (view, dense, copied) in [(product.a, &a, copies[0]), (product.b, &b, copies[1])] {
        if copied {
            // SAFETY: the scratch memory has this room, which nobody else uses during the call.
            unsafe { copy(call, &distinct(view), dense.ptr)? };
        }
    }
    if let Some(first) = first {
        // SAFETY: the launch contract.
        unsafe { settle(call, first)? };
    }
    for ready in plans {
        // SAFETY: operands and result are as large as the task says; the workspace is the scratch memory's start.
        unsafe { ready.run(call)? };
    }
    Ok(())
}

/// Copies a view into dense memory.
unsafe fn copy(call: &Call<'_>, view: &View, to: u64) -> Result<()> {
    let count = view.numel();
    let mut args = Args::new().view(view).ptr(to).size(count);
    // SAFETY: the arguments are the kernel's; the caller has room for `count` elements at `to`.
    unsafe { call.launch(&dense(view.dtype.size()), Call::blocks(count), [256, 1, 1], 0, &mut args) }
}

/// One dimension of batches: how many, and the elements from one to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    count: usize,
    a: i64,
    b: i64,
    c: i64,
}

/// The batch dimensions, innermost first, neighbours merged where one stride serves both.
fn steps(a: &View, b: &View, sizes: &Sizes) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut dense = (sizes.m * sizes.n) as i64;
    for axis in (0..a.shape().rank() - 2).rev() {
        let count = a.shape()[axis];
        if count == 1 {
            continue;
        }
        let (sa, sb) = (a.layout.strides()[axis] as i64, b.layout.strides()[axis] as i64);
        match steps.last_mut() {
            Some(last) if sa == last.a * last.count as i64 && sb == last.b * last.count as i64 => {
                last.count *= count
            }
            _ => steps.push(Step { count, a: sa, b: sb, c: dense }),
        }
        dense *= count as i64;
    }
    steps
}

/// The library's calls that make up a product.
fn tasks(product: &Product<'_>, scratch: u64, workspace: usize) -> Vec<Task> {
    let Product { a, b, c, .. } = *product;
    let mut sizes = Sizes::of(a, c);
    let mut left = Lie::of(&a.layout).expect("lies as the library wants, or was copied");
    let right = Lie::of(&b.layout).expect("lies as the library wants, or was copied");
    let mut steps = steps(a, b, &sizes);
    // Many rows against one matrix are one product.
    if let [only] = steps[..]
        && only.b == 0
        && !left.turned
        && (only.a == sizes.m as i64 * left.line || (sizes.m == 1 && only.a >= sizes.k as i64))
        && sizes.m * only.count <= i32::MAX as usize
    {
        left.line = if sizes.m == 1 { only.a } else { left.line };
        sizes.m *= only.count;
        steps.clear();
    }
    // The longest dimension is the library's, the others are walked here.
    let longest = (0..steps.len()).max_by_key(|i| steps[*i].count);
    let batch = longest.map_or(Step { count: 1, a: 0, b: 0, c: 0 }, |i| steps.remove(i));
    let turns: usize = steps.iter().map(|step| step.count).product();
    let mut tasks = Vec::with_capacity(turns);
    for turn in 0..turns {
        let mut rest = turn;
        let mut at = [0; 3];
        for step in &steps {
            let i = (rest % step.count) as i64;
            rest /= step.count;
            at = [at[0] + i * step.a, at[1] + i * step.b, at[2] + i * step.c];
        }
        for start in (0..batch.count).step_by(lt::MOST_BATCHES) {
            let (i, count) = (start as i64, lt::MOST_BATCHES.min(batch.count - start));
            let place = |view: &View, offset: i64, step: i64| {
                view.ptr.wrapping_add_signed((offset + i * step) * view.dtype.size() as i64)
            };
            tasks.push(Task::new(
                lt::Shape {
                    m: sizes.m,
                    n: sizes.n,
                    k: sizes.k,
                    batches: count,
                    steps: [batch.a, batch.b, batch.c],
                },
                lt::Side { ptr: place(a, at[0], batch.a), lie: left },
                lt::Side { ptr: place(b, at[1], batch.b), lie: right },
                (a.dtype, c.dtype, place(c, at[2], batch.c)),
                product.bias.map(|bias| bias.ptr),
                [product.alpha, product.beta],
                (scratch, workspace),
            ));
        }
    }
    tasks
}

#[cfg(test)]
mod tests;
