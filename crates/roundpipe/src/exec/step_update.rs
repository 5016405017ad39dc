//! The rule's update of all layers of a model: which comes first, and what may wait.
//!
//! Layers are updated from the first to the last. At lag 0 the next call's forward follows behind them,
//! so what it needs comes first: of a table in front of the model the rows that it reads
//! ([`super::early_rows`]), and of every layer the weights. Moments may come behind all weights, beside
//! the backward ([`LateMoments`]), where there is time for the memory that this moves twice
//! ([`WeightsFirst`]). An eighth of the threads is left to those that launch kernels and start copies.
//! At lag 1 an update has time, and takes few threads ([`Pace`]).
//!
//! Refused: steps by a function of the user.
//!
//! # Invariants
//! - An update that has begun is finished, however long a user holds a parameter.
//! - No bit depends on the order.
//! - When it is finished, moments are written and gradients are read.

use std::cmp::Reverse;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::early_rows::{TABLE, TableUpdate};
use super::optimizer_thread::{OptimizerOptions, OptimizerThread, UpdateTime};
use super::pace::{Pace, PacedUpdate, WeightsFirst};
use crate::error::Result;
use crate::sync::lock;
use crate::update::{Apply, LateMoments};
use crate::version::Abort;

/// How layers are updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UpdateOrder {
    /// They are left as they are.
    Skip,
    /// Beside the next step: lag 1.
    Beside,
    /// Ahead of the next forward: lag 0. Of a table in front, rows that calls ask for come first, if
    /// that is possible and a call asks.
    Ahead { by_rows: bool },
}

/// How long updates take, and what follows from it for the next.
pub(super) struct UpdateTiming {
    pace: Pace,
    weights_first: WeightsFirst,
    /// How many threads an update takes that the next forward waits for.
    threads_ahead: usize,
    /// When the last update began.
    last: Option<Instant>,
}

impl UpdateTiming {
    /// For updates on at most so many threads.
    pub fn new(threads: usize, options: OptimizerOptions) -> Self {
        let OptimizerOptions {
            weights_first,
            shares_cores,
            ..
        } = options;
        // Threads that launch kernels and start copies are not to wait for a core: with 14 of 16 a
        // step was 0.9% shorter than with all (benches/results/2026-11-18-h200-link.md, run 2).
        let left = if shares_cores { 0 } else { threads / 8 };
        // A second pass would take the cores that compute.
        let never_first = shares_cores.then_some(false);
        Self {
            pace: Pace::new(threads),
            weights_first: WeightsFirst::new(weights_first.or(never_first)),
            threads_ahead: threads - left,
            last: None,
        }
    }

    /// An update begins: when, and how long behind the last.
    fn begin(&mut self) -> (Instant, Option<f64>) {
        let start = Instant::now();
        let last = self.last.replace(start);
        (start, last.map(|last| ms(start - last)))
    }
}

/// One update under way.
pub(super) struct StepUpdate<'a> {
    thread: &'a OptimizerThread,
    apply: &'a Apply,
    never: &'a Abort,
    /// Of one that the next forward waits for: when it began, and with which threads.
    ahead: Option<(Instant, PacedUpdate<'a>)>,
    /// The moments that are left; `None` where layers are updated whole.
    late: Option<Vec<LateMoments<'a>>>,
    /// Layers of which some elements kept their value because the new one was not finite.
    partial: Vec<usize>,
}

impl<'a> StepUpdate<'a> {
    /// `never` is not set.
    pub fn new(thread: &'a OptimizerThread, apply: &'a Apply, never: &'a Abort) -> Self {
        Self {
            thread,
            apply,
            never,
            ahead: None,
            late: None,
            partial: Vec::new(),
        }
    }

