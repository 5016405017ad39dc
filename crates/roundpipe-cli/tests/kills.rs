//! Runs that are killed, stopped, started twice or run out of disk: none is ever unreadable, and
//! each ends with the losses and the files of a run that nobody disturbed.
//!
//! A share runs by default. All of it:
//! `ROUNDPIPE_KILLS=300 cargo test --release -p roundpipe-cli --test kills -- --ignored --nocapture all`

mod kit;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use kit::{Run, files, last_step, losses, metrics, program, send, send_to, text};
use roundpipe::Checkpoints;

/// Steps of a run, and between its saves.
const STEPS: u64 = 40;
const SAVE_EVERY: u64 = 3;
/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Random numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// What a run leaves: its losses and its model.
#[derive(PartialEq)]
struct Trace {
    losses: Vec<f64>,
    model: BTreeMap<String, Vec<u8>>,
}

impl Trace {
    fn of(run: &Path) -> Self {
        Self {
            losses: losses(run),
            model: files(&run.join("model")),
        }
    }

    fn assert_same(&self, other: &Self, what: &str) {
        assert_eq!(self.losses, other.losses, "{what}: losses");
        assert!(
            self.model == other.model,
            "{what}: the model's files differ"
        );
    }
}

/// A model, data and settings of which many runs are made.
struct Bench {
    run: Run,
    arguments: Vec<String>,
}

impl Bench {
    fn new(name: &str, settings: &[&str]) -> Self {
        let run = Run::new(name);
        let steps = format!("steps={STEPS}");
        let save_every = format!("save_every={SAVE_EVERY}");
        let mut arguments = vec!["train".to_owned(), run.model(), run.chats(30)];
        let common = [&steps, &save_every, "batch=2", "microbatches=2", "seq=64"];
        let quick = [
            "sample_every=0",
            "validation=4",
            "eval_every=7",
            "gpu_memory=128MiB",
        ];
        let all = common.iter().chain(&quick).chain(settings);
        arguments.extend(all.map(ToString::to_string));
        Self { run, arguments }
    }

    fn folder(&self, name: &str) -> PathBuf {
        PathBuf::from(self.run.path(name))
    }

    fn command(&self, out: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roundpipe"));
        command.args(&self.arguments).args(more);
        command.arg("--out").arg(out);
        command
    }

    fn start(&self, out: &Path, more: &[&str]) -> Child {
        let mut command = self.command(out, more);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program starts")
    }

    /// A run that nobody disturbs.
    fn whole(&self, name: &str) -> Trace {
        let out = self.folder(name);
        let output = self.command(&out, &["devices=cpu"]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        Trace::of(&out)
    }
}

/// Waits until something is so, or the program has ended; whether it has.
fn wait_until(child: &mut Child, mut is_so: impl FnMut() -> bool) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if is_so() {
            return None;
        }
        assert!(start.elapsed() < PATIENCE, "the program does nothing");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Checkpoints that are being written, or that a kill left so, each with the time of its last change.
fn partial(out: &Path) -> BTreeSet<(String, SystemTime)> {
    let entries = fs::read_dir(out.join("checkpoints"));
    let entries = entries.into_iter().flatten().flatten();
    let changed = |entry: fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let time = entry.metadata().and_then(|meta| meta.modified()).ok()?;
        name.starts_with('.').then_some((name, time))
    };
    entries.filter_map(changed).collect()
}

/// The moment at which a program is stopped.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// So many milliseconds behind its start.
    Early(u64),
    /// When so many more steps were told, and some microseconds later.
    Step(u64, u64),
    /// During the save after this many more steps, some microseconds behind its beginning.
    Save(u64, u64),
    /// While the result is written.
    Result,
}

