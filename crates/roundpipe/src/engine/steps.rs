//! Updates of the weights: what the user calls, and how a step is requested of the optimizer's
//! thread.
//!
//! A step takes the gradients of all calls since the step before. At lag 1 its request returns at
//! once. At lag 0 it returns when all gradients have landed: from then on nothing but the update
//! itself can fail, and the next call follows it layer by layer. A function of the user is waited
//! for at lag 0, since it may fail at any layer.
//!
//! # Invariants
//! - Steps are made in the order of their requests, each on the version before.
//! - A step that was refused or failed has changed nothing.

use std::sync::Arc;

use roundpipe_tensor::{Cx, Result as TensorResult, Tensor};

use super::RoundPipe;
use super::core::{Core, RequestedStep, Sequence};
use super::train::IntoLosses;
use crate::config::Lag;
use crate::error::{Error, Result};
use crate::exec::optimizer_thread::{Outcome, RuleWork, StepRequest, Work};
use crate::groups::{ParamGroup, ParamRule};
use crate::optim::{StepReport, Update};
use crate::scaler::GradScaler;
use crate::tree::Tree;
use crate::update::OptimParams;

/// A step that was ordered.
#[derive(Debug)]
pub struct StepHandle(Arc<Outcome>);

impl StepHandle {
    /// Waits until all weights are updated. Moments may still be written at lag 0; calls that read them
    /// wait for that.
    ///
    /// # Errors
    /// What went wrong in it or in the calls before it; the engine's next call returns it
    /// otherwise.
    pub fn wait(&self) -> Result<StepReport> {
        self.0.wait()
    }
}

impl<M> RoundPipe<M> {
    /// Updates all weights by the engine's rule, from the gradients since the last step. At lag 0
    /// this returns when all gradients have landed; the next call then follows the update layer by
    /// layer.
    ///
    /// A step whose gradients are not all finite is skipped: [`StepReport::skipped`] says so.
    ///
    /// # Errors
    /// [`Error::Config`] without a rule, without gradients or for options that make no sense; what
    /// went wrong in the calls before; [`Error::NotFinite`] after too many steps in a row that were
    /// not finite ([`Builder::max_nonfinite_steps`](super::Builder::max_nonfinite_steps)). Nothing
    /// is updated then.
    pub fn update(&self, update: &Update, lag: Lag) -> Result<StepHandle> {
        self.check_whole("update")?;
        self.check_rule()?;
        update.check()?;
        let work = Work::Rule(RuleWork {
            update: *update,
            groups: self.core.model.store.groups(),
            scaler: None,
        });
        Ok(StepHandle(self.core.step(work, lag)?))
    }

    /// As [`RoundPipe::update`] for losses that were multiplied with [`RoundPipe::loss_scale`]:
    /// gradients are unscaled, and a step with gradients that are not finite is skipped.
    ///
    /// # Errors
    /// As [`RoundPipe::update`]; [`Error::Config`] for a scaler whose scale was never asked for.
    pub fn update_scaled(
        &self,
        update: &Update,
        scaler: &GradScaler,
        lag: Lag,
    ) -> Result<StepHandle> {
        self.check_whole("update_scaled")?;
        self.check_rule()?;
        update.check()?;
        scaler.check_asked()?;
        // The scale that the gradients were computed with: that of the version which the calls
        // read, not the newest, which an update under way may change.
        let used = self.loss_scale(scaler)?;
        let skip_nonfinite = update.skip_nonfinite || scaler.is_enabled();
        let update = Update {
            grad_scale: update.grad_scale / used,
            skip_nonfinite,
            ..*update
        };
        // Again: dividing by the scale may have made `grad_scale` infinite or 0.
        update.check()?;
        let work = Work::Rule(RuleWork {
            update,
            groups: self.core.model.store.groups(),
            scaler: Some((scaler.clone(), used)),
        });
        Ok(StepHandle(self.core.step(work, lag)?))
    }

    /// Replaces the groups of [`Builder::groups`](super::Builder::groups) for the updates that are
    /// asked for from now on; those asked for before keep theirs, also at lag 1. Moments stay.
    ///
    /// # Errors
    /// [`Error::Config`] for a pattern that matches no trained parameter and for settings that the
    /// rule does not have or accept; the groups are as before then.
    pub fn set_groups(&self, groups: impl IntoIterator<Item = ParamGroup>) -> Result<()> {
        self.check_whole("set_groups")?;
        let groups: Vec<_> = groups.into_iter().collect();
        self.core.model.store.set_groups(&groups)
    }

