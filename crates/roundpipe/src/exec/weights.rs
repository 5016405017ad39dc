//! Weights of a launcher's worker: requested, awaited, and kept where they do not change.
//!
//! A layer's weights come from one of three places ([`WeightSource`]). The upload of a job's weights
//! is requested before the tasks of the job before it start; a layer's tensors are made when its
//! first microbatch gets there, so that compute starts as soon as the first layer has landed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use roundpipe_tensor::transfer::{HostValue, Slot};
use roundpipe_tensor::{DType, HostBuf, Shape, Tensor};

use super::call::Call;
use super::copy_threads::WeightUpload;
use super::launcher::Launcher;
use super::model::Model;
use super::queue::StageJob;
use super::run_layer::LoadedLayer;
use super::task::Task;
use crate::config::Grain;
use crate::error::Result;
use crate::plan::Pass;
use crate::store::StoredParam;

/// Where a job finds a layer's weights. It is decided once, when they are requested: a user's write
/// after that moment must not change the source.
pub(crate) enum WeightSource {
    /// In host memory: the device reads it in place.
    Host,
    /// Still on the worker, from an earlier call.
    Resident(Vec<Tensor>),
    /// In a slot that the upload thread fills.
    Upload,
}

/// A layer's weights that stay on the worker from call to call.
pub(super) struct ResidentWeights {
    model: Weak<Model>,
    layer: usize,
    version: u64,
    /// [`Store::writes`](crate::Store) when they were uploaded.
    writes: u64,
    tensors: Vec<Tensor>,
}

impl ResidentWeights {
    fn are_of(&self, call: &Call, layer: usize) -> bool {
        let spec = &call.spec;
        !spec.training
            && std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(&spec.model))
            && self.layer == layer
            && self.version == spec.version
            && self.writes == spec.model.store.writes(layer)
    }

    /// Whether a call at `version` of `model` may still use them, or a call of another engine.
    pub fn are_current(&self, model: &Arc<Model>, version: u64) -> bool {
        if std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(model)) {
            self.version == version
        } else {
            self.model.strong_count() > 0
        }
    }
}

/// The layers of a job whose weights are on the worker.
#[derive(Default)]
pub(super) struct LoadedLayers(pub HashMap<usize, LoadedLayer>);

impl Launcher {
    fn weight_source(&self, call: &Call, layer: usize) -> WeightSource {
        if self.worker().device().aliases_host() {
            return WeightSource::Host;
        }
        let resident = self
            .resident
            .iter()
            .find(|weights| weights.are_of(call, layer));
        match resident {
            Some(weights) => WeightSource::Resident(weights.tensors.clone()),
            None => WeightSource::Upload,
        }
    }

