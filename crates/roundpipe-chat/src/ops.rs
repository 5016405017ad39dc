//! Operators as Python defines them: arithmetic, membership and slices.

use crate::budget::{Budget, Buffer, Vector};
use crate::error::Fault;
use crate::format::percent;
use crate::parse::Op;
use crate::print::push_escaped;
use crate::value::{Items, Text, Value};

/// `left op right`.
pub(crate) fn binary<'r>(
    budget: &'r Budget,
    op: Op,
    left: &Value<'r>,
    right: &Value<'r>,
) -> Result<Value<'r>, Fault> {
    for side in [left, right] {
        if let Value::Undefined(what) = side {
            return Err(Fault::new(format_args!("{what} is undefined")));
        }
    }
    match (op, left, right) {
        (Op::Add, Value::Str(a), Value::Str(b)) => add_texts(budget, a, b),
        (Op::Add, Value::List(a), Value::List(b)) => Value::list(chain(budget, a, b)?),
        (Op::Add, Value::Tuple(a), Value::Tuple(b)) => Value::tuple(chain(budget, a, b)?),
        (Op::Rem, Value::Str(format), args) => Value::text(percent(budget, format, args)?),
        (Op::Mul, Value::Str(_) | Value::List(_) | Value::Tuple(_), times)
            if times.as_int().is_some() =>
        {
            repeat(budget, left, times)
        }
        (Op::Mul, times, Value::Str(_) | Value::List(_) | Value::Tuple(_))
            if times.as_int().is_some() =>
        {
            repeat(budget, right, times)
        }
        _ => arithmetic(op, left, right),
    }
}

/// A safe text escapes what is not when they are joined.
fn add_texts<'r>(budget: &'r Budget, a: &Text<'r>, b: &Text<'r>) -> Result<Value<'r>, Fault> {
    let safe = a.safe || b.safe;
    let mut out = Buffer::with_capacity(budget, a.len() + b.len())?;
    for text in [a, b] {
        if safe && !text.safe {
            escape(&mut out, text)?;
        } else {
            out.push_str(text.unpaid())?;
        }
    }
    Value::text_of(out, safe)
}

fn chain<'r>(
    budget: &'r Budget,
    a: &Items<'r>,
    b: &Items<'r>,
) -> Result<Vector<'r, Value<'r>>, Fault> {
    let mut out = Vector::with_capacity(budget, a.len() + b.len())?;
    out.extend_from_slice(a.read()?)?;
    out.extend_from_slice(b.read()?)?;
    Ok(out)
}

fn repeat<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    times: &Value<'r>,
) -> Result<Value<'r>, Fault> {
    let times = usize::try_from(times.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
    let all = |items: &Items<'r>| {
        let count = items.len().saturating_mul(times);
        let mut out = Vector::with_capacity(budget, count)?;
        while out.len() < count {
            out.extend_from_slice(items.read()?)?;
        }
        Ok(out)
    };
    match value {
        Value::Str(text) => {
            let mut out = Buffer::new(budget);
            out.repeat(text.unpaid(), times)?;
            Value::text(out)
        }
        Value::List(items) => Value::list(all(items)?),
        Value::Tuple(items) => Value::tuple(all(items)?),
        other => Err(Fault::new(format_args!(
            "'{}' cannot be repeated",
            other.kind()
        ))),
    }
}

/// A number beyond 128 bits.
pub(crate) fn large() -> Fault {
    Fault::new("a number is too large")
}

fn arithmetic<'r>(op: Op, left: &Value<'r>, right: &Value<'r>) -> Result<Value<'r>, Fault> {
    let zero = || Fault::new("division by zero");
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let int = |value: Option<i128>| value.map(Value::Int).ok_or_else(large);
        return match op {
            Op::Add => int(a.checked_add(b)),
            Op::Sub => int(a.checked_sub(b)),
            Op::Mul => int(a.checked_mul(b)),
            Op::Div | Op::FloorDiv | Op::Rem if b == 0 => Err(zero()),
            Op::Div => Ok(Value::Float(a as f64 / b as f64)),
            Op::FloorDiv => int(a.checked_div_euclid(b).map(|_| floor_div(a, b))),
            Op::Rem => int(Some(a.wrapping_sub(floor_div(a, b).wrapping_mul(b)))),
            Op::Pow if b < 0 && a == 0 => Err(zero()),
            Op::Pow if b < 0 => Ok(Value::Float((a as f64).powf(b as f64))),
            Op::Pow => int(u32::try_from(b).ok().and_then(|b| a.checked_pow(b))),
        };
    }
    let (Some(a), Some(b)) = (left.as_float(), right.as_float()) else {
        let (left, right) = (left.kind(), right.kind());
        return Err(Fault::new(format_args!(
            "'{left}' and '{right}' cannot be combined with {op:?}"
        )));
    };
    let value = match op {
        Op::Add => a + b,
        Op::Sub => a - b,
        Op::Mul => a * b,
        Op::Div | Op::FloorDiv | Op::Rem if b == 0.0 => return Err(zero()),
        Op::Div => a / b,
        Op::FloorDiv => (a / b).floor(),
        Op::Rem => {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
                rest + b
            } else {
                rest
            }
        }
        Op::Pow => a.powf(b),
    };
    Ok(Value::Float(value))
}

