//! One file of examples: what it is, where its rows are, and how one is read.
//!
//! # Invariants
//! - A row is read by its number alone, by any thread, and gives the same each time.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use crate::csv;
use crate::error::{Error, Result};
use crate::format::{Example, Format, Refusal, object};
use crate::input::ending;
use crate::parquet;
use crate::scan::{Array, CsvRows, Fault, Lines, MOST_FILE_BYTES, Pieces, RowList, Scanner};
use crate::storage::{Compression, Storage, unreadable};

/// The most rows of a file.
const MOST_ROWS: usize = u32::MAX as usize;

/// How rows stand in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// One JSON object per line.
    JsonLines,
    /// One JSON array of objects.
    JsonArray,
    /// A header and records.
    Csv,
    /// A table in columns.
    Parquet,
    /// Plain text.
    Text,
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::JsonLines => "JSON lines",
            Self::JsonArray => "JSON array",
            Self::Csv => "CSV",
            Self::Parquet => "parquet",
            Self::Text => "text",
        })
    }
}

/// An open file of examples.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub path: PathBuf,
    pub kind: FileKind,
    pub compression: Option<Compression>,
    pub format: Format,
    pub bytes: u64,
    storage: Storage,
    rows: RowList,
    /// Of CSV: the delimiter and the names of columns.
    table: Option<(u8, Vec<String>)>,
    most_row_bytes: usize,
}

impl DataFile {
    /// Opens a file, finds its rows and the format of the first.
    pub fn open(
        path: &Path,
        format: Option<Format>,
        scratch: &Path,
        most_row_bytes: usize,
    ) -> Result<Self> {
        let (storage, compression) = Storage::open(path, scratch)?;
        if storage.bytes >= MOST_FILE_BYTES {
            return Err(Error::file(path, "has more than 1 TiB; split it"));
        }
        let (kind, start) = detect(path, &storage)?;
        let storage = match kind {
            FileKind::Parquet => parquet::to_lines(path, &storage, scratch)?,
            _ => storage,
        };
        let delimiter = if ending(path) == "tsv" { b'\t' } else { b',' };
        let scanner = match kind {
            FileKind::JsonLines | FileKind::Parquet => Scanner::Lines(Lines::new(start)),
            FileKind::JsonArray => Scanner::Array(Array::new()),
            FileKind::Csv => Scanner::Csv(CsvRows::new(start, delimiter)),
            FileKind::Text => Scanner::Pieces(Pieces::new(start)),
        };
        let mut rows = scan(path, &storage, scanner)?;
        let table = match kind {
            FileKind::Csv => rows.take_first().map(|place| (delimiter, place)),
            _ => None,
        };
        let mut file = Self {
            path: path.to_path_buf(),
            kind,
            compression,
            format: format.unwrap_or(Format::Text),
            bytes: storage.bytes,
            storage,
            rows,
            table: None,
            most_row_bytes,
        };
        if let Some((delimiter, place)) = table {
            let header = file
                .text(place)
                .map_err(|why| Error::file(path, format!("its header {why}")))?;
            file.table = Some((delimiter, csv::fields(&header, delimiter)));
        }
        if file.rows.len() == 0 {
            return Err(Error::file(path, "has no rows; give a file that has some"));
        }
        if file.kind == FileKind::Text {
            file.format = Format::Text;
        } else if format.is_none() {
            file.format = file
                .object(0)
                .and_then(|row| Format::detect(&row))
                .map_err(|what| file.refuse(0, what))?;
        }
        Ok(file)
    }

    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// What a row says.
    pub fn example(&self, row: usize) -> Result<Example> {
        self.read(row).map_err(|what| self.refuse(row, what))
    }

    /// An error that names a row.
    pub fn refuse(&self, row: usize, what: impl Into<String>) -> Error {
        Error::Row {
            path: self.path.clone(),
            row: row as u64 + 1,
            what: what.into(),
        }
    }

    /// A number that depends on the bytes of a row alone.
    pub fn hash(&self, row: usize) -> Result<u64> {
        let (offset, length) = self.rows.place(row);
        let mut bytes = vec![0; length];
        let read = self.storage.read_at(&mut bytes, offset);
        read.map_err(|e| unreadable(&self.path, &e))?;
        Ok(crate::hash::bytes(bytes.trim_ascii_end()))
    }

