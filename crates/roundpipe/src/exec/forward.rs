//! The forward of a stage, and the fused forward and backward of the last one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use roundpipe_tensor::{Cx, Tensor, Watch};

use super::launcher::Launcher;
use super::queue::StageJob;
use super::repeats::PassKey;
use super::run_layer::{self, Activation, LayerMode, LoadedLayer, Ran, Taped};
use super::stage_value::{Leaf, SavedForRecompute, Source, StageValue};
use super::task::Task;
use super::weights::LoadedLayers;
use super::worker_values::{Arriving, Needed, Until};
use crate::error::{Error, Result};
use crate::plan::Pass;
use crate::trace::Category;
use crate::tree::Tree;

/// How a trace names pieces of forwards that wait in host memory.
const PIECE: &str = "piece of a forward";

impl Launcher {
    /// Runs the layers of a stage; their inputs are saved where a recompute starts.
    pub(super) fn forward(
        &mut self,
        job: &StageJob,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        next_input: &mut Option<Arriving>,
    ) -> Result<()> {
        let spec = task.spec();
        let layers = task.stage().layers.clone();
        let mut value = self.take_input(task, next_input)?;
        for layer in layers.clone() {
            // The previous stage has saved the input of this one.
            let is_new = layer > layers.start || task.stage == 0;
            if spec.saves(layer) && is_new {
                let readers = spec.readers(task.stage, layer);
                // Sent before the layer runs, so that the copy travels beside its kernels.
                let saved = self.send(task, &mut value, &readers, Until::Later)?;
                task.call.save_input(layer, task.microbatch, saved);
            }
            self.bring_rows(task, layer)?;
            let mode = if spec.trains {
                LayerMode::Forward(self.watch_forward(task, layer, &value))
            } else {
                LayerMode::Infer
            };
            let here = self.load_layer(job, loaded, task, layer)?;
            let mut ran = self.run_layer(task, here, Category::Forward, mode, &value)?;
            if spec.trains {
                self.save_for_recompute(task, layer, &mut ran)?;
            }
            value = ran.output;
        }
        self.hand_on(task, value, layers.end)
    }

    /// The output of a forward stage goes to the next stage, or to the caller.
    fn hand_on(&mut self, task: &Task<'_>, mut value: Tree<Activation>, end: usize) -> Result<()> {
        let spec = task.spec();
        let next = spec.stages.get(task.stage + 1);
        if next.is_none_or(|next| next.pass == Pass::Backward) {
            return self.give_output(task, value);
        }
        let is_saved = spec.saves(end);
        let until = if is_saved {
            Until::Later
        } else {
            Until::NextStage
        };
        let readers = spec.readers(task.stage, end);
        let passed = self.send(task, &mut value, &readers, until)?;
        if is_saved {
            // The clone is the same host value. Its two takers were counted as `readers`, so that a
            // kept tensor stays for the second.
            task.call.save_input(end, task.microbatch, passed.clone());
        }
        task.call.pass_value(task.stage, task.microbatch, passed);
        Ok(())
    }

    /// The output of the last forward stage is the caller's.
    fn give_output(&mut self, task: &Task<'_>, mut value: Tree<Activation>) -> Result<()> {
        let output = if task.spec().keeps_outputs {
            value.map_ref(|activation| self.resident_output(activation))
        } else {
            self.send(task, &mut value, &[], Until::Later)?
        };
        task.call.put_output(task.microbatch, output);
        Ok(())
    }

    /// Runs the last layers forward, the loss, and the same layers backward.
    pub(super) fn fused(
        &mut self,
        job: &StageJob,
        loaded: &mut LoadedLayers,
        task: &Task<'_>,
        next_input: &mut Option<Arriving>,
    ) -> Result<()> {
        let layers = task.stage().layers.clone();
        let mut value = self.take_input(task, next_input)?;
        if task.is_last() {
            self.prefetch_for_next_job(task)?;
        }
        let mut tapes: Vec<Taped> = Vec::new();
        for layer in layers.clone() {
            let here = self.load_layer(job, loaded, task, layer)?;
            let mode = LayerMode::Record {
                output_gradient: task.output_gradient().filter(|_| layer + 1 == layers.end),
                sums_stay: self.sums_stay(task),
            };
            let ran = self.run_layer(task, here, Category::Fused, mode, &value)?;
            // `Record` always leaves a tape, so `walk_back` can pair them with the layers.
            tapes.extend(ran.tape);
            value = ran.output;
        }
        let grads = self.loss(task, value)?;
        let grads = self.walk_back(task, loaded, layers, tapes, grads)?;
        self.pass_grads(task, grads)
    }

