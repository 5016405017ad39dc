//! What is saved is what is loaded, bit for bit, and what other readers of the format see.

use roundpipe_models::folder::{Folder, LoadOptions, SaveOptions, load, save};
use roundpipe_models::{Entry, PieceLayout};
use roundpipe_tensor::{DType, HostBuf, Param, RngSite, bf16, f16};
use safetensors::SafeTensors;

use crate::kit::{blank, bytes, pieced, whole};
use crate::made::{Scratch, file, tensor};

fn normal(dtype: DType, dims: &[usize], key: u64) -> Param {
    Param::normal(
        dtype,
        dims,
        1.0,
        RngSite {
            seed: key,
            ..Default::default()
        }
        .key(),
    )
    .unwrap()
}

/// A model with every layout: whole tensors, experts in one parameter, transposed ones, odd sizes.
fn model(dtype: DType) -> Vec<Entry> {
    let (plain, turned) = (PieceLayout::Plain, PieceLayout::Transposed);
    let q = normal(dtype, &[5, 3, 2], 1);
    let e = normal(dtype, &[2, 33, 70], 2);
    let m = normal(dtype, &[2, 3, 64], 3);
    let norm = normal(dtype, &[7], 4);
    vec![
        pieced("norm", norm, &[("model.norm.weight", &[7], 0, plain)]),
        pieced(
            "qkv",
            q,
            &[
                ("q", &[3, 3, 2], 0, plain),
                ("k", &[3, 2], 18, plain),
                ("v", &[1, 3, 2], 24, plain),
            ],
        ),
        pieced(
            "experts",
            e,
            &[
                ("e0", &[70, 33], 0, turned),
                ("e1", &[1, 70, 33], 33 * 70, turned),
            ],
        ),
        pieced(
            "mx",
            m,
            &[("mx", &[2, 64, 3], 0, PieceLayout::Mxfp4OrTransposed)],
        ),
    ]
}

/// Any split into shards holds the same tensors, and loading gives the same bits.
#[test]
fn a_saved_folder_loads_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for (max_shard_bytes, files) in [(u64::MAX, 1), (10_000, 2), (1, 7)] {
            let dir = Scratch::new("trip");
            let entries = model(dtype);
            let options = SaveOptions {
                max_shard_bytes,
                ..Default::default()
            };
            save(dir.join("a/b"), &entries, &options).unwrap();
            let folder = Folder::open(dir.join("a/b")).unwrap();
            if dtype == DType::BF16 || files != 2 {
                assert_eq!(folder.shards().len(), files, "{dtype}, {max_shard_bytes}");
            }
            let loaded = blank(&entries);
            let report = load(&folder, &loaded, &LoadOptions::default()).unwrap();
            assert_eq!((report.tensors, report.converted), (7, 0));
            for (old, new) in entries.iter().zip(&loaded) {
                assert_eq!(
                    bytes(old),
                    bytes(new),
                    "{} as {dtype}, {files} files",
                    old.name
                );
            }
            let mapped = blank(&entries);
            let options = LoadOptions::default().mapped();
            assert_eq!(load(&folder, &mapped, &options).unwrap(), report);
            for (old, new) in entries.iter().zip(&mapped) {
                assert!(new.param.data().stays_in_file(), "{}", old.name);
                assert_eq!(bytes(old), bytes(new), "{} mapped", old.name);
            }
            // In the folder's own layout: row 2, column 1 of a transposed tensor is row 1, column 2
            // here.
            let (at, from) = ((2 * 33 + 1) * dtype.size(), (70 + 2) * dtype.size());
            let stored = folder.tensor("e0").unwrap().bytes[at..][..dtype.size()].to_vec();
            assert_eq!(stored, bytes(&entries[2])[from..][..dtype.size()]);
        }
    }
}

