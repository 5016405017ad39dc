//! What really happened, as values: spans of work on the lanes of workers, and what follows from
//! them.
//!
//! The path of a span: a thread records it, [`Trace`] keeps it, then it is shown
//! ([`Trace::chrome_json`], for Perfetto or chrome://tracing), summed ([`Trace::bubble`]) or
//! averaged ([`LayerTimes`]) into the costs of the next plan.
//!
//! A trace is off until someone turns it on; recording then costs one atomic read, and the span is
//! not even made. It keeps a bounded number of spans, drops the newest beyond it and says how many.
//!
//! Recording a span reads no clock: the caller says when it began and ended, in nanoseconds since any
//! moment that all spans of the trace share ([`Trace::now_ns`] is one).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use roundpipe_tensor::device::time_zero;

use crate::cost::{LayerTimes, Phase};
use crate::sync::lock;

/// Spans that a trace keeps by default: some hundred megabytes.
const DEFAULT_LIMIT: usize = 1 << 20;

/// What of a worker did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Parameters to the device.
    ParamUpload,
    /// Activations to the device.
    ActivationUpload,
    /// Activations to the host.
    ActivationDownload,
    /// Gradients to the host.
    GradDownload,
    /// The optimizer's passes on the host.
    Optimizer,
    /// A thread of the host.
    Host,
}

impl Lane {
    /// As traces show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::ParamUpload => "parameter upload",
            Self::ActivationUpload => "activation upload",
            Self::ActivationDownload => "activation download",
            Self::GradDownload => "gradient download",
            Self::Optimizer => "optimizer",
            Self::Host => "host",
        }
    }

    /// Whether it belongs to the device, whose time a bubble is a share of.
    fn is_device(self) -> bool {
        !matches!(self, Self::Optimizer | Self::Host)
    }
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// A forward that only its output is kept of.
    Forward,
    /// A forward again, before its backward.
    Recompute,
    /// A backward.
    Backward,
    /// Forward, loss and backward in one visit.
    Fused,
    /// The loss.
    Loss,
    /// Bytes on their way.
    Transfer,
    /// New weights.
    Optimizer,
    /// Nothing: waiting for something.
    Wait,
}

impl Category {
    /// As traces show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Fused => "fused",
            Self::Loss => "loss",
            Self::Transfer => "transfer",
            Self::Optimizer => "optimizer",
            Self::Wait => "wait",
        }
    }
}

/// Where something happened: one row of a picture.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Track {
    /// The worker's number.
    pub worker: usize,
    /// Its name.
    pub worker_name: String,
    /// What of it.
    pub lane: Lane,
}

/// Something that took time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Span {
    /// Where.
    pub track: Track,
    /// What a picture writes on it.
    pub name: String,
    /// What.
    pub category: Category,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The call it belongs to.
    pub call: u64,
    /// The stage of that call.
    pub stage: Option<usize>,
    /// The layer, if it is about one.
    pub layer: Option<usize>,
    /// The microbatch, if it is about one.
    pub microbatch: Option<usize>,
    /// What it moved.
    pub bytes: Option<u64>,
}

impl Span {
    fn ms(&self) -> f64 {
        self.end_ns.saturating_sub(self.start_ns) as f64 / 1e6
    }

    /// Whether a device computed.
    fn is_work(&self) -> bool {
        self.track.lane == Lane::Compute && self.category != Category::Wait
    }
}

/// Spans of many threads.
pub struct Trace {
    on: AtomicBool,
    limit: usize,
    dropped: AtomicU64,
    spans: Mutex<Vec<Span>>,
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Trace");
        shown
            .field("on", &self.is_on())
            .field("spans", &self.kept().len());
        shown
            .field("dropped", &self.dropped())
            .finish_non_exhaustive()
    }
}

impl Trace {
    /// An empty one, off, for about a million spans.
    pub fn new() -> Self {
        Self::with_limit(DEFAULT_LIMIT)
    }

