//! Updates whose weights come first and whose moments come later.
//!
//! At lag 0 the next forward waits for weights, and nothing waits for moments before the next update.
//! A first pass writes weights and remainders, and the version is published; a second pass over the
//! same gradients writes the moments, beside the next backward. Both passes together move a third more
//! memory than one, of which the forward waits for half.
//!
//! Refused: rules other than those of [`Rule::leaves_moments`], and weights without remainders. Such
//! parameters are updated whole in the first pass, and so are pieces with elements that kept their
//! values.
//!
//! # Invariants
//! - The bits are those of one pass.
//! - Guards of moments and gradients are taken before the first pass and kept until the second has
//!   ended, so it cannot fail for want of them, and what reads moments waits for those of this step.
//! - The gradients of the next step land when the second pass has read those of this one
//!   ([`MomentsTicket`]).

use std::ops::Range;

use roundpipe_tensor::DType;
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{CHUNK, WeightsStep};

use super::Apply;
use super::open::{OpenLayer, OpenParam, each_part, open_moments, summed};
use super::pass::{OpenMoment, OpenSlabs, RulePass, chunks_of_moments, ranges_of_moments};
use crate::error::Result;
use crate::optim::{MomentType, Rule};
use crate::planted;
use crate::store::{Store, StoredParam};
use crate::version::{Abort, MomentsTicket};

/// A layer whose weights are published and whose moments are still to be written.
pub struct LateMoments<'a> {
    store: &'a Store,
    layer: usize,
    params: Vec<LateParam<'a>>,
    ticket: MomentsTicket,
}

/// The moments of one parameter.
pub(super) struct LateParam<'a> {
    stored: &'a StoredParam,
    pass: RulePass,
    grads: Vec<(DType, HostRef)>,
    moments: Vec<HostMut>,
    moment_type: MomentType,
    /// Elements whose moments are there, in ascending order; mostly none.
    written: Vec<Range<usize>>,
}

/// A parameter while its weights are updated.
struct OpenedParam<'a> {
    pass: &'a RulePass,
    grads: &'a [(DType, HostRef)],
    slabs: OpenSlabs<'a>,
}

/// A piece of it, for one thread.
struct WeightsPart<'a> {
    pass: &'a RulePass,
    grads: &'a [(DType, HostRef)],
    range: Range<usize>,
    slabs: OpenSlabs<'a>,
}

/// A parameter while its moments are written.
struct OpenedMoments<'a> {
    pass: &'a RulePass,
    grads: &'a [(DType, HostRef)],
    written: &'a [Range<usize>],
    len: usize,
    moments: Vec<OpenMoment<'a>>,
}

/// A piece of it, for one thread.
struct MomentsPart<'a> {
    pass: &'a RulePass,
    grads: &'a [(DType, HostRef)],
    written: &'a [Range<usize>],
    range: Range<usize>,
    moments: Vec<OpenMoment<'a>>,
}

impl Store {
    /// As [`Store::apply`], with the moments left for later where that is possible. The gradients
    /// count as read only then.
    ///
    /// # Errors
    /// As [`Store::apply`].
    pub fn apply_weights(
        &self,
        layer: usize,
        apply: &Apply,
        abort: &Abort,
    ) -> Result<(bool, Option<LateMoments<'_>>)> {
        let rule = self.rule_or_refuse()?;
        let mut open = self.open(layer, apply.next_version, abort)?;
        let (kept, late) = open.update_weights(self, rule, apply)?;
        Ok((kept, self.finish_weights(open, late)?))
    }

    /// Publishes a layer's weights, and keeps what its moments need.
    pub(super) fn finish_weights<'a>(
        &'a self,
        open: OpenLayer<'a>,
        params: Vec<LateParam<'a>>,
    ) -> Result<Option<LateMoments<'a>>> {
        let layer = open.layer;
        let ticket = self.close(open)?;
        if params.is_empty() {
            ticket.publish();
            return Ok(None);
        }
        Ok(Some(LateMoments {
            store: self,
            layer,
            params,
            ticket: ticket.publish_weights(),
        }))
    }
}

impl<'a> OpenLayer<'a> {
    /// Updates the weights; whether some elements kept their value, and the moments that are left.
    fn update_weights(
        &mut self,
        store: &Store,
        rule: Rule,
        apply: &Apply,
    ) -> Result<(bool, Vec<LateParam<'a>>)> {
        let mut kept = false;
        let mut late = Vec::new();
        let mut waiting = Vec::new();
        for param in &mut self.params {
            let group = apply.groups.of(param.stored.home);
            if param.leaves_moments(rule, group) {
                let pass = param.rule_pass(rule, apply.settings(), group);
                let grads = std::mem::take(&mut param.grads);
                late.push(LateParam::new(param, pass, grads));
                waiting.push(param);
            } else {
                kept |= param.update(store, rule, apply.settings(), group)?;
            }
        }
        let mut opened = Vec::new();
        for (late, param) in late.iter_mut().zip(waiting) {
            opened.push(late.open(param, store.moment_seed())?);
        }
        // Chunks of all parameters together: at the end of each by itself, threads would wait for
        // the last one.
        let (mut places, mut parts) = (Vec::new(), Vec::new());
        for (index, param) in opened.iter_mut().enumerate() {
            for part in param.parts() {
                places.push((index, part.range.clone()));
                parts.push(part);
            }
        }
        let threads = &store.shared.threads;
        let steps = each_part(threads, parts.into_iter(), |one, _, part| part.run(one))?;
        drop(opened);
        for ((index, range), step) in places.into_iter().zip(steps) {
            kept |= step.kept;
            if !step.moments_left {
                late[index].written.push(range);
            }
        }
        Ok((kept, late))
    }
}

