//! What a tokenizer becomes in a GGUF file.
//!
//! llama.cpp has an algorithm for each kind of tokenizer, and a file names the kind:
//!
//! | `tokenizer.ggml.model` | which | what it needs |
//! |---|---|---|
//! | `gpt2` | merges over bytes (Llama 3, Qwen, GPT-OSS) | merges, and the name of a splitting rule ([`splits`]) |
//! | `llama` | merges over characters, bytes for the rest (Llama 2, Mistral) | a score for each token: the pair whose result has the highest is merged first |
//!
//! In the second kind, merges become scores: the result of the n-th has the score -n. Rows of the
//! embedding that no token has are filled with unused tokens.
//!
//! Refused: other kinds (Unigram, WordPiece), and tokens without a row.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use roundpipe_files::small;
use roundpipe_files::text::shown;
use serde_json::{Map, Value as Json};

use super::format::{Key, Value};
use super::splits;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::limits;
use crate::tokenizer::Tokenizer;

/// The space of SentencePiece.
const SPACE: &str = "\u{2581}";

/// What a token is, as llama.cpp numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// A tokenizer as a file has it.
pub(super) struct Vocab {
    tokens: Vec<String>,
    kinds: Vec<TokenKind>,
    algorithm: Algorithm,
    /// Ids of special tokens by llama.cpp's names.
    ids: Vec<(&'static str, u32)>,
    add_bos: bool,
    add_eos: bool,
    templates: Vec<(String, String)>,
    /// What llama.cpp will do differently.
    pub notes: Vec<String>,
}

enum Algorithm {
    Bytes {
        split: &'static str,
        merges: Vec<String>,
    },
    Pieces {
        scores: Vec<f32>,
        /// A text begins as if a space stood before it.
        space_first: bool,
    },
}

impl Vocab {
    /// Reads the tokenizer of a folder, which `tokenizer` has checked, for a model of this config.
    ///
    /// # Errors
    /// [`Error::File`] for a tokenizer that llama.cpp has no algorithm for, or that has more tokens
    /// than the model has rows.
    pub fn read(folder: &Path, tokenizer: &Tokenizer, config: &ModelConfig) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let json = small::read_json(&path, limits::VOCABULARY)?;
        let refuse = |what: String| Error::file(&path, what);
        let mut notes = Vec::new();
        let mut table = Table::read(&json, config.vocab).map_err(refuse)?;
        let algorithm = if splits::is_byte_level(&json["pre_tokenizer"]) {
            bytes(&json, &mut notes)
        } else {
            table.mark_bytes(json["model"]["unk_token"].as_str());
            pieces(&json, &table.tokens, &mut notes).map_err(refuse)?
        };
        let ends = Ends::read(tokenizer, config)?;
        notes.extend(ends.note);
        Ok(Self {
            tokens: table.tokens,
            kinds: table.kinds,
            algorithm,
            ids: ends.ids,
            add_bos: ends.add_bos,
            add_eos: ends.add_eos,
            templates: templates(tokenizer),
            notes,
        })
    }

    /// The keys of the file.
    pub fn keys(&self) -> Vec<Key> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let (model, split) = match &self.algorithm {
            Algorithm::Bytes { split, .. } => ("gpt2", *split),
            Algorithm::Pieces { .. } => ("llama", splits::FALLBACK),
        };
        let kinds = self.kinds.iter().map(|kind| *kind as i32).collect();
        let mut keys = vec![
            (key("model"), Value::Text(model.into())),
            (key("pre"), Value::Text(split.into())),
            (key("tokens"), Value::Texts(self.tokens.clone())),
            (key("token_type"), Value::I32s(kinds)),
        ];
        match &self.algorithm {
            Algorithm::Bytes { merges, .. } => {
                keys.push((key("merges"), Value::Texts(merges.clone())));
            }
            Algorithm::Pieces {
                scores,
                space_first,
            } => {
                keys.push((key("scores"), Value::F32s(scores.clone())));
                keys.push((key("add_space_prefix"), Value::Bool(*space_first)));
            }
        }
        for (name, id) in &self.ids {
            keys.push((key(name), Value::U32(*id)));
        }
        keys.push((key("add_bos_token"), Value::Bool(self.add_bos)));
        keys.push((key("add_eos_token"), Value::Bool(self.add_eos)));
        let named = self.templates.iter().filter(|(name, _)| name != "default");
        let names: Vec<String> = named.map(|(name, _)| name.clone()).collect();
        if !names.is_empty() {
            keys.push(("tokenizer.chat_templates".into(), Value::Texts(names)));
        }
        for (name, source) in &self.templates {
            let key = match name.as_str() {
                "default" => "tokenizer.chat_template".into(),
                name => format!("tokenizer.chat_template.{name}"),
            };
            keys.push((key, Value::Text(source.clone())));
        }
        keys
    }
}

/// Tokens by id.
struct Table {
    tokens: Vec<String>,
    kinds: Vec<TokenKind>,
}

