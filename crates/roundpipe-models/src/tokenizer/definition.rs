//! What a `tokenizer.json` may say.
//!
//! The library that runs tokenizers trusts their files: a template that names a missing token
//! panics, a table of characters with a wrong length aborts, forty replacements in a row never end.
//! So every part of the file is looked at here, as JSON, before that library sees it. A part of an
//! unknown type is refused by name, because what it can do has not been checked.
//!
//! Time is bounded by the text's length, not by a constant: the library gives up on a match of a
//! regular expression after a million steps, and looks at the text before each added token that
//! takes spaces or must be a word.
//!
//! `truncation` and `padding` are removed: they are settings of the program that saved the file, and
//! transformers resets both at every call.

use roundpipe_files::text::shown;
use serde_json::{Map, Value};

use super::charsmap;

type Check<T = ()> = Result<T, String>;

/// The most parts in a row: normalizers, decoders and so on.
const MOST_STEPS: usize = 64;
/// The deepest `Sequence` within a `Sequence`.
const MOST_DEPTH: usize = 8;
/// The longest token, in bytes.
const MOST_TOKEN: usize = 16 << 10;
/// The longest token of a Unigram model: its search and its destruction go one level deeper per
/// byte.
const MOST_UNIGRAM_TOKEN: usize = 512;
/// The longest text that replaces or precedes another, in bytes.
const MOST_CONTENT: usize = 256;
/// The longest regular expression, in bytes.
const MOST_PATTERN: usize = 4 << 10;
/// The largest sum of the counts (`{2,5}`) in a regular expression: each is a copy of what it
/// repeats.
const MOST_REPEATS: u64 = 1000;
/// The most that pre-tokenizers may make of one byte of text.
const MOST_GROWTH: usize = 16;
/// The most pieces of a template.
const MOST_PIECES: usize = 16;
/// The longest word, in characters, that WordPiece cuts up; it tries every part of it.
const MOST_WORD: u64 = 1000;

/// Refuses what the library cannot run safely, and puts the rest into the form in which it reads
/// nothing else from it.
pub(super) fn check(definition: &mut Value) -> Check {
    let Value::Object(definition) = definition else {
        return Err("is no JSON object".into());
    };
    definition.insert("truncation".into(), Value::Null);
    definition.insert("padding".into(), Value::Null);
    added_tokens(definition.get("added_tokens").unwrap_or(&Value::Null))?;
    let mut part = |name: &'static str, check: &mut dyn FnMut(Step<'_>) -> Check| match definition
        .get_mut(name)
    {
        None | Some(Value::Null) => Ok(()),
        Some(value) => steps(name, value, 0, &mut 0, check),
    };
    part("normalizer", &mut normalizer)?;
    let mut growth = 1;
    part("pre_tokenizer", &mut |step| {
        pre_tokenizer(step, &mut growth)
    })?;
    let mut templates = 0;
    part("post_processor", &mut |step| {
        post_processor(step, &mut templates)
    })?;
    part("decoder", &mut decoder)?;
    match definition.get_mut("model") {
        Some(Value::Object(map)) => model(map),
        _ => Err("has no model".into()),
    }
}

/// One part of a chain: its place in the file, its type and its settings.
struct Step<'a> {
    place: &'static str,
    kind: String,
    map: &'a mut Map<String, Value>,
}

impl Step<'_> {
    fn refuse<T>(&self, why: impl std::fmt::Display) -> Check<T> {
        Err(format!("{} {}: {why}", self.place, shown(&self.kind)))
    }

    fn unknown(&self) -> Check {
        self.refuse("is of no type that is known here; save the tokenizer with another one")
    }

    /// A setting that must be text of at most so many bytes.
    fn text(&self, key: &str, most: usize) -> Check<&str> {
        match self.map.get(key) {
            Some(Value::String(text)) if text.len() <= most => Ok(text),
            Some(Value::String(text)) => {
                self.refuse(format!("{key} has {} bytes, more than {most}", text.len()))
            }
            _ => self.refuse(format!("{key} is missing or no text")),
        }
    }

    fn flag(&self, key: &str) -> bool {
        self.map.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    /// `pattern`: `{"String": ..}` or `{"Regex": ..}`.
    fn pattern(&self) -> Check {
        let pattern = self.map.get("pattern").and_then(Value::as_object);
        let Some((kind, Value::String(text))) = pattern.and_then(|map| map.iter().next()) else {
            return self.refuse("pattern is neither {\"String\": ..} nor {\"Regex\": ..}");
        };
        if text.len() > MOST_PATTERN {
            return self.refuse(format!(
                "its pattern has {} bytes, more than {MOST_PATTERN}",
                text.len()
            ));
        }
        if kind == "Regex" && repeats(text) > MOST_REPEATS {
            return self.refuse(format!(
                "its pattern repeats more than {MOST_REPEATS} times"
            ));
        }
        Ok(())
    }
}

