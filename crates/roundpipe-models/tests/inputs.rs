//! What a model takes: names, Hugging Face's conventions, padding, and outputs together.

mod golden;

use std::error::Error;

use golden::{Golden, cpus, worker};
use roundpipe::{
    Bytes, Cx, DType, HostTensor, Inputs, Lag, RingOptions, RoundPipe, RunConfig, Tensor, Tree,
};
use roundpipe_models::Model;

fn engine(model: &Model) -> RoundPipe {
    RoundPipe::builder(model.layers.clone())
        .max_lag(Lag::Zero)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(cpus())
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(64)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

fn llama() -> Golden {
    Golden::open("llama3")
}

/// An error with its causes, as a program prints it.
fn in_full(error: &dyn Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", in_full(cause)),
        None => error.to_string(),
    }
}

/// The output of a plain forward over named inputs, or why there is none.
fn run(cx: &mut Cx, model: &Model, inputs: Vec<(&str, Tree)>) -> Result<Tree, String> {
    let output = model.layers.forward(cx, Tree::map(inputs));
    output.map_err(|error| in_full(&error))
}

fn device(cx: &mut Cx, host: &HostTensor) -> Tensor {
    cx.tensor(&host.to_vec::<i64>().unwrap(), host.shape().dims())
        .unwrap()
}

/// An input that no layer reads is an error with the names there are, in a plain forward and under
/// an engine; `None` is no input.
#[test]
fn unknown_inputs_are_refused_by_name() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = device(&mut cx, &file.ids("ids"));
    let line = run(
        &mut cx,
        &model,
        vec![("ids", ids.clone().into()), ("label", ids.clone().into())],
    )
    .unwrap_err();
    for word in ["`label`", "`ids`", "`labels`", "`positions`", "`lens`"] {
        assert!(line.contains(word), "{word} is not in: {line}");
    }
    assert_eq!(line.lines().count(), 1, "{line}");
    run(
        &mut cx,
        &model,
        vec![("ids", ids.into()), ("labels", Tree::None)],
    )
    .unwrap();

    let inputs = Inputs::new()
        .named("ids", file.ids("ids"))
        .named("token_type_ids", file.ids("ids"));
    let refused = engine(&model).forward(inputs, &RunConfig::new());
    let line = in_full(&refused.err().unwrap());
    assert!(
        line.contains("`token_type_ids`") && line.contains("`labels`"),
        "{line}"
    );
}

/// Without ids, the line lists what was given instead.
#[test]
fn missing_ids_list_what_was_given() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let labels = device(&mut cx, &file.ids("labels"));
    let line = run(&mut cx, &model, vec![("labels", labels.clone().into())]).unwrap_err();
    assert!(
        line.contains("no input `ids`") && line.contains("only `labels`"),
        "{line}"
    );
    let line = run(&mut cx, &model, vec![]).unwrap_err();
    assert!(line.contains("no input `ids`"), "{line}");
    let line = model.layers.forward(&mut cx, labels).unwrap_err();
    assert!(in_full(&line).contains("by name"), "{line}");
}