impl Moment {
    /// Half of them are aimed at a save.
    fn choose(random: &mut Random) -> Self {
        match random.below(20) {
            // More often near the beginning: a save takes one millisecond, or many.
            0..10 => {
                let most = 1 + random.below(4000);
                Self::Save(random.below(7), random.below(most))
            }
            10..12 => Self::Early(random.below(400)),
            12 => Self::Result,
            _ => Self::Step(random.below(9), random.below(8000)),
        }
    }

    /// Waits for it; the status of a program that ended before.
    fn wait(
        self,
        child: &mut Child,
        out: &Path,
        left: &BTreeSet<(String, SystemTime)>,
    ) -> Option<ExitStatus> {
        let told = |_: ()| last_step(out, "step");
        let first = told(());
        let (ended, rest) = match self {
            Self::Early(millis) => (child.try_wait().unwrap(), 1000 * millis),
            Self::Step(more, rest) => (wait_until(child, || told(()) > first + more), rest),
            Self::Save(more, rest) => {
                let ended = wait_until(child, || told(()) >= first + more);
                let ended = ended.or_else(|| wait_until(child, || !partial(out).is_subset(left)));
                (ended, rest)
            }
            Self::Result => (wait_until(child, || out.join("model.partial").exists()), 0),
        };
        if ended.is_none() {
            std::thread::sleep(Duration::from_micros(rest));
        }
        ended
    }
}

/// How often what was seen.
#[derive(Debug, Default)]
struct Counts {
    killed: u64,
    /// Kills that left a checkpoint half written.
    torn: u64,
    /// Kills before the first step of a start.
    before_a_step: u64,
    /// Kills that left half a result.
    results: u64,
    runs: u64,
    /// Steps to make again, at most.
    most_lost: u64,
    /// Kills that lost no more than an interval.
    within_one_interval: u64,
}

/// Looks at what a kill left: the newest checkpoint verifies, and it is not far behind.
fn look_at(out: &Path, left: &BTreeSet<(String, SystemTime)>, counts: &mut Counts, what: &str) {
    counts.torn += u64::from(!partial(out).is_subset(left));
    counts.results += u64::from(out.join("model.partial").exists());
    let checkpoints = Checkpoints::open(out.join("checkpoints")).unwrap();
    let newest = checkpoints.newest().unwrap();
    assert!(newest.skipped.is_empty(), "{what}: {:?}", newest.skipped);
    let told = last_step(out, "step");
    // What was said to be saved is there.
    let said = last_step(out, "save");
    assert!(
        newest.step >= said,
        "{what}: step {said} was saved, and {} is there",
        newest.step
    );
    // A save is complete before the next is ordered, and is written beside the steps of its interval.
    // So what is made again is one interval, and the steps beside the save under way, of which there
    // are many only when saves take as long as here.
    let lost = told.saturating_sub(newest.step);
    assert!(
        lost <= 2 * SAVE_EVERY,
        "{what}: {told} told, {} saved",
        newest.step
    );
    counts.within_one_interval += u64::from(lost <= SAVE_EVERY);
    counts.most_lost = counts.most_lost.max(lost);
}

/// Kills runs at `kills` moments, each again and again until it ends; then it is the whole run's
/// equal.
fn kill_runs(bench: &Bench, whole: &Trace, kills: u64, seed: u64) -> Counts {
    let mut random = Random(seed);
    let mut counts = Counts::default();
    while counts.killed < kills {
        let out = bench.folder(&format!("killed-{}", counts.runs));
        loop {
            let workers = format!("devices=cpu:{}", 1 + random.below(3));
            let left = partial(&out);
            let mut child = bench.start(&out, &[&workers]);
            let moment = Moment::choose(&mut random);
            let what = format!("seed {seed}, kill {}, {moment:?}", counts.killed);
            let is_over = counts.killed >= kills;
            let ended = if is_over {
                None
            } else {
                moment.wait(&mut child, &out, &left)
            };
            if ended.is_none() && !is_over {
                let before = metrics(&out).len();
                child.kill().unwrap();
                let output = child.wait_with_output().unwrap();
                if output.status.code().is_none() {
                    counts.killed += 1;
                    counts.before_a_step += u64::from(before == 0);
                    look_at(&out, &left, &mut counts, &what);
                    continue;
                }
                assert!(output.status.success(), "{what}: {}", text(&output.stderr));
                break;
            }
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{what}: {}", text(&output.stderr));
            break;
        }
        counts.runs += 1;
        whole.assert_same(
            &Trace::of(&out),
            &format!("seed {seed}, run {}", counts.runs),
        );
        fs::remove_dir_all(&out).unwrap();
    }
    counts
}

