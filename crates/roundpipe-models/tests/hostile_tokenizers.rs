//! `tokenizer.json` files that are broken, or made to break their reader: one line each, and not
//! even a panic that is caught. This test has a process of its own, because it counts panics.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe_models::tokenizer::Tokenizer;
use serde_json::{Value, json};

static PANICS: AtomicUsize = AtomicUsize::new(0);

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat/tokenizers");
    folder.join(name).join("tokenizer.json")
}

fn byte_level() -> Value {
    serde_json::from_slice(&std::fs::read(fixture("byte_level")).unwrap()).unwrap()
}

/// The fixture with one part replaced.
fn with(part: &str, value: Value) -> Value {
    let mut definition = byte_level();
    definition[part] = value;
    definition
}

fn model(value: Value) -> Value {
    json!({"version": "1.0", "added_tokens": [], "model": value})
}

fn sequence(list: &str, item: Value, count: usize) -> Value {
    json!({"type": "Sequence", list: vec![item; count]})
}

fn open(definition: &Value) -> Result<Tokenizer, String> {
    Tokenizer::parse(
        Path::new("m/tokenizer.json"),
        definition.to_string().as_bytes(),
    )
    .map_err(|e| e.to_string())
}

/// Opens, encodes and decodes; whatever fails first.
fn run(definition: &Value, text: &str) -> Result<Vec<u32>, String> {
    let tokenizer = open(definition)?;
    let ids = tokenizer.encode(text, true).map_err(|e| e.to_string())?;
    tokenizer.decode(&ids, false).map_err(|e| e.to_string())?;
    tokenizer.decode(&[], false).map_err(|e| e.to_string())?;
    Ok(ids)
}

fn replace(content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": "a"}, "content": content})
}

fn regex(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn template(single: Value, tokens: Value) -> Value {
    json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens})
}

fn added(id: u64, content: &str, flags: &[&str]) -> Value {
    let mut token = json!({"id": id, "content": content});
    for flag in ["single_word", "lstrip", "rstrip", "normalized", "special"] {
        token[flag] = flags.contains(&flag).into();
    }
    token
}

fn bpe(vocab: Value, merges: Value, more: Value) -> Value {
    let mut bpe = json!({"type": "BPE", "vocab": vocab, "merges": merges});
    for (key, value) in more.as_object().unwrap() {
        bpe[key] = value.clone();
    }
    model(bpe)
}

