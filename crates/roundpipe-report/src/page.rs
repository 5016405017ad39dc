//! The page: one file with its styles, its program and the run's data in it.
//!
//! The program (`page.html`) is the same for the report at the end and for the live page; the live
//! one asks its server for what is new. All text of models and users reaches it as JSON inside a
//! script element that is not run, in which no `<` stands, and is inserted as text.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::files::Replacement;
use crate::metrics::Records;
use crate::record::Record;
use crate::series::{Series, Snapshot};
use crate::timeline::Timeline;

const PAGE: &str = include_str!("page.html");

/// Where the data of a run belongs in the page.
const DATA: &str = "@DATA@";

/// A run as people see it. Clones show the same run.
#[derive(Clone, Default)]
pub struct Report {
    // Held to add a record or to copy what a page shows, never while text is made or sent.
    series: Arc<Mutex<Series>>,
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report").finish_non_exhaustive()
    }
}

impl Report {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// One of a run that has a past.
    pub fn from_records(records: impl IntoIterator<Item = Record>) -> Self {
        let report = Self::new();
        for record in records {
            report.push(record);
        }
        report
    }

    /// One of a run whose past stands in a metrics file of any size.
    ///
    /// # Errors
    /// What the file system says; a line that is no record.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let report = Self::new();
        for record in Records::open(path)? {
            report.push(record?);
        }
        Ok(report)
    }

    /// Adds a record. The start of a resumed run takes away what came behind its checkpoint, that of
    /// a new one everything.
    pub fn push(&self, record: impl Into<Record>) {
        self.series().push(record.into());
    }

    /// Shows what the devices did in the last step.
    pub fn set_timeline(&self, timeline: Timeline) {
        self.series().set_timeline(timeline);
    }

    /// The page, with everything in it.
    pub fn html(&self) -> String {
        page(&self.since(0).json(), false)
    }

    /// Writes [`Report::html`] to a file: under another name first, so that there is never half a
    /// page.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write_html(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut replacement = Replacement::begin(path.as_ref())?;
        replacement.write(self.html().as_bytes())?;
        replacement.finish()
    }

    /// The page that goes on asking for what is new.
    pub(crate) fn live_html(&self) -> String {
        page(&self.since(0).json(), true)
    }

    /// What came behind a change.
    pub(crate) fn since(&self, order: u64) -> Snapshot {
        self.series().since(order)
    }

    fn series(&self) -> MutexGuard<'_, Series> {
        // A panic of another thread between two records leaves a series that can be shown.
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn page(run: &str, is_live: bool) -> String {
    let (head, tail) = PAGE
        .split_once(DATA)
        .expect("the page has a place for data");
    let run = run.replace('<', "\\u003c");
    format!("{head}{{\"live\":{is_live},\"run\":{run}}}{tail}")
}
