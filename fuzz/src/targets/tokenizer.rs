//! Tokenizers: opened, a few texts there and back, labels of a conversation.

use std::collections::BTreeMap;
use std::path::Path;

use roundpipe_models::chat::mask::{TrainOn, assistant_labels};
use roundpipe_models::chat::{ChatTemplate, Message, RenderOptions};
use roundpipe_models::tokenizer::Tokenizer;

use super::super::scratch::Scratch;
use super::super::{Syntax, Target, bundle};
use super::accepted;

const FILE: &str = "tokenizer.json";

pub const TARGET: Target = Target {
    name: "tokenizer",
    files: &[
        FILE,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.json",
        "chat_template.jinja",
    ],
    heap_bytes: 64 << 20,
    heap_per_byte: 1024,
    words: include_str!("../../words/tokenizer.txt"),
    syntax: Syntax::Json,
    run,
};

/// The tokenizer of an input that brings none.
const PLAIN: &str = r#"{"version":"1.0","added_tokens":[{"id":0,"content":"<s>","single_word":false,"lstrip":false,
"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel",
"add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel"},
"model":{"type":"BPE","unk_token":"a","vocab":{"<s>":0,"a":1,"b":2,"ab":3,"Ġ":4,"Ġa":5},"merges":[["a","b"],["Ġ","a"]]}}"#;

const TEXTS: [&str; 4] = ["", "ab a", "hello  world 12\n", "é你\u{0}😀<s>▁"];

const CHATML: &str = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<s>\n{% endfor %}";

fn run(scratch: &mut Scratch, input: &[u8]) -> bool {
    let mut files = bundle::files(input, TARGET.files);
    if files.iter().all(|(name, _)| *name != FILE) {
        files.push((FILE, PLAIN.as_bytes().to_vec()));
    }
    scratch.fill(files.iter().map(|(name, bytes)| (*name, &bytes[..])));
    // The library keeps the words that each tokenizer has cut in memory of the thread, for as long
    // as the thread lives: one that ends shows what else is left behind.
    let dir = scratch.dir();
    let done = std::thread::scope(|scope| scope.spawn(|| open_and_use(dir)).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn open_and_use(dir: &Path) -> bool {
    let Some(tokenizer) = accepted(Tokenizer::open(dir)) else {
        return false;
    };
    for text in TEXTS {
        for special in [false, true] {
            there_and_back(&tokenizer, text, special);
        }
    }
    let most = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    accepted(tokenizer.decode(&[0, 1, most, u32::MAX], false));
    for name in ["<s>", "a", ""] {
        tokenizer.token_id(name);
    }
    for with_tools in [false, true] {
        accepted(tokenizer.chat_template(with_tools));
    }
    labels(&tokenizer);
    true
}

fn there_and_back(tokenizer: &Tokenizer, text: &str, special: bool) {
    let Some((ids, places)) = accepted(tokenizer.encode_with_offsets(text, special)) else {
        return;
    };
    assert_eq!(ids.len(), places.len());
    for skip in [false, true] {
        accepted(tokenizer.decode(&ids, skip));
        let mut stream = tokenizer.stream(skip);
        if ids.iter().all(|id| accepted(stream.push(*id)).is_some()) {
            accepted(stream.finish());
        }
    }
}

fn labels(tokenizer: &Tokenizer) {
    let template = ChatTemplate::parse(CHATML, &BTreeMap::new()).expect("a template of ours");
    let messages = [Message::new("user", "ab"), Message::new("assistant", "a é")];
    let options = RenderOptions::default();
    let labelled = assistant_labels(
        tokenizer,
        &template,
        &messages,
        &options,
        TrainOn::All,
        "a conversation",
    );
    if let Some(labelled) = accepted(labelled) {
        assert_eq!(labelled.ids.len(), labelled.labels.len());
    }
}
