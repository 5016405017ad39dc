//! What a caller does when something failed before its turn.
//!
//! A failure puts the engine back: the weights and the optimizer's state are as before the step that
//! failed, its gradients are dropped, and the random stream is where it was when the first call of
//! that step was submitted.
//!
//! A kept forward survives failures of later calls and steps. If it fails itself afterwards, the
//! stream goes back at least as far as those failures put it: calls submitted from there on may fail
//! with the forward or have ended before, and the stream must not depend on which.

use std::sync::Arc;

use super::core::{Core, Notes, Sequence};
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::optimizer_thread::Outcome;

/// Steps whose places in the random stream are remembered: more than can be under way.
const HISTORY: usize = 8;

impl Core {
    /// Returns what failed since the last call, once, and puts the engine in order.
    pub(super) fn check(&self, sequence: &mut Sequence) -> Result<()> {
        if self.has_failed(sequence) {
            return self.recover(sequence).map_or(Ok(()), Err);
        }
        // Each call is asked once: one that fails at this moment stays for the next look.
        let watched = std::mem::take(&mut sequence.watched);
        for call in watched {
            if call.has_succeeded() {
                sequence.trained |= call.spec.training;
                self.recorder
                    .learn(&call, &self.parts[call.spec.part].planner);
            } else {
                sequence.watched.push(call);
            }
        }
        for update in self.optimizer.take_times() {
            for part in &self.parts {
                part.planner.record_update(update.layer, update.ms);
            }
        }
        let mut notes = self.notes();
        sequence
            .outcomes
            .retain(|outcome| !notes.note_step(outcome));
        drop(notes);
        self.log_warnings();
        // Which version calls read depends on the last step alone.
        while sequence.history.len() > HISTORY
            && let Some(step) = sequence.history.pop_front()
        {
            sequence.earliest_number = step.number;
        }
        Ok(())
    }

    pub(super) fn has_failed(&self, sequence: &Sequence) -> bool {
        let mut outcomes = sequence.outcomes.iter();
        let mut calls = sequence.watched.iter();
        outcomes.any(|outcome| outcome.has_failed()) || calls.any(|call| call.has_failed())
    }

    /// A caller has met a failed call: puts the engine in order and says why it failed.
    pub fn failed(&self, seen: Error) -> Error {
        match self.recover(&mut self.turn()) {
            // Steps that are undone are the worse news. Their cause is what this caller has seen,
            // unless that is a consequence itself.
            Some(Error::Undone { first, cause }) => {
                let cause = if seen.is_secondary() {
                    cause
                } else {
                    Box::new(seen)
                };
                Error::Undone { first, cause }
            }
            Some(first) if seen.is_secondary() => first,
            _ => seen,
        }
    }

    /// Waits until nothing moves, then forgets what failed. Returns the error that no caller has
    /// received yet.
    pub(super) fn recover(&self, sequence: &mut Sequence) -> Option<Error> {
        // Work that still runs may write gradients, so nothing is forgotten before it has ended.
        self.wait_quiet();
        // Steps behind a failed one have failed calls, so all of them end.
        sequence.wait_steps();
        self.ring.drain();
        let watched = std::mem::take(&mut sequence.watched);
        let (failed_calls, others): (Vec<Arc<Call>>, Vec<Arc<Call>>) =
            watched.into_iter().partition(|call| call.has_failed());
        sequence.watched = others;
        let outcomes = std::mem::take(&mut sequence.outcomes);
        for outcome in &outcomes {
            // Steps that were made before the failure stay made, and their warnings count.
            self.notes().note_step(outcome);
        }
        self.log_warnings();
        let failed_steps: Vec<Arc<Outcome>> = outcomes
            .into_iter()
            .filter(|outcome| outcome.has_failed())
            .collect();
        self.go_back(sequence, &failed_calls, &failed_steps);
        first_error(&failed_calls, &failed_steps)
    }

    /// Drops the gradients since the last step, because those of a call among them are not all
    /// there.
    pub fn drop_gradients(&self) {
        let mut sequence = self.turn();
        self.wait_quiet();
        let calls = std::mem::take(&mut sequence.since_step);
        self.go_back(&mut sequence, &calls, &[]);
        self.model.store.clear_gradients();
    }

    /// Puts the counters back to before what failed, and drops gradients that belong to it.
    fn go_back(
        &self,
        sequence: &mut Sequence,
        failed_calls: &[Arc<Call>],
        failed_steps: &[Arc<Outcome>],
    ) {
        // Steps behind the first that failed would start from weights that were not made, so they
        // have failed as well.
        if let Some(failed) = failed_steps.iter().map(|step| step.version).min() {
            sequence.steps = failed - 1;
            sequence.history.retain(|step| step.version < failed);
            self.model.store.set_asked(sequence.steps);
        }
        let mut first = sequence.number;
        for call in failed_calls {
            first = first.min(call.first_number());
        }
        for step in failed_steps {
            first = first.min(step.number);
        }
        let mut since_step = sequence.since_step.iter();
        // A sum of gradients that lacks a call would train silently wrong, so all of it goes.
        if !failed_steps.is_empty() || since_step.any(|call| call.has_failed()) {
            for call in sequence.since_step.drain(..) {
                first = first.min(call.first_number());
            }
            self.model.store.clear_gradients();
        }
        // A kept forward that failed may be older than the last step, which keeps its random
        // numbers.
        let last_step = sequence.history.back();
        let earliest = last_step.map_or(sequence.earliest_number, |step| step.number);
        sequence.number = first.max(earliest);
        for call in self.call_list.active().iter().chain(&sequence.since_step) {
            call.note_went_back(sequence.number);
        }
    }
}

/// The error to return: the first that is not a consequence of another, or else the first.
fn first_error(failed_calls: &[Arc<Call>], failed_steps: &[Arc<Outcome>]) -> Option<Error> {
    let mut first_undone: Option<u64> = None;
    let mut errors = Vec::new();
    // Steps before calls: a step takes the error of the call that it failed for.
    for error in failed_steps.iter().filter_map(|step| step.take_error()) {
        match error {
            Error::Undone { first, cause } => {
                first_undone = Some(first_undone.map_or(first, |known| known.min(first)));
                errors.push(*cause);
            }
            other => errors.push(other),
        }
    }
    errors.extend(failed_calls.iter().filter_map(|call| call.take_error()));
    let cause = errors.iter().position(|error| !error.is_secondary());
    let error = errors.into_iter().nth(cause.unwrap_or(0))?;
    Some(match first_undone {
        Some(first) => Error::Undone {
            first,
            cause: Box::new(error),
        },
        None => error,
    })
}

impl Notes {
    /// Notes a step that was made and was not finite; whether it was made.
    fn note_step(&mut self, outcome: &Outcome) -> bool {
        let Some(report) = outcome.report() else {
            return false;
        };
        if !report.skipped && !report.partial {
            self.nonfinite_in_a_row = 0;
            return true;
        }
        // Left out because the user said so (`skip_step`, `zero_grad`): nothing is wrong.
        if report.skipped && report.grad_norm.is_finite() {
            return true;
        }
        self.nonfinite_steps += 1;
        self.nonfinite_in_a_row += 1;
        // For users who ask for no report: once for a row of them.
        if self.nonfinite_in_a_row == 1 {
            let what = if report.skipped {
                "was skipped"
            } else {
                "left some weights out"
            };
            self.warn(format!(
                "optimizer step {} {what}, because it was not finite (gradient norm {})",
                outcome.version, report.grad_norm
            ));
        }
        true
    }
}
