//! Attributes, items and the methods that Python's strings, lists and dictionaries have.
//!
//! Refuses methods that change a value, as the immutable sandbox of Jinja2 does: they are
//! undefined.

use crate::budget::{Budget, Buffer, Shared, Vector};
use crate::error::Fault;
use crate::eval::{Given, LoopState};
use crate::format;
use crate::value::{Dict, Items, Missing, Text, Value, View};

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
fn method<'r>(budget: &'r Budget, of: &Value<'r>, name: &str) -> Result<Option<Value<'r>>, Fault> {
    let found = |names: &[&'static str]| names.iter().find(|n| **n == name).copied();
    let name = match of {
        Value::Str(_) => found(&STR).or_else(|| found(&STR_MORE)),
        Value::List(_) => found(&LIST),
        Value::Tuple(_) => found(&LIST[..2]),
        Value::Dict(_) => found(&DICT),
        Value::Loop(_) => found(&["cycle", "changed"]),
        Value::Function("dict") => found(&["fromkeys"]),
        _ => None,
    };
    name.map(|name| Value::method(budget, of, name)).transpose()
}

/// `of.name` with a name that the template wrote.
pub(crate) fn written_attribute<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    name: &'r str,
) -> Result<Value<'r>, Fault> {
    let found = find_attribute(budget, of, name)?;
    Ok(found.unwrap_or_else(|| Value::Undefined(Missing::Attribute(of.kind(), name))))
}

/// `of.name` with a name that the template computed.
pub(crate) fn attribute<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    name: &str,
) -> Result<Value<'r>, Fault> {
    match find_attribute(budget, of, name)? {
        Some(value) => Ok(value),
        None => Value::missing(budget, of, name),
    }
}

/// A method or field first, then an item, as Jinja2 looks.
fn find_attribute<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    name: &str,
) -> Result<Option<Value<'r>>, Fault> {
    budget.ticks(2)?;
    if let Value::Undefined(what) = of {
        return Err(Fault::new(format_args!(
            "{what} is undefined, so it has no '{name}'"
        )));
    }
    if let Some(value) = method_or_field(budget, of, name)? {
        return Ok(Some(value));
    }
    match of {
        Value::Dict(dict) => Ok(dict.find_str(name)?.cloned()),
        _ => Ok(None),
    }
}

/// `of[index]`: an item first, then a method or field.
pub(crate) fn item<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    index: &Value<'r>,
) -> Result<Value<'r>, Fault> {
    budget.ticks(2)?;
    let found = match of {
        Value::Undefined(what) => {
            return Err(Fault::new(format_args!(
                "{what} is undefined, so it has no items"
            )));
        }
        Value::Dict(dict) => dict.find(index)?.cloned(),
        Value::List(items) | Value::Tuple(items) => {
            at(index, items.len()).and_then(|i| items.get(i)).cloned()
        }
        Value::Str(text) => match char_at(text, index)? {
            Some(c) => Some(Value::str(budget, c.encode_utf8(&mut [0; 4]))?),
            None => None,
        },
        _ => None,
    };
    if let Some(value) = found {
        return Ok(value);
    }
    let name = index.printed(budget)?;
    if matches!(index, Value::Str(_))
        && let Some(value) = method_or_field(budget, of, name.unpaid())?
    {
        return Ok(value);
    }
    Value::missing(budget, of, name.unpaid())
}

fn char_at(text: &Text<'_>, index: &Value<'_>) -> Result<Option<char>, Fault> {
    let Some(i) = index.as_int() else {
        return Ok(None);
    };
    let text = text.read()?;
    let len = if i < 0 {
        text.chars().count()
    } else {
        usize::MAX
    };
    Ok(at(index, len).and_then(|i| text.chars().nth(i)))
}

/// An index as Python counts it, negative from the end.
fn at(index: &Value<'_>, len: usize) -> Option<usize> {
    let index = index.as_int()?;
    usize::try_from(if index < 0 {
        index + i128::try_from(len).ok()?
    } else {
        index
    })
    .ok()
}

fn method_or_field<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    name: &str,
) -> Result<Option<Value<'r>>, Fault> {
    if let Some(method) = method(budget, of, name)? {
        return Ok(Some(method));
    }
    match of {
        Value::Namespace(fields) => match fields.upgrade() {
            Some(fields) => fields.find(budget, name),
            None => Ok(None),
        },
        Value::Loop(state) => Ok(loop_field(state, name)),
        _ => Ok(None),
    }
}