    /// Computes the losses of a microbatch and the gradients of its output.
    fn loss(
        &mut self,
        task: &Task<'_>,
        mut output: Tree<Activation>,
    ) -> Result<Vec<Option<Tensor>>> {
        let spec = task.spec();
        let Some(loss) = spec.loss.clone() else {
            return Err(Error::config("loss_fn", "a fused stage needs one"));
        };
        let labels = self.labels(task)?;
        // The loss draws its random numbers behind the last layer.
        let site = task.site(spec.model.layers.len());
        let (losses, grads) = self.timed(task, None, Category::Loss, || {
            run_layer::losses(&*loss, self.worker(), site, &output, labels)
        })?;
        let output = if spec.wants_outputs {
            Some(self.send(task, &mut output, &[], Until::Later)?)
        } else {
            None
        };
        let mut sent = Vec::with_capacity(losses.len());
        for loss in &losses {
            // Never kept on the worker: the caller reads it.
            let loss = self.port.send("loss", loss);
            sent.push(loss.map_err(|error| task.error(None, error))?);
        }
        // Before the walk back: the caller may go on while the backward runs.
        task.call.put_losses(task.microbatch, sent, output);
        Ok(grads)
    }

    fn labels(&mut self, task: &Task<'_>) -> Result<Tree> {
        let labels = task.call.take_labels(task.microbatch);
        let labels = labels.map_ref(|label| Leaf::new(label.clone(), false));
        let arriving = self.receive(task, labels, Needed::Now)?;
        let labels = self.land(task, arriving)?;
        Ok(labels.map_ref(|activation| activation.tensor.clone()))
    }

    // ---- input ----

    /// The input of this task on the worker; the next microbatch's starts on its way.
    fn take_input(
        &mut self,
        task: &Task<'_>,
        next_input: &mut Option<Arriving>,
    ) -> Result<Tree<Activation>> {
        let arriving = match next_input.take() {
            Some(arriving) => arriving,
            None => {
                let input = self.wait_input(task)?;
                self.receive(task, input, Needed::Now)?
            }
        };
        let value = self.land(task, arriving)?;
        if !task.is_last() {
            // The next microbatch travels while this one computes.
            let next = task.at(task.microbatch + 1);
            if let Some(input) = self.try_input(&next)? {
                *next_input = Some(self.receive(&next, input, Needed::Later { spare: 0 })?);
            }
        }
        Ok(value)
    }

    fn wait_input(&self, task: &Task<'_>) -> Result<StageValue> {
        if task.stage > 0 {
            let from = task.stage - 1;
            return task.call.wait_value(&self.who, from, task.microbatch);
        }
        match task.call.take_input(task.microbatch) {
            Some(input) => self.resolve(task, input),
            None => Err(Error::Cancelled {
                why: "an input was taken twice".to_owned(),
            }),
        }
    }

    /// The input of a task if it is there.
    fn try_input(&self, task: &Task<'_>) -> Result<Option<StageValue>> {
        if task.stage > 0 {
            let from = task.stage - 1;
            return Ok(task.call.try_take_value(from, task.microbatch));
        }
        if !task.call.input_is_ready(task.microbatch) {
            return Ok(None);
        }
        let input = task.call.take_input(task.microbatch);
        input.map(|input| self.resolve(task, input)).transpose()
    }

    /// Puts the outputs of other calls in their places; waits for them.
    fn resolve(&self, task: &Task<'_>, input: Tree<Source>) -> Result<StageValue> {
        let wants_grads = task.spec().wants_input_grads;
        input.try_flat_map(&mut |source| match source {
            Source::Value(leaf) => Ok(Tree::Tensor(leaf)),
            Source::Output {
                call: other,
                microbatch,
                part,
            } => {
                let output = other.wait_output(&self.who, microbatch);
                // The error of the wait says only that a call failed; this one says which and why.
                let output = output.map_err(|_| other.cancelled())?;
                // Kernels report bad data later than they give values, so this call watches those
                // reports too.
                task.call.depend_on(&other);
                let found = part.find(&output);
                let (output, _) = found.map_err(|error| task.error(None, error))?;
                Ok(output.map_ref(|leaf| Leaf {
                    grad: leaf.grad && wants_grads,
                    ..leaf.clone()
                }))
            }
        })
    }

    // ---- layers ----

