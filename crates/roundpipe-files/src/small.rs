//! The one way to read a small file: settings, an index, a vocabulary.
//!
//! A folder comes from a stranger, so a `config.json` may be a pipe that nothing writes to, a device
//! without an end, or a hundred gigabytes. [`open`] opens regular files only and never waits for a
//! writer; [`read`] stops at the length that its [`FileLimits`] allow; [`parse_json`] stops at a
//! number of values, because a value in memory takes many times the bytes it has in a file.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Error, Result, unreadable};
use crate::text::{one_line, shown};

/// The most tensors of a file, and names in an index; a value in memory takes many times its bytes
/// in a file.
pub const MOST_NAMES: usize = 1 << 20;

/// How much of a file is read at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLimits {
    /// Its longest length, in bytes.
    pub bytes: u64,
    /// The most values, keys not counted, that its JSON may have.
    pub json_values: usize,
}

/// Opens a regular file, or the one that a link leads to, without waiting for a writer.
///
/// # Errors
/// [`Error::File`] for pipes, devices, sockets and folders, and for what cannot be read.
pub fn open(path: &Path) -> Result<(File, Metadata)> {
    let fail = |e: std::io::Error| Error::file(path, unreadable(path, &e));
    // Asked before opening, because opening alone can have effects on a device.
    refuse_special(path, &std::fs::metadata(path).map_err(fail)?)?;
    let file = options().open(path).map_err(fail)?;
    // The name may lead elsewhere by now; only what the open file says counts.
    let meta = file.metadata().map_err(fail)?;
    refuse_special(path, &meta)?;
    Ok((file, meta))
}

/// A pipe without a writer then opens at once instead of never; regular files do not care.
fn options() -> std::fs::OpenOptions {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    options
}

fn refuse_special(path: &Path, meta: &Metadata) -> Result<()> {
    if meta.is_file() {
        return Ok(());
    }
    Err(Error::file(
        path,
        "is not a file but a folder, pipe or device; pass or put a file there",
    ))
}

/// The bytes of a file.
///
/// # Errors
/// As [`open`], and for a file that is longer than its limits allow.
pub fn read(path: &Path, limits: FileLimits) -> Result<Vec<u8>> {
    let (file, meta) = open(path)?;
    let most = limits.bytes;
    let too_long = |has: String| {
        Error::file(
            path,
            format!("has {has} bytes, the most for such a file is {most}; download it again"),
        )
    };
    if meta.len() > most {
        return Err(too_long(meta.len().to_string()));
    }
    let mut bytes = Vec::new();
    // One more than allowed: some files are longer than they say.
    file.take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::file(path, unreadable(path, &e)))?;
    if bytes.len() as u64 > most {
        return Err(too_long(format!("more than {most}")));
    }
    Ok(bytes)
}

/// The bytes of a file that may be absent. A link that leads nowhere is a broken file, not an
/// absent one.
///
/// # Errors
/// As [`read`].
pub fn read_if_there(path: &Path, limits: FileLimits) -> Result<Option<Vec<u8>>> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        _ => read(path, limits).map(Some),
    }
}

/// The text of a file.
///
/// # Errors
/// As [`read`], and for bytes that are not UTF-8.
pub fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::file(path, "is not UTF-8; download it again"))
}

/// The JSON of a file.
///
/// # Errors
/// As [`read`] and [`parse_json`].
pub fn read_json(path: &Path, limits: FileLimits) -> Result<Value> {
    parse_json(path, &read(path, limits)?, limits)
}

/// JSON from the bytes of a file; `path` is only for messages. Nesting is bounded by the parser.
///
/// # Errors
/// [`Error::File`] when it is not JSON, or has more values than its limits allow.
pub fn parse_json(path: &Path, bytes: &[u8], limits: FileLimits) -> Result<Value> {
    let left = Cell::new(limits.json_values);
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let value = Bounded { left: &left }.deserialize(&mut parser);
    value
        .and_then(|value| parser.end().map(|()| value))
        .map_err(|e| {
            let e = one_line(&e.to_string());
            Error::file(
                path,
                format!("is not JSON that can be used ({e}); download it again"),
            )
        })
}

/// Builds a value while its budget of values lasts.
#[derive(Clone, Copy)]
struct Bounded<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        match self.left.get() {
            0 => return Err(de::Error::custom("it has too many values")),
            left => self.left.set(left - 1),
        }
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut items = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            items.insert(key, map.next_value_seed(self)?);
        }
        Ok(Value::Object(items))
    }
}

/// A map of strings to strings in which no name occurs twice.
#[derive(Debug)]
pub struct StringMap(pub Vec<(String, String)>);

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
                let mut seen = HashSet::new();
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{FileLimits, parse_json};

    const LIMITS: FileLimits = FileLimits {
        bytes: 16 << 20,
        json_values: 1 << 20,
    };

    /// What is parsed here is what serde_json parses, until there are too many values.
    #[test]
    fn json_is_read_as_it_is_until_it_is_too_much() {
        let path = Path::new("x.json");
        let text = r#"{"a":[1,-2,3.5,"é\n",null,true],"b":{},"a":{"c":18446744073709551615}}"#;
        let value = parse_json(path, text.as_bytes(), LIMITS).unwrap();
        assert_eq!(
            value,
            serde_json::from_str::<serde_json::Value>(text).unwrap()
        );
        let list = |count: usize| format!("[{}]", vec!["0"; count].join(","));
        let most = LIMITS.json_values;
        assert!(parse_json(path, list(most - 1).as_bytes(), LIMITS).is_ok());
        for bad in [
            list(most),
            "[".repeat(100_000),
            "[1] 2".into(),
            "[1".into(),
            String::new(),
        ] {
            let error = parse_json(path, bad.as_bytes(), LIMITS)
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with("x.json: is not JSON") && error.lines().count() == 1,
                "{error}"
            );
        }
    }
}