/// Shows each part of a chain to `check`.
fn steps(
    place: &'static str,
    value: &mut Value,
    depth: usize,
    count: &mut usize,
    check: &mut dyn FnMut(Step<'_>) -> Check,
) -> Check {
    *count += 1;
    if depth > MOST_DEPTH || *count > MOST_STEPS {
        return Err(format!(
            "{place} has more than {MOST_STEPS} parts, or {MOST_DEPTH} within each other"
        ));
    }
    let kind = value.get("type").and_then(Value::as_str).map(str::to_owned);
    let (Some(kind), Value::Object(map)) = (kind, value) else {
        return Err(format!(
            "{place} has a part without a type; save it anew with transformers"
        ));
    };
    if kind != "Sequence" {
        return check(Step { place, kind, map });
    }
    let list = match place {
        "normalizer" => "normalizers",
        "pre_tokenizer" => "pretokenizers",
        "post_processor" => "processors",
        _ => "decoders",
    };
    let Some(Value::Array(parts)) = map.get_mut(list) else {
        return Err(format!("{place}: a Sequence without {list}"));
    };
    parts
        .iter_mut()
        .try_for_each(|part| steps(place, part, depth + 1, count, check))
}

fn normalizer(step: Step<'_>) -> Check {
    match step.kind.as_str() {
        "Strip" | "StripAccents" | "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "Nmt"
        | "ByteLevel" | "Bert" => Ok(()),
        // Under this name the library guesses the type from the settings.
        "BertNormalizer" => {
            step.map.insert("type".into(), "Bert".into());
            Ok(())
        }
        "Prepend" => step.text("prepend", MOST_CONTENT).map(drop),
        "Replace" => {
            step.text("content", MOST_CONTENT)?;
            step.pattern()
        }
        "Precompiled" => {
            let map = step.text("precompiled_charsmap", charsmap::MOST_TEXT)?;
            charsmap::check(map).or_else(|why| step.refuse(why))
        }
        _ => step.unknown(),
    }
}

/// `growth` is what the steps so far make of one byte.
fn pre_tokenizer(step: Step<'_>, growth: &mut usize) -> Check {
    match step.kind.as_str() {
        "BertPreTokenizer" | "CharDelimiterSplit" | "Whitespace" | "Punctuation"
        | "WhitespaceSplit" | "Digits" | "UnicodeScripts" => {}
        "FixedLength" => {
            if step
                .map
                .get("length")
                .is_some_and(|length| length.as_u64().is_none_or(|length| length == 0))
            {
                return step.refuse("length must be at least 1");
            }
        }
        "Split" => step.pattern()?,
        // Every byte becomes a character of up to two; a space before a word is one more.
        "ByteLevel" => *growth *= if step.flag("add_prefix_space") { 4 } else { 2 },
        // A space becomes a character of up to four bytes, and one may stand before each word.
        "Metaspace" => *growth *= 8,
        _ => return step.unknown(),
    }
    if *growth > MOST_GROWTH {
        return step.refuse("together with the steps before it, it makes too much of a text");
    }
    Ok(())
}

/// The library guesses the type from the settings, so whatever looks like a template is checked as
/// one.
fn post_processor(step: Step<'_>, templates: &mut usize) -> Check {
    match step.kind.as_str() {
        "BertProcessing" | "RobertaProcessing" | "ByteLevel" | "TemplateProcessing" => {}
        _ => return step.unknown(),
    }
    if !step.map.contains_key("single") {
        return Ok(());
    }
    *templates += 1;
    if *templates > 1 {
        return step.refuse("is a second template, which has no text to work on");
    }
    let tokens = step.map.get("special_tokens").and_then(Value::as_object);
    for (template, sequences) in [("single", &["A"][..]), ("pair", &["A", "B"][..])] {
        let Some(Value::Array(pieces)) = step.map.get(template) else {
            return step.refuse(format!("{template} is missing or no list"));
        };
        if pieces.len() > MOST_PIECES {
            return step.refuse(format!("{template} has more than {MOST_PIECES} pieces"));
        }
        for piece in pieces {
            if let Some(id) = piece["Sequence"]["id"].as_str() {
                if !sequences.contains(&id) {
                    return step.refuse(format!(
                        "{template} uses text {}, which it does not have",
                        shown(id)
                    ));
                }
            } else if let Some(id) = piece["SpecialToken"]["id"].as_str() {
                special_token(id, tokens).or_else(|why| step.refuse(why))?;
            } else {
                return step.refuse(format!(
                    "{template} has a piece that is neither text nor a special token"
                ));
            }
        }
    }
    Ok(())
}

fn special_token(id: &str, tokens: Option<&Map<String, Value>>) -> Check {
    let name = shown(id);
    let Some(token) = tokens.and_then(|tokens| tokens.get(id)) else {
        return Err(format!(
            "special_tokens has no {name}, which the template uses"
        ));
    };
    let count = |key: &str| token[key].as_array().map(Vec::len);
    match (count("ids"), count("tokens")) {
        (Some(ids), Some(tokens)) if ids == tokens && ids <= MOST_PIECES => Ok(()),
        _ => Err(format!(
            "special token {name} needs as many ids as tokens, at most {MOST_PIECES}"
        )),
    }
}

fn decoder(step: Step<'_>) -> Check {
    match step.kind.as_str() {
        "ByteLevel" | "Metaspace" | "Fuse" | "Strip" | "ByteFallback" => Ok(()),
        "BPEDecoder" => not_empty(&step, "suffix"),
        "WordPiece" => step.text("prefix", MOST_CONTENT).map(drop),
        "CTC" => {
            step.text("pad_token", MOST_CONTENT)?;
            not_empty(&step, "word_delimiter_token")
        }
        "Replace" => {
            step.text("content", MOST_CONTENT)?;
            step.pattern()
        }
        _ => step.unknown(),
    }
}

/// An empty text is found between all characters, and what replaces it is put there.
fn not_empty(step: &Step<'_>, key: &str) -> Check {
    if step.text(key, MOST_CONTENT)?.is_empty() {
        return step.refuse(format!("{key} is empty"));
    }
    Ok(())
}

/// The sum of the counts in a regular expression.
fn repeats(pattern: &str) -> u64 {
    let mut sum = 0u64;
    for (at, _) in pattern.match_indices('{') {
        // `\x{3000}` is a character, `\p{L}` a class.
        let named = ["\\x", "\\u", "\\U", "\\p", "\\P"]
            .iter()
            .any(|start| pattern[..at].ends_with(start));
        let Some((inside, _)) = pattern[at + 1..].split_once('}') else {
            continue;
        };
        if named || !inside.bytes().all(|c| c.is_ascii_digit() || c == b',') {
            continue;
        }
        let numbers = inside.split(',').filter(|number| !number.is_empty());
        sum = numbers.fold(sum, |sum, number| {
            sum.saturating_add(number.parse().unwrap_or(u64::MAX))
        });
    }
    sum
}

fn added_tokens(tokens: &Value) -> Check {
    let Value::Array(tokens) = tokens else {
        return if tokens.is_null() {
            Ok(())
        } else {
            Err("added_tokens is no list".into())
        };
    };
    for token in tokens {
        let Some(content) = token["content"].as_str() else {
            return Err("added_tokens has an item without content".into());
        };
        token_length("added_tokens", content, MOST_TOKEN)?;
        if token["id"].as_u64().is_none_or(|id| id > i32::MAX as u64) {
            return Err(format!(
                "added_tokens: the id of {} must be from 0 to {}",
                shown(content),
                i32::MAX
            ));
        }
    }
    Ok(())
}

fn token_length(place: &str, token: &str, most: usize) -> Check {
    if token.len() <= most {
        return Ok(());
    }
    Err(format!(
        "{place}: the token {} has {} bytes, more than {most}",
        shown(token),
        token.len()
    ))
}

/// Checks the vocabulary, and names the type where an old file does not.
fn model(map: &mut Map<String, Value>) -> Check {
    let kind = match map.get("type") {
        Some(Value::String(kind)) => kind.clone(),
        Some(_) => return Err("model: type is no text".into()),
        None if map.contains_key("merges") => "BPE".into(),
        None if map.contains_key("max_input_chars_per_word") => "WordPiece".into(),
        None if map.get("vocab").is_some_and(Value::is_array) => "Unigram".into(),
        None => "WordLevel".into(),
    };
    map.insert("type".into(), kind.clone().into());
    let affix = |key: &str| match map.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(affix)) if affix.len() <= MOST_CONTENT => Ok(affix.as_str()),
        _ => Err(format!(
            "model: {key} is no text of at most {MOST_CONTENT} bytes"
        )),
    };
    let (prefix, suffix) = (
        affix("continuing_subword_prefix")?,
        affix("end_of_word_suffix")?,
    );
    match kind.as_str() {
        "BPE" => {
            if map.get("byte_fallback") == Some(&Value::Bool(true))
                && !(prefix.is_empty() && suffix.is_empty())
            {
                return Err(
                    "model: byte_fallback does not go with a prefix or suffix of words".into(),
                );
            }
            merges(map.get("merges"), word_ids(map)?, prefix)
        }
        "WordPiece" => {
            if map
                .get("max_input_chars_per_word")
                .and_then(Value::as_u64)
                .is_none_or(|most| most > MOST_WORD)
            {
                return Err(format!(
                    "model: max_input_chars_per_word must be from 0 to {MOST_WORD}"
                ));
            }
            word_ids(map).map(drop)
        }
        "WordLevel" => word_ids(map).map(drop),
        "Unigram" => unigram(map.get("vocab")),
        other => Err(format!("model: type {} is not known here", shown(other))),
    }
}

