//! Filters and global functions.
//!
//! Refuses `random` (a render must give the same text every time) and filters for web pages.

use std::cmp::Ordering;

use crate::budget::{Budget, Buffer, Shared, Vector};
use crate::error::Fault;
use crate::eval::{Given, Interp};
use crate::format::percent;
use crate::methods::{self, attribute, capitalize, is_space, item, join, pairs, replace_text};
use crate::parse::Op;
use crate::print::{Indent, JsonStyle};
use crate::value::{Dict, Name, Text, Value};
use crate::{ops, predicates, strftime};

/// Every filter there is.
pub(crate) const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
    "pprint",
];

/// A function of the environment.
pub(crate) fn global<'r>(name: &str) -> Option<Value<'r>> {
    [
        "range",
        "dict",
        "namespace",
        "raise_exception",
        "strftime_now",
    ]
    .into_iter()
    .find(|n| *n == name)
    .map(Value::Function)
}

/// Calls a function of the environment; `namespace` is the interpreter's.
pub(crate) fn call_global<'r>(
    budget: &'r Budget,
    now_s: i64,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match name {
        "raise_exception" => {
            let [message] = given.bind(name, ["message"])?;
            let message = message
                .unwrap_or_else(|| Value::undefined("the message"))
                .printed(budget)?;
            Err(Fault::new(format_args!(
                "the template says: {}",
                message.unpaid()
            )))
        }
        "strftime_now" => {
            let [format] = given.bind(name, ["format"])?;
            let format = string(name, format)?;
            let mut out = Buffer::with_capacity(budget, format.len())?;
            strftime::format(&mut out, format.read_chars()?, now_s)?;
            Value::text(out)
        }
        "dict" => {
            let mut dict = Dict::new(budget);
            each_pair(budget, name, given, |key, value| {
                dict.insert(key.value(budget)?, value)
            })?;
            Value::dict(dict)
        }
        _ => range(budget, given),
    }
}

/// Gives the entries of a dictionary or of a list of pairs, then the keywords.
pub(crate) fn each_pair<'r>(
    budget: &'r Budget,
    name: &str,
    given: &Given<'r>,
    mut entry: impl FnMut(Name<'r>, Value<'r>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    match &given.positional[..] {
        [] => {}
        [Value::Dict(dict)] => {
            for (key, value) in dict.read()? {
                entry(Name::Made(key.printed(budget)?), value.clone())?;
            }
        }
        [other] => {
            for pair in other.walk(budget)?.read()? {
                let pair = pair.walk(budget)?;
                let (Some(key), Some(value), 2) = (pair.get(0), pair.get(1), pair.len()) else {
                    return Err(Fault::new(format_args!("{name}() needs pairs")));
                };
                entry(Name::Made(key.printed(budget)?), value.clone())?;
            }
        }
        _ => {
            return Err(Fault::new(format_args!(
                "{name}() takes at most one positional argument"
            )));
        }
    }
    for (key, value) in given.named.iter() {
        entry(key.clone(), value.clone())?;
    }
    Ok(())
}

fn range<'r>(budget: &'r Budget, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let int = |i: usize| given.positional.get(i).and_then(Value::as_int);
    let (start, stop, step) = match (given.positional.len(), int(0), int(1), int(2)) {
        (1, Some(stop), ..) => (0, stop, 1),
        (2, Some(start), Some(stop), _) => (start, stop, 1),
        (3, Some(start), Some(stop), Some(step)) if step != 0 => (start, stop, step),
        _ => {
            return Err(Fault::new(
                "range() needs one to three integers and a step other than zero",
            ));
        }
    };
    let ahead = if step > 0 { stop > start } else { stop < start };
    let count = if ahead {
        start.abs_diff(stop).div_ceil(step.unsigned_abs())
    } else {
        0
    };
    // The limit of Jinja2's sandbox.
    if count > 100_000 {
        return Err(Fault::new(format_args!(
            "range() of {count} numbers is too long; at most 100000"
        )));
    }
    let mut out = Vector::with_capacity(budget, count as usize)?;
    let mut at = start;
    for _ in 0..count {
        out.push(Value::Int(at))?;
        // Past the last number there may be none left.
        at = at.wrapping_add(step);
    }
    Value::list(out)
}

