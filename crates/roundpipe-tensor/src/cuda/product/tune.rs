//! Which of the library's algorithms computes a shape: measured at its first use, and stored.
//!
//! The heuristic's candidates are timed on the real operands, and the fastest is written to a file
//! beside the kept kernels, `products-<device>-<library version>.txt`. Every later product of
//! that shape, in this process or another, takes the stored choice: a rerun and a resumed run make
//! the same choice and give the same bits. So do several processes that measure at once, since each
//! adds its line and then takes the first one of the file.
//!
//! `ROUNDPIPE_TUNE=off` leaves it at the heuristic's first, and so does a folder that cannot be
//! written: a choice that is not stored would not be made again. Products too small to matter are
//! not measured.
//!
//! # What it costs
//! The first call of a shape waits for its lane and runs each candidate some times, up to a few
//! hundred ms. No memory is taken but the driver's for the candidates' code: results go to the
//! workspace that the call has anyway, and where they are larger than that, a part of the product
//! is measured that fits. The call's own result is not touched. A candidate that fails, or wants
//! more than half of the workspace, is passed over.
//!
//! # Invariants
//! - A shape is chosen before it is computed for the first time, never anew in one process.
//! - Only algorithms that the heuristic proposes now are run: a stored line that is none of them
//!   counts as absent.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cublaslt::sys;
use cudarc::driver::result;

use super::lt::{Described, Key, LtCandidate, LtTask, ProductShape};
use crate::cuda::call::Call;
use crate::cuda::context::Gpu;
use crate::cuda::event::{RawEvent, elapsed_ms};
use crate::cuda::{compile, library};
use crate::error::Result;

/// Products of fewer multiplications are not measured: launching them takes as long.
const WORTH_MEASURING: usize = 1 << 24;

/// What is not slower than this times the fastest is as good: the heuristic's order decides.
const TIE: f32 = 1.02;

/// How long a sample takes at least, and how many are taken of each candidate.
const SAMPLE_MS: f32 = 0.2;
const SAMPLES: usize = 3;

/// Where a card's choices are stored.
#[derive(Default)]
pub(crate) struct Choices(OnceLock<Option<PathBuf>>);

impl Choices {
    /// `None` when nothing is to be measured.
    fn path(&self, gpu: &Gpu) -> Option<&Path> {
        let find = || {
            if std::env::var("ROUNDPIPE_TUNE").as_deref() == Ok("off") {
                return None;
            }
            let device = result::device::get_name(gpu.device).ok()?;
            let device = device.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
            // SAFETY: the call only reads a constant.
            let version = unsafe { library::cublaslt().ok()?.cublasLtGetVersion() };
            Some(compile::folder()?.join(format!("products-{device}-{version}.txt")))
        };
        self.0.get_or_init(find).as_deref()
    }
}

/// The algorithm for a task, of the heuristic's candidates in their order; there is one at least.
///
/// # Safety
/// The task's operands are as large as its shape says, and nothing else uses its workspace.
pub(super) unsafe fn choose(
    call: &Call<'_>,
    handle: sys::cublasLtHandle_t,
    task: &LtTask,
    found: &[LtCandidate],
) -> Result<usize> {
    let ProductShape {
        m, n, k, batches, ..
    } = task.key.shape;
    let size = [m, n, k].into_iter().fold(batches, usize::saturating_mul);
    let path = (found.len() > 1 && size >= WORTH_MEASURING)
        .then(|| call.gpu.products.choices.path(call.gpu));
    let Some(path) = path.flatten() else {
        return Ok(0);
    };
    // SAFETY: the caller's promise.
    stored_or_measured(path, &name(&task.key), found, || unsafe {
        measure(call, handle, task, found)
    })
}

/// What the file says of a shape, after what was measured is added to it where it says nothing.
fn stored_or_measured(
    path: &Path,
    key: &str,
    found: &[LtCandidate],
    measure: impl FnOnce() -> Result<usize>,
) -> Result<usize> {
    if let Some(known) = stored(path, key, found) {
        return Ok(known);
    }
    // First, since what cannot be stored is not worth measuring: the next process would measure it
    // again.
    let Some(file) = open(path) else { return Ok(0) };
    let fastest = measure()?;
    add(file, key, &found[fastest]);
    Ok(stored(path, key, found).unwrap_or(0))
}

