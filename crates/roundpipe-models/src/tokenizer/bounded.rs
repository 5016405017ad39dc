//! Normalizers, pre-tokenizers and decoders that stop before the library fails.
//!
//! Each step is paid for before it runs: from the length now and the most that such a step can make
//! of one byte. A chain of steps may thus make [`MOST_GROWTH`] bytes of one, and no more, however
//! it is put together. (What pre-tokenizers make of a byte does not depend on the text;
//! `definition.rs` bounds it.)
//!
//! Steps that exchange characters rely on where each came from, and fail on what was put before the
//! first one by a pattern that matches nothing; they refuse such a text.
//!
//! The library drops the error of a normalizer, so [`Normalize`] leaves it for its thread as well;
//! [`take_refusal`] reads and removes it.

use std::cell::Cell;

use serde::Deserialize;
use tokenizers::normalizer::Range;
use tokenizers::{
    Decoder, DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};

use super::charsmap;

/// The most bytes that steps may make of one byte of text.
const MOST_GROWTH: usize = 64;
/// Bytes that any text may become, however short it is.
const ALWAYS: usize = 1 << 10;

type Outcome<T> = tokenizers::Result<T>;

thread_local! {
    /// Why a normalizer refused a text on this thread since [`take_refusal`] was last asked.
    static REFUSED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Why a normalizer refused a text on this thread since the last call, if it did.
pub(super) fn take_refusal() -> Option<&'static str> {
    REFUSED.take()
}

const TOO_LONG: &str = "the tokenizer's steps make more than 64 bytes of one byte of it";
const BEFORE_ALL: &str =
    "a step of the tokenizer puts text before its first character, a later one cannot follow";

/// A normalizer that does not let a text grow out of bounds.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub(super) struct Normalize(NormalizerWrapper);

impl Normalizer for Normalize {
    fn normalize(&self, text: &mut NormalizedString) -> Outcome<()> {
        let most = text.len_original() * MOST_GROWTH + ALWAYS;
        normalize(&self.0, text, most).inspect_err(|why| REFUSED.set(Some(why)))?;
        Ok(())
    }
}

fn normalize(
    step: &NormalizerWrapper,
    text: &mut NormalizedString,
    most: usize,
) -> Result<(), &'static str> {
    match step {
        NormalizerWrapper::Sequence(steps) => {
            return steps
                .as_ref()
                .iter()
                .try_for_each(|step| normalize(step, text, most));
        }
        // Nothing before a text is nothing, but the library forgets where its first character came
        // from.
        NormalizerWrapper::Prepend(step) if step.prepend.is_empty() => return Ok(()),
        NormalizerWrapper::Prepend(_) | NormalizerWrapper::Replace(_) => {}
        _ => follows(text)?,
    }
    if normalized_length(step, text.len()) > most {
        return Err(TOO_LONG);
    }
    step.normalize(text)
        .map_err(|_| "a step of the tokenizer fails on it")
}

/// Whether every character of a text has a place in the original, which steps that exchange
/// characters rely on.
fn follows(text: &NormalizedString) -> Result<(), &'static str> {
    let covered = text.convert_offsets(Range::Original(..));
    if text.is_empty() || covered == Some(0..text.len()) {
        Ok(())
    } else {
        Err(BEFORE_ALL)
    }
}

/// A pre-tokenizer that does not exchange characters whose places are unknown.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub(super) struct PreTokenize(PreTokenizerWrapper);

impl PreTokenizer for PreTokenize {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Outcome<()> {
        pre_tokenize(&self.0, text)
    }
}

fn pre_tokenize(step: &PreTokenizerWrapper, text: &mut PreTokenizedString) -> Outcome<()> {
    match step {
        PreTokenizerWrapper::Sequence(steps) => {
            return steps
                .as_ref()
                .iter()
                .try_for_each(|step| pre_tokenize(step, text));
        }
        // The only one that exchanges characters.
        PreTokenizerWrapper::ByteLevel(_) => text.normalize(|piece| Ok(follows(piece)?))?,
        _ => {}
    }
    step.pre_tokenize(text)
}

