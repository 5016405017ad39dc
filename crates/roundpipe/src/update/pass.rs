//! The rule's pass over a parameter, whatever its master and moments are kept in.
//!
//! A rule computes with f32 masters and moments. Where they are kept otherwise (masters as bf16
//! weights and remainders, moments in bf16 or in 8 bits), a piece of them is widened, updated and
//! narrowed again while it is in a core's first cache. Adam and AdamW with moments in f32 or bf16 do
//! so in the registers of their own pass (`step_split`), which may also write the weights first and
//! the moments later. Rules that look at whole matrices have the whole parameter as one piece, which
//! takes 4 bytes per element and kind while it is updated.
//!
//! # Invariants
//! - An element's new value does not depend on how its parameter is cut.
//! - Masters lose no bit; moments in fewer bits are narrowed once per update.

use std::ops::Range;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::HostMut;
use roundpipe_tensor::optim::{
    self, BLOCK, DynamicMap, Floats, FloatsMut, RandomMoment, RemaindersMut, SplitAdamMoments,
    SplitAdamSlabs, SplitMomentSlabs, StepSettings, WeightsStep,
};
use roundpipe_tensor::{RngKey, RngSite, Shape, bf16};

use crate::error::Result;
use crate::optim::{Rule, Slabs};

/// Elements of a piece: whole blocks of 8-bit codes, few enough for a core's first cache.
const PIECE: usize = 1 << 12;

/// What the rule's pass writes: of a parameter, or of a chunk of one.
pub(super) struct OpenSlabs<'a> {
    pub weights: FloatsMut<'a>,
    pub master: OpenMaster<'a>,
    pub moments: Vec<OpenMoment<'a>>,
}

/// Where the values are that a pass starts from.
pub(super) enum OpenMaster<'a> {
    /// The weights are their own.
    Weights,
    /// An f32 copy.
    Copy(&'a mut [f32]),
    /// The weights and what they lack.
    Remainder {
        /// Where the next version lies in another slab.
        newest: Option<&'a [bf16]>,
        remainders: RemaindersMut<'a>,
    },
}

/// One of the rule's moments.
pub(super) enum OpenMoment<'a> {
    /// In the type of the master.
    Plain(FloatsMut<'a>),
    /// In bf16, rounded at random.
    Random {
        values: &'a mut [bf16],
        key: RngKey,
        /// The number of the first element in the parameter.
        first: u64,
    },
    /// In 8 bits.
    Codes {
        codes: &'a mut [u8],
        scales: &'a mut [f32],
        map: DynamicMap,
    },
}

impl OpenSlabs<'_> {
    /// Whether the rule can write them as they are.
    pub fn are_plain(&self) -> bool {
        let is_wide = match &self.master {
            OpenMaster::Copy(_) => true,
            OpenMaster::Weights => matches!(self.weights, FloatsMut::F32(_)),
            OpenMaster::Remainder { .. } => false,
        };
        let is_f32 =
            |moment: &OpenMoment<'_>| matches!(moment, OpenMoment::Plain(FloatsMut::F32(_)));
        is_wide && self.moments.iter().all(is_f32)
    }

    /// In pieces of `len` elements, whole blocks of 8-bit codes, for rules whose moments are all as
    /// long as the weights.
    pub fn chunks(&mut self, len: usize) -> impl Iterator<Item = OpenSlabs<'_>> {
        let mut moments = chunks_of_moments(&mut self.moments, len);
        let chunks = self.weights.chunks(len).zip(self.master.chunks(len));
        chunks.map(move |(weights, master)| OpenSlabs {
            weights,
            master,
            moments: moments.next().unwrap_or_default(),
        })
    }

    /// To Adam's pass that joins and splits masters itself; `None` where there is nothing to join, and
    /// for moments that it does not take.
    fn split<'s>(&'s mut self, grad: Floats<'s>) -> Option<SplitAdamSlabs<'s>> {
        let OpenMaster::Remainder { newest, remainders } = &mut self.master else {
            return None;
        };
        let FloatsMut::BF16(weights) = &mut self.weights else {
            return None;
        };
        Some(SplitAdamSlabs {
            grad,
            newest: *newest,
            remainders: remainders.range(0..weights.len()),
            weights,
            moments: split_moments(&mut self.moments)?,
        })
    }

    /// Some elements, from a multiple of 16 on, for rules as above and moments of no blocks.
    pub fn range(&mut self, range: Range<usize>) -> OpenSlabs<'_> {
        OpenSlabs {
            weights: self.weights.range(range.clone()),
            master: self.master.range(range.clone()),
            moments: ranges_of_moments(&mut self.moments, &range),
        }
    }
}

