//! A layer whose next version may be written: every guard that an update needs, and the passes over
//! them.
//!
//! All guards are taken before the first byte is written. A guard that cannot be had is an error that
//! leaves the layer as it was.
//!
//! # Invariants
//! - Gradients of layers that share a parameter are summed in one order, the last layer first,
//!   however many threads sum them.
//! - A function of the user that fails leaves no trace: what it may write is put back when the layer
//!   is dropped.
//! - Whatever the type of masters and moments, an element is computed in f32 and rounded once.

use std::ops::Range;
use std::sync::Mutex;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{self, CHUNK, Floats, FloatsMut, RemaindersMut, StepSettings};
use roundpipe_tensor::{DType, HostBuf, RngSite, bf16, f16};

use super::Apply;
use super::function::OptimParam;
use super::pass::{OpenMaster, OpenMoment, OpenSlabs, RulePass};
use crate::error::{Error, Result};
use crate::optim::{MomentType, ParamSettings, Rule, floats, floats_mut, floats_of};
use crate::store::{Store, StoredParam};
use crate::sync::{lock, unpoisoned};
use crate::version::WriteTicket;

/// A layer whose next version may be written.
pub(super) struct OpenLayer<'a> {
    pub(super) layer: usize,
    pub(super) params: Vec<OpenParam<'a>>,
    pub(super) ticket: WriteTicket,
}

impl<'a> OpenLayer<'a> {
    /// The rule's pass over each parameter; whether some elements kept their value.
    pub(super) fn update(&mut self, store: &Store, rule: Rule, apply: &Apply) -> Result<bool> {
        let settings = apply.settings();
        let mut kept = false;
        let mut cut = Vec::new();
        for param in &mut self.params {
            let group = apply.groups.of(param.stored.home);
            if param.is_cut(rule, group) {
                cut.push(param.cut_pass(store, rule, settings, group)?);
            } else {
                kept |= param.update(store, rule, settings, group)?;
            }
        }
        Ok(run_cut(&store.shared.threads, &mut cut)? || kept)
    }
}

/// A pass over one parameter that goes chunk by chunk.
struct CutPass<'a> {
    pass: RulePass,
    grad: (DType, HostRef),
    slabs: OpenSlabs<'a>,
}

/// Runs the chunks of all parameters together: at the end of each parameter by itself, threads would
/// wait for the last chunk.
fn run_cut(threads: &Threads, params: &mut [CutPass<'_>]) -> Result<bool> {
    let mut chunks = Vec::new();
    for CutPass { pass, grad, slabs } in params {
        let grad = floats(grad.0, &grad.1);
        for (i, chunk) in slabs.chunks(CHUNK).enumerate() {
            let range = i * CHUNK..grad.len().min((i + 1) * CHUNK);
            chunks.push((&*pass, grad.range(range), chunk));
        }
    }
    let done = each_part(
        threads,
        chunks.into_iter(),
        |one, _, (pass, grad, chunk)| pass.run(one, grad, chunk),
    );
    Ok(done?.contains(&true))
}

/// The slabs of one parameter, opened for an update.
pub(super) struct OpenParam<'a> {
    pub(super) layer: usize,
    pub(super) stored: &'a StoredParam,
    /// Those that are there, in the order in which they are summed.
    pub(super) grads: Vec<(DType, HostRef)>,
    /// Their sum, for functions of the user.
    pub(super) sum: Option<HostRef>,
    /// The newest version, where the next lies in another slab.
    pub(super) old: Option<HostRef>,
    pub(super) working: HostMut,
    /// An f32 copy of the newest version, or one that a function of the user changes.
    pub(super) master: Option<HostMut>,
    /// What the newest version lacks of its master, where that is no copy.
    pub(super) remainder: Option<HostMut>,
    pub(super) moments: Vec<HostMut>,
    /// In what they are kept, where the state is f32.
    pub(super) moment_type: MomentType,
    /// What the memory that a function writes held before; written back on drop, unless taken away.
    pub(super) backup: Option<HostBuf>,
}

