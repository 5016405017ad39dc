//! Faults that are planted on purpose, so that `roundpipe verify` can be seen to find them.
//!
//! Only a build with the feature `planted-faults` has any; it is off by default, and no published
//! program has it. There the variable `ROUNDPIPE_PLANTED_FAULT` names one, and
//! `checks/planted.py` runs `verify` with each. In every other build these functions give back what
//! they are given.
//!
//! | name | what goes wrong |
//! |---|---|
//! | `missing-event` | gradients leave a worker without waiting for the kernels that make them |
//! | `rounded-twice` | sums of gradients are rounded after every microbatch, not once |
//! | `second-worker` | the same, but only on workers other than the first |
//! | `no-moments` | a checkpoint holds zeros in place of the optimizer's moments |
//! | `late-moments` | moments that come behind their weights are never written |

use roundpipe_tensor::{DType, LaneKind, Result, Tensor};

/// The lane whose event gradients wait for on their way out.
pub(crate) fn lane_before_gradients() -> LaneKind {
    if is_planted("missing-event") {
        return LaneKind::ParamUpload;
    }
    LaneKind::Compute
}

/// A sum of gradients behind a microbatch; `dtype` is the parameter's.
pub(crate) fn microbatch_sum(sum: Tensor, dtype: DType) -> Result<Tensor> {
    if !cfg!(feature = "planted-faults") {
        return Ok(sum);
    }
    let worker = roundpipe_tensor::Worker::of(&sum);
    let id = worker.device().id();
    let is_other = id.index + id.worker > 0;
    if is_planted("rounded-twice") || (is_other && is_planted("second-worker")) {
        let narrow = worker.cast(&sum, dtype)?;
        return worker.copied_long(&narrow, sum.dtype());
    }
    Ok(sum)
}

/// Whether a checkpoint loses the moments.
pub(crate) fn drops_moments() -> bool {
    is_planted("no-moments")
}

/// Whether moments that come later are forgotten.
pub(crate) fn forgets_late_moments() -> bool {
    is_planted("late-moments")
}

#[cfg(not(feature = "planted-faults"))]
fn is_planted(_: &str) -> bool {
    false
}

#[cfg(feature = "planted-faults")]
fn is_planted(name: &str) -> bool {
    use std::sync::OnceLock;
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| std::env::var("ROUNDPIPE_PLANTED_FAULT").ok());
    chosen.as_deref() == Some(name)
}
