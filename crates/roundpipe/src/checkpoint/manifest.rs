//! What a checkpoint says about itself: counters, parameters, files, tensors, hashes.
//!
//! The manifest is one JSON object on one line. Its last field is a hash of the rest, and a reader
//! demands that writing what it parsed gives the very bytes that it read: no bit of it can change
//! unnoticed, not even white space.
//!
//! Names of tensors in the files: a parameter's value has the parameter's name; what belongs to it
//! has `@` and a word behind that, as `layers.0.w@moment.0`. A parameter whose own name has an `@`
//! gets `@value`, so that no two tensors can have one name.
//!
//! # Invariants
//! - Numbers that are not whole are text, as Rust prints them: reading them gives the same bits.
//! - A manifest that [`Manifest::parse`] returned is consistent with itself: every tensor lies in a
//!   file of the list and has a type and sizes that a tensor can have, no name occurs twice, and
//!   lengths of files are the sums of what is in them.

use std::collections::HashSet;
use std::path::Path;

use roundpipe_files::Hash128;
use roundpipe_files::small::{self, FileLimits};
use roundpipe_files::text::{one_line, shown};
use roundpipe_tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use super::MANIFEST;
use super::shards::file_name;
use crate::error::{Error, Result};
use crate::scaler::ScalerState;

/// The format that is written, and the newest that is read.
pub(crate) const FORMAT: u64 = 1;

/// The longest notes, in bytes.
pub(crate) const NOTES_CAP: usize = 16 << 20;

/// What a reader takes is a small multiple of the length.
const LIMITS: FileLimits = FileLimits {
    bytes: 256 << 20,
    json_values: 0,
};

/// The most that a counter says. No run comes near it, and numbers above it cannot be counted on.
const MOST_COUNTED: u64 = 1 << 53;

/// The manifest; fields stand in the order of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub format: u64,
    /// Which program wrote it; for people only.
    pub writer: String,
    pub counters: Counters,
    pub scaler: Option<SavedScaler>,
    /// Trained parameters, in model order.
    pub params: Vec<SavedParam>,
    /// Parameters that are not trained; their values are not here.
    pub frozen: Vec<FrozenParam>,
    /// Those of them that layers set, whose values are.
    pub buffers: Vec<String>,
    pub files: Vec<SavedFile>,
    /// In the order in which they lie in their files.
    pub tensors: Vec<SavedTensor>,
    pub notes: String,
    pub hash: String,
}

/// Where a run was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counters {
    /// Steps asked for: the version of the weights.
    pub steps: u64,
    /// Updates made, skipped ones left out.
    pub updates: u64,
    /// The place in the random stream.
    pub calls: u64,
    /// The engine's seed.
    pub seed: u64,
    /// How far behind the newest weights the next call reads: 0 or 1.
    pub lag: u64,
    /// Steps in a row that were not finite, and where the last of them was not.
    pub nonfinite: u64,
    pub nonfinite_place: String,
}

impl Counters {
    fn are_possible(&self) -> bool {
        let all = [self.steps, self.updates, self.calls, self.nonfinite];
        self.lag <= self.steps.min(1) && all.iter().all(|count| *count <= MOST_COUNTED)
    }
}

/// A loss scale.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedScaler {
    scale: String,
    /// That of the version before, which the next call uses at lag 1.
    previous: String,
    growth: String,
    backoff: String,
    interval: u64,
    good: u64,
    enabled: bool,
}

impl SavedScaler {
    pub fn new(state: ScalerState, previous: f64) -> Self {
        Self {
            scale: format!("{:?}", state.scale),
            previous: format!("{previous:?}"),
            growth: format!("{:?}", state.growth),
            backoff: format!("{:?}", state.backoff),
            interval: state.interval,
            good: state.good,
            enabled: state.enabled,
        }
    }

