//! How a module's forward calls its children, on a worker or on the host.
//!
//! On a worker (the module is one layer of an engine) values are tensors and children run in place.
//! On the host, children are engines or stay unwrapped; values are host tensors, or outputs that
//! are still being computed.

use std::sync::Arc;

use roundpipe_tensor::{Cx, Error as TensorError, HostTensor, Result as TensorResult, Tensor};

use super::record::Recorder;
use super::{Node, Place};
use crate::batch::{InputsOf, MergeOutput, merge};
use crate::engine::{Input, Inputs, MicrobatchOutputs};
use crate::error::{Error, Result};
use crate::tree::Tree;

/// Something that a module was given or that a child gave; cloning shares it.
#[derive(Debug, Clone)]
pub struct Value {
    pub(super) kind: Kind,
    pub(super) origin: Origin,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    Worker(Tree),
    Host(Tree<HostTensor>),
    MicrobatchOutputs(MicrobatchOutputs),
}

/// Where the gradients of a value go.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// Nowhere: it is a constant.
    Outside,
    /// To all outputs of the call of this number.
    Call(usize),
    /// To single tensors among the outputs of that call: which one for each tensor of the value.
    Leaves(usize, Arc<[usize]>),
}

impl Value {
    pub(super) fn worker(tree: Tree) -> Self {
        Self {
            kind: Kind::Worker(tree),
            origin: Origin::Outside,
        }
    }

    /// The same as a constant: no gradient goes back through it.
    #[must_use]
    pub fn detach(&self) -> Self {
        let kind = match &self.kind {
            Kind::Worker(tree) => Kind::Worker(tree.map_ref(Tensor::detach)),
            other => other.clone(),
        };
        Self {
            kind,
            origin: Origin::Outside,
        }
    }

    /// What a map has under `name`. Waits for outputs that are not there yet.
    ///
    /// # Errors
    /// When it is no map, or has no such key.
    pub fn get(&self, name: &str) -> Result<Self> {
        self.part(
            |tree| tree.get(name).cloned(),
            |tree| tree.get(name).cloned(),
        )
    }

    /// The element of a list. Waits for outputs that are not there yet.
    ///
    /// # Errors
    /// When it is no list, or a shorter one.
    pub fn at(&self, index: usize) -> Result<Self> {
        self.part(|tree| element(tree, index), |tree| element(tree, index))
    }

    fn part(
        &self,
        worker: impl FnOnce(&Tree) -> TensorResult<Tree>,
        host: impl FnOnce(&Tree<(usize, HostTensor)>) -> TensorResult<Tree<(usize, HostTensor)>>,
    ) -> Result<Self> {
        if let Kind::Worker(tree) = &self.kind {
            return Ok(Self::worker(worker(tree)?));
        }
        let mut next = 0..;
        let numbered = self.to_host()?.try_map(|tensor| {
            let number = next.next().unwrap_or_default();
            Ok::<_, Error>((number, tensor))
        })?;
        let part = host(&numbered)?;
        let numbers = part.leaves().into_iter().map(|(number, _)| *number);
        let origin = match &self.origin {
            Origin::Outside => Origin::Outside,
            Origin::Call(call) => Origin::Leaves(*call, numbers.collect()),
            Origin::Leaves(call, leaves) => {
                Origin::Leaves(*call, numbers.map(|number| leaves[number]).collect())
            }
        };
        let kind = Kind::Host(part.map_ref(|(_, tensor)| tensor.clone()));
        Ok(Self { kind, origin })
    }

    /// Whether its gradients go anywhere.
    pub(super) fn wants_grad(&self) -> bool {
        !matches!(self.origin, Origin::Outside)
    }

    /// The merged value in host memory.
    pub(super) fn to_host(&self) -> Result<Tree<HostTensor>> {
        match &self.kind {
            Kind::Host(tree) => Ok(tree.clone()),
            Kind::MicrobatchOutputs(outputs) => {
                let parts = (0..outputs.len())
                    .map(|m| outputs.wait(m))
                    .collect::<Result<_>>()?;
                merge(parts, &MergeOutput::Auto)
            }
            Kind::Worker(_) => Err(Error::config(
                "wrap",
                "a value on a worker was taken to the host",
            )),
        }
    }

    fn on_worker(self) -> TensorResult<Tree> {
        match self.kind {
            Kind::Worker(tree) => Ok(tree),
            _ => Err(TensorError::invalid(
                "wrap",
                "a value on the host was taken to a worker",
            )),
        }
    }
}

fn element<T: Clone>(tree: &Tree<T>, index: usize) -> TensorResult<Tree<T>> {
    match tree {
        Tree::List(items) if index < items.len() => Ok(items[index].clone()),
        other => {
            let what = format!(
                "expected a list with element {index}, found {}",
                other.kind()
            );
            Err(TensorError::invalid("tree", what))
        }
    }
}

/// The inputs of a call of a module, by position and by name.
pub type Values = InputsOf<Value>;

impl Values {
    /// The input of this name, whether it came as such or in the map that is the only input.
    ///
    /// # Errors
    /// When there is none.
    pub fn get(&self, name: &str) -> Result<Value> {
        match (self.named.get(name), self.args.last()) {
            (Some(value), _) => Ok(value.clone()),
            // On a worker, named inputs come as a map: the only input, or the last of a list.
            (None, Some(only)) if self.args.len() == 1 => match &only.kind {
                Kind::Worker(Tree::List(items)) if !items.is_empty() => {
                    only.at(items.len() - 1)?.get(name)
                }
                _ => only.get(name),
            },
            _ => Err(Error::config(
                "inputs",
                format!("there is no input `{name}`"),
            )),
        }
    }

