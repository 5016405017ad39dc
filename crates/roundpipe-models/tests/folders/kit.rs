//! Parameters of small models, and their places in files.

use roundpipe_models::{Entry, Piece, PieceLayout};
use roundpipe_tensor::{Element, Param};

/// A parameter that is one tensor.
pub fn whole<T: Element>(name: &str, values: &[T], dims: &[usize]) -> Entry {
    let param = Param::from_slice(values, dims).unwrap();
    let pieces = vec![Piece::whole(name, &param)];
    Entry {
        name: name.into(),
        param,
        pieces,
    }
}

/// A parameter made of given pieces.
pub fn pieced(name: &str, param: Param, pieces: &[(&str, &[usize], usize, PieceLayout)]) -> Entry {
    let pieces = pieces
        .iter()
        .map(|(tensor, dims, at, layout)| Piece {
            tensor: (*tensor).into(),
            dims: dims.to_vec(),
            at: *at,
            layout: *layout,
        })
        .collect();
    Entry {
        name: name.into(),
        param,
        pieces,
    }
}

/// The same places with values of zero, to be loaded into.
pub fn blank(entries: &[Entry]) -> Vec<Entry> {
    entries
        .iter()
        .map(|e| Entry {
            param: Param::zeros(e.param.dtype(), e.param.shape().dims()).unwrap(),
            ..e.clone()
        })
        .collect()
}

/// A parameter's bytes.
pub fn bytes(entry: &Entry) -> Vec<u8> {
    entry.param.data().read_all().unwrap().bytes().to_vec()
}
