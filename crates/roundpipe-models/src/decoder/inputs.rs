//! What a model takes: the names it knows, checked before its first layer.
//!
//! An input that no layer reads would train something other than the caller meant, so a name that is
//! not known is refused. The map between the other layers is our own and not checked.

use roundpipe::{TensorError, TensorResult, Tree};

use super::Flow;

const OP: &str = "model";

/// All names, as errors list them. A map of `past` may also be spread into its entries.
const KNOWN: [&str; 8] = [
    "ids",
    "labels",
    "weight",
    "positions",
    "lens",
    "cache",
    "past",
    "keep",
];

/// The inputs of a call in the names of the map between layers, or one line with what is wrong.
pub(super) fn read(mut flow: Flow) -> TensorResult<Flow> {
    // `None` is how Python leaves an argument out.
    flow.retain(|_, value| !matches!(value, Tree::None));
    check_names(&flow)?;
    if let Some(Tree::Map(last)) = flow.remove("past") {
        flow.extend(last.into_iter().filter(|(name, _)| is_past(name)));
    }
    Ok(flow)
}

fn check_names(flow: &Flow) -> TensorResult<()> {
    let is_known = |name: &str| KNOWN.contains(&name) || is_past(name);
    if let Some(name) = flow.keys().find(|name| !is_known(name)) {
        let known = quoted(KNOWN);
        let what = format!("no input is called `{name}`; a model takes {known}");
        return Err(TensorError::invalid(OP, what));
    }
    if !flow.contains_key("ids") {
        return Err(TensorError::invalid(
            OP,
            format!("there is no input `ids`, only {}", given(flow)),
        ));
    }
    Ok(())
}

/// Whether this is the keys or values of a block.
fn is_past(name: &str) -> bool {
    name.starts_with("past.")
}

/// The names of a call for an error.
fn given(flow: &Flow) -> String {
    match flow.is_empty() {
        true => "an empty map".to_owned(),
        false => quoted(flow.keys().map(String::as_str)),
    }
}

fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
