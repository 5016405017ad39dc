//! Pairs of answers: what rows of each format become, and how streams give them.

use roundpipe_data::{
    Example, Format, Pair, Stream, StreamOptions, Survey, SurveyOptions, TooLong, Unit,
};
use roundpipe_models::chat::mask::TrainOn;
use serde_json::{Value, json};

use crate::kit::{CHATML, Folder, encoder, examples, open, seen, stream};

fn read(rows: &[Value]) -> (Format, Vec<Example>) {
    let folder = Folder::new();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let source = open(folder.write("pairs.jsonl", lines));
    (source.report()[0].format, examples(&source.rows()))
}

fn pair(example: &Example) -> &Pair {
    match example {
        Example::Preference(pair) => pair,
        other => panic!("{other:?}"),
    }
}

/// The messages of both sides, and which turns are learned.
fn chats(example: &Example) -> (Value, Value, TrainOn) {
    let pair = pair(example);
    let (Example::Chat(chosen), Example::Chat(rejected)) = (&pair.chosen, &pair.rejected) else {
        panic!("{pair:?}");
    };
    assert_eq!(chosen.train_on, rejected.train_on);
    (
        json!(chosen.messages),
        json!(rejected.messages),
        chosen.train_on,
    )
}

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn texts_have_a_prompt_of_their_own_or_share_one() {
    let side = |prompt: &str, completion: &str| Example::Completion {
        prompt: prompt.into(),
        completion: completion.into(),
    };
    let rows = [json!({"prompt": "Where? ", "chosen": "here", "rejected": "there"})];
    let (format, found) = read(&rows);
    assert_eq!(format, Format::Preference);
    assert_eq!(pair(&found[0]).chosen, side("Where? ", "here"));
    assert_eq!(pair(&found[0]).rejected, side("Where? ", "there"));
    let rows = [json!({
        "chosen": "Human: né? Assistant: yes", "rejected": "Human: né? Assistant: no",
    })];
    let (format, found) = read(&rows);
    assert_eq!(format, Format::ImplicitPreference);
    // The space goes with the word behind it.
    assert_eq!(
        pair(&found[0]).chosen,
        side("Human: né? Assistant:", " yes")
    );
    assert_eq!(
        pair(&found[0]).rejected,
        side("Human: né? Assistant:", " no")
    );
}

/// All ways to write the same conversation with two answers.
#[test]
fn conversations_in_every_shape_are_the_same_pair() {
    let (asked, yes, no) = (
        turn("user", "hi"),
        turn("assistant", "yes"),
        turn("assistant", "no"),
    );
    let shapes = [
        json!({"prompt": [asked], "chosen": [yes], "rejected": [no]}),
        json!({"prompt": [asked], "chosen": "yes", "rejected": "no"}),
        json!({"prompt": "hi", "chosen": [yes], "rejected": [no]}),
        json!({"prompt": "hi", "chosen": [asked, yes], "rejected": [asked, no]}),
        json!({"prompt": [asked], "chosen": [asked, yes], "rejected": [asked, no]}),
        json!({"chosen": [asked, yes], "rejected": [asked, no]}),
        json!({"instruction": "hi", "chosen": "yes", "rejected": "no"}),
        json!({"question": "hi", "system": "", "chosen": "yes", "rejected": "no"}),
        json!({
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"},
        }),
    ];
    for shape in &shapes {
        let (format, found) = read(std::slice::from_ref(shape));
        let (chosen, rejected, train_on) = chats(&found[0]);
        assert_eq!(chosen, json!([asked, yes]), "{format}: {shape}");
        assert_eq!(rejected, json!([asked, no]), "{format}: {shape}");
        assert_eq!(train_on, TrainOn::All);
    }
    assert_eq!(read(&shapes[8..]).0, Format::ShareGptPreference);
    assert_eq!(
        read(&shapes[8..]).0.to_string(),
        "ShareGPT preference pairs"
    );
    // Answers before the last one are part of the prompt.
    let before = [
        asked.clone(),
        turn("assistant", "hm"),
        turn("user", "well?"),
    ];
    let row = json!({
        "chosen": [before[0], before[1], before[2], yes], "rejected": [before[0], before[1], before[2], no],
    });
    let (_, found) = read(&[row]);
    let (chosen, _, train_on) = chats(&found[0]);
    assert_eq!(
        (chosen.as_array().unwrap().len(), train_on),
        (4, TrainOn::Last)
    );
}

