//! Files of tensors and small files: what is refused and how, and that what is written is what is
//! read.

#[path = "support/cases.rs"]
mod cases;
#[path = "support/made.rs"]
mod made;

use std::collections::BTreeMap;
use std::sync::Arc;

use roundpipe_files::small::{self, FileLimits};
use roundpipe_files::{
    AtomicFile, AtomicFolder, SystemDisk, Weights, folder, read_tensors, write_tensors,
};
use roundpipe_tensor::{DType, Param, RngSite};

use crate::made::{Scratch, address_space_peak, file, tensor};

const FILE: &str = "model.safetensors";

/// More address space than this process needs, threads and their heaps included; the large claims
/// are of 32 GiB and more.
const ROOM: u64 = 16 << 30;

/// One line that holds all of these words.
#[track_caller]
fn refuses<T>(case: &str, result: roundpipe_files::Result<T>, words: &[&str]) {
    let Err(error) = result else {
        panic!("{case} is not refused");
    };
    let text = error.to_string();
    assert_eq!(
        text.lines().count(),
        1,
        "{case}: more than one line: {text}"
    );
    for word in words {
        assert!(text.contains(word), "{case}: no `{word}` in: {text}");
    }
}

fn normal(dtype: DType, dims: &[usize], seed: u64) -> Param {
    let site = RngSite {
        seed,
        ..RngSite::default()
    };
    Param::normal(dtype, dims, 1.0, site.key()).unwrap()
}

/// A file is believed only after all of it was checked, by any reader.
#[test]
fn malformed_files_are_refused() {
    let before = address_space_peak();
    let dir = Scratch::new("malformed");
    for (case, bytes, why, fix) in &cases::malformed() {
        let path = dir.put(FILE, bytes);
        let words = [FILE, why, fix];
        refuses(case, Weights::open(&path), &words);
        refuses(case, read_tensors(&path), &words);
    }
    let grown = address_space_peak() - before;
    assert!(grown < ROOM, "{grown} bytes were reserved");
}