/// Windows and tasks are larger than the other tests' tensors: their seams need a tensor that has
/// some.
#[test]
fn large_tensors_have_no_seams() {
    let dir = Scratch::new("large");
    let (rows, cols) = (1030, 9000);
    let count = |i: usize| bf16::from_bits((i % 32_609) as u16);
    let values: Vec<bf16> = (0..2 * rows * cols).map(count).collect();
    let param = Param::from_slice(&values, &[2, cols, rows]).unwrap();
    let entries = [pieced(
        "w",
        param,
        &[("w", &[2, rows, cols], 0, PieceLayout::Transposed)],
    )];
    save(
        dir.join("m"),
        &entries,
        &SaveOptions {
            dtype: Some(DType::F32),
            ..Default::default()
        },
    )
    .unwrap();
    let folder = Folder::open(dir.join("m")).unwrap();
    let stored = folder.tensor("w").unwrap();
    assert_eq!(stored.bytes.len(), 2 * rows * cols * 4);
    for (i, x) in stored.bytes.chunks_exact(4).enumerate() {
        let (m, r, c) = (i / (rows * cols), i / cols % rows, i % cols);
        let want = count(m * rows * cols + c * rows + r).to_f32();
        assert_eq!(
            f32::from_le_bytes(x.try_into().unwrap()).to_bits(),
            want.to_bits(),
            "element {i}"
        );
    }
    let loaded = blank(&entries);
    load(&folder, &loaded, &LoadOptions::default()).unwrap();
    assert!(
        loaded[0].param.to_vec::<bf16>().unwrap() == values,
        "transposed back"
    );
    let flat = Param::zeros(DType::BF16, &[2, rows, cols]).unwrap();
    load(
        &folder,
        &[pieced(
            "w",
            flat.clone(),
            &[("w", &[2, rows, cols], 0, PieceLayout::Plain)],
        )],
        &LoadOptions::default(),
    )
    .unwrap();
    let flat = flat.to_vec::<bf16>().unwrap();
    for (i, x) in stored.bytes.chunks_exact(4).enumerate() {
        assert_eq!(
            flat[i].to_f32().to_bits(),
            f32::from_le_bytes(x.try_into().unwrap()).to_bits(),
            "element {i}"
        );
    }
}

/// Every pair of float types, against one correct rounding of values that sit on and beside ties.
#[test]
fn types_are_changed_with_one_rounding() {
    let ties = [
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1.0 + 1.0 / 2048.0,
        3.3895e38,
        65519.9,
        6e-8,
        -0.0,
        f64::INFINITY,
    ];
    let values: Vec<f64> = ties
        .iter()
        .flat_map(|x| [*x, -x * (1.0 + 1e-15), x * (1.0 - 1e-15)])
        .collect();
    let n = values.len();
    for from in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let stored = Param::zeros(from, &[n]).unwrap();
        load_values(&stored, &values);
        let dir = Scratch::new("types");
        let entries = [pieced(
            "x",
            stored.clone(),
            &[("x", &[n], 0, PieceLayout::Plain)],
        )];
        save(dir.join("m"), &entries, &SaveOptions::default()).unwrap();
        let exact = to_f64(&stored);
        for to in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let got = Param::zeros(to, &[n]).unwrap();
            let entry = [pieced(
                "x",
                got.clone(),
                &[("x", &[n], 0, PieceLayout::Plain)],
            )];
            let report = load(
                &Folder::open(dir.join("m")).unwrap(),
                &entry,
                &LoadOptions::default(),
            )
            .unwrap();
            assert_eq!(report.converted, usize::from(from != to));
            for (x, y) in exact.iter().zip(to_f64(&got)) {
                assert_eq!(
                    y.to_bits(),
                    nearest(*x, to).to_bits(),
                    "{x:e} from {from} to {to} gave {y:e}"
                );
            }
        }
    }
}

/// The nearest value of a type, found by comparing distances of neighbours, ties to the even one.
fn nearest(x: f64, to: DType) -> f64 {
    let (mantissa, min, max): (i32, i32, f64) = match to {
        DType::F32 => (23, -126, f64::from(f32::MAX)),
        DType::BF16 => (7, -126, bf16::MAX.to_f64()),
        DType::F16 => (10, -14, f16::MAX.to_f64()),
        _ => return x,
    };
    if x == 0.0 || x.is_infinite() {
        return x;
    }
    let exponent = x.abs().log2().floor() as i32;
    let step = 2f64.powi(exponent.max(min) - mantissa);
    let steps = (x / step).round_ties_even();
    let y = steps * step;
    if y.abs() > max {
        f64::INFINITY.copysign(x)
    } else {
        y
    }
}

fn to_f64(param: &Param) -> Vec<f64> {
    match param.dtype() {
        DType::F64 => param.to_vec::<f64>().unwrap(),
        DType::F32 => param
            .to_vec::<f32>()
            .unwrap()
            .into_iter()
            .map(f64::from)
            .collect(),
        DType::BF16 => param
            .to_vec::<bf16>()
            .unwrap()
            .into_iter()
            .map(bf16::to_f64)
            .collect(),
        _ => param
            .to_vec::<f16>()
            .unwrap()
            .into_iter()
            .map(f16::to_f64)
            .collect(),
    }
}