    /// Which rule updates each trained parameter from the next update on, in model order; empty
    /// without a rule. Each prints as a line.
    pub fn param_rules(&self) -> Vec<ParamRule> {
        self.core.model.store.param_rules()
    }

    /// Drops the gradients since the last step and makes a new version of the weights that is equal
    /// to the newest: a step in everything but its effect.
    ///
    /// # Errors
    /// [`Error::Config`] without gradients; what went wrong in the calls before.
    pub fn skip_step(&self, lag: Lag) -> Result<StepHandle> {
        self.check_whole("skip_step")?;
        Ok(StepHandle(self.core.step(Work::Skip, lag)?))
    }

    /// Drops the gradients since the last step, if there are any: [`RoundPipe::skip_step`] at lag 0,
    /// waited for.
    ///
    /// # Errors
    /// What went wrong in the calls before.
    pub fn zero_grad(&self) -> Result<()> {
        self.core.enter("zero_grad")?;
        let has_gradients = !self.core.turn().since_step.is_empty();
        if has_gradients {
            self.skip_step(Lag::Zero)?.wait()?;
        }
        Ok(())
    }

    /// What losses of the next call are to be multiplied with.
    ///
    /// # Errors
    /// When the update it depends on failed.
    pub fn loss_scale(&self, scaler: &GradScaler) -> Result<f64> {
        let version = self.core.wait_visible()?;
        let unknown =
            || format!("it knows no scale for version {version}; use one scaler per engine");
        scaler
            .settled_scale_at(version)
            .ok_or_else(|| Error::config("scaler", unknown()))
    }

    /// A loss function for the next call that multiplies each loss with
    /// [`RoundPipe::loss_scale`], in f32: PyTorch's `scaler.scale(loss)`. Ask for it before each
    /// call, since the scale moves with updates. Losses that the call returns are scaled.
    ///
    /// # Errors
    /// As [`RoundPipe::loss_scale`].
    pub fn scaled_loss<L, F>(
        &self,
        scaler: &GradScaler,
        loss: F,
    ) -> Result<impl Fn(&mut Cx, Tree, Tree) -> TensorResult<Vec<Tensor>> + use<L, F, M>>
    where
        L: IntoLosses,
        F: Fn(&mut Cx, Tree, Tree) -> TensorResult<L> + Send + Sync + 'static,
    {
        let scale = self.loss_scale(scaler)?;
        Ok(move |cx: &mut Cx, output: Tree, labels: Tree| {
            let losses = loss(cx, output, labels)?.into_losses();
            let scaled = losses.iter().map(|loss| {
                let wide = cx.cast(loss, loss.dtype().accumulator())?;
                cx.mul_scalar(&wide, scale)
            });
            scaled.collect()
        })
    }

    /// Updates with a function over all optimizer copies. At lag 0 this waits for it; otherwise it
    /// runs beside the next call. Without gradients since the last step each
    /// [`OptimParam::grad`](crate::OptimParam::grad) is `None`.
    ///
    /// [`GradScaler::step`] is for scaled losses.
    ///
    /// # Errors
    /// At lag 0 what the function returns, what went wrong in the calls before, and
    /// [`Error::Config`] when the function makes a finite value infinite or NaN; at lag 1 the
    /// engine's next call returns these. Weights and copies are as before then.
    pub fn step(
        &self,
        step_fn: impl FnOnce(&mut OptimParams<'_>) -> Result<()> + Send + 'static,
        lag: Lag,
    ) -> Result<StepHandle> {
        self.check_whole("step")?;
        Ok(StepHandle(
            self.core.step(Work::Function(Box::new(step_fn)), lag)?,
        ))
    }

    /// Waits until nothing moves: the model's parameters are then the newest weights, every call
    /// that follows reads them, also after a step at lag 1, and [`RoundPipe::gradients`] are all
    /// there.
    ///
    /// # Errors
    /// What went wrong since the last call of the engine.
    pub fn synchronize(&self) -> Result<()> {
        self.core.synchronize()
    }

    fn check_rule(&self) -> Result<()> {
        if self.core.model.store.rule().is_some() {
            return Ok(());
        }
        Err(Error::config(
            "update",
            "the engine has no rule; give the builder an optimizer, or use `step`",
        ))
    }
}

impl Core {
    /// Requests a step. At lag 0 this waits until all gradients have landed.
    pub fn step(&self, work: Work, lag: Lag) -> Result<Arc<Outcome>> {
        self.enter("step")?;
        let mut sequence = self.turn();
        self.check(&mut sequence)?;
        self.notice_writes(&mut sequence)?;
        if lag > self.max_lag {
            let what = "lag 1 needs a second version of the weights; build the engine with \
                        max_lag(Lag::One)";
            return Err(Error::config("step", what));
        }
        // An update without gradients would count as a step and change nothing: a loop that lost
        // its backward would seem to train. A function may have other things to do.
        let is_function = matches!(work, Work::Function(_));
        if sequence.since_step.is_empty() && !is_function {
            let what = "no gradients were computed since the last step; call `forward_backward` or \
                        `backward` first";
            return Err(Error::config("step", what));
        }
        let outcome = self.request_step(&mut sequence, work, lag);
        if lag == Lag::One {
            return Ok(outcome);
        }
        // A rule's checks are done before its first layer; a function may fail at any parameter.
        let ready = if is_function {
            outcome.wait().map(drop)
        } else {
            outcome.wait_begun()
        };
        match ready {
            Ok(()) => Ok(outcome),
            Err(error) => Err(self.step_failed(&mut sequence, outcome.version, error)),
        }
    }

