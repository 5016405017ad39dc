//! One layer of one microbatch on one worker: forward, recompute and backward.
//!
//! Every layer has a tape of its own, so that its gradients never mix with those of a layer that
//! shares a parameter, and stage cuts cannot change the order of any sum. Values between layers are
//! trees whose leaves know whether a gradient will come back for them.
//!
//! Nothing here waits, sends or receives; [`super::launcher`] does.

use roundpipe_tensor::{
    Cx, Error, Param, PassSteps, Recompute, Result, RngSite, Tensor, Watch, Watched, Worker,
};

use crate::layer::Layer;
use crate::planted;
use crate::tree::Tree;

use roundpipe_tensor::transfer::HostValue;

/// A leaf of a value on a worker.
#[derive(Debug, Clone)]
pub(crate) struct Activation {
    pub tensor: Tensor,
    /// Whether a gradient will come back for it.
    pub grad: bool,
    /// Its value in host memory, when it was received or sent.
    pub host: Option<HostValue>,
}

/// A layer whose weights are on the worker.
pub(crate) struct LoadedLayer {
    pub index: usize,
    pub params: Vec<(Param, Tensor)>,
    /// Sums of gradients over microbatches, in the accumulator type; `None` before the first.
    pub sums: Vec<Option<Tensor>>,
    /// Which of them are buffers that the layer has set.
    pub set: Vec<bool>,
    /// Whether projections run in fp8 ([`Model`](super::model::Model)).
    pub fp8: bool,
}

/// How a layer is run.
pub(crate) enum LayerMode {
    /// Nothing is kept, no backward follows.
    Infer,
    /// A recompute follows. What it need not compute again is kept as the watch says.
    Forward(Watch),
    /// Recorded for the backward that follows in the same visit.
    Record {
        /// Of every output, where they are losses and it is known.
        output_gradient: Option<f64>,
        /// Whether new sums of gradients stay for later tasks.
        sums_stay: bool,
    },
    /// As `Record`, repeating an earlier forward that saved these. Without a watch it runs whole.
    Recompute {
        saved: Vec<Tensor>,
        watch: Option<Watch>,
    },
}

/// What a layer left behind for its backward.
pub(crate) struct Taped {
    cx: Cx,
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

/// What running a layer gives.
pub(crate) struct Ran {
    pub output: Tree<Activation>,
    pub tape: Option<Taped>,
    /// Saved for its recompute.
    pub saved: Option<Vec<Tensor>>,
    /// What was seen of its memory and kernels, where it was watched.
    pub watched: Option<Watched>,
    /// What it did, where that was studied.
    pub steps: Option<PassSteps>,
    /// Buffers it set, by place among the layer's parameters, with the value each had before.
    pub buffers: Vec<(usize, Tensor)>,
}

impl LoadedLayer {
    fn context(
        &mut self,
        worker: &Worker,
        training: bool,
        site: RngSite,
        mode: LayerMode,
    ) -> Result<Cx> {
        let (cx, records) = match mode {
            LayerMode::Infer => (Cx::new(worker, false, training), false),
            LayerMode::Forward(watch) => {
                let worker = worker.watched(watch);
                let later = Recompute::Later(None);
                (Cx::ahead(&worker, training).with_recompute(later), false)
            }
            LayerMode::Record {
                output_gradient,
                sums_stay,
            } => {
                let mut cx = Cx::new(worker, true, training).with_output_gradient(output_gradient);
                if sums_stay {
                    cx.keep_sums();
                }
                (cx, true)
            }
            LayerMode::Recompute { saved, watch } => {
                let watched = watch.map(|watch| worker.watched(watch));
                let worker = watched.as_ref().unwrap_or(worker);
                let now = Recompute::Now(saved);
                (Cx::new(worker, true, training).with_recompute(now), true)
            }
        };
        let mut cx = cx.at(site).with_fp8(self.fp8);
        for ((param, tensor), sum) in self.params.iter().zip(&mut self.sums) {
            let into = if records && param.is_trainable() {
                // The tape adds to it in place, so it must be the only holder. `back` returns it.
                sum.take()
            } else {
                None
            };
            cx.bind(param, tensor.clone(), into)?;
        }
        Ok(cx)
    }

