//! Moments in fewer bits than f32: bf16 rounded at random, and 8 bits by blocks.
//!
//! A pass computes in f32 whatever the moments are kept in: a piece of them is widened, updated and
//! narrowed again while it is in a core's cache.
//!
//! **bf16.** A moment moves by less than bf16 resolves: with a decay of 0.999 a second moment that is
//! rounded to nearest stands still. Rounded up with the probability of the part that is lost, it is
//! right on average. The random bits are those of a key and an element's number ([`round_randomly`]).
//!
//! **8 bits.** The dynamic quantisation by blocks of Dettmers et al., "8-bit Optimizers via
//! Block-wise Quantization" (2022), as bitsandbytes has it: blocks of 256 elements share the largest
//! magnitude as their scale, and a code stands for one of 256 values between -1 (or 0) and 1 that are
//! close together near 0 ([`DynamicMap`]). The nearest one is taken, the lower of two.
//!
//! Refused: slabs of different lengths.
//!
//! # Invariants
//! - What is finite stays finite, and a zero stays a zero.
//! - The same bits for any number of threads and however a slab is cut, at whole blocks.

use std::sync::LazyLock;

use half::bf16;

use super::simd::{LANES, PassIsa, Simd, SlabPass};
use super::{CHUNK, check_len, for_each};
use crate::cpu::threads::Threads;
use crate::error::Result;
use crate::rng::RngKey;

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// In what moments are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MomentType {
    /// 4 bytes, exact.
    #[default]
    F32,
    /// 2 bytes, rounded at random, right on average.
    Bf16,
    /// One byte, and four per block of 256: dynamic quantisation by blocks. Small parameters and
    /// embeddings stay f32.
    Bits8,
}

impl std::fmt::Display for MomentType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bits8 => "8bit",
        })
    }
}

/// Scales of `len` elements.
pub fn scale_count(len: usize) -> usize {
    len.div_ceil(BLOCK)
}

/// The values that codes stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DynamicMap {
    /// From -0.993 to 1: first moments.
    Signed,
    /// From 0 to 1: second moments.
    Unsigned,
}

/// The values of a map, and where to look for one.
struct Table {
    /// In ascending order.
    values: [f32; 256],
    /// By the upper bits of a number's pattern, in the upper half the code nearest to the number of
    /// least magnitude in the bin, in the lower half the lower bits of the last number in the bin with
    /// that code. All others have the next code away from 0.
    bins: Box<[u32; 2 * SIDE]>,
    zero: u8,
}

/// Magnitudes below 2^-23 are nearest to 0 in both maps.
const LEAST_EXPONENT: u32 = 127 - 23;
/// A bin has numbers of the same upper 16 bits: so few that it holds no more than two nearest codes.
/// The first bin has all that is smaller than those.
const FIRST_BIN: u32 = (LEAST_EXPONENT << 7) - 1;
/// The last has 1, the largest number there is.
const LAST_BIN: u32 = 127 << 7;
/// Places of the bins of one sign; a power of two, so that no place is out of bounds.
const SIDE: usize = 1 << 12;

impl DynamicMap {
    /// The 256 values, in ascending order.
    pub fn values(self) -> &'static [f32; 256] {
        &self.table().values
    }

    fn table(self) -> &'static Table {
        static SIGNED: LazyLock<Table> = LazyLock::new(|| Table::new(true));
        static UNSIGNED: LazyLock<Table> = LazyLock::new(|| Table::new(false));
        match self {
            Self::Signed => &SIGNED,
            Self::Unsigned => &UNSIGNED,
        }
    }
}

impl Table {
    fn new(is_signed: bool) -> Self {
        let values = dynamic_values(is_signed);
        let zero = values.partition_point(|value| *value < 0.0) as u8;
        let mut bins = Box::new([u32::from(zero) << 16 | 0xffff; 2 * SIDE]);
        for (side, sign) in [0, 1 << 31].into_iter().enumerate() {
            for bin in FIRST_BIN + 1..=LAST_BIN {
                let place = side * SIDE + (bin - FIRST_BIN) as usize;
                bins[place] = bin_of(&values, sign | bin << 16);
            }
        }
        Self { values, bins, zero }
    }

