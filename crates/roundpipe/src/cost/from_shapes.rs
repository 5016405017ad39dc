//! What a layer costs, known before anything is computed.

use std::sync::Arc;

use roundpipe_tensor::meta::{self, Cost, Given, Profile};
use roundpipe_tensor::{CostModel, Cx, DType, Param, Recompute, Result, Shape, Tensor, Worker};

use super::{LayerCost, LayerCosts};
use crate::layer::Layer;
use crate::tree::Tree;

/// Parameters that a host updates in a millisecond until it was timed: AdamW moves about 28 bytes
/// for each, and two channels of memory carry some 56 GB a second.
const UPDATED_PER_MS: f64 = 2e6;

/// A value between layers as the meta device needs it: type, shape, and whether its gradient is
/// wanted.
pub(crate) type Spec = (DType, Shape, bool);

/// Bytes and FLOPs of a layer's forward, recompute and backward on a device, for inputs of these
/// types and shapes. One input is passed as a tensor, several as a list.
///
/// # Errors
/// What the layer reports for such inputs.
pub fn profile(
    layer: &dyn Layer,
    device: impl Into<CostModel>,
    inputs: &[Given],
) -> Result<Profile> {
    meta::profile(device, inputs, |cx: &mut Cx, tensors: &[Tensor]| {
        let input = match tensors {
            [one] => Tree::Tensor(one.clone()),
            many => Tree::List(many.iter().cloned().map(Tree::Tensor).collect()),
        };
        let output = layer.run(cx, input)?;
        Ok(output.leaves().into_iter().cloned().collect())
    })
}

/// How layers are run while their costs are counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CostMode {
    pub training: bool,
    /// Whether projections run in fp8, in training.
    pub fp8: bool,
}

/// Guesses the costs of every layer for one microbatch by running the model on the meta device.
/// Layers that look at values cannot be run there: that is the error, and sizes have to do.
pub(crate) fn model_costs(
    layers: &[(String, Arc<dyn Layer>)],
    device: CostModel,
    input: &Tree<Spec>,
    mode: CostMode,
) -> Result<LayerCosts> {
    let CostMode { training, fp8 } = mode;
    let mut value = input.clone();
    let mut costs = Vec::with_capacity(layers.len());
    for (name, layer) in layers {
        let params: Vec<Param> = layer
            .named_params()
            .into_iter()
            .map(|(_, param)| param)
            .collect();
        let run_in = |cx: Cx, worker: &Worker| -> Result<Counted> {
            let mut cx = cx.with_fp8(fp8);
            let mut weights = Vec::with_capacity(params.len());
            for param in &params {
                let tensor = worker.full(param.dtype(), *param.shape(), 0.0)?;
                cx.bind(param, tensor.clone(), None)?;
                weights.push(tensor);
            }
            let place = |(dtype, shape, grad): Spec| {
                let tensor = worker.full(dtype, shape, 0.0)?;
                if grad { cx.input(&tensor) } else { Ok(tensor) }
            };
            let given = value.clone().try_map(place)?;
            let output = layer.run(&mut cx, given)?;
            Ok(Counted {
                cx,
                output,
                _weights: weights,
            })
        };
        let run = |worker: &Worker, record: bool| {
            let cx = if record {
                Cx::new(worker, true, training)
            } else {
                Cx::ahead(worker, training)
            };
            run_in(cx, worker)
        };
        let (next, forward) = meta::measure(device, |worker| {
            let ran = run(worker, false)?;
            Ok(ran
                .output
                .map_ref(|t| (t.dtype(), *t.shape(), t.requires_grad())))
        })?;
        let (_tape, recompute) = meta::measure(device, |worker| run(worker, true))?;
        let (saved, _) = meta::measure(device, |worker| {
            let cx = Cx::ahead(worker, training).with_recompute(Recompute::Later(None));
            let mut ran = run_in(cx, worker)?;
            let saved = ran.cx.take_saved().unwrap_or_default();
            Ok(saved
                .iter()
                .map(|t| (t.dtype(), *t.shape()))
                .collect::<Vec<_>>())
        })?;
        // What a forward saved is not computed again.
        let (_tape, again) = meta::measure(device, |worker| {
            let place = |(dtype, shape): &(DType, Shape)| worker.full(*dtype, *shape, 0.0);
            let saved = saved.iter().map(place).collect::<Result<Vec<_>>>()?;
            let cx = Cx::new(worker, true, training).with_recompute(Recompute::Now(saved));
            run_in(cx, worker)
        })?;
        let ((), both) = meta::measure(device, |worker| {
            let Counted {
                mut cx,
                output,
                _weights,
            } = run(worker, true)?;
            let seeds = output.leaves().into_iter().filter(|t| t.requires_grad());
            let seed = |t: &Tensor| Ok((t.clone(), worker.full(t.dtype(), *t.shape(), 1.0)?));
            let seeds = seeds.map(seed).collect::<Result<Vec<_>>>()?;
            cx.backward_if_any(&seeds).map(drop)
        })?;
        costs.push(layer_cost(
            name,
            device,
            &params,
            &next,
            Passes {
                forward,
                recompute,
                again,
                both,
            },
        ));
        value = next;
    }
    Ok(LayerCosts { layers: costs })
}

/// A layer that ran while its costs are counted.
struct Counted {
    cx: Cx,
    output: Tree<Tensor>,
    /// A worker holds them until the job ends, while a tape lets go of each at its last use.
    _weights: Vec<Tensor>,
}

/// What was counted of a layer.
struct Passes {
    forward: Cost,
    /// A forward with a tape, everything computed.
    recompute: Cost,
    /// The same, given what the forward saved for it.
    again: Cost,
    /// `recompute` and the backward.
    both: Cost,
}

fn layer_cost(
    name: &str,
    device: CostModel,
    params: &[Param],
    output: &Tree<Spec>,
    passes: Passes,
) -> LayerCost {
    let Passes {
        forward,
        recompute,
        again,
        both,
    } = passes;
    let ms = |cost: &Cost| match device.rates() {
        Some(_) => cost.time_ns as f64 / 1e6,
        None => {
            let of_flops = cost.flops as f64 / device.flops_per_ms();
            of_flops + cost.traffic as f64 / device.bytes_per_ms()
        }
    };
    let backward = Cost {
        flops: both.flops - recompute.flops,
        traffic: both.traffic - recompute.traffic,
        time_ns: both.time_ns - recompute.time_ns,
        ..both
    };
    let weights: u64 = params.iter().map(|p| p.bytes() as u64).sum();
    let trained: u64 = params
        .iter()
        .filter(|p| p.is_trainable())
        .map(|p| p.shape().numel() as u64)
        .sum();
    let size = |(dtype, shape, _): &&Spec| (shape.numel() * dtype.size()) as u64;
    let kept = recompute.kept.saturating_sub(weights);
    LayerCost {
        name: name.to_owned(),
        forward_ms: ms(&forward),
        recompute_ms: ms(&again),
        backward_ms: ms(&backward),
        bytes: weights,
        hop_ms: 0.0,
        activation_bytes: output.leaves().iter().map(size).sum(),
        forward_bytes: forward.peak.saturating_sub(weights),
        keep_bytes: kept,
        peak_bytes: both.peak.saturating_sub(weights + kept),
        grad_bytes: 4 * trained,
        update_ms: trained as f64 / UPDATED_PER_MS,
    }
}