/// Moments in pieces of `len` elements, those of one piece together.
pub(super) fn chunks_of_moments<'m>(
    moments: &'m mut [OpenMoment<'_>],
    len: usize,
) -> impl Iterator<Item = Vec<OpenMoment<'m>>> {
    let moments = moments.iter_mut();
    let mut moments: Vec<_> = moments.map(|moment| moment.chunks(len)).collect();
    std::iter::from_fn(move || {
        let next: Vec<_> = moments.iter_mut().filter_map(Iterator::next).collect();
        (!next.is_empty()).then_some(next)
    })
}

/// Some elements of each moment.
pub(super) fn ranges_of_moments<'m>(
    moments: &'m mut [OpenMoment<'_>],
    range: &Range<usize>,
) -> Vec<OpenMoment<'m>> {
    let moments = moments.iter_mut();
    moments.map(|moment| moment.range(range.clone())).collect()
}

/// The moments of Adam's pass that joins and splits masters itself, in the types that it takes.
fn split_moments<'m>(moments: &'m mut [OpenMoment<'_>]) -> Option<SplitAdamMoments<'m>> {
    match moments {
        [
            OpenMoment::Plain(FloatsMut::F32(first)),
            OpenMoment::Plain(FloatsMut::F32(second)),
        ] => Some(SplitAdamMoments::F32([first, second])),
        [first, second] => Some(SplitAdamMoments::Bf16([
            first.as_random()?,
            second.as_random()?,
        ])),
        _ => None,
    }
}

impl OpenMaster<'_> {
    fn chunks(&mut self, len: usize) -> Box<dyn Iterator<Item = OpenMaster<'_>> + '_> {
        match self {
            Self::Weights => Box::new(std::iter::repeat_with(|| OpenMaster::Weights)),
            Self::Copy(master) => Box::new(master.chunks_mut(len).map(OpenMaster::Copy)),
            Self::Remainder { newest, remainders } => {
                let mut newest = newest.map(|newest| newest.chunks(len));
                let chunks = remainders.chunks(len).map(move |remainders| {
                    let newest = newest.as_mut().and_then(Iterator::next);
                    OpenMaster::Remainder { newest, remainders }
                });
                Box::new(chunks)
            }
        }
    }

    fn range(&mut self, range: Range<usize>) -> OpenMaster<'_> {
        match self {
            Self::Weights => OpenMaster::Weights,
            Self::Copy(master) => OpenMaster::Copy(&mut master[range]),
            Self::Remainder { newest, remainders } => OpenMaster::Remainder {
                newest: newest.map(|newest| &newest[range.clone()]),
                remainders: remainders.range(range),
            },
        }
    }
}

impl<'a> OpenMoment<'a> {
    /// Moments in bf16; `index` is the parameter's in its layer.
    pub fn random(memory: &'a mut [HostMut], site: RngSite, index: usize) -> Vec<Self> {
        let open = |(i, memory): (usize, &'a mut HostMut)| Self::Random {
            values: memory.as_mut_slice(),
            key: RngSite {
                // No rule has more than four.
                site: (4 * index + i) as u32,
                ..site
            }
            .key(),
            first: 0,
        };
        memory.iter_mut().enumerate().map(open).collect()
    }

    /// Moments in 8 bits: the codes of each, then its scales. Only the first of a rule has a sign.
    pub fn codes(memory: &'a mut [HostMut]) -> Vec<Self> {
        let (pairs, _) = memory.as_chunks_mut();
        let open = |(i, [codes, scales]): (usize, &'a mut [HostMut; 2])| Self::Codes {
            codes: codes.bytes(),
            scales: scales.as_mut_slice(),
            map: if i == 0 {
                DynamicMap::Signed
            } else {
                DynamicMap::Unsigned
            },
        };
        pairs.iter_mut().enumerate().map(open).collect()
    }

