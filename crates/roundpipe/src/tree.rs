//! What flows between layers: one tensor, or any nesting of tensors and plain values.
//!
//! A tree's leaves are device tensors where layers run, [`HostTensor`]s where a user feeds in and
//! gets back, and anything else where a rule stands beside each tensor. Walks are depth first and
//! maps go in order of their keys, so that leaves have one numbering everywhere.

pub(crate) mod node;

use std::collections::BTreeMap;
use std::fmt;

use roundpipe_tensor::{Error, HostTensor, Result, Tensor};

const OP: &str = "tree";

/// A tensor, a plain value, or a list or map of them.
#[derive(Debug, Clone)]
pub enum Tree<T = Tensor> {
    /// Nothing.
    None,
    /// A tensor, or what stands in its place.
    Tensor(T),
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// Text.
    Text(String),
    /// Values by position.
    List(Vec<Tree<T>>),
    /// Values by name.
    Map(BTreeMap<String, Tree<T>>),
}

impl<T> Tree<T> {
    /// Values by name.
    pub fn map<K: Into<String>>(items: impl IntoIterator<Item = (K, Self)>) -> Self {
        Self::Map(
            items
                .into_iter()
                .map(|(name, item)| (name.into(), item))
                .collect(),
        )
    }

    /// Values by position.
    pub fn list(items: impl IntoIterator<Item = Self>) -> Self {
        Self::List(items.into_iter().collect())
    }

    /// The tensor, when this is one.
    ///
    /// # Errors
    /// When it is something else.
    pub fn tensor(self) -> Result<T> {
        match self {
            Self::Tensor(tensor) => Ok(tensor),
            // What was not given is nothing: labels of a loss, named inputs of a layer.
            Self::None => Err(Error::invalid(
                OP,
                "expected one tensor, found nothing; was a label or an input left out?",
            )),
            Self::List(items) => {
                let count = items.len();
                let what = format!(
                    "expected one tensor, found a list of {count}; give one input, or read all by \
                     `tensors`"
                );
                Err(Error::invalid(OP, what))
            }
            Self::Map(items) => {
                let what = format!(
                    "expected one tensor, found a map where there {}; give the input by position, \
                     or read it by `get`",
                    keys(&items)
                );
                Err(Error::invalid(OP, what))
            }
            other => Err(Error::invalid(
                OP,
                format!("expected one tensor, found {}", other.kind()),
            )),
        }
    }

    /// Exactly `N` tensors, when this is a list of them.
    ///
    /// # Errors
    /// When it is something else.
    pub fn tensors<const N: usize>(self) -> Result<[T; N]> {
        let Self::List(items) = self else {
            return Err(Error::invalid(
                OP,
                format!("expected {N} tensors, found {}", self.kind()),
            ));
        };
        let found = items.len();
        let tensors = items
            .into_iter()
            .map(Self::tensor)
            .collect::<Result<Vec<_>>>()?;
        tensors
            .try_into()
            .map_err(|_| Error::invalid(OP, format!("expected {N} tensors, found {found}")))
    }

    /// What a map has under `name`.
    ///
    /// # Errors
    /// When this is no map, or has no such key; names the keys there are.
    pub fn get(&self, name: &str) -> Result<&Self> {
        match self {
            Self::Map(items) => items.get(name).ok_or_else(|| self.missing(name)),
            _ => Err(self.missing(name)),
        }
    }

    /// Takes what a map has under `name` out of it.
    ///
    /// # Errors
    /// As [`Tree::get`].
    pub fn take(&mut self, name: &str) -> Result<Self> {
        let found = match self {
            Self::Map(items) => items.remove(name),
            _ => None,
        };
        found.ok_or_else(|| self.missing(name))
    }

    /// All tensors, depth first, maps in order of their keys.
    pub fn leaves(&self) -> Vec<&T> {
        let mut all = Vec::new();
        self.each(&mut |leaf| all.push(leaf));
        all
    }

    /// All tensors in the order of [`Tree::leaves`], by value.
    pub fn into_leaves(self) -> Vec<T> {
        match self {
            Self::Tensor(tensor) => vec![tensor],
            Self::List(items) => items.into_iter().flat_map(Self::into_leaves).collect(),
            Self::Map(items) => items.into_values().flat_map(Self::into_leaves).collect(),
            _ => Vec::new(),
        }
    }

    /// All tensors in the order of [`Tree::leaves`], to be changed.
    pub fn leaves_mut(&mut self) -> Vec<&mut T> {
        match self {
            Self::Tensor(tensor) => vec![tensor],
            Self::List(items) => items.iter_mut().flat_map(Self::leaves_mut).collect(),
            Self::Map(items) => items.values_mut().flat_map(Self::leaves_mut).collect(),
            _ => Vec::new(),
        }
    }

