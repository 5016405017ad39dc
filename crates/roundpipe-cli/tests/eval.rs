//! `roundpipe eval` on the built program, against figures computed from logits.

mod kit;

use std::path::Path;
use std::sync::Arc;

use kit::{Run, program, text};
use roundpipe::{Cpu, Device, RingOptions};
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{Generator, Model};
use serde_json::{Value, json};

/// Losses of a model from its logits, one sequence at a time.
struct Reference {
    generator: Generator,
    tokenizer: Tokenizer,
}

impl Reference {
    fn open(folder: &str) -> Self {
        let model = Model::load(folder, None).unwrap();
        let devices = [Cpu::new(Some(1)).unwrap() as Arc<dyn Device>];
        Self {
            generator: Generator::new(&model, &devices, &RingOptions::default()).unwrap(),
            tokenizer: Tokenizer::open(Path::new(folder)).unwrap(),
        }
    }

    /// Loss of each token behind the first, and whether it was the likeliest.
    fn losses(&self, ids: &[u32]) -> Vec<(f64, bool)> {
        let logits = self.generator.logits(&ids[..ids.len() - 1]).unwrap();
        let vocab = logits.dims()[2];
        let logits = logits.to_f64_vec().unwrap();
        let rows = logits.chunks(vocab).zip(&ids[1..]);
        rows.map(|(row, label)| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
            let label = row[*label as usize];
            (most + sum.ln() - label, label == most)
        })
        .collect()
    }
}

fn results(output: &std::process::Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON value")
}

fn near(value: &Value, right: f64) -> bool {
    (value.as_f64().unwrap() - right).abs() < 1e-4 * right.abs().max(1.0)
}

#[test]
fn losses_of_examples_are_those_of_the_logits() {
    let run = Run::new("eval-examples");
    let model = run.model();
    let texts: Vec<String> = (1..9)
        .map(|count| "A ship passes the pier at noon. ".repeat(count))
        .collect();
    let rows: String = texts
        .iter()
        .map(|text| format!("{}\n", json!({ "text": text })))
        .collect();
    let data = run.write("texts.jsonl", rows);
    let details = run.path("details.jsonl");
    let arguments = [
        "eval",
        &model,
        &data,
        "--json",
        "--seq",
        "64",
        "--devices",
        "cpu:2",
        "--details",
        &details,
    ];
    let found = results(&program(&arguments));
    let result = &found["results"][0];

    let reference = Reference::open(&model);
    let (mut sums, mut long) = (Vec::new(), 0);
    for text in &texts {
        let mut ids = reference.tokenizer.encode(text, true).unwrap();
        ids.extend(reference.tokenizer.eos().first());
        long += u64::from(ids.len() > 65);
        // Longer texts are split; a piece begins with the token that the last one ended with.
        let mut start = 0;
        while start + 1 < ids.len() {
            let end = (start + 65).min(ids.len());
            let losses = reference.losses(&ids[start..end]);
            let sum: f64 = losses.iter().map(|(loss, _)| loss).sum();
            let hits = losses.iter().filter(|(_, hit)| *hit).count();
            sums.push((sum, hits as f64, losses.len() as f64));
            start += 64;
        }
    }
    assert!(long > 0, "some texts are to be split");
    let tokens: f64 = sums.iter().map(|(_, _, tokens)| tokens).sum();
    let loss = sums.iter().map(|(sum, _, _)| sum).sum::<f64>() / tokens;
    let hits = sums.iter().map(|(_, hits, _)| hits).sum::<f64>() / tokens;
    let n = sums.len() as f64;
    let squares: f64 = sums
        .iter()
        .map(|(sum, _, tokens)| (sum - loss * tokens).powi(2))
        .sum();
    let error = (squares * n / (n - 1.0)).sqrt() / tokens;
    assert_eq!(result["rows"], 8);
    assert_eq!(result["too_long"], long);
    assert_eq!(result["tokens"].as_u64().unwrap(), tokens as u64);
    assert!(near(&result["loss"]["value"], loss), "{result} {loss}");
    assert!(near(&result["loss"]["error"], error), "{result} {error}");
    assert!(near(&result["perplexity"]["value"], loss.exp()), "{result}");
    assert!(near(&result["token_accuracy"]["value"], hits), "{result}");
    let told = std::fs::read_to_string(&details).unwrap();
    assert_eq!(told.lines().count(), sums.len());

    // One worker, longer rows and a table: the same figures.
    let output = program(&["eval", &model, &data, "--seq", "64", "--devices", "cpu"]);
    let table = text(&output.stdout);
    assert!(table.contains(&format!("{loss:.3}")), "{table}");
    assert!(table.contains("8 rows"), "{table}");
    // What was there is not written over.
    let output = program(&arguments);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("is there already"));
}

