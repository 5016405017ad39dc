//! Two real models beside transformers. They are fetched, not committed, so these tests are run by
//! themselves:
//!
//! `python3 fixtures/make_real.py DIR`, then `ROUNDPIPE_REAL_MODELS=DIR cargo test --release -p
//! roundpipe-models --test real_models -- --ignored`

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use roundpipe::{Bytes, Cpu, Cx, DType, Device, RingOptions, Worker};
use roundpipe_models::chat::{Message, RenderOptions};
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{Finish, GenerateOptions, Generator, Model};
use serde_json::Value;

fn dir() -> PathBuf {
    PathBuf::from(
        std::env::var("ROUNDPIPE_REAL_MODELS").expect("ROUNDPIPE_REAL_MODELS names the folder"),
    )
}

fn expected() -> Value {
    let text = std::fs::read_to_string(dir().join("expected.json"))
        .expect("fixtures/make_real.py was run");
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn generator(model: &Model) -> Generator {
    let devices: Vec<Arc<dyn Device>> = vec![Cpu::new(None).unwrap()];
    let options = RingOptions {
        memory: Some(Bytes::gib(2)),
        ..RingOptions::default()
    };
    Generator::new(model, &devices, &options).unwrap()
}

/// The likeliest continuation, with the stop token where one came.
fn continued(
    generator: &Generator,
    prompt: &[u32],
    tokenizer: &Tokenizer,
    max_tokens: usize,
) -> Vec<u32> {
    let stop = tokenizer.eos().to_vec();
    let options = GenerateOptions {
        max_tokens,
        stop: stop.clone(),
        ..GenerateOptions::default()
    };
    let (mut told, finish) = generator
        .generate(prompt, &options, |_| ControlFlow::Continue(()))
        .unwrap();
    if finish == Finish::Stop {
        told.extend(stop.first());
    }
    told
}

/// The loss of a sentence as transformers computes it, and the same continuation token for token.
#[test]
#[ignore = "needs a model that is not committed"]
fn stories15m_is_as_sure_as_in_transformers_and_tells_the_same_story() {
    let (folder, expected) = (dir().join("stories15m"), &expected()["story"]);
    let (model, tokenizer) = (
        Model::load(&folder, None).unwrap(),
        Tokenizer::open(&folder).unwrap(),
    );
    assert_eq!(model.dtype(), DType::F32);
    let text = tokenizer
        .encode(expected["text"].as_str().unwrap(), true)
        .unwrap();
    assert_eq!(text, ids(&expected["ids"]));
    let worker = Worker::new(Cpu::new(None).unwrap(), Bytes::gib(2)).unwrap();
    let mut cx = Cx::infer(&worker);
    let tokens: Vec<i64> = text.iter().map(|id| i64::from(*id)).collect();
    let steps = tokens.len() - 1;
    let (input, label) = (
        cx.tensor(&tokens[..steps], &[1, steps]).unwrap(),
        cx.tensor(&tokens[1..], &[1, steps]).unwrap(),
    );
    let loss = f64::from(
        model
            .loss(&mut cx, &input, &label)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()[0],
    );
    let wanted = expected["loss"].as_f64().unwrap();
    assert!((loss / wanted - 1.0).abs() < 1e-4, "{loss} beside {wanted}");
    let prompt = &text[..expected["prompt"].as_u64().unwrap() as usize];
    let told = continued(&generator(&model), prompt, &tokenizer, 60);
    assert_eq!(
        told,
        ids(&expected["continued"]),
        "{}",
        tokenizer.decode(&told, true).unwrap()
    );
}

/// Answers through the chat template, token for token as transformers gives them.
#[test]
#[ignore = "needs a model that is not committed"]
fn smollm2_answers_as_in_transformers() {
    let (folder, expected) = (dir().join("smollm2-135m-instruct"), expected());
    let model = Model::load(&folder, Some(DType::F32)).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let template = tokenizer
        .chat_template(false)
        .unwrap()
        .expect("it has a template");
    let generator = generator(&model);
    let mut prompts = Vec::new();
    let mut answers = Vec::new();
    for chat in expected["chat"].as_array().unwrap() {
        let question = chat["question"].as_str().unwrap();
        let options = RenderOptions {
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        let text = template
            .render(&[Message::new("user", question)], &options)
            .unwrap();
        let prompt = tokenizer.encode(&text, false).unwrap();
        assert_eq!(prompt, ids(&chat["ids"]), "{question}");
        let answer = continued(&generator, &prompt, &tokenizer, 48);
        let said = tokenizer.decode(&answer, true).unwrap();
        assert_eq!(answer, ids(&chat["answer"]), "{question} {said}");
        assert!(
            !question.contains("France") || said.contains("Paris"),
            "{said}"
        );
        prompts.push(prompt);
        answers.push(answer);
    }
    // All at once, of unequal lengths: the same answers.
    let options = GenerateOptions {
        max_tokens: 48,
        stop: tokenizer.eos().to_vec(),
        ..GenerateOptions::default()
    };
    let go = |_, _| ControlFlow::Continue(());
    let together = generator.generate_batch(&prompts, &options, go).unwrap();
    for ((told, _), answer) in together.iter().zip(&answers) {
        assert_eq!(told[..], answer[..told.len()]);
    }
}

/// In the type the folder has, the answer is still Paris.
#[test]
#[ignore = "needs a model that is not committed"]
fn smollm2_answers_in_its_own_type() {
    let folder = dir().join("smollm2-135m-instruct");
    let (model, tokenizer) = (
        Model::load(&folder, None).unwrap(),
        Tokenizer::open(&folder).unwrap(),
    );
    assert_eq!(model.dtype(), DType::BF16);
    let chat = &expected()["chat"][0];
    let answer = continued(&generator(&model), &ids(&chat["ids"]), &tokenizer, 48);
    assert_eq!(answer, ids(&chat["answer"]));
}