fn string<'r>(what: &str, value: Option<Value<'r>>) -> Result<Shared<'r, Text<'r>>, Fault> {
    match value {
        Some(Value::Str(text)) => Ok(text),
        _ => Err(Fault::new(format_args!("{what} needs a string"))),
    }
}

fn truth(value: &Option<Value<'_>>) -> bool {
    value.as_ref().is_some_and(Value::truthy)
}

/// `value | name(given)`.
pub(crate) fn apply<'r>(
    interp: &mut Interp<'r>,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let budget = interp.budget;
    budget.step()?;
    match name {
        "map" => map(interp, value, given),
        "select" | "reject" => select(budget, name == "select", None, value, &given.positional),
        "selectattr" | "rejectattr" => {
            let (path, test) = given
                .positional
                .split_first()
                .ok_or_else(|| Fault::new("needs an attribute"))?;
            let path = Path::new(budget, path)?;
            select(budget, name == "selectattr", Some(&path), value, test)
        }
        "tojson" => tojson(budget, value, given),
        "default" | "d" => {
            let [default, boolean] = given.bind(name, ["default_value", "boolean"])?;
            let falsy = truth(&boolean) && !value.truthy();
            if !falsy && !matches!(value, Value::Undefined(_)) {
                return Ok(value.clone());
            }
            default.map_or_else(|| Value::str(budget, ""), Ok)
        }
        "length" | "count" => match value.len()? {
            Some(len) => Ok(Value::Int(len as i128)),
            None => Err(Fault::new(format_args!(
                "object of type '{}' has no len()",
                value.kind()
            ))),
        },
        "abs" | "int" | "float" | "round" => number(budget, name, value, given),
        "attr" => {
            let [path] = given.bind(name, ["name"])?;
            let path = string(name, path)?;
            match value {
                Value::Dict(_) => Value::missing(budget, value, path.unpaid()),
                other => attribute(budget, other, path.unpaid()),
            }
        }
        "format" => format(budget, value, given),
        _ if TEXT.contains(&name) => text(budget, name, value, given),
        _ if NAMES.contains(&name) => sequence(budget, name, value, given),
        other => Err(Fault::new(format_args!("no filter named '{other}'"))),
    }
}

const TEXT: [&str; 18] = [
    "capitalize",
    "center",
    "e",
    "escape",
    "forceescape",
    "indent",
    "lower",
    "pprint",
    "replace",
    "safe",
    "string",
    "title",
    "trim",
    "truncate",
    "upper",
    "wordcount",
    "join",
    "reverse",
];

fn format<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let args = if given.named.is_empty() {
        let mut args = Vector::new(budget);
        args.extend_from_slice(&given.positional)?;
        Value::tuple(args)?
    } else {
        let mut args = Dict::new(budget);
        for (name, value) in given.named.iter() {
            args.insert(name.value(budget)?, value.clone())?;
        }
        Value::dict(args)?
    };
    Value::text(percent(budget, &*value.printed(budget)?, &args)?)
}

fn text<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match name {
        "join" => return join_filter(budget, value, given),
        "reverse" => return reverse(budget, value),
        "e" | "escape" if matches!(value, Value::Str(text) if text.safe) => {
            return Ok(value.clone());
        }
        _ => {}
    }
    let plain = value.printed(budget)?;
    let mut out = Buffer::new(budget);
    match name {
        "trim" => {
            let [chars] = given.bind(name, ["chars"])?;
            return call_plain(budget, &plain, "strip", chars);
        }
        "center" => {
            let [width] = given.bind(name, ["width"])?;
            return call_plain(budget, &plain, name, Some(width.unwrap_or(Value::Int(80))));
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else {
                return Err(Fault::new("replace needs two strings"));
            };
            let count = count.as_ref().and_then(Value::as_int);
            return replace_text(
                budget,
                &plain,
                &*old.printed(budget)?,
                &*new.printed(budget)?,
                count,
            );
        }
        "string" => return Ok(Value::Str(plain)),
        "wordcount" => {
            let word = |c: char| c == '_' || c.is_alphanumeric();
            let words = plain
                .read_chars()?
                .split(|c: char| !word(c))
                .filter(|w| !w.is_empty());
            return Ok(Value::Int(words.count() as i128));
        }
        "safe" => {
            out.push_str(plain.unpaid())?;
            return Value::text_of(out, true);
        }
        "e" | "escape" | "forceescape" => {
            ops::escape(&mut out, &plain)?;
            return Value::text_of(out, true);
        }
        "upper" => out.push_upper(plain.read()?)?,
        "lower" => out.push_lower(plain.read()?)?,
        "capitalize" => capitalize(&mut out, &plain)?,
        "title" => title(&mut out, &plain)?,
        "indent" => indent(&mut out, &plain, given)?,
        "truncate" => truncate(&mut out, &plain, given)?,
        _ => value.repr(&mut out)?,
    }
    Value::text(out)
}

