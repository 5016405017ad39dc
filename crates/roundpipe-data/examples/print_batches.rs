//! Prints the batches that a training run takes, one JSON object a line: `ids`, `labels`,
//! `positions` (lists of rows) and `lens` (empty where rows are not packed).
//!
//! `cargo run --release -p roundpipe-data --example print_batches MODEL DATA SEQ BATCH PACKING SEED COUNT`:
//! rows of SEQ tokens of the file DATA, with the tokenizer of the folder MODEL, BATCH of them in a
//! batch; PACKING is `true` or `false`, SEED a number or `off` for the order of the file.
//! `checks/curve.py` calls it.

use std::error::Error;
use std::io::Write;
use std::path::Path;

use roundpipe::HostTensor;
use roundpipe_data::{
    EncodeOptions, Encoder, Input, Source, SourceOptions, Stream, StreamOptions, TrainBatch,
};
use roundpipe_models::tokenizer::Tokenizer;

const USAGE: &str = "give MODEL DATA SEQ BATCH PACKING SEED COUNT";

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, data, seq, batch, packing, seed, count] = args.as_slice() else {
        return Err(USAGE.into());
    };
    let shuffle = match seed.as_str() {
        "off" => None,
        seed => Some(seed.parse()?),
    };
    let options = StreamOptions {
        packing: packing.parse()?,
        shuffle,
        ..StreamOptions::new(seq.parse()?, batch.parse()?)
    };
    let source = Source::open(&[Input::parse(data)?], &SourceOptions::default())?;
    let tokenizer = Tokenizer::open(Path::new(model))?;
    let encoder = Encoder::new(tokenizer, EncodeOptions::default())?;
    let stream = Stream::new(source.rows(), encoder.into(), options)?;
    let mut out = std::io::stdout().lock();
    for batch in stream.take(count.parse()?) {
        writeln!(out, "{}", line(&batch?)?)?;
    }
    Ok(())
}

fn line(batch: &TrainBatch) -> Result<serde_json::Value, Box<dyn Error>> {
    Ok(serde_json::json!({
        "ids": rows(&batch.ids)?,
        "labels": rows(&batch.labels)?,
        "positions": rows(&batch.positions)?,
        "lens": batch.lens,
    }))
}

fn rows(tensor: &HostTensor) -> Result<Vec<Vec<i64>>, Box<dyn Error>> {
    let values = tensor.to_vec::<i64>()?;
    let width = tensor.dims()[1];
    Ok(values.chunks(width).map(<[i64]>::to_vec).collect())
}
