//! Checkpoints on disks that are full, that stop, that are slow and that flip bits.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roundpipe::optim::AdamW;
use roundpipe::testing::{SaveTarget, ShardLimits, SpareMemory};
use roundpipe::{
    Bytes, Checkpoint, Checkpoints, DType, Lag, RingOptions, RoundPipe, RunConfig, Update,
};
use roundpipe_files::{Disk, DiskFile, SystemDisk};

use crate::checkpoints::Folder;
use crate::models;

/// How a disk fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// The n-th operation says that the disk is full; those behind it work.
    Once,
    /// From the n-th on the disk is full: only removing works.
    Full,
    /// At the n-th operation the machine stops: nothing happens any more. A write is torn.
    Crash,
}

/// A disk whose n-th operation fails. It also refuses to rename a folder that has not been flushed
/// with all that is in it.
#[derive(Debug, Clone)]
struct TestDisk(Arc<DiskState>);

#[derive(Debug)]
struct DiskState {
    fault: Fault,
    at: usize,
    wait: Duration,
    done: AtomicUsize,
    unflushed: Mutex<HashSet<PathBuf>>,
}

impl TestDisk {
    fn new(fault: Fault, at: usize) -> Self {
        Self::of(fault, at, Duration::ZERO)
    }

    /// One that works.
    fn sound() -> Self {
        Self::new(Fault::Once, usize::MAX)
    }

    /// One that works, slowly.
    fn slow(wait: Duration) -> Self {
        Self::of(Fault::Once, usize::MAX, wait)
    }

    fn of(fault: Fault, at: usize, wait: Duration) -> Self {
        Self(Arc::new(DiskState {
            fault,
            at,
            wait,
            done: AtomicUsize::new(0),
            unflushed: Mutex::default(),
        }))
    }

    /// Whether the fault has happened.
    fn has_failed(&self) -> bool {
        self.0.done.load(Ordering::SeqCst) > self.0.at
    }

    /// Counts an operation; its error, if it is to fail.
    fn count(&self, removes: bool) -> io::Result<()> {
        let number = self.0.done.fetch_add(1, Ordering::SeqCst);
        let fails = match self.0.fault {
            Fault::Once => number == self.0.at,
            Fault::Full => number >= self.0.at && !removes,
            Fault::Crash => number >= self.0.at,
        };
        match fails {
            true => Err(io::Error::from(io::ErrorKind::StorageFull)),
            false => Ok(()),
        }
    }

    fn changed(&self, path: &Path) {
        self.0.unflushed.lock().unwrap().insert(path.to_path_buf());
    }

    fn flushed(&self, path: &Path) {
        self.0.unflushed.lock().unwrap().remove(path);
    }
}

#[derive(Debug)]
struct TestFile {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    disk: TestDisk,
}

