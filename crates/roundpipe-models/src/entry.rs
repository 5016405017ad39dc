//! Which tensors of a folder a parameter is made of.
//!
//! Models keep their parameters in the layout that computes best (all experts of a block in one
//! tensor); folders keep the layout that transformers defined. An [`Entry`] is the pure description
//! between them, used for loading and, read backwards, for saving. It moves no bytes.

use roundpipe::Param;

/// A parameter and where its values stand in a folder.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name inside the model, for messages.
    pub name: String,
    /// The home of the values.
    pub param: Param,
    /// The tensors it is made of; together they cover every element once.
    pub pieces: Vec<Piece>,
}

/// One tensor of a folder, or a part of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Name of the tensor in the folder.
    pub tensor: String,
    /// Its shape there.
    pub dims: Vec<usize>,
    /// Where its first element goes in the parameter, counted in elements; the piece is contiguous
    /// there.
    pub at: usize,
    /// How its elements stand in the folder.
    pub layout: PieceLayout,
}

/// How the elements of a piece stand in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceLayout {
    /// As in the parameter.
    Plain,
    /// With the last two dimensions exchanged: `dims` is the folder's shape, [.., in, out] for [..,
    /// out, in].
    Transposed,
    /// Read from `{tensor}_blocks` (u8 [.., rows, groups, 16]) and `{tensor}_scales` (u8 [.., rows,
    /// groups]), 32 values per group, where those exist, giving [.., rows, 32 · groups], which is
    /// the parameter's layout; else as `Transposed` from `{tensor}`. Always saved as `Transposed`.
    /// `dims` is the transposed, de-quantised shape.
    Mxfp4OrTransposed,
}

impl Piece {
    /// A tensor that is the whole parameter, as it stands.
    pub fn whole(tensor: impl Into<String>, param: &Param) -> Self {
        let dims = param.shape().dims().to_vec();
        Self {
            tensor: tensor.into(),
            dims,
            at: 0,
            layout: PieceLayout::Plain,
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.dims.iter().product()
    }
}