    /// The state, and the scale of the version before.
    pub fn state(&self) -> Option<(ScalerState, f64)> {
        let state = ScalerState {
            scale: self.scale.parse().ok()?,
            growth: self.growth.parse().ok()?,
            backoff: self.backoff.parse().ok()?,
            interval: self.interval,
            good: self.good,
            enabled: self.enabled,
        };
        let previous: f64 = self.previous.parse().ok()?;
        let is_sound = previous.is_finite() && previous > 0.0 && state.check().is_ok();
        is_sound.then_some((state, previous))
    }
}

/// A trained parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedParam {
    pub name: String,
    /// The type of the weights as layers read them.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// The rule that updates it; none where updates are functions.
    pub rule: Option<String>,
    pub moments: usize,
    pub frozen_steps: u64,
}

/// A parameter that is not trained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrozenParam {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
}

/// A file of tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedFile {
    pub name: String,
    pub bytes: u64,
    pub header_bytes: u64,
    pub header_hash: String,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedTensor {
    pub name: String,
    /// The number of its file, from 0 on.
    pub file: usize,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub hash: String,
}

/// What a tensor is to its parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The value as the optimizer holds it, or a buffer's.
    Value,
    Moment(usize),
    /// The weights of the version before the newest.
    Previous,
}

/// The name of a tensor in the files.
pub(crate) fn tensor_name(param: &str, role: Role) -> String {
    match role {
        Role::Value if param.contains('@') || param == "__metadata__" => format!("{param}@value"),
        Role::Value => param.to_owned(),
        Role::Moment(index) => format!("{param}@moment.{index}"),
        Role::Previous => format!("{param}@previous"),
    }
}

/// A tensor of a manifest that was checked.
#[derive(Debug, Clone)]
pub(crate) struct PlacedTensor {
    pub name: String,
    pub file: usize,
    pub dtype: DType,
    pub shape: Shape,
    /// Where it begins in its file.
    pub offset: u64,
    pub bytes: u64,
    pub hash: Hash128,
}

impl Manifest {
    /// The bytes of the file, its hash put in.
    pub fn seal(mut self) -> Result<Vec<u8>> {
        self.hash = self.own_hash()?.to_string();
        let bytes = self.to_bytes()?;
        if bytes.len() as u64 > LIMITS.bytes {
            let what = format!(
                "the manifest would have {} bytes, the most is {}; write shorter notes",
                bytes.len(),
                LIMITS.bytes
            );
            return Err(Error::config("checkpoint", what));
        }
        Ok(bytes)
    }

    fn to_bytes(&self) -> Result<Vec<u8>> {
        let unwritten = |error: serde_json::Error| {
            let what = format!("the manifest cannot be written ({error})");
            Error::config("checkpoint", what)
        };
        let mut bytes = serde_json::to_vec(self).map_err(unwritten)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    fn own_hash(&self) -> Result<Hash128> {
        let mut unsealed = self.clone();
        unsealed.hash.clear();
        Ok(Hash128::of(&unsealed.to_bytes()?))
    }

    /// Reads the manifest of a folder, and where its tensors lie.
    pub fn read(dir: &Path) -> Result<(Self, Vec<PlacedTensor>)> {
        let path = dir.join(MANIFEST);
        let bytes = small::read(&path, LIMITS)?;
        Self::parse(&path, &bytes)
    }

    /// The same from the bytes of the file; `path` is only for messages.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<(Self, Vec<PlacedTensor>)> {
        check_format(path, bytes)?;
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| damaged(path, &format!("({})", one_line(&error.to_string()))))?;
        if manifest.hash != manifest.own_hash()?.to_string() || manifest.to_bytes()? != bytes {
            return Err(damaged(
                path,
                "(its bytes do not have the hash that it states)",
            ));
        }
        let tensors = manifest.place(path)?;
        Ok((manifest, tensors))
    }

    /// Checks every tensor and file against the others.
    fn place(&self, path: &Path) -> Result<Vec<PlacedTensor>> {
        if self.scaler.as_ref().is_some_and(|s| s.state().is_none()) {
            return Err(damaged(path, "(its loss scale is no number that can be)"));
        }
        if !self.counters.are_possible() {
            return Err(damaged(path, "(its counters contradict each other)"));
        }
        let mut ends = Vec::with_capacity(self.files.len());
        for (index, file) in self.files.iter().enumerate() {
            if file.name != file_name(index) {
                let what = format!("(it names a file {})", shown(&file.name));
                return Err(damaged(path, &what));
            }
            ends.push(file.header_bytes);
        }
        let mut names = HashSet::new();
        let mut placed = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let place = (names.insert(tensor.name.as_str()))
                .then(|| tensor.place(&mut ends))
                .flatten();
            let impossible = || {
                let what = format!("(tensor {} cannot be)", shown(&tensor.name));
                damaged(path, &what)
            };
            placed.push(place.ok_or_else(impossible)?);
        }
        for (file, end) in self.files.iter().zip(ends) {
            if file.bytes != end || Hash128::parse(&file.header_hash).is_none() {
                let what = format!("({} cannot be as long as it says)", file.name);
                return Err(damaged(path, &what));
            }
        }
        Ok(placed)
    }
}

