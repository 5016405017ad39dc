//! Who is doing or waiting for what, and a watchdog that says so when nothing moves.
//!
//! A silent hang is the worst failure of a pipeline of threads: each waits for another and none
//! knows why. So every thread of an engine keeps one line on a [`Board`], and calls [`Board::tick`] when
//! it finishes something. A [`Watchdog`] that sees no tick for a while, although a thread waits,
//! hands the lines to a function of the user. It ends nothing and repairs nothing.
//!
//! # Invariants
//!
//! - A status lasts as long as its [`Guard`]. Guards of one name may nest; the newest is shown.
//! - Setting a status allocates only to grow a buffer of the name, and takes the lock of that name
//!   alone.
//! - A stall is reported once: again only after a tick, or after a time when no thread waited.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::sync::{lock, unpoisoned};

/// How often a watchdog looks while a stall could become old enough, and how rarely at most.
const LOOKS: u32 = 8;
const LONGEST_LOOK: Duration = Duration::from_secs(1);
const SHORTEST_LOOK: Duration = Duration::from_millis(1);

/// The lines of all threads of an engine. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Board {
    shared: Arc<BoardInner>,
}

#[derive(Debug, Default)]
struct BoardInner {
    progress: AtomicU64,
    entries: Mutex<Vec<Arc<BoardEntry>>>,
}

#[derive(Debug)]
struct BoardEntry {
    who: String,
    levels: Mutex<Vec<StatusLevel>>,
}

/// One status of a name; guards that nest have one each. A level that is over keeps its buffer for
/// the next.
#[derive(Debug)]
struct StatusLevel {
    active: bool,
    waiting: bool,
    what: String,
    since: Instant,
}

impl StatusLevel {
    fn set(&mut self, waiting: bool, what: impl fmt::Display) {
        self.what.clear();
        // Only a broken `Display` can fail; what it wrote so far is better than no status.
        let _ = write!(self.what, "{what}");
        (self.active, self.waiting, self.since) = (true, waiting, Instant::now());
    }
}

impl BoardEntry {
    /// The innermost status.
    fn line(&self, now: Instant) -> Option<StatusLine> {
        let levels = lock(&self.levels);
        let level = levels.iter().rev().find(|level| level.active)?;
        let since = now.saturating_duration_since(level.since);
        Some(StatusLine {
            who: self.who.clone(),
            what: level.what.clone(),
            since,
            waiting: level.waiting,
        })
    }

    fn waiting_since(&self) -> Option<Instant> {
        let levels = lock(&self.levels);
        levels
            .iter()
            .filter(|level| level.active && level.waiting)
            .map(|level| level.since)
            .min()
    }
}

impl Board {
    /// An empty board.
    pub fn new() -> Self {
        Self::default()
    }

    /// A thread's row under its name: the same name has the same row.
    pub fn row(&self, who: &str) -> BoardRow {
        let mut entries = lock(&self.shared.entries);
        let known = entries.iter().find(|entry| entry.who == who).cloned();
        let entry = known.unwrap_or_else(|| {
            let entry = Arc::new(BoardEntry {
                who: who.to_string(),
                levels: Mutex::default(),
            });
            entries.push(entry.clone());
            entry
        });
        BoardRow { entry }
    }

    /// `who` does something until the guard is dropped. A thread that does this often keeps its
    /// [`Board::row`]; `format_args!` saves the text's allocation.
    pub fn enter(&self, who: &str, what: impl fmt::Display) -> Guard {
        self.row(who).enter(what)
    }

    /// `who` waits for something until the guard is dropped.
    pub fn wait(&self, who: &str, what: impl fmt::Display) -> Guard {
        self.row(who).wait(what)
    }

