//! Files and folders that cannot be used: each is refused with one line that names the file, says
//! why and what helps, before anything of the claimed size is allocated and before any parameter is
//! written.

use roundpipe_models::folder::{Folder, LoadOptions, SaveOptions, load, save};
use roundpipe_models::{Entry, PieceLayout};
use roundpipe_tensor::{DType, Param, bf16};

use crate::cases::{self, one};
use crate::kit::{bytes, pieced, whole};
use crate::made::{Scratch, address_space_peak, file, tensor};

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

/// A file is believed only after all of it was checked, alone or as a shard.
#[test]
fn malformed_files() {
    let before = address_space_peak();
    for (case, bytes, why, fix) in &cases::malformed() {
        let dir = Scratch::new("malformed");
        dir.put("model.safetensors", bytes);
        let words = ["model.safetensors", why, fix];
        refuses(case, Folder::open(&dir).map(drop), &words);
        refuses(
            case,
            Folder::open(dir.join("model.safetensors")).map(drop),
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
}
