//! The bytes of a GGUF file, version 3: header, keys with values, places of tensors, data.
//!
//! All numbers are little-endian. The data begin at a multiple of [`ALIGNMENT`], and so does every
//! tensor. This module knows no key and no tensor by name.
//!
//! # Invariants
//! - What [`Header`] says of a tensor's place is where [`Body`] puts it; another order or size of
//!   writes is a mistake of the caller, and asserted.

use std::fs::File;
use std::io::Write;

use roundpipe_files::AtomicFile;

use crate::error::{Error, Result};

/// What llama.cpp takes where no key says otherwise.
pub(super) const ALIGNMENT: u64 = 32;
const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// ggml's limit, its closing zero included.
const MOST_NAME: usize = 64;

/// A value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// A key with its value.
pub(super) type Key = (String, Value);

/// A tensor's name, shape and type as ggml numbers them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Info {
    pub name: String,
    /// Slowest dimension first, as everywhere here; files have the fastest first.
    pub dims: Vec<usize>,
    pub ggml_type: u32,
    pub bytes: u64,
}

/// Everything before the data.
#[derive(Debug)]
pub(super) struct Header {
    bytes: Vec<u8>,
    /// Where each tensor begins and how long it is, counted from the first byte of the data.
    places: Vec<(u64, u64)>,
}

impl Header {
    pub fn new(keys: &[Key], tensors: impl Iterator<Item = Info>) -> Result<Self> {
        let tensors: Vec<Info> = tensors.collect();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        put_count(&mut bytes, tensors.len());
        put_count(&mut bytes, keys.len());
        for (key, value) in keys {
            put_text(&mut bytes, key);
            put_value(&mut bytes, value);
        }
        let mut places = Vec::new();
        let mut at = 0u64;
        for tensor in &tensors {
            if tensor.name.len() >= MOST_NAME {
                let why = format!("ggml's names have at most {} bytes", MOST_NAME - 1);
                return Err(Error::argument(format!("tensor {}", tensor.name), why));
            }
            put_text(&mut bytes, &tensor.name);
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            for dim in tensor.dims.iter().rev() {
                put_count(&mut bytes, *dim);
            }
            bytes.extend(tensor.ggml_type.to_le_bytes());
            bytes.extend(at.to_le_bytes());
            places.push((at, tensor.bytes));
            at = (at + tensor.bytes).next_multiple_of(ALIGNMENT);
        }
        let aligned = bytes.len().next_multiple_of(ALIGNMENT as usize);
        bytes.resize(aligned, 0);
        Ok(Self { bytes, places })
    }
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend((count as u64).to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_count(out, text.len());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    out.extend(type_number(value).to_le_bytes());
    match value {
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::Text(text) => put_text(out, text),
        Value::Texts(texts) => {
            put_array(out, TEXT, texts.len());
            texts.iter().for_each(|text| put_text(out, text));
        }
        Value::I32s(values) => {
            put_array(out, I32, values.len());
            values
                .iter()
                .for_each(|value| out.extend(value.to_le_bytes()));
        }
        Value::F32s(values) => {
            put_array(out, F32, values.len());
            values
                .iter()
                .for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}

const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

fn type_number(value: &Value) -> u32 {
    match value {
        Value::U32(_) => U32,
        Value::F32(_) => F32,
        Value::Bool(_) => BOOL,
        Value::Text(_) => TEXT,
        Value::Texts(_) | Value::I32s(_) | Value::F32s(_) => ARRAY,
    }
}

fn put_array(out: &mut Vec<u8>, of: u32, count: usize) {
    out.extend(of.to_le_bytes());
    put_count(out, count);
}

/// The data of a file that is being written, tensor by tensor.
pub(super) struct Body<'a> {
    partial: &'a AtomicFile,
    file: File,
    header: &'a Header,
    /// Bytes of data so far.
    at: u64,
    next: usize,
}

impl<'a> Body<'a> {
    pub fn begin(partial: &'a AtomicFile, header: &'a Header) -> Result<Self> {
        let mut file = partial.file()?;
        partial.check(file.write_all(&header.bytes))?;
        Ok(Self {
            partial,
            file,
            header,
            at: 0,
            next: 0,
        })
    }

    /// The next tensor follows.
    pub fn begin_tensor(&mut self) -> Result<()> {
        let (start, _) = self.header.places[self.next];
        let zeros = [0; ALIGNMENT as usize];
        let gap = start.checked_sub(self.at).expect("tensors do not overlap");
        self.next += 1;
        self.write(&zeros[..gap as usize])
    }

    /// Bytes of the tensor that was begun.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.at += bytes.len() as u64;
        let (start, length) = self.header.places[self.next - 1];
        assert!(self.at <= start + length, "a tensor is longer than planned");
        self.partial.check(self.file.write_all(bytes))?;
        Ok(())
    }

    /// Closes the data; gives the size of the file.
    pub fn finish(mut self) -> Result<u64> {
        let places = &self.header.places;
        let end = places.last().map_or(0, |(start, length)| start + length);
        assert_eq!((self.at, self.next), (end, places.len()), "all is written");
        // Readers map whole blocks, so the last tensor is filled up as well.
        let zeros = [0; ALIGNMENT as usize];
        let gap = end.next_multiple_of(ALIGNMENT) - end;
        self.partial
            .check(self.file.write_all(&zeros[..gap as usize]))?;
        Ok(self.header.bytes.len() as u64 + end + gap)
    }
}

#[cfg(test)]
mod tests {
    use super::{Header, Info, Value};

    /// The smallest file, byte by byte, from the published layout.
    #[test]
    fn a_header_has_the_published_layout() {
        let keys = [
            ("a".to_owned(), Value::U32(7)),
            ("b".to_owned(), Value::Texts(vec!["xy".into()])),
            ("c".to_owned(), Value::Bool(true)),
        ];
        let info = Info {
            name: "t".into(),
            dims: vec![2, 3],
            ggml_type: 1,
            bytes: 12,
        };
        let next = Info {
            name: "u".into(),
            ..info.clone()
        };
        let header = Header::new(&keys, [info, next].into_iter()).unwrap();
        let mut want = b"GGUF".to_vec();
        let mut put = |bytes: &[u8]| want.extend_from_slice(bytes);
        put(&3u32.to_le_bytes());
        put(&2u64.to_le_bytes());
        put(&3u64.to_le_bytes());
        put(b"\x01\0\0\0\0\0\0\0a\x04\0\0\0\x07\0\0\0");
        put(b"\x01\0\0\0\0\0\0\0b\x09\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0xy");
        put(b"\x01\0\0\0\0\0\0\0c\x07\0\0\0\x01");
        for (name, at) in [(b't', 0u64), (b'u', 32)] {
            put(&1u64.to_le_bytes());
            put(&[name]);
            put(&2u32.to_le_bytes());
            put(&3u64.to_le_bytes());
            put(&2u64.to_le_bytes());
            put(&1u32.to_le_bytes());
            put(&at.to_le_bytes());
        }
        want.resize(want.len().next_multiple_of(32), 0);
        assert_eq!(header.bytes, want);
        assert_eq!(header.places, [(0, 12), (32, 12)]);
        let long = Info {
            name: "n".repeat(64),
            dims: vec![1],
            ggml_type: 0,
            bytes: 4,
        };
        assert!(Header::new(&[], [long].into_iter()).is_err());
    }
}