    fn chunks(&mut self, len: usize) -> Box<dyn Iterator<Item = OpenMoment<'_>> + '_> {
        match self {
            Self::Plain(values) => Box::new(values.chunks(len).map(OpenMoment::Plain)),
            Self::Random { values, key, first } => {
                let (key, first) = (*key, *first);
                let chunks = values.chunks_mut(len).enumerate();
                Box::new(chunks.map(move |(i, values)| OpenMoment::Random {
                    values,
                    key,
                    first: first + (i * len) as u64,
                }))
            }
            Self::Codes { codes, scales, map } => {
                let map = *map;
                let chunks = codes.chunks_mut(len).zip(scales.chunks_mut(len / BLOCK));
                Box::new(chunks.map(move |(codes, scales)| OpenMoment::Codes {
                    codes,
                    scales,
                    map,
                }))
            }
        }
    }

    /// Some elements, whole blocks of 8-bit codes.
    pub fn range(&mut self, range: Range<usize>) -> OpenMoment<'_> {
        match self {
            Self::Plain(values) => OpenMoment::Plain(values.range(range)),
            Self::Random { values, key, first } => OpenMoment::Random {
                key: *key,
                first: *first + range.start as u64,
                values: &mut values[range],
            },
            Self::Codes { codes, scales, map } => OpenMoment::Codes {
                scales: &mut scales[blocks(&range)],
                codes: &mut codes[range],
                map: *map,
            },
        }
    }

    /// To a pass that rounds at random itself.
    fn as_random(&mut self) -> Option<RandomMoment<'_>> {
        match self {
            Self::Random { values, key, first } => Some(RandomMoment {
                values,
                key: *key,
                first: *first,
            }),
            _ => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Plain(values) => values.len(),
            Self::Random { values, .. } => values.len(),
            Self::Codes { codes, .. } => codes.len(),
        }
    }

    /// Its elements that belong to a piece of a parameter of `len` elements. Those of a matrix may
    /// have sizes of their own, and then the piece is the parameter.
    fn part(&self, piece: &Range<usize>, len: usize) -> Range<usize> {
        if self.len() == len {
            piece.clone()
        } else {
            0..self.len()
        }
    }

    /// Writes elements as f32, unless they are.
    fn widen(&self, threads: &Threads, range: Range<usize>, into: &mut [f32]) -> Result<()> {
        match self {
            Self::Plain(FloatsMut::F32(_)) => {}
            Self::Plain(narrow) => {
                let values = narrow.as_floats();
                optim::cast(threads, values.range(range), FloatsMut::F32(into))?;
            }
            Self::Random { values, .. } => {
                let values = Floats::BF16(&values[range]);
                optim::cast(threads, values, FloatsMut::F32(into))?;
            }
            Self::Codes { codes, scales, map } => {
                let scales = &scales[blocks(&range)];
                optim::dequantize(threads, *map, &codes[range], scales, into)?;
            }
        }
        Ok(())
    }

    /// Takes new values back, unless they are in place. Whether one kept what it had because the new
    /// one was not finite.
    fn narrow(&mut self, threads: &Threads, range: Range<usize>, new: &[f32]) -> Result<bool> {
        match self {
            Self::Plain(FloatsMut::F32(_)) => return Ok(false),
            Self::Plain(narrow) => return Ok(optim::narrow(threads, new, narrow.range(range))?),
            Self::Random { values, key, first } => {
                let at = *first + range.start as u64;
                optim::round_randomly(threads, *key, at, new, &mut values[range])?;
            }
            Self::Codes { codes, scales, map } => {
                let scales = &mut scales[blocks(&range)];
                optim::quantize(threads, *map, new, &mut codes[range], scales)?;
            }
        }
        Ok(false)
    }
}

/// The blocks of elements, from a whole one on.
fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// The rule's pass over one parameter, or over chunks of it.
pub(super) struct RulePass {
    pub rule: Rule,
    pub settings: StepSettings,
    pub shape: Shape,
}

