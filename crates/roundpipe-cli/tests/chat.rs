//! `roundpipe chat` as built: what a person or a pipe sees.

mod kit;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kit::{Run, text};
use roundpipe::{Cpu, Device, Params, RingOptions};
use roundpipe_models::chat::Message;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{GenerateOptions, Generator, LoraConfig, Model};
use serde_json::Value;

/// Says these lines to the program.
fn chat(arguments: &[&str], lines: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .arg("chat")
        .args(arguments)
        .args(["--devices", "cpu:1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().unwrap();
    // A program that has ended by itself reads no more.
    let _ = stdin.write_all(lines.as_bytes());
    drop(stdin);
    child.wait_with_output().expect("the program ends")
}

const COLD: [&str; 4] = ["--temperature", "0", "--max-tokens", "8"];

/// What the library says to messages, without a cache from turn to turn.
fn said(model: &Model, tokenizer: &Tokenizer, messages: &[Message]) -> String {
    let devices: [Arc<dyn Device>; 1] = [Cpu::new(Some(1)).unwrap()];
    let generator = Generator::new(model, &devices, &RingOptions::default()).unwrap();
    let options = GenerateOptions {
        max_tokens: 8,
        stop: tokenizer.eos().to_vec(),
        ..GenerateOptions::default()
    };
    let prompt = tokenizer.encode_chat(messages).unwrap().unwrap();
    let go = |_| ControlFlow::Continue(());
    let (tokens, _) = generator.generate(&prompt, &options, go).unwrap();
    tokenizer.decode(&tokens, true).unwrap()
}

/// An adapter that changes what the model says.
fn adapter(run: &Run, model: &str) -> String {
    let mut model = Model::load(Path::new(model), None).unwrap();
    let rank = LoraConfig {
        rank: 4,
        ..LoraConfig::default()
    };
    model.add_lora(&rank).unwrap();
    for (name, param) in model.trainable_params() {
        if name.contains("lora_B") {
            let home = param.data();
            let mut bytes = home.write(0..home.len()).unwrap();
            let values = bytes.as_mut_slice::<f32>().iter_mut().enumerate();
            values.for_each(|(i, x)| *x = (i % 7) as f32 - 3.0);
        }
    }
    let folder = run.path("adapter");
    model.save_adapter(&folder).unwrap();
    folder
}

/// Every turn is answered with all that was said before, exactly as if it were computed anew.
#[test]
fn a_conversation_remembers_what_was_said() {
    let run = Run::new("chat-turns");
    let folder = run.model();
    let model = Model::load(Path::new(&folder), None).unwrap();
    let tokenizer = Tokenizer::open(Path::new(&folder)).unwrap();
    let saved = run.path("saved.jsonl");
    let system = "Answer as a sailor.";
    let lines =
        format!("Where is the ship?\n\nAnd the pier?\n/save {saved}\n/reset\nWho are you?\n");
    let arguments = [&[folder.as_str(), "--system", system], &COLD[..]].concat();
    let output = chat(&arguments, &lines);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut messages = vec![Message::new("system", system)];
    let mut expected = String::new();
    for words in ["Where is the ship?", "And the pier?"] {
        messages.push(Message::new("user", words));
        let answer = said(&model, &tokenizer, &messages);
        expected += &format!("{answer}\n");
        messages.push(Message::new("assistant", answer));
    }
    let again = [
        Message::new("system", system),
        Message::new("user", "Who are you?"),
    ];
    expected += &format!("{}\n", said(&model, &tokenizer, &again));
    assert_eq!(text(&output.stdout), expected);
    let row: Value = serde_json::from_str(&std::fs::read_to_string(&saved).unwrap()).unwrap();
    let messages: Vec<_> = messages.into_iter().map(|message| message.0).collect();
    assert_eq!(row, serde_json::json!({ "messages": messages }));
}

/// With an adapter and without, one under the other, each with a history of its own.
#[test]
fn two_models_answer_side_by_side() {
    let run = Run::new("chat-against");
    let folder = run.model();
    let adapter = adapter(&run, &folder);
    let tokenizer = Tokenizer::open(Path::new(&folder)).unwrap();
    let plain = Model::load(Path::new(&folder), None).unwrap();
    let mut adapted = plain.clone();
    adapted.load_adapter(&adapter).unwrap();
    let turns = ["Where is the ship?", "And now?"];
    let mut histories = [Vec::new(), Vec::new()];
    let mut expected = String::new();
    for words in turns {
        let speakers = [(&folder, &adapted), (&"base".to_owned(), &plain)];
        for ((name, model), messages) in speakers.into_iter().zip(&mut histories) {
            messages.push(Message::new("user", words));
            let answer = said(model, &tokenizer, messages);
            expected += &format!("[{name}]\n{answer}\n");
            messages.push(Message::new("assistant", answer));
        }
    }
    assert_ne!(
        histories[0], histories[1],
        "the adapter says nothing of its own"
    );
    let options = [folder.as_str(), "--adapter", &adapter, "--against", "base"];
    let arguments = [&options, &COLD[..]].concat();
    let output = chat(
        &arguments,
        &turns.map(|words| format!("{words}\n")).concat(),
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), expected);
    // Another folder is a model like the first.
    let output = chat(
        &[&[folder.as_str(), "--against", &folder], &COLD[..]].concat(),
        "Hi\n",
    );
    let shown = text(&output.stdout);
    let answers: Vec<&str> = shown.split(&format!("[{folder}]\n")).skip(1).collect();
    assert!(answers.len() == 2 && answers[0] == answers[1], "{shown}");
}

/// A long conversation goes on: the oldest turns are dropped, and a line says so.
#[test]
fn a_full_context_drops_the_oldest_turns() {
    let run = Run::new("chat-full");
    let folder = run.model();
    let words = "Tell me about the pier and the ship and the sea.\n";
    let output = chat(&[&[folder.as_str()], &COLD[..]].concat(), &words.repeat(8));
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("the oldest turn was dropped"), "{notes}");
    // Words that never fit are refused, and the conversation goes on.
    let lines = format!("{}\nHi\n", "ship ".repeat(400));
    let output = chat(&[&[folder.as_str()], &COLD[..]].concat(), &lines);
    let notes = text(&output.stderr);
    assert!(
        output.status.success() && notes.contains("longest sequence"),
        "{notes}"
    );
    assert_eq!(
        text(&output.stdout).lines().next(),
        Some(""),
        "no answer to those"
    );
}

