//! Numbers that look random and depend on their input alone, on every machine.

/// Spreads the bits of a word over the whole word (the finaliser of splitmix64, a bijection).
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// One word of several.
pub(crate) fn words(words: &[u64]) -> u64 {
    let fold = |hash: u64, word: &u64| mix(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(*word));
    words.iter().fold(words.len() as u64, fold)
}

/// One word of bytes. Not made to resist someone who looks for collisions: it decides only which
/// rows validate.
pub(crate) fn bytes(bytes: &[u8]) -> u64 {
    let mut hash = mix(bytes.len() as u64);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = mix(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ u64::from_le_bytes(word));
    }
    hash
}
