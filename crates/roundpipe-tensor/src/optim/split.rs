//! An f32 master as the bf16 weight that is rounded from it and a remainder.
//!
//! The weight `w` is the master rounded to nearest even, and the remainder has the master's low 16
//! bits. Below `0x8000` the master's upper half is `w`; above, it is `w - 1`: the master is
//! `(w << 16) + low`, with `low` as a signed number. At exactly `0x8000` both are possible. An even
//! `w` has 65,537 masters, from tie to tie, so no 16 bits tell them apart, and the remainder has one
//! more bit, the tie bit:
//!
//! - at a tie it says that the upper half is `w` itself (else it is `w - 1`),
//! - for a NaN, whose upper half is never rounded, that making it quiet changed the upper half.
//!
//! It is 0 everywhere else. Tie bits stand sixteen in a word behind the low halves, so a remainder
//! takes 2 1/8 bytes per element. They are read with the rest, and written only where one changes.
//!
//! Refused: slabs of different lengths.
//!
//! # Invariants
//! - Every one of the 2^32 bit patterns comes back from its weight and its remainder.
//! - A remainder of zeros is the weight itself, so memory that was never written is a remainder.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::simd::{LANES, PassIsa, Simd, SlabPass, padded};
use super::{CHUNK, check_len, for_each};
use crate::cpu::threads::Threads;
use crate::error::Result;
use crate::host::{HostMut, HostRef};

/// Elements that share a word of tie bits.
const TIES: usize = LANES;

/// The remainders of a slab, to read.
#[derive(Debug, Clone, Copy)]
pub struct Remainders<'a> {
    low: &'a [u16],
    ties: &'a [u16],
}

/// The remainders of a slab, to write.
#[derive(Debug)]
pub struct RemaindersMut<'a> {
    low: &'a mut [u16],
    ties: &'a mut [u16],
}

/// Bytes of the remainders of `len` elements.
pub fn remainder_bytes(len: usize) -> usize {
    (len + len.div_ceil(TIES)) * size_of::<u16>()
}

impl<'a> Remainders<'a> {
    /// The remainders of `len` elements in memory of [`remainder_bytes`].
    ///
    /// # Errors
    /// When the memory has another size.
    pub fn new(memory: &'a HostRef, len: usize) -> Result<Self> {
        let words = memory.as_slice::<bf16>().reinterpret_cast();
        check_len(
            "split",
            "remainder",
            size_of_val(words),
            remainder_bytes(len),
        )?;
        let (low, ties) = words.split_at(len);
        Ok(Self { low, ties })
    }

    /// Part of them, from a multiple of sixteen on. Panics when it is out of bounds.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Self {
        Self {
            low: &self.low[range.clone()],
            ties: &self.ties[tie_words(range)],
        }
    }

    fn len(&self) -> usize {
        self.low.len()
    }
}

impl<'a> RemaindersMut<'a> {
    /// The remainders of `len` elements in memory of [`remainder_bytes`].
    ///
    /// # Errors
    /// When the memory has another size.
    pub fn new(memory: &'a mut HostMut, len: usize) -> Result<Self> {
        Self::of_words(memory.as_mut_slice::<bf16>().reinterpret_cast_mut(), len)
    }

    /// The same in words: the low halves, then the tie bits.
    ///
    /// # Errors
    /// When there are more or fewer than [`remainder_bytes`].
    pub fn of_words(words: &'a mut [u16], len: usize) -> Result<Self> {
        check_len(
            "split",
            "remainder",
            size_of_val(words),
            remainder_bytes(len),
        )?;
        let (low, ties) = words.split_at_mut(len);
        Ok(Self { low, ties })
    }

