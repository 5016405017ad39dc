//! Text to ids and back, from the files of a model's folder.
//!
//! `tokenizer.json` says how text is cut; `tokenizer_config.json`, `special_tokens_map.json` and
//! `generation_config.json` say which ids begin and end a text; `chat_template.jinja`,
//! `chat_template.json` or the config hold the chat template. What is missing is absent, what is
//! broken is refused with the file's name.
//!
//! Files come from others, and the library that runs `tokenizer.json` trusts them. So
//! `definition.rs` looks at the whole file before that library sees it, `bounded.rs` keeps texts
//! from growing inside it, and a panic that is left becomes an error. What it says about truncation
//! and padding is not obeyed; callers cut and fill themselves.
//!
//! # Invariants
//! - The pieces of a [`Stream`] are whole characters, and together they are what decoding all ids
//!   at once gives.

mod bounded;
mod charsmap;
mod definition;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use roundpipe_files::small;
use roundpipe_files::text::shown;
use serde_json::Value as Json;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, PostProcessorWrapper, TokenizerImpl};

use crate::chat::{ChatTemplate, Message, RenderOptions};
use crate::error::{Error, Result};
use crate::limits;

/// The most files in `additional_chat_templates`.
const MOST_TEMPLATES: usize = 64;

type Inner = TokenizerImpl<
    ModelWrapper,
    bounded::Normalize,
    bounded::PreTokenize,
    PostProcessorWrapper,
    bounded::Decode,
>;

/// A tokenizer with its special tokens and chat templates.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    folder: PathBuf,
    inner: Inner,
    /// Special tokens by name (`bos_token`, …), as templates see them.
    tokens: BTreeMap<String, String>,
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    /// Bytes that no token covers are written as `<0xE4>`.
    byte_fallback: bool,
    templates: BTreeMap<String, (PathBuf, String)>,
}

