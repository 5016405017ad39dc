//! Bad data of a call, such as an index out of range: who reports it, and whom it concerns.
//!
//! Kernels report later than they are launched. A call therefore looks at the reports before it
//! hands out results and before it ends: every kernel that these depend on has run by then. A call
//! that takes values of another one looks at the other's reports as well.

use std::sync::{Arc, Mutex, MutexGuard};

use roundpipe_tensor::Faults;

use crate::error::{Error, Result, TaskPlace};
use crate::sync::lock;

/// The reports that a call looks at.
#[derive(Default)]
pub(crate) struct DataCheck(Mutex<WatchedReports>);

#[derive(Default)]
struct WatchedReports {
    own: Vec<Reports>,
    /// Reports of the calls whose values this one took. They are copied, not shared: two calls may
    /// take values of each other.
    taken: Vec<Reports>,
}

/// Where the kernels of one job report.
#[derive(Clone)]
struct Reports {
    place: TaskPlace,
    faults: Arc<Faults>,
}

impl Reports {
    fn error(&self) -> Option<Error> {
        let cause = self.faults.check().err()?;
        Some(Error::Task {
            place: Box::new(self.place.clone()),
            cause: Box::new(Error::Tensor(cause)),
        })
    }
}

impl DataCheck {
    fn lock(&self) -> MutexGuard<'_, WatchedReports> {
        lock(&self.0)
    }

    /// Kernels of a job at `place` report to `faults`.
    pub fn watch(&self, place: TaskPlace, faults: Arc<Faults>) {
        self.lock().own.push(Reports { place, faults });
    }

    /// Values of the call that `source` belongs to are used.
    pub fn depend_on(&self, source: &DataCheck) {
        // The two locks are never held together.
        let theirs: Vec<Reports> = {
            let state = source.lock();
            state.own.iter().chain(&state.taken).cloned().collect()
        };
        let mut state = self.lock();
        for reports in theirs {
            let is_known = state
                .own
                .iter()
                .chain(&state.taken)
                .any(|known| Arc::ptr_eq(&known.faults, &reports.faults));
            if !is_known {
                state.taken.push(reports);
            }
        }
    }

    /// Forgets all reports: the call has ended well.
    pub fn clear(&self) {
        *self.lock() = WatchedReports::default();
    }

    /// # Errors
    /// The first report, with its place; [`Error::Cancelled`] for that of another call.
    pub fn check(&self) -> Result<()> {
        let state = self.lock();
        // Its own first: they name the task, where others only say that an input is bad.
        if let Some(error) = state.own.iter().find_map(Reports::error) {
            return Err(error);
        }
        let Some(error) = state.taken.iter().find_map(Reports::error) else {
            return Ok(());
        };
        let why = format!("its input comes from a call that failed: {}", error);
        Err(Error::Cancelled { why })
    }
}
