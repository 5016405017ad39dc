//! A forward over engines and modules on the host, and the record that it keeps of its calls.
//!
//! A call is one of an engine, or a computation on the host with its own tape. The record notes each
//! with the values that it took, so that the way back (`back.rs`) can follow them. Outputs that
//! stay unmerged pass from engine to engine microbatch by microbatch, without a host wait.
//!
//! It refuses to call a group, which has no forward, and an empty list.
//!
//! # Invariants
//! - A call takes values of calls before it only: the record is in an order in which it can be
//!   walked back.
//! - What cannot have a gradient is a constant: outputs of calls without `requires_grad`, of frozen
//!   engines that take constants alone, and values that were detached.
//! - All calls of a forward have one place in the random stream; calls of the same engine differ by
//!   their number in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use roundpipe_tensor::{Cx, HostTensor, Result as TensorResult, RngSite, Tensor};

use super::auto::Shared;
use super::run::{Kind, Origin, Run, Value, Values, run_inside};
use super::{Place, join};
use crate::config::RunConfig;
use crate::engine::{Forward, Input, Inputs, RandomPlace};
use crate::error::{Error, Result};
use crate::tree::Tree;

/// What a forward is asked for.
pub(super) struct Asked {
    /// The settings of the call.
    pub config: RunConfig,
    /// Those of single engines, by path, which win.
    pub engines: BTreeMap<String, RunConfig>,
    pub requires_grad: bool,
    pub input_grads: bool,
    pub training: bool,
    pub number: u64,
}

/// Runs a forward and notes its calls.
pub(super) struct Recorder {
    pub shared: Arc<Shared>,
    asked: Asked,
    pub calls: Vec<Called>,
    /// How many of them are the model's inputs.
    inputs: usize,
    /// Calls so far of each engine.
    repeats: Vec<usize>,
}

/// One call of a forward.
pub(super) struct Called {
    /// What it took.
    pub inputs: Vec<Value>,
    /// What it gave.
    pub output: Value,
    pub body: Body,
}

pub(super) enum Body {
    /// An input of the model.
    Input,
    Engine(Box<Forward>),
    Host(Box<HostCall>),
}

/// What ran on the host, with its tape.
pub(super) struct HostCall {
    pub cx: Cx,
    /// The inputs that a gradient is wanted for.
    pub inputs: Vec<Tree<Option<Tensor>>>,
    pub outputs: Tree,
}

impl Recorder {
    pub fn new(shared: &Arc<Shared>, asked: Asked) -> Self {
        Self {
            shared: shared.clone(),
            asked,
            calls: Vec::new(),
            inputs: 0,
            repeats: vec![0; shared.engines.len()],
        }
    }

    /// The model's inputs, each a call of its own, so that its gradients meet there.
    pub fn take_inputs(&mut self, inputs: Inputs) -> Result<Values> {
        let wanted = self.asked.requires_grad && self.asked.input_grads;
        let values = inputs.try_map(|input| {
            let kind = match input {
                Input::Value(tree) => Kind::Host(tree),
                Input::Outputs(outputs) => Kind::MicrobatchOutputs(outputs),
                Input::Nested(_) => {
                    return Err(Error::config(
                        "inputs",
                        "a wrapped model takes outputs of other calls as inputs of their own, not \
                         inside lists and maps",
                    ));
                }
            };
            Ok(self.note(Vec::new(), Body::Input, kind, wanted))
        });
        self.inputs = self.calls.len();
        values
    }

    /// Calls what became of a module.
    pub fn call(&mut self, place: &Place, path: &str, input: Values) -> Result<Value> {
        match place {
            Place::Engine(index) => self.engine(*index, input),
            Place::Unwrapped(node) => {
                self.on_host(path, input, |cx, tree| run_inside(node, cx, tree))
            }
            Place::Composite(module, children) => {
                module.forward(&mut Run::host(self, children, path), input)
            }
            Place::Group(_) => {
                let what =
                    format!("`{path}` has no forward; call its elements by their dotted paths");
                Err(Error::config("wrap", what))
            }
            Place::List(elements) => {
                let mut elements = elements.iter();
                let Some((name, first)) = elements.next() else {
                    let what = format!("the list `{path}` has no elements");
                    return Err(Error::config("wrap", what));
                };
                let value = self.call(first, &join(path, name), input)?;
                elements.try_fold(value, |value, (name, next)| {
                    self.call(next, &join(path, name), value.into())
                })
            }
        }
    }

