//! The backward of a stage: recompute, then the layers from the last to the first.
//!
//! The layers of a stage are taken in groups: the whole stage, or one layer at a time
//! ([`Grain`]). For each group the saved input and the gradients of its output are awaited, in an
//! order that keeps the copy lanes busy: what is needed first is asked for first, and what the next
//! group needs starts on its way before this group is computed.

use std::collections::HashMap;
use std::ops::Range;

use roundpipe_tensor::transfer::{Arrival, HostValue};
use roundpipe_tensor::{Cx, Tensor, Watch};

use super::launcher::Launcher;
use super::queue::StageJob;
use super::repeats::PassKey;
use super::run_layer::{Activation, LayerMode, LoadedLayer, Ran, Taped};
use super::stage_value::{Grads, SavedForRecompute, Seed, SeedOf};
use super::task::Task;
use super::weights::LoadedLayers;
use super::worker_values::{Arriving, ArrivingGrad, Incoming, Needed, Until};
use crate::config::Grain;
use crate::error::{Error, Result};
use crate::plan::{Pass, Stage};
use crate::trace::Category;
use crate::tree::Tree;

/// How a trace names values that a forward saved for its recompute.
const RECOMPUTE: &str = "saved for recompute";

/// What forwards saved for recomputes, on its way here, by layer and microbatch.
#[derive(Default)]
pub(super) struct Prefetched {
    /// Where a group of layers begins.
    inputs: HashMap<(usize, usize), Arriving>,
    /// Of every layer whose forward had saved it by then.
    saved: HashMap<(usize, usize), ArrivingSaved>,
}

impl Prefetched {
    pub fn clear(&mut self) {
        self.inputs.clear();
        self.saved.clear();
    }

    /// Frees pieces that have come early. Their recomputes make them again.
    pub fn drop_pieces(&mut self) {
        for saved in self.saved.values_mut() {
            let is_here = |piece: &ArrivingPiece| matches!(piece, ArrivingPiece::Arriving(_));
            saved.kept.retain(|(_, piece)| !is_here(piece));
        }
    }
}

/// [`SavedForRecompute`] on its way here.
struct ArrivingSaved {
    data: Vec<Incoming>,
    buffers: Vec<(usize, Incoming)>,
    kept: Vec<(usize, ArrivingPiece)>,
    signature: u64,
}

/// A piece of a forward. A recompute can do without, so it comes only where tasks do not need the
/// room.
#[expect(clippy::large_enum_variant, reason = "few are under way at a time")]
enum ArrivingPiece {
    /// On this worker, if it still has it.
    Kept(HostValue),
    Arriving(Arrival),
}

/// The gradients of a stage's outputs, on their way here.
type ArrivingGrads = Vec<Option<ArrivingGrad>>;

/// The groups of layers that a backward stage recomputes at once, in their order.
fn groups(stage: &Stage, grain: Grain) -> Vec<Range<usize>> {
    match grain {
        Grain::Stage => vec![stage.layers.clone()],
        Grain::Layer => {
            let layers = stage.layers.clone().rev();
            layers.map(|layer| layer..layer + 1).collect()
        }
    }
}

