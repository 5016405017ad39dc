//! Prints one JSON line per product: `rivals THREADS`. Square f32 products by the crates one would
//! otherwise use.

use std::time::Instant;

fn main() {
    let threads: usize = std::env::args()
        .nth(1)
        .and_then(|t| t.parse().ok())
        .unwrap_or(1);
    for n in [1024usize, 2048] {
        let a: Vec<f32> = (0..n * n)
            .map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0)
            .collect();
        let mut c = vec![0.0f32; n * n];
        let step = n as isize;
        let mode = if threads > 1 {
            gemm::Parallelism::Rayon(threads)
        } else {
            gemm::Parallelism::None
        };
        report("gemm crate f32", n, || {
            let (pc, pa) = (c.as_mut_ptr(), a.as_ptr());
            // SAFETY: all matrices have n·n elements with row stride n and column stride 1.
            unsafe {
                gemm::gemm(
                    n, n, n, pc, 1, step, false, pa, 1, step, pa, 1, step, 0.0, 1.0, false, false,
                    false, mode,
                );
            }
        });
        report("matrixmultiply crate f32", n, || {
            let (pc, pa) = (c.as_mut_ptr(), a.as_ptr());
            // SAFETY: as above.
            unsafe {
                matrixmultiply::sgemm(n, n, n, 1.0, pa, step, 1, pa, step, 1, 0.0, pc, step, 1)
            }
        });
    }
}

/// Best of several runs after a warm-up.
fn report(what: &str, n: usize, mut run: impl FnMut()) {
    run();
    let best = (0..9).map(|_| time(&mut run)).fold(f64::INFINITY, f64::min);
    let rate = 2.0 * (n as f64).powi(3) / best / 1e9;
    println!(r#"{{"bench":"matmul","what":"{what}","size":{n},"gflops":{rate:.1}}}"#);
}

fn time(run: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}
