//! Several files in one readable input.
//!
//! ```text
//! @@ config.json
//! {"model_type": "llama"}
//! @@ model.safetensors 0 0
//! {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
//! ```
//!
//! A safetensors file with two numbers is given by its header alone: the length before it is that
//! of the header plus the first number, and its data are as long as the tensors say plus the
//! second. Without numbers the part is the file, byte by byte. An input that does not begin with
//! `@@ ` is one file.

use serde_json::Value;

/// Longest data of a file that is given by its header.
const MOST_DATA: i64 = 1 << 16;
const MARK: &[u8] = b"@@ ";

/// One file of an input.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Name of the file.
    pub name: String,
    /// Where the part is a header: what is added to its length and to that of its data.
    pub header: Option<(i64, i64)>,
    /// Its bytes, or its header.
    pub text: Vec<u8>,
}

/// The files of an input, `first` where it is no bundle.
pub fn parts(input: &[u8], first: &str) -> Vec<Part> {
    if !input.starts_with(MARK) {
        return vec![Part {
            name: first.to_owned(),
            header: None,
            text: input.to_vec(),
        }];
    }
    let mut parts: Vec<Part> = Vec::new();
    for line in input.split_inclusive(|b| *b == b'\n') {
        match (line.strip_prefix(MARK), parts.last_mut()) {
            (Some(title), _) => parts.push(titled(title)),
            (None, Some(part)) => part.text.extend_from_slice(line),
            (None, None) => {}
        }
    }
    for part in &mut parts {
        // The line break before a mark belongs to the mark.
        if part.text.last() == Some(&b'\n') {
            part.text.pop();
        }
    }
    parts
}

fn titled(title: &[u8]) -> Part {
    let title = String::from_utf8_lossy(title);
    let mut words = title.split_whitespace();
    let name = words.next().unwrap_or_default().to_owned();
    let mut number = || words.next()?.parse().ok();
    let header = number().zip(number());
    Part {
        name,
        header,
        text: Vec::new(),
    }
}

/// The input that [`parts`] takes apart again.
pub fn join(parts: &[Part]) -> Vec<u8> {
    let mut out = Vec::new();
    for part in parts {
        out.extend_from_slice(MARK);
        out.extend_from_slice(part.name.as_bytes());
        if let Some((length, data)) = part.header {
            out.extend_from_slice(format!(" {length} {data}").as_bytes());
        }
        out.push(b'\n');
        out.extend_from_slice(&part.text);
        out.push(b'\n');
    }
    out
}

/// The files that a target takes; of two with one name, the first. A tool may not choose other
/// names: they are paths.
pub fn files(input: &[u8], known: &[&'static str]) -> Vec<(&'static str, Vec<u8>)> {
    let mut files: Vec<(&'static str, Vec<u8>)> = Vec::new();
    for part in parts(input, known[0]) {
        let Some(name) = known.iter().find(|name| **name == part.name) else {
            continue;
        };
        if files.iter().all(|(taken, _)| taken != name) {
            files.push((name, part.bytes()));
        }
    }
    files
}

impl Part {
    /// The bytes of the file.
    fn bytes(self) -> Vec<u8> {
        match self.header {
            Some((length, data)) => safetensors(&self.text, length, data),
            None => self.text,
        }
    }
}

/// A safetensors file with this header and as much data as its tensors ask for.
pub fn safetensors(header: &[u8], length: i64, data: i64) -> Vec<u8> {
    let asked = serde_json::from_slice(header).map_or(0, |json| data_end(&json));
    let data = asked
        .min(MOST_DATA)
        .saturating_add(data)
        .clamp(0, MOST_DATA);
    let mut out = (header.len() as u64)
        .wrapping_add_signed(length)
        .to_le_bytes()
        .to_vec();
    out.extend_from_slice(header);
    // Small numbers in every float type.
    out.extend((0..data).map(|i| [0x3c, 0x3d, 0x3e, 0xbd][i as usize % 4]));
    out
}

/// Where the last tensor ends.
fn data_end(header: &Value) -> i64 {
    let ends = header
        .as_object()
        .into_iter()
        .flatten()
        .map(|(_, tensor)| &tensor["data_offsets"][1]);
    ends.filter_map(Value::as_i64).max().unwrap_or(0)
}