impl Table {
    /// The tokens of a `tokenizer.json` for a model with `rows` rows.
    fn read(json: &Json, rows: usize) -> Result<Self, String> {
        let kind = json["model"]["type"].as_str().unwrap_or("BPE");
        let vocab = json["model"]["vocab"].as_object();
        let Some(vocab) = vocab.filter(|_| kind == "BPE") else {
            return Err(format!(
                "has a tokenizer of the kind {}, and GGUF takes BPE; export to hf instead",
                shown(kind)
            ));
        };
        let mut slots: Vec<Option<(String, TokenKind)>> = vec![None; rows];
        for (token, id) in vocab {
            let slot = row(&mut slots, token, id)?;
            *slot = Some((token.clone(), TokenKind::Normal));
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().unwrap_or_default();
            let slot = row(&mut slots, text, &added["id"])?;
            *slot = Some(if added["special"] == true || looks_special(text) {
                (text.to_owned(), TokenKind::Control)
            } else {
                (text.replace(SPACE, " "), TokenKind::UserDefined)
            });
        }
        let fill = |(id, slot): (usize, Option<_>)| {
            slot.unwrap_or_else(|| (format!("[PAD{id}]"), TokenKind::Unused))
        };
        let (tokens, kinds): (Vec<String>, Vec<TokenKind>) =
            slots.into_iter().enumerate().map(fill).unzip();
        let mut seen = HashSet::new();
        if let Some(twice) = tokens.iter().find(|token| !seen.insert(*token)) {
            return Err(format!(
                "has two ids for the token {}, which llama.cpp refuses; export to hf instead",
                shown(twice)
            ));
        }
        Ok(Self { tokens, kinds })
    }

    /// Tokens that stand for bytes, and the one for what no token covers.
    fn mark_bytes(&mut self, unknown: Option<&str>) {
        for (token, kind) in self.tokens.iter().zip(&mut self.kinds) {
            if Some(token.as_str()) == unknown {
                *kind = TokenKind::Unknown;
            } else if is_byte(token) {
                *kind = TokenKind::Byte;
            }
        }
    }
}

fn row<'a, T>(slots: &'a mut [T], token: &str, id: &Json) -> Result<&'a mut T, String> {
    let rows = slots.len();
    let id = id.as_u64().unwrap_or(u64::MAX);
    let slot = usize::try_from(id).ok().and_then(|id| slots.get_mut(id));
    slot.ok_or_else(|| {
        format!(
            "has the token {} with id {id}, and the model has {rows} rows; use the model's own tokenizer",
            shown(token)
        )
    })
}

fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Tokens that some tokenizers add as ordinary ones, and that must not be shown.
fn looks_special(token: &str) -> bool {
    let within = |start: &str, end: &str| {
        token.len() > start.len() + end.len() && token.starts_with(start) && token.ends_with(end)
    };
    within("<|", "|>") || within("<\u{ff5c}", "\u{ff5c}>") || token == "<pad>" || token == "<mask>"
}

fn bytes(json: &Json, notes: &mut Vec<String>) -> Algorithm {
    let split = splits::name(json).unwrap_or_else(|| {
        notes.push(format!(
            "llama.cpp has no rule that splits text as this tokenizer does; `{}` is named instead, and \
             some texts will have other tokens",
            splits::FALLBACK
        ));
        splits::FALLBACK
    });
    if !matches!(json["normalizer"]["type"].as_str(), None | Some("NFC")) {
        notes.push("llama.cpp does not apply this tokenizer's normalizer: some texts will have other tokens".into());
    }
    // A space is written as another character in this kind of tokenizer; one that is not would end
    // the first half.
    let half = |text: &str| text.replace(' ', "\u{120}");
    let merges = pairs(json).map(|(left, right)| format!("{} {}", half(left), half(right)));
    Algorithm::Bytes {
        split,
        merges: merges.collect(),
    }
}

fn pieces(json: &Json, tokens: &[String], notes: &mut Vec<String>) -> Result<Algorithm, String> {
    if json["model"]["byte_fallback"] != true {
        let what = "has a tokenizer that is neither byte-level nor falls back to bytes, and llama.cpp has \
                    no algorithm for it; export to hf instead";
        return Err(what.into());
    }
    let space_first = space_first(json).unwrap_or_else(|| {
        notes.push("llama.cpp does not apply all of this tokenizer's normalizer: some texts will have other tokens".into());
        false
    });
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (left, right) in pairs(json) {
        let next = ranks.len();
        ranks.entry(format!("{left}{right}")).or_insert(next);
    }
    // What no merge gives is never looked for.
    let score = |token: &String| ranks.get(token).map_or(0.0, |rank| -(*rank as f32));
    Ok(Algorithm::Pieces {
        scores: tokens.iter().map(score).collect(),
        space_first,
    })
}

