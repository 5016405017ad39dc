//! `metrics.jsonl`: a record a line, appended by a run, cut by its resume, read by tools.
//!
//! A line is appended with one write, so that a reader who comes in between sees whole lines, but for
//! a last one that a crash tore. [`read`] and [`Records`] skip that one, and records of kinds that
//! they do not know; any other line that is no record is an error that names it.
//!
//! # Invariants
//! - A write that fails leaves no part of a line in front of the next.
//! - [`MetricsFile::open_at`] replaces the file whole; until then the old one is untouched.
//! - No line longer than 4 MiB is held in memory, and [`read`] takes no file above 256 MiB.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use roundpipe_files::AtomicFile;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::files::AppendFile;
use crate::record::{KINDS, Record};

/// The longest line that is read. What is written is shorter: [`Record::cut_texts`].
const LINE_BYTES: usize = 4 << 20;

/// The largest file that [`read`] takes.
const FILE_BYTES: u64 = 256 << 20;

/// The metrics file of a run that goes on.
#[derive(Debug)]
pub struct MetricsFile {
    file: AppendFile,
}

impl MetricsFile {
    /// A new one. What `path` had before is gone.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        File::create(path).map_err(Error::io("write", path))?;
        Self::append_to(path)
    }

    /// That of a run which goes on from the checkpoint of `step`: without the records behind that
    /// step, without an end and without a torn last line, as if the run had stopped there. The first
    /// record to write is a [`Start`](crate::Start) with `resumed_at`. Where there is no file, a new
    /// one.
    ///
    /// # Errors
    /// What the file system says; a line that is no record.
    pub fn open_at(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        if !path.try_exists().map_err(Error::io("read", path))? {
            return Self::create(path);
        }
        let replacement = AtomicFile::create(path)?;
        let mut kept = BufWriter::new(replacement.file()?);
        let mut lines = Lines::open(path)?;
        while let Some(kind) = lines.next()? {
            let keep = match kind {
                Line::Known(record) => record.precedes(step),
                Line::Unknown { step: at } => at.is_none_or(|at| at <= step),
            };
            if keep {
                let line = [lines.bytes(), b"\n"].concat();
                replacement.check(kept.write_all(&line))?;
            }
        }
        replacement.check(kept.flush())?;
        replacement.finish()?;
        Self::append_to(path)
    }

    fn append_to(path: &Path) -> Result<Self> {
        let opened = AppendFile::open(path, false);
        let file = opened.map_err(Error::io("write", path))?;
        Ok(Self { file })
    }

    /// Appends a record. Texts beyond 256 KiB are cut.
    ///
    /// # Errors
    /// What the file system says; the file then has no part of the record.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let mut record = record.clone();
        record.cut_texts();
        let mut line = serde_json::to_vec(&record).expect("a record is JSON");
        line.push(b'\n');
        self.file.append(&line)
    }

    /// Waits until the disk has all records, as before a checkpoint that stands beside them.
    ///
    /// # Errors
    /// What the file system says.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

/// All records of a metrics file.
///
/// # Errors
/// What the file system says; a line that is no record; a file above 256 MiB, which [`Records`]
/// reads.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Record>> {
    let path = path.as_ref();
    let metadata = std::fs::metadata(path).map_err(Error::io("read", path))?;
    if metadata.len() > FILE_BYTES {
        return Err(Error::TooLarge {
            path: path.to_owned(),
            bytes: metadata.len(),
            limit: FILE_BYTES,
        });
    }
    Records::open(path)?.collect()
}

/// The records of a metrics file of any size, one after another. It ends behind an error.
#[derive(Debug)]
pub struct Records {
    lines: Lines,
    is_over: bool,
}

impl Records {
    /// Opens a file.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self {
            lines: Lines::open(path.as_ref())?,
            is_over: false,
        })
    }
}

