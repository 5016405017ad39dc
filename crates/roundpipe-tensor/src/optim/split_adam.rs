//! Adam and AdamW over masters that are kept as weights and remainders, in one pass or in two.
//!
//! The formulas are those of module `adam`; a block's masters are joined in the registers of the
//! pass and split there again. So an update moves 26 1/4 bytes per parameter with bf16 gradients,
//! where the pass over f32 copies moves 28. Moments are f32, or bf16 rounded at random, whose random
//! bits are drawn for 512 elements at a time.
//!
//! Where weights are waited for and moments are not, a first pass writes weights and remainders
//! alone, 18 1/4 bytes per parameter, and a second one the moments, 18 bytes. The second cannot know
//! which elements kept their values, so a piece with such an element is updated whole in the first.
//!
//! Refused: `amsgrad`; two passes with an L2 penalty, for which moments need the weights as they were.
//!
//! # Invariants
//! - The bits are those of [`join`](super::join), the pass over f32 slabs, [`split`](super::split)
//!   and, for bf16, [`round_randomly`](super::round_randomly), one after the other.
//! - Two passes give the bits of one.

use half::bf16;

use super::adam::{Adam, AdamBlock, AdamFactors, AdamRule, AdamUpdate, AdamW, OP};
use super::simd::{LANES, PassIsa, Simd, SlabElement, SlabPass, padded};
use super::split::{RemaindersMut, SplitBlock, SplitSlabs};
use super::{CHUNK, Floats, StepSettings, any, check_len, with_slice};
use crate::cpu::threads::Threads;
use crate::error::{Error, Result};
use crate::rng::RngKey;

/// What one step of [`Adam`] or [`AdamW`] reads and writes where masters are weights and remainders;
/// all of one length. `amsgrad` is refused.
#[derive(Debug)]
pub struct SplitAdamSlabs<'a> {
    /// Gradients; only read.
    pub grad: Floats<'a>,
    /// The newest weights, where the next ones go to another slab.
    pub newest: Option<&'a [bf16]>,
    /// Where the next weights go.
    pub weights: &'a mut [bf16],
    /// What the newest weights lack of their masters, and then what the next ones lack.
    pub remainders: RemaindersMut<'a>,
    /// Both moments.
    pub moments: SplitAdamMoments<'a>,
}

