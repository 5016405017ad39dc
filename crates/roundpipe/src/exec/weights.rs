//! Weights of a launcher's worker: requested, awaited, and kept where they do not change.
//!
//! A layer's weights come from one of three places ([`WeightSource`]), its frozen ones perhaps from
//! another than its trained ones ([`FrozenSource`]); a table may come row by row
//! ([`super::early_rows`]). The upload of a job's weights
//! is requested before the tasks of the job before it start; a layer's tensors are made when its
//! first microbatch gets there, so that compute starts as soon as the first layer has landed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use roundpipe_tensor::pool::Block;
use roundpipe_tensor::transfer::{FilledSlot, HostValue, Slot};
use roundpipe_tensor::{DType, HostBuf, Shape, Tensor};

use super::call::Call;
use super::copy_threads::{FilledWeights, FrozenTarget, WeightUpload};
use super::early_rows::TABLE;
use super::early_weights::EarlyUpload;
use super::held_weights::HeldWeights;
use super::launcher::Launcher;
use super::model::Model;
use super::queue::StageJob;
use super::run_layer::LoadedLayer;
use super::task::Task;
use crate::error::Result;
use crate::plan::Pass;
use crate::store::{FrozenPart, StoreLayer, StoredParam, Writes};

/// Where a job finds a layer's weights. It is decided once, when they are requested: a user's write
/// after that moment must not change the source.
pub(crate) enum WeightSource {
    /// In host memory: the device reads it in place.
    Host,
    /// Still on the worker, from an earlier call or the call's own forward.
    Resident(Vec<Tensor>),
    /// In a slot that the upload thread fills.
    Upload(FrozenSource),
}

/// Where a job finds the frozen weights of a layer whose others are uploaded.
pub(crate) enum FrozenSource {
    /// With the others, in their slot.
    SameSlot,
    /// In memory of their own that is filled now and stays.
    Stays(FrozenPart),
    /// Still on the worker, from an earlier call; by parameter.
    Held(FrozenPart, Vec<Option<Tensor>>),
    /// In memory of their own, which is filled before the others.
    Early(FrozenPart, Arc<EarlyUpload>),
}

impl FrozenSource {
    /// Bytes of the slot for the other weights, and of one for the frozen ones.
    fn slot_bytes(&self, layer: &StoreLayer) -> (usize, Option<usize>) {
        match self {
            // Without trained weights, the slot of the layer is the one that stays.
            Self::Stays(part) if part.block_offset > 0 => (part.block_offset, Some(part.bytes)),
            Self::SameSlot | Self::Stays(_) => (layer.block_bytes(), None),
            Self::Held(part, _) | Self::Early(part, _) => (part.block_offset, None),
        }
    }
}

/// A layer's weights that stay on the worker from call to call.
pub(super) struct ResidentWeights {
    model: Weak<Model>,
    layer: usize,
    version: u64,
    /// [`Store::writes_at`](crate::Store) when they were uploaded.
    writes: Writes,
    tensors: Vec<Tensor>,
}

impl ResidentWeights {
    fn are_for(&self, model: &Arc<Model>, layer: usize) -> bool {
        self.layer == layer && std::ptr::addr_eq(self.model.as_ptr(), Arc::as_ptr(model))
    }

