//! Hooks on outputs and gradients of layers ([`RoundPipe::on_output`], [`RoundPipe::on_gradient`]),
//! and the outputs of hidden layers ([`Forward::hidden`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use roundpipe_tensor::HostTensor;

use super::RoundPipe;
use super::forward::Forward;
use super::outputs::host_tensor;
use crate::batch::{MergeOutput, merge};
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::hooks::{Hook, LayerGradient, LayerOutput};
use crate::exec::model::Model;
use crate::layer::Layer;
use crate::sync::lock;
use crate::tree::Tree;

impl<M> RoundPipe<M> {
    /// Calls `hook` with a copy of what a layer gives, for every microbatch of the calls that are
    /// submitted from now on: once each, also where the layer is recomputed. Hooks run on the
    /// workers' threads, which wait for them; microbatches may come in any order. What a hook does
    /// to its copy changes nothing. A hook that panics fails the call, and a call that fails may
    /// have shown values before.
    ///
    /// ```
    /// # use roundpipe::nn::{Init, Linear, Relu};
    /// # use roundpipe::{Bytes, Cpu, DType, HostTensor, RoundPipe, RunConfig, Sequential};
    /// # fn main() -> roundpipe::Result<()> {
    /// # let mut init = Init::new(1, DType::F32);
    /// # let model = Sequential::new()
    /// #     .named("first", Linear::new(&mut init, 2, 3, true)?)
    /// #     .named("bend", Relu);
    /// # let engine = RoundPipe::builder(model).devices([Cpu::new(Some(1))? as _]).memory(Bytes::mib(16)).build()?;
    /// # let x = HostTensor::zeros(DType::F32, &[4, 2])?;
    /// let (sender, largest) = std::sync::mpsc::channel();
    /// let handle = engine.on_output("first", move |shown| {
    ///     let tensors = shown.output.leaves();
    ///     let _ = sender.send((shown.microbatch, tensors[0].max()));
    /// })?;
    /// engine.forward(x, &RunConfig::new().num_microbatch(2))?;
    /// assert_eq!(largest.try_iter().count(), 2);
    /// handle.remove();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] when the model has no such layer. Layers inside a layer are not seen.
    pub fn on_output(
        &self,
        layer: &str,
        hook: impl Fn(&LayerOutput<'_>) + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        register(
            &self.core.model,
            "on_output",
            layer,
            Hook::Output(Arc::new(hook)),
        )
    }

    /// Calls `hook` with a copy of the gradients of a layer's output, as
    /// [`RoundPipe::on_output`].
    ///
    /// # Errors
    /// As [`RoundPipe::on_output`].
    pub fn on_gradient(
        &self,
        layer: &str,
        hook: impl Fn(&LayerGradient<'_>) + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        register(
            &self.core.model,
            "on_gradient",
            layer,
            Hook::Gradient(Arc::new(hook)),
        )
    }
}

/// A hook that was registered. Dropping this leaves it.
#[derive(Debug)]
pub struct HookHandle {
    model: Weak<Model>,
    number: u64,
}

impl HookHandle {
    /// Takes the hook off. Calls that were submitted before still show it their values.
    pub fn remove(self) {
        if let Some(model) = self.model.upgrade() {
            let mut hooks = lock(&model.hooks);
            Arc::make_mut(&mut hooks).remove(self.number);
        }
    }
}

/// Adds a hook to a model.
pub(super) fn register(
    model: &Arc<Model>,
    option: &'static str,
    layer: &str,
    hook: Hook,
) -> Result<HookHandle> {
    let layer = find_layer(&model.layers, option, layer)?;
    let mut hooks = lock(&model.hooks);
    let number = Arc::make_mut(&mut hooks).add(layer, hook);
    Ok(HookHandle {
        model: Arc::downgrade(model),
        number,
    })
}

/// The number of a layer that the user named.
pub(super) fn find_layer(
    layers: &[(String, Arc<dyn Layer>)],
    option: &'static str,
    name: &str,
) -> Result<usize> {
    let found = layers.iter().position(|(layer, _)| layer == name);
    found.ok_or_else(|| {
        let names = layers.iter().map(|(layer, _)| format!("`{layer}`"));
        let names: Vec<String> = names.collect();
        let what = format!("no layer `{name}`; there are {}", names.join(", "));
        Error::config(option, what)
    })
}

impl Forward {
    /// The merged output of a layer that [`RunConfig::hidden`](crate::RunConfig::hidden) asked for.
    ///
    /// # Errors
    /// [`Error::Config`] when it was not asked for; what went wrong in the call.
    pub fn hidden(&self, layer: &str) -> Result<Tree<HostTensor>> {
        let spec = &self.call.spec;
        let number = find_layer(&spec.model.layers, "hidden", layer)?;
        if !spec.hidden.contains(&number) {
            let what = format!("`{layer}` was not asked for; name it in `RunConfig::hidden`");
            return Err(Error::config("hidden", what));
        }
        for microbatch in 0..spec.microbatches {
            // Behind the output everything is there.
            let output = self.call.wait_output("caller", microbatch);
            output.map_err(|error| self.core.failed(error))?;
        }
        merged_hidden(&self.call, number)
    }
}

/// The outputs of hidden layers by name. The call's outputs or losses have been waited for.
pub(super) fn all_hidden(call: &Call) -> Result<BTreeMap<String, Tree<HostTensor>>> {
    let mut hidden = BTreeMap::new();
    for layer in &call.spec.hidden {
        let name = call.spec.model.layers[*layer].0.clone();
        hidden.insert(name, merged_hidden(call, *layer)?);
    }
    Ok(hidden)
}

fn merged_hidden(call: &Call, layer: usize) -> Result<Tree<HostTensor>> {
    let mut parts = Vec::with_capacity(call.spec.microbatches);
    for microbatch in 0..call.spec.microbatches {
        let value = call
            .hidden(layer, microbatch)
            .ok_or_else(|| call.cancelled())?;
        parts.push(value.try_map(|value| host_tensor(&value))?);
        // Reports of bad data are complete only behind the copy.
        call.confirm()?;
    }
    merge(parts, &MergeOutput::Auto)
}