impl Launcher {
    pub(super) fn backward(
        &mut self,
        job: &StageJob,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
    ) -> Result<()> {
        let groups = groups(task.stage(), task.spec().grain);
        let mut grads: Option<Vec<Option<Tensor>>> = None;
        let mut arriving_grads = None;
        for (index, group) in groups.iter().enumerate() {
            // Inputs first: the recompute needs them before the backward needs gradients.
            let mut value = self.wait_saved(task, group.start)?;
            if index == 0 {
                arriving_grads = self.prefetch_grads(task)?;
            }
            // What runs next decides what travels now: a layer of this task, the next job, or this
            // stage's next microbatch.
            match groups.get(index + 1) {
                Some(next) => self.prefetch_saved(task, next, 0)?,
                None if task.is_last() => self.prefetch_for_next_job(task)?,
                None => self.prefetch_saved(&task.at(task.microbatch + 1), &groups[0], 0)?,
            }
            let mut tapes = Vec::new();
            for layer in group.clone() {
                // The output of the last is not needed.
                let needs_output = layer + 1 < group.end;
                let ran = self.recompute(job, loaded, task, (layer, needs_output), &value)?;
                tapes.extend(ran.tape);
                value = ran.output;
            }
            // The output of a recompute is not needed; its memory is, by the backward.
            drop(value);
            // The stage's output has gradients from outside, every other group from the group
            // behind it.
            let given = match grads.take() {
                Some(grads) => grads,
                None => self.wait_grads(task, arriving_grads.take())?,
            };
            grads = Some(self.walk_back(task, loaded, group.clone(), tapes, given)?);
        }
        self.pass_grads(task, grads.unwrap_or_default())
    }

    /// Runs the backward of some layers, from the last to the first.
    pub(super) fn walk_back(
        &self,
        task: &Task<'_>,
        loaded: &mut LoadedLayers,
        layers: Range<usize>,
        tapes: Vec<Taped>,
        mut grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        let sums_stay = self.sums_stay(task);
        let leave_early = self.gradients_leave_early(task);
        let outbox = task.spec().needs.stages[task.stage].outbox;
        for (layer, tape) in layers.zip(tapes).rev() {
            let room = self.port.make_room(outbox);
            room.map_err(|error| task.error(Some(layer), error))?;
            self.show_gradients(task, layer, &grads)?;
            let here = loaded.0.get_mut(&layer);
            let here = here.expect("the layer was run in this task");
            let mut leaving = Vec::new();
            grads = self.timed(task, Some(layer), Category::Backward, || {
                let grads = here.back(tape, grads, sums_stay)?;
                if leave_early {
                    leaving = self.round_beside(task, here)?;
                }
                Ok(grads)
            })?;
            if sums_stay {
                let moved = self.move_sums(here);
                moved.map_err(|error| task.error(Some(layer), error))?;
            }
            if !leaving.is_empty() {
                self.download(task, leaving)?;
            }
        }
        Ok(grads)
    }

    /// Whether the gradients of a layer leave as soon as they are final instead of with the job: in
    /// the last task of a call, since its end is what an update at lag 0 waits for.
    fn gradients_leave_early(&self, task: &Task<'_>) -> bool {
        let is_last_stage = task.stage + 1 == task.spec().stages.len();
        is_last_stage && task.is_last() && !self.worker().device().aliases_host()
    }

    /// Whether sums of gradients that a task begins stay for later ones: from the first microbatch
    /// on until the job ends. After the only one they leave at once. On the host all memory is
    /// alike.
    pub(super) fn sums_stay(&self, task: &Task<'_>) -> bool {
        let aliases_host = self.worker().device().aliases_host();
        task.microbatch == 0 && !task.is_last() && !aliases_host
    }

    /// Moves the sums of gradients that were not written where they stay: out of the working memory.
    fn move_sums(&self, here: &mut LoadedLayer) -> roundpipe_tensor::Result<()> {
        for sum in here.sums.iter_mut().flatten() {
            if !sum.is_long() {
                *sum = self.moved_sum(sum)?;
            }
        }
        Ok(())
    }

    /// A sum of gradients, away from the working memory if there is room.
    fn moved_sum(&self, sum: &Tensor) -> roundpipe_tensor::Result<Tensor> {
        match self.worker().copied_long(sum, sum.dtype()) {
            // The move only keeps working memory in one piece; without room the sum stays where it
            // is.
            Err(roundpipe_tensor::Error::DeviceMemory { .. }) => Ok(sum.clone()),
            moved => moved,
        }
    }

