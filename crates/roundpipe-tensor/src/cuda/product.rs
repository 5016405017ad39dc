//! Matrix products: cuBLASLt for whole products, in 8-bit floats too ([`fp8`]), tensor-core kernels
//! of our own for products of groups.
//!
//! A [`ProductMethod`] is chosen from shapes, strides and types alone, so that the scratch it wants
//! is known before the memory is: the library where both operands lie as it wants them; the library
//! over dense copies where one does not and the product is worth a copy; else the plain kernel,
//! which takes everything. That one also steps in where the library knows no algorithm.
//!
//! # Bias
//! The sum is rounded once, after the bias. The library adds it where result and operands share a
//! type; for results in the accumulator's type, `bias + beta c` is written first and the product
//! added to it.
//!
//! # Invariants
//! - A call over the same operands takes the same way and the library's same algorithm, which is
//!   measured and stored at the first call of a shape ([`tune`]); only that call waits.
//! - `c` is not read when beta is 0, and is written even where there is nothing to sum.

mod fp8;
mod grouped;
mod hopper;
mod lt;
mod tune;

pub(crate) use lt::Products;

use super::call::{Args, Call, c_type};
use super::compile::Unit;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::shape::{Layout, MAX_RANK};
use lt::{Lie, LtTask};

const TILE_TEXT: &str = concat!(
    include_str!("kernels/product_tile.cuh"),
    include_str!("kernels/product.cu")
);

/// Rows and columns of a tile of the plain kernel.
const TILE: usize = 64;

/// Operands that the library does not take are copied for products of more multiplications than
/// this.
const WORTH_A_COPY: usize = 1 << 22;

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
            Kernel::GroupedMatMul { accumulate } => grouped::forward(call, *accumulate),
            Kernel::GroupedMatMulGrad { accumulate } => grouped::gradient(call, *accumulate),
            _ => Err(Error::invalid(call.kernel.name(), "is no product")),
        }
    }
}

pub(super) fn scratch(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
    if let Kernel::Fp8MatMul { .. } = kernel {
        return fp8::scratch(dst);
    }
    let (Kernel::MatMul { .. }, [Some(a), Some(b), ..], [Some(c), ..]) = (kernel, src, dst) else {
        return 0;
    };
    match ProductMethod::of(a, b, c) {
        ProductMethod::Library { copies } => Rooms::of(a, b, c, copies).total,
        _ => 0,
    }
}

pub(super) fn units() -> Vec<Unit> {
    let types = [DType::F64, DType::F32, DType::BF16, DType::F16];
    let pairs = types.into_iter().flat_map(|t| {
        [(t, t), (t, t.accumulator())]
            .into_iter()
            .take(1 + narrow(t))
    });
    let plain = pairs.flat_map(|(src, dst)| {
        [
            plain(src, dst, "plain_product"),
            plain(src, dst, "settle_product"),
        ]
    });
    let copies = [2, 4, 8].map(dense);
    let plain = plain.chain(copies).chain(grouped::units());
    plain.chain(fp8::units()).collect()
}

/// 1 for types that are narrower than their accumulator.
fn narrow(dtype: DType) -> usize {
    usize::from(dtype != dtype.accumulator())
}