/// Whether a space is put before a text; `None` where the tokenizer changes more than spaces.
fn space_first(json: &Json) -> Option<bool> {
    let mut first = false;
    let normalizer = &json["normalizer"];
    let steps = match normalizer["normalizers"].as_array() {
        Some(steps) => steps.iter().collect(),
        None if normalizer.is_null() => Vec::new(),
        None => vec![normalizer],
    };
    for step in steps {
        match step["type"].as_str() {
            Some("Prepend") if step["prepend"] == SPACE => first = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == SPACE => {}
            _ => return None,
        }
    }
    let split = &json["pre_tokenizer"];
    match split["type"].as_str() {
        None => {}
        Some("Metaspace") => {
            let scheme = split["prepend_scheme"].as_str();
            let old = split["add_prefix_space"].as_bool();
            first |= scheme.map_or(old.unwrap_or(true), |scheme| scheme != "never");
        }
        Some(_) => return None,
    }
    Some(first)
}

/// The merges of a `tokenizer.json`, in either of its spellings.
fn pairs(json: &Json) -> impl Iterator<Item = (&str, &str)> {
    let merges = json["model"]["merges"].as_array().into_iter().flatten();
    merges.filter_map(|merge| match merge {
        Json::String(line) => line
            .split_once(' ')
            .filter(|_| !line.starts_with("#version")),
        merge => Some((merge[0].as_str()?, merge[1].as_str()?)),
    })
}

/// Tokens that begin and end texts.
struct Ends {
    ids: Vec<(&'static str, u32)>,
    add_bos: bool,
    add_eos: bool,
    note: Option<String>,
}

impl Ends {
    fn read(tokenizer: &Tokenizer, config: &ModelConfig) -> Result<Self> {
        // What is put around a text is seen at one; the rest of a file's word on it is ambiguous.
        let plain = tokenizer.encode("a", false)?;
        let whole = tokenizer.encode("a", true)?;
        let at = whole.windows(plain.len().max(1)).position(|w| w == plain);
        let (before, after) = match at {
            Some(at) => (&whole[..at], &whole[at + plain.len()..]),
            None => (&[][..], &[][..]),
        };
        let known = |id: &u32| (*id as usize) < config.vocab;
        let raw = match config.to_json() {
            Json::Object(raw) => raw,
            _ => Map::new(),
        };
        let of_config = |name: &str| {
            let value = raw.get(name)?;
            let id = value.as_u64().or_else(|| value.get(0)?.as_u64())?;
            u32::try_from(id).ok()
        };
        let named = |name: &str| {
            let token = tokenizer.special_tokens().get(name);
            let id = token.and_then(|token| tokenizer.token_id(token));
            id.or_else(|| of_config(&format!("{name}_id")))
                .filter(known)
        };
        let bos = before
            .first()
            .copied()
            .or_else(|| tokenizer.bos().filter(known));
        let eos = after
            .last()
            .copied()
            .or_else(|| tokenizer.eos().first().copied().filter(known));
        let found = [
            ("bos_token_id", bos.or_else(|| named("bos_token"))),
            ("eos_token_id", eos.or_else(|| named("eos_token"))),
            ("eot_token_id", end_of_turn(tokenizer, eos)?.filter(known)),
            ("unknown_token_id", named("unk_token")),
            // So spelled in the format.
            ("seperator_token_id", named("sep_token")),
            (
                "padding_token_id",
                tokenizer.pad().filter(known).or_else(|| named("pad_token")),
            ),
            ("mask_token_id", named("mask_token")),
        ];
        let is_simple = at.is_some() && before.len() <= 1 && after.len() <= 1;
        let note =
            "llama.cpp puts one token before and after a text at most; this tokenizer puts others";
        Ok(Self {
            ids: found
                .iter()
                .filter_map(|(name, id)| Some((*name, (*id)?)))
                .collect(),
            add_bos: !before.is_empty(),
            add_eos: !after.is_empty(),
            note: (!is_simple).then(|| note.into()),
        })
    }
}

/// The token that ends a turn, where it is not the one that ends a text: another stop token of the
/// model, which its chat template writes.
fn end_of_turn(tokenizer: &Tokenizer, eos: Option<u32>) -> Result<Option<u32>> {
    let template = tokenizer
        .chat_templates()
        .find(|(name, _)| *name == "default");
    let Some((_, template)) = template else {
        return Ok(None);
    };
    let is_written = |id: u32| -> Result<bool> {
        let token = tokenizer.decode(&[id], false)?;
        Ok(!token.is_empty() && template.contains(&token))
    };
    if let Some(eos) = eos
        && (is_written(eos)? || template.contains("eos_token"))
    {
        return Ok(None);
    }
    for id in tokenizer.eos() {
        if Some(*id) != eos && is_written(*id)? {
            return Ok(Some(*id));
        }
    }
    Ok(None)
}

fn templates(tokenizer: &Tokenizer) -> Vec<(String, String)> {
    let all = tokenizer.chat_templates();
    all.map(|(name, source)| (name.to_owned(), source.to_owned()))
        .collect()
}
