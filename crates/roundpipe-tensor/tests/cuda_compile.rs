//! CUDA kernels compile for every architecture we promise, without a GPU.
//!
//! Every variant is compiled for one architecture, in turn; the first of every kernel also for the
//! oldest and for Hopper, the last for the newest. Kernels with Hopper's own instructions are compiled
//! for Hopper alone. `ROUNDPIPE_KERNELS=all` compiles everything for
//! all of them. Where NVRTC is missing, this is skipped and says so; set `ROUNDPIPE_NVRTC=required`
//! to make that a failure.

#[path = "support/skip.rs"]
mod skip;

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe_tensor::cuda::compile::{self, Unit};
use roundpipe_tensor::cuda::units;

const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"];

/// What to compile for what.
fn jobs(units: &[Unit], all: bool) -> Vec<(usize, &'static str)> {
    let kernel = |unit: &Unit| {
        unit.name()
            .split(" [")
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let mut ends: HashMap<String, (usize, usize)> = HashMap::new();
    for (i, unit) in units.iter().enumerate() {
        ends.entry(kernel(unit))
            .and_modify(|(_, last)| *last = i)
            .or_insert((i, i));
    }
    let mut jobs = Vec::new();
    for (i, unit) in units.iter().enumerate() {
        if unit.is_for_hopper() {
            jobs.push((i, "sm_90a"));
            continue;
        }
        let (first, last) = ends[&kernel(unit)];
        let turn = ARCHITECTURES[i % ARCHITECTURES.len()];
        let is_wanted = |arch: &&str| {
            let is_first = i == first && matches!(*arch, "sm_80" | "sm_90");
            let is_last = i == last && *arch == "sm_120";
            all || *arch == turn || is_first || is_last
        };
        let wanted = ARCHITECTURES.into_iter().filter(is_wanted);
        jobs.extend(wanted.map(|arch| (i, arch)));
    }
    jobs
}

#[test]
fn kernels_compile_for_every_architecture() {
    let filter = std::env::var("ROUNDPIPE_KERNELS").unwrap_or_default();
    let all = filter == "all";
    let units: Vec<Unit> = units()
        .into_iter()
        .filter(|unit| all || unit.name().contains(&filter))
        .collect();
    if let Err(error) = compile::check(&units[0], ARCHITECTURES[0])
        && error.to_string().contains("libnvrtc is not here")
    {
        assert!(
            std::env::var("ROUNDPIPE_NVRTC").as_deref() != Ok("required"),
            "{error}"
        );
        skip::skipped(
            &format!("{} kernels are not compiled", units.len()),
            &error.to_string(),
        );
        return;
    }
    let jobs = jobs(&units, all);
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((unit, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = compile::check(&units[*unit], arch) {
                failures.lock().unwrap().push(format!("{arch}: {error}"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        jobs.len(),
        failures.join("\n")
    );
}