/// Stops runs with SIGTERM at random moments: nothing that was told is lost, and they go on.
fn stop_runs(bench: &Bench, whole: &Trace, stops: u64, seed: u64) -> Counts {
    let mut random = Random(seed);
    let mut counts = Counts::default();
    while counts.killed < stops {
        let out = bench.folder(&format!("stopped-{}", counts.runs));
        loop {
            let workers = format!("devices=cpu:{}", 1 + random.below(3));
            let left = partial(&out);
            let mut child = bench.start(&out, &[&workers]);
            let moment = match random.below(5) {
                0 => Moment::Early(random.below(400)),
                1 => Moment::Save(random.below(7), random.below(6000)),
                _ => Moment::Step(random.below(9), random.below(8000)),
            };
            let what = format!("seed {seed}, stop {}, {moment:?}", counts.killed);
            let is_over = counts.killed >= stops;
            if !is_over && moment.wait(&mut child, &out, &left).is_none() {
                send("-TERM", &child);
            }
            let output = child.wait_with_output().unwrap();
            let error = text(&output.stderr);
            match output.status.code() {
                Some(0) => break,
                Some(4) => {
                    assert!(error.contains("goes on"), "{what}: {error}");
                    counts.killed += 1;
                    look_at(&out, &left, &mut counts, &what);
                    let newest = Checkpoints::open(out.join("checkpoints")).unwrap();
                    let newest = newest.newest().unwrap().step;
                    assert_eq!(newest, last_step(&out, "step"), "{what}: {error}");
                }
                // Before the program listens to signals.
                None if matches!(moment, Moment::Early(_)) => {}
                code => panic!("{what}: {code:?} {error}"),
            }
        }
        counts.runs += 1;
        whole.assert_same(
            &Trace::of(&out),
            &format!("seed {seed}, run {}", counts.runs),
        );
        fs::remove_dir_all(&out).unwrap();
    }
    counts
}

#[test]
fn killed_runs_go_on() {
    let bench = Bench::new("killed", &[]);
    let whole = bench.whole("whole");
    let counts = kill_runs(&bench, &whole, 6, 1);
    assert_eq!(counts.killed, 6);
    let counts = stop_runs(&bench, &whole, 2, 2);
    assert_eq!(counts.killed, 2);
}

