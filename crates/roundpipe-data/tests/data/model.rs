//! Batches under a model: packing changes nothing that is learned.

use roundpipe::{Bytes, Cx, DType, HostTensor, Tree, Worker};
use roundpipe_data::{Microbatch, StreamOptions, TrainBatch};
use roundpipe_models::{Model, preset};
use roundpipe_tensor::Cpu;
use serde_json::json;

use crate::kit::{Folder, open, stream, texts, tokenizer};

fn model() -> Model {
    let vocabulary = tokenizer().vocab_size();
    let small = json!({"vocab_size": vocabulary, "max_position_embeddings": 256});
    let config = preset("tiny").unwrap().with(&small).unwrap();
    Model::random(config, DType::F32, 5).unwrap()
}

/// The sum of losses over all labels of some rows.
fn loss(model: &Model, rows: &Microbatch) -> f64 {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::gib(1)).unwrap();
    let mut cx = Cx::infer(&worker);
    let mut move_in = |host: &HostTensor| -> Tree {
        let values = host.to_vec::<i64>().unwrap();
        cx.tensor(&values, host.dims()).unwrap().into()
    };
    let mut inputs = vec![
        ("ids", move_in(&rows.ids)),
        ("labels", move_in(&rows.labels)),
        ("positions", move_in(&rows.positions)),
    ];
    if let Some(lens) = &rows.lens {
        let values = lens.to_vec::<i32>().unwrap();
        let lens = cx.tensor(&values, lens.dims()).unwrap();
        inputs.push(("lens", lens.into()));
    }
    let one = cx.tensor(&[1.0f32], &[]).unwrap();
    inputs.push(("weight", one.into()));
    let loss = model.layers.forward(&mut cx, Tree::map(inputs)).unwrap();
    loss.tensor().unwrap().item().unwrap()
}

fn batches(folder: &Folder, packing: bool) -> Vec<TrainBatch> {
    let rows = open(folder.write("x.jsonl", texts(40))).rows();
    let options = StreamOptions {
        packing,
        epochs: Some(1),
        ..StreamOptions::new(96, 3)
    };
    stream(rows, options).map(Result::unwrap).collect()
}

/// The loss of all documents is the same one by one and packed, with padding and empty sequences:
/// documents do not see each other.
#[test]
fn packed_documents_do_not_see_each_other() {
    let folder = Folder::new();
    let model = model();
    let total = |batches: &[TrainBatch]| -> (u64, f64) {
        let tokens = batches.iter().map(|batch| batch.tokens_trained).sum();
        let losses = batches
            .iter()
            .map(|batch| loss(&model, &batch.microbatch(0..batch.rows).unwrap()));
        (tokens, losses.sum())
    };
    let packed = batches(&folder, true);
    assert!(packed.iter().any(|batch| batch.documents > 2 * batch.rows));
    let (tokens, together) = total(&packed);
    let (same_tokens, apart) = total(&batches(&folder, false));
    assert_eq!(tokens, same_tokens);
    assert!(
        (together - apart).abs() < 1e-5 * apart,
        "{together} {apart}"
    );

    // The test would notice: without lengths they do see each other.
    let mut blind = packed;
    blind.iter_mut().for_each(|batch| batch.lens.clear());
    let (_, seeing) = total(&blind);
    assert!((seeing - apart).abs() > 1e-4 * apart, "{seeing} {apart}");
}
