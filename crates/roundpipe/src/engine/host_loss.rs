//! A loss of a forward's merged outputs, computed in host memory: [`Forward::loss`].
//!
//! The loss function is the one that [`RoundPipe::forward_backward`](crate::RoundPipe) takes, and it
//! sees the whole batch at once: a mean is the batch's mean, and samples of different microbatches
//! may meet in it. It runs on the caller's thread, on a cpu worker that the engine makes for its
//! first such loss and keeps.
//!
//! Nothing here runs layers or computes gradients of parameters: [`Forward::backward`] does, from
//! the gradients of the outputs.
//!
//! # Invariants
//! - Outputs and labels are read where they are, without a copy.
//! - A loss function that fails, or a loss that is dropped, leaves no gradients behind.

use std::sync::Mutex;

use roundpipe_tensor::{Bytes, Cpu, Cx, Device, HostTensor, RngSite, Tensor, Worker};
use roundpipe_tensor::{Error as TensorError, Result as TensorResult};

use super::forward::Forward;
use super::outputs::InputGrads;
use super::train::IntoLosses;
use crate::error::Result;
use crate::exec::run_layer::{self, Activation};
use crate::sync::lock;
use crate::tree::Tree;

/// The share of host memory whose addresses the host worker reserves. Pages count when they are
/// touched.
const HOST_SHARE: u64 = 4;

impl Forward {
    /// Computes a loss, or several, from the merged outputs and `labels` ([`Tree::None`] where
    /// there are none), as `criterion(model(x), y)` does in PyTorch; [`HostLoss::backward`] goes
    /// back from it. Without `requires_grad` it only gives the value.
    ///
    /// ```
    /// # use roundpipe::nn::{Init, Linear};
    /// # use roundpipe::{Bytes, Cpu, DType, HostTensor, RoundPipe, RunConfig, Sequential};
    /// # fn main() -> roundpipe::Result<()> {
    /// # let mut init = Init::new(1, DType::F32);
    /// # let model = Sequential::new().with(Linear::new(&mut init, 2, 1, true)?);
    /// # let engine = RoundPipe::builder(model).devices([Cpu::new(Some(1))? as _]).memory(Bytes::mib(16)).build()?;
    /// let x = HostTensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let y = HostTensor::from_slice(&[1.0f32, 0.0], &[2, 1])?;
    /// let forward = engine.forward(x, &RunConfig::new())?;
    /// let loss = forward.loss(y, |cx, output, label| {
    ///     let error = cx.sub(&output.tensor()?, &label.tensor()?)?;
    ///     let squares = cx.mul(&error, &error)?;
    ///     cx.mean_all(&squares)
    /// })?;
    /// assert!(loss.value() > 0.0);
    /// loss.backward()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when `merge_output` is off; what the loss function
    /// reports; a loss that is not one number, or that depends on no output.
    pub fn loss<L: IntoLosses>(
        self,
        labels: impl Into<Tree<HostTensor>>,
        loss: impl FnOnce(&mut Cx, Tree, Tree) -> TensorResult<L>,
    ) -> Result<HostLoss> {
        let worker = self.core.host.get()?;
        let needs_grad = self.leaves_with_gradient()?;
        let mut needs_grad = needs_grad.into_iter();
        let outputs = self.output()?.clone().try_map(|tensor| {
            Ok::<_, TensorError>(Activation {
                grad: needs_grad.next().unwrap_or(false) && tensor.dtype().is_float(),
                tensor: in_place(&worker, &tensor)?,
                host: None,
            })
        })?;
        let labels = labels
            .into()
            .try_map(|label| in_place(&worker, &label).map(|label| label.detach()))?;
        let loss = |cx: &mut Cx, outputs: Tree, labels: Tree| {
            loss(cx, outputs, labels).map(IntoLosses::into_losses)
        };
        let site = self.loss_site();
        let (losses, grads) = if self.differentiable {
            run_layer::losses(loss, &worker, site, &outputs, labels)?
        } else {
            let mut cx = Cx::infer(&worker).at(site);
            let outputs = outputs.map_ref(|output| output.tensor.clone());
            let losses = loss(&mut cx, outputs, labels)?;
            run_layer::check_losses(&losses)?;
            (losses, Vec::new())
        };
        let values = losses.iter().map(Tensor::item);
        let values = values.collect::<TensorResult<Vec<f64>>>()?;
        let grads = grads
            .iter()
            .map(|grad| grad.as_ref().map(to_host).transpose())
            .collect::<Result<Vec<_>>>()?;
        Ok(HostLoss {
            forward: self,
            values,
            grads,
        })
    }

