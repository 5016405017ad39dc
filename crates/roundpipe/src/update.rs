//! Updates of a [`Store`]: gradients in, the next version of the weights out.
//!
//! The path of an update: gradient ranges (summed in f32 where several layers share a parameter,
//! the last layer first) -> one fused pass over master and moments -> working weights in the slab
//! of the next version -> the parameters move there -> the version is published. A parameter
//! without a gradient keeps its value and its state. Weights that somebody wrote since the last
//! update are what the next one starts from.
//!
//! Layer by layer as gradients land: [`Store::squares`] and [`Store::apply`]. The whole model at
//! once: [`Store::step`]. Any function of the user: [`Store::apply_fn`].
//!
//! # Invariants
//! - The same gradients give the same bits for any number of threads, any order of layers and one
//!   or two slabs, and those of [`Optimizer`](crate::Optimizer).
//! - A slab that is in use elsewhere stops an update before anything is written.
//! - What was finite stays finite.
//! - [`Store::step`] and [`Store::apply_fn`] update every layer or none; [`Store::apply`] promises
//!   that for its layer alone.

use std::ops::Range;
use std::sync::Mutex;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{self, CHUNK, Floats, FloatsMut};
use roundpipe_tensor::{DType, HostBuf, Param, Shape, bf16, f16};

use crate::error::{Error, Result};
pub use crate::optim::{Decision, Update};
use crate::optim::{Rule, Shared, Slabs, StepReport, floats, floats_mut, floats_of};
use crate::store::{Store, StoredParam};
use crate::sync::{lock, unpoisoned};
use crate::version::{Abort, WriteTicket};

/// One layer's part of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Apply {
    /// Which update this is for the rule, from 1 on; skipped ones do not count.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// What stored gradients are multiplied with.
    pub factor: f32,
    /// The version to write, which is the newest plus one.
    pub next_version: u64,
}

impl Store {
    /// The squares of a layer's summed gradients, a number per own parameter that has one. The
    /// global squared norm is the sum of all, layers in ascending order: [`Store::total`].
    ///
    /// # Errors
    /// When a gradient is being written.
    pub fn squares(&self, layer: usize) -> Result<Vec<f64>> {
        let mut squares = Vec::new();
        for (_, param) in self.layers()[layer].own_trainable() {
            let grads = self.grads_of(param)?;
            if grads.is_empty() {
                continue;
            }
            let threads = &self.shared.threads;
            let chunks = match &grads[..] {
                [(dtype, grad)] => optim::chunk_squares(threads, floats(*dtype, grad)),
                _ => {
                    let chunks = 0..param.shape.numel().div_ceil(CHUNK);
                    let squares =
                        |one: &Threads, _, sum: Floats<'_>| Ok(optim::chunk_squares(one, sum));
                    each_chunk(threads, &grads, chunks, squares)?.concat()
                }
            };
            squares.push(chunks.iter().sum());
        }
        Ok(squares)
    }

    /// [`Store::squares`] of every layer, in ascending order.
    ///
    /// # Errors
    /// As [`Store::squares`].
    pub fn all_squares(&self) -> Result<Vec<Vec<f64>>> {
        (0..self.layers().len())
            .map(|layer| self.squares(layer))
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
        let shared = Shared {
            lr: apply.lr,
            step: apply.step,
            factor: apply.factor,
        };
        self.rule_or_refuse()?.check(&self.shared.threads, shared)
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
        let kept = open.update(&self.shared.threads, rule, apply)?;
        self.finish(open)?;
        Ok(kept)
    }

    /// Refuses, before the first layer is touched, what [`Store::apply`] would refuse at some layer
    /// for the time being: slabs that somebody holds, and weights of an older version that somebody
    /// wrote.
    ///
    /// # Errors
    /// [`roundpipe_tensor::Error::Busy`] while somebody holds a slab; [`Error::Config`] for a write
    /// that would be lost, once.
    pub(crate) fn check_open(&self, next_version: u64, abort: &Abort) -> Result<()> {
        (0..self.layers().len())
            .try_for_each(|layer| self.open(layer, next_version, abort).map(drop))
    }

