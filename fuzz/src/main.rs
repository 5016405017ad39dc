//! The fuzzer: `fuzz --target=NAME [libFuzzer's flags] CORPUS...`. See "Fuzzing" in
//! CONTRIBUTING.md.
#![no_main]

use std::backtrace::Backtrace;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use roundpipe_fuzz::mutate::{Rng, mutate};
use roundpipe_fuzz::scratch::Scratch;
use roundpipe_fuzz::{Target, check, targets};

fuzz_target!(init: start(), |input: &[u8]| {
    let mut run = run();
    let Run { target, scratch, last } = &mut *run;
    let checked = std::panic::catch_unwind(AssertUnwindSafe(|| check(target, scratch, input)));
    if checked.is_err() {
        eprintln!("finding in {}: {}", target.name, last_panic());
        // libFuzzer keeps the input of a process that aborts.
        std::process::abort();
    }
    // The last input feeds the next mutation.
    last.clear();
    last.extend_from_slice(input);
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut rng = Rng::new(u64::from(seed));
    let run = run();
    if rng.one_in(4) {
        return fuzzer_mutate(data, size, max_size);
    }
    let new = mutate(run.target, &mut rng, &data[..size], &run.last, max_size);
    data[..new.len()].copy_from_slice(&new);
    new.len()
});

struct Run {
    target: &'static Target,
    scratch: Scratch,
    last: Vec<u8>,
}

static RUN: OnceLock<Mutex<Run>> = OnceLock::new();

fn run() -> MutexGuard<'static, Run> {
    RUN.get()
        .expect("libFuzzer starts us first")
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

fn start() {
    let named =
        std::env::args().find_map(|arg| arg.strip_prefix("--target=").and_then(targets::named));
    let Some(target) = named else {
        let known: Vec<&str> = targets::ALL.iter().map(|target| target.name).collect();
        eprintln!("give --target=NAME; there are {}", known.join(", "));
        std::process::exit(2);
    };
    // Work that is shared among threads runs here, where it is counted and repeatable.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread();
    pool.build_global().expect("a pool of one thread");
    // A panic that a parser catches itself is no finding: it is written down here and printed only
    // at the top.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic
            .location()
            .map(ToString::to_string)
            .unwrap_or_default();
        let what = panic.payload_as_str().unwrap_or("a panic");
        *last_panic() = format!("{what}\n  at {place}\n{}", Backtrace::capture());
    }));
    let scratch = Scratch::new(target.name);
    assert!(
        RUN.set(Mutex::new(Run {
            target,
            scratch,
            last: Vec::new()
        }))
        .is_ok(),
        "started once"
    );
}

fn last_panic() -> MutexGuard<'static, String> {
    static LAST: Mutex<String> = Mutex::new(String::new());
    LAST.lock().unwrap_or_else(PoisonError::into_inner)
}
