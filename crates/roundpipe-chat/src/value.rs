//! Values as Python has them: truth, length, equality and order. [`crate::print`] writes them as
//! text.
//!
//! # Invariants
//! - Values never change after they are made, except the fields of a namespace and the place of an
//!   iterator (transformers renders in Jinja2's immutable sandbox).
//! - Every string, list and dictionary is made of [`crate::budget`]'s containers, so it is paid for
//!   before it exists. To look at its contents costs steps by its length.
//! - Values hold each other no deeper than [`MAX_NESTING`], so neither printing nor dropping one
//!   can exhaust a stack.
//! - What can change (scopes, namespaces) is owned by the interpreter, and values refer to it
//!   weakly. So values form no cycles, and all are gone when the render ends.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::fmt;
use std::rc::Weak;

use crate::budget::{Budget, Buffer, Paid, Shared, Vector};
use crate::error::Fault;
use crate::eval::{LoopState, Macro};

/// How deep lists and dictionaries may hold each other.
const MAX_NESTING: u32 = 250;

/// A string; `safe` is what the filters `safe` and `escape` make.
#[derive(Debug)]
pub(crate) struct Text<'r> {
    chars: Buffer<'r>,
    pub(crate) safe: bool,
}

impl<'r> Text<'r> {
    /// The text, for one pass at the speed of a copy or a search.
    pub(crate) fn read(&self) -> Result<&str, Fault> {
        self.chars.budget().pass(self.chars.len())?;
        Ok(self.chars.as_str())
    }

    /// The text, for one pass that looks at every character.
    pub(crate) fn read_chars(&self) -> Result<&str, Fault> {
        self.chars.budget().char_pass(self.chars.len())?;
        Ok(self.chars.as_str())
    }

    /// The text, for callers that pay otherwise: a bounded look, a copy into a buffer, a name to
    /// compare.
    pub(crate) fn unpaid(&self) -> &str {
        self.chars.as_str()
    }

    pub(crate) fn len(&self) -> usize {
        self.chars.len()
    }
}

/// What lists, tuples and views hold.
#[derive(Debug)]
pub(crate) struct Items<'r> {
    items: Vector<'r, Value<'r>>,
    depth: u32,
}

impl<'r> Items<'r> {
    /// All items, for one pass over them.
    pub(crate) fn read(&self) -> Result<&[Value<'r>], Fault> {
        self.items.budget().value_pass(self.items.len())?;
        Ok(&self.items)
    }

    pub(crate) fn get(&self, at: usize) -> Option<&Value<'r>> {
        self.items.get(at)
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
}

/// A dictionary in order of insertion.
#[derive(Debug)]
pub(crate) struct Dict<'r> {
    entries: Vector<'r, (Value<'r>, Value<'r>)>,
    depth: u32,
}

impl<'r> Dict<'r> {
    pub(crate) fn new(budget: &'r Budget) -> Self {
        Self {
            entries: Vector::new(budget),
            depth: 1,
        }
    }

    /// A later entry replaces an earlier one with an equal key, which keeps its place.
    pub(crate) fn insert(&mut self, key: Value<'r>, value: Value<'r>) -> Result<(), Fault> {
        match self.position(&key)? {
            Some(at) => {
                self.depth = self.depth.max(nested(value.depth())?);
                self.entries[at].1 = value;
                Ok(())
            }
            None => self.push(key, value),
        }
    }

    /// Adds an entry whose key is known to be new.
    fn push(&mut self, key: Value<'r>, value: Value<'r>) -> Result<(), Fault> {
        self.depth = self.depth.max(nested(key.depth().max(value.depth()))?);
        self.entries.push((key, value))
    }