    /// Makes the next version of a layer equal to the newest and forgets its gradients: the part of
    /// a skipped step.
    ///
    /// # Errors
    /// As [`Store::apply`].
    pub fn skip(&self, layer: usize, next_version: u64, abort: &Abort) -> Result<()> {
        let mut open = self.open(layer, next_version, abort)?;
        open.params.iter_mut().for_each(OpenParam::keep);
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
        let squares = self.all_squares()?;
        if squares.iter().all(Vec::is_empty) {
            return Err(Error::config(
                "step",
                "no gradients were added since the last step",
            ));
        }
        let decision = update.decide(Self::total(&squares));
        let mut open = layers
            .map(|l| self.open(l, next_version, abort))
            .collect::<Result<Vec<_>>>()?;
        let step = self.steps() + u64::from(!decision.skip);
        let apply = Apply {
            step,
            lr: update.lr,
            factor: decision.factor,
            next_version,
        };
        let mut partial = false;
        for open in &mut open {
            if decision.skip {
                open.params.iter_mut().for_each(OpenParam::keep);
            } else {
                partial |= open.update(&self.shared.threads, rule, &apply)?;
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
    /// While it runs, a backup takes 4 bytes per trainable parameter, and a shared parameter's
    /// summed gradient takes 4 more.
    ///
    /// # Errors
    /// What the function returns; [`Error::Config`] when it made a finite value infinite or NaN;
    /// [`Error::Aborted`]; a slab in use elsewhere. Values, gradients and all versions of the
    /// weights are as before then, also when the function panics.
    pub fn apply_fn(
        &self,
        next_version: u64,
        abort: &Abort,
        function: &mut dyn FnMut(&mut OptimParams<'_>) -> Result<()>,
    ) -> Result<()> {
        let layers = 0..self.layers().len();
        let layers = layers
            .map(|l| self.open(l, next_version, abort))
            .collect::<Result<_>>()?;
        let mut all = OptimParams { layers };
        let threads = &self.shared.threads;
        all.each().try_for_each(|param| param.prepare(threads))?;
        function(&mut all)?;
        // Every value before the first weight: what is refused leaves nothing behind.
        all.each().try_for_each(|param| param.check_finite())?;
        all.each().try_for_each(|param| param.round(threads))?;
        all.each().for_each(|param| param.backup = None);
        all.layers
            .into_iter()
            .try_for_each(|open| self.finish(open))?;
        self.set_steps(self.steps() + 1);
        Ok(())
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
                    master: layer.master(index)?,
                    moments: layer.moments(index)?,
                });
            }
        }
        Ok(all)
    }

    /// Makes the optimizer's copies follow weights that somebody wrote since the last update, which
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
                if let Some(master) = layer.master(index)? {
                    let weights = layer.working(index, version)?.read_all()?;
                    let mut master = master.write(0..master.len())?;
                    let weights = floats(param.dtype, &weights);
                    optim::follow(&self.shared.threads, weights, master.as_mut_slice())?;
                }
                seen.params[index][slab] = layer.writes(index, slab);
            }
        }
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
                let (master, home) = (master.read_all()?, param.param.data());
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
            let layer = &self.layers()[layer];
            if let (true, Some(range)) = (layer.filled(index), layer.grad_range(index)?) {
                grads.push((layer.params()[index].grad_dtype, range.read_all()?));
            }
        }
        Ok(grads)
    }

    /// Waits for the right to write a layer's next version and takes every guard an update needs.
    fn open(&self, layer: usize, next_version: u64, abort: &Abort) -> Result<OpenLayer<'_>> {
        let here = &self.layers()[layer];
        let ticket = here.versions().wait_writable(next_version, abort)?;
        let two = here.versions().slabs() == 2;
        let all = |buf: HostBuf| buf.write(0..buf.len());
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
            if two && here.is_written(index, next, &seen) {
                seen.params[index][next] = here.writes(index, next);
                let what = format!(
                    "{} was written in memory that it has left, so the values are lost; call `synchronize`, then write \
                     through `Param::data`",
                    stored.name
                );
                return Err(Error::config("parameter", what));
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
                moments: here
                    .moments(index)?
                    .into_iter()
                    .map(all)
                    .collect::<Result<_, _>>()?,
                backup: None,
            };
            if written {
                param.follow(&self.shared.threads)?;
                seen.params[index][newest] = here.writes(index, newest);
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
        let OpenLayer {
            layer,
            ticket,
            params,
        } = open;
        drop(params);
        let here = &self.layers()[layer];
        for (index, param) in here.own_trainable() {
            param.param.rehome(here.working(index, ticket.version())?)?;
            for &(layer, index) in &param.users {
                self.layers()[layer].set_filled(index, false);
            }
        }
        ticket.publish();
        Ok(())
    }
}