impl SavedTensor {
    /// Where it lies, behind what is in its file before it.
    fn place(&self, ends: &mut [u64]) -> Option<PlacedTensor> {
        let dtype = parse_dtype(&self.dtype)?;
        let shape = Shape::new(&self.shape).ok()?;
        let bytes = (shape.numel() as u64).checked_mul(dtype.size() as u64)?;
        let end = ends.get_mut(self.file)?;
        let offset = *end;
        *end = offset.checked_add(bytes)?;
        Some(PlacedTensor {
            name: self.name.clone(),
            file: self.file,
            dtype,
            shape,
            offset,
            bytes,
            hash: Hash128::parse(&self.hash)?,
        })
    }
}

/// Refuses formats that this program does not know, before the rest is looked at.
fn check_format(path: &Path, bytes: &[u8]) -> Result<()> {
    #[derive(Deserialize)]
    struct Format {
        format: u64,
    }
    let found: Format = serde_json::from_slice(bytes)
        .map_err(|error| damaged(path, &format!("({})", one_line(&error.to_string()))))?;
    match found.format {
        FORMAT => Ok(()),
        0 => Err(damaged(path, "(format 0 was never written)")),
        newer => {
            let what = format!(
                "has format {newer}, and this program reads formats up to {FORMAT}; use a newer \
                 roundpipe, or another checkpoint"
            );
            Err(Error::checkpoint(path, what))
        }
    }
}

/// The error of a manifest that is not as it was written.
fn damaged(path: &Path, why: &str) -> Error {
    let what = format!("is not as it was written {why}; use another checkpoint");
    Error::checkpoint(path, what)
}

