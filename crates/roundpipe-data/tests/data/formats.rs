//! What rows of each format become.

use roundpipe_data::{Chat, Example, Format};
use roundpipe_models::chat::mask::TrainOn;
use serde_json::{Value, json};

use crate::kit::{Folder, examples, open};

fn read(rows: &[Value]) -> (Format, Vec<Example>) {
    let folder = Folder::new();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let source = open(folder.write("rows.jsonl", lines));
    (source.report()[0].format, examples(&source.rows()))
}

fn chat(example: &Example) -> &Chat {
    match example {
        Example::Chat(chat) => chat,
        other => panic!("{other:?}"),
    }
}

/// The messages of a conversation as JSON.
fn messages(example: &Example) -> Value {
    serde_json::to_value(&chat(example).messages).unwrap()
}

#[test]
fn messages_pass_through_with_tools() {
    let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}});
    let row = json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi", "name": null},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "two"}]}
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": false}
    });
    let (format, found) = read(std::slice::from_ref(&row));
    assert_eq!(format, Format::Messages);
    let mut want = row["messages"].clone();
    want[1].as_object_mut().unwrap().remove("name");
    // Arguments as templates expect them: an object, not its text.
    want[2]["tool_calls"][0]["function"]["arguments"] = json!({"x": 1});
    assert_eq!(messages(&found[0]), want);
    let chat = chat(&found[0]);
    assert_eq!(json!(chat.tools), row["tools"]);
    assert_eq!(json!(chat.variables), row["chat_template_kwargs"]);
    assert_eq!(chat.train_on, TrainOn::All);
}

#[test]
fn share_gpt_names_roles() {
    let (format, found) = read(&[json!({
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"}
        ],
        "tools": "[{\"name\": \"f\"}]"
    })]);
    assert_eq!(format, Format::ShareGpt);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
    let want = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"}
    ]);
    assert_eq!(messages(&found[0]), want);
    assert_eq!(json!(chat(&found[0]).tools), json!([{"name": "f"}]));
}

#[test]
fn alpaca_becomes_turns() {
    let (format, found) = read(&[
        json!({"instruction": "Add.", "input": "1 2", "output": "3"}),
        json!({"instruction": "Say hi.", "input": "", "output": "hi"}),
        json!({"instruction": "More.", "output": "4", "system": "S", "history": [["a", "b"]]}),
    ]);
    assert_eq!(format, Format::Alpaca);
    let turn = |user: &str, assistant: &str| {
        [
            json!({"role": "user", "content": user}),
            json!({"role": "assistant", "content": assistant}),
        ]
    };
    assert_eq!(messages(&found[0]), json!(turn("Add.\n\n1 2", "3")));
    assert_eq!(messages(&found[1]), json!(turn("Say hi.", "hi")));
    let system = [json!({"role": "system", "content": "S"})];
    let want = [&system[..], &turn("a", "b"), &turn("More.", "4")].concat();
    assert_eq!(messages(&found[2]), json!(want));
}

#[test]
fn prompts_are_texts_or_messages() {
    let (format, found) = read(&[
        json!({"prompt": "2 + 2 =", "completion": " 4"}),
        json!({
            "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                       {"role": "user", "content": "c"}],
            "completion": [{"role": "assistant", "content": "d"}]
        }),
    ]);
    assert_eq!(format, Format::PromptCompletion);
    let want = Example::Completion {
        prompt: "2 + 2 =".into(),
        completion: " 4".into(),
    };
    assert_eq!(found[0], want);
    // Only the completion is learned, not the turn of the assistant in the prompt.
    assert_eq!(chat(&found[1]).train_on, TrainOn::Last);
    assert_eq!(chat(&found[1]).messages.len(), 4);
}

#[test]
fn texts_are_texts() {
    let (format, found) = read(&[json!({"text": "caf\u{e9} \u{0}\n", "id": 7})]);
    assert_eq!(format, Format::Text);
    let want = Example::Text {
        text: "caf\u{e9} \u{0}\n".into(),
        ends: true,
    };
    assert_eq!(found, [want]);
}
