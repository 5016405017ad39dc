//! Chat templates: conversations to the text that a model was trained on, byte for byte as
//! transformers' `apply_chat_template` makes it.
//!
//! A template is a program in Jinja2's language that comes with a model, so it is other people's
//! code. It is parsed once ([`ChatTemplate::parse`]) and interpreted here rather than by a general
//! template engine, because three things must hold that need hands on every operator: Python's
//! semantics (`%` formatting, `repr`, tuples, generators, undefined values), the places of `{%
//! generation %}` blocks in the text, and limits on steps and memory that no expression can get
//! around.
//!
//! It never reads files, never prints, and refuses to run long or grow large. It refuses tags that
//! need other templates (`include`, `import`, `extends`), and methods that change a value, as Jinja2's
//! immutable sandbox does.
//!
//! It knows conversations and text, no tokens and no models: `roundpipe-models` has the tokenizer
//! that a template comes with, and the labels that are made from its spans.
//!
//! # Invariants
//! - The same template, messages, options and time give the same text.
//! - A render does at most [`STEPS`] + [`STEPS_PER_BYTE`] × input steps, and asks the allocator for
//!   at most [`ROOM_BYTES`] + [`ROOM_PER_BYTE`] × input bytes at once, however the template is
//!   written; input is what the conversation takes as values. Both are paid before the work is done
//!   (`budget.rs`).
//! - Parsing holds at most [`PARSE_BYTES`].
//! - Recursion of parser, interpreter and drops is bounded: [`STACK_BYTES`] of stack are enough.
//! - Nothing of a render is left when it returns, except its text.
#![forbid(unsafe_code)]

mod error;

mod budget;
mod eval;
mod filters;
mod format;
mod lex;
mod methods;
mod ops;
mod parse;
mod predicates;
mod print;
mod strftime;
mod value;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

pub use crate::budget::Usage;
use crate::budget::{Budget, Buffer, Vector};
use crate::error::Fault;
pub use crate::error::{Error, Result};
use crate::value::Value;

/// Steps that any render may take.
pub const STEPS: u64 = 4_000_000;
/// Further steps for each byte of the conversation.
pub const STEPS_PER_BYTE: u64 = 200;
/// Bytes that the values and the text of any render may take at once.
pub const ROOM_BYTES: usize = 32 << 20;
/// Further bytes for each byte of the conversation.
pub const ROOM_PER_BYTE: usize = 64;
/// Most bytes that parsing takes, the parsed template included.
pub const PARSE_BYTES: usize = 32 << 20;
/// Stack that is enough to parse and to render any template.
pub const STACK_BYTES: usize = 1 << 20;
/// Longest template.
const SOURCE_BYTES: usize = 1 << 20;

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

/// What a render may use beside what the conversation adds ([`STEPS_PER_BYTE`], [`ROOM_PER_BYTE`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Steps of work, each below a microsecond.
    pub steps: u64,
    /// Bytes at once.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            steps: STEPS,
            bytes: ROOM_BYTES,
        }
    }
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Bytes of `text` that stood in `{% generation %}` blocks, in order; none when the template
    /// has no such block, or when one was rendered where its place in the text is unknown (inside a
    /// macro).
    pub spans: Option<Vec<Range<usize>>>,
}

/// A parsed template with the names of its special tokens.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    body: Arc<parse::Body>,
    tokens: BTreeMap<String, String>,
    generation: bool,
}

impl ChatTemplate {
    /// Parses a template; `tokens` are the special tokens by name (`bos_token`, `eos_token`, …).
    ///
    /// # Errors
    /// [`Error`] with the line, when it is no template.
    pub fn parse(source: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        if source.len() > SOURCE_BYTES {
            let bytes = source.len();
            let what = format!("{bytes} bytes are no template; at most {SOURCE_BYTES}");
            return Err(Fault::new(what).into());
        }
        let body = Arc::new(parse::parse(source)?);
        let generation = has_generation(&body);
        Ok(Self {
            source: source.to_string(),
            body,
            tokens: tokens.clone(),
            generation,
        })
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
    /// [`Error`] with the line: what the template raises, what Python would raise, or a
    /// limit.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        Ok(self.render_spans(messages, options)?.text)
    }