fn floor_div(a: i128, b: i128) -> i128 {
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) {
        quotient - 1
    } else {
        quotient
    }
}

/// `item in container`.
pub(crate) fn contains<'r>(
    budget: &'r Budget,
    container: &Value<'r>,
    item: &Value<'r>,
) -> Result<bool, Fault> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => Ok(text.read_chars()?.contains(part.read()?)),
            other => Err(Fault::new(format_args!(
                "'in' of a string needs a string, not '{}'",
                other.kind()
            ))),
        },
        Value::Dict(dict) => Ok(dict.find(item)?.is_some()),
        other => {
            for value in other.walk(budget)?.read()? {
                if value.equals(item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// `value[start:stop:step]`.
pub(crate) fn slice<'r>(
    budget: &'r Budget,
    value: &Value<'r>,
    parts: [Value<'r>; 3],
) -> Result<Value<'r>, Fault> {
    let mut bounds = [None; 3];
    for (bound, part) in bounds.iter_mut().zip(&parts) {
        *bound = match part {
            Value::None => None,
            other => match other.as_int() {
                Some(i) => Some(i.clamp(i64::MIN.into(), i64::MAX.into()) as i64),
                None => return Err(Fault::new("slice indices must be integers or none")),
            },
        };
    }
    let sliced = |items: &Items<'r>| {
        let mut out = Vector::new(budget);
        for at in Picked::new(items.len(), bounds)? {
            if let Some(item) = items.get(at) {
                out.push(item.clone())?;
            }
        }
        Ok(out)
    };
    match value {
        Value::Str(text) => Value::text(slice_text(budget, text, bounds)?),
        Value::List(items) => Value::list(sliced(items)?),
        Value::Tuple(items) => Value::tuple(sliced(items)?),
        Value::Undefined(what) => Err(Fault::new(format_args!("{what} is undefined"))),
        other => Err(Fault::new(format_args!(
            "'{}' cannot be sliced",
            other.kind()
        ))),
    }
}

fn slice_text<'r>(
    budget: &'r Budget,
    text: &Text<'r>,
    bounds: [Option<i64>; 3],
) -> Result<Buffer<'r>, Fault> {
    let text = text.read_chars()?;
    let picked = Picked::new(text.chars().count(), bounds)?;
    if picked.step == 1 {
        let byte = |at: i64| {
            text.char_indices()
                .nth(at as usize)
                .map_or(text.len(), |(i, _)| i)
        };
        let range = if picked.at < picked.stop {
            byte(picked.at)..byte(picked.stop)
        } else {
            0..0
        };
        return Buffer::of(budget, &text[range]);
    }
    let mut chars = Vector::with_capacity(budget, text.len())?;
    for c in text.chars() {
        chars.push(c)?;
    }
    let mut out = Buffer::new(budget);
    for at in picked {
        out.push(chars[at])?;
    }
    Ok(out)
}

/// The indices of a slice, in its order.
struct Picked {
    at: i64,
    stop: i64,
    step: i64,
}

impl Picked {
    fn new(len: usize, [start, stop, step]: [Option<i64>; 3]) -> Result<Self, Fault> {
        let step = step.unwrap_or(1);
        if step == 0 {
            return Err(Fault::new("slice step cannot be zero"));
        }
        let len = len as i64;
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let clamp = |at: i64| {
            if at < 0 {
                (at.saturating_add(len)).max(low)
            } else {
                at.min(high)
            }
        };
        let at = start.map_or(if step > 0 { low } else { high }, clamp);
        let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
        Ok(Self { at, stop, step })
    }
}

impl Iterator for Picked {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let more = if self.step > 0 {
            self.at < self.stop
        } else {
            self.at > self.stop
        };
        let at = self.at;
        self.at = self.at.saturating_add(self.step);
        more.then_some(at as usize)
    }
}

/// HTML escaping as markupsafe does it, appended to `out`.
pub(crate) fn escape<'r>(out: &mut Buffer<'r>, text: &Text<'r>) -> Result<(), Fault> {
    let plain = |c: char| !matches!(c, '&' | '<' | '>' | '\'' | '"');
    push_escaped(out, text.read_chars()?, plain, |out, c| {
        out.push_str(match c {
            '&' => "&amp;",
            '>' => "&gt;",
            '<' => "&lt;",
            '\'' => "&#39;",
            _ => "&#34;",
        })
    })
}
