//! Which tensors of a folder a model's parameters are made of: the names that each family gave
//! them.

use roundpipe::{Param, Params};

use super::{Block, Experts, Model, Projection, Unit, Weight};
use crate::config::Family;
use crate::entry::{Entry, Piece, PieceLayout};
use crate::folder::QuantizedEntry;

/// A weight and the tensors it is made of.
struct Placed<'a> {
    name: String,
    weight: &'a Weight,
    pieces: Vec<Piece>,
}

pub(super) fn entries(model: &Model) -> Vec<Entry> {
    let mut all = vec![whole("model.embed_tokens.weight", &model.embed.weight)];
    for (i, block) in model.blocks.iter().enumerate() {
        block_entries(
            model.config.family,
            &format!("model.layers.{i}"),
            block,
            &mut all,
        );
    }
    all.push(whole("model.norm.weight", &model.head.norm.weight));
    if !model.config.tied {
        all.push(whole("lm_head.weight", &model.head.weight));
    }
    all
}

fn block_entries(family: Family, at: &str, block: &Block, all: &mut Vec<Entry>) {
    for (name, param) in block.named_params() {
        // Tables are computed, adapters have files of their own, experts have another layout.
        if name.starts_with("rope.")
            || name.contains(".lora_")
            || name.starts_with("mlp.experts.")
            || is_quantized(block, &name)
        {
            continue;
        }
        all.push(whole(&format!("{at}.{name}"), &param));
    }
    if let Unit::Sparse(experts) = &block.unit {
        let placed = placed_experts(family, at, experts);
        for (placed, bias) in placed.into_iter().zip([&experts.gate_up, &experts.down]) {
            let bias = bias.bias.as_ref().filter(|_| family == Family::GptOss);
            let bias = bias.map(|bias| whole(&format!("{}_bias", placed.name), bias));
            if let Weight::Whole(param) = placed.weight {
                all.push(Entry {
                    name: placed.name,
                    param: param.clone(),
                    pieces: placed.pieces,
                });
            }
            all.extend(bias);
        }
    }
}

/// Whether a parameter of a block is a part of a quantised weight.
fn is_quantized(block: &Block, name: &str) -> bool {
    block.projections().into_iter().any(|(of, projection)| {
        matches!(projection.weight, Weight::Quantized(_))
            && name
                .strip_prefix(of)
                .is_some_and(|rest| rest == ".weight" || rest.starts_with(".weight."))
    })
}

/// Quantised weights of all blocks.
pub(super) fn quantized_entries(model: &Model) -> Vec<QuantizedEntry> {
    let mut all = Vec::new();
    for (i, block) in model.blocks.iter().enumerate() {
        let at = format!("model.layers.{i}");
        let mut placed = Vec::new();
        for (name, projection) in block.projections() {
            if projection.weight.shape().rank() == 2 {
                placed.push(one(&format!("{at}.{name}"), projection));
            }
        }
        if let Unit::Sparse(experts) = &block.unit {
            placed.extend(placed_experts(model.config.family, &at, experts));
        }
        all.extend(placed.into_iter().filter_map(|placed| {
            let Weight::Quantized(weight) = placed.weight else {
                return None;
            };
            Some(QuantizedEntry {
                name: placed.name,
                weight: weight.clone(),
                pieces: placed.pieces,
            })
        }));
    }
    all
}

/// The tensors of a folder that the linear map `name` of a block's experts, or of the block, is made
/// of; `name` is that of [`Model::projections`].
pub(super) fn pieces_of(
    model: &Model,
    block: usize,
    (name, projection): (&str, &Projection),
) -> Vec<Piece> {
    let at = format!("model.layers.{block}");
    let block = &model.blocks[block];
    match (&block.unit, name) {
        (Unit::Sparse(experts), super::GATE_UP | super::DOWN) => {
            let mut both = placed_experts(model.config.family, &at, experts);
            both.swap_remove(usize::from(name == super::DOWN)).pieces
        }
        _ => one(&format!("{at}.{name}"), projection).pieces,
    }
}

fn one<'a>(name: &str, projection: &'a Projection) -> Placed<'a> {
    let tensor = format!("{name}.weight");
    let piece = Piece {
        tensor: tensor.clone(),
        dims: projection.weight.shape().dims().to_vec(),
        at: 0,
        layout: PieceLayout::Plain,
    };
    Placed {
        name: tensor,
        weight: &projection.weight,
        pieces: vec![piece],
    }
}

/// Gate with up, then down.
fn placed_experts<'a>(family: Family, at: &str, experts: &'a Experts) -> Vec<Placed<'a>> {
    match family {
        Family::GptOss => stacked(at, experts),
        _ => apart(at, experts),
    }
}

/// A tensor per expert and projection, as Qwen3-MoE has them on the hub.
fn apart<'a>(at: &str, experts: &'a Experts) -> Vec<Placed<'a>> {
    let down = &experts.down.weight;
    let &[count, hidden, inner] = down.shape().dims() else {
        return Vec::new();
    };
    let one = hidden * inner;
    let piece = |e: usize, name: &str, dims: [usize; 2], at_element: usize| Piece {
        tensor: format!("{at}.mlp.experts.{e}.{name}.weight"),
        dims: dims.to_vec(),
        at: at_element,
        layout: PieceLayout::Plain,
    };
    let both = (0..count).flat_map(|e| {
        [
            piece(e, "gate_proj", [inner, hidden], 2 * e * one),
            piece(e, "up_proj", [inner, hidden], (2 * e + 1) * one),
        ]
    });
    vec![
        Placed {
            name: format!("{at}.mlp.experts.gate_up_proj"),
            weight: &experts.gate_up.weight,
            pieces: both.collect(),
        },
        Placed {
            name: format!("{at}.mlp.experts.down_proj"),
            weight: down,
            pieces: (0..count)
                .map(|e| piece(e, "down_proj", [hidden, inner], e * one))
                .collect(),
        },
    ]
}

/// All experts in one tensor [experts, in, out], as GPT-OSS has them.
fn stacked<'a>(at: &str, experts: &'a Experts) -> Vec<Placed<'a>> {
    let mut all = Vec::new();
    for (name, stack) in [
        ("gate_up_proj", &experts.gate_up),
        ("down_proj", &experts.down),
    ] {
        let name = format!("{at}.mlp.experts.{name}");
        let &[count, outputs, inputs] = stack.weight.shape().dims() else {
            return Vec::new();
        };
        let dims = vec![count, inputs, outputs];
        let layout = PieceLayout::Mxfp4OrTransposed;
        let piece = Piece {
            tensor: name.clone(),
            dims,
            at: 0,
            layout,
        };
        all.push(Placed {
            name,
            weight: &stack.weight,
            pieces: vec![piece],
        });
    }
    all
}

fn whole(name: &str, param: &Param) -> Entry {
    Entry {
        name: name.to_owned(),
        param: param.clone(),
        pieces: vec![Piece::whole(name, param)],
    }
}