    /// Runs the layer on a value. Buffers that it sets hold for later microbatches, except in a
    /// recompute.
    pub fn run(
        &mut self,
        layer: &dyn Layer,
        worker: &Worker,
        training: bool,
        site: RngSite,
        mode: LayerMode,
        input: &Tree<Activation>,
    ) -> Result<Ran> {
        let repeats = matches!(mode, LayerMode::Recompute { .. });
        let trains = !matches!(mode, LayerMode::Infer);
        let mut cx = self.context(worker, training, site, mode)?;
        let given = as_inputs(&mut cx, input)?;
        // To recognise inputs that the layer passes on unchanged, and to ask for their gradients.
        let kept: Vec<Tensor> = given.leaves().into_iter().cloned().collect();
        let output = layer.run(&mut cx, given);
        let mut watched = cx.end_watch();
        if let Some(watched) = watched.as_ref().filter(|_| repeats) {
            let leaves = output.as_ref().ok().map(Tree::leaves);
            if !watched.is_sound(leaves.as_deref()) {
                drop(output);
                return Err(self.unfinished(cx)?);
            }
        }
        let output = output?;
        let steps = watched
            .as_mut()
            .and_then(|watched| watched.steps(&output.leaves()));
        if trains {
            self.check_used(&cx)?;
        }
        let saved = cx.take_saved();
        let updates = cx.take_buffers();
        // A recompute starts from the buffers that the forward saw, so it would set them a second
        // time.
        let buffers = if repeats {
            Vec::new()
        } else {
            self.set_buffers(updates)
        };
        let sources = input.leaves();
        let outputs: Vec<Tensor> = output.leaves().into_iter().cloned().collect();
        let held = output.map_ref(|tensor| {
            // An input that passes through has its host copy already and is not sent again.
            let passed_on = kept.iter().position(|k| k.is_same(tensor));
            Activation {
                tensor: tensor.detach(),
                grad: tensor.requires_grad(),
                host: passed_on.and_then(|i| sources[i].host.clone()),
            }
        });
        let tape = cx.is_recording().then(|| {
            let grads = sources.iter().map(|held| held.grad);
            let inputs = kept.into_iter().zip(grads);
            let inputs = inputs.map(|(tensor, grad)| grad.then_some(tensor));
            let inputs = inputs.collect();
            Taped {
                cx,
                inputs,
                outputs,
            }
        });
        Ok(Ran {
            output: held,
            tape,
            saved,
            watched,
            steps,
            buffers,
        })
    }

    /// The error of a recompute that differs from the one that was studied. The sums that it was
    /// given come back, so that it can be run again.
    fn unfinished(&mut self, mut cx: Cx) -> Result<Error> {
        let mut gradients = cx.backward_if_any(&[])?;
        for ((param, _), sum) in self.params.iter().zip(&mut self.sums) {
            *sum = sum.take().or(gradients.take_param(param));
        }
        Ok(Error::Diverged { op: "recompute" })
    }

    /// Refuses a layer that uses a trainable parameter which the engine does not know: it would
    /// never be updated.
    fn check_used(&self, cx: &Cx) -> Result<()> {
        let is_known = |used: &Param| self.params.iter().any(|(own, _)| own.id() == used.id());
        let mut used = cx.params().filter(|param| param.is_trainable());
        let Some(unknown) = used.find(|param| !is_known(param)) else {
            return Ok(());
        };
        let what = format!(
            "the layer uses a trainable {} parameter of shape {} that its `visit` does not show, or \
             that was added after the engine was built, so it would never be updated; show it in \
             `visit`, or build the engine afterwards",
            unknown.dtype(),
            unknown.shape()
        );
        Err(roundpipe_tensor::Error::invalid("visit", what))
    }