/// A second Ctrl+C does not wait for the first: the program ends, and the run goes on later.
#[test]
fn a_second_interrupt_ends_at_once() {
    let bench = Bench::new("twice", &[]);
    let out = bench.folder("run");
    // Samples are not cut short by the first, and there are many of them.
    let prompts = vec!["\"The ship \""; 500].join(", ");
    let prompts = format!("prompts=[{prompts}]");
    let long = [&prompts[..], "sample_every=1", "sample_tokens=60"];
    let mut child = bench.start(&out, &long);
    let is_sampling = || !metrics(&out).is_empty();
    assert!(wait_until(&mut child, is_sampling).is_none());
    let id = child.id();
    // Two that come before the first is seen are one, so there are as many as it takes.
    let ended = wait_until(&mut child, || {
        send_to("-INT", id);
        std::thread::sleep(Duration::from_millis(50));
        false
    });
    assert!(ended.is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(
        !text(&output.stderr).contains("interrupted"),
        "it has waited"
    );
    let output = bench.command(&out, &["sample_every=0"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    bench
        .whole("whole")
        .assert_same(&Trace::of(&out), "interrupted twice");
}

/// Of two starts in one folder, one trains and the other says why it does not.
fn start_twice(bench: &Bench, whole: &Trace, rounds: u64) {
    for round in 0..rounds {
        let out = bench.folder(&format!("twice-{round}"));
        let children = [(); 2].map(|()| bench.start(&out, &["devices=cpu"]));
        let outputs = children.map(|child| child.wait_with_output().unwrap());
        let refused = |output: &&Output| output.status.code() == Some(1);
        for output in &outputs {
            let error = text(&output.stderr);
            let is_said = error.contains("another process trains here");
            assert!(output.status.success() || is_said, "{error}");
        }
        // Unless one had ended before the other began.
        assert!(outputs.iter().filter(refused).count() <= 1);
        whole.assert_same(&Trace::of(&out), "two starts");
        // While one trains, a second is refused for certain.
        let third = bench.folder(&format!("while-{round}"));
        let mut first = bench.start(&third, &[]);
        let ended = wait_until(&mut first, || last_step(&third, "step") > 0);
        if ended.is_none() {
            let output = bench.command(&third, &[]).output().unwrap();
            let is_running = first.try_wait().unwrap().is_none();
            let error = text(&output.stderr);
            let is_refused = output.status.code() == Some(1) && error.contains("another process");
            assert!(is_refused || !is_running, "{error}");
        }
        assert!(first.wait_with_output().unwrap().status.success());
    }
}

#[test]
fn of_two_starts_one_trains() {
    let bench = Bench::new("starts", &[]);
    let whole = bench.whole("whole");
    start_twice(&bench, &whole, 1);
}

/// Files that may not grow: saves fail, are said, and end no run; with room again it goes on to
/// the same end.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_no_run() {
    let bench = Bench::new("full", &["keep=1"]);
    let whole = bench.whole("whole");
    let out = bench.folder("run");
    // With room for settings and metrics, but for no checkpoint and no model.
    let line = "trap '' XFSZ; ulimit -f 48 && exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", line, env!("CARGO_BIN_EXE_roundpipe")]);
    let output = shell
        .args(&bench.arguments)
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    let (said, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}{error}");
    assert!(
        said.contains("step 3 was not saved, and training goes on"),
        "{said}"
    );
    assert_eq!(
        error
            .lines()
            .filter(|line| line.starts_with("error: "))
            .count(),
        1,
        "{error}"
    );
    assert!(!out.join("model").exists());
    let output = bench.command(&out, &[]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    whole.assert_same(&Trace::of(&out), "a full disk");
}

/// The same with a small file system, where this user may mount one.
#[cfg(target_os = "linux")]
#[test]
fn a_full_file_system_loses_no_run() {
    let bench = Bench::new("tmpfs", &["keep=1", "schedule=constant", "warmup=0"]);
    let disk = bench.folder("disk");
    fs::create_dir(&disk).unwrap();
    // Filled up to some KiB once the run has its first checkpoint; then freed, and started again.
    let script = r#"
        disk=$1; shift
        mount -t tmpfs -o size=8m tmpfs "$disk" || exit 99
        "$@" --out "$disk/run" steps=6 > "$disk/first" 2>&1 || exit 98
        dd if=/dev/zero of="$disk/filler" bs=4k 2> "$disk/none"
        "$@" --out "$disk/run" > "$disk/../full" 2>&1
        test $? = 1 || exit 97
        rm "$disk/filler"
        "$@" --out "$disk/run" > "$disk/../freed" 2>&1 || exit 96
        cp -r "$disk/run" "$disk/../run"
    "#;
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", script, "sh"]).arg(&disk);
    command
        .arg(env!("CARGO_BIN_EXE_roundpipe"))
        .args(&bench.arguments);
    let Ok(output) = command.output() else {
        return skip("unshare is not here");
    };
    let full = fs::read_to_string(bench.folder("full")).unwrap_or_default();
    match output.status.code() {
        Some(0) => {}
        Some(99 | 1) if full.is_empty() => return skip(&text(&output.stderr)),
        code => panic!("{code:?} {} {full}", text(&output.stderr)),
    }
    assert!(full.contains("No space left on device"), "{full}");
    let freed = fs::read_to_string(bench.folder("freed")).unwrap();
    assert!(freed.contains("the result is in"), "{freed}");
    bench
        .whole("whole")
        .assert_same(&Trace::of(&bench.folder("run")), "a full file system");
}

fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {}", why.trim());
}

