//! What a run tells: to the person who watches, and to the files of its folder.
//!
//! # Invariants
//! - A file that cannot be written ends no run: it is said once, and goes on when it can.

use std::path::Path;

use roundpipe_report::{EventFile, MetricsFile, Note, Record, Records, Report, Step, Timeline};

use crate::error::{Error, Result};
use crate::folder::RunFolder;

/// What sees a run as it goes.
pub trait Watcher {
    /// Something that a person should know, before the first step or at any time.
    fn note(&mut self, line: &str);
    /// Everything is ready, and the first step follows.
    fn begin(&mut self, overview: &Overview);
    /// A step, a validation, a sample, a save.
    fn record(&mut self, record: &Record);
}

/// A row as it will be trained: pieces of text, each learned or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownRow {
    /// What stands above it, such as `chosen`; may be empty.
    pub title: String,
    /// Its text in order.
    pub pieces: Vec<(String, bool)>,
}

/// What a person sees before the first step.
#[derive(Debug, Clone)]
pub struct Overview {
    /// What was found in the files, a line each.
    pub data: Vec<String>,
    /// Rows as they will be trained.
    pub rows: Vec<ShownRow>,
    /// Model, method, sizes.
    pub model: Vec<String>,
    /// Stages, memory by name, how long it takes at least.
    pub plan: Vec<String>,
    /// The first step, from 0, and the number of them.
    pub steps: (u64, u64),
}

/// Where records go.
pub(crate) struct Telling<'w> {
    watcher: &'w mut dyn Watcher,
    metrics: MetricsFile,
    events: EventFile,
    /// Whether the last record could not be written.
    is_failing: bool,
    report: Report,
}

impl<'w> Telling<'w> {
    /// Opens the files of a run; `resumed_at` is the step of the checkpoint that it goes on from, and
    /// `told_later` a step that the metrics lack if the run ended just behind its save.
    pub fn open(
        folder: &RunFolder,
        resumed_at: Option<u64>,
        told_later: Option<Step>,
        watcher: &'w mut dyn Watcher,
    ) -> Result<Self> {
        let path = folder.file("metrics.jsonl");
        let failed = |e: roundpipe_report::Error| match e {
            roundpipe_report::Error::Line { .. } => Error::Failed(format!(
                "{e}; correct or remove the line, or remove the file and lose the curves until now"
            )),
            e => Error::Failed(format!("{e}; move what is there away, or free the disk")),
        };
        let (metrics, report) = match resumed_at {
            Some(step) => {
                let mut metrics = MetricsFile::open_at(&path, step).map_err(failed)?;
                if let Some(record) = told_later
                    && !has_step(&path, record.step)
                {
                    metrics.write(&record.into()).map_err(failed)?;
                }
                let report = Report::from_file(&path).map_err(failed)?;
                (metrics, report)
            }
            None => (MetricsFile::create(&path).map_err(failed)?, Report::new()),
        };
        let events = EventFile::create(folder.file("events"), resumed_at).map_err(failed)?;
        Ok(Self {
            watcher,
            metrics,
            events,
            is_failing: false,
            report,
        })
    }

    /// What the page and the report show.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Passes a record to the files, the page and the watcher.
    pub fn record(&mut self, record: impl Into<Record>) {
        let record = record.into();
        let metrics = self.metrics.write(&record);
        let events = self.events.write(&record);
        let written = metrics.and(events);
        if let Err(error) = &written
            && !self.is_failing
        {
            self.watcher.note(&format!(
                "{error}; records are missing until it can be written"
            ));
        }
        self.is_failing = written.is_err();
        self.watcher.record(&record);
        self.report.push(record);
    }

    /// A line for the person, kept in the files too.
    pub fn note(&mut self, step: u64, line: String) {
        self.watcher.note(&line);
        self.record(Note { step, text: line });
    }

    /// A line for the person alone.
    pub fn say(&mut self, line: &str) {
        self.watcher.note(line);
    }

    pub fn begin(&mut self, overview: &Overview) {
        self.watcher.begin(overview);
    }

    pub fn timeline(&mut self, timeline: Timeline) {
        self.report.set_timeline(timeline);
    }
}

/// Whether a file of metrics has a step.
fn has_step(path: &Path, step: u64) -> bool {
    let is_it = |record: Record| matches!(record, Record::Step(found) if found.step == step);
    Records::open(path).is_ok_and(|records| records.flatten().any(is_it))
}