    /// Puts the buffers that a layer set in the place of those it had; gives back the latter.
    fn set_buffers(&mut self, updates: Vec<(Param, Tensor)>) -> Vec<(usize, Tensor)> {
        let mut before = Vec::new();
        for (param, value) in updates {
            let index = self.params.iter().position(|(p, _)| p.id() == param.id());
            // A parameter that the layer does not list has no tensor here; it stays as it is.
            let Some(index) = index else {
                continue;
            };
            let old = std::mem::replace(&mut self.params[index].1, value);
            self.set[index] = true;
            before.push((index, old));
        }
        before
    }

    /// Walks a recorded layer back: gradients of its outputs in, of its inputs out; those of its
    /// parameters are added to the sums, which may have to stay for later tasks.
    pub fn back(
        &mut self,
        tape: Taped,
        grads: Vec<Option<Tensor>>,
        sums_stay: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        let Taped {
            mut cx,
            inputs,
            outputs,
        } = tape;
        if sums_stay {
            cx.keep_sums();
        }
        let seeds: Vec<(Tensor, Tensor)> = outputs
            .into_iter()
            .zip(grads)
            .filter(|(output, _)| output.requires_grad())
            .filter_map(|(output, grad)| Some((output, grad?)))
            .collect();
        let mut gradients = cx.backward_if_any(&seeds)?;
        // What is left of this layer are sums and input gradients; outputs make room for the layer
        // before.
        drop(seeds);
        for ((param, _), sum) in self.params.iter().zip(&mut self.sums) {
            if let Some(grad) = gradients.take_param(param) {
                *sum = Some(planted::microbatch_sum(grad, param.dtype())?);
            }
        }
        Ok(inputs
            .into_iter()
            .map(|input| input.and_then(|input| gradients.take(&input)))
            .collect())
    }
}

/// Values as a layer or a loss receives them: only those that need a gradient are on the tape.
fn as_inputs(cx: &mut Cx, value: &Tree<Activation>) -> Result<Tree<Tensor>> {
    value.clone().try_map(|held| {
        if held.grad {
            cx.input(&held.tensor)
        } else {
            Ok(held.tensor.detach())
        }
    })
}

/// Computes the losses of a microbatch and the gradients of the model's outputs.
pub(crate) fn losses(
    loss: impl FnOnce(&mut Cx, Tree, Tree) -> Result<Vec<Tensor>>,
    worker: &Worker,
    site: RngSite,
    output: &Tree<Activation>,
    label: Tree<Tensor>,
) -> Result<(Vec<Tensor>, Vec<Option<Tensor>>)> {
    let mut cx = Cx::new(worker, true, true).at(site);
    let given = as_inputs(&mut cx, output)?;
    let kept: Vec<Tensor> = given.leaves().into_iter().cloned().collect();
    let losses = loss(&mut cx, given, label)?;
    let seeds = loss_seeds(worker, &losses)?;
    if seeds.is_empty() {
        let what = "no loss depends on a trainable parameter, so nothing would be trained; compute \
                    it from the model's outputs, and do not detach them";
        return Err(roundpipe_tensor::Error::invalid("loss_fn", what));
    }
    let values = losses.iter().map(Tensor::detach).collect();
    drop(losses);
    let mut gradients = cx.backward_if_any(&seeds)?;
    Ok((
        values,
        kept.iter().map(|input| gradients.take(input)).collect(),
    ))
}

/// The losses that a backward starts from, each with its gradient.
fn loss_seeds(worker: &Worker, losses: &[Tensor]) -> Result<Vec<(Tensor, Tensor)>> {
    let mut seeds = Vec::new();
    check_losses(losses)?;
    for loss in losses {
        // Each starts from 1, also under `LossReduction::Mean`, which has put the share into the
        // loss.
        if loss.requires_grad() {
            seeds.push((loss.clone(), worker.full(loss.dtype(), *loss.shape(), 1.0)?));
        }
    }
    Ok(seeds)
}

/// Refuses losses that are not one number each.
pub(crate) fn check_losses(losses: &[Tensor]) -> Result<()> {
    let Some(loss) = losses.iter().find(|loss| loss.numel() != 1) else {
        return Ok(());
    };
    let what = format!(
        "a loss has the shape {}; reduce it to one number",
        loss.shape()
    );
    Err(roundpipe_tensor::Error::invalid("loss_fn", what))
}