/// A method of strings, on a text that is not safe.
fn call_plain<'r>(
    budget: &'r Budget,
    text: &Shared<'r, Text<'r>>,
    name: &str,
    arg: Option<Value<'r>>,
) -> Result<Value<'r>, Fault> {
    let mut given = Given::new(budget);
    if let Some(arg) = arg {
        given.positional.push(arg)?;
    }
    let text = if text.safe {
        Value::str(budget, text.unpaid())?
    } else {
        Value::Str(text.clone())
    };
    methods::call(budget, &text, name, &given)
}

fn reverse<'r>(budget: &'r Budget, value: &Value<'r>) -> Result<Value<'r>, Fault> {
    if let Value::Str(text) = value {
        let mut out = Buffer::with_capacity(budget, text.len())?;
        out.push_mapped(text.read_chars()?.chars().rev())?;
        return Value::text(out);
    }
    let items = value.walk(budget)?;
    let mut out = Vector::with_capacity(budget, items.len())?;
    for item in items.read()?.iter().rev() {
        out.push(item.clone())?;
    }
    Value::iter(out)
}

/// Words begin after spaces, dashes and opening brackets.
fn title<'r>(out: &mut Buffer<'r>, text: &Text<'r>) -> Result<(), Fault> {
    let mut start = true;
    for c in text.read_chars()?.chars() {
        let gap = is_space(c) || "-({[<".contains(c);
        if start && !gap {
            out.push_mapped(c.to_uppercase())?;
        } else {
            out.push_mapped(c.to_lowercase())?;
        }
        start = gap;
    }
    Ok(())
}

fn join_filter<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [separator, path] = given.bind("join", ["d", "attribute"])?;
    let separator = separator
        .unwrap_or_else(|| Value::undefined("no separator"))
        .printed(budget)?;
    let items = value.walk(budget)?;
    let Some(path) = path else {
        return join(budget, separator.unpaid(), items.read()?);
    };
    let path = Path::new(budget, &path)?;
    let mut found = Vector::with_capacity(budget, items.len())?;
    for item in items.read()? {
        found.push(path.lookup(budget, item)?)?;
    }
    join(budget, separator.unpaid(), &found)
}

fn indent<'r>(out: &mut Buffer<'r>, text: &Text<'r>, given: &Given<'r>) -> Result<(), Fault> {
    let [width, first, blank] = given.bind("indent", ["width", "first", "blank"])?;
    let (first, blank) = (truth(&first), truth(&blank));
    let spaces = width.as_ref().and_then(Value::as_int).unwrap_or(4).max(0);
    let (pad, times) = match &width {
        Some(Value::Str(pad)) => (pad.unpaid(), 1),
        _ => (" ", usize::try_from(spaces).unwrap_or(usize::MAX)),
    };
    for (i, line) in text.read()?.split('\n').enumerate() {
        let padded = if i == 0 {
            first
        } else {
            blank || !line.is_empty()
        };
        out.push_str(if i > 0 { "\n" } else { "" })?;
        if padded {
            out.repeat(pad, times)?;
        }
        out.push_str(line)?;
    }
    Ok(())
}

fn truncate<'r>(out: &mut Buffer<'r>, text: &Text<'r>, given: &Given<'r>) -> Result<(), Fault> {
    let [length, kill, end, leeway] =
        given.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let size = |v: Option<Value<'r>>, default: usize| {
        v.as_ref()
            .and_then(Value::as_int)
            .and_then(|i| usize::try_from(i).ok())
            .unwrap_or(default)
    };
    let (length, leeway) = (size(length, 255), size(leeway, 5));
    let mut tail = Buffer::new(out.budget());
    match end {
        Some(end) => end.print(&mut tail)?,
        None => tail.push_str("...")?,
    }
    let text = text.read_chars()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return out.push_str(text);
    }
    out.budget().pass(tail.len())?;
    let kept = length.checked_sub(tail.as_str().chars().count());
    let kept = kept.ok_or_else(|| Fault::new("truncate: the length is shorter than the end"))?;
    let mut head = &text[..text.char_indices().nth(kept).map_or(text.len(), |(i, _)| i)];
    if !truth(&kill)
        && let Some(space) = head.rfind(' ')
    {
        head = &head[..space];
    }
    out.push_str(head)?;
    out.push_str(tail.as_str())
}

