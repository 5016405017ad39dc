//! Where the rows of a file are: lines, elements of a JSON array, CSV records, pieces of a text.
//!
//! A scanner looks at every byte once and keeps eight bytes per row, so that rows can be read in any
//! order. It does not parse what is inside a row.
//!
//! # Invariants
//! - Rows are in the order of the file and do not overlap.
//! - Memory does not grow with a row's length: a row of [`MOST_ROW_BYTES`] or more is noted with
//!   that length and refused when it is read.

use crate::csv::{Csv, Step};

/// The longest row whose length an index can hold.
pub(crate) const MOST_ROW_BYTES: u64 = (1 << 24) - 1;
/// The largest file.
pub(crate) const MOST_FILE_BYTES: u64 = 1 << 40;

/// A piece of text ends at a blank line behind so many bytes,
const PIECE_AT_BLANK: u64 = 8 << 10;
/// at any line end behind so many,
const PIECE_AT_LINE: u64 = 64 << 10;
/// and at any character behind so many.
const PIECE_AT_CHAR: u64 = 256 << 10;

/// The places of rows: offset and length in eight bytes each.
#[derive(Debug, Default)]
pub(crate) struct RowList {
    packed: Vec<u64>,
}

impl RowList {
    fn push(&mut self, start: u64, end: u64) {
        let length = (end - start).min(MOST_ROW_BYTES);
        self.packed.push(start << 24 | length);
    }

    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// First byte and length of a row.
    pub fn place(&self, row: usize) -> (u64, usize) {
        let packed = self.packed[row];
        (packed >> 24, (packed & MOST_ROW_BYTES) as usize)
    }

    /// Takes the first row away: a header.
    pub fn take_first(&mut self) -> Option<(u64, usize)> {
        let first = (!self.packed.is_empty()).then(|| self.place(0))?;
        self.packed.remove(0);
        Some(first)
    }

    pub fn finish(&mut self) {
        self.packed.shrink_to_fit();
    }
}

/// What a scanner found wrong, with the number of the row it was in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub row: u64,
    pub what: &'static str,
}

/// How a file is cut into rows.
#[derive(Debug)]
pub(crate) enum Scanner {
    Lines(Lines),
    Array(Array),
    Csv(CsvRows),
    Pieces(Pieces),
}

impl Scanner {
    /// Looks at the next bytes, which stand at `offset`.
    pub fn block(&mut self, offset: u64, bytes: &[u8], rows: &mut RowList) -> Result<(), Fault> {
        match self {
            Self::Lines(lines) => lines.block(offset, bytes, rows),
            Self::Array(array) => array.block(offset, bytes, rows)?,
            Self::Csv(csv) => csv.block(offset, bytes, rows)?,
            Self::Pieces(pieces) => pieces.block(offset, bytes, rows),
        }
        Ok(())
    }

    /// Ends the file at `offset`.
    pub fn end(&mut self, offset: u64, rows: &mut RowList) -> Result<(), Fault> {
        match self {
            Self::Lines(lines) => lines.line_end(offset, rows),
            Self::Array(array) => array.end(rows)?,
            Self::Csv(csv) => csv.end(offset, rows)?,
            Self::Pieces(pieces) => pieces.piece_end(offset, rows),
        }
        rows.finish();
        Ok(())
    }
}

/// Lines that are not blank.
#[derive(Debug)]
pub(crate) struct Lines {
    start: u64,
    has_text: bool,
}

impl Lines {
    pub fn new(start: u64) -> Self {
        Self {
            start,
            has_text: false,
        }
    }

    fn block(&mut self, offset: u64, bytes: &[u8], rows: &mut RowList) {
        // A byte order mark stands before the first line.
        let mark = self.start.saturating_sub(offset).min(bytes.len() as u64);
        let mark = if rows.len() == 0 && !self.has_text {
            mark
        } else {
            0
        };
        let mut rest = &bytes[mark as usize..];
        let mut at = offset + mark;
        while !rest.is_empty() {
            let line_end = rest.iter().position(|byte| *byte == b'\n');
            let line = &rest[..line_end.unwrap_or(rest.len())];
            self.has_text |= line.iter().any(|byte| !byte.is_ascii_whitespace());
            at += line.len() as u64;
            let Some(line_end) = line_end else { return };
            self.line_end(at, rows);
            at += 1;
            self.start = at;
            rest = &rest[line_end + 1..];
        }
    }

