//! Operators as Python defines them: arithmetic, membership, slices and `%` formatting.
//!
//! Refuses results that would be larger than the render's memory before making them.

use super::parse::Op;
use super::value::Value;
use super::{Fault, limits::reserve};

/// `left op right`.
pub(super) fn binary(op: Op, left: &Value, right: &Value) -> Result<Value, Fault> {
    for side in [left, right] {
        if let Value::Undefined(what) = side {
            return Err(Fault::new(format!("{what} is undefined")));
        }
    }
    match (op, left, right) {
        (Op::Add, Value::Str(a), Value::Str(b)) => {
            reserve(a.len() + b.len())?;
            if a.safe || b.safe {
                let part =
                    |text: &super::value::Text| if text.safe { text.to_string() } else { escape(text) };
                return Ok(Value::text(part(a) + &part(b), true));
            }
            Ok(Value::str([&***a, &***b].concat()))
        }
        (Op::Add, Value::List(a), Value::List(b)) => {
            reserve(32 * (a.len() + b.len()))?;
            Ok(Value::list([&***a, &***b].concat()))
        }
        (Op::Add, Value::Tuple(a), Value::Tuple(b)) => {
            reserve(32 * (a.len() + b.len()))?;
            Ok(Value::tuple([&***a, &***b].concat()))
        }
        (Op::Rem, Value::Str(format), args) => Ok(Value::str(percent(format, args)?)),
        (Op::Mul, Value::Str(_) | Value::List(_) | Value::Tuple(_), times) if times.as_int().is_some() => {
            repeat(left, times)
        }
        (Op::Mul, times, Value::Str(_) | Value::List(_) | Value::Tuple(_)) if times.as_int().is_some() => {
            repeat(right, times)
        }
        _ => arithmetic(op, left, right),
    }
}

fn repeat(value: &Value, times: &Value) -> Result<Value, Fault> {
    let times = usize::try_from(times.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
    Ok(match value {
        Value::Str(text) => {
            reserve(text.len().saturating_mul(times))?;
            Value::str(text.repeat(times))
        }
        Value::List(items) => {
            reserve(items.len().saturating_mul(times).saturating_mul(32))?;
            Value::list(std::iter::repeat_n(&items[..], times).flatten().cloned().collect())
        }
        Value::Tuple(items) => {
            reserve(items.len().saturating_mul(times).saturating_mul(32))?;
            Value::tuple(std::iter::repeat_n(&items[..], times).flatten().cloned().collect())
        }
        other => return Err(Fault::new(format!("'{}' cannot be repeated", other.kind()))),
    })
}

fn arithmetic(op: Op, left: &Value, right: &Value) -> Result<Value, Fault> {
    let zero = || Fault::new("division by zero");
    let large = || Fault::new("a number is too large");
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
        return Err(Fault::new(format!("'{left}' and '{right}' cannot be combined with {op:?}")));
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
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
        }
        Op::Pow => a.powf(b),
    };
    Ok(Value::Float(value))
}

fn floor_div(a: i128, b: i128) -> i128 {
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// `item in container`.
pub(super) fn contains(container: &Value, item: &Value) -> Result<bool, Fault> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => Ok(text.contains(&***part)),
            other => Err(Fault::new(format!("'in' of a string needs a string, not '{}'", other.kind()))),
        },
        Value::Dict(dict) => Ok(dict.find(item).is_some()),
        other => Ok(other.walk()?.iter().any(|v| v.equals(item))),
    }
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, parts: [Value; 3]) -> Result<Value, Fault> {
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
    let picked = |len: usize| picked_indices(len, bounds);
    Ok(match value {
        Value::Str(text) => {
            reserve(text.len() * 4)?;
            let chars: Vec<char> = text.chars().collect();
            Value::str(picked(chars.len())?.into_iter().map(|i| chars[i]).collect::<String>())
        }
        Value::List(items) => {
            Value::list(picked(items.len())?.into_iter().map(|i| items[i].clone()).collect())
        }
        Value::Tuple(items) => {
            Value::tuple(picked(items.len())?.into_iter().map(|i| items[i].clone()).collect())
        }
        Value::Undefined(what) => return Err(Fault::new(format!("{what} is undefined"))),
        other => return Err(Fault::new(format!("'{}' cannot be sliced", other.kind()))),
    })
}