fn number<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match name {
        "abs" => match (value, value.as_int()) {
            (Value::Float(f), _) => Ok(Value::Float(f.abs())),
            (_, Some(i)) => i.checked_abs().map(Value::Int).ok_or_else(ops::large),
            (other, None) => Err(Fault::new(format_args!("abs of '{}'", other.kind()))),
        },
        "int" => {
            let [default, base] = given.bind(name, ["default", "base"])?;
            let base = base.as_ref().and_then(Value::as_int).unwrap_or(10);
            let parsed = match value {
                Value::Float(f) if f.is_finite() => Some(*f as i128),
                Value::Str(text) => parse_int(budget, text, base)?,
                other => other.as_int(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        "float" => {
            let [default] = given.bind(name, ["default"])?;
            let parsed = match value {
                Value::Str(text) => text.read_chars()?.trim().parse().ok(),
                other => other.as_float(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        _ => round(budget, value, given),
    }
}

fn parse_int(budget: &Budget, text: &Text<'_>, base: i128) -> Result<Option<i128>, Fault> {
    let mut clean = Buffer::new(budget);
    for c in text.read_chars()?.trim().chars().filter(|c| *c != '_') {
        clean.push(c)?;
    }
    let clean = clean.as_str();
    let base = u32::try_from(base)
        .ok()
        .filter(|b| (2..=36).contains(b))
        .unwrap_or(10);
    let float = || {
        clean
            .parse::<f64>()
            .ok()
            .filter(|f| f.is_finite())
            .map(|f| f as i128)
    };
    Ok(i128::from_str_radix(clean, base).ok().or_else(float))
}

fn round<'r>(budget: &'r Budget, value: &Value<'r>, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let [precision, method] = given.bind("round", ["precision", "method"])?;
    let precision = precision
        .as_ref()
        .and_then(Value::as_int)
        .unwrap_or(0)
        .clamp(-300, 300) as i32;
    let method = method.map(|m| m.printed(budget)).transpose()?;
    let method = method.as_ref().map_or("common", |m| m.unpaid());
    let scale = 10f64.powi(precision);
    let number = value.as_float();
    let number = number.ok_or_else(|| Fault::new(format_args!("round of '{}'", value.kind())))?;
    Ok(match (method, value) {
        ("common", Value::Int(_) | Value::Bool(_)) if precision >= 0 => {
            Value::Int(value.as_int().unwrap_or(0))
        }
        // Decimal digits round as Python does: to the nearest, ties by the exact binary value.
        ("common", _) if precision >= 0 => {
            let mut digits = Buffer::new(budget);
            write!(digits, "{number:.*}", precision as usize)?;
            Value::Float(digits.as_str().parse().unwrap_or(number))
        }
        ("common", _) => Value::Float((number * scale).round_ties_even() / scale),
        ("ceil", _) => Value::Float((number * scale).ceil() / scale),
        ("floor", _) => Value::Float((number * scale).floor() / scale),
        _ => {
            return Err(Fault::new(
                "round: the method is 'common', 'ceil' or 'floor'",
            ));
        }
    })
}

/// An attribute by a path with dots, whole numbers as indices.
struct Path<'r>(Vector<'r, Value<'r>>);

impl<'r> Path<'r> {
    fn new(budget: &'r Budget, path: &Value<'r>) -> Result<Self, Fault> {
        let mut keys = Vector::new(budget);
        for part in path.printed(budget)?.read()?.split('.') {
            keys.push(match part.parse() {
                Ok(index) => Value::Int(index),
                Err(_) => Value::str(budget, part)?,
            })?;
        }
        Ok(Self(keys))
    }

    fn lookup(&self, budget: &'r Budget, value: &Value<'r>) -> Result<Value<'r>, Fault> {
        let mut value = value.clone();
        for key in self.0.iter() {
            value = item(budget, &value, key)?;
        }
        Ok(value)
    }
}

fn map<'r>(
    interp: &mut Interp<'r>,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let budget = interp.budget;
    let mut out = Vector::new(budget);
    // Jinja2 asks whether there is anything before it asks whether that can be walked.
    if !value.truthy() {
        return Value::iter(out);
    }
    if given.positional.is_empty()
        && let Some(path) = given.find(budget, "attribute")?
    {
        let default = given.find(budget, "default")?;
        let path = Path::new(budget, &path)?;
        for value in value.walk(budget)?.read()? {
            let found = path.lookup(budget, value)?;
            let missing = matches!(found, Value::Undefined(_));
            out.push(default.clone().filter(|_| missing).unwrap_or(found))?;
        }
        return Value::iter(out);
    }
    let (name, rest) = given
        .positional
        .split_first()
        .ok_or_else(|| Fault::new("map needs a filter's name"))?;
    let name = string("map", Some(name.clone()))?;
    let mut args = Given::new(budget);
    args.positional.extend_from_slice(rest)?;
    args.named.extend_from_slice(&given.named)?;
    for value in value.walk(budget)?.read()? {
        out.push(interp.deeper(|interp| apply(interp, name.unpaid(), value, &args))?)?;
    }
    Value::iter(out)
}

fn select<'r>(
    budget: &'r Budget,
    keep: bool,
    path: Option<&Path<'r>>,
    value: &Value<'r>,
    test: &[Value<'r>],
) -> Result<Value<'r>, Fault> {
    let mut out = Vector::new(budget);
    if !value.truthy() {
        return Value::iter(out);
    }
    let test = match test.split_first() {
        Some((name, args)) => Some((name.printed(budget)?, args)),
        None => None,
    };
    for value in value.walk(budget)?.read()? {
        let subject = path.map_or_else(|| Ok(value.clone()), |path| path.lookup(budget, value))?;
        let hit = match &test {
            None => subject.truthy(),
            Some((name, args)) => predicates::check(budget, name.unpaid(), &subject, args)?,
        };
        if hit == keep {
            out.push(value.clone())?;
        }
    }
    Value::iter(out)
}

fn sequence<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match name {
        "first" => {
            let first = match value {
                Value::Iter(rest) => rest.next(),
                other => other.walk(budget)?.get(0).cloned(),
            };
            Ok(first.unwrap_or_else(|| Value::undefined("the first of nothing")))
        }
        "last" => {
            if let Value::Iter(_) = value {
                return Err(Fault::new("'generator' object is not reversible"));
            }
            let items = value.walk(budget)?;
            let last = items
                .len()
                .checked_sub(1)
                .and_then(|at| items.get(at))
                .cloned();
            Ok(last.unwrap_or_else(|| Value::undefined("the last of nothing")))
        }
        "list" => Ok(Value::List(value.walk(budget)?)),
        "items" => match value {
            Value::Undefined(_) => Value::iter(Vector::new(budget)),
            Value::Dict(dict) => Value::iter(pairs(budget, dict)?),
            _ => Err(Fault::new("Can only get item pairs from a mapping.")),
        },
        "sum" => {
            let [path, start] = given.bind(name, ["attribute", "start"])?;
            let path = path_of(budget, path)?;
            let mut sum = start.unwrap_or(Value::Int(0));
            for item in value.walk(budget)?.read()? {
                let item = path
                    .as_ref()
                    .map_or_else(|| Ok(item.clone()), |p| p.lookup(budget, item))?;
                sum = ops::binary(budget, Op::Add, &sum, &item)?;
            }
            Ok(sum)
        }
        "sort" | "min" | "max" | "unique" | "groupby" => ordered(budget, name, value, given),
        "dictsort" => dictsort(budget, value, given),
        _ => pieces(budget, name, value, given),
    }
}