/// A layer whose next version may be written.
struct OpenLayer<'a> {
    layer: usize,
    params: Vec<OpenParam<'a>>,
    ticket: WriteTicket,
}

impl OpenLayer<'_> {
    /// The rule's pass over each parameter; whether some elements kept their value.
    fn update(&mut self, threads: &Threads, rule: Rule, apply: &Apply) -> Result<bool> {
        let shared = Shared {
            lr: apply.lr,
            step: apply.step,
            factor: apply.factor,
        };
        let mut kept = false;
        for param in &mut self.params {
            kept |= param.update(threads, rule, shared)?;
        }
        Ok(kept)
    }
}

/// The slabs of one parameter, opened for an update.
struct OpenParam<'a> {
    layer: usize,
    stored: &'a StoredParam,
    /// Those that are there, in the order in which they are summed.
    grads: Vec<(DType, HostRef)>,
    /// Their sum, for functions of the user.
    sum: Option<HostRef>,
    /// The newest version, where the next lies in another slab.
    old: Option<HostRef>,
    working: HostMut,
    master: Option<HostMut>,
    moments: Vec<HostMut>,
    /// What the memory that a function writes held before; written back on drop, unless taken away.
    backup: Option<HostBuf>,
}

impl OpenParam<'_> {
    /// The rule's pass, or none without a gradient.
    fn update(&mut self, threads: &Threads, rule: Rule, shared: Shared) -> Result<bool> {
        if self.grads.is_empty() {
            self.keep();
            return Ok(false);
        }
        self.start_copy(threads)?;
        let (dtype, decays) = (self.stored.dtype, self.stored.decays);
        let (master, mut working) = match &mut self.master {
            None => (self.working.as_mut_slice::<f32>(), None),
            Some(master) => (
                master.as_mut_slice(),
                Some(floats_mut(dtype, &mut self.working)),
            ),
        };
        let mut moments: Vec<&mut [f32]> =
            self.moments.iter_mut().map(HostMut::as_mut_slice).collect();
        if let [(dtype, grad)] = &self.grads[..] {
            let slabs = Slabs {
                grad: floats(*dtype, grad),
                master,
                moments,
                working,
            };
            return rule.update(threads, shared, decays, slabs);
        }
        let mut moments: Vec<_> = moments
            .iter_mut()
            .map(|moment| moment.chunks_mut(CHUNK))
            .collect();
        let mut working = working.as_mut().map(FloatsMut::chunks);
        let chunks = master.chunks_mut(CHUNK).map(|master| {
            let moments: Vec<&mut [f32]> = moments
                .iter_mut()
                .map(|m| m.next().unwrap_or_default())
                .collect();
            (master, moments, working.as_mut().and_then(Iterator::next))
        });
        let done = each_chunk(
            threads,
            &self.grads,
            chunks,
            |one, (master, moments, working), grad| {
                rule.update(
                    one,
                    shared,
                    decays,
                    Slabs {
                        grad,
                        master,
                        moments,
                        working,
                    },
                )
            },
        );
        Ok(done?.contains(&true))
    }

    /// Makes the f32 copy follow weights that somebody wrote.
    fn follow(&mut self, threads: &Threads) -> Result<()> {
        let Some(master) = &mut self.master else {
            return Ok(());
        };
        let dtype = self.stored.dtype;
        let master = master.as_mut_slice();
        match &self.old {
            Some(newest) => optim::follow(threads, floats(dtype, newest), master)?,
            None => optim::follow(threads, floats_of(dtype, &mut self.working), master)?,
        }
        Ok(())
    }

    /// Where f32 weights are updated in the next slab, brings the newest version there.
    fn start_copy(&mut self, threads: &Threads) -> Result<()> {
        if let (Some(old), None) = (&self.old, &self.master) {
            let new = FloatsMut::F32(self.working.as_mut_slice());
            optim::cast(threads, Floats::F32(old.as_slice()), new)?;
        }
        Ok(())
    }

    /// Makes the next version equal to the newest.
    fn keep(&mut self) {
        // Reading zeros that were never written takes no memory; writing them does.
        if let Some(old) = &self.old
            && *self.working.bytes() != *old.bytes()
        {
            self.working.bytes().copy_from_slice(old.bytes());
        }
    }

    /// Gets ready for a function of the user: the values to change, a backup of them, one gradient.
    fn prepare(&mut self, threads: &Threads) -> Result<()> {
        // Before the newest version is brought there: with two slabs of f32 weights the function
        // writes where the version before the newest lies, and calls may still read that one.
        let backup = HostBuf::from_slice(format!("{} backup", self.stored.name), &*self.values())?;
        self.backup = Some(backup);
        self.start_copy(threads)?;
        if self.grads.len() > 1 {
            let sum = HostBuf::zeroed("summed gradient", self.stored.copy_bytes())?;
            let mut all = sum.write(0..sum.len())?;
            sum_into(
                threads,
                &self.grads,
                0..self.stored.shape.numel(),
                all.as_mut_slice(),
            )?;
            drop(all);
            self.sum = Some(sum.read_all()?);
        }
        Ok(())
    }

    /// Refuses values that a function made infinite or NaN, or that would round to an infinity.
    fn check_finite(&mut self) -> Result<()> {
        let dtype = self.stored.dtype;
        // Where the newest version is another slab of f32, that is what the values were; else the
        // backup is.
        let before = match (&self.old, &self.master, &self.backup) {
            (Some(old), None, _) => old.as_slice::<f32>().to_vec(),
            (_, _, Some(backup)) => backup.read_all()?.as_slice().to_vec(),
            _ => return Ok(()),
        };
        let is_finite = |x: f32| match dtype {
            DType::BF16 => bf16::from_f32(x).is_finite(),
            DType::F16 => f16::from_f32(x).is_finite(),
            _ => x.is_finite(),
        };
        let ruined = |(new, old): (&f32, &f32)| is_finite(*old) && !is_finite(*new);
        let at = self.values().iter().zip(&before).position(ruined);
        match at {
            None => Ok(()),
            Some(at) => {
                let (name, value) = (&self.stored.name, self.values()[at]);
                let what = format!(
                    "it set element {at} of {name} to {value}, which is not finite as {dtype}"
                );
                Err(Error::config("step", what))
            }
        }
    }

    /// Writes the working weights from the values.
    fn round(&mut self, threads: &Threads) -> Result<()> {
        if let Some(master) = &mut self.master {
            let working = floats_mut(self.stored.dtype, &mut self.working);
            optim::cast(threads, Floats::F32(master.as_mut_slice()), working)?;
        }
        Ok(())
    }

    fn values(&mut self) -> &mut [f32] {
        self.master
            .as_mut()
            .unwrap_or(&mut self.working)
            .as_mut_slice()
    }

    fn view(&mut self) -> OptimParam<'_> {
        let grad = match (&self.sum, self.grads.first()) {
            (Some(sum), _) => Some(Floats::F32(sum.as_slice())),
            (None, Some((dtype, grad))) => Some(floats(*dtype, grad)),
            (None, None) => None,
        };
        let value = self
            .master
            .as_mut()
            .unwrap_or(&mut self.working)
            .as_mut_slice();
        OptimParam {
            name: &self.stored.name,
            layer: self.layer,
            shape: self.stored.shape,
            value,
            grad,
        }
    }
}

