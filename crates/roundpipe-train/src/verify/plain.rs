//! Training without an engine: microbatches one after another on one worker, gradients summed in
//! f32 and rounded once, one optimizer. What the engine must give bit for bit.
//!
//! This module uses none of the engine's executors, plans or copies. It has the weights of a step
//! all on the worker, and one tape for all layers.

use std::sync::Arc;

use roundpipe::{
    Bytes, Cx, DType, Device, HostTensor, Optimizer, Param, Params, RngSite, Tensor, Tree, Worker,
    bf16, f16,
};
use roundpipe_models::Model;
use roundpipe_tensor::optim::Floats;

use super::subject::{SEED, Subject};
use super::trail::{Kind, Trail};
use super::way::{update, weights};
use crate::error::{Error, Result};

/// All steps of a subject; losses, gradients of the last step, weights.
pub(super) fn run(subject: &Subject, device: Arc<dyn Device>, memory: Bytes) -> Result<Trail> {
    let model = subject.model()?;
    let worker = Worker::new(device, memory)?;
    let mut optimizer = Optimizer::new(model.trainable_params(), subject.rule())?;
    let mut trail = Trail::default();
    for step in 0..2 * subject.half {
        let (loss, gradients) = gradients(subject, &model, &worker, step)?;
        trail.losses.push(loss);
        trail.tensors.clear();
        for (name, param, gradient) in gradients {
            let values: Vec<f32> = gradient.to_f64_vec()?.iter().map(|v| *v as f32).collect();
            optimizer.add_grad(&param, Floats::F32(&values))?;
            trail.tensors.push((Kind::Gradients, name, gradient));
        }
        optimizer.step(&update())?;
    }
    trail.tensors.sort_by(|one, other| one.1.cmp(&other.1));
    trail.tensors.extend(weights(&model)?);
    Ok(trail)
}

type Gradients = Vec<(String, Param, HostTensor)>;

/// The loss of a step and its gradients, in the types of their parameters.
fn gradients(
    subject: &Subject,
    model: &Model,
    worker: &Worker,
    step: u64,
) -> Result<(f64, Gradients)> {
    let trained = model.trainable_params();
    let mut sums: Vec<Option<Tensor>> = trained.iter().map(|_| None).collect();
    let mut total = 0.0;
    for (index, parts) in subject.microbatches_of(step)?.iter().enumerate() {
        let mut cx = Cx::train(worker);
        for ((_, param), sum) in trained.iter().zip(&mut sums) {
            let values = HostTensor::new(param.data(), param.dtype(), param.shape())?;
            cx.bind(param, upload(worker, &values)?, sum.take())?;
        }
        let [ids, labels, weight] = parts;
        let mut value = Tree::map([
            ("ids", upload(worker, ids)?.into()),
            ("labels", upload(worker, labels)?.into()),
            ("weight", upload(worker, weight)?.into()),
        ]);
        for (layer, (_, run)) in model.layers.layers().enumerate() {
            cx = cx.at(RngSite {
                seed: SEED,
                step,
                microbatch: index as u32,
                layer: layer as u32,
                site: 0,
            });
            value = run.run(&mut cx, value)?;
        }
        let loss = value.tensor()?;
        let mut gradients = cx.backward(&loss)?;
        total += loss.item()?;
        for ((_, param), sum) in trained.iter().zip(&mut sums) {
            *sum = gradients.take_param(param);
        }
    }
    let mut all = Vec::new();
    for ((name, param), sum) in trained.into_iter().zip(sums) {
        let Some(sum) = sum else {
            continue;
        };
        let rounded = worker.cast(&sum, param.dtype())?;
        let values = HostTensor::from_f64s(&rounded.to_f64_vec()?, param.dtype(), param.shape())?;
        all.push((name, param, values));
    }
    Ok((total, all))
}

fn upload(worker: &Worker, tensor: &HostTensor) -> Result<Tensor> {
    let shape = *tensor.shape();
    let uploaded = match tensor.dtype() {
        DType::F32 => worker.upload(&tensor.to_vec::<f32>()?, shape),
        DType::BF16 => worker.upload(&tensor.to_vec::<bf16>()?, shape),
        DType::F16 => worker.upload(&tensor.to_vec::<f16>()?, shape),
        DType::I64 => worker.upload(&tensor.to_vec::<i64>()?, shape),
        other => {
            let what = format!("a plain loop takes no {other}");
            return Err(Error::Failed(what));
        }
    };
    Ok(uploaded?)
}