/// The first and the second moment.
#[derive(Debug)]
pub enum SplitAdamMoments<'a> {
    /// As computed.
    F32([&'a mut [f32]; 2]),
    /// Rounded at random.
    Bf16([RandomMoment<'a>; 2]),
}

/// A moment in bf16, rounded as [`round_randomly`](super::round_randomly) does.
#[derive(Debug)]
pub struct RandomMoment<'a> {
    /// The moment.
    pub values: &'a mut [bf16],
    /// Of the random bits.
    pub key: RngKey,
    /// The number of the first element in the stream of `key`, a multiple of 8.
    pub first: u64,
}

impl<'a> RandomMoment<'a> {
    /// In pieces of [`CHUNK`] elements, the last one shorter.
    fn chunks(self) -> impl Iterator<Item = RandomMoment<'a>> {
        let Self { values, key, first } = self;
        let chunks = values.chunks_mut(CHUNK).enumerate();
        chunks.map(move |(i, values)| RandomMoment {
            values,
            key,
            first: first + (i * CHUNK) as u64,
        })
    }
}

impl Adam {
    /// [`Adam::step`] over weights and remainders.
    ///
    /// # Errors
    /// As [`Adam::step`], and for `amsgrad`.
    pub fn step_split(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<bool> {
        AdamRule::from(*self).step_split_with(PassIsa::best(), threads, settings, slabs)
    }

    /// The part of [`Adam::step_split`] that the weights need, over one piece by the calling thread;
    /// [`Adam::step_split_moments`] is the rest.
    ///
    /// # Errors
    /// As [`Adam::step_split`], and for an L2 penalty.
    pub fn step_split_weights(
        &self,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<WeightsStep> {
        AdamRule::from(*self).step_split_weights_with(PassIsa::best(), settings, slabs)
    }

    /// The moments of a piece, where [`WeightsStep::moments_left`] says that they are left.
    ///
    /// # Errors
    /// As [`Adam::step_split_weights`].
    pub fn step_split_moments(
        &self,
        settings: StepSettings,
        slabs: SplitMomentSlabs<'_>,
    ) -> Result<()> {
        AdamRule::from(*self).step_split_moments_with(PassIsa::best(), settings, slabs)
    }
}

impl AdamW {
    /// [`AdamW::step`] over weights and remainders.
    ///
    /// # Errors
    /// As [`AdamW::step`], and for `amsgrad`.
    pub fn step_split(
        &self,
        threads: &Threads,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<bool> {
        AdamRule::from(*self).step_split_with(PassIsa::best(), threads, settings, slabs)
    }

    /// The part of [`AdamW::step_split`] that the weights need, over one piece by the calling thread;
    /// [`AdamW::step_split_moments`] is the rest.
    ///
    /// # Errors
    /// As [`AdamW::step_split`], and for an L2 penalty.
    pub fn step_split_weights(
        &self,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<WeightsStep> {
        AdamRule::from(*self).step_split_weights_with(PassIsa::best(), settings, slabs)
    }

    /// The moments of a piece, where [`WeightsStep::moments_left`] says that they are left.
    ///
    /// # Errors
    /// As [`AdamW::step_split_weights`].
    pub fn step_split_moments(
        &self,
        settings: StepSettings,
        slabs: SplitMomentSlabs<'_>,
    ) -> Result<()> {
        AdamRule::from(*self).step_split_moments_with(PassIsa::best(), settings, slabs)
    }
}

/// What became of a piece whose weights were updated first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightsStep {
    /// Whether an element kept its values because new ones were not finite.
    pub kept: bool,
    /// Whether the moments are as before the step, for [`AdamW::step_split_moments`]. Where an element
    /// kept its values that could not tell, so they were updated as well.
    pub moments_left: bool,
}

/// Gradients and moments of a piece whose weights [`AdamW::step_split_weights`] has updated.
#[derive(Debug)]
pub struct SplitMomentSlabs<'a> {
    /// The gradients that the weights were updated with.
    pub grad: Floats<'a>,
    /// Both moments.
    pub moments: SplitAdamMoments<'a>,
}

impl AdamRule {
    pub(super) fn step_split_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<bool> {
        self.check_split(settings)?;
        let (grad, split, moments) = slabs.checked()?;
        let run = SplitRun {
            isa,
            threads,
            factors: self.factors(settings),
        };
        Ok(with_slice!(Floats, grad, grad => match moments {
            SplitAdamMoments::F32(moments) => run.whole(grad, split, WideMoments::chunks(moments)),
            SplitAdamMoments::Bf16(moments) => run.whole(grad, split, NarrowMoments::chunks(moments)),
        }))
    }

    fn step_split_weights_with(
        &self,
        isa: PassIsa,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<WeightsStep> {
        self.check_split_apart(settings)?;
        let (grad, split, moments) = slabs.checked()?;
        let factors = self.factors(settings);
        Ok(with_slice!(Floats, grad, grad => match moments {
            SplitAdamMoments::F32(moments) => isa.run(WeightsPass(WholePass {
                factors,
                grad,
                split,
                moments: WideMoments::new(moments),
            })),
            SplitAdamMoments::Bf16(moments) => isa.run(WeightsPass(WholePass {
                factors,
                grad,
                split,
                moments: NarrowMoments::new(moments),
            })),
        }))
    }

    fn step_split_moments_with(
        &self,
        isa: PassIsa,
        settings: StepSettings,
        slabs: SplitMomentSlabs<'_>,
    ) -> Result<()> {
        self.check_split_apart(settings)?;
        let SplitMomentSlabs { grad, moments } = slabs;
        moments.check(grad.len())?;
        let factors = self.factors(settings);
        with_slice!(Floats, grad, grad => match moments {
            SplitAdamMoments::F32(moments) => isa.run(MomentsPass {
                factors,
                grad,
                moments: WideMoments::new(moments),
            }),
            SplitAdamMoments::Bf16(moments) => isa.run(MomentsPass {
                factors,
                grad,
                moments: NarrowMoments::new(moments),
            }),
        });
        Ok(())
    }

    fn check_split(&self, settings: StepSettings) -> Result<()> {
        self.check()?;
        settings.check(OP)?;
        if self.settings.amsgrad {
            return Err(Error::invalid(OP, "amsgrad needs f32 masters"));
        }
        Ok(())
    }

    fn check_split_apart(&self, settings: StepSettings) -> Result<()> {
        self.check_split(settings)?;
        if !self.decoupled && self.settings.weight_decay != 0.0 {
            let what = "moments with an L2 penalty depend on the weights before the step";
            return Err(Error::invalid(OP, what));
        }
        Ok(())
    }
}

impl<'a> SplitAdamSlabs<'a> {
    /// Refuses slabs that do not fit together.
    fn checked(self) -> Result<(Floats<'a>, SplitSlabs<'a>, SplitAdamMoments<'a>)> {
        let Self {
            grad,
            newest,
            weights,
            remainders,
            moments,
        } = self;
        let split = SplitSlabs {
            newest,
            weights,
            remainders,
        };
        split.check_len(OP, grad.len())?;
        moments.check(grad.len())?;
        Ok((grad, split, moments))
    }
}

impl SplitAdamMoments<'_> {
    fn check(&self, len: usize) -> Result<()> {
        let lens = match self {
            Self::F32([first, second]) => [first.len(), second.len()],
            Self::Bf16([first, second]) => [first.values.len(), second.values.len()],
        };
        check_len(OP, "first moment", lens[0], len)?;
        check_len(OP, "second moment", lens[1], len)?;
        match self {
            Self::Bf16(moments) if moments.iter().any(|moment| moment.first % 8 != 0) => {
                Err(Error::invalid(OP, "random bits begin at a multiple of 8"))
            }
            _ => Ok(()),
        }
    }
}

/// How the passes over chunks are run.
struct SplitRun<'a> {
    isa: PassIsa,
    threads: &'a Threads,
    factors: AdamFactors,
}

impl SplitRun<'_> {
    /// `moments` come in pieces of [`CHUNK`] elements.
    fn whole<G: SlabElement, M: MomentBlocks + Send>(
        &self,
        grad: &[G],
        mut split: SplitSlabs<'_>,
        moments: impl Iterator<Item = M>,
    ) -> bool {
        let chunks = grad.chunks(CHUNK).zip(split.chunks()).zip(moments);
        let passes = chunks.map(|((grad, split), moments)| WholePass {
            factors: self.factors,
            grad,
            split,
            moments,
        });
        any(self.threads, passes, |pass| self.isa.run(pass))
    }
}

/// Both moments of a piece, by blocks; the last block may be shorter than the others.
trait MomentBlocks {
    fn load<S: Simd>(&self, s: S, block: usize) -> [S::V; 2];

    /// Rounds at random where moments are narrow.
    fn store<S: Simd>(&mut self, s: S, block: usize, values: [S::V; 2]);
}

/// Blocks of a slab, and the elements behind the last whole one.
struct Blocks<'a, T> {
    whole: &'a mut [[T; LANES]],
    rest: &'a mut [T],
}