impl Drop for OpenParam<'_> {
    fn drop(&mut self) {
        // A function failed. Nobody else knows the backup, so reading it cannot fail.
        if let Some(backup) = self.backup.take().and_then(|backup| backup.read_all().ok()) {
            self.values().copy_from_slice(backup.as_slice());
        }
    }
}

/// Gives `task` the sum of `grads` chunk by chunk, each with what belongs to it, and collects the
/// results. A chunk is summed and used by one thread, which `task` goes on with, so the sum stays
/// in its cache.
fn each_chunk<T: Send, R: Send>(
    threads: &Threads,
    grads: &[(DType, HostRef)],
    chunks: impl Iterator<Item = T>,
    task: impl Fn(&Threads, T, Floats<'_>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let len = grads
        .first()
        .map_or(0, |(dtype, grad)| floats(*dtype, grad).len());
    let one = Threads::new(Some(1))?;
    let chunks: Vec<Mutex<Option<T>>> = chunks.map(|chunk| Mutex::new(Some(chunk))).collect();
    let results: Vec<Mutex<Option<Result<R>>>> = chunks.iter().map(|_| Mutex::new(None)).collect();
    threads.run(chunks.len(), |i| {
        let chunk = lock(&chunks[i]).take();
        let range = i * CHUNK..len.min((i + 1) * CHUNK);
        let mut sum = vec![0.0f32; range.len()];
        let summed = sum_into(&one, grads, range, &mut sum);
        let done = chunk.map(|chunk| summed.and_then(|()| task(&one, chunk, Floats::F32(&sum))));
        *lock(&results[i]) = done;
    });
    let done = results
        .into_iter()
        .filter_map(|r| unpoisoned(r.into_inner()));
    done.collect()
}

/// Sums part of `grads` in f32, in their order.
fn sum_into(
    threads: &Threads,
    grads: &[(DType, HostRef)],
    range: Range<usize>,
    sum: &mut [f32],
) -> Result<()> {
    for (i, (dtype, grad)) in grads.iter().enumerate() {
        let part = floats(*dtype, grad).range(range.clone());
        match i {
            0 => optim::cast(threads, part, FloatsMut::F32(sum))?,
            _ => optim::accumulate(threads, part, sum)?,
        }
    }
    Ok(())
}

/// All optimizer copies, for a function of the user.
pub struct OptimParams<'a> {
    layers: Vec<OpenLayer<'a>>,
}