fn picked_indices(len: usize, [start, stop, step]: [Option<i64>; 3]) -> Result<Vec<usize>, Fault> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Fault::new("slice step cannot be zero"));
    }
    let len = len as i64;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |at: i64| if at < 0 { (at.saturating_add(len)).max(low) } else { at.min(high) };
    let mut at = start.map_or(if step > 0 { low } else { high }, clamp);
    let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
    let mut picked = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        picked.push(at as usize);
        at = at.saturating_add(step);
    }
    Ok(picked)
}

/// HTML escaping as markupsafe does it.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('>', "&gt;")
        .replace('<', "&lt;")
        .replace('\'', "&#39;")
        .replace('"', "&#34;")
}

/// How one value is laid out by `%` and `str.format`.
#[derive(Debug, Default, Clone)]
pub(super) struct Spec {
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
    pub(super) fn parse(text: &str) -> Result<Self, Fault> {
        let mut spec = Self::default();
        let mut chars: Vec<char> = text.chars().collect();
        let is_align = |c: Option<&char>| c.is_some_and(|c| "<>^=".contains(*c));
        if is_align(chars.get(1)) {
            spec.fill = Some(chars.remove(0));
        }
        if is_align(chars.first()) {
            spec.align = Some(chars.remove(0));
        }
        let mut chars = chars.into_iter().peekable();
        while let Some(flag) = chars.next_if(|c| "+- #".contains(*c)) {
            spec.flag(flag);
        }
        spec.zero = chars.next_if_eq(&'0').is_some();
        spec.width = digits(&mut chars).unwrap_or(0);
        spec.comma = chars.next_if_eq(&',').is_some();
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(digits(&mut chars).unwrap_or(0));
        }
        spec.kind = chars.next().unwrap_or('\0');
        if chars.next().is_some() {
            return Err(Fault::new(format!("the format '{text}' is not understood")));
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

    /// Lays out a value.
    pub(super) fn apply(&self, value: &Value) -> Result<String, Fault> {
        reserve(self.width.saturating_add(self.precision.unwrap_or(0)))?;
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
        let body = match kind {
            's' => {
                let text = value.print();
                match self.precision {
                    Some(most) if !number => text.chars().take(most).collect(),
                    _ => text,
                }
            }
            'r' => {
                let mut text = String::new();
                value.repr(&mut text);
                text
            }
            'c' => char_of(value)?,
            _ => self.number(kind, value)?,
        };
        Ok(self.pad(body, number && !matches!(kind, 'r' | 'c')))
    }

    fn number(&self, kind: char, value: &Value) -> Result<String, Fault> {
        let wrong = || Fault::new(format!("format '{kind}' needs a number, not '{}'", value.kind()));
        let text = match kind {
            'd' | 'i' | 'u' => {
                let int = match value {
                    Value::Float(f) => *f as i128,
                    other => other.as_int().ok_or_else(wrong)?,
                };
                int.unsigned_abs().to_string()
            }
            'x' | 'X' | 'o' | 'b' => {
                let int = value.as_int().ok_or_else(wrong)?.unsigned_abs();
                let (prefix, text) = match kind {
                    'x' => ("0x", format!("{int:x}")),
                    'X' => ("0X", format!("{int:X}")),
                    'o' => ("0o", format!("{int:o}")),
                    _ => ("0b", format!("{int:b}")),
                };
                if self.alternate { format!("{prefix}{text}") } else { text }
            }
            'f' | 'F' => {
                let precision = self.precision.unwrap_or(6).min(400);
                format!("{:.precision$}", value.as_float().ok_or_else(wrong)?.abs())
            }
            '%' => {
                let precision = self.precision.unwrap_or(6).min(400);
                format!("{:.precision$}%", value.as_float().ok_or_else(wrong)?.abs() * 100.0)
            }
            'e' | 'E' => {
                exponent(value.as_float().ok_or_else(wrong)?.abs(), self.precision.unwrap_or(6), kind)
            }
            'g' | 'G' => general(value.as_float().ok_or_else(wrong)?.abs(), self.precision.unwrap_or(6)),
            other => return Err(Fault::new(format!("the format character '{other}' is not understood"))),
        };
        let text = if self.comma { grouped(&text) } else { text };
        let negative = value.as_float().is_some_and(|f| f < 0.0);
        let sign = match () {
            () if negative => "-",
            () if self.plus => "+",
            () if self.space => " ",
            () => "",
        };
        Ok(format!("{sign}{text}"))
    }

    fn pad(&self, body: String, number: bool) -> String {
        let missing = self.width.saturating_sub(body.chars().count());
        if missing == 0 {
            return body;
        }
        let zero = self.zero && number && self.align.is_none();
        let fill = self.fill.unwrap_or(if zero { '0' } else { ' ' }).to_string();
        let align = self.align.unwrap_or(if zero {
            '='
        } else if number {
            '>'
        } else {
            '<'
        });
        match align {
            '<' => body + &fill.repeat(missing),
            '^' => fill.repeat(missing / 2) + &body + &fill.repeat(missing - missing / 2),
            '=' => {
                let sign = body.len() - body.trim_start_matches(['-', '+', ' ']).len();
                [&body[..sign], &fill.repeat(missing), &body[sign..]].concat()
            }
            _ => fill.repeat(missing) + &body,
        }
    }
}

fn digits(chars: &mut std::iter::Peekable<impl Iterator<Item = char>>) -> Option<usize> {
    let mut value: Option<usize> = None;
    while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
        chars.next();
        value = Some(value.unwrap_or(0).saturating_mul(10).saturating_add(digit as usize));
    }
    value
}