    /// The input of this position, whether it came as such or in the list that is the only input.
    ///
    /// # Errors
    /// When there is none.
    pub fn at(&self, index: usize) -> Result<Value> {
        match (self.args.get(index), self.args.as_slice()) {
            (_, [only]) if matches!(&only.kind, Kind::Worker(Tree::List(_))) => only.at(index),
            (Some(value), _) => Ok(value.clone()),
            _ => Err(Error::config(
                "inputs",
                format!("there is no input {index} of {}", self.args.len()),
            )),
        }
    }

    fn on_worker(self) -> TensorResult<Tree> {
        Ok(self.try_map(Value::on_worker)?.into_tree())
    }

    pub(super) fn into_inputs(self) -> Result<Inputs> {
        self.try_map(|value| match value.kind {
            Kind::Host(tree) => Ok(Input::Value(tree)),
            Kind::MicrobatchOutputs(outputs) => Ok(Input::Outputs(outputs)),
            Kind::Worker(_) => Err(Error::config(
                "wrap",
                "a value on a worker was given to an engine",
            )),
        })
    }
}

impl From<Value> for Values {
    fn from(value: Value) -> Self {
        Self::new().arg(value)
    }
}

/// What a module's forward calls its children through.
pub struct Run<'a>(Mode<'a>);

enum Mode<'a> {
    Worker(&'a mut Cx, &'a [(String, Node)]),
    Host {
        recorder: &'a mut Recorder,
        children: &'a [(String, Place)],
        path: &'a str,
    },
}

impl<'a> Run<'a> {
    pub(super) fn host(
        recorder: &'a mut Recorder,
        children: &'a [(String, Place)],
        path: &'a str,
    ) -> Self {
        Self(Mode::Host {
            recorder,
            children,
            path,
        })
    }

    /// Calls a child by its name, or something below it by its dotted path.
    ///
    /// # Errors
    /// [`Error::Config`] when there is none; what goes wrong in it.
    pub fn child(&mut self, name: &str, input: impl Into<Values>) -> Result<Value> {
        let input = input.into();
        match &mut self.0 {
            Mode::Worker(cx, children) => {
                let node = find_node(children, name).ok_or_else(|| no_child(name, children))?;
                Ok(Value::worker(run_inside(&node, cx, input.on_worker()?)?))
            }
            Mode::Host {
                recorder,
                children,
                path,
            } => {
                let place = find_place(children, name).ok_or_else(|| no_child(name, children))?;
                recorder.call(place, &super::join(path, name), input)
            }
        }
    }

    /// A computation of the module's own, on its inputs as a layer sees them: on the worker, or
    /// else on the host.
    ///
    /// # Errors
    /// What `compute` reports.
    pub fn apply(
        &mut self,
        input: impl Into<Values>,
        compute: impl FnOnce(&mut Cx, Tree) -> TensorResult<Tree>,
    ) -> Result<Value> {
        let input = input.into();
        match &mut self.0 {
            Mode::Worker(cx, _) => Ok(Value::worker(compute(cx, input.on_worker()?)?)),
            Mode::Host { recorder, path, .. } => recorder.on_host(path, input, compute),
        }
    }
}

fn no_child<T>(name: &str, children: &[(String, T)]) -> Error {
    let names: Vec<String> = children
        .iter()
        .map(|(name, _)| format!("`{name}`"))
        .collect();
    Error::config(
        "wrap",
        format!("no child `{name}`; there are {}", names.join(", ")),
    )
}

fn find_node(children: &[(String, Node)], path: &str) -> Option<Node> {
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    let node = &children.iter().find(|(child, _)| child == name)?.1;
    super::at(node, rest)
}

fn find_place<'p>(children: &'p [(String, Place)], path: &str) -> Option<&'p Place> {
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    let place = &children.iter().find(|(child, _)| child == name)?.1;
    match place {
        _ if rest.is_empty() => Some(place),
        Place::List(below) | Place::Group(below) | Place::Composite(_, below) => {
            find_place(below, rest)
        }
        Place::Engine(_) | Place::Unwrapped(_) => None,
    }
}

/// Runs a module and everything below it on a worker.
pub(super) fn run_inside(node: &Node, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
    match node {
        Node::Layer(layer) => layer.run(cx, input),
        Node::List(elements) => elements
            .iter()
            .try_fold(input, |value, (_, element)| run_inside(element, cx, value)),
        Node::Group(_) => {
            let what = "a group has no forward; call its elements by their dotted paths";
            Err(TensorError::invalid("wrap", what))
        }
        Node::Composite(module) => {
            let children = module.children();
            let mut run = Run(Mode::Worker(cx, &children));
            let output = module.forward(&mut run, Value::worker(input).into());
            output.map_err(as_tensor_error)?.on_worker()
        }
    }
}

/// A layer reports errors of operations; others come as text.
fn as_tensor_error(error: Error) -> TensorError {
    match error {
        Error::Tensor(error) => error,
        other => TensorError::invalid("forward", other.to_string()),
    }
}