/// The vocabulary of all models but Unigram.
fn word_ids(map: &Map<String, Value>) -> Check<&Map<String, Value>> {
    let Some(Value::Object(vocab)) = map.get("vocab") else {
        return Err("model: vocab is missing or no map of tokens to ids".into());
    };
    for (token, id) in vocab {
        token_length("model", token, MOST_TOKEN)?;
        if id.as_u64().is_none_or(|id| id > i32::MAX as u64) {
            return Err(format!(
                "model: the id of {} must be from 0 to {}",
                shown(token),
                i32::MAX
            ));
        }
    }
    Ok(vocab)
}

/// Both halves of a merge, and what they make together, are in the vocabulary. The library copies
/// halves into a buffer as long as the longest token, and cuts the prefix off the second without a
/// look.
fn merges(merges: Option<&Value>, vocab: &Map<String, Value>, prefix: &str) -> Check {
    let Some(Value::Array(merges)) = merges else {
        return Err("model: merges is missing or no list".into());
    };
    let mut joined = String::new();
    for (number, merge) in merges.iter().enumerate() {
        let pair = match merge {
            Value::String(line) if line.starts_with("#version") => continue,
            Value::String(line) => line
                .split_once(' ')
                .filter(|(_, right)| !right.contains(' ')),
            Value::Array(pair) => match &pair[..] {
                [Value::String(left), Value::String(right)] => {
                    Some((left.as_str(), right.as_str()))
                }
                _ => None,
            },
            _ => None,
        };
        let Some((left, right)) = pair else {
            return Err(format!("model: merge {number} is no pair of tokens"));
        };
        let Some(rest) = right.strip_prefix(prefix) else {
            return Err(format!(
                "model: merge {number}: {} lacks the prefix of subwords",
                shown(right)
            ));
        };
        joined.clear();
        joined.push_str(left);
        joined.push_str(rest);
        if let Some(missing) = [left, right, joined.as_str()]
            .into_iter()
            .find(|token| !vocab.contains_key(*token))
        {
            return Err(format!(
                "model: merge {number} needs the token {}, which vocab lacks",
                shown(missing)
            ));
        }
    }
    Ok(())
}

fn unigram(vocab: Option<&Value>) -> Check {
    let Some(Value::Array(vocab)) = vocab else {
        return Err("model: vocab is missing or no list".into());
    };
    for (number, item) in vocab.iter().enumerate() {
        let (Some(token), Some(_)) = (item[0].as_str(), item[1].as_f64()) else {
            return Err(format!(
                "model: item {number} of vocab is no token with a score"
            ));
        };
        token_length("model", token, MOST_UNIGRAM_TOKEN)?;
    }
    Ok(())
}
