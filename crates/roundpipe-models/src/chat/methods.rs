//! Attributes, items and the methods that Python's strings, lists and dictionaries have.
//!
//! Refuses methods that change a value, as the immutable sandbox of Jinja2 does: they are undefined.

use std::rc::Rc;

use super::Fault;
use super::eval::{Given, LoopState};
use super::limits::{reserve, spend_bytes};
use super::ops::Spec;
use super::value::Value;

const STR: [&str; 38] = [
    "upper",
    "lower",
    "title",
    "capitalize",
    "swapcase",
    "casefold",
    "strip",
    "lstrip",
    "rstrip",
    "split",
    "rsplit",
    "splitlines",
    "partition",
    "rpartition",
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "replace",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "join",
    "format",
    "isdigit",
    "isnumeric",
    "isdecimal",
    "isalpha",
    "isalnum",
    "isspace",
    "isupper",
    "islower",
    "isascii",
    "zfill",
    "ljust",
    "rjust",
];
const STR_MORE: [&str; 1] = ["center"];
const LIST: [&str; 3] = ["index", "count", "copy"];
const DICT: [&str; 5] = ["get", "items", "keys", "values", "copy"];

/// The method of that name, bound; `None` when the type has none.
fn method(of: &Value, name: &str) -> Option<Value> {
    let found = |names: &[&'static str]| names.iter().find(|n| **n == name).copied();
    let name = match of {
        Value::Str(_) => found(&STR).or_else(|| found(&STR_MORE)),
        Value::List(_) => found(&LIST),
        Value::Tuple(_) => found(&LIST[..2]),
        Value::Dict(_) => found(&DICT),
        Value::Loop(_) => found(&["cycle", "changed"]),
        Value::Function("dict") => found(&["fromkeys"]),
        _ => None,
    }?;
    Some(Value::Method(Rc::new((of.clone(), name))))
}

/// `of.name`: a method or field first, then an item, as Jinja2 looks.
pub(super) fn attribute(of: &Value, name: &str) -> Result<Value, Fault> {
    if let Value::Undefined(what) = of {
        return Err(Fault::new(format!("{what} is undefined, so it has no '{name}'")));
    }
    if let Some(value) = method(of, name).or_else(|| field(of, name)) {
        return Ok(value);
    }
    Ok(match of {
        Value::Dict(dict) => dict.find_str(name).cloned(),
        _ => None,
    }
    .unwrap_or_else(|| missing(of, name)))
}

/// `of[index]`: an item first, then a method or field.
pub(super) fn item(of: &Value, index: &Value) -> Result<Value, Fault> {
    let found = match of {
        Value::Undefined(what) => return Err(Fault::new(format!("{what} is undefined, so it has no items"))),
        Value::Dict(dict) => dict.find(index).cloned(),
        Value::List(items) | Value::Tuple(items) => {
            at(index, items.len()).and_then(|i| items.get(i)).cloned()
        }
        Value::Str(text) => {
            spend_bytes(text.len());
            let len = if index.as_int().is_some_and(|i| i < 0) { text.chars().count() } else { usize::MAX };
            at(index, len).and_then(|i| text.chars().nth(i)).map(|c| Value::str(c.to_string()))
        }
        _ => None,
    };
    if let Some(value) = found {
        return Ok(value);
    }
    let Value::Str(name) = index else { return Ok(missing(of, &index.print())) };
    Ok(method(of, name).or_else(|| field(of, name)).unwrap_or_else(|| missing(of, name)))
}

fn missing(of: &Value, name: &str) -> Value {
    let short: String = name.chars().take(60).collect();
    Value::undefined(format!("'{} object' has no attribute '{short}', which", of.kind()))
}

/// An index as Python counts it, negative from the end.
fn at(index: &Value, len: usize) -> Option<usize> {
    let index = index.as_int()?;
    usize::try_from(if index < 0 { index + i128::try_from(len).ok()? } else { index }).ok()
}

fn field(of: &Value, name: &str) -> Option<Value> {
    match of {
        Value::Namespace(fields) => {
            fields.borrow().iter().find(|(n, _)| n == name).map(|(_, value)| value.clone())
        }
        Value::Loop(state) => loop_field(state, name),
        _ => None,
    }
}

fn loop_field(state: &LoopState, name: &str) -> Option<Value> {
    let (at, len) = (state.index.get(), state.items.len());
    let int = |i: usize| Value::Int(i as i128);
    let neighbour = |i: Option<usize>| {
        let found = i.and_then(|i| state.items.get(i)).cloned();
        found.unwrap_or_else(|| Value::undefined("the loop has no item there; it"))
    };
    Some(match name {
        "index" => int(at + 1),
        "index0" => int(at),
        "revindex" => int(len - at),
        "revindex0" => int(len - at - 1),
        "first" => Value::Bool(at == 0),
        "last" => Value::Bool(at + 1 == len),
        "length" => int(len),
        "depth" => int(state.depth),
        "depth0" => int(state.depth - 1),
        "previtem" => neighbour(at.checked_sub(1)),
        "nextitem" => neighbour(Some(at + 1)),
        _ => return None,
    })
}

/// Calls `of.name(given)`.
pub(super) fn call(of: &Value, name: &str, given: &Given) -> Result<Value, Fault> {
    match of {
        Value::Str(text) => {
            spend_bytes(text.len());
            call_str(text, text.safe, name, given)
        }
        Value::List(items) | Value::Tuple(items) => {
            if name == "copy" {
                return Ok(of.clone());
            }
            let [what] = given.bind(name, ["value"])?;
            let what = what.ok_or_else(|| Fault::new(format!("{name}() needs a value")))?;
            let mut same = items.iter().enumerate().filter(|(_, v)| v.equals(&what));
            match name {
                "count" => Ok(Value::Int(same.count() as i128)),
                _ => same
                    .next()
                    .map(|(i, _)| Value::Int(i as i128))
                    .ok_or_else(|| Fault::new("index(): the value is not in the list")),
            }
        }
        Value::Dict(dict) => {
            let keys = || dict.entries().iter().map(|(k, _)| k.clone()).collect();
            let values = || dict.entries().iter().map(|(_, v)| v.clone()).collect();
            Ok(match name {
                "get" => {
                    let [key, default] = given.bind("get", ["key", "default"])?;
                    let key = key.ok_or_else(|| Fault::new("get() needs a key"))?;
                    dict.find(&key).cloned().or(default).unwrap_or(Value::None)
                }
                "items" => Value::View("dict_items", Value::items(pairs(dict.entries()))),
                "keys" => Value::View("dict_keys", Value::items(keys())),
                "values" => Value::View("dict_values", Value::items(values())),
                _ => of.clone(),
            })
        }
        Value::Loop(state) => call_loop(state, name, given),
        Value::Function("dict") => {
            let [keys, value] = given.bind("fromkeys", ["iterable", "value"])?;
            let keys = keys.ok_or_else(|| Fault::new("fromkeys() needs keys"))?.walk()?;
            let value = value.unwrap_or(Value::None);
            Ok(Value::dict(keys.into_iter().map(|k| (k, value.clone()))))
        }
        other => Err(Fault::new(format!("'{}' has no method '{name}'", other.kind()))),
    }
}

/// Entries as tuples.
pub(super) fn pairs(entries: &[(Value, Value)]) -> Vec<Value> {
    entries.iter().map(|(k, v)| Value::tuple(vec![k.clone(), v.clone()])).collect()
}

fn call_loop(state: &LoopState, name: &str, given: &Given) -> Result<Value, Fault> {
    let values = &given.positional;
    if name == "cycle" {
        if values.is_empty() {
            return Err(Fault::new("cycle() needs values"));
        }
        return Ok(values[state.index.get() % values.len()].clone());
    }
    let mut last = state.changed.borrow_mut();
    let same = last
        .as_ref()
        .is_some_and(|last| last.len() == values.len() && last.iter().zip(values).all(|(a, b)| a.equals(b)));
    // A loop would hold itself, so it never counts as what was seen.
    let seen = values.iter().map(|v| if matches!(v, Value::Loop(_)) { Value::None } else { v.clone() });
    *last = Some(seen.collect());
    Ok(Value::Bool(!same))
}

fn call_str(text: &str, safe: bool, name: &str, given: &Given) -> Result<Value, Fault> {
    let keep = |text: String| Ok(Value::text(text, safe));
    let all = |test: fn(char) -> bool| Ok(Value::Bool(!text.is_empty() && text.chars().all(test)));
    let cased = |other: fn(char) -> bool, this: fn(char) -> bool| {
        Ok(Value::Bool(!text.chars().any(other) && text.chars().any(this)))
    };
    match name {
        "strip" | "lstrip" | "rstrip" => keep(strip(text, name, given)?),
        "split" | "rsplit" => split(text, name == "rsplit", given),
        "splitlines" => splitlines(text, given),
        "partition" | "rpartition" => partition(text, name, given),
        "startswith" | "endswith" => affix(text, name, given),
        "removeprefix" | "removesuffix" => {
            let part = needed(name, given)?;
            let rest =
                if name == "removeprefix" { text.strip_prefix(&*part) } else { text.strip_suffix(&*part) };
            keep(rest.unwrap_or(text).to_string())
        }
        "replace" => replace(text, given),
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, given),
        "join" => {
            let [items] = given.bind("join", ["iterable"])?;
            let items = items.ok_or_else(|| Fault::new("join() needs an iterable"))?.walk()?;
            if let Some(other) = items.iter().find(|v| v.as_str().is_none()) {
                return Err(Fault::new(format!("join() needs strings, not '{}'", other.kind())));
            }
            join(text, &items)
        }
        "format" => format(text, given),
        "zfill" | "ljust" | "rjust" | "center" => justify(text, name, given),
        _ => {
            given.bind::<0>(name, [])?;
            match name {
                "upper" => keep(text.to_uppercase()),
                "lower" | "casefold" => keep(text.to_lowercase()),
                "title" => keep(title(text)),
                "capitalize" => keep(capitalize(text)),
                "swapcase" => keep(swapcase(text)),
                "isdigit" | "isdecimal" => all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric())),
                "isnumeric" => all(char::is_numeric),
                "isalpha" => all(char::is_alphabetic),
                "isalnum" => all(char::is_alphanumeric),
                "isspace" => all(char::is_whitespace),
                "isupper" => cased(char::is_lowercase, char::is_uppercase),
                "islower" => cased(char::is_uppercase, char::is_lowercase),
                "isascii" => Ok(Value::Bool(text.is_ascii())),
                other => Err(Fault::new(format!("'str' has no method '{other}'"))),
            }
        }
    }
}

