//! Values as Python has them: printing, truth, equality, order and JSON.
//!
//! # Invariants
//! - Values never change after they are made, except the fields of a namespace and the rest of an iterator
//!   (transformers renders in Jinja2's immutable sandbox).
//! - Every string, list and dictionary is counted in [`super::limits`] from its creation to its drop, so the
//!   interpreter can stop a template that collects too much, and knows how deep it nests.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::fmt::Write as _;
use std::rc::Rc;

use super::Fault;
use super::eval::{LoopState, Macro};
use super::limits::{Charge, nesting_fits, reserve, room, spend};

/// A string; `safe` is what the filters `safe` and `escape` make.
#[derive(Debug)]
pub(super) struct Text {
    text: String,
    pub(super) safe: bool,
    _charge: Charge,
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

/// What lists, tuples and views hold.
#[derive(Debug)]
pub(super) struct Items {
    items: Vec<Value>,
    depth: u32,
    _charge: Charge,
}

impl std::ops::Deref for Items {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.items
    }
}

/// A dictionary in order of insertion.
#[derive(Debug)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    depth: u32,
    _charge: Charge,
}

/// What is left of an iterator.
#[derive(Debug)]
pub(super) struct Rest {
    items: RefCell<std::vec::IntoIter<Value>>,
    depth: u32,
    _charge: Charge,
}

impl Dict {
    /// Later entries replace earlier ones with an equal key, which keep their place.
    pub(super) fn new(pairs: impl IntoIterator<Item = (Value, Value)>) -> Self {
        let mut entries: Vec<(Value, Value)> = Vec::new();
        for (key, value) in pairs {
            match entries.iter_mut().find(|(k, _)| k.equals(&key)) {
                Some(entry) => entry.1 = value,
                None => entries.push((key, value)),
            }
        }
        Self::of_distinct(entries)
    }

    fn of_distinct(mut entries: Vec<(Value, Value)>) -> Self {
        let depth = 1 + entries.iter().map(|(k, v)| k.depth().max(v.depth())).max().unwrap_or(0);
        if !nesting_fits(depth) {
            entries.clear();
        }
        let _charge = Charge::new(64 * entries.len() + 48);
        Self { entries, depth, _charge }
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn find(&self, key: &Value) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k.equals(key)).map(|(_, v)| v)
    }

    pub(super) fn find_str(&self, key: &str) -> Option<&Value> {
        let same = |k: &Value| matches!(k, Value::Str(s) if &***s == key);
        self.entries.iter().find(|(k, _)| same(k)).map(|(_, v)| v)
    }
}

impl Rest {
    pub(super) fn next(&self) -> Option<Value> {
        self.items.borrow_mut().next()
    }
}

/// The fields of a namespace, the only thing that a template can change.
pub(super) type Namespace = RefCell<Vec<(String, Value)>>;

#[derive(Debug, Clone)]
pub(super) enum Value {
    /// Carries how messages call it.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Rc<Text>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    /// `dict_items`, `dict_keys`, `dict_values`: a length and an order, but no index.
    View(&'static str, Rc<Items>),
    /// Can be walked once.
    Iter(Rc<Rest>),
    Dict(Rc<Dict>),
    Namespace(Rc<Namespace>),
    Macro(Rc<Macro>),
    /// A function of the environment.
    Function(&'static str),
    /// A method bound to its value.
    Method(Rc<(Value, &'static str)>),
    Loop(Rc<LoopState>),
}

impl Value {
    pub(super) fn str(text: impl Into<String>) -> Self {
        Self::text(text, false)
    }

    pub(super) fn text(text: impl Into<String>, safe: bool) -> Self {
        let text = text.into();
        let _charge = Charge::new(text.len() + 48);
        Self::Str(Rc::new(Text { text, safe, _charge }))
    }

    pub(super) fn list(items: Vec<Value>) -> Self {
        Self::List(Self::items(items))
    }

    pub(super) fn tuple(items: Vec<Value>) -> Self {
        Self::Tuple(Self::items(items))
    }

    pub(super) fn items(mut items: Vec<Value>) -> Rc<Items> {
        let depth = depth_over(&mut items);
        let _charge = Charge::new(32 * items.len() + 48);
        Rc::new(Items { items, depth, _charge })
    }

    pub(super) fn iter(mut items: Vec<Value>) -> Self {
        let depth = depth_over(&mut items);
        let _charge = Charge::new(32 * items.len() + 48);
        Self::Iter(Rc::new(Rest { items: RefCell::new(items.into_iter()), depth, _charge }))
    }

    /// How many levels of values it holds.
    fn depth(&self) -> u32 {
        match self {
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.depth,
            Self::Dict(dict) => dict.depth,
            Self::Iter(rest) => rest.depth,
            Self::Loop(state) => state.items.depth + 1,
            Self::Method(bound) => bound.0.depth() + 1,
            _ => 0,
        }
    }

    pub(super) fn dict(pairs: impl IntoIterator<Item = (Value, Value)>) -> Self {
        Self::Dict(Rc::new(Dict::new(pairs)))
    }

    pub(super) fn undefined(what: impl Into<String>) -> Self {
        Self::Undefined(what.into().into())
    }

    pub(super) fn from_json(json: &serde_json::Value) -> Self {
        match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(b) => Self::Bool(*b),
            serde_json::Value::Number(n) => n
                .as_i128()
                .or_else(|| n.as_u64().map(i128::from))
                .map_or_else(|| Self::Float(n.as_f64().unwrap_or(f64::NAN)), Self::Int),
            serde_json::Value::String(s) => Self::str(s.as_str()),
            serde_json::Value::Array(items) => Self::list(items.iter().map(Self::from_json).collect()),
            serde_json::Value::Object(map) => {
                // Keys of a JSON map are distinct already.
                let entries: Vec<_> =
                    map.iter().map(|(k, v)| (Self::str(k.as_str()), Self::from_json(v))).collect();
                Self::Dict(Rc::new(Dict::of_distinct(entries)))
            }
        }
    }

    /// The name of its type, as Python's messages say it.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::View(name, _) => name,
            Self::Iter(_) => "generator",
            Self::Dict(_) => "dict",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Loop(_) => "LoopContext",
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        if let Self::Str(text) = self { Some(text) } else { None }
    }

    /// Booleans count as 0 and 1, as in Python.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(i) => Some(*i),
            Self::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(f) => Some(*f),
            other => other.as_int().map(|i| i as f64),
        }
    }

