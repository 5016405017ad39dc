//! Updates of a [`Store`]: gradients in, the next version of the weights out.
//!
//! The path of an update: gradient ranges (summed in f32 where several layers share a parameter,
//! the last layer first) -> one fused pass over master and moments -> working weights in the slab
//! of the next version -> the parameters move there -> the version is published. A parameter
//! without a gradient keeps its value and its state. Weights that the user wrote since the last
//! update are what the next one starts from.
//!
//! Layer by layer as gradients land: [`Store::squares`] (of large ones part by part:
//! [`Store::begin_squares`]) and [`Store::apply`]. The whole model at
//! once: [`Store::step`]. Any function of the user: [`Store::apply_fn`]. A table whose rows are not
//! all needed at once: [`Store::open_table`]. Weights first and moments later:
//! [`Store::apply_weights`].
//!
//! # Invariants
//! - The same gradients give the same bits for any number of threads, any order of layers and one
//!   or two slabs, and those of [`Optimizer`](crate::Optimizer).
//! - A slab that is in use elsewhere stops an update before anything is written.
//! - What was finite stays finite.
//! - [`Store::step`] and [`Store::apply_fn`] update every layer or none; [`Store::apply`] promises
//!   that for its layer alone.

mod function;
mod late;
mod open;
mod pass;
mod table;

use std::collections::HashMap;
use std::ops::Range;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::HostRef;
use roundpipe_tensor::optim::{self, CHUNK, Floats, RemaindersMut, StepSettings};
use roundpipe_tensor::{DType, HostBuf};

use self::function::SplitValue;
pub use self::function::{FunctionReport, OptimHandle, OptimParam, OptimParams};
pub use self::late::LateMoments;
pub(crate) use self::open::each_part;
use self::open::{OpenLayer, OpenParam, each_chunk};
pub(crate) use self::table::OpenTable;
use crate::error::{Error, Result};
use crate::groups::ResolvedGroups;
pub(crate) use crate::optim::{Decision, Update};
use crate::optim::{Rule, StepReport, floats, floats_mut};
use crate::store::{Store, StoreLayer, StoredParam};
use crate::version::{Abort, WriteTicket};

/// One layer's part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Apply {
    /// Which update this is for the rule, from 1 on; skipped ones do not count.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// What stored gradients are multiplied with.
    pub factor: f32,
    /// What stored gradients are clipped to by value, before that.
    pub clip_value: Option<f32>,
    /// The settings of each parameter.
    pub groups: ResolvedGroups,
    /// The version to write, which is the newest plus one.
    pub next_version: u64,
}

/// Squares of chunks of gradients that have not landed whole, by layer and own parameter.
#[derive(Debug, Default)]
pub(crate) struct BegunSquares(HashMap<(usize, usize), Vec<f64>>);

impl Apply {
    /// What it asks of every pass.
    fn settings(&self) -> StepSettings {
        StepSettings {
            step: self.step,
            lr: self.lr,
            clip_value: self.clip_value,
            grad_scale: self.factor,
        }
    }
}

/// The versions that a step by a function is between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionVersions {
    /// The one that its gradients were computed with.
    pub read: u64,
    /// The one to write, which is the newest plus one.
    pub next: u64,
}

impl Store {
    /// The squares of a layer's summed gradients, a number per own parameter that has one and that
    /// `groups` do not freeze, clipped by value first. The global squared norm is the sum of all,
    /// layers in ascending order: [`Store::total`].
    ///
    /// # Errors
    /// When a gradient is being written.
    pub fn squares(
        &self,
        layer: usize,
        groups: &ResolvedGroups,
        clip_value: Option<f32>,
    ) -> Result<Vec<f64>> {
        self.finish_squares(layer, groups, clip_value, &mut BegunSquares::default())
    }