impl Disk for TestDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.count(false)?;
        self.changed(path);
        SystemDisk.create_folder(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.count(false)?;
        self.changed(path);
        self.changed(path.parent().unwrap());
        Ok(Box::new(TestFile {
            path: path.to_path_buf(),
            file: SystemDisk.create(path)?,
            disk: self.clone(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count(false)?;
        let name = from.file_name().unwrap().to_str().unwrap();
        if name.ends_with(".partial") {
            let unflushed = self.0.unflushed.lock().unwrap();
            let left: Vec<_> = unflushed
                .iter()
                .filter(|path| path.starts_with(from))
                .collect();
            assert!(
                left.is_empty(),
                "renamed before these were flushed: {left:?}"
            );
        }
        SystemDisk.rename(from, to)
    }

    fn flush_folder(&self, path: &Path) -> io::Result<()> {
        self.count(false)?;
        self.flushed(path);
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.count(true)?;
        self.flushed(path);
        SystemDisk.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.count(true)?;
        self.flushed(path);
        SystemDisk.remove_folder(path)
    }
}

impl DiskFile for TestFile {
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.disk.count(false)?;
        self.disk.changed(&self.path);
        self.file.set_len(bytes)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::thread::sleep(self.disk.0.wait);
        if let Err(error) = self.disk.count(false) {
            self.file.write_at(&bytes[..bytes.len() / 2], offset)?;
            return Err(error);
        }
        self.disk.changed(&self.path);
        self.file.write_at(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.count(false)?;
        self.disk.flushed(&self.path);
        Ok(())
    }
}

/// Files so small that even these checkpoints have several, in several lanes.
const SMALL: ShardLimits = ShardLimits {
    file_bytes: 700,
    lanes_from_bytes: 1000,
};

fn engine() -> RoundPipe {
    RoundPipe::builder(models::perceptron(DType::BF16))
        .optimizer(AdamW::default())
        .optimizer_threads(1)
        .seed(models::SEED)
        .run_config(RunConfig::default().num_microbatch(2))
        .devices(models::cpus(1))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

fn train(engine: &RoundPipe, step: u64, lag: Lag) -> u64 {
    let (x, weights) = models::numbers(step, 6, DType::BF16);
    let losses = engine.forward_backward(x, weights, models::weighted);
    engine.update(&Update::new(0.05), lag).unwrap();
    models::bits(&losses.unwrap())
}

fn checkpoints(folder: &Folder, disk: &TestDisk) -> Checkpoints {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    Checkpoints::open_on(&folder.path("run"), disk, SMALL).unwrap()
}

fn target(path: PathBuf, disk: &TestDisk) -> SaveTarget {
    SaveTarget {
        disk: Arc::new(disk.clone()),
        limits: SMALL,
        ..SaveTarget::new(&path)
    }
}

/// The names in a folder that are no checkpoints.
fn leftovers(folder: &Folder) -> Vec<String> {
    let names = roundpipe_files::folder::names(&folder.path("run")).unwrap();
    let is_other = |name: &String| !name.starts_with("step-") && name != "best";
    names.into_iter().filter(is_other).collect()
}

/// Whatever operation of a save fails, on a disk that is full for a moment, that stays full, or
/// where the machine stops: the checkpoint before is there, the new one is complete or absent,
/// training goes on, and the next save tidies up.
#[test]
fn every_operation_may_fail() {
    let engine = engine();
    for fault in [Fault::Once, Fault::Full, Fault::Crash] {
        let mut complete = 0;
        for at in 0.. {
            let place = format!("{fault:?} at operation {at}");
            let folder = Folder::new();
            let sound = TestDisk::sound();
            let before = checkpoints(&folder, &sound).keep_last(1);
            train(&engine, at as u64, Lag::One);
            before
                .save_best(&engine, 10, "old")
                .unwrap()
                .wait()
                .unwrap();

            let disk = TestDisk::new(fault, at);
            let run = checkpoints(&folder, &disk).keep_last(1);
            train(&engine, at as u64, Lag::One);
            let saving = run.save_best(&engine, 20, "new").unwrap();
            train(&engine, at as u64, Lag::One);
            let saved = saving.wait();
            train(&engine, at as u64, Lag::One);
            if !disk.has_failed() {
                assert!(saved.is_ok(), "{place}");
                assert!(at > 40, "only {at} operations");
                assert!(complete > 0, "some faults come behind the rename");
                break;
            }
            let warnings = engine.take_warnings();
            if let Err(error) = &saved {
                let text = error.to_string();
                assert_eq!(text.lines().count(), 1, "{text}");
                assert!(
                    text.contains("run/step-00000020") && text.contains("training goes on"),
                    "{text}"
                );
                assert!(text.contains("the checkpoint of step 10 stays"), "{text}");
                assert!(text.contains("no storage space"), "{text}");
                assert_eq!(warnings, [text]);
            }

            // What the next start finds, before it changes anything.
            let next = checkpoints(&folder, &sound).keep_last(1);
            let newest = next.newest().unwrap();
            assert_eq!(newest.skipped, [""; 0], "{place}");
            let found = newest.checkpoint.unwrap();
            let notes = found.notes().to_owned();
            assert_eq!(newest.step, if notes == "new" { 20 } else { 10 }, "{place}");
            if saved.is_ok() {
                assert_eq!(notes, "new", "{place}");
            }
            complete += u32::from(notes == "new");
            if fault != Fault::Crash && saved.is_err() && notes == "old" {
                assert_eq!(leftovers(&folder), [""; 0], "{place}");
            }
            let best = next.best().unwrap().unwrap();
            assert!(best == 10 || notes == "new", "{place}: the best is {best}");
            engine.restore_from(&found).unwrap();

            train(&engine, at as u64, Lag::One);
            next.save(&engine, 30, "next").unwrap().wait().unwrap();
            assert_eq!(leftovers(&folder), [""; 0], "{place}");
            let steps = next.steps().unwrap();
            assert_eq!(steps, [best, 30], "{place}: the best and the last stay");
            assert_eq!(next.newest().unwrap().checkpoint.unwrap().notes(), "next");
        }
    }
}

/// In a new folder, the second save leaves alone what the first is still writing.
#[test]
fn a_save_leaves_the_one_under_way() {
    let engine = engine();
    let folder = Folder::new();
    let run = checkpoints(&folder, &TestDisk::slow(Duration::from_millis(20)));
    train(&engine, 1, Lag::Zero);
    let first = run.save(&engine, 1, "first").unwrap();
    while !folder.path("run").join(".step-00000001.partial").exists() {
        assert!(!first.is_done(), "the disk is too fast for this test");
        std::thread::yield_now();
    }
    let second = run.save(&engine, 2, "second").unwrap();
    first.wait().unwrap();
    second.wait().unwrap();
    assert_eq!(run.steps().unwrap(), [1, 2]);
}

/// Whatever operation of a save over another fails: at its name, or where [`Checkpoint::open`] looks,
/// there is always a complete one.
#[test]
fn replacing_may_fail_at_every_operation() {
    let engine = engine();
    for fault in [Fault::Once, Fault::Full, Fault::Crash] {
        for at in 0.. {
            let place = format!("{fault:?} at operation {at}");
            let folder = Folder::new();
            let path = folder.path("c");
            let sound = TestDisk::sound();
            let save = |disk: &TestDisk, notes: &str| {
                train(&engine, at as u64, Lag::Zero);
                let saving = engine.save_to(target(path.clone(), disk), notes.to_owned());
                saving.unwrap().wait()
            };
            save(&sound, "old").unwrap();
            let disk = TestDisk::new(fault, at);
            let saved = save(&disk, "new");
            if !disk.has_failed() {
                saved.unwrap();
                break;
            }
            let found = Checkpoint::open(&path).unwrap();
            found.verify().unwrap();
            assert!(
                found.notes() == "new" || (saved.is_err() && found.notes() == "old"),
                "{place}"
            );
            engine.restore(&path).unwrap();
            save(&sound, "next").unwrap();
            assert_eq!(Checkpoint::open(&path).unwrap().notes(), "next", "{place}");
            assert_eq!(folder.names(), ["c"], "{place}");
        }
    }
}

/// While a slow disk takes a checkpoint, steps go on as far as they can: an update waits for the
/// layers that are still being read, or finds them copied into spare memory, and what is written is
/// one moment of the run.
#[test]
fn a_slow_save_is_one_moment_of_the_run() {
    let runs =
        [Lag::Zero, Lag::One].map(|lag| [Some(0), Some(4096), None].map(|spare| (lag, spare)));
    for (lag, spare) in runs.into_iter().flatten() {
        let whole = engine();
        let losses: Vec<u64> = (0..8).map(|step| train(&whole, step, lag)).collect();
        let folder = Folder::new();
        let saving = engine();
        let disk = TestDisk::slow(Duration::from_millis(4));
        let mut seen = Vec::new();
        let mut held_up = 0.0;
        for step in 0..8 {
            let path = folder.path(&format!("{step}"));
            let spare = SpareMemory {
                bytes: spare,
                after: Duration::ZERO,
            };
            let target = SaveTarget {
                spare,
                ..target(path, &disk)
            };
            let save = saving.save_to(target, String::new()).unwrap();
            seen.push(train(&saving, step, lag));
            held_up += match step {
                0..7 => 0.0,
                _ => save.wait().unwrap().held_up_seconds,
            };
        }
        assert_eq!(seen, losses, "{lag:?}");
        assert!(
            held_up > 0.0 || spare != Some(0),
            "the last update came before its save had read everything"
        );
        for step in 0..8 {
            let resumed = engine();
            resumed.restore(folder.path(&format!("{step}"))).unwrap();
            let rest: Vec<u64> = (step..8).map(|step| train(&resumed, step, lag)).collect();
            assert_eq!(rest, losses[step as usize..], "{lag:?} from {step}");
        }
    }
}

/// Of one checkpoint all bytes, by the names of its files.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let names = roundpipe_files::folder::names(dir).unwrap();
    let read = |name: &String| (dir.join(name), std::fs::read(dir.join(name)).unwrap());
    names.iter().map(read).collect()
}

/// A thousand flipped bits and two hundred truncations, in every file, and bytes or files too many
/// or too few: each is found, in a line that names the file, and the checkpoint before is used.
#[test]
fn all_damage_is_found() {
    let folder = Folder::new();
    let engine = engine();
    let disk = TestDisk::sound();
    let run = checkpoints(&folder, &disk);
    for step in [10, 20] {
        train(&engine, step, Lag::One);
        let notes = format!("{{\"step\": {step}}}");
        run.save(&engine, step, notes).unwrap().wait().unwrap();
    }
    let sound = files(&run.path(20));
    assert!(sound.len() > 4, "{} files", sound.len());
    let found = |what: &str, path: &Path| {
        let newest = checkpoints(&folder, &disk).newest().unwrap();
        assert_eq!((newest.step, newest.skipped.len()), (10, 1), "{what}");
        let line = &newest.skipped[0];
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(
            line.contains(name) && line.contains("step 20 is skipped"),
            "{what}: {line}"
        );
        assert_eq!(line.lines().count(), 1, "{line}");
        let error = engine.restore(run.path(20)).unwrap_err();
        assert!(error.to_string().contains(name), "{what}: {error}");
    };
    let before = models::params(&engine);
    let mut dice = models::Dice::new(3);
    for case in 0..1000 {
        let (path, bytes) = &sound[case % sound.len()];
        let bit = dice.below(bytes.len() * 8);
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(path, flipped).unwrap();
        found(&format!("bit {bit} of {}", path.display()), path);
        std::fs::write(path, bytes).unwrap();
    }
    for case in 0..200 {
        let (path, bytes) = &sound[case % sound.len()];
        let len = dice.below(bytes.len());
        std::fs::write(path, &bytes[..len]).unwrap();
        found(&format!("{len} bytes of {}", path.display()), path);
        std::fs::write(path, bytes).unwrap();
    }
    for (path, bytes) in &sound {
        std::fs::write(path, [bytes, &b"\n"[..]].concat()).unwrap();
        found("a byte too many", path);
        std::fs::remove_file(path).unwrap();
        found("no file", path);
        std::fs::create_dir(path).unwrap();
        found("a folder", path);
        std::fs::remove_dir(path).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    // Nothing of it came near the engine, and the sound one is found again.
    assert_eq!(models::params(&engine), before);
    let newest = run.newest().unwrap();
    assert_eq!((newest.step, newest.skipped.len()), (20, 0));
}

/// The last ones and the best stay; one that is known to be damaged counts as none, and is kept
/// until sound ones have taken its place.
#[test]
fn the_last_and_the_best_are_kept() {
    let folder = Folder::new();
    let engine = engine();
    let disk = TestDisk::sound();
    let run = checkpoints(&folder, &disk).keep_last(2);
    assert_eq!(run.steps().unwrap(), [0; 0]);
    assert!(run.newest().unwrap().checkpoint.is_none());
    assert!(
        run.mark_best(1)
            .unwrap_err()
            .to_string()
            .contains("save it first")
    );
    let save = |run: &Checkpoints, step| {
        train(&engine, step, Lag::Zero);
        run.save(&engine, step, "").unwrap().wait().unwrap();
    };
    for step in 1..=3 {
        save(&run, step);
    }
    assert_eq!(run.steps().unwrap(), [2, 3]);
    run.mark_best(2).unwrap();
    for step in 4..=6 {
        save(&run, step);
    }
    assert_eq!(run.steps().unwrap(), [2, 5, 6]);
    assert_eq!(run.best().unwrap(), Some(2));
    train(&engine, 7, Lag::Zero);
    run.save_best(&engine, 7, "").unwrap().wait().unwrap();
    assert_eq!(
        (run.steps().unwrap(), run.best().unwrap()),
        (vec![6, 7], Some(7))
    );

    // The next start finds 7 damaged and goes on from 6.
    std::fs::write(run.path(7).join("manifest.json"), "{}").unwrap();
    let run = checkpoints(&folder, &disk).keep_last(2);
    let newest = run.newest().unwrap();
    assert_eq!((newest.step, newest.skipped.len()), (6, 1));
    engine.restore_from(&newest.checkpoint.unwrap()).unwrap();
    std::fs::remove_file(folder.path("run/best")).unwrap();
    std::fs::create_dir(folder.path("run/mine")).unwrap();
    // A smaller step than the damaged one's, and a larger.
    save(&run, 6);
    assert_eq!(run.steps().unwrap(), [6, 7]);
    save(&run, 8);
    assert_eq!(run.steps().unwrap(), [6, 7, 8], "two sound ones");
    save(&run, 9);
    assert_eq!(run.steps().unwrap(), [8, 9]);
    assert!(folder.path("run/mine").exists(), "what is not ours stays");
}
