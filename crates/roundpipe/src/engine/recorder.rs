//! What calls took: measured times for the planner, spans for the trace.

use std::sync::{Arc, Mutex};

use roundpipe_tensor::LaneKind;
use roundpipe_tensor::transfer::CopyRecord;

use super::planner::Planner;
use crate::cost::Phase;
use crate::exec::call::{Call, Timed};
use crate::exec::ring::Ring;
use crate::sync::lock;
use crate::trace::{Category, Lane, Span, Trace, Track};

/// Reads the clocks of calls that have ended.
pub(super) struct CallRecorder {
    ring: Ring,
    trace: Arc<Trace>,
    /// Copies whose ends were not known yet.
    copies: Mutex<Vec<PendingCopy>>,
}

struct PendingCopy {
    call: u64,
    worker: usize,
    copy: CopyRecord,
}

impl CallRecorder {
    pub fn new(ring: Ring, trace: Arc<Trace>) -> Self {
        Self {
            ring,
            trace,
            copies: Mutex::default(),
        }
    }

    /// Copies are noted from now on if the trace is on or the planner wants to know how fast they
    /// are.
    pub fn begin_call(&self, wanted: bool) {
        self.ring.log_copies(wanted || self.trace.is_on());
    }

    /// Takes the times of a call that has ended.
    pub fn learn(&self, call: &Call, planner: &Planner) {
        planner.begin_learning(call.spec.trains);
        for piece in call.take_times() {
            // A lane that failed has not passed all its events.
            let (Some(start), Some(end)) = (piece.from.ns(), piece.to.ns()) else {
                continue;
            };
            // Plans know layers; the time of a loss is seen in traces only.
            if let (Some(layer), Some(phase)) = (piece.layer, phase_of(piece.category)) {
                planner.record(
                    piece.worker,
                    layer,
                    phase,
                    end.saturating_sub(start) as f64 / 1e6,
                );
            }
            self.trace.record(|| self.span(call, &piece, start, end));
        }
        self.take_copies(call.spec.id);
        self.note_copies(planner);
    }

    /// Takes the copies that were noted since the last call.
    fn take_copies(&self, id: u64) {
        // Copies of other calls on the same workers are among them; the log does not tell them
        // apart, so they count for this call.
        let taken = self.ring.take_copies();
        let pending = taken.into_iter().map(|(worker, copy)| PendingCopy {
            call: id,
            worker,
            copy,
        });
        self.copies().extend(pending);
    }

    /// Waits for the copies that were noted, so that all of them are in the trace.
    pub fn finish(&self, planner: &Planner) {
        // Draining waits for every lane, so not without need: the planner does without the last
        // times, a trace must be whole.
        if self.trace.is_on() && !self.copies().is_empty() {
            self.ring.drain();
            self.note_copies(planner);
        }
    }

    fn copies(&self) -> std::sync::MutexGuard<'_, Vec<PendingCopy>> {
        lock(&self.copies)
    }

    /// Records the copies whose ends the lanes have passed; the others stay for the next look.
    fn note_copies(&self, planner: &Planner) {
        self.copies().retain(|pending| {
            let copy = &pending.copy;
            let (Some(start), Some(end)) = (copy.from.ns(), copy.to.ns()) else {
                return true;
            };
            let ms = end.saturating_sub(start) as f64 / 1e6;
            planner.record_copy(copy.lane, copy.bytes, ms);
            self.trace.record(|| self.copy_span(pending, start, end));
            false
        });
    }

    fn track(&self, worker: usize, lane: Lane) -> Track {
        Track {
            worker,
            worker_name: self.ring.workers()[worker].device().id().to_string(),
            lane,
        }
    }

    fn copy_span(&self, pending: &PendingCopy, start_ns: u64, end_ns: u64) -> Span {
        let copy = &pending.copy;
        let lane = match copy.lane {
            LaneKind::Compute => Lane::Compute,
            LaneKind::ParamUpload => Lane::ParamUpload,
            LaneKind::ActivationUpload => Lane::ActivationUpload,
            LaneKind::ActivationDownload => Lane::ActivationDownload,
            LaneKind::GradDownload => Lane::GradDownload,
        };
        Span {
            track: self.track(pending.worker, lane),
            name: copy.what.clone(),
            category: Category::Transfer,
            start_ns,
            end_ns,
            call: pending.call,
            stage: None,
            layer: None,
            microbatch: None,
            bytes: Some(copy.bytes),
        }
    }

    fn span(&self, call: &Call, piece: &Timed, start_ns: u64, end_ns: u64) -> Span {
        let layers = &call.spec.model.layers;
        let name = match piece.layer {
            Some(layer) => layers[layer].0.clone(),
            None => "loss".to_owned(),
        };
        Span {
            track: self.track(piece.worker, Lane::Compute),
            name,
            category: piece.category,
            start_ns,
            end_ns,
            call: call.spec.id,
            stage: Some(piece.stage),
            layer: piece.layer,
            microbatch: Some(piece.microbatch),
            bytes: None,
        }
    }
}

fn phase_of(category: Category) -> Option<Phase> {
    match category {
        Category::Forward | Category::Fused => Some(Phase::Forward),
        Category::Recompute => Some(Phase::Recompute),
        Category::Backward => Some(Phase::Backward),
        _ => None,
    }
}
