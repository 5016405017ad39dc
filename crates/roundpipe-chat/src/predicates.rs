//! Comparisons, and the tests behind `is`.

use std::cmp::Ordering;

use crate::budget::Budget;
use crate::error::Fault;
use crate::ops;
use crate::parse::{Cmp, Op};
use crate::value::Value;

/// `left cmp right`.
pub(crate) fn compare<'r>(
    budget: &'r Budget,
    cmp: Cmp,
    left: &Value<'r>,
    right: &Value<'r>,
) -> Result<bool, Fault> {
    let order = || {
        for side in [left, right] {
            if let Value::Undefined(what) = side {
                return Err(Fault::new(format_args!("{what} is undefined")));
            }
        }
        left.order(right)
    };
    Ok(match cmp {
        Cmp::Eq => left.equals(right)?,
        Cmp::Ne => !left.equals(right)?,
        Cmp::Lt => order()? == Some(Ordering::Less),
        Cmp::Le => matches!(order()?, Some(Ordering::Less | Ordering::Equal)),
        Cmp::Gt => order()? == Some(Ordering::Greater),
        Cmp::Ge => matches!(order()?, Some(Ordering::Greater | Ordering::Equal)),
        Cmp::In => ops::contains(budget, right, left)?,
        Cmp::NotIn => !ops::contains(budget, right, left)?,
    })
}

/// `value is name(args)`.
pub(crate) fn check<'r>(
    budget: &'r Budget,
    name: &str,
    value: &Value<'r>,
    args: &[Value<'r>],
) -> Result<bool, Fault> {
    let needs_one = || Fault::new(format_args!("test '{name}' needs one argument"));
    if let Some(cmp) = comparison(name) {
        let [other] = args else {
            return Err(needs_one());
        };
        return compare(budget, cmp, value, other);
    }
    if matches!(name, "divisibleby" | "sameas") {
        let [other] = args else {
            return Err(needs_one());
        };
        return match name {
            "divisibleby" => ops::binary(budget, Op::Rem, value, other)?.equals(&Value::Int(0)),
            _ => Ok(value.kind() == other.kind() && value.equals(other)?),
        };
    }
    if !args.is_empty() {
        return Err(Fault::new(format_args!("test '{name}' takes no argument")));
    }
    let parity =
        |odd: i128| ops::binary(budget, Op::Rem, value, &Value::Int(2))?.equals(&Value::Int(odd));
    let cased = |other: fn(char) -> bool, this: fn(char) -> bool| {
        let text = value.printed(budget)?;
        let text = text.read_chars()?;
        Ok(!text.chars().any(other) && text.chars().any(this))
    };
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined(_)),
        "undefined" => matches!(value, Value::Undefined(_)),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => has_len(value) && !matches!(value, Value::View(..) | Value::Loop(_)),
        "iterable" => has_len(value) || matches!(value, Value::Iter(_)),
        "callable" => {
            matches!(
                value,
                Value::Macro(_) | Value::Function(_) | Value::Method(_) | Value::Loop(_)
            )
        }
        "escaped" => matches!(value, Value::Str(text) if text.safe),
        "odd" => return parity(1),
        "even" => return parity(0),
        "lower" => return cased(char::is_uppercase, char::is_lowercase),
        "upper" => return cased(char::is_lowercase, char::is_uppercase),
        "filter" => crate::filters::NAMES.contains(&value.printed(budget)?.unpaid()),
        other => return Err(Fault::new(format_args!("no test named '{other}'"))),
    })
}

fn has_len(value: &Value<'_>) -> bool {
    matches!(value, Value::Undefined(_) | Value::Str(_)) || value.count().is_some()
}

fn comparison(name: &str) -> Option<Cmp> {
    Some(match name {
        "eq" | "equalto" | "==" => Cmp::Eq,
        "ne" | "!=" => Cmp::Ne,
        "lt" | "lessthan" | "<" => Cmp::Lt,
        "le" | "<=" => Cmp::Le,
        "gt" | "greaterthan" | ">" => Cmp::Gt,
        "ge" | ">=" => Cmp::Ge,
        "in" => Cmp::In,
        _ => return None,
    })
}