    fn engine(&mut self, index: usize, input: Values) -> Result<Value> {
        let shared = self.shared.clone();
        let (path, engine) = &shared.engines[index];
        let inputs: Vec<Value> = input.iter().cloned().collect();
        let wanted = inputs.iter().any(Value::wants_grad);
        let own = self.asked.engines.get(path).cloned().unwrap_or_default();
        let mut config = own.over(&self.asked.config);
        // For values in between as well; those of the model's inputs are a matter of the walk back.
        config.input_grads = Some(wanted);
        let place = RandomPlace {
            number: self.asked.number,
            repeat: self.repeats[index],
        };
        let forward = engine.forward_at(input.into_inputs()?, &config, Some(place))?;
        self.repeats[index] += 1;
        let kind = match forward.output() {
            Ok(output) => Kind::Host(output.clone()),
            Err(_) => Kind::MicrobatchOutputs(forward.unmerged()),
        };
        let has_grad = forward.is_differentiable() && (wanted || engine.has_trainable());
        Ok(self.note(inputs, Body::Engine(Box::new(forward)), kind, has_grad))
    }

    fn note(&mut self, inputs: Vec<Value>, body: Body, kind: Kind, has_grad: bool) -> Value {
        let origin = match has_grad {
            true => Origin::Call(self.calls.len()),
            false => Origin::Outside,
        };
        let output = Value { kind, origin };
        self.calls.push(Called {
            inputs,
            output: output.clone(),
            body,
        });
        output
    }

    /// Computes on the host, whole batches at a time.
    pub fn on_host(
        &mut self,
        path: &str,
        input: Values,
        compute: impl FnOnce(&mut Cx, Tree) -> TensorResult<Tree>,
    ) -> Result<Value> {
        let worker = self.shared.host.get()?;
        let record = self.asked.requires_grad;
        let index = self.calls.len() - self.inputs;
        let site = RngSite {
            seed: self.shared.seed,
            step: self.asked.number,
            microbatch: 0,
            // No layer of an engine has such a number.
            layer: u32::MAX - index as u32,
            site: 0,
        };
        let mut cx = Cx::new(&worker, record, self.asked.training).at(site);
        let taken: Vec<Value> = input.iter().cloned().collect();
        let mut inputs = Vec::new();
        let mut bring = |cx: &mut Cx, value: &Value| -> Result<Tree> {
            let wanted = record && value.wants_grad();
            let tree = value.to_host()?.try_map(|tensor| -> Result<Tensor> {
                let buf = tensor.buf().slice(tensor.byte_range())?;
                let here = worker.alias(&buf, tensor.dtype(), *tensor.shape())?;
                Ok(if wanted && here.dtype().is_float() {
                    cx.input(&here)?
                } else {
                    here
                })
            })?;
            inputs.push(
                tree.map_ref(|tensor| (wanted && tensor.requires_grad()).then(|| tensor.clone())),
            );
            Ok(tree)
        };
        let here = input.try_map(|value| bring(&mut cx, &value))?;
        let outputs = compute(&mut cx, here.into_tree()).map_err(|cause| Error::Layer {
            index,
            layer: path.to_owned(),
            cause,
        })?;
        let value = outputs.clone().try_map(|tensor| download(&tensor))?;
        if !record {
            cx.commit_buffers()?;
        }
        let has_grad = outputs.leaves().iter().any(|output| output.requires_grad());
        let call = HostCall {
            cx,
            inputs,
            outputs,
        };
        Ok(self.note(
            taken,
            Body::Host(Box::new(call)),
            Kind::Host(value),
            has_grad,
        ))
    }
}

pub(super) fn download(tensor: &Tensor) -> Result<HostTensor> {
    let host = HostTensor::zeros(tensor.dtype(), tensor.dims())?;
    tensor.read_into(&mut host.write()?)?;
    Ok(host)
}