    /// Something was finished.
    pub fn tick(&self) {
        self.shared.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// How much was finished so far.
    pub fn progress(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    /// What everyone is doing, in the order they first appeared. Who does nothing has no line.
    pub fn report(&self) -> Vec<StatusLine> {
        let now = Instant::now();
        lock(&self.shared.entries)
            .iter()
            .filter_map(|entry| entry.line(now))
            .collect()
    }

    /// Since when someone has been waiting.
    fn waiting_since(&self) -> Option<Instant> {
        lock(&self.shared.entries)
            .iter()
            .filter_map(|entry| entry.waiting_since())
            .min()
    }
}

/// A name on a board.
#[derive(Debug, Clone)]
pub struct BoardRow {
    entry: Arc<BoardEntry>,
}

impl BoardRow {
    /// It does something until the guard is dropped.
    pub fn enter(&self, what: impl fmt::Display) -> Guard {
        self.status(false, what)
    }

    /// It waits for something until the guard is dropped.
    pub fn wait(&self, what: impl fmt::Display) -> Guard {
        self.status(true, what)
    }

    fn status(&self, waiting: bool, what: impl fmt::Display) -> Guard {
        let mut levels = lock(&self.entry.levels);
        let level = levels
            .iter()
            .rposition(|level| level.active)
            .map_or(0, |top| top + 1);
        if level == levels.len() {
            let (what, since) = (String::new(), Instant::now());
            levels.push(StatusLevel {
                active: true,
                waiting,
                what,
                since,
            });
        }
        levels[level].set(waiting, what);
        Guard {
            entry: self.entry.clone(),
            level,
        }
    }
}

/// A status, until it is dropped.
#[derive(Debug)]
#[must_use = "the status lasts as long as its guard"]
pub struct Guard {
    entry: Arc<BoardEntry>,
    level: usize,
}

impl Drop for Guard {
    fn drop(&mut self) {
        lock(&self.entry.levels)[self.level].active = false;
    }
}

/// What one name is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusLine {
    /// The name.
    pub who: String,
    /// What it does or waits for.
    pub what: String,
    /// For how long.
    pub since: Duration,
    /// Whether it waits.
    pub waiting: bool,
}

impl fmt::Display for StatusLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} ({:.1} s)",
            self.who,
            self.what,
            self.since.as_secs_f64()
        )
    }
}

/// A stall: what everyone was doing when nothing had moved for so long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// How long nothing had been finished although someone waited.
    pub stalled: Duration,
    /// What everyone was doing.
    pub lines: Vec<StatusLine>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "nothing was finished for {:.1} s",
            self.stalled.as_secs_f64()
        )?;
        for line in &self.lines {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
}

/// A thread that watches a board until it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Calls `on_stall`, on its own thread, once per stall: no [`Board::tick`] for `stall_after`
    /// while someone waited all that time. Where no thread can be started there is no watchdog, and
    /// all else works.
    pub fn start(
        board: Board,
        stall_after: Duration,
        on_stall: Arc<dyn Fn(&Report) + Send + Sync>,
    ) -> Self {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let watch = Watch {
            seen: board.progress(),
            moved: Instant::now(),
            reported: false,
            board,
            stall_after,
        };
        let stopped = stop.clone();
        let work = move || watch.run(&stopped, &*on_stall);
        let thread = thread::Builder::new()
            .name("watchdog".to_string())
            .spawn(work)
            .ok();
        Self { stop, thread }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let (stop, wake) = &*self.stop;
        *lock(stop) = true;
        wake.notify_all();
        // `on_stall` may own the last handle; a thread cannot wait for itself.
        if let Some(thread) = self
            .thread
            .take()
            .filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic of `on_stall` was printed by its thread; there is nothing left to do about
            // it.
            let _ = thread.join();
        }
    }
}

/// What a watchdog's thread knows.
struct Watch {
    board: Board,
    stall_after: Duration,
    /// Progress when it last moved.
    seen: u64,
    /// When that was noticed.
    moved: Instant,
    reported: bool,
}

