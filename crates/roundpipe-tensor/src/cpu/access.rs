//! How cpu kernels reach their operands: typed slices, shared output pointers, arithmetic types.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::threads::Threads;
use crate::device::{DeviceId, DeviceKind};
use crate::dtype::{DType, Element};
use crate::error::Error;
use crate::kernel::{HostView, HostViewMut, Kernel, View};

/// One launch: the kernel with its operands and the threads to run it on.
pub(crate) struct Call<'a> {
    pub threads: &'a Threads,
    pub kernel: &'a Kernel,
    pub src: &'a [Option<View>],
    pub dst: &'a [Option<View>],
    pub scratch: Option<View>,
}

impl Call<'_> {
    /// Source `i`, which the kernel's description says is there.
    pub fn src(&self, i: usize) -> &View {
        self.src[i]
            .as_ref()
            .unwrap_or_else(|| panic!("{:?}: source {i} is missing", self.kernel))
    }

    /// Source `i` if it was given.
    pub fn src_opt(&self, i: usize) -> Option<&View> {
        self.src.get(i).and_then(Option::as_ref)
    }

    /// Destination `i`, which the kernel's description says is there.
    pub fn dst(&self, i: usize) -> &View {
        self.dst[i]
            .as_ref()
            .unwrap_or_else(|| panic!("{:?}: destination {i} is missing", self.kernel))
    }

    /// Destination `i` if it was given.
    pub fn dst_opt(&self, i: usize) -> Option<&View> {
        self.dst.get(i).and_then(Option::as_ref)
    }

    /// The error for a type this kernel has no code for.
    pub fn unsupported(&self) -> Error {
        let first = self.src.iter().chain(self.dst).flatten().next();
        Error::Unsupported {
            device: DeviceId {
                kind: DeviceKind::Cpu,
                index: 0,
                worker: 0,
            },
            op: self.kernel.name(),
            dtype: first.map_or(DType::F32, |v| v.dtype),
        }
    }

    /// Runs `body(start, end)` over `0..count` in pieces of `grain`, which must depend on sizes
    /// alone.
    pub fn pieces(&self, count: usize, grain: usize, body: impl Fn(usize, usize) + Sync + Send) {
        let grain = grain.max(1);
        self.threads.run(count.div_ceil(grain), |i| {
            body(i * grain, ((i + 1) * grain).min(count))
        });
    }
}

/// A float type that tensors hold, with the type its arithmetic is done in.
pub(crate) trait Float: Element {
    /// f32, or f64 for f64.
    type Acc: Real;
    /// Widens.
    fn up(self) -> Self::Acc;
    /// Rounds to nearest even.
    fn down(acc: Self::Acc) -> Self;
}

/// A type that arithmetic is done in.
pub(crate) trait Real:
    Float<Acc = Self>
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::MulAssign
    + std::iter::Sum
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INF: Self;
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn abs(self) -> Self;
    /// The larger; NaN if either is.
    fn max_nan(self, other: Self) -> Self;
}

macro_rules! real {
    ($t:ty) => {
        impl Float for $t {
            type Acc = $t;
            #[inline(always)]
            fn up(self) -> $t {
                self
            }
            #[inline(always)]
            fn down(acc: $t) -> $t {
                acc
            }
        }
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INF: Self = <$t>::NEG_INFINITY;
            #[inline(always)]
            fn of(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                super::simd::Math::exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                super::simd::Math::tanh(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            #[inline(always)]
            fn max_nan(self, other: Self) -> Self {
                if self > other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
        }
    };
}

real!(f32);
real!(f64);

macro_rules! narrow {
    ($t:ty) => {
        impl Float for $t {
            type Acc = f32;
            #[inline(always)]
            fn up(self) -> f32 {
                super::simd::Widen::widen(self)
            }
            #[inline(always)]
            fn down(acc: f32) -> $t {
                super::simd::Widen::narrow(acc)
            }
        }
    };
}

narrow!(bf16);
narrow!(f16);

/// Runs `$body` with `$t` standing for the float type of `$dtype`; other types give the call's
/// error.
macro_rules! for_float {
    ($call:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $t = f64;
                $body
            }
            $crate::dtype::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $t = half::f16;
                $body
            }
            _ => return Err($call.unsupported()),
        }
    };
}
pub(crate) use for_float;

/// The elements of a dense view.
///
/// # Safety
/// The view lies in live memory, is contiguous, holds `T`, and nothing writes it while the slice
/// lives.
pub(crate) unsafe fn slice<'a, T: Element>(view: &View) -> &'a [T] {
    debug_assert!(view.layout.is_contiguous() && view.dtype.size() == size_of::<T>());
    if view.numel() == 0 {
        return &[];
    }
    // SAFETY: promised by the caller; blocks are aligned to 256 bytes and views start at whole
    // elements.
    unsafe { std::slice::from_raw_parts(view.ptr as *const T, view.numel()) }
}

/// The elements of a dense view, for writing by one task.
///
/// # Safety
/// As [`slice`], and nothing else reads or writes it while the slice lives.
pub(crate) unsafe fn slice_mut<'a, T: Element>(view: &View) -> &'a mut [T] {
    debug_assert!(view.layout.is_contiguous() && view.dtype.size() == size_of::<T>());
    if view.numel() == 0 {
        return &mut [];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(view.ptr as *mut T, view.numel()) }
}

/// One cache line, so that memory made of it is aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CacheLine(pub [u8; 64]);

/// A dense destination that tasks write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a `SharedSlice` only gives out parts through `part`, whose caller promises that they are
// disjoint.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Over a slice that only the holders of this value touch.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            life: PhantomData,
        }
    }

    /// Elements `start..end`.
    ///
    /// # Safety
    /// No two live parts overlap.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn part(&self, start: usize, end: usize) -> &'a mut [T] {
        assert!(
            start <= end && end <= self.len,
            "part {start}..{end} of {}",
            self.len
        );
        // SAFETY: in bounds by the assertion; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), end - start) }
    }
}

/// A user kernel's source.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn host_view<'a>(view: &View) -> HostView<'a> {
    let bytes = view.numel() * view.dtype.size();
    // SAFETY: promised by the caller; a view of no elements gives an empty slice at an aligned
    // address.
    let bytes = unsafe { std::slice::from_raw_parts(view.ptr.max(1) as *const u8, bytes) };
    HostView {
        bytes,
        dtype: view.dtype,
        shape: *view.shape(),
    }
}

/// A user kernel's destination.
///
/// # Safety
/// As [`slice_mut`].
pub(crate) unsafe fn host_view_mut<'a>(view: &View) -> HostViewMut<'a> {
    let bytes = view.numel() * view.dtype.size();
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts_mut(view.ptr.max(1) as *mut u8, bytes) };
    HostViewMut {
        bytes,
        dtype: view.dtype,
        shape: *view.shape(),
    }
}