#[test]
fn rows_that_are_no_pairs_say_why() {
    let good = json!({"prompt": "a", "chosen": "b", "rejected": "c"});
    let user = turn("user", "hi");
    for (row, says) in [
        (json!({"prompt": "a", "chosen": "b"}), "has no `rejected`"),
        (
            json!({"prompt": "a", "chosen": "", "rejected": "c"}),
            "its `chosen` is empty",
        ),
        (
            json!({"prompt": "a", "chosen": 5, "rejected": "c"}),
            "its `chosen` is a number",
        ),
        (
            json!({"prompt": 5, "chosen": "b", "rejected": "c"}),
            "its `prompt` is a number",
        ),
        (
            json!({"prompt": [user], "chosen": [user], "rejected": "c"}),
            "no turn of the assistant",
        ),
    ] {
        let folder = Folder::new();
        let source = open(folder.write("pairs.jsonl", format!("{good}\n{row}\n")));
        let error = source
            .rows()
            .order(0, None)
            .example(1)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("row 2") && error.contains(says),
            "{row}: {error}"
        );
    }
}

fn many(count: u64) -> String {
    let row = |number: u64| {
        let (a, b) = (1 + number % 5, 1 + number * 7 % 6);
        json!({
            "prompt": format!("{number}: "),
            "chosen": "yes ".repeat(a as usize), "rejected": "no ".repeat(b as usize),
        })
    };
    (0..count)
        .map(|number| format!("{}\n", row(number)))
        .collect()
}

fn options(batch: usize) -> StreamOptions {
    StreamOptions {
        pairs: true,
        ..StreamOptions::new(64, batch)
    }
}

/// Both sides are in one row, rows know their numbers in the files, and an interrupted stream goes
/// on where it was.
#[test]
fn streams_keep_pairs_together_and_go_on() {
    let folder = Folder::new();
    let source = open(folder.write("pairs.jsonl", many(23)));
    let all: Vec<_> = stream(
        source.rows(),
        StreamOptions {
            epochs: Some(2),
            ..options(4)
        },
    )
    .map(Result::unwrap)
    .collect();
    let mut keys: Vec<u64> = all.iter().flat_map(|batch| batch.keys.clone()).collect();
    assert_ne!(keys[..23], keys[23..], "epochs have orders of their own");
    keys.sort_unstable();
    assert_eq!(keys, (0..46).map(|i| i / 2).collect::<Vec<u64>>());
    let encoder = encoder(CHATML);
    let rows = source.rows().all().order(0, None);
    for batch in &all {
        assert_eq!(batch.documents, 2 * batch.rows);
        let microbatch = batch.microbatch(0..batch.rows).unwrap();
        let ids: Vec<i64> = microbatch.ids.to_vec().unwrap();
        let documents: Vec<i64> = microbatch.documents.unwrap().to_vec().unwrap();
        let lens: Vec<i32> = microbatch.lens.unwrap().to_vec().unwrap();
        let labels = batch.pair_labels(0..batch.rows).unwrap();
        for (row, key) in batch.keys.iter().enumerate() {
            let example = rows.example(*key).unwrap();
            let sides = encoder.encode_pair(pair(&example)).unwrap();
            for (side, document) in sides.iter().enumerate() {
                let at = 2 * row + side;
                let range = lens[at] as usize..lens[at + 1] as usize;
                let inputs: Vec<i64> = document.ids[..document.inputs()]
                    .iter()
                    .map(|id| i64::from(*id))
                    .collect();
                assert_eq!(ids[range.clone()], inputs);
                assert!(documents[range].iter().all(|found| *found == at as i64));
                assert_eq!(labels[row][side], document.labels() as u64);
            }
        }
        assert_eq!(ids.len() % 64, 0);
    }
    let mut first = stream(source.rows(), options(4));
    for _ in 0..7 {
        first.next().unwrap().unwrap();
    }
    let mut again = stream(source.rows(), options(4));
    again.seek(first.position()).unwrap();
    for _ in 0..5 {
        let (a, b) = (
            first.next().unwrap().unwrap(),
            again.next().unwrap().unwrap(),
        );
        assert_eq!((seen(&a), a.keys), (seen(&b), b.keys));
    }
}

