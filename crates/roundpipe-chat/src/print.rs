//! Values as text: Python's `str`, `repr` and `json.dumps`.
//!
//! Everything is written into a [`Buffer`], which pays as it grows: values that share parts can
//! print far larger than they are.

use crate::budget::{Budget, Buffer, Shared};
use crate::error::Fault;
use crate::filters::sort_order;
use crate::value::{Items, Text, Value};

impl<'r> Value<'r> {
    /// Python's `str`, as a text of its own.
    pub(crate) fn printed(&self, budget: &'r Budget) -> Result<Shared<'r, Text<'r>>, Fault> {
        if let Self::Str(text) = self {
            return Ok(text.clone());
        }
        let mut out = Buffer::new(budget);
        self.print(&mut out)?;
        match Self::text(out)? {
            Self::Str(text) => Ok(text),
            _ => Err(Fault::new("a text is not a text")),
        }
    }

    /// Python's `str`, appended to `out`.
    pub(crate) fn print(&self, out: &mut Buffer<'r>) -> Result<(), Fault> {
        match self {
            Self::Undefined(_) => Ok(()),
            Self::Str(text) => out.push_str(text.unpaid()),
            other => other.repr(out),
        }
    }

    /// Python's `repr`, appended to `out`.
    pub(crate) fn repr(&self, out: &mut Buffer<'r>) -> Result<(), Fault> {
        out.budget().step()?;
        match self {
            Self::Undefined(_) => out.push_str("Undefined"),
            Self::None => out.push_str("None"),
            Self::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
            Self::Int(i) => write!(out, "{i}"),
            Self::Float(f) => print_float(out, *f),
            Self::Str(text) if text.safe => {
                out.push_str("Markup(")?;
                repr_str(out, text.read_chars()?)?;
                out.push(')')
            }
            Self::Str(text) => repr_str(out, text.read_chars()?),
            Self::List(items) => repr_items(out, "[", items, "]"),
            Self::Tuple(items) if items.len() == 1 => repr_items(out, "(", items, ",)"),
            Self::Tuple(items) => repr_items(out, "(", items, ")"),
            Self::View(_, items) => {
                out.push_str(self.kind())?;
                repr_items(out, "([", items, "])")
            }
            Self::Dict(dict) => {
                out.push('{')?;
                for (i, (key, value)) in dict.read()?.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" })?;
                    key.repr(out)?;
                    out.push_str(": ")?;
                    value.repr(out)?;
                }
                out.push('}')
            }
            other => write!(out, "<{}>", other.kind()),
        }
    }
}

fn repr_items<'r>(
    out: &mut Buffer<'r>,
    open: &str,
    items: &Items<'r>,
    close: &str,
) -> Result<(), Fault> {
    out.push_str(open)?;
    for (i, item) in items.read()?.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" })?;
        item.repr(out)?;
    }
    out.push_str(close)
}

/// Python's `repr` of a float: the shortest digits that read back, exponents from 1e16 and below
/// 1e-4.
pub(crate) fn print_float(out: &mut Buffer<'_>, value: f64) -> Result<(), Fault> {
    if value.is_nan() {
        return out.push_str("nan");
    }
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let size = value.abs();
    let start = out.len();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let mut text = Buffer::new(out.budget());
        write!(text, "{value:e}")?;
        let (digits, exponent) = text
            .as_str()
            .split_once('e')
            .unwrap_or((text.as_str(), "0"));
        let (sign, exponent) = exponent
            .strip_prefix('-')
            .map_or(('+', exponent), |e| ('-', e));
        return write!(out, "{digits}e{sign}{exponent:0>2}");
    }
    write!(out, "{value}")?;
    let whole = !out.as_str()[start..].contains('.');
    out.push_str(if whole { ".0" } else { "" })
}

/// Python's `repr` of a string.
fn repr_str(out: &mut Buffer<'_>, text: &str) -> Result<(), Fault> {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let plain = |c: char| c != quote && c != '\\' && ((' '..='~').contains(&c) || printable(c));
    out.push(quote)?;
    push_escaped(out, text, plain, |out, c| match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c == quote || c == '\\' => write!(out, "\\{c}"),
        c if (c as u32) < 0x100 => write!(out, "\\x{:02x}", c as u32),
        c if (c as u32) < 0x10000 => write!(out, "\\u{:04x}", c as u32),
        c => write!(out, "\\U{:08x}", c as u32),
    })?;
    out.push(quote)
}

/// Appends `text`: what is plain as it stands, every other character by `escape`, for a step each.
pub(crate) fn push_escaped<'r>(
    out: &mut Buffer<'r>,
    text: &str,
    plain: impl Fn(char) -> bool,
    escape: impl Fn(&mut Buffer<'r>, char) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut rest = text;
    while let Some(at) = rest.find(|c| !plain(c)) {
        out.budget().step()?;
        out.push_str(&rest[..at])?;
        let c = rest[at..].chars().next().unwrap_or_default();
        escape(out, c)?;
        rest = &rest[at + c.len_utf8()..];
    }
    out.push_str(rest)
}

/// Python's `str.isprintable` for one character, except for code points that Unicode has not
/// assigned.
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