/// The one string argument of a method.
fn needed(name: &str, given: &Given) -> Result<String, Fault> {
    let [part] = given.bind(name, ["value"])?;
    match part.as_ref().and_then(Value::as_str) {
        Some(part) => Ok(part.to_string()),
        None => Err(Fault::new(format!("{name}() needs a string"))),
    }
}

/// Python's whitespace: Unicode's and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn strip(text: &str, name: &str, given: &Given) -> Result<String, Fault> {
    let [chars] = given.bind(name, ["chars"])?;
    let set: Option<Vec<char>> = match &chars {
        None | Some(Value::None) => None,
        Some(Value::Str(chars)) => Some(chars.chars().collect()),
        Some(other) => return Err(Fault::new(format!("{name}() needs a string, not '{}'", other.kind()))),
    };
    let hit = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
    Ok(match name {
        "strip" => text.trim_matches(hit),
        "lstrip" => text.trim_start_matches(hit),
        _ => text.trim_end_matches(hit),
    }
    .to_string())
}

fn split(text: &str, right: bool, given: &Given) -> Result<Value, Fault> {
    let [separator, most] = given.bind("split", ["sep", "maxsplit"])?;
    reserve(text.len())?;
    let most = match most.as_ref().and_then(Value::as_int) {
        Some(most) if most >= 0 => usize::try_from(most).unwrap_or(usize::MAX - 1),
        _ => usize::MAX - 1,
    };
    let mut parts: Vec<String> = match separator {
        Some(Value::Str(separator)) if separator.is_empty() => return Err(Fault::new("empty separator")),
        Some(Value::Str(separator)) => {
            // Many short parts weigh more than the text.
            reserve(text.matches(&**separator).count().saturating_mul(96))?;
            if right {
                text.rsplitn(most + 1, &**separator).map(str::to_string).collect()
            } else {
                text.splitn(most + 1, &**separator).map(str::to_string).collect()
            }
        }
        None | Some(Value::None) => {
            reserve(text.len().saturating_mul(48))?;
            split_space(text, right, most)
        }
        Some(other) => return Err(Fault::new(format!("split() needs a string, not '{}'", other.kind()))),
    };
    if right {
        parts.reverse();
    }
    Ok(Value::list(parts.into_iter().map(Value::str).collect()))
}