fn load_values(param: &Param, values: &[f64]) {
    let home = param.data();
    let mut home = home.write(0..home.len()).unwrap();
    match param.dtype() {
        DType::F64 => home.as_mut_slice::<f64>().copy_from_slice(values),
        DType::F32 => home
            .as_mut_slice::<f32>()
            .iter_mut()
            .zip(values)
            .for_each(|(d, s)| *d = *s as f32),
        DType::BF16 => home
            .as_mut_slice()
            .iter_mut()
            .zip(values)
            .for_each(|(d, s)| *d = bf16::from_f64(*s)),
        _ => home
            .as_mut_slice()
            .iter_mut()
            .zip(values)
            .for_each(|(d, s)| *d = f16::from_f64(*s)),
    }
}

/// The same bits come back even for NaNs that a conversion would make quiet.
#[test]
fn nan_bits_survive() {
    let dir = Scratch::new("nan");
    let odd = [
        bf16::from_bits(0x7f81),
        bf16::from_bits(0xffc1),
        bf16::from_bits(0xff80),
    ];
    let p = || Param::from_slice(&odd, &[3, 1]).unwrap();
    let entries = [
        pieced("a", p(), &[("a", &[3, 1], 0, PieceLayout::Plain)]),
        pieced("b", p(), &[("b", &[1, 3], 0, PieceLayout::Transposed)]),
    ];
    save(dir.join("m"), &entries, &SaveOptions::default()).unwrap();
    let loaded = blank(&entries);
    load(
        &Folder::open(dir.join("m")).unwrap(),
        &loaded,
        &LoadOptions::default(),
    )
    .unwrap();
    assert_eq!(
        (bytes(&loaded[0]), bytes(&loaded[1])),
        (bytes(&entries[0]), bytes(&entries[1]))
    );
}

/// The format's own library reads what is written, and what it writes is read.
#[test]
fn the_format_s_own_library_agrees() {
    let dir = Scratch::new("own");
    let entries = [
        whole("b", &[bf16::ONE; 3], &[3]),
        whole("a", &[1.5f32, 2.5], &[2]),
        whole("i", &[7i64], &[]),
    ];
    let config = serde_json::json!({"model_type": "x", "quantization_config": {"q": 1}, "torch_dtype": "float16"});
    save(
        dir.join("m"),
        &entries,
        &SaveOptions {
            config,
            ..Default::default()
        },
    )
    .unwrap();
    let raw = std::fs::read(dir.join("m/model.safetensors")).unwrap();
    let theirs = SafeTensors::deserialize(&raw).unwrap();
    assert_eq!(theirs.tensor("a").unwrap().data(), bytes(&entries[1]));
    assert_eq!(theirs.tensor("b").unwrap().shape(), [3]);
    assert_eq!(theirs.tensor("i").unwrap().data(), 7i64.to_le_bytes());
    let (start, meta) = SafeTensors::read_metadata(&raw).unwrap();
    assert_eq!(meta.metadata().as_ref().unwrap()["format"], "pt");
    for name in ["a", "b", "i"] {
        let info = meta.info(name).unwrap();
        assert_eq!(
            (8 + start + info.data_offsets.0) % (info.dtype.bitsize() / 8),
            0,
            "{name} is aligned"
        );
    }
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("m/config.json")).unwrap()).unwrap();
    assert_eq!(
        config,
        serde_json::json!({"model_type": "x", "torch_dtype": "float32"})
    );
    let data: Vec<u8> = (0..12).collect();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![3, 1], &data).unwrap();
    std::fs::write(
        dir.join("t.safetensors"),
        safetensors::serialize([("x", view)], None).unwrap(),
    )
    .unwrap();
    let folder = Folder::open(dir.join("t.safetensors")).unwrap();
    assert_eq!(folder.tensor("x").unwrap().bytes, data);
    assert_eq!(folder.tensor("x").unwrap().dims, [3, 1]);
    assert_eq!(folder.tensors().collect::<Vec<_>>(), ["x"]);
}