    /// To read.
    pub fn as_ref(&self) -> Remainders<'_> {
        Remainders {
            low: self.low,
            ties: self.ties,
        }
    }

    /// Part of them, from a multiple of sixteen on. Panics when it is out of bounds.
    pub fn range(&mut self, range: Range<usize>) -> RemaindersMut<'_> {
        RemaindersMut {
            low: &mut self.low[range.clone()],
            ties: &mut self.ties[tie_words(range)],
        }
    }

    /// In pieces of `len` elements, a multiple of sixteen; the last one is shorter.
    pub fn chunks(&mut self, len: usize) -> impl Iterator<Item = RemaindersMut<'_>> {
        let ties = self.ties.chunks_mut(len / TIES);
        let chunks = self.low.chunks_mut(len).zip(ties);
        chunks.map(|(low, ties)| RemaindersMut { low, ties })
    }
}

fn tie_words(range: Range<usize>) -> Range<usize> {
    assert!(
        range.start.is_multiple_of(TIES),
        "remainders are cut at words of tie bits"
    );
    range.start / TIES..range.end.div_ceil(TIES)
}

/// Writes the masters of `weights` with their remainders.
///
/// # Errors
/// When the slabs differ in length.
pub fn join(
    threads: &Threads,
    weights: &[bf16],
    remainders: Remainders<'_>,
    master: &mut [f32],
) -> Result<()> {
    join_with(PassIsa::best(), threads, weights, remainders, master)
}

pub(super) fn join_with(
    isa: PassIsa,
    threads: &Threads,
    weights: &[bf16],
    remainders: Remainders<'_>,
    master: &mut [f32],
) -> Result<()> {
    check_len("join", "weights", weights.len(), master.len())?;
    check_len("join", "remainder", remainders.len(), master.len())?;
    let chunks = weights
        .chunks(CHUNK)
        .zip(remainders.low.chunks(CHUNK))
        .zip(remainders.ties.chunks(CHUNK / TIES))
        .zip(master.chunks_mut(CHUNK))
        .map(|(((weights, low), ties), master)| JoinPass {
            weights,
            remainders: Remainders { low, ties },
            master,
        });
    for_each(threads, chunks, |pass| isa.run(pass));
    Ok(())
}

/// Writes the remainders of `master`, and its weights where they are not written yet.
///
/// # Errors
/// When the slabs differ in length.
pub fn split(
    threads: &Threads,
    master: &[f32],
    weights: Option<&mut [bf16]>,
    remainders: RemaindersMut<'_>,
) -> Result<()> {
    split_with(PassIsa::best(), threads, master, weights, remainders)
}

pub(super) fn split_with(
    isa: PassIsa,
    threads: &Threads,
    master: &[f32],
    weights: Option<&mut [bf16]>,
    mut remainders: RemaindersMut<'_>,
) -> Result<()> {
    check_len("split", "remainder", remainders.low.len(), master.len())?;
    if let Some(weights) = &weights {
        check_len("split", "weights", weights.len(), master.len())?;
    }
    let chunks = master
        .chunks(CHUNK)
        .zip(remainders.chunks(CHUNK))
        .zip(super::optional_chunks(weights))
        .map(|((master, remainders), weights)| SplitPass {
            master,
            weights,
            remainders,
        });
    for_each(threads, chunks, |pass| isa.run(pass));
    Ok(())
}

/// Makes remainders follow weights that the user wrote: where `new` is not what `old` was, the
/// master becomes the new weight.
///
/// # Errors
/// When the slabs differ in length.
pub fn follow_split(
    threads: &Threads,
    old: &[bf16],
    new: &[bf16],
    mut remainders: RemaindersMut<'_>,
) -> Result<()> {
    check_len("follow", "weights", new.len(), old.len())?;
    check_len("follow", "remainder", remainders.low.len(), old.len())?;
    let chunks = old
        .chunks(CHUNK)
        .zip(new.chunks(CHUNK))
        .zip(remainders.chunks(CHUNK));
    for_each(threads, chunks, |((old, new), remainders)| {
        for (i, (old, new)) in old.iter().zip(new).enumerate() {
            if old.to_bits() != new.to_bits() {
                remainders.low[i] = 0;
                remainders.ties[i / TIES] &= !(1 << (i % TIES));
            }
        }
    });
    Ok(())
}

