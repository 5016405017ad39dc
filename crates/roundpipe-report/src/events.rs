//! Event files for TensorBoard: scalars of steps and evaluations, and samples as text.
//!
//! A file is a row of frames, each an `Event` in protobuf:
//!
//! ```text
//! length u64 | masked crc32c of the length | event | masked crc32c of the event
//! ```
//! Only what TensorBoard needs of `Event`, `Summary` and `SummaryMetadata` is encoded, by hand; the
//! field numbers stand at the calls. A resumed run begins a new file whose first event says so, and
//! TensorBoard then forgets what the run before wrote behind the checkpoint.
//!
//! # Invariants
//! - A frame is appended with one write.
//! - The names of a folder's files sort in the order in which they were begun, also if the clock went
//!   back: TensorBoard reads them in that order.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::files::AppendFile;
use crate::record::{Record, Sample};

/// How the names of event files begin.
const PREFIX: &str = "events.out.tfevents.";

/// An event file of a run that goes on.
#[derive(Debug)]
pub struct EventFile {
    file: AppendFile,
}

impl EventFile {
    /// A new file in `folder`, which is made if it is not there. A run that goes on from a checkpoint
    /// names its step.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(folder: impl AsRef<Path>, resumed_at: Option<u64>) -> Result<Self> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        let newest = newest(folder).map_err(Error::io("read", folder))?;
        let time = wall_time();
        let file = begin(folder, (time as u64).max(newest.map_or(0, |at| at + 1)))?;
        let mut events = Self { file };
        events.append(&version_event(time))?;
        if let Some(step) = resumed_at {
            events.append(&session_event(time, step))?;
        }
        Ok(events)
    }

    /// Appends what a record has to show: a step's and an evaluation's numbers, a sample's text.
    /// Others write nothing.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.write_at(record, wall_time())
    }

    /// The same at a moment that is given, in seconds since 1970.
    fn write_at(&mut self, record: &Record, time: f64) -> Result<()> {
        let mut summary = Message::default();
        for (tag, value) in scalars(record) {
            summary.message(1, &scalar(tag, value));
        }
        let mut record = record.clone();
        record.cut_texts();
        if let Record::Sample(sample) = &record {
            summary.message(1, &text("sample", &sample_text(sample)));
        }
        let Some(step) = record.step().filter(|_| !summary.0.is_empty()) else {
            return Ok(());
        };
        let mut event = event_at(time);
        event.number(2, step);
        event.message(5, &summary);
        self.append(&event)
    }

    fn append(&mut self, event: &Message) -> Result<()> {
        self.file.append(&frame(&event.0))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

fn wall_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// The time in the name of the newest event file of a folder.
fn newest(folder: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let time = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let digits = time.and_then(|time| time.split('.').next());
        newest = newest.max(digits.and_then(|digits| digits.parse().ok()));
    }
    // A name with an absurd time must not push ours out of range.
    Ok(newest.filter(|time| *time < 1 << 40))
}

/// Makes a file that is not there yet.
fn begin(folder: &Path, time: u64) -> Result<AppendFile> {
    let mut time = time;
    loop {
        let path = folder.join(format!("{PREFIX}{time:010}.roundpipe"));
        match AppendFile::open(&path, true) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => time += 1,
            Err(error) => return Err(Error::io("write", &path)(error)),
        }
    }
}

/// What a record shows as curves.
fn scalars(record: &Record) -> Vec<(&'static str, f64)> {
    match record {
        Record::Step(step) => {
            let always = [
                ("train/loss", step.loss),
                ("train/lr", step.lr),
                ("train/epoch", step.epoch),
                ("train/tokens_per_s", step.tokens_per_s),
            ];
            let norm = step.grad_norm.map(|norm| ("train/grad_norm", norm));
            let share = step.limit_share.map(|share| ("train/limit_share", share));
            let margin = step.reward_margin.map(|m| ("train/reward_margin", m));
            let accuracy = step.reward_accuracy.map(|a| ("train/reward_accuracy", a));
            let some = [norm, share, margin, accuracy].into_iter().flatten();
            always.into_iter().chain(some).collect()
        }
        Record::Eval(eval) => {
            let is_pairs = eval.reward_accuracy.is_some();
            let perplexity = (!is_pairs).then_some(("eval/perplexity", eval.perplexity));
            let margin = eval.reward_margin.map(|m| ("eval/reward_margin", m));
            let accuracy = eval.reward_accuracy.map(|a| ("eval/reward_accuracy", a));
            let some = [perplexity, margin, accuracy].into_iter().flatten();
            [("eval/loss", eval.loss)].into_iter().chain(some).collect()
        }
        _ => vec![],
    }
}