    /// Runs a layer forward again, as its forward did, and records it.
    fn recompute(
        &mut self,
        job: &StageJob,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        (layer, needs_output): (usize, bool),
        input: &Tree<Activation>,
    ) -> Result<Ran> {
        let saved = match self.prefetched.saved.remove(&(layer, task.microbatch)) {
            Some(saved) => saved,
            None => {
                let saved = task
                    .call
                    .wait_for_recompute(&self.who, layer, task.microbatch)?;
                self.receive_saved(task, layer, &saved, Needed::Now)?
            }
        };
        let mut data = Vec::with_capacity(saved.data.len());
        for incoming in saved.data {
            data.push(self.land_saved(task, layer, incoming)?);
        }
        let mut buffers = Vec::with_capacity(saved.buffers.len());
        for (index, incoming) in saved.buffers {
            buffers.push((index, self.land_saved(task, layer, incoming)?));
        }
        let mut pieces = Vec::with_capacity(saved.kept.len());
        for (number, piece) in saved.kept {
            let tensor = match piece {
                ArrivingPiece::Kept(host) => self.kept.take_piece(&host),
                ArrivingPiece::Arriving(arrival) => {
                    let landed = arrival.land();
                    Some(landed.map_err(|error| task.error(Some(layer), error))?)
                }
            };
            pieces.extend(tensor.map(|tensor| (number, tensor)));
        }
        let here = self.load_layer(job, loaded, task, layer)?;
        // The forward saw these buffers; the next microbatch brings its own.
        for (index, before) in buffers {
            here.params[index].1 = before;
        }
        let spec = task.spec();
        let key = PassKey::new(layer, self.index, spec.training, input);
        let repeats = &spec.model.repeats;
        let known = repeats.get(&key);
        let watch = match &known {
            Some(Some(known)) => {
                let is_same = known.steps.signature() == saved.signature;
                let pieces = pieces.into_iter().filter(|_| is_same);
                Some(Watch::repeat(&known.steps, pieces, needs_output))
            }
            // It was studied, and must run whole.
            Some(None) => None,
            None => Some(Watch::study()),
        };
        let run = |here: &mut LoadedLayer, watch| {
            let mode = LayerMode::Recompute {
                saved: data.clone(),
                watch,
            };
            self.run_layer(task, here, Category::Recompute, mode, input)
        };
        match run(here, watch) {
            Err(error) if error.is_diverged() => {
                repeats.distrust(key);
                run(here, None)
            }
            Ok(mut ran) if known.is_none() => {
                repeats.learn(key, ran.steps.take(), saved.signature);
                Ok(ran)
            }
            ran => ran,
        }
    }

    fn land_saved(&self, task: &Task<'_>, layer: usize, incoming: Incoming) -> Result<Tensor> {
        let landed = self.landed(RECOMPUTE, incoming);
        landed.map_err(|error| task.error(Some(layer), error))
    }

    // ---- what the forward saved ----

    /// The saved input of a layer, on the worker.
    fn wait_saved(&mut self, task: &Task<'_>, layer: usize) -> Result<Tree<Activation>> {
        let prefetched = self.prefetched.inputs.remove(&(layer, task.microbatch));
        if let Some(arriving) = prefetched {
            return self.land(task, arriving);
        }
        let saved = task.call.wait_saved(&self.who, layer, task.microbatch)?;
        let arriving = self.receive(task, saved, Needed::Now)?;
        self.land(task, arriving)
    }

    /// Starts bringing what was saved for a group of layers, as far as it is there, in the order in
    /// which they are recomputed, and as far as it leaves tasks `spare` bytes more than they need.
    /// Memory that was not lent before is filled behind all kernels queued so far, so what is asked
    /// for by its own task would let that task's kernels wait.
    fn prefetch_saved(&mut self, task: &Task<'_>, layers: &Range<usize>, spare: u64) -> Result<()> {
        let microbatch = task.microbatch;
        let when = Needed::Later { spare };
        let Some(input) = task.call.try_take_saved(layers.start, microbatch) else {
            return Ok(());
        };
        let input = self.receive(task, input, when)?;
        self.prefetched
            .inputs
            .insert((layers.start, microbatch), input);
        for layer in layers.clone() {
            // A forward saves a layer's input before it runs the layer, so the rest may not be
            // there yet.
            let Some(saved) = task.call.try_take_for_recompute(layer, microbatch) else {
                return Ok(());
            };
            let saved = self.receive_saved(task, layer, &saved, when)?;
            self.prefetched.saved.insert((layer, microbatch), saved);
        }
        Ok(())
    }

