//! Loss scaling for f16: gradients are computed of a scaled loss, so that small ones do not vanish.
//!
//! The scale doubles after many good steps and halves after a step with gradients that are not
//! finite, which is skipped. It changes with the weights' version: the scale for a pass over
//! version v is the one after v updates ([`GradScaler::scale_at`]), however far the optimizer
//! behind it has come meanwhile. So all calls of a step use one scale, gradients are unscaled with
//! the scale they were computed with, and an asynchronous run gives the same bits every time.

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

    /// What losses are multiplied with after all updates so far; 1 when disabled.
    pub fn scale_factor(&self) -> f64 {
        let inner = self.lock();
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
        if !inner.state.enabled {
            return Some(1.0);
        }
        let newest = *inner.version.get_or_insert(version);
        let back = usize::try_from(newest.checked_sub(version)?).ok()?;
        inner.scales.iter().rev().nth(back).copied()
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
        let state = &mut inner.state;
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
        let scale = state.scale;
        inner.version = inner.version.map(|version| version + 1);
        inner.scales.push_back(scale);
        if inner.scales.len() > REMEMBERED {
            inner.scales.pop_front();
        }
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