fn parse_dtype(name: &str) -> Option<DType> {
    let all = [
        DType::F64,
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::I64,
        DType::I32,
        DType::U32,
        DType::U8,
        DType::Bool,
    ];
    all.into_iter().find(|dtype| dtype.name() == name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        Counters, FORMAT, Manifest, Role, SavedFile, SavedScaler, SavedTensor, tensor_name,
    };
    use crate::scaler::ScalerState;

    fn manifest() -> Manifest {
        Manifest {
            format: FORMAT,
            writer: "roundpipe 0".to_owned(),
            counters: Counters {
                steps: 3,
                ..Counters::default()
            },
            scaler: Some(SavedScaler::new(ScalerState::default(), 0.1)),
            params: Vec::new(),
            frozen: Vec::new(),
            buffers: Vec::new(),
            files: Vec::new(),
            tensors: Vec::new(),
            notes: "a \"note\"\n".to_owned(),
            hash: String::new(),
        }
    }

    /// What is written is read, and every changed bit is found.
    #[test]
    fn no_bit_of_a_manifest_changes_unnoticed() {
        let path = Path::new("m.json");
        let bytes = manifest().seal().unwrap();
        let (read, _) = Manifest::parse(path, &bytes).unwrap();
        assert_eq!(read.notes, manifest().notes);
        assert_eq!(
            read.scaler.unwrap().state(),
            Some((ScalerState::default(), 0.1))
        );
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            assert!(Manifest::parse(path, &flipped).is_err(), "bit {at}");
        }
        for len in 0..bytes.len() {
            assert!(Manifest::parse(path, &bytes[..len]).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], b" "].concat();
        assert!(Manifest::parse(path, &longer).is_err());
    }

    /// Who writes a manifest can give it a hash that is right. What it says is checked all the same.
    #[test]
    fn a_sealed_manifest_is_not_believed() {
        let path = Path::new("m.json");
        let tensor = |shape: &[usize], file| SavedTensor {
            name: "w".to_owned(),
            file,
            dtype: "f32".to_owned(),
            shape: shape.to_vec(),
            hash: "0".repeat(32),
        };
        let file = |name: &str, bytes, header_bytes| SavedFile {
            name: name.to_owned(),
            bytes,
            header_bytes,
            header_hash: "0".repeat(32),
        };
        let name = "state-00001.safetensors";
        let sound = |m: &mut Manifest| {
            m.files = vec![file(name, 32, 8)];
            m.tensors = vec![tensor(&[2, 3], 0)];
        };
        let parse = |change: &dyn Fn(&mut Manifest)| {
            let mut changed = manifest();
            sound(&mut changed);
            change(&mut changed);
            Manifest::parse(path, &changed.seal().unwrap())
        };
        parse(&|_| ()).unwrap();
        let large = usize::MAX / 2;
        let changes: [&dyn Fn(&mut Manifest); 15] = [
            &|m| m.files = vec![file("../../etc/passwd", 32, 8)],
            &|m| m.files = vec![file(name, 33, 8)],
            &|m| m.files = vec![file(name, 32, u64::MAX - 3)],
            &|m| m.files[0].header_hash.clear(),
            &|m| m.tensors = vec![tensor(&[2, 3], 1)],
            &|m| m.tensors = vec![tensor(&[2, 3], usize::MAX)],
            &|m| m.tensors = vec![tensor(&[large, large], 0)],
            &|m| m.tensors = vec![tensor(&[large, large, 0], 0)],
            &|m| m.tensors.push(tensor(&[0], 0)),
            &|m| m.tensors[0].dtype = "f33".to_owned(),
            &|m| m.tensors[0].hash = "g".repeat(32),
            &|m| m.counters.lag = 2,
            &|m| m.counters.steps = u64::MAX,
            &|m| m.scaler = Some(SavedScaler::new(ScalerState::default(), f64::NAN)),
            &|m| {
                let scale = 0.0;
                let state = ScalerState {
                    scale,
                    ..ScalerState::default()
                };
                m.scaler = Some(SavedScaler::new(state, 1.0));
            },
        ];
        for (at, change) in changes.iter().enumerate() {
            let error = parse(*change).unwrap_err().to_string();
            assert!(error.contains("not as it was written"), "{at}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    /// A newer format is refused by its number, whatever else is in it.
    #[test]
    fn a_newer_format_is_refused_by_name() {
        let newer = br#"{"format":7,"something":{"else":[]}}"#;
        let error = Manifest::parse(Path::new("m.json"), newer).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("format 7") && text.contains("newer roundpipe"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
    }

    /// Parameters may have any name, also one that looks like a moment's.
    #[test]
    fn no_two_tensors_have_one_name() {
        let roles = [
            Role::Value,
            Role::Moment(0),
            Role::Moment(1),
            Role::Previous,
        ];
        let params = [
            "a",
            "a@moment.0",
            "a@value",
            "a@previous@value",
            "@",
            "__metadata__",
        ];
        let names = params
            .iter()
            .flat_map(|p| roles.map(|role| tensor_name(p, role)));
        let mut names: Vec<String> = names.collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(!names.contains(&"__metadata__".to_owned()));
    }
}
