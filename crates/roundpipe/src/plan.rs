//! Where a model is cut into stages: a plan is a value, made once, printed, checked and replayed.
//!
//! Forward and backward have separate cuts, because a backward layer with its recompute costs about
//! three forward layers. A plan names no device and no time; [`crate::simulate`] says what it would
//! take and [`ExecutePlan::auto`] looks for a good one.
//!
//! # Invariants of a checked plan
//!
//! - Forward stages ascend from layer 0 without gaps; backward stages descend to layer 0 without
//!   gaps.
//! - [`PlanKind::Infer`]: forward covers every layer; backward is not looked at.
//! - [`PlanKind::Train`]: both cover every layer.
//! - [`PlanKind::Fused`]: the first backward stage starts where forward ended and reaches the last
//!   layer. It runs forward, loss and backward in one visit.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};

/// What a plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlanKind {
    /// A forward that no backward follows.
    Infer,
    /// A forward, and later its backward.
    Train,
    /// Forward, loss and backward in one call.
    Fused,
}

/// What one visit of a stage does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Forward only.
    Forward,
    /// Recompute, then backward.
    Backward,
    /// Forward, loss and backward, without recompute.
    Fused,
}

/// Consecutive layers that are on a device together, and what is done with them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stage {
    /// Which layers.
    pub layers: Range<usize>,
    /// What the visit does.
    pub pass: Pass,
}

/// How many steps weights may be behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lag {
    /// Every call reads the newest weights.
    Zero,
    /// The update runs beside the next call. If that call computes gradients, it reads the weights
    /// from before the update, unless [`synchronize`](crate::RoundPipe::synchronize) comes between.
    One,
}

/// The cuts of one model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ExecutePlan {
    /// Layers of each forward stage, in the order they run.
    pub forward: Vec<Range<usize>>,
    /// Layers of each backward stage, in the order they run: from the last layer to the first.
    pub backward: Vec<Range<usize>>,
}

impl ExecutePlan {
    /// A plan from stage sizes, each list in the order the stages run.
    pub fn from_sizes(kind: PlanKind, forward: &[usize], backward: &[usize]) -> Self {
        let mut at = 0;
        let forward = forward.iter().map(|&size| {
            at += size;
            at - size..at
        });
        let forward = forward.collect();
        if kind == PlanKind::Infer {
            return Self {
                forward,
                backward: Vec::new(),
            };
        }
        let mut end: usize = backward.iter().sum();
        let backward = backward.iter().map(|&size| {
            end -= size;
            end..end + size
        });
        Self {
            forward,
            backward: backward.collect(),
        }
    }

    /// The same plan with its stages cut into stages of at most `most` layers, all but the fused
    /// one.
    #[must_use]
    pub fn cut(&self, kind: PlanKind, most: usize) -> Self {
        let parts = |stage: &Range<usize>| {
            let count = stage.len().div_ceil(most.max(1)).max(1);
            let (start, len) = (stage.start, stage.len());
            (0..count).map(move |i| start + i * len / count..start + (i + 1) * len / count)
        };
        let (fused, rest) = self
            .backward
            .split_at(usize::from(kind == PlanKind::Fused).min(self.backward.len()));
        let backward = rest
            .iter()
            .flat_map(|stage| parts(stage).collect::<Vec<_>>().into_iter().rev());
        Self {
            forward: self.forward.iter().flat_map(parts).collect(),
            backward: fused.iter().cloned().chain(backward).collect(),
        }
    }

