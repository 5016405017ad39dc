//! What a model takes: names, Hugging Face's conventions, padding, and outputs together.

mod golden;
#[path = "../../roundpipe-tensor/tests/support/skip.rs"]
mod skip;

use golden::{Golden, assert_close, assert_same_direction, cpus, worker};
use roundpipe::{
    Bytes, Cpu, Cx, DType, HostTensor, Inputs, Lag, LossReduction, RingOptions, RoundPipe,
    RunConfig, Tensor, Tree, Worker,
};
use roundpipe_models::{Model, ModelConfig};
use roundpipe_tensor::{Cuda, DeviceKind, meta};

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

/// The output of a plain forward over named inputs, or why there is none.
fn run(cx: &mut Cx, model: &Model, inputs: Vec<(&str, Tree)>) -> Result<Tree, String> {
    let output = model.layers.forward(cx, Tree::map(inputs));
    output.map_err(|error| error.to_string())
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
    let line = refused.err().unwrap().to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
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
        line.contains("no input `ids` or `input_ids`") && line.contains("only `labels`"),
        "{line}"
    );
    let line = run(&mut cx, &model, vec![]).unwrap_err();
    assert!(line.contains("no input `ids`"), "{line}");
    let line = model.layers.forward(&mut cx, labels).unwrap_err();
    assert!(line.to_string().contains("by name"), "{line}");
}

/// Labels as Hugging Face has them, from those that stand where they are predicted.
fn unshifted(labels: &HostTensor) -> HostTensor {
    let steps = labels.shape().dims()[1];
    let values = labels.to_vec::<i64>().unwrap();
    let rows = values.chunks(steps).flat_map(|row| {
        assert_eq!(row[steps - 1], -100);
        // The first label is never predicted, so any value will do.
        [&[5], &row[..steps - 1]].concat()
    });
    HostTensor::from_slice(&rows.collect::<Vec<_>>(), labels.shape().dims()).unwrap()
}

/// `input_ids` with labels that the model shifts are `ids` with shifted labels, bit for bit, in a
/// plain loss and under an engine.
#[test]
fn hugging_face_labels_are_shifted_by_the_model() {
    let file = llama();
    let model = file.model(DType::F32);
    let (ids, labels) = (file.ids("ids"), file.ids("labels"));
    let theirs = unshifted(&labels);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let mut loss = |names: [&'static str; 2], labels: &HostTensor| {
        let inputs = [&ids, labels].map(|host| Tree::Tensor(device(&mut cx, host)));
        let inputs = names.into_iter().zip(inputs).collect();
        let loss = run(&mut cx, &model, inputs).unwrap().tensor().unwrap();
        loss.item().unwrap().to_bits()
    };
    let ours = loss(["ids", "labels"], &labels);
    assert_eq!(loss(["input_ids", "labels"], &theirs), ours);
    assert_ne!(loss(["ids", "labels"], &theirs), ours, "labels matter");

    let train = |name: &str, labels: &HostTensor| {
        let inputs = Inputs::new()
            .named(name, ids.clone())
            .named("labels", labels.clone());
        let losses = engine(&model).train(inputs).run().unwrap().losses;
        losses.total().to_bits()
    };
    assert_eq!(train("input_ids", &theirs), train("ids", &labels));
}

/// `position_ids`, a row for each sequence or one for all, are `positions`.
#[test]
fn position_ids_are_positions() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = device(&mut cx, &file.ids("ids"));
    let row: Vec<i64> = (0..24).map(|i| i * 2).collect();
    let one = cx.tensor(&row, &[1, 24]).unwrap();
    let each = cx.tensor(&[row.clone(), row].concat(), &[2, 24]).unwrap();
    let mut logits = |names: [&'static str; 2], positions: &Tensor| {
        let inputs = names.into_iter().zip([&ids, positions]);
        let inputs = inputs.map(|(name, value)| (name, value.clone().into()));
        let logits = run(&mut cx, &model, inputs.collect()).unwrap();
        logits.tensor().unwrap().to_vec::<f32>().unwrap()
    };
    let ours = logits(["ids", "positions"], &each);
    assert_eq!(logits(["input_ids", "position_ids"], &each), ours);
    assert_eq!(logits(["input_ids", "position_ids"], &one), ours);
    let plain = model.logits(&mut cx, &ids).unwrap();
    assert_ne!(plain.to_vec::<f32>().unwrap(), ours, "positions matter");
}