    /// All entries, for one pass over them.
    pub(crate) fn read(&self) -> Result<&[(Value<'r>, Value<'r>)], Fault> {
        self.entries.budget().value_pass(2 * self.entries.len())?;
        Ok(&self.entries)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn find(&self, key: &Value<'r>) -> Result<Option<&Value<'r>>, Fault> {
        Ok(self.position(key)?.map(|at| &self.entries[at].1))
    }

    pub(crate) fn find_str(&self, key: &str) -> Result<Option<&Value<'r>>, Fault> {
        let budget = self.entries.budget();
        for (k, value) in self.entries.iter() {
            budget.ticks(2)?;
            if let Value::Str(text) = k
                && budget.same(text.unpaid(), key)?
            {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    fn position(&self, key: &Value<'r>) -> Result<Option<usize>, Fault> {
        for (at, (k, _)) in self.entries.iter().enumerate() {
            self.entries.budget().ticks(2)?;
            if k.equals(key)? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

/// What is left of an iterator.
#[derive(Debug)]
pub(crate) struct Rest<'r> {
    items: Shared<'r, Items<'r>>,
    next: Cell<usize>,
}

impl<'r> Rest<'r> {
    pub(crate) fn next(&self) -> Option<Value<'r>> {
        let at = self.next.get();
        let item = self.items.get(at)?.clone();
        self.next.set(at + 1);
        Some(item)
    }

    /// All that is left.
    fn drain(&self) -> Result<Shared<'r, Items<'r>>, Fault> {
        let from = self.next.get();
        self.next.set(self.items.len());
        if from == 0 {
            return Ok(self.items.clone());
        }
        let mut left = Vector::new(self.items.budget());
        left.extend_from_slice(&self.items.items[from.min(self.items.len())..])?;
        items(left)
    }
}

/// A name of a variable, field or argument.
#[derive(Debug, Clone)]
pub(crate) enum Name<'r> {
    /// As the template or the caller wrote it.
    Written(&'r str),
    /// As a value spells it.
    Made(Shared<'r, Text<'r>>),
}

impl<'r> Name<'r> {
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Written(name) => name,
            Self::Made(text) => text.unpaid(),
        }
    }

    pub(crate) fn value(&self, budget: &'r Budget) -> Result<Value<'r>, Fault> {
        match self {
            Self::Written(name) => Value::str(budget, name),
            Self::Made(text) => Ok(Value::Str(text.clone())),
        }
    }
}

/// The fields of a namespace, the only thing that a template can change.
#[derive(Debug)]
pub(crate) struct Namespace<'r>(RefCell<Vector<'r, (Name<'r>, Value<'r>)>>);

impl<'r> Namespace<'r> {
    pub(crate) fn new(budget: &'r Budget) -> Self {
        Self(RefCell::new(Vector::new(budget)))
    }

    pub(crate) fn find(&self, budget: &Budget, name: &str) -> Result<Option<Value<'r>>, Fault> {
        for (n, value) in self.0.borrow().iter() {
            budget.ticks(2)?;
            if budget.same(n.as_str(), name)? {
                return Ok(Some(value.clone()));
            }
        }
        Ok(None)
    }

    pub(crate) fn set(
        &self,
        budget: &Budget,
        name: Name<'r>,
        value: Value<'r>,
    ) -> Result<(), Fault> {
        let mut fields = self.0.borrow_mut();
        for field in fields.iter_mut() {
            budget.ticks(2)?;
            if budget.same(field.0.as_str(), name.as_str())? {
                field.1 = value;
                return Ok(());
            }
        }
        fields.push((name, value))
    }
}

/// Why a value is undefined.
#[derive(Debug, Clone)]
pub(crate) enum Missing<'r> {
    /// No variable has this name.
    Variable(&'r str),
    /// The caller of a macro did not give this parameter.
    Parameter(&'r str),
    /// A value of this type has no such attribute.
    Attribute(&'static &'static str, &'r str),
    /// The same, with a name that the template computed.
    Computed(&'static &'static str, Shared<'r, Text<'r>>),
    /// Anything else.
    Because(&'static str),
}

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => write!(f, "'{name}'"),
            Self::Parameter(name) => write!(f, "parameter '{name}' was not provided and"),
            Self::Attribute(kind, name) => {
                write!(f, "'{kind} object' has no attribute '{name}', which")
            }
            Self::Computed(kind, name) => {
                write!(
                    f,
                    "'{kind} object' has no attribute '{}', which",
                    name.unpaid()
                )
            }
            Self::Because(what) => f.write_str(what),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Value<'r> {
    Undefined(Missing<'r>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Shared<'r, Text<'r>>),
    List(Shared<'r, Items<'r>>),
    Tuple(Shared<'r, Items<'r>>),
    /// `dict_items`, `dict_keys`, `dict_values`: a length and an order, but no index.
    View(View, Shared<'r, Items<'r>>),
    /// Can be walked once.
    Iter(Shared<'r, Rest<'r>>),
    Dict(Shared<'r, Dict<'r>>),
    Namespace(Weak<Paid<'r, Namespace<'r>>>),
    Macro(Macro<'r>),
    /// A function of the environment.
    Function(&'static str),
    /// A method bound to its value.
    Method(Shared<'r, (Value<'r>, &'static str)>),
    Loop(Shared<'r, LoopState<'r>>),
}

/// Which part of a dictionary a view shows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View {
    Items,
    Keys,
    Values,
}

impl<'r> Value<'r> {
    pub(crate) fn str(budget: &'r Budget, text: &str) -> Result<Self, Fault> {
        Self::text(Buffer::of(budget, text)?)
    }

    pub(crate) fn text(chars: Buffer<'r>) -> Result<Self, Fault> {
        Self::text_of(chars, false)
    }

    pub(crate) fn text_of(chars: Buffer<'r>, safe: bool) -> Result<Self, Fault> {
        Ok(Self::Str(chars.budget().share(Text { chars, safe })?))
    }

    pub(crate) fn list(of: Vector<'r, Value<'r>>) -> Result<Self, Fault> {
        Ok(Self::List(items(of)?))
    }

    pub(crate) fn tuple(of: Vector<'r, Value<'r>>) -> Result<Self, Fault> {
        Ok(Self::Tuple(items(of)?))
    }

    pub(crate) fn view(view: View, of: Vector<'r, Value<'r>>) -> Result<Self, Fault> {
        Ok(Self::View(view, items(of)?))
    }

    pub(crate) fn iter(of: Vector<'r, Value<'r>>) -> Result<Self, Fault> {
        let items = items(of)?;
        let budget = items.budget();
        Ok(Self::Iter(budget.share(Rest {
            items,
            next: Cell::new(0),
        })?))
    }

    pub(crate) fn dict(dict: Dict<'r>) -> Result<Self, Fault> {
        Ok(Self::Dict(dict.entries.budget().share(dict)?))
    }

    pub(crate) fn method(budget: &'r Budget, of: &Self, name: &'static str) -> Result<Self, Fault> {
        nested(of.depth())?;
        Ok(Self::Method(budget.share((of.clone(), name))?))
    }

    /// What an attribute that is not there gives; `name` is cut, since only messages show it.
    pub(crate) fn missing(budget: &'r Budget, of: &Self, name: &str) -> Result<Self, Fault> {
        let end = name.char_indices().nth(60).map_or(name.len(), |(i, _)| i);
        let name = budget.share(Text {
            chars: Buffer::of(budget, &name[..end])?,
            safe: false,
        })?;
        Ok(Self::Undefined(Missing::Computed(of.kind(), name)))
    }

    pub(crate) fn undefined(why: &'static str) -> Self {
        Self::Undefined(Missing::Because(why))
    }

    /// How many levels of values it holds.
    fn depth(&self) -> u32 {
        match self {
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.depth,
            Self::Dict(dict) => dict.depth,
            Self::Iter(rest) => rest.items.depth,
            Self::Loop(state) => state.items.depth + 1,
            Self::Method(bound) => bound.0.depth() + 1,
            _ => 0,
        }
    }

    /// The values of a JSON document.
    pub(crate) fn from_json(budget: &'r Budget, json: &serde_json::Value) -> Result<Self, Fault> {
        Self::from_json_at(budget, json, 0)
    }

    fn from_json_at(
        budget: &'r Budget,
        json: &serde_json::Value,
        depth: u32,
    ) -> Result<Self, Fault> {
        Ok(match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(b) => Self::Bool(*b),
            serde_json::Value::Number(n) => n
                .as_i128()
                .or_else(|| n.as_u64().map(i128::from))
                .map_or_else(|| Self::Float(n.as_f64().unwrap_or(f64::NAN)), Self::Int),
            serde_json::Value::String(s) => Self::str(budget, s)?,
            serde_json::Value::Array(array) => {
                nested(depth)?;
                let mut items = Vector::with_capacity(budget, array.len())?;
                for item in array {
                    items.push(Self::from_json_at(budget, item, depth + 1)?)?;
                }
                Self::list(items)?
            }
            serde_json::Value::Object(map) => {
                nested(depth)?;
                Self::from_json_map(budget, map, depth)?
            }
        })
    }

    /// A dictionary; keys of a JSON map are distinct already.
    pub(crate) fn from_json_map(
        budget: &'r Budget,
        map: &serde_json::Map<String, serde_json::Value>,
        depth: u32,
    ) -> Result<Self, Fault> {
        let entries = Vector::with_capacity(budget, map.len())?;
        let mut dict = Dict {
            entries,
            ..Dict::new(budget)
        };
        for (key, value) in map {
            dict.push(
                Self::str(budget, key)?,
                Self::from_json_at(budget, value, depth + 1)?,
            )?;
        }
        Self::dict(dict)
    }

    /// The name of its type, as Python's messages say it.
    pub(crate) fn kind(&self) -> &'static &'static str {
        match self {
            Self::Undefined(_) => &"Undefined",
            Self::None => &"NoneType",
            Self::Bool(_) => &"bool",
            Self::Int(_) => &"int",
            Self::Float(_) => &"float",
            Self::Str(_) => &"str",
            Self::List(_) => &"list",
            Self::Tuple(_) => &"tuple",
            Self::View(View::Items, _) => &"dict_items",
            Self::View(View::Keys, _) => &"dict_keys",
            Self::View(View::Values, _) => &"dict_values",
            Self::Iter(_) => &"generator",
            Self::Dict(_) => &"dict",
            Self::Namespace(_) => &"Namespace",
            Self::Macro(_) => &"Macro",
            Self::Function(_) => &"function",
            Self::Method(_) => &"method",
            Self::Loop(_) => &"LoopContext",
        }
    }

    /// Booleans count as 0 and 1, as in Python.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(i) => Some(*i),
            Self::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub(crate) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(f) => Some(*f),
            other => other.as_int().map(|i| i as f64),
        }
    }

    pub(crate) fn truthy(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(i) => *i != 0,
            Self::Float(f) => *f != 0.0,
            Self::Str(text) => text.len() > 0,
            _ => self.count().is_none_or(|count| count > 0),
        }
    }

    /// Python's `len`, where there is one.
    pub(crate) fn len(&self) -> Result<Option<usize>, Fault> {
        match self {
            Self::Undefined(_) => Ok(Some(0)),
            Self::Str(text) => Ok(Some(text.read()?.chars().count())),
            other => Ok(other.count()),
        }
    }

    /// How many values it holds, if it is a container that knows.
    pub(crate) fn count(&self) -> Option<usize> {
        match self {
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => Some(items.len()),
            Self::Dict(dict) => Some(dict.len()),
            Self::Loop(state) => Some(state.items.len()),
            _ => None,
        }
    }

    /// What a loop over it walks.
    pub(crate) fn walk(&self, budget: &'r Budget) -> Result<Shared<'r, Items<'r>>, Fault> {
        let mut out = Vector::new(budget);
        match self {
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => {
                return Ok(items.clone());
            }
            Self::Iter(rest) => return rest.drain(),
            Self::Undefined(_) => {}
            Self::Str(text) => {
                for c in text.read_chars()?.chars() {
                    out.push(Self::str(budget, c.encode_utf8(&mut [0; 4]))?)?;
                }
            }
            Self::Dict(dict) => {
                for (key, _) in dict.read()? {
                    out.push(key.clone())?;
                }
            }
            other => {
                return Err(Fault::new(format_args!(
                    "'{}' object is not iterable",
                    other.kind()
                )));
            }
        }
        items(out)
    }

    /// Python's `==`.
    pub(crate) fn equals(&self, other: &Self) -> Result<bool, Fault> {
        Ok(match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Str(a), Self::Str(b)) => a.budget().same(a.unpaid(), b.unpaid())?,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                a.len() == b.len() && first_difference(a, b)?.is_none()
            }
            (Self::Dict(a), Self::Dict(b)) => same_entries(a, b)?,
            (Self::Namespace(a), Self::Namespace(b)) => a.ptr_eq(b),
            (Self::Macro(a), Self::Macro(b)) => a.serial == b.serial,
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.as_float(), other.as_float()), (Some(a), Some(b)) if a == b),
            },
        })
    }

    /// Python's `<` and its relatives; `None` for what has no order (a NaN).
    pub(crate) fn order(&self, other: &Self) -> Result<Option<Ordering>, Fault> {
        match (self, other) {
            (Self::Str(a), Self::Str(b)) => {
                a.budget().pass(a.len().min(b.len()))?;
                Ok(Some(a.unpaid().cmp(b.unpaid())))
            }
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                match first_difference(a, b)? {
                    Some((a, b)) => a.order(b),
                    None => Ok(Some(a.len().cmp(&b.len()))),
                }
            }
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
                _ => match (self.as_float(), other.as_float()) {
                    (Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                    _ => {
                        let (a, b) = (self.kind(), other.kind());
                        Err(Fault::new(format_args!(
                            "'{a}' and '{b}' have no order; compare values of one type"
                        )))
                    }
                },
            },
        }
    }
}

