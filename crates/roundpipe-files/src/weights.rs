//! One safetensors file, checked before anything in it is believed.
//!
//! The path of a tensor: file -> mapping -> header -> [`View`]. Nothing is copied: a view shows the
//! mapped pages, and a reader that streams through a file gives pages back behind itself.
//!
//! Refused, each with a line that names the file and the fix: a header longer than the file or than
//! the format allows, broken JSON, a name that occurs twice, an unknown type, a shape whose size
//! overflows, bytes outside the file, shared by two tensors or owned by none, and files that are
//! something else (a pickle, a Git LFS pointer, a web page).
//!
//! # Invariants
//! - Every [`Stored`] range lies inside the file and is exactly as long as its shape and type ask.
//! - Nothing larger than the header itself is allocated before the header has been checked.

mod header;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use ::safetensors::Dtype;
use roundpipe_tensor::{DType, HostBuf, HostRef, Param};

pub use self::header::Layout;
pub use self::write::{PlannedTensor, header_bytes, write_tensors};
use crate::error::{Error, Result};
use crate::small;
use crate::text::shown;

/// The longest header the format allows, in bytes.
pub const HEADER_CAP: usize = 100_000_000;

/// A mapped safetensors file whose header has been checked.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    map: HostBuf,
    bytes: HostRef,
    metadata: BTreeMap<String, String>,
    /// In the order of their bytes.
    tensors: Vec<Stored>,
    by_name: HashMap<String, usize>,
}

/// A tensor's place in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Name in the file.
    pub name: String,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Shape in the file.
    pub dims: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

/// A tensor as it stands in a file.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub dims: &'a [usize],
    /// Row-major elements, little-endian, at any alignment.
    pub bytes: &'a [u8],
}

/// What a small file of tensors holds, copied into memory.
#[derive(Debug)]
pub struct Tensors {
    /// The file's own notes.
    pub metadata: BTreeMap<String, String>,
    /// Names and values, in the order of the file.
    pub tensors: Vec<(String, Param)>,
}

impl Weights {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// [`Error::File`] when the file cannot be read or is not a sound safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, _) = small::open(path)?;
        let map = HostBuf::map_opened(&file, path).map_err(|e| {
            Error::file(
                path,
                format!(
                    "cannot be mapped ({}); check that it is a local file",
                    cause(&e)
                ),
            )
        })?;
        let bytes = map.read_all()?;
        let Layout { metadata, tensors } = Layout::parse(path, bytes.bytes())?;
        let by_name = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| (t.name.clone(), i))
            .collect();
        Ok(Self {
            path: path.to_path_buf(),
            map,
            bytes,
            metadata,
            tensors,
            by_name,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's own notes (`__metadata__`).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[Stored] {
        &self.tensors
    }

    /// Where a tensor stands.
    pub fn stored(&self, name: &str) -> Option<&Stored> {
        self.by_name.get(name).map(|i| &self.tensors[*i])
    }

    /// A tensor's type, shape and bytes.
    pub fn view(&self, name: &str) -> Option<View<'_>> {
        let stored = self.stored(name)?;
        Some(View {
            dtype: stored.dtype,
            dims: &stored.dims,
            bytes: self.bytes_of(stored),
        })
    }

    /// The bytes of a tensor of this file.
    pub fn bytes_of(&self, stored: &Stored) -> &[u8] {
        &self.bytes.bytes()[stored.range.clone()]
    }

    /// The bytes of a tensor of this file, which stay in it: the mapping lives as long as they do.
    ///
    /// # Errors
    /// When the tensor is not one of this file.
    pub fn mapped(&self, stored: &Stored) -> Result<HostBuf> {
        Ok(self.map.slice(stored.range.clone())?)
    }

    /// Says that the file is about to be read from front to back.
    pub fn expect_stream(&self) {
        self.map.expect_stream();
    }

    /// Gives the pages of `range` (counted from the start of the file) back to the system.
    ///
    /// # Errors
    /// When the range is not inside the file.
    pub fn let_go(&self, range: Range<usize>) -> Result<()> {
        Ok(self.map.let_go(range)?)
    }
}

/// Reads all tensors of a small file, such as an adapter, into memory; types stay as they are.
///
/// # Errors
/// As [`Weights::open`], and for types that no parameter can have.
pub fn read_tensors(path: impl AsRef<Path>) -> Result<Tensors> {
    let file = Weights::open(path)?;
    let unusable = |t: &Stored| {
        let what = format!(
            "tensor {} has type {}; save it as F32 or BF16",
            shown(&t.name),
            t.dtype
        );
        Error::file(&file.path, what)
    };
    let dtypes: Vec<DType> = file
        .tensors
        .iter()
        .map(|t| param_dtype(t.dtype).ok_or_else(|| unusable(t)))
        .collect::<Result<_>>()?;
    let mut tensors = Vec::with_capacity(dtypes.len());
    for (stored, dtype) in file.tensors.iter().zip(dtypes) {
        let param = Param::zeros(dtype, &stored.dims)?;
        let home = param.data();
        home.write(0..home.len())?
            .bytes()
            .copy_from_slice(file.bytes_of(stored));
        tensors.push((stored.name.clone(), param));
    }
    Ok(Tensors {
        metadata: file.metadata.clone(),
        tensors,
    })
}

/// The type of a parameter that holds this type's bytes as they are.
pub fn param_dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}

/// The innermost cause of an error, which is the system's own words.
fn cause(e: &dyn std::error::Error) -> String {
    let mut last = e;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
