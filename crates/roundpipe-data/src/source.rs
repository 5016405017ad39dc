//! All files of a run as one list of rows: opened, described, split, and put in the order of an
//! epoch.
//!
//! Nothing here knows tokens. Rows stay in their files until they are asked for.
//!
//! # Invariants
//! - The same files and options give the same rows, split and orders.
//! - A row validates or trains, never both. With [`Validation::Fraction`], equal rows are on one
//!   side.

use std::collections::BinaryHeap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::file::{DataFile, FileKind};
use crate::format::{Example, Format};
use crate::hash;
use crate::input::{Input, expand};
use crate::order::Permutation;
use crate::scan::MOST_ROW_BYTES;
use crate::storage::Compression;
use crate::subset::Subset;

/// Which rows are kept for validation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Validation {
    /// None.
    #[default]
    None,
    /// About this share of the rows, 0 to 1, by a hash of what each row says.
    Fraction(f64),
    /// Exactly so many rows: those with the smallest hashes.
    Rows(u64),
}

/// How files are opened.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceOptions {
    /// The format of all rows; found from the first row of each file unless given.
    pub format: Option<Format>,
    /// Which rows are kept for validation.
    pub validation: Validation,
    /// Longer rows are refused; below 16 MiB.
    pub max_row_bytes: usize,
    /// The folder for unpacked files; the system's for temporary files unless given.
    pub scratch: Option<PathBuf>,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            format: None,
            validation: Validation::None,
            // A million tokens of English, of which a few rows are in memory at once.
            max_row_bytes: 4 << 20,
            scratch: None,
        }
    }
}

/// Files of examples, open.
///
/// ```no_run
/// use roundpipe_data::{Input, Source, SourceOptions, Validation};
///
/// # fn main() -> roundpipe_data::Result<()> {
/// let inputs = [Input::from("chats.jsonl"), Input::parse("books=0.5")?];
/// let options = SourceOptions {
///     validation: Validation::Fraction(0.01),
///     ..SourceOptions::default()
/// };
/// let source = Source::open(&inputs, &options)?;
/// for file in source.report() {
///     println!("{file}");
/// }
/// println!("{} rows train, {} validate", source.rows().len(), source.validation().len());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Source {
    train: Rows,
    validation: Rows,
}

/// What was found in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileReport {
    /// The file.
    pub path: PathBuf,
    /// How rows stand in it.
    pub kind: FileKind,
    /// How it is compressed.
    pub compression: Option<Compression>,
    /// The format of its rows.
    pub format: Format,
    /// Its rows, those for validation included.
    pub rows: u64,
    /// Its bytes, unpacked.
    pub bytes: u64,
    /// How often an epoch takes each row.
    pub weight: f64,
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            kind,
            format,
            rows,
            ..
        } = self;
        let mib = self.bytes as f64 / f64::from(1 << 20);
        write!(f, "{}: {rows} rows of {format}, {kind}", path.display())?;
        match self.compression {
            Some(Compression::Gzip) => write!(f, " in gzip")?,
            Some(Compression::Zstd) => write!(f, " in zstd")?,
            None => {}
        }
        write!(f, ", {mib:.1} MiB")?;
        if self.weight != 1.0 {
            write!(f, ", weight {}", self.weight)?;
        }
        Ok(())
    }
}

impl Source {
    /// Opens files and folders, finds their rows and formats, and splits them.
    ///
    /// # Errors
    /// [`Error`] that names the file, and the row where there is one.
    pub fn open(inputs: &[Input], options: &SourceOptions) -> Result<Self> {
        if options.max_row_bytes == 0 || options.max_row_bytes as u64 >= MOST_ROW_BYTES {
            let why = format!("is not between 1 and {}; choose less", MOST_ROW_BYTES - 1);
            return Err(Error::setting("max_row_bytes", why));
        }
        let temporary = std::env::temp_dir();
        let scratch: &Path = options.scratch.as_deref().unwrap_or(&temporary);
        let files: Vec<OpenFile> = expand(inputs)?
            .into_iter()
            .map(|input| {
                let most = options.max_row_bytes;
                let data = DataFile::open(&input.path, options.format, scratch, most)?;
                Ok(OpenFile {
                    data,
                    weight: input.weight,
                })
            })
            .collect::<Result<_>>()?;
        Self::assemble(Arc::new(files), options.validation)
    }

    /// The same files with other rows kept for validation, for a caller who wants to know first how
    /// many there are.
    ///
    /// # Errors
    /// [`Error::Setting`] when no row would be left to train on.
    pub fn with_validation(self, validation: Validation) -> Result<Self> {
        Self::assemble(self.train.shared.files.clone(), validation)
    }

