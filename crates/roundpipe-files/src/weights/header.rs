//! The header of a safetensors file: what it claims, and whether that is true.
//!
//! The path: first bytes -> length -> JSON -> one tensor -> its neighbours. Each step believes only
//! what those before it have checked.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

use roundpipe_tensor::Shape;
use safetensors::Dtype;
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::{HEADER_CAP, Stored};
use crate::error::{Error, Result};
use crate::small::{MOST_NAMES, StringMap};
use crate::text::{one_line, shown};

/// The most dimensions of a tensor that can be used.
const RANK_CAP: usize = 8;
const AGAIN: &str = "download it again";

/// What a file says about itself, checked against its length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The file's own notes (`__metadata__`).
    pub metadata: BTreeMap<String, String>,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<Stored>,
}

impl Layout {
    /// Checks the bytes of a file; `path` is only for messages.
    ///
    /// # Errors
    /// [`Error::File`] when they are not a sound safetensors file.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        refuse_other_formats(path, &bytes[..bytes.len().min(64)])?;
        let (start, header) = read_header(path, bytes)?;
        let tensors = place(path, header.tensors, start, bytes.len())?;
        Ok(Self {
            metadata: header.metadata,
            tensors,
        })
    }
}

/// Tells files that are no safetensors at all, by their first bytes, and why.
fn refuse_other_formats(path: &Path, first: &[u8]) -> Result<()> {
    // A header of 123 bytes starts with `{`, too: what looks like a header is one.
    if first.len() > 8 && first[4..8] == [0; 4] && matches!(first[8], b'{' | b' ' | b'\n') {
        return Ok(());
    }
    let starts = |magic: &[u8]| first.starts_with(magic);
    let text = String::from_utf8_lossy(first).trim_start().to_lowercase();
    let pickled =
        first.len() > 8 && first[0] == 0x80 && (2..6).contains(&first[1]) && first[2..8] != [0; 6];
    let what = if first.is_empty() {
        "is empty; download it again"
    } else if starts(b"version https://git-lfs") {
        "is a Git LFS pointer, not the weights; run `git lfs pull` in its folder, or download it again"
    } else if text.starts_with("<!doctype")
        || text.starts_with("<html")
        || text.starts_with("<?xml")
    {
        "is a web page, not weights; download it again (gated models need HF_TOKEN)"
    } else if starts(b"PK\x03\x04") || pickled {
        "is a pickle, which could run code when opened; convert it with transformers' save_pretrained"
    } else if starts(b"GGUF") {
        "is a GGUF file; use the model's safetensors files"
    } else if starts(b"{\"") || starts(b"{\n") || starts(b"{ ") {
        "is JSON, not weights (perhaps a server's error message); download it again"
    } else {
        return Ok(());
    };
    Err(Error::file(path, what))
}

/// The checked JSON of a file and where the tensors' bytes start.
fn read_header(path: &Path, bytes: &[u8]) -> Result<(usize, Header)> {
    let Some((len, rest)) = bytes.split_first_chunk::<8>() else {
        let what = format!(
            "has only {} bytes, which is no safetensors file; {AGAIN}",
            bytes.len()
        );
        return Err(Error::file(path, what));
    };
    let len = u64::from_le_bytes(*len);
    if len > HEADER_CAP as u64 {
        let what = format!(
            "says that its header has {len} bytes, the most is {HEADER_CAP}: it is damaged or no safetensors file; {AGAIN}"
        );
        return Err(Error::file(path, what));
    }
    let len = len as usize;
    let Some(json) = rest.get(..len) else {
        let have = rest.len();
        let what = format!(
            "is cut off: the header has {len} bytes, the file holds {have} of them; {AGAIN}"
        );
        return Err(Error::file(path, what));
    };
    let header = serde_json::from_slice::<Header>(json).map_err(|e| {
        let e = e.to_string();
        Error::file(
            path,
            format!(
                "has a broken header ({}); save it anew or {AGAIN}",
                one_line(&e)
            ),
        )
    })?;
    Ok((8 + len, header))
}