impl RulePass {
    /// Runs it; whether some elements kept their value because the new one was not finite.
    pub fn run(
        &self,
        threads: &Threads,
        grad: Floats<'_>,
        mut slabs: OpenSlabs<'_>,
    ) -> Result<bool> {
        if let Some(kept) = self.run_split(threads, grad, &mut slabs)? {
            return Ok(kept);
        }
        let len = slabs.weights.len();
        let in_pieces = self.rule.is_elementwise() && !slabs.are_plain();
        let piece = if in_pieces { len.min(PIECE) } else { len };
        let mut wide = Wide::new(&slabs, piece);
        let mut kept = false;
        for start in (0..len).step_by(piece.max(1)) {
            let range = start..len.min(start + piece);
            kept |= self.run_piece(
                threads,
                grad.range(range.clone()),
                range,
                &mut slabs,
                &mut wide,
            )?;
        }
        Ok(kept)
    }

    /// Adam's pass over weights and remainders, which joins and splits masters itself; `None` for
    /// other rules and for moments that it does not take.
    fn run_split(
        &self,
        threads: &Threads,
        grad: Floats<'_>,
        slabs: &mut OpenSlabs<'_>,
    ) -> Result<Option<bool>> {
        let Some(slabs) = slabs.split(grad) else {
            return Ok(None);
        };
        let kept = match self.rule {
            Rule::Adam(rule) => rule.step_split(threads, self.settings, slabs)?,
            Rule::AdamW(rule) => rule.step_split(threads, self.settings, slabs)?,
            _ => return Ok(None),
        };
        Ok(Some(kept))
    }

    /// The part that the weights need of a chunk whose moments may come later
    /// ([`Rule::leaves_moments`]); one thread's.
    pub fn run_weights(
        &self,
        one: &Threads,
        grad: Floats<'_>,
        mut slabs: OpenSlabs<'_>,
    ) -> Result<WeightsStep> {
        let len = slabs.weights.len();
        if slabs.split(grad).is_some() {
            return self.step_weights(grad, &mut slabs);
        }
        let mut wide = Wide::new(&slabs, len.min(PIECE));
        let mut all = WeightsStep {
            kept: false,
            moments_left: true,
        };
        for range in pieces(len) {
            let grad_here = grad.range(range.clone());
            if !all.moments_left {
                all.kept |= self.run_piece(one, grad_here, range, &mut slabs, &mut wide)?;
                continue;
            }
            wide.moments.widen(one, &range, &slabs.moments, len)?;
            let step = self.step_weights(grad_here, &mut wide.piece(&range, &mut slabs))?;
            all.kept |= step.kept;
            if step.moments_left {
                continue;
            }
            // This piece has its moments, those before it have not.
            wide.moments.narrow(one, &range, &mut slabs.moments, len)?;
            let before = 0..range.start;
            let mut moments = ranges_of_moments(&mut slabs.moments, &before);
            self.run_moments(one, grad.range(before), &mut moments)?;
            all.moments_left = false;
        }
        Ok(all)
    }

