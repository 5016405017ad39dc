//! What is learned of a conversation under the chat templates of the fixtures.

use std::collections::BTreeMap;

use roundpipe_data::{Chat, EncodeOptions, Encoder, Example, Learn};
use roundpipe_models::chat::mask::TrainOn;
use roundpipe_models::chat::{ChatTemplate, Message};
use roundpipe_models::tokenizer::Tokenizer;
use serde_json::Map;

use crate::kit::{CHATML, encoder, fixtures, tokenizer};

fn conversation(with_system: bool) -> Example {
    let mut messages = vec![
        Message::new("user", "the ships?"),
        Message::new("assistant", "They pass."),
        Message::new("user", "and gulls?"),
        Message::new("assistant", "Them too."),
    ];
    if with_system {
        messages.insert(0, Message::new("system", "Be brief."));
    }
    Example::Chat(Chat {
        messages,
        tools: None,
        variables: Map::new(),
        train_on: TrainOn::All,
    })
}

/// The learned pieces of a conversation, apart where learning is interrupted.
fn learned(template: &str, with_system: bool) -> Result<Vec<String>, String> {
    let path = fixtures().join(format!("templates/{template}.jinja"));
    let encoder = encoder(&std::fs::read_to_string(path).unwrap());
    let document = encoder.encode(&conversation(with_system))?;
    let mut pieces = vec![Vec::new()];
    for (id, learned) in document.ids.iter().zip(&document.learned) {
        if *learned {
            pieces.last_mut().unwrap().push(*id);
        } else {
            pieces.push(Vec::new());
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    let text = |piece: &Vec<u32>| encoder.tokenizer().decode(piece, false).unwrap();
    Ok(pieces.iter().map(text).collect())
}

/// Templates of many families: the assistant's words and the token that ends a turn, where the
/// tokenizer has it, and nothing else.
#[test]
fn only_answers_are_learned() {
    let plain = ["They pass.", "Them too."];
    let ended = |end: &str| plain.map(|answer| format!("{answer}{end}")).to_vec();
    let cases = [
        ("chatml", ended("<|im_end|>")),
        ("chatml_generation", ended("<|im_end|>")),
        ("command_r", ended("<|END|>")),
        ("deepseek_v3", ended("<|im_end|>")),
        ("gemma3_parts", ended("<end_of_turn>\n")),
        ("granite", ended("<|end_of_text|>\n")),
        ("llama2", ended("")),
        ("llama3", ended("<|eot_id|>")),
        ("llama31_tools", ended("<|eot_id|>")),
        ("mistral_tekken", ended("<|im_end|>")),
        ("mistral_v3_tools", ended("<|im_end|>")),
        ("qwen25_tools", ended("<|im_end|>")),
        ("qwen3_thinking", ended("<|im_end|>")),
        ("smollm", ended("<|im_end|>")),
        ("xml_tools", ended("")),
        ("zephyr", ended("<|im_end|>")),
    ];
    for (template, want) in cases {
        for with_system in [true, false] {
            assert_eq!(learned(template, with_system).unwrap(), want, "{template}");
        }
    }
    // Templates that write nothing between an answer and its end in the middle of a conversation.
    for template in ["harmony", "phi3", "phi4_mini"] {
        let found = learned(template, true).unwrap();
        assert_eq!(found.len(), 2, "{template}: {found:?}");
        assert!(
            found[0].starts_with(plain[0]) && found[1].contains(plain[1]),
            "{template}"
        );
    }
}

/// What a template refuses, and a template that cannot be cut, are refused in one line.
#[test]
fn refusals_say_why() {
    for template in ["gemma", "mistral_v1"] {
        assert_eq!(learned(template, false).unwrap().len(), 2, "{template}");
        let error = learned(template, true).unwrap_err();
        assert!(error.contains("the template says"), "{template}: {error}");
    }
    let backwards =
        "{% for m in messages|reverse %}{{ m.content|upper }}{{ messages|length }}{% endfor %}";
    let error = encoder(backwards).encode(&conversation(true)).unwrap_err();
    assert!(error.contains("cannot tell which part"), "{error}");
    assert!(error.contains("{% generation %}"), "{error}");
}

/// The clock does not show in tokens: a run that goes on tomorrow sees the same.
#[test]
fn templates_see_a_fixed_date() {
    let dated = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}\
                 {% if add_generation_prompt %}[assistant]{% endif %}";
    let encoder = encoder(dated);
    let document = encoder.encode(&conversation(false)).unwrap();
    let text = encoder.tokenizer().decode(&document.ids, false).unwrap();
    assert!(text.starts_with("2025-01-01"), "{text}");
}

/// What may be learned instead.
#[test]
fn other_turns_can_be_learned() {
    let count = |learn| {
        let template = ChatTemplate::parse(CHATML, &BTreeMap::new()).unwrap();
        let options = EncodeOptions {
            learn,
            ..EncodeOptions::default()
        };
        let encoder = Encoder::new(tokenizer(), options)
            .unwrap()
            .template(template);
        let document = encoder.encode(&conversation(true)).unwrap();
        (document.labels(), document.inputs())
    };
    let (all, inputs) = count(Learn::Assistant);
    let (last, _) = count(Learn::LastTurn);
    assert!(
        0 < last && last < all && all < inputs,
        "{last} {all} {inputs}"
    );
    assert_eq!(count(Learn::Everything), (inputs, inputs));
}

/// A conversation needs a template; the message says what to do without one.
#[test]
fn conversations_need_a_template() {
    let folder = fixtures().join("tokenizers/byte_fallback");
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let encoder = Encoder::new(tokenizer, EncodeOptions::default()).unwrap();
    let error = encoder.encode(&conversation(true)).unwrap_err();
    assert!(
        error.contains("no chat template") && error.contains("completion"),
        "{error}"
    );
}