    /// The code of a number between -1 and 1.
    #[inline(always)]
    fn code(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let is_negative = bits >> 31;
        let bin = (magnitude >> 16).clamp(FIRST_BIN, LAST_BIN) - FIRST_BIN;
        let place = (bin + is_negative * SIDE as u32) as usize % (2 * SIDE);
        let entry = self.bins[place];
        let is_next = u32::from(magnitude & 0xffff > entry & 0xffff);
        let code = entry >> 16;
        (if is_negative == 1 {
            code.wrapping_sub(is_next)
        } else {
            code + is_next
        }) as u8
    }

    #[inline(always)]
    fn at(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }
}

/// The entry of a bin; `first` is the pattern of its number of least magnitude.
fn bin_of(values: &[f32; 256], first: u32) -> u32 {
    let code_at = |low: u32| nearest(values, f32::from_bits(first | low));
    let code = code_at(0);
    let (mut last, mut beyond) = (0, 0x1_0000);
    while beyond - last > 1 {
        let middle = (last + beyond) / 2;
        if code_at(middle) == code {
            last = middle;
        } else {
            beyond = middle;
        }
    }
    u32::from(code) << 16 | last
}

/// The values of bitsandbytes' `create_dynamic_map`: seven decades, each with twice as many values as
/// the one below, in the middles of equal parts; 0 and 1.
fn dynamic_values(is_signed: bool) -> [f32; 256] {
    const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut all = vec![0.0, 1.0];
    for (i, decade) in DECADES.into_iter().enumerate() {
        let parts = 1usize << (i + usize::from(!is_signed));
        let bounds: Vec<f32> = (0..=parts).map(|at| bound(at, parts)).collect();
        for pair in bounds.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            all.push(decade * middle);
            if is_signed {
                all.push(-decade * middle);
            }
        }
    }
    all.sort_by(f32::total_cmp);
    let mut values = [0.0; 256];
    values.copy_from_slice(&all);
    values
}

/// Number `at` of `parts + 1` from 0.1 to 1, as `torch.linspace` computes it: from the nearer end,
/// rounded once.
fn bound(at: usize, parts: usize) -> f32 {
    let step = f64::from((1.0 - 0.1f32) / parts as f32);
    let value = if at < parts.div_ceil(2) {
        f64::from(0.1f32) + step * at as f64
    } else {
        1.0 - step * (parts - at) as f64
    };
    value as f32
}

/// The code of the value nearest to `x`, the lower one of two.
fn nearest(values: &[f32; 256], x: f32) -> u8 {
    let above = values.partition_point(|value| *value <= x).min(255);
    let below = above.saturating_sub(1);
    let is_nearer = values[above] - x < x - values[below];
    (if is_nearer { above } else { below }) as u8
}

/// Writes the codes of `values` and the scale of each block.
///
/// # Errors
/// When the slabs differ in length.
pub fn quantize(
    threads: &Threads,
    map: DynamicMap,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<()> {
    check_len("quantize", "code", codes.len(), values.len())?;
    check_len("quantize", "scale", scales.len(), scale_count(values.len()))?;
    let chunks = values
        .chunks(CHUNK)
        .zip(codes.chunks_mut(CHUNK))
        .zip(scales.chunks_mut(CHUNK / BLOCK));
    let isa = PassIsa::best();
    for_each(threads, chunks, |((values, codes), scales)| {
        isa.run(QuantizePass {
            table: map.table(),
            values,
            codes,
            scales,
        });
    });
    Ok(())
}

/// One chunk of values that become codes.
struct QuantizePass<'a> {
    table: &'a Table,
    values: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl SlabPass for QuantizePass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let blocks = self.values.chunks(BLOCK).zip(self.codes.chunks_mut(BLOCK));
        for ((values, codes), scale) in blocks.zip(self.scales) {
            *scale = quantize_block(self.table, values, codes);
        }
    }
}

/// Writes the codes of a block; its scale.
#[inline(always)]
fn quantize_block(table: &Table, values: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest_magnitude(values);
    if scale == 0.0 {
        codes.fill(table.zero);
        return 0.0;
    }
    let factor = 1.0 / scale;
    // The inverse of a magnitude below 2^-126 may be no f32.
    if factor.is_finite() {
        write_codes(table, values, codes, |value| value * factor);
    } else {
        write_codes(table, values, codes, |value| value / scale);
    }
    scale
}