    pub(super) fn truthy(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(i) => *i != 0,
            Self::Float(f) => *f != 0.0,
            _ => self.len().is_none_or(|len| len > 0),
        }
    }

    /// Python's `len`, where there is one.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Str(text) => Some(text.chars().count()),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => Some(items.len()),
            Self::Dict(dict) => Some(dict.entries.len()),
            Self::Loop(state) => Some(state.items.len()),
            _ => None,
        }
    }

    /// What a loop over it walks.
    pub(super) fn walk(&self) -> Result<Vec<Value>, Fault> {
        Ok(match self {
            Self::Undefined(_) => Vec::new(),
            Self::Str(text) => {
                reserve(text.len() * 64)?;
                text.chars().map(|c| Self::str(c.to_string())).collect()
            }
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.to_vec(),
            Self::Iter(rest) => rest.items.borrow_mut().by_ref().collect(),
            Self::Dict(dict) => dict.entries.iter().map(|(k, _)| k.clone()).collect(),
            other => return Err(Fault::new(format!("'{}' object is not iterable", other.kind()))),
        })
    }

    /// Python's `==`.
    pub(super) fn equals(&self, other: &Self) -> bool {
        // Out of steps: any answer will do, the interpreter stops at its next step.
        if !spend(1) {
            return false;
        }
        match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Str(a), Self::Str(b)) => a.text == b.text,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.equals(b))
            }
            (Self::Dict(a), Self::Dict(b)) => {
                a.entries.len() == b.entries.len()
                    && a.entries.iter().all(|(k, v)| b.find(k).is_some_and(|w| v.equals(w)))
            }
            (Self::Namespace(a), Self::Namespace(b)) => Rc::ptr_eq(a, b),
            (Self::Macro(a), Self::Macro(b)) => Rc::ptr_eq(a, b),
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.as_float(), other.as_float()), (Some(a), Some(b)) if a == b),
            },
        }
    }

    /// Python's `<` and its relatives; `None` for what has no order (a NaN).
    pub(super) fn order(&self, other: &Self) -> Result<Option<Ordering>, Fault> {
        match (self, other) {
            (Self::Str(a), Self::Str(b)) => Ok(Some(a.text.cmp(&b.text))),
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                for (a, b) in a.iter().zip(b.iter()) {
                    if !a.equals(b) {
                        return a.order(b);
                    }
                }
                Ok(Some(a.len().cmp(&b.len())))
            }
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
                _ => match (self.as_float(), other.as_float()) {
                    (Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                    _ => {
                        let (a, b) = (self.kind(), other.kind());
                        Err(Fault::new(format!("'{a}' and '{b}' have no order; compare values of one type")))
                    }
                },
            },
        }
    }

    /// Python's `str`.
    pub(super) fn print(&self) -> String {
        match self {
            Self::Undefined(_) => String::new(),
            Self::Str(text) => text.text.clone(),
            other => {
                let mut out = String::new();
                other.repr(&mut out);
                out
            }
        }
    }

    /// Python's `repr`, appended to `out`.
    pub(super) fn repr(&self, out: &mut String) {
        match self {
            Self::Undefined(_) => out.push_str("Undefined"),
            Self::None => out.push_str("None"),
            Self::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
            Self::Int(i) => _ = write!(out, "{i}"),
            Self::Float(f) => out.push_str(&float_repr(*f)),
            Self::Str(text) if text.safe => {
                out.push_str("Markup(");
                str_repr(text, out);
                out.push(')');
            }
            Self::Str(text) => str_repr(text, out),
            Self::List(items) => repr_items(out, "[", items, "]"),
            Self::Tuple(items) if items.len() == 1 => repr_items(out, "(", items, ",)"),
            Self::Tuple(items) => repr_items(out, "(", items, ")"),
            Self::View(name, items) => {
                out.push_str(name);
                repr_items(out, "([", items, "])");
            }
            Self::Dict(dict) => {
                out.push('{');
                repr_pairs(out, dict.entries.iter().map(|(k, v)| (k, v)));
                out.push('}');
            }
            Self::Namespace(_) => out.push_str("<Namespace>"),
            other => _ = write!(out, "<{}>", other.kind()),
        }
    }
}