/// A shape in the file.
fn name(key: &Key) -> String {
    let ProductShape {
        m,
        n,
        k,
        batches,
        steps,
    } = key.shape;
    let [a, b] = key
        .lies
        .map(|lie| format!("{}{}", if lie.transposed { 't' } else { 'n' }, lie.line));
    let [src, dst] = key.types;
    let aligned = key.aligned;
    let mut name =
        format!("{src} {dst} {m}x{n}x{k} {a} {b} batches {batches} {steps:?} aligned {aligned:?}");
    let _ = write!(
        name,
        " bias {} beta {}",
        u8::from(key.has_bias),
        u8::from(!key.overwrites)
    );
    let _ = write!(name, " workspace {}", key.workspace);
    if let Some(codes) = key.fp8 {
        let scaled = u8::from(codes.applies_scales);
        let _ = write!(name, " {} {} scaled {scaled}", codes.left, codes.right);
    }
    name
}

fn hex(candidate: &LtCandidate) -> String {
    candidate
        .algorithm
        .data
        .iter()
        .map(|word| format!("{word:016x}"))
        .collect()
}

/// `key = algorithm sum`, without its end.
fn line(key: &str, candidate: &LtCandidate) -> String {
    let text = format!("{key} = {}", hex(candidate));
    let sum = compile::hash([text.as_bytes()]) as u32;
    format!("{text} {sum:08x}")
}

/// The candidate on the first line that names the shape and a candidate; broken lines name none.
fn stored(path: &Path, key: &str, found: &[LtCandidate]) -> Option<usize> {
    let file = std::fs::read(path).ok()?;
    let lines: Vec<String> = found.iter().map(|candidate| line(key, candidate)).collect();
    let known = |text: &[u8]| {
        lines
            .iter()
            .position(|line| line.as_bytes() == text.trim_ascii_end())
    };
    file.split(|byte| *byte == b'\n').find_map(known)
}

/// The file to add lines to; `None` where nothing can be stored.
fn open(path: &Path) -> Option<File> {
    std::fs::create_dir_all(path.parent()?).ok()?;
    std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .ok()
}

/// Adds a line, in one piece. The end before it closes what a process that died may have left.
fn add(mut file: File, key: &str, candidate: &LtCandidate) {
    let _ = file.write_all(format!("\n{}\n", line(key, candidate)).as_bytes());
}

/// The first of the candidates that are as good as the fastest; those without a time failed.
fn pick(times: &[Option<f32>]) -> usize {
    let fastest = times
        .iter()
        .flatten()
        .copied()
        .fold(f32::INFINITY, f32::min);
    times
        .iter()
        .position(|time| time.is_some_and(|time| time <= fastest * TIE))
        .unwrap_or(0)
}

/// Sizes of which a result of `element` bytes fits into `room`: whole matrices where one fits, a
/// part of one else.
fn part(shape: ProductShape, element: usize, room: usize) -> Option<ProductShape> {
    let (mut m, mut n) = (shape.m, shape.n);
    let bytes = |m: usize, n: usize| m.saturating_mul(n).saturating_mul(element);
    let half = |size: usize| size.div_ceil(2).next_multiple_of(64);
    while bytes(m, n) > room {
        if m.max(n) <= 64 {
            return None;
        }
        if m >= n { m = half(m) } else { n = half(n) }
    }
    let batches = (room / bytes(m, n).max(1)).clamp(1, shape.batches);
    let [a, b, _] = shape.steps;
    Some(ProductShape {
        m,
        n,
        batches,
        steps: [a, b, (m * n) as i64],
        ..shape
    })
}