/// Parts between runs of whitespace; from the right in reverse order.
fn split_space(text: &str, right: bool, most: usize) -> Vec<String> {
    let mut parts = Vec::new();
    let mut rest = text.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = if right { rest.rfind(is_space) } else { rest.find(is_space) };
        match cut {
            Some(cut) if parts.len() < most && right => {
                parts.push(rest[cut..].trim_start_matches(is_space).to_string());
                rest = rest[..cut].trim_end_matches(is_space);
            }
            Some(cut) if parts.len() < most => {
                parts.push(rest[..cut].to_string());
                rest = rest[cut..].trim_start_matches(is_space);
            }
            _ => {
                parts.push(rest.to_string());
                break;
            }
        }
    }
    // What is left after the last split keeps the outer whitespace on its far side.
    if parts.len() > most {
        let last = parts.len() - 1;
        if right {
            parts[last] =
                text[..text.find(parts[last].as_str()).unwrap_or(0) + parts[last].len()].to_string();
        } else {
            let tail = text.rfind(parts[last].as_str()).unwrap_or(0);
            parts[last] = text[tail..].to_string();
        }
    }
    parts
}

fn splitlines(text: &str, given: &Given) -> Result<Value, Fault> {
    let [keep] = given.bind("splitlines", ["keepends"])?;
    let keep = keep.is_some_and(|k| k.truthy());
    let ends = ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}'];
    reserve(text.matches(ends).count().saturating_mul(96))?;
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(ends) else {
            lines.push(Value::str(rest));
            break;
        };
        let after = if rest[end..].starts_with("\r\n") {
            end + 2
        } else {
            end + rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Value::str(&rest[..if keep { after } else { end }]));
        rest = &rest[after..];
    }
    Ok(Value::list(lines))
}