    fn assemble(files: Arc<Vec<OpenFile>>, validation: Validation) -> Result<Self> {
        let members = split(&files, validation)?;
        let train = members.iter().zip(files.iter()).map(|(member, file)| {
            let member = member.as_ref();
            member.map(|kept| Subset::new(file.data.rows(), |row| !kept.has(row)))
        });
        let train = Rows::new(files.clone(), train.collect(), true);
        if train.is_empty() {
            let why = "leaves no row to train on; keep fewer";
            return Err(Error::setting("validation", why));
        }
        let none = |member: &Option<Subset>, file: &OpenFile| {
            let none = || Subset::new(file.data.rows(), |_| false);
            Some(member.clone().unwrap_or_else(none))
        };
        let kept = members.iter().zip(files.iter()).map(|(m, f)| none(m, f));
        let validation = Rows::new(files.clone(), kept.collect(), false);
        Ok(Self { train, validation })
    }

    /// The rows to train on.
    pub fn rows(&self) -> Rows {
        self.train.clone()
    }

    /// The rows that were kept for validation, each once.
    pub fn validation(&self) -> Rows {
        self.validation.clone()
    }

    /// What was found in each file.
    pub fn report(&self) -> Vec<FileReport> {
        let report = |file: &OpenFile| FileReport {
            path: file.data.path.clone(),
            kind: file.data.kind,
            compression: file.data.compression,
            format: file.data.format,
            rows: file.data.rows() as u64,
            bytes: file.data.bytes,
            weight: file.weight,
        };
        self.train.shared.files.iter().map(report).collect()
    }
}

/// The rows of each file that validate.
fn split(files: &[OpenFile], validation: Validation) -> Result<Vec<Option<Subset>>> {
    let refuse = |why: &str| Err(Error::setting("validation", why));
    let hashes = |file: &OpenFile| -> Result<Vec<u64>> {
        (0..file.data.rows())
            .map(|row| file.data.hash(row))
            .collect()
    };
    match validation {
        Validation::None => Ok(files.iter().map(|_| None).collect()),
        Validation::Fraction(share) => {
            if !(0.0..1.0).contains(&share) {
                return refuse("the share is not from 0 to below 1; 0.01 keeps a hundredth");
            }
            // Exact for every share: both sides are multiples of 2^-53.
            let is_kept = |hash: u64| ((hash >> 11) as f64) < share * (1u64 << 53) as f64;
            files
                .iter()
                .map(|file| {
                    let hashes = hashes(file)?;
                    Ok(Some(Subset::new(hashes.len(), |row| is_kept(hashes[row]))))
                })
                .collect()
        }
        Validation::Rows(count) => {
            let all: u64 = files.iter().map(|file| file.data.rows() as u64).sum();
            if count >= all {
                return refuse(&format!("{count} rows of {all} leave none to train on"));
            }
            let mut smallest = BinaryHeap::new();
            for (number, file) in files.iter().enumerate() {
                for (row, hash) in hashes(file)?.into_iter().enumerate() {
                    smallest.push((hash, number, row));
                    if smallest.len() as u64 > count {
                        smallest.pop();
                    }
                }
            }
            let kept: std::collections::HashSet<(usize, usize)> = smallest
                .into_iter()
                .map(|(_, file, row)| (file, row))
                .collect();
            let subset = |(number, file): (usize, &OpenFile)| {
                Some(Subset::new(file.data.rows(), |row| {
                    kept.contains(&(number, row))
                }))
            };
            Ok(files.iter().enumerate().map(subset).collect())
        }
    }
}

#[derive(Debug)]
struct OpenFile {
    data: DataFile,
    weight: f64,
}

/// Rows of all files as one list, in the order of an epoch; cloning shares the files.
#[derive(Debug, Clone)]
pub struct Rows {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    files: Arc<Vec<OpenFile>>,
    members: Vec<Option<Subset>>,
    /// Rows that an epoch takes of each file, and the sum of those before it.
    takes: Vec<(u64, u64)>,
    total: u64,
}