    /// The moments of a chunk, of which [`RulePass::run_weights`] has left them.
    pub fn run_moments(
        &self,
        one: &Threads,
        grad: Floats<'_>,
        moments: &mut [OpenMoment<'_>],
    ) -> Result<()> {
        if let Some(moments) = split_moments(moments) {
            return self.step_moments(SplitMomentSlabs { grad, moments });
        }
        let len = grad.len();
        let mut wide = MomentPieces::new(moments, len.min(PIECE), len);
        for range in pieces(len) {
            wide.widen(one, &range, moments, len)?;
            let mut here = wide.open(&range, moments, len);
            let moments_here = split_moments(&mut here).expect("they are f32 now");
            self.step_moments(SplitMomentSlabs {
                grad: grad.range(range.clone()),
                moments: moments_here,
            })?;
            wide.narrow(one, &range, moments, len)?;
        }
        Ok(())
    }

    fn step_weights(&self, grad: Floats<'_>, slabs: &mut OpenSlabs<'_>) -> Result<WeightsStep> {
        let slabs = slabs.split(grad).expect("weights have remainders");
        Ok(match self.rule {
            Rule::Adam(rule) => rule.step_split_weights(self.settings, slabs)?,
            Rule::AdamW(rule) => rule.step_split_weights(self.settings, slabs)?,
            _ => unreachable!("`Rule::leaves_moments` looked"),
        })
    }

    fn step_moments(&self, slabs: SplitMomentSlabs<'_>) -> Result<()> {
        match self.rule {
            Rule::Adam(rule) => rule.step_split_moments(self.settings, slabs)?,
            Rule::AdamW(rule) => rule.step_split_moments(self.settings, slabs)?,
            _ => unreachable!("`Rule::leaves_moments` looked"),
        }
        Ok(())
    }

    fn run_piece(
        &self,
        threads: &Threads,
        grad: Floats<'_>,
        range: Range<usize>,
        slabs: &mut OpenSlabs<'_>,
        wide: &mut Wide,
    ) -> Result<bool> {
        let len = slabs.weights.len();
        wide.moments.widen(threads, &range, &slabs.moments, len)?;
        let split = self.run_split(threads, grad, &mut wide.piece(&range, slabs))?;
        if let Some(kept) = split {
            let narrowed = wide
                .moments
                .narrow(threads, &range, &mut slabs.moments, len)?;
            return Ok(kept || narrowed);
        }
        wide.widen_master(threads, &range, slabs)?;
        let (master, working) = match (&mut slabs.master, &mut slabs.weights) {
            (OpenMaster::Weights, FloatsMut::F32(master)) => (&mut master[range.clone()], None),
            (OpenMaster::Weights, _) => (&mut wide.master[..range.len()], None),
            (OpenMaster::Copy(master), weights) => (
                &mut master[range.clone()],
                Some(weights.range(range.clone())),
            ),
            (OpenMaster::Remainder { .. }, weights) => (
                &mut wide.master[..range.len()],
                Some(weights.range(range.clone())),
            ),
        };
        let update = Slabs {
            shape: self.shape,
            grad,
            master,
            moments: wide.moments.slices(&range, &mut slabs.moments, len),
            working,
        };
        let kept = self.rule.update(threads, self.settings, update)?;
        let narrowed = wide.narrow_master(threads, &range, slabs)?
            | wide
                .moments
                .narrow(threads, &range, &mut slabs.moments, len)?;
        Ok(kept || narrowed)
    }
}

/// The pieces of so many elements.
fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..len).step_by(PIECE);
    starts.map(move |start| start..len.min(start + PIECE))
}

/// f32 copies of a piece of what is kept otherwise; empty where it is f32.
struct Wide {
    master: Vec<f32>,
    moments: MomentPieces,
}

impl Wide {
    fn new(slabs: &OpenSlabs<'_>, piece: usize) -> Self {
        let master = match (&slabs.master, &slabs.weights) {
            (OpenMaster::Copy(_), _) | (OpenMaster::Weights, FloatsMut::F32(_)) => 0,
            _ => piece,
        };
        Self {
            master: vec![0.0; master],
            moments: MomentPieces::new(&slabs.moments, piece, slabs.weights.len()),
        }
    }