/// Pairs that are too long are cut on both sides or left out; those of which nothing can be learned
/// are left out.
#[test]
fn pairs_that_cannot_be_learned_are_left_out() {
    let folder = Folder::new();
    let long = "word ".repeat(100);
    let rows = [
        json!({"prompt": "a", "chosen": long, "rejected": "b"}),
        json!({"prompt": "a", "chosen": "same", "rejected": "same"}),
        json!({"prompt": long, "chosen": "b", "rejected": "c"}),
        json!({"prompt": "a", "chosen": "b", "rejected": "c"}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let source = open(folder.write("pairs.jsonl", lines));
    let once = |too_long| StreamOptions {
        epochs: Some(1),
        shuffle: None,
        too_long,
        ..options(4)
    };
    let mut cut = stream(source.rows(), once(None));
    let batch = cut.next().unwrap().unwrap();
    assert_eq!(batch.keys, [0, 3]);
    assert_eq!((cut.counts().cut, cut.counts().empty), (1, 2));
    let mut dropped = stream(source.rows(), once(Some(TooLong::Drop)));
    assert_eq!(dropped.next().unwrap().unwrap().keys, [3]);
    assert_eq!((dropped.counts().too_long, dropped.counts().empty), (2, 1));
    let survey = SurveyOptions {
        seq: Some(64),
        ..SurveyOptions::default()
    };
    let found = Survey::take(&source.rows(), Some(&encoder(CHATML)), &survey);
    assert_eq!(
        (found.unit, found.rows, found.measured),
        (Unit::Tokens, 4, 4)
    );
    assert_eq!(
        (found.cut.count, found.empty.count, found.bad.count),
        (1, 2, 0)
    );
    assert_eq!(found.cut.first[0].row, 1);
    assert_eq!(found.shown.len(), 2);
    assert_eq!(found.shown[1].row, 4);
}

/// Tokens are not learned from pairs, nor preferences from texts.
#[test]
fn pairs_and_texts_are_not_mixed_up() {
    let folder = Folder::new();
    let source = open(folder.write("pairs.jsonl", many(2)));
    let one = |rows, options: StreamOptions| {
        let mut stream: Stream = stream(rows, options);
        stream.next().unwrap().unwrap_err().to_string()
    };
    let error = one(source.rows(), StreamOptions::new(64, 1));
    assert!(error.contains("--method dpo"), "{error}");
    let texts = open(folder.write("texts.jsonl", "{\"text\": \"a b c\"}\n"));
    let error = one(texts.rows(), options(1));
    assert!(error.contains("`chosen` and `rejected`"), "{error}");
}

/// A survey of many rows measures some of them, and finds the same with any number of threads.
#[test]
fn surveys_of_large_files_are_samples_that_repeat() {
    let folder = Folder::new();
    let mut lines = many(3000);
    lines.push_str("{oops\n");
    let source = open(folder.write("pairs.jsonl", lines));
    let encoder = encoder(CHATML);
    let take = |threads, measured_bytes| {
        let options = SurveyOptions {
            measured_bytes,
            threads,
            named: 3,
            ..SurveyOptions::default()
        };
        Survey::take(&source.rows(), Some(&encoder), &options)
    };
    let whole = take(1, u64::MAX);
    assert_eq!((whole.rows, whole.read, whole.measured), (3001, 3001, 3000));
    assert!(!whole.is_sample());
    assert_eq!(whole, take(3, u64::MAX));
    let part = take(2, source.rows().bytes() / 10);
    assert!(part.is_sample() && part.measured < 400, "{}", part.measured);
    assert_eq!(part, take(1, source.rows().bytes() / 10));
    assert_eq!((part.bad.count, part.bad.first[0].row), (1, 3001));
}