/// Writes the codes of values, each scaled to between -1 and 1.
#[inline(always)]
fn write_codes(table: &Table, values: &[f32], codes: &mut [u8], scaled: impl Fn(f32) -> f32) {
    let (values, values_rest) = values.as_chunks::<LANES>();
    let (codes, codes_rest) = codes.as_chunks_mut::<LANES>();
    for (values, codes) in values.iter().zip(codes) {
        // To memory of their own first: the compiler does not know that codes are no table.
        let mut new = [0; LANES];
        for (value, code) in values.iter().zip(&mut new) {
            *code = table.code(scaled(*value).clamp(-1.0, 1.0));
        }
        *codes = new;
    }
    for (value, code) in values_rest.iter().zip(codes_rest) {
        *code = table.code(scaled(*value).clamp(-1.0, 1.0));
    }
}

#[inline(always)]
fn largest_magnitude(values: &[f32]) -> f32 {
    // By lanes, which the compiler cannot do by itself: it would be another order.
    let mut most = [0.0f32; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for (most, value) in most.iter_mut().zip(values) {
            let magnitude = value.abs();
            *most = if magnitude > *most { magnitude } else { *most };
        }
    }
    let all = most.iter().chain(rest);
    all.fold(0.0, |most, value| most.max(value.abs()))
}

/// Writes the values of codes.
///
/// # Errors
/// When the slabs differ in length.
pub fn dequantize(
    threads: &Threads,
    map: DynamicMap,
    codes: &[u8],
    scales: &[f32],
    values: &mut [f32],
) -> Result<()> {
    check_len("dequantize", "code", codes.len(), values.len())?;
    check_len(
        "dequantize",
        "scale",
        scales.len(),
        scale_count(values.len()),
    )?;
    let chunks = codes
        .chunks(CHUNK)
        .zip(scales.chunks(CHUNK / BLOCK))
        .zip(values.chunks_mut(CHUNK));
    let isa = PassIsa::best();
    for_each(threads, chunks, |((codes, scales), values)| {
        isa.run(DequantizePass {
            table: map.table(),
            codes,
            scales,
            values,
        });
    });
    Ok(())
}

/// One chunk of codes that become values.
struct DequantizePass<'a> {
    table: &'a Table,
    codes: &'a [u8],
    scales: &'a [f32],
    values: &'a mut [f32],
}

impl SlabPass for DequantizePass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let blocks = self.codes.chunks(BLOCK).zip(self.values.chunks_mut(BLOCK));
        for ((codes, values), scale) in blocks.zip(self.scales) {
            for (code, value) in codes.iter().zip(values) {
                *value = self.table.at(*code) * scale;
            }
        }
    }
}

/// Writes `src` to `dst`, each element rounded to one of its two neighbours in bf16, the nearer one
/// more often: on average nothing is lost. A value that bf16 has stays as it is, and a finite one
/// stays finite. `first` is the number of the first element in the stream of `key`.
///
/// # Errors
/// When the slabs differ in length.
pub fn round_randomly(
    threads: &Threads,
    key: RngKey,
    first: u64,
    src: &[f32],
    dst: &mut [bf16],
) -> Result<()> {
    check_len("round_randomly", "source", src.len(), dst.len())?;
    let chunks = src.chunks(CHUNK).zip(dst.chunks_mut(CHUNK)).enumerate();
    for_each(threads, chunks, |(chunk, (src, dst))| {
        let first = first + (chunk * CHUNK) as u64;
        let eights = src.chunks(8).zip(dst.chunks_mut(8)).enumerate();
        for (i, (src, dst)) in eights {
            let at = first + 8 * i as u64;
            let words = key.block(at / 8);
            for (j, (src, dst)) in src.iter().zip(dst).enumerate() {
                let word = words[j / 2];
                let random = if j % 2 == 0 {
                    word & 0xffff
                } else {
                    word >> 16
                };
                *dst = round_with(*src, random);
            }
        }
    });
    Ok(())
}

/// One element with 16 random bits.
#[inline(always)]
pub(super) fn round_with(x: f32, random: u32) -> bf16 {
    let bits = x.to_bits();
    if !x.is_finite() {
        return bf16::from_f32(x);
    }
    let up = (bits + random) >> 16;
    // The largest numbers would round to an infinity.
    let is_infinite = up & 0x7fff == 0x7f80;
    bf16::from_bits(if is_infinite { bits >> 16 } else { up } as u16)
}

