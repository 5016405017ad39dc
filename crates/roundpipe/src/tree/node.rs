//! Types of the user's own in place of trees: structs whose fields are tensors, plain values, lists
//! and further structs.
//!
//! [`TreeNode`] says how a type becomes a [`Tree`] and back; [`tree_struct!`](crate::tree_struct)
//! declares a struct that has it. Nothing else in the engine knows such types: what is split, sent
//! and merged are trees.

use std::collections::BTreeMap;

use roundpipe_tensor::{Error, HostTensor, Result, Tensor};

use super::{OP, Tree};

/// A type that a tree over leaves of type `T` can stand for.
pub trait TreeNode<T>: Sized {
    /// The tree with its values.
    fn into_tree(self) -> Tree<T>;

    /// The value that a tree holds.
    ///
    /// # Errors
    /// When the tree holds something else; names what and where.
    fn from_tree(tree: Tree<T>) -> Result<Self>;
}

impl<T> TreeNode<T> for Tree<T> {
    fn into_tree(self) -> Tree<T> {
        self
    }

    fn from_tree(tree: Tree<T>) -> Result<Self> {
        Ok(tree)
    }
}

macro_rules! tensor_node {
    ($($leaf:ty),*) => {$(
        impl TreeNode<$leaf> for $leaf {
            fn into_tree(self) -> Tree<$leaf> {
                Tree::Tensor(self)
            }

            fn from_tree(tree: Tree<$leaf>) -> Result<Self> {
                tree.tensor()
            }
        }
    )*};
}

tensor_node!(Tensor, HostTensor);

macro_rules! plain_node {
    ($($plain:ty, $variant:ident, $words:literal;)*) => {$(
        impl<T> TreeNode<T> for $plain {
            fn into_tree(self) -> Tree<T> {
                Tree::$variant(self)
            }

            fn from_tree(tree: Tree<T>) -> Result<Self> {
                match tree {
                    Tree::$variant(value) => Ok(value),
                    other => Err(expected($words, &other)),
                }
            }
        }
    )*};
}

plain_node! {
    bool, Bool, "a truth value";
    i64, Int, "a whole number";
    f64, Float, "a real number";
    String, Text, "text";
}

fn expected<T>(what: &str, found: &Tree<T>) -> Error {
    Error::invalid(OP, format!("expected {what}, found {}", found.kind()))
}

/// Nothing is `None`.
impl<T, N: TreeNode<T>> TreeNode<T> for Option<N> {
    fn into_tree(self) -> Tree<T> {
        self.map_or(Tree::None, N::into_tree)
    }

    fn from_tree(tree: Tree<T>) -> Result<Self> {
        match tree {
            Tree::None => Ok(None),
            some => N::from_tree(some).map(Some),
        }
    }
}

impl<T, N: TreeNode<T>> TreeNode<T> for Vec<N> {
    fn into_tree(self) -> Tree<T> {
        Tree::list(self.into_iter().map(N::into_tree))
    }

    fn from_tree(tree: Tree<T>) -> Result<Self> {
        match tree {
            Tree::List(items) => items.into_iter().map(N::from_tree).collect(),
            other => Err(expected("a list", &other)),
        }
    }
}

impl<T, N: TreeNode<T>> TreeNode<T> for BTreeMap<String, N> {
    fn into_tree(self) -> Tree<T> {
        Tree::map(self.into_iter().map(|(key, item)| (key, item.into_tree())))
    }

    fn from_tree(tree: Tree<T>) -> Result<Self> {
        match tree {
            Tree::Map(items) => items
                .into_iter()
                .map(|(key, item)| Ok((key, N::from_tree(item)?)))
                .collect(),
            other => Err(expected("a map", &other)),
        }
    }
}

/// The fields of a struct that are still to be read; for [`tree_struct!`](crate::tree_struct).
#[doc(hidden)]
pub struct TreeFields<T> {
    name: &'static str,
    items: BTreeMap<String, Tree<T>>,
}

impl<T> TreeFields<T> {
    /// Those of the struct `name`.
    ///
    /// # Errors
    /// When the tree is no map.
    pub fn of(name: &'static str, tree: Tree<T>) -> Result<Self> {
        match tree {
            Tree::Map(items) => Ok(Self { name, items }),
            other => Err(expected(&format!("`{name}`"), &other)),
        }
    }

    /// One field; one that is not there is nothing, which may be an `Option`.
    ///
    /// # Errors
    /// When it holds something else.
    pub fn take<N: TreeNode<T>>(&mut self, field: &str) -> Result<N> {
        let item = self.items.remove(field).unwrap_or(Tree::None);
        N::from_tree(item).map_err(|error| match error {
            Error::Invalid { op: OP, what } => {
                Error::invalid(OP, format!("`{}.{field}`: {what}", self.name))
            }
            other => other,
        })
    }

    /// All fields were read.
    ///
    /// # Errors
    /// When there is an entry that the struct has no field for.
    pub fn end(self) -> Result<()> {
        match self.items.keys().next() {
            Some(key) => Err(Error::invalid(
                OP,
                format!("`{}` has no field `{key}`", self.name),
            )),
            None => Ok(()),
        }
    }
}