    fn line_end(&mut self, end: u64, rows: &mut RowList) {
        if self.has_text && end > self.start {
            rows.push(self.start, end);
        }
        self.has_text = false;
    }
}

/// Elements of one JSON array that is the whole file.
#[derive(Debug)]
pub(crate) struct Array {
    state: ArrayState,
    /// The first byte of the element under way, and the end of what it has so far.
    element: Option<(u64, u64)>,
    depth: u64,
    in_string: bool,
    escaped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArrayState {
    Before,
    /// An element may begin; behind a comma it must.
    Element {
        behind_comma: bool,
    },
    Inside,
    Behind,
}

impl Array {
    pub fn new() -> Self {
        Self {
            state: ArrayState::Before,
            element: None,
            depth: 0,
            in_string: false,
            escaped: false,
        }
    }

    fn block(&mut self, offset: u64, bytes: &[u8], rows: &mut RowList) -> Result<(), Fault> {
        for (at, &byte) in (offset..).zip(bytes) {
            if self.in_string {
                self.string_byte(byte);
                self.element = self.element.map(|(start, _)| (start, at + 1));
            } else if !byte.is_ascii_whitespace() {
                self.byte(at, byte, rows)?;
            }
        }
        Ok(())
    }

    fn string_byte(&mut self, byte: u8) {
        if self.escaped {
            self.escaped = false;
        } else if byte == b'\\' {
            self.escaped = true;
        } else if byte == b'"' {
            self.in_string = false;
        }
    }

    fn byte(&mut self, at: u64, byte: u8, rows: &mut RowList) -> Result<(), Fault> {
        let fault = |what| {
            let row = rows.len() as u64 + 1;
            Err(Fault { row, what })
        };
        match (self.state, byte) {
            // A byte order mark stands before the array.
            (ArrayState::Before, 0xef | 0xbb | 0xbf) => {}
            (ArrayState::Before, b'[') => {
                self.state = ArrayState::Element {
                    behind_comma: false,
                };
            }
            (ArrayState::Before, _) => return fault("the file is no JSON array; correct it"),
            (ArrayState::Behind, _) => {
                return fault("something follows the end of the array; remove it");
            }
            (ArrayState::Element { behind_comma }, b']') => {
                if behind_comma {
                    return fault("there is no row behind the last comma; remove the comma");
                }
                self.state = ArrayState::Behind;
            }
            (ArrayState::Element { .. }, b',' | b'}') => {
                return fault("a row is missing before this comma or bracket; correct it");
            }
            (ArrayState::Inside, b',') if self.depth == 0 => {
                self.element_end(rows);
                self.state = ArrayState::Element { behind_comma: true };
            }
            (ArrayState::Inside, b']') if self.depth == 0 => {
                self.element_end(rows);
                self.state = ArrayState::Behind;
            }
            (ArrayState::Inside, b'}') if self.depth == 0 => {
                return fault("a bracket closes nothing; correct it");
            }
            _ => self.inside(at, byte),
        }
        Ok(())
    }

    fn inside(&mut self, at: u64, byte: u8) {
        self.state = ArrayState::Inside;
        let start = self.element.map_or(at, |(start, _)| start);
        self.element = Some((start, at + 1));
        match byte {
            b'"' => self.in_string = true,
            b'[' | b'{' => self.depth += 1,
            b']' | b'}' => self.depth -= 1,
            _ => {}
        }
    }

    fn element_end(&mut self, rows: &mut RowList) {
        if let Some((start, end)) = self.element.take() {
            rows.push(start, end);
        }
    }

    fn end(&mut self, rows: &RowList) -> Result<(), Fault> {
        if self.state == ArrayState::Behind {
            return Ok(());
        }
        Err(Fault {
            row: rows.len() as u64 + 1,
            what: "the array does not end; the file is cut off, fetch it again",
        })
    }
}

/// CSV records, the header among them.
#[derive(Debug)]
pub(crate) struct CsvRows {
    csv: Csv,
    start: u64,
    has_text: bool,
}

impl CsvRows {
    pub fn new(start: u64, delimiter: u8) -> Self {
        Self {
            csv: Csv::new(delimiter),
            start,
            has_text: false,
        }
    }

    fn block(&mut self, offset: u64, bytes: &[u8], rows: &mut RowList) -> Result<(), Fault> {
        for (at, &byte) in (offset..).zip(bytes) {
            // A byte order mark stands before the first record.
            if at < self.start {
                continue;
            }
            if self.csv.step(byte) == Step::RecordEnd {
                self.record_end(at, rows);
                self.start = at + 1;
                continue;
            }
            self.has_text |= !byte.is_ascii_whitespace();
            if self.csv.is_quoted() && at - self.start > MOST_ROW_BYTES {
                return Err(Fault {
                    row: rows.len() as u64,
                    what: "a quote is opened and not closed within 16 MiB; close it",
                });
            }
        }
        Ok(())
    }