impl Tokenizer {
    /// Reads the tokenizer of a folder.
    ///
    /// # Errors
    /// [`Error::File`] with the file, what is wrong and what helps.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let Some(bytes) = small::read_if_there(&path, limits::VOCABULARY)? else {
            let fix = "not found; a model's folder needs it (save the tokenizer with transformers' save_pretrained)";
            return Err(Error::file(path, fix));
        };
        let mut this = Self::parse(&path, &bytes)?;
        this.folder = folder.to_path_buf();
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let map = read_object(&folder.join("special_tokens_map.json"))?;
        this.tokens = special_tokens(&map);
        this.tokens.extend(special_tokens(&config));
        this.mark_special()?;
        this.find_ends()?;
        let flag = |name: &str| config.get(name).and_then(Json::as_bool);
        (this.add_bos, this.add_eos) = (flag("add_bos_token"), flag("add_eos_token"));
        this.templates = templates(folder, &config)?;
        Ok(this)
    }

    /// Reads the bytes of a `tokenizer.json` alone: no special tokens by name, no chat templates.
    /// `path` is only for messages.
    ///
    /// # Errors
    /// [`Error::File`] when it is no tokenizer, or one that cannot be run safely.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let refuse = |what: &str| {
            Error::file(
                path,
                format!(
                    "is no tokenizer that can be used: {}; fetch it again",
                    one_line(what)
                ),
            )
        };
        let mut json = small::parse_json(path, bytes, limits::VOCABULARY)?;
        definition::check(&mut json).map_err(|what| refuse(&what))?;
        let byte_fallback = json["decoder"].to_string().contains("ByteFallback");
        let inner =
            guarded(|| serde_json::from_value::<Inner>(json)).map_err(|what| refuse(&what))?;
        guarded(|| refuse_odd_tokens(&inner)).map_err(|what| refuse(&what))?;
        Ok(Self {
            folder: PathBuf::new(),
            inner,
            tokens: BTreeMap::new(),
            bos: None,
            eos: Vec::new(),
            pad: None,
            add_bos: None,
            add_eos: None,
            byte_fallback,
            templates: BTreeMap::new(),
        })
    }

    /// Named tokens are special, as in transformers, even where `tokenizer.json` does not say so.
    fn mark_special(&mut self) -> Result<()> {
        let added = self.inner.get_added_tokens_decoder();
        let known = |token: &str| added.values().any(|t| t.special && t.content == token);
        let new: Vec<_> = self
            .tokens
            .values()
            .filter(|token| !known(token) && self.inner.token_to_id(token).is_some())
            .map(|token| tokenizers::AddedToken::from(token.as_str(), true))
            .collect();
        if new.is_empty() {
            return Ok(());
        }
        // The tokens exist, so their ids stay.
        let added = guarded(|| self.inner.add_special_tokens(new));
        added.map(drop).map_err(|what| {
            let what = format!("names special tokens that cannot be added ({what}); correct it");
            Error::file(self.folder.join("tokenizer_config.json"), what)
        })
    }

    /// The ids that begin, end and fill a text.
    fn find_ends(&mut self) -> Result<()> {
        let path = self.folder.join("generation_config.json");
        let generation = read_object(&path)?;
        let named = |name: &str| {
            self.tokens
                .get(name)
                .and_then(|token| self.inner.token_to_id(token))
        };
        let field = |name: &str| ids(&path, &generation, name);
        let bos = named("bos_token").or(field("bos_token_id")?.first().copied());
        let pad = named("pad_token").or(field("pad_token_id")?.first().copied());
        let mut eos: Vec<u32> = named("eos_token").into_iter().collect();
        for id in field("eos_token_id")? {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        (self.bos, self.eos, self.pad) = (bos, eos, pad);
        Ok(())
    }

    /// The ids of a conversation up to where the assistant answers, by the model's chat template;
    /// nothing where it has none.
    ///
    /// # Errors
    /// When the template cannot be parsed or rendered.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Option<Vec<u32>>> {
        let Some(template) = self.chat_template(false)? else {
            return Ok(None);
        };
        let options = RenderOptions {
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        // The template writes the special tokens itself.
        let ids = self.encode(&template.render(messages, &options)?, false)?;
        Ok(Some(ids))
    }

    /// The ids of a text; with the tokens that begin and end one when `add_special`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the tokenizer cannot cut the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        Ok(self.encode_with_offsets(text, add_special)?.0)
    }

    /// The ids of a text and the bytes of the text that each stands for; added tokens stand for
    /// none.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_offsets(
        &self,
        text: &str,
        add_special: bool,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let refuse = |what: &str| {
            Error::argument(
                "text",
                format!("the tokenizer refuses it: {}", one_line(what)),
            )
        };
        bounded::take_refusal();
        let encoding = guarded(|| self.inner.encode(text, add_special));
        if let Some(why) = bounded::take_refusal() {
            return Err(refuse(why));
        }
        let encoding = encoding.map_err(|what| refuse(&what))?;
        let mut ids = encoding.get_ids().to_vec();
        let mut offsets: Vec<Range<usize>> =
            encoding.get_offsets().iter().map(|(a, b)| *a..*b).collect();
        if add_special {
            self.adjust_ends(&mut ids, &mut offsets, encoding.get_special_tokens_mask());
        }
        Ok((ids, offsets))
    }

    /// `add_bos_token` and `add_eos_token` of the config overrule what `tokenizer.json` adds.
    fn adjust_ends(&self, ids: &mut Vec<u32>, offsets: &mut Vec<Range<usize>>, special: &[u32]) {
        let added = |at: Option<usize>, id: u32, ids: &[u32]| {
            at.is_some_and(|at| {
                ids.get(at) == Some(&id)
                    && special.get(at) == Some(&1)
                    && offsets_empty(at, offsets)
            })
        };
        let end = offsets.last().map_or(0, |o| o.end);
        if let (Some(add), Some(&eos)) = (self.add_eos, self.eos.first()) {
            let has = added(ids.len().checked_sub(1), eos, ids);
            if add && !has {
                ids.push(eos);
                offsets.push(end..end);
            } else if !add && has {
                ids.pop();
                offsets.pop();
            }
        }
        if let (Some(add), Some(bos)) = (self.add_bos, self.bos) {
            let has = ids.first() == Some(&bos)
                && special.first() == Some(&1)
                && offsets_empty(0, offsets);
            if add && !has {
                ids.insert(0, bos);
                offsets.insert(0, 0..0);
            } else if !add && has {
                ids.remove(0);
                offsets.remove(0);
            }
        }
    }

    /// The text of ids; without special tokens when `skip_special`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the tokenizer cannot join them.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guarded(|| self.inner.decode(ids, skip_special)).map_err(|what| {
            Error::argument(
                "ids",
                format!("the tokenizer cannot join them: {}", one_line(&what)),
            )
        })
    }

    /// Starts to decode ids one by one.
    pub fn stream(&self, skip_special: bool) -> Stream<'_> {
        Stream {
            tokenizer: self,
            skip_special,
            ids: Vec::new(),
            read: 0,
        }
    }

    /// The id that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The ids that end a text: the tokenizer's first, then those of `generation_config.json`.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The id that fills up batches.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The longest added token that `text` begins with.
    pub(crate) fn added_prefix(&self, text: &str) -> Option<String> {
        let added = self.inner.get_added_tokens_decoder();
        let hits = added
            .values()
            .filter(|t| !t.content.is_empty() && text.starts_with(&t.content));
        hits.map(|t| t.content.clone()).max_by_key(String::len)
    }

    /// Whether `text` ends with an added token.
    pub(crate) fn ends_with_added(&self, text: &str) -> bool {
        let added = self.inner.get_added_tokens_decoder();
        added
            .values()
            .any(|t| !t.content.is_empty() && text.ends_with(&t.content))
    }

    /// Special tokens by name, as templates see them.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.tokens
    }

    /// The sources of all chat templates by name; the usual one is `default`.
    pub fn chat_templates(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.templates.iter();
        all.map(|(name, (_, source))| (name.as_str(), source.as_str()))
    }

    /// The chat template, if the folder has one; for conversations with tools, the one made for
    /// them if any.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be parsed.
    pub fn chat_template(&self, with_tools: bool) -> Result<Option<ChatTemplate>> {
        let named = |name: &str| self.templates.get(name);
        let found = named("tool_use")
            .filter(|_| with_tools)
            .or_else(|| named("default"));
        let Some((path, source)) = found else {
            let names: Vec<&str> = self.templates.keys().map(String::as_str).collect();
            if names.is_empty() {
                return Ok(None);
            }
            let what = format!(
                "has no chat template named 'default', only {}; rename one",
                names.join(", ")
            );
            return Err(Error::file(&self.folder, what));
        };
        ChatTemplate::parse(source, &self.tokens)
            .map(Some)
            .map_err(|e| Error::file(path, e.to_string()))
    }
}