impl<'a, T: Copy + Default> Blocks<'a, T> {
    fn new(slab: &'a mut [T]) -> Self {
        let (whole, rest) = slab.as_chunks_mut();
        Self { whole, rest }
    }

    /// A block, with zeros behind the last element.
    #[inline(always)]
    fn get(&self, block: usize) -> [T; LANES] {
        match self.whole.get(block) {
            Some(whole) => *whole,
            None => padded(self.rest),
        }
    }

    /// Takes a block back; what lies behind the last element is thrown away.
    #[inline(always)]
    fn set(&mut self, block: usize, values: [T; LANES]) {
        match self.whole.get_mut(block) {
            Some(whole) => *whole = values,
            None => self.rest.copy_from_slice(&values[..self.rest.len()]),
        }
    }
}

/// Moments in f32.
struct WideMoments<'a>([Blocks<'a, f32>; 2]);

impl<'a> WideMoments<'a> {
    fn new(moments: [&'a mut [f32]; 2]) -> Self {
        Self(moments.map(Blocks::new))
    }

    /// In pieces of [`CHUNK`] elements, the last one shorter.
    fn chunks([first, second]: [&'a mut [f32]; 2]) -> impl Iterator<Item = Self> {
        let pairs = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
        pairs.map(|(first, second)| Self::new([first, second]))
    }
}

impl MomentBlocks for WideMoments<'_> {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, block: usize) -> [S::V; 2] {
        let [m, v] = &self.0;
        [s.load(&m.get(block)), s.load(&v.get(block))]
    }

    #[inline(always)]
    fn store<S: Simd>(&mut self, s: S, block: usize, values: [S::V; 2]) {
        for (blocks, value) in self.0.iter_mut().zip(values) {
            let mut new = [0.0; LANES];
            s.store(value, &mut new);
            blocks.set(block, new);
        }
    }
}

/// Blocks whose random bits are drawn at once.
const DRAWN: usize = 32;

/// One moment in bf16 with the random bits of some of its blocks.
struct NarrowMoment<'a> {
    blocks: Blocks<'a, bf16>,
    key: RngKey,
    /// The number of the first element in the stream of `key`.
    first: u64,
    bits: [[u16; LANES]; DRAWN],
    /// Whose bits they are, in units of [`DRAWN`] blocks.
    drawn: Option<usize>,
}

