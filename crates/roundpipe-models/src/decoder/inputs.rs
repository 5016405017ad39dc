//! What a model takes: the names it knows, checked and brought into our own before its first layer.
//!
//! There are two sets of names. `ids` are ours; `input_ids` are Hugging Face's, and what is given
//! beside them means what it means there. A call uses one set.
//!
//! An input that no layer reads would train something other than the caller meant, so a name that is
//! not known is refused. The map between the other layers is our own and not checked.

use roundpipe::ops::CrossEntropy;
use roundpipe::{Cx, DType, Tensor, TensorError, TensorResult, Tree};

use super::{Flow, get, optional, padding, take};

const OP: &str = "model";

/// Names of our own.
const OURS: [&str; 4] = ["ids", "positions", "lens", "documents"];
/// Names of Hugging Face.
const THEIRS: [&str; 3] = ["input_ids", "position_ids", "attention_mask"];
/// Names that stand beside either. A map of `past` may also be spread into its entries.
const COMMON: [&str; 7] = [
    "labels",
    "weight",
    "cache",
    "past",
    "keep",
    "return_logits",
    "return_scores",
];

/// The inputs of a call in the names of the map between layers, or one line with what is wrong.
pub(super) fn read(cx: &mut Cx, mut flow: Flow) -> TensorResult<Flow> {
    // `None` is how Python leaves an argument out.
    flow.retain(|_, value| !matches!(value, Tree::None));
    check_names(&flow)?;
    for name in ["return_logits", "return_scores"] {
        if !matches!(flow.get(name), None | Some(Tree::Bool(_))) {
            let what = format!("`{name}` is a truth value: `Tree::Bool(true)`");
            return Err(TensorError::invalid(OP, what));
        }
    }
    if wants_scores(&flow) && !flow.contains_key("labels") {
        let what = "`return_scores` needs `labels`, the tokens whose scores are asked for";
        return Err(TensorError::invalid(OP, what));
    }
    check_documents(&flow)?;
    if let Some(Tree::Map(last)) = flow.remove("past") {
        flow.extend(last.into_iter().filter(|(name, _)| is_past(name)));
    }
    if flow.contains_key("input_ids") {
        translate(cx, &mut flow)?;
    }
    place_cached(cx, &mut flow)?;
    Ok(flow)
}

/// Tokens behind a cache stand at the places behind it, unless the caller says otherwise. Once here
/// instead of in every block.
fn place_cached(cx: &mut Cx, flow: &mut Flow) -> TensorResult<()> {
    let Some(at) = optional(flow, "cache.at")? else {
        return Ok(());
    };
    if flow.contains_key("positions") {
        return Ok(());
    }
    let steps = get(flow, "ids")?.dims().get(1).copied().unwrap_or(1);
    let positions = match (flow.get("cache.filled"), steps) {
        (Some(Tree::Int(filled)), _) => {
            let from = *filled as f64;
            cx.arange(DType::I32, from, from + steps as f64, 1.0)?
        }
        (_, 1) => cx.reshape(&at, &[-1, 1])?,
        _ => {
            let what = "several tokens per row behind a cache need `cache.filled`, or `positions`";
            return Err(TensorError::invalid(OP, what));
        }
    };
    flow.insert("positions".into(), positions.into());
    Ok(())
}

fn check_names(flow: &Flow) -> TensorResult<()> {
    let known: Vec<&str> = OURS.into_iter().chain(THEIRS).chain(COMMON).collect();
    let is_known = |name: &str| known.contains(&name) || is_past(name) || is_cache(name);
    if let Some(name) = flow.keys().find(|name| !is_known(name)) {
        let what = format!(
            "no input is called `{name}`; a model takes {}",
            quoted(known)
        );
        return Err(TensorError::invalid(OP, what));
    }
    let ours = OURS.into_iter().find(|name| flow.contains_key(*name));
    let theirs = THEIRS.into_iter().find(|name| flow.contains_key(*name));
    if let (Some(ours), Some(theirs)) = (ours, theirs) {
        let what = format!(
            "`{ours}` and `{theirs}` cannot be mixed: {} are our names, {} Hugging Face's, and they differ in \
             what `labels` mean",
            quoted(OURS),
            quoted(THEIRS)
        );
        return Err(TensorError::invalid(OP, what));
    }
    if !flow.contains_key("ids") && !flow.contains_key("input_ids") {
        return Err(TensorError::invalid(
            OP,
            format!(
                "there is no input `ids` or `input_ids`, only {}",
                given(flow)
            ),
        ));
    }
    Ok(())
}