fn partition(text: &str, name: &str, given: &Given) -> Result<Value, Fault> {
    let separator = needed(name, given)?;
    if separator.is_empty() {
        return Err(Fault::new("empty separator"));
    }
    let parts = match (name, text.split_once(&*separator), text.rsplit_once(&*separator)) {
        ("partition", Some((a, b)), _) | ("rpartition", _, Some((a, b))) => [a, &separator, b],
        ("partition", ..) => [text, "", ""],
        _ => ["", "", text],
    };
    Ok(Value::tuple(parts.map(Value::str).to_vec()))
}

fn affix(text: &str, name: &str, given: &Given) -> Result<Value, Fault> {
    let [part] = given.bind(name, ["prefix"])?;
    let parts = match part {
        Some(Value::Tuple(parts)) => parts.to_vec(),
        Some(part) => vec![part],
        None => Vec::new(),
    };
    let mut hit = false;
    for part in &parts {
        let Some(part) = part.as_str() else {
            let kind = part.kind();
            return Err(Fault::new(format!("{name}() needs a string or a tuple of strings, not '{kind}'")));
        };
        hit |= if name == "startswith" { text.starts_with(part) } else { text.ends_with(part) };
    }
    Ok(Value::Bool(hit))
}

fn replace(text: &str, given: &Given) -> Result<Value, Fault> {
    let [old, new, count] = given.bind("replace", ["old", "new", "count"])?;
    let (Some(Value::Str(old)), Some(Value::Str(new))) = (old, new) else {
        return Err(Fault::new("replace() needs two strings"));
    };
    replace_text(text, &old, &new, count.as_ref().and_then(Value::as_int))
}

/// Replaces at most `count` occurrences; all for none or a negative count.
pub(super) fn replace_text(text: &str, old: &str, new: &str, count: Option<i128>) -> Result<Value, Fault> {
    let most = count.and_then(|c| usize::try_from(c).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(most);
    reserve(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(Value::str(text.replacen(old, new, most)))
}

fn search(text: &str, name: &str, given: &Given) -> Result<Value, Fault> {
    let [part, start, end] = given.bind(name, ["sub", "start", "end"])?;
    let Some(Value::Str(part)) = part else { return Err(Fault::new(format!("{name}() needs a string"))) };
    let len = text.chars().count();
    let bound = |v: &Option<Value>, default: usize| match v.as_ref().and_then(Value::as_int) {
        Some(i) if i < 0 => usize::try_from(i + len as i128).unwrap_or(0),
        Some(i) => usize::try_from(i).unwrap_or(len).min(len),
        None => default,
    };
    let (start, end) = (bound(&start, 0), bound(&end, len));
    let byte = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(i, _)| i);
    let window = if start <= end { &text[byte(start)..byte(end)] } else { "" };
    let position = |i: usize| (start + window[..i].chars().count()) as i128;
    let found = match name {
        "count" => return Ok(Value::Int(window.matches(&**part).count() as i128)),
        "find" | "index" => window.find(&**part),
        _ => window.rfind(&**part),
    };
    match found {
        Some(i) => Ok(Value::Int(position(i))),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Fault::new("substring not found")),
    }
}