/// A sample as Markdown that shows it letter by letter: TensorBoard renders texts.
fn sample_text(sample: &Sample) -> String {
    let indented = |text: &str| {
        let lines = text.lines().map(|line| format!("    {line}\n"));
        lines.collect::<String>()
    };
    let (prompt, answer) = (indented(&sample.prompt), indented(&sample.text));
    format!("**prompt**\n\n{prompt}\n**text**\n\n{answer}")
}

/// `Event` with `wall_time`.
fn event_at(time: f64) -> Message {
    let mut event = Message::default();
    event.double(1, time);
    event
}

/// The first event of a file: `file_version`.
fn version_event(time: f64) -> Message {
    let mut event = event_at(time);
    event.bytes(3, b"brain.Event:2");
    event
}

/// `SessionLog` with `START`: what older files have from its step on is not shown. The checkpoint's
/// own step stays.
fn session_event(time: f64, resumed_at: u64) -> Message {
    let mut log = Message::default();
    log.number(1, 1);
    let mut event = event_at(time);
    event.number(2, resumed_at.saturating_add(1));
    event.message(7, &log);
    event
}

/// `Summary.Value` with a `simple_value`.
fn scalar(tag: &str, value: f64) -> Message {
    let mut message = Message::default();
    message.bytes(1, tag.as_bytes());
    message.float(2, value as f32);
    message
}

/// `Summary.Value` with a tensor of one string, for the plugin `text`.
fn text(tag: &str, text: &str) -> Message {
    let mut plugin = Message::default();
    plugin.bytes(1, b"text");
    let mut metadata = Message::default();
    metadata.message(1, &plugin);
    // DATA_CLASS_TENSOR
    metadata.number(4, 2);
    let mut tensor = Message::default();
    // DT_STRING, a shape of no dimensions, string_val
    tensor.number(1, 7);
    tensor.message(2, &Message::default());
    tensor.bytes(8, text.as_bytes());
    let mut message = Message::default();
    message.bytes(1, tag.as_bytes());
    message.message(8, &tensor);
    message.message(9, &metadata);
    message
}

/// A message in protobuf's wire format, field by field.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u64, message: &Message) {
        self.bytes(field, &message.0);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

/// An event in its frame.
fn frame(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let mut frame = Vec::with_capacity(event.len() + 16);
    frame.extend(length);
    frame.extend(masked(&length).to_le_bytes());
    frame.extend(event);
    frame.extend(masked(event).to_le_bytes());
    frame
}