    fn record_end(&mut self, end: u64, rows: &mut RowList) {
        if self.has_text && end > self.start {
            rows.push(self.start, end);
        }
        self.has_text = false;
    }

    fn end(&mut self, offset: u64, rows: &mut RowList) -> Result<(), Fault> {
        if self.csv.is_quoted() {
            return Err(Fault {
                row: rows.len() as u64,
                what: "a quote is opened and not closed; close it",
            });
        }
        self.record_end(offset, rows);
        Ok(())
    }
}

/// Pieces of a text, cut where it pauses.
#[derive(Debug)]
pub(crate) struct Pieces {
    start: u64,
    has_text: bool,
    last: u8,
    blank_line: bool,
}

impl Pieces {
    pub fn new(start: u64) -> Self {
        Self {
            start,
            has_text: false,
            last: 0,
            blank_line: false,
        }
    }

    fn block(&mut self, offset: u64, bytes: &[u8], rows: &mut RowList) {
        for (at, &byte) in (offset..).zip(bytes) {
            if at < self.start {
                continue;
            }
            let length = at - self.start;
            let is_char_start = byte & 0xc0 != 0x80;
            let cut = (length >= PIECE_AT_BLANK && self.blank_line)
                || (length >= PIECE_AT_LINE && self.last == b'\n')
                || (length >= PIECE_AT_CHAR && is_char_start);
            if cut && byte != b'\n' && byte != b'\r' {
                self.piece_end(at, rows);
                self.start = at;
            }
            if byte == b'\n' {
                self.blank_line |= self.last == b'\n';
            } else if byte != b'\r' {
                self.blank_line = false;
                self.has_text |= !byte.is_ascii_whitespace();
            }
            if byte != b'\r' {
                self.last = byte;
            }
        }
    }