/// A definition and a word of the line that refuses it.
fn refused_parts() -> Vec<(Value, &'static str)> {
    let text_a = json!({"Sequence": {"id": "A", "type_id": 0}});
    let text_b = json!({"Sequence": {"id": "B", "type_id": 0}});
    let missing = json!({"SpecialToken": {"id": "missing", "type_id": 0}});
    let uneven = json!({"x": {"id": "x", "ids": [1, 2], "tokens": ["x"]}});
    let token_x = json!({"SpecialToken": {"id": "x", "type_id": 0}});
    let two = sequence(
        "processors",
        template(json!([text_a.clone()]), json!({})),
        2,
    );
    let charsmap = |base64: &str| json!({"type": "Precompiled", "precompiled_charsmap": base64});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    vec![
        (
            with("normalizer", charsmap("CAAAAP//////////YWJj")),
            "leads out",
        ),
        (
            with("normalizer", charsmap("/////w==")),
            "trie has 4294967295 bytes",
        ),
        (with("normalizer", charsmap("")), "empty"),
        (with("normalizer", charsmap("?")), "base64"),
        (
            with("normalizer", json!({"type": "Precompiled"})),
            "precompiled_charsmap is missing",
        ),
        (
            with(
                "normalizer",
                json!({"type": "Precompiled", "precompiled_charsmap": 7}),
            ),
            "no text",
        ),
        (
            with("normalizer", json!({"type": "Mystery", "prepend": "x"})),
            "no type that is known",
        ),
        (
            with("normalizer", json!({"prepend": "x"})),
            "without a type",
        ),
        (with("normalizer", json!([])), "without a type"),
        (
            with(
                "normalizer",
                json!({"type": "Prepend", "prepend": "x".repeat(1000)}),
            ),
            "more than 256",
        ),
        (
            with("normalizer", replace(&"x".repeat(1000))),
            "more than 256",
        ),
        (
            with("normalizer", sequence("normalizers", replace("a"), 100)),
            "more than 64 parts",
        ),
        (
            with(
                "normalizer",
                json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            ),
            "tokenizer",
        ),
        (
            with(
                "normalizer",
                json!({"type": "Replace", "pattern": {"Regex": 7}, "content": ""}),
            ),
            "neither",
        ),
        (
            with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
            "at least 1",
        ),
        (
            with("pre_tokenizer", sequence("pretokenizers", byte_level, 40)),
            "too much of a text",
        ),
        (
            with("pre_tokenizer", regex(&"a".repeat(5000))),
            "5000 bytes",
        ),
        (
            with("pre_tokenizer", regex(r"(?:(?=\w{400})x){900}")),
            "repeats more than 1000",
        ),
        (
            with("pre_tokenizer", json!({"type": "Sequence"})),
            "without pretokenizers",
        ),
        (
            with(
                "post_processor",
                template(json!([missing.clone()]), json!({})),
            ),
            "no `missing`",
        ),
        (
            with("post_processor", template(json!([text_b]), json!({}))),
            "`B`, which it does not have",
        ),
        (
            with("post_processor", template(json!([token_x]), uneven)),
            "as many ids as tokens",
        ),
        (
            with(
                "post_processor",
                template(json!(vec![text_a; 100]), json!({})),
            ),
            "more than 16 pieces",
        ),
        (
            with("post_processor", template(json!([7]), json!({}))),
            "neither text nor",
        ),
        (with("post_processor", two), "second template"),
        // The library takes what has the settings of a template for one, whatever it is called.
        (
            with(
                "post_processor",
                json!({"type": "ByteLevel", "single": [missing]}),
            ),
            "no `missing`",
        ),
        (
            with("decoder", json!({"type": "BPEDecoder", "suffix": ""})),
            "suffix is empty",
        ),
        (
            with(
                "decoder",
                json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true}),
            ),
            "empty",
        ),
        (with("decoder", json!({"type": "Strip"})), "tokenizer"),
        (
            with(
                "decoder",
                json!({"type": "WordPiece", "prefix": 7, "cleanup": true}),
            ),
            "prefix",
        ),
        (
            with(
                "added_tokens",
                json!([added(u64::from(u32::MAX), "<z>", &[])]),
            ),
            "id of `<z>`",
        ),
        (with("added_tokens", json!([{"id": 1}])), "without content"),
        (with("added_tokens", json!({})), "no list"),
        (
            with(
                "added_tokens",
                json!([added(400, "x", &["rstrip"]), added(401, " y", &["lstrip"])]),
            ),
            "` y`",
        ),
        (
            with(
                "added_tokens",
                json!([added(400, &"x".repeat(20_000), &[])]),
            ),
            "20000 bytes",
        ),
        (
            {
                let mut definition = with("normalizer", json!({"type": "StripAccents"}));
                definition["added_tokens"] =
                    json!([added(400, "\u{301}", &["normalized", "single_word"])]);
                definition
            },
            "leaves nothing",
        ),
        (
            {
                let spaces =
                    json!({"type": "Replace", "pattern": {"String": "y"}, "content": " y"});
                let mut definition = with("normalizer", spaces);
                definition["added_tokens"] = json!([
                    added(400, "x", &["rstrip"]),
                    added(401, "y", &["lstrip", "normalized"])
                ]);
                definition
            },
            "`y` begins with a space",
        ),
        (with("version", json!("2.0")), "version"),
    ]
}