    /// The same structure and plain values, with a tree for each tensor.
    ///
    /// # Errors
    /// The first that `f` gives.
    pub fn try_flat_map<U, E>(
        self,
        f: &mut impl FnMut(T) -> Result<Tree<U>, E>,
    ) -> Result<Tree<U>, E> {
        Ok(match self {
            Self::None => Tree::None,
            Self::Tensor(tensor) => f(tensor)?,
            Self::Bool(value) => Tree::Bool(value),
            Self::Int(value) => Tree::Int(value),
            Self::Float(value) => Tree::Float(value),
            Self::Text(text) => Tree::Text(text),
            Self::List(items) => Tree::List(
                items
                    .into_iter()
                    .map(|item| item.try_flat_map(f))
                    .collect::<Result<_, E>>()?,
            ),
            Self::Map(items) => {
                let each = items
                    .into_iter()
                    .map(|(name, item)| Ok((name, item.try_flat_map(f)?)));
                Tree::Map(each.collect::<Result<_, E>>()?)
            }
        })
    }

    /// The same structure and plain values, with `f` of each tensor.
    pub fn map_ref<U>(&self, mut f: impl FnMut(&T) -> U) -> Tree<U> {
        self.rebuild(&mut f)
    }

    /// The same structure and plain values, with `f` of each tensor, in the order of
    /// [`Tree::leaves`].
    ///
    /// # Errors
    /// The first that `f` gives.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<Tree<U>, E> {
        self.try_rebuild(&mut f)
    }

    /// The same structure and plain values over other leaves, given in the order of
    /// [`Tree::leaves`].
    ///
    /// # Errors
    /// When their number is not this tree's.
    pub fn with_leaves<U>(&self, leaves: Vec<U>) -> Result<Tree<U>> {
        let want = self.leaves().len();
        if leaves.len() != want {
            let what = format!("{} leaves for a tree of {want}", leaves.len());
            return Err(Error::invalid(OP, what));
        }
        let mut rest = leaves.into_iter();
        let slots = self.map_ref(|_| rest.next());
        // The count was checked above, so no slot is empty.
        slots.try_map(|slot| slot.ok_or_else(|| Error::invalid(OP, "too few leaves")))
    }

    /// Whether both nest alike: the same kinds of value at the same places, the same keys. Plain
    /// values may differ.
    pub fn same_structure<U>(&self, other: &Tree<U>) -> bool {
        match (self, other) {
            (Self::None, Tree::None)
            | (Self::Tensor(_), Tree::Tensor(_))
            | (Self::Bool(_), Tree::Bool(_))
            | (Self::Int(_), Tree::Int(_))
            | (Self::Float(_), Tree::Float(_))
            | (Self::Text(_), Tree::Text(_)) => true,
            (Self::List(a), Tree::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same_structure(b))
            }
            (Self::Map(a), Tree::Map(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b)
                        .all(|((x, a), (y, b))| x == y && a.same_structure(b))
            }
            _ => false,
        }
    }

    /// Where each leaf is, written as one would reach it from `root`: `root.loss[1]`.
    pub(crate) fn paths(&self, root: &str) -> Vec<String> {
        match self {
            Self::Tensor(_) => vec![root.to_owned()],
            Self::List(items) => items
                .iter()
                .enumerate()
                .flat_map(|(i, item)| item.paths(&format!("{root}[{i}]")))
                .collect(),
            Self::Map(items) => items
                .iter()
                .flat_map(|(name, item)| item.paths(&format!("{root}.{name}")))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// What this is, in words for an error.
    pub(crate) fn kind(&self) -> String {
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

    fn missing(&self, name: &str) -> Error {
        let Self::Map(items) = self else {
            return Error::invalid(
                OP,
                format!("expected a map with `{name}`, found {}", self.kind()),
            );
        };
        Error::invalid(OP, format!("no `{name}`; there {}", keys(items)))
    }

    fn each<'a>(&'a self, f: &mut impl FnMut(&'a T)) {
        match self {
            Self::Tensor(tensor) => f(tensor),
            Self::List(items) => items.iter().for_each(|item| item.each(f)),
            Self::Map(items) => items.values().for_each(|item| item.each(f)),
            _ => {}
        }
    }

    fn rebuild<U>(&self, f: &mut impl FnMut(&T) -> U) -> Tree<U> {
        match self {
            Self::None => Tree::None,
            Self::Tensor(tensor) => Tree::Tensor(f(tensor)),
            Self::Bool(x) => Tree::Bool(*x),
            Self::Int(x) => Tree::Int(*x),
            Self::Float(x) => Tree::Float(*x),
            Self::Text(x) => Tree::Text(x.clone()),
            Self::List(items) => Tree::List(items.iter().map(|item| item.rebuild(f)).collect()),
            Self::Map(items) => Tree::Map(
                items
                    .iter()
                    .map(|(name, item)| (name.clone(), item.rebuild(f)))
                    .collect(),
            ),
        }
    }

    fn try_rebuild<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<Tree<U>, E> {
        Ok(match self {
            Self::None => Tree::None,
            Self::Tensor(tensor) => Tree::Tensor(f(tensor)?),
            Self::Bool(x) => Tree::Bool(x),
            Self::Int(x) => Tree::Int(x),
            Self::Float(x) => Tree::Float(x),
            Self::Text(x) => Tree::Text(x),
            Self::List(items) => Tree::List(
                items
                    .into_iter()
                    .map(|item| item.try_rebuild(f))
                    .collect::<Result<_, E>>()?,
            ),
            Self::Map(items) => Tree::Map(
                items
                    .into_iter()
                    .map(|(name, item)| Ok((name, item.try_rebuild(f)?)))
                    .collect::<Result<_, E>>()?,
            ),
        })
    }
}

/// A place in a tree: keys of maps and positions in lists, from the root on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct TreePath(Vec<TreeStep>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum TreeStep {
    Key(String),
    Index(usize),
}

impl TreePath {
    /// The place below this one under a map's key.
    pub fn key(&self, key: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(TreeStep::Key(key.to_owned()));
        Self(steps)
    }

    /// The place below this one at a list's position.
    pub fn index(&self, index: usize) -> Self {
        let mut steps = self.0.clone();
        steps.push(TreeStep::Index(index));
        Self(steps)
    }

    /// What is at this place, and how many leaves of the tree come before it.
    ///
    /// # Errors
    /// When there is nothing; says where the path ends.
    pub fn find<'a, T>(&self, root: &'a Tree<T>) -> Result<(&'a Tree<T>, usize)> {
        let mut here = root;
        let mut before = 0;
        for (depth, step) in self.0.iter().enumerate() {
            let earlier: Vec<&Tree<T>>;
            let found = match (here, step) {
                (Tree::Map(items), TreeStep::Key(key)) => {
                    earlier = items.range(..key.clone()).map(|(_, item)| item).collect();
                    items.get(key)
                }
                (Tree::List(items), TreeStep::Index(index)) => {
                    earlier = items.iter().take(*index).collect();
                    items.get(*index)
                }
                _ => return Err(self.missing(depth, here)),
            };
            before += earlier
                .iter()
                .map(|item| item.leaves().len())
                .sum::<usize>();
            here = found.ok_or_else(|| self.missing(depth, here))?;
        }
        Ok((here, before))
    }

    fn missing<T>(&self, depth: usize, here: &Tree<T>) -> Error {
        let end = Self(self.0[..depth].to_vec());
        let found = match here {
            Tree::Map(items) => format!("a map where there {}", keys(items)),
            other => other.kind(),
        };
        Error::invalid(OP, format!("no `output{self}`; `output{end}` is {found}"))
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|step| match step {
            TreeStep::Key(key) => write!(f, ".{key}"),
            TreeStep::Index(index) => write!(f, "[{index}]"),
        })
    }
}

