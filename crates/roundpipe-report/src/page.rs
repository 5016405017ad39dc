//! The page: one file with its styles, its program and the run's data in it.
//!
//! The program (`page.html`) is the same for the report at the end and for the live page; the live
//! one asks its server for what is new. All text of models and users reaches it as JSON inside a
//! script element that is not run, in which no `<` stands, and is inserted as text.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roundpipe_files::AtomicFile;

use crate::error::Result;
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
        AtomicFile::of_bytes(path.as_ref(), self.html().as_bytes())?.finish()?;
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MetricsFile;
    use crate::record::{Note, Sample, Start, Step};
    use std::fs;

    fn sample(text: &str) -> Record {
        Sample {
            step: 1,
            prompt: text.to_owned(),
            text: text.to_owned(),
        }
        .into()
    }

    /// The data in a page, as its program reads it.
    fn data(html: &str) -> serde_json::Value {
        let opening = "<script type=\"application/json\" id=\"data\">";
        let (_, rest) = html.split_once(opening).expect("a place for data");
        let (json, _) = rest.split_once("</script>").expect("an end of data");
        serde_json::from_str(json).expect("JSON")
    }

    /// No text leaves its place: the page has the elements of an empty one, and the text is read
    /// back letter by letter.
    #[test]
    fn texts_cannot_leave_the_data() {
        let hostile = [
            "</script><script>alert(1)</script>",
            "<!--<script>",
            "-->",
            "</SCRIPT >",
            "@DATA@",
            "\u{2028}\u{0}\"\\\n",
            "{head}{0}",
        ];
        let empty = Report::new().html();
        for text in hostile {
            let report = Report::new();
            report.push(sample(text));
            let start = Start {
                model: text.to_owned(),
                plan: text.to_owned(),
                ..Start::default()
            };
            let report_of_both = Report::from_records([start.into(), sample(text)]);
            for report in [report, report_of_both] {
                let html = report.html();
                assert_eq!(
                    html.matches('<').count(),
                    empty.matches('<').count(),
                    "{text}"
                );
                let read = data(&html)["run"]["samples"][0]["text"].clone();
                assert_eq!(read, text);
            }
        }
        assert_eq!(PAGE.matches(DATA).count(), 1);
    }

    /// The page names no place but its own server's data.
    #[test]
    fn the_page_asks_for_nothing_else() {
        let own = "http://www.w3.org/2000/svg";
        assert!(!PAGE.replace(own, "").contains("://"), "an address");
        for call in [
            "innerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "import(",
            "src=",
        ] {
            assert!(!PAGE.contains(call), "{call}");
        }
        assert_eq!(PAGE.matches("fetch(").count(), 1);
    }

    /// A run that goes on shows its past, and clones show the same run.
    #[test]
    fn reports_show_the_past() {
        let name = format!("roundpipe-page-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("metrics.jsonl");
        let mut metrics = MetricsFile::create(&path).expect("created");
        let step = |step| {
            Record::from(Step {
                step,
                loss: step as f64,
                ..Step::default()
            })
        };
        let records = [Start::default().into(), step(1), step(2), step(3)];
        for record in &records {
            metrics.write(record).expect("written");
        }
        let report = Report::from_file(&path).expect("read");
        assert_eq!(report.html(), Report::from_records(records).html());
        let resumed = Start {
            resumed_at: Some(2),
            ..Start::default()
        };
        report.clone().push(resumed);
        let run = data(&report.html())["run"].clone();
        assert_eq!(run["steps"]["loss"], serde_json::json!([1.0, 2.0]));
        assert_eq!(run["resumed"], serde_json::json!([2]));
        let page = folder.join("report.html");
        report.write_html(&page).expect("written");
        assert_eq!(fs::read_to_string(&page).expect("read"), report.html());
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 2);
        fs::remove_dir_all(&folder).expect("removed");
        let error = report.write_html(&page).expect_err("no folder").to_string();
        assert!(error.contains("report.html"), "{error}");
    }

    /// Threads add records side by side.
    #[test]
    fn many_threads_push() {
        let report = Report::new();
        std::thread::scope(|scope| {
            for step in 0..4 {
                let report = report.clone();
                scope.spawn(move || {
                    for _ in 0..50 {
                        let text = String::new();
                        report.push(Note { step, text });
                    }
                });
            }
        });
        let notes = data(&report.html())["run"]["notes"].clone();
        assert_eq!(notes.as_array().expect("a list").len(), 200);
    }
}
