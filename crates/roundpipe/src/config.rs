//! What a user may choose about a run, on two levels: a model has a configuration, and so has each
//! call.
//!
//! Every field may stay unset. A field set at the call wins over the model's; one set at neither
//! takes its default. [`RunConfig::resolve`] is the only way to the checked form that the engine
//! works from.
//!
//! One option of the Python RoundPipe has no counterpart: `preserve_rng_state`, since random numbers
//! are a function of their place, so that a recompute always repeats them.

use crate::batch::{MergeOutput, SplitInput, SplitLabel};
use crate::error::{Error, Result};
use crate::plan::ExecutePlan;
pub use crate::plan::Lag;

/// Where outputs land.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OutputDevice {
    /// Host memory.
    #[default]
    Host,
    /// Also the memory of the worker with this number: see
    /// [`Forward::tensors`](crate::Forward::tensors). On a ring of one worker, unmerged outputs of
    /// a call without a backward stay there, and a call that takes them as inputs finds them in
    /// place.
    Worker(usize),
}

/// What is recomputed together before its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Grain {
    /// All layers of a stage; only the stage's input is kept.
    #[default]
    Stage,
    /// Each layer by itself; every layer's input is kept, and the peak is lower.
    Layer,
}

/// How the losses of microbatches become the loss of the batch, in value and in gradient.
///
/// Each call's gradients are those of its own loss and are added to the gradients since the last
/// step. So `k` calls with [`LossReduction::Mean`] before a step add up `k` means; set
/// [`Update::grad_scale`](crate::Update::grad_scale) to `1.0 / k` to train on the mean of all, if
/// the calls have the same number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LossReduction {
    /// The plain sum over microbatches, for a loss function that adds up over samples. A function
    /// that returns a mean gives a loss, and gradients, that grow with the number of microbatches.
    #[default]
    Sum,
    /// For a loss function that returns the mean over the samples it was given: each microbatch
    /// counts by its share of the batch's samples, so that the loss and its gradients are those of
    /// the mean over the batch, and the number of microbatches changes nothing but rounding.
    ///
    /// A sample is an index along the dimension that inputs are cut along. A mean over something
    /// else, such as the tokens that have a label, is not the batch's mean this way when
    /// microbatches have unequally many: return a sum divided by the count of the whole batch, with
    /// [`LossReduction::Sum`].
    Mean,
}

/// The choices of one level; what is `None` is left to the level below.
#[derive(Debug, Clone, Default)]
pub struct RunConfig {
    /// Whether a backward may follow; on by default.
    pub requires_grad: Option<bool>,
    /// Whether gradients of the model's inputs are wanted; off by default.
    pub input_grads: Option<bool>,
    /// Where outputs land; the host by default.
    pub output_device: Option<OutputDevice>,
    /// What is recomputed together; a stage by default.
    pub recompute_grain: Option<Grain>,
    /// Whether forwards keep no results for their recompute, which computes all that it needs; off
    /// by default.
    pub recompute_all: Option<bool>,
    /// Into how many microbatches a batch is split; one more than there are devices by default.
    pub num_microbatch: Option<usize>,
    /// How inputs are split; automatic by default.
    pub split_input: Option<SplitInput>,
    /// How labels are split; automatic by default.
    pub split_label: Option<SplitLabel>,
    /// How outputs are merged; automatic by default.
    pub merge_output: Option<MergeOutput>,
    /// How the losses of microbatches become one; their sum by default.
    pub loss_reduction: Option<LossReduction>,
    /// Where the model is cut into stages; planned by default.
    pub execute_plan: Option<ExecutePlan>,
    /// Layers whose outputs are wanted too; none by default.
    pub hidden_layers: Option<Vec<String>>,
}

/// One setter and one line of [`RunConfig::over`] for each field, so that none can be forgotten.
macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident: $kind:ty,)*) => {
        impl RunConfig {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $field(mut self, value: $kind) -> Self {
                    self.$field = Some(value);
                    self
                }
            )*

            /// This level over `base`: what is set here wins.
            #[must_use]
            pub fn over(&self, base: &Self) -> Self {
                Self { $($field: self.$field.clone().or_else(|| base.$field.clone()),)* }
            }
        }
    };
}

fields! {
    /// Says whether a backward may follow. Off, a call reads the newest weights, whatever the lag.
    requires_grad: bool,
    /// Says whether gradients of the model's inputs are wanted.
    input_grads: bool,
    /// Says where outputs land.
    output_device: OutputDevice,
    /// Says what is recomputed together.
    recompute_grain: Grain,
    /// Says whether forwards keep no results for their recompute.
    recompute_all: bool,
    /// Says into how many microbatches a batch is split.
    num_microbatch: usize,
    /// Says how inputs are split.
    split_input: SplitInput,
    /// Says how labels are split.
    split_label: SplitLabel,
    /// Says how outputs are merged.
    merge_output: MergeOutput,
    /// Says how the losses of microbatches become one.
    loss_reduction: LossReduction,
    /// Says where the model is cut into stages.
    execute_plan: ExecutePlan,
    /// Says which layers' outputs are wanted too; see [`RunConfig::hidden`].
    hidden_layers: Vec<String>,
}