    fn are_of(&self, call: &Call, layer: usize) -> bool {
        let spec = &call.spec;
        if spec.training || self.version != spec.version || !self.are_for(&spec.model, layer) {
            return false;
        }
        let now = spec.model.store.writes_at(layer, spec.version);
        now.is_ok_and(|writes| writes == self.writes)
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
pub(super) struct LoadedLayers(pub BTreeMap<usize, LoadedLayer>);

impl Launcher {
    fn weight_source(
        &self,
        call: &Call,
        (stage, layer): (usize, usize),
        working: Option<u64>,
    ) -> WeightSource {
        if self.worker().device().aliases_host() {
            return WeightSource::Host;
        }
        let mut resident = self.resident.iter();
        let resident = resident.find(|weights| weights.are_of(call, layer));
        if let Some(weights) = resident {
            return WeightSource::Resident(weights.tensors.clone());
        }
        if call.spec.stages[stage].pass == Pass::Backward
            && let Some(tensors) = self.find_kept_weights(call, layer, working)
        {
            return WeightSource::Resident(tensors);
        }
        let frozen = self.frozen_source(call, (stage, layer), working);
        if let FrozenSource::Held(_, tensors) = &frozen
            && let Some(all) = tensors.iter().cloned().collect::<Option<Vec<Tensor>>>()
        {
            return WeightSource::Resident(all);
        }
        WeightSource::Upload(frozen)
    }

    fn frozen_source(
        &self,
        call: &Call,
        (stage, layer): (usize, usize),
        working: Option<u64>,
    ) -> FrozenSource {
        let model = &call.spec.model;
        let Some(part) = frozen_part(call, layer) else {
            return FrozenSource::SameSlot;
        };
        if !call.spec.hold.has(self.index, layer) {
            let early = self.find_early(call, stage, layer, &part);
            return early.map_or(FrozenSource::SameSlot, |early| {
                FrozenSource::Early(part, early)
            });
        }
        let mut held = self.held.iter();
        let held = held.find(|held| held.are_of(model, layer) && held.writes == part.writes);
        match held.filter(|held| leave_room(held.tensors.iter().flatten(), working)) {
            Some(held) => FrozenSource::Held(part, held.tensors.clone()),
            None => FrozenSource::Stays(part),
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
        let working = beside.map(|_| job.needs().task);
        let mut slots = Vec::new();
        let mut sources = HashMap::new();
        let mut early = Vec::new();
        let mut rows = None;
        for layer in StageJob::layers_in_order(&call, job.stage) {
            rows = rows.or_else(|| self.reserve_rows(job, layer, beside));
            if layer == TABLE && rows.is_some() {
                continue;
            }
            let source = self.weight_source(&call, (job.stage, layer), working);
            if let WeightSource::Upload(frozen) = &source {
                if matches!(frozen, FrozenSource::Early(..)) {
                    early.push(layer);
                }
                let reserved = self.reserve(call.spec.model.store.layer(layer), frozen, beside);
                let (slot, target) = reserved
                    .map_err(|error| call.error_at(job.stage, Some(layer), Some(0), error))?;
                slots.push((layer, slot, target));
            }
            sources.insert(layer, source);
        }
        // All slots are reserved before the first upload: without room for one, the others are
        // dropped and nothing was requested.
        job.weights = Some(sources);
        job.rows = rows;
        self.take_early(&call, job.stage, &early);
        self.take_kept_weights(job);
        for (layer, slot, frozen) in slots {
            self.copies.upload(WeightUpload {
                call: call.clone(),
                stage: job.stage,
                layer,
                slot,
                frozen,
                // They go along, so that the upload gives them back as soon as it has landed, not
                // the job at its end.
                tickets: job.tickets.remove(&layer).unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Memory for a layer's weights.
    fn reserve(
        &self,
        layer: &StoreLayer,
        frozen: &FrozenSource,
        beside: Option<u64>,
    ) -> roundpipe_tensor::Result<(Slot, FrozenTarget)> {
        let slot = |bytes: usize| match beside {
            Some(working) => Slot::reserve_beside(self.worker(), bytes as u64, working),
            None => Slot::reserve(self.worker(), bytes as u64),
        };
        let (bytes, frozen_bytes) = frozen.slot_bytes(layer);
        // What stays comes first, so that what comes and goes lies below it in the pool.
        let target = match (frozen, frozen_bytes) {
            (FrozenSource::Stays(part), Some(bytes)) => {
                FrozenTarget::OwnSlot(part.block_offset, slot(bytes)?)
            }
            (FrozenSource::Held(part, _), _) => FrozenTarget::Held(part.block_offset),
            // A copy that has not begun is made in the order of the jobs from here on.
            (FrozenSource::Early(part, early), _) => match early.call_off() {
                Some(slot) => FrozenTarget::OwnSlot(part.block_offset, slot),
                None => FrozenTarget::Held(part.block_offset),
            },
            _ => FrozenTarget::SameSlot,
        };
        Ok((slot(bytes)?, target))
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
                let tensors = match self.row_table(layer) {
                    Some(table) => vec![table],
                    None => self.wait_weights(job, task, layer)?,
                };
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
            WeightSource::Upload(frozen) => {
                let (tensors, writes) = self.uploaded_weights(task, layer, frozen)?;
                if is_as_uploaded(task.call, layer, frozen) {
                    self.keep_resident(task.call, layer, &tensors, &writes);
                    self.keep_weights(task, layer, &tensors, &writes);
                }
                if let FrozenSource::Stays(part) = frozen {
                    self.hold(task.call, layer, part, &tensors);
                }
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

    /// Weights in their slots, once their upload is queued, and the writes that it saw; kernels wait
    /// for the copy.
    fn uploaded_weights(
        &self,
        task: &Task<'_>,
        layer: usize,
        source: &FrozenSource,
    ) -> Result<(Vec<Tensor>, Writes)> {
        let uploaded = task.call.wait_weights(&self.who, task.stage, layer)?;
        let FilledWeights {
            slot,
            mut frozen,
            writes,
        } = uploaded;
        if let (FrozenSource::Early(_, early), None) = (source, &frozen) {
            frozen = Some(early.wait()?);
        }
        let params = task.spec().model.store.layer(layer).params();
        let tensors = weights_in(params, slot, frozen, source);
        let tensors = tensors.map_err(|error| task.error(Some(layer), error))?;
        Ok((tensors, writes))
    }

    /// Keeps a layer's frozen weights for the steps that follow.
    fn hold(&mut self, call: &Call, layer: usize, part: &FrozenPart, tensors: &[Tensor]) {
        let model = &call.spec.model;
        self.held.retain(|held| !held.are_of(model, layer));
        let params = model.store.layer(layer).params().iter();
        let frozen = params
            .zip(tensors)
            .map(|(param, tensor)| (!param.trainable).then(|| tensor.clone()));
        self.held.push(HeldWeights {
            model: Arc::downgrade(model),
            layer,
            writes: part.writes.clone(),
            tensors: frozen.collect(),
        });
    }

    /// Keeps weights for the calls that follow, if the engine asks for it and they cannot change. They
    /// replace those that were not current.
    fn keep_resident(&mut self, call: &Call, layer: usize, tensors: &[Tensor], writes: &Writes) {
        let spec = &call.spec;
        let model = &spec.model;
        // A layer that sets buffers has new ones without a new version.
        if !model.resident || spec.training || model.sets_buffers.load(Ordering::SeqCst) {
            return;
        }
        self.resident
            .retain(|weights| !weights.are_for(model, layer));
        self.resident.push(ResidentWeights {
            model: Arc::downgrade(model),
            layer,
            version: spec.version,
            writes: writes.clone(),
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
        let pool = self.worker().pool();
        let mut places = Vec::new();
        for (index, param) in stored.params().iter().enumerate() {
            // Final, since `run_job` has waited for the end of the earlier call.
            if !stored.filled(index) {
                continue;
            }
            let Some(grad) = stored.grad_range(index)? else {
                continue;
            };
            let bytes = param.shape.numel() * param.dtype.accumulator().size();
            let block = pool.alloc_long("sum", bytes as u64);
            let block = block.map_err(|error| task.error(Some(layer), error))?;
            places.push((index, grad, block));
        }
        // Behind all sums, so that what gradients come in leaves no holes between them.
        for (index, grad, block) in places {
            let started = self.start_sum(&stored.params()[index], grad, block);
            sums[index] = Some(started.map_err(|error| task.error(Some(layer), error))?);
        }
        // The task claimed that memory for its own work.
        pool.trim_frontier();
        Ok(sums)
    }

    /// A sum on the worker, in memory of its own since it is written to, that starts from a stored
    /// gradient.
    fn start_sum(
        &self,
        param: &StoredParam,
        grad: HostBuf,
        block: Block,
    ) -> roundpipe_tensor::Result<Tensor> {
        let grad = HostValue::given(grad, param.grad_dtype, param.shape)?;
        let here = self.port.receive("gradient so far", &grad)?.land()?;
        self.worker()
            .copied_to(&here, param.dtype.accumulator(), block)
    }
}

/// Whether weights that are on a worker leave the tasks of a job so many bytes, if it has to ask: they
/// are the job's from then on, which cannot give them away.
pub(super) fn leave_room<'a>(
    weights: impl IntoIterator<Item = &'a Tensor>,
    working: Option<u64>,
) -> bool {
    let mut weights = weights.into_iter();
    working.is_none_or(|bytes| weights.all(|tensor| tensor.lies_beside(bytes)))
}

/// The frozen weights of a layer that may lie apart from its others.
pub(super) fn frozen_part(call: &Call, layer: usize) -> Option<FrozenPart> {
    let model = &call.spec.model;
    // A layer that sets buffers has new ones without a new version.
    if model.sets_buffers.load(Ordering::SeqCst) {
        return None;
    }
    model.store.frozen_part(layer)
}

/// Whether weights that came in two parts are those of one moment: frozen ones may have been written
/// after they came, and before the others did.
fn is_as_uploaded(call: &Call, layer: usize, source: &FrozenSource) -> bool {
    match source {
        FrozenSource::SameSlot | FrozenSource::Stays(_) => true,
        FrozenSource::Held(part, _) | FrozenSource::Early(part, _) => {
            frozen_part(call, layer).is_some_and(|now| now.writes == part.writes)
        }
    }
}

/// A layer's tensors, in the order of its parameters, from where they lie.
fn weights_in(
    params: &[StoredParam],
    slot: FilledSlot,
    frozen: Option<FilledSlot>,
    source: &FrozenSource,
) -> roundpipe_tensor::Result<Vec<Tensor>> {
    let places = |wanted: &dyn Fn(&StoredParam) -> bool, start: usize| {
        let params = params.iter().filter(|param| wanted(param));
        let place = |param: &StoredParam| {
            let offset = (param.block_offset - start) as u64;
            (offset, param.dtype, param.shape)
        };
        params.map(place).collect::<Vec<(u64, DType, Shape)>>()
    };
    let frozen: Vec<Tensor> = match (source, frozen) {
        (FrozenSource::Held(_, tensors), _) => tensors.iter().flatten().cloned().collect(),
        (FrozenSource::Stays(part) | FrozenSource::Early(part, _), Some(apart)) => {
            apart.tensors(&places(&|param| !param.trainable, part.block_offset))?
        }
        _ => return slot.tensors(&places(&|_| true, 0)),
    };
    let trained = slot.tensors(&places(&|param| param.trainable, 0))?;
    let (mut frozen, mut trained) = (frozen.into_iter(), trained.into_iter());
    let next = |param: &StoredParam| match param.trainable {
        true => trained.next(),
        false => frozen.next(),
    };
    let tensors: Option<Vec<Tensor>> = params.iter().map(next).collect();
    Ok(tensors.expect("each parameter is in one of the two"))
}
