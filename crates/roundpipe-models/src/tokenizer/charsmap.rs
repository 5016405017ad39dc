//! The table of characters of a `Precompiled` normalizer (SentencePiece's).
//!
//! In base64: the length of a trie in bytes (u32, little-endian), the trie as u32 units of a double
//! array, then the texts that replace what the trie finds, each ended by a zero byte. The library
//! follows the units wherever they lead, so every place that some text can lead to is visited here.

use std::collections::VecDeque;

/// The longest table as text; those of published models have about 320,000 characters.
pub(super) const MOST_TEXT: usize = 4 << 20;
/// The most bytes that a table may make of one byte of text; Unicode's own forms reach 11.
pub(super) const MOST_GROWTH: usize = 16;

/// Whether every search in the table ends inside it, at text, and at not too much of it.
pub(super) fn check(base64: &str) -> Result<(), String> {
    let bytes = decode(base64).ok_or("its charsmap is no base64")?;
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
        return Err("its charsmap is empty".into());
    };
    let length = u32::from_le_bytes(*length) as usize;
    if !length.is_multiple_of(4) || length == 0 || length > rest.len() {
        return Err(format!(
            "its charsmap says that its trie has {length} bytes of {}",
            rest.len()
        ));
    }
    let (trie, texts) = rest.split_at(length);
    let texts =
        std::str::from_utf8(texts).map_err(|_| "its charsmap has texts that are not UTF-8")?;
    let units: Vec<usize> = trie
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
        .collect();
    walk(&units, texts)
}

/// Visits every node that some text leads to, those of the shortest texts first.
fn walk(units: &[usize], texts: &str) -> Result<(), String> {
    let outside = || "its charsmap leads out of its trie".to_owned();
    let mut seen = vec![false; units.len()];
    let mut queue = VecDeque::from([(offset(units[0]), 1)]);
    while let Some((node, length)) = queue.pop_front() {
        for byte in 1..=255 {
            let at = node ^ byte;
            let unit = *units.get(at).ok_or_else(outside)?;
            if label(unit) != byte {
                continue;
            }
            let next = at ^ offset(unit);
            if has_leaf(unit) {
                let start = value(*units.get(next).ok_or_else(outside)?);
                let text = texts
                    .get(start..)
                    .ok_or("its charsmap names a text that it does not have")?;
                let text = text.split('\0').next().unwrap_or_default();
                if text.len() > MOST_GROWTH * length {
                    return Err(format!(
                        "its charsmap makes {} bytes of {length}",
                        text.len()
                    ));
                }
            }
            if let Some(seen) = seen.get_mut(next)
                && !std::mem::replace(seen, true)
            {
                queue.push_back((next, length + 1));
            } else if next >= units.len() {
                return Err(outside());
            }
        }
    }
    Ok(())
}

fn has_leaf(unit: usize) -> bool {
    unit >> 8 & 1 == 1
}

fn value(unit: usize) -> usize {
    unit & ((1 << 31) - 1)
}

fn label(unit: usize) -> usize {
    unit & (1 << 31 | 0xff)
}

fn offset(unit: usize) -> usize {
    unit >> 10 << ((unit & 1 << 9) >> 6)
}

/// Base64 of the standard alphabet with padding, in the one form that a writer gives it.
fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(u32::from(c - b'A')),
        b'a'..=b'z' => Some(u32::from(c - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(c - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let body = text.trim_end_matches('=');
    let padding = text.len() - body.len();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in body.as_bytes().chunks(4) {
        let mut word = 0;
        for c in four {
            word = word << 6 | digit(*c)?;
        }
        // Bits that belong to no byte are zero.
        let spare = four.len() * 6 % 8;
        if word & ((1 << spare) - 1) != 0 {
            return None;
        }
        let whole = word >> spare;
        let count = four.len() * 6 / 8;
        bytes.extend_from_slice(&whole.to_be_bytes()[4 - count..]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{check, decode};

    fn encode(bytes: &[u8]) -> String {
        let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut out = String::new();
        for three in bytes.chunks(3) {
            let word = three.iter().fold(0u32, |word, b| word << 8 | u32::from(*b))
                << (8 * (3 - three.len()));
            for i in 0..=three.len() {
                out.push(char::from(digits[(word >> (18 - 6 * i) & 63) as usize]));
            }
            out.push_str(&"="[..1].repeat(3 - three.len()));
        }
        out
    }

    /// A trie of 256 units in which 'a' leads to the text at `start`.
    fn table(start: u32, texts: &[u8]) -> Vec<u8> {
        let mut units = vec![0u32; 256];
        // The root's offset is 1: 'a' stands at 1 ^ 0x61, and its own offset leads to 2, where the
        // leaf is.
        units[0] = 1 << 10;
        units[1 ^ 0x61] = 0x61 | 1 << 8 | (1 ^ 0x61 ^ 2) << 10;
        units[2] = 1 << 31 | start;
        let mut bytes = 1024u32.to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend_from_slice(texts);
        bytes
    }

    #[test]
    fn base64_has_one_form() {
        for bytes in [
            &b""[..],
            b"a",
            b"ab",
            b"abc",
            &[0xff; 100],
            &[0, 0x80, 0x7f, 1],
        ] {
            assert_eq!(decode(&encode(bytes)).as_deref(), Some(bytes));
        }
        for text in [
            "a", "ab=", "ab=c", "abc", "====", "a===", "ab==cdef", "ab c", "é=", "YR==",
        ] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    /// A sound table passes, and the library makes of a text what it says; each broken one is
    /// refused.
    #[test]
    fn tables_are_followed_to_every_end() {
        let sound = table(0, "xyz\0é\0".as_bytes());
        check(&encode(&sound)).unwrap();
        let library = tokenizers::normalizers::Precompiled::from(&sound).unwrap();
        assert_eq!(library.normalize_string("bab"), "bxyzb");
        let mut cut = sound.clone();
        cut.truncate(500);
        let mut claims_more = sound.clone();
        claims_more[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut no_trie = sound.clone();
        no_trie[..4].fill(0);
        let mut outside = sound.clone();
        outside[4..8].copy_from_slice(&(1000u32 << 10).to_le_bytes());
        let cases = [
            (Vec::new(), "empty"),
            (vec![1, 2, 3], "empty"),
            (cut, "says that its trie"),
            (claims_more, "says that its trie"),
            (no_trie, "says that its trie"),
            (outside, "leads out"),
            (table(7, b"xyz\0"), "does not have"),
            (table(1, "é\0".as_bytes()), "does not have"),
            (table(0, &[0xff, 0]), "UTF-8"),
            (table(0, &[b'x'; 17]), "makes 17 bytes of 1"),
        ];
        for (bytes, why) in cases {
            let error = check(&encode(&bytes)).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(check("!").unwrap_err().contains("base64"));
    }
}