impl Rows {
    fn new(files: Arc<Vec<OpenFile>>, members: Vec<Option<Subset>>, weighted: bool) -> Self {
        let mut total = 0;
        let mut takes = Vec::new();
        for (file, member) in files.iter().zip(&members) {
            let rows = member.as_ref().map_or(file.data.rows(), Subset::len);
            let weight = if weighted { file.weight } else { 1.0 };
            let mut taken = (rows as f64 * weight).round() as u64;
            // A file that is given has a part in every epoch.
            if rows > 0 {
                taken = taken.max(1);
            }
            takes.push((taken, total));
            total += taken;
        }
        let shared = Shared {
            files,
            members,
            takes,
            total,
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Rows of an epoch, repeated ones counted as often as they come.
    pub fn len(&self) -> u64 {
        self.shared.total
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shared.total == 0
    }

    /// The order of an epoch: shuffled by a seed, or as in the files.
    pub fn order(&self, epoch: u64, shuffle: Option<u64>) -> Order {
        let shared = self.shared.clone();
        let Some(seed) = shuffle else {
            return Order {
                shared,
                all: None,
                within: Vec::new(),
            };
        };
        let within = (1..).zip(&shared.takes).map(|(purpose, (taken, _))| {
            let rows = shared.rows_of(purpose as usize - 1);
            // Repeats of a file differ only in the order of all rows; fewer rows than all are others
            // each epoch.
            (*taken < rows).then(|| Permutation::new(seed, epoch, purpose, rows))
        });
        Order {
            within: within.collect(),
            all: Some(Permutation::new(seed, epoch, 0, shared.total)),
            shared: shared.clone(),
        }
    }

    /// Bytes of the files, unpacked.
    pub fn bytes(&self) -> u64 {
        self.shared.files.iter().map(|file| file.data.bytes).sum()
    }

    /// Every row of the files once, in their order, whatever trains, validates or is weighted.
    /// [`Order::key`] is its place there.
    pub fn all(&self) -> Self {
        let files = self.shared.files.clone();
        let members = files.iter().map(|_| None).collect();
        Self::new(files, members, false)
    }

    /// A number that depends on what all rows of the files say. It reads them all.
    ///
    /// # Errors
    /// [`Error::File`] for a file that cannot be read any more.
    pub fn content_hash(&self) -> Result<u64> {
        let mut words = Vec::new();
        for file in self.shared.files.iter() {
            let mut of_file = file.data.rows() as u64;
            for row in 0..file.data.rows() {
                of_file = hash::words(&[of_file, file.data.hash(row)?]);
            }
            words.push(of_file);
        }
        Ok(hash::words(&words))
    }

    /// A number that changes when files, their rows or weights do.
    pub(crate) fn fingerprint(&self) -> u64 {
        let shared = &self.shared;
        let mut words = vec![shared.total];
        for (number, (taken, _)) in shared.takes.iter().enumerate() {
            let file = &shared.files[number].data;
            words.extend([
                *taken,
                shared.rows_of(number),
                file.rows() as u64,
                file.bytes,
            ]);
        }
        hash::words(&words)
    }
}

impl Shared {
    fn rows_of(&self, file: usize) -> u64 {
        let all = self.files[file].data.rows();
        self.members[file].as_ref().map_or(all, Subset::len) as u64
    }
}

/// The rows of one epoch by their place in it.
#[derive(Debug, Clone)]
pub struct Order {
    shared: Arc<Shared>,
    all: Option<Permutation>,
    within: Vec<Option<Permutation>>,
}

impl Order {
    /// What the row at `place` says.
    ///
    /// # Errors
    /// [`Error::Row`] for a row that cannot be read.
    ///
    /// # Panics
    /// For a place that is not below [`Rows::len`].
    pub fn example(&self, place: u64) -> Result<Example> {
        let (file, row) = self.find(place);
        self.shared.files[file].data.example(row)
    }

    /// An error about the row at `place`: file, row and `what`.
    ///
    /// # Panics
    /// As [`Order::example`].
    pub fn refuse(&self, place: u64, what: impl Into<String>) -> Error {
        let (file, row) = self.find(place);
        self.shared.files[file].data.refuse(row, what)
    }

    /// The number of the row at `place` among all rows of all files: the same in every order.
    ///
    /// # Panics
    /// As [`Order::example`].
    pub fn key(&self, place: u64) -> u64 {
        let (file, row) = self.find(place);
        let before = self.shared.files[..file].iter();
        let before: u64 = before.map(|file| file.data.rows() as u64).sum();
        before + row as u64
    }

    /// The file and the row of it that stand at `place`.
    fn find(&self, place: u64) -> (usize, usize) {
        assert!(place < self.shared.total, "no row at {place}");
        let place = self.all.as_ref().map_or(place, |all| all.at(place));
        let takes = &self.shared.takes;
        // Files of which nothing is taken start where the next one does, and are passed over.
        let file = takes.partition_point(|(_, before)| *before <= place) - 1;
        let nth = (place - takes[file].1) % self.shared.rows_of(file);
        let nth = match self.within.get(file) {
            Some(Some(within)) => within.at(nth),
            _ => nth,
        } as usize;
        let member = self.shared.members[file].as_ref();
        (file, member.map_or(nth, |member| member.nth(nth)))
    }
}
