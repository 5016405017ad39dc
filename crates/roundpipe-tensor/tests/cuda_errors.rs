//! What goes wrong around a GPU is an error of one line that says what to do, and the process goes
//! on.
//!
//! Libraries are looked for once per process, and variables are read then: such tests run
//! themselves again in a process of their own. What needs NVRTC or a GPU is skipped without, and
//! says so.

#[path = "support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::Command;

use roundpipe_tensor::cuda::compile::{self, Unit};
use roundpipe_tensor::cuda::library;
use roundpipe_tensor::{Bytes, Cpu, Cuda, Cx, Device, Result, Worker};
use std::sync::Arc;

/// Set in the processes that tests start.
const CHILD: &str = "ROUNDPIPE_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs one of the ignored tests below in a process with these variables.
fn in_a_process(test: &str, variables: &[(&str, &Path)]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(CHILD, "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success() && out.contains("1 passed"),
        "{test}: {}\n{out}\n{err}",
        output.status
    );
}

/// An empty folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// 1 + 2 on a device.
fn three(device: Arc<dyn Device>) -> Result<f64> {
    let worker = Worker::new(device, Bytes::mib(16))?;
    let mut cx = Cx::new(&worker, false, true);
    let (one, two) = (cx.tensor(&[1.0f32], &[1])?, cx.tensor(&[2.0f32], &[1])?);
    Ok(cx.add(&one, &two)?.to_f64_vec()?[0])
}

fn on_cpu() -> f64 {
    three(Cpu::new(Some(1)).unwrap()).unwrap()
}

fn unit() -> Unit {
    Unit::new(
        "good",
        "extern \"C\" __global__ void good(float* x) { *x = VALUE; }",
        "good",
    )
    .with("VALUE", 7)
}

/// Whether kernels can be compiled here.
fn has_nvrtc(test: &str) -> bool {
    match library::nvrtc() {
        Ok(_) => true,
        Err(why) => {
            skip::skipped(test, &why.to_string());
            false
        }
    }
}

#[test]
fn a_missing_library_is_one_line_that_says_how_to_get_it() {
    let empty = folder("no-libraries");
    let list = std::env::join_paths([Path::new("only"), &empty]).unwrap();
    let variables = [
        ("ROUNDPIPE_CUDA_LIBS", Path::new(&list)),
        ("ROUNDPIPE_CUDA_DRIVER", Path::new("off")),
    ];
    in_a_process("child_without_libraries", &variables);
    std::fs::remove_dir_all(empty).unwrap();
}

#[test]
#[ignore = "run by a_missing_library_is_one_line_that_says_how_to_get_it"]
fn child_without_libraries() {
    if !is_child() {
        return;
    }
    let says = |error: roundpipe_tensor::Error, words: [&str; 2]| {
        let text = error.to_string();
        assert!(
            words.iter().all(|word| text.contains(word)) && !text.contains('\n'),
            "{text}"
        );
        assert!(text.contains("ROUNDPIPE_CUDA_LIBS"), "{text}");
    };
    says(
        library::driver().unwrap_err(),
        ["libcuda", "install NVIDIA's driver, or run on the CPU"],
    );
    says(
        library::nvrtc().unwrap_err(),
        ["libnvrtc", "pip install nvidia-cuda-nvrtc"],
    );
    says(
        library::cublaslt().unwrap_err(),
        ["libcublasLt", "pip install nvidia-cublas"],
    );
    says(
        library::cudnn().unwrap_err(),
        ["libcudnn", "pip install nvidia-cudnn-cu13"],
    );
    let note = Cuda::attention_note().unwrap();
    assert!(
        note.contains("our own kernels") && note.contains("libnvrtc") && !note.contains('\n'),
        "{note}"
    );
    // Without a driver there is no GPU to count or to open, and the processor computes.
    says(Cuda::count().unwrap_err(), ["libcuda", "run on the CPU"]);
    says(Cuda::new(0).unwrap_err(), ["libcuda", "run on the CPU"]);
    says(
        compile::check(&unit(), "sm_90").unwrap_err(),
        ["libnvrtc", "install the CUDA toolkit"],
    );
    assert_eq!(on_cpu(), 3.0);
}

