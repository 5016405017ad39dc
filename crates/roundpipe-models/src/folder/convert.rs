//! Elements of one type as elements of another, rounded once, to nearest, ties to even.
//!
//! Bytes of files stand at any alignment and are little-endian; parameters are aligned slices.
//! Every element is a function of its own place, so any number of threads gives the same bits.

use rayon::prelude::*;
use roundpipe::{Element, bf16, f16};

use crate::mxfp4;

/// Elements per task: enough to be worth a task, few enough to share among threads.
const SHARE: usize = 1 << 18;
/// Rows of the result that a transposing task writes: each read of them is one cache line.
const TILE: usize = 32;

/// A float type of files and parameters.
pub(super) trait Float: Element {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, out: &mut [u8]);
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    /// The nearest value to `x`, rounded once.
    fn nearest(x: f64) -> Self;
}

macro_rules! float {
    ($t:ty, $to:expr, $from:expr, $nearest:expr) => {
        impl Float for $t {
            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<$t>()];
                raw.copy_from_slice(bytes);
                <$t>::from_le_bytes(raw)
            }
            #[inline(always)]
            fn write(self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from(x)
            }
            #[inline(always)]
            fn nearest(x: f64) -> Self {
                $nearest(x)
            }
        }
    };
}
float!(f64, |x: f64| x as f32, f64::from, |x: f64| x);
float!(f32, |x: f32| x, |x: f32| x, |x: f64| x as f32);
float!(bf16, bf16::to_f32, bf16::from_f32, |x: f64| bf16::from_f32(
    to_odd(x)
));
float!(f16, f16::to_f32, f16::from_f32, |x: f64| f16::from_f32(
    to_odd(x)
));

/// `x` in f32, with the last bit set where `x` lies between two values: rounding the result again,
/// to a type at least two bits shorter, is then the same as rounding `x` itself.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || near.is_nan() {
        return near;
    }
    if near.is_infinite() {
        return f32::MAX.copysign(near);
    }
    // `x` lies between `near` and the value one step towards it; exactly one of the two is odd.
    let outwards = f64::from(near).abs() < x.abs();
    match (near.to_bits(), outwards) {
        (bits, _) if bits & 1 == 1 => near,
        (bits, true) => f32::from_bits(bits + 1),
        (bits, false) => f32::from_bits(bits - 1),
    }
}

/// One element, rounded at most once; bits stay as they are between equal types.
#[inline(always)]
fn cast<S: Float, D: Float>(x: S) -> D {
    if size_of::<S>() == 8 {
        D::nearest(x.to_f64())
    } else {
        D::from_f32(x.to_f32())
    }
}

#[inline(always)]
fn take<S: Float, D: Float>(bytes: &[u8]) -> D {
    if S::DTYPE == D::DTYPE {
        D::read(bytes)
    } else {
        cast::<S, D>(S::read(bytes))
    }
}

#[inline(always)]
fn put<S: Float, D: Float>(x: &S, out: &mut [u8]) {
    // Writing the source's own bits keeps every NaN as it is.
    if S::DTYPE == D::DTYPE {
        x.write(out)
    } else {
        cast::<S, D>(*x).write(out)
    }
}

/// Copies as many bytes as there are, with all threads: most of the time goes into bringing the
/// pages in.
pub(super) fn copy_bytes(src: &[u8], dst: &mut [u8]) {
    dst.par_chunks_mut(SHARE)
        .zip(src.par_chunks(SHARE))
        .for_each(|(dst, src)| dst.copy_from_slice(src));
}

/// Reads `dst.len()` elements of `src`.
pub(super) fn read_plain<S: Float, D: Float>(src: &[u8], dst: &mut [D]) {
    let tasks = dst
        .par_chunks_mut(SHARE)
        .zip(src.par_chunks(SHARE * size_of::<S>()));
    tasks.for_each(|(dst, src)| {
        for (d, s) in dst.iter_mut().zip(src.chunks_exact(size_of::<S>())) {
            *d = take::<S, D>(s);
        }
    });
}

/// Reads rows `first..` of a matrix [rows, cols] (as many as `src` holds) into `dst`, which is all
/// of [cols, rows].
pub(super) fn read_transposed<S: Float, D: Float>(
    src: &[u8],
    first: usize,
    cols: usize,
    dst: &mut [D],
) {
    let size = size_of::<S>();
    let rows = dst.len() / cols;
    dst.par_chunks_mut(TILE * rows)
        .enumerate()
        .for_each(|(tile, dst)| {
            let left = tile * TILE * size;
            for (r, line) in src.chunks_exact(cols * size).enumerate() {
                let line = line[left..].chunks_exact(size);
                for (dst, s) in dst.chunks_exact_mut(rows).zip(line) {
                    dst[first + r] = take::<S, D>(s);
                }
            }
        });
}

