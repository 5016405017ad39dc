//! Makes a large file of conversations and prints what streaming it takes: the time to the first
//! batch, the rate of tokens, and the peak of memory.
//!
//! `cargo run --release -p roundpipe-data --example stream_peak [MIB|FILE] [FOLDER] [THREADS]`: so many
//! MiB (1024) or a file that is there, with the tokenizer of a model's folder (a small one of the
//! fixtures), in so many threads (2). What is made is in the system's folder for temporary files and
//! removed in the end.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use roundpipe_data::{
    EncodeOptions, Encoder, Input, Source, SourceOptions, Stream, StreamOptions, Validation,
};
use roundpipe_models::chat::ChatTemplate;
use roundpipe_models::tokenizer::Tokenizer;

const SEQ: usize = 2048;
const BATCH_ROWS: usize = 8;
const BATCHES: usize = 100;
const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let data = args.next().unwrap_or("1024".into());
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat/tokenizers");
    let folder = args
        .next()
        .map_or(fixture.join("byte_level"), PathBuf::from);
    let threads = args.next().map_or(Ok(2), |threads| threads.parse())?;
    let Ok(mib) = data.parse::<u64>() else {
        return measure(Path::new(&data), &folder, threads);
    };
    let name = format!("roundpipe-stream-peak-{}.jsonl", std::process::id());
    let path = std::env::temp_dir().join(name);
    let result = make(&path, mib << 20).and_then(|()| measure(&path, &folder, threads));
    std::fs::remove_file(&path)?;
    result
}

/// Conversations of some hundred to some thousand words.
fn make(path: &Path, bytes: u64) -> Result<(), Box<dyn Error>> {
    let words = "the ships pass a quiet harbour while gulls count every lantern on the wall and \
                 the keeper writes a letter home about weather fish and an old friend";
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut file = BufWriter::new(std::fs::File::create(path)?);
    let mut written = 0;
    let mut state = 1u64;
    while written < bytes {
        let mut text = |count: u64| {
            let mut text = String::new();
            for _ in 0..count {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                text += words[(state >> 33) as usize % words.len()];
                text.push(' ');
            }
            text
        };
        let (ask, answer) = (text(20 + written % 90), text(40 + written % 700));
        let line = format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{ask}\"}}, {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        );
        file.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    Ok(file.flush()?)
}

fn measure(path: &Path, folder: &Path, threads: usize) -> Result<(), Box<dyn Error>> {
    let before = peak_mib();
    let start = Instant::now();
    let tokenizer = Tokenizer::open(folder)?;
    let template = ChatTemplate::parse(CHATML, tokenizer.special_tokens())?;
    let encoder = Encoder::new(tokenizer, EncodeOptions::default())?.template(template);
    let options = SourceOptions {
        validation: Validation::Fraction(0.01),
        ..SourceOptions::default()
    };
    let source = Source::open(&[Input::from(path)], &options)?;
    println!("{}", source.report()[0]);
    let opened = start.elapsed();
    let options = StreamOptions {
        threads,
        ..StreamOptions::new(SEQ, BATCH_ROWS)
    };
    let mut stream = Stream::new(source.rows(), Arc::new(encoder), options)?;
    stream.next().ok_or("no batch")??;
    let first = start.elapsed();
    for _ in 1..BATCHES {
        stream.next().ok_or("too few batches")??;
    }
    let rest = (start.elapsed() - first).as_secs_f64();
    let counts = stream.counts();
    let rate = counts.tokens as f64 * (BATCHES - 1) as f64 / BATCHES as f64 / rest;
    let padding = 100.0 * counts.padding as f64 / (counts.padding + counts.tokens) as f64;
    println!("opened and split in {:.2} s", opened.as_secs_f64());
    println!("first batch after {:.2} s", first.as_secs_f64());
    println!("{rate:.0} tokens/s in {threads} threads, {padding:.2}% padding");
    match (before, peak_mib()) {
        (Some(before), Some(peak)) => println!("peak {peak} MiB ({before} MiB before)"),
        _ => println!("peak unknown: this system has no /proc/self/status"),
    }
    Ok(())
}

/// The most memory that the process has had, as Linux counts it.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}