/// The weight, the low half and the tie bit of a master, all as bits.
#[inline(always)]
fn split_bits(master: u32) -> (u16, u16, bool) {
    let low = master as u16;
    let high = (master >> 16) as u16;
    if master & 0x7fff_ffff > 0x7f80_0000 {
        let quiet = high | 0x40;
        return (quiet, low, quiet != high);
    }
    let rounded = (master.wrapping_add(0x7fff + u32::from(high & 1)) >> 16) as u16;
    (rounded, low, low == 0x8000 && rounded == high)
}

/// The master of a weight, a low half and a tie bit, all as bits.
#[inline(always)]
fn join_bits(weight: u16, low: u16, tie: bool) -> u32 {
    if is_nan(weight) {
        let high = weight ^ (u16::from(tie) << 6);
        return u32::from(high) << 16 | u32::from(low);
    }
    let near = (u32::from(weight) << 16).wrapping_add(i32::from(low as i16) as u32);
    near.wrapping_add(u32::from(tie) << 16)
}

#[inline(always)]
fn is_nan(weight: u16) -> bool {
    weight & 0x7fff > 0x7f80
}

/// Weights and remainders that a rule's own pass joins and splits in registers.
pub(super) struct SplitSlabs<'a> {
    /// The newest weights, where the next ones go to another slab.
    pub(super) newest: Option<&'a [bf16]>,
    /// Where the next weights go.
    pub(super) weights: &'a mut [bf16],
    pub(super) remainders: RemaindersMut<'a>,
}

impl<'a> SplitSlabs<'a> {
    /// Refuses slabs of another length.
    pub(super) fn check_len(&self, op: &'static str, len: usize) -> Result<()> {
        check_len(op, "weights", self.weights.len(), len)?;
        check_len(op, "remainder", self.remainders.low.len(), len)?;
        match self.newest {
            Some(newest) => check_len(op, "newest weights", newest.len(), len),
            None => Ok(()),
        }
    }

    /// In pieces of [`CHUNK`] elements, the last one shorter.
    pub(super) fn chunks(&mut self) -> impl Iterator<Item = SplitSlabs<'_>> {
        let mut newest = self.newest.map(|newest| newest.chunks(CHUNK));
        let chunks = self.weights.chunks_mut(CHUNK);
        let chunks = chunks.zip(self.remainders.chunks(CHUNK));
        chunks.map(move |(weights, remainders)| SplitSlabs {
            newest: newest.as_mut().and_then(Iterator::next),
            weights,
            remainders,
        })
    }

    /// Whole blocks, and the elements behind them.
    #[inline(always)]
    pub(super) fn blocks(self) -> (SplitBlocks<'a>, SplitRest<'a>) {
        let (newest, newest_rest) = self.newest.map(|newest| newest.as_chunks()).unzip();
        let (weights, weights_rest) = self.weights.as_chunks_mut();
        let (low, low_rest) = self.remainders.low.as_chunks_mut();
        let (ties, ties_rest) = self.remainders.ties.split_at_mut(low.len());
        let blocks = SplitBlocks {
            newest,
            weights,
            low,
            ties,
        };
        let rest = SplitRest {
            newest: newest_rest,
            weights: weights_rest,
            low: low_rest,
            ties: ties_rest.first_mut(),
        };
        (blocks, rest)
    }
}

/// Whole blocks of [`SplitSlabs`].
pub(super) struct SplitBlocks<'a> {
    newest: Option<&'a [[bf16; LANES]]>,
    weights: &'a mut [[bf16; LANES]],
    low: &'a mut [[u16; LANES]],
    ties: &'a mut [u16],
}

impl SplitBlocks<'_> {
    /// One of them. Panics when it is out of bounds.
    #[inline(always)]
    pub(super) fn at(&mut self, i: usize) -> SplitBlock<'_> {
        SplitBlock {
            newest: self.newest.map(|newest| &newest[i]),
            weights: &mut self.weights[i],
            low: &mut self.low[i],
            ties: &mut self.ties[i],
        }
    }
}