/// A run on some workers that is stopped and goes on on others, for each of these settings.
fn resume_matrix(count: usize) {
    let methods = [&["method=full"][..], &["method=lora", "lora_dropout=0.1"]];
    let types = ["f32", "bf16", "f16"];
    let mut random = Random(7);
    for index in 0..count {
        let lag = format!("lag={}", index % 2);
        let dtype = format!("dtype={}", types[index % 3]);
        let (before, after) = (1 + index % 3, 1 + (index / 2 + 1) % 3);
        let method = methods[(index / 3) % 2];
        let mut settings = vec![&lag[..], &dtype];
        settings.extend(method);
        let what = format!("{settings:?} on {before}, then {after} workers");
        let bench = Bench::new(&format!("matrix-{index}"), &settings);
        let whole = bench.whole("whole");
        let out = bench.folder("run");
        // On a busy machine a run may have ended before it is stopped; then it is another's turn.
        let is_cut = (0..20).any(|_| {
            let _ = fs::remove_dir_all(&out);
            let mut child = bench.start(&out, &[&format!("devices=cpu:{before}")]);
            let at = 1 + random.below(STEPS / 2);
            let ended = wait_until(&mut child, || last_step(&out, "step") >= at);
            assert!(ended.is_none_or(|status| status.success()), "{what}");
            if index % 4 == 3 {
                let _ = child.kill();
            } else {
                send("-TERM", &child);
            }
            !child.wait_with_output().unwrap().status.success()
        });
        assert!(is_cut, "{what}: it always ended before");
        let more = [format!("devices=cpu:{after}"), "grain=layer".into()];
        let output = bench.command(&out, &[&more[0], &more[1]]).output().unwrap();
        assert!(output.status.success(), "{what}: {}", text(&output.stderr));
        whole.assert_same(&Trace::of(&out), &what);
    }
}

#[test]
fn resumed_runs_have_the_same_bits() {
    resume_matrix(2);
}

/// Damages files of the newest checkpoint: every change is found, said, and the one before used.
fn damage(flips: u64, cuts: u64, seed: u64) {
    let bench = Bench::new("damage", &["keep=2"]);
    bench.whole("run");
    let dir = bench.folder("run").join("checkpoints");
    let steps = Checkpoints::open(&dir).unwrap().steps().unwrap();
    let [.., before, newest] = steps[..] else {
        panic!("{steps:?}")
    };
    let folder = dir.join(format!("step-{newest:08}"));
    let sound = files(&folder);
    let names: Vec<&String> = sound.keys().collect();
    let total: u64 = sound.values().map(|bytes| bytes.len() as u64).sum();
    let mut random = Random(seed);
    for index in 0..flips + cuts {
        // Every file gets its turn, however small.
        let mut place = random.below(total);
        let mut name = names[index as usize % names.len()];
        if index % 2 == 0 {
            for (other, bytes) in &sound {
                if place < bytes.len() as u64 {
                    name = other;
                    break;
                }
                place -= bytes.len() as u64;
            }
        }
        let mut bytes = sound[name].clone();
        let place = random.below(bytes.len() as u64) as usize;
        let what = if index < flips {
            let bit = random.below(8);
            bytes[place] ^= 1 << bit;
            format!("{name}: bit {bit} of byte {place}")
        } else {
            bytes.truncate(place);
            format!("{name}: cut at {place}")
        };
        fs::write(folder.join(name), &bytes).unwrap();
        let found = Checkpoints::open(&dir).unwrap().newest().unwrap();
        fs::write(folder.join(name), &sound[name]).unwrap();
        assert_eq!(found.step, before, "{what}");
        let [line] = &found.skipped[..] else {
            panic!("{what}: {:?}", found.skipped)
        };
        let is_named = line.contains(&format!("step-{newest:08}")) && line.contains("is skipped");
        assert!(is_named && !line.contains('\n'), "{what}: {line}");
    }
    let found = Checkpoints::open(&dir).unwrap().newest().unwrap();
    assert_eq!((found.step, found.skipped.len()), (newest, 0));
}