/// The path of an argument that is given and not none.
fn path_of<'r>(budget: &'r Budget, path: Option<Value<'r>>) -> Result<Option<Path<'r>>, Fault> {
    path.filter(|p| !matches!(p, Value::None))
        .map(|p| Path::new(budget, &p))
        .transpose()
}

/// `batch` and `slice`.
fn pieces<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [size, fill] = given.bind(name, ["size", "fill_with"])?;
    let size = size
        .as_ref()
        .and_then(Value::as_int)
        .and_then(|i| usize::try_from(i).ok());
    let size = size
        .filter(|s| (1..=100_000).contains(s))
        .ok_or_else(|| Fault::new("needs a size above zero"))?;
    let fill = fill.filter(|f| !matches!(f, Value::None));
    let items = value.walk(budget)?;
    let items = items.read()?;
    let mut out = Vector::new(budget);
    if name == "batch" {
        for chunk in items.chunks(size) {
            let mut piece = Vector::new(budget);
            piece.extend_from_slice(chunk)?;
            while piece.len() < size
                && let Some(fill) = &fill
            {
                piece.push(fill.clone())?;
            }
            out.push(Value::list(piece)?)?;
        }
        return Value::iter(out);
    }
    let (each, longer) = (items.len() / size, items.len() % size);
    let mut at = 0;
    for i in 0..size {
        let end = at + each + usize::from(i < longer);
        let mut piece = Vector::new(budget);
        piece.extend_from_slice(&items[at..end])?;
        if let Some(fill) = fill.as_ref().filter(|_| i >= longer && longer > 0) {
            piece.push(fill.clone())?;
        }
        out.push(Value::list(piece)?)?;
        at = end;
    }
    Value::iter(out)
}