    /// The same for so many spans.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            on: AtomicBool::new(false),
            limit,
            dropped: AtomicU64::new(0),
            spans: Mutex::default(),
        }
    }

    /// Keeps what is recorded from now on.
    pub fn on(&self) {
        self.on.store(true, Ordering::Relaxed);
    }

    /// Ignores what is recorded from now on; what was kept stays.
    pub fn off(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    /// Whether spans are kept.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// On the clock that spans have: [`time_zero`](roundpipe_tensor::device::time_zero).
    pub fn now_ns(&self) -> u64 {
        u64::try_from(time_zero().elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Keeps a span. `make` runs only if the trace is on, and not under its lock.
    pub fn record(&self, make: impl FnOnce() -> Span) {
        if !self.is_on() {
            return;
        }
        let span = make();
        let mut kept = self.kept();
        if kept.len() < self.limit {
            kept.push(span);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What was kept, in the order it was recorded.
    pub fn spans(&self) -> Vec<Span> {
        self.kept().clone()
    }

    /// Spans for which there was no room.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Forgets all spans.
    pub fn clear(&self) {
        self.kept().clear();
        self.dropped.store(0, Ordering::Relaxed);
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Span>> {
        lock(&self.spans)
    }

    /// All spans in the trace event format that Perfetto and chrome://tracing read: a process per
    /// worker, a thread per lane, times in microseconds.
    pub fn chrome_json(&self) -> String {
        let kept = self.kept();
        let mut json = String::with_capacity(256 * kept.len() + 1024);
        json.push_str("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
        let mut next = "\n";
        let mut seen = BTreeSet::new();
        for Track {
            worker,
            worker_name,
            lane,
        } in kept.iter().map(|span| &span.track)
        {
            if seen.insert((*worker, None)) {
                metadata(&mut json, &mut next, "process", *worker, None, worker_name);
            }
            if seen.insert((*worker, Some(*lane))) {
                metadata(
                    &mut json,
                    &mut next,
                    "thread",
                    *worker,
                    Some(*lane),
                    lane.name(),
                );
            }
        }
        for span in kept.iter() {
            event(&mut json, &mut next, span);
        }
        push(
            &mut json,
            format_args!(
                "\n],\"otherData\":{{\"dropped_spans\":{}}}}}\n",
                self.dropped()
            ),
        );
        json
    }

    /// Writes [`Trace::chrome_json`] to a file: under another name first, so that there is never
    /// half a file.
    ///
    /// # Errors
    /// What the file system says, with the path.
    pub fn write_to(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("trace {}: {error}", path.display()))
        };
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        std::fs::write(&partial, self.chrome_json()).map_err(named)?;
        std::fs::rename(&partial, path).map_err(named)
    }

    /// The share of device time in a call that nothing was computed: 1 less busy time over workers
    /// times the call's length. The workers are all that ever computed in this trace; the length is
    /// that of the call's spans on lanes of devices, transfers included. Nothing if the call
    /// computed nothing.
    pub fn bubble(&self, call: u64) -> Option<f64> {
        let kept = self.kept();
        let workers: BTreeSet<usize> = kept
            .iter()
            .filter(|span| span.is_work())
            .map(|span| span.track.worker)
            .collect();
        let mine = || {
            kept.iter()
                .filter(|span| span.call == call && span.track.lane.is_device())
        };
        let mut work: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
        for span in mine().filter(|span| span.is_work()) {
            work.entry(span.track.worker)
                .or_default()
                .push((span.start_ns, span.end_ns));
        }
        let busy_ns: u64 = work.into_values().map(covered_ns).sum();
        let from_ns = mine().map(|span| span.start_ns).min()?;
        let to_ns = mine().map(|span| span.end_ns).max()?;
        let all_ns = to_ns.saturating_sub(from_ns) as f64 * workers.len() as f64;
        let computed = busy_ns > 0 && all_ns > 0.0;
        computed.then(|| 1.0 - busy_ns as f64 / all_ns)
    }

    /// Times per layer, from spans of the compute lane that name one, in the order they began.
    pub fn layer_times(&self) -> LayerTimes {
        let kept = self.kept();
        let mut measured: Vec<(u64, usize, Phase, f64)> = Vec::new();
        for span in kept.iter().filter(|span| span.is_work()) {
            let part = match span.category {
                Category::Forward => Phase::Forward,
                Category::Recompute => Phase::Recompute,
                Category::Backward => Phase::Backward,
                _ => continue,
            };
            measured.extend(
                span.layer
                    .map(|layer| (span.start_ns, layer, part, span.ms())),
            );
        }
        measured.sort_by_key(|(start_ns, ..)| *start_ns);
        let mut times = LayerTimes::default();
        for (_, layer, part, ms) in measured {
            times.record(layer, part, ms);
        }
        times
    }
}

/// How much time intervals cover, overlaps once.
fn covered_ns(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    let (mut covered, mut until) = (0, 0);
    for (start, end) in intervals {
        covered += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    covered
}

/// A name for a worker or one of its lanes, and its place in the picture.
fn metadata(
    json: &mut String,
    next: &mut &'static str,
    what: &str,
    worker: usize,
    lane: Option<Lane>,
    name: &str,
) {
    let tid = lane.map_or(0, |lane| lane as usize);
    let place = lane.map_or(worker, |lane| lane as usize);
    let head = format!("\"ph\":\"M\",\"pid\":{worker},\"tid\":{tid}");
    push(
        json,
        format_args!("{next}{{\"name\":\"{what}_name\",{head},\"args\":{{\"name\":"),
    );
    quoted(json, name);
    push(
        json,
        format_args!(
            "}}}},\n{{\"name\":\"{what}_sort_index\",{head},\"args\":{{\"sort_index\":{place}}}}}"
        ),
    );
    *next = ",\n";
}

/// One complete event.
fn event(json: &mut String, next: &mut &'static str, span: &Span) {
    push(json, format_args!("{next}{{\"name\":"));
    *next = ",\n";
    quoted(json, &span.name);
    let (worker, lane) = (span.track.worker, span.track.lane as usize);
    let (start, length) = (
        Micros(span.start_ns),
        Micros(span.end_ns.saturating_sub(span.start_ns)),
    );
    let category = span.category.name();
    push(
        json,
        format_args!(",\"cat\":\"{category}\",\"ph\":\"X\",\"ts\":{start},\"dur\":{length}"),
    );
    push(
        json,
        format_args!(
            ",\"pid\":{worker},\"tid\":{lane},\"args\":{{\"call\":{}",
            span.call
        ),
    );
    let places = [
        ("stage", span.stage),
        ("layer", span.layer),
        ("microbatch", span.microbatch),
    ];
    for (name, place) in places {
        if let Some(place) = place {
            push(json, format_args!(",\"{name}\":{place}"));
        }
    }
    if let Some(bytes) = span.bytes {
        push(json, format_args!(",\"bytes\":{bytes}"));
    }
    json.push_str("}}");
}

/// Nanoseconds, printed as microseconds without rounding.
struct Micros(u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

fn push(json: &mut String, text: fmt::Arguments<'_>) {
    json.write_fmt(text).expect("a string takes any text");
}

/// A JSON string.
fn quoted(json: &mut String, text: &str) {
    json.push('"');
    for letter in text.chars() {
        match letter {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\t' => json.push_str("\\t"),
            '\r' => json.push_str("\\r"),
            control if control < ' ' => push(json, format_args!("\\u{:04x}", u32::from(control))),
            letter => json.push(letter),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::LayerTime;

    fn span(worker: usize, lane: Lane, category: Category, start_ns: u64, end_ns: u64) -> Span {
        Span {
            track: Track {
                worker,
                worker_name: format!("cpu:{worker}"),
                lane,
            },
            name: category.name().to_string(),
            category,
            start_ns,
            end_ns,
            call: 1,
            stage: None,
            layer: None,
            microbatch: None,
            bytes: None,
        }
    }

    fn filled(spans: &[Span]) -> Trace {
        let trace = Trace::new();
        trace.on();
        for span in spans {
            trace.record(|| span.clone());
        }
        trace
    }

    /// As much of JSON as a test needs.
    #[derive(Debug, Clone, PartialEq)]
    enum Json {
        Number(f64),
        Text(String),
        List(Vec<Json>),
        Map(BTreeMap<String, Json>),
    }

    impl Json {
        fn parse(text: &str) -> Self {
            let letters: Vec<char> = text.chars().collect();
            let mut at = 0;
            let json = Self::value(&letters, &mut at);
            Self::skip(&letters, &mut at);
            assert_eq!(at, letters.len(), "text after the value");
            json
        }

        fn skip(letters: &[char], at: &mut usize) {
            while letters
                .get(*at)
                .is_some_and(|letter| letter.is_ascii_whitespace())
            {
                *at += 1;
            }
        }

        fn take(letters: &[char], at: &mut usize, wanted: char) {
            Self::skip(letters, at);
            assert_eq!(letters[*at], wanted, "at {at}");
            *at += 1;
        }

        /// Whether another element follows, up to `end`.
        fn more(letters: &[char], at: &mut usize, end: char, first: bool) -> bool {
            Self::skip(letters, at);
            if letters[*at] == end {
                *at += 1;
                return false;
            }
            if !first {
                Self::take(letters, at, ',');
                Self::skip(letters, at);
            }
            true
        }

        fn value(letters: &[char], at: &mut usize) -> Self {
            Self::skip(letters, at);
            match letters[*at] {
                '{' => {
                    *at += 1;
                    let mut map = BTreeMap::new();
                    while Self::more(letters, at, '}', map.is_empty()) {
                        let key = Self::text(letters, at);
                        Self::take(letters, at, ':');
                        assert!(
                            map.insert(key, Self::value(letters, at)).is_none(),
                            "a key twice"
                        );
                    }
                    Self::Map(map)
                }
                '[' => {
                    *at += 1;
                    let mut list = Vec::new();
                    while Self::more(letters, at, ']', list.is_empty()) {
                        list.push(Self::value(letters, at));
                    }
                    Self::List(list)
                }
                '"' => Self::Text(Self::text(letters, at)),
                _ => {
                    let from = *at;
                    while letters[*at].is_ascii_digit() || "+-.eE".contains(letters[*at]) {
                        *at += 1;
                    }
                    Self::Number(
                        letters[from..*at]
                            .iter()
                            .collect::<String>()
                            .parse()
                            .expect("a number"),
                    )
                }
            }
        }

        fn text(letters: &[char], at: &mut usize) -> String {
            Self::take(letters, at, '"');
            let mut text = String::new();
            loop {
                let letter = letters[*at];
                *at += 1;
                match letter {
                    '"' => return text,
                    '\\' => {
                        let escape = letters[*at];
                        *at += 1;
                        text.push(match escape {
                            'n' => '\n',
                            't' => '\t',
                            'r' => '\r',
                            'u' => {
                                let digits: String = letters[*at..*at + 4].iter().collect();
                                *at += 4;
                                let code = u32::from_str_radix(&digits, 16).expect("four digits");
                                char::from_u32(code).expect("a letter")
                            }
                            '"' | '\\' | '/' => escape,
                            other => panic!("no escape: {other:?}"),
                        });
                    }
                    letter => {
                        assert!(letter >= ' ', "a bare control letter");
                        text.push(letter);
                    }
                }
            }
        }

        fn at(&self, key: &str) -> &Json {
            let Self::Map(map) = self else {
                panic!("{self:?} has no {key}")
            };
            map.get(key)
                .unwrap_or_else(|| panic!("{self:?} has no {key}"))
        }

        fn list(&self) -> &[Json] {
            let Self::List(list) = self else {
                panic!("{self:?} is no list")
            };
            list
        }
    }

    /// The export is JSON that says all that was recorded: names intact, microseconds, a process
    /// per worker.
    #[test]
    fn exported_events_say_what_was_recorded() {
        let odd = "a \"quoted\" \\ back\nline\u{1}\u{1f680}";
        let mut first = span(
            3,
            Lane::ParamUpload,
            Category::Transfer,
            1_234_567,
            1_235_000,
        );
        (first.name, first.bytes, first.stage) =
            (odd.to_string(), Some(u64::from(u32::MAX)), Some(2));
        first.track.worker_name = "cuda:3 \"big\"".to_string();
        let mut second = span(3, Lane::Compute, Category::Forward, 2_000_000, 2_000_999);
        (second.layer, second.microbatch) = (Some(7), Some(0));
        let trace = filled(&[first, second]);
        let json = Json::parse(&trace.chrome_json());
        let events = json.at("traceEvents").list();
        let text = |text: &str| Json::Text(text.to_string());
        let named = |name: &str| {
            events
                .iter()
                .filter(|event| *event.at("name") == text(name))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            *named("process_name")[0].at("args").at("name"),
            text("cuda:3 \"big\"")
        );
        assert_eq!(named("process_name").len(), 1);
        let threads: Vec<_> = named("thread_name")
            .iter()
            .map(|event| event.at("args").at("name"))
            .collect();
        assert_eq!(threads, [&text("parameter upload"), &text("compute")]);
        let upload = named(odd)[0];
        assert_eq!(
            (upload.at("ph"), upload.at("cat")),
            (&text("X"), &text("transfer"))
        );
        assert_eq!(
            (upload.at("ts"), upload.at("dur")),
            (&Json::Number(1234.567), &Json::Number(0.433))
        );
        assert_eq!(*upload.at("args").at("bytes"), Json::Number(4294967295.0));
        assert_eq!(*upload.at("args").at("stage"), Json::Number(2.0));
        let forward = named("forward")[0];
        assert_eq!(
            (forward.at("pid"), forward.at("tid")),
            (&Json::Number(3.0), &Json::Number(0.0))
        );
        assert_eq!(*forward.at("args").at("layer"), Json::Number(7.0));
        assert_eq!(
            events.len(),
            2 + 4 + 2,
            "names and places of a worker and two lanes, and two spans"
        );
        let none = Json::parse(&Trace::new().chrome_json());
        assert!(
            none.at("traceEvents").list().is_empty(),
            "an empty trace is still a trace"
        );
    }

    /// A file holds the whole export, and a place that cannot be written is named.
    #[test]
    fn written_files_are_whole() {
        let trace = filled(&[span(0, Lane::Compute, Category::Loss, 0, 5)]);
        let folder = std::env::temp_dir().join(format!("roundpipe-trace-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let path = folder.join("trace.json");
        trace.write_to(&path).expect("written");
        assert_eq!(
            std::fs::read_to_string(&path).expect("read"),
            trace.chrome_json()
        );
        assert_eq!(
            std::fs::read_dir(&folder).expect("listed").count(),
            1,
            "no partial file stays"
        );
        std::fs::remove_dir_all(&folder).expect("removed");
        let error = trace
            .write_to(&path)
            .expect_err("no such folder")
            .to_string();
        assert!(
            error.contains(path.to_str().expect("a plain path")),
            "{error}"
        );
    }

    /// Off, nothing is made; full, the rest is counted.
    #[test]
    fn recording_is_bounded_and_off_by_default() {
        let trace = Trace::with_limit(2);
        trace.record(|| unreachable!("the trace is off"));
        trace.on();
        for at in 0..5 {
            trace.record(|| span(0, Lane::Compute, Category::Forward, at, at + 1));
        }
        let starts = |trace: &Trace| {
            trace
                .spans()
                .iter()
                .map(|span| span.start_ns)
                .collect::<Vec<_>>()
        };
        assert_eq!((starts(&trace), trace.dropped()), (vec![0, 1], 3));
        trace.off();
        trace.record(|| unreachable!("the trace is off again"));
        trace.clear();
        assert_eq!((trace.spans().len(), trace.dropped()), (0, 0));
    }

    /// Threads record side by side and lose nothing.
    #[test]
    fn many_threads_record() {
        let trace = Trace::new();
        trace.on();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let trace = &trace;
                scope.spawn(move || {
                    for at in 0..100 {
                        trace.record(|| span(worker, Lane::Compute, Category::Forward, at, at + 1));
                    }
                });
            }
        });
        assert_eq!(trace.spans().len(), 400);
    }

    /// The bubble counts overlaps once, transfers as length, waits as idle, and workers without
    /// work.
    #[test]
    fn bubble_is_idle_device_time() {
        use Category::*;
        let mut spans = vec![
            span(0, Lane::ParamUpload, Transfer, 0, 20),
            span(0, Lane::Compute, Forward, 20, 60),
            span(0, Lane::Compute, Recompute, 30, 40),
            span(0, Lane::Compute, Backward, 50, 80),
            span(0, Lane::Compute, Wait, 80, 100),
            // Neither the optimizer nor a thread of the host is device time.
            span(0, Lane::Optimizer, Optimizer, 100, 900),
            span(0, Lane::Host, Wait, 0, 900),
        ];
        assert_eq!(filled(&spans).bubble(1), Some(1.0 - 60.0 / 100.0));
        spans.push(span(1, Lane::Compute, Fused, 40, 90));
        assert_eq!(filled(&spans).bubble(1), Some(1.0 - 110.0 / 200.0));
        spans.push(Span {
            call: 2,
            ..span(2, Lane::Compute, Forward, 100, 200)
        });
        assert_eq!(
            filled(&spans).bubble(1),
            Some(1.0 - 110.0 / 300.0),
            "worker 2 idled"
        );
        assert_eq!(filled(&spans).bubble(3), None);
        assert_eq!(filled(&spans[..1]).bubble(1), None, "nothing was computed");
    }

    /// Averages take the first measurement whole and a fifth of each later one, in the order of
    /// time.
    #[test]
    fn layer_times_are_moving_averages() {
        let timed = |category, layer, start_ms: u64, end_ms: u64| Span {
            layer: Some(layer),
            ..span(
                0,
                Lane::Compute,
                category,
                start_ms * 1_000_000,
                end_ms * 1_000_000,
            )
        };
        let times = filled(&[
            timed(Category::Forward, 1, 100, 120),
            timed(Category::Forward, 1, 0, 10),
            timed(Category::Backward, 0, 10, 15),
            timed(Category::Fused, 0, 10, 15),
            span(0, Lane::Compute, Category::Forward, 0, 99),
        ])
        .layer_times();
        let only = LayerTime::default();
        assert_eq!(
            times.layers(),
            [
                LayerTime {
                    backward_ms: Some(5.0),
                    ..only
                },
                LayerTime {
                    forward_ms: Some(12.0),
                    ..only
                }
            ]
        );
    }
}