#[test]
fn damaged_checkpoints_are_found() {
    damage(60, 20, 5);
}

/// A run that stops early and is killed just before it has written its model stops again.
#[test]
fn a_run_that_stopped_early_stops_again() {
    // Far too high a rate: the validation soon gets worse.
    let bench = Bench::new(
        "early",
        &["lr=0.5", "eval_every=2", "patience=2", "save_every=5"],
    );
    let whole = bench.whole("whole");
    let out = bench.folder("whole");
    let stopped = whole.losses.len() as u64;
    assert!(stopped < STEPS, "it has not stopped early");
    let settings = fs::read_to_string(out.join("run.toml")).unwrap();
    assert!(settings.contains(&format!("\nsteps = {stopped} ")));
    // As it was between the last save and the model.
    let before = settings.replace(
        &format!("\nsteps = {stopped} "),
        &format!("\nsteps = {STEPS} "),
    );
    fs::write(out.join("run.toml"), before).unwrap();
    fs::remove_dir_all(out.join("model")).unwrap();
    let output = program(&["train", "--out", &out.display().to_string()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    whole.assert_same(&Trace::of(&out), "stopped early");
}

/// The arguments of a run that is finished find it finished, whatever happened on the way.
#[test]
fn a_finished_run_stays_finished() {
    let bench = Bench::new("finished", &[]);
    let whole = bench.whole("whole");
    let out = bench.folder("whole").display().to_string();
    let output = program(&["train", "--out", &out]);
    assert!(text(&output.stdout).starts_with("the result is in "));
    whole.assert_same(&Trace::of(Path::new(&out)), "started again");
}

/// Everything, many times. `ROUNDPIPE_KILLS` is the number of kills, 300 unless given; other
/// counts follow from it.
#[test]
#[ignore = "takes minutes"]
fn all() {
    let kills = std::env::var("ROUNDPIPE_KILLS").ok();
    let kills: u64 = kills.and_then(|text| text.parse().ok()).unwrap_or(300);
    let tell = |line: String| {
        let _ = writeln!(std::io::stderr(), "{line}");
    };
    let second = [
        "lag=1",
        "dtype=f16",
        "method=lora",
        "lora_dropout=0.1",
        "keep=1",
    ];
    for (seed, settings) in [(11, &[][..]), (21, &second)] {
        let bench = Bench::new("all", settings);
        let whole = bench.whole("whole");
        let counts = kill_runs(&bench, &whole, kills.div_ceil(2), seed);
        tell(format!("kills {settings:?}: {counts:?}"));
        let counts = stop_runs(&bench, &whole, kills.div_ceil(6), seed + 1);
        tell(format!("SIGTERM {settings:?}: {counts:?}"));
    }
    let bench = Bench::new("all", &[]);
    let whole = bench.whole("whole");
    let starts = kills.div_ceil(30);
    start_twice(&bench, &whole, starts);
    tell(format!("two starts: {starts} times"));
    resume_matrix(20);
    tell("resumed with the same bits: 20 of 20".into());
    let (flips, cuts) = (kills * 10 / 3, kills * 2 / 3);
    damage(flips, cuts, 13);
    tell(format!("found: {flips} flipped bits, {cuts} cut files"));
}
