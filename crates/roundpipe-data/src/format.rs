//! What the rows of a file mean: conversations, prompts with completions, or plain text, in the
//! shapes that data sets have.
//!
//! | format | keys | becomes |
//! |---|---|---|
//! | messages | `messages` (role, content; tool calls pass through), `tools` | a conversation |
//! | ShareGPT | `conversations` (from, value), `system`, `tools` | a conversation |
//! | Alpaca | `instruction`, `input`, `output`, `system`, `history` | a conversation |
//! | prompt/completion | `prompt`, `completion`: texts, or lists of messages | two texts, or a conversation of which the completion is learned |
//! | text | `text` | a text |
//! | preference pairs | `chosen`, `rejected` | two answers to one prompt: see [`preference`](crate::preference) |
//!
//! The first row of a file decides its format, and every other row must have it too: a file that
//! mixes formats is more likely a mistake than a wish. Keys that a format does not have are ignored.
//!
//! # Invariants
//! - Parsing a row takes memory in proportion to its bytes: JSON of more than [`MOST_VALUES`] values
//!   is refused before it is parsed.

use std::fmt;

use roundpipe_files::text::{one_line, shown};
use roundpipe_models::chat::Message;
use roundpipe_models::chat::mask::TrainOn;
use serde_json::{Map, Value as Json};

use crate::preference::{self, Pair};

/// The most values in the JSON of one row.
pub(crate) const MOST_VALUES: usize = 1 << 18;
/// The keys that formats read; a table's other columns are left out.
pub(crate) const KEYS: [&str; 15] = [
    "messages",
    "conversations",
    "tools",
    "chat_template_kwargs",
    "system",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "question",
];
/// The most messages of a conversation.
const MOST_MESSAGES: usize = 4096;

/// The format of a file's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `messages` with `role` and `content`, as OpenAI and Hugging Face have them.
    Messages,
    /// `conversations` with `from` and `value`.
    ShareGpt,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `prompt`, `completion`.
    PromptCompletion,
    /// `text`, or a file of plain text.
    Text,
    /// `prompt` (or `instruction`, `question`) with `chosen` and `rejected`.
    Preference,
    /// `chosen` and `rejected`, which begin with the prompt.
    ImplicitPreference,
    /// `conversations` with `chosen` and `rejected`.
    ShareGptPreference,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "messages",
            Self::ShareGpt => "ShareGPT",
            Self::Alpaca => "Alpaca",
            Self::PromptCompletion => "prompt/completion",
            Self::Text => "text",
            Self::Preference => "preference pairs",
            Self::ImplicitPreference => "preference pairs with the prompt inside",
            Self::ShareGptPreference => "ShareGPT preference pairs",
        })
    }
}

/// What a row asks a model to learn.
#[derive(Debug, Clone, PartialEq)]
pub enum Example {
    /// A conversation.
    Chat(Chat),
    /// A text that is given and one that is learned.
    Completion {
        /// Given.
        prompt: String,
        /// Learned.
        completion: String,
    },
    /// A text, all of which is learned.
    Text {
        /// The text.
        text: String,
        /// Whether a document ends behind it, rather than going on in the next row.
        ends: bool,
    },
    /// Two answers, of which one is preferred.
    Preference(Box<Pair>),
}

/// A conversation and what a chat template is given beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// Its messages.
    pub messages: Vec<Message>,
    /// Descriptions of tools.
    pub tools: Option<Vec<Json>>,
    /// Further variables of the template (`chat_template_kwargs`).
    pub variables: Map<String, Json>,
    /// Which turns of the assistant the row asks for.
    pub train_on: TrainOn,
}

/// Why a row cannot be used, and the fix.
pub(crate) type Refusal = String;

impl Format {
    /// The format that the keys of a row have.
    pub(crate) fn detect(row: &Map<String, Json>) -> Result<Self, Refusal> {
        let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
        let found = if has("chosen") && has("rejected") {
            preference::detect(row)
        } else if has("messages") {
            Self::Messages
        } else if has("conversations") {
            Self::ShareGpt
        } else if has("instruction") && row.contains_key("output") {
            Self::Alpaca
        } else if has("prompt") && row.contains_key("completion") {
            Self::PromptCompletion
        } else if has("text") {
            Self::Text
        } else {
            let keys: Vec<String> = row.keys().take(8).map(|key| shown(key)).collect();
            return Err(format!(
                "has the keys {}, which are no known format; use `messages`, `conversations`, `instruction` \
                 and `output`, `prompt` and `completion`, `chosen` and `rejected`, or `text`",
                keys.join(", ")
            ));
        };
        Ok(found)
    }