/// Names of both conventions in one call, and labels of another length, are refused in one line.
#[test]
fn conventions_are_not_mixed() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = device(&mut cx, &file.ids("ids"));
    let short = cx.narrow(&ids, 1, 1, 23).unwrap();
    for (inputs, words) in [
        (
            vec![("ids", &ids), ("input_ids", &ids)],
            ["`ids` and `input_ids`", "`labels` mean"],
        ),
        (
            vec![("ids", &ids), ("position_ids", &ids)],
            ["`ids` and `position_ids`", "`labels` mean"],
        ),
        (
            vec![("input_ids", &ids), ("positions", &ids)],
            ["`positions` and `input_ids`", "`labels` mean"],
        ),
        (
            vec![("input_ids", &ids), ("labels", &short)],
            ["[2, 23]", "as long as the ids"],
        ),
    ] {
        let inputs = inputs
            .into_iter()
            .map(|(name, value)| (name, value.clone().into()));
        let line = run(&mut cx, &model, inputs.collect()).unwrap_err();
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
    }
}

/// Values of the real tokens, [real, V], of logits [B, S, V].
fn of_real(mask: &[f64], logits: &[f64]) -> Vec<f64> {
    let vocab = logits.len() / mask.len();
    let rows = logits.chunks(vocab).zip(mask);
    let real = rows.filter(|(_, mask)| **mask == 1.0);
    real.flat_map(|(row, _)| row.to_vec()).collect()
}

/// The padded batches of `fixtures/padding.safetensors`, each of a model and a mask.
const PADDED: [(&str, &str); 10] = [
    ("llama3", "left"),
    ("llama3", "right"),
    ("llama3", "holes"),
    ("mistral", "left"),
    ("mistral", "right"),
    ("qwen3_moe", "left"),
    ("qwen3_moe", "right"),
    ("qwen3_moe", "holes"),
    ("gpt_oss", "left"),
    ("gpt_oss", "right"),
];

/// Logits of real tokens, the loss with the balance of experts, and the gradient of the embedding
/// are those of transformers for left and right padding, windows and sinks included.
#[test]
fn padded_batches_are_those_of_transformers() {
    padded_batches_are_equal_on(&worker());
}

/// The same on a GPU, where there is one.
#[test]
fn padded_batches_are_those_of_transformers_on_a_gpu() {
    let test = "padded_batches_are_those_of_transformers_on_a_gpu";
    match Cuda::workers(0, 1) {
        Ok(gpus) => {
            let worker = Worker::new(gpus[0].clone(), Bytes::gib(1)).unwrap();
            padded_batches_are_equal_on(&worker);
        }
        Err(error) => skip::skipped(test, &error.to_string()),
    }
}

fn padded_batches_are_equal_on(worker: &Worker) {
    let padded = Golden::beside("padding");
    for (name, kind) in PADDED {
        let model = Golden::open(name).model(DType::F32);
        let at = |value: &str| format!("{name}/{kind}.{value}");
        let mut cx = Cx::infer(worker);
        let ids = device(&mut cx, &padded.ids(&format!("{name}/ids")));
        let mask = device(&mut cx, &padded.ids(&at("mask")));
        let inputs = vec![
            ("input_ids", ids.clone().into()),
            ("attention_mask", mask.clone().into()),
        ];
        let logits = run(&mut cx, &model, inputs.clone()).unwrap();
        let logits = logits.tensor().unwrap();
        assert_eq!(logits.dims(), [3, 16, 97]);
        let real = padded.floats(&at("mask"));
        assert_close(
            &at("logits"),
            &of_real(&real, &logits.to_f64_vec().unwrap()),
            &of_real(&real, &padded.floats(&at("logits"))),
        );

        let mut cx = Cx::train(worker);
        let labels = device(&mut cx, &padded.ids(&at("labels")));
        let inputs = [inputs, vec![("labels", labels.into())]].concat();
        let loss = run(&mut cx, &model, inputs).unwrap().tensor().unwrap();
        let value = loss.item().unwrap();
        assert_close(&at("loss"), &[value], &padded.floats(&at("loss")));
        let grads = cx.backward(&loss).unwrap();
        let embed = &model.entries()[0].param;
        let grad = grads.param(embed).unwrap().to_f64_vec().unwrap();
        assert_same_direction(&at("g"), &grad, &padded.floats(&at("g")));
    }
}