/// One optimizer copy.
#[derive(Debug)]
pub struct OptimParam<'a> {
    /// Full dotted name.
    pub name: &'a str,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    /// The values, to be changed.
    pub value: &'a mut [f32],
    /// The gradient as stored; `None` when there is none.
    pub grad: Option<Floats<'a>>,
}

impl<'a> OptimParams<'a> {
    /// All of them, in model order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = OptimParam<'_>> {
        self.each().map(OpenParam::view)
    }

    fn each(&mut self) -> impl Iterator<Item = &mut OpenParam<'a>> {
        self.layers.iter_mut().flat_map(|layer| &mut layer.params)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.params.len()).sum()
    }

    /// Whether nothing is trainable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl OptimParam<'_> {
    /// The gradient as f32, where there is one.
    pub fn grad_f32(&self) -> Option<Vec<f32>> {
        Some(match self.grad? {
            Floats::F32(grad) => grad.to_vec(),
            Floats::BF16(grad) => grad.iter().map(|x| x.to_f32()).collect(),
            Floats::F16(grad) => grad.iter().map(|x| x.to_f32()).collect(),
        })
    }
}

/// An optimizer copy to read, and the rule's state with it.
#[derive(Debug, Clone)]
pub struct OptimHandle {
    /// Full dotted name.
    pub name: String,
    /// Index of the layer it lives in.
    pub layer: usize,
    /// Sizes.
    pub shape: Shape,
    param: Param,
    master: Option<HostBuf>,
    moments: Vec<HostBuf>,
}

impl OptimHandle {
    /// Where the newest values lie, as f32. For f32 weights this is the weights, which move with
    /// every version.
    pub fn value(&self) -> HostBuf {
        self.master.clone().unwrap_or_else(|| self.param.data())
    }

    /// Where the rule's state lies, as f32, in the rule's order.
    pub fn moments(&self) -> &[HostBuf] {
        &self.moments
    }

    /// A copy of the newest values.
    ///
    /// # Errors
    /// While an update writes them.
    pub fn to_vec(&self) -> Result<Vec<f32>> {
        Ok(self.value().read_all()?.as_slice().to_vec())
    }
}