impl<'a> LateParam<'a> {
    /// Takes the moments of an open parameter, none of which is written yet.
    pub(super) fn new(
        param: &mut OpenParam<'a>,
        pass: RulePass,
        grads: Vec<(DType, HostRef)>,
    ) -> Self {
        Self {
            stored: param.stored,
            pass,
            grads,
            moments: std::mem::take(&mut param.moments),
            moment_type: param.moment_type,
            written: Vec::new(),
        }
    }

    /// The same of a table, with the elements whose moments are written.
    pub(super) fn with_written(self, mut written: Vec<Range<usize>>) -> Self {
        written.sort_unstable_by_key(|range| range.start);
        Self { written, ..self }
    }

    fn open<'p>(&'p mut self, param: &'p mut OpenParam<'a>, seed: u64) -> Result<OpenedParam<'p>> {
        let mut slabs = param.slabs(&self.pass, seed)?;
        // Its moments were taken from it, to stay when it is closed.
        slabs.moments = open_moments(
            self.stored,
            self.moment_type,
            &mut self.moments,
            &self.pass,
            seed,
        );
        Ok(OpenedParam {
            pass: &self.pass,
            grads: &self.grads,
            slabs,
        })
    }

    fn open_moments(&mut self, seed: u64) -> OpenedMoments<'_> {
        let (pass, memory) = (&self.pass, &mut self.moments);
        OpenedMoments {
            grads: &self.grads,
            written: &self.written,
            len: self.stored.shape.numel(),
            moments: open_moments(self.stored, self.moment_type, memory, pass, seed),
            pass,
        }
    }
}

impl OpenedParam<'_> {
    fn parts(&mut self) -> impl Iterator<Item = WeightsPart<'_>> {
        let len = self.slabs.weights.len();
        let (pass, grads) = (self.pass, self.grads);
        let chunks = self.slabs.chunks(CHUNK).enumerate();
        chunks.map(move |(i, slabs)| WeightsPart {
            pass,
            grads,
            range: i * CHUNK..len.min((i + 1) * CHUNK),
            slabs,
        })
    }
}

impl WeightsPart<'_> {
    fn run(self, one: &Threads) -> Result<WeightsStep> {
        let mut sum = Vec::new();
        let grad = summed(one, self.grads, self.range, &mut sum)?;
        self.pass.run_weights(one, grad, self.slabs)
    }
}

impl LateMoments<'_> {
    /// Whose they are.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The last layer whose gradients are read again: they land first in the next backward.
    pub fn last_user(&self) -> usize {
        let users = self.params.iter().flat_map(|param| &param.stored.users);
        users.map(|(layer, _)| *layer).max().unwrap_or(0)
    }

    /// Writes the moments and takes the gradients as read.
    ///
    /// # Errors
    /// When the system has no memory for a sum of gradients.
    pub fn write(mut self) -> Result<()> {
        if planted::forgets_late_moments() {
            return Ok(());
        }
        let seed = self.store.moment_seed();
        let opened = self.params.iter_mut();
        let mut opened: Vec<_> = opened.map(|param| param.open_moments(seed)).collect();
        let parts = opened.iter_mut().flat_map(OpenedMoments::parts);
        let threads = &self.store.shared.threads;
        each_part(threads, parts, |one, _, part| part.run(one))?;
        drop(opened);
        // The guards before the ticket: who waits for it finds the gradients free.
        drop(self.params);
        drop(self.ticket);
        Ok(())
    }
}

impl OpenedMoments<'_> {
    fn parts(&mut self) -> impl Iterator<Item = MomentsPart<'_>> {
        let (pass, grads, written, len) = (self.pass, self.grads, self.written, self.len);
        let chunks = chunks_of_moments(&mut self.moments, CHUNK).enumerate();
        chunks.map(move |(i, moments)| MomentsPart {
            pass,
            grads,
            written,
            range: i * CHUNK..len.min((i + 1) * CHUNK),
            moments,
        })
    }
}

impl MomentsPart<'_> {
    fn run(mut self, one: &Threads) -> Result<()> {
        let mut start = self.range.start;
        let first = self.written.partition_point(|range| range.end <= start);
        for written in &self.written[first..] {
            if written.start >= self.range.end {
                break;
            }
            self.write(one, start..written.start)?;
            start = written.end;
        }
        self.write(one, start..self.range.end)
    }

    fn write(&mut self, one: &Threads, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let first = self.range.start;
        let here = range.start - first..range.end - first;
        let mut moments = ranges_of_moments(&mut self.moments, &here);
        let mut sum = Vec::new();
        let grad = summed(one, self.grads, range, &mut sum)?;
        self.pass.run_moments(one, grad, &mut moments)
    }
}