    /// Runs one layer on a value.
    pub(super) fn run_layer(
        &self,
        task: &Task<'_>,
        here: &mut LoadedLayer,
        category: Category,
        mode: LayerMode,
        input: &Tree<Activation>,
    ) -> Result<Ran> {
        if task.call.has_failed() {
            // The rest may take long, and its results are not needed.
            return Err(task.call.cancelled());
        }
        let spec = task.spec();
        let layer = here.index;
        // A long stage sends an input for every layer; the outbox would hold them all until the
        // task ends.
        let room = self.port.make_room(spec.needs.stages[task.stage].outbox);
        room.map_err(|error| task.error(Some(layer), error))?;
        let module = &*spec.model.layers[layer].1;
        let ran = self.timed(task, Some(layer), category, || {
            let site = task.site(layer);
            here.run(module, self.worker(), spec.training, site, mode, input)
        })?;
        if category != Category::Recompute {
            if spec.probes {
                self.probe(task, layer, &ran.output);
            }
            self.show_output(task, layer, &ran.output)?;
        }
        if !ran.buffers.is_empty() {
            // Known before the caller sees a result of this call, so before it can submit the next.
            spec.model.sets_buffers.store(true, Ordering::SeqCst);
        }
        Ok(ran)
    }

    /// Notes the largest and the smallest value of a layer's output, which show whether all are
    /// finite. A layer that cannot be probed for want of memory is left out.
    fn probe(&self, task: &Task<'_>, layer: usize, output: &Tree<Activation>) {
        for activation in output.leaves() {
            // Values without gradients, such as masks, may well be infinite.
            if !activation.grad || activation.tensor.numel() == 0 {
                continue;
            }
            let mut cx = Cx::infer(self.worker());
            let largest = cx.max(&activation.tensor, &[], false);
            let smallest = cx.min(&activation.tensor, &[], false);
            for extreme in [largest, smallest].into_iter().flatten() {
                if let Ok(value) = self.port.send("probe", &extreme) {
                    task.call.note_probe(layer, task.microbatch, value);
                }
            }
        }
    }

    /// What the forward of a layer keeps for its recompute: the pieces that its call has chosen, as
    /// far as there is room.
    fn watch_forward(&self, task: &Task<'_>, layer: usize, input: &Tree<Activation>) -> Watch {
        let spec = task.spec();
        let device = self.worker().device();
        // They stay until the backward, so they leave room for every task until then.
        let later = &spec.needs.stages[task.stage..];
        let largest = later.iter().map(|needs| needs.task).max().unwrap_or(0);
        let working = (!device.aliases_host()).then_some(largest);
        let (mut stay, mut leave) = (Vec::new(), Vec::new());
        let Some(keep) = spec.keep.layers.get(&layer) else {
            return Watch::keep(stay, leave, working);
        };
        let key = PassKey::new(layer, self.index, spec.training, input);
        let known = spec.model.repeats.get(&key).flatten();
        let choices = known.map_or_else(
            || Arc::from([]),
            |known| known.choices(keep.needs_output).clone(),
        );
        let mut room = self.kept.room_for_pieces();
        for (place, choice) in choices.iter().enumerate().take(keep.stay + keep.leave) {
            if place >= keep.stay {
                leave.extend(&choice.pieces);
            } else if let Some(left) = room.checked_sub(choice.bytes) {
                room = left;
                stay.extend(&choice.pieces);
            }
        }
        Watch::keep(stay, leave, working)
    }

    /// Sends what a layer saved for its recompute to the host; pieces stay here.
    fn save_for_recompute(&mut self, task: &Task<'_>, layer: usize, ran: &mut Ran) -> Result<()> {
        let what = "saved for recompute";
        let mut saved = SavedForRecompute::default();
        for tensor in ran.saved.iter().flatten() {
            saved.data.push(self.send_value(task, layer, what, tensor)?);
        }
        for (index, before) in &ran.buffers {
            let sent = self.send_value(task, layer, what, before)?;
            saved.buffers.push((*index, sent));
        }
        if let Some(watched) = ran.watched.take() {
            saved.signature = watched.signature;
            for (piece, tensor) in watched.kept {
                saved.kept.push((piece, self.keep_piece(&tensor)));
            }
            for (piece, tensor) in watched.leaving {
                let sent = self.send_value(task, layer, PIECE, &tensor)?;
                saved.kept.push((piece, sent));
            }
        }
        let call = task.call;
        call.save_for_recompute(layer, task.microbatch, saved);
        Ok(())
    }
}