/// Data at an odd address, a padded header, an empty and a scalar tensor are all sound.
#[test]
fn unusual_but_sound_files_load() {
    let dir = Scratch::new("odd");
    let parts = [
        tensor("e", "F32", "[0,5]", 1, 1),
        tensor("s", "F32", "[]", 1, 5),
        tensor("u", "U8", "[1]", 0, 1),
    ];
    let mut raw = file(&format!("  {{{}}}   ", parts.join(",")), 1);
    raw.extend_from_slice(&1.25f32.to_le_bytes());
    dir.put("model.safetensors", &raw);
    let entries = [
        whole::<f32>("e", &[], &[0, 5]),
        whole("s", &[bf16::ZERO], &[]),
        whole("u", &[9u8], &[1]),
    ];
    let report = load(
        &Folder::open(&dir).unwrap(),
        &entries,
        &LoadOptions::default(),
    )
    .unwrap();
    assert_eq!((report.bytes, report.converted), (5, 1));
    assert_eq!(
        entries[1].param.to_vec::<bf16>().unwrap(),
        [bf16::from_f32(1.25)]
    );
    assert_eq!(entries[2].param.to_vec::<u8>().unwrap(), [0]);
}

/// Buffers that transformers computes are left alone, and only those and the ones that are named.
#[test]
fn harmless_tensors_are_ignored_by_name() {
    let dir = Scratch::new("harmless");
    let names = [
        "w",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    ];
    save(
        dir.join("m"),
        &names.map(|n| whole(n, &[1.0f32], &[1])),
        &SaveOptions::default(),
    )
    .unwrap();
    let folder = Folder::open(dir.join("m")).unwrap();
    let entries = [whole("w", &[0.0f32], &[1])];
    let text = load(&folder, &entries, &LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert!(text.contains("`lm_head.weight`, which"), "{text}");
    let report = load(
        &folder,
        &entries,
        &LoadOptions::default().ignoring("lm_head.weight"),
    )
    .unwrap();
    assert_eq!(report.ignored, names[1..]);
    assert!(
        load(
            &folder,
            &entries,
            &LoadOptions::default().ignoring("ead.weight")
        )
        .is_err()
    );
}

/// A parameter whose home is part of a slab is filled there, without touching its neighbours.
#[test]
fn slabs_are_filled_in_place() {
    let dir = Scratch::new("slab");
    save(
        dir.join("m"),
        &[whole("w", &[1.0f32, 2.0], &[2])],
        &SaveOptions::default(),
    )
    .unwrap();
    let slab = HostBuf::from_slice("slab", &[9.0f32; 4]).unwrap();
    let entries = [whole("w", &[0.0f32; 2], &[2])];
    entries[0].param.rehome(slab.slice(4..12).unwrap()).unwrap();
    load(
        &Folder::open(dir.join("m")).unwrap(),
        &entries,
        &LoadOptions::default(),
    )
    .unwrap();
    assert_eq!(
        slab.read_all().unwrap().as_slice::<f32>(),
        [9.0, 1.0, 2.0, 9.0]
    );
}

/// Saving over a model replaces all of its files, whatever their number was, and keeps the others.
#[test]
fn overwriting_leaves_one_model() {
    let dir = Scratch::new("over");
    let base = Scratch::new("base");
    for name in [
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "README.md",
    ] {
        base.put(name, name);
    }
    dir.put("notes.txt", "mine");
    let entries = [whole("a", &[1.0f32], &[1]), whole("b", &[2.0f32], &[1])];
    for max_shard_bytes in [1, 1000, 1] {
        let copy_from = Some(base.0.clone());
        let options = SaveOptions {
            max_shard_bytes,
            overwrite: true,
            copy_from,
            ..Default::default()
        };
        save(&dir, &entries, &options).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&dir)
            .unwrap()
            .flatten()
            .map(|e| e.file_name().into_string().unwrap())
            .collect();
        names.sort();
        let weights: Vec<&str> = names
            .iter()
            .filter(|n| n.starts_with("model"))
            .map(String::as_str)
            .collect();
        let want: &[&str] = match max_shard_bytes {
            1 => &[
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            _ => &["model.safetensors"],
        };
        assert_eq!(weights, want);
        assert_eq!(names.len(), want.len() + 5, "{names:?}");
        let loaded = blank(&entries);
        load(
            &Folder::open(&dir).unwrap(),
            &loaded,
            &LoadOptions::default(),
        )
        .unwrap();
        assert_eq!(bytes(&loaded[1]), bytes(&entries[1]));
    }
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    assert_eq!(index["metadata"]["total_size"], 8);
    assert_eq!(index["weight_map"]["b"], "model-00002-of-00002.safetensors");
    assert_eq!(
        std::fs::read(dir.join("merges.txt")).unwrap(),
        b"merges.txt"
    );
    assert_eq!(std::fs::read(dir.join("notes.txt")).unwrap(), b"mine");
}