impl OpenParam<'_> {
    /// The rule's pass with the settings of the parameter's group, or none without a gradient.
    pub(super) fn update(
        &mut self,
        store: &Store,
        rule: Rule,
        settings: StepSettings,
        group: ParamSettings,
    ) -> Result<bool> {
        if group.frozen {
            self.stored.add_frozen_step();
        }
        if group.frozen || self.grads.is_empty() {
            self.keep();
            return Ok(false);
        }
        let threads = &store.shared.threads;
        self.start_copy(threads)?;
        let pass = self.rule_pass(rule, settings, group);
        let grads = std::mem::take(&mut self.grads);
        let mut slabs = self.slabs(&pass, store.moment_seed())?;
        match &grads[..] {
            [(dtype, grad)] => pass.run(threads, floats(*dtype, grad), slabs),
            grads if pass.rule.is_elementwise() => {
                let done = each_chunk(threads, grads, slabs.chunks(CHUNK), |one, chunk, grad| {
                    pass.run(one, grad, chunk)
                });
                Ok(done?.contains(&true))
            }
            // The rule looks at whole matrices, so it needs the whole sum.
            grads => {
                let mut sum = vec![0.0; pass.shape.numel()];
                sum_into(threads, grads, 0..sum.len(), &mut sum)?;
                pass.run(threads, Floats::F32(&sum), slabs)
            }
        }
    }

    /// Whether the pass goes chunk by chunk: what it writes is not all f32, and one gradient is there
    /// as it is.
    fn is_cut(&self, rule: Rule, group: ParamSettings) -> bool {
        let rule = group.rule.unwrap_or(rule);
        let has_f32_values = match self.remainder {
            Some(_) => false,
            None => self.master.is_some() || self.stored.dtype == DType::F32,
        };
        let has_f32_moments =
            self.stored.state_dtype == DType::F32 && self.moment_type == MomentType::F32;
        let is_plain = has_f32_values && has_f32_moments;
        !group.frozen && !is_plain && self.grads.len() == 1 && rule.is_elementwise()
    }

    /// The pass of a parameter that [`OpenParam::is_cut`].
    fn cut_pass(
        &mut self,
        store: &Store,
        rule: Rule,
        settings: StepSettings,
        group: ParamSettings,
    ) -> Result<CutPass<'_>> {
        self.start_copy(&store.shared.threads)?;
        let pass = self.rule_pass(rule, settings, group);
        let grad = self.grads.remove(0);
        let slabs = self.slabs(&pass, store.moment_seed())?;
        Ok(CutPass { pass, grad, slabs })
    }

    /// Whether a pass can write the weights first and the moments later.
    pub(super) fn leaves_moments(&self, rule: Rule, group: ParamSettings) -> bool {
        let rule = group.rule.unwrap_or(rule).with(group);
        let has_grads = !group.frozen && !self.grads.is_empty();
        has_grads && self.remainder.is_some() && rule.leaves_moments()
    }

    /// The pass of the group's rule, or of the store's.
    pub(super) fn rule_pass(
        &self,
        rule: Rule,
        settings: StepSettings,
        group: ParamSettings,
    ) -> RulePass {
        RulePass {
            rule: group.rule.unwrap_or(rule).with(group),
            settings: StepSettings {
                step: self.stored.own_step(settings.step),
                lr: settings.lr * group.lr_factor,
                ..settings
            },
            shape: self.stored.shape,
        }
    }

    /// What the rule's pass writes.
    pub(super) fn slabs(&mut self, pass: &RulePass, seed: u64) -> Result<OpenSlabs<'_>> {
        let stored = self.stored;
        let master = match (&mut self.master, &mut self.remainder) {
            (Some(master), _) => OpenMaster::Copy(master.as_mut_slice()),
            (None, Some(remainder)) => OpenMaster::Remainder {
                newest: self.old.as_ref().map(HostRef::as_slice),
                remainders: RemaindersMut::new(remainder, stored.shape.numel())?,
            },
            (None, None) => OpenMaster::Weights,
        };
        Ok(OpenSlabs {
            weights: floats_mut(stored.dtype, &mut self.working),
            master,
            moments: open_moments(stored, self.moment_type, &mut self.moments, pass, seed),
        })
    }

    /// The newest version's bytes.
    pub(super) fn newest_bytes(&mut self) -> &[u8] {
        match &self.old {
            Some(newest) => newest.bytes(),
            None => self.working.bytes(),
        }
    }

    /// Makes the master follow weights that the user wrote; `before` are those that remainders
    /// belong to.
    pub(super) fn follow(&mut self, threads: &Threads, before: Option<&[bf16]>) -> Result<()> {
        if let (Some(remainder), Some(before)) = (&mut self.remainder, before) {
            let remainders = RemaindersMut::new(remainder, before.len())?;
            let newest = match &self.old {
                Some(newest) => newest.as_slice(),
                None => &*self.working.as_mut_slice(),
            };
            optim::follow_split(threads, before, newest, remainders)?;
        }
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

    /// Where weights are their own masters and are updated in the next slab, brings the newest
    /// version there.
    pub(super) fn start_copy(&mut self, threads: &Threads) -> Result<()> {
        if self.remainder.is_some() {
            return Ok(());
        }
        if let (Some(old), None) = (&self.old, &self.master) {
            let dtype = self.stored.dtype;
            let new = floats_mut(dtype, &mut self.working);
            optim::cast(threads, floats(dtype, old), new)?;
        }
        Ok(())
    }

    /// Where there is no f32 copy of weights narrower than that, makes one for a function of the
    /// user, which lives as long as this.
    fn widen_values(&mut self, threads: &Threads) -> Result<()> {
        let dtype = self.stored.dtype;
        if self.master.is_some() || dtype == DType::F32 {
            return Ok(());
        }
        let name = format!("{} as f32", self.stored.name);
        let copy = HostBuf::zeroed(name, self.stored.copy_bytes())?;
        let mut wide = copy.write(0..copy.len())?;
        self.read_values(threads, wide.as_mut_slice())?;
        self.master = Some(wide);
        Ok(())
    }

    /// Writes the values of weights narrower than f32 that have no f32 copy.
    fn read_values(&mut self, threads: &Threads, into: &mut [f32]) -> Result<()> {
        let dtype = self.stored.dtype;
        if let Some(remainder) = &mut self.remainder {
            let remainders = RemaindersMut::new(remainder, into.len())?;
            let newest = match &self.old {
                Some(newest) => newest.as_slice(),
                None => &*self.working.as_mut_slice(),
            };
            optim::join(threads, newest, remainders.as_ref(), into)?;
            return Ok(());
        }
        let into = FloatsMut::F32(into);
        match &self.old {
            Some(newest) => optim::cast(threads, floats(dtype, newest), into)?,
            None => optim::cast(threads, floats_of(dtype, &mut self.working), into)?,
        }
        Ok(())
    }

    /// Makes the next version equal to the newest.
    pub(super) fn keep(&mut self) {
        // Reading zeros that were never written takes no memory; writing them does.
        if let Some(old) = &self.old
            && *self.working.bytes() != *old.bytes()
        {
            self.working.bytes().copy_from_slice(old.bytes());
        }
    }

    /// Gets ready for a function of the user: the values to change, a backup of them, one gradient.
    pub(super) fn prepare(&mut self, threads: &Threads) -> Result<()> {
        self.widen_values(threads)?;
        // Before the newest version is brought there: with two slabs of f32 weights the function
        // writes where the version before the newest lies, and calls may still read that one.
        if self.remainder.is_none() {
            let name = format!("{} backup", self.stored.name);
            self.backup = Some(HostBuf::from_slice(name, &*self.values())?);
        }
        self.start_copy(threads)?;
        if self.grads.len() > 1 {
            let sum = HostBuf::zeroed("summed gradient", self.stored.copy_bytes())?;
            let mut all = sum.write(0..sum.len())?;
            self.sum_grads(threads, all.as_mut_slice())?;
            drop(all);
            self.sum = Some(sum.read_all()?);
        }
        Ok(())
    }

    /// Writes the sum of the gradients as f32.
    pub(super) fn sum_grads(&self, threads: &Threads, into: &mut [f32]) -> Result<()> {
        sum_into(threads, &self.grads, 0..into.len(), into)
    }

    /// Takes back what a function wrote, and makes the next version equal to the newest.
    pub(super) fn undo(&mut self) {
        self.put_back();
        self.keep();
    }

    fn put_back(&mut self) {
        // No other thread has the backup, so reading it cannot fail.
        if let Some(backup) = self.backup.take().and_then(|backup| backup.read_all().ok()) {
            self.values().copy_from_slice(backup.as_slice());
        }
    }

    /// Refuses values that a function made infinite or NaN, or that would round to an infinity.
    pub(super) fn check_finite(&mut self, threads: &Threads) -> Result<()> {
        let dtype = self.stored.dtype;
        // Where weights have remainders, they still say what the values were. Where the newest
        // version is another slab of f32, that does; else the backup does.
        let before = match (&self.old, &self.master, &self.backup) {
            _ if self.remainder.is_some() => {
                let mut before = vec![0.0; self.stored.shape.numel()];
                self.read_values(threads, &mut before)?;
                before
            }
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
                let value = self.values()[at];
                let name = &self.stored.name;
                let what = format!(
                    "it set element {at} of {name} to {value}, which is not finite as {dtype}"
                );
                Err(Error::config("step", what))
            }
        }
    }

    /// Writes the working weights from the values.
    pub(super) fn round(&mut self, threads: &Threads) -> Result<()> {
        if let (Some(master), Some(remainder)) = (&mut self.master, &mut self.remainder) {
            let working = self.working.as_mut_slice::<bf16>();
            let remainders = RemaindersMut::new(remainder, working.len())?;
            optim::split(threads, master.as_mut_slice(), Some(working), remainders)?;
            return Ok(());
        }
        if let Some(master) = &mut self.master {
            let working = floats_mut(self.stored.dtype, &mut self.working);
            optim::cast(threads, Floats::F32(master.as_mut_slice()), working)?;
        }
        Ok(())
    }

    pub(super) fn values(&mut self) -> &mut [f32] {
        self.master
            .as_mut()
            .unwrap_or(&mut self.working)
            .as_mut_slice()
    }

    pub(super) fn view(&mut self) -> OptimParam<'_> {
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
        // There is a backup only where a function failed.
        self.put_back();
    }
}

