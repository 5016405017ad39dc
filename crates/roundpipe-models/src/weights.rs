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

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use ::safetensors::Dtype;
use roundpipe::{DType, HostBuf, HostRef, Param, Shape};
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};
use crate::files;

/// The longest header the format allows, in bytes.
pub const HEADER_CAP: usize = 100_000_000;
/// The most tensors of a file, and names in an index; a value in memory takes many times its bytes
/// in a file.
const MOST_NAMES: usize = 1 << 20;
/// The most dimensions of a tensor that can be used.
const RANK_CAP: usize = 8;
const AGAIN: &str = "download it again";

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

impl Weights {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// [`Error::File`] when the file cannot be read or is not a sound safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, _) = files::open(path)?;
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
    pub(crate) fn bytes_of(&self, stored: &Stored) -> &[u8] {
        &self.bytes.bytes()[stored.range.clone()]
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

/// Writes named tensors into one file, under a temporary name until it is complete.
///
/// # Errors
/// [`Error::Argument`] for a name that occurs twice; [`Error::File`] when the file cannot be
/// written, and then whatever stood at `path` still does.
pub fn write_tensors(
    path: impl AsRef<Path>,
    metadata: &BTreeMap<String, String>,
    tensors: &[(String, Param)],
) -> Result<()> {
    let path = path.as_ref();
    let mut tensors: Vec<&(String, Param)> = tensors.iter().collect();
    // Wide types first: every tensor then starts at a multiple of its own element.
    tensors.sort_by_key(|(_, param)| std::cmp::Reverse(param.dtype().size()));
    let plan: Vec<Planned> = tensors
        .iter()
        .map(|(name, param)| Planned {
            name: name.clone(),
            dtype: param.dtype(),
            dims: param.shape().dims().to_vec(),
        })
        .collect();
    let header = header_bytes(metadata, &plan)?;
    let partial = Partial::create(path)?;
    let write = |file: &mut File| -> Result<()> {
        partial.check(file.write_all(&header))?;
        for (_, param) in &tensors {
            partial.check(file.write_all(param.data().read_all()?.bytes()))?;
        }
        Ok(())
    };
    write(&mut partial.file()?)?;
    partial.finish()
}

/// A tensor about to be written.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
}

impl Planned {
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }
}

/// The start of a file, up to the first tensor's bytes, which is a multiple of 8.
pub(crate) fn header_bytes(
    metadata: &BTreeMap<String, String>,
    plan: &[Planned],
) -> Result<Vec<u8>> {
    let mut map = serde_json::Map::new();
    if !metadata.is_empty() {
        map.insert("__metadata__".into(), serde_json::json!(metadata));
    }
    let mut at = 0;
    for tensor in plan {
        let end = at + tensor.bytes();
        let info = serde_json::json!({
            "dtype": file_dtype(tensor.dtype).to_string(), "shape": tensor.dims, "data_offsets": [at, end],
        });
        if tensor.name == "__metadata__" || map.insert(tensor.name.clone(), info).is_some() {
            let why = "the name is taken in the file; give every tensor its own";
            return Err(Error::argument(
                format!("tensor {}", shown(&tensor.name)),
                why,
            ));
        }
        at = end;
    }
    let mut json = serde_json::Value::Object(map).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    Ok(out)
}

/// A file being written beside the one it will replace; dropped unfinished, it disappears.
#[derive(Debug)]
pub(crate) struct Partial {
    target: PathBuf,
    partial: PathBuf,
    finished: bool,
}

impl Partial {
    pub fn create(target: &Path) -> Result<Self> {
        let name = target
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let partial = target.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let this = Self {
            target: target.to_path_buf(),
            partial,
            finished: false,
        };
        this.check(File::create(&this.partial))?;
        Ok(this)
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The file, opened for writing at its start.
    pub fn file(&self) -> Result<File> {
        self.check(File::options().write(true).open(&self.partial))
    }

    /// The error of a failed write, with what it means for the user.
    pub fn check<T>(&self, result: std::io::Result<T>) -> Result<T> {
        result.map_err(|e| unwritten(&self.target, &e))
    }

    /// Makes sure that the bytes are on the disk.
    pub fn sync(&self) -> Result<()> {
        self.check(self.file()?.sync_all())
    }

    /// Gives the file its name; the bytes are on the disk before.
    pub fn finish(mut self) -> Result<()> {
        self.sync()?;
        self.check(std::fs::rename(&self.partial, &self.target))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing more can be done about a file that cannot even be removed.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// A write that failed: what to do depends on why.
pub(crate) fn unwritten(path: &Path, e: &std::io::Error) -> Error {
    let fix = match e.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free space on the disk or choose another folder"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "choose a folder you may write to"
        }
        ErrorKind::NotFound => "create its folder first",
        _ => "check the disk or choose another folder",
    };
    Error::file(
        path,
        format!("could not be written ({e}), what was there before still is; {fix}"),
    )
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

/// The type under which a parameter is written.
pub(crate) fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::Bool => Dtype::BOOL,
        // The only type left; a new one must be given its name here.
        _ => Dtype::U8,
    }
}

/// A name from a file, safe to print in one line.
pub(crate) fn shown(name: &str) -> String {
    const LONG: usize = 120;
    let cut: String = name.chars().take(LONG).collect();
    let dots = if cut.len() < name.len() { "…" } else { "" };
    format!("`{}{dots}`", cut.escape_debug())
}

/// The innermost cause of an error, which is the system's own words.
fn cause(e: &dyn std::error::Error) -> String {
    let mut last = e;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
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

/// Why a file cannot be read, and the fix.
pub(crate) fn unreadable(path: &Path, e: &std::io::Error) -> String {
    match e.kind() {
        ErrorKind::NotFound if path.symlink_metadata().is_ok() => {
            "is a link to a file that is not there; download the model again".into()
        }
        ErrorKind::NotFound => "is missing; check the path or download it again".into(),
        ErrorKind::PermissionDenied => "may not be read; check its permissions".into(),
        _ => format!("cannot be read ({e}); check the disk or download it again"),
    }
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

/// Text of others (a parser, a server) in one line of bounded length.
pub(crate) fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(200)
        .collect()
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
                let mut seen = std::collections::HashSet::new();
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

/// A map of strings to strings in which no name occurs twice.
pub(crate) struct StringMap(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = StringMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringMap, A::Error> {
                let mut pairs = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if seen.len() == MOST_NAMES {
                        return Err(de::Error::custom(format!("more than {MOST_NAMES} names")));
                    }
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("{} occurs twice", shown(&name))));
                    }
                    pairs.push((name, value));
                }
                Ok(StringMap(pairs))
            }
        }
        from.deserialize_map(Pairs)
    }
}