fn loop_field<'r>(state: &LoopState<'r>, name: &str) -> Option<Value<'r>> {
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

/// Calls `of.name(given)`; a loop's `changed` is the interpreter's.
pub(crate) fn call<'r>(
    budget: &'r Budget,
    of: &Value<'r>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match of {
        Value::Str(text) => call_str(budget, text, name, given),
        Value::List(_) | Value::Tuple(_) if name == "copy" => Ok(of.clone()),
        Value::List(items) | Value::Tuple(items) => call_list(items, name, given),
        Value::Dict(dict) => call_dict(budget, dict, of, name, given),
        Value::Loop(state) => {
            let values = &given.positional;
            if values.is_empty() {
                return Err(Fault::new("cycle() needs values"));
            }
            Ok(values[state.index.get() % values.len()].clone())
        }
        Value::Function("dict") => {
            let [keys, value] = given.bind("fromkeys", ["iterable", "value"])?;
            let keys = keys
                .ok_or_else(|| Fault::new("fromkeys() needs keys"))?
                .walk(budget)?;
            let value = value.unwrap_or(Value::None);
            let mut dict = Dict::new(budget);
            for key in keys.read()? {
                dict.insert(key.clone(), value.clone())?;
            }
            Value::dict(dict)
        }
        other => Err(Fault::new(format_args!(
            "'{}' has no method '{name}'",
            other.kind()
        ))),
    }
}

fn call_list<'r>(items: &Items<'r>, name: &str, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let [what] = given.bind(name, ["value"])?;
    let what = what.ok_or_else(|| Fault::new(format_args!("{name}() needs a value")))?;
    let mut count = 0;
    for (i, value) in items.read()?.iter().enumerate() {
        if value.equals(&what)? {
            if name == "index" {
                return Ok(Value::Int(i as i128));
            }
            count += 1;
        }
    }
    if name == "count" {
        Ok(Value::Int(count))
    } else {
        Err(Fault::new("index(): the value is not in the list"))
    }
}

fn call_dict<'r>(
    budget: &'r Budget,
    dict: &Dict<'r>,
    of: &Value<'r>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let column = |pick: fn(&(Value<'r>, Value<'r>)) -> Value<'r>| {
        let mut out = Vector::with_capacity(budget, dict.len())?;
        for entry in dict.read()? {
            out.push(pick(entry))?;
        }
        Ok(out)
    };
    match name {
        "get" => {
            let [key, default] = given.bind("get", ["key", "default"])?;
            let key = key.ok_or_else(|| Fault::new("get() needs a key"))?;
            Ok(dict.find(&key)?.cloned().or(default).unwrap_or(Value::None))
        }
        "items" => Value::view(View::Items, pairs(budget, dict)?),
        "keys" => Value::view(View::Keys, column(|entry| entry.0.clone())?),
        "values" => Value::view(View::Values, column(|entry| entry.1.clone())?),
        _ => Ok(of.clone()),
    }
}

/// Entries as tuples.
pub(crate) fn pairs<'r>(
    budget: &'r Budget,
    dict: &Dict<'r>,
) -> Result<Vector<'r, Value<'r>>, Fault> {
    let mut out = Vector::with_capacity(budget, dict.len())?;
    for (key, value) in dict.read()? {
        out.push(Value::tuple(Vector::of(
            budget,
            [key.clone(), value.clone()],
        )?)?)?;
    }
    Ok(out)
}

fn call_str<'r>(
    budget: &'r Budget,
    text: &Shared<'r, Text<'r>>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    match name {
        "strip" | "lstrip" | "rstrip" => strip(budget, text, name, given),
        "split" | "rsplit" => split(budget, text, name == "rsplit", given),
        "splitlines" => splitlines(budget, text, given),
        "partition" | "rpartition" => partition(budget, text, name, given),
        "startswith" | "endswith" => affix(text, name, given),
        "removeprefix" | "removesuffix" => {
            let part = needed(name, given)?;
            let (text, safe, part) = (text.read()?, text.safe, part.read()?);
            let rest = if name == "removeprefix" {
                text.strip_prefix(part)
            } else {
                text.strip_suffix(part)
            };
            Value::text_of(Buffer::of(budget, rest.unwrap_or(text))?, safe)
        }
        "replace" => replace(budget, text, given),
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, given),
        "join" => {
            let [items] = given.bind("join", ["iterable"])?;
            let items = items
                .ok_or_else(|| Fault::new("join() needs an iterable"))?
                .walk(budget)?;
            if let Some(other) = items.read()?.iter().find(|v| !matches!(v, Value::Str(_))) {
                return Err(Fault::new(format_args!(
                    "join() needs strings, not '{}'",
                    other.kind()
                )));
            }
            join(budget, text.unpaid(), items.read()?)
        }
        "format" => Value::text(format::braces(budget, text, given)?),
        "zfill" | "ljust" | "rjust" | "center" => justify(budget, text, name, given),
        _ => {
            given.bind::<0>(name, [])?;
            if name.starts_with("is") {
                check_str(text, name)
            } else {
                recase(budget, text, name)
            }
        }
    }
}

