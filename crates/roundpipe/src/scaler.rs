//! Loss scaling for f16: gradients are computed of a scaled loss, so that small ones do not vanish.
//!
//! The scale doubles after many good steps and halves after a step with gradients that are not
//! finite, which is skipped. It changes with the weights' version: the scale for a pass over
//! version v is the one after v updates ([`GradScaler::scale_at`]), however far the optimizer
//! behind it has come meanwhile. So all calls of a step use one scale, gradients are unscaled with
//! the scale they were computed with, and an asynchronous run gives the same bits every time.
//!
//! [`RoundPipe::update_scaled`](crate::RoundPipe::update_scaled) does all of it for a rule. In a step
//! function, [`GradScaler::unscale`] and [`GradScaler::step`] do; the scale moves when the step is
//! done, and stays when it fails.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::sync::lock;

/// Scales that are remembered: more than versions can be alive.
const REMEMBERED: usize = 4;

/// Settings and state of a [`GradScaler`]; a checkpoint keeps it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalerState {
    /// What the next losses are multiplied with.
    pub scale: f64,
    /// Factor after `interval` good steps.
    pub growth: f64,
    /// Factor after a bad step.
    pub backoff: f64,
    /// Good steps in a row before the scale grows.
    pub interval: u64,
    /// Good steps in a row so far.
    pub good: u64,
    /// Whether there is any scaling.
    pub enabled: bool,
}

impl Default for ScalerState {
    fn default() -> Self {
        Self {
            scale: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            good: 0,
            enabled: true,
        }
    }
}

impl ScalerState {
    /// Refuses settings under which the scale could not move as it should.
    pub(crate) fn check(&self) -> Result<()> {
        check(self)
    }
}

/// The scale of losses and gradients; cloning shares it.
#[derive(Debug, Clone)]
pub struct GradScaler(Arc<Mutex<ScalerInner>>);

#[derive(Debug)]
struct ScalerInner {
    state: ScalerState,
    /// The version that the newest scale is for; not known before a scale was asked for since the
    /// start or the last restore.
    version: Option<u64>,
    /// The scales after the last updates, the newest at the end.
    scales: VecDeque<f64>,
    /// Whether any scale was asked for since the start or the last restore.
    was_asked: bool,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self::start(ScalerState::default())
    }
}

impl GradScaler {
    /// With settings of your own.
    ///
    /// # Errors
    /// [`Error::Config`] for settings under which the scale could not move as it should.
    pub fn new(state: ScalerState) -> Result<Self> {
        check(&state)?;
        Ok(Self::start(state))
    }

    /// One that scales nothing.
    pub fn disabled() -> Self {
        Self::start(ScalerState {
            enabled: false,
            ..ScalerState::default()
        })
    }

    fn start(state: ScalerState) -> Self {
        Self(Arc::new(Mutex::new(ScalerInner::start(state))))
    }

    /// One that goes on from a checkpoint: the newest weights are `version`, and `previous` was the
    /// scale of the version before.
    pub(crate) fn resumed(state: ScalerState, version: u64, previous: f64) -> Self {
        let mut inner = ScalerInner::start(state);
        inner.version = Some(version);
        inner.scales.push_front(previous);
        Self(Arc::new(Mutex::new(inner)))
    }

    /// The state, and the scale of the version before `version`, which is the newest.
    pub(crate) fn saved(&self, version: u64) -> (ScalerState, f64) {
        let inner = self.lock();
        let back = inner.version.map_or(0, |newest| {
            let back = newest.saturating_sub(version.saturating_sub(1));
            usize::try_from(back).unwrap_or(usize::MAX)
        });
        let previous = inner.scales.iter().rev().nth(back).copied();
        (inner.state, previous.unwrap_or(inner.state.scale))
    }

    /// What losses are multiplied with after all updates so far; 1 when disabled.
    pub fn scale_factor(&self) -> f64 {
        let mut inner = self.lock();
        inner.was_asked = true;
        if inner.state.enabled {
            inner.state.scale
        } else {
            1.0
        }
    }

    /// What losses of a pass over weights of `version` are multiplied with. `None` before the
    /// update that makes this version has ended, and for versions long gone. The first question
    /// after the start or a restore says which version the engine is at.
    pub fn scale_at(&self, version: u64) -> Option<f64> {
        let mut inner = self.lock();
        inner.was_asked = true;
        if !inner.state.enabled {
            return Some(1.0);
        }
        let newest = *inner.version.get_or_insert(version);
        let back = usize::try_from(newest.checked_sub(version)?).ok()?;
        inner.scales.iter().rev().nth(back).copied()
    }

    /// The same once all updates up to `version` have ended: steps that did not use the scaler left
    /// the scale as it was.
    pub(crate) fn settled_scale_at(&self, version: u64) -> Option<f64> {
        let mut inner = self.lock();
        inner.was_asked = true;
        if !inner.state.enabled {
            return Some(1.0);
        }
        let newest = *inner.version.get_or_insert(version);
        let back = usize::try_from(newest.saturating_sub(version)).ok()?;
        inner.scales.iter().rev().nth(back).copied()
    }

