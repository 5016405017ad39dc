//! Learning rates as a pure function of the step.
//!
//! A [`LrSchedule`] is a value: linear warm-up from 0 to the base rate, then one of the
//! [`LrDecay`]s. Step 0 is the first optimizer step; past its end a decay stays where it ended.
//! Nothing is remembered between calls, so a resumed run has the rates of an uninterrupted one.
//!
//! What cannot work (a rate below 0, a decay that ends within the warm-up) is refused by
//! [`LrSchedule::new`], in words.

use std::f64::consts::PI;

use crate::error::{Error, Result};

/// A learning rate for every step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    base: f64,
    warmup_steps: u64,
    decay: LrDecay,
}

/// What follows the warm-up. Ratios are relative to the base rate, steps count from step 0.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum LrDecay {
    /// The base rate for ever.
    Constant,
    /// A straight line from the end of the warm-up down to `min_ratio` at `total_steps`.
    Linear {
        /// Where the line ends.
        total_steps: u64,
        /// What it ends with, 0 to 1.
        min_ratio: f64,
    },
    /// Half a cosine wave from the end of the warm-up down to `min_ratio` at `total_steps`.
    Cosine {
        /// Where the wave ends.
        total_steps: u64,
        /// What it ends with, 0 to 1.
        min_ratio: f64,
    },
    /// A line bent by `power`: 1 is [`LrDecay::Linear`], 2 falls faster at first.
    Polynomial {
        /// Where it ends.
        total_steps: u64,
        /// What it ends with, 0 to 1.
        min_ratio: f64,
        /// Above 0.
        power: f64,
    },
    /// `sqrt(timescale / (timescale + steps since the warm-up))`; never ends.
    InverseSqrt {
        /// Steps after which the rate has fallen to `1 / sqrt(2)`; usually the warm-up's length.
        timescale: u64,
    },
    /// Warm-up, stable, decay: the base rate for `stable_steps`, then down to `min_ratio` within
    /// `decay_steps`.
    StableThenDecay {
        /// Steps at the base rate, after the warm-up.
        stable_steps: u64,
        /// Steps from there to the end.
        decay_steps: u64,
        /// What it ends with, 0 to 1.
        min_ratio: f64,
        /// The way down.
        shape: DecayShape,
    },
    /// Times `factor` after every `every` steps since the warm-up.
    Step {
        /// Steps between two falls, at least 1.
        every: u64,
        /// Above 0, at most 1.
        factor: f64,
    },
}

/// The way down of [`LrDecay::StableThenDecay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecayShape {
    /// A straight line.
    Linear,
    /// Half a cosine wave.
    Cosine,
    /// One minus the square root of the progress: steep first, flat at the end.
    OneMinusSqrt,
}

impl LrSchedule {
    /// Warm-up over `warmup_steps` to `base`, then `decay`.
    ///
    /// # Errors
    /// [`Error::Config`] that says which argument can never work and what would.
    pub fn new(base: f64, warmup_steps: u64, decay: LrDecay) -> Result<Self> {
        let refuse = |what: String| Error::config("learning rate", what);
        if !(base.is_finite() && base >= 0.0) {
            return Err(refuse(format!(
                "the base is {base}, it must be finite and at least 0"
            )));
        }
        decay.check(warmup_steps).map_err(refuse)?;
        Ok(Self {
            base,
            warmup_steps,
            decay,
        })
    }

    /// The same rate at every step.
    ///
    /// # Errors
    /// When `base` is negative or not finite.
    pub fn constant(base: f64) -> Result<Self> {
        Self::new(base, 0, LrDecay::Constant)
    }

    /// The learning rate of `step`, the first being 0.
    pub fn at(&self, step: u64) -> f64 {
        self.base * self.ratio(step)
    }

    /// The learning rate of `step` relative to the base rate, 0 to 1.
    pub fn ratio(&self, step: u64) -> f64 {
        match step.checked_sub(self.warmup_steps) {
            None => step as f64 / self.warmup_steps as f64,
            Some(since) => self.decay.ratio(self.warmup_steps, since),
        }
    }
}

impl LrDecay {
    fn check(&self, warmup_steps: u64) -> Result<(), String> {
        match *self {
            Self::Constant => Ok(()),
            Self::Linear {
                total_steps,
                min_ratio,
            }
            | Self::Cosine {
                total_steps,
                min_ratio,
            } => check_end(warmup_steps, total_steps, min_ratio),
            Self::Polynomial {
                total_steps,
                min_ratio,
                power,
            } => {
                if !(power.is_finite() && power > 0.0) {
                    return Err(format!(
                        "the power is {power}, it must be finite and above 0"
                    ));
                }
                check_end(warmup_steps, total_steps, min_ratio)
            }
            Self::InverseSqrt { timescale: 0 } => {
                Err("the timescale is 0, it must be at least 1".into())
            }
            Self::InverseSqrt { .. } => Ok(()),
            Self::StableThenDecay {
                stable_steps,
                decay_steps,
                min_ratio,
                ..
            } => {
                let end = warmup_steps
                    .checked_add(stable_steps)
                    .and_then(|end| end.checked_add(decay_steps));
                match end {
                    None => {
                        Err("warm-up, stable and decay steps together are too many to count".into())
                    }
                    Some(_) => check_ratio(min_ratio),
                }
            }
            Self::Step { every: 0, .. } => {
                Err("the rate falls every 0 steps, it must be at least 1".into())
            }
            Self::Step { factor, .. } if !(factor > 0.0 && factor <= 1.0) => Err(format!(
                "the factor is {factor}, it must be above 0 and at most 1"
            )),
            Self::Step { .. } => Ok(()),
        }
    }

