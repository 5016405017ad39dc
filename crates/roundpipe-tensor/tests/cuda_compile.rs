//! Every CUDA kernel compiles for every architecture we promise, without a GPU. Where NVRTC is missing, this is
//! skipped and says so; set ROUNDPIPE_NVRTC=required to make that a failure.

use roundpipe_tensor::cuda::{compile, units};

const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"];

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn kernels_compile_for_every_architecture() {
    let units = units();
    let filter = std::env::var("ROUNDPIPE_KERNELS").unwrap_or_default();
    let units: Vec<_> = units.into_iter().filter(|unit| unit.name().contains(&filter)).collect();
    let mut failures = Vec::new();
    for unit in &units {
        for arch in ARCHITECTURES {
            match compile::check(unit, arch) {
                Ok(_) => {}
                Err(error) if error.to_string().contains("libnvrtc is not here") => {
                    assert!(std::env::var("ROUNDPIPE_NVRTC").as_deref() != Ok("required"), "{error}");
                    eprintln!("skipped: {error}");
                    return;
                }
                Err(error) => failures.push(format!("{arch}: {error}")),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} failed:\n{}", failures.len(), units.len(), failures.join("\n"));
}
