//! Random programs: sequences of calls to engines on one ring, with failures of every kind in them,
//! must give the same bits on one cpu worker, on three, and on simulated workers with any delays,
//! and these must be the bits of a plain loop.
//!
//! A program is a function of its seed. `ROUNDPIPE_SEEDS=0..10000` runs as many as one likes, also
//! split over processes; `ROUNDPIPE_WITHOUT=labels,chains` leaves classes of operations out
//! ([`program::Class`] lists them). A program that fails is printed in its shortest form.

mod judge;
mod models;
mod plain;
mod program;
mod run;

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use program::{Program, Without};
use run::{RINGS, RingKind, Watch};

/// Programs that run by default.
const SHARE: u64 = 150;
/// How long one program may take on all rings.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a program that fails may be made shorter.
const SHRINK_TIME: Duration = Duration::from_secs(30);
/// How often a program runs before it is taken for one that does not fail: delays are not all of
/// the seed's.
const TRIES: usize = 3;
/// Programs that are shown in full.
const SHOWN: usize = 3;

/// The seeds to run: a share, or what the environment asks for.
fn seeds(share: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("ROUNDPIPE_SEEDS") else {
        return share;
    };
    let range = text
        .split_once("..")
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or_else(|| panic!("ROUNDPIPE_SEEDS is `{text}`; write it as 0..1000"))
}

/// What went wrong with a program.
#[derive(Debug, Clone)]
enum Failure {
    /// Something was seen that cannot be.
    Wrong(RingKind, String),
    /// It did not end; what everyone was doing.
    Hung(String),
}

/// Runs a program on all rings, and gives up on it after a while.
fn attempt(program: &Program) -> Result<(), Failure> {
    let watch = Watch::default();
    let (done, result) = channel();
    let (program, watched) = (program.clone(), watch.clone());
    let body = move || {
        let verdicts = RINGS.iter().try_for_each(|ring| {
            let judged = catch_unwind(AssertUnwindSafe(|| {
                let trace = run::run(&program, *ring, &watched);
                judge::judge(&program, &trace)
            }));
            let judged =
                judged.unwrap_or_else(|panic| Err(format!("a panic: {}", panic_text(&*panic))));
            judged.map_err(|what| Failure::Wrong(*ring, what))
        });
        // Nobody listens any more once it took too long.
        let _ = done.send(verdicts);
    };
    let thread = std::thread::Builder::new()
        .name("program".to_owned())
        .spawn(body)
        .expect("a thread");
    match result.recv_timeout(PATIENCE) {
        Ok(verdict) => {
            thread.join().expect("it has sent its verdict");
            verdict
        }
        Err(RecvTimeoutError::Timeout) => Err(Failure::Hung(watch.report())),
        Err(RecvTimeoutError::Disconnected) => Err(Failure::Hung("the thread is gone".to_owned())),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}

/// The shortest program found that still fails, and how.
fn shrink(program: &Program, failure: Failure) -> (Program, Failure) {
    let end = Instant::now() + SHRINK_TIME;
    let (mut shortest, mut failure) = (program.clone(), failure);
    let mut size = shortest.ops.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        let mut shorter = false;
        while at < shortest.ops.len() && Instant::now() < end {
            let mut candidate = shortest.clone();
            candidate
                .ops
                .drain(at..(at + size).min(candidate.ops.len()));
            match (0..TRIES).find_map(|_| attempt(&candidate).err()) {
                Some(found) => {
                    (shortest, failure, shorter) = (candidate, found, true);
                }
                None => at += size,
            }
        }
        size = if shorter && size == 1 { 1 } else { size / 2 };
        if Instant::now() >= end {
            break;
        }
    }
    (shortest, failure)
}

/// Planned panics say nothing; all others as always.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !panic_text(info.payload()).starts_with("planned failure") {
                usual(info);
            }
        }));
    });
}

/// Runs the programs of some seeds, and tells of those that fail.
fn check(seeds: Range<u64>, without: &Without) {
    quiet();
    let mut told = Vec::new();
    let mut failed = Vec::new();
    for seed in seeds.clone() {
        let program = program::generate(seed, without);
        let Err(failure) = attempt(&program) else {
            continue;
        };
        failed.push(seed);
        match failure {
            Failure::Hung(doing) => {
                told.push(format!(
                    "a program did not end within {PATIENCE:?}\n{program}{doing}"
                ));
                break;
            }
            Failure::Wrong(ring, what) if told.len() >= SHOWN => {
                told.push(format!("seed {seed}, {ring:?}, {what}"));
            }
            failure => {
                let (shortest, failure) = shrink(&program, failure);
                told.push(format!("{failure:?}\n{shortest}"));
            }
        }
    }
    let (count, failures) = (seeds.end - seeds.start, failed.len());
    assert!(
        failed.is_empty(),
        "{failures} of {count} programs failed, {failed:?}\n\n{}",
        told.join("\n\n")
    );
}

#[test]
fn programs_give_the_same_bits_on_every_ring() {
    let without = std::env::var("ROUNDPIPE_WITHOUT").unwrap_or_default();
    check(seeds(0..SHARE), &Without::parse(&without));
}

/// The share that runs by default has every kind of operation and fault in it, so that none is
/// forgotten.
#[test]
fn the_share_has_everything() {
    let mut seen = BTreeSet::new();
    for seed in 0..SHARE {
        let program = program::generate(seed, &Without::default());
        seen.insert(if program.strict { "strict" } else { "loose" }.to_owned());
        for op in &program.ops {
            // Names of variants, in the order of the derived text, and what they are set to.
            let text = format!("{:?}", op.what);
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
            seen.extend(
                words
                    .filter(|word| word.starts_with(char::is_uppercase))
                    .map(str::to_owned),
            );
        }
        seen.extend(
            program
                .engines
                .iter()
                .map(|engine| format!("{:?}", engine.model)),
        );
        seen.extend(
            program
                .engines
                .iter()
                .map(|engine| format!("{:?}", engine.dtype)),
        );
    }
    let all = "strict loose Mlp Tied Embed Running Frozen F32 BF16 F16 Train Forward Read Backward Drop Chain Update Step \
               Synchronize Gradients Weights SetTraining Write Race Second Rebuild Loss Label Token Descend Shrink Fail \
               WriteNan NanInput InfInput NanLabel InfLabel CrossEntropy Weighted Front Back Zero One";
    let missing: Vec<&str> = all
        .split_whitespace()
        .filter(|word| !seen.contains(*word))
        .collect();
    assert_eq!(missing, Vec::<&str>::new());
}