/// A mask of any type pads alike; one of ones only changes nothing but rounding; `keep` counts
/// columns of the batch.
#[test]
fn masks_of_every_type_mean_the_same() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = device(&mut cx, &file.ids("ids"));
    let plain = model.logits(&mut cx, &ids).unwrap().to_f64_vec().unwrap();
    let left: Vec<i64> = (0..48).map(|i| i64::from(i % 24 >= 5 || i < 24)).collect();
    let left = cx.tensor(&left, &[2, 24]).unwrap();
    let mut logits = |mask: &Tensor, keep: Option<i64>| {
        let mut inputs = vec![
            ("input_ids", ids.clone().into()),
            ("attention_mask", mask.clone().into()),
        ];
        inputs.extend(keep.map(|keep| ("keep", Tree::Int(keep))));
        let logits = run(&mut cx, &model, inputs).unwrap();
        logits.tensor().unwrap().to_f64_vec().unwrap()
    };
    let wanted = logits(&left, None);
    assert_ne!(wanted, plain, "the mask matters");
    let last = wanted.chunks(24 * 97).flat_map(|row| &row[21 * 97..]);
    let last: Vec<f64> = last.copied().collect();
    assert_close("keep", &logits(&left, Some(3)), &last);
    let typed: Vec<Tensor> = DType::ALL
        .iter()
        .map(|dtype| Cx::infer(&worker).cast(&left, *dtype).unwrap())
        .collect();
    for mask in &typed {
        assert_eq!(logits(mask, None), wanted, "{}", mask.dtype());
    }
    let ones = Cx::infer(&worker).ones(DType::I64, &[2, 24]).unwrap();
    assert_close("ones", &logits(&ones, None), &plain);
}

/// A padded row gives the logits of its real tokens alone, in a batch, under an engine that cuts
/// it, and whatever stands in the padding.
#[test]
fn padding_is_invisible_under_an_engine() {
    let file = Golden::open("gpt_oss");
    let model = file.model(DType::F32);
    let ids = file.ids("ids").to_vec::<i64>().unwrap();
    let mask: Vec<i64> = (0..48)
        .map(|i| i64::from((7..24).contains(&i) || (24..40).contains(&i)))
        .collect();
    let engine = engine(&model);
    let logits = |padding: i64| {
        let ids = ids.iter().zip(&mask);
        let ids: Vec<i64> = ids
            .map(|(id, mask)| if *mask == 1 { *id } else { padding })
            .collect();
        let inputs = Inputs::new()
            .named("input_ids", HostTensor::from_slice(&ids, &[2, 24]).unwrap())
            .named(
                "attention_mask",
                HostTensor::from_slice(&mask, &[2, 24]).unwrap(),
            );
        let config = RunConfig::new().requires_grad(false);
        let output = engine.forward(inputs, &config).unwrap();
        output
            .output()
            .unwrap()
            .clone()
            .tensor()
            .unwrap()
            .to_f64_vec()
            .unwrap()
    };
    let padded = logits(0);
    let mask: Vec<f64> = mask.iter().map(|real| *real as f64).collect();
    assert_eq!(of_real(&mask, &padded), of_real(&mask, &logits(96)));
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    for (row, range) in [(0, 7..24), (1, 0..16)] {
        let alone = &ids[row * 24..][range.clone()];
        let alone = cx.tensor(alone, &[1, range.len()]).unwrap();
        let alone = model.logits(&mut cx, &alone).unwrap().to_f64_vec().unwrap();
        let have = &padded[row * 24 * 97..][range.start * 97..range.end * 97];
        assert_close(&format!("row {row}"), have, &alone);
    }
}