impl NarrowMoment<'_> {
    /// The random bits of a block.
    #[inline(always)]
    fn bits_of(&mut self, block: usize) -> &[u16; LANES] {
        let group = block / DRAWN;
        if self.drawn != Some(group) {
            let element = self.first + (group * DRAWN * LANES) as u64;
            let (bits, _) = self.bits.as_flattened_mut().as_chunks_mut();
            self.key.fill_halves(element / 8, bits);
            self.drawn = Some(group);
        }
        &self.bits[block % DRAWN]
    }
}

/// Moments in bf16.
struct NarrowMoments<'a>([NarrowMoment<'a>; 2]);

impl<'a> NarrowMoments<'a> {
    fn new(moments: [RandomMoment<'a>; 2]) -> Self {
        Self(moments.map(|moment| NarrowMoment {
            blocks: Blocks::new(moment.values),
            key: moment.key,
            first: moment.first,
            bits: [[0; LANES]; DRAWN],
            drawn: None,
        }))
    }

    /// In pieces of [`CHUNK`] elements, the last one shorter.
    fn chunks([first, second]: [RandomMoment<'a>; 2]) -> impl Iterator<Item = Self> {
        let pairs = first.chunks().zip(second.chunks());
        pairs.map(|(first, second)| Self::new([first, second]))
    }
}

impl MomentBlocks for NarrowMoments<'_> {
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, block: usize) -> [S::V; 2] {
        let [m, v] = &self.0;
        [
            s.load_bf16(&m.blocks.get(block)),
            s.load_bf16(&v.blocks.get(block)),
        ]
    }

    #[inline(always)]
    fn store<S: Simd>(&mut self, s: S, block: usize, values: [S::V; 2]) {
        for (moment, value) in self.0.iter_mut().zip(values) {
            let mut new = [bf16::ZERO; LANES];
            s.store_bf16_random(value, moment.bits_of(block), &mut new);
            moment.blocks.set(block, new);
        }
    }
}

/// One piece, all of it.
struct WholePass<'a, G, M> {
    factors: AdamFactors,
    grad: &'a [G],
    split: SplitSlabs<'a>,
    moments: M,
}

impl<G: SlabElement, M: MomentBlocks> SlabPass for WholePass<'_, G, M> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) -> bool {
        let update = AdamUpdate::new(s, self.factors);
        let (grad, grad_rest) = self.grad.as_chunks();
        let (mut split, split_rest) = self.split.blocks();
        let moments = &mut self.moments;
        let mut kept = false;
        for (i, grad) in grad.iter().enumerate() {
            kept |= step_block(&update, LANES, grad, split.at(i), moments, i);
        }
        if grad_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let mut split = split_rest.padded();
        let len = grad_rest.len();
        kept |= step_block(
            &update,
            len,
            &padded(grad_rest),
            split.block(),
            moments,
            grad.len(),
        );
        split_rest.copy_from(&split);
        kept
    }
}

/// One piece, of which the moments are left to [`MomentsPass`], unless that would not know what
/// becomes of them.
struct WeightsPass<'a, G, M>(WholePass<'a, G, M>);

impl<G: SlabElement, M: MomentBlocks> SlabPass for WeightsPass<'_, G, M> {
    type Output = WeightsStep;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> WeightsStep {
        let Self(pass) = self;
        let update = AdamUpdate::new(s, pass.factors);
        let (grad, grad_rest) = pass.grad.as_chunks();
        let (mut split, split_rest) = pass.split.blocks();
        let mut moments = pass.moments;
        let mut step = WeightsStep {
            kept: false,
            moments_left: true,
        };
        for (i, block) in grad.iter().enumerate() {
            let (before, _) = pass.grad.split_at(i * LANES);
            step.block(&update, LANES, (before, block), split.at(i), &mut moments);
        }
        if !grad_rest.is_empty() {
            let mut split = split_rest.padded();
            let (before, rest) = pass.grad.split_at(grad.len() * LANES);
            let block = (before, &padded(rest));
            step.block(&update, rest.len(), block, split.block(), &mut moments);
            split_rest.copy_from(&split);
        }
        step
    }
}

impl WeightsStep {
    /// The next block, with the gradients of it and of those before it.
    #[inline(always)]
    fn block<S: Simd, G: SlabElement>(
        &mut self,
        update: &AdamUpdate<S>,
        live: usize,
        (before, grad): (&[G], &[G; LANES]),
        split: SplitBlock<'_>,
        moments: &mut impl MomentBlocks,
    ) {
        let at = before.len() / LANES;
        if !self.moments_left {
            self.kept |= step_block(update, live, grad, split, moments, at);
            return;
        }
        let stepped = step_weights(update, live, grad, split, moments, at);
        self.kept |= stepped.kept;
        if !stepped.moments_left {
            step_moments(update, before, moments);
            self.moments_left = false;
        }
    }
}

