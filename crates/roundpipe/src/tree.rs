//! What flows between layers: one tensor, or any nesting of tensors and plain values.

use std::collections::BTreeMap;

use roundpipe_tensor::{Error, Result, Tensor};

/// A tensor, a plain value, or a list or map of them.
#[derive(Debug, Clone)]
pub enum Tree {
    /// Nothing.
    None,
    /// A tensor.
    Tensor(Tensor),
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// Text.
    Text(String),
    /// Values by position.
    List(Vec<Tree>),
    /// Values by name.
    Map(BTreeMap<String, Tree>),
}

impl Tree {
    /// The tensor, when this is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn tensor(self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor),
            other => Err(Error::invalid("tree", format!("expected one tensor, found {}", other.kind()))),
        }
    }

    /// Exactly `N` tensors, when this is a list of them.
    ///
    /// # Errors
    /// When it is something else.
    pub fn tensors<const N: usize>(self) -> Result<[Tensor; N]> {
        let Self::List(items) = self else {
            return Err(Error::invalid("tree", format!("expected {N} tensors, found {}", self.kind())));
        };
        let found = items.len();
        let tensors = items.into_iter().map(Self::tensor).collect::<Result<Vec<_>>>()?;
        tensors.try_into().map_err(|_| Error::invalid("tree", format!("expected {N} tensors, found {found}")))
    }

    /// All tensors, depth first, maps in order of their keys.
    pub fn leaves(&self) -> Vec<&Tensor> {
        match self {
            Self::Tensor(tensor) => vec![tensor],
            Self::List(items) => items.iter().flat_map(Self::leaves).collect(),
            Self::Map(items) => items.values().flat_map(Self::leaves).collect(),
            _ => Vec::new(),
        }
    }

    fn kind(&self) -> String {
        match self {
            Self::None => "nothing".into(),
            Self::Tensor(_) => "a tensor".into(),
            Self::Bool(_) => "a truth value".into(),
            Self::Int(_) | Self::Float(_) => "a number".into(),
            Self::Text(_) => "text".into(),
            Self::List(items) => format!("a list of {}", items.len()),
            Self::Map(items) => format!("a map of {}", items.len()),
        }
    }
}

impl From<Tensor> for Tree {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl<const N: usize> From<[Tensor; N]> for Tree {
    fn from(tensors: [Tensor; N]) -> Self {
        Self::List(tensors.into_iter().map(Self::Tensor).collect())
    }
}