    /// Reads a row.
    pub(crate) fn read(self, row: Map<String, Json>) -> Result<Example, Refusal> {
        match self {
            Self::Messages => messages(row),
            Self::ShareGpt => share_gpt(row),
            Self::Alpaca => alpaca(&row),
            Self::PromptCompletion => prompt_completion(row),
            Self::Text => {
                let text = text(&row, "text")?;
                if text.is_empty() {
                    return Err("its `text` is empty; remove the row".into());
                }
                Ok(Example::Text { text, ends: true })
            }
            Self::Preference | Self::ImplicitPreference | Self::ShareGptPreference => {
                preference::read(self, row)
            }
        }
    }

    /// Whether rows are pairs of answers, which only DPO and ORPO learn from.
    pub fn is_preference(self) -> bool {
        matches!(
            self,
            Self::Preference | Self::ImplicitPreference | Self::ShareGptPreference
        )
    }
}

/// The object of a row of JSON.
pub(crate) fn object(bytes: &[u8]) -> Result<Map<String, Json>, Refusal> {
    match json(bytes)? {
        Json::Object(row) => Ok(row),
        other => Err(format!(
            "is {} and not an object {{…}}; write one object per row",
            kind(&other)
        )),
    }
}

/// JSON of a bounded number of values.
fn json(bytes: &[u8]) -> Result<Json, Refusal> {
    if values(bytes) > MOST_VALUES {
        return Err(format!(
            "its JSON has more than {MOST_VALUES} values; remove or split the row"
        ));
    }
    serde_json::from_slice(bytes).map_err(|e| {
        let e = one_line(&e.to_string());
        format!("is no JSON that can be read ({e}); correct or remove it")
    })
}

/// How many values JSON has at most, seen from its brackets and commas.
fn values(bytes: &[u8]) -> usize {
    let mut in_string = false;
    let mut escaped = false;
    let mut count = 1;
    for byte in bytes {
        if in_string {
            in_string = escaped || *byte != b'"';
            escaped = !escaped && *byte == b'\\';
        } else {
            in_string = *byte == b'"';
            count += usize::from(matches!(byte, b',' | b'[' | b'{'));
        }
    }
    count
}

pub(crate) fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a truth value",
        Json::Number(_) => "a number",
        Json::String(_) => "a text",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

pub(crate) fn text(row: &Map<String, Json>, key: &str) -> Result<String, Refusal> {
    match row.get(key) {
        Some(Json::String(text)) => Ok(text.clone()),
        None => Err(format!(
            "has no `{key}`, which other rows of the file have; add it or remove the row"
        )),
        Some(other) => Err(format!("its `{key}` is {}; write a text", kind(other))),
    }
}

/// A text that may be absent.
pub(crate) fn optional_text(row: &Map<String, Json>, key: &str) -> Result<String, Refusal> {
    match row.get(key) {
        None | Some(Json::Null) => Ok(String::new()),
        _ => text(row, key),
    }
}

/// A list, also one that stands as JSON in a text (CSV, some parquet files).
pub(crate) fn list(row: &mut Map<String, Json>, key: &str) -> Result<Vec<Json>, Refusal> {
    let value = match row.remove(key) {
        Some(Json::String(text)) => {
            json(text.as_bytes()).map_err(|why| format!("its `{key}` {why}"))?
        }
        Some(value) => value,
        None => {
            return Err(format!(
                "has no `{key}`, which other rows of the file have; add it or remove the row"
            ));
        }
    };
    match value {
        Json::Array(items) => Ok(items),
        other => Err(format!("its `{key}` is {}; write a list", kind(&other))),
    }
}

pub(crate) fn optional_list(
    row: &mut Map<String, Json>,
    key: &str,
) -> Result<Option<Vec<Json>>, Refusal> {
    match row.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) if text.trim().is_empty() => Ok(None),
        _ => {
            let items = list(row, key)?;
            Ok((!items.is_empty()).then_some(items))
        }
    }
}

pub(crate) fn variables(row: &mut Map<String, Json>) -> Result<Map<String, Json>, Refusal> {
    match row.remove("chat_template_kwargs") {
        None | Some(Json::Null) => Ok(Map::new()),
        Some(Json::Object(variables)) => Ok(variables),
        Some(other) => Err(format!(
            "its `chat_template_kwargs` are {}; write an object",
            kind(&other)
        )),
    }
}