fn check_str<'r>(text: &Text<'r>, name: &str) -> Result<Value<'r>, Fault> {
    let text = text.read_chars()?;
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    let cased = |other: fn(char) -> bool, this: fn(char) -> bool| {
        !text.chars().any(other) && text.chars().any(this)
    };
    Ok(Value::Bool(match name {
        "isdigit" | "isdecimal" => all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric())),
        "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(char::is_whitespace),
        "isupper" => cased(char::is_lowercase, char::is_uppercase),
        "islower" => cased(char::is_uppercase, char::is_lowercase),
        "isascii" => text.is_ascii(),
        other => return Err(no_method(other)),
    }))
}

fn recase<'r>(budget: &'r Budget, text: &Text<'r>, name: &str) -> Result<Value<'r>, Fault> {
    let mut out = Buffer::with_capacity(budget, text.len())?;
    match name {
        "upper" => out.push_upper(text.read()?)?,
        "lower" | "casefold" => out.push_lower(text.read()?)?,
        "title" => title(&mut out, text)?,
        "capitalize" => capitalize(&mut out, text)?,
        "swapcase" => {
            for c in text.read_chars()?.chars() {
                if c.is_uppercase() {
                    out.push_mapped(c.to_lowercase())?;
                } else {
                    out.push_mapped(c.to_uppercase())?;
                }
            }
        }
        other => return Err(no_method(other)),
    }
    Value::text_of(out, text.safe)
}

fn no_method(name: &str) -> Fault {
    Fault::new(format_args!("'str' has no method '{name}'"))
}

/// The one string argument of a method.
fn needed<'r>(name: &str, given: &Given<'r>) -> Result<Shared<'r, Text<'r>>, Fault> {
    match given.bind(name, ["value"])? {
        [Some(Value::Str(part))] => Ok(part),
        _ => Err(Fault::new(format_args!("{name}() needs a string"))),
    }
}

/// Python's whitespace: Unicode's and the four separators of ASCII.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn strip<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [chars] = given.bind(name, ["chars"])?;
    let set = match &chars {
        None | Some(Value::None) => None,
        Some(Value::Str(chars)) => Some(chars),
        Some(other) => {
            return Err(Fault::new(format_args!(
                "{name}() needs a string, not '{}'",
                other.kind()
            )));
        }
    };
    let safe = text.safe;
    let mut text = text.read_chars()?;
    match set {
        None => {
            text = if name == "rstrip" {
                text
            } else {
                text.trim_start_matches(is_space)
            };
            text = if name == "lstrip" {
                text
            } else {
                text.trim_end_matches(is_space)
            };
        }
        // The set is searched for every character, and pays every time.
        Some(set) => {
            while name != "rstrip"
                && let Some(c) = text.chars().next()
                && set.read()?.contains(c)
            {
                text = &text[c.len_utf8()..];
            }
            while name != "lstrip"
                && let Some(c) = text.chars().next_back()
                && set.read()?.contains(c)
            {
                text = &text[..text.len() - c.len_utf8()];
            }
        }
    }
    Value::text_of(Buffer::of(budget, text)?, safe)
}

fn split<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    right: bool,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [separator, most] = given.bind("split", ["sep", "maxsplit"])?;
    let most = most
        .as_ref()
        .and_then(Value::as_int)
        .and_then(|most| usize::try_from(most).ok());
    let most = most.unwrap_or(usize::MAX);
    let text = text.read_chars()?;
    let mut parts = Vector::new(budget);
    match separator {
        Some(Value::Str(separator)) if separator.len() == 0 => {
            return Err(Fault::new("empty separator"));
        }
        Some(Value::Str(separator)) => {
            let (separator, pieces) = (separator.read()?, most.saturating_add(1));
            if right {
                for part in text.rsplitn(pieces, separator) {
                    parts.push(Value::str(budget, part)?)?;
                }
            } else {
                for part in text.splitn(pieces, separator) {
                    parts.push(Value::str(budget, part)?)?;
                }
            }
        }
        None | Some(Value::None) if right => rsplit_space(&mut parts, text, most)?,
        None | Some(Value::None) => split_space(&mut parts, text, most)?,
        Some(other) => {
            return Err(Fault::new(format_args!(
                "split() needs a string, not '{}'",
                other.kind()
            )));
        }
    }
    if right {
        parts.reverse();
    }
    Value::list(parts)
}