#[test]
fn bad_input_gets_one_line() {
    let run = Run::new("chat-bad");
    let folder = run.model();
    for (arguments, word) in [
        (vec!["/no/such/model"], "/no/such/model"),
        (vec![&folder, "--against", "base"], "--against base"),
        (vec![&folder, "--against", "/no/such"], "--against"),
        (vec![&folder, "--temperature=-1"], "--temperature"),
        (vec![&folder, "--top-k", "0"], "--top-k"),
        (vec![&folder, "--adapter", "/no/such"], "/no/such"),
    ] {
        let output = chat(&arguments, "Hi\n");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(
            error.contains(word) && error.lines().count() == 1,
            "{error}"
        );
    }
    let output = chat(
        &[&[folder.as_str()], &COLD[..]].concat(),
        "/nope\n/save\n/help\n/quit\nHi\n",
    );
    let notes = text(&output.stderr);
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{notes}"
    );
    assert!(
        notes.contains("no command /nope") && notes.contains("/system TEXT"),
        "{notes}"
    );
    std::fs::remove_file(Path::new(&folder).join("chat_template.jinja")).unwrap();
    let config = Path::new(&folder).join("tokenizer_config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&config, values.to_string()).unwrap();
    let error = text(&chat(&[&folder], "Hi\n").stderr);
    assert!(error.contains("no chat template"), "{error}");
}

/// Ctrl+C stops an answer and not the program; what was said until then is part of the
/// conversation.
#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_alone() {
    use std::io::Read;
    let run = Run::new("chat-interrupt");
    let folder = run.model();
    let mut child = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .args(["chat", &folder, "--devices", "cpu:1", "--temperature", "2"])
        .args(["--max-tokens", "200"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"Where is the ship?\n").unwrap();
    // The first words are there, so the answer has begun.
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    kit::send("-INT", &child);
    stdin.write_all(b"/quit\n").unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut notes = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut notes)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{notes}");
    // A fast machine may have said all of it before the signal came.
    assert!(
        notes.contains("(stopped)") || notes.contains("(cut") || notes.is_empty(),
        "{notes}"
    );
}