    /// A piece with its moments as they were widened.
    fn piece<'p>(
        &'p mut self,
        range: &Range<usize>,
        slabs: &'p mut OpenSlabs<'_>,
    ) -> OpenSlabs<'p> {
        let len = slabs.weights.len();
        OpenSlabs {
            weights: slabs.weights.range(range.clone()),
            master: slabs.master.range(range.clone()),
            moments: self.moments.open(range, &mut slabs.moments, len),
        }
    }

    fn widen_master(
        &mut self,
        threads: &Threads,
        range: &Range<usize>,
        slabs: &OpenSlabs<'_>,
    ) -> Result<()> {
        let master = self.master.get_mut(..range.len()).unwrap_or_default();
        match (&slabs.master, &slabs.weights) {
            (OpenMaster::Copy(_), _) | (OpenMaster::Weights, FloatsMut::F32(_)) => {}
            (OpenMaster::Weights, narrow) => {
                let weights = narrow.as_floats().range(range.clone());
                optim::cast(threads, weights, FloatsMut::F32(master))?;
            }
            (OpenMaster::Remainder { newest, remainders }, weights) => {
                let weights = match (newest, weights) {
                    (Some(newest), _) => newest,
                    (None, FloatsMut::BF16(weights)) => &**weights,
                    _ => unreachable!("only bf16 weights have remainders"),
                };
                let remainders = remainders.as_ref().range(range.clone());
                optim::join(threads, &weights[range.clone()], remainders, master)?;
            }
        }
        Ok(())
    }

    /// Takes masters back. Whether an element kept what it had because the new one was not finite.
    fn narrow_master(
        &self,
        threads: &Threads,
        range: &Range<usize>,
        slabs: &mut OpenSlabs<'_>,
    ) -> Result<bool> {
        let master = self.master.get(..range.len()).unwrap_or_default();
        match (&mut slabs.master, &mut slabs.weights) {
            (OpenMaster::Copy(_), _) | (OpenMaster::Weights, FloatsMut::F32(_)) => {}
            (OpenMaster::Weights, narrow) => {
                return Ok(optim::narrow(threads, master, narrow.range(range.clone()))?);
            }
            // The rule has written the weights.
            (OpenMaster::Remainder { remainders, .. }, _) => {
                optim::split(threads, master, None, remainders.range(range.clone()))?;
            }
        }
        Ok(false)
    }
}

/// f32 copies of a piece of each moment that is kept otherwise. `len` is the parameter's length or the
/// chunk's.
struct MomentPieces(Vec<Vec<f32>>);

impl MomentPieces {
    fn new(moments: &[OpenMoment<'_>], piece: usize, len: usize) -> Self {
        let wide = |moment: &OpenMoment<'_>| match moment {
            OpenMoment::Plain(FloatsMut::F32(_)) => Vec::new(),
            _ => vec![0.0; moment.part(&(0..piece), len).len()],
        };
        Self(moments.iter().map(wide).collect())
    }

    fn widen(
        &mut self,
        threads: &Threads,
        range: &Range<usize>,
        moments: &[OpenMoment<'_>],
        len: usize,
    ) -> Result<()> {
        for (moment, wide) in moments.iter().zip(&mut self.0) {
            let part = moment.part(range, len);
            let wide = wide.get_mut(..part.len()).unwrap_or_default();
            moment.widen(threads, part, wide)?;
        }
        Ok(())
    }

    /// Takes a piece back. Whether an element kept what it had because the new one was not finite.
    fn narrow(
        &self,
        threads: &Threads,
        range: &Range<usize>,
        moments: &mut [OpenMoment<'_>],
        len: usize,
    ) -> Result<bool> {
        let mut kept = false;
        for (moment, wide) in moments.iter_mut().zip(&self.0) {
            let part = moment.part(range, len);
            let wide = wide.get(..part.len()).unwrap_or_default();
            kept |= moment.narrow(threads, part, wide)?;
        }
        Ok(kept)
    }

    /// A piece in f32: the copies, or the moments where they are f32.
    fn slices<'p>(
        &'p mut self,
        range: &Range<usize>,
        moments: &'p mut [OpenMoment<'_>],
        len: usize,
    ) -> Vec<&'p mut [f32]> {
        let moments = moments.iter_mut().zip(&mut self.0);
        let slices = moments.map(|(moment, wide)| {
            let part = moment.part(range, len);
            match moment {
                OpenMoment::Plain(FloatsMut::F32(moment)) => &mut moment[part],
                _ => &mut wide[..part.len()],
            }
        });
        slices.collect()
    }

    /// The same as moments of a pass.
    fn open<'p>(
        &'p mut self,
        range: &Range<usize>,
        moments: &'p mut [OpenMoment<'_>],
        len: usize,
    ) -> Vec<OpenMoment<'p>> {
        let slices = self.slices(range, moments, len).into_iter();
        slices
            .map(|slice| OpenMoment::Plain(FloatsMut::F32(slice)))
            .collect()
    }
}