impl Watch {
    fn run(mut self, stop: &(Mutex<bool>, Condvar), on_stall: &dyn Fn(&Report)) {
        let pause = (self.stall_after / LOOKS).clamp(SHORTEST_LOOK, LONGEST_LOOK);
        let (stop, wake) = stop;
        let mut stopped = lock(stop);
        while !*stopped {
            let (held, _) = unpoisoned(wake.wait_timeout(stopped, pause));
            if *held {
                return;
            }
            // `on_stall` may take its time, or drop the watchdog.
            drop(held);
            if let Some(stalled) = self.look() {
                on_stall(&Report {
                    stalled,
                    lines: self.board.report(),
                });
            }
            stopped = lock(stop);
        }
    }

    /// How long nothing has moved, if that is a stall that was not reported.
    fn look(&mut self) -> Option<Duration> {
        let (progress, now) = (self.board.progress(), Instant::now());
        if progress != self.seen {
            (self.seen, self.moved, self.reported) = (progress, now, false);
        }
        let Some(waiting_since) = self.board.waiting_since() else {
            self.reported = false;
            return None;
        };
        let stalled = now.saturating_duration_since(waiting_since.max(self.moved));
        if self.reported || stalled < self.stall_after {
            return None;
        }
        self.reported = true;
        Some(stalled)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(20);

    fn lines(board: &Board) -> Vec<String> {
        board
            .report()
            .iter()
            .map(|line| format!("{}: {}", line.who, line.what))
            .collect()
    }

    /// A line lives as long as its guard, the innermost is shown, and each name has one.
    #[test]
    fn lines_follow_their_guards() {
        let board = Board::new();
        assert!(board.report().is_empty());
        let outer = board.enter("cuda:0 launcher", "stage 2");
        let other = board.wait(
            "cuda:1 launcher",
            format_args!("waiting for microbatch {}", 3),
        );
        assert_eq!(
            lines(&board),
            [
                "cuda:0 launcher: stage 2",
                "cuda:1 launcher: waiting for microbatch 3"
            ]
        );
        let inner = board.wait("cuda:0 launcher", "waiting for memory");
        assert_eq!(lines(&board)[0], "cuda:0 launcher: waiting for memory");
        assert!(board.report()[0].waiting);
        drop(inner);
        assert_eq!(lines(&board)[0], "cuda:0 launcher: stage 2");
        drop(other);
        assert_eq!(lines(&board).len(), 1);
        drop(outer);
        assert!(board.report().is_empty());
    }

    /// Guards that end in another order than they began leave the ones that live.
    #[test]
    fn guards_end_in_any_order() {
        let board = Board::new();
        let (first, second) = (board.enter("host", "first"), board.enter("host", "second"));
        drop(first);
        assert_eq!(lines(&board), ["host: second"]);
        let third = board.enter("host", "third");
        assert_eq!(lines(&board), ["host: third"]);
        drop(third);
        drop(second);
        assert!(board.report().is_empty());
    }

    /// A status of the same length reuses the name's buffer.
    #[test]
    fn setting_a_status_reuses_its_buffer() {
        let board = Board::new();
        let row = board.row("host");
        drop(row.enter("microbatch 10000"));
        let buffer = || lock(&row.entry.levels)[0].what.as_ptr();
        let before = buffer();
        for microbatch in 0..100 {
            let _guard = row.wait(format_args!("microbatch {microbatch}"));
            assert_eq!(buffer(), before);
        }
        assert_eq!(lock(&row.entry.levels).len(), 1);
    }

    /// One line per name, with what and how long.
    #[test]
    fn reports_print_a_line_each() {
        let line = StatusLine {
            who: "cuda:0 launcher".to_string(),
            what: "waiting for microbatch 3 of stage 2 from cuda:1".to_string(),
            since: Duration::from_millis(12_345),
            waiting: true,
        };
        let text = "cuda:0 launcher: waiting for microbatch 3 of stage 2 from cuda:1 (12.3 s)";
        assert_eq!(line.to_string(), text);
        let report = Report {
            stalled: Duration::from_secs(10),
            lines: vec![line.clone(), line],
        };
        assert_eq!(
            report.to_string(),
            format!("nothing was finished for 10.0 s\n  {text}\n  {text}")
        );
    }

    fn watched(board: &Board, stall_after: Duration) -> (Watchdog, mpsc::Receiver<Report>) {
        let (sender, reports) = mpsc::channel();
        let on_stall = move |report: &Report| {
            // The test may be over already.
            let _ = sender.send(report.clone());
        };
        (
            Watchdog::start(board.clone(), stall_after, Arc::new(on_stall)),
            reports,
        )
    }

    /// A wait without progress is reported once; after progress, a new stall is reported again.
    #[test]
    fn a_stall_is_reported_once() {
        let board = Board::new();
        let (_watchdog, reports) = watched(&board, SOON);
        let _guard = board.wait("host", "waiting for the loss");
        let report = reports.recv_timeout(LATE).expect("a stall");
        assert!(report.stalled >= SOON);
        assert_eq!(
            (report.lines.len(), report.lines[0].what.as_str()),
            (1, "waiting for the loss")
        );
        assert!(reports.recv_timeout(5 * SOON).is_err(), "once per stall");
        board.tick();
        reports.recv_timeout(LATE).expect("the next stall");
    }

    /// Working long is no stall, however little is finished.
    #[test]
    fn work_is_no_stall() {
        let board = Board::new();
        let (_watchdog, reports) = watched(&board, SOON);
        let guard = board.enter("host", "a long matrix product");
        assert!(reports.recv_timeout(5 * SOON).is_err());
        drop(guard);
        let _guard = board.wait("host", "waiting for the next");
        reports.recv_timeout(LATE).expect("now it waits");
    }

    /// The wait must be as old as the stall: a fresh wait after long silence is none yet, and
    /// progress resets.
    #[test]
    fn stalls_count_from_wait_and_progress() {
        let board = Board::new();
        let mut watch = Watch {
            seen: 0,
            moved: Instant::now(),
            reported: false,
            board: board.clone(),
            stall_after: Duration::from_millis(200),
        };
        let long_ago = Instant::now()
            .checked_sub(LATE)
            .expect("the clock is older than that");
        watch.moved = long_ago;
        let row = board.row("host");
        let guard = row.wait("waiting");
        assert_eq!(watch.look(), None, "the wait is new");
        lock(&row.entry.levels)[0].since = long_ago;
        board.tick();
        assert_eq!(watch.look(), None, "progress is new");
        watch.moved = long_ago;
        assert!(watch.look().is_some_and(|stalled| stalled >= LATE));
        assert_eq!(watch.look(), None, "told already");
        drop(guard);
        assert_eq!(watch.look(), None);
        let _again = row.wait("waiting again");
        lock(&row.entry.levels)[0].since = long_ago;
        assert!(
            watch.look().is_some(),
            "after a time without waits, a stall is a new one"
        );
    }

    /// A watchdog ends at once, even one that would look again only much later, and from its own
    /// callback.
    #[test]
    fn a_watchdog_ends_promptly() {
        let once = || {
            let start = Instant::now();
            drop(watched(&Board::new(), Duration::from_secs(3600)));
            start.elapsed()
        };
        // The fastest of a few: a thread of a busy machine may wake up late.
        let fastest = (0..5).map(|_| once()).min().unwrap();
        assert!(fastest < Duration::from_millis(900), "{fastest:?}");
        let board = Board::new();
        let _guard = board.wait("host", "waiting");
        let own: Arc<Mutex<Option<Watchdog>>> = Arc::default();
        let (sender, done) = mpsc::channel();
        let (held, kept) = (own.clone(), sender);
        let on_stall = move |_: &Report| {
            let watchdog = lock(&held).take();
            drop(watchdog);
            let _ = kept.send(());
        };
        let mut slot = lock(&own);
        *slot = Some(Watchdog::start(board.clone(), SOON, Arc::new(on_stall)));
        drop(slot);
        done.recv_timeout(LATE).expect("the callback came back");
        assert!(lock(&own).is_none());
    }
}
