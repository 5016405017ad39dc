//! Prints one JSON line per figure, for `benches/compare.py`: `figures matmul|block|adamw THREADS`.

use std::io::Write;
use std::time::Instant;

use roundpipe_tensor::DType;

mod work;

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let threads = args
        .get(1)
        .and_then(|t| t.parse().ok())
        .unwrap_or_else(work::cores);
    let mut out = std::io::stdout().lock();
    let mut line = |text: String| writeln!(out, "{text}").expect("standard output takes a line");
    match args.first().map(String::as_str) {
        Some("matmul") => {
            for size in [1024, 2048] {
                for dtype in [DType::F32, DType::BF16] {
                    let seconds = best(&mut work::product(dtype, size, threads));
                    let rate = 2.0 * (size as f64).powi(3) / seconds / 1e9;
                    line(format!(
                        r#"{{"bench":"matmul","what":"{dtype}","size":{size},"gflops":{rate:.1}}}"#
                    ));
                }
            }
        }
        Some("block") => {
            let mut block = work::Block::new(threads);
            let seconds = best(&mut || block.step());
            let (peak, rss) = (block.peak_bytes() >> 20, work::peak_rss_mib());
            let ms = seconds * 1e3;
            line(format!(
                r#"{{"bench":"block","ms":{ms:.2},"arena_mib":{peak},"rss_mib":{rss}}}"#
            ));
        }
        Some("adamw") => {
            let mut slabs = work::Adam::new(64 << 20, threads);
            let copy = slabs.copy_bytes() as f64 / best(&mut || slabs.copy()) / 1e9;
            let step = slabs.bytes() as f64 / best(&mut || slabs.step()) / 1e9;
            line(format!(
                r#"{{"bench":"adamw","step_gbs":{step:.2},"copy_gbs":{copy:.2},"params":{}}}"#,
                64 << 20
            ));
        }
        // `cargo bench` without a name has nothing to compare with.
        _ => {}
    }
}

/// The best of several runs after a warm-up: what the machine can do when nothing disturbs it.
fn best(run: &mut dyn FnMut()) -> f64 {
    run();
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 5 || (start.elapsed().as_secs_f64() < 2.0 && runs < 200) {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