    /// Refuses a plan that does not run each layer of a model of `layers` layers exactly once per
    /// direction.
    ///
    /// # Errors
    /// [`Error::Config`], with the first range that is wrong and what would be right.
    pub fn check(&self, kind: PlanKind, layers: usize) -> Result<()> {
        if layers == 0 {
            return Err(refused("the model has no layers"));
        }
        let forward_end = self.check_forward(layers)?;
        let forward_goal = match (kind, self.backward.first()) {
            (PlanKind::Infer | PlanKind::Train, _) => layers,
            (PlanKind::Fused, Some(fused)) => fused.start,
            (PlanKind::Fused, None) => {
                return Err(refused("there is no backward stage to fuse with the loss"));
            }
        };
        if forward_end != forward_goal {
            return Err(refused(
                match (kind, self.forward.last(), self.backward.first()) {
                    (PlanKind::Fused, Some(last), Some(fused)) => format!(
                        "fused stage {} must start at {forward_end}, where forward stage {} ended",
                        show(fused),
                        show(last)
                    ),
                    (PlanKind::Fused, None, Some(fused)) => {
                        format!(
                            "fused stage {} must start at 0: there is no forward stage",
                            show(fused)
                        )
                    }
                    (_, Some(last), _) => {
                        format!("the last forward stage {} must end at {layers}", show(last))
                    }
                    (_, None, _) => "there is no forward stage".to_string(),
                },
            ));
        }
        if kind == PlanKind::Infer {
            Ok(())
        } else {
            self.check_backward(layers)
        }
    }

    /// Where ascending forward stages end.
    fn check_forward(&self, layers: usize) -> Result<usize> {
        let mut at = 0;
        for (index, range) in self.forward.iter().enumerate() {
            let wrong =
                |rule: String| refused(format!("forward stage {index} ({}) {rule}", show(range)));
            if range.start != at {
                return Err(wrong(format!("must start at {at}")));
            }
            if range.end <= range.start {
                return Err(wrong("is empty".to_string()));
            }
            if range.end > layers {
                return Err(wrong(format!("ends after the last of {layers} layers")));
            }
            at = range.end;
        }
        Ok(at)
    }

    fn check_backward(&self, layers: usize) -> Result<()> {
        let mut at = layers;
        for (index, range) in self.backward.iter().enumerate() {
            let wrong =
                |rule: String| refused(format!("backward stage {index} ({}) {rule}", show(range)));
            if range.end != at {
                return Err(wrong(format!("must end at {at}")));
            }
            if range.end <= range.start {
                return Err(wrong("is empty".to_string()));
            }
            at = range.start;
        }
        match self.backward.last() {
            _ if at == 0 => Ok(()),
            Some(last) => Err(refused(format!(
                "the last backward stage {} must start at 0",
                show(last)
            ))),
            None => Err(refused("there is no backward stage")),
        }
    }

    /// The visits of one call, in order. The plan must have passed [`ExecutePlan::check`] for
    /// `kind`.
    pub fn stages(&self, kind: PlanKind) -> Vec<Stage> {
        let stage = |pass| {
            move |layers: &Range<usize>| Stage {
                layers: layers.clone(),
                pass,
            }
        };
        let mut stages: Vec<_> = self.forward.iter().map(stage(Pass::Forward)).collect();
        if kind != PlanKind::Infer {
            stages.extend(self.backward.iter().map(stage(Pass::Backward)));
        }
        if kind == PlanKind::Fused && !self.backward.is_empty() {
            stages[self.forward.len()].pass = Pass::Fused;
        }
        stages
    }
}

/// Stages as they run, backward after the bar: `0..7 7..14 14..27 | 27..28 24..27 ...`.
impl fmt::Display for ExecutePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |ranges: &[Range<usize>]| ranges.iter().map(show).collect::<Vec<_>>().join(" ");
        f.write_str(&words(&self.forward))?;
        if self.backward.is_empty() {
            return Ok(());
        }
        let gap = if self.forward.is_empty() { "" } else { " " };
        write!(f, "{gap}| {}", words(&self.backward))
    }
}

fn show(range: &Range<usize>) -> String {
    format!("{}..{}", range.start, range.end)
}

fn refused(what: impl Into<String>) -> Error {
    Error::config("execute_plan", what)
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "a plan of one stage is a list of one range"
)]
mod tests {
    use super::*;

    fn plan(forward: &[Range<usize>], backward: &[Range<usize>]) -> ExecutePlan {
        ExecutePlan {
            forward: forward.to_vec(),
            backward: backward.to_vec(),
        }
    }

