//! Layout of values: Python's `format % args` and `str.format`.

use crate::budget::{Budget, Buffer};
use crate::error::Fault;
use crate::eval::Given;
use crate::methods::{attribute, item};
use crate::value::{Text, Value};

/// Most digits after the point that are written; a float has no more to say.
const MAX_PRECISION: usize = 400;

/// How one value is laid out.
#[derive(Debug, Default, Clone)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    comma: bool,
    precision: Option<usize>,
    kind: char,
}

impl Spec {
    /// Reads the part after ':' of a replacement field.
    fn parse(text: &str) -> Result<Self, Fault> {
        let mut spec = Self::default();
        let is_align = |c: &char| "<>^=".contains(*c);
        let mut rest = text;
        if text.chars().nth(1).filter(is_align).is_some() {
            spec.fill = take(&mut rest, |_| true);
        }
        spec.align = take(&mut rest, |c| is_align(&c));
        while let Some(flag) = take(&mut rest, |c| "+- #".contains(c)) {
            spec.flag(flag);
        }
        spec.zero = take(&mut rest, |c| c == '0').is_some();
        spec.width = digits(&mut rest).unwrap_or(0);
        spec.comma = take(&mut rest, |c| c == ',').is_some();
        if take(&mut rest, |c| c == '.').is_some() {
            spec.precision = Some(digits(&mut rest).unwrap_or(0));
        }
        spec.kind = take(&mut rest, |_| true).unwrap_or('\0');
        if !rest.is_empty() {
            return Err(Fault::new(format_args!(
                "the format '{text}' is not understood"
            )));
        }
        Ok(spec)
    }

    fn flag(&mut self, flag: char) {
        match flag {
            '+' => self.plus = true,
            ' ' => self.space = true,
            '#' => self.alternate = true,
            '0' => self.zero = true,
            '-' => self.align = Some('<'),
            _ => {}
        }
    }

    /// Lays out a value at the end of `out`.
    fn apply<'r>(&self, out: &mut Buffer<'r>, value: &Value<'r>) -> Result<(), Fault> {
        let number = value.as_float().is_some();
        let kind = match self.kind {
            '\0' if number && !matches!(value, Value::Bool(_)) => match value {
                Value::Int(_) => 'd',
                _ if self.precision.is_some() => 'g',
                _ => 's',
            },
            '\0' => 's',
            kind => kind,
        };
        let mut body = Buffer::new(out.budget());
        match kind {
            's' => match self.precision {
                Some(most) if !number => {
                    let text = value.printed(out.budget())?;
                    let text = text.read()?;
                    let end = text.char_indices().nth(most).map_or(text.len(), |(i, _)| i);
                    body.push_str(&text[..end])?;
                }
                _ => value.print(&mut body)?,
            },
            'r' => value.repr(&mut body)?,
            'c' => body.push(char_of(value)?)?,
            _ => self.number(&mut body, kind, value)?,
        }
        self.pad(out, body.as_str(), number && !matches!(kind, 'r' | 'c'))
    }

    fn number<'r>(&self, out: &mut Buffer<'r>, kind: char, value: &Value<'r>) -> Result<(), Fault> {
        let wrong = || {
            Fault::new(format_args!(
                "format '{kind}' needs a number, not '{}'",
                value.kind()
            ))
        };
        let float = || value.as_float().map(f64::abs).ok_or_else(wrong);
        let precision = self.precision.unwrap_or(6).min(MAX_PRECISION);
        let mut text = Buffer::new(out.budget());
        match kind {
            'd' | 'i' | 'u' => {
                let int = match value {
                    Value::Float(f) => *f as i128,
                    other => other.as_int().ok_or_else(wrong)?,
                };
                write!(text, "{}", int.unsigned_abs())?;
            }
            'x' | 'X' | 'o' | 'b' => {
                let int = value.as_int().ok_or_else(wrong)?.unsigned_abs();
                match (kind, self.alternate) {
                    ('x', false) => write!(text, "{int:x}")?,
                    ('x', true) => write!(text, "0x{int:x}")?,
                    ('X', false) => write!(text, "{int:X}")?,
                    ('X', true) => write!(text, "0X{int:X}")?,
                    ('o', false) => write!(text, "{int:o}")?,
                    ('o', true) => write!(text, "0o{int:o}")?,
                    (_, false) => write!(text, "{int:b}")?,
                    (_, true) => write!(text, "0b{int:b}")?,
                }
            }
            'f' | 'F' => write!(text, "{:.precision$}", float()?)?,
            '%' => write!(text, "{:.precision$}%", float()? * 100.0)?,
            'e' | 'E' => exponent(&mut text, float()?, precision, kind)?,
            'g' | 'G' => general(&mut text, float()?, precision)?,
            other => {
                return Err(Fault::new(format_args!(
                    "the format character '{other}' is not understood"
                )));
            }
        }
        let negative = value.as_float().is_some_and(|f| f < 0.0);
        out.push_str(match () {
            () if negative => "-",
            () if self.plus => "+",
            () if self.space => " ",
            () => "",
        })?;
        if self.comma {
            grouped(out, text.as_str())
        } else {
            out.push_str(text.as_str())
        }
    }

    fn pad(&self, out: &mut Buffer<'_>, body: &str, number: bool) -> Result<(), Fault> {
        out.budget().pass(body.len())?;
        let missing = self.width.saturating_sub(body.chars().count());
        let zero = self.zero && number && self.align.is_none();
        let fill = self.fill.unwrap_or(if zero { '0' } else { ' ' });
        let mut bytes = [0; 4];
        let fill: &str = fill.encode_utf8(&mut bytes);
        let align = self.align.unwrap_or(if zero {
            '='
        } else if number {
            '>'
        } else {
            '<'
        });
        let (left, right) = match align {
            '<' => (0, missing),
            '^' => (missing / 2, missing - missing / 2),
            '=' => {
                let sign = body.len() - body.trim_start_matches(['-', '+', ' ']).len();
                out.push_str(&body[..sign])?;
                out.repeat(fill, missing)?;
                return out.push_str(&body[sign..]);
            }
            _ => (missing, 0),
        };
        out.repeat(fill, left)?;
        out.push_str(body)?;
        out.repeat(fill, right)
    }
}

