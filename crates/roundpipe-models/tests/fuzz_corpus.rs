//! A share of the fuzzing that `fuzz/run` does for hours: every input of the committed corpora, and
//! seeded changes of them, through the same bodies.
//!
//! `ROUNDPIPE_FUZZ_CASES=100000` makes more changes per parser than the default. The input of a
//! failure stays behind, also where the process ended: `roundpipe-fuzz-NAME-PID.input` in
//! `ROUNDPIPE_FUZZ_DIR` or, unless set, in /dev/shm or the system's temporary folder.

#[path = "../../../fuzz/src/lib.rs"]
mod fuzz;

use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fuzz::mutate::{Rng, mutate};
use fuzz::scratch::Scratch;
use fuzz::{Syntax, Target, check, targets};

/// Changed inputs per parser.
const CASES: u64 = 1500;
/// Longest changed input, in bytes.
const LONGEST: usize = 1 << 14;

/// The heap's counts are the process's, so nothing runs beside a measurement.
static ALONE: Mutex<()> = Mutex::new(());

/// The inputs of a corpus, in an order that is the same everywhere.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect()
}

fn cases() -> u64 {
    std::env::var("ROUNDPIPE_FUZZ_CASES")
        .map_or(CASES, |cases| cases.parse().expect("a number of cases"))
}

/// Runs the corpus of a parser and changes of it.
fn share(name: &str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let target = targets::named(name).unwrap();
    let seeds = corpus(name);
    assert!(!seeds.is_empty(), "{name} has no corpus");
    let mut scratch = Scratch::new(name);
    let accepted = seeds
        .iter()
        .filter(|input| run(target, &mut scratch, input))
        .count();
    assert!(
        accepted > 0,
        "{name} refuses its whole corpus, so nothing behind the door is tested"
    );
    for seed in 0..cases() {
        let mut rng = Rng::new(seed);
        let [from, other] = [(); 2].map(|()| rng.pick(&seeds).unwrap());
        run(
            target,
            &mut scratch,
            &mutate(target, &mut rng, from, other, LONGEST),
        );
    }
}

/// Whether the input was accepted.
fn run(target: &Target, scratch: &mut Scratch, input: &[u8]) -> bool {
    // Written first: an abort leaves no time to.
    scratch.keep(input);
    catch_unwind(AssertUnwindSafe(|| check(target, scratch, input))).unwrap_or_else(|_| {
        panic!(
            "{} fails with the input {}",
            target.name,
            scratch.kept().display()
        )
    })
}

#[test]
fn safetensors() {
    share("safetensors");
}

#[test]
fn index() {
    share("index");
}

#[test]
fn config() {
    share("config");
}

#[test]
fn tokenizer() {
    share("tokenizer");
}

#[test]
fn template() {
    share("template");
}

#[test]
fn template_grammar() {
    share("template_grammar");
}

#[test]
fn adapter() {
    share("adapter");
}

/// Every parser is tested here and by the script, and its inputs are committed.
#[test]
fn no_parser_is_forgotten() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let here = include_str!("fuzz_corpus.rs");
    let script = include_str!("../../../fuzz/run");
    let listed = script
        .lines()
        .find(|line| line.starts_with("all="))
        .unwrap();
    for target in targets::ALL {
        assert!(
            here.contains(&format!("share(\"{}\")", target.name)),
            "{}",
            target.name
        );
        assert!(
            listed.split(['"', ' ']).any(|word| word == target.name),
            "{}",
            target.name
        );
        assert!(!corpus(target.name).is_empty(), "{}", target.name);
    }
}

/// What a body of this kind is said to do wrong. The caller holds [`ALONE`].
fn complaint(run: fn(&mut Scratch, &[u8]) -> bool) -> Option<String> {
    let target = Target {
        name: "made-up",
        files: &["x"],
        heap_bytes: 1 << 16,
        heap_per_byte: 1,
        words: "",
        syntax: Syntax::Choices,
        run,
    };
    let mut scratch = Scratch::new("made-up");
    let caught = catch_unwind(AssertUnwindSafe(|| check(&target, &mut scratch, b"input"))).err()?;
    Some(caught.downcast_ref::<String>().cloned().unwrap_or_default())
}

/// A leak, and memory beyond the limit even where the code itself copes with having none, are
/// findings; what is given back in time, and what is made once for all, are not.
#[test]
fn faults_are_found() {
    // Also around the assertions: a panic takes memory that another test would count as its own.
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // More than the harness gives back in its own thread meanwhile.
    let leaks = |_: &mut Scratch, input: &[u8]| {
        black_box(Box::leak(vec![input[0]; 1 << 14].into_boxed_slice())).is_empty()
    };
    let greedy = |_: &mut Scratch, _: &[u8]| Vec::<u8>::new().try_reserve_exact(1 << 17).is_ok();
    let modest =
        |_: &mut Scratch, input: &[u8]| black_box(vec![input[0]; 1 << 15]).len() == 1 << 15;
    let once = |_: &mut Scratch, _: &[u8]| {
        static CACHE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        CACHE.get_or_init(|| vec![1; 64]).len() == 64
    };
    assert!(complaint(leaks).unwrap().starts_with("leak"));
    assert!(complaint(greedy).unwrap().starts_with("memory"));
    assert_eq!(complaint(modest), None);
    assert_eq!(complaint(once), None);
}

/// A bundle is taken apart into what it was put together from, and changes of a seed are always the
/// same.
#[test]
fn inputs_are_repeatable() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for target in targets::ALL {
        for input in corpus(target.name) {
            if input.starts_with(b"@@ ") {
                assert_eq!(
                    fuzz::bundle::join(&fuzz::bundle::parts(&input, "x")),
                    input,
                    "{}",
                    target.name
                );
            }
            let change = |seed| mutate(target, &mut Rng::new(seed), &input, &[], LONGEST);
            assert_eq!(change(7), change(7));
        }
    }
}