/// The places of `count` items in their order, equal ones as they stood: a merge sort whose
/// comparisons can fail, and which needs no consistent order (a NaN has none).
pub(crate) fn sort_order<'r>(
    budget: &'r Budget,
    count: usize,
    mut order: impl FnMut(usize, usize) -> Result<Option<Ordering>, Fault>,
) -> Result<Vector<'r, usize>, Fault> {
    let mut sorted = Vector::with_capacity(budget, count)?;
    let mut merged = Vector::with_capacity(budget, count)?;
    for at in 0..count {
        sorted.push(at)?;
        merged.push(at)?;
    }
    let mut run = 1;
    while run < count {
        for start in (0..count).step_by(2 * run) {
            let (middle, end) = ((start + run).min(count), (start + 2 * run).min(count));
            let (mut left, mut right) = (start, middle);
            for slot in start..end {
                budget.value_pass(1)?;
                let from_right = right < end
                    && (left == middle
                        || order(sorted[left], sorted[right])? == Some(Ordering::Greater));
                let from = if from_right { &mut right } else { &mut left };
                merged[slot] = sorted[*from];
                *from += 1;
            }
        }
        std::mem::swap(&mut sorted, &mut merged);
        run *= 2;
    }
    Ok(sorted)
}

/// Items with the keys that they are compared by.
type Keyed<'r> = Vector<'r, (Value<'r>, Value<'r>)>;

/// A key to compare by: strings lowercased unless case counts.
fn sort_key<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    path: Option<&Path<'r>>,
    case: bool,
) -> Result<Value<'r>, Fault> {
    let key = path.map_or_else(|| Ok(value.clone()), |path| path.lookup(budget, value))?;
    match &key {
        Value::Str(text) if !case => {
            let mut lower = Buffer::with_capacity(budget, text.len())?;
            lower.push_lower(text.read()?)?;
            Value::text(lower)
        }
        _ => Ok(key),
    }
}

/// Sorts by keys, stable; the first comparison that fails is the error.
fn sorted<'r>(
    budget: &'r Budget,
    keyed: &Keyed<'r>,
    reverse: bool,
) -> Result<Vector<'r, usize>, Fault> {
    sort_order(budget, keyed.len(), |a, b| {
        let order = keyed[a].0.order(&keyed[b].0)?;
        Ok(if reverse {
            order.map(Ordering::reverse)
        } else {
            order
        })
    })
}

fn ordered<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let (reverse, case, path) = match name {
        "sort" => {
            let [reverse, case, path] =
                given.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            (truth(&reverse), truth(&case), path)
        }
        "groupby" => {
            let [path, _, case] = given.bind(name, ["attribute", "default", "case_sensitive"])?;
            (false, truth(&case), path)
        }
        _ => {
            let [case, path] = given.bind(name, ["case_sensitive", "attribute"])?;
            (false, truth(&case), path)
        }
    };
    let path = path_of(budget, path)?;
    let items = value.walk(budget)?;
    let mut keyed = Keyed::with_capacity(budget, items.len())?;
    for item in items.read()? {
        keyed.push((sort_key(budget, item, path.as_ref(), case)?, item.clone()))?;
    }
    match name {
        "sort" => {
            let mut out = Vector::with_capacity(budget, keyed.len())?;
            for at in sorted(budget, &keyed, reverse)?.iter() {
                out.push(keyed[*at].1.clone())?;
            }
            Value::list(out)
        }
        "groupby" => groupby(budget, &keyed, path.as_ref()),
        "unique" => unique(budget, &keyed),
        _ => extreme(
            &keyed,
            if name == "max" {
                Ordering::Greater
            } else {
                Ordering::Less
            },
        ),
    }
}