impl Iterator for Records {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_over {
            match self.lines.next() {
                Ok(Some(Line::Known(record))) => return Some(Ok(*record)),
                Ok(Some(Line::Unknown { .. })) => {}
                Ok(None) => self.is_over = true,
                Err(error) => {
                    self.is_over = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

/// A line of a metrics file.
enum Line {
    /// A record.
    Known(Box<Record>),
    /// A record of a kind that a later version writes.
    Unknown { step: Option<u64> },
}

/// What every record has.
#[derive(Deserialize)]
struct Head {
    #[serde(rename = "type")]
    kind: String,
    step: Option<u64>,
}

/// Lines of a metrics file, with a bound on each.
#[derive(Debug)]
struct Lines {
    path: PathBuf,
    reader: BufReader<io::Take<File>>,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("read", path))?;
        // What a run appends while we read is for the next reader; a device has no size and no lines.
        let metadata = file.metadata().map_err(Error::io("read", path))?;
        Ok(Self {
            path: path.to_owned(),
            reader: BufReader::new(file.take(metadata.len())),
            line: Vec::new(),
            number: 0,
        })
    }

    /// The line that [`Lines::next`] read last, without its end.
    fn bytes(&self) -> &[u8] {
        self.line.strip_suffix(b"\n").unwrap_or(&self.line)
    }

    /// The next line that is not empty; nothing at the end or at a torn line.
    fn next(&mut self) -> Result<Option<Line>> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut bounded = (&mut self.reader).take(LINE_BYTES as u64 + 1);
            let read = bounded.read_until(b'\n', &mut self.line);
            if read.map_err(Error::io("read", &self.path))? == 0 {
                return Ok(None);
            }
            let is_whole = self.line.ends_with(b"\n");
            if !is_whole && self.line.len() > LINE_BYTES {
                return Err(self.error(format!("longer than {LINE_BYTES} bytes")));
            }
            if self.bytes().trim_ascii().is_empty() {
                continue;
            }
            return match self.parse() {
                Ok(line) => Ok(Some(line)),
                Err(_) if !is_whole => Ok(None),
                Err(why) => Err(self.error(format!("no record: {why}"))),
            };
        }
    }

    fn parse(&self) -> serde_json::Result<Line> {
        serde_json::from_slice(self.bytes())
            .map(|record| Line::Known(Box::new(record)))
            .or_else(|why| {
                let head: Head = serde_json::from_slice(self.bytes())?;
                if KINDS.contains(&head.kind.as_str()) {
                    return Err(why);
                }
                Ok(Line::Unknown { step: head.step })
            })
    }

