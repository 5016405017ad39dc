//! Element types of tensors and the Rust types that stand for them.

use std::fmt;

use half::{bf16, f16};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 64-bit float: for gradient checks and other exact references; no fused fast paths.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit float with f32's range.
    BF16,
    /// IEEE 16-bit float.
    F16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// 8-bit unsigned integer.
    U8,
    /// Truth value, one byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [Self; 9] = [
        Self::F64,
        Self::F32,
        Self::BF16,
        Self::F16,
        Self::I64,
        Self::I32,
        Self::U32,
        Self::U8,
        Self::Bool,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether gradients exist for this type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::BF16 | Self::F16)
    }

    /// The type in which sums, statistics and parameter gradients of this type are kept:
    /// f64 for f64, f32 for the other floats, the type itself otherwise.
    pub const fn accumulator(self) -> Self {
        match self {
            Self::BF16 | Self::F16 => Self::F32,
            other => other,
        }
    }

    /// The short name used in errors and printed tensors.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::U8 => "u8",
            Self::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type whose bytes can be a tensor's element. Every bit pattern is a valid value, which is
/// why `bool` is not here: bool tensors are read and written as `u8`.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + fmt::Debug + PartialEq + 'static
{
    /// The tensor type this stands for.
    const DTYPE: DType;

    /// The value as f64 (integers beyond 2^53 round).
    fn to_f64(self) -> f64;

    /// The nearest value to `x`; integers truncate towards zero and saturate.
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
            #[inline(always)]
            fn from_f64(x: f64) -> Self { x as $t }
        }
    )*};
}

macro_rules! half_element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline(always)]
            fn to_f64(self) -> f64 { <$t>::to_f64(self) }
            #[inline(always)]
            fn from_f64(x: f64) -> Self { <$t>::from_f64(x) }
        }
    )*};
}

element!(f64 => F64, f32 => F32, i64 => I64, i32 => I32, u32 => U32, u8 => U8);
half_element!(bf16 => BF16, f16 => F16);
