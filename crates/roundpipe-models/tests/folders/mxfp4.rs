//! MXFP4 against what transformers makes of the same bytes (`fixtures/make_mxfp4.py`).

use std::path::Path;

use roundpipe_models::folder::{Folder, LoadOptions, SaveOptions, load, save};
use roundpipe_models::{Entry, PieceLayout};
use roundpipe_tensor::{DType, Param};

use crate::kit::{bytes, pieced};
use crate::made::Scratch;

const DIMS: [usize; 3] = [2, 256, 32];

fn experts(dtype: DType) -> Entry {
    let param = Param::zeros(dtype, &[DIMS[0], DIMS[2], DIMS[1]]).unwrap();
    pieced(
        "experts",
        param,
        &[("e", &DIMS, 0, PieceLayout::Mxfp4OrTransposed)],
    )
}

fn golden() -> Folder {
    Folder::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/mxfp4.safetensors"))
        .unwrap()
}

/// Every scale and every byte gives the bits that transformers gives; a saved folder holds them in
/// the layout that transformers reads, and loads to the same bits.
#[test]
fn bits_are_those_of_transformers() {
    let golden = golden();
    for (dtype, name, other) in [(DType::BF16, "bf16", "f16"), (DType::F16, "f16", "bf16")] {
        let entry = experts(dtype);
        let options = LoadOptions::default().ignoring(name).ignoring(other);
        let report = load(&golden, std::slice::from_ref(&entry), &options).unwrap();
        assert_eq!((report.tensors, report.dequantised), (1, 1));
        let mapped = experts(dtype);
        let in_files = load(
            &golden,
            std::slice::from_ref(&mapped),
            &options.clone().mapped(),
        );
        assert_eq!(in_files.unwrap(), report);
        assert!(mapped.param.data().stays_in_file());
        assert_eq!(bytes(&mapped), bytes(&entry));
        let dir = Scratch::new("mxfp4");
        save(
            dir.join("m"),
            std::slice::from_ref(&entry),
            &SaveOptions::default(),
        )
        .unwrap();
        let saved = Folder::open(dir.join("m")).unwrap();
        let (want, got) = (golden.tensor(name).unwrap(), saved.tensor("e").unwrap());
        assert_eq!((want.dtype, want.dims), (got.dtype, got.dims));
        for (i, (want, got)) in want
            .bytes
            .chunks_exact(2)
            .zip(got.bytes.chunks_exact(2))
            .enumerate()
        {
            assert_eq!(want, got, "{name}, element {i}");
        }
        let again = experts(dtype);
        let report = load(
            &saved,
            std::slice::from_ref(&again),
            &LoadOptions::default(),
        )
        .unwrap();
        assert_eq!(
            (report.dequantised, bytes(&again) == bytes(&entry)),
            (0, true)
        );
    }
}

/// f32 holds every value that bf16 can, exactly.
#[test]
fn wider_types_hold_the_same_values() {
    let (narrow, wide) = (experts(DType::BF16), experts(DType::F32));
    let options = LoadOptions::default().ignoring("bf16").ignoring("f16");
    for entry in [&narrow, &wide] {
        load(&golden(), std::slice::from_ref(entry), &options).unwrap();
    }
    let narrow = narrow.param.to_vec::<roundpipe_tensor::bf16>().unwrap();
    for (n, w) in narrow.iter().zip(wide.param.to_vec::<f32>().unwrap()) {
        assert_eq!(n.to_f32().to_bits(), w.to_bits());
    }
}
