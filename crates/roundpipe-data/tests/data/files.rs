//! Kinds of files, compression, folders, weights and splits.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use parquet::basic::{Compression as Codec, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use roundpipe_data::{
    Compression, Example, FileKind, Input, Rows, Source, SourceOptions, Validation,
};

use crate::kit::{Folder, examples, open, texts};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::default();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

const LINES: &str = "{\"prompt\": \"a, \\\"b\\\"\", \"completion\": \"c\\nd\"}\r\n\n\
                     {\"prompt\": \"\u{e9}\", \"completion\": \"]}\"}";
const ARRAY: &str = "[\n {\"prompt\": \"a, \\\"b\\\"\", \"completion\": \"c\\nd\"},\n\
                     {\"prompt\": \"\u{e9}\", \"completion\": \"]}\"}]\n";
const CSV: &str = "prompt,completion\n\"a, \"\"b\"\"\",\"c\nd\"\r\n\u{e9},]}\n";
const TSV: &str = "prompt\tcompletion\na, \"b\"\t\"c\nd\"\n\u{e9}\t]}";

/// The same rows, whatever file they are in and however it is compressed.
#[test]
fn kinds_and_compressions_give_the_same_rows() {
    let completion = |prompt: &str, completion: &str| Example::Completion {
        prompt: prompt.into(),
        completion: completion.into(),
    };
    let want = [completion("a, \"b\"", "c\nd"), completion("\u{e9}", "]}")];
    let kinds = [
        ("x.jsonl", LINES, FileKind::JsonLines),
        ("x.json", ARRAY, FileKind::JsonArray),
        ("y.jsonl", ARRAY, FileKind::JsonArray),
        ("z.json", LINES, FileKind::JsonLines),
        ("x.csv", CSV, FileKind::Csv),
        ("x.tsv", TSV, FileKind::Csv),
    ];
    let folder = Folder::new();
    for (name, text, kind) in kinds {
        let marked = format!("\u{feff}{text}");
        let (first, second) = text.as_bytes().split_at(text.len() / 3);
        let skipped = [
            &[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 9, 9, 9],
            &zstd(first)[..],
        ]
        .concat();
        let cases = [
            ("", text.as_bytes().to_vec(), None),
            ("", marked.into_bytes(), None),
            (".gz", gzip(text.as_bytes()), Some(Compression::Gzip)),
            (
                ".gz",
                [gzip(first), gzip(second)].concat(),
                Some(Compression::Gzip),
            ),
            (".zst", zstd(text.as_bytes()), Some(Compression::Zstd)),
            (
                ".zst",
                [skipped, zstd(second)].concat(),
                Some(Compression::Zstd),
            ),
        ];
        for (number, (suffix, bytes, compression)) in cases.into_iter().enumerate() {
            let source = open(folder.write(&format!("{name}{suffix}"), bytes));
            let report = &source.report()[0];
            assert_eq!(report.kind, kind, "{name} {number}");
            assert_eq!(report.compression, compression, "{name} {number}");
            assert_eq!((report.rows, report.weight), (2, 1.0));
            assert_eq!(examples(&source.rows()), want, "{name} {number}");
        }
    }
}

/// A text is cut into pieces that are the text, and only the last ends a document.
#[test]
fn texts_come_in_pieces() {
    let folder = Folder::new();
    let text = "A line of the story.\n\n".repeat(3000);
    let source = open(folder.write("story.txt.gz", gzip(text.as_bytes())));
    let found = examples(&source.rows());
    assert!(found.len() > 3);
    let mut whole = String::new();
    for (number, example) in found.iter().enumerate() {
        let Example::Text { text, ends } = example else {
            panic!("{example:?}");
        };
        assert_eq!(*ends, number + 1 == found.len());
        whole += text;
    }
    assert_eq!(whole, text);
}

fn texts_of(rows: &Rows, epoch: u64, seed: Option<u64>) -> Vec<String> {
    let order = rows.order(epoch, seed);
    let text = |row| match order.example(row).unwrap() {
        Example::Text { text, .. } => text,
        other => panic!("{other:?}"),
    };
    (0..rows.len()).map(text).collect()
}

#[test]
fn folders_and_weights() {
    let folder = Folder::new();
    folder.write("set/b.jsonl", texts(10));
    folder.write("set/a/c.jsonl.gz", gzip(texts(10).as_bytes()));
    folder.write("set/README", "no rows");
    folder.write("set/.hidden.jsonl", "broken");
    let other = folder.write("other.jsonl", "{\"text\": \"other\"}\n".repeat(10));
    let weighted = |text: &str| Input::parse(text).unwrap();
    let inputs = [
        Input::from(folder.0.join("set")),
        weighted(&format!("{}=0.3", other.display())),
    ];
    let source = Source::open(&inputs, &SourceOptions::default()).unwrap();
    let names: Vec<String> = source
        .report()
        .iter()
        .map(|file| file.to_string())
        .collect();
    assert!(
        names[0].contains("c.jsonl.gz: 10 rows of text, JSON lines in gzip"),
        "{names:?}"
    );
    assert!(names[1].contains("b.jsonl: 10 rows"), "{names:?}");
    assert!(names[2].ends_with("weight 0.3"), "{names:?}");
    assert_eq!(source.rows().len(), 23);

    let doubled = Input {
        weight: 2.0,
        path: other,
    };
    let source = Source::open(&[doubled], &SourceOptions::default()).unwrap();
    assert_eq!(source.rows().len(), 20);
}