/// The elements of [`SplitSlabs`] behind the last whole block.
pub(super) struct SplitRest<'a> {
    newest: Option<&'a [bf16]>,
    weights: &'a mut [bf16],
    low: &'a mut [u16],
    ties: Option<&'a mut u16>,
}

impl SplitRest<'_> {
    /// Copies to a block of their own, zeros behind them.
    #[inline(always)]
    pub(super) fn padded(&self) -> PaddedSplit {
        PaddedSplit {
            weights: padded(self.newest.unwrap_or(self.weights)),
            low: padded(self.low),
            ties: self.ties.as_deref().copied().unwrap_or(0),
        }
    }

    /// Takes them back.
    #[inline(always)]
    pub(super) fn copy_from(self, from: &PaddedSplit) {
        self.weights
            .copy_from_slice(&from.weights[..self.weights.len()]);
        self.low.copy_from_slice(&from.low[..self.low.len()]);
        if let Some(ties) = self.ties {
            *ties = from.ties;
        }
    }
}

/// A block that is longer than what is left of its slabs.
pub(super) struct PaddedSplit {
    weights: [bf16; LANES],
    low: [u16; LANES],
    ties: u16,
}

impl PaddedSplit {
    #[inline(always)]
    pub(super) fn block(&mut self) -> SplitBlock<'_> {
        SplitBlock {
            newest: None,
            weights: &mut self.weights,
            low: &mut self.low,
            ties: &mut self.ties,
        }
    }
}

/// Sixteen weights and their remainders.
pub(super) struct SplitBlock<'a> {
    newest: Option<&'a [bf16; LANES]>,
    /// Where the next weights go, rounded from masters.
    pub(super) weights: &'a mut [bf16; LANES],
    low: &'a mut [u16; LANES],
    ties: &'a mut u16,
}

impl SplitBlock<'_> {
    /// The masters, where there is no tie bit and no NaN. With a tie bit it is `None`; a NaN stays
    /// one.
    #[inline(always)]
    pub(super) fn load_simple<S: Simd>(&self, s: S) -> Option<S::V> {
        if *self.ties != 0 {
            return None;
        }
        let newest = self.newest.unwrap_or(self.weights);
        Some(s.load_split(newest, self.low))
    }

    /// Writes masters that split simply, where [`SplitBlock::load_simple`] was not `None`.
    #[inline(always)]
    pub(super) fn store_simple<S: Simd>(&mut self, s: S, master: S::V) {
        s.store_split(master, self.weights, self.low);
    }

    /// The masters.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S) -> S::V {
        let newest = self.newest.unwrap_or(self.weights);
        join_block(s, newest, self.low, *self.ties)
    }

    /// Writes what new masters have beyond their weights.
    #[inline(always)]
    pub(super) fn store_remainders<S: Simd>(self, s: S, master: S::V) {
        store_remainders(s, master, self.low, self.ties);
    }
}

struct JoinPass<'a> {
    weights: &'a [bf16],
    remainders: Remainders<'a>,
    master: &'a mut [f32],
}

impl SlabPass for JoinPass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (weights, weights_rest) = self.weights.as_chunks();
        let (low, low_rest) = self.remainders.low.as_chunks();
        let (master, master_rest) = self.master.as_chunks_mut();
        let blocks = weights.iter().zip(low).zip(master);
        for (((weights, low), master), ties) in blocks.zip(self.remainders.ties) {
            s.store(join_block(s, weights, low, *ties), master);
        }
        let ties = self.remainders.ties.last().copied().unwrap_or(0);
        join_each(weights_rest, low_rest, ties, master_rest);
    }
}

/// The masters of a block.
#[inline(always)]
fn join_block<S: Simd>(s: S, weights: &[bf16; LANES], low: &[u16; LANES], ties: u16) -> S::V {
    let near = s.load_split(weights, low);
    if ties == 0 && s.is_ordered(near) {
        return near;
    }
    let mut master = [0.0; LANES];
    join_each(weights, low, ties, &mut master);
    s.load(&master)
}

