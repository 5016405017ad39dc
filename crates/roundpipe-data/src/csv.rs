//! CSV as RFC 4180 has it: fields between delimiters, a field in quotes may have delimiters and line
//! ends in it, and a doubled quote there is one quote. A quote in the middle of a plain field is a
//! character, as in Python.

/// What a byte does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It belongs to the field.
    Keep,
    /// It is a quote or a line end's carriage return: no part of the field.
    Skip,
    FieldEnd,
    RecordEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    FieldStart,
    Plain,
    Quoted,
    /// Behind a quote that ends the field or is the first of two.
    QuoteSeen,
}

/// A reader that is fed bytes.
#[derive(Debug)]
pub(crate) struct Csv {
    place: Place,
    delimiter: u8,
}

impl Csv {
    pub fn new(delimiter: u8) -> Self {
        Self {
            place: Place::FieldStart,
            delimiter,
        }
    }

    /// Whether the bytes so far end within quotes.
    pub fn is_quoted(&self) -> bool {
        self.place == Place::Quoted
    }

    pub fn step(&mut self, byte: u8) -> Step {
        let (place, step) = match (self.place, byte) {
            (Place::Quoted, b'"') => (Place::QuoteSeen, Step::Skip),
            (Place::Quoted, _) => (Place::Quoted, Step::Keep),
            (Place::QuoteSeen, b'"') => (Place::Quoted, Step::Keep),
            (_, b'\n') => (Place::FieldStart, Step::RecordEnd),
            (_, byte) if byte == self.delimiter => (Place::FieldStart, Step::FieldEnd),
            (Place::FieldStart, b'"') => (Place::Quoted, Step::Skip),
            (_, _) => (Place::Plain, Step::Keep),
        };
        self.place = place;
        step
    }
}

/// The fields of one record, without its line end.
pub(crate) fn fields(record: &str, delimiter: u8) -> Vec<String> {
    let record = record.strip_suffix('\r').unwrap_or(record);
    let mut csv = Csv::new(delimiter);
    let mut fields = vec![Vec::new()];
    for &byte in record.as_bytes() {
        let last = fields.len() - 1;
        match csv.step(byte) {
            Step::Keep => fields[last].push(byte),
            Step::FieldEnd | Step::RecordEnd => fields.push(Vec::new()),
            Step::Skip => {}
        }
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    fields.into_iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::fields;

    #[test]
    fn fields_of_records() {
        assert_eq!(fields("a,b,", b','), ["a", "b", ""]);
        assert_eq!(
            fields("\"a,\"\"b\"\"\n\",it\"s,\u{e9}\r", b','),
            ["a,\"b\"\n", "it\"s", "\u{e9}"]
        );
        assert_eq!(fields("a,b\tc", b'\t'), ["a,b", "c"]);
        assert_eq!(fields("", b','), [""]);
    }
}