    /// Starts bringing what the first microbatch of the next job needs, if that job goes backward
    /// in the same call and there is room.
    pub(super) fn prefetch_for_next_job(&mut self, task: &Task<'_>) -> Result<()> {
        // Values wait for the weights of their job: these need the larger pieces.
        let Some(next) = self.next.as_ref().filter(|next| next.weights.is_some()) else {
            return Ok(());
        };
        let stage = &next.call.spec.stages[next.stage];
        let is_same_call = std::sync::Arc::ptr_eq(&next.call, task.call);
        if !is_same_call || stage.pass != Pass::Backward {
            return Ok(());
        }
        let first = Task {
            call: task.call,
            stage: next.stage,
            microbatch: 0,
        };
        let layers = groups(stage, task.spec().grain).remove(0);
        // Rounded gradients of this job are made before the next one claims its working memory, and
        // beside the sums.
        let sums = task.spec().needs.stages[task.stage].sums;
        self.prefetch_saved(&first, &layers, sums)
    }

    /// Starts bringing what a layer saved for its recompute.
    fn receive_saved(
        &self,
        task: &Task<'_>,
        layer: usize,
        saved: &SavedForRecompute,
        when: Needed,
    ) -> Result<ArrivingSaved> {
        let receive = |value: &HostValue| {
            let incoming = self.bring(RECOMPUTE, value, when);
            incoming.map_err(|error| task.error(Some(layer), error))
        };
        let mut data = Vec::with_capacity(saved.data.len());
        for value in &saved.data {
            data.push(receive(value)?);
        }
        let mut buffers = Vec::with_capacity(saved.buffers.len());
        for (index, value) in &saved.buffers {
            buffers.push((*index, receive(value)?));
        }
        // A piece that could not come early is computed again, unless all pieces of the call are
        // known to spare more time than their copies take.
        let waits_for_pieces = task.spec().needs.pieces.host_worth > 0.0;
        let mut kept = Vec::with_capacity(saved.kept.len());
        for (number, value) in &saved.kept {
            if value.is_device_only() {
                kept.push((*number, ArrivingPiece::Kept(value.clone())));
                continue;
            }
            let when = match when {
                Needed::Now if !waits_for_pieces => continue,
                Needed::Now => Needed::Later { spare: 0 },
                later => later,
            };
            let incoming = self.bring(RECOMPUTE, value, when);
            let incoming = incoming.map_err(|error| task.error(Some(layer), error))?;
            if let Incoming::Arriving(arrival) = incoming {
                kept.push((*number, ArrivingPiece::Arriving(arrival)));
            }
        }
        Ok(ArrivingSaved {
            data,
            buffers,
            kept,
            signature: saved.signature,
        })
    }

    // ---- gradients between stages ----

    /// Starts bringing the gradients of this stage's outputs, if they are there.
    fn prefetch_grads(&mut self, task: &Task<'_>) -> Result<Option<ArrivingGrads>> {
        // Seeds may come from another engine; `wait_grads` waits for them.
        if starts_from_seeds(task) {
            return Ok(None);
        }
        let from = task.stage - 1;
        let grads = task.call.try_take_grads(from, task.microbatch);
        grads
            .map(|grads| self.receive_grads(task, &grads))
            .transpose()
    }

