//! Filters and global functions.
//!
//! Refuses `random` (a render must give the same text every time) and filters for web pages.

use std::cmp::Ordering;

use super::eval::{Given, Interp};
use super::limits::{reserve, spend_bytes};
use super::methods::{self, attribute, capitalize, is_space, item, join, pairs, replace_text};
use super::parse::Op;
use super::value::{JsonStyle, Value, to_json};
use super::{Fault, ops, predicates, strftime};

/// Every filter there is.
pub(super) const NAMES: [&str; 47] = [
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
pub(super) fn global(name: &str) -> Option<Value> {
    ["range", "dict", "namespace", "raise_exception", "strftime_now"]
        .into_iter()
        .find(|n| *n == name)
        .map(Value::Function)
}

/// Calls a function of the environment.
pub(super) fn call_global(interp: &Interp, name: &str, given: &Given) -> Result<Value, Fault> {
    match name {
        "raise_exception" => {
            let [message] = given.bind(name, ["message"])?;
            let message = message.map_or_else(String::new, |m| m.print());
            Err(Fault::new(format!("the template says: {message}")))
        }
        "strftime_now" => {
            let [format] = given.bind(name, ["format"])?;
            Ok(Value::str(strftime::format(&string(name, format)?, interp.now)))
        }
        "dict" => Ok(Value::dict(pairs_of(name, given)?.into_iter().map(|(k, v)| (Value::str(k), v)))),
        _ => range(given),
    }
}

/// Keywords, after the entries of a dictionary or of a list of pairs.
pub(super) fn pairs_of(name: &str, given: &Given) -> Result<Vec<(String, Value)>, Fault> {
    let mut entries = Vec::new();
    match given.positional.as_slice() {
        [] => {}
        [Value::Dict(dict)] => entries.extend(dict.entries().iter().map(|(k, v)| (k.print(), v.clone()))),
        [other] => {
            for pair in other.walk()? {
                let pair = pair.walk()?;
                let [key, value] = pair.as_slice() else {
                    return Err(Fault::new(format!("{name}() needs pairs")));
                };
                entries.push((key.print(), value.clone()));
            }
        }
        _ => return Err(Fault::new(format!("{name}() takes at most one positional argument"))),
    }
    entries.extend(given.named.iter().cloned());
    Ok(entries)
}

fn range(given: &Given) -> Result<Value, Fault> {
    let ints: Option<Vec<i128>> = given.positional.iter().map(Value::as_int).collect();
    let (start, stop, step) = match ints.as_deref() {
        Some([stop]) => (0, *stop, 1),
        Some([start, stop]) => (*start, *stop, 1),
        Some([start, stop, step]) if *step != 0 => (*start, *stop, *step),
        _ => return Err(Fault::new("range() needs one to three integers and a step other than zero")),
    };
    let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let count = if span <= 0 { 0 } else { (span - 1) / step.abs() + 1 };
    // The limit of Jinja2's sandbox.
    if count > 100_000 {
        return Err(Fault::new(format!("range() of {count} numbers is too long; at most 100000")));
    }
    Ok(Value::list((0..count).map(|i| Value::Int(start + i * step)).collect()))
}

fn string(what: &str, value: Option<Value>) -> Result<String, Fault> {
    match &value {
        Some(Value::Str(text)) => Ok(text.to_string()),
        _ => Err(Fault::new(format!("{what} needs a string"))),
    }
}

/// `value | name(given)`.
pub(super) fn apply(interp: &mut Interp, name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    if let Value::Str(text) = value {
        spend_bytes(text.len());
    }
    match name {
        "map" => map(interp, value, given),
        "select" | "reject" => select(name == "select", None, value, given),
        "selectattr" | "rejectattr" => {
            let (path, rest) =
                given.positional.split_first().ok_or_else(|| Fault::new("needs an attribute"))?;
            select(name == "selectattr", Some(&path.print()), value, &Given::of(rest.to_vec()))
        }
        "tojson" => tojson(value, given),
        "default" | "d" => {
            let [default, boolean] = given.bind(name, ["default_value", "boolean"])?;
            let falsy = boolean.is_some_and(|b| b.truthy()) && !value.truthy();
            let missing = matches!(value, Value::Undefined(_)) || falsy;
            Ok(if missing { default.unwrap_or_else(|| Value::str("")) } else { value.clone() })
        }
        "length" | "count" => value
            .len()
            .map(|len| Value::Int(len as i128))
            .ok_or_else(|| Fault::new(format!("object of type '{}' has no len()", value.kind()))),
        "abs" | "int" | "float" | "round" => number(name, value, given),
        "attr" => {
            let [path] = given.bind(name, ["name"])?;
            let path = string(name, path)?;
            match value {
                Value::Dict(_) => Ok(Value::undefined(format!("attribute '{path}'"))),
                other => attribute(other, &path),
            }
        }
        "format" => {
            let args = if given.named.is_empty() {
                Value::tuple(given.positional.clone())
            } else {
                Value::dict(given.named.iter().map(|(k, v)| (Value::str(k.as_str()), v.clone())))
            };
            Ok(Value::str(ops::percent(&value.print(), &args)?))
        }
        _ if TEXT.contains(&name) => text(name, value, given),
        _ if NAMES.contains(&name) => sequence(name, value, given),
        other => Err(Fault::new(format!("no filter named '{other}'"))),
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

fn text(name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    match name {
        "join" => return join_filter(value, given),
        "reverse" => {
            return Ok(match value {
                Value::Str(text) => Value::str(text.chars().rev().collect::<String>()),
                other => Value::iter(other.walk()?.into_iter().rev().collect()),
            });
        }
        _ => {}
    }
    let plain = value.print();
    reserve(plain.len())?;
    Ok(match name {
        "trim" => {
            let [chars] = given.bind(name, ["chars"])?;
            let args = chars.map_or_else(Given::default, |c| Given::of(vec![c]));
            return methods::call(&Value::str(plain), "strip", &args);
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else {
                return Err(Fault::new("replace needs two strings"));
            };
            let count = count.as_ref().and_then(Value::as_int);
            return replace_text(&plain, &old.print(), &new.print(), count);
        }
        "center" => {
            let [width] = given.bind(name, ["width"])?;
            let width = width.unwrap_or(Value::Int(80));
            return methods::call(&Value::str(plain), "center", &Given::of(vec![width]));
        }
        "upper" => Value::str(plain.to_uppercase()),
        "lower" => Value::str(plain.to_lowercase()),
        "capitalize" => Value::str(capitalize(&plain)),
        "title" => Value::str(title(&plain)),
        "string" => match value {
            Value::Str(_) => value.clone(),
            _ => Value::str(plain),
        },
        "safe" => Value::text(plain, true),
        "e" | "escape" if matches!(value, Value::Str(text) if text.safe) => value.clone(),
        "e" | "escape" | "forceescape" => {
            reserve(plain.len().saturating_mul(5))?;
            Value::text(ops::escape(&plain), true)
        }
        "wordcount" => {
            let word = |c: char| c == '_' || c.is_alphanumeric();
            Value::Int(plain.split(|c: char| !word(c)).filter(|w| !w.is_empty()).count() as i128)
        }
        "indent" => indent(&plain, given)?,
        "truncate" => truncate(&plain, given)?,
        _ => {
            let mut out = String::new();
            value.repr(&mut out);
            Value::str(out)
        }
    })
}

/// Words begin after spaces, dashes and opening brackets.
fn title(text: &str) -> String {
    let mut start = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let gap = is_space(c) || "-({[<".contains(c);
        if start && !gap {
            out.extend(c.to_uppercase())
        } else {
            out.extend(c.to_lowercase())
        }
        start = gap;
    }
    out
}

fn join_filter(value: &Value, given: &Given) -> Result<Value, Fault> {
    let [separator, path] = given.bind("join", ["d", "attribute"])?;
    let mut items = value.walk()?;
    if let Some(path) = path {
        items = items.iter().map(|v| lookup(v, &path.print())).collect::<Result<_, _>>()?;
    }
    join(&separator.map_or_else(String::new, |s| s.print()), &items)
}

fn indent(text: &str, given: &Given) -> Result<Value, Fault> {
    let [width, first, blank] = given.bind("indent", ["width", "first", "blank"])?;
    let truth = |v: Option<Value>| v.is_some_and(|v| v.truthy());
    let (first, blank) = (truth(first), truth(blank));
    let pad = match &width {
        Some(Value::Str(pad)) => pad.to_string(),
        other => {
            let width = other.as_ref().and_then(Value::as_int).unwrap_or(4).max(0);
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            reserve(width)?;
            " ".repeat(width)
        }
    };
    let lines: Vec<&str> = text.split('\n').collect();
    reserve(text.len().saturating_add(lines.len().saturating_mul(pad.len())))?;
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let padded = if i == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if i > 0 { "\n" } else { "" });
        out.push_str(if padded { &pad } else { "" });
        out.push_str(line);
    }
    Ok(Value::str(out))
}