/// Times the candidates with results in the workspace.
///
/// # Safety
/// As [`choose`].
unsafe fn measure(
    call: &Call<'_>,
    handle: sys::cublasLtHandle_t,
    task: &LtTask,
    found: &[LtCandidate],
) -> Result<usize> {
    let whole = task.key.workspace;
    let able = |candidate: &LtCandidate| candidate.workspace <= whole / 2;
    let own = found
        .iter()
        .filter(|c| able(c))
        .map(|c| c.workspace)
        .max()
        .unwrap_or(0)
        .next_multiple_of(256);
    let part = part(
        task.key.shape,
        task.key.types[1].size(),
        whole - own.min(whole),
    );
    let (true, Some(shape)) = (able(&found[0]), part) else {
        return Ok(0);
    };
    // The algorithms' own workspace first, the results behind it.
    let key = Key {
        shape,
        workspace: own,
        ..task.key
    };
    let trial = task.of(key, task.workspace + own as u64);
    let Ok(described) = Described::new(&trial) else {
        return Ok(0);
    };
    let clock = Stopwatch::new(call)?;
    let sample = |candidate: &LtCandidate, count: usize| -> Result<Option<f32>> {
        clock.start()?;
        for _ in 0..count {
            // SAFETY: a part of the task's operands is read; workspace and result lie in the task's
            // workspace.
            let queued =
                unsafe { described.queue(handle, call.stream, &trial, &candidate.algorithm) };
            if queued.is_err() {
                return Ok(None);
            }
        }
        Ok(Some(clock.stop()? / count as f32))
    };
    let mut times = vec![None; found.len()];
    for (time, candidate) in times
        .iter_mut()
        .zip(found)
        .filter(|(_, candidate)| able(candidate))
    {
        // The first run loads the code.
        if sample(candidate, 1)?.is_some() {
            *time = sample(candidate, 1)?;
        }
    }
    let fastest = times
        .iter()
        .flatten()
        .copied()
        .fold(f32::INFINITY, f32::min);
    let count = (SAMPLE_MS / fastest.max(1e-3)).ceil().clamp(1.0, 32.0) as usize;
    times
        .iter_mut()
        .for_each(|time| *time = time.filter(|time| *time <= 2.0 * fastest));
    let rivals: Vec<usize> = (0..found.len()).filter(|i| times[*i].is_some()).collect();
    let mut best = vec![None; found.len()];
    // In turns, so that a clock that drifts favours no candidate.
    for _ in 0..SAMPLES {
        for i in &rivals {
            let time = sample(&found[*i], count)?;
            best[*i] = time.map(|time| best[*i].map_or(time, |best: f32| best.min(time)));
        }
    }
    Ok(pick(&best))
}

/// Two events around what is timed.
struct Stopwatch<'a> {
    call: &'a Call<'a>,
    events: [RawEvent; 2],
}

impl<'a> Stopwatch<'a> {
    fn new(call: &'a Call<'a>) -> Result<Self> {
        Ok(Self {
            call,
            events: [call.gpu.event(true)?, call.gpu.event(true)?],
        })
    }

    fn record(&self, at: usize) -> Result<()> {
        // SAFETY: event and stream belong to the current context.
        let recorded = unsafe { result::event::record(self.events[at].0, self.call.stream) };
        recorded.map_err(|e| self.call.gpu.failed("time a product", e))
    }

    fn start(&self) -> Result<()> {
        self.record(0)
    }

    /// Milliseconds since the start, when all of it is done.
    fn stop(&self) -> Result<f32> {
        self.record(1)?;
        let [start, end] = self.events;
        // SAFETY: both events are alive and recorded.
        let time =
            unsafe { result::event::synchronize(end.0).and_then(|()| elapsed_ms(start, end)) };
        time.map_err(|e| self.call.gpu.failed("time a product", e))
    }
}