/// Takes the next character if it is wanted.
fn take(rest: &mut &str, wanted: impl Fn(char) -> bool) -> Option<char> {
    let c = rest.chars().next().filter(|c| wanted(*c))?;
    *rest = &rest[c.len_utf8()..];
    Some(c)
}

fn digits(rest: &mut &str) -> Option<usize> {
    let mut value: Option<usize> = None;
    while let Some(digit) = take(rest, |c| c.is_ascii_digit()).and_then(|c| c.to_digit(10)) {
        value = Some(
            value
                .unwrap_or(0)
                .saturating_mul(10)
                .saturating_add(digit as usize),
        );
    }
    value
}

fn char_of(value: &Value<'_>) -> Result<char, Fault> {
    let wrong = || Fault::new("format 'c' needs one character");
    if let Value::Str(text) = value {
        let mut chars = text.unpaid().chars();
        return chars
            .next()
            .filter(|_| chars.next().is_none())
            .ok_or_else(wrong);
    }
    let code = value.as_int().and_then(|i| u32::try_from(i).ok());
    code.and_then(char::from_u32).ok_or_else(wrong)
}

fn exponent(out: &mut Buffer<'_>, value: f64, precision: usize, kind: char) -> Result<(), Fault> {
    let mut text = Buffer::new(out.budget());
    write!(text, "{value:.precision$e}")?;
    let (digits, power) = split_exponent(text.as_str());
    write_exponent(out, digits, kind, power)
}

/// Digits and exponent of what Rust writes for `{:e}`.
fn split_exponent(text: &str) -> (&str, &str) {
    text.split_once('e').unwrap_or((text, "0"))
}

/// An exponent as Python writes it: with a sign and two digits.
fn write_exponent(
    out: &mut Buffer<'_>,
    digits: &str,
    kind: char,
    power: &str,
) -> Result<(), Fault> {
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |e| ('-', e));
    write!(out, "{digits}{kind}{sign}{power:0>2}")
}

fn general(out: &mut Buffer<'_>, value: f64, precision: usize) -> Result<(), Fault> {
    let precision = precision.max(1);
    let mut text = Buffer::new(out.budget());
    write!(text, "{value:.*e}", precision - 1)?;
    let (digits, power) = split_exponent(text.as_str());
    let power_of_ten: i64 = power.parse().unwrap_or(0);
    if power_of_ten < -4 || power_of_ten >= precision as i64 {
        return write_exponent(out, without_zeros(digits), 'e', power);
    }
    let mut plain = Buffer::new(out.budget());
    write!(
        plain,
        "{value:.*}",
        (precision as i64 - 1 - power_of_ten).max(0) as usize
    )?;
    out.push_str(without_zeros(plain.as_str()))
}

fn without_zeros(text: &str) -> &str {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        text
    }
}

/// Commas between groups of three digits of the whole part.
fn grouped(out: &mut Buffer<'_>, text: &str) -> Result<(), Fault> {
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',')?;
        }
        out.push(c)?;
    }
    out.push_str(rest)
}

/// Python's `format % args`.
pub(crate) fn percent<'r>(
    budget: &'r Budget,
    format: &Text<'r>,
    args: &Value<'r>,
) -> Result<Buffer<'r>, Fault> {
    let count = if let Value::Tuple(items) = args {
        items.len()
    } else {
        1
    };
    let mut next = 0;
    let mut out = Buffer::new(budget);
    let mut rest = format.read_chars()?;
    while let Some(at) = rest.find('%') {
        budget.step()?;
        out.push_str(&rest[..at])?;
        let (spec, named, tail) = directive(&rest[at + 1..], args)?;
        rest = tail;
        if spec.kind == '%' {
            out.push('%')?;
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => {
                let value = match args {
                    Value::Tuple(items) => items.get(next).cloned(),
                    other => Some(other.clone()).filter(|_| next == 0),
                };
                next += 1;
                value.ok_or_else(|| Fault::new("not enough arguments for format"))?
            }
        };
        spec.apply(&mut out, &value)?;
    }
    out.push_str(rest)?;
    let all = next == count || matches!(args, Value::Dict(_) | Value::List(_)) && next <= 1;
    if all {
        Ok(out)
    } else {
        Err(Fault::new(
            "not all arguments converted during string formatting",
        ))
    }
}