fn refused_models() -> Vec<(Value, &'static str)> {
    let ab = json!({"a": 0, "b": 1, "ab": 2});
    let none = json!({});
    let word_piece = |most: u64| {
        json!({
            "type": "WordPiece", "vocab": {"a": 1}, "unk_token": "a", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": most
        })
    };
    let unigram = |vocab: Value| model(json!({"type": "Unigram", "unk_id": 0, "vocab": vocab}));
    vec![
        (json!({}), "no model"),
        (json!([]), "no JSON object"),
        (
            model(json!({"type": "Magic", "vocab": {}})),
            "`Magic` is not known",
        ),
        (model(json!({"type": 7})), "no text"),
        (bpe(json!([]), json!([]), none.clone()), "vocab is missing"),
        (
            bpe(json!({"a": u32::MAX}), json!([]), none.clone()),
            "id of `a`",
        ),
        (bpe(json!({"a": "x"}), json!([]), none.clone()), "id of `a`"),
        (bpe(ab.clone(), json!(7), none.clone()), "merges is missing"),
        (
            bpe(ab.clone(), json!([["a"]]), none.clone()),
            "merge 0 is no pair",
        ),
        (
            bpe(ab.clone(), json!(["a b c"]), none.clone()),
            "merge 0 is no pair",
        ),
        (
            bpe(ab.clone(), json!([["a", "c"]]), none.clone()),
            "`c`, which vocab lacks",
        ),
        (
            bpe(ab.clone(), json!([["ab", "ab"]]), none.clone()),
            "`abab`, which vocab lacks",
        ),
        (
            bpe(
                ab.clone(),
                json!([["a", "b"]]),
                json!({"continuing_subword_prefix": "##"}),
            ),
            "lacks the prefix",
        ),
        (
            bpe(
                ab.clone(),
                json!([]),
                json!({"end_of_word_suffix": "x".repeat(1000)}),
            ),
            "end_of_word_suffix",
        ),
        (
            bpe(
                ab,
                json!([]),
                json!({"byte_fallback": true, "end_of_word_suffix": "x"}),
            ),
            "byte_fallback",
        ),
        (model(word_piece(1 << 40)), "max_input_chars_per_word"),
        (unigram(json!({})), "no list"),
        (unigram(json!([["a"]])), "item 0"),
        (unigram(json!([["a", "b"]])), "item 0"),
        (
            unigram(json!([["a".repeat(100_000), -1.0]])),
            "more than 512",
        ),
        (
            model(json!({"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0]]})),
            "tokenizer",
        ),
    ]
}

/// Texts that a definition which opens cannot encode or decode.
fn refused_texts() -> Vec<(Value, &'static str)> {
    let word_level = json!({"type": "WordLevel", "vocab": {"b": 1}, "unk_token": "nope"});
    let nested = (0..2).fold(replace("aa"), |step, _| sequence("normalizers", step, 5));
    vec![
        (
            with("normalizer", sequence("normalizers", replace("aa"), 40)),
            "64 bytes of one",
        ),
        (with("normalizer", nested), "64 bytes of one"),
        (
            with("decoder", sequence("decoders", replace("aa"), 40)),
            "64 bytes of one",
        ),
        // Before the byte-level pre-tokenizer of the fixture, which exchanges every character.
        (
            with(
                "normalizer",
                json!({"type": "Replace", "pattern": {"Regex": "b*"}, "content": "x"}),
            ),
            "before its first character",
        ),
        (model(word_level), "tokenizer refuses it"),
        (
            model(json!({"type": "Unigram", "unk_id": null, "vocab": [["b", -1.0]]})),
            "tokenizer refuses it",
        ),
    ]
}

/// Odd definitions that must run.
fn allowed() -> Vec<Value> {
    let mut old = byte_level();
    old["model"].as_object_mut().unwrap().remove("type");
    let strip = json!({"type": "Strip", "content": "a", "start": 1u64 << 40, "stop": 1u64 << 40});
    let bert = json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
        "lowercase": true
    });
    vec![
        byte_level(),
        old,
        with("decoder", strip.clone()),
        with("decoder", sequence("decoders", strip, 3)),
        with("decoder", json!({"type": "BPEDecoder", "suffix": "</w>"})),
        with("normalizer", bert),
        with(
            "normalizer",
            json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}),
        ),
        with(
            "pre_tokenizer",
            regex(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|\x{3000}|\s+(?!\S)|\s+|."),
        ),
        with("pre_tokenizer", regex("(?:a|a|b)*(?=c)(a+)+\\1$")),
        with(
            "pre_tokenizer",
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}),
        ),
        with(
            "added_tokens",
            json!([
                added(400, "<m>", &["lstrip", "rstrip", "special"]),
                added(401, "  ", &["normalized"])
            ]),
        ),
        with(
            "model",
            json!({"type": "BPE", "vocab": {"a": 0, "##a": 1, "aa": 2}, "merges": ["#version: 0.2", "a ##a"],
            "continuing_subword_prefix": "##", "unk_token": "a"}),
        ),
    ]
}

