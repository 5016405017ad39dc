//! Chat templates: parsed and rendered; as text, and grown from a grammar.

#[path = "../../../crates/roundpipe-chat/tests/support/template_gen.rs"]
mod template_gen;

use std::collections::BTreeMap;

use roundpipe_chat::{ChatTemplate, Limits, Message, RenderOptions};
use serde_json::json;

use super::super::scratch::Scratch;
use super::super::{Syntax, Target};
use super::accepted;

pub const TARGET: Target = Target {
    name: "template",
    files: &["chat_template.jinja"],
    heap_bytes: LIMITS.bytes + (1 << 20),
    heap_per_byte: 256,
    words: include_str!("../../words/template.txt"),
    syntax: Syntax::Template,
    run,
};

/// A render's limits are its caller's to choose. These are small ones, as templates of the grammar
/// like to use up what they are given; `roundpipe-chat/tests/limits.rs` holds others against the limits that
/// are the default.
const LIMITS: Limits = Limits {
    steps: 20_000,
    bytes: 1 << 20,
};

/// Grown from a grammar by the input's bytes.
pub const GRAMMAR: Target = Target {
    name: "template_grammar",
    syntax: Syntax::Choices,
    run: run_grown,
    ..TARGET
};

fn run(_: &mut Scratch, input: &[u8]) -> bool {
    render(&String::from_utf8_lossy(input))
}

fn run_grown(_: &mut Scratch, input: &[u8]) -> bool {
    render(&template_gen::template(input))
}

/// Renders a conversation with a tool.
fn render(source: &str) -> bool {
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Some(template) = accepted(ChatTemplate::parse(source, &tokens)) else {
        return false;
    };
    let messages = [
        Message::new("user", "hi  a,b\n<x>"),
        Message::new("assistant", "é 12"),
    ];
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, null, true]}}});
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(vec![tool]),
        now_s: Some(1_700_000_000),
        ..RenderOptions::default()
    };
    let (rendered, _) = template.render_limited(&messages, &options, LIMITS);
    let Some(rendered) = accepted(rendered) else {
        return false;
    };
    let whole = |span: &std::ops::Range<usize>| rendered.text.get(span.clone()).is_some();
    assert!(
        rendered.spans.iter().flatten().all(whole),
        "a span that is no text: {:?}",
        rendered.spans
    );
    true
}
