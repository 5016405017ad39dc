//! Files and folders that cannot be used: each is refused with one line that names the file, says
//! why and what helps, before anything of the claimed size is allocated and before any parameter is
//! written.

use roundpipe_models::folder::{Folder, LoadOptions, SaveOptions, load, save};
use roundpipe_models::{Entry, PieceLayout, read_tensors, write_tensors};
use roundpipe_tensor::{DType, Param, bf16};

use crate::kit::{Scratch, address_space_peak, bytes, file, pieced, sized, tensor, whole};

/// More address space than this process needs, threads and their heaps included; the large claims
/// are of 32 GiB and more.
const ROOM: u64 = 16 << 30;

/// One line that holds all of these words.
#[track_caller]
fn refuses(case: &str, result: Result<(), roundpipe_models::Error>, words: &[&str]) {
    let text = result.expect_err(case).to_string();
    assert_eq!(
        text.lines().count(),
        1,
        "{case}: more than one line: {text}"
    );
    for word in words {
        assert!(text.contains(word), "{case}: no `{word}` in: {text}");
    }
}

/// What, the bytes of `model.safetensors`, why it is refused, and a word of the fix.
type Case = (&'static str, Vec<u8>, &'static str, &'static str);

fn one(dtype: &str, shape: &str, from: u64, to: u64, data: usize) -> Vec<u8> {
    file(
        &format!("{{{}}}", tensor("w", dtype, shape, from, to)),
        data,
    )
}

fn two(a: (u64, u64), b: (u64, u64), data: usize) -> Vec<u8> {
    let shape = |(from, to): (u64, u64)| format!("[{}]", to.saturating_sub(from) / 4);
    let a = tensor("a", "F32", &shape(a), a.0, a.1);
    let b = tensor("b", "F32", &shape(b), b.0, b.1);
    file(&format!("{{{a},{b}}}"), data)
}

/// Files that are something else.
fn other_formats() -> Vec<Case> {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    vec![
        ("empty", vec![], "empty", "download"),
        ("git lfs", pointer.into(), "Git LFS", "git lfs pull"),
        (
            "html",
            "<!DOCTYPE html><html>login</html>".into(),
            "web page",
            "HF_TOKEN",
        ),
        (
            "html, indented",
            "\n\n  <html><body>".into(),
            "web page",
            "download",
        ),
        (
            "xml error",
            "<?xml version=\"1.0\"?><Error>".into(),
            "web page",
            "download",
        ),
        (
            "zip pickle",
            b"PK\x03\x04aaaaaaaaaaaaaaaaaaaa".to_vec(),
            "pickle",
            "convert",
        ),
        (
            "old pickle",
            b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j".to_vec(),
            "pickle",
            "convert",
        ),
        ("gguf", b"GGUF\x03\0\0\0\0\0\0\0\0".to_vec(), "GGUF", "use"),
        (
            "json error",
            r#"{"error":"not found"}"#.into(),
            "JSON",
            "download",
        ),
        ("three bytes", vec![1, 2, 3], "3 bytes", "download"),
        ("seven bytes", vec![0; 7], "7 bytes", "download"),
    ]
}

/// Headers whose length or text is wrong.
fn headers() -> Vec<Case> {
    let ok = tensor("w", "F32", "[1]", 0, 4);
    let deep = format!("{{\"w\":{}", "[".repeat(5000));
    let notes = |notes: &str| file(&format!("{{\"__metadata__\":{notes},{ok}}}"), 4);
    vec![
        (
            "length 2^60",
            sized(1 << 60, "{}", 0),
            "1152921504606846976",
            "download",
        ),
        (
            "length of all ones",
            sized(u64::MAX, "{}", 0),
            "header",
            "download",
        ),
        (
            "length over the cap",
            sized(100_000_001, "{}", 0),
            "most is 100000000",
            "download",
        ),
        (
            "length past the end",
            sized(3, "{}", 0),
            "cut off",
            "download",
        ),
        (
            "length under the cap, no data",
            sized(99_000_000, "{}", 50),
            "cut off",
            "download",
        ),
        ("length 0", sized(0, "", 0), "broken header", "download"),
        (
            "length too short",
            sized(5, &format!("{{{ok}}}"), 4),
            "broken header",
            "download",
        ),
        ("not JSON", file("tensors!", 0), "broken header", "download"),
        (
            "not UTF-8",
            [&sized(8, "{\"", 0)[..], b"\xff\xfe\":1}x"].concat(),
            "broken header",
            "download",
        ),
        ("a list", file("[1,2]", 0), "broken header", "download"),
        ("a number", file("42      ", 0), "broken header", "download"),
        (
            "text behind the map",
            file("{} {}", 0),
            "broken header",
            "download",
        ),
        ("deeply nested", file(&deep, 0), "broken header", "download"),
        (
            "same name twice",
            file(&format!("{{{ok},{ok}}}"), 4),
            "twice",
            "save it anew",
        ),
        (
            "notes twice",
            notes("{},\"__metadata__\":{}"),
            "twice",
            "save it anew",
        ),
        (
            "notes with numbers",
            notes("{\"a\":1}"),
            "broken header",
            "download",
        ),
        ("notes as a list", notes("[]"), "broken header", "download"),
        (
            "a note twice",
            notes("{\"a\":\"\",\"a\":\"\"}"),
            "twice",
            "download",
        ),
        (
            "line breaks in a name",
            file(&format!("{{{}}}", tensor("a\\nb", "F99", "[1]", 0, 4)), 4),
            "a\\nb",
            "download",
        ),
    ]
}

/// Tensors that contradict themselves, their neighbours or the file.
fn tensors() -> Vec<Case> {
    let no = |text: &str| file(&format!("{{\"w\":{text}}}"), 4);
    let long = format!("[{}]", vec!["1"; 100_000].join(","));
    vec![
        (
            "no dtype",
            no(r#"{"shape":[1],"data_offsets":[0,4]}"#),
            "dtype",
            "download",
        ),
        (
            "no shape",
            no(r#"{"dtype":"F32","data_offsets":[0,4]}"#),
            "shape",
            "download",
        ),
        (
            "no offsets",
            no(r#"{"dtype":"F32","shape":[1]}"#),
            "data_offsets",
            "download",
        ),
        (
            "one offset",
            no(r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#),
            "broken",
            "download",
        ),
        (
            "three offsets",
            no(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#),
            "broken",
            "download",
        ),
        (
            "dtype twice",
            no(r#"{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}"#),
            "duplicate",
            "download",
        ),
        (
            "dtype a number",
            no(r#"{"dtype":7,"shape":[1],"data_offsets":[0,4]}"#),
            "broken",
            "download",
        ),
        (
            "unknown dtype",
            one("F31", "[1]", 0, 4, 4),
            "unknown type `F31`",
            "download",
        ),
        (
            "lower-case dtype",
            one("f32", "[1]", 0, 4, 4),
            "unknown type",
            "download",
        ),
        (
            "negative size",
            one("F32", "[-1]", 0, 4, 4),
            "broken",
            "download",
        ),
        (
            "fractional size",
            one("F32", "[1.5]", 0, 4, 4),
            "broken",
            "download",
        ),
        (
            "size 2^64",
            one("F32", "[18446744073709551616]", 0, 4, 4),
            "broken",
            "download",
        ),
        (
            "shape a number",
            one("F32", "4", 0, 16, 16),
            "sizes",
            "download",
        ),
        (
            "nine dimensions",
            one("F32", "[1,1,1,1,1,1,1,1,1]", 0, 4, 4),
            "8 dimensions",
            "download",
        ),
        (
            "a hundred thousand dimensions",
            one("F32", &long, 0, 4, 4),
            "8 dimensions",
            "download",
        ),
        (
            "2^40 squared",
            one("F32", "[1099511627776,1099511627776]", 0, 4, 4),
            "larger than any memory",
            "download",
        ),
        (
            "2^62 floats",
            one("F32", "[4611686018427387904]", 0, 4, 4),
            "larger than any memory",
            "download",
        ),
        (
            "2^33 floats in 4 bytes",
            one("F32", "[8589934592]", 0, 4, 4),
            "needs 34359738368",
            "download",
        ),
        (
            "2^33 floats past the end",
            one("F32", "[8589934592]", 0, 34359738368, 4),
            "the file holds 4",
            "download",
        ),
        (
            "half a byte",
            one("F4", "[3]", 0, 2, 2),
            "whole bytes",
            "download",
        ),
        (
            "a huge size beside 0",
            one("U8", "[0, 9223372036854775807]", 0, 0, 0),
            "larger than any memory",
            "download",
        ),
        (
            "too few bytes",
            one("F32", "[2]", 0, 4, 4),
            "needs 8",
            "download",
        ),
        (
            "too many bytes",
            one("BF16", "[1]", 0, 4, 4),
            "needs 2",
            "download",
        ),
        (
            "bytes of an empty tensor",
            one("F32", "[0]", 0, 4, 4),
            "needs 0",
            "download",
        ),
        (
            "negative offset",
            one("F32", "[1]", 0, 4, 4)
                .iter()
                .map(|b| if *b == b'0' { b'-' } else { *b })
                .collect(),
            "broken",
            "download",
        ),
        (
            "offsets reversed",
            one("F32", "[1]", 4, 0, 4),
            "before it starts",
            "download",
        ),
        (
            "offsets past the end",
            one("F32", "[1]", 4, 8, 4),
            "the file holds 4",
            "download",
        ),
        (
            "offsets near 2^64",
            one("F32", "[1]", u64::MAX - 4, u64::MAX, 4),
            "the file holds 4",
            "download",
        ),
        (
            "truncated",
            one("F32", "[4]", 0, 16, 15),
            "the file holds 15",
            "download",
        ),
        (
            "bytes left over",
            one("F32", "[1]", 0, 4, 6),
            "2 bytes at the end",
            "download",
        ),
        (
            "no tensors but bytes",
            file("{}", 8),
            "8 bytes at the end",
            "download",
        ),
        (
            "gap at the start",
            one("F32", "[1]", 4, 8, 8),
            "4 bytes before",
            "download",
        ),
        (
            "gap between",
            two((0, 4), (8, 12), 12),
            "4 bytes before",
            "download",
        ),
        ("overlap", two((0, 8), (4, 12), 12), "overlaps", "download"),
        (
            "same bytes twice",
            two((0, 8), (0, 8), 8),
            "overlaps",
            "download",
        ),
        (
            "one inside the other",
            two((0, 12), (4, 8), 12),
            "overlaps",
            "download",
        ),
    ]
}

/// A file is believed only after all of it was checked, alone or as a shard, and for any reader.
#[test]
fn malformed_files() {
    let before = address_space_peak();
    let cases: Vec<Case> = [other_formats(), headers(), tensors()].concat();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    for (case, bytes, why, fix) in &cases {
        let dir = Scratch::new("malformed");
        dir.put("model.safetensors", bytes);
        let words = ["model.safetensors", why, fix];
        refuses(case, Folder::open(&dir).map(drop), &words);
        refuses(
            case,
            Folder::open(dir.join("model.safetensors")).map(drop),
            &words,
        );
        refuses(
            case,
            read_tensors(dir.join("model.safetensors")).map(drop),
            &words,
        );
        let dir = Scratch::new("malformed");
        dir.put("shard.safetensors", bytes);
        dir.put(
            "model.safetensors.index.json",
            r#"{"weight_map":{"w":"shard.safetensors"}}"#,
        );
        refuses(
            case,
            Folder::open(&dir).map(drop),
            &["shard.safetensors", why, fix],
        );
    }
    let grown = address_space_peak() - before;
    assert!(grown < ROOM, "{grown} bytes were reserved");
}

fn index(map: &str) -> String {
    format!(r#"{{"metadata":{{"total_size":4}},"weight_map":{map}}}"#)
}

/// An index is a list of promises: every one is checked, and no name in it leads out of the folder.
#[test]
fn malformed_indexes() {
    let outside = "plain file name";
    let cases: &[(&str, String, &str, &str)] = &[
        ("empty", String::new(), "no index", "download"),
        ("not JSON", "weights".into(), "no index", "download"),
        ("html", "<!doctype html>".into(), "no index", "download"),
        (
            "git lfs",
            "version https://git-lfs.github.com/spec/v1".into(),
            "Git LFS",
            "git lfs pull",
        ),
        ("a list", "[]".into(), "no index", "download"),
        (
            "no map",
            r#"{"metadata":{}}"#.into(),
            "weight_map",
            "download",
        ),
        (
            "map is a list",
            index(r#"["w"]"#),
            "map of strings",
            "download",
        ),
        ("map is text", index(r#""w""#), "map of strings", "download"),
        ("map of numbers", index(r#"{"w":1}"#), "string", "download"),
        (
            "map of nothing",
            index(r#"{"w":null}"#),
            "string",
            "download",
        ),
        (
            "map twice",
            r#"{"weight_map":{},"weight_map":{}}"#.into(),
            "duplicate",
            "download",
        ),
        ("empty map", index("{}"), "no tensors", "download"),
        (
            "tensor twice",
            index(r#"{"w":"a.safetensors","w":"a.safetensors"}"#),
            "twice",
            "download",
        ),
        (
            "parent",
            index(r#"{"w":"../a.safetensors"}"#),
            outside,
            "use",
        ),
        (
            "parent inside",
            index(r#"{"w":"x/../../a.safetensors"}"#),
            outside,
            "use",
        ),
        ("parent alone", index(r#"{"w":".."}"#), outside, "use"),
        ("absolute", index(r#"{"w":"/etc/passwd"}"#), outside, "use"),
        (
            "subfolder",
            index(r#"{"w":"x/a.safetensors"}"#),
            outside,
            "use",
        ),
        ("drive", index(r#"{"w":"C:a.safetensors"}"#), outside, "use"),
        (
            "backslash",
            index(r#"{"w":"..\\a.safetensors"}"#),
            outside,
            "use",
        ),
        (
            "line break",
            index(r#"{"w":"a\n.safetensors"}"#),
            outside,
            "use",
        ),
        (
            "null byte",
            index("{\"w\":\"a\\u0000.safetensors\"}"),
            outside,
            "use",
        ),
        ("empty name", index(r#"{"w":""}"#), outside, "use"),
        (
            "endless name",
            index(&format!(r#"{{"w":"{}.safetensors"}}"#, "a".repeat(5000))),
            outside,
            "use",
        ),
        (
            "pickled shard",
            index(r#"{"w":"pytorch_model-1.bin"}"#),
            "not safetensors",
            "convert",
        ),
    ];
    for (case, text, why, fix) in cases {
        let dir = Scratch::new("index");
        dir.put("model.safetensors.index.json", text);
        refuses(
            case,
            Folder::open(&dir).map(drop),
            &["model.safetensors.index.json", why, fix],
        );
    }
}

/// A file that only claims to be an index is not read at all.
#[test]
fn a_huge_index_is_not_read() {
    let dir = Scratch::new("huge");
    let path = dir.put("model.safetensors.index.json", "{");
    std::fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let before = address_space_peak();
    let words = [
        "model.safetensors.index.json",
        "1099511627776 bytes",
        "download",
    ];
    refuses("huge", Folder::open(&dir).map(drop), &words);
    assert!(address_space_peak() - before < ROOM);
}

/// No length of a header is mistaken for another format's first bytes, whatever character it is.
#[test]
fn every_length_of_a_header_is_sound() {
    let dir = Scratch::new("lengths");
    let header = format!("{{{}}}", tensor("w", "F32", "[1]", 0, 4));
    for len in header.len()..700 {
        dir.put("model.safetensors", file(&format!("{header:len$}"), 4));
        let folder = Folder::open(&dir).unwrap_or_else(|e| panic!("{len}: {e}"));
        assert_eq!(folder.tensor("w").unwrap().bytes, [0; 4]);
    }
}

/// Random damage to a sound file is refused in one line or leaves tensors that lie in the file;
/// nothing panics.
#[test]
fn random_damage_never_panics() {
    let dir = Scratch::new("damage");
    let parts = [
        tensor("a", "BF16", "[2,3]", 0, 12),
        tensor("b", "F32", "[]", 12, 16),
        tensor("c", "U8", "[0,9]", 16, 16),
    ];
    let sound = file(
        &format!(
            "{{\"__metadata__\":{{\"format\":\"pt\"}},{}}}",
            parts.join(",")
        ),
        16,
    );
    let mut state = 88_172_645_463_325_252u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut opened = 0;
    for round in 0..1500 {
        let mut bytes = sound.clone();
        for _ in 0..=random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] = b"0123456789[]{},:\"-e."[random(20)],
                2 => bytes.truncate(at.max(1)),
                _ => drop(bytes.remove(at)),
            }
            bytes.resize(bytes.len().max(1), 0);
        }
        dir.put("model.safetensors", &bytes);
        match Folder::open(&dir) {
            Err(e) => assert_eq!(e.to_string().lines().count(), 1, "round {round}: {e}"),
            Ok(folder) => {
                opened += 1;
                let sum: usize = folder
                    .tensors()
                    .map(|t| folder.tensor(t).unwrap().bytes.len())
                    .sum();
                assert!(sum < bytes.len(), "round {round}");
            }
        }
    }
    assert!(
        (1..700).contains(&opened),
        "{opened} of 1500 opened: the damage is too weak or too strong"
    );
}

/// An index and shards that do not belong together.
#[test]
fn mismatched_shards() {
    let good = one("F32", "[1]", 0, 4, 4);
    let name = "model.safetensors.index.json";
    let dir = Scratch::new("shards");
    dir.put(name, index(r#"{"w":"a.safetensors","v":"b.safetensors"}"#));
    refuses(
        "no shards",
        Folder::open(&dir).map(drop),
        &["a.safetensors", "2 of 2", "download"],
    );
    dir.put("a.safetensors", &good);
    refuses(
        "one shard",
        Folder::open(&dir).map(drop),
        &["b.safetensors", "1 of 2", "download"],
    );
    dir.put("b.safetensors", &good);
    refuses(
        "wrong tensor",
        Folder::open(&dir).map(drop),
        &["b.safetensors", "no tensor `v`", "download"],
    );
    dir.put(name, index(r#"{"w":"b.safetensors","v":"a.safetensors"}"#));
    refuses(
        "exchanged",
        Folder::open(&dir).map(drop),
        &["a.safetensors", "no tensor `v`", "download"],
    );
    let v = file(
        &format!(
            "{{{},{}}}",
            tensor("w", "F32", "[1]", 0, 4),
            tensor("v", "F32", "[1]", 4, 8)
        ),
        8,
    );
    dir.put("b.safetensors", v);
    dir.put(name, index(r#"{"w":"a.safetensors","v":"b.safetensors"}"#));
    refuses(
        "in two shards",
        Folder::open(&dir).map(drop),
        &["b.safetensors", "another shard", "save"],
    );
    std::fs::remove_file(dir.join("b.safetensors")).unwrap();
    std::fs::create_dir(dir.join("b.safetensors")).unwrap();
    refuses(
        "a folder as shard",
        Folder::open(&dir).map(drop),
        &["b.safetensors", "not a file", "pass"],
    );
}

/// Folders without usable weights say what they have instead.
#[test]
fn folders_without_weights() {
    let cases: &[(&str, &[&str], &str, &str)] = &[
        ("nothing", &[], "no model.safetensors", "check"),
        (
            "only a config",
            &["config.json"],
            "no model.safetensors",
            "download",
        ),
        (
            "pickle",
            &["config.json", "pytorch_model.bin"],
            "pickled weights (`pytorch_model.bin`)",
            "convert",
        ),
        (
            "sharded pickle",
            &["pytorch_model.bin.index.json"],
            "pickled",
            "convert",
        ),
        ("original", &["consolidated.00.pth"], "pickled", "convert"),
        ("gguf", &["model-q4.gguf"], "model-q4.gguf", "use"),
        ("keras", &["tf_model.h5"], "tf_model.h5", "use"),
        (
            "adapter",
            &["adapter_model.safetensors"],
            "adapter_model.safetensors",
            "pass",
        ),
    ];
    for (case, files, why, fix) in cases {
        let dir = Scratch::new("bare");
        files.iter().for_each(|f| drop(dir.put(f, "x")));
        refuses(
            case,
            Folder::open(&dir).map(drop),
            &["roundpipe-bare", why, fix],
        );
    }
    let dir = Scratch::new("bare");
    refuses(
        "no folder",
        Folder::open(dir.join("none")).map(drop),
        &["none", "missing", "check the path"],
    );
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../../blobs/gone", dir.join("model.safetensors")).unwrap();
        refuses(
            "broken link",
            Folder::open(&dir).map(drop),
            &["model.safetensors", "link", "download"],
        );
    }
}

/// A sound folder that is not this model's: named tensor by tensor, and no parameter changes.
#[test]
fn folders_of_another_model() {
    let dir = Scratch::new("other");
    let stored = [
        whole("a", &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]),
        whole("b", &[1i64, 2], &[2]),
        whole("e_blocks", &[0u8; 32], &[1, 2, 1, 16]),
        whole("e_scales", &[0u8; 2], &[1, 2, 1]),
        whole("f_blocks", &[0u8; 16], &[1, 1, 1, 16]),
    ];
    save(dir.join("m"), &stored, &SaveOptions::default()).unwrap();
    let folder = Folder::open(dir.join("m")).unwrap();
    let ones = |dims: &[usize]| Param::full(DType::F32, dims, 7.0).unwrap();
    let plain = |name: &'static str, dims: &[usize]| {
        pieced("p", ones(dims), &[(name, dims, 0, PieceLayout::Plain)])
    };
    let mx = |name: &'static str, dims: &[usize]| {
        pieced(
            "p",
            ones(dims),
            &[(name, dims, 0, PieceLayout::Mxfp4OrTransposed)],
        )
    };
    let cases: Vec<(&str, Entry, &str, &str)> = vec![
        (
            "missing",
            plain("zz", &[2]),
            "no tensor `zz`",
            "config.json",
        ),
        (
            "transposed",
            plain("a", &[3, 2]),
            "shape [2, 3], the model needs [3, 2]",
            "config.json",
        ),
        ("flat", plain("a", &[6]), "shape [2, 3]", "config.json"),
        ("longer", plain("a", &[2, 4]), "shape [2, 3]", "config.json"),
        ("integers as floats", plain("b", &[2]), "type I64", "save"),
        (
            "mxfp4 rows",
            mx("e", &[1, 32, 3]),
            "shape [1, 2, 1, 16]",
            "config.json",
        ),
        (
            "mxfp4 groups",
            mx("e", &[1, 40, 2]),
            "groups of 32",
            "config.json",
        ),
        (
            "mxfp4 without scales",
            mx("f", &[1, 32, 1]),
            "not `f_scales`",
            "download",
        ),
        (
            "mxfp4 missing",
            mx("g", &[1, 32, 1]),
            "no tensor `g`",
            "config.json",
        ),
        (
            "extra",
            plain("a", &[2, 3]),
            "`b` and 3 more",
            "config.json",
        ),
    ];
    for (case, entry, why, fix) in cases {
        let before = bytes(&entry);
        let result = load(
            &folder,
            std::slice::from_ref(&entry),
            &LoadOptions::default(),
        )
        .map(drop);
        refuses(case, result, &["model.safetensors", why, fix]);
        assert_eq!(bytes(&entry), before, "{case}: a parameter was written");
    }
}

/// A good entry before a bad one: nothing may be written when something is wrong.
#[test]
fn nothing_is_written_unless_all_is_well() {
    let dir = Scratch::new("all");
    let stored = [whole("a", &[1.0f32], &[1]), whole("b", &[2.0f32], &[1])];
    save(dir.join("m"), &stored, &SaveOptions::default()).unwrap();
    let folder = Folder::open(dir.join("m")).unwrap();
    let wanted = [whole("a", &[0.0f32], &[1]), whole("b", &[0.0f32; 2], &[2])];
    assert!(load(&folder, &wanted, &LoadOptions::default()).is_err());
    assert_eq!(wanted[0].param.to_vec::<f32>().unwrap(), [0.0]);
    let wanted = [whole("a", &[0.0f32], &[1]), whole("b", &[0.0f32], &[1])];
    let home = wanted[1].param.data();
    let reading = home.read_all().unwrap();
    let text = load(&folder, &wanted, &LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert_eq!(
        (
            text.lines().count(),
            wanted[0].param.to_vec::<f32>().unwrap()
        ),
        (1, vec![0.0]),
        "{text}"
    );
    drop(reading);
    load(&folder, &wanted, &LoadOptions::default()).unwrap();
    assert_eq!(wanted[0].param.to_vec::<f32>().unwrap(), [1.0]);
}

/// Entries that contradict themselves are refused for both directions, before a folder is made.
#[test]
fn entries_that_cannot_work() {
    let dir = Scratch::new("entries");
    save(
        dir.join("m"),
        &[whole("a", &[1.0f32; 4], &[4])],
        &SaveOptions::default(),
    )
    .unwrap();
    let folder = Folder::open(dir.join("m")).unwrap();
    let p = || Param::zeros(DType::F32, &[4]).unwrap();
    let tied = whole("a", &[1.0f32; 4], &[4]);
    let plain = PieceLayout::Plain;
    let cases: Vec<(&str, Vec<Entry>, &str)> = vec![
        ("twice", vec![tied.clone(), tied], "another entry"),
        (
            "gap",
            vec![pieced(
                "x",
                p(),
                &[("a", &[2], 0, plain), ("b", &[1], 3, plain)],
            )],
            "exactly once",
        ),
        (
            "overlap",
            vec![pieced(
                "x",
                p(),
                &[("a", &[3], 0, plain), ("b", &[2], 2, plain)],
            )],
            "exactly once",
        ),
        (
            "short",
            vec![pieced("x", p(), &[("a", &[3], 0, plain)])],
            "exactly once",
        ),
        (
            "long",
            vec![pieced("x", p(), &[("a", &[5], 0, plain)])],
            "exactly once",
        ),
        ("none", vec![pieced("x", p(), &[])], "exactly once"),
        (
            "huge",
            vec![pieced("x", p(), &[("a", &[1 << 40, 1 << 40], 0, plain)])],
            "any memory",
        ),
        (
            "turned vector",
            vec![pieced("x", p(), &[("a", &[4], 0, PieceLayout::Transposed)])],
            "transposed",
        ),
    ];
    for (case, entries, why) in cases {
        refuses(
            case,
            load(&folder, &entries, &LoadOptions::default()).map(drop),
            &["entry", why],
        );
        refuses(
            case,
            save(dir.join("new"), &entries, &SaveOptions::default()),
            &["entry", why],
        );
        assert!(!dir.join("new").exists(), "{case}");
    }
    let same = vec![pieced(
        "x",
        p(),
        &[("a", &[2], 0, plain), ("a", &[2], 2, plain)],
    )];
    refuses(
        "same name",
        save(dir.join("new"), &same, &SaveOptions::default()),
        &["`a`", "own"],
    );
    let to_int = SaveOptions {
        dtype: Some(DType::I64),
        ..Default::default()
    };
    refuses(
        "as integers",
        save(dir.join("new"), &[whole("a", &[1.0f32], &[1])], &to_int),
        &["dtype", "float"],
    );
    let pair = [("a".to_owned(), p()), ("a".to_owned(), p())];
    refuses(
        "pair",
        write_tensors(dir.join("x.safetensors"), &Default::default(), &pair),
        &["`a`", "own"],
    );
    assert!(!dir.join("x.safetensors").exists());
}

/// A folder that cannot be written keeps what it has, and no half-written file stays behind.
#[test]
fn places_that_cannot_be_written() {
    let dir = Scratch::new("places");
    let entries = [whole("a", &[bf16::ONE], &[1])];
    let options = SaveOptions::default();
    dir.put("file", "x");
    refuses(
        "a file",
        save(dir.join("file"), &entries, &options),
        &["file", "choose"],
    );
    refuses(
        "below a file",
        save(dir.join("file/m"), &entries, &options),
        &["could not be written", "choose"],
    );
    refuses(
        "not empty",
        save(&dir, &entries, &options),
        &["not empty", "overwrite"],
    );
    let nowhere = dir.join("none/x.safetensors");
    refuses(
        "no folder",
        write_tensors(nowhere, &Default::default(), &[]),
        &["x.safetensors", "create"],
    );
    // A folder where a file should go: found after everything was written.
    let m = dir.join("m");
    save(&m, &entries, &options).unwrap();
    let old = std::fs::read(m.join("model.safetensors")).unwrap();
    std::fs::create_dir_all(m.join("config.json")).unwrap();
    let sharded = [whole("a", &[1.0f32], &[1]), whole("b", &[1.0f32], &[1])];
    let config = serde_json::json!({"a": 1});
    let options = SaveOptions {
        overwrite: true,
        max_shard_bytes: 4,
        config,
        ..Default::default()
    };
    refuses(
        "blocked",
        save(&m, &sharded, &options),
        &["config.json", "not saved", "choose"],
    );
    let mut left: Vec<_> = std::fs::read_dir(&m)
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    left.sort();
    assert_eq!(
        left,
        ["config.json", "model.safetensors"],
        "partial files stay"
    );
    assert_eq!(std::fs::read(m.join("model.safetensors")).unwrap(), old);
    // A device that is always full.
    #[cfg(target_os = "linux")]
    {
        std::os::unix::fs::symlink("/dev/full", dir.join(&full_name())).unwrap();
        let full = write_tensors(
            dir.join("full.safetensors"),
            &Default::default(),
            &[("a".to_owned(), entries[0].param.clone())],
        );
        refuses("full disk", full, &["full.safetensors", "free space"]);
        assert!(!dir.join("full.safetensors").exists());
    }
}

/// The temporary name under which `full.safetensors` is written.
#[cfg(target_os = "linux")]
fn full_name() -> String {
    format!(".full.safetensors.{}.partial", std::process::id())
}