    /// Squares what has landed of a layer's gradients and is not squared yet, in whole chunks.
    /// `landed` gives the bytes of a layer's parameter that are there, from the first on.
    ///
    /// # Errors
    /// As [`Store::squares`].
    pub(crate) fn begin_squares(
        &self,
        layer: usize,
        groups: &ResolvedGroups,
        clip_value: Option<f32>,
        landed: &dyn Fn(usize, usize) -> usize,
        begun: &mut BegunSquares,
    ) -> Result<()> {
        for (index, param) in self.layers()[layer].own_trainable() {
            if groups.of(param.home).frozen || !self.has_values() {
                continue;
            }
            let users = param.users.iter();
            let landed = users.map(|&(layer, index)| {
                let size = self.layers()[layer].params()[index].grad_dtype.size();
                landed(layer, index) / size
            });
            let end = landed.min().unwrap_or(0) / CHUNK * CHUNK;
            let chunks = begun.0.entry((layer, index)).or_default();
            let start = chunks.len() * CHUNK;
            if start < end {
                let mut grads = Vec::new();
                for &(layer, index) in &param.users {
                    grads.extend(self.grad_part(layer, index, start..end)?);
                }
                chunks.extend(squares_of_sum(&self.shared.threads, &grads, clip_value)?);
            }
        }
        Ok(())
    }

    /// [`Store::squares`], of which some chunks are there.
    ///
    /// # Errors
    /// As [`Store::squares`].
    pub(crate) fn finish_squares(
        &self,
        layer: usize,
        groups: &ResolvedGroups,
        clip_value: Option<f32>,
        begun: &mut BegunSquares,
    ) -> Result<Vec<f64>> {
        let mut squares = Vec::new();
        for (index, param) in self.layers()[layer].own_trainable() {
            if groups.of(param.home).frozen || !self.has_values() {
                continue;
            }
            let mut chunks = begun.0.remove(&(layer, index)).unwrap_or_default();
            let left = chunks.len() * CHUNK..param.shape.numel();
            let mut grads = Vec::new();
            for &(layer, index) in &param.users {
                grads.extend(self.filled_part(layer, index, left.clone())?);
            }
            if grads.is_empty() {
                continue;
            }
            chunks.extend(squares_of_sum(&self.shared.threads, &grads, clip_value)?);
            squares.push(chunks.iter().sum());
        }
        Ok(squares)
    }

    /// Elements of a gradient that has landed whole.
    fn filled_part(
        &self,
        layer: usize,
        index: usize,
        range: Range<usize>,
    ) -> Result<Option<(DType, HostRef)>> {
        let here = &self.layers()[layer];
        // Also without a gradient: the first look makes the layer's state from its weights, which an
        // update has closed to readers when it asks for masters.
        here.grad_range(index)?;
        match here.filled(index) {
            true => self.grad_part(layer, index, range),
            false => Ok(None),
        }
    }

    /// Elements of a gradient; `None` for a frozen parameter.
    fn grad_part(
        &self,
        layer: usize,
        index: usize,
        range: Range<usize>,
    ) -> Result<Option<(DType, HostRef)>> {
        let here = &self.layers()[layer];
        let dtype = here.params()[index].grad_dtype;
        let bytes = range.start * dtype.size()..range.end * dtype.size();
        let grad = here.grad_range(index)?;
        let part = grad.map(|grad| grad.read(bytes)).transpose()?;
        Ok(part.map(|part| (dtype, part)))
    }

    /// [`Store::squares`] of every layer, in ascending order.
    ///
    /// # Errors
    /// As [`Store::squares`].
    pub fn all_squares(
        &self,
        groups: &ResolvedGroups,
        clip_value: Option<f32>,
    ) -> Result<Vec<Vec<f64>>> {
        (0..self.layers().len())
            .map(|layer| self.squares(layer, groups, clip_value))
            .collect()
    }

