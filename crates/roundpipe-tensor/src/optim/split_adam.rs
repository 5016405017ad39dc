//! Adam and AdamW over masters that are kept as weights and remainders, in one pass.
//!
//! The formulas are those of module `adam`; a block's masters are joined in the registers of the
//! pass and split there again. So an update moves 26 1/4 bytes per parameter with bf16 gradients,
//! where the pass over f32 copies moves 28. Moments are f32, or bf16 rounded at random, whose random
//! bits are drawn for 512 elements at a time.
//!
//! # Invariants
//! - The bits are those of [`join`](super::join), the pass over f32 slabs, [`split`](super::split)
//!   and, for bf16, [`round_randomly`](super::round_randomly), one after the other.

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
}

impl AdamRule {
    pub(super) fn step_split_with(
        &self,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        slabs: SplitAdamSlabs<'_>,
    ) -> Result<bool> {
        self.check()?;
        settings.check(OP)?;
        if self.settings.amsgrad {
            return Err(Error::invalid(OP, "amsgrad needs f32 masters"));
        }
        let SplitAdamSlabs {
            grad,
            newest,
            weights,
            remainders,
            moments,
        } = slabs;
        let split = SplitSlabs {
            newest,
            weights,
            remainders,
        };
        split.check_len(OP, grad.len())?;
        moments.check(grad.len())?;
        let run = SplitRun {
            isa,
            threads,
            factors: self.factors(settings),
        };
        Ok(with_slice!(Floats, grad, grad => match moments {
            SplitAdamMoments::F32(moments) => run.with_f32(grad, split, moments),
            SplitAdamMoments::Bf16(moments) => run.with_bf16(grad, split, moments),
        }))
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
    fn with_f32<G: SlabElement>(
        &self,
        grad: &[G],
        mut split: SplitSlabs<'_>,
        [exp_avg, exp_avg_sq]: [&mut [f32]; 2],
    ) -> bool {
        let chunks = grad
            .chunks(CHUNK)
            .zip(split.chunks())
            .zip(exp_avg.chunks_mut(CHUNK))
            .zip(exp_avg_sq.chunks_mut(CHUNK))
            .map(|(((grad, split), exp_avg), exp_avg_sq)| SplitPass {
                factors: self.factors,
                grad,
                split,
                moments: [exp_avg, exp_avg_sq],
            });
        any(self.threads, chunks, |pass| self.isa.run(pass))
    }

    fn with_bf16<G: SlabElement>(
        &self,
        grad: &[G],
        mut split: SplitSlabs<'_>,
        [exp_avg, exp_avg_sq]: [RandomMoment<'_>; 2],
    ) -> bool {
        let chunks = grad
            .chunks(CHUNK)
            .zip(split.chunks())
            .zip(exp_avg.chunks())
            .zip(exp_avg_sq.chunks())
            .map(|(((grad, split), exp_avg), exp_avg_sq)| SplitPass {
                factors: self.factors,
                grad,
                split,
                moments: [exp_avg, exp_avg_sq],
            });
        any(self.threads, chunks, |pass| self.isa.run(pass))
    }
}

/// One chunk.
struct SplitPass<'a, G, M> {
    factors: AdamFactors,
    grad: &'a [G],
    split: SplitSlabs<'a>,
    moments: [M; 2],
}

impl<G: SlabElement> SlabPass for SplitPass<'_, G, &mut [f32]> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = AdamUpdate::new(s, self.factors);
        let [m, v] = self.moments;
        let (grad, grad_rest) = self.grad.as_chunks();
        let (m, m_rest) = m.as_chunks_mut();
        let (v, v_rest) = v.as_chunks_mut();
        let (mut split, split_rest) = self.split.blocks();
        let mut kept = false;
        for (i, ((grad, m), v)) in grad.iter().zip(m).zip(v).enumerate() {
            kept |= step_block(&update, LANES, grad, split.at(i), m, v);
        }
        if grad_rest.is_empty() {
            return kept;
        }
        // The last elements as a block of their own; what lies beyond them is thrown away.
        let len = grad_rest.len();
        let grad = padded(grad_rest);
        let (mut m, mut v) = (padded(m_rest), padded(v_rest));
        let mut split = split_rest.padded();
        kept |= step_block(&update, len, &grad, split.block(), &mut m, &mut v);
        split_rest.copy_from(&split);
        m_rest.copy_from_slice(&m[..len]);
        v_rest.copy_from_slice(&v[..len]);
        kept
    }
}

/// Blocks whose random bits are drawn at once.
const DRAWN: usize = 32;

