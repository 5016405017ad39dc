//! Layers: what a user writes, and what the planner places.
//!
//! A layer names its parameters ([`Params`]) and has a forward; nothing else. Any composition of
//! operations works. Most layers turn one tensor into one: they implement [`Module`] and are a
//! [`Layer`] by that. A layer with several inputs or outputs implements [`Layer`] itself and takes
//! a [`Tree`].
//!
//! ```
//! use roundpipe::{Cx, DType, Module, Param, Params, Tensor, ParamVisitor};
//!
//! /// y = x · scale, with one number to learn.
//! struct Scale {
//!     scale: Param,
//! }
//!
//! impl Params for Scale {
//!     fn visit(&self, visit: &mut ParamVisitor<'_>) {
//!         visit.param("scale", &self.scale);
//!     }
//! }
//!
//! impl Module for Scale {
//!     fn forward(&self, cx: &mut Cx, x: &Tensor) -> roundpipe_tensor::Result<Tensor> {
//!         let scale = cx.get(&self.scale)?;
//!         cx.mul(x, &scale)
//!     }
//! }
//!
//! let layer = Scale { scale: Param::full(DType::F32, &[1], 2.0).unwrap() };
//! assert_eq!(layer.named_params()[0].0, "scale");
//! ```

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use roundpipe_tensor::{Cx, HostTensor, Param, Result, Tensor};

use crate::error::Error;
use crate::tree::Tree;

/// Something with named parameters.
pub trait Params {
    /// Shows every parameter, buffer and child to `visit`, always in the same order.
    fn visit(&self, visit: &mut ParamVisitor<'_>);

    /// All parameters and buffers with their dotted names, first mention only.
    fn named_params(&self) -> Vec<(String, Param)> {
        let mut all = Vec::new();
        let mut seen = HashSet::new();
        let mut sink = |name: String, param: &Param| {
            if seen.insert(param.id()) {
                all.push((name, param.clone()));
            }
        };
        self.visit(&mut ParamVisitor {
            prefix: String::new(),
            sink: &mut sink,
        });
        all
    }

    /// The parameters that gradients are computed for.
    fn trainable_params(&self) -> Vec<(String, Param)> {
        self.named_params()
            .into_iter()
            .filter(|(_, p)| p.is_trainable())
            .collect()
    }

    /// Freezes or thaws all parameters (not buffers of other types).
    fn set_trainable(&self, trainable: bool) {
        for (_, param) in self.named_params() {
            param.set_trainable(trainable);
        }
    }

    /// Number of elements of all parameters and buffers.
    fn num_params(&self) -> usize {
        self.named_params()
            .iter()
            .map(|(_, p)| p.shape().numel())
            .sum()
    }
}

/// Collects names while walking a model.
pub struct ParamVisitor<'a> {
    prefix: String,
    sink: &'a mut dyn FnMut(String, &Param),
}

impl ParamVisitor<'_> {
    /// Shows a parameter or buffer.
    pub fn param(&mut self, name: &str, param: &Param) {
        (self.sink)(format!("{}{name}", self.prefix), param);
    }

    /// Shows a parameter that may be absent.
    pub fn maybe(&mut self, name: &str, param: Option<&Param>) {
        if let Some(param) = param {
            self.param(name, param);
        }
    }

    /// Shows a child; its names get `name` and a dot in front.
    pub fn child(&mut self, name: &str, child: &dyn Params) {
        let prefix = format!("{}{name}.", self.prefix);
        child.visit(&mut ParamVisitor {
            prefix,
            sink: self.sink,
        });
    }
}

/// A layer that turns one tensor into one.
pub trait Module: Params + Send + Sync {
    /// Computes the output.
    ///
    /// # Errors
    /// What an operation reports.
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor>;

    /// Whether its input names rows of its only parameter, a table, of which it reads no others
    /// ([`Layer::rows_read`]).
    fn reads_rows(&self) -> bool {
        false
    }
}

/// The smallest thing that is placed on a device: any inputs, any outputs.
pub trait Layer: Params + Send + Sync {
    /// Computes the outputs.
    ///
    /// # Errors
    /// What an operation reports.
    fn run(&self, cx: &mut Cx, input: Tree) -> Result<Tree>;

    /// The layers that this one is a sequence of, which an engine may place one by one.
    fn sequence(&self) -> Option<&Sequential> {
        None
    }