fn plain(src: DType, dst: DType, entry: &'static str) -> Unit {
    Unit::new("product", TILE_TEXT, entry)
        .with("IN", c_type(src))
        .with("OUT", c_type(dst))
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
struct ProductSizes {
    batches: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl ProductSizes {
    fn of(a: &View, c: &View) -> Self {
        let (a, c) = (a.shape(), c.shape());
        let rank = c.rank();
        Self {
            batches: c[..rank - 2].iter().product(),
            m: c[rank - 2],
            n: c[rank - 1],
            k: a[rank - 1],
        }
    }

    fn multiplications(&self) -> usize {
        self.batches
            .saturating_mul(self.m)
            .saturating_mul(self.n)
            .saturating_mul(self.k)
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ProductMethod {
    /// The result is empty.
    Nothing,
    /// There is nothing to sum: c = bias + beta c.
    WithoutProduct,
    /// By the plain kernel.
    Plain,
    /// By the library; of left and right, whether a dense copy is made first.
    Library { copies: [bool; 2] },
}

impl ProductMethod {
    fn of(a: &View, b: &View, c: &View) -> Self {
        let sizes = ProductSizes::of(a, c);
        if c.numel() == 0 {
            return Self::Nothing;
        }
        if sizes.k == 0 {
            return Self::WithoutProduct;
        }
        let copies = [Lie::of(&a.layout).is_none(), Lie::of(&b.layout).is_none()];
        let huge = [sizes.m, sizes.n, sizes.k]
            .into_iter()
            .any(|size| size > i32::MAX as usize);
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
        let sizes = ProductSizes::of(a, c);
        let workspace = workspace(&sizes);
        let bytes = |view: &View, copied: bool| match copied {
            true => (distinct(view).numel() * view.dtype.size()).next_multiple_of(256),
            false => 0,
        };
        let left = workspace + bytes(a, copies[0]);
        Self {
            workspace,
            copies: [workspace, left],
            total: left + bytes(b, copies[1]),
        }
    }
}

/// What the library may use: sixteen times the result's sums (products cut along their depth), from
/// 1 to 32 MiB.
fn workspace(sizes: &ProductSizes) -> usize {
    let sums = sizes
        .batches
        .saturating_mul(sizes.m)
        .saturating_mul(sizes.n);
    sums.saturating_mul(4 * 16)
        .clamp(1 << 20, 32 << 20)
        .next_power_of_two()
}

/// The view without its repetitions: batch dimensions of stride 0 count once.
fn distinct(view: &View) -> View {
    let rank = view.shape().rank();
    let mut shape = *view.shape();
    for axis in 0..rank - 2 {
        if view.layout.strides()[axis] == 0 {
            shape = shape.cut(axis, 1);
        }
    }
    View {
        layout: Layout::strided(shape, view.layout.strides()),
        ..*view
    }
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
    View {
        ptr,
        layout: Layout::strided(*view.shape(), &strides),
        ..*view
    }
}

/// A whole call of [`Kernel::MatMul`].
#[derive(Clone, Copy)]
struct MatMulCall<'a> {
    a: &'a View,
    b: &'a View,
    c: &'a View,
    bias: Option<&'a View>,
    alpha: f64,
    beta: f64,
}

unsafe fn matmul(call: &Call<'_>, alpha: f64, beta: f64) -> Result<()> {
    let (a, b, c) = (call.src(0), call.src(1), call.dst(0));
    let product = MatMulCall {
        a,
        b,
        c,
        bias: call.maybe_src(2),
        alpha,
        beta,
    };
    // SAFETY: the launch contract, passed on.
    unsafe {
        match ProductMethod::of(a, b, c) {
            ProductMethod::Nothing => Ok(()),
            ProductMethod::WithoutProduct => without_product(call, &product),
            ProductMethod::Plain => plainly(call, &product),
            ProductMethod::Library { copies } => by_library(call, &product, copies),
        }
    }
}

/// c = bias + beta c.
unsafe fn without_product(call: &Call<'_>, product: &MatMulCall<'_>) -> Result<()> {
    let MatMulCall {
        a, c, bias, beta, ..
    } = *product;
    let n = c.shape()[c.shape().rank() - 1];
    let rows = c.numel() / n;
    let mut args = Args::new()
        .maybe(bias)
        .ptr(c.ptr)
        .size(rows)
        .size(n)
        .f64(beta);
    let grid = [n.div_ceil(256) as u32, rows.min(65_535) as u32, 1];
    // SAFETY: the arguments are the kernel's; c is dense with `rows` rows of `n`, the bias has `n`
    // elements.
    unsafe {
        call.launch(
            &plain(a.dtype, c.dtype, "settle_product"),
            grid,
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// The whole product by the kernel that takes everything.
unsafe fn plainly(call: &Call<'_>, product: &MatMulCall<'_>) -> Result<()> {
    let MatMulCall {
        a,
        b,
        c,
        bias,
        alpha,
        beta,
    } = *product;
    let ProductSizes { batches, m, n, k } = ProductSizes::of(a, c);
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    let grid = [fit(call, tiles)?, batches.min(65_535) as u32, 1];
    let args = Args::new().view(a).view(b).maybe(bias).ptr(c.ptr);
    let mut args = args
        .size(batches)
        .size(m)
        .size(n)
        .size(k)
        .f64(alpha)
        .f64(beta);
    // SAFETY: the arguments are the kernel's; the launch contract gives operands of these shapes,
    // and each block writes its own tile.
    unsafe {
        call.launch(
            &plain(a.dtype, c.dtype, "plain_product"),
            grid,
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// A number of blocks, if a grid has as many.
fn fit(call: &Call<'_>, blocks: usize) -> Result<u32> {
    let fits = i32::try_from(blocks).map(|blocks| blocks as u32);
    fits.map_err(|_| {
        Error::invalid(
            call.kernel.name(),
            format!("{blocks} tiles are too many for one product"),
        )
    })
}

unsafe fn by_library(call: &Call<'_>, product: &MatMulCall<'_>, copies: [bool; 2]) -> Result<()> {
    let rooms = Rooms::of(product.a, product.b, product.c, copies);
    let side = |i: usize, view: &View| match copies[i] {
        true => packed(view, call.scratch_ptr() + rooms.copies[i] as u64),
        false => *view,
    };
    let (a, b) = (side(0, product.a), side(1, product.b));
    let direct = MatMulCall {
        a: &a,
        b: &b,
        ..*product
    };
    let shares_type = a.dtype == product.c.dtype && a.dtype != DType::F64;
    let mut tasks = Tasks::of(&direct, call.scratch_ptr(), rooms.workspace);
    // SAFETY: operands and workspace are as large as the tasks say; operands that are copied later
    // hold anything.
    let takes = |tasks: &Tasks<'_>| unsafe { tasks.all(|task| lt::takes(call, task)) };
    let mut taken = (product.bias.is_none() || shares_type) && takes(&tasks)?;
    let mut first = None;
    if !taken && product.bias.is_some() && narrow(product.c.dtype) == 0 {
        tasks.product = MatMulCall {
            bias: None,
            beta: 1.0,
            ..direct
        };
        taken = takes(&tasks)?;
        first = Some(&direct);
    }
    if !taken {
        // SAFETY: the launch contract.
        return unsafe { plainly(call, product) };
    }
    for (view, dense, copied) in [(product.a, &a, copies[0]), (product.b, &b, copies[1])] {
        if copied {
            // SAFETY: the scratch memory has this room, and the call alone uses it.
            unsafe { copy(call, &distinct(view), dense.ptr)? };
        }
    }
    if let Some(first) = first {
        // SAFETY: the launch contract.
        unsafe { without_product(call, first)? };
    }
    // SAFETY: operands and result are as large as the tasks say; the workspace is the scratch
    // memory's start.
    tasks
        .all(|task| unsafe { lt::run(call, task) }.map(|()| true))
        .map(|_| ())
}

/// Copies a view into dense memory.
unsafe fn copy(call: &Call<'_>, view: &View, to: u64) -> Result<()> {
    let count = view.numel();
    let mut args = Args::new().view(view).ptr(to).size(count);
    // SAFETY: the arguments are the kernel's; the caller has room for `count` elements at `to`.
    unsafe {
        call.launch(
            &dense(view.dtype.size()),
            Call::blocks(count),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// One dimension of batches: how many, and the elements from one to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
struct BatchStep {
    count: usize,
    a: i64,
    b: i64,
    c: i64,
}

/// Some of the batch dimensions.
#[derive(Debug, Clone, Copy)]
struct Steps {
    all: [BatchStep; MAX_RANK],
    count: usize,
}

impl Steps {
    /// The batch dimensions, innermost first, neighbours merged where one stride serves both.
    fn of(a: &View, b: &View, sizes: &ProductSizes) -> Self {
        let mut steps = Self {
            all: [BatchStep {
                count: 1,
                a: 0,
                b: 0,
                c: 0,
            }; MAX_RANK],
            count: 0,
        };
        let mut dense = (sizes.m * sizes.n) as i64;
        for axis in (0..a.shape().rank() - 2).rev() {
            let count = a.shape()[axis];
            if count == 1 {
                continue;
            }
            let (sa, sb) = (
                a.layout.strides()[axis] as i64,
                b.layout.strides()[axis] as i64,
            );
            match steps.all[..steps.count].last_mut() {
                Some(last)
                    if sa == last.a * last.count as i64 && sb == last.b * last.count as i64 =>
                {
                    last.count *= count
                }
                _ => {
                    steps.all[steps.count] = BatchStep {
                        count,
                        a: sa,
                        b: sb,
                        c: dense,
                    };
                    steps.count += 1;
                }
            }
            dense *= count as i64;
        }
        steps
    }

    fn as_slice(&self) -> &[BatchStep] {
        &self.all[..self.count]
    }

    /// Takes the longest dimension out; one of one batch where there is none.
    fn take_longest(&mut self) -> BatchStep {
        let longest = (0..self.count).max_by_key(|i| self.all[*i].count);
        let Some(longest) = longest else {
            return BatchStep {
                count: 1,
                a: 0,
                b: 0,
                c: 0,
            };
        };
        let step = self.all[longest];
        self.all.copy_within(longest + 1..self.count, longest);
        self.count -= 1;
        step
    }
}

/// The library's calls that make up a product.
struct Tasks<'a> {
    product: MatMulCall<'a>,
    sizes: ProductSizes,
    lies: [Lie; 2],
    /// The library's batches, and the dimensions that are walked here.
    batch: BatchStep,
    steps: Steps,
    /// The workspace's address and bytes.
    workspace: (u64, usize),
}

impl<'a> Tasks<'a> {
    fn of(product: &MatMulCall<'a>, scratch: u64, workspace: usize) -> Self {
        let MatMulCall { a, b, c, .. } = *product;
        let mut sizes = ProductSizes::of(a, c);
        let mut left = Lie::of(&a.layout).expect("lies as the library wants, or was copied");
        let right = Lie::of(&b.layout).expect("lies as the library wants, or was copied");
        let mut steps = Steps::of(a, b, &sizes);
        // Many rows against one matrix are one product.
        if let [only] = *steps.as_slice()
            && only.b == 0
            && !left.transposed
            && (only.a == sizes.m as i64 * left.line || (sizes.m == 1 && only.a >= sizes.k as i64))
            && sizes.m * only.count <= i32::MAX as usize
        {
            left.line = if sizes.m == 1 { only.a } else { left.line };
            sizes.m *= only.count;
            steps.count = 0;
        }
        let batch = steps.take_longest();
        Self {
            product: *product,
            sizes,
            lies: [left, right],
            batch,
            steps,
            workspace: (scratch, workspace),
        }
    }

    /// Calls `f` with one task after the other while it says true; whether it always did.
    fn all(&self, mut f: impl FnMut(&LtTask) -> Result<bool>) -> Result<bool> {
        let turns: usize = self
            .steps
            .as_slice()
            .iter()
            .map(|step| step.count)
            .product();
        for turn in 0..turns {
            for start in (0..self.batch.count).step_by(lt::MOST_BATCHES) {
                if !f(&self.task(turn, start))? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The batches from `start` on, at a place in the other dimensions.
    fn task(&self, turn: usize, start: usize) -> LtTask {
        let MatMulCall {
            a,
            b,
            c,
            bias,
            alpha,
            beta,
        } = self.product;
        let (batch, mut rest, mut at) = (self.batch, turn, [0; 3]);
        for step in self.steps.as_slice() {
            let i = (rest % step.count) as i64;
            rest /= step.count;
            at = [at[0] + i * step.a, at[1] + i * step.b, at[2] + i * step.c];
        }
        let batches = lt::MOST_BATCHES.min(batch.count - start);
        let place = |view: &View, offset: i64, step: i64| {
            view.ptr
                .wrapping_add_signed((offset + start as i64 * step) * view.dtype.size() as i64)
        };
        let ProductSizes { m, n, k, .. } = self.sizes;
        LtTask::new(
            lt::ProductShape {
                m,
                n,
                k,
                batches,
                steps: [batch.a, batch.b, batch.c],
            },
            lt::Side {
                ptr: place(a, at[0], batch.a),
                lie: self.lies[0],
            },
            lt::Side {
                ptr: place(b, at[1], batch.b),
                lie: self.lies[1],
            },
            (a.dtype, c.dtype, place(c, at[2], batch.c)),
            bias.map(|bias| bias.ptr),
            [alpha, beta],
            self.workspace,
        )
    }
}

#[cfg(test)]
mod tests;