/// Half of a file is another half each epoch, and every row has its turn.
#[test]
fn a_share_of_a_file_changes_with_the_epoch() {
    let folder = Folder::new();
    let half = Input {
        path: folder.write("x.jsonl", texts(100)),
        weight: 0.5,
    };
    let source = Source::open(&[half], &SourceOptions::default()).unwrap();
    let epoch = |epoch| BTreeSet::from_iter(texts_of(&source.rows(), epoch, Some(3)));
    let epochs: Vec<BTreeSet<String>> = (0..12).map(epoch).collect();
    assert!(epochs.iter().all(|rows| rows.len() == 50));
    assert_ne!(epochs[0], epochs[1]);
    let all: BTreeSet<&String> = epochs.iter().flatten().collect();
    assert_eq!(all.len(), 100);
}

#[test]
fn splits_are_disjoint_and_repeat() {
    let folder = Folder::new();
    // Every row twice: both are on one side of a fraction.
    let twice = texts(500).repeat(2);
    let inputs = [Input::from(folder.write("x.jsonl", twice))];
    let split = |validation| {
        let options = SourceOptions {
            validation,
            ..SourceOptions::default()
        };
        let source = Source::open(&inputs, &options).unwrap();
        let train = texts_of(&source.rows(), 0, None);
        (train, texts_of(&source.validation(), 0, None))
    };
    let (train, kept) = split(Validation::Fraction(0.1));
    assert_eq!(train.len() + kept.len(), 1000);
    assert!((60..140).contains(&kept.len()), "{}", kept.len());
    assert!(kept.iter().all(|row| !train.contains(row)));
    assert_eq!(split(Validation::Fraction(0.1)), (train, kept));

    let (train, kept) = split(Validation::Rows(37));
    assert_eq!((train.len(), kept.len()), (963, 37));
    let (train, kept) = split(Validation::None);
    assert_eq!((train.len(), kept.len()), (1000, 0));
    for bad in [
        Validation::Fraction(1.0),
        Validation::Fraction(f64::NAN),
        Validation::Rows(1000),
    ] {
        let options = SourceOptions {
            validation: bad,
            ..SourceOptions::default()
        };
        let error = Source::open(&inputs, &options).unwrap_err().to_string();
        assert!(error.starts_with("validation: "), "{error}");
    }
}

/// A table with a column of each name, of texts at the leaves of `schema`.
fn parquet(schema: &str, codec: Codec, leaves: &[(&[&str], &[i16], &[i16])]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(codec).build();
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for (texts, definitions, repetitions) in leaves {
        let texts: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        let levels = |levels: &[i16]| (!levels.is_empty()).then(|| levels.to_vec());
        let (definitions, repetitions) = (levels(definitions), levels(repetitions));
        column
            .typed::<ByteArrayType>()
            .write_batch(&texts, definitions.as_deref(), repetitions.as_deref())
            .unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.into_inner().unwrap()
}

/// Tables of texts, and of lists of messages, whatever their compression.
#[test]
fn parquet_tables_are_rows() {
    let folder = Folder::new();
    let pairs = "message s { OPTIONAL BYTE_ARRAY image; REQUIRED BYTE_ARRAY prompt (UTF8); \
                 REQUIRED BYTE_ARRAY completion (UTF8); }";
    let gzip = Codec::GZIP(GzipLevel::default());
    let zstd = Codec::ZSTD(ZstdLevel::default());
    for codec in [Codec::UNCOMPRESSED, Codec::SNAPPY, gzip, zstd] {
        let leaves: [(&[&str], &[i16], &[i16]); 3] = [
            (&["\u{0}"], &[0, 1], &[]),
            (&["a\n", "\u{e9}"], &[], &[]),
            (&["b", "]}"], &[], &[]),
        ];
        let source = open(folder.write("x.parquet", parquet(pairs, codec, &leaves)));
        let report = &source.report()[0];
        assert_eq!(
            (report.kind, report.rows),
            (FileKind::Parquet, 2),
            "{codec}"
        );
        let pair = |prompt: &str, completion: &str| Example::Completion {
            prompt: prompt.into(),
            completion: completion.into(),
        };
        let want = [pair("a\n", "b"), pair("\u{e9}", "]}")];
        assert_eq!(examples(&source.rows()), want, "{codec}");
    }

    let chats = "message s { REQUIRED GROUP messages (LIST) { REPEATED GROUP list { \
                 REQUIRED GROUP element { REQUIRED BYTE_ARRAY role (UTF8); \
                 REQUIRED BYTE_ARRAY content (UTF8); } } } }";
    let once: &[i16] = &[1, 1, 1, 1];
    let turns: &[i16] = &[0, 1, 0, 1];
    let leaves: [(&[&str], &[i16], &[i16]); 2] = [
        (&["user", "assistant", "user", "assistant"], once, turns),
        (&["a", "b", "c", "d"], once, turns),
    ];
    let bytes = parquet(chats, Codec::SNAPPY, &leaves);
    let source = open(folder.write("chats.parquet", &bytes));
    let found = examples(&source.rows());
    let last = |example: &Example| match example {
        Example::Chat(chat) => chat.messages[1].0["content"].clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(found.iter().map(last).collect::<Vec<_>>(), ["b", "d"]);

    let other = "message s { REQUIRED BYTE_ARRAY caption (UTF8); }";
    let leaves: [(&[&str], &[i16], &[i16]); 1] = [(&["a"], &[], &[])];
    let path = folder.write("y.parquet", parquet(other, Codec::SNAPPY, &leaves));
    let error = Source::open(&[Input::from(path)], &SourceOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("has the columns `caption`"),
        "{error}"
    );

    // Damaged at any place, a table is refused in one line or read.
    for at in (0..bytes.len()).step_by(3) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        let path = folder.write("z.parquet", bytes);
        if let Err(error) = Source::open(&[Input::from(path)], &SourceOptions::default()) {
            let error = error.to_string();
            assert!(
                error.contains("z.parquet: ") && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
