//! The name that llama.cpp has for how a tokenizer splits text before it merges.
//!
//! llama.cpp does not read the splitting rule from a file: it has the rules of known tokenizers built
//! in, under names. Its conversion script finds the name by encoding a test text and hashing the
//! result, which knows only tokenizers that were published. Here the rule itself is compared, so that
//! a tokenizer that was trained with a known rule is recognised too.
//!
//! Not compared: Unicode normalization, which llama.cpp does not apply.

use serde_json::Value;

/// What llama.cpp takes for a rule that it does not know.
pub(super) const FALLBACK: &str = "default";

/// The rule of GPT-2, which `ByteLevel` has built in.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Every digit by itself.
const DIGITS: &str = r"\p{N}";

struct Known {
    name: &'static str,
    /// Applied one after another; each splits what the one before left.
    rules: &'static [&'static str],
    /// Words that are tokens are not merged.
    ignore_merges: bool,
}

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const KNOWN: [Known; 8] = [
    known("gpt-2", &[GPT2], false),
    known("smollm", &[DIGITS, GPT2], false),
    known("qwen2", &[QWEN2], false),
    known("qwen35", &[QWEN35], false),
    known("llama-bpe", &[LLAMA3], true),
    known("dbrx", &[LLAMA3], false),
    known("tekken", &[TEKKEN], true),
    known("gpt-4o", &[GPT4O], false),
];

const fn known(name: &'static str, rules: &'static [&'static str], ignore_merges: bool) -> Known {
    Known {
        name,
        rules,
        ignore_merges,
    }
}

/// llama.cpp's name for the rule of a byte-level tokenizer; `None` where it has none.
pub(super) fn name(tokenizer: &Value) -> Option<&'static str> {
    let mut rules = Vec::new();
    collect(&tokenizer["pre_tokenizer"], &mut rules)?;
    let ignore_merges = tokenizer["model"]["ignore_merges"]
        .as_bool()
        .unwrap_or(false);
    let is_it = |known: &&Known| known.rules == rules && known.ignore_merges == ignore_merges;
    KNOWN.iter().find(is_it).map(|known| known.name)
}

/// Whether a part of the tokenizer's splitting turns bytes into characters.
pub(super) fn is_byte_level(pre_tokenizer: &Value) -> bool {
    let parts = pre_tokenizer["pretokenizers"].as_array();
    pre_tokenizer["type"] == "ByteLevel"
        || parts.is_some_and(|parts| parts.iter().any(is_byte_level))
}

/// The rules of a splitter and its parts; `None` where one has no form here.
fn collect<'a>(part: &'a Value, rules: &mut Vec<&'a str>) -> Option<()> {
    match part["type"].as_str()? {
        "Sequence" => {
            let parts = part["pretokenizers"].as_array()?;
            parts.iter().try_for_each(|part| collect(part, rules))
        }
        "ByteLevel" => {
            if part["add_prefix_space"].as_bool().unwrap_or(true) {
                return None;
            }
            if part["use_regex"].as_bool().unwrap_or(true) {
                rules.push(GPT2);
            }
            Some(())
        }
        "Digits" if part["individual_digits"] == true => {
            rules.push(DIGITS);
            Some(())
        }
        "Split" => {
            let invert = part["invert"].as_bool().unwrap_or(false);
            let behavior = part["behavior"].as_str().unwrap_or("");
            // These rules match all of a text, so that nothing lies between two matches.
            let isolates = behavior == "Isolated" && !invert;
            let removes_rest = behavior == "Removed" && invert;
            if !(isolates || removes_rest) {
                return None;
            }
            rules.push(part["pattern"]["Regex"].as_str()?);
            Some(())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{LLAMA3, QWEN2, name};

    fn tokenizer(pre_tokenizer: Value, ignore_merges: bool) -> Value {
        json!({ "pre_tokenizer": pre_tokenizer, "model": { "ignore_merges": ignore_merges } })
    }

    fn split(regex: &str) -> Value {
        json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "use_regex": false },
        ]})
    }

    /// Rules as published tokenizers have them, and near misses.
    #[test]
    fn a_rule_has_the_name_that_llama_cpp_gives_it() {
        let level = |prefix: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix });
        let digits = |each: bool| json!({ "type": "Digits", "individual_digits": each });
        let both = |each: bool| json!({ "type": "Sequence", "pretokenizers": [digits(each), level(false)] });
        let cases = [
            (level(false), false, Some("gpt-2")),
            (level(true), false, None),
            (level(false), true, None),
            (both(true), false, Some("smollm")),
            (both(false), false, None),
            (split(QWEN2), false, Some("qwen2")),
            (split(LLAMA3), true, Some("llama-bpe")),
            (split(LLAMA3), false, Some("dbrx")),
            (split(&QWEN2.replace("{L}+", "{L}")), false, None),
            (Value::Null, false, None),
        ];
        for (pre_tokenizer, ignore_merges, want) in cases {
            let got = name(&tokenizer(pre_tokenizer.clone(), ignore_merges));
            assert_eq!(got, want, "{pre_tokenizer}");
        }
    }
}