    fn request_step(&self, sequence: &mut Sequence, work: Work, lag: Lag) -> Arc<Outcome> {
        // Before the step is counted: its calls read what was visible until now.
        let read_version = sequence.visible();
        let calls = std::mem::take(&mut sequence.since_step);
        let version = sequence.steps + 1;
        // A kept forward may have been submitted before calls whose gradients came first.
        let numbers = calls.iter().map(|call| call.first_number());
        let first_number = numbers.min().unwrap_or(sequence.number);
        let outcome = Outcome::new(version, first_number, &self.optimizer.urgency);
        // Counted before it is done: the next call must know which version to read. A failure
        // counts back (`recover.rs`).
        sequence.steps = version;
        sequence.history.push_back(RequestedStep {
            version,
            lag,
            number: sequence.number,
        });
        sequence.outcomes.push(outcome.clone());
        // Engines that only read these weights wait for this version.
        self.model.store.set_asked(version);
        self.optimizer.request(StepRequest {
            version,
            read_version,
            calls,
            // Calls from here on read what this step writes, and fail with it.
            next_call: sequence.next_call,
            lag,
            work,
            outcome: outcome.clone(),
        });
        outcome
    }

    /// The error of a step that its caller waited for.
    fn step_failed(&self, sequence: &mut Sequence, version: u64, error: Error) -> Error {
        // This error itself says that the step was not made, so it need not be `Undone`.
        let plain = |error: Error| match error {
            Error::Undone { first, cause } if first == version => *cause,
            other => other,
        };
        let error = plain(error);
        // The cause, where this error is only its consequence; an older step that is undone, since
        // its caller was promised it; else what happened here.
        match self.recover(sequence).map(plain) {
            Some(first) if error.is_secondary() => first,
            Some(undone @ Error::Undone { .. }) => undone,
            _ => error,
        }
    }

    /// A user who writes the newest weights expects later calls to read them, so those read the
    /// newest version.
    pub(super) fn notice_writes(&self, sequence: &mut Sequence) -> Result<()> {
        if self.model.store.notice_writes() {
            self.catch_up_with_steps(sequence)?;
        }
        Ok(())
    }

    /// Waits for the steps that were requested. From then on calls read the newest weights.
    fn catch_up_with_steps(&self, sequence: &mut Sequence) -> Result<()> {
        sequence.wait_steps();
        self.check(sequence)?;
        if let Some(last) = sequence.history.back() {
            sequence.earliest_number = last.number;
        }
        // Without a history there is no step at lag 1 to read behind of.
        sequence.history.clear();
        Ok(())
    }

    /// Waits until nothing moves.
    pub fn synchronize(&self) -> Result<()> {
        self.enter("synchronize")?;
        let mut sequence = self.turn();
        self.come_to_rest(&mut sequence)?;
        self.recorder.finish(&self.parts[0].planner);
        Ok(())
    }

    /// Waits until nothing moves, in the caller's turn.
    pub(super) fn come_to_rest(&self, sequence: &mut Sequence) -> Result<()> {
        // Calls first: a step waits for the gradients of its calls.
        self.wait_quiet();
        sequence.wait_steps();
        // A save may still read what a caller at rest may write.
        if let Some(save) = self.optimizer.last_save() {
            save.wait_copied();
        }
        self.ring.tidy();
        self.catch_up_with_steps(sequence)
    }
}
