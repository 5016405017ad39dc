//! Fuzz bodies: what each parser of other people's files must bear, whoever makes the inputs.
//!
//! libFuzzer (`main.rs`) and an ordinary test (`crates/roundpipe-models/tests/fuzz_corpus.rs`) call
//! the same [`check`]. An input is a file, or several in one text ([`bundle`]); [`mutate`] makes
//! new inputs from old ones and knows their structure.
//!
//! # What an execution must hold
//! - No panic, no abort, no endless loop; what is refused is refused in one line of bounded length.
//! - At most [`Target::room`] bytes of heap at once.
//! - Nothing is left behind: the heap is afterwards as it was before.
#![allow(dead_code, reason = "the test and the fuzzer use different parts")]

pub mod bundle;
#[path = "../../crates/roundpipe-tensor/tests/support/heap.rs"]
pub mod heap;
pub mod json;
pub mod mutate;
pub mod scratch;
pub mod targets;

use scratch::Scratch;

/// A parser, how it is run, and the memory it may take.
pub struct Target {
    /// Name on the command line and of the corpus' folder.
    pub name: &'static str,
    /// The files that a bundle for it may hold; an input that is no bundle is the first.
    pub files: &'static [&'static str],
    /// Bytes of heap that every execution may take.
    pub heap_bytes: usize,
    /// Further bytes of heap for each byte of the input.
    pub heap_per_byte: usize,
    /// Names and values that occur in such files, a line each.
    pub words: &'static str,
    /// What the files hold, for mutations.
    pub syntax: Syntax,
    /// Parses the input and uses what came out; whether it was accepted.
    pub run: fn(&mut Scratch, &[u8]) -> bool,
}

/// What inputs look like inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// JSON in each file of a bundle.
    Json,
    /// A template's text.
    Template,
    /// Choices that a generator reads one by one.
    Choices,
}

impl Target {
    /// Bytes of heap that an execution with so long an input may take.
    pub fn room(&self, input: usize) -> usize {
        self.heap_bytes + self.heap_per_byte * input
    }
}

/// How often an input that left something behind is run again. Regular expressions keep a cache for
/// each of eight groups of threads, and every execution of a tokenizer has a thread of its own, so
/// it takes a while until all are there.
const LEAK_RUNS: usize = 64;

/// Runs a target on an input; whether the input was accepted. Nothing else may run beside it: the
/// heap's counts are the process's.
///
/// # Panics
/// When the target panics, takes more heap than it may, or leaves some behind. A request beyond the
/// limit that the code cannot refuse aborts, as it would where memory ends.
pub fn check(target: &Target, scratch: &mut Scratch, input: &[u8]) -> bool {
    let mut left = Vec::new();
    // A cache that fills leaves something a few times, a leak every time.
    for _ in 0..=LEAK_RUNS {
        let (accepted, bytes) = once(target, scratch, input);
        if bytes == 0 {
            return accepted;
        }
        left.push(bytes);
    }
    panic!("leak: every execution of this input leaves some bytes behind: {left:?}");
}

/// One execution: whether the input was accepted, and the bytes that were left behind.
fn once(target: &Target, scratch: &mut Scratch, input: &[u8]) -> (bool, usize) {
    let room = target.room(input.len());
    let before = heap::live();
    heap::start(room);
    let accepted = (target.run)(scratch, input);
    let (_, refused) = heap::stop();
    assert!(
        refused == 0,
        "memory: {refused} bytes more were asked for, {room} in all are allowed"
    );
    (accepted, heap::live().saturating_sub(before))
}