/// The moments of one piece whose weights are there.
struct MomentsPass<'a, G, M> {
    factors: AdamFactors,
    grad: &'a [G],
    moments: M,
}

impl<G: SlabElement, M: MomentBlocks> SlabPass for MomentsPass<'_, G, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let update = AdamUpdate::new(s, self.factors);
        step_moments(&update, self.grad, &mut self.moments);
    }
}

/// A block, all of it.
#[inline(always)]
fn step_block<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    mut split: SplitBlock<'_>,
    moments: &mut impl MomentBlocks,
    at: usize,
) -> bool {
    let s = update.s;
    let old = moments.load(s, at);
    match step_simple(update, grad, &mut split, old) {
        Some(new) => {
            moments.store(s, at, new);
            false
        }
        None => {
            let (new, kept) = step_any(update, live, grad, split, old);
            moments.store(s, at, [s.load(&new[0]), s.load(&new[1])]);
            kept
        }
    }
}

/// The weights of a block. Its moments are written where they are not those of [`step_moments`].
#[inline(always)]
fn step_weights<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    mut split: SplitBlock<'_>,
    moments: &mut impl MomentBlocks,
    at: usize,
) -> WeightsStep {
    let s = update.s;
    let old = moments.load(s, at);
    if step_simple(update, grad, &mut split, old).is_some() {
        return WeightsStep {
            kept: false,
            moments_left: true,
        };
    }
    let (new, kept) = step_any(update, live, grad, split, old);
    let expected = update.moments(update.read(grad), old);
    let mut is_known = true;
    for (expected, new) in expected.into_iter().zip(&new) {
        let mut values = [0.0; LANES];
        s.store(expected, &mut values);
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        is_known &= values[..live].iter().zip(new).all(is_same);
    }
    if !is_known {
        moments.store(s, at, [s.load(&new[0]), s.load(&new[1])]);
    }
    WeightsStep {
        kept,
        moments_left: is_known,
    }
}

/// The moments of the first blocks, whose weights are there.
#[inline(always)]
fn step_moments<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    grads: &[G],
    moments: &mut impl MomentBlocks,
) {
    let s = update.s;
    let (whole, rest) = grads.as_chunks();
    for (i, grad) in whole.iter().enumerate() {
        let new = update.moments(update.read(grad), moments.load(s, i));
        moments.store(s, i, new);
    }
    if !rest.is_empty() {
        let (grad, last) = (update.read(&padded(rest)), whole.len());
        let new = update.moments(grad, moments.load(s, last));
        moments.store(s, last, new);
    }
}

/// The usual block, all in registers: writes its weights and remainders and returns its moments.
/// `None`, and nothing is written, where a master has a tie bit before or after the update, or
/// something would not be finite.
#[inline(always)]
fn step_simple<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    grad: &[G; LANES],
    split: &mut SplitBlock<'_>,
    [m, v]: [S::V; 2],
) -> Option<[S::V; 2]> {
    let s = update.s;
    let old = split.load_simple(s)?;
    let [new, first, second, _] = update.values(old, grad, m, v, None);
    // A first moment that is not finite makes the weight infinite or NaN, and so does anything that
    // is NaN; an infinite second moment does not. Zero times that is a NaN.
    let is_finite = s.is_ordered(s.mul(second, s.splat(0.0)));
    if !is_finite || !s.splits_simply(new) {
        return None;
    }
    split.store_simple(s, new);
    Some([first, second])
}

/// Any block: joins its masters, updates them and splits them again. Returns its moments, and whether
/// an element kept its values because new ones were not finite.
#[inline(always)]
fn step_any<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    split: SplitBlock<'_>,
    [m, v]: [S::V; 2],
) -> ([[f32; LANES]; 2], bool) {
    seldom();
    let s = update.s;
    let (mut p, mut wide_m, mut wide_v) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    s.store(split.load(s), &mut p);
    s.store(m, &mut wide_m);
    s.store(v, &mut wide_v);
    let state = AdamBlock {
        p: &mut p,
        m: &mut wide_m,
        v: &mut wide_v,
        x: None,
    };
    let kept = update.block(live, grad, state, Some(&mut *split.weights));
    split.store_remainders(s, s.load(&p));
    ([wide_m, wide_v], kept)
}