/// The printed items with `separator` between them.
pub(super) fn join(separator: &str, items: &[Value]) -> Result<Value, Fault> {
    let mut out = String::new();
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(separator);
        }
        match item {
            Value::Str(text) => {
                reserve(out.len() + text.len())?;
                out.push_str(text);
            }
            other => out.push_str(&other.print()),
        }
        reserve(out.len() + separator.len())?;
    }
    Ok(Value::str(out))
}

fn justify(text: &str, name: &str, given: &Given) -> Result<Value, Fault> {
    let [width, fill] = given.bind(name, ["width", "fillchar"])?;
    let width = width.as_ref().and_then(Value::as_int).ok_or_else(|| Fault::new("needs a width"))?;
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let fill = fill.map_or(if name == "zfill" { "0".into() } else { " ".into() }, |f| f.print());
    reserve(width.saturating_mul(4))?;
    let missing = width.saturating_sub(text.chars().count());
    Ok(Value::str(match name {
        "ljust" => text.to_string() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + text,
        "zfill" => {
            let sign = usize::from(text.starts_with(['-', '+']));
            [&text[..sign], &fill.repeat(missing), &text[sign..]].concat()
        }
        // Python's rule for the odd one out.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            fill.repeat(left) + text + &fill.repeat(missing - left)
        }
    }))
}

/// First letter upper, the rest lower.
pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map_or_else(String::new, |c| c.to_uppercase().collect::<String>() + &chars.as_str().to_lowercase())
}

fn title(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

fn swapcase(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let swapped: Vec<char> =
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() };
            swapped
        })
        .collect()
}

/// Python's `str.format`: `{}`, `{0}`, `{name}`, attributes, `!r` and a layout after ':'.
fn format(text: &str, given: &Given) -> Result<Value, Fault> {
    let mut out = String::new();
    let mut next = 0;
    let (mut manual, mut automatic) = (false, false);
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let doubled = rest[at..].starts_with("{{") || rest[at..].starts_with("}}");
        if doubled {
            out.push_str(&rest[at..=at]);
            rest = &rest[at + 2..];
            continue;
        }
        let close = rest[at..].find('}').map(|i| at + i).filter(|_| rest[at..].starts_with('{'));
        let Some(close) = close else { return Err(Fault::new("format(): a brace is not balanced")) };
        let inner = &rest[at + 1..close];
        let (name, spec) = inner.split_once(':').unwrap_or((inner, ""));
        let (name, conversion) = name.split_once('!').unwrap_or((name, ""));
        manual |= name.starts_with(|c: char| c.is_ascii_digit());
        automatic |= name.is_empty() || name.starts_with(['.', '[']);
        if manual && automatic {
            return Err(Fault::new("format(): numbered and unnumbered fields cannot be mixed"));
        }
        let mut value = format_value(name, &mut next, given)?;
        if conversion == "r" {
            let mut text = String::new();
            value.repr(&mut text);
            value = Value::str(text);
        } else if conversion == "s" {
            value = Value::str(value.print());
        }
        out.push_str(&Spec::parse(spec)?.apply(&value)?);
        reserve(out.len())?;
        rest = &rest[close + 1..];
    }
    out.push_str(rest);
    Ok(Value::str(out))
}

fn format_value(name: &str, next: &mut usize, given: &Given) -> Result<Value, Fault> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let index = if first.is_empty() {
        *next += 1;
        Some(*next - 1)
    } else {
        first.parse().ok()
    };
    let found = match index {
        Some(index) => given.positional.get(index),
        None => given.named.iter().find(|(n, _)| n == first).map(|(_, v)| v),
    };
    let mut value =
        found.cloned().ok_or_else(|| Fault::new(format!("format(): no argument for '{{{name}}}'")))?;
    while !path.is_empty() {
        if let Some(tail) = path.strip_prefix('.') {
            let end = tail.find(['.', '[']).unwrap_or(tail.len());
            value = attribute(&value, &tail[..end])?;
            path = &tail[end..];
        } else {
            let tail = path.strip_prefix('[').unwrap_or(path);
            let Some(end) = tail.find(']') else { return Err(Fault::new("format(): ']' is missing")) };
            let key = tail[..end].parse().map_or_else(|_| Value::str(&tail[..end]), Value::Int);
            value = item(&value, &key)?;
            path = &tail[end + 1..];
        }
    }
    Ok(value)
}