/// No length of a header is mistaken for another format's first bytes, whatever character it is.
#[test]
fn every_length_of_a_header_is_sound() {
    let dir = Scratch::new("lengths");
    let header = format!("{{{}}}", tensor("w", "F32", "[1]", 0, 4));
    for len in header.len()..700 {
        dir.put(FILE, file(&format!("{header:len$}"), 4));
        let weights = Weights::open(dir.join(FILE)).unwrap_or_else(|e| panic!("{len}: {e}"));
        assert_eq!(weights.view("w").unwrap().bytes, [0; 4]);
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
        dir.put(FILE, &bytes);
        match Weights::open(dir.join(FILE)) {
            Err(e) => assert_eq!(e.to_string().lines().count(), 1, "round {round}: {e}"),
            Ok(weights) => {
                opened += 1;
                let sum: usize = weights
                    .tensors()
                    .iter()
                    .map(|tensor| weights.view(&tensor.name).unwrap().bytes.len())
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

/// Names, types, values and notes come back.
#[test]
fn named_tensors_round_trip() {
    let dir = Scratch::new("named");
    let path = dir.join("x.safetensors");
    let a = ("a".to_owned(), normal(DType::BF16, &[2, 3], 5));
    let b = ("b".to_owned(), normal(DType::F32, &[3], 6));
    let notes = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    for _ in 0..2 {
        write_tensors(&path, &notes, &[a.clone(), b.clone()]).unwrap();
    }
    let back = read_tensors(&path).unwrap();
    assert_eq!(back.metadata, notes);
    assert_eq!(back.tensors.len(), 2);
    for (name, param) in [&a, &b] {
        let (_, got) = back.tensors.iter().find(|(n, _)| n == name).unwrap();
        assert_eq!(
            (got.dtype(), got.shape().dims()),
            (param.dtype(), param.shape().dims())
        );
        assert_eq!(
            got.data().read_all().unwrap().bytes(),
            param.data().read_all().unwrap().bytes()
        );
    }
    assert_eq!(
        std::fs::read_dir(&dir).unwrap().count(),
        1,
        "no partial file stays"
    );
    dir.put(
        "f8.safetensors",
        file(&format!("{{{}}}", tensor("w", "F8_E4M3", "[4]", 0, 4)), 4),
    );
    let text = read_tensors(dir.join("f8.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(text.contains("`w` has type F8_E4M3; save"), "{text}");
}

/// A file that cannot be written leaves nothing behind, and what was there before.
#[test]
fn a_failed_write_leaves_no_trace() {
    let dir = Scratch::new("unwritten");
    let param = normal(DType::BF16, &[3], 7);
    let notes = BTreeMap::new();
    let nowhere = dir.join("none/x.safetensors");
    refuses(
        "no folder",
        write_tensors(nowhere, &notes, &[]),
        &["x.safetensors", "create"],
    );
    let path = dir.put("x.safetensors", "old");
    let pair = [("a".to_owned(), param.clone()), ("a".to_owned(), param)];
    refuses(
        "a name twice",
        write_tensors(&path, &notes, &pair),
        &["`a`", "own"],
    );
    let dropped = AtomicFile::of_bytes(&path, b"new").unwrap();
    assert_eq!(names(&dir).len(), 2, "the old file and the new one's bytes");
    drop(dropped);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(names(&dir), ["x.safetensors"]);
    // A device that is always full.
    #[cfg(target_os = "linux")]
    {
        let partial = format!(".x.safetensors.{}.partial", std::process::id());
        std::os::unix::fs::symlink("/dev/full", dir.join(&partial)).unwrap();
        refuses(
            "full disk",
            write_tensors(&path, &notes, &pair[..1]),
            &["x.safetensors", "free space"],
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(names(&dir), ["x.safetensors"]);
    }
}

fn names(dir: &Scratch) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// A name is finished when the whole file stands behind it, and replaces the one before.
#[test]
fn a_finished_file_replaces_the_old_one() {
    let dir = Scratch::new("finished");
    let path = dir.put("x.json", "a longer old text");
    let new = AtomicFile::of_bytes(&path, b"{}").unwrap();
    assert_eq!(new.target(), path);
    new.finish().unwrap();
    roundpipe_files::atomic::sync_folder(dir.as_ref()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"{}");
    assert_eq!(names(&dir), ["x.json"]);
}

/// Only regular files of a known length are read.
#[test]
fn small_files_are_small_files() {
    let limits = FileLimits {
        bytes: 8,
        json_values: 2,
    };
    let dir = Scratch::new("small");
    let path = dir.put("x.json", "[1]     ");
    assert_eq!(
        small::read_json(&path, limits).unwrap(),
        serde_json::json!([1])
    );
    dir.put("x.json", "[1,2]");
    refuses("values", small::read_json(&path, limits), &["too many"]);
    dir.put("x.json", "[1]      ");
    refuses("bytes", small::read(&path, limits), &["9 bytes", "most"]);
    refuses("folder", small::read(dir.as_ref(), limits), &["not a file"]);
    let absent = dir.join("absent");
    refuses("absent", small::read(&absent, limits), &["missing"]);
    assert_eq!(small::read_if_there(&absent, limits).unwrap(), None);
    // Says that it has no bytes, and has them without end.
    #[cfg(unix)]
    refuses(
        "device",
        small::read(std::path::Path::new("/dev/zero"), limits),
        &["not a file"],
    );
}

/// A folder has its name once it is complete, and not before; what a crash left is tidied up by the
/// next, and a link is not replaced.
#[test]
fn folders_appear_whole_or_not_at_all() {
    let dir = Scratch::new("folders");
    let disk = Arc::new(SystemDisk);
    let target = dir.join("new/a");
    let write = |text: &[u8]| -> roundpipe_files::Result<AtomicFolder> {
        let folder = AtomicFolder::create(disk.clone(), &target)?;
        let file = folder.create_file("x")?;
        folder.check(file.set_len(9))?;
        folder.check(file.write_at(text, 2))?;
        folder.check(file.flush())?;
        Ok(folder)
    };
    let read = || std::fs::read(target.join("x")).ok();
    let above = dir.join("new");
    drop(write(b"lost").unwrap());
    assert_eq!(folder::names(&above).unwrap(), [""; 0]);
    assert_eq!(folder::complete(&target), None);
    write(b"one").unwrap().finish().unwrap();
    assert_eq!(read().unwrap(), b"\0\0one\0\0\0\0");

    // Cut off between the two renames that replace a folder.
    std::fs::rename(&target, dir.join("new/.a.previous")).unwrap();
    std::fs::create_dir(dir.join("new/.a.partial")).unwrap();
    std::fs::write(dir.join("new/.a.partial/y"), "half").unwrap();
    assert_eq!(folder::complete(&target), Some(dir.join("new/.a.previous")));
    drop(write(b"lost").unwrap());
    assert_eq!(read().unwrap(), b"\0\0one\0\0\0\0");
    write(b"two").unwrap().finish().unwrap();
    assert_eq!(read().unwrap(), b"\0\0two\0\0\0\0");
    assert_eq!(folder::names(&above).unwrap(), ["a"]);

    for (name, of) in [
        (".a.partial", Some("a")),
        (".partial", None),
        ("a.partial", None),
    ] {
        assert_eq!(folder::target_of_leftover(name), of);
    }
    let nameless = AtomicFolder::create(disk.clone(), std::path::Path::new("/"));
    refuses("the root", nameless, &["no name"]);
    #[cfg(unix)]
    {
        let link = dir.join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let words = ["is a link", "remove it"];
        refuses("a link", AtomicFolder::create(disk.clone(), &link), &words);
        refuses("a link", folder::remove(&*disk, &link), &words);
        assert!(read().is_some());
    }
    folder::remove(&*disk, &target).unwrap();
    assert_eq!(folder::names(&above).unwrap(), [""; 0]);
}
