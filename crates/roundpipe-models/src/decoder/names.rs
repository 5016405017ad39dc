//! Which tensors of a folder a model's parameters are made of: the names that each family gave
//! them.

use roundpipe::{Param, Params};

use super::{Block, Experts, Model, Unit};
use crate::config::Family;
use crate::entry::{Entry, Piece, PieceLayout};

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
        if name.starts_with("rope.") || name.contains(".lora_") || name.starts_with("mlp.experts.")
        {
            continue;
        }
        all.push(whole(&format!("{at}.{name}"), &param));
    }
    if let Unit::Sparse(experts) = &block.unit {
        match family {
            Family::GptOss => stacked(at, experts, all),
            _ => apart(at, experts, all),
        }
    }
}

/// A tensor per expert and projection, as Qwen3-MoE has them on the hub.
fn apart(at: &str, experts: &Experts, all: &mut Vec<Entry>) {
    let down = &experts.down.weight;
    let &[count, hidden, inner] = down.shape().dims() else {
        return;
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
    all.push(Entry {
        name: format!("{at}.mlp.experts.gate_up_proj"),
        param: experts.gate_up.weight.clone(),
        pieces: both.collect(),
    });
    all.push(Entry {
        name: format!("{at}.mlp.experts.down_proj"),
        param: down.clone(),
        pieces: (0..count)
            .map(|e| piece(e, "down_proj", [hidden, inner], e * one))
            .collect(),
    });
}

/// All experts in one tensor [experts, in, out], as GPT-OSS has them.
fn stacked(at: &str, experts: &Experts, all: &mut Vec<Entry>) {
    for (name, stack) in [
        ("gate_up_proj", &experts.gate_up),
        ("down_proj", &experts.down),
    ] {
        let name = format!("{at}.mlp.experts.{name}");
        let &[count, outputs, inputs] = stack.weight.shape().dims() else {
            return;
        };
        let dims = vec![count, inputs, outputs];
        let layout = PieceLayout::Mxfp4OrTransposed;
        let piece = Piece {
            tensor: name.clone(),
            dims,
            at: 0,
            layout,
        };
        all.push(Entry {
            name: name.clone(),
            param: stack.weight.clone(),
            pieces: vec![piece],
        });
        if let Some(bias) = &stack.bias {
            all.push(whole(&format!("{name}_bias"), bias));
        }
    }
}

fn whole(name: &str, param: &Param) -> Entry {
    Entry {
        name: name.to_owned(),
        param: param.clone(),
        pieces: vec![Piece::whole(name, param)],
    }
}