    /// Refuses to unscale gradients of losses that cannot have been scaled, since no scale was ever
    /// asked for: they would become 0.
    ///
    /// # Errors
    /// [`Error::Config`] with the way to scale them.
    pub(crate) fn check_asked(&self) -> Result<()> {
        let inner = self.lock();
        if inner.was_asked || !inner.state.enabled {
            return Ok(());
        }
        let what = "no loss was scaled, since its scale was never asked for; pass the loss function \
                    through `scaled_loss`, or multiply the loss with `loss_scale`";
        Err(Error::config("scaler", what))
    }

    /// Whether there is any scaling.
    pub fn is_enabled(&self) -> bool {
        self.lock().state.enabled
    }

    /// Tells how a step went whose gradients were computed with the newest scale.
    pub fn update(&self, found_nonfinite: bool) {
        let used = self.scale_factor();
        self.update_from(used, found_nonfinite);
    }

    /// Tells how a step went whose gradients were computed with the scale `used`. Called once per
    /// update, skipped or not, in order. A second bad step at a scale that has been left already
    /// does not lower it again.
    pub fn update_from(&self, used: f64, found_nonfinite: bool) {
        let mut inner = self.lock();
        let version = inner.version.map(|version| version + 1);
        inner.update(version, used, found_nonfinite);
    }

    /// As [`GradScaler::update_from`] for the update that made `version`. Those in between that did
    /// not use the scaler left the scale as it was.
    pub(crate) fn update_at(&self, version: u64, used: f64, found_nonfinite: bool) {
        let mut inner = self.lock();
        if let Some(newest) = inner.version {
            let missing = version.saturating_sub(newest + 1).min(REMEMBERED as u64);
            (0..missing).for_each(|_| inner.remember());
        }
        inner.update(Some(version), used, found_nonfinite);
    }

    /// Sets the scale for the calls that follow, as PyTorch's `update(new_scale)`; good steps in a
    /// row go on counting. As [`GradScaler::restore`], after
    /// [`RoundPipe::synchronize`](crate::RoundPipe::synchronize).
    ///
    /// # Errors
    /// [`Error::Config`] for a scale that is not finite and above 0; nothing changes then.
    pub fn set_scale(&self, scale: f64) -> Result<()> {
        let mut inner = self.lock();
        let state = ScalerState {
            scale,
            ..inner.state
        };
        check(&state)?;
        *inner = ScalerInner::start(state);
        Ok(())
    }

    /// What the scale is multiplied with after enough good steps, from the next on.
    ///
    /// # Errors
    /// [`Error::Config`] when it is not finite and at least 1; nothing changes then.
    pub fn set_growth_factor(&self, growth: f64) -> Result<()> {
        self.change(|state| state.growth = growth)
    }

    /// What the scale is multiplied with after a bad step, from the next on.
    ///
    /// # Errors
    /// [`Error::Config`] when it is not above 0 and at most 1; nothing changes then.
    pub fn set_backoff_factor(&self, backoff: f64) -> Result<()> {
        self.change(|state| state.backoff = backoff)
    }

    /// How many good steps in a row make the scale grow, from the next on.
    ///
    /// # Errors
    /// [`Error::Config`] when it is 0; nothing changes then.
    pub fn set_growth_interval(&self, interval: u64) -> Result<()> {
        self.change(|state| state.interval = interval)
    }

    /// Changes settings, but not the scale.
    fn change(&self, change: impl FnOnce(&mut ScalerState)) -> Result<()> {
        let mut inner = self.lock();
        let mut state = inner.state;
        change(&mut state);
        check(&state)?;
        inner.state = state;
        Ok(())
    }

    /// Whether both are one scaler.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A copy of settings and state.
    pub fn state(&self) -> ScalerState {
        self.lock().state
    }

    /// Goes on from `state`, in a new run or in the middle of one. Call
    /// [`RoundPipe::synchronize`](crate::RoundPipe::synchronize) first: a step that is under way
    /// still counts with the scale from before.
    ///
    /// # Errors
    /// As [`GradScaler::new`]; nothing changes then.
    pub fn restore(&self, state: ScalerState) -> Result<()> {
        check(&state)?;
        *self.lock() = ScalerInner::start(state);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ScalerInner> {
        lock(&self.0)
    }
}

impl ScalerInner {
    fn start(state: ScalerState) -> Self {
        Self {
            state,
            version: None,
            scales: VecDeque::from([state.scale]),
            was_asked: false,
        }
    }

    /// Moves the scale after an update that made `version`, where that is known.
    fn update(&mut self, version: Option<u64>, used: f64, found_nonfinite: bool) {
        let state = &mut self.state;
        if !state.enabled {
            return;
        }
        if found_nonfinite {
            state.scale = state.scale.min(used * state.backoff);
            state.good = 0;
        } else {
            state.good += 1;
            if state.good >= state.interval {
                // Kept where f32 still holds it, or unscaling would make everything zero.
                state.scale = (state.scale * state.growth).min(f64::from(f32::MAX) / 2.0);
                state.good = 0;
            }
        }
        self.version = version;
        self.remember();
    }