/// The keys of a map, as the end of a sentence.
pub(crate) fn keys<V>(items: &BTreeMap<String, V>) -> String {
    if items.is_empty() {
        return "are no keys".into();
    }
    let names: Vec<_> = items.keys().map(|name| format!("`{name}`")).collect();
    format!(
        "{} {}",
        if names.len() == 1 { "is" } else { "are" },
        names.join(", ")
    )
}

/// A leaf, an array and a vector of leaves become trees. Not for every type at once:
/// `Tree::from([a, b])` could then also be one leaf that is an array, and the compiler would ask
/// each caller which is meant.
macro_rules! leaf {
    ($($leaf:ty),*) => {$(
        impl From<$leaf> for $crate::tree::Tree<$leaf> {
            fn from(leaf: $leaf) -> Self {
                Self::Tensor(leaf)
            }
        }

        impl<const N: usize> From<[$leaf; N]> for $crate::tree::Tree<$leaf> {
            fn from(leaves: [$leaf; N]) -> Self {
                Self::List(leaves.into_iter().map(Self::Tensor).collect())
            }
        }

        impl From<Vec<$leaf>> for $crate::tree::Tree<$leaf> {
            fn from(leaves: Vec<$leaf>) -> Self {
                Self::List(leaves.into_iter().map(Self::Tensor).collect())
            }
        }
    )*};
}

pub(crate) use leaf;

leaf!(Tensor, HostTensor);

impl<T> From<BTreeMap<String, Tree<T>>> for Tree<T> {
    fn from(items: BTreeMap<String, Tree<T>>) -> Self {
        Self::Map(items)
    }
}

#[cfg(test)]
mod tests {
    use roundpipe_tensor::HostTensor;

    use super::{Tree, TreePath};

