//! `roundpipe data show` as it is built: what it detects, counts, marks and names.

mod kit;

use std::process::Output;

use kit::{Run, program, text};
use serde_json::{Value, json};

fn shown(arguments: &[&str]) -> String {
    let output = program(&[&["data", "show"], arguments].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn as_json(arguments: &[&str]) -> Value {
    let out = shown(&[arguments, &["--json"]].concat());
    assert_eq!(out.lines().count(), 1, "{out}");
    serde_json::from_str(&out).unwrap()
}

fn refused(arguments: &[&str]) -> Output {
    let output = program(&[&["data", "show"], arguments].concat());
    let error = text(&output.stderr);
    assert!(!output.status.success(), "{arguments:?}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    output
}

/// Everything that a person asks before training: formats, counts, lengths, rows with marks, the
/// rows that are too long, and those that are broken, with their places.
#[test]
fn rows_are_counted_measured_marked_and_named() {
    let run = Run::new("data-show");
    let model = run.model();
    let chats = run.chats(20);
    let chat = |answer: &str| json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]});
    let long = chat(&"a ship ".repeat(60));
    let silent = json!({"messages": [{"role": "user", "content": "hi"}]});
    let other = [long.to_string(), "{oops".into(), silent.to_string()].join("\n");
    let other = run.write("other.jsonl", other);
    let out = shown(&[&chats, &other, "--model", &model, "seq=96", "validation=3"]);
    for part in [
        "chats.jsonl: 20 rows of messages, JSON lines",
        "23 rows: 20 train, 3 validate",
        "tokens of a row: ",
        "seq 96, as given:",
        "rows would be cut:",
        "other.jsonl: row 1: ",
        "cannot be used:",
        "other.jsonl: row 2: is no JSON that can be read",
        "what is learned is ⟦marked⟧:",
        "⟦It passes by the pier. <|im_end|>⟧",
        "chats.jsonl: row 2:",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("chats.jsonl: row 3:"), "{out}");
    let found = as_json(&[&chats, &other, "--model", &model, "seq=96", "--rows", "1"]);
    assert_eq!(
        (&found["rows"], &found["unit"]),
        (&json!(23), &json!("tokens"))
    );
    assert_eq!(found["seq"], 96);
    assert_eq!(found["shown"].as_array().unwrap().len(), 1);
    let rows = |kind: &str| found[kind]["rows"].as_u64().unwrap();
    let lengths = found["lengths"]["histogram"].as_array().unwrap();
    let counted: u64 = lengths.iter().filter_map(|bar| bar["rows"].as_u64()).sum();
    assert_eq!(counted, found["rows_measured"].as_u64().unwrap());
    // The broken row, and the one without an answer.
    assert_eq!(counted + rows("bad"), 23);
    assert!(rows("bad") + rows("empty") >= 2, "{found}");
    let cut = rows("cut");
    let longer = as_json(&[&chats, &other, "--model", &model, "seq=4096"]);
    assert_eq!(longer["cut"]["rows"], 0);
    assert!(cut > 0 && longer["total"].as_u64() > found["total"].as_u64());
    let dropped = as_json(&[&chats, &other, "--model", &model, "seq=96", "too_long=drop"]);
    assert_eq!(dropped["too_long"]["rows"], cut);
}

/// What `data show` chooses and shows is what `train` does.
#[test]
fn it_shows_what_training_does() {
    let run = Run::new("data-train");
    let (model, chats) = (run.model(), run.chats(20));
    let out = run.path("run");
    let mut arguments = vec!["train", &model, &chats, "--out", &out, "steps=1", "batch=1"];
    arguments.extend(["devices=cpu", "sample_every=0", "validation=off"]);
    let trained = program(&arguments);
    assert!(trained.status.success(), "{}", text(&trained.stderr));
    let settings = std::fs::read_to_string(format!("{out}/run.toml")).unwrap();
    let found = as_json(&[&chats, "--model", &model, "validation=off"]);
    let seq = format!("\nseq = {} ", found["seq"]);
    assert!(settings.contains(&seq), "{seq}: {settings}");
    let said = text(&trained.stdout);
    let shown = shown(&[&chats, "--model", &model]);
    let marked = |text: &str| {
        text.lines()
            .filter(|line| line.contains('⟦'))
            .skip(1)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(marked(&said).len(), 2);
    assert_eq!(marked(&said), marked(&shown));
}

/// Without a model there are no tokens, and still formats, counts and characters; pairs of answers
/// are known by their keys.
#[test]
fn without_a_model_it_says_what_can_be_said() {
    let run = Run::new("data-plain");
    let row = |number: usize| json!({"prompt": "Where?", "chosen": "At the pier.", "rejected": "x".repeat(number)});
    let rows: String = (1..=100)
        .map(|number| format!("{}\n", row(number)))
        .collect();
    let pairs = run.write("pairs.jsonl", rows);
    let found = as_json(&[&pairs]);
    assert_eq!(found["unit"], "characters");
    assert_eq!(found["files"][0]["format"], "preference pairs");
    assert_eq!(
        (&found["preference"], &found["seq"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(
        (&found["lengths"]["least"], &found["lengths"]["most"]),
        (&json!(18), &json!(106))
    );
    let out = shown(&[&pairs]);
    for part in [
        "--method dpo",
        "row 1, chosen:",
        "Where?⟦At the pier.⟧",
        "row 1, rejected:",
        "Where?⟦x⟧",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let bare = run.write("odd.jsonl", "{\"chosen\": \"a\"}\n");
    for (arguments, code, says) in [
        (vec!["/no/such.jsonl"], 1, "/no/such.jsonl"),
        (vec![bare.as_str()], 1, "`chosen` and `rejected`"),
        (vec![pairs.as_str(), "seqq=5"], 2, "do you mean `seq`?"),
        (vec![pairs.as_str(), "seq=0"], 2, "seq must be at least 1"),
        (vec![pairs.as_str(), "template=x.jinja"], 2, "--model"),
        (vec![pairs.as_str(), "--rows", "99999999"], 2, "--rows"),
        (vec!["seq=5"], 2, "no data are given"),
    ] {
        let output = refused(&arguments);
        let error = text(&output.stderr);
        assert!(error.contains(says), "{arguments:?}: {error}");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    }
}