/// What stands before each line of indented JSON, once per level.
pub(crate) enum Indent<'r> {
    Spaces(usize),
    Text(Shared<'r, Text<'r>>),
}

/// How `tojson` writes.
pub(crate) struct JsonStyle<'r> {
    pub(crate) ascii: bool,
    pub(crate) indent: Option<Indent<'r>>,
    /// Between items, and between a key and its value; the usual ones when not given.
    pub(crate) separators: Option<[Shared<'r, Text<'r>>; 2]>,
    pub(crate) sort_keys: bool,
}

impl<'r> JsonStyle<'r> {
    fn item_separator(&self) -> &str {
        match &self.separators {
            Some([item, _]) => item.unpaid(),
            None if self.indent.is_some() => ",",
            None => ", ",
        }
    }

    fn key_separator(&self) -> &str {
        self.separators
            .as_ref()
            .map_or(": ", |[_, key]| key.unpaid())
    }

    /// Python's `json.dumps`, appended to `out`.
    pub(crate) fn write(
        &self,
        out: &mut Buffer<'r>,
        value: &Value<'r>,
        depth: usize,
    ) -> Result<(), Fault> {
        out.budget().step()?;
        match value {
            Value::Str(text) => self.write_str(out, text),
            Value::List(items) | Value::Tuple(items) => self.write_list(out, items, depth),
            Value::Dict(_) => self.write_dict(out, value, depth),
            scalar => write_scalar(out, scalar),
        }
    }

    fn write_list(
        &self,
        out: &mut Buffer<'r>,
        items: &Items<'r>,
        depth: usize,
    ) -> Result<(), Fault> {
        out.push('[')?;
        for (i, item) in items.read()?.iter().enumerate() {
            self.separate(out, i, depth)?;
            self.write(out, item, depth + 1)?;
        }
        self.close(out, items.len(), depth, ']')
    }

    fn write_dict(
        &self,
        out: &mut Buffer<'r>,
        value: &Value<'r>,
        depth: usize,
    ) -> Result<(), Fault> {
        let Value::Dict(dict) = value else {
            return Ok(());
        };
        out.push('{')?;
        let entries = dict.read()?;
        let order = if self.sort_keys {
            Some(sort_order(out.budget(), entries.len(), |a, b| {
                entries[a].0.order(&entries[b].0)
            })?)
        } else {
            None
        };
        for i in 0..entries.len() {
            let at = order.as_ref().map_or(i, |order| order[i]);
            let (key, value) = &entries[at];
            self.separate(out, i, depth)?;
            self.write_key(out, key)?;
            out.push_str(self.key_separator())?;
            self.write(out, value, depth + 1)?;
        }
        self.close(out, entries.len(), depth, '}')
    }

    fn write_key(&self, out: &mut Buffer<'r>, key: &Value<'r>) -> Result<(), Fault> {
        match key {
            Value::Str(text) => self.write_str(out, text),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                out.push('"')?;
                write_scalar(out, key)?;
                out.push('"')
            }
            other => Err(Fault::new(format_args!(
                "keys of JSON must be strings, not {}",
                other.kind()
            ))),
        }
    }

    /// What stands before item `i`.
    fn separate(&self, out: &mut Buffer<'r>, i: usize, depth: usize) -> Result<(), Fault> {
        out.push_str(if i > 0 { self.item_separator() } else { "" })?;
        self.line(out, depth + 1)
    }

    fn close(
        &self,
        out: &mut Buffer<'r>,
        count: usize,
        depth: usize,
        bracket: char,
    ) -> Result<(), Fault> {
        if count > 0 {
            self.line(out, depth)?;
        }
        out.push(bracket)
    }

    fn line(&self, out: &mut Buffer<'r>, depth: usize) -> Result<(), Fault> {
        let Some(indent) = &self.indent else {
            return Ok(());
        };
        out.push('\n')?;
        match indent {
            Indent::Spaces(width) => out.repeat(" ", width.saturating_mul(depth)),
            Indent::Text(text) => out.repeat(text.unpaid(), depth),
        }
    }

    fn write_str(&self, out: &mut Buffer<'r>, text: &Text<'r>) -> Result<(), Fault> {
        let plain = |c: char| match c {
            '"' | '\\' => false,
            ' '..='~' => true,
            c => (c as u32) >= 0x20 && !self.ascii,
        };
        out.push('"')?;
        push_escaped(out, text.read_chars()?, plain, |out, c| match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x08' => out.push_str("\\b"),
            '\x0c' => out.push_str("\\f"),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
                Ok(())
            }
        })?;
        out.push('"')
    }
}

fn write_scalar<'r>(out: &mut Buffer<'r>, value: &Value<'r>) -> Result<(), Fault> {
    match value {
        Value::None => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Int(i) => write!(out, "{i}"),
        Value::Float(f) if f.is_nan() => out.push_str("NaN"),
        Value::Float(f64::INFINITY) => out.push_str("Infinity"),
        Value::Float(f64::NEG_INFINITY) => out.push_str("-Infinity"),
        Value::Float(f) => print_float(out, *f),
        other => Err(Fault::new(format_args!(
            "Object of type {} is not JSON serializable",
            other.kind()
        ))),
    }
}