    fn sample() -> Tree<i32> {
        let inner = Tree::list([Tree::Tensor(2), Tree::Float(0.5), Tree::Tensor(3)]);
        Tree::map([
            ("z", Tree::Tensor(4)),
            ("a", Tree::Tensor(1)),
            ("m", inner),
            ("n", Tree::None),
        ])
    }

    /// One numbering of leaves everywhere: depth first, keys in order.
    #[test]
    fn leaves_come_depth_first_in_key_order() {
        let tree = sample();
        assert_eq!(tree.leaves(), [&1, &2, &3, &4]);
        assert_eq!(tree.clone().into_leaves(), [1, 2, 3, 4]);
        let mut seen = Vec::new();
        let text = tree.clone().try_map(|x| {
            seen.push(x);
            Ok::<_, ()>(x.to_string())
        });
        assert_eq!(
            (seen, text.unwrap().into_leaves().concat()),
            (vec![1, 2, 3, 4], "1234".to_owned())
        );
        assert_eq!(tree.paths("t"), ["t.a", "t.m[0]", "t.m[2]", "t.z"]);
        assert_eq!(tree.map_ref(|x| x * 10).into_leaves(), [10, 20, 30, 40]);
        assert_eq!(
            tree.try_map(|x| if x == 3 { Err(x) } else { Ok(()) })
                .unwrap_err(),
            3
        );
    }

    #[test]
    fn other_leaves_take_the_same_places() {
        let tree = sample();
        let other = tree.with_leaves(vec!['a', 'b', 'c', 'd']).unwrap();
        assert!(tree.same_structure(&other) && other.same_structure(&tree));
        assert!(matches!(other.get("z"), Ok(Tree::Tensor('d'))));
        for count in [3, 5] {
            let text = tree.with_leaves(vec![0; count]).unwrap_err().to_string();
            assert!(
                text.contains(&format!("{count} leaves for a tree of 4")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_path_finds_its_part_and_the_leaves_before_it() {
        let tree = sample();
        let root = TreePath::default();
        assert_eq!(root.find(&tree).unwrap().1, 0);
        let third = root.key("m").index(2);
        let (part, before) = third.find(&tree).unwrap();
        assert!(matches!(part, Tree::Tensor(3)));
        assert_eq!((before, third.to_string().as_str()), (2, ".m[2]"));
        assert_eq!(root.key("z").find(&tree).unwrap().1, 3);
        for (path, says) in [
            (
                root.key("y"),
                "no `output.y`; `output` is a map where there are `a`, `m`",
            ),
            (
                root.key("m").index(7),
                "no `output.m[7]`; `output.m` is a list of 3",
            ),
            (root.key("a").index(0), "`output.a` is a tensor"),
            (root.index(0), "no `output[0]`"),
        ] {
            let text = path.find(&tree).unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        }
    }

    #[test]
    fn structure_is_kinds_places_and_keys() {
        let tree = sample();
        let mut changed = tree.clone();
        changed.take("n").unwrap();
        assert!(!tree.same_structure(&changed), "a key less");
        assert!(!tree.same_structure(&Tree::Tensor(1)));
        assert!(!Tree::list([Tree::Tensor(1)]).same_structure(&Tree::<i32>::list([])));
        assert!(!Tree::<i32>::Int(1).same_structure(&Tree::<i32>::Float(1.0)));
        assert!(
            Tree::<i32>::Int(1).same_structure(&Tree::<u8>::Int(2)),
            "values may differ"
        );
    }

    /// Someone who mistypes a key reads which there are.
    #[test]
    fn a_missing_key_names_the_others() {
        let mut tree = sample();
        assert!(matches!(tree.take("a"), Ok(Tree::Tensor(1))));
        assert_eq!(
            tree.take("a").unwrap_err().to_string(),
            "tree: no `a`; there are `m`, `n`, `z`"
        );
        assert_eq!(
            Tree::<i32>::list([]).get("x").unwrap_err().to_string(),
            "tree: expected a map with `x`, found a list of 0"
        );
        assert_eq!(
            Tree::<i32>::Map([].into())
                .get("x")
                .unwrap_err()
                .to_string(),
            "tree: no `x`; there are no keys"
        );
    }

    #[test]
    fn host_tensors_become_trees() {
        let x = HostTensor::scalar(1.0).unwrap();
        let one: Tree<HostTensor> = x.clone().into();
        let many: Tree<HostTensor> = vec![x.clone(), x.clone()].into();
        let named = Tree::map([("x", x.clone().into()), ("list", [x.clone(), x].into())]);
        assert_eq!(
            (
                one.leaves().len(),
                many.leaves().len(),
                named.leaves().len()
            ),
            (1, 2, 3)
        );
        assert!(many.tensors::<2>().is_ok() && named.tensor().is_err());
    }
}