fn messages(mut row: Map<String, Json>) -> Result<Example, Refusal> {
    let items = list(&mut row, "messages")?;
    let tools = optional_list(&mut row, "tools")?;
    Ok(Example::Chat(Chat {
        messages: read_messages(items)?,
        tools,
        variables: variables(&mut row)?,
        train_on: TrainOn::All,
    }))
}

pub(crate) fn read_messages(items: Vec<Json>) -> Result<Vec<Message>, Refusal> {
    if items.is_empty() {
        return Err("has no message; remove it".into());
    }
    if items.len() > MOST_MESSAGES {
        return Err(format!(
            "has more than {MOST_MESSAGES} messages; split the conversation"
        ));
    }
    let numbered = (1..).zip(items);
    numbered
        .map(|(number, item)| {
            let Json::Object(fields) = item else {
                return Err(format!(
                    "message {number} is {}; write an object with `role` and `content`",
                    kind(&item)
                ));
            };
            read_message(fields).map_err(|why| format!("message {number} {why}"))
        })
        .collect()
}

fn read_message(mut fields: Map<String, Json>) -> Result<Message, Refusal> {
    match fields.get("role") {
        Some(Json::String(role)) if !role.is_empty() => {}
        _ => return Err("has no `role`; write system, user, assistant or tool".into()),
    }
    let content = fields.get("content");
    if !matches!(
        content,
        None | Some(Json::Null | Json::String(_) | Json::Array(_))
    ) {
        return Err("has a `content` that is no text and no list of parts; correct it".into());
    }
    let is_call_list = |calls: &Json| {
        let calls = calls.as_array();
        calls.is_some_and(|calls| calls.iter().all(Json::is_object))
    };
    let calls = fields.get("tool_calls").filter(|calls| !calls.is_null());
    if !calls.is_none_or(is_call_list) {
        return Err("has `tool_calls` that are no list of objects; write one".into());
    }
    if content.is_none() && !fields.contains_key("tool_calls") {
        return Err("has neither `content` nor `tool_calls`; add one".into());
    }
    if fields
        .get("weight")
        .and_then(Json::as_f64)
        .is_some_and(|weight| weight != 1.0)
    {
        return Err("has a `weight`, which is not supported; remove it, or the message".into());
    }
    // Tables fill absent keys with null, and templates ask whether a key is there.
    fields.retain(|key, value| key == "content" || !value.is_null());
    fields.entry("content").or_insert(Json::Null);
    if let Some(Json::Array(calls)) = fields.get_mut("tool_calls") {
        calls.iter_mut().for_each(open_arguments);
    }
    Ok(Message(fields))
}

/// Arguments that stand as JSON in a text become an object: what chat templates expect.
fn open_arguments(call: &mut Json) {
    let function = match call.get_mut("function") {
        Some(function) => function,
        None => call,
    };
    let Some(arguments) = function.get_mut("arguments") else {
        return;
    };
    let opened = arguments
        .as_str()
        .and_then(|text| object(text.as_bytes()).ok());
    if let Some(opened) = opened {
        *arguments = Json::Object(opened);
    }
}

fn share_gpt(mut row: Map<String, Json>) -> Result<Example, Refusal> {
    let items = list(&mut row, "conversations")?;
    let tools = optional_list(&mut row, "tools")?;
    let mut spoken = Vec::new();
    let system = optional_text(&row, "system")?;
    if !system.is_empty() {
        spoken.push(speech("system", Json::String(system)));
    }
    for (number, item) in (1..).zip(items) {
        let turn = share_gpt_turn(item).map_err(|why| format!("message {number} {why}"))?;
        spoken.push(turn);
    }
    Ok(Example::Chat(Chat {
        messages: read_messages(spoken)?,
        tools,
        variables: variables(&mut row)?,
        train_on: TrainOn::All,
    }))
}

pub(crate) fn speech(role: &str, content: Json) -> Json {
    let fields = [("role".into(), role.into()), ("content".into(), content)];
    Json::Object(fields.into_iter().collect())
}

pub(crate) fn share_gpt_turn(item: Json) -> Result<Json, Refusal> {
    let Json::Object(mut turn) = item else {
        return Err(format!(
            "is {}; write an object with `from` and `value`",
            kind(&item)
        ));
    };
    // Some files of this name have the keys of `messages`.
    if turn.contains_key("role") {
        return Ok(Json::Object(turn));
    }
    let from = text(&turn, "from").map_err(|_| "has no `from`; write human or gpt")?;
    let Some(value @ Json::String(_)) = turn.remove("value") else {
        return Err("has no `value` that is a text; write one".into());
    };
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "bing" | "bard" | "model" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function_response" => "tool",
        "function_call" => return Ok(function_call(value)),
        other => {
            return Err(format!(
                "is from {}; write human, gpt, system, function_call or observation",
                shown(other)
            ));
        }
    };
    Ok(speech(role, value))
}