/// A padded batch trains under an engine that cuts it into microbatches of unequal padding: loss
/// and gradient are transformers'.
#[test]
fn padded_batches_train_under_an_engine() {
    let padded = Golden::beside("padding");
    for kind in ["left", "right", "holes"] {
        let model = llama().model(DType::F32);
        let at = |value: &str| format!("llama3/{kind}.{value}");
        let labels = padded.ids(&at("labels"));
        // The first column is never predicted.
        let rows = labels.to_vec::<i64>().unwrap();
        let shifted = rows.chunks(16).flat_map(|row| &row[1..]);
        let count = shifted.filter(|label| **label != -100).count();
        let inputs = Inputs::new()
            .named("input_ids", padded.ids("llama3/ids"))
            .named("attention_mask", padded.ids(&at("mask")))
            .named("labels", labels)
            .named("weight", HostTensor::scalar(count as f32).unwrap());
        let engine = engine(&model);
        let loss = engine.train(inputs).run().unwrap().losses.total();
        assert_close(&at("loss"), &[loss], &padded.floats(&at("loss")));
        engine.synchronize().unwrap();
        let grads = engine.gradients().unwrap();
        let (name, grad) = &grads[0];
        assert_eq!(name, "model.embed_tokens.weight");
        let grad = grad.as_ref().unwrap().to_f64_vec().unwrap();
        assert_same_direction(&at("g"), &grad, &padded.floats(&at("g")));
    }
}

/// A mask that is no [batch, sequence] of the ids, or stands beside kept keys, is refused.
#[test]
fn masks_that_cannot_work_are_refused() {
    let file = llama();
    let model = file.model(DType::F32);
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let ids = device(&mut cx, &file.ids("ids"));
    let wide = cx.unsqueeze(&ids, 1).unwrap();
    let cache = || ("cache", Tree::Bool(true));
    for (inputs, word) in [
        (vec![("attention_mask", wide.into())], "one value per token"),
        (
            vec![("attention_mask", ids.clone().into()), cache()],
            "`cache`",
        ),
    ] {
        let inputs = [inputs, vec![("input_ids", ids.clone().into())]].concat();
        let line = run(&mut cx, &model, inputs).unwrap_err();
        assert!(line.contains(word), "{line}");
    }
    let inputs = vec![("ids", ids.clone().into()), ("attention_mask", ids.into())];
    let line = run(&mut cx, &model, inputs).unwrap_err();
    assert!(line.contains("cannot be mixed"), "{line}");
}

/// Loss, logits and the balance of experts together: the loss has the bits it has alone, the others
/// are transformers'.
#[test]
fn loss_logits_and_balance_come_together() {
    let padded = Golden::beside("padding");
    for (name, balanced) in [("llama3", false), ("qwen3_moe", true), ("gpt_oss", true)] {
        let model = Golden::open(name).model(DType::F32);
        let at = |value: &str| format!("{name}/left.{value}");
        let worker = worker();
        for training in [true, false] {
            let mut cx = Cx::new(&worker, training, training);
            let inputs = [
                ("input_ids", format!("{name}/ids")),
                ("attention_mask", at("mask")),
                ("labels", at("labels")),
            ];
            let inputs = inputs.map(|(name, at)| (name, device(&mut cx, &padded.ids(&at)).into()));
            let mut inputs = Vec::from(inputs);
            let loss = run(&mut cx, &model, inputs.clone()).unwrap();
            let loss = loss.tensor().unwrap().item().unwrap();
            inputs.push(("return_logits", Tree::Bool(true)));
            let mut all = run(&mut cx, &model, inputs).unwrap();
            let mut value = |name: &str| all.take(name)?.tensor()?.to_f64_vec();
            assert_eq!(value("loss").unwrap(), [loss], "{name}");
            let mask = padded.floats(&at("mask"));
            assert_close(
                &at("logits"),
                &of_real(&mask, &value("logits").unwrap()),
                &of_real(&mask, &padded.floats(&at("logits"))),
            );
            let aux = value("aux_loss");
            assert_eq!(aux.is_ok(), balanced, "{name}");
            if let Ok(aux) = aux {
                assert_close(&at("aux_loss"), &aux, &padded.floats(&at("aux_loss")));
            }
        }
    }
}

