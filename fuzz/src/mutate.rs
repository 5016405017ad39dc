//! New inputs from old ones, by a seed.

use super::bundle::{Part, join, parts};
use super::{Syntax, Target, json};

/// A small generator of random numbers; the same seed gives the same numbers everywhere.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n`; 0 where there is none.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 {
            0
        } else {
            (self.next() % n as u64) as usize
        }
    }

    /// Whether one of so many cases has come.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of a list.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }
}

/// A changed input of at most `most` bytes; `other` is another input to take parts from.
pub fn mutate(target: &Target, rng: &mut Rng, input: &[u8], other: &[u8], most: usize) -> Vec<u8> {
    let words: Vec<&str> = target.words.lines().collect();
    let mut new = match target.syntax {
        Syntax::Json if !rng.one_in(8) => mutate_parts(target, &words, rng, input, other),
        Syntax::Template if !rng.one_in(8) => mutate_tokens(&words, rng, input, other),
        _ => mutate_bytes(&words, rng, input.to_vec(), other),
    };
    if new.len() > most {
        new = mutate_bytes(&words, rng, input.to_vec(), &[]);
    }
    new.truncate(most);
    new
}

/// Changes files of a bundle, or a lone file of JSON.
fn mutate_parts(
    target: &Target,
    words: &[&str],
    rng: &mut Rng,
    input: &[u8],
    other: &[u8],
) -> Vec<u8> {
    let bundled = input.starts_with(b"@@ ");
    let mut all = parts(input, target.files[0]);
    let donors = parts(other, target.files[0]);
    if bundled && rng.one_in(10) {
        exchange(target, rng, &mut all, &donors);
    } else {
        let at = rng.below(all.len());
        let part = &mut all[at];
        let donor = donors
            .iter()
            .find(|donor| donor.name == part.name)
            .map(|donor| &donor.text[..]);
        mutate_part(words, rng, part, donor);
    }
    match &all[..] {
        [only] if !bundled => only.text.clone(),
        _ => join(&all),
    }
}

/// Takes a file away, or takes one from the donor.
fn exchange(target: &Target, rng: &mut Rng, all: &mut Vec<Part>, donors: &[Part]) {
    if rng.one_in(4) && all.len() > 1 {
        all.remove(rng.below(all.len()));
        return;
    }
    let name = rng.pick(target.files).copied().unwrap_or_default();
    let Some(donor) = donors.iter().find(|donor| donor.name == name) else {
        return;
    };
    match all.iter_mut().find(|part| part.name == name) {
        Some(part) => *part = donor.clone(),
        None => all.push(donor.clone()),
    }
}

fn mutate_part(words: &[&str], rng: &mut Rng, part: &mut Part, donor: Option<&[u8]>) {
    if let Some((length, data)) = &mut part.header
        && rng.one_in(10)
    {
        let delta = [0, 0, 1, -1, 4, -4, 64, i64::MAX, i64::MIN][rng.below(9)];
        *(if rng.one_in(2) { length } else { data }) = delta;
        return;
    }
    match serde_json::from_slice(&part.text) {
        Ok(mut tree) if !rng.one_in(6) => {
            let donor = donor.and_then(|text| serde_json::from_slice(text).ok());
            for _ in 0..=rng.below(3) {
                json::mutate(words, rng, &mut tree, donor.as_ref());
            }
            part.text = tree.to_string().into_bytes();
        }
        _ => {
            part.text = mutate_bytes(
                words,
                rng,
                std::mem::take(&mut part.text),
                donor.unwrap_or(&[]),
            )
        }
    }
}

/// Changes bytes without knowing what they mean.
fn mutate_bytes(words: &[&str], rng: &mut Rng, mut bytes: Vec<u8>, other: &[u8]) -> Vec<u8> {
    for _ in 0..=rng.below(3) {
        let at = rng.below(bytes.len() + 1);
        let end = (at + 1 + rng.below(16)).min(bytes.len());
        match rng.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            1 if at < bytes.len() => bytes[at] = rng.next() as u8,
            2 => _ = bytes.drain(at..end),
            3 => _ = bytes.splice(at..at, bytes[at..end].to_vec()),
            4 => bytes.truncate(at),
            5 => {
                _ = bytes.splice(
                    at..end,
                    json::ODD_NUMBERS[rng.below(json::ODD_NUMBERS.len())].bytes(),
                )
            }
            6 if !other.is_empty() => {
                let from = rng.below(other.len());
                let to = (from + 1 + rng.below(64)).min(other.len());
                _ = bytes.splice(at..at, other[from..to].iter().copied());
            }
            7 => bytes.insert(at, rng.next() as u8),
            _ => _ = bytes.splice(at..at, rng.pick(words).copied().unwrap_or("").bytes()),
        }
    }
    bytes
}

/// Changes a template word by word.
fn mutate_tokens(words: &[&str], rng: &mut Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut tokens = tokens(input);
    let donors = self::tokens(other);
    for _ in 0..=rng.below(4) {
        let at = rng.below(tokens.len() + 1);
        let end = (at + 1 + rng.below(6)).min(tokens.len());
        match rng.below(7) {
            0 => _ = tokens.drain(at..end),
            1 => _ = tokens.splice(at..at, tokens[at..end].to_vec()),
            2 if at < tokens.len() => {
                tokens[at] = rng.pick(words).copied().unwrap_or("x").as_bytes()
            }
            3 if at < tokens.len() => {
                let from = rng.below(tokens.len());
                tokens[at] = tokens[from];
            }
            4 if at < tokens.len() => {
                tokens[at] = json::ODD_NUMBERS[rng.below(json::ODD_NUMBERS.len())].as_bytes();
            }
            5 if !donors.is_empty() => {
                let from = rng.below(donors.len());
                let to = (from + 1 + rng.below(12)).min(donors.len());
                _ = tokens.splice(at..at, donors[from..to].iter().copied());
            }
            _ => {
                let word = rng.pick(words).copied().unwrap_or("x").as_bytes();
                _ = tokens.splice(at..at, [b" ", word, b" "]);
            }
        }
    }
    tokens.concat()
}

/// Words, runs of blanks, and single signs.
fn tokens(text: &[u8]) -> Vec<&[u8]> {
    let kind = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | 128.. => 0,
        b' ' | b'\n' | b'\t' => 1,
        _ => 2,
    };
    text.chunk_by(|a, b| kind(*a) == kind(*b) && kind(*a) < 2)
        .collect()
}
