//! The three types that elementwise arithmetic is done in, and the way to and from what memory
//! holds.

use half::{bf16, f16};

use super::super::simd::{Widen, vectorize};
use super::walk::{ReadOperand, WriteOperand};
use super::{BLOCK, Plain};
use crate::dtype::{DType, Element};

/// A truth value in memory: any byte reads as 0 or 1, anything but 0 is written as 1.
#[derive(Clone, Copy, Default)]
pub(super) struct Truth(u8);

/// What memory holds, seen from its stage `S`.
pub(super) trait StageCell<S>: Copy + Default {
    fn up(self) -> S;
    fn down(stage: S) -> Self;
}

macro_rules! cells {
    ($($t:ty, $s:ty, $x:ident => $up:expr, $down:expr;)*) => {$(
        impl StageCell<$s> for $t {
            #[inline(always)]
            fn up(self) -> $s {
                let $x = self;
                $up
            }
            #[inline(always)]
            fn down($x: $s) -> Self {
                $down
            }
        }
    )*};
}

cells! {
    bf16, f32, x => x.widen(), Widen::narrow(x);
    f16, f32, x => x.widen(), Widen::narrow(x);
    i32, i64, x => i64::from(x), x as i32;
    u32, i64, x => i64::from(x), x as u32;
    u8, i64, x => i64::from(x), x as u8;
    Truth, i64, x => i64::from(x.0 != 0), Truth(u8::from(x != 0));
}

vectorize! {
    fn widen<T: StageCell<S>, S: Copy>(from: &[T], to: &mut [S]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.up();
        }
    }
}

vectorize! {
    fn narrow<T: StageCell<S>, S: Copy>(from: &[S], to: &mut [T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::down(*from);
        }
    }
}

/// A type that arithmetic is done in.
pub(super) trait StageElement: Element + Plain {
    /// Whether this is the stage of `dtype`.
    fn stands_for(dtype: DType) -> bool;

    /// Copies elements of `src` from `start` on; `src` has a type of this stage.
    fn fetch(src: &ReadOperand, start: usize, out: &mut [Self]);

    /// Copies `values` to the elements of `dst` from `start` on; `dst` has a type of this stage.
    fn put(dst: &WriteOperand, start: usize, values: &[Self]);

    /// Elements of `src` from `start` on, lent or copied into `buf`; `src` has a type of this
    /// stage.
    fn read<'b>(src: &'b ReadOperand, start: usize, buf: &'b mut [Self]) -> &'b [Self] {
        if src.dtype() == Self::DTYPE
            && let Some(lent) = src.lend(start, buf.len())
        {
            return lent;
        }
        Self::fetch(src, start, buf);
        buf
    }

    /// Lets `fill` write the elements of `dst` from `start` on; `dst` has a type of this stage.
    fn write(dst: &WriteOperand, start: usize, buf: &mut [Self], fill: impl FnOnce(&mut [Self])) {
        if dst.dtype() == Self::DTYPE
            && let Some(place) = dst.lend(start, buf.len())
        {
            return fill(place);
        }
        fill(buf);
        Self::put(dst, start, buf);
    }

    fn from_f32(x: f32) -> Self;
    fn from_i64(x: i64) -> Self;
    fn is_zero(self) -> bool;
}

fn fetch_as<T: StageCell<S>, S: StageElement>(src: &ReadOperand, start: usize, out: &mut [S]) {
    if let Some(lent) = src.lend::<T>(start, out.len()) {
        return widen(lent, out);
    }
    let mut raw = [T::default(); BLOCK];
    let raw = &mut raw[..out.len()];
    src.gather(start, raw);
    widen(raw, out);
}

fn put_as<T: StageCell<S>, S: StageElement>(dst: &WriteOperand, start: usize, values: &[S]) {
    if let Some(place) = dst.lend::<T>(start, values.len()) {
        return narrow(values, place);
    }
    let mut raw = [T::default(); BLOCK];
    let raw = &mut raw[..values.len()];
    narrow(values, raw);
    dst.scatter(start, raw);
}

macro_rules! stage {
    ($s:ty, $own:ident, { $($dtype:ident => $t:ty),* }) => {
        impl StageElement for $s {
            fn stands_for(dtype: DType) -> bool {
                matches!(dtype, DType::$own $(| DType::$dtype)*)
            }

            fn fetch(src: &ReadOperand, start: usize, out: &mut [Self]) {
                match src.dtype() {
                    DType::$own => src.gather(start, out),
                    $(DType::$dtype => fetch_as::<$t, $s>(src, start, out),)*
                    other => unreachable!("{other} has another stage"),
                }
            }

            fn put(dst: &WriteOperand, start: usize, values: &[Self]) {
                match dst.dtype() {
                    DType::$own => dst.scatter(start, values),
                    $(DType::$dtype => put_as::<$t, $s>(dst, start, values),)*
                    other => unreachable!("{other} has another stage"),
                }
            }

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                x as $s
            }

            #[inline(always)]
            fn from_i64(x: i64) -> Self {
                x as $s
            }

            #[inline(always)]
            fn is_zero(self) -> bool {
                self == 0 as $s
            }
        }
    };
}

stage!(f64, F64, {});
stage!(f32, F32, { BF16 => bf16, F16 => f16 });
stage!(i64, I64, { I32 => i32, U32 => u32, U8 => u8, Bool => Truth });

vectorize! {
    fn from_f32<S: StageElement>(from: &[f32], to: &mut [S]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = S::from_f32(*from));
    }
}

vectorize! {
    fn from_f64<S: StageElement>(from: &[f64], to: &mut [S]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = S::from_f64(*from));
    }
}

vectorize! {
    fn from_i64<S: StageElement>(from: &[i64], to: &mut [S]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = S::from_i64(*from));
    }
}

/// Copies elements of `src` from `start` on, converted from whatever stage its type has. Floats
/// become integers by truncation, saturating; NaN becomes 0.
pub(super) fn fetch<S: StageElement>(src: &ReadOperand, start: usize, out: &mut [S]) {
    let (dtype, len) = (src.dtype(), out.len());
    if S::stands_for(dtype) {
        S::fetch(src, start, out);
    } else if f32::stands_for(dtype) {
        from_f32(f32::read(src, start, &mut [0.0; BLOCK][..len]), out);
    } else if f64::stands_for(dtype) {
        from_f64(f64::read(src, start, &mut [0.0; BLOCK][..len]), out);
    } else {
        from_i64(i64::read(src, start, &mut [0; BLOCK][..len]), out);
    }
}

/// As [`fetch`], lent where nothing needs converting.
pub(super) fn load<'b, S: StageElement>(
    src: &'b ReadOperand,
    start: usize,
    buf: &'b mut [S],
) -> &'b [S] {
    if S::stands_for(src.dtype()) {
        return S::read(src, start, buf);
    }
    fetch(src, start, buf);
    buf
}

/// Runs `$body` with `$s` standing for the stage of `$dtype`.
macro_rules! for_stage {
    ($dtype:expr, $s:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $s = f64;
                $body
            }
            $crate::dtype::DType::F32 | $crate::dtype::DType::BF16 | $crate::dtype::DType::F16 => {
                type $s = f32;
                $body
            }
            _ => {
                type $s = i64;
                $body
            }
        }
    };
}
pub(super) use for_stage;
