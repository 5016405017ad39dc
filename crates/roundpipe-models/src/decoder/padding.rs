//! Padded batches as packed rows.
//!
//! `attention_mask` [B, S] says which tokens are real. The first layer moves them to the front of
//! one row, sequence after sequence, with padding behind the last: blocks then see packed sequences
//! and know nothing of padding, and only the head puts logits back where their tokens were. That is
//! what transformers' flash attention does, so holes within a sequence are left out as there, and
//! windows count real tokens.
//!
//! Sizes do not depend on the mask's values, which stay on the device.
//!
//! # Invariants
//! - A real token sees the real tokens of its own row up to itself and nothing else.
//! - Padding sees nothing and no token sees it; its logits mean nothing.

use roundpipe::{Cx, DType, Tensor, TensorError, TensorResult};

use super::{Flow, optional, take};

/// Where each token of the batch lies in the packed row, [B, S] (i64).
const PLACE: &str = "pad.place";
/// 1 for the real tokens of the packed row, 0 for padding, [B · S] (f32).
pub(super) const REAL: &str = "pad.real";

/// Which way tokens are moved.
struct Packing {
    rows: usize,
    steps: usize,
    /// The token at each place, [B · S].
    order: Tensor,
}

/// Moves `ids`, `labels` and `positions` of the flow into a packed row with its `lens`.
pub(super) fn pack(cx: &mut Cx, flow: &mut Flow, mask: &Tensor) -> TensorResult<()> {
    let ids = take(flow, "ids")?;
    check(flow, &ids, mask)?;
    let (rows, steps) = (ids.dims()[0], ids.dims()[1]);
    let tokens = rows * steps;
    let real = cx.cast(mask, DType::Bool)?;
    let real = cx.reshape(&real, &[tokens as isize])?;
    let index = cx.arange(DType::I64, 0.0, tokens as f64, 1.0)?;

    // Real tokens up to each token, itself included: its place is behind those before it, or among
    // the padding behind all of them.
    let seen = cx.cumsum(&real, 0)?;
    let total = cx.sum_all(&real)?;
    let among_real = cx.add_scalar(&seen, -1.0)?;
    let padding_before = cx.sub(&index, &seen)?;
    let among_padding = cx.add(&padding_before, &total)?;
    let place = cx.where_cond(&real, &among_real, &among_padding)?;
    let nothing = cx.zeros(DType::I64, &[tokens])?;
    let order = cx.scatter_add(&nothing, 0, &place, &index)?;
    let packing = Packing { rows, steps, order };

    let positions = match optional(flow, "positions")? {
        Some(given) => given,
        None => cx.arange(DType::I64, 0.0, steps as f64, 1.0)?,
    };
    let positions = cx.broadcast_to(&positions, &[rows, steps])?;
    packing.insert(cx, flow, "ids", &ids)?;
    packing.insert(cx, flow, "positions", &positions)?;
    if flow.contains_key("labels") {
        let labels = take(flow, "labels")?;
        packing.insert(cx, flow, "labels", &labels)?;
    }
    flow.insert("lens".into(), lens(cx, &real, rows, steps)?.into());
    let real = cx.cast(&real, DType::F32)?;
    let real = cx.index_select(&real, 0, &packing.order)?;
    flow.insert(REAL.into(), real.into());
    let place = cx.reshape(&place, &[rows as isize, steps as isize])?;
    flow.insert(PLACE.into(), place.into());
    Ok(())
}

/// What the head projects: `x` [B, S, H] as it is, or out of a packed row back in the order of the
/// batch; of the last `keep` positions.
pub(super) fn last_positions(
    cx: &mut Cx,
    x: &Tensor,
    flow: &Flow,
    keep: Option<usize>,
) -> TensorResult<Tensor> {
    let Some(place) = optional(flow, PLACE)? else {
        return last(cx, x, keep);
    };
    let place = last(cx, &place, keep)?;
    let (rows, steps, hidden) = (place.dims()[0], place.dims()[1], x.dims()[2]);
    let place = cx.reshape(&place, &[-1])?;
    let packed = cx.reshape(x, &[-1, hidden as isize])?;
    let picked = cx.index_select(&packed, 0, &place)?;
    cx.reshape(&picked, &[rows, steps, hidden].map(|dim| dim as isize))
}

impl Packing {
    fn insert(&self, cx: &mut Cx, flow: &mut Flow, name: &str, batch: &Tensor) -> TensorResult<()> {
        let tokens = (self.rows * self.steps) as isize;
        let flat = cx.reshape(batch, &[tokens])?;
        let packed = cx.index_select(&flat, 0, &self.order)?;
        let packed = cx.reshape(&packed, &[1, tokens])?;
        flow.insert(name.into(), packed.into());
        Ok(())
    }
}

/// Cumulative numbers of real tokens, [B + 1] (i32).
fn lens(cx: &mut Cx, real: &Tensor, rows: usize, steps: usize) -> TensorResult<Tensor> {
    let real = cx.reshape(real, &[rows as isize, steps as isize])?;
    let counts = cx.sum(&real, &[1], false)?;
    let ends = cx.cumsum(&counts, 0)?;
    let start = cx.zeros(DType::I64, &[1])?;
    let all = cx.cat(&[&start, &ends], 0)?;
    cx.cast(&all, DType::I32)
}

fn last(cx: &mut Cx, x: &Tensor, keep: Option<usize>) -> TensorResult<Tensor> {
    let Some(keep) = keep else {
        return Ok(x.clone());
    };
    let steps = x.dims()[1];
    let keep = keep.clamp(1, steps);
    cx.narrow(x, 1, steps - keep, keep)
}

fn check(flow: &Flow, ids: &Tensor, mask: &Tensor) -> TensorResult<()> {
    if mask.dims() != ids.dims() {
        let what = format!(
            "`attention_mask` is {} beside `input_ids` {}: it has one value per token, 1 for a real one and \
             0 for padding",
            mask.shape(),
            ids.shape()
        );
        return Err(TensorError::invalid("model", what));
    }
    if flow
        .keys()
        .any(|name| name == "cache" || name.starts_with("past."))
    {
        let what = "`attention_mask` cannot stand beside `cache` or `past`: keys and values are kept for rows \
                    of one length";
        return Err(TensorError::invalid("model", what));
    }
    Ok(())
}
