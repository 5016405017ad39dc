//! Hashes of files: XXH3 with 128 bits, which finds damage and runs at the speed of memory.
//!
//! It finds accidents, not forgeries: who can write a checkpoint can write its hashes too.

use std::fmt;

use twox_hash::XxHash3_128;

/// A hash; shown as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hash128(u128);

impl Hash128 {
    /// The hash of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(XxHash3_128::oneshot(bytes))
    }

    /// Reads what [`fmt::Display`] shows.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(Self)
    }
}

impl fmt::Display for Hash128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Hash128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The hash of bytes that come piece by piece.
#[derive(Default)]
pub struct Hasher128(XxHash3_128);

impl Hasher128 {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The hash of all bytes so far.
    pub fn finish(&self) -> Hash128 {
        Hash128(self.0.finish_128())
    }
}

impl fmt::Debug for Hasher128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hasher128({})", self.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::{Hash128, Hasher128};

    /// The published values of XXH3-128 with seed 0, and the same for bytes in pieces.
    #[test]
    fn the_hash_is_xxh3() {
        assert_eq!(
            Hash128::of(b"").to_string(),
            "99aa06d3014798d86001c324468d497f"
        );
        let bytes: Vec<u8> = (0..100_000u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        let mut hasher = Hasher128::new();
        bytes.chunks(977).for_each(|chunk| hasher.update(chunk));
        assert_eq!(hasher.finish(), Hash128::of(&bytes));
        let text = hasher.finish().to_string();
        assert_eq!(Hash128::parse(&text), Some(hasher.finish()));
        for bad in ["", "+9aa06d3014798d86001c324468d497f", &text[1..]] {
            assert_eq!(Hash128::parse(bad), None);
        }
    }
}