fn offsets_empty(at: usize, offsets: &[Range<usize>]) -> bool {
    offsets.get(at).is_some_and(Range::is_empty)
}

/// Decodes ids as they come.
#[derive(Debug)]
pub struct Stream<'t> {
    tokenizer: &'t Tokenizer,
    skip_special: bool,
    /// The ids of the last piece, as context, and those not yet shown.
    ids: Vec<u32>,
    /// How many of `ids` have been shown.
    read: usize,
}

impl Stream<'_> {
    /// Takes the next id; gives the text that is certain now, if there is any.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        self.ids.push(id);
        // Bytes become characters, or signs for broken ones, only as a whole run; what shows
        // nothing does not end a run.
        if self.is_byte(id) || self.tokenizer.decode(&[id], self.skip_special)?.is_empty() {
            return Ok(None);
        }
        let piece = self.unread()?;
        // A sign for a broken character at the end may be a character that is not complete yet.
        if piece.is_empty() || piece.ends_with('\u{fffd}') {
            return Ok(None);
        }
        self.ids.drain(..self.read);
        self.read = self.ids.len();
        Ok(Some(piece))
    }

    /// What is left when no more ids come.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        self.unread()
    }

    fn unread(&self) -> Result<String> {
        let known = self
            .tokenizer
            .decode(&self.ids[..self.read], self.skip_special)?;
        let all = self.tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(all.strip_prefix(known.as_str()).unwrap_or(&all).to_string())
    }

    fn is_byte(&self, id: u32) -> bool {
        let token = self.tokenizer.inner.id_to_token(id).unwrap_or_default();
        self.tokenizer.byte_fallback
            && token.len() == 6
            && token.starts_with("<0x")
            && token.ends_with('>')
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .take(200)
        .collect()
}

/// Calls the library. Its panics are errors here; those that are known are prevented before.
fn guarded<T, E: ToString>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizers library failed on it".into()),
    }
}