/// A call of tools that stands as JSON in a text, or what was said if it is none.
fn function_call(value: Json) -> Json {
    let calls = match value.as_str().map(|text| json(text.as_bytes())) {
        Some(Ok(Json::Array(calls))) => calls,
        Some(Ok(call @ Json::Object(_))) => vec![call],
        _ => return speech("assistant", value),
    };
    if !calls.iter().all(|call| call.get("name").is_some()) {
        return speech("assistant", value);
    }
    let wrap = |call: Json| {
        let fields = [
            ("type".into(), "function".into()),
            ("function".into(), call),
        ];
        Json::Object(fields.into_iter().collect())
    };
    let calls = calls.into_iter().map(wrap).collect();
    let mut message = speech("assistant", Json::Null);
    message["tool_calls"] = Json::Array(calls);
    message
}

fn alpaca(row: &Map<String, Json>) -> Result<Example, Refusal> {
    let instruction = text(row, "instruction")?;
    let input = optional_text(row, "input")?;
    let output = text(row, "output")?;
    if output.is_empty() {
        return Err("its `output` is empty; remove the row".into());
    }
    let mut messages = Vec::new();
    let system = optional_text(row, "system")?;
    if !system.is_empty() {
        messages.push(Message::new("system", system));
    }
    for (user, assistant) in history(row)? {
        messages.push(Message::new("user", user));
        messages.push(Message::new("assistant", assistant));
    }
    messages.push(Message::new("user", asked(instruction, input)));
    messages.push(Message::new("assistant", output));
    Ok(Example::Chat(Chat {
        messages,
        tools: None,
        variables: Map::new(),
        train_on: TrainOn::All,
    }))
}

/// What the user says in an Alpaca row.
pub(crate) fn asked(instruction: String, input: String) -> String {
    match (instruction.is_empty(), input.is_empty()) {
        (_, true) => instruction,
        (true, false) => input,
        (false, false) => format!("{instruction}\n\n{input}"),
    }
}

/// Earlier turns: pairs of texts.
pub(crate) fn history(row: &Map<String, Json>) -> Result<Vec<(String, String)>, Refusal> {
    let pairs = match row.get("history") {
        None | Some(Json::Null) => return Ok(Vec::new()),
        Some(Json::Array(pairs)) => pairs,
        Some(_) => return Err("its `history` is no list; write pairs of texts".into()),
    };
    let pair = |pair: &Json| Some((pair.get(0)?.as_str()?.into(), pair.get(1)?.as_str()?.into()));
    let read: Option<Vec<(String, String)>> = pairs.iter().map(pair).collect();
    let read = read.ok_or("its `history` has an entry that is no pair of texts; correct it")?;
    if read.len() > MOST_MESSAGES / 2 {
        return Err(format!("has more than {MOST_MESSAGES} messages; split it"));
    }
    Ok(read)
}

fn prompt_completion(mut row: Map<String, Json>) -> Result<Example, Refusal> {
    if matches!(row.get("prompt"), Some(Json::Array(_))) {
        return chat_completion(&mut row);
    }
    let prompt = text(&row, "prompt")?;
    let completion = text(&row, "completion")?;
    if completion.is_empty() {
        return Err("its `completion` is empty; remove the row".into());
    }
    Ok(Example::Completion { prompt, completion })
}

/// Lists of messages: only those of the completion are learned.
fn chat_completion(row: &mut Map<String, Json>) -> Result<Example, Refusal> {
    let mut items = list(row, "prompt")?;
    let completion = list(row, "completion")?;
    let is_assistant = |item: &&Json| item["role"] == "assistant";
    let asked = items.iter().filter(is_assistant).count();
    let learned = completion.iter().filter(is_assistant).count();
    if learned == 0 {
        return Err("its `completion` has no turn of the assistant; add one".into());
    }
    if asked > 0 && learned > 1 {
        let what = "its `prompt` has turns of the assistant and its `completion` more than one; \
                    write `messages` to learn all of them";
        return Err(what.into());
    }
    items.extend(completion);
    Ok(Example::Chat(Chat {
        messages: read_messages(items)?,
        tools: optional_list(row, "tools")?,
        variables: variables(row)?,
        train_on: if asked > 0 {
            TrainOn::Last
        } else {
            TrainOn::All
        },
    }))
}