impl<G: SlabElement> SlabPass for SplitPass<'_, G, RandomMoment<'_>> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let update = AdamUpdate::new(s, self.factors);
        let [m, v] = self.moments;
        let (m_random, v_random) = ((m.key, m.first), (v.key, v.first));
        let (grad, grad_rest) = self.grad.as_chunks();
        let (m, m_rest) = m.values.as_chunks_mut();
        let (v, v_rest) = v.values.as_chunks_mut();
        let (mut split, split_rest) = self.split.blocks();
        let blocks = grad.len();
        let mut m_bits = [[0; LANES]; DRAWN];
        let mut v_bits = [[0; LANES]; DRAWN];
        let mut kept = false;
        for (i, ((grad, m), v)) in grad.iter().zip(m).zip(v).enumerate() {
            if i % DRAWN == 0 {
                draw(m_random, i, &mut m_bits);
                draw(v_random, i, &mut v_bits);
            }
            let bits = [&m_bits[i % DRAWN], &v_bits[i % DRAWN]];
            kept |= step_random(&update, LANES, grad, split.at(i), [m, v], bits);
        }
        if grad_rest.is_empty() {
            return kept;
        }
        let len = grad_rest.len();
        let grad = padded(grad_rest);
        let (mut m, mut v) = (padded(m_rest), padded(v_rest));
        let mut split = split_rest.padded();
        draw(m_random, blocks, &mut m_bits);
        draw(v_random, blocks, &mut v_bits);
        let bits = [&m_bits[0], &v_bits[0]];
        kept |= step_random(&update, len, &grad, split.block(), [&mut m, &mut v], bits);
        split_rest.copy_from(&split);
        m_rest.copy_from_slice(&m[..len]);
        v_rest.copy_from_slice(&v[..len]);
        kept
    }
}

/// The random bits of [`DRAWN`] blocks, from block `at` of a moment on.
#[inline(always)]
fn draw((key, first): (RngKey, u64), at: usize, bits: &mut [[u16; LANES]; DRAWN]) {
    let element = first + (at * LANES) as u64;
    let (blocks, _) = bits.as_flattened_mut().as_chunks_mut();
    key.fill_halves(element / 8, blocks);
}

/// A block with f32 moments.
#[inline(always)]
fn step_block<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    mut split: SplitBlock<'_>,
    m: &mut [f32; LANES],
    v: &mut [f32; LANES],
) -> bool {
    let s = update.s;
    match step_simple(update, grad, &mut split, [s.load(m), s.load(v)]) {
        Some([first, second]) => {
            s.store(first, m);
            s.store(second, v);
            false
        }
        None => step_any(update, live, grad, split, m, v),
    }
}

/// A block with moments in bf16.
#[inline(always)]
fn step_random<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    mut split: SplitBlock<'_>,
    [m, v]: [&mut [bf16; LANES]; 2],
    bits: [&[u16; LANES]; 2],
) -> bool {
    let s = update.s;
    let old = [s.load_bf16(m), s.load_bf16(v)];
    let mut kept = false;
    let [first, second] = match step_simple(update, grad, &mut split, old) {
        Some(new) => new,
        None => {
            let (mut wide_m, mut wide_v) = ([0.0; LANES], [0.0; LANES]);
            s.store(old[0], &mut wide_m);
            s.store(old[1], &mut wide_v);
            kept = step_any(update, live, grad, split, &mut wide_m, &mut wide_v);
            [s.load(&wide_m), s.load(&wide_v)]
        }
    };
    s.store_bf16_random(first, bits[0], m);
    s.store_bf16_random(second, bits[1], v);
    kept
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

/// Any block: joins its masters, updates them and splits them again.
#[inline(always)]
fn step_any<S: Simd, G: SlabElement>(
    update: &AdamUpdate<S>,
    live: usize,
    grad: &[G; LANES],
    split: SplitBlock<'_>,
    m: &mut [f32; LANES],
    v: &mut [f32; LANES],
) -> bool {
    seldom();
    let s = update.s;
    let mut p = [0.0; LANES];
    s.store(split.load(s), &mut p);
    let state = AdamBlock {
        p: &mut p,
        m,
        v,
        x: None,
    };
    let kept = update.block(live, grad, state, Some(&mut *split.weights));
    split.store_remainders(s, s.load(&p));
    kept
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
        AdamRule, AdamW, RandomMoment, RemaindersMut, RngKey, SplitAdamMoments, SplitAdamSlabs,
        StepSettings, Threads, bf16,
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