    /// The rows that it reads of its only parameter, a table `[rows, width]`, for this input of a
    /// microbatch; any shape, i64, i32 or u32. By default `None`: it may read all of its parameters.
    ///
    /// At lag 0 the first layer of a model then need not wait until the whole table is updated, and
    /// gradients of these rows alone leave its worker. What it reads of other rows is undefined, and
    /// their gradients are zero.
    fn rows_read(&self, input: &Tree<HostTensor>) -> Option<HostTensor> {
        let _ = input;
        None
    }

    /// What a printed model calls its kind: by default the name of its type.
    fn kind(&self) -> &'static str {
        let path = std::any::type_name::<Self>();
        let path = path.split('<').next().unwrap_or(path);
        path.rsplit("::").next().unwrap_or(path)
    }
}

impl<M: Module> Layer for M {
    fn run(&self, cx: &mut Cx, input: Tree) -> Result<Tree> {
        Ok(self.forward(cx, &input.tensor()?)?.into())
    }

    fn rows_read(&self, input: &Tree<HostTensor>) -> Option<HostTensor> {
        match input {
            Tree::Tensor(ids) if self.reads_rows() => Some(ids.clone()),
            _ => None,
        }
    }
}

/// Layers one after another.
#[derive(Clone, Default)]
pub struct Sequential {
    layers: Vec<(String, Arc<dyn Layer>)>,
}

impl Sequential {
    /// No layers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a layer under its index as name.
    #[must_use]
    pub fn with(self, layer: impl Layer + 'static) -> Self {
        let name = self.layers.len().to_string();
        self.named(name, layer)
    }

    /// Appends a layer under a name.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>, layer: impl Layer + 'static) -> Self {
        self.layers.push((name.into(), Arc::new(layer)));
        self
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Names and layers in order.
    pub fn layers(&self) -> impl Iterator<Item = (&str, &Arc<dyn Layer>)> {
        self.layers
            .iter()
            .map(|(name, layer)| (name.as_str(), layer))
    }

    /// Runs all layers; an error says which failed.
    ///
    /// # Errors
    /// [`Error::Layer`] with the operation's error as its cause.
    pub fn forward(&self, cx: &mut Cx, input: impl Into<Tree>) -> Result<Tree, Error> {
        let mut value = input.into();
        for (index, (name, layer)) in self.layers.iter().enumerate() {
            let fail = |cause| Error::Layer {
                index,
                layer: name.clone(),
                cause,
            };
            value = layer.run(cx, value).map_err(fail)?;
        }
        Ok(value)
    }
}

/// A line for each layer with its kind and number of parameters, and a line for each parameter.
/// Layers in a row that differ by nothing but their names are shown once.
impl fmt::Display for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |params: &[(String, Param)]| -> usize {
            params.iter().map(|(_, param)| param.shape().numel()).sum()
        };
        let all = self.named_params();
        let trained = count(&self.trainable_params());
        write!(
            f,
            "{} layers, {} parameters, {trained} of them trained",
            self.len(),
            count(&all)
        )?;
        let shown: Vec<(&str, String)> = self
            .layers()
            .map(|(name, layer)| (name, described(&**layer)))
            .collect();
        for alike in shown.chunk_by(|(_, a), (_, b)| a == b) {
            let (first, text) = &alike[0];
            match alike.last() {
                Some((last, _)) if last != first => {
                    write!(f, "\n({first} to {last}) {} x {text}", alike.len())?;
                }
                _ => write!(f, "\n({first}) {text}")?,
            }
        }
        Ok(())
    }
}

/// The kind of a layer and its parameters.
fn described(layer: &dyn Layer) -> String {
    let params = layer.named_params();
    let count: usize = params.iter().map(|(_, param)| param.shape().numel()).sum();
    let mut text = format!("{}, {count} parameters", layer.kind());
    for (name, param) in params {
        let frozen = if param.is_trainable() { "" } else { ", frozen" };
        text += &format!("\n    {name}: {} {}{frozen}", param.shape(), param.dtype());
    }
    text
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Params for Sequential {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        for (name, layer) in &self.layers {
            let prefix = format!("{}{name}.", visit.prefix);
            layer.visit(&mut ParamVisitor {
                prefix,
                sink: visit.sink,
            });
        }
    }
}

impl Layer for Sequential {
    fn run(&self, cx: &mut Cx, input: Tree) -> Result<Tree> {
        self.layers
            .iter()
            .try_fold(input, |value, (_, layer)| layer.run(cx, value))
    }

    fn sequence(&self) -> Option<&Sequential> {
        Some(self)
    }
}
