//! Tokenizers against Python's `tokenizers`, and labels of conversations.
// Tests that need fetched files say that they are skipped.
#![allow(clippy::print_stderr)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roundpipe_models::chat::mask::{IGNORED, TrainOn, assistant_labels};
use roundpipe_models::chat::{ChatTemplate, Message, RenderOptions};
use roundpipe_models::tokenizer::Tokenizer;
use serde_json::Value;

const NAMES: [&str; 2] = ["byte_level", "byte_fallback"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/chat/tokenizers")
        .join(name)
}

fn golden(name: &str) -> Value {
    let text = std::fs::read_to_string(folder(name).join("golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Tricky texts become the ids, places and texts that Python's library gives.
#[test]
fn tricky_texts_equal_python() {
    for name in NAMES {
        let (tokenizer, golden) = (Tokenizer::open(&folder(name)).unwrap(), golden(name));
        assert_eq!(golden["vocab_size"], tokenizer.vocab_size());
        for case in golden["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let (plain, offsets) = tokenizer.encode_with_offsets(text, false).unwrap();
            assert_eq!(plain, ids(&case["ids"]), "{name} {text:?}");
            for (offset, want) in offsets.iter().zip(case["char_offsets"].as_array().unwrap()) {
                // Characters that take several tokens have places inside them only in bytes.
                let covered = text.get(offset.clone());
                let start = text
                    .char_indices()
                    .take_while(|(i, _)| *i < offset.end)
                    .count();
                assert_eq!(want[1], start, "{name} {text:?} {offset:?} {covered:?}");
            }
            let special = tokenizer.encode(text, true).unwrap();
            assert_eq!(special, ids(&case["with_special"]), "{name} {text:?}");
            for (skip, want) in [false, true]
                .into_iter()
                .zip(case["decoded"].as_array().unwrap())
            {
                assert_eq!(
                    *want,
                    tokenizer.decode(&special, skip).unwrap(),
                    "{name} {text:?} skip {skip}"
                );
            }
        }
    }
}

/// A stream shows whole characters, and in sum what decoding at once gives, for any ids at all.
#[test]
fn streams_sum_to_the_whole() {
    for name in NAMES {
        let (tokenizer, golden) = (Tokenizer::open(&folder(name)).unwrap(), golden(name));
        let drawn = golden["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| ids(&c["ids"]));
        let texts = golden["texts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| ids(&c["with_special"]));
        for ids in drawn.chain(texts) {
            for skip in [false, true] {
                let mut stream = tokenizer.stream(skip);
                let mut text = String::new();
                for id in &ids {
                    text += &stream.push(*id).unwrap().unwrap_or_default();
                }
                text += &stream.finish().unwrap();
                assert_eq!(
                    text,
                    tokenizer.decode(&ids, skip).unwrap(),
                    "{name} {ids:?} skip {skip}"
                );
            }
        }
        for case in golden["ids"].as_array().unwrap() {
            assert_eq!(
                case["decoded"][0],
                tokenizer.decode(&ids(&case["ids"]), false).unwrap()
            );
        }
    }
}

/// Plain text appears token by token, not at the end.
#[test]
fn streams_do_not_hold_back_what_is_certain() {
    let tokenizer = Tokenizer::open(&folder("byte_level")).unwrap();
    let ids = tokenizer.encode("the ships pass", false).unwrap();
    let mut stream = tokenizer.stream(true);
    let shown = ids
        .iter()
        .filter(|id| stream.push(**id).unwrap().is_some())
        .count();
    assert_eq!(shown, ids.len());
}

/// The ends of a text come from the config, the map and the generation config, as strings or
/// objects.
#[test]
fn ends_come_from_all_files() {
    let first = Tokenizer::open(&folder("byte_level")).unwrap();
    assert_eq!(
        (first.bos(), first.eos(), first.pad()),
        (Some(1), &[2, 0][..], Some(0))
    );
    let second = Tokenizer::open(&folder("byte_fallback")).unwrap();
    assert_eq!(
        (second.bos(), second.eos(), second.pad()),
        (Some(1), &[2][..], None)
    );
    assert!(second.chat_template(false).unwrap().is_none());
    let render = |tools| {
        let template = first.chat_template(tools).unwrap().unwrap();
        template
            .render(&[Message::new("user", "x")], &RenderOptions::default())
            .unwrap()
    };
    assert_eq!(
        (render(false).as_str(), render(true).as_str()),
        ("x", "tools")
    );
}

/// A folder made of copies of a fixture, with some files replaced.
fn spoiled(case: &str, changes: &[(&str, Option<&str>)]) -> PathBuf {
    let to =
        std::env::temp_dir().join(format!("roundpipe-tokenizer-{}-{case}", std::process::id()));
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(folder("byte_level")).unwrap().flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    for (file, content) in changes {
        match content {
            Some(content) => std::fs::write(to.join(file), content).unwrap(),
            None => std::fs::remove_file(to.join(file)).unwrap(),
        }
    }
    to
}

/// Missing and broken files each give one line with the file's name and a fix.
#[test]
fn broken_files_are_named() {
    let cases: [(&str, &str, Option<&str>); 10] = [
        ("none", "tokenizer.json", None),
        ("empty", "tokenizer.json", Some("")),
        (
            "cut",
            "tokenizer.json",
            Some("{\"version\": \"1.0\", \"model\": {"),
        ),
        ("other", "tokenizer.json", Some("{}")),
        ("config", "tokenizer_config.json", Some("{\"bos_token\":")),
        ("config_list", "tokenizer_config.json", Some("[]")),
        (
            "eos",
            "generation_config.json",
            Some("{\"eos_token_id\": \"two\"}"),
        ),
        (
            "eos_negative",
            "generation_config.json",
            Some("{\"eos_token_id\": [1, -1]}"),
        ),
        (
            "template_kind",
            "tokenizer_config.json",
            Some("{\"chat_template\": 7}"),
        ),
        ("template_json", "chat_template.json", Some("{")),
    ];
    for (case, file, content) in cases {
        let to = spoiled(case, &[(file, content)]);
        let error = Tokenizer::open(&to).map(|_| ()).unwrap_err().to_string();
        std::fs::remove_dir_all(&to).unwrap();
        assert!(
            error.contains(file) && !error.contains('\n') && error.contains(';') || case == "cut",
            "{case}: {error}"
        );
    }
}

/// A template file wins over the config, and a broken one is named when it is used.
#[test]
fn template_files_win_and_broken_ones_are_named() {
    let to = spoiled(
        "wins",
        &[
            ("chat_template.jinja", Some("file")),
            ("chat_template.json", Some("{\"chat_template\": \"json\"}")),
        ],
    );
    let template = Tokenizer::open(&to)
        .unwrap()
        .chat_template(false)
        .unwrap()
        .unwrap();
    assert_eq!(template.source(), "file");
    std::fs::write(to.join("chat_template.jinja"), "{% for %}").unwrap();
    let error = Tokenizer::open(&to)
        .unwrap()
        .chat_template(false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("chat_template.jinja") && error.contains("line 1"),
        "{error}"
    );
    std::fs::remove_dir_all(&to).unwrap();
}

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const MARKED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}\
                      {{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n\
                      {% endfor %}";
/// Drops what earlier turns thought, so texts of prefixes are not prefixes of the text.
const FORGETFUL: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}\
                         {% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}\
                         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn chat() -> Vec<Message> {
    let roles = ["system", "user", "assistant", "user", "assistant"];
    let texts = [
        "Be brief.",
        "the ships?",
        "<think>12</think>They pass.",
        "and gulls?",
        "345 \u{1f600}",
    ];
    roles
        .into_iter()
        .zip(texts)
        .map(|(role, text)| Message::new(role, text))
        .collect()
}

/// What is learned of a conversation, as text, pieces apart where labels are interrupted.
fn learned(source: &str, messages: &[Message], train_on: TrainOn) -> Result<Vec<String>, String> {
    let tokenizer = Tokenizer::open(&folder("byte_level")).unwrap();
    let template = ChatTemplate::parse(source, &BTreeMap::new()).unwrap();
    let options = RenderOptions::default();
    let labelled = assistant_labels(
        &tokenizer,
        &template,
        messages,
        &options,
        train_on,
        "conversation 7",
    )
    .map_err(|e| e.to_string())?;
    let whole = template.render(messages, &options).unwrap();
    assert_eq!(labelled.ids, tokenizer.encode(&whole, false).unwrap());
    let mut pieces: Vec<Vec<u32>> = vec![Vec::new()];
    for (id, label) in labelled.ids.iter().zip(&labelled.labels) {
        if *label == IGNORED {
            pieces.push(Vec::new());
        } else {
            assert_eq!(*label, i64::from(*id));
            pieces.last_mut().unwrap().push(*id);
        }
    }
    pieces.retain(|p| !p.is_empty());
    Ok(pieces
        .iter()
        .map(|p| tokenizer.decode(p, false).unwrap())
        .collect())
}

/// All three ways of finding the assistant's words learn them and the token that ends a turn, and
/// nothing else.
#[test]
fn only_the_assistants_words_are_learned() {
    let both = [
        "<think>12</think>They pass.<|im_end|>".to_string(),
        "345 \u{1f600}<|im_end|>".to_string(),
    ];
    for source in [CHATML, MARKED] {
        assert_eq!(
            learned(source, &chat(), TrainOn::All).unwrap(),
            both,
            "{source}"
        );
        assert_eq!(
            learned(source, &chat(), TrainOn::Last).unwrap(),
            both[1..],
            "{source}"
        );
    }
    let forgotten = learned(FORGETFUL, &chat(), TrainOn::All).unwrap();
    assert_eq!(forgotten, ["They pass.<|im_end|>", both[1].as_str()]);
}

/// What cannot be learned is refused with the conversation's name.
#[test]
fn what_cannot_be_learned_is_named() {
    let nobody = learned(CHATML, &chat()[..2], TrainOn::All).unwrap_err();
    assert!(
        nobody.contains("conversation 7") && nobody.contains("assistant"),
        "{nobody}"
    );
    let silent = "{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let hidden = learned(silent, &chat(), TrainOn::All).unwrap_err();
    assert!(hidden.contains("conversation 7"), "{hidden}");
    let reversed =
        "{% for m in messages|reverse %}{{ m.content|upper }}{{ messages|length }}{% endfor %}";
    let unclear = learned(reversed, &chat(), TrainOn::All).unwrap_err();
    assert!(
        unclear.contains("conversation 7") && unclear.contains("generation"),
        "{unclear}"
    );
}

/// Real tokenizers open and give back what they took (a folder per entry of
/// ROUNDPIPE_TOKENIZER_DIRS).
#[test]
fn real_tokenizers_round_trip() {
    let Some(dirs) = std::env::var_os("ROUNDPIPE_TOKENIZER_DIRS") else {
        eprintln!("skipped: set ROUNDPIPE_TOKENIZER_DIRS to model folders (separated as in PATH)");
        return;
    };
    for dir in std::env::split_paths(&dirs) {
        let tokenizer = Tokenizer::open(&dir).unwrap();
        for text in [
            "Once upon a time",
            "caf\u{e9} \u{4f60}\u{597d} \u{1f600}\n\n  x",
        ] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(
                tokenizer.decode(&ids, true).unwrap(),
                text,
                "{}",
                dir.display()
            );
        }
        assert!(tokenizer.bos().is_some() && !tokenizer.eos().is_empty());
        tokenizer.chat_template(false).unwrap();
    }
}