impl RunConfig {
    /// Nothing chosen.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks for the outputs of layers, by their names in the model: a forward gives them by
    /// [`Forward::hidden`](crate::Forward::hidden), a training call in
    /// [`TrainOutput::hidden`](crate::TrainOutput::hidden).
    #[must_use]
    pub fn hidden<N: Into<String>>(self, layers: impl IntoIterator<Item = N>) -> Self {
        self.hidden_layers(layers.into_iter().map(Into::into).collect())
    }

    /// The checked form, with defaults for what is unset, on `devices` devices.
    ///
    /// # Errors
    /// [`Error::Config`] for 0 microbatches or a worker that is not there.
    pub fn resolve(&self, devices: usize) -> Result<Resolved> {
        if self.num_microbatch == Some(0) {
            return Err(Error::config(
                "num_microbatch",
                "0 microbatches; the least is 1",
            ));
        }
        let output_device = self.output_device.unwrap_or_default();
        if let OutputDevice::Worker(worker) = output_device
            && worker >= devices
        {
            let what = format!("no worker {worker}; there are {devices}, counted from 0");
            return Err(Error::config("output_device", what));
        }
        Ok(Resolved {
            requires_grad: self.requires_grad.unwrap_or(true),
            input_grads: self.input_grads.unwrap_or(false),
            output_device,
            recompute_grain: self.recompute_grain.unwrap_or_default(),
            recompute_all: self.recompute_all.unwrap_or(false),
            num_microbatch: self.num_microbatch.unwrap_or(devices + 1),
            split_input: self.split_input.clone().unwrap_or_default(),
            split_label: self.split_label.clone().unwrap_or_default(),
            merge_output: self.merge_output.clone().unwrap_or_default(),
            loss_reduction: self.loss_reduction.unwrap_or_default(),
            execute_plan: self.execute_plan.clone(),
            hidden_layers: self.hidden_layers.clone().unwrap_or_default(),
        })
    }
}

/// What one call runs with.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// Whether a backward may follow.
    pub requires_grad: bool,
    /// Whether gradients of the model's inputs are wanted.
    pub input_grads: bool,
    /// Where outputs land.
    pub output_device: OutputDevice,
    /// What is recomputed together.
    pub recompute_grain: Grain,
    /// Whether forwards keep no results for their recompute.
    pub recompute_all: bool,
    /// Into how many microbatches a batch is split; at least 1.
    pub num_microbatch: usize,
    /// How inputs are split.
    pub split_input: SplitInput,
    /// How labels are split.
    pub split_label: SplitLabel,
    /// How outputs are merged.
    pub merge_output: MergeOutput,
    /// How the losses of microbatches become one.
    pub loss_reduction: LossReduction,
    /// Where the model is cut into stages; `None` leaves it to the planner.
    pub execute_plan: Option<ExecutePlan>,
    /// Layers whose outputs are wanted too.
    pub hidden_layers: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::{Grain, OutputDevice, RunConfig};
    use crate::batch::{MergeOutput, SplitInput};
    use crate::plan::{ExecutePlan, PlanKind};

    #[test]
    fn nothing_chosen_gives_the_defaults() {
        let run = RunConfig::default().resolve(3).unwrap();
        assert!(run.requires_grad && !run.input_grads);
        assert_eq!(
            (run.output_device, run.recompute_grain),
            (OutputDevice::Host, Grain::Stage)
        );
        assert_eq!((run.num_microbatch, run.execute_plan.is_none()), (4, true));
        assert!(
            matches!(run.split_input, SplitInput::Auto)
                && matches!(run.merge_output, MergeOutput::Auto)
        );
    }

    /// A field at the call wins, also when it is the default's value; an unset one falls through.
    #[test]
    fn the_call_wins_over_the_model() {
        let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2], &[1, 1]);
        let model = RunConfig::new()
            .requires_grad(false)
            .recompute_grain(Grain::Layer)
            .num_microbatch(7)
            .merge_output(MergeOutput::Off)
            .execute_plan(plan.clone());
        let call = RunConfig::new()
            .requires_grad(true)
            .num_microbatch(2)
            .input_grads(true);
        let run = call.over(&model).resolve(1).unwrap();
        assert!(run.requires_grad && run.input_grads);
        assert_eq!((run.num_microbatch, run.recompute_grain), (2, Grain::Layer));
        assert!(matches!(run.merge_output, MergeOutput::Off));
        assert_eq!(run.execute_plan, Some(plan));
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let text = RunConfig::new()
            .num_microbatch(0)
            .resolve(1)
            .unwrap_err()
            .to_string();
        assert_eq!(text, "num_microbatch: 0 microbatches; the least is 1");
        let away = RunConfig::new().output_device(OutputDevice::Worker(2));
        assert!(away.resolve(3).is_ok());
        let text = away.resolve(2).unwrap_err().to_string();
        assert_eq!(
            text,
            "output_device: no worker 2; there are 2, counted from 0"
        );
    }

    /// A configuration with functions in it can still be logged.
    #[test]
    fn it_prints() {
        let config = RunConfig::new()
            .split_input(SplitInput::function(|inputs, _| Ok(vec![inputs.clone()])));
        assert!(format!("{config:?}").contains("split_input: Some(Function)"));
    }
}
