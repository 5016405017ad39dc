//! Chat templates: conversations to the text that a model was trained on, byte for byte as transformers'
//! `apply_chat_template` makes it.
//!
//! A template is a program in Jinja2's language that comes with a model, so it is other people's code. It is
//! parsed once ([`ChatTemplate::parse`]) and interpreted here rather than by a general template engine, because
//! three things must hold that need hands on every operator: Python's semantics (`%` formatting, `repr`,
//! tuples, generators, undefined values), the places of `{% generation %}` blocks in the text, and limits on
//! steps and memory that no expression can get around.
//!
//! It never reads files, never prints, and refuses to run long or grow large.
//!
//! # Invariants
//! - The same template, messages, options and time give the same text.
//! - A render uses at most [`STEPS`] + [`STEPS_PER_BYTE`] × input steps, and holds at most [`ROOM_BYTES`] +
//!   [`ROOM_PER_BYTE`] × input bytes at once, however the template is written.

mod eval;
mod filters;
mod lex;
mod limits;
pub mod mask;
mod methods;
mod ops;
mod parse;
mod predicates;
mod strftime;
mod value;

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value as Json};

use crate::error::{Error, Result};

/// Steps that any render may take.
pub const STEPS: u64 = 4_000_000;
/// Further steps for each byte of the conversation.
pub const STEPS_PER_BYTE: u64 = 200;
/// Bytes that the values and the text of any render may hold at once.
pub const ROOM_BYTES: usize = 32 << 20;
/// Further bytes for each byte of the conversation.
pub const ROOM_PER_BYTE: usize = 64;
/// Longest template.
const SOURCE_BYTES: usize = 1 << 20;

/// What a template did wrong, and where.
#[derive(Debug, Clone)]
struct Fault {
    line: Option<u32>,
    what: String,
}

impl Fault {
    fn new(what: impl Into<String>) -> Self {
        Self { line: None, what: what.into() }
    }

    fn at(line: u32, what: impl Into<String>) -> Self {
        Self { line: Some(line), what: what.into() }
    }

    /// The same fault, in `line` unless it knows better.
    fn or_at(self, line: u32) -> Self {
        Self { line: self.line.or(Some(line)), ..self }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let words = fault.what.split_whitespace().collect::<Vec<_>>().join(" ");
        let short: String = words.chars().take(400).collect();
        Self::Template(match fault.line {
            Some(line) => format!("line {line}: {short}"),
            None => short,
        })
    }
}

/// One message: a JSON object with at least a `role`, as datasets have it.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Message(pub Map<String, Json>);

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let role = ("role".to_string(), Json::String(role.into()));
        let content = ("content".to_string(), Json::String(content.into()));
        Self([role, content].into_iter().collect())
    }

    /// Who speaks; empty when the message does not say.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Json::as_str).unwrap_or("")
    }
}

/// What a render may vary besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with the words that begin an answer.
    pub add_generation_prompt: bool,
    /// Descriptions of tools, as JSON schemas.
    pub tools: Option<Vec<Json>>,
    /// Documents for templates that quote from them.
    pub documents: Option<Vec<Json>>,
    /// Further variables, such as `enable_thinking` or `date_string`.
    pub variables: Map<String, Json>,
    /// The time of `strftime_now`, in seconds since 1970; the clock's (in UTC) when not given.
    pub now_s: Option<i64>,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Bytes of `text` that stood in `{% generation %}` blocks, in order; none when the template has no such
    /// block, or when one was rendered where its place in the text is unknown (inside a macro).
    pub spans: Option<Vec<Range<usize>>>,
}

/// A parsed template with the names of its special tokens.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    body: parse::Body,
    tokens: BTreeMap<String, String>,
    generation: bool,
}

impl ChatTemplate {
    /// Parses a template; `tokens` are the special tokens by name (`bos_token`, `eos_token`, …).
    ///
    /// # Errors
    /// [`Error::Template`] with the line, when it is no template.
    pub fn parse(source: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        if source.len() > SOURCE_BYTES {
            let bytes = source.len();
            return Err(Error::Template(format!("{bytes} bytes are no template; at most {SOURCE_BYTES}")));
        }
        let body = parse::parse(source)?;
        let generation = has_generation(&body);
        Ok(Self { source: source.to_string(), body, tokens: tokens.clone(), generation })
    }

    /// The text that was parsed.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it marks what the assistant says with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.generation
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// [`Error::Template`] with the line: what the template raises, what Python would raise, or a limit.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        Ok(self.render_spans(messages, options)?.text)
    }

    /// The text of a conversation, and where its `{% generation %}` blocks are.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_spans(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        limits::start(usize::MAX / 2, u64::MAX);
        let before = limits::room();
        let root = eval::Scope::root(self.variables(messages, options));
        let input = before - limits::room();
        let room = ROOM_BYTES.saturating_add(input.saturating_mul(ROOM_PER_BYTE));
        limits::start(room, STEPS.saturating_add(STEPS_PER_BYTE.saturating_mul(input as u64)));
        let mut interp = eval::Interp::new(options.now_s.unwrap_or_else(clock_s));
        let text = interp.run(&self.body, &root)?;
        let spans = std::mem::take(&mut interp.spans);
        let known = self.generation && !interp.span_lost;
        Ok(Rendered { text, spans: known.then_some(spans) })
    }

    fn variables(&self, messages: &[Message], options: &RenderOptions) -> Vec<(String, value::Value)> {
        let array = |items: &[Json]| value::Value::list(items.iter().map(value::Value::from_json).collect());
        let optional = |items: &Option<Vec<Json>>| items.as_deref().map_or(value::Value::None, array);
        let objects = messages.iter().map(|m| {
            value::Value::dict(
                m.0.iter().map(|(k, v)| (value::Value::str(k.as_str()), value::Value::from_json(v))),
            )
        });
        let mut variables = vec![
            ("messages".to_string(), value::Value::list(objects.collect())),
            ("tools".to_string(), optional(&options.tools)),
            ("documents".to_string(), optional(&options.documents)),
            ("add_generation_prompt".to_string(), value::Value::Bool(options.add_generation_prompt)),
        ];
        let tokens = self.tokens.iter().map(|(k, v)| (k.clone(), value::Value::str(v.as_str())));
        let extra = options.variables.iter().map(|(k, v)| (k.clone(), value::Value::from_json(v)));
        for (name, value) in tokens.chain(extra) {
            match variables.iter_mut().find(|(n, _)| *n == name) {
                Some(variable) => variable.1 = value,
                None => variables.push((name, value)),
            }
        }
        variables
    }
}

fn has_generation(body: &parse::Body) -> bool {
    use parse::StmtKind as S;
    body.iter().any(|stmt| match &stmt.kind {
        S::Generation(_) => true,
        S::If(arms, otherwise) => arms.iter().any(|(_, b)| has_generation(b)) || has_generation(otherwise),
        S::For(def) => has_generation(&def.body) || has_generation(&def.otherwise),
        S::Macro(def) | S::CallBlock(def, _) => has_generation(&def.body),
        S::SetBlock(_, _, b) | S::FilterBlock(_, b) | S::With(_, b) | S::Block(b) => has_generation(b),
        _ => false,
    })
}

fn clock_s() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(0))
}
