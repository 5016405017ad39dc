//! Batches: what is in them, in which order, and that a resumed run has the same.

use std::collections::BTreeMap;

use roundpipe_data::{
    BadRows, Example, Position, Rows, Stream, StreamOptions, TooLong, TrainBatch,
};

use crate::kit::{CHATML, Folder, Seen, encoder, examples, open, seen, stream, texts};

fn all(stream: &mut Stream) -> Vec<Seen> {
    stream.map(|batch| seen(&batch.unwrap())).collect()
}

fn options(seq: usize, rows: usize, epochs: u64) -> StreamOptions {
    StreamOptions {
        epochs: Some(epochs),
        ..StreamOptions::new(seq, rows)
    }
}

fn rows(folder: &Folder, count: u64) -> Rows {
    open(folder.write("x.jsonl", texts(count))).rows()
}

/// Small rows whose tokens can be counted by hand: five documents in rows of 8.
#[test]
fn golden_packing() {
    let folder = Folder::new();
    let lines = ["abc", "de", "fghi", "j", "klmno"].map(|text| {
        let spaced: Vec<String> = text.chars().map(|c| format!("{c}\\u0000")).collect();
        format!("{{\"text\": \"{}\"}}\n", spaced.concat())
    });
    let rows = open(folder.write("x.jsonl", lines.concat())).rows();
    let encoder = encoder(CHATML);
    let lengths: Vec<usize> = examples(&rows)
        .iter()
        .map(|example| encoder.encode(example).unwrap().inputs())
        .collect();
    // A letter and a NUL are a token each, and the end behind them is only predicted.
    assert_eq!(lengths, [6, 4, 8, 2, 10]);
    let options = StreamOptions {
        shuffle: None,
        ..options(12, 2, 1)
    };
    let batches: Vec<TrainBatch> = stream(rows, options).map(Result::unwrap).collect();
    let lens: Vec<Vec<Vec<i32>>> = batches.iter().map(|batch| batch.lens.clone()).collect();
    // 6, 4 and 2 fill a row; 8 and 10 are closed at the end of the epoch.
    assert_eq!(
        lens,
        [
            vec![vec![0, 6, 10, 12], vec![0, 8, 12]],
            vec![vec![0, 10, 12]]
        ]
    );
    let first = seen(&batches[0]);
    assert_eq!(first.dims, [2, 12]);
    let places = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1];
    assert_eq!(first.positions[..12], places);
    // A label is the next token; that of a document's last input is the end.
    assert_eq!(first.labels[..5], first.ids[1..6]);
    assert_eq!(
        (first.labels[5], first.labels[9], first.labels[11]),
        (2, 2, 2)
    );
    // Padding: four places of it behind the document of 8.
    assert_eq!(first.labels[20..], [-100; 4]);
    assert_eq!(first.ids[20..], [0; 4]);
    assert_eq!(first.positions[20..], [0, 1, 2, 3]);
    assert_eq!(first.counts, [20, 20, 2, 4]);
    assert_eq!(seen(&batches[1]).counts, [10, 10, 1, 1]);
}