#[test]
fn a_broken_kept_kernel_is_compiled_anew() {
    if !has_nvrtc("a_broken_kept_kernel_is_compiled_anew") {
        return;
    }
    let kept = folder("kernels");
    in_a_process(
        "child_with_kept_kernels",
        &[("ROUNDPIPE_KERNEL_CACHE", &kept)],
    );
    std::fs::remove_dir_all(kept).unwrap();
}

#[test]
#[ignore = "run by a_broken_kept_kernel_is_compiled_anew"]
fn child_with_kept_kernels() {
    if !is_child() {
        return;
    }
    let folder = PathBuf::from(std::env::var_os("ROUNDPIPE_KERNEL_CACHE").unwrap());
    let image = || compile::image(&unit(), (9, 0)).unwrap();
    let first = image();
    let files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [path] = &files[..] else {
        panic!("one file is kept, not {files:?}")
    };
    let whole = std::fs::read(path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for broken in [&b""[..], b"no kernel", &whole[..whole.len() / 2], &flipped] {
        std::fs::write(path, broken).unwrap();
        assert!(
            image() == first,
            "{} bytes of a broken file were used",
            broken.len()
        );
        assert!(
            std::fs::read(path).unwrap() == whole,
            "the broken file stayed"
        );
    }
    // A folder that cannot be one costs time only.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "a file").unwrap();
    assert!(image() == first);
    std::fs::remove_file(&folder).unwrap();
    std::fs::create_dir(&folder).unwrap();
}

#[test]
fn a_kernel_that_does_not_compile_is_named_in_one_line() {
    if !has_nvrtc("a_kernel_that_does_not_compile_is_named_in_one_line") {
        return;
    }
    let text = "extern \"C\" __global__ void bad() { nothing_here; nor_here; }";
    let error = compile::check(
        &Unit::new("wrong", text, "bad").with("REAL", "float"),
        "sm_90",
    )
    .unwrap_err();
    let line = error.to_string();
    for word in [
        "wrong:bad [REAL=float]",
        "sm_90",
        "wrong.cu(1)",
        "nothing_here",
        "(and 1 more)",
    ] {
        assert!(
            line.contains(word) && !line.contains('\n'),
            "{word}: {line}"
        );
    }
}

#[test]
fn a_gpu_that_breaks_down_is_lost_and_the_process_lives() {
    match Cuda::count() {
        Ok(1..) if std::env::var("ROUNDPIPE_GPU").as_deref() != Ok("off") => {
            in_a_process("child_with_a_broken_gpu", &[]);
        }
        Err(why) => skip::skipped(
            "a_gpu_that_breaks_down_is_lost_and_the_process_lives",
            &why.to_string(),
        ),
        Ok(_) => skip::skipped(
            "a_gpu_that_breaks_down_is_lost_and_the_process_lives",
            "no GPU is to be used",
        ),
    }
}

#[test]
#[ignore = "run by a_gpu_that_breaks_down_is_lost_and_the_process_lives"]
fn child_with_a_broken_gpu() {
    if !is_child() {
        return;
    }
    let cuda = Cuda::new(0).unwrap();
    assert_eq!(three(cuda.clone()).unwrap(), 3.0);
    cuda.trap().unwrap();
    // The first call that meets the fault and every later one say the same.
    let first = three(cuda.clone()).unwrap_err().to_string();
    for word in ["cuda:0", "the device is lost, restart the program"] {
        assert!(first.contains(word) && !first.contains('\n'), "{first}");
    }
    for _ in 0..3 {
        assert_eq!(three(cuda.clone()).unwrap_err().to_string(), first);
        assert_eq!(cuda.trap().unwrap_err().to_string(), first);
        assert_eq!(cuda.reserve(Bytes::mib(1)).unwrap_err().to_string(), first);
    }
    // Others go on.
    assert_eq!(on_cpu(), 3.0);
    if Cuda::count().unwrap() > 1 {
        assert_eq!(three(Cuda::new(1).unwrap()).unwrap(), 3.0);
    }
    drop(cuda);
    assert_eq!(on_cpu(), 3.0);
}
