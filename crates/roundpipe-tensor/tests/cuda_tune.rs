//! The choice among a product's algorithms, on a GPU: it changes nothing that was computed, is made
//! once, and the next process makes the same. Skipped without a GPU, and says so.
//!
//! Choices are stored where a variable says, so the test runs itself again in processes of their
//! own.

#[path = "support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::Command;

use roundpipe_tensor::{Bytes, Cpu, Cuda, Cx, DType, Device, RngSite, Tensor, Worker, bf16};
use std::sync::Arc;

const CHILD: &str = "ROUNDPIPE_TEST_CHILD";
const FOLDER: &str = "ROUNDPIPE_KERNEL_CACHE";

/// Rows, inputs and outputs of a linear layer: results that fit the workspace, and some that do
/// not.
const SIZES: [[usize; 3]; 2] = [[512, 256, 384], [4096, 64, 5120]];

fn values(seed: u64, count: usize) -> Vec<f32> {
    let key = RngSite {
        seed,
        ..RngSite::default()
    }
    .key();
    (0..count as u64)
        .map(|i| (key.word(i) % 33) as f32 / 16.0 - 1.0)
        .collect()
}

fn upload(cx: &mut Cx, seed: u64, dims: &[usize], dtype: DType) -> Tensor {
    let values = values(seed, dims.iter().product());
    match dtype {
        DType::BF16 => cx.tensor(
            &values
                .iter()
                .map(|v| bf16::from_f32(*v))
                .collect::<Vec<_>>(),
            dims,
        ),
        DType::F64 => cx.tensor(
            &values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(),
            dims,
        ),
        _ => cx.tensor(&values, dims),
    }
    .unwrap()
}

/// Output and gradients of a layer that is used twice, so that one gradient of its weights is added
/// to the other.
fn outcome(
    device: Arc<dyn Device>,
    [rows, inputs, outputs]: [usize; 3],
    dtype: DType,
) -> Vec<Vec<f64>> {
    let worker = Worker::new(device, Bytes::gib(1)).unwrap();
    let mut cx = Cx::new(&worker, true, true);
    let weight = upload(&mut cx, 1, &[outputs, inputs], dtype);
    let (x, z) = (
        upload(&mut cx, 2, &[rows, inputs], dtype),
        upload(&mut cx, 3, &[rows, inputs], dtype),
    );
    let (weight, x) = (cx.input(&weight).unwrap(), cx.input(&x).unwrap());
    let (one, two) = (
        cx.linear(&x, &weight, None).unwrap(),
        cx.linear(&z, &weight, None).unwrap(),
    );
    let y = cx.add(&one, &two).unwrap();
    let seed = upload(&mut cx, 4, &[rows, outputs], dtype);
    let values = y.to_f64_vec().unwrap();
    let grads = cx.backward_from(&[(y, seed)]).unwrap();
    let grad = |leaf: &Tensor| grads.of(leaf).unwrap().to_f64_vec().unwrap();
    vec![values, grad(&weight), grad(&x)]
}

fn close(what: &str, have: &[Vec<f64>], want: &[Vec<f64>], limit: f64) {
    for (i, (have, want)) in have.iter().zip(want).enumerate() {
        let error: f64 = have.iter().zip(want).map(|(h, w)| (h - w).powi(2)).sum();
        let norm: f64 = want.iter().map(|w| w * w).sum();
        assert!(
            error.sqrt() <= limit * norm.sqrt(),
            "{what} {i}: {}",
            (error / norm).sqrt()
        );
    }
}

fn child(folder: &Path, tune: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_that_chooses", "--ignored", "--nocapture"]);
    let output = command
        .env(CHILD, "1")
        .env(FOLDER, folder)
        .env("ROUNDPIPE_TUNE", tune)
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(
        output.status.success() && text[0].contains("1 passed"),
        "{}\n{}",
        text[0],
        text[1]
    );
}

/// The stored choices.
fn choices(folder: &Path) -> Option<String> {
    let mut files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let file = files.find(|path| {
        path.file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("products-")
    });
    file.map(|path| std::fs::read_to_string(path).unwrap())
}

/// What is compared on a GPU holds on the processor, in every type.
#[test]
fn the_processor_agrees_with_itself() {
    let run = |dtype| outcome(Cpu::new(Some(1)).unwrap(), [24, 16, 40], dtype);
    close("f32", &run(DType::F32), &run(DType::F64), 2e-5);
    close("bf16", &run(DType::BF16), &run(DType::F64), 4e-2);
}

#[test]
fn a_choice_is_made_once_and_changes_no_result() {
    let off = std::env::var("ROUNDPIPE_GPU").as_deref() == Ok("off");
    let here = if off {
        Err("ROUNDPIPE_GPU is off".to_owned())
    } else {
        Cuda::new(0).map_err(|e| e.to_string())
    };
    if let Err(why) = here {
        return skip::skipped("a_choice_is_made_once_and_changes_no_result", &why);
    }
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("choices-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    child(&folder, "off");
    assert_eq!(
        choices(&folder),
        None,
        "nothing is stored when nothing is measured"
    );
    std::fs::remove_file(folder.join("sums.txt")).unwrap();
    child(&folder, "on");
    let first = choices(&folder).expect("choices are stored");
    child(&folder, "on");
    assert_eq!(choices(&folder), Some(first), "nothing is measured again");
    let sums = std::fs::read_to_string(folder.join("sums.txt")).unwrap();
    let sums: Vec<&str> = sums.lines().collect();
    assert_eq!(sums[0], sums[1], "two processes differ");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
#[ignore = "run by a_choice_is_made_once_and_changes_no_result"]
fn child_that_chooses() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut sum = 0u64;
    for (sizes, dtype, limit) in SIZES
        .into_iter()
        .flat_map(|sizes| [(sizes, DType::F32, 2e-5), (sizes, DType::BF16, 4e-2)])
    {
        let name = format!("{sizes:?} {dtype}");
        let gpu = Cuda::new(0).unwrap();
        let first = outcome(gpu.clone(), sizes, dtype);
        close(
            &name,
            &first,
            &outcome(Cpu::new(None).unwrap(), sizes, DType::F64),
            limit,
        );
        assert!(
            first == outcome(gpu, sizes, dtype),
            "{name}: the call that chose differs from the next"
        );
        assert!(
            first == outcome(Cuda::new(0).unwrap(), sizes, dtype),
            "{name}: two openings of a card differ"
        );
        let bits = first.iter().flatten().map(|value| value.to_bits());
        sum = bits.fold(sum, |sum, bits| {
            (sum.rotate_left(5) ^ bits).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        });
    }
    let path = PathBuf::from(std::env::var_os(FOLDER).unwrap()).join("sums.txt");
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    std::fs::write(path, format!("{before}{sum:016x}\n")).unwrap();
}