    /// Which leaves of the output a gradient comes back for. All microbatches have the same.
    fn leaves_with_gradient(&self) -> Result<Vec<bool>> {
        let first = self.call.wait_output("caller", 0);
        let first = first.map_err(|error| self.core.failed(error))?;
        Ok(first.leaves().iter().map(|leaf| leaf.grad).collect())
    }

    /// Random numbers of the loss: behind the last layer, in a microbatch that no call has.
    fn loss_site(&self) -> RngSite {
        let spec = &self.call.spec;
        let layers = spec.model.layers.len();
        RngSite {
            seed: spec.model.seed,
            step: spec.number,
            microbatch: u32::MAX,
            layer: (layers + spec.repeat * (layers + 1)) as u32,
            site: 0,
        }
    }
}

/// A loss of a forward's outputs, and the way back.
pub struct HostLoss {
    forward: Forward,
    values: Vec<f64>,
    /// The gradient of each leaf of the output; `None` where the loss does not depend on it.
    grads: Vec<Option<HostTensor>>,
}

impl HostLoss {
    /// The loss: all of [`HostLoss::each`] together.
    pub fn value(&self) -> f64 {
        self.values.iter().sum()
    }

    /// Each loss that the loss function gave.
    pub fn each(&self) -> &[f64] {
        &self.values
    }

    /// The forward it was computed from, with its outputs.
    pub fn forward(&self) -> &Forward {
        &self.forward
    }

    /// Runs the backward from the sum of the losses. Gradients of parameters are added to those
    /// since the last step; those of inputs are returned if `input_grads` asked for them.
    ///
    /// # Errors
    /// As [`Forward::backward`].
    pub fn backward(self) -> Result<InputGrads> {
        if !self.forward.differentiable {
            // Without gradients there is nothing to put in the places of the outputs.
            return self.forward.run_back(Vec::new());
        }
        let grads = self.forward.output()?.with_leaves(self.grads)?;
        self.forward.backward_some(&grads)
    }
}

impl std::fmt::Debug for HostLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostLoss({:?})", self.values)
    }
}

/// A cpu worker that computes in host memory, made when it is first asked for.
#[derive(Default)]
pub(crate) struct HostWorker(Mutex<Option<Worker>>);

impl HostWorker {
    pub fn get(&self) -> Result<Worker> {
        let mut host = lock(&self.0);
        if let Some(worker) = &*host {
            return Ok(worker.clone());
        }
        let cpu = Cpu::new(None)?;
        let bytes = Bytes(cpu.memory().0 / HOST_SHARE);
        Ok(host.insert(Worker::new(cpu, bytes)?).clone())
    }
}

/// A host tensor as the host worker reads it.
fn in_place(worker: &Worker, tensor: &HostTensor) -> TensorResult<Tensor> {
    let memory = tensor.buf().slice(tensor.byte_range())?;
    worker.alias(&memory, tensor.dtype(), *tensor.shape())
}

fn to_host(tensor: &Tensor) -> Result<HostTensor> {
    let host = HostTensor::zeros(tensor.dtype(), tensor.dims())?;
    tensor.read_into(&mut host.write()?)?;
    Ok(host)
}
