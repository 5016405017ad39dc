//! Weights in 8 and 4 bits: what codes and scales mean, and how values become codes.
//!
//! Two formats, both of frozen weights [.., out, in]:
//!
//! - [`Quantization::Int8`]: a signed byte per value and a factor (f32) per row; the factor is the
//!   row's largest magnitude / 127, codes are rounded to nearest even.
//! - [`Quantization::Nf4`], as bitsandbytes defines it: four bits per value, the earlier value in
//!   the high half of a byte; blocks of [`NF4_BLOCK`] values share their largest magnitude, which is
//!   itself kept as a byte (double quantisation): in blocks of [`NF4_NESTED`] magnitudes, less their
//!   mean over the whole matrix (the *offset*), by a book of 256 values. A stack of matrices is
//!   quantised matrix by matrix.
//!
//! A value widens in f32, every product and sum rounded by itself, and is rounded once to the type
//! that it is wanted in. So a widened weight is the same on every device.
//!
//! Nothing here allocates, starts threads or knows tensors: operations are in
//! [`ops`](crate::ops), kernels in the backends.
//!
//! # Invariants
//! - Codes are those of bitsandbytes' definition, bit for bit, given the same offset: the nearest
//!   value of the book, the lower of two. (Its cpu kernel takes a neighbour for magnitudes very
//!   close to the mean.) The offset is the mean in
//!   f64, rounded once; bitsandbytes adds in f32, in an order that depends on its device, so that its
//!   last bits may differ.
//! - A block of zeros widens to zeros. A value that is not finite makes NaN of its row, or
//!   of its matrix in NF4.

/// How weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// A signed byte per value, a factor per row.
    Int8,
    /// Four bits per value, as bitsandbytes' NF4 with double quantisation.
    Nf4,
}

impl Quantization {
    /// As options and settings have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Nf4 => "nf4",
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Int8, Self::Nf4]
            .into_iter()
            .find(|how| how.name() == name)
    }

    /// Whether a matrix of these sizes can be kept so: NF4 wants whole blocks.
    pub const fn takes(self, rows: usize, columns: usize) -> bool {
        match self {
            Self::Int8 => true,
            Self::Nf4 => (rows * columns).is_multiple_of(NF4_BLOCK) && columns.is_multiple_of(2),
        }
    }

    /// Bytes of a matrix of these sizes, codes and scales.
    pub const fn bytes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Int8 => rows * columns + 4 * rows,
            Self::Nf4 => {
                let blocks = rows * columns / NF4_BLOCK;
                rows * columns / 2 + blocks + 4 * nf4_nested(blocks)
            }
        }
    }
}

impl std::fmt::Display for Quantization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Values of NF4 that share a magnitude.
pub const NF4_BLOCK: usize = 64;
/// Magnitudes that share a factor.
pub const NF4_NESTED: usize = 256;
/// Values in the books of NF4: 16 for values, then 256 for magnitudes.
pub const NF4_BOOKS: usize = 16 + 256;

/// Values that the scales of a matrix with so many blocks take: its offset, then a factor per
/// [`NF4_NESTED`] magnitudes.
pub const fn nf4_nested(blocks: usize) -> usize {
    1 + blocks.div_ceil(NF4_NESTED)
}

/// What the 16 codes stand for: quantiles of a normal distribution.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The positive values of bitsandbytes' dynamic map, but the last, which is 1: a decimal exponent of
/// up to 6 and as many bits of a fraction as that leaves.
#[rustfmt::skip]
#[allow(clippy::unreadable_literal, reason = "a table of values as they are printed")]
const DYNAMIC: [f32; 127] = [
    5.5000004e-07, 3.2500002e-06, 7.75e-06, 2.1249998e-05, 4.375e-05, 6.625e-05, 8.875e-05,
    1.5625001e-04, 2.6875004e-04, 3.8125002e-04, 4.9375003e-04, 6.062501e-04, 7.1875006e-04,
    8.3125e-04, 9.437501e-04, 0.0012812499, 0.00184375, 0.00240625, 0.00296875, 0.0035312497,
    0.00409375, 0.0046562497, 0.0052187503, 0.00578125, 0.00634375, 0.00690625, 0.00746875,
    0.00803125, 0.00859375, 0.009156249, 0.00971875, 0.01140625, 0.01421875, 0.01703125,
    0.019843752, 0.02265625, 0.02546875, 0.028281251, 0.03109375, 0.03390625, 0.036718752,
    0.03953125, 0.042343747, 0.04515625, 0.04796875, 0.05078125, 0.05359375, 0.05640625,
    0.059218753, 0.06203125, 0.06484375, 0.067656256, 0.070468746, 0.07328125, 0.07609375,
    0.07890625, 0.08171876, 0.08453125, 0.08734375, 0.09015625, 0.092968754, 0.09578126,
    0.09859375, 0.107031256, 0.12109375, 0.13515624, 0.14921875, 0.16328125, 0.17734376,
    0.19140625, 0.20546874, 0.21953125, 0.23359375, 0.24765624, 0.26171875, 0.27578127,
    0.28984374, 0.30390626, 0.31796873, 0.33203125, 0.34609374, 0.36015624, 0.37421876,
    0.38828123, 0.40234375, 0.41640624, 0.43046874, 0.44453126, 0.45859373, 0.47265625,
    0.4867187, 0.50078124, 0.5148437, 0.5289062, 0.54296875, 0.5570313, 0.5710938, 0.58515626,
    0.5992187, 0.61328125, 0.6273438, 0.6414063, 0.65546876, 0.6695312, 0.68359375, 0.6976563,
    0.7117188, 0.72578126, 0.7398437, 0.75390625, 0.7679688, 0.78203124, 0.79609376, 0.8101562,
    0.82421875, 0.8382813, 0.85234374, 0.86640626, 0.8804687, 0.89453125, 0.9085938, 0.92265624,
    0.93671876, 0.9507812, 0.96484375, 0.9789063, 0.99296874,
];