/// Every document of an epoch is in one row, whole, with its own labels and positions.
#[test]
fn every_document_comes_once_an_epoch() {
    let folder = Folder::new();
    let rows = rows(&folder, 200);
    let encoder = encoder(CHATML);
    let mut want = BTreeMap::new();
    for example in examples(&rows) {
        let document = encoder.encode(&example).unwrap();
        let ids: Vec<i64> = document.ids.iter().map(|id| i64::from(*id)).collect();
        *want.entry(ids).or_insert(0) += 3;
    }
    let mut stream = stream(rows, options(256, 4, 3));
    let mut found = BTreeMap::new();
    for batch in stream.by_ref() {
        let batch = batch.unwrap();
        for (row, lens) in batch.lens.iter().enumerate() {
            let one = batch.microbatch(row..row + 1).unwrap();
            let [ids, labels, positions] =
                [&one.ids, &one.labels, &one.positions].map(|t| t.to_vec::<i64>().unwrap());
            assert_eq!((lens[0], lens[lens.len() - 1]), (0, 256));
            for ends in lens.windows(2) {
                let place = ends[0] as usize..ends[1] as usize;
                assert!(
                    positions[place.clone()]
                        .iter()
                        .copied()
                        .eq(0..place.len() as i64)
                );
                let learned = &labels[place.clone()];
                if learned.iter().all(|label| *label == -100) {
                    assert_eq!(place.end, 256, "padding ends a row");
                    continue;
                }
                // The ids, and the last label: the token that is only predicted.
                let mut document = ids[place.clone()].to_vec();
                assert_eq!(learned[..learned.len() - 1], document[1..]);
                document.push(learned[learned.len() - 1]);
                *found.entry(document).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(found, want);
    let counts = *stream.counts();
    assert_eq!((counts.rows, counts.documents), (600, 600));
    assert_eq!(counts.tokens, counts.tokens_trained);
    assert!(counts.padding * 20 < counts.tokens, "{counts:?}");
}

#[test]
fn threads_change_nothing() {
    let folder = Folder::new();
    let rows = rows(&folder, 300);
    for packing in [true, false] {
        let with = |threads| {
            let options = StreamOptions {
                threads,
                packing,
                ..options(128, 3, 2)
            };
            all(&mut stream(rows.clone(), options))
        };
        let want = with(0);
        assert!(want.len() > 10);
        for threads in [1, 2, 7] {
            assert_eq!(with(threads), want, "{threads} threads");
        }
    }
}

/// A run that is stopped behind any batch and resumed from the text of its position has the batches
/// and counts of one that was not.
#[test]
fn resumed_runs_are_uninterrupted_ones() {
    let folder = Folder::new();
    let rows = rows(&folder, 90);
    for (packing, too_long, threads) in [
        (true, None, 2),
        (true, Some(TooLong::Cut), 0),
        (false, Some(TooLong::Drop), 3),
    ] {
        let options = StreamOptions {
            packing,
            too_long,
            threads,
            open_rows: 5,
            ..options(48, 4, 3)
        };
        let mut whole = stream(rows.clone(), options.clone());
        let mut positions = vec![whole.position().clone()];
        let mut want = Vec::new();
        while let Some(batch) = whole.next() {
            want.push(seen(&batch.unwrap()));
            positions.push(whole.position().clone());
        }
        for (done, position) in positions.iter().enumerate() {
            let text = serde_json::to_string(position).unwrap();
            assert!(text.len() < 20_000, "{}", text.len());
            let position: Position = serde_json::from_str(&text).unwrap();
            let mut resumed = stream(rows.clone(), options.clone());
            resumed.seek(&position).unwrap();
            assert_eq!(all(&mut resumed), want[done..], "behind {done} batches");
            assert_eq!(resumed.counts(), whole.counts());
        }
        // Back to the start, in the same stream.
        whole.seek(&positions[0]).unwrap();
        assert_eq!(all(&mut whole), want);
    }
}

#[test]
fn positions_of_other_data_are_refused() {
    let folder = Folder::new();
    let rows = rows(&folder, 50);
    let mut first = stream(rows.clone(), options(64, 2, 1));
    first.next().unwrap().unwrap();
    let position = first.position().clone();
    let mut other = stream(rows.clone(), options(65, 2, 1));
    let error = other.seek(&position).unwrap_err().to_string();
    assert!(
        error.contains("position: ") && error.contains("start anew"),
        "{error}"
    );
    // A position that was tampered with.
    let mut odd = position.clone();
    odd.carry.open = vec![vec![roundpipe_data::DocumentPlace {
        epoch: 0,
        row: 49,
        piece: 3,
    }]];
    odd.epoch = 7;
    let error = first.seek(&odd).unwrap_err().to_string();
    assert!(error.contains("start anew"), "{error}");
    odd.epoch = u64::MAX;
    assert!(first.seek(&odd).is_err());
    // It goes on all the same from a sound one, with another number of rows in a batch.
    let mut more = stream(rows, options(64, 5, 1));
    more.seek(&position).unwrap();
    assert!(more.next().unwrap().is_ok());
}

#[test]
fn epochs_and_seeds_have_orders_of_their_own() {
    let folder = Folder::new();
    let rows = rows(&folder, 60);
    let with = |shuffle, epochs| {
        let options = StreamOptions {
            shuffle,
            packing: false,
            ..options(512, 60, epochs)
        };
        all(&mut stream(rows.clone(), options))
    };
    let two = with(Some(1), 2);
    assert_ne!(two[0].ids, two[1].ids);
    assert_eq!(two[0], with(Some(1), 1)[0]);
    assert_ne!(two[0].ids, with(Some(2), 1)[0].ids);
    let plain = with(None, 2);
    assert_eq!(plain[0], plain[1]);
}

/// Rows that are too long are cut, dropped or split, and counted.
#[test]
fn too_long_rows_are_counted() {
    let folder = Folder::new();
    let long = "x\\u0000".repeat(50);
    let lines = format!("{{\"text\": \"{long}\"}}\n{{\"text\": \"short\"}}\n");
    let rows = open(folder.write("x.jsonl", lines)).rows();
    let with = |too_long| {
        let options = StreamOptions {
            too_long,
            shuffle: None,
            ..options(40, 8, 1)
        };
        let mut stream = stream(rows.clone(), options);
        let batches = all(&mut stream);
        (*stream.counts(), batches)
    };
    let (counts, _) = with(Some(TooLong::Cut));
    assert_eq!((counts.cut, counts.documents, counts.too_long), (1, 2, 0));
    let (counts, _) = with(Some(TooLong::Drop));
    assert_eq!((counts.cut, counts.documents, counts.too_long), (0, 1, 1));
    // 102 tokens are 101 inputs: 40, 40 and 21. No label is lost at a seam.
    let (counts, batches) = with(None);
    assert_eq!((counts.split, counts.documents), (1, 4));
    let lens: Vec<i32> = batches[0].lens.concat();
    assert_eq!(lens[..4], [0, 40, 0, 40]);
    let learned: u64 = batches.iter().map(|batch| batch.counts[1]).sum();
    assert!(learned > 101, "{learned}");
    assert_eq!(learned, counts.tokens_trained);
}

/// A conversation whose answer is cut off has nothing to learn and is left out.
#[test]
fn cut_conversations_without_an_answer_are_left_out() {
    let folder = Folder::new();
    let ask = "ships ".repeat(100);
    let lines = format!(
        "{{\"instruction\": \"{ask}\", \"output\": \"yes\"}}\n{{\"instruction\": \"a\", \"output\": \"b\"}}\n"
    );
    let rows = open(folder.write("x.jsonl", lines)).rows();
    let mut stream = stream(rows, options(64, 8, 1));
    assert_eq!(all(&mut stream).len(), 1);
    let counts = stream.counts();
    assert_eq!((counts.empty, counts.documents), (1, 1));
    assert!(counts.tokens_trained < counts.tokens);
}

#[test]
fn unpacked_rows_are_padded_on_the_right() {
    let folder = Folder::new();
    let rows = rows(&folder, 9);
    let options = StreamOptions {
        packing: false,
        shuffle: None,
        ..options(512, 4, 1)
    };
    let batches: Vec<TrainBatch> = stream(rows, options).map(Result::unwrap).collect();
    assert_eq!(batches.len(), 3);
    for batch in &batches {
        assert!(batch.lens.is_empty());
        let width = batch.ids.dims()[1];
        assert_eq!(width % 64, 0);
        let some = batch.microbatch(0..1).unwrap();
        assert_eq!(some.ids.dims(), [1, width]);
        assert!(some.lens.is_none());
    }
    assert_eq!(batches[2].rows, 1);
}

/// Rows of a microbatch are one long row; sequences that fill `lens` up are empty.
#[test]
fn microbatches_join_rows() {
    let folder = Folder::new();
    let batch = stream(rows(&folder, 100), options(64, 3, 1))
        .next()
        .unwrap()
        .unwrap();
    let joined = batch.microbatch(1..3).unwrap();
    assert_eq!(joined.ids.dims(), [1, 128]);
    let lens: Vec<i32> = joined.lens.unwrap().to_vec().unwrap();
    assert!((lens.len() - 1).is_power_of_two());
    assert!(lens.windows(2).all(|ends| ends[0] <= ends[1]));
    let second = batch.lens[2].iter().skip(1).map(|end| 64 + end);
    let want: Vec<i32> = batch.lens[1].iter().copied().chain(second).collect();
    assert_eq!(lens[..want.len()], want);
    assert!(lens[want.len()..].iter().all(|end| *end == 128));
    assert!(batch.microbatch(2..9).is_err());
}

#[test]
fn bad_rows_end_a_stream_or_are_counted() {
    let folder = Folder::new();
    let mut lines: Vec<String> = texts(40).lines().map(str::to_owned).collect();
    lines[20] = "{\"text\": 5}".into();
    lines[30] = "{broken".into();
    let rows = open(folder.write("x.jsonl", lines.join("\n"))).rows();
    let ordered = StreamOptions {
        shuffle: None,
        packing: false,
        ..options(512, 4, 1)
    };
    let mut refusing = stream(rows.clone(), ordered.clone());
    // The batches before the bad row come first.
    for _ in 0..5 {
        refusing.next().unwrap().unwrap();
    }
    let error = refusing.next().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("x.jsonl: row 21: its `text` is a number"),
        "{error}"
    );
    assert!(refusing.next().is_none());

    let skipping = StreamOptions {
        bad_rows: BadRows::Skip,
        ..ordered
    };
    let mut skipping = stream(rows, skipping);
    assert_eq!(all(&mut skipping).len(), 10);
    assert_eq!(
        (skipping.counts().bad, skipping.counts().documents),
        (2, 38)
    );
    assert!(skipping.first_bad().unwrap().to_string().contains("row 21"));
}

/// Data of which nothing is learned ends in an error, not in an endless loop.
#[test]
fn nothing_to_learn_is_an_error() {
    let folder = Folder::new();
    let rows = open(folder.write("x.jsonl", texts(10))).rows();
    let options = StreamOptions {
        too_long: Some(TooLong::Drop),
        ..StreamOptions::new(1, 1)
    };
    let error = stream(rows, options)
        .next()
        .unwrap()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("10 too long") && error.contains("raise `seq`"),
        "{error}"
    );
}

#[test]
fn options_that_cannot_work_are_named() {
    let folder = Folder::new();
    let rows = rows(&folder, 3);
    let good = StreamOptions::new(8, 1);
    let bad = [
        (
            "seq",
            StreamOptions {
                seq: 0,
                ..good.clone()
            },
        ),
        (
            "batch_rows",
            StreamOptions {
                batch_rows: usize::MAX,
                ..good.clone()
            },
        ),
        (
            "open_rows",
            StreamOptions {
                open_rows: 0,
                ..good.clone()
            },
        ),
        (
            "threads",
            StreamOptions {
                threads: 9999,
                ..good.clone()
            },
        ),
    ];
    for (name, options) in bad {
        let error = Stream::new(rows.clone(), encoder(CHATML), options)
            .err()
            .unwrap();
        assert!(error.to_string().starts_with(name), "{error}");
    }
}

/// Completions are learned with the end behind them, prompts are not.
#[test]
fn completions_are_learned_without_prompts() {
    let encoder = encoder(CHATML);
    let example = Example::Completion {
        prompt: "the ships".into(),
        completion: " pass".into(),
    };
    let document = encoder.encode(&example).unwrap();
    let learned: Vec<u32> = (document.ids.iter().zip(&document.learned))
        .filter(|(_, learned)| **learned)
        .map(|(id, _)| *id)
        .collect();
    let text = encoder.tokenizer().decode(&learned, false).unwrap();
    let end = encoder.tokenizer().eos()[0];
    assert_eq!(learned.last(), Some(&end));
    assert!(text.starts_with(" pass"), "{text}");
}

/// A text that is tokenised in slices has the tokens of the whole where words do not join.
#[test]
fn long_texts_have_the_tokens_of_the_whole() {
    let encoder = encoder(CHATML);
    let text = "the ships pass and gulls 12 345\n".repeat(10_000);
    let example = Example::Text {
        text: text.clone(),
        ends: true,
    };
    let mut want = encoder.tokenizer().encode(&text, false).unwrap();
    want.push(encoder.tokenizer().eos()[0]);
    let found = encoder.encode(&example).unwrap();
    assert!(
        found.ids == want,
        "{} and {} tokens",
        found.ids.len(),
        want.len()
    );
    let example = Example::Completion {
        prompt: text[..200_000].into(),
        completion: text[200_000..].into(),
    };
    let split = encoder.encode(&example).unwrap();
    assert!(split.ids == want);
    let given = split.learned.iter().filter(|learned| !**learned).count();
    let prompt = encoder.tokenizer().encode(&text[..200_000], false).unwrap();
    assert!(
        given.abs_diff(prompt.len()) <= 1,
        "{given} {}",
        prompt.len()
    );
}