/// The moments of a parameter as a pass takes them.
pub(super) fn open_moments<'m>(
    stored: &StoredParam,
    moment_type: MomentType,
    moments: &'m mut [HostMut],
    pass: &RulePass,
    seed: u64,
) -> Vec<OpenMoment<'m>> {
    match (stored.state_dtype, moment_type) {
        (DType::F32, MomentType::Bf16) => {
            let site = RngSite {
                seed,
                step: pass.settings.step,
                // Apart from all that layers draw.
                microbatch: u32::MAX,
                layer: stored.home.0 as u32,
                site: 0,
            };
            OpenMoment::random(moments, site, stored.home.1)
        }
        (DType::F32, MomentType::Bits8) => OpenMoment::codes(moments),
        (dtype, _) => {
            let plain = moments.iter_mut();
            let plain = plain.map(|moment| OpenMoment::Plain(floats_mut(dtype, moment)));
            plain.collect()
        }
    }
}

/// Gives `task` the sum of `grads` chunk by chunk, each with what belongs to it, and collects the
/// results. A chunk is summed and used by one thread, which `task` goes on with, so the sum stays
/// in its cache.
pub(super) fn each_chunk<T: Send, R: Send>(
    threads: &Threads,
    grads: &[(DType, HostRef)],
    chunks: impl Iterator<Item = T>,
    task: impl Fn(&Threads, T, Floats<'_>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let len = grads
        .first()
        .map_or(0, |(dtype, grad)| floats(*dtype, grad).len());
    each_part(threads, chunks, |one, i, chunk| {
        let range = i * CHUNK..len.min((i + 1) * CHUNK);
        let mut sum = vec![0.0f32; range.len()];
        sum_into(one, grads, range, &mut sum)?;
        task(one, chunk, Floats::F32(&sum))
    })
}

/// Gives `task` each part with its number, and collects the results. A part is one thread's, which
/// `task` goes on with.
pub(crate) fn each_part<T: Send, R: Send>(
    threads: &Threads,
    parts: impl Iterator<Item = T>,
    task: impl Fn(&Threads, usize, T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let one = Threads::new(Some(1))?;
    let parts: Vec<Mutex<Option<T>>> = parts.map(|part| Mutex::new(Some(part))).collect();
    let results: Vec<Mutex<Option<Result<R>>>> = parts.iter().map(|_| Mutex::new(None)).collect();
    threads.run(parts.len(), |i| {
        let part = lock(&parts[i]).take();
        *lock(&results[i]) = part.map(|part| task(&one, i, part));
    });
    let done = results
        .into_iter()
        .filter_map(|r| unpoisoned(r.into_inner()));
    done.collect()
}

/// Part of the sum of `grads`: of one gradient as it is, of several in `memory`.
pub(super) fn summed<'g>(
    one: &Threads,
    grads: &'g [(DType, HostRef)],
    range: Range<usize>,
    memory: &'g mut Vec<f32>,
) -> Result<Floats<'g>> {
    if let [(dtype, grad)] = grads {
        return Ok(floats(*dtype, grad).range(range));
    }
    memory.resize(range.len(), 0.0);
    sum_into(one, grads, range, memory)?;
    Ok(Floats::F32(memory))
}

/// Sums part of `grads` in f32, in their order.
pub(super) fn sum_into(
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
