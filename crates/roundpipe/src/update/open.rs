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

use std::ops::Range;
use std::sync::Mutex;

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{self, CHUNK, Floats, FloatsMut, StepSettings};
use roundpipe_tensor::{DType, HostBuf, bf16, f16};

use super::Apply;
use super::function::OptimParam;
use crate::error::{Error, Result};
use crate::optim::{ParamSettings, Rule, Slabs, floats, floats_mut, floats_of};
use crate::store::StoredParam;
use crate::sync::{lock, unpoisoned};
use crate::version::WriteTicket;

/// A layer whose next version may be written.
pub(super) struct OpenLayer<'a> {
    pub(super) layer: usize,
    pub(super) params: Vec<OpenParam<'a>>,
    pub(super) ticket: WriteTicket,
}

impl OpenLayer<'_> {
    /// The rule's pass over each parameter; whether some elements kept their value.
    pub(super) fn update(&mut self, threads: &Threads, rule: Rule, apply: &Apply) -> Result<bool> {
        let settings = StepSettings {
            step: apply.step,
            lr: apply.lr,
            clip_value: apply.clip_value,
            grad_scale: apply.factor,
        };
        let mut kept = false;
        for param in &mut self.params {
            let group = apply.groups.of(param.stored.home);
            kept |= param.update(threads, rule, settings, group)?;
        }
        Ok(kept)
    }
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
    pub(super) master: Option<HostMut>,
    pub(super) moments: Vec<HostMut>,
    /// What the memory that a function writes held before; written back on drop, unless taken away.
    pub(super) backup: Option<HostBuf>,
}

impl OpenParam<'_> {
    /// The rule's pass with the settings of the parameter's group, or none without a gradient.
    pub(super) fn update(
        &mut self,
        threads: &Threads,
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
        self.start_copy(threads)?;
        let rule = rule.with(group);
        let settings = StepSettings {
            step: self.stored.own_step(settings.step),
            lr: settings.lr * group.lr_factor,
            ..settings
        };
        let dtype = self.stored.dtype;
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
            return rule.update(threads, settings, slabs);
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
                    settings,
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

    /// Makes the f32 copy follow weights that the user wrote.
    pub(super) fn follow(&mut self, threads: &Threads) -> Result<()> {
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
    pub(super) fn start_copy(&mut self, threads: &Threads) -> Result<()> {
        if let (Some(old), None) = (&self.old, &self.master) {
            let new = FloatsMut::F32(self.working.as_mut_slice());
            optim::cast(threads, Floats::F32(old.as_slice()), new)?;
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
    pub(super) fn check_finite(&mut self) -> Result<()> {
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
        // A function failed. No other thread has the backup, so reading it cannot fail.
        if let Some(backup) = self.backup.take().and_then(|backup| backup.read_all().ok()) {
            self.values().copy_from_slice(backup.as_slice());
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