    /// A plan prints as its stages run, and sizes are enough to make one.
    #[test]
    fn prints_the_order_of_visits() {
        let fused = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 3], &[1, 2, 3]);
        assert_eq!(fused.to_string(), "0..2 2..5 | 5..6 3..5 0..3");
        assert!(fused.check(PlanKind::Fused, 6).is_ok());
        assert_eq!(
            fused.stages(PlanKind::Fused)[2],
            Stage {
                layers: 5..6,
                pass: Pass::Fused
            }
        );
        let infer = ExecutePlan::from_sizes(PlanKind::Infer, &[6], &[]);
        assert_eq!(infer.to_string(), "0..6");
        assert!(infer.check(PlanKind::Infer, 6).is_ok());
        assert!(
            plan(&[], &[0..6]).check(PlanKind::Fused, 6).is_ok(),
            "one fused stage is a whole plan"
        );
        assert_eq!(plan(&[], &[0..6]).to_string(), "| 0..6");
    }

    /// Cutting stages shorter keeps a plan valid, leaves the fused stage alone and exceeds no
    /// length.
    #[test]
    fn stages_can_be_cut_shorter() {
        let fused = ExecutePlan::from_sizes(PlanKind::Fused, &[7], &[3, 5, 2]);
        assert_eq!(
            fused.cut(PlanKind::Fused, 2).to_string(),
            "0..1 1..3 3..5 5..7 | 7..10 5..7 3..5 2..3 0..2"
        );
        for (kind, plan) in [
            (PlanKind::Fused, fused),
            (
                PlanKind::Train,
                ExecutePlan::from_sizes(PlanKind::Train, &[10], &[10]),
            ),
            (
                PlanKind::Infer,
                ExecutePlan::from_sizes(PlanKind::Infer, &[10], &[]),
            ),
        ] {
            for most in 0..12 {
                let cut = plan.cut(kind, most);
                cut.check(kind, 10).unwrap();
                let free = usize::from(kind == PlanKind::Fused);
                assert!(
                    cut.forward
                        .iter()
                        .chain(cut.backward.iter().skip(free))
                        .all(|s| s.len() <= most.max(1))
                );
            }
        }
    }

    /// Each rule has its own refusal, and the refusal names the range.
    #[test]
    fn names_the_range_that_is_wrong() {
        use PlanKind::*;
        let full = [0..2, 2..4];
        let back = [2..4, 0..2];
        let cases = [
            (
                Infer,
                plan(&[0..2], &[]),
                "the last forward stage 0..2 must end at 4",
            ),
            (Infer, plan(&[], &[]), "there is no forward stage"),
            (
                Infer,
                plan(&[1..4], &[]),
                "forward stage 0 (1..4) must start at 0",
            ),
            (
                Train,
                plan(&[0..2, 3..4], &back),
                "forward stage 1 (3..4) must start at 2",
            ),
            (
                Train,
                plan(&[0..2, 2..2, 2..4], &back),
                "forward stage 1 (2..2) is empty",
            ),
            (
                Train,
                plan(&[0..5], &back),
                "forward stage 0 (0..5) ends after the last of 4 layers",
            ),
            (Train, plan(&full, &[]), "there is no backward stage"),
            (
                Train,
                plan(&full, &[0..2, 2..4]),
                "backward stage 0 (0..2) must end at 4",
            ),
            (
                Train,
                plan(&full, &[2..4, 1..2]),
                "the last backward stage 1..2 must start at 0",
            ),
            (
                Train,
                plan(&full, &[3..4, 3..3, 0..3]),
                "backward stage 1 (3..3) is empty",
            ),
            (
                Fused,
                plan(&full, &back),
                "fused stage 2..4 must start at 4, where forward stage 2..4 ended",
            ),
            (
                Fused,
                plan(&[], &back),
                "fused stage 2..4 must start at 0: there is no forward stage",
            ),
            (
                Fused,
                plan(&full, &[]),
                "there is no backward stage to fuse with the loss",
            ),
            (
                Fused,
                plan(&[0..2], &[2..3, 0..2]),
                "backward stage 0 (2..3) must end at 4",
            ),
        ];
        for (kind, plan, what) in cases {
            let error = plan.check(kind, 4).expect_err(what).to_string();
            assert_eq!(error, format!("execute_plan: {what}"), "{kind:?} {plan}");
        }
        assert!(plan(&full, &back).check(Train, 4).is_ok());
        assert!(plan(&[], &[]).check(Train, 0).is_err());
    }
}