    /// The global squared norm from [`Store::squares`] of every layer, in ascending order.
    pub fn total<'a>(squares: impl IntoIterator<Item = &'a Vec<f64>>) -> f64 {
        // Added one by one, not layer sums: the order of a plain loop over parameters.
        squares
            .into_iter()
            .flatten()
            .fold(0.0, |sum, square| sum + square)
    }

    /// Refuses, before the first layer is touched, what [`Store::apply`] would refuse at some
    /// layer.
    ///
    /// # Errors
    /// [`Error::Config`] without a rule; settings that it does not accept.
    pub fn check(&self, apply: &Apply) -> Result<()> {
        // A product may be infinite, and then the pass of some layer would refuse it.
        Update::new(apply.lr * apply.groups.largest_lr_factor()).check()?;
        self.rule_or_refuse()?.check_settings()
    }

    /// Updates one layer's own parameters with the rule, publishes the version and takes the
    /// gradients as read. All gradients of [`Store::grad_layers`] must have landed. Returns whether
    /// some elements kept their value because the rule's was not finite.
    ///
    /// # Errors
    /// [`Error::Config`] without a rule; [`Error::Aborted`]; a slab in use elsewhere. The layer is
    /// as before then.
    pub fn apply(&self, layer: usize, apply: &Apply, abort: &Abort) -> Result<bool> {
        let rule = self.rule_or_refuse()?;
        let mut open = self.open(layer, apply.next_version, abort)?;
        let kept = open.update(self, rule, apply)?;
        self.finish(open)?;
        Ok(kept)
    }

    /// Refuses, before the first layer is touched, what [`Store::apply`] would refuse at some layer
    /// for the time being: slabs that are in use, and weights of an older version that the user
    /// wrote.
    ///
    /// # Errors
    /// [`roundpipe_tensor::Error::Busy`] while a slab is in use; [`Error::Config`] for a write
    /// that would be lost, once.
    pub(crate) fn check_open(&self, next_version: u64, abort: &Abort) -> Result<()> {
        for (index, layer) in self.layers().iter().enumerate() {
            // The first layers are updated while a checkpoint still reads the last.
            if layer.versions().is_held() {
                self.check_lost_writes(layer, next_version)?;
            } else {
                drop(self.open(index, next_version, abort)?);
            }
        }
        Ok(())
    }

    /// Refuses weights of an older version that the user wrote.
    fn check_lost_writes(&self, layer: &StoreLayer, next_version: u64) -> Result<()> {
        let next = layer.versions().slab(next_version);
        if layer.versions().slabs() < 2 {
            return Ok(());
        }
        let mut seen = layer.lock_seen();
        layer
            .own_trainable()
            .try_for_each(|(index, _)| layer.refuse_lost_write(index, next, &mut seen))
    }

    /// Makes the next version of a layer equal to the newest and forgets its gradients: the part of
    /// a skipped step.
    ///
    /// # Errors
    /// As [`Store::apply`].
    pub fn skip(&self, layer: usize, next_version: u64, abort: &Abort) -> Result<()> {
        let mut open = self.open(layer, next_version, abort)?;
        if self.has_values() {
            open.params.iter_mut().for_each(OpenParam::keep);
        }
        self.finish(open)
    }

    /// Updates every parameter that has a gradient, or none. Waits for the readers of what it
    /// overwrites; all gradients must have landed.
    ///
    /// # Errors
    /// [`Error::Config`] without a rule or without any gradient; otherwise as [`Store::apply`].
    /// Everything is as before then.
    pub fn step(&self, update: &Update, next_version: u64, abort: &Abort) -> Result<StepReport> {
        update.check()?;
        let rule = self.rule_or_refuse()?;
        let layers = 0..self.layers().len();
        if !self.has_gradients() {
            return Err(Error::config(
                "step",
                "no gradients were added since the last step",
            ));
        }
        let groups = self.groups();
        let clip_value = update.stored_clip_value();
        let squares = self.all_squares(&groups, clip_value)?;
        let decision = update.decide(Self::total(&squares));
        let mut open = layers
            .map(|l| self.open(l, next_version, abort))
            .collect::<Result<Vec<_>>>()?;
        let step = self.steps() + u64::from(!decision.skip);
        let apply = Apply {
            step,
            lr: update.lr,
            factor: decision.factor,
            clip_value,
            groups,
            next_version,
        };
        if !decision.skip {
            self.check(&apply)?;
        }
        let mut partial = false;
        for open in &mut open {
            if decision.skip {
                open.params.iter_mut().for_each(OpenParam::keep);
            } else {
                partial |= open.update(self, rule, &apply)?;
            }
        }
        open.into_iter().try_for_each(|open| self.finish(open))?;
        self.set_steps(step);
        Ok(StepReport {
            step,
            grad_norm: decision.grad_norm,
            skipped: decision.skip,
            partial,
        })
    }

    /// Updates with a function over all optimizer copies: f32 values that it may change, and
    /// gradients as they are stored. Then the working weights of the next version are rounded from
    /// the values.
    ///
    /// While it runs, a backup or (for bf16 weights) the values take 4 bytes per trainable parameter,
    /// and a shared parameter's summed gradient takes 4 more.
    ///
    /// # Errors
    /// What the function returns; [`Error::Config`] when it made a finite value infinite or NaN;
    /// [`Error::Aborted`]; a slab in use elsewhere. Values, gradients and all versions of the
    /// weights are as before then, also when the function panics.
    pub fn apply_fn(
        &self,
        versions: FunctionVersions,
        abort: &Abort,
        function: &mut dyn FnMut(&mut OptimParams<'_>) -> Result<()>,
    ) -> Result<FunctionReport> {
        let layers = 0..self.layers().len();
        let layers = layers
            .map(|l| self.open(l, versions.next, abort))
            .collect::<Result<_>>()?;
        let threads = &self.shared.threads;
        let mut all = OptimParams {
            layers,
            threads,
            read_version: versions.read,
            scaled: None,
            skipped: false,
        };
        all.each().try_for_each(|param| param.prepare(threads))?;
        function(&mut all)?;
        if all.skipped {
            all.each().for_each(OpenParam::undo);
        } else {
            // Every value before the first weight: what is refused leaves nothing behind.
            all.each()
                .try_for_each(|param| param.check_finite(threads))?;
            all.each().try_for_each(|param| param.round(threads))?;
            all.each().for_each(|param| param.backup = None);
        }
        let report = FunctionReport {
            skipped: all.skipped,
            scaled: all.scaled.take(),
        };
        all.layers
            .into_iter()
            .try_for_each(|open| self.finish(open))?;
        self.set_steps(self.steps() + u64::from(!report.skipped));
        Ok(report)
    }

    /// The optimizer's copies of all trainable parameters, each once, in model order.
    ///
    /// # Errors
    /// When the system has no memory for them.
    pub fn optim_params(&self) -> Result<Vec<OptimHandle>> {
        self.follow_writes()?;
        self.handles()
    }

    fn handles(&self) -> Result<Vec<OptimHandle>> {
        let mut all = Vec::new();
        for (at, layer) in self.layers().iter().enumerate() {
            for (index, param) in layer.own_trainable() {
                all.push(OptimHandle {
                    name: param.name.clone(),
                    layer: at,
                    shape: param.shape,
                    param: param.param.clone(),
                    dtype: param.state_dtype,
                    index,
                    master: layer.master(index)?,
                    split: SplitValue::of(layer, index)?,
                    moment_parts: layer.moment_parts(index)?.to_vec(),
                    moments: layer.moments(index)?,
                });
            }
        }
        Ok(all)
    }

    /// Makes the optimizer's copies follow weights that the user wrote since the last update, which
    /// does the same by itself. Between steps only.
    ///
    /// # Errors
    /// When the system has no memory or a slab is in use elsewhere.
    pub fn follow_writes(&self) -> Result<()> {
        for layer in self.layers().iter().filter(|layer| layer.was_written()) {
            let mut seen = layer.lock_seen();
            let version = layer.versions().current();
            let slab = layer.versions().slab(version);
            for (index, param) in layer.own_trainable() {
                if !layer.is_written(index, slab, &seen) {
                    continue;
                }
                if let Some(remainder) = layer.remainder(index)? {
                    let weights = layer.working(index, version)?.read_all()?;
                    let mut remainder = remainder.write(0..remainder.len())?;
                    if let Some(before) = layer.before_writes(index, slab, weights.bytes()) {
                        let remainders = RemaindersMut::new(&mut remainder, before.len())?;
                        let threads = &self.shared.threads;
                        optim::follow_split(threads, &before, weights.as_slice(), remainders)?;
                    }
                }
                if let Some(master) = layer.master(index)? {
                    let weights = layer.working(index, version)?.read_all()?;
                    let mut master = master.write(0..master.len())?;
                    let weights = floats(param.dtype, &weights);
                    optim::follow(&self.shared.threads, weights, master.as_mut_slice())?;
                }
                layer.take_as_seen(index, slab, &mut seen);
            }
        }
        Ok(())
    }

    /// Gives a parameter another value, in the type of its handle; its weights follow at once or,
    /// where the value is an f32 copy, with [`Store::weights_from_copies`]. Between steps only.
    ///
    /// # Errors
    /// When a slab is in use elsewhere. Panics for a value of another size.
    pub fn set_value(&self, handle: &OptimHandle, value: &HostRef) -> Result<()> {
        let layer = self.layer(handle.layer);
        let Some(remainder) = layer.remainder(handle.index)? else {
            let home = handle.value();
            home.write(0..home.len())?
                .bytes()
                .copy_from_slice(value.bytes());
            return Ok(());
        };
        let mut seen = layer.lock_seen();
        let version = layer.versions().current();
        let slab = layer.versions().slab(version);
        let home = layer.working(handle.index, version)?;
        let mut weights = home.write_unwatched(0..home.len())?;
        let mut remainder = remainder.write(0..remainder.len())?;
        let values = value.as_slice();
        let remainders = RemaindersMut::new(&mut remainder, values.len())?;
        let weights = weights.as_mut_slice();
        optim::split(&self.shared.threads, values, Some(weights), remainders)?;
        layer.take_as_seen(handle.index, slab, &mut seen);
        Ok(())
    }

    /// Takes the optimizer's copies as the truth: after a checkpoint was read into them, the newest
    /// weights are rounded from them. Between steps only.
    ///
    /// # Errors
    /// As [`Store::follow_writes`].
    pub fn weights_from_copies(&self) -> Result<()> {
        for param in self.handles()? {
            if let Some(master) = &param.master {
                let master = master.read_all()?;
                let home = param.param.data();
                let mut working = home.write(0..home.len())?;
                let working = floats_mut(param.param.dtype(), &mut working);
                optim::cast(
                    &self.shared.threads,
                    Floats::F32(master.as_slice()),
                    working,
                )?;
            }
        }
        Ok(())
    }

    fn rule_or_refuse(&self) -> Result<Rule> {
        self.rule().ok_or_else(|| {
            Error::config("step", "the store has no rule; give it one, or a function")
        })
    }

    /// The gradients of an own parameter that are there, the last layer's first.
    fn grads_of(&self, param: &StoredParam) -> Result<Vec<(DType, HostRef)>> {
        let mut grads = Vec::new();
        for &(layer, index) in &param.users {
            grads.extend(self.filled_part(layer, index, 0..param.shape.numel())?);
        }
        Ok(grads)
    }

    /// Waits for the right to write a layer's next version and takes every guard an update needs.
    fn open(&self, layer: usize, next_version: u64, abort: &Abort) -> Result<OpenLayer<'_>> {
        let here = &self.layers()[layer];
        // The ticket before the guards: readers of the version that is overwritten hold the same
        // memory.
        let ticket = here.versions().wait_writable(next_version, abort)?;
        let two = here.versions().slabs() == 2;
        let all = |buf: HostBuf| buf.write_unwatched(0..buf.len());
        let mut seen = here.lock_seen();
        let newest = here.versions().slab(next_version - 1);
        let next = here.versions().slab(next_version);
        let mut params = Vec::new();
        for (index, stored) in here.own_trainable() {
            let working = all(here.working(index, next_version)?)?;
            // Counted at once: if a later claim fails, the next attempt must not take this one for
            // a user's write.
            let own_claim = u64::from(stored.param.bytes() > 0);
            seen.own[next] += own_claim;
            seen.params[index][next] += own_claim;
            let old = if two {
                Some(here.working(index, next_version - 1)?.read_all()?)
            } else {
                None
            };
            // From here on no one else can write either version, so the counts are final.
            if two {
                here.refuse_lost_write(index, next, &mut seen)?;
            }
            let written = here.is_written(index, newest, &seen);
            let mut param = OpenParam {
                layer,
                stored,
                grads: self.grads_of(stored)?,
                sum: None,
                old,
                working,
                master: here.master(index)?.map(all).transpose()?,
                remainder: here.remainder(index)?.map(all).transpose()?,
                moments: here
                    .moments(index)?
                    .into_iter()
                    .map(all)
                    .collect::<Result<_, _>>()?,
                moment_type: here.moment_type(index)?,
                backup: None,
            };
            if written {
                let before = here.before_writes(index, newest, param.newest_bytes());
                param.follow(&self.shared.threads, before.as_deref())?;
                here.take_as_seen(index, newest, &mut seen);
            }
            params.push(param);
        }
        drop(seen);
        Ok(OpenLayer {
            layer,
            ticket,
            params,
        })
    }

    /// Moves the parameters to the version just written, takes the gradients as read and publishes.
    fn finish(&self, open: OpenLayer<'_>) -> Result<()> {
        self.close(open)?.publish();
        Ok(())
    }

    /// The same up to the publishing.
    fn close(&self, open: OpenLayer<'_>) -> Result<WriteTicket> {
        let OpenLayer {
            layer,
            ticket,
            params,
        } = open;
        // The write guards before the version: a reader that it wakes would find the slab busy. The
        // remainders stay closed until the parameters have moved to the weights that they belong to.
        let remainders: Vec<_> = params
            .into_iter()
            .map(|mut param| param.remainder.take())
            .collect();
        let here = &self.layers()[layer];
        for (index, param) in here.own_trainable() {
            param.param.rehome(here.working(index, ticket.version())?)?;
            for &(layer, index) in &param.users {
                // Before the version is published: the calls that read it have gradients of their own
                // (rule 5 of `version.rs` says when those may land).
                self.layers()[layer].set_filled(index, false);
            }
        }
        drop(remainders);
        Ok(ticket)
    }
}