/// Levels of a new value over these items; drops them when it would be too deep (the next step reports it).
fn depth_over(items: &mut Vec<Value>) -> u32 {
    let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
    if !nesting_fits(depth) {
        items.clear();
    }
    depth
}

fn repr_items(out: &mut String, open: &str, items: &[Value], close: &str) {
    out.push_str(open);
    for (i, item) in items.iter().enumerate() {
        // Shared parts can print far larger than they are; what is cut here is refused by whoever keeps it.
        if out.len() > room() {
            return;
        }
        out.push_str(if i > 0 { ", " } else { "" });
        item.repr(out);
    }
    out.push_str(close);
}

fn repr_pairs<'v>(out: &mut String, pairs: impl Iterator<Item = (&'v Value, &'v Value)>) {
    for (i, (key, value)) in pairs.enumerate() {
        if out.len() > room() {
            return;
        }
        out.push_str(if i > 0 { ", " } else { "" });
        key.repr(out);
        out.push_str(": ");
        value.repr(out);
    }
}

/// Python's `repr` of a float: the shortest digits that read back, exponents from 1e16 and below 1e-4.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = format!("{value}");
    if text.contains('.') { text } else { text + ".0" }
}

/// Python's `repr` of a string.
fn str_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c if (c as u32) < 0x100 => _ = write!(out, "\\x{:02x}", c as u32),
            c if (c as u32) < 0x10000 => _ = write!(out, "\\u{:04x}", c as u32),
            c => _ = write!(out, "\\U{:08x}", c as u32),
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable` for one character, except for code points that Unicode has not assigned.
fn printable(c: char) -> bool {
    if c == ' ' {
        return true;
    }
    let hidden = matches!(c as u32,
        0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x180E | 0x200B..=0x200F | 0x202A..=0x202E
        | 0x2060..=0x206F | 0xFEFF | 0xFFF9..=0xFFFB | 0xE000..=0xF8FF | 0xFFFE | 0xFFFF
        | 0xE0001..=0xE007F | 0xF0000..=0x10FFFF);
    !(hidden || c.is_control() || c.is_whitespace())
}

/// How `tojson` writes.
#[derive(Debug, Clone)]
pub(super) struct JsonStyle {
    pub(super) ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

/// Python's `json.dumps`, appended to `out`.
pub(super) fn to_json(value: &Value, style: &JsonStyle, depth: usize, out: &mut String) -> Result<(), Fault> {
    match value {
        Value::None => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Int(_) => out.push_str(&value.print()),
        Value::Float(f) => out.push_str(&json_float(*f)),
        Value::Str(text) => json_str(text, style.ascii, out),
        Value::List(items) | Value::Tuple(items) => {
            json_group(out, ['[', ']'], items.len(), style, depth, |i, out| {
                to_json(&items[i], style, depth + 1, out)
            })?;
        }
        Value::Dict(dict) => {
            let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.order(&b.0).ok().flatten().unwrap_or(Ordering::Equal));
            }
            json_group(out, ['{', '}'], entries.len(), style, depth, |i, out| {
                let (key, value) = entries[i];
                json_key(key, style, out)?;
                out.push_str(&style.key_separator);
                to_json(value, style, depth + 1, out)
            })?;
        }
        other => return Err(Fault::new(format!("Object of type {} is not JSON serializable", other.kind()))),
    }
    Ok(())
}

fn json_group(
    out: &mut String,
    brackets: [char; 2],
    count: usize,
    style: &JsonStyle,
    depth: usize,
    mut item: impl FnMut(usize, &mut String) -> Result<(), Fault>,
) -> Result<(), Fault> {
    out.push(brackets[0]);
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent.as_ref().filter(|_| count > 0) {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    };
    for i in 0..count {
        out.push_str(if i > 0 { &style.item_separator } else { "" });
        line(out, depth + 1);
        reserve(out.len())?;
        item(i, out)?;
    }
    line(out, depth);
    out.push(brackets[1]);
    Ok(())
}

fn json_key(key: &Value, style: &JsonStyle, out: &mut String) -> Result<(), Fault> {
    match key {
        Value::Str(text) => json_str(text, style.ascii, out),
        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            out.push('"');
            to_json(key, style, 0, out)?;
            out.push('"');
        }
        other => return Err(Fault::new(format!("keys of JSON must be strings, not {}", other.kind()))),
    }
    Ok(())
}

fn json_float(value: f64) -> String {
    match value {
        v if v.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        v => float_repr(v),
    }
}

fn json_str(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x08' => out.push_str("\\b"),
            '\x0c' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