/// Tells the compiler that the caller's branch is rarely taken.
#[cold]
fn seldom() {}

#[cfg(test)]
mod tests {
    use super::super::simd::PassIsa;
    use super::super::split::{join_with, remainder_bytes, split_with};
    use super::super::{AdamSlabs, Floats, FloatsMut, cast, round_randomly};
    use super::{
        Adam, AdamRule, AdamW, RandomMoment, RemaindersMut, RngKey, SplitAdamMoments,
        SplitAdamSlabs, SplitMomentSlabs, StepSettings, Threads, bf16,
    };
    use crate::rng::RngSite;

    /// All that a step writes.
    #[derive(Clone, PartialEq)]
    struct State {
        weights: Vec<u16>,
        remainders: Vec<u16>,
        moments: [Vec<f32>; 2],
    }

    fn key(site: u32) -> RngKey {
        RngSite {
            site,
            ..RngSite::default()
        }
        .key()
    }

    /// Any pattern at all among sound ones, and masters at ties and next to them.
    fn masters(len: usize) -> Vec<f32> {
        let bits = |i: usize| {
            let word = key(1).word(i as u64);
            match i % 9 {
                0 => word,
                1 => word & 0xffff_0000 | 0x8000,
                2 => word & 0x807f_ffff,
                3 => 0x7f7f_8000 | word & 0x8000_0000,
                4 if i.is_multiple_of(97) => 0x7f80_0000 | word & 0x8000_0000,
                5 => 0x3f80_8000 | word & 0x0001_0000,
                _ => 0x3f00_0000 | word & 0x80ff_ffff,
            }
        };
        (0..len).map(|i| f32::from_bits(bits(i))).collect()
    }

    /// Gradients of many sizes: some zero, so that masters at ties stay there, few not finite.
    fn grads(len: usize) -> Vec<bf16> {
        let value = |i: usize| match (i % 13, i % 1009) {
            (_, 1000) => f32::NAN,
            (_, 1001) => f32::INFINITY,
            (0..5, _) => 0.0,
            (n, _) => (key(2).word(i as u64) as i32 as f32) * 10f32.powi(-9 - n as i32),
        };
        (0..len).map(|i| bf16::from_f32(value(i))).collect()
    }

    fn start(len: usize, isa: PassIsa, one: &Threads) -> State {
        let mut weights = vec![bf16::ZERO; len];
        let mut remainders = vec![0; remainder_bytes(len) / 2];
        let into = RemaindersMut::of_words(&mut remainders, len).unwrap();
        split_with(isa, one, &masters(len), Some(&mut weights), into).unwrap();
        let small = |i: usize| key(3).word(i as u64) as f32 * 1e-14;
        let sizes = (0..len).map(|i| bf16::from_f32(small(i)).to_f32());
        let second: Vec<f32> = sizes.collect();
        let first = second.iter().map(|x| -x).collect();
        State {
            weights: weights.iter().map(|x| x.to_bits()).collect(),
            remainders,
            moments: [first, second],
        }
    }