/// A training call returns them too, and trains with the same bits.
#[test]
fn a_training_call_returns_loss_and_logits() {
    let file = Golden::open("qwen3_moe");
    let train = |together: bool| {
        let model = file.model(DType::F32);
        let engine = engine(&model);
        let inputs = Inputs::new()
            .named("input_ids", file.ids("ids"))
            .named("labels", file.ids("labels"));
        let trained = match together {
            false => engine.train(inputs).run(),
            true => engine
                .train(inputs.named("return_logits", Tree::Bool(true)))
                .loss(|_, mut outputs, _| outputs.take("loss")?.tensor())
                .return_outputs()
                .run(),
        };
        let trained = trained.unwrap();
        engine.synchronize().unwrap();
        let grads = engine.gradients().unwrap().into_iter();
        let grads: Vec<Vec<f64>> = grads
            .map(|(_, grad)| grad.unwrap().to_f64_vec().unwrap())
            .collect();
        (trained.losses.total().to_bits(), grads, trained.outputs)
    };
    let (loss, grads, nothing) = train(false);
    assert!(nothing.is_none());
    let (same_loss, same_grads, outputs) = train(true);
    assert_eq!(same_loss, loss);
    assert!(same_grads == grads, "gradients differ");
    let mut outputs = outputs.unwrap();
    let logits = outputs.take("logits").unwrap().tensor().unwrap();
    assert_eq!(logits.shape().dims(), [2, 24, 97]);
    assert_close(
        "logits",
        &logits.to_f64_vec().unwrap(),
        &file.floats("logits"),
    );
    outputs.take("aux_loss").unwrap().tensor().unwrap();
}

/// A model whose output is the loss computes its head's gradients with it; a loss function that
/// gives the same loss cannot know that, and trains with the same bits.
#[test]
fn a_loss_of_the_model_and_of_a_function_train_alike() {
    for name in ["llama3", "llama2_tied", "qwen3_moe"] {
        for (dtype, mean) in [(DType::F32, true), (DType::BF16, false)] {
            let file = Golden::open(name);
            let train = |is_own: bool, workers: usize| {
                let model = file.model(dtype);
                let reduction = if mean {
                    LossReduction::Mean
                } else {
                    LossReduction::Sum
                };
                let engine = RoundPipe::builder(model.layers.clone())
                    .max_lag(Lag::Zero)
                    .run_config(
                        RunConfig::default()
                            .num_microbatch(2)
                            .loss_reduction(reduction),
                    )
                    .devices(vec![Cpu::new(Some(1)).unwrap() as _; workers])
                    .memory(Bytes::mib(64))
                    .build()
                    .unwrap();
                let mut losses = Vec::new();
                // The second call adds to the gradients of the first.
                for _ in 0..2 {
                    let mut inputs = Inputs::new()
                        .named("input_ids", file.ids("ids"))
                        .named("labels", file.ids("labels"));
                    if !mean {
                        inputs =
                            inputs.named("weight", HostTensor::from_slice(&[7.0f32], &[]).unwrap());
                    }
                    let call = engine.train(inputs);
                    let call = match is_own {
                        true => call,
                        false => call.loss(|_, outputs, _| outputs.tensor()),
                    };
                    losses.push(call.run().unwrap().losses.total().to_bits());
                }
                engine.synchronize().unwrap();
                let grads = engine.gradients().unwrap().into_iter();
                let grads: Vec<Vec<f64>> = grads
                    .map(|(_, grad)| grad.unwrap().to_f64_vec().unwrap())
                    .collect();
                (losses, grads)
            };
            let own = train(true, 1);
            assert!(own == train(false, 1), "{name} {dtype}: a function");
            assert!(own == train(true, 3), "{name} {dtype}: three workers");
        }
    }
}

/// Those who want only the loss have no memory of the size of logits.
#[test]
fn a_loss_alone_needs_no_logits() {
    let mut json = llama().config().to_json();
    json["vocab_size"] = 16_384.into();
    let model = Model::empty(ModelConfig::from_json(&json, "wide").unwrap(), DType::F32).unwrap();
    let peak = |together: bool| {
        let step = |worker: &Worker| {
            let mut cx = Cx::train(worker);
            let ids: Tree = cx.zeros(DType::I64, &[32, 64])?.into();
            let inputs = vec![
                ("ids", ids.clone()),
                ("labels", ids),
                ("return_logits", Tree::Bool(together)),
            ];
            run(&mut cx, &model, inputs).map(drop).unwrap();
            Ok(())
        };
        meta::measure(DeviceKind::Cpu, step).unwrap().1.peak
    };
    let (loss, both) = (peak(false), peak(true));
    let logits = 32 * 64 * 16_384 * 4;
    assert!(both >= loss + logits / 2, "{loss} and {both}");
    assert!(loss < logits, "{loss}");
}