/// Parts between runs of whitespace. What is left after the last split keeps the whitespace at its
/// end.
fn split_space<'r>(
    parts: &mut Vector<'r, Value<'r>>,
    text: &str,
    most: usize,
) -> Result<(), Fault> {
    let budget = parts.budget();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        match rest.find(is_space) {
            Some(cut) if parts.len() < most => {
                parts.push(Value::str(budget, &rest[..cut])?)?;
                rest = rest[cut..].trim_start_matches(is_space);
            }
            _ => {
                parts.push(Value::str(budget, rest)?)?;
                break;
            }
        }
    }
    Ok(())
}

/// The same from the right, in reverse order.
fn rsplit_space<'r>(
    parts: &mut Vector<'r, Value<'r>>,
    text: &str,
    most: usize,
) -> Result<(), Fault> {
    let budget = parts.budget();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        match rest.rfind(is_space) {
            Some(cut) if parts.len() < most => {
                parts.push(Value::str(
                    budget,
                    rest[cut..].trim_start_matches(is_space),
                )?)?;
                rest = rest[..cut].trim_end_matches(is_space);
            }
            _ => {
                parts.push(Value::str(budget, rest)?)?;
                break;
            }
        }
    }
    Ok(())
}

fn splitlines<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [keep] = given.bind("splitlines", ["keepends"])?;
    let keep = keep.is_some_and(|k| k.truthy());
    let ends = [
        '\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}',
    ];
    let mut lines = Vector::new(budget);
    let mut rest = text.read_chars()?;
    while !rest.is_empty() {
        let Some(end) = rest.find(ends) else {
            lines.push(Value::str(budget, rest)?)?;
            break;
        };
        let after = if rest[end..].starts_with("\r\n") {
            end + 2
        } else {
            end + rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Value::str(budget, &rest[..if keep { after } else { end }])?)?;
        rest = &rest[after..];
    }
    Value::list(lines)
}

fn partition<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let separator = needed(name, given)?;
    let (text, separator) = (text.read_chars()?, separator.read()?);
    if separator.is_empty() {
        return Err(Fault::new("empty separator"));
    }
    let first = name == "partition";
    let found = if first {
        text.split_once(separator)
    } else {
        text.rsplit_once(separator)
    };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if first => [text, "", ""],
        None => ["", "", text],
    };
    let mut out = Vector::with_capacity(budget, 3)?;
    for part in parts {
        out.push(Value::str(budget, part)?)?;
    }
    Value::tuple(out)
}

fn affix<'r>(text: &Text<'r>, name: &str, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let [part] = given.bind(name, ["prefix"])?;
    let hits = |part: &Value<'r>| {
        let Value::Str(part) = part else {
            let kind = part.kind();
            return Err(Fault::new(format_args!(
                "{name}() needs a string or a tuple of strings, not '{kind}'"
            )));
        };
        let part = part.read()?;
        let text = text.unpaid();
        Ok(if name == "startswith" {
            text.starts_with(part)
        } else {
            text.ends_with(part)
        })
    };
    let mut hit = false;
    match &part {
        Some(Value::Tuple(parts)) => {
            for part in parts.read()? {
                hit |= hits(part)?;
            }
        }
        Some(part) => hit = hits(part)?,
        None => {}
    }
    Ok(Value::Bool(hit))
}

fn replace<'r>(budget: &'r Budget, text: &Text<'r>, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let [old, new, count] = given.bind("replace", ["old", "new", "count"])?;
    let (Some(Value::Str(old)), Some(Value::Str(new))) = (old, new) else {
        return Err(Fault::new("replace() needs two strings"));
    };
    replace_text(
        budget,
        text,
        &old,
        &new,
        count.as_ref().and_then(Value::as_int),
    )
}