/// Sums by document need to know where documents end and which labels they have.
fn check_documents(flow: &Flow) -> TensorResult<()> {
    let has = |name: &str| flow.contains_key(name);
    if !has("documents") {
        return Ok(());
    }
    if let Some(name) = ["labels", "lens"].into_iter().find(|name| !has(name)) {
        let what =
            format!("`documents` stand beside `labels` and `lens`, and there is no `{name}`");
        return Err(TensorError::invalid(OP, what));
    }
    if let Some(name) = ["weight", "return_logits"]
        .into_iter()
        .find(|name| has(name))
    {
        let what =
            format!("`documents` ask for sums of log-probabilities, and `{name}` is for a loss");
        return Err(TensorError::invalid(OP, what));
    }
    Ok(())
}

/// Replaces Hugging Face's names and meanings by ours.
fn translate(cx: &mut Cx, flow: &mut Flow) -> TensorResult<()> {
    let ids = take(flow, "input_ids")?;
    let &[rows, steps] = ids.dims() else {
        let what = format!("`input_ids` are {}, not [batch, sequence]", ids.shape());
        return Err(TensorError::invalid(OP, what));
    };
    if flow.contains_key("labels") {
        let labels = take(flow, "labels")?;
        let labels = shifted(cx, &labels, [rows, steps])?;
        flow.insert("labels".into(), labels.into());
    }
    if flow.contains_key("position_ids") {
        let positions = take(flow, "position_ids")?;
        // One row stands for all, as everywhere in transformers.
        let positions = match positions.dims() {
            [1, one] if *one == steps => cx.reshape(&positions, &[steps as isize])?,
            _ => positions,
        };
        flow.insert("positions".into(), positions.into());
    }
    flow.insert("ids".into(), ids.into());
    if flow.contains_key("attention_mask") {
        let mask = take(flow, "attention_mask")?;
        padding::pack(cx, flow, &mask)?;
    }
    Ok(())
}

/// Labels where they are predicted: a token's label is the next one, and the last has none.
fn shifted(cx: &mut Cx, labels: &Tensor, [rows, steps]: [usize; 2]) -> TensorResult<Tensor> {
    if labels.dims() != [rows, steps] {
        let what = format!(
            "`labels` are {} beside `input_ids` [{rows}, {steps}]: Hugging Face's labels are as long as \
             the ids, and the model shifts them (beside `ids` they stand where they are predicted)",
            labels.shape()
        );
        return Err(TensorError::invalid(OP, what));
    }
    let ignored = CrossEntropy::default().ignore_index as f64;
    // Types without a sign cannot say "none".
    let labels = match labels.dtype() {
        DType::U32 | DType::U8 => cx.cast(labels, DType::I64)?,
        _ => labels.clone(),
    };
    let none = cx.full(labels.dtype(), &[rows, steps.min(1)], ignored)?;
    let next = cx.narrow(&labels, 1, steps.min(1), steps.saturating_sub(1))?;
    cx.cat(&[&next, &none], 1)
}

/// Whether a call with labels asks for more than the loss.
pub(super) fn wants_logits(flow: &Flow) -> bool {
    matches!(flow.get("return_logits"), Some(Tree::Bool(true)))
}

/// Whether a call with labels asks for figures of every token instead of the loss.
pub(super) fn wants_scores(flow: &Flow) -> bool {
    matches!(flow.get("return_scores"), Some(Tree::Bool(true)))
}

/// Whether this is the keys or values of a block.
fn is_past(name: &str) -> bool {
    name.starts_with("past.")
}

/// Whether this is a cache that is written in place, or how much of it is filled.
fn is_cache(name: &str) -> bool {
    name.starts_with("cache.")
}

/// The names of a call for an error.
fn given(flow: &Flow) -> String {
    if flow.is_empty() {
        return "an empty map".to_owned();
    }
    quoted(flow.keys().map(String::as_str))
}

fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