/// The book of magnitudes, in order: negative values, 0, positive ones, 1.
const fn magnitudes() -> [f32; 256] {
    let mut book = [0.0; 256];
    let mut i = 0;
    while i < DYNAMIC.len() {
        book[126 - i] = -DYNAMIC[i];
        book[128 + i] = DYNAMIC[i];
        i += 1;
    }
    book[255] = 1.0;
    book
}

/// The books of NF4: what codes of values stand for, then those of magnitudes.
pub const fn nf4_books() -> [f32; NF4_BOOKS] {
    let (mut books, magnitudes) = ([0.0; NF4_BOOKS], magnitudes());
    let mut i = 0;
    while i < NF4_BOOKS {
        books[i] = if i < 16 { NF4[i] } else { magnitudes[i - 16] };
        i += 1;
    }
    books
}

/// The middles between neighbours of a sorted book.
const fn middles<const N: usize, const M: usize>(book: &[f32; N]) -> [f32; M] {
    let mut middles = [0.0; M];
    let mut i = 0;
    while i < M {
        middles[i] = (book[i] + book[i + 1]) / 2.0;
        i += 1;
    }
    middles
}

const NF4_MIDDLES: [f32; 15] = middles(&NF4);
const MAGNITUDE_MIDDLES: [f32; 255] = middles(&magnitudes());

/// The largest magnitude; NaN if one value is.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most: f32, x| {
        let x = x.abs();
        if x > most || x.is_nan() { x } else { most }
    })
}

/// What values are multiplied with to lie between -1 and 1.
fn to_unit(largest: f32) -> f32 {
    1.0 / largest.max(1e-38)
}

/// Quantises a row: its codes, as bytes of two's complement, and its factor.
///
/// # Panics
/// When there are not as many codes as values.
pub fn int8_row(values: &[f32], codes: &mut [u8]) -> f32 {
    assert_eq!(values.len(), codes.len(), "int8_row: one code per value");
    let most = largest(values);
    if !most.is_finite() {
        // 1 · NaN: what is not finite stays visible.
        codes.fill(1);
        return f32::NAN;
    }
    // As PyTorch divides a number by a tensor, which bitsandbytes does here.
    let up = if most > 0.0 {
        most.recip() * 127.0
    } else {
        0.0
    };
    for (code, x) in codes.iter_mut().zip(values) {
        // Tiny rows can reach an infinite factor; the clamp keeps their codes in range.
        let level = (x * up).round_ties_even().clamp(-127.0, 127.0);
        *code = (level as i8).cast_unsigned();
    }
    most / 127.0
}

/// Quantises blocks of [`NF4_BLOCK`] values: two codes per byte, and a magnitude per block.
///
/// # Panics
/// When the lengths are not those.
pub fn nf4_blocks(values: &[f32], codes: &mut [u8], magnitudes: &mut [f32]) {
    assert_eq!(values.len(), magnitudes.len() * NF4_BLOCK, "nf4: blocks");
    assert_eq!(values.len(), codes.len() * 2, "nf4: two codes per byte");
    let blocks = values
        .chunks_exact(NF4_BLOCK)
        .zip(codes.chunks_exact_mut(NF4_BLOCK / 2));
    for ((values, codes), magnitude) in blocks.zip(magnitudes) {
        *magnitude = largest(values);
        let up = to_unit(*magnitude);
        // One pass per middle over the block: the loop has no branch.
        let mut levels = [0u8; NF4_BLOCK];
        for middle in NF4_MIDDLES {
            for (level, x) in levels.iter_mut().zip(values) {
                *level += u8::from(x * up > middle);
            }
        }
        for (code, pair) in codes.iter_mut().zip(levels.chunks_exact(2)) {
            *code = pair[0] << 4 | pair[1];
        }
    }
}

/// Quantises the magnitudes of a matrix: a code each, and the offset and factors of
/// [`nf4_nested`].
///
/// # Panics
/// When the lengths are not those.
pub fn nf4_magnitudes(magnitudes: &[f32], codes: &mut [u8], nested: &mut [f32]) {
    assert_eq!(magnitudes.len(), codes.len(), "nf4: one code per magnitude");
    assert_eq!(nested.len(), nf4_nested(magnitudes.len()), "nf4: factors");
    let sum: f64 = magnitudes.iter().map(|x| f64::from(*x)).sum();
    let offset = (sum / magnitudes.len().max(1) as f64) as f32;
    nested[0] = offset;
    let blocks = magnitudes
        .chunks(NF4_NESTED)
        .zip(codes.chunks_mut(NF4_NESTED));
    for ((magnitudes, codes), factor) in blocks.zip(&mut nested[1..]) {
        let mut centred = [0.0; NF4_NESTED];
        let centred = &mut centred[..magnitudes.len()];
        centred
            .iter_mut()
            .zip(magnitudes)
            .for_each(|(c, x)| *c = x - offset);
        *factor = largest(centred);
        let up = to_unit(*factor);
        for (code, x) in codes.iter_mut().zip(centred) {
            let unit = *x * up;
            *code = MAGNITUDE_MIDDLES.partition_point(|middle| *middle < unit) as u8;
        }
    }
}

/// The value of an int8 code.
#[inline(always)]
pub fn int8_value(code: u8, factor: f32) -> f32 {
    f32::from(code.cast_signed()) * factor
}

/// The magnitude of a block of NF4 from its code.
#[inline(always)]
pub fn nf4_magnitude(code: u8, factor: f32, offset: f32, books: &[f32]) -> f32 {
    books[16 + usize::from(code)] * factor + offset
}