    /// The scale of now is that of one more version.
    fn remember(&mut self) {
        self.scales.push_back(self.state.scale);
        if self.scales.len() > REMEMBERED {
            self.scales.pop_front();
        }
    }
}

fn check(state: &ScalerState) -> Result<()> {
    let refuse = |what: String| Err(Error::config("gradient scaler", what));
    if !(state.scale.is_finite() && state.scale > 0.0) {
        return refuse(format!(
            "scale is {}, it must be finite and above 0",
            state.scale
        ));
    }
    if !(state.growth.is_finite() && state.growth >= 1.0) {
        return refuse(format!(
            "growth is {}, it must be finite and at least 1",
            state.growth
        ));
    }
    if !(state.backoff > 0.0 && state.backoff <= 1.0) {
        return refuse(format!(
            "backoff is {}, it must be above 0 and at most 1",
            state.backoff
        ));
    }
    if state.interval == 0 {
        return refuse("interval is 0, it must be at least 1 step".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{GradScaler, ScalerState};

    /// The numbers of PyTorch's scaler: growth after `interval` good steps in a row, backoff at
    /// once.
    #[test]
    fn the_scale_grows_and_backs_off() {
        let scaler = GradScaler::new(ScalerState {
            interval: 3,
            ..ScalerState::default()
        })
        .unwrap();
        let mut seen = Vec::new();
        for bad in [
            false, false, false, true, false, false, true, false, false, false,
        ] {
            scaler.update(bad);
            seen.push(scaler.scale_factor() / 65536.0);
        }
        assert_eq!(seen, [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0]);
    }

    /// An asynchronous optimizer is one update ahead or not, by chance; the scale of a version is
    /// not.
    #[test]
    fn the_scale_belongs_to_a_version() {
        let scaler = GradScaler::default();
        assert_eq!(
            (scaler.scale_at(0), scaler.scale_at(1)),
            (Some(65536.0), None)
        );
        scaler.update(true);
        assert_eq!(
            (scaler.scale_at(0), scaler.scale_at(1)),
            (Some(65536.0), Some(32768.0))
        );
        // Step 2 ran with the scale of version 0 as well, and overflowed as well.
        scaler.update_from(65536.0, true);
        assert_eq!(scaler.scale_at(2), Some(32768.0));
        (0..9).for_each(|_| scaler.update(false));
        assert_eq!(scaler.scale_at(0), None);
    }

    /// Steps that do not use the scaler leave the scale of their versions as it was.
    #[test]
    fn versions_without_the_scaler_keep_the_scale() {
        let scaler = GradScaler::default();
        assert_eq!(scaler.settled_scale_at(3), Some(65536.0));
        assert_eq!(scaler.settled_scale_at(5), Some(65536.0));
        scaler.update_at(6, 65536.0, true);
        let scales: Vec<_> = (2..9).map(|v| scaler.settled_scale_at(v)).collect();
        let (old, new) = (Some(65536.0), Some(32768.0));
        assert_eq!(scales, [None, old, old, old, new, new, new]);
        scaler.update_at(600, 32768.0, false);
        assert_eq!(scaler.settled_scale_at(600), new);
    }

    /// Settings change in a run and keep the state; those that cannot be are refused.
    #[test]
    fn settings_change_in_a_run() {
        let scaler = GradScaler::default();
        scaler.update(false);
        scaler.set_growth_factor(4.0).unwrap();
        scaler.set_backoff_factor(0.25).unwrap();
        scaler.set_growth_interval(2).unwrap();
        scaler.update(false);
        assert_eq!(scaler.scale_factor(), 4.0 * 65536.0);
        scaler.update(true);
        assert_eq!(scaler.scale_factor(), 65536.0);
        scaler.update(false);
        scaler.set_scale(8.0).unwrap();
        assert_eq!((scaler.scale_factor(), scaler.state().good), (8.0, 1));
        let before = scaler.state();
        assert!(scaler.set_growth_factor(0.5).is_err());
        assert!(scaler.set_backoff_factor(0.0).is_err());
        assert!(scaler.set_growth_interval(0).is_err());
        assert!(scaler.set_scale(f64::INFINITY).is_err());
        assert_eq!(scaler.state(), before);
    }

    #[test]
    fn state_survives_and_bad_settings_do_not() {
        let scaler = GradScaler::default();
        scaler.update(true);
        let clone = scaler.clone();
        let state = scaler.state();
        scaler.update(true);
        scaler.restore(state).unwrap();
        assert_eq!(
            (clone.scale_factor(), clone.scale_at(0)),
            (32768.0, Some(32768.0))
        );
        assert!(
            GradScaler::new(ScalerState {
                scale: 0.0,
                ..state
            })
            .is_err()
        );
        assert!(
            GradScaler::new(ScalerState {
                backoff: f64::NAN,
                ..state
            })
            .is_err()
        );
        assert!(
            GradScaler::new(ScalerState {
                interval: 0,
                ..state
            })
            .is_err()
        );
        let off = GradScaler::disabled();
        off.update(true);
        assert_eq!((off.scale_factor(), off.scale_at(7)), (1.0, Some(1.0)));
    }
}