/// The checksum of a frame: rotated and shifted, because a checksum over bytes that hold their own
/// checksum is weak.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32 with Castagnoli's polynomial, reflected, byte by byte.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, step)
}

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            let polynomial = if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            crc = (crc >> 1) ^ polynomial;
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Eval, Note, Step};
    use std::path::PathBuf;

    /// A field of a message: its number and what it holds.
    #[derive(Debug, Clone, PartialEq)]
    enum Field {
        Number(u64),
        Double(f64),
        Float(f32),
        Bytes(Vec<u8>),
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (byte, rest) = bytes.split_first().expect("a byte");
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        value
    }

    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(count);
        *bytes = rest;
        taken
    }

    fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let field = match key & 7 {
                0 => Field::Number(varint(&mut bytes)),
                1 => Field::Double(f64::from_le_bytes(
                    take(&mut bytes, 8).try_into().expect("8"),
                )),
                2 => {
                    let count = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, count).to_vec())
                }
                5 => Field::Float(f32::from_le_bytes(
                    take(&mut bytes, 4).try_into().expect("4"),
                )),
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, field));
        }
        fields
    }

    fn inner(fields: &[(u64, Field)], number: u64) -> Vec<Vec<(u64, Field)>> {
        let messages = fields.iter().filter(|(field, _)| *field == number);
        messages
            .map(|(_, field)| match field {
                Field::Bytes(bytes) => super::tests::fields(bytes),
                other => panic!("{other:?} is no message"),
            })
            .collect()
    }

    /// The events of a file, every checksum checked.
    fn events(path: &Path) -> Vec<Vec<(u64, Field)>> {
        let bytes = fs::read(path).expect("an event file");
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4"));
        while !rest.is_empty() {
            let length = take(&mut rest, 8);
            assert_eq!(number(take(&mut rest, 4)), masked(length));
            let count = u64::from_le_bytes(length.try_into().expect("8")) as usize;
            let event = take(&mut rest, count);
            assert_eq!(number(take(&mut rest, 4)), masked(event));
            events.push(fields(event));
        }
        events
    }

    fn folder(name: &str) -> PathBuf {
        let name = format!("roundpipe-events-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    /// The vectors of RFC 3720, and the mask of a known checksum.
    #[test]
    fn checksums_have_known_values() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
        assert_eq!(masked(b""), 0xa282_ead8);
        assert_eq!(masked(b"123456789"), 0xc78a_b0e5);
    }

    /// A frame as TensorFlow writes it: the first 40 bytes of any event file but for the time.
    #[test]
    fn frames_have_known_bytes() {
        let event = version_event(0.0);
        let wanted = b"\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2";
        assert_eq!(event.0, wanted);
        let framed = frame(&event.0);
        assert_eq!(framed[..8], [24, 0, 0, 0, 0, 0, 0, 0]);
        // This checksum stands in every event file that TensorFlow writes.
        assert_eq!(framed[8..12], [0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(framed.len(), 8 + 4 + 24 + 4);
    }

    /// Scalars, their tags, steps and times are read back.
    #[test]
    fn scalars_are_read_back() {
        let folder = folder("scalars");
        let mut file = EventFile::create(&folder, None).expect("created");
        let step = Step {
            step: 300,
            loss: 2.5,
            lr: 1e-4,
            grad_norm: Some(f64::NAN),
            tokens_per_s: 1000.0,
            ..Step::default()
        };
        file.write_at(&step.into(), 17.25).expect("written");
        let note = Note {
            step: 300,
            text: "nothing to draw".into(),
        };
        file.write_at(&note.into(), 18.0).expect("written");
        let eval = Eval {
            step: 300,
            loss: 2.0,
            perplexity: 7.5,
            ..Eval::default()
        };
        file.write_at(&eval.into(), 19.0).expect("written");
        let events = events(file.path());
        assert_eq!(events.len(), 3, "a note is no event");
        assert_eq!(events[1][0], (1, Field::Double(17.25)));
        assert_eq!(events[1][1], (2, Field::Number(300)));
        let tagged = |event: &[(u64, Field)]| -> Vec<(String, f32)> {
            let summary = inner(event, 5).remove(0);
            let values = inner(&summary, 1).into_iter();
            values
                .map(|value| match value.as_slice() {
                    [(1, Field::Bytes(tag)), (2, Field::Float(number))] => {
                        (String::from_utf8(tag.clone()).expect("a tag"), *number)
                    }
                    other => panic!("{other:?}"),
                })
                .collect()
        };
        let step = tagged(&events[1]);
        assert_eq!(step[0], ("train/loss".into(), 2.5));
        assert_eq!(step[1], ("train/lr".into(), 1e-4));
        assert_eq!(step[3], ("train/tokens_per_s".into(), 1000.0));
        assert!(step[4].0 == "train/grad_norm" && step[4].1.is_nan());
        assert_eq!(step.len(), 5, "no share was measured");
        let eval = tagged(&events[2]);
        let wanted = [("eval/loss".into(), 2.0), ("eval/perplexity".into(), 7.5)];
        assert_eq!(eval, wanted);
        fs::remove_dir_all(&folder).expect("removed");
    }

    /// A sample is a tensor of one string for the text plugin, and no Markdown of its own.
    #[test]
    fn samples_are_texts() {
        let folder = folder("samples");
        let mut file = EventFile::create(&folder, None).expect("created");
        let sample = Sample {
            step: 0,
            prompt: "# one\ntwo".into(),
            text: "<b>".into(),
        };
        file.write(&sample.into()).expect("written");
        let event = events(file.path()).remove(1);
        let value = inner(&inner(&event, 5)[0], 1).remove(0);
        let tensor = inner(&value, 8).remove(0);
        assert_eq!(tensor[0], (1, Field::Number(7)));
        let wanted = b"**prompt**\n\n    # one\n    two\n\n**text**\n\n    <b>\n".to_vec();
        assert_eq!(tensor[2], (8, Field::Bytes(wanted)));
        let metadata = inner(&value, 9).remove(0);
        let plugin = inner(&metadata, 1).remove(0);
        assert_eq!(plugin, [(1, Field::Bytes(b"text".to_vec()))]);
        fs::remove_dir_all(&folder).expect("removed");
    }

    /// A resumed run has a file of its own that sorts behind the others and says where it goes on.
    #[test]
    fn resumed_runs_begin_a_file() {
        let folder = folder("resumed");
        let first = EventFile::create(&folder, None).expect("created");
        let future = wall_time() as u64 + 1_000_000;
        let ahead = folder.join(format!("{PREFIX}{future}.elsewhere"));
        fs::write(&ahead, b"").expect("written");
        let second = EventFile::create(&folder, Some(40)).expect("created");
        let third = EventFile::create(&folder, Some(41)).expect("created");
        let paths = [first.path(), &ahead, second.path(), third.path()];
        assert!(paths.is_sorted(), "{paths:?}");
        let events = events(second.path());
        assert_eq!(events.len(), 2);
        assert_eq!(events[1][1], (2, Field::Number(41)));
        assert_eq!(inner(&events[1], 7), [[(1, Field::Number(1))]]);
        fs::remove_dir_all(&folder).expect("removed");
    }
}