#[test]
fn the_likeliest_choice_counts() {
    let run = Run::new("eval-choices");
    let model = run.model();
    let reference = Reference::open(&model);
    let choices = ["the pier", "a very long way behind the old harbour", "sea"];
    let question = "Where is the ship?";
    let likelihood = |choice: &str| {
        let prompt = format!("Question: {question}\nAnswer:");
        let all = reference
            .tokenizer
            .encode(&format!("{prompt} {choice}"), true)
            .unwrap();
        let before = reference.tokenizer.encode(&prompt, true).unwrap().len();
        let losses = reference.losses(&all);
        -losses[before - 1..]
            .iter()
            .map(|(loss, _)| loss)
            .sum::<f64>()
    };
    let sums: Vec<f64> = choices.iter().map(|choice| likelihood(choice)).collect();
    let best = |values: &[f64]| {
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        values.iter().position(|value| *value == most).unwrap()
    };
    let by_sum = best(&sums);
    let per_byte: Vec<f64> = sums
        .iter()
        .zip(choices)
        .map(|(sum, choice)| sum / choice.len() as f64)
        .collect();
    let by_length = best(&per_byte);
    // Each choice is called right once: one of three is.
    let rows: String = (0..choices.len())
        .map(|right| {
            let row = json!({ "question": question, "choices": choices, "answer": right });
            format!("{row}\n")
        })
        .collect();
    let data = run.write("tasks.jsonl", rows);
    let details = run.path("details.jsonl");
    let found = results(&program(&[
        "eval",
        &model,
        &data,
        "--raw",
        "--json",
        "--devices",
        "cpu",
        "--details",
        &details,
    ]));
    let result = &found["results"][0];
    assert_eq!(result["kind"], "choices");
    assert_eq!(result["rows"], 3);
    assert!(near(&result["accuracy"]["value"], 1.0 / 3.0), "{result}");
    let told = std::fs::read_to_string(&details).unwrap();
    let rows: Vec<Value> = told
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for (place, row) in rows.iter().enumerate() {
        assert_eq!(row["right"], place == by_sum, "{row}");
        for (choice, sum) in sums.iter().enumerate() {
            assert!(near(&row["choices"][choice], *sum), "{row} {sums:?}");
        }
    }
    // Only the row whose answer is the best by length is right by length.
    let one = json!({ "question": question, "choices": choices, "answer": by_length });
    let data = run.write("one.jsonl", format!("{one}\n"));
    let found = results(&program(&[
        "eval",
        &model,
        &data,
        "--raw",
        "--json",
        "--devices",
        "cpu",
    ]));
    assert_eq!(found["results"][0]["accuracy_by_length"]["value"], 1.0);
    // Within the chat template, too.
    let found = results(&program(&[
        "eval",
        &model,
        &data,
        "--json",
        "--devices",
        "cpu",
    ]));
    assert_eq!(found["results"][0]["rows"], 1);
}

#[test]
fn written_answers_are_compared() {
    let run = Run::new("eval-answers");
    let model = run.model();
    let ask = |prompt: &str| {
        let output = program(&[
            "generate",
            &model,
            "--raw",
            "--prompt",
            prompt,
            "--max-tokens",
            "6",
            "--devices",
            "cpu",
        ]);
        text(&output.stdout).trim_end_matches('\n').to_owned()
    };
    // Random weights write odd things; a blank answer would be refused.
    let asked = (0..40).map(|number| format!("Where is ship {number}?"));
    let asked = asked.map(|prompt| (ask(&prompt), prompt));
    let told: Vec<(String, String)> = asked
        .filter(|(answer, _)| !answer.trim().is_empty())
        .take(3)
        .collect();
    assert_eq!(told.len(), 3);
    let mut rows = String::new();
    for (answer, prompt) in &told {
        rows += &format!(
            "{}\n",
            json!({ "prompt": prompt, "answer": ["no", answer] })
        );
    }
    rows += &format!(
        "{}\n",
        json!({ "prompt": told[0].1, "answer": "something else" })
    );
    let data = run.write("answers.jsonl", rows);
    let found = results(&program(&[
        "eval",
        &model,
        &data,
        "--json",
        "--raw",
        "--max-tokens",
        "6",
        "--batch",
        "3",
        "--devices",
        "cpu",
    ]));
    let result = &found["results"][0];
    assert_eq!(result["kind"], "answers");
    assert_eq!(result["rows"], 4);
    assert!(near(&result["accuracy"]["value"], 0.75), "{result}");
    assert!(near(&result["accuracy"]["error"], 0.25), "{result}");
}

#[test]
fn what_is_wrong_is_one_line() {
    let run = Run::new("eval-wrong");
    let model = run.model();
    let tasks = run.write(
        "tasks.jsonl",
        "{\"question\": \"q\", \"choices\": [\"x\", \"y\"], \"answer\": 1}\n\n{\"question\": \"q\", \"choices\": [\"x\"]}\n",
    );
    let rows = run.write("rows.jsonl", "{\"text\": \"fine\"}\n{\"text\": 3}\n");
    let missing = run.path("missing.jsonl");
    let cases: [(&[&str], i32, &str); 5] = [
        (&[&model, &tasks], 1, "tasks.jsonl:3: has 1 choices"),
        (&[&model, &rows], 1, "rows.jsonl"),
        (&[&model, &missing], 1, "missing.jsonl"),
        (&[&model, &rows, "--seq", "100000"], 2, "longest sequence"),
        (&[&model, &rows, "--limit", "0"], 2, "--limit"),
    ];
    for (arguments, code, words) in cases {
        let arguments: Vec<&str> = ["eval", "--devices", "cpu"]
            .into_iter()
            .chain(arguments.iter().copied())
            .collect();
        let output = program(&arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
}