/// The squares of the sum of gradients, a number per chunk.
fn squares_of_sum(
    threads: &Threads,
    grads: &[(DType, HostRef)],
    clip_value: Option<f32>,
) -> Result<Vec<f64>> {
    match grads {
        [] => Ok(Vec::new()),
        [(dtype, grad)] => Ok(optim::chunk_squares(
            threads,
            floats(*dtype, grad),
            clip_value,
        )),
        // A tied table: its sum is squared in registers, and memory is all that counts.
        [(first_type, first), (second_type, second)] => {
            let first = floats(*first_type, first);
            let second = floats(*second_type, second);
            Ok(optim::chunk_squares_of_sum(
                threads, first, second, clip_value,
            )?)
        }
        [(dtype, first), ..] => {
            let chunks = 0..floats(*dtype, first).len().div_ceil(CHUNK);
            let squares =
                |one: &Threads, _, sum: Floats<'_>| Ok(optim::chunk_squares(one, sum, clip_value));
            Ok(each_chunk(threads, grads, chunks, squares)?.concat())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use roundpipe_tensor::{Cpu, Param, bf16};

    use super::*;
    use crate::layer::Layer;
    use crate::nn::Embedding;
    use crate::store::StoreConfig;

    /// A table that two layers share, and their gradients.
    fn tied() -> Store {
        let weight = Param::zeros(DType::BF16, &[300, 1024]).unwrap();
        let layer = || -> Arc<dyn Layer> {
            let weight = weight.clone();
            Arc::new(Embedding { weight })
        };
        let layers = [("a".to_owned(), layer()), ("b".to_owned(), layer())];
        let device = Cpu::new(Some(1)).unwrap();
        let store = Store::new(&layers, StoreConfig::new(device)).unwrap();
        for layer in 0..2 {
            let here = store.layer(layer);
            let range = here.grad_range(0).unwrap().unwrap();
            let mut grad = range.write(0..range.len()).unwrap();
            for (i, x) in grad.as_mut_slice().iter_mut().enumerate() {
                *x = bf16::from_f32((i % 1013 + layer) as f32 / 64.0);
            }
            here.set_filled(0, true);
        }
        store
    }

    /// Squares that are summed while a gradient lands are those of the gradient that has landed.
    #[test]
    fn squares_of_parts_are_those_of_the_whole() {
        let store = tied();
        let groups = ResolvedGroups::default();
        for clip_value in [None, Some(3.0)] {
            let whole = store.squares(0, &groups, clip_value).unwrap();
            let mut begun = BegunSquares::default();
            for bytes in [0, 100, 140_000, 140_000, 600_000, 614_400] {
                let landed = |layer, _| if layer == 0 { bytes } else { 614_400 };
                let begin = store.begin_squares(0, &groups, clip_value, &landed, &mut begun);
                begin.unwrap();
            }
            assert_eq!(begun.0[&(0, 0)].len(), 4, "whole chunks");
            let parts = store.finish_squares(0, &groups, clip_value, &mut begun);
            assert_eq!(parts.unwrap(), whole, "{clip_value:?}");
        }
    }
}
