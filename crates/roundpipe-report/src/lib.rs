//! What a training run leaves for people: a metrics file, TensorBoard events, a live page, a report.
//!
//! ```text
//!            .-> MetricsFile   metrics.jsonl, one record a line
//!  Record ---+-> EventFile     events.out.tfevents.*, for TensorBoard
//!            '-> Report -----> report.html, one self-contained file
//!  Span ---> Timeline --^ '--> Server, the same page while the run goes on
//! ```
//! A [`Record`] is what happened: the run began, a step was made, a loss was evaluated. The training
//! loop makes each once and gives it to all three. A [`Report`] keeps what a page shows, in bounded
//! memory; a [`Server`] shows it on 127.0.0.1 to those who have its token.
//!
//! Nothing here measures, trains or decides anything, and nothing but the server opens a connection.
//!
//! # Invariants
//! - A reader of a file sees whole records: files grow by whole lines, pages are renamed into place.
//! - Text of models and users is data: the page inserts it as text, never as markup.
//! - The page asks for nothing but its own data.
//! - Memory is bounded however long the run is and whatever a file claims.
//!
//! ```
//! use roundpipe_report::{MetricsFile, Report, Start, Step};
//! # fn main() -> roundpipe_report::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("roundpipe-report-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).expect("a temporary folder");
//! let mut metrics = MetricsFile::create(folder.join("metrics.jsonl"))?;
//! let report = Report::new();
//! let records = [
//!     Start { model: "Qwen3-1.7B".into(), steps: 1, ..Start::default() }.into(),
//!     Step { step: 1, loss: 2.5, lr: 1e-5, ..Step::default() }.into(),
//! ];
//! for record in records {
//!     metrics.write(&record)?;
//!     report.push(record);
//! }
//! report.write_html(folder.join("report.html"))?;
//! # std::fs::remove_dir_all(&folder).expect("removed");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod error;

mod record;

mod files;

mod metrics;

mod events;

mod timeline;

mod series;

mod page;

mod server;

pub use error::{Error, Result};
pub use events::EventFile;
pub use metrics::{MetricsFile, Records, read};
pub use page::Report;
pub use record::{End, Eval, Memory, Note, Place, Record, Sample, Save, Start, Step};
pub use server::Server;
pub use timeline::{Timeline, TimelineLane, TimelineSpan};