/// The most bytes that a step makes of a text.
fn normalized_length(step: &NormalizerWrapper, bytes: usize) -> usize {
    match step {
        NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::Nmt(_)
        // Its steps are measured one by one.
        | NormalizerWrapper::Sequence(_) => bytes,
        NormalizerWrapper::Lowercase(_) | NormalizerWrapper::ByteLevel(_) => bytes * 2,
        // The factors of Unicode's normal forms in UTF-8.
        NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => bytes * 3,
        NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => bytes * 11,
        // NFD, lower case, and spaces around Chinese characters.
        NormalizerWrapper::BertNormalizer(_) => bytes * 12,
        NormalizerWrapper::Precompiled(_) => bytes * charsmap::MOST_GROWTH,
        NormalizerWrapper::Prepend(step) => bytes + step.prepend.len(),
        NormalizerWrapper::Replace(step) => replaced_length(bytes, &step.content),
    }
}

/// A pattern may match nothing at all, and so once before every character and at the end.
fn replaced_length(bytes: usize, content: &str) -> usize {
    bytes + (bytes + 1) * content.len()
}

/// A decoder that does not let a text grow out of bounds.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub(super) struct Decode(DecoderWrapper);

impl Decoder for Decode {
    fn decode_chain(&self, tokens: Vec<String>) -> Outcome<Vec<String>> {
        let most = (length(&tokens) + tokens.len()) * MOST_GROWTH + ALWAYS;
        decode(&self.0, tokens, most)
    }
}

fn decode(step: &DecoderWrapper, tokens: Vec<String>, most: usize) -> Outcome<Vec<String>> {
    // Some steps look at the last token without asking whether there is one.
    if tokens.is_empty() {
        return Ok(tokens);
    }
    match step {
        DecoderWrapper::Sequence(steps) => steps
            .get_decoders()
            .iter()
            .try_fold(tokens, |tokens, step| decode(step, tokens, most)),
        DecoderWrapper::Strip(strip) => {
            let stripped = |token: &String| {
                strip_ends(token, strip.content, strip.start, strip.stop).to_owned()
            };
            Ok(tokens.iter().map(stripped).collect())
        }
        _ if decoded_length(step, &tokens) > most => Err(TOO_LONG.into()),
        _ => step.decode_chain(tokens),
    }
}

/// The most bytes that a step makes of tokens.
fn decoded_length(step: &DecoderWrapper, tokens: &[String]) -> usize {
    let bytes = length(tokens);
    match step {
        // A broken byte becomes a sign of three.
        DecoderWrapper::ByteLevel(_) | DecoderWrapper::ByteFallback(_) => bytes * 3,
        DecoderWrapper::Replace(step) => tokens
            .iter()
            .map(|token| replaced_length(token.len(), &step.content))
            .sum(),
        // A space may be put before each.
        _ => bytes + tokens.len(),
    }
}

fn length(tokens: &[String]) -> usize {
    tokens.iter().map(String::len).sum()
}

/// A token without up to `start` characters `content` at its start and `stop` at its end. The
/// library's own step panics for tokens that are shorter than this.
fn strip_ends(token: &str, content: char, start: usize, stop: usize) -> &str {
    let mut rest = token;
    for _ in 0..start {
        let Some(shorter) = rest.strip_prefix(content) else {
            break;
        };
        rest = shorter;
    }
    for _ in 0..stop {
        let Some(shorter) = rest.strip_suffix(content) else {
            break;
        };
        rest = shorter;
    }
    rest
}

#[cfg(test)]
mod tests {
    use tokenizers::decoders::strip::Strip;
    use tokenizers::{Decoder, DecoderWrapper, NormalizedString, Normalizer};

    use super::{Decode, Normalize, strip_ends, take_refusal};

    fn normalized(json: &str, text: &str) -> Option<String> {
        let step: Normalize = serde_json::from_str(json).unwrap();
        let mut string = NormalizedString::from(text);
        let done = step.normalize(&mut string).is_ok();
        assert_eq!(take_refusal().is_none(), done, "{json}");
        assert_eq!(take_refusal(), None);
        done.then(|| string.get().to_owned())
    }