/// Replaces at most `count` occurrences; all for none or a negative count.
pub(crate) fn replace_text<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    old: &Text<'r>,
    new: &Text<'r>,
    count: Option<i128>,
) -> Result<Value<'r>, Fault> {
    let most = count
        .and_then(|c| usize::try_from(c).ok())
        .unwrap_or(usize::MAX);
    let text = text.read_chars()?;
    let mut out = Buffer::with_capacity(budget, text.len())?;
    let mut done = 0;
    for (at, found) in text.match_indices(old.read()?).take(most) {
        out.push_str(&text[done..at])?;
        out.push_str(new.unpaid())?;
        done = at + found.len();
    }
    out.push_str(&text[done..])?;
    Value::text(out)
}

fn search<'r>(text: &Text<'r>, name: &str, given: &Given<'r>) -> Result<Value<'r>, Fault> {
    let [part, start, end] = given.bind(name, ["sub", "start", "end"])?;
    let Some(Value::Str(part)) = part else {
        return Err(Fault::new(format_args!("{name}() needs a string")));
    };
    let text = text.read_chars()?;
    let len = text.chars().count();
    let bound = |v: &Option<Value<'r>>, default: usize| match v.as_ref().and_then(Value::as_int) {
        Some(i) if i < 0 => usize::try_from(i + len as i128).unwrap_or(0),
        Some(i) => usize::try_from(i).unwrap_or(len).min(len),
        None => default,
    };
    let (start, end) = (bound(&start, 0), bound(&end, len));
    let byte = |chars: usize| {
        text.char_indices()
            .nth(chars)
            .map_or(text.len(), |(i, _)| i)
    };
    let window = if start <= end {
        &text[byte(start)..byte(end)]
    } else {
        ""
    };
    let position = |i: usize| (start + window[..i].chars().count()) as i128;
    let part = part.read()?;
    let found = match name {
        "count" => return Ok(Value::Int(window.matches(part).count() as i128)),
        "find" | "index" => window.find(part),
        _ => window.rfind(part),
    };
    match found {
        Some(i) => Ok(Value::Int(position(i))),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Fault::new("substring not found")),
    }
}

/// The printed items with `separator` between them.
pub(crate) fn join<'r>(
    budget: &'r Budget,
    separator: &str,
    items: &[Value<'r>],
) -> Result<Value<'r>, Fault> {
    let mut out = Buffer::new(budget);
    for (i, item) in items.iter().enumerate() {
        out.push_str(if i > 0 { separator } else { "" })?;
        item.print(&mut out)?;
    }
    Value::text(out)
}

fn justify<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    name: &str,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let [width, fill] = given.bind(name, ["width", "fillchar"])?;
    let width = width
        .as_ref()
        .and_then(Value::as_int)
        .ok_or_else(|| Fault::new("needs a width"))?;
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let fill = match &fill {
        None if name == "zfill" => "0",
        None => " ",
        Some(Value::Str(fill)) if fill.unpaid().chars().take(2).count() == 1 => fill.unpaid(),
        Some(_) => {
            return Err(Fault::new(format_args!(
                "{name}() fills with exactly one character"
            )));
        }
    };
    let text = text.read()?;
    let missing = width.saturating_sub(text.chars().count());
    // Text before the fill, then the fill on both sides of the rest.
    let (head, left, right) = match name {
        "ljust" => ("", 0, missing),
        "rjust" => ("", missing, 0),
        "zfill" => (
            &text[..usize::from(text.starts_with(['-', '+']))],
            missing,
            0,
        ),
        // Python's rule for the odd one out.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            ("", left, missing - left)
        }
    };
    let mut out = Buffer::with_capacity(budget, text.len())?;
    out.push_str(head)?;
    out.repeat(fill, left)?;
    out.push_str(&text[head.len()..])?;
    out.repeat(fill, right)?;
    Value::text(out)
}

/// First letter upper, the rest lower.
pub(crate) fn capitalize<'r>(out: &mut Buffer<'r>, text: &Text<'r>) -> Result<(), Fault> {
    let mut chars = text.read()?.chars();
    let Some(first) = chars.next() else {
        return Ok(());
    };
    out.push_mapped(first.to_uppercase())?;
    out.push_lower(chars.as_str())
}

fn title<'r>(out: &mut Buffer<'r>, text: &Text<'r>) -> Result<(), Fault> {
    let mut inside = false;
    for c in text.read_chars()?.chars() {
        if inside {
            out.push_mapped(c.to_lowercase())?;
        } else {
            out.push_mapped(c.to_uppercase())?;
        }
        inside = c.is_alphabetic();
    }
    Ok(())
}