/// The first item whose key no other key is beyond.
fn extreme<'r>(keyed: &Keyed<'r>, beyond: Ordering) -> Result<Value<'r>, Fault> {
    let Some(mut best) = keyed.first() else {
        return Ok(Value::undefined("the extreme of nothing"));
    };
    for candidate in &keyed[1..] {
        if candidate.0.order(&best.0)? == Some(beyond) {
            best = candidate;
        }
    }
    Ok(best.1.clone())
}

fn unique<'r>(budget: &'r Budget, keyed: &Keyed<'r>) -> Result<Value<'r>, Fault> {
    let mut seen = Vector::new(budget);
    let mut out = Vector::new(budget);
    'items: for (at, (key, item)) in keyed.iter().enumerate() {
        for earlier in seen.iter() {
            budget.ticks(2)?;
            let (earlier, _): &(Value<'r>, Value<'r>) = &keyed[*earlier];
            if earlier.equals(key)? {
                continue 'items;
            }
        }
        seen.push(at)?;
        out.push(item.clone())?;
    }
    Value::iter(out)
}

/// Runs of equal keys, as tuples of the key and its items.
fn groupby<'r>(
    budget: &'r Budget,
    keyed: &Keyed<'r>,
    path: Option<&Path<'r>>,
) -> Result<Value<'r>, Fault> {
    let order = sorted(budget, keyed, false)?;
    let mut groups = Vector::new(budget);
    let mut at = 0;
    while at < order.len() {
        let (key, first) = &keyed[order[at]];
        let mut items = Vector::new(budget);
        while at < order.len() && (items.is_empty() || key.equals(&keyed[order[at]].0)?) {
            items.push(keyed[order[at]].1.clone())?;
            at += 1;
        }
        let name = sort_key(budget, first, path, true)?;
        groups.push(Value::tuple(Vector::of(
            budget,
            [name, Value::list(items)?],
        )?)?)?;
    }
    Value::list(groups)
}

fn dictsort<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [case, by, reverse] = given.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else {
        return Err(Fault::new("dictsort needs a mapping"));
    };
    let by_value = match by {
        Some(by) => by.printed(budget)?.unpaid() == "value",
        None => false,
    };
    let mut keyed = Keyed::with_capacity(budget, dict.len())?;
    for (key, value) in dict.read()? {
        let sort = sort_key(
            budget,
            if by_value { value } else { key },
            None,
            truth(&case),
        )?;
        keyed.push((
            sort,
            Value::tuple(Vector::of(budget, [key.clone(), value.clone()])?)?,
        ))?;
    }
    let mut out = Vector::with_capacity(budget, keyed.len())?;
    for at in sorted(budget, &keyed, truth(&reverse))?.iter() {
        out.push(keyed[*at].1.clone())?;
    }
    Value::list(out)
}

fn tojson<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = given.bind("tojson", names)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(Indent::Text(text)),
        Some(other) => {
            let width = other
                .as_int()
                .ok_or_else(|| Fault::new("tojson: indent is a number or a string"))?;
            Some(Indent::Spaces(
                usize::try_from(width.max(0)).unwrap_or(usize::MAX),
            ))
        }
    };
    let separators = match separators {
        None | Some(Value::None) => None,
        Some(separators) => {
            let parts = separators.walk(budget)?;
            let (Some(Value::Str(item)), Some(Value::Str(key)), 2) =
                (parts.get(0), parts.get(1), parts.len())
            else {
                return Err(Fault::new("tojson: separators are two strings"));
            };
            Some([item.clone(), key.clone()])
        }
    };
    let style = JsonStyle {
        ascii: truth(&ascii),
        indent,
        separators,
        sort_keys: truth(&sort),
    };
    let mut out = Buffer::new(budget);
    style.write(&mut out, value, 0)?;
    Value::text(out)
}