    /// The gradients of this stage's outputs, on the worker.
    fn wait_grads(
        &mut self,
        task: &Task<'_>,
        arriving: Option<ArrivingGrads>,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut more = Vec::new();
        let arriving = match arriving {
            Some(arriving) => arriving,
            None => {
                let grads = self.grads(task, &mut more)?;
                self.receive_grads(task, &grads)?
            }
        };
        let mut landed = Vec::with_capacity(arriving.len());
        for grad in arriving {
            let tensor = grad.map(|grad| self.land_grad(task, grad)).transpose()?;
            landed.push(tensor);
        }
        for (leaf, grad) in more {
            let grad = self.receive_grad(task, &grad)?;
            let grad = self.land_grad(task, grad)?;
            let sum = match landed[leaf].take() {
                Some(sum) => Cx::infer(self.worker()).add(&sum, &grad),
                None => Ok(grad),
            };
            landed[leaf] = Some(sum.map_err(|error| task.error(None, error))?);
        }
        Ok(landed)
    }

    fn receive_grads(&mut self, task: &Task<'_>, grads: &Grads) -> Result<ArrivingGrads> {
        let mut arriving = Vec::with_capacity(grads.len());
        for grad in grads {
            let grad = grad.as_ref();
            arriving.push(grad.map(|grad| self.receive_grad(task, grad)).transpose()?);
        }
        Ok(arriving)
    }

    /// The gradients of this stage's outputs, from the previous stage, the user or other calls.
    /// What is to be added to them goes to `more`, each with its place.
    fn grads(&self, task: &Task<'_>, more: &mut Vec<(usize, HostValue)>) -> Result<Grads> {
        if !starts_from_seeds(task) {
            let from = task.stage - 1;
            return task.call.wait_grads(&self.who, from, task.microbatch);
        }
        match task.call.take_seed(task.microbatch) {
            Some(Seed::Given(grads)) => Ok(grads),
            Some(Seed::Of(seeds)) => {
                let output = task.call.wait_output(&self.who, task.microbatch)?;
                let mut chosen: Grads = vec![None; output.leaves().len()];
                for SeedOf { call, choose } in seeds {
                    let grads = call.wait_input_grads(&self.who, task.microbatch);
                    let grads = grads.map_err(|_| call.cancelled())?;
                    task.call.depend_on(&call);
                    for (leaf, grad) in choose(&grads, &output)? {
                        match &mut chosen[leaf] {
                            Some(_) => more.push((leaf, grad)),
                            first => *first = Some(grad),
                        }
                    }
                }
                Ok(chosen)
            }
            None => Err(Error::Cancelled {
                why: "the gradients were taken twice".to_owned(),
            }),
        }
    }

    /// The gradients of this stage's inputs go to the stage that runs the layers before, or to the
    /// caller.
    pub(super) fn pass_grads(&mut self, task: &Task<'_>, grads: Vec<Option<Tensor>>) -> Result<()> {
        let next = task.spec().workers.get(task.stage + 1).copied();
        if next.is_none() && !task.spec().wants_input_grads {
            return Ok(());
        }
        let readers: Vec<usize> = next.into_iter().collect();
        let mut passed = Vec::with_capacity(grads.len());
        for grad in grads {
            let Some(grad) = grad else {
                passed.push(None);
                continue;
            };
            let value = self.keep_or_send(task, "gradient", &grad, &readers, Until::NextStage)?;
            passed.push(Some(value));
        }
        if next.is_some() {
            task.call.pass_grads(task.stage, task.microbatch, passed);
        } else {
            task.call.put_input_grads(task.microbatch, passed);
        }
        Ok(())
    }
}

/// Whether a task starts from gradients that the user gives, or that another engine computes.
fn starts_from_seeds(task: &Task<'_>) -> bool {
    let spec = task.spec();
    spec.loss.is_none() && task.stage == spec.forward_stages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_go_from_the_last_layer_to_the_first() {
        let stage = Stage {
            pass: Pass::Backward,
            layers: 3..6,
        };
        let whole: Vec<Range<usize>> = std::iter::once(3..6).collect();
        assert_eq!(groups(&stage, Grain::Stage), whole);
        assert_eq!(groups(&stage, Grain::Layer), [5..6, 4..5, 3..4]);
    }
}
