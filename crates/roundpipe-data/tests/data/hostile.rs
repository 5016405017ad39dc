//! Files that are broken, hostile or merely odd: one line, no panic, no endless work.

use std::io::Write;
use std::path::Path;

use roundpipe_data::{
    BadRows, Error, Input, Source, SourceOptions, Stream, StreamOptions, Validation,
};

use crate::kit::{CHATML, Folder, encoder, texts, word};

/// Opens a file and reads all of it, twice over.
fn run(path: &Path, bad_rows: BadRows) -> Result<u64, Error> {
    run_split(path, bad_rows, Validation::None)
}

fn run_split(path: &Path, bad_rows: BadRows, validation: Validation) -> Result<u64, Error> {
    let options = SourceOptions {
        validation,
        ..SourceOptions::default()
    };
    let source = Source::open(&[Input::from(path)], &options)?;
    let options = StreamOptions {
        epochs: Some(2),
        bad_rows,
        ..StreamOptions::new(64, 2)
    };
    let mut stream = Stream::new(source.rows(), encoder(CHATML), options)?;
    let mut tokens = 0;
    for batch in stream.by_ref() {
        tokens += batch?.tokens;
    }
    Ok(tokens)
}

fn chat(message: &str) -> String {
    format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {message}]}}")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::best();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Each is refused with one line that names the file, the row where there is one, and a fix.