    /// Whatever a step may be, its length is foreseen: characters that grow the most prove the
    /// factors.
    #[test]
    fn the_length_of_every_step_is_foreseen() {
        let hardest = "\u{fdfa}\u{390}\u{1d160}\u{130}\u{23a}\u{4e00}\u{149}\u{fb2c} aé".repeat(3);
        let steps = [
            r#"{"type":"NFC"}"#,
            r#"{"type":"NFD"}"#,
            r#"{"type":"NFKC"}"#,
            r#"{"type":"NFKD"}"#,
            r#"{"type":"Lowercase"}"#,
            r#"{"type":"ByteLevel"}"#,
            r#"{"type":"Nmt"}"#,
            r#"{"type":"StripAccents"}"#,
            r#"{"type":"Strip","strip_left":true,"strip_right":true}"#,
            r#"{"type":"Prepend","prepend":"abc"}"#,
            r#"{"type":"Replace","pattern":{"Regex":""},"content":"xyz"}"#,
            r#"{"type":"Replace","pattern":{"String":"a"},"content":""}"#,
            r#"{"type":"Bert","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true}"#,
        ];
        for json in steps {
            let step: Normalize = serde_json::from_str(json).unwrap();
            for text in hardest.chars().map(String::from).chain([hardest.clone()]) {
                let most = super::normalized_length(&step.0, text.len());
                let mut string = NormalizedString::from(text.as_str());
                step.0.normalize(&mut string).unwrap();
                assert!(
                    string.get().len() <= most,
                    "{json} {text}: {} of {most}",
                    string.get().len()
                );
            }
        }
    }

    /// Usual chains run; one that doubles a text again and again stops before it has doubled it
    /// often.
    #[test]
    fn growth_ends_before_it_begins() {
        let llama = r#"{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
            {"type":"Replace","pattern":{"String":" "},"content":"▁"}]}"#;
        assert_eq!(normalized(llama, "a b").unwrap(), "▁a▁b");
        let double = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
        let times = |n: usize| {
            format!(
                r#"{{"type":"Sequence","normalizers":[{}]}}"#,
                vec![double; n].join(",")
            )
        };
        assert_eq!(normalized(&times(4), "a").unwrap(), "a".repeat(16));
        assert_eq!(normalized(&times(40), "a"), None);
        let decoder = format!(
            r#"{{"type":"Sequence","decoders":[{}]}}"#,
            vec![double; 40].join(",")
        );
        let decoder: Decode = serde_json::from_str(&decoder).unwrap();
        assert!(decoder.decode(vec!["b".into()]).is_ok());
        assert!(
            decoder
                .decode(vec!["a".into()])
                .unwrap_err()
                .to_string()
                .contains("64 bytes")
        );
    }

    /// A step that exchanges characters refuses what was put before the first one; others do not
    /// mind.
    #[test]
    fn text_before_the_first_character_is_not_followed() {
        let chain = |steps: &str| format!(r#"{{"type":"Sequence","normalizers":[{steps}]}}"#);
        let start = r#"{"type":"Replace","pattern":{"Regex":"^"},"content":"▁"}"#;
        let space = r#"{"type":"Replace","pattern":{"String":" "},"content":"▁"}"#;
        assert_eq!(
            normalized(&chain(&format!("{start},{space}")), "a b").unwrap(),
            "▁a▁b"
        );
        assert_eq!(
            normalized(&chain(&format!(r#"{start},{{"type":"NFC"}}"#)), "a b"),
            None
        );
        let nothing = r#"{"type":"Prepend","prepend":""},{"type":"Nmt"}"#;
        assert_eq!(normalized(&chain(nothing), "  éx").unwrap(), "  éx");
    }

    /// Where the library's own step does not panic, stripping gives what it gives; elsewhere it
    /// strips what is there.
    #[test]
    fn ends_are_stripped_as_the_library_does() {
        for token in ["Hey", "HHH", "yHey", "Heyy", "éHé", "H", ""] {
            for (start, stop) in [(0, 0), (1, 0), (2, 0), (9, 0)] {
                let library = DecoderWrapper::Strip(Strip::new('H', start, stop));
                let want = library.decode_chain(vec![token.into()]).unwrap();
                assert_eq!(
                    strip_ends(token, 'H', start, stop),
                    want[0],
                    "{token} {start} {stop}"
                );
            }
        }
        assert_eq!(strip_ends("HaHH", 'H', 1 << 40, 1 << 40), "a");
        assert_eq!(strip_ends("HHH", 'H', 2, 2), "");
        assert_eq!(strip_ends("", 'H', 0, 1), "");
        let decoder: Decode =
            serde_json::from_str(r#"{"type":"BPEDecoder","suffix":"</w>"}"#).unwrap();
        assert_eq!(decoder.decode(vec![]).unwrap(), "");
    }
}