/// What stands behind a '%': its layout, its value if it is named, and the rest of the format.
fn directive<'f, 'r>(
    format: &'f str,
    args: &Value<'r>,
) -> Result<(Spec, Option<Value<'r>>, &'f str), Fault> {
    let mut rest = format;
    let mut named = None;
    if let Some(tail) = rest.strip_prefix('(') {
        let (key, tail) = tail.split_once(')').unwrap_or((tail, ""));
        let Value::Dict(dict) = args else {
            return Err(Fault::new("format requires a mapping"));
        };
        let found = dict.find_str(key)?.cloned();
        named = Some(found.ok_or_else(|| Fault::new(format_args!("the mapping has no '{key}'")))?);
        rest = tail;
    }
    let mut spec = Spec::default();
    while let Some(flag) = take(&mut rest, |c| "+- #0".contains(c)) {
        spec.flag(flag);
    }
    spec.width = digits(&mut rest).unwrap_or(0);
    if take(&mut rest, |c| c == '.').is_some() {
        spec.precision = Some(digits(&mut rest).unwrap_or(0));
    }
    spec.kind = take(&mut rest, |_| true).ok_or_else(|| Fault::new("incomplete format"))?;
    // '%' pads to the right side unless told otherwise, strings too.
    spec.align = spec.align.or((!spec.zero).then_some('>'));
    Ok((spec, named, rest))
}

/// Python's `str.format`: `{}`, `{0}`, `{name}`, attributes, `!r` and a layout after ':'.
pub(crate) fn braces<'r>(
    budget: &'r Budget,
    format: &Text<'r>,
    given: &Given<'r>,
) -> Result<Buffer<'r>, Fault> {
    let mut out = Buffer::new(budget);
    let mut next = 0;
    let mut manual = false;
    let mut automatic = false;
    let mut rest = format.read_chars()?;
    while let Some(at) = rest.find(['{', '}']) {
        budget.step()?;
        out.push_str(&rest[..at])?;
        let doubled = rest[at..].starts_with("{{") || rest[at..].starts_with("}}");
        if doubled {
            out.push_str(&rest[at..=at])?;
            rest = &rest[at + 2..];
            continue;
        }
        let close = rest[at..]
            .find('}')
            .map(|i| at + i)
            .filter(|_| rest[at..].starts_with('{'));
        let Some(close) = close else {
            return Err(Fault::new("format(): a brace is not balanced"));
        };
        let inner = &rest[at + 1..close];
        let (name, spec) = inner.split_once(':').unwrap_or((inner, ""));
        let (name, conversion) = name.split_once('!').unwrap_or((name, ""));
        manual |= name.starts_with(|c: char| c.is_ascii_digit());
        automatic |= name.is_empty() || name.starts_with(['.', '[']);
        if manual && automatic {
            return Err(Fault::new(
                "format(): numbered and unnumbered fields cannot be mixed",
            ));
        }
        let mut value = field(budget, name, &mut next, given)?;
        if conversion == "r" {
            let mut text = Buffer::new(budget);
            value.repr(&mut text)?;
            value = Value::text(text)?;
        } else if conversion == "s" {
            // A copy, since a safe text would stay safe.
            let mut text = Buffer::new(budget);
            value.print(&mut text)?;
            value = Value::text(text)?;
        }
        Spec::parse(spec)?.apply(&mut out, &value)?;
        rest = &rest[close + 1..];
    }
    out.push_str(rest)?;
    Ok(out)
}

/// The value of a replacement field.
fn field<'r>(
    budget: &'r Budget,
    name: &str,
    next: &mut usize,
    given: &Given<'r>,
) -> Result<Value<'r>, Fault> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let index = if first.is_empty() {
        *next += 1;
        Some(*next - 1)
    } else {
        first.parse().ok()
    };
    let found = match index {
        Some(index) => given.positional.get(index).cloned(),
        None => given.find(budget, first)?,
    };
    let mut value =
        found.ok_or_else(|| Fault::new(format_args!("format(): no argument for '{{{name}}}'")))?;
    while !path.is_empty() {
        if let Some(tail) = path.strip_prefix('.') {
            let end = tail.find(['.', '[']).unwrap_or(tail.len());
            value = attribute(budget, &value, &tail[..end])?;
            path = &tail[end..];
        } else {
            let tail = path.strip_prefix('[').unwrap_or(path);
            let Some(end) = tail.find(']') else {
                return Err(Fault::new("format(): ']' is missing"));
            };
            let key = match tail[..end].parse() {
                Ok(index) => Value::Int(index),
                Err(_) => Value::str(budget, &tail[..end])?,
            };
            value = item(budget, &value, &key)?;
            path = &tail[end + 1..];
        }
    }
    Ok(value)
}