    /// The text of a conversation, and where its `{% generation %}` blocks are.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_spans(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        self.render_limited(messages, options, Limits::default()).0
    }

    /// As [`ChatTemplate::render_spans`] within other limits, and what it took, whether it succeeds
    /// or not.
    pub fn render_limited(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        limits: Limits,
    ) -> (Result<Rendered>, Usage) {
        let budget = Budget::unlimited();
        let rendered = self.render_within(&budget, limits, messages, options);
        (rendered.map_err(Error::from), budget.usage())
    }

    fn render_within(
        &self,
        budget: &Budget,
        limits: Limits,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Rendered, Fault> {
        let mut variables = Variables {
            list: Vector::new(budget),
        };
        variables.of_the_caller(messages, options)?;
        let input = budget.live_bytes();
        let steps = limits
            .steps
            .saturating_add(STEPS_PER_BYTE.saturating_mul(input as u64));
        budget.limit(
            steps,
            limits
                .bytes
                .saturating_add(input.saturating_mul(ROOM_PER_BYTE)),
        );
        // Tokens come with the template, so they must fit within the limits instead of raising
        // them.
        for (name, token) in &self.tokens {
            if !options.variables.contains_key(name) {
                variables.set(name, Value::str(budget, token)?)?;
            }
        }
        let root = eval::Scope::root(variables.list)?;
        let mut interp = eval::Interp::new(budget, options.now_s.unwrap_or_else(clock_s))?;
        interp.run(&self.body, &root)?;
        let (text, spans) = interp.finish();
        Ok(Rendered {
            text: text.map_or_else(String::new, Buffer::into_string),
            spans: spans.filter(|_| self.generation).map(Vector::into_vec),
        })
    }
}

/// The variables that a template begins with.
struct Variables<'r> {
    list: Vector<'r, (&'r str, Value<'r>)>,
}

impl<'r> Variables<'r> {
    /// What the caller of a render gives.
    fn of_the_caller(
        &mut self,
        messages: &[Message],
        options: &'r RenderOptions,
    ) -> Result<(), Fault> {
        let budget = self.list.budget();
        let mut list = Vector::with_capacity(budget, messages.len())?;
        for message in messages {
            list.push(Value::from_json_map(budget, &message.0, 0)?)?;
        }
        self.set("messages", Value::list(list)?)?;
        for (name, array) in [("tools", &options.tools), ("documents", &options.documents)] {
            let mut value = Value::None;
            if let Some(array) = array {
                let mut list = Vector::with_capacity(budget, array.len())?;
                for json in array {
                    list.push(Value::from_json(budget, json)?)?;
                }
                value = Value::list(list)?;
            }
            self.set(name, value)?;
        }
        self.set(
            "add_generation_prompt",
            Value::Bool(options.add_generation_prompt),
        )?;
        for (name, json) in &options.variables {
            self.set(name, Value::from_json(budget, json)?)?;
        }
        Ok(())
    }

    fn set(&mut self, name: &'r str, value: Value<'r>) -> Result<(), Fault> {
        if let Some(variable) = self.list.iter_mut().find(|(n, _)| *n == name) {
            variable.1 = value;
            return Ok(());
        }
        self.list.push((name, value))
    }
}

fn has_generation(body: &parse::Body) -> bool {
    use parse::StmtKind as S;
    body.iter().any(|stmt| match &stmt.kind {
        S::Generation(_) => true,
        S::If(arms, otherwise) => {
            arms.iter().any(|(_, b)| has_generation(b)) || has_generation(otherwise)
        }
        S::For(def) => has_generation(&def.body) || has_generation(&def.otherwise),
        S::Macro(def) | S::CallBlock(def, _) => has_generation(&def.body),
        S::SetBlock(_, _, b) | S::FilterBlock(_, b) | S::With(_, b) | S::Block(b) => {
            has_generation(b)
        }
        _ => false,
    })
}

fn clock_s() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    /// The interpreter makes everything of the budget's containers: nothing in its source allocates
    /// otherwise.
    #[test]
    fn interpreter_pays() {
        let files = [
            ("eval", include_str!("eval.rs")),
            ("filters", include_str!("filters.rs")),
            ("format", include_str!("format.rs")),
            ("methods", include_str!("methods.rs")),
            ("ops", include_str!("ops.rs")),
            ("predicates", include_str!("predicates.rs")),
            ("print", include_str!("print.rs")),
            ("strftime", include_str!("strftime.rs")),
            ("value", include_str!("value.rs")),
        ];
        let unpaid = "String:: format!( Vec:: vec![ HashMap BTreeMap Cow Rc::new Arc::new Box::new .to_string() \
                      .to_owned() .to_vec() .into_owned() .into_boxed .collect( .collect:: .concat() .join( \
                      .replace( .replacen( .sort( .sort_by .sort_un .to_ascii_";
        for (file, source) in files {
            for (number, line) in source.lines().enumerate() {
                let place = format!("{file}.rs:{}", number + 1);
                let found = unpaid.split_whitespace().find(|word| line.contains(word));
                assert_eq!(found, None, "{place}: use the containers of budget.rs");
                // On a text these allocate; on a character they do not.
                let mapped = !line.contains("case()") || line.contains("push_mapped(");
                assert!(
                    mapped || line.contains("is_"),
                    "{place}: use Buffer::push_lower or push_upper"
                );
            }
        }
    }
}