/// Refuses added tokens that the library cannot find in a text without failing. What it looks for
/// is their normalized form, so this is asked of the finished tokenizer.
fn refuse_odd_tokens(inner: &Inner) -> tokenizers::Result<()> {
    let tokens = inner.get_added_tokens_decoder();
    let takes_spaces_behind = tokens.values().any(|token| token.rstrip);
    for token in tokens.values() {
        let mut text = NormalizedString::from(token.content.as_str());
        if let (true, Some(normalizer)) = (token.normalized, inner.get_normalizer()) {
            normalizer.normalize(&mut text)?;
        }
        let name = shown(&token.content);
        // It would be found between all bytes, also inside characters.
        if text.is_empty() {
            return Err(format!("added_tokens: the normalizer leaves nothing of {name}").into());
        }
        // It would begin inside spaces that another token has taken, and so end before it starts.
        if takes_spaces_behind && token.lstrip && text.get().starts_with(char::is_whitespace) {
            let what = format!(
                "added_tokens: {name} begins with a space and has lstrip beside tokens with rstrip"
            );
            return Err(what.into());
        }
    }
    Ok(())
}

/// A JSON object from a file; an empty one when the file does not exist.
fn read_object(path: &Path) -> Result<Json> {
    let Some(bytes) = small::read_if_there(path, limits::SETTINGS)? else {
        return Ok(Json::Object(serde_json::Map::new()));
    };
    match small::parse_json(path, &bytes, limits::SETTINGS)? {
        json @ Json::Object(_) => Ok(json),
        _ => Err(Error::file(path, "is no JSON object; fetch it again")),
    }
}

/// `bos_token` and its like: a string, or an object with `content`.
fn special_tokens(config: &Json) -> BTreeMap<String, String> {
    let names = [
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ];
    let text = |value: &Json| {
        value
            .as_str()
            .or_else(|| value.get("content")?.as_str())
            .map(str::to_string)
    };
    names
        .into_iter()
        .filter_map(|name| Some((name.to_string(), text(config.get(name)?)?)))
        .collect()
}

/// An id or a list of ids.
fn ids(path: &Path, config: &Json, name: &str) -> Result<Vec<u32>> {
    let id = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let found = match config.get(name) {
        None | Some(Json::Null) => Some(Vec::new()),
        Some(Json::Array(items)) => items.iter().map(id).collect(),
        Some(value) => id(value).map(|id| vec![id]),
    };
    found.ok_or_else(|| {
        Error::file(
            path,
            format!("'{name}' is no id and no list of ids; correct it"),
        )
    })
}

/// The templates of a folder by name, with the file each is from. Files win over the config.
fn templates(folder: &Path, config: &Json) -> Result<BTreeMap<String, (PathBuf, String)>> {
    let mut found = BTreeMap::new();
    let config_path = folder.join("tokenizer_config.json");
    add_templates(&mut found, &config_path, config.get("chat_template"))?;
    let json_path = folder.join("chat_template.json");
    add_templates(
        &mut found,
        &json_path,
        read_object(&json_path)?.get("chat_template"),
    )?;
    let mut named = vec![("default".to_string(), folder.join("chat_template.jinja"))];
    if let Ok(entries) = std::fs::read_dir(folder.join("additional_chat_templates")) {
        let paths = entries.flatten().map(|entry| entry.path());
        let templates = paths.filter(|path| path.extension().is_some_and(|e| e == "jinja"));
        named.extend(
            templates.filter_map(|path| Some((path.file_stem()?.to_str()?.to_string(), path))),
        );
    }
    if named.len() > MOST_TEMPLATES {
        let what = format!(
            "has more than {MOST_TEMPLATES} templates in additional_chat_templates; remove some"
        );
        return Err(Error::file(folder, what));
    }
    for (name, path) in named {
        if let Some(bytes) = small::read_if_there(&path, limits::SETTINGS)? {
            let text = small::utf8(&path, bytes)?;
            found.insert(name, (path, text));
        }
    }
    Ok(found)
}

fn add_templates(
    found: &mut BTreeMap<String, (PathBuf, String)>,
    path: &Path,
    templates: Option<&Json>,
) -> Result<()> {
    let wrong = || {
        Error::file(
            path,
            "'chat_template' is neither a text nor a list of {name, template}; correct it",
        )
    };
    match templates {
        None | Some(Json::Null) => {}
        Some(Json::String(text)) => {
            _ = found.insert("default".into(), (path.to_path_buf(), text.clone()))
        }
        Some(Json::Array(items)) => {
            for item in items {
                let text = |name: &str| item.get(name).and_then(Json::as_str).ok_or_else(wrong);
                let (name, template) = (text("name")?.to_string(), text("template")?.to_string());
                found.insert(name, (path.to_path_buf(), template));
            }
        }
        Some(_) => return Err(wrong()),
    }
    Ok(())
}