/// Checks every tensor against its shape, the file and its neighbours.
fn place(
    path: &Path,
    raw: Vec<(String, RawTensor)>,
    start: usize,
    file: usize,
) -> Result<Vec<Stored>> {
    let fail = |what: String| Error::file(path, format!("{what}; the file is damaged: {AGAIN}"));
    let mut tensors: Vec<Stored> = raw
        .into_iter()
        .map(|(name, raw)| check(&name, raw, start, file))
        .collect::<Result<_, _>>()
        .map_err(fail)?;
    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut at = start;
    for tensor in &tensors {
        let name = shown(&tensor.name);
        if tensor.range.start < at {
            return Err(fail(format!("tensor {name} overlaps the one before it")));
        }
        if tensor.range.start > at {
            let gap = tensor.range.start - at;
            return Err(fail(format!(
                "{gap} bytes before tensor {name} belong to no tensor"
            )));
        }
        at = tensor.range.end;
    }
    if at != file {
        return Err(fail(format!(
            "{} bytes at the end belong to no tensor",
            file - at
        )));
    }
    Ok(tensors)
}

/// One tensor of the header, every number checked before it is used.
fn check(name: &str, raw: RawTensor, start: usize, file: usize) -> Result<Stored, String> {
    let tensor = format!("tensor {}", shown(name));
    let from: de::value::StrDeserializer<'_, de::value::Error> =
        raw.dtype.as_str().into_deserializer();
    let dtype = Dtype::deserialize(from)
        .map_err(|_| format!("{tensor} has unknown type {}", shown(&raw.dtype)))?;
    let dims = raw.shape.0;
    // A size of 0 hides an overflow of the others, which strides would meet later.
    Shape::new(&dims)
        .map_err(|_| format!("{tensor} ({dtype} {dims:?}) is larger than any memory"))?;
    let bits = dims
        .iter()
        .try_fold(dtype.bitsize(), |n, d| n.checked_mul(*d));
    let bytes = match bits {
        Some(bits) if bits % 8 == 0 => bits / 8,
        Some(_) => {
            return Err(format!(
                "{tensor} ({dtype} {dims:?}) does not fill whole bytes"
            ));
        }
        None => {
            return Err(format!(
                "{tensor} ({dtype} {dims:?}) is larger than any memory"
            ));
        }
    };
    let [from, to] = raw.data_offsets;
    let Some(len) = to.checked_sub(from) else {
        return Err(format!(
            "{tensor} ends at byte {to}, before it starts at {from}"
        ));
    };
    let room = file - start;
    if to > room {
        return Err(format!("{tensor} ends at byte {to}, the file holds {room}"));
    }
    if len != bytes {
        return Err(format!(
            "{tensor} has {len} bytes, {dtype} {dims:?} needs {bytes}"
        ));
    }
    Ok(Stored {
        name: name.to_owned(),
        dtype,
        dims,
        range: start + from..start + to,
    })
}

/// What the JSON says, before it is believed.
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dims,
    data_offsets: [usize; 2],
}

/// Sizes; a list that is too long is refused while it is read.
struct Dims(Vec<usize>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Dims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {RANK_CAP} sizes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == RANK_CAP {
                        return Err(de::Error::custom(format!(
                            "more than {RANK_CAP} dimensions"
                        )));
                    }
                    dims.push(dim);
                }
                Ok(Dims(dims))
            }
        }
        from.deserialize_seq(List)
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header {
                    metadata: BTreeMap::new(),
                    tensors: Vec::new(),
                };
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if seen.len() == MOST_NAMES {
                        return Err(de::Error::custom(format!("more than {MOST_NAMES} tensors")));
                    }
                    if name == "__metadata__" {
                        header.metadata = map.next_value::<StringMap>()?.0.into_iter().collect();
                    } else {
                        header.tensors.push((name.clone(), map.next_value()?));
                    }
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("{} occurs twice", shown(&name))));
                    }
                }
                Ok(header)
            }
        }
        from.deserialize_map(Names)
    }
}