    /// Updates the weights of all layers, and calls `begun` before the first is about to change: from
    /// there on the step is made, and a caller at lag 0 may go on. Returns the first layer of which
    /// some elements kept their value because the new one was not finite. [`StepUpdate::finish`] must
    /// follow, whatever came of this.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn run(&mut self, order: UpdateOrder, begun: impl FnOnce()) -> Result<Option<usize>> {
        let version = self.apply.next_version;
        // Before the caller goes on, who may ask for rows at once.
        let by_rows = order == UpdateOrder::Ahead { by_rows: true }
            && self.thread.model.early_rows.open(version);
        begun();
        match order {
            UpdateOrder::Skip => self.skip_layers()?,
            UpdateOrder::Beside => self.update_beside()?,
            UpdateOrder::Ahead { .. } => self.update_ahead(by_rows)?,
        }
        Ok(self.partial.iter().copied().min())
    }

    /// Writes the moments that are left, in the order in which the next backward needs the memory of
    /// their gradients.
    ///
    /// # Errors
    /// When the system has no memory for a sum of gradients.
    pub fn finish(self) -> Result<()> {
        let Some((start, update)) = &self.ahead else {
            return Ok(());
        };
        let mut late = self.late.unwrap_or_default();
        late.sort_by_key(|moments| Reverse(moments.last_user()));
        for moments in late {
            let start = self.thread.trace.now_ns();
            let layer = moments.layer();
            moments.write()?;
            note(self.thread, self.apply, (layer, " moments"), start);
        }
        if is_typical(self.apply) {
            let has_time = !update.was_hurried();
            let update_ms = has_time.then(|| ms(start.elapsed()));
            lock(&self.thread.timing).weights_first.record(update_ms);
        }
        Ok(())
    }

    fn layers(&self) -> Range<usize> {
        0..self.thread.model.store.layers().len()
    }

    fn skip_layers(&self) -> Result<()> {
        let thread = self.thread;
        for layer in self.layers() {
            let start = thread.trace.now_ns();
            let next = self.apply.next_version;
            thread.patiently(None, || thread.model.store.skip(layer, next, self.never))?;
            self.note(layer, start);
        }
        Ok(())
    }

    /// With as few threads as take long enough ([`Pace`]).
    fn update_beside(&mut self) -> Result<()> {
        let thread = self.thread;
        let mut timing = lock(&thread.timing);
        let (start, step_ms) = timing.begin();
        let update = thread.urgency.begin(timing.pace.threads());
        self.update_layers()?;
        if is_typical(self.apply) && !update.was_hurried() {
            timing.pace.record(step_ms, ms(start.elapsed()));
        }
        Ok(())
    }

    /// What the next forward waits for first.
    fn update_ahead(&mut self, by_rows: bool) -> Result<()> {
        let thread = self.thread;
        let mut timing = lock(&thread.timing);
        let (start, step_ms) = timing.begin();
        self.ahead = Some((start, thread.urgency.begin(timing.threads_ahead)));
        self.late = timing.weights_first.decide(step_ms).then(Vec::new);
        if by_rows {
            self.update_by_rows()
        } else {
            self.update_layers()
        }
    }

    fn update_layers(&mut self) -> Result<()> {
        self.layers().try_for_each(|layer| self.update_layer(layer))
    }

    /// With the table in front put off: the rows that calls wait for are updated between the other
    /// layers, and the rest behind them.
    fn update_by_rows(&mut self) -> Result<()> {
        let thread = self.thread;
        let store = &thread.model.store;
        let weights_first = self.late.is_some();
        let table = thread.patiently(None, || {
            store.open_table(TABLE, self.apply, weights_first, self.never)
        })?;
        let mut table = Some(TableUpdate::new(table));
        let updated = self.layers().try_for_each(|layer| {
            // The layer behind the table first: a caller needs a moment to ask for its rows.
            if layer != TABLE {
                self.update_layer(layer)?;
            }
            let Some(update) = &mut table else {
                return Ok(());
            };
            let wants_all = self.serve_rows(update, layer + 1)?;
            match table.take_if(|_| wants_all) {
                Some(update) => self.finish_table(update),
                None => Ok(()),
            }
        });
        // A step that has begun is finished, also where a layer could not be updated.
        if let Some(update) = table {
            self.finish_table(update)?;
        }
        updated
    }

    /// Updates the rows that are due now that all layers before `layer` are updated. Whether a call
    /// waits for the whole table.
    fn serve_rows(&self, update: &mut TableUpdate<'_>, layer: usize) -> Result<bool> {
        let start = self.thread.trace.now_ns();
        let served = update.serve(&self.thread.model.early_rows, layer)?;
        if served.microbatches > 0 {
            update.rows_ms += self.ms_since(start);
            self.note(TABLE, start);
        }
        Ok(served.wants_all)
    }

    /// Updates what is left of the table and publishes it.
    fn finish_table(&mut self, update: TableUpdate<'a>) -> Result<()> {
        let start = self.thread.trace.now_ns();
        let rows_ms = update.rows_ms;
        let done = update.finish(&self.thread.model.early_rows)?;
        self.took(TABLE, done);
        self.note(TABLE, start);
        if is_typical(self.apply) {
            // Where rows came first, a forward waits for no more than those.
            let ms = if rows_ms > 0.0 {
                rows_ms
            } else {
                self.ms_since(start)
            };
            lock(&self.thread.times).push(UpdateTime { layer: TABLE, ms });
        }
        Ok(())
    }

    fn update_layer(&mut self, layer: usize) -> Result<()> {
        let thread = self.thread;
        let store = &thread.model.store;
        let (apply, never) = (self.apply, self.never);
        let start = thread.trace.now_ns();
        let weights_first = self.late.is_some();
        let done = thread.patiently(None, || {
            if weights_first {
                return store.apply_weights(layer, apply, never);
            }
            Ok((store.apply(layer, apply, never)?, None))
        })?;
        self.took(layer, done);
        self.note(layer, start);
        if is_typical(self.apply) && store.layer(layer).own_trainable().next().is_some() {
            let ms = self.ms_since(start);
            lock(&thread.times).push(UpdateTime { layer, ms });
        }
        Ok(())
    }

    /// A layer is updated, perhaps but for its moments.
    fn took(&mut self, layer: usize, (kept, late): (bool, Option<LateMoments<'a>>)) {
        if kept {
            self.partial.push(layer);
        }
        if let Some(all) = &mut self.late {
            all.extend(late);
        }
    }

    fn note(&self, layer: usize, start_ns: u64) {
        note(self.thread, self.apply, (layer, ""), start_ns);
    }

    fn ms_since(&self, start_ns: u64) -> f64 {
        (self.thread.trace.now_ns() - start_ns) as f64 / 1e6
    }
}

/// Whether its times say something about the others: the first update fills memory that the system has
/// only promised.
fn is_typical(apply: &Apply) -> bool {
    apply.step > 1
}

fn note(thread: &OptimizerThread, apply: &Apply, (layer, what): (usize, &str), start_ns: u64) {
    thread.note(layer, what, apply.next_version, start_ns);
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
