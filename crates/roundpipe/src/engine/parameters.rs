//! The optimizer's copies and the gradients of an engine, to be read between steps.
//!
//! Weights themselves are read through the model's parameters. Copies change in steps, and when a
//! state is loaded (`state.rs`); nothing here waits, so call [`RoundPipe::synchronize`] first.

use roundpipe_tensor::{DType, HostBuf, HostTensor, Shape};

use super::RoundPipe;
use crate::error::Result;
use crate::update::OptimHandle;

impl<M> RoundPipe<M> {
    /// The optimizer's copies of all trainable parameters, each once.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_parameters(&self) -> Result<impl Iterator<Item = OptimHandle>> {
        let layers = self.layers();
        let copies = self.core.model.store.optim_params()?.into_iter();
        Ok(copies.filter(move |copy| layers.contains(&copy.layer)))
    }

    /// The same with names, `prefix` in front. Shared parameters are listed once, or under each of
    /// their names.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn optim_named_parameters(
        &self,
        prefix: &str,
        remove_duplicate: bool,
    ) -> Result<impl Iterator<Item = (String, OptimHandle)>> {
        let dot = if prefix.is_empty() { "" } else { "." };
        let store = &self.core.model.store;
        let copies = store.optim_params()?;
        let mut all = Vec::new();
        for layer in &store.layers()[self.layers()] {
            for param in layer.params().iter().filter(|p| p.trainable) {
                let home = &store.layer(param.home.0).params()[param.home.1].name;
                // A shared parameter's own name is the one by the first layer that has it.
                let first = *home == param.name;
                let copy = copies.iter().find(|copy| copy.name == *home);
                if let Some(copy) = copy.filter(|_| first || !remove_duplicate) {
                    all.push((format!("{prefix}{dot}{}", param.name), copy.clone()));
                }
            }
        }
        Ok(all.into_iter())
    }

    /// The gradients since the last step, by name; `None` where there is none. Call
    /// [`RoundPipe::synchronize`] first.
    ///
    /// # Errors
    /// While a gradient is being written.
    pub fn gradients(&self) -> Result<Vec<(String, Option<HostTensor>)>> {
        let mut all = Vec::new();
        for layer in &self.core.model.store.layers()[self.layers()] {
            for (i, param) in layer
                .params()
                .iter()
                .enumerate()
                .filter(|(_, p)| p.trainable)
            {
                // A copy: the range is written again by the next call.
                let grad = match (layer.filled(i), layer.grad_range(i)?) {
                    (true, Some(range)) => Some(copy_of(&range, param.grad_dtype, &param.shape)?),
                    _ => None,
                };
                all.push((param.name.clone(), grad));
            }
        }
        Ok(all)
    }

    /// All names of trained parameters.
    pub(crate) fn trained_names(&self) -> impl Iterator<Item = &str> + Clone {
        self.core.model.store.trained_names()
    }
}

/// A copy of a buffer as a tensor.
pub(super) fn copy_of(buf: &HostBuf, dtype: DType, shape: &Shape) -> Result<HostTensor> {
    let copy = HostTensor::zeros(dtype, shape)?;
    copy.write()?
        .bytes()
        .copy_from_slice(buf.read_all()?.bytes());
    Ok(copy)
}