fn char_of(value: &Value) -> Result<String, Fault> {
    match value {
        Value::Str(text) if text.chars().count() == 1 => Ok(text.to_string()),
        other => other
            .as_int()
            .and_then(|i| u32::try_from(i).ok())
            .and_then(char::from_u32)
            .map(String::from)
            .ok_or_else(|| Fault::new("format 'c' needs one character")),
    }
}

fn exponent(value: f64, precision: usize, kind: char) -> String {
    let precision = precision.min(400);
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
    format!("{digits}{kind}{sign}{exponent:0>2}")
}

fn general(value: f64, precision: usize) -> String {
    let precision = precision.clamp(1, 400);
    let text = format!("{value:.*e}", precision - 1);
    let power: i64 = text.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let trim = |text: String| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
    };
    if power < -4 || power >= precision as i64 {
        let text = exponent(value, precision - 1, 'e');
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
        return format!("{}e{exponent}", trim(digits.to_string()));
    }
    trim(format!("{value:.*}", (precision as i64 - 1 - power).max(0) as usize))
}

/// Commas between groups of three digits of the whole part.
fn grouped(text: &str) -> String {
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::new();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out + rest
}

/// Python's `format % args`.
pub(super) fn percent(format: &str, args: &Value) -> Result<String, Fault> {
    let list: Vec<Value> = match args {
        Value::Tuple(items) => items.to_vec(),
        other => vec![other.clone()],
    };
    let mut next = 0;
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            let key: String = chars.by_ref().take_while(|c| *c != ')').collect();
            let Value::Dict(dict) = args else { return Err(Fault::new("format requires a mapping")) };
            let found = dict.find_str(&key).cloned();
            named = Some(found.ok_or_else(|| Fault::new(format!("the mapping has no '{key}'")))?);
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "+- #0".contains(*c)) {
            spec.flag(flag);
        }
        spec.width = digits(&mut chars).unwrap_or(0);
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(digits(&mut chars).unwrap_or(0));
        }
        spec.kind = chars.next().ok_or_else(|| Fault::new("incomplete format"))?;
        if spec.kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => {
                next += 1;
                list.get(next - 1).cloned().ok_or_else(|| Fault::new("not enough arguments for format"))?
            }
        };
        // '%' pads to the right side unless told otherwise, strings too.
        spec.align = spec.align.or((!spec.zero).then_some('>'));
        out.push_str(&spec.apply(&value)?);
        reserve(out.len())?;
    }
    let all = next == list.len() || matches!(args, Value::Dict(_) | Value::List(_)) && next <= 1;
    if all { Ok(out) } else { Err(Fault::new("not all arguments converted during string formatting")) }
}