#[cold]
fn join_each(weights: &[bf16], low: &[u16], ties: u16, master: &mut [f32]) {
    for (i, ((weight, low), master)) in weights.iter().zip(low).zip(master).enumerate() {
        let tie = ties >> i & 1 == 1;
        *master = f32::from_bits(join_bits(weight.to_bits(), *low, tie));
    }
}

struct SplitPass<'a> {
    master: &'a [f32],
    /// `None` where the weights are there already.
    weights: Option<&'a mut [bf16]>,
    remainders: RemaindersMut<'a>,
}

impl SlabPass for SplitPass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RemaindersMut { low, ties } = self.remainders;
        let (master, master_rest) = self.master.as_chunks::<TIES>();
        let (low, low_rest) = low.as_chunks_mut::<TIES>();
        let (mut weights, weights_rest) = self.weights.map(|w| w.as_chunks_mut()).unzip();
        for (block, ((master, low), word)) in master.iter().zip(low).zip(&mut *ties).enumerate() {
            let master = s.load(master);
            if let Some(weights) = &mut weights {
                s.store_bf16(master, &mut weights[block]);
            }
            store_remainders(s, master, low, word);
        }
        if master_rest.is_empty() {
            return;
        }
        for (i, master) in master_rest.iter().enumerate() {
            low_rest[i] = master.to_bits() as u16;
        }
        if let Some(rest) = weights_rest {
            for (weight, master) in rest.iter_mut().zip(master_rest) {
                *weight = bf16::from_bits(split_bits(master.to_bits()).0);
            }
        }
        if let Some(word) = ties.last_mut() {
            set_ties(master_rest, word);
        }
    }
}

/// Writes the remainders of a block of masters.
#[inline(always)]
fn store_remainders<S: Simd>(s: S, master: S::V, low: &mut [u16; LANES], word: &mut u16) {
    s.store_split(master, &mut [bf16::ZERO; LANES], low);
    // A tie with an even upper half, or a NaN: both are rare, and only they have a bit.
    if *word != 0 || !s.splits_simply(master) {
        let mut lanes = [0.0; LANES];
        s.store(master, &mut lanes);
        set_ties(&lanes, word);
    }
}