#[test]
fn hostile_definitions_are_one_line_without_a_panic() {
    std::panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let _ = writeln!(std::io::stderr(), "{info}");
    }));
    let text = "<|im_start|>aaaa a b  the ships. <m>  x".repeat(3);
    for (definition, word) in [refused_parts(), refused_models()].concat() {
        let error = open(&definition).map(drop).expect_err(word);
        assert!(
            error.starts_with("m/tokenizer.json: ") && error.contains(word),
            "no `{word}` in {error}"
        );
        assert!(
            error.lines().count() == 1 && error.contains("; fetch it again"),
            "{error}"
        );
    }
    for (definition, word) in refused_texts() {
        let error = run(&definition, &text).expect_err(word);
        assert!(
            error.contains(word) && error.lines().count() == 1,
            "no `{word}` in {error}"
        );
    }
    for definition in allowed() {
        run(&definition, &text).unwrap_or_else(|error| panic!("{error}: {definition}"));
    }
    for bytes in [
        &b""[..],
        b"{",
        b"[[[[",
        b"\xff",
        b"null",
        b"{\"decoder\": {\"type\": \"ByteLevel",
    ] {
        let error = Tokenizer::parse(Path::new("m/tokenizer.json"), bytes)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    damage();
    truncation_and_padding();
    assert_eq!(
        PANICS.load(Ordering::Relaxed),
        0,
        "panics were caught, not prevented"
    );
}

/// A file that is cut or has a byte changed opens and runs, or is refused in one line.
fn damage() {
    let mut state = 88_172_645_463_325_252u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for name in ["byte_level", "byte_fallback"] {
        let sound: Value = serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap();
        // The settings first, where damage matters most.
        let sound = sound.to_string().into_bytes();
        for _ in 0..150 {
            let mut bytes = sound.clone();
            let at = random(bytes.len().min(4000));
            match random(3) {
                0 => bytes[at] = b"0123456789[]{},:\"-e.ntf"[random(23)],
                1 => bytes.truncate(random(sound.len())),
                _ => drop(bytes.remove(at)),
            }
            match Tokenizer::parse(Path::new("m/tokenizer.json"), &bytes) {
                Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
                Ok(tokenizer) => {
                    if let Ok(ids) = tokenizer.encode("<s> the ships \u{1f600}", true) {
                        let _ = tokenizer.decode(&ids, true);
                    }
                }
            }
        }
    }
}

/// What a file says about truncation and padding is that of whoever saved it: texts are neither cut
/// nor filled.
fn truncation_and_padding() {
    let text = "the ships pass the harbour ".repeat(20);
    let (long, short) = (
        run(&byte_level(), &text).unwrap(),
        run(&byte_level(), "hi").unwrap(),
    );
    assert!(long.len() > 64 && short.len() < 8);
    let cut = |length: u64, stride: u64| {
        let how = json!({"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": stride});
        with("truncation", how)
    };
    let fill = |strategy: Value, multiple: Value| {
        let how = json!({
            "strategy": strategy, "direction": "Left", "pad_to_multiple_of": multiple, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "x"
        });
        with("padding", how)
    };
    let saved = [
        cut(8, 0),
        cut(8, 8),
        cut(0, 5),
        with("truncation", json!("nonsense")),
        fill(json!({"Fixed": 64}), Value::Null),
        fill(json!({"Fixed": 1_000_000_000_000u64}), Value::Null),
        fill(json!("BatchLongest"), json!(1u64 << 50)),
    ];
    for definition in saved {
        assert_eq!(run(&definition, &text).unwrap(), long);
        assert_eq!(run(&definition, "hi").unwrap(), short);
    }
}