    fn piece_end(&mut self, end: u64, rows: &mut RowList) {
        if self.has_text && end > self.start {
            rows.push(self.start, end);
        }
        self.has_text = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a text, whatever blocks it comes in.
    fn rows(make: impl Fn() -> Scanner, text: &[u8]) -> Result<Vec<String>, Fault> {
        let mut all = Vec::new();
        for block in [1, 2, 3, 7, text.len().max(1)] {
            let mut list = RowList::default();
            let mut scanner = make();
            let mut result = Ok(());
            for (number, bytes) in text.chunks(block).enumerate() {
                result =
                    result.and_then(|()| scanner.block((number * block) as u64, bytes, &mut list));
            }
            let result = result.and_then(|()| scanner.end(text.len() as u64, &mut list));
            let found = result.map(|()| {
                let places = (0..list.len()).map(|row| list.place(row));
                let text = |(start, len): (u64, usize)| {
                    String::from_utf8_lossy(&text[start as usize..][..len]).into_owned()
                };
                places.map(text).collect::<Vec<_>>()
            });
            all.push(found);
        }
        assert!(all.iter().all(|found| *found == all[0]), "{all:?}");
        all.remove(0)
    }

    #[test]
    fn lines_without_blank_ones() {
        let lines = |text: &[u8]| rows(|| Scanner::Lines(Lines::new(0)), text).unwrap();
        assert_eq!(lines(b"a\n\n  \nb\r\nc"), ["a", "b\r", "c"]);
        assert_eq!(lines(b""), Vec::<String>::new());
        assert_eq!(lines(b"\n\n"), Vec::<String>::new());
    }

    #[test]
    fn elements_of_arrays() {
        let array = |text: &[u8]| rows(|| Scanner::Array(Array::new()), text);
        let text = br#" [ {"a": "x,]}\"", "b": [1, {"c": 2}]} , 5,[ ], "s" ] "#;
        let want = [
            r#"{"a": "x,]}\"", "b": [1, {"c": 2}]}"#,
            "5",
            "[ ]",
            "\"s\"",
        ];
        assert_eq!(array(text).unwrap(), want);
        assert_eq!(array(b"[]").unwrap(), Vec::<String>::new());
        let bad: [&[u8]; 9] = [
            b"", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"{}", b"[1] 2", b"[\"a]",
        ];
        for bad in bad {
            assert!(array(bad).is_err(), "{bad:?}");
        }
        assert_eq!(array(b"[1, 2, }]").unwrap_err().row, 3);
    }

    #[test]
    fn csv_records_with_line_ends_in_quotes() {
        let csv = |text: &[u8]| rows(|| Scanner::Csv(CsvRows::new(0, b',')), text);
        let text = b"a,b\n\"x\ny\",2\r\n\nit\"s,\"q\"\"q\"\n";
        let want = ["a,b", "\"x\ny\",2\r", "it\"s,\"q\"\"q\""];
        assert_eq!(csv(text).unwrap(), want);
        assert!(csv(b"a\n\"never").is_err());
    }

    /// A value with all that could mislead a scanner.
    fn random_json(seed: u64, depth: u64) -> serde_json::Value {
        let word = crate::hash::words(&[seed, depth]);
        let more = |i: u64| random_json(word ^ i, depth + 1);
        let count = word >> 32 & 3;
        match word % 6 {
            0 => serde_json::json!(word as u32),
            1 if depth < 4 => (0..count).map(more).collect(),
            2 if depth < 4 => {
                let pairs = (0..count).map(|i| (text(word ^ i), more(i)));
                serde_json::Value::Object(pairs.collect())
            }
            3 => serde_json::Value::Null,
            _ => text(word).into(),
        }
    }

    fn text(seed: u64) -> String {
        const PIECES: [&str; 10] = ["\"", "\\", ",", "]", "}", "{", "\n", "\u{e9}", "a", "\r\n"];
        let piece = |i| PIECES[crate::hash::words(&[seed, i]) as usize % PIECES.len()];
        (0..seed % 6).map(piece).collect()
    }

    /// Random arrays, in one line and in many, have the elements that a parser finds.
    #[test]
    fn random_arrays_have_their_elements() {
        for seed in 0..300 {
            let items: Vec<_> = (0..seed % 7)
                .map(|i| random_json(seed * 31 + i, 0))
                .collect();
            let texts = [
                serde_json::to_string(&items).unwrap(),
                serde_json::to_string_pretty(&items).unwrap(),
            ];
            for text in texts {
                let found = rows(|| Scanner::Array(Array::new()), text.as_bytes()).unwrap();
                let parsed: Vec<serde_json::Value> = found
                    .iter()
                    .map(|row| serde_json::from_str(row).unwrap())
                    .collect();
                assert_eq!(parsed, items, "seed {seed}: {text}");
            }
        }
    }

    /// Random tables have the fields that were written.
    #[test]
    fn random_tables_have_their_fields() {
        for seed in 0..300 {
            let field =
                |row, column| format!("x{}", text(crate::hash::words(&[seed, row, column])));
            let table: Vec<Vec<String>> = (0..1 + seed % 5)
                .map(|row| (0..3).map(|column| field(row, column)).collect())
                .collect();
            let quoted = |field: &String| format!("\"{}\"", field.replace('"', "\"\""));
            let line = |fields: &Vec<String>| {
                let fields: Vec<String> = fields.iter().map(quoted).collect();
                fields.join(",") + if seed % 2 == 0 { "\n" } else { "\r\n" }
            };
            let written: String = table.iter().map(line).collect();
            let found = rows(|| Scanner::Csv(CsvRows::new(0, b',')), written.as_bytes()).unwrap();
            let read: Vec<Vec<String>> = found
                .iter()
                .map(|record| crate::csv::fields(record, b','))
                .collect();
            assert_eq!(read, table, "seed {seed}: {written}");
        }
    }

    /// The pieces of a text are the text.
    #[test]
    fn pieces_lose_nothing() {
        let mut text = String::new();
        for number in 0..3000 {
            text += &format!("Line {number} with \u{e9}\u{1f600}.\n");
            if number % 50 == 0 {
                text += "\n";
            }
        }
        text += &"\u{e9}".repeat(400_000);
        let mut list = RowList::default();
        let mut scanner = Scanner::Pieces(Pieces::new(0));
        scanner.block(0, text.as_bytes(), &mut list).unwrap();
        scanner.end(text.len() as u64, &mut list).unwrap();
        let pieces: Vec<&str> = (0..list.len())
            .map(|row| list.place(row))
            .map(|(start, len)| &text[start as usize..][..len])
            .collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces.len() > 8, "{}", pieces.len());
        assert!(pieces[0].ends_with("\n\n") && pieces[0].len() >= PIECE_AT_BLANK as usize);
    }
}