    fn narrow(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|x| bf16::from_f32(*x)).collect()
    }

    /// One after the other: join, the plain pass, split, round.
    fn unfused(rule: AdamRule, isa: PassIsa, random: bool, state: &mut State) -> bool {
        let one = Threads::new(Some(1)).unwrap();
        let len = state.weights.len();
        let mut weights: Vec<bf16> = state.weights.iter().map(|x| bf16::from_bits(*x)).collect();
        let mut master = vec![0.0; len];
        let from = RemaindersMut::of_words(&mut state.remainders, len).unwrap();
        join_with(isa, &one, &weights, from.as_ref(), &mut master).unwrap();
        let [first, second] = &mut state.moments;
        let slabs = AdamSlabs {
            grad: Floats::BF16(&grads(len)),
            master: &mut master,
            exp_avg: first,
            exp_avg_sq: second,
            max_exp_avg_sq: None,
            working: Some(FloatsMut::BF16(&mut weights)),
        };
        let settings = StepSettings::new(3, 1e-3);
        let kept = rule.step_with(isa, &one, settings, slabs).unwrap();
        let into = RemaindersMut::of_words(&mut state.remainders, len).unwrap();
        split_with(isa, &one, &master, None, into).unwrap();
        state.weights = weights.iter().map(|x| x.to_bits()).collect();
        for (i, moment) in state.moments.iter_mut().enumerate().filter(|_| random) {
            let mut rounded = vec![bf16::ZERO; len];
            round_randomly(&one, key(10 + i as u32), 64, moment, &mut rounded).unwrap();
            cast(&one, Floats::BF16(&rounded), FloatsMut::F32(moment)).unwrap();
        }
        kept
    }

    /// The same in one pass, into another slab of weights or in place.
    fn fused(
        rule: AdamRule,
        isa: PassIsa,
        (random, lag): (bool, bool),
        threads: &Threads,
        state: &mut State,
    ) -> bool {
        let len = state.weights.len();
        let newest: Vec<bf16> = state.weights.iter().map(|x| bf16::from_bits(*x)).collect();
        let mut weights = newest.clone();
        if lag {
            weights.fill(bf16::ONE);
        }
        let [mut first, mut second] = state.moments.each_ref().map(|moment| narrow(moment));
        let [wide_first, wide_second] = &mut state.moments;
        let random_moment = |values, site| RandomMoment {
            values,
            key: key(site),
            first: 64,
        };
        let moments = if random {
            SplitAdamMoments::Bf16([
                random_moment(&mut first, 10),
                random_moment(&mut second, 11),
            ])
        } else {
            SplitAdamMoments::F32([wide_first, wide_second])
        };
        let slabs = SplitAdamSlabs {
            grad: Floats::BF16(&grads(len)),
            newest: lag.then_some(&newest),
            weights: &mut weights,
            remainders: RemaindersMut::of_words(&mut state.remainders, len).unwrap(),
            moments,
        };
        let settings = StepSettings::new(3, 1e-3);
        let kept = rule.step_split_with(isa, threads, settings, slabs).unwrap();
        state.weights = weights.iter().map(|x| x.to_bits()).collect();
        if random {
            let wide = |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect();
            state.moments = [wide(&first), wide(&second)];
        }
        kept
    }

    /// The weights first and then the moments, piece by piece. Whether elements kept their values, and
    /// of how many pieces the moments were left.
    fn apart(
        rule: AdamRule,
        isa: PassIsa,
        (random, lag, piece): (bool, bool, usize),
        state: &mut State,
    ) -> (bool, usize) {
        let len = state.weights.len();
        let grads = grads(len);
        let newest: Vec<bf16> = state.weights.iter().map(|x| bf16::from_bits(*x)).collect();
        let mut weights = newest.clone();
        let mut narrow = state.moments.each_ref().map(|moment| narrow(moment));
        let mut remainders = RemaindersMut::of_words(&mut state.remainders, len).unwrap();
        let settings = StepSettings::new(3, 1e-3);
        let (mut kept, mut left) = (false, Vec::new());
        for moments_only in [false, true] {
            for start in (0..len).step_by(piece) {
                let range = start..len.min(start + piece);
                let moments = if random {
                    let mut site = 9;
                    SplitAdamMoments::Bf16(narrow.each_mut().map(|moment| {
                        site += 1;
                        RandomMoment {
                            values: &mut moment[range.clone()],
                            key: key(site),
                            first: 64 + start as u64,
                        }
                    }))
                } else {
                    let wide = state.moments.each_mut();
                    SplitAdamMoments::F32(wide.map(|moment| &mut moment[range.clone()]))
                };
                let grad = Floats::BF16(&grads[range.clone()]);
                if moments_only {
                    if left.contains(&start) {
                        let slabs = SplitMomentSlabs { grad, moments };
                        rule.step_split_moments_with(isa, settings, slabs).unwrap();
                    }
                    continue;
                }
                let slabs = SplitAdamSlabs {
                    grad,
                    newest: lag.then_some(&newest[range.clone()]),
                    weights: &mut weights[range.clone()],
                    remainders: remainders.range(range),
                    moments,
                };
                let step = rule.step_split_weights_with(isa, settings, slabs).unwrap();
                kept |= step.kept;
                left.extend(step.moments_left.then_some(start));
            }
        }
        state.weights = weights.iter().map(|x| x.to_bits()).collect();
        if random {
            state.moments = narrow.map(|moment| moment.iter().map(|x| x.to_f32()).collect());
        }
        (kept, left.len())
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// One pass gives the bits of join, update, split and random rounding one after the other: for
    /// masters of any pattern, ties, infinities, NaN, any length, both lags, decay of both kinds.
    #[test]
    fn one_pass_equals_passes_one_after_the_other() {
        let decoupled = AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        };
        let coupled = AdamRule {
            settings: decoupled,
            decoupled: false,
        };
        let threads = Threads::new(Some(2)).unwrap();
        let one = Threads::new(Some(1)).unwrap();
        for isa in PassIsa::available() {
            for rule in [decoupled.into(), coupled] {
                for len in [0, 1, 15, 16, 127, 128, 1031, 65_536 + 4099] {
                    for random in [false, true] {
                        let start = start(len, isa, &one);
                        let mut expected = start.clone();
                        let kept = unfused(rule, isa, random, &mut expected);
                        assert!(kept || len < 1000, "{isa:?}: {len}");
                        for lag in [false, true] {
                            let what = format!("{isa:?}, {len}, random {random}, lag {lag}");
                            let mut state = start.clone();
                            let way = (random, lag);
                            assert_eq!(fused(rule, isa, way, &threads, &mut state), kept, "{what}");
                            assert!(state.weights == expected.weights, "{what}: weights");
                            assert!(
                                state.remainders == expected.remainders,
                                "{what}: remainders"
                            );
                            for (a, b) in state.moments.iter().zip(&expected.moments) {
                                assert!(bits(a) == bits(b), "{what}: moments");
                            }
                        }
                    }
                }
            }
        }
    }

    /// Weights first and moments later give the bits of one pass, also where elements keep their
    /// values, for pieces of any length.
    #[test]
    fn two_passes_equal_one() {
        let rule = AdamRule::from(AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        });
        let one = Threads::new(Some(1)).unwrap();
        for isa in PassIsa::available() {
            for (len, piece) in [
                (1usize, 16),
                (15, 16),
                (1031, 256),
                (65_536 + 4099, 128),
                (9_000, 9_000),
            ] {
                let pieces = len.div_ceil(piece);
                for (random, lag) in [(false, false), (false, true), (true, false), (true, true)] {
                    let what = format!("{isa:?}, {len} by {piece}, random {random}, lag {lag}");
                    let mut expected = start(len, isa, &one);
                    let mut state = expected.clone();
                    let kept = fused(rule, isa, (random, lag), &one, &mut expected);
                    let way = (random, lag, piece);
                    let (kept_apart, left) = apart(rule, isa, way, &mut state);
                    assert_eq!(kept_apart, kept, "{what}");
                    // Elements that are not finite are in few pieces of many.
                    assert!(left < pieces || !kept, "{what}: {left} of {pieces}");
                    assert!(left > 0 || pieces < 3, "{what}");
                    assert!(state.weights == expected.weights, "{what}: weights");
                    assert!(
                        state.remainders == expected.remainders,
                        "{what}: remainders"
                    );
                    for (a, b) in state.moments.iter().zip(&expected.moments) {
                        assert!(bits(a) == bits(b), "{what}: moments");
                    }
                }
            }
        }
    }

    /// Moments cannot come later where they depend on the weights before the step.
    #[test]
    fn two_passes_refuse_an_l2_penalty() {
        let settings = StepSettings::new(1, 1e-3);
        let step = |rule: Adam| {
            let (mut first, mut second) = ([0.0; 16], [0.0; 16]);
            let slabs = SplitMomentSlabs {
                grad: Floats::BF16(&[bf16::ONE; 16]),
                moments: SplitAdamMoments::F32([&mut first, &mut second]),
            };
            rule.step_split_moments(settings, slabs)
        };
        assert!(step(Adam::default()).is_ok());
        let penalty = Adam {
            weight_decay: 0.1,
            ..Adam::default()
        };
        let error = step(penalty).unwrap_err().to_string();
        assert!(error.contains("L2 penalty"), "{error}");
    }

    /// `amsgrad`, slabs of another length and random bits from within a block of them are refused.
    #[test]
    fn what_does_not_fit_is_refused() {
        let one = Threads::new(Some(1)).unwrap();
        let step = |amsgrad, len: usize, first| {
            let rule = AdamW {
                amsgrad,
                ..AdamW::default()
            };
            let mut weights = vec![bf16::ONE; 32];
            let mut remainders = vec![0; remainder_bytes(32) / 2];
            let mut values = [vec![bf16::ZERO; len], vec![bf16::ZERO; len]];
            let moments = values.each_mut().map(|values| RandomMoment {
                values,
                key: key(0),
                first,
            });
            let slabs = SplitAdamSlabs {
                grad: Floats::BF16(&[bf16::ONE; 32]),
                newest: None,
                weights: &mut weights,
                remainders: RemaindersMut::of_words(&mut remainders, 32).unwrap(),
                moments: SplitAdamMoments::Bf16(moments),
            };
            rule.step_split(&one, StepSettings::new(1, 1e-3), slabs)
        };
        assert!(step(false, 32, 8).is_ok());
        assert!(step(true, 32, 8).is_err());
        assert!(step(false, 31, 8).is_err());
        assert!(step(false, 32, 4).is_err());
    }
}
