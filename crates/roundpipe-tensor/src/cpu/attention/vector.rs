//! Vector registers by name, for the one loop where the compiler must not choose.

use super::level::AttentionAcc;

/// A register of lanes.
pub(super) trait Vector<T>: Copy {
    /// How many lanes.
    const LANES: usize;

    /// All lanes 0.
    ///
    /// # Safety
    /// The processor has the register; this holds for all functions here.
    unsafe fn zero() -> Self;

    /// # Safety
    /// `LANES` elements are readable at `from`.
    unsafe fn load(from: *const T) -> Self;

    /// # Safety
    /// `LANES` elements are writable at `to`.
    unsafe fn store(self, to: *mut T);

    /// Lane by lane `x · other + self`.
    ///
    /// # Safety
    /// See [`Vector::zero`].
    unsafe fn add_product(self, x: T, other: Self) -> Self;

    /// Lane by lane.
    ///
    /// # Safety
    /// See [`Vector::zero`].
    unsafe fn add(self, other: Self) -> Self;
}

/// Four lanes that the compiler puts where it likes.
#[derive(Clone, Copy)]
pub(super) struct Quad<T>([T; 4]);

impl<T: AttentionAcc> Vector<T> for Quad<T> {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([T::ZERO; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller's promise; an array is aligned like its elements.
        Self(unsafe { *from.cast() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: as above.
        unsafe { *to.cast() = self.0 }
    }

    #[inline(always)]
    unsafe fn add_product(mut self, x: T, other: Self) -> Self {
        for i in 0..4 {
            // Every aarch64 processor has multiply-add; here, others have not.
            self.0[i] = T::mul_add::<{ cfg!(target_arch = "aarch64") }>(x, other.0[i], self.0[i]);
        }
        self
    }

    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        for i in 0..4 {
            self.0[i] += other.0[i];
        }
        self
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! register {
    ($v:ident of $t:ident x $lanes:literal: $zero:ident $load:ident $store:ident $splat:ident $fma:ident $add:ident) => {
        impl Vector<$t> for std::arch::x86_64::$v {
            const LANES: usize = $lanes;

            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the processor has the register.
                unsafe { std::arch::x86_64::$zero() }
            }

            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                // SAFETY: as above; the elements are readable, at any alignment.
                unsafe { std::arch::x86_64::$load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                // SAFETY: as above; the elements are writable, at any alignment.
                unsafe { std::arch::x86_64::$store(to, self) }
            }

            #[inline(always)]
            unsafe fn add_product(self, x: $t, other: Self) -> Self {
                use std::arch::x86_64::{$fma, $splat};
                // SAFETY: the processor has the register and multiply-add.
                unsafe { $fma($splat(x), other, self) }
            }

            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the processor has the register.
                unsafe { std::arch::x86_64::$add(self, other) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod registers {
    use super::Vector;
    register!(__m512 of f32 x 16: _mm512_setzero_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_set1_ps _mm512_fmadd_ps _mm512_add_ps);
    register!(__m512d of f64 x 8: _mm512_setzero_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_set1_pd _mm512_fmadd_pd _mm512_add_pd);
    register!(__m256 of f32 x 8: _mm256_setzero_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_set1_ps _mm256_fmadd_ps _mm256_add_ps);
    register!(__m256d of f64 x 4: _mm256_setzero_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_set1_pd _mm256_fmadd_pd _mm256_add_pd);
}