/// Writes the tie bits of up to sixteen masters, if they are others than before.
#[cold]
fn set_ties(master: &[f32], word: &mut u16) {
    let mut ties = 0;
    for (i, master) in master.iter().enumerate() {
        ties |= u16::from(split_bits(master.to_bits()).2) << i;
    }
    if *word != ties {
        *word = ties;
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::PassIsa;
    use super::{
        Remainders, RemaindersMut, Threads, bf16, follow_split, join_bits, join_with,
        remainder_bytes, split_bits, split_with,
    };

    /// Upper halves that matter: zeros, subnormals, ones, the largest finite, infinities, NaN.
    fn high_halves() -> Vec<u16> {
        let positive = [
            0x0000, 0x0001, 0x0002, 0x007f, 0x0080, 0x0081, 0x3f7f, 0x3f80, 0x3f81, 0x4000, 0x7f7e,
            0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7fc1, 0x7fff,
        ];
        positive.iter().flat_map(|x| [*x, *x | 0x8000]).collect()
    }

    fn check(bits: u32) {
        let (weight, low, tie) = split_bits(bits);
        let rounded = bf16::from_f32(f32::from_bits(bits));
        assert_eq!(weight, rounded.to_bits(), "{bits:#x}");
        assert_eq!(join_bits(weight, low, tie), bits, "{bits:#x}");
    }

    /// The weight is the rounded master, and master, weight and remainder give each other, for every
    /// low half.
    #[test]
    fn a_master_comes_back_from_its_weight_and_remainder() {
        for high in high_halves() {
            (0..=u16::MAX).for_each(|low| check(u32::from(high) << 16 | u32::from(low)));
        }
    }

    /// The same for all 2^32 masters: half a minute in release.
    #[test]
    #[ignore = "all 2^32 masters; run it in release"]
    fn every_master_comes_back() {
        (0..=u32::MAX).for_each(check);
    }

    /// Without the tie bit two masters would share a weight and a low half: there is no way around
    /// it.
    #[test]
    fn an_even_weight_has_one_master_too_many_for_16_bits() {
        let masters = |weight: u16| {
            let middle = u32::from(weight) << 16;
            let around = middle - 0x1_0000..=middle + 0x1_0000;
            around.filter(|bits| split_bits(*bits).0 == weight).count()
        };
        assert_eq!((masters(0x3f80), masters(0x3f81)), (65_537, 65_535));
    }

    /// Passes over slabs give what one element at a time gives, with every instruction set, any
    /// number of threads and any length.
    #[test]
    fn slabs_equal_elements() {
        let threads = Threads::new(Some(2)).unwrap();
        let isas: Vec<PassIsa> = PassIsa::available().collect();
        for (len, stride) in [
            (0, 1),
            (1, 1),
            (15, 977),
            (16, 1),
            (70_003, 61_681),
            (131_088, 1),
        ] {
            // With a stride of 1 from below a tie on, every kind of neighbour meets in a block.
            let bits = |i: usize| (0x3f80_7ff0u32).wrapping_add((i * stride * 7) as u32);
            let special = high_halves();
            let at = |i: usize| match i % 11 {
                0 => u32::from(special[i % special.len()]) << 16 | 0x8000,
                1 => u32::from(special[i % special.len()]) << 16 | (i as u32 & 0xffff),
                _ => bits(i),
            };
            let master: Vec<f32> = (0..len).map(|i| f32::from_bits(at(i))).collect();
            for &isa in &isas {
                // What is there before is overwritten, tie bits too.
                let mut words = vec![0xffff; remainder_bytes(len) / 2];
                let mut weights = vec![bf16::ONE; len];
                let into = RemaindersMut::of_words(&mut words, len).unwrap();
                split_with(isa, &threads, &master, Some(&mut weights), into).unwrap();
                for (i, weight) in weights.iter().enumerate() {
                    let (expected, low, tie) = split_bits(at(i));
                    let found = (
                        weight.to_bits(),
                        words[i],
                        words[len + i / 16] >> (i % 16) & 1,
                    );
                    assert_eq!(found, (expected, low, u16::from(tie)), "{isa:?}: {i}");
                }
                let mut back = vec![0.0; len];
                let (low, ties) = words.split_at(len);
                let remainders = Remainders { low, ties };
                join_with(isa, &threads, &weights, remainders, &mut back).unwrap();
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                assert!(master.iter().zip(&back).all(same), "{isa:?}: {len}");
            }
        }
    }

    /// Where the user wrote another weight, the master is that weight; where not, it is as it was.
    #[test]
    fn remainders_follow_what_was_written() {
        let threads = Threads::new(Some(1)).unwrap();
        let master: Vec<f32> = (0..40)
            .map(|i| f32::from_bits(0x3f80_8000 + i * 0x5000))
            .collect();
        let mut words = vec![0; remainder_bytes(40) / 2];
        let mut old = vec![bf16::ZERO; 40];
        let into = RemaindersMut::of_words(&mut words, 40).unwrap();
        split_with(PassIsa::best(), &threads, &master, Some(&mut old), into).unwrap();
        let mut new = old.clone();
        new.iter_mut()
            .step_by(3)
            .for_each(|x| *x = bf16::from_f32(7.0));
        let into = RemaindersMut::of_words(&mut words, 40).unwrap();
        follow_split(&threads, &old, &new, into).unwrap();
        let mut back = vec![0.0; 40];
        let (low, ties) = words.split_at(40);
        let remainders = Remainders { low, ties };
        join_with(PassIsa::best(), &threads, &new, remainders, &mut back).unwrap();
        for (i, (back, master)) in back.iter().zip(&master).enumerate() {
            let expected = if i % 3 == 0 { 7.0 } else { *master };
            assert_eq!(back.to_bits(), f32::to_bits(expected), "{i}");
        }
    }
}