impl Drop for Stopwatch<'_> {
    fn drop(&mut self) {
        for event in self.events {
            // SAFETY: made in `new`, destroyed once; the driver keeps what is under way.
            let _ = unsafe { result::event::destroy(event.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use super::super::lt::{LtCandidate, ProductShape};
    use super::{line, open, part, pick, stored, stored_or_measured};

    fn candidate(number: u64) -> LtCandidate {
        let mut candidate = LtCandidate::default();
        candidate.algorithm.data[3] = number;
        candidate
    }

    /// Noise must not decide: what is nearly as fast goes to the heuristic's order.
    #[test]
    fn ties_go_to_the_heuristics_order() {
        assert_eq!(pick(&[Some(1.01), Some(1.0), Some(1.0)]), 0);
        assert_eq!(pick(&[Some(1.03), Some(1.0), Some(0.99)]), 1);
        assert_eq!(pick(&[None, Some(2.0), Some(1.0)]), 2);
        assert_eq!(pick(&[None, None]), 0, "nothing could be timed");
    }

    /// What is measured fits where it goes, and is the whole where that fits.
    #[test]
    fn a_part_fits_the_room() {
        let shape = |m, n, batches| ProductShape {
            m,
            n,
            k: 512,
            batches,
            steps: [7, 8, (m * n) as i64],
        };
        assert_eq!(
            part(shape(300, 200, 5), 2, 1 << 20),
            Some(shape(300, 200, 5))
        );
        assert_eq!(
            part(shape(300, 200, 20), 4, 1 << 20),
            Some(shape(300, 200, 4))
        );
        assert_eq!(
            part(shape(16_384, 2048, 1), 2, 32 << 20),
            Some(shape(8192, 2048, 1))
        );
        for (m, n) in [
            (16_384, 151_936),
            (151_936, 1),
            (1, 10_000_000),
            (65, 65),
            (100_000, 100_000),
        ] {
            let cut = part(shape(m, n, 3), 4, 1 << 20).unwrap();
            assert!(
                cut.m <= m.next_multiple_of(64) && cut.n <= n.next_multiple_of(64),
                "{m} x {n}"
            );
            assert!(
                cut.m <= m && cut.n <= n && cut.m * cut.n * cut.batches * 4 <= 1 << 20,
                "{m} x {n}: {cut:?}"
            );
        }
        assert_eq!(part(shape(64, 64, 1), 4, 100), None);
    }

    /// The first line counts for every reader; broken or outdated lines are passed over.
    #[test]
    fn every_reader_takes_the_first_stored_line() {
        let folder = std::env::temp_dir().join(format!("roundpipe-tune-{}", std::process::id()));
        let path = folder.join("new").join("products.txt");
        let found = [candidate(1), candidate(2), candidate(3)];
        assert_eq!(stored(&path, "a", &found), None, "there is no file yet");
        let add = |path: &Path, key: &str, candidate: &LtCandidate| {
            super::add(open(path).unwrap(), key, candidate);
        };
        add(&path, "a", &candidate(9));
        assert_eq!(stored(&path, "a", &found), None, "no candidate of today");
        // Half a line of a process that died, then a line with a digit changed.
        let broken = line("a", &candidate(3)).replacen('3', "1", 1);
        std::fs::write(
            &path,
            [
                &std::fs::read(&path).unwrap()[..],
                broken.as_bytes(),
                b"\na = 00\xff",
            ]
            .concat(),
        )
        .unwrap();
        assert_eq!(stored(&path, "a", &found), None, "broken lines");
        add(&path, "a", &found[1]);
        add(&path, "a", &found[0]);
        add(&path, "b", &found[2]);
        assert_eq!(stored(&path, "a", &found), Some(1));
        assert_eq!(stored(&path, "b", &found), Some(2));
        assert_eq!(stored(&path, "c", &found), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// A shape is measured once where that can be stored, and never where it cannot.
    #[test]
    fn what_cannot_be_stored_is_not_measured() {
        let folder =
            std::env::temp_dir().join(format!("roundpipe-tune-choice-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let found = [candidate(1), candidate(2)];
        let count = Cell::new(0);
        let measure = || {
            count.set(count.get() + 1);
            Ok(1)
        };
        let good = folder.join("new").join("products.txt");
        for _ in 0..2 {
            assert_eq!(stored_or_measured(&good, "a", &found, measure).unwrap(), 1);
        }
        assert_eq!(count.get(), 1, "the second time it is read");
        // A file where the folder should be stops every user, root included.
        std::fs::write(folder.join("file"), "").unwrap();
        let bad = folder.join("file").join("products.txt");
        assert_eq!(stored_or_measured(&bad, "a", &found, measure).unwrap(), 0);
        assert_eq!(count.get(), 1, "measured for nothing");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
