//! The element types of products, what they are summed in, and the kernels each has.

use std::ops::{Add, Mul};

use half::{bf16, f16};

use super::isa::Isa;
use super::pack::Lines;
use super::{cast, portable};

#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};

/// What products are summed in: f64 for f64, f32 for the others.
pub(crate) trait Sum:
    Copy + Default + PartialEq + Add<Output = Self> + Mul<Output = Self> + Send + Sync + 'static
{
    /// Rounds a factor of the caller's.
    fn of(x: f64) -> Self;
}

impl Sum for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
}

impl Sum for f64 {
    fn of(x: f64) -> Self {
        x
    }
}

/// A type that sums `S` can be read from and rounded to.
pub(crate) trait SumTarget<S: Sum>: Copy + Send + Sync + 'static {
    /// Whether this is `S` itself, so that sums can be kept in place.
    const IS_SUM: bool = false;

    /// `dst[..n] = src[..n]`.
    ///
    /// # Safety
    /// Both ranges exist and do not overlap; the machine runs `isa`.
    unsafe fn widen(isa: Isa, src: *const Self, dst: *mut S, n: usize);

    /// `dst[..n] = src[..n]`, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// As for [`SumTarget::widen`].
    unsafe fn narrow(isa: Isa, src: *const S, dst: *mut Self, n: usize);
}

/// A type of operands.
pub(crate) trait GemmElement: SumTarget<Self::Sum> {
    /// What its products are summed in.
    type Sum: Sum + SumTarget<Self::Sum>;

    /// The kernel for `isa`.
    fn kernel(isa: Isa) -> &'static PanelKernel<Self>;
}

/// The part of the output that one call of a kernel adds to or replaces.
pub(crate) struct Dest<S> {
    pub ptr: *mut S,
    /// Elements from a row to the next.
    pub row: isize,
    /// 1 to the kernel's `mr`.
    pub rows: usize,
    /// 1 to the kernel's `nr`.
    pub cols: usize,
    /// Factor of the product.
    pub alpha: S,
    /// Whether to add to what is there; if not, it is not read.
    pub add: bool,
}

/// How one instruction set multiplies panels of one element type.
///
/// Every element of the output is the sum over k in rising order, whatever `rows` and `cols` are.
pub(crate) struct PanelKernel<T: GemmElement> {
    /// Rows of a left panel.
    pub mr: usize,
    /// Columns of a right panel.
    pub nr: usize,
    /// Panels are as long as k rounded up to a multiple of this.
    pub round: usize,
    /// The most steps that are summed before the sum is added to the output.
    pub kc: usize,
    /// Bytes of one step of one lane in a panel.
    pub unit: usize,
    /// Packs up to `mr` rows. Writes `mr * unit` bytes for each step (rounded up).
    pub pack_a: unsafe fn(&Lines<T>, *mut u8),
    /// Packs up to `nr` columns, likewise.
    pub pack_b: unsafe fn(&Lines<T>, *mut u8),
    /// Multiplies panels of `k` steps: `multiply(k, a, b, dest)`.
    pub multiply: unsafe fn(usize, *const u8, *const u8, &Dest<T::Sum>),
    /// How a few rows are multiplied, where there is a better way than by panels.
    pub few: Option<FewRows<T>>,
    /// Called on a thread before a series of `multiply`, …
    pub enter: unsafe fn(),
    /// … and after it.
    pub leave: unsafe fn(),
}

/// How a few rows are multiplied by columns whose steps lie side by side, as the weights of a layer
/// do: each column is read once, where it lies, since packing it would cost more than multiplying.
///
/// The bits are those of [`PanelKernel::multiply`].
pub(crate) struct FewRows<T: GemmElement> {
    /// The most rows that this is for.
    pub rows: usize,
    /// Packs the rows: as [`PanelKernel::pack_a`], in a layout of its own that is no larger.
    pub pack: unsafe fn(&Lines<T>, *mut u8),
    /// Multiplies packed rows by up to `nr` columns: `multiply(columns, rows, dest)`.
    pub multiply: unsafe fn(&Lines<T>, *const u8, &Dest<T::Sum>),
}

/// For kernels that need no preparation.
pub(super) unsafe fn nothing() {}

impl SumTarget<f32> for f32 {
    const IS_SUM: bool = true;
    #[inline(always)]
    unsafe fn widen(_: Isa, src: *const f32, dst: *mut f32, n: usize) {
        // SAFETY: the caller's ranges exist and are apart.
        unsafe { src.copy_to_nonoverlapping(dst, n) }
    }
    #[inline(always)]
    unsafe fn narrow(_: Isa, src: *const f32, dst: *mut f32, n: usize) {
        // SAFETY: the caller's ranges exist and are apart.
        unsafe { src.copy_to_nonoverlapping(dst, n) }
    }
}

impl SumTarget<f64> for f64 {
    const IS_SUM: bool = true;
    #[inline(always)]
    unsafe fn widen(_: Isa, src: *const f64, dst: *mut f64, n: usize) {
        // SAFETY: the caller's ranges exist and are apart.
        unsafe { src.copy_to_nonoverlapping(dst, n) }
    }
    #[inline(always)]
    unsafe fn narrow(_: Isa, src: *const f64, dst: *mut f64, n: usize) {
        // SAFETY: the caller's ranges exist and are apart.
        unsafe { src.copy_to_nonoverlapping(dst, n) }
    }
}

impl SumTarget<f32> for bf16 {
    unsafe fn widen(isa: Isa, src: *const bf16, dst: *mut f32, n: usize) {
        // SAFETY: the caller's promises are the callee's.
        unsafe { cast::bf16_to_f32(isa, src, dst, n) }
    }
    unsafe fn narrow(isa: Isa, src: *const f32, dst: *mut bf16, n: usize) {
        // SAFETY: the caller's promises are the callee's.
        unsafe { cast::f32_to_bf16(isa, src, dst, n) }
    }
}

impl SumTarget<f32> for f16 {
    unsafe fn widen(isa: Isa, src: *const f16, dst: *mut f32, n: usize) {
        // SAFETY: the caller's promises are the callee's.
        unsafe { cast::f16_to_f32(isa, src, dst, n) }
    }
    unsafe fn narrow(isa: Isa, src: *const f32, dst: *mut f16, n: usize) {
        // SAFETY: the caller's promises are the callee's.
        unsafe { cast::f32_to_f16(isa, src, dst, n) }
    }
}

impl GemmElement for f32 {
    type Sum = f32;
    fn kernel(isa: Isa) -> &'static PanelKernel<f32> {
        match isa {
            Isa::Portable => &portable::F32,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::F32,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::F32,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &avx512::F32,
        }
    }
}

impl GemmElement for f64 {
    type Sum = f64;
    fn kernel(isa: Isa) -> &'static PanelKernel<f64> {
        match isa {
            Isa::Portable => &portable::F64,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::F64,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::F64,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &avx512::F64,
        }
    }
}

impl GemmElement for bf16 {
    type Sum = f32;
    fn kernel(isa: Isa) -> &'static PanelKernel<bf16> {
        match isa {
            Isa::Portable => &portable::BF16,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::BF16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::BF16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::BF16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &avx512::BF16_PAIRS,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &amx::BF16,
        }
    }
}

impl GemmElement for f16 {
    type Sum = f32;
    fn kernel(isa: Isa) -> &'static PanelKernel<f16> {
        match isa {
            Isa::Portable => &portable::F16,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::F16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::F16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &avx512::F16,
        }
    }
}