#[test]
fn hostile_files_are_refused_in_one_line() {
    let text = "{\"text\": \"a\"}\n";
    let deep = format!("{{\"text\": {}}}", "[".repeat(100_000));
    let closed = format!("{{\"text\": {}{}}}", "[".repeat(5000), "]".repeat(5000));
    let many = format!("{{\"text\": [{}0]}}", "0,".repeat(1 << 19));
    let huge = format!("{{\"text\": \"{}\"}}", "x".repeat(5 << 20));
    let huger = format!("{{\"text\": \"{}\"}}", "x".repeat(17 << 20));
    let long = "x".repeat(2 << 20);
    let zeros = vec![0u8; 200 << 20];
    let bomb = gzip(&zeros);
    let mut damaged = gzip(texts(100).as_bytes());
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x55;
    let cut = gzip(texts(100).as_bytes())[..100].to_vec();
    let window = [&[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff], &[0u8; 40][..]].concat();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty.jsonl", vec![], "has no rows"),
        ("blank.jsonl", b"\n \n\t\n".to_vec(), "has no rows"),
        ("header.csv", b"text\n".to_vec(), "has no rows"),
        ("empty.json", b"[]".to_vec(), "has no rows"),
        ("empty.txt", b"".to_vec(), "has no rows"),
        (
            "cut.json",
            b"[{\"text\": \"a\"}".to_vec(),
            "row 1: the array does not end",
        ),
        (
            "comma.json",
            b"[{\"text\": \"a\"},]".to_vec(),
            "row 2: there is no row",
        ),
        (
            "tail.json",
            b"[{\"text\": \"a\"}] x".to_vec(),
            "something follows",
        ),
        (
            "object.json",
            b"{\n\"data\": []\n}".to_vec(),
            "row 1: is no JSON",
        ),
        (
            "keys.jsonl",
            b"{\"better\": 1, \"worse\": 2}".to_vec(),
            "row 1: has the keys `better`, `worse`",
        ),
        (
            "pair.jsonl",
            b"{\"chosen\": 1, \"rejected\": 2}".to_vec(),
            "row 1: its `chosen` is a number; write a text or a list of messages",
        ),
        (
            "number.jsonl",
            b"7\n".to_vec(),
            "row 1: is a number and not an object",
        ),
        (
            "broken.jsonl",
            format!("{text}{text}{{\"text\": \"a").into_bytes(),
            "row 3: is no JSON",
        ),
        (
            "nul.jsonl",
            format!("{text}{{\"text\": \"a\0b\"}}\n").into_bytes(),
            "row 2: is no JSON",
        ),
        ("nuls.jsonl", vec![0; 5000], "row 1: is no JSON"),
        (
            "utf8.jsonl",
            [text.as_bytes(), b"{\"text\": \"\xff\xfe\"}\n"].concat(),
            "row 2: is no JSON",
        ),
        (
            "surrogate.jsonl",
            format!("{text}{{\"text\": \"\\ud800\"}}\n").into_bytes(),
            "row 2: is no JSON",
        ),
        (
            "utf8.csv",
            b"text\nabc\n\xff\n".to_vec(),
            "row 2: is not UTF-8",
        ),
        ("utf8.txt", b"abc \xff\n".to_vec(), "row 1: is not UTF-8"),
        ("utf16.jsonl", b"\xff\xfe{\0".to_vec(), "is UTF-16"),
        (
            "deep.jsonl",
            format!("{text}{deep}\n").into_bytes(),
            "row 2: is no JSON",
        ),
        (
            "closed.jsonl",
            format!("{text}{closed}\n").into_bytes(),
            "row 2: is no JSON",
        ),
        (
            "many.jsonl",
            format!("{text}{many}\n").into_bytes(),
            "row 2: its JSON has more than",
        ),
        (
            "huge.jsonl",
            format!("{text}{huge}\n").into_bytes(),
            "row 2: has more than 4194304 bytes",
        ),
        (
            "huger.jsonl",
            format!("{text}{huger}\n").into_bytes(),
            "row 2: has more than 4194304 bytes",
        ),
        (
            "huger.json",
            format!("[{{\"text\":\"a\"}},{huger}]").into_bytes(),
            "row 2: has more than 4194304 bytes",
        ),
        (
            "fields.csv",
            b"text,id\na,1\nb\n".to_vec(),
            "row 2: has 1 fields, the header 2",
        ),
        (
            "quote.csv",
            b"text\nabc\n\"never closed\n".to_vec(),
            "a quote is opened",
        ),
        ("other.csv", b"a,b\n1,2\n".to_vec(), "row 1: has the keys"),
        (
            "mixed.jsonl",
            format!("{text}{}\n", chat("{}")).into_bytes(),
            "row 2: has no `text`",
        ),
        ("zip.jsonl", b"PK\x03\x04abc".to_vec(), "zip archive"),
        (
            "rows.parquet",
            b"PAR1abc".to_vec(),
            "is no parquet file that can be read",
        ),
        ("rows.bin", b"abc".to_vec(), "ends in `.bin`"),
        ("rows", b"abc".to_vec(), "says nothing about its rows"),
        ("bomb.jsonl.gz", bomb, "unpacks to more than"),
        ("damaged.jsonl.gz", damaged, "damaged.jsonl.gz: "),
        ("cut.jsonl.gz", cut, "is damaged or cut off"),
        ("window.jsonl.zst", window, "is damaged or cut off"),
        (
            "short.jsonl.zst",
            b"\x28\xb5\x2f\xfd".to_vec(),
            "is damaged or cut off",
        ),
        (
            "role.jsonl",
            chat("{\"content\": \"a\"}").into_bytes(),
            "row 1: message 2 has no `role`",
        ),
        (
            "content.jsonl",
            chat("{\"role\": \"assistant\"}").into_bytes(),
            "message 2 has neither",
        ),
        (
            "kind.jsonl",
            chat("{\"role\": \"assistant\", \"content\": 5}").into_bytes(),
            "message 2 has a `content`",
        ),
        (
            "weight.jsonl",
            chat("{\"role\": \"assistant\", \"content\": \"b\", \"weight\": 0}").into_bytes(),
            "message 2 has a `weight`",
        ),
        (
            "talk.jsonl",
            chat(&format!(
                "{{\"role\": \"assistant\", \"content\": \"{long}\"}}"
            ))
            .into_bytes(),
            "row 1: its messages have more than 1048576 bytes",
        ),
        (
            "text.jsonl",
            chat("7").into_bytes(),
            "message 2 is a number",
        ),
        (
            "silent.jsonl",
            chat("{\"role\": \"user\", \"content\": \"b\"}").into_bytes(),
            "no turn of the assistant",
        ),
        (
            "none.jsonl",
            b"{\"messages\": []}".to_vec(),
            "has no message",
        ),
        (
            "string.jsonl",
            b"{\"messages\": \"hi\"}".to_vec(),
            "its `messages` is no JSON",
        ),
        (
            "from.jsonl",
            b"{\"conversations\": [{\"from\": \"alien\", \"value\": \"a\"}]}".to_vec(),
            "message 1 is from `alien`",
        ),
        (
            "value.jsonl",
            b"{\"conversations\": [{\"from\": \"human\"}]}".to_vec(),
            "has no `value`",
        ),
        (
            "output.jsonl",
            b"{\"instruction\": \"a\", \"output\": 5}".to_vec(),
            "its `output` is a number",
        ),
        (
            "blank_output.jsonl",
            b"{\"instruction\": \"a\", \"output\": \"\"}".to_vec(),
            "its `output` is empty",
        ),
        (
            "completion.jsonl",
            b"{\"prompt\": \"a\", \"completion\": \"\"}".to_vec(),
            "its `completion` is empty",
        ),
        (
            "blank_text.jsonl",
            format!("{text}{{\"text\": \"\"}}").into_bytes(),
            "row 2: its `text` is empty",
        ),
    ];
    let folder = Folder::new();
    for (name, bytes, want) in cases {
        let path = folder.write(name, bytes);
        let result = run(&path, BadRows::Refuse);
        let error = result.expect_err(name).to_string();
        assert!(error.contains(want), "{name}: {error}");
        assert!(error.contains(name), "{name}: {error}");
        assert!(
            !error.contains('\n') && error.chars().count() < 1000,
            "{name}: {error}"
        );
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = Folder::new();
    let missing = run(&folder.0.join("none.jsonl"), BadRows::Refuse)
        .unwrap_err()
        .to_string();
    assert!(missing.contains("none.jsonl: is missing"), "{missing}");
    std::fs::create_dir(folder.0.join("bare")).unwrap();
    let bare = run(&folder.0.join("bare"), BadRows::Refuse)
        .unwrap_err()
        .to_string();
    assert!(bare.contains("has no file of examples"), "{bare}");
    let none = Source::open(&[], &SourceOptions::default())
        .unwrap_err()
        .to_string();
    assert!(none.contains("no file is given"), "{none}");
    for weight in ["x", "0", "-1", "nan", "inf", "1e9"] {
        let error = Input::parse(&format!("a.jsonl={weight}"))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("weight: "), "{error}");
    }
    #[cfg(unix)]
    {
        let device = run(Path::new("/dev/zero"), BadRows::Refuse)
            .unwrap_err()
            .to_string();
        assert!(device.contains("/dev/zero: is not a file"), "{device}");
    }
}