/// De-quantises groups of 16 bytes into 32 elements each.
pub(super) fn read_mxfp4<D: Float>(blocks: &[u8], scales: &[u8], dst: &mut [D]) {
    let groups = SHARE / mxfp4::GROUP;
    let src = blocks
        .par_chunks(groups * mxfp4::GROUP_BYTES)
        .zip(scales.par_chunks(groups));
    dst.par_chunks_mut(SHARE)
        .zip(src)
        .for_each(|(dst, (blocks, scales))| {
            let packed = blocks.chunks_exact(mxfp4::GROUP_BYTES).zip(scales);
            for (dst, (block, scale)) in dst.chunks_exact_mut(mxfp4::GROUP).zip(packed) {
                for (pair, byte) in dst.chunks_exact_mut(2).zip(block) {
                    let [low, high] = mxfp4::unpack(*byte, *scale);
                    pair[0] = D::from_f32(low);
                    pair[1] = D::from_f32(high);
                }
            }
        });
}

/// Writes elements of `src` into as many of `dst`.
pub(super) fn write_plain<S: Float, D: Float>(src: &[S], dst: &mut [u8]) {
    let size = size_of::<D>();
    dst.par_chunks_mut(SHARE * size)
        .zip(src.par_chunks(SHARE))
        .for_each(|(dst, src)| {
            for (d, s) in dst.chunks_exact_mut(size).zip(src) {
                put::<S, D>(s, d);
            }
        });
}

/// Writes rows `first..` of the transposed matrix, as many as `dst` holds; `src` is all of [cols,
/// rows].
pub(super) fn write_transposed<S: Float, D: Float>(
    src: &[S],
    first: usize,
    cols: usize,
    dst: &mut [u8],
) {
    let size = size_of::<D>();
    let rows = src.len() / cols;
    dst.par_chunks_mut(TILE * cols * size)
        .enumerate()
        .for_each(|(tile, dst)| {
            let left = first + tile * TILE;
            for (c, line) in src.chunks_exact(rows).enumerate() {
                for (dst, s) in dst.chunks_exact_mut(cols * size).zip(&line[left..]) {
                    put::<S, D>(s, &mut dst[c * size..][..size]);
                }
            }
        });
}

/// Calls a generic function with the Rust type of a float type; `None` for other types.
macro_rules! for_float {
    ($dtype:expr, |$t:ident| $body:expr) => {
        match $dtype {
            roundpipe::DType::F64 => Some({
                type $t = f64;
                $body
            }),
            roundpipe::DType::F32 => Some({
                type $t = f32;
                $body
            }),
            roundpipe::DType::BF16 => Some({
                type $t = roundpipe::bf16;
                $body
            }),
            roundpipe::DType::F16 => Some({
                type $t = roundpipe::f16;
                $body
            }),
            _ => None,
        }
    };
}
pub(super) use for_float;

#[cfg(test)]
mod tests {
    use super::{Float, cast, to_odd};
    use roundpipe::{bf16, f16};

    /// A value just above the middle of two bf16 values rounds up, although f32 would put it on the
    /// middle, from where ties go down to even.
    #[test]
    fn f64_is_rounded_once() {
        let middle = 1.0 + 1.0 / 256.0;
        for (x, want) in [
            (middle, 1.0),
            (middle + 1e-12, 1.0 + 1.0 / 128.0),
            (middle - 1e-12, 1.0),
            (1e300, f64::INFINITY),
            (1e-300, 0.0),
            (f64::INFINITY, f64::INFINITY),
        ] {
            for sign in [1.0, -1.0] {
                let got: bf16 = cast::<f64, bf16>(x * sign);
                assert_eq!(got.to_f64(), want * sign, "{x:e}");
            }
        }
        assert!(cast::<f64, bf16>(f64::NAN).is_nan() && to_odd(f64::NAN).is_nan());
        let middle = 1.0 + 1.0 / 2048.0;
        assert_eq!(f16::nearest(middle + 1e-12).to_f64(), 1.0 + 1.0 / 1024.0);
        assert_eq!(f16::nearest(middle).to_f64(), 1.0);
        assert_eq!(f16::nearest(1e-30).to_f64(), 0.0);
    }
}