#[cfg(test)]
mod tests {
    use super::{
        BLOCK, DynamicMap, Threads, bf16, dequantize, nearest, quantize, round_randomly,
        scale_count,
    };
    use crate::rng::RngSite;

    const MAPS: [DynamicMap; 2] = [DynamicMap::Signed, DynamicMap::Unsigned];

    fn numbers() -> impl Iterator<Item = f32> {
        // All exponents, many mantissas, both signs.
        (0..=u16::MAX).flat_map(|high| {
            [0, 1, 0x7fff, 0x8000, 0xffff].map(|low| f32::from_bits(u32::from(high) << 16 | low))
        })
    }

    /// The table finds what a search over all values finds.
    #[test]
    fn codes_are_nearest() {
        for map in MAPS {
            let values = map.values();
            let middles = values.windows(2).flat_map(|pair| {
                let middle = (pair[0] + pair[1]) / 2.0;
                [middle, middle.next_up(), middle.next_down()]
            });
            let all = numbers().filter(|x| x.abs() <= 1.0);
            for x in all.chain(middles).chain(*values) {
                let x = if map == DynamicMap::Unsigned {
                    x.abs()
                } else {
                    x
                };
                assert_eq!(map.table().code(x), nearest(values, x), "{map:?}: {x:e}");
            }
        }
    }

    /// Zeros, tiny and huge blocks, blocks cut short: what comes back is within a step of the map, a
    /// zero is a zero, and nothing becomes infinite.
    #[test]
    fn blocks_come_back() {
        let threads = Threads::new(Some(2)).unwrap();
        for map in MAPS {
            for size in [0.0, 1e-45, 1e-38, 1e-3, 1.0, 3e38] {
                let len = 2 * BLOCK + 37;
                let mut values: Vec<f32> = (0..len)
                    .map(|i| (i as f32 / len as f32).powi(3) * size)
                    .collect();
                values[5] = 0.0;
                let mut codes = vec![77; len];
                let mut scales = vec![f32::NAN; scale_count(len)];
                quantize(&threads, map, &values, &mut codes, &mut scales).unwrap();
                let mut back = vec![f32::NAN; len];
                dequantize(&threads, map, &codes, &scales, &mut back).unwrap();
                for (i, (x, y)) in values.iter().zip(&back).enumerate() {
                    // Half the distance of neighbours, which is largest near 0.
                    let within = 0.45 * x.abs() + 1.5e-6 * scales[i / BLOCK] + f32::MIN_POSITIVE;
                    assert!((x - y).abs() <= within, "{map:?}, {size}: {x} is {y}");
                    assert!(*x != 0.0 || *y == 0.0);
                }
            }
        }
    }

    /// The mean of many roundings is the value, and the same key, however a slab is cut and whoever
    /// rounds, gives the same bits.
    #[test]
    fn random_rounding_is_right_on_average() {
        let key = RngSite::default().key();
        let len = 200_000;
        let src = vec![1.0 + 0.3 / 128.0; len];
        let round = |threads: usize| {
            let mut dst = vec![bf16::ZERO; len];
            let threads = Threads::new(Some(threads)).unwrap();
            round_randomly(&threads, key, 0, &src, &mut dst).unwrap();
            dst
        };
        let all = round(1);
        assert_eq!(all, round(3));
        let ups = all.iter().filter(|x| x.to_f32() > 1.0).count();
        assert!((ups as f64 / len as f64 - 0.3).abs() < 0.005, "{ups}");
        let mut part = vec![bf16::ZERO; 50];
        let one = Threads::new(Some(1)).unwrap();
        round_randomly(&one, key, 4096, &src[..50], &mut part).unwrap();
        assert_eq!(part, all[4096..4146]);
        let exact: Vec<f32> = [0.0, -0.0, 1.0, -3.5, 1e-40, f32::MAX, f32::MIN].to_vec();
        let mut dst = vec![bf16::ZERO; exact.len()];
        round_randomly(&one, key, 0, &exact, &mut dst).unwrap();
        assert!(dst.iter().all(|x| x.is_finite()));
        let bits: Vec<u16> = dst[..4].iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [0x0000, 0x8000, 0x3f80, 0xc060]);
    }
}