    fn error(&self, why: String) -> Error {
        Error::Line {
            path: self.path.clone(),
            line: self.number,
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{End, Note, Start, Step};
    use std::fs;

    fn path(name: &str) -> PathBuf {
        let name = format!("roundpipe-metrics-{name}-{}.jsonl", std::process::id());
        std::env::temp_dir().join(name)
    }

    fn step(step: u64) -> Record {
        let loss = 1.0 / step as f64;
        Step {
            step,
            loss,
            ..Step::default()
        }
        .into()
    }

    fn start(resumed_at: Option<u64>) -> Record {
        Start {
            resumed_at,
            ..Start::default()
        }
        .into()
    }

    fn write_all(path: &Path, records: &[Record]) {
        let mut file = MetricsFile::create(path).expect("created");
        for record in records {
            file.write(record).expect("written");
        }
        file.sync().expect("on the disk");
    }

    /// Torn at any byte, a file has all the whole records before the tear, and goes on from there.
    #[test]
    fn torn_files_are_read_and_resumed() {
        let path = path("torn");
        let records = [start(None), step(1), step(2), step(3)];
        write_all(&path, &records);
        let whole = fs::read(&path).expect("read");
        let ends: Vec<usize> = (1..=whole.len())
            .filter(|end| whole[end - 1] == b'\n')
            .collect();
        // Every place near the end of a line, and some between: each resume waits for the disk.
        let near = |cut: &usize| ends.iter().any(|end| end.abs_diff(*cut) <= 2);
        for cut in (0..whole.len()).filter(|cut| near(cut) || cut % 41 == 0) {
            fs::write(&path, &whole[..cut]).expect("written");
            // A record is whole without the end of its line.
            let count = ends.iter().filter(|end| **end <= cut + 1).count();
            assert_eq!(read(&path).expect("read"), records[..count], "cut at {cut}");
            let mut file = MetricsFile::open_at(&path, 2).expect("opened");
            file.write(&start(Some(2))).expect("written");
            let mut wanted = records[..count.min(3)].to_vec();
            wanted.push(start(Some(2)));
            assert_eq!(read(&path).expect("read"), wanted, "cut at {cut}");
        }
        fs::remove_file(&path).expect("removed");
    }

    /// Resumed from a checkpoint, however often, the file reads as if the run had never gone further.
    #[test]
    fn resumed_files_forget_what_came_behind() {
        let path = path("resumed");
        let mut records = vec![start(None)];
        records.extend((1..=9).map(step));
        records.push(
            End {
                step: 9,
                ..End::default()
            }
            .into(),
        );
        write_all(&path, &records);
        for _ in 0..3 {
            let mut file = MetricsFile::open_at(&path, 5).expect("opened");
            file.write(&start(Some(5))).expect("written");
            file.write(&step(6)).expect("written");
        }
        let mut wanted = records[..6].to_vec();
        wanted.extend([start(Some(5)), step(6)]);
        assert_eq!(read(&path).expect("read"), wanted);
        fs::remove_file(&path).expect("removed");
        let mut file = MetricsFile::open_at(&path, 5).expect("no file is a new one");
        file.write(&step(6)).expect("written");
        assert_eq!(read(file.path()).expect("read"), [step(6)]);
        fs::remove_file(&path).expect("removed");
    }

    /// Kinds of records from later versions are skipped, and survive a resume if they are not behind
    /// it; broken lines are named.
    #[test]
    fn unknown_kinds_are_skipped_and_broken_lines_named() {
        let path = path("unknown");
        let note = Record::from(Note {
            step: 1,
            text: "ok".into(),
        });
        let line = serde_json::to_string(&note).expect("JSON");
        let early = r#"{"type":"energy","step":1,"joules":3}"#;
        let late = r#"{"type":"energy","step":7,"joules":3}"#;
        let plain = r#"{"type":"weather"}"#;
        fs::write(&path, format!("{early}\n\n{line}\n{late}\n{plain}\n")).expect("written");
        assert_eq!(read(&path).expect("read"), std::slice::from_ref(&note));
        MetricsFile::open_at(&path, 3).expect("opened");
        let kept = fs::read_to_string(&path).expect("read");
        assert_eq!(kept, format!("{early}\n{line}\n{plain}\n"));
        let broken = [
            "{",
            "null",
            "[]",
            r#"{"type":"note"}"#,
            r#"{"step":1}"#,
            "\u{0}",
        ];
        for broken in broken {
            fs::write(&path, format!("{line}\n{broken}\n{line}\n")).expect("written");
            let error = read(&path).expect_err(broken).to_string();
            assert!(error.contains("line 2"), "{error}");
            assert!(!error.contains('\n'), "{error}");
            let before = fs::read(&path).expect("read");
            MetricsFile::open_at(&path, 3).expect_err(broken);
            assert_eq!(fs::read(&path).expect("read"), before, "untouched");
        }
        fs::remove_file(&path).expect("removed");
    }

    /// Lines and files that no run writes are refused before they take memory.
    #[test]
    fn hostile_files_are_bounded() {
        let path = path("hostile");
        fs::write(&path, vec![b'['; LINE_BYTES + 10]).expect("written");
        let error = read(&path).expect_err("a long line").to_string();
        assert!(error.contains("longer"), "{error}");
        fs::write(&path, vec![b'['; LINE_BYTES - 10]).expect("written");
        assert_eq!(read(&path).expect("a torn line, not nested calls"), []);
        // A hole: the file takes no room on the disk.
        let file = File::create(&path).expect("created");
        file.set_len(FILE_BYTES + 1).expect("enlarged");
        let error = read(&path).expect_err("a large file").to_string();
        assert!(error.contains("Records"), "{error}");
        let mut records = Records::open(&path).expect("opened");
        assert!(records.next().expect("an error").is_err());
        assert!(records.next().is_none(), "it ends behind the error");
        fs::remove_file(&path).expect("removed");
        let error = read(&path).expect_err("no file").to_string();
        assert!(error.contains(path.to_str().expect("a path")), "{error}");
    }
}
