//! Proof on the user's machine that how a model is run leaves no trace in what it learns:
//! `roundpipe verify`.
//!
//! ```text
//! Subject (what is trained)  x  Way (how it is run)  ->  Trail (all that it leaves)
//! two trails  ->  Comparison: over how many values, how many differ, beside which bound
//! ```
//! Exact claims are compared bit by bit. Claims with a tolerance name their bound, which is fixed
//! before anything runs or is a noise floor that was measured the same way. A run that fails, or a
//! broken order of copies that the simulated device reports, fails its comparison and not the whole.
//!
//! Refused: models that do not fit this machine even in part.
//!
//! # Invariants
//! - Every run of a subject starts from the same weights, and takes the same batches.
//! - A comparison over no values never passes.

mod checks;
mod plain;
mod subject;
mod trail;
mod way;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use roundpipe_files::AtomicFile;
use serde::Serialize;

use crate::error::{Error, Result};
use subject::Subject;
pub use trail::{Counted, Kind};
use way::Place;

/// What to verify.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// A folder, hub id or preset; small models that are built in unless given.
    pub model: Option<String>,
    /// Where to run, as for every command.
    pub devices: Option<String>,
    /// Smaller models and fewer cases.
    pub quick: bool,
}

/// One claim, and what became of it.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The claim, such as `1 worker = 3 workers`.
    pub claim: String,
    /// What was trained.
    pub subject: String,
    /// Where it ran.
    pub place: String,
    /// How it came out.
    pub outcome: Outcome,
    /// How many values of each kind were compared, and how many of them differ.
    pub counted: Vec<Counted>,
    /// The largest difference, where differences are allowed.
    pub largest: Option<f64>,
    /// The largest that is allowed; differences of exact claims have none.
    pub bound: Option<f64>,
    /// What else there is to say: what a figure means, why it was skipped, how it failed.
    pub note: Option<String>,
    /// What it took.
    pub seconds: f64,
}

/// How a comparison came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The claim holds.
    Holds,
    /// It does not.
    Differs,
    /// There is nothing here to compare with.
    Skipped,
}

impl Comparison {
    /// Values that were compared.
    pub fn values(&self) -> u64 {
        self.counted.iter().map(|counted| counted.values).sum()
    }

    /// Values that differ.
    pub fn differ(&self) -> u64 {
        self.counted.iter().map(|counted| counted.differ).sum()
    }
}

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether every claim holds that was not skipped.
    pub holds: bool,
    /// What was trained, a line for each subject.
    pub subjects: Vec<String>,
    /// What the claims are, one by one.
    pub comparisons: Vec<Comparison>,
    /// Values that were compared, of all claims.
    pub values: u64,
    /// What it took.
    pub seconds: f64,
}

impl Report {
    /// Writes it as JSON.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &std::path::Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::Failed(format!("the report cannot be written: {e}")))?;
        Ok(AtomicFile::of_bytes(path, &text)?.finish()?)
    }
}

/// What a caller sees while it goes on.
pub trait VerifyWatcher {
    /// A line about what will be compared.
    fn note(&mut self, line: &str);

    /// A comparison that has ended.
    fn compared(&mut self, comparison: &Comparison);
}

/// Runs all comparisons.
///
/// # Errors
/// For a model or devices that cannot be used, and when `stop` was set. A claim that does not hold
/// is no error.
pub fn verify(
    options: &VerifyOptions,
    watcher: &mut dyn VerifyWatcher,
    stop: &AtomicBool,
) -> Result<Report> {
    let start = Instant::now();
    let place = Place::open(options.devices.as_deref())?;
    let subjects = Subject::choose(options)?;
    let lines: Vec<String> = subjects.iter().map(Subject::line).collect();
    watcher.note(&place.line());
    lines.iter().for_each(|line| watcher.note(line));
    let mut comparisons = Vec::new();
    for subject in &subjects {
        for check in checks::all(&place) {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Failed("interrupted".into()));
            }
            let comparison = check.run(subject, &place);
            watcher.compared(&comparison);
            comparisons.push(comparison);
        }
    }
    Ok(Report {
        holds: comparisons
            .iter()
            .all(|comparison| comparison.outcome != Outcome::Differs),
        subjects: lines,
        values: comparisons.iter().map(Comparison::values).sum(),
        comparisons,
        seconds: start.elapsed().as_secs_f64(),
    })
}

#[cfg(test)]
mod tests;
