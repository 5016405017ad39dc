//! What a call would do, without doing it: the costs of its layers and its plan.
//!
//! Nothing is computed on a worker and nothing about later calls changes. It refuses what the call
//! itself would refuse when it is prepared and planned.

use super::RoundPipe;
use super::inputs::Inputs;
use super::submit::CallRequest;
use crate::config::RunConfig;
use crate::cost::{LayerCosts, MachineRates};
use crate::error::Result;
use crate::plan::{ExecutePlan, PlanKind};
use crate::tree::Tree;

impl<M> RoundPipe<M> {
    /// The plan that a call of this kind with these inputs would have: the one that `config` gives,
    /// or the best for the costs that are known by now. It prints itself as ranges of layers.
    ///
    /// ```
    /// # use roundpipe::{Cpu, Device, DType, HostTensor, PlanKind, RoundPipe, RunConfig, Sequential};
    /// # use roundpipe::nn::{Init, Linear};
    /// # let mut init = Init::new(0, DType::F32);
    /// # let model = Sequential::new().with(Linear::new(&mut init, 4, 4, true)?);
    /// # let workers: Vec<std::sync::Arc<dyn Device>> = vec![Cpu::new(Some(1))?];
    /// let engine = RoundPipe::builder(model).devices(workers).build()?;
    /// let x = HostTensor::from_slice(&[0.5f32; 8], &[2, 4])?;
    /// println!("{}", engine.auto_plan(PlanKind::Train, x, &RunConfig::new())?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for inputs and options that cannot work, and when
    /// nothing fits the workers.
    pub fn auto_plan(
        &self,
        kind: PlanKind,
        inputs: impl Into<Inputs>,
        config: &RunConfig,
    ) -> Result<ExecutePlan> {
        let (plan, _) = self.core.preview(&self.preview_of(kind, inputs, config))?;
        Ok(plan)
    }

    /// What each layer takes for one microbatch of these inputs: memory by shapes, times as
    /// measured where the layer has run, else guessed. With [`ExecutePlan::auto`] a plan is made
    /// from it by hand, for several engines in one call as well.
    ///
    /// # Errors
    /// As [`RoundPipe::auto_plan`].
    pub fn layer_costs(
        &self,
        kind: PlanKind,
        inputs: impl Into<Inputs>,
        config: &RunConfig,
    ) -> Result<LayerCosts> {
        let request = self.preview_of(kind, inputs, config);
        let (_, costs) = self.core.preview(&request)?;
        Ok(costs)
    }

    /// Plans with these rates as if they had been measured: a machine that was profiled, or one that
    /// is described, gets the plan at once that it would have after some steps. What is measured
    /// later moves them.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a rate that is not above 0.
    pub fn assume_rates(&self, known: &MachineRates) -> Result<()> {
        known.check()?;
        self.core.parts[self.part].planner.assume(known);
        Ok(())
    }

    fn preview_of(
        &self,
        kind: PlanKind,
        inputs: impl Into<Inputs>,
        config: &RunConfig,
    ) -> CallRequest {
        CallRequest {
            part: self.part,
            kind,
            inputs: inputs.into(),
            labels: Tree::None,
            loss: None,
            outputs_are_losses: false,
            wants_outputs: true,
            reads: true,
            config: config.clone(),
            place: None,
        }
    }
}