    /// Reserves memory for a job's weights and requests their upload, in the order they are needed.
    /// With `beside`, the claim of the task under way stays whole and at least so many bytes are left
    /// to tasks.
    ///
    /// # Errors
    /// When the worker has no room; nothing is requested then.
    pub(super) fn request_weights(
        &mut self,
        job: &mut StageJob,
        beside: Option<u64>,
    ) -> Result<()> {
        if job.weights.is_some() {
            return Ok(());
        }
        let call = job.call.clone();
        let stage = &call.spec.stages[job.stage];
        let mut layers: Vec<usize> = stage.layers.clone().collect();
        if stage.pass == Pass::Backward && call.spec.grain == Grain::Layer {
            // Recomputing layer by layer begins with the last.
            layers.reverse();
        }
        let mut slots = Vec::new();
        let mut sources = HashMap::new();
        for layer in layers {
            let source = self.weight_source(&call, layer);
            if let WeightSource::Upload = source {
                let bytes = call.spec.model.store.layer(layer).block_bytes() as u64;
                let slot = match beside {
                    Some(working) => Slot::reserve_beside(self.worker(), bytes, working),
                    None => Slot::reserve(self.worker(), bytes),
                };
                let slot =
                    slot.map_err(|error| call.error_at(job.stage, Some(layer), Some(0), error))?;
                slots.push((layer, slot));
            }
            sources.insert(layer, source);
        }
        // All slots are reserved before the first upload: without room for one, the others are
        // dropped and nothing was requested.
        job.weights = Some(sources);
        for (layer, slot) in slots {
            self.copies.upload(WeightUpload {
                call: call.clone(),
                stage: job.stage,
                layer,
                slot,
                // They go along, so that the upload gives them back as soon as it has landed, not
                // the job at its end.
                tickets: job.tickets.remove(&layer).unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// A layer with its weights on the worker; waits for them the first time.
    pub(super) fn load_layer<'s>(
        &mut self,
        job: &StageJob,
        loaded: &'s mut LoadedLayers,
        task: &Task<'_>,
        layer: usize,
    ) -> Result<&'s mut LoadedLayer> {
        match loaded.0.entry(layer) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(free) => {
                let tensors = self.wait_weights(job, task, layer)?;
                let sums = self.earlier_sums(task, layer, tensors.len())?;
                let stored = task.spec().model.store.layer(layer);
                let params = stored.params().iter().map(|param| param.param.clone());
                Ok(free.insert(LoadedLayer {
                    index: layer,
                    params: params.zip(tensors).collect(),
                    set: vec![false; sums.len()],
                    sums,
                    fp8: task.spec().model.fp8,
                }))
            }
        }
    }

    fn wait_weights(
        &mut self,
        job: &StageJob,
        task: &Task<'_>,
        layer: usize,
    ) -> Result<Vec<Tensor>> {
        let sources = job.weights.as_ref().expect("weights are requested first");
        match &sources[&layer] {
            WeightSource::Host => self.alias_weights(job, task, layer),
            WeightSource::Resident(tensors) => Ok(tensors.clone()),
            WeightSource::Upload => {
                let tensors = self.uploaded_weights(task, layer)?;
                self.keep_resident(task.call, layer, &tensors);
                Ok(tensors)
            }
        }
    }

    /// Weights in host memory, once their version is published.
    fn alias_weights(&self, job: &StageJob, task: &Task<'_>, layer: usize) -> Result<Vec<Tensor>> {
        self.wait_published(job, task, layer)?;
        let spec = task.spec();
        let stored = spec.model.store.layer(layer);
        let mut tensors = Vec::new();
        for (index, param) in stored.params().iter().enumerate() {
            let data = spec.model.store.data(layer, index, spec.version)?;
            let tensor = self.worker().alias(&data, param.dtype, param.shape);
            tensors.push(tensor.map_err(|error| task.error(Some(layer), error))?);
        }
        Ok(tensors)
    }

    /// Waits until the version that a job reads exists.
    fn wait_published(&self, job: &StageJob, task: &Task<'_>, layer: usize) -> Result<()> {
        // The tickets stay with the job: its kernels read host memory until it ends.
        let Some(tickets) = job.tickets.get(&layer) else {
            return Ok(());
        };
        let board = &task.spec().board;
        let _on_board = board.wait(&self.who, "waiting for a layer's weights");
        for ticket in tickets {
            ticket.wait_readable(&task.call.abort)?;
        }
        Ok(())
    }

    /// Weights in their slot, once their upload is queued; kernels wait for the copy.
    fn uploaded_weights(&self, task: &Task<'_>, layer: usize) -> Result<Vec<Tensor>> {
        let uploaded = task.call.wait_weights(&self.who, task.stage, layer)?;
        let stored = task.spec().model.store.layer(layer);
        let places: Vec<(u64, DType, Shape)> = stored
            .params()
            .iter()
            .map(|param| (param.block_offset as u64, param.dtype, param.shape))
            .collect();
        uploaded
            .tensors(&places)
            .map_err(|error| task.error(Some(layer), error))
    }

    /// Keeps weights for the calls that follow, if the engine asks for it and they cannot change.
    fn keep_resident(&mut self, call: &Call, layer: usize, tensors: &[Tensor]) {
        let spec = &call.spec;
        let model = &spec.model;
        // A layer that sets buffers has new ones without a new version.
        if !model.resident || spec.training || model.sets_buffers.load(Ordering::SeqCst) {
            return;
        }
        self.resident.push(ResidentWeights {
            model: Arc::downgrade(model),
            layer,
            version: spec.version,
            writes: model.store.writes(layer),
            tensors: tensors.to_vec(),
        });
    }

    /// Gradients of earlier calls since the last step, as the start of this call's sums.
    fn earlier_sums(
        &self,
        task: &Task<'_>,
        layer: usize,
        count: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut sums: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        if task.stage().pass == Pass::Forward || task.call.adds_to().is_none() {
            return Ok(sums);
        }
        let stored = task.spec().model.store.layer(layer);
        for (index, sum) in sums.iter_mut().enumerate() {
            // Final, since `run_job` has waited for the end of the earlier call.
            if !stored.filled(index) {
                continue;
            }
            let Some(grad) = stored.grad_range(index)? else {
                continue;
            };
            let started = self.start_sum(&stored.params()[index], grad);
            *sum = Some(started.map_err(|error| task.error(Some(layer), error))?);
        }
        Ok(sums)
    }

    /// A sum on the worker that starts from a stored gradient.
    fn start_sum(&self, param: &StoredParam, grad: HostBuf) -> roundpipe_tensor::Result<Tensor> {
        let grad = HostValue::given(grad, param.grad_dtype, param.shape)?;
        let here = self.port.receive("gradient so far", &grad)?.land()?;
        // A sum is written to, so it must be memory of the worker's own.
        self.worker().copied_long(&here, param.dtype.accumulator())
    }
}