/// Items that lists, tuples, views and iterators share.
pub(crate) fn items<'r>(of: Vector<'r, Value<'r>>) -> Result<Shared<'r, Items<'r>>, Fault> {
    let budget = of.budget();
    budget.value_pass(of.len())?;
    let depth = nested(of.iter().map(Value::depth).max().unwrap_or(0))?;
    budget.share(Items { items: of, depth })
}

/// The depth of a value around one of `depth`.
fn nested(depth: u32) -> Result<u32, Fault> {
    if depth >= MAX_NESTING {
        return Err(Fault::new(format_args!(
            "values hold each other deeper than {MAX_NESTING} levels"
        )));
    }
    Ok(depth + 1)
}

/// The first pair of items that are not equal.
fn first_difference<'v, 'r>(
    a: &'v Items<'r>,
    b: &'v Items<'r>,
) -> Result<Option<(&'v Value<'r>, &'v Value<'r>)>, Fault> {
    for (a_item, b_item) in a.items.iter().zip(b.items.iter()) {
        a.items.budget().value_pass(1)?;
        if !a_item.equals(b_item)? {
            return Ok(Some((a_item, b_item)));
        }
    }
    Ok(None)
}

fn same_entries<'r>(a: &Dict<'r>, b: &Dict<'r>) -> Result<bool, Fault> {
    if a.len() != b.len() {
        return Ok(false);
    }
    for (key, value) in a.read()? {
        match b.find(key)? {
            Some(other) if value.equals(other)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}