    /// The ratio `since` steps after a warm-up of `warmup_steps`.
    fn ratio(&self, warmup_steps: u64, since: u64) -> f64 {
        let progress = |total_steps: u64| fraction(since, total_steps - warmup_steps);
        match *self {
            Self::Constant => 1.0,
            Self::Linear {
                total_steps,
                min_ratio,
            } => above(min_ratio, 1.0 - progress(total_steps)),
            Self::Cosine {
                total_steps,
                min_ratio,
            } => above(min_ratio, half_wave(progress(total_steps))),
            Self::Polynomial {
                total_steps,
                min_ratio,
                power,
            } => above(min_ratio, (1.0 - progress(total_steps)).powf(power)),
            Self::InverseSqrt { timescale } => {
                let timescale = timescale as f64;
                (timescale / (timescale + since as f64)).sqrt()
            }
            Self::StableThenDecay {
                stable_steps,
                decay_steps,
                min_ratio,
                shape,
            } => {
                let Some(into) = since.checked_sub(stable_steps) else {
                    return 1.0;
                };
                above(min_ratio, shape.height(fraction(into, decay_steps)))
            }
            Self::Step { every, factor } => factor.powf((since / every) as f64),
        }
    }
}

impl DecayShape {
    /// From 1 at progress 0 to 0 at progress 1.
    fn height(self, progress: f64) -> f64 {
        match self {
            Self::Linear => 1.0 - progress,
            Self::Cosine => half_wave(progress),
            Self::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
}

fn check_end(warmup_steps: u64, total_steps: u64, min_ratio: f64) -> Result<(), String> {
    if total_steps < warmup_steps {
        return Err(format!(
            "the schedule ends at step {total_steps}, within its {warmup_steps} warm-up steps"
        ));
    }
    check_ratio(min_ratio)
}

fn check_ratio(min_ratio: f64) -> Result<(), String> {
    if (0.0..=1.0).contains(&min_ratio) {
        return Ok(());
    }
    Err(format!(
        "the final ratio is {min_ratio}, it must be from 0 to 1"
    ))
}

/// `part / whole`, at most 1; a stretch of no steps is over when it begins.
fn fraction(part: u64, whole: u64) -> f64 {
    if part >= whole {
        1.0
    } else {
        part as f64 / whole as f64
    }
}

fn half_wave(progress: f64) -> f64 {
    0.5 * (1.0 + (PI * progress).cos())
}

/// Scales heights from 0 to 1 into ratios from `min_ratio` to 1.
fn above(min_ratio: f64, height: f64) -> f64 {
    min_ratio + (1.0 - min_ratio) * height
}

#[cfg(test)]
mod tests {
    use super::{DecayShape, LrDecay, LrSchedule};

    fn assert_rates(schedule: LrSchedule, expected: &[(u64, f64)]) {
        for &(step, lr) in expected {
            let ours = schedule.at(step);
            assert!(
                (ours - lr).abs() <= 1e-12,
                "step {step}: {ours}, expected {lr}; {schedule:?}"
            );
        }
    }

    /// The base rate is reached on the first step after the warm-up and kept.
    #[test]
    fn constant_follows_the_warm_up() {
        assert_rates(
            LrSchedule::constant(0.5).unwrap(),
            &[(0, 0.5), (u64::MAX, 0.5)],
        );
        let warm = LrSchedule::new(2.0, 4, LrDecay::Constant).unwrap();
        assert_rates(
            warm,
            &[
                (0, 0.0),
                (1, 0.5),
                (3, 1.5),
                (4, 2.0),
                (5, 2.0),
                (u64::MAX, 2.0),
            ],
        );
    }

    /// Known values at the start, the middle, the last step, the end and past it.
    #[test]
    fn decays_to_an_end_have_known_values() {
        let new = |decay| LrSchedule::new(1.0, 10, decay).unwrap();
        let linear = new(LrDecay::Linear {
            total_steps: 110,
            min_ratio: 0.0,
        });
        assert_rates(
            linear,
            &[
                (0, 0.0),
                (5, 0.5),
                (10, 1.0),
                (60, 0.5),
                (109, 0.01),
                (110, 0.0),
                (500, 0.0),
            ],
        );
        let floor = new(LrDecay::Linear {
            total_steps: 110,
            min_ratio: 0.2,
        });
        assert_rates(floor, &[(10, 1.0), (60, 0.6), (110, 0.2), (111, 0.2)]);
        let cosine = new(LrDecay::Cosine {
            total_steps: 110,
            min_ratio: 0.1,
        });
        let third = 0.1 + 0.9 * 0.75;
        assert_rates(
            cosine,
            &[(10, 1.0), (60, 0.55), (110, 0.1), (u64::MAX, 0.1)],
        );
        let cosine = new(LrDecay::Cosine {
            total_steps: 100,
            min_ratio: 0.1,
        });
        assert_rates(cosine, &[(40, third), (70, 0.1 + 0.9 * 0.25)]);
        let square = new(LrDecay::Polynomial {
            total_steps: 110,
            min_ratio: 0.0,
            power: 2.0,
        });
        assert_rates(
            square,
            &[(10, 1.0), (60, 0.25), (109, 0.0001), (110, 0.0), (111, 0.0)],
        );
    }

    /// Where there is no end, the rate falls as the formula says.
    #[test]
    fn endless_decays_have_known_values() {
        let root = LrSchedule::new(1.0, 100, LrDecay::InverseSqrt { timescale: 100 }).unwrap();
        assert_rates(
            root,
            &[
                (0, 0.0),
                (100, 1.0),
                (200, 0.5f64.sqrt()),
                (400, 0.5),
                (10_000, 0.1),
            ],
        );
        let steps = LrSchedule::new(
            8.0,
            2,
            LrDecay::Step {
                every: 10,
                factor: 0.5,
            },
        )
        .unwrap();
        assert_rates(
            steps,
            &[
                (1, 4.0),
                (2, 8.0),
                (11, 8.0),
                (12, 4.0),
                (21, 4.0),
                (22, 2.0),
                (u64::MAX, 0.0),
            ],
        );
    }

    /// Warm-up, stable and decay join without a gap, for each shape.
    #[test]
    fn stable_then_decay_has_known_values() {
        for (shape, quarter) in [
            (DecayShape::Linear, 0.75),
            (DecayShape::Cosine, 0.5 + 0.125f64.sqrt()),
            (DecayShape::OneMinusSqrt, 0.5),
        ] {
            let decay = LrDecay::StableThenDecay {
                stable_steps: 50,
                decay_steps: 40,
                min_ratio: 0.0,
                shape,
            };
            let schedule = LrSchedule::new(1.0, 10, decay).unwrap();
            assert_rates(
                schedule,
                &[
                    (0, 0.0),
                    (10, 1.0),
                    (59, 1.0),
                    (60, 1.0),
                    (70, quarter),
                    (100, 0.0),
                    (101, 0.0),
                ],
            );
        }
    }

    /// Degenerate lengths divide by nothing.
    #[test]
    fn empty_stretches_are_over_at_once() {
        let none = LrSchedule::new(
            1.0,
            0,
            LrDecay::Linear {
                total_steps: 0,
                min_ratio: 0.5,
            },
        )
        .unwrap();
        assert_rates(none, &[(0, 0.5), (1, 0.5)]);
        let shape = DecayShape::Linear;
        let decay = LrDecay::StableThenDecay {
            stable_steps: 0,
            decay_steps: 0,
            min_ratio: 0.5,
            shape,
        };
        assert_rates(
            LrSchedule::new(1.0, 2, decay).unwrap(),
            &[(1, 0.5), (2, 0.5)],
        );
    }

    /// What can never work is refused with the number in the message.
    #[test]
    fn wrong_schedules_are_refused() {
        let refuse = |base, decay, words: &str| {
            let error = LrSchedule::new(base, 10, decay).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        };
        let wsd = |stable_steps, min_ratio| LrDecay::StableThenDecay {
            stable_steps,
            decay_steps: 1,
            min_ratio,
            shape: DecayShape::Linear,
        };
        refuse(-1.0, LrDecay::Constant, "-1");
        refuse(f64::NAN, LrDecay::Constant, "NaN");
        refuse(
            1.0,
            LrDecay::Linear {
                total_steps: 9,
                min_ratio: 0.0,
            },
            "ends at step 9",
        );
        refuse(
            1.0,
            LrDecay::Cosine {
                total_steps: 20,
                min_ratio: 1.5,
            },
            "1.5",
        );
        refuse(
            1.0,
            LrDecay::Cosine {
                total_steps: 20,
                min_ratio: f64::NAN,
            },
            "NaN",
        );
        refuse(
            1.0,
            LrDecay::Polynomial {
                total_steps: 20,
                min_ratio: 0.0,
                power: 0.0,
            },
            "power is 0",
        );
        refuse(1.0, LrDecay::InverseSqrt { timescale: 0 }, "timescale is 0");
        refuse(1.0, wsd(u64::MAX, 0.0), "too many");
        refuse(1.0, wsd(5, -0.5), "-0.5");
        refuse(
            1.0,
            LrDecay::Step {
                every: 0,
                factor: 0.5,
            },
            "every 0 steps",
        );
        refuse(
            1.0,
            LrDecay::Step {
                every: 5,
                factor: 0.0,
            },
            "factor is 0",
        );
    }
}