fn truncate(text: &str, given: &Given) -> Result<Value, Fault> {
    let [length, kill, end, leeway] = given.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let size = |v: Option<Value>, default: usize| {
        v.as_ref().and_then(Value::as_int).and_then(|i| usize::try_from(i).ok()).unwrap_or(default)
    };
    let (length, leeway) = (size(length, 255), size(leeway, 5));
    let end = end.map_or_else(|| "...".to_string(), |e| e.print());
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= length.saturating_add(leeway) {
        return Ok(Value::str(text));
    }
    let kept = length.checked_sub(end.chars().count());
    let kept = kept.ok_or_else(|| Fault::new("truncate: the length is shorter than the end"))?;
    let mut head: String = chars[..kept].iter().collect();
    if !kill.is_some_and(|k| k.truthy())
        && let Some(space) = head.rfind(' ')
    {
        head.truncate(space);
    }
    Ok(Value::str(head + &end))
}

fn number(name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    match name {
        "abs" => match value {
            Value::Float(f) => Ok(Value::Float(f.abs())),
            other => match other.as_int() {
                Some(i) => Ok(Value::Int(i.abs())),
                None => Err(Fault::new(format!("abs of '{}'", other.kind()))),
            },
        },
        "int" => {
            let [default, base] = given.bind(name, ["default", "base"])?;
            let base = base.as_ref().and_then(Value::as_int).unwrap_or(10);
            let parsed = match value {
                Value::Float(f) if f.is_finite() => Some(*f as i128),
                Value::Str(text) => {
                    let clean = text.trim().replace('_', "");
                    let base = u32::try_from(base).ok().filter(|b| (2..=36).contains(b)).unwrap_or(10);
                    i128::from_str_radix(&clean, base)
                        .ok()
                        .or_else(|| clean.parse::<f64>().ok().filter(|f| f.is_finite()).map(|f| f as i128))
                }
                other => other.as_int(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        "float" => {
            let [default] = given.bind(name, ["default"])?;
            let parsed = match value {
                Value::Str(text) => text.trim().parse().ok(),
                other => other.as_float(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        _ => round(value, given),
    }
}

fn round(value: &Value, given: &Given) -> Result<Value, Fault> {
    let [precision, method] = given.bind("round", ["precision", "method"])?;
    let precision = precision.as_ref().and_then(Value::as_int).unwrap_or(0).clamp(-300, 300) as i32;
    let method = method.map_or_else(|| "common".to_string(), |m| m.print());
    let scale = 10f64.powi(precision);
    let number = value.as_float().ok_or_else(|| Fault::new(format!("round of '{}'", value.kind())))?;
    Ok(match (method.as_str(), value) {
        ("common", Value::Int(_) | Value::Bool(_)) if precision >= 0 => {
            Value::Int(value.as_int().unwrap_or(0))
        }
        // Decimal digits round as Python does: to the nearest, ties by the exact binary value.
        ("common", _) if precision >= 0 => {
            Value::Float(format!("{number:.*}", precision as usize).parse().unwrap_or(number))
        }
        ("common", _) => Value::Float((number * scale).round_ties_even() / scale),
        ("ceil", _) => Value::Float((number * scale).ceil() / scale),
        ("floor", _) => Value::Float((number * scale).floor() / scale),
        _ => return Err(Fault::new("round: the method is 'common', 'ceil' or 'floor'")),
    })
}

/// An attribute by a path with dots, whole numbers as indices.
fn lookup(value: &Value, path: &str) -> Result<Value, Fault> {
    path.split('.').try_fold(value.clone(), |value, part| {
        let key = part.parse().map_or_else(|_| Value::str(part), Value::Int);
        item(&value, &key)
    })
}

fn map(interp: &mut Interp, value: &Value, given: &Given) -> Result<Value, Fault> {
    // Jinja2 asks whether there is anything before it asks whether that can be walked.
    if !value.truthy() {
        return Ok(Value::iter(Vec::new()));
    }
    let named = |name: &str| given.named.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let mut out = Vec::new();
    if given.positional.is_empty()
        && let Some(path) = named("attribute")
    {
        let default = named("default");
        for value in value.walk()? {
            let found = lookup(&value, &path.print())?;
            let missing = matches!(found, Value::Undefined(_));
            out.push(default.clone().filter(|_| missing).unwrap_or(found));
        }
        return Ok(Value::iter(out));
    }
    let (name, rest) =
        given.positional.split_first().ok_or_else(|| Fault::new("map needs a filter's name"))?;
    let name = string("map", Some(name.clone()))?;
    for value in value.walk()? {
        let args = Given { positional: rest.to_vec(), named: given.named.clone() };
        out.push(apply(interp, &name, &value, &args)?);
    }
    Ok(Value::iter(out))
}

fn select(keep: bool, path: Option<&str>, value: &Value, given: &Given) -> Result<Value, Fault> {
    let mut out = Vec::new();
    if !value.truthy() {
        return Ok(Value::iter(out));
    }
    for value in value.walk()? {
        let subject = path.map_or_else(|| Ok(value.clone()), |path| lookup(&value, path))?;
        let hit = match given.positional.split_first() {
            None => subject.truthy(),
            Some((test, args)) => predicates::check(&test.print(), &subject, args)?,
        };
        if hit == keep {
            out.push(value);
        }
    }
    Ok(Value::iter(out))
}

fn sequence(name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    Ok(match name {
        "first" => match value {
            Value::Iter(rest) => rest.next(),
            other => other.walk()?.into_iter().next(),
        }
        .unwrap_or_else(|| Value::undefined("the first of nothing")),
        "last" => match value {
            Value::Iter(_) => return Err(Fault::new("'generator' object is not reversible")),
            other => other.walk()?.pop().unwrap_or_else(|| Value::undefined("the last of nothing")),
        },
        "list" => Value::list(value.walk()?),
        "items" => match value {
            Value::Undefined(_) => Value::iter(Vec::new()),
            Value::Dict(dict) => Value::iter(pairs(dict.entries())),
            _ => return Err(Fault::new("Can only get item pairs from a mapping.")),
        },
        "sum" => {
            let [path, start] = given.bind(name, ["attribute", "start"])?;
            let mut sum = start.unwrap_or(Value::Int(0));
            for item in value.walk()? {
                let item = match &path {
                    Some(path) if !matches!(path, Value::None) => lookup(&item, &path.print())?,
                    _ => item,
                };
                sum = ops::binary(Op::Add, &sum, &item)?;
            }
            sum
        }
        "sort" | "min" | "max" | "unique" | "groupby" => ordered(name, value, given)?,
        "dictsort" => dictsort(value, given)?,
        _ => pieces(name, value, given)?,
    })
}

/// `batch` and `slice`.
fn pieces(name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    let [size, fill] = given.bind(name, ["size", "fill_with"])?;
    let size = size.as_ref().and_then(Value::as_int).and_then(|i| usize::try_from(i).ok());
    let size =
        size.filter(|s| (1..=100_000).contains(s)).ok_or_else(|| Fault::new("needs a size above zero"))?;
    let items = value.walk()?;
    let fill = fill.filter(|f| !matches!(f, Value::None));
    let mut out = Vec::new();
    if name == "batch" {
        for chunk in items.chunks(size) {
            let mut chunk = chunk.to_vec();
            if let Some(fill) = &fill {
                chunk.resize(size, fill.clone());
            }
            out.push(Value::list(chunk));
        }
    } else {
        let (each, longer) = (items.len() / size, items.len() % size);
        let mut at = 0;
        for i in 0..size {
            let end = at + each + usize::from(i < longer);
            let mut part = items[at..end].to_vec();
            if let Some(fill) = fill.as_ref().filter(|_| i >= longer && longer > 0) {
                part.push(fill.clone());
            }
            out.push(Value::list(part));
            at = end;
        }
    }
    Ok(Value::iter(out))
}

/// A key to compare by: strings lowercased unless case counts.
fn sort_key(value: &Value, path: Option<&str>, case: bool) -> Result<Value, Fault> {
    let key = path.map_or_else(|| Ok(value.clone()), |path| lookup(value, path))?;
    Ok(match &key {
        Value::Str(text) if !case => Value::str(text.to_lowercase()),
        _ => key,
    })
}

/// Sorts by keys, stable; the first comparison that fails is the error.
fn sort_by_key(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>, Fault> {
    let mut fault = None;
    keyed.sort_by(|a, b| {
        let order = a.0.order(&b.0).unwrap_or_else(|f| {
            fault.get_or_insert(f);
            None
        });
        let order = order.unwrap_or(Ordering::Equal);
        if reverse { order.reverse() } else { order }
    });
    fault.map_or(Ok(keyed), Err)
}

fn ordered(name: &str, value: &Value, given: &Given) -> Result<Value, Fault> {
    let truth = |v: &Option<Value>| v.as_ref().is_some_and(Value::truthy);
    let (reverse, case, path) = match name {
        "sort" => {
            let [reverse, case, path] = given.bind(name, ["reverse", "case_sensitive", "attribute"])?;
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
    let path = path.filter(|p| !matches!(p, Value::None)).map(|p| p.print());
    let mut keyed = Vec::new();
    for item in value.walk()? {
        keyed.push((sort_key(&item, path.as_deref(), case)?, item));
    }
    if name == "unique" {
        let mut seen: Vec<Value> = Vec::new();
        keyed.retain(|(key, _)| {
            let new = !seen.iter().any(|s| s.equals(key));
            if new {
                seen.push(key.clone());
            }
            new
        });
        return Ok(Value::iter(keyed.into_iter().map(|(_, v)| v).collect()));
    }
    let sorted = sort_by_key(keyed, reverse || name == "max")?;
    Ok(match name {
        "sort" => Value::list(sorted.into_iter().map(|(_, v)| v).collect()),
        "groupby" => grouped(sorted, path.as_deref())?,
        _ => sorted.into_iter().next().map_or_else(|| Value::undefined("the extreme of nothing"), |(_, v)| v),
    })
}

fn grouped(sorted: Vec<(Value, Value)>, path: Option<&str>) -> Result<Value, Fault> {
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for (key, item) in sorted {
        match groups.last_mut() {
            Some((last, _, items)) if last.equals(&key) => items.push(item),
            _ => groups.push((key, sort_key(&item, path, true)?, vec![item])),
        }
    }
    let tuple = |(_, name, items)| Value::tuple(vec![name, Value::list(items)]);
    Ok(Value::list(groups.into_iter().map(tuple).collect()))
}

fn dictsort(value: &Value, given: &Given) -> Result<Value, Fault> {
    let [case, by, reverse] = given.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else { return Err(Fault::new("dictsort needs a mapping")) };
    let case = case.is_some_and(|c| c.truthy());
    let by_value = by.is_some_and(|b| b.print() == "value");
    let mut keyed = Vec::new();
    for (key, value) in dict.entries() {
        let sort = sort_key(if by_value { value } else { key }, None, case)?;
        keyed.push((sort, Value::tuple(vec![key.clone(), value.clone()])));
    }
    let sorted = sort_by_key(keyed, reverse.is_some_and(|r| r.truthy()))?;
    Ok(Value::list(sorted.into_iter().map(|(_, v)| v).collect()))
}

fn tojson(value: &Value, given: &Given) -> Result<Value, Fault> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = given.bind("tojson", names)?;
    let truth = |v: Option<Value>| v.is_some_and(|v| v.truthy());
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(text.to_string()),
        Some(other) => {
            let width = other.as_int().ok_or_else(|| Fault::new("tojson: indent is a number or a string"))?;
            let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
            reserve(width.saturating_mul(250))?;
            Some(" ".repeat(width))
        }
    };
    let mut style = JsonStyle {
        ascii: truth(ascii),
        item_separator: if indent.is_some() { ",".into() } else { ", ".into() },
        key_separator: ": ".into(),
        indent,
        sort_keys: truth(sort),
    };
    if let Some(separators) = separators.filter(|s| !matches!(s, Value::None)) {
        let parts = separators.walk()?;
        let [Value::Str(item), Value::Str(key)] = parts.as_slice() else {
            return Err(Fault::new("tojson: separators are two strings"));
        };
        (style.item_separator, style.key_separator) = (item.to_string(), key.to_string());
    }
    let mut out = String::new();
    to_json(value, &style, 0, &mut out)?;
    Ok(Value::str(out))
}