    fn read(&self, row: usize) -> Result<Example, Refusal> {
        if self.kind == FileKind::Text {
            let text = self.text(self.rows.place(row))?;
            let ends = row + 1 == self.rows.len();
            return Ok(Example::Text { text, ends });
        }
        self.format.read(self.object(row)?)
    }

    fn object(&self, row: usize) -> Result<Map<String, Json>, Refusal> {
        let place = self.rows.place(row);
        let Some((delimiter, columns)) = &self.table else {
            return object(&self.bytes(place)?);
        };
        let fields = csv::fields(&self.text(place)?, *delimiter);
        if fields.len() != columns.len() {
            let (has, wants) = (fields.len(), columns.len());
            return Err(format!(
                "has {has} fields, the header {wants}; put fields with commas or line ends in quotes"
            ));
        }
        let pairs = columns.iter().cloned().zip(fields);
        Ok(pairs
            .map(|(name, field)| (name, Json::String(field)))
            .collect())
    }

    fn text(&self, place: (u64, usize)) -> Result<String, Refusal> {
        String::from_utf8(self.bytes(place)?)
            .map_err(|_| "is not UTF-8; save the file as UTF-8".to_owned())
    }

    fn bytes(&self, (offset, length): (u64, usize)) -> Result<Vec<u8>, Refusal> {
        if length > self.most_row_bytes {
            let most = self.most_row_bytes;
            return Err(format!("has more than {most} bytes; split or remove it"));
        }
        let mut bytes = vec![0; length];
        self.storage.read_at(&mut bytes, offset).map_err(|e| {
            format!("cannot be read any more ({e}); do not change files while they are in use")
        })?;
        Ok(bytes)
    }
}

/// How rows stand in a file, and where the first can begin.
fn detect(path: &Path, storage: &Storage) -> Result<(FileKind, u64)> {
    let mut first = vec![0; storage.bytes.min(4096) as usize];
    let read = storage.read_at(&mut first, 0);
    read.map_err(|e| unreadable(path, &e))?;
    if first.starts_with(&[0xff, 0xfe]) || first.starts_with(&[0xfe, 0xff]) {
        return Err(Error::file(path, "is UTF-16; save it as UTF-8"));
    }
    if first.starts_with(b"PAR1") {
        return Ok((FileKind::Parquet, 0));
    }
    if first.starts_with(b"PK\x03\x04") {
        return Err(Error::file(path, "is a zip archive; unpack it first"));
    }
    let start = if first.starts_with(b"\xef\xbb\xbf") {
        3
    } else {
        0
    };
    let kind = match ending(path).as_str() {
        "jsonl" | "ndjson" | "json" => match first[start..].trim_ascii_start().first() {
            Some(b'[') => FileKind::JsonArray,
            _ => FileKind::JsonLines,
        },
        "csv" | "tsv" => FileKind::Csv,
        "txt" | "text" | "md" => FileKind::Text,
        "parquet" => {
            let what = "does not begin as a parquet file does; fetch it again";
            return Err(Error::file(path, what));
        }
        other => {
            let what = format!(
                "ends in `.{other}`, which says nothing about its rows; name it .jsonl, .json, .csv, .tsv, .txt or .parquet"
            );
            return Err(Error::file(path, what));
        }
    };
    Ok((kind, start as u64))
}

fn scan(path: &Path, storage: &Storage, mut scanner: Scanner) -> Result<RowList> {
    let mut rows = RowList::default();
    let refuse = |Fault { row, what }| Error::Row {
        path: path.to_path_buf(),
        row,
        what: what.into(),
    };
    let scanned = storage.blocks(path, |offset, bytes| {
        scanner.block(offset, bytes, &mut rows).map_err(refuse)?;
        if rows.len() > MOST_ROWS {
            let what = format!("has more than {MOST_ROWS} rows; split it");
            return Err(Error::file(path, what));
        }
        Ok(())
    })?;
    scanned?;
    scanner.end(storage.bytes, &mut rows).map_err(refuse)?;
    Ok(rows)
}