/// A file that shrinks under a stream is an error of the row that is gone.
#[test]
fn files_that_change_are_noticed() {
    let folder = Folder::new();
    let path = folder.write("x.jsonl", texts(2000));
    let source = Source::open(&[Input::from(&*path)], &SourceOptions::default()).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(100)
        .unwrap();
    let order = source.rows().order(0, None);
    assert!(order.example(0).is_ok());
    let error = order.example(1999).unwrap_err().to_string();
    assert!(
        error.contains("row 2000: cannot be read any more"),
        "{error}"
    );
}

/// Bytes changed at random, in files of every kind: whatever happens, it is a batch or one line.
#[test]
fn random_changes_never_panic() {
    let lines = format!("{}\n{}\n", chat("{\"role\": \"assistant\", \"content\": \"b, \\\"c\\\"\"}"), chat("{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}]}")).repeat(4);
    let array = format!("[{}]", lines.trim().replace('\n', ","));
    let kinds: Vec<(&str, Vec<u8>)> = vec![
        ("x.jsonl", lines.clone().into_bytes()),
        ("x.json", array.into_bytes()),
        ("x.csv", b"instruction,input,output\n\"a\nb\",c,\"d \"\"e\"\"\"\nf,,g\n".repeat(3)),
        ("x.txt", "A line.\n\nAnother \u{e9}.\n".repeat(20).into_bytes()),
        ("y.jsonl", b"{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\"}]}\n".repeat(4)),
        ("x.jsonl.gz", gzip(lines.as_bytes())),
        ("x.jsonl.zst", zstd::encode_all(lines.as_bytes(), 1).unwrap()),
    ];
    let folder = Folder::new();
    let (mut fine, mut refused) = (0, 0);
    for seed in 0..350 {
        let (name, bytes) = &kinds[seed as usize % kinds.len()];
        let bytes = changed(seed, bytes);
        let path = folder.write(name, bytes);
        let bad_rows = if seed % 2 == 0 {
            BadRows::Skip
        } else {
            BadRows::Refuse
        };
        match run_split(&path, bad_rows, Validation::Fraction(0.1)) {
            Ok(_) => fine += 1,
            Err(error) => {
                refused += 1;
                let error = error.to_string();
                assert!(!error.contains('\n'), "seed {seed}: {error}");
                assert!(!error.contains("bug"), "seed {seed}: {error}");
            }
        }
    }
    assert!(fine > 20 && refused > 20, "{fine} fine, {refused} refused");
}

/// Some bytes replaced, removed, repeated or cut off.
fn changed(seed: u64, bytes: &[u8]) -> Vec<u8> {
    const WORDS: [&[u8]; 10] = [
        b"\"",
        b"\\",
        b"{",
        b"]",
        b",",
        b"\n",
        b"\0",
        b"\xff",
        b"null",
        b"\"role\":",
    ];
    let mut out = bytes.to_vec();
    for change in 0..1 + word(seed, 0) % 3 {
        let at = (word(seed, 10 + change) % out.len().max(1) as u64) as usize;
        let pick = word(seed, 20 + change);
        match pick % 4 {
            0 => out[at] = (pick >> 8) as u8,
            1 => {
                let end = (at + 1 + (pick >> 8) as usize % 9).min(out.len());
                out.drain(at..end);
            }
            2 => {
                let new = WORDS[(pick >> 8) as usize % WORDS.len()];
                out.splice(at..at, new.iter().copied());
            }
            _ => out.truncate(at.max(1)),
        }
        if out.is_empty() {
            break;
        }
    }
    out
}
