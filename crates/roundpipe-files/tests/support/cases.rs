//! Safetensors files that no reader may believe.

use crate::made::{file, sized, tensor};

/// What, the bytes of the file, why it is refused, and a word of the fix.
pub type Case = (&'static str, Vec<u8>, &'static str, &'static str);

/// A file of one tensor.
pub fn one(dtype: &str, shape: &str, from: u64, to: u64, data: usize) -> Vec<u8> {
    file(
        &format!("{{{}}}", tensor("w", dtype, shape, from, to)),
        data,
    )
}

/// A file of two tensors of f32.
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

/// All of them.
pub fn malformed() -> Vec<Case> {
    let cases = [other_formats(), headers(), tensors()].concat();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    cases
}
